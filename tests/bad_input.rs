//! Bad input: each a message that names the item, expected and found, and what to do; the exit code of the contract;
//! nothing half-written.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{json as j, Map, Value as Json};
use structures_models::Checkpoint;
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

/// What a reader may take to find out that a checkpoint is none, however large it says it is.
const TO_SEE: u64 = 1 << 20;

const LAYER: &str = "model.layers.0.mlp.gate_proj.weight";

/// A header whose tensors lie one after another, and how many bytes they have.
fn header(tensors: &[(&str, &[u64])]) -> (Map<String, Json>, u64) {
    let mut at = 0;
    let rows = tensors.iter().map(|(name, dims)| {
        let end = at + dims.iter().product::<u64>() * 2;
        let row = j!({"dtype": "BF16", "shape": dims, "data_offsets": [at, end]});
        at = end;
        ((*name).to_string(), row)
    });
    let rows = rows.collect();
    (rows, at)
}

/// A safetensors file of this header and so many bytes of holes.
fn safetensors(path: &Path, text: &str, data: u64) {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    let size = bytes.len() as u64 + data;
    std::fs::write(path, bytes).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(size).unwrap();
}

/// Refused by the program with the exit code and the code, naming all of `facts`; and before memory was taken for it.
fn refused_at_sight(what: &str, path: &Path, facts: &[&str]) {
    let none = plugins(&[]);
    let (exit, document, log) = json(structures(none.path()).arg("discover").arg(path));
    assert_eq!(exit, 1, "{what}: {document}\n{log}");
    let error = &document["error"];
    assert!(
        !error["help"].as_str().unwrap_or("").is_empty(),
        "{what}: {document}"
    );
    let text = error["message"].as_str().unwrap();
    for fact in facts {
        assert!(
            text.contains(fact),
            "{what}: `{fact}` is missing in: {text}"
        );
    }
    let taken = allocation_counter::measure(|| {
        if let Ok(checkpoint) = Checkpoint::open(path) {
            assert!(checkpoint.agrees_with_config().is_err(), "{what}");
        }
    });
    assert!(
        taken.bytes_max < TO_SEE,
        "{what}: {} bytes",
        taken.bytes_max
    );
}

