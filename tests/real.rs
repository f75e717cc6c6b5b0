//! A checkpoint nobody here made, through every door: `cargo xtask fetch-model smollm2` first, then
//! `cargo xtask test --real`.
//!
//! What a figure is, is printed; what is asserted of a speed is a tenth of it, so that a busy machine is no failure.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use structures_tests::{json, plugins, root, structures, units};

/// Measured on two cores with AVX-512 VNNI: decode in 1/1.8 of the host's time.
const MEASURED_SPEEDUP: f64 = 1.8;

/// The checkpoint; without it the reason is printed and the test is over.
fn fetched(name: &str) -> Option<PathBuf> {
    let dir = root().join("models").join(name);
    let gguf = |entry: std::fs::DirEntry| {
        let path = entry.path();
        path.extension()
            .is_some_and(|e| e == "gguf")
            .then_some(path)
    };
    let found = std::fs::read_dir(&dir)
        .into_iter()
        .flatten()
        .find_map(|entry| gguf(entry.ok()?));
    if found.is_none() {
        println!(
            "skipped: no .gguf in {}; `cargo xtask fetch-model {name}` gets it",
            dir.display()
        );
    }
    found
}

fn generate(plugins: &Path, model: &Path, more: &[&str]) -> (Json, String) {
    let mut command = structures(plugins);
    command
        .arg("generate")
        .arg(model)
        .args(["--prompt", "The history of the city begins with"])
        .args(["--max-new-tokens", "48"])
        .args(more);
    let (code, document, log) = json(&mut command);
    assert_eq!(code, 0, "{document}\n{log}");
    (document, log)
}

fn is_prose(text: &str) -> bool {
    let count = |of: fn(char) -> bool| text.chars().filter(|c| of(*c)).count();
    let all = text.chars().count();
    all > 40
        && count(|c| c.is_ascii()) * 10 > all * 9
        && count(|c| c.is_ascii_alphabetic()) * 2 > all
        && count(|c| c == ' ') > 5
}

