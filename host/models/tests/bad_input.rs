//! Every broken checkpoint gives a message that names the file, the item, expected, found and what to do.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::*;
use serde_json::json;
use structures_models::{Checkpoint, Description};

fn describe(dir: &Path) -> Result<Description, structures_models::ModelError> {
    Description::open(dir)
}

#[test]
fn missing_paths_and_files() {
    names_all(
        Checkpoint::open(Path::new("no/such/model")),
        &["no/such/model", "give a directory"],
    );
    let dir = copy("llama");
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    names_all(
        describe(dir.path()),
        &["config.json", "save the model with its configuration"],
    );
    let dir = copy("llama");
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    names_all(
        describe(dir.path()),
        &["model.safetensors.index.json", "found only config.json"],
    );
    let weights = copy("llama").path().join("model.safetensors");
    names_all(Checkpoint::open(&weights), &["model.safetensors"]);
}

#[test]
fn a_weights_file_alone_is_not_a_model() {
    let dir = copy("llama");
    let file = dir.path().join("model.safetensors");
    names_all(
        Checkpoint::open(&file),
        &["expected `GGUF`", "give the directory that holds it"],
    );
}

#[test]
fn damaged_headers() {
    let dir = copy("llama");
    let file = dir.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    for (cut, words) in [
        (5, ["header length", "a file of 5 bytes"]),
        (100, ["header length", "expected at most 92"]),
        (
            whole.len() - 1,
            ["tensor `model.", "expected a file of at least"],
        ),
    ] {
        std::fs::write(&file, &whole[..cut]).unwrap();
        names_all(describe(dir.path()), &words);
        names_all(describe(dir.path()), &["model.safetensors", "get it again"]);
    }
    let mut longer = whole.clone();
    longer.push(0);
    std::fs::write(&file, &longer).unwrap();
    names_all(describe(dir.path()), &["data: expected", "get it again"]);
    save_raw(&file, "{not json", 0);
    names_all(
        describe(dir.path()),
        &["header", "a JSON object of tensors"],
    );
}

#[test]
fn damaged_tensor_entries() {
    let dir = copy("llama");
    let file = dir.path().join("model.safetensors");
    let cases: [(&str, &[&str]); 8] = [
        (
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
            &["tensor `b`", "a hole up to byte 4"],
        ),
        (
            r#"{"__metadata__":{"a":1},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#,
            &["header", "`__metadata__`", "string"],
        ),
        (
            r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#,
            &["dtype of tensor `a`", "`F99`", "BF16"],
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
            &[
                "tensor `a`",
                "expected 8 bytes for [2] of F32",
                "bytes 0..4",
            ],
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            &["tensor `a`", "bytes 4..0"],
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#,
            &["tensor `a`", "a shape that fits F32"],
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#,
            &["tensor `b`", "inside that of `a`"],
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
            &["tensor `a`", "it twice"],
        ),
    ];
    for (header, words) in cases {
        save_raw(&file, header, 8);
        names_all(Checkpoint::open(dir.path()), words);
    }
}

#[test]
fn shards_must_be_there_and_agree() {
    let dir = copy("llama");
    let all = tensors(dir.path());
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    let write = |map: serde_json::Value| {
        std::fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap()
    };
    let (a, b) = (
        dir.path().join("a.safetensors"),
        dir.path().join("b.safetensors"),
    );
    let (first, second) = (&all[0].0, &all[1].0);

    save(&a, &all[..1]);
    write(json!({ first: "a.safetensors", second: "b.safetensors" }));
    names_all(
        describe(dir.path()),
        &["index.json", "shard `b.safetensors`", "no such file"],
    );

    save(&b, &all[..1]);
    names_all(
        describe(dir.path()),
        &["b.safetensors", first, "it twice", "a.safetensors"],
    );

    save(&b, &all[2..3]);
    names_all(
        describe(dir.path()),
        &["index.json", second, "it in no shard"],
    );

    save(&b, &all[1..3]);
    names_all(
        describe(dir.path()),
        &["index.json", &all[2].0, "b.safetensors", "does not name"],
    );

    write(json!({ first: "../a.safetensors" }));
    names_all(
        describe(dir.path()),
        &["weight_map", "beside the index", "`../a.safetensors`"],
    );

    std::fs::write(&index, "[]").unwrap();
    names_all(describe(dir.path()), &["index.json", "`weight_map`"]);
}

