//! `catalog verify`: the dataflow of every entry against its reference, on random inputs.
//!
//! Every combination of host axes, several patterns of present optionals, every count of repeated slots, every
//! alternative of an input's dims, captured params at their defaults and away from them; sizes are small ones that
//! satisfy the entry's constraints. Two statements of one structure must agree in f32 within [`TOLERANCE`]; each
//! narrower span, fed with the values the whole region made, must make the same outputs again.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Device, Tensor};
use serde::Serialize;
use structures_graph::{AttrValue, Attrs, OpKind};

use crate::builtin;
use crate::catalog::Catalog;
use crate::error::CatalogError;
use crate::evaluate::{Feed, Tensors};
use crate::names;
use crate::reference::formula::product;
use crate::solve::{dim_size, Dims};
use crate::spec::{DimExpr, Kind, Plain, PlainAttr, Source, Spec};

mod sizes;

pub use sizes::Setting;

/// Largest difference, as a share of the largest reference value.
pub const TOLERANCE: f32 = 1e-5;

// Largest tensor that is tried, and largest dim: a literal dim of a stranger's document must not exhaust memory.
const MAX_ELEMENTS: usize = 1 << 20;
const MAX_DIM: usize = 4096;

/// What a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// The document loads, and its bytes are those of the digest table.
    Document,
    /// Every embedded region is a live region.
    Embedded,
    /// Dataflow, spans and reference agree.
    Dataflow,
}

/// One check of one entry.
#[derive(Clone, Debug)]
pub struct VerifyRow {
    /// What is checked.
    pub check: Check,
    /// Entry.
    pub name: String,
    /// Version.
    pub version: u32,
    /// Host axes and present optionals, for people; empty for what has none.
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
    let mut rows = Vec::new();
    for spec in catalog.list() {
        let row = |check, failure: Option<String>| VerifyRow {
            check,
            combination: String::new(),
            failure,
            ..of(spec)
        };
        rows.push(row(Check::Document, digest_failure(spec)));
        if spec.kind == Kind::StagePipeline {
            let embedded = catalog.check_embedded_of(spec).err();
            rows.push(row(Check::Embedded, embedded.map(|e| e.to_string())));
        }
        rows.extend(verify_spec(spec));
    }
    rows
}

fn of(spec: &Spec) -> VerifyRow {
    VerifyRow {
        check: Check::Dataflow,
        name: spec.name.clone(),
        version: spec.version,
        combination: "any".into(),
        native: spec.reference.is_some(),
        error: 0.0,
        failure: None,
    }
}

// The digest table is for the entries that ship.
fn digest_failure(spec: &Spec) -> Option<String> {
    if !spec.builtin {
        return None;
    }
    let line = format!("{} {} {}", spec.name, spec.version, spec.digest);
    if builtin::DIGESTS.lines().any(|l| l == line) {
        return None;
    }
    Some(format!(
        "its bytes are not those of version {} in the digest table; meaning and bytes change only with `version`",
        spec.version
    ))
}

/// Checks the dataflow of one entry. A pipeline has none.
pub fn verify_spec(spec: &Spec) -> Vec<VerifyRow> {
    let mut rows = Vec::new();
    if spec.kind == Kind::StagePipeline {
        return rows;
    }
    let wanted = BTreeMap::new();
    for axes in spec.host_axis_combinations() {
        for present in patterns(spec) {
            for shape in 0..alternatives(spec) {
                for setting in [Setting::Default, Setting::Altered] {
                    let case = Case {
                        spec,
                        axes: &axes,
                        present: &present,
                        shape,
                        setting,
                        wanted: &wanted,
                    };
                    rows.extend(case.row(rows.len() as u64));
                }
            }
        }
    }
    if rows.is_empty() {
        rows.push(VerifyRow {
            error: f32::NAN,
            failure: Some("no combination has all it needs".into()),
            ..of(spec)
        });
    }
    rows
}

/// Most alternatives of dims that an input has.
pub fn alternatives(spec: &Spec) -> usize {
    let counts = spec.inputs.iter().map(|p| 1 + p.more.len());
    counts.max().unwrap_or(1)
}

