//! Writes a GGUF file from a Hugging Face directory, the way the usual converter does.

use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::Tensor;
use structures_models::config::{Norms, RopeScaling};
use structures_models::{DecoderConfig, Description};

/// Metadata of a model, tokenizer left out.
pub fn metadata(model: &Description) -> Vec<(String, Value)> {
    let c = &model.config;
    let arch = architecture(c).to_string();
    let n = |v: usize| Value::U32(v as u32);
    let mut rows = vec![(
        "general.architecture".to_string(),
        Value::String(arch.clone()),
    )];
    let mut add = |key: &str, value: Value| rows.push((format!("{arch}.{key}"), value));
    add("block_count", n(c.layers));
    add("context_length", n(c.max_positions));
    add("embedding_length", n(c.hidden_size));
    add("feed_forward_length", n(c.intermediate_size));
    add("attention.head_count", n(c.heads));
    add("attention.head_count_kv", n(c.kv_heads));
    add("attention.key_length", n(c.head_dim));
    add("attention.value_length", n(c.head_dim));
    add("rope.dimension_count", n(c.rotary));
    add("rope.freq_base", Value::F32(c.rope.theta as f32));
    add(
        "attention.layer_norm_rms_epsilon",
        Value::F32(c.rms_norm_eps as f32),
    );
    if let Some(width) = c.windows.iter().copied().flatten().next() {
        add("attention.sliding_window", n(width));
        if c.windows.iter().any(Option::is_none) {
            let flags = c.windows.iter().map(|w| Value::Bool(w.is_some()));
            add(
                "attention.sliding_window_pattern",
                Value::Array(flags.collect()),
            );
        }
    }
    let number = |v: f64| Value::F32(v as f32);
    if let RopeScaling::Linear { factor } = c.rope.scaling {
        add("rope.scaling.type", Value::String("linear".into()));
        add("rope.scaling.factor", number(factor));
    }
    if let Some(local) = &c.local_rope {
        add("rope.freq_base_swa", number(local.theta));
    }
    if let Some(cap) = c.attention_softcap {
        add("attn_logit_softcapping", number(cap));
    }
    if let Some(cap) = c.logits_softcap {
        add("final_logit_softcapping", number(cap));
    }
    if c.model_type == "granite" {
        add("embedding_scale", number(c.embedding_scale));
        add("residual_scale", number(c.residual_scale));
        add("logit_scale", number(c.logits_divisor));
        c.attention_scale
            .iter()
            .for_each(|s| add("attention.scale", number(*s)));
    }
    let mut id =
        |key: &str, id: u32| rows.push((format!("tokenizer.ggml.{key}_token_id"), Value::U32(id)));
    c.bos.iter().for_each(|b| id("bos", *b));
    c.eos.iter().for_each(|e| id("eos", *e));
    rows
}

fn architecture(c: &DecoderConfig) -> &str {
    match c.model_type.as_str() {
        "gemma3_text" => "gemma3",
        other => other,
    }
}

/// Tensors under their GGUF names, rows in GGUF order; llama3 frequencies as a table of divisors.
pub fn tensors(model: &Description) -> Vec<(String, Tensor)> {
    let c = &model.config;
    let mut out = Vec::new();
    for (name, tensor) in super::tensors(model.checkpoint.path()) {
        let heads = match &name {
            n if n.contains("q_proj") => c.heads,
            n if n.contains("k_proj") => c.kv_heads,
            _ => 0,
        };
        let tensor = match heads > 0 && matches!(c.model_type.as_str(), "llama" | "granite") {
            true => pairs_first(&tensor, heads),
            false => tensor,
        };
        let tensor = match c.norm_offset && name.contains("norm") {
            true => (tensor + 1.0).unwrap(),
            false => tensor,
        };
        let after = match c.norms {
            Norms::Before => "ffn_norm",
            _ => "post_attention_norm",
        };
        let mut short = name.clone();
        for (long, gguf) in [
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("model.layers", "blk"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", after),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("self_attn.qkv_proj", "attn_qkv"),
            ("mlp.gate_up_proj", "ffn_up"),
        ] {
            short = short.replace(long, gguf);
        }
        out.push((short, tensor));
    }
    let scaled = c.rope.inv_freq(c.rotary);
    let plain = structures_models::config::Rope::plain(c.rope.theta).inv_freq(c.rotary);
    let linear = matches!(c.rope.scaling, RopeScaling::Linear { .. });
    if scaled != plain && !linear {
        let table: Vec<f32> = plain
            .iter()
            .zip(&scaled)
            .map(|(p, s)| (p / s) as f32)
            .collect();
        out.push((
            "rope_freqs.weight".into(),
            super::tensor(&table, &[table.len()]),
        ));
    }
    out
}

/// The converter's permutation: row `h*D + s*D/2 + i` goes to `h*D + 2i + s`.
fn pairs_first(tensor: &Tensor, heads: usize) -> Tensor {
    let dims = tensor.dims().to_vec();
    let rest: usize = dims[1..].iter().product();
    let split = tensor
        .reshape((heads, 2, dims[0] / heads / 2, rest))
        .unwrap();
    let turned = split.transpose(1, 2).unwrap().contiguous().unwrap();
    turned.reshape(dims).unwrap()
}

/// Writes the file; `kind` chooses each tensor's type.
pub fn write(
    path: &Path,
    metadata: &[(String, Value)],
    tensors: &[(String, Tensor)],
    kind: impl Fn(&str) -> GgmlDType,
) {
    let quantised: Vec<(&str, QTensor)> = tensors
        .iter()
        .map(|(n, t)| (n.as_str(), QTensor::quantize(t, kind(n)).unwrap()))
        .collect();
    let rows: Vec<(&str, &QTensor)> = quantised.iter().map(|(n, q)| (*n, q)).collect();
    let meta: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let mut file = std::fs::File::create(path).unwrap();
    gguf_file::write(&mut file, &meta, &rows).unwrap();
}
