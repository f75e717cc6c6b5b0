//! Decoders with rotary attention and a gated FFN: parameters, module tree and graph from a [`DecoderConfig`].
//!
//! Families differ only in their [`Dialect`]; everything here is shared. Paths and parameter names are the published
//! ones, also for GGUF files, so that bindings, receipts and structures speak one language.

pub(crate) mod graph;
mod names;
pub(crate) mod tree;
pub(crate) mod weave;

use std::sync::Arc;

use crate::checkpoint::{Checkpoint, Metadata};
use crate::config::{DecoderConfig, Dialect, QkNorm};
use crate::families::Blueprint;
use crate::params::{ParamMap, ParamSpec, RowOrder};
use crate::ModelError;

pub use graph::{LOGITS, POSITIONS, TOKENS};

pub(crate) const HEAD: &str = "lm_head";

/// Describes the decoder in a checkpoint. Reads no weight, except a GGUF's small table of rotary divisors.
pub fn build(checkpoint: &Checkpoint, dialect: &Dialect) -> Result<Blueprint, ModelError> {
    let mut config = DecoderConfig::read(checkpoint, dialect)?;
    let gguf = matches!(checkpoint.metadata(), Metadata::Gguf(_));
    let mut specs = specs(&config, gguf, dialect.gguf_permuted_qk);
    let there = |tensor: &str| checkpoint.tensor_info(tensor).is_some();
    let stored_as_built =
        |specs: &[ParamSpec]| specs.iter().flat_map(|s| &s.tensors).any(|t| there(t));
    if let Some(within) = dialect.within {
        let named = stored_as_built(&specs);
        for tensor in specs.iter_mut().flat_map(|s| &mut s.tensors) {
            if let Some(rest) = tensor.strip_prefix(config.root).filter(|_| !named) {
                *tensor = format!("{}{rest}", within.stored);
            }
        }
    }
    // What was saved without its head has no name in front of its modules' names.
    if !gguf && !stored_as_built(&specs) {
        let front = format!("{}.", config.root);
        for tensor in specs.iter_mut().flat_map(|s| &mut s.tensors) {
            if let Some(rest) = tensor.strip_prefix(&front).filter(|rest| there(rest)) {
                *tensor = rest.to_string();
            }
        }
    }
    let params = params(checkpoint, &mut config, specs)?;
    let tree = tree::tree(&config, dialect, &params);
    let graph = graph::graph(&config);
    structures_graph::check(&graph)?;
    Ok(Blueprint {
        config,
        tree,
        graph: Arc::new(graph),
        params: Arc::new(params),
        pictures: None,
    })
}

/// Finds every parameter, ties the head, and notes what nobody reads.
pub(crate) fn params(
    checkpoint: &Checkpoint,
    config: &mut DecoderConfig,
    specs: Vec<ParamSpec>,
) -> Result<ParamMap, ModelError> {
    let gguf = matches!(checkpoint.metadata(), Metadata::Gguf(_));
    // The embedding comes first; what its name starts with is what those of the layers do.
    let first = specs.first().and_then(|s| s.tensors.first());
    let root = first.and_then(|t| t.strip_suffix("embed_tokens.weight"));
    let root = root.map(|r| r.trim_end_matches('.'));
    let root = root.unwrap_or(config.root).to_string();
    let mut params = ParamMap::check(checkpoint, specs)?;
    if config.tied_head {
        params.tie((HEAD, "weight"), (&config.embed(), "weight"));
    }
    let unused: Vec<String> = params
        .unused(checkpoint)
        .into_iter()
        .filter(|t| !t.ends_with("rotary_emb.inv_freq") && t != "rope_freqs.weight")
        .collect();
    no_layer_is_left_over(checkpoint, config, &root, &unused, gguf)?;
    no_bias_is_left_over(checkpoint, config, &root, &unused, gguf)?;
    nothing_is_left_over_in_a_layer(checkpoint, config, &root, &unused, gguf)?;
    if let Some(first) = unused.first() {
        let note = format!(
            "{} tensors that the model does not read, `{first}` first",
            unused.len()
        );
        tracing::warn!(checkpoint = %checkpoint.path().display(), "{note}");
        config.notes.push(note);
    }
    Ok(params)
}

/// Tensors nobody reads are a note, except those of whole layers: a model cut short would answer, and answer wrongly.
fn no_layer_is_left_over(
    checkpoint: &Checkpoint,
    config: &DecoderConfig,
    root: &str,
    unused: &[String],
    gguf: bool,
) -> Result<(), ModelError> {
    let beyond = unused.iter().find_map(|name| {
        let i = names::layer_of(root, name, gguf)?;
        (i >= config.layers).then_some((name, i))
    });
    let Some((name, i)) = beyond else {
        return Ok(());
    };
    let dims = checkpoint.tensor_info(name).map(|t| t.dims);
    Err(ModelError::tensor(
        checkpoint.path(),
        name,
        format!("only layers below {}, as the config says", config.layers),
        format!("layer {i}, shape {:?}", dims.unwrap_or_default()),
        "config and checkpoint do not belong together: get both again",
    ))
}

/// A bias nobody adds gives wrong numbers too.
fn no_bias_is_left_over(
    checkpoint: &Checkpoint,
    config: &DecoderConfig,
    root: &str,
    unused: &[String],
    gguf: bool,
) -> Result<(), ModelError> {
    let bias = unused
        .iter()
        .find(|name| name.ends_with(".bias") && names::layer_of(root, name, gguf).is_some());
    match bias {
        None => Ok(()),
        Some(name) => Err(ModelError::tensor(
            checkpoint.path(),
            name,
            format!(
                "no bias there, as the config of a {} says",
                config.model_type
            ),
            "one",
            "correct the config (attention_bias, mlp_bias), or get both again",
        )),
    }
}