/// Sets of present names among optional and repeated sources: every subset of a few optionals, else all, none,
/// each one alone and all but one; every count of repeated slots.
pub fn patterns(spec: &Spec) -> Vec<BTreeSet<String>> {
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
                .chain((0..n).map(|i| ((1 << n) - 1) ^ (1 << i)))
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

/// One combination of what an entry leaves open.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// Entry.
    pub spec: &'a Spec,
    /// Host axes.
    pub axes: &'a BTreeMap<String, String>,
    /// Optional and repeated sources that are there.
    pub present: &'a BTreeSet<String>,
    /// Alternative of the inputs' dims.
    pub shape: usize,
    /// Values of the captured params.
    pub setting: Setting,
    /// Sizes to try before the usual ones.
    pub wanted: &'a BTreeMap<String, usize>,
}

/// A case with everything but the tensors' values.
#[derive(Clone, Debug)]
pub struct Settled {
    /// The operations.
    pub plain: Plain,
    /// Inputs and slots that are there, each in the alternative of the case.
    pub sources: Vec<Source>,
    /// Captured params.
    pub params: Attrs,
    /// Sizes of all symbols.
    pub dims: Dims,
}

impl Settled {
    /// Params as a host hands them to a form: those that are sizes filled in.
    pub fn filled(&self, spec: &Spec) -> Attrs {
        spec.filled(&self.params, &self.dims)
    }
}

