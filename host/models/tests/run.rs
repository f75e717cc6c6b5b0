//! Loading and running: shards, quantised files, the limits of a run.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/gguf.rs"]
mod write;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use common::*;
use serde_json::json;
use structures_graph::{GraphError, Observer, ValueId};
use structures_models::generate::{advance, greedy, teacher_forced};
use structures_models::{generate, Description, Model, ModelError, Stop};

fn logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let mut state = model.session.new_state(1, tokens.len());
    let plan = model.session.host_plan();
    let out = advance(model, &plan, &mut state, tokens, None).unwrap();
    out.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn shards_make_the_same_model() {
    let dir = copy("qwen3");
    let whole = Model::open(dir.path()).unwrap();
    let hash = whole.description.checkpoint.hash().unwrap();
    let all = tensors(dir.path());
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for (i, part) in all.chunks(all.len().div_ceil(3)).enumerate() {
        let shard = format!("model-{:05}-of-00003.safetensors", i + 1);
        save(&dir.path().join(&shard), part);
        map.extend(part.iter().map(|(n, _)| (n.clone(), json!(shard))));
    }
    let index = json!({ "metadata": {"total_size": 0}, "weight_map": map });
    std::fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let sharded = Model::open(dir.path()).unwrap();
    assert_eq!(sharded.description.checkpoint.files().len(), 3);
    assert_eq!(logits(&whole, &[5, 9, 200]), logits(&sharded, &[5, 9, 200]));
    assert_ne!(sharded.description.checkpoint.hash().unwrap(), hash);
}

