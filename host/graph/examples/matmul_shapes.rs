//! One-row products of candle in both orientations, over more weight than the caches hold: the figures in
//! `kernels/linear.rs`. `RAYON_NUM_THREADS=2 cargo run --release -p structures-graph --example matmul_shapes`

use std::time::Instant;

use candle_core::{Device, Result, Tensor};

fn main() -> Result<()> {
    let d = Device::Cpu;
    for (k, n, copies) in [
        (576, 576, 60),
        (576, 192, 100),
        (576, 1536, 40),
        (1536, 576, 40),
        (576, 49152, 2),
        (64, 128, 1),
    ] {
        let x = Tensor::randn(0f32, 1., (1, k), &d)?;
        for stored in ["[out,in]", "[in,out]"] {
            let weights: Vec<Tensor> = (0..copies)
                .map(|_| match stored {
                    "[out,in]" => Tensor::randn(0f32, 1., (n, k), &d)?.t(),
                    _ => Tensor::randn(0f32, 1., (k, n), &d),
                })
                .collect::<Result<_>>()?;
            let mut times: Vec<f64> = (0..11)
                .map(|_| {
                    let t = Instant::now();
                    for w in &weights {
                        x.matmul(w)?;
                    }
                    Ok(t.elapsed().as_secs_f64() / f64::from(copies))
                })
                .collect::<Result<_>>()?;
            times.sort_by(f64::total_cmp);
            let rate = (k * n * 4) as f64 / times[5] / 1e9;
            println!(
                "[1,{k}] x [{k},{n}] stored {stored}: median {:.1} us ({rate:.1} GB/s), best {:.1} us",
                times[5] * 1e6,
                times[0] * 1e6
            );
        }
    }
    Ok(())
}
