//! Loops of steps on a small native host: tables of steps and their broker, conditioned norms on a wire, composed
//! blocks, and parts on a slower cadence.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use candle_core::{Device, Tensor};
use structures::attach::{attach, auto_swaps, Attachment, Options};
use structures::cadence::{cadence, Cadence, CadenceNote};
use structures::choose::Pin;
use structures::host::{Host, Loaded};
use structures::progress::Silent;
use structures::receipt::{Receipt, RefusalNote};
use structures::seat::{OnGuardFail, Seat};
use structures::workload::{Runner, Workload};
use structures::Error;
use structures_graph::session::{Observer, Plan};
use structures_tests::blocks::{self, Block, D};
use structures_tests::in_process::{self, made_samples};
use structures_tests::plugins;
use structures_tests::steps::{self, Step, E};

/// Tables and nothing else.
fn host() -> (tempfile::TempDir, Host) {
    let dir = plugins(&["portable"]);
    let host = in_process::host(dir.path());
    (dir, host)
}

fn options(scheme: &str, workload: Workload, structures: &[&str]) -> Options {
    Options {
        workload: Some(workload),
        percentile: 100.0,
        structures: structures.iter().map(|s| (*s).to_string()).collect(),
        ..in_process::any_speed(scheme)
    }
}

fn tables() -> Options {
    let mut o = options("none", Workload::Decode, &["adaln_producer"]);
    o.pins = vec![Pin::parse("adaln_producer=builtin:step_table").unwrap()];
    o
}

/// Everything a composed block is made of.
fn whole() -> Options {
    options(
        "fp8_static",
        Workload::Prefill,
        &["adaln_producer", "qkv_pack", "decoder_ffn", "decoder_block"],
    )
}

fn attached(host: &Host, model: &Loaded, options: &Options) -> Attachment {
    attach(host, model, &made_samples(4, 12), options, &Silent).unwrap()
}

/// The outputs of one call over a prompt and of single steps after it.
fn run(model: &Loaded, plan: &Plan, prompt: u32, steps: u32) -> Vec<u32> {
    let runner = Runner::new(model.session(), 64);
    let mut state = runner.state();
    let token = |t: u32| (t * 29) % 250 + 1;
    let mut calls: Vec<Vec<u32>> = vec![(0..prompt).map(token).collect()];
    calls.extend((prompt..prompt + steps).map(|t| vec![token(t)]));
    calls.retain(|c| !c.is_empty());
    let (mut bits, mut at) = (Vec::new(), 0);
    for tokens in calls {
        let out = runner.step(plan, &tokens, at, &mut state, None).unwrap();
        at += tokens.len();
        let out = out.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        bits.extend(out.iter().map(|v| v.to_bits()));
    }
    bits
}

fn cosine(a: &[u32], b: &[u32]) -> f64 {
    let dot = |a: &[u32], b: &[u32]| -> f64 {
        let pairs = a.iter().zip(b);
        pairs
            .map(|(a, b)| f64::from(f32::from_bits(*a)) * f64::from(f32::from_bits(*b)))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn refusals<'a>(a: &'a Attachment, stage: &str) -> Vec<&'a RefusalNote> {
    let all = a.receipt.refused.iter();
    all.filter(|r| r.stage == stage).collect()
}

fn replayed(host: &Host, model: &Loaded, a: &Attachment) -> (Plan, Vec<std::sync::Arc<Seat>>) {
    let text = serde_json::to_string(&a.receipt).unwrap();
    let receipt: Receipt = serde_json::from_str(&text).unwrap();
    let prompt: Vec<u32> = (1..13).collect();
    structures::replay::replay(host, model, &receipt, &prompt, OnGuardFail::Fallback).unwrap()
}

