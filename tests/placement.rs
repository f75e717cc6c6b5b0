//! Values that lie on a device with memory of its own, on the simulated one: who copies what, what is lost with it, what
//! a receipt says of it.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use candle_core::{Device, Tensor};
use structures::attach::{attach, auto_swaps, Attachment, Options, Swaps};
use structures::choose::Pin;
use structures::decode::DecodeLoop;
use structures::error::Error;
use structures::gates::{Floors, OutputKind, Schedule};
use structures::host::{Host, Loaded};
use structures::judge::Judge;
use structures::operations::{Operation, Sizes, Workshop};
use structures::progress::Silent;
use structures::receipt::Receipt;
use structures::replay::replay;
use structures::samples::Samples;
use structures::sampling::Choose;
use structures::seat::{OnGuardFail, Seat};
use structures::station::Station;
use structures::workload::{Runner, Workload};
use structures_graph::captured::PlaceNote;
use structures_graph::session::{Plan, State};
use structures_graph::{
    Alone, Away, Capture, Frozen, GraphError, Held, Install, OpKind, Place, SpanOutcome,
    SpanRunner, Unserved, ValueId,
};
use structures_models::generate;
use structures_tests::in_process::{
    any_speed, host, isolate, logits, made_samples, model, try_logits,
};
use structures_tests::plugins;

const PLACED: [&str; 4] = ["norm_fused", "qkv_pack", "decoder_ffn", "linear_proj"];

/// Every test runs in a process of its own, so that each has its own simulated device.
fn simulate(variables: &[(&str, &str)]) {
    isolate();
    variables.iter().for_each(|(k, v)| std::env::set_var(k, v));
}

fn samples() -> Samples {
    made_samples(3, 24)
}

/// Every structure of `PLACED` by portable's forms on this device.
fn options(device: u32) -> Options {
    let pin = |s: &&str| Pin::parse(&format!("{s}=portable@{device}")).unwrap();
    Options {
        structures: PLACED.iter().map(|s| (*s).to_string()).collect(),
        pins: PLACED.iter().map(pin).collect(),
        ..any_speed("fp8_static")
    }
}

fn swaps(host: &Host, model: &Loaded, options: &Options) -> Swaps {
    auto_swaps(host, model, &samples(), options, &Silent).unwrap()
}

/// Values that cross between placed seats and everything else, from the graph alone: in, out.
fn edges(plan: &Plan, model: &Loaded) -> (u64, u64) {
    let graph = model.session().graph();
    // A reshape of a value is the value.
    let source = |mut v: ValueId| loop {
        match graph.producer(v) {
            Some((op, _)) if graph.op(op).kind == OpKind::Reshape => {
                v = graph.op(op).inputs[0].unwrap();
            }
            _ => return v,
        }
    };
    let inside: BTreeSet<usize> = plan
        .installs()
        .iter()
        .flat_map(|i| i.ops.iter().map(|op| op.0))
        .collect();
    let made: BTreeSet<usize> = plan
        .installs()
        .iter()
        .flat_map(|i| i.outputs.iter().map(|v| v.0))
        .collect();
    let read: BTreeSet<usize> = plan
        .installs()
        .iter()
        .flat_map(|i| i.inputs.iter().flatten().map(|v| source(*v).0))
        .collect();
    let by_host: BTreeSet<usize> = graph
        .op_ids()
        .filter(|op| !inside.contains(&op.0) && graph.op(*op).kind != OpKind::Reshape)
        .flat_map(|op| graph.op(op).inputs.iter().flatten().copied())
        .chain(graph.outputs.iter().map(|(_, v)| *v))
        .map(|v| source(v).0)
        .collect();
    // How many positions of the regions that live there are valid is told once for all of them.
    let told = u64::from(plan.housed().next().is_some());
    let into = read.difference(&made).count() as u64 + told;
    let out = made.intersection(&by_host).count() as u64;
    (into, out)
}

#[test]
fn neighbours_pass_values_without_copies_and_real_edges_copy_once() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let there = swaps(&host, &model, &options(1));
    let here = swaps(&host, &model, &options(0));
    assert_eq!(there.seats.len(), here.seats.len());
    assert!(
        there.seats.len() >= 6,
        "{:?} {:?}",
        there
            .seats
            .iter()
            .map(|s| s.key.clone())
            .collect::<Vec<_>>(),
        there.refused
    );
    assert!(there
        .seats
        .iter()
        .all(|s| s.report().form.device == "portable:1"));
    assert!(here.seats.iter().all(|s| s.report().form.device == "cpu"));
    let station = Station::open(host.registry.plugin("portable").unwrap(), 1).unwrap();
    let before = station.device().copies();
    let got = logits(&model, &there.plan);
    let made = station.device().copies().since(&before);
    assert_eq!(got, logits(&model, &here.plan));
    let (into, out) = edges(&there.plan, &model);
    assert_eq!((made.copies_in, made.copies_out), (into, out));
    let installs = there.plan.installs().iter();
    let apart: usize = installs
        .map(|i| i.inputs.iter().flatten().count() + i.outputs.len())
        .sum();
    assert!(
        into + out < apart as u64,
        "{into} + {out}, {apart} if every seat copied"
    );
    assert!(there.seats.iter().all(|s| s.ledger.counts().fallbacks == 0));
    // Again: as many copies, and memory that went back to the pool.
    let before = station.device().copies();
    logits(&model, &there.plan);
    assert_eq!(station.device().copies().since(&before), made);
}

/// Everything bound on a device that is gone after so many operations.
fn bound(lose_after: u64, mode: OnGuardFail) -> (Loaded, Swaps) {
    std::env::set_var("STRUCTURES_SIM_LOSE_AFTER", lose_after.to_string());
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let options = Options {
        on_guard_fail: mode,
        ..options(1)
    };
    let swaps = swaps(&host, &model, &options);
    (model, swaps)
}

/// Bound on a device that is gone soon afterwards, in the middle of a run: the smallest number of operations with
/// which everything can be bound is found by halving.
fn bound_and_soon_lost(mode: OnGuardFail) -> (Loaded, Swaps) {
    let (_, all) = bound(1 << 40, mode);
    let (mut few, mut enough) = (0, 1 << 14);
    while enough - few > 1 {
        let half = (few + enough) / 2;
        match bound(half, mode).1.seats.len() == all.seats.len() {
            true => enough = half,
            false => few = half,
        }
    }
    // Into the run: a few copies and a call are behind it.
    bound(enough + 25, mode)
}

