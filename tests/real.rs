//! A checkpoint nobody here made, through every door: `cargo xtask fetch-model smollm2` first, then
//! `cargo xtask test --real`.
//!
//! What a figure is, is printed; what is asserted of a speed is a tenth of it, so that a busy machine is no failure.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde_json::Value as Json;
use structures::attach::{auto_swaps, Options, Swaps};
use structures::decode::DecodeLoop;
use structures::host::Loaded;
use structures::progress::Silent;
use structures::release::{consume, note};
use structures::sampling::Choose;
use structures::seat::{Admission, OnGuardFail, Rows, Seat};
use structures::workload::Workload;
use structures_graph::session::{Install, State};
use structures_graph::{Alone, Capture, Dim, Greedy};
use structures_models::generate::{greedy, prefill, step};
use structures_tests::in_process::{any_speed, host, made_samples, resident, Idle};
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

fn bits(scores: &Tensor) -> Vec<u32> {
    let values = scores.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Everything attached, in this process.
fn attached(model: &Loaded) -> Option<Swaps> {
    let dir = plugins(&["x86"]);
    let options = Options {
        workload: Some(Workload::Decode),
        ..any_speed("w8a16_decode")
    };
    let samples = made_samples(3, 24);
    let swaps = auto_swaps(&host(dir.path()), model, &samples, &options, &Silent).unwrap();
    if swaps.seats.is_empty() {
        println!("skipped: this machine lacks what the forms need");
        return None;
    }
    Some(swaps)
}

/// 512 tokens by replays are those of the eager form, still after 100 repeats; replays allocate nothing, a warm-up leaves no
/// trace, and with the host's weights let go everything is the same in less memory.
#[test]
#[ignore = "needs the fetched checkpoint: cargo xtask fetch-model smollm2"]
fn smollm2_replays_exactly_allocates_nothing_and_lets_its_host_go() {
    const N: usize = 512;
    let Some(path) = fetched("smollm2") else {
        return;
    };
    let model = Loaded::open(&path).unwrap();
    let m = &model.model;
    let Some(swaps) = attached(&model) else {
        return;
    };
    let prompt = m
        .tokenizer()
        .unwrap()
        .encode("The history of the city begins with", true)
        .unwrap();
    let mut state = m.session.new_state(1, prompt.len() + N);
    let mut want = vec![greedy(&prefill(m, &swaps.plan, &mut state, &prompt).unwrap()).unwrap()];
    while want.len() < N {
        let last = *want.last().unwrap();
        want.push(greedy(&step(m, &swaps.plan, &mut state, last).unwrap()).unwrap());
    }
    drop(state);

    // A warm-up on a state that holds something: a step of the host afterwards cannot tell.
    let host_plan = m.session.host_plan();
    let mut state = m.session.new_state(1, 64);
    state.reserve().unwrap();
    prefill(m, &host_plan, &mut state, &prompt).unwrap();
    let mut untouched = state.clone_deep().unwrap();
    let inputs = [
        Tensor::new(&[[want[0]]], &Device::Cpu).unwrap(),
        Tensor::new(&[prompt.len() as u32], &Device::Cpu).unwrap(),
    ];
    let capture = Capture {
        inputs: &inputs,
        state: &state,
        windows: &[],
        greedy: Some(Greedy {
            scores: 0,
            token: 0,
            position: 1,
        }),
        last_row: None,
    };
    let counts =
        |seats: &[Arc<Seat>]| -> Vec<_> { seats.iter().map(|s| s.ledger.counts()).collect() };
    let counted = counts(&swaps.seats);
    let mut captured = m.session.capture(&swaps.plan, &capture).unwrap();
    captured.warm_up(&mut state, &Alone, 3).unwrap();
    drop(captured);
    assert_eq!(state.len(), untouched.len());
    let after = |state: &mut State| bits(&step(m, &host_plan, state, want[0]).unwrap());
    assert_eq!(after(&mut state), after(&mut untouched));
    assert_eq!(counts(&swaps.seats), counted);
    drop((state, untouched));

    let text = |l: &mut DecodeLoop<'_>, n| {
        let on = &mut |_| ControlFlow::Continue(());
        l.generate_past_ends(&prompt, n, Choose::Greedy, on)
            .unwrap()
            .tokens
    };
    let mut l = DecodeLoop::new(&model, swaps.plan.clone(), prompt.len() + N + 64).unwrap();
    assert!(
        l.manifest().allocating.is_empty(),
        "{:?}",
        l.manifest().allocating
    );
    assert_eq!(text(&mut l, N), want);
    for repeat in 0..100 {
        assert_eq!(text(&mut l, 12), want[..12], "repeat {repeat}");
    }
    assert_eq!(text(&mut l, N), want);
    let mut more = [0; 60];
    let made = allocation_counter::measure(|| l.go_on(&mut more).unwrap());
    assert_eq!((made.count_total, made.bytes_total), (0, 0));
    drop(l);

    let before = resident();
    let released = consume(&model, &swaps.plan).unwrap();
    let fell = before.saturating_sub(resident());
    println!("{}; {} MB less resident", released.summary(), fell >> 20);
    assert!(fell > released.released.bytes / 2);
    let mut l = DecodeLoop::new(&model, swaps.plan.clone(), 128).unwrap();
    assert_eq!(text(&mut l, 48), want[..48]);
    assert!(note(&model, l.plan()).restored.is_empty());
    let clean = structures::judge::summary(&swaps.seats);
    assert!(clean.clean, "{clean:?}");
}

