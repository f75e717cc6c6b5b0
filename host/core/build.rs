//! What the host was built with, for the environment lock of a receipt: the compiler, and every package at its
//! version. A build outside this workspace has no lock file beside it; the lock then says so.

use std::path::Path;

/// Packages whose version alone may change a number or a layout.
const KEY_PACKAGES: [&str; 8] = [
    "abi_stable",
    "candle-core",
    "gemm",
    "half",
    "libloading",
    "rayon",
    "safetensors",
    "tokenizers",
];

fn main() {
    let manifest = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let lock = Path::new(&manifest).join("../../Cargo.lock");
    println!("cargo::rerun-if-changed={}", lock.display());
    println!("cargo::rerun-if-env-changed=RUSTC");
    let text = std::fs::read_to_string(&lock).unwrap_or_default();
    println!("cargo::rustc-env=STRUCTURES_PACKAGES={}", packages(&text));
    println!(
        "cargo::rustc-env=STRUCTURES_KEY_PACKAGES={}",
        KEY_PACKAGES.join(" ")
    );
    println!("cargo::rustc-env=STRUCTURES_RUSTC={}", compiler());
}

/// `name=version` of every package, sorted, separated by blanks.
fn packages(lock: &str) -> String {
    let field = |line: &str, name: &str| -> Option<String> {
        let value = line.strip_prefix(name)?.strip_prefix(" = \"")?;
        Some(value.strip_suffix('"')?.to_string())
    };
    let mut all = Vec::new();
    let mut name = None;
    for line in lock.lines() {
        if let Some(found) = field(line, "name") {
            name = Some(found);
        } else if let (Some(version), Some(name)) = (field(line, "version"), &name) {
            all.push(format!("{name}={version}"));
        }
    }
    all.sort();
    all.dedup();
    all.join(" ")
}

fn compiler() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let said = std::process::Command::new(rustc).arg("--version").output();
    said.ok()
        .and_then(|o| String::from_utf8(o.stdout).ok())
        .map_or_else(|| "unknown".into(), |text| text.trim().to_string())
}
