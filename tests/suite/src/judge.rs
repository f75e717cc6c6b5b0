//! One form on one case: operands, reference, bind, call, comparison.
//!
//! The reference is the entry's own dataflow on the operands as the form keeps them, so what is left is the form's
//! own error. Outputs are poisoned first. An unquantised f32 form is held to 1e-5 of the largest value, any other to
//! what it declares.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType as HostType, Tensor};
use structures::gates::bind_parity;
use structures::trial::{
    channel_factors, reference, round_weights, ChannelFactors, NamedWeight, Trial,
};
use structures_catalog::solve::dim_size;
use structures_catalog::spec::{DimExpr, PlainOp, Source, SpanDecl};
use structures_catalog::{verify, Catalog, CatalogError, Feed, Spec};
use structures_graph::{Attrs, OpKind};
use structures_plugin_api::describe::{BindParams, FormDecl, ProbeShapes, StatisticDecl};
use structures_plugin_api::formats::Balance;
use structures_plugin_api::DType;

use crate::cases::{drafts, Draft, Values, ROWS};
use crate::error::SuiteError;
use crate::executor::{Executor, Request};
use crate::operand::Operand;
use crate::random::Random;

/// Largest difference of an unquantised form at an f32 boundary, as a share of the largest reference value.
pub const EXACT: f32 = 1e-5;
/// Relative L2 that a bf16 boundary may cost whatever a form declares: both sides round every step, one in some
/// values the other way.
pub const BF16: f64 = 1e-2;

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Within the tolerance.
    Passed,
    /// Wrong, or broken.
    Failed,
    /// The plugin said no to what it declares.
    Refused,
}

/// One judged case.
#[derive(Clone, Debug)]
pub struct Row {
    /// Plugin.
    pub plugin: String,
    /// Form.
    pub form: String,
    /// Structure.
    pub structure: String,
    /// Version.
    pub version: u32,
    /// Span; empty when the row is about the form.
    pub span: String,
    /// For people.
    pub case: String,
    /// What became of it.
    pub outcome: Outcome,
    /// How far off: share of the largest value, or relative L2.
    pub error: Option<f64>,
    /// `parity`, `non_finite`, `unwritten`, `reference`, `no_case`, `structure_unknown`, or the plugin's own code.
    pub code: Option<String>,
    /// Expected and found.
    pub reason: Option<String>,
}

