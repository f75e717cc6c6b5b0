//! A whole block of wired parts: the second half of a layer, with the residual sums before and after it, is one install,
//! and what comes first in the layer is linked to it.
//!
//! A pair that wires made reads the sum of what went before and its output goes into the next sum. Where a block's
//! structure says what those sums are and a form executes them, they are taken along: the sum is made, normed, sent and
//! added without the host in between. The first norm, whose gate the sum reads, stays an install of its own, because
//! attention lies between, and that is the host's. All of them serve together: the first call that one of them had to
//! hand back gives the whole block to the host, for good.
//!
//! Owns the joint runner and the link. Does not own which blocks there are, nor whether one is worth it: `attach` does.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, RwLock};

use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use structures_graph::session::{Frozen, Install, SpanOutcome, SpanRunner, ViewMut};
use structures_graph::{Dim, Graph, GraphError, ValueId};

use crate::bind::{Bound, MOST};
use crate::seat::{learn_dims, sizes, OnGuardFail, Seat, View};
use crate::workspace::{locked, Scratch, Workspace};

/// What a block reads elsewhere is read by somebody else too.
pub const CANNOT_ABSORB: &str = "cannot_absorb";
/// The two norms are not conditioned by one tensor.
pub const LOCATORS_DIFFER: &str = "locators_differ";

/// A composed block in a receipt. Seats are named `structure:key:span`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockNote {
    /// Structure that owns the block.
    pub structure: String,
    /// Its module.
    pub owner: String,
    /// Seats that come first and are linked.
    pub linked: Vec<String>,
    /// Seats of the one install, in the order they run.
    pub parts: Vec<String>,
}

/// The name of a seat in a [`BlockNote`].
pub fn seat_name(bound: &Bound) -> String {
    format!(
        "{}:{}:{}",
        bound.note.structure, bound.note.key, bound.note.span
    )
}

/// Seats that serve together or not at all.
struct Link {
    name: String,
    seats: Vec<Arc<Seat>>,
}

impl Link {
    fn live(&self) -> bool {
        !self.seats.iter().any(|s| s.ledger.is_detached())
    }

    /// Counted misses and failures so far.
    fn missed(&self) -> u64 {
        let counts = self.seats.iter().map(|s| s.ledger.counts());
        counts.map(|c| c.fallbacks + c.refused).sum()
    }

    /// Runs an inner runner; a call it had to hand back ends the link.
    fn run(
        &self,
        inner: impl FnOnce() -> Result<SpanOutcome, GraphError>,
    ) -> Result<SpanOutcome, GraphError> {
        match self.live() {
            true => self.watch(inner),
            false => Ok(SpanOutcome::Host),
        }
    }

    /// The same in a captured step, where there is no host to hand a call to.
    fn replay(&self, inner: impl FnOnce() -> Result<(), GraphError>) -> Result<(), GraphError> {
        match self.live() {
            true => self.watch(inner),
            false => Err(self.guard("the block gave itself up after the step was captured")),
        }
    }

    fn guard(&self, reason: &str) -> GraphError {
        GraphError::Guard {
            name: self.name.clone(),
            reason: reason.into(),
        }
    }

    fn watch<R>(&self, inner: impl FnOnce() -> Result<R, GraphError>) -> Result<R, GraphError> {
        let before = self.missed();
        let outcome = inner();
        let strict = self.seats.iter().any(|s| s.mode() == OnGuardFail::Raise);
        if self.missed() > before && !strict {
            self.seats.iter().for_each(|s| s.ledger.detach());
            tracing::warn!(
                block = %self.name,
                "one part of a composed block handed a call back; the host runs the whole block from now on"
            );
        }
        outcome
    }
}

/// What comes first in a block, under the link.
struct First {
    link: Arc<Link>,
    inner: Arc<dyn SpanRunner>,
}

