//! Files that are whole or not there: written beside their place and renamed into it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// Longest file of text that is read whole: no receipt or file of decisions comes near it.
pub const LONGEST_TEXT: u64 = 64 << 20;

/// Reads a file of text that somebody named.
///
/// # Errors
/// It cannot be opened, is no regular file (a pipe would be waited for without end), is longer than [`LONGEST_TEXT`],
/// or is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    let fit = |metadata: &fs::Metadata| {
        let bad = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        match (metadata.is_file(), metadata.len()) {
            (false, _) => bad("expected a regular file, found something else".into()),
            (true, n) if n > LONGEST_TEXT => {
                bad(format!("expected at most {LONGEST_TEXT} bytes, found {n}"))
            }
            _ => Ok(()),
        }
    };
    // Before it is opened: opening a pipe waits for its other end.
    fit(&fs::metadata(path)?)?;
    let file = File::open(path)?;
    fit(&file.metadata()?)?;
    let mut text = String::new();
    file.take(LONGEST_TEXT).read_to_string(&mut text)?;
    Ok(text)
}

/// A file that could not be written.
#[derive(Debug, Error)]
#[error("cannot {action} {}: {source}; nothing was written", path.display())]
pub struct WriteError {
    /// What was tried.
    pub action: &'static str,
    /// The file asked for.
    pub path: PathBuf,
    /// Why not.
    pub source: io::Error,
}

/// Writes a file so that a reader sees the old content or the new one, never a part: a temporary file in the
/// same directory, synced, then renamed. On an error the temporary file is removed and the old one untouched.
///
/// # Errors
/// The directory does not exist or is not writable, the disk is full, the path is a directory.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let failed = |action| {
        move |source| WriteError {
            action,
            path: path.to_path_buf(),
            source,
        }
    };
    let temporary = beside(path).map_err(failed("write"))?;
    let written = fill(&temporary, bytes)
        .map_err(failed("write"))
        .and_then(|()| fs::rename(&temporary, path).map_err(failed("replace")));
    if written.is_err() {
        // Best effort: the error to report is the first one.
        let _ = fs::remove_file(&temporary);
        return written;
    }
    // The rename itself reaches the disk with the directory; a file system without that still has the file.
    if let Ok(directory) = File::open(directory_of(path)) {
        let _ = directory.sync_all();
    }
    Ok(())
}

/// Like [`write_atomic`], creating missing directories first.
///
/// # Errors
/// As [`write_atomic`], and a directory that cannot be made.
pub fn write_atomic_in_new_dirs(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    fs::create_dir_all(directory_of(path)).map_err(|source| WriteError {
        action: "create the directory of",
        path: path.to_path_buf(),
        source,
    })?;
    write_atomic(path, bytes)
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// A name in the same directory that no other writer of this machine has.
fn beside(path: &Path) -> io::Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "the path does not name a file")
    })?;
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    temporary.push(format!(".{}.{count}.tmp", std::process::id()));
    Ok(directory_of(path).join(temporary))
}

fn fill(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn only_files_of_a_sensible_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        assert_eq!(
            read_text(&path).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        fs::write(&path, "text").unwrap();
        assert_eq!(read_text(&path).unwrap(), "text");
        fs::write(&path, [0xff]).unwrap();
        assert!(read_text(&path).is_err());
        for bad in [dir.path(), Path::new("/dev/zero")] {
            let why = read_text(bad).unwrap_err().to_string();
            assert!(why.contains("regular file"), "{why}");
        }
        // Holes: the size counts, not what is stored.
        let long = File::create(&path).unwrap();
        long.set_len(LONGEST_TEXT + 1).unwrap();
        let why = read_text(&path).unwrap_err().to_string();
        assert!(why.contains("at most"), "{why}");
    }

    #[test]
    fn a_file_is_written_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(names(dir.path()), ["r.json"]);
    }

    #[test]
    fn a_failed_write_leaves_nothing_and_names_path_and_cause() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("no/r.json");
        let text = write_atomic(&missing, b"x").unwrap_err().to_string();
        assert!(
            text.contains("no/r.json") && text.contains("nothing was written"),
            "{text}"
        );
        // The target is a directory: the rename fails, the temporary file goes.
        let taken = dir.path().join("taken");
        fs::create_dir(&taken).unwrap();
        fs::write(taken.join("inside"), b"y").unwrap();
        let error = write_atomic(&taken, b"x").unwrap_err();
        assert_eq!(error.action, "replace");
        assert_eq!(names(dir.path()), ["taken"]);
        assert!(write_atomic(Path::new("/"), b"x").is_err());
    }

    #[test]
    fn directories_are_made_only_when_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/r.json");
        write_atomic_in_new_dirs(&path, b"x").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"x");
        fs::write(dir.path().join("file"), b"").unwrap();
        let blocked = dir.path().join("file/r.json");
        let error = write_atomic_in_new_dirs(&blocked, b"x").unwrap_err();
        assert!(
            error.to_string().contains("create the directory"),
            "{error}"
        );
    }

    #[test]
    fn writers_of_one_file_do_not_meet() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        std::thread::scope(|scope| {
            for i in 0..8u8 {
                let path = &path;
                scope.spawn(move || write_atomic(path, &[i; 4096]).unwrap());
            }
        });
        let held = fs::read(&path).unwrap();
        assert!(held.len() == 4096 && held.iter().all(|b| *b == held[0]));
        assert_eq!(names(dir.path()), ["r.json"]);
    }
}