#[test]
fn a_device_lost_in_a_run_gives_every_seat_back_and_the_run_goes_on_exactly() {
    let (model, swaps) = bound_and_soon_lost(OnGuardFail::Fallback);
    let host = logits(&model, &model.session().host_plan());
    for _ in 0..2 {
        assert_eq!(logits(&model, &swaps.plan), host);
    }
    let served: u64 = swaps
        .seats
        .iter()
        .map(|s| s.ledger.counts().form_calls)
        .sum();
    assert!(served > 0, "it was lost before the first call");
    for seat in &swaps.seats {
        let counts = seat.ledger.counts();
        assert!(counts.detached, "{}", seat.key);
        let reason = counts.last_reason.unwrap_or_default();
        assert!(reason.starts_with("device_lost"), "{}: {reason}", seat.key);
    }
}

#[test]
fn a_device_lost_in_a_run_ends_it_where_the_caller_said_so() {
    let (model, swaps) = bound_and_soon_lost(OnGuardFail::Raise);
    let error = try_logits(&model, &swaps.plan).unwrap_err().to_string();
    assert!(error.contains("device_lost"), "{error}");
}

#[test]
fn a_device_its_code_was_not_built_for_is_refused_by_name() {
    simulate(&[
        ("STRUCTURES_SIM_ARCH", "sm_90a"),
        ("STRUCTURES_SIM_BUILT_FOR", "sm_120a"),
    ]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let swaps = swaps(&host, &model, &options(1));
    assert!(swaps.seats.is_empty());
    let codes: BTreeSet<&str> = swaps.refused.iter().map(|r| r.code.as_str()).collect();
    assert!(codes.contains("arch_not_declared"), "{codes:?}");
}

/// One attachment of `PLACED` with the simulated device; whole prompts, eagerly.
fn attached(host: &Host, model: &Loaded, mode: OnGuardFail) -> Attachment {
    let options = Options {
        on_guard_fail: mode,
        ..options(1)
    };
    attach(host, model, &samples(), &options, &Silent).unwrap()
}

/// Kinds the simulated device declares.
const DECLARED: [&str; 13] = [
    "add",
    "mul",
    "linear",
    "act",
    "rms_norm",
    "embedding",
    "rope_table",
    "rope",
    "transpose",
    "contiguous",
    "attention",
    "kv_append",
    "argmax",
];

fn station(host: &Host) -> Arc<Station> {
    Station::open(host.registry.plugin("portable").unwrap(), 1).unwrap()
}

/// The same for decode steps, judged as they are served.
fn attached_steps(host: &Host, model: &Loaded, mode: OnGuardFail) -> Attachment {
    let options = Options {
        workload: Some(Workload::Decode),
        on_guard_fail: mode,
        ..options(1)
    };
    attach(host, model, &samples(), &options, &Silent).unwrap()
}

/// Copies of a run: values in and out, bytes.
#[derive(Debug)]
struct Made {
    values: (u64, u64),
    bytes: u64,
}

/// Bits of a run, and the copies it made.
fn copied(model: &Loaded, plan: &Plan, station: &Station) -> (Vec<u32>, Made) {
    let before = station.device().copies();
    let got = logits(model, plan);
    let made = station.device().copies().since(&before);
    let made = Made {
        values: (made.copies_in, made.copies_out),
        bytes: made.bytes_in + made.bytes_out,
    };
    (got, made)
}

#[test]
fn host_operations_run_where_the_seats_are_and_only_real_edges_copy() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let attached = attached(&host, &model, OnGuardFail::Fallback);
    let receipt = &attached.receipt;
    let union = receipt.union.as_ref().unwrap();
    // Activated is within the bands.
    assert_eq!(union.outcome, "activated", "{union:?}");
    let rows = &receipt.device_operations;
    assert!(!rows.is_empty(), "{:?}", receipt.refused);
    for row in rows {
        assert_eq!((row.plugin.as_str(), row.device.index), ("portable", 1));
        assert_eq!(row.values.len(), row.count);
        assert!(DECLARED.contains(&row.kind.as_str()), "{}", row.kind);
    }
    // A layer's first norm reads what a seat left there and a seat reads it; the table's rows are read there alone.
    let count = |kind: &str| rows.iter().find(|r| r.kind == kind).map_or(0, |r| r.count);
    assert_eq!((count("rms_norm"), count("embedding")), (3, 1), "{rows:?}");
    let operations: usize = rows.iter().map(|r| r.count).sum();
    assert_eq!(union.operations, operations);
    assert_eq!(attached.seats.len(), receipt.seats.len() + operations);
    // They are in the ledger, and each of them ran.
    let served = |s: &Seat| s.ledger.counts().form_calls;
    assert!(attached.seats.iter().all(|s| served(s) > 0));
    let per_seat = union.ledger.calls / (union.seams + operations) as u64;
    assert!(union.ledger.clean && per_seat * union.seams as u64 > 0);
    assert_eq!(
        union.ledger.calls,
        per_seat * (union.seams + operations) as u64
    );

    let station = station(&host);
    let seats = attached.plan.installs().iter();
    let seats = seats.filter(|i| !i.name.starts_with("operation:"));
    let seats = model.session().plan(seats.cloned().collect()).unwrap();
    let (near, with) = copied(&model, &attached.plan, &station);
    let (far, without) = copied(&model, &seats, &station);
    // Norms add up in another order, and an E4M3 code here and there is its neighbour.
    let value = |bits: &u32| f64::from(f32::from_bits(*bits));
    let pairs = || near.iter().map(value).zip(far.iter().map(value));
    let off: f64 = pairs().map(|(a, b)| (a - b).powi(2)).sum();
    let all: f64 = pairs().map(|(_, b)| b * b).sum();
    assert!(off <= 1e-4 * all, "{off} of {all}");
    for (plan, made) in [(&attached.plan, &with), (&seats, &without)] {
        assert_eq!(made.values, edges(plan, &model));
    }
    let count = |made: &Made| made.values.0 + made.values.1;
    assert!(
        with.bytes < without.bytes && count(&with) < count(&without),
        "{with:?} with, {without:?} without"
    );
    // Any one of them back on the host costs bytes: none is there that does not pay.
    for drop in attached.plan.installs() {
        if drop.name.starts_with("operation:") {
            let rest = attached.plan.installs().iter();
            let rest = rest.filter(|i| i.name != drop.name).cloned().collect();
            let less = model.session().plan(rest).unwrap();
            let (_, less) = copied(&model, &less, &station);
            assert!(
                less.bytes > with.bytes,
                "{}: {less:?} without it, {with:?} with it",
                drop.name
            );
        }
    }
}

