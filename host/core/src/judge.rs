//! The gate of one unit: parity against the host, the ledger, paired latency. In that order; the first that fails
//! refuses the unit.

use std::collections::BTreeMap;
use std::sync::Arc;

use structures_graph::captured::PlaceNote;
use structures_graph::session::{first_largest, Install, Plan, Session, State};
use structures_graph::{GraphError, StaticPlan};
use structures_loader::Copies;

use crate::choose::row_note;
use crate::crew::Shift;
use crate::decode;
use crate::error::Error;
use crate::gates::{paired, BandNote, Floors, GateRefusal, Meter, OutputKind, Schedule};
use crate::ledger::LedgerSummary;
use crate::progress::Progress;
use crate::receipt::{CopyNote, LatencyNote, UnitNote};
use crate::seat::Seat;
use crate::workload::{decode_split, Runner, Scores, Workload};

/// What every unit of one attachment is judged with.
pub struct Judge<'a> {
    /// Runs plans.
    pub runner: Runner<'a>,
    /// The host's plan.
    pub host: Plan,
    /// Seats that are in the host's plan, and so in every other.
    pub base: Vec<Install>,
    /// Samples parity is judged on.
    pub samples: &'a [Vec<u32>],
    /// The host's rows for each of them.
    pub reference: Vec<Scores>,
    /// Phase.
    pub workload: Workload,
    /// Score every position.
    pub all_positions: bool,
    /// How outputs are compared.
    pub kind: OutputKind,
    /// Floors of the caller.
    pub floors: Floors,
    /// Smallest speed-up.
    pub min_speedup: f64,
    /// Rounds and iterations.
    pub schedule: Schedule,
    /// How the judged samples relate to the fit, for the band note.
    pub judged_on: String,
    /// Decode steps are judged in the captured form, in both arms.
    pub captured: bool,
    /// For people.
    pub progress: &'a dyn Progress,
}

/// How a plan's decode step runs where its seats are, in the captured form; `None` where no seat is elsewhere.
pub(crate) fn device_step(session: &Session, plan: &Plan) -> Result<Option<PlaceNote>, Error> {
    let mut state = session.new_state(1, 1);
    state.reserve()?;
    Ok(decode::captured(session, plan, &state)?.manifest().there)
}

/// Whether the host's own decode step has a captured form, so that both arms can be judged in it.
pub(crate) fn capturable(session: &Session, host: &Plan) -> bool {
    let mut state = session.new_state(1, 1);
    let captured = state.reserve().map_err(Error::from);
    match captured.and_then(|()| decode::captured(session, host, &state)) {
        Ok(_) => true,
        Err(e) => {
            tracing::info!("judged eagerly: {e}");
            false
        }
    }
}

