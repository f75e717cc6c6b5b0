//! Writes the committed header anew: what `cargo xtask header` runs.

use std::process::ExitCode;

fn main() -> ExitCode {
    let path = structures_plugin_header::committed();
    match structures_plugin_header::write(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
