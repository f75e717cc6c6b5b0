//! `structures plugins list` over 100 plugins as whole processes, cold (no cache: 100 scans, 100 loads) and warm.
//!
//! Run with `cargo bench --profile release -p structures-tests --bench plugins_list`, after
//! `cargo build --release --workspace`. The plugins are copies of the C sample, each under an id of its own. Prints
//! median, smallest, largest, the quartiles and the mean processor time of all processes, in milliseconds, and the same
//! for the start of the bare program.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use structures_tests::{build_dir, structures};

const PLUGINS: usize = 100;
const WARM_ROUNDS: usize = 41;
const COLD_ROUNDS: usize = 9;
const SAMPLE: &str = "libstructures_plugin_c_sample.so";
/// What the sample calls itself; replaced by names of the same length.
const ID: &str = "\"id\":\"c_sample\"";

fn main() {
    // `cargo test --benches` asks for this.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let keep = tempfile::tempdir().expect("temporary directory");
    let (plugins, cache) = (keep.path().join("plugins"), keep.path().join("cache"));
    std::fs::create_dir(&plugins).expect("create");
    let bytes = std::fs::read(build_dir().join(SAMPLE)).expect("build the workspace first");
    for i in 0..PLUGINS {
        let id = format!("\"id\":\"copy{i:04}\"");
        let path = plugins.join(format!("copy{i:04}.so"));
        std::fs::write(path, replaced(&bytes, ID.as_bytes(), id.as_bytes())).expect("write");
    }
    println!(
        "{PLUGINS} plugins of {} bytes, {} cores",
        bytes.len(),
        std::thread::available_parallelism().map_or(1, usize::from)
    );
    // Past the time in which a cache does not believe its own stamps.
    std::thread::sleep(Duration::from_millis(200));
    let list = || {
        let mut command = structures(&plugins);
        command
            .env("STRUCTURES_CACHE_DIR", &cache)
            .args(["plugins", "list", "--json"]);
        timed(&mut command)
    };
    let mut bare = structures(&plugins);
    bare.arg("--version");
    report("bare program", (0..WARM_ROUNDS).map(|_| timed(&mut bare)));
    report(
        "cold",
        (0..COLD_ROUNDS).map(|_| {
            let _ = std::fs::remove_dir_all(&cache);
            list()
        }),
    );
    check(&plugins, &cache);
    report("warm", (0..WARM_ROUNDS).map(|_| list()));
}

/// All are listed as loaded, from the cache.
fn check(plugins: &Path, cache: &Path) {
    let mut command = structures(plugins);
    command.env("STRUCTURES_CACHE_DIR", cache);
    let (exit, document, log) = structures_tests::json(command.args(["plugins", "list"]));
    assert_eq!(exit, 0, "{log}");
    let rows = document["plugins"].as_array().expect("rows");
    let loaded = rows.iter().filter(|r| r["outcome"] == "loaded").count();
    assert_eq!((rows.len(), loaded), (PLUGINS, PLUGINS));
    let text = document["trace"].to_string();
    assert_eq!(text.matches("opened before (cache)").count(), PLUGINS);
}

fn timed(command: &mut Command) -> f64 {
    let start = Instant::now();
    let done = command.output().expect("the program starts");
    let took = start.elapsed().as_secs_f64() * 1e3;
    assert!(done.status.success());
    took
}

/// Processor time of children that were waited for, and of theirs, in milliseconds. Counted in ticks of 10 ms, so
/// only a sum over many runs says something; unlike the clock it does not mind a busy machine.
fn children_cpu() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name, which may hold anything, field 3 comes first.
    let fields: Vec<&str> = text
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let ticks = |field: usize| fields.get(field - 3).and_then(|t| t.parse::<f64>().ok());
    10.0 * (ticks(16).unwrap_or(0.0) + ticks(17).unwrap_or(0.0))
}

fn report(what: &str, times: impl Iterator<Item = f64>) {
    let before = children_cpu();
    let mut times: Vec<f64> = times.collect();
    let cpu = (children_cpu() - before) / times.len() as f64;
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() - 1) as f64 * part).round() as usize];
    println!(
        "{what:<14} median {:8.2} ms   min {:8.2}   max {:8.2}   quartiles {:.2} .. {:.2}   cpu {cpu:.2}   ({} runs)",
        at(0.5),
        at(0.0),
        at(1.0),
        at(0.25),
        at(0.75),
        times.len()
    );
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes
        .windows(from.len())
        .position(|w| w == from)
        .expect("the sample states its id");
    let mut copy = bytes.to_vec();
    copy[at..at + to.len()].copy_from_slice(to);
    copy
}
