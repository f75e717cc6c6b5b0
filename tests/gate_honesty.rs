//! Gate honesty from outside: planted faults in plugins, receipts, samples and decisions, through the program. Each is
//! refused or named with its code; the healthy controls beside them pass. Faults a form shows when it is bound are in
//! `host/core/tests/faults_at_bind.rs`.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::{Path, PathBuf};

use serde_json::{json, Value as Json};
use structures::digest;
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_tests::{json as run, structures, QUICK};

/// Any speed is a win: what is looked for is something else.
const ANY_SPEED: [&str; 2] = ["--min-speedup", "0"];

struct Attached {
    exit: i32,
    receipt: Json,
    log: String,
    dir: tempfile::TempDir,
}

impl Attached {
    fn file(&self) -> PathBuf {
        let mut files = std::fs::read_dir(self.dir.path()).unwrap();
        files.next().unwrap().unwrap().path()
    }

    /// The one unit of a structure.
    #[track_caller]
    fn unit(&self, structure: &str) -> &Json {
        let units = self.receipt["units"].as_array().unwrap();
        let mine: Vec<&Json> = units
            .iter()
            .filter(|u| u["structure"] == structure)
            .collect();
        assert_eq!(mine.len(), 1, "{mine:?}\n{}", self.log);
        mine[0]
    }

    #[track_caller]
    fn refused(&self, structure: &str, code: &str) {
        let unit = self.unit(structure);
        assert_eq!(unit["outcome"], "refused", "{unit:#}");
        assert_eq!(unit["code"], code, "{}", unit["reason"]);
        assert_eq!(self.receipt["seams_active"], json!([]), "nothing lives");
        assert_eq!(self.exit, 3, "{}", self.log);
    }
}

fn attach(plugins: &Path, structures_of: &str, more: &[&str]) -> Attached {
    let dir = tempfile::tempdir().unwrap();
    let (exit, receipt, log) = run(structures(plugins)
        .args(["attach", "demo", "--scheme", "w8a16_decode"])
        .args(["--structures", structures_of, "--receipt-dir"])
        .arg(dir.path())
        .args(if more.contains(&"--rounds") {
            &[][..]
        } else {
            &QUICK[..]
        })
        .args(more));
    Attached {
        exit,
        receipt,
        log,
        dir,
    }
}

fn with(fault: Fault) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), fault, "fixture");
    dir
}

#[track_caller]
fn refused(fault: Fault, code: &str, more: &[&str]) {
    let plugins = with(fault);
    attach(plugins.path(), "decoder_ffn", more).refused("decoder_ffn", code);
}

#[test]
fn healthy_form_is_activated() {
    let plugins = with(Fault::None);
    let done = attach(plugins.path(), "decoder_ffn", &ANY_SPEED);
    assert_eq!(done.exit, 0, "{}", done.log);
    assert_eq!(done.unit("decoder_ffn")["outcome"], "activated");
    assert_eq!(done.receipt["ledger"]["clean"], true);
}

#[test]
fn healthy_union_of_three_structures() {
    let plugins = with(Fault::None);
    let three = "decoder_ffn,linear_proj,qkv_pack";
    let done = attach(plugins.path(), three, &ANY_SPEED);
    assert_eq!(
        done.receipt["union"]["outcome"], "activated",
        "{}",
        done.log
    );
}

#[test]
fn fault_error_in_a_later_call() {
    refused(Fault::ErrorNinthCall, "runtime_form", &ANY_SPEED);
}

#[test]
fn fault_panic_in_a_later_call() {
    refused(Fault::PanicNinthCall, "runtime_form", &ANY_SPEED);
}

#[test]
fn fault_error_while_it_is_timed() {
    let long = ["--min-speedup", "0", "--rounds", "7", "--iters", "10"];
    refused(Fault::ErrorLate, "runtime_form", &long);
}

#[test]
fn fault_slow_form() {
    refused(Fault::Slow, "no_net_win", &[]);
}

#[test]
fn fault_fast_only_on_zeros() {
    refused(Fault::FastOnZeros, "no_net_win", &[]);
}

#[test]
fn fault_nan_in_a_late_call() {
    refused(Fault::NonFiniteLate, "non_finite", &ANY_SPEED);
}

#[test]
fn fault_says_no_in_the_middle_of_a_run() {
    refused(Fault::DeclinesOdd, "runtime_form", &ANY_SPEED);
}

