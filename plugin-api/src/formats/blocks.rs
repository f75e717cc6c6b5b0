//! Packed rows of a checkpoint: formats in which a weight is stored with its scales inside.
//!
//! A packed weight of `n` output channels is `n` rows of [`BlockFormat::row_bytes`] bytes, each
//! whole in itself: nothing outside a row is needed to read it, so rows may be taken in any order,
//! cut and laid one after another without touching a code. What a file stores beside the codes
//! (NVFP4's global scale, FP8's scale) is the row's last four bytes, little endian f32.
//!
//! | format | row |
//! |---|---|
//! | `nvfp4` | E2M1 codes two a byte, even column low; E4M3 scales of 16; the global scale, f32 |
//! | `fp8` | E4M3 codes; the channel's scale, f32 |
//! | `q8_0` | blocks of 32: f16 scale, 32 int8 |
//! | `q4_0` | blocks of 32: f16 scale, 16 bytes of nibbles offset by 8 |
//! | `q4_1` | blocks of 32: f16 scale, f16 minimum, 16 bytes of nibbles |
//! | `q4_k` | blocks of 256: f16 scale and minimum, 8 six-bit pairs of both, 128 bytes of nibbles |
//! | `q6_k` | blocks of 256: 128 bytes low, 64 bytes high, 16 int8 scales, f16 scale |
//!
//! The layouts of the last five are those of GGUF files, whose every row is stored like this.
//! Formulas are evaluated in f32 in the order of the format's own reader, so that values are the
//! same bits wherever a block is read.

use serde::{Deserialize, Serialize};

use super::fp8::E4M3_VALUES;
use super::half::f16_to_f32;
use super::nvfp4::{e2m1_to_f32, NVFP4_BLOCK};

/// Elements of the largest block.
const LARGEST: usize = 256;
/// Bytes of the f32 at the end of a row.
const TAIL: usize = 4;

/// How packed rows of a checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum BlockFormat {
    /// E2M1 with E4M3 block scales of 16 and one global scale.
    #[serde(rename = "nvfp4")]
    Nvfp4,
    /// E4M3 with one scale a channel.
    #[serde(rename = "fp8")]
    Fp8,
    /// GGUF's 8 bits, 32 to a scale.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// GGUF's 4 bits, 32 to a scale.
    #[serde(rename = "q4_0")]
    Q4_0,
    /// GGUF's 4 bits, 32 to a scale and a minimum.
    #[serde(rename = "q4_1")]
    Q4_1,
    /// GGUF's 4 bits in blocks of 256.
    #[serde(rename = "q4_k")]
    Q4K,
    /// GGUF's 6 bits in blocks of 256.
    #[serde(rename = "q6_k")]
    Q6K,
}

impl BlockFormat {
    /// Every one of them.
    pub const ALL: [BlockFormat; 7] = [
        BlockFormat::Nvfp4,
        BlockFormat::Fp8,
        BlockFormat::Q8_0,
        BlockFormat::Q4_0,
        BlockFormat::Q4_1,
        BlockFormat::Q4K,
        BlockFormat::Q6K,
    ];

