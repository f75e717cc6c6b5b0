//! Placing a seam in a host graph.
//!
//! The structure's dataflow is expanded for every combination of host axes and present optionals; each expansion is
//! paired with the host by [`matching`], each of its spans judged by [`spans`]; then every span takes the combination
//! that holds. The graph decides: what it says corrects what a tree or a binding assumed, and is recorded.
//!
//! Owned here: which spans hold, with their host operations and values, and why the others fell. Not owned: which
//! span is bound, who keeps an operation two seams want ([`crate::ownership`]).

mod attrs;
mod calls;
mod combos;
mod matching;
mod spans;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use indexmap::IndexMap;
use structures_catalog::spec::{Plain, Spec};
use structures_catalog::CatalogError;
use structures_graph::tree::{family_template, parent_path};
use structures_graph::{Attrs, Graph, OpId, OpKind, ValueId};

use crate::facts::HostFacts;
use crate::refusal::{code, Refusal};
use crate::seam::{Seam, SlotWeight, Source};

pub use spans::LocatedSpan;

use combos::Combo;
use matching::Match;
use spans::Fallen;

/// A seam placed in a graph, or the reasons why it has no place.
#[derive(Clone, Debug, PartialEq)]
pub struct Located {
    /// The seam, corrected by the graph.
    pub seam: Seam,
    /// Spans that hold, widest first. A span is listed twice when two values of an axis that nobody knows both hold
    /// and one contains the other; the wider comes first.
    pub spans: Vec<LocatedSpan>,
    /// Spans that do not hold, widest first.
    pub fallen: Vec<Refusal>,
    /// What the graph corrected, one sentence each.
    pub corrections: Vec<String>,
    /// Why no span holds.
    pub refusal: Option<Refusal>,
}

/// Places a seam in a graph: one result, or one per reader where a structure with a single weighted operation has
/// its parameter read by several.
pub fn locate(graph: &Graph, spec: &Spec, seam: &Seam) -> Vec<Located> {
    Locator::new(graph).locate(spec, seam)
}

/// Every place of a structure that is found by its anchor operation. A place where none of its operations with a
/// weight has a counterpart is not this structure, and is left out.
pub fn locate_anchored(graph: &Graph, spec: &Spec) -> Vec<Located> {
    Locator::new(graph).locate_anchored(spec)
}

/// A graph with its index, for locating many seams.
#[derive(Debug)]
pub struct Locator<'g> {
    facts: HostFacts<'g>,
}

/// What one combination made of every span.
struct Outcome {
    combo: Combo,
    spans: Vec<SpanOutcome>,
    /// Whether an operation with a weight is paired; `None` when there is none.
    weighted: Option<bool>,
    /// Slots of paired operations, also of those outside every span that holds.
    weights: IndexMap<String, SlotWeight>,
}

struct SpanOutcome {
    name: String,
    mentions: BTreeSet<String>,
    result: Result<LocatedSpan, Fallen>,
    /// Axes all of whose operations in this span are paired with matching attributes, and the host operations.
    shown: BTreeMap<String, BTreeSet<OpId>>,
}

impl<'g> Locator<'g> {
    /// Indexes a graph.
    pub fn new(graph: &'g Graph) -> Self {
        Locator {
            facts: HostFacts::new(graph),
        }
    }

