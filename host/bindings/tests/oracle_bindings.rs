//! `bindings.json` of the oracle: manifests, and documents that must be refused with the right word.
//!
//! Where this loader is stricter than the observed one, the expectation is derived from the document by the rule that
//! is stricter (`ours`), never from a case's name.

#![allow(clippy::unwrap_used)] // a test: a malformed fixture should end it

mod common;

use common::{oracle, OracleCatalog};
use serde_json::Value as Json;
use serde_yaml::Value as Yaml;
use structures_bindings::{parse, BindingError, Bindings, Body, Facts, Origin, Rule, Structures};
use structures_catalog::{Catalog, Kind};

/// Loads as the oracle does: by the name the document declares, unless the options give another.
fn load(text: &str, options: &Json, structures: &dyn Structures) -> Result<Json, BindingError> {
    let mut stem = None;
    let mut require = false;
    for (option, value) in options.as_object().unwrap() {
        match option.as_str() {
            "require_pipeline_coverage" => require = value.as_bool().unwrap(),
            // Whatever it is called: a word is the name the document is stored under, or asked for.
            other => {
                let name = value
                    .as_str()
                    .unwrap_or_else(|| panic!("an unknown option: {other}"));
                stem = std::path::Path::new(name)
                    .file_stem()
                    .and_then(|s| s.to_str());
            }
        }
    }
    let file = parse("document.yaml", stem, text, Origin::User, structures)?;
    if require {
        file.require_coverage()?;
    }
    Ok(file.body.manifest())
}

#[test]
fn documents_end_as_the_oracle_says() {
    documents(&OracleCatalog::new());
    documents(&Catalog::builtin().unwrap());
}

fn documents(structures: &dyn Structures) {
    let oracle = oracle();
    let kinds = oracle["refusal_kinds"].as_array().unwrap();
    let (mut accepted, mut stricter) = (0, Vec::new());
    for case in oracle["documents"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let text = case["yaml"].as_str().unwrap();
        let expect = case["expect"].as_str().unwrap();
        let found = load(text, &case["options"], structures);
        if expect != "ok" {
            assert!(
                kinds.contains(&case["expect"]),
                "{name}: {expect} is no kind of the oracle"
            );
            let e = found.expect_err(name);
            let rule = e.rule().unwrap_or_else(|| panic!("{name}: {e}"));
            assert_eq!(rule.kind(), expect, "{name}: {e}");
            assert_eq!(e.code(), "binding_invalid");
            assert!(rule.sub_code() <= "V-17", "{name}: {e}");
            continue;
        }
        match ours(text, structures) {
            Some(rule) => {
                let e = found.expect_err(name);
                assert_eq!(e.rule(), Some(rule), "{name}: {e}");
                stricter.push(format!("{name} ({rule})"));
            }
            None => {
                let manifest = found.unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(manifest, case["manifest"], "{name}");
                accepted += 1;
            }
        }
    }
    println!(
        "{accepted} accepted; stricter than observed: {}",
        stricter.join(", ")
    );
    assert!(accepted > 0);
}

/// Every kind of the oracle has a rule of ours, so no case of the same kind can be without a word.
#[test]
fn every_kind_of_the_oracle_is_a_rule() {
    for kind in oracle()["refusal_kinds"].as_array().unwrap() {
        let kind = kind.as_str().unwrap();
        let known = Rule::ALL
            .iter()
            .any(|r| r.kind() == kind && r.sub_code() <= "V-17");
        assert!(known, "{kind}");
    }
}

#[test]
fn bindings_of_the_oracle_load_with_their_manifests() {
    let structures = Catalog::builtin().unwrap();
    for case in oracle()["bindings"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let text = case["yaml"].as_str().unwrap();
        let file = parse("oracle.yaml", Some(name), text, Origin::User, &structures)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(file.body.manifest(), case["manifest"], "{name}");
        let with_coverage = match file.require_coverage() {
            Ok(()) => "ok",
            Err(e) => e.rule().unwrap().kind(),
        };
        assert_eq!(with_coverage, case["with_coverage_required"], "{name}");
    }
}