#[test]
fn b_153_tables_are_the_hosts_own_rows_and_one_broker_serves_a_stream() {
    let (_dir, host) = host();
    let model = steps::model(&[Step::Gated, Step::Gated]);
    let a = attached(&host, &model, &tables());
    let keys = [
        "blocks.0.input_layernorm",
        "blocks.0.post_attention_layernorm",
        "blocks.1.input_layernorm",
        "blocks.1.post_attention_layernorm",
    ];
    assert_eq!(a.receipt.seams_active, keys, "{:#?}", a.receipt.refused);
    let unit = &a.receipt.units[0];
    assert_eq!(
        (
            unit.plugin.as_str(),
            unit.form.as_str(),
            unit.outcome.as_str()
        ),
        ("builtin", "step_table", "activated")
    );
    assert!(a.receipt.plugins.is_empty(), "no plugin took part");
    // Twelve single steps a sample, the same in each: twelve conditionings.
    let [broker] = a.receipt.brokers.as_slice() else {
        panic!("{:?}", a.receipt.brokers)
    };
    assert_eq!(broker.writer, keys[0]);
    assert_eq!(broker.members, keys);
    assert_eq!((broker.steps, broker.width), (12, 3 * D));
    // Bit for bit the host, step after step.
    let plain = model.session().host_plan();
    assert_eq!(run(&model, &a.plan, 0, 12), run(&model, &plain, 0, 12));
    assert_eq!(a.receipt.ledger.fallbacks, 0);
    // And again from the receipt.
    let (plan, seats) = replayed(&host, &model, &a);
    assert_eq!(run(&model, &plan, 0, 12), run(&model, &plain, 0, 12));
    assert!(seats.iter().all(|s| s.ledger.counts().form_calls == 12));
    // Nobody has to ask: unjudged swaps take the table too, since it is no yardstick's.
    let mut o = tables();
    o.pins.clear();
    let swaps = auto_swaps(&host, &model, &made_samples(4, 12), &o, &Silent).unwrap();
    assert_eq!(swaps.seats.len(), 4);
    assert_eq!(run(&model, &swaps.plan, 0, 12), run(&model, &plain, 0, 12));
}

#[test]
fn a_step_nobody_saw_is_the_hosts_and_counted() {
    let (_dir, host) = host();
    let model = steps::model(&[Step::Gated]);
    let a = attached(&host, &model, &tables());
    let plain = model.session().host_plan();
    a.seats.iter().for_each(|s| s.ledger.reset());
    assert_eq!(run(&model, &a.plan, 0, 14), run(&model, &plain, 0, 14));
    for seat in &a.seats {
        let counts = seat.ledger.counts();
        assert_eq!(
            (counts.form_calls, counts.fallbacks),
            (12, 2),
            "{}",
            seat.key
        );
        let reason = counts.last_reason.unwrap();
        assert!(
            reason.contains("step_unknown") && reason.contains("12 steps"),
            "{reason}"
        );
    }
    // Strictly, it is an error.
    let mut o = tables();
    o.on_guard_fail = OnGuardFail::Raise;
    let strict = attached(&host, &model, &o);
    let runner = Runner::new(model.session(), 64);
    let mut state = runner.state();
    let mut step = |i: usize| runner.step(&strict.plan, &[7], i, &mut state, None);
    assert!((0..12).all(|i| step(i).is_ok()));
    let error = step(12).unwrap_err().to_string();
    assert!(error.contains("step_unknown"), "{error}");
}

#[test]
fn b_153_two_streams_have_two_brokers_and_one_producer_none() {
    let (_dir, host) = host();
    let model = steps::model(&[Step::Apart, Step::Apart]);
    let a = attached(&host, &model, &tables());
    let members: Vec<&[String]> = a.receipt.brokers.iter().map(|b| &b.members[..]).collect();
    assert_eq!(members.len(), 2, "{members:?}");
    assert!(members[0].iter().all(|m| m.ends_with("input_layernorm")));
    assert!(members[1]
        .iter()
        .all(|m| m.ends_with("post_attention_layernorm")));
    assert_ne!(a.receipt.brokers[0].stream, a.receipt.brokers[1].stream);
    let alone = steps::model(&[Step::Apart]);
    let a = attached(&host, &alone, &tables());
    assert_eq!(a.seats.len(), 2);
    assert!(a.receipt.brokers.is_empty());
}

