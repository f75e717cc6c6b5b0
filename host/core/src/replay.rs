//! Binding again exactly what a receipt adopted and activated, or refusing with what is different.
//!
//! A receipt holds the seats, the statistics they were bound with, and the digests of plugins, specs and checkpoint.
//! Nothing is judged again; anything that differs is a refusal, never a guess. What is as it was and does not serve now,
//! because a device, a driver or memory is missing, is a refusal of another kind: no other receipt would help.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use candle_core::Tensor;
use structures_graph::session::Plan;
use structures_graph::{Dim, OpId, ValueId};
use structures_loader::{give_memory_back, Plugin};
use structures_models::PackedWeight;
use structures_plugin_api::formats::BlockFormat;
use structures_seams::HostFacts;

use crate::adopt::Blocks;
use crate::attach::{nothing, read_packed, span_contents};
use crate::bind::{brokers, installs, Bench, Bound, NotBound, Place};
use crate::choose::{qualify_at, Choice};
use crate::compose;
use crate::error::Error;
use crate::host::{Host, Loaded};
use crate::kept::Shelf;
use crate::operations::{NotMade, Operation, Sizes, Workshop, CHOICE};
use crate::precision::{self, Descriptor};
use crate::receipt::{Receipt, SeatNote, SeatWire};
use crate::seat::{OnGuardFail, Seat};
use crate::sites::{Site, Survey};
use crate::station::Station;
use crate::stats::{Calibration, CalibrationNote, CallContent, Content};
use crate::steps;
use crate::wires::{edge, Edge, End};

/// Reads and verifies a receipt.
pub fn read(path: &std::path::Path) -> Result<Receipt, Error> {
    crate::verify::read(path).map_err(|unfit| match unfit.code {
        "io" => Error::Io {
            path: path.display().to_string(),
            reason: format!("{}; give the file that attach wrote", unfit.reason),
        },
        code => Error::refused(
            code,
            format!(
                "{}: {}; give the file as attach wrote it",
                path.display(),
                unfit.reason
            ),
        ),
    })
}

/// Binds the receipt's seats on a model.
pub fn replay(
    host: &Host,
    model: &Loaded,
    receipt: &Receipt,
    prompt: &[u32],
    on_guard_fail: OnGuardFail,
) -> Result<(Plan, Vec<Arc<Seat>>), Error> {
    check(host, receipt)?;
    let mut names: Vec<String> = receipt.bound().map(|n| n.structure.clone()).collect();
    names.extend(receipt.blocks.iter().map(|b| b.structure.clone()));
    names.sort_unstable();
    names.dedup();
    let survey = host.survey(model, &names)?;
    let own = left_to_the_host(model, &survey, receipt);
    std::thread::scope(|threads| {
        // What the host itself multiplies with, and every byte of the checkpoint for its digest: beside the rest.
        let digest = threads.spawn(|| {
            // What cannot be read is an error of the run that wants it.
            let _ = model.session().read_params(own);
            model.sha256()
        });
        let bound = bind(host, model, &survey, receipt, prompt, on_guard_fail);
        let digest = digest
            .join()
            .unwrap_or_else(|_| Err(Error::invalid("internal", "the digest's thread ended")));
        // Another checkpoint explains whatever else is different.
        same_checkpoint(model, receipt, &digest?)?;
        // Finding seams and binding them needs much for a moment, and a process stays for long.
        give_memory_back();
        bound
    })
}

/// Operations of no seat of the receipt.
fn left_to_the_host(model: &Loaded, survey: &Survey<'_>, receipt: &Receipt) -> Vec<OpId> {
    let mut seated: HashSet<OpId> = HashSet::new();
    for note in receipt.bound() {
        let sites = survey.sites.iter();
        let site = sites.filter(|s| s.seam.key == note.key && s.spec.name == note.structure);
        let spans = site
            .flat_map(|s| &s.spans)
            .filter(|span| span.name == note.span);
        seated.extend(spans.flat_map(|span| span.ops.iter().copied()));
    }
    let all = model.session().graph().op_ids();
    all.filter(|op| !seated.contains(op)).collect()
}

