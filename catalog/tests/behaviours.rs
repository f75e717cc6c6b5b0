//! B-001 to B-015 of the behaviour specification, one test each.

use std::collections::BTreeMap;
use std::fs;

use candle_core::{DType, Device, Tensor};
use sha2::{Digest, Sha256};
use structures_catalog::{Catalog, CatalogError, Feed, Kind, Shape, Shapes};
use structures_graph::AttrValue;

const REGION: &str = "
name: small
version: 2
boundary:
  inputs:
    - {name: x, dims: [M, K]}
    - {name: gate, dims: [M, N], optional: true}
  outputs: [{name: y, dims: [M, N]}]
weights:
  w: [K, N]
  b: {dims: [N], optional: true}
variants: {kind: {host: true, values: [silu, relu]}}
points: [p]
gates: {parity: [cosine]}
slots:
  at: module
  roles: {q: q_proj}
  weights: {w: {from: q.weight, layout: out_in}, b: q.bias}
dataflow:
  spans: {whole: {in: [x, gate], out: [y]}}
  ops:
    - {let: p, op: linear, in: [x, w]}
    - {let: s, op: bias, in: [p, b], needs: [b]}
    - {let: a, op: act, in: [s], attrs: {kind: <kind>}}
    - {let: y, op: mul, in: [a, gate], needs: [gate]}
";

const PIPELINE: &str = "
name: flow
version: 1
kind: stage_pipeline
family: loops
gates: {parity: [cosine]}
stages:
  - {name: first, cadence: request, inputs: {a: {window: host}}, outputs: {b: {buffer: static}}, capture: host_dependent}
embedded_regions: [small]
state_regions: {}
conformance: [first_is_there]
";

fn built_in() -> Catalog {
    Catalog::builtin().expect("the built-in entries load")
}

fn small() -> Catalog {
    let catalog = Catalog::default().with_document("small", "small/structure.yaml", REGION);
    catalog.expect("loads")
}

fn flow(text: &str) -> Result<Catalog, CatalogError> {
    small().with_document("flow", "flow/structure.yaml", text)
}

fn edited(text: &str, from: &str, to: &str) -> String {
    let new = text.replacen(from, to, 1);
    assert_ne!(new, text, "{from}");
    new
}

fn refused(result: Result<Catalog, CatalogError>, code: &str, says: &[&str]) {
    let e = result.map(|_| ()).expect_err(code);
    let text = e.to_string();
    assert_eq!(e.code(), code, "{text}");
    for fact in says {
        assert!(text.contains(fact), "{text}: no `{fact}`");
    }
}

#[test]
fn b_001_names_are_sorted_and_each_loads() {
    let catalog = built_in();
    let names = catalog.names();
    assert!(names.is_sorted() && !names.is_empty());
    for name in names {
        assert_eq!(catalog.get(name).expect(name).name, name);
    }
}

#[test]
fn b_002_a_spec_keeps_the_order_of_its_document() {
    let catalog = flow(PIPELINE).expect("loads");
    let spec = catalog.get("small").expect("small");
    // `kind` is not written, so it is a region.
    assert_eq!((spec.kind, spec.version), (Kind::Region, 2));
    let slots: Vec<&str> = spec.weights.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(slots, ["w", "b"]);
    let dims: Vec<String> = spec.weights[0]
        .dims
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(dims, ["K", "N"]);
    assert_eq!((spec.points.len(), spec.stages().len()), (1, 0));
    let flow = catalog.get("flow").expect("flow");
    assert_eq!(
        (flow.kind, flow.family()),
        (Kind::StagePipeline, Some("loops"))
    );
    assert_eq!(
        (flow.stages()[0].name.as_str(), flow.embedded()),
        ("first", &["small".to_string()][..])
    );
}

#[test]
fn b_003_an_unknown_name_is_told_with_its_neighbours() {
    let e = small().get("smal").map(|_| ()).expect_err("unknown");
    assert_eq!(e.code(), "entry_unknown");
    assert_eq!(
        e.to_string(),
        "structure `smal` is not in the catalog; nearest: small"
    );
}

