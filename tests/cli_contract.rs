//! The contract of the command line: what scripts may rely on whatever goes wrong.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use serde_json::Value as Json;
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_tests::{json, plugins, structures, QUICK};

/// stdout as it is written.
fn stdout(args: &[&str]) -> String {
    let none = plugins(&[]);
    let out = structures(none.path()).args(args).output().unwrap();
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn every_document_starts_with_its_schema() {
    for args in [
        &["--json", "plugins", "list"][..],
        &["--json", "catalog", "list"],
        &["--json", "discover", "demo"],
        &["--json", "attach"],
        &["--json"],
        &["--json", "nonsense"],
        &["--json", "explain", "no-such-receipt.json"],
        &["--json", "generate", "no-such-model", "--prompt", "x"],
        &["--json", "plugins", "show", "nobody"],
        &["--json", "--threads", "0", "catalog"],
    ] {
        let text = stdout(args);
        assert!(text.starts_with("{\n  \"schema\": 1,"), "{args:?}: {text}");
        let document: Json = serde_json::from_str(&text).unwrap();
        if let Some(error) = document.get("error") {
            for field in ["code", "message", "help"] {
                assert!(
                    !error[field].as_str().unwrap().is_empty(),
                    "{args:?} {field}"
                );
            }
        }
    }
}

#[test]
fn usage_errors_keep_what_clap_says() {
    let none = plugins(&[]);
    let error = |args: &[&str]| {
        let (code, document, log) = json(structures(none.path()).args(args));
        assert_eq!(code, 2, "{document}");
        assert_eq!(document["error"]["code"], "usage");
        assert_eq!(log, "", "the document is all there is");
        let text = |field: &str| document["error"][field].as_str().unwrap().to_string();
        (text("message"), text("help"))
    };
    let (message, help) = error(&["attach"]);
    assert!(message.contains("<MODEL>"), "{message}");
    assert!(!message.contains("Usage:"), "{message}");
    assert!(help.starts_with("Usage: structures attach"), "{help}");

    let (message, _) = error(&["attach", "demo", "--workload", "dekode"]);
    for fact in ["dekode", "--workload", "decode, prefill"] {
        assert!(message.contains(fact), "{message}");
    }
    let (message, _) = error(&["generate", "demo", "--promt", "x"]);
    for fact in ["--promt", "tip:", "--prompt"] {
        assert!(message.contains(fact), "{message}");
    }
    let (message, _) = error(&[]);
    assert!(message.contains("requires a subcommand"), "{message}");
}

#[test]
fn arguments_that_contradict_themselves_are_refused() {
    let none = plugins(&[]);
    for (args, code, fact) in [
        (
            &[
                "--floor",
                "top1_agreement=0.9",
                "--floor",
                "top1_agreement=0.5",
            ][..],
            "floor_invalid",
            "twice",
        ),
        (
            &["--strict", "--on-guard-fail", "fallback"],
            "usage",
            "--strict",
        ),
        (&["--rounds", "99999999999"], "usage", "--rounds"),
        (&["--iters", "2000000"], "usage", "--iters"),
        (&["--percentile", "-1"], "percentile_range", "-1"),
        (&["--min-speedup", "-1"], "usage", "--min-speedup"),
    ] {
        let receipts = tempfile::tempdir().unwrap();
        let (exit, document, log) = json(
            structures(none.path())
                .args(["attach", "demo", "--scheme", "none", "--receipt-dir"])
                .arg(receipts.path())
                .args(args),
        );
        let error = &document["error"];
        assert_eq!(
            (exit, error["code"].as_str()),
            (2, Some(code)),
            "{args:?}: {log}"
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(fact), "{args:?}: {message}");
    }
    let (exit, document, _) = json(structures(none.path()).args([
        "generate",
        "demo",
        "--prompt",
        "x",
        "--max-samples",
        "2",
    ]));
    let message = document["error"]["message"].as_str().unwrap();
    assert_eq!(exit, 2);
    assert!(message.contains("--scheme"), "{message}");
}

/// The door without a gate takes the same arguments, and says what it did not bind.
#[test]
fn b_050_generate_takes_samples_and_tells_what_it_left() {
    let portable = plugins(&["portable"]);
    let run = |more: &[&str]| {
        let (exit, document, log) = json(
            structures(portable.path())
                .args([
                    "generate",
                    "demo",
                    "--prompt",
                    "And",
                    "--max-new-tokens",
                    "2",
                ])
                .args(["--scheme", "fp8_static", "--max-samples", "2"])
                .args(more),
        );
        assert_eq!(exit, 0, "{document}: {log}");
        (document, log)
    };
    let (document, log) = run(&[]);
    assert_eq!(document["ledger"]["calls"], 0);
    for fact in [
        "nothing is bound",
        "x reference_unpinned, such as",
        "only when pinned: ",
        "=portable:",
    ] {
        assert!(log.contains(fact), "{fact}: {log}");
    }
    let (document, log) = run(&["--percentile", "50", "--pin", "decoder_ffn=portable"]);
    assert!(
        document["ledger"]["form_calls"].as_u64().unwrap() > 0,
        "{log}"
    );
    assert!(!log.contains("nothing is bound"), "{log}");
    let (exit, document, _) = json(
        structures(portable.path())
            .args([
                "generate",
                "demo",
                "--prompt",
                "And",
                "--scheme",
                "fp8_static",
            ])
            .args(["--percentile", "-1"]),
    );
    let code = document["error"]["code"].as_str();
    assert_eq!((exit, code), (2, Some("percentile_range")));
}

#[test]
fn a_strict_run_ends_at_the_seat_that_missed() {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::ErrorNinthCall, "ninth");
    let run = |more: &[&str]| {
        json(
            structures(dir.path())
                .args(["generate", "demo", "--prompt", "And", "--scheme"])
                .args(["w8a16_decode", "--max-new-tokens", "16"])
                .args(more),
        )
    };
    let (code, document, log) = run(&["--strict"]);
    assert_eq!(code, 1, "{log}");
    let error = &document["error"];
    assert_eq!(error["code"], "strict_fallback", "{document}");
    let message = error["message"].as_str().unwrap();
    for fact in ["strict: seat `", "planted_error", "ninth call"] {
        assert!(message.contains(fact), "{message}");
    }
    assert!(error["help"].as_str().unwrap().contains("--strict"));

    let (code, document, log) = run(&[]);
    assert_eq!(code, 0, "{log}");
    assert_eq!(document["ledger"]["clean"], false, "{document}");
}

