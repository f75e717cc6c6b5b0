//! Number formats, to the last code: E4M3, E5M2, bf16, f16, NVFP4, int8 per output channel, and the
//! packed rows of checkpoints.
//!
//! One definition for every plugin and for the host's bind-parity reference, in plain scalar code:
//! exactness is the point, a backend that needs speed packs with its own instructions and tests
//! them against these. Codes and scales equal the oracle's (`calibration.json`) one by one; the
//! formulas are quoted where they are used.
//!
//! Not here: layouts of packed buffers (a form's own, but for the rows of [`BlockFormat`]).

mod activations;
mod balance;
mod blocks;
mod fp8;
mod half;
mod int8;
mod nvfp4;
mod weights;

pub use activations::{fake_quant_int8, ActivationRounding};
pub use balance::Balance;
pub use blocks::BlockFormat;
pub use fp8::{
    e4m3_to_f32, e5m2_to_f32, f32_to_e4m3, f32_to_e4m3_saturating, f32_to_e5m2,
    f32_to_e5m2_saturating, fake_quant_e4m3, fp8_scale, fp8_scale_f64, quantise_e4m3, E4M3_MAX,
    E4M3_VALUES, E5M2_MAX, FP8_SCALE_FLOOR,
};
pub use half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, round_bf16, round_f16};
pub use int8::{int8_scale, quantise_int8, INT8_MAX};
pub use nvfp4::{
    e2m1_to_f32, f32_to_e2m1, nvfp4_block_scale, nvfp4_global_scale, pack_nvfp4, unpack_nvfp4,
    NvFp4, E2M1_MAX, E2M1_VALUES, NVFP4_BLOCK,
};
pub use weights::{amax, round_weight, round_weights_jointly, WeightMatrix};

/// Magnitude code of a small float: `|value|` rounded to nearest even with `mantissa` mantissa bits
/// and exponent bias `bias`, subnormals included, exponents beyond the format's counted on. NaN is
/// the caller's.
fn encode_magnitude(value: f32, mantissa: u32, bias: i32) -> u32 {
    let bits = value.to_bits() & 0x7fff_ffff;
    let smallest_normal = ((127 + 1 - bias) as u32) << 23;
    if bits < smallest_normal {
        // One code a step of 2^(1 - bias - mantissa): scaling by a power of two is exact, also out
        // of subnormals.
        let steps = f32::from_bits(bits) * 2_f32.powi(bias - 1 + mantissa as i32);
        return steps.round_ties_even() as u32;
    }
    let drop = 23 - mantissa;
    let half = (1 << (drop - 1)) - 1 + ((bits >> drop) & 1);
    ((bits + half) >> drop) - (((127 - bias) as u32) << mantissa)
}

/// Value of a magnitude code, the inverse of [`encode_magnitude`].
const fn decode_magnitude(code: u32, mantissa: u32, bias: i32) -> f32 {
    let exponent = code >> mantissa;
    let fraction = code & ((1 << mantissa) - 1);
    if exponent > 0 {
        let exponent = exponent + (127 - bias) as u32;
        return f32::from_bits((exponent << 23) | (fraction << (23 - mantissa)));
    }
    // A subnormal: fraction * 2^(1 - bias - mantissa), both exact.
    let step = f32::from_bits(((127 + 1 - bias - mantissa as i32) as u32) << 23);
    fraction as f32 * step
}

#[cfg(test)]
mod oracle;