#[test]
fn config_and_tensors_must_agree() {
    let dir = copy("llama");
    edit_config(dir.path(), |c| {
        drop(c.insert("intermediate_size".into(), json!(96)))
    });
    names_all(
        describe(dir.path()),
        &[
            "tensor `model.layers.0.mlp.gate_proj.weight`",
            "[96, 48]",
            "[104, 48]",
            "belong together",
        ],
    );
    let dir = copy("llama");
    edit_config(dir.path(), |c| {
        drop(c.insert("num_hidden_layers".into(), json!(4)))
    });
    names_all(
        describe(dir.path()),
        &["model.layers.3.self_attn.q_proj.weight", "no such tensor"],
    );
    // Fewer layers than there are tensors of: a model cut short answers, wrongly.
    let dir = copy("llama");
    edit_config(dir.path(), |c| {
        drop(c.insert("num_hidden_layers".into(), json!(1)))
    });
    let refused = describe(dir.path()).map(|d| d.config.notes);
    let e = refused.unwrap_err();
    assert_eq!(e.code(), "tensor");
    names_all(
        Err::<(), _>(e),
        &[
            "tensor `model.layers.1.",
            "expected only layers below 1, as the config says",
            "found layer 1, shape [",
            "belong together",
        ],
    );
    // A bias that the config does not speak of.
    let dir = copy("llama");
    let mut all = tensors(dir.path());
    let bias = "model.layers.1.self_attn.q_proj.bias";
    all.push((bias.into(), tensor(&[0.5; 48], &[48])));
    save(&dir.path().join("model.safetensors"), &all);
    names_all(
        describe(dir.path()),
        &[bias, "no bias there", "attention_bias"],
    );
    let dir = copy("llama");
    edit_config(dir.path(), |c| {
        drop(c.insert("num_hidden_layers".into(), json!(1e15)))
    });
    names_all(describe(dir.path()), &["number of layers", "10000"]);
}

#[test]
fn configs_name_the_field() {
    let set = |name: &'static str, value: serde_json::Value| {
        move |c: &mut serde_json::Map<String, serde_json::Value>| drop(c.insert(name.into(), value))
    };
    let cases: [(&str, serde_json::Value, &[&str]); 20] = [
        ("is_causal", json!(false), &["is_causal", "`false`"]),
        (
            "hidden_size",
            json!("48"),
            &["hidden_size", "a whole number", "\"48\""],
        ),
        (
            "hidden_size",
            json!(0),
            &["hidden_size", "at least 1", "found 0"],
        ),
        ("vocab_size", json!(null), &["vocab_size", "found nothing"]),
        (
            "num_key_value_heads",
            json!(4),
            &["num_key_value_heads", "a divisor of the 6"],
        ),
        ("head_dim", json!(7), &["head_dim", "even"]),
        (
            "rms_norm_eps",
            json!(-1),
            &["rms_norm_eps", "a positive number"],
        ),
        (
            "hidden_act",
            json!("mish"),
            &["hidden_act", "`mish` is not supported", "gelu_pytorch_tanh"],
        ),
        (
            "eos_token_id",
            json!("x"),
            &["eos_token_id", "a token id or a list"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "proportional"}),
            &["rope_parameters.rope_type", "`proportional`", "llama3"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "yarn"}),
            &["rope_parameters.factor", "found nothing"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "longrope", "short_factor": [1.0, 0.0], "long_factor": [1.0]}),
            &["rope_parameters.short_factor", "positive numbers"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
            &["short_factor", "4 divisors", "found 1"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "linear"}),
            &["rope_parameters.factor", "found nothing"],
        ),
        (
            "rope_parameters",
            json!({"partial_rotary_factor": 0.5}),
            &["partial_rotary_factor", "`0.5`"],
        ),
        (
            "use_sliding_window",
            json!(true),
            &["use_sliding_window", "`true` is not supported"],
        ),
        (
            "layer_types",
            json!(["full_attention", "sliding_attention", "full_attention"]),
            &["layer_types", "`sliding_attention`"],
        ),
        (
            "final_logit_softcapping",
            json!(30.0),
            &["final_logit_softcapping", "30"],
        ),
        (
            "quantization_config",
            json!({"bits": 4}),
            &["quantization_config", "\"bits\":4"],
        ),
        (
            "model_type",
            json!("mamba"),
            &["model_type", "`mamba`", "llama", "qwen2, qwen3"],
        ),
    ];
    for (name, value, words) in cases {
        let dir = copy("llama");
        edit_config(dir.path(), set(name, value));
        names_all(describe(dir.path()), words);
        names_all(describe(dir.path()), &["config.json"]);
    }
    let dir = copy("llama");
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    names_all(
        describe(dir.path()),
        &["config.json", "a JSON object", "correct the file"],
    );
    let dir = copy("llama");
    edit_config(dir.path(), |c| drop(c.remove("model_type")));
    names_all(describe(dir.path()), &["_class_name", "found nothing"]);
}

