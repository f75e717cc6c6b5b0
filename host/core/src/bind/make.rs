//! A form bound at its place and compared with its reference there, by itself or as one end of a wire.
//!
//! Owns bind parity's inputs and what is known of a form that held. The comparison is [`crate::trial`], what was asked of the
//! plugin `draft.rs`, seats are the parent's.

use std::sync::Arc;

use candle_core::Tensor;
use structures_graph::{Dim, ValueId};
use structures_plugin_api::abi;
use structures_plugin_api::formats::{fp8_scale, Balance};
use structures_seams::LocatedSpan;

use super::draft::Draft;
use super::pair::on_wire;
use super::{present, seat_note, Bench, Loaded, NotBound, Place, WireBind};
use crate::chain::Decoded;
use crate::error::Error;
use crate::receipt::SeatNote;
use crate::seat::{Admission, Rows};
use crate::sites::Site;
use crate::station::DEVICE_LOST;
use crate::trial::{NamedWeight, Trial};

/// A form that was bound and compared with its reference.
pub(super) struct Made {
    pub(super) inputs: Vec<(String, Option<Tensor>)>,
    pub(super) row_axes: Vec<Option<usize>>,
    pub(super) executable: Arc<Loaded>,
    pub(super) weights: Vec<NamedWeight>,
    pub(super) admission: Admission,
    pub(super) packed_bytes: u64,
    pub(super) scratch_bytes: u64,
    pub(super) note: SeatNote,
}

impl Made {
    /// The trial of this form at its place, again.
    pub(super) fn trial<'t>(&'t self, place: &Place<'t>) -> Trial<'t> {
        let span = place.located();
        Trial {
            spec: place.site.spec,
            span: &span.name,
            variant: &self.note.variant,
            params: &span.params,
            inputs: self.inputs.clone(),
            row_axes: self.row_axes.clone(),
            outputs: present(&span.outputs).map(|(n, _)| n.to_string()).collect(),
            balance: Balance::default(),
        }
    }
}

