//! Files that only their owner may write: how caches and records of this crate are read and written.
//!
//! Writing is by rename, so half a file never has the final name. Reading believes only a regular file of this
//! user's that nobody else may write: whoever could write it could tell the host which bytes it has seen before.
//! Owns nothing of what the files mean.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys;

const OTHERS_WRITE: u32 = 0o022;

/// Makes `dir` with what is above it, closed to others. One that is there already must be this user's own.
pub fn directory(dir: &Path) -> io::Result<()> {
    if let Some(above) = dir.parent().filter(|d| !d.as_os_str().is_empty()) {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(above)?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(0o700)),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => own_directory(dir),
        Err(e) => Err(e),
    }
}

/// Whether `dir` is a directory, not a link to one, of this user's, that nobody else may write. An absent one is fine.
pub(crate) fn own_directory(dir: &Path) -> io::Result<()> {
    let denied = |why: String| Err(io::Error::new(ErrorKind::PermissionDenied, why));
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(dir);
    let metadata = match opened {
        Ok(dir) => dir.metadata()?,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTDIR | libc::ELOOP)) => {
            return denied("expected a directory, found a link or a file".into());
        }
        Err(e) => return Err(e),
    };
    if metadata.uid() != sys::effective_user() {
        return denied(format!(
            "expected a directory of user {}, found one of user {}",
            sys::effective_user(),
            metadata.uid()
        ));
    }
    if metadata.mode() & OTHERS_WRITE != 0 {
        return denied(format!(
            "expected a directory that only its owner may write, found mode {:04o}",
            metadata.mode() & 0o7777
        ));
    }
    Ok(())
}

/// Opens a regular file for reading: follows no link, waits for no pipe.
pub(crate) fn regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(
            ErrorKind::InvalidInput,
            "expected a regular file",
        )),
    }
}

/// Puts `bytes` in the place of `dir`/`name`.
pub(crate) fn write(dir: &Path, name: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let temporary = dir.join(format!(
        ".{name}.{}.{}.tmp",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        file.write_all(bytes)?;
        fs::rename(&temporary, dir.join(name))
    })();
    if written.is_err() {
        // Already failing; the file may not exist at all.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// The content of a file of this user's; `None` where there is none, or one that somebody else could have written.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path)
    {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let metadata = file.metadata()?;
    let own = metadata.is_file()
        && metadata.uid() == sys::effective_user()
        && metadata.mode() & OTHERS_WRITE == 0;
    if !own || metadata.len() > most {
        tracing::debug!("{}: not believed: not this user's own", path.display());
        return Ok(None);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
    file.take(most).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_private_and_whole() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let dir = keep.path().join("a/b");
        directory(&dir).expect("directory");
        assert_eq!(dir.metadata().expect("metadata").mode() & 0o777, 0o700);
        for text in ["one", "two"] {
            write(&dir, "f", text.as_bytes(), 0o600).expect("write");
            let found = read(&dir.join("f"), 100).expect("read");
            assert_eq!(found.as_deref(), Some(text.as_bytes()));
        }
        let mode = dir.join("f").metadata().expect("metadata").mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(&dir).expect("list").count(), 1, "no rest");
    }

    #[test]
    fn a_directory_of_others_is_not_used() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let dir = keep.path().join("d");
        own_directory(&dir).expect("absent");
        directory(&dir).expect("made");
        for (mode, used) in [(0o755, true), (0o770, false), (0o1777, false)] {
            fs::set_permissions(&dir, Permissions::from_mode(mode)).expect("chmod");
            assert_eq!(directory(&dir).is_ok(), used, "{mode:o}");
        }
        fs::set_permissions(&dir, Permissions::from_mode(0o700)).expect("chmod");
        let link = keep.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).expect("link");
        assert!(directory(&link).is_err(), "a link");
        fs::write(keep.path().join("f"), "").expect("write");
        assert!(directory(&keep.path().join("f")).is_err(), "a file");
    }

    #[test]
    fn what_others_could_have_written_is_not_believed() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let path = keep.path().join("f");
        assert_eq!(read(&path, 100).expect("absent"), None);
        fs::write(&path, "text").expect("write");
        for (mode, believed) in [(0o644, true), (0o620, false), (0o602, false)] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
            let found = read(&path, 100).expect("read");
            assert_eq!(found.is_some(), believed, "{mode:o}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("chmod");
        assert_eq!(read(&path, 3).expect("read"), None, "too long");
        let link = keep.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("link");
        assert!(read(&link, 100).is_err(), "a link is not followed");
    }
}
