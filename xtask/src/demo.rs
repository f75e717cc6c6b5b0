//! `cargo xtask demo`: the main job on the model that ships with the repository.

use std::process::Command;

use crate::run::{cargo, release_dir, root, step, step_with};

/// Builds, then discover, attach and generate with the receipt that attach wrote.
pub fn run(args: &[String]) -> Result<(), String> {
    if !args.is_empty() {
        return Err(format!("unknown arguments {args:?}; usage: demo"));
    }
    step("build", cargo().args(["build", "--release", "--workspace"]))?;
    let receipts = release_dir().join("demo-receipts");
    let structures = || {
        let mut c = Command::new(release_dir().join("structures"));
        c.current_dir(root());
        c
    };
    step("plugins", structures().args(["plugins", "list"]))?;
    step("discover", structures().args(["discover", "demo"]))?;
    // 3 is an answer, not a failure: nothing was worth activating here, and the receipt says why.
    step_with(
        "attach",
        structures()
            .args(["attach", "demo", "--scheme", "auto", "--receipt-dir"])
            .arg(&receipts),
        &[0, 3],
    )?;
    let receipt = newest_receipt(&receipts)?;
    step("explain", structures().arg("explain").arg(&receipt))?;
    step(
        "generate",
        structures()
            .args([
                "generate",
                "demo",
                "--prompt",
                "In the beginning God created",
            ])
            .args(["--max-new-tokens", "160", "--receipt"])
            .arg(&receipt),
    )?;
    eprintln!("\nreceipt: {}", receipt.display());
    Ok(())
}

fn newest_receipt(dir: &std::path::Path) -> Result<std::path::PathBuf, String> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    entries
        .filter_map(Result::ok)
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|x| x == "json"))
        .max_by_key(|p| p.metadata().and_then(|m| m.modified()).ok())
        .ok_or_else(|| format!("{}: attach wrote no receipt there", dir.display()))
}
