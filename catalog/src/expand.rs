//! The declared dataflow under one choice of host axes and present optionals: a plain graph.
//!
//! `when`, `for`, `needs` and `<name>` are gone afterwards, operations stand in an executable order, every operand
//! is a value or absent. Matching and evaluation both start here.

use std::collections::{BTreeMap, BTreeSet};

use structures_graph::{AttrValue, Layout, OpKind};

use crate::error::CatalogError;
use crate::names;
use crate::spec::{AttrDecl, DimExpr, OpDecl, Plain, PlainAttr, PlainOp, Source, SpanDecl, Spec};

impl Spec {
    // A pipeline has no dataflow and no reference.
    pub(crate) fn need_region(&self) -> Result<(), CatalogError> {
        match self.pipeline {
            None => Ok(()),
            Some(_) => Err(CatalogError::NoStandaloneReference {
                name: self.name.clone(),
                version: self.version,
            }),
        }
    }

    /// Every combination of host axes, in declared order; one empty one when there is none.
    pub fn host_axis_combinations(&self) -> Vec<BTreeMap<String, String>> {
        let mut all = vec![BTreeMap::new()];
        for (name, axis) in self.variants.iter().filter(|(_, a)| a.host) {
            all = all
                .iter()
                .flat_map(|one| {
                    axis.values.keys().map(move |v| {
                        let mut one = one.clone();
                        one.insert(name.clone(), v.clone());
                        one
                    })
                })
                .collect();
        }
        all
    }

