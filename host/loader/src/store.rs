//! Private, content-addressed copies: the bytes that are hashed are the bytes that are opened.
//!
//! A candidate is hashed through the handle that passed the path rules and copied to `<cache>/objects/<sha256>.so`,
//! mode 0400 in a 0700 directory, by rename: half a file never has the final name. A copy that is already there is
//! compared byte by byte while the original is read, so a spoiled one is replaced. Reports show the original path.
//! The copy is hashed once more right before it is opened ([`Object::verify`]): between the two, a stranger's
//! initialisers ran in a child of the same user.
//!
//! A copy that was not wanted for a month, or the longest unwanted ones of too many bytes, are removed ([`prune`]) by
//! the first scan that is alone: whoever uses the store holds a shared lock on its directory for as long as a copy may
//! still be opened by name. What is mapped already needs no name.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::code::{Code, Refusal};
use crate::elf::LARGEST;
use crate::error::LoaderError;
use crate::private;

/// Read and write size: large enough that system calls do not show beside hashing.
const BLOCK: usize = 1 << 18;

/// How long an unwanted copy is kept.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// How many bytes of copies are kept; those of the last day always.
const MOST_BYTES: u64 = 8 << 30;
/// How often the lock is tried, every 5 ms.
const PATIENCE: u32 = 100;
/// When a copy was wanted is written down this coarsely.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The directory of private copies.
#[derive(Clone, Debug)]
pub struct ObjectStore {
    dir: PathBuf,
    /// The directory, locked against pruning while this lives. `None` where the file system has no locks.
    _lock: Option<Arc<File>>,
}

/// One private copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// What is opened.
    pub path: PathBuf,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

impl Object {
    /// The copy, open for reading; nothing but a regular file, and never waited for.
    pub(crate) fn open(&self) -> io::Result<File> {
        private::regular(&self.path)
    }

    /// Whether the copy still holds the bytes of its name.
    ///
    /// # Errors
    /// `bytes_changed`.
    pub fn verify(&self) -> Result<(), Refusal> {
        let found = self.open().and_then(|copy| hash(&copy));
        let changed = |found: &str| {
            Err(Code::BytesChanged.because(format!(
                "the private copy was changed after its scan: expected sha256 {}, found {found}",
                self.sha256
            )))
        };
        match found {
            Ok(sha256) if sha256 == self.sha256 => Ok(()),
            Ok(sha256) => changed(&sha256),
            Err(e) => changed(&e.to_string()),
        }
    }
}

/// Why a candidate has no private copy: its own fault, or the cache's.
#[derive(Debug)]
pub enum StoreFailure {
    /// The candidate cannot be read.
    Candidate(Refusal),
    /// The cache cannot be written.
    Cache(LoaderError),
}

impl ObjectStore {
    /// The store below `cache`; its directory is made on first use.
    ///
    /// # Errors
    /// [`LoaderError::Cache`] when the directory cannot be made or closed to others.
    pub fn open(cache: &Path) -> Result<Self, LoaderError> {
        let dir = cache.join("objects");
        let failed = |action| {
            let path = dir.clone();
            move |source| LoaderError::Cache {
                path,
                action,
                source,
            }
        };
        private::directory(&dir).map_err(failed("use the directory"))?;
        let dir = dir
            .canonicalize()
            .map_err(failed("resolve the directory"))?;
        let lock = lock(&dir, SystemTime::now());
        Ok(ObjectStore {
            dir,
            _lock: lock.map(Arc::new),
        })
    }

    /// Hashes `file` and makes sure that an identical private copy exists.
    ///
    /// # Errors
    /// [`StoreFailure::Candidate`] when the file cannot be read, [`StoreFailure::Cache`] when the copy cannot be
    /// written; nothing is left behind in either case.
    pub fn intern(&self, file: &File) -> Result<Object, StoreFailure> {
        let sha256 = hash(file).map_err(candidate)?;
        let path = self.dir.join(format!("{sha256}.so"));
        if same_bytes(file, &path).map_err(candidate)? {
            wanted(&path, SystemTime::now());
            return Ok(Object { path, sha256 });
        }
        self.write(file)
    }

