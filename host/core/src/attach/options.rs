//! What a caller may choose, and what holds when nothing is chosen.
//!
//! Owns the choices only. Whether they fit a model, its output and the host's plugins is checked where they are first used
//! (`prepare.rs`).

use crate::adopt::Wish;
use crate::choose::Pin;
use crate::gates::{Floors, Schedule, DEFAULT_MIN_SPEEDUP};
use crate::seat::OnGuardFail;
use crate::stats;
use crate::workload::Workload;

/// What a caller may choose.
#[derive(Clone, Debug)]
pub struct Options {
    /// Profile name, or `auto`.
    pub scheme: String,
    /// Phase; by the output's kind when absent.
    pub workload: Option<Workload>,
    /// Percentile across samples.
    pub percentile: f64,
    /// Only these structures; all when empty.
    pub structures: Vec<String>,
    /// Floors.
    pub floors: Floors,
    /// Smallest speed-up of a unit.
    pub min_speedup: f64,
    /// Rounds and iterations of paired timing.
    pub schedule: Schedule,
    /// What a contract miss does.
    pub on_guard_fail: OnGuardFail,
    /// Pinned forms.
    pub pins: Vec<Pin>,
    /// Score every position.
    pub all_positions: bool,
    /// Packed weights to take over before anything else.
    pub adopt: Option<Wish>,
    /// Let go of the host's own weights of the seats that stay.
    pub release_host: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            scheme: "auto".into(),
            workload: None,
            percentile: stats::DEFAULT_PERCENTILE,
            structures: Vec::new(),
            floors: Floors::default(),
            min_speedup: DEFAULT_MIN_SPEEDUP,
            schedule: Schedule::default(),
            on_guard_fail: OnGuardFail::Fallback,
            pins: Vec::new(),
            all_positions: false,
            adopt: None,
            release_host: false,
        }
    }
}
