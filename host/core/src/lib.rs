//! The host: from a model and a directory of plugins to a receipt.
//!
//! Doors: [`attach::attach`] (gated), [`attach::auto_swaps`] (binds without judging), [`attach::calibrate`],
//! [`replay`] (binds a receipt again), [`probe`].
//!
//! Pure parts, each usable without a model: [`stats`], [`schemes`], [`gates`], [`samples`], [`precision`],
//! [`digest`], [`fsio`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod adopt;
pub mod attach;
pub mod bench;
pub mod bind;
mod bound_seam;
pub mod cadence;
pub mod capture;
pub mod chain;
pub mod choose;
pub mod compose;
pub mod crew;
pub mod decisions;
pub mod decode;
pub mod digest;
pub mod environment;
pub mod error;
pub mod fsio;
pub mod gates;
pub mod host;
pub mod judge;
pub mod kept;
pub mod ledger;
pub mod observe;
pub mod operations;
mod passes;
pub mod perplexity;
mod points;
pub mod precision;
pub mod probe;
pub mod progress;
pub mod qualify;
pub mod receipt;
mod record;
pub mod release;
pub mod replay;
pub mod residency;
pub mod samples;
pub mod sampling;
pub mod schemes;
pub mod seat;
pub mod sites;
pub mod station;
pub mod stats;
pub mod steps;
pub mod stops;
pub mod trial;
pub mod verify;
pub mod wires;
pub mod workload;
pub mod workspace;
mod zeros;

pub use error::Error;
