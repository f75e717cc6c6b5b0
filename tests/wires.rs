//! Wires on a small native block host: which pairs are formed, what they compute, what ends them.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::sync::Mutex;

use structures::attach::{attach, Attachment, Options, STAGES};
use structures::choose::Pin;
use structures::gates::Floors;
use structures::host::{Host, Loaded};
use structures::progress::{Progress, Silent};
use structures::receipt::RefusalNote;
use structures::samples::{Sample, Samples};
use structures::seat::OnGuardFail;
use structures::workload::{Runner, Workload};
use structures_graph::session::{Install, Plan};
use structures_tests::blocks::{self, Block};
use structures_tests::in_process::{self, made_samples};
use structures_tests::plugins;

fn host() -> (tempfile::TempDir, Host) {
    let dir = plugins(&["portable"]);
    let host = in_process::host(dir.path());
    (dir, host)
}

fn options(scheme: &str) -> Options {
    Options {
        percentile: 100.0,
        ..in_process::any_speed(scheme)
    }
}

fn attached(host: &Host, model: &Loaded, options: &Options) -> Attachment {
    attach(host, model, &made_samples(4, 12), options, &Silent).unwrap()
}

fn run(model: &Loaded, plan: &Plan, n: u32) -> Vec<f32> {
    let runner = Runner::new(model.session(), n as usize);
    let tokens: Vec<u32> = (0..n).map(|t| (t * 29) % 250 + 1).collect();
    let out = runner
        .step(plan, &tokens, 0, &mut runner.state(), None)
        .unwrap();
    out.flatten_all().unwrap().to_vec1::<f32>().unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn wire_refusals(a: &Attachment) -> Vec<&RefusalNote> {
    a.receipt
        .refused
        .iter()
        .filter(|r| r.stage == "wires")
        .collect()
}

fn seat_keys(a: &Attachment, wired: bool) -> Vec<String> {
    let notes = a.receipt.seats.iter().filter(|n| n.wire.is_some() == wired);
    notes
        .map(|n| format!("{}:{}", n.structure, n.key))
        .collect()
}

/// Every kind of block at once: who is paired, who is not, and the edge that forbids it.
#[test]
fn b_140_b_141_b_145_b_148_pairs_are_facts_of_the_graph() {
    use Block::*;
    let (_dir, host) = host();
    let model = blocks::model(&[Plain, SecondReader, Rotated, Regrouped, QueryOnly, Unowned]);
    let a = attached(&host, &model, &options("fp8_static"));
    let pairs: Vec<String> = a
        .receipt
        .negotiated
        .iter()
        .map(|w| format!("{} -> {}", w.producer.key, w.consumer.key))
        .collect();
    for (from, to) in [
        ("blocks.0.input_layernorm", "blocks.0.self_attn"),
        ("blocks.0.post_attention_layernorm", "blocks.0.mlp"),
        ("blocks.1.post_attention_layernorm", "blocks.1.mlp"),
        ("blocks.2.post_attention_layernorm", "blocks.2.mlp"),
        ("blocks.3.input_layernorm", "blocks.3.self_attn"),
        ("blocks.3.post_attention_layernorm", "blocks.3.mlp"),
        ("blocks.4.input_layernorm", "blocks.4.self_attn.q_proj"),
        ("blocks.4.post_attention_layernorm", "blocks.4.mlp"),
    ] {
        assert!(
            pairs.contains(&format!("{from} -> {to}")),
            "{from} -> {to}: {pairs:#?}"
        );
    }
    assert_eq!(pairs.len(), 8, "{pairs:#?}");
    let refused = wire_refusals(&a);
    for (path, code, facts) in [
        (
            "blocks.1.input_layernorm",
            "wire_second_reader",
            ["blocks.1.twice", "add"],
        ),
        (
            "blocks.2.input_layernorm",
            "wire_not_direct",
            ["rope", "turned"],
        ),
        (
            "blocks.5.input_layernorm",
            "wire_no_owner",
            ["blocks.5.self_attn", "owns"],
        ),
        (
            "blocks.5.post_attention_layernorm",
            "wire_no_owner",
            ["blocks.5.mlp", "owns"],
        ),
    ] {
        let row = refused.iter().find(|r| r.path == path);
        let row = row.unwrap_or_else(|| panic!("{path}: {refused:#?}"));
        assert_eq!(row.code, code, "{row:?}");
        assert!(
            facts.iter().all(|f| row.reason.contains(f)),
            "{}",
            row.reason
        );
        // Whoever is not wired is bound by itself.
        assert!(
            seat_keys(&a, false).iter().any(|k| k.ends_with(path)),
            "{path}"
        );
    }
}

#[test]
fn b_143_b_147_b_149_one_scale_one_unit_and_a_smoke() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let a = attached(&host, &model, &options("fp8_static"));
    let receipt = serde_json::to_value(&a.receipt).unwrap();
    for (unit, consumer) in [
        ("chain:norm_fused+qkv_pack", "x"),
        ("chain:norm_fused+decoder_ffn", "x_after_norm"),
    ] {
        let row = receipt["units"]
            .as_array()
            .unwrap()
            .iter()
            .find(|u| u["name"] == unit);
        let row = row.unwrap_or_else(|| panic!("{unit}: {}", receipt["units"]));
        assert_eq!(
            (&row["outcome"], &row["seams"]),
            (&"activated".into(), &2.into()),
            "{row}"
        );
        assert_eq!(row["form"], "f32+fp8_static");
        let wire = a
            .receipt
            .negotiated
            .iter()
            .find(|w| w.unit == unit)
            .unwrap();
        assert!(
            wire.active && wire.smoke >= 0.98 && wire.smoke < 1.0,
            "{wire:?}"
        );
        assert_eq!(wire.scale, wire.amax / 448.0);
        assert_eq!(
            (wire.owner.as_str(), wire.format.as_str()),
            ("blocks.0", "fp8_e4m3")
        );
        let stat = |key: &str, port: &str| {
            let seat = a
                .receipt
                .seats
                .iter()
                .find(|n| n.key == key && n.wire.is_some());
            seat.unwrap().statistics[&format!("{port}|amax|tensor")].clone()
        };
        assert_eq!(wire.consumer.port, consumer);
        assert_eq!(
            stat(&wire.producer.key, "y"),
            stat(&wire.consumer.key, consumer)
        );
        assert_eq!(stat(&wire.producer.key, "y"), [wire.amax]);
    }
    assert!(a.receipt.plugins.iter().any(|p| p.id == "portable"));
    // Nobody is bound twice.
    let mut keys = [seat_keys(&a, true), seat_keys(&a, false)].concat();
    let all = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!((keys.len(), seat_keys(&a, true).len()), (all, 4));
    assert_eq!(a.receipt.ledger.fallbacks, 0);
    // And it is still the model.
    let host_out = run(&model, &model.session().host_plan(), 12);
    let cos = cosine(&host_out, &run(&model, &a.plan, 12));
    assert!(cos > 0.99 && cos < 1.0, "{cos}");
}

