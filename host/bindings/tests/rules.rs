//! Every rule has a document that breaks it, and nothing else of it; and input that is no document at all.

#![allow(clippy::unwrap_used)] // a test that panics has failed

mod common;

use std::collections::BTreeSet;

use common::{check, OracleCatalog};
use structures_bindings::{parse, read, Bindings, Origin, Rule};

const REGION: &str = r#"binding: demo
structure: vision_ffn
dims: {D: 8, F: 32, layers: 2}
variant: {activation: gelu}
boundary_dtype: bf16
m_profile:
  encode: {m_class: medium, phase: encode}
weights_map:
  host:
    layout: out_in
    w_fc1: {from: "m.{i}.fc.weight", rows: [0, F]}
    b_fc1: {from: "m.{i}.fc.bias", rows: [0, F]}
    w_fc2: "m.{i}.fc2.weight"
    b_fc2: {const: zeros}
points:
  hidden_after_act: {module: "m.{i}.fc2", side: input}
conditioning:
  source: time
  projection: {weight: "m.{i}.dense.weight"}
  chunk_order: [scale, shift, gate]
  residual_gate: true
hosts:
  host: {module_path: "m.{i}", versions: ">=1,<2"}
"#;

const PIPELINE: &str = r#"binding: demo
structure: vla_tick_pipeline
stages:
  obs_encode: {seam: a, capture: eager, outputs: {cond_features: buffers}}
  action_denoise: {seam: b, loop_steps: "@a.steps", noise_window: n, policy: greedy, mutation_guard: shallow_copy}
cadences: {observation: obs_encode, tick: [obs_encode, action_denoise]}
hosts: {native: {}}
coverage:
  contract: complete_hot_path
  hot_path: [tower, loop]
  segments:
    - {name: tower, stage: obs_encode, classification: structure, seam: t, structures: [vision_ffn]}
    - {name: loop, stage: action_denoise, classification: control, seam: l}
"#;

const FAMILY: &str = r#"binding: demo
model_types: [m]
regions:
  - binding: demo_head
    structure: linear_proj@1
    dims: {layers: 1, K: "@hidden_size"}
    weights_map: {transformers: {layout: out_in, w: head.weight}}
    hosts: {transformers: {module_path: head}}
"#;

