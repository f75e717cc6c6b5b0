//! The C sample on the demo model: listed, shown, probed, gated and replayed like any other backend.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value as Json;
use structures_tests::{json, plugins, structures, units, QUICK};

fn attach(dir: &Path, receipts: &Path, more: &[&str]) -> (i32, Json, String) {
    json(
        structures(dir)
            .args([
                "attach",
                "demo",
                "--scheme",
                "w8a16_decode",
                "--receipt-dir",
            ])
            .arg(receipts)
            .args(["--structures", "linear_proj", "--min-speedup", "0"])
            .args(QUICK)
            .args(more),
    )
}

#[test]
fn the_c_sample_is_listed_shown_and_probed_like_any_other() {
    let dir = plugins(&["c_sample", "portable"]);
    let show = |id: &str| {
        let (code, shown, log) = json(structures(dir.path()).args(["plugins", "show", id]));
        assert_eq!(code, 0, "{log}");
        shown["plugin"].clone()
    };
    let (c, rust) = (show("c_sample"), show("portable"));
    assert_eq!(
        (&c["outcome"], &c["role"]),
        (&"loaded".into(), &"reference".into())
    );
    let keys = |plugin: &Json| -> BTreeSet<String> {
        plugin.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(
        keys(&c),
        keys(&rust),
        "nobody sees which door it came through"
    );
    assert_eq!(
        (&c["panic"], &rust["panic"]),
        (&Json::Null, &"unwind".into())
    );

    let probe = ["probe", "--plugin", "c_sample", "--rows", "1,8"];
    let (code, probes, log) = json(structures(dir.path()).args(probe));
    assert_eq!(code, 0, "{log}");
    let rows = probes["probes"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "two forms at two row counts: {rows:?}");
    for row in rows {
        assert_eq!(row["outcome"], "ok", "{row}");
        for fact in ["declared", "probed", "launched"] {
            assert_eq!(row[fact], true, "{row}");
        }
    }
}

#[test]
fn the_c_sample_is_attached_by_pin_gated_and_replayed() {
    let dir = plugins(&["c_sample", "x86", "portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let pin = ["--pin", "linear_proj=c_sample"];
    let (code, receipt, log) = attach(dir.path(), receipts.path(), &pin);
    assert_eq!(code, 0, "{log}");
    let rows = units(&receipt, "linear_proj");
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["outcome"], "activated", "{}", rows[0]);
    assert_eq!(
        (&rows[0]["plugin"], &rows[0]["form"]),
        (&"c_sample".into(), &"w8a16_static".into())
    );
    assert_eq!(rows[0]["ledger"]["clean"], true);
    assert!(rows[0]["ledger"]["form_calls"].as_u64().unwrap() > 0);
    assert!(rows[0]["metrics"]["top1_agreement"].as_f64().unwrap() >= 0.9);

    let file = std::fs::read_dir(receipts.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let (code, text, log) = json(
        structures(dir.path())
            .args(["generate", "demo", "--prompt", "And God said"])
            .args(["--max-new-tokens", "8", "--receipt"])
            .arg(file.path()),
    );
    assert_eq!(code, 0, "{log}");
    assert_eq!(text["ledger"]["fallbacks"], 0, "{text}");
    assert!(text["ledger"]["form_calls"].as_u64().unwrap() > 0);
}

#[test]
fn the_c_sample_changes_nothing_for_who_did_not_ask() {
    let dir = plugins(&["c_sample", "portable"]);
    let receipts = tempfile::tempdir().unwrap();
    let (_, receipt, log) = attach(dir.path(), receipts.path(), &[]);
    let rows = units(&receipt, "linear_proj");
    // Both are yardsticks; the one that was there first is still tried first.
    assert_eq!(rows[0]["plugin"], "portable", "{log}");
}
