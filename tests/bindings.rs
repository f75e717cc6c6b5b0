//! Binding files through the program: list, show, validate, and a directory of the user's.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::Path;

use structures_tests::{json, plugins, root, structures};
use tempfile::TempDir;

fn directory(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn run(args: &[&str]) -> (i32, serde_json::Value, String) {
    let none = plugins(&[]);
    json(structures(none.path()).args(args))
}

const MINE: &str = "binding: mine\nstructure: vision_ffn@2\ndims: {D: 8, F: 16, layers: 2}\n";

#[test]
fn list_and_show() {
    let (code, all, _) = run(&["bindings"]);
    assert_eq!((code, all["schema"].as_u64()), (0, Some(1)));
    let rows = all["bindings"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert!(names.is_sorted() && names.len() > 20, "{names:?}");
    let (code, some, _) = run(&["bindings", "list", "--structure", "vla_tick_pipeline"]);
    assert_eq!(code, 0);
    let rows = some["bindings"].as_array().unwrap();
    assert!(rows
        .iter()
        .all(|r| r["structure"] == "vla_tick_pipeline" && r["kind"] == "pipeline"));
    let tick = rows.iter().find(|r| r["name"] == "smolvla_tick").unwrap();
    assert_eq!(
        (&tick["coverage_declared"], &tick["built_in"]),
        (&false.into(), &true.into())
    );
    let (code, e, _) = run(&["bindings", "list", "--structure", "vision_fnn"]);
    assert_eq!(
        (code, e["error"]["code"].as_str()),
        (3, Some("entry_unknown"))
    );

    let (code, shown, _) = run(&["bindings", "show", "pi05_tick", "--require-coverage"]);
    assert_eq!(code, 0);
    let golden = root().join("host/bindings/tests/golden/pi05_tick.json");
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    assert_eq!(shown["manifest"], golden);
    let (code, e, _) = run(&["bindings", "show", "pi05_tock"]);
    assert_eq!(
        (code, e["error"]["code"].as_str()),
        (3, Some("binding_unknown"))
    );
    assert!(e["error"]["message"]
        .as_str()
        .unwrap()
        .contains("pi05_tick"));
    let (code, e, _) = run(&["bindings", "show", "smolvla_tick", "--require-coverage"]);
    assert_eq!((code, e["error"]["sub_code"].as_str()), (1, Some("V-07")));
}

#[test]
fn every_file_is_reported() {
    let dir = directory(&[
        (
            "bad.yaml",
            "binding: bad\nstructure: vision_ffn\nvariant: {activation: silu}\n",
        ),
        ("mine.yaml", MINE),
        ("other.yaml", MINE),
        ("llama.yaml", "binding: llama\nstructure: vision_ffn\n"),
    ]);
    let path = dir.path().to_str().unwrap();
    let (code, report, _) = run(&["bindings", "validate", path]);
    assert_eq!((code, report["failed"].as_u64()), (1, Some(2)));
    let rows = report["bindings"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    let bad = &rows[0];
    assert!(bad["path"].as_str().unwrap().ends_with("bad.yaml"));
    for (field, value) in [
        ("code", "binding_invalid"),
        ("sub_code", "V-23"),
        ("kind", "variant_invalid"),
    ] {
        assert_eq!(bad[field], value, "{bad}");
    }
    assert_eq!(
        (bad["line"].as_u64(), bad["column"].as_u64()),
        (Some(3), Some(23))
    );
    assert!(
        rows[1]["note"]
            .as_str()
            .unwrap()
            .contains("replaces: built-in"),
        "{}",
        rows[1]
    );
    assert_eq!(
        (&rows[2]["ok"], &rows[2]["binding"]),
        (&true.into(), &"mine".into())
    );
    assert_eq!(rows[3]["sub_code"], "V-03");
    let mine = dir.path().join("mine.yaml");
    let (code, report, _) = run(&["bindings", "validate", mine.to_str().unwrap()]);
    assert_eq!((code, report["failed"].as_u64()), (0, Some(0)));
    let own = root().join("bindings");
    let (code, report, _) = run(&[
        "bindings",
        "validate",
        own.to_str().unwrap(),
        "--require-coverage",
    ]);
    assert_eq!(
        (code, report["failed"].as_u64()),
        (1, Some(2)),
        "two ticks declare no coverage"
    );
    let (code, e, _) = run(&["bindings", "validate", "/nowhere/at/all.yaml"]);
    assert_eq!(
        (code, e["bindings"][0]["code"].as_str()),
        (1, Some("binding_unreadable"))
    );
}

fn heads(args: &[&str], path: Option<&Path>) -> usize {
    let none = plugins(&[]);
    let mut command = structures(none.path());
    command.args(["discover", "demo"]).args(args);
    if let Some(path) = path {
        command.env("STRUCTURES_BINDING_PATH", path);
    }
    let (code, found, stderr) = json(&mut command);
    assert_eq!(code, 0, "{stderr}");
    let seams = found["seams"].as_array().unwrap();
    seams.iter().filter(|s| s["source"] == "binding").count()
}

#[test]
fn a_users_directory_changes_what_is_found() {
    let llama = std::fs::read_to_string(root().join("bindings/llama.yaml")).unwrap();
    assert_eq!(heads(&[], None), 1);
    // On purpose: the head is somebody else's business now.
    let gone = llama.replace("model_types: [llama]", "model_types: [another]");
    let dir = directory(&[("llama.yaml", &format!("replaces: built-in\n{gone}"))]);
    assert_eq!(
        heads(&["--bindings", dir.path().to_str().unwrap()], None),
        0
    );
    assert_eq!(heads(&[], Some(dir.path())), 0);
    // By coincidence: refused.
    let dir = directory(&[("llama.yaml", &gone)]);
    let (code, e, _) = run(&[
        "discover",
        "demo",
        "--bindings",
        dir.path().to_str().unwrap(),
    ]);
    assert_eq!((code, e["error"]["sub_code"].as_str()), (1, Some("V-32")));
    // A parameter that the model lacks.
    let wrong = llama.replace("lm_head.weight", "head.weight");
    let dir = directory(&[("llama.yaml", &format!("replaces: built-in\n{wrong}"))]);
    let (code, e, _) = run(&[
        "discover",
        "demo",
        "--bindings",
        dir.path().to_str().unwrap(),
    ]);
    assert_eq!((code, e["error"]["sub_code"].as_str()), (1, Some("V-34")));
    let (code, e, _) = run(&["bindings", "--bindings", "/nowhere/at/all"]);
    assert_eq!((code, e["error"]["code"].as_str()), (2, Some("usage")));
}