/// A Llama whose rows divide into blocks, weights drawn from a fixed sequence.
fn block_sized() -> tempfile::TempDir {
    let (d, f, kv, vocab, layers) = (64, 96, 32, 160, 2);
    let mut seed = 1u64;
    let mut draw = |dims: &[usize], around: f32| {
        let n = dims.iter().product();
        let values: Vec<f32> = (0..n)
            .map(|_| {
                seed = seed
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                around + ((seed >> 40) as f32 / (1u32 << 24) as f32 - 0.5) * 0.4
            })
            .collect();
        tensor(&values, dims)
    };
    let mut all = vec![
        (
            "model.embed_tokens.weight".to_string(),
            draw(&[vocab, d], 0.0),
        ),
        ("model.norm.weight".into(), draw(&[d], 1.0)),
    ];
    for i in 0..layers {
        let mut add =
            |name: &str, t: Tensor| all.push((format!("model.layers.{i}.{name}.weight"), t));
        add("input_layernorm", draw(&[d], 1.0));
        add("post_attention_layernorm", draw(&[d], 1.0));
        add("self_attn.q_proj", draw(&[d, d], 0.0));
        add("self_attn.k_proj", draw(&[kv, d], 0.0));
        add("self_attn.v_proj", draw(&[kv, d], 0.0));
        add("self_attn.o_proj", draw(&[d, d], 0.0));
        add("mlp.gate_proj", draw(&[f, d], 0.0));
        add("mlp.up_proj", draw(&[f, d], 0.0));
        add("mlp.down_proj", draw(&[d, f], 0.0));
    }
    let dir = tempfile::tempdir().unwrap();
    save(&dir.path().join("model.safetensors"), &all);
    let config = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": d, "intermediate_size": f,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 32,
        "tie_word_embeddings": true, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

/// The file's logits equal those of a directory that holds the dequantised weights.
#[test]
fn a_quantised_file_equals_its_dequantised_directory() {
    let dir = block_sized();
    let hf = Description::open(dir.path()).unwrap();
    let kind = |name: &str| match name {
        n if n.contains("norm") => GgmlDType::F32,
        n if n.contains("token_embd") => GgmlDType::Q8_0,
        n if n.contains("attn_q") => GgmlDType::F16,
        _ => GgmlDType::Q4_1,
    };
    let gguf = dir.path().join("m.gguf");
    let meta = write::metadata(&hf);
    let stored: Vec<_> = write::tensors(&hf)
        .into_iter()
        .filter(|(n, _)| n != "rope_freqs.weight")
        .collect();
    write::write(&gguf, &meta, &stored, kind);
    let file = Model::open(&gguf).unwrap();

    // Blocks run along rows, so permuting rows and quantising commute: quantise the published order.
    let names = |gguf: &str| {
        let mut long = gguf.to_string();
        for (a, b) in [
            ("token_embd", "model.embed_tokens"),
            ("output_norm", "model.norm"),
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("blk", "model.layers"),
        ] {
            long = long.replace(a, b);
        }
        long
    };
    let published: std::collections::HashMap<String, Tensor> =
        tensors(dir.path()).into_iter().collect();
    let rounded: Vec<(String, Tensor)> = stored
        .iter()
        .map(|(n, _)| {
            let long = names(n);
            let q = QTensor::quantize(&published[&long], kind(n)).unwrap();
            (long, q.dequantize(&Device::Cpu).unwrap())
        })
        .collect();
    save(&dir.path().join("model.safetensors"), &rounded);
    let directory = Model::open(dir.path()).unwrap();

    let tokens = [3, 77, 159, 0, 12];
    let (a, b) = (logits(&file, &tokens), logits(&directory, &tokens));
    let scale = a.iter().fold(0f32, |m, v| m.max(v.abs()));
    let worst = a
        .iter()
        .zip(&b)
        .fold(0f32, |m, (x, y)| m.max((x - y).abs()));
    assert!(worst < 1e-5 * scale, "{worst} of {scale}");
    let dtype = |path: &str| {
        file.tree().get(path).unwrap().params["weight"]
            .dtype
            .clone()
    };
    assert_eq!(dtype("model.layers.1.mlp.up_proj"), "q4_1");
    assert_eq!(dtype("lm_head"), "q8_0");
}

/// bf16 and f16 weights, mixed, are those values in f32.
#[test]
fn half_precision_checkpoints() {
    let dir = copy("llama");
    let all = tensors(dir.path());
    let half: Vec<(String, Tensor)> = all
        .iter()
        .enumerate()
        .map(|(i, (n, t))| {
            let dtype = if i % 2 == 0 { DType::BF16 } else { DType::F16 };
            (n.clone(), t.to_dtype(dtype).unwrap())
        })
        .collect();
    let file = dir.path().join("model.safetensors");
    save(&file, &half);
    let stored = logits(&Model::open(dir.path()).unwrap(), &[1, 2, 3]);
    let wide = half
        .iter()
        .map(|(n, t)| (n.clone(), t.to_dtype(DType::F32).unwrap()));
    save(&file, &wide.collect::<Vec<_>>());
    assert_eq!(
        stored,
        logits(&Model::open(dir.path()).unwrap(), &[1, 2, 3])
    );
}

#[test]
fn a_weight_that_is_not_finite_stops_the_load() {
    let dir = copy("llama");
    let mut all = tensors(dir.path());
    let (name, t) = &mut all[4];
    let mut values = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values[17] = f32::NEG_INFINITY;
    *t = tensor(&values, t.dims());
    let name = name.clone();
    save(&dir.path().join("model.safetensors"), &all);
    assert!(
        Description::open(dir.path()).is_ok(),
        "headers are in order"
    );
    let error = Model::open(dir.path()).unwrap_err();
    assert!(matches!(&error, ModelError::NonFinite { tensor, first: 17, .. } if *tensor == name));
    assert_eq!(error.code(), "non_finite");
}

#[test]
fn the_limits_of_a_run() {
    let dir = block_sized();
    let model = Model::open(dir.path()).unwrap();
    let plan = model.session.host_plan();
    let run = |prompt: &[u32], n| generate(&model, &plan, prompt, n, &mut |_| ());
    names_all(run(&[], 4), &["the prompt is empty", "give --prompt"]);
    names_all(
        run(&[1, 160], 4),
        &["token 160 at position 1", "vocabulary size 160"],
    );
    names_all(
        run(&[1; 30], 3),
        &[
            "context is full",
            "30 tokens and 3 new ones make 33",
            "at most 32",
        ],
    );
    for n in [usize::MAX, usize::MAX - 29, usize::MAX - 30] {
        names_all(
            run(&[1; 30], n),
            &["context is full", "30 tokens", "at most 32"],
        );
    }
    assert_eq!(run(&[1; 30], 2).unwrap().tokens.len(), 2);
    assert_eq!(run(&[1; 30], 0).unwrap().tokens.len(), 0);
    names_all(
        model.tokenizer().map(|_| ()),
        &["tokenizer", "give token ids"],
    );
    let mut state = model.session.new_state(1, 0);
    advance(&model, &plan, &mut state, &[1; 32], None).unwrap();
    let over = advance(&model, &plan, &mut state, &[1], None);
    names_all(over.map(|_| ()), &["32 tokens and 1 new ones make 33"]);
}

/// Finite weights whose scores overflow: no token is better than another, so none is made up.
#[test]
fn scores_without_a_number_end_a_run() {
    let dir = copy("llama");
    let mut all = tensors(dir.path());
    let norm = all.iter_mut().find(|(n, _)| n == "model.norm.weight");
    let (_, norm) = norm.unwrap();
    *norm = tensor(&vec![3.4e38; norm.dims()[0]], norm.dims());
    save(&dir.path().join("model.safetensors"), &all);
    let model = Model::open(dir.path()).unwrap();
    let plan = model.session.host_plan();
    let mut made = Vec::new();
    let error = generate(&model, &plan, &[1, 2], 4, &mut |t| made.push(t)).unwrap_err();
    assert_eq!(error.code(), "non_finite", "{error}");
    assert!(made.is_empty());
    names_all(
        Err::<(), _>(error),
        &["scores of the next token", "found only NaN or infinity"],
    );
}

#[test]
fn an_end_token_ends_and_a_callback_sees_the_rest() {
    let dir = copy("llama");
    let first = generate_with(dir.path(), 8).0;
    assert_eq!(first.len(), 8);
    edit_config(dir.path(), |c| {
        drop(c.insert("eos_token_id".into(), json!([999_999, first[5]])))
    });
    let end = first.iter().position(|t| *t == first[5]).unwrap();
    let (tokens, stop) = generate_with(dir.path(), 8);
    assert_eq!(tokens, first[..end]);
    assert_eq!(stop, Stop::EndOfText(first[5]));
}

fn generate_with(dir: &Path, n: usize) -> (Vec<u32>, Stop) {
    let model = Model::open(dir).unwrap();
    let mut seen = Vec::new();
    let plan = model.session.host_plan();
    let out = generate(&model, &plan, &[7, 8, 9], n, &mut |t| seen.push(t)).unwrap();
    assert_eq!(out.tokens, seen);
    assert_eq!(out.prompt, 3);
    (out.tokens, out.stop)
}

/// Every host family, by the small models of this repository and of the oracle.
fn every_family() -> Vec<(String, Model)> {
    let mut models = Vec::new();
    for root in [families(), oracle("e2e")] {
        for entry in std::fs::read_dir(root).unwrap() {
            let dir = entry.unwrap().path();
            let Ok(description) = Description::open(&dir) else {
                assert!(!dir.starts_with(families()), "{dir:?}");
                continue;
            };
            models.push((dir.display().to_string(), Model::load(description).unwrap()));
        }
    }
    let built: std::collections::BTreeSet<&str> =
        models.iter().map(|(_, m)| m.description.family).collect();
    for family in structures_models::FAMILIES {
        assert!(
            built.contains(family.name()),
            "no model of {}",
            family.name()
        );
    }
    models
}

/// A conversation that goes on gives the rows of one long run: past every window, and with recurrent states; and a step
/// taken back leaves no trace.
#[test]
fn pieces_equal_one_long_run_in_every_family() {
    for (name, model) in every_family() {
        let plan = model.session.host_plan();
        let tokens: Vec<u32> = (0..24).map(|i| 3 + (i * 11) % 40).collect();
        let width = model.config().windows.iter().flatten().max();
        assert!(width.is_none_or(|w| *w < tokens.len()), "{name}");
        let whole = logits(&model, &tokens);
        let scale = whole.iter().fold(0f32, |m, v| m.max(v.abs()));
        for ends in [&[13, 14, 15, 21, 24][..], &[1, 2, 24], &[8, 16, 24]] {
            let mut state = model.session.new_state(1, 4);
            let mut from = 0;
            for to in ends {
                let piece = &tokens[from..*to];
                let before = state.len();
                advance(&model, &plan, &mut state, &[5, 6], None).unwrap();
                state.truncate(before).unwrap();
                let got = advance(&model, &plan, &mut state, piece, None).unwrap();
                assert_eq!(state.len(), *to);
                let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let vocab = got.len() / piece.len();
                for (a, b) in got.iter().zip(&whole[from * vocab..]) {
                    assert!((a - b).abs() < 2e-5 * scale, "{name}: {a} {b} of {scale}");
                }
                from = *to;
            }
        }
    }
}

/// Greedy tokens are those of runs over the whole text without a cache, from prompts shorter and longer than every
/// window, and across its edge.
#[test]
fn greedy_tokens_need_no_cache() {
    for (name, model) in every_family() {
        let plan = model.session.host_plan();
        let window = model.config().windows.iter().flatten().max().copied();
        for length in [1, window.unwrap_or(8), window.unwrap_or(8) + 7] {
            let prompt: Vec<u32> = (0..length as u32).map(|i| 3 + (i * 17) % 45).collect();
            let out = generate(&model, &plan, &prompt, 12, &mut |_| ()).unwrap();
            let mut text = prompt;
            for token in &out.tokens {
                let scores = logits(&model, &text);
                let vocab = model.config().vocab_size;
                let last = &scores[scores.len() - vocab..];
                // Two scores may be as good as equal; the order of sums then decides.
                let best = last.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
                let near = best - last[*token as usize] <= 2e-5 * best.abs();
                assert!(near, "{name}: {token} after {text:?}");
                text.push(*token);
            }
        }
    }
}

/// Every value of a run and how many numbers it holds.
struct Sizes<'a>(&'a structures_graph::Graph, BTreeMap<String, usize>);