    /// The name used in every JSON document.
    pub const fn name(self) -> &'static str {
        match self {
            BlockFormat::Nvfp4 => "nvfp4",
            BlockFormat::Fp8 => "fp8",
            BlockFormat::Q8_0 => "q8_0",
            BlockFormat::Q4_0 => "q4_0",
            BlockFormat::Q4_1 => "q4_1",
            BlockFormat::Q4K => "q4_k",
            BlockFormat::Q6K => "q6_k",
        }
    }

    /// The format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// Elements of a block: a row has a whole number of them.
    pub const fn block(self) -> usize {
        match self {
            BlockFormat::Nvfp4 => NVFP4_BLOCK,
            BlockFormat::Fp8 => 1,
            BlockFormat::Q8_0 | BlockFormat::Q4_0 | BlockFormat::Q4_1 => 32,
            BlockFormat::Q4K | BlockFormat::Q6K => 256,
        }
    }

    /// Bytes of a row of `k` elements; `None` when that is no whole number of blocks, or none.
    pub const fn row_bytes(self, k: usize) -> Option<usize> {
        if k == 0 || !k.is_multiple_of(self.block()) {
            return None;
        }
        let blocks = k / self.block();
        Some(match self {
            BlockFormat::Nvfp4 => k / 2 + blocks + TAIL,
            BlockFormat::Fp8 => k + TAIL,
            _ => blocks * self.block_bytes(),
        })
    }

    /// Bytes of a block that holds everything it needs.
    const fn block_bytes(self) -> usize {
        match self {
            BlockFormat::Q8_0 => 34,
            BlockFormat::Q4_0 => 18,
            BlockFormat::Q4_1 => 20,
            BlockFormat::Q4K => 144,
            BlockFormat::Q6K => 210,
            BlockFormat::Nvfp4 | BlockFormat::Fp8 => 0,
        }
    }

    /// Values of a row from element `from` on, as many as `out` holds.
    ///
    /// # Panics
    /// When `row` is no row of `k` elements, or `from` and `out` reach beyond it.
    pub fn decode(self, row: &[u8], k: usize, from: usize, out: &mut [f32]) {
        assert_eq!(
            Some(row.len()),
            self.row_bytes(k),
            "a {} row of {k}",
            self.name()
        );
        assert!(from + out.len() <= k, "{from} + {} of {k}", out.len());
        match self {
            BlockFormat::Nvfp4 => {
                let (codes, rest) = row.split_at(k / 2);
                let (scales, global) = rest.split_at(k / NVFP4_BLOCK);
                let global = tail(global);
                for (i, value) in (from..).zip(out) {
                    let step = E4M3_VALUES[usize::from(scales[i / NVFP4_BLOCK])] / global;
                    *value = e2m1_to_f32(codes[i / 2] >> (4 * (i % 2))) * step;
                }
            }
            BlockFormat::Fp8 => {
                let (codes, scale) = row.split_at(k);
                let scale = tail(scale);
                for (value, code) in out.iter_mut().zip(&codes[from..]) {
                    *value = E4M3_VALUES[usize::from(*code)] * scale;
                }
            }
            _ => self.decode_blocks(row, from, out),
        }
    }

    fn decode_blocks(self, row: &[u8], from: usize, out: &mut [f32]) {
        let size = self.block();
        let mut values = [0.0_f32; LARGEST];
        let (mut at, mut done) = (from, 0);
        while done < out.len() {
            let block = &row[at / size * self.block_bytes()..][..self.block_bytes()];
            let values = &mut values[..size];
            match self {
                BlockFormat::Q8_0 => q8_0(block, values),
                BlockFormat::Q4_0 => q4_0(block, values),
                BlockFormat::Q4_1 => q4_1(block, values),
                BlockFormat::Q4K => q4_k(block, values),
                BlockFormat::Q6K => q6_k(block, values),
                BlockFormat::Nvfp4 | BlockFormat::Fp8 => {}
            }
            let inside = &values[at % size..];
            let n = inside.len().min(out.len() - done);
            out[done..done + n].copy_from_slice(&inside[..n]);
            (at, done) = (at + n, done + n);
        }
    }
}

impl std::fmt::Display for BlockFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

fn tail(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn half(bytes: &[u8]) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]))
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let (scale, codes) = block.split_at(2);
    let d = half(scale);
    for (value, code) in out.iter_mut().zip(codes) {
        *value = f32::from(*code as i8) * d;
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let (scale, codes) = block.split_at(2);
    let d = half(scale);
    nibbles(codes, out, |code| (f32::from(code) - 8.0) * d);
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = block.split_at(4);
    let (d, m) = (half(scales), half(&scales[2..]));
    nibbles(codes, out, |code| f32::from(code) * d + m);
}

/// Low nibbles are the first half, high nibbles the second.
fn nibbles(codes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(codes.len());
    for ((low, high), code) in low.iter_mut().zip(high).zip(codes) {
        (*low, *high) = (value(code & 0xf), value(code >> 4));
    }
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(block), half(&block[2..]));
    let (packed, codes) = block[4..].split_at(12);
    for (i, (codes, out)) in codes.chunks(32).zip(out.chunks_mut(64)).enumerate() {
        let of = |j: usize| {
            let (scale, min) = six_bits(packed, j);
            (d * f32::from(scale), dmin * f32::from(min))
        };
        let (low, high) = (of(2 * i), of(2 * i + 1));
        let (first, second) = out.split_at_mut(32);
        for ((first, second), code) in first.iter_mut().zip(second).zip(codes) {
            *first = low.0 * f32::from(code & 0xf) - low.1;
            *second = high.0 * f32::from(code >> 4) - high.1;
        }
    }
}

