//! The last step: everything that was decided becomes the receipt, and the seats that stay become the plan.
//!
//! Owns how the record is filled. What its fields mean is [`crate::receipt`]; nothing is decided here any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use structures_graph::session::Plan;

use super::{residency, Attachment, Prepared};
use crate::bind::{installs, Bound};
use crate::compose::{self as composing, BlockNote};
use crate::digest;
use crate::error::Error;
use crate::judge::summary;
use crate::precision::{self, Descriptor, PrecisionSpec};
use crate::receipt::{
    Assumption, CalibrationNote, CheckpointNote, ControlNote, MemoryNote, PluginNote, Receipt,
    TimingNote, UnitNote, WireNote, SCHEMA,
};
use crate::release;
use crate::schemes::SchemeRecord;
use crate::seat::Seat;
use crate::stats;
use crate::steps::{self, BrokerNote};
use crate::workload::Workload;

impl Prepared<'_> {
    pub(super) fn commit(
        mut self,
        active: Vec<Bound>,
        mut units: Vec<UnitNote>,
        union: Option<UnitNote>,
        detach_identical: bool,
    ) -> Result<Attachment, Error> {
        if active.is_empty() {
            none_stays(&mut units);
        }
        let mut seats: Vec<Arc<Seat>> = active.iter().map(|b| b.seat.clone()).collect();
        seats.extend(residency::seats(&self.operations));
        let ledger = summary(&seats);
        let mut all = installs(&active);
        all.extend(self.operations.iter().map(|o| o.install.clone()));
        let plan = self.plan(all)?;
        let adopted: Vec<Arc<Seat>> = self.adopted.iter().map(|b| b.seat.clone()).collect();
        let timing = self.timing()?;
        let mut refused = std::mem::take(&mut self.survey.refused);
        refused.append(&mut self.refused);
        let mut receipt = Receipt {
            schema: SCHEMA,
            environment: self.host.environment(),
            model: self.model.name().into(),
            checkpoint: self.checkpoint()?,
            workload: self.workload.name().into(),
            output_kind: self.kind.name().into(),
            scheme: SchemeRecord::new(&self.selected, &self.seams, &self.decisions),
            floors: self
                .options
                .floors
                .iter()
                .map(|(k, v)| (k.to_string(), v))
                .collect(),
            min_speedup: self.options.min_speedup,
            timing,
            calibration: CalibrationNote {
                note: self.calibration.note.clone(),
                fit_residual: self.fit_residual(),
                rows: self.rows(),
            },
            control: ControlNote {
                // Anything else ended the door in `control`, and after detaching in `judge`.
                repeat_identical: true,
                detach_identical,
            },
            plugins: self.plugins(&units),
            decisions: self.resolved(),
            spec_digests: self.spec_digests(),
            assumed: self.assumed(),
            refused,
            kept_host: std::mem::take(&mut self.kept),
            adopted: self.adoption.take(),
            negotiated: self.settled_wires(&active),
            brokers: self.seated_brokers(&active),
            blocks: self.whole_blocks(&active),
            device_operations: residency::notes(&self.operations),
            stages: self.stages.iter().map(|s| (*s).to_string()).collect(),
            units,
            union,
            ledger,
            seams_active: active.iter().map(|b| b.note.key.clone()).collect(),
            memory: self.memory(&active, &plan)?,
            seats: active.iter().map(|b| b.note.clone()).collect(),
            precision_spec: executed(self.adopted.iter().chain(&active), &self.calibration.note)?,
            digest: String::new(),
        };
        receipt.digest = digest::digest(&serde_json::to_value(&receipt).map_err(not_json)?)?;
        Ok(Attachment {
            receipt,
            seats,
            adopted,
            plan,
            for_good: false,
        })
    }

    fn checkpoint(&self) -> Result<CheckpointNote, Error> {
        Ok(CheckpointNote {
            file: self.model.file(),
            hash: self.model.hash()?,
            sha256: self.model.sha256()?,
            architecture: self.model.architecture(),
            dtype: "f32".into(),
        })
    }

    /// How the arms were timed, and against what.
    fn timing(&self) -> Result<TimingNote, Error> {
        let schedule = self.options.schedule;
        let threads = structures_loader::pool::Pool::global().threads();
        let form = match self.captured(&self.plan(Vec::new())?) {
            true => "captured",
            false => "eager",
        };
        Ok(TimingNote {
            form: form.into(),
            method: "paired, alternating; medians of per-round ratios".into(),
            rounds: schedule.rounds() as usize,
            iters: schedule.iters() as usize,
            threads,
            baseline: match self.adopted.len() {
                0 => format!("session on candle f32, {form}, {threads} threads"),
                // Both arms have it: what was adopted is not judged for speed.
                n => format!(
                    "session on candle f32 with {n} adopted seats, {form}, {threads} threads"
                ),
            },
            iteration: match self.workload {
                Workload::Decode => "one token after a prefilled prompt".into(),
                Workload::Prefill => format!("one prompt of {} tokens", self.judged[0].len()),
            },
        })
    }

    /// Plugins of these units and of what was adopted.
    fn plugins(&self, units: &[UnitNote]) -> Vec<PluginNote> {
        let used: BTreeSet<&str> = units
            .iter()
            // Both ends of a wire are named.
            .flat_map(|u| u.plugin.split('+'))
            .chain(self.adopted.iter().map(|b| b.note.plugin.as_str()))
            .filter(|p| !p.is_empty())
            .collect();
        self.host
            .registry
            .loaded()
            .iter()
            .filter(|p| used.contains(p.id()))
            .map(|p| PluginNote {
                id: p.id().into(),
                version: p.description().version.clone(),
                sha256: p.sha256().into(),
            })
            .collect()
    }

    /// `NAME@VERSION` of every structure found -> digest of its specification.
    fn spec_digests(&self) -> BTreeMap<String, String> {
        let sites = self.survey.sites.iter();
        sites
            .map(|s| {
                (
                    format!("{}@{}", s.spec.name, s.spec.version),
                    s.spec.digest.clone(),
                )
            })
            .collect()
    }

    fn assumed(&self) -> Vec<Assumption> {
        let sites = self.survey.sites.iter();
        sites
            .flat_map(|s| {
                s.seam.assumptions.iter().map(|a| Assumption {
                    path: s.seam.path.clone(),
                    structure: s.spec.name.clone(),
                    text: a.text.clone(),
                })
            })
            .collect()
    }

    /// The wires that were bound; active where both ends are seats that stay.
    fn settled_wires(&mut self, active: &[Bound]) -> Vec<WireNote> {
        let stays = |key: &str, structure: &str| {
            let mut notes = active.iter().map(|b| &b.note);
            notes.any(|n| n.key == key && n.structure == structure && n.wire.is_some())
        };
        for wire in &mut self.negotiated {
            let ends = [&wire.producer, &wire.consumer];
            wire.active = ends.iter().all(|e| stays(&e.key, &e.structure));
        }
        std::mem::take(&mut self.negotiated)
    }

    /// Brokers whose tables all stay.
    fn seated_brokers(&self, active: &[Bound]) -> Vec<BrokerNote> {
        let seated = |n: &&BrokerNote, key: &String| {
            let mut notes = active.iter().map(|b| &b.note);
            notes.any(|s| s.key == *key && s.structure == n.structure && s.form == steps::FORM)
        };
        self.brokers
            .iter()
            .filter(|n| n.members.iter().all(|key| seated(n, key)))
            .cloned()
            .collect()
    }

    /// Blocks whose parts all stay.
    fn whole_blocks(&self, active: &[Bound]) -> Vec<BlockNote> {
        let stays = |name: &String| active.iter().any(|b| composing::seat_name(b) == *name);
        let whole = |n: &&BlockNote| n.linked.iter().chain(&n.parts).all(stays);
        self.composed.iter().filter(whole).cloned().collect()
    }

    /// Bytes that seats hold, and what the host let go of for them.
    fn memory(&self, active: &[Bound], plan: &Plan) -> Result<MemoryNote, Error> {
        let operations = self.operations.iter().map(|o| o.packed_bytes);
        Ok(MemoryNote {
            packed_bytes: active
                .iter()
                .map(|b| b.packed_bytes)
                .chain(operations)
                .sum(),
            scratch_bytes: active.iter().map(|b| b.scratch_bytes).sum(),
            released: match self.options.release_host {
                true => Some(release::consume(self.model, plan)?),
                false => None,
            },
        })
    }

    /// Every number of rows that any site saw, once.
    fn rows(&self) -> Vec<u64> {
        let mut rows: Vec<u64> = self
            .seams
            .iter()
            .flat_map(|s| s.rows.iter().copied())
            .collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }
}

