//! Pairing the operations of one plain graph with host operations: seeds, then propagation until nothing changes.
//!
//! An anchor outside every span is context: it says where to look and which operand is which, and is no part of the
//! structure. So its operands are followed through what a state region adds to them, and nothing else of it counts.
//!
//! A pairing binds names to host values. Nothing is guessed: an operation without exactly one counterpart stays
//! unpaired, and a second, different binding of a name is remembered as the conflict of the operation that asked
//! for it. Whether a span holds is decided elsewhere, on the finished pairing.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use structures_catalog::spec::{Plain, PlainAttr, PlainOp, Source as PlainSource};
use structures_graph::{OpId, OpKind, ValueId};

use crate::facts::HostFacts;
use crate::seam::{Seam, SlotWeight, WeightAddress};

use super::calls::CallSite;

/// What a name of the plain graph is on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A host tensor; `seen` is the view of it that the first reader names.
    Value {
        /// Start of the chain of views.
        root: ValueId,
        /// The value as read or made.
        seen: ValueId,
    },
    /// A missing optional operand.
    Absent,
}

impl Bound {
    fn root(self) -> Option<ValueId> {
        match self {
            Bound::Value { root, .. } => Some(root),
            Bound::Absent => None,
        }
    }
}

/// A binding that contradicts an earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Operand or result name.
    pub name: String,
    /// What it was bound to.
    pub expected: String,
    /// What the host operation has there.
    pub found: String,
}

/// The pairing of one plain graph.
#[derive(Debug)]
pub struct Match<'a, 'g> {
    facts: &'a HostFacts<'g>,
    plain: &'a Plain,
    sources: HashMap<&'a str, &'a PlainSource>,
    makers: HashMap<&'a str, (usize, usize)>,
    weights: &'a indexmap::IndexMap<String, SlotWeight>,
    roles: &'a indexmap::IndexMap<String, String>,
    /// Host operation of each plain operation; of a call, the first of many.
    pub pairs: Vec<Option<OpId>>,
    /// Conflict of each plain operation.
    pub conflicts: Vec<Option<Conflict>>,
    /// Host value of each name that is not a slot.
    pub values: BTreeMap<String, Bound>,
    /// Host parameter of each slot that a paired operation reads; `None` when the host has no operand there.
    pub slots: BTreeMap<String, Option<ValueId>>,
    taken: HashMap<OpId, usize>,
    /// Paired operations whose operands are still open: commutative ones whose order is, calls whose names are.
    open: BTreeSet<usize>,
    /// What calls run.
    calls: BTreeMap<usize, CallSite>,
    /// Operations that are context.
    context: BTreeSet<usize>,
}

impl<'a, 'g> Match<'a, 'g> {
    /// An empty pairing.
    pub fn new(facts: &'a HostFacts<'g>, plain: &'a Plain, seam: &'a Seam) -> Self {
        let makers = plain
            .ops
            .iter()
            .enumerate()
            .flat_map(|(i, op)| {
                op.outputs
                    .iter()
                    .enumerate()
                    .map(move |(k, n)| (n.as_str(), (i, k)))
            })
            .collect();
        Match {
            facts,
            plain,
            sources: plain.sources.iter().map(|s| (s.name.as_str(), s)).collect(),
            makers,
            weights: &seam.weights,
            roles: &seam.roles,
            pairs: vec![None; plain.ops.len()],
            conflicts: vec![None; plain.ops.len()],
            values: BTreeMap::new(),
            slots: BTreeMap::new(),
            taken: HashMap::new(),
            open: BTreeSet::new(),
            calls: BTreeMap::new(),
            context: context(plain),
        }
    }

    /// Whether an operation with a slot operand has a counterpart; `None` when no operation has one.
    pub fn weighted(&self) -> Option<bool> {
        let mut weighted = (0..self.plain.ops.len())
            .filter(|op| {
                let inputs = &self.plain.ops[*op].inputs;
                inputs.iter().flatten().any(|n| self.is_slot(n))
            })
            .peekable();
        weighted.peek()?;
        Some(weighted.any(|op| self.pairs[op].is_some()))
    }

