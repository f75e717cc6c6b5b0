//! A tokenizer from GGUF metadata: byte-level BPE here, SentencePiece vocabularies in `by_score`.
//!
//! The file has vocabulary, merges and token types, but of the pre-tokenizer only its name; what the name means is
//! common knowledge kept in [`PRE`]. An unknown name is refused: splitting a text in another way gives other tokens
//! and a worse model, silently.

use std::path::Path;

use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{Vocab, BPE};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::{by_score, fault};
use crate::checkpoint::{GgufMetadata, GgufValue};
use crate::ModelError;

pub(super) const AGAIN: &str = "the vocabulary in the file is damaged: convert it again";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
/// The newer split with up to three digits, and with one digit.
const NEWER_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const NEWER_1: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";

/// How a named pre-tokenizer splits.
struct Pre {
    names: &'static [&'static str],
    /// Applied in order, each on the pieces of the one before.
    splits: &'static [&'static str],
    /// Texts are brought to composed form first.
    compose: bool,
    /// A piece that is a token stays one, whatever the merges say.
    whole_words: bool,
    /// Whether texts begin with the first token when the file does not say.
    add_bos: bool,
}

const PRE: &[Pre] = &[
    Pre {
        names: &["default"],
        splits: &[PUNCTUATION, GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        compose: false,
        whole_words: false,
        add_bos: false,
    },
    Pre {
        names: &["gpt-2", "gpt2", "mpt", "olmo", "jais"],
        splits: &[GPT2],
        compose: false,
        whole_words: false,
        add_bos: false,
    },
    Pre {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
        ],
        splits: &[DIGIT, GPT2],
        compose: false,
        whole_words: false,
        add_bos: false,
    },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3"],
        splits: &[NEWER_3],
        compose: false,
        whole_words: true,
        add_bos: true,
    },
    Pre {
        names: &["dbrx", "smaug-bpe"],
        splits: &[NEWER_3],
        compose: false,
        whole_words: false,
        add_bos: false,
    },
    Pre {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        splits: &[NEWER_1],
        compose: true,
        whole_words: false,
        add_bos: false,
    },
];

/// Token types of the format.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER: u64 = 4;

/// The tokenizer, or `None` when the file has no vocabulary at all.
pub(super) fn tokenizer(
    path: &Path,
    meta: &GgufMetadata,
) -> Result<Option<tokenizers::Tokenizer>, ModelError> {
    let Some(model) = meta.text("tokenizer.ggml.model") else {
        return Ok(None);
    };
    let cannot = "give a directory with tokenizer.json instead";
    let mut tokenizer = match model {
        "gpt2" => byte_level(path, meta, cannot)?,
        "llama" => (by_score::tokenizer(path, meta)?, true),
        other => {
            let expected = "gpt2 (byte-level BPE) or llama (SentencePiece)";
            let item = "tokenizer.ggml.model";
            return Err(ModelError::unsupported(path, item, expected, other, cannot));
        }
    };
    let tokens = texts(path, meta, "tokenizer.ggml.tokens")?;
    let (t, add_bos) = &mut tokenizer;
    add_special_tokens(path, meta, &tokens, t)?;

    let flag = |key: &str| meta.flag(&format!("tokenizer.ggml.add_{key}_token"));
    let around = |wanted: bool, key: &str| {
        let id = meta
            .id(&format!("tokenizer.ggml.{key}_token_id"))
            .filter(|_| wanted)?;
        tokens
            .get(id as usize)
            .map(|text| ((*text).to_string(), id))
    };
    let before = around(flag("bos").unwrap_or(*add_bos), "bos");
    let after = around(flag("eos").unwrap_or(false), "eos");
    if before.is_some() || after.is_some() {
        t.with_post_processor(Some(
            template(before, after).map_err(|e| fault(path, e, AGAIN))?,
        ));
    }
    Ok(Some(tokenizer.0))
}