impl Row {
    /// Whether all is well.
    pub fn passed(&self) -> bool {
        self.outcome == Outcome::Passed
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Row {
            plugin,
            form,
            structure,
            version,
            span,
            case,
            ..
        } = self;
        let outcome = format!("{:?}", self.outcome).to_lowercase();
        write!(
            f,
            "{outcome} {plugin} {structure} v{version} {form} {span} ({case})"
        )?;
        if let Some(error) = self.error {
            write!(f, " error {error:.2e}")?;
        }
        if let Some(code) = &self.code {
            write!(f, " {code}")?;
        }
        match &self.reason {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

/// Judges one form in every version it declares.
///
/// # Errors
/// When the suite or an entry cannot go on; what the plugin does is in the rows.
pub fn form(
    executor: &dyn Executor,
    catalog: &Catalog,
    form: &FormDecl,
) -> Result<Vec<Row>, SuiteError> {
    let mut rows = Vec::new();
    for version in &form.spec_versions {
        let about = |code: &str, reason: String, span: &str| Row {
            plugin: executor.description().id.clone(),
            form: form.name.clone(),
            structure: form.structure.clone(),
            version: *version,
            span: span.into(),
            case: "any".into(),
            outcome: Outcome::Failed,
            error: None,
            code: Some(code.into()),
            reason: Some(reason),
        };
        let spec = match catalog.get_version(&form.structure, *version) {
            Ok(spec) => spec,
            Err(e) => {
                rows.push(about("structure_unknown", e.to_string(), ""));
                continue;
            }
        };
        let drafts = drafts(spec, form)?;
        let mut judged: BTreeSet<&str> = BTreeSet::new();
        for (seed, draft) in drafts.iter().enumerate() {
            let case = Judge::new(spec, form, draft);
            if let Some(verdict) = case.judge(executor, seed as u64)? {
                judged.insert(&draft.span);
                rows.push(Row {
                    span: draft.span.clone(),
                    case: draft.name.clone(),
                    outcome: verdict.outcome,
                    error: verdict.error,
                    code: verdict.code,
                    reason: verdict.reason,
                    ..about("", String::new(), "")
                });
            }
        }
        for span in form.spans.iter().filter(|s| !judged.contains(s.as_str())) {
            let text = "no case of this span is within what the form declares".to_string();
            rows.push(about("no_case", text, span));
        }
    }
    Ok(rows)
}

/// What became of one case.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Passed, failed or refused.
    pub outcome: Outcome,
    /// How far off.
    pub error: Option<f64>,
    /// As [`Row::code`].
    pub code: Option<String>,
    /// Expected and found.
    pub reason: Option<String>,
}

impl Verdict {
    fn failed(code: &str, reason: String) -> Self {
        Verdict {
            outcome: Outcome::Failed,
            error: None,
            code: Some(code.into()),
            reason: Some(reason),
        }
    }

    fn refused(code: String, reason: String) -> Self {
        Verdict {
            outcome: Outcome::Refused,
            error: None,
            code: Some(code),
            reason: Some(reason),
        }
    }
}

/// One case of one form.
pub struct Judge<'a> {
    spec: &'a Spec,
    form: &'a FormDecl,
    draft: &'a Draft,
}

/// A span's operands.
struct Operands {
    /// In the span's order; `None` for one that these axes do not read.
    inputs: Vec<(String, Option<Operand>)>,
    /// All slots that are there.
    weights: Vec<(Source, Operand)>,
}

/// What became of making a case ready.
pub enum Made<'a> {
    /// The form does not declare this, or the entry does not have it.
    Outside,
    /// The reference itself cannot do it.
    Broken(Verdict),
    /// Ready to be bound and called.
    Ready(Box<Prepared<'a>>),
}

/// A case with its operands and the reference's answer.
pub struct Prepared<'a> {
    judge: Judge<'a>,
    span: SpanDecl,
    operands: Operands,
    /// Weights as given, f32.
    named: Vec<NamedWeight>,
    /// Weights as the form keeps them.
    rounded: Vec<(String, Tensor)>,
    params: Attrs,
    statistics: BTreeMap<String, Vec<f32>>,
    shapes: ProbeShapes,
    request: Request,
    want: Vec<(String, Tensor)>,
}

impl<'a> Judge<'a> {
    /// A case.
    pub fn new(spec: &'a Spec, form: &'a FormDecl, draft: &'a Draft) -> Self {
        Judge { spec, form, draft }
    }

    /// `None` when the form does not declare this.
    fn judge(self, executor: &dyn Executor, seed: u64) -> Result<Option<Verdict>, SuiteError> {
        match self.prepare(seed, false)? {
            Made::Outside => Ok(None),
            Made::Broken(verdict) => Ok(Some(verdict)),
            Made::Ready(case) => case.judge(executor).map(Some),
        }
    }