#[test]
fn fault_says_no_under_strict() {
    let strict = ["--min-speedup", "0", "--strict"];
    refused(Fault::DeclinesOdd, "runtime_form", &strict);
}

#[test]
fn fault_drifts_with_every_call() {
    refused(Fault::Drifts, "not_repeatable", &ANY_SPEED);
}

#[test]
fn fault_writes_its_input() {
    refused(Fault::WritesInput, "bind_writes", &ANY_SPEED);
}

#[test]
fn fault_layer_with_the_weights_of_another() {
    refused(Fault::Swapped, "bind_parity", &ANY_SPEED);
}

#[test]
fn fault_missed_floor() {
    let floor = ["--min-speedup", "0", "--floor", "kl_per_token=0"];
    refused(Fault::None, "floor_not_met", &floor);
}

#[test]
fn fault_wins_alone_and_loses_together() {
    let plugins = with(Fault::SlowTogether);
    let both = ["--min-speedup", "0.04"];
    let done = attach(plugins.path(), "decoder_ffn,qkv_pack", &both);
    assert_eq!(
        done.receipt["union"]["code"], "union_failed",
        "{}",
        done.log
    );
    let reason = done.receipt["union"]["reason"].as_str().unwrap();
    assert!(reason.contains("no_net_win"), "{reason}");
    for structure in ["decoder_ffn", "qkv_pack"] {
        done.refused(structure, "union_failed");
    }
}

#[test]
fn fault_quantised_form_under_no_scheme() {
    let plugins = with(Fault::None);
    let dir = tempfile::tempdir().unwrap();
    let (exit, receipt, log) = run(structures(plugins.path())
        .args(["attach", "demo", "--scheme", "none", "--receipt-dir"])
        .arg(dir.path())
        .args(["--structures", "decoder_ffn"])
        .args(["--pin", "decoder_ffn=fixture:int8"])
        .args(QUICK));
    assert_eq!(exit, 0, "{log}");
    assert_eq!(receipt["seams_active"], json!([]));
    let kept = receipt["kept_host"].as_array().unwrap();
    let ffn = kept.iter().find(|k| k["structure"] == "decoder_ffn");
    let refused = receipt["refused"].as_array().unwrap();
    let why = ffn.or(refused.iter().find(|k| k["structure"] == "decoder_ffn"));
    assert!(why.is_some(), "{receipt:#}");
}

// Receipts.

/// A good receipt and the plugin it was written with.
fn good() -> (tempfile::TempDir, Attached) {
    let plugins = with(Fault::None);
    let done = attach(plugins.path(), "decoder_ffn", &ANY_SPEED);
    assert_eq!(done.exit, 0, "{}", done.log);
    (plugins, done)
}

fn generate(plugins: &Path, receipt: &Path) -> (i32, Json, String) {
    run(structures(plugins)
        .args([
            "generate",
            "demo",
            "--prompt",
            "Once upon",
            "--max-new-tokens",
            "4",
        ])
        .arg("--receipt")
        .arg(receipt))
}

/// Changes the record; `seal` puts a digest on it that fits.
fn edit(path: &Path, seal: bool, change: impl FnOnce(&mut Json)) {
    let mut record: Json = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    change(&mut record);
    if seal {
        digest::seal(&mut record).unwrap();
    }
    std::fs::write(path, record.to_string()).unwrap();
}

#[track_caller]
fn replay_refused(plugins: &Path, receipt: &Path, code: &str) -> String {
    let (exit, answer, log) = generate(plugins, receipt);
    assert_eq!(exit, 3, "{answer:#}\n{log}");
    assert_eq!(answer["error"]["code"], code, "{answer:#}");
    answer["error"]["message"].as_str().unwrap().to_string()
}

#[test]
fn healthy_receipt_replays_and_verifies() {
    let (plugins, done) = good();
    let (exit, text, log) = generate(plugins.path(), &done.file());
    assert_eq!(exit, 0, "{log}");
    assert_eq!(text["ledger"]["clean"], true, "{text:#}");
    let (exit, answer, _) = run(structures(plugins.path())
        .args(["receipts", "verify", "--strict"])
        .arg(done.file()));
    assert_eq!(exit, 0, "{answer:#}");
    assert_eq!(answer["receipts"][0]["digest_ok"], true);
    assert_eq!(answer["receipts"][0]["drift"], json!([]));
}

