//! Whether one span of a finished pairing holds, and what it is on the host when it does.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use indexmap::IndexMap;
use structures_catalog::constraint::{first_broken, Known};
use structures_catalog::spec::{ConstFill, Plain, SpanDecl};
use structures_graph::{AttrValue, Attrs, Op, OpId, OpKind, Origin, ValueId};

use super::attrs;
use super::matching::{Bound, Match};
use crate::dims::{Inconsistent, Solver};
use crate::facts::HostFacts;
use crate::refusal::{code, Refusal};
use crate::seam::{Seam, SlotWeight, WeightAddress};

/// A span that holds at one place of a host graph.
#[derive(Clone, Debug, PartialEq)]
pub struct LocatedSpan {
    /// Name in the structure.
    pub name: String,
    /// Host axes as the graph shows them.
    pub axes: BTreeMap<String, String>,
    /// Host operations it replaces, in executable order; views inside it are among them.
    pub ops: Vec<OpId>,
    /// Its inputs in declared order; `None` for an absent optional one.
    pub inputs: Vec<(String, Option<ValueId>)>,
    /// Its outputs in declared order; `None` for one that is not made under these axes.
    pub outputs: Vec<(String, Option<ValueId>)>,
    /// State regions it owns: name in the structure -> index in the graph.
    pub states: Vec<(String, Option<usize>)>,
    /// Calibration points inside it or on its boundary -> host value.
    pub points: IndexMap<String, ValueId>,
    /// Captured attributes.
    pub params: Attrs,
    /// Slots it reads.
    pub weights: IndexMap<String, SlotWeight>,
    /// Symbol -> size, as far as slots and boundary say.
    pub dims: IndexMap<String, u64>,
}

/// How far a span got before it fell; later stages are nearer to holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Some operations have no counterpart.
    Pairing,
    /// An attribute differs.
    Attributes,
    /// A size differs.
    Dims,
    /// An interior value is read outside.
    Interior,
    /// A path leaves and comes back.
    Convexity,
}

/// A span that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallen {
    /// Operations that paired without conflict.
    pub paired: usize,
    /// Where it fell.
    pub stage: Stage,
    /// Why.
    pub refusal: Refusal,
}

