//! What a call's rows become before a product reads them: integers, bf16, or themselves.
//!
//! - 16-bit integers with one scale a row, `amax / 32512`: the error is at most `amax / 65024`, below bf16's, so a form
//!   that uses them is still one of 16-bit activations. VNNI reads them as two planes of signed bytes, `256 hi + lo`.
//! - the same with a scale for every 32 values where weights come in blocks: an outlier costs its own block alone.
//! - the same for weights that a checkpoint keeps in blocks: nothing was rounded to codes here, so what is promised is an f32
//!   product, 1e-4. A block that holds an outlier gets a third plane, the *tail*: what its codes leave, in 254ths of a step.
//!   Rounding loses a step over the root of 12 in the mean of squares; [`OUTLIER`] is the round number below which a step
//!   is so small that this is less than 1e-4 of the row's mean magnitude, which outliers hardly move. Without tails it
//!   is 1e-5 of the block's largest value, and where a product makes little of an outlier (the values of a first token:
//!   relative L2 up to 4e-4 on SmolLM2) that is no small part of what the rest comes to.
//! - 8-bit integers under `amax / 127` of the row, or under a calibrated scale.
//! - bf16, rounded to nearest even.
//! - E4M3 values under a calibrated scale, kept as bf16, which holds them exactly.
//!
//! A row with a value that is not finite gets the scale NaN, so it reaches every output instead of a wrong number; under a
//! calibrated 8-bit scale only NaN does, and an infinity saturates.
//! Every row is a record of its own in one buffer, so that rows are prepared by several threads.

use structures_plugin_api::formats::{fp8_scale, int8_scale};
use structures_plugin_api::sdk::Host;

use crate::isa::{vectorised, Isa};
use crate::pool::{plain, Line};

/// Largest 16-bit code whose high byte stays within -127..=127.
const LARGEST: f32 = 32512.0;
/// Values done at a time: a whole number of every kind's blocks.
const PIECE: usize = 256;
/// Values that share a scale where weights come in blocks.
pub const SHARED: usize = 32;
/// Times the mean magnitude of its row that the largest value of a block may be before it gets a tail.
const OUTLIER: f32 = 10.0;
const _: () = assert!(OUTLIER * OUTLIER < 1e-4 * 1e-4 * 12.0 * LARGEST * LARGEST);
/// Codes of a tail in one step of what it is the tail of: half a step is the end of a signed byte.
const TAIL: f32 = 254.0;
/// Bytes of a record's scale and sums.
const META: usize = 16;
/// Rows worth waking a thread for: values of 4 microseconds.
const GRAIN: usize = 1 << 14;

/// How a product wants its activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Want {
    /// As they are, f32.
    Given,
    /// bf16.
    Bf16,
    /// E4M3 values of `x / scale`, as bf16.
    E4m3 {
        /// The scale.
        scale: f32,
    },
    /// 8 bits, a scale a row.
    Int8Rows,
    /// 8 bits under one scale.
    Int8 {
        /// The scale.
        scale: f32,
    },
    /// 16 bits, a scale a row.
    Int16Rows,
    /// 16 bits, a scale for every 32 values, and sums of 16 neighbours times a factor.
    Int16Blocks {
        /// The factor.
        factor: i32,
        /// Whether blocks with an outlier have tails.
        tails: bool,
    },
}

impl Want {
    /// `x` in E4M3 under the scale of a calibrated largest value.
    pub fn e4m3(amax: f32) -> Self {
        Want::E4m3 {
            scale: fp8_scale(amax),
        }
    }

    /// `x` in 8 bits under the scale of a calibrated largest value.
    pub fn int8(amax: f32) -> Self {
        Want::Int8 {
            scale: int8_scale(amax),
        }
    }

    fn has_tails(self) -> bool {
        matches!(self, Want::Int16Blocks { tails: true, .. })
    }