    /// Copies while hashing: the name is the digest of what was written, whatever happened to the original.
    fn write(&self, file: &File) -> Result<Object, StoreFailure> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let temporary = self.dir.join(format!(
            ".{}.{}.tmp",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ));
        let made = self.write_through(file, &temporary);
        if made.is_err() {
            // Already failing; the file may not exist at all.
            let _ = fs::remove_file(&temporary);
        }
        made
    }

    fn write_through(&self, file: &File, temporary: &Path) -> Result<Object, StoreFailure> {
        let out = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(temporary)
            .map_err(|e| cache(temporary, "create the file", e))?;
        let protect = out
            .try_clone()
            .map_err(|e| cache(temporary, "protect the file", e))?;
        let sha256 = copy_hashed(file, out, temporary)?;
        protect
            .set_permissions(Permissions::from_mode(0o400))
            .map_err(|e| cache(temporary, "protect the file", e))?;
        let path = self.dir.join(format!("{sha256}.so"));
        fs::rename(temporary, &path).map_err(|e| cache(temporary, "rename the file", e))?;
        Ok(Object { path, sha256 })
    }
}

/// Prunes when nobody else uses the store, then locks it for a user.
fn lock(dir: &Path, now: SystemTime) -> Option<File> {
    let lock = File::open(dir).ok()?;
    if lock.try_lock().is_ok() {
        prune(dir, now);
    }
    // From alone to shared: whoever comes in between prunes, at worst, what is written again. Pruning takes
    // milliseconds; somebody who was stopped in it keeps nobody waiting.
    for _ in 0..PATIENCE {
        if lock.try_lock_shared().is_ok() {
            return Some(lock);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Notes that a copy is used, once a day.
fn wanted(copy: &Path, now: SystemTime) {
    let noted = private::regular(copy).and_then(|file| {
        let age = now.duration_since(file.metadata()?.modified()?);
        match age.is_ok_and(|age| age < DAY) {
            true => Ok(()),
            false => file.set_modified(now),
        }
    });
    if let Err(e) = noted {
        tracing::debug!("{}: its use cannot be noted: {e}", copy.display());
    }
}

/// Removes what nobody wanted for a month, the longest unwanted of too many bytes, and what a killed scan left. What
/// cannot be removed stays for the next time.
fn prune(dir: &Path, now: SystemTime) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    let mut copies: Vec<(Duration, u64, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            // A time of the future was written under another clock.
            let age = now.duration_since(metadata.modified().ok()?);
            Some((age.unwrap_or_default(), metadata.len(), entry.path()))
        })
        .collect();
    copies.sort();
    let mut bytes = 0_u64;
    for (age, len, path) in copies {
        let temporary = path.extension().is_some_and(|e| e == "tmp");
        bytes = bytes.saturating_add(len);
        if age >= KEPT || (age >= DAY && (temporary || bytes > MOST_BYTES)) {
            match fs::remove_file(&path) {
                Ok(()) => tracing::debug!("{}: unwanted, removed", path.display()),
                Err(e) => tracing::debug!("{}: unwanted, not removed: {e}", path.display()),
            }
        }
    }
}

fn copy_hashed(file: &File, mut out: File, shown: &Path) -> Result<String, StoreFailure> {
    let mut hasher = Sha256::new();
    let mut block = vec![0_u8; BLOCK];
    let mut offset = 0;
    loop {
        let n = read_at(file, &mut block, offset).map_err(candidate)?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&block[..n]);
        out.write_all(&block[..n])
            .map_err(|e| cache(shown, "write the file", e))?;
        offset += n as u64;
    }
}

/// SHA-256 of a whole file, lower-case hexadecimal.
fn hash(file: &File) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut block = vec![0_u8; BLOCK];
    let mut offset = 0;
    loop {
        let n = read_at(file, &mut block, offset)?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&block[..n]);
        offset += n as u64;
    }
}

