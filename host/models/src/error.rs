//! Errors of this crate: each names the file, the item, what was expected, what was found and what to do.

use std::path::{Path, PathBuf};

use structures_graph::GraphError;

/// What a message must say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// File or directory.
    pub path: PathBuf,
    /// Field, tensor or offset.
    pub item: String,
    /// Expected.
    pub expected: String,
    /// Found.
    pub found: String,
    /// What to do.
    pub help: String,
}

/// What can go wrong between a path and a running model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file cannot be read.
    #[error("{}: cannot {doing}: {source}; {help}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was attempted.
        doing: String,
        /// Cause.
        #[source]
        source: std::io::Error,
        /// What to do.
        help: String,
    },
    /// A file's content breaks its format, or two facts in it contradict each other.
    #[error("{}: {}: expected {}, found {}; {}", .0.path.display(), .0.item, .0.expected, .0.found, .0.help)]
    Malformed(Box<Fault>),
    /// A well-formed file asks for something this version does not do.
    #[error("{}: {} `{}` is not supported: expected {}; {}", .0.path.display(), .0.item, .0.found, .0.expected, .0.help)]
    Unsupported(Box<Fault>),
    /// The weights are packed by a codec that is not here.
    #[error("{}: {} `{}`: there is no codec for it here: expected {}; {}", .0.path.display(), .0.item, .0.found, .0.expected, .0.help)]
    Codec(Box<Fault>),
    /// A tensor is missing, there twice, or has another shape than the config says.
    #[error("{}: tensor `{}`: expected {}, found {}; {}", .0.path.display(), .0.item, .0.expected, .0.found, .0.help)]
    Tensor(Box<Fault>),
    /// A weight is NaN or infinite.
    #[error(
        "{}: tensor `{tensor}`: expected finite weights, found {count} that are not, the first ({value}) \
         at element {first}; the checkpoint is damaged or was saved from a diverged run: get it again", path.display()
    )]
    NonFinite {
        /// File.
        path: PathBuf,
        /// Which.
        tensor: String,
        /// How many values.
        count: usize,
        /// Flat index of the first, as stored.
        first: usize,
        /// The first value.
        value: f32,
    },
    /// A tokenizer cannot be made, or a text cannot be tokenised.
    #[error("{}: tokenizer: {reason}; {help}", path.display())]
    Tokenizer {
        /// File.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What to do.
        help: String,
    },
    /// There is nothing to run.
    #[error("the prompt is empty: expected at least one token, found none; give --prompt a text")]
    EmptyPrompt,
    /// A token the model has no embedding for.
    #[error(
        "token {token} at position {position}: expected an id below the vocabulary size {vocab}; \
         the tokens come from another model's tokenizer"
    )]
    TokenRange {
        /// Which.
        token: u32,
        /// Where.
        position: usize,
        /// Vocabulary size.
        vocab: usize,
    },
    /// Pictures that do not fit the model or the prompt.
    #[error("{what}: expected {expected}, found {found}; prepare prompt and pictures with the model's own processor")]
    Picture {
        /// What about them.
        what: String,
        /// Expected.
        expected: String,
        /// Found.
        found: String,
    },
    /// More positions than the model was made for.
    #[error(
        "the context is full: {prompt} tokens and {new} new ones make {}, expected at most {max}; \
         shorten the prompt or ask for fewer tokens", *prompt as u128 + *new as u128
    )]
    ContextFull {
        /// Tokens already there.
        prompt: usize,
        /// Tokens asked for.
        new: usize,
        /// The model's limit.
        max: usize,
    },
    /// The model's scores hold nothing to choose by.
    #[error(
        "the scores of the next token: expected at least one number among {vocab}, found only NaN or infinity; \
         the model diverged here: run without --scheme and --receipt to see whether the host does too"
    )]
    NoFiniteScore {
        /// Vocabulary size.
        vocab: usize,
    },
    /// The graph or its execution failed; a failed span is a [`GraphError::Span`] in here.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A tensor computation outside the graph failed.
    #[error("{what} failed: {source}")]
    Compute {
        /// Which.
        what: String,
        /// Cause.
        #[source]
        source: Box<candle_core::Error>,
    },
}

impl ModelError {
    /// A stable code for JSON errors.
    pub fn code(&self) -> &'static str {
        match self {
            ModelError::Io { .. } => "io",
            ModelError::Malformed(_) => "malformed",
            ModelError::Unsupported(_) => "unsupported",
            ModelError::Codec(_) => "codec_missing",
            ModelError::Tensor(_) => "tensor",
            ModelError::NonFinite { .. } | ModelError::NoFiniteScore { .. } => "non_finite",
            ModelError::Tokenizer { .. } => "tokenizer",
            ModelError::EmptyPrompt => "empty_prompt",
            ModelError::TokenRange { .. } => "token_range",
            ModelError::Picture { .. } => "picture",
            ModelError::ContextFull { .. } => "context_full",
            ModelError::Graph(_) => "graph",
            ModelError::Compute { .. } => "compute",
        }
    }

    pub(crate) fn io(path: &Path, doing: &str, source: std::io::Error, help: &str) -> Self {
        ModelError::Io {
            path: path.into(),
            doing: doing.into(),
            source,
            help: help.into(),
        }
    }

    pub(crate) fn malformed(
        path: &Path,
        item: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        ModelError::Malformed(Box::new(Fault {
            path: path.into(),
            item: item.into(),
            expected: expected.into(),
            found: found.into(),
            help: help.into(),
        }))
    }

    pub(crate) fn unsupported(
        path: &Path,
        item: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        ModelError::Unsupported(Box::new(Fault {
            path: path.into(),
            item: item.into(),
            expected: expected.into(),
            found: found.into(),
            help: help.into(),
        }))
    }

    pub(crate) fn codec(
        path: &Path,
        item: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        ModelError::Codec(Box::new(Fault {
            path: path.into(),
            item: item.into(),
            expected: expected.into(),
            found: found.into(),
            help: help.into(),
        }))
    }

    pub(crate) fn tensor(
        path: &Path,
        tensor: &str,
        expected: impl Into<String>,
        found: impl Into<String>,
        help: impl Into<String>,
    ) -> Self {
        ModelError::Tensor(Box::new(Fault {
            path: path.into(),
            item: tensor.into(),
            expected: expected.into(),
            found: found.into(),
            help: help.into(),
        }))
    }

    pub(crate) fn compute(what: impl Into<String>, source: candle_core::Error) -> Self {
        ModelError::Compute {
            what: what.into(),
            source: Box::new(source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_wish_is_summed_as_it_is() {
        let full = ModelError::ContextFull {
            prompt: 1,
            new: usize::MAX,
            max: 512,
        };
        let sum = (usize::MAX as u128 + 1).to_string();
        assert!(full.to_string().contains(&format!("make {sum},")), "{full}");
    }
}