    /// The facts of the graph.
    pub fn facts(&self) -> &HostFacts<'g> {
        &self.facts
    }

    /// See [`locate`].
    pub fn locate(&self, spec: &Spec, seam: &Seam) -> Vec<Located> {
        let plains = match expand_all(spec, seam) {
            Ok(plains) => plains,
            Err(reason) => return vec![nowhere(seam, code::ENTRY_INVALID, reason)],
        };
        let mut readers: BTreeSet<OpId> = BTreeSet::new();
        for (combo, plain) in &plains {
            match self.several_readers(plain, seam) {
                Readers::Single => {}
                Readers::Several(ops) => readers.extend(ops),
                Readers::Refused(reason) if combo.agrees => {
                    return vec![nowhere(seam, code::SLOT_READ_TWICE, reason)];
                }
                Readers::Refused(_) => {}
            }
        }
        if readers.is_empty() {
            return vec![self.settle(spec, seam, &plains, None).0];
        }
        readers
            .iter()
            .enumerate()
            .map(|(i, reader)| {
                let mut one = seam.clone();
                one.key = format!("{}#{i}", seam.key);
                let choice = Some(Choice::Reader(*reader));
                self.settle(spec, &one, &plains, choice).0
            })
            .collect()
    }

    /// See [`locate_anchored`].
    pub fn locate_anchored(&self, spec: &Spec) -> Vec<Located> {
        let kinds: BTreeSet<_> = spec
            .dataflow
            .ops
            .iter()
            .filter(|op| op.anchor)
            .map(|op| op.op)
            .collect();
        let graph = self.facts.graph();
        let mut out: Vec<Located> = Vec::new();
        let mut used: HashMap<String, usize> = HashMap::new();
        for op in graph
            .op_ids()
            .filter(|op| kinds.contains(&graph.op(*op).kind))
        {
            let seam = anchored_seam(spec, &graph.op(op).module);
            let mut located = match expand_all(spec, &seam) {
                Err(reason) => nowhere(&seam, code::ENTRY_INVALID, reason),
                Ok(plains) => match self.settle(spec, &seam, &plains, Some(Choice::Anchor(op))) {
                    (_, false) => continue,
                    (located, true) => located,
                },
            };
            let n = used.entry(seam.path.clone()).or_insert(0);
            if *n > 0 {
                located.seam.key = format!("{}#{n}", seam.path);
            }
            *n += 1;
            out.push(located);
        }
        out
    }

    /// Whether a parameter has several readers of its operation's kind.
    fn several_readers(&self, plain: &Plain, seam: &Seam) -> Readers {
        let m = Match::new(&self.facts, plain, seam);
        let weighted: Vec<usize> = (0..plain.ops.len())
            .filter(|op| plain.ops[*op].inputs.iter().flatten().any(|n| m.is_slot(n)))
            .collect();
        for op in &weighted {
            let seeds = m.seeds(*op, false);
            if seeds.len() < 2 {
                continue;
            }
            if weighted.len() == 1 {
                return Readers::Several(seeds);
            }
            let places: Vec<String> = seeds
                .iter()
                .map(|s| format!("`{}`", m.module(*s)))
                .collect();
            return Readers::Refused(format!(
                "the weight of {} is read by {} operations, at {}",
                plain.ops[*op].outputs.join(", "),
                seeds.len(),
                places.join(", ")
            ));
        }
        Readers::Single
    }

    /// What the combinations make of a seam, and whether it is one of this structure at all.
    fn settle(
        &self,
        spec: &Spec,
        seam: &Seam,
        plains: &[(Combo, Plain)],
        choice: Option<Choice>,
    ) -> (Located, bool) {
        let outcomes: Vec<Outcome> = plains
            .iter()
            .map(|(combo, plain)| self.attempt(spec, plain, combo, seam, choice))
            .collect();
        let known = outcomes.iter().any(|o| o.weighted != Some(false));
        (conclude(spec, seam, &outcomes), known)
    }

    fn attempt(
        &self,
        spec: &Spec,
        plain: &Plain,
        combo: &Combo,
        seam: &Seam,
        choice: Option<Choice>,
    ) -> Outcome {
        let mut m = Match::new(&self.facts, plain, seam);
        let mut chosen = HashMap::new();
        for (i, op) in plain.ops.iter().enumerate() {
            let host = match choice {
                Some(Choice::Reader(r)) if m.seeds(i, false).contains(&r) => r,
                Some(Choice::Anchor(a))
                    if op.anchor && self.facts.graph().op(a).kind == op.kind =>
                {
                    a
                }
                _ => continue,
            };
            chosen.insert(i, host);
            break;
        }
        m.run(&chosen);
        let spans = plain
            .spans
            .iter()
            .map(|span| {
                let ops = plain.span_ops(span);
                let mentions: BTreeSet<String> = ops
                    .iter()
                    .flat_map(|op| plain.ops[*op].mentions.iter().cloned())
                    .collect();
                let shown = mentions
                    .iter()
                    .filter_map(|axis| {
                        let all: Option<BTreeSet<OpId>> = ops
                            .iter()
                            .filter(|op| plain.ops[**op].mentions.contains(axis))
                            .map(|op| self.shows(plain, &m, seam, *op))
                            .collect();
                        all.map(|hosts| (axis.clone(), hosts))
                    })
                    .collect();
                SpanOutcome {
                    name: span.name.clone(),
                    mentions,
                    result: spans::judge(&self.facts, plain, &m, seam, span).map(|mut held| {
                        held.outputs = declared_outputs(spec, plain, &held);
                        held
                    }),
                    shown,
                }
            })
            .collect();
        let paired: Vec<usize> = (0..plain.ops.len())
            .filter(|op| m.good(*op).is_some())
            .collect();
        Outcome {
            combo: combo.clone(),
            spans,
            weighted: m.weighted(),
            weights: spans::weights(&self.facts, plain, &m, seam, &paired),
        }
    }

    /// The host operation of a paired operation whose attributes match.
    fn shows(&self, plain: &Plain, m: &Match<'_, '_>, seam: &Seam, op: usize) -> Option<OpId> {
        let host = m.good(op)?;
        if plain.ops[op].kind == OpKind::Call {
            return Some(host);
        }
        let dims: BTreeMap<String, u64> = seam.dims.iter().map(|(k, v)| (k.clone(), *v)).collect();
        let graph = self.facts.graph();
        let mut params = Attrs::new();
        attrs::check(graph, &plain.ops[op], graph.op(host), &dims, &mut params)
            .ok()
            .map(|()| host)
    }
}

