//! Qualifying a double of a projection against the structure's reference.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use serde_json::Value as Json;
use structures::digest;
use structures::gates::Floors;
use structures::qualify::{qualify, Answer, Record, Verdict};
use structures::Error;
use structures_catalog::{Catalog, Feed};

fn wave(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.7 + seed).sin()).collect()
}

fn tensor(dims: &[usize], seed: f32) -> Tensor {
    let n = dims.iter().product();
    Tensor::from_vec(wave(n, seed), dims, &Device::Cpu).unwrap()
}

fn feed() -> Feed<'static> {
    Feed {
        inputs: [("x".to_string(), tensor(&[3, 8], 0.1))].into(),
        weights: [("w".to_string(), tensor(&[8, 5], 0.2))].into(),
        ..Feed::default()
    }
}

fn variant(bias: &str) -> BTreeMap<String, String> {
    [("bias".to_string(), bias.to_string())].into()
}

fn product(feed: &Feed<'_>, factor: f64) -> Answer {
    let y = feed.inputs["x"].matmul(&feed.weights["w"]);
    let y = y.and_then(|y| y * factor).map_err(|e| e.to_string())?;
    Ok(vec![("y".into(), y)])
}

fn judge(run: &dyn Fn(&Feed<'_>) -> Answer, bounds: &[(&str, f64)]) -> Result<Record, Error> {
    let catalog = Catalog::builtin().unwrap();
    let spec = catalog.get("linear_proj").unwrap();
    let bounds = Floors::new(bounds.iter().copied()).unwrap();
    qualify(spec, "double", &variant("none"), &feed(), &bounds, run)
}

#[test]
fn b_306_bounds_decide_in_their_direction() {
    let bounds = [("cosine", 0.9999), ("max_abs", 1e-5)];
    let right = judge(&|f| product(f, 1.0), &bounds).unwrap();
    assert_eq!((right.verdict, &right.reason), (Verdict::Pass, &None));
    // Cosine does not see a scale, the ceiling does.
    let scaled = judge(&|f| product(f, 1.02), &bounds).unwrap();
    assert_eq!(scaled.verdict, Verdict::Fail);
    assert!(scaled.reason.unwrap().contains("max_abs"));
}

#[test]
fn b_306_what_fails_is_a_verdict_and_what_makes_no_sense_an_error() {
    let bounds = [("cosine", 0.9)];
    type Run = Box<dyn Fn(&Feed<'_>) -> Answer>;
    let bad: [(Run, &str); 4] = [
        (Box::new(|_| Err("no kernel".into())), "no kernel"),
        (Box::new(|_| Ok(Vec::new())), "no output `y`"),
        (
            Box::new(|_| Ok(vec![("y".into(), tensor(&[5, 3], 0.0))])),
            "[5, 3]",
        ),
        (Box::new(|f| product(f, f64::NAN)), "NaN"),
    ];
    for (run, fact) in bad {
        let record = judge(&*run, &bounds).unwrap();
        assert_eq!(record.verdict, Verdict::Fail);
        let reason = record.reason.unwrap();
        assert!(
            reason.to_lowercase().contains(&fact.to_lowercase()),
            "{reason}"
        );
    }
    let catalog = Catalog::builtin().unwrap();
    let spec = catalog.get("linear_proj").unwrap();
    let floors = Floors::default();
    let run = |f: &Feed<'_>| product(f, 1.0);
    let error = qualify(spec, "d", &variant("perhaps"), &feed(), &floors, &run).unwrap_err();
    assert_eq!(error.code(), "unknown_variant");
    let unknown = [("colour".to_string(), "red".to_string())].into();
    assert!(qualify(spec, "d", &unknown, &feed(), &floors, &run).is_err());
    assert!(
        Floors::new([("rel_err", 0.1)]).is_err(),
        "an unknown metric"
    );
    let other = Floors::new([("top1_agreement", 0.9)]).unwrap();
    assert!(qualify(spec, "d", &variant("none"), &feed(), &other, &run).is_err());
}

#[test]
fn b_307_b_308_a_record_says_where_it_holds_and_is_sealed() {
    let record = judge(&|f| product(f, 1.0), &[("cosine", 0.9)]).unwrap();
    assert_eq!(record.structure, "linear_proj@1");
    assert_eq!(record.workload.dims["K"], 8);
    assert_eq!(record.workload.dtype, "f32");
    assert_eq!(record.variant["bias"], "none");
    assert_eq!(record.thresholds["cosine"], 0.9);
    assert!(!record.environment.is_empty() && record.spec_digest.len() == 64);
    let mut json = serde_json::to_value(&record).unwrap();
    let back: Json = serde_json::from_str(&json.to_string()).unwrap();
    assert!(digest::verify(&back));
    json["metrics"]["cosine"] = 1.0001.into();
    assert!(!digest::verify(&json), "an edited metric");
    json.as_object_mut().unwrap().remove("digest");
    assert!(!digest::verify(&json), "no digest");
}
