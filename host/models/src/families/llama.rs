//! Llama and what is published under its architecture (SmolLM2, TinyLlama, ...).

use super::{Decoders, Family};
use crate::config::{Dialect, Rule};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "llama",
    dialects: &[Dialect {
        gguf_architecture: Some("llama"),
        qkv_bias: Rule::Field("attention_bias"),
        o_bias: Rule::Field("attention_bias"),
        mlp_bias: Rule::Field("mlp_bias"),
        gguf_permuted_qk: true,
        ..Dialect::plain("llama", "Llama")
    }],
};