fn bind(
    host: &Host,
    model: &Loaded,
    survey: &Survey<'_>,
    receipt: &Receipt,
    prompt: &[u32],
    on_guard_fail: OnGuardFail,
) -> Result<(Plan, Vec<Arc<Seat>>), Error> {
    let shelf = Shelf::open(&receipt.checkpoint.sha256);
    // Bind parity needs what the host feeds the spans; a prompt beyond the context is refused by whoever runs it.
    let held = prompt.len().min(model.model.config().max_positions);
    let contents = OnceCell::new();
    let fed = || -> Result<&HashMap<ValueId, Tensor>, Error> {
        if contents.get().is_none() {
            let _ = contents.set(span_contents(model, survey, &prompt[..held])?);
        }
        Ok(contents.get_or_init(HashMap::new))
    };
    let nothing_fed = HashMap::new();
    let forms = host.forms();
    let mut bounds: Vec<Bound> = Vec::new();
    for note in receipt.bound() {
        let again = Again::of(host, survey, &forms, note)?;
        let calibration = statistics_of(note);
        let hollow = match (&note.wire, again.plugin, &shelf) {
            (None, Some(plugin), Some(_)) => again.hollow(model).map(|blocks| (plugin, blocks)),
            _ => None,
        };
        let kept = hollow.and_then(|(plugin, blocks)| {
            let bench = Bench {
                session: model.session(),
                calibration: &calibration,
                contents: &nothing_fed,
                on_guard_fail,
                scheme: &note.scheme,
                blocks: &blocks,
                shelf: shelf.as_ref(),
            };
            bench.again(again.site, again.span, again.choice, plugin, &again.rows)
        });
        if let Some(bound) = kept {
            as_noted(&again, receipt, note, &bound)?;
            bounds.push(bound);
            continue;
        }
        let blocks = again.blocks(model)?;
        let bench = Bench {
            session: model.session(),
            calibration: &calibration,
            contents: fed()?,
            on_guard_fail,
            scheme: &note.scheme,
            blocks: &blocks,
            shelf: shelf.as_ref(),
        };
        let refused = |no: NotBound| again.refused(&no);
        let made = match &note.wire {
            None => {
                let Again {
                    site,
                    span,
                    choice,
                    plugin,
                    ref rows,
                    ..
                } = again;
                let bound = match plugin {
                    Some(plugin) => bench.bind(site, span, choice, plugin, rows),
                    None => bench.bind_table(site, span, choice, rows),
                };
                vec![bound.map_err(refused)?]
            }
            // The reader is bound with who sends to it.
            Some(wire) if !wire.emits => continue,
            Some(wire) => {
                let reader = receipt.seats.iter().find(|n| {
                    let back = n.wire.as_ref().filter(|w| !w.emits);
                    format!("{}:{}", n.structure, n.key) == wire.peer
                        && back.is_some_and(|w| w.peer == again.site.id())
                });
                let reader = reader.ok_or_else(|| {
                    again.different("its partner on the wire is not in the receipt")
                })?;
                let to = Again::of(host, survey, &forms, reader)?;
                let calibration = together(statistics_of(note), statistics_of(reader));
                let bench = Bench {
                    calibration: &calibration,
                    ..bench
                };
                let edge = again.edge(model, survey, wire, &to)?;
                let (Some(sends), Some(takes)) = (again.place(), to.place()) else {
                    return Err(again.different("an end of its wire is no plugin's form"));
                };
                let places = [&sends, &takes];
                let pair = bench.bind_pair(&edge, &wire.format, places, wire.amax);
                pair.map_err(refused)?.halves.into()
            }
        };
        for bound in &made {
            as_noted(&again, receipt, note, bound)?;
        }
        bounds.extend(made);
    }
    let seats = receipt.bound().count();
    if bounds.len() != seats {
        return Err(Error::refused(
            "receipt_mismatch",
            format!(
                "{seats} seats in the receipt, {} of them could be bound",
                bounds.len()
            ),
        ));
    }
    brokers(&bounds);
    for note in &receipt.blocks {
        let name = format!("block:{}:{}", note.structure, note.owner);
        let mut take = |names: &[String]| -> Result<Vec<Bound>, Error> {
            let gone = |name: &String| {
                Error::refused(
                    "receipt_mismatch",
                    format!(
                        "block `{}`: its part `{name}` is not in the receipt",
                        note.owner
                    ),
                )
            };
            names
                .iter()
                .map(|name| {
                    let at = bounds.iter().position(|b| compose::seat_name(b) == *name);
                    at.map(|at| bounds.remove(at)).ok_or_else(|| gone(name))
                })
                .collect()
        };
        let (first, mut parts) = (take(&note.linked)?, take(&note.parts)?);
        let (Some(after), true) = (parts.pop(), parts.len() == 3) else {
            return Err(Error::refused(
                "receipt_mismatch",
                format!("block `{}`: four parts are joined, not these", note.owner),
            ));
        };
        let pair = parts.split_off(1);
        let graph = model.session().graph();
        bounds.extend(compose::join(
            graph,
            &name,
            first,
            parts.remove(0),
            pair,
            after,
        ));
    }
    let operations = operations(host, model, receipt, held, on_guard_fail)?;
    let mut all = installs(&bounds);
    all.extend(operations.iter().map(|o| o.install.clone()));
    let plan = model.session().plan(all)?;
    let seats = bounds.into_iter().map(|b| b.seat);
    Ok((
        plan,
        seats
            .chain(operations.into_iter().map(|o| o.seat))
            .collect(),
    ))
}