impl Observer for Sizes<'_> {
    fn wants(&self, _: ValueId) -> bool {
        true
    }

    fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError> {
        let name = self.0.values[value.0].name.clone();
        self.1.insert(name, tensor.elem_count());
        Ok(())
    }
}

/// A step makes as much after a long text as after a short one, except that attention reads its cache; a recurrent
/// state stays as large as it was.
#[test]
fn a_step_does_not_grow_with_the_text() {
    for (name, model) in every_family() {
        let plan = model.session.host_plan();
        let step = |before: usize| {
            let mut state = model.session.new_state(1, before + 1);
            advance(&model, &plan, &mut state, &vec![7; before], None).unwrap();
            let mut sizes = Sizes(model.graph(), BTreeMap::new());
            advance(&model, &plan, &mut state, &[9], Some(&mut sizes)).unwrap();
            sizes.1
        };
        let (short, long) = (step(3), step(40));
        assert_eq!(short.len(), long.len(), "{name}");
        assert!(short.len() > 20, "{name}");
        for (value, size) in &short {
            let cached = value.ends_with(".k_all") || value.ends_with(".v_all");
            let times = long[value] as f64 / *size as f64;
            let want = if cached { 41.0 / 4.0 } else { 1.0 };
            assert!(
                (times - want).abs() < 1e-9,
                "{name}: {value} grows {times} times"
            );
        }
    }
}

