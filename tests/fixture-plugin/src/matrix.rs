//! A weight packed by output channel, as given or in int8.

use structures_plugin_api::formats::{amax, int8_scale, quantise_int8};
use structures_plugin_api::sdk::{Failure, Host, Tensor};

/// Output channels that one thread takes at a time.
const CHANNELS: usize = 32;
/// Partial sums of a dot product, so that it becomes vector code.
const LANES: usize = 16;

/// `[n, k]`, one run of `k` an output channel.
#[derive(Debug, PartialEq)]
pub struct Matrix {
    pub k: usize,
    pub n: usize,
    store: Store,
}

#[derive(Debug, PartialEq)]
enum Store {
    Given(Vec<f32>),
    Int8 { codes: Vec<i8>, scales: Vec<f32> },
}

impl Matrix {
    /// Packs a weight of slot dims `[k, n]`, whatever its strides.
    pub fn pack(weight: &Tensor<'_>, int8: bool) -> Result<Self, Failure> {
        let &[k, n] = weight.dims() else {
            let text = format!("expected a weight [k, n], found {:?}", weight.dims());
            return Err(Failure::refused("dims_inconsistent", text));
        };
        let (k, n) = (k as usize, n as usize);
        let mut given = vec![0.0; n * k];
        for (channel, out) in given.chunks_exact_mut(k).enumerate() {
            weight.select(1, channel)?.read_f32(out)?;
        }
        let store = if int8 {
            let scales: Vec<f32> = given.chunks_exact(k).map(|c| int8_scale(amax(c))).collect();
            let code = |(i, w): (usize, &f32)| quantise_int8(*w, scales[i / k]);
            Store::Int8 {
                codes: given.iter().enumerate().map(code).collect(),
                scales,
            }
        } else {
            Store::Given(given)
        };
        Ok(Matrix { k, n, store })
    }

    pub fn bytes(&self) -> u64 {
        (match &self.store {
            Store::Given(values) => 4 * values.len(),
            Store::Int8 { codes, scales } => codes.len() + 4 * scales.len(),
        }) as u64
    }

    /// `x [rows, k]` times the matrix: `[rows, n]`.
    pub fn apply(&self, host: &Host, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.k.max(1);
        let mut y = vec![0.0; rows * self.n];
        for (x, y) in x.chunks_exact(self.k).zip(y.chunks_exact_mut(self.n)) {
            host.parallel_chunks(y, CHANNELS, |index, y| {
                for (i, y) in y.iter_mut().enumerate() {
                    *y = self.channel(index * CHANNELS + i, x);
                }
            });
        }
        y
    }

    fn channel(&self, n: usize, x: &[f32]) -> f32 {
        let range = n * self.k..(n + 1) * self.k;
        match &self.store {
            Store::Given(values) => dot(x, &values[range], |w| *w),
            Store::Int8 { codes, scales } => dot(x, &codes[range], |w| f32::from(*w)) * scales[n],
        }
    }
}

fn dot<T>(x: &[f32], w: &[T], widen: impl Fn(&T) -> f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (xs, ws) = (x.chunks_exact(LANES), w.chunks_exact(LANES));
    let rest: f32 = xs
        .remainder()
        .iter()
        .zip(ws.remainder())
        .map(|(x, w)| x * widen(w))
        .sum();
    for (x, w) in xs.zip(ws) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * widen(&w[lane]);
        }
    }
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_reads_any_strides_and_keeps_channels_apart() {
        let (k, n) = (37, 70);
        let w: Vec<f32> = (0..k * n)
            .map(|i| ((i * 29 % 83) as f32 - 41.0) / 40.0)
            .collect();
        let x: Vec<f32> = (0..2 * k).map(|i| (i % 7) as f32 - 3.0).collect();
        let weight = Tensor::from_f32(&w, &[k, n]).expect("fits");
        for (int8, tolerance) in [(false, 1e-4), (true, 1.0)] {
            let packed = Matrix::pack(&weight, int8).expect("packs");
            let y = packed.apply(&Host::detached(), &x);
            for row in 0..2 {
                for channel in 0..n {
                    let exact: f32 = (0..k).map(|i| x[row * k + i] * w[i * n + channel]).sum();
                    assert!((y[row * n + channel] - exact).abs() <= tolerance);
                }
            }
        }
    }
}
