//! Qwen2 (biased q, k, v) and Qwen3 (normed q and k, no biases unless the config says so).

use super::{Blueprint, Family};
use crate::checkpoint::Checkpoint;
use crate::config::{Dialect, Rule};
use crate::decoder;
use crate::ModelError;

const DIALECTS: &[Dialect] = &[
    Dialect {
        model_type: "qwen2",
        gguf_architecture: Some("qwen2"),
        class: "Qwen2",
        qkv_bias: Rule::Yes,
        o_bias: Rule::No,
        mlp_bias: Rule::No,
        qk_norm: false,
        gguf_permuted_qk: false,
    },
    Dialect {
        model_type: "qwen3",
        gguf_architecture: Some("qwen3"),
        class: "Qwen3",
        qkv_bias: Rule::Field("attention_bias"),
        o_bias: Rule::Field("attention_bias"),
        mlp_bias: Rule::No,
        qk_norm: true,
        gguf_permuted_qk: false,
    },
];

/// The family.
pub(super) struct Qwen;

impl Family for Qwen {
    fn name(&self) -> &'static str {
        "qwen"
    }

    fn model_types(&self) -> Vec<&'static str> {
        DIALECTS.iter().map(|d| d.model_type).collect()
    }

    fn gguf_architectures(&self) -> Vec<&'static str> {
        DIALECTS
            .iter()
            .filter_map(|d| d.gguf_architecture)
            .collect()
    }

    fn build(&self, checkpoint: &Checkpoint, kind: &str) -> Result<Blueprint, ModelError> {
        // `kind` is one of the two lists above, which hold the same words in the same order.
        let wanted = DIALECTS
            .iter()
            .find(|d| d.model_type == kind || d.gguf_architecture == Some(kind));
        decoder::build(checkpoint, wanted.unwrap_or(&DIALECTS[0]))
    }
}
