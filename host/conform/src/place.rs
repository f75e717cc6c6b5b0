//! Where a plugin is tried: a private directory with a copy of it, and what a check may leave behind.
//!
//! The directory lies below the cache, where the loader opens copies anyway: what is not allowed there is said before
//! the first check, and as a fault of the place. Its name has the process, so that the next run can tell what an
//! interrupted one left. Processes are told by a variable that a check's child has and passes on.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use structures_loader::{check_elf, Environment, Refusal};

use crate::run::ConformError;

/// Variable of everything that a check starts.
pub(crate) const RUN: &str = "STRUCTURES_CONFORM_RUN";
/// What directories of runs are called, before the id of the process.
const PREFIX: &str = "run-";
/// Longest library that is tried.
const LONGEST: u64 = 8 << 30;

/// The private directory: the copy, its sidecar where there is one, a cache.
pub(crate) struct Place {
    keep: tempfile::TempDir,
    /// The copy.
    pub file: PathBuf,
}

fn of_file(path: &Path) -> impl Fn(io::Error) -> ConformError {
    let path = path.display().to_string();
    move |source| ConformError::File {
        path: path.clone(),
        source,
    }
}

fn of_place(path: &Path) -> impl Fn(io::Error) -> ConformError {
    let path = path.display().to_string();
    move |source| ConformError::Place {
        path: path.clone(),
        source,
    }
}

/// Why a file is no library at all, as far as its headers tell; before anything is copied.
pub(crate) fn unfit(plugin: &Path) -> Result<Option<Refusal>, ConformError> {
    let failed = of_file(plugin);
    let odd = |text: String| failed(io::Error::new(ErrorKind::InvalidInput, text));
    let at = plugin.metadata().map_err(&failed)?;
    if !at.is_file() {
        return Err(odd("expected a library, found something else".into()));
    }
    let refusal = check_elf(&File::open(plugin).map_err(&failed)?).err();
    if refusal.is_none() && at.len() > LONGEST {
        let found = at.len();
        return Err(odd(format!(
            "expected at most {LONGEST} bytes, found {found}"
        )));
    }
    Ok(refusal)
}

impl Place {
    pub(crate) fn of(plugin: &Path) -> Result<Self, ConformError> {
        let cache = Environment::capture().cache_dir;
        let root = cache.unwrap_or_else(std::env::temp_dir).join("conform");
        let lost = of_place(&root);
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&root).map_err(&lost)?;
        sweep(&root);
        let root = root.canonicalize().map_err(&lost)?;
        let keep = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{}-", std::process::id()))
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&root)
            .map_err(&lost)?;
        allowed(keep.path()).map_err(&lost)?;
        let plugins = keep.path().join("plugins");
        builder.create(&plugins).map_err(&lost)?;
        // A name that is not UTF-8 is nobody's business but the author's.
        let name = plugin.file_name().and_then(|name| name.to_str());
        let mut copy = plugins.join(name.unwrap_or("plugin.so"));
        if copy.extension().is_none_or(|e| e != "so") {
            copy.as_mut_os_string().push(".so");
        }
        private_copy(plugin, &copy, &root)?;
        let sidecar = plugin.with_extension("plugin.json");
        if sidecar.is_file() {
            private_copy(&sidecar, &copy.with_extension("plugin.json"), &root)?;
        }
        Ok(Place { keep, file: copy })
    }

    /// The directory of the copy.
    pub(crate) fn plugins(&self) -> PathBuf {
        self.keep.path().join("plugins")
    }

    /// A cache for the children.
    pub(crate) fn cache(&self) -> PathBuf {
        self.keep.path().join("cache")
    }
}

/// A copy that only its owner may write, whatever the original's permissions: where the file came from is judged when
/// it is installed.
fn private_copy(from: &Path, to: &Path, root: &Path) -> Result<(), ConformError> {
    let mut source = File::open(from).map_err(of_file(from))?;
    let lost = of_place(root);
    let mut copy = File::create(to).map_err(&lost)?;
    io::copy(&mut source, &mut copy).map_err(&lost)?;
    fs::set_permissions(to, Permissions::from_mode(0o600)).map_err(&lost)
}

