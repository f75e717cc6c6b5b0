//! Who may write a candidate: nothing that others can change is opened.
//!
//! The rule covers the file, its own directory (of the name and, through links, of the target) and, for a
//! directory that everybody may write, every ancestor without the sticky bit: such a directory can be swapped
//! whole. The file is opened once here and everything later works on that handle.

use std::fs::{File, Metadata, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::code::{Code, Refusal};
use crate::sys;

const WORLD_WRITABLE: u32 = 0o002;
const GROUP_WRITABLE: u32 = 0o020;
const STICKY: u32 = 0o1000;

/// A candidate whose path passed the rules, open for reading.
#[derive(Debug)]
pub struct Opened {
    /// Links resolved.
    pub canonical: PathBuf,
    /// The file.
    pub file: File,
}

/// Opens `path` if it is a regular file and nobody else may write it.
///
/// # Errors
/// `not_a_file`, `unreadable`, `path_world_writable` or `path_group_writable`.
pub fn open(path: &Path) -> Result<Opened, Refusal> {
    let unreadable = |e: std::io::Error| Code::Unreadable.because(format!("cannot be opened: {e}"));
    let canonical = path.canonicalize().map_err(unreadable)?;
    regular(&canonical.metadata().map_err(unreadable)?)?;
    // Not waiting matters: a pipe that takes the file's place must not hang the scan.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(&canonical)
        .map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    regular(&metadata)?;
    let own_group = sys::effective_group();
    writable("the file", path, &metadata, own_group)?;
    directories(path, own_group)?;
    if canonical != path {
        directories(&canonical, own_group)?;
    }
    Ok(Opened { canonical, file })
}

fn regular(metadata: &Metadata) -> Result<(), Refusal> {
    if metadata.is_file() {
        return Ok(());
    }
    let found = if metadata.is_dir() {
        "a directory"
    } else {
        "a special file"
    };
    Err(Code::NotAFile.because(format!("expected a regular file, found {found}")))
}

fn directories(path: &Path, own_group: u32) -> Result<(), Refusal> {
    for (i, dir) in path
        .ancestors()
        .skip(1)
        .filter(|d| !d.as_os_str().is_empty())
        .enumerate()
    {
        let metadata = dir.metadata().map_err(|e| {
            Code::Unreadable.because(format!("directory {} cannot be read: {e}", dir.display()))
        })?;
        if i == 0 {
            writable("its directory", dir, &metadata, own_group)?;
        } else if metadata.mode() & WORLD_WRITABLE != 0 && metadata.mode() & STICKY == 0 {
            return Err(Code::PathWorldWritable.because(format!(
                "everybody may write the ancestor {} (mode {:04o}, no sticky bit)",
                dir.display(),
                metadata.mode() & 0o7777
            )));
        }
    }
    Ok(())
}

fn writable(what: &str, path: &Path, metadata: &Metadata, own_group: u32) -> Result<(), Refusal> {
    let mode = metadata.mode() & 0o7777;
    if mode & WORLD_WRITABLE != 0 {
        return Err(Code::PathWorldWritable.because(format!(
            "everybody may write {what} {} (mode {mode:04o})",
            path.display()
        )));
    }
    if mode & GROUP_WRITABLE != 0 && metadata.gid() != own_group {
        return Err(Code::PathGroupWritable.because(format!(
            "group {} may write {what} {} (mode {mode:04o}), expected no group but your own ({own_group})",
            metadata.gid(),
            path.display()
        )));
    }
    Ok(())
}

/// A path in a report: a name that is not UTF-8 is shown, never a reason to have no report.
pub(crate) fn shown<S: serde::Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&path.to_string_lossy())
}

/// As [`shown`], where there may be none.
pub(crate) fn shown_option<S: serde::Serializer>(
    path: &Option<PathBuf>,
    to: S,
) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => shown(path, to),
        None => to.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Place {
        _keep: tempfile::TempDir,
        root: PathBuf,
        file: PathBuf,
    }

    fn place() -> Place {
        let keep = tempfile::tempdir().expect("temporary directory");
        let root = keep.path().canonicalize().expect("canonical");
        std::fs::create_dir_all(root.join("up/own")).expect("create");
        let file = root.join("up/own/a.so");
        std::fs::write(&file, "x").expect("write");
        for path in [root.join("up"), root.join("up/own")] {
            mode(&path, 0o755);
        }
        mode(&file, 0o644);
        Place {
            _keep: keep,
            root,
            file,
        }
    }

    fn mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
    }

    fn code(path: &Path) -> Option<Code> {
        open(path).err().map(|r| r.code)
    }

    #[test]
    fn writable_by_others_is_refused() {
        let p = place();
        assert_eq!(code(&p.file), None);
        mode(&p.file, 0o666);
        assert_eq!(code(&p.file), Some(Code::PathWorldWritable));
        mode(&p.file, 0o664);
        assert_eq!(code(&p.file), None, "the user's own group");
        mode(&p.file, 0o644);
        for (dir, bits, expected) in [
            ("up/own", 0o777, Some(Code::PathWorldWritable)),
            ("up/own", 0o1777, Some(Code::PathWorldWritable)),
            ("up/own", 0o775, None),
            ("up", 0o777, Some(Code::PathWorldWritable)),
            ("up", 0o1777, None),
        ] {
            mode(&p.root.join(dir), bits);
            assert_eq!(code(&p.file), expected, "{dir} {bits:o}");
            mode(&p.root.join(dir), 0o755);
        }
    }

    #[test]
    fn a_foreign_group_may_not_write() {
        let p = place();
        mode(&p.file, 0o664);
        let metadata = p.file.metadata().expect("metadata");
        let refusal = writable("the file", &p.file, &metadata, metadata.gid() + 1);
        assert_eq!(
            refusal.expect_err("foreign group").code,
            Code::PathGroupWritable
        );
    }

    #[test]
    fn only_regular_files_are_opened() {
        let p = place();
        assert_eq!(code(&p.root), Some(Code::NotAFile));
        assert_eq!(code(&p.root.join("none.so")), Some(Code::Unreadable));
        let link = p.root.join("link.so");
        std::os::unix::fs::symlink(&p.file, &link).expect("link");
        let opened = open(&link).expect("opens");
        assert_eq!(opened.canonical, p.file);
        std::fs::remove_file(&p.file).expect("remove");
        assert_eq!(code(&link), Some(Code::Unreadable), "a dangling link");
        assert_eq!(code(Path::new("/dev/null")), Some(Code::NotAFile));
    }
}
