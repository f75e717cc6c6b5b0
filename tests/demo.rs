//! The product's main path on the model that ships with the repository.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use serde_json::Value as Json;
use structures_tests::{json, plugins, structures, units, QUICK};

fn attach(dir: &std::path::Path, receipts: &std::path::Path, more: &[&str]) -> (i32, Json, String) {
    json(
        structures(dir)
            .args(["attach", "demo", "--receipt-dir"])
            .arg(receipts)
            .args(QUICK)
            .args(more),
    )
}

fn only_file(dir: &std::path::Path) -> std::path::PathBuf {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert_eq!(
        files.len(),
        1,
        "one receipt and nothing half-written: {files:?}"
    );
    files.remove(0)
}

#[test]
fn int8_decode_is_attached_gated_and_replayed() {
    let dir = plugins(&["x86", "portable"]);
    let receipts = tempfile::tempdir().unwrap();
    // The clock of a busy machine decides nothing here.
    let (code, receipt, log) = attach(
        dir.path(),
        receipts.path(),
        &["--scheme", "w8a16_decode", "--min-speedup", "0"],
    );
    assert_eq!(code, 0, "{log}");
    for structure in ["decoder_ffn", "qkv_pack", "linear_proj"] {
        let rows = units(&receipt, structure);
        assert_eq!(
            rows.len(),
            1,
            "{structure}: the first plugin that passes wins"
        );
        let unit = rows[0];
        assert_eq!(unit["outcome"], "activated", "{unit}");
        assert_eq!(unit["plugin"], "x86");
        assert_eq!(unit["ledger"]["clean"], true, "{unit}");
        assert!(unit["ledger"]["form_calls"].as_u64().unwrap() > 0);
        assert!(
            unit["metrics"]["top1_agreement"].as_f64().unwrap() >= 0.9,
            "{unit}"
        );
        assert!(unit["latency"]["speedup"].as_f64().unwrap() > 0.0);
    }
    // The output head comes from the family's binding.
    assert!(units(&receipt, "linear_proj")[0]["paths"]
        .as_array()
        .unwrap()
        .contains(&"lm_head".into()));
    assert_eq!(receipt["union"]["outcome"], "activated");
    assert_eq!(receipt["control"]["repeat_identical"], true);
    assert_eq!(receipt["control"]["detach_identical"], true);
    // A scheme that asks for no statistic fits nothing: all samples are judged.
    assert_eq!(receipt["calibration"]["samples"], 0);
    assert!(receipt["calibration"]["held_out"].as_u64().unwrap() >= 8);
    assert_eq!(receipt["calibration"]["source"], "built-in");
    // q_proj lost its operations to the pack.
    let kept = receipt["kept_host"].as_array().unwrap();
    assert!(kept.iter().any(|k| k["code"] == "owned_by"), "{kept:?}");

    let file = only_file(receipts.path());
    let on_disk: Json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(on_disk, receipt);
    assert!(structures::digest::verify(&on_disk));

    let prompt = ["--prompt", "And God said", "--max-new-tokens", "24"];
    let (code, treated, log) = json(
        structures(dir.path())
            .args(["generate", "demo"])
            .args(prompt)
            .arg("--receipt")
            .arg(&file),
    );
    assert_eq!(code, 0, "{log}");
    assert_eq!(treated["ledger"]["fallbacks"], 0, "{treated}");
    assert!(treated["ledger"]["form_calls"].as_u64().unwrap() > 0);
    let (_, host, _) = json(
        structures(dir.path())
            .args(["generate", "demo"])
            .args(prompt),
    );
    assert_eq!(host["ledger"]["calls"], 0);
    assert_eq!(host["tokens"].as_array().unwrap().len(), 24);

    let explained = structures(dir.path())
        .arg("explain")
        .arg(&file)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&explained.stdout).into_owned();
    for fact in ["decoder_ffn", "w8a16_decode", "owned_by"] {
        assert!(text.contains(fact), "{text}");
    }

    // A changed record, another plugin, another model: refused, exit 3.
    let mut tampered = on_disk.clone();
    tampered["min_speedup"] = 9.0.into();
    let bad = receipts.path().join("bad.json");
    std::fs::write(&bad, tampered.to_string()).unwrap();
    let replay = |dir: &std::path::Path, receipt: &std::path::Path| {
        json(
            structures(dir)
                .args(["generate", "demo"])
                .args(prompt)
                .arg("--receipt")
                .arg(receipt),
        )
    };
    let (code, error, _) = replay(dir.path(), &bad);
    assert_eq!(
        (code, &error["error"]["code"]),
        (3, &Json::from("record_tampered"))
    );
    let without = plugins(&["portable"]);
    let (code, error, _) = replay(without.path(), &file);
    assert_eq!(
        (code, &error["error"]["code"]),
        (3, &Json::from("receipt_mismatch"))
    );
    let changed = plugins(&["portable", "x86"]);
    let library = changed.path().join("libstructures_plugin_x86.so");
    let mut bytes = std::fs::read(&library).unwrap();
    bytes.extend_from_slice(b"\nanother build\n");
    std::fs::write(&library, bytes).unwrap();
    let (code, error, _) = replay(changed.path(), &file);
    assert_eq!(
        (code, &error["error"]["code"]),
        (3, &Json::from("receipt_mismatch"))
    );
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("sha256"), "{message}");
}

