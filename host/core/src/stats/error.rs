//! What calibration refuses, each with its stable code.

use thiserror::Error;

/// Why statistics could not be collected or reduced.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum StatsError {
    /// Nothing to reduce.
    #[error("no calibration sample: expected at least one, found none; give samples or use the built-in text")]
    NoSamples,
    /// Percentile outside the range, or not a number.
    #[error("percentile {found} is outside [0, 100]; the default is 99.9")]
    PercentileRange {
        /// What was given.
        found: f64,
    },
    /// Per-sample vectors of different lengths.
    #[error(
        "sample {sample} has {found} values, the first sample has {expected}; all must be equal"
    )]
    Ragged {
        /// Index of the sample.
        sample: usize,
        /// Length of the first.
        expected: usize,
        /// Its length.
        found: usize,
    },
    /// A sample did not reach every point that the first one reached.
    #[error(
        "sample {sample} reached {found} of the {expected} points of the first sample; {missing_count} missing: {}{}",
        missing.join(", "),
        if *missing_count > missing.len() { ", ..." } else { "" }
    )]
    Misaligned {
        /// Index of the sample.
        sample: usize,
        /// Points of the first sample.
        expected: usize,
        /// How many of them it reached.
        found: usize,
        /// How many it missed.
        missing_count: usize,
        /// The first three of them, sorted.
        missing: Vec<String>,
    },
    /// A point whose channel count moved.
    #[error("point {point}: {found} channels, earlier calls had {expected}")]
    Width {
        /// The point.
        point: String,
        /// Channels first seen.
        expected: usize,
        /// Channels now.
        found: usize,
    },
    /// A tensor whose data and shape disagree, or an argument of the wrong length.
    #[error("{what}: expected {expected}, found {found}")]
    Shape {
        /// Which tensor or argument.
        what: String,
        /// Expected.
        expected: String,
        /// Found.
        found: String,
    },
    /// A sample's own code failed; nothing it measured is kept and nothing is bound.
    #[error("sample {sample} failed while it was measured: {cause}; nothing was calibrated")]
    Pass {
        /// Index of the sample.
        sample: usize,
        /// What it failed with.
        cause: String,
    },
    /// Several samples at the door for one.
    #[error("{found} samples at the single-sample door, expected 1; use stats::run for several")]
    SingleSample {
        /// How many were asked for.
        found: usize,
    },
    /// Stratified picking of fewer than one frame.
    #[error("cannot pick {found} frames: at least 1")]
    PickCount {
        /// What was asked for.
        found: i64,
    },
    /// Columns the frame table lacks.
    #[error("the frame table lacks the column(s) {}; it has {}", missing.join(", "), present.join(", "))]
    MissingColumns {
        /// Missing.
        missing: Vec<String>,
        /// Present.
        present: Vec<String>,
    },
    /// A filter that leaves no row.
    #[error("no row of the frame table has task {task}")]
    EmptyFilter {
        /// The task.
        task: i64,
    },
}

impl StatsError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoSamples | Self::PickCount { .. } | Self::EmptyFilter { .. } => "no_samples",
            Self::PercentileRange { .. } => "percentile_range",
            Self::Ragged { .. } | Self::Misaligned { .. } | Self::Width { .. } => {
                "samples_misaligned"
            }
            Self::Pass { .. } => "hook_pass_failed",
            Self::SingleSample { .. } => "samples_unsupported",
            Self::Shape { .. } | Self::MissingColumns { .. } => "dims_inconsistent",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misaligned_sample_is_told_with_counts_and_names() {
        let error = StatsError::Misaligned {
            sample: 2,
            expected: 9,
            found: 4,
            missing_count: 5,
            missing: vec!["a".into(), "b".into(), "c".into()],
        };
        assert_eq!(error.code(), "samples_misaligned");
        let text = error.to_string();
        for fact in ["sample 2", "4 of the 9", "5 missing", "a, b, c, ..."] {
            assert!(text.contains(fact), "{text}");
        }
    }
}
