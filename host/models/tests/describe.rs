//! Descriptions at published sizes: from headers alone, and the same tree as the published implementation's.

#![allow(clippy::unwrap_used)]

mod common;

use std::io::Read;
use std::time::{Duration, Instant};

use common::*;
use serde_json::{json, Value};
use structures_graph::ModuleKind;
use structures_models::{Description, FAMILIES};

/// A directory with this config and headers for these tensors; the data is a hole in the file.
fn hollow(config: &Value, tensors: &[(String, Vec<u64>)]) -> tempfile::TempDir {
    let mut header = serde_json::Map::new();
    let mut at = 0u64;
    for (name, shape) in tensors {
        let to = at + 2 * shape.iter().product::<u64>();
        let row = json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, to]});
        header.insert(name.clone(), row);
        at = to;
    }
    let header = Value::Object(header).to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    save_raw(&file, &header, 0);
    let whole = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    whole.set_len(8 + header.len() as u64 + at).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn trees_equal_the_published_ones() {
    let supported: Vec<&str> = FAMILIES.iter().flat_map(|f| f.model_types()).collect();
    let mut seen = 0;
    for entry in std::fs::read_dir(oracle("trees")).unwrap() {
        let path = entry.unwrap().path();
        let mut text = String::new();
        let file = std::fs::File::open(&path).unwrap();
        if flate2::read::GzDecoder::new(file)
            .read_to_string(&mut text)
            .is_err()
        {
            continue; // expected.json is no tree
        }
        let dump: Value = serde_json::from_str(&text).unwrap();
        let kind = dump["config"]["model_type"].as_str().unwrap_or("");
        if !supported.contains(&kind) {
            continue;
        }
        seen += 1;
        let tied = dump["config"]["tie_word_embeddings"] == json!(true);
        let modules = dump["modules"].as_array().unwrap();
        let mut tensors = Vec::new();
        for m in modules {
            let path = m["path"].as_str().unwrap();
            for (name, row) in m["params"].as_object().into_iter().flatten() {
                let shape = row[0]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|d| d.as_u64().unwrap());
                if !(tied && path == "lm_head") {
                    tensors.push((format!("{path}.{name}"), shape.collect()));
                }
            }
        }
        let dir = hollow(&dump["config"], &tensors);
        let start = Instant::now();
        let got = Description::open(dir.path()).unwrap();
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );

        let tree = got.tree.modules();
        let paths = |m: &Value| m["path"].as_str().unwrap().to_string();
        assert_eq!(
            tree.iter().map(|m| m.path.clone()).collect::<Vec<_>>(),
            modules.iter().map(paths).collect::<Vec<_>>(),
            "{path:?}"
        );
        for (ours, theirs) in tree.iter().zip(modules) {
            let at = &ours.path;
            if ours.kind != Some(ModuleKind::Activation) {
                assert_eq!(json!(ours.class), theirs["class"], "{at}");
            }
            let params: serde_json::Map<String, Value> = ours
                .params
                .iter()
                .map(|(n, p)| {
                    assert_eq!(p.dtype, "bf16");
                    (n.clone(), json!([p.dims, "bfloat16"]))
                })
                .collect();
            assert_eq!(
                json!(params),
                *theirs.get("params").unwrap_or(&json!({})),
                "{at}"
            );
            let expected = theirs.get("absent_params").cloned().unwrap_or(json!([]));
            assert_eq!(json!(ours.absent_params), expected, "{at}");
            for (name, value) in &ours.attrs {
                let theirs = match name.as_str() {
                    "act_fn" | "activation_fn" => continue,
                    _ => &theirs["attrs"][name],
                };
                assert_eq!(&serde_json::to_value(value).unwrap(), theirs, "{at}.{name}");
            }
        }
    }
    assert!(seen > 0, "no tree of a supported family");
}

/// Qwen3-8B: 399 tensors, 16 GB, nothing read but the header.
#[test]
fn eight_billion_parameters_in_no_time() {
    let (d, f, layers, vocab) = (4096u64, 12288u64, 36, 151_936u64);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![vocab, d]),
        ("model.norm.weight".into(), vec![d]),
        ("lm_head.weight".into(), vec![vocab, d]),
    ];
    for i in 0..layers {
        let mut add = |name: &str, shape: &[u64]| {
            tensors.push((format!("model.layers.{i}.{name}.weight"), shape.to_vec()))
        };
        add("input_layernorm", &[d]);
        add("post_attention_layernorm", &[d]);
        add("self_attn.q_norm", &[128]);
        add("self_attn.k_norm", &[128]);
        add("self_attn.q_proj", &[d, d]);
        add("self_attn.k_proj", &[1024, d]);
        add("self_attn.v_proj", &[1024, d]);
        add("self_attn.o_proj", &[d, d]);
        add("mlp.gate_proj", &[f, d]);
        add("mlp.up_proj", &[f, d]);
        add("mlp.down_proj", &[d, f]);
    }
    let config = json!({
        "model_type": "qwen3", "vocab_size": vocab, "hidden_size": d, "intermediate_size": f,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_scaling": null, "max_position_embeddings": 40960, "tie_word_embeddings": false,
        "attention_bias": false, "sliding_window": null, "use_sliding_window": false
    });
    let dir = hollow(&config, &tensors);
    let start = Instant::now();
    let got = Description::open(dir.path()).unwrap();
    let took = start.elapsed();
    println!("described in {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(got.graph.states.len(), 72);
    assert_eq!(got.checkpoint.tensor_infos().count(), 399);
    assert!(got.config.notes.is_empty(), "{:?}", got.config.notes);
}