    /// How rows of `k` values are kept.
    pub fn layout(self, isa: Isa, k: usize) -> Layout {
        let stride = match self {
            Want::Given => k,
            Want::Int16Blocks { .. } => k.next_multiple_of(PIECE),
            _ => k.next_multiple_of(64),
        };
        let planes = match self {
            Want::Int16Rows | Want::Int16Blocks { .. } => 2,
            _ => 1,
        };
        let values = match self {
            Want::Given => 0,
            Want::Bf16 | Want::E4m3 { .. } => 2 * stride,
            _ if isa.wide() => (planes + usize::from(self.has_tails())) * stride,
            _ if self.has_tails() => 4 * stride,
            _ => 2 * stride,
        };
        let meta = match self {
            Want::Int16Blocks { .. } => {
                META + 2 * (stride / 16 * size_of::<i32>() + stride / SHARED * size_of::<f32>())
            }
            Want::Int8Rows | Want::Int8 { .. } | Want::Int16Rows => META,
            _ => 0,
        };
        Layout {
            want: self,
            isa,
            k,
            stride,
            planes,
            values,
            record: (values + meta).next_multiple_of(64),
        }
    }
}

/// How rows are kept.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    want: Want,
    isa: Isa,
    k: usize,
    stride: usize,
    planes: usize,
    /// Bytes of values in a record: sums and scale come after.
    values: usize,
    record: usize,
}

/// Prepared rows.
#[derive(Clone, Copy)]
pub enum Prepared<'a> {
    /// As given: rows of `k` values.
    Given(&'a [f32]),
    /// bf16.
    Halves(Halves<'a>),
    /// Integers.
    Integers(Integers<'a>),
}

/// Rows of bf16.
#[derive(Clone, Copy)]
pub struct Halves<'a> {
    /// The bits, zero padded.
    pub values: &'a [u16],
    /// Values of a row.
    pub stride: usize,
}

/// Rows of integers, one record each.
#[derive(Clone, Copy)]
pub struct Integers<'a> {
    lines: &'a [Line],
    layout: Layout,
    rows: usize,
}

impl Integers<'_> {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a plane, zero padded.
    pub fn stride(&self) -> usize {
        self.layout.stride
    }

    /// Bytes from a row to the next.
    pub fn record(&self) -> usize {
        self.layout.record
    }

    /// Planes of signed bytes: 1 for 8 bits, 2 for 16.
    pub fn planes(&self) -> usize {
        self.layout.planes
    }

    /// Whether there are sums of 16 neighbours.
    pub fn has_block_sums(&self) -> bool {
        self.layout.blocks()
    }

    /// Whether blocks with outliers have tails.
    pub fn has_tails(&self) -> bool {
        self.layout.want.has_tails()
    }

    fn at(&self, row: usize, offset: usize) -> *const u8 {
        assert!(row < self.rows && offset < self.layout.record);
        let offset = row * self.layout.record + offset;
        // SAFETY: there are `rows` records in the lines.
        unsafe { self.lines.as_ptr().cast::<u8>().add(offset) }
    }

    /// The planes of a row, on an isa of wide vectors.
    pub fn bytes(&self, row: usize) -> *const i8 {
        self.at(row, 0).cast()
    }

    /// The values of a row, on AVX2.
    pub fn words(&self, row: usize) -> *const i16 {
        self.at(row, 0).cast()
    }

    /// The scale of a row.
    pub fn scale(&self, row: usize) -> f32 {
        // SAFETY: a record's first four bytes after the values, 64-byte aligned.
        unsafe { *self.at(row, self.layout.values).cast::<f32>() }
    }

    /// The sum of a plane of a row.
    pub fn sum(&self, row: usize, plane: usize) -> i32 {
        assert!(plane < 2);
        let offset = self.layout.values + 4 + 4 * plane;
        // SAFETY: two sums follow the scale.
        unsafe { *self.at(row, offset).cast::<i32>() }
    }

    /// The scales of 32 neighbours of a row.
    pub fn block_scales(&self, row: usize) -> *const f32 {
        self.at(row, self.layout.block_scales(0)).cast()
    }

    /// The sums of 16 neighbours of a row.
    pub fn block_sums(&self, row: usize) -> *const i32 {
        self.at(row, self.layout.block_sums(0)).cast()
    }

    /// The scales of the tails of 32 neighbours of a row, 0 where they have none.
    pub fn tail_scales(&self, row: usize) -> *const f32 {
        self.at(row, self.layout.block_scales(1)).cast()
    }

    /// The sums of 16 neighbours' tails.
    pub fn tail_sums(&self, row: usize) -> *const i32 {
        self.at(row, self.layout.block_sums(1)).cast()
    }

    /// The tails of a row, on an isa of wide vectors; there is something where a tail has a scale.
    pub fn tail_bytes(&self, row: usize) -> *const i8 {
        self.bytes(row).wrapping_add(2 * self.layout.stride)
    }

    /// The same on AVX2.
    pub fn tail_words(&self, row: usize) -> *const i16 {
        self.words(row).wrapping_add(self.layout.stride)
    }
}

