//! Digests that ended or hung whoever opened them, one private file each: `<cache>/quarantine/<sha256>.json`.
//!
//! Such bytes are not opened again, not even in a child: a crash lasts until the file changes (the digest is another
//! one then), a time-out, an exit without an answer, an end from outside (`SIGKILL`, `SIGTERM`, ...: perhaps the
//! machine's fault) and the end of a host ([`crate::opening`]) for an hour. Several processes may scan at once; one
//! file an entry loses none of them. An entry that cannot be understood counts as none, and so does one of another
//! host or scanner: it may open other doors.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::code::{Code, Refusal};
use crate::private;
use crate::scan::Failed;

const SCHEMA: u32 = 2;
const LONGEST: u64 = 64 * 1024;
/// How long a time-out keeps a plugin out, in seconds.
pub(crate) const EXPIRES: u64 = 3600;

/// Why and since when some bytes are not opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantined {
    schema: u32,
    /// The host and the scanner that found it.
    made_by: String,
    /// Digest of the bytes.
    pub sha256: String,
    /// `scan_crashed`, `scan_timeout`, `scan_failed` or `load_crashed`.
    pub code: String,
    /// What happened.
    pub reason: String,
    /// The signal that ended the child.
    pub signal: Option<i32>,
    /// When, seconds since 1970.
    pub since: u64,
    /// When it is tried again, seconds since 1970; not before the file changes when absent.
    pub until: Option<u64>,
    /// Where the file was.
    #[serde(serialize_with = "crate::paths::shown")]
    pub path: PathBuf,
}

/// The quarantine below a cache directory; nothing is read until a digest is asked for.
#[derive(Debug)]
pub(crate) struct Quarantine {
    dir: Option<PathBuf>,
    made_by: String,
    names: BTreeSet<String>,
}

impl Quarantine {
    /// `made_by` names the host and its scanner.
    pub(crate) fn open(cache: Option<&Path>, made_by: String) -> Self {
        let dir = cache.map(directory);
        let names = dir.as_ref().map(|d| names(d)).unwrap_or_default();
        Quarantine {
            dir,
            made_by,
            names,
        }
    }

    /// The entry of a digest, unless it has expired.
    pub(crate) fn of(&self, sha256: &str) -> Option<Quarantined> {
        let name = file_name(sha256);
        if !self.names.contains(&name) {
            return None;
        }
        let bytes = private::read(&self.dir.as_ref()?.join(name), LONGEST).ok()??;
        let entry: Quarantined = serde_json::from_slice(&bytes).ok()?;
        let known =
            entry.schema == SCHEMA && entry.sha256 == sha256 && entry.made_by == self.made_by;
        known.then_some(entry).filter(|e| !expired(e, now()))
    }

    /// Records the end of a scan, when it is one that quarantines. What cannot be written is said in the log.
    pub(crate) fn note(&self, sha256: &str, path: &Path, failed: &Failed) {
        let Some(dir) = &self.dir else { return };
        let Failed {
            refusal,
            signal,
            silent,
        } = failed;
        let signal = *signal;
        let lasting = match refusal.code {
            Code::ScanCrashed => !signal.is_some_and(from_outside),
            Code::ScanTimeout | Code::LoadCrashed => false,
            Code::ScanFailed if *silent => false,
            _ => return,
        };
        let since = now();
        let entry = Quarantined {
            schema: SCHEMA,
            made_by: self.made_by.clone(),
            sha256: sha256.into(),
            code: refusal.code.name().into(),
            reason: refusal.reason.clone(),
            signal,
            since,
            until: (!lasting).then_some(since + EXPIRES),
            path: path.to_path_buf(),
        };
        let written = serde_json::to_vec(&entry)
            .map_err(io::Error::from)
            .and_then(|bytes| {
                private::directory(dir)?;
                private::write(dir, &file_name(sha256), &bytes, 0o600)
            });
        if let Err(e) = written {
            tracing::warn!("{} cannot be quarantined: {e}", path.display());
        }
    }
}