/// Pair `j` of eight six-bit scales and minima in twelve bytes.
fn six_bits(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        return (packed[j] & 63, packed[j + 4] & 63);
    }
    (
        (packed[j + 4] & 0xf) | ((packed[j - 4] >> 6) << 4),
        (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4),
    )
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(16);
    let d = half(d);
    for (i, value) in out.iter_mut().enumerate() {
        // Two halves of 128; in each, four runs of 32 share the bytes of `high`.
        let (half, run, l) = (i / 128, i / 32 % 4, i % 32);
        let four = low[64 * half + 32 * (run % 2) + l] >> (4 * (run / 2)) & 0xf;
        let two = high[32 * half + l] >> (2 * run) & 3;
        let code = i16::from(four | (two << 4)) - 32;
        let scale = scales[8 * half + 2 * run + l / 16] as i8;
        *value = d * f32::from(scale) * f32::from(code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{f32_to_f16, pack_nvfp4, unpack_nvfp4};

    fn whole(format: BlockFormat, row: &[u8], k: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; k];
        format.decode(row, k, 0, &mut out);
        out
    }

    #[test]
    fn b_246_blocks_decode_to_values_known_beforehand() {
        let half = |v: f32| f32_to_f16(v).to_le_bytes();
        let mut q8 = half(0.5).to_vec();
        q8.extend((0..32).map(|i| (i as i8 - 16) as u8));
        let want: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) / 2.0).collect();
        assert_eq!(whole(BlockFormat::Q8_0, &q8, 32), want);

        let codes: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let q4 = [half(0.25).to_vec(), codes.clone()].concat();
        let got = whole(BlockFormat::Q4_0, &q4, 32);
        assert_eq!(
            (got[0], got[15], got[16], got[31]),
            (-2.0, 1.75, 1.75, -2.0)
        );

        let q4 = [half(0.25).to_vec(), half(-3.0).to_vec(), codes].concat();
        let got = whole(BlockFormat::Q4_1, &q4, 32);
        assert_eq!(
            (got[0], got[15], got[16], got[31]),
            (-3.0, 0.75, 0.75, -3.0)
        );

        // Pair 0: scale 5, minimum 3. Pair 4: scale 7 + 16, minimum 2 + 32, high bits in others' bytes.
        let mut packed = [0_u8; 12];
        (packed[0], packed[4], packed[8]) = (5 | 1 << 6, 3 | 2 << 6, 7 | 2 << 4);
        let mut q4 = [half(0.5).to_vec(), half(0.25).to_vec(), packed.to_vec()].concat();
        q4.extend([0x21; 128]);
        let got = whole(BlockFormat::Q4K, &q4, 256);
        assert_eq!(got[0], 0.5 * 5.0 * 1.0 - 0.25 * 3.0);
        assert_eq!(got[32], 0.0);
        assert_eq!(got[128], 0.5 * 23.0 * 1.0 - 0.25 * 34.0);

        let mut q6 = vec![0x21_u8; 128];
        q6.extend([0b11_10_01_00; 64]);
        q6.extend((1..=16).map(|i| i as u8));
        q6.extend(half(0.5));
        let got = whole(BlockFormat::Q6K, &q6, 256);
        assert_eq!(got[0], 0.5 * 1.0 * (1.0 - 32.0));
        assert_eq!(got[16], 0.5 * 2.0 * (1.0 - 32.0));
        assert_eq!(got[32], 0.5 * 3.0 * (17.0 - 32.0));
        assert_eq!(got[64], 0.5 * 5.0 * (34.0 - 32.0));
        assert_eq!(got[96 + 17], 0.5 * 8.0 * (50.0 - 32.0));
        assert_eq!(got[128], 0.5 * 9.0 * (1.0 - 32.0));

        let fp8 = [vec![0x38, 0xc0, 0x7e], 0.5_f32.to_le_bytes().to_vec()].concat();
        assert_eq!(whole(BlockFormat::Fp8, &fp8, 3), [0.5, -1.0, 224.0]);

        let data: Vec<f32> = (0..32).map(|i| (i as f32 - 11.0) / 7.0).collect();
        let packed = pack_nvfp4(&data, 32, 700.0);
        let row = [
            packed.packed.clone(),
            packed.block_scales.clone(),
            700.0_f32.to_le_bytes().to_vec(),
        ]
        .concat();
        assert_eq!(
            whole(BlockFormat::Nvfp4, &row, 32),
            unpack_nvfp4(&packed, 32)
        );
    }

    #[test]
    fn any_part_of_a_row_is_that_part_of_the_whole() {
        for format in BlockFormat::ALL {
            assert_eq!(BlockFormat::from_name(format.name()), Some(format));
            let json = serde_json::to_value(format).expect("a name");
            assert_eq!(json, format.name());
            let k = 512;
            let bytes = format.row_bytes(k).expect("whole blocks");
            // Small exponents everywhere, so that no value is NaN.
            let row: Vec<u8> = (0..bytes).map(|i| (i * 37 % 61) as u8).collect();
            let all = whole(format, &row, k);
            assert!(all.iter().any(|v| *v != 0.0), "{format}");
            for (from, len) in [(0, 512), (1, 31), (30, 5), (255, 257), (511, 1), (64, 0)] {
                let mut part = vec![f32::NAN; len];
                format.decode(&row, k, from, &mut part);
                assert_eq!(part, all[from..from + len], "{format} {from}");
            }
            assert_eq!(format.row_bytes(0), None);
            assert_eq!(
                format.row_bytes(k + 8).is_some(),
                format == BlockFormat::Fp8
            );
        }
    }
}