/// Every operation of these kinds on the device, and nothing else.
fn all_of(host: &Host, model: &Loaded, kinds: &[OpKind]) -> (Plan, Vec<Operation>) {
    all_of_rows(host, model, kinds, 64)
}

/// The same for passes of at most so many tokens.
fn all_of_rows(
    host: &Host,
    model: &Loaded,
    kinds: &[OpKind],
    rows: usize,
) -> (Plan, Vec<Operation>) {
    let sizes = Sizes {
        tokens: 4,
        positions: 4,
    };
    let (session, plugin) = (model.session(), host.registry.plugin("portable").unwrap());
    let mode = OnGuardFail::Fallback;
    let mut shop = Workshop::new(session, plugin, station(host), sizes, rows, mode);
    let graph = session.graph();
    let ops = graph
        .op_ids()
        .filter(|op| kinds.contains(&graph.op(*op).kind));
    let made: Vec<Operation> = ops.map(|op| shop.bind(op).unwrap()).collect();
    let installs = made.iter().map(|o| o.install.clone()).collect();
    (session.plan(installs).unwrap(), made)
}

#[test]
fn operations_with_one_answer_give_the_hosts_bits_and_copy_at_their_edges() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let expected = logits(&model, &model.session().host_plan());
    for kind in [OpKind::Add, OpKind::Mul, OpKind::Embedding] {
        let (plan, operations) = all_of(&host, &model, &[kind]);
        assert!(!operations.is_empty(), "{kind}");
        let (got, made) = copied(&model, &plan, &station(&host));
        assert!(got == expected, "{kind}");
        assert_eq!(made.values, edges(&plan, &model), "{kind}");
        for operation in &operations {
            let counts = operation.seat.ledger.counts();
            assert_eq!((counts.form_calls, counts.fallbacks), (1, 0), "{kind}");
        }
    }
    // Nobody declared a reshape for the device, which needs none.
    let graph = model.session().graph();
    let mut reshapes = graph
        .op_ids()
        .filter(|op| graph.op(*op).kind == OpKind::Reshape);
    let sizes = Sizes {
        tokens: 4,
        positions: 4,
    };
    let plugin = host.registry.plugin("portable").unwrap();
    let mode = OnGuardFail::Fallback;
    let mut shop = Workshop::new(model.session(), plugin, station(&host), sizes, 64, mode);
    let refused = shop.bind(reshapes.next().unwrap()).err().unwrap();
    assert_eq!(refused.code, "form_unknown");
    // All of them are the graph's but the choice.
    assert!(shop.chooses());
    assert_eq!(shop.kinds().len(), DECLARED.len() - 1);
}

/// What appends to the regions and reads them, on the device, and nothing else.
const CACHE: [OpKind; 2] = [OpKind::KvAppend, OpKind::Attention];

/// A prompt of four and steps after it: the bits of every score.
fn decoded(model: &Loaded, plan: &Plan, state: &mut State, steps: u32) -> Vec<Vec<u32>> {
    let runner = Runner::new(model.session(), 64);
    let bits = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bits = |t: Tensor| bits(t).into_iter().map(f32::to_bits).collect();
    let from = state.len();
    let mut made: Vec<Vec<u32>> = Vec::new();
    if from == 0 {
        made.push(bits(
            runner.step(plan, &[5, 9, 2, 7], 0, state, None).unwrap(),
        ));
    }
    for _ in 0..steps {
        let at = state.len();
        let token = [(at as u32 * 13) % 200 + 1];
        made.push(bits(runner.step(plan, &token, at, state, None).unwrap()));
    }
    made
}

#[test]
fn a_region_lives_on_the_device_of_its_users_and_comes_home_exactly() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let station = station(&host);
    let (plan, operations) = all_of(&host, &model, &CACHE);
    let regions = model.session().graph().states.len();
    assert_eq!(plan.housed().count(), regions);
    // The same attentions with the regions at home: they are brought there in every step.
    let at_home = plan.installs().iter().filter(|i| i.inputs.len() > 1);
    let at_home = model.session().plan(at_home.cloned().collect()).unwrap();
    assert_eq!(at_home.housed().count(), 0);
    let new = || model.session().new_state(1, 32);
    let (mut here, mut there) = (new(), new());
    let want = decoded(&model, &at_home, &mut here, 9);
    let before = station.device().copies();
    assert!(decoded(&model, &plan, &mut there, 9) == want);
    let made = station.device().copies().since(&before);
    let layers = regions as u64 / 2;
    // A run: the valid length, and of every layer q, what is appended to k and v, and the result.
    assert_eq!(
        (made.copies_in, made.copies_out),
        (10 * (1 + 3 * layers), 10 * layers)
    );
    let lies = |state: &State| (0..regions).filter(|r| state.home(*r).is_some()).count();
    assert_eq!((lies(&here), lies(&there)), (0, regions));

    // To forget positions copies nothing, and what follows is bit for bit what followed.
    let since = |mark: &mut _| {
        let now = station.device().copies();
        let made = now.since(mark);
        *mark = now;
        (made.copies_in, made.copies_out)
    };
    let mut mark = station.device().copies();
    there.truncate(8).unwrap();
    assert_eq!(since(&mut mark), (0, 0));
    assert!(decoded(&model, &plan, &mut there, 2) == want[5..7]);
    // A copy of the state is the host's: one copy a region.
    since(&mut mark);
    let mut copy = there.clone_deep().unwrap();
    assert_eq!(since(&mut mark), (0, regions as u64));
    assert_eq!((lies(&copy), lies(&there)), (0, regions));
    for at in 0..regions {
        let valid = |s: &State| {
            let t = s.valid(at).unwrap().unwrap();
            t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(valid(&copy), valid(&there));
    }
    since(&mut mark);
    assert!(decoded(&model, &at_home, &mut copy, 2) == want[7..9]);
    // Detached: the host's plan takes the regions home, once, and goes on as from its own.
    let host_plan = model.session().host_plan();
    let mut own = there.clone_deep().unwrap();
    since(&mut mark);
    let detached = decoded(&model, &host_plan, &mut there, 2);
    assert_eq!(since(&mut mark), (0, regions as u64));
    assert_eq!(lies(&there), 0);
    assert!(detached == decoded(&model, &host_plan, &mut own, 2));
    // A captured step is the host's here, and takes them home too; nothing is there twice.
    there.reset();
    assert!(decoded(&model, &plan, &mut there, 9) == want);
    for operation in &operations {
        let counts = operation.seat.ledger.counts();
        assert!(counts.form_calls > 0 && counts.fallbacks == 0, "{counts:?}");
    }
}

