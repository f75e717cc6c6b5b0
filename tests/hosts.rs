//! Every structure on every host family: found, bound through the yardstick, gated and active. `docs/hosts.md` is
//! written from the receipts of these runs and compared with them; `STRUCTURES_UPDATE_DOCS=1` writes it anew.
//!
//! The hosts are the cases of `fixtures/families`, each with a wider sibling (`wide.json`: config and shapes) whose
//! weights are drawn here: projections large enough for the catalog's floors, and no file of megabytes. What they say
//! makes no sense; both arms say the same, and that is what a gate asks.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{json, Value as Json};
use structures_models::generate::{advance, greedy};
use structures_models::Model;
use structures_tests::{json, plugins, root, structures};

const SCHEMES: [&str; 2] = ["w8a16_decode", "fp8_static"];
const UPDATE: &str = "STRUCTURES_UPDATE_DOCS";

#[test]
fn structures_are_active_on_every_host_as_the_document_says() {
    let dir = plugins(&["portable"]);
    let mut hosts = Vec::new();
    for case in cases() {
        let work = tempfile::tempdir().unwrap();
        let model = work.path().join("model");
        wide(&case, &model);
        let samples = work.path().join("samples.jsonl");
        std::fs::write(&samples, tokens()).unwrap();
        let name = case.file_name().unwrap().to_string_lossy().into_owned();
        let mut host = Host::new(&name);
        for scheme in SCHEMES {
            let mut attach = structures(dir.path());
            attach
                .arg("attach")
                .arg(&model)
                .args(["--scheme", scheme, "--rounds", "3", "--iters", "1"])
                // The clock of a busy machine decides nothing here.
                .args(["--min-speedup", "0"])
                .arg("--samples")
                .arg(&samples)
                .arg("--receipt-dir")
                .arg(work.path());
            let (code, receipt, log) = json(&mut attach);
            assert_eq!(code, 0, "{name} {scheme}: {receipt:#}\n{log}");
            host.add(scheme, &receipt);
        }
        hosts.push(host);
    }
    let text = document(&hosts);
    let path = root().join("docs/hosts.md");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == text,
        "docs/hosts.md is not what the receipts say; {UPDATE}=1 writes it:\n{text}"
    );
}

/// Through the program: a prompt longer than every window goes on as it would without a cache, and what the context
/// cannot hold is refused with the numbers, the prompt or what is asked for.
#[test]
fn generation_passes_windows_and_ends_with_the_context() {
    let dir = plugins(&[]);
    for case in cases() {
        let work = tempfile::tempdir().unwrap();
        let model = work.path().join("model");
        wide(&case, &model);
        let name = case.file_name().unwrap().to_string_lossy();
        let run = |prompt: &str, new: usize| {
            let mut generate = structures(dir.path());
            generate.arg("generate").arg(&model);
            generate.args(["--prompt", prompt, "--max-new-tokens", &new.to_string()]);
            json(&mut generate)
        };
        let text = "In the beginning God created the heaven and the earth. ";
        let (code, document, log) = run(&text.repeat(3), 10);
        assert_eq!(code, 0, "{name}: {document}\n{log}");
        let made: Vec<u32> = serde_json::from_value(document["tokens"].clone()).unwrap();
        let host = Model::open(&model).unwrap();
        let config = host.config();
        let tokenizer = host.tokenizer().unwrap();
        let mut tokens = tokenizer.encode(&text.repeat(3), true).unwrap();
        let (prompt, max) = (tokens.len(), config.max_positions);
        assert_eq!(document["prompt_tokens"], prompt, "{name}");
        let windows = config.windows.iter().flatten();
        assert!(windows.max().is_none_or(|w| *w < prompt), "{name}");
        assert!(!made.is_empty(), "{name}: {document}");
        let plan = host.session.host_plan();
        for token in made {
            let mut state = host.session.new_state(1, tokens.len());
            let scores = advance(&host, &plan, &mut state, &tokens, None).unwrap();
            assert_eq!(greedy(&scores).unwrap(), token, "{name}: {tokens:?}");
            tokens.push(token);
        }
        let long = tokenizer.encode(&text.repeat(40), true).unwrap().len();
        assert!(long > max, "{name}: {long}");
        for (times, prompt, new) in [(3, prompt, max), (40, long, 1)] {
            let (code, document, _) = run(&text.repeat(times), new);
            assert_eq!(
                (code, &document["error"]["code"]),
                (1, &json!("context_full"))
            );
            let message = document["error"]["message"].to_string();
            let all = prompt + new;
            let numbers = format!("{prompt} tokens and {new} new ones make {all}");
            assert!(message.contains(&numbers), "{name}: {message}");
            assert!(
                message.contains(&format!("at most {max}")),
                "{name}: {message}"
            );
            assert!(message.contains("shorten the prompt"), "{name}: {message}");
        }
    }
}

