//! The executor of `dataflow`: the reference of a structure that exists only as data, and of every span.
//!
//! Operands are widened to f32, an operation computes in f32 and its result is rounded once (nearest even) to the
//! boundary dtype; `as: f32` keeps f32. Owns alignment by dim symbol and rounding; the arithmetic is
//! `structures_graph::kernels`.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use structures_graph::ops::AttrDefault;
use structures_graph::{kernels, AttrValue, Attrs, Layout, OpKind};

use crate::error::CatalogError;
use crate::expr::EvalError;
use crate::rows::Rows;
use crate::solve::{dim_size, sizes, Dims, Shape, Solver};
use crate::spec::{DimExpr, Plain, PlainAttr, PlainOp, SpanDecl, Spec};

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// What `call` runs inside a role: its data inputs to its results, in the order of the op's `let`.
pub type CallFn<'a> = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>, CatalogError> + 'a>;

/// May replace a value: called for every input of the span (in the declared rank) and for every value as it is
/// made. Used to round a point through a number format.
pub type OnValue<'a> = &'a dyn Fn(&str, Tensor) -> Result<Tensor, CatalogError>;

/// What a plain graph runs on.
#[derive(Default)]
pub struct Feed<'a> {
    /// Span inputs by name: boundary inputs, or values the span reads.
    pub inputs: Tensors,
    /// Slots by expanded name, dims in the slot's declared order, any strides.
    pub weights: Tensors,
    /// Captured attributes.
    pub params: Attrs,
    /// Boundary dtype; `None` is f32.
    pub dtype: Option<DType>,
    /// Closures of roles for `call`.
    pub calls: BTreeMap<String, CallFn<'a>>,
    /// Hook.
    pub on_value: Option<OnValue<'a>>,
}

impl Feed<'_> {
    /// The boundary dtype.
    pub fn dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }
}

impl Spec {
    /// The plain graph for what a feed holds.
    pub fn plain_for(
        &self,
        variant: &BTreeMap<String, String>,
        feed: &Feed,
    ) -> Result<Plain, CatalogError> {
        self.expand(variant, &|n| {
            feed.inputs.contains_key(n) || feed.weights.contains_key(n)
        })
    }

    /// Every value of a span under a variant, in the order it is made. The span's outputs are found under the names
    /// that [`Plain::span`] lists.
    pub fn reference_span(
        &self,
        span: &str,
        variant: &BTreeMap<String, String>,
        feed: &Feed,
    ) -> Result<Vec<(String, Tensor)>, CatalogError> {
        let plain = self.plain_for(variant, feed)?;
        self.evaluate(&plain, span, feed)
    }

    /// Runs the operations between a span's `in` and `out`.
    pub fn evaluate(
        &self,
        plain: &Plain,
        span: &str,
        feed: &Feed,
    ) -> Result<Vec<(String, Tensor)>, CatalogError> {
        let Some(span) = plain.span(span) else {
            return Err(CatalogError::Span {
                structure: self.name.clone(),
                span: span.into(),
                expected: plain.spans.iter().map(|s| s.name.clone()).collect(),
            });
        };
        let rank = |n: &str| {
            let given = feed.inputs.get(n).or_else(|| feed.weights.get(n));
            given.map(Tensor::rank)
        };
        Run {
            spec: self,
            plain,
            feed,
            dims: plain.value_dims_of(&rank),
            sizes: Dims::new(),
            params: feed.params.clone(),
        }
        .run(span)
    }
}

struct Run<'a> {
    spec: &'a Spec,
    plain: &'a Plain,
    feed: &'a Feed<'a>,
    dims: BTreeMap<String, Vec<DimExpr>>,
    sizes: Dims,
    params: Attrs,
}