    /// Operands, and what the reference makes of them. With `beyond`, also where the form declares that it does not
    /// serve.
    ///
    /// # Errors
    /// When the suite or the entry cannot go on.
    pub fn prepare(self, seed: u64, beyond: bool) -> Result<Made<'a>, SuiteError> {
        let plain = &self.draft.settled.plain;
        let Some(span) = plain.span(&self.draft.span) else {
            return Ok(Made::Outside);
        };
        let ops: Vec<&PlainOp> = plain
            .span_ops(span)
            .iter()
            .map(|i| &plain.ops[*i])
            .collect();
        let operands = self.operands(span, &ops, seed)?;
        let rows = rows_of(&operands);
        let shapes = self.shapes(rows);
        if !beyond && (self.form.admits(&shapes).is_err() || !self.in_work(rows)) {
            return Ok(Made::Outside);
        }
        let params = self.draft.settled.filled(self.spec);
        let named: Vec<NamedWeight> = operands
            .weights
            .iter()
            .map(|(source, operand)| {
                Ok(NamedWeight {
                    name: source.name.clone(),
                    layout: source.layout,
                    tensor: operand.tensor()?.to_dtype(HostType::F32)?,
                })
            })
            .collect::<Result<_, SuiteError>>()?;
        let plainly = round_weights(&named, self.form, &ChannelFactors::new())?;
        let seen = match self.seen(span, &operands, &plainly, &params) {
            Ok(seen) => seen,
            Err(SuiteError::Catalog(CatalogError::Constraint { .. })) => return Ok(Made::Outside),
            Err(e) => return Ok(Made::Broken(Verdict::failed("reference", e.to_string()))),
        };
        let statistics = self.statistics(&seen);
        let balance = Balance::default();
        let factors = channel_factors(plain, self.form, &statistics, &balance);
        let rounded = round_weights(&named, self.form, &factors)?;
        let want = reference(
            (self.spec, plain, &span.name),
            self.feed(&operands.inputs, &rounded, &params)?,
            &span.outputs,
            self.form,
            &statistics,
            &balance,
        );
        let want = match want {
            Ok(want) => want,
            Err(e) => return Ok(Made::Broken(Verdict::failed("reference", e.to_string()))),
        };
        let used = |name: &str| {
            let mut read = ops.iter().flat_map(|op| op.inputs.iter().flatten());
            read.any(|n| n == name)
        };
        let turned = |operand: &Operand| match self.draft.swapped {
            true => operand.clone().swapped(),
            false => operand.clone(),
        };
        let request = Request {
            form: self.form.name.clone(),
            span: span.name.clone(),
            weights: operands
                .weights
                .iter()
                .filter(|(source, _)| used(&source.name))
                .map(|(source, operand)| (source.name.clone(), turned(operand)))
                .collect(),
            statistics: statistics.clone().into_iter().collect(),
            params: BindParams {
                structure: self.spec.name.clone(),
                version: self.spec.version,
                variant: self.draft.variant.clone(),
                params: params
                    .iter()
                    .map(|(name, value)| Ok((name.clone(), serde_json::to_value(value)?)))
                    .collect::<Result<_, SuiteError>>()?,
                dims: shapes.dims.clone(),
                inputs: span.inputs.clone(),
                outputs: span.outputs.clone(),
                states: span.states.clone(),
                scheme: BTreeMap::new(),
                packed: BTreeMap::new(),
                wires: BTreeMap::new(),
                kept: None,
            },
            dtype: self.draft.dtype,
            capacity: rows,
        };
        Ok(Made::Ready(Box::new(Prepared {
            span: span.clone(),
            judge: self,
            operands,
            named,
            rounded,
            params,
            statistics,
            shapes,
            request,
            want,
        })))
    }

    fn operands(
        &self,
        span: &SpanDecl,
        ops: &[&PlainOp],
        seed: u64,
    ) -> Result<Operands, SuiteError> {
        let settled = &self.draft.settled;
        let plain = &settled.plain;
        let mut random = Random::new(seed);
        let ranks: BTreeMap<&str, usize> = settled
            .sources
            .iter()
            .map(|s| (s.name.as_str(), s.dims.len()))
            .collect();
        let dims = plain.value_dims_of(&|name| ranks.get(name).copied());
        let sized = |name: &str, dims: &[DimExpr]| -> Result<Vec<usize>, SuiteError> {
            let sizes = dims.iter().map(|d| dim_size(d, &settled.dims));
            let sizes: Option<Vec<usize>> = sizes.collect();
            sizes.ok_or_else(|| {
                SuiteError::Catalog(CatalogError::Evaluation {
                    structure: self.spec.name.clone(),
                    at: name.into(),
                    reason: "its dims have no sizes".into(),
                })
            })
        };
        let read = |name: &String| {
            let mut read = ops.iter().flat_map(|op| op.inputs.iter().flatten());
            read.any(|n| n == name) || span.outputs.contains(name)
        };
        let mut inputs = Vec::new();
        for name in &span.inputs {
            let declared = match (read(name), dims.get(name)) {
                (true, Some(declared)) => declared,
                _ => {
                    inputs.push((name.clone(), None));
                    continue;
                }
            };
            let mut shape = sized(name, declared)?;
            let dtype = self.dtype_of(name);
            let values = match verify::key_count(plain, name, &settled.dims) {
                Some(keys) => vec![keys as f32; shape.iter().product()],
                None => self.values(&mut random, inputs.is_empty(), name, ops, &shape),
            };
            let leads = matches!(declared.first(), Some(DimExpr::Symbol(s)) if s == ROWS);
            if self.draft.lead && leads {
                shape.insert(0, 1);
            }
            inputs.push((name.clone(), Some(Operand::new(&values, &shape, dtype))));
        }
        let mut weights = Vec::new();
        for source in settled.sources.iter().filter(|s| s.slot) {
            let shape = sized(&source.name, &source.dims)?;
            let mut values = random.values(shape.iter().product());
            if shape.len() == 2 {
                // Products stay of the size of what goes in.
                let fan_in = match source.layout {
                    structures_graph::Layout::InOut => shape[0],
                    structures_graph::Layout::OutIn => shape[1],
                };
                let by = 1.7 / (fan_in.max(1) as f32).sqrt();
                values.iter_mut().for_each(|v| *v *= by);
            }
            let operand = Operand::new(&values, &shape, self.draft.dtype);
            weights.push((source.clone(), operand));
        }
        Ok(Operands { inputs, weights })
    }

    fn values(
        &self,
        random: &mut Random,
        first: bool,
        name: &str,
        ops: &[&PlainOp],
        shape: &[usize],
    ) -> Vec<f32> {
        let mut values = random.values(shape.iter().product());
        let width = shape.last().copied().unwrap_or(1);
        let masks = |op: &&PlainOp| {
            let operand = op.inputs.get(MASK).and_then(Option::as_deref);
            op.kind == OpKind::Attention && operand == Some(name)
        };
        if ops.iter().any(masks) {
            // One query that sees nothing, unless it is the only one, and a key that some do not see.
            let rows = values.len() / width.max(1);
            for (i, value) in values.iter_mut().enumerate() {
                if (rows > 1 && i / width == rows / 2)
                    || (i % width == width / 2 && i / width % 2 == 1)
                {
                    *value = f32::NEG_INFINITY;
                }
            }
            return values;
        }
        match self.draft.values {
            Values::Usual => {}
            Values::ZeroRow => values.iter_mut().take(width).for_each(|v| *v = 0.0),
            Values::Large if first => values.iter_mut().for_each(|v| *v *= 16.0),
            Values::Large => {}
        }
        values
    }

    /// Dtype of a span's input: its own where the entry fixes one, else the boundary's.
    fn dtype_of(&self, name: &str) -> DType {
        let port = self.spec.inputs.iter().find(|p| p.name == name);
        match port.map(|p| p.dtype.as_str()) {
            Some("f32") => DType::F32,
            Some("i64") => DType::I64,
            _ => self.draft.dtype,
        }
    }

    fn shapes(&self, rows: u64) -> ProbeShapes {
        let dims = self.draft.settled.dims.iter();
        ProbeShapes {
            structure: self.spec.name.clone(),
            span: self.draft.span.clone(),
            rows: vec![rows],
            dims: dims.map(|(s, n)| (s.clone(), *n as u64)).collect(),
            variant: self.draft.variant.clone(),
        }
    }

    fn in_work(&self, rows: u64) -> bool {
        let Some(band) = &self.form.band.work else {
            return true;
        };
        let dims = self.draft.settled.dims.iter();
        let dims = dims.map(|(s, n)| (s.clone(), *n as u64)).collect();
        band.admits(rows, &dims).is_ok()
    }

    fn feed(
        &self,
        inputs: &[(String, Option<Operand>)],
        weights: &[(String, Tensor)],
        params: &Attrs,
    ) -> Result<Feed<'static>, SuiteError> {
        let mut feed = Feed {
            weights: weights.iter().cloned().collect(),
            params: params.clone(),
            dtype: Some(match self.draft.dtype {
                DType::Bf16 => HostType::BF16,
                _ => HostType::F32,
            }),
            ..Feed::default()
        };
        for (name, operand) in inputs {
            if let Some(operand) = operand {
                feed.inputs.insert(name.clone(), operand.tensor()?);
            }
        }
        let settled = &self.draft.settled;
        verify::calls(self.spec, &settled.plain, &settled.dims, &mut feed);
        Ok(feed)
    }

    /// Every value of the span, unrounded: what a calibration would have seen.
    fn seen(
        &self,
        span: &SpanDecl,
        operands: &Operands,
        weights: &[(String, Tensor)],
        params: &Attrs,
    ) -> Result<BTreeMap<String, Tensor>, SuiteError> {
        let seen = RefCell::new(BTreeMap::new());
        let watch = |name: &str, t: Tensor| -> Result<Tensor, CatalogError> {
            seen.borrow_mut().insert(name.to_string(), t.clone());
            Ok(t)
        };
        let feed = Feed {
            on_value: Some(&watch),
            ..self.feed(&operands.inputs, weights, params)?
        };
        self.spec
            .evaluate(&self.draft.settled.plain, &span.name, &feed)?;
        drop(feed);
        Ok(seen.into_inner())
    }

    fn statistics(&self, seen: &BTreeMap<String, Tensor>) -> BTreeMap<String, Vec<f32>> {
        let mut found = BTreeMap::new();
        for s in &self.form.statistics {
            let Some(values) = seen.get(&s.point).and_then(|t| measured(s, t)) else {
                continue;
            };
            found.insert(
                format!("{}|{}|{}", s.point, s.statistic, s.granularity),
                values,
            );
        }
        found
    }
}