    /// Host axes of a variant, completed by defaults. Form axes are checked and left out.
    pub fn host_axes(
        &self,
        given: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, CatalogError> {
        for (axis, value) in given {
            let Some(known) = self.variants.get(axis) else {
                return Err(CatalogError::Variant {
                    structure: self.name.clone(),
                    axis: axis.clone(),
                    expected: self.variants.keys().cloned().collect(),
                    found: value.clone(),
                });
            };
            if !known.values.contains_key(value) {
                return Err(self.variant(axis, value));
            }
        }
        let mut axes = BTreeMap::new();
        for (name, axis) in self.variants.iter().filter(|(_, a)| a.host) {
            match given.get(name).or(axis.default.as_ref()) {
                Some(v) => axes.insert(name.clone(), v.clone()),
                None => return Err(self.variant(name, "not given")),
            };
        }
        Ok(axes)
    }

    fn variant(&self, axis: &str, found: &str) -> CatalogError {
        let values = self.variants.get(axis).map(|a| &a.values);
        CatalogError::Variant {
            structure: self.name.clone(),
            axis: axis.into(),
            expected: values
                .into_iter()
                .flatten()
                .map(|(k, _)| k.clone())
                .collect(),
            found: found.into(),
        }
    }

    /// Slots and boundary inputs with repeats written out: `(source, must be there)`.
    pub fn declared_sources(&self) -> Vec<(Source, bool)> {
        let mut all = Vec::new();
        for p in &self.inputs {
            for (n, name) in repeats(&p.name, p.repeat) {
                let source = Source {
                    name,
                    slot: false,
                    optional: p.optional,
                    layout: Layout::InOut,
                    dims: numbered(&p.dims, n),
                    more: p.more.iter().map(|d| numbered(d, n)).collect(),
                };
                all.push((source, !p.optional && p.repeat.is_none()));
            }
        }
        for s in &self.weights {
            let first = s.repeat.map_or(0, |r| r.0);
            for (n, name) in repeats(&s.name, s.repeat) {
                let source = Source {
                    name,
                    slot: true,
                    optional: s.optional,
                    layout: s.layout,
                    dims: numbered(&s.dims, n),
                    more: Vec::new(),
                };
                let needed = s.repeat.is_none() || n.unwrap_or(0) < first + s.least;
                all.push((source, !s.optional && needed));
            }
        }
        all
    }

    /// The plain graph under these host axes (a whole variant may be given), with the optional and repeated
    /// slots and inputs for which `present` holds.
    pub fn expand(
        &self,
        axes: &BTreeMap<String, String>,
        present: &dyn Fn(&str) -> bool,
    ) -> Result<Plain, CatalogError> {
        self.need_region()?;
        let axes = self.host_axes(axes)?;
        let sources = self.declared_sources();
        let candidates = self.candidates(&axes)?;
        let mut graph = Expansion {
            spec: self,
            declared: sources.iter().map(|(s, _)| (s.name.as_str(), s)).collect(),
            present: sources
                .iter()
                .filter(|(s, must)| *must || present(&s.name))
                .map(|(s, _)| s.name.as_str())
                .collect(),
            made: BTreeSet::new(),
            ops: Vec::new(),
            dropped: Vec::new(),
        };
        graph.place(candidates)?;
        let Expansion { ops, dropped, .. } = graph;
        let mut plain = Plain {
            axes,
            sources: sources.iter().map(|(s, _)| s.clone()).collect(),
            ops,
            spans: self.dataflow.spans.clone(),
            points: self.points.clone(),
            outputs: self.port_values(),
            aliases: BTreeMap::new(),
            symbols: self.symbols.clone(),
            constraints: Vec::new(),
        };
        let applying = self.constraints.iter().filter(|c| c.applies(&plain.axes));
        plain.constraints = applying.cloned().collect();
        self.resolve_spans(&mut plain);
        resolve_dropped(&mut plain, dropped).map_err(|(value, reason)| CatalogError::Dataflow {
            structure: self.name.clone(),
            value,
            reason,
        })?;
        tidy(&mut plain);
        Ok(plain)
    }

    // Active operations with names substituted; repeated ones once an index.
    fn candidates(&self, axes: &BTreeMap<String, String>) -> Result<Vec<Candidate>, CatalogError> {
        let mut all = Vec::new();
        for op in &self.dataflow.ops {
            let active = op
                .when
                .iter()
                .all(|(axis, values)| axes.get(axis).is_some_and(|v| values.contains(v)));
            if !active {
                continue;
            }
            match &op.repeat {
                None => all.push(self.candidate(op, axes, None)?),
                Some((index, values)) => {
                    for v in values {
                        all.push(self.candidate(op, axes, Some((index, v)))?);
                    }
                }
            }
        }
        Ok(all)
    }

    fn candidate(
        &self,
        op: &OpDecl,
        axes: &BTreeMap<String, String>,
        index: Option<(&str, &str)>,
    ) -> Result<Candidate, CatalogError> {
        let value = |name: &str| match index {
            Some((i, v)) if i == name => Some(v.to_string()),
            _ => axes.get(name).cloned(),
        };
        let replaced = |s: &String| {
            names::substitute(s, &value).ok_or_else(|| CatalogError::Dataflow {
                structure: self.name.clone(),
                value: s.clone(),
                reason: "its `<name>` is no host axis and no index of this op".into(),
            })
        };
        let all = |list: &[String]| list.iter().map(replaced).collect::<Result<Vec<_>, _>>();
        let mut mentions: Vec<String> = op.when.keys().cloned().collect();
        let texts = op.lets.iter().chain(&op.inputs).chain(&op.needs);
        let named = texts.flat_map(|s| names::indices(s));
        mentions.extend(named.filter(|n| self.variants.contains_key(n)));
        let mut attrs = BTreeMap::new();
        for (name, attr) in &op.attrs {
            let plain = match attr {
                AttrDecl::Literal(AttrValue::Word(w)) => {
                    PlainAttr::Equal(AttrValue::Word(replaced(w)?))
                }
                AttrDecl::Literal(v) => PlainAttr::Equal(v.clone()),
                AttrDecl::Capture(param) => PlainAttr::Capture(param.clone()),
                AttrDecl::Dims(dims) => PlainAttr::Dims(dims.clone()),
                AttrDecl::Axis(axis) => {
                    mentions.push(axis.clone());
                    PlainAttr::Equal(self.mapped(axis, axes))
                }
            };
            attrs.insert(name.clone(), plain);
        }
        mentions.sort();
        mentions.dedup();
        let view = |dims: &Option<Vec<DimExpr>>| -> Result<Option<Vec<DimExpr>>, CatalogError> {
            let Some(dims) = dims else { return Ok(None) };
            let one = |d: &DimExpr| match d {
                DimExpr::Symbol(s) => replaced(s).map(DimExpr::Symbol),
                d => Ok(d.clone()),
            };
            dims.iter().map(one).collect::<Result<_, _>>().map(Some)
        };
        Ok(Candidate {
            repeated: index.is_some(),
            inputs: all(&op.inputs)?,
            needs: all(&op.needs)?,
            op: PlainOp {
                kind: op.op,
                inputs: Vec::new(),
                outputs: all(&op.lets)?,
                attrs,
                views: op.views.iter().map(view).collect::<Result<_, _>>()?,
                mentions,
                as_f32: op.as_f32,
                anchor: op.anchor,
                shared: op.shared,
                refuse: op.refuse.clone(),
            },
        })
    }

    // The attribute's value of an axis: a number or flag where the mapped word is one.
    fn mapped(&self, axis: &str, axes: &BTreeMap<String, String>) -> AttrValue {
        let word = axes
            .get(axis)
            .and_then(|v| self.variants.get(axis)?.values.get(v))
            .cloned()
            .unwrap_or_default();
        if word == "none" {
            AttrValue::Absent
        } else if let Ok(i) = word.parse::<i64>() {
            AttrValue::Int(i)
        } else if let Ok(b) = word.parse::<bool>() {
            AttrValue::Flag(b)
        } else {
            AttrValue::Word(word)
        }
    }

    fn port_values(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for p in &self.outputs {
            let names = names::expanded(&p.name, p.repeat);
            let values = names::expanded(&p.value, p.repeat);
            all.extend(names.into_iter().zip(values));
        }
        all
    }

    // Writes out repeated names in spans and points.
    fn resolve_spans(&self, plain: &mut Plain) {
        let write = |names: &[String]| -> Vec<String> {
            names
                .iter()
                .flat_map(|n| self.written_out(n, &plain.axes))
                .collect()
        };
        let spans = plain.spans.iter().map(|s| SpanDecl {
            name: s.name.clone(),
            inputs: write(&s.inputs),
            outputs: write(&s.outputs),
            states: s.states.clone(),
        });
        let (spans, points) = (spans.collect(), write(&plain.points));
        plain.spans = spans;
        plain.points = points;
    }

    /// The names a name with indices stands for: axes replaced, a repeat index written out over the values it
    /// has where the same name is declared.
    pub(crate) fn written_out(&self, name: &str, axes: &BTreeMap<String, String>) -> Vec<String> {
        let Some(index) = names::indices(name)
            .into_iter()
            .find(|i| !axes.contains_key(i))
        else {
            return names::substitute(name, &names::of_axes(axes))
                .into_iter()
                .collect();
        };
        let ports = self.inputs.iter().chain(&self.outputs);
        let ranges = ports
            .flat_map(|p| [(&p.name, p.repeat), (&p.value, p.repeat)])
            .chain(self.weights.iter().map(|s| (&s.name, s.repeat)))
            .filter(|(n, _)| *n == name)
            .filter_map(|(_, r)| r)
            .map(|(a, b)| (a..b).map(|i| i.to_string()).collect::<Vec<_>>());
        let ops = self.dataflow.ops.iter();
        let loops = ops
            .filter(|o| o.lets.iter().any(|l| l == name))
            .filter_map(|o| o.repeat.as_ref())
            .map(|(_, values)| values.clone());
        let mut values: Vec<String> = Vec::new();
        for v in ranges.chain(loops).flatten() {
            if !values.contains(&v) {
                values.push(v);
            }
        }
        let mut out = Vec::new();
        for v in &values {
            let value = |n: &str| match n == index {
                true => Some(v.clone()),
                false => axes.get(n).cloned(),
            };
            out.extend(names::substitute(name, &value));
        }
        out
    }
}

struct Candidate {
    op: PlainOp,
    inputs: Vec<String>,
    needs: Vec<String>,
    repeated: bool,
}

struct Dropped {
    result: String,
    operand: String,
    rounds: bool,
    view: Option<Vec<DimExpr>>,
}

struct Expansion<'a> {
    spec: &'a Spec,
    declared: BTreeMap<&'a str, &'a Source>,
    present: BTreeSet<&'a str>,
    made: BTreeSet<String>,
    ops: Vec<PlainOp>,
    dropped: Vec<Dropped>,
}