impl Run<'_> {
    fn run(mut self, span: &SpanDecl) -> Result<Vec<(String, Tensor)>, CatalogError> {
        let ops = self.plain.span_ops(span);
        let (mut values, sizes) = self.take_sources(span, &ops)?;
        self.params = self.spec.filled(&self.params, &sizes);
        self.sizes = sizes;
        let rows = Rows::of(values.iter().filter_map(|(n, t)| {
            let slot = self.plain.source(n).is_some_and(|s| s.slot);
            Some((self.dims.get(n).filter(|_| !slot)?.as_slice(), t))
        }));
        for (name, t) in &mut values {
            if let Some(dims) = self.dims.get(name) {
                *t = rows.flatten(dims, t)?;
            }
            if self.plain.source(name).is_none_or(|s| !s.slot) {
                if let Some(hook) = self.feed.on_value {
                    *t = hook(name, t.clone())?;
                }
            }
        }
        let mut made = Vec::new();
        for i in ops {
            let op = &self.plain.ops[i];
            for (k, t) in self.op(op, &values)?.into_iter().enumerate() {
                let Some(name) = op.outputs.get(k) else {
                    continue;
                };
                let t = match op.view(k) {
                    Some(view) => self.viewed(op, name, view, t)?,
                    None => t,
                };
                let mut t = match op.as_f32 {
                    true => t.to_dtype(DType::F32)?,
                    false => t.to_dtype(self.feed.dtype())?,
                };
                if let Some(hook) = self.feed.on_value {
                    t = hook(name, t)?;
                }
                values.insert(name.clone(), t);
                made.push(name.clone());
            }
        }
        // An output that is an input of the span, because everything between was dropped.
        made.extend(
            span.outputs
                .iter()
                .filter(|o| !made.contains(o))
                .cloned()
                .collect::<Vec<_>>(),
        );
        let mut out = Vec::new();
        for name in made {
            let Some(t) = values.remove(&name) else {
                continue;
            };
            let t = match span.outputs.contains(&name) {
                true => t.to_dtype(self.feed.dtype())?,
                false => t,
            };
            let t = rows.restore(self.dims.get(&name).map(Vec::as_slice), t)?;
            out.push((name, t));
        }
        Ok(out)
    }

    // What the operations read from outside, with ranks and sizes checked.
    fn take_sources(
        &self,
        span: &SpanDecl,
        ops: &[usize],
    ) -> Result<(Tensors, Dims), CatalogError> {
        let inside: Vec<&String> = ops
            .iter()
            .flat_map(|o| &self.plain.ops[*o].outputs)
            .collect();
        let read = ops
            .iter()
            .flat_map(|o| self.plain.ops[*o].inputs.iter().flatten());
        let passed = span.outputs.iter().filter(|o| span.inputs.contains(o));
        let mut values = Tensors::new();
        let mut solver = Solver::new(&self.spec.name, Shape::Host);
        solver.seed(&self.plain.symbols, &self.feed.params)?;
        // Inputs first and in order, so that a conflict is told in the entry's own terms.
        let mut names: Vec<&String> = Vec::new();
        let order = span
            .inputs
            .iter()
            .chain(self.plain.sources.iter().map(|s| &s.name));
        let wanted: Vec<&String> = read.chain(passed).collect();
        for name in order {
            let cut = span.inputs.contains(name) || !inside.contains(&name);
            if wanted.contains(&name) && cut && !names.contains(&name) {
                names.push(name);
            }
        }
        for name in names {
            let slot = self.plain.source(name).is_some_and(|s| s.slot);
            let given = match slot {
                true => self.feed.weights.get(name),
                false => self.feed.inputs.get(name),
            };
            let Some(t) = given else {
                let why = format!("span `{}` reads it", span.name);
                return Err(self.spec.missing(name, slot, &why));
            };
            match (self.plain.source(name), self.dims.get(name)) {
                (Some(source), _) => solver.bind_source(source, t.dims())?,
                (None, Some(dims)) => solver.bind(name, dims, t.dims(), !slot)?,
                (None, None) => {}
            }
            values.insert(name.clone(), t.clone());
        }
        Ok((values, solver.finish()?))
    }

    // A result under its declared dims; one of them may be open and takes what is left.
    fn viewed(
        &self,
        op: &PlainOp,
        name: &str,
        view: &[DimExpr],
        t: Tensor,
    ) -> Result<Tensor, CatalogError> {
        let failed = |reason: String| CatalogError::Evaluation {
            structure: self.spec.name.clone(),
            at: format!("{} -> {name}", op.kind),
            reason,
        };
        let mut shape: Vec<Option<usize>> = view.iter().map(|d| dim_size(d, &self.sizes)).collect();
        let open: Vec<usize> = (0..shape.len()).filter(|i| shape[*i].is_none()).collect();
        let known: usize = shape.iter().flatten().product();
        if let [one] = open.as_slice() {
            if known > 0 && t.elem_count().is_multiple_of(known) {
                shape[*one] = Some(t.elem_count() / known);
            }
        }
        if let Some(i) = shape.iter().position(Option::is_none) {
            return Err(failed(format!("dim {} of its view has no size", view[i])));
        }
        let shape: Vec<usize> = shape.into_iter().flatten().collect();
        if shape.iter().product::<usize>() != t.elem_count() {
            return Err(failed(format!(
                "{:?} cannot be viewed as {shape:?}",
                t.dims()
            )));
        }
        Ok(t.contiguous()?.reshape(shape)?)
    }

    fn op(&self, op: &PlainOp, values: &Tensors) -> Result<Vec<Tensor>, CatalogError> {
        let failed = |reason: String| CatalogError::Evaluation {
            structure: self.spec.name.clone(),
            at: format!("{} -> {}", op.kind, op.outputs.join(", ")),
            reason,
        };
        let mut inputs = Vec::new();
        for name in &op.inputs {
            inputs.push(match name {
                None => None,
                Some(n) => Some(
                    values
                        .get(n)
                        .cloned()
                        .ok_or_else(|| failed(format!("`{n}` was not made")))?,
                ),
            });
        }
        let attrs = self.attrs(op)?;
        if op.kind == OpKind::Call {
            let role = attrs.get("role").and_then(AttrValue::as_word).unwrap_or("");
            let run = self
                .feed
                .calls
                .get(role)
                .ok_or_else(|| failed(format!("no closure for role `{role}`")))?;
            let args: Vec<Tensor> = inputs.into_iter().flatten().collect();
            let made = run(&args)?;
            if made.len() != op.outputs.len() {
                let (expected, found) = (op.outputs.len(), made.len());
                return Err(failed(format!(
                    "`{role}` makes {found} results, expected {expected}"
                )));
            }
            return Ok(made);
        }
        if matches!(op.kind, OpKind::Add | OpKind::Mul | OpKind::Modulate) {
            self.align(op, &mut inputs)?;
        }
        let layouts: Vec<Layout> = op
            .inputs
            .iter()
            .map(|n| n.as_ref().and_then(|n| self.plain.source(n)))
            .map(|s| s.map_or(Layout::InOut, |s| s.layout))
            .collect();
        // `round` is numerics of the reference; the kernel wants the dtype of the steps.
        let step = Some(self.feed.dtype());
        kernels::eval_rounded(op.kind, &attrs, &inputs, &layouts, step)
            .map_err(|e| failed(e.to_string()))
    }

    fn attrs(&self, op: &PlainOp) -> Result<Attrs, CatalogError> {
        let mut attrs = Attrs::new();
        for (name, attr) in &op.attrs {
            match attr {
                PlainAttr::Equal(v) => {
                    attrs.insert(name.clone(), v.clone());
                }
                PlainAttr::Dims(dims) => {
                    let value = dims.value(&sizes(&self.sizes));
                    attrs.insert(
                        name.clone(),
                        value.map_err(|e| self.unsized_attr(op, name, &e))?,
                    );
                }
                PlainAttr::Capture(param) => {
                    let spec = op.kind.spec().attrs.iter().find(|a| a.name == name);
                    let required = spec.is_some_and(|a| a.default == AttrDefault::Required);
                    match self.params.get(param) {
                        Some(AttrValue::Absent) | None if !required => {}
                        Some(v) => {
                            attrs.insert(name.clone(), v.clone());
                        }
                        None => {
                            return Err(CatalogError::MissingParam {
                                structure: self.spec.name.clone(),
                                param: param.clone(),
                                op: op.kind.to_string(),
                            })
                        }
                    }
                }
            }
        }
        Ok(attrs)
    }

    // An attribute computed from dims that are not all known: the param that would give the size, where there is one.
    fn unsized_attr(&self, op: &PlainOp, attr: &str, e: &EvalError) -> CatalogError {
        if let EvalError::Absent { what } = e {
            if let Some(param) = self.plain.symbols.get(what) {
                return CatalogError::MissingParam {
                    structure: self.spec.name.clone(),
                    param: param.clone(),
                    op: op.kind.to_string(),
                };
            }
        }
        CatalogError::Evaluation {
            structure: self.spec.name.clone(),
            at: format!("{} -> {}", op.kind, op.outputs.join(", ")),
            reason: format!("attribute `{attr}`: {e}"),
        }
    }

    // Operands of lower rank get dims of 1 where their symbols are not: `[B,D]` meets `[B,M,D]` as `[B,1,D]`.
    fn align(&self, op: &PlainOp, inputs: &mut [Option<Tensor>]) -> Result<(), CatalogError> {
        let dims_of = |k: usize| op.inputs[k].as_ref().and_then(|n| self.dims.get(n));
        let widest = (0..inputs.len())
            .filter_map(dims_of)
            .max_by_key(|d| d.len())
            .cloned();
        let Some(widest) = widest else { return Ok(()) };
        for (k, t) in inputs.iter_mut().enumerate() {
            let (Some(tensor), Some(dims)) = (t.as_ref(), dims_of(k)) else {
                continue;
            };
            if dims.len() == widest.len() || tensor.rank() != dims.len() {
                continue;
            }
            if let Some(shape) = aligned(dims, &widest, tensor.dims()) {
                *t = Some(tensor.reshape(shape)?);
            }
        }
        Ok(())
    }
}