/// The host operations that the receipt's devices executed.
fn operations(
    host: &Host,
    model: &Loaded,
    receipt: &Receipt,
    positions: usize,
    mode: OnGuardFail,
) -> Result<Vec<Operation>, Error> {
    let graph = model.session().graph();
    let most = model.model.config().max_positions;
    let sizes = Sizes {
        tokens: positions.max(1),
        positions: positions.max(1),
    };
    let mut made = Vec::new();
    for note in &receipt.device_operations {
        let different = |what: &str| {
            let (kind, plugin, index) = (&note.kind, &note.plugin, note.device.index);
            Error::refused(
                "receipt_mismatch",
                format!("host operation `{kind}` on {plugin}:{index}: {what}"),
            )
        };
        let plugin = host.registry.plugin(&note.plugin);
        let plugin = plugin.ok_or_else(|| different("the plugin is not loaded"))?;
        let at = format!(
            "host operation `{}` on {}:{}",
            note.kind, note.plugin, note.device.index
        );
        let station = Station::open(plugin, note.device.index)
            .map_err(|e| unavailable(&at, &format!("{}: {}", e.code, e.message)))?;
        if *station.note() != note.device {
            let (then, now) = (json(&note.device), json(station.note()));
            return Err(different(&format!("the device was {then}, is {now}")));
        }
        let mut shop = Workshop::new(model.session(), plugin, station, sizes, most, mode);
        let not_made = |name: &str, no: NotMade| {
            let why = format!("`{name}`: {}: {}", no.code, no.reason);
            match no.machine {
                true => unavailable(&at, &why),
                false => different(&why),
            }
        };
        for name in &note.values {
            let given = |v: &ValueId| graph.outputs.iter().any(|(_, output)| output == v);
            let scores = graph.value_named(name).filter(given);
            if let Some(scores) = scores.filter(|_| note.kind == CHOICE) {
                let bound = shop.bind_choice(scores);
                made.push(bound.map_err(|no| not_made(name, no))?);
                continue;
            }
            let op = graph.value_named(name).and_then(|v| graph.producer(v));
            let same = op.filter(|(op, _)| graph.op(*op).kind.name() == note.kind);
            let (op, _) =
                same.ok_or_else(|| different(&format!("the model makes no `{name}` so now")))?;
            let bound = shop.bind(op);
            made.push(bound.map_err(|no| not_made(name, no))?);
        }
    }
    Ok(made)
}

/// What was bound is what the receipt says of it.
fn as_noted(
    again: &Again<'_>,
    receipt: &Receipt,
    note: &SeatNote,
    bound: &Bound,
) -> Result<(), Error> {
    let then = receipt
        .bound()
        .find(|n| {
            n.key == bound.note.key
                && n.structure == bound.note.structure
                && n.span == bound.note.span
        })
        .unwrap_or(note);
    for (what, then, now) in [
        ("variant", json(&then.variant), json(&bound.note.variant)),
        ("params", json(&then.params), json(&bound.note.params)),
        ("dims", json(&then.dims), json(&bound.note.dims)),
        ("format", json(&then.format), json(&bound.note.format)),
        ("wire", json(&then.wire), json(&bound.note.wire)),
        ("device", json(&then.device), json(&bound.note.device)),
    ] {
        if then != now {
            return Err(again.different(&format!("{what} was {then}, is {now}")));
        }
    }
    Ok(())
}

