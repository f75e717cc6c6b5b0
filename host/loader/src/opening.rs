//! What a host is opening right now, so that the next scan knows what ended it: `<cache>/opening/<sha256>.<pid>`.
//!
//! A plugin that a scan child opened and closed may still abort, exit or hang a host. Nobody is left to say so then:
//! the mark is written before the plugin is opened and removed afterwards, and one whose process is gone becomes an
//! entry of the quarantine. Which end it was is not known - a person may have stopped a slow one - so the entry
//! expires. Marks of another process-id namespace (a shared cache) cannot be judged and are left alone.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::code::Code;
use crate::private;
use crate::quarantine::Quarantine;
use crate::scan::Failed;

const LONGEST: u64 = 64 * 1024;

/// Who opens what.
#[derive(Debug, Serialize, Deserialize)]
struct Mark {
    pid: u32,
    /// When the process began, so that a process id that is used again is not mistaken for it.
    began: Option<u64>,
    /// The namespace of the process id.
    namespace: Option<PathBuf>,
    path: PathBuf,
}

/// The marks below a cache directory.
#[derive(Debug)]
pub(crate) struct Opening {
    dir: Option<PathBuf>,
}

/// A mark that is removed when the opening is over, however it ended, as long as the process lives.
#[derive(Debug)]
pub(crate) struct Marked(PathBuf);

impl Drop for Marked {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_file(&self.0) {
            tracing::warn!("{} cannot be removed: {e}", self.0.display());
        }
    }
}

impl Opening {
    pub(crate) fn open(cache: Option<&Path>) -> Self {
        Opening {
            dir: cache.map(directory),
        }
    }

    /// Marks that this process opens these bytes. A mark that cannot be written costs the knowledge of a crash.
    pub(crate) fn mark(&self, sha256: &str, path: &Path) -> Option<Marked> {
        let dir = self.dir.as_ref()?;
        let pid = std::process::id();
        let mark = Mark {
            pid,
            began: began(pid),
            namespace: namespace(),
            path: path.to_path_buf(),
        };
        let name = format!("{sha256}.{pid}");
        let written = serde_json::to_vec(&mark)
            .map_err(io::Error::from)
            .and_then(|bytes| {
                private::directory(dir)?;
                private::write(dir, &name, &bytes, 0o600)
            });
        match written {
            Ok(()) => Some(Marked(dir.join(name))),
            Err(e) => {
                tracing::warn!("{}: its opening cannot be marked: {e}", path.display());
                None
            }
        }
    }

    /// Puts into quarantine what ended its host, and removes the marks; how many there were.
    pub(crate) fn report(&self, quarantine: &Quarantine) -> usize {
        let mut ended = 0;
        for (file, sha256) in self.dir.iter().flat_map(|dir| marks(dir)) {
            let Ok(Some(bytes)) = private::read(&file, LONGEST) else {
                continue;
            };
            let Ok(mark) = serde_json::from_slice::<Mark>(&bytes) else {
                continue;
            };
            if mark.namespace != namespace() || lives(&mark) {
                continue;
            }
            let text = format!("the process {} ended while it opened the plugin", mark.pid);
            let failed = Failed::from(Code::LoadCrashed.because(text));
            quarantine.note(&sha256, &mark.path, &failed);
            ended += 1;
            if let Err(e) = std::fs::remove_file(&file) {
                tracing::warn!("{} cannot be removed: {e}", file.display());
            }
        }
        ended
    }
}

/// Forgets every mark of a process that is gone, or that cannot be understood.
pub(crate) fn forget(cache: &Path) -> io::Result<()> {
    for (file, _) in marks(&directory(cache)) {
        let mark = private::read(&file, LONGEST).ok().flatten();
        let mark = mark.and_then(|bytes| serde_json::from_slice::<Mark>(&bytes).ok());
        if mark.is_some_and(|mark| mark.namespace == namespace() && lives(&mark)) {
            continue;
        }
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

fn directory(cache: &Path) -> PathBuf {
    cache.join("opening")
}

/// The marks with the digests they are for; half-written files have other names.
fn marks(dir: &Path) -> Vec<(PathBuf, String)> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|e| {
            let path = e.ok()?.path();
            let (sha256, pid) = path.file_name()?.to_str()?.split_once('.')?;
            let named = !sha256.is_empty() && pid.parse::<u32>().is_ok();
            named.then(|| (path.clone(), sha256.to_string()))
        })
        .collect()
}

/// Whether the process of a mark is still that process. Without `/proc` every other one lives: nothing is known.
fn lives(mark: &Mark) -> bool {
    if began(std::process::id()).is_none() {
        return true;
    }
    began(mark.pid).is_some_and(|now| mark.began.is_none_or(|then| then == now))
}

/// When a process began, in ticks since the machine did; `None` for one that is gone or only waits to be reaped.
fn began(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may hold anything: state first, start time twentieth.
    let mut words = stat.rsplit_once(')')?.1.split_whitespace();
    if matches!(words.next()?, "Z" | "X") {
        return None;
    }
    words.nth(18)?.parse().ok()
}

fn namespace() -> Option<PathBuf> {
    std::fs::read_link("/proc/self/ns/pid").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_of_a_process_that_is_gone_is_reported_once_and_a_living_one_is_not() {
        let keep = tempfile::tempdir().expect("temporary directory");
        let opening = Opening::open(Some(keep.path()));
        let quarantine = || Quarantine::open(Some(keep.path()), "me".into());
        let mark = opening.mark("ab", Path::new("/x.so")).expect("marked");
        assert_eq!(opening.report(&quarantine()), 0, "this process lives");
        forget(keep.path()).expect("forget");
        // As if another process with this id had written it.
        let text = std::fs::read_to_string(&mark.0).expect("read");
        let mut other: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        other["began"] = 1.into();
        std::fs::write(&mark.0, other.to_string()).expect("write");
        assert_eq!(opening.report(&quarantine()), 1);
        assert_eq!(opening.report(&quarantine()), 0);
        let entry = quarantine().of("ab").expect("entry");
        assert_eq!(entry.code, "load_crashed");
        assert_eq!(entry.path, Path::new("/x.so"));
        assert!(entry.until.is_some());
        drop(mark);
        let mark = opening.mark("cd", Path::new("/y.so")).expect("marked");
        let file = mark.0.clone();
        drop(mark);
        assert!(!file.exists());
    }
}
