//! The static FP8 scale of a reduced amax, in f64; whoever hands it to a kernel rounds it to f32 once. The
//! formula belongs to the format, in the plugin interface.

use structures_plugin_api::formats::fp8_scale_f64;

/// `max(amax/448, 1e-8)`. NaN stays NaN, so that a broken calibration cannot pass for a small one.
pub fn fp8_scale(amax: f64) -> f64 {
    if amax.is_nan() {
        amax
    } else {
        fp8_scale_f64(amax)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_061_scales_have_a_floor_and_keep_nan() {
        assert_eq!(fp8_scale(448.0), 1.0);
        assert_eq!(fp8_scale(0.0), 1e-8);
        assert!(fp8_scale(f64::NAN).is_nan());
    }
}
