//! The gate: units of one form at all its sites, judged alone, then the winners judged together.
//!
//! Owns the order of judging, the control runs before and after, and what a unit is. What a pair of arms is held to is
//! [`crate::judge`] and [`crate::gates`]; wires, blocks and host operations of devices have files of their own; what is
//! written down in the end is `commit.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use structures_graph::captured::PlaceNote;
use structures_graph::session::Plan;
use structures_graph::{GraphError, OpId};

use super::{residency, Attachment, Prepared};
use crate::bind::{brokers, installs, Bound};
use crate::choose::Choice;
use crate::error::Error;
use crate::judge::{self, Judge};
use crate::operations::Operation;
use crate::progress::Progress;
use crate::receipt::{SeatNote, UnitNote};
use crate::seat::Seat;
use crate::workload::{Runner, Scores, Workload};

impl<'a> Prepared<'a> {
    pub(super) fn judge(mut self, progress: &dyn Progress) -> Result<Attachment, Error> {
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

    /// The host's rows for every judged sample, and again for the first: they must be the same bits, or nothing can
    /// be judged against them.
    pub(super) fn control(
        &self,
        plan: &Plan,
        progress: &dyn Progress,
    ) -> Result<Vec<Scores>, Error> {
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
    pub(super) fn bench<'j>(
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
    pub(super) fn captured(&self, host: &Plan) -> bool {
        !self.host.eager
            && self.workload == Workload::Decode
            && judge::capturable(self.model.session(), host)
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
        let mut operations = self.operations(active, judge.captured)?;
        if judge.captured && !operations.is_empty() {
            // A captured step with the host in between takes values from host memory and leaves them there.
            let mut all = installs(active.iter());
            all.extend(operations.iter().map(|o| o.install.clone()));
            let plan = self.plan(all)?;
            let given_up = match judge::device_step(self.model.session(), &plan) {
                Ok(Some(PlaceNote {
                    place,
                    code,
                    reason,
                    ..
                })) if place.is_empty() => {
                    Some((code.unwrap_or_default(), reason.unwrap_or_default()))
                }
                Ok(note) => {
                    // A choice that the step does not make there has nothing to do.
                    let choice = note.is_some_and(|note| note.choice);
                    operations.retain(|o| choice || o.install.chooses().is_none());
                    None
                }
                // Whether the seats alone have a captured form is judged below.
                Err(Error::Graph(GraphError::Capture { at, code, reason })) => {
                    Some((code.into(), format!("`{at}`: {reason}")))
                }
                Err(Error::Graph(GraphError::Guard { name, reason })) => {
                    Some(("capture_guard".into(), format!("`{name}`: {reason}")))
                }
                Err(e) => return Err(e),
            };
            if let Some((code, reason)) = given_up {
                self.gave_up_operations(&operations, &code, &reason);
                operations.clear();
            }
        }
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
        note.device = one_device(active.iter().map(|b| &b.note));
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
    pub(super) fn fit_residual(&self) -> bool {
        self.calibration.note.held_out < self.judged.len()
    }

    /// Steps of judging one unit, for progress.
    pub(super) fn judging(&self) -> usize {
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
    pub(super) fn rows_at<'b>(&self, bounds: impl IntoIterator<Item = &'b Bound>) -> Vec<u64> {
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
}

/// The device that all of these seats are on; nothing where one is on the CPU or two differ.
fn one_device<'n>(notes: impl IntoIterator<Item = &'n SeatNote>) -> Option<u32> {
    let places: BTreeSet<Option<(&str, u32)>> = notes
        .into_iter()
        .map(|n| Some((n.plugin.as_str(), n.device.as_ref()?.index)))
        .collect();
    match places.into_iter().collect::<Vec<_>>().as_slice() {
        [Some((_, device))] => Some(*device),
        _ => None,
    }
}
