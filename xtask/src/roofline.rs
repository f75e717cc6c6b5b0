//! `cargo xtask roofline [FORMAT...]`: how much of this machine each x86 kernel uses.
//!
//! The measuring program is an example of the backend, so that it is built as the backend is; this only runs it.

use crate::run::{cargo, step};

/// Builds and runs it; formats are those of the backend's forms, all when none is given.
pub fn run(args: &[String]) -> Result<(), String> {
    if let Some(odd) = args.iter().find(|a| a.starts_with('-')) {
        return Err(format!(
            "unknown switch `{odd}`; usage: roofline [FORMAT...]"
        ));
    }
    let package = ["-p", "structures-plugin-x86", "--example", "roofline"];
    step("build", cargo().args(["build", "--release"]).args(package))?;
    step(
        "roofline",
        cargo()
            .args(["run", "--release", "--quiet"])
            .args(package)
            .arg("--")
            .args(args),
    )
}
