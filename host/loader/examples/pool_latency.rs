//! Prints what a region of the thread pool costs: hot (workers spinning) and cold (workers parked).
//!
//! `meet`: both threads must be inside at once, so it is the time to get a worker going and to see it leave.
//! `share`: 16 indices of 2 us; ideal is 32 us over the threads, the rest is overhead.
//! Quartiles, because on a shared machine the median tells of the neighbours.
//!
//! `cargo run --release -p structures-loader --example pool_latency`

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use structures_loader::pool::{Pool, SPIN};

fn main() {
    let pool = Pool::new(2);
    for (name, gap) in [("hot", Duration::ZERO), ("after 25 us", SPIN / 2)] {
        report("meet", name, 2001, || spin(gap), || meet(&pool));
        report("share", name, 2001, || spin(gap), || share(&pool));
    }
    report(
        "meet",
        "parked",
        301,
        || std::thread::sleep(SPIN * 4),
        || meet(&pool),
    );
    report(
        "share",
        "parked",
        301,
        || std::thread::sleep(SPIN * 4),
        || share(&pool),
    );
    report(
        "share",
        "serial",
        301,
        || (),
        || (0..16).for_each(|_| spin(Duration::from_micros(2))),
    );
}

fn meet(pool: &Pool) {
    let inside = AtomicUsize::new(0);
    pool.parallel_for(2, |_| {
        inside.fetch_add(1, Ordering::AcqRel);
        while inside.load(Ordering::Acquire) < 2 {
            std::hint::spin_loop();
        }
    });
}

fn share(pool: &Pool) {
    pool.parallel_for(16, |_| spin(Duration::from_micros(2)));
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn report(what: &str, name: &str, rounds: usize, between: impl Fn(), region: impl Fn()) {
    let mut times: Vec<Duration> = (0..rounds)
        .map(|_| {
            between();
            let start = Instant::now();
            region();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    let at = |quarter: usize| times[(rounds - 1) * quarter / 4];
    println!(
        "{what:6} {name:12} quartiles {:?} {:?} {:?}",
        at(1),
        at(2),
        at(3)
    );
}
