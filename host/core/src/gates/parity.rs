//! Bind parity: one call of a freshly bound form against the reference on the same, equally rounded weights.
//!
//! The least-squares slope of the output on the reference catches a scale that is off by a percent, which no
//! cosine sees; the relative L2 error catches the rest.

use serde::{Deserialize, Serialize};

use super::GateRefusal;
use crate::stats::number;

/// How far the slope may leave 1.
pub const SLOPE_TOLERANCE: f64 = 0.005;

/// What was measured at bind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parity {
    /// Least-squares slope of the output on the reference.
    #[serde(with = "number")]
    pub slope: f64,
    /// Relative L2 error.
    #[serde(with = "number")]
    pub relative_l2: f64,
    /// Relative L2 allowed.
    #[serde(with = "number")]
    pub tolerance: f64,
}

/// Compares an output with its reference. Equal tensors have slope 1 and error 0.
pub fn bind_parity(got: &[f32], want: &[f32], tolerance: f64) -> Parity {
    let (mut cross, mut square, mut error) = (0f64, 0f64, 0f64);
    let equal = got.len() == want.len()
        && got
            .iter()
            .zip(want)
            .all(|(g, w)| g == w || g.to_bits() == w.to_bits());
    for (g, w) in got.iter().zip(want) {
        let (g, w) = (f64::from(*g), f64::from(*w));
        cross += g * w;
        square += w * w;
        error += (g - w) * (g - w);
    }
    if equal {
        return Parity {
            slope: 1.0,
            relative_l2: 0.0,
            tolerance,
        };
    }
    let broken = got.len() != want.len();
    Parity {
        slope: if broken { f64::NAN } else { cross / square },
        relative_l2: if broken {
            f64::NAN
        } else {
            (error / square).sqrt()
        },
        tolerance,
    }
}

impl Parity {
    /// `bind_parity` when the slope or the error is out of bounds; NaN is.
    pub fn refusal(&self) -> Option<GateRefusal> {
        let straight = (self.slope - 1.0).abs() <= SLOPE_TOLERANCE;
        let close = self.relative_l2 <= self.tolerance;
        (!straight || !close).then(|| {
            GateRefusal::new(
                "bind_parity",
                format!(
                    "slope on the reference {:.6} (1 +- {SLOPE_TOLERANCE}), relative L2 {:.3e} (at most {:.1e})",
                    self.slope, self.relative_l2, self.tolerance
                ),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.7).sin()).collect()
    }

    #[test]
    fn one_percent_of_scale_is_caught_by_the_slope() {
        let want = wave(512);
        let got: Vec<f32> = want.iter().map(|w| w * 1.01).collect();
        let parity = bind_parity(&got, &want, 6e-2);
        assert!((parity.slope - 1.01).abs() < 1e-6);
        assert_eq!(parity.refusal().unwrap().code, "bind_parity");
        let fine: Vec<f32> = want.iter().map(|w| w * 1.004).collect();
        assert!(bind_parity(&fine, &want, 6e-2).refusal().is_none());
        assert!(bind_parity(&fine, &want, 1e-4).refusal().is_some());
    }

    #[test]
    fn half_an_output_poison_and_wrong_lengths_are_caught() {
        let want = wave(64);
        let mut half = want.clone();
        half[32..].fill(0.0);
        assert!(bind_parity(&half, &want, 2e-1).refusal().is_some());
        half[32..].fill(f32::NAN);
        assert!(bind_parity(&half, &want, 2e-1).refusal().is_some());
        assert!(bind_parity(&want[..32], &want, 2e-1).refusal().is_some());
        assert!(bind_parity(&want, &[0.0; 64], 2e-1).refusal().is_some());
    }

    #[test]
    fn equal_outputs_pass_even_at_tolerance_zero() {
        assert!(bind_parity(&[0.0; 8], &[0.0; 8], 0.0).refusal().is_none());
        assert!(bind_parity(&wave(8), &wave(8), 0.0).refusal().is_none());
    }
}
