//! int8 weights with one scale an output channel, symmetric.

/// Largest code; -128 is not used.
pub const INT8_MAX: f32 = 127.0;

/// Scale of one output channel: `max(amax / 127, 1e-8)`, in f32.
pub fn int8_scale(amax: f32) -> f32 {
    (amax / INT8_MAX).max(1e-8)
}

/// Code of one weight: `clamp(round_half_even(w / scale), -127, 127)`; NaN becomes 0.
pub fn quantise_int8(value: f32, scale: f32) -> i8 {
    (value / scale).round_ties_even().clamp(-INT8_MAX, INT8_MAX) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_even_and_the_range_is_symmetric() {
        let codes: Vec<i8> = [0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0]
            .map(|v| quantise_int8(v, 1.0))
            .into();
        assert_eq!(codes, [0, 2, 2, 0, -2, 127, -127]);
        assert_eq!((int8_scale(0.0), int8_scale(127.0)), (1e-8, 1.0));
    }
}
