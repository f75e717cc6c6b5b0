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