/// Whether libraries may be opened here: nobody else can swap the directory, and the file system runs programs.
fn allowed(dir: &Path) -> io::Result<()> {
    let no = |text: String| Err(io::Error::new(ErrorKind::PermissionDenied, text));
    for above in dir.ancestors().skip(1) {
        let mode = above.metadata()?.mode();
        if mode & 0o002 != 0 && mode & 0o1000 == 0 {
            return no(format!(
                "everybody may write {} (mode {:04o})",
                above.display(),
                mode & 0o7777
            ));
        }
    }
    let program = dir.join("runs");
    fs::write(&program, "#!/bin/sh\nexit 0\n")?;
    fs::set_permissions(&program, Permissions::from_mode(0o700))?;
    let ran = Command::new(&program)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    fs::remove_file(&program)?;
    match ran {
        // Without a shell nothing is known.
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            no("its file system runs no programs (noexec)".into())
        }
        _ => Ok(()),
    }
}

/// Removes what runs left that are no more.
fn sweep(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| {
            n.strip_prefix(PREFIX)?
                .split('-')
                .next()?
                .parse::<u32>()
                .ok()
        });
        let dead = pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        if dead {
            // The next run tries again.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Kills what still runs of a check; how many there were.
pub(crate) fn end_left(run: &str) -> usize {
    let mark = format!("{RUN}={run}");
    // One that was killed is there for a moment longer.
    let mut ended = BTreeSet::new();
    // What is killed may have started another meanwhile.
    for _ in 0..8 {
        let left = left(mark.as_bytes());
        if left.is_empty() {
            break;
        }
        for pid in left {
            structures_loader::end_process(pid);
            ended.insert(pid);
        }
    }
    ended.len()
}

fn left(mark: &[u8]) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            // Others' cannot be read; one that has ended has none.
            let environment = fs::read(entry.path().join("environ")).ok()?;
            environment
                .split(|b| *b == 0)
                .any(|variable| variable == mark)
                .then_some(pid)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_dead_runs_left_is_swept() {
        let keep = tempfile::tempdir().unwrap();
        let (own, dead) = (format!("run-{}-x", std::process::id()), "run-4194999-x");
        for name in [own.as_str(), dead, "other"] {
            fs::create_dir_all(keep.path().join(name).join("plugins")).unwrap();
        }
        sweep(keep.path());
        assert!(keep.path().join(&own).exists() && keep.path().join("other").exists());
        assert!(!keep.path().join(dead).exists());
    }

    #[test]
    fn a_directory_that_others_can_swap_is_not_allowed() {
        let keep = tempfile::tempdir().unwrap();
        let (up, dir) = (keep.path().join("up"), keep.path().join("up/dir"));
        fs::create_dir_all(&dir).unwrap();
        allowed(&dir).unwrap();
        fs::set_permissions(&up, Permissions::from_mode(0o777)).unwrap();
        assert!(allowed(&dir).unwrap_err().to_string().contains("0777"));
    }

    #[test]
    fn what_is_no_library_is_known_without_a_copy() {
        let keep = tempfile::tempdir().unwrap();
        let path = keep.path().join("huge.so");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(unfit(&path).unwrap().unwrap().code.name(), "too_large");
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        assert_eq!(unfit(&path).unwrap().unwrap().code.name(), "not_elf");
        assert!(unfit(keep.path()).is_err());
    }

    #[test]
    fn a_process_that_left_its_group_is_found_by_the_variable() {
        let run = format!("test-{}", std::process::id());
        let mut child = Command::new("/bin/sleep")
            .arg("60")
            .env(RUN, &run)
            .spawn()
            .unwrap();
        // Until it runs the other program, its variables are ours.
        let found = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            end_left(&run) > 0
        });
        child.wait().unwrap();
        assert!(found);
        assert_eq!(end_left(&run), 0);
    }
}
