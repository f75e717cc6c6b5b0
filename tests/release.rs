//! Letting go of the host's own weights: what goes, what comes back and how exactly, and the way without a way back.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::Path;

use structures::attach::{attach, auto_swaps, Options, Swaps};
use structures::decode::{decode_loop, DecodeLoop};
use structures::error::Error;
use structures::host::Loaded;
use structures::progress::Silent;
use structures::release::{consume, finalise, note, restore};
use structures::sampling::Choose;
use structures::seat::{Admission, CallFailure, Executable, OnGuardFail, Rows, Seat};
use structures::workspace::Workspace;
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_graph::session::{Install, Plan};
use structures_graph::{Dim, OpKind};
use structures_tests::in_process::{
    any_speed, host, logits, made_samples, model, resident, try_logits, Idle,
};
use structures_tests::{demo, json, plugins, structures};

const PROMPT: [u32; 6] = [72, 101, 108, 108, 111, 32];

fn swaps(model: &Loaded, fault: Fault, release_host: bool) -> Swaps {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), fault, "fixture");
    let options = Options {
        release_host,
        ..any_speed("none")
    };
    let samples = made_samples(3, 24);
    let swaps = auto_swaps(&host(dir.path()), model, &samples, &options, &Silent).unwrap();
    assert!(!swaps.seats.is_empty());
    swaps
}

fn tokens(l: &mut DecodeLoop<'_>, n: usize) -> Result<Vec<u32>, Error> {
    let on = &mut |_| ControlFlow::Continue(());
    Ok(l.generate_past_ends(&PROMPT, n, Choose::Greedy, on)?.tokens)
}

/// The demo model in a directory of its own, which may be spoilt.
fn copied() -> (tempfile::TempDir, Loaded) {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(demo()).unwrap() {
        let from = file.unwrap().path();
        std::fs::copy(&from, dir.path().join(from.file_name().unwrap())).unwrap();
    }
    let loaded = Loaded::open(dir.path()).unwrap();
    (dir, loaded)
}

/// Every weight is another one.
fn spoil(dir: &Path) {
    let file = dir.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let mut file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
    file.seek(SeekFrom::Start(header)).unwrap();
    let zeros = vec![0_u8; bytes.len() - header as usize];
    file.write_all(&zeros).unwrap();
}

/// Seats that fail in the ninth call, and whose host is gone by then.
#[test]
fn b_375_b_376_b_378_b_379_what_is_let_go_comes_back_exactly_and_is_counted() {
    let model = model();
    let plain = model.session().host_plan();
    let before = logits(&model, &plain);
    let want = tokens(&mut decode_loop(&model, 128).unwrap(), 120).unwrap();
    let Swaps {
        plan,
        seats,
        released,
        ..
    } = swaps(&model, Fault::ErrorNinthCall, true);
    let released = released.unwrap();
    assert!(released.released.params > 0 && released.restored.is_empty());
    assert_eq!((released.in_memory.params, released.serving_seats), (0, 0));
    // Only what the seats read, and each once.
    let gone: Vec<_> = model.session().stored();
    let gone: Vec<_> = gone.iter().filter(|s| !model.session().holds(s)).collect();
    assert_eq!(gone.len(), released.released.params);
    let seats_own = |path: &str| seats.iter().any(|s| path.starts_with(&s.key));
    assert!(gone.iter().all(|s| seats_own(&s.param.path)), "{gone:?}");
    // Doing it again changes nothing.
    assert_eq!(consume(&model, &plan).unwrap(), released);

    let mut l = DecodeLoop::new(&model, plan, 128).unwrap();
    assert_eq!(tokens(&mut l, 120).unwrap(), want);
    assert!(l.recovered() > 0);
    let after = note(&model, l.plan());
    assert_eq!(after.restored.len(), gone.len(), "{after:?}");
    assert_eq!(after.released.params, 0);
    drop(l);
    assert_eq!(logits(&model, &plain), before, "detached");
}

#[test]
fn b_378_detaching_brings_the_host_back_bit_for_bit() {
    let model = model();
    let plain = model.session().host_plan();
    let before = logits(&model, &plain);
    for _ in 0..3 {
        let swaps = swaps(&model, Fault::None, true);
        let released = swaps.released.unwrap().released;
        assert_ne!(logits(&model, &swaps.plan), [0u32; 0]);
        drop((swaps.plan, swaps.seats));
        assert_eq!(restore(&model).unwrap(), released.params);
        assert_eq!(logits(&model, &plain), before);
    }
}

#[test]
fn b_375_b_378_what_the_files_do_not_give_back_stays_in_memory() {
    let (dir, model) = copied();
    let plain = model.session().host_plan();
    let before = logits(&model, &plain);
    spoil(dir.path());
    let kept = swaps(&model, Fault::None, true).released.unwrap();
    assert_eq!(kept.released.params, 0);
    assert!(kept.in_memory.params > 0 && kept.in_memory.bytes > 0);
    assert_eq!(logits(&model, &plain), before);
    // The file may be gone altogether.
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert_eq!(swaps(&model, Fault::None, true).released.unwrap(), kept);
}

