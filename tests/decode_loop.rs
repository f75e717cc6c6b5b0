//! The decode loop on the demo model: the tokens of the eager form, no allocation, exact ledgers, faults that show.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use structures::attach::{auto_swaps, Options, Swaps};
use structures::decode::{decode_loop, DecodeLoop};
use structures::error::Error;
use structures::host::Loaded;
use structures::ledger::Counts;
use structures::progress::Silent;
use structures::sampling::Choose;
use structures::seat::{OnGuardFail, Seat};
use structures::workload::Workload;
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_graph::session::Plan;
use structures_models::generate::{greedy, prefill, step};
use structures_tests::in_process::{any_speed, host, made_samples, model, resident};
use structures_tests::{json, plugins, structures};

const PROMPT: [u32; 6] = [72, 101, 108, 108, 111, 32];

fn swaps(model: &Loaded, plugins: &Path, scheme: &str, mode: OnGuardFail) -> Swaps {
    let options = Options {
        // Without a scheme forms serve whatever they saw, so they see prompts.
        workload: Some(match scheme {
            "none" => Workload::Prefill,
            _ => Workload::Decode,
        }),
        on_guard_fail: mode,
        ..any_speed(scheme)
    };
    auto_swaps(
        &host(plugins),
        model,
        &made_samples(3, 24),
        &options,
        &Silent,
    )
    .unwrap()
}

/// End tokens are tokens like any other here.
fn eager(model: &Loaded, plan: &Plan, prompt: &[u32], n: usize) -> Vec<u32> {
    let m = &model.model;
    let mut state = m.session.new_state(1, prompt.len() + n);
    let mut tokens = vec![greedy(&prefill(m, plan, &mut state, prompt).unwrap()).unwrap()];
    while tokens.len() < n {
        let last = *tokens.last().unwrap();
        tokens.push(greedy(&step(m, plan, &mut state, last).unwrap()).unwrap());
    }
    tokens
}

fn looped(l: &mut DecodeLoop<'_>, prompt: &[u32], n: usize) -> Result<Vec<u32>, Error> {
    let on = &mut |_| ControlFlow::Continue(());
    Ok(l.generate_past_ends(prompt, n, Choose::Greedy, on)?.tokens)
}

fn counts(seats: &[Arc<Seat>]) -> Vec<Counts> {
    seats.iter().map(|s| s.ledger.counts()).collect()
}

#[test]
fn b_234_the_host_s_loop_writes_the_host_s_tokens_to_the_end_of_the_context() {
    let model = model();
    let n = 512 - PROMPT.len();
    let want = eager(&model, &model.session().host_plan(), &PROMPT, n);
    let mut l = decode_loop(&model, 512).unwrap();
    assert!(
        l.manifest().allocating.is_empty(),
        "{:?}",
        l.manifest().allocating
    );
    assert_eq!(looped(&mut l, &PROMPT, n).unwrap(), want);
}

#[test]
fn b_235_every_call_starts_from_nothing() {
    let model = model();
    let mut l = decode_loop(&model, 64).unwrap();
    let first = looped(&mut l, &PROMPT, 24).unwrap();
    let other = looped(&mut l, &[9, 8, 7], 12).unwrap();
    for i in 0..100 {
        assert_eq!(looped(&mut l, &PROMPT, 24).unwrap(), first, "repeat {i}");
    }
    assert_eq!(looped(&mut l, &[9, 8, 7], 12).unwrap(), other);
}

#[test]
fn b_231_a_window_is_a_multiple_of_eight_and_what_exceeds_it_is_refused_with_numbers() {
    let model = model();
    let mut l = decode_loop(&model, 17).unwrap();
    assert_eq!(l.window(), 24);
    assert_eq!(looped(&mut l, &PROMPT, 18).unwrap().len(), 18);
    let full = looped(&mut l, &PROMPT, 19).unwrap_err();
    assert_eq!(full.code(), "context_full");
    for number in ["6", "19", "24"] {
        assert!(full.to_string().contains(number), "{full}");
    }
    let long = decode_loop(&model, 513).map(|_| ()).unwrap_err();
    assert_eq!(long.code(), "context_full");
}

#[test]
fn attached_seats_write_the_eager_form_s_tokens_count_the_same_and_allocate_nothing() {
    let model = model();
    let dir = plugins(&["x86"]);
    let Swaps { plan, seats, .. } =
        swaps(&model, dir.path(), "w8a16_decode", OnGuardFail::Fallback);
    if seats.is_empty() {
        println!("skipped: this machine lacks what the forms need");
        return;
    }
    let n = 300;
    seats.iter().for_each(|s| s.ledger.reset());
    let want = eager(&model, &plan, &PROMPT, n);
    let counted = counts(&seats);
    seats.iter().for_each(|s| s.ledger.reset());
    let mut l = DecodeLoop::new(&model, plan, 512).unwrap();
    assert!(
        l.manifest().allocating.is_empty(),
        "{:?}",
        l.manifest().allocating
    );
    assert_eq!(looped(&mut l, &PROMPT, n).unwrap(), want);
    assert_eq!(counts(&seats), counted, "also the warm-up left no trace");
    assert!(counted.iter().all(|c| c.form_calls >= n as u64 - 1));

    let mut more = [0u32; 100];
    let made = allocation_counter::measure(|| l.go_on(&mut more).unwrap());
    assert_eq!((made.count_total, made.bytes_total), (0, 0));
    assert_eq!(
        more[..],
        eager(&model, &l.plan().clone(), &PROMPT, n + 100)[n..]
    );
}

