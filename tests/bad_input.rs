//! Bad input: each a message that names the item, expected and found, and what to do; the exit code of the contract;
//! nothing half-written.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value as Json;
use structures_tests::{demo, json, plugins, structures};

/// A copy of the demo model that a test may damage.
fn model() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("model");
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    (dir, to)
}

fn refused(command: &mut Command, exit: i32, code: &str, facts: &[&str]) {
    let (found, document, log) = json(command);
    assert_eq!(found, exit, "{document}\n{log}");
    assert_eq!(document["schema"], 1, "{document}");
    let error = &document["error"];
    assert_eq!(error["code"], code, "{document}");
    assert!(!error["help"].as_str().unwrap().is_empty(), "{document}");
    let text = format!("{} {}", error["message"], error["help"]);
    for fact in facts {
        assert!(text.contains(fact), "`{fact}` is missing in: {text}");
    }
}

fn generate(plugins: &Path, model: &Path) -> Command {
    let mut c = structures(plugins);
    c.arg("generate")
        .arg(model)
        .args(["--prompt", "x", "--max-new-tokens", "1"]);
    c
}

fn edit_config(model: &Path, edit: impl FnOnce(&mut Json)) {
    let path = model.join("config.json");
    let mut config: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
}

#[test]
fn checkpoints() {
    let none = plugins(&[]);
    let p = none.path();
    let missing = Path::new("no-such-model");
    refused(
        &mut generate(p, missing),
        1,
        "model_missing",
        &["no-such-model"],
    );

    let (_keep, m) = model();
    std::fs::remove_file(m.join("model.safetensors")).unwrap();
    let (code, document, _) = json(&mut generate(p, &m));
    assert_eq!(code, 1, "{document}");
    assert!(
        document["error"]["message"]
            .as_str()
            .unwrap()
            .contains("safetensors"),
        "{document}"
    );

    let (_keep, m) = model();
    let weights = m.join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 1000]).unwrap();
    let (code, document, _) = json(&mut generate(p, &m));
    assert_eq!(code, 1, "{document}");
    let text = document["error"]["message"].as_str().unwrap();
    assert!(text.contains("model.safetensors"), "{text}");

    let (_keep, m) = model();
    edit_config(&m, |c| c["intermediate_size"] = 769.into());
    let (code, document, _) = json(&mut generate(p, &m));
    assert_eq!(code, 1, "{document}");
    let text = document["error"]["message"].as_str().unwrap();
    for fact in ["proj", "769", "768"] {
        assert!(text.contains(fact), "{text}");
    }

    // Layers the config does not have are no detail to warn of.
    let (_keep, m) = model();
    edit_config(&m, |c| c["num_hidden_layers"] = 1.into());
    refused(
        &mut generate(p, &m),
        1,
        "tensor",
        &["model.layers.1.", "only layers below 1", "found layer 1"],
    );

    let (_keep, m) = model();
    edit_config(&m, |c| c["model_type"] = "gpt_unknown".into());
    let (code, document, _) = json(&mut generate(p, &m));
    assert_eq!(code, 1, "{document}");
    let text = document["error"]["message"].as_str().unwrap();
    for fact in ["gpt_unknown", "llama"] {
        assert!(text.contains(fact), "{text}");
    }

    // The last element of the file becomes NaN.
    let (_keep, m) = model();
    let weights = m.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let at = bytes.len() - 2;
    bytes[at..].copy_from_slice(&0x7fc0u16.to_le_bytes());
    std::fs::write(&weights, bytes).unwrap();
    let (code, document, _) = json(&mut generate(p, &m));
    assert_eq!(code, 1, "{document}");
    assert!(
        document["error"]["message"]
            .as_str()
            .unwrap()
            .to_lowercase()
            .contains("nan"),
        "{document}"
    );
}

#[test]
fn arguments() {
    let none = plugins(&[]);
    let p = none.path();
    let out = tempfile::tempdir().unwrap();
    refused(
        structures(p).args(["generate", "demo", "--prompt", ""]),
        2,
        "usage",
        &["prompt", "empty"],
    );
    for percentile in ["-1", "100.5", "nan"] {
        let file = out.path().join("spec.json");
        refused(
            structures(p)
                .args([
                    "calibrate",
                    "demo",
                    &format!("--percentile={percentile}"),
                    "-o",
                ])
                .arg(&file),
            2,
            "percentile_range",
            &["100"],
        );
        assert!(!file.exists(), "nothing is written");
    }
    refused(
        structures(p).args(["attach", "demo", "--scheme", "int3"]),
        2,
        "scheme_unknown",
        &["int3", "w8a16_decode"],
    );
    refused(
        structures(p).args(["attach", "demo", "--structures", "decoder_fnn"]),
        3,
        "entry_unknown",
        &["decoder_fnn", "decoder_ffn"],
    );
    refused(
        structures(p).args(["attach", "demo", "--floor", "beauty=1"]),
        2,
        "unknown_metric",
        &["beauty"],
    );
    refused(
        structures(p).args(["attach", "demo", "--pin", "x"]),
        2,
        "usage",
        &["STRUCTURE=PLUGIN"],
    );
    refused(
        structures(p).args(["attach", "demo", "--rounds", "0"]),
        2,
        "timing_invalid",
        &["0"],
    );
    for samples in ["0", "-1", "many"] {
        let switch = format!("--max-samples={samples}");
        let file = out.path().join("spec.json");
        let mut calibrate = structures(p);
        calibrate
            .args(["calibrate", "demo", &switch, "-o"])
            .arg(&file);
        refused(&mut calibrate, 2, "usage", &["--max-samples", "at least 1"]);
        assert!(!file.exists(), "nothing is written");
        refused(
            structures(p).args(["attach", "demo", &switch]),
            2,
            "usage",
            &["--max-samples", "at least 1"],
        );
    }
    let tree = out.path().join("no-such-tree.json");
    refused(
        structures(p).args(["discover", "--tree"]).arg(&tree),
        1,
        "io",
        &["no-such-tree.json", "--tree"],
    );
    refused(
        structures(p).args(["discover", "--tree", "/dev/zero"]),
        1,
        "io",
        &["/dev/zero", "--tree", "regular file"],
    );
    std::fs::write(&tree, "{").unwrap();
    refused(
        structures(p).args(["discover", "--tree"]).arg(&tree),
        1,
        "malformed",
        &["no-such-tree.json"],
    );
    refused(
        structures(p).args(["explain", "no-such-receipt.json"]),
        1,
        "io",
        &["no-such-receipt.json"],
    );
}