#[test]
fn fault_receipt_edited_by_hand() {
    let (plugins, done) = good();
    edit(&done.file(), false, |r| {
        r["union"]["metrics"]["top1_agreement"] = json!(1.0001);
    });
    replay_refused(plugins.path(), &done.file(), "record_tampered");
    let (exit, answer, _) = run(structures(plugins.path())
        .args(["receipts", "verify"])
        .arg(done.file()));
    assert_eq!(
        (exit, &answer["receipts"][0]["digest_ok"]),
        (3, &json!(false))
    );
    assert_eq!(answer["receipts"][0]["code"], "record_tampered");
}

#[test]
fn fault_receipt_without_its_digest() {
    let (plugins, done) = good();
    edit(&done.file(), false, |r| {
        r.as_object_mut().unwrap().remove("digest");
    });
    let (exit, answer, _) = run(structures(plugins.path())
        .args(["receipts", "verify"])
        .arg(done.file()));
    assert_eq!(exit, 3);
    assert_eq!(answer["receipts"][0]["code"], "record_tampered");
    let (exit, _, _) = generate(plugins.path(), &done.file());
    assert_ne!(exit, 0);
}

#[test]
fn fault_receipt_edited_and_sealed_again() {
    let (plugins, done) = good();
    edit(&done.file(), true, |r| {
        r["seats"][0]["dims"]["F"] = json!(1024)
    });
    let why = replay_refused(plugins.path(), &done.file(), "receipt_mismatch");
    assert!(why.contains("dims"), "{why}");
}

#[test]
fn fault_seat_moved_to_another_layer() {
    let (plugins, done) = good();
    edit(&done.file(), true, |r| {
        r["seats"][0]["key"] = json!("model.layers.99.mlp");
    });
    replay_refused(plugins.path(), &done.file(), "receipt_mismatch");
}

#[test]
fn fault_receipt_of_another_checkpoint() {
    let (plugins, done) = good();
    edit(&done.file(), true, |r| {
        r["checkpoint"]["sha256"] = json!("0".repeat(64));
    });
    let why = replay_refused(plugins.path(), &done.file(), "receipt_mismatch");
    assert!(why.contains("checkpoint"), "{why}");
}

#[test]
fn fault_structure_changed_after_its_receipt() {
    let (plugins, done) = good();
    edit(&done.file(), true, |r| {
        let digests = r["spec_digests"].as_object_mut().unwrap();
        let key = digests.keys().find(|k| k.starts_with("decoder_ffn@"));
        let key = key.unwrap().clone();
        digests[&key] = json!("0".repeat(64));
    });
    replay_refused(plugins.path(), &done.file(), "receipt_mismatch");
    let (_, answer, _) = run(structures(plugins.path())
        .args(["receipts", "verify"])
        .arg(done.file()));
    let drift = answer["receipts"][0]["drift"].as_array().unwrap();
    let what = drift[0]["what"].as_str().unwrap();
    assert!(what.starts_with("structures.decoder_ffn@"), "{drift:?}");
}

#[test]
fn fault_plugin_replaced_after_its_receipt() {
    let (plugins, done) = good();
    // The same id and version, other bytes.
    std::fs::remove_file(plugins.path().join("fixture.so")).unwrap();
    fixture_copy(plugins.path(), Fault::Chatty, "fixture");
    let why = replay_refused(plugins.path(), &done.file(), "receipt_mismatch");
    assert!(why.contains("sha256"), "{why}");
    let (exit, answer, _) = run(structures(plugins.path())
        .args(["receipts", "verify", "--strict"])
        .arg(done.file()));
    assert_eq!(exit, 3);
    assert_eq!(answer["receipts"][0]["code"], "env_drift");
    assert_eq!(answer["receipts"][0]["drift"][0]["what"], "plugins.fixture");
}

#[test]
fn fault_plugin_gone_after_its_receipt() {
    let (_plugins, done) = good();
    let empty = tempfile::tempdir().unwrap();
    let why = replay_refused(empty.path(), &done.file(), "receipt_mismatch");
    assert!(why.contains("fixture"), "{why}");
}

#[test]
fn fault_receipt_of_another_environment() {
    let (plugins, done) = good();
    edit(&done.file(), true, |r| {
        r["environment"]["packages"]["candle-core"] = json!("0.0.1");
    });
    let (exit, answer, _) = run(structures(plugins.path())
        .args(["receipts", "verify"])
        .arg(done.file()));
    assert_eq!(exit, 0, "a record made elsewhere still holds");
    let drift = &answer["receipts"][0]["drift"];
    assert_eq!(drift[0]["what"], "environment.packages.candle-core");
    assert_eq!(drift[0]["recorded"], "0.0.1");
}