impl Layout {
    fn blocks(&self) -> bool {
        matches!(self.want, Want::Int16Blocks { .. })
    }

    /// Where the sums of 16 neighbours start in a record: of the codes, of their tails.
    fn block_sums(&self, of: usize) -> usize {
        self.values + META + of * (self.stride / 16 + self.stride / SHARED) * size_of::<i32>()
    }

    /// Where the scales of 32 neighbours start.
    fn block_scales(&self, of: usize) -> usize {
        self.block_sums(of) + self.stride / 16 * size_of::<i32>()
    }

    /// Lines for so many rows.
    pub fn lines(&self, rows: usize) -> usize {
        rows * self.record / 64
    }

    /// Prepares rows of `k` values, in the buffer where they are not taken as they are.
    pub fn prepare<'a>(
        &self,
        host: &Host,
        x: &'a [f32],
        rows: usize,
        lines: &'a mut [Line],
    ) -> Prepared<'a> {
        assert!(x.len() >= rows * self.k);
        if self.want == Want::Given {
            return Prepared::Given(&x[..rows * self.k]);
        }
        let lines = &mut lines[..self.lines(rows)];
        let of_row = self.record / 64;
        let one = |row: usize, record: &mut [Line]| {
            self.record_of(&x[row * self.k..][..self.k], record);
        };
        if rows * self.k < GRAIN {
            for (row, record) in lines.chunks_exact_mut(of_row).enumerate() {
                one(row, record);
            }
        } else {
            host.parallel_chunks(lines, of_row, one);
        }
        match self.want {
            Want::Bf16 | Want::E4m3 { .. } => Prepared::Halves(Halves {
                values: plain(lines),
                stride: self.record / 2,
            }),
            _ => Prepared::Integers(Integers {
                lines,
                layout: *self,
                rows,
            }),
        }
    }

    fn record_of(&self, x: &[f32], record: &mut [Line]) {
        let isa = self.isa;
        let scale = match self.want {
            Want::Given => return,
            Want::Bf16 => return to_bf16(isa, x, plain(record)),
            Want::E4m3 { scale } => return to_e4m3(isa, x, scale, plain(record)),
            // Under a calibrated scale an infinity is the largest code, as anything beyond it is.
            Want::Int8 { scale } => match largest(isa, x).is_nan() {
                true => f32::NAN,
                false => scale,
            },
            Want::Int8Rows => match largest(isa, x) {
                amax if amax.is_finite() => int8_scale(amax),
                _ => f32::NAN,
            },
            Want::Int16Rows => match largest(isa, x) {
                amax if amax.is_finite() => step_of(amax),
                _ => f32::NAN,
            },
            Want::Int16Blocks { .. } => match largest(isa, x).is_finite() {
                true => 1.0,
                false => f32::NAN,
            },
        };
        let limit = if self.planes == 2 { LARGEST } else { 127.0 };
        let mut sums = [0i32; 2];
        let mut words = [0i16; PIECE];
        let most = match self.want.has_tails() {
            true => OUTLIER * magnitudes(isa, x) / self.k as f32,
            false => f32::INFINITY,
        };
        let mut done = 0;
        while done < self.stride {
            let piece = PIECE.min(self.stride - done);
            let given = &x[done.min(self.k)..(done + piece).min(self.k)];
            words[given.len()..].fill(0);
            if scale.is_nan() {
                words.fill(0);
            } else if !self.blocks() {
                to_words(isa, given, scale, limit, &mut words[..given.len()]);
            }
            if self.blocks() {
                let mut scales = [1.0; PIECE / SHARED];
                let mut of_tails = [0.0; PIECE / SHARED];
                let blocks = given.chunks(SHARED).filter(|_| !scale.is_nan());
                for (b, block) in blocks.enumerate() {
                    let amax = largest(isa, block);
                    scales[b] = step_of(amax);
                    let words = &mut words[b * SHARED..][..SHARED];
                    to_words(isa, block, scales[b], limit, words);
                    if amax > most {
                        of_tails[b] = scales[b] / TAIL;
                        self.tails_of(block, words, scales[b], done + b * SHARED, record);
                    }
                }
                for (of, scales) in [scales, of_tails].iter().enumerate() {
                    let first = self.block_scales(of) / 4 + done / SHARED;
                    let out = &mut plain::<f32>(record)[first..first + piece / SHARED];
                    out.copy_from_slice(&scales[..piece / SHARED]);
                }
            }
            let words = &words[..piece];
            if !isa.wide() {
                plain::<i16>(record)[done..done + piece].copy_from_slice(words);
            } else if self.planes == 1 {
                sums[0] += to_bytes(isa, words, &mut plain::<i8>(record)[done..done + piece]);
            } else {
                let (high, low) = plain::<i8>(record).split_at_mut(self.stride);
                let range = done..done + piece;
                let (a, b) = split(isa, words, &mut high[range.clone()], &mut low[range]);
                sums = [sums[0] + a, sums[1] + b];
            }
            if let Want::Int16Blocks { factor, .. } = self.want {
                let first = self.block_sums(0) / 4 + done / 16;
                let out = &mut plain::<i32>(record)[first..first + piece / 16];
                sums_of_blocks(isa, words, factor, out);
            }
            done += piece;
        }
        plain::<f32>(record)[self.values / 4] = scale;
        plain::<i32>(record)[self.values / 4 + 1..][..2].copy_from_slice(&sums);
    }

    /// Writes the tails of a block that starts at input `at`, and their sums. Those of other blocks are never read.
    fn tails_of(&self, x: &[f32], codes: &[i16], scale: f32, at: usize, record: &mut [Line]) {
        let isa = self.isa;
        let mut tails = [0; SHARED];
        to_tails(isa, x, codes, scale, &mut tails);
        let place = self.planes * self.stride + at;
        if isa.wide() {
            to_bytes(isa, &tails, &mut plain::<i8>(record)[place..place + SHARED]);
        } else {
            let place = place - self.stride;
            plain::<i16>(record)[place..place + SHARED].copy_from_slice(&tails);
        }
        if let Want::Int16Blocks { factor, .. } = self.want {
            let first = self.block_sums(1) / 4 + at / 16;
            let out = &mut plain::<i32>(record)[first..first + SHARED / 16];
            sums_of_blocks(isa, &tails, factor, out);
        }
    }
}