#[test]
fn a_conditioning_that_is_no_small_set_has_no_table() {
    let (_dir, host) = host();
    let model = steps::model(&[Step::Gated]);
    let mut o = tables();
    o.all_positions = true;
    let a = attach(&host, &model, &made_samples(4, 65), &o, &Silent).unwrap();
    assert!(a.seats.is_empty());
    let refused = refusals(&a, "bind");
    assert_eq!(refused.len(), 2, "{refused:#?}");
    for r in refused {
        assert_eq!(r.code, "not_step_quantised");
        assert!(
            r.reason.contains("64") && r.reason.contains("|cond"),
            "{}",
            r.reason
        );
    }
    let a = attach(&host, &model, &made_samples(4, 64), &o, &Silent).unwrap();
    assert_eq!(a.receipt.brokers[0].steps, 64, "the edge itself is served");
}

#[test]
fn b_140_b_143_a_conditioned_norm_sends_its_output_and_keeps_its_gate() {
    let (_dir, host) = host();
    let model = steps::model(&[Step::Gated]);
    let mut o = whole();
    o.structures.pop();
    // Without its structure nobody owns the block.
    assert!(attached(&host, &model, &o).receipt.negotiated.is_empty());
    o = whole();
    let a = attached(&host, &model, &o);
    let pairs: Vec<(&str, &str, bool)> = a
        .receipt
        .negotiated
        .iter()
        .map(|w| (w.producer.key.as_str(), w.consumer.key.as_str(), w.active))
        .collect();
    assert_eq!(
        pairs,
        [
            ("blocks.0.post_attention_layernorm", "blocks.0.mlp", true),
            ("blocks.0.input_layernorm", "blocks.0.self_attn", true),
        ],
        "{:#?}",
        a.receipt.refused
    );
    let plain = run(&model, &model.session().host_plan(), 12, 0);
    let cos = cosine(&plain, &run(&model, &a.plan, 12, 0));
    assert!(cos > 0.99 && cos < 1.0, "{cos}");
}

#[test]
fn b_509_a_block_takes_its_gated_sums_along() {
    let (_dir, host) = host();
    let model = steps::model(&[Step::Gated, Step::Gated]);
    let a = attached(&host, &model, &whole());
    let blocks = &a.receipt.blocks;
    assert_eq!(blocks.len(), 2, "{:#?}", a.receipt.refused);
    assert_eq!(blocks[0].owner, "blocks.0");
    assert_eq!(
        blocks[0].linked,
        [
            "adaln_producer:blocks.0.input_layernorm:fused",
            "qkv_pack:blocks.0.self_attn:pack"
        ]
    );
    assert_eq!(
        blocks[0].parts,
        [
            "decoder_block:blocks.0:attn_residual",
            "adaln_producer:blocks.0.post_attention_layernorm:fused",
            "decoder_ffn:blocks.0.mlp:ffn",
            "decoder_block:blocks.0:ffn_residual"
        ]
    );
    let unit = a
        .receipt
        .units
        .iter()
        .find(|u| u.name == "block:decoder_block");
    let unit = unit.unwrap();
    assert_eq!((unit.outcome.as_str(), unit.seams), ("activated", 12));
    // No operation is live twice, and the two sums and the pair are one install.
    let installs = a.plan.installs();
    let named = |n: &str| installs.iter().filter(|i| i.name.starts_with(n)).count();
    assert_eq!(
        (named("block:"), named("chain:"), installs.len()),
        (2, 2, 4)
    );
    let mut ops: Vec<usize> = installs.iter().flat_map(|i| &i.ops).map(|o| o.0).collect();
    let all = ops.len();
    ops.sort_unstable();
    ops.dedup();
    assert_eq!(ops.len(), all);
    assert_eq!(a.receipt.ledger.fallbacks, 0);
    let plain = run(&model, &model.session().host_plan(), 12, 0);
    let composed = run(&model, &a.plan, 12, 0);
    assert!(cosine(&plain, &composed) > 0.99);
    // Captured steps call the same installs in memory of their own, and allocate nothing.
    let measured = |replay: &mut dyn FnMut()| {
        let made = allocation_counter::measure(replay);
        assert_eq!((made.count_total, made.bytes_total), (0, 0));
    };
    let called = structures_tests::in_process::replay_installs(&model, &a.plan, 12, &measured);
    assert_eq!(called, 4);
    // And again from the receipt.
    let (plan, seats) = replayed(&host, &model, &a);
    assert_eq!(seats.len(), a.seats.len());
    assert_eq!(run(&model, &plan, 12, 0), composed);
    // A part that is not in the receipt ends the replay.
    let mut torn = a.receipt.clone();
    let sum = torn.seats.iter().position(|s| s.span == "ffn_residual");
    torn.seats.remove(sum.unwrap());
    let error = structures::replay::replay(&host, &model, &torn, &[1, 2], OnGuardFail::Fallback);
    assert_eq!(error.map(|_| ()).unwrap_err().code(), "receipt_mismatch");
}