// The shape with ones inserted, matching symbols from the right; `None` leaves numpy's rule.
fn aligned(dims: &[DimExpr], widest: &[DimExpr], shape: &[usize]) -> Option<Vec<usize>> {
    let mut out = vec![1; widest.len()];
    let mut left = dims.len();
    for (at, wide) in widest.iter().enumerate().rev() {
        if left > 0 && dims[left - 1] == *wide {
            left -= 1;
            out[at] = shape[left];
        }
    }
    (left == 0).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_by_symbol() {
        let d = |s: &[&str]| -> Vec<DimExpr> {
            s.iter().map(|s| DimExpr::Symbol((*s).into())).collect()
        };
        let bmd = d(&["B", "M", "D"]);
        assert_eq!(aligned(&d(&["B", "D"]), &bmd, &[2, 5]), Some(vec![2, 1, 5]));
        assert_eq!(aligned(&d(&["D"]), &bmd, &[5]), Some(vec![1, 1, 5]));
        assert_eq!(aligned(&d(&["B", "M"]), &bmd, &[2, 3]), Some(vec![2, 3, 1]));
        assert_eq!(aligned(&d(&["D", "B"]), &bmd, &[2, 3]), None);
        assert_eq!(aligned(&d(&["F"]), &bmd, &[7]), None);
    }

    const TEXT: &str = "
name: t
version: 1
boundary:
  inputs:
    - {name: x, dims: [M, D]}
    - {name: c, dims: [M, D], optional: true}
  outputs: [{name: x, value: out, dims: [M, D]}]
weights: {w: {dims: [D, D], layout: out_in}}
points: [h]
gates: {parity: [cosine]}
slots: {at: module, roles: {q: q}, weights: {w: q.weight}}
dataflow:
  spans:
    whole: {in: [x, c], out: [out]}
    inner: {in: [h], out: [y]}
  ops:
    - {let: n, op: scale, in: [x], attrs: {by: $by}, as: f32}
    - {let: h, op: mul, in: [n, c], needs: [c]}
    - {let: y, op: linear, in: [h, w]}
    - {let: out, op: add, in: [x, y]}
";

    fn tensor(v: &[f32], dims: &[usize]) -> Tensor {
        Tensor::from_slice(v, dims, &candle_core::Device::Cpu).expect("tensor")
    }

    fn floats(t: &Tensor) -> Vec<f32> {
        let t = t.to_dtype(DType::F32).expect("f32");
        t.flatten_all().expect("flat").to_vec1().expect("vec")
    }

    fn spec() -> Spec {
        let catalog = crate::Catalog::default().with_document("t", "t", TEXT);
        catalog.expect("loads").get("t").expect("t").clone()
    }

    fn feed<'a>() -> Feed<'a> {
        Feed {
            inputs: [("x".to_string(), tensor(&[1.0, 2.0, 3.0, 4.0], &[1, 2, 2]))].into(),
            weights: [("w".to_string(), tensor(&[1.0, 10.0, 0.0, 1.0], &[2, 2]))].into(),
            params: [("by".to_string(), AttrValue::Float(2.0))].into(),
            ..Feed::default()
        }
    }

    #[test]
    fn leading_dims_come_back_and_broadcasts_are_filled() {
        let (spec, variant) = (spec(), BTreeMap::new());
        let out = spec.call_dataflow(&variant, &feed()).expect("runs");
        assert_eq!(
            (out[0].0.as_str(), out[0].1.dims()),
            ("x", &[1usize, 2, 2][..])
        );
        assert_eq!(floats(&out[0].1), [43.0, 6.0, 89.0, 12.0]);
        let mut with = feed();
        with.inputs
            .insert("c".into(), tensor(&[0.0, 1.0], &[1, 1, 2]));
        let out = spec.call_dataflow(&variant, &with).expect("runs");
        assert_eq!(floats(&out[0].1), [41.0, 6.0, 83.0, 12.0]);
    }

    #[test]
    fn a_span_starts_in_the_middle() {
        let spec = spec();
        let mut inner = feed();
        inner.inputs = [("h".to_string(), tensor(&[1.0, 2.0], &[1, 2]))].into();
        let values = spec
            .reference_span("inner", &BTreeMap::new(), &inner)
            .expect("runs");
        assert_eq!(values.len(), 1);
        assert_eq!(
            (values[0].0.as_str(), floats(&values[0].1)),
            ("y", vec![21.0, 2.0])
        );
        inner.inputs.clear();
        let e = spec
            .reference_span("inner", &BTreeMap::new(), &inner)
            .expect_err("no h");
        assert_eq!(e.code(), "missing_input");
        let e = spec
            .reference_span("outer", &BTreeMap::new(), &inner)
            .expect_err("no span");
        assert!(e.to_string().contains("whole"), "{e}");
    }

    #[test]
    fn a_hook_sees_inputs_and_values_and_may_replace_them() {
        let spec = spec();
        let seen = std::cell::RefCell::new(Vec::new());
        let zero = |name: &str, t: Tensor| {
            seen.borrow_mut().push(name.to_string());
            Ok(if name == "h" { t.zeros_like()? } else { t })
        };
        let mut feed = feed();
        feed.on_value = Some(&zero);
        let values = spec
            .reference_span("whole", &BTreeMap::new(), &feed)
            .expect("runs");
        // `n` became `h`: the multiplication was dropped, and the point's name survives.
        assert_eq!(*seen.borrow(), ["x", "h", "y", "out"]);
        let (name, out) = values.last().expect("out");
        assert_eq!(
            (name.as_str(), floats(out)),
            ("out", vec![1.0, 2.0, 3.0, 4.0])
        );
    }

    #[test]
    fn rounding_is_once_and_to_the_boundary_dtype() {
        let spec = spec();
        let mut feed = feed();
        feed.dtype = Some(DType::BF16);
        feed.params.insert("by".into(), AttrValue::Float(1.003));
        let values: Tensors = spec
            .reference_span("whole", &BTreeMap::new(), &feed)
            .expect("runs")
            .into_iter()
            .collect();
        assert!(values.values().all(|t| t.dtype() == DType::BF16));
        // The dropped multiplication would have rounded, so its operand does: 1.003 is not a bf16.
        assert_eq!(floats(&values["h"])[0], 1.0);
        feed.inputs
            .insert("c".into(), tensor(&[1.0; 4], &[1, 2, 2]));
        let values: Tensors = spec
            .reference_span("whole", &BTreeMap::new(), &feed)
            .expect("runs")
            .into_iter()
            .collect();
        assert_eq!(values["n"].dtype(), DType::F32);
        assert_eq!(floats(&values["n"])[0], 1.003);
    }

    #[test]
    fn a_param_nobody_gave_is_named() {
        let spec = spec();
        let mut feed = feed();
        feed.params.clear();
        // `by` has a default, so it may stay open.
        assert!(spec.call_dataflow(&BTreeMap::new(), &feed).is_ok());
        let norm = TEXT.replace(
            "op: scale, in: [x], attrs: {by: $by}",
            "op: l2_norm, in: [x], attrs: {eps: $eps}",
        );
        let catalog = crate::Catalog::default()
            .with_document("t", "t", &norm)
            .expect("loads");
        let e = catalog
            .get("t")
            .expect("t")
            .call_dataflow(&BTreeMap::new(), &feed)
            .expect_err("eps");
        assert_eq!(
            e.to_string(),
            "t: param `eps` is missing (attribute of l2_norm)"
        );
    }
}