/// Quantising at the reader and quantising at the sender are the same numbers.
#[test]
fn b_143_b_474_a_wired_pair_computes_bit_for_bit_what_its_forms_do_alone() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain, Block::Regrouped]);
    let only = ["norm_fused", "qkv_pack", "decoder_ffn"].map(String::from);
    let mut o = options("fp8_static");
    o.structures = [&only[..], &["decoder_block".to_string()]].concat();
    let wired = attached(&host, &model, &o);
    assert_eq!(wired.receipt.negotiated.len(), 4);
    o.pins = o
        .structures
        .iter()
        .map(|s| Pin::parse(&format!("{s}=portable")).unwrap())
        .collect();
    let alone =
        structures::attach::auto_swaps(&host, &model, &made_samples(4, 12), &o, &Silent).unwrap();
    let (a, b) = (run(&model, &wired.plan, 12), run(&model, &alone.plan, 12));
    assert_eq!(bits(&a), bits(&b));
}

#[test]
fn a_captured_pair_says_what_it_says_eagerly_and_allocates_nothing() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain, Block::Regrouped]);
    let a = attached(&host, &model, &options("fp8_static"));
    assert_eq!(a.receipt.negotiated.len(), 4);
    let measured = |replay: &mut dyn FnMut()| {
        let made = allocation_counter::measure(replay);
        assert_eq!((made.count_total, made.bytes_total), (0, 0));
    };
    let chains = a
        .plan
        .installs()
        .iter()
        .filter(|i| i.name.starts_with("chain:"));
    assert_eq!(chains.count(), 4);
    assert!(in_process::replay_installs(&model, &a.plan, 12, &measured) > 4);
}

