//! Qualifying an implementation against a structure's reference: a verdict that says for which shapes and formats.
//!
//! The shapes of the operands solve the structure's symbols, both sides run on the same operands, every output is
//! measured, and the bounds a caller names decide. The record is sealed: verifying it is [`crate::digest::verify`].
//! It says nothing about other sizes.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use structures_catalog::{Feed, Spec};

use crate::digest;
use crate::environment;
use crate::error::Error;
use crate::gates::{measure, Floors, Metrics, OutputKind};

/// Value of [`Record::schema`].
pub const SCHEMA: u32 = 1;

/// One qualification.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: u32,
    /// `name@version`.
    pub structure: String,
    /// Digest of the specification.
    pub spec_digest: String,
    /// What was measured, in the caller's words.
    pub implementation: String,
    /// Host and form axes, complete.
    pub variant: BTreeMap<String, String>,
    /// The sizes and the dtype it was measured at: the verdict holds there.
    pub workload: Workload,
    /// Machine and versions.
    pub environment: BTreeMap<String, Json>,
    /// What it was compared with.
    pub gate: String,
    /// The worst over all outputs.
    pub metrics: Metrics,
    /// What the caller asked for.
    pub thresholds: BTreeMap<String, f64>,
    /// Whether all of it was met.
    pub verdict: Verdict,
    /// The bound that was missed, with its value, or why nothing could be measured.
    pub reason: Option<String>,
    /// sha256 of the record without this field.
    pub digest: String,
}

/// Sizes and dtype.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// Symbol -> size.
    pub dims: BTreeMap<String, usize>,
    /// dtype of the boundary.
    pub dtype: String,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verdict {
    /// Every bound is met.
    Pass,
    /// One is not, or the implementation failed.
    Fail,
}

/// What an implementation answers: its outputs by boundary name, or why there are none.
pub type Answer = Result<Vec<(String, Tensor)>, String>;

/// Runs both sides and decides. An implementation that fails, leaves an output out or gives another shape is a `FAIL`
/// with its reason.
///
/// # Errors
/// What makes no sense: an axis or value the structure does not have, operands that contradict each other, a bound on
/// a metric that values do not have.
pub fn qualify(
    spec: &Spec,
    implementation: &str,
    variant: &BTreeMap<String, String>,
    feed: &Feed<'_>,
    thresholds: &Floors,
    run: &dyn Fn(&Feed<'_>) -> Answer,
) -> Result<Record, Error> {
    thresholds.check_kind(OutputKind::Values)?;
    let admitted = spec.admit(variant, feed)?;
    let want = spec.call_reference(variant, feed)?;
    let (metrics, failed) = match run(feed).and_then(|got| worst(&got, &want)) {
        Ok(metrics) => (metrics, None),
        Err(why) => (Metrics::default(), Some(why)),
    };
    let reason = match failed {
        Some(why) => Some(why),
        None => thresholds
            .first_shortfall(&metrics)?
            .map(|short| short.refusal().reason),
    };
    let mut axes = variant.clone();
    axes.extend(admitted.axes);
    let mut record = Record {
        schema: SCHEMA,
        structure: format!("{}@{}", spec.name, spec.version),
        spec_digest: spec.digest.clone(),
        implementation: implementation.into(),
        variant: axes,
        workload: Workload {
            dims: admitted
                .dims
                .iter()
                .map(|(k, v)| (k.to_string(), *v))
                .collect(),
            dtype: name_of(feed.dtype()).into(),
        },
        environment: environment::lock(),
        gate: "the structure's reference".into(),
        metrics,
        thresholds: thresholds.iter().map(|(k, v)| (k.into(), v)).collect(),
        verdict: match reason {
            None => Verdict::Pass,
            Some(_) => Verdict::Fail,
        },
        reason,
        digest: String::new(),
    };
    record.digest = digest::of(&record)?;
    Ok(record)
}

/// The worst of every metric over all outputs of the reference.
fn worst(got: &[(String, Tensor)], want: &[(String, Tensor)]) -> Result<Metrics, String> {
    let mut all: Option<Metrics> = None;
    for (name, want) in want {
        let (_, made) = got
            .iter()
            .find(|(n, _)| n == name)
            .ok_or_else(|| format!("it makes no output `{name}`"))?;
        if made.dims() != want.dims() {
            return Err(format!(
                "output `{name}` is {:?}, expected {:?}",
                made.dims(),
                want.dims()
            ));
        }
        let (a, b) = (flat(made)?, flat(want)?);
        let judged = measure(OutputKind::Values, (&a, &[a.len()]), (&b, &[b.len()]))
            .map_err(|e| e.to_string())?;
        if let Some(no) = judged.refusal() {
            return Err(format!("output `{name}`: {}", no.reason));
        }
        let Some(so_far) = &mut all else {
            all = Some(judged.metrics);
            continue;
        };
        for (metric, value) in judged.metrics.0 {
            let slot = so_far.0.entry(metric.clone()).or_insert(value);
            let worse = match metric.as_str() {
                "cosine" => value < *slot,
                _ => value > *slot,
            };
            if worse || value.is_nan() {
                *slot = value;
            }
        }
    }
    all.ok_or_else(|| "the reference makes no output".into())
}

fn flat(t: &Tensor) -> Result<Vec<f32>, String> {
    t.to_dtype(DType::F32)
        .and_then(|t| t.flatten_all())
        .and_then(|t| t.to_vec1::<f32>())
        .map_err(|e| e.to_string())
}

fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        other => other.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use structures_catalog::Catalog;

    use super::*;

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
}
