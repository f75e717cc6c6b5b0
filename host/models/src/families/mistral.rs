//! Mistral: a Llama whose layers all see a window, where the config has one. A GGUF of it says `llama`.

use super::{Decoders, Family};
use crate::config::{Dialect, Windows};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "mistral",
    dialects: &[Dialect {
        windows: Windows::Always { absent: Some(4096) },
        ..Dialect::plain("mistral", "Mistral")
    }],
};
