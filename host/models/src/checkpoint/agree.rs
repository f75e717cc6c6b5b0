//! Whether a configuration and the tensors beside it can be one model's, for a model that no builder knows.
//!
//! A builder asks for every tensor by name and shape; here there is only what configurations have in common: how many
//! layers, how wide, how many tokens, heads and inner channels, under the names in use, in whichever section. A tensor
//! contradicts it when none of the numbers allows its shape. What a configuration does not say is not asked (sections of
//! models inside a model leave out what is their family's default), and numbers of different sections are not told apart:
//! this finds files that do not belong together, and is no proof that others do.

use std::collections::{BTreeMap, BTreeSet};

use indexmap::IndexMap;
use serde_json::{Map, Value as Json};
use structures_graph::tree::{family_template, parent_path};

use super::{outline, Checkpoint, GgufValue, Metadata, TensorInfo};
use crate::ModelError;

const LAYERS: [&str; 5] = [
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
    "block_count",
];
/// What the modules that hold a model's layers are called, and a part of what stands in each.
const STACKS: [&str; 5] = ["layers", "layer", "h", "blocks", "block"];
const INSIDE: [&str; 5] = ["attn", "attention", "mixer", "mlp", "ffn"];
/// Keys by which one number is not that of the layers in the file: halves, loops, shared or empty layers.
const OTHER_LAYERS: [&str; 6] = [
    "encoder_layers",
    "decoder_layers",
    "loop",
    "recurren",
    "hidden_groups",
    "block_configs",
];
/// Layers beyond the model's own, which guess ahead.
const AHEAD: [&str; 2] = ["nextn", "mtp"];
/// Parts of the paths of what is no text.
const OTHER_PARTS: [&str; 5] = ["vis", "image", "audio", "speech", "mtp"];
const WIDTHS: [&str; 10] = [
    "n_embd",
    "n_embed",
    "d_model",
    "dim",
    "embed_dim",
    "embedding_dim",
    "embedding_length",
    "emb_dim",
    "model_dim",
    "word_embed_proj_dim",
];
const TABLES: [&str; 7] = [
    "embed_tokens",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "embed_in",
    "lm_head",
    "embed_out",
];
const ATTENTION: [&str; 2] = ["self_attn", "attn"];
const FFN: [&str; 1] = ["mlp"];
const QUERY: &str = "q_proj";
const KEYS: [&str; 2] = ["k_proj", "v_proj"];
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
/// Numbers of heads and their sizes that are not those of attention.
const OTHER_HEADS: [&str; 4] = ["mamba", "ssm", "linear", "index"];
const BOTH: &str = "config and checkpoint do not belong together: get both again";

impl Checkpoint {
    /// Refuses a configuration that contradicts the tensors: the first one that it does not allow, where it allows the
    /// same tensor of no layer.
    pub fn agrees_with_config(&self) -> Result<(), ModelError> {
        let said = Numbers::of(&self.metadata);
        self.layers_agree(&said)?;
        let mut wrong: IndexMap<String, Option<(TensorInfo, String)>> = IndexMap::new();
        for tensor in self.tensor_infos().filter(|t| outline::values(t.dtype)) {
            let (path, param) = self.place(&tensor.name);
            if param != "weight" {
                continue;
            }
            let (family, _) = family_template(&path);
            match (said.fault(&path, &tensor.dims), wrong.get(&family)) {
                (None, _) => drop(wrong.insert(family, None)),
                (Some(expected), None) => drop(wrong.insert(family, Some((tensor, expected)))),
                (Some(_), Some(_)) => {}
            }
        }
        match wrong.into_values().flatten().next() {
            None => Ok(()),
            Some((tensor, expected)) => Err(ModelError::tensor(
                &self.metadata_path(),
                &tensor.name,
                expected,
                format!("shape {:?}", tensor.dims),
                BOTH,
            )),
        }
    }

    /// The number of layers is that of the stack, where there is one of each.
    fn layers_agree(&self, said: &Numbers) -> Result<(), ModelError> {
        let Some((count, key)) = said.layers() else {
            return Ok(());
        };
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
            let rest = &parts[at + 1..];
            stack.whole |= rest.iter().any(|p| INSIDE.iter().any(|w| p.contains(w)));
        }
        let text = |path: &str| {
            let path = path.to_ascii_lowercase();
            !OTHER_PARTS.iter().any(|w| path.contains(w))
        };
        stacks.retain(|path, _| text(path));
        let most = stacks.values().map(|s| s.tensors).max().unwrap_or(0);
        stacks.retain(|_, s| s.tensors.saturating_mul(10) >= most);
        let mut left = stacks.into_iter();
        let (Some((path, stack)), None) = (left.next(), left.next()) else {
            return Ok(());
        };
        let name = path.rsplit('.').next().unwrap_or(&path);
        if !stack.whole || !STACKS.contains(&name) {
            return Ok(());
        }
        let size = stack.layers.last().map_or(0, |n| n.saturating_add(1));
        let ahead = said.sum(|key| AHEAD.iter().any(|a| key.contains(a)));
        let hole = (0..size).find(|i| !stack.layers.contains(i));
        let (item, expected, found) = match hole {
            _ if !(count..=count.saturating_add(ahead)).contains(&size) => (
                format!("{path}.{}", size.saturating_sub(1)),
                format!("{count} layers, as `{key}` says"),
                format!("{size} at `{path}`"),
            ),
            Some(i) => (
                format!("{path}.{i}"),
                format!("tensors of layer {i}, one of {count}, as `{key}` says"),
                "none".to_string(),
            ),
            None => return Ok(()),
        };
        let file = self.metadata_path();
        Err(ModelError::tensor(&file, &item, expected, found, BOTH))
    }
}