impl Judge<'_> {
    /// Judges seats that are in no plan yet. The note says `activated` or `refused`; its names are the caller's.
    /// `rows` are those observed at these seats, for refusals.
    pub fn judge(
        &self,
        installs: Vec<Install>,
        seats: &[Arc<Seat>],
        rows: &[u64],
    ) -> Result<UnitNote, Error> {
        let installs = self.base.iter().cloned().chain(installs).collect();
        let plan = self.runner.session().plan(installs)?;
        seats.iter().for_each(|s| s.ledger.reset());
        let mut note = UnitNote {
            seams: seats.len(),
            paths: seats.iter().map(|s| s.key.clone()).collect(),
            outcome: "refused".into(),
            band: "unknown".into(),
            ..UnitNote::default()
        };
        let refusal = self.refusal(&plan, seats, rows, &mut note)?;
        note.ledger = summary(seats);
        match refusal {
            Some(r) => {
                note.code = Some(r.code);
                note.reason = Some(r.reason);
            }
            None => note.outcome = "activated".into(),
        }
        Ok(note)
    }

    fn refusal(
        &self,
        plan: &Plan,
        seats: &[Arc<Seat>],
        rows: &[u64],
        note: &mut UnitNote,
    ) -> Result<Option<GateRefusal>, Error> {
        if let Some(refusal) = self.parity(plan, seats, note)? {
            return Ok(Some(refusal));
        }
        let (latency, slow) = match self.latency(plan, seats, rows, note) {
            Ok(timed) => timed,
            Err(e) => return ended(seats, e).map(Some),
        };
        note.latency = Some(latency);
        // A form that gave up or declined while it was timed was timed as the host.
        Ok(runtime_refusal(seats)
            .or_else(|| ledger_refusal(seats))
            .or(slow))
    }

    /// Everything but the time: metrics, the same numbers twice, the caller's floors, the ledger. Metrics and band go
    /// into the note.
    pub(crate) fn parity(
        &self,
        plan: &Plan,
        seats: &[Arc<Seat>],
        note: &mut UnitNote,
    ) -> Result<Option<GateRefusal>, Error> {
        let mut meter = Meter::new(self.kind);
        let mut first = None;
        for (sample, want) in self.samples.iter().zip(&self.reference) {
            let got = match self.scores(plan, sample) {
                Ok(got) => got,
                Err(e) => return ended(seats, e).map(Some),
            };
            if let Some(r) = runtime_refusal(seats) {
                return Ok(Some(r));
            }
            meter.push((&got.data, &got.shape()), (&want.data, &want.shape()))?;
            first.get_or_insert(got);
        }
        let judgement = meter.finish()?;
        let refusal = judgement.refusal();
        note.metrics = judgement.metrics.clone();
        note.band = judgement.band.name().to_string();
        let band = BandNote::new(self.kind, &judgement.metrics);
        note.band_note = Some(serde_json::json!({
            "metric": band.metric, "value": crate::stats::number::to_json(band.value),
            "next": band.next, "samples": self.samples.len(), "judged_on": self.judged_on,
        }));
        if let Some(text) = band.warning(&seats[0].key, &self.judged_on) {
            tracing::warn!("{text}");
        }
        if refusal.is_some() {
            return Ok(refusal);
        }
        if let Some(r) = self
            .floors
            .first_shortfall(&judgement.metrics)?
            .map(|s| s.refusal())
        {
            return Ok(Some(r));
        }
        if let Some(r) = ledger_refusal(seats) {
            return Ok(Some(r));
        }
        self.repeated(plan, seats, first)
    }

    /// The first sample again: a form that answers otherwise the second time keeps something it should not.
    fn repeated(
        &self,
        plan: &Plan,
        seats: &[Arc<Seat>],
        first: Option<Scores>,
    ) -> Result<Option<GateRefusal>, Error> {
        let (Some(first), Some(sample)) = (first, self.samples.first()) else {
            return Ok(None);
        };
        let again = match self.scores(plan, sample) {
            Ok(again) => again,
            Err(e) => return ended(seats, e).map(Some),
        };
        if let Some(r) = runtime_refusal(seats).or_else(|| ledger_refusal(seats)) {
            return Ok(Some(r));
        }
        Ok((!again.identical(&first)).then(|| {
            let reason = "the first judged sample gave other numbers when it was run again".into();
            GateRefusal::new("not_repeatable", reason)
        }))
    }

    fn scores(&self, plan: &Plan, sample: &Vec<u32>) -> Result<Scores, Error> {
        if self.in_captured_form() {
            return self.replayed_scores(plan, sample);
        }
        let all = self.all_positions;
        let samples = std::slice::from_ref(sample);
        self.runner
            .score(plan, samples, self.workload, all, None, || {
                self.progress.tick()
            })
    }

    fn in_captured_form(&self) -> bool {
        self.captured && self.workload == Workload::Decode
    }

    /// [`Runner::score`] of one sample by replays.
    fn replayed_scores(&self, plan: &Plan, sample: &[u32]) -> Result<Scores, Error> {
        let split = decode_split(sample.len(), self.all_positions);
        let session = self.runner.session();
        let mut state = session.new_state(1, sample.len());
        if split > 0 {
            let prompt = &sample[..split];
            self.runner.step(plan, prompt, 0, &mut state, None)?;
        }
        let mut replay = Replay::new(session, plan, state)?;
        let mut data = Vec::new();
        for token in &sample[split..] {
            replay.step(*token)?;
            let choice = replay.step.choice();
            let scores = replay.step.scores()?;
            if choice != first_largest(scores).map(|at| at as u32) {
                return Err(another_choice(plan, choice, scores).into());
            }
            data.extend_from_slice(scores);
        }
        self.progress.tick();
        let width = data.len() / sample[split..].len().max(1);
        Ok(Scores { width, data })
    }

    /// Paired, alternating: both arms do the same step from the same state.
    fn latency(
        &self,
        plan: &Plan,
        seats: &[Arc<Seat>],
        rows: &[u64],
        unit: &mut UnitNote,
    ) -> Result<(LatencyNote, Option<GateRefusal>), Error> {
        let step = Step::new(self)?;
        let mut states = (step.state()?, step.state()?);
        let timing = match self.in_captured_form() {
            true => {
                let session = self.runner.session();
                let mut host = Replay::new(session, &self.host, states.0)?;
                let mut treated = Replay::new(session, plan, states.1)?;
                let token = step.tokens[0];
                // The first step settles how its device part runs.
                treated.again(token)?;
                unit.copies = copied(seats, || treated.again(token))?;
                unit.device_step = treated.step.manifest().there;
                let again = |arm: &mut Replay| {
                    self.progress.tick();
                    arm.again(token)
                };
                paired(self.schedule, || again(&mut host), || again(&mut treated))?
            }
            false => {
                unit.copies = copied(seats, || step.run(plan, &mut states.1))?;
                paired(
                    self.schedule,
                    || step.run(&self.host, &mut states.0),
                    || step.run(plan, &mut states.1),
                )?
            }
        };
        let note = LatencyNote {
            host_ms: timing.host_ms,
            treated_ms: timing.treated_ms,
            speedup: timing.speedup,
            spread: timing.spread,
            host_spread: timing.host_spread,
            rounds: timing.rounds as usize,
        };
        Ok((note, timing.refusal(self.min_speedup, &row_note(rows))))
    }
}

