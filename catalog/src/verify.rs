//! `catalog verify`: the dataflow of every entry against its reference, on random inputs.
//!
//! Every combination of host axes, several patterns of present optionals, every count of repeated slots. Two
//! statements of one structure must agree in f32 within [`TOLERANCE`]; each narrower span, fed with the values the
//! whole region made, must make the same outputs again.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Device, Tensor};
use structures_graph::ops::AttrDefault;
use structures_graph::{AttrValue, Attrs, OpKind};

use crate::catalog::Catalog;
use crate::error::CatalogError;
use crate::evaluate::{Feed, Tensors};
use crate::names;
use crate::reference::formula::product;
use crate::solve::{dim_size, Dims};
use crate::spec::{DimExpr, Plain, PlainAttr, Source, Spec};

/// Largest difference, as a share of the largest reference value.
pub const TOLERANCE: f32 = 1e-5;

/// One combination of one entry.
#[derive(Clone, Debug)]
pub struct VerifyRow {
    /// Entry.
    pub name: String,
    /// Version.
    pub version: u32,
    /// Host axes and present optionals, for people.
    pub combination: String,
    /// A native reference was there to compare with.
    pub native: bool,
    /// Largest difference over the largest reference value.
    pub error: f32,
    /// Why it does not hold; `None` when it does.
    pub failure: Option<String>,
}

/// Checks every entry.
pub fn verify(catalog: &Catalog) -> Vec<VerifyRow> {
    catalog.list().into_iter().flat_map(verify_spec).collect()
}

/// Checks one entry.
pub fn verify_spec(spec: &Spec) -> Vec<VerifyRow> {
    let mut rows = Vec::new();
    for axes in spec.host_axis_combinations() {
        for present in patterns(spec) {
            let what = |e: CatalogError| Some(e.to_string());
            let (error, failure) = match combination(spec, &axes, &present, rows.len() as u64) {
                // An optional that these axes need.
                Err(CatalogError::MissingInput { .. } | CatalogError::MissingWeight { .. }) => {
                    continue
                }
                Err(e) => (f32::NAN, what(e)),
                Ok(error) if error <= TOLERANCE => (error, None),
                Ok(error) => (
                    error,
                    Some(format!("differs by {error:e}, at most {TOLERANCE:e}")),
                ),
            };
            let axes: Vec<String> = axes.iter().map(|(k, v)| format!("{k}={v}")).collect();
            let with: Vec<&str> = present.iter().map(String::as_str).collect();
            rows.push(VerifyRow {
                name: spec.name.clone(),
                version: spec.version,
                combination: format!("{} with [{}]", axes.join(" "), with.join(" ")),
                native: spec.reference.is_some(),
                error,
                failure,
            });
        }
    }
    if rows.is_empty() {
        rows.push(VerifyRow {
            name: spec.name.clone(),
            version: spec.version,
            combination: "any".into(),
            native: spec.reference.is_some(),
            error: f32::NAN,
            failure: Some("no combination has all it needs".into()),
        });
    }
    rows
}

// Sets of present names among optional and repeated sources: every subset of a few optionals, else all, none and
// each one alone; every count of repeated slots.
fn patterns(spec: &Spec) -> Vec<BTreeSet<String>> {
    let inputs = spec
        .inputs
        .iter()
        .map(|p| (&p.name, p.optional, p.repeat, 0));
    let slots = spec
        .weights
        .iter()
        .map(|s| (&s.name, s.optional, s.repeat, s.least));
    let all: Vec<_> = inputs.chain(slots).collect();
    let counted = all
        .iter()
        .filter(|(_, optional, r, _)| r.is_some() && !optional);
    let most = counted
        .clone()
        .filter_map(|(_, _, r, _)| r.map(|(a, b)| b - a))
        .max()
        .unwrap_or(1);
    let least = counted
        .map(|(_, _, _, least)| *least)
        .max()
        .unwrap_or(1)
        .max(1);
    let mut found = Vec::new();
    for count in least..=most.max(least) {
        let mut always = BTreeSet::new();
        let mut optional: Vec<Vec<String>> = Vec::new();
        for (name, may_miss, repeat, _) in &all {
            let mut names = names::expanded(name, *repeat);
            names.truncate(if repeat.is_some() { count } else { 1 });
            match (may_miss, repeat) {
                (false, None) => {}
                (false, Some(_)) => always.extend(names),
                (true, None) => optional.push(names),
                (true, Some(_)) => {
                    // Some repeats have it, some do not.
                    let partly = names.iter().step_by(2).cloned().collect();
                    optional.push(partly);
                    optional.push(names.into_iter().skip(1).step_by(2).collect());
                }
            }
        }
        let n = optional.len();
        let masks: Vec<u64> = match n <= 5 {
            true => (0..1 << n).collect(),
            false => [0, (1 << n) - 1]
                .into_iter()
                .chain((0..n).map(|i| 1 << i))
                .collect(),
        };
        for mask in masks {
            let mut present = always.clone();
            for (i, names) in optional.iter().enumerate() {
                if mask >> i & 1 == 1 {
                    present.extend(names.iter().cloned());
                }
            }
            if !found.contains(&present) {
                found.push(present);
            }
        }
    }
    found
}