/// Rule, document, what is replaced, by what, and a part of the message.
#[rustfmt::skip]
const PLANTED: &[(Rule, &str, &str, &str, &str)] = &[
    (Rule::Document, REGION, "binding: demo", "binding: demo\nbinding: demo", "stands here twice"),
    (Rule::NotAMapping, FAMILY, FAMILY, "- a", "expected a mapping"),
    (Rule::NotAMapping, FAMILY, "regions:\n", "regions:\n  - word\n", "expected a region"),
    (Rule::MissingField, REGION, "binding: demo\n", "", "`binding` is missing"),
    (Rule::MissingField, REGION, "structure: vision_ffn\n", "", "`structure` is missing"),
    (Rule::MissingField, FAMILY, "    structure: linear_proj@1\n", "", "`structure` is missing"),
    (Rule::BlankField, REGION, "binding: demo", "binding: ' '", "blank"),
    (Rule::BlankField, REGION, "binding: demo", "binding: no", "quote it"),
    (Rule::BlankField, REGION, "structure: vision_ffn", "structure: 3", "the number 3"),
    (Rule::InvalidName, REGION, "binding: demo", "binding: ../demo", "`../demo`"),
    (Rule::InvalidName, FAMILY, "demo_head", "Head", "`Head`"),
    (Rule::UnknownStructure, REGION, "vision_ffn", "vision_fnn", "nearest: vision_ffn"),
    (Rule::UnknownStructure, REGION, "vision_ffn", "vision_ffn@9", "vision_ffn@9"),
    (Rule::RetiredStructure, REGION, "vision_ffn", "vision_ffn@1", "use version 2"),
    (Rule::InvalidPin, REGION, "vision_ffn", "vision_ffn@new", "NAME@VERSION"),
    (Rule::InvalidPin, REGION, "vision_ffn", "vision_ffn@0", "NAME@VERSION"),
    (Rule::CoverageOnRegion, REGION, "variant:", "coverage: {}\nvariant:", "belongs to pipelines"),
    (Rule::CoverageOnRegion, FAMILY, "    hosts:", "    coverage: {}\n    hosts:", "belongs to pipelines"),
    (Rule::StagesNotAMapping, PIPELINE, "stages:\n", "stages: eager\nother:\n", "expected a mapping"),
    (Rule::BlankStage, PIPELINE, "  obs_encode: {", "  ' ': {}\n  obs_encode: {", "blanks"),
    (Rule::BlankStage, PIPELINE, "  obs_encode: {", "  3: {}\n  obs_encode: {", "the number 3"),
    (Rule::UnknownStage, PIPELINE, "  obs_encode: {", "  zz: {}\n  after: {}\n  obs_encode: {", "after, zz"),
    (Rule::MissingStage, PIPELINE, "  obs_encode: {", "  readout: {", "obs_encode"),
    (Rule::StageNotAMapping, PIPELINE, "stages:\n", "stages:\n  readout:\n", "`readout`"),
    (Rule::CoverageNotAMapping, PIPELINE, "coverage:\n", "coverage: full\nother:\n", "expected a mapping"),
    (Rule::CoverageKey, PIPELINE, "  contract:", "  arch: a\n  contract:", "arch"),
    (Rule::Contract, PIPELINE, "complete_hot_path", "partial", "`partial`"),
    (Rule::Contract, PIPELINE, "  contract: complete_hot_path\n", "", "only contract"),
    (Rule::HotPath, PIPELINE, "hot_path: [tower, loop]", "hot_path: []", "not empty"),
    (Rule::HotPath, PIPELINE, "  hot_path: [tower, loop]\n", "", "found none"),
    (Rule::BlankHotPath, PIPELINE, "[tower, loop]", "[tower, '']", "blank"),
    (Rule::HotPathTwice, PIPELINE, "[tower, loop]", "[tower, ' tower']", "twice"),
    (Rule::Segments, PIPELINE, "  segments:\n", "  segments: []\nother:\n", "not empty"),
    (Rule::SegmentNotAMapping, PIPELINE, "  segments:\n", "  segments:\n    - tower\n", "expected a mapping"),
    (Rule::SegmentKey, PIPELINE, "seam: l}", "seam: l, device: d}", "device"),
    (Rule::BlankSegment, PIPELINE, "seam: l}", "seam: ' '}", "blank"),
    (Rule::BlankSegment, PIPELINE, ", seam: l}", "}", "`seam` is missing"),
    (Rule::BlankSegment, PIPELINE, "name: loop", "name: on", "quote it"),
    (Rule::SegmentTwice, PIPELINE, "name: loop", "name: tower", "twice"),
    (Rule::UnboundStage, PIPELINE, "stage: action_denoise", "stage: readout", "`readout` is not bound"),
    (Rule::Classification, PIPELINE, "classification: control", "classification: loop", "`loop`"),
    (Rule::StructuresNotAList, PIPELINE, "[vision_ffn]", "vision_ffn", "list of structures"),
    (Rule::BlankStructure, PIPELINE, "[vision_ffn]", "[vision_ffn, '']", "blank"),
    (Rule::StructureTwice, PIPELINE, "[vision_ffn]", "[vision_ffn, ' vision_ffn']", "twice"),
    (Rule::StructureSegmentEmpty, PIPELINE, ", structures: [vision_ffn]", "", "names the structures"),
    (Rule::StructuresNotAllowed, PIPELINE, "seam: l}", "seam: l, structures: [linear_proj]}", "names no structures"),
    (Rule::SegmentStructure, PIPELINE, "[vision_ffn]", "[vision_fnn]", "nearest: vision_ffn"),
    (Rule::PipelineEmbedded, PIPELINE, "[vision_ffn]", "[vla_tick_pipeline]", "do not nest"),
    (Rule::NotEmbedded, PIPELINE, "[vision_ffn]", "[cadence_static]", "does not embed"),
    (Rule::Unclassified, PIPELINE, "[tower, loop]", "[tower, loop, b, a]", "b, a"),
    (Rule::UnknownKey, REGION, "variant:", "notes: n\nvariant:", "`notes`"),
    (Rule::UnknownKey, PIPELINE, "hosts:", "dims: {D: 1}\nhosts:", "`dims`"),
    (Rule::UnknownKey, FAMILY, "model_types:", "structure: linear_proj\nmodel_types:", "`structure`"),
    (Rule::UnknownKey, FAMILY, "    hosts:", "    notes: n\n    hosts:", "`notes`"),
    (Rule::StageField, PIPELINE, "capture: eager", "graph: eager", "`graph`"),
    (Rule::StageField, PIPELINE, "seam: a", "seam: [a]", "a list"),
    (Rule::StageField, PIPELINE, "\"@a.steps\"", "0", "found 0"),
    (Rule::StageField, PIPELINE, "\"@a.steps\"", "ten", "`ten`"),
    (Rule::StageField, PIPELINE, "\"@a.steps\"", "\"@a..b\"", "@a..b"),
    (Rule::StageField, PIPELINE, "policy: greedy", "policy: random", "`random`"),
    (Rule::StageField, PIPELINE, "cond_features: buffers", "cond_features: ''", "blank"),
    (Rule::Cadence, PIPELINE, "observation:", "hour:", "`hour`"),
    (Rule::Cadence, PIPELINE, "observation: obs_encode", "observation: readout", "`readout`"),
    (Rule::Cadence, PIPELINE, "[obs_encode, action_denoise]", "[obs_encode, obs_encode]", "twice"),
    (Rule::Cadence, PIPELINE, "[obs_encode, action_denoise]", "[]", "an empty one"),
    (Rule::Dims, REGION, "D: 8", "Z: 8", "`Z`"),
    (Rule::Dims, REGION, "D: 8", "D: 0", "found 0"),
    (Rule::Dims, REGION, "D: 8", "D: eight", "`eight`"),
    (Rule::Dims, REGION, "D: 8", "D: \"@hidden_size\"", "a whole number from 1"),
    (Rule::Dims, REGION, "D: 8", "D: -8", "-8"),
    (Rule::Dims, REGION, "D: 8", "D: 99999999999999", "99999999999999"),
    (Rule::Dims, FAMILY, "@hidden_size", "@hidden size", "@NAME"),
    (Rule::Variant, REGION, "activation: gelu", "act: gelu", "`act`"),
    (Rule::Variant, REGION, "activation: gelu", "activation: silu", "`silu`"),
    (Rule::Dtype, REGION, "bf16", "f64", "`f64`"),
    (Rule::Weights, REGION, "    layout: out_in\n", "", "expected `layout`"),
    (Rule::Weights, REGION, "layout: out_in", "layout: in_out", "`in_out`"),
    (Rule::Weights, REGION, "b_fc2: {const: zeros}", "b_fc3: {const: zeros}", "`b_fc3`"),
    (Rule::Weights, REGION, "    b_fc2: {const: zeros}\n", "", "`b_fc2` is missing"),
    (Rule::Weights, REGION, "const: zeros", "const: twos", "`twos`"),
    (Rule::Weights, REGION, "const: zeros", "const: zeros, rows: [0, 1]", "a constant has no `rows`"),
    (Rule::Weights, REGION, "{const: zeros}", "{rows: [0, 1]}", "MODULE.PARAM"),
    (Rule::Weights, REGION, "m.{i}.fc2.weight", "m.{layer}.fc2.weight", "{i} as the only placeholder"),
    (Rule::Weights, REGION, "m.{i}.fc2.weight", "weight", "MODULE.PARAM"),
    (Rule::Weights, REGION, "fc.weight\", rows: [0, F]", "fc.weight\", rows: [0]", "1 elements"),
    (Rule::Weights, REGION, "fc.weight\", rows: [0, F]", "fc.weight\", rows: [0, G]", "`G`"),
    (Rule::Weights, REGION, "fc.weight\", rows: [0, F]", "fc.weight\", rows: [F, F]", "FROM below TO"),
    (Rule::Weights, REGION, "fc.weight\", rows: [0, F]", "fc.weight\", rows: [0, 2*F]", "the slot's 32 rows"),
    (Rule::Weights, REGION, "fc.weight\", rows: [0, F]", "fc.weight\", rows: [0, F/(D-8)]", "F / (D - 8)"),
    (Rule::Weights, REGION, "fc.weight\", rows: [0, F]", "fc.weight\", rows: [0, F +]", "expected"),
    (Rule::Weights, REGION, "fc.weight\", rows: [0, F]", "fc.weight\", rows: [0, F.in]", "`F.`"),
    (Rule::Weights, FAMILY, "layout: out_in", "layout: out_in_native", "expected layout out_in"),
    (Rule::Point, REGION, "hidden_after_act:", "nowhere:", "`nowhere`"),
    (Rule::Point, REGION, "side: input", "side: left", "`left`"),
    (Rule::Point, REGION, "module: \"m.{i}.fc2\"", "module: \"m..fc2\"", "joined by dots"),
    (Rule::HostEntry, REGION, "module_path: \"m.{i}\", ", "", "expected `module_path`"),
    (Rule::HostEntry, REGION, "module_path: \"m.{i}\"", "module_path: m", "{i} in the path"),
    (Rule::HostEntry, REGION, ">=1,<2", "any version", "`any version`"),
    (Rule::HostEntry, REGION, "  host: {module_path", "  Host!: {module_path", "`Host!`"),
    (Rule::HostEntry, REGION, ", layers: 2", "", "dims.layers"),
    (Rule::HostEntry, PIPELINE, "native: {}", "native: {module_path: \"m.{i}\"}", "no instances"),
    (Rule::MProfile, REGION, "m_class: medium", "m_class: huge", "`huge`"),
    (Rule::MProfile, REGION, ", phase: encode", "", "`phase` is missing"),
    (Rule::Conditioning, REGION, "[scale, shift, gate]", "[scale, gate]", "scale and shift"),
    (Rule::Conditioning, REGION, "[scale, shift, gate]", "[scale, shift]", "expected a gate"),
    (Rule::Conditioning, REGION, "[scale, shift, gate]", "[scale, shift, scale]", "twice"),
    (Rule::Conditioning, REGION, "residual_gate: true", "residual_gate: 1", "true or false"),
    (Rule::ForbiddenKey, PIPELINE, "cond_features: buffers", "device: buffers", "`device`"),
    (Rule::ForbiddenKey, REGION, "  encode: {m_class", "  kernel: {m_class", "`kernel`"),
    (Rule::NameTwice, FAMILY, "demo_head", "demo", "`demo` is taken"),
    (Rule::Replaces, REGION, "variant:", "replaces: all\nvariant:", "`all`"),
    (Rule::Family, FAMILY, "model_types: [m]\n", "", "`model_types` is missing"),
    (Rule::Family, FAMILY, "model_types: [m]", "model_types: []", "an empty one"),
    (Rule::Family, FAMILY, "model_types: [m]", "model_types: [m, m]", "twice"),
    (Rule::Family, FAMILY, "linear_proj@1", "vla_tick_pipeline", "a file of its own"),
    (Rule::Family, FAMILY, "layers: 1, ", "", "dims.layers"),
];

