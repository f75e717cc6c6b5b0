//! GGUF tensor names of published module paths.

use super::HEAD;
use crate::config::{DecoderConfig, Norms};

const LAYER: &[(&str, &str)] = &[
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// `model.layers.3.mlp.up_proj`, `weight` -> `blk.3.ffn_up.weight`. A path without a GGUF name keeps its own, and is
/// then reported missing under it.
pub(super) fn gguf(c: &DecoderConfig, path: &str, param: &str) -> String {
    let name = match path {
        HEAD => Some("output".to_string()),
        _ if path == c.embed() => Some("token_embd".into()),
        _ if path == c.final_norm() => Some("output_norm".into()),
        _ => path
            .strip_prefix(c.root)
            .and_then(|rest| rest.strip_prefix(".layers."))
            .and_then(|rest| rest.split_once('.'))
            .and_then(|(i, rest)| Some(format!("blk.{i}.{}", in_layer(c.norms, rest)?))),
    };
    format!("{}.{param}", name.as_deref().unwrap_or(path))
}

fn in_layer(norms: Norms, path: &str) -> Option<&'static str> {
    // The published name says where the norm stands in the text, the other one what it is for.
    if path == "post_attention_layernorm" {
        return Some(match norms {
            Norms::Before => "ffn_norm",
            Norms::After | Norms::Around => "post_attention_norm",
        });
    }
    let found = LAYER.iter().find(|(long, _)| *long == path);
    found.map(|(_, short)| *short)
}

/// The layer a tensor belongs to, by its name in the checkpoint.
pub(super) fn layer_of(root: &str, tensor: &str, gguf: bool) -> Option<usize> {
    let rest = match gguf {
        true => tensor.strip_prefix("blk.")?,
        false if root.is_empty() => tensor.strip_prefix("layers.")?,
        false => tensor.strip_prefix(root)?.strip_prefix(".layers.")?,
    };
    let (i, _) = rest.split_once('.')?;
    i.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_paths_have_their_gguf_names() {
        assert_eq!(in_layer(Norms::Before, "self_attn.q_proj"), Some("attn_q"));
        let norm = "post_attention_layernorm";
        assert_eq!(in_layer(Norms::Before, norm), Some("ffn_norm"));
        assert_eq!(in_layer(Norms::Around, norm), Some("post_attention_norm"));
        assert_eq!(in_layer(Norms::Before, "odd"), None);
    }

    #[test]
    fn layers_are_read_off_names() {
        assert_eq!(
            layer_of("model", "model.layers.12.mlp.up_proj.weight", false),
            Some(12)
        );
        let inner = "model.language_model.layers.3.norm.weight";
        assert_eq!(layer_of("model.language_model", inner, false), Some(3));
        assert_eq!(layer_of("model", "blk.3.ffn_up.weight", true), Some(3));
        assert_eq!(layer_of("model", "blk.3.ffn_up.weight", false), None);
        assert_eq!(layer_of("model", "model.layers.x.weight", false), None);
        assert_eq!(layer_of("model", "model.norm.weight", false), None);
        assert_eq!(layer_of("", "layers.3.mlp.up_proj.weight", false), Some(3));
    }
}
