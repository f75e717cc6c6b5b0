//! Published configurations say the same in many ways; each way has its test here.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use serde_json::{json, Map, Value};
use structures_models::{Checkpoint, DecoderConfig, Description, ModelError};

fn edited(
    name: &str,
    edit: impl FnOnce(&mut Map<String, Value>),
) -> Result<DecoderConfig, ModelError> {
    let dir = copy(name);
    edit_config(dir.path(), edit);
    Description::open(dir.path()).map(|d| d.config)
}

fn set(c: &mut Map<String, Value>, name: &str, value: Value) {
    c.insert(name.into(), value);
}

#[test]
fn an_explicit_head_width_is_held_against_the_tensors() {
    let plain = edited("llama", |_| {}).unwrap();
    assert_eq!(plain.head_dim, 8);
    assert_eq!(
        edited("llama", |c| drop(c.remove("head_dim"))).unwrap(),
        plain
    );
    assert_eq!(
        edited("llama", |c| set(c, "head_dim", Value::Null)).unwrap(),
        plain
    );
    names_all(
        edited("llama", |c| set(c, "head_dim", json!(16))),
        &["self_attn.q_proj.weight", "[96, 48]", "[48, 48]"],
    );
}

#[test]
fn null_rotary_settings_are_absent_ones() {
    let none = edited("qwen2", |c| {
        c.remove("rope_parameters");
        c.remove("rope_scaling");
        set(c, "rope_theta", json!(12345.0));
    })
    .unwrap();
    assert_eq!(none.rope.theta, 12345.0);
    for name in ["rope_parameters", "rope_scaling"] {
        let null = edited("qwen2", |c| {
            c.remove("rope_parameters");
            set(c, name, Value::Null);
            set(c, "rope_theta", json!(12345.0));
        });
        assert_eq!(null.unwrap(), none, "{name}");
    }
}

#[test]
fn rotary_settings_may_be_nested_by_kind_of_layer() {
    let plain = edited("llama", |_| {}).unwrap();
    let nested = edited("llama", |c| {
        let block = c.remove("rope_parameters").unwrap();
        set(c, "rope_parameters", json!({ "full_attention": block }));
    });
    assert_eq!(nested.unwrap(), plain);
}

#[test]
fn an_absent_tie_flag_is_read_off_the_tensors() {
    let with_head = edited("qwen3", |c| drop(c.remove("tie_word_embeddings"))).unwrap();
    assert!(!with_head.tied_head);
    let without = edited("llama", |c| drop(c.remove("tie_word_embeddings"))).unwrap();
    assert!(without.tied_head);
    let null = edited("llama", |c| set(c, "tie_word_embeddings", Value::Null)).unwrap();
    assert_eq!(null.tied_head, without.tied_head);
    names_all(
        edited("llama", |c| set(c, "tie_word_embeddings", json!("yes"))),
        &["tie_word_embeddings", "true or false"],
    );
}

#[test]
fn either_name_of_the_dtype_is_fine_and_the_tensors_decide() {
    let plain = edited("llama", |_| {}).unwrap();
    for (name, value) in [
        ("torch_dtype", json!("bfloat16")),
        ("dtype", json!("float16")),
        ("dtype", Value::Null),
    ] {
        let other = edited("llama", |c| {
            c.remove("dtype");
            set(c, name, value.clone());
        });
        assert_eq!(other.unwrap(), plain, "{name} {value}");
    }
    let both = edited("llama", |c| set(c, "torch_dtype", json!("bfloat16")));
    assert_eq!(both.unwrap(), plain);
}

#[test]
fn kinds_of_layers_are_one_for_each() {
    let plain = edited("llama", |c| drop(c.remove("layer_types"))).unwrap();
    let full = edited("llama", |c| {
        set(
            c,
            "layer_types",
            json!(["full_attention", "full_attention", "full_attention"]),
        )
    });
    assert_eq!(full.unwrap(), plain);
    names_all(
        edited("llama", |c| {
            set(c, "layer_types", json!(["full_attention"]))
        }),
        &["layer_types", "each of the 3 layers"],
    );
    names_all(
        edited("llama", |c| set(c, "layer_types", json!([1, 2, 3]))),
        &["layer_types", "`1`"],
    );
}

#[test]
fn an_absent_number_of_kv_heads_is_read_off_the_tensors() {
    for edit in [
        (|c| drop(c.remove("num_key_value_heads"))) as fn(&mut Map<String, Value>),
        |c| set(c, "num_key_value_heads", Value::Null),
    ] {
        // Two by the tensors' shapes, and told.
        let config = edited("llama", edit).unwrap();
        assert_eq!((config.heads, config.kv_heads), (6, 2));
        let told = |n: &String| n.contains("num_key_value_heads is absent: 2");
        assert!(config.notes.iter().any(told), "{:?}", config.notes);
    }
    let dir = copy("llama");
    let mut all = tensors(dir.path());
    for (name, t) in &mut all {
        if name.contains("k_proj") || name.contains("v_proj") {
            *t = tensor(&[0.5; 48 * 48], &[48, 48]);
        }
    }
    save(&dir.path().join("model.safetensors"), &all);
    edit_config(dir.path(), |c| drop(c.remove("num_key_value_heads")));
    let config = Description::open(dir.path()).unwrap().config;
    assert_eq!((config.heads, config.kv_heads), (6, 6));
}

