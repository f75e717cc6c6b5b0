//! Calibration statistics: what is measured at a point, and how many measurements become one number.
//!
//! Two levels, never mixed: inside a sample the maximum over all calls is kept, one vector a sample; across
//! samples that matrix is reduced once, by a percentile. A running maximum over samples would make one odd
//! sample set every scale, and could not be told from a careful calibration afterwards.
//!
//! Owns: the three kinds of capture, the inputs and arguments of a run, the calibration cache, the percentile rule, dispersion, scale ceilings, scales, channel balance, alignment of samples, row
//! observations, the calibration note, stratified picking. Does not own: running a model, choosing which
//! statistic is wanted ([`crate::schemes`]), or what a form does with a scale.

mod balance;
pub mod cache;
mod capture;
mod ceilings;
mod collect;
mod dispersion;
mod error;
pub mod number;
mod observe;
mod percentile;
pub mod run;
mod scale;
mod statistic;
mod stratified;
mod table;

pub use balance::{balance, Balance, Balanced, RoundTo};
pub use capture::{CallContent, Capture, Content};
pub use ceilings::{scale_ceiling, Ceiling, Offender, CEILING_RATIO};
pub use collect::{Calibration, CalibrationNote, Collector, Method, Statistics, Wants};
pub use dispersion::Dispersion;
pub use error::StatsError;
pub use observe::Observation;
pub use percentile::{accumulate, check_percentile, median, percentile, DEFAULT_PERCENTILE};
pub use run::{CalibrationArgs, Inputs};
pub use scale::fp8_scale;
pub use statistic::{amax, channel_amax, Moment, Statistic};
pub use stratified::{stratified, FrameTable};
pub use table::{AmaxTable, Merge, SampleTable};
