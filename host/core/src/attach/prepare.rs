//! Everything that comes before the first bind, whatever door was taken: sites, scheme, measurements, decisions.
//!
//! Owns the state that the later stages share, and its making. Each stage after it is a file beside this one.

use std::collections::HashMap;

use candle_core::Tensor;
use structures_graph::ValueId;

use super::calibrating::{conditionings, Runs, Seen};
use super::Options;
use crate::adopt::Adopted;
use crate::bind::Bound;
use crate::choose::{median_rows, Choice};
use crate::compose::BlockNote;
use crate::decisions;
use crate::environment::cpu_name;
use crate::error::Error;
use crate::gates::OutputKind;
use crate::host::{Host, Loaded};
use crate::operations::Operation;
use crate::progress::Progress;
use crate::receipt::{RefusalNote, WireNote};
use crate::samples::Samples;
use crate::schemes::{self, Decision, Selected};
use crate::sites::{Site, Survey};
use crate::stats::{self, Calibration};
use crate::steps::BrokerNote;
use crate::workload::Workload;

/// Code of a seam that a recorded decision leaves with the host.
pub(super) const DECIDED_HOST: &str = "decided_host";

/// Everything that comes before the first bind.
pub(super) struct Prepared<'a> {
    pub(super) host: &'a Host,
    pub(super) model: &'a Loaded,
    pub(super) options: &'a Options,
    pub(super) workload: Workload,
    pub(super) kind: OutputKind,
    pub(super) survey: Survey<'a>,
    /// Per site.
    pub(super) seams: Vec<schemes::Seam>,
    pub(super) decisions: Vec<Decision>,
    pub(super) scheme_plan: schemes::Plan,
    pub(super) selected: Selected,
    /// Name of the device seams run on, as decisions know it.
    pub(super) device: String,
    pub(super) calibration: Calibration,
    pub(super) contents: HashMap<ValueId, Tensor>,
    pub(super) judged: Vec<Vec<u32>>,
    /// Refusals after the survey.
    pub(super) refused: Vec<RefusalNote>,
    pub(super) kept: Vec<RefusalNote>,
    /// Seats of every plan.
    pub(super) adopted: Vec<Bound>,
    pub(super) adoption: Option<Adopted>,
    /// Wires that were bound.
    pub(super) negotiated: Vec<WireNote>,
    /// Brokers that were formed.
    pub(super) brokers: Vec<BrokerNote>,
    /// Blocks that were composed.
    pub(super) composed: Vec<BlockNote>,
    /// Host operations of devices, judged with the union.
    pub(super) operations: Vec<Operation>,
    /// What was done, in order.
    pub(super) stages: Vec<&'static str>,
}

impl<'a> Prepared<'a> {
    pub(super) fn new(
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
        let refused = undelivered(&survey, &seams, &selected, &scheme_plan);

        let (judged, fitted) = split(samples, &scheme_plan);
        let runs = Runs {
            model,
            survey: &survey,
            scheme_plan: &scheme_plan,
            conditionings: &conditionings,
            samples,
            judged: &judged,
            fitted: &fitted,
            workload,
            options,
        };
        let Seen {
            calibration,
            contents,
            rows,
        } = runs.watch(progress)?;
        measured(&mut seams, &rows, &calibration);
        let device = cpu_name();
        let mut decisions = schemes::decide(selected.scheme.as_ref(), &seams)?;
        leave_decided(&mut decisions, &seams, host, &device, options);
        let kept = kept(&survey, &decisions);
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

    /// Records a stage when it is first done.
    pub(super) fn did(&mut self, stage: &'static str) {
        if !self.stages.contains(&stage) {
            self.stages.push(stage);
        }
    }

    /// Records a refusal, unless the plan already told the same of this form here.
    pub(super) fn refuse(&mut self, note: RefusalNote) {
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
}

/// Forms that need what the scheme does not measure.
fn undelivered(
    survey: &Survey<'_>,
    seams: &[schemes::Seam],
    selected: &Selected,
    scheme_plan: &schemes::Plan,
) -> Vec<RefusalNote> {
    scheme_plan
        .undelivered_forms(selected.scheme.as_ref(), seams)
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
        .collect()
}

/// Samples to judge on, and samples to fit on: a scheme that asks for no statistic spends none on fitting.
fn split<'s>(samples: &'s Samples, scheme_plan: &schemes::Plan) -> (Vec<Vec<u32>>, Vec<&'s [u32]>) {
    if scheme_plan.is_empty() {
        let all = samples.samples().iter().map(|s| s.tokens.clone());
        return (all.collect(), Vec::new());
    }
    let judged = samples.judged().map(<[u32]>::to_vec).collect();
    (judged, samples.fitted().collect())
}

/// Tells every seam what was measured at it.
fn measured(
    seams: &mut [schemes::Seam],
    rows: &HashMap<usize, Vec<u64>>,
    calibration: &Calibration,
) {
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
}

/// Leaves to the host what is recorded to be fastest there; a pin is stronger than a record.
fn leave_decided(
    decisions: &mut [Decision],
    seams: &[schemes::Seam],
    host: &Host,
    device: &str,
    options: &Options,
) {
    for (seam, decision) in seams.iter().zip(decisions) {
        let pinned = options.pins.iter().any(|p| p.structure == seam.structure);
        let decided = host
            .decisions
            .lookup(device, &seam.structure, median_rows(&seam.rows));
        if let (Some(d), false) = (decided.filter(|d| d.winner == decisions::HOST), pinned) {
            *decision = Decision::Keep {
                code: DECIDED_HOST.into(),
                reason: format!("recorded for {} rows on {device}: the host", d.band()),
            };
        }
    }
}

/// Sites that stay with the host from the beginning.
fn kept(survey: &Survey<'_>, decisions: &[Decision]) -> Vec<RefusalNote> {
    let mut kept = Vec::new();
    for (site, decision) in survey.sites.iter().zip(decisions) {
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
    kept
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

pub(super) fn scheme_form(choice: &Choice<'_>) -> schemes::Form {
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