#[test]
fn whole_documents_are_accepted() {
    for text in [REGION, PIPELINE, FAMILY] {
        check(text).unwrap();
    }
}

#[test]
fn each_document_breaks_its_rule() {
    for (rule, good, from, to, says) in PLANTED {
        assert!(good.contains(from), "{rule}: the document has no `{from}`");
        let text = good.replacen(from, to, 1);
        let e = match check(&text) {
            Err(e) => e,
            Ok(_) => panic!("{rule}: accepted with `{to}`"),
        };
        let message = e.to_string();
        assert_eq!(e.rule(), Some(*rule), "`{to}`: {message}");
        assert!(
            message.contains(says),
            "{rule}: `{says}` is not in {message}"
        );
        let at = e.place().unwrap();
        assert!(
            at.file == "f.yaml" && at.line > 0 && at.column > 0,
            "{message}"
        );
        assert!(message.starts_with(&at.to_string()), "{message}");
    }
}

#[test]
fn every_rule_has_a_planted_document() {
    let planted: BTreeSet<&str> = PLANTED.iter().map(|(r, ..)| r.kind()).collect();
    let elsewhere = [
        Rule::NameMismatch,    // needs a file: `a_file_is_stored_under_its_own_name`
        Rule::CoverageMissing, // needs to be asked for: below
        Rule::Placement,       // needs a model: `what_the_model_lacks_is_said_at_its_place`
        Rule::Field,           // the fallback of fields without a rule of their own
    ];
    for rule in Rule::ALL.iter().filter(|r| !elsewhere.contains(r)) {
        assert!(planted.contains(rule.kind()), "{rule}");
    }
    let without = PIPELINE.split("coverage:").next().unwrap();
    let e = check(without).unwrap().require_coverage().unwrap_err();
    assert_eq!(e.rule(), Some(Rule::CoverageMissing));
    check(REGION).unwrap().require_coverage().unwrap();
}