#[test]
fn a_device_lost_with_a_region_poisons_the_state_and_the_loop_goes_on_from_the_tokens() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    let prompt = [5, 9, 2, 7];
    let want = {
        let mut eager = Vec::new();
        let plan = model.session().host_plan();
        generate::generate(&model.model, &plan, &prompt, 12, &mut |t| eager.push(t)).unwrap();
        eager
    };
    // Trials call it twice; then two layers a run.
    std::env::set_var("STRUCTURES_SIM_LOSE_IN", "attention:12");
    let bound = || {
        let host = host(dir.path());
        let (plan, operations) = all_of(&host, &model, &CACHE);
        (host, plan, operations)
    };
    // A caller's own state says so, with a code, until it is reset.
    let (_host, plan, operations) = bound();
    let mut state = model.session().new_state(1, 32);
    let runner = Runner::new(model.session(), 64);
    runner.step(&plan, &prompt, 0, &mut state, None).unwrap();
    let lost = (4..30).find_map(|at| runner.step(&plan, &[3], at, &mut state, None).err());
    let lost = Error::from(lost.unwrap());
    assert_eq!(lost.code(), "state_lost");
    assert!(lost.to_string().contains("portable:1"), "{lost}");
    for operation in &operations {
        let counts = operation.seat.ledger.counts();
        assert!(counts.detached, "{counts:?}");
        assert!(counts.last_reason.unwrap().starts_with("device_lost"));
    }
    assert!(runner.step(&plan, &[3], 4, &mut state, None).is_err());
    state.reset();
    let own = decoded(
        &model,
        &model.session().host_plan(),
        &mut model.session().new_state(1, 32),
        3,
    );
    assert!(decoded(&model, &plan, &mut state, 3) == own);
    // Who has the tokens goes on: eagerly, and in the loop.
    let (_host, plan, operations) = bound();
    let mut eager = Vec::new();
    generate::generate(&model.model, &plan, &prompt, 12, &mut |t| eager.push(t)).unwrap();
    assert_eq!(eager, want);
    assert!(operations.iter().all(|o| o.seat.ledger.is_detached()));
}

/// What the host alone makes of a prompt.
fn by_the_host(model: &Loaded, prompt: &[u32], n: usize) -> Vec<u32> {
    let mut made = Vec::new();
    let plan = model.session().host_plan();
    generate::generate(&model.model, &plan, prompt, n, &mut |t| made.push(t)).unwrap();
    made
}

/// What a loop over the plan makes of it.
fn looped(model: &Loaded, plan: Plan, prompt: &[u32], n: usize) -> Result<Vec<u32>, Error> {
    let mut made = DecodeLoop::new(model, plan, prompt.len() + n)?;
    let go = &mut |_: u32| ControlFlow::<()>::Continue(());
    Ok(made.generate(prompt, n, Choose::Greedy, go)?.tokens)
}

#[test]
fn a_loop_whose_device_is_lost_in_the_prompt_goes_on_with_the_host() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    // One pass with nothing valid before it, and two of which the second loses what the first left there.
    let long: Vec<u32> = (0..300).map(|i| (i * 37) % 200 + 1).collect();
    for (prompt, rows, last) in [(&[5, 9, 2, 7][..], 64, 3), (&long, 512, 5)] {
        let want = by_the_host(&model, prompt, 4);
        // One trial; then two layers a pass.
        for n in 2..=last {
            std::env::set_var("STRUCTURES_SIM_LOSE_IN", format!("attention:{n}"));
            let bound = || {
                let host = host(dir.path());
                let (plan, operations) = all_of_rows(&host, &model, &CACHE, rows);
                (host, plan, operations)
            };
            let (_host, plan, operations) = bound();
            assert_eq!(looped(&model, plan, prompt, 4).unwrap(), want, "{n}");
            for operation in &operations {
                let counts = operation.seat.ledger.counts();
                assert!(counts.detached, "{} {n}: {counts:?}", prompt.len());
            }
            let (_host, plan, operations) = bound();
            let mut eager = Vec::new();
            generate::generate(&model.model, &plan, prompt, 4, &mut |t| eager.push(t)).unwrap();
            assert_eq!(eager, want, "{n}");
            for operation in &operations {
                let counts = operation.seat.ledger.counts();
                assert!(counts.detached, "{} {n}: {counts:?}", prompt.len());
            }
        }
    }
}

