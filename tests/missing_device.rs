//! A device that is not there, is another, or goes: what each command says of it, and that nothing is decided, compared or
//! recorded by its absence. On the simulated device of `portable`, which a variable makes and unmakes.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::{Path, PathBuf};

use serde_json::{json, Value as Json};
use structures_fixture_plugin::{c_fixture, fixture_copy, Fault};
use structures_tests::{json as run, plugins, structures, QUICK};

const ARCH: (&str, &str) = ("STRUCTURES_SIM_ARCH", "sm_90a");

/// The program with these plugins and variables.
fn program(plugins: &Path, variables: &[(&str, &str)], args: &[&str]) -> std::process::Command {
    let mut command = structures(plugins);
    command.envs(variables.iter().copied()).args(args);
    command
}

fn answer(plugins: &Path, variables: &[(&str, &str)], args: &[&str]) -> (i32, Json, String) {
    run(&mut program(plugins, variables, args))
}

/// A receipt whose seats are on the simulated device.
fn receipt(plugins: &Path, dir: &Path) -> (PathBuf, Json) {
    let (exit, document, log) = run(program(
        plugins,
        &[ARCH],
        &[
            "attach",
            "demo",
            "--scheme",
            "fp8_static",
            "--min-speedup",
            "0",
        ],
    )
    .args([
        "--structures",
        "decoder_ffn",
        "--pin",
        "decoder_ffn=portable@1",
    ])
    .args(QUICK)
    .arg("--receipt-dir")
    .arg(dir));
    assert_eq!(exit, 0, "{log}");
    let file = std::fs::read_dir(dir).unwrap().next().unwrap().unwrap();
    (file.path(), document)
}

#[test]
fn a_receipt_without_its_device_is_no_mismatch_and_another_device_is() {
    let plugins = plugins(&["portable"]);
    let dir = tempfile::tempdir().unwrap();
    let (file, document) = receipt(plugins.path(), dir.path());
    assert_eq!(document["union"]["device"], 1, "{}", document["union"]);
    let file = file.to_str().unwrap();
    let generate = [
        "generate",
        "demo",
        "--prompt",
        "a",
        "--max-new-tokens",
        "2",
        "--receipt",
        file,
    ];
    let refused = |variables: &[(&str, &str)]| -> (String, String, String) {
        let (exit, document, log) = answer(plugins.path(), variables, &generate);
        assert_eq!(exit, 3, "{document} {log}");
        let text = |key: &str| document["error"][key].as_str().unwrap().to_string();
        (text("code"), text("message"), text("help"))
    };
    assert_eq!(answer(plugins.path(), &[ARCH], &generate).0, 0);

    let (code, message, help) = refused(&[]);
    assert_eq!(code, "seat_unavailable", "{message}");
    for fact in ["device 1", "sm_90a", "`portable`"] {
        assert!(message.contains(fact), "{message}");
    }
    assert!(!message.contains("declares no such form"), "{message}");
    assert!(!help.contains("attach again"), "{help}");

    let (code, message, _) = refused(&[ARCH, ("STRUCTURES_SIM_LOSE_AFTER", "3")]);
    assert_eq!(code, "seat_unavailable", "{message}");
    assert!(message.contains("device_lost"), "{message}");
    // Wherever it goes while the receipt is bound again: at a seat, an operation, the choice; later the run goes on.
    for calls in ["6", "12", "20", "30", "45", "60"] {
        let lost = [ARCH, ("STRUCTURES_SIM_LOSE_AFTER", calls)];
        let (exit, document, log) = answer(plugins.path(), &lost, &generate);
        let code = document["error"]["code"].as_str();
        assert!(
            exit == 0 || (exit, code) == (3, Some("seat_unavailable")),
            "{calls}: {document} {log}"
        );
    }

    let (code, message, _) = refused(&[("STRUCTURES_SIM_ARCH", "sm_120a")]);
    assert_eq!(code, "receipt_mismatch", "{message}");
    assert!(message.contains("sm_120a"), "{message}");

    let verify = ["receipts", "verify", file];
    let drift = |variables: &[(&str, &str)]| -> Vec<Json> {
        let (exit, document, log) = answer(plugins.path(), variables, &verify);
        assert_eq!(exit, 0, "{log}");
        let all = document["receipts"][0]["drift"].as_array().unwrap().clone();
        let of_device = |d: &Json| d["what"].as_str().unwrap().starts_with("devices.");
        all.into_iter().filter(of_device).collect()
    };
    assert_eq!(drift(&[ARCH]), Vec::<Json>::new());
    let gone = drift(&[]);
    assert_eq!(gone.len(), 1, "{gone:?}");
    assert_eq!(
        (&gone[0]["what"], &gone[0]["found"]),
        (&json!("devices.portable:1"), &Json::Null)
    );
    let another = drift(&[("STRUCTURES_SIM_ARCH", "sm_120a")]);
    assert!(
        another[0]["found"].as_str().unwrap().contains("sm_120a"),
        "{another:?}"
    );
    let strict = ["receipts", "verify", "--strict", file];
    assert_eq!(answer(plugins.path(), &[], &strict).0, 3);
}

