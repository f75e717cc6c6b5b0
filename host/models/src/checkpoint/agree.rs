//! Whether a configuration and the tensors beside it can be one model's, for a model that no builder knows.
//!
//! A builder asks for every tensor by name and shape; here there is only what configurations have in common: how many
//! layers, how wide, how many tokens, heads and inner channels, under the names in use, in whichever section. A tensor
//! contradicts it when none of the numbers allows its shape. What a configuration does not say is not asked (sections of
//! models inside a model leave out what is their family's default), and numbers of different sections are not told apart:
//! this finds files that do not belong together, and is no proof that others do.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};

use super::{outline, Checkpoint, GgufValue, Metadata, TensorInfo};
use crate::ModelError;

const LAYERS: [&str; 5] = [
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
    "block_count",
];
/// Layers of one half, and the word that the paths of that half have.
const HALVES: [(&str, &str); 4] = [
    ("encoder_layers", "encoder"),
    ("num_encoder_layers", "encoder"),
    ("decoder_layers", "decoder"),
    ("num_decoder_layers", "decoder"),
];
/// Layers beyond the model's own, which guess ahead.
const AHEAD: [&str; 2] = ["nextn", "mtp"];
/// Layers that share their parameters, or may have none.
const OTHER_LAYERS: [&str; 2] = ["num_hidden_groups", "block_configs"];
const WIDTHS: [&str; 13] = [
    "n_embd",
    "n_embed",
    "d_model",
    "dim",
    "embed_dim",
    "embedding_size",
    "embedding_dim",
    "embedding_length",
    "emb_dim",
    "hidden_dim",
    "model_dim",
    "d_embed",
    "word_embed_proj_dim",
];
const TABLES: [&str; 8] = [
    "embed_tokens",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "embed_in",
    "token_embd",
    "lm_head",
    "embed_out",
];
const QUERIES: [&str; 2] = ["q_proj", "wq"];
const KEYS: [&str; 4] = ["k_proj", "v_proj", "wk", "wv"];
const INNER: [&str; 2] = ["gate_proj", "up_proj"];
const NORMS: [&str; 7] = [
    "input_layernorm",
    "post_attention_layernorm",
    "ln_1",
    "ln_2",
    "layer_norm1",
    "layer_norm2",
    "self_attn_layer_norm",
];
const BOTH: &str = "config and checkpoint do not belong together: get both again";

impl Checkpoint {
    /// Refuses a configuration that contradicts the tensors: the first one that it does not allow.
    pub fn agrees_with_config(&self) -> Result<(), ModelError> {
        let said = Numbers::of(&self.metadata);
        let tensors: Vec<(String, TensorInfo)> = self
            .tensor_infos()
            .filter(|t| outline::values(t.dtype))
            .filter_map(|t| {
                let (path, param) = self.place(&t.name);
                (param == "weight").then_some((path, t))
            })
            .collect();
        self.layers_agree(&said)?;
        for (path, tensor) in &tensors {
            let fault = said.fault(path, &tensor.dims);
            if let Some(expected) = fault {
                return Err(ModelError::tensor(
                    &self.metadata_path(),
                    &tensor.name,
                    expected,
                    format!("shape {:?}", tensor.dims),
                    BOTH,
                ));
            }
        }
        Ok(())
    }