#[test]
fn b_142_too_many_rows_or_no_scale_form_no_pair() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let mut o = options("fp8_static");
    o.structures = ["norm_fused", "qkv_pack", "decoder_block"]
        .map(String::from)
        .into();
    let long = attach(&host, &model, &made_samples(4, 257), &o, &Silent).unwrap();
    let refused = wire_refusals(&long);
    assert_eq!(refused.len(), 1, "{refused:#?}");
    assert_eq!(refused[0].code, "wire_unqualified");
    assert!(refused[0].reason.contains("257") && refused[0].reason.contains("256"));
    assert!(long.receipt.negotiated.is_empty());
    let at = attach(&host, &model, &made_samples(4, 256), &o, &Silent).unwrap();
    assert_eq!(at.receipt.negotiated.len(), 1);
    // A scheme that measures nothing has no scale, and asks for no quantised reader either.
    o.scheme = "none".into();
    assert!(attached(&host, &model, &o).receipt.negotiated.is_empty());
}

/// Judged on what no fitted sample was like: the scale clips the wire, and the pair is not bound.
#[test]
fn b_144_b_149_a_pair_that_fails_is_one_refusal_and_two_seats() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let mut o = options("fp8_static");
    o.structures = ["norm_fused", "qkv_pack", "decoder_block"]
        .map(String::from)
        .into();
    let sample = |tokens: Vec<u32>| Sample {
        tokens,
        origin: "made".into(),
    };
    let mut all: Vec<Sample> = (0..3)
        .map(|i| sample((1..13).map(|t| t + 13 * i).collect()))
        .collect();
    all.push(sample((0..12).map(|t| blocks::SPIKE + t % 4).collect()));
    let samples = Samples::new("made", all).unwrap();
    let a = attach(&host, &model, &samples, &o, &Silent).unwrap();
    let refused = wire_refusals(&a);
    assert_eq!(refused.len(), 1, "{refused:#?}");
    assert_eq!(refused[0].code, "pair_smoke", "{refused:#?}");
    assert_eq!(refused[0].structure, "chain:norm_fused+qkv_pack");
    assert!(refused[0].reason.contains("0.98") && refused[0].reason.contains("by themselves"));
    assert!(a.receipt.negotiated.is_empty() && seat_keys(&a, true).is_empty());
    let alone = seat_keys(&a, false);
    for key in [
        "norm_fused:blocks.0.input_layernorm",
        "qkv_pack:blocks.0.self_attn",
    ] {
        assert!(alone.contains(&key.to_string()), "{alone:?}");
    }
}

