//! Qwen2 (biased q, k, v) and Qwen3 (normed q and k, no biases unless the config says so). Their upper layers may have
//! a window.

use super::{Decoders, Family};
use crate::config::{Dialect, QkNorm, Rule, Windows};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "qwen",
    dialects: &[
        Dialect {
            gguf_architecture: Some("qwen2"),
            qkv_bias: Rule::Yes,
            windows: Windows::Flagged,
            ..Dialect::plain("qwen2", "Qwen2")
        },
        Dialect {
            gguf_architecture: Some("qwen3"),
            qkv_bias: Rule::Field("attention_bias"),
            o_bias: Rule::Field("attention_bias"),
            qk_norm: QkNorm::Head,
            windows: Windows::Flagged,
            ..Dialect::plain("qwen3", "Qwen3")
        },
    ],
};