/// The step of 16-bit codes. The floor keeps a quotient finite; what is below it is zero after rounding anyway.
fn step_of(amax: f32) -> f32 {
    (amax / LARGEST).max(f32::MIN_POSITIVE * 65536.0)
}

vectorised! {
    /// Largest magnitude; not finite when any value is not.
    pub fn largest(x: &[f32]) -> f32 {
        // Magnitudes as integers are in the same order, NaN above infinity.
        let mut lanes = [0u32; 16];
        let mut chunks = x.chunks_exact(16);
        for chunk in &mut chunks {
            for (lane, v) in lanes.iter_mut().zip(chunk) {
                *lane = (*lane).max(v.to_bits() & 0x7fff_ffff);
            }
        }
        let rest = chunks.remainder().iter().map(|v| v.to_bits() & 0x7fff_ffff);
        let most = lanes.iter().copied().chain(rest).max().unwrap_or(0);
        f32::from_bits(most)
    }
}

vectorised! {
    /// `clamp(round_half_even(x / scale))`; no `x` is NaN.
    pub fn to_words(x: &[f32], scale: f32, limit: f32, out: &mut [i16]) {
        for (o, v) in out.iter_mut().zip(x) {
            let code = (v / scale).round_ties_even().clamp(-limit, limit);
            // SAFETY: no NaN, and within the limit, which is within 16 bits.
            *o = unsafe { code.to_int_unchecked::<i32>() } as i16;
        }
    }
}