/// The byte-level kind, and whether texts begin with the first token when the file does not say.
fn byte_level(
    path: &Path,
    meta: &GgufMetadata,
    cannot: &str,
) -> Result<(tokenizers::Tokenizer, bool), ModelError> {
    let name = meta.text("tokenizer.ggml.pre").unwrap_or("default");
    let Some(pre) = PRE.iter().find(|p| p.names.contains(&name)) else {
        let known: Vec<&str> = PRE.iter().flat_map(|p| p.names).copied().collect();
        let expected = format!("one of {}", known.join(", "));
        return Err(ModelError::unsupported(
            path,
            "tokenizer.ggml.pre",
            expected,
            name,
            cannot,
        ));
    };

    let tokens = texts(path, meta, "tokenizer.ggml.tokens")?;
    let merges = merges(path, &texts(path, meta, "tokenizer.ggml.merges")?)?;
    let vocab: Vocab = tokens
        .iter()
        .zip(0u32..)
        .map(|(t, i)| ((*t).to_string(), i))
        .collect();
    let failed = |e: tokenizers::Error| fault(path, e.to_string(), AGAIN);
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre.whole_words)
        .build()
        .map_err(failed)?;

    let mut t = tokenizers::Tokenizer::new(bpe);
    if pre.compose {
        t.with_normalizer(Some(NFC)).map_err(failed)?;
    }
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for split in pre.splits {
        let pattern = SplitPattern::Regex((*split).into());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(failed)?;
        steps.push(split.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    t.with_pre_tokenizer(Some(Sequence::new(steps)));
    t.with_decoder(Some(ByteLevel::new(false, true, false)));
    Ok((t, pre.add_bos))
}

fn template(
    before: Option<(String, u32)>,
    after: Option<(String, u32)>,
) -> Result<TemplateProcessing, String> {
    let mut single = Vec::new();
    single.extend(before.iter().map(|(t, _)| t.clone()));
    single.push("$A".into());
    single.extend(after.iter().map(|(t, _)| t.clone()));
    let mut special: Vec<(String, u32)> = before.into_iter().chain(after).collect();
    special.dedup();
    TemplateProcessing::builder()
        .try_single(single)?
        .special_tokens(special)
        .build()
        .map_err(|e| e.to_string())
}

/// Control tokens are special, user-defined ones are only kept whole.
fn add_special_tokens(
    path: &Path,
    meta: &GgufMetadata,
    tokens: &[&str],
    t: &mut tokenizers::Tokenizer,
) -> Result<(), ModelError> {
    let types = meta.list("tokenizer.ggml.token_type").unwrap_or(&[]);
    if !types.is_empty() && types.len() != tokens.len() {
        let reason = format!(
            "tokenizer.ggml.token_type: expected {} entries, found {}",
            tokens.len(),
            types.len()
        );
        return Err(fault(path, reason, AGAIN));
    }
    let of_type = |wanted: &[u64]| -> Vec<&str> {
        let pairs = tokens.iter().zip(types);
        let chosen = pairs.filter(|(_, t)| t.as_u64().is_some_and(|t| wanted.contains(&t)));
        chosen.map(|(text, _)| *text).collect()
    };
    let added = |wanted: &[u64], special: bool| -> Vec<AddedToken> {
        let texts = of_type(wanted).into_iter();
        texts
            .map(|text| AddedToken::from(text, special).normalized(false))
            .collect()
    };
    let failed = |e: tokenizers::Error| fault(path, e.to_string(), AGAIN);
    t.add_special_tokens(added(&[CONTROL, UNKNOWN], true))
        .map_err(failed)?;
    t.add_tokens(added(&[USER], false)).map_err(failed)?;
    Ok(())
}

pub(super) fn texts<'a>(
    path: &Path,
    meta: &'a GgufMetadata,
    key: &str,
) -> Result<Vec<&'a str>, ModelError> {
    let list = meta.list(key);
    let list = list.ok_or_else(|| {
        fault(
            path,
            format!("{key}: expected a list of texts, found none"),
            AGAIN,
        )
    })?;
    list.iter()
        .enumerate()
        .map(|(i, v)| match v {
            GgufValue::Text(s) => Ok(s.as_str()),
            other => {
                let reason = format!("{key}[{i}]: expected a text, found {}", other.brief());
                Err(fault(path, reason, AGAIN))
            }
        })
        .collect()
}

/// Two parts with a space between; a part may begin with one itself.
fn merges(path: &Path, rows: &[&str]) -> Result<Vec<(String, String)>, ModelError> {
    rows.iter()
        .enumerate()
        .map(|(i, row)| {
            let skip = row.chars().next().map_or(0, char::len_utf8);
            match row[skip..].find(' ') {
                Some(at) => Ok((row[..skip + at].into(), row[skip + at + 1..].into())),
                None => {
                    let key = "tokenizer.ggml.merges";
                    let reason = format!("{key}[{i}]: expected two parts, found `{row}`");
                    Err(fault(path, reason, AGAIN))
                }
            }
        })
        .collect()
}