/// Judges one span.
pub fn judge(
    facts: &HostFacts<'_>,
    plain: &Plain,
    m: &Match<'_, '_>,
    seam: &Seam,
    span: &SpanDecl,
) -> Result<LocatedSpan, Fallen> {
    let ops = plain.span_ops(span);
    let paired = ops.iter().filter(|op| m.good(**op).is_some()).count();
    let fell = |stage, refusal: Refusal| Fallen {
        paired,
        stage,
        refusal: Refusal {
            span: Some(span.name.clone()),
            ..refusal
        },
    };
    let refuse =
        |code: &str, reason: String| Refusal::new(&seam.path, &seam.structure, code, reason);

    let hosts = pairing(m, plain, &ops, &refuse).map_err(|r| fell(Stage::Pairing, r))?;
    let dims = sizes(facts, plain, m, seam, &ops);
    let solved = match &dims {
        Ok(solver) => &solver.known,
        Err((solver, _)) => &solver.known,
    };
    let mut params = Attrs::new();
    let alone = || hosts.iter().filter(|(op, _)| !is_call(plain, *op));
    for (op, host) in alone() {
        let (plain, host) = (&plain.ops[*op], facts.graph().op(*host));
        attrs::check(facts.graph(), plain, host, solved, &mut params)
            .map_err(|e| fell(Stage::Attributes, unmatched(host, e, &refuse)))?;
    }
    let mut solver = dims.map_err(|(_, r)| fell(Stage::Dims, r))?;
    let inconsistent = |e: Inconsistent| fell(Stage::Dims, sized_wrongly(seam, e));
    for (symbol, param) in &plain.symbols {
        if let Some(AttrValue::Int(n)) = params.get(param) {
            if let Ok(n) = u64::try_from(*n) {
                solver.learn(symbol, n).map_err(inconsistent)?;
            }
        }
    }
    for (op, host) in alone() {
        let (plain, host) = (&plain.ops[*op], facts.graph().op(*host));
        attrs::check_dims(facts.graph(), plain, host, &mut solver)
            .map_err(|e| fell(Stage::Attributes, unmatched(host, e, &refuse)))?;
    }
    solver.settle();
    solver.finish().map_err(inconsistent)?;
    for (symbol, param) in &plain.symbols {
        if let Some(n) = solver
            .known
            .get(symbol)
            .and_then(|n| i64::try_from(*n).ok())
        {
            params.entry(param.clone()).or_insert(AttrValue::Int(n));
        }
    }
    let known = Known {
        size: &|s| solver.known.get(s).copied(),
        params: &params,
        present: &|n| plain.source(n).is_some(),
    };
    if let Some(broken) = first_broken(&plain.constraints, &known) {
        let reason = format!("expected `{}`, found {}", broken.that, broken.found);
        let refusal = refuse(&broken.code, reason).expected_found(&broken.that, &broken.found);
        return Err(fell(Stage::Dims, refusal));
    }

    let members: BTreeSet<OpId> = ops.iter().flat_map(|op| m.hosts(*op)).collect();
    let shared = ops.iter().filter(|op| plain.ops[**op].shared);
    let shared: BTreeSet<OpId> = shared.flat_map(|op| m.hosts(*op)).collect();
    let region = Region::alone(facts, members, &shared, &output_values(m, span));
    region
        .interior(&output_values(m, span), &refuse)
        .map_err(|r| fell(Stage::Interior, r))?;
    region
        .convex(&refuse)
        .map_err(|r| fell(Stage::Convexity, r))?;

    let bound = |name: &String| match m.values.get(name) {
        Some(Bound::Value { seen, .. }) => Some(*seen),
        _ => None,
    };
    let reads: BTreeSet<&str> = ops
        .iter()
        .flat_map(|op| plain.ops[*op].inputs.iter().flatten().map(String::as_str))
        .collect();
    let makes: BTreeSet<&str> = ops
        .iter()
        .flat_map(|op| plain.ops[*op].outputs.iter().map(String::as_str))
        .collect();
    Ok(LocatedSpan {
        name: span.name.clone(),
        axes: plain.axes.clone(),
        inputs: span.inputs.iter().map(|n| (n.clone(), bound(n))).collect(),
        outputs: span.outputs.iter().map(|n| (n.clone(), bound(n))).collect(),
        states: span
            .states
            .iter()
            .map(|n| {
                let region = bound(n).map(|v| facts.tensor(v)).and_then(|v| {
                    match facts.graph().value(v).origin {
                        Origin::State(i) => Some(i),
                        _ => None,
                    }
                });
                (n.clone(), region)
            })
            .collect(),
        points: plain
            .points
            .iter()
            .filter(|p| {
                let p = p.as_str();
                reads.contains(p) || makes.contains(p) || span.inputs.iter().any(|i| i == p)
            })
            .filter_map(|p| bound(p).map(|v| (p.clone(), v)))
            .collect(),
        params,
        weights: weights(facts, plain, m, seam, &ops),
        dims: solver.known.into_iter().collect(),
        ops: region.into_ops(),
    })
}

fn unmatched(host: &Op, e: attrs::Unmatched, refuse: &dyn Fn(&str, String) -> Refusal) -> Refusal {
    let reason = format!(
        "`{}` of {} at `{}` is {}, expected {}",
        e.name, host.kind, host.module, e.found, e.expected
    );
    Refusal {
        op: Some(host.kind.name().into()),
        operand: Some(e.name),
        host_path: Some(host.module.clone()),
        ..refuse(code::ATTR_UNMATCHED, reason).expected_found(e.expected, e.found)
    }
}

fn sized_wrongly(seam: &Seam, e: Inconsistent) -> Refusal {
    let reason = format!("`{}`: expected {}, found {}", e.name, e.expected, e.found);
    let refusal = Refusal::new(&seam.path, &seam.structure, code::DIMS_INCONSISTENT, reason);
    Refusal {
        operand: Some(e.name),
        ..refusal.expected_found(e.expected, e.found)
    }
}

/// A call has no attributes of its own on the host, and its operands no positions.
fn is_call(plain: &Plain, op: usize) -> bool {
    plain.ops[op].kind == OpKind::Call
}