/// What layers may hold that changes no number here: scales of a cache that is not kept in eight bits.
const UNREAD_IN_LAYERS: [&str; 4] = ["k_scale", "v_scale", "q_scale", "prob_scale"];

/// Another norm, a gate, an adapter: whatever a layer holds beside what the family knows was there for a reason.
fn nothing_is_left_over_in_a_layer(
    checkpoint: &Checkpoint,
    config: &DecoderConfig,
    root: &str,
    unused: &[String],
    gguf: bool,
) -> Result<(), ModelError> {
    let read = |name: &&String| {
        let param = name.rsplit('.').next().unwrap_or(name);
        UNREAD_IN_LAYERS.contains(&param) || names::layer_of(root, name, gguf).is_none()
    };
    let Some(name) = unused.iter().find(|name| !read(name)) else {
        return Ok(());
    };
    let dims = checkpoint.tensor_info(name).map(|t| t.dims);
    Err(ModelError::tensor(
        checkpoint.path(),
        name,
        format!(
            "only parameters that the layers of a {} have",
            config.model_type
        ),
        format!("one of another name, shape {:?}", dims.unwrap_or_default()),
        "without it the model would answer wrongly: correct the config's model_type, or save the model without it",
    ))
}

/// A linear module: path below its parent, output and input width, bias.
pub(crate) type Linear = (&'static str, usize, usize, bool);

/// The linear modules of attention, definition order.
fn attention_linears(c: &DecoderConfig) -> Vec<Linear> {
    let d = c.hidden_size;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let out = ("o_proj", d, q, c.o_bias);
    match c.fused {
        true => vec![out, ("qkv_proj", q + 2 * kv, d, c.qkv_bias)],
        false => vec![
            ("q_proj", q, d, c.qkv_bias),
            ("k_proj", kv, d, c.qkv_bias),
            ("v_proj", kv, d, c.qkv_bias),
            out,
        ],
    }
}

/// The linear modules of an FFN of this inner width, definition order.
pub(crate) fn ffn_linears(c: &DecoderConfig, inner: usize) -> Vec<Linear> {
    let (d, f, bias) = (c.hidden_size, inner, c.mlp_bias);
    let down = ("down_proj", d, f, bias);
    match c.fused {
        true => vec![("gate_up_proj", 2 * f, d, bias), down],
        false => vec![("gate_proj", f, d, bias), ("up_proj", f, d, bias), down],
    }
}

/// The norms of q and k: path below attention, width.
fn qk_norms(c: &DecoderConfig) -> Vec<(&'static str, usize)> {
    let (q, k) = match c.qk_norm {
        QkNorm::None => return Vec::new(),
        QkNorm::Head => (1, 1),
        QkNorm::Whole => (c.heads, c.kv_heads),
    };
    vec![("q_norm", q * c.head_dim), ("k_norm", k * c.head_dim)]
}

/// The norms of the stream in a layer, definition order.
fn layer_norms(c: &DecoderConfig) -> Vec<&'static str> {
    let [a, b] = graph::attention_norms(c.norms);
    let [x, y] = graph::ffn_norms(c.norms);
    // The first of the FFN is defined after the last of attention, whichever of them there are.
    [a, b, x, y].into_iter().flatten().collect()
}

/// Every parameter, definition order.
pub(crate) fn specs(c: &DecoderConfig, gguf: bool, permuted: bool) -> Vec<ParamSpec> {
    let mut specs = Vec::new();
    let mut add = |path: String, name: &'static str, dims: Vec<usize>| {
        let tensor = match gguf {
            true => names::gguf(c, &path, name),
            false => format!("{path}.{name}"),
        };
        let heads = match path.rsplit('.').next() {
            Some("q_proj") => Some(c.heads),
            Some("k_proj") => Some(c.kv_heads),
            _ => None,
        };
        let rows = match heads {
            Some(heads) if gguf && permuted => RowOrder::AdjacentPairs { heads },
            _ => RowOrder::Published,
        };
        specs.push(ParamSpec {
            path,
            name,
            dims,
            tensors: vec![tensor],
            rows,
        });
    };
    let d = c.hidden_size;
    add(c.embed(), "weight", vec![c.vocab_size, d]);
    for i in 0..c.layers {
        let at = c.layer(i);
        let attention = attention_linears(c);
        let ffn = ffn_linears(c, c.intermediate_size);
        let linears = attention
            .iter()
            .map(|l| ("self_attn", l))
            .chain(ffn.iter().map(|l| ("mlp", l)));
        for (parent, (name, out, input, bias)) in linears {
            let path = format!("{at}.{parent}.{name}");
            add(path.clone(), "weight", vec![*out, *input]);
            if *bias {
                add(path, "bias", vec![*out]);
            }
        }
        for name in layer_norms(c) {
            add(format!("{at}.{name}"), "weight", vec![d]);
        }
        for (name, width) in qk_norms(c) {
            add(format!("{at}.self_attn.{name}"), "weight", vec![width]);
        }
    }
    add(c.final_norm(), "weight", vec![d]);
    if !c.tied_head {
        add(HEAD.into(), "weight", vec![c.vocab_size, d]);
    }
    specs
}