/// Where a binding of ours says something else than the observed one, and why: (binding, segment, observed, ours).
const CORRECTED: &[(&str, &str, &str, &str)] = &[
    // The feed-forward of the diffusion head is bound as a vision_ffn (groot_n16_dit); the list named decoder_ffn.
    (
        "groot_n16_pipeline",
        "dit_transformer",
        "decoder_ffn",
        "vision_ffn",
    ),
    // The same head.
    (
        "groot_n17_pipeline",
        "dit_transformer",
        "decoder_ffn",
        "vision_ffn",
    ),
];

#[test]
fn our_bindings_say_what_the_oracle_observed() {
    let bindings = Bindings::built_in(&Catalog::builtin().unwrap()).unwrap();
    let mut corrected = 0;
    for case in oracle()["bindings"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let binding = bindings.load_binding(name, false).unwrap();
        let mut ours = binding.manifest();
        let mut theirs = case["manifest"].clone();
        blank_seams(&mut ours);
        blank_seams(&mut theirs);
        for (_, segment, was, is) in CORRECTED.iter().filter(|(b, ..)| *b == name) {
            let segments = theirs["coverage"]["segments"].as_array_mut().unwrap();
            let one = segments.iter_mut().find(|s| s["name"] == *segment).unwrap();
            let list = one["structures"].as_array_mut().unwrap();
            *list.iter_mut().find(|s| *s == was).unwrap() = Json::from(*is);
            corrected += 1;
        }
        assert_eq!(ours, theirs, "{name}");
        // Sizes and variants are no part of a manifest; where the oracle has them, ours are the same.
        let their: Yaml = serde_yaml::from_str(case["yaml"].as_str().unwrap()).unwrap();
        let file = bindings.files().iter().find(|f| f.name == name).unwrap();
        if let Body::Region(region) = &file.body {
            for (symbol, size) in their["dims"].as_mapping().unwrap() {
                let size = size.as_u64().unwrap();
                match symbol.as_str().unwrap() {
                    "layers" => {
                        assert_eq!(region.layers, Some(structures_bindings::Size::Number(size)))
                    }
                    symbol => assert_eq!(region.sizes()[symbol], size, "{name} {symbol}"),
                }
            }
            for (axis, value) in their["variant"].as_mapping().into_iter().flatten() {
                let found = region.variant.get(axis.as_str().unwrap());
                assert_eq!(found.map(String::as_str), value.as_str(), "{name}");
            }
            let dtype = their["boundary_dtype"]
                .as_str()
                .unwrap()
                .replace("float", "f");
            assert_eq!(region.boundary_dtype.unwrap().word(), dtype, "{name}");
        }
    }
    println!("{corrected} corrections applied");
}

fn blank_seams(manifest: &mut Json) {
    for segment in manifest["coverage"]["segments"]
        .as_array_mut()
        .into_iter()
        .flatten()
    {
        segment["seam"] = Json::from("");
    }
}

/// The catalog knows what the oracle lists, at the version it lists: a newer one may stand beside it.
#[test]
fn the_catalog_agrees_with_the_oracle() {
    let catalog = Catalog::builtin().unwrap();
    let structures = OracleCatalog::new();
    for name in structures.names() {
        let theirs = structures.facts(name, None).unwrap();
        let version = Some(theirs.version);
        let ours = catalog.facts(name, version);
        let ours = ours.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(
            (ours.version, ours.kind),
            (theirs.version, theirs.kind),
            "{name}"
        );
        assert_eq!(ours.family, theirs.family, "{name}");
        let stages = |f: &Facts| -> Vec<(String, bool)> {
            f.stages
                .iter()
                .map(|s| (s.name.clone(), s.optional))
                .collect()
        };
        assert_eq!(stages(&ours), stages(&theirs), "{name}");
        assert_eq!(ours.embedded, theirs.embedded, "{name}");
        for (axis, values) in &theirs.axes {
            // A form's own choices are no part of an entry here.
            let Some(known) = ours.axes.get(axis) else {
                continue;
            };
            let missing = values.iter().find(|v| !known.contains(v));
            assert_eq!(missing, None, "{name}: {axis}");
        }
    }
}