/// The page shows a file of each kind, and each of them loads.
#[test]
fn examples_of_the_page_load() {
    let page = include_str!("../../../docs/bindings.md");
    let examples: Vec<&str> = page
        .split("```yaml\n")
        .skip(1)
        .filter_map(|p| p.split("```").next())
        .collect();
    assert_eq!(examples.len(), 3);
    for example in examples {
        check(example).unwrap_or_else(|e| panic!("{e}\n{example}"));
    }
}

/// Places are those of the word that is wrong.
#[test]
fn places_are_exact() {
    let at = |good: &str, from: &str, to: &str| {
        let e = check(&good.replacen(from, to, 1)).unwrap_err();
        let at = e.place().unwrap();
        (at.line, at.column)
    };
    assert_eq!(at(REGION, "D: 8", "Z: 8"), (3, 11));
    assert_eq!(at(REGION, "gelu", "silu"), (4, 23));
    assert_eq!(at(REGION, "const: zeros", "const: twos"), (14, 20));
    assert_eq!(at(PIPELINE, "[tower, loop]", "[tower, tower]"), (10, 21));
    assert_eq!(at(PIPELINE, "seam: l}", "seam: l, device: d}"), (13, 77));
    assert_eq!(at(FAMILY, "linear_proj@1", "linear_proj@7"), (5, 16));
}