#[test]
fn b_509_one_call_out_of_contract_gives_the_whole_block_back_exactly() {
    let (_dir, host) = host();
    let model = steps::model(&[Step::Gated]);
    let a = attached(&host, &model, &whole());
    assert_eq!(a.receipt.blocks.len(), 1, "{:#?}", a.receipt.refused);
    assert!(a.seats.iter().all(|s| !s.ledger.is_detached()));
    let plain = model.session().host_plan();
    // Twelve rows were seen; thirteen are out of contract, at the first norm already.
    assert_eq!(run(&model, &a.plan, 13, 0), run(&model, &plain, 13, 0));
    for seat in &a.seats {
        assert!(seat.ledger.is_detached(), "{}", seat.key);
    }
    assert_eq!(run(&model, &a.plan, 5, 2), run(&model, &plain, 5, 2));
    // One part that gave itself up is enough, whichever it is: nothing of the block serves without it.
    for part in ["attn_residual", "ffn_residual"] {
        let (plan, seats) = replayed(&host, &model, &a);
        let at = a.receipt.seats.iter().position(|s| s.span == part).unwrap();
        let key = &a.receipt.seats[at].key;
        let sums: Vec<_> = seats.iter().filter(|s| s.key == *key).collect();
        sums[usize::from(part == "ffn_residual")].ledger.detach();
        assert_eq!(
            run(&model, &plan, 5, 2),
            run(&model, &plain, 5, 2),
            "{part}"
        );
    }
}

#[test]
fn a_block_whose_sum_is_read_or_whose_norms_differ_stays_in_parts() {
    let (_dir, host) = host();
    for (kind, code, fact) in [
        (Step::Watched, "cannot_absorb", "`watched`"),
        (Step::Apart, "locators_differ", "different tensors"),
    ] {
        let model = steps::model(&[kind]);
        let a = attached(&host, &model, &whole());
        assert!(a.receipt.blocks.is_empty());
        let refused = refusals(&a, "compose");
        assert_eq!(refused.len(), 1, "{refused:#?}");
        assert_eq!(refused[0].code, code);
        assert!(refused[0].reason.contains(fact), "{}", refused[0].reason);
        assert!(a.receipt.negotiated.iter().any(|w| w.active));
    }
    // A block without gates is none of these, and no refusal either.
    let model = blocks::model(&[Block::Plain]);
    let mut o = whole();
    o.structures.push("norm_fused".into());
    let a = attached(&host, &model, &o);
    assert!(a.receipt.blocks.is_empty() && refusals(&a, "compose").is_empty());
}