#[test]
fn every_damaged_checkpoint_is_refused_at_sight() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (weights, index) = ("model.safetensors", "model.safetensors.index.json");
    let config = j!({"model_type": "never-heard-of", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 100});
    std::fs::write(at("config.json"), config.to_string()).unwrap();
    let whole: [(&str, &[u64]); 2] = [
        ("model.embed_tokens.weight", &[100, 64]),
        (LAYER, &[128, 64]),
    ];
    let (good, size) = header(&whole);
    let of = |name: &str, key: &str, value: Json| {
        let mut rows = good.clone();
        rows[name][key] = value;
        Json::Object(rows).to_string()
    };
    let embed = "model.embed_tokens.weight";

    // The same files are fine as they are.
    let none = plugins(&[]);
    safetensors(&at(weights), &Json::Object(good.clone()).to_string(), size);
    let (exit, document, _) = json(structures(none.path()).arg("discover").arg(dir.path()));
    assert_eq!(
        (exit, &document["executable"]),
        (0, &Json::Bool(false)),
        "{document}"
    );

    let twice = Json::Object(good.clone()).to_string();
    let twice = format!(
        "{},\"{LAYER}\":{}}}",
        &twice[..twice.len() - 1],
        good[LAYER]
    );
    let headers: [(&str, String, &[&str]); 9] = [
        (
            "unknown dtype",
            of(LAYER, "dtype", j!("Q7")),
            &[LAYER, "`Q7`", "BF16"],
        ),
        (
            "negative dims",
            of(LAYER, "shape", j!([-128, 64])),
            &[LAYER, "-128"],
        ),
        (
            "huge dims",
            of(LAYER, "shape", j!([1u64 << 62, 64])),
            &[LAYER, "4611686018427387904"],
        ),
        (
            "dims beyond any number",
            of(LAYER, "shape", j!([1u64 << 40, 1u64 << 40])),
            &[LAYER],
        ),
        ("a name twice", twice, &[LAYER]),
        (
            "overlapping data",
            of(LAYER, "data_offsets", j!([0, 16384])),
            &[embed, LAYER],
        ),
        (
            "data beyond the file",
            of(
                LAYER,
                "data_offsets",
                j!([1u64 << 50, (1u64 << 50) + 16384]),
            ),
            &[LAYER, "a file of at least"],
        ),
        (
            "data that ends before it begins",
            of(LAYER, "data_offsets", j!([16384, 0])),
            &[LAYER, "16384..0"],
        ),
        (
            "negative offsets",
            of(LAYER, "data_offsets", j!([-2, 16382])),
            &[LAYER, "-2"],
        ),
    ];
    for (what, text, facts) in &headers {
        safetensors(&at(weights), text, size);
        refused_at_sight(what, dir.path(), &[*facts, &[weights]].concat());
    }
    for (what, claimed) in [
        ("2^60 bytes of header", 1u64 << 60),
        ("all bytes of header", u64::MAX),
    ] {
        std::fs::write(at(weights), claimed.to_le_bytes()).unwrap();
        refused_at_sight(
            what,
            dir.path(),
            &[weights, "header length", &claimed.to_string()],
        );
    }
    // A sparse file that could hold such a header.
    safetensors(&at(weights), "{}", 1 << 40);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .open(at(weights))
        .unwrap();
    std::io::Write::write_all(&mut file, &(1u64 << 39).to_le_bytes()).unwrap();
    refused_at_sight(
        "2^39 bytes of header in a sparse file",
        dir.path(),
        &[weights, "header length"],
    );
    drop(file);

    // Configurations that contradict the tensors.
    safetensors(&at(weights), &Json::Object(good.clone()).to_string(), size);
    for (field, wrong) in [
        ("hidden_size", 4096u64),
        ("num_hidden_layers", 1 << 40),
        ("vocab_size", 1 << 60),
    ] {
        let mut bad = config.clone();
        bad[field] = wrong.into();
        std::fs::write(at("config.json"), bad.to_string()).unwrap();
        refused_at_sight(
            field,
            dir.path(),
            &["config.json", field, &wrong.to_string()],
        );
    }
    std::fs::write(at("config.json"), config.to_string()).unwrap();

    // Shards and their index.
    std::fs::remove_file(at(weights)).unwrap();
    let parts = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    for (part, rows) in parts.iter().zip([&whole[..1], &whole[1..]]) {
        let (rows, size) = header(rows);
        safetensors(&at(part), &Json::Object(rows).to_string(), size);
    }
    let map = |rows: &[(&str, &str)]| {
        let rows: Map<String, Json> = rows.iter().map(|(t, f)| ((*t).into(), j!(f))).collect();
        std::fs::write(at(index), j!({"weight_map": rows}).to_string()).unwrap();
    };
    let indices: [(&str, &[(&str, &str)], &[&str]); 5] = [
        (
            "an absent file",
            &[(embed, parts[0]), (LAYER, "gone.safetensors")],
            &["gone.safetensors", "no such file"],
        ),
        (
            "an absent tensor",
            &[(embed, parts[0]), (LAYER, parts[1]), ("ghost", parts[1])],
            &["`ghost`", parts[1]],
        ),
        (
            "a tensor in another file",
            &[(embed, parts[1]), (LAYER, parts[1])],
            &[embed],
        ),
        (
            "a tensor that it does not name",
            &[(embed, parts[0]), ("model.norm.weight", parts[1])],
            &["model.norm.weight"],
        ),
        (
            "a file elsewhere",
            &[(embed, "../x.safetensors"), (LAYER, parts[1])],
            &["../x.safetensors"],
        ),
    ];
    for (what, rows, facts) in indices {
        map(rows);
        refused_at_sight(what, dir.path(), &[facts, &[index]].concat());
    }
    map(&[(embed, parts[0]), (LAYER, parts[1])]);
    std::fs::remove_file(at(parts[1])).unwrap();
    refused_at_sight(
        "a missing shard",
        dir.path(),
        &[parts[1], index, "no such file"],
    );
    std::fs::remove_file(at(index)).unwrap();
    refused_at_sight(
        "a missing shard without an index",
        dir.path(),
        &[parts[1], "no such file"],
    );
}

