//! Which form of a structure wins here: every form that can be bound is judged for parity, then all of them race with
//! the host. What wins is for [`crate::decisions`] to keep; nothing is attached.

use std::collections::BTreeSet;
use std::sync::Arc;

use structures_graph::session::Plan;

use super::{Options, Prepared};
use crate::bind::{installs, Bound};
use crate::choose::{median_rows, Choice, Wanted};
use crate::decisions;
use crate::error::Error;
use crate::gates::adjudicate::{race, winner, Standing};
use crate::gates::OutputKind;
use crate::host::{Host, Loaded};
use crate::judge::{ledger_refusal, runtime_refusal, Judge, Step};
use crate::progress::Progress;
use crate::receipt::UnitNote;
use crate::samples::Samples;
use crate::schemes::Decision;
use crate::seat::Seat;
use crate::station::DEVICE_LOST;

/// The race of one structure.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Adjudication {
    /// Name of the device.
    pub device: String,
    /// Structure.
    pub structure: String,
    /// Median rows its seams saw: the band of the decision.
    pub rows: u64,
    /// Every candidate, `host` first.
    pub standings: Vec<Standing>,
    /// `PLUGIN:FORM`, or `host`; nothing where the host had nobody to be compared with.
    pub winner: Option<String>,
}

impl Adjudication {
    /// As a record.
    pub fn decision(&self) -> Option<decisions::Decision> {
        Some(decisions::Decision {
            device: self.device.clone(),
            structure: self.structure.clone(),
            rows: [self.rows; 2],
            winner: self.winner.clone()?,
            times_ms: self
                .standings
                .iter()
                .filter_map(|s| Some((s.candidate.clone(), s.time_ms?)))
                .collect(),
        })
    }
}

/// One candidate on its way.
struct Entry {
    standing: Standing,
    /// Its plan and seats, until it loses.
    running: Option<(Plan, Vec<Arc<Seat>>)>,
    /// It was bound and its answer or its time was taken: whoever beats it has beaten somebody. What could not be bound
    /// here, or ended with its device, says nothing of the host.
    judged: bool,
}

impl Entry {
    /// Out of the race.
    fn lost(mut standing: Standing, reason: String, judged: bool) -> Self {
        standing.lost = Some(reason);
        Entry {
            standing,
            running: None,
            judged,
        }
    }
}