fn cases() -> Vec<PathBuf> {
    let mut cases: Vec<PathBuf> = std::fs::read_dir(root().join("tests/fixtures/families"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.join("wide.json").is_file())
        .collect();
    cases.sort();
    cases
}

/// What one host's receipts say.
struct Host {
    model_type: String,
    name: String,
    /// structure -> span -> scheme -> seats.
    active: BTreeMap<String, BTreeMap<String, BTreeMap<String, usize>>>,
    /// structure -> reasons, layers left out.
    narrower: BTreeMap<String, BTreeSet<String>>,
}

impl Host {
    fn new(name: &str) -> Self {
        Host {
            model_type: String::new(),
            name: name.into(),
            active: BTreeMap::new(),
            narrower: BTreeMap::new(),
        }
    }

    fn add(&mut self, scheme: &str, receipt: &Json) {
        let text = |v: &Json| v.as_str().unwrap_or_default().to_string();
        self.model_type = text(&receipt["checkpoint"]["architecture"]);
        let active: Vec<&Json> = receipt["seams_active"].as_array().unwrap().iter().collect();
        assert!(!active.is_empty(), "{}: nothing is active", self.name);
        assert_eq!(receipt["ledger"]["clean"], true, "{}", self.name);
        for seat in receipt["seats"].as_array().unwrap() {
            if !active.contains(&&seat["key"]) {
                continue;
            }
            let structure = text(&seat["structure"]);
            let spans = self.active.entry(structure.clone()).or_default();
            let schemes = spans.entry(text(&seat["span"])).or_default();
            *schemes.entry(scheme.into()).or_default() += 1;
            for note in seat["note"].as_array().into_iter().flatten() {
                let reasons = self.narrower.entry(structure.clone()).or_default();
                reasons.insert(without_numbers(&text(note)));
            }
        }
    }
}

/// `model.layers.3.mlp` -> `model.layers.{i}.mlp`, so that equal layers say one thing.
fn without_numbers(text: &str) -> String {
    let parts = text.split('.').map(|part| {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
        let number = rest.len() < part.len() && !rest.starts_with(char::is_alphanumeric);
        match number {
            true => format!("{{i}}{rest}"),
            false => part.to_string(),
        }
    });
    parts.collect::<Vec<_>>().join(".")
}

fn document(hosts: &[Host]) -> String {
    let structures: BTreeSet<&str> = hosts
        .iter()
        .flat_map(|h| h.active.keys().map(String::as_str))
        .collect();
    let mut out = String::from(
        "# Structures and hosts\n\n\
         Which structure was active on which host family, from the receipts of `tests/hosts.rs`: models of two layers\n\
         with drawn weights, the yardstick plugin, every unit judged and the clock left out. Written by\n\
         `STRUCTURES_UPDATE_DOCS=1 cargo nextest run --release -p structures-tests --test hosts`, not by hand.\n\n\
         A cell names the span that was bound and how many seats of it were active; where not under both schemes, the\n\
         scheme. An empty cell: the host has no such place, or its owner is another structure.\n\n",
    );
    let head: Vec<&str> = structures.iter().copied().collect();
    writeln!(out, "| host | `model_type` | {} |", head.join(" | ")).unwrap();
    writeln!(out, "|---|---|{}", "---|".repeat(head.len())).unwrap();
    for host in hosts {
        let cells: Vec<String> = head.iter().map(|s| cell(host.active.get(*s))).collect();
        writeln!(
            out,
            "| {} | `{}` | {} |",
            host.name,
            host.model_type,
            cells.join(" | ")
        )
        .unwrap();
    }
    out.push_str("\n## Why a wider span does not hold\n\n");
    for host in hosts {
        for (structure, reasons) in &host.narrower {
            for reason in reasons {
                writeln!(out, "- {}, {structure}: {reason}", host.name).unwrap();
            }
        }
    }
    out
}

fn cell(spans: Option<&BTreeMap<String, BTreeMap<String, usize>>>) -> String {
    let each = spans.into_iter().flatten().map(|(span, schemes)| {
        let counts: BTreeSet<usize> = schemes.values().copied().collect();
        let everywhere = schemes.len() == SCHEMES.len() && counts.len() == 1;
        let shown: Vec<String> = match everywhere {
            true => counts.iter().map(usize::to_string).collect(),
            false => schemes.iter().map(|(s, n)| format!("{n} {s}")).collect(),
        };
        format!("`{span}` {}", shown.join(", "))
    });
    each.collect::<Vec<_>>().join("; ")
}

/// Four samples longer than every window of the hosts.
fn tokens() -> String {
    let mut draw = Draw(7);
    (0..4)
        .map(|_| {
            let tokens: Vec<u32> = (0..40).map(|_| 3 + (draw.one() * 600.0) as u32).collect();
            format!("{}\n", json!({ "tokens": tokens }))
        })
        .collect()
}

/// Config and drawn weights: matrices by their input width, everything else near one.
fn wide(case: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    let text = std::fs::read_to_string(case.join("wide.json")).unwrap();
    let wide: Json = serde_json::from_str(&text).unwrap();
    std::fs::write(to.join("config.json"), wide["config"].to_string()).unwrap();
    // Samples are token ids; a tokenizer there must be.
    let tokenizer = structures_tests::demo().join("tokenizer.json");
    std::fs::copy(tokenizer, to.join("tokenizer.json")).unwrap();
    let mut draw = Draw(42);
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, shape) in wide["tensors"].as_object().unwrap() {
        let shape: Vec<usize> = shape
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_u64().unwrap() as usize)
            .collect();
        let from = data.len();
        let input = shape.last().copied().unwrap_or(1) as f32;
        for _ in 0..shape.iter().product() {
            let noise = 2.0 * draw.one() - 1.0;
            let value = match shape.len() {
                1 => 1.0 + 0.1 * noise,
                _ => noise * (3.0 / input).sqrt(),
            };
            data.extend(value.to_le_bytes());
        }
        let row = json!({"dtype": "F32", "shape": shape, "data_offsets": [from, data.len()]});
        header.insert(name.clone(), row);
    }
    let header = Json::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    std::fs::write(to.join("model.safetensors"), bytes).unwrap();
}

/// A sequence in 0..1 from a seed.
struct Draw(u64);

impl Draw {
    fn one(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u32 << 24) as f32
    }
}