enum Ready {
    Yes(Vec<Option<String>>),
    Later,
    Never,
}

impl Expansion<'_> {
    // Takes whatever can be placed until nothing is left; no progress is a cycle.
    fn place(&mut self, mut waiting: Vec<Candidate>) -> Result<(), CatalogError> {
        while !waiting.is_empty() {
            let before = waiting.len();
            let mut rest: Vec<Candidate> = Vec::new();
            let mut queue = waiting.into_iter();
            while let Some(c) = queue.next() {
                let coming = |name: &str| {
                    let ahead = rest.iter().chain(queue.as_slice());
                    ahead.flat_map(|c| &c.op.outputs).any(|o| o == name)
                        || c.op.outputs.iter().any(|o| o == name)
                };
                match self.ready(&c, &coming)? {
                    Ready::Yes(inputs) => self.take(c, inputs)?,
                    Ready::Later => rest.push(c),
                    Ready::Never => {}
                }
            }
            if rest.len() == before {
                let names: Vec<_> = rest.iter().flat_map(|c| c.op.outputs.clone()).collect();
                return Err(self.wrong(&names.join(", "), "these values depend on each other"));
            }
            waiting = rest;
        }
        Ok(())
    }

    fn take(&mut self, c: Candidate, inputs: Vec<Option<String>>) -> Result<(), CatalogError> {
        for o in &c.op.outputs {
            if self.declared.contains_key(o.as_str()) {
                return Err(self.wrong(o, "defined by an op, and a slot or input of this name"));
            }
            if !self.made.insert(o.clone()) {
                return Err(self.wrong(o, "defined twice under the same axes"));
            }
        }
        if self.is_dropped(&c) {
            if let (Some(result), Some(Some(operand))) = (c.op.outputs.first(), inputs.first()) {
                self.dropped.push(Dropped {
                    result: result.clone(),
                    operand: operand.clone(),
                    rounds: !c.op.as_f32,
                    view: c.op.view(0).map(<[_]>::to_vec),
                });
            }
            return Ok(());
        }
        self.ops.push(PlainOp { inputs, ..c.op });
        Ok(())
    }

    fn is_dropped(&self, c: &Candidate) -> bool {
        !c.needs.is_empty() && c.needs.iter().all(|n| !self.present.contains(n.as_str()))
    }

    fn ready(&self, c: &Candidate, coming: &dyn Fn(&str) -> bool) -> Result<Ready, CatalogError> {
        let dropped = self.is_dropped(c);
        let operands = c.op.kind.spec().operands;
        let mut inputs = Vec::new();
        for (k, name) in c.inputs.iter().enumerate() {
            if dropped && k > 0 {
                break;
            }
            if self.made.contains(name) || self.present.contains(name.as_str()) {
                inputs.push(Some(name.clone()));
                continue;
            }
            let source = self.declared.get(name.as_str());
            if source.is_none() && coming(name) {
                return Ok(Ready::Later);
            }
            let may_miss = operands.get(k).is_some_and(|o| o.ends_with('?'));
            let needed_slot = source.is_some_and(|s| s.slot) && !c.needs.contains(name);
            match source {
                // For an index whose slots are absent, and for one whose operand was not made.
                _ if c.repeated && (needed_slot || source.is_none()) => return Ok(Ready::Never),
                Some(_) if may_miss || c.op.kind == OpKind::Call => inputs.push(None),
                Some(s) if s.slot => {
                    return Err(CatalogError::MissingWeight {
                        structure: self.spec.name.clone(),
                        slot: name.clone(),
                        why: format!("`{}` needs it", c.op.kind),
                    })
                }
                Some(_) => {
                    return Err(CatalogError::MissingInput {
                        structure: self.spec.name.clone(),
                        input: name.clone(),
                        why: format!("`{}` needs it", c.op.kind),
                    })
                }
                None if may_miss && self.is_value(name) => inputs.push(None),
                None => {
                    let what = match self.is_value(name) {
                        true => "read, but not made under these axes",
                        false => "read, but neither a value nor an input nor a slot",
                    };
                    return Err(self.wrong(name, what));
                }
            }
        }
        Ok(Ready::Yes(inputs))
    }

    // Whether some operation of the entry makes it, under whatever axes.
    fn is_value(&self, name: &str) -> bool {
        self.spec.host_axis_combinations().iter().any(|axes| {
            let lets = self.spec.dataflow.ops.iter().flat_map(|o| &o.lets);
            lets.flat_map(|l| self.spec.written_out(l, axes))
                .any(|l| l == name)
        })
    }

    fn wrong(&self, at: &str, reason: &str) -> CatalogError {
        CatalogError::Dataflow {
            structure: self.spec.name.clone(),
            value: at.into(),
            reason: reason.into(),
        }
    }
}