#[test]
fn samples() {
    let none = plugins(&[]);
    let p = none.path();
    let dir = tempfile::tempdir().unwrap();
    let calibrate = |samples: &Path| {
        let mut c = structures(p);
        c.args(["calibrate", "demo", "--samples"])
            .arg(samples)
            .arg("-o")
            .arg(dir.path().join("o"));
        c
    };
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    refused(
        &mut calibrate(&dir.path().join("gone.txt")),
        1,
        "samples_unreadable",
        &["gone.txt"],
    );
    refused(
        &mut calibrate(&file("empty.txt", "")),
        1,
        "no_samples",
        &["empty.txt"],
    );
    let bad = file("bad.jsonl", "{\"text\": \"fine\"}\n{\"tekst\": 1}\n");
    refused(
        &mut calibrate(&bad),
        1,
        "samples_invalid",
        &["bad.jsonl", "2"],
    );
    assert!(!dir.path().join("o").exists());
}

#[test]
fn plugin_directories() {
    let empty = plugins(&[]);
    let (code, list, _) = json(structures(empty.path()).args(["plugins", "list"]));
    assert_eq!((code, list["plugins"].as_array().unwrap().len()), (0, 0));
    let text = structures(empty.path())
        .args(["plugins", "list"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("--plugins"), "says what to do: {text}");
    // Wrong usage, as any other argument that names nothing; the files in a directory never are.
    let file = empty.path().join("a-file");
    std::fs::write(&file, "text").unwrap();
    for dir in [Path::new("no-such-dir"), &file] {
        let name = dir.to_str().unwrap();
        refused(
            structures(empty.path())
                .arg("--plugins")
                .arg(dir)
                .args(["plugins", "list"]),
            2,
            "usage",
            &["--plugins", name, "expected a directory"],
        );
    }
    let mut by_variable = structures(empty.path());
    by_variable.env("STRUCTURES_PLUGIN_PATH", empty.path().join("gone"));
    refused(
        by_variable.args(["plugins", "list"]),
        2,
        "plugins_unreadable",
        &["STRUCTURES_PLUGIN_PATH", "gone"],
    );
    std::fs::write(empty.path().join("text.so"), "no library").unwrap();
    let (code, list, _) = json(structures(empty.path()).args(["plugins", "list"]));
    assert_eq!((code, &list["plugins"][0]["code"]), (0, &"not_elf".into()));
}

#[test]
fn a_cache_that_cannot_be_written_has_its_own_code() {
    let dir = plugins(&["portable"]);
    let file = dir.path().join("occupied");
    std::fs::write(&file, "a file where a directory should be").unwrap();
    for command in [&["plugins", "list"][..], &["probe"]] {
        let mut c = structures(dir.path());
        c.env("STRUCTURES_CACHE_DIR", file.join("cache"));
        refused(
            c.args(command),
            1,
            "cache_unwritable",
            &["occupied", "STRUCTURES_CACHE_DIR"],
        );
    }
}

#[test]
fn a_place_that_cannot_be_written_is_known_before_the_work() {
    let dir = plugins(&["x86"]);
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("occupied");
    std::fs::write(&file, "a file where a directory should be").unwrap();
    for place in [file.clone(), file.join("deeper")] {
        let mut attach = structures(dir.path());
        attach.args(["attach", "demo", "--receipt-dir"]).arg(&place);
        let (code, document, log) = json(&mut attach);
        assert_eq!(
            (code, &document["error"]["code"]),
            (1, &Json::from("io")),
            "{document}"
        );
        let text = document["error"]["message"].as_str().unwrap();
        assert!(text.contains("occupied") && text.contains("--receipt-dir"));
        assert!(!log.contains("control"), "the work was begun: {log}");
    }
    for place in [out.path().join("no-such-dir/spec.json"), out.path().into()] {
        let mut calibrate = structures(dir.path());
        calibrate.args(["calibrate", "demo", "-o"]).arg(&place);
        let (code, document, log) = json(&mut calibrate);
        assert_eq!(
            (code, &document["error"]["code"]),
            (1, &Json::from("io")),
            "{document}"
        );
        let text = document["error"]["message"].as_str().unwrap();
        assert!(text.contains(place.to_str().unwrap()), "{text}");
        assert!(!log.contains("calibrate:"), "the work was begun: {log}");
    }
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 1);
}
