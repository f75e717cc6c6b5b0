//! Rounding whole weights through a format, wherever their output channels lie.
//!
//! A host compares a bound form with the reference *on the same weights rounded through the form's
//! declared format*, so that packing mistakes show and the format's own error does not.

use super::fp8::{fake_quant_e4m3, fp8_scale};
use super::half::round_bf16;
use super::int8::{int8_scale, quantise_int8};
use super::nvfp4::{nvfp4_global_scale, pack_nvfp4, unpack_nvfp4, NVFP4_BLOCK};
use crate::describe::WeightFormat;

/// A weight seen as `[n_out, k]` wherever its elements lie: element `(n, k)` is
/// `data[n * out_stride + k * in_stride]`.
#[derive(Debug)]
pub struct WeightMatrix<'a> {
    /// The elements.
    pub data: &'a mut [f32],
    /// Output channels.
    pub n_out: usize,
    /// Inputs of one channel: what is summed over.
    pub k: usize,
    /// Distance between channels, in elements.
    pub out_stride: usize,
    /// Distance between inputs, in elements.
    pub in_stride: usize,
}

impl<'a> WeightMatrix<'a> {
    /// Row-major `[n_out, k]`: what is called `out_in`.
    pub fn out_in(data: &'a mut [f32], n_out: usize, k: usize) -> Self {
        WeightMatrix {
            data,
            n_out,
            k,
            out_stride: k,
            in_stride: 1,
        }
    }

    /// Row-major `[k, n_out]`: what is called `in_out`, the default order of a slot.
    pub fn in_out(data: &'a mut [f32], n_out: usize, k: usize) -> Self {
        WeightMatrix {
            data,
            n_out,
            k,
            out_stride: 1,
            in_stride: n_out,
        }
    }

    fn index(&self, n: usize, k: usize) -> usize {
        n * self.out_stride + k * self.in_stride
    }

    fn read(&self, n: usize, from: usize, out: &mut [f32]) {
        for (k, value) in out.iter_mut().enumerate() {
            *value = self.data[self.index(n, from + k)];
        }
    }

    fn write(&mut self, n: usize, from: usize, values: &[f32]) {
        for (k, value) in values.iter().enumerate() {
            let index = self.index(n, from + k);
            self.data[index] = *value;
        }
    }

    /// Calls `round` with the elements of each channel.
    fn channels(&mut self, mut round: impl FnMut(&mut [f32])) {
        let mut channel = vec![0.0; self.k];
        for n in 0..self.n_out {
            self.read(n, 0, &mut channel);
            round(&mut channel);
            self.write(n, 0, &channel);
        }
    }

    fn amax(&mut self) -> f32 {
        let mut largest = 0.0_f32;
        self.channels(|channel| largest = largest.max(amax(channel)));
        largest
    }
}

/// Largest absolute value, 0 for none; NaN is skipped.
pub fn amax(data: &[f32]) -> f32 {
    data.iter().fold(0.0, |amax, value| amax.max(value.abs()))
}

/// Rounds a weight through a format, in place. `data` has `n_out * k` elements; see
/// [`WeightMatrix`] for the two orders.
///
/// # Panics
/// When the matrix reaches beyond `data`.
pub fn round_weight(format: WeightFormat, weight: WeightMatrix<'_>) {
    round_weights_jointly(format, &mut [weight]);
}

