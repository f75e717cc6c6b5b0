//! OLMo 2: norms stand behind attention and FFN only, and q and k are normed over all their heads together.

use super::{Decoders, Family};
use crate::config::{Dialect, Norms, QkNorm, Rule};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "olmo",
    dialects: &[Dialect {
        gguf_architecture: Some("olmo2"),
        qkv_bias: Rule::Field("attention_bias"),
        o_bias: Rule::Field("attention_bias"),
        norms: Norms::After,
        qk_norm: QkNorm::Whole,
        eps: 1e-5,
        ..Dialect::plain("olmo2", "Olmo2")
    }],
};
