//! Bad plugins, each a named fixture that breaks one rule: named by exactly one code, never active, and the host
//! survives all of them in one directory.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value as Json;
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_tests::{json, structures, QUICK};

/// Faults of the calls, with the code that refuses them while they are bound or judged.
const CALLS: &[(Fault, &str)] = &[
    (Fault::Scaled, "bind_parity"),
    (Fault::Swapped, "bind_parity"),
    (Fault::Half, "bind_parity"),
    (Fault::NonFinite, "bind_parity"),
    (Fault::PanicInCall, "bind_smoke"),
    (Fault::ErrorThirdCall, "bind_smoke"),
    (Fault::PanicThirdCall, "bind_smoke"),
    (Fault::ErrorNinthCall, "runtime_form"),
    (Fault::PanicNinthCall, "runtime_form"),
    // 8 samples of 32 steps and four calls at bind are behind it: this one fails while it is timed.
    (Fault::ErrorLate, "runtime_form"),
    (Fault::Slow, "no_net_win"),
];

/// Faults of the library, with the code that refuses it before it is used.
const LIBRARIES: &[(Fault, &str)] = &[(Fault::WrongArch, "arch_not_declared")];

fn attach(dir: &Path, more: &[&str]) -> (i32, Json, String) {
    let receipts = tempfile::tempdir().unwrap();
    json(
        structures(dir)
            .args([
                "attach",
                "demo",
                "--scheme",
                "w8a16_decode",
                "--receipt-dir",
            ])
            .arg(receipts.path())
            .args(if more.contains(&"--rounds") {
                &[][..]
            } else {
                &QUICK[..]
            })
            .args(more),
    )
}

#[test]
fn each_fault_is_named_by_one_code_and_never_active() {
    let dir = tempfile::tempdir().unwrap();
    let mut expected: BTreeMap<String, &str> = BTreeMap::new();
    for (fault, code) in CALLS {
        let id = format!("bad-{}", fault.name().replace('_', "-"));
        fixture_copy(dir.path(), *fault, &id);
        expected.insert(id, code);
    }
    for (fault, _) in LIBRARIES {
        fixture_copy(
            dir.path(),
            *fault,
            &format!("bad-{}", fault.name().replace('_', "-")),
        );
    }
    let good = fixture_copy(dir.path(), Fault::None, "zz-good");
    let whole = std::fs::read(&good).unwrap();
    std::fs::write(dir.path().join("truncated.so"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(dir.path().join("text.so"), "this is not a library\n").unwrap();

    let (code, list, log) = json(structures(dir.path()).args(["plugins", "list"]));
    assert_eq!(code, 0, "{log}");
    let row = |file: &str| {
        let rows = list["plugins"].as_array().unwrap();
        let row = rows
            .iter()
            .find(|r| r["path"].as_str().unwrap().ends_with(file));
        row.unwrap_or_else(|| panic!("{file} is not listed"))
            .clone()
    };
    assert_eq!(row("truncated.so")["code"], "elf_truncated");
    assert_eq!(row("text.so")["code"], "not_elf");
    for (fault, code) in LIBRARIES {
        let file = format!("bad-{}.so", fault.name().replace('_', "-"));
        assert_eq!(row(&file)["code"], *code, "{}", row(&file));
        assert_eq!(row(&file)["outcome"], "refused");
    }
    assert_eq!(row("zz-good.so")["outcome"], "loaded");

    let late = [
        "--structures",
        "decoder_ffn",
        "--rounds",
        "7",
        "--iters",
        "10",
    ];
    let (_, receipt, log) = attach(dir.path(), &late);
    let units = receipt["units"].as_array().unwrap();
    for (id, code) in &expected {
        let mine: Vec<&Json> = units
            .iter()
            .filter(|u| u["plugin"] == id.as_str())
            .collect();
        assert_eq!(mine.len(), 1, "{id} is judged once: {mine:?}\n{log}");
        assert_eq!(mine[0]["outcome"], "refused", "{id}");
        assert_eq!(mine[0]["code"], *code, "{id}: {}", mine[0]["reason"]);
    }
    let active: Vec<&str> = receipt["seats"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["plugin"].as_str().unwrap())
        .collect();
    assert!(
        active.iter().all(|id| !id.starts_with("bad-")),
        "{active:?}"
    );
    assert_eq!(receipt["control"]["detach_identical"], true);
}

#[test]
fn a_good_fixture_passes_the_same_gates() {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::None, "good");
    let (code, receipt, log) = attach(dir.path(), &["--min-speedup", "0"]);
    assert_eq!(code, 0, "{log}");
    assert!(receipt["units"]
        .as_array()
        .unwrap()
        .iter()
        .all(|u| u["outcome"] == "activated"));
    assert_eq!(receipt["ledger"]["clean"], true);
}

#[test]
fn two_plugins_of_one_id_are_both_refused_and_name_each_other() {
    let dir = tempfile::tempdir().unwrap();
    fixture_copy(dir.path(), Fault::None, "twin");
    structures_fixture_plugin::fixture_copy_as(dir.path(), "other.so", Fault::Scaled, "twin");
    let (code, list, _) = json(structures(dir.path()).args(["plugins", "list"]));
    assert_eq!(code, 0);
    for row in list["plugins"].as_array().unwrap() {
        assert_eq!(row["code"], "id_duplicate", "{row}");
    }
}
