//! The two ends of a wire: bound under one scale, or neither, and run once together through their chain.
//!
//! Owns what binding on a wire changes about a form, and the smoke of a pair. Which pairs there are is [`crate::wires`], what
//! runs them [`crate::chain`], whether they stay is judged.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::Tensor;
use structures_graph::session::Install;
use structures_plugin_api::describe::{FormDecl, StatisticDecl};
use structures_seams::LocatedSpan;

use super::{failed, present, Bench, Bound, Loaded, NotBound, Place};
use crate::chain::{Chain, End, Half, Linked};
use crate::error::Error;
use crate::gates::{cosine, worse};
use crate::receipt::{SeatNote, SeatWire};
use crate::seat::{CallFailure, Seat};
use crate::sites::Site;
use crate::station::DEVICE_LOST;
use crate::trial::{NamedWeight, Trial};
use crate::wires::{Edge, PAIR_SMOKE};

/// One end of a wire, as its form is bound.
#[derive(Clone, Debug, PartialEq)]
pub struct WireBind {
    /// Name of the port.
    pub port: String,
    /// Whether it is an output.
    pub emits: bool,
    /// Format.
    pub format: String,
    /// What both ends take their scale from: the consumer's calibrated input.
    pub amax: f32,
}

impl WireBind {
    /// Which operand or result of the form this end is.
    pub(super) fn end(&self, inputs: &[String], outputs: &[String]) -> Option<End> {
        let at = |names: &[String]| names.iter().position(|n| *n == self.port);
        match self.emits {
            true => at(outputs).map(End::Emits),
            false => at(inputs).map(End::Accepts),
        }
    }
}

/// What a wired pair became.
pub struct BoundPair {
    /// Producer and consumer; both carry the one install.
    pub halves: [Bound; 2],
    /// Smallest cosine of the consumer's outputs against both references, unquantised.
    pub smoke: f64,
}

/// Cosine that a wired pair must reach on what the host really feeds it.
pub const SMOKE: f64 = 0.98;

/// What the edges of codes may cost an emitting form at bind parity.
const WIRE_TOLERANCE: f64 = 1e-2;

impl Bench<'_> {
    /// Binds both ends of a wire under one scale, or neither, and runs the pair once.
    pub fn bind_pair(
        &self,
        edge: &Edge,
        format: &str,
        [from, to]: [&Place<'_>; 2],
        amax: f32,
    ) -> Result<BoundPair, NotBound> {
        let end = |emits: bool, port: &str| WireBind {
            port: port.into(),
            emits,
            format: format.into(),
            amax,
        };
        let sends = end(true, &edge.producer.port);
        let takes = end(false, &edge.consumer.port);
        let a = self.make(from, Some(&sends))?;
        let b = self.make(to, Some(&takes))?;
        let (span_a, span_b) = (from.located(), to.located());
        let port_a = present(&span_a.outputs).position(|(n, _)| n == sends.port);
        let port_b = span_b.inputs.iter().position(|(n, _)| *n == takes.port);
        let (Some(port_a), Some(port_b)) = (port_a, port_b) else {
            let reason = format!("no port `{}` or `{}` here", sends.port, takes.port);
            return Err(to.refusal("wires", "wire_format", reason, false));
        };
        let name = format!("chain:{}+{}", from.site.id(), to.site.id());
        let rows = a.note.row_capacity.min(b.note.row_capacity);
        let trials = [(a.trial(from), &a.weights), (b.trial(to), &b.weights)];
        let (form_a, form_b) = (a.executable.clone(), b.executable.clone());
        let seats = [
            self.seat(from, Box::new(Linked), a.admission.clone(), None),
            self.seat(to, Box::new(Linked), b.admission.clone(), None),
        ];
        let observed = from.rows.iter().chain(to.rows).copied().max().unwrap_or(1);
        let half = |seat: &Arc<Seat>, form: Arc<Loaded>, port| Half {
            seat: seat.clone(),
            form,
            port,
        };
        let chain = Chain::new(
            name.clone(),
            half(&seats[0], form_a, port_a),
            half(&seats[1], form_b, port_b),
            observed as usize,
        );
        let ports = [sends.port.as_str(), takes.port.as_str()];
        let smoke = held(&chain, &trials, rows, ports, [from, to])?;
        let install = linked(edge, [span_a, span_b], [port_a, port_b], name, chain);
        let [seat_a, seat_b] = seats;
        let bound =
            |seat, mut note: SeatNote, end: WireBind, peer: &Site<'_>, bytes: (u64, u64)| {
                note.wire = Some(SeatWire {
                    port: end.port,
                    emits: end.emits,
                    format: end.format,
                    amax,
                    peer: peer.id(),
                    rows: observed,
                });
                Bound {
                    seat,
                    install: install.clone(),
                    note,
                    packed_bytes: bytes.0,
                    scratch_bytes: bytes.1,
                    table: None,
                }
            };
        Ok(BoundPair {
            halves: [
                bound(
                    seat_a,
                    a.note,
                    sends,
                    to.site,
                    (a.packed_bytes, a.scratch_bytes),
                ),
                bound(
                    seat_b,
                    b.note,
                    takes,
                    from.site,
                    (b.packed_bytes, b.scratch_bytes),
                ),
            ],
            smoke,
        })
    }
}