// Samples.

fn samples(dir: &Path, of: &[&str]) -> PathBuf {
    let file = dir.join("samples.jsonl");
    let lines: Vec<String> = of
        .iter()
        .map(|t| json!({ "text": t }).to_string())
        .collect();
    std::fs::write(&file, lines.join("\n")).unwrap();
    file
}

const TEXTS: [&str; 4] = [
    "The old man sat by the window and looked at the rain for a long time, saying nothing at all.",
    "A ship came into the harbour in the evening, and nobody knew where it had been all those years.",
    "She opened the letter, read it twice, folded it again, and put it back among the others.",
    "In the morning the snow had gone, and the road to the village lay dark and wet before them.",
];

fn calibrated(plugins: &Path, file: &Path) -> (i32, Json, String) {
    let dir = tempfile::tempdir().unwrap();
    run(structures(plugins)
        .args([
            "attach",
            "demo",
            "--scheme",
            "fp8_static",
            "--min-speedup",
            "0",
        ])
        .args(["--structures", "decoder_ffn", "--samples"])
        .arg(file)
        .arg("--receipt-dir")
        .arg(dir.path())
        .args(QUICK))
}

#[test]
fn healthy_held_out_samples_are_no_fit_residual() {
    let plugins = structures_tests::plugins(&["portable"]);
    let dir = tempfile::tempdir().unwrap();
    let (_, receipt, log) = calibrated(plugins.path(), &samples(dir.path(), &TEXTS));
    let c = &receipt["calibration"];
    assert_eq!(
        (&c["samples"], &c["held_out"]),
        (&json!(3), &json!(1)),
        "{log}"
    );
    assert_eq!(c["fit_residual"], false);
}

#[test]
fn fault_samples_equal_to_the_fit_set() {
    let plugins = structures_tests::plugins(&["portable"]);
    let dir = tempfile::tempdir().unwrap();
    let same = [TEXTS[0], TEXTS[1], TEXTS[2], TEXTS[1]];
    let (_, receipt, log) = calibrated(plugins.path(), &samples(dir.path(), &same));
    let c = &receipt["calibration"];
    assert_eq!(
        (&c["held_out"], &c["fit_residual"]),
        (&json!(0), &json!(true)),
        "{log}"
    );
    let unit = &receipt["units"][0];
    let judged_on = unit["band_note"]["judged_on"].as_str().unwrap();
    assert!(judged_on.contains("fit residual"), "{judged_on}");
}

// Decisions.

fn decide(plugins: &Path, file: &Path, args: &[&str]) -> (i32, Json, String) {
    run(structures(plugins)
        .args(["decisions", "record", "--structures", "decoder_ffn"])
        .args(args)
        .arg("--decisions")
        .arg(file))
}

fn attach_decided(plugins: &Path, file: &Path) -> Attached {
    let file = file.to_str().unwrap();
    let args = ["--min-speedup", "0", "--decisions", file];
    attach(plugins, "decoder_ffn", &args)
}

#[test]
fn healthy_decision_is_tried_first_and_gated() {
    let plugins = tempfile::tempdir().unwrap();
    fixture_copy(plugins.path(), Fault::None, "alpha");
    fixture_copy(plugins.path(), Fault::None, "zeta");
    let file = plugins.path().join("decisions.json");
    let (exit, _, log) = decide(plugins.path(), &file, &["--winner", "zeta:int8"]);
    assert_eq!(exit, 0, "{log}");
    let done = attach_decided(plugins.path(), &file);
    assert_eq!(done.unit("decoder_ffn")["plugin"], "zeta");
    let by = &done.receipt["decisions"][0];
    assert_eq!(
        (&by["winner"], &by["source"]),
        (&json!("zeta:int8"), &json!("cache"))
    );
}

