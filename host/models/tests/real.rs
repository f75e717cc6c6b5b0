//! A checkpoint nobody here made: `cargo xtask fetch-model smollm2` first, then `cargo xtask test --real`.

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
