//! `cargo xtask sanitize`: the backends' code under AddressSanitizer.
//!
//! The unit tests of the kernels, then every form of every CPU backend over generated shapes by `structures conform`,
//! once on the CPU's own instructions and once on each lower rung of the x86 ladder. Wants a nightly toolchain, for the
//! sanitizer is not in a stable one; builds below `target/sanitize`, with everything it is linked from.

use std::process::Command;

use crate::run::{root, step};

const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// Crates with kernels of their own.
const BACKENDS: [&str; 3] = [
    "structures-plugin-x86",
    "structures-plugin-portable",
    "structures-plugin-c-sample",
];
/// Instructions the x86 backend is held to, best first; empty is what the CPU has.
const RUNGS: [&str; 2] = ["", "avx2"];

/// See the module.
pub fn run(args: &[String]) -> Result<(), String> {
    if !args.is_empty() {
        return Err(format!("unknown arguments {args:?}; usage: sanitize"));
    }
    let target = root().join("target/sanitize");
    let nightly = |what: &str, packages: &[&str]| {
        let mut c = Command::new("cargo");
        c.current_dir(root())
            .args(["+nightly", what, "--release", "--target", TRIPLE])
            .args(packages.iter().flat_map(|p| ["-p", p]))
            .env("CARGO_TARGET_DIR", &target)
            .env("STRUCTURES_SANITIZE", "address")
            .env("RUSTFLAGS", "-Zsanitizer=address");
        c
    };
    step("unit tests", nightly("test", &BACKENDS).arg("--lib"))?;
    step("build backends", &mut nightly("build", &BACKENDS))?;
    // The sanitizer's runtime is the program's, and libraries find it there.
    step(
        "build the host",
        nightly("rustc", &["structures-cli"]).args([
            "--bin",
            "structures",
            "--",
            "-Clink-args=-rdynamic",
        ]),
    )?;
    let built = target.join(TRIPLE).join("release");
    for backend in BACKENDS {
        let library = format!("lib{}.so", backend.replace('-', "_"));
        for rung in RUNGS {
            // Each check is a process of its own, several times slower here.
            let mut conform = Command::new(built.join("structures"));
            conform
                .arg("conform")
                .arg(built.join(&library))
                .args(["--timeout", "600"])
                .env("STRUCTURES_CATALOG_PATH", root().join("catalog"));
            let title = match rung {
                "" => format!("conform {backend}"),
                rung => {
                    conform.env("STRUCTURES_X86_ISA", rung);
                    format!("conform {backend} on {rung}")
                }
            };
            step(&title, &mut conform)?;
            if backend != BACKENDS[0] {
                break;
            }
        }
    }
    Ok(())
}