// Gives a dropped op's result and its first operand one name: the one that boundary, spans or points use.
fn resolve_dropped(plain: &mut Plain, dropped: Vec<Dropped>) -> Result<(), (String, String)> {
    let public: BTreeSet<String> = plain
        .spans
        .iter()
        .flat_map(|s| s.inputs.iter().chain(&s.outputs))
        .chain(&plain.points)
        .chain(plain.outputs.iter().map(|(_, v)| v))
        .cloned()
        .collect();
    for d in dropped {
        let operand = plain.resolve(&d.operand).to_string();
        if let Some(view) = d.view {
            let read = plain
                .ops
                .iter()
                .any(|o| o.inputs.contains(&Some(operand.clone())));
            if read || public.contains(&operand) || !give_view(plain, &operand, view) {
                let what = format!(
                    "its `dims` have no place where the op is dropped: `{operand}` is used as it is"
                );
                return Err((d.result, what));
            }
        }
        let producer = plain.ops.iter_mut().find(|o| o.outputs.contains(&operand));
        let renames =
            producer.is_some() && public.contains(&d.result) && !public.contains(&operand);
        // The dropped op would have rounded; now its operand's producer does.
        if let Some(p) = producer {
            p.as_f32 &= !d.rounds;
        }
        let (from, to) = match renames {
            true => (operand, d.result),
            false => (d.result, operand),
        };
        for op in &mut plain.ops {
            let names = op.outputs.iter_mut().chain(op.inputs.iter_mut().flatten());
            names
                .filter(|n| **n == from)
                .for_each(|n| n.clone_from(&to));
        }
        for target in plain.aliases.values_mut().filter(|t| **t == from) {
            target.clone_from(&to);
        }
        plain.aliases.insert(from, to);
    }
    let aliases = plain.aliases.clone();
    let fix = |name: &mut String| {
        if let Some(to) = aliases.get(name) {
            name.clone_from(to);
        }
    };
    for s in &mut plain.spans {
        s.inputs.iter_mut().for_each(fix);
        s.outputs.iter_mut().for_each(fix);
    }
    plain.points.iter_mut().for_each(fix);
    plain.outputs.iter_mut().for_each(|(_, v)| fix(v));
    Ok(())
}