fn tensor(rows: usize, width: usize, seed: u32) -> Tensor {
    let mut s = seed;
    let data: Vec<f32> = (0..rows * width)
        .map(|_| {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(data, (1, rows, width), &Device::Cpu).unwrap()
}

/// One step of the crossing host.
fn cross(model: &Loaded, plan: &Plan, latent: &Tensor, encoder: &Tensor) -> Vec<u32> {
    let mut state = model.session().new_state(1, 16);
    let inputs = [latent.clone(), encoder.clone()];
    let out = model
        .session()
        .run(plan, &inputs, &mut state, None)
        .unwrap();
    let out = out[0].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    out.iter().map(|v| v.to_bits()).collect()
}

/// A loop of steps whose latent moves; `moving` moves the encoder as well.
fn looped(
    model: &Loaded,
    steps: u32,
    moving: bool,
) -> impl FnMut(&Plan, &mut dyn Observer) -> Result<(), Error> + '_ {
    move |plan, observer| {
        for i in 0..steps {
            let encoder = tensor(7, E, if moving { 99 + i } else { 99 });
            let mut state = model.session().new_state(1, 16);
            let inputs = [tensor(5, D, i), encoder];
            model
                .session()
                .run(plan, &inputs, &mut state, Some(&mut *observer))?;
        }
        Ok(())
    }
}

fn hoisted(host: &Host, model: &Loaded) -> Cadence {
    cadence(host, model, &[], &mut looped(model, 4, false)).unwrap()
}

fn note<'a>(notes: &'a [CadenceNote], path: &str) -> &'a CadenceNote {
    notes.iter().find(|n| n.path == path).unwrap()
}

#[test]
fn b_500_parts_are_keys_and_values_of_another_width() {
    let (_dir, host) = host();
    let model = steps::crossing_model();
    let taken = hoisted(&host, &model);
    let mut paths: Vec<String> = taken.notes().into_iter().map(|n| n.path).collect();
    paths.sort();
    assert_eq!(
        paths,
        [
            "blocks.0.attn2.to_k",
            "blocks.0.attn2.to_v",
            "blocks.1.attn2.to_k",
            "blocks.1.attn2.to_v"
        ]
    );
    // Named, one is enough.
    let one = cadence(
        &host,
        &model,
        &["blocks.1.attn2.to_v"],
        &mut looped(&model, 2, false),
    );
    assert_eq!(one.unwrap().installs().len(), 1);
    // Self-attention has none; neither has a place that is not there. And no automatic door takes one.
    let decoder = blocks::model(&[Block::Plain]);
    let mut never =
        |_: &Plan, _: &mut dyn Observer| -> Result<(), Error> { panic!("nothing is run") };
    for (model, sites) in [(&decoder, &[][..]), (&model, &["blocks.9.attn2.to_k"][..])] {
        let error = cadence(&host, model, sites, &mut never).err().unwrap();
        assert_eq!(error.code(), "cadence_nothing", "{error}");
    }
    let a = attached(&host, &decoder, &options("none", Workload::Prefill, &[]));
    assert!(a
        .receipt
        .seats
        .iter()
        .all(|s| s.structure != "cadence_static"));
}

#[test]
fn b_501_b_444_a_loop_proves_it_and_a_moving_encoder_is_invalid() {
    let (_dir, host) = host();
    let model = steps::crossing_model();
    let taken = hoisted(&host, &model);
    assert!(taken.notes().iter().all(|n| n.captures == 4));
    let plan = taken.plan(&model).unwrap();
    let (latent, encoder) = (tensor(5, D, 3), tensor(7, E, 99));
    let plain = model.session().host_plan();
    assert_eq!(
        cross(&model, &plan, &latent, &encoder),
        cross(&model, &plain, &latent, &encoder)
    );
    // One refresh, and later reads are of the new content: what a recompute gives.
    let prompt = tensor(7, E, 5);
    taken.refresh(&[("encoder", prompt.clone())]).unwrap();
    let want = cross(&model, &plain, &latent, &prompt);
    for _ in 0..3 {
        // The replacement ignores its input.
        assert_eq!(cross(&model, &plan, &latent, &encoder), want);
    }
    let moving = cadence(&host, &model, &[], &mut looped(&model, 4, true));
    let error = moving.err().unwrap();
    assert_eq!(error.code(), "cadence_varies");
    let text = error.to_string();
    assert!(
        text.contains("attn2.to_") && text.contains("number 2"),
        "{text}"
    );
    // Seen once is no proof.
    let once = cadence(&host, &model, &[], &mut looped(&model, 1, false));
    let error = once.err().unwrap();
    assert_eq!(error.code(), "cadence_uncaptured");
    assert!(error.to_string().contains("1 times"), "{error}");
}