/// Where a seat of a receipt is now.
struct Again<'a> {
    note: &'a SeatNote,
    site: &'a Site<'a>,
    span: usize,
    choice: &'a Choice<'a>,
    /// `None` where the host itself offers the form.
    plugin: Option<&'a Plugin>,
    /// Capacity is what was bound, the choice of form rests on the median.
    rows: Vec<u64>,
}

impl<'a> Again<'a> {
    fn of(
        host: &'a Host,
        survey: &'a Survey<'a>,
        forms: &'a [Choice<'a>],
        note: &'a SeatNote,
    ) -> Result<Self, Error> {
        let different = |what: &str| different(note, what);
        let site = survey
            .sites
            .iter()
            .find(|s| {
                s.seam.key == note.key
                    && s.spec.name == note.structure
                    && s.spec.version == note.version
            })
            .ok_or_else(|| different("the model has no such seam now"))?;
        let declared = |c: &&Choice<'_>| {
            c.plugin == note.plugin
                && c.form.name == note.form
                && c.form.structure == note.structure
        };
        if !forms.iter().any(|c| declared(&c)) {
            return Err(different("the plugin declares no such form now"));
        }
        device_as_noted(host, note)?;
        let device = note.device.as_ref().map_or(0, |d| d.index);
        let choice = forms
            .iter()
            .find(|c| declared(c) && c.device == device)
            .ok_or_else(|| {
                let why = "the form is not offered on the device it was bound on";
                unavailable(&named(note), why)
            })?;
        let rows = [note.median_rows];
        let then = |i: usize| site.spans[i].name == note.span;
        if !(0..site.spans.len()).any(then) {
            let held: Vec<&str> = site.spans.iter().map(|s| s.name.as_str()).collect();
            return Err(different(&format!(
                "bound at span `{}` then, {held:?} hold now",
                note.span
            )));
        }
        let span = qualify_at(site, choice, "f32", &rows, then)
            .map_err(|n| different(&format!("{}: {}", n.code, n.reason)))?;
        let plugin = host.registry.plugin(choice.plugin);
        if plugin.is_none() && !choice.is_own() {
            return Err(different("the plugin is not loaded"));
        }
        // On a wire the median was bound, and the most that was observed is told beside it.
        let rows = match &note.wire {
            None => vec![note.median_rows, note.row_capacity as u64],
            Some(wire) => {
                let bound = note.row_capacity as u64;
                vec![bound, bound, wire.rows]
            }
        };
        Ok(Again {
            note,
            site,
            span,
            choice,
            plugin,
            rows,
        })
    }

    /// The rows it was given packed.
    fn blocks(&self, model: &Loaded) -> Result<Blocks, Error> {
        let blocks = read_packed(model, &self.site.spans[self.span], &self.note.packed)?;
        match blocks.len() == self.note.packed.len() {
            true => Ok(blocks),
            false => Err(self.different("the checkpoint does not store its slots packed as then")),
        }
    }

    /// Rows of zeros where it was given packed ones, memory that nobody touches.
    fn hollow(&self, model: &Loaded) -> Option<Blocks> {
        let weights = &self.site.spans[self.span].weights;
        let slot = |(slot, format): (&String, &String)| {
            let format = BlockFormat::from_name(format)?;
            let param = weights.get(slot)?.stored()?.param();
            let [Dim::Size(n), Dim::Size(k)] = model.session().param_dims(&param)? else {
                return None;
            };
            let (n, k) = (*n, *k);
            let rows = vec![0; n * format.row_bytes(k)?];
            Some((slot.clone(), PackedWeight { format, n, k, rows }))
        };
        self.note.packed.iter().map(slot).collect()
    }

    fn different(&self, what: &str) -> Error {
        different(self.note, what)
    }

    /// It could not be bound: the machine is short of something, or something is another than it was.
    fn refused(&self, no: &NotBound) -> Error {
        let why = format!("{}: {}", no.note.code, no.note.reason);
        match no.machine {
            true => unavailable(&named(self.note), &why),
            false => self.different(&why),
        }
    }

    fn place(&self) -> Option<Place<'_>> {
        Some(Place {
            site: self.site,
            span: self.span,
            choice: self.choice,
            plugin: self.plugin?,
            rows: &self.rows,
            scheme: &self.note.scheme,
        })
    }

    /// The edge of a wire in the graph as it is now.
    fn edge(
        &self,
        model: &Loaded,
        survey: &Survey<'_>,
        wire: &SeatWire,
        to: &Again<'_>,
    ) -> Result<Edge, Error> {
        let facts = HostFacts::new(model.session().graph());
        let reader = to.note.wire.as_ref().map_or("", |w| w.port.as_str());
        let end = |again: &Again<'_>, port: &str, emits: bool| {
            let span = &again.site.spans[again.span];
            let ports = if emits { &span.outputs } else { &span.inputs };
            Some(End {
                site: survey
                    .sites
                    .iter()
                    .position(|s| std::ptr::eq(s, again.site))?,
                span: again.span,
                port: port.into(),
                value: ports.iter().find(|(n, _)| n == port)?.1?,
            })
        };
        let ends = end(self, &wire.port, true).zip(end(to, reader, false));
        let found = ends.and_then(|(from, to)| edge(&facts, &survey.sites, &from, &to));
        match found {
            Some(Ok(edge)) => Ok(edge),
            Some(Err(broken)) => {
                Err(self.different(&format!("{}: {}", broken.code, broken.reason)))
            }
            None => Err(self.different("the two ends of its wire do not meet now")),
        }
    }
}