impl Case<'_> {
    // `None` where there is no such combination.
    fn row(&self, seed: u64) -> Option<VerifyRow> {
        let (error, failure) = match self.run(seed) {
            Ok(None) => return None,
            // An optional that these axes need.
            Err(CatalogError::MissingInput { .. } | CatalogError::MissingWeight { .. }) => {
                return None
            }
            // Altered params are a guess, which the entry may well refuse.
            Err(CatalogError::Constraint { .. }) if self.setting == Setting::Altered => {
                return None
            }
            Err(e) => (f32::NAN, Some(e.to_string())),
            Ok(Some(error)) if error <= TOLERANCE => (error, None),
            Ok(Some(error)) => {
                let what = format!("differs by {error:e}, at most {TOLERANCE:e}");
                (error, Some(what))
            }
        };
        let axes: Vec<String> = self.axes.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let with: Vec<&str> = self.present.iter().map(String::as_str).collect();
        let mut combination = format!("{} with [{}]", axes.join(" "), with.join(" "));
        if self.shape > 0 {
            combination += &format!(", dims alternative {}", self.shape + 1);
        }
        if self.setting == Setting::Altered {
            combination += ", params altered";
        }
        Some(VerifyRow {
            combination,
            error,
            failure,
            ..of(self.spec)
        })
    }

    /// Operations, params and sizes; `None` where there is no such combination.
    pub fn settle(&self) -> Result<Option<Settled>, CatalogError> {
        let (spec, axes) = (self.spec, self.axes);
        let plain = spec.expand(axes, &|n| self.present.contains(n))?;
        let sources = self.sources();
        let mut params = sizes::params(&plain, Setting::Default);
        if self.setting == Setting::Altered {
            let altered = sizes::params(&plain, Setting::Altered);
            if altered == params {
                return Ok(None);
            }
            params = altered;
        }
        let Some(dims) = sizes::solve(spec, &plain, &sources, &params, self.wanted)? else {
            return Ok(None);
        };
        for (symbol, param) in &spec.symbols {
            let bound = sources
                .iter()
                .any(|s| s.dims.contains(&DimExpr::Symbol(symbol.clone())));
            if let (false, Some(n)) = (bound, dims.get(symbol)) {
                params.insert(param.clone(), AttrValue::Int(*n as i64));
            }
        }
        Ok(Some(Settled {
            plain,
            sources,
            params,
            dims,
        }))
    }

    fn run(&self, seed: u64) -> Result<Option<f32>, CatalogError> {
        let (spec, axes) = (self.spec, self.axes);
        let Some(settled) = self.settle()? else {
            return Ok(None);
        };
        let Settled {
            plain,
            sources,
            params,
            dims,
        } = settled;
        let mut random = Random(seed ^ 0x5eed);
        let mut feed = Feed {
            params,
            ..Feed::default()
        };
        for s in &sources {
            let shape: Option<Vec<usize>> = s.dims.iter().map(|d| dim_size(d, &dims)).collect();
            let shape = shape.ok_or_else(|| CatalogError::Evaluation {
                structure: spec.name.clone(),
                at: s.name.clone(),
                reason: "its dims have no sizes".into(),
            })?;
            let elements = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            if elements.is_none_or(|n| n > MAX_ELEMENTS) || shape.iter().any(|d| *d > MAX_DIM) {
                return Err(CatalogError::Evaluation {
                    structure: spec.name.clone(),
                    at: s.name.clone(),
                    reason: format!(
                        "{shape:?} is too large to be tried: expected at most {MAX_ELEMENTS} elements, {MAX_DIM} in a dim"
                    ),
                });
            }
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
        calls(spec, &plain, &dims, &mut feed);
        let reference = spec.call_reference(axes, &feed)?;
        for (name, made) in &reference {
            let declared = spec.port_dims(name).unwrap_or_default();
            // A repeated output names its index in its dims; its rank and its other dims are held to.
            let fits = declared.len() == made.rank()
                && declared
                    .iter()
                    .zip(made.dims())
                    .all(|(d, n)| d.to_string().contains("<") || dim_size(d, &dims) == Some(*n));
            if !fits {
                let declared: Vec<String> = declared.iter().map(ToString::to_string).collect();
                return Err(CatalogError::Evaluation {
                    structure: spec.name.clone(),
                    at: format!("output `{name}`"),
                    reason: format!(
                        "declared as [{}]; the values made have the shape {:?}",
                        declared.join(", "),
                        made.dims()
                    ),
                });
            }
        }
        let error = worst(&reference, &spec.call_dataflow(axes, &feed)?, spec)?;
        Ok(Some(error.max(spans(spec, &plain, &mut feed)?)))
    }

    // What is there, each input in the alternative of this case.
    fn sources(&self) -> Vec<Source> {
        let all = self.spec.declared_sources().into_iter();
        let here = all.filter(|(s, must)| *must || self.present.contains(&s.name));
        here.map(|(mut s, _)| {
            if let Some(at) = self.shape.min(s.more.len()).checked_sub(1) {
                s.dims = s.more.swap_remove(at);
            }
            s
        })
        .collect()
    }
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

/// A valid key length, for a source that is one.
pub fn key_count(plain: &Plain, name: &str, dims: &Dims) -> Option<usize> {
    let op = plain.ops.iter().find(|o| {
        let operand = o.inputs.get(4).and_then(Option::as_deref);
        o.kind == OpKind::Attention && operand == Some(name)
    })?;
    let keys = plain.value_dims().remove(op.inputs.get(1)?.as_ref()?)?;
    Some(dim_size(keys.get(2)?, dims)?.saturating_sub(1))
}

/// A fixed linear map for every result of every role that `call` runs: the rows of the first argument are mixed into
/// as many values as the result's declared dims have, or as it has itself.
pub fn calls(spec: &Spec, plain: &Plain, dims: &Dims, feed: &mut Feed) {
    for op in plain.ops.iter().filter(|o| o.kind == OpKind::Call) {
        let Some(PlainAttr::Equal(AttrValue::Word(role))) = op.attrs.get("role") else {
            continue;
        };
        let seed = role
            .bytes()
            .fold(7u64, |s, b| s.wrapping_mul(31) + u64::from(b));
        let shape = |k: usize, name: &String| -> Option<Vec<usize>> {
            let port = plain.outputs.iter().find(|(_, v)| v == name);
            let declared = op.view(k).or_else(|| spec.port_dims(&port?.0))?;
            declared.iter().map(|d| dim_size(d, dims)).collect()
        };
        let shapes: Vec<Option<Vec<usize>>> = op
            .outputs
            .iter()
            .enumerate()
            .map(|(k, n)| shape(k, n))
            .collect();
        let run = move |args: &[Tensor]| -> Result<Vec<Tensor>, CatalogError> {
            let Some(x) = args.first() else {
                return Err(candle_core::Error::Msg("a call without arguments".into()).into());
            };
            let x = x.to_dtype(candle_core::DType::F32)?.contiguous()?;
            let mut made = Vec::new();
            for (k, shape) in shapes.iter().enumerate() {
                let shape = shape.clone().unwrap_or_else(|| x.dims().to_vec());
                let wanted: usize = shape.iter().product();
                if wanted == 0 || x.elem_count() == 0 {
                    made.push(Tensor::zeros(shape, x.dtype(), x.device())?);
                    continue;
                }
                // As many leading dims stay rows as leave a whole number of values to each.
                let mut kept = (0..x.rank()).rev().map(|k| x.dims()[..k].iter().product());
                let rows: usize = kept.find(|rows| wanted.is_multiple_of(*rows)).unwrap_or(1);
                let flat = x.reshape((rows, x.elem_count() / rows))?;
                let map = Random(seed + k as u64).tensor(&[flat.dim(1)?, wanted / rows])?;
                made.push(product(&flat, &map)?.reshape(shape)?);
            }
            Ok(made)
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
