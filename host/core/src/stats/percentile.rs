//! The percentile rule and the reduction across samples.
//!
//! Rank `p/100 * (N-1)`, linear interpolation between neighbours, computed in f64, rounded once to f32. A NaN
//! makes the result NaN. An infinity poisons whatever it is interpolated with: such a calibration must be
//! visible, not smoothed over.

use super::StatsError;

/// Percentile used when the caller names none. It follows the maximum closely for small N and ignores a
/// single outlier from about a thousand samples on.
pub const DEFAULT_PERCENTILE: f64 = 99.9;

/// Percentile of one list in f64. NaN anywhere gives NaN.
///
/// # Errors
/// An empty list, or a percentile that is not inside `[0, 100]`.
pub fn percentile(values: &[f64], percentile: f64) -> Result<f64, StatsError> {
    check_percentile(percentile)?;
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    at_rank(&sorted, percentile).ok_or(StatsError::NoSamples)
}

/// Reduces one vector a sample to one vector: the percentile over samples, element by element. Serves points
/// (one entry a point) and channels (one entry a channel) alike.
///
/// # Errors
/// No sample, vectors of different lengths, a percentile outside `[0, 100]`.
pub fn accumulate(per_sample: &[Vec<f32>], percentile: f64) -> Result<Vec<f32>, StatsError> {
    let first = per_sample.first().ok_or(StatsError::NoSamples)?;
    check_percentile(percentile)?;
    for (sample, row) in per_sample.iter().enumerate() {
        if row.len() != first.len() {
            return Err(StatsError::Ragged {
                sample,
                expected: first.len(),
                found: row.len(),
            });
        }
    }
    let mut column = vec![0f64; per_sample.len()];
    let mut reduced = Vec::with_capacity(first.len());
    for i in 0..first.len() {
        for (slot, row) in column.iter_mut().zip(per_sample) {
            *slot = f64::from(row[i]);
        }
        column.sort_by(f64::total_cmp);
        let value = at_rank(&column, percentile).ok_or(StatsError::NoSamples)?;
        reduced.push(value as f32);
    }
    Ok(reduced)
}

/// Median: the mean of the two middle values when their number is even; `None` for no value, NaN for a NaN.
pub fn median(values: &[f64]) -> Option<f64> {
    if values.iter().any(|v| v.is_nan()) {
        return Some(f64::NAN);
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => None,
        _ if n % 2 == 1 => Some(sorted[n / 2]),
        _ => Some((sorted[n / 2 - 1] + sorted[n / 2]) / 2.0),
    }
}

/// Checks a percentile before any work.
///
/// # Errors
/// It is not inside `[0, 100]`.
pub fn check_percentile(percentile: f64) -> Result<(), StatsError> {
    if (0.0..=100.0).contains(&percentile) {
        Ok(())
    } else {
        Err(StatsError::PercentileRange { found: percentile })
    }
}

/// `sorted` by total order, so that a NaN stands at one of the ends.
fn at_rank(sorted: &[f64], percentile: f64) -> Option<f64> {
    let (first, last) = (sorted.first()?, sorted.last()?);
    if first.is_nan() || last.is_nan() {
        return Some(f64::NAN);
    }
    let rank = percentile / 100.0 * (sorted.len() - 1) as f64;
    let below = (rank.floor() as usize).min(sorted.len() - 1);
    let above = (below + 1).min(sorted.len() - 1);
    let (a, b) = (sorted[below], sorted[above]);
    let (step, t) = (b - a, rank - below as f64);
    // From the nearer neighbour: exact at both ends.
    Some(if t >= 0.5 {
        b - step * (1.0 - t)
    } else {
        a + step * t
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_055_hundred_is_the_maximum_and_one_sample_is_itself() {
        let samples = vec![vec![1.0, 9.0], vec![3.0, 2.0], vec![2.0, 4.0]];
        assert_eq!(accumulate(&samples, 100.0).unwrap(), [3.0, 9.0]);
        assert_eq!(accumulate(&samples, 0.0).unwrap(), [1.0, 2.0]);
        assert_eq!(accumulate(&samples, 50.0).unwrap(), [2.0, 4.0]);
        assert_eq!(accumulate(&samples[..1], 99.9).unwrap(), samples[0]);
    }

    #[test]
    fn b_055_one_outlier_in_101_is_ignored_at_99() {
        let mut samples: Vec<Vec<f32>> = vec![vec![1.0]; 100];
        samples.push(vec![1000.0]);
        assert_eq!(accumulate(&samples, 99.0).unwrap(), [1.0]);
        assert!(accumulate(&samples, 99.9).unwrap()[0] > 1.0);
    }

    #[test]
    fn b_055_interpolates_linearly_in_f64() {
        let samples = vec![vec![0.0], vec![1.0], vec![2.0], vec![3.0]];
        assert_eq!(accumulate(&samples, 90.0).unwrap(), [2.7]);
        assert_eq!(percentile(&[1.0, 2.0], 25.0).unwrap(), 1.25);
    }

    #[test]
    fn nan_and_infinity_stay_visible() {
        let samples = vec![vec![1.0, 1.0], vec![f32::NAN, f32::INFINITY]];
        let reduced = accumulate(&samples, 10.0).unwrap();
        assert!(reduced[0].is_nan());
        assert_eq!(reduced[1], f32::INFINITY);
        let negative_nan = vec![vec![-f32::NAN], vec![1.0]];
        assert!(accumulate(&negative_nan, 50.0).unwrap()[0].is_nan());
    }

    #[test]
    fn b_056_refusals_have_codes() {
        let one = vec![vec![1.0f32]];
        for p in [-0.1, 100.5, f64::NAN, f64::INFINITY] {
            assert_eq!(accumulate(&one, p).unwrap_err().code(), "percentile_range");
        }
        assert_eq!(accumulate(&[], 50.0).unwrap_err().code(), "no_samples");
        let ragged = vec![vec![1.0], vec![1.0, 2.0]];
        assert_eq!(
            accumulate(&ragged, 50.0).unwrap_err(),
            StatsError::Ragged {
                sample: 1,
                expected: 1,
                found: 2
            }
        );
        assert_eq!(percentile(&[], 50.0).unwrap_err().code(), "no_samples");
    }

    #[test]
    fn median_of_an_even_count_is_the_middle_of_two() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[4.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(&[]), None);
        assert!(median(&[1.0, f64::NAN]).unwrap().is_nan());
    }
}