    /// Every number of layers that the configuration gives is that of a stack.
    fn layers_agree(&self, said: &Numbers) -> Result<(), ModelError> {
        let mut stacks: BTreeMap<String, Stack> = BTreeMap::new();
        for tensor in self.tensor_infos() {
            let (path, _) = self.place(&tensor.name);
            let parts: Vec<&str> = path.split('.').collect();
            let numbered = parts.iter().position(|p| p.parse::<usize>().is_ok());
            let Some((at, i)) = numbered.and_then(|at| Some((at, parts[at].parse().ok()?))) else {
                continue;
            };
            let stack = stacks.entry(parts[..at].join(".")).or_default();
            stack.layers.insert(i);
            stack.tensors += 1;
        }
        let most = stacks.values().map(|s| s.tensors).max().unwrap_or(0);
        stacks.retain(|_, s| s.tensors.saturating_mul(10) >= most);
        if said.has(&OTHER_LAYERS) {
            return Ok(());
        }
        let ahead: usize = said.with(|key| AHEAD.iter().any(|a| key.contains(a)));
        for (section, key, count) in &said.all {
            let half = HALVES.iter().find(|(name, _)| name == key).map(|(_, w)| *w);
            // One number for both halves is that of either.
            let whole = LAYERS.iter().any(|n| is(key, n)) && !said.has(&HALVES.map(|(n, _)| n));
            if !whole && half.is_none() {
                continue;
            }
            let words: Vec<&str> = match (half, section.as_str()) {
                (Some(word), _) => vec![word],
                (None, "") => Vec::new(),
                (None, s) if ["text", "llm", "lang"].iter().any(|w| s.contains(w)) => Vec::new(),
                (None, s) if s.contains("vis") || s.contains("image") => vec!["vis", "image"],
                (None, s) => vec![s.strip_suffix("_config").unwrap_or(s)],
            };
            let of_part = |path: &str| {
                words.is_empty() || words.iter().any(|w| path.to_ascii_lowercase().contains(w))
            };
            let candidates: Vec<(&String, &Stack)> =
                stacks.iter().filter(|(p, _)| of_part(p)).collect();
            // A part that is not in the file is none that contradicts it.
            if candidates.is_empty() {
                continue;
            }
            let fits = |s: &Stack| (*count..=count.saturating_add(ahead)).contains(&s.size());
            let fitting = candidates.iter().find(|(_, s)| fits(s));
            let (item, expected, found) = match fitting {
                Some((path, stack)) => match (0..*count).find(|i| !stack.layers.contains(i)) {
                    None => continue,
                    Some(hole) => (
                        format!("{path}.{hole}"),
                        format!("tensors of layer {hole}, one of {count}, as `{key}` says"),
                        "none".to_string(),
                    ),
                },
                None => {
                    let (path, _) = candidates[0];
                    let sizes: Vec<String> = candidates
                        .iter()
                        .map(|(path, s)| format!("{} at `{path}`", s.size()))
                        .collect();
                    (
                        format!("{path}.0"),
                        format!("{count} layers, as `{key}` says"),
                        sizes.join(", "),
                    )
                }
            };
            let path = self.metadata_path();
            return Err(ModelError::tensor(&path, &item, expected, found, BOTH));
        }
        Ok(())
    }
}

/// Modules that are numbered beside each other.
#[derive(Default)]
struct Stack {
    layers: BTreeSet<usize>,
    tensors: usize,
}

impl Stack {
    fn size(&self) -> usize {
        self.layers.last().map_or(0, |n| n.saturating_add(1))
    }
}

