//! What the GPU backend costs a machine that has no driver: the same commands with it and without it, whole processes.
//!
//! Run with `cargo bench --profile release -p structures-tests --bench idle_gpu`, after `cargo build --release --workspace`.
//! Processes alternate; what is printed is the median of the pairs' differences with the least and the most, by the clock.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::time::Instant;

use structures_tests::{plugins, structures};

const PAIRS: usize = 15;
const COMMANDS: [(&str, &[&str], bool); 4] = [
    ("plugins list, scanned before", &["plugins", "list"], false),
    ("plugins list, nothing cached", &["plugins", "list"], true),
    ("devices", &["devices"], false),
    (
        "attach demo, one structure, one sample",
        &[
            "attach",
            "demo",
            "--structures",
            "linear_proj",
            "--max-samples",
            "1",
            "--rounds",
            "3",
        ],
        false,
    ),
];

fn took(plugins: &Path, cache: &Path, command: &[&str], fresh: bool) -> f64 {
    if fresh {
        let _ = std::fs::remove_dir_all(cache);
    }
    let receipts = cache.join("receipts");
    let mut run = structures(plugins);
    run.args(command).env("STRUCTURES_CACHE_DIR", cache);
    if command[0] == "attach" {
        run.arg("--receipt-dir").arg(&receipts);
    }
    let begun = Instant::now();
    let out = run.output().expect("runs");
    let took = begun.elapsed().as_secs_f64() * 1e3;
    // 3: judged, and nothing was worth it.
    assert!(matches!(out.status.code(), Some(0 | 3)), "{out:?}");
    took
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    // `cargo test --benches` asks for this.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let sides = [plugins(&["x86"]), plugins(&["x86", "cuda"])];
    let caches = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for (name, command, fresh) in COMMANDS {
        let run = |side: usize| took(sides[side].path(), caches[side].path(), command, fresh);
        let _ = (run(0), run(1));
        let (mut times, mut more) = ([Vec::new(), Vec::new()], Vec::new());
        for pair in 0..PAIRS {
            let mut took = [0.0; 2];
            for turn in 0..2 {
                let side = (pair + turn) % 2;
                took[side] = run(side);
                times[side].push(took[side]);
            }
            more.push(took[1] - took[0]);
        }
        let [mut without, mut with] = times;
        let middle = median(&mut more);
        println!(
            "{name}: without {:.1} ms, with {:.1} ms, {middle:+.1} ms ({:+.1} to {:+.1})",
            median(&mut without),
            median(&mut with),
            more[0],
            more[PAIRS - 1]
        );
    }
}
