//! What a captured step is made of, as data: for reports, and for whoever replays it elsewhere.

use serde::Serialize;

pub use super::there::PlaceNote;
use super::window::WindowKind;

/// A captured step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Manifest {
    /// Phase of the graph.
    pub phase: String,
    /// Rows of the batch and tokens a replay takes.
    pub batch: usize,
    /// See `batch`.
    pub tokens: usize,
    /// Positions the state has room for.
    pub capacity: usize,
    /// What may be written and read between replays.
    pub windows: Vec<WindowNote>,
    /// State regions, outside the arena.
    pub regions: Vec<RegionNote>,
    /// What runs, in order.
    pub stages: Vec<StageNote>,
    /// The one allocation for values.
    pub arena_bytes: usize,
    /// What the values would take if none shared memory.
    pub planned_bytes: usize,
    /// Whether the next token and position are chosen inside the step.
    pub greedy: bool,
    /// What of it runs at a place, or why nothing does though seats sit there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub there: Option<PlaceNote>,
    /// Stages that allocate at every replay, as `operation at value`.
    pub allocating: Vec<String>,
}

/// One window.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WindowNote {
    /// Name of the input or output.
    pub name: String,
    /// How it is used.
    pub kind: WindowKind,
    /// Element type.
    pub dtype: String,
    /// Sizes.
    pub dims: Vec<usize>,
    /// Bytes.
    pub bytes: usize,
    /// Bytes from the start of the arena; absent for whole numbers, which lie beside it.
    pub address: Option<usize>,
}

/// One state region.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RegionNote {
    /// Its name.
    pub name: String,
    /// Sizes.
    pub dims: Vec<usize>,
    /// Bytes.
    pub bytes: usize,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageNote {
    /// Operation, or `span`.
    pub kind: String,
    /// Value it makes, or name of the span.
    pub at: String,
    /// Whether it works in planned memory alone.
    pub in_place: bool,
}