/// Modules that are numbered beside each other.
#[derive(Default)]
struct Stack {
    layers: BTreeSet<usize>,
    tensors: usize,
    /// They hold what layers hold.
    whole: bool,
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

    /// How many layers the text has, and the key that says so, where nothing says another number.
    fn layers(&self) -> Option<(usize, String)> {
        let other = |key: &String| OTHER_LAYERS.iter().any(|w| key.contains(w));
        if self.keys.iter().any(other) {
            return None;
        }
        // Beside sections that are models the number of the whole is nobody's.
        let text = |section: &str| match self.models.is_empty() {
            true => section.is_empty(),
            false => ["text", "llm", "lang"].iter().any(|w| section.contains(w)),
        };
        let mut found = self
            .all
            .iter()
            .filter(|(section, key, _)| text(section) && LAYERS.iter().any(|n| is(key, n)));
        let (_, key, count) = found.next()?;
        found
            .all(|(_, _, n)| n == count)
            .then(|| (*count, key.clone()))
    }

    /// The sum of the numbers under such keys.
    fn sum(&self, wanted: impl Fn(&str) -> bool) -> usize {
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
        let (widths, width) = self.under(|k| {
            let whole = k.ends_with("hidden_size") || k.ends_with("embedding_size");
            whole || WIDTHS.iter().any(|w| is(k, w))
        });
        let odd = |n: &usize| !widths.is_empty() && !self.anywhere(*n);
        match dims {
            [rows, columns] if TABLES.contains(&name) => {
                let (tokens, key) = self.under(|k| k.ends_with("vocab_size") || is(k, "n_vocab"));
                let (multiples, _) = self.said(|k| k.contains("vocab") && k.contains("multiple"));
                let fits = |said: &usize| {
                    // Some tables have a few rows more than there are tokens.
                    let few = (said / 64).max(1);
                    let padded = |m: &usize| said.checked_next_multiple_of(*m) == Some(*rows);
                    let more = rows.checked_sub(*said);
                    more.is_some_and(|n| n <= few) || multiples.iter().any(padded)
                };
                if !tokens.is_empty() && !tokens.iter().any(fits) {
                    return Some(format!("{} rows, as `{key}` says", list(&tokens)));
                }
                odd(columns).then(|| format!("{} columns, as `{width}` says", list(&widths)))
            }
            [rows, columns] if name == QUERY || KEYS.contains(&name) => {
                if !stands_in(path, &ATTENTION) {
                    return None;
                }
                if odd(columns) {
                    return Some(format!("{} columns, as `{width}` says", list(&widths)));
                }
                self.heads(*rows, name == QUERY, &widths)
            }
            [rows, _] if INNER.contains(&name) && stands_in(path, &FFN) => {
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
                odd(n).then(|| format!("{} values, as `{width}` says", list(&widths)))
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
        let other = |k: &str| OTHER_HEADS.iter().any(|w| k.contains(w));
        let (few, few_key) = self.under(|k| few.iter().any(|f| k.contains(f)) && !other(k));
        let many = ["num_attention_heads", "attention_heads", "num_heads"];
        let (many, many_key) = self.under(|k| {
            let whole = is(k, "n_head") || is(k, "n_heads") || is(k, "head_count");
            (whole || many.iter().any(|m| k.contains(m))) && !other(k)
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
        let (mut each, each_key) = self.said(|k| sizes.iter().any(|s| k.contains(s)) && !other(k));
        // Heads of another kind may stand under the same names.
        each.extend(
            self.said(|k| sizes.iter().any(|s| k.contains(s)) && other(k))
                .0,
        );
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
            let divided = widths
                .iter()
                .flat_map(|w| many.iter().map(move |h| w / h).filter(|d| *d > 0));
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

/// Whether a module stands in one of these names in a numbered one.
fn stands_in(path: &str, names: &[&str]) -> bool {
    let above = parent_path(path);
    let name = above.rsplit('.').next().unwrap_or(above);
    names.contains(&name) && in_layer(above)
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
