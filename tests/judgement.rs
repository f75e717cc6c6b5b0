//! What a unit is judged by and in which order, and what a refused one leaves behind: the library's doors on the demo
//! model, with plugins that are wrong in one way each.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use structures::attach::{attach, auto_swaps, Attachment, Options, DEFAULT_FLOOR};
use structures::gates::{Floors, OutputKind, Schedule};
use structures::host::{Host, Loaded};
use structures::judge::Judge;
use structures::progress::{Progress, Silent};
use structures::samples::Samples;
use structures::seat::{Admission, CallFailure, Executable, OnGuardFail, Rows, Seat};
use structures::workload::{Runner, Workload};
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_graph::session::{Install, SpanOutcome, SpanRunner};
use structures_tests::demo;
use structures_tests::in_process::{any_speed, host, logits, made_samples, model};

fn samples(n: u32) -> Samples {
    made_samples(n, ROWS as u32)
}

fn options(scheme: &str, structures: &[&str]) -> Options {
    Options {
        structures: structures.iter().map(|s| (*s).to_string()).collect(),
        ..any_speed(scheme)
    }
}

fn with(fault: Fault) -> (tempfile::TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), fault, "fixture");
    let host = host(dir.path());
    (dir, host)
}

const ROWS: usize = 24;

fn attached(host: &Host, model: &Loaded, options: &Options) -> Attachment {
    attach(host, model, &samples(2), options, &Silent).unwrap()
}

const FFN: &[&str] = &["decoder_ffn"];

#[test]
fn b_108_weights_come_from_the_hosts_and_the_checkpoint_is_never_written() {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let files = || -> Vec<(String, String)> {
        let mut all: Vec<(String, String)> = std::fs::read_dir(copy.path())
            .unwrap()
            .map(|e| {
                let path = e.unwrap().path();
                let bytes = std::fs::read(&path).unwrap();
                (
                    path.display().to_string(),
                    structures::digest::sha256_hex(&bytes),
                )
            })
            .collect();
        all.sort();
        all
    };
    let (_dir, host) = with(Fault::None);
    let model = Loaded::open(copy.path()).unwrap();
    let (then, before) = (files(), logits(&model, &model.session().host_plan()));
    let done = attached(&host, &model, &options("w8a16_decode", FFN));
    assert!(!done.seats.is_empty() && done.receipt.memory.packed_bytes > 0);
    let treated = logits(&model, &done.plan);
    assert_ne!(treated, before, "int8 weights are not the host's");
    let receipt = done.detach().map_err(|n| n.error).unwrap();
    assert_eq!(logits(&model, &model.session().host_plan()), before);
    assert_eq!(files(), then, "scheme {}", receipt.scheme.name);
    // Packed again from the same weights they are the same.
    let again = attached(&host, &model, &options("w8a16_decode", FFN));
    assert_eq!(logits(&model, &again.plan), treated);
}

#[test]
fn b_121_no_seam_no_plan() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    // A structure that exists, and of which this model has none.
    let done = attached(&host, &model, &options("none", &["patch_projection"]));
    assert!(done.plan.is_host() && done.seats.is_empty());
    let receipt = &done.receipt;
    assert!(receipt.units.is_empty() && receipt.union.is_none() && receipt.seats.is_empty());
    assert_eq!(receipt.memory.packed_bytes, 0);
    let swaps = auto_swaps(
        &host,
        &model,
        &samples(2),
        &options("none", &["patch_projection"]),
        &Silent,
    );
    assert!(swaps.unwrap().plan.is_host());
}

#[test]
fn b_122_a_bind_that_fails_is_recorded_and_the_next_seam_is_tried() {
    // The first layer gets its own weights, every later one those of another layer.
    let (_dir, host) = with(Fault::Swapped);
    let model = model();
    let swaps = auto_swaps(
        &host,
        &model,
        &samples(2),
        &options("w8a16_decode", FFN),
        &Silent,
    )
    .unwrap();
    let (bound, refused) = (&swaps.seats, &swaps.refused);
    assert_eq!(bound.len(), 1);
    let layers = model.model.config().layers;
    assert_eq!(bound.len() + refused.len(), layers, "{refused:?}");
    for note in refused {
        assert_eq!(
            (note.stage.as_str(), note.code.as_str()),
            ("bind", "bind_parity")
        );
        assert!(
            !note.reason.is_empty() && note.reason.len() < 1000,
            "{note:?}"
        );
        assert_ne!(note.path, bound[0].key);
    }
}

/// Tells what was begun, in order.
#[derive(Default)]
struct Stages(Mutex<Vec<String>>);

impl Progress for Stages {
    fn stage(&self, name: &str, _: usize) {
        self.0.lock().unwrap().push(name.into());
    }
    fn tick(&self) {}
}

