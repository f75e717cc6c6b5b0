//! Granite: a Llama with factors on embedding, attention scores, residual branches and logits.

use super::{Decoders, Family};
use crate::config::{Dialect, Rule};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "granite",
    dialects: &[Dialect {
        gguf_architecture: Some("granite"),
        qkv_bias: Rule::Field("attention_bias"),
        o_bias: Rule::Field("attention_bias"),
        mlp_bias: Rule::Field("mlp_bias"),
        gguf_permuted_qk: true,
        reads: &[
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ],
        facts: |facts, c| {
            let number = |field, key| facts.number(field, key, Some(1.0));
            let one = |n: Option<f64>| n.unwrap_or(1.0);
            c.embedding_scale = one(number("embedding_multiplier", "embedding_scale")?);
            c.residual_scale = one(number("residual_multiplier", "residual_scale")?);
            c.logits_divisor = one(number("logits_scaling", "logit_scale")?);
            // Absent is a factor of one here, not the root of the head's width.
            c.attention_scale = number("attention_multiplier", "attention.scale")?;
            Ok(())
        },
        ..Dialect::plain("granite", "Granite")
    }],
};