// Whether the producer of a value could take over a view of it.
fn give_view(plain: &mut Plain, value: &str, view: Vec<DimExpr>) -> bool {
    let Some((op, result)) = plain.producer(value) else {
        return false;
    };
    let op = &mut plain.ops[op];
    op.views.resize(op.outputs.len(), None);
    let free = op.views[result].is_none();
    op.views[result].get_or_insert(view);
    free
}

// Leaves what exists: read sources, made outputs and points, spans that make something.
fn tidy(plain: &mut Plain) {
    let read: BTreeSet<&String> = plain
        .ops
        .iter()
        .flat_map(|o| o.inputs.iter().flatten())
        .collect();
    let made: BTreeSet<&String> = plain.ops.iter().flat_map(|o| &o.outputs).collect();
    let outputs: BTreeSet<&String> = plain.outputs.iter().map(|(_, v)| v).collect();
    plain
        .sources
        .retain(|s| read.contains(&s.name) || outputs.contains(&s.name));
    let exists = |n: &String| made.contains(n) || read.contains(n);
    for s in &mut plain.spans {
        s.outputs.retain(exists);
    }
    plain.spans.retain(|s| !s.outputs.is_empty());
    plain.points.retain(exists);
    let given: BTreeSet<String> = plain.sources.iter().map(|s| s.name.clone()).collect();
    plain
        .outputs
        .retain(|(_, v)| exists(v) || given.contains(v));
}