/// A context that is full is refused before anything runs, with the numbers, and the state is as it was.
#[test]
fn a_full_context_is_refused_in_every_family() {
    for (name, model) in every_family() {
        let plan = model.session.host_plan();
        let max = model.config().max_positions;
        let long = vec![3u32; max + 1];
        let mut seen = 0;
        let mut refused = |prompt: &[u32], new: usize| {
            generate(&model, &plan, prompt, new, &mut |_| seen += 1).unwrap_err()
        };
        for (error, prompt, new) in [
            (refused(&long, 1), max + 1, 1),
            (refused(&long[..max], 1), max, 1),
            (refused(&long[..3], max - 2), 3, max - 2),
        ] {
            assert_eq!(error.code(), "context_full", "{name}");
            let all = prompt + new;
            let numbers = format!("{prompt} tokens and {new} new ones make {all}");
            let text = error.to_string();
            assert!(text.contains(&numbers), "{name}: {text}");
            assert!(text.contains(&format!("at most {max}")), "{name}: {text}");
            assert!(text.contains("ask for fewer tokens"), "{name}: {text}");
        }
        assert_eq!(seen, 0, "{name}");
        let mut state = model.session.new_state(1, 0);
        advance(&model, &plan, &mut state, &[3, 4, 5], None).unwrap();
        let error = advance(&model, &plan, &mut state, &long[..max - 2], None).unwrap_err();
        assert_eq!(error.code(), "context_full", "{name}");
        assert_eq!(state.len(), 3, "{name}");
    }
}

