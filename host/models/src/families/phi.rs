//! Phi-3: q, k and v are rows of one parameter, gate and up of another; all layers see a window, where the config has
//! one; a part of the channels may turn. Rotary divisors that change with the length (`longrope`) hold up to the length
//! they were made for.

use super::{Decoders, Family};
use crate::config::{Dialect, Windows};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "phi",
    dialects: &[Dialect {
        gguf_architecture: Some("phi3"),
        fused: true,
        eps: 1e-5,
        partial_rotary: Some(1.0),
        windows: Windows::Always { absent: None },
        reads: &["partial_rotary_factor"],
        ..Dialect::plain("phi3", "Phi3")
    }],
};
