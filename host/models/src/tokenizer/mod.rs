//! Text to token ids and back, from `tokenizer.json` or from a GGUF's own vocabulary.
//!
//! A `tokenizer.json` is the `tokenizers` crate's, a GGUF's vocabulary is cut as readers of that format cut it. Here
//! are where the facts come from, which tokens end a text, conversations (`chat`), and a decoder that never gives half
//! a character.

use std::path::{Path, PathBuf};

use structures_graph::regular;

use crate::checkpoint::{Checkpoint, Metadata};
use crate::config::DecoderConfig;
use crate::ModelError;

mod chat;
mod growth;
mod pieces;
mod splits;
mod vocabulary;
mod words;

pub use chat::Message;

/// Bytes a `tokenizer.json` may have: the largest published ones have 35 MB.
const MAX_BYTES: u64 = 256 << 20;

enum Inner {
    /// A `tokenizer.json`.
    Published(Box<tokenizers::Tokenizer>),
    /// The vocabulary in a GGUF.
    Stored(Box<vocabulary::Vocabulary>),
}

/// A tokenizer and what belongs to it.
pub struct Tokenizer {
    inner: Inner,
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
        Self::of(checkpoint, config.bos, config.eos.clone())
    }

    /// As [`Self::open`], with the first token and those that end a text given by the caller: a tokenizer can be read
    /// whatever the model is.
    pub fn of(
        checkpoint: &Checkpoint,
        bos: Option<u32>,
        eos: Vec<u32>,
    ) -> Result<Option<Self>, ModelError> {
        let (inner, path, chat_template) = match checkpoint.metadata() {
            Metadata::Config(_) => {
                let path = checkpoint.path().join("tokenizer.json");
                if !path.exists() {
                    return Ok(None);
                }
                let inner = Inner::Published(Box::new(published(&path)?));
                (inner, path, chat::template(checkpoint.path())?)
            }
            Metadata::Gguf(meta) => {
                let Some(inner) = vocabulary::read(checkpoint.path(), meta)? else {
                    return Ok(None);
                };
                let inner = Inner::Stored(Box::new(inner));
                let template = meta.text("tokenizer.chat_template").map(String::from);
                (inner, checkpoint.path().to_path_buf(), template)
            }
        };
        Ok(Some(Tokenizer {
            inner,
            path,
            bos,
            eos,
            chat_template,
        }))
    }

    /// Token ids of a text. `add_special` puts the tokens around it that the tokenizer itself declares (a first
    /// token, mostly none).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        let ids = match &self.inner {
            Inner::Published(t) => {
                unpanicked(|| t.encode_fast(text, add_special)).map(|e| e.get_ids().to_vec())
            }
            Inner::Stored(v) => v.encode(text, add_special),
        };
        ids.map_err(|reason| {
            let help = "the text cannot be tokenised with this vocabulary";
            fault(&self.path, reason, help)
        })
    }

    /// The text of tokens, special ones included; bytes that are no UTF-8 become replacement characters.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, ModelError> {
        match &self.inner {
            Inner::Published(t) => unpanicked(|| t.decode(tokens, false)).map_err(|reason| {
                let help = "the tokens come from another vocabulary";
                fault(&self.path, reason, help)
            }),
            Inner::Stored(v) => Ok(v.decode(tokens)),
        }
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
        match &self.inner {
            Inner::Published(t) => t.get_vocab_size(true),
            Inner::Stored(v) => v.size(),
        }
    }

    /// The id of a token by its text.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        match &self.inner {
            Inner::Published(t) => t.token_to_id(text),
            Inner::Stored(v) => v.id(text),
        }
    }

    fn token(&self, id: u32) -> Option<String> {
        match &self.inner {
            Inner::Published(t) => t.id_to_token(id),
            Inner::Stored(v) => v.token(id).map(String::from),
        }
    }

    /// The chat template as published.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// A conversation as the text the model was trained on, by its own template. `open_answer` ends it with the
    /// beginning of an answer. Encode it without special tokens: the template writes them.
    pub fn chat(&self, messages: &[Message], open_answer: bool) -> Result<String, ModelError> {
        let Some(template) = self.chat_template() else {
            let help = "give the text itself: a model without a template is no chat model";
            return Err(fault(
                &self.path,
                "expected a chat template, found none",
                help,
            ));
        };
        let token = |id: Option<u32>| id.and_then(|id| self.token(id)).unwrap_or_default();
        let (bos, eos) = (token(self.bos), token(self.eos.first().copied()));
        chat::render(template, messages, open_answer, &bos, &eos).map_err(|reason| {
            let help = "the template does not take this conversation";
            fault(&self.path, format!("chat template: {reason}"), help)
        })
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

/// Reads a `tokenizer.json`. Its fault names the file; a panic in its reader is a fault too.
fn published(path: &Path) -> Result<tokenizers::Tokenizer, ModelError> {
    let help = "get the file again, it must be a tokenizer.json";
    let bytes = regular::read(path, MAX_BYTES)
        .map_err(|e| ModelError::io(path, "read it", e, help))?
        .map_err(|n| {
            let reason = format!("expected at most {MAX_BYTES} bytes, found {n}");
            fault(path, reason, help)
        })?;
    let read = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(&bytes));
    match read {
        Ok(Ok(t)) => fit(t).map_err(|reason| fault(path, reason, help)),
        Ok(Err(e)) => Err(fault(path, e.to_string(), help)),
        Err(_) => Err(fault(path, "its parts contradict each other", help)),
    }
}

/// A tokenizer that takes memory in proportion to its text: without padding and truncation, which are for batches that
/// are trained on (a host that generates never pads and never cuts a prompt), and with rewriting that is bounded.
fn fit(mut t: tokenizers::Tokenizer) -> Result<tokenizers::Tokenizer, String> {
    t.with_padding(None);
    t.with_truncation(None).map_err(|e| e.to_string())?;
    let json = |part: serde_json::Result<serde_json::Value>| part.map_err(|e| e.to_string());
    growth::check(
        "normalizer",
        &json(serde_json::to_value(t.get_normalizer()))?,
    )?;
    growth::check("decoder", &json(serde_json::to_value(t.get_decoder()))?)?;
    Ok(t)
}

/// What the library answers. A file whose parts contradict each other may read and only panic when it is used.
fn unpanicked<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(_) => Err("the parts of the file contradict each other".into()),
    }
}

pub(crate) fn fault(path: &Path, reason: impl Into<String>, help: &str) -> ModelError {
    ModelError::Tokenizer {
        path: path.into(),
        reason: reason.into(),
        help: help.into(),
    }
}
