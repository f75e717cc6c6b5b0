//! How long the whole built-in catalog takes to load: `cargo bench -p structures-catalog --profile release`.
//!
//! The figure to hold is a median below 20 ms for all entries. Spread is from the fastest to the slowest round.

use std::time::Instant;

use structures_catalog::Catalog;

const ROUNDS: usize = 60;

fn main() -> Result<(), structures_catalog::CatalogError> {
    let mut times = Vec::with_capacity(ROUNDS);
    let mut entries = 0;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        entries = Catalog::builtin()?.list().len();
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    println!(
        "catalog load: {entries} entries, median {:.2} ms of {ROUNDS} rounds, {:.2} to {:.2} ms",
        times[ROUNDS / 2],
        times[0],
        times[ROUNDS - 1]
    );
    Ok(())
}