/// A span's outputs under their declared names, with the absent ones; a repeated name stands for what is there.
fn declared_outputs(
    spec: &Spec,
    plain: &Plain,
    held: &LocatedSpan,
) -> Vec<(String, Option<ValueId>)> {
    let Some(decl) = spec.dataflow.spans.iter().find(|s| s.name == held.name) else {
        return held.outputs.clone();
    };
    let mut rest = held.outputs.iter().peekable();
    let mut out = Vec::new();
    for name in &decl.outputs {
        if name.contains('<') {
            // Up to the next declared name.
            let later: Vec<&str> = decl
                .outputs
                .iter()
                .skip_while(|n| *n != name)
                .skip(1)
                .map(|n| plain.resolve(n))
                .collect();
            while let Some(one) = rest.next_if(|(n, _)| !later.contains(&n.as_str())) {
                out.push(one.clone());
            }
        } else {
            let made = rest.next_if(|(n, _)| n == plain.resolve(name));
            out.push((name.clone(), made.and_then(|(_, v)| *v)));
        }
    }
    out
}

enum Readers {
    Single,
    Several(Vec<OpId>),
    Refused(String),
}

#[derive(Clone, Copy)]
enum Choice {
    Reader(OpId),
    Anchor(OpId),
}

/// The plain graph of a combination; `None` when the combination lacks a slot or input it needs.
fn expand(spec: &Spec, combo: &Combo) -> Result<Option<Plain>, String> {
    match spec.expand(&combo.axes, &|name| combo.present.contains(name)) {
        Ok(plain) => Ok(Some(plain)),
        Err(CatalogError::MissingInput { .. } | CatalogError::MissingWeight { .. }) => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

/// The plain graphs of all combinations.
fn expand_all(spec: &Spec, seam: &Seam) -> Result<Vec<(Combo, Plain)>, String> {
    let mut plains = Vec::new();
    for combo in combos::combos(spec, seam) {
        if let Some(plain) = expand(spec, &combo)? {
            plains.push((combo, plain));
        }
    }
    Ok(plains)
}

fn anchored_seam(spec: &Spec, path: &str) -> Seam {
    let (family, layer) = family_template(path);
    Seam {
        structure: spec.name.clone(),
        version: spec.version,
        path: path.into(),
        parent: parent_path(path).into(),
        key: path.into(),
        dims: IndexMap::new(),
        variant: crate::discover::defaults(spec),
        family,
        layer,
        source: Source::Graph,
        located: false,
        spans: Vec::new(),
        assumptions: Vec::new(),
        roles: IndexMap::new(),
        weights: IndexMap::new(),
        open_axes: spec
            .variants
            .iter()
            .filter(|(_, a)| a.host)
            .map(|(n, _)| n.clone())
            .collect(),
    }
}

fn nowhere(seam: &Seam, code: &str, reason: String) -> Located {
    let refusal = Refusal::new(&seam.path, &seam.structure, code, reason);
    Located {
        seam: seam.clone(),
        spans: Vec::new(),
        fallen: vec![refusal.clone()],
        corrections: Vec::new(),
        refusal: Some(refusal),
    }
}

/// Takes for every span the combination that holds, and completes its axes.
fn conclude(spec: &Spec, seam: &Seam, outcomes: &[Outcome]) -> Located {
    let mut spans: Vec<LocatedSpan> = Vec::new();
    let mut fallen = Vec::new();
    for decl in &spec.dataflow.spans {
        let mentions = mentions(outcomes, &decl.name);
        match choose(seam, outcomes, &decl.name, &mentions) {
            Ok(held) => {
                for mut span in held {
                    span.axes.retain(|axis, _| mentions.contains(axis));
                    complete(spec, seam, outcomes, &mut span, &mentions);
                    spans.push(span);
                }
            }
            Err(Some(refusal)) => fallen.push(refusal),
            Err(None) => {}
        }
    }
    let mut out = Located {
        seam: seam.clone(),
        refusal: if spans.is_empty() {
            let none = || {
                let reason = "no span of the structure exists under any combination of its axes";
                Refusal::new(&seam.path, &seam.structure, code::DATAFLOW_EDGE, reason)
            };
            Some(fallen.last().cloned().unwrap_or_else(none))
        } else {
            None
        },
        spans,
        fallen,
        corrections: Vec::new(),
    };
    let beside = beside(&out, outcomes);
    correct(&mut out, &beside);
    out
}

/// Slots that a name suggested and no span that holds reads, where the graph shows their operation next to one.
fn beside(out: &Located, outcomes: &[Outcome]) -> IndexMap<String, SlotWeight> {
    let Some(widest) = out.spans.first() else {
        return IndexMap::new();
    };
    let agrees = |combo: &Combo| {
        let axes = widest.axes.iter();
        axes.into_iter()
            .all(|(axis, value)| combo.axes.get(axis).is_none_or(|v| v == value))
    };
    let hinted = out.seam.weights.iter().filter(|(slot, weight)| {
        let hint = weight.stored().is_some_and(|a| a.hint);
        hint && out.spans.iter().all(|s| !s.weights.contains_key(*slot))
    });
    hinted
        .filter_map(|(slot, _)| {
            let shown = outcomes.iter().filter(|o| agrees(&o.combo));
            let weight = shown.filter_map(|o| o.weights.get(slot)).next()?;
            Some((slot.clone(), weight.clone()))
        })
        .collect()
}

fn named<'o>(
    outcomes: &'o [Outcome],
    name: &'o str,
) -> impl Iterator<Item = (&'o Combo, &'o SpanOutcome)> {
    outcomes.iter().flat_map(move |o| {
        o.spans
            .iter()
            .filter(move |s| s.name == name)
            .map(move |s| (&o.combo, s))
    })
}

/// Axes that operations of a span mention, under any combination.
fn mentions(outcomes: &[Outcome], span: &str) -> BTreeSet<String> {
    named(outcomes, span)
        .flat_map(|(_, s)| s.mentions.iter().cloned())
        .collect()
}

/// The holding combination of one span: the seam's where it holds, else the only other one, else the one that
/// contains the others.
fn choose(
    seam: &Seam,
    outcomes: &[Outcome],
    name: &str,
    mentions: &BTreeSet<String>,
) -> Result<Vec<LocatedSpan>, Option<Refusal>> {
    let agrees = |axes: &BTreeMap<String, String>| {
        mentions
            .iter()
            .all(|axis| !seam.knows_axis(axis) || seam.variant.get(axis) == axes.get(axis))
    };
    let held: Vec<&LocatedSpan> = named(outcomes, name)
        .filter_map(|(_, s)| s.result.as_ref().ok())
        .collect();
    let mut candidates: Vec<&LocatedSpan> =
        held.iter().filter(|s| agrees(&s.axes)).copied().collect();
    if candidates.is_empty() {
        candidates = held;
    }
    // The same match under another combination is no second answer; of one combination the widest counts.
    let mut distinct: Vec<&LocatedSpan> = Vec::new();
    for span in candidates {
        if distinct.iter().any(|d| same_match(d, span)) {
            continue;
        }
        let restricted = |s: &LocatedSpan| -> Vec<(String, String)> {
            s.axes
                .iter()
                .filter(|(a, _)| mentions.contains(*a))
                .map(|(a, v)| (a.clone(), v.clone()))
                .collect()
        };
        match distinct
            .iter_mut()
            .find(|d| restricted(d) == restricted(span))
        {
            Some(other) if span.ops.len() > other.ops.len() => *other = span,
            Some(_) => {}
            None => distinct.push(span),
        }
    }
    distinct.sort_by_key(|s| std::cmp::Reverse(s.ops.len()));
    if let Some(widest) = distinct.first() {
        let nested = distinct[1..].iter().all(|s| {
            s.ops.len() < widest.ops.len() && s.ops.iter().all(|op| widest.ops.contains(op))
        });
        if nested {
            return Ok(distinct.into_iter().cloned().collect());
        }
        let values: Vec<String> = distinct
            .iter()
            .map(|s| {
                let words: Vec<String> = s
                    .axes
                    .iter()
                    .filter(|(a, _)| mentions.contains(*a))
                    .map(|(a, v)| format!("{a} = {v}"))
                    .collect();
                words.join(", ")
            })
            .collect();
        let reason = format!(
            "several combinations hold and nothing decides between them: {}",
            values.join("; ")
        );
        return Err(Some(Refusal {
            span: Some(name.into()),
            ..Refusal::new(&seam.path, &seam.structure, code::AXIS_AMBIGUOUS, reason)
                .expected_found("one combination", values.join("; "))
        }));
    }
    let mut best: Option<((usize, spans::Stage, bool), &Refusal)> = None;
    for (combo, s) in named(outcomes, name) {
        if let Err(f) = &s.result {
            let rank = (f.paired, f.stage, combo.agrees);
            if best.as_ref().is_none_or(|(b, _)| rank > *b) {
                best = Some((rank, &f.refusal));
            }
        }
    }
    Err(best.map(|(_, r)| r.clone()))
}

fn same_match(a: &LocatedSpan, b: &LocatedSpan) -> bool {
    a.ops == b.ops
        && a.inputs == b.inputs
        && a.outputs == b.outputs
        && a.points == b.points
        && a.params == b.params
        && a.weights == b.weights
}

/// Axes the span does not mention: from the widest span whose operations with the axis are paired, else from the
/// seam, else left out.
fn complete(
    spec: &Spec,
    seam: &Seam,
    outcomes: &[Outcome],
    span: &mut LocatedSpan,
    mentions: &BTreeSet<String>,
) {
    for (axis, _) in spec
        .variants
        .iter()
        .filter(|(n, a)| a.host && !mentions.contains(*n))
    {
        let shown = spec.dataflow.spans.iter().find_map(|decl| {
            let mut values: Vec<(&String, &BTreeSet<OpId>)> = Vec::new();
            for (combo, s) in named(outcomes, &decl.name) {
                if let (Some(value), Some(hosts)) = (combo.axes.get(axis), s.shown.get(axis)) {
                    if values.iter().all(|(v, _)| *v != value) {
                        values.push((value, hosts));
                    }
                }
            }
            let (first, hosts) = values.first()?;
            let known = seam.variant.get(axis).filter(|_| seam.knows_axis(axis));
            if let Some((value, _)) = values.iter().find(|(v, _)| Some(*v) == known) {
                return Some((*value).clone());
            }
            // Two values shown by the same operations are one match: the first declared is its name.
            values
                .iter()
                .all(|(_, h)| h == hosts)
                .then(|| (*first).clone())
        });
        if let Some(value) = shown.or_else(|| seam.variant.get(axis).cloned()) {
            span.axes.insert(axis.clone(), value);
        }
    }
}

/// Writes what the widest span shows into the seam and records every change.
fn correct(out: &mut Located, beside: &IndexMap<String, SlotWeight>) {
    let Some(widest) = out.spans.first().cloned() else {
        return;
    };
    let seam = &mut out.seam;
    seam.located = true;
    for span in &out.spans {
        if !seam.spans.contains(&span.name) {
            seam.spans.push(span.name.clone());
        }
    }
    for (axis, value) in &widest.axes {
        let before = seam.variant.insert(axis.clone(), value.clone());
        if let Some(before) = before.filter(|b| b != value) {
            out.corrections
                .push(format!("{axis}: the graph shows {value}, not {before}"));
        }
        seam.open_axes.retain(|a| a != axis);
        seam.assumptions.retain(|a| a.about != *axis);
    }
    for (input, _) in widest.inputs.iter().filter(|(_, v)| v.is_some()) {
        seam.assumptions.retain(|a| a.about != *input);
    }
    let read = out.spans.iter().flat_map(|s| s.weights.iter());
    let all: Vec<(&String, &SlotWeight)> = read.chain(beside).collect();
    for (slot, weight) in all {
        seam.assumptions.retain(|a| a.about != *slot);
        let before = seam.weights.insert(slot.clone(), weight.clone());
        if let (Some(SlotWeight::Stored(a)), SlotWeight::Stored(b)) = (&before, weight) {
            if a.param() != b.param() {
                out.corrections.push(format!(
                    "{slot}: the graph reads {}, not {}",
                    b.param(),
                    a.param()
                ));
            }
        }
    }
    if seam.dims.is_empty() {
        seam.dims = widest.dims.clone();
    }
}
