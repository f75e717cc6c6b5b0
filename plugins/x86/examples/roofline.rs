//! How much of the machine each kernel uses: read bandwidth and arithmetic peaks measured first, then every format at
//! one row, at a few and at many, as GB/s and GFLOP/s and as shares of the run's own bandwidth and peak.
//!
//! Run by `cargo xtask roofline [FORMAT...]`. One thread. Weights rotate through more than the last-level cache. Every
//! figure is a median of the thread's own time, which leaves out when somebody else had the core; bandwidth is measured
//! before and after each, because on a shared machine it changes within seconds.

#![allow(clippy::expect_used)] // a benchmark that cannot run says so and stops

use std::hint::black_box;

use structures_plugin_api::sdk::Host;
use structures_plugin_x86::bench::{Product, FORMATS};

/// More than the last-level cache of the machines at hand.
const ROTATE: usize = 96 << 20;

/// Seconds that this thread has run.
fn now() -> f64 {
    let mut at = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a clock that every Linux has, and a place for its answer.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut at) };
    at.tv_sec as f64 + at.tv_nsec as f64 * 1e-9
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A large buffer on huge pages, as packed weights are.
struct Buffer {
    base: *const u8,
}

impl Buffer {
    fn new() -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping; advice changes nothing but its pages; both are checked or harmless.
        let base = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), ROTATE, access, kind, -1, 0);
            assert_ne!(base, libc::MAP_FAILED, "memory for the probe");
            libc::madvise(base, ROTATE, libc::MADV_HUGEPAGE);
            base.cast::<u8>()
        };
        // SAFETY: the mapping just made.
        unsafe { base.write_bytes(1, ROTATE) };
        Buffer { base }
    }

    /// GB/s of reading it once, on one thread.
    fn bandwidth(&self) -> f64 {
        let pass = |_| {
            let started = now();
            // SAFETY: the kernels need AVX2 as well, and the buffer is `ROTATE` bytes.
            unsafe { read(self.base) };
            now() - started
        };
        ROTATE as f64 / median((0..5).map(pass).collect()) / 1e9
    }
}

/// # Safety
/// AVX2 is present and there are `ROTATE` bytes.
#[target_feature(enable = "avx2")]
unsafe fn read(base: *const u8) {
    use std::arch::x86_64::*;
    let mut sums = [_mm256_setzero_si256(); 8];
    for at in (0..ROTATE).step_by(256) {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: inside the buffer.
            let v = unsafe { _mm256_loadu_si256(base.add(at + 32 * i).cast()) };
            *sum = _mm256_or_si256(*sum, v);
        }
    }
    black_box(sums);
}

/// G operations a second of independent chains of one instruction.
mod peak {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::now;

    const CHAINS: usize = 12;
    const TURNS: usize = 400_000;

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn int8() -> f64 {
        let started = now();
        let (a, b) = (
            black_box(_mm512_set1_epi8(1)),
            black_box(_mm512_set1_epi8(1)),
        );
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        black_box(sums);
        (128 * CHAINS * TURNS) as f64 / (now() - started) / 1e9
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn bf16() -> f64 {
        let started = now();
        // SAFETY: 64 bytes of which any are a value.
        let a: __m512bh = black_box(unsafe {
            std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3f80_3f80))
        });
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, a);
            }
        }
        black_box(sums);
        (64 * CHAINS * TURNS) as f64 / (now() - started) / 1e9
    }

    #[target_feature(enable = "avx2,fma")]
    fn f32() -> f64 {
        let started = now();
        let a = black_box(_mm256_set1_ps(1.0));
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, a, *sum);
            }
        }
        black_box(sums);
        (16 * CHAINS * TURNS) as f64 / (now() - started) / 1e9
    }

    /// int8, bf16 and f32; 0 where the instruction is not here.
    pub fn all() -> [f64; 3] {
        let vnni = is_x86_feature_detected!("avx512vnni");
        let halves = is_x86_feature_detected!("avx512bf16");
        let wide = is_x86_feature_detected!("fma");
        // SAFETY: each only where it was found.
        unsafe {
            [
                if vnni { int8() } else { 0.0 },
                if halves { bf16() } else { 0.0 },
                if wide { f32() } else { 0.0 },
            ]
        }
    }
}

fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let only: Vec<String> = std::env::args().skip(1).collect();
    let buffer = Buffer::new();
    // The best of several: what is lost to a neighbour is not the machine's limit.
    let mut peaks = [0.0_f64; 3];
    for _ in 0..9 {
        let found = peak::all();
        (0..3).for_each(|i| peaks[i] = peaks[i].max(found[i]));
    }
    let [int8, bf16, f32] = peaks;
    println!(
        "one thread; read {:.1} GB/s; peaks in G/s: int8 {int8:.0}, bf16 {bf16:.0}, f32 {f32:.0}",
        buffer.bandwidth()
    );
    println!(
        "{:<13} {:>12} {:>5} {:>9} {:>7} {:>7} {:>8} {:>7}",
        "format", "N x K", "rows", "us", "GB/s", "of read", "Gop/s", "of peak"
    );
    for format in FORMATS {
        if !only.is_empty() && !only.iter().any(|o| o == format) {
            continue;
        }
        let peak = match format {
            "f32" => f32,
            "bf16" | "fp8" => bf16,
            _ => int8,
        };
        for (n, k) in [(1536, 576), (576, 1536), (4096, 1024), (1024, 4096)] {
            let mut one = Product::new(Host::detached(), format, n, k).expect("binds");
            let copies = (ROTATE / one.bytes() as usize).clamp(1, 64);
            let mut all: Vec<Product> = (1..copies)
                .map(|_| Product::new(Host::detached(), format, n, k).expect("binds"))
                .collect();
            for rows in [1, 2, 4, 8, 16, 128] {
                let x: Vec<f32> = (0..rows * k)
                    .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
                    .collect();
                let mut out = vec![0.0; rows * n];
                let turns = (200 / rows).max(4);
                let before = buffer.bandwidth();
                let mut times = Vec::new();
                one.run(&x, rows, &mut out);
                let mut at = 0;
                for _ in 0..turns {
                    let product = all.get_mut(at).unwrap_or(&mut one);
                    at = (at + 1) % copies;
                    let started = now();
                    product.run(&x, rows, &mut out);
                    times.push(now() - started);
                }
                black_box(&out);
                let read = (before + buffer.bandwidth()) / 2.0;
                let time = median(times);
                let gbs = one.bytes() as f64 / time / 1e9;
                let gops = 2.0 * (rows * n * k) as f64 / time / 1e9;
                println!(
                    "{format:<13} {:>12} {rows:>5} {:>9.1} {gbs:>7.1} {:>6.0}% {gops:>8.1} {:>6.0}%",
                    format!("{n}x{k}"), time * 1e6, 100.0 * gbs / read, 100.0 * gops / peak
                );
            }
        }
    }
}
