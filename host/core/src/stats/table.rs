//! One row of measurements a sample, aligned by point.
//!
//! The first sample fixes the sorted list of points. A later sample that misses one of them would shift every
//! scale without a trace, so it is refused; a point that only later samples reach is left out and recorded.

use std::collections::{BTreeMap, BTreeSet};

use super::statistic::larger;
use super::{Moment, StatsError};

/// How two calls of one sample become one value.
pub trait Merge: Clone {
    /// Takes `other` in; `point` is for messages.
    ///
    /// # Errors
    /// When the two do not fit together.
    fn merge(&mut self, other: Self, point: &str) -> Result<(), StatsError>;

    /// Number of channels, 1 for a scalar.
    fn width(&self) -> usize {
        1
    }
}

impl Merge for f32 {
    fn merge(&mut self, other: Self, _: &str) -> Result<(), StatsError> {
        *self = larger(*self, other);
        Ok(())
    }
}

impl Merge for Vec<f32> {
    fn merge(&mut self, other: Self, point: &str) -> Result<(), StatsError> {
        same_width(self.len(), other.len(), point)?;
        for (a, b) in self.iter_mut().zip(other) {
            *a = larger(*a, b);
        }
        Ok(())
    }

    fn width(&self) -> usize {
        self.len()
    }
}

impl Merge for Moment {
    fn merge(&mut self, other: Self, point: &str) -> Result<(), StatsError> {
        same_width(self.sum_squares.len(), other.sum_squares.len(), point)?;
        for (a, b) in self.sum_squares.iter_mut().zip(other.sum_squares) {
            *a += b;
        }
        self.rows += other.rows;
        Ok(())
    }

    fn width(&self) -> usize {
        self.sum_squares.len()
    }
}

fn same_width(expected: usize, found: usize, point: &str) -> Result<(), StatsError> {
    if expected == found {
        Ok(())
    } else {
        Err(StatsError::Width {
            point: point.into(),
            expected,
            found,
        })
    }
}

/// Measurements of several samples.
#[derive(Clone, Debug)]
pub struct SampleTable<T> {
    points: Vec<String>,
    rows: Vec<Vec<T>>,
    open: BTreeMap<String, T>,
    late: BTreeSet<String>,
}

/// Largest absolute value of each point.
pub type AmaxTable = SampleTable<f32>;

impl<T> Default for SampleTable<T> {
    fn default() -> Self {
        Self {
            points: Vec::new(),
            rows: Vec::new(),
            open: BTreeMap::new(),
            late: BTreeSet::new(),
        }
    }
}

impl<T: Merge> SampleTable<T> {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// One call's value at a point, inside the current sample.
    ///
    /// # Errors
    /// A channel count that differs from earlier calls of this sample.
    pub fn observe(&mut self, point: &str, value: T) -> Result<(), StatsError> {
        match self.open.get_mut(point) {
            Some(held) => held.merge(value, point),
            None => {
                self.open.insert(point.to_string(), value);
                Ok(())
            }
        }
    }

    /// Whether the current sample may be closed. Changes nothing, so that several tables close together or not at all.
    ///
    /// # Errors
    /// A point of the first sample that this one did not reach, or whose channel count moved.
    pub fn check_sample(&self) -> Result<(), StatsError> {
        let Some(first) = self.rows.first() else {
            return Ok(());
        };
        let absent = |point: &&String| !self.open.contains_key(*point);
        let mut missing: Vec<String> = self.points.iter().filter(absent).cloned().collect();
        if !missing.is_empty() {
            let missing_count = missing.len();
            missing.truncate(3);
            return Err(StatsError::Misaligned {
                sample: self.rows.len(),
                expected: self.points.len(),
                found: self.points.len() - missing_count,
                missing_count,
                missing,
            });
        }
        for (point, first) in self.points.iter().zip(first) {
            same_width(first.width(), self.open[point].width(), point)?;
        }
        Ok(())
    }

    /// Closes the current sample. On an error nothing of that sample is kept.
    ///
    /// # Errors
    /// As [`Self::check_sample`].
    pub fn end_sample(&mut self) -> Result<(), StatsError> {
        let checked = self.check_sample();
        let mut open = std::mem::take(&mut self.open);
        checked?;
        if self.rows.is_empty() {
            let (points, row) = open.into_iter().unzip();
            self.points = points;
            self.rows.push(row);
            return Ok(());
        }
        let row = self.points.iter().filter_map(|p| open.remove(p)).collect();
        self.late.extend(open.into_keys());
        self.rows.push(row);
        Ok(())
    }