#[test]
fn b_004_the_stored_name_is_the_declared_one() {
    let stored = Catalog::default().with_document("other", "other/structure.yaml", REGION);
    refused(
        stored,
        "entry_name_mismatch",
        &["other/structure.yaml:2:7", "`other`", "`small`"],
    );
}

#[test]
fn b_005_a_region_without_a_part_does_not_load() {
    for key in ["boundary", "weights", "dataflow", "gates"] {
        // The key and everything below it.
        let mut text = String::new();
        let mut inside = false;
        for line in REGION.lines() {
            inside = match line.starts_with(key) {
                true => true,
                false => inside && line.starts_with(' '),
            };
            if !inside {
                text += line;
                text.push('\n');
            }
        }
        let load = Catalog::default().with_document("small", "small/structure.yaml", &text);
        refused(load, "entry_invalid", &[&format!("`{key}` is missing")]);
    }
    assert!(
        flow(PIPELINE).is_ok(),
        "a pipeline has none of them but gates"
    );
    let bare = edited(PIPELINE, "gates: {parity: [cosine]}\n", "");
    refused(flow(&bare), "entry_invalid", &["`gates` is missing"]);
}

#[test]
fn b_006_a_pipeline_has_no_reference() {
    let catalog = flow(PIPELINE).expect("loads");
    let spec = catalog.get("flow").expect("flow");
    let none = BTreeMap::new();
    let feed = Feed::default();
    for e in [
        spec.call_reference(&none, &feed)
            .map(|_| ())
            .expect_err("reference"),
        spec.call_dataflow(&none, &feed)
            .map(|_| ())
            .expect_err("dataflow"),
        spec.reference_span("s", &none, &feed)
            .map(|_| ())
            .expect_err("span"),
    ] {
        assert_eq!(e.code(), "no_standalone_reference");
        assert!(
            e.to_string()
                .contains("unmodified eager host under the same windows"),
            "{e}"
        );
    }
}

#[test]
fn b_007_a_reference_takes_inputs_weights_optionals_and_variants_by_name() {
    let catalog = small();
    let spec = catalog.get("small").expect("small");
    let t =
        |v: &[f32], shape: &[usize]| Tensor::from_slice(v, shape, &Device::Cpu).expect("tensor");
    let mut feed = Feed {
        inputs: [("x".to_string(), t(&[1.0, -1.0], &[1, 2]))].into(),
        weights: [("w".to_string(), t(&[2.0, 0.0, 0.0, 3.0], &[2, 2]))].into(),
        ..Feed::default()
    };
    let relu: BTreeMap<String, String> = [("kind".to_string(), "relu".to_string())].into();
    let run = |feed: &Feed| {
        let out = spec.call_reference(&relu, feed).expect("runs");
        out[0]
            .1
            .flatten_all()
            .and_then(|t| t.to_vec1::<f32>())
            .expect("vec")
    };
    assert_eq!(run(&feed), [2.0, 0.0]);
    feed.inputs.insert("gate".into(), t(&[0.5, 0.5], &[1, 2]));
    feed.weights.insert("b".into(), t(&[0.0, 4.0], &[2]));
    assert_eq!(run(&feed), [1.0, 0.5]);
    let tanh: BTreeMap<String, String> = [("kind".to_string(), "tanh".to_string())].into();
    let e = spec
        .call_reference(&tanh, &feed)
        .map(|_| ())
        .expect_err("tanh");
    assert_eq!(e.code(), "unknown_variant");
    feed.params.insert("nobody_asks".into(), AttrValue::Int(1));
    assert_eq!(feed.dtype(), DType::F32);
    assert_eq!(run(&feed), [1.0, 0.5]);
}

#[test]
fn b_008_the_digest_is_of_the_bytes() {
    let digest = |text: &str| {
        let catalog = Catalog::default().with_document("small", "f", text);
        catalog
            .expect("loads")
            .get("small")
            .expect("small")
            .digest
            .clone()
    };
    let hex: String = Sha256::digest(REGION.as_bytes())
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    assert_eq!(digest(REGION), hex);
    assert_eq!(digest(REGION), digest(REGION));
    assert_ne!(digest(&format!("{REGION}# a comment\n")), hex);
    let turned = edited(
        REGION,
        "name: small\nversion: 2\n",
        "version: 2\nname: small\n",
    );
    assert_ne!(digest(&turned), hex);
}