#[test]
fn old_spellings_are_read() {
    let dir = copy("llama");
    let want = describe(dir.path()).unwrap().config;
    edit_config(dir.path(), |c| {
        let mut rope = c.remove("rope_parameters").unwrap();
        let theta = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
        c.insert("rope_theta".into(), theta);
        c.insert("rope_scaling".into(), rope);
        c.insert("head_dim".into(), json!(null));
        c.insert("eos_token_id".into(), json!([2]));
        c.remove("attention_bias");
        c.insert("mlp_bias".into(), json!(null));
        let dtype = c.remove("dtype").unwrap();
        c.insert("torch_dtype".into(), dtype);
    });
    assert_eq!(describe(dir.path()).unwrap().config, want);
    edit_config(dir.path(), |c| {
        let rope = c.remove("rope_scaling").unwrap();
        c.insert("rope_parameters".into(), json!({ "full_attention": rope }));
    });
    assert_eq!(describe(dir.path()).unwrap().config, want);
}

#[test]
fn a_present_head_decides_about_ties() {
    let dir = copy("qwen3");
    edit_config(dir.path(), |c| {
        drop(c.insert("tie_word_embeddings".into(), json!(true)))
    });
    let config = describe(dir.path()).unwrap().config;
    assert!(!config.tied_head);
    assert!(
        config.notes[0].contains("the tensor is used"),
        "{:?}",
        config.notes
    );
    let dir = copy("llama");
    edit_config(dir.path(), |c| {
        drop(c.insert("tie_word_embeddings".into(), json!(false)))
    });
    let config = describe(dir.path()).unwrap().config;
    assert!(config.tied_head);
    assert!(
        config.notes[0].contains("the embedding is used"),
        "{:?}",
        config.notes
    );
}

#[test]
fn tensors_nobody_reads_are_noted() {
    let dir = copy("llama");
    let mut all = tensors(dir.path());
    all.push(("model.extra.weight".into(), tensor(&[1.0], &[1])));
    save(&dir.path().join("model.safetensors"), &all);
    let notes = describe(dir.path()).unwrap().config.notes;
    assert!(
        notes.iter().any(|n| n.contains("model.extra.weight")),
        "{notes:?}"
    );
}

#[test]
fn weights_that_are_not_finite_or_no_weights() {
    let dir = copy("llama");
    let mut all = tensors(dir.path());
    let (name, _) = all[2].clone();
    let bad = [1.0, f32::NAN, f32::INFINITY, 2.0];
    all[2].1 = tensor(&bad, &[2, 2]);
    all.push((
        "steps".into(),
        candle_core::Tensor::new(&[1i64], &candle_core::Device::Cpu).unwrap(),
    ));
    save(&dir.path().join("model.safetensors"), &all);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    names_all(
        checkpoint.load(&name),
        &[
            "model.safetensors",
            &name,
            "found 2 that are not",
            "NaN",
            "at element 1",
        ],
    );
    names_all(checkpoint.load("steps"), &["`steps`", "i64", "bf16"]);
    names_all(checkpoint.load("none"), &["`none`", "get it again"]);
}
