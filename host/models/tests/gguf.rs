//! GGUF files: the same model as a directory and as a file, and files that are broken.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/gguf.rs"]
mod write;

use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use common::*;
use structures_models::config::RopeScaling;
use structures_models::generate::advance;
use structures_models::{Checkpoint, Description, Model, Tokenizer, FAMILIES};

/// The oracle's models in f32: every parameter comes out bit by bit as from the directory.
#[test]
fn the_same_parameters_as_from_a_directory() {
    for name in ["llama", "qwen2", "qwen3"] {
        let hf = Description::open(&case(name)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        write::write(&path, &write::metadata(&hf), &write::tensors(&hf), |_| {
            GgmlDType::F32
        });
        let gguf = Description::open(&path).unwrap();
        assert_eq!(gguf.name, "m");
        let digest = gguf.checkpoint.digest().unwrap();
        let moved = dir.path().join("other.gguf");
        std::fs::copy(&path, &moved).unwrap();
        let again = Checkpoint::open(&moved).unwrap().digest().unwrap();
        assert_eq!(digest, again, "{name}: the same model under another name");
        assert_ne!(digest, hf.checkpoint.digest().unwrap());

        let (mut a, mut b) = (hf.config.clone(), gguf.config.clone());
        let frequencies = a.rope.inv_freq(a.rotary);
        for (x, y) in frequencies.iter().zip(b.rope.inv_freq(b.rotary)) {
            assert!((x - y).abs() < 1e-7 * x, "{name}: {x} {y}");
        }
        (a.notes, b.notes) = (Vec::new(), Vec::new());
        a.rope = b.rope.clone();
        assert_eq!(a, b, "{name}");

        for value in &hf.graph.values {
            let structures_graph::Origin::Param { param, .. } = &value.origin else {
                continue;
            };
            let x = hf.loader().load(param).unwrap();
            let y = gguf.loader().load(param).unwrap();
            let bits = |t: &candle_core::Tensor| {
                let t = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                t.iter().map(|v| v.to_bits()).collect::<Vec<u32>>()
            };
            assert_eq!(x.dims(), y.dims(), "{name} {param}");
            assert!(bits(&x) == bits(&y), "{name} {param}");
        }
    }
}

/// Every family with an architecture of its own gives the same scores from a file as from a directory, whatever the
/// file has baked in or leaves to be known.
#[test]
fn the_same_scores_as_from_a_directory() {
    let mut run = 0;
    for entry in std::fs::read_dir(families()).unwrap() {
        let dir = entry.unwrap().path();
        let Ok(hf) = Model::open(&dir) else { continue };
        let architectures = FAMILIES
            .iter()
            .find(|f| f.name() == hf.description.family)
            .map(|f| f.gguf_architectures());
        // The decoder of a larger model has none.
        let whole = hf.config().root == "model";
        if !whole || architectures.unwrap_or_default().is_empty() {
            continue;
        }
        let out = tempfile::tempdir().unwrap();
        let path = out.path().join("m.gguf");
        let d = &hf.description;
        write::write(&path, &write::metadata(d), &write::tensors(d), |_| {
            GgmlDType::F32
        });
        let mut file = Description::open(&path).unwrap();
        // No key holds another activation than the family's, or what these scalings ask for.
        let c = &d.config;
        let scaled = c
            .local_rope
            .as_ref()
            .is_some_and(|r| r.scaling != RopeScaling::None);
        let odd = scaled || c.rope.amplitude != 1.0 || c.rope.limit.is_some();
        if odd || file.config.act != c.act {
            continue;
        }
        run += 1;
        // No key holds the factor of this small model's attention.
        let lost = d.config.attention_scale;
        if let (None, Some(scale)) = (file.config.attention_scale, lost) {
            let mut graph = (*file.graph).clone();
            for op in &mut graph.ops {
                if op.kind == structures_graph::OpKind::Attention {
                    op.attrs
                        .insert("scale".into(), structures_graph::AttrValue::Float(scale));
                }
            }
            file.graph = std::sync::Arc::new(graph);
        }
        let file = Model::load(file).unwrap();
        let tokens: Vec<u32> = (0..20).map(|i| 3 + (i * 7) % 50).collect();
        let scores = |m: &Model| {
            let mut state = m.session.new_state(1, tokens.len());
            let plan = m.session.host_plan();
            let out = advance(m, &plan, &mut state, &tokens, None).unwrap();
            out.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let (a, b) = (scores(&hf), scores(&file));
        let scale = a.iter().fold(0f32, |m, v| m.max(v.abs()));
        let worst = a
            .iter()
            .zip(&b)
            .fold(0f32, |m, (x, y)| m.max((x - y).abs()));
        assert!(worst < 1e-5 * scale, "{dir:?}: {worst} of {scale}");
    }
    assert!(run >= 8, "{run}");
}

fn small() -> (tempfile::TempDir, std::path::PathBuf, Description) {
    let hf = Description::open(&case("llama")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write::write(&path, &write::metadata(&hf), &write::tensors(&hf), |_| {
        GgmlDType::F32
    });
    (dir, path, hf)
}

#[test]
fn truncated_anywhere() {
    let (_dir, path, _) = small();
    let whole = std::fs::read(&path).unwrap();
    let data = whole.len() - 300_000;
    let cuts = (0..60)
        .chain((60..data).step_by(97))
        .chain([data, whole.len() - 40]);
    for cut in cuts {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let message = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(
            message.contains("m.gguf") && message.contains("get it again"),
            "{cut}: {message}"
        );
    }
}

#[test]
fn no_flipped_byte_of_the_header_panics() {
    let (_dir, path, _) = small();
    let whole = std::fs::read(&path).unwrap();
    let header = 3000.min(whole.len());
    for at in (0..header).step_by(11) {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            std::fs::write(&path, &bytes).unwrap();
            let _ = Description::open(&path); // any answer but a panic
        }
    }
}

#[test]
fn headers_name_what_is_wrong() {
    let (_dir, path, hf) = small();
    let whole = std::fs::read(&path).unwrap();
    let mut old = whole.clone();
    old[4] = 1;
    std::fs::write(&path, &old).unwrap();
    names_all(Checkpoint::open(&path), &["GGUF version", "`1`", "2 or 3"]);

    let (meta, tensors) = (write::metadata(&hf), write::tensors(&hf));
    let save = |meta: &[(String, Value)], tensors: &[(String, candle_core::Tensor)]| {
        write::write(&path, meta, tensors, |_| GgmlDType::F32)
    };
    let with = |key: &str, value: Option<Value>| {
        let mut meta = meta.clone();
        meta.retain(|(k, _)| k != key);
        meta.extend(value.map(|v| (key.to_string(), v)));
        save(&meta, &tensors);
        Description::open(&path)
    };
    let text = |s: &str| Some(Value::String(s.into()));
    names_all(
        with("general.alignment", Some(Value::U32(0))),
        &["general.alignment", "found 0"],
    );
    names_all(
        with("general.architecture", None),
        &["general.architecture", "found nothing"],
    );
    names_all(
        with("general.architecture", text("mamba")),
        &["`mamba`", "llama", "qwen2, qwen3"],
    );
    names_all(
        with("llama.block_count", None),
        &["llama.block_count", "found nothing"],
    );
    names_all(
        with("llama.block_count", Some(Value::F32(2.5))),
        &["llama.block_count", "2.5"],
    );
    names_all(
        with("llama.block_count", Some(Value::U32(9))),
        &["`blk.3.attn_q.weight`", "no such"],
    );
    names_all(
        with("llama.block_count", Some(Value::U32(1))),
        &["tensor `blk.1.", "only layers below 1", "found layer 1"],
    );
    names_all(
        with("llama.attention.value_length", Some(Value::U32(4))),
        &["value_length", "`4`"],
    );
    names_all(
        with("llama.rope.scaling.type", text("yarn")),
        &["rope.scaling.type", "`yarn`"],
    );
    names_all(
        with("llama.attention.causal", Some(Value::Bool(false))),
        &["llama.attention.causal", "`false`"],
    );
    names_all(
        with("llama.vocab_size", Some(Value::U32(7))),
        &["llama.vocab_size", "259 rows"],
    );
    let short = tensors
        .iter()
        .filter(|(n, _)| n != "blk.1.ffn_up.weight")
        .cloned()
        .collect::<Vec<_>>();
    save(&meta, &short);
    names_all(
        Description::open(&path),
        &[
            "`blk.1.ffn_up.weight`",
            "model.layers.1.mlp.up_proj.weight",
            "[104, 48]",
        ],
    );
    let mut twice = tensors.clone();
    twice.push(tensors[0].clone());
    save(&meta, &twice);
    names_all(
        Checkpoint::open(&path),
        &["m.gguf", &tensors[0].0, "it twice"],
    );
    let mut meta_twice = meta.clone();
    meta_twice.push(meta[1].clone());
    save(&meta_twice, &tensors);
    names_all(
        Checkpoint::open(&path),
        &["metadata key `llama.block_count`", "found two"],
    );
}

/// A byte-level vocabulary of all bytes, two merges and one control token.
fn vocabulary(pre: Option<&str>) -> Vec<(String, Value)> {
    let text = |s: &str| Value::String(s.into());
    let mut tokens: Vec<String> = Vec::new();
    let mut extra = 256u32;
    for byte in 0..=255u8 {
        let own = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let c = match own {
            true => char::from(byte),
            false => {
                extra += 1;
                char::from_u32(extra - 1).unwrap()
            }
        };
        tokens.push(c.to_string());
    }
    tokens.extend(["he", "\u{120}he", "<|end|>"].map(String::from));
    let mut types = vec![Value::I32(1); 258];
    types.push(Value::I32(3));
    let mut rows = vec![
        ("tokenizer.ggml.model", text("gpt2")),
        (
            "tokenizer.ggml.tokens",
            Value::Array(tokens.iter().map(|t| text(t)).collect()),
        ),
        (
            "tokenizer.ggml.merges",
            Value::Array(vec![text("h e"), text("\u{120} he")]),
        ),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.chat_template", text("{{ messages }}")),
    ];
    rows.extend(pre.map(|p| ("tokenizer.ggml.pre", text(p))));
    rows.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
}

fn tokenizer(
    extra: Vec<(String, Value)>,
) -> Result<Option<Tokenizer>, structures_models::ModelError> {
    let (_dir, path, hf) = small();
    let mut meta = write::metadata(&hf);
    for (key, value) in extra {
        meta.retain(|(k, _)| *k != key);
        meta.push((key, value));
    }
    write::write(&path, &meta, &write::tensors(&hf), |_| GgmlDType::F32);
    let model = Description::open(&path).unwrap();
    Tokenizer::open(&model.checkpoint, &model.config)
}

#[test]
fn a_vocabulary_of_the_file() {
    let t = tokenizer(vocabulary(Some("gpt-2"))).unwrap().unwrap();
    let ids = t.encode("the he<|end|>", true).unwrap();
    assert_eq!(ids, [u32::from(b't'), 256, 257, 258]);
    assert_eq!(t.decode(&ids).unwrap(), "the he<|end|>");
    assert_eq!(t.chat_template(), Some("{{ messages }}"));
    assert_eq!(
        (t.eos_ids(), t.bos_id(), t.token_id("<|end|>")),
        (&[2][..], Some(1), Some(258))
    );

    let mut bos = vocabulary(Some("gpt-2"));
    bos.push(("tokenizer.ggml.add_bos_token".into(), Value::Bool(true)));
    bos.push(("tokenizer.ggml.bos_token_id".into(), Value::U32(258)));
    let t = tokenizer(bos).unwrap().unwrap();
    assert_eq!(t.encode("he", true).unwrap(), [258, 256]);
    assert_eq!(t.encode("he", false).unwrap(), [256]);
}

#[test]
fn no_half_character_leaves_the_stream() {
    let t = tokenizer(vocabulary(None)).unwrap().unwrap();
    let text = "a\u{fc}\u{1f600} z";
    let ids = t.encode(text, false).unwrap();
    let mut stream = t.stream();
    let pieces: Vec<String> = ids.iter().map(|i| stream.push(*i).unwrap()).collect();
    assert_eq!(pieces.concat(), text);
    assert_eq!(pieces[1..3], [String::new(), "\u{fc}".into()]);
    // Cut inside a character: nothing until the end is declared, then the replacement character.
    let mut stream = t.stream();
    assert_eq!(stream.push(ids[1]).unwrap(), "");
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn vocabularies_that_cannot_be_read() {
    names_all(
        tokenizer(vocabulary(Some("odd"))),
        &["tokenizer.ggml.pre", "`odd`", "smollm"],
    );
    let replace = |key: &str, value: Value| {
        let mut rows = vocabulary(None);
        rows.retain(|(k, _)| k != key);
        rows.push((key.into(), value));
        tokenizer(rows)
    };
    let text = |s: &str| Value::String(s.into());
    names_all(
        replace("tokenizer.ggml.model", text("rwkv")),
        &["tokenizer.ggml.model", "`rwkv`", "gpt2"],
    );
    names_all(
        replace("tokenizer.ggml.tokens", text("x")),
        &["tokenizer.ggml.tokens", "found none"],
    );
    let one = |s: &str| Value::Array(vec![text(s)]);
    names_all(
        replace("tokenizer.ggml.merges", one("xy")),
        &["merges[0]", "found `xy`"],
    );
    names_all(
        replace("tokenizer.ggml.merges", one("h qq")),
        &["tokenizer", "qq"],
    );
    let types = Value::Array(vec![Value::I32(1)]);
    names_all(
        replace("tokenizer.ggml.token_type", types),
        &["token_type", "259", "found 1"],
    );
    assert!(tokenizer(Vec::new()).unwrap().is_none());
}
