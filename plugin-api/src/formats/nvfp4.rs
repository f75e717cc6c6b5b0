//! NVFP4: E2M1 values, one E4M3 scale for every 16 along K, one global scale a tensor.
//!
//! `block scale = E4M3(global * block_amax / 6)` with 0 replaced by 0.125, `value = E2M1(clamp(w /
//! (block scale / global), -6, 6))`. The global scale is `448 * 6 / amax` (two-level) or 1.

use super::fp8::{e4m3_to_f32, f32_to_e4m3_saturating, E4M3_MAX};

/// Elements that share one block scale.
pub const NVFP4_BLOCK: usize = 16;
/// Largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;
/// Values of the 16 E2M1 codes; bit 3 is the sign.
pub static E2M1_VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Stands for a block scale that rounds to 0.
const ZERO_BLOCK_SCALE: u8 = 0x20;

/// Nearest code, ties to even, beyond +-6 saturated. A zero of either sign is code 0, a negative
/// value that rounds to zero keeps its sign; NaN becomes 0.
pub fn f32_to_e2m1(value: f32) -> u8 {
    let sign = if value < 0.0 { 8 } else { 0 };
    let magnitude = match value.abs() {
        v if v > 5.0 => 7,
        v if v >= 3.5 => 6,
        v if v > 2.5 => 5,
        v if v >= 1.75 => 4,
        v if v > 1.25 => 3,
        v if v >= 0.75 => 2,
        v if v > 0.25 => 1,
        _ => 0,
    };
    sign | magnitude
}

/// Value of a code (low four bits).
pub fn e2m1_to_f32(code: u8) -> f32 {
    E2M1_VALUES[usize::from(code & 0xf)]
}

/// Two-level global scale of a tensor, `448 * 6 / amax`; 1 for a tensor of zeros.
///
/// By way of the reciprocal: the oracle's producer divides a constant by a tensor like that, and
/// the last bit of the scale decides codes.
pub fn nvfp4_global_scale(amax: f32) -> f32 {
    if amax > 0.0 {
        amax.recip() * (E4M3_MAX * E2M1_MAX)
    } else {
        1.0
    }
}

/// E4M3 code of a block's scale.
pub fn nvfp4_block_scale(block_amax: f32, global: f32) -> u8 {
    match f32_to_e4m3_saturating(global * (block_amax / E2M1_MAX)) {
        0 => ZERO_BLOCK_SCALE,
        code => code,
    }
}

/// A packed `[n, k]` matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct NvFp4 {
    /// Two codes a byte along K, even column in the low nibble, rows of `ceil(k / 2)` bytes.
    pub packed: Vec<u8>,
    /// E4M3 codes, rows of `ceil(k / 16)`, not swizzled.
    pub block_scales: Vec<u8>,
    /// Global scale.
    pub global: f32,
}

/// Packs a row-major `[n, k]` matrix under a global scale. A last block shorter than 16 has a scale
/// of its own.
pub fn pack_nvfp4(data: &[f32], k: usize, global: f32) -> NvFp4 {
    let mut out = NvFp4 {
        packed: Vec::new(),
        block_scales: Vec::new(),
        global,
    };
    for row in data.chunks_exact(k.max(1)) {
        let mut codes = Vec::with_capacity(k + 1);
        for block in row.chunks(NVFP4_BLOCK) {
            let amax = block
                .iter()
                .fold(0.0_f32, |amax, value| amax.max(value.abs()));
            let scale = nvfp4_block_scale(amax, global);
            let step = e4m3_to_f32(scale) / global;
            out.block_scales.push(scale);
            codes.extend(block.iter().map(|value| f32_to_e2m1(value / step)));
        }
        codes.resize(k.next_multiple_of(2), 0);
        out.packed
            .extend(codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
    }
    out
}

/// Values of a packed `[n, k]` matrix, row-major: `value * (block scale / global)`.
pub fn unpack_nvfp4(packed: &NvFp4, k: usize) -> Vec<f32> {
    let k = k.max(1);
    let rows = packed.packed.chunks_exact(k.div_ceil(2));
    let scales = packed.block_scales.chunks_exact(k.div_ceil(NVFP4_BLOCK));
    let mut out = Vec::with_capacity(rows.len() * k);
    for (row, scales) in rows.zip(scales) {
        out.extend((0..k).map(|i| {
            let code = row[i / 2] >> (4 * (i % 2));
            e2m1_to_f32(code) * (e4m3_to_f32(scales[i / NVFP4_BLOCK]) / packed.global)
        }));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_its_own_value() {
        // Code 8 is a negative zero, which encodes as 0.
        for code in (0..16).filter(|code| *code != 8) {
            assert_eq!(f32_to_e2m1(e2m1_to_f32(code)), code);
        }
        assert_eq!(
            (f32_to_e2m1(-0.0), f32_to_e2m1(-0.1), f32_to_e2m1(f32::NAN)),
            (0, 8, 0)
        );
    }

    #[test]
    fn a_short_last_block_and_an_odd_row_have_their_own_place() {
        let data: Vec<f32> = (0..2 * 19).map(|i| (i as f32 - 20.0) / 8.0).collect();
        let packed = pack_nvfp4(&data, 19, nvfp4_global_scale(20.0 / 8.0));
        assert_eq!((packed.packed.len(), packed.block_scales.len()), (20, 4));
        let back = unpack_nvfp4(&packed, 19);
        assert_eq!(back.len(), data.len());
        let worst = data
            .iter()
            .zip(&back)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(worst < 2.5 / 6.0, "{worst}");
    }
}
