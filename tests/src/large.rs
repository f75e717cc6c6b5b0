//! A checkpoint of 70B shape in 30 shards whose weights are holes, and what it takes to look at it.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{json, Map, Value as Json};

/// Layers, hidden width, FFN width, rows of k and of v, vocabulary.
const LAYERS: u64 = 80;
const WIDTH: u64 = 8192;
const INNER: u64 = 28672;
const FEW: u64 = 1024;
const WORDS: u64 = 128_256;
const SHARDS: u64 = 30;

/// Writes it; `model_type` decides whether a builder knows it. 141 GB that take no room.
pub fn sparse_checkpoint(dir: &Path, model_type: &str) {
    let config = json!({"model_type": model_type, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": WORDS,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "max_position_embeddings": 8192,
        "tie_word_embeddings": false});
    fs::write(dir.join("config.json"), config.to_string()).expect("written");
    let mut tensors: Vec<(String, Vec<u64>)> =
        vec![("model.embed_tokens.weight".into(), vec![WORDS, WIDTH])];
    for i in 0..LAYERS {
        let mut add = |name: &str, dims: &[u64]| {
            tensors.push((format!("model.layers.{i}.{name}.weight"), dims.to_vec()));
        };
        add("self_attn.q_proj", &[WIDTH, WIDTH]);
        add("self_attn.k_proj", &[FEW, WIDTH]);
        add("self_attn.v_proj", &[FEW, WIDTH]);
        add("self_attn.o_proj", &[WIDTH, WIDTH]);
        add("mlp.gate_proj", &[INNER, WIDTH]);
        add("mlp.up_proj", &[INNER, WIDTH]);
        add("mlp.down_proj", &[WIDTH, INNER]);
        add("input_layernorm", &[WIDTH]);
        add("post_attention_layernorm", &[WIDTH]);
    }
    tensors.push(("model.norm.weight".into(), vec![WIDTH]));
    tensors.push(("lm_head.weight".into(), vec![WORDS, WIDTH]));
    let each = tensors.len().div_ceil(SHARDS as usize);
    let mut map = Map::new();
    for (n, shard) in tensors.chunks(each).enumerate() {
        let file = format!("model-{:05}-of-{SHARDS:05}.safetensors", n + 1);
        let mut header = Map::new();
        let mut at = 0;
        for (name, dims) in shard {
            let end = at + dims.iter().product::<u64>() * 2;
            let entry = json!({"dtype": "BF16", "shape": dims, "data_offsets": [at, end]});
            header.insert(name.clone(), entry);
            map.insert(name.clone(), Json::from(file.as_str()));
            at = end;
        }
        let header = Json::Object(header).to_string();
        let mut out = fs::File::create(dir.join(&file)).expect("created");
        out.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| out.write_all(header.as_bytes()))
            .and_then(|()| out.set_len(8 + header.len() as u64 + at))
            .expect("written");
    }
    let index = json!({ "weight_map": map }).to_string();
    fs::write(dir.join("model.safetensors.index.json"), index).expect("written");
}

/// One `discover --json`: its document, how long it took, and its resident peak where the kernel tells it.
pub fn discover(dir: &Path) -> (Json, Duration, Option<u64>) {
    let none = tempfile::tempdir().expect("temporary directory");
    let out = none.path().join("out.json");
    let start = Instant::now();
    let mut child = crate::structures(none.path())
        .args(["--json", "discover"])
        .arg(dir)
        .stdout(fs::File::create(&out).expect("created"))
        .spawn()
        .expect("started");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = None;
    let code = loop {
        if let Ok(text) = fs::read_to_string(&status) {
            let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
            let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            peak = peak.max(kib.map(|k| k << 10));
        }
        if let Some(code) = child.try_wait().expect("waited") {
            break code;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let took = start.elapsed();
    assert!(code.success(), "{code}");
    let text = fs::read_to_string(&out).expect("written");
    (serde_json::from_str(&text).expect("JSON"), took, peak)
}