#[test]
fn b_185_b_422_the_host_runs_twice_alike_before_anything_is_built() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let stages = Stages::default();
    let done = attach(
        &host,
        &model,
        &samples(2),
        &options("w8a16_decode", FFN),
        &stages,
    )
    .unwrap();
    let stages = stages.0.into_inner().unwrap();
    let first = |what: &str| stages.iter().position(|s| s.starts_with(what));
    let control = first("control").unwrap();
    for later in ["bind ", "judge "] {
        assert!(first(later).unwrap() > control, "{stages:?}");
    }
    let control = &done.receipt.control;
    assert!(control.repeat_identical && control.detach_identical);
    // Logits are there, so they are what is scored.
    assert_eq!(done.receipt.output_kind, "distribution");
    assert!(done.receipt.units[0]
        .metrics
        .get("top1_agreement")
        .is_some());
}

#[test]
fn b_187_one_unit_a_structure() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let three = ["decoder_ffn", "linear_proj", "qkv_pack"];
    let done = attached(&host, &model, &options("w8a16_decode", &three));
    let mut names: Vec<&str> = done.receipt.units.iter().map(|u| u.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, three);
    for unit in &done.receipt.units {
        assert_eq!(
            (unit.seams, unit.outcome.as_str()),
            (unit.paths.len(), "activated")
        );
        let seats = done.receipt.seats.iter();
        let mine = seats.filter(|s| s.structure == unit.structure).count();
        assert_eq!(mine, unit.seams, "{}", unit.name);
    }
    let union = done.receipt.union.as_ref().unwrap();
    assert_eq!(union.seams, done.seats.len());
}

/// Parity, floors, ledger, time: what fails first is what is told, and what comes after it is not done.
#[test]
fn b_188_the_first_gate_that_fails_refuses() {
    let model = model();
    let judged = |fault, floor: &str, min_speedup| {
        let (_dir, host) = with(fault);
        let mut o = options("w8a16_decode", FFN);
        o.floors = Floors::parse([floor]).unwrap();
        o.min_speedup = min_speedup;
        let done = attached(&host, &model, &o);
        let unit = done.receipt.units[0].clone();
        (unit.code.unwrap_or_default(), unit.latency.is_some())
    };
    let (any, none) = ("kl_per_token=1e9", "kl_per_token=0");
    let code = |c: &str, timed| (c.to_string(), timed);
    // Too slow and too far off: the floor is met first, and nothing was timed.
    assert_eq!(judged(Fault::None, none, 1e9), code("floor_not_met", false));
    assert_eq!(judged(Fault::None, any, 1e9), code("no_net_win", true));
    assert_eq!(judged(Fault::None, any, 0.0), code("", true));
}

/// What a bound seat answers.
fn through(
    seat: &Seat,
    inputs: &[Option<(&[f32], &[usize])>],
    outputs: &mut [(Vec<f32>, Vec<usize>)],
) -> Result<(), CallFailure> {
    let tensor = |(data, dims): (&[f32], &[usize])| Tensor::from_slice(data, dims, &Device::Cpu);
    let inputs: Vec<Option<Tensor>> = inputs
        .iter()
        .map(|i| i.map(|i| tensor(i).unwrap()))
        .collect();
    let SpanOutcome::Done(made) = seat.run(&inputs).unwrap() else {
        panic!("the host ran");
    };
    for ((data, _), made) in outputs.iter_mut().zip(made) {
        *data = made.flatten_all().unwrap().to_vec1().unwrap();
    }
    Ok(())
}

/// Says no to every second call, and stays sound; a host would not notice.
struct Declines(Mutex<u64>, Arc<Seat>);

impl Executable for Declines {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        let mut calls = self.0.lock().unwrap();
        *calls += 1;
        if calls.is_multiple_of(2) {
            return Err(CallFailure {
                code: "planted_no".into(),
                message: "planted in every second call".into(),
                declined: true,
            });
        }
        through(&self.1, inputs, outputs)
    }
}

