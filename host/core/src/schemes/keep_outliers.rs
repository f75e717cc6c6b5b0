//! `fp8_static_keep_outliers`: FP8 as by default, except where a scale would be set by an outlier.
//!
//! A point far above the rest of the same calibration leaves its typical values a handful of codes. Its seam keeps the
//! host; everything else goes as `fp8_static` says.

use super::{Decision, Fp8Static, Scheme, Seam, Want, KEEP_OUTLIER};
use crate::stats::{median, CEILING_RATIO};

/// The profile.
#[derive(Clone, Copy, Debug)]
pub struct KeepOutliers {
    /// Times the median of all positive points above which a point is an outlier.
    pub factor: f64,
}

impl Default for KeepOutliers {
    fn default() -> Self {
        KeepOutliers {
            factor: CEILING_RATIO,
        }
    }
}

impl Scheme for KeepOutliers {
    fn name(&self) -> &str {
        "fp8_static_keep_outliers"
    }

    fn summary(&self) -> &str {
        "fp8_static, with the host where a point is an outlier among all points"
    }

    fn statistics(&self, seam: &Seam) -> Vec<Want> {
        Fp8Static.statistics(seam)
    }

    fn decide(&self, report: &[Seam]) -> Vec<Decision> {
        let amaxes = |seam: &Seam| -> Vec<(String, f64)> {
            let of = |(point, s): (&String, &super::PointStatistics)| {
                Some((point.clone(), f64::from(s.amax?)))
            };
            seam.statistics.iter().filter_map(of).collect()
        };
        let positive: Vec<f64> = report
            .iter()
            .filter(|seam| seam.consulted)
            .flat_map(amaxes)
            .map(|(_, amax)| amax)
            .filter(|amax| *amax > 0.0)
            .collect();
        let middle = median(&positive);
        let mut decisions = Fp8Static.decide(report);
        for (seam, decision) in report.iter().zip(&mut decisions) {
            let Some(middle) = middle.filter(|_| seam.consulted) else {
                continue;
            };
            let outlier = amaxes(seam)
                .into_iter()
                .find(|(_, amax)| *amax > self.factor * middle);
            if let Some((point, amax)) = outlier {
                let reason = format!(
                    "point {point} has an amax of {amax}, above {} times the median {middle} of all points; \
                     the seam is kept at host precision",
                    self.factor
                );
                *decision = Decision::keep(KEEP_OUTLIER, reason);
            }
        }
        decisions
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ignoring, seam};
    use super::super::PointStatistics;
    use super::*;

    fn with(key: &str, amax: f32) -> Seam {
        let mut seam = seam(key, &["gemm"], &["fp8_static"]);
        let measured = PointStatistics {
            amax: Some(amax),
            ..PointStatistics::default()
        };
        seam.statistics.insert("x".into(), measured);
        seam
    }

    #[test]
    fn b_103_an_outlier_keeps_the_host_with_its_numbers_and_factor_100_keeps_nothing() {
        let mut report: Vec<Seam> = (0..9).map(|i| with(&format!("s{i}"), 1.0)).collect();
        report.push(with("dead", 0.0));
        report.push(with("odd", 50.0));
        report.push(with("edge", 20.0));
        report.push(ignoring("norm", &[]));
        let found = KeepOutliers::default().decide(&report);
        let Decision::Keep { code, reason } = &found[10] else {
            panic!("{:?}", found[10]);
        };
        assert_eq!(code, "keep_outlier");
        for fact in ["point x", "50", "20", "median 1", "host precision"] {
            assert!(reason.contains(fact), "{reason}");
        }
        // Strictly above: the edge itself is routed, and so is everything else.
        let kept = found.iter().filter(|d| matches!(d, Decision::Keep { .. }));
        assert_eq!(kept.count(), 1);
        assert_eq!(found[11], Decision::route("fp8_static"));
        assert_eq!(found[12], Decision::Default);
        let lenient = KeepOutliers { factor: 100.0 }.decide(&report);
        assert_eq!(lenient, Fp8Static.decide(&report));
    }

    #[test]
    fn nothing_measured_keeps_nothing() {
        let report = [seam("a", &["gemm"], &["fp8_static"])];
        assert_eq!(
            KeepOutliers::default().decide(&report),
            Fp8Static.decide(&report)
        );
    }
}