    /// Drops what the current sample has measured so far (it failed).
    pub fn abort_sample(&mut self) {
        self.open.clear();
    }

    /// The sorted points that the first sample fixed.
    pub fn points(&self) -> &[String] {
        &self.points
    }

    /// One row a sample, in the order of [`Self::points`].
    pub fn rows(&self) -> &[Vec<T>] {
        &self.rows
    }

    /// Points that only later samples reached.
    pub fn late(&self) -> &BTreeSet<String> {
        &self.late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(table: &mut AmaxTable, points: &[(&str, f32)]) -> Result<(), StatsError> {
        for (point, value) in points {
            table.observe(point, *value)?;
        }
        table.end_sample()
    }

    #[test]
    fn b_054_calls_of_a_sample_are_maxed_and_samples_are_kept_apart() {
        let mut table = AmaxTable::new();
        sample(
            &mut table,
            &[("b|x", 1.0), ("a|x", 2.0), ("b|x", 5.0), ("b|x", 3.0)],
        )
        .unwrap();
        sample(&mut table, &[("a|x", 9.0), ("b|x", 0.5)]).unwrap();
        assert_eq!(table.points(), ["a|x", "b|x"]);
        assert_eq!(table.rows(), [vec![2.0, 5.0], vec![9.0, 0.5]]);
    }

    #[test]
    fn b_057_a_sample_that_misses_points_is_refused_with_three_names() {
        let mut table = AmaxTable::new();
        let all = [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 1.0), ("e", 1.0)];
        sample(&mut table, &all).unwrap();
        let error = sample(&mut table, &all[..1]).unwrap_err();
        assert_eq!(
            error,
            StatsError::Misaligned {
                sample: 1,
                expected: 5,
                found: 1,
                missing_count: 4,
                missing: vec!["b".into(), "c".into(), "d".into()],
            }
        );
        sample(&mut table, &all).unwrap();
        assert_eq!(table.rows().len(), 2);
    }

    #[test]
    fn b_057_later_points_are_recorded_and_left_out() {
        let mut table = AmaxTable::new();
        sample(&mut table, &[("a", 1.0)]).unwrap();
        sample(&mut table, &[("a", 1.0), ("z", 7.0)]).unwrap();
        assert_eq!(table.points(), ["a"]);
        assert_eq!(table.late().iter().collect::<Vec<_>>(), ["z"]);
    }

    #[test]
    fn nan_is_never_lost_in_a_maximum() {
        let mut table = AmaxTable::new();
        sample(&mut table, &[("a", f32::NAN), ("a", 1.0)]).unwrap();
        assert!(table.rows()[0][0].is_nan());
    }

    #[test]
    fn an_aborted_sample_leaves_nothing() {
        let mut table = AmaxTable::new();
        table.observe("a", 9.0).unwrap();
        table.abort_sample();
        sample(&mut table, &[("a", 1.0)]).unwrap();
        assert_eq!(table.rows(), [vec![1.0]]);
    }

    #[test]
    fn b_062_channels_and_moments_merge_by_their_own_rule() {
        let mut channels: SampleTable<Vec<f32>> = SampleTable::new();
        channels.observe("a", vec![1.0, 4.0]).unwrap();
        channels.observe("a", vec![2.0, 3.0]).unwrap();
        assert_eq!(
            channels.observe("a", vec![1.0]).unwrap_err().code(),
            "samples_misaligned"
        );
        channels.end_sample().unwrap();
        assert_eq!(channels.rows()[0][0], [2.0, 4.0]);
        channels.observe("a", vec![1.0]).unwrap();
        assert!(matches!(
            channels.end_sample(),
            Err(StatsError::Width { .. })
        ));

        let mut moments: SampleTable<Moment> = SampleTable::new();
        moments
            .observe(
                "a",
                Moment {
                    sum_squares: vec![4.0],
                    rows: 1,
                },
            )
            .unwrap();
        moments
            .observe(
                "a",
                Moment {
                    sum_squares: vec![8.0],
                    rows: 3,
                },
            )
            .unwrap();
        moments.end_sample().unwrap();
        assert_eq!(moments.rows()[0][0].mean(), [3.0]);
    }
}
