//! Builds fixtures of the C door: one C file, faults by `-D` flags, about 100 ms each.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The C compiler of the README: `$CC`, else `cc`.
pub fn c_compiler() -> OsString {
    std::env::var_os("CC").unwrap_or_else(|| "cc".into())
}

/// Builds `<dir>/<id>.so` with this id and these flags (`LONGER`, `API="1.0.0"`): see `c/fixture.c`.
///
/// # Panics
/// When the compiler refuses.
pub fn c_fixture(dir: &Path, id: &str, flags: &[&str]) -> PathBuf {
    c_fixture_by(&c_compiler(), dir, id, flags)
}

/// As [`c_fixture`], with another compiler.
///
/// # Panics
/// When the compiler refuses.
pub fn c_fixture_by(compiler: &OsString, dir: &Path, id: &str, flags: &[&str]) -> PathBuf {
    c_fixture_with(compiler, dir, id, flags, &[])
}

/// As [`c_fixture_by`], with more arguments for the compiler, such as what it tells the linker.
///
/// # Panics
/// When the compiler refuses.
pub fn c_fixture_with(
    compiler: &OsString,
    dir: &Path,
    id: &str,
    flags: &[&str],
    more: &[&str],
) -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = own.join("../..");
    let library = dir.join(format!("{id}.so"));
    let made = Command::new(compiler)
        .args([
            "-std=c11",
            "-D_POSIX_C_SOURCE=200809L",
            "-O1",
            "-fPIC",
            "-shared",
        ])
        .args([
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-Wno-unused-function",
        ])
        .arg(format!("-DID=\"{id}\""))
        .args(flags.iter().map(|flag| format!("-D{flag}")))
        .arg("-I")
        .arg(root.join("plugin-api/include"))
        .arg("-I")
        .arg(root.join("plugin-api/c"))
        .arg("-I")
        .arg(root.join("plugins/c-sample/c"))
        .arg(own.join("c/fixture.c"))
        .arg(root.join("plugin-api/c/json.c"))
        .args(more)
        .args(["-lm", "-o"])
        .arg(&library)
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}", compiler.to_string_lossy()));
    let message = String::from_utf8_lossy(&made.stderr);
    assert!(
        made.status.success() && message.is_empty(),
        "{id}: {message}"
    );
    library
}
