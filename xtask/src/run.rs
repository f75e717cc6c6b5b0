//! Running other programs with their output passed through.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The workspace root.
pub fn root() -> PathBuf {
    let manifest = PathBuf::from(
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()),
    );
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

/// The cargo that runs us.
pub fn cargo() -> Command {
    let mut c = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    c.current_dir(root());
    c
}

/// Where release binaries are.
pub fn release_dir() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join("release")
}

/// Files below a directory.
pub fn find(dir: &Path, wanted: &dyn Fn(&Path) -> bool, hits: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            find(&path, wanted, hits);
        } else if wanted(&path) {
            hits.push(path);
        }
    }
}

/// Runs it; an error says what was run and how it ended.
pub fn step(title: &str, command: &mut Command) -> Result<(), String> {
    step_with(title, command, &[0])
}

/// As [`step`], with the exit codes that are fine.
pub fn step_with(title: &str, command: &mut Command, fine: &[i32]) -> Result<(), String> {
    eprintln!("\n== {title}");
    let started = Instant::now();
    let status = command
        .status()
        .map_err(|e| format!("{title}: cannot start {:?}: {e}", command.get_program()))?;
    if !status.code().is_some_and(|code| fine.contains(&code)) {
        return Err(format!("{title} failed ({status}): {command:?}"));
    }
    eprintln!(
        "== {title}: done in {:.1} s",
        started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Whether `cargo NAME` exists.
pub fn has_cargo_command(name: &str) -> bool {
    cargo()
        .args([name, "--version"])
        .output()
        .is_ok_and(|o| o.status.success())
}