impl Quarantined {
    /// The refusal of a file with these bytes.
    pub(crate) fn refusal(&self) -> Refusal {
        let code = Code::from_name(&self.code).unwrap_or(Code::ScanCrashed);
        let ago = age(now().saturating_sub(self.since));
        let until = match self.until {
            None => "not opened again until the file changes".to_string(),
            Some(at) => format!("tried again in {}", age(at.saturating_sub(now()))),
        };
        code.because(format!(
            "{} ({ago} ago); {until} or `plugins rescan`",
            self.reason
        ))
    }
}

/// Forgets everything; how many entries there were.
pub(crate) fn forget(cache: &Path) -> io::Result<usize> {
    let dir = directory(cache);
    let names = names(&dir);
    for name in &names {
        match std::fs::remove_file(dir.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(names.len())
}

/// An hour for a time-out; an entry from the future was written under another clock.
fn expired(entry: &Quarantined, now: u64) -> bool {
    entry
        .until
        .is_some_and(|until| now >= until || now < entry.since)
}

/// Signals that somebody else sent.
fn from_outside(signal: i32) -> bool {
    [
        libc::SIGKILL,
        libc::SIGTERM,
        libc::SIGINT,
        libc::SIGHUP,
        libc::SIGQUIT,
    ]
    .contains(&signal)
}

fn age(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86400),
    }
}

fn directory(cache: &Path) -> PathBuf {
    cache.join("quarantine")
}

fn names(dir: &Path) -> BTreeSet<String> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".json"))
        .collect()
}

fn file_name(sha256: &str) -> String {
    format!("{sha256}.json")
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(cache: &Path) -> Quarantine {
        Quarantine::open(Some(cache), "me".into())
    }

    fn failed(code: Code, signal: Option<i32>) -> Failed {
        Failed {
            signal,
            ..Failed::from(code.because("why"))
        }
    }

    fn noted(failed: &Failed) -> Option<Quarantined> {
        let keep = tempfile::tempdir().expect("temporary directory");
        open(keep.path()).note("ab", Path::new("/x.so"), failed);
        assert_eq!(
            Quarantine::open(Some(keep.path()), "another scanner".into()).of("ab"),
            None
        );
        open(keep.path()).of("ab")
    }

    #[test]
    fn crashes_last_and_the_rest_expires() {
        let crash = noted(&failed(Code::ScanCrashed, Some(libc::SIGSEGV))).expect("entry");
        assert_eq!((crash.until, crash.signal), (None, Some(libc::SIGSEGV)));
        assert!(!expired(&crash, u64::MAX));
        let text = crash.refusal().reason;
        for fact in ["why", "until the file changes", "plugins rescan"] {
            assert!(text.contains(fact), "{text}");
        }
        let silent = Failed {
            silent: true,
            ..failed(Code::ScanFailed, None)
        };
        for found in [
            failed(Code::ScanTimeout, None),
            failed(Code::ScanCrashed, Some(libc::SIGKILL)),
            failed(Code::LoadCrashed, None),
            silent,
        ] {
            let entry = noted(&found).expect("entry");
            assert_eq!(entry.until, Some(entry.since + EXPIRES));
            assert!(!expired(&entry, entry.since + EXPIRES - 1));
            assert!(expired(&entry, entry.since + EXPIRES));
            assert!(expired(&entry, entry.since - 1), "another clock");
        }
        assert_eq!(noted(&failed(Code::ScanFailed, None)), None, "not begun");
    }

    #[test]
    fn damaged_entries_count_as_none_and_all_are_forgotten() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let q = open(keep.path());
        for sha256 in ["ab", "cd"] {
            q.note(sha256, Path::new("/x.so"), &failed(Code::ScanCrashed, None));
        }
        let file = keep.path().join("quarantine/ab.json");
        let whole = std::fs::read_to_string(&file).expect("read");
        for bad in ["", "{}", &whole.replace("\"ab\"", "\"ef\"")] {
            std::fs::write(&file, bad).expect("spoil");
            assert_eq!(open(keep.path()).of("ab"), None, "{bad}");
        }
        assert!(open(keep.path()).of("cd").is_some());
        assert_eq!(forget(keep.path()).expect("forget"), 2);
        assert_eq!(forget(keep.path()).expect("forget"), 0);
        assert_eq!(open(keep.path()).of("cd"), None);
    }
}
