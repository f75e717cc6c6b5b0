//! OLMo 3: as OLMo 2, with a window in three layers of four; only the others scale their rotary frequencies.

use super::{Decoders, Family};
use crate::config::{Dialect, Norms, QkNorm, Rule, Windows};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "olmo3",
    dialects: &[Dialect {
        qkv_bias: Rule::Field("attention_bias"),
        o_bias: Rule::Field("attention_bias"),
        norms: Norms::After,
        qk_norm: QkNorm::Whole,
        eps: 1e-5,
        theta: 500_000.0,
        local_theta: Some(500_000.0),
        windows: Windows::AllBut {
            every: 4,
            absent: 4096,
        },
        ..Dialect::plain("olmo3", "Olmo3")
    }],
};