/// The rule of this project that a document breaks although the observed loader accepted it.
fn ours(text: &str, structures: &dyn Structures) -> Option<Rule> {
    let Ok(doc) = serde_yaml::from_str::<Yaml>(text) else {
        return Some(Rule::Document); // such as a key that stands twice
    };
    let facts = structures
        .facts(doc["structure"].as_str().unwrap().trim(), None)
        .unwrap();
    let keys: &[&str] = match facts.kind {
        Kind::Region => &[
            "binding",
            "structure",
            "dims",
            "variant",
            "boundary_dtype",
            "m_profile",
            "weights_map",
            "points",
            "conditioning",
            "hosts",
            "replaces",
        ],
        Kind::StagePipeline => &[
            "binding",
            "structure",
            "stages",
            "cadences",
            "coverage",
            "hosts",
            "replaces",
        ],
    };
    let unknown = |m: &Yaml, keys: &[&str]| {
        let mut all = m.as_mapping().into_iter().flatten();
        all.any(|(k, _)| !k.as_str().is_some_and(|k| keys.contains(&k)))
    };
    if unknown(&doc, keys) {
        return Some(Rule::UnknownKey);
    }
    let body = [
        "seam",
        "capture",
        "eager_seam",
        "loop_steps",
        "noise_window",
        "outputs",
        "policy",
        "mutation_guard",
    ];
    let word = |v: &Yaml| v.as_str().is_some_and(|s| !s.trim().is_empty());
    for (_, stage) in doc["stages"].as_mapping().into_iter().flatten() {
        let texts = [
            "seam",
            "capture",
            "eager_seam",
            "noise_window",
            "mutation_guard",
        ];
        let bad_text = texts.iter().any(|k| stage.get(k).is_some_and(|v| !word(v)));
        let steps = |v: &Yaml| match v.as_u64() {
            Some(n) => n > 0,
            None => v.as_str().is_some_and(|s| s.trim().starts_with('@')),
        };
        let bad_steps = stage.get("loop_steps").is_some_and(|v| !steps(v));
        let policies = ["greedy", "greedy_or_verified_draft"];
        let bad_policy = stage
            .get("policy")
            .is_some_and(|v| !v.as_str().is_some_and(|p| policies.contains(&p.trim())));
        let bad_outputs = stage.get("outputs").is_some_and(|v| {
            !v.as_mapping()
                .is_some_and(|m| m.iter().all(|(k, v)| word(k) && word(v)))
        });
        if unknown(stage, &body) || bad_text || bad_steps || bad_policy || bad_outputs {
            return Some(Rule::StageField);
        }
    }
    let bound = |v: &Yaml| {
        v.as_str()
            .is_some_and(|s| doc["stages"].get(s.trim()).is_some())
    };
    if let Some(cadences) = doc.get("cadences") {
        let each = |v: &Yaml| match v.as_sequence() {
            Some(list) => !list.is_empty() && list.iter().all(bound),
            None => bound(v),
        };
        let listed = cadences
            .as_mapping()
            .is_some_and(|m| m.iter().all(|(_, v)| each(v)));
        if unknown(cadences, &["request", "observation", "tick", "replan"]) || !listed {
            return Some(Rule::Cadence);
        }
    }
    if doc.get("dims").is_some_and(|d| !good_dims(d, &facts)) {
        return Some(Rule::Dims);
    }
    for (axis, value) in doc["variant"].as_mapping().into_iter().flatten() {
        let values = axis.as_str().and_then(|a| facts.axes.get(a.trim()));
        let known = value
            .as_str()
            .zip(values)
            .is_some_and(|(v, all)| all.iter().any(|a| a == v.trim()));
        if !known {
            return Some(Rule::Variant);
        }
    }
    let dtypes = ["bf16", "f16", "f32", "bfloat16", "float16", "float32"];
    let dtype = doc.get("boundary_dtype");
    if dtype.is_some_and(|d| !d.as_str().is_some_and(|d| dtypes.contains(&d.trim()))) {
        return Some(Rule::Dtype);
    }
    None
}

fn good_dims(dims: &Yaml, facts: &Facts) -> bool {
    let known = |s: &str| s == "layers" || facts.symbols.iter().any(|k| k == s);
    let good = |(k, v): (&Yaml, &Yaml)| {
        k.as_str().is_some_and(|s| known(s.trim())) && v.as_u64().is_some_and(|n| n > 0)
    };
    dims.as_mapping()
        .is_some_and(|m| !m.is_empty() && m.iter().all(good))
}
