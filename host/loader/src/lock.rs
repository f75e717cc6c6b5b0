//! `plugins.lock`: which files were the plugins, by digest.
//!
//! TOML, sorted, one table a plugin. Under `--locked` every file that is not listed with its bytes is refused before
//! it is opened, and so is every file when there is no lock; otherwise differences are reported as drift and nothing
//! is refused. Only the digest decides: id, version and file name are there for people and for the wording.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::code::{Code, Refusal};
use crate::error::LoaderError;
use crate::{paths, private};

/// Name of the file.
pub const LOCK_FILE: &str = "plugins.lock";
const VERSION: u32 = 1;
/// A hundred thousand plugins.
const LONGEST: u64 = 32 << 20;
const HEADER: &str =
    "# Written by `structures plugins lock`. Under `--locked` a plugin file is used only when it\n\
                      # is listed here with exactly these bytes.\n";

/// One locked plugin.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockedPlugin {
    /// Its id.
    pub id: String,
    /// Its version.
    pub version: String,
    /// Digest of the file, lower-case hexadecimal.
    pub sha256: String,
    /// Name of the file, without its directory.
    pub file: String,
}

/// The content of a lock file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    version: u32,
    /// Sorted by id.
    #[serde(default, rename = "plugin")]
    pub plugins: Vec<LockedPlugin>,
}

/// Whether a lock is looked at, and what a difference does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockPolicy {
    /// Where the lock would be; `None` looks at none.
    pub file: Option<PathBuf>,
    /// `--locked`: a difference is a refusal.
    pub enforced: bool,
}

/// One difference between the lock and what was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// `lock_unlisted`, `lock_changed` or `lock_absent`.
    pub code: String,
    /// Name of the file.
    pub file: String,
    /// Id, as far as it is known.
    pub id: Option<String>,
    /// Expected and found.
    pub reason: String,
}

/// What a scan found out about the lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LockReport {
    /// The lock file.
    #[serde(serialize_with = "crate::paths::shown")]
    pub path: PathBuf,
    /// Whether it exists.
    pub found: bool,
    /// Whether differences were refused.
    pub enforced: bool,
    /// Differences of the plugins that were loaded, and entries without a file.
    pub drift: Vec<Drift>,
}

impl Lock {
    /// A lock of these plugins.
    pub fn new(mut plugins: Vec<LockedPlugin>) -> Self {
        plugins.sort();
        plugins.dedup();
        Lock {
            version: VERSION,
            plugins,
        }
    }

    /// As [`Lock::read`], for a lock that is enforced: one that others may write decides nothing. A lock that only
    /// reports is read all the same, with a warning.
    ///
    /// # Errors
    /// As [`Lock::read`]; also for an enforced lock that others may write.
    pub fn read_for(policy: &LockPolicy) -> Result<Option<Self>, LoaderError> {
        let Some(path) = &policy.file else {
            return Ok(None);
        };
        if path.symlink_metadata().is_ok() {
            if let Err(refusal) = paths::open(path) {
                let reason = format!("{}: {}", refusal.code, refusal.reason);
                let others = matches!(
                    refusal.code,
                    Code::PathWorldWritable | Code::PathGroupWritable
                );
                if policy.enforced && others {
                    return Err(LoaderError::Lock {
                        path: path.clone(),
                        reason: format!("others may write it, so it decides nothing: {reason}"),
                    });
                }
                if others {
                    tracing::warn!("lock file {}: {reason}", path.display());
                }
            }
        }
        Self::read(path)
    }

    /// Reads a lock file; `None` where there is none.
    ///
    /// # Errors
    /// [`LoaderError::Lock`] for one that cannot be read or understood.
    pub fn read(path: &Path) -> Result<Option<Self>, LoaderError> {
        let bad = |reason: String| LoaderError::Lock {
            path: path.to_path_buf(),
            reason,
        };
        // Not waiting matters: a pipe in the file's place must not hang the scan.
        let file = match OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)
        {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(bad(e.to_string())),
        };
        let metadata = file.metadata().map_err(|e| bad(e.to_string()))?;
        if !metadata.is_file() {
            return Err(bad("expected a regular file".into()));
        }
        let mut text = String::new();
        file.take(LONGEST + 1)
            .read_to_string(&mut text)
            .map_err(|e| bad(e.to_string()))?;
        if text.len() as u64 > LONGEST {
            return Err(bad(format!(
                "expected at most {LONGEST} bytes, found {}",
                metadata.len()
            )));
        }
        let lock: Lock = toml::from_str(&text).map_err(|e| bad(e.to_string()))?;
        if lock.version != VERSION {
            let text = format!("expected version {VERSION}, found {}", lock.version);
            return Err(bad(text));
        }
        Ok(Some(lock))
    }

    /// Writes the file by rename.
    ///
    /// # Errors
    /// [`LoaderError::Lock`] when it cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), LoaderError> {
        let bad = |reason: String| LoaderError::Lock {
            path: path.to_path_buf(),
            reason,
        };
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .ok_or_else(|| bad("expected the name of a file".into()))?;
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let text = toml::to_string(self).map_err(|e| bad(e.to_string()))?;
        let text = format!("{HEADER}{text}");
        private::write(dir, name, text.as_bytes(), 0o644)
            .map_err(|e| bad(format!("cannot be written: {e}")))
    }

    /// Whether the file named `file` with the digest `sha256` is listed as it is.
    ///
    /// # Errors
    /// `lock_changed` when its name is listed with other bytes, else `lock_unlisted`.
    pub fn admits(&self, file: &str, sha256: &str) -> Result<(), Refusal> {
        if self.plugins.iter().any(|p| p.sha256 == sha256) {
            return Ok(());
        }
        match self.plugins.iter().find(|p| p.file == file) {
            Some(p) => Err(Code::LockChanged.because(format!(
                "expected {} {} with sha256 {}, found {sha256}",
                p.id, p.version, p.sha256
            ))),
            None => Err(Code::LockUnlisted.because(format!(
                "neither the name {file} nor the sha256 {sha256} is listed"
            ))),
        }
    }
}