/// The host operation of every operation of the span, or the first that has none.
fn pairing(
    m: &Match<'_, '_>,
    plain: &Plain,
    ops: &[usize],
    refuse: &dyn Fn(&str, String) -> Refusal,
) -> Result<Vec<(usize, OpId)>, Refusal> {
    let mut hosts = Vec::new();
    for &op in ops {
        let kind = plain.ops[op].kind;
        let own = plain.ops[op].refuse.as_deref();
        if let Some(c) = &m.conflicts[op] {
            let slot = m.is_slot(&c.name);
            let default = if slot {
                code::DATAFLOW_EDGE
            } else {
                code::EDGE_CONFLICT
            };
            let host_path = m.pairs[op].map(|h| m.module(h));
            let reason = format!(
                "`{}` of {kind} at `{}` is {}, expected {}",
                c.name,
                host_path.as_deref().unwrap_or_default(),
                c.found,
                c.expected
            );
            return Err(Refusal {
                op: Some(kind.name().into()),
                operand: Some(c.name.clone()),
                host_path,
                ..refuse(own.unwrap_or(default), reason).expected_found(&c.expected, &c.found)
            });
        }
        match m.good(op) {
            Some(host) => hosts.push((op, host)),
            None => {
                let miss = m.missing(op);
                let reason = format!(
                    "no {kind} for `{}`: expected {}, found {}",
                    plain.ops[op].outputs.join(", "),
                    miss.expected,
                    miss.found
                );
                let code = own.unwrap_or(code::DATAFLOW_EDGE);
                return Err(Refusal {
                    op: Some(kind.name().into()),
                    operand: Some(miss.operand),
                    host_path: miss.host_path,
                    ..refuse(code, reason).expected_found(miss.expected, miss.found)
                });
            }
        }
    }
    Ok(hosts)
}

fn sizes(
    facts: &HostFacts<'_>,
    plain: &Plain,
    m: &Match<'_, '_>,
    seam: &Seam,
    ops: &[usize],
) -> Result<Solver, (Solver, Refusal)> {
    let graph = facts.graph();
    let mut solver = Solver::new(&seam.dims);
    let used: BTreeSet<&str> = ops
        .iter()
        .flat_map(|op| plain.ops[*op].inputs.iter().flatten().map(String::as_str))
        .collect();
    let mut outcome = Ok(());
    for source in plain
        .sources
        .iter()
        .filter(|s| used.contains(s.name.as_str()))
    {
        let one = if source.slot {
            let Some(Some(seen)) = m.slots.get(&source.name) else {
                continue;
            };
            let Some((_, layout)) = graph.param(facts.tensor(*seen)) else {
                continue;
            };
            let stored: Option<Vec<usize>> = m
                .address(&source.name)
                .and_then(|a| a.reshape.clone())
                .or_else(|| {
                    let dims = &graph.value(facts.tensor(*seen)).dims;
                    dims.iter()
                        .map(|d| match d {
                            structures_graph::Dim::Size(n) => Some(*n),
                            structures_graph::Dim::Symbol(_) => None,
                        })
                        .collect()
                });
            let Some(stored) = stored else { continue };
            solver.slot(source, &stored, layout)
        } else {
            match m.values.get(&source.name) {
                Some(Bound::Value { seen, .. }) => solver.input(source, &graph.value(*seen).dims),
                _ => continue,
            }
        };
        outcome = outcome.and(one);
    }
    for op in ops {
        for (k, name) in plain.ops[*op].outputs.iter().enumerate() {
            if let Some(view) = plain.ops[*op].view(k) {
                for value in read_as(facts, plain, m, ops, name) {
                    let one = solver.viewed(name, view, &graph.value(value).dims);
                    outcome = outcome.and(one);
                }
            }
        }
    }
    match outcome.and_then(|()| solver.finish()) {
        Ok(()) => Ok(solver),
        Err(e) => Err((solver, sized_wrongly(seam, e))),
    }
}

/// The host values as which readers inside the span, or the boundary, see a value.
fn read_as(
    facts: &HostFacts<'_>,
    plain: &Plain,
    m: &Match<'_, '_>,
    ops: &[usize],
    name: &str,
) -> Vec<ValueId> {
    let mut seen: Vec<ValueId> = Vec::new();
    for reader in ops
        .iter()
        .filter(|o| !plain.ops[**o].kind.spec().commutative && !is_call(plain, **o))
    {
        let operands = plain.ops[*reader].inputs.iter();
        for (k, _) in operands
            .enumerate()
            .filter(|(_, n)| n.as_deref() == Some(name))
        {
            let host = m.good(*reader).map(|h| facts.graph().op(h));
            seen.extend(host.and_then(|h| h.inputs.get(k).copied().flatten()));
        }
    }
    if let Some(Bound::Value { seen: bound, .. }) = m.values.get(name) {
        seen.push(*bound);
    }
    seen
}