/// The device a seat was bound on is here, and is the one that was noted.
fn device_as_noted(host: &Host, note: &SeatNote) -> Result<(), Error> {
    let (Some(then), Some(plugin)) = (&note.device, host.registry.plugin(&note.plugin)) else {
        return Ok(());
    };
    let device = format!("device {} ({}, {})", then.index, then.name, then.arch);
    let here = plugin.devices().map_err(|e| {
        unavailable(
            &named(note),
            &format!("{device}: {}: {}", e.code, e.message),
        )
    })?;
    let Some(now) = here.iter().find(|d| d.index == then.index) else {
        let offered: Vec<String> = here
            .iter()
            .map(|d| format!("{} ({}, {})", d.index, d.name, d.arch))
            .collect();
        let offered = match offered.is_empty() {
            true => "none beside the CPU".into(),
            false => offered.join(", "),
        };
        let what = format!(
            "device_unknown: {device} is not here; `{}` offers {offered}",
            note.plugin
        );
        return Err(unavailable(&named(note), &what));
    };
    match (&now.name, &now.arch) == (&then.name, &then.arch) {
        true => Ok(()),
        false => Err(different(
            note,
            &format!("{device} is {}, {} now", now.name, now.arch),
        )),
    }
}

fn named(note: &SeatNote) -> String {
    format!("seat `{}` ({})", note.key, note.structure)
}

fn different(note: &SeatNote, what: &str) -> Error {
    Error::refused("receipt_mismatch", format!("{}: {what}", named(note)))
}

/// All is as it was, and the machine does not serve it now.
fn unavailable(at: &str, what: &str) -> Error {
    Error::refused("seat_unavailable", format!("{at}: {what}"))
}

/// The statistics of both ends.
fn together(mut a: Calibration, b: Calibration) -> Calibration {
    a.amax.extend(b.amax);
    a.channel_amax.extend(b.channel_amax);
    a.second_moment.extend(b.second_moment);
    a.contents.extend(b.contents);
    a
}

fn same_checkpoint(model: &Loaded, receipt: &Receipt, sha256: &str) -> Result<(), Error> {
    if sha256 == receipt.checkpoint.sha256 {
        return Ok(());
    }
    Err(Error::refused(
        "receipt_mismatch",
        format!(
            "the receipt is for checkpoint `{}` with sha256 {}, this is `{}` with {sha256}",
            receipt.checkpoint.file,
            receipt.checkpoint.sha256,
            model.file()
        ),
    ))
}

/// Plugins and specs are what they were.
fn check(host: &Host, receipt: &Receipt) -> Result<(), Error> {
    let differs = |what: String| Err(Error::refused("receipt_mismatch", what));
    consistent(receipt).or_else(differs)?;
    for note in receipt
        .plugins
        .iter()
        .filter(|p| receipt.bound().any(|s| s.plugin == p.id))
    {
        match host.registry.plugin(&note.id) {
            None => {
                let row = host.registry.row(&note.id);
                let why = row.and_then(|r| r.reason.clone()).unwrap_or_else(|| {
                    "no loaded plugin has this id; `structures plugins list` shows every candidate and why one was \
                     refused, --plugins DIR adds a directory"
                        .into()
                });
                return differs(format!("plugin `{}` is not loaded: {why}", note.id));
            }
            Some(p) if p.sha256() != note.sha256 => {
                return differs(format!(
                    "plugin `{}` {}: the receipt was written with sha256 {}, this is {}; attach again",
                    note.id, note.version, note.sha256, p.sha256()
                ));
            }
            Some(_) => {}
        }
    }
    for seat in receipt.bound() {
        let key = format!("{}@{}", seat.structure, seat.version);
        let Ok(spec) = host.catalog.get_version(&seat.structure, seat.version) else {
            return differs(format!(
                "the catalog has no {key}; give its directory with --catalog"
            ));
        };
        if receipt.spec_digests.get(&key) != Some(&spec.digest) {
            return differs(format!(
                "the spec {key} is not the one the receipt was written with"
            ));
        }
    }
    Ok(())
}

