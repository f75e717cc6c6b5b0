//! `structures discover` over a checkpoint of 70B shape in 30 shards, as whole processes: of a family that is built,
//! and of one that nobody knows. The aim is under 500 ms and 100 MB.
//!
//! Run with `cargo bench --profile release -p structures-tests --bench discover`, after
//! `cargo build --release -p structures-cli`. Prints median, smallest and largest time, and the largest resident peak.

#![allow(clippy::expect_used)]

use structures_tests::large::{discover, sparse_checkpoint};

const ROUNDS: usize = 21;

fn main() {
    // `cargo test --benches` asks for this.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    for kind in ["llama", "never-heard-of"] {
        let dir = tempfile::tempdir().expect("temporary directory");
        sparse_checkpoint(dir.path(), kind);
        let mut peak = 0;
        let mut times: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                let (_, took, most) = discover(dir.path());
                peak = peak.max(most.unwrap_or(0));
                took.as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{kind}: median {:.0} ms, {:.0} to {:.0} ms, peak {} MB",
            times[ROUNDS / 2],
            times[0],
            times[ROUNDS - 1],
            peak >> 20
        );
    }
}