impl Plain {
    /// The value a name stands for after dropped operations.
    pub fn resolve<'a>(&'a self, name: &'a str) -> &'a str {
        self.aliases.get(name).map_or(name, String::as_str)
    }

    /// The span of this name.
    pub fn span(&self, name: &str) -> Option<&SpanDecl> {
        self.spans.iter().find(|s| s.name == name)
    }

    /// The operation that makes a value, with the index of the result.
    pub fn producer(&self, value: &str) -> Option<(usize, usize)> {
        self.ops.iter().enumerate().find_map(|(i, op)| {
            let k = op.outputs.iter().position(|o| o == value)?;
            Some((i, k))
        })
    }

    /// The source of this name.
    pub fn source(&self, name: &str) -> Option<&Source> {
        self.sources.iter().find(|s| s.name == name)
    }

    /// The operations between a span's inputs and outputs, in order.
    pub fn span_ops(&self, span: &SpanDecl) -> Vec<usize> {
        let mut wanted: Vec<&str> = span.outputs.iter().map(String::as_str).collect();
        let mut chosen = BTreeSet::new();
        while let Some(value) = wanted.pop() {
            if span.inputs.iter().any(|i| i == value) {
                continue;
            }
            if let Some((op, _)) = self.producer(value) {
                if chosen.insert(op) {
                    wanted.extend(self.ops[op].inputs.iter().flatten().map(String::as_str));
                }
            }
        }
        chosen.into_iter().collect()
    }
}

fn repeats(name: &str, repeat: Option<(usize, usize)>) -> Vec<(Option<usize>, String)> {
    match repeat {
        None => vec![(None, name.into())],
        Some((a, b)) => (a..b)
            .map(|n| (Some(n), names::numbered(name, n)))
            .collect(),
    }
}

