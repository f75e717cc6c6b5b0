//! The grammar's worked examples that are not among the built-in entries: they load as data and execute.
//!
//! With `STRUCTURES_ORACLE` their dataflow is also compared with the oracle's tensors; what is built in later
//! loses its place here.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use structures_catalog::verify::verify_spec;
use structures_catalog::{Catalog, Feed};
use structures_graph::AttrValue;

const ATTENTION: &str = include_str!("worked/attention_core.yaml");
const CHAIN: &str = include_str!("worked/modnorm_qkv_chain.yaml");

fn catalog() -> Catalog {
    Catalog::default()
        .with_document("attention_core", "attention_core.yaml", ATTENTION)
        .and_then(|c| c.with_document("modnorm_qkv_chain", "modnorm_qkv_chain.yaml", CHAIN))
        .expect("worked entries load")
}

#[test]
fn worked_entries_execute() {
    let catalog = catalog();
    for name in catalog.names() {
        let rows = verify_spec(catalog.get(name).expect(name));
        for row in &rows {
            let what = format!("{name} {}", row.combination);
            assert!(
                row.failure.is_none() && !row.native,
                "{what}: {:?}",
                row.failure
            );
        }
        assert!(!rows.is_empty());
    }
}

#[test]
fn an_output_that_is_not_made_is_absent() {
    let catalog = catalog();
    let spec = catalog.get("modnorm_qkv_chain").expect("chain");
    let axes = |fanout: &str| -> BTreeMap<String, String> {
        [("modulation", "scale_shift"), ("fanout", fanout)]
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .into()
    };
    let all = spec.expand(&axes("qkv"), &|_| true).expect("qkv");
    assert_eq!(all.spans[0].outputs, ["q", "k", "v"]);
    let one = spec.expand(&axes("q_only"), &|_| true).expect("q_only");
    assert_eq!(one.spans[0].outputs, ["q"]);
    assert!(one.source("w_k").is_none() && one.source("w_q").is_some());
    // Without biases the products carry the outputs' names, and round.
    let bare = spec
        .expand(&axes("qkv"), &|n| n.starts_with("w_"))
        .expect("bare");
    assert_eq!(bare.spans[0].outputs, ["q", "k", "v"]);
    let (op, _) = bare.producer("k").expect("k");
    assert!(!bare.ops[op].as_f32 && bare.ops[op].refuse.as_deref() == Some("siblings_not_shared"));
}

#[test]
fn the_oracle_agrees_where_it_is_at_hand() {
    let Some(root) = std::env::var_os("STRUCTURES_ORACLE") else {
        println!("skipped: STRUCTURES_ORACLE is not set");
        return;
    };
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let dir = repository.join(root).join("reference");
    let Ok(text) = std::fs::read_to_string(dir.join("index.json")) else {
        println!("skipped: no reference/index.json");
        return;
    };
    let index: serde_json::Value = serde_json::from_str(&text).expect("index.json");
    let catalog = catalog();
    let (mut ran, mut worst) = (0, 0f32);
    for case in index["cases"].as_array().expect("cases") {
        let Ok(spec) = catalog.get(case["structure"].as_str().unwrap_or("")) else {
            continue;
        };
        if case["dtype"] != "float32" {
            continue;
        }
        let id = case["id"].as_str().expect("id");
        let file = dir.join(case["file"].as_str().expect("file"));
        let tensors = candle_core::safetensors::load(file, &Device::Cpu).expect(id);
        let named = |part: &str| -> BTreeMap<String, Tensor> {
            let of = case[part].as_object().expect(part).iter();
            of.map(|(k, v)| (k.clone(), tensors[v["tensor"].as_str().expect(id)].clone()))
                .collect()
        };
        let variant: BTreeMap<String, String> = case["variant"]
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(k, _)| spec.variants.contains_key(*k))
            .filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_string())))
            .chain(
                spec.variants
                    .iter()
                    .filter(|(_, a)| a.host && a.values.len() == 1)
                    .filter_map(|(k, a)| Some((k.clone(), a.values.keys().next()?.clone()))),
            )
            .collect();
        let mut feed = Feed {
            inputs: named("inputs"),
            weights: named("weights"),
            ..Feed::default()
        };
        for (k, v) in case["params"].as_object().into_iter().flatten() {
            let value = v.as_f64().map(AttrValue::Float);
            feed.params.extend(
                value
                    .or_else(|| v.as_bool().map(AttrValue::Flag))
                    .map(|v| (k.clone(), v)),
            );
        }
        let outputs = spec
            .call_reference(&variant, &feed)
            .unwrap_or_else(|e| panic!("{id}: {e}"));
        for (name, got) in outputs {
            let want = &named("outputs")[&name];
            let flat = |t: &Tensor| -> Vec<f32> {
                let t = t.to_dtype(DType::F32).expect(id);
                t.flatten_all().expect(id).to_vec1().expect(id)
            };
            let (a, b) = (flat(&got), flat(want));
            let scale = b.iter().fold(0f32, |m, v| m.max(v.abs()));
            let error = a
                .iter()
                .zip(&b)
                .fold(0f32, |m, (x, y)| m.max((x - y).abs()));
            assert!(error <= 1e-5 * scale, "{id} {name}: {error:e} of {scale:e}");
            worst = worst.max(error / scale.max(f32::MIN_POSITIVE));
        }
        ran += 1;
    }
    println!("ran {ran}, largest error {worst:e}");
}