/// A prompt of a few tokens is one captured pass where forms serve all of it: the eager pass to the bit, counted as one.
#[test]
fn a_short_prompt_is_a_captured_pass_with_the_eager_one_s_scores() {
    let model = model();
    let dir = plugins(&["x86"]);
    // A scheme of every phase: with one for single steps, prompts are the host's.
    let (samples, options) = (made_samples(3, 24), any_speed("bf16_dense"));
    let bound = auto_swaps(&host(dir.path()), &model, &samples, &options, &Silent);
    let Swaps { plan, seats, .. } = bound.unwrap();
    if seats.is_empty() {
        println!("skipped: this machine lacks what the forms need");
        return;
    }
    let long: Vec<u32> = (0..20).map(|i| 40 + 3 * i).collect();
    let mut l = DecodeLoop::new(&model, plan.clone(), 64).unwrap();
    assert_eq!(
        looped(&mut l, &long, 4).unwrap(),
        eager(&model, &plan, &long, 4)
    );
    assert!(!l.prompt_captured(), "20 tokens are no short prompt");
    for n in [2, 3, 8, 16, 3, 8] {
        let prompt = &long[20 - n..];
        seats.iter().for_each(|s| s.ledger.reset());
        let want = eager(&model, &plan, prompt, 6);
        let counted = counts(&seats);
        seats.iter().for_each(|s| s.ledger.reset());
        assert_eq!(looped(&mut l, prompt, 6).unwrap(), want, "{n} tokens");
        assert_eq!(counts(&seats), counted, "{n} tokens");
    }
    assert!(l.prompt_captured());
    let beyond = looped(&mut l, &[1, 1 << 30], 2).unwrap_err();
    assert_eq!(beyond.code(), "token_range");
}

#[test]
fn a_fault_in_a_step_falls_back_by_name_and_no_token_is_another() {
    let model = model();
    let want = eager(&model, &model.session().host_plan(), &PROMPT, 120);
    for fault in [
        Fault::ErrorNinthCall,
        Fault::PanicNinthCall,
        Fault::DeclinesOdd,
    ] {
        let dir = tempfile::tempdir().unwrap();
        fixture_copy(dir.path(), fault, "fixture");
        let Swaps { plan, seats, .. } = swaps(&model, dir.path(), "none", OnGuardFail::Fallback);
        assert!(!seats.is_empty());
        seats.iter().for_each(|s| s.ledger.reset());
        let mut l = DecodeLoop::new(&model, plan, 128).unwrap();
        assert_eq!(looped(&mut l, &PROMPT, 120).unwrap(), want, "{fault:?}");
        assert!(l.recovered() > 0, "{fault:?}");
        for seat in &seats {
            let c = seat.ledger.counts();
            // Not counted any more once it gave itself up, as in the eager form.
            assert!(c.detached && c.fallbacks == 1, "{fault:?} {c:?}");
            assert_eq!(c.calls, c.form_calls + 1, "{fault:?} {c:?}");
        }
    }
}

#[test]
fn in_strict_mode_the_step_ends_with_an_error_that_names_the_seat() {
    let model = model();
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::DeclinesOdd, "fixture");
    let Swaps { plan, seats, .. } = swaps(&model, dir.path(), "none", OnGuardFail::Raise);
    let mut l = DecodeLoop::new(&model, plan, 128).unwrap();
    let error = looped(&mut l, &PROMPT, 120).unwrap_err();
    assert_eq!(error.code(), "strict_fallback");
    let named = seats.iter().any(|s| error.to_string().contains(&s.key));
    assert!(named, "{error}");
}

#[test]
fn scores_that_are_no_numbers_choose_no_token() {
    let model = model();
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::NonFiniteLate, "fixture");
    let Swaps { plan, .. } = swaps(&model, dir.path(), "none", OnGuardFail::Fallback);
    let mut l = DecodeLoop::new(&model, plan, 128).unwrap();
    let error = looped(&mut l, &PROMPT, 120).unwrap_err();
    assert_eq!(error.code(), "non_finite");
}

