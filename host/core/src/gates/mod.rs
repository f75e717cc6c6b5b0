//! Gates: what a treated output is worth, and whether it is a net win.
//!
//! Metrics are measured against the host's own output in f64. A *band* says how good a result looks and
//! refuses nothing; a *floor* is imposed by the caller and refuses; a non-finite value where the host has none
//! refuses before either; and a form that is not faster than the host refuses itself. Each refusal is a value
//! with a code and a reason.
//!
//! Owns: metrics, bands, floors, bind parity, paired timing, adjudication between forms. Does not own: running the arms, the ledger, or
//! what happens to a refused unit.

pub mod adjudicate;
mod bands;
mod error;
mod floors;
mod metrics;
mod parity;
mod timing;

pub use bands::{band, Band, BandNote};
pub use error::{GateError, GateRefusal};
pub use floors::{Floors, Sense, Shortfall};
pub use metrics::{cosine, measure, worse, Judgement, Meter, Metrics, NonFinite, OutputKind};
pub use parity::{bind_parity, Parity, SLOPE_TOLERANCE};
pub use timing::{
    paired, paired_with, Clock, Paired, Schedule, WallClock, DEFAULT_ITERS, DEFAULT_MIN_SPEEDUP,
    DEFAULT_ROUNDS,
};
