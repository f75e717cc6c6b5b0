//! Values that lie on a device with memory of its own, on the simulated one: who copies what, what is lost with it, what
//! a receipt says of it.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::BTreeSet;
use std::sync::Arc;

use structures::attach::{attach, auto_swaps, Attachment, Options, Swaps};
use structures::choose::Pin;
use structures::host::{Host, Loaded};
use structures::operations::{Operation, Sizes, Workshop};
use structures::progress::Silent;
use structures::receipt::Receipt;
use structures::replay::replay;
use structures::samples::Samples;
use structures::seat::{OnGuardFail, Seat};
use structures::station::Station;
use structures_graph::session::Plan;
use structures_graph::{OpKind, ValueId};
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
    let into = read.difference(&made).count() as u64;
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
const DECLARED: [&str; 4] = ["add", "mul", "embedding", "rms_norm"];

fn station(host: &Host) -> Arc<Station> {
    Station::open(host.registry.plugin("portable").unwrap(), 1).unwrap()
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

/// Every operation of a kind on the device, and nothing else.
fn all_of(host: &Host, model: &Loaded, kind: OpKind) -> (Plan, Vec<Operation>) {
    let sizes = Sizes {
        tokens: 4,
        positions: 4,
    };
    let (session, plugin) = (model.session(), host.registry.plugin("portable").unwrap());
    let mode = OnGuardFail::Fallback;
    let mut shop = Workshop::new(session, plugin, station(host), sizes, 64, mode);
    let graph = session.graph();
    let ops = graph.op_ids().filter(|op| graph.op(*op).kind == kind);
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
        let (plan, operations) = all_of(&host, &model, kind);
        assert!(!operations.is_empty(), "{kind}");
        let (got, made) = copied(&model, &plan, &station(&host));
        assert!(got == expected, "{kind}");
        assert_eq!(made.values, edges(&plan, &model), "{kind}");
        for operation in &operations {
            let counts = operation.seat.ledger.counts();
            assert_eq!((counts.form_calls, counts.fallbacks), (1, 0), "{kind}");
        }
    }
    // Nobody declared a rope for the device.
    let graph = model.session().graph();
    let mut ropes = graph
        .op_ids()
        .filter(|op| graph.op(*op).kind == OpKind::Rope);
    let sizes = Sizes {
        tokens: 4,
        positions: 4,
    };
    let plugin = host.registry.plugin("portable").unwrap();
    let mode = OnGuardFail::Fallback;
    let mut shop = Workshop::new(model.session(), plugin, station(&host), sizes, 64, mode);
    let refused = shop.bind(ropes.next().unwrap()).err().unwrap();
    assert_eq!(refused.0, "form_unknown");
    assert_eq!(shop.kinds().len(), DECLARED.len());
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
        let (plan, operations) = all_of(&host, &model, kind);
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