#[test]
fn bias_flags_and_tensors_must_agree() {
    names_all(
        edited("llama", |c| set(c, "attention_bias", json!(true))),
        &["self_attn.q_proj.bias", "no such tensor"],
    );
    names_all(
        edited("llama", |c| set(c, "mlp_bias", json!(true))),
        &["mlp.gate_proj.bias", "no such tensor"],
    );
    let plain = edited("llama", |_| {}).unwrap();
    let silent = edited("llama", |c| {
        c.remove("attention_bias");
        c.remove("mlp_bias");
    });
    assert_eq!(silent.unwrap(), plain);
    names_all(
        edited("llama", |c| set(c, "attention_bias", json!(1))),
        &["attention_bias", "true or false"],
    );
}

/// Weights under the names in use.
#[test]
fn weights_have_many_file_names() {
    let dir = copy("llama");
    let want = Description::open(dir.path()).unwrap().config;
    let at = |name: &str| dir.path().join(name);
    let all = tensors(dir.path());
    std::fs::rename(
        at("model.safetensors"),
        at("diffusion_pytorch_model.safetensors"),
    )
    .unwrap();
    assert_eq!(Description::open(dir.path()).unwrap().config, want);

    // A numbered set without its index, whole and with a part missing.
    std::fs::remove_file(at("diffusion_pytorch_model.safetensors")).unwrap();
    let parts = [
        "weights-00001-of-00002.safetensors",
        "weights-00002-of-00002.safetensors",
    ];
    save(&at(parts[0]), &all[..4]);
    names_all(
        Checkpoint::open(dir.path()),
        &[
            "shard `weights-00002-of-00002.safetensors`",
            "no such file",
            "missing shard",
        ],
    );
    save(&at(parts[1]), &all[4..]);
    assert_eq!(Description::open(dir.path()).unwrap().config, want);

    // Its index of the same name; then a file that belongs to neither.
    let map: Map<String, Value> = all
        .iter()
        .enumerate()
        .map(|(i, (name, _))| (name.clone(), parts[usize::from(i >= 4)].into()))
        .collect();
    let index = at("weights.safetensors.index.json");
    std::fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
    assert_eq!(Description::open(dir.path()).unwrap().config, want);
    std::fs::remove_file(index).unwrap();
    save(&at("other.safetensors"), &all[..1]);
    names_all(
        Checkpoint::open(dir.path()),
        &["weights: expected model.safetensors", "`other.safetensors`"],
    );
}

#[test]
fn an_index_has_each_tensor_once() {
    let dir = copy("llama");
    std::fs::rename(
        dir.path().join("model.safetensors"),
        dir.path().join("a.safetensors"),
    )
    .unwrap();
    let index = r#"{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    names_all(
        Checkpoint::open(dir.path()),
        &["model.safetensors.index.json", "tensor `x` is there twice"],
    );
}

/// Packed by a codec that is not here: nothing runs it, but its shapes are there to look at.
#[test]
fn headers_are_read_without_a_codec() {
    let dir = copy("llama");
    edit_config(dir.path(), |c| {
        set(
            c,
            "quantization_config",
            json!({"quant_method": "gptq", "bits": 4}),
        );
    });
    names_all(
        Checkpoint::open(dir.path()),
        &["quantization_config", "gptq"],
    );
    let checkpoint = Checkpoint::open_headers(dir.path()).unwrap();
    assert!(checkpoint
        .outline()
        .get("model.layers.0.mlp.gate_proj")
        .is_some());
}

/// A model saved without its head has no `model.` in front of its modules' names; so some embedding models are.
#[test]
fn a_model_saved_without_its_head_is_the_same_model() {
    let dir = copy("qwen3");
    let want = Description::open(dir.path()).unwrap();
    let all: Vec<_> = tensors(dir.path())
        .into_iter()
        .filter_map(|(name, t)| Some((name.strip_prefix("model.")?.to_string(), t)))
        .collect();
    save(&dir.path().join("model.safetensors"), &all);
    let found = Description::open(dir.path()).unwrap();
    assert!(found.config.tied_head);
    assert_eq!(found.config.layers, want.config.layers);
    let embed = found.params.get("model.embed_tokens", "weight").unwrap();
    assert_eq!(embed.0.tensors, ["embed_tokens.weight"]);
    // Layers beyond the config's are still no detail.
    edit_config(dir.path(), |c| {
        drop(c.insert("num_hidden_layers".into(), serde_json::json!(1)))
    });
    names_all(
        Description::open(dir.path()),
        &["layers.1.", "only layers below 1"],
    );
}

/// A window's rotation that is the whole's is no second one.
#[test]
fn two_rotations_that_are_the_same_are_one() {
    let dir = copy("gemma3");
    let theta = Description::open(dir.path()).unwrap().config.rope.theta;
    edit_config(dir.path(), |c| {
        let same = serde_json::json!({"rope_type": "default", "rope_theta": theta});
        let both = serde_json::json!({"full_attention": same, "sliding_attention": same});
        c.remove("rope_theta");
        c.remove("rope_local_base_freq");
        c.remove("rope_scaling");
        c.insert("rope_parameters".into(), both);
    });
    let found = Description::open(dir.path()).unwrap();
    assert_eq!(found.config.local_rope, None);
}