impl SpanRunner for First {
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        self.link.run(|| self.inner.run(inputs))
    }

    fn freeze(&self, inputs: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        match self.link.live() {
            true => self.inner.freeze(inputs),
            false => Ok(Frozen::Host),
        }
    }

    fn replay(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), GraphError> {
        self.link.replay(|| self.inner.replay(inputs, outputs))
    }

    fn replayed(&self, planned: Frozen) {
        if self.link.live() {
            self.inner.replayed(planned);
        }
    }

    fn host_serves(&self, rows: usize) -> bool {
        !self.link.live() || self.inner.host_serves(rows)
    }

    fn host_gone(&self) {
        self.inner.host_gone();
    }
}

/// Installs one after the other, as one.
struct Joined {
    link: Arc<Link>,
    parts: Vec<Install>,
    /// Seats of the parts.
    seats: Vec<Arc<Seat>>,
    inputs: Vec<Option<ValueId>>,
    outputs: Vec<ValueId>,
    /// Declared dims of whatever the parts read or make.
    dims: HashMap<ValueId, Vec<Dim>>,
    /// Sizes captured steps call it at.
    laid: RwLock<Vec<Arc<Laid>>>,
}

/// What lies between the parts at the sizes of a captured step.
struct Laid {
    /// Dims of the first input.
    first: Vec<usize>,
    between: Vec<Between>,
}

/// A value that one part makes and another reads.
struct Between {
    value: ValueId,
    dims: Vec<usize>,
    memory: Scratch<f32>,
}

/// Most values between the parts of a block: four parts make few.
const MOST_BETWEEN: usize = 8;

impl Joined {
    /// Sizes of a value that a captured step's inputs tell.
    fn sizes(
        &self,
        symbols: &HashMap<&str, usize>,
        value: ValueId,
    ) -> Result<Vec<usize>, GraphError> {
        let dims = self.dims.get(&value).cloned().unwrap_or_default();
        let mut one = sizes(&self.link.name, symbols, &[dims])?;
        Ok(one.pop().unwrap_or_default())
    }

    /// Asks every part, and settles what lies between them.
    fn settle(&self, inputs: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        let mut symbols = HashMap::new();
        let mut known: HashMap<ValueId, Vec<usize>> = HashMap::new();
        for (value, given) in self.inputs.iter().zip(inputs) {
            if let (Some(value), Some(given)) = (value, given) {
                known.insert(*value, given.to_vec());
                if let Some(dims) = self.dims.get(value) {
                    learn_dims(&mut symbols, dims, given);
                }
            }
        }
        let mut between = Vec::new();
        for part in &self.parts {
            let dims: Vec<Option<&[usize]>> = part
                .inputs
                .iter()
                .map(|v| v.and_then(|v| known.get(&v)).map(Vec::as_slice))
                .collect();
            match part.runner.freeze(&dims)? {
                Frozen::Served { allocates: false } => {}
                other => return Ok(other),
            }
            for value in &part.outputs {
                let Ok(dims) = self.sizes(&symbols, *value) else {
                    return Ok(Frozen::Tensors);
                };
                if !self.outputs.contains(value) {
                    // Two values of one call never share a buffer, those of two calls do.
                    let tag = format!("block.{}", between.len());
                    between.push(Between {
                        value: *value,
                        memory: Workspace::global().values(&dims, &tag),
                        dims: dims.clone(),
                    });
                }
                known.insert(*value, dims);
            }
        }
        if between.len() > MOST_BETWEEN {
            return Ok(Frozen::Tensors);
        }
        let first = inputs.first().copied().flatten().unwrap_or_default();
        let first = first.to_vec();
        let mut all = self.laid.write().unwrap_or_else(|e| e.into_inner());
        all.retain(|l| l.first != first);
        all.push(Arc::new(Laid { first, between }));
        Ok(Frozen::Served { allocates: false })
    }

