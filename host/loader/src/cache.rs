//! What earlier scans found, so that listing a hundred plugins opens none of them.
//!
//! One file, `<cache>/scans/scans.json`, read whole and written whole by rename: a hundred entries are read in a
//! millisecond, and a hundred files would cost more system calls than that. Two tables: path and stamp (device,
//! inode, size, mtime *and* ctime, which only the kernel sets) give a digest; a digest gives what its bytes answered.
//! The first is believed by listings only: whatever is opened is hashed first. The second is a property of the bytes
//! and of the host that asked, so a file made by another host, of another format, damaged or not this user's own is
//! dropped and written anew. Losing an entry, also to another process that writes at the same time, costs a scan.
//!
//! Not here: crashes and time-outs ([`crate::quarantine`]), private copies ([`crate::store`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use structures_plugin_api::describe::Description;

use crate::code::{Code, Refusal};
use crate::private;

const VERSION: u32 = 2;
const NAME: &str = "scans.json";
/// Ten thousand plugins with twenty forms each.
const LONGEST: u64 = 256 << 20;
/// A file whose last change is younger than this at the time of its scan may change again without a new time stamp:
/// kernels stamp once a tick, 10 ms at most. Such an entry is hashed again.
const RACY_NANOS: i64 = 100_000_000;

/// What identifies the content of a file as long as nobody cheats with the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp([i64; 7]);

impl Stamp {
    pub(crate) fn of(m: &Metadata) -> Self {
        Stamp([
            m.dev() as i64,
            m.ino() as i64,
            m.size() as i64,
            m.mtime(),
            m.mtime_nsec(),
            m.ctime(),
            m.ctime_nsec(),
        ])
    }

    fn changed_nanos(&self) -> i64 {
        self.0[5].saturating_mul(1_000_000_000) + self.0[6]
    }
}

/// What the child answered about some bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// A valid document.
    Description(Box<Description>),
    /// A refusal that these bytes will always earn from this host.
    Refused {
        code: String,
        reason: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        detail: Option<String>,
    },
}

/// Refusals that depend on nothing but the bytes and the host. A missing dependency may be installed tomorrow.
const LASTING: &[Code] = &[
    Code::NotAPlugin,
    Code::AbiHeader,
    Code::LayoutMissing,
    Code::LayoutMismatch,
    Code::ApiMajor,
    Code::BadDescribe,
];