#[test]
fn few_rounds_are_allowed_and_said() {
    let none = plugins(&[]);
    let receipts = tempfile::tempdir().unwrap();
    let log = |more: &[&str]| {
        let (_, _, log) = json(
            structures(none.path())
                .args(["attach", "demo", "--receipt-dir"])
                .arg(receipts.path())
                .args(more),
        );
        log
    };
    let said = log(&["--rounds", "6"]);
    assert!(said.contains("fewer than 7 rounds"), "{said}");
    for quiet in [&["--rounds", "7"][..], &[], &["--rounds", "6", "-q"]] {
        let said = log(quiet);
        assert!(!said.contains("fewer than"), "{quiet:?}: {said}");
    }
}

#[test]
fn sizes_nobody_has_are_rows_and_not_crashes() {
    let dir = plugins(&["x86", "portable"]);
    for args in [
        &["--rows", "100000000000000"][..],
        &["--rows", "18446744073709551615"],
        &["--dims", "D=9000000000000000000"],
        &["--dims", "D=9000000000000000000,F=9000000000000000000"],
        &["--dims", "F=4000000000", "--rows", "8"],
        &["--rows", "4194304", "--dims", "D=32,F=65536"],
    ] {
        let (code, document, log) = json(structures(dir.path()).arg("probe").args(args));
        assert!([0, 3].contains(&code), "{args:?}: {code}\n{log}");
        let rows = document["probes"].as_array().unwrap();
        let ffn: Vec<&Json> = rows
            .iter()
            .filter(|p| p["structure"] == "decoder_ffn")
            .collect();
        assert!(ffn.len() >= 2, "{document}");
        for p in ffn {
            assert_eq!(p["launched"], false, "{args:?}: {p}");
            let expected = match (p["plugin"].as_str(), args[0]) {
                (Some("x86"), "--rows") => "form_band",
                _ => "dims_inconsistent",
            };
            assert_eq!(p["code"], expected, "{args:?}: {p}");
        }
    }
    let (code, document, _) = json(structures(dir.path()).args([
        "probe",
        "--plugin",
        "portable",
        "--structure",
        "decoder_ffn",
        "--dims",
        "D=9000000000000000000",
    ]));
    assert_eq!(code, 3);
    let reason = document["probes"][0]["reason"].as_str().unwrap();
    for fact in ["9000000000000000000", "expected at most 268435456"] {
        assert!(reason.contains(fact), "{reason}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure_and_a_closed_pipe_is_not() {
    let none = plugins(&[]);
    for arguments in [
        &["catalog", "list"][..],
        &["--json", "catalog", "list"],
        &["completions", "bash"],
    ] {
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let done = structures(none.path())
            .args(arguments)
            .stdout(full)
            .output()
            .unwrap();
        assert_eq!(done.status.code(), Some(1), "{arguments:?}");
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(
            text.contains("could not be written"),
            "{arguments:?}: {text}"
        );
        // The read end is gone before anything is written.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let done = structures(none.path())
            .args(arguments)
            .stdout(writer)
            .output()
            .unwrap();
        assert_eq!(done.status.code(), Some(0), "{arguments:?}");
    }
}

#[test]
fn absurd_thread_counts_and_unknown_structures_are_refused_by_name() {
    let dir = plugins(&["x86"]);
    for threads in ["0", "100000"] {
        let mut command =
            std::process::Command::new(structures_tests::build_dir().join("structures"));
        let (code, document, _) = json(command.args(["catalog", "list", "--threads", threads]));
        assert_eq!(
            (code, &document["error"]["code"]),
            (2, &"usage".into()),
            "{document}"
        );
    }
    let (code, document, _) = json(structures(dir.path()).args(["probe", "--structure", "nope"]));
    assert_eq!(
        (code, &document["error"]["code"]),
        (3, &"entry_unknown".into()),
        "{document}"
    );
}

/// A shell, with the program as `$0`, that arranges what a test cannot from here.
fn shell(script: &str, dir: &std::path::Path) -> std::process::Output {
    let program = structures(dir);
    std::process::Command::new("/bin/sh")
        .args(["-c", script])
        .arg(program.get_program())
        .envs(program.get_envs().filter_map(|(k, v)| Some((k, v?))))
        .current_dir(dir)
        .output()
        .unwrap()
}

#[test]
fn messages_that_nobody_can_take_change_no_exit() {
    let dir = tempfile::tempdir().unwrap();
    for (script, exit) in [
        ("\"$0\" new-plugin Acme 2>/dev/full", 2),
        ("\"$0\" new-plugin Acme 2>&-", 2),
        (
            "\"$0\" generate demo --prompt a --max-new-tokens 1 2>/dev/full",
            0,
        ),
        (
            // Its reader is gone before the program says anything.
            "{ \"$0\" generate demo --prompt a --max-new-tokens 1; echo $? >&3; } 3>rc 2>&1 >/dev/null | false; \
             exit $(cat rc)",
            0,
        ),
        ("STRUCTURES_LOG=trace \"$0\" plugins list 2>/dev/full", 0),
        ("\"$0\" attach 2>/dev/full", 2),
    ] {
        let out = shell(script, dir.path());
        assert_eq!(out.status.code(), Some(exit), "{script}");
    }
}

#[test]
fn what_the_caller_ignores_does_not_reach_the_program() {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::None, "fine");
    let out = shell(
        "trap '' CHLD; STRUCTURES_CACHE_DIR=$PWD/cache exec \"$0\" --json plugins list",
        dir.path(),
    );
    let document: Json = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(document["plugins"][0]["outcome"], "loaded", "{document:#}");
    // A file that may not grow is an error of the command, not the end of the process.
    let out = shell(
        "ulimit -f 1; exec \"$0\" --json new-plugin acme --lang c",
        dir.path(),
    );
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    let document: Json = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(document["error"]["code"], "io", "{document:#}");
    assert!(!dir.path().join("acme").exists());
}

#[test]
fn a_judgement_is_told_though_its_receipt_cannot_be_written() {
    // The name of the receipt is made of the model's, and is then longer than a file's may be.
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m".repeat(240));
    std::fs::create_dir(&model).unwrap();
    for file in std::fs::read_dir(structures_tests::demo()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let empty = tempfile::tempdir().unwrap();
    let command = || {
        let mut command = structures(empty.path());
        command.arg("attach").arg(&model).args(["--scheme", "none"]);
        command.args(QUICK).arg("--receipt-dir").arg(dir.path());
        command
    };
    let done = command().output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    let out = String::from_utf8_lossy(&done.stdout);
    assert!(out.contains("host control: repeat bit-identical"), "{out}");
    let (exit, document, _) = json(&mut command());
    assert_eq!((exit, &document["error"]["code"]), (1, &"io".into()));
    assert_eq!(document["error"]["receipt"]["scheme"]["name"], "none");
}
