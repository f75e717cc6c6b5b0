//! FP8: E4M3 (the OCP `FN` flavour: finite, max 448, one NaN) and E5M2, and the scale both use.

use super::{decode_magnitude, encode_magnitude};

/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;
/// Largest finite E5M2 value.
pub const E5M2_MAX: f32 = 57344.0;
/// Smallest scale, so that a tensor of zeros has one.
pub const FP8_SCALE_FLOOR: f64 = 1e-8;

/// Scale of a tensor: `max(amax / 448, 1e-8)`.
pub fn fp8_scale(amax: f32) -> f32 {
    fp8_scale_f64(f64::from(amax)) as f32
}

/// [`fp8_scale`] before it is rounded to f32.
pub fn fp8_scale_f64(amax: f64) -> f64 {
    (amax / f64::from(E4M3_MAX)).max(FP8_SCALE_FLOOR)
}

/// Plain cast: nearest even; beyond the range, infinities included, the largest value; NaN stays
/// NaN.
///
/// The oracle's note on its E4M3 table says that an out-of-range value becomes NaN, its codes say
/// 448. The codes are followed. Nothing else depends on it: every scale formula clamps before it
/// casts.
pub fn f32_to_e4m3(value: f32) -> u8 {
    let sign = sign_bit(value);
    if value.is_nan() {
        return sign | 0x7f;
    }
    sign | encode_magnitude(value, 3, 7).min(0x7e) as u8
}

/// Cast of the value clamped to +-448; NaN stays NaN.
pub fn f32_to_e4m3_saturating(value: f32) -> u8 {
    f32_to_e4m3(value.clamp(-E4M3_MAX, E4M3_MAX))
}

/// Value of a code.
pub fn e4m3_to_f32(code: u8) -> f32 {
    E4M3_VALUES[usize::from(code)]
}

/// Plain cast: nearest even, beyond the range (from 61440, inclusive) infinity.
pub fn f32_to_e5m2(value: f32) -> u8 {
    let sign = sign_bit(value);
    if value.is_nan() {
        return sign | 0x7f;
    }
    sign | encode_magnitude(value, 2, 15).min(0x7c) as u8
}

/// Cast of the value clamped to +-57344; NaN stays NaN.
pub fn f32_to_e5m2_saturating(value: f32) -> u8 {
    f32_to_e5m2(value.clamp(-E5M2_MAX, E5M2_MAX))
}

/// Value of a code.
pub fn e5m2_to_f32(code: u8) -> f32 {
    let magnitude = match code & 0x7f {
        0x7c => f32::INFINITY,
        0x7d.. => f32::NAN,
        finite => decode_magnitude(u32::from(finite), 2, 15),
    };
    with_sign(code, magnitude)
}

/// `q(t, s) = cast_e4m3(clamp(t / s, -448, 448))`, into `codes` of the same length.
pub fn quantise_e4m3(data: &[f32], scale: f32, codes: &mut [u8]) {
    debug_assert_eq!(data.len(), codes.len());
    for (code, value) in codes.iter_mut().zip(data) {
        *code = f32_to_e4m3_saturating(value / scale);
    }
}

/// Rounds values through E4M3 under a scale, `q(t, s) * s`: what a form with that activation format
/// computes on.
pub fn fake_quant_e4m3(data: &mut [f32], scale: f32) {
    for value in data {
        *value = e4m3_to_f32(f32_to_e4m3_saturating(*value / scale)) * scale;
    }
}

/// Values of all 256 E4M3 codes.
pub static E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let magnitude = code as u32 & 0x7f;
        let value = if magnitude == 0x7f {
            f32::NAN
        } else {
            decode_magnitude(magnitude, 3, 7)
        };
        values[code] = if code < 128 { value } else { -value };
        code += 1;
    }
    values
};

fn sign_bit(value: f32) -> u8 {
    if value.is_sign_negative() {
        0x80
    } else {
        0
    }
}

fn with_sign(code: u8, magnitude: f32) -> f32 {
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_its_own_value() {
        for code in 0..=u8::MAX {
            let value = e4m3_to_f32(code);
            assert!(
                value.is_nan() || f32_to_e4m3(value) == code,
                "E4M3 {code:#x} is {value}"
            );
            let value = e5m2_to_f32(code);
            assert!(
                value.is_nan() || f32_to_e5m2(value) == code,
                "E5M2 {code:#x} is {value}"
            );
        }
    }

    #[test]
    fn edges_of_the_range() {
        assert_eq!((f32_to_e4m3(431.9), f32_to_e4m3(432.1)), (0x7d, 0x7e));
        assert_eq!(
            (f32_to_e4m3(1000.0), f32_to_e4m3(f32::NEG_INFINITY)),
            (0x7e, 0xfe)
        );
        assert_eq!(f32_to_e4m3_saturating(-1e30), 0xfe);
        assert_eq!(f32_to_e4m3_saturating(f32::NAN) & 0x7f, 0x7f);
        assert_eq!((f32_to_e5m2(61439.9), f32_to_e5m2(61440.0)), (0x7b, 0x7c));
        assert_eq!(f32_to_e5m2_saturating(f32::INFINITY), 0x7b);
    }

    #[test]
    fn rounding_through_the_format_keeps_its_own_values() {
        let mut data = [448.0, -0.3, 0.0, 1e-9, 1000.0];
        fake_quant_e4m3(&mut data, 1.0);
        assert_eq!(data, [448.0, -0.3125, 0.0, 0.0, 448.0]);
        let mut codes = [0; 2];
        quantise_e4m3(&[1.0, -2.0], 0.5, &mut codes);
        assert_eq!(codes, [f32_to_e4m3(2.0), f32_to_e4m3(-4.0)]);
    }
}
