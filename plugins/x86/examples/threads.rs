//! One thread against two, at the shapes of the models that were measured and at smaller ones: who takes the second
//! thread must not lose by it.
//!
//! Run by `cargo xtask roofline --threads [FORMAT...]`. The two threads are a caller and one that spins for the next
//! region, which is what the host's pool is within a step. Weights rotate through more than the last-level cache where
//! they are that many, as a model's do. One and two alternate, matrix by matrix; times are medians of the clock.

#![allow(clippy::expect_used)] // a benchmark that cannot run says so and stops

use std::ffi::c_void;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::time::Instant;

use structures_plugin_api::abi::HostVTable;
use structures_plugin_api::sdk::Host;
use structures_plugin_x86::bench::{Product, FORMATS};

const ROTATE: usize = 64 << 20;
const MOST_COPIES: usize = 200;
/// Output channels and inputs.
const SHAPES: [(usize, usize); 10] = [
    (64, 64),
    (192, 192),
    (192, 576),
    (576, 192),
    (576, 576),
    (960, 576),
    (576, 1536),
    (3072, 576),
    (4096, 1024),
    (1024, 4096),
];

type Body = unsafe extern "C" fn(user: *mut c_void, i: usize);

#[derive(Clone, Copy)]
struct Job {
    body: Body,
    user: *mut c_void,
    n: usize,
}

/// The region that is open, null between two.
static JOB: AtomicPtr<Job> = AtomicPtr::new(std::ptr::null_mut());
static NEXT: AtomicUsize = AtomicUsize::new(0);
static INSIDE: AtomicUsize = AtomicUsize::new(0);

fn take(job: Job) {
    let chunk = (job.n / 16).max(1);
    loop {
        let start = NEXT.fetch_add(chunk, Ordering::Relaxed);
        if start >= job.n {
            return;
        }
        for i in start..job.n.min(start + chunk) {
            // SAFETY: the caller of the region waits for everybody who is inside.
            unsafe { (job.body)(job.user, i) };
        }
    }
}

unsafe extern "C" fn in_turn(_: *mut c_void, n: usize, body: Body, user: *mut c_void) {
    let mut job = Job { body, user, n };
    NEXT.store(0, Ordering::Relaxed);
    JOB.store(&raw mut job, Ordering::SeqCst);
    take(job);
    JOB.store(std::ptr::null_mut(), Ordering::SeqCst);
    while INSIDE.load(Ordering::SeqCst) != 0 {
        spin_loop();
    }
}

unsafe extern "C" fn two(_: *mut c_void) -> usize {
    2
}

fn help() {
    loop {
        if JOB.load(Ordering::Relaxed).is_null() {
            spin_loop();
            continue;
        }
        INSIDE.fetch_add(1, Ordering::SeqCst);
        let job = JOB.load(Ordering::SeqCst);
        if !job.is_null() {
            // SAFETY: we are inside, so its caller waits.
            take(unsafe { *job });
        }
        INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A host whose regions are done by two threads; everything else is the detached one's.
fn pair() -> Host {
    let detached = Host::detached();
    // SAFETY: the table of the detached host is whole and for ever there.
    let table = unsafe { &*detached.raw() };
    let table = Box::leak(Box::new(HostVTable {
        num_threads: two,
        parallel_for: in_turn,
        ..*table
    }));
    std::thread::spawn(help);
    // SAFETY: a table that is never freed, whose entries keep their promises.
    unsafe { Host::from_raw(table) }.expect("a whole table")
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let only: Vec<String> = std::env::args().skip(1).collect();
    let hosts = [Host::detached(), pair()];
    // Until the second thread has a core of its own.
    let begun = Instant::now();
    while begun.elapsed().as_secs() < 2 {
        hosts[1].parallel_for(64, |i| {
            black_box((0..10_000).fold(i, |a, b| a ^ b));
        });
    }
    println!(
        "{:<13} {:>10} {:>5} {:>9} {:>9} {:>6}",
        "format", "N x K", "rows", "one, us", "two, us", "ratio"
    );
    for format in FORMATS {
        if !only.is_empty() && !only.iter().any(|o| o == format) {
            continue;
        }
        for (n, k) in SHAPES {
            let bind = |host| Product::new(host, format, n, k).expect("binds");
            let bytes = bind(hosts[0]).bytes() as usize;
            let copies = (ROTATE / bytes / 2).clamp(1, MOST_COPIES);
            let mut all = hosts.map(|host| (0..copies).map(|_| bind(host)).collect::<Vec<_>>());
            for rows in [1, 4, 8, 128] {
                let x: Vec<f32> = (0..rows * k)
                    .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
                    .collect();
                let mut out = vec![0.0; rows * n];
                let mut times = [Vec::new(), Vec::new()];
                let turns = (100_000_000 / (rows * n * k)).clamp(9, 400);
                for turn in 0..turns + 2 {
                    for (products, times) in all.iter_mut().zip(&mut times) {
                        let started = Instant::now();
                        products[turn % copies].run(&x, rows, &mut out);
                        if turn >= 2 {
                            times.push(started.elapsed().as_secs_f64());
                        }
                    }
                }
                black_box(&out);
                let [one, two] = times.map(|mut times| median(&mut times) * 1e6);
                println!(
                    "{format:<13} {:>10} {rows:>5} {one:>9.1} {two:>9.1} {:>6.2}",
                    format!("{n}x{k}"),
                    one / two
                );
            }
        }
    }
}
