//! Builds the library with the C compiler (`$CC`, else `cc`) and nothing else, and lays it where Cargo lays this
//! workspace's other backends: beside the programs, so that a plain build tree has it on its search path.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, SystemTime};

const SOURCES: [&str; 2] = ["c/plugin.c", "../../plugin-api/c/json.c"];
const LIBRARY: &str = "libstructures_plugin_c_sample.so";

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let variable = |name: &str| std::env::var_os(name).ok_or(format!("{name} is not set"));
    let own = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(variable("OUT_DIR")?);
    let include = own.join("../../plugin-api/include");
    let reader = own.join("../../plugin-api/c");
    println!("cargo:rerun-if-changed=c");
    println!("cargo:rerun-if-changed={}", include.display());
    println!("cargo:rerun-if-changed={}", reader.display());
    println!("cargo:rerun-if-env-changed=CC");

    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let library = out.join(LIBRARY);
    let made = Command::new(&compiler)
        .args(["-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"])
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"])
        .arg(&library)
        .arg("-I")
        .arg(include)
        .arg("-I")
        .arg(reader)
        .args(SOURCES.map(|source| own.join(source)))
        .arg("-lm")
        .output()
        .map_err(|e| {
            format!("{compiler:?} cannot be started ({e}): a C compiler is needed, or CC names one")
        })?;
    if !made.status.success() {
        return Err(String::from_utf8_lossy(&made.stderr).into_owned());
    }
    println!("cargo:rustc-env=C_SAMPLE_LIBRARY={}", library.display());

    // OUT_DIR is <profile>/build/<package>/out.
    let profile = out
        .ancestors()
        .nth(3)
        .ok_or("OUT_DIR has no profile directory")?;
    println!("cargo:rerun-if-changed={}", profile.join(LIBRARY).display());
    lay(&library, &profile.join(LIBRARY))
}

/// Older than any run of this script, so that Cargo, which compares the laid file's time with the last run's, runs it
/// again when the file was removed or replaced and not otherwise.
const AGE: Duration = Duration::from_secs(3600);

/// Copies by rename: a program that has the old one open keeps it.
fn lay(library: &Path, to: &Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", to.display());
    let fresh = to.with_extension("so.tmp");
    std::fs::copy(library, &fresh).map_err(failed)?;
    std::fs::File::options()
        .write(true)
        .open(&fresh)
        .and_then(|file| file.set_modified(SystemTime::now() - AGE))
        .map_err(failed)?;
    std::fs::rename(&fresh, to).map_err(failed)
}