/// The slots these operations read, as the graph shows them.
pub(super) fn weights(
    facts: &HostFacts<'_>,
    plain: &Plain,
    m: &Match<'_, '_>,
    seam: &Seam,
    ops: &[usize],
) -> IndexMap<String, SlotWeight> {
    let mut out = IndexMap::new();
    for source in plain.sources.iter().filter(|s| s.slot) {
        let used = ops.iter().find_map(|op| {
            let inputs = &plain.ops[*op].inputs;
            let at = inputs
                .iter()
                .position(|n| n.as_deref() == Some(&source.name))?;
            Some((*op, at))
        });
        let Some((op, at)) = used else { continue };
        let Some(seen) = m.slots.get(&source.name) else {
            continue;
        };
        let bound = match seen.and_then(|v| facts.graph().param(facts.tensor(v))) {
            Some((param, layout)) => match seam.weights.get(&source.name) {
                Some(SlotWeight::Stored(a)) if a.param() == *param => SlotWeight::Stored(a.clone()),
                _ => SlotWeight::Stored(WeightAddress {
                    path: param.path.clone(),
                    name: param.name.clone(),
                    layout,
                    rows: param.rows,
                    reshape: None,
                    hint: false,
                }),
            },
            None => SlotWeight::Const {
                fill: neutral(facts, m, plain, op, at),
            },
        };
        out.insert(source.name.clone(), bound);
    }
    out
}

/// The constant that stands for a weight the host's operation does not have: ones for a factor, zeros for a summand
/// and for a factor that is stored as its offset from one.
fn neutral(
    facts: &HostFacts<'_>,
    m: &Match<'_, '_>,
    plain: &Plain,
    op: usize,
    at: usize,
) -> ConstFill {
    let offset = m.pairs[op].is_some_and(|h| {
        let word = facts.graph().op(h).attrs.get("weight");
        word.and_then(|w| w.as_word()) == Some("offset")
    });
    let operand = plain.ops[op]
        .kind
        .spec()
        .operands
        .get(at)
        .copied()
        .unwrap_or_default();
    if offset || !operand.starts_with('w') {
        ConstFill::Zeros
    } else {
        ConstFill::Ones
    }
}

fn output_values(m: &Match<'_, '_>, span: &SpanDecl) -> BTreeSet<ValueId> {
    span.outputs
        .iter()
        .filter_map(|n| match m.values.get(n) {
            Some(Bound::Value { root, .. }) => Some(*root),
            _ => None,
        })
        .collect()
}

/// Host operations of a span, with the views that only they read.
struct Region<'a, 'g> {
    facts: &'a HostFacts<'g>,
    ops: BTreeSet<OpId>,
}

impl<'a, 'g> Region<'a, 'g> {
    fn new(facts: &'a HostFacts<'g>, mut ops: BTreeSet<OpId>) -> Self {
        let mut memo = HashMap::new();
        let members = ops.clone();
        for op in &members {
            for made in &facts.graph().op(*op).outputs {
                for (reader, _) in facts.direct_readers(*made) {
                    absorb(facts, &members, *reader, &mut memo);
                }
            }
        }
        ops.extend(
            memo.into_iter()
                .filter(|(_, inside)| *inside)
                .map(|(op, _)| op),
        );
        Region { facts, ops }
    }

    /// Operations without those shared ones whose results the host reads elsewhere too: it keeps them, and the span
    /// computes them again.
    fn alone(
        facts: &'a HostFacts<'g>,
        mut members: BTreeSet<OpId>,
        shared: &BTreeSet<OpId>,
        outputs: &BTreeSet<ValueId>,
    ) -> Self {
        let graph = facts.graph();
        loop {
            let region = Region::new(facts, members.clone());
            let read_outside = |value: &ValueId| {
                let readers = facts.direct_readers(*value).iter();
                let given = !facts.own_output_names(*value).is_empty();
                !outputs.contains(&facts.tensor(*value))
                    && (given || readers.into_iter().any(|(op, _)| !region.ops.contains(op)))
            };
            let mut kept = members.intersection(shared);
            let leave = kept.find(|op| graph.op(**op).outputs.iter().any(read_outside));
            match leave.copied() {
                Some(op) if members.len() > 1 => members.remove(&op),
                _ => return region,
            };
        }
    }

