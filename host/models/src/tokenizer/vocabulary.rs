//! A tokenizer from a GGUF's own vocabulary: byte-level merges, SentencePiece scores or WordPiece.
//!
//! Token ids are those that readers of the format give. What they have in common is here: tokens that are found in a
//! text before anything else, the tokens around a text, and the way back. How a piece of text becomes tokens is in
//! `splits` (with the `tokenizers` crate for the merges), `pieces` and `words`.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use indexmap::IndexMap;
use tokenizers::models::bpe::{Vocab, BPE};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::SplitDelimiterBehavior;

use super::splits::PRE;
use super::{fault, pieces, words};
use crate::checkpoint::{GgufMetadata, GgufValue};
use crate::ModelError;

const AGAIN: &str = "the vocabulary in the file is damaged: convert it again";
const CANNOT: &str = "give a directory with tokenizer.json instead";
const SPACE: &str = "\u{2581}";

/// Tokens that end a turn whatever the file says of their type.
const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "</s>",
    "<eos>",
];

/// Models, by a part of their name in the file, whose whole tokens take the spaces behind them away; these do not.
const TRIMMING: [&str; 2] = ["phi-3", "phi3"];
const KEEP_SPACES: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];
/// The one that takes the spaces in front of it away, under these names of pre-tokenizers.
const MASK: &str = "<mask>";
const MASKING: [&str; 3] = ["jina-v2-de", "jina-v2-es", "jina-v2-code"];
const ASCII_SPACES: [char; 6] = [' ', '\t', '\n', '\x0b', '\x0c', '\r'];

/// Tokens that the file names.
const NAMED: [&str; 5] = ["bos", "eos", "unknown", "seperator", "sep"];

/// What a token is, by the number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    /// Kept whole in a text: control, unknown, given by the user.
    Whole,
    Unused,
    Byte,
}

impl Kind {
    fn from_file(number: u64) -> Kind {
        match number {
            2..=4 => Kind::Whole,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Normal,
        }
    }
}

/// How text between whole tokens becomes tokens.
enum Cutter {
    Merges(Box<tokenizers::Tokenizer>),
    Scores(Vec<f32>),
    Words(words::Rules),
}

/// The vocabulary of a file.
pub(super) struct Vocabulary {
    tokens: Vec<String>,
    ids: HashMap<String, u32>,
    kinds: Vec<Kind>,
    /// Tokens kept whole, longest first.
    whole: Vec<u32>,
    /// Tokens kept whole that take the spaces behind them away.
    trims: HashSet<u32>,
    /// The one that takes the spaces in front of it away.
    trims_before: Option<u32>,
    cutter: Cutter,
    unknown: Option<u32>,
    before: Option<u32>,
    after: Option<u32>,
    /// A space is put before a text, and before what follows a whole token.
    prefix: bool,
    longest: usize,
}

/// What a model of vocabulary means when the file is silent.
struct Defaults {
    add_bos: bool,
    bos: u32,
    eos: u32,
    unknown: Option<u32>,
    prefix: bool,
}

