//! `cargo xtask header`: the committed C header, anew. Its generator is a crate of its own, so that
//! the other tasks do not wait for it to be built.

use crate::run::{cargo, step};

/// Writes `plugin-api/include/structures_plugin.h`.
pub fn run(args: &[String]) -> Result<(), String> {
    if !args.is_empty() {
        return Err(format!("unknown arguments {args:?}; usage: header"));
    }
    step(
        "header",
        cargo().args([
            "run",
            "--release",
            "--quiet",
            "-p",
            "structures-plugin-header",
        ]),
    )
}
