//! The list of model families. Adding one is a builder file here and its binding file; the build lists both.

use std::sync::Arc;

use structures_graph::{Graph, ModuleTree};

use crate::checkpoint::{Checkpoint, Metadata};
use crate::config::{DecoderConfig, Dialect};
use crate::multimodal::Sight;
use crate::params::ParamMap;
use crate::{decoder, ModelError};

// A module for every other file of this directory, and `FAMILIES`: what each calls `FAMILY`, in order of file names.
include!(concat!(env!("OUT_DIR"), "/families.rs"));

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

/// A family that is nothing but its dialects.
pub struct Decoders {
    /// Its name.
    pub name: &'static str,
    /// What it builds, the first one for a kind.
    pub dialects: &'static [Dialect],
}

impl Family for Decoders {
    fn name(&self) -> &'static str {
        self.name
    }

    fn model_types(&self) -> Vec<&'static str> {
        self.dialects.iter().map(|d| d.model_type).collect()
    }

    fn gguf_architectures(&self) -> Vec<&'static str> {
        let named = self.dialects.iter().filter_map(|d| d.gguf_architecture);
        named.collect()
    }

    fn build(&self, checkpoint: &Checkpoint, kind: &str) -> Result<Blueprint, ModelError> {
        let gguf = matches!(checkpoint.metadata(), Metadata::Gguf(_));
        let wanted = self.dialects.iter().find(|d| match gguf {
            true => d.gguf_architecture == Some(kind),
            false => d.model_type == kind,
        });
        match wanted {
            Some(dialect) => decoder::build(checkpoint, dialect),
            None => Err(ModelError::unsupported(
                &checkpoint.metadata_path(),
                "model_type",
                format!("one of {}", self.model_types().join(", ")),
                kind,
                "another family builds it",
            )),
        }
    }
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
    /// What it has beside that when it sees.
    pub pictures: Option<Pictures>,
}

/// The other phases of a model that sees.
#[derive(Clone, Debug)]
pub struct Pictures {
    /// What its configuration says.
    pub sight: Sight,
    /// Encodes one frame.
    pub encoder: Arc<Graph>,
    /// Runs a prompt with what was seen; the same regions as the main graph.
    pub prefill: Arc<Graph>,
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
        let found = match checkpoint.metadata() {
            Metadata::Config(map) => map.get(item).map(|v| v.to_string()),
            Metadata::Gguf(meta) => meta.get(item).map(|v| v.brief()),
        };
        let found = found.unwrap_or_else(|| "nothing".into());
        return Err(ModelError::malformed(&path, item, expected, found, help));
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
