//! The test's side: finds the built library and makes copies with a trailer.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::fault::Fault;
use crate::trailer::trailer;

const FILE: &str = "libstructures_fixture_plugin.so";

/// The built library. Cargo builds it with everything that depends on this crate.
///
/// # Panics
/// When it is not where cargo puts it.
pub fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("the running program has a path");
    exe.ancestors()
        .skip(1)
        .take(3)
        .flat_map(|dir| [dir.join(FILE), dir.join("deps").join(FILE)])
        .find(|path| path.is_file())
        .unwrap_or_else(|| {
            panic!(
                "{FILE} is not beside {}; build structures-fixture-plugin",
                exe.display()
            )
        })
}

/// A copy in `dir` that shows `fault` and is called `id`; its file is `<id>.so`.
///
/// # Panics
/// When the copy cannot be written.
pub fn fixture_copy(dir: &Path, fault: Fault, id: &str) -> PathBuf {
    fixture_copy_as(dir, &format!("{id}.so"), fault, id)
}

/// As [`fixture_copy`], under a file name of its own.
///
/// # Panics
/// When the copy cannot be written.
pub fn fixture_copy_as(dir: &Path, file: &str, fault: Fault, id: &str) -> PathBuf {
    let path = dir.join(file);
    let mut bytes = std::fs::read(library()).expect("the built library can be read");
    bytes.extend_from_slice(trailer(fault, id).as_bytes());
    let mut copy = std::fs::File::create(&path).expect("a copy can be made");
    copy.write_all(&bytes).expect("a copy can be written");
    let mode = std::fs::Permissions::from_mode(0o644);
    copy.set_permissions(mode).expect("permissions can be set");
    path
}
