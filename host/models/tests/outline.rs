//! Module trees from headers alone: models that no builder knows, whole and fused, from either kind of checkpoint.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use serde_json::{json, Value};
use structures_graph::tree::Scalar;
use structures_graph::{ModuleKind, ModuleTree};
use structures_models::{Checkpoint, Description};

/// A directory whose tensors have these shapes; the weights are holes.
fn directory(config: &Value, tensors: &[(&str, &[u64])]) -> (tempfile::TempDir, ModuleTree) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut at = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let end = at + shape.iter().product::<u64>() * 2;
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]});
        header.insert((*name).into(), entry);
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(bytes.len() as u64 + at).unwrap();
    let tree = Checkpoint::open(dir.path()).unwrap().outline();
    (dir, tree)
}

fn kind(tree: &ModuleTree, path: &str) -> ModuleKind {
    tree.get(path)
        .unwrap_or_else(|| panic!("no {path}"))
        .kind
        .unwrap()
}

fn rows(tree: &ModuleTree, path: &str) -> (String, (usize, usize), bool) {
    let s = tree
        .slices
        .get(path)
        .unwrap_or_else(|| panic!("no slice {path}"));
    (s.path.clone(), s.rows, s.doubt.is_some())
}

#[test]
fn kinds_and_attributes_come_from_names_shapes_and_config() {
    let config = json!({"model_type": "odd", "text_config": {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5},
        "vision_config": {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-6}});
    let tensors: &[(&str, &[u64])] = &[
        ("model.layers.10.mlp.gate_proj.weight", &[8, 4]),
        ("model.layers.2.mlp.gate_proj.weight", &[8, 4]),
        ("model.layers.2.mlp.up_proj.weight", &[8, 4]),
        ("model.layers.2.mlp.up_proj.bias", &[8]),
        ("model.layers.2.input_layernorm.weight", &[4]),
        ("model.embed_tokens.weight", &[9, 4]),
        ("vision.blocks.0.norm2.weight", &[4]),
        ("vision.blocks.0.norm2.bias", &[4]),
        ("vision.blocks.0.mlp.fc1.weight", &[8, 4]),
        ("vision.blocks.0.mlp.fc2.weight", &[4, 8]),
        ("vision.patch.proj.weight", &[4, 3, 2, 2, 2]),
        ("logit_scale", &[1]),
    ];
    let (dir, tree) = directory(&config, tensors);
    assert!(Description::open(dir.path()).is_err(), "no builder");
    for (path, want) in [
        ("model.layers.2.mlp.gate_proj", ModuleKind::Linear),
        ("model.layers.2.input_layernorm", ModuleKind::RmsNorm),
        ("model.embed_tokens", ModuleKind::Embedding),
        ("vision.blocks.0.norm2", ModuleKind::LayerNorm),
        ("vision.patch.proj", ModuleKind::Conv3d),
        ("model.layers.2.mlp", ModuleKind::Other),
    ] {
        assert_eq!(kind(&tree, path), want, "{path}");
    }
    let attr = |path: &str, name: &str| tree.get(path).unwrap().attrs.get(name).cloned();
    let word = |w: &str| Some(Scalar::Word(w.into()));
    assert_eq!(attr("model.layers.2.mlp", "act_fn"), word("gelu_tanh"));
    assert_eq!(attr("vision.blocks.0.mlp", "act_fn"), word("gelu_sigmoid"));
    let eps = attr("vision.blocks.0.norm2", "eps");
    assert_eq!(eps, Some(Scalar::Float(1e-6)));
    assert!(tree.get("").unwrap().params.contains_key("logit_scale"));
    let place = |p: &str| tree.modules().iter().position(|m| m.path == p).unwrap();
    assert!(
        place("model.layers.2.mlp") < place("model.layers.10.mlp"),
        "layers count as numbers"
    );
}

#[test]
fn fused_parameters_are_taken_apart_where_the_config_says_how() {
    let config = json!({"model_type": "odd", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8});
    let (_dir, tree) = directory(
        &config,
        &[
            ("m.0.self_attn.qkv_proj.weight", &[64, 16]),
            ("m.0.self_attn.qkv_proj.bias", &[64]),
            ("m.0.mlp.gate_up_proj.weight", &[48, 16]),
            ("m.0.mlp.down_proj.weight", &[16, 24]),
            ("m.1.self_attn.qkv_proj.weight", &[66, 16]),
            ("m.2.attn.query_key_value.weight", &[64, 16]),
        ],
    );
    let whole = "m.0.self_attn.qkv_proj".to_string();
    for (name, at) in [("q", (0, 32)), ("k", (32, 48)), ("v", (48, 64))] {
        let path = format!("m.0.self_attn.{name}_proj");
        assert_eq!(rows(&tree, &path), (whole.clone(), at, false));
        let m = tree.get(&path).unwrap();
        assert_eq!(m.params["weight"].dims, [at.1 - at.0, 16]);
        assert_eq!(m.params["bias"].dims, [at.1 - at.0]);
    }
    let both = "m.0.mlp.gate_up_proj".to_string();
    assert_eq!(rows(&tree, "m.0.mlp.up_proj"), (both, (24, 48), false));
    assert!(rows(&tree, "m.1.self_attn.k_proj").2, "66 rows do not fit");
    assert!(rows(&tree, "m.2.attn.q_proj").2, "perhaps head by head");
}