/// Text is trimmed everywhere.
#[test]
fn text_is_trimmed() {
    let text = PIPELINE
        .replace("binding: demo", "binding: ' demo '")
        .replace("[tower, loop]", "[' tower', loop]")
        .replace("name: loop", "name: 'loop  '");
    let manifest = check(&text).unwrap().body.manifest();
    assert_eq!(manifest, check(PIPELINE).unwrap().body.manifest());
}

/// What is no document of ours: refused with code, file, line and column, at once.
#[test]
fn bad_input_is_refused_at_a_place() {
    let dir = tempfile::tempdir().unwrap();
    let structures = OracleCatalog::new();
    let bomb: String = (0..9)
        .map(|i| {
            format!(
                "a{}: &a{} [{}]\n",
                i + 1,
                i + 1,
                vec![format!("*a{i}"); 9].join(", ")
            )
        })
        .collect();
    let deep = format!("binding: {}{}\n", "[".repeat(5000), "]".repeat(5000));
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("alias", b"binding: &a demo\nstructure: *a\n".to_vec()),
        ("bomb", format!("a0: &a0 [x]\n{bomb}").into_bytes()),
        ("bom", format!("\u{feff}{REGION}").into_bytes()),
        ("tag", b"binding: !!str demo\n".to_vec()),
        (
            "tab",
            b"binding: demo\nstages:\n\tobs_encode: {}\n".to_vec(),
        ),
        ("latin", b"binding: d\xe9mo\n".to_vec()),
        ("zero", vec![0; 64]),
        ("elf", b"\x7fELF\x02\x01\x01\x00\x00".to_vec()),
        ("two", format!("{REGION}---\n{REGION}").into_bytes()),
        ("open", b"binding: [a, b\nstructure: x\n".to_vec()),
        ("deep", deep.into_bytes()),
        ("key", b"? [a]\n: 1\n".to_vec()),
        ("twice", b"binding: a\nbinding: b\n".to_vec()),
        ("large", vec![b'#'; 50 << 20]),
    ];
    for (name, bytes) in cases {
        let path = dir.path().join(format!("{name}.yaml"));
        std::fs::write(&path, bytes).unwrap();
        let started = std::time::Instant::now();
        let e = read(&path, &structures).expect_err(name);
        assert_eq!(e.code(), "binding_invalid", "{name}: {e}");
        assert_eq!(e.rule(), Some(Rule::Document), "{name}: {e}");
        let at = e.place().unwrap();
        assert_eq!(at.file, path.display().to_string());
        assert!(at.line >= 1 && at.column >= 1, "{name}: {e}");
        assert!(
            e.to_string().len() < 1000,
            "{name}: {} bytes",
            e.to_string().len()
        );
        assert!(started.elapsed().as_secs() < 5, "{name}");
    }
}

/// Seeded damage to every built-in file: never a panic, never a hang, always a place.
#[test]
fn damaged_files_are_refused_or_read() {
    let structures = OracleCatalog::new();
    let bindings = Bindings::built_in(&structures).unwrap();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below.max(1) as u64) as usize
    };
    let scraps = [
        "{", "}", "[", "]", ":", "- ", "\n", "  ", "\t", "&a ", "*a", "!!int ", "0", "-1", "@",
        "{i}", "'", "\u{feff}",
    ];
    let (mut read, mut refused) = (0, 0);
    for file in bindings.files() {
        for _ in 0..40 {
            let mut text: Vec<char> = file.document.chars().collect();
            for _ in 0..=random(3) {
                let at = random(text.len());
                match random(3) {
                    0 => drop(text.remove(at)),
                    1 => text
                        .splice(at..at, scraps[random(scraps.len())].chars())
                        .for_each(drop),
                    _ => text.truncate(at.max(1)),
                }
            }
            let text: String = text.into_iter().collect();
            match parse("f.yaml", Some(&file.name), &text, Origin::User, &structures) {
                Ok(_) => read += 1,
                Err(e) => {
                    refused += 1;
                    assert!(e.place().is_some(), "{e}");
                }
            }
        }
    }
    println!("{read} read, {refused} refused");
    assert!(read > 0 && refused > read);
}