/// What scales its frequencies by the length of the text ends where the first set does.
#[test]
fn a_scaling_by_length_ends_the_context() {
    for (name, max, note) in [
        ("phi3_longrope", 64, "the context ends there, not at 256"),
        (
            "llama_dynamic",
            256,
            "begins beyond max_position_embeddings 256",
        ),
    ] {
        let model = Model::open(&families().join(name)).unwrap();
        assert_eq!(model.config().max_positions, max, "{name}");
        let notes = &model.config().notes;
        assert!(notes.iter().any(|n| n.contains(note)), "{name}: {notes:?}");
        let plan = model.session.host_plan();
        let error = generate(&model, &plan, &[4; 60], 200, &mut |_| ()).unwrap_err();
        assert!(
            error.to_string().contains(&format!("at most {max}")),
            "{error}"
        );
    }
}

/// Teacher-forced single steps give the rows of one long run.
#[test]
fn steps_equal_one_long_run() {
    let model = Model::open(&case("qwen2")).unwrap();
    let plan = model.session.host_plan();
    let tokens = [4u32, 100, 31, 7, 250, 13];
    let vocab = model.config().vocab_size;
    let whole = logits(&model, &tokens);
    let mut state = model.session.new_state(1, 4);
    advance(&model, &plan, &mut state, &tokens[..2], None).unwrap();
    let steps = teacher_forced(&model, &plan, &mut state, &tokens[2..]).unwrap();
    assert_eq!(steps.dims(), [4, vocab]);
    let steps = steps.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let scale = whole.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (a, b) in whole[2 * vocab..].iter().zip(&steps) {
        assert!((a - b).abs() < 1e-5 * scale, "{a} {b}");
    }
}

/// The model that ships with the repository.
#[test]
fn the_demo_model_speaks() {
    let model = Model::open(&repository().join("demo/model")).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let prompt = tokenizer.encode("And God said, ", true).unwrap();
    let plan = model.session.host_plan();
    let out = generate(&model, &plan, &prompt, 60, &mut |_| ()).unwrap();
    let text = tokenizer.decode(&out.tokens).unwrap();
    println!("{text}");
    assert!(
        text.is_ascii() && text.contains(' ') && text.contains("the"),
        "{text}"
    );
    let mut state = model.session.new_state(1, prompt.len());
    let scores = advance(&model, &plan, &mut state, &prompt, None).unwrap();
    assert_eq!(greedy(&scores).unwrap(), out.tokens[0]);
}
