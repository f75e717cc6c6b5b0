//! What the end-to-end tests share: the built program, directories with chosen plugins, the demo model.
//!
//! The tests run what the build left in the target directory; `cargo xtask test` builds the workspace first.

#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod blocks;
pub mod in_process;
pub mod steps;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value as Json;

pub mod large;

/// The workspace root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("workspace root")
        .to_path_buf()
}

/// The directory with the built program and plugins.
pub fn build_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("the running program has a path");
    exe.ancestors()
        .skip(1)
        .find(|dir| dir.join("structures").is_file())
        .unwrap_or_else(|| {
            panic!(
                "`structures` is not built beside {}; run `cargo build --release --workspace` first",
                exe.display()
            )
        })
        .to_path_buf()
}

/// The demo model's directory.
pub fn demo() -> PathBuf {
    root().join("demo").join("model")
}

/// A directory that holds exactly these of the repository's plugins.
pub fn plugins(ids: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temporary directory");
    for id in ids {
        let file = format!("libstructures_plugin_{id}.so");
        let built = build_dir().join(&file);
        std::fs::copy(&built, dir.path().join(&file))
            .unwrap_or_else(|e| panic!("{}: {e}; build the workspace first", built.display()));
    }
    dir
}

/// The program, with this plugin directory and nothing else on its search path, and a cache of its own.
pub fn structures(plugins: &Path) -> Command {
    let mut command = Command::new(build_dir().join("structures"));
    command
        .env("STRUCTURES_PLUGIN_PATH", plugins)
        .env_remove("STRUCTURES_ADD_PLUGIN_PATH")
        .env_remove("STRUCTURES_BINDING_PATH")
        .env("STRUCTURES_CACHE_DIR", build_dir().join("test-cache"))
        .env("STRUCTURES_DEMO_MODEL", demo())
        .env_remove("STRUCTURES_SCANNER")
        .env(
            "STRUCTURES_DECISIONS",
            build_dir().join("no-decisions.json"),
        )
        .args(["--threads", "2"]);
    command
}

/// Runs and gives exit code, the one JSON document on stdout, and stderr.
pub fn json(command: &mut Command) -> (i32, Json, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.arg("--json").output().expect("the program starts");
    let stderr = String::from_utf8_lossy(&stderr).into_owned();
    let text = String::from_utf8_lossy(&stdout);
    let document = serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("stdout is not one JSON document ({e}): {text}\n{stderr}"));
    (status.code().expect("not killed"), document, stderr)
}

/// Fewer rounds than the default: what is tested is the path, not the figure.
pub const QUICK: [&str; 4] = ["--rounds", "3", "--iters", "3"];

/// The unit rows of a structure.
pub fn units<'a>(receipt: &'a Json, structure: &str) -> Vec<&'a Json> {
    receipt["units"]
        .as_array()
        .expect("units")
        .iter()
        .filter(|u| u["structure"] == structure)
        .collect()
}
