//! Llama and what is published under its architecture (SmolLM2, TinyLlama, ...).

use super::{Blueprint, Family};
use crate::checkpoint::Checkpoint;
use crate::config::{Dialect, Rule};
use crate::decoder;
use crate::ModelError;

const DIALECT: Dialect = Dialect {
    model_type: "llama",
    gguf_architecture: Some("llama"),
    class: "Llama",
    qkv_bias: Rule::Field("attention_bias"),
    o_bias: Rule::Field("attention_bias"),
    mlp_bias: Rule::Field("mlp_bias"),
    qk_norm: false,
    gguf_permuted_qk: true,
};

/// The family.
pub(super) struct Llama;

impl Family for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn model_types(&self) -> Vec<&'static str> {
        vec![DIALECT.model_type]
    }

    fn gguf_architectures(&self) -> Vec<&'static str> {
        DIALECT.gguf_architecture.into_iter().collect()
    }

    fn build(&self, checkpoint: &Checkpoint, _kind: &str) -> Result<Blueprint, ModelError> {
        decoder::build(checkpoint, &DIALECT)
    }
}