fn combination(
    spec: &Spec,
    axes: &BTreeMap<String, String>,
    present: &BTreeSet<String>,
    seed: u64,
) -> Result<f32, CatalogError> {
    let plain = spec.expand(axes, &|n| present.contains(n))?;
    let mut random = Random(seed ^ 0x5eed);
    let sources: Vec<Source> = spec
        .declared_sources()
        .into_iter()
        .filter(|(s, must)| *must || present.contains(&s.name))
        .map(|(s, _)| s)
        .collect();
    let mut feed = Feed {
        params: params(&plain),
        ..Feed::default()
    };
    let dims = sizes(&sources, &plain);
    for s in &sources {
        let shape: Option<Vec<usize>> = s.dims.iter().map(|d| dim_size(d, &dims)).collect();
        let shape = shape.ok_or_else(|| CatalogError::Evaluation {
            structure: spec.name.clone(),
            at: s.name.clone(),
            reason: "its dims have no sizes".into(),
        })?;
        let t = match key_count(&plain, &s.name, &dims) {
            Some(n) => Tensor::full(n as f32, shape, &Device::Cpu)?,
            None => random.tensor(&shape)?,
        };
        if s.slot {
            feed.weights.insert(s.name.clone(), t);
        } else {
            feed.inputs.insert(s.name.clone(), t);
        }
    }
    calls(&plain, &mut feed);
    let reference = spec.call_reference(axes, &feed)?;
    let mut error = worst(&reference, &spec.call_dataflow(axes, &feed)?, spec)?;
    error = error.max(spans(spec, &plain, &mut feed)?);
    Ok(error)
}

// Every span, widest first; a narrower one reads what the wider one made.
fn spans(spec: &Spec, plain: &Plain, feed: &mut Feed) -> Result<f32, CatalogError> {
    let mut known: Tensors = feed.inputs.clone();
    let mut error = 0f32;
    for span in &plain.spans {
        feed.inputs = span
            .inputs
            .iter()
            .filter_map(|n| Some((n.clone(), known.get(n)?.clone())))
            .collect();
        for (name, t) in spec.evaluate(plain, &span.name, feed)? {
            if let Some(before) = known.insert(name.clone(), t.clone()) {
                error = error.max(difference(&before, &t)?);
            }
        }
    }
    Ok(error)
}

// Small, pairwise different sizes, so that a swapped dim cannot go unnoticed; heads of an attention are a multiple
// of its key heads.
fn sizes(sources: &[Source], plain: &Plain) -> Dims {
    let primes = [
        3, 10, 14, 6, 22, 26, 34, 38, 46, 58, 62, 74, 82, 86, 94, 106,
    ];
    let mut dims = Dims::new();
    for d in sources.iter().flat_map(|s| &s.dims) {
        if let DimExpr::Symbol(s) = d {
            let next = primes[dims.len() % primes.len()];
            dims.entry(s.clone()).or_insert(next);
        }
    }
    let values = plain.value_dims();
    for op in plain.ops.iter().filter(|o| o.kind == OpKind::Attention) {
        let heads = |k: usize| match values.get(op.inputs.get(k)?.as_ref()?)?.get(1)? {
            DimExpr::Symbol(s) => Some(s.clone()),
            _ => None,
        };
        if let (Some(q), Some(k)) = (heads(0), heads(1)) {
            dims.insert(k.clone(), 2);
            dims.insert(q.clone(), if q == k { 2 } else { 6 });
        }
    }
    dims
}

