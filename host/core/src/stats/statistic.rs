//! Which statistics can be measured, and the measuring of one tensor.

use serde::Serialize;

use super::StatsError;

/// An executable pair of statistic and granularity. Whatever is not here is refused before any work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// Nothing.
    None,
    /// Largest absolute value of the tensor.
    AmaxTensor,
    /// Largest absolute value of each channel (last dim).
    AmaxChannel,
    /// Mean square of each channel.
    SecondMomentChannel,
}

impl Statistic {
    /// Every pair, by name.
    pub const TABLE: [(&'static str, &'static str, Statistic); 4] = [
        ("none", "tensor", Statistic::None),
        ("amax", "tensor", Statistic::AmaxTensor),
        ("amax", "channel", Statistic::AmaxChannel),
        ("second_moment", "channel", Statistic::SecondMomentChannel),
    ];

    /// The pair of that name, `None` when nothing here can measure it.
    pub fn parse(statistic: &str, granularity: &str) -> Option<Self> {
        Self::TABLE
            .iter()
            .find(|(s, g, _)| *s == statistic && *g == granularity)
            .map(|(_, _, pair)| *pair)
    }

    /// Statistic and granularity.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::None => ("none", "tensor"),
            Self::AmaxTensor => ("amax", "tensor"),
            Self::AmaxChannel => ("amax", "channel"),
            Self::SecondMomentChannel => ("second_moment", "channel"),
        }
    }
}

/// Largest absolute value; NaN when there is one; 0 for nothing.
pub fn amax(data: &[f32]) -> f32 {
    let (mut max, mut nan) = (0f32, false);
    for x in data {
        let a = x.abs();
        nan |= a.is_nan();
        if a > max {
            max = a;
        }
    }
    if nan {
        f32::NAN
    } else {
        max
    }
}

/// Largest absolute value of each of `width` channels over all rows.
///
/// # Errors
/// A length that is not a whole number of rows.
pub fn channel_amax(data: &[f32], width: usize) -> Result<Vec<f32>, StatsError> {
    whole_rows(data, width)?;
    let mut max = vec![0f32; width];
    for row in data.chunks_exact(width.max(1)) {
        for (m, x) in max.iter_mut().zip(row) {
            *m = larger(*m, x.abs());
        }
    }
    Ok(max)
}

/// Larger of two; NaN wins.
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        f32::NAN
    } else {
        a.max(b)
    }
}

/// Sums of squares of each channel and how many rows they cover; samples and calls pool by adding.
#[derive(Clone, Debug, PartialEq)]
pub struct Moment {
    /// Sum of squares of each channel.
    pub sum_squares: Vec<f64>,
    /// Rows (tokens).
    pub rows: u64,
}

impl Moment {
    /// Of one tensor.
    ///
    /// # Errors
    /// A length that is not a whole number of rows.
    pub fn of(data: &[f32], width: usize) -> Result<Self, StatsError> {
        whole_rows(data, width)?;
        let mut sum_squares = vec![0f64; width];
        for row in data.chunks_exact(width.max(1)) {
            for (sum, x) in sum_squares.iter_mut().zip(row) {
                *sum += f64::from(*x) * f64::from(*x);
            }
        }
        let rows = data.len().checked_div(width).unwrap_or(0) as u64;
        Ok(Self { sum_squares, rows })
    }

    /// Mean square of each channel; zeros when there is no row.
    pub fn mean(&self) -> Vec<f64> {
        let rows = self.rows.max(1) as f64;
        self.sum_squares.iter().map(|sum| sum / rows).collect()
    }
}

fn whole_rows(data: &[f32], width: usize) -> Result<(), StatsError> {
    if width > 0 && data.len().is_multiple_of(width) {
        return Ok(());
    }
    Err(StatsError::Shape {
        what: "tensor".into(),
        expected: format!("a whole number of rows of {width}"),
        found: format!("{} values", data.len()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_101_four_pairs_and_no_other() {
        for (s, g, pair) in Statistic::TABLE {
            assert_eq!(Statistic::parse(s, g), Some(pair));
            assert_eq!(pair.names(), (s, g));
        }
        for (s, g) in [
            ("amax", "block16"),
            ("histogram", "tensor"),
            ("second_moment", "tensor"),
        ] {
            assert_eq!(Statistic::parse(s, g), None);
        }
    }

    #[test]
    fn tensors_are_measured_with_nan_kept() {
        let x = [1.0, -5.0, 2.0, 3.0, 0.5, -7.0];
        assert_eq!(amax(&x), 7.0);
        assert_eq!(channel_amax(&x, 3).unwrap(), [3.0, 5.0, 7.0]);
        let moment = Moment::of(&x, 3).unwrap();
        assert_eq!(moment.mean(), [5.0, 12.625, 26.5]);
        assert!(amax(&[1.0, f32::NAN, 9.0]).is_nan());
        assert!(channel_amax(&[1.0, f32::NAN, 2.0, 9.0], 2).unwrap()[1].is_nan());
        assert_eq!(amax(&[]), 0.0);
        assert!(channel_amax(&x, 4).is_err() && Moment::of(&x, 0).is_err());
    }
}