impl Prepared<'_> {
    /// The form's shapes, as a probe gets them.
    pub fn shapes(&self) -> &ProbeShapes {
        &self.shapes
    }

    /// What is bound.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// What a call reads, in the span's order.
    pub fn inputs(&self) -> Vec<Option<Operand>> {
        self.operands
            .inputs
            .iter()
            .map(|(_, operand)| operand.clone())
            .collect()
    }

    /// Names of the inputs.
    pub fn input_names(&self) -> impl Iterator<Item = &str> {
        self.operands.inputs.iter().map(|(name, _)| name.as_str())
    }

    /// What the reference makes.
    pub fn want(&self) -> &[(String, Tensor)] {
        &self.want
    }

    /// Room for the outputs, poisoned.
    pub fn outputs(&self) -> Vec<Operand> {
        let made = self.want.iter();
        made.map(|(_, t)| Operand::poisoned(t.dims(), self.judge.draft.dtype))
            .collect()
    }

    /// What the reference makes of other inputs of the same shapes.
    ///
    /// # Errors
    /// When the entry cannot go on.
    pub fn reference_of(
        &self,
        inputs: &[Option<Operand>],
    ) -> Result<Vec<(String, Tensor)>, SuiteError> {
        let names = self.operands.inputs.iter().map(|(name, _)| name.clone());
        let named: Vec<(String, Option<Operand>)> = names.zip(inputs.iter().cloned()).collect();
        Ok(reference(
            (
                self.judge.spec,
                &self.judge.draft.settled.plain,
                &self.span.name,
            ),
            self.judge.feed(&named, &self.rounded, &self.params)?,
            &self.span.outputs,
            self.judge.form,
            &self.statistics,
            &Balance::default(),
        )?)
    }

    fn judge(&self, executor: &dyn Executor) -> Result<Verdict, SuiteError> {
        if let Some(verdict) = self.probe(executor) {
            return Ok(verdict);
        }
        let bound = match executor.bind(&self.request) {
            Ok(bound) => bound,
            Err(e) => return Ok(Verdict::refused(e.code.clone(), e.to_string())),
        };
        let mut outputs = self.outputs();
        if let Err(e) = bound.call(&self.inputs(), &mut outputs) {
            return Ok(Verdict::failed(&e.code, e.to_string()));
        }
        self.compare(&outputs, true)
    }

    /// What is wrong when the plugin's own probe says no to a case that it declares.
    pub fn probe(&self, executor: &dyn Executor) -> Option<Verdict> {
        match executor.probe(&self.request.form, &self.shapes) {
            Ok(report) if report.probed => None,
            Ok(report) => {
                let code = report.code.unwrap_or_else(|| "entry_missing".into());
                let reason = report.reason.unwrap_or_default();
                Some(Verdict::refused(code, reason))
            }
            Err(e) => Some(Verdict::failed(&e.code, e.to_string())),
        }
    }

    /// Compares what a call made with the reference. `strict` holds an unquantised f32 form to [`EXACT`]; else every
    /// form is held to what it declares, as at bind.
    ///
    /// # Errors
    /// When the comparison itself cannot be made.
    pub fn compare(&self, got: &[Operand], strict: bool) -> Result<Verdict, SuiteError> {
        let Judge { form, draft, spec } = self.judge;
        let (operands, want) = (&self.operands, &self.want);
        let exact = strict && draft.dtype == DType::F32 && form.format == "none";
        let tolerance = form.tolerance.min(structures_loader::tolerance_cap(form));
        let tolerance = match draft.dtype {
            DType::Bf16 => tolerance.max(BF16),
            _ => tolerance,
        };
        let mut error = 0.0_f64;
        for ((name, want), got) in want.iter().zip(got) {
            let want: Vec<f32> = want.to_dtype(HostType::F32)?.flatten_all()?.to_vec1()?;
            let got = got.values();
            if let Some(i) = (0..want.len()).find(|i| want[*i].is_finite() && !got[*i].is_finite())
            {
                let (code, what) = match got[i].is_nan() {
                    true => ("unwritten", "not written, or not a number"),
                    false => ("non_finite", "infinite"),
                };
                let text = format!("output `{name}` at {i}: {what}, expected {}", want[i]);
                return Ok(Verdict::failed(code, text));
            }
            if exact {
                let largest = want.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
                let off = want.iter().zip(&got).map(|(w, g)| (w - g).abs());
                let off = off.fold(0.0_f32, f32::max);
                let share = if off == 0.0 { 0.0 } else { off / largest };
                error = error.max(f64::from(share));
                if share > EXACT {
                    let text = format!("output `{name}` is off by {share:.2e} of its largest value, at most {EXACT:.0e}");
                    return Ok(Verdict {
                        error: Some(error),
                        ..Verdict::failed("parity", text)
                    });
                }
            } else {
                let parity = bind_parity(&got, &want, tolerance);
                error = error.max(parity.relative_l2);
                if let Some(refusal) = parity.refusal() {
                    return Ok(Verdict {
                        error: Some(error),
                        ..Verdict::failed("parity", format!("output `{name}`: {}", refusal.reason))
                    });
                }
            }
        }
        if !exact && draft.dtype == DType::F32 {
            // As the host does at bind: an output that ends in `+ input` without that input.
            let trial = Trial {
                spec,
                span: &self.span.name,
                variant: &draft.variant,
                params: &self.params,
                inputs: Vec::new(),
                row_axes: Vec::new(),
                outputs: self.span.outputs.clone(),
                balance: Balance::default(),
            };
            let inputs: Vec<(String, Option<Tensor>)> = operands
                .inputs
                .iter()
                .map(|(name, operand)| {
                    let tensor = operand.as_ref().map(Operand::tensor).transpose()?;
                    Ok((name.clone(), tensor))
                })
                .collect::<Result<_, SuiteError>>()?;
            let got: Vec<Tensor> = got.iter().map(Operand::tensor).collect::<Result<_, _>>()?;
            if let Err(reason) = trial.compare(&inputs, want, &got, &self.named, tolerance)? {
                return Ok(Verdict::failed("parity", reason));
            }
        }
        Ok(Verdict {
            outcome: Outcome::Passed,
            error: Some(error),
            code: None,
            reason: None,
        })
    }
}

