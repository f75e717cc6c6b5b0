//! The typed configuration of a decoder, from `config.json` or from GGUF metadata.
//!
//! What a family decides (which projections carry a bias, where its norms stand) comes in as a [`Dialect`]; what a
//! checkpoint decides is read here, once. A fact that this version cannot compute is refused by name, never ignored:
//! a soft cap or a window that is not applied gives wrong numbers, not slow ones.

use std::path::Path;

mod dialect;
mod facts;
mod fields;
mod from_gguf;
mod from_json;
mod rope;
mod windows;

pub use dialect::{Dialect, Norms, QkNorm, Rule, Windows, Within};
pub use facts::Facts;
pub(crate) use fields::Fields;
pub use rope::{Rope, RopeScaling};

use serde_json::{Map, Value};

use crate::checkpoint::{Checkpoint, Metadata};
use crate::ModelError;

/// Layers beyond this are no model but a damaged number.
const MAX_LAYERS: usize = 10_000;

/// Everything a decoder's tree and graph are built from.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// `model_type`.
    pub model_type: String,
    /// Path of the module that holds embedding, layers and last norm.
    pub root: &'static str,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the FFN.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Channels of a head that turn with the position, the first ones.
    pub rotary: usize,
    /// Epsilon of every norm.
    pub rms_norm_eps: f64,
    /// Where the norms of a layer stand.
    pub norms: Norms,
    /// Stored norm weights are multiplied as `1 + w`. A GGUF holds the sum, so there it is never so.
    pub norm_offset: bool,
    /// FFN activation, a word of the operations' vocabulary.
    pub act: &'static str,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// The output projection has one.
    pub o_bias: bool,
    /// The FFN projections have one.
    pub mlp_bias: bool,
    /// q and k are normed.
    pub qk_norm: QkNorm,
    /// q, k, v are rows of one parameter, gate and up of another.
    pub fused: bool,
    /// The output head reads the embedding.
    pub tied_head: bool,
    /// Rotary encoding.
    pub rope: Rope,
    /// Rotary encoding of the layers with a window, where it is another one.
    pub local_rope: Option<Rope>,
    /// For each layer, how many positions a query sees; `None` is all before it.
    pub windows: Vec<Option<usize>>,
    /// Factor of the attention scores, where it is not `head_dim^-0.5`.
    pub attention_scale: Option<f64>,
    /// Soft cap of the attention scores.
    pub attention_softcap: Option<f64>,
    /// Factor of the embedding.
    pub embedding_scale: f64,
    /// Factor of what a layer's two halves add to the stream.
    pub residual_scale: f64,
    /// Divisor of the scores over the vocabulary.
    pub logits_divisor: f64,
    /// Soft cap of the scores over the vocabulary.
    pub logits_softcap: Option<f64>,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// First token, where one is declared.
    pub bos: Option<u32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// What was not said and had to be taken as usual, or said twice.
    pub notes: Vec<String>,
}

impl DecoderConfig {
    /// Reads and checks the configuration of a checkpoint.
    pub fn read(checkpoint: &Checkpoint, dialect: &Dialect) -> Result<Self, ModelError> {
        let config = match checkpoint.metadata() {
            Metadata::Config(map) => match dialect.within {
                Some(within) => from_json::read_within(checkpoint, map, dialect, within)?,
                None => from_json::read(checkpoint, map, dialect)?,
            },
            Metadata::Gguf(meta) => from_gguf::read(checkpoint, meta, dialect)?,
        };
        config.checked(checkpoint)
    }

    /// As [`Self::read`], from an object inside `config.json` that describes the decoder of a larger model.
    pub fn read_object(
        checkpoint: &Checkpoint,
        map: &Map<String, Value>,
        dialect: &Dialect,
    ) -> Result<Self, ModelError> {
        from_json::read(checkpoint, map, dialect)?.checked(checkpoint)
    }

    fn checked(mut self, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        self.check(&checkpoint.metadata_path())?;
        let vocab = self.vocab_size;
        let inside = |id: &u32| (*id as usize) < vocab;
        if !self.eos.iter().chain(&self.bos).all(inside) {
            self.eos.retain(inside);
            self.bos = self.bos.filter(inside);
            let note = format!("bos or eos ids at or above the vocabulary size {vocab}: left out");
            self.notes.push(note);
        }
        Ok(self)
    }

