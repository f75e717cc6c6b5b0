//! Invalid requests (errors) and refusals (values).

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A request that makes no sense, as opposed to a result that is not good enough.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum GateError {
    /// Two outputs of different shapes.
    #[error("output shapes differ: the host gave {expected:?}, the treated arm {found:?}")]
    ShapeMismatch {
        /// The host's.
        expected: Vec<usize>,
        /// The treated arm's.
        found: Vec<usize>,
    },
    /// Data that contradicts its own shape, or nothing to compare.
    #[error("cannot judge an output of shape {shape:?} with {values} values")]
    Empty {
        /// Shape.
        shape: Vec<usize>,
        /// Values given.
        values: usize,
    },
    /// A metric that has no bound.
    #[error("unknown metric {name:?} in a floor; bounds exist for {}", known.join(", "))]
    UnknownMetric {
        /// What was given.
        name: String,
        /// What exists.
        known: Vec<&'static str>,
    },
    /// A bound on a metric this output does not have.
    #[error("a floor on {name:?}, but this output is measured by {}", measured.join(", "))]
    Unmeasured {
        /// What was given.
        name: String,
        /// What was measured.
        measured: Vec<String>,
    },
    /// A bound that is not a number, or text that is not `metric=value`.
    #[error("floor {text:?}: expected metric=number")]
    BadFloor {
        /// What was given.
        text: String,
    },
    /// Two bounds on one metric.
    #[error("a floor on {name:?} twice; expected one bound a metric")]
    RepeatedFloor {
        /// The metric.
        name: String,
    },
    /// An output kind that does not exist.
    #[error("unknown output kind {found:?}; expected values or distribution")]
    UnknownKind {
        /// What was given.
        found: String,
    },
    /// Timing without rounds or iterations.
    #[error("timing needs at least 1 round and 1 iteration, found {rounds} and {iters}")]
    Schedule {
        /// Rounds.
        rounds: u32,
        /// Iterations.
        iters: u32,
    },
}

impl GateError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::ShapeMismatch { .. } | Self::Empty { .. } => "dims_inconsistent",
            Self::UnknownMetric { .. } => "unknown_metric",
            Self::Unmeasured { .. } => "unmeasured_metric",
            Self::BadFloor { .. } | Self::RepeatedFloor { .. } => "floor_invalid",
            Self::UnknownKind { .. } => "output_kind_unknown",
            Self::Schedule { .. } => "timing_invalid",
        }
    }
}

/// The answer is no: code and reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateRefusal {
    /// Stable code.
    pub code: String,
    /// For people, with the numbers.
    pub reason: String,
}

impl GateRefusal {
    /// A refusal.
    pub fn new(code: &str, reason: String) -> Self {
        Self {
            code: code.to_string(),
            reason,
        }
    }
}
