//! Models: from a path to something that runs.
//!
//! Owns: checkpoints (Hugging Face directories, GGUF files), configurations, the builders of model families (module
//! tree and graph), tokenizers, greedy generation on the host path. Does not own: how a graph is
//! executed (`structures-graph`), what a structure is (`structures-catalog`), who replaces a part of the model
//! (`structures`).
//!
//! A new decoder family is one file in `families/` and `bindings/<family>.yaml`.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod error;
pub mod families;
pub mod generate;
pub mod later;
pub mod model;
pub mod multimodal;
mod packed;
pub mod params;
pub mod tokenizer;

pub use checkpoint::{Checkpoint, Metadata, PackedWeight, TensorInfo};
pub use config::DecoderConfig;
pub use error::ModelError;
pub use families::{Family, FAMILIES};
pub use generate::{generate, Generated, Stop};
pub use model::{Description, Model};
pub use params::NAMING;
pub use tokenizer::{Message, TextStream, Tokenizer};