// A valid key length, for a source that is one.
fn key_count(plain: &Plain, name: &str, dims: &Dims) -> Option<usize> {
    let op = plain.ops.iter().find(|o| {
        let operand = o.inputs.get(4).and_then(Option::as_deref);
        o.kind == OpKind::Attention && operand == Some(name)
    })?;
    let keys = plain.value_dims().remove(op.inputs.get(1)?.as_ref()?)?;
    Some(dim_size(keys.get(2)?, dims)?.saturating_sub(1))
}

fn params(plain: &Plain) -> Attrs {
    let mut params = Attrs::new();
    for op in &plain.ops {
        for (name, attr) in &op.attrs {
            let PlainAttr::Capture(param) = attr else {
                continue;
            };
            let spec = op.kind.spec().attrs.iter().find(|a| a.name == name);
            let value = match spec.map(|a| a.default) {
                Some(AttrDefault::Number(n)) => AttrValue::Float(n),
                Some(AttrDefault::Flag(b)) => AttrValue::Flag(b),
                Some(AttrDefault::Word(w)) => AttrValue::Word(w.into()),
                Some(AttrDefault::Required) => AttrValue::Float(1e-5),
                _ => continue,
            };
            params.insert(param.clone(), value);
        }
    }
    params
}

// A fixed linear map for every role that `call` runs: the first argument's last dim is mixed.
fn calls(plain: &Plain, feed: &mut Feed) {
    for op in plain.ops.iter().filter(|o| o.kind == OpKind::Call) {
        let Some(PlainAttr::Equal(AttrValue::Word(role))) = op.attrs.get("role") else {
            continue;
        };
        let seed = role
            .bytes()
            .fold(7u64, |s, b| s.wrapping_mul(31) + u64::from(b));
        let run = move |args: &[Tensor]| -> Result<Tensor, CatalogError> {
            let Some(x) = args.first() else {
                return Err(candle_core::Error::Msg("a call without arguments".into()).into());
            };
            let width = x.dims().last().copied().unwrap_or(1);
            let map = Random(seed).tensor(&[width, width])?;
            let rows = x.elem_count() / width.max(1);
            let flat = x
                .to_dtype(candle_core::DType::F32)?
                .reshape((rows, width))?;
            Ok(product(&flat, &map)?.reshape(x.dims())?)
        };
        feed.calls.insert(role.clone(), Box::new(run));
    }
}

fn worst(
    reference: &[(String, Tensor)],
    dataflow: &[(String, Tensor)],
    spec: &Spec,
) -> Result<f32, CatalogError> {
    let names =
        |of: &[(String, Tensor)]| -> Vec<String> { of.iter().map(|(n, _)| n.clone()).collect() };
    if names(reference) != names(dataflow) {
        return Err(CatalogError::Evaluation {
            structure: spec.name.clone(),
            at: "outputs".into(),
            reason: format!(
                "the reference makes {:?}, the dataflow {:?}",
                names(reference),
                names(dataflow)
            ),
        });
    }
    let mut worst = 0f32;
    for ((_, a), (_, b)) in reference.iter().zip(dataflow) {
        worst = worst.max(difference(a, b)?);
    }
    Ok(worst)
}

// max |a - b| over max |a|; infinite for other shapes and for non-finite differences.
fn difference(a: &Tensor, b: &Tensor) -> Result<f32, CatalogError> {
    if a.dims() != b.dims() {
        return Ok(f32::INFINITY);
    }
    let flat = |t: &Tensor| -> Result<Vec<f32>, CatalogError> {
        Ok(t.to_dtype(candle_core::DType::F32)?
            .flatten_all()?
            .to_vec1()?)
    };
    let (a, b) = (flat(a)?, flat(b)?);
    let scale = a.iter().fold(0f32, |m, v| m.max(v.abs()));
    let mut worst = 0f32;
    for (x, y) in a.iter().zip(&b) {
        let d = (x - y).abs();
        worst = worst.max(if d.is_nan() { f32::INFINITY } else { d });
    }
    Ok(match worst == 0.0 {
        true => 0.0,
        false => worst / scale,
    })
}

// splitmix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn tensor(&mut self, shape: &[usize]) -> Result<Tensor, CatalogError> {
        let n = shape.iter().product();
        let data: Vec<f32> = (0..n).map(|_| self.next()).collect();
        Ok(Tensor::from_vec(data, shape, &Device::Cpu)?)
    }
}
