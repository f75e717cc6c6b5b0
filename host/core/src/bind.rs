//! Binding one form at one site: weights as views, statistics, params, contract, then bind parity.
//!
//! Bind parity runs the form once at the shapes it will serve, on what the host really feeds it there, and compares
//! with the structure's reference on the same weights rounded through the form's declared format. Parity of a whole
//! model cannot see a form that is a little wrong; this can.
//!
//! This file owns what a bound form is and how it becomes a seat of a plan. What a form is asked is `draft.rs`, what it
//! answered `make.rs`; `again.rs`, `pair.rs` and `table.rs` are the other ways to a seat. Which form is bound where, and
//! whether it stays, is decided by [`crate::attach`].

mod again;
mod draft;
mod loaded;
mod make;
mod pair;
mod table;
mod weights;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::Tensor;
use structures_graph::session::{Install, Session};
use structures_graph::{AttrValue, ValueId};
use structures_loader::{Plugin, PluginError, StatusKind};
use structures_seams::LocatedSpan;

use crate::adopt::Blocks;
use crate::choose::{median_rows, variant_of, Choice};
use crate::error::Error;
use crate::kept::Shelf;
use crate::receipt::{RefusalNote, SeatNote};
use crate::seat::{Admission, Elsewhere, Executable, OnGuardFail, Seat};
use crate::sites::Site;
use crate::station::{length_port, Stationed};
use crate::stats::Calibration;
use crate::steps::{self, BrokerNote, Seated, StepTable};
use make::Made;

pub use pair::{BoundPair, WireBind, SMOKE};

pub(crate) use draft::bind_form;
use draft::crashed;
pub(crate) use loaded::{Loaded, MOST};

/// A form in a seat, ready to be put in a plan.
#[derive(Clone)]
pub struct Bound {
    /// The seat.
    pub seat: Arc<Seat>,
    /// How a plan hands the span to it.
    pub install: Install,
    /// How to bind it again.
    pub note: SeatNote,
    /// Bytes of packed weights.
    pub packed_bytes: u64,
    /// Bytes of scratch.
    pub scratch_bytes: u64,
    /// The table behind it, where it is one.
    pub table: Option<Arc<StepTable>>,
}

/// Lets the tables among these seats that read one stream share one resolution of the step.
pub fn brokers<'b>(bounds: impl IntoIterator<Item = &'b Bound>) -> Vec<BrokerNote> {
    let seated = |b: &'b Bound| {
        Some(Seated {
            structure: &b.note.structure,
            key: &b.note.key,
            variant: &b.note.variant,
            // The host runs its graph in this order.
            order: b.install.ops.iter().map(|op| op.0).min().unwrap_or(0),
            table: b.table.as_ref()?,
        })
    };
    let tables: Vec<Seated<'_>> = bounds.into_iter().filter_map(seated).collect();
    steps::brokers(&tables)
}

/// The installs of seats; the two seats of a wired pair share one.
pub fn installs<'b>(bounds: impl IntoIterator<Item = &'b Bound>) -> Vec<Install> {
    let mut found: Vec<Install> = Vec::new();
    for bound in bounds {
        if !found.iter().any(|i| i.name == bound.install.name) {
            found.push(bound.install.clone());
        }
    }
    found
}

/// Why a site got no form.
pub struct NotBound {
    /// Code, reason, plugin, form.
    pub note: RefusalNote,
    /// The form computed wrong or crashed: it is not trusted at any other site either.
    pub distrust: bool,
    /// The plugin said no to what it declares, or its device went: what stands against it is the machine.
    pub machine: bool,
}

impl From<RefusalNote> for NotBound {
    fn from(note: RefusalNote) -> Self {
        NotBound {
            note,
            distrust: false,
            machine: false,
        }
    }
}

/// Everything binding needs beside the site and the choice.
pub struct Bench<'a> {
    /// The host's weights.
    pub session: &'a Session,
    /// Reduced statistics, by `key|point`.
    pub calibration: &'a Calibration,
    /// What the host feeds span inputs, `[B, T, ..]`, for bind parity.
    pub contents: &'a HashMap<ValueId, Tensor>,
    /// What a contract miss does.
    pub on_guard_fail: OnGuardFail,
    /// Parameters of the scheme's route, for the form.
    pub scheme: &'a BTreeMap<String, serde_json::Value>,
    /// Slots handed over as the packed rows they are stored in; none but when adopting.
    pub blocks: &'a Blocks,
    /// Where packed weights are kept for the next start; none but when replaying.
    pub shelf: Option<&'a Shelf>,
}

/// A form at its place, on the wire or not.
pub struct Place<'a> {
    /// The site.
    pub site: &'a Site<'a>,
    /// Index of the span.
    pub span: usize,
    /// The form.
    pub choice: &'a Choice<'a>,
    /// Its plugin.
    pub plugin: &'a Plugin,
    /// Rows observed at the span's input under the workload, ascending.
    pub rows: &'a [u64],
    /// Parameters of the scheme's route, for the form.
    pub scheme: &'a BTreeMap<String, serde_json::Value>,
}