#[test]
fn a_region_whose_sibling_is_at_home_is_at_home() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let (plan, operations) = all_of(&host, &model, &CACHE);
    let at_home = plan.installs().iter().filter(|i| i.inputs.len() > 1);
    let at_home = model.session().plan(at_home.cloned().collect()).unwrap();
    let new = || model.session().new_state(1, 32);
    let want = decoded(&model, &at_home, &mut new(), 5);
    // Without the appends to every other region.
    let mut appends = 0;
    let half = plan.installs().iter().filter(|i| {
        appends += usize::from(i.inputs.len() == 1);
        i.inputs.len() > 1 || appends % 2 == 0
    });
    let half = model.session().plan(half.cloned().collect()).unwrap();
    // It would come home for every call of the attention.
    assert_eq!((plan.housed().count(), half.housed().count()), (4, 0));
    let mut state = new();
    let before = station(&host).device().copies();
    assert!(decoded(&model, &half, &mut state, 5) == want);
    let made = station(&host).device().copies().since(&before);
    // A run: q, k and v of each of two layers, and the results.
    assert_eq!((made.copies_in, made.copies_out), (6 * 6, 6 * 2));
    assert!((0..4).all(|region| state.home(region).is_none()));
    for operation in &operations {
        let counts = operation.seat.ledger.counts();
        assert_eq!((counts.fallbacks, counts.detached), (0, false));
    }
}

/// Bits of scores, step by step.
type Bits = Vec<Vec<u32>>;

/// Bits of the scores of steps after a prompt, eagerly and as captured; how the captured ones ran, and copies of the last.
fn both_forms(
    model: &Loaded,
    plan: &Plan,
    station: &Station,
    steps: usize,
) -> (Bits, Bits, PlaceNote, (u64, u64)) {
    let session = model.session();
    let prefilled = || {
        let mut state = session.new_state(1, 32);
        state.reserve().unwrap();
        let runner = Runner::new(session, 32);
        // Seats of a decode workload serve one row.
        for (at, token) in [5, 9, 2, 7].into_iter().enumerate() {
            runner.step(plan, &[token], at, &mut state, None).unwrap();
        }
        state
    };
    let inputs = |at: usize| {
        let token = Tensor::new(&[[(at as u32 * 13) % 200 + 1]], &Device::Cpu).unwrap();
        [token, Tensor::new(&[at as u32], &Device::Cpu).unwrap()]
    };
    let bits = |t: &Tensor| -> Vec<u32> {
        let values = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    let mut state = prefilled();
    let eager = (4..4 + steps).map(|at| {
        let made = session.run(plan, &inputs(at), &mut state, None).unwrap();
        bits(&made[0])
    });
    let eager = eager.collect();
    let mut state = prefilled();
    let first = inputs(4);
    let capture = Capture {
        inputs: &first,
        state: &state,
        windows: &[],
        greedy: None,
        last_row: None,
    };
    let mut step = session.capture(plan, &capture).unwrap();
    let mut captured = Vec::new();
    let mut copies = (0, 0);
    for at in 4..4 + steps {
        let [token, position] = inputs(at);
        step.write("tokens", &token).unwrap();
        step.write("positions", &position).unwrap();
        let before = station.device().copies();
        step.replay(&mut state, &Alone).unwrap();
        let made = station.device().copies().since(&before);
        copies = (made.copies_in, made.copies_out);
        captured.push(bits(&step.read("logits").unwrap()));
    }
    assert_eq!(state.len(), 4 + steps);
    (eager, captured, step.manifest().there.unwrap(), copies)
}

#[test]
fn a_step_that_stays_on_the_device_is_recorded_launched_and_judged_so() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let attached = attached_steps(&host, &model, OnGuardFail::Raise);
    let receipt = &attached.receipt;
    let union = receipt.union.as_ref().unwrap();
    assert_eq!(
        (union.outcome.as_str(), receipt.timing.form.as_str()),
        ("activated", "captured")
    );
    let step = union
        .device_step
        .as_ref()
        .unwrap_or_else(|| panic!("{:?}", receipt.refused));
    assert_eq!(
        (step.place.as_str(), step.form.as_str()),
        ("portable:1", "recorded"),
        "{step:?}"
    );
    assert!(step.code.is_none());
    // Every seat and every operation is a call of it, and was counted once a step by each judged sample and round.
    assert_eq!(step.calls, union.seams + union.operations);
    assert!(
        union.ledger.clean && union.ledger.never_ran.is_empty(),
        "{:?}",
        union.ledger
    );
    let counts: BTreeSet<u64> = attached
        .seats
        .iter()
        .map(|s| s.ledger.counts().form_calls)
        .collect();
    assert_eq!(counts.len(), 1, "{counts:?}");
    // What a step is told: token, position, and the valid length where that is another, which it is not when one step is
    // timed again and again; what it says: which token is next.
    assert_eq!(union.copies.len(), 1);
    assert_eq!(
        (union.copies[0].copies_in, union.copies[0].copies_out),
        (2, 1)
    );
    assert_eq!(
        (union.copies[0].bytes_in, union.copies[0].bytes_out),
        (16, 8)
    );
    assert!(step.choice && step.crossing == (2, 1), "{step:?}");
    let chosen: Vec<_> = receipt
        .device_operations
        .iter()
        .filter(|row| row.kind == "argmax")
        .map(|row| (row.count, row.values.join(",")))
        .collect();
    assert_eq!(chosen, [(1, "lm_head.out".to_string())]);
    // Units alone have the host in between, and say so.
    let alone: BTreeSet<Option<&str>> = receipt
        .units
        .iter()
        .filter_map(|u| u.device_step.as_ref())
        .map(|s| s.code.as_deref())
        .collect();
    assert!(alone.contains(&Some("capture_host_between")), "{alone:?}");

    let station = station(&host);
    let (eager, captured, note, copies) = both_forms(&model, &attached.plan, &station, 6);
    assert!(eager == captured, "{note:?}");
    assert_eq!((note.form.as_str(), copies), ("recorded", (3, 1)));

    // The loop gives the tokens of the eager form, again and again, and a captured step a call of every seat.
    let mut eager = Vec::new();
    let prompt = [5];
    generate::generate(&model.model, &attached.plan, &prompt, 12, &mut |t| {
        eager.push(t)
    })
    .unwrap();
    let mut looped = DecodeLoop::new(&model, attached.plan.clone(), 32).unwrap();
    assert_eq!(looped.manifest().there.unwrap().form, "recorded");
    assert!(
        looped.manifest().allocating.is_empty(),
        "{:?}",
        looped.manifest().allocating
    );
    for _ in 0..2 {
        let before: Vec<u64> = attached
            .seats
            .iter()
            .map(|s| s.ledger.counts().form_calls)
            .collect();
        let made = looped
            .generate(&prompt, 12, Choose::Greedy, &mut |_| {
                ControlFlow::Continue(())
            })
            .unwrap();
        assert_eq!(made.tokens, eager);
        for (seat, before) in attached.seats.iter().zip(before) {
            let counts = seat.ledger.counts();
            // The prompt's pass, in which nobody chooses there, and a launch a step.
            let prompt = u64::from(!seat.key.starts_with("operation:argmax"));
            assert_eq!(
                counts.form_calls - before,
                prompt + made.steps as u64,
                "{}",
                seat.key
            );
            assert_eq!(counts.fallbacks, 0);
        }
    }
    assert_eq!(looped.recovered(), 0);
    let mut more = [0; 8];
    let made = allocation_counter::measure(|| looped.go_on(&mut more).unwrap());
    assert_eq!(made.count_total, 0, "a launch allocates nothing");
    // A receipt binds it again.
    let (again, _) = replay(&host, &model, receipt, &[5, 9, 2, 7], OnGuardFail::Raise).unwrap();
    let (_, captured_again, _, _) = both_forms(&model, &again, &station, 6);
    assert!(captured_again == captured);
}

