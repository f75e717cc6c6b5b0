//! Checkpoints nobody here made: `cargo xtask fetch-model smollm2` (and `gemma3`) first, then `cargo xtask test --real`.

#![allow(clippy::unwrap_used)]

mod common;

use common::repository;
use structures_models::{generate, Model};

#[test]
#[ignore = "needs models/smollm2 (98 MB)"]
fn smollm2_answers_in_english() {
    let path = repository().join("models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    let start = std::time::Instant::now();
    let model = Model::open(&path).unwrap();
    println!(
        "opened in {:?}; {:?}",
        start.elapsed(),
        model.config().notes
    );
    let tokenizer = model.tokenizer().unwrap();
    let question =
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    let prompt = tokenizer.encode(question, true).unwrap();
    assert_eq!(prompt[0], 1, "a control token stays one token");
    assert_eq!(tokenizer.decode(&prompt).unwrap(), question);
    assert_eq!(tokenizer.encode("In 2024 it's", false).unwrap().len(), 8);
    let plan = model.session.host_plan();
    let mut text = String::new();
    let mut stream = tokenizer.stream();
    let mut on_token = |t| text += &stream.push(t).unwrap();
    let out = generate(&model, &plan, &prompt, 40, &mut on_token).unwrap();
    println!("{text:?} {:?}", out.stop);
    assert!(text.contains("Paris"), "{text}");

    let long = "The history of the city begins with a small settlement on an island in the river. ";
    let mut prompt = tokenizer.encode(&long.repeat(10), true).unwrap();
    prompt.truncate(128);
    for _ in 0..3 {
        let out = generate(&model, &plan, &prompt, 64, &mut |_| ()).unwrap();
        println!(
            "prefill {:.1}/s, decode {:.1}/s",
            out.prefill_tps(),
            out.decode_tps()
        );
    }
}

/// Token ids of `fixtures/gemma3_tokens.json` were made by llama.cpp from the same file.
#[test]
#[ignore = "needs models/gemma3 (253 MB)"]
fn gemma3_reads_like_llama_cpp_and_writes_prose() {
    let path = repository().join("models/gemma3/gemma-3-270m-q4_k_m.gguf");
    let start = std::time::Instant::now();
    let model = Model::open(&path).unwrap();
    let c = model.config();
    println!("opened in {:?}; {:?}", start.elapsed(), c.notes);
    let windows: Vec<usize> = (0..c.layers).filter(|i| c.windows[*i].is_none()).collect();
    assert_eq!(windows, [5, 11, 17], "every sixth layer sees all");
    assert_eq!(c.windows[0], Some(512));
    assert!(!c.norm_offset, "the file has the sum");
    assert_eq!(c.local_rope.as_ref().unwrap().theta, 10000.0);

    let tokenizer = model.tokenizer().unwrap();
    let cases = repository().join("tests/fixtures/gemma3_tokens.json");
    let cases: Vec<serde_json::Value> =
        serde_json::from_slice(&std::fs::read(cases).unwrap()).unwrap();
    for case in &cases {
        let text = case["text"].as_str().unwrap();
        let want: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, true).unwrap(), want, "{text:?}");
        let back = tokenizer.decode(&want[1..]).unwrap();
        assert_eq!(back, text);
    }

    let plan = model.session.host_plan();
    for prompt in ["The history of the city begins with", "Once upon a time"] {
        let prompt = tokenizer.encode(prompt, true).unwrap();
        let out = generate(&model, &plan, &prompt, 40, &mut |_| ()).unwrap();
        let text = tokenizer.decode(&out.tokens).unwrap();
        println!("{text:?} {:?}", out.stop);
        println!("{:?}", &out.tokens[..16.min(out.tokens.len())]);
        println!(
            "prefill {:.1}/s, decode {:.1}/s",
            out.prefill_tps(),
            out.decode_tps()
        );
        assert!(text.is_ascii() && text.matches(' ').count() > 20, "{text}");
    }

    // Longer than the window, and more than there is room for.
    let long = tokenizer
        .encode(&"The river was long and slow. ".repeat(90), true)
        .unwrap();
    assert!(long.len() > 600);
    let out = generate(&model, &plan, &long, 8, &mut |_| ()).unwrap();
    let text = tokenizer.decode(&out.tokens).unwrap();
    println!("after {} tokens: {text:?}", long.len());
    assert!(text.to_lowercase().contains("river"), "{text}");
    let full = generate(&model, &plan, &long, c.max_positions, &mut |_| ()).unwrap_err();
    assert_eq!(full.code(), "context_full");
    assert!(full.to_string().contains("32768"), "{full}");
}