/// What a step costs beside the forms' kernels: the same step whose forms do nothing. That is dispatch, ledger and glue, and
/// the host's own norms, rotations and attention as well, so it is an upper bound.
#[test]
#[ignore = "needs the fetched checkpoint: cargo xtask fetch-model smollm2"]
fn smollm2_s_step_outside_kernels() {
    let Some(path) = fetched("smollm2") else {
        return;
    };
    let model = Loaded::open(&path).unwrap();
    let Some(swaps) = attached(&model) else {
        return;
    };
    let g = model.session().graph();
    let hollow = swaps.plan.installs().iter().map(|i| {
        let dims = |v: &structures_graph::ValueId| g.value(*v).dims.clone();
        let inputs: Vec<_> = i.inputs.iter().map(|v| v.as_ref().map(dims)).collect();
        let width = match inputs.iter().flatten().next().and_then(|d| d.last()) {
            Some(Dim::Size(n)) => *n,
            _ => 0,
        };
        let admission = Admission {
            width,
            rows: Rows::Capacity(4096),
            band: None,
            concurrent: true,
            strided: false,
        };
        let outputs = i.outputs.iter().map(dims).collect();
        let mode = OnGuardFail::Fallback;
        let form = Box::new(Idle);
        let seat = Seat::new(i.name.clone(), form, admission, mode, inputs, outputs);
        Install {
            runner: seat,
            ..i.clone()
        }
    });
    let hollow = model.session().plan(hollow.collect()).unwrap();
    let mut real = DecodeLoop::new(&model, swaps.plan.clone(), 256).unwrap();
    let mut empty = DecodeLoop::new(&model, hollow, 256).unwrap();
    let prompt: Vec<u32> = (1..33).collect();
    let on = &mut |_| ControlFlow::Continue(());
    let mut micros = |l: &mut DecodeLoop<'_>| {
        // Scores of hollow forms are whatever lies there; they choose some token.
        let done = l
            .generate_past_ends(&prompt, 49, Choose::Greedy, on)
            .unwrap();
        done.decode.as_secs_f64() * 1e6 / done.steps as f64
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        with.push(micros(&mut real));
        without.push(micros(&mut empty));
    }
    let middle = |v: &mut Vec<f64>| {
        v.sort_by(f64::total_cmp);
        (v[v.len() / 2], v[0])
    };
    let (with, without) = (middle(&mut with), middle(&mut without));
    println!(
        "{} seats: step {:.0} us ({:.0} at best), outside the forms {:.0} us ({:.0}): {:.1} % ({:.1} %)",
        swaps.seats.len(),
        with.0,
        with.1,
        without.0,
        without.1,
        100.0 * without.0 / with.0,
        100.0 * without.1 / with.1
    );
    assert!(without.0 < with.0);
}