#[test]
fn b_376_a_file_that_changed_since_ends_the_run_and_gives_no_other_numbers() {
    let (dir, model) = copied();
    let swaps = swaps(&model, Fault::None, true);
    assert!(swaps.released.unwrap().released.params > 0);
    spoil(dir.path());
    let error = try_logits(&model, &model.session().host_plan()).unwrap_err();
    assert!(
        error.to_string().contains("does not hold it any more"),
        "{error}"
    );
    // The seats do without.
    try_logits(&model, &swaps.plan).unwrap();
}

#[test]
fn b_377_for_good_there_is_no_way_back_and_no_fallback() {
    let model = model();
    let Swaps { plan, seats, .. } = swaps(&model, Fault::ErrorNinthCall, false);
    let gone = finalise(&model, &plan).unwrap();
    assert!(
        gone.for_good && gone.released.params > 0,
        "it consumes first"
    );
    assert_eq!(restore(&model).unwrap_err().code(), "released_for_good");
    let error = try_logits(&model, &model.session().host_plan()).unwrap_err();
    assert_eq!(Error::from(error).code(), "released_for_good");
    seats.iter().for_each(|s| s.ledger.reset());
    let mut l = DecodeLoop::new(&model, plan, 128).unwrap();
    let error = tokens(&mut l, 120).unwrap_err();
    assert_eq!(error.code(), "strict_fallback");
    assert!(error.to_string().contains("rt_no_host_path"), "{error}");
    let refused: u64 = seats.iter().map(|s| s.ledger.counts().refused).sum();
    let fell: u64 = seats.iter().map(|s| s.ledger.counts().fallbacks).sum();
    assert_eq!((refused, fell), (1, 0));
}

#[test]
fn b_377_what_is_attached_for_good_cannot_be_detached() {
    let model = model();
    let dir = plugins(&["portable"]);
    let host = host(dir.path());
    let mut options = any_speed("fp8_static");
    options.structures = vec!["decoder_ffn".into()];
    options.release_host = true;
    let samples = made_samples(4, 12);
    let mut a = attach(&host, &model, &samples, &options, &Silent).unwrap();
    assert!(!a.seats.is_empty(), "{:#?}", a.receipt.units);
    let note = a.receipt.memory.released.clone().unwrap();
    assert!(note.released.params > 0 && !note.for_good, "{note:?}");
    let text = serde_json::to_value(&a.receipt).unwrap();
    assert_eq!(
        text["memory"]["released"]["released"]["params"],
        note.released.params
    );
    assert!(a.finalise(&model).unwrap().for_good);
    let no = a.detach().err().unwrap();
    assert_eq!(no.error.code(), "released_for_good");
    assert!(!no.attachment.seats.is_empty());
}

/// A seat at the first down projection, for rows in a band.
fn at_down(model: &Loaded, band: (usize, usize), form: Box<dyn Executable>) -> Plan {
    let g = model.session().graph();
    let down = |o: &structures_graph::OpId| {
        g.op(*o).kind == OpKind::Linear && g.op(*o).module.ends_with("down_proj")
    };
    let op = g.op_ids().find(down).unwrap();
    let o = g.op(op);
    let x = o.inputs[0].unwrap();
    let dims = g.value(x).dims.clone();
    let width = match dims.last() {
        Some(Dim::Size(n)) => *n,
        other => panic!("{other:?}"),
    };
    let seat = Seat::new(
        "down".into(),
        form,
        Admission {
            width,
            rows: Rows::Capacity(4096),
            band: Some(band),
            concurrent: true,
            strided: false,
        },
        OnGuardFail::Fallback,
        vec![Some(dims)],
        vec![g.value(o.outputs[0]).dims.clone()],
    );
    let install = Install {
        name: "down".into(),
        ops: vec![op],
        inputs: vec![Some(x)],
        outputs: o.outputs.clone(),
        runner: seat,
    };
    model.session().plan(vec![install]).unwrap()
}

#[test]
fn b_375_a_place_the_host_serves_too_is_kept_whole_and_counted() {
    let model = model();
    let of = |band| at_down(&model, band, Box::new(Idle));
    let kept = consume(&model, &of((1, 4))).unwrap();
    assert_eq!((kept.released.params, kept.serving_seats), (0, 1));
    assert!(kept.serving.params == 1 && kept.serving.bytes > 0);
    let gone = consume(&model, &of((1, 4096))).unwrap();
    assert_eq!((gone.released, gone.serving_seats), (kept.serving, 0));
}

struct Declines;

impl Executable for Declines {
    fn call(
        &self,
        _: &[Option<(&[f32], &[usize])>],
        _: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        Err(CallFailure {
            code: "not_today".into(),
            message: "it declines".into(),
            declined: true,
        })
    }
}

