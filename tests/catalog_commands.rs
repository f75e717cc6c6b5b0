//! `catalog list`, `show` and `verify` through the program: versions, pins, and every bad file of a directory.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::fs;
use std::path::Path;

use serde_json::Value as Json;
use structures_tests::{json, plugins, structures};

fn run(args: &[&str]) -> (i32, Json) {
    let none = plugins(&[]);
    let (code, document, _) = json(structures(none.path()).args(args));
    (code, document)
}

fn verify(dir: &Path) -> (i32, Json) {
    run(&["catalog", "verify", dir.to_str().unwrap()])
}

fn put(dir: &Path, name: &str, bytes: &[u8]) {
    fs::create_dir_all(dir.join(name)).unwrap();
    fs::write(dir.join(name).join("structure.yaml"), bytes).unwrap();
}

const GOOD: &str = "name: mine
version: 1
boundary:
  inputs: [{name: x, dims: [M, D]}]
  outputs: [{name: y, dims: [M, D]}]
weights: {w: {dims: [D, D], layout: out_in}}
points: [h]
gates: {parity: [cosine]}
slots: {at: module, roles: {q: q_proj}, weights: {w: q.weight}}
dataflow:
  spans: {s: {in: [x], out: [y]}}
  ops:
    - {let: h, op: scale, in: [x]}
    - {let: y, op: linear, in: [h, w]}
";

/// Name, document, code, line and column.
type Planted = (&'static str, Vec<u8>, &'static str, (u64, u64));

#[test]
fn all_entries_are_listed_with_kind_version_and_digest() {
    let (code, list) = run(&["catalog", "list"]);
    assert_eq!(code, 0);
    let rows = list["structures"].as_array().unwrap();
    let newest = |kind: &str| {
        let mut names: Vec<&str> = rows
            .iter()
            .filter(|r| r["kind"] == kind)
            .map(|r| r["name"].as_str().unwrap())
            .collect();
        names.dedup();
        names.len()
    };
    assert_eq!((newest("region"), newest("stage_pipeline")), (14, 3));
    for row in rows {
        assert_eq!(row["digest"].as_str().map(str::len), Some(64), "{row}");
        let expected = match row["kind"].as_str() {
            Some("region") => "native",
            _ => "host",
        };
        assert_eq!(row["reference"], expected, "{row}");
    }
    let versions = |name: &str| -> Vec<u64> {
        let of = rows.iter().filter(|r| r["name"] == name);
        of.filter_map(|r| r["version"].as_u64()).collect()
    };
    assert_eq!(versions("vision_ffn"), [1, 2]);
    let retired = list["retired"].as_array().unwrap();
    let note = |r: &Json| !r["note"].as_str().unwrap().is_empty();
    assert!(!retired.is_empty() && retired.iter().all(note), "{list}");
}

#[test]
fn pins_retired_versions_and_pipelines() {
    for (pin, code, error) in [
        ("vision_ffn", 0, ""),
        ("vision_ffn@1", 0, ""),
        ("vision_ffn@7", 3, "entry_unknown"),
        ("vision_ffm", 3, "entry_unknown"),
        ("modnorm_qkv_chain@2", 3, "entry_retired"),
        ("vla_tick_pipeline@1", 3, "entry_retired"),
        ("vision_ffn@new", 2, "pin_invalid"),
    ] {
        let (found, document) = run(&["catalog", "show", pin]);
        assert_eq!(found, code, "{pin}: {document}");
        if code > 0 {
            assert_eq!(document["error"]["code"], error, "{pin}: {document}");
        }
    }
    let (_, document) = run(&["catalog", "show", "video_generation_pipeline"]);
    let shown = &document["structure"];
    assert_eq!(shown["family"], "cond_iter_pipeline");
    assert_eq!(shown["stages"].as_array().map(Vec::len), Some(5));
    assert_eq!(shown["stages"][3]["loop"]["fixed_shape"], false);
    assert!(shown.get("weights").is_none(), "{shown}");
}