    /// [`Joined::serve`] in the caller's memory: nothing is allocated.
    fn serve_into(
        &self,
        laid: &Laid,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), GraphError> {
        let mut memory: [Option<MutexGuard<'_, Vec<f32>>>; MOST_BETWEEN] =
            std::array::from_fn(|i| laid.between.get(i).map(|b| locked(&b.memory)));
        let place = |v: &ValueId| laid.between.iter().position(|b| b.value == *v);
        for part in &self.parts {
            // What a part fills is taken out while it is filled.
            let mut taken: [Option<MutexGuard<'_, Vec<f32>>>; MOST_BETWEEN] = Default::default();
            for at in part.outputs.iter().filter_map(place) {
                taken[at] = memory[at].take();
            }
            let mut views: [View<'_>; MOST.0] = [None; MOST.0];
            for (to, value) in views.iter_mut().zip(&part.inputs) {
                let Some(value) = value else { continue };
                *to = match place(value) {
                    Some(at) => {
                        let data = memory[at].as_ref().map(|m| m.as_slice());
                        data.map(|data| (data, laid.between[at].dims.as_slice()))
                    }
                    None => {
                        let at = self.inputs.iter().position(|v| *v == Some(*value));
                        at.and_then(|at| inputs.get(at).copied().flatten())
                    }
                };
            }
            let mut results: [ViewMut<'_>; MOST.1] = std::array::from_fn(|_| Default::default());
            let (n, m) = (part.inputs.len(), part.outputs.len());
            if n > MOST.0 || m > MOST.1 {
                return Err(self
                    .link
                    .guard("a part has more operands or results than a step hands over"));
            }
            let mut filled = taken
                .iter_mut()
                .enumerate()
                .filter_map(|(at, m)| Some((at, m.as_mut()?)));
            let mut left = outputs.iter_mut();
            for (to, value) in results.iter_mut().zip(&part.outputs) {
                // Outputs of a part are in the order of places, as they were laid out.
                *to = match place(value) {
                    Some(_) => match filled.next() {
                        Some((at, m)) => (m.as_mut_slice(), laid.between[at].dims.as_slice()),
                        None => continue,
                    },
                    None => match left.next() {
                        Some((data, dims)) => (data, dims),
                        None => continue,
                    },
                };
            }
            part.runner.replay(&views[..n], &mut results[..m])?;
            for (at, guard) in taken.into_iter().enumerate() {
                if let Some(guard) = guard {
                    memory[at] = Some(guard);
                }
            }
        }
        Ok(())
    }

    fn serve(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        let mut made: HashMap<ValueId, Tensor> = HashMap::new();
        for (value, tensor) in self.inputs.iter().zip(inputs) {
            made.extend(value.zip(tensor.clone()));
        }
        for part in &self.parts {
            let inputs: Vec<Option<Tensor>> = part
                .inputs
                .iter()
                .map(|v| v.and_then(|v| made.get(&v).cloned()))
                .collect();
            match part.runner.run(&inputs)? {
                SpanOutcome::Host => return Ok(SpanOutcome::Host),
                SpanOutcome::Done(outputs) => {
                    made.extend(part.outputs.iter().copied().zip(outputs))
                }
            }
        }
        let take = |v: &ValueId| {
            made.remove(v).ok_or_else(|| GraphError::Span {
                name: self.link.name.clone(),
                reason: format!("no part made value {}", v.0),
            })
        };
        let outputs: Result<Vec<Tensor>, _> = self.outputs.iter().map(take).collect();
        outputs.map(SpanOutcome::Done)
    }
}

impl SpanRunner for Joined {
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        if !self.link.live() {
            return Ok(SpanOutcome::Host);
        }
        let first = inputs.iter().flatten().next();
        let rows = first.map_or(0, |x| rows_of(x.dims()));
        // Planned for one is planned for all of them: nothing is begun that another part would not finish.
        if self.seats.iter().any(|s| s.out_of_band(rows)) {
            self.seats.iter().for_each(|s| s.ledger.dispatched());
            return Ok(SpanOutcome::Host);
        }
        self.link.run(|| self.serve(inputs))
    }

    fn freeze(&self, inputs: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        if !self.link.live() {
            return Ok(Frozen::Host);
        }
        let first = inputs.iter().flatten().next().copied().unwrap_or_default();
        let rows = rows_of(first);
        match self.seats.iter().any(|s| s.out_of_band(rows)) {
            true => Ok(Frozen::Host),
            false => self.settle(inputs),
        }
    }

    fn replay(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), GraphError> {
        let first = inputs
            .first()
            .copied()
            .flatten()
            .map_or(&[][..], |(_, dims)| dims);
        let laid = {
            let all = self.laid.read().unwrap_or_else(|e| e.into_inner());
            all.iter().find(|l| l.first == first).cloned()
        };
        let Some(laid) = laid else {
            return Err(self.link.guard("called at sizes it was not captured for"));
        };
        self.link.replay(|| self.serve_into(&laid, inputs, outputs))
    }

    fn replayed(&self, planned: Frozen) {
        match planned {
            _ if !self.link.live() => {}
            Frozen::Host => self.seats.iter().for_each(|s| s.ledger.dispatched()),
            planned => self.parts.iter().for_each(|p| p.runner.replayed(planned)),
        }
    }

    fn host_serves(&self, rows: usize) -> bool {
        !self.link.live() || self.parts.iter().any(|p| p.runner.host_serves(rows))
    }

    fn host_gone(&self) {
        self.parts.iter().for_each(|p| p.runner.host_gone());
    }
}

/// Rows of what has these sizes.
fn rows_of(dims: &[usize]) -> usize {
    let (width, lead) = dims.split_last().unwrap_or((&0, &[]));
    match width {
        0 => 0,
        _ => lead.iter().product(),
    }
}

/// Composes: `first` under the link, and `before`, the two ends of a wire, `after` as one install. What comes back are
/// all of them, in this order.
pub fn join(
    graph: &Graph,
    name: &str,
    first: Vec<Bound>,
    before: Bound,
    pair: Vec<Bound>,
    after: Bound,
) -> Vec<Bound> {
    let parts: Vec<Install> = [&before.install, &pair[0].install, &after.install]
        .into_iter()
        .cloned()
        .collect();
    let inside: Vec<&Bound> = [&before].into_iter().chain(&pair).chain([&after]).collect();
    let seats: Vec<Arc<Seat>> = inside.iter().map(|b| b.seat.clone()).collect();
    let linked = first.iter().map(|b| b.seat.clone());
    let link = Arc::new(Link {
        name: name.into(),
        seats: linked.chain(seats.iter().cloned()).collect(),
    });
    let mut inputs: Vec<Option<ValueId>> = Vec::new();
    let mut made: Vec<ValueId> = Vec::new();
    for part in &parts {
        for v in part.inputs.iter().flatten() {
            if !made.contains(v) && !inputs.contains(&Some(*v)) {
                inputs.push(Some(*v));
            }
        }
        made.extend(&part.outputs);
    }
    let outputs = after.install.outputs.clone();
    let dims = inputs
        .iter()
        .flatten()
        .chain(&made)
        .map(|v| (*v, graph.value(*v).dims.clone()))
        .collect();
    let install = Install {
        name: name.into(),
        ops: parts.iter().flat_map(|p| p.ops.iter().copied()).collect(),
        inputs: inputs.clone(),
        outputs: outputs.clone(),
        runner: Arc::new(Joined {
            link: link.clone(),
            parts,
            seats,
            inputs,
            outputs,
            dims,
            laid: RwLock::default(),
        }),
    };
    let mut all: Vec<Bound> = Vec::new();
    // The two ends of a wire share one install, and so one place under the link.
    let mut wrapped: HashMap<String, Install> = HashMap::new();
    for mut bound in first {
        let under = wrapped
            .entry(bound.install.name.clone())
            .or_insert_with(|| Install {
                runner: Arc::new(First {
                    link: link.clone(),
                    inner: bound.install.runner.clone(),
                }),
                ..bound.install.clone()
            });
        bound.install = under.clone();
        all.push(bound);
    }
    for mut bound in [before].into_iter().chain(pair).chain([after]) {
        bound.install = install.clone();
        all.push(bound);
    }
    all
}