/// A step chose another token than its own scores say.
fn another_choice(plan: &Plan, choice: Option<u32>, scores: &[f32]) -> GraphError {
    let mut seats = plan.installs().iter();
    let seat = seats.find(|i| i.chooses().is_some());
    let first = first_largest(scores);
    GraphError::Guard {
        name: seat.map_or_else(Default::default, |i| i.name.clone()),
        reason: format!("it chose {choice:?}, the first of the largest scores is {first:?}"),
    }
}

/// One arm's decode step, captured, and the state it runs on.
struct Replay {
    step: StaticPlan,
    state: State,
}

impl Replay {
    fn new(session: &Session, plan: &Plan, mut state: State) -> Result<Self, Error> {
        state.reserve()?;
        let step = decode::captured(session, plan, &state)?;
        Ok(Replay { step, state })
    }

    fn step(&mut self, token: u32) -> Result<(), Error> {
        self.step.begin_with(token, self.state.len());
        let shift = Shift::begin();
        Ok(self.step.replay(&mut self.state, &shift)?)
    }

    /// The step, and the state back to before it.
    fn again(&mut self, token: u32) -> Result<(), Error> {
        let len = self.state.len();
        self.step(token)?;
        Ok(self.state.truncate(len)?)
    }
}

/// Why a run ended at a seat; another error is the door's.
fn ended(seats: &[Arc<Seat>], e: Error) -> Result<GateRefusal, Error> {
    match e {
        Error::Graph(GraphError::Span { name, reason }) => Ok(raised(seats, &name, &reason)),
        Error::Graph(e @ (GraphError::StateLost { .. } | GraphError::PlaceLost { .. })) => {
            let reason = format!("a device was lost while it was judged: {e}");
            Ok(GateRefusal::new("runtime_form", reason))
        }
        Error::Graph(GraphError::Guard { name, reason }) => Ok(runtime_refusal(seats)
            .or_else(|| ledger_refusal(seats))
            .unwrap_or_else(|| {
                let reason = format!("a guard fired in the captured step at `{name}`: {reason}");
                GateRefusal::new("fell_back", reason)
            })),
        e => Err(e),
    }
}

/// One iteration of what is timed: one token after a prefilled prompt, or a whole prompt.
pub(crate) struct Step<'j> {
    judge: &'j Judge<'j>,
    split: usize,
    tokens: &'j [u32],
}

