//! The gated door: discover, locate, calibrate, decide, settle ownership, bind, judge, re-check the union, commit.
//!
//! Stages are generic; what varies is declared by structures, schemes and forms. Every refusal along the way is a
//! row of the receipt, and the door itself fails only when nothing can be judged at all.

mod adjudicate;
mod adopt;
mod compose;
mod door;
mod residency;
mod wires;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use candle_core::Tensor;
use structures_graph::session::Plan;
use structures_graph::{OpId, ValueId};
use structures_plugin_api::formats::BlockFormat;
use structures_seams::{resolve_ownership, Claim};

use crate::adopt::{Adopted, Blocks, Wish};
use crate::bind::{brokers, installs, Bench, Bound, NotBound};
use crate::choose::{median_rows, order_decided, qualify, Choice, Pin, Wanted};
use crate::compose::{self as composing, BlockNote};
use crate::decisions::{self, Resolved};
use crate::digest;
use crate::environment::cpu_name;
use crate::error::Error;
use crate::gates::{Floors, OutputKind, Schedule, DEFAULT_MIN_SPEEDUP};
use crate::host::{Host, Loaded};
use crate::judge::{self, summary, Judge};
use crate::observe::{Conditionings, Watch};
use crate::operations::Operation;
use crate::precision::{self, Descriptor, PrecisionSpec};
use crate::progress::Progress;
use crate::receipt::{
    Assumption, CalibrationNote, CheckpointNote, ControlNote, MemoryNote, PluginNote, Receipt,
    RefusalNote, SeatNote, TimingNote, UnitNote, WireNote, SCHEMA,
};
use crate::release::{self, ReleaseNote};
use crate::samples::Samples;
use crate::schemes::{self, Decision, SchemeRecord, Selected};
use crate::seat::{OnGuardFail, Seat, SeatReport};
use crate::sites::{Site, Survey};
use crate::stats::{self, Calibration, CallContent, Collector, Content};
use crate::steps::{self, BrokerNote};
use crate::workload::{Runner, Scores, Workload};

pub use adjudicate::{adjudicate, Adjudication};
pub use door::{Certified, Handle, DEFAULT_FLOOR};

/// What a caller may choose.
#[derive(Clone, Debug)]
pub struct Options {
    /// Profile name, or `auto`.
    pub scheme: String,
    /// Phase; by the output's kind when absent.
    pub workload: Option<Workload>,
    /// Percentile across samples.
    pub percentile: f64,
    /// Only these structures; all when empty.
    pub structures: Vec<String>,
    /// Floors.
    pub floors: Floors,
    /// Smallest speed-up of a unit.
    pub min_speedup: f64,
    /// Rounds and iterations of paired timing.
    pub schedule: Schedule,
    /// What a contract miss does.
    pub on_guard_fail: OnGuardFail,
    /// Pinned forms.
    pub pins: Vec<Pin>,
    /// Score every position.
    pub all_positions: bool,
    /// Packed weights to take over before anything else.
    pub adopt: Option<Wish>,
    /// Let go of the host's own weights of the seats that stay.
    pub release_host: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            scheme: "auto".into(),
            workload: None,
            percentile: stats::DEFAULT_PERCENTILE,
            structures: Vec::new(),
            floors: Floors::default(),
            min_speedup: DEFAULT_MIN_SPEEDUP,
            schedule: Schedule::default(),
            on_guard_fail: OnGuardFail::Fallback,
            pins: Vec::new(),
            all_positions: false,
            adopt: None,
            release_host: false,
        }
    }
}

/// A judged model: the receipt, and the plan to run it with.
pub struct Attachment {
    /// Everything that was decided.
    pub receipt: Receipt,
    /// The seats that stay, and after them those of host operations on devices; empty when nothing was activated.
    pub seats: Vec<Arc<Seat>>,
    /// Seats that were adopted at load time.
    pub adopted: Vec<Arc<Seat>>,
    /// The host's plan with the adopted and the active seats.
    pub plan: Plan,
    /// The host's weights here are gone for good.
    for_good: bool,
}

/// What could not be detached, and why.
pub struct NotDetached {
    /// As it was.
    pub attachment: Box<Attachment>,
    /// `adopted_no_detach`, `released_for_good`.
    pub error: Error,
}

impl Attachment {
    /// Takes every seat off and keeps the record. The model was never changed: a plan held the seats, and with it they
    /// are gone; whoever still holds another handle to a seat holds only its ledger. Weights of the host that were let go
    /// come back as the host reads them.
    ///
    /// # Errors
    /// What was adopted belongs to the load, not to the attachment, and stays; so do seats that nothing is left behind.
    pub fn detach(self) -> Result<Receipt, NotDetached> {
        if self.for_good {
            let error = Error::refused(
                "released_for_good",
                format!(
                    "the host's weights of {} seats were released for good: open the model again to be without them",
                    self.seats.len()
                ),
            );
            let attachment = Box::new(self);
            return Err(NotDetached { attachment, error });
        }
        if self.adopted.is_empty() {
            return Ok(self.receipt);
        }
        let error = Error::refused(
            "adopted_no_detach",
            format!(
                "{} seats were adopted when the model was loaded, and every number was measured with them; open the \
                 model again without adopting to be rid of them",
                self.adopted.len()
            ),
        );
        let attachment = Box::new(self);
        Err(NotDetached { attachment, error })
    }

    /// Lets go of the host's own weights of these seats; a call that falls back brings them back.
    ///
    /// # Errors
    /// As [`release::consume`].
    pub fn release_host(&self, model: &Loaded) -> Result<ReleaseNote, Error> {
        release::consume(model, &self.plan)
    }

    /// The same for good: one way. What the seats do not serve is refused, and they cannot be detached.
    ///
    /// # Errors
    /// As [`release::finalise`].
    pub fn finalise(&mut self, model: &Loaded) -> Result<ReleaseNote, Error> {
        let note = release::finalise(model, &self.plan)?;
        self.for_good = true;
        Ok(note)
    }

    /// What is attached now, as one JSON document: device, seats with their contracts and counts, the summary, the
    /// decisions of this device, bytes held. Unlike the receipt it goes on changing.
    pub fn manifest(&self, host: &Host) -> serde_json::Value {
        let device = cpu_name();
        let reports =
            |seats: &[Arc<Seat>]| -> Vec<SeatReport> { seats.iter().map(|s| s.report()).collect() };
        let (seats, adopted) = (reports(&self.seats), reports(&self.adopted));
        let decisions: Vec<&decisions::Decision> = host
            .decisions
            .entries()
            .iter()
            .filter(|d| d.device == device)
            .collect();
        serde_json::json!({
            "schema": 1,
            "device": device,
            "receipt": self.receipt.digest,
            "seats": seats,
            "adopted": adopted,
            "summary": summary(&self.seats),
            "decisions": decisions,
            "memory": self.receipt.memory,
        })
    }
}