/// A weight that nobody read before it was let go is checked and counted like any other when a fallback reads it.
#[test]
fn b_376_what_was_not_read_yet_comes_back_checked_and_counted() {
    let whole = model();
    let want = logits(&whole, &whole.session().host_plan());
    for spoilt in [false, true] {
        let (dir, _) = copied();
        let model = Loaded::open_later(dir.path()).unwrap();
        let plan = at_down(&model, (1, 4096), Box::new(Declines));
        let unread = |model: &Loaded| {
            let session = model.session();
            let all = session.stored();
            all.iter().filter(|s| session.unread(s)).count()
        };
        let all = unread(&model);
        assert_eq!(all, model.session().stored().len());
        assert_eq!(
            note(&model, &plan).released.params,
            0,
            "not read is not released"
        );
        assert_eq!(consume(&model, &plan).unwrap().released.params, 1);
        assert_eq!(unread(&model), all - 1);
        if spoilt {
            // What the host reads by itself is read before.
            let session = model.session();
            for stored in session.stored().iter().filter(|s| session.unread(s)) {
                session.value_tensor(stored.values[0]).unwrap();
            }
            spoil(dir.path());
            let error = try_logits(&model, &plan).unwrap_err().to_string();
            assert!(error.contains("does not hold it any more"), "{error}");
            continue;
        }
        assert_eq!(logits(&model, &plan), want);
        let after = note(&model, &plan);
        assert_eq!((after.restored.len(), after.released.params), (1, 0));
    }
}

#[test]
fn b_375_memory_really_falls() {
    let model = model();
    let swaps = swaps(&model, Fault::None, false);
    structures_loader_trim();
    let before = resident();
    let released = consume(&model, &swaps.plan).unwrap().released;
    let fell = before.saturating_sub(resident());
    println!(
        "{} KB released, {} KB less resident",
        released.bytes >> 10,
        fell >> 10
    );
    assert!(fell > released.bytes / 2, "{fell} of {}", released.bytes);
}

/// What earlier work left free is not counted.
fn structures_loader_trim() {
    let model = model();
    consume(&model, &model.session().host_plan()).unwrap();
}

#[test]
fn b_372_a_loop_s_state_is_its_own_and_counted_while_it_lives() {
    let model = model();
    let held = || -> u64 {
        let report = Workspace::global().report();
        report.exclusive_by_tag.values().sum()
    };
    let l = decode_loop(&model, 64).unwrap();
    // Other tests of this process may hold loops as well.
    assert!(held() >= l.bytes() as u64);
    let report = Workspace::global().report();
    let tags = &report.exclusive_by_tag;
    assert!(tags.contains_key("state") && tags.contains_key("step"));
    assert!(report.held_bytes >= l.bytes() as u64);
}

#[test]
fn b_376_generate_lets_go_and_writes_the_same_text() {
    let dir = plugins(&["portable"]);
    let run = |more: &[&str]| {
        let mut command = structures(dir.path());
        command.args([
            "generate",
            "demo",
            "--prompt",
            "The river ",
            "--max-new-tokens",
            "12",
        ]);
        json(command.args(more))
    };
    let pinned = ["--scheme", "fp8_static", "--pin", "decoder_ffn=portable"];
    let (code, kept, log) = run(&pinned);
    assert_eq!(code, 0, "{kept}\n{log}");
    let (_, gone, _) = run(&[&pinned[..], &["--release-host"]].concat());
    assert_eq!(kept["tokens"], gone["tokens"]);
    assert!(kept.get("released").is_none());
    assert!(
        gone["released"]["released"]["bytes"].as_u64().unwrap() > 0,
        "{gone}"
    );
    assert!(
        gone["workspace"]["held_bytes"].as_u64().unwrap() > 0,
        "{gone}"
    );
    assert_eq!(run(&["--release-host"]).0, 2);

    // From a receipt, where weights are read when they are first used.
    let receipts = tempfile::tempdir().unwrap();
    let (code, attached, log) = json(
        structures(dir.path())
            .args(["attach", "demo", "--structures", "decoder_ffn"])
            .args(pinned)
            .args(["--min-speedup", "0.001", "--rounds", "3", "--receipt-dir"])
            .arg(receipts.path()),
    );
    assert_eq!(code, 0, "{attached}\n{log}");
    let receipt = std::fs::read_dir(receipts.path()).unwrap().next().unwrap();
    let receipt = receipt.unwrap().path();
    let receipt = ["--receipt", receipt.to_str().unwrap()];
    let (code, kept, log) = run(&receipt);
    assert_eq!(code, 0, "{kept}\n{log}");
    let (code, gone, log) = run(&[&receipt[..], &["--release-host"]].concat());
    assert_eq!(code, 0, "{gone}\n{log}");
    assert_eq!(kept["tokens"], gone["tokens"]);
    let params = |d: &serde_json::Value| d["released"]["released"]["params"].as_u64();
    assert!(params(&gone).unwrap() > 0, "{gone}");
    assert!(gone["released"].get("restored").is_none(), "{gone}");
}