#[test]
#[ignore = "needs the fetched checkpoint: cargo xtask fetch-model smollm2"]
fn smollm2_is_attached_in_int8_and_replayed() {
    let Some(model) = fetched("smollm2") else {
        return;
    };
    let dir = plugins(&["x86", "portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let mut attach = structures(dir.path());
    attach
        .arg("attach")
        .arg(&model)
        // Which form is active must not hang on how busy the machine is.
        .args(["--scheme", "w8a16_decode", "--min-speedup", "0"])
        .arg("--receipt-dir")
        .arg(receipts.path());
    let (code, receipt, log) = json(&mut attach);
    assert_eq!(code, 0, "{log}");

    for structure in ["decoder_ffn", "qkv_pack", "linear_proj"] {
        let active: Vec<&Json> = units(&receipt, structure)
            .into_iter()
            .filter(|u| u["outcome"] == "activated")
            .collect();
        assert_eq!(active.len(), 1, "{structure}: {:?}", receipt["units"]);
        assert_eq!(active[0]["plugin"], "x86", "{}", active[0]);
        assert_eq!(active[0]["ledger"]["clean"], true, "{}", active[0]);
        println!(
            "{structure}: {} seams, top1 {}, {}",
            active[0]["seams"], active[0]["metrics"]["top1_agreement"], active[0]["latency"]
        );
    }
    let head = Json::from("lm_head");
    let projections = units(&receipt, "linear_proj");
    let paths = projections[0]["paths"].as_array().unwrap();
    assert!(paths.contains(&head), "{paths:?}");

    let union = &receipt["union"];
    assert_eq!(union["outcome"], "activated", "{union}");
    assert_eq!(union["ledger"]["clean"], true, "{union}");
    assert_eq!(receipt["ledger"]["clean"], true);
    assert!(union["paths"].as_array().unwrap().contains(&head));
    let agreement = union["metrics"]["top1_agreement"].as_f64().unwrap();
    assert!(agreement >= 0.90, "{agreement}");
    assert_eq!(receipt["control"]["repeat_identical"], true);
    assert_eq!(receipt["control"]["detach_identical"], true);
    let speedup = union["latency"]["speedup"].as_f64().unwrap();
    println!("union: {speedup:.2}x ({})", union["latency"]);
    assert!(speedup > MEASURED_SPEEDUP / 10.0, "{speedup}");

    let file = std::fs::read_dir(receipts.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let (replayed, log) = generate(
        dir.path(),
        &model,
        &["--strict", "--receipt", file.to_str().unwrap()],
    );
    let ledger = &replayed["ledger"];
    assert_eq!(ledger["clean"], true, "{ledger}\n{log}");
    assert!(ledger["form_calls"].as_u64().unwrap() > 0, "{ledger}");
    let text = replayed["text"].as_str().unwrap();
    println!(
        "{text:?}, {:.0} tokens/s",
        replayed["decode_tps"].as_f64().unwrap()
    );
    assert!(is_prose(text), "{text:?}");
}

#[test]
#[ignore = "needs the fetched checkpoint: cargo xtask fetch-model smollm2"]
fn a_scheme_that_binds_nothing_is_the_host() {
    let Some(model) = fetched("smollm2") else {
        return;
    };
    let none = plugins(&[]);
    let yardstick = plugins(&["portable"]);
    let (host, _) = generate(none.path(), &model, &[]);
    let tokens = host["tokens"].as_array().unwrap();
    assert!(tokens.len() > 8, "{host}");
    // Nothing is loaded; then a yardstick is, which is bound only where it is pinned.
    for (dir, scheme) in [(none.path(), "w8a16_decode"), (yardstick.path(), "none")] {
        let (same, log) = generate(dir, &model, &["--scheme", scheme]);
        assert_eq!(same["ledger"]["form_calls"], 0, "{scheme}: {log}");
        assert_eq!(same["tokens"], host["tokens"], "{scheme}");
        assert_eq!(same["text"], host["text"], "{scheme}");
    }
}

/// The post-norm leaves the narrower span of the FFN; both are reported, with what they cost in parity.
#[test]
#[ignore = "needs the fetched checkpoint: cargo xtask fetch-model gemma3"]
fn gemma3_is_attached_in_int8() {
    let Some(model) = fetched("gemma3") else {
        return;
    };
    let dir = plugins(&["x86", "portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let mut attach = structures(dir.path());
    attach
        .arg("attach")
        .arg(&model)
        .args(["--scheme", "w8a16_decode", "--min-speedup", "0"])
        .args(["--rounds", "3", "--iters", "3"])
        .arg("--receipt-dir")
        .arg(receipts.path());
    let (code, receipt, log) = json(&mut attach);
    assert_eq!(code, 0, "{receipt:#}\n{log}");
    for unit in receipt["units"].as_array().unwrap() {
        println!(
            "{} {} {}: {} {}, speed-up {}",
            unit["structure"],
            unit["plugin"],
            unit["outcome"],
            unit["band"],
            unit["metrics"],
            unit["latency"]["speedup"]
        );
    }
    println!(
        "union: {} {}",
        receipt["union"]["outcome"], receipt["union"]["metrics"]
    );
    let active = units(&receipt, "decoder_ffn")
        .into_iter()
        .any(|u| u["outcome"] == "activated");
    assert!(active, "{receipt:#}");
    let seats = receipt["seats"].as_array().unwrap();
    let ffn = seats
        .iter()
        .find(|s| s["structure"] == "decoder_ffn")
        .unwrap();
    assert_eq!(ffn["span"], "ffn");
    let note = ffn["note"].to_string();
    assert!(note.contains("post_feedforward_layernorm"), "{note}");
    let (document, _) = generate(dir.path(), &model, &[]);
    let text = document["text"].as_str().unwrap();
    assert!(is_prose(text), "{text}");
}

/// 512 tokens in both forms with everything attached, and what the forms cost beside each other.
#[test]
#[ignore = "needs the fetched checkpoint: cargo xtask fetch-model smollm2"]
fn smollm2_writes_the_same_tokens_captured_and_eager() {
    let Some(model) = fetched("smollm2") else {
        return;
    };
    let dir = plugins(&["x86", "portable"]);
    let text = |more: &[&str]| {
        let mut command = structures(dir.path());
        command.arg("generate").arg(&model).args(more);
        command.args([
            "--max-new-tokens",
            "512",
            "--prompt",
            "The history of the city begins with",
        ]);
        let (code, document, log) = json(&mut command);
        assert_eq!(code, 0, "{document}\n{log}");
        println!("{more:?}\n{log}");
        document
    };
    for scheme in [&[][..], &["--scheme", "w8a16_decode"]] {
        let captured = text(scheme);
        let eager = text(&[scheme, &["--eager"]].concat());
        println!("{} {}", captured["decode_tps"], eager["decode_tps"]);
        assert_eq!(
            (&captured["form"], &eager["form"]),
            (&"captured".into(), &"eager".into())
        );
        assert_eq!(captured["tokens"], eager["tokens"], "{scheme:?}");
        assert_eq!(captured["ledger"], eager["ledger"], "{scheme:?}");
    }
    let mut bench = structures(dir.path());
    bench.arg("bench").arg(&model);
    bench.args(["--scheme", "w8a16_decode", "--arm", "all", "--prefill", "0"]);
    let (code, document, log) = json(&mut bench);
    assert_eq!(code, 0, "{log}");
    println!(
        "{}",
        serde_json::to_string_pretty(&document["rows"]).unwrap()
    );
}