/// Whether a key is this name, whatever stands before it in a GGUF.
fn is(key: &str, name: &str) -> bool {
    key.strip_suffix(name)
        .is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

/// Every positive whole number of a configuration: section, key, number.
struct Numbers {
    all: Vec<(String, String, usize)>,
    keys: BTreeSet<String>,
    /// Sections that are models.
    models: Vec<String>,
}

impl Numbers {
    fn of(metadata: &Metadata) -> Numbers {
        let mut numbers = Numbers {
            all: Vec::new(),
            keys: BTreeSet::new(),
            models: Vec::new(),
        };
        match metadata {
            Metadata::Config(map) => numbers.object("", map),
            Metadata::Gguf(meta) => {
                let architecture = meta.text("general.architecture").unwrap_or_default();
                for (key, value) in &meta.values {
                    let own = key
                        .strip_prefix(architecture)
                        .and_then(|k| k.strip_prefix('.'));
                    let Some(key) = own else { continue };
                    let values = match value {
                        GgufValue::List(list) => list.as_slice(),
                        one => std::slice::from_ref(one),
                    };
                    for n in values.iter().filter_map(GgufValue::as_u64) {
                        numbers.add("", key, n);
                    }
                }
                // The list of tokens is the vocabulary, whatever is said beside it.
                if let Some(tokens) = meta.list("tokenizer.ggml.tokens") {
                    numbers.add("", "vocab_size", tokens.len() as u64);
                }
            }
        }
        numbers
    }

    fn object(&mut self, section: &str, map: &Map<String, Json>) {
        if !section.is_empty() && map.contains_key("model_type") {
            self.models.push(section.into());
        }
        for (key, value) in map {
            self.keys.insert(key.clone());
            match value {
                Json::Object(inner) => self.object(key, inner),
                Json::Array(list) => {
                    let found: Vec<u64> = list.iter().filter_map(Json::as_u64).collect();
                    found.into_iter().for_each(|n| self.add(section, key, n));
                }
                one => {
                    if let Some(n) = one.as_u64() {
                        self.add(section, key, n);
                    }
                }
            }
        }
    }

    fn add(&mut self, section: &str, key: &str, n: u64) {
        self.keys.insert(key.into());
        if let Some(n) = usize::try_from(n).ok().filter(|n| *n > 0) {
            self.all.push((section.into(), key.into(), n));
        }
    }

    fn has(&self, names: &[&str]) -> bool {
        names.iter().any(|n| self.keys.contains(*n))
    }

    /// The sum of the numbers under such keys.
    fn with(&self, wanted: impl Fn(&str) -> bool) -> usize {
        let found = self.all.iter().filter(|(_, key, _)| wanted(key));
        found.fold(0usize, |sum, (_, _, n)| sum.saturating_add(*n))
    }

    /// The numbers under such keys, and the first of these keys. None where a section says none: its family's default
    /// is not known.
    fn under(&self, wanted: impl Fn(&str) -> bool) -> (BTreeSet<usize>, String) {
        let says = |model: &String| self.all.iter().any(|(s, key, _)| s == model && wanted(key));
        if !self.models.iter().all(says) {
            return (BTreeSet::new(), String::new());
        }
        self.said(wanted)
    }

    fn said(&self, wanted: impl Fn(&str) -> bool) -> (BTreeSet<usize>, String) {
        let found = self.all.iter().filter(|(_, key, _)| wanted(key));
        let mut first = String::new();
        let numbers = found.map(|(_, key, n)| {
            if first.is_empty() {
                first.clone_from(key);
            }
            *n
        });
        let numbers = numbers.collect();
        (numbers, first)
    }

    fn anywhere(&self, n: usize) -> bool {
        self.all.iter().any(|(_, _, said)| *said == n)
    }

    /// What a weight of this path and these dims should be, when it is something else.
    fn fault(&self, path: &str, dims: &[usize]) -> Option<String> {
        let name = path.rsplit('.').next().unwrap_or(path);
        let (widths, width) =
            self.under(|k| k.ends_with("hidden_size") || WIDTHS.iter().any(|w| is(k, w)));
        match dims {
            [rows, columns] if TABLES.contains(&name) => {
                let (tokens, key) = self.under(|k| k.ends_with("vocab_size") || is(k, "n_vocab"));
                let (multiples, _) = self.said(|k| k.contains("vocab") && k.contains("multiple"));
                let fits = |said: &usize| {
                    // One more for what stands for no token.
                    let more = rows.checked_sub(*said);
                    let padded = |m: &usize| said.checked_next_multiple_of(*m) == Some(*rows);
                    matches!(more, Some(0 | 1)) || multiples.iter().any(padded)
                };
                if !tokens.is_empty() && !tokens.iter().any(fits) {
                    return Some(format!("{} rows, as `{key}` says", list(&tokens)));
                }
                let fits = widths.contains(columns) || widths.is_empty();
                (!fits).then(|| format!("{} columns, as `{width}` says", list(&widths)))
            }
            [rows, columns] if QUERIES.contains(&name) || KEYS.contains(&name) => {
                if !widths.is_empty() && !self.anywhere(*columns) {
                    return Some(format!("{} columns, as `{width}` says", list(&widths)));
                }
                self.heads(*rows, QUERIES.contains(&name), &widths)
            }
            [rows, _] if INNER.contains(&name) => {
                let (inner, key) = self.under(|k| {
                    k.contains("intermediate_size") || k.contains("feed_forward_length")
                });
                let several = ["expert", "moe", "double_wide"];
                let several = self
                    .keys
                    .iter()
                    .any(|k| several.iter().any(|s| k.contains(s)));
                let fits = |n: &usize| rows == n || (several && rows.is_multiple_of(*n));
                let fits = inner.is_empty() || inner.iter().any(fits) || self.anywhere(*rows);
                (!fits).then(|| format!("{} rows, as `{key}` says", list(&inner)))
            }
            [n] if in_layer(path) && NORMS.contains(&name) => {
                let fits = widths.is_empty() || self.anywhere(*n);
                (!fits).then(|| format!("{} values, as `{width}` says", list(&widths)))
            }
            _ => None,
        }
    }

    /// What the rows of a projection to heads should be, when they are something else.
    fn heads(&self, rows: usize, query: bool, widths: &BTreeSet<usize>) -> Option<String> {
        let few = [
            "key_value_heads",
            "kv_heads",
            "head_count_kv",
            "query_groups",
        ];
        let (few, few_key) = self.under(|k| few.iter().any(|f| k.contains(f)));
        let many = ["num_attention_heads", "attention_heads", "num_heads"];
        let (many, many_key) = self.under(|k| {
            let whole = is(k, "n_head") || is(k, "n_heads") || is(k, "head_count");
            whole || many.iter().any(|m| k.contains(m))
        });
        let sizes = [
            "head_dim",
            "key_length",
            "value_length",
            "d_kv",
            "d_head",
            "kv_channels",
            "head_size",
        ];
        let (mut each, each_key) = self.said(|k| sizes.iter().any(|s| k.contains(s)));
        if many.is_empty() || widths.is_empty() || (few.is_empty() && each.is_empty()) {
            return None;
        }
        // A section that does not say how many share a head has its family's default.
        if few.is_empty() && !self.models.is_empty() {
            return None;
        }
        let parts: Vec<usize> = each.iter().copied().collect();
        let in_parts = self.keys.iter().any(|k| k.contains("rope_head_dim"));
        if in_parts {
            let sums = parts.iter().flat_map(|a| parts.iter().map(move |b| a + b));
            each.extend(sums);
        }
        let sections: BTreeSet<&String> = self
            .all
            .iter()
            .filter(|(_, k, _)| k.contains("head"))
            .map(|(section, ..)| section)
            .collect();
        if each.is_empty() || sections.len() > 1 {
            let divided = widths.iter().flat_map(|w| {
                many.iter()
                    .filter(|h| w.is_multiple_of(**h))
                    .map(move |h| w / h)
            });
            each.extend(divided);
        }
        let counts: BTreeSet<usize> = match query || few.is_empty() {
            true => many.clone(),
            false => few.union(&many).copied().collect(),
        };
        // A gate beside each head makes twice as many rows.
        let times: &[usize] = if query { &[1, 2] } else { &[1] };
        let fits = counts.iter().any(|n| {
            let whole = |d: &usize| n.checked_mul(*d);
            each.iter()
                .filter_map(whole)
                .any(|all| times.iter().any(|t| all.checked_mul(*t) == Some(rows)))
        });
        // A width that is said elsewhere is somebody's.
        if fits || (few.is_empty() && self.anywhere(rows)) {
            return None;
        }
        let key = match query || few.is_empty() {
            true => many_key,
            false => few_key,
        };
        let size = match each_key.is_empty() {
            true => "the width for each".to_string(),
            false => format!("`{each_key}`"),
        };
        Some(format!(
            "{} heads of {} rows, as `{key}` and {size} say",
            list(&counts),
            list(&each)
        ))
    }
}

/// Whether a module stands directly in a numbered one.
fn in_layer(path: &str) -> bool {
    let mut parts = path.rsplit('.').skip(1);
    parts.next().is_some_and(|p| p.parse::<usize>().is_ok())
}

fn list(numbers: &BTreeSet<usize>) -> String {
    let texts: Vec<String> = numbers.iter().take(8).map(usize::to_string).collect();
    texts.join(" or ")
}