/// The vocabulary, or `None` when the file has none at all.
pub(super) fn read(path: &Path, meta: &GgufMetadata) -> Result<Option<Vocabulary>, ModelError> {
    let Some(model) = meta.text("tokenizer.ggml.model") else {
        return Ok(None);
    };
    let tokens = texts(path, meta, "tokenizer.ggml.tokens")?;
    let flag = |key: &str| meta.flag(&format!("tokenizer.ggml.{key}"));
    let (cutter, defaults) = match model {
        "gpt2" => {
            let (merges, add_bos) = merges_of(path, meta, &tokens)?;
            let none = Defaults {
                add_bos,
                bos: 11,
                eos: 11,
                unknown: None,
                prefix: false,
            };
            (merges, none)
        }
        "llama" => {
            let pieces = Defaults {
                add_bos: true,
                bos: 1,
                eos: 2,
                unknown: Some(0),
                prefix: flag("add_space_prefix").unwrap_or(true),
            };
            (Cutter::Scores(scores(path, meta, tokens.len())?), pieces)
        }
        "bert" => {
            let lowercase = flag("normalizer.lowercase").unwrap_or(true);
            let rules = words::Rules {
                lowercase,
                strip_accents: flag("normalizer.strip_accents").unwrap_or(lowercase),
            };
            let words = Defaults {
                add_bos: true,
                bos: 101,
                eos: 102,
                unknown: Some(100),
                prefix: false,
            };
            (Cutter::Words(rules), words)
        }
        other => {
            let expected = "gpt2 (byte-level BPE), llama (SentencePiece) or bert (WordPiece)";
            let item = "tokenizer.ggml.model";
            return Err(ModelError::unsupported(path, item, expected, other, CANNOT));
        }
    };
    let kinds = kinds(path, meta, &tokens)?;
    let tokens: Vec<String> = tokens
        .iter()
        .enumerate()
        .map(|(i, t)| match t.is_empty() {
            true => format!("[EMPTY_{i}]"),
            false => (*t).to_string(),
        })
        .collect();
    let ids = tokens.iter().cloned().zip(0u32..).collect();
    let mut whole: Vec<u32> = (0u32..)
        .zip(&kinds)
        .filter(|(_, k)| **k == Kind::Whole)
        .map(|(id, _)| id)
        .collect();
    whole.sort_by_key(|id| std::cmp::Reverse(tokens[*id as usize].len()));
    let trims = match meta.text("general.name").map(str::to_ascii_lowercase) {
        Some(name) if TRIMMING.iter().any(|part| name.contains(part)) => {
            let all = whole.iter().copied();
            all.filter(|id| !KEEP_SPACES.contains(&tokens[*id as usize].as_str()))
                .collect()
        }
        _ => HashSet::new(),
    };
    let masked = meta.text("tokenizer.ggml.pre");
    let masked = masked.is_some_and(|pre| MASKING.iter().any(|part| pre.contains(part)));
    let mut masks = whole.iter().copied();
    let trims_before = masks.find(|id| masked && tokens[*id as usize] == MASK);
    let known = |id: u32| ((id as usize) < tokens.len()).then_some(id);
    let mut named = IndexMap::new();
    for key in NAMED {
        named.insert(key, named_token(path, meta, key, tokens.len())?);
    }
    let id = |key: &str| named.get(key).copied().flatten();
    let worded = matches!(cutter, Cutter::Words(_));
    let before = worded || flag("add_bos_token").unwrap_or(defaults.add_bos);
    let after = worded || flag("add_eos_token").unwrap_or(false);
    let last = if worded {
        id("seperator").or_else(|| id("sep"))
    } else {
        id("eos")
    };
    Ok(Some(Vocabulary {
        before: Some(before)
            .filter(|wanted| *wanted)
            .and_then(|_| id("bos").or_else(|| known(defaults.bos))),
        after: Some(after)
            .filter(|wanted| *wanted)
            .and_then(|_| last.or_else(|| known(defaults.eos))),
        unknown: id("unknown").or_else(|| defaults.unknown.and_then(known)),
        longest: tokens.iter().map(String::len).max().unwrap_or(0),
        prefix: defaults.prefix,
        ids,
        kinds,
        whole,
        trims,
        trims_before,
        cutter,
        tokens,
    }))
}

/// The token that a key names.
fn named_token(
    path: &Path,
    meta: &GgufMetadata,
    key: &str,
    tokens: usize,
) -> Result<Option<u32>, ModelError> {
    let key = format!("tokenizer.ggml.{key}_token_id");
    let Some(value) = meta.get(&key) else {
        return Ok(None);
    };
    match meta.id(&key) {
        // How a writer says that there is none.
        Some(u32::MAX) => Ok(None),
        Some(id) if (id as usize) < tokens => Ok(Some(id)),
        _ => {
            let found = value.brief();
            let reason = format!("{key}: expected a token below {tokens}, found {found}");
            Err(fault(path, reason, AGAIN))
        }
    }
}

/// A part of a text: still text, or a token that stood in it.
enum Part<'t> {
    Text(&'t str),
    Token(u32),
}

impl Vocabulary {
    /// Token ids of a text.
    pub(super) fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String> {
        let mut out: Vec<u32> = self.before.filter(|_| add_special).into_iter().collect();
        let mut after_token = true;
        for part in self.parts(text) {
            match part {
                Part::Token(id) => out.push(id),
                Part::Text(text) => self.cut(text, self.prefix && after_token, &mut out)?,
            }
            after_token = matches!(part, Part::Token(_));
        }
        out.extend(self.after.filter(|_| add_special));
        Ok(out)
    }