/// What passed by itself, where the union did not.
fn none_stays(units: &mut [UnitNote]) {
    for unit in units.iter_mut().filter(|u| u.outcome == "activated") {
        unit.outcome = "refused".into();
        unit.code = Some("union_failed".into());
        unit.reason = Some("passed alone; the union of all units did not".into());
    }
}

/// The scales bound forms really execute, with the dtype of each form.
fn executed<'b>(
    bounds: impl Iterator<Item = &'b Bound>,
    note: &stats::CalibrationNote,
) -> Result<PrecisionSpec, Error> {
    let mut spec = PrecisionSpec {
        source: note.source.clone(),
        ..PrecisionSpec::default()
    };
    for bound in bounds {
        let Some(dtype) = precision::activation_dtype(&bound.note.activation_format) else {
            continue;
        };
        for (name, values) in &bound.note.statistics {
            let (Some(point), [amax]) = (name.strip_suffix("|amax|tensor"), values.as_slice())
            else {
                continue;
            };
            let descriptor = Descriptor::calibrated(dtype, *amax, note.samples, note.percentile)?;
            spec.activations
                .insert(format!("{}|{point}", bound.note.key), descriptor);
        }
    }
    Ok(spec)
}

fn not_json(e: serde_json::Error) -> Error {
    Error::invalid(
        "record_invalid",
        format!("the receipt cannot be written as JSON: {e}"),
    )
}
