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
use std::sync::Arc;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use structures_graph::session::{Install, SpanOutcome, SpanRunner};
use structures_graph::{GraphError, ValueId};

use crate::bind::Bound;
use crate::seat::{OnGuardFail, Seat};

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
        if !self.live() {
            return Ok(SpanOutcome::Host);
        }
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
}

impl Joined {
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
        let rows = inputs.iter().flatten().next().map_or(0, |x| {
            x.elem_count() / x.dims().last().copied().unwrap_or(1).max(1)
        });
        // Planned for one is planned for all of them: nothing is begun that another part would not finish.
        if self.seats.iter().any(|s| s.out_of_band(rows)) {
            self.seats.iter().for_each(|s| s.ledger.dispatched());
            return Ok(SpanOutcome::Host);
        }
        self.link.run(|| self.serve(inputs))
    }

    fn host_serves(&self, rows: usize) -> bool {
        !self.link.live() || self.parts.iter().any(|p| p.runner.host_serves(rows))
    }

    fn host_gone(&self) {
        self.parts.iter().for_each(|p| p.runner.host_gone());
    }
}

/// Composes: `first` under the link, and `before`, the two ends of a wire, `after` as one install. What comes back are
/// all of them, in this order.
pub fn join(
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
