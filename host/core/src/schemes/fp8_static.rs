//! `fp8_static`: FP8 E4M3 with static, calibrated scales at every consulted seam.

use super::{Decision, Scheme, Seam, Want};

/// Format it routes to.
const FORMAT: &str = "fp8_static";

/// The profile.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fp8Static;

impl Scheme for Fp8Static {
    fn name(&self) -> &str {
        "fp8_static"
    }

    fn summary(&self) -> &str {
        "FP8 E4M3 activations and weights, one calibrated scale a tensor"
    }

    fn statistics(&self, seam: &Seam) -> Vec<Want> {
        seam.points
            .iter()
            .map(|point| Want::new(point, "amax", "tensor"))
            .collect()
    }

    fn decide(&self, report: &[Seam]) -> Vec<Decision> {
        let one = |seam: &Seam| match seam.consulted {
            true => Decision::route(FORMAT),
            false => Decision::Default,
        };
        report.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ignoring, seam};
    use super::*;

    #[test]
    fn every_consulted_seam_is_routed_and_measured_at_every_point() {
        let mut ffn = seam("ffn", &["gemm"], &["fp8_static"]);
        ffn.points = vec!["x".into(), "hidden".into()];
        let wants = Fp8Static.statistics(&ffn);
        assert_eq!(
            wants,
            [
                Want::new("x", "amax", "tensor"),
                Want::new("hidden", "amax", "tensor")
            ]
        );
        let decided = Fp8Static.decide(&[ffn, ignoring("norm", &["none"])]);
        assert_eq!(decided, [Decision::route("fp8_static"), Decision::Default]);
    }
}
