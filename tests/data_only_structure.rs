//! A structure that no code of this repository's host knows: data in a directory, a form in a plugin.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use structures_fixture_plugin::{fixture_copy, Fault};
use structures_tests::{json, root, structures, units, QUICK};

#[test]
fn it_is_discovered_bound_and_gated_without_an_edit() {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::None, "vendor");
    let catalog = root().join("tests/fixtures/catalog");
    let run = |args: &[&str]| {
        let mut command = structures(dir.path());
        command.arg("--catalog").arg(&catalog).args(args);
        json(&mut command)
    };
    let (code, list, log) = run(&["catalog", "list"]);
    assert_eq!(code, 0, "{log}");
    let entry = list["structures"].as_array().unwrap();
    let entry = entry
        .iter()
        .find(|s| s["name"] == "plain_norm")
        .expect("listed");
    assert_eq!(entry["reference"], "dataflow");
    let (code, _, log) = run(&["catalog", "verify"]);
    assert_eq!(code, 0, "{log}");

    let (code, found, log) = run(&["discover", "demo", "--structures", "plain_norm"]);
    assert_eq!(code, 0, "{log}");
    let seams = found["seams"].as_array().unwrap();
    assert_eq!(seams.len(), 5, "two norms a layer and the last one");
    assert!(seams.iter().all(|s| s["located"] == true), "{found}");

    let receipts = tempfile::tempdir().unwrap();
    let to = receipts.path().to_str().unwrap();
    let mut args = vec!["attach", "demo", "--scheme", "none", "--min-speedup", "0"];
    args.extend(["--structures", "plain_norm", "--receipt-dir", to]);
    args.extend(QUICK);
    let (code, receipt, log) = run(&args);
    assert_eq!(code, 0, "{log}");
    let unit = units(&receipt, "plain_norm")[0].clone();
    assert_eq!(unit["outcome"], "activated", "{unit}");
    assert_eq!(unit["seams"], 5);
    assert_eq!(unit["ledger"]["clean"], true);
    assert_eq!(unit["metrics"]["top1_agreement"], 1.0);
}

#[test]
fn a_planted_fault_in_its_form_is_refused_too() {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::Scaled, "vendor");
    let receipts = tempfile::tempdir().unwrap();
    let (_, receipt, log) = json(
        structures(dir.path())
            .arg("--catalog")
            .arg(root().join("tests/fixtures/catalog"))
            .args([
                "attach",
                "demo",
                "--scheme",
                "none",
                "--structures",
                "plain_norm",
            ])
            .args(QUICK)
            .arg("--receipt-dir")
            .arg(receipts.path()),
    );
    assert_eq!(
        units(&receipt, "plain_norm")[0]["code"],
        "bind_parity",
        "{log}"
    );
}
