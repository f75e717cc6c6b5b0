//! Decoders with rotary attention and a gated FFN: parameters, module tree and graph from a [`DecoderConfig`].
//!
//! Families differ only in their [`Dialect`]; everything here is shared. Paths and parameter names are the published
//! ones, also for GGUF files, so that bindings, receipts and structures speak one language.

mod graph;
mod names;
mod tree;

use std::sync::Arc;

use crate::checkpoint::{Checkpoint, Metadata};
use crate::config::{DecoderConfig, Dialect};
use crate::families::Blueprint;
use crate::params::{ParamMap, ParamSpec, RowOrder};
use crate::ModelError;

pub(crate) const EMBED: &str = "model.embed_tokens";
pub(crate) const FINAL_NORM: &str = "model.norm";
pub(crate) const HEAD: &str = "lm_head";

/// Layers beyond this are no model but a damaged number.
const MAX_LAYERS: usize = 10_000;

/// Describes the decoder in a checkpoint. Reads no weight, except a GGUF's small table of rotary divisors.
pub fn build(checkpoint: &Checkpoint, dialect: &Dialect) -> Result<Blueprint, ModelError> {
    let config = DecoderConfig::read(checkpoint, dialect)?;
    if config.layers > MAX_LAYERS {
        return Err(ModelError::malformed(
            &checkpoint.metadata_path(),
            "number of layers",
            format!("at most {MAX_LAYERS}"),
            config.layers.to_string(),
            "correct the file or get it again",
        ));
    }
    let gguf = matches!(checkpoint.metadata(), Metadata::Gguf(_));
    let mut params = ParamMap::check(checkpoint, specs(&config, gguf, dialect.gguf_permuted_qk))?;
    if config.tied_head {
        params.tie((HEAD, "weight"), (EMBED, "weight"));
    }
    let unused: Vec<String> = params
        .unused(checkpoint)
        .into_iter()
        .filter(|t| !t.ends_with("rotary_emb.inv_freq") && t != "rope_freqs.weight")
        .collect();
    no_layer_is_left_over(checkpoint, &config, &unused, gguf)?;
    let mut config = config;
    if let Some(first) = unused.first() {
        let note = format!(
            "{} tensors that the model does not read, `{first}` first",
            unused.len()
        );
        tracing::warn!(checkpoint = %checkpoint.path().display(), "{note}");
        config.notes.push(note);
    }
    let tree = tree::tree(&config, dialect, &params);
    let graph = graph::graph(&config);
    structures_graph::check(&graph)?;
    Ok(Blueprint {
        config,
        tree,
        graph: Arc::new(graph),
        params: Arc::new(params),
    })
}

/// Tensors nobody reads are a note, except those of whole layers: a model cut short would answer, and answer wrongly.
fn no_layer_is_left_over(
    checkpoint: &Checkpoint,
    config: &DecoderConfig,
    unused: &[String],
    gguf: bool,
) -> Result<(), ModelError> {
    let beyond = unused.iter().find_map(|name| {
        let i = names::layer_of(name, gguf)?;
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

/// The linear modules of a layer: path below it, output and input width, bias.
fn projections(c: &DecoderConfig) -> [(&'static str, usize, usize, bool); 7] {
    let (d, f) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    [
        ("self_attn.q_proj", q, d, c.qkv_bias),
        ("self_attn.k_proj", kv, d, c.qkv_bias),
        ("self_attn.v_proj", kv, d, c.qkv_bias),
        ("self_attn.o_proj", d, q, c.o_bias),
        ("mlp.gate_proj", f, d, c.mlp_bias),
        ("mlp.up_proj", f, d, c.mlp_bias),
        ("mlp.down_proj", d, f, c.mlp_bias),
    ]
}

/// The norms of a layer: path below it, width.
fn norms(c: &DecoderConfig) -> Vec<(&'static str, usize)> {
    let mut norms = vec![
        ("input_layernorm", c.hidden_size),
        ("post_attention_layernorm", c.hidden_size),
    ];
    if c.qk_norm {
        norms.push(("self_attn.q_norm", c.head_dim));
        norms.push(("self_attn.k_norm", c.head_dim));
    }
    norms
}

fn layer(i: usize) -> String {
    format!("model.layers.{i}")
}

/// Every parameter, definition order.
fn specs(c: &DecoderConfig, gguf: bool, permuted: bool) -> Vec<ParamSpec> {
    let mut specs = Vec::new();
    let mut add = |path: String, name: &'static str, dims: Vec<usize>| {
        let tensor = match gguf {
            true => names::gguf(&path, name),
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
            tensor,
            rows,
        });
    };
    add(EMBED.into(), "weight", vec![c.vocab_size, c.hidden_size]);
    for i in 0..c.layers {
        for (name, out, input, bias) in projections(c) {
            let path = format!("{}.{name}", layer(i));
            add(path.clone(), "weight", vec![out, input]);
            if bias {
                add(path, "bias", vec![out]);
            }
        }
        for (name, width) in norms(c) {
            add(format!("{}.{name}", layer(i)), "weight", vec![width]);
        }
    }
    add(FINAL_NORM.into(), "weight", vec![c.hidden_size]);
    if !c.tied_head {
        add(HEAD.into(), "weight", vec![c.vocab_size, c.hidden_size]);
    }
    specs
}
