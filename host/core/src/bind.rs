//! Binding one form at one site: weights as views, statistics, params, contract, then bind parity.
//!
//! Bind parity runs the form once at the shapes it will serve, on what the host really feeds it there, and compares
//! with the structure's reference on the same weights rounded through the form's declared format. Parity of a whole
//! model cannot see a form that is a little wrong; this can.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use structures_catalog::spec::{ConstFill, DimExpr, Slot};
use structures_catalog::Spec;
use structures_graph::session::{Install, Session, ViewMut};
use structures_graph::{AttrValue, Dim, ValueId};
use structures_loader::{
    row_capacity, BindSpec, BoundForm, HostTensor, HostTensorMut, LoaderError, Plugin, PluginError,
    Staged, StatusKind,
};
use structures_plugin_api::abi;
use structures_plugin_api::describe::{
    BindParams, FormDecl, PackedSlot, ProbeShapes, StatisticDecl,
};
use structures_plugin_api::formats::{fp8_scale, Balance};
use structures_seams::{LocatedSpan, SlotWeight};

use crate::adopt::Blocks;
use crate::chain::{Chain, Decoded, End, Half, Linked, Port, PortMut, WiredForm};
use crate::choose::{median_rows, variant_of, Choice};
use crate::error::Error;
use crate::gates::{cosine, worse};
use crate::kept::Shelf;
use crate::receipt::{RefusalNote, SeatNote, SeatWire};
use crate::seat::{Admission, CallFailure, Elsewhere, Executable, OnGuardFail, Rows, Seat, View};
use crate::sites::Site;
use crate::station::{Station, Stationed};
use crate::stats::{Calibration, Content, Statistic};
use crate::steps::{self, BrokerNote, Locator, Seated, StepTable};
use crate::trial::{repeats, NamedWeight, Trial};
use crate::wires::{Edge, PAIR_SMOKE};

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

/// Elements of a stored matrix worth not reading: below, a name costs more than it.
const LARGE: usize = 1 << 16;

/// What a form is bound with.
struct Draft {
    capacity: u64,
    band: Option<[u64; 2]>,
    statistics: BTreeMap<String, Vec<f32>>,
    params: BindParams,
    balance: Balance,
}

/// A form that was bound and compared with its reference.
struct Made {
    inputs: Vec<(String, Option<Tensor>)>,
    row_axes: Vec<Option<usize>>,
    executable: Arc<Loaded>,
    weights: Vec<NamedWeight>,
    admission: Admission,
    packed_bytes: u64,
    scratch_bytes: u64,
    note: SeatNote,
}

