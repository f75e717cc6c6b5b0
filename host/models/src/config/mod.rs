//! The typed configuration of a decoder, from `config.json` or from GGUF metadata.
//!
//! What a family decides (which projections carry a bias, whether q and k are normed) comes in as a [`Dialect`];
//! what a checkpoint decides is read here, once. A fact that this version cannot compute is refused by name, never
//! ignored: a soft cap or a window that is not applied gives wrong numbers, not slow ones.

use std::path::Path;

mod fields;
mod from_gguf;
mod from_json;
mod rope;

pub(crate) use fields::Fields;
pub use rope::{Rope, RopeScaling};

use crate::checkpoint::{Checkpoint, Metadata};
use crate::ModelError;

/// Where a yes-or-no fact of a family comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Always.
    Yes,
    /// Never.
    No,
    /// This flag of `config.json`, false when absent; in a GGUF, whether the tensors are there.
    Field(&'static str),
}

/// What tells one decoder family from another.
#[derive(Clone, Copy, Debug)]
pub struct Dialect {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// `general.architecture` in a GGUF; its keys and nothing else start with it.
    pub gguf_architecture: Option<&'static str>,
    /// Class name prefix of the published modules (`Llama`); never evidence, for people only.
    pub class: &'static str,
    /// Bias of the q, k and v projections.
    pub qkv_bias: Rule,
    /// Bias of the output projection.
    pub o_bias: Rule,
    /// Bias of the three FFN projections.
    pub mlp_bias: Rule,
    /// q and k are normed per head before rotation.
    pub qk_norm: bool,
    /// Whether a GGUF stores q and k rows permuted for rotation of adjacent pairs.
    pub gguf_permuted_qk: bool,
}

/// Everything a decoder's tree and graph are built from.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// `model_type`.
    pub model_type: String,
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
    /// Epsilon of every norm.
    pub rms_norm_eps: f64,
    /// FFN activation, a word of the operations' vocabulary.
    pub act: &'static str,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// The output projection has one.
    pub o_bias: bool,
    /// The FFN projections have one.
    pub mlp_bias: bool,
    /// q and k are normed per head.
    pub qk_norm: bool,
    /// The output head reads the embedding.
    pub tied_head: bool,
    /// Rotary encoding.
    pub rope: Rope,
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
        let mut config = match checkpoint.metadata() {
            Metadata::Config(map) => from_json::read(checkpoint, map, dialect)?,
            Metadata::Gguf(meta) => from_gguf::read(checkpoint, meta, dialect)?,
        };
        config.check(&checkpoint.metadata_path())?;
        let vocab = config.vocab_size;
        let inside = |id: &u32| (*id as usize) < vocab;
        if !config.eos.iter().chain(&config.bos).all(inside) {
            config.eos.retain(inside);
            config.bos = config.bos.filter(inside);
            let note = format!("bos or eos ids at or above the vocabulary size {vocab}: left out");
            config.notes.push(note);
        }
        Ok(config)
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
        Ok(())
    }
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