#[test]
fn b_151_b_279_one_call_too_long_gives_both_back_exactly() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let mut o = options("fp8_static");
    o.structures = ["norm_fused", "qkv_pack", "decoder_block"]
        .map(String::from)
        .into();
    o.pins = vec![Pin::parse("decoder_block=portable").unwrap()];
    let a = attached(&host, &model, &o);
    let wired: Vec<_> = a
        .receipt
        .seats
        .iter()
        .zip(&a.seats)
        .filter(|(n, _)| n.wire.is_some())
        .map(|(_, s)| s.clone())
        .collect();
    assert_eq!(wired.len(), 2);
    let served = wired[0].ledger.counts().form_calls;
    run(&model, &a.plan, 5);
    assert!(wired
        .iter()
        .all(|s| s.ledger.counts().form_calls == served + 1));
    // Twelve rows were seen; thirteen are out of contract.
    run(&model, &a.plan, 13);
    for seat in &wired {
        let counts = seat.ledger.counts();
        assert!(counts.detached, "{}: {counts:?}", seat.key);
        assert_eq!(counts.fallbacks, 1);
        assert!(counts.last_reason.unwrap().contains("12 rows, found 13"));
    }
    // What is left computes what the host computes there: this norm and this pack are the host's own again, bit for bit
    // as in a plan that never had the pair.
    let again = run(&model, &a.plan, 5);
    assert!(wired.iter().all(|s| s.ledger.counts().fallbacks == 1));
    let installs = a.plan.installs();
    let others: Vec<Install> = installs
        .iter()
        .filter(|i| !i.name.starts_with("chain:"))
        .cloned()
        .collect();
    assert_eq!(others.len() + 1, installs.len(), "one pair");
    let without = model.session().plan(others).unwrap();
    assert_eq!(bits(&again), bits(&run(&model, &without, 5)));
    // With nothing else attached that is the host itself.
    let pair: Vec<Install> = installs
        .iter()
        .filter(|i| i.name.starts_with("chain:"))
        .cloned()
        .collect();
    let pair = model.session().plan(pair).unwrap();
    let plain = run(&model, &model.session().host_plan(), 5);
    assert_eq!(bits(&run(&model, &pair, 5)), bits(&plain));
}

/// Scales of quiet samples on loud ones: the form does what it was told, so no bind can see it. Held-out samples do: the
/// unit's band is low and says on what it was judged, and a floor refuses it.
#[test]
fn fault_stale_statistics() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let quiet = |i: u32| (1..13).map(|t| t + 13 * i).collect::<Vec<u32>>();
    let loud = |i: u32| (0..12).map(|t| blocks::SPIKE + (t + i) % 4).collect();
    let made = |of: [Vec<u32>; 4]| {
        let sample = |tokens| Sample {
            tokens,
            origin: "made".into(),
        };
        Samples::new("made", of.map(sample).into()).unwrap()
    };
    let stale = made([quiet(0), quiet(1), quiet(2), loud(0)]);
    let fresh = made([loud(1), loud(2), loud(3), loud(0)]);
    let judged = |samples: &Samples, floor: &[&str]| {
        let mut o = options("fp8_static");
        o.structures = vec!["qkv_pack".into()];
        o.floors = Floors::parse(floor.iter().copied()).unwrap();
        let a = attach(&host, &model, samples, &o, &Silent).unwrap();
        a.receipt.units[0].clone()
    };
    let floor = ["cosine=0.995"];
    let unit = judged(&stale, &floor);
    assert_eq!(unit.code.as_deref(), Some("floor_not_met"), "{unit:?}");
    let unit = judged(&stale, &[]);
    assert_eq!(
        (unit.band.as_str(), unit.code),
        ("low", None),
        "{:?}",
        unit.metrics
    );
    assert_eq!(unit.band_note.unwrap()["judged_on"], "held-out samples");
    let unit = judged(&fresh, &floor);
    assert_eq!(
        (unit.band.as_str(), unit.code),
        ("pass", None),
        "{:?}",
        unit.metrics
    );
}