    /// A number of the configuration by its published name, for templates of bindings.
    pub fn number(&self, name: &str) -> Option<usize> {
        Some(match name {
            "vocab_size" => self.vocab_size,
            "hidden_size" => self.hidden_size,
            "intermediate_size" => self.intermediate_size,
            "num_hidden_layers" => self.layers,
            "num_attention_heads" => self.heads,
            "num_key_value_heads" => self.kv_heads,
            "head_dim" => self.head_dim,
            _ => return None,
        })
    }

    /// Path of the embedding.
    pub(crate) fn embed(&self) -> String {
        format!("{}.embed_tokens", self.root)
    }

    /// Path of the last norm.
    pub(crate) fn final_norm(&self) -> String {
        format!("{}.norm", self.root)
    }

    /// Path of a layer.
    pub(crate) fn layer(&self, i: usize) -> String {
        format!("{}.layers.{i}", self.root)
    }

    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        DecoderConfig {
            model_type: "test".into(),
            root: "model",
            vocab_size: 8,
            hidden_size: 8,
            intermediate_size: 8,
            layers: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: 8,
            rotary: 8,
            rms_norm_eps: 1e-6,
            norms: Norms::Before,
            norm_offset: false,
            act: "silu",
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: QkNorm::None,
            fused: false,
            tied_head: true,
            rope: Rope::plain(10000.0),
            local_rope: None,
            windows: vec![None],
            attention_scale: None,
            attention_softcap: None,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logits_divisor: 1.0,
            logits_softcap: None,
            max_positions: 16,
            bos: None,
            eos: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn check(&self, path: &Path) -> Result<(), ModelError> {
        let bad = |item: &str, expected: String, found: usize| {
            let help = "correct the file or get it again";
            Err(ModelError::malformed(
                path,
                item,
                expected,
                found.to_string(),
                help,
            ))
        };
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of the {} query heads", self.heads);
            return bad("num_key_value_heads", expected, self.kv_heads);
        }
        if !self.head_dim.is_multiple_of(2) {
            return bad(
                "head_dim",
                "an even number, rotation works on pairs".into(),
                self.head_dim,
            );
        }
        if self.rotary == 0 || !self.rotary.is_multiple_of(2) || self.rotary > self.head_dim {
            let expected = format!(
                "an even number of channels within head_dim {}",
                self.head_dim
            );
            return bad("partial_rotary_factor", expected, self.rotary);
        }
        for rope in std::iter::once(&self.rope).chain(&self.local_rope) {
            if let RopeScaling::Table(divisors) = &rope.scaling {
                if divisors.len() != self.rotary / 2 {
                    let expected = format!("{} divisors, one for each frequency", self.rotary / 2);
                    return bad("short_factor", expected, divisors.len());
                }
            }
        }
        Ok(())
    }
}

/// Refuses a damaged number before anything is made for each layer.
fn check_layers(path: &Path, layers: usize) -> Result<usize, ModelError> {
    if layers <= MAX_LAYERS {
        return Ok(layers);
    }
    Err(ModelError::malformed(
        path,
        "number of layers",
        format!("at most {MAX_LAYERS}"),
        layers.to_string(),
        "correct the file or get it again",
    ))
}

/// Published activation names and the vocabulary's words for them.
const ACTIVATIONS: &[(&str, &str)] = &[
    ("silu", "silu"),
    ("swish", "silu"),
    ("gelu", "gelu_exact"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu_new", "gelu_tanh"),
    ("gelu_fast", "gelu_tanh"),
    ("gelu_accurate", "gelu_tanh"),
    ("quick_gelu", "gelu_sigmoid"),
    ("sigmoid", "sigmoid"),
    ("relu", "relu"),
    ("tanh", "tanh"),
];

pub(crate) fn activation(path: &Path, field: &str, name: &str) -> Result<&'static str, ModelError> {
    if let Some((_, word)) = ACTIVATIONS.iter().find(|(n, _)| *n == name) {
        return Ok(word);
    }
    let known: Vec<&str> = ACTIVATIONS.iter().map(|(n, _)| *n).collect();
    let expected = format!("one of {}", known.join(", "));
    let help = "this version cannot run the model";
    Err(ModelError::unsupported(path, field, expected, name, help))
}