#[test]
fn b_009_the_bytes_of_a_version_stay() {
    // The table is committed; `a_changed_document_needs_a_new_version` of entries.rs prints the rule.
    let table = include_str!("../digests.txt");
    let mut seen = BTreeMap::new();
    for line in table.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, version, digest] = words.as_slice() else {
            panic!("`{line}` is no line of the table");
        };
        assert!(
            seen.insert(format!("{name}@{version}"), *digest).is_none(),
            "{line} stands there twice"
        );
    }
    let catalog = built_in();
    for spec in catalog.list() {
        assert_eq!(
            seen.remove(&format!("{}@{}", spec.name, spec.version)),
            Some(spec.digest.as_str())
        );
    }
    assert!(
        seen.is_empty(),
        "the table knows entries that are not there: {seen:?}"
    );
}

#[test]
fn b_010_a_new_contract_is_a_new_version_beside_the_old() {
    let moved = edited(
        &edited(REGION, "version: 2", "version: 3"),
        "points: [p]",
        "points: [a]",
    );
    let catalog = small()
        .with_document("small", "small/structure.yaml", &moved)
        .expect("loads");
    // A receipt that cites version 2 still means version 2.
    assert_eq!(catalog.get_version("small", 2).expect("2").points, ["p"]);
    assert_eq!(catalog.get_version("small", 3).expect("3").points, ["a"]);
    let same = edited(REGION, "points: [p]", "points: [a]");
    let twice = small().with_document("small", "small/structure.yaml", &same);
    refused(
        twice,
        "entry_invalid",
        &["a version above it is needed", "small/structure.yaml:3:10"],
    );
}

#[test]
fn b_011_versions_live_side_by_side_and_a_pin_keeps_one() {
    let newer = edited(REGION, "version: 2", "version: 3");
    let catalog = small()
        .with_document("small", "small/structure.yaml", &newer)
        .expect("loads");
    let version = |pin: &str| {
        catalog
            .find(pin)
            .map(|s| s.version)
            .map_err(|e| e.code().to_string())
    };
    assert_eq!(version("small"), Ok(3));
    assert_eq!(version("small@3"), Ok(3));
    assert_eq!(version("small@2"), Ok(2));
    assert_eq!(version("small@4"), Err("entry_unknown".into()));
    assert_eq!(version("small@two"), Err("pin_invalid".into()));
    assert_eq!(catalog.newest().len(), 1);
    assert_eq!(catalog.list().len(), 2);
}

#[test]
fn b_012_a_retired_version_says_how_to_move_on() {
    let dir = tempfile::tempdir().expect("dir");
    let write = |file: &str, text: &str| {
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
        fs::write(path, text).expect("written");
    };
    write("small/structure.yaml", REGION);
    write(
        "small/retired.yaml",
        "- {version: 1, note: the bias is part of version 2}\n",
    );
    let catalog = Catalog::default().with_dir(dir.path()).expect("loads");
    let e = catalog.find("small@1").map(|_| ()).expect_err("retired");
    assert_eq!(e.code(), "entry_retired");
    assert!(
        e.to_string().contains("the bias is part of version 2"),
        "{e}"
    );
    let all: Vec<_> = catalog.retired().collect();
    assert_eq!(all, [("small", 1, "the bias is part of version 2")]);
    // What is live is not retired, and nobody retires what belongs to somebody else.
    write("small/retired.yaml", "- {version: 2, note: gone}\n");
    refused(
        Catalog::default().with_dir(dir.path()),
        "entry_invalid",
        &["version 2 of `small` is retired"],
    );
    write(
        "small/retired.yaml",
        "- {version: 1, note: gone}\n- {version: 1, note: again}\n",
    );
    refused(
        Catalog::default().with_dir(dir.path()),
        "entry_invalid",
        &["retired.yaml:2:13", "retired twice"],
    );
    fs::remove_file(dir.path().join("small/structure.yaml")).expect("removed");
    write("small/retired.yaml", "- {version: 2, note: gone}\n");
    refused(
        small().with_dir(dir.path()),
        "entry_invalid",
        &["belong to somebody else"],
    );
}