/// A norm that sends codes to its reader has nothing for anybody else: with a second reader it is not wired, and what
/// else reads it still gets the host's dtype.
#[test]
fn fault_fused_norm_whose_tensor_had_a_second_reader() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::SecondReader]);
    let mut o = options("fp8_static");
    o.structures = ["norm_fused", "qkv_pack", "decoder_block"]
        .map(String::from)
        .into();
    let a = attached(&host, &model, &o);
    let refused = wire_refusals(&a);
    assert_eq!(refused.len(), 1, "{refused:#?}");
    assert_eq!(refused[0].code, "wire_second_reader");
    assert_eq!(refused[0].path, "blocks.0.input_layernorm");
    assert!(refused[0].reason.contains("blocks.0.twice"), "{refused:?}");
    assert!(a.receipt.negotiated.is_empty() && seat_keys(&a, true).is_empty());
    // The control: the same block without the second reader is wired.
    let model = blocks::model(&[Block::Plain]);
    let a = attached(&host, &model, &o);
    assert!(wire_refusals(&a).is_empty());
    assert_eq!(a.receipt.negotiated.len(), 1);
}

/// A step of one token is what the pair is for; the prompt before it is the host's, as planned.
#[test]
fn b_124_rows_are_the_median_on_a_wire_and_the_most_elsewhere() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let mut o = options("fp8_static");
    o.workload = Some(Workload::Decode);
    o.structures = ["norm_fused", "qkv_pack", "decoder_block", "linear_proj"]
        .map(String::from)
        .into();
    let a = attach(&host, &model, &made_samples(4, 40), &o, &Silent).unwrap();
    assert_eq!(a.receipt.negotiated.len(), 1);
    assert_eq!(a.receipt.negotiated[0].rows, 1);
    for note in &a.receipt.seats {
        let most = if note.wire.is_some() { 1 } else { 8 };
        assert_eq!(
            (note.row_capacity, note.median_rows),
            (most, 1),
            "{}",
            note.key
        );
    }
    let unit = a
        .receipt
        .units
        .iter()
        .find(|u| u.name.starts_with("chain:"))
        .unwrap();
    assert_eq!(unit.outcome, "activated", "{:?}", unit.reason);
    assert!(unit.ledger.band_dispatches > 0 && unit.ledger.fallbacks == 0);
}

#[test]
fn b_147_a_wired_receipt_replays_bit_for_bit() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain, Block::QueryOnly]);
    let a = attached(&host, &model, &options("fp8_static"));
    assert!(seat_keys(&a, true).len() >= 8);
    let text = serde_json::to_string(&a.receipt).unwrap();
    let receipt = serde_json::from_str(&text).unwrap();
    let prompt: Vec<u32> = (1..13).collect();
    let (plan, seats) =
        structures::replay::replay(&host, &model, &receipt, &prompt, OnGuardFail::Fallback)
            .unwrap();
    assert_eq!(seats.len(), a.seats.len());
    assert_eq!(
        bits(&run(&model, &plan, 12)),
        bits(&run(&model, &a.plan, 12))
    );
    // One end without the other is no receipt.
    let mut half = receipt.clone();
    let emits = |n: &structures::receipt::SeatNote| n.wire.as_ref().is_some_and(|w| w.emits);
    let first = half.seats.iter().position(emits).unwrap();
    half.seats.remove(first);
    let error = structures::replay::replay(&host, &model, &half, &prompt, OnGuardFail::Fallback);
    assert_eq!(error.map(|_| ()).unwrap_err().code(), "receipt_mismatch");
}

