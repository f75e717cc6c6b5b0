//! GGUF tensor names of published module paths.

const LAYER: &[(&str, &str)] = &[
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
    ("post_attention_layernorm", "ffn_norm"),
];

/// `model.layers.3.mlp.up_proj`, `weight` -> `blk.3.ffn_up.weight`. A path without a GGUF name keeps its own, and is
/// then reported missing under it.
pub(super) fn gguf(path: &str, param: &str) -> String {
    let name = match path {
        super::EMBED => Some("token_embd".to_string()),
        super::FINAL_NORM => Some("output_norm".to_string()),
        super::HEAD => Some("output".to_string()),
        _ => path
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split_once('.'))
            .and_then(|(i, rest)| {
                let (_, short) = LAYER.iter().find(|(long, _)| *long == rest)?;
                Some(format!("blk.{i}.{short}"))
            }),
    };
    format!("{}.{param}", name.as_deref().unwrap_or(path))
}

/// The layer a tensor belongs to, by its name in the checkpoint.
pub(super) fn layer_of(tensor: &str, gguf: bool) -> Option<usize> {
    let prefix = if gguf { "blk." } else { "model.layers." };
    let (i, _) = tensor.strip_prefix(prefix)?.split_once('.')?;
    i.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_paths_have_their_gguf_names() {
        assert_eq!(gguf("model.embed_tokens", "weight"), "token_embd.weight");
        assert_eq!(gguf("lm_head", "weight"), "output.weight");
        assert_eq!(
            gguf("model.layers.12.self_attn.q_proj", "bias"),
            "blk.12.attn_q.bias"
        );
        assert_eq!(
            gguf("model.layers.0.post_attention_layernorm", "weight"),
            "blk.0.ffn_norm.weight"
        );
        assert_eq!(gguf("model.odd", "weight"), "model.odd.weight");
    }
    #[test]
    fn layers_are_read_off_names() {
        assert_eq!(
            layer_of("model.layers.12.mlp.up_proj.weight", false),
            Some(12)
        );
        assert_eq!(layer_of("blk.3.ffn_up.weight", true), Some(3));
        assert_eq!(layer_of("blk.3.ffn_up.weight", false), None);
        assert_eq!(layer_of("model.layers.x.weight", false), None);
        assert_eq!(layer_of("model.norm.weight", false), None);
    }
}