fn same_bytes(file: &File, copy: &Path) -> io::Result<bool> {
    // A copy that is absent or cannot be read is made anew.
    let Ok(mut copy) = private::regular(copy) else {
        return Ok(false);
    };
    let (mut a, mut b) = (vec![0_u8; BLOCK], vec![0_u8; BLOCK]);
    let mut offset = 0;
    loop {
        let n = read_at(file, &mut a, offset)?;
        if n == 0 {
            return Ok(matches!(copy.read(&mut b[..1]), Ok(0)));
        }
        if copy.read_exact(&mut b[..n]).is_err() || a[..n] != b[..n] {
            return Ok(false);
        }
        offset += n as u64;
    }
}

fn read_at(file: &File, block: &mut [u8], offset: u64) -> io::Result<usize> {
    if offset > LARGEST {
        return Err(io::Error::new(
            ErrorKind::FileTooLarge,
            format!("it grew beyond {LARGEST} bytes"),
        ));
    }
    loop {
        match file.read_at(block, offset) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn cache(path: &Path, action: &'static str, source: io::Error) -> StoreFailure {
    StoreFailure::Cache(LoaderError::Cache {
        path: path.to_path_buf(),
        action,
        source,
    })
}

fn candidate(e: io::Error) -> StoreFailure {
    StoreFailure::Candidate(Code::Unreadable.because(format!("cannot be read: {e}")))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(64), |mut s, b| {
        let _ = write!(s, "{b:02x}"); // writing to a String does not fail
        s
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn file(dir: &Path, bytes: &[u8]) -> File {
        let path = dir.join("original.so");
        fs::write(&path, bytes).expect("write");
        File::open(path).expect("open")
    }

    #[test]
    fn a_copy_has_the_digest_as_name_and_is_private() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let store = ObjectStore::open(&dir.path().join("cache")).expect("store");
        let object = store.intern(&file(dir.path(), b"abc")).expect("copy");
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(object.sha256, known);
        assert_eq!(fs::read(&object.path).expect("read"), b"abc");
        assert_eq!(
            object.path.metadata().expect("metadata").mode() & 0o777,
            0o400
        );
        let objects = object.path.parent().expect("parent");
        assert_eq!(objects.metadata().expect("metadata").mode() & 0o777, 0o700);
        assert_eq!(
            fs::read_dir(objects).expect("list").count(),
            1,
            "nothing else is left"
        );
    }

    #[test]
    fn an_equal_copy_is_kept_and_a_spoiled_one_replaced() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let store = ObjectStore::open(dir.path()).expect("store");
        let original = file(dir.path(), &vec![7; 3 * BLOCK + 5]);
        let first = store.intern(&original).expect("copy");
        let inode = first.path.metadata().expect("metadata").ino();
        assert_eq!(store.intern(&original).expect("copy"), first);
        assert_eq!(
            first.path.metadata().expect("metadata").ino(),
            inode,
            "not rewritten"
        );
        for spoiled in [&b"x"[..], &vec![7; 3 * BLOCK + 6]] {
            fs::remove_file(&first.path).expect("remove");
            fs::write(&first.path, spoiled).expect("spoil");
            assert_eq!(store.intern(&original).expect("copy"), first);
            assert_eq!(fs::read(&first.path).expect("read").len(), 3 * BLOCK + 5);
        }
    }

    #[test]
    fn a_pipe_or_a_link_at_the_name_of_a_copy_is_replaced() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let store = ObjectStore::open(dir.path()).expect("store");
        let original = file(dir.path(), b"abc");
        let object = store.intern(&original).expect("copy");
        fs::remove_file(&object.path).expect("remove");
        let made = std::process::Command::new("mkfifo")
            .arg(&object.path)
            .status();
        if made.is_ok_and(|s| s.success()) {
            assert!(object.verify().is_err(), "not waited for");
            assert_eq!(store.intern(&original).expect("copy"), object);
            object.verify().expect("whole");
            fs::remove_file(&object.path).expect("remove");
        }
        std::os::unix::fs::symlink(dir.path().join("original.so"), &object.path).expect("link");
        assert!(object.verify().is_err(), "a link is not followed");
        store.intern(&original).expect("copy");
        object.verify().expect("whole");
    }

    /// As if the file had last been wanted this long ago.
    fn aged(path: &Path, days: u32) {
        let then = SystemTime::now() - DAY * days;
        File::open(path)
            .and_then(|file| file.set_modified(then))
            .expect("its own file");
    }

    fn names(store: &ObjectStore) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&store.dir)
            .expect("list")
            .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn what_nobody_wants_is_removed_by_who_is_alone() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let store = ObjectStore::open(dir.path()).expect("store");
        let [old, used, young] = [b"old", b"use", b"you"]
            .map(|bytes| store.intern(&file(dir.path(), bytes)).expect("copy"));
        let left = store.dir.join(".1.0.tmp");
        fs::write(&left, "half").expect("write");
        aged(&old.path, 31);
        aged(&used.path, 31);
        aged(&young.path, 29);
        aged(&left, 2);
        // Somebody is using the store: nothing is removed under their hands.
        let other = ObjectStore::open(dir.path()).expect("store");
        assert_eq!(names(&other).len(), 4);
        // The use of a copy is noted.
        other.intern(&file(dir.path(), b"use")).expect("copy");
        drop((store, other));
        let store = ObjectStore::open(dir.path()).expect("store");
        let mut kept = [used, young].map(|o| format!("{}.so", o.sha256));
        kept.sort();
        assert_eq!(names(&store), kept);
        assert_eq!(store.intern(&file(dir.path(), b"old")).expect("copy"), old);
    }

    #[test]
    fn too_many_bytes_cost_the_longest_unwanted() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let sparse = |name: &str, days: u32| {
            let path = dir.path().join(name);
            let file = File::create(&path).expect("create");
            file.set_len(MOST_BYTES / 2 + 1).expect("sparse");
            aged(&path, days);
        };
        sparse("a.so", 9);
        sparse("b.so", 3);
        sparse("c.so", 0);
        prune(dir.path(), SystemTime::now());
        let there = |name: &str| dir.path().join(name).exists();
        assert_eq!(
            [there("a.so"), there("b.so"), there("c.so")],
            [false, false, true]
        );
        // Young ones stay, however large.
        sparse("d.so", 0);
        prune(dir.path(), SystemTime::now());
        assert!(there("c.so") && there("d.so"));
    }

    #[test]
    fn an_unusable_cache_says_so() {
        let dir = tempfile::tempdir().expect("temporary directory");
        fs::write(dir.path().join("file"), "x").expect("write");
        let error = ObjectStore::open(&dir.path().join("file")).expect_err("a file in the way");
        let text = error.to_string();
        assert!(
            text.contains("STRUCTURES_CACHE_DIR") && text.contains("objects"),
            "{text}"
        );

        let store = ObjectStore::open(dir.path()).expect("store");
        fs::remove_dir(&store.dir).expect("remove");
        match store.intern(&file(dir.path(), b"abc")) {
            Err(StoreFailure::Cache(error)) => assert!(error.to_string().contains("create")),
            other => panic!("expected a cache error, found {other:?}"),
        }
    }

    #[test]
    fn a_failed_copy_leaves_nothing_behind() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let store = ObjectStore::open(dir.path()).expect("store");
        // Reading a directory fails after the temporary file was made.
        let directory = File::open(dir.path()).expect("open");
        assert!(matches!(
            store.write(&directory),
            Err(StoreFailure::Candidate(_))
        ));
        assert_eq!(fs::read_dir(&store.dir).expect("list").count(), 0);
    }

    #[test]
    fn a_full_disk_is_the_cache_s_failure() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let original = file(dir.path(), b"abc");
        let full = OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("open");
        match copy_hashed(&original, full, Path::new("objects/x")) {
            Err(StoreFailure::Cache(error)) => {
                let text = error.to_string();
                assert!(
                    text.contains("objects/x") && text.contains("free some space"),
                    "{text}"
                );
            }
            other => panic!("expected a cache error, found {other:?}"),
        }
    }
}