/// A pair is active because it was judged here, or because a receipt of such a judgement is replayed. Nothing else wires:
/// not the door without a gate, not a scheme that asks for a wire in 4 bits that no form declares, and not a pair whose
/// unit was judged and refused.
#[test]
fn b_146_b_150_a_pair_is_active_by_its_judgement_alone() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let mut o = options("fp8_static");
    let pins = ["norm_fused", "qkv_pack", "decoder_ffn"];
    o.pins = pins
        .iter()
        .map(|s| Pin::parse(&format!("{s}=portable")).unwrap())
        .collect();
    let swaps =
        structures::attach::auto_swaps(&host, &model, &made_samples(4, 12), &o, &Silent).unwrap();
    assert!(swaps.seats.len() >= 4);
    let installs = swaps.plan.installs();
    assert!(installs.iter().all(|i| !i.name.starts_with("chain:")));
    // Judged and refused: the trail has both numbers, and nobody is wired.
    o.min_speedup = 1e6;
    let a = attached(&host, &model, &o);
    let unit = a
        .receipt
        .units
        .iter()
        .find(|u| u.name.starts_with("chain:"));
    let unit = unit.unwrap();
    assert_eq!(unit.code.as_deref(), Some("no_net_win"));
    let latency = unit.latency.as_ref().unwrap();
    assert!(latency.host_ms > 0.0 && latency.treated_ms > 0.0);
    assert!(a.receipt.negotiated.iter().all(|w| !w.active));
    assert!(a.seats.is_empty() && a.plan.is_host());
    // The wire in 4 bits is asked for by one scheme, and declared by no form.
    let a = attached(&host, &model, &options("nvfp4_balance_wire"));
    assert!(a.receipt.negotiated.is_empty());
    assert!(seat_keys(&a, true).is_empty());
}

#[derive(Default)]
struct Stages(Mutex<Vec<String>>);

impl Progress for Stages {
    fn stage(&self, name: &str, _: usize) {
        self.0.lock().unwrap().push(name.into());
    }
    fn tick(&self) {}
}

#[test]
fn b_120_stages_are_the_same_for_every_structure_and_recorded() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let seen = Stages::default();
    let a = attach(
        &host,
        &model,
        &made_samples(4, 12),
        &options("fp8_static"),
        &seen,
    )
    .unwrap();
    assert_eq!(a.receipt.stages, STAGES);
    let seen = seen.0.into_inner().unwrap();
    let at = |what: &str| {
        seen.iter()
            .position(|s| s.starts_with(what))
            .unwrap_or_else(|| panic!("{what}: {seen:?}"))
    };
    let last = |what: &str| seen.iter().rposition(|s| s.starts_with(what)).unwrap();
    assert!(at("discover") < at("calibrate") && at("calibrate") < at("wires"));
    assert!(at("wires") < at("judge chain:") && at("bind wires") < at("judge chain:"));
    let single = seen
        .iter()
        .position(|s| s.starts_with("bind ") && s != "bind wires")
        .unwrap();
    assert!(last("judge chain:") < single && single < at("judge union"));
    for name in host.catalog.newest().iter().map(|s| s.name.as_str()) {
        assert!(!STAGES.contains(&name));
    }
}

#[test]
fn b_126_an_error_at_the_last_stage_leaves_the_host_whole() {
    let (_dir, host) = host();
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(structures_tests::demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let model = Loaded::open(copy.path()).unwrap();
    let before = run(&model, &model.session().host_plan(), 8);
    // Everything is bound and judged; the receipt then names the weights, and they are gone.
    std::fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    let failed = attach(
        &host,
        &model,
        &made_samples(2, 8),
        &options("none"),
        &Silent,
    );
    assert!(failed.is_err());
    assert_eq!(
        bits(&run(&model, &model.session().host_plan(), 8)),
        bits(&before)
    );
}

#[test]
fn b_129_a_plan_says_what_it_holds() {
    let (_dir, host) = host();
    let model = blocks::model(&[Block::Plain]);
    let a = attached(&host, &model, &options("fp8_static"));
    let installs: Vec<&str> = a.plan.installs().iter().map(|i| i.name.as_str()).collect();
    // Two seats of a pair are one install; every other seat has its own.
    let (wired, single) = (seat_keys(&a, true), seat_keys(&a, false));
    assert_eq!(installs.len(), wired.len() / 2 + single.len());
    assert!(single.iter().all(|id| installs.contains(&id.as_str())));
    assert_eq!(
        installs.iter().filter(|n| n.starts_with("chain:")).count(),
        wired.len() / 2
    );
    // Seams, notes and the scales that are executed.
    assert_eq!(a.receipt.seams_active.len(), a.receipt.seats.len());
    assert!(!a.receipt.precision_spec.activations.is_empty());
    assert_eq!(a.seats.len(), a.receipt.seats.len());
}