#[test]
fn fault_decision_for_a_form_that_is_gone() {
    let plugins = tempfile::tempdir().unwrap();
    fixture_copy(plugins.path(), Fault::None, "alpha");
    let gone = fixture_copy(plugins.path(), Fault::None, "zeta");
    let file = plugins.path().join("decisions.json");
    assert_eq!(
        decide(plugins.path(), &file, &["--winner", "zeta:int8"]).0,
        0
    );
    std::fs::remove_file(gone).unwrap();
    let done = attach_decided(plugins.path(), &file);
    assert_eq!(done.unit("decoder_ffn")["plugin"], "alpha");
    let by = &done.receipt["decisions"][0];
    assert_eq!(by["source"], "default");
    assert_eq!(by["fell_through"][0]["candidate"], "zeta:int8");
    assert_eq!(by["fell_through"][0]["reason"], "unknown_candidate");
}

#[test]
fn fault_decision_for_a_bad_form_is_still_gated() {
    let plugins = tempfile::tempdir().unwrap();
    fixture_copy(plugins.path(), Fault::None, "alpha");
    fixture_copy(plugins.path(), Fault::Scaled, "zeta");
    let file = plugins.path().join("decisions.json");
    assert_eq!(
        decide(plugins.path(), &file, &["--winner", "zeta:int8"]).0,
        0
    );
    let done = attach_decided(plugins.path(), &file);
    let units = done.receipt["units"].as_array().unwrap();
    assert_eq!(
        (&units[0]["plugin"], &units[0]["code"]),
        (&json!("zeta"), &json!("bind_parity"))
    );
    assert_eq!(
        (&units[1]["plugin"], &units[1]["outcome"]),
        (&json!("alpha"), &json!("activated"))
    );
}

#[test]
fn fault_decision_for_an_undeclared_winner() {
    let plugins = with(Fault::None);
    let file = plugins.path().join("decisions.json");
    let (exit, answer, _) = decide(plugins.path(), &file, &["--winner", "fixture:nothing"]);
    assert_eq!(
        (exit, &answer["error"]["code"]),
        (3, &json!("winner_undeclared"))
    );
    let why = answer["error"]["message"].as_str().unwrap();
    assert!(why.contains("fixture:int8"), "candidates are listed: {why}");
    assert!(!file.exists());
}

#[test]
fn fault_decisions_file_that_is_damaged() {
    let plugins = with(Fault::None);
    let file = plugins.path().join("decisions.json");
    std::fs::write(&file, "{\"schema\": 1, \"decis").unwrap();
    let done = attach_decided(plugins.path(), &file);
    assert_eq!(done.exit, 0, "taken as empty");
    assert!(done.log.contains("taken as empty"), "{}", done.log);
    let (exit, _, _) = decide(plugins.path(), &file, &["--winner", "host"]);
    assert_eq!(exit, 1, "and never written over");
    assert!(std::fs::read_to_string(&file).unwrap().ends_with("decis"));
}

#[test]
fn healthy_decision_for_the_host_keeps_it() {
    let plugins = with(Fault::None);
    let file = plugins.path().join("decisions.json");
    assert_eq!(decide(plugins.path(), &file, &["--winner", "host"]).0, 0);
    let done = attach_decided(plugins.path(), &file);
    assert_eq!(done.receipt["units"], json!([]));
    assert_eq!(done.receipt["kept_host"][0]["code"], "decided_host");
}

#[test]
fn b_310_a_refusal_carries_the_rows_of_its_own_seats() {
    let plugins = structures_tests::plugins(&["portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let (_, receipt, log) = structures_tests::json(
        structures_tests::structures(plugins.path())
            .args(["attach", "demo", "--scheme", "none", "--workload", "decode"])
            .args(["--structures", "attention_core,linear_proj,qkv_pack"])
            .args([
                "--pin",
                "attention_core=portable",
                "--pin",
                "qkv_pack=portable",
            ])
            .args([
                "--min-speedup",
                "1000",
                "--rounds",
                "1",
                "--iters",
                "1",
                "--max-samples",
                "2",
            ])
            .arg("--receipt-dir")
            .arg(receipts.path()),
    );
    let units = receipt["units"].as_array().unwrap();
    let reason = |name: &str| {
        let unit = units.iter().find(|u| u["structure"] == name);
        let unit = unit.unwrap_or_else(|| panic!("{name}: {log}"));
        assert_eq!(unit["code"], "no_net_win", "{unit}");
        unit["reason"].as_str().unwrap().to_string()
    };
    // A query of attention is not what a projection reads: its rows count heads as well.
    let rows = |text: &str| {
        text.split("; rows ")
            .nth(1)
            .unwrap()
            .split(';')
            .next()
            .unwrap()
            .to_string()
    };
    assert_ne!(rows(&reason("attention_core")), rows(&reason("qkv_pack")));
}
