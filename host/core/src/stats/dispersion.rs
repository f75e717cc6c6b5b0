//! How far samples disagree, and how much of the maximum the percentile cut away.

use serde::{Deserialize, Serialize};

use super::{median, number, percentile, StatsError};

/// Share of the maximum that counts as cut.
const CUT: f64 = 0.10;

/// Spread of a calibration, for a person to judge whether the samples were alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dispersion {
    /// Samples.
    pub num_samples: usize,
    /// Points.
    pub num_points: usize,
    /// Largest value of all.
    #[serde(with = "number")]
    pub amax_max_over_points: f64,
    /// Median over points of each point's median over samples.
    #[serde(with = "number")]
    pub amax_median_over_points: f64,
    /// Median over points of `(max - reduced) / max`.
    #[serde(with = "number")]
    pub cutback_from_max_p50: f64,
    /// 99th percentile of the same.
    #[serde(with = "number")]
    pub cutback_from_max_p99: f64,
    /// Points whose maximum was cut by more than a tenth.
    pub num_points_cut_gt_10pct: usize,
}

impl Dispersion {
    /// Of a matrix with one row a sample, and what it was reduced to. All in f64 on the f32 values.
    ///
    /// # Errors
    /// An empty or ragged matrix, or a reduction of another length.
    pub fn new(per_sample: &[Vec<f32>], reduced: &[f32]) -> Result<Self, StatsError> {
        if per_sample.is_empty() {
            return Err(StatsError::NoSamples);
        }
        for (sample, row) in per_sample.iter().enumerate() {
            if row.len() != reduced.len() {
                return Err(StatsError::Ragged {
                    sample,
                    expected: reduced.len(),
                    found: row.len(),
                });
            }
        }
        let points = reduced.len();
        let (mut maxima, mut medians, mut cuts) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..points {
            let column: Vec<f64> = per_sample.iter().map(|row| f64::from(row[i])).collect();
            let max = largest(&column);
            cuts.push((max - f64::from(reduced[i])) / floor(max));
            maxima.push(max);
            medians.push(median(&column).unwrap_or(f64::NAN));
        }
        let of_cuts = |p| {
            if points == 0 {
                Ok(0.0)
            } else {
                percentile(&cuts, p)
            }
        };
        Ok(Self {
            num_samples: per_sample.len(),
            num_points: points,
            amax_max_over_points: if points == 0 { 0.0 } else { largest(&maxima) },
            amax_median_over_points: median(&medians).unwrap_or(0.0),
            cutback_from_max_p50: of_cuts(50.0)?,
            cutback_from_max_p99: of_cuts(99.0)?,
            num_points_cut_gt_10pct: cuts.iter().filter(|cut| **cut > CUT).count(),
        })
    }

    /// One line for a log.
    pub fn summary(&self) -> String {
        format!(
            "calibrated over N={} samples, {} points: amax up to {:.4}, median {:.4}; percentile cut {:.2}% of the \
             maximum at the median point, {:.2}% at p99, more than 10% at {} point(s)",
            self.num_samples,
            self.num_points,
            self.amax_max_over_points,
            self.amax_median_over_points,
            100.0 * self.cutback_from_max_p50,
            100.0 * self.cutback_from_max_p99,
            self.num_points_cut_gt_10pct,
        )
    }
}

/// Largest value; NaN wins.
fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, |a, b| {
        if a.is_nan() || b.is_nan() {
            f64::NAN
        } else {
            a.max(b)
        }
    })
}

/// A divisor that is never zero; NaN stays.
fn floor(max: f64) -> f64 {
    if max < 1e-12 {
        1e-12
    } else {
        max
    }
}

#[cfg(test)]
mod tests {
    use super::super::accumulate;
    use super::*;

    #[test]
    fn b_059_the_percentile_is_measured_against_the_maximum() {
        let samples = vec![vec![1.0, 0.0], vec![2.0, 0.0], vec![10.0, 0.0]];
        let reduced = accumulate(&samples, 50.0).unwrap();
        let d = Dispersion::new(&samples, &reduced).unwrap();
        assert_eq!((d.num_samples, d.num_points), (3, 2));
        assert_eq!(d.amax_max_over_points, 10.0);
        assert_eq!(d.amax_median_over_points, 1.0);
        assert_eq!(d.cutback_from_max_p50, 0.4);
        assert_eq!(d.num_points_cut_gt_10pct, 1);
        assert!(d.summary().contains("N=3"));
    }

    #[test]
    fn no_point_is_no_dispersion_and_nan_survives_json() {
        let d = Dispersion::new(&[vec![]], &[]).unwrap();
        assert_eq!(d.num_points, 0);
        assert_eq!(d.cutback_from_max_p99, 0.0);
        let nan = Dispersion::new(&[vec![f32::NAN], vec![1.0]], &[f32::NAN]).unwrap();
        let back: Dispersion = serde_json::from_str(&serde_json::to_string(&nan).unwrap()).unwrap();
        assert!(back.amax_max_over_points.is_nan());
        assert!(Dispersion::new(&[], &[]).is_err());
        assert!(Dispersion::new(&[vec![1.0]], &[]).is_err());
    }
}
