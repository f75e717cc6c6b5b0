//! `cargo xtask fuzz [SECONDS]`: the mutation harness for longer than CI gives it, with cases of its own.

use crate::run::{cargo, step};

/// Runs the harness; by default for five minutes.
pub fn run(args: &[String]) -> Result<(), String> {
    let seconds = match args {
        [] => 300,
        [n] => n
            .parse::<u64>()
            .map_err(|_| format!("`{n}` is no number of seconds; usage: fuzz [SECONDS]"))?,
        other => {
            return Err(format!(
                "unknown arguments {other:?}; usage: fuzz [SECONDS]"
            ))
        }
    };
    // The seed is printed with whatever is found; the same seed gives the same cases.
    let seed = match std::env::var("STRUCTURES_FUZZ_SEED") {
        Ok(seed) => seed,
        Err(_) => std::process::id().to_string(),
    };
    eprintln!("seed {seed}");
    // The whole workspace, so that nothing is built with other features than the tests have.
    step(
        "mutations",
        cargo()
            .args([
                "test",
                "--release",
                "--workspace",
                "--test",
                "yaml",
                "--test",
                "checkpoints",
                "--",
            ])
            .arg("--nocapture")
            .env("STRUCTURES_FUZZ_SECONDS", seconds.to_string())
            .env("STRUCTURES_FUZZ_SEED", seed),
    )
}