impl Made {
    /// The trial of this form at its place, again.
    fn trial<'t>(&'t self, place: &Place<'t>) -> Trial<'t> {
        let span = &place.site.spans[place.span];
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
    /// Probes, binds and checks. `rows` are those observed at the span's input under the workload.
    pub fn bind(
        &self,
        site: &Site<'_>,
        span_index: usize,
        choice: &Choice<'_>,
        plugin: &Plugin,
        rows: &[u64],
    ) -> Result<Bound, NotBound> {
        let place = Place {
            site,
            span: span_index,
            choice,
            plugin,
            rows,
            scheme: self.scheme,
        };
        let made = self.make(&place, None)?;
        Ok(self.seated(&place, made))
    }

    /// Binds again what held before, from what is kept of it, without a matrix of the host's: `None` where nothing is
    /// kept, or what is kept does not answer as then.
    pub fn again(
        &self,
        site: &Site<'_>,
        span_index: usize,
        choice: &Choice<'_>,
        plugin: &Plugin,
        rows: &[u64],
    ) -> Option<Bound> {
        let place = Place {
            site,
            span: span_index,
            choice,
            plugin,
            rows,
            scheme: self.scheme,
        };
        let made = self.remake(&place)?;
        Some(self.seated(&place, made))
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
        let site = place.site;
        let span = &site.spans[place.span];
        let away = executable
            .station()
            .map(|station| Stationed::at(executable.clone(), station.clone()));
        let seat = self.seat(place, Box::new(executable), admission, away);
        Bound {
            install: Install {
                name: site.id(),
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

    /// A table of the host's own outputs, one row for each conditioning that was observed.
    pub fn bind_table(
        &self,
        site: &Site<'_>,
        span_index: usize,
        choice: &Choice<'_>,
        rows: &[u64],
    ) -> Result<Bound, NotBound> {
        let span = &site.spans[span_index];
        let refuse = |code: &str, reason: String| {
            Err(NotBound {
                note: RefusalNote {
                    path: site.seam.path.clone(),
                    structure: site.spec.name.clone(),
                    stage: "bind".into(),
                    code: code.into(),
                    reason,
                    plugin: Some(choice.plugin.into()),
                    form: Some(choice.form.name.clone()),
                },
                distrust: false,
            })
        };
        let outputs: Vec<(&str, ValueId)> = present(&span.outputs).collect();
        let (Some(declared), [(point, Some(cond))], [(_, output)]) = (
            steps::declared(site.spec),
            span.inputs.as_slice(),
            outputs.as_slice(),
        ) else {
            let reason = format!("span `{}` is no function of one conditioning", span.name);
            return refuse("not_step_quantised", reason);
        };
        let graph = self.session.graph();
        let width = match graph.value(*cond).dims.last() {
            Some(Dim::Size(n)) => *n,
            _ => 0,
        };
        let key = site.point_key(point);
        let seen = self.calibration.contents.get(&key).map(Content::values);
        let made = steps::distinct(&seen.unwrap_or_default(), width, &key, declared.max_steps)
            .and_then(|rows| Locator::new(rows, declared.margin, &key));
        let locator = match made {
            Ok(locator) => Arc::new(locator),
            Err(no) => return refuse(no.code, no.reason),
        };
        let piece = match self.session.piece(&span.ops) {
            Ok(piece) => piece,
            Err(e) => return refuse("not_step_quantised", e.to_string()),
        };
        let mut table = Vec::new();
        for row in locator.rows() {
            let dims: Vec<usize> = graph
                .value(*cond)
                .dims
                .iter()
                .map(|d| match d {
                    Dim::Size(n) => *n,
                    Dim::Symbol(_) => 1,
                })
                .collect();
            let made = Tensor::from_slice(row, dims, &Device::Cpu)
                .map_err(failed)
                .and_then(|t| Ok(piece.run(&[(*cond, t)], &[*output])?))
                .and_then(|made| {
                    let flat = made[0].flatten_all().and_then(|t| t.to_vec1::<f32>());
                    flat.map_err(failed)
                });
            match made {
                Ok(made) => table.extend(made),
                Err(e) => return refuse(&e.code(), e.to_string()),
            }
        }
        let statistics = BTreeMap::from([(
            format!("{point}|content|tensor"),
            locator.rows().iter().flatten().copied().collect(),
        )]);
        let table = StepTable::new(locator, table);
        let capacity = rows.iter().copied().max().unwrap_or(1) as usize;
        let dims_of = |v: ValueId| graph.value(v).dims.clone();
        let seat = Seat::new(
            site.seam.key.clone(),
            Box::new(table.clone()),
            Admission {
                width,
                rows: Rows::Capacity(capacity),
                band: None,
                concurrent: choice.form.concurrent,
                strided: false,
            },
            self.on_guard_fail,
            vec![Some(dims_of(*cond))],
            vec![dims_of(*output)],
        );
        Ok(Bound {
            install: Install {
                name: site.id(),
                ops: span.ops.clone(),
                inputs: vec![Some(*cond)],
                outputs: vec![*output],
                runner: seat.clone(),
            },
            seat,
            note: SeatNote {
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
                statistics,
                scheme: BTreeMap::new(),
                packed: BTreeMap::new(),
                row_capacity: capacity,
                median_rows: median_rows(rows),
                note: site.notes.clone(),
                wire: None,
                device: None,
            },
            packed_bytes: table.bytes(),
            scratch_bytes: 0,
            table: Some(table),
        })
    }

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
        let (span_a, span_b) = (&from.site.spans[from.span], &to.site.spans[to.span]);
        let outputs_a: Vec<(&str, ValueId)> = present(&span_a.outputs).collect();
        let port_a = outputs_a.iter().position(|(n, _)| *n == sends.port);
        let port_b = span_b.inputs.iter().position(|(n, _)| *n == takes.port);
        let (Some(port_a), Some(port_b)) = (port_a, port_b) else {
            let reason = format!("no port `{}` or `{}` here", sends.port, takes.port);
            return Err(refusal(to, "wires", "wire_format", reason, false));
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
        let failed = |e: Error| refusal(to, "wires", &e.code(), e.to_string(), false);
        let ports = [sends.port.as_str(), takes.port.as_str()];
        let smoke = smoke(&chain, &trials, rows, ports);
        let smoke = match smoke.map_err(failed)? {
            Ok(cosine) if cosine >= SMOKE => cosine,
            Ok(cosine) => {
                let reason = format!(
                    "the pair reaches cosine {cosine:.6} at {rows} rows, {SMOKE} is needed"
                );
                return Err(refusal(to, "wires", PAIR_SMOKE, reason, false));
            }
            Err((end, failure)) => {
                let at = [from, to][end.min(1)];
                let reason = format!("{}: {}", failure.code, failure.message);
                return Err(refusal(at, "wires", PAIR_SMOKE, reason, !failure.declined));
            }
        };
        let mut ops = span_a.ops.clone();
        ops.extend(&edge.views);
        ops.extend(&span_b.ops);
        let rest = span_b
            .inputs
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != port_b);
        let sides = outputs_a.iter().enumerate().filter(|(i, _)| *i != port_a);
        let install = Install {
            name,
            ops,
            inputs: span_a
                .inputs
                .iter()
                .map(|(_, v)| *v)
                .chain(rest.map(|(_, (_, v))| *v))
                .collect(),
            outputs: sides
                .map(|(_, (_, v))| *v)
                .chain(present(&span_b.outputs).map(|(_, v)| v))
                .collect(),
            runner: Arc::new(chain),
        };
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

    fn seat(
        &self,
        place: &Place<'_>,
        form: Box<dyn Executable>,
        admission: Admission,
        away: Option<Arc<dyn Elsewhere>>,
    ) -> Arc<Seat> {
        let graph = self.session.graph();
        let dims_of = |v: ValueId| graph.value(v).dims.clone();
        let span = &place.site.spans[place.span];
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

    /// What a form is bound with at its place, once it was probed there.
    fn draft(&self, place: &Place<'_>, wire: Option<&WireBind>) -> Result<Draft, NotBound> {
        let Place {
            site,
            span: span_index,
            choice,
            plugin,
            rows,
            scheme,
        } = *place;
        let form = choice.form;
        let span = &site.spans[span_index];
        let refuse = |stage: &str, code: &str, reason: String, distrust: bool| {
            Err(refusal(place, stage, code, reason, distrust))
        };
        // A form by itself serves all that was seen; a pair is for the rows it mostly sees.
        let observed = match wire {
            None => rows.iter().copied().max().unwrap_or(1),
            Some(_) => median_rows(rows),
        };
        let dims: BTreeMap<String, u64> = span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect();
        // Alternatives of a band settle once the sizes are known; without any the declared rows hold.
        let band = match form.band.any.is_empty() {
            true => form.band.rows,
            false => form.band.rows_at(&dims),
        };
        let capacity = band.map_or(observed, |[_, hi]| match hi {
            u64::MAX => observed,
            hi if wire.is_some() => hi.min(observed),
            hi => hi.min(observed.max(hi)),
        });
        let band = match wire {
            None => band,
            Some(_) => Some([band.map_or(1, |[lo, _]| lo), capacity]),
        };
        let variant = variant_of(site, span_index);
        let shapes = ProbeShapes {
            structure: site.spec.name.clone(),
            span: span.name.clone(),
            rows: vec![capacity],
            dims: span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect(),
            variant: variant.clone(),
        };
        match plugin.probe(&form.name, choice.device, &shapes) {
            Ok(report) if report.probed => {}
            Ok(report) => {
                let code = report.code.unwrap_or_else(|| "entry_missing".into());
                let reason = report
                    .reason
                    .unwrap_or_else(|| "the probe gave no reason".into());
                return refuse("probe", &code, reason, false);
            }
            Err(e) => return refuse("probe", &e.code, e.message, crashed(e.kind)),
        }
        let mut statistics = match self.statistics(site, form) {
            Ok(s) => s,
            Err(reason) => return refuse("bind", "statistic_missing", reason, false),
        };
        if let Some(wire) = wire {
            statistics.insert(format!("{}|amax|tensor", wire.port), vec![wire.amax]);
        }
        let params = BindParams {
            structure: site.spec.name.clone(),
            version: site.spec.version,
            variant: variant.clone(),
            params: span
                .params
                .iter()
                .map(|(k, v)| (k.clone(), json(v)))
                .collect(),
            dims: span.dims.iter().map(|(k, v)| (k.clone(), *v)).collect(),
            inputs: span.inputs.iter().map(|(n, _)| n.clone()).collect(),
            outputs: present(&span.outputs).map(|(n, _)| n.to_string()).collect(),
            states: span.states.iter().map(|(n, _)| n.clone()).collect(),
            scheme: scheme.clone(),
            packed: packed_slots(self.blocks),
            wires: wire
                .iter()
                .map(|w| (w.port.clone(), w.format.clone()))
                .collect(),
            kept: None,
        };
        let balance = match Balance::from_params(|name| scheme.get(name)) {
            Ok(balance) => balance,
            Err(reason) => return refuse("bind", "scheme_invalid", reason, false),
        };
        Ok(Draft {
            capacity,
            band,
            statistics,
            params,
            balance,
        })
    }

    /// Under which name what a draft packs is kept, where it is.
    fn shelved(&self, place: &Place<'_>, draft: &Draft) -> Option<(&Shelf, String)> {
        let shelf = self.shelf.filter(|_| place.choice.device == 0)?;
        let spec = place.site.spec;
        let name = Shelf::name(&(
            (&spec.name, spec.version, &spec.digest),
            (place.plugin.sha256(), place.choice.form),
            &place.site.spans[place.span].weights,
            (&draft.params, &draft.statistics),
        ))?;
        Some((shelf, name))
    }

    /// See [`Bench::again`].
    fn remake(&self, place: &Place<'_>) -> Option<Made> {
        let form = place.choice.form;
        let span = &place.site.spans[place.span];
        let mut draft = self.draft(place, None).ok()?;
        let (shelf, name) = self.shelved(place, &draft)?;
        let witness = shelf.witness(&name)?;
        let large = self.large(span);
        if !large.is_empty() && !form.keeps_packed {
            return None;
        }
        let held = |slot: &String| large.contains(slot);
        let weights = self.weights_without(place.site.spec, span, &held).ok()?;
        if form.keeps_packed {
            draft.params.kept = shelf.kept(&name, true);
        }
        let bound = self.bind_draft(place, &draft, &weights);
        let bound = bound.ok()?.inspect_err(|e| {
            tracing::debug!(seat = %place.site.id(), "not bound from what is kept: {}", e.message);
        });
        let bound = bound.ok()?;
        let facts = bound.facts();
        let executable = Arc::new(Loaded::new(bound, place.plugin, 0).ok()?);
        if !repeats(&*executable, &witness) {
            tracing::warn!(seat = %place.site.id(), "does not answer as it did; bound and compared as at first");
            return None;
        }
        draft.params.kept = None;
        let row_axes = self.row_axes(span);
        Some(self.made(
            place,
            draft,
            executable,
            facts,
            witness.inputs,
            row_axes,
            weights,
        ))
    }

    /// Slots whose stored matrices are worth not reading.
    fn large(&self, span: &LocatedSpan) -> BTreeSet<String> {
        let large = |source: &SlotWeight| {
            let dims = source
                .stored()
                .and_then(|a| self.session.param_dims(&a.param()));
            let size = |d: &Dim| if let Dim::Size(n) = d { *n } else { 1 };
            dims.is_some_and(|d| d.len() > 1 && d.iter().map(size).product::<usize>() >= LARGE)
        };
        let slots = span.weights.iter().filter(|(_, source)| large(source));
        slots.map(|(name, _)| name.clone()).collect()
    }

    fn bind_draft(
        &self,
        place: &Place<'_>,
        draft: &Draft,
        weights: &[NamedWeight],
    ) -> Result<Result<BoundForm, PluginError>, Error> {
        bind_form(
            place.plugin,
            &place.choice.form.name,
            &place.site.spans[place.span].name,
            weights,
            &draft.statistics,
            &draft.params,
            draft.capacity,
            self.blocks,
            place.choice.device,
        )
    }

    /// Probes, binds and checks a form, on the wire where there is one.
    fn make(&self, place: &Place<'_>, wire: Option<&WireBind>) -> Result<Made, NotBound> {
        let Place {
            site,
            span: span_index,
            choice,
            plugin,
            ..
        } = *place;
        let form = choice.form;
        let span = &site.spans[span_index];
        let refuse = |stage: &str, code: &str, reason: String, distrust: bool| {
            Err(refusal(place, stage, code, reason, distrust))
        };
        let mut draft = self.draft(place, wire)?;
        let weights = match self.weights(site.spec, span) {
            Ok(w) => w,
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
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
            Ok(Err(e)) => return refuse("bind", &e.code, e.message, crashed(e.kind)),
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
        };
        let facts = bound.facts();
        let executable = match Loaded::new(bound, plugin, choice.device) {
            Ok(loaded) => Arc::new(loaded),
            Err(e) => return refuse("bind", &e.code, e.message, crashed(e.kind)),
        };
        let inputs = match self.inputs(site, span) {
            Ok(i) => i,
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
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
                let position = match wire.emits {
                    true => trial
                        .outputs
                        .iter()
                        .position(|n| *n == wire.port)
                        .map(End::Emits),
                    false => params
                        .inputs
                        .iter()
                        .position(|n| *n == wire.port)
                        .map(End::Accepts),
                };
                let Some(end) = position else {
                    let reason = format!("the span has no port `{}`", wire.port);
                    return refuse("wires", "wire_format", reason, false);
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
            Ok(Err((code, reason))) => return refuse("bind", code, reason, true),
            Err(e) => return refuse("bind", &e.code(), e.to_string(), false),
        }
        let Trial {
            inputs, row_axes, ..
        } = trial;
        Ok(self.made(place, draft, executable, facts, inputs, row_axes, weights))
    }

    #[allow(clippy::too_many_arguments)] // what a form turned out to be, part by part
    fn made(
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
        let form = choice.form;
        let span = &site.spans[place.span];
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
                key: site.seam.key.clone(),
                path: site.seam.path.clone(),
                structure: site.spec.name.clone(),
                version: site.spec.version,
                span: span.name.clone(),
                plugin: choice.plugin.into(),
                form: form.name.clone(),
                format: form.format.clone(),
                activation_format: form.activation_format.clone(),
                variant: params.variant,
                params: params.params,
                dims: params.dims,
                statistics,
                scheme: params.scheme,
                packed: params
                    .packed
                    .iter()
                    .map(|(slot, p)| (slot.clone(), p.format.name().to_string()))
                    .collect(),
                row_capacity: capacity as usize,
                median_rows: median_rows(rows),
                note: site.notes.clone(),
                wire: None,
                device,
            },
            packed_bytes: facts.packed_bytes,
            scratch_bytes: facts.scratch_bytes,
        }
    }

    fn statistics(
        &self,
        site: &Site<'_>,
        form: &FormDecl,
    ) -> Result<BTreeMap<String, Vec<f32>>, String> {
        let mut found = BTreeMap::new();
        for s in &form.statistics {
            let key = site.point_key(&s.point);
            let values = match Statistic::parse(&s.statistic, &s.granularity) {
                Some(Statistic::AmaxTensor) => self.calibration.amax.get(&key).map(|v| vec![*v]),
                Some(Statistic::AmaxChannel) => self.calibration.channel_amax.get(&key).cloned(),
                Some(Statistic::SecondMomentChannel) => self
                    .calibration
                    .second_moment
                    .get(&key)
                    .map(|v| v.iter().map(|x| *x as f32).collect()),
                Some(Statistic::None) => continue,
                None if s.statistic == "content" => {
                    self.calibration.contents.get(&key).map(Content::values)
                }
                None => None,
            };
            match values {
                Some(v) if v.iter().all(|x| x.is_finite()) => {
                    found.insert(statistic_name(s), v);
                }
                Some(_) => return Err(format!("{} at `{key}` is not finite", s.statistic)),
                None => {
                    return Err(format!(
                        "the form needs {} per {} at point `{}`; nothing was measured there",
                        s.statistic, s.granularity, s.point
                    ))
                }
            }
        }
        Ok(found)
    }

    /// Where the rows of each input lie: the symbol nearest to the first input's channels, in every input that has it.
    fn row_axes(&self, span: &LocatedSpan) -> Vec<Option<usize>> {
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

    /// The span's weights in slot dims; strides tell the stored order, nothing is copied.
    pub(crate) fn weights(
        &self,
        spec: &Spec,
        span: &LocatedSpan,
    ) -> Result<Vec<NamedWeight>, Error> {
        self.weights_without(spec, span, &|_| false)
    }

    /// The same with zeros in some slots: memory that nobody touches, so none.
    fn weights_without(
        &self,
        spec: &Spec,
        span: &LocatedSpan,
        without: &dyn Fn(&String) -> bool,
    ) -> Result<Vec<NamedWeight>, Error> {
        let mut out = Vec::with_capacity(span.weights.len());
        for (name, source) in &span.weights {
            let slot = slot_of(spec, name).ok_or_else(|| {
                Error::invalid(
                    "slot_missing",
                    format!("`{}` has no slot `{name}`", spec.name),
                )
            })?;
            let tensor = match source {
                SlotWeight::Stored(address) => {
                    let param = address.param();
                    let stored = match without(name) {
                        false => self.session.param(&param)?,
                        true => self.session.param_dims(&param).and_then(zeros),
                    };
                    let stored = stored.ok_or_else(|| {
                        Error::invalid(
                            "slot_missing",
                            format!("the host holds no parameter `{param}`"),
                        )
                    })?;
                    let stored = match &address.reshape {
                        Some(dims) => stored.reshape(dims.as_slice()).map_err(failed)?,
                        None => stored,
                    };
                    if stored.rank() == 2 && address.layout != slot.layout {
                        stored.t().map_err(failed)?
                    } else {
                        stored
                    }
                }
                SlotWeight::Const { fill } => {
                    let dims = slot
                        .dims
                        .iter()
                        .map(|d| match d {
                            DimExpr::Literal(n) => Some(*n),
                            DimExpr::Symbol(s) => span.dims.get(s).map(|n| *n as usize),
                            DimExpr::Derived(_) => None,
                        })
                        .collect::<Option<Vec<usize>>>()
                        .ok_or_else(|| {
                            Error::invalid(
                                "dims_inconsistent",
                                format!("the size of constant slot `{name}` is not known"),
                            )
                        })?;
                    match fill {
                        ConstFill::Zeros => Tensor::zeros(dims, DType::F32, &Device::Cpu),
                        ConstFill::Ones => Tensor::ones(dims, DType::F32, &Device::Cpu),
                    }
                    .map_err(failed)?
                }
            };
            out.push(NamedWeight {
                name: name.clone(),
                layout: slot.layout,
                tensor,
            });
        }
        Ok(out)
    }
}

fn zeros(dims: &[Dim]) -> Option<Tensor> {
    let size = |d: &Dim| match d {
        Dim::Size(n) => Some(*n),
        Dim::Symbol(_) => None,
    };
    let dims: Vec<usize> = dims.iter().map(size).collect::<Option<_>>()?;
    Tensor::zeros(dims, DType::F32, &Device::Cpu).ok()
}

/// Hands everything over as views, packed slots as their rows. The outer result is the host's failure, the inner one the plugin's.
#[allow(clippy::too_many_arguments)] // one for each part of the interface's own request
pub(crate) fn bind_form(
    plugin: &Plugin,
    form: &str,
    span: &str,
    weights: &[NamedWeight],
    statistics: &BTreeMap<String, Vec<f32>>,
    params: &BindParams,
    capacity: u64,
    blocks: &Blocks,
    device: u32,
) -> Result<Result<BoundForm, PluginError>, Error> {
    let guards: Vec<_> = weights
        .iter()
        .map(|w| (w, w.tensor.storage_and_layout()))
        .collect();
    let mut named = Vec::with_capacity(guards.len());
    for (weight, (storage, layout)) in &guards {
        if let Some(packed) = blocks.get(&weight.name) {
            let view = HostTensor::new(&packed.rows, &[packed.n, packed.width()])?;
            named.push((weight.name.as_str(), view));
            continue;
        }
        let Storage::Cpu(CpuStorage::F32(data)) = &**storage else {
            return Err(Error::invalid("weights_not_on_device", weight.name.clone()));
        };
        let view = HostTensor::strided(
            &data[layout.start_offset()..],
            layout.dims(),
            layout.stride(),
        )?;
        named.push((weight.name.as_str(), view));
    }
    let mut stats = Vec::with_capacity(statistics.len());
    for (name, values) in statistics {
        let dims: &[usize] = if values.len() == 1 {
            &[]
        } else {
            &[values.len()]
        };
        stats.push((name.as_str(), HostTensor::new(values, dims)?));
    }
    Ok(plugin.bind(&BindSpec {
        form,
        device,
        span,
        weights: &named,
        statistics: &stats,
        params,
        contract: row_capacity(abi::DType::F32, capacity),
    }))
}

fn packed_slots(blocks: &Blocks) -> BTreeMap<String, PackedSlot> {
    let slot = |(name, packed): (&String, &structures_models::PackedWeight)| {
        let slot = PackedSlot {
            format: packed.format,
            n: packed.n as u64,
            k: packed.k as u64,
        };
        (name.clone(), slot)
    };
    blocks.iter().map(slot).collect()
}

/// Most operands and results that are handed over without a list of them being allocated.
pub(crate) const MOST: (usize, usize) = (16, 8);

/// A loaded form as a seat sees it.
pub(crate) struct Loaded {
    form: Staged,
    /// The device it was bound on, when that is not the CPU.
    station: Option<Arc<Station>>,
}

impl Loaded {
    /// A form that was bound on a device, 0 being the CPU.
    pub(crate) fn new(form: BoundForm, plugin: &Plugin, device: u32) -> Result<Self, PluginError> {
        let station = match device {
            0 => None,
            index => Some(Station::open(plugin, index)?),
        };
        let device = station.as_ref().map(|s| s.device().clone());
        Ok(Loaded {
            form: Staged::new(form, device),
            station,
        })
    }

    /// What was bound.
    pub(crate) fn form(&self) -> &BoundForm {
        self.form.form()
    }

    /// The device, when it is not the CPU.
    fn station(&self) -> Option<&Arc<Station>> {
        self.station.as_ref()
    }
}

impl Executable for Loaded {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        let inputs: Vec<HostTensor<'_>> = inputs
            .iter()
            .map(|i| match i {
                Some((data, dims)) => HostTensor::new(data, dims),
                None => Ok(HostTensor::ABSENT),
            })
            .collect::<Result<_, _>>()
            .map_err(shape)?;
        let mut outputs: Vec<HostTensorMut<'_>> = outputs
            .iter_mut()
            .map(|(data, dims)| {
                let made = dims.iter().product::<usize>().min(data.len());
                HostTensorMut::new(&mut data[..made], dims)
            })
            .collect::<Result<_, _>>()
            .map_err(shape)?;
        self.form
            .call(&inputs, &mut outputs, &mut [])
            .map_err(|e| self.failure(&e))
    }

    fn call_into(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), CallFailure> {
        let mut given = [HostTensor::ABSENT; MOST.0];
        let mut made: [HostTensorMut<'_>; MOST.1] = std::array::from_fn(|_| Default::default());
        let (n, m) = (inputs.len(), outputs.len());
        check_count(n, m)?;
        for (to, input) in given.iter_mut().zip(inputs) {
            if let Some((data, dims)) = input {
                *to = given_as_it_lies(data, dims).map_err(shape)?;
            }
        }
        for (to, (data, dims)) in made.iter_mut().zip(outputs) {
            *to = HostTensorMut::new(data, dims).map_err(shape)?;
        }
        let called = self.form.call(&given[..n], &mut made[..m], &mut []);
        called.map_err(|e| self.failure(&e))
    }
}

impl Loaded {
    fn failure(&self, e: &PluginError) -> CallFailure {
        CallFailure {
            code: e.code.clone(),
            declined: !self.form.poisoned(),
            message: e.to_string(),
        }
    }
}

/// Dense data, or a region `[B, heads, T, D]` with room for more positions than it holds.
fn given_as_it_lies<'a>(data: &'a [f32], dims: &[usize]) -> Result<HostTensor<'a>, LoaderError> {
    match *dims {
        [batch, heads, len, d] if data.len() > batch * heads * len * d => {
            let head = data.len() / (batch * heads).max(1);
            HostTensor::strided(data, dims, &[heads * head, head, d, 1])
        }
        _ => HostTensor::new(data, dims),
    }
}

fn shape(e: LoaderError) -> CallFailure {
    CallFailure {
        code: "argument".into(),
        message: e.to_string(),
        declined: false,
    }
}

impl Executable for Arc<Loaded> {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        Executable::call(&**self, inputs, outputs)
    }

    fn call_into(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), CallFailure> {
        Executable::call_into(&**self, inputs, outputs)
    }
}

impl WiredForm for Loaded {
    fn call(&self, inputs: &[Port<'_>], outputs: &mut [PortMut<'_>]) -> Result<(), CallFailure> {
        let mut given = [HostTensor::ABSENT; MOST.0];
        let mut made: [HostTensorMut<'_>; MOST.1] = std::array::from_fn(|_| Default::default());
        let (n, m) = (inputs.len(), outputs.len());
        check_count(n, m)?;
        for (to, port) in given.iter_mut().zip(inputs) {
            *to = match port {
                Port::Absent => continue,
                Port::Values(data, dims) => HostTensor::new(data, dims),
                Port::Codes(data, dims) => {
                    HostTensor::bytes(data, abi::DType::E4m3, dims, row_major(dims).of(dims))
                }
            }
            .map_err(shape)?;
        }
        for (to, port) in made.iter_mut().zip(outputs) {
            *to = match port {
                PortMut::Values(data, dims) => HostTensorMut::new(data, dims),
                PortMut::Codes(data, dims) => {
                    HostTensorMut::bytes(data, abi::DType::E4m3, dims, row_major(dims).of(dims))
                }
            }
            .map_err(shape)?;
        }
        let called = self.form.call(&given[..n], &mut made[..m], &mut []);
        called.map_err(|e| self.failure(&e))
    }
}

fn check_count(n: usize, m: usize) -> Result<(), CallFailure> {
    if n <= MOST.0 && m <= MOST.1 {
        return Ok(());
    }
    Err(CallFailure {
        code: "arguments_count".into(),
        message: format!("at most {MOST:?} operands and results, found {n} and {m}"),
        declined: true,
    })
}

/// Strides of elements that follow each other.
struct RowMajor([usize; abi::MAX_RANK]);

impl RowMajor {
    fn of(&self, dims: &[usize]) -> &[usize] {
        &self.0[..dims.len().min(abi::MAX_RANK)]
    }
}

fn row_major(dims: &[usize]) -> RowMajor {
    let mut strides = [1; abi::MAX_RANK];
    for i in (1..dims.len().min(abi::MAX_RANK)).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    RowMajor(strides)
}

/// A form's declaration as it is on the wire: the port is rounded through E4M3.
fn on_wire(form: &FormDecl, wire: &WireBind) -> FormDecl {
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

fn refusal(place: &Place<'_>, stage: &str, code: &str, reason: String, distrust: bool) -> NotBound {
    NotBound {
        note: RefusalNote {
            path: place.site.seam.path.clone(),
            structure: place.site.spec.name.clone(),
            stage: stage.into(),
            code: code.into(),
            reason,
            plugin: Some(place.choice.plugin.into()),
            form: Some(place.choice.form.name.clone()),
        },
        distrust,
    }
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

/// Whether the plugin is not to be trusted further, beyond having said no.
fn crashed(kind: StatusKind) -> bool {
    !matches!(kind, StatusKind::Refused | StatusKind::Invalid)
}

/// `point|statistic|granularity`
fn statistic_name(s: &StatisticDecl) -> String {
    format!("{}|{}|{}", s.point, s.statistic, s.granularity)
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

/// The declaration of an expanded slot name (`w_2` of `w_<i>`).
fn slot_of<'s>(spec: &'s Spec, name: &str) -> Option<&'s Slot> {
    spec.weights
        .iter()
        .find(|slot| match slot.name.split_once("<i>") {
            None => slot.name == name,
            Some((head, tail)) => name
                .strip_prefix(head)
                .and_then(|rest| rest.strip_suffix(tail))
                .is_some_and(|i| !i.is_empty() && i.bytes().all(|b| b.is_ascii_digit())),
        })
}