#[test]
fn a_receipt_is_for_exactly_the_model_it_was_judged_on() {
    let dir = plugins(&["x86"]);
    let receipts = tempfile::tempdir().unwrap();
    let scheme = ["--scheme", "w8a16_decode", "--min-speedup", "0"];
    let (code, _, log) = attach(dir.path(), receipts.path(), &scheme);
    assert_eq!(code, 0, "{log}");
    let receipt = only_file(receipts.path());
    let other = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(structures_tests::demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), other.path().join(entry.file_name())).unwrap();
    }
    let config = other.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("10000.0", "7.0")).unwrap();
    assert_ne!(text, std::fs::read_to_string(&config).unwrap());
    let run = |model: &std::path::Path| {
        let mut command = structures(dir.path());
        command
            .arg("generate")
            .arg(model)
            .args(["--prompt", "And", "--max-new-tokens", "2"]);
        json(command.arg("--receipt").arg(&receipt))
    };
    let (code, error, _) = run(other.path());
    assert_eq!(
        (code, &error["error"]["code"]),
        (3, &Json::from("receipt_mismatch"))
    );
    // Weights beyond the first bytes of the file count too.
    std::fs::write(&config, text).unwrap();
    let (code, _, log) = run(other.path());
    assert_eq!(code, 0, "a faithful copy is the same model: {log}");
    let weights = other.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let (code, error, _) = run(other.path());
    assert_eq!(
        (code, &error["error"]["code"]),
        (3, &Json::from("receipt_mismatch"))
    );
}

#[test]
fn samples_of_every_length_are_served_and_too_long_ones_refused() {
    let dir = plugins(&["portable"]);
    let out = tempfile::tempdir().unwrap();
    let line = |n: usize| format!("{{\"text\": \"{}\"}}\n", "ab ".repeat(n));
    let file = out.path().join("mixed.jsonl");
    // The longest comes last: capacity must not follow the first one.
    std::fs::write(
        &file,
        (0..7).map(|_| line(14)).collect::<String>() + &line(42),
    )
    .unwrap();
    let samples = [
        "--scheme",
        "fp8_static",
        "--samples",
        file.to_str().unwrap(),
    ];
    let (_, receipt, log) = attach(dir.path(), out.path(), &samples);
    for unit in receipt["units"].as_array().unwrap() {
        assert_ne!(unit["code"], "fell_back", "{unit}\n{log}");
        assert_eq!(unit["ledger"]["fallbacks"], 0, "{unit}");
    }
    std::fs::write(&file, line(400)).unwrap();
    let (code, error, _) = attach(dir.path(), out.path(), &samples);
    assert_eq!(
        (code, &error["error"]["code"]),
        (1, &Json::from("samples_invalid")),
        "{error}"
    );
    let text = error["error"]["message"].as_str().unwrap();
    assert!(
        text.contains("512") && text.contains("mixed.jsonl"),
        "{text}"
    );
}

#[test]
fn pins_and_floors_that_make_no_sense_are_usage() {
    let dir = plugins(&["x86"]);
    let out = tempfile::tempdir().unwrap();
    for (arguments, code) in [
        (["--pin", "nosuch=x86"], "entry_unknown"),
        (["--pin", "decoder_ffn=nobody"], "pin_unknown"),
        (["--pin", "decoder_ffn=x86:nothing"], "pin_unknown"),
        (["--floor", "max_abs=inf"], "floor_invalid"),
    ] {
        let (exit, error, _) = attach(dir.path(), out.path(), &arguments);
        assert_eq!(error["error"]["code"], code, "{arguments:?}: {error}");
        assert!(exit == 2 || exit == 3, "{arguments:?}: {exit}");
    }
    assert_eq!(
        std::fs::read_dir(out.path()).unwrap().count(),
        0,
        "no receipt"
    );
}