#[test]
fn b_504_another_input_refreshes_what_is_wired_and_nothing_else() {
    let (_dir, host) = host();
    let model = steps::crossing_model();
    let taken = hoisted(&host, &model);
    let plan = taken.plan(&model).unwrap();
    let plain = model.session().host_plan();
    let latent = tensor(5, D, 3);
    let (first, second) = (tensor(7, E, 99), tensor(7, E, 5));
    let want = |encoder: &Tensor| cross(&model, &plain, &latent, encoder);
    taken.wire().unwrap();
    for encoder in [&second, &second, &first, &second] {
        assert_eq!(cross(&model, &plan, &latent, encoder), want(encoder));
    }
    let refreshes = note(&taken.notes(), "blocks.0.attn2.to_k").refreshes;
    assert_eq!(refreshes, 3, "the same input is no new observation");
    // A longer prompt as well: content is replaced as a whole.
    let long = tensor(9, E, 8);
    assert_eq!(cross(&model, &plan, &latent, &long), want(&long));
    assert_eq!(cross(&model, &plan, &latent, &second), want(&second));
    taken.unwire();
    assert_eq!(
        cross(&model, &plan, &latent, &first),
        want(&second),
        "stale, as agreed"
    );
    let notes = taken.notes();
    assert!(notes.iter().all(|n| !n.wired && n.apart == 0));
}

#[test]
fn b_290_b_505_reads_and_refreshes_are_counted_and_a_stale_part_is_seen() {
    let (_dir, host) = host();
    let model = steps::crossing_model();
    let taken = hoisted(&host, &model);
    let plan = taken.plan(&model).unwrap();
    let (latent, encoder) = (tensor(5, D, 3), tensor(7, E, 99));
    for _ in 0..3 {
        cross(&model, &plan, &latent, &encoder);
    }
    assert!(taken
        .notes()
        .iter()
        .all(|n| (n.reads, n.refreshes) == (3, 0)));
    // Written from elsewhere: one part of four.
    let width = 256;
    taken
        .write("blocks.0.attn2.to_k", &tensor(7, width, 1))
        .unwrap();
    let notes = taken.notes();
    assert_eq!(note(&notes, "blocks.0.attn2.to_k").refreshes, 1);
    assert_eq!(note(&notes, "blocks.1.attn2.to_k").refreshes, 0);
    let json = serde_json::to_value(&notes[0]).unwrap();
    assert!(json["reads"] == 3 && json["site"].is_string(), "{json}");
    for (site, content, code) in [
        (
            "blocks.0.attn2.to_k",
            tensor(7, width + 1, 1),
            "cadence_form",
        ),
        (
            "blocks.0.attn2.to_q",
            tensor(7, width, 1),
            "cadence_nothing",
        ),
    ] {
        assert_eq!(taken.write(site, &content).unwrap_err().code(), code);
    }
    // Another number of rows has no content, and the host serves it.
    let plain = model.session().host_plan();
    let long = tensor(9, E, 8);
    taken.refresh(&[("encoder", encoder.clone())]).unwrap();
    assert_eq!(
        cross(&model, &plan, &latent, &long),
        cross(&model, &plain, &latent, &long)
    );
    assert!(taken.notes().iter().all(|n| n.apart == 1));
    assert_eq!(
        taken.refresh(&[("prompt", encoder)]).unwrap_err().code(),
        "cadence_form"
    );
    assert!(taken.refresh(&[]).is_err());
}