impl<'j> Step<'j> {
    pub(crate) fn new(judge: &'j Judge<'j>) -> Result<Self, Error> {
        let sample = judge
            .samples
            .first()
            .ok_or_else(|| Error::invalid("no_samples", "there is no sample to time on"))?;
        let split = match judge.workload {
            Workload::Decode => decode_split(sample.len(), false)
                .max(1)
                .min(sample.len() - 1),
            Workload::Prefill => 0,
        };
        let tokens = match judge.workload {
            Workload::Decode => &sample[split..=split],
            Workload::Prefill => sample.as_slice(),
        };
        Ok(Step {
            judge,
            split,
            tokens,
        })
    }

    /// The state every iteration starts from, made by the host.
    pub(crate) fn state(&self) -> Result<State, Error> {
        let (judge, mut state) = (self.judge, self.judge.runner.state());
        if self.split > 0 {
            let prompt = &judge.samples[0][..self.split];
            judge
                .runner
                .step(&judge.host, prompt, 0, &mut state, None)?;
        }
        Ok(state)
    }

    /// Runs it and puts the state back.
    pub(crate) fn run(&self, plan: &Plan, state: &mut State) -> Result<(), Error> {
        let runner = &self.judge.runner;
        runner.step(plan, self.tokens, self.split, state, None)?;
        state.truncate(self.split)?;
        self.judge.progress.tick();
        Ok(())
    }
}

/// Copies that one iteration makes, by device.
fn copied(
    seats: &[Arc<Seat>],
    iteration: impl FnOnce() -> Result<(), Error>,
) -> Result<Vec<CopyNote>, Error> {
    let before = copies(seats);
    iteration()?;
    let note = |(device, now): (String, Copies)| {
        let then = before.get(&device).copied().unwrap_or_default();
        let made = now.since(&then);
        CopyNote {
            device,
            copies_in: made.copies_in,
            copies_out: made.copies_out,
            bytes_in: made.bytes_in,
            bytes_out: made.bytes_out,
        }
    };
    Ok(copies(seats).into_iter().map(note).collect())
}

/// Copies made so far, by device.
fn copies(seats: &[Arc<Seat>]) -> BTreeMap<String, Copies> {
    let each = seats.iter().filter_map(|s| s.copies());
    each.map(|(place, made)| (place.name().to_string(), made))
        .collect()
}

/// What the seats did so far.
pub fn summary(seats: &[Arc<Seat>]) -> LedgerSummary {
    LedgerSummary::of(seats.iter().map(|s| (s.key.as_str(), s.ledger.counts())))
}

/// A seat gave itself up: its form failed or panicked.
pub(crate) fn runtime_refusal(seats: &[Arc<Seat>]) -> Option<GateRefusal> {
    let seat = seats.iter().find(|s| s.ledger.is_detached())?;
    let reason = seat.ledger.counts().last_reason.unwrap_or_default();
    Some(GateRefusal::new(
        "runtime_form",
        format!(
            "the form at `{}` failed while it was judged: {reason}",
            seat.key
        ),
    ))
}

/// Calls that fell back, or seats that served none: the unit did not run, whatever parity says.
pub(crate) fn ledger_refusal(seats: &[Arc<Seat>]) -> Option<GateRefusal> {
    let ledger = summary(seats);
    let reason = if ledger.fallbacks > 0 {
        format!(
            "{} of {} calls fell back to the host, so the unit did not run: {}",
            ledger.fallbacks,
            ledger.calls,
            ledger
                .last_reason
                .as_deref()
                .unwrap_or("no reason recorded")
        )
    } else if !ledger.never_ran.is_empty() {
        let names: Vec<&str> = ledger
            .never_ran
            .iter()
            .take(3)
            .map(String::as_str)
            .collect();
        format!(
            "{} seats served no call of this workload ({}): nothing was measured there",
            ledger.never_ran.len(),
            names.join(", ")
        )
    } else {
        return None;
    };
    Some(GateRefusal::new("fell_back", reason))
}

/// Strict mode ended the run at a seat: its form failed, or a call missed the contract.
fn raised(seats: &[Arc<Seat>], name: &str, reason: &str) -> GateRefusal {
    runtime_refusal(seats).unwrap_or_else(|| {
        GateRefusal::new(
            "fell_back",
            format!("strict: seat `{name}` refused a call: {reason}"),
        )
    })
}