impl<'a> Place<'a> {
    fn located(&self) -> &'a LocatedSpan {
        &self.site.spans[self.span]
    }

    fn refusal(&self, stage: &str, code: &str, reason: String, distrust: bool) -> NotBound {
        refusal(self.site, self.choice, stage, code, reason, distrust)
    }

    fn refuse<T>(
        &self,
        stage: &str,
        code: &str,
        reason: String,
        distrust: bool,
    ) -> Result<T, NotBound> {
        Err(self.refusal(stage, code, reason, distrust))
    }

    /// The plugin's own no.
    fn answered(&self, stage: &str, e: PluginError) -> NotBound {
        NotBound {
            machine: e.kind != StatusKind::Invalid,
            ..self.refusal(stage, &e.code, e.message, crashed(e.kind))
        }
    }
}

impl Bench<'_> {
    /// Probes, binds and checks. `rows` are those observed at the span's input under the workload.
    pub fn bind(
        &self,
        site: &Site<'_>,
        span_index: usize,
        choice: &Choice<'_>,
        plugin: &Plugin,
        rows: &[u64],
    ) -> Result<Bound, NotBound> {
        let place = self.place(site, span_index, choice, plugin, rows);
        let made = self.make(&place, None)?;
        Ok(self.seated(&place, made))
    }

    fn place<'p>(
        &'p self,
        site: &'p Site<'p>,
        span: usize,
        choice: &'p Choice<'p>,
        plugin: &'p Plugin,
        rows: &'p [u64],
    ) -> Place<'p> {
        Place {
            site,
            span,
            choice,
            plugin,
            rows,
            scheme: self.scheme,
        }
    }

    fn seated(&self, place: &Place<'_>, made: Made) -> Bound {
        let Made {
            executable,
            admission,
            packed_bytes,
            scratch_bytes,
            note,
            ..
        } = made;
        let span = place.located();
        let names = span.inputs.iter().map(|(n, v)| (n.as_str(), v.is_some()));
        let length = length_port(names);
        let records = place.choice.form.capture;
        let away = executable
            .station()
            .map(|station| Stationed::at(executable.clone(), station.clone(), length, records));
        let seat = self.seat(place, Box::new(executable), admission, away);
        Bound {
            install: Install {
                name: place.site.id(),
                ops: span.ops.clone(),
                inputs: span.inputs.iter().map(|(_, v)| *v).collect(),
                outputs: present(&span.outputs).map(|(_, v)| v).collect(),
                runner: seat.clone(),
            },
            seat,
            note,
            packed_bytes,
            scratch_bytes,
            table: None,
        }
    }

    fn seat(
        &self,
        place: &Place<'_>,
        form: Box<dyn Executable>,
        admission: Admission,
        away: Option<Arc<dyn Elsewhere>>,
    ) -> Arc<Seat> {
        let graph = self.session.graph();
        let dims_of = |v: ValueId| graph.value(v).dims.clone();
        let span = place.located();
        Seat::at(
            away,
            place.site.seam.key.clone(),
            form,
            admission,
            self.on_guard_fail,
            span.inputs.iter().map(|(_, v)| v.map(dims_of)).collect(),
            present(&span.outputs).map(|(_, v)| dims_of(v)).collect(),
        )
    }
}

fn refusal(
    site: &Site<'_>,
    choice: &Choice<'_>,
    stage: &str,
    code: &str,
    reason: String,
    distrust: bool,
) -> NotBound {
    NotBound {
        note: RefusalNote {
            path: site.seam.path.clone(),
            structure: site.spec.name.clone(),
            stage: stage.into(),
            code: code.into(),
            reason,
            plugin: Some(choice.plugin.into()),
            form: Some(choice.form.name.clone()),
        },
        distrust,
        machine: false,
    }
}

/// What is noted of every seat; the rest is for what was bound there to fill in.
fn seat_note(
    site: &Site<'_>,
    span_index: usize,
    choice: &Choice<'_>,
    rows: &[u64],
    capacity: usize,
) -> SeatNote {
    let span = &site.spans[span_index];
    SeatNote {
        key: site.seam.key.clone(),
        path: site.seam.path.clone(),
        structure: site.spec.name.clone(),
        version: site.spec.version,
        span: span.name.clone(),
        plugin: choice.plugin.into(),
        form: choice.form.name.clone(),
        format: choice.form.format.clone(),
        activation_format: choice.form.activation_format.clone(),
        variant: variant_of(site, span_index),
        params: span
            .params
            .iter()
            .map(|(k, v)| (k.clone(), json(v)))
            .collect(),
        dims: span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect(),
        statistics: BTreeMap::new(),
        scheme: BTreeMap::new(),
        packed: BTreeMap::new(),
        row_capacity: capacity,
        median_rows: median_rows(rows),
        note: site.notes.clone(),
        wire: None,
        device: None,
    }
}

pub(crate) fn failed(e: candle_core::Error) -> Error {
    Error::Graph(structures_graph::GraphError::Kernel {
        op: "bind".into(),
        at: "weights".into(),
        source: Box::new(e),
    })
}

fn present(list: &[(String, Option<ValueId>)]) -> impl Iterator<Item = (&str, ValueId)> {
    list.iter().filter_map(|(n, v)| v.map(|v| (n.as_str(), v)))
}

fn json(v: &AttrValue) -> serde_json::Value {
    serde_json::to_value(v).unwrap_or(serde_json::Value::Null)
}