#[test]
fn fp8_from_the_yardstick_is_fitted_held_out_and_reported() {
    let dir = plugins(&["portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let (code, receipt, log) = attach(dir.path(), receipts.path(), &["--scheme", "fp8_static"]);
    // Whatever the clock says, both arms' numbers are there.
    assert!(code == 0 || code == 3, "{log}");
    assert_eq!(receipt["calibration"]["samples"], 6);
    assert_eq!(receipt["calibration"]["held_out"], 2);
    assert_eq!(receipt["calibration"]["method"], "percentile");
    for structure in ["decoder_ffn", "qkv_pack", "linear_proj"] {
        let rows = units(&receipt, structure);
        let unit = rows[0];
        assert!(unit["band"] == "pass" || unit["band"] == "warn", "{unit}");
        assert!(unit["latency"]["host_ms"].as_f64().unwrap() > 0.0, "{unit}");
        assert!(
            unit["latency"]["treated_ms"].as_f64().unwrap() > 0.0,
            "{unit}"
        );
        if unit["outcome"] == "refused" {
            // Alone, or together with the others: the clock's verdict and nothing else.
            let clock = ["no_net_win", "union_failed"];
            assert!(clock.contains(&unit["code"].as_str().unwrap()), "{unit}");
        }
    }
    if receipt["union"]["code"] == "union_failed" {
        let reason = receipt["union"]["reason"].as_str().unwrap();
        assert!(reason.contains("no_net_win"), "{reason}");
    }
}

#[test]
fn nothing_active_is_the_unmodified_host() {
    let dir = plugins(&["x86", "portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let (code, receipt, log) = attach(dir.path(), receipts.path(), &["--scheme", "none"]);
    assert_eq!(code, 0, "{log}");
    let kept = receipt["kept_host"].as_array().unwrap();
    assert!(
        kept.iter().any(|k| k["code"] == "keep_quantisation_off"),
        "{kept:?}"
    );
    let none = plugins(&[]);
    let (code, receipt, log) = attach(none.path(), receipts.path(), &["--scheme", "w8a16_decode"]);
    assert_eq!(code, 3, "no plugin, so the answer is no: {log}");
    assert_eq!(receipt["seams_active"].as_array().unwrap().len(), 0);
    assert_eq!(
        receipt["ledger"]["clean"], false,
        "no seat ran, so nothing is clean"
    );
    let refused = receipt["refused"].as_array().unwrap();
    assert!(
        refused.iter().any(|r| r["code"] == "format_no_variant"),
        "{refused:?}"
    );

    let prompt = ["--prompt", "In the beginning", "--max-new-tokens", "20"];
    let (_, host, _) = json(
        structures(none.path())
            .args(["generate", "demo"])
            .args(prompt),
    );
    let (_, same, log) = json(
        structures(none.path())
            .args(["generate", "demo", "--scheme", "w8a16_decode"])
            .args(prompt),
    );
    assert_eq!(host["tokens"], same["tokens"]);
    assert!(log.contains("nothing is gated"), "{log}");
}

#[test]
fn ungated_swaps_leave_the_yardstick_alone_unless_pinned() {
    let dir = plugins(&["portable"]);
    let run = |more: &[&str]| {
        json(
            structures(dir.path())
                .args([
                    "generate",
                    "demo",
                    "--prompt",
                    "And",
                    "--max-new-tokens",
                    "4",
                ])
                .args(["--scheme", "w8a16_decode"])
                .args(more),
        )
    };
    let (code, free, log) = run(&[]);
    assert_eq!(
        (code, &free["ledger"]["calls"]),
        (0, &Json::from(0)),
        "{log}"
    );
    let (code, pinned, log) = run(&["--pin", "decoder_ffn=portable"]);
    assert_eq!(code, 0, "{log}");
    assert!(
        pinned["ledger"]["form_calls"].as_u64().unwrap() > 0,
        "{pinned}"
    );
}

#[test]
fn b_304_a_floor_refuses_by_name() {
    let dir = plugins(&["x86"]);
    let receipts = tempfile::tempdir().unwrap();
    let (code, receipt, log) = attach(
        dir.path(),
        receipts.path(),
        &[
            "--scheme",
            "w8a16_decode",
            "--floor",
            "kl_per_token=0",
            "--min-speedup",
            "0",
        ],
    );
    assert_eq!(code, 3, "{log}");
    for unit in receipt["units"].as_array().unwrap() {
        assert_eq!(unit["code"], "floor_not_met", "{unit}");
        assert!(
            unit["reason"].as_str().unwrap().contains("kl_per_token"),
            "{unit}"
        );
    }
}

#[test]
fn auto_says_what_it_chose_and_why() {
    let dir = plugins(&["portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let (code, receipt, log) = attach(dir.path(), receipts.path(), &["--scheme", "auto"]);
    assert_eq!(code, 0, "{log}");
    assert_eq!(
        receipt["scheme"]["name"], "none",
        "a yardstick does not count"
    );
    assert_eq!(receipt["scheme"]["auto"], true);
    assert!(!receipt["scheme"]["why"].as_str().unwrap().is_empty());
}

#[test]
fn b_343_b_344_probes_tell_three_facts_apart() {
    let dir = plugins(&["x86", "portable"]);
    let (code, document, log) = json(structures(dir.path()).args(["probe", "--rows", "1,128"]));
    assert_eq!(code, 0, "{log}");
    let probes = document["probes"].as_array().unwrap();
    let one = |plugin: &str, rows: u64| {
        probes
            .iter()
            .find(|p| p["plugin"] == plugin && p["rows"] == rows && p["structure"] == "decoder_ffn")
            .unwrap()
    };
    for key in ["declared", "probed", "launched"] {
        assert_eq!(one("x86", 1)[key], true, "{:?}", one("x86", 1));
        assert_eq!(
            one("portable", 128)[key],
            true,
            "{:?}",
            one("portable", 128)
        );
    }
    // An optional entry is resolved by the probe: here or not, and neither is a refusal.
    let entries = &one("x86", 1)["entries"];
    let names = |key: &str| entries[key].as_array().unwrap().len();
    assert!(names("present") + names("absent") > 0, "{entries}");
    assert_eq!(one("x86", 1)["outcome"], "ok");
    let beyond = ["probe", "--plugin", "x86", "--rows", "100000"];
    let (_, document, log) = json(structures(dir.path()).args(beyond));
    let beyond = document["probes"].as_array().unwrap();
    assert!(!beyond.is_empty(), "{log}");
    for probe in beyond {
        assert_eq!(probe["code"], "form_band", "{probe}");
        assert_eq!(probe["launched"], false, "{probe}");
    }
    for p in probes.iter().filter(|p| p["plugin"] == "portable") {
        // What a module of the host gave is not to be had without the host.
        match p["structure"].as_str() {
            Some("cadence_static") => assert_eq!(p["code"], "statistic_unmeasurable", "{p}"),
            _ => assert_eq!(p["outcome"], "ok", "{p}"),
        }
    }
    let (code, error, _) = json(structures(dir.path()).args(["probe", "--plugin", "nobody"]));
    assert_eq!(
        (code, &error["error"]["code"]),
        (2, &Json::from("plugin_unknown"))
    );
}

#[test]
fn calibrate_writes_a_precision_spec() {
    let dir = plugins(&["portable"]);
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("spec.json");
    let (code, document, log) = json(
        structures(dir.path())
            .args(["calibrate", "demo", "-o"])
            .arg(&file),
    );
    assert_eq!(code, 0, "{log}");
    assert_eq!(document["calibration"]["samples"], 6);
    assert_eq!(document["calibration"]["held_out"], 2);
    let spec = &document["precision_spec"]["activations"];
    assert_eq!(
        spec["model.layers.0.mlp|act_after_mul"]["dtype"], "fp8_e4m3",
        "{spec}"
    );
    let on_disk: Json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(on_disk["precision_spec"], document["precision_spec"]);
}

#[test]
fn perplexity_tells_what_a_scheme_costs_beside_the_host() {
    let dir = plugins(&["x86"]);
    let measure = |more: &[&str]| {
        let mut command = structures(dir.path());
        command.args(["perplexity", "demo", "--max-samples", "3"]);
        json(command.args(more))
    };
    let (code, host, log) = measure(&[]);
    assert_eq!(code, 0, "{log}");
    assert_eq!(host["perplexity"], host["host_perplexity"]);
    assert_eq!(host["top1_agreement"], 1.0);
    assert!(host["ledger"].is_null(), "{host}");
    let number = |document: &Json, name: &str| document[name].as_f64().unwrap();
    // Every token but each sample's first.
    assert!(number(&host, "tokens") >= 3.0 && number(&host, "perplexity") > 1.0);

    let (code, int8, log) = measure(&["--scheme", "w8a16_decode"]);
    assert_eq!(code, 0, "{log}");
    assert!(int8["ledger"]["form_calls"].as_u64().unwrap() > 0, "{int8}");
    assert_eq!(int8["host_perplexity"], host["perplexity"]);
    assert_ne!(int8["perplexity"], host["perplexity"]);
    let ratio = number(&int8, "perplexity") / number(&host, "perplexity");
    assert!((0.97..1.03).contains(&ratio), "{int8}");
    assert!(number(&int8, "top1_agreement") >= 0.9, "{int8}");
    let (code, stepped, log) = measure(&["--workload", "decode"]);
    assert_eq!(code, 0, "{log}");
    let ratio = number(&stepped, "perplexity") / number(&host, "perplexity");
    assert!((ratio - 1.0).abs() < 1e-4, "one call or many: {stepped}");
}