    /// A text cut at the tokens that are kept whole: all places of the longest one first, then those of the next.
    fn parts<'t>(&self, text: &'t str) -> Vec<Part<'t>> {
        let mut parts = vec![Part::Text(text)];
        for id in &self.whole {
            let token = self.tokens[*id as usize].as_str();
            if !text.contains(token) {
                continue;
            }
            let mut next = Vec::with_capacity(parts.len() + 2);
            for part in parts {
                let Part::Text(text) = part else {
                    next.push(part);
                    continue;
                };
                let last = text.matches(token).count();
                for (i, mut piece) in text.split(token).enumerate() {
                    if i > 0 {
                        next.push(Part::Token(*id));
                    }
                    if i > 0 && self.trims.contains(id) {
                        piece = piece.trim_start_matches(ASCII_SPACES);
                    }
                    if i < last && self.trims_before == Some(*id) {
                        piece = piece.trim_end_matches(ASCII_SPACES);
                    }
                    next.push(Part::Text(piece));
                }
            }
            parts = next;
        }
        parts.retain(|p| !matches!(p, Part::Text("")));
        parts
    }

    fn cut(&self, text: &str, prefix: bool, out: &mut Vec<u32>) -> Result<(), String> {
        match &self.cutter {
            Cutter::Merges(merges) => {
                let encoding = merges.encode_fast(text, false).map_err(|e| e.to_string())?;
                out.extend(encoding.get_ids());
            }
            Cutter::Scores(scores) => {
                let text = match prefix {
                    true => format!(" {text}"),
                    false => text.to_string(),
                };
                let text = text.replace(' ', SPACE);
                for piece in pieces::cut(&text, &self.ids, scores) {
                    match self.ids.get(piece) {
                        Some(id) => out.push(*id),
                        None => self.bytes(piece, out),
                    }
                }
            }
            Cutter::Words(rules) => {
                let ids = words::cut(text, *rules, &self.ids, self.longest, self.unknown);
                out.extend(ids);
            }
        }
        Ok(())
    }

    /// The bytes of a piece that is no token; where they are no tokens either, the unknown one.
    fn bytes(&self, piece: &str, out: &mut Vec<u32>) {
        let found: Option<Vec<u32>> = piece
            .bytes()
            .map(|b| self.ids.get(&format!("<0x{b:02X}>")).copied())
            .collect();
        match found {
            Some(bytes) => out.extend(bytes),
            None => out.extend(self.unknown),
        }
    }

    /// The text of tokens; an id beyond the vocabulary has none.
    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        let mut bytes: Vec<u8> = Vec::new();
        for (i, id) in tokens.iter().enumerate() {
            let (Some(token), Some(kind)) =
                (self.tokens.get(*id as usize), self.kinds.get(*id as usize))
            else {
                continue;
            };
            let start = bytes.len();
            match (kind, &self.cutter) {
                (Kind::Unused, _) => {}
                (Kind::Whole, _) => bytes.extend(token.as_bytes()),
                (Kind::Byte, _) => bytes.extend(byte_of(token)),
                (Kind::Normal, Cutter::Merges(_)) => {
                    for c in token.chars() {
                        match byte_level(c) {
                            Some(b) => bytes.push(b),
                            None => bytes.extend(c.encode_utf8(&mut [0; 4]).as_bytes()),
                        }
                    }
                }
                (Kind::Normal, _) => bytes.extend(token.replace(SPACE, " ").as_bytes()),
            }
            // The space that was put before the text.
            let put = self.prefix || matches!(self.cutter, Cutter::Words(_));
            if i == 0 && put && bytes.get(start) == Some(&b' ') {
                bytes.remove(start);
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(super) fn size(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    /// The text of a token as the file has it.
    pub(super) fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }
}

/// `<0x41>` -> 0x41.
fn byte_of(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(hex, 16).ok()
}

/// The byte that a character of a byte-level token stands for: printable ones for themselves, the others in order
/// from U+0100 on.
fn byte_level(c: char) -> Option<u8> {
    let itself = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(c);
    match u8::try_from(code) {
        Ok(b) => itself(b).then_some(b),
        Err(_) => {
            let mut others = (0..=255u8).filter(|b| !itself(*b));
            others.nth(usize::try_from(code.checked_sub(256)?).ok()?)
        }
    }
}

fn kinds(path: &Path, meta: &GgufMetadata, tokens: &[&str]) -> Result<Vec<Kind>, ModelError> {
    let key = "tokenizer.ggml.token_type";
    let types = match meta.get(key) {
        None => &[][..],
        Some(GgufValue::List(types)) => types,
        Some(other) => {
            let found = other.brief();
            let reason = format!("{key}: expected a list of numbers, found {found}");
            return Err(fault(path, reason, AGAIN));
        }
    };
    if !types.is_empty() && types.len() != tokens.len() {
        let (expected, found) = (tokens.len(), types.len());
        let reason = format!("{key}: expected {expected} entries, found {found}");
        return Err(fault(path, reason, AGAIN));
    }
    let kind = |(i, token): (usize, &&str)| match types.get(i).map(|t| (t, t.as_u64())) {
        Some((other, None)) => {
            let found = other.brief();
            let reason = format!("{key}[{i}]: expected a number of at least 0, found {found}");
            Err(fault(path, reason, AGAIN))
        }
        _ if ENDS.contains(token) => Ok(Kind::Whole),
        Some((_, Some(number))) => Ok(Kind::from_file(number)),
        None => Ok(Kind::Normal),
    };
    tokens.iter().enumerate().map(kind).collect()
}

/// The byte-level kind, and whether texts begin with the first token when the file does not say.
fn merges_of(
    path: &Path,
    meta: &GgufMetadata,
    tokens: &[&str],
) -> Result<(Cutter, bool), ModelError> {
    let name = meta.text("tokenizer.ggml.pre").unwrap_or("default");
    let Some(pre) = PRE.iter().find(|p| p.names.contains(&name)) else {
        let known: Vec<&str> = PRE.iter().flat_map(|p| p.names).copied().collect();
        let expected = format!("one of {}", known.join(", "));
        let item = "tokenizer.ggml.pre";
        return Err(ModelError::unsupported(path, item, expected, name, CANNOT));
    };
    let merges = pairs(path, &texts(path, meta, "tokenizer.ggml.merges")?)?;
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
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for split in pre.splits {
        let pattern = SplitPattern::Regex((*split).into());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(failed)?;
        steps.push(split.into());
    }
    steps.push(ByteLevel::new(false, true, false).into());
    t.with_pre_tokenizer(Some(Sequence::new(steps)));
    Ok((Cutter::Merges(Box::new(t)), pre.add_bos))
}

fn scores(path: &Path, meta: &GgufMetadata, expected: usize) -> Result<Vec<f32>, ModelError> {
    let key = "tokenizer.ggml.scores";
    let list = meta.list(key).unwrap_or(&[]);
    if list.len() != expected {
        let found = list.len();
        let reason = format!("{key}: expected {expected} numbers, found {found} values");
        return Err(fault(path, reason, AGAIN));
    }
    let number = |(i, v): (usize, &GgufValue)| {
        let number = v.as_f64().map(|x| x as f32).filter(|x| !x.is_nan());
        number.ok_or_else(|| {
            let found = v.brief();
            let reason = format!("{key}[{i}]: expected a number, found {found}");
            fault(path, reason, AGAIN)
        })
    };
    list.iter().enumerate().map(number).collect()
}

fn texts<'a>(path: &Path, meta: &'a GgufMetadata, key: &str) -> Result<Vec<&'a str>, ModelError> {
    let list = meta.list(key);
    let list = list.ok_or_else(|| {
        let reason = format!("{key}: expected a list of texts, found none");
        fault(path, reason, AGAIN)
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
fn pairs(path: &Path, rows: &[&str]) -> Result<Vec<(String, String)>, ModelError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(pieces: &[(&str, f64, u64)], prefix: bool) -> GgufMetadata {
        let list = |of: &dyn Fn(&(&str, f64, u64)) -> GgufValue| {
            GgufValue::List(pieces.iter().map(of).collect())
        };
        let mut meta = GgufMetadata::default();
        let mut add = |key: &str, v| drop(meta.values.insert(format!("tokenizer.ggml.{key}"), v));
        add("model", GgufValue::Text("llama".into()));
        add("tokens", list(&|p| GgufValue::Text(p.0.into())));
        add("scores", list(&|p| GgufValue::Float(p.1)));
        add("token_type", list(&|p| GgufValue::Unsigned(p.2)));
        add("add_space_prefix", GgufValue::Flag(prefix));
        add("add_bos_token", GgufValue::Flag(false));
        meta
    }

    #[test]
    fn bytes_fill_gaps_and_the_space_before_a_text_comes_off_again() {
        let bytes: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
        let mut pieces: Vec<(&str, f64, u64)> = vec![("<u>", 0.0, 3)];
        pieces.extend(bytes.iter().map(|b| (b.as_str(), 0.0, 6)));
        for (piece, score) in [
            ("\u{2581}", -9.0),
            ("a", -9.0),
            ("b", -9.0),
            ("ab", -3.0),
            ("\u{2581}a", -2.0),
        ] {
            pieces.push((piece, score, 1));
        }
        let path = Path::new("m.gguf");
        let tokens = |v: &Vocabulary, text: &str| {
            let ids = v.encode(text, true).unwrap();
            let texts: Vec<&str> = ids.iter().map(|i| v.token(*i).unwrap()).collect();
            (texts.join("|"), v.decode(&ids))
        };
        let v = read(path, &meta(&pieces, false)).unwrap().unwrap();
        for (text, want) in [
            ("a ab", "a|\u{2581}a|b"),
            ("\u{e9}", "<0xC3>|<0xA9>"),
            ("ab<u>ab", "ab|<u>|ab"),
        ] {
            assert_eq!(tokens(&v, text), (want.to_string(), text.to_string()));
        }
        let v = read(path, &meta(&pieces, true)).unwrap().unwrap();
        assert_eq!(tokens(&v, "ab"), ("\u{2581}a|b".into(), "ab".into()));

        let mut short = meta(&pieces, true);
        let one = GgufValue::List(vec![GgufValue::Float(0.0)]);
        short.values.insert("tokenizer.ggml.scores".into(), one);
        let message = read(path, &short).err().unwrap().to_string();
        assert!(message.contains("tokenizer.ggml.scores"), "{message}");
    }

    #[test]
    fn what_is_wrong_in_a_vocabulary_is_named() {
        let pieces = [("<u>", 0.0, 3), ("a", 0.0, 1), ("b", -1.0, 1)];
        let refused = |key: &str, value: GgufValue| {
            let mut bad = meta(&pieces, true);
            bad.values.insert(format!("tokenizer.ggml.{key}"), value);
            read(Path::new("m.gguf"), &bad).err().map(|e| e.to_string())
        };
        let kinds = |last: GgufValue| {
            GgufValue::List(vec![GgufValue::Unsigned(1), GgufValue::Unsigned(1), last])
        };
        let floats = |last: f64| GgufValue::List([0.0, 0.0, last].map(GgufValue::Float).to_vec());
        for (key, value, words) in [
            (
                "bos_token_id",
                GgufValue::Unsigned(3),
                "bos_token_id: expected a token below 3, found 3",
            ),
            (
                "eos_token_id",
                GgufValue::Text("b".into()),
                "eos_token_id: expected a token below 3",
            ),
            (
                "unknown_token_id",
                GgufValue::Signed(-7),
                "unknown_token_id: expected a token below 3",
            ),
            (
                "token_type",
                GgufValue::Unsigned(1),
                "token_type: expected a list of numbers",
            ),
            (
                "token_type",
                kinds(GgufValue::Text("x".into())),
                "token_type[2]: expected a number",
            ),
            (
                "token_type",
                GgufValue::List(vec![GgufValue::Unsigned(1)]),
                "token_type: expected 3 entries, found 1",
            ),
            (
                "scores",
                floats(f64::NAN),
                "scores[2]: expected a number, found NaN",
            ),
        ] {
            let message = refused(key, value).unwrap_or_default();
            assert!(message.contains(words), "{message} lacks {words}");
        }
        // A writer's way to say that there is none.
        let none = GgufValue::Unsigned(u64::from(u32::MAX));
        assert_eq!(refused("eos_token_id", none), None);
        assert_eq!(refused("token_type", kinds(GgufValue::Unsigned(1))), None);
    }

    #[test]
    fn every_byte_has_its_character() {
        let alphabet = ByteLevel::alphabet();
        let back: std::collections::HashSet<u8> =
            alphabet.iter().filter_map(|c| byte_level(*c)).collect();
        assert_eq!((alphabet.len(), back.len()), (256, 256));
        assert_eq!(byte_level('\u{120}'), Some(b' '));
        assert_eq!(byte_level('\u{144}'), None);
    }
}