fn numbered(dims: &[DimExpr], n: Option<usize>) -> Vec<DimExpr> {
    let one = |d: &DimExpr| match (d, n) {
        (DimExpr::Symbol(s), Some(n)) => DimExpr::Symbol(names::numbered(s, n)),
        _ => d.clone(),
    };
    dims.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Catalog;

    const TEXT: &str = "
name: t
version: 1
boundary:
  inputs: [{name: x, dims: [M, K]}, {name: r, dims: [M, K], optional: true}]
  outputs: [{name: y_<i>, dims: [M, N_<i>], for: {i: 0..4}}]
weights:
  w_<i>: {dims: [K, N_<i>], for: {i: 0..4}, least: 2}
  b_<i>: {dims: [N_<i>], for: {i: 0..4}, optional: true}
variants:
  gain: {host: true, values: {one: '1', two: '2', 'off': none}, default: one}
  form: {host: false, values: [a, b], default: a}
gates: {parity: [cosine]}
slots: {at: module, roles: {q: q, k: k}, weights: {w_0: q.weight, w_1: k.weight}}
dataflow:
  spans: {s: {in: [x, r], out: [y_<i>]}}
  ops:
    - {let: y_<i>, op: bias, in: [p_<i>, b_<i>], needs: [b_<i>], for: {i: 0..4}, refuse: not_shared}
    - {let: p_<i>, op: linear, in: [h, w_<i>], as: f32, for: {i: 0..4}}
    - {let: h, op: scale, in: [s_<gain>], attrs: {by: <gain>}}
    - {let: s_<gain>, op: add, in: [x, r], needs: [r]}
";

    fn spec() -> Spec {
        let catalog = Catalog::default().with_document("t", "t", TEXT);
        catalog.expect("loads").get("t").expect("t").clone()
    }

    fn axes(of: &[(&str, &str)]) -> BTreeMap<String, String> {
        of.iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect()
    }

    #[test]
    fn repeats_needs_axes_and_order() {
        let spec = spec();
        let there = ["w_2", "b_1", "r"];
        let plain = spec
            .expand(&axes(&[("gain", "two"), ("form", "b")]), &|n| {
                there.contains(&n)
            })
            .expect("expands");
        let made: Vec<_> = plain.ops.iter().map(|o| o.outputs[0].as_str()).collect();
        assert_eq!(made, ["s_two", "h", "y_0", "p_1", "y_2", "y_1"]);
        assert_eq!(plain.spans[0].inputs, ["x", "r"]);
        assert_eq!(plain.spans[0].outputs, ["y_0", "y_1", "y_2"]);
        assert_eq!(plain.outputs.len(), 3);
        let names: Vec<_> = plain.sources.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["x", "r", "w_0", "w_1", "w_2", "b_1"]);
        assert_eq!(
            plain.source("w_2").map(|s| s.dims[1].to_string()),
            Some("N_2".into())
        );
        // A dropped bias leaves its name, and its rounding, to the product; a kept one does not.
        let op = |name: &str| &plain.ops[plain.producer(name).expect(name).0];
        assert!(op("y_0").kind == OpKind::Linear && !op("y_0").as_f32);
        assert!(op("p_1").as_f32 && op("y_1").refuse.as_deref() == Some("not_shared"));
        assert_eq!(plain.resolve("p_0"), "y_0");
        assert_eq!(op("h").attrs["by"], PlainAttr::Equal(AttrValue::Int(2)));
        assert_eq!(op("h").mentions, ["gain"]);
        assert!(op("y_0").mentions.is_empty());
    }

    #[test]
    fn an_operand_takes_the_place_of_a_dropped_op() {
        let plain = spec()
            .expand(&axes(&[("gain", "off")]), &|_| false)
            .expect("expands");
        let (h, _) = plain.producer("h").expect("h");
        assert_eq!(plain.ops[h].inputs, [Some("x".to_string())]);
        assert_eq!(
            plain.ops[h].attrs["by"],
            PlainAttr::Equal(AttrValue::Absent)
        );
        assert_eq!(plain.spans[0].inputs, ["x", "r"]);
        assert_eq!(plain.spans[0].outputs, ["y_0", "y_1"]);
        assert_eq!(plain.span_ops(&plain.spans[0]).len(), 3);
    }

    #[test]
    fn wrong_variants_are_named() {
        let spec = spec();
        let code = |of: &[(&str, &str)]| match spec.expand(&axes(of), &|_| true) {
            Ok(_) => "ok".to_string(),
            Err(e) => format!("{} {e}", e.code()),
        };
        assert_eq!(code(&[]), "ok");
        assert!(code(&[("gain", "three")])
            .contains("`three`, expected one of [\"one\", \"two\", \"off\"]"));
        assert!(code(&[("size", "x")]).starts_with("unknown_variant"));
        assert!(code(&[("form", "c")]).starts_with("unknown_variant"));
        assert_eq!(spec.host_axis_combinations().len(), 3);
    }
}