/// Tokens of a loop, and values and bytes that came home in it.
fn looped_home(
    model: &Loaded,
    plan: &Plan,
    station: &Station,
    choose: Choose,
) -> (Vec<u32>, (u64, u64)) {
    let mut looped = DecodeLoop::new(model, plan.clone(), 32).unwrap();
    let go = &mut |_: u32| ControlFlow::<()>::Continue(());
    // The prompt alone, which is no step.
    let mut home = |n: usize| {
        let before = station.device().copies();
        let made = looped.generate_past_ends(&[5], n, choose, go).unwrap();
        let copies = station.device().copies().since(&before);
        (made.tokens, (copies.copies_out, copies.bytes_out))
    };
    let (_, prompt) = home(1);
    let (tokens, all) = home(11);
    (tokens, (all.0 - prompt.0, all.1 - prompt.1))
}

#[test]
fn the_next_token_is_chosen_on_the_device_and_scores_come_home_for_who_draws() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    let draws = Choose::Sample {
        temperature: 0.8,
        top_p: 0.9,
        seed: 7,
    };
    // Recorded, and call by call.
    for fault in ["", "none"] {
        match fault {
            "" => std::env::remove_var("STRUCTURES_SIM_CAPTURE"),
            fault => std::env::set_var("STRUCTURES_SIM_CAPTURE", fault),
        }
        let host = host(dir.path());
        let attached = attached_steps(&host, &model, OnGuardFail::Raise);
        let there = station(&host);
        let plan = &attached.plan;
        let installs = plan.installs().iter();
        let here = installs.filter(|i| i.chooses().is_none()).cloned();
        let here = model.session().plan(here.collect()).unwrap();
        assert_eq!(here.installs().len() + 1, plan.installs().len());
        let (tokens, home) = looped_home(&model, plan, &there, Choose::Greedy);
        let (others, scores) = looped_home(&model, &here, &there, Choose::Greedy);
        assert_eq!(tokens, others, "{fault}");
        // Ten steps, 264 scores.
        assert_eq!((home, scores), ((10, 80), (10, 10 * 4 * 264)), "{fault}");
        let (tokens, home) = looped_home(&model, plan, &there, draws);
        let (others, scores) = looped_home(&model, &here, &there, draws);
        assert_eq!(tokens, others, "{fault}");
        assert_eq!((home, scores), ((10, 10 * 4 * 264), (10, 10 * 4 * 264)));
    }
}

/// Says of every step what it said of the first.
struct Stale(Arc<Seat>, OnceLock<Vec<Held>>);

impl SpanRunner for Stale {
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        self.0.run(inputs)
    }

    fn place(&self) -> Option<&Place> {
        self.0.place()
    }

    fn stays(&self, inputs: &[Option<&[usize]>]) -> Result<bool, GraphError> {
        self.0.stays(inputs)
    }

    fn replay_at(
        &self,
        inputs: &[Option<Held>],
        region: Option<&Arc<dyn Away>>,
    ) -> Result<Vec<Held>, Unserved> {
        if self.1.get().is_none() {
            let made = self.0.replay_at(inputs, region)?;
            return Ok(self.1.get_or_init(|| made).clone());
        }
        Ok(self.1.get().cloned().unwrap())
    }

    fn replayed(&self, planned: Frozen) {
        self.0.replayed(planned);
    }
}

#[test]
fn a_choice_that_does_not_follow_its_scores_is_refused_while_it_is_judged() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let (session, plugin) = (model.session(), host.registry.plugin("portable").unwrap());
    let sizes = Sizes {
        tokens: 1,
        positions: 8,
    };
    let mode = OnGuardFail::Fallback;
    let mut shop = Workshop::new(session, plugin, station(&host), sizes, 64, mode);
    let scores = session.graph().outputs[0].1;
    let head = shop.bind(session.graph().producer(scores).unwrap().0);
    let (head, choice) = (head.unwrap(), shop.bind_choice(scores).unwrap());
    let samples: Vec<Vec<u32>> = samples().all().map(<[u32]>::to_vec).collect();
    let runner = || Runner::new(session, 24);
    let plan = session.host_plan();
    let rows = |sample: &Vec<u32>| {
        let one = std::slice::from_ref(sample);
        let scored = runner().score(&plan, one, Workload::Decode, false, None, || {});
        scored.unwrap()
    };
    let judge = Judge {
        runner: runner(),
        host: session.host_plan(),
        base: Vec::new(),
        samples: &samples,
        reference: samples.iter().map(rows).collect(),
        workload: Workload::Decode,
        all_positions: false,
        kind: OutputKind::Distribution,
        floors: Floors::default(),
        min_speedup: 0.0,
        schedule: Schedule::new(1, 1).unwrap(),
        judged_on: "held-out samples".into(),
        captured: true,
        progress: &Silent,
    };
    let seats = [head.seat.clone(), choice.seat.clone()];
    let judged = |runner: Arc<dyn SpanRunner>| {
        let choice = Install {
            runner,
            ..choice.install.clone()
        };
        let unit = judge.judge(vec![head.install.clone(), choice], &seats, &[]);
        unit.unwrap()
    };
    let unit = judged(choice.seat.clone());
    assert_eq!(unit.outcome, "activated", "{:?}", unit.reason);
    let step = unit.device_step.unwrap();
    assert!(
        step.choice && step.form == "recorded" && step.calls == 2,
        "{step:?}"
    );
    assert_eq!(unit.copies[0].bytes_out, 8);
    let unit = judged(Arc::new(Stale(choice.seat.clone(), OnceLock::new())));
    assert_eq!(unit.code.as_deref(), Some("fell_back"), "{:?}", unit.reason);
    let reason = unit.reason.unwrap();
    let named = ["operation:argmax", "it chose", "the first of the largest"];
    assert!(named.iter().all(|part| reason.contains(part)), "{reason}");
}