    fn into_ops(self) -> Vec<OpId> {
        self.ops.into_iter().collect()
    }

    fn made(&self) -> Vec<ValueId> {
        self.ops
            .iter()
            .flat_map(|op| self.facts.graph().op(*op).outputs.iter().copied())
            .collect()
    }

    /// No value made inside, other than an output, is read outside.
    fn interior(
        &self,
        outputs: &BTreeSet<ValueId>,
        refuse: &dyn Fn(&str, String) -> Refusal,
    ) -> Result<(), Refusal> {
        let graph = self.facts.graph();
        for value in self.made() {
            if outputs.contains(&self.facts.tensor(value)) {
                continue;
            }
            let name = &graph.value(value).name;
            let outside = self
                .facts
                .direct_readers(value)
                .iter()
                .map(|(op, _)| *op)
                .find(|op| !self.ops.contains(op));
            let (reader, host_path) = match (outside, self.facts.own_output_names(value).first()) {
                (Some(op), _) => {
                    let op = graph.op(op);
                    (
                        format!("{} at `{}`", op.kind, op.module),
                        Some(op.module.clone()),
                    )
                }
                (None, Some(output)) => (format!("the graph's output `{output}`"), None),
                (None, None) => continue,
            };
            let reason = format!("`{name}` is made inside the span and read by {reader}");
            return Err(Refusal {
                operand: Some(name.clone()),
                host_path,
                ..refuse(code::INTERIOR_READ_OUTSIDE, reason)
                    .expected_found("readers inside the span", reader)
            });
        }
        Ok(())
    }

    /// No path leaves the operations and comes back.
    fn convex(&self, refuse: &dyn Fn(&str, String) -> Refusal) -> Result<(), Refusal> {
        let graph = self.facts.graph();
        let Some(last) = self.ops.iter().next_back().copied() else {
            return Ok(());
        };
        let made: BTreeSet<ValueId> = self.made().into_iter().collect();
        let mut seen: BTreeSet<OpId> = BTreeSet::new();
        let mut todo: Vec<OpId> = Vec::new();
        let push = |values: &[ValueId], seen: &mut BTreeSet<OpId>, todo: &mut Vec<OpId>| {
            for value in values {
                for (op, _) in self.facts.direct_readers(*value) {
                    if !self.ops.contains(op) && *op < last && seen.insert(*op) {
                        todo.push(*op);
                    }
                }
            }
        };
        let all: Vec<ValueId> = made.iter().copied().collect();
        push(&all, &mut seen, &mut todo);
        while let Some(op) = todo.pop() {
            for out in &graph.op(op).outputs {
                // A view of a value made inside is that value: reading it is an edge inside, not a way back.
                if made.contains(&self.facts.tensor(*out)) {
                    continue;
                }
                let back = self
                    .facts
                    .direct_readers(*out)
                    .iter()
                    .find(|(reader, _)| self.ops.contains(reader));
                if let Some((reader, _)) = back {
                    let (from, to) = (graph.op(op), graph.op(*reader));
                    let reason = format!(
                        "a path leaves the span and comes back through {} at `{}` into {} at `{}`",
                        from.kind, from.module, to.kind, to.module
                    );
                    return Err(Refusal {
                        host_path: Some(from.module.clone()),
                        op: Some(to.kind.name().into()),
                        ..refuse(code::SPAN_NOT_CONVEX, reason)
                    });
                }
            }
            push(&graph.op(op).outputs, &mut seen, &mut todo);
        }
        Ok(())
    }
}

/// Whether an operation is a view (of views ...) that only members read; remembers every view it meets.
fn absorb(
    facts: &HostFacts<'_>,
    members: &BTreeSet<OpId>,
    op: OpId,
    memo: &mut HashMap<OpId, bool>,
) -> bool {
    if members.contains(&op) {
        return true;
    }
    if !facts.graph().op(op).kind.is_view() {
        return false;
    }
    if let Some(known) = memo.get(&op) {
        return *known;
    }
    let mut inside = true;
    for out in &facts.graph().op(op).outputs {
        inside &= facts.own_output_names(*out).is_empty();
        inside &= !facts.direct_readers(*out).is_empty();
        for (reader, _) in facts.direct_readers(*out) {
            inside &= absorb(facts, members, *reader, memo);
        }
    }
    memo.insert(op, inside);
    inside
}