/// One install for both spans and the views between them. What only the wire carries is no operand and no result.
fn linked(
    edge: &Edge,
    [from, to]: [&LocatedSpan; 2],
    [out, into]: [usize; 2],
    name: String,
    chain: Chain,
) -> Install {
    let mut ops = from.ops.clone();
    ops.extend(&edge.views);
    ops.extend(&to.ops);
    let rest = to.inputs.iter().enumerate().filter(|(i, _)| *i != into);
    let sides = present(&from.outputs)
        .enumerate()
        .filter(|(i, _)| *i != out);
    Install {
        name,
        ops,
        inputs: from
            .inputs
            .iter()
            .map(|(_, v)| *v)
            .chain(rest.map(|(_, (_, v))| *v))
            .collect(),
        outputs: sides
            .map(|(_, (_, v))| v)
            .chain(present(&to.outputs).map(|(_, v)| v))
            .collect(),
        runner: Arc::new(chain),
    }
}

/// The cosine of [`smoke`] where it holds; a pair that does not is refused at the end that is to blame.
fn held(
    chain: &Chain,
    trials: &[(Trial<'_>, &Vec<NamedWeight>); 2],
    rows: usize,
    ports: [&str; 2],
    [from, to]: [&Place<'_>; 2],
) -> Result<f64, NotBound> {
    let failed = |e: Error| to.refusal("wires", &e.code(), e.to_string(), false);
    match smoke(chain, trials, rows, ports).map_err(failed)? {
        Ok(cosine) if cosine >= SMOKE => Ok(cosine),
        Ok(cosine) => {
            let reason =
                format!("the pair reaches cosine {cosine:.6} at {rows} rows, {SMOKE} is needed");
            to.refuse("wires", PAIR_SMOKE, reason, false)
        }
        Err((end, failure)) => {
            let at = [from, to][end.min(1)];
            let reason = format!("{}: {}", failure.code, failure.message);
            Err(NotBound {
                machine: failure.code == DEVICE_LOST,
                ..at.refusal("wires", PAIR_SMOKE, reason, !failure.declined)
            })
        }
    }
}

/// A form's declaration as it is on the wire: the port is rounded through E4M3.
pub(super) fn on_wire(form: &FormDecl, wire: &WireBind) -> FormDecl {
    let mut on = form.clone();
    if wire.emits {
        // What it sends is the one thing it rounds.
        on.statistics.clear();
        on.tolerance = on.tolerance.max(WIRE_TOLERANCE);
    }
    if wire.emits || on.activation_format == "none" {
        on.activation_format = "e4m3".into();
    }
    if on.statistics.iter().all(|s| s.point != wire.port) {
        on.statistics.push(StatisticDecl {
            point: wire.port.clone(),
            statistic: "amax".into(),
            granularity: "tensor".into(),
        });
    }
    on
}

/// Runs a pair through its wire on what the host feeds it: the smallest cosine of the consumer's outputs against both
/// references one after the other, neither quantised. The inner error is the form's.
fn smoke(
    chain: &Chain,
    [from, to]: &[(Trial<'_>, &Vec<NamedWeight>); 2],
    rows: usize,
    [out, into]: [&str; 2],
) -> Result<Result<f64, (usize, CallFailure)>, Error> {
    let fed = crate::trial::take_rows(&from.0.inputs, &from.0.row_axes, rows)?;
    let mut rest = crate::trial::take_rows(&to.0.inputs, &to.0.row_axes, rows)?;
    let others = rest.iter().filter(|(n, _)| n != into);
    let inputs: Vec<Option<Tensor>> = fed.iter().chain(others).map(|(_, t)| t.clone()).collect();
    let got = match chain.serve(&inputs)? {
        Ok(got) => got,
        Err(failure) => return Ok(Err(failure)),
    };
    let plain = FormDecl::new(&from.0.spec.name, "reference", "none");
    let exact = |weights: &[NamedWeight]| -> Vec<(String, Tensor)> {
        weights
            .iter()
            .map(|w| (w.name.clone(), w.tensor.clone()))
            .collect()
    };
    let none = BTreeMap::new();
    let made = from.0.reference(&exact(from.1), &fed, &plain, &none)?;
    for (name, value) in rest.iter_mut().filter(|(n, _)| n == into) {
        let sent = made.iter().find(|(n, _)| n == out).map(|(_, t)| t);
        let sent = sent.ok_or_else(|| {
            Error::invalid(
                "point_unplaced",
                format!("the reference makes no `{out}` for `{name}`"),
            )
        })?;
        let like = value.as_ref().map_or(sent.dims(), |t| t.dims()).to_vec();
        *value = Some(sent.reshape(like).map_err(failed)?);
    }
    let want = to.0.reference(&exact(to.1), &rest, &plain, &none)?;
    let skipped = got.len().saturating_sub(want.len());
    let mut worst = 1.0_f64;
    for ((_, want), got) in want.iter().zip(&got[skipped..]) {
        let flat = |t: &Tensor| {
            t.flatten_all()
                .and_then(|t| t.to_vec1::<f32>())
                .map_err(failed)
        };
        worst = worse(worst, cosine(&flat(got)?, &flat(want)?));
    }
    Ok(Ok(worst))
}