/// The refusal of every file when a lock is demanded and there is none.
pub(crate) fn missing(policy: &LockPolicy) -> Refusal {
    let place = policy
        .file
        .as_deref()
        .unwrap_or_else(|| Path::new(LOCK_FILE));
    Code::LockMissing.because(format!(
        "expected a lock file at {}, found none",
        place.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str, sha256: &str, file: &str) -> LockedPlugin {
        LockedPlugin {
            id: id.into(),
            version: "1.0.0".into(),
            sha256: sha256.into(),
            file: file.into(),
        }
    }

    #[test]
    fn a_lock_is_sorted_and_read_back() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let path = keep.path().join(LOCK_FILE);
        assert_eq!(Lock::read(&path).expect("absent"), None);
        let lock = Lock::new(vec![entry("z", "01", "z.so"), entry("a", "02", "a.so")]);
        lock.write(&path).expect("write");
        let text = std::fs::read_to_string(&path).expect("read");
        assert!(text.starts_with("# Written by"), "{text}");
        assert!(text.find("\"a\"") < text.find("\"z\""), "{text}");
        assert_eq!(Lock::read(&path).expect("read"), Some(lock));
        assert_eq!(std::fs::read_dir(keep.path()).expect("list").count(), 1);
        Lock::new(Vec::new()).write(&path).expect("an empty one");
        assert_eq!(Lock::read(&path).expect("read"), Some(Lock::new(vec![])));
    }

    #[test]
    fn what_cannot_be_understood_names_the_file_and_the_place() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let path = keep.path().join(LOCK_FILE);
        for (text, fact) in [
            ("version = 2\n", "expected version 1, found 2"),
            ("version = 1\nextra = 1\n", "extra"),
            ("version = 1\n[[plugin]]\nid = \"a\"\n", "version"),
            ("not toml", "line 1"),
        ] {
            std::fs::write(&path, text).expect("write");
            let error = Lock::read(&path).expect_err(text).to_string();
            assert!(error.contains(fact) && error.contains(LOCK_FILE), "{error}");
        }
        let nowhere = keep.path().join("none/plugins.lock");
        assert!(Lock::new(vec![]).write(&nowhere).is_err());
    }

    #[test]
    fn a_pipe_and_a_flood_are_errors_and_not_waited_for() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let path = keep.path().join(LOCK_FILE);
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        if made.is_ok_and(|s| s.success()) {
            assert!(Lock::read(&path).is_err());
            std::fs::remove_file(&path).expect("remove");
        }
        let file = std::fs::File::create(&path).expect("create");
        file.set_len(20 << 30).expect("sparse");
        let error = Lock::read(&path).expect_err("too long").to_string();
        assert!(error.contains("at most"), "{error}");
    }

    #[test]
    fn a_lock_that_others_may_write_is_not_enforced() {
        use std::os::unix::fs::PermissionsExt;
        let keep = tempfile::tempdir().expect("temporary directory");
        let path = keep.path().join(LOCK_FILE);
        let lock = Lock::new(vec![entry("a", "01", "a.so")]);
        lock.write(&path).expect("write");
        let read = |enforced| {
            Lock::read_for(&LockPolicy {
                file: Some(path.clone()),
                enforced,
            })
        };
        assert_eq!(read(true).expect("own"), Some(lock.clone()));
        let mode = std::fs::Permissions::from_mode(0o666);
        std::fs::set_permissions(&path, mode).expect("chmod");
        let error = read(true).expect_err("public").to_string();
        assert!(error.contains("path_world_writable"), "{error}");
        assert_eq!(read(false).expect("reports only"), Some(lock));
    }

    #[test]
    fn bytes_decide() {
        let lock = Lock::new(vec![entry("a", "01", "a.so")]);
        assert_eq!(lock.admits("a.so", "01"), Ok(()));
        assert_eq!(lock.admits("renamed.so", "01"), Ok(()));
        let changed = lock.admits("a.so", "02").expect_err("changed");
        assert_eq!(changed.code, Code::LockChanged);
        for fact in ["a 1.0.0", "01", "02"] {
            assert!(changed.reason.contains(fact), "{changed}");
        }
        let unlisted = lock.admits("b.so", "02").expect_err("unlisted");
        assert_eq!(unlisted.code, Code::LockUnlisted);
    }
}