/// Falling back is exact, so parity sees nothing: the ledger refuses the unit.
#[test]
fn b_189_b_428_calls_that_fell_back_refuse_the_unit_although_parity_passes() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let bound = host
        .get("decoder_ffn")
        .unwrap()
        .bind(
            &model,
            "model.layers.0.mlp",
            &samples(2),
            &options("none", FFN),
            DEFAULT_FLOOR,
            &Silent,
        )
        .unwrap();
    let session = model.session();
    let graph = session.graph();
    let dims = |v: &structures_graph::ValueId| graph.values[v.0].dims.clone();
    let (given, made): (Vec<_>, Vec<_>) = (
        bound
            .install
            .inputs
            .iter()
            .map(|v| v.as_ref().map(dims))
            .collect(),
        bound.install.outputs.iter().map(dims).collect(),
    );
    let width = bound.dims["D"] as usize;
    let seat = |rows: usize, declines: bool| {
        let inner = bound.seat.clone();
        let form: Box<dyn Executable> = match declines {
            true => Box::new(Declines(Mutex::default(), inner)),
            false => Box::new(Whole(inner)),
        };
        let admission = Admission {
            width,
            rows: Rows::Capacity(rows),
            band: None,
            concurrent: false,
            strided: false,
        };
        let (key, mode) = (bound.seat.key.clone(), OnGuardFail::Fallback);
        Seat::new(key, form, admission, mode, given.clone(), made.clone())
    };
    let judged_samples: Vec<Vec<u32>> = samples(2).all().map(<[u32]>::to_vec).collect();
    let runner = || Runner::new(session, ROWS);
    let reference = judged_samples
        .iter()
        .map(|s| {
            let one = std::slice::from_ref(s);
            let plan = session.host_plan();
            runner()
                .score(&plan, one, Workload::Prefill, false, None, || {})
                .unwrap()
        })
        .collect();
    let judge = Judge {
        runner: runner(),
        host: session.host_plan(),
        base: Vec::new(),
        samples: &judged_samples,
        reference,
        workload: Workload::Prefill,
        all_positions: false,
        kind: OutputKind::Distribution,
        floors: Floors::parse(["top1_agreement=0.9"]).unwrap(),
        min_speedup: 0.0,
        schedule: Schedule::new(1, 1).unwrap(),
        judged_on: "held-out samples".into(),
        captured: false,
        progress: &Silent,
    };
    let judged = |seat: Arc<Seat>| {
        let install = Install {
            runner: seat.clone(),
            ..bound.install.clone()
        };
        judge.judge(vec![install], &[seat], &[]).unwrap()
    };
    for (what, seat) in [
        // It says no itself, within its contract.
        ("rt_declined", seat(ROWS, true)),
        // Bound for fewer rows than the workload has: every call is the host's, and parity is perfect.
        ("rt_row_capacity", seat(ROWS - 1, false)),
    ] {
        let unit = judged(seat);
        assert_eq!(unit.outcome, "refused", "{what}");
        assert_eq!(unit.code.as_deref(), Some("fell_back"), "{:?}", unit.reason);
        let reason = unit.reason.unwrap();
        assert!(
            reason.contains("fell back") && reason.contains(what),
            "{reason}"
        );
        assert!(unit.metrics.get("top1_agreement").unwrap() >= 0.9);
        assert_eq!(unit.band, "pass");
        assert!(unit.latency.is_none(), "nothing is claimed of its speed");
        assert!(unit.ledger.fallbacks > 0 && !unit.ledger.clean);
    }
    let unit = judged(seat(ROWS, false));
    assert_eq!(unit.outcome, "activated", "{:?}", unit.reason);
    assert!(unit.ledger.form_calls > 0 && unit.ledger.fallbacks == 0 && unit.latency.is_some());
}

/// The bound form, as it is.
struct Whole(Arc<Seat>);

impl Executable for Whole {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        through(&self.0, inputs, outputs)
    }
}

#[test]
fn b_191_a_form_that_fails_while_judged_is_refused_with_its_reason_and_off() {
    let model = model();
    let before = logits(&model, &model.session().host_plan());
    for fault in [Fault::ErrorNinthCall, Fault::PanicNinthCall] {
        let (_dir, host) = with(fault);
        let samples = samples(8);
        let done = attach(
            &host,
            &model,
            &samples,
            &options("w8a16_decode", FFN),
            &Silent,
        )
        .unwrap();
        let unit = &done.receipt.units[0];
        assert_eq!(unit.code.as_deref(), Some("runtime_form"), "{fault:?}");
        let reason = unit.reason.as_deref().unwrap();
        assert!(reason.contains("planted"), "{reason}");
        assert!(done.seats.is_empty() && done.plan.is_host());
        assert_eq!(logits(&model, &done.plan), before);
    }
}

#[test]
fn b_421_memory_is_what_the_seats_add() {
    let (_dir, host) = with(Fault::None);
    let model = model();
    let held = |structures: &[&str]| {
        let done = attached(&host, &model, &options("w8a16_decode", structures));
        assert!(!done.seats.is_empty());
        done.receipt.memory.packed_bytes
    };
    let (ffn, pack) = (held(FFN), held(&["qkv_pack"]));
    assert!(ffn > 0 && pack > 0);
    assert_eq!(held(&["decoder_ffn", "qkv_pack"]), ffn + pack);
    // An increment, not a peak: what the host holds anyway is in no figure.
    let config = model.model.config();
    let weights: u64 = 3 * 512 * 768 * config.layers as u64;
    assert!(
        ffn < 2 * weights,
        "{ffn} bytes for {weights} weights in int8"
    );
}

#[test]
fn b_460_a_refusal_in_the_record_has_form_rows_sizes_and_edge() {
    let (_dir, host) = with(Fault::FewRows);
    let model = model();
    // Whole prompts are more rows than a form for few rows serves.
    let done = attached(&host, &model, &options("none", &["qkv_pack"]));
    let beyond = done.receipt.refused.iter().find(|r| r.code == "form_band");
    let beyond = beyond.unwrap_or_else(|| panic!("{:?}", done.receipt.refused));
    assert_eq!(
        (beyond.stage.as_str(), beyond.plugin.as_deref()),
        ("choose", Some("fixture"))
    );
    let form = beyond.form.clone().unwrap();
    for fact in [
        form.as_str(),
        "24",
        " 512",
        "serves 1..=8",
        "other forms have bands of their own",
    ] {
        assert!(beyond.reason.contains(fact), "{fact}: {}", beyond.reason);
    }
    assert!(done.receipt.refused.iter().all(|r| r.code == "form_band"));
}
