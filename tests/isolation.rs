//! A form that fails while the model runs: its seats give the host back, the other plugins go on, the text is there.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use serde_json::Value as Json;
use structures_fixture_plugin::{c_fixture, fixture_copy, Fault};
use structures_tests::{json, structures, units, QUICK};

const FAIL: &str = "STRUCTURES_FIXTURE_FAIL";

#[test]
fn a_plugin_that_fails_at_run_time_costs_its_seats_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    c_fixture(
        dir.path(),
        "brittle",
        &["FAIL_WHEN=\"STRUCTURES_FIXTURE_FAIL\""],
    );
    fixture_copy(dir.path(), Fault::None, "steady");
    let receipts = tempfile::tempdir().unwrap();
    let (code, receipt, log) = json(
        structures(dir.path())
            .env_remove(FAIL)
            .args([
                "attach",
                "demo",
                "--scheme",
                "w8a16_decode",
                "--min-speedup",
                "0",
            ])
            .args([
                "--pin",
                "linear_proj=brittle",
                "--pin",
                "decoder_ffn=steady",
            ])
            .args(["--receipt-dir"])
            .arg(receipts.path())
            .args(QUICK),
    );
    assert_eq!(code, 0, "{log}");
    let seats = |plugin: &str| {
        let all = receipt["seats"].as_array().unwrap();
        all.iter().filter(|s| s["plugin"] == plugin).count() as u64
    };
    let (brittle, steady) = (seats("brittle"), seats("steady"));
    assert_eq!(
        units(&receipt, "linear_proj")[0]["outcome"],
        "activated",
        "{log}"
    );
    assert!(brittle > 2 && steady > 2, "{brittle} and {steady} seats");

    let file = std::fs::read_dir(receipts.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let generate = |failing: bool, more: &[&str]| -> (i32, Json, String) {
        let mut command = structures(dir.path());
        command.env_remove(FAIL);
        if failing {
            command.env(FAIL, "1");
        }
        command
            .args([
                "generate",
                "demo",
                "--prompt",
                "And God said",
                "--max-new-tokens",
                "16",
            ])
            .args(more)
            .arg("--receipt")
            .arg(&file);
        json(&mut command)
    };
    let (code, sound, log) = generate(false, &[]);
    assert_eq!(
        (code, &sound["ledger"]["fallbacks"]),
        (0, &0.into()),
        "{log}"
    );

    let (code, failed, log) = generate(true, &[]);
    assert_eq!(code, 0, "the host goes on: {log}");
    assert_eq!(failed["tokens"].as_array().unwrap().len(), 16);
    let ledger = &failed["ledger"];
    // Bind parity and the first steps are served; then each of its seats fails once and is the host's again.
    assert_eq!(ledger["fallbacks"], brittle, "{ledger}");
    let reason = ledger["last_reason"].as_str().unwrap_or_default();
    assert!(reason.contains("planted_error"), "{ledger}");
    let served = ledger["form_calls"].as_u64().unwrap();
    let others = sound["ledger"]["form_calls"].as_u64().unwrap();
    assert!(
        served >= steady * 15 && served < others,
        "the other plugin goes on: {ledger}"
    );
    assert!(
        log.contains("brittle") && log.contains("the host runs here from now on"),
        "{log}"
    );
}