impl Answer {
    /// The refusal as an entry, where it is a lasting one.
    pub(crate) fn refused(refusal: &Refusal) -> Option<Self> {
        LASTING.contains(&refusal.code).then(|| Answer::Refused {
            code: refusal.code.name().into(),
            reason: refusal.reason.clone(),
            detail: refusal.detail.clone(),
        })
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct FileEntry {
    stamp: Stamp,
    sha256: String,
    /// When the stamp was taken, nanoseconds since 1970.
    taken: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct ObjectEntry {
    answer: Answer,
    /// It was opened by this host and worked.
    loaded: bool,
    /// The line of the last signature that was found to fit these bytes, whoever made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signed: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Tables {
    version: u32,
    made_by: String,
    files: BTreeMap<String, FileEntry>,
    objects: BTreeMap<String, ObjectEntry>,
}

/// The cache, in memory.
#[derive(Debug)]
pub(crate) struct ScanCache {
    /// `None`: there is no cache directory.
    dir: Option<PathBuf>,
    tables: Tables,
    changed: bool,
    seen: BTreeSet<String>,
}

impl ScanCache {
    /// Reads the cache below `cache`. `made_by` names the host and its scanner: answers of another one are foreign.
    pub(crate) fn open(cache: Option<&Path>, made_by: String) -> Self {
        let dir = cache.map(directory);
        let read = dir
            .as_ref()
            .map_or(Ok(None), |dir| private::read(&dir.join(NAME), LONGEST));
        let found = match read {
            Ok(bytes) => bytes.and_then(|bytes| understood(&bytes, &made_by)),
            Err(e) => {
                tracing::debug!("the scan cache cannot be read: {e}");
                None
            }
        };
        ScanCache {
            dir,
            tables: found.unwrap_or(Tables {
                version: VERSION,
                made_by,
                ..Tables::default()
            }),
            changed: false,
            seen: BTreeSet::new(),
        }
    }

    /// The digest of a file that has not changed since it was hashed.
    pub(crate) fn digest(&mut self, path: &Path, stamp: &Stamp) -> Option<String> {
        let path = path.to_str()?;
        let entry = self.tables.files.get(path)?;
        let settled = entry.taken.saturating_sub(stamp.changed_nanos()) >= RACY_NANOS;
        if entry.stamp != *stamp || !settled {
            return None;
        }
        self.seen.insert(path.to_string());
        Some(entry.sha256.clone())
    }

    /// What these bytes answered before.
    pub(crate) fn answer(&self, sha256: &str) -> Option<&Answer> {
        self.tables.objects.get(sha256).map(|o| &o.answer)
    }

    /// Whether these bytes were opened by this host before, and worked.
    pub(crate) fn loaded(&self, sha256: &str) -> bool {
        self.tables.objects.get(sha256).is_some_and(|o| o.loaded)
    }

    /// The line of a signature that fits these bytes.
    pub(crate) fn signed(&self, sha256: &str) -> Option<&str> {
        self.tables.objects.get(sha256)?.signed.as_deref()
    }

    /// Remembers a signature that was verified.
    pub(crate) fn note_signed(&mut self, sha256: &str, line: String) {
        if let Some(entry) = self.tables.objects.get_mut(sha256) {
            self.changed |= entry.signed.as_ref() != Some(&line);
            entry.signed = Some(line);
        }
    }

    /// Remembers a file. A path that is not UTF-8 is hashed at every scan.
    pub(crate) fn note_file(&mut self, path: &Path, stamp: Stamp, taken: i64, sha256: &str) {
        let Some(path) = path.to_str() else { return };
        self.seen.insert(path.to_string());
        let entry = FileEntry {
            stamp,
            sha256: sha256.into(),
            taken,
        };
        self.tables.files.insert(path.to_string(), entry);
        self.changed = true;
    }

    /// Forgets a file, so that the next scan hashes it.
    pub(crate) fn forget_file(&mut self, path: &Path) {
        let entry = path.to_str().and_then(|p| self.tables.files.remove(p));
        self.changed |= entry.is_some();
    }

    /// Remembers an answer.
    pub(crate) fn note_answer(&mut self, sha256: &str, answer: Answer) {
        let entry = ObjectEntry {
            answer,
            loaded: false,
            signed: None,
        };
        self.tables.objects.insert(sha256.into(), entry);
        self.changed = true;
    }

    /// Remembers whether bytes worked when they were opened.
    pub(crate) fn note_loaded(&mut self, sha256: &str, loaded: bool) {
        if let Some(entry) = self.tables.objects.get_mut(sha256) {
            self.changed |= entry.loaded != loaded;
            entry.loaded = loaded;
        }
    }

    /// Writes what changed. A cache that cannot be written costs the next scan its time, nothing else.
    pub(crate) fn save(mut self) {
        let Some(dir) = self.dir.take().filter(|_| self.changed) else {
            return;
        };
        let seen = std::mem::take(&mut self.seen);
        self.tables
            .files
            .retain(|path, _| seen.contains(path) || Path::new(path).exists());
        let used: BTreeSet<&str> = self
            .tables
            .files
            .values()
            .map(|f| f.sha256.as_str())
            .collect();
        self.tables
            .objects
            .retain(|sha256, _| used.contains(sha256.as_str()));
        let written = serde_json::to_vec(&self.tables)
            .map_err(std::io::Error::from)
            .and_then(|bytes| {
                private::directory(&dir)?;
                private::write(&dir, NAME, &bytes, 0o600)
            });
        if let Err(e) = written {
            tracing::warn!("the scan cache {} cannot be written: {e}", dir.display());
        }
    }
}

/// Forgets everything; how many answers there were.
pub(crate) fn forget(cache: &Path) -> std::io::Result<usize> {
    let path = directory(cache).join(NAME);
    let entries = private::read(&path, LONGEST)
        .ok()
        .flatten()
        .and_then(|bytes| serde_json::from_slice::<Tables>(&bytes).ok())
        .map_or(0, |t| t.objects.len());
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(entries),
    }
}

/// Nanoseconds since 1970.
pub(crate) fn now_nanos() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}

fn directory(cache: &Path) -> PathBuf {
    cache.join("scans")
}

fn understood(bytes: &[u8], made_by: &str) -> Option<Tables> {
    match serde_json::from_slice::<Tables>(bytes) {
        Ok(t) if t.version == VERSION && t.made_by == made_by => Some(t),
        Ok(t) => {
            tracing::debug!(
                "the scan cache is foreign (version {}, {}): dropped",
                t.version,
                t.made_by
            );
            None
        }
        Err(e) => {
            tracing::debug!("the scan cache is damaged ({e}): dropped");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Place {
        _keep: tempfile::TempDir,
        cache: PathBuf,
        file: PathBuf,
        stamp: Stamp,
    }

    const SHA: &str = "ab";

    fn description() -> Answer {
        Answer::Description(Box::new(Description::new("p", "v", "1.0.0")))
    }

    /// A cache that knows one file, changed long before it was scanned.
    fn place() -> Place {
        let keep = tempfile::tempdir().expect("temporary directory");
        let file = keep.path().join("a.so");
        std::fs::write(&file, "x").expect("write");
        let stamp = Stamp::of(&file.metadata().expect("metadata"));
        let cache = keep.path().join("cache");
        let mut scans = ScanCache::open(Some(&cache), "me".into());
        scans.note_file(&file, stamp, stamp.changed_nanos() + RACY_NANOS, SHA);
        scans.note_answer(SHA, description());
        scans.note_loaded(SHA, true);
        scans.save();
        Place {
            _keep: keep,
            cache,
            file,
            stamp,
        }
    }

    fn knows(p: &Place, made_by: &str) -> bool {
        let mut scans = ScanCache::open(Some(&p.cache), made_by.into());
        let digest = scans.digest(&p.file, &p.stamp);
        let answer = scans.answer(SHA).cloned();
        assert_eq!(digest.is_some(), answer.is_some());
        assert_eq!(scans.loaded(SHA), answer.is_some());
        answer == Some(description()) && digest.as_deref() == Some(SHA)
    }

    #[test]
    fn what_was_written_is_read_back_and_private() {
        let p = place();
        assert!(knows(&p, "me"));
        let (dir, file) = (p.cache.join("scans"), p.cache.join("scans/scans.json"));
        let mode = |path: &Path| path.metadata().expect("metadata").mode() & 0o777;
        assert_eq!((mode(&dir), mode(&file)), (0o700, 0o600));
    }

    #[test]
    fn every_part_of_the_stamp_counts() {
        let p = place();
        // Earlier counts like later: a clock may have been set back.
        for (i, by) in (0..7).flat_map(|i| [(i, 1), (i, -1)]) {
            let mut other = p.stamp;
            other.0[i] += by;
            let mut scans = ScanCache::open(Some(&p.cache), "me".into());
            assert_eq!(scans.digest(&p.file, &other), None, "part {i} {by}");
        }
    }

    #[test]
    fn a_file_that_changed_just_before_it_was_scanned_is_hashed_again() {
        let p = place();
        let mut scans = ScanCache::open(Some(&p.cache), "me".into());
        scans.note_file(
            &p.file,
            p.stamp,
            p.stamp.changed_nanos() + RACY_NANOS - 1,
            SHA,
        );
        assert_eq!(scans.digest(&p.file, &p.stamp), None);
    }

    #[test]
    fn a_foreign_damaged_or_public_cache_is_dropped_and_written_anew() {
        let p = place();
        assert!(!knows(&p, "another host"));
        let file = p.cache.join("scans/scans.json");
        let whole = std::fs::read_to_string(&file).expect("read");
        for bad in [
            "",
            "{}",
            "null",
            &whole[..whole.len() / 2],
            &whole.replacen("\"version\":2", "\"version\":1", 1),
            &whole.replacen("\"sha256\":\"ab\"", "\"sha256\":7", 1),
        ] {
            std::fs::write(&file, bad).expect("spoil");
            assert!(!knows(&p, "me"), "{bad}");
        }
        std::fs::write(&file, &whole).expect("restore");
        assert!(knows(&p, "me"));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).expect("chmod");
        assert!(!knows(&p, "me"), "everybody may write it");
        let mut scans = ScanCache::open(Some(&p.cache), "me".into());
        scans.note_file(&p.file, p.stamp, p.stamp.changed_nanos() + RACY_NANOS, SHA);
        scans.note_answer(SHA, description());
        scans.note_loaded(SHA, true);
        scans.save();
        assert!(knows(&p, "me"), "written anew");
    }

    #[test]
    fn entries_of_files_that_are_gone_are_dropped() {
        let p = place();
        let other = p.file.with_file_name("b.so");
        std::fs::write(&other, "y").expect("write");
        std::fs::remove_file(&p.file).expect("remove");
        let mut scans = ScanCache::open(Some(&p.cache), "me".into());
        scans.note_file(&other, p.stamp, 0, "cd");
        scans.note_answer("cd", description());
        scans.save();
        let scans = ScanCache::open(Some(&p.cache), "me".into());
        assert!(scans.answer(SHA).is_none() && scans.answer("cd").is_some());
    }

    #[test]
    fn only_lasting_refusals_are_remembered() {
        assert!(Answer::refused(&Code::NotAPlugin.because("x")).is_some());
        for passing in [Code::OpenFailed, Code::ScanFailed, Code::ScannerMissing] {
            assert_eq!(Answer::refused(&passing.because("x")), None);
        }
    }

    #[test]
    fn forgetting_counts_and_an_absent_cache_is_fine() {
        let p = place();
        assert_eq!(forget(&p.cache).expect("forget"), 1);
        assert_eq!(forget(&p.cache).expect("forget"), 0);
        assert!(!knows(&p, "me"));
        ScanCache::open(None, "me".into()).save();
    }
}
