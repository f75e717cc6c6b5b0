//! A SentencePiece vocabulary from GGUF metadata.
//!
//! The file has pieces with scores and no merges: of two neighbours the pair whose joined piece has the highest score
//! is joined first. As merges that is every way to cut a piece into two pieces, ranked by the score of the whole; equal
//! scores (runs of spaces have one) by the longer first part, so that a run grows from its start. Characters without a
//! piece become bytes. Spaces are written as U+2581; whether a text gets one in front is the file's word.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::path::Path;

use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{Vocab, BPE};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence as Normalizers;
use tokenizers::{DecoderWrapper, NormalizerWrapper};

use super::fault;
use super::from_gguf::{texts, AGAIN};
use crate::checkpoint::GgufMetadata;
use crate::ModelError;

const SPACE: &str = "\u{2581}";
/// Token type of a byte.
const BYTE: u64 = 6;

/// The tokenizer without its special tokens.
pub(super) fn tokenizer(
    path: &Path,
    meta: &GgufMetadata,
) -> Result<tokenizers::Tokenizer, ModelError> {
    let tokens = texts(path, meta, "tokenizer.ggml.tokens")?;
    let scores = scores(path, meta, tokens.len())?;
    let types = meta.list("tokenizer.ggml.token_type").unwrap_or(&[]);
    let is_byte = |i: usize| types.get(i).and_then(|t| t.as_u64()) == Some(BYTE);
    let pieces: Vec<(&str, f32)> = tokens
        .iter()
        .zip(&scores)
        .enumerate()
        .filter(|(i, _)| !is_byte(*i))
        .map(|(_, (token, score))| (*token, *score))
        .collect();
    let vocab: Vocab = tokens
        .iter()
        .zip(0u32..)
        .map(|(t, i)| ((*t).to_string(), i))
        .collect();
    let failed = |e: tokenizers::Error| fault(path, e.to_string(), AGAIN);
    let mut bpe = BPE::builder()
        .vocab_and_merges(vocab, merges(&pieces))
        .byte_fallback((0..tokens.len()).any(is_byte))
        .fuse_unk(true);
    let unknown = meta.id("tokenizer.ggml.unknown_token_id");
    if let Some(text) = unknown.and_then(|id| tokens.get(id as usize)) {
        bpe = bpe.unk_token((*text).into());
    }
    let mut t = tokenizers::Tokenizer::new(bpe.build().map_err(failed)?);

    let prefix = meta.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    if prefix {
        normalizers.push(Prepend::new(SPACE.into()).into());
    }
    normalizers.push(Replace::new(" ", SPACE).map_err(failed)?.into());
    t.with_normalizer(Some(Normalizers::new(normalizers)))
        .map_err(failed)?;
    let mut decoders: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ").map_err(failed)?.into(),
        ByteFallback::default().into(),
        Fuse::default().into(),
    ];
    if prefix {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    t.with_decoder(Some(Decoders::new(decoders)));
    Ok(t)
}

fn scores(path: &Path, meta: &GgufMetadata, expected: usize) -> Result<Vec<f32>, ModelError> {
    let key = "tokenizer.ggml.scores";
    let list = meta.list(key).unwrap_or(&[]);
    let scores: Option<Vec<f32>> = list
        .iter()
        .map(|v| v.as_f64().map(|x| x as f32).filter(|x| !x.is_nan()))
        .collect();
    match scores {
        Some(scores) if scores.len() == expected => Ok(scores),
        _ => {
            let found = list.len();
            let reason = format!("{key}: expected {expected} numbers, found {found} values");
            Err(fault(path, reason, AGAIN))
        }
    }
}

fn merges(pieces: &[(&str, f32)]) -> Vec<(String, String)> {
    let known: HashSet<&str> = pieces.iter().map(|(p, _)| *p).collect();
    let mut cuts: Vec<(f32, usize, &str, &str)> = Vec::new();
    for (piece, score) in pieces {
        for (n, (at, _)) in piece.char_indices().enumerate().skip(1) {
            let (left, right) = piece.split_at(at);
            if known.contains(left) && known.contains(right) {
                cuts.push((*score, n, left, right));
            }
        }
    }
    cuts.sort_by(|a, b| b.0.total_cmp(&a.0).then(Reverse(a.1).cmp(&Reverse(b.1))));
    cuts.into_iter()
        .map(|(_, _, left, right)| (left.into(), right.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::GgufValue;

    fn meta(pieces: &[(&str, f64, u64)], prefix: bool) -> GgufMetadata {
        let list = |of: &dyn Fn(&(&str, f64, u64)) -> GgufValue| {
            GgufValue::List(pieces.iter().map(of).collect())
        };
        let mut meta = GgufMetadata::default();
        let mut add = |key: &str, v| drop(meta.values.insert(format!("tokenizer.ggml.{key}"), v));
        add("tokens", list(&|p| GgufValue::Text(p.0.into())));
        add("scores", list(&|p| GgufValue::Float(p.1)));
        add("token_type", list(&|p| GgufValue::Unsigned(p.2)));
        add("add_space_prefix", GgufValue::Flag(prefix));
        meta
    }

    #[test]
    fn the_highest_score_joins_first_and_bytes_fill_gaps() {
        let bytes: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
        let mut pieces: Vec<(&str, f64, u64)> =
            bytes.iter().map(|b| (b.as_str(), 0.0, BYTE)).collect();
        for (piece, score) in [
            ("\u{2581}", -9.0),
            ("a", -9.0),
            ("b", -9.0),
            ("c", -9.0),
            ("ab", -3.0),
            ("bc", -1.0),
            ("abc", -5.0),
            ("\u{2581}a", -2.0),
            ("\u{2581}\u{2581}", -4.0),
            ("\u{2581}\u{2581}\u{2581}", -4.0),
        ] {
            pieces.push((piece, score, 1));
        }
        let path = Path::new("m.gguf");
        let text =
            |t: &tokenizers::Tokenizer, s: &str| t.encode(s, false).unwrap().get_tokens().join("|");
        let t = tokenizer(path, &meta(&pieces, false)).unwrap();
        // `bc` before `ab`, then `a` with it; `ab` alone where no `bc` is.
        assert_eq!(text(&t, "abcab"), "abc|ab");
        assert_eq!(text(&t, "a ab"), "a|\u{2581}a|b");
        assert_eq!(text(&t, "a   b"), "a|\u{2581}\u{2581}\u{2581}|b");
        assert_eq!(text(&t, "\u{e9}"), "<0xC3>|<0xA9>");
        let ids = t.encode("a \u{e9}c", false).unwrap();
        assert_eq!(t.decode(ids.get_ids(), false).unwrap(), "a \u{e9}c");
        let t = tokenizer(path, &meta(&pieces, true)).unwrap();
        assert_eq!(text(&t, "ab"), "\u{2581}a|b");
        let ids = t.encode("ab", false).unwrap();
        assert_eq!(t.decode(ids.get_ids(), false).unwrap(), "ab");

        let mut short = meta(&pieces, true);
        let one = GgufValue::List(vec![GgufValue::Float(0.0)]);
        short.values.insert("tokenizer.ggml.scores".into(), one);
        let message = tokenizer(path, &short).unwrap_err().to_string();
        assert!(message.contains("tokenizer.ggml.scores"), "{message}");
    }
}
