//! Module trees, dataflow graphs, their candle execution and state regions.
//!
//! Owns: the vocabulary of operations, the host-independent description of a model, and the unmodified host path
//! (`Session`). Does not own: which model families exist (`structures-models`), what a structure is
//! (`structures-catalog`), who replaces a span of the graph (`structures`).

// A failed unwrap is a failed test.
#![cfg_attr(test, allow(clippy::unwrap_used))]
#![forbid(unsafe_code)]

pub mod captured;
pub mod check;
mod crew;
mod dump;
pub mod error;
pub mod graph;
mod infer;
pub mod kernels;
mod kinds;
pub mod ops;
mod params;
pub mod place;
mod plan;
pub mod regular;
pub mod session;
mod state;
mod tail;
pub mod tree;

pub use captured::{Capture, Greedy, StaticPlan};
pub use check::check;
pub use crew::{Alone, Crew};
pub use error::GraphError;
pub use graph::{
    Dim, Graph, GraphBuilder, Layout, Op, OpId, Origin, ParamRef, RegionKind, StateRegion, Value,
    ValueId,
};
pub use kernels::{eval, eval_rounded, ActKind};
pub use kinds::word as activation_word;
pub use ops::{AttrValue, Attrs, OpKind};
pub use place::{Away, AwayOutcome, Held, Place, Quarters, Recorded, Recorder, Unserved};
pub use session::{
    Frozen, Install, Observer, Originals, ParamSource, Plan, Rows, Session, SpanOutcome,
    SpanRunner, State, Stored,
};
pub use tree::{Module, ModuleKind, ModuleTree};