#[test]
fn a_seed_repeats_a_drawn_text_and_a_caller_may_end_it() {
    let model = model();
    let mut l = decode_loop(&model, 64).unwrap();
    let drawn = |l: &mut DecodeLoop<'_>, seed, temperature| {
        let choose = Choose::Sample {
            temperature,
            top_p: 0.95,
            seed,
        };
        let on = &mut |_| ControlFlow::Continue(());
        l.generate_past_ends(&PROMPT, 40, choose, on)
            .unwrap()
            .tokens
    };
    let one = drawn(&mut l, 1, 1.5);
    assert_eq!(one, drawn(&mut l, 1, 1.5));
    assert_ne!(one, drawn(&mut l, 2, 1.5));
    let cold = drawn(&mut l, 3, 1e-4);
    assert_eq!(cold, looped(&mut l, &PROMPT, 40).unwrap());
    let mut seen = 0;
    let mut on = |_| {
        seen += 1;
        match seen {
            5 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    };
    let out = l.generate(&PROMPT, 40, Choose::Greedy, &mut on).unwrap();
    assert_eq!(
        (out.tokens.len(), out.stop),
        (5, structures_models::Stop::Asked)
    );
}

#[test]
fn generate_writes_the_same_text_in_both_forms_and_ends_at_a_stop_text() {
    let dir = plugins(&[]);
    let run = |more: &[&str]| {
        let mut command = structures(dir.path());
        command.args([
            "generate",
            "demo",
            "--prompt",
            "The river ",
            "--max-new-tokens",
            "60",
        ]);
        let (code, document, log) = json(command.args(more));
        assert_eq!(code, 0, "{document}\n{log}");
        document
    };
    let (captured, eager) = (run(&[]), run(&["--eager"]));
    assert_eq!(
        (&captured["form"], &eager["form"]),
        (&"captured".into(), &"eager".into())
    );
    assert_eq!(captured["tokens"], eager["tokens"]);
    assert_eq!(captured["text"], eager["text"]);
    let text = captured["text"].as_str().unwrap();
    let word = text.split_whitespace().nth(2).unwrap();
    let stopped = run(&["--stop", word]);
    assert_eq!(stopped["stop"], "stop");
    assert_eq!(stopped["text"], text[..text.find(word).unwrap()]);
    let drawn = run(&["--temperature", "1.2", "--top-p", "0.9", "--seed", "4"]);
    assert_eq!(
        drawn["text"],
        run(&["--temperature", "1.2", "--top-p", "0.9", "--seed", "4"])["text"]
    );
}

#[test]
fn bench_gives_a_row_for_each_phase_and_arm() {
    let dir = plugins(&["portable"]);
    let mut command = structures(dir.path());
    command.args([
        "bench",
        "demo",
        "--prefill",
        "16",
        "--decode",
        "4",
        "--rounds",
        "2",
    ]);
    command.args(["--scheme", "w8a16_decode", "--arm", "all"]);
    let (code, document, log) = json(&mut command);
    assert_eq!(code, 0, "{document}\n{log}");
    let rows = document["rows"].as_array().unwrap();
    let shown: Vec<String> = rows
        .iter()
        .map(|r| format!("{} {} {}", r["phase"], r["arm"], r["form"]).replace('"', ""))
        .collect();
    assert!(shown.contains(&"decode host eager".into()), "{shown:?}");
    assert!(
        shown.contains(&"decode attached captured".into()),
        "{shown:?}"
    );
    assert!(
        shown.contains(&"decode attached_eager eager".into()),
        "{shown:?}"
    );
    assert_eq!(rows.len(), 6);
    assert!(rows.iter().all(|r| r["tps"].as_f64().unwrap() > 0.0));
    let mut command = structures(dir.path());
    command.args(["bench", "demo", "--prefill", "0", "--decode", "0"]);
    assert_eq!(json(&mut command).0, 2);
}

/// Attaches, captures, decodes a little and detaches, again and again.
fn cycles(n: usize) {
    let model = model();
    let dir = plugins(&["portable", "x86"]);
    let host_plan = model.session().host_plan();
    let logits = || -> Vec<u32> {
        let mut state = model.session().new_state(1, 16);
        let out = prefill(&model.model, &host_plan, &mut state, &PROMPT).unwrap();
        let out = out.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        out.into_iter().map(f32::to_bits).collect()
    };
    let before = logits();
    let mut first = None;
    let mut settled = 0;
    for i in 0..n {
        let swaps = swaps(&model, dir.path(), "w8a16_decode", OnGuardFail::Fallback);
        let mut l = DecodeLoop::new(&model, swaps.plan, 32).unwrap();
        let tokens = looped(&mut l, &PROMPT, 8).unwrap();
        assert_eq!(
            first.get_or_insert_with(|| tokens.clone()),
            &tokens,
            "cycle {i}"
        );
        drop((l, swaps.seats));
        assert_eq!(logits(), before, "cycle {i}: the host is the host");
        // The allocator keeps some of what the first rounds freed.
        if i == n / 4 {
            settled = resident();
        }
    }
    let grown = resident().saturating_sub(settled);
    println!(
        "{n} cycles: {} MB resident, {} KB more than at a quarter",
        resident() >> 20,
        grown >> 10
    );
    assert!(
        grown < 16 << 20,
        "{} KB grown over the last three quarters",
        grown >> 10
    );
}

#[test]
fn attaching_and_detaching_leaves_the_host_and_its_memory_as_they_were() {
    cycles(8);
}

#[test]
#[ignore = "a thousand cycles: minutes"]
fn a_thousand_cycles_leave_the_host_and_its_memory_as_they_were() {
    cycles(1000);
}