#[test]
fn a_device_lost_in_the_choice_is_lost_as_anywhere() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    for mode in [OnGuardFail::Fallback, OnGuardFail::Raise] {
        std::env::remove_var("STRUCTURES_SIM_LOSE_IN");
        let attached = attached_steps(&host(dir.path()), &model, mode);
        // The trial's rows, two passes that warm up, and steps: in the third of them.
        std::env::set_var("STRUCTURES_SIM_LOSE_IN", "argmax:20");
        let host = host(dir.path());
        let (plan, seats) = replay(&host, &model, &attached.receipt, &[5, 9, 2, 7], mode).unwrap();
        let mut looped = DecodeLoop::new(&model, plan, 32).unwrap();
        assert!(looped.manifest().there.unwrap().choice);
        let mut seen = 0;
        let made = looped.generate_past_ends(&[5], 12, Choose::Greedy, &mut |_| {
            seen += 1;
            ControlFlow::<()>::Continue(())
        });
        match mode {
            OnGuardFail::Raise => {
                let error = made.unwrap_err().to_string();
                assert!(error.contains("device_lost") && seen > 1, "{seen} {error}");
            }
            OnGuardFail::Fallback => {
                assert_eq!(made.unwrap().tokens.len(), 12);
                assert_eq!(looped.recovered(), 1);
                assert!(seats.iter().all(|s| s.ledger.is_detached()));
                assert!(looped.manifest().there.is_none());
            }
        }
    }
}

#[test]
fn what_cannot_be_recorded_says_why_and_runs_call_by_call() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    for (fault, code) in [
        ("none", "capture_unsupported"),
        ("alloc:rope", "capture_alloc"),
        ("wait:transpose", "capture_wait"),
    ] {
        std::env::set_var("STRUCTURES_SIM_CAPTURE", fault);
        let host = host(dir.path());
        let attached = attached_steps(&host, &model, OnGuardFail::Raise);
        let union = attached.receipt.union.as_ref().unwrap();
        assert_eq!(union.outcome, "activated", "{fault}: {union:?}");
        let step = union.device_step.as_ref().unwrap();
        assert_eq!(
            (step.form.as_str(), step.code.as_deref()),
            ("called", Some(code)),
            "{step:?}"
        );
        assert!(union.ledger.clean, "{:?}", union.ledger);
        let (eager, captured, note, copies) =
            both_forms(&model, &attached.plan, &station(&host), 4);
        assert!(eager == captured, "{fault}");
        assert_eq!((note.code.as_deref(), copies), (Some(code), (3, 1)));
    }
}

#[test]
fn a_device_lost_in_a_launch_poisons_and_the_loop_goes_on_or_stops_as_was_chosen() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    let prompt = [5, 9, 2, 7];
    let mut want = Vec::new();
    let plan = model.session().host_plan();
    generate::generate(&model.model, &plan, &prompt, 12, &mut |t| want.push(t)).unwrap();
    let calls = |n: u64| std::env::set_var("STRUCTURES_SIM_LOSE_IN", format!("rope_table:{n}"));
    let bound = |n: u64, mode: OnGuardFail| {
        calls(n);
        let host = host(dir.path());
        let (session, plugin) = (model.session(), host.registry.plugin("portable").unwrap());
        let sizes = Sizes {
            tokens: 1,
            positions: 8,
        };
        let mut shop = Workshop::new(session, plugin, station(&host), sizes, 64, mode);
        let graph = session.graph();
        let table = graph
            .op_ids()
            .filter(|op| graph.op(*op).kind == OpKind::RopeTable);
        let made: Vec<Operation> = table.map(|op| shop.bind(op).unwrap()).collect();
        let plan = session.plan(made.iter().map(|o| o.install.clone()).collect());
        (host, plan.unwrap(), made)
    };
    // One trial, then two passes that warm up, the prompt, and launches: in the fourth of them.
    let (_host, plan, operations) = bound(8, OnGuardFail::Fallback);
    let mut looped = DecodeLoop::new(&model, plan, 32).unwrap();
    assert_eq!(looped.manifest().there.unwrap().form, "recorded");
    let go = &mut |_: u32| ControlFlow::<()>::Continue(());
    let made = looped.generate(&prompt, 12, Choose::Greedy, go);
    assert_eq!(made.unwrap().tokens, want);
    assert!(operations.iter().all(|o| o.seat.ledger.is_detached()));
    let (_host, plan, _) = bound(8, OnGuardFail::Raise);
    let mut looped = DecodeLoop::new(&model, plan, 32).unwrap();
    let error = looped
        .generate(&prompt, 12, Choose::Greedy, go)
        .unwrap_err();
    assert!(error.to_string().contains("device_lost"), "{error}");
}