#[test]
fn the_host_wins_no_race_in_which_nobody_could_be_bound() {
    let plugins = plugins(&["portable"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("decisions.json");
    let record = |variables: &[(&str, &str)], pin: &str| {
        run(
            program(plugins.path(), variables, &["decisions", "record", "demo"])
                .args([
                    "--structures",
                    "decoder_ffn",
                    "--scheme",
                    "w8a16_decode",
                    "--pin",
                    pin,
                ])
                .arg("--decisions")
                .arg(&file),
        )
    };
    // Its code is of another architecture: every bind is refused.
    let foreign = [ARCH, ("STRUCTURES_SIM_BUILT_FOR", "sm_120a")];
    let (exit, document, log) = record(&foreign, "decoder_ffn=portable@1");
    assert_eq!(exit, 3, "{document} {log}");
    let race = &document["races"][0];
    assert_eq!(
        (&race["winner"], &document["recorded"]),
        (&Json::Null, &json!([]))
    );
    let standings = race["standings"].as_array().unwrap();
    assert!(standings.len() > 1, "{race}");
    for loser in &standings[1..] {
        let why = loser["lost"].as_str().unwrap();
        assert!(!why.starts_with("floor_not_met"), "{why}");
    }
    assert!(!file.exists());

    // A device that goes while a form is bound, judged or timed says nothing of the host either.
    let mut gone = 0;
    for calls in ["2", "30", "110", "5000", "9000", "13000"] {
        let lost = [ARCH, ("STRUCTURES_SIM_LOSE_AFTER", calls)];
        let (exit, document, log) = record(&lost, "decoder_ffn=portable@1");
        let race = &document["races"][0];
        let standings = race["standings"].as_array().unwrap();
        // Not bound, or gone with the device.
        let nothing = [
            "device_lost",
            "rounds_not_allowed",
            "statistic_unmeasurable",
        ];
        let untold = |s: &Json| {
            let why = s["lost"].as_str().unwrap_or("");
            nothing.iter().any(|code| why.contains(code))
        };
        let nobody = standings[1..].iter().all(untold);
        assert_eq!(race["winner"].is_null(), nobody, "{calls}: {race}");
        assert_eq!(
            (exit, file.exists()),
            (if nobody { 3 } else { 0 }, !nobody),
            "{log}"
        );
        gone += u32::from(nobody);
        let _ = std::fs::remove_file(&file);
    }
    assert!(gone > 2, "{gone}");

    let (exit, document, log) = record(&[], "decoder_ffn=portable");
    assert_eq!(exit, 0, "{document} {log}");
    assert!(document["races"][0]["winner"].is_string(), "{document}");
    assert!(file.exists());
}

#[test]
fn a_pin_to_a_device_that_is_not_there_names_it() {
    let plugins = plugins(&["portable"]);
    for (variables, pin) in [
        (&[ARCH][..], "decoder_ffn=portable@7"),
        (&[], "decoder_ffn=portable@1"),
        (&[], "decoder_ffn=portable:w8a16_static@1"),
    ] {
        let (exit, document, log) = answer(
            plugins.path(),
            variables,
            &[
                "attach",
                "demo",
                "--structures",
                "decoder_ffn",
                "--pin",
                pin,
            ],
        );
        assert_eq!(exit, 2, "{pin}: {document} {log}");
        assert_eq!(document["error"]["code"], "pin_unknown", "{document}");
        let message = document["error"]["message"].as_str().unwrap();
        let device = pin.split_once('@').unwrap().1;
        assert!(message.contains(&format!("not on {device}")), "{message}");
        assert!(message.contains("on device 0"), "{message}");
    }
}

#[test]
fn a_bench_tells_what_was_not_bound_and_what_the_host_served() {
    let plugins = plugins(&["portable"]);
    let bench = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = program(plugins.path(), variables, &["bench", "demo"]);
        command.args([
            "--scheme",
            "w8a16_decode",
            "--pin",
            "decoder_ffn=portable@1",
        ]);
        command.args([
            "--arm",
            "attached",
            "--prefill",
            "8",
            "--decode",
            "4",
            "--rounds",
            "1",
        ]);
        command.args(args);
        command
    };
    let foreign = [ARCH, ("STRUCTURES_SIM_BUILT_FOR", "sm_120a")];
    let (exit, document, log) = run(&mut bench(&foreign, &[]));
    assert_eq!(exit, 0, "{log}");
    let rows = document["not_bound"].as_array().unwrap();
    let row = rows
        .iter()
        .find(|r| r["code"] == "arch_not_declared")
        .unwrap();
    assert_eq!(row["structure"], "decoder_ffn");
    assert!(row["count"].as_u64().unwrap() >= 1 && row["reason"].is_string());
    let text = |variables: &[(&str, &str)]| {
        let done = bench(variables, &[]).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        let words = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (words(&done.stdout), words(&done.stderr))
    };
    assert!(text(&foreign).1.contains("arch_not_declared"));

    let all_well = text(&[ARCH]).0;
    assert!(!all_well.contains("not what was bound"), "{all_well}");
    // Bound, and gone soon after.
    let lost = [ARCH, ("STRUCTURES_SIM_LOSE_AFTER", LOST_IN_THE_BENCH)];
    let (out, log) = text(&lost);
    assert!(out.contains("not what was bound"), "{out}\n{log}");
    assert!(log.contains("device_lost"), "{log}");
}

const LOST_IN_THE_BENCH: &str = "150";

#[test]
fn an_unknown_plugin_is_told_beside_what_is_there() {
    let empty = tempfile::tempdir().unwrap();
    let probe = ["probe", "--plugin", "nobody"];
    let show = ["plugins", "show", "nobody"];
    for args in [&probe[..], &show[..]] {
        let message = |plugins: &Path| {
            let (exit, document, _) = answer(plugins, &[], args);
            assert_eq!(exit, 2, "{document}");
            document["error"]["message"].as_str().unwrap().to_string()
        };
        let none = message(empty.path());
        assert!(none.ends_with("none is loaded"), "{none}");
        let some = tempfile::tempdir().unwrap();
        fixture_copy(some.path(), Fault::None, "good");
        fixture_copy(some.path(), Fault::WrongArch, "elsewhere");
        let named = message(some.path());
        assert!(named.contains("loaded: good"), "{named}");
        assert!(
            named.contains("elsewhere.so (arch_not_declared)"),
            "{named}"
        );
    }
}

#[test]
fn devices_count_forms_and_say_whose_are_missing() {
    let plugins = plugins(&["portable", "cuda"]);
    let command = ["devices", "--simulate", "sm_80"];
    let (exit, document, log) = answer(plugins.path(), &[], &command);
    assert_eq!(exit, 0, "{log}");
    let devices = document["devices"].as_array().unwrap();
    let of = |device: &Json, plugin: &str| -> Json {
        let rows = device["plugins"].as_array().unwrap();
        let row = rows.iter().find(|p| p["plugin"] == plugin);
        row.unwrap().clone()
    };
    let here = of(&devices[0], "portable");
    assert!(here["forms"].as_u64().unwrap() > 0);
    assert_eq!(here["forms_served"], here["forms"]);
    let named = devices.last().unwrap();
    let none = of(named, "portable");
    assert_eq!(
        (&none["admitted"], &none["forms_served"]),
        (&json!(false), &json!(0))
    );
    // Not every form of a plugin that serves a device has code for it.
    let some = of(named, "cuda");
    let count = |key: &str| some[key].as_u64().unwrap();
    assert!(
        count("forms_served") > 0 && count("forms_served") < count("forms"),
        "{some}"
    );

    if devices.iter().any(|d| d["plugin"] == "cuda") {
        eprintln!("the rest is skipped: this machine has a GPU");
        return;
    }
    let missing = document["without_devices"].as_array().unwrap();
    assert_eq!(missing.len(), 1, "{document}");
    assert_eq!(missing[0]["plugin"], "cuda");
    assert!(missing[0]["code"].is_string() && missing[0]["reason"].is_string());
    assert!(!log.contains("WARN"), "{log}");
    let done = program(plugins.path(), &[], &command).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(text.contains("no devices of plugin cuda: "), "{text}");
}

#[test]
fn a_form_whose_device_is_elsewhere_is_skipped_and_nothing_failed() {
    let dir = tempfile::tempdir().unwrap();
    let file = c_fixture(dir.path(), "away", &["ARCHS=\"sm_90a\""]);
    let empty = tempfile::tempdir().unwrap();
    let (exit, document, log) = run(structures(empty.path())
        .arg("conform")
        .arg(&file)
        .args(["--cases", "2"]));
    assert_eq!(exit, 0, "{document} {log}");
    let checks = document["checks"].as_array().unwrap();
    let of_form: Vec<&Json> = checks.iter().filter(|c| c["form"].is_string()).collect();
    assert!(!of_form.is_empty());
    assert!(
        of_form.iter().all(|c| c["outcome"] == "skip"),
        "{of_form:?}"
    );
    let launch = of_form.iter().find(|c| c["name"] == "launch").unwrap();
    let why = launch["reason"].as_str().unwrap();
    assert!(
        why.contains("no device here runs it: arch_not_declared"),
        "{why}"
    );
}