    /// The plain operation that makes a name, and which of its results it is.
    pub fn maker(&self, name: &str) -> Option<(usize, usize)> {
        self.makers.get(name).copied()
    }

    /// Whether a name is a slot of the plain graph.
    pub fn is_slot(&self, name: &str) -> bool {
        self.sources.get(name).is_some_and(|s| s.slot)
    }

    /// The stored address of a slot.
    pub fn address(&self, slot: &str) -> Option<&'a WeightAddress> {
        self.weights.get(slot).and_then(SlotWeight::stored)
    }

    /// Paired operations without a conflict.
    pub fn good(&self, op: usize) -> Option<OpId> {
        self.pairs[op].filter(|_| self.conflicts[op].is_none() && !self.open.contains(&op))
    }

    /// Every host operation of a paired operation: several for a call.
    pub fn hosts(&self, op: usize) -> Vec<OpId> {
        match self.calls.get(&op) {
            Some(site) => site.ops.iter().copied().collect(),
            None => self.pairs[op].into_iter().collect(),
        }
    }

    /// Host operations that a slot operand of a plain operation names by its address.
    pub fn seeds(&self, op: usize, hints: bool) -> Vec<OpId> {
        let plain = &self.plain.ops[op];
        let mut found: Option<BTreeSet<OpId>> = None;
        for (i, name) in plain.inputs.iter().enumerate() {
            let Some(name) = name.as_deref().filter(|n| self.is_slot(n)) else {
                continue;
            };
            let Some(address) = self.address(name).filter(|a| hints || !a.hint) else {
                continue;
            };
            let readers = self
                .facts
                .param_value(&address.param())
                .map(|v| self.facts.readers(v))
                .unwrap_or(&[]);
            let here: BTreeSet<OpId> = readers
                .iter()
                .filter(|r| self.facts.graph().op(r.op).kind == plain.kind)
                .filter(|r| plain.kind.spec().commutative || r.operand == i)
                .map(|r| r.op)
                .collect();
            found = Some(match found {
                Some(before) => before.intersection(&here).copied().collect(),
                None => here,
            });
        }
        found.unwrap_or_default().into_iter().collect()
    }

    /// Seeds (with a choice among several readers), then propagation.
    pub fn run(&mut self, chosen: &HashMap<usize, OpId>) {
        for op in 0..self.plain.ops.len() {
            if let Some(host) = chosen.get(&op) {
                self.pair(op, *host);
            }
        }
        for hints in [false, true] {
            for op in 0..self.plain.ops.len() {
                if self.pairs[op].is_none() {
                    if let [host] = self.seeds(op, hints)[..] {
                        self.pair(op, host);
                    }
                }
            }
            if !hints {
                self.enter_calls();
            }
            loop {
                while self.step() {}
                if !hints || !self.settle_symmetric() {
                    break;
                }
            }
        }
    }

    /// Gives one open commutative pair its written order where the structure cannot tell its operands apart: both
    /// are boundary inputs of the same dims that nothing else reads, so either order is the same structure.
    fn settle_symmetric(&mut self) -> bool {
        let alone = |name: &Option<String>| -> Option<&PlainSource> {
            let name = name.as_deref()?;
            let source = self.sources.get(name).filter(|s| !s.slot)?;
            let readers = self
                .plain
                .ops
                .iter()
                .flat_map(|o| o.inputs.iter().flatten());
            let once = readers.filter(|n| *n == name).count() == 1;
            (once && !self.values.contains_key(name)).then_some(*source)
        };
        let symmetric =
            self.open
                .iter()
                .copied()
                .find(|&op| match &self.plain.ops[op].inputs[..] {
                    [a, b] => match (alone(a), alone(b)) {
                        (Some(a), Some(b)) => a.dims == b.dims && a.optional == b.optional,
                        _ => false,
                    },
                    _ => false,
                });
        symmetric.is_some_and(|op| self.bind_in_order(op, false))
    }

    /// One round of propagation; whether anything changed.
    fn step(&mut self) -> bool {
        let mut changed = false;
        for op in self.open.clone() {
            changed |= match self.calls.remove(&op) {
                Some(site) => {
                    let bound = self.bind_call(op, &site);
                    self.calls.insert(op, site);
                    bound
                }
                None => self.bind_operands(op),
            };
        }
        for op in 0..self.plain.ops.len() {
            if self.pairs[op].is_some() {
                continue;
            }
            if let Some(host) = self.by_result(op).or_else(|| self.by_operand(op)) {
                self.pair(op, host);
                changed |= self.pairs[op].is_some();
            }
        }
        changed
    }

    /// The producer of a bound result, when the operation is the same.
    fn by_result(&self, op: usize) -> Option<OpId> {
        let plain = &self.plain.ops[op];
        plain.outputs.iter().enumerate().find_map(|(k, name)| {
            let root = self.values.get(name)?.root()?;
            let (host, index) = self.facts.graph().producer(root)?;
            let same = self.facts.graph().op(host).kind == plain.kind && index == k;
            (same && !self.taken.contains_key(&host)).then_some(host)
        })
    }

    /// The only free reader of a bound operand with the same operation and position.
    fn by_operand(&self, op: usize) -> Option<OpId> {
        let plain = &self.plain.ops[op];
        plain.inputs.iter().enumerate().find_map(|(i, name)| {
            let root = self.values.get(name.as_deref()?)?.root()?;
            let mut candidates: Vec<OpId> = self
                .facts
                .readers(root)
                .iter()
                .filter(|r| self.facts.graph().op(r.op).kind == plain.kind)
                .filter(|r| plain.kind.spec().commutative || r.operand == i)
                .map(|r| r.op)
                .filter(|r| !self.taken.contains_key(r))
                .collect();
            candidates.dedup();
            match candidates[..] {
                [one] => Some(one),
                _ => None,
            }
        })
    }

    /// Pairs every call with what the host runs inside its role's module.
    fn enter_calls(&mut self) {
        let calls: Vec<(usize, &str)> = self
            .plain
            .ops
            .iter()
            .enumerate()
            .filter_map(|(i, op)| Some((i, self.roles.get(role(op)?)?.as_str())))
            .collect();
        let paths: Vec<&str> = calls.iter().map(|(_, path)| *path).collect();
        for (op, path) in calls {
            let taken = |host: OpId| self.taken.contains_key(&host);
            let site = CallSite::new(self.facts, path, &paths, &taken);
            let Some(first) = site.ops.first().copied() else {
                continue;
            };
            self.taken.extend(site.ops.iter().map(|host| (*host, op)));
            self.pairs[op] = Some(first);
            self.open.insert(op);
            self.calls.insert(op, site);
        }
    }

    /// Binds the names of a call for which one tensor is left; whether anything changed.
    fn bind_call(&mut self, op: usize, site: &CallSite) -> bool {
        let plain = &self.plain.ops[op];
        let results = plain.outputs.iter().map(|n| (n.as_str(), true));
        let args = plain.inputs.iter().flatten().map(|n| (n.as_str(), false));
        let names: Vec<(&str, bool)> = results.chain(args).collect();
        let root = |m: &Self, name: &str| m.values.get(name).and_then(|b| b.root());
        let (mut changed, mut bound) = (false, 0);
        for (name, made) in &names {
            let pool = if *made { &site.results } else { &site.inputs };
            if let Some(root) = root(self, name) {
                if !pool.contains(&root) {
                    self.conflicts[op] = Some(Conflict {
                        name: (*name).into(),
                        expected: self.describe(root),
                        found: self.describe_all(pool),
                    });
                    self.open.remove(&op);
                    return true;
                }
                bound += 1;
                continue;
            }
            let others: Vec<ValueId> = names
                .iter()
                .filter(|(_, m)| m == made)
                .filter_map(|(n, _)| root(self, n))
                .collect();
            let left: Vec<ValueId> = pool
                .iter()
                .copied()
                .filter(|v| !others.contains(v) && self.fits_ends(name, op, *v))
                .collect();
            if let [one] = left[..] {
                let value = Bound::Value {
                    root: one,
                    seen: one,
                };
                self.values.insert((*name).into(), value);
                (changed, bound) = (true, bound + 1);
            }
        }
        if bound == names.len() {
            self.open.remove(&op);
            changed = true;
        }
        changed
    }

    /// Whether a tensor can be a name as far as the other operations that make or read the name can tell.
    fn fits_ends(&self, name: &str, asked: usize, value: ValueId) -> bool {
        let graph = self.facts.graph();
        let made = match self.maker(name) {
            Some((op, k)) if op != asked => match self.calls.get(&op) {
                Some(site) => site.results.contains(&value),
                None => graph.producer(value).is_some_and(|(host, index)| {
                    graph.op(host).kind == self.plain.ops[op].kind && index == k
                }),
            },
            _ => true,
        };
        made && self.plain.ops.iter().enumerate().all(|(op, plain)| {
            let mut at = plain
                .inputs
                .iter()
                .enumerate()
                .filter(|(_, n)| n.as_deref() == Some(name));
            match self.calls.get(&op) {
                _ if op == asked => true,
                Some(site) => at.next().is_none() || site.inputs.contains(&value),
                None => at.all(|(k, _)| {
                    self.facts.readers(value).iter().any(|r| {
                        graph.op(r.op).kind == plain.kind
                            && (plain.kind.spec().commutative || r.operand == k)
                    })
                }),
            }
        })
    }

    fn describe_all(&self, values: &[ValueId]) -> String {
        let all: Vec<String> = values.iter().map(|v| self.describe(*v)).collect();
        match all.is_empty() {
            true => "nothing".into(),
            false => all.join(", "),
        }
    }

    /// Pairs two operations of one kind; a host operation is given once.
    fn pair(&mut self, op: usize, host: OpId) {
        if self.taken.contains_key(&host) {
            return;
        }
        self.taken.insert(host, op);
        self.pairs[op] = Some(host);
        self.open.insert(op);
        self.bind_operands(op);
    }

    /// Binds operands and results of a paired operation once their order is known; whether that happened now.
    fn bind_operands(&mut self, op: usize) -> bool {
        let Some(host) = self.pairs[op] else {
            return false;
        };
        let plain = &self.plain.ops[op];
        let inputs = &self.facts.graph().op(host).inputs;
        let two = plain.inputs.len() == 2 && inputs.len() == 2;
        let swapped = match plain.kind.spec().commutative && two {
            true => self.order(plain, inputs),
            false => Some(false),
        };
        swapped.is_some_and(|swapped| self.bind_in_order(op, swapped))
    }

    /// Binds operands, exchanged or as written, and results of a paired operation.
    fn bind_in_order(&mut self, op: usize, swapped: bool) -> bool {
        let Some(host) = self.pairs[op] else {
            return false;
        };
        let plain = &self.plain.ops[op];
        let graph = self.facts.graph();
        let inputs = &graph.op(host).inputs;
        let context = self.context.contains(&op);
        let order: Vec<usize> = match (swapped, context) {
            (true, _) => vec![1, 0],
            (false, true) => (0..plain.inputs.len()).collect(),
            (false, false) => (0..inputs.len().max(plain.inputs.len())).collect(),
        };
        self.open.remove(&op);
        let mut bindings: Vec<(&str, Bound)> = Vec::new();
        let mut slots: Vec<(&str, Option<ValueId>)> = Vec::new();
        for (i, at) in order.into_iter().enumerate() {
            let name = plain.inputs.get(i).and_then(|n| n.as_deref());
            let seen = inputs.get(at).copied().flatten();
            let conflict = match (name, seen) {
                (None, None) => None,
                (None, Some(v)) => Some(Conflict {
                    name: operand_name(plain.kind, i),
                    expected: "nothing".into(),
                    found: self.describe(v),
                }),
                (Some(name), seen) if self.is_slot(name) => {
                    slots.push((name, seen));
                    self.slot_conflict(name, seen)
                }
                (Some(name), Some(seen)) if context => {
                    let root = self.facts.appended(seen);
                    let bound = Bound::Value { root, seen: root };
                    bindings.push((name, bound));
                    self.value_conflict(name, bound)
                }
                (Some(name), Some(seen)) => {
                    let root = self.facts.tensor(seen);
                    let bound = Bound::Value { root, seen };
                    bindings.push((name, bound));
                    self.value_conflict(name, bound)
                }
                (Some(name), None) => {
                    bindings.push((name, Bound::Absent));
                    let optional = self.sources.get(name).is_some_and(|s| s.optional);
                    if optional {
                        self.value_conflict(name, Bound::Absent)
                    } else {
                        Some(Conflict {
                            name: name.into(),
                            expected: format!("a tensor as operand {i}"),
                            found: "nothing".into(),
                        })
                    }
                }
            };
            if conflict.is_some() {
                self.conflicts[op] = conflict;
                return true;
            }
        }
        let results = &graph.op(host).outputs;
        if results.len() != plain.outputs.len() {
            self.conflicts[op] = Some(Conflict {
                name: plain.outputs.join(", "),
                expected: format!("{} results", plain.outputs.len()),
                found: format!("{} results", results.len()),
            });
            return true;
        }
        for (name, made) in plain.outputs.iter().zip(results) {
            let bound = Bound::Value {
                root: *made,
                seen: *made,
            };
            if let Some(conflict) = self.value_conflict(name, bound) {
                self.conflicts[op] = Some(conflict);
                return true;
            }
            bindings.push((name, bound));
        }
        for (name, bound) in bindings {
            // A produced value is the produced one, whatever view its first reader named.
            let made = self.makers.contains_key(name);
            match (self.values.get(name).copied(), bound) {
                (None, Bound::Value { root, .. }) if made => {
                    self.values
                        .insert(name.into(), Bound::Value { root, seen: root });
                }
                (None, bound) => {
                    self.values.insert(name.into(), bound);
                }
                (Some(_), _) => {}
            }
        }
        for (name, param) in slots {
            self.slots.entry(name.into()).or_insert(param);
        }
        true
    }

    /// Whether the operands of a commutative pair are swapped; `None` while both orders are possible.
    fn order(&self, plain: &PlainOp, inputs: &[Option<ValueId>]) -> Option<bool> {
        let fits = |pattern: &Option<String>, value: Option<ValueId>, strict: bool| -> bool {
            let (Some(name), Some(value)) = (pattern.as_deref(), value) else {
                return pattern.is_none() == value.is_none();
            };
            if self.is_slot(name) {
                return self.slot_conflict(name, Some(value)).is_none();
            }
            let root = self.facts.tensor(value);
            if let Some(bound) = self.values.get(name) {
                return bound.root() == Some(root);
            }
            // A made operand must come from an operation of its kind; a boundary one may come from anywhere.
            match self.maker(name) {
                Some((op, k)) if strict => {
                    self.facts.graph().producer(root).is_some_and(|(h, j)| {
                        self.facts.graph().op(h).kind == self.plain.ops[op].kind && j == k
                    })
                }
                _ => true,
            }
        };
        let count = |swapped: bool, strict: bool| -> usize {
            let (a, b) = if swapped { (1, 0) } else { (0, 1) };
            usize::from(fits(&plain.inputs[0], inputs[a], strict))
                + usize::from(fits(&plain.inputs[1], inputs[b], strict))
        };
        for strict in [true, false] {
            match (count(false, strict), count(true, strict)) {
                (2, 2) => {
                    let one = inputs[0].map(|v| self.facts.tensor(v))
                        == inputs[1].map(|v| self.facts.tensor(v));
                    return one.then_some(false);
                }
                (2, _) => return Some(false),
                (_, 2) => return Some(true),
                _ => {}
            }
        }
        // No order fits: the nearer one says what is in conflict.
        Some(count(true, false) > count(false, false))
    }

    fn value_conflict(&self, name: &str, bound: Bound) -> Option<Conflict> {
        let before = self.values.get(name)?;
        let same = match (before, &bound) {
            (Bound::Absent, Bound::Absent) => true,
            (a, b) => a.root().is_some() && a.root() == b.root(),
        };
        (!same).then(|| Conflict {
            name: name.into(),
            expected: self.describe_bound(*before),
            found: self.describe_bound(bound),
        })
    }

    fn slot_conflict(&self, slot: &str, seen: Option<ValueId>) -> Option<Conflict> {
        let address = self.address(slot);
        let param = seen.map(|v| self.facts.tensor(v));
        let found = param.and_then(|v| self.facts.graph().param(v));
        if let Some(before) = self.slots.get(slot) {
            let before = before.map(|v| self.facts.tensor(v));
            if before != param {
                return Some(Conflict {
                    name: slot.into(),
                    expected: before.map_or("nothing".into(), |v| self.describe(v)),
                    found: param.map_or("nothing".into(), |v| self.describe(v)),
                });
            }
        }
        match (param, found, address) {
            (Some(_), Some((found, _)), Some(a)) if !a.hint && *found != a.param() => {
                Some(Conflict {
                    name: slot.into(),
                    expected: format!("parameter {}", a.param()),
                    found: format!("parameter {found}"),
                })
            }
            (Some(_), Some(_), _) => None,
            (Some(v), None, _) => Some(Conflict {
                name: slot.into(),
                expected: "a parameter".into(),
                found: self.describe(v),
            }),
            (None, _, Some(a)) if !a.hint => Some(Conflict {
                name: slot.into(),
                expected: format!("parameter {}", a.param()),
                found: "nothing".into(),
            }),
            // A norm without a weight: the slot is a constant.
            (None, _, _) => None,
        }
    }

    /// Module path of a host operation.
    pub fn module(&self, host: OpId) -> String {
        self.facts.graph().op(host).module.clone()
    }

    /// A host value for a message.
    pub fn describe(&self, id: ValueId) -> String {
        let value = self.facts.graph().value(id);
        match self.facts.graph().producer(id) {
            Some((op, _)) => {
                let op = self.facts.graph().op(op);
                format!("`{}` ({} at `{}`)", value.name, op.kind, op.module)
            }
            None => format!("`{}`", value.name),
        }
    }

    fn describe_bound(&self, bound: Bound) -> String {
        match bound {
            Bound::Value { root, .. } => self.describe(root),
            Bound::Absent => "nothing".into(),
        }
    }

    /// Why an operation did not pair: operand or result, what was expected, what the host has, and where.
    pub fn missing(&self, op: usize) -> Missing {
        let plain = &self.plain.ops[op];
        let graph = self.facts.graph();
        if let Some(role) = role(plain) {
            return self.missing_call(op, role);
        }
        if let Some(host) = self.pairs[op].filter(|_| self.open.contains(&op)) {
            return Missing {
                operand: plain
                    .inputs
                    .iter()
                    .flatten()
                    .cloned()
                    .collect::<Vec<_>>()
                    .join(", "),
                expected: format!("one order of the operands of {}", plain.kind),
                found: format!("both orders of the one at `{}` fit", self.module(host)),
                host_path: Some(self.module(host)),
            };
        }
        for (i, name) in plain.inputs.iter().enumerate() {
            let Some(name) = name.as_deref() else {
                continue;
            };
            let here = |r: &&crate::facts::Reader| {
                graph.op(r.op).kind == plain.kind
                    && (plain.kind.spec().commutative || r.operand == i)
            };
            if self.is_slot(name) {
                let Some(address) = self.address(name).filter(|a| !a.hint) else {
                    continue;
                };
                let param = address.param();
                let found = match self.facts.param_value(&param) {
                    Some(v) => self.list(self.facts.readers(v).iter().map(|r| r.op)),
                    None => match self.facts.other_ranges(&param) {
                        r if r.is_empty() => "the graph does not read it".into(),
                        r => format!("the graph reads {}", r.join(", ")),
                    },
                };
                return Missing {
                    operand: name.into(),
                    expected: format!("a {} that reads {param}", plain.kind),
                    found,
                    host_path: Some(address.path.clone()),
                };
            }
            let Some(root) = self.values.get(name).and_then(|b| b.root()) else {
                continue;
            };
            let readers = self.facts.readers(root);
            let same: Vec<OpId> = readers.iter().filter(here).map(|r| r.op).collect();
            let expected = format!("a {} that reads {}", plain.kind, self.describe(root));
            let found = if same.len() > 1 {
                format!("{} of them, nothing says which", same.len())
            } else {
                self.list(readers.iter().map(|r| r.op))
            };
            return Missing {
                operand: name.into(),
                expected,
                found,
                host_path: readers.first().map(|r| graph.op(r.op).module.clone()),
            };
        }
        for name in &plain.outputs {
            if let Some(root) = self.values.get(name).and_then(|b| b.root()) {
                return Missing {
                    operand: name.clone(),
                    expected: format!("{name} made by a {}", plain.kind),
                    found: self.describe(root),
                    host_path: graph
                        .producer(root)
                        .map(|(h, _)| graph.op(h).module.clone()),
                };
            }
        }
        Missing {
            operand: plain.outputs.join(", "),
            expected: format!("a {}", plain.kind),
            found: "none of its operands and results could be placed".into(),
            host_path: None,
        }
    }

    fn missing_call(&self, op: usize, role: &str) -> Missing {
        let plain = &self.plain.ops[op];
        let path = self.roles.get(role);
        let Some(site) = self.calls.get(&op) else {
            return Missing {
                operand: plain.outputs.join(", "),
                expected: format!("operations in the module of role `{role}`"),
                found: match path {
                    Some(path) => format!("the graph runs nothing in `{path}`"),
                    None => "the seam has no such role".into(),
                },
                host_path: path.cloned(),
            };
        };
        let open = |n: &&String| !self.values.contains_key(*n);
        let result = plain.outputs.iter().find(open);
        let (side, pool) = match &result {
            Some(_) => ("result", &site.results),
            None => ("input", &site.inputs),
        };
        let name = result.or_else(|| plain.inputs.iter().flatten().find(open));
        Missing {
            operand: name.cloned().unwrap_or_else(|| plain.outputs.join(", ")),
            expected: format!("one {side} of `{}`", site.path),
            found: self.describe_all(pool),
            host_path: Some(site.path.clone()),
        }
    }

    fn list(&self, ops: impl Iterator<Item = OpId>) -> String {
        let mut words: Vec<String> = ops
            .map(|op| {
                let op = self.facts.graph().op(op);
                format!("{} at `{}`", op.kind, op.module)
            })
            .collect();
        words.dedup();
        if words.is_empty() {
            "no reader".into()
        } else {
            words.join(", ")
        }
    }
}

/// The role a call runs.
fn role(op: &PlainOp) -> Option<&str> {
    match (op.kind, op.attrs.get("role")) {
        (OpKind::Call, Some(PlainAttr::Equal(role))) => role.as_word(),
        _ => None,
    }
}

fn context(plain: &Plain) -> BTreeSet<usize> {
    let inside: BTreeSet<usize> = plain.spans.iter().flat_map(|s| plain.span_ops(s)).collect();
    (0..plain.ops.len())
        .filter(|op| plain.ops[*op].anchor && !inside.contains(op))
        .collect()
}

/// The explanation of an operation that stayed unpaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Operand or result.
    pub operand: String,
    /// Expected.
    pub expected: String,
    /// Found.
    pub found: String,
    /// Where.
    pub host_path: Option<String>,
}

fn operand_name(kind: OpKind, i: usize) -> String {
    kind.spec()
        .operands
        .get(i)
        .map_or_else(|| i.to_string(), |n| n.trim_end_matches('?').to_string())
}
