//! A configuration that contradicts the tensors of a model no builder knows is refused by tensor and field; one that
//! leaves something out, or speaks of a part that is not there, is not.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::names_all;
use serde_json::{json, Map, Value};
use structures_models::{Checkpoint, ModelError};

const LAYERS: usize = 3;

fn layer(at: &str) -> Vec<(String, Vec<u64>)> {
    let shapes: [(&str, &[u64]); 9] = [
        ("input_layernorm.weight", &[64]),
        ("self_attn.q_proj.weight", &[64, 64]),
        ("self_attn.k_proj.weight", &[32, 64]),
        ("self_attn.v_proj.weight", &[32, 64]),
        ("self_attn.o_proj.weight", &[64, 64]),
        ("post_attention_layernorm.weight", &[64]),
        ("mlp.gate_proj.weight", &[176, 64]),
        ("mlp.up_proj.weight", &[176, 64]),
        ("mlp.down_proj.weight", &[64, 176]),
    ];
    let of = |(name, dims): &(&str, &[u64])| (format!("{at}.{name}"), dims.to_vec());
    shapes.iter().map(of).collect()
}

fn tensors() -> Vec<(String, Vec<u64>)> {
    let mut all = vec![("model.embed_tokens.weight".into(), vec![300, 64])];
    (0..LAYERS).for_each(|i| all.extend(layer(&format!("model.layers.{i}"))));
    all.push(("lm_head.weight".into(), vec![300, 64]));
    all
}

fn config() -> Map<String, Value> {
    let text = json!({"model_type": "odd", "hidden_size": 64, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 300});
    text.as_object().unwrap().clone()
}

fn write(dir: &Path, config: &Map<String, Value>, tensors: &[(String, Vec<u64>)]) {
    std::fs::write(
        dir.join("config.json"),
        Value::Object(config.clone()).to_string(),
    )
    .unwrap();
    let (mut at, mut header) = (0, Map::new());
    for (name, shape) in tensors {
        let end = at + shape.iter().product::<u64>() * 2;
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]});
        header.insert(name.clone(), entry);
        at = end;
    }
    let header = Value::Object(header).to_string();
    let path = dir.join("model.safetensors");
    common::save_raw(&path, &header, 0);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + at).unwrap();
}

fn judged(config: &Map<String, Value>, tensors: &[(String, Vec<u64>)]) -> Result<(), ModelError> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config, tensors);
    Checkpoint::open(dir.path()).unwrap().agrees_with_config()
}

#[test]
fn a_number_that_no_tensor_has_is_named_with_the_tensor() {
    judged(&config(), &tensors()).unwrap();
    let cases: [(&str, Value, &[&str]); 12] = [
        (
            "hidden_size",
            json!(128),
            &["model.embed_tokens.weight", "128 columns", "[300, 64]"],
        ),
        (
            "hidden_size",
            json!(32),
            &["model.embed_tokens.weight", "`hidden_size`"],
        ),
        (
            "vocab_size",
            json!(256),
            &["model.embed_tokens.weight", "256 rows", "`vocab_size`"],
        ),
        (
            "vocab_size",
            json!(301),
            &["model.embed_tokens.weight", "301 rows"],
        ),
        (
            "num_hidden_layers",
            json!(4),
            &["4 layers", "`num_hidden_layers`", "3 at `model.layers`"],
        ),
        ("num_hidden_layers", json!(2), &["2 layers", "3 at"]),
        (
            "num_hidden_layers",
            json!(u64::MAX),
            &["layers", "`num_hidden_layers`"],
        ),
        (
            "num_attention_heads",
            json!(8),
            &["self_attn.k_proj", "`num_key_value_heads`", "[32, 64]"],
        ),
        ("num_key_value_heads", json!(1), &["self_attn.k_proj"]),
        (
            "head_dim",
            json!(32),
            &["self_attn.q_proj", "heads of 32 rows", "`head_dim`"],
        ),
        (
            "intermediate_size",
            json!(160),
            &["mlp.gate_proj.weight", "160 rows", "[176, 64]"],
        ),
        (
            "intermediate_size",
            json!(1u64 << 60),
            &["mlp.gate_proj.weight"],
        ),
    ];
    for (field, value, words) in cases {
        let mut c = config();
        c.insert(field.into(), value);
        let fault = judged(&c, &tensors()).unwrap_err();
        assert_eq!(fault.code(), "tensor");
        names_all(Err::<(), _>(fault), &[words, &["config.json"]].concat());
    }
    // A layer that is not there, and one that has another width.
    let mut holed = tensors();
    holed.retain(|(name, _)| !name.contains("layers.1."));
    names_all(
        judged(&config(), &holed),
        &["model.layers.1", "layer 1, one of 3"],
    );
    let mut wide = tensors();
    let norms = wide
        .iter_mut()
        .filter(|(n, _)| n.ends_with("input_layernorm.weight"));
    norms.for_each(|(_, dims)| *dims = vec![65]);
    names_all(
        judged(&config(), &wide),
        &["layers.0.input_layernorm", "64 values", "[65]"],
    );
}