/// What a receipt says twice it says alike, whatever its digest: every seat once, with its plugin's row, under the scale
/// `precision_spec` has for it, and packed where a layer of `adopted` was taken as stored.
fn consistent(receipt: &Receipt) -> Result<(), String> {
    let mut seen = HashSet::new();
    for seat in receipt.bound() {
        let name = format!("seat `{}` ({})", seat.key, seat.structure);
        // The parts of a composed block are seats of one seam, each at a span of its own.
        if !seen.insert((&seat.structure, &seat.key, &seat.span)) {
            return Err(format!("{name} is listed twice"));
        }
        let own = seat.plugin == steps::PROVIDER;
        if !own && receipt.plugins.iter().all(|p| p.id != seat.plugin) {
            return Err(format!(
                "{name} names plugin `{}`, of which the receipt has no row",
                seat.plugin
            ));
        }
        let Some(dtype) = precision::activation_dtype(&seat.activation_format) else {
            continue;
        };
        for (name_of, values) in &seat.statistics {
            let (Some(point), [amax]) = (name_of.strip_suffix("|amax|tensor"), values.as_slice())
            else {
                continue;
            };
            let key = format!("{}|{point}", seat.key);
            let stated = receipt.precision_spec.activations.get(&key);
            let measured = &receipt.calibration.note;
            let bound = Descriptor::calibrated(dtype, *amax, measured.samples, measured.percentile);
            let bound = bound.map_err(|e| format!("{name}, `{point}`: {e}"))?;
            if stated.map(|d| &d.scale) != Some(&bound.scale) {
                return Err(format!(
                    "{name} was bound with {amax} at `{point}`, `precision_spec` says otherwise at `{key}`"
                ));
            }
        }
    }
    let adopted = receipt
        .adopted
        .iter()
        .flat_map(|a| a.layers.iter().map(move |l| (a, l)));
    for (adopted, layer) in adopted.filter(|(a, l)| a.refused.is_none() && !l.converted) {
        let of = |s: &&SeatNote| s.key == layer.key && s.structure == layer.structure;
        let packed = adopted
            .seats
            .iter()
            .find(of)
            .and_then(|s| s.packed.get(&layer.slot));
        if packed != Some(&layer.format) {
            return Err(format!(
                "slot `{}` of `{}` was taken as stored, the `packed` of its seat says otherwise",
                layer.slot, layer.key
            ));
        }
    }
    Ok(())
}

/// The statistics a seat was bound with, under the keys binding looks up.
fn statistics_of(note: &SeatNote) -> Calibration {
    let mut calibration = nothing(CalibrationNote::nothing_fitted("receipt", 0, 100.0));
    let mut by_kind: HashMap<&str, Vec<(String, &Vec<f32>)>> = HashMap::new();
    for (name, values) in &note.statistics {
        let mut parts = name.splitn(2, '|');
        let (point, kind) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        by_kind
            .entry(kind)
            .or_default()
            .push((format!("{}|{point}", note.key), values));
    }
    for (key, values) in by_kind.remove("amax|tensor").unwrap_or_default() {
        if let Some(v) = values.first() {
            calibration.amax.insert(key, *v);
        }
    }
    for (key, values) in by_kind.remove("content|tensor").unwrap_or_default() {
        let call = CallContent {
            dims: vec![values.len()],
            values: values.clone(),
        };
        calibration
            .contents
            .insert(key, Content { calls: vec![call] });
    }
    for (key, values) in by_kind.remove("amax|channel").unwrap_or_default() {
        calibration.channel_amax.insert(key, values.clone());
    }
    for (key, values) in by_kind.remove("second_moment|channel").unwrap_or_default() {
        calibration
            .second_moment
            .insert(key, values.iter().map(|v| f64::from(*v)).collect());
    }
    calibration
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