/// As [`round_weight`], for weights that a form packs together: a per-tensor scale is taken over
/// all of them (gate and up of an FFN, the siblings of a QKV pack).
///
/// # Panics
/// As [`round_weight`].
pub fn round_weights_jointly(format: WeightFormat, weights: &mut [WeightMatrix<'_>]) {
    match format {
        WeightFormat::None => {}
        WeightFormat::Bf16 => weights.iter_mut().for_each(|weight| {
            weight.channels(|channel| channel.iter_mut().for_each(|v| *v = round_bf16(*v)));
        }),
        WeightFormat::Fp8PerTensor => {
            let scale = fp8_scale(joint_amax(weights));
            weights
                .iter_mut()
                .for_each(|weight| weight.channels(|channel| fake_quant_e4m3(channel, scale)));
        }
        WeightFormat::Int8PerChannel => weights.iter_mut().for_each(|weight| {
            weight.channels(|channel| {
                let scale = int8_scale(amax(channel));
                channel
                    .iter_mut()
                    .for_each(|v| *v = f32::from(quantise_int8(*v, scale)) * scale);
            });
        }),
        WeightFormat::Nvfp4 => {
            let global = nvfp4_global_scale(joint_amax(weights));
            for weight in weights {
                let k = weight.k;
                weight.channels(|channel| {
                    // Blocks start at every 16th input of a channel, so a channel packs alone.
                    for block in channel.chunks_mut(NVFP4_BLOCK.min(k.max(1))) {
                        let packed = pack_nvfp4(block, block.len(), global);
                        block.copy_from_slice(&unpack_nvfp4(&packed, block.len()));
                    }
                });
            }
        }
    }
}

fn joint_amax(weights: &mut [WeightMatrix<'_>]) -> f32 {
    weights
        .iter_mut()
        .map(WeightMatrix::amax)
        .fold(0.0, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [WeightFormat; 5] = [
        WeightFormat::None,
        WeightFormat::Bf16,
        WeightFormat::Fp8PerTensor,
        WeightFormat::Int8PerChannel,
        WeightFormat::Nvfp4,
    ];

    fn weight(n: usize, k: usize) -> Vec<f32> {
        (0..n * k)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / (7.0 + (i % 5) as f32))
            .collect()
    }

    fn transposed(data: &[f32], n: usize, k: usize) -> Vec<f32> {
        (0..n * k).map(|i| data[(i % n) * k + i / n]).collect()
    }

    #[test]
    fn both_orders_round_alike_and_twice_is_once() {
        let (n, k) = (5, 37);
        for format in FORMATS {
            let mut rows = weight(n, k);
            round_weight(format, WeightMatrix::out_in(&mut rows, n, k));
            let mut columns = transposed(&weight(n, k), n, k);
            round_weight(format, WeightMatrix::in_out(&mut columns, n, k));
            assert_eq!(columns, transposed(&rows, n, k), "{format:?}");
            assert_eq!(
                rows == weight(n, k),
                format == WeightFormat::None,
                "{format:?}"
            );
            let mut again = rows.clone();
            round_weight(format, WeightMatrix::out_in(&mut again, n, k));
            let worst = again
                .iter()
                .zip(&rows)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(worst <= 1e-5, "{format:?}: {worst}");
        }
    }

    #[test]
    fn joint_weights_share_one_scale() {
        let (mut small, mut large) = (vec![0.011_f32; 8], vec![100.0_f32; 8]);
        let mut alone = small.clone();
        round_weight(
            WeightFormat::Fp8PerTensor,
            WeightMatrix::out_in(&mut alone, 1, 8),
        );
        round_weights_jointly(
            WeightFormat::Fp8PerTensor,
            &mut [
                WeightMatrix::out_in(&mut small, 1, 8),
                WeightMatrix::out_in(&mut large, 2, 4),
            ],
        );
        // Alone the small one is its own maximum, so exact; jointly it falls on the large one's
        // grid.
        let scale = fp8_scale(100.0);
        let mut expected = [0.011_f32];
        fake_quant_e4m3(&mut expected, scale);
        assert!((alone[0] - 0.011).abs() < 1e-8);
        assert_eq!((small[0], large[0]), (expected[0], 100.0));
        assert_ne!(small[0], alone[0]);
    }

    #[test]
    fn channels_have_their_own_int8_scale() {
        let mut data = vec![127.0, 0.5, 1.27, 0.005];
        round_weight(
            WeightFormat::Int8PerChannel,
            WeightMatrix::out_in(&mut data, 2, 2),
        );
        assert_eq!(data[..2], [127.0, 0.0]);
        assert!((data[2] - 1.27).abs() < 1e-6 && data[3].abs() < 1e-6);
    }
}