/// What is done, in this order, whatever the structures are: what the model offers, where it is in the graph, what is
/// measured, what the scheme says, who keeps which operation, which pairs are wired, what is bound and judged by itself,
/// what stays together.
pub const STAGES: [&str; 8] = [
    "discover",
    "locate",
    "calibrate",
    "scheme",
    "ownership",
    "wires",
    "bind",
    "gate",
];

/// See the module.
pub fn attach(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Attachment, Error> {
    let prepared = Prepared::new(host, model, samples, options, progress)?;
    prepared.judge(progress)
}

/// Seats that nobody judged.
pub struct Swaps {
    /// The host's plan with the seats.
    pub plan: Plan,
    /// The seats, for their ledgers.
    pub seats: Vec<Arc<Seat>>,
    /// What was not bound, and why.
    pub refused: Vec<RefusalNote>,
    /// What stays with the host, and why: the scheme keeps it, or another seat has its operations.
    pub kept: Vec<RefusalNote>,
    /// What was taken over at load time; its seats come first in `seats`.
    pub adopted: Option<Adopted>,
    /// Whether scales were fitted: then only the samples that are judged are held out.
    pub fitted: bool,
    /// The host's weights that were let go, where that was asked for.
    pub released: Option<ReleaseNote>,
}

/// Code of a seam that a recorded decision leaves with the host.
const DECIDED_HOST: &str = "decided_host";

/// Binds without judging: the caller owns the gate and must read the ledger.
pub fn auto_swaps(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Swaps, Error> {
    let mut prepared = Prepared::new(host, model, samples, options, progress)?;
    prepared.settle_adopted();
    let taken = match prepared.swap(options, progress) {
        Ok(taken) => taken,
        Err(e) => {
            // What was let go on the way comes back: nobody holds a seat now.
            release::restore(model)?;
            return Err(e);
        }
    };
    let plan = prepared.plan(installs(&taken))?;
    let all = prepared.adopted.iter().chain(&taken);
    let seats = all.map(|b| b.seat.clone()).collect();
    let released = match options.release_host {
        true => Some(release::consume(model, &plan)?),
        false => None,
    };
    Ok(Swaps {
        plan,
        seats,
        refused: prepared.refused,
        kept: prepared.kept,
        adopted: prepared.adoption,
        fitted: prepared.calibration.note.samples > 0,
        released,
    })
}

/// What `calibrate` found.
pub struct Measured {
    /// Reduced statistics.
    pub calibration: Calibration,
    /// The scheme that asked for them.
    pub selected: Selected,
    /// Points under a static scale -> the dtype that the forms the scheme routes to round to there.
    pub dtypes: BTreeMap<String, String>,
}

/// Measures what a scheme asks for and nothing more.
pub fn calibrate(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Measured, Error> {
    let prepared = Prepared::new(host, model, samples, options, progress)?;
    Ok(Measured {
        dtypes: prepared.scale_dtypes(),
        calibration: prepared.calibration,
        selected: prepared.selected,
    })
}

/// One settlement of ownership.
struct Round {
    winners: Vec<usize>,
    /// Site and the name of who keeps an operation it needs.
    losers: Vec<(usize, String)>,
    /// Operation -> who keeps it: seats that stay, and this round's winners.
    owners: HashMap<OpId, String>,
}

/// Everything that comes before the first bind.
struct Prepared<'a> {
    host: &'a Host,
    model: &'a Loaded,
    options: &'a Options,
    workload: Workload,
    kind: OutputKind,
    survey: Survey<'a>,
    /// Per site.
    seams: Vec<schemes::Seam>,
    decisions: Vec<Decision>,
    scheme_plan: schemes::Plan,
    selected: Selected,
    /// Name of the device seams run on, as decisions know it.
    device: String,
    calibration: Calibration,
    contents: HashMap<ValueId, Tensor>,
    judged: Vec<Vec<u32>>,
    /// Refusals after the survey.
    refused: Vec<RefusalNote>,
    kept: Vec<RefusalNote>,
    /// Seats of every plan.
    adopted: Vec<Bound>,
    adoption: Option<Adopted>,
    /// Wires that were bound.
    negotiated: Vec<WireNote>,
    /// Brokers that were formed.
    brokers: Vec<BrokerNote>,
    /// Blocks that were composed.
    composed: Vec<BlockNote>,
    /// Host operations of devices, judged with the union.
    operations: Vec<Operation>,
    /// What was done, in order.
    stages: Vec<&'static str>,
}

impl<'a> Prepared<'a> {
    fn new(
        host: &'a Host,
        model: &'a Loaded,
        samples: &'a Samples,
        options: &'a Options,
        progress: &dyn Progress,
    ) -> Result<Self, Error> {
        let graph = model.session().graph().clone();
        let kind = OutputKind::of_outputs(graph.outputs.iter().map(|(name, _)| name.as_str()));
        options.floors.check_kind(kind)?;
        let workload = options.workload.unwrap_or(match kind {
            OutputKind::Distribution => Workload::Decode,
            OutputKind::Values => Workload::Prefill,
        });
        host.check_structures(&options.structures)?;
        host.check_pins(&options.pins)?;
        model.check_room(samples)?;
        stats::percentile(&[0.0], options.percentile)?;
        let selected = host.schemes.select(&options.scheme, &host.capabilities())?;

        progress.stage("discover", 0);
        let survey = host.survey(model, &options.structures)?;
        let mut seams: Vec<schemes::Seam> =
            survey.sites.iter().map(|s| scheme_seam(host, s)).collect();
        let mut scheme_plan = schemes::plan(selected.scheme.as_ref(), &seams)?;
        let conditionings = conditionings(&survey);
        scheme_plan
            .contents
            .extend(conditionings.iter().map(|(key, _)| key.clone()));
        // Known before a sample is spent, and recorded then.
        let refused = scheme_plan
            .undelivered_forms(selected.scheme.as_ref(), &seams)
            .into_iter()
            .map(|form| RefusalNote {
                path: survey.sites[form.seam].seam.path.clone(),
                structure: seams[form.seam].structure.clone(),
                stage: "plan".into(),
                code: "statistic_unmeasurable".into(),
                reason: form.reason,
                plugin: Some(form.plugin),
                form: Some(form.form),
            })
            .collect();

        // A scheme that asks for no statistic spends no sample on fitting.
        let judged: Vec<Vec<u32>> = if scheme_plan.is_empty() {
            samples.samples().iter().map(|s| s.tokens.clone()).collect()
        } else {
            samples.judged().map(<[u32]>::to_vec).collect()
        };
        let fitted: Vec<&[u32]> = if scheme_plan.is_empty() {
            Vec::new()
        } else {
            samples.fitted().collect()
        };
        let first = judged
            .first()
            .ok_or_else(|| Error::invalid("no_samples", "there is no sample to judge on"))?;
        // Rows follow the length of a sample: the longest one shows the largest.
        let longest = judged.iter().max_by_key(|s| s.len()).unwrap_or(first);

        let runner = Runner::new(model.session(), longest.len());
        let plan = model.session().host_plan();
        progress.stage("calibrate", fitted.len() + 1);
        let (mut calibration, contents) = measure(
            model,
            &survey,
            &scheme_plan,
            &fitted,
            longest,
            samples,
            options,
            progress,
        )?;
        let rows = observe_rows(
            &runner,
            &plan,
            &survey,
            longest,
            workload,
            options.all_positions,
        )?;
        calibration.contents.extend(observe_steps(
            &runner,
            &plan,
            &conditionings,
            samples,
            workload,
            options.all_positions,
        )?);
        // A judged sample that was fitted too says nothing about others, however it got there.
        let seen = judged
            .iter()
            .filter(|j| fitted.contains(&j.as_slice()))
            .count();
        calibration.note.held_out = judged.len() - seen;
        for (i, seam) in seams.iter_mut().enumerate() {
            seam.rows = rows.get(&i).cloned().unwrap_or_default();
            for point in &seam.points {
                let key = format!("{}|{point}", seam.key);
                seam.statistics.insert(
                    point.clone(),
                    schemes::PointStatistics {
                        amax: calibration.amax.get(&key).copied(),
                        channel_amax: calibration.channel_amax.get(&key).cloned(),
                        second_moment: calibration.second_moment.get(&key).cloned(),
                    },
                );
            }
        }
        let mut decisions = schemes::decide(selected.scheme.as_ref(), &seams)?;
        let device = cpu_name();
        for (seam, decision) in seams.iter().zip(&mut decisions) {
            let pinned = options.pins.iter().any(|p| p.structure == seam.structure);
            let decided = host
                .decisions
                .lookup(&device, &seam.structure, median_rows(&seam.rows));
            if let (Some(d), false) = (decided.filter(|d| d.winner == decisions::HOST), pinned) {
                *decision = Decision::Keep {
                    code: DECIDED_HOST.into(),
                    reason: format!("recorded for {} rows on {device}: the host", d.band()),
                };
            }
        }
        let mut kept = Vec::new();
        for (site, decision) in survey.sites.iter().zip(&decisions) {
            if let Decision::Keep { code, reason } = decision {
                kept.push(RefusalNote {
                    path: site.seam.path.clone(),
                    structure: site.spec.name.clone(),
                    stage: "scheme".into(),
                    code: code.clone(),
                    reason: reason.clone(),
                    plugin: None,
                    form: None,
                });
            }
        }
        let mut prepared = Prepared {
            host,
            model,
            options,
            workload,
            kind,
            survey,
            seams,
            decisions,
            scheme_plan,
            selected,
            device,
            calibration,
            contents,
            judged,
            refused,
            kept,
            adopted: Vec::new(),
            adoption: None,
            negotiated: Vec::new(),
            brokers: Vec::new(),
            composed: Vec::new(),
            operations: Vec::new(),
            stages: vec!["discover", "locate", "calibrate", "scheme"],
        };
        if let Some(wish) = &options.adopt {
            progress.stage("adopt", 0);
            prepared.adopt(wish)?;
        }
        Ok(prepared)
    }

    /// Binds what can be bound, without judging.
    fn swap(&mut self, options: &Options, progress: &dyn Progress) -> Result<Vec<Bound>, Error> {
        let mut taken: Vec<Bound> = Vec::new();
        let mut alive: BTreeSet<usize> = self.eligible().collect();
        progress.stage("bind", alive.len());
        while !alive.is_empty() {
            let round = self.ownership(&alive, &taken);
            if round.winners.is_empty() {
                self.lost(round.losers, "");
                break;
            }
            for &site in &round.winners {
                alive.remove(&site);
                progress.tick();
                let mut bound = None;
                let choices = self.choices(site);
                if choices.is_empty() {
                    let note = self.no_form(site);
                    self.refuse(note);
                }
                for choice in choices {
                    // A yardstick is not worth running unless somebody asked for it.
                    let structure = &self.survey.sites[site].spec.name;
                    let pinned = options.pins.iter().any(|p| p.structure == *structure);
                    if choice.reference && !pinned {
                        let note = self.yardstick(site, &choice);
                        self.refuse(note);
                        continue;
                    }
                    match self.bind(site, &choice, &round.owners) {
                        Ok(b) => {
                            bound = Some(b);
                            break;
                        }
                        Err(refused) => self.refuse(refused.note),
                    }
                }
                taken.extend(bound);
                // Seat by seat, so that packed and plain weights are together in memory for one seat only. A block covers
                // what others may still be bound at.
                let block = self.survey.sites[site]
                    .spec
                    .tags
                    .iter()
                    .any(|t| t == compose::BLOCK);
                if self.options.release_host && !block {
                    release::consume(self.model, &self.plan(installs(&taken))?)?;
                }
            }
        }
        brokers(&taken);
        Ok(taken)
    }

    /// Records a stage when it is first done.
    fn did(&mut self, stage: &'static str) {
        if !self.stages.contains(&stage) {
            self.stages.push(stage);
        }
    }

    /// Records a refusal, unless the plan already told the same of this form here.
    fn refuse(&mut self, note: RefusalNote) {
        let same = |told: &RefusalNote| {
            told.path == note.path
                && told.structure == note.structure
                && told.code == note.code
                && told.plugin == note.plugin
                && told.form == note.form
        };
        if !self.refused.iter().any(same) {
            self.refused.push(note);
        }
    }

    /// No form at all for what the scheme wants at a site.
    fn no_form(&self, site: usize) -> RefusalNote {
        let wanted = match &self.decisions[site] {
            Decision::Route { format, .. } => format!("in format `{format}`"),
            _ => "that does not quantise".into(),
        };
        let s = &self.survey.sites[site];
        RefusalNote {
            path: s.seam.path.clone(),
            structure: s.spec.name.clone(),
            stage: "choose".into(),
            code: "format_no_variant".into(),
            reason: format!("no loaded plugin has a form of `{}` {wanted}", s.spec.name),
            plugin: None,
            form: None,
        }
    }

    /// A form of a plugin that calls itself a reference, passed over.
    fn yardstick(&self, site: usize, choice: &Choice<'_>) -> RefusalNote {
        let s = &self.survey.sites[site];
        let (name, plugin, form) = (&s.spec.name, choice.plugin, &choice.form.name);
        RefusalNote {
            path: s.seam.path.clone(),
            structure: name.clone(),
            stage: "choose".into(),
            code: "reference_unpinned".into(),
            reason: format!(
                "`{plugin}` is a reference to compare with, which is bound without a gate only when pinned: \
                 {name}={plugin}:{form}"
            ),
            plugin: Some(plugin.into()),
            form: Some(form.clone()),
        }
    }

    /// Records sites that lost an operation they need.
    fn lost(&mut self, losers: Vec<(usize, String)>, ended: &str) {
        for (site, owner) in losers {
            let s = &self.survey.sites[site];
            self.kept.push(RefusalNote {
                path: s.seam.path.clone(),
                structure: s.spec.name.clone(),
                stage: "ownership".into(),
                code: "owned_by".into(),
                reason: format!("`{owner}` keeps an operation this seam needs{ended}"),
                plugin: None,
                form: None,
            });
        }
    }

    /// FP8 where no loaded plugin has a form to ask.
    fn scale_dtypes(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for (site, decision) in self.survey.sites.iter().zip(&self.decisions) {
            let Decision::Route { format, .. } = decision else {
                continue;
            };
            let forms = self.host.forms();
            let mut routed = forms
                .iter()
                .map(|c| c.form)
                .filter(|f| f.structure == site.spec.name && f.format == *format)
                .peekable();
            if routed.peek().is_none() {
                let keys = site.spec.points.iter().map(|point| site.point_key(point));
                found.extend(keys.map(|key| (key, precision::FP8.to_string())));
                continue;
            }
            for form in routed {
                let Some(dtype) = precision::activation_dtype(&form.activation_format) else {
                    continue;
                };
                let fixed = form.statistics.iter().filter(|s| s.granularity == "tensor");
                for s in fixed.filter(|s| s.statistic == "amax") {
                    let key = site.point_key(&s.point);
                    found.entry(key).or_insert_with(|| dtype.to_string());
                }
            }
        }
        found
    }

    /// Sites the scheme did not keep on the host and nothing adopted.
    fn eligible(&self) -> impl Iterator<Item = usize> + '_ {
        let adopted = |i: &usize| {
            let id = self.survey.sites[*i].id();
            self.adopted.iter().any(|b| b.install.name == id)
        };
        (0..self.survey.sites.len())
            .filter(|i| !matches!(self.decisions[*i], Decision::Keep { .. }))
            .filter(move |i| !adopted(i))
    }

    /// Forms for a site in the order of choice.
    fn choices(&self, site: usize) -> Vec<Choice<'a>> {
        let structure = &self.survey.sites[site].spec.name;
        let wanted = match &self.decisions[site] {
            Decision::Route { format, .. } => Wanted::Format(format),
            Decision::Default => Wanted::Unquantised,
            Decision::Keep { .. } => return Vec::new(),
        };
        self.ordered(structure, wanted, median_rows(&self.seams[site].rows))
    }

    /// Forms of a structure: pin, then what is recorded for these rows on this device, then as declared.
    fn ordered(&self, structure: &str, wanted: Wanted<'_>, rows: u64) -> Vec<Choice<'a>> {
        let recorded: Vec<Pin> = self
            .host
            .decisions
            .lookup(&self.device, structure, rows)
            .and_then(|d| Pin::parse(&format!("{structure}={}", d.winner)).ok())
            .into_iter()
            .collect();
        let pins = &self.options.pins;
        order_decided(&self.host.forms(), structure, wanted, pins, &recorded)
    }

    /// Who named the first form of every structure at every number of rows, and what fell through.
    fn resolved(&self) -> Vec<Resolved> {
        let mut groups: BTreeMap<(&str, u64), Vec<usize>> = BTreeMap::new();
        for (i, site) in self.survey.sites.iter().enumerate() {
            let rows = median_rows(&self.seams[i].rows);
            let group = groups.entry((&site.spec.name, rows)).or_default();
            group.push(i);
        }
        let store = &self.host.decisions;
        groups
            .into_iter()
            .map(|((structure, rows), sites)| {
                let misses = |choice: &Choice<'_>| {
                    let mut first = None;
                    for i in &sites {
                        let (site, seen) = (&self.survey.sites[*i], &self.seams[*i].rows);
                        match qualify(site, choice, "f32", seen) {
                            Ok(_) => return None,
                            Err(no) => {
                                first = first.or(Some(format!("{}: {}", no.code, no.reason)))
                            }
                        }
                    }
                    first
                };
                let site = sites[0];
                let ordered = match &self.decisions[site] {
                    Decision::Keep { .. } => Vec::new(),
                    _ => self.choices(site),
                };
                let pins = &self.options.pins;
                store.resolve(&self.device, structure, rows, &ordered, pins, &misses)
            })
            .collect()
    }

    /// Who keeps the operations, among sites that are still alive, against seats that are taken. Losers by seats
    /// that stay are final; losers among the alive come back when their winner ends without a form.
    fn ownership(&self, alive: &BTreeSet<usize>, taken: &[Bound]) -> Round {
        let mut owners: HashMap<OpId, String> = HashMap::new();
        for b in self.adopted.iter().chain(taken) {
            owners.extend(b.install.ops.iter().map(|op| (*op, b.install.name.clone())));
        }
        let mut claims = Vec::new();
        let mut losers = Vec::new();
        for &i in alive {
            let site = &self.survey.sites[i];
            let ops = &site.spans[self.claimed_span(i)].ops;
            if let Some(owner) = ops.iter().find_map(|op| owners.get(op)) {
                losers.push((i, owner.clone()));
                continue;
            }
            claims.push(Claim {
                seam: i,
                precedence: site.spec.precedence,
                ops: ops.clone(),
            });
        }
        let settled = resolve_ownership(&claims);
        for claim in claims.iter().filter(|c| settled.winners.contains(&c.seam)) {
            let id = self.survey.sites[claim.seam].id();
            owners.extend(claim.ops.iter().map(|op| (*op, id.clone())));
        }
        let by = |l: &structures_seams::Owned| (l.seam, self.survey.sites[l.by].id());
        losers.extend(settled.losers.iter().map(by));
        Round {
            winners: settled.winners,
            losers,
            owners,
        }
    }

    /// The span the first choice would take; the widest when there is none.
    fn claimed_span(&self, site: usize) -> usize {
        let s = &self.survey.sites[site];
        self.choices(site)
            .iter()
            .find_map(|c| qualify(s, c, "f32", &self.seams[site].rows).ok())
            .unwrap_or(0)
    }

    /// Binds a form at a site. `owners` says who keeps which operation: the span this form takes may be wider than
    /// the one the site won with.
    fn bind(
        &self,
        site: usize,
        choice: &Choice<'_>,
        owners: &HashMap<OpId, String>,
    ) -> Result<Bound, NotBound> {
        let s = &self.survey.sites[site];
        let rows = &self.seams[site].rows;
        let not = |note| {
            Err(NotBound {
                note,
                distrust: false,
            })
        };
        let span = match qualify(s, choice, "f32", rows) {
            Ok(span) => span,
            Err(note) => return not(note),
        };
        let blank = |code: &str, reason: String| RefusalNote {
            path: s.seam.path.clone(),
            structure: s.spec.name.clone(),
            stage: "choose".into(),
            code: code.into(),
            reason,
            plugin: Some(choice.plugin.into()),
            form: Some(choice.form.name.clone()),
        };
        let me = s.id();
        let other = s.spans[span]
            .ops
            .iter()
            .find_map(|op| owners.get(op).filter(|o| **o != me));
        if let Some(owner) = other {
            let name = &s.spans[span].name;
            let reason = format!("`{owner}` keeps an operation of span `{name}`");
            return not(blank("owned_by", reason));
        }
        if let Err(reason) = self.host.check_memory() {
            return not(blank("insufficient_memory", reason));
        }
        if let Err((code, reason)) = self.scheme_admits(site, choice) {
            return not(blank(code, reason));
        }
        let scheme = match &self.decisions[site] {
            Decision::Route { params, .. } => params.clone().into_iter().collect(),
            _ => BTreeMap::new(),
        };
        let bench = Bench {
            session: self.model.session(),
            calibration: &self.calibration,
            contents: &self.contents,
            on_guard_fail: self.options.on_guard_fail,
            scheme: &scheme,
            blocks: &Blocks::new(),
            shelf: None,
        };
        if choice.is_own() {
            return bench.bind_table(s, span, choice, rows);
        }
        let Some(plugin) = self.host.registry.plugin(choice.plugin) else {
            let reason = format!("plugin `{}` is not loaded", choice.plugin);
            return not(blank("plugin_unknown", reason));
        };
        bench.bind(s, span, choice, plugin, rows)
    }

    /// Whether the scheme delivers what a form needs at a site and allows what it does there.
    fn scheme_admits(
        &self,
        site: usize,
        choice: &Choice<'_>,
    ) -> Result<(), (&'static str, String)> {
        let form = scheme_form(choice);
        if let Some(reason) = self.scheme_plan.undelivered(&self.seams[site], &form) {
            return Err(("statistic_unmeasurable", reason));
        }
        if let Some(dtype) = &choice.form.rounds {
            if !self.selected.scheme.allows_rounding(dtype) {
                let scheme = self.selected.scheme.name();
                let reason =
                    format!("the form rounds to {dtype}, which scheme {scheme} does not allow");
                return Err(("rounds_not_allowed", reason));
            }
        }
        match &self.decisions[site] {
            Decision::Route { params, .. } => match schemes::unserved(params, &form) {
                Some(reason) => Err(("format_no_variant", reason)),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// The host's rows for every judged sample, and again for the first: they must be the same bits, or nothing can
    /// be judged against them.
    fn control(&self, plan: &Plan, progress: &dyn Progress) -> Result<Vec<Scores>, Error> {
        progress.stage("control", self.judged.len() + 1);
        let runner = Runner::new(self.model.session(), self.judged[0].len());
        let score = |sample: &Vec<u32>| {
            let all = self.options.all_positions;
            let samples = std::slice::from_ref(sample);
            runner.score(plan, samples, self.workload, all, None, || progress.tick())
        };
        let reference: Vec<Scores> = self.judged.iter().map(score).collect::<Result<_, _>>()?;
        if !score(&self.judged[0])?.identical(&reference[0]) {
            return Err(Error::Control {
                detail: "first judged sample, twice before attaching".into(),
            });
        }
        Ok(reference)
    }

    /// What units are judged with.
    fn bench<'j>(
        &self,
        samples: &'j [Vec<u32>],
        host: Plan,
        reference: Vec<Scores>,
        progress: &'j dyn Progress,
    ) -> Judge<'j>
    where
        'a: 'j,
    {
        let captured = self.captured(&host);
        Judge {
            captured,
            runner: Runner::new(self.model.session(), self.judged[0].len()),
            host,
            base: self.base(),
            samples,
            reference,
            workload: self.workload,
            all_positions: self.options.all_positions,
            kind: self.kind,
            floors: self.options.floors.clone(),
            min_speedup: self.options.min_speedup,
            schedule: self.options.schedule,
            judged_on: self.judged_on(),
            progress,
        }
    }

    /// Whether both arms are judged in the captured form.
    fn captured(&self, host: &Plan) -> bool {
        !self.host.eager
            && self.workload == Workload::Decode
            && judge::capturable(self.model.session(), host)
    }

    fn judge(mut self, progress: &dyn Progress) -> Result<Attachment, Error> {
        let judged = self.judged.clone();
        if !self.adopted.is_empty() {
            let plain = self.model.session().host_plan();
            let reference = self.control(&plain, progress)?;
            let judge = self.bench(&judged, plain, reference, progress);
            self.adopted_parity(&judge)?;
            self.settle_adopted();
        }
        let reference = self.control(&self.plan(Vec::new())?, progress)?;
        let judge = self.bench(&judged, self.plan(Vec::new())?, reference, progress);
        let mut active: Vec<Bound> = Vec::new();
        let mut units: Vec<UnitNote> = Vec::new();
        let mut alive: BTreeSet<usize> = self.eligible().collect();
        self.did("ownership");
        self.did("wires");
        progress.stage("wires", 0);
        active.extend(self.wires(&judge, &mut alive, &mut units)?);
        let mut lost: Vec<(usize, String)>;
        loop {
            let round = self.ownership(&alive, &active);
            lost = round.losers;
            // One structure at a time, the highest precedence first: what loses to it comes back, if it comes back,
            // before its own structure is judged, so there is one unit a (structure, form).
            let rank = |i: &usize| {
                let spec = self.survey.sites[*i].spec;
                (std::cmp::Reverse(spec.precedence), spec.name.clone())
            };
            let Some(first) = round.winners.iter().min_by_key(|i| rank(i)) else {
                break;
            };
            let name = self.survey.sites[*first].spec.name.clone();
            let sites: Vec<usize> = round
                .winners
                .iter()
                .copied()
                .filter(|i| self.survey.sites[*i].spec.name == name)
                .collect();
            sites.iter().for_each(|site| {
                alive.remove(site);
            });
            active.extend(self.structure(&judge, &name, sites, &round.owners, &mut units)?);
        }
        self.compose(&judge, &mut active, &mut units)?;
        let union = self.union(&judge, &mut active, progress)?;
        let ended = match active.is_empty() {
            true => ", and ended with the union",
            false => "",
        };
        self.lost(lost, ended);
        let detach_identical = {
            let again = judge.runner.score(
                &judge.host,
                &self.judged[..1],
                self.workload,
                self.options.all_positions,
                None,
                || {},
            )?;
            again.identical(&judge.reference[0])
        };
        if !detach_identical {
            // A form wrote where it must not; what it did to the host cannot be told apart from its own results.
            let detail = "before attaching and after detaching, first judged sample".into();
            return Err(Error::Control { detail });
        }
        self.commit(active, units, union, detach_identical)
    }

    /// Tries the forms of one structure in order; the first that passes stays.
    fn structure(
        &mut self,
        judge: &Judge<'_>,
        name: &str,
        mut sites: Vec<usize>,
        owners: &HashMap<OpId, String>,
        units: &mut Vec<UnitNote>,
    ) -> Result<Vec<Bound>, Error> {
        let mut active = Vec::new();
        // Sites of one structure may be routed differently: one unit a (structure, form).
        while let Some(first) = sites.first().copied() {
            let decision = self.decisions[first].clone();
            let (mine, rest): (Vec<usize>, Vec<usize>) = sites
                .into_iter()
                .partition(|s| self.decisions[*s] == decision);
            sites = rest;
            let choices = self.choices(first);
            if choices.is_empty() {
                for site in &mine {
                    let note = self.no_form(*site);
                    self.refused.push(note);
                }
                continue;
            }
            // What a form could not be bound at is offered to the next one.
            let mut open = mine;
            for choice in choices {
                if open.is_empty() {
                    break;
                }
                if let Some(bounds) = self.unit(judge, name, &open, &choice, owners, units)? {
                    open.retain(|site| {
                        let key = &self.survey.sites[*site].seam.key;
                        !bounds.iter().any(|b| b.note.key == *key)
                    });
                    active.extend(bounds);
                }
            }
        }
        Ok(active)
    }

    /// One unit: binds a form at every site it can, judges them together.
    fn unit(
        &mut self,
        judge: &Judge<'_>,
        name: &str,
        sites: &[usize],
        choice: &Choice<'_>,
        owners: &HashMap<OpId, String>,
        units: &mut Vec<UnitNote>,
    ) -> Result<Option<Vec<Bound>>, Error> {
        let device = Some(choice.device).filter(|d| *d != 0);
        let at = device.map_or(String::new(), |d| format!("@{d}"));
        let label = format!("{name} {}:{}{at}", choice.plugin, choice.form.name);
        judge.progress.stage(&format!("bind {label}"), sites.len());
        self.did("bind");
        let mut bounds: Vec<Bound> = Vec::new();
        let mut verdict: Option<(String, String)> = None;
        let mut last = None;
        for site in sites {
            judge.progress.tick();
            match self.bind(*site, choice, owners) {
                Ok(b) => bounds.push(b),
                Err(refused) => {
                    last = Some((refused.note.code.clone(), refused.note.reason.clone()));
                    if refused.distrust {
                        let path = &refused.note.path;
                        let reason = format!("at `{path}`: {}", refused.note.reason);
                        verdict = Some((refused.note.code.clone(), reason));
                        break;
                    }
                    self.refuse(refused.note);
                }
            }
        }
        if verdict.is_none() && bounds.is_empty() {
            let (code, reason) = last.unwrap_or_default();
            verdict = Some((
                code,
                format!("no site could be bound; the last refusal: {reason}"),
            ));
        }
        let mut note = match verdict {
            Some((code, reason)) => UnitNote {
                seams: sites.len(),
                paths: sites
                    .iter()
                    .map(|s| self.survey.sites[*s].seam.key.clone())
                    .collect(),
                outcome: "refused".into(),
                band: "unknown".into(),
                code: Some(code),
                reason: Some(reason),
                ..UnitNote::default()
            },
            None => {
                judge
                    .progress
                    .stage(&format!("judge {label}"), self.judging());
                self.brokers.extend(brokers(&bounds));
                self.did("gate");
                let seats: Vec<Arc<Seat>> = bounds.iter().map(|b| b.seat.clone()).collect();
                judge.judge(installs(&bounds), &seats, &self.rows_at(&bounds))?
            }
        };
        note.name = name.into();
        note.structure = name.into();
        note.form = choice.form.name.clone();
        note.plugin = choice.plugin.into();
        note.device = device;
        let passed = note.outcome == "activated";
        units.push(note);
        Ok(passed.then_some(bounds))
    }

    /// Winners together, judged again; any failure refuses all of them.
    fn union(
        &mut self,
        judge: &Judge<'_>,
        active: &mut Vec<Bound>,
        progress: &dyn Progress,
    ) -> Result<Option<UnitNote>, Error> {
        if active.is_empty() {
            return Ok(None);
        }
        progress.stage("judge union", self.judging());
        let together = |me: &Self, operations: &[Operation]| {
            let mut seats: Vec<Arc<Seat>> = active.iter().map(|b| b.seat.clone()).collect();
            let mut all = installs(active.iter());
            seats.extend(residency::seats(operations));
            all.extend(operations.iter().map(|o| o.install.clone()));
            let mut note = judge.judge(all, &seats, &me.rows_at(active.iter()))?;
            note.seams = active.len();
            note.paths.truncate(active.len());
            note.operations = operations.len();
            Ok::<_, Error>(note)
        };
        // In a captured step a seat on a device takes values from host memory and leaves them there.
        let operations = match judge.captured {
            true => Vec::new(),
            false => self.operations(active)?,
        };
        let mut note = together(self, &operations)?;
        if note.outcome == "activated" {
            self.operations = operations;
        } else if !operations.is_empty() {
            let (code, why) = (note.code.clone(), note.reason.clone());
            self.gave_up_operations(
                &operations,
                &code.unwrap_or_default(),
                &why.unwrap_or_default(),
            );
            note = together(self, &[])?;
        }
        note.name = "union".into();
        let names = |f: fn(&SeatNote) -> String| -> String {
            let set: BTreeSet<String> = active.iter().map(|b| f(&b.note)).collect();
            set.into_iter().collect::<Vec<_>>().join("+")
        };
        note.structure = names(|n| n.structure.clone());
        note.form = names(|n| n.form.clone());
        note.plugin = names(|n| n.plugin.clone());
        if note.outcome != "activated" {
            let code = note.code.take().unwrap_or_default();
            let reason = note.reason.take().unwrap_or_default();
            note.reason = Some(format!("union: {code}: {reason}"));
            note.code = Some("union_failed".into());
            active.clear();
        }
        Ok(Some(note))
    }

    /// Some of the judged samples are among those the scales were fitted on.
    fn fit_residual(&self) -> bool {
        self.calibration.note.held_out < self.judged.len()
    }

    /// Steps of judging one unit, for progress.
    fn judging(&self) -> usize {
        let schedule = self.options.schedule;
        self.judged.len() + 2 * schedule.rounds() as usize * (schedule.iters() as usize + 1)
    }

    fn judged_on(&self) -> String {
        let (held_out, all) = (self.calibration.note.held_out, self.judged.len());
        match held_out {
            _ if !self.fit_residual() => "held-out samples".into(),
            0 => "the samples scales were fitted on (a fit residual)".into(),
            n => format!("{n} held-out samples of {all}, the rest a fit residual"),
        }
    }

    /// Rows observed at these seats, each as often as at the seat that saw it most.
    fn rows_at<'b>(&self, bounds: impl IntoIterator<Item = &'b Bound>) -> Vec<u64> {
        let mut most: BTreeMap<u64, usize> = BTreeMap::new();
        for bound in bounds {
            let here = |i: &usize| {
                let site = &self.survey.sites[*i];
                site.seam.key == bound.note.key && site.spec.name == bound.note.structure
            };
            let Some(site) = (0..self.seams.len()).find(here) else {
                continue;
            };
            let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
            for rows in &self.seams[site].rows {
                *seen.entry(*rows).or_default() += 1;
            }
            for (rows, times) in seen {
                let most = most.entry(rows).or_default();
                *most = times.max(*most);
            }
        }
        let each = most.into_iter();
        each.flat_map(|(rows, times)| std::iter::repeat_n(rows, times))
            .collect()
    }

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

    fn commit(
        mut self,
        active: Vec<Bound>,
        mut units: Vec<UnitNote>,
        union: Option<UnitNote>,
        detach_identical: bool,
    ) -> Result<Attachment, Error> {
        if active.is_empty() {
            for unit in units.iter_mut().filter(|u| u.outcome == "activated") {
                unit.outcome = "refused".into();
                unit.code = Some("union_failed".into());
                unit.reason = Some("passed alone; the union of all units did not".into());
            }
        }
        let mut seats: Vec<Arc<Seat>> = active.iter().map(|b| b.seat.clone()).collect();
        seats.extend(residency::seats(&self.operations));
        let ledger = summary(&seats);
        let mut all = installs(&active);
        all.extend(self.operations.iter().map(|o| o.install.clone()));
        let plan = self.plan(all)?;
        let adopted: Vec<Arc<Seat>> = self.adopted.iter().map(|b| b.seat.clone()).collect();
        let schedule = self.options.schedule;
        let threads = structures_loader::pool::Pool::global().threads();
        let form = match self.captured(&self.plan(Vec::new())?) {
            true => "captured",
            false => "eager",
        };
        let note = self.calibration.note.clone();
        let used: BTreeSet<&str> = units
            .iter()
            // Both ends of a wire are named.
            .flat_map(|u| u.plugin.split('+'))
            .chain(self.adopted.iter().map(|b| b.note.plugin.as_str()))
            .filter(|p| !p.is_empty())
            .collect();
        let mut refused = std::mem::take(&mut self.survey.refused);
        refused.append(&mut self.refused);
        let mut receipt = Receipt {
            schema: SCHEMA,
            environment: self.host.environment(),
            model: self.model.name().into(),
            checkpoint: CheckpointNote {
                file: self.model.file(),
                hash: self.model.hash()?,
                sha256: self.model.sha256()?,
                architecture: self.model.architecture(),
                dtype: "f32".into(),
            },
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
            timing: TimingNote {
                form: form.into(),
                method: "paired, alternating; medians of per-round ratios".into(),
                rounds: schedule.rounds() as usize,
                iters: schedule.iters() as usize,
                threads,
                baseline: match adopted.is_empty() {
                    true => format!("session on candle f32, {form}, {threads} threads"),
                    // Both arms have it: what was adopted is not judged for speed.
                    false => format!(
                        "session on candle f32 with {} adopted seats, {form}, {threads} threads",
                        adopted.len()
                    ),
                },
                iteration: match self.workload {
                    Workload::Decode => "one token after a prefilled prompt".into(),
                    Workload::Prefill => format!("one prompt of {} tokens", self.judged[0].len()),
                },
            },
            calibration: CalibrationNote {
                note,
                fit_residual: self.fit_residual(),
                rows: self.rows(),
            },
            control: ControlNote {
                // Anything else ended the door in `control`, and after detaching in `judge`.
                repeat_identical: true,
                detach_identical,
            },
            plugins: self
                .host
                .registry
                .loaded()
                .iter()
                .filter(|p| used.contains(p.id()))
                .map(|p| PluginNote {
                    id: p.id().into(),
                    version: p.description().version.clone(),
                    sha256: p.sha256().into(),
                })
                .collect(),
            decisions: self.resolved(),
            spec_digests: self
                .survey
                .sites
                .iter()
                .map(|s| {
                    (
                        format!("{}@{}", s.spec.name, s.spec.version),
                        s.spec.digest.clone(),
                    )
                })
                .collect(),
            assumed: self
                .survey
                .sites
                .iter()
                .flat_map(|s| {
                    s.seam.assumptions.iter().map(|a| Assumption {
                        path: s.seam.path.clone(),
                        structure: s.spec.name.clone(),
                        text: a.text.clone(),
                    })
                })
                .collect(),
            refused,
            kept_host: std::mem::take(&mut self.kept),
            adopted: self.adoption.take(),
            negotiated: {
                let stays = |key: &str, structure: &str| {
                    let mut notes = active.iter().map(|b| &b.note);
                    notes.any(|n| n.key == key && n.structure == structure && n.wire.is_some())
                };
                for wire in &mut self.negotiated {
                    let ends = [&wire.producer, &wire.consumer];
                    wire.active = ends.iter().all(|e| stays(&e.key, &e.structure));
                }
                std::mem::take(&mut self.negotiated)
            },
            brokers: {
                let seated = |n: &&BrokerNote, key: &String| {
                    let mut notes = active.iter().map(|b| &b.note);
                    notes.any(|s| {
                        s.key == *key && s.structure == n.structure && s.form == steps::FORM
                    })
                };
                self.brokers
                    .iter()
                    .filter(|n| n.members.iter().all(|key| seated(n, key)))
                    .cloned()
                    .collect()
            },
            blocks: {
                let stays = |name: &String| active.iter().any(|b| composing::seat_name(b) == *name);
                let whole = |n: &&BlockNote| n.linked.iter().chain(&n.parts).all(stays);
                self.composed.iter().filter(whole).cloned().collect()
            },
            device_operations: residency::notes(&self.operations),
            stages: self.stages.iter().map(|s| (*s).to_string()).collect(),
            units,
            union,
            ledger,
            seams_active: active.iter().map(|b| b.note.key.clone()).collect(),
            memory: MemoryNote {
                packed_bytes: {
                    let operations = self.operations.iter().map(|o| o.packed_bytes);
                    active
                        .iter()
                        .map(|b| b.packed_bytes)
                        .chain(operations)
                        .sum()
                },
                scratch_bytes: active.iter().map(|b| b.scratch_bytes).sum(),
                released: match self.options.release_host {
                    true => Some(release::consume(self.model, &plan)?),
                    false => None,
                },
            },
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
}

/// Rows of the slots that a receipt says were handed over packed, in the formats it names.
pub(crate) fn read_packed(
    model: &Loaded,
    span: &structures_seams::LocatedSpan,
    packed: &BTreeMap<String, String>,
) -> Result<Blocks, Error> {
    if packed.is_empty() {
        return Ok(Blocks::new());
    }
    let mut blocks = adopt::read(model, &adopt::packed_slots(model, span, &BlockFormat::ALL))?;
    blocks.retain(|slot, weight| packed.get(slot).is_some_and(|f| f == weight.format.name()));
    Ok(blocks)
}

fn not_json(e: serde_json::Error) -> Error {
    Error::invalid(
        "record_invalid",
        format!("the receipt cannot be written as JSON: {e}"),
    )
}

/// A calibration in which nothing was measured.
pub(crate) fn nothing(note: stats::CalibrationNote) -> Calibration {
    Calibration::nothing(note)
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

/// The measured scales as a precision spec, in the dtype that is executed at each point.
pub fn precision_spec(
    calibration: &Calibration,
    dtypes: &BTreeMap<String, String>,
) -> Result<PrecisionSpec, Error> {
    let note = &calibration.note;
    Ok(PrecisionSpec::calibrated(
        &note.source,
        calibration
            .amax
            .iter()
            .filter_map(|(key, amax)| Some((key, dtypes.get(key)?, *amax))),
        note.samples,
        note.percentile,
    )?)
}

fn scheme_seam(host: &Host, site: &Site<'_>) -> schemes::Seam {
    schemes::Seam {
        key: site.seam.key.clone(),
        structure: site.spec.name.clone(),
        tags: site.spec.tags.clone(),
        consulted: site.spec.scheme == structures_catalog::spec::SchemeUse::Consulted,
        points: site.spec.points.clone(),
        forms: host
            .forms()
            .iter()
            .filter(|c| c.form.structure == site.spec.name)
            .map(scheme_form)
            .collect(),
        ..schemes::Seam::default()
    }
}

fn scheme_form(choice: &Choice<'_>) -> schemes::Form {
    schemes::Form {
        plugin: choice.plugin.into(),
        form: choice.form.name.clone(),
        format: choice.form.format.clone(),
        quantises: choice.form.quantises,
        rounds: choice.form.rounds.clone(),
        statistics: choice
            .form
            .statistics
            .iter()
            .map(|s| schemes::Want::new(&s.point, &s.statistic, &s.granularity))
            .collect(),
        wires: choice.form.wires.clone(),
        rows: choice.form.band.rows,
    }
}

/// Runs the fitted samples with the collector watching, and keeps what the first judged sample feeds the spans.
#[allow(clippy::too_many_arguments)] // one call site
fn measure(
    model: &Loaded,
    survey: &Survey<'_>,
    scheme_plan: &schemes::Plan,
    fitted: &[&[u32]],
    first: &[u32],
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<(Calibration, HashMap<ValueId, Tensor>), Error> {
    let session = model.session();
    let plan = session.host_plan();
    let runner = Runner::new(session, first.len());
    let contents = span_contents(model, survey, first)?;
    progress.tick();
    if fitted.is_empty() {
        let note = stats::CalibrationNote::nothing_fitted(
            samples.source(),
            samples.samples().len(),
            options.percentile,
        );
        return Ok((nothing(note), contents));
    }
    let mut keys = Vec::new();
    for site in &survey.sites {
        for span in &site.spans {
            for (point, value) in &span.points {
                let key = site.point_key(point);
                if scheme_plan.wants.contains_key(&key)
                    && !keys.iter().any(|(_, k): &(ValueId, String)| *k == key)
                {
                    keys.push((*value, key));
                }
            }
        }
    }
    let mut watch = Watch::new(Collector::new(scheme_plan.wants.clone()), keys);
    for sample in fitted {
        let mut state = runner.state();
        runner.step(&plan, sample, 0, &mut state, Some(&mut watch))?;
        watch.collector.end_sample()?;
        progress.tick();
    }
    Ok((
        watch
            .collector
            .finish(options.percentile, samples.source())?,
        contents,
    ))
}

/// What the host feeds every span when it runs these tokens in one call.
pub(crate) fn span_contents(
    model: &Loaded,
    survey: &Survey<'_>,
    tokens: &[u32],
) -> Result<HashMap<ValueId, Tensor>, Error> {
    let inputs = survey.sites.iter().flat_map(|s| {
        s.spans
            .iter()
            .flat_map(|span| span.inputs.iter().filter_map(|(_, v)| *v))
    });
    let mut watch = Watch::new(Collector::new(stats::Wants::new()), []).content(inputs);
    let runner = Runner::new(model.session(), tokens.len());
    let mut state = runner.state();
    runner.step(
        &model.session().host_plan(),
        tokens,
        0,
        &mut state,
        Some(&mut watch),
    )?;
    Ok(watch.into_contents())
}

/// Points whose content is a step of a loop, with their values.
fn conditionings(survey: &Survey<'_>) -> Vec<(String, ValueId)> {
    let mut found = Vec::new();
    for site in &survey.sites {
        let Some(declared) = steps::declared(site.spec) else {
            continue;
        };
        let span = site.spans.iter().find(|s| s.name == declared.span);
        let value = span.and_then(|s| s.inputs.first()?.1);
        found.extend(value.map(|v| (site.point_key(&declared.point), v)));
    }
    found
}

/// What the loop feeds there, over the workload of every sample: a step is no statistic, so none is held out.
fn observe_steps(
    runner: &Runner<'_>,
    plan: &Plan,
    conditionings: &[(String, ValueId)],
    samples: &Samples,
    workload: Workload,
    all_positions: bool,
) -> Result<BTreeMap<String, Content>, Error> {
    let mut watch = Conditionings::new(conditionings.iter().map(|(_, v)| *v));
    if !watch.is_empty() {
        let all: Vec<Vec<u32>> = samples.samples().iter().map(|s| s.tokens.clone()).collect();
        runner.score(plan, &all, workload, all_positions, Some(&mut watch), || {})?;
    }
    let content = |(key, v): &(String, ValueId)| {
        let (width, rows) = watch.rows(*v)?;
        let call = |row: &[f32]| CallContent {
            dims: vec![1, width],
            values: row.to_vec(),
        };
        let calls = rows.chunks_exact(width.max(1)).map(call).collect();
        Some((key.clone(), Content { calls }))
    };
    Ok(conditionings.iter().filter_map(content).collect())
}

/// Rows every site sees under the workload, ascending.
fn observe_rows(
    runner: &Runner<'_>,
    plan: &Plan,
    survey: &Survey<'_>,
    sample: &[u32],
    workload: Workload,
    all_positions: bool,
) -> Result<HashMap<usize, Vec<u64>>, Error> {
    let keys = survey.sites.iter().enumerate().filter_map(|(i, s)| {
        let value = s.spans[0].inputs.iter().find_map(|(_, v)| *v)?;
        Some((value, i.to_string()))
    });
    let mut watch = Watch::new(Collector::new(stats::Wants::new()), keys);
    runner.score(
        plan,
        &[sample.to_vec()],
        workload,
        all_positions,
        Some(&mut watch),
        || {},
    )?;
    watch.collector.end_sample()?;
    let observed = watch.collector.finish(100.0, "rows")?.observations;
    Ok(observed
        .into_iter()
        .filter_map(|(key, o)| Some((key.parse().ok()?, o.rows)))
        .collect())
}