#[test]
fn a_loop_whose_regions_are_lost_makes_its_state_again() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    let prompt = [5];
    for mode in [OnGuardFail::Fallback, OnGuardFail::Raise] {
        std::env::remove_var("STRUCTURES_SIM_LOSE_IN");
        let attached = attached_steps(&host(dir.path()), &model, mode);
        // Bound again on a device that is lost in a step: found by how often its table was asked.
        std::env::set_var("STRUCTURES_SIM_LOSE_IN", "rope_table:9");
        let host = host(dir.path());
        let (plan, seats) = replay(&host, &model, &attached.receipt, &[5, 9, 2, 7], mode).unwrap();
        let mut looped = DecodeLoop::new(&model, plan, 32).unwrap();
        assert_eq!(looped.manifest().there.unwrap().form, "recorded");
        let go = &mut |_: u32| ControlFlow::<()>::Continue(());
        let made = looped.generate(&prompt, 12, Choose::Greedy, go);
        match mode {
            OnGuardFail::Raise => {
                let error = made.unwrap_err().to_string();
                assert!(error.contains("device_lost"), "{error}");
            }
            OnGuardFail::Fallback => {
                assert_eq!(made.unwrap().tokens.len(), 12);
                assert_eq!(looped.recovered(), 1);
                assert!(seats.iter().all(|s| s.ledger.is_detached()));
                // From now on it is the host's.
                let mut want = Vec::new();
                let plan = model.session().host_plan();
                generate::generate(&model.model, &plan, &prompt, 12, &mut |t| want.push(t))
                    .unwrap();
                let again = looped.generate(&prompt, 12, Choose::Greedy, go).unwrap();
                assert_eq!(again.tokens, want);
            }
        }
    }
}

#[test]
fn a_loop_whose_device_is_lost_before_its_first_token_goes_on_with_the_host() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    let prompt = [5];
    let attached = attached_steps(&host(dir.path()), &model, OnGuardFail::Fallback);
    let (mut warming, mut prompted) = (0, 0);
    // Binding, warming up, the prompt, and steps.
    for n in 1..=6 {
        std::env::set_var("STRUCTURES_SIM_LOSE_IN", format!("rope_table:{n}"));
        let host = host(dir.path());
        let mode = OnGuardFail::Fallback;
        let Ok((plan, seats)) = replay(&host, &model, &attached.receipt, &[5, 9, 2, 7], mode)
        else {
            continue;
        };
        assert!(plan.housed().count() > 0);
        let lost = || seats.iter().all(|s| s.ledger.is_detached());
        let mut looped = DecodeLoop::new(&model, plan, 32).unwrap();
        let early = lost();
        let go = &mut |_: u32| ControlFlow::<()>::Continue(());
        let mut seen = 0;
        let made = looped.generate(&prompt, 12, Choose::Greedy, &mut |t| {
            seen += 1;
            if seen == 1 && !early && lost() {
                prompted += 1;
            }
            go(t)
        });
        let made = made.unwrap().tokens;
        if early {
            warming += 1;
            assert_eq!(made, by_the_host(&model, &prompt, 12), "{n}");
        }
    }
    assert!(warming > 0 && prompted > 0, "{warming} {prompted}");
}

#[test]
fn a_device_lost_in_the_middle_of_an_operation_gives_back_exactly() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let model = model();
    let expected = logits(&model, &model.session().host_plan());
    for kind in [OpKind::Add, OpKind::Embedding] {
        // The trials call it before the run does: operations of one shape and without weights once.
        std::env::set_var("STRUCTURES_SIM_LOSE_IN", format!("{kind}:2"));
        let host = host(dir.path());
        let (plan, operations) = all_of(&host, &model, &[kind]);
        assert!(logits(&model, &plan) == expected, "{kind}");
        for operation in &operations {
            let counts = operation.seat.ledger.counts();
            assert!(counts.detached && counts.form_calls == 0, "{counts:?}");
            let reason = counts.last_reason.unwrap_or_default();
            assert!(reason.starts_with("device_lost"), "{reason}");
        }
        assert!(logits(&model, &plan) == expected, "{kind}, again");
    }
}

#[test]
fn a_receipt_with_operations_runs_them_again_and_another_graph_or_kind_is_refused() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let attached = attached(&host, &model, OnGuardFail::Raise);
    let again =
        |receipt: &Receipt| replay(&host, &model, receipt, &[5, 9, 2, 7], OnGuardFail::Raise);
    let (plan, seats) = again(&attached.receipt).unwrap();
    let names = |plan: &Plan| -> BTreeSet<String> {
        plan.installs().iter().map(|i| i.name.clone()).collect()
    };
    assert_eq!(names(&plan), names(&attached.plan));
    assert_eq!(seats.len(), attached.seats.len());
    assert!(logits(&model, &plan) == logits(&model, &attached.plan));
    let changed = |change: fn(&mut Receipt)| {
        let mut receipt = attached.receipt.clone();
        change(&mut receipt);
        again(&receipt).err().map(|e| e.code().to_string())
    };
    for change in [
        (|r: &mut Receipt| r.device_operations[0].kind = "mul".into()) as fn(&mut Receipt),
        |r| r.device_operations[0].values[0] = "nobody".into(),
        |r| r.device_operations[0].device.arch = "sm_80".into(),
        |r| r.device_operations[0].plugin = "absent".into(),
    ] {
        assert_eq!(changed(change).as_deref(), Some("receipt_mismatch"));
    }
}

#[test]
fn a_receipt_names_the_device_and_the_copies_and_binds_there_again() {
    simulate(&[("STRUCTURES_SIM_ARCH", "sm_90a")]);
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let model = model();
    let attached = attach(&host, &model, &samples(), &options(1), &Silent).unwrap();
    let receipt = &attached.receipt;
    assert!(!receipt.seats.is_empty(), "{:?}", receipt.units);
    for seat in &receipt.seats {
        let device = seat.device.as_ref().unwrap();
        assert_eq!((device.index, device.arch.as_str()), (1, "sm_90a"));
    }
    for unit in receipt.units.iter().filter(|u| u.outcome == "activated") {
        assert_eq!(unit.device, Some(1), "{}", unit.name);
        assert_eq!(unit.copies.len(), 1, "{}", unit.name);
        assert_eq!(unit.copies[0].device, "portable:1");
        assert!(unit.copies[0].copies_in > 0 && unit.copies[0].bytes_out > 0);
    }
    let alone: u64 = receipt
        .units
        .iter()
        .flat_map(|u| &u.copies)
        .map(|c| c.copies_in)
        .sum();
    let union = &receipt.union.as_ref().unwrap().copies[0];
    assert!(
        union.copies_in < alone,
        "{} together, {alone} apart",
        union.copies_in
    );
    let (plan, _) = replay(&host, &model, receipt, &[5, 9, 2, 7], OnGuardFail::Raise).unwrap();
    assert_eq!(logits(&model, &plan), logits(&model, &attached.plan));
}
