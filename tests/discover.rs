//! `discover` on checkpoints that nothing here runs, and on large ones.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::Path;

use serde_json::{json, Value as Json};
use structures_tests::large::{discover, sparse_checkpoint};
use structures_tests::structures;

/// At ten times the figures of the benchmark: 500 ms, 100 MB.
#[test]
fn a_checkpoint_of_70b_shape_takes_a_blink() {
    for kind in ["llama", "never-heard-of"] {
        let dir = tempfile::tempdir().unwrap();
        sparse_checkpoint(dir.path(), kind);
        let (found, took, peak) = discover(dir.path());
        assert!(took.as_secs_f64() < 5.0, "{kind}: {took:?}");
        assert!(peak.unwrap_or(0) < 1000 << 20, "{kind}: {peak:?}");
        let of = |structure: &str| {
            let seams = found["seams"].as_array().unwrap().iter();
            seams.filter(|s| s["structure"] == structure).count()
        };
        assert_eq!(of("decoder_ffn"), 80, "{kind}");
        assert_eq!(of("qkv_pack"), 80, "{kind}");
        let known = kind == "llama";
        assert_eq!(found.get("executable"), (!known).then_some(&json!(false)));
    }
}

fn model(dir: &Path, config: &Json, tensors: &[(&str, [u64; 2])]) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut at = 0;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let end = at + shape[0] * shape[1] * 2;
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]});
        header.insert((*name).into(), entry);
        at = end;
    }
    let header = Json::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let size = bytes.len() as u64 + at;
    let path = dir.join("model.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(size).unwrap();
}

fn json_of(dir: &Path) -> Json {
    let none = tempfile::tempdir().unwrap();
    let out = structures(none.path())
        .args(["--json", "discover"])
        .arg(dir)
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn fused_weights_of_an_unknown_family_are_addressed_by_rows() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"model_type": "odd", "num_attention_heads": 8, "num_key_value_heads": 8});
    model(
        dir.path(),
        &config,
        &[
            ("m.0.mlp.gate_up_proj.weight", [1024, 512]),
            ("m.0.mlp.down_proj.weight", [512, 512]),
            ("m.0.attn.qkv_proj.weight", [1536, 512]),
            ("m.1.attn.query_key_value.weight", [1536, 512]),
        ],
    );
    let found = json_of(dir.path());
    let seams = found["seams"].as_array().unwrap();
    let seam = |structure: &str| seams.iter().find(|s| s["structure"] == structure).unwrap();
    let ffn = seam("decoder_ffn");
    assert_eq!(ffn["weights"]["w_up"]["path"], "m.0.mlp.gate_up_proj");
    assert_eq!(ffn["weights"]["w_gate"]["rows"], json!([0, 512]));
    assert_eq!(ffn["weights"]["w_up"]["rows"], json!([512, 1024]));
    assert_eq!(ffn["weights"]["w_down"].get("rows"), None);
    let pack = seam("qkv_pack");
    assert_eq!(pack["weights"]["w_1"]["rows"], json!([512, 1024]));
    let doubtful: Vec<&Json> = found["refused"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|r| r["code"] == "fused_rows_unknown" && r["structure"] == "qkv_pack")
        .collect();
    assert_eq!(doubtful.len(), 1, "{found}");
    assert_eq!(doubtful[0]["path"], "m.1.attn");
    assert_eq!(found["executable"], false);
    let why = found["not_executable"]["reason"].as_str().unwrap();
    assert!(why.contains("`odd`"), "{why}");

    // People are told too, and running it is refused.
    let none = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let out = structures(none.path()).args(args).arg(dir.path()).output();
        let out = out.unwrap();
        let text = [out.stdout, out.stderr].concat();
        (out.status.code(), String::from_utf8(text).unwrap())
    };
    let (code, text) = run(&["discover"]);
    assert_eq!(code, Some(0));
    assert!(text.contains("cannot be executed"), "{text}");
    let (code, text) = run(&["attach"]);
    assert_eq!(code, Some(1), "{text}");
}

/// A config that contradicts its tensors is a fault of the checkpoint, not an unknown family.
#[test]
fn a_contradiction_is_still_an_error() {
    let dir = tempfile::tempdir().unwrap();
    sparse_checkpoint(dir.path(), "llama");
    let path = dir.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("28672", "28673")).unwrap();
    let none = tempfile::tempdir().unwrap();
    let out = structures(none.path())
        .arg("discover")
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(text.contains("mlp.gate_proj.weight"), "{text}");
}

/// The half that sees runs in another phase: its seams are located there, and nothing is refused for its absence.
#[test]
fn a_model_that_sees_is_looked_at_in_every_phase() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found = json_of(&root.join("fixtures/families/qwen3_vl"));
    let rows = |key: &str| found[key].as_array().unwrap().clone();
    let inside = |row: &Json| row["path"].as_str().unwrap().starts_with("model.visual.");
    for structure in ["vision_ffn", "norm_fused", "attention_core"] {
        let seams = rows("seams");
        let seen: Vec<&Json> = seams
            .iter()
            .filter(|s| s["structure"] == structure && inside(s))
            .collect();
        assert!(!seen.is_empty(), "{structure}: {found}");
        assert!(seen.iter().all(|s| s["located"] == true), "{seen:?}");
    }
    let refused = rows("refused");
    let absent = refused
        .iter()
        .find(|r| r["reason"].as_str().unwrap().contains("does not read it"));
    assert_eq!(absent, None);
    // What both phases run is there once.
    let mut keys: Vec<String> = rows("seams")
        .iter()
        .map(|s| format!("{} {}", s["structure"], s["key"]))
        .collect();
    keys.sort();
    let all = keys.len();
    keys.dedup();
    assert_eq!(keys.len(), all);
}

/// What a family's layers do not have changes what the model says; what stands elsewhere is told.
#[test]
fn tensors_that_the_model_does_not_read_are_refused_or_told() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/oracle/e2e/llama");
    let with = |extra: &str| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(source.join("config.json"), dir.path().join("config.json")).unwrap();
        let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Json = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let end = bytes.len() - 8 - length;
        let entry = json!({"dtype": "F32", "shape": [8], "data_offsets": [end, end + 32]});
        header[extra] = entry;
        let text = header.to_string();
        let mut out = (text.len() as u64).to_le_bytes().to_vec();
        out.extend(text.as_bytes());
        out.extend(&bytes[8 + length..]);
        out.extend([0u8; 32]);
        std::fs::write(dir.path().join("model.safetensors"), out).unwrap();
        dir
    };
    let name = "model.layers.0.self_attn.q_norm.weight";
    let dir = with(name);
    let none = tempfile::tempdir().unwrap();
    let out = structures(none.path())
        .args(["--json", "discover"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    let error: Json = serde_json::from_slice(&out.stdout).unwrap();
    let text = error["error"]["message"].as_str().unwrap();
    assert!(text.contains(name) && text.contains("[8]"), "{text}");

    for fine in ["model.extra.weight", "model.layers.0.self_attn.k_scale"] {
        let found = json_of(with(fine).path());
        let notes = found["notes"].to_string();
        assert!(notes.contains(fine), "{notes}");
    }
}