/// A GGUF of any architecture.
fn gguf(version: u32, architecture: &str, tensors: &[(&str, &[u64])]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend(3u64.to_le_bytes());
    let text = |out: &mut Vec<u8>, s: &str| {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    };
    text(&mut out, "general.architecture");
    out.extend(8u32.to_le_bytes());
    text(&mut out, architecture);
    for (key, n) in [("head_count", 4u32), ("head_count_kv", 2)] {
        text(&mut out, &format!("{architecture}.attention.{key}"));
        out.extend(4u32.to_le_bytes());
        out.extend(n.to_le_bytes());
    }
    let mut at = 0u64;
    for (name, dims) in tensors {
        text(&mut out, name);
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
        out.extend(0u32.to_le_bytes());
        out.extend(at.to_le_bytes());
        at += (dims.iter().product::<u64>() * 4).next_multiple_of(32);
    }
    let size = out.len().next_multiple_of(32) + at as usize;
    out.resize(size, 0);
    out
}

fn outline_of(dir: &Path, bytes: &[u8]) -> ModuleTree {
    let path = dir.join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path).unwrap().outline()
}

#[test]
fn names_of_a_gguf_become_the_published_ones() {
    let dir = tempfile::tempdir().unwrap();
    for version in [2, 3] {
        let bytes = gguf(
            version,
            "never-heard-of",
            &[
                ("token_embd.weight", &[9, 16]),
                ("blk.0.attn_norm.weight", &[16]),
                ("blk.0.attn_q.weight", &[16, 16]),
                ("blk.0.ffn_norm.weight", &[16]),
                ("blk.0.ffn_gate.weight", &[24, 16]),
                ("blk.0.ffn_up.weight", &[24, 16]),
                ("blk.0.ffn_down.weight", &[16, 24]),
                ("blk.1.attn_qkv.weight", &[32, 16]),
                ("blk.1.ffn_up.weight", &[48, 16]),
                ("blk.1.ffn_down.weight", &[16, 24]),
                ("blk.2.ffn_up.weight", &[24, 16]),
                ("blk.2.ffn_down.weight", &[16, 24]),
                ("blk.2.ssm_conv1d.weight", &[4, 16]),
                ("output.weight", &[9, 16]),
            ],
        );
        let tree = outline_of(dir.path(), &bytes);
        for path in [
            "model.embed_tokens",
            "model.layers.0.input_layernorm",
            "model.layers.0.self_attn.q_proj",
            "model.layers.0.post_attention_layernorm",
            "model.layers.0.mlp.gate_proj",
            "model.layers.0.mlp.up_proj",
            "model.layers.2.mlp.fc1",
            "model.layers.2.mlp.fc2",
            "model.layers.2.ssm_conv1d",
            "lm_head",
        ] {
            assert!(tree.get(path).is_some(), "{path}");
        }
        let whole = "model.layers.1.self_attn.qkv_proj".to_string();
        let k = rows(&tree, "model.layers.1.self_attn.k_proj");
        assert_eq!(k, (whole, (16, 24), false));
        let up = rows(&tree, "model.layers.1.mlp.up_proj");
        assert_eq!(up.1, (24, 48));
    }
}

#[test]
fn absurd_gguf_headers_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let good = gguf(3, "odd", &[("a.weight", &[8, 8]), ("b.weight", &[8, 8])]);
    let find = |what: &[u8]| good.windows(what.len()).position(|w| w == what).unwrap();
    let changed = |at: usize, bytes: &[u8]| {
        let mut out = good.clone();
        out[at..at + bytes.len()].copy_from_slice(bytes);
        out
    };
    let second = find(b"b.weight") + 8 + 4 + 16 + 4;
    let cases = [
        (changed(8, &(1u64 << 60).to_le_bytes()), "tensor count"),
        (changed(16, &(1u64 << 60).to_le_bytes()), "metadata count"),
        (changed(24, &(1u64 << 60).to_le_bytes()), "metadata entry 0"),
        (
            changed(second, &32u64.to_le_bytes()),
            "inside that of `a.weight`",
        ),
        (changed(second, &7u64.to_le_bytes()), "32 divides"),
        (changed(second, &u64::MAX.to_le_bytes()[..8]), "b.weight"),
        (
            changed(find(b"a.weight") + 8, &99u32.to_le_bytes()),
            "rank of tensor `a.weight`",
        ),
        (
            changed(find(b"a.weight") + 12, &u64::MAX.to_le_bytes()),
            "a.weight",
        ),
        (
            changed(second - 4, &77u32.to_le_bytes()),
            "type of tensor `b.weight`",
        ),
        (changed(find(b"a.weight"), b"b.weight"), "b.weight"),
    ];
    for (bytes, want) in cases {
        std::fs::write(&path, bytes).unwrap();
        let fault = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(
            fault.contains("m.gguf") && fault.contains(want),
            "{fault}\nlacks {want}"
        );
    }
}

#[test]
fn negative_dims_and_huge_documents_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let header = r#"{"a.w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 4]);
    let file = dir.path().join("model.safetensors");
    std::fs::write(&file, &bytes).unwrap();
    let fault = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(
        fault.contains("tensor `a.w`") && fault.contains("-1"),
        "{fault}"
    );
    bytes[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    std::fs::write(&file, &bytes).unwrap();
    let fault = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(fault.contains("header length"), "{fault}");
    let long = format!("{{\"a\": [{}0]}}", "0,".repeat(500_000));
    std::fs::write(dir.path().join("config.json"), long).unwrap();
    let fault = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(
        fault.contains("config.json") && fault.contains("at most 400000 values"),
        "{fault}"
    );
}