vectorised! {
    /// Sum of magnitudes.
    fn magnitudes(x: &[f32]) -> f32 {
        let mut lanes = [0.0_f32; 16];
        let mut chunks = x.chunks_exact(16);
        for chunk in &mut chunks {
            for (lane, v) in lanes.iter_mut().zip(chunk) {
                *lane += v.abs();
            }
        }
        let rest: f32 = chunks.remainder().iter().map(|v| v.abs()).sum();
        lanes.iter().sum::<f32>() + rest
    }
}

vectorised! {
    /// What codes under a scale leave of `x`, in [`TAIL`]ths of it.
    fn to_tails(x: &[f32], codes: &[i16], scale: f32, out: &mut [i16]) {
        for ((o, v), code) in out.iter_mut().zip(x).zip(codes) {
            // One rounding: the difference is exact before it.
            let left = f32::from(*code).mul_add(-scale, *v);
            let code = (left / scale * TAIL).round_ties_even().clamp(-127.0, 127.0);
            // SAFETY: within 8 bits, and not NaN: values and scale are finite, the scale is not 0.
            *o = unsafe { code.to_int_unchecked::<i32>() } as i16;
        }
    }
}

vectorised! {
    fn to_bytes(words: &[i16], out: &mut [i8]) -> i32 {
        let mut sum = 0;
        for (o, v) in out.iter_mut().zip(words) {
            *o = *v as i8;
            sum += i32::from(*v);
        }
        sum
    }
}

vectorised! {
    fn split(words: &[i16], high: &mut [i8], low: &mut [i8]) -> (i32, i32) {
        let mut sums = (0, 0);
        for ((v, h), l) in words.iter().zip(high).zip(low) {
            let v = i32::from(*v);
            let upper = (v + 128) >> 8;
            let lower = v - (upper << 8);
            *h = upper as i8;
            *l = lower as i8;
            sums = (sums.0 + upper, sums.1 + lower);
        }
        sums
    }
}

vectorised! {
    fn sums_of_blocks(words: &[i16], factor: i32, out: &mut [i32]) {
        for (o, block) in out.iter_mut().zip(words.chunks_exact(16)) {
            *o = factor * block.iter().map(|v| i32::from(*v)).sum::<i32>();
        }
    }
}

vectorised! {
    /// To nearest even; the rest of `out` is zeroed.
    fn to_bf16(x: &[f32], out: &mut [u16]) {
        let (there, rest) = out.split_at_mut(x.len());
        for (o, v) in there.iter_mut().zip(x) {
            let bits = v.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            let bits = if v.is_nan() { bits | 0x0040_0000 } else { rounded };
            *o = (bits >> 16) as u16;
        }
        rest.fill(0);
    }
}

