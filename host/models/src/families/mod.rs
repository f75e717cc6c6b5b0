//! The list of model families. Adding one is a builder file, a line here, and its binding file.

use std::sync::Arc;

use structures_graph::{Graph, ModuleTree};

use crate::checkpoint::{Checkpoint, Metadata};
use crate::config::DecoderConfig;
use crate::params::ParamMap;
use crate::ModelError;

mod llama;
mod qwen;

/// Every family this version can build, searched in order.
pub const FAMILIES: &[&dyn Family] = &[&llama::Llama, &qwen::Qwen];

/// One builder.
pub trait Family: Sync {
    /// Its name, also that of its binding file.
    fn name(&self) -> &'static str;
    /// `model_type` values it builds.
    fn model_types(&self) -> Vec<&'static str>;
    /// GGUF architectures it builds.
    fn gguf_architectures(&self) -> Vec<&'static str>;
    /// Describes the model `kind` (one of the above) in a checkpoint.
    fn build(&self, checkpoint: &Checkpoint, kind: &str) -> Result<Blueprint, ModelError>;
}

/// A model described, nothing loaded.
#[derive(Clone, Debug)]
pub struct Blueprint {
    /// Its configuration.
    pub config: DecoderConfig,
    /// Its modules.
    pub tree: ModuleTree,
    /// Its dataflow, for prefill and decode alike.
    pub graph: Arc<Graph>,
    /// Where its parameters are stored.
    pub params: Arc<ParamMap>,
}

/// Picks the family of a checkpoint and lets it build.
pub fn describe(checkpoint: &Checkpoint) -> Result<(&'static dyn Family, Blueprint), ModelError> {
    let path = checkpoint.metadata_path();
    let (item, kind, supported) = match checkpoint.metadata() {
        Metadata::Config(map) => {
            // Diffusion models name their class instead.
            let field = match map.contains_key("model_type") {
                true => "model_type",
                false => "_class_name",
            };
            let kind = map.get(field).and_then(|v| v.as_str());
            let all = FAMILIES
                .iter()
                .flat_map(|f| f.model_types())
                .collect::<Vec<_>>();
            (field, kind, all)
        }
        Metadata::Gguf(meta) => {
            let field = "general.architecture";
            let all = FAMILIES
                .iter()
                .flat_map(|f| f.gguf_architectures())
                .collect::<Vec<_>>();
            (field, meta.text(field), all)
        }
    };
    let expected = format!("one of {}", supported.join(", "));
    let help =
        "this version cannot run the model: `structures discover --tree` reads a dump of any other";
    let Some(kind) = kind else {
        return Err(ModelError::malformed(
            &path, item, expected, "nothing", help,
        ));
    };
    for family in FAMILIES {
        let kinds = match checkpoint.metadata() {
            Metadata::Config(_) => family.model_types(),
            Metadata::Gguf(_) => family.gguf_architectures(),
        };
        if kinds.contains(&kind) {
            return Ok((*family, family.build(checkpoint, kind)?));
        }
    }
    Err(ModelError::unsupported(&path, item, expected, kind, help))
}
