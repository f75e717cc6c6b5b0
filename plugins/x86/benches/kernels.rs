//! Kernels by criterion: one row as bytes a second, 128 rows as operations a second, on one thread and on two.
//!
//! Weights rotate through more than the last-level cache, and the group `read` is the read bandwidth of this very run,
//! which shares are to be taken of: on a shared machine it changes within seconds. `cargo xtask roofline` prints shares at
//! once. Two threads multiply with a half of the channels each, as a shared call would, without the hand-over of a pool.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use structures_plugin_api::sdk::{Failure, Host};
use structures_plugin_x86::bench::{Product, FORMATS};

/// More than the last-level cache of the machines at hand.
const ROTATE: usize = 96 << 20;
/// Output channels and inputs: an FFN of SmolLM2 and one of a model of a billion parameters.
const SHAPES: [(usize, usize); 2] = [(1536, 576), (4096, 1024)];

/// Time of `iters` turns of every thread's own work, side by side.
fn together<T: Send>(parts: &mut [T], iters: u64, turn: impl Fn(&mut T, usize) + Sync) -> Duration {
    let start = Instant::now();
    thread::scope(|scope| {
        for part in parts {
            scope.spawn(|| (0..iters).for_each(|i| turn(part, i as usize)));
        }
    });
    start.elapsed()
}

fn read(c: &mut Criterion) {
    let mut group = c.benchmark_group("read");
    group.throughput(Throughput::Bytes(ROTATE as u64));
    for threads in [1, 2] {
        let mut parts: Vec<Vec<u64>> = (0..threads)
            .map(|_| vec![1; ROTATE / 8 / threads])
            .collect();
        group.bench_function(format!("{threads} threads"), |b| {
            b.iter_custom(|iters| {
                together(&mut parts, iters, |part, _| {
                    let mut sums = [0_u64; 32];
                    for line in part.chunks_exact(32) {
                        sums.iter_mut().zip(line).for_each(|(s, v)| *s |= v);
                    }
                    black_box(sums);
                })
            });
        });
    }
    group.finish();
}

/// Matrices of `n` channels that together fill the rotation, with what a call of `rows` reads and writes.
struct Turning {
    products: Vec<Product>,
    x: Vec<f32>,
    out: Vec<f32>,
    rows: usize,
}

impl Turning {
    fn new(format: &str, n: usize, k: usize, rows: usize, room: usize) -> Result<Self, Failure> {
        let one = Product::new(Host::detached(), format, n, k)?;
        let more = room / one.bytes() as usize;
        let rest = (0..more).map(|_| Product::new(Host::detached(), format, n, k));
        let rest: Vec<Product> = rest.collect::<Result<_, _>>()?;
        Ok(Turning {
            products: std::iter::once(one).chain(rest).collect(),
            x: (0..rows * k)
                .map(|i| (i % 83) as f32 / 41.0 - 1.0)
                .collect(),
            out: vec![0.0; rows * n],
            rows,
        })
    }

    fn bytes(&self) -> u64 {
        self.products[0].bytes()
    }

    fn turn(&mut self, i: usize) {
        let at = i % self.products.len();
        self.products[at].run(&self.x, self.rows, &mut self.out);
        black_box(&mut self.out);
    }
}

fn products(c: &mut Criterion) {
    for (rows, room) in [(1, ROTATE), (8, ROTATE), (128, ROTATE / 8)] {
        for format in FORMATS {
            for (n, k) in SHAPES {
                let mut group = c.benchmark_group(format!("{rows} rows/{format}/{n}x{k}"));
                for threads in [1, 2] {
                    let part = |_| Turning::new(format, n / threads, k, rows, room / threads);
                    // A format that this CPU has no instruction for is left out.
                    let Ok(mut parts) = (0..threads).map(part).collect::<Result<Vec<_>, _>>()
                    else {
                        continue;
                    };
                    group.throughput(match rows {
                        128 => Throughput::Elements((2 * n * k * rows) as u64),
                        _ => Throughput::Bytes(parts.iter().map(Turning::bytes).sum()),
                    });
                    group.bench_function(format!("{threads} threads"), |b| {
                        b.iter_custom(|iters| together(&mut parts, iters, Turning::turn));
                    });
                }
                group.finish();
            }
        }
    }
}

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    targets = read, products
}
criterion_main!(kernels);