/// Operand of an attention that is its additive mask.
const MASK: usize = 3;

/// Most rows an operand of the call has.
fn rows_of(operands: &Operands) -> u64 {
    let first = operands.inputs.iter().find_map(|(_, o)| o.as_ref());
    first.map_or(1, |o| {
        o.dims[..o.dims.len().saturating_sub(1)]
            .iter()
            .product::<usize>() as u64
    })
}

/// A statistic of a value; `None` for one nobody defines.
fn measured(s: &StatisticDecl, t: &Tensor) -> Option<Vec<f32>> {
    let width = t.dims().last().copied().unwrap_or(1).max(1);
    let values: Vec<f32> = t
        .to_dtype(HostType::F32)
        .and_then(|t| t.flatten_all())
        .and_then(|t| t.to_vec1())
        .ok()?;
    let channels = |each: &dyn Fn(f32, f32) -> f32| -> Vec<f32> {
        let mut all = vec![0.0; width];
        for row in values.chunks_exact(width) {
            for (to, v) in all.iter_mut().zip(row) {
                *to = each(*to, *v);
            }
        }
        all
    };
    let rows = (values.len() / width).max(1) as f32;
    match (s.statistic.as_str(), s.granularity.as_str()) {
        ("amax", "tensor") => Some(vec![values.iter().fold(0.0, |m: f32, v| m.max(v.abs()))]),
        ("amax", "channel") => Some(channels(&|m, v| m.max(v.abs()))),
        ("second_moment", "channel") => Some(channels(&|m, v| m + v * v / rows)),
        ("content", _) => Some(values),
        _ => None,
    }
}
