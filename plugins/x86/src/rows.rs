//! Activations of a call: up to 8 rows, kept in f32 and, for VNNI, as 16-bit integers in two signed bytes.
//!
//! `x = s (256 hi + lo)` with `s = amax / 32512`, one scale a row: the error is at most `amax / 65024`, below bf16's,
//! so a form that uses it is still "int8 weights, 16-bit activations".

use crate::isa::Isa;
use crate::packed::GROUP;

/// Most rows of a call.
pub const MAX_ROWS: usize = 8;

/// Largest 16-bit code whose high byte stays within -127..=127.
const LARGEST: f32 = 32512.0;

/// See the module. Buffers are kept between calls.
pub struct Rows {
    /// Rows in use.
    pub rows: usize,
    /// Padded inputs.
    pub stride: usize,
    /// f32 values, `[rows, stride]`, zero padded.
    pub values: Vec<f32>,
    /// High bytes, `[rows, stride]`.
    pub hi: Vec<i8>,
    /// Low bytes.
    pub lo: Vec<i8>,
    /// Sum of the high bytes of each row.
    pub sum_hi: [i32; MAX_ROWS],
    /// Sum of the low bytes of each row.
    pub sum_lo: [i32; MAX_ROWS],
    /// Scale of each row.
    pub scale: [f32; MAX_ROWS],
    width: usize,
}

impl Rows {
    /// Buffers for rows of `k` inputs.
    pub fn new(k: usize) -> Self {
        let stride = k.div_ceil(GROUP) * GROUP;
        Rows {
            rows: 0,
            stride,
            values: vec![0.0; MAX_ROWS * stride],
            hi: vec![0; MAX_ROWS * stride],
            lo: vec![0; MAX_ROWS * stride],
            sum_hi: [0; MAX_ROWS],
            sum_lo: [0; MAX_ROWS],
            scale: [0.0; MAX_ROWS],
            width: k,
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        (self.values.len() * 4 + self.hi.len() + self.lo.len()) as u64
    }

    /// The f32 values of a row, for a producer to fill.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let at = row * self.stride;
        &mut self.values[at..at + self.width]
    }

    /// Derives what the isa wants from the values of `rows` rows.
    pub fn prepare(&mut self, isa: Isa, rows: usize) {
        self.rows = rows;
        if isa != Isa::Avx512Vnni {
            return;
        }
        for row in 0..rows {
            let at = row * self.stride..(row + 1) * self.stride;
            // SAFETY: the isa was found present at bind.
            let (scale, sum_hi, sum_lo) = unsafe {
                split(
                    &self.values[at.clone()],
                    &mut self.hi[at.clone()],
                    &mut self.lo[at],
                )
            };
            self.scale[row] = scale;
            self.sum_hi[row] = sum_hi;
            self.sum_lo[row] = sum_lo;
        }
    }
}

/// Splits a row into two bytes an element; gives the scale and the sums of the bytes. A value that is not finite
/// gives a NaN scale, so it reaches every output.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split(values: &[f32], hi: &mut [i8], lo: &mut [i8]) -> (f32, i32, i32) {
    let mut lanes = [0f32; 16];
    let mut finite = true;
    for chunk in values.chunks(16) {
        for (m, v) in lanes.iter_mut().zip(chunk) {
            finite &= v.is_finite();
            *m = m.max(v.abs());
        }
    }
    let amax = lanes.iter().fold(0f32, |m, v| m.max(*v));
    if !finite {
        hi.fill(0);
        lo.fill(0);
        return (f32::NAN, 0, 0);
    }
    // The smallest normal number as a floor keeps 1 / scale finite; such a row is zero after rounding anyway.
    let scale = (amax / LARGEST).max(f32::MIN_POSITIVE * 65536.0);
    let inverse = 1.0 / scale;
    let (mut sum_hi, mut sum_lo) = (0i32, 0i32);
    for ((v, h), l) in values.iter().zip(hi.iter_mut()).zip(lo.iter_mut()) {
        // SAFETY of the conversion: |v * inverse| <= LARGEST by construction of the scale.
        let q = (v * inverse).round_ties_even() as i32;
        let high = (q + 128) >> 8;
        let low = q - (high << 8);
        *h = high as i8;
        *l = low as i8;
        sum_hi += high;
        sum_lo += low;
    }
    (scale, sum_hi, sum_lo)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_split_is_16_bits_exact_enough() {
        if !Isa::Avx512Vnni.present() {
            eprintln!("skipped: no AVX-512 VNNI here");
            return;
        }
        let mut rows = Rows::new(7);
        let x = [1.0, -3.0, 0.001, 2.5, -0.75, 3.0, 0.0];
        rows.row_mut(0).copy_from_slice(&x);
        rows.prepare(Isa::Avx512Vnni, 1);
        for (i, want) in x.iter().enumerate() {
            let got = rows.scale[0] * (256.0 * f32::from(rows.hi[i]) + f32::from(rows.lo[i]));
            assert!((got - want).abs() <= 3.0 / 65000.0, "{i}: {got} for {want}");
        }
        rows.row_mut(0)[2] = f32::NAN;
        rows.prepare(Isa::Avx512Vnni, 1);
        assert!(rows.scale[0].is_nan());
    }
}