/// A GGUF from words of 4 and 8 bytes and texts.
#[derive(Default)]
struct Gguf(Vec<u8>);

impl Gguf {
    fn new(tensors: u64, pairs: u64) -> Self {
        Gguf(b"GGUF".to_vec()).four(3).eight(tensors).eight(pairs)
    }
    fn four(mut self, n: u32) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }
    fn eight(mut self, n: u64) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }
    fn text(self, s: &str) -> Self {
        let mut out = self.eight(s.len() as u64);
        out.0.extend(s.as_bytes());
        out
    }
    /// One tensor `w` of two dims.
    fn tensor(self, dims: [u64; 2], kind: u32, at: u64) -> Self {
        self.text("w")
            .four(2)
            .eight(dims[0])
            .eight(dims[1])
            .four(kind)
            .eight(at)
    }
    fn padded(mut self, data: usize) -> Self {
        let size = self.0.len().next_multiple_of(32) + data;
        self.0.resize(size, 0);
        self
    }
}

#[test]
fn every_damaged_gguf_is_refused_at_sight() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let huge = 1u64 << 60;
    let architecture = |tensors: u64, more: u64| {
        Gguf::new(tensors, 1 + more)
            .text("general.architecture")
            .four(8)
            .text("odd")
    };
    let list = |depth: usize| {
        let open = architecture(0, 1).text("a.list").four(9);
        (0..depth).fold(open, |g, _| g.four(9).eight(1))
    };
    let none = plugins(&[]);
    std::fs::write(
        &path,
        architecture(1, 0).tensor([64, 2], 0, 0).padded(512).0,
    )
    .unwrap();
    let (exit, document, _) = json(structures(none.path()).arg("discover").arg(&path));
    assert_eq!(exit, 0, "{document}");
    let cases: [(&str, Gguf, &[&str]); 13] = [
        ("2^60 tensors", Gguf::new(huge, 0), &["tensor"]),
        ("2^60 pairs", Gguf::new(0, huge), &["1152921504606846976"]),
        (
            "a text of 2^60 bytes",
            Gguf::new(0, 1).eight(huge),
            &["1152921504606846976"],
        ),
        (
            "a list of 2^60 numbers",
            architecture(0, 1)
                .text("a.list")
                .four(9)
                .four(4)
                .eight(huge),
            &["a.list"],
        ),
        (
            "lists in lists",
            list(100_000).four(4).eight(0),
            &["a.list"],
        ),
        (
            "alignment 0",
            architecture(1, 1)
                .text("general.alignment")
                .four(4)
                .four(0)
                .tensor([64, 2], 0, 0)
                .padded(512),
            &["general.alignment"],
        ),
        (
            "alignment 3",
            architecture(1, 1)
                .text("general.alignment")
                .four(4)
                .four(3)
                .tensor([64, 2], 0, 0)
                .padded(512),
            &["general.alignment"],
        ),
        (
            "alignment 2^31",
            architecture(1, 1)
                .text("general.alignment")
                .four(4)
                .four(1 << 31)
                .tensor([64, 2], 0, 0)
                .padded(512),
            &["general.alignment"],
        ),
        (
            "an offset beyond the file",
            architecture(1, 0).tensor([64, 2], 0, huge).padded(512),
            &["`w`"],
        ),
        (
            "an offset between",
            architecture(1, 0).tensor([64, 2], 0, 7).padded(512),
            &["`w`"],
        ),
        (
            "huge dims",
            architecture(1, 0).tensor([1 << 62, 64], 0, 0).padded(512),
            &["`w`"],
        ),
        (
            "an unknown type",
            architecture(1, 0).tensor([64, 2], 99, 0).padded(512),
            &["`w`", "99"],
        ),
        (
            "a name twice",
            architecture(2, 0)
                .tensor([8, 2], 0, 0)
                .tensor([8, 2], 0, 64)
                .padded(512),
            &["`w`"],
        ),
    ];
    for (what, file, facts) in cases {
        std::fs::write(&path, &file.0).unwrap();
        let bytes = file.0.len() as u64;
        assert!(bytes < TO_SEE * 2, "{what}");
        refused_at_sight(what, &path, &[facts, &["m.gguf"]].concat());
    }
}
