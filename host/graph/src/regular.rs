//! Opening files that somebody else wrote: regular ones, after links are followed, and nothing else.
//!
//! A pipe would be waited for without end, and a device says that it is empty and never ends.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The file and its length.
pub fn open(path: &Path) -> Result<(File, u64)> {
    let fit = |found: &Metadata| match found.is_file() {
        true => Ok(found.len()),
        false => {
            let text = "expected a regular file, found a directory, pipe or device";
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    };
    // Before it is opened: opening a pipe waits for its other end.
    fit(&std::fs::metadata(path)?)?;
    let file = File::open(path)?;
    let size = fit(&file.metadata()?)?;
    Ok((file, size))
}

/// All bytes of a file, `Err` with a length when there are more than `most`.
pub fn read(path: &Path, most: u64) -> Result<std::result::Result<Vec<u8>, u64>> {
    let (file, size) = open(path)?;
    if size > most {
        return Ok(Err(size));
    }
    let mut bytes = Vec::new();
    // Some files of the kernel's are longer than they say.
    file.take(most + 1).read_to_end(&mut bytes)?;
    Ok(match bytes.len() as u64 {
        n if n > most => Err(n),
        _ => Ok(bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_bounded_length_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("f"), dir.path().join("l"));
        std::fs::write(&file, "four").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read(&link, 4).unwrap(), Ok(b"four".to_vec()));
        assert_eq!(read(&link, 3).unwrap(), Err(4));
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for bad in [dir.path(), &link] {
            let why = read(bad, 4).unwrap_err().to_string();
            assert!(why.contains("regular file"), "{why}");
        }
    }
}