impl Bench<'_> {
    /// Probes, binds and checks a form, on the wire where there is one.
    pub(super) fn make(
        &self,
        place: &Place<'_>,
        wire: Option<&WireBind>,
    ) -> Result<Made, NotBound> {
        let Place {
            site,
            choice,
            plugin,
            ..
        } = *place;
        let (span, form) = (place.located(), choice.form);
        let mut draft = self.draft(place, wire)?;
        let weights = match self.weights(site.spec, span) {
            Ok(w) => w,
            Err(e) => return place.refuse("bind", &e.code(), e.to_string(), false),
        };
        let shelved = match wire {
            None => self.shelved(place, &draft),
            Some(_) => None,
        };
        if let Some((shelf, name)) = shelved.as_ref().filter(|_| form.keeps_packed) {
            draft.params.kept = shelf.kept(name, false);
        }
        let bound = self.bind_draft(place, &draft, &weights);
        draft.params.kept = None;
        let Draft {
            capacity,
            ref statistics,
            ref params,
            ref balance,
            ..
        } = draft;
        let bound = match bound {
            Ok(Ok(b)) => b,
            Ok(Err(e)) => return Err(place.answered("bind", e)),
            Err(e) => return place.refuse("bind", &e.code(), e.to_string(), false),
        };
        let facts = bound.facts();
        let executable = match Loaded::new(bound, plugin, choice.device) {
            Ok(loaded) => Arc::new(loaded),
            Err(e) => return Err(place.answered("bind", e)),
        };
        let inputs = match self.inputs(site, span) {
            Ok(i) => i,
            Err(e) => return place.refuse("bind", &e.code(), e.to_string(), false),
        };
        let trial = Trial {
            spec: site.spec,
            span: &span.name,
            variant: &params.variant,
            params: &span.params,
            inputs,
            row_axes: self.row_axes(span),
            outputs: present(&span.outputs).map(|(n, _)| n.to_string()).collect(),
            balance: *balance,
        };
        let checked = match wire {
            None => trial.run(form, &*executable, &weights, statistics, capacity),
            Some(wire) => {
                let Some(end) = wire.end(&params.inputs, &trial.outputs) else {
                    let reason = format!("the span has no port `{}`", wire.port);
                    return place.refuse("wires", "wire_format", reason, false);
                };
                let decoded = Decoded {
                    form: &*executable,
                    end,
                    scale: fp8_scale(wire.amax),
                };
                trial.run(
                    &on_wire(form, wire),
                    &decoded,
                    &weights,
                    statistics,
                    capacity,
                )
            }
        };
        match checked {
            Ok(Ok(witness)) => {
                if let Some((shelf, name)) = shelved {
                    shelf.keep(&name, &witness);
                }
            }
            Ok(Err((code, reason))) => {
                return Err(NotBound {
                    machine: reason.starts_with(DEVICE_LOST),
                    ..place.refusal("bind", code, reason, true)
                });
            }
            Err(e) => return place.refuse("bind", &e.code(), e.to_string(), false),
        }
        let Trial {
            inputs, row_axes, ..
        } = trial;
        Ok(self.made(place, draft, executable, facts, inputs, row_axes, weights))
    }

    #[allow(clippy::too_many_arguments)] // what a form turned out to be, part by part
    pub(super) fn made(
        &self,
        place: &Place<'_>,
        draft: Draft,
        executable: Arc<Loaded>,
        facts: abi::FormFacts,
        inputs: Vec<(String, Option<Tensor>)>,
        row_axes: Vec<Option<usize>>,
        weights: Vec<NamedWeight>,
    ) -> Made {
        let Place {
            site, choice, rows, ..
        } = *place;
        let (span, form) = (place.located(), choice.form);
        let Draft {
            capacity,
            band,
            statistics,
            params,
            ..
        } = draft;
        let graph = self.session.graph();
        let width = span
            .inputs
            .iter()
            .find_map(|(_, v)| *v)
            .and_then(|v| match graph.value(v).dims.last() {
                Some(Dim::Size(n)) => Some(*n),
                _ => None,
            })
            .unwrap_or(0);
        let device = executable.station().map(|s| s.note().clone());
        Made {
            inputs,
            row_axes,
            executable,
            weights,
            admission: Admission {
                width,
                rows: Rows::Capacity(capacity as usize),
                band: band.map(|[lo, hi]| (lo as usize, hi as usize)),
                concurrent: form.concurrent,
                strided: form.strided,
            },
            note: SeatNote {
                statistics,
                scheme: params.scheme,
                packed: params
                    .packed
                    .iter()
                    .map(|(slot, p)| (slot.clone(), p.format.name().to_string()))
                    .collect(),
                device,
                ..seat_note(site, place.span, choice, rows, capacity as usize)
            },
            packed_bytes: facts.packed_bytes,
            scratch_bytes: facts.scratch_bytes,
        }
    }

    /// Where the rows of each input lie: the symbol nearest to the first input's channels, in every input that has it.
    pub(super) fn row_axes(&self, span: &LocatedSpan) -> Vec<Option<usize>> {
        let graph = self.session.graph();
        let dims = |v: &Option<ValueId>| v.map(|v| graph.value(v).dims.as_slice()).unwrap_or(&[]);
        let first = span.inputs.iter().find(|(_, v)| v.is_some());
        let rows = first.and_then(|(_, v)| {
            let channels = dims(v).split_last().map_or(&[][..], |(_, lead)| lead);
            channels.iter().rev().find(|d| matches!(d, Dim::Symbol(_)))
        });
        span.inputs
            .iter()
            .map(|(_, v)| rows.and_then(|rows| dims(v).iter().position(|d| d == rows)))
            .collect()
    }

    /// What the host feeds the span.
    fn inputs(
        &self,
        site: &Site<'_>,
        span: &LocatedSpan,
    ) -> Result<Vec<(String, Option<Tensor>)>, Error> {
        span.inputs
            .iter()
            .map(|(name, value)| match value {
                None => Ok((name.clone(), None)),
                Some(v) => match self.contents.get(v) {
                    Some(t) => Ok((name.clone(), Some(t.clone()))),
                    None => Err(Error::invalid(
                        "producer_input_unobserved",
                        format!("`{}`: the host never made input `{name}`", site.seam.path),
                    )),
                },
            })
            .collect()
    }
}
