//! Whether a result can be written, asked before the minutes of work that make it.
//!
//! The write itself still checks: a disk fills up in between. Nothing but the asked directory is left behind.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use crate::failure::Failure;

/// A directory for results, made where it is missing.
pub fn directory(switch: &str, dir: &Path) -> Result<(), Failure> {
    let made = fs::create_dir_all(dir).and_then(|()| try_in(dir));
    made.map_err(|e| refused(switch, dir, &e))
}

/// A file to be written; its directory must be there.
pub fn file(switch: &str, path: &Path) -> Result<(), Failure> {
    let dir = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let possible = if path.is_dir() {
        Err(io::Error::new(
            io::ErrorKind::IsADirectory,
            "expected a file, found a directory",
        ))
    } else {
        try_in(dir)
    };
    possible.map_err(|e| refused(switch, path, &e))
}

fn try_in(dir: &Path) -> io::Result<()> {
    let probe = dir.join(format!(".structures.{}.tmp", std::process::id()));
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&probe)?;
    fs::remove_file(&probe)
}

fn refused(switch: &str, path: &Path, e: &io::Error) -> Failure {
    Failure::failed(
        "io",
        format!(
            "{switch} {}: cannot write there: {e}; nothing was run",
            path.display()
        ),
        format!("give {switch} a place in a directory you may write to"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_writable_or_named() {
        let root = std::env::temp_dir().join(format!("structures-writable-{}", std::process::id()));
        let here = root.join("a/b");
        assert!(directory("--receipt-dir", &here).is_ok());
        assert!(here.is_dir());
        let blocked = root.join("f");
        fs::write(&blocked, "a file").unwrap();
        for (result, name) in [
            (directory("--receipt-dir", &blocked), "f"),
            (directory("--receipt-dir", &blocked.join("d")), "f/d"),
            (file("-o", &root.join("no/spec.json")), "no/spec.json"),
            (file("-o", &blocked.join("spec.json")), "f/spec.json"),
            (file("-o", &here), "a/b"),
        ] {
            let e = result.unwrap_err();
            assert_eq!((e.exit, e.code.as_str()), (1, "io"));
            assert!(e.message.contains(name), "{}", e.message);
        }
        assert!(file("-o", &here.join("spec.json")).is_ok());
        assert_eq!(fs::read_dir(&here).unwrap().count(), 0, "nothing is left");
        fs::remove_dir_all(&root).unwrap();
    }
}