vectorised! {
    /// E4M3 of `x / scale`, saturating, as bf16; the rest of `out` is zeroed.
    fn to_e4m3(x: &[f32], scale: f32, out: &mut [u16]) {
        // Adding and taking back 1.5 * 2^23 units rounds to a multiple of the unit 2^-9, below the smallest normal.
        const SMALL: f32 = 12_582_912.0 / 512.0;
        let (there, rest) = out.split_at_mut(x.len());
        for (o, v) in there.iter_mut().zip(x) {
            let v = v / scale;
            let clamped = v.clamp(-448.0, 448.0);
            let bits = clamped.to_bits();
            let normal = bits.wrapping_add(0x7ffff + ((bits >> 20) & 1)) & 0xfff0_0000;
            let small = (clamped + SMALL) - SMALL;
            let below = clamped.abs() < 1.0 / 64.0;
            let bits = if below { small.to_bits() } else { normal };
            let bits = if v.is_nan() { 0x7fc0_0000 } else { bits };
            *o = (bits >> 16) as u16;
        }
        rest.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_plugin_api::formats::{
        bf16_to_f32, e4m3_to_f32, f32_to_bf16, f32_to_e4m3_saturating, quantise_int8,
    };

    fn wave(n: usize, by: f32) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 37 % 101) as f32 - 50.3) * by)
            .collect()
    }

    fn prepared(want: Want, isa: Isa, x: &[f32], rows: usize, test: impl Fn(&Prepared<'_>)) {
        let layout = want.layout(isa, x.len() / rows);
        let mut lines = vec![Line([0xa5; 64]); layout.lines(rows)];
        test(&layout.prepare(&Host::detached(), x, rows, &mut lines));
    }

    fn value(isa: Isa, x: &Integers<'_>, row: usize, i: usize) -> i32 {
        // SAFETY: `i` is below the stride.
        unsafe {
            match (isa.wide(), x.planes()) {
                (false, _) => i32::from(*x.words(row).add(i)),
                (true, 1) => i32::from(*x.bytes(row).add(i)),
                (true, _) => {
                    let (h, l) = (*x.bytes(row).add(i), *x.bytes(row).add(x.stride() + i));
                    256 * i32::from(h) + i32::from(l)
                }
            }
        }
    }

    #[test]
    fn integers_are_the_rounded_values_with_their_sums_and_zeros_behind() {
        let k = 301;
        let mut x = wave(2 * k, 0.37);
        x[k..].iter_mut().for_each(|v| *v = *v * 1e-3 + 1.0);
        for isa in Isa::here() {
            for want in [
                Want::Int16Rows,
                Want::Int16Blocks {
                    factor: -8,
                    tails: false,
                },
            ] {
                prepared(want, isa, &x, 2, |p| {
                    let Prepared::Integers(p) = p else {
                        panic!("integers")
                    };
                    for row in 0..2 {
                        let scale = p.scale(row);
                        let values: Vec<i32> =
                            (0..p.stride()).map(|i| value(isa, p, row, i)).collect();
                        for (i, v) in x[row * k..][..k].iter().enumerate() {
                            let scale = match p.has_block_sums() {
                                // SAFETY: a scale for every 32 values.
                                true => unsafe { *p.block_scales(row).add(i / SHARED) },
                                false => scale,
                            };
                            let got = values[i] as f32 * scale;
                            assert!(
                                (got - v).abs() <= scale * 0.51,
                                "{isa:?} {i}: {got} for {v}"
                            );
                        }
                        assert!(values[k..].iter().all(|v| *v == 0));
                        if isa.wide() {
                            let all = 256 * p.sum(row, 0) + p.sum(row, 1);
                            assert_eq!(all, values.iter().sum::<i32>());
                        }
                        if p.has_block_sums() {
                            for (b, block) in values.chunks(16).enumerate() {
                                // SAFETY: a sum for every 16 values.
                                let got = unsafe { *p.block_sums(row).add(b) };
                                assert_eq!(got, -8 * block.iter().sum::<i32>(), "{isa:?}");
                            }
                        }
                    }
                });
            }
            prepared(Want::Int8Rows, isa, &x, 2, |p| {
                let Prepared::Integers(p) = p else {
                    panic!("integers")
                };
                for (i, v) in x.iter().enumerate() {
                    let (row, i) = (i / k, i % k);
                    let got = value(isa, p, row, i);
                    assert_eq!(got, i32::from(quantise_int8(*v, p.scale(row))), "{isa:?}");
                }
            });
            let fixed = Want::int8(5.0);
            prepared(fixed, isa, &x, 2, |p| {
                let Prepared::Integers(p) = p else {
                    panic!("integers")
                };
                assert_eq!(p.scale(1), int8_scale(5.0));
                let got = value(isa, p, 0, 0);
                assert_eq!(got, i32::from(quantise_int8(x[0], p.scale(0))), "saturated");
            });
        }
    }

    #[test]
    fn a_block_with_an_outlier_has_tails_and_no_other_has() {
        let k = 301;
        let mut x = wave(2 * k, 0.01);
        (x[70], x[k + 299]) = (9.0, -7.0);
        for isa in Isa::here() {
            let want = Want::Int16Blocks {
                factor: -8,
                tails: true,
            };
            prepared(want, isa, &x, 2, |p| {
                let Prepared::Integers(p) = p else {
                    panic!("integers")
                };
                for (row, outlier) in [70, 299].into_iter().enumerate() {
                    let tail = |i: usize| -> i32 {
                        // SAFETY: `i` is below the stride.
                        unsafe {
                            match isa.wide() {
                                true => i32::from(*p.tail_bytes(row).add(i)),
                                false => i32::from(*p.tail_words(row).add(i)),
                            }
                        }
                    };
                    for b in 0..p.stride() / SHARED {
                        // SAFETY: two scales for every 32 values, two sums for every 16.
                        let (scale, step, sums) = unsafe {
                            let sums = p.tail_sums(row).add(2 * b);
                            let scales = (p.block_scales(row).add(b), p.tail_scales(row).add(b));
                            (*scales.0, *scales.1, [*sums, *sums.add(1)])
                        };
                        let has = b == outlier / SHARED;
                        assert_eq!(step != 0.0, has, "{isa:?} row {row} block {b}");
                        let places = b * SHARED..(b + 1) * SHARED;
                        for i in places.clone().filter(|i| has && *i < k) {
                            let got = f64::from(value(isa, p, row, i)) * f64::from(scale)
                                + f64::from(tail(i)) * f64::from(step);
                            let off = (got - f64::from(x[row * k + i])).abs();
                            assert!(off <= f64::from(step) * 0.51, "{isa:?} {i}: {off}");
                        }
                        for (half, sum) in sums.into_iter().enumerate().filter(|_| has) {
                            let places = places.clone().skip(16 * half).take(16);
                            assert_eq!(sum, -8 * places.map(tail).sum::<i32>(), "{isa:?}");
                        }
                    }
                }
            });
        }
    }

    #[test]
    fn a_row_that_is_not_finite_has_no_scale_unless_it_saturates_and_its_neighbour_has() {
        for isa in Isa::here() {
            let blocks = Want::Int16Blocks {
                factor: 1,
                tails: true,
            };
            for want in [Want::Int16Rows, Want::Int8Rows, Want::int8(1.0), blocks] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = wave(140, 1.0);
                    x[3] = bad;
                    prepared(want, isa, &x, 2, |p| {
                        let Prepared::Integers(p) = p else {
                            panic!("integers")
                        };
                        let saturates = want == Want::int8(1.0) && !bad.is_nan();
                        assert_eq!(p.scale(0).is_nan(), !saturates, "{want:?} {bad}");
                        assert!(p.scale(1).is_finite());
                        for b in 0..p.stride() / SHARED * usize::from(want == blocks) {
                            // SAFETY: a scale for every 32 values.
                            assert_eq!(unsafe { *p.tail_scales(0).add(b) }, 0.0);
                        }
                    });
                }
            }
        }
    }

    #[test]
    fn halves_are_the_formats_own_rounding() {
        let mut x: Vec<f32> = wave(800, 0.011);
        x.extend([
            0.0,
            -0.0,
            1e-40,
            1e9,
            -1e9,
            448.0,
            464.0,
            465.0,
            1.0 / 512.0,
            1.0 / 1024.0,
        ]);
        x.extend([f32::NAN, 0.015_625, 0.0156, 0.0029, 1.0625, 1.1875, 3.0e-3]);
        for isa in Isa::here() {
            prepared(Want::Bf16, isa, &x, 1, |p| {
                let Prepared::Halves(p) = p else {
                    panic!("halves")
                };
                for (v, got) in x.iter().zip(p.values) {
                    assert!(*got == f32_to_bf16(*v) || v.is_nan(), "{v}");
                    assert_eq!(v.is_nan(), bf16_to_f32(*got).is_nan());
                }
                assert!(p.values[x.len()..].iter().all(|v| *v == 0));
            });
            prepared(Want::E4m3 { scale: 0.5 }, isa, &x, 1, |p| {
                let Prepared::Halves(p) = p else {
                    panic!("halves")
                };
                for (v, got) in x.iter().zip(p.values) {
                    let want = e4m3_to_f32(f32_to_e4m3_saturating(v / 0.5));
                    let got = bf16_to_f32(*got);
                    assert!(
                        got == want || (v.is_nan() && got.is_nan()),
                        "{v}: {got} for {want}"
                    );
                }
            });
        }
    }
}