#[test]
fn b_013_no_key_chooses_kernels_or_hardware() {
    for key in [
        "arch",
        "backends",
        "Device",
        "hardware",
        "kernel",
        "benchmark_at_runtime",
        "runtime-benchmark",
    ] {
        for (from, to) in [
            (
                "gates: {parity: [cosine]}",
                format!("gates: {{parity: [cosine], {key}: x}}"),
            ),
            ("points: [p]", format!("points: [p]\n{key}: x")),
            (
                "gates: {parity: [cosine]}",
                format!("gates: {{parity: [cosine], more: [{{deep: {{{key}: 1}}}}]}}"),
            ),
        ] {
            let text = edited(REGION, from, &to);
            let load = Catalog::default().with_document("small", "f.yaml", &text);
            refused(load, "key_forbidden", &["f.yaml:", &format!("`{key}`")]);
        }
        let text = edited(
            PIPELINE,
            "capture: host_dependent",
            &format!("capture: host_dependent, {key}: x"),
        );
        refused(
            flow(&text),
            "key_forbidden",
            &["flow/structure.yaml:8:", &format!("`{key}`")],
        );
    }
}

#[test]
fn b_014_embedded_regions_are_regions_and_stand_once() {
    let catalog = built_in();
    let pipelines = catalog
        .list()
        .into_iter()
        .filter(|s| s.kind == Kind::StagePipeline);
    for spec in pipelines {
        for name in spec.embedded() {
            assert_eq!(catalog.get(name).expect(name).kind, Kind::Region, "{name}");
        }
    }
    let with = |to: &str| flow(&edited(PIPELINE, "[small]", to));
    refused(
        with("[small, small]"),
        "entry_invalid",
        &["9:27: embedded_regions[1]", "stands here twice"],
    );
    refused(with("[]"), "entry_invalid", &["at least one region"]);
    refused(
        with("[small, smal]"),
        "entry_invalid",
        &["9:27: embedded_regions[1]", "`smal`", "nearest: small"],
    );
    refused(
        with("[flow]"),
        "entry_invalid",
        &["`flow` is a stage pipeline, expected a region"],
    );
}

#[test]
fn b_015_dims_come_from_inputs_and_weights() {
    let catalog = small();
    let spec = catalog.get("small").expect("small");
    let shapes = |of: &[(&str, &[usize])]| -> Shapes {
        of.iter()
            .map(|(n, d)| (n.to_string(), d.to_vec()))
            .collect()
    };
    let solve = |inputs: &[(&str, &[usize])], weights: &[(&str, &[usize])]| {
        let solved = spec.solve_dims(&shapes(inputs), &shapes(weights), Shape::Declared);
        solved.map_err(|e| format!("{} {e}", e.code()))
    };
    let dims = solve(
        &[("x", &[2, 3]), ("gate", &[2, 4])],
        &[("w", &[3, 4]), ("b", &[4])],
    )
    .expect("solves");
    assert_eq!(
        dims.into_iter().collect::<Vec<_>>(),
        [("K".into(), 3), ("M".into(), 2), ("N".into(), 4)]
    );
    for (inputs, weights, says) in [
        (
            vec![("x", &[2, 3, 1][..])],
            vec![("w", &[3, 4][..])],
            "rank_mismatch small: `x` has shape [2, 3, 1]",
        ),
        (
            vec![("x", &[2, 3])],
            vec![("w", &[5, 4])],
            "dim_conflict small: dim 0 of `w` is 5, expected K = 3",
        ),
        (
            vec![("x", &[2, 3]), ("gate", &[2, 5])],
            vec![("w", &[3, 4])],
            "dim_conflict small: dim 1 of `w` is 4, expected N = 5",
        ),
        (
            vec![],
            vec![("w", &[3, 4])],
            "missing_input small: input `x`",
        ),
        (
            vec![("x", &[2, 3])],
            vec![],
            "missing_weight small: weight `w`",
        ),
    ] {
        let e = solve(&inputs, &weights).expect_err(says);
        assert!(e.starts_with(says), "{e}");
    }
}
