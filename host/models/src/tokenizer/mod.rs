//! Text to token ids and back, from `tokenizer.json` or from a GGUF's own vocabulary.
//!
//! The `tokenizers` crate does the work; here are only where the facts come from, which tokens end a text, and a
//! decoder that never gives half a character.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::{read_json_object, Checkpoint, Metadata};
use crate::config::DecoderConfig;
use crate::ModelError;

mod by_score;
mod from_gguf;

/// A tokenizer and what belongs to it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    bos: Option<u32>,
    eos: Vec<u32>,
    chat_template: Option<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({})", self.path.display())
    }
}

impl Tokenizer {
    /// The tokenizer of a checkpoint; `None` when it comes with none.
    pub fn open(
        checkpoint: &Checkpoint,
        config: &DecoderConfig,
    ) -> Result<Option<Self>, ModelError> {
        let (inner, path, chat_template) = match checkpoint.metadata() {
            Metadata::Config(_) => {
                let path = checkpoint.path().join("tokenizer.json");
                if !path.is_file() {
                    return Ok(None);
                }
                let inner = tokenizers::Tokenizer::from_file(&path).map_err(|e| {
                    fault(
                        &path,
                        e.to_string(),
                        "get the file again, it must be a tokenizer.json",
                    )
                })?;
                (inner, path, chat_template(checkpoint.path())?)
            }
            Metadata::Gguf(meta) => {
                let Some(inner) = from_gguf::tokenizer(checkpoint.path(), meta)? else {
                    return Ok(None);
                };
                let template = meta.text("tokenizer.chat_template").map(String::from);
                (inner, checkpoint.path().to_path_buf(), template)
            }
        };
        Ok(Some(Tokenizer {
            inner,
            path,
            bos: config.bos,
            eos: config.eos.clone(),
            chat_template,
        }))
    }

    /// Token ids of a text. `add_special` puts the tokens around it that the tokenizer itself declares (a first
    /// token, mostly none).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, add_special).map_err(|e| {
            fault(
                &self.path,
                e.to_string(),
                "the text cannot be tokenised with this vocabulary",
            )
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, special ones included; bytes that are no UTF-8 become replacement characters.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(tokens, false).map_err(|e| {
            fault(
                &self.path,
                e.to_string(),
                "the tokens come from another vocabulary",
            )
        })
    }

    /// A decoder for tokens that come one by one.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream {
            tokenizer: self,
            window: Vec::new(),
            given: 0,
        }
    }

    /// Tokens that end a text.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// First token, where one is declared.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// Number of tokens it knows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a token by its text.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The chat template as published, not applied anywhere yet.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }
}

/// Text of tokens as they come, whole characters only.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens since the last clean break, with the ones just before it as context.
    window: Vec<u32>,
    /// How many of them are given out already.
    given: usize,
}

impl TextStream<'_> {
    /// The text a token completes; empty while a character is still open.
    pub fn push(&mut self, token: u32) -> Result<String, ModelError> {
        self.window.push(token);
        let text = self.pending()?;
        if text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.settle();
        Ok(text)
    }

    /// What is left at the end, an open character as a replacement character.
    pub fn finish(&mut self) -> Result<String, ModelError> {
        let text = self.pending()?;
        self.settle();
        Ok(text)
    }

    /// Text after what was given. Both sides are decoded with the same context before them, because some decoders
    /// treat the first token of a text in their own way.
    fn pending(&self) -> Result<String, ModelError> {
        let all = self.tokenizer.decode(&self.window)?;
        let before = self.tokenizer.decode(&self.window[..self.given])?;
        Ok(all
            .strip_prefix(before.as_str())
            .unwrap_or(&all)
            .to_string())
    }

    fn settle(&mut self) {
        self.window.drain(..self.given);
        self.given = self.window.len();
    }
}

/// `tokenizer_config.json` holds a template or a list of named ones; a file of its own is newer.
fn chat_template(dir: &Path) -> Result<Option<String>, ModelError> {
    let own = dir.join("chat_template.jinja");
    if own.is_file() {
        let help = "get the file again";
        return std::fs::read_to_string(&own)
            .map(Some)
            .map_err(|e| ModelError::io(&own, "read it", e, help));
    }
    let config = dir.join("tokenizer_config.json");
    if !config.is_file() {
        return Ok(None);
    }
    let map = read_json_object(&config)?;
    let named = |list: &Vec<Value>| {
        let entry = list
            .iter()
            .find(|e| e.get("name").and_then(Value::as_str) == Some("default"));
        entry?.get("template")?.as_str().map(String::from)
    };
    Ok(match map.get("chat_template") {
        Some(Value::String(s)) => Some(s.clone()),
        Some(Value::Array(list)) => named(list),
        _ => None,
    })
}

pub(crate) fn fault(path: &Path, reason: impl Into<String>, help: &str) -> ModelError {
    ModelError::Tokenizer {
        path: path.into(),
        reason: reason.into(),
        help: help.into(),
    }
}
