//! `cargo xtask roofline [--threads] [FORMAT...]`: how much of this machine each x86 kernel uses; with the switch, what a
//! second thread gains at each shape instead.
//!
//! The measuring program is an example of the backend, so that it is built as the backend is; this only runs it.

use crate::run::{cargo, step};

/// Builds and runs it; formats are those of the backend's forms, all when none is given.
pub fn run(args: &[String]) -> Result<(), String> {
    let (switches, formats): (Vec<&String>, Vec<&String>) =
        args.iter().partition(|a| a.starts_with('-'));
    let example = match switches.as_slice() {
        [] => "roofline",
        [one] if *one == "--threads" => "threads",
        [odd, ..] => {
            return Err(format!(
                "unknown switch `{odd}`; usage: roofline [--threads] [FORMAT...]"
            ))
        }
    };
    let package = ["-p", "structures-plugin-x86", "--example", example];
    step("build", cargo().args(["build", "--release"]).args(package))?;
    step(
        "roofline",
        cargo()
            .args(["run", "--release", "--quiet"])
            .args(package)
            .arg("--")
            .args(formats),
    )
}