/// See the module. Forms of yardstick plugins take part only where they are pinned.
pub fn adjudicate(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Vec<Adjudication>, Error> {
    let prepared = Prepared::new(host, model, samples, options, progress)?;
    let reference = prepared.control(&prepared.plan(Vec::new())?, progress)?;
    let judged = prepared.judged.clone();
    let judge = prepared.bench(&judged, prepared.plan(Vec::new())?, reference, progress);
    // What a record says now is what is being asked again.
    let asked = |i: &usize| match &prepared.decisions[*i] {
        Decision::Keep { code, .. } => code == "decided_host",
        _ => true,
    };
    let names: BTreeSet<&str> = (0..prepared.survey.sites.len())
        .filter(asked)
        .map(|i| prepared.survey.sites[i].spec.name.as_str())
        .collect();
    let mut done = Vec::new();
    for name in names {
        let sites: Vec<usize> = (0..prepared.survey.sites.len())
            .filter(asked)
            .filter(|i| prepared.survey.sites[*i].spec.name == name)
            .collect();
        done.push(prepared.race(&judge, name, &sites)?);
    }
    Ok(done)
}

impl Prepared<'_> {
    fn race(&self, judge: &Judge<'_>, name: &str, sites: &[usize]) -> Result<Adjudication, Error> {
        let rows = median_rows(&self.seams[sites[0]].rows);
        let mut entries = vec![Entry {
            standing: Standing::new(decisions::HOST, 0),
            running: Some((self.plan(Vec::new())?, Vec::new())),
            judged: false,
        }];
        entries[0].standing.enter(1.0);
        let pinned = self.options.pins.iter().any(|p| p.structure == name);
        for choice in self.ordered(name, Wanted::Any, rows) {
            if !choice.reference || pinned {
                entries.push(self.entry(judge, sites, &choice)?);
            }
        }
        judge.progress.stage(&format!("race {name}"), 0);
        self.time(judge, &mut entries)?;
        let decided = entries.iter().any(|e| e.judged);
        let standings: Vec<Standing> = entries.into_iter().map(|e| e.standing).collect();
        Ok(Adjudication {
            device: self.device.clone(),
            structure: name.into(),
            rows,
            winner: winner(&standings)
                .filter(|_| decided)
                .map(|s| s.candidate.clone()),
            standings,
        })
    }

    /// Binds a form wherever it can be, and judges its parity.
    fn entry(
        &self,
        judge: &Judge<'_>,
        sites: &[usize],
        choice: &Choice<'_>,
    ) -> Result<Entry, Error> {
        let name = format!("{}:{}", choice.plugin, choice.form.name);
        judge.progress.stage(&format!("bind {name}"), sites.len());
        let mut standing = Standing::new(&name, choice.form.precision_rank);
        let alive: BTreeSet<usize> = sites.iter().copied().collect();
        let owners = self.ownership(&alive, &[]).owners;
        let mut bounds: Vec<Bound> = Vec::new();
        let mut refused = None;
        for site in sites {
            judge.progress.tick();
            match self.bind(*site, choice, &owners) {
                Ok(bound) => bounds.push(bound),
                Err(no) => {
                    let text = format!("{}: {}", no.note.code, no.note.reason);
                    if no.distrust {
                        bounds.clear();
                        refused = Some(text);
                        break;
                    }
                    refused.get_or_insert(text);
                }
            }
        }
        if bounds.is_empty() {
            let why = refused.unwrap_or("format_no_variant: no seam takes it".into());
            return Ok(Entry::lost(standing, why, false));
        }
        let seats: Vec<Arc<Seat>> = bounds.iter().map(|b| b.seat.clone()).collect();
        let plan = self.plan(installs(&bounds))?;
        let mut note = UnitNote::default();
        if let Some(no) = judge.parity(&plan, &seats, &mut note)? {
            let why = format!("{}: {}", no.code, no.reason);
            let judged = !note.metrics.0.is_empty() && !gone(&seats);
            return Ok(Entry::lost(standing, why, judged));
        }
        let metric = match self.kind {
            OutputKind::Values => "cosine",
            OutputKind::Distribution => "cosine_all_positions",
        };
        let enters = standing.enter(note.metrics.get(metric).unwrap_or(f64::NAN));
        Ok(Entry {
            standing,
            running: enters.then_some((plan, seats)),
            judged: true,
        })
    }

    /// Races everything that is still running.
    fn time(&self, judge: &Judge<'_>, entries: &mut [Entry]) -> Result<(), Error> {
        let step = Step::new(judge)?;
        let running: Vec<usize> = (0..entries.len())
            .filter(|i| entries[*i].running.is_some())
            .collect();
        let mut states = running
            .iter()
            .map(|_| step.state())
            .collect::<Result<Vec<_>, _>>()?;
        let times = race(running.len(), |arm| match &entries[running[arm]].running {
            Some((plan, _)) => step.run(plan, &mut states[arm]),
            None => Ok(()),
        });
        for (arm, time) in running.into_iter().zip(times) {
            let entry = &mut entries[arm];
            let seats = entry.running.as_ref().map_or(&[][..], |(_, s)| s);
            let gave_up = match seats {
                [] => None,
                seats => runtime_refusal(seats).or_else(|| ledger_refusal(seats)),
            };
            let lost = |e: &Error| matches!(e.code().as_str(), "device_lost" | "state_lost");
            if gone(seats) || time.as_ref().is_err_and(lost) {
                entry.judged = false;
            }
            let failed = match (time, gave_up) {
                (Err(e), _) => format!("{}: {e}", e.code()),
                (Ok(_), Some(no)) => format!("{}: {}", no.code, no.reason),
                (Ok(ms), None) => {
                    entry.standing.time_ms = Some(ms);
                    continue;
                }
            };
            entry.standing.lost = Some(failed);
        }
        Ok(())
    }
}

/// Whether a seat gave itself up because its device went, which says nothing of the form.
fn gone(seats: &[Arc<Seat>]) -> bool {
    seats.iter().any(|seat| {
        let why = seat.ledger.counts().last_reason;
        seat.ledger.is_detached() && why.is_some_and(|why| why.starts_with(DEVICE_LOST))
    })
}
