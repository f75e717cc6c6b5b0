//! Bindings: where a structure's slots and points, or a pipeline's stages, sit on one host family.
//!
//! Owns: the grammar of binding files and every check of it (`docs/bindings.md`), the set of known bindings and what
//! happens when names meet, manifests, and the step from a binding to seams of one model. Does not own: what a
//! structure is (`structures-catalog`), what a model is (asked through [`HostFacts`]), how a seam is placed in a
//! graph (`structures-seams`). A binding never names a kernel, a device or a launch policy.
//!
//! The files are `bindings/*.yaml`; adding one is adding its file, nothing else.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod coverage;
mod error;
mod facts;
mod file;
mod host;
mod library;
pub mod manifest;
mod pipeline;
mod placement;
mod reader;
mod region;
mod rule;
mod size;
mod stage;
mod template;
mod weights;

pub use coverage::{Classification, Coverage, Segment};
pub use error::BindingError;
pub use facts::{Facts, SlotFacts, StageFacts, Structures};
pub use file::{parse, read, BindingFile, Body, FamilyBinding, Origin};
pub use host::{HostEntry, PipelineHost};
pub use library::{files_of, Binding, Bindings, Listed};
pub use pipeline::PipelineBinding;
pub use placement::{HostFacts, Placed, PlacedWeight};
pub use region::{
    BoundaryDtype, Conditioning, MClass, MProfile, PointPlace, RegionBinding, Side, StructureRef,
};
pub use rule::Rule;
pub use size::{Rows, Size, Sizes};
pub use stage::{LoopSteps, Policy, Stage};
pub use template::Template;
pub use weights::{SlotBinding, SlotSource, SourceMap, StoredLayout};