/// What is left out or said of another part contradicts nothing.
#[test]
fn silence_is_no_contradiction() {
    let with = |edit: &dyn Fn(&mut Map<String, Value>)| {
        let mut c = config();
        edit(&mut c);
        c
    };
    let set =
        |key: &'static str, value: Value| with(&move |c| drop(c.insert(key.into(), value.clone())));
    for key in config().keys() {
        let without = with(&|c| drop(c.remove(key)));
        judged(&without, &tensors()).unwrap_or_else(|e| panic!("without {key}: {e}"));
    }
    // One row more stands for no token; a multiple may be said.
    judged(&set("vocab_size", json!(299)), &tensors()).unwrap();
    let padded = with(&|c| {
        c.insert("vocab_size".into(), json!(290));
        c.insert("pad_vocab_size_multiple".into(), json!(100));
    });
    judged(&padded, &tensors()).unwrap();
    // A layer that guesses ahead; halves of which one is not there; shared layers.
    let ahead = with(&|c| {
        c.insert("num_hidden_layers".into(), json!(LAYERS - 1));
        c.insert("num_nextn_predict_layers".into(), json!(1));
    });
    judged(&ahead, &tensors()).unwrap();
    judged(&set("encoder_layers", json!(7)), &tensors()).unwrap();
    // One layer of another shape is no word about the configuration.
    let mut other = tensors();
    let one = other
        .iter_mut()
        .find(|(n, _)| n.ends_with("1.self_attn.k_proj.weight"));
    one.unwrap().1 = vec![48, 64];
    judged(&config(), &other).unwrap();
    let shared = with(&|c| {
        c.insert("num_hidden_layers".into(), json!(12));
        c.insert("num_hidden_groups".into(), json!(1));
    });
    judged(&shared, &tensors()).unwrap();
    // Sections leave out their family's defaults.
    let nested = json!({"model_type": "odd", "vision_config": {"model_type": "v", "hidden_size": 40, "num_hidden_layers": 9},
        "text_config": {"model_type": "t", "num_hidden_layers": LAYERS}});
    judged(nested.as_object().unwrap(), &tensors()).unwrap();
    // Several heads' sizes in one config: each section's divide its own width.
    let mut both = tensors();
    both.push((
        "vision.layers.0.self_attn.k_proj.weight".into(),
        vec![40, 40],
    ));
    let text = json!({"model_type": "t", "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16});
    let vision = json!({"model_type": "v", "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5});
    let nested = json!({"model_type": "odd", "vision_config": vision, "text_config": text});
    judged(nested.as_object().unwrap(), &both).unwrap();
}

/// Every recorded model agrees with its own configuration.
#[test]
fn no_published_shape_contradicts_its_configuration() {
    let files = std::fs::read_dir(common::oracle("trees")).unwrap();
    let mut compared = 0;
    for file in files.map(|f| f.unwrap().path()) {
        if file.extension().is_none_or(|e| e != "gz") {
            continue;
        }
        let packed = std::fs::read(&file).unwrap();
        let dump: Value =
            serde_json::from_reader(flate2::read::GzDecoder::new(packed.as_slice())).unwrap();
        let Some(config) = dump["config"].as_object().filter(|c| !c.is_empty()) else {
            continue;
        };
        let mut tensors: Vec<(String, Vec<u64>)> = Vec::new();
        for module in dump["modules"].as_array().unwrap() {
            let path = module["path"].as_str().unwrap();
            for (name, info) in module["params"].as_object().into_iter().flatten() {
                let full = format!("{path}.{name}");
                let dims = serde_json::from_value(info[0].clone()).unwrap();
                tensors.push((full.trim_start_matches('.').into(), dims));
            }
        }
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), config, &tensors);
        let agrees = Checkpoint::open(dir.path()).unwrap().agrees_with_config();
        agrees.unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        compared += 1;
    }
    assert!(compared > 0);
    println!("{compared} models agree");
}

/// The same numbers under the keys of a GGUF.
#[test]
fn a_gguf_is_held_to_its_own_keys() {
    fn text(out: &mut Vec<u8>, s: &str) {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    }
    let file = |embedding: u32, blocks: u32| {
        let rows: [(&str, [u64; 2]); 3] = [
            ("token_embd.weight", [64, 300]),
            ("blk.0.attn_q.weight", [64, 64]),
            ("blk.1.attn_q.weight", [64, 64]),
        ];
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((rows.len() as u64).to_le_bytes());
        out.extend(3u64.to_le_bytes());
        text(&mut out, "general.architecture");
        out.extend(8u32.to_le_bytes());
        text(&mut out, "odd");
        for (key, n) in [
            ("odd.embedding_length", embedding),
            ("odd.block_count", blocks),
        ] {
            text(&mut out, key);
            out.extend(4u32.to_le_bytes());
            out.extend(n.to_le_bytes());
        }
        let mut at = 0u64;
        for (name, dims) in rows {
            text(&mut out, name);
            out.extend(2u32.to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(0u32.to_le_bytes());
            out.extend(at.to_le_bytes());
            at += dims[0] * dims[1] * 4;
        }
        out.resize(out.len().next_multiple_of(32) + at as usize, 0);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, out).unwrap();
        Checkpoint::open(&path).unwrap().agrees_with_config()
    };
    file(64, 2).unwrap();
    names_all(
        file(32, 2),
        &["m.gguf", "token_embd.weight", "`embedding_length`"],
    );
    names_all(file(64, 3), &["3 layers", "`block_count`"]);
}
