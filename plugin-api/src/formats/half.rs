//! bf16 and f16 as bit patterns, rounded to nearest even.

use super::{decode_magnitude, encode_magnitude};

/// Rounds to bf16; NaN stays a quiet NaN, overflow is infinity.
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Widens bf16: exact.
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to f16; NaN stays a quiet NaN, overflow is infinity.
pub fn f32_to_f16(value: f32) -> u16 {
    let sign = ((value.to_bits() >> 16) & 0x8000) as u16;
    if value.is_nan() {
        return sign | 0x7e00;
    }
    sign | encode_magnitude(value, 10, 15).min(0x7c00) as u16
}

/// Widens f16: exact.
pub fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = match bits & 0x7fff {
        0x7c00 => f32::INFINITY,
        0x7c01.. => f32::NAN,
        finite => decode_magnitude(u32::from(finite), 10, 15),
    };
    if bits & 0x8000 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

/// The nearest bf16 value.
pub fn round_bf16(value: f32) -> f32 {
    bf16_to_f32(f32_to_bf16(value))
}

/// The nearest f16 value.
pub fn round_f16(value: f32) -> f32 {
    f16_to_f32(f32_to_f16(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_even() {
        // 1 + 2^-8 lies between 1 and 1 + 2^-7; 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6.
        assert_eq!(f32_to_bf16(1.0 + 1.0 / 256.0), 0x3f80);
        assert_eq!(f32_to_bf16(1.0 + 3.0 / 256.0), 0x3f82);
        assert_eq!(f32_to_bf16(-1.0 - 1.1 / 256.0), 0xbf81);
        assert_eq!(f32_to_f16(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(f32_to_f16(1.0 + 3.0 / 2048.0), 0x3c02);
    }

    #[test]
    fn every_pattern_survives() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f32(bits);
            assert!(
                value.is_nan() || f32_to_bf16(value) == bits,
                "bf16 {bits:#x}"
            );
            let value = f16_to_f32(bits);
            assert!(value.is_nan() || f32_to_f16(value) == bits, "f16 {bits:#x}");
        }
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert_eq!((f32_to_f16(65519.9), f32_to_f16(65520.0)), (0x7bff, 0x7c00));
        assert_eq!(
            (f32_to_f16(2_f32.powi(-24)), f32_to_f16(2_f32.powi(-25))),
            (1, 0)
        );
        assert!(round_bf16(f32::NAN).is_nan() && round_f16(f32::NAN).is_nan());
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