#[test]
fn every_bad_file_is_told_with_code_file_line_and_column() {
    let dir = tempfile::tempdir().unwrap();
    let edited = |name: &str, from: &str, to: &str| {
        let text = GOOD.replace("name: mine", &format!("name: {name}"));
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1).into_bytes()
    };
    let mut no_text = edited("p", "cosine", "cosine");
    let at = no_text.windows(6).position(|w| w == b"cosine").unwrap();
    no_text[at] = 0xff;
    let mut bomb = "name: o\na0: &a0 [x, x]\n".to_string();
    for i in 1..40 {
        bomb += &format!("a{i}: &a{i} [*a{0}, *a{0}]\n", i - 1);
    }
    let cases: Vec<Planted> = vec![
        (
            "a",
            edited("a", "points", "pionts"),
            "entry_invalid",
            (7, 1),
        ),
        (
            "b",
            edited("b", "version: 1", "version: one"),
            "entry_invalid",
            (2, 10),
        ),
        (
            "c",
            edited("c", "{name: x", "{name: no"),
            "entry_invalid",
            (4, 19),
        ),
        (
            "d",
            edited("d", "points: [h]", "points: [h]\npoints: [h]"),
            "entry_invalid",
            (8, 1),
        ),
        (
            "e",
            edited("e", "  spans:", "\tspans:"),
            "entry_invalid",
            (11, 1),
        ),
        (
            "f",
            edited("f", "name: f", "\u{feff}name: f"),
            "entry_invalid",
            (1, 1),
        ),
        (
            "g",
            edited("g", "points: [h]", "points: [g]"),
            "entry_invalid",
            (7, 10),
        ),
        (
            "h",
            edited("h", "dims: [D, D]", "dims: [D, D/0]"),
            "entry_invalid",
            (6, 25),
        ),
        (
            "i",
            edited("i", "points: [h]", "points: [h, h]"),
            "entry_invalid",
            (7, 13),
        ),
        (
            "j",
            edited("k", "points: [h]", "points: [h]"),
            "entry_name_mismatch",
            (1, 7),
        ),
        (
            "k",
            edited("k", "points: [h]", "kernel: fast"),
            "key_forbidden",
            (7, 1),
        ),
        ("o", bomb.into_bytes(), "entry_invalid", (2, 9)),
        ("p", no_text, "entry_invalid", (8, 18)),
    ];
    put(dir.path(), "mine", GOOD.as_bytes());
    for (name, bytes, _, _) in &cases {
        put(dir.path(), name, bytes);
    }
    put(dir.path(), "q", b"");
    let file = fs::File::create(dir.path().join("q/structure.yaml")).unwrap();
    file.set_len(50 << 20).unwrap();
    let (code, document) = verify(dir.path());
    assert_eq!(code, 1, "{document}");
    let errors = document["errors"].as_array().unwrap();
    assert_eq!(errors.len(), cases.len() + 1, "{document}");
    assert_eq!(document["error"], errors[0]);
    for ((name, _, code, (line, column)), error) in cases.iter().zip(errors) {
        let file = dir.path().join(name).join("structure.yaml");
        assert_eq!(error["code"], *code, "{name}: {error}");
        assert_eq!(error["file"].as_str(), file.to_str(), "{name}: {error}");
        assert_eq!(error["line"].as_u64(), Some(*line), "{name}: {error}");
        assert_eq!(error["column"].as_u64(), Some(*column), "{name}: {error}");
        assert!(!error["help"].as_str().unwrap().is_empty());
    }
    let large = errors.last().unwrap();
    assert!(
        large["message"]
            .as_str()
            .unwrap()
            .contains("52428800 bytes"),
        "{large}"
    );
    // What is good in there was checked all the same.
    let checks = document["checks"].as_array().unwrap();
    assert!(checks
        .iter()
        .any(|c| c["structure"] == "mine" && c["ok"] == true));
    assert_eq!(document["failed"].as_u64(), Some(errors.len() as u64));
}

#[test]
fn a_good_directory_and_an_exact_copy_pass_and_a_changed_copy_does_not() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "mine", GOOD.as_bytes());
    let entry = structures_tests::root().join("catalog/norm_fused/structure.yaml");
    let text = fs::read_to_string(&entry).unwrap();
    put(dir.path(), "norm_fused", text.as_bytes());
    let (code, document) = verify(dir.path());
    assert_eq!(code, 0, "{document}");
    put(
        dir.path(),
        "norm_fused",
        format!("{text}# a comment\n").as_bytes(),
    );
    let (code, document) = verify(dir.path());
    assert_eq!(code, 1);
    let message = document["errors"][0]["message"].as_str().unwrap();
    assert!(
        message.contains("a version above it is needed"),
        "{message}"
    );
    let (code, document) = verify(Path::new("/nowhere/at/all"));
    assert_eq!(
        (code, &document["error"]["code"]),
        (1, &"entry_unreadable".into())
    );
    let (code, document) = verify(tempfile::tempdir().unwrap().path());
    assert_eq!(
        (code, &document["error"]["code"]),
        (1, &"entry_unreadable".into())
    );
}
