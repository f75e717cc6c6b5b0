//! The bytes behind the library that say which fault to show.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::fault::Fault;

const MAGIC: &str = "STRUCTURES_FIXTURE:";
/// Longer than any trailer.
const TAIL: u64 = 512;

/// What a trailer says. A library without one is good and called `fixture`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// What is wrong with it.
    pub fault: Fault,
    /// Its plugin id.
    pub id: String,
}

/// The text to append to a copy of the library.
pub fn trailer(fault: Fault, id: &str) -> String {
    format!("\n{MAGIC}{}:{id}\n", fault.name())
}

/// This library's own trailer, read once.
pub(crate) fn own() -> &'static Trailer {
    static OWN: OnceLock<Trailer> = OnceLock::new();
    OWN.get_or_init(|| {
        own_file().and_then(|path| read(&path)).unwrap_or(Trailer {
            fault: Fault::None,
            id: "fixture".into(),
        })
    })
}

/// The file that this code was mapped from.
fn own_file() -> Option<PathBuf> {
    let here = own_file as fn() -> Option<PathBuf> as usize;
    std::fs::read_to_string("/proc/self/maps")
        .ok()?
        .lines()
        .find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let (start, end) = (
                usize::from_str_radix(start, 16).ok()?,
                usize::from_str_radix(end, 16).ok()?,
            );
            let path = &rest[rest.find('/')?..];
            (start..end).contains(&here).then(|| PathBuf::from(path))
        })
}

fn read(path: &Path) -> Option<Trailer> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))
        .ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    let last = tail.strip_suffix(b"\n")?.rsplit(|b| *b == b'\n').next()?;
    let (fault, id) = std::str::from_utf8(last)
        .ok()?
        .strip_prefix(MAGIC)?
        .split_once(':')?;
    Some(Trailer {
        fault: Fault::from_name(fault)?,
        id: id.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_the_trailer() {
        let path = std::env::temp_dir().join(format!("fixture-trailer-{}", std::process::id()));
        let mut bytes = vec![7_u8; 2000];
        bytes.extend_from_slice(trailer(Fault::Half, "a_b-c").as_bytes());
        std::fs::write(&path, &bytes).expect("write");
        let expected = Trailer {
            fault: Fault::Half,
            id: "a_b-c".into(),
        };
        assert_eq!(read(&path), Some(expected));
        std::fs::write(&path, b"no trailer\n").expect("write");
        assert_eq!(read(&path), None);
        std::fs::remove_file(&path).expect("remove");
    }

    #[test]
    fn code_knows_its_file() {
        let exe = std::env::current_exe()
            .expect("path")
            .canonicalize()
            .expect("canonical");
        assert_eq!(own_file(), Some(exe));
        assert_eq!(own().fault, Fault::None);
    }
}
