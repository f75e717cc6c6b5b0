//! The part of a captured step that runs at a place: between what the host does before it and after it, one run of calls
//! on values that lie there, with the regions that have their home there.
//!
//! What the host tells it and takes from it goes through fixed memory of the place, as do the regions and their valid
//! length: so nothing a call is given changes from one step to the next but what lies in that memory, and the calls can be
//! recorded by the place and launched as one. The first step runs them one by one, which settles every buffer they need;
//! then they are recorded. A place that records nothing, and a call that cannot be recorded, leave the part as it is, one
//! call after the other, with the code and reason why.
//!
//! Where the scores of a greedy step are made there, the next token may be chosen there too ([`Install::choice`]). Then a
//! step says which one it is, and the scores stay until somebody asks for them.
//!
//! Owns: which steps of a plan such a part is, or why there is none. Does not own how memory is kept and work is recorded
//! ([`Recorder`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::arena::{Arena, Buf};
use super::step::{Planned, Slice};
use crate::graph::{Graph, OpId, ValueId};
use crate::kernels::Kernel;
use crate::ops::OpKind;
use crate::place::{Away, Held, Place, Recorded, Recorder, Unserved, NO_SUCH_SCORE};
use crate::plan::{appends, Plan, What};
use crate::session::{Exec, Install, Session};
use crate::state::State;
use crate::GraphError;

/// Which steps of a plan, by index, run where.
pub(super) struct Split {
    pub(super) place: Place,
    pub(super) before: Vec<usize>,
    pub(super) there: Vec<usize>,
    pub(super) after: Vec<usize>,
}

/// The part that stays at one place, or `None` where nothing does, or why what does is no single part. `stays` says of
/// every install whether it serves the step's sizes at its place.
pub(super) fn split(
    graph: &Graph,
    plan: &Plan,
    stays: &[bool],
) -> Result<Option<Split>, (&'static str, String)> {
    let mut away = vec![false; plan.steps.len()];
    let mut place: Option<Place> = None;
    for (i, step) in plan.steps.iter().enumerate() {
        let What::Span { install, .. } = &step.what else {
            continue;
        };
        let Some(at) = plan.installs[*install].runner.place() else {
            continue;
        };
        if !stays[*install] {
            continue;
        }
        match &place {
            Some(first) if first != at => {
                let reason = format!("seats at `{first}` and at `{at}`");
                return Err(("capture_two_places", reason));
            }
            _ => place = Some(at.clone()),
        }
        away[i] = true;
    }
    let Some(place) = place else {
        return Ok(None);
    };
    let ops = |step: &What| match step {
        What::Op(op) => vec![*op],
        What::Span { ops, .. } => ops.clone(),
    };
    let mut step_of: HashMap<OpId, usize> = HashMap::new();
    for (i, step) in plan.steps.iter().enumerate() {
        step_of.extend(ops(&step.what).into_iter().map(|op| (op, i)));
    }
    let reads = |i: usize| -> BTreeSet<usize> {
        let values: Vec<ValueId> = match &plan.steps[i].what {
            What::Span { install, .. } if away[i] => plan.installs[*install]
                .inputs
                .iter()
                .flatten()
                .copied()
                .collect(),
            step => {
                let each = ops(step).into_iter();
                each.flat_map(|op| {
                    graph
                        .op(op)
                        .inputs
                        .iter()
                        .flatten()
                        .copied()
                        .collect::<Vec<_>>()
                })
                .collect()
            }
        };
        let makers = values.into_iter().filter_map(|v| graph.producer(v));
        let makers = makers.filter_map(|(op, _)| step_of.get(&op).copied());
        makers.filter(|from| *from != i).collect()
    };
    let n = plan.steps.len();
    let (mut follows, mut leads) = (vec![false; n], vec![false; n]);
    for i in 0..n {
        follows[i] = reads(i).iter().any(|from| away[*from] || follows[*from]);
    }
    for i in (0..n).rev() {
        if away[i] || leads[i] {
            reads(i).into_iter().for_each(|from| leads[from] = true);
        }
    }
    let free = |i: usize| match &plan.steps[i].what {
        What::Op(op) => graph.op(*op).kind == OpKind::Reshape,
        What::Span { .. } => false,
    };
    if let Some(i) = (0..n).find(|i| !away[*i] && !free(*i) && follows[*i] && leads[*i]) {
        let at = ops(&plan.steps[i].what)
            .first()
            .and_then(|op| graph.op(*op).outputs.first());
        let name = at.map_or("", |v| graph.value(*v).name.as_str());
        let reason = format!(
            "`{name}` is the host's, reads what `{place}` makes and is read there: the step is no single part"
        );
        return Err(("capture_host_between", reason));
    }
    // A reshape of what lies there is for who reads it: it is also the host's where the host reads it.
    let mut after: Vec<usize> = (0..n)
        .filter(|i| !away[*i] && follows[*i] && !free(*i))
        .collect();
    let mut wanted: BTreeSet<usize> = after.iter().flat_map(|i| reads(*i)).collect();
    let outputs = graph.outputs.iter().filter_map(|(_, v)| graph.producer(*v));
    wanted.extend(outputs.filter_map(|(op, _)| step_of.get(&op).copied()));
    for i in (0..n).rev().filter(|i| free(*i) && follows[*i]) {
        if wanted.contains(&i) {
            wanted.extend(reads(i));
            after.push(i);
        }
    }
    after.sort_unstable();
    Ok(Some(Split {
        place,
        before: (0..n).filter(|i| !away[*i] && !follows[*i]).collect(),
        there: (0..n).filter(|i| away[*i]).collect(),
        after,
    }))
}

/// What a call reads.
enum In {
    /// A value that lies there, with its dims here.
    Value(ValueId, Vec<usize>),
    /// A region that has its home there.
    Region(usize),
}

struct Call {
    runner: usize,
    inputs: Vec<Option<In>>,
    outputs: Vec<ValueId>,
    appends: Option<usize>,
    /// Its only result is the choice.
    chooses: bool,
}

/// Where what the host gives lies.
pub(super) enum From {
    Arena(Slice),
    Numbers(usize),
}

struct Given {
    from: From,
    value: ValueId,
    to: Arc<dyn Away>,
}

/// See the module.
pub(super) struct There {
    place: Place,
    calls: Vec<Call>,
    given: Vec<Given>,
    made: Vec<(ValueId, Buf)>,
    recorder: Box<dyn Recorder>,
    /// Regions that have their home there, with who appends to them.
    pub(super) housed: Vec<(usize, usize)>,
    choice: Option<Choice>,
    ready: Option<Ready>,
    refusal: Option<Unserved>,
}

/// The next token, chosen there.
struct Choice {
    /// Its call.
    call: usize,
    scores: ValueId,
    /// Scores of a row.
    width: usize,
    /// What was chosen in every row.
    rows: Vec<i64>,
    /// The scores of the last step, where they were left.
    left: Option<Held>,
}

/// What one pass over the calls makes.
#[derive(Default)]
struct Made {
    values: HashMap<ValueId, Held>,
    choice: Option<Held>,
}

/// A recording, what it was made with, and what it makes.
struct Ready {
    stamp: u64,
    recorded: Box<dyn Recorded>,
    made: Made,
}

/// What a step is made with.
pub(super) struct Turn<'s> {
    pub(super) state: &'s mut State,
    pub(super) tokens: usize,
    /// The scores come home, whoever chooses.
    pub(super) scores: bool,
}

/// What such a part is, as data.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlaceNote {
    /// Where; empty where there is no such part.
    pub place: String,
    /// `recorded`: launched as one. `called`: one call after the other. `host`: values cross for every seat.
    pub form: String,
    /// Calls.
    pub calls: usize,
    /// Values that the host gives and takes in every step.
    pub crossing: (usize, usize),
    /// The next token is chosen there: it is taken, and its scores only when somebody asks for them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub choice: bool,
    /// Why it is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// The same, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// What a part is made from while a plan is compiled.
pub(super) struct Draft<'p> {
    pub(super) session: &'p Session,
    pub(super) plan: &'p Plan,
    pub(super) split: &'p Split,
}

impl Draft<'_> {
    /// The value a chain of reshapes starts from.
    pub(super) fn root(&self, mut v: ValueId) -> ValueId {
        let graph = self.session.graph();
        while let Some((op, _)) = graph.producer(v) {
            let reshape = matches!(self.session.exec(op), Exec::Kernel(Kernel::Reshape(_)));
            match graph.op(op).inputs.first() {
                Some(Some(x)) if reshape => v = *x,
                _ => break,
            }
        }
        v
    }

    fn installs(&self) -> impl Iterator<Item = usize> + '_ {
        self.split
            .there
            .iter()
            .filter_map(|i| match &self.plan.steps[*i].what {
                What::Span { install, .. } => Some(*install),
                What::Op(_) => None,
            })
    }

    /// Regions that have their home there, by the value that is all of them.
    fn regions(&self) -> BTreeMap<ValueId, usize> {
        let graph = self.session.graph();
        let found = self.installs().filter_map(|i| {
            let install = &self.plan.installs[i];
            Some((*install.outputs.first()?, appends(graph, install)?))
        });
        found.collect()
    }

    /// Values made there.
    fn made(&self) -> BTreeSet<ValueId> {
        let regions = self.regions();
        let all = self
            .installs()
            .flat_map(|i| self.plan.installs[i].outputs.iter().copied());
        all.filter(|v| !regions.contains_key(v)).collect()
    }

    /// Values that the host gives, and those it takes.
    pub(super) fn crossing(&self) -> (Vec<ValueId>, Vec<ValueId>) {
        let graph = self.session.graph();
        let (made, regions) = (self.made(), self.regions());
        let mut given: Vec<ValueId> = Vec::new();
        for install in self.installs().map(|i| &self.plan.installs[i]) {
            for v in install.inputs.iter().flatten() {
                let root = self.root(*v);
                // A reshape that the host made before is given as it is.
                let v = if made.contains(&root) { continue } else { *v };
                if !regions.contains_key(&v) && !given.contains(&v) {
                    given.push(v);
                }
            }
        }
        let mut read: BTreeSet<ValueId> = graph.outputs.iter().map(|(_, v)| *v).collect();
        for i in &self.split.after {
            let ops = match &self.plan.steps[*i].what {
                What::Op(op) => vec![*op],
                What::Span { install, ops } => {
                    read.extend(self.plan.installs[*install].inputs.iter().flatten());
                    ops.clone()
                }
            };
            read.extend(
                ops.iter()
                    .flat_map(|op| graph.op(*op).inputs.iter().flatten()),
            );
        }
        let taken = made.into_iter().filter(|v| read.contains(v)).collect();
        (given, taken)
    }

    /// Whether the host reads a value that is made there, other than to give it away.
    pub(super) fn read_after(&self, v: ValueId) -> bool {
        let graph = self.session.graph();
        let mut reads = self.split.after.iter().flat_map(|i| {
            let (ops, given) = match &self.plan.steps[*i].what {
                What::Op(op) => (std::slice::from_ref(op), &[][..]),
                What::Span { install, ops } => (
                    ops.as_slice(),
                    self.plan.installs[*install].inputs.as_slice(),
                ),
            };
            let reshape = |op: &&OpId| graph.op(**op).kind != OpKind::Reshape;
            let read = ops.iter().filter(reshape);
            let read = read.flat_map(|op| graph.op(*op).inputs.iter().flatten());
            read.chain(given.iter().flatten())
        });
        reads.any(|read| self.root(*read) == v)
    }

    /// The part, with where the host puts what it gives and finds what it takes. `runner` gives the index of an install's
    /// runner among the step's.
    pub(super) fn finish(
        &self,
        mut recorder: Box<dyn Recorder>,
        given: Vec<(ValueId, Vec<usize>, From)>,
        made: Vec<(ValueId, Buf)>,
        dims: impl Fn(ValueId) -> Result<Vec<usize>, GraphError>,
        runner: impl Fn(usize) -> usize,
    ) -> Result<There, GraphError> {
        let graph = self.session.graph();
        let regions = self.regions();
        let mut fixed = Vec::with_capacity(given.len());
        for (value, dims, from) in given {
            let whole = matches!(from, From::Numbers(_));
            let to = recorder.fixed(&dims, whole)?;
            fixed.push(Given { from, value, to });
        }
        let given: BTreeSet<ValueId> = fixed.iter().map(|g| g.value).collect();
        let mut calls = Vec::new();
        let mut housed = Vec::new();
        let mut refusal = None;
        for i in self.installs() {
            let install = &self.plan.installs[i];
            let appended = appends(graph, install);
            housed.extend(appended.map(|region| (region, runner(i))));
            refusal = refusal.or_else(|| undeclared(install));
            let inputs = install.inputs.iter().map(|v| {
                let Some(v) = v else { return Ok(None) };
                if let Some(region) = regions.get(v) {
                    return Ok(Some(In::Region(*region)));
                }
                let from = if given.contains(v) { *v } else { self.root(*v) };
                Ok(Some(In::Value(from, dims(*v)?)))
            });
            calls.push(Call {
                runner: runner(i),
                inputs: inputs.collect::<Result<_, GraphError>>()?,
                outputs: install.outputs.clone(),
                appends: appended,
                chooses: false,
            });
        }
        Ok(There {
            place: self.split.place.clone(),
            calls,
            given: fixed,
            made,
            recorder,
            housed,
            choice: None,
            ready: None,
            refusal,
        })
    }
}

fn undeclared(install: &Install) -> Option<Unserved> {
    (!install.runner.records()).then(|| Unserved {
        code: "capture_undeclared".into(),
        message: format!(
            "`{}` does not declare that it may be recorded",
            install.name
        ),
        declined: true,
    })
}

/// Why a pass over the calls ended.
enum Ended {
    Unserved(usize, Unserved),
    Graph(GraphError),
}

impl There {
    pub(super) fn note(&self) -> PlaceNote {
        let form = if self.ready.is_some() {
            "recorded"
        } else {
            "called"
        };
        PlaceNote {
            place: self.place.name().into(),
            form: form.into(),
            calls: self.calls.len(),
            crossing: (self.given.len(), self.made.len()),
            choice: self.choice.is_some(),
            code: self.refusal.as_ref().map(|r| r.code.clone()),
            reason: self.refusal.as_ref().map(|r| r.message.clone()),
        }
    }

    /// Where a value that the host takes is put.
    pub(super) fn taken(&self, v: ValueId) -> Option<Buf> {
        let made = self.made.iter().find(|(of, _)| *of == v);
        made.map(|(_, buf)| *buf)
    }

    /// Has the next token chosen there, by an install whose runner is at this index, among scores that are made there, of
    /// these dims.
    pub(super) fn choose(
        &mut self,
        install: &Install,
        runner: usize,
        scores: ValueId,
        dims: Vec<usize>,
    ) {
        if self.refusal.is_none() {
            self.refusal = undeclared(install);
        }
        let width = dims.last().copied().unwrap_or(1);
        let rows = dims.iter().product::<usize>() / width.max(1);
        self.choice = Some(Choice {
            call: self.calls.len(),
            scores,
            width,
            rows: vec![0; rows],
            left: None,
        });
        self.calls.push(Call {
            runner,
            inputs: vec![Some(In::Value(scores, dims))],
            outputs: Vec::new(),
            appends: None,
            chooses: true,
        });
    }

    /// Whether the scores of the last step were left there.
    pub(super) fn left(&self) -> bool {
        self.choice.as_ref().is_some_and(|c| c.left.is_some())
    }

    /// Brings the scores of the last step, where they were left there.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`].
    pub(super) fn fetch(&self, to: &mut [f32]) -> Result<(), GraphError> {
        match self.choice.as_ref().and_then(|c| c.left.as_ref()) {
            Some(Held::Away(away)) => self.recorder.read(away, to),
            _ => Ok(()),
        }
    }

    /// The scores of the last step are at home now.
    pub(super) fn fetched(&mut self) {
        if let Some(choice) = &mut self.choice {
            choice.left = None;
        }
    }

    /// What it reads of the arena and of parameters.
    pub(super) fn reads(&self) -> impl Iterator<Item = &Slice> {
        self.given.iter().filter_map(|given| match &given.from {
            From::Arena(slice) => Some(slice),
            From::Numbers(_) => None,
        })
    }

    /// Whether a step allocates.
    pub(super) fn allocates(&self) -> bool {
        self.refusal.is_some()
    }

    /// Forgets the recording: what it was made with may be gone.
    pub(super) fn forget(&mut self) {
        self.ready = None;
        self.fetched();
    }

    /// One step. The regions have been appended to afterwards, and the outputs are in the arena; the number of the next
    /// token, or -1, where it was chosen there and the scores were left there.
    pub(super) fn replay(
        &mut self,
        runners: &[Planned],
        arena: &mut Arena,
        slice: impl Fn(
            &Arena,
            &Slice,
            &mut dyn FnMut(&[f32]) -> Result<(), GraphError>,
        ) -> Result<(), GraphError>,
        numbers: &[Vec<i64>],
        turn: Turn<'_>,
    ) -> Result<Option<i64>, GraphError> {
        let Turn {
            state,
            tokens,
            scores,
        } = turn;
        self.fetched();
        let regions = || self.housed.iter().map(|(region, _)| *region);
        let stamp = match state.ready(&self.place, regions(), tokens)? {
            Some(stamp) => stamp,
            None => {
                self.ready = None;
                for (region, runner) in &self.housed {
                    let planned = &runners[*runner];
                    let open = || planned.runner.quarters();
                    match state.settle(*region, tokens, &self.place, open) {
                        Ok(Some(_)) => {}
                        Err(lost @ GraphError::PlaceLost { .. }) => return Err(lost),
                        Ok(None) => return Err(guard(planned, "its region has no home there")),
                        Err(why) => {
                            planned.runner.not_housed(&why)?;
                            return Err(guard(planned, &why.to_string()));
                        }
                    }
                }
                state.stamp(&self.place)
            }
        };
        for given in &self.given {
            match &given.from {
                From::Numbers(at) => self.recorder.write_whole(&given.to, &numbers[*at])?,
                From::Arena(s) => {
                    slice(arena, s, &mut |data| self.recorder.write(&given.to, data))?;
                }
            }
        }
        let ready = self.ready.take_if(|ready| ready.stamp == stamp);
        self.ready = match ready.map(|ready| (ready.recorded.launch(), ready)) {
            Some((Ok(()), ready)) => Some(ready),
            Some((Err(why), _)) => {
                self.not_launched(runners, why)?;
                None
            }
            None => None,
        };
        let chosen = match self.ready.take() {
            Some(ready) => {
                let chosen = self.read(runners, &ready.made, arena, !scores);
                self.ready = Some(ready);
                chosen?
            }
            None => {
                let pass = self.pass(runners, state, tokens);
                let made = pass.map_err(|e| self.ended(runners, e))?;
                let records = self.refusal.is_none();
                let chosen = self.read(runners, &made, arena, !scores && !records)?;
                // What they were in is there for the recording, which must not allocate.
                drop(made);
                if records {
                    self.record(runners, state, tokens, stamp)?;
                }
                chosen
            }
        };
        self.housed
            .iter()
            .for_each(|(region, _)| state.appended(*region, tokens));
        Ok(chosen)
    }

    /// Brings the outputs into the arena; or the choice alone for the scores, which are left there.
    fn read(
        &mut self,
        runners: &[Planned],
        made: &Made,
        arena: &mut Arena,
        leave: bool,
    ) -> Result<Option<i64>, GraphError> {
        let choice = self.choice.as_mut().filter(|_| leave);
        let left = choice.as_ref().map(|choice| choice.scores);
        let missing = |what: String| GraphError::Mismatch {
            what,
            expected: "made at the place".into(),
            found: "nothing".into(),
        };
        for (v, buf) in self.made.iter().filter(|(v, _)| Some(*v) != left) {
            match made.values.get(v) {
                Some(Held::Away(away)) => self.recorder.read(away, arena.get_mut(*buf))?,
                _ => return Err(missing(format!("value {} of a captured step", v.0))),
            }
        }
        let Some(choice) = choice else {
            return Ok(None);
        };
        match &made.choice {
            Some(Held::Away(away)) => self.recorder.read_whole(away, &mut choice.rows)?,
            _ => return Err(missing("the choice of a captured step".into())),
        }
        choice.left = made.values.get(&choice.scores).cloned();
        let (chosen, width) = (choice.rows.last().copied().unwrap_or(-1), choice.width);
        let there = chosen == -1 || usize::try_from(chosen).is_ok_and(|at| at < width);
        if there {
            return Ok(Some(chosen));
        }
        let runner = self.calls[choice.call].runner;
        let why = Unserved {
            code: NO_SUCH_SCORE.into(),
            message: format!("it chose {chosen} of {width} scores"),
            declined: false,
        };
        Err(self.ended(runners, Ended::Unserved(runner, why)))
    }

    fn record(
        &mut self,
        runners: &[Planned],
        state: &State,
        tokens: usize,
        stamp: u64,
    ) -> Result<(), GraphError> {
        let mut made = None;
        let mut broke = None;
        let recorded = self
            .recorder
            .record(&mut || match self.pass(runners, state, tokens) {
                Ok(all) => {
                    made = Some(all);
                    Ok(())
                }
                Err(Ended::Unserved(runner, why)) => {
                    let name = &runners[runner].name;
                    let message = format!("`{name}`: {}", why.message);
                    Err(Unserved { message, ..why })
                }
                Err(Ended::Graph(e)) => {
                    let message = e.to_string();
                    broke = Some(e);
                    Err(Unserved {
                        code: "capture_spoilt".into(),
                        message,
                        declined: false,
                    })
                }
            });
        if let Some(lost @ GraphError::PlaceLost { .. }) = broke {
            return Err(lost);
        }
        match (recorded, made) {
            (Ok(recorded), Some(made)) => {
                self.ready = Some(Ready {
                    stamp,
                    recorded,
                    made,
                });
            }
            (Err(why), _) if why.is_loss() => return Err(self.lost(why)),
            (Err(why), _) => {
                self.refusal = Some(why);
            }
            (Ok(_), None) => {}
        }
        Ok(())
    }

    fn lost(&self, why: Unserved) -> GraphError {
        GraphError::PlaceLost {
            place: self.place.name().into(),
            reason: why.message,
        }
    }

    /// A launch that fails is not tried again: from here on the calls are made one by one, this step's too, which tells
    /// everything there anew. A launch is a call of everybody in it, so it is one that none of them served, and who sits
    /// there says whether that ends the run.
    fn not_launched(&mut self, runners: &[Planned], why: Unserved) -> Result<(), GraphError> {
        if why.is_loss() {
            return Err(self.lost(why));
        }
        self.refusal = Some(why.clone());
        let mut said = Ok(());
        for call in &self.calls {
            let told = runners[call.runner].runner.unserved(Unserved {
                declined: true,
                ..why.clone()
            });
            said = said.and(told);
        }
        said
    }

    fn ended(&self, runners: &[Planned], ended: Ended) -> GraphError {
        match ended {
            Ended::Graph(e) => e,
            Ended::Unserved(_, why) if why.is_loss() => self.lost(why),
            Ended::Unserved(at, why) => {
                let planned = &runners[at];
                let reason = format!("{}: {}", why.code, why.message);
                match planned.runner.unserved(why) {
                    Ok(()) => guard(planned, &reason),
                    Err(e) => e,
                }
            }
        }
    }

    /// Every call once; all they make.
    fn pass(&self, runners: &[Planned], state: &State, tokens: usize) -> Result<Made, Ended> {
        let mut made = Made::default();
        for given in &self.given {
            let there = Held::Away(given.to.clone());
            made.values.insert(given.value, there);
        }
        let valid = state.len() + tokens;
        let region = |at: usize| {
            state.lodged(at, valid).ok_or_else(|| {
                Ended::Graph(GraphError::Mismatch {
                    what: format!("region {at} of a captured step"),
                    expected: format!("its home at `{}`", self.place),
                    found: "none there".into(),
                })
            })
        };
        for call in &self.calls {
            let mut inputs = Vec::with_capacity(call.inputs.len());
            for input in &call.inputs {
                inputs.push(match input {
                    None => None,
                    Some(In::Region(at)) => Some(Held::Away(region(*at)?)),
                    Some(In::Value(v, dims)) => match made.values.get(v) {
                        Some(Held::Away(away)) if away.dims() != dims.as_slice() => {
                            Some(Held::Away(away.view(dims.clone())))
                        }
                        held => held.cloned(),
                    },
                });
            }
            let appended = call.appends.map(region).transpose()?;
            let all = runners[call.runner]
                .runner
                .replay_at(&inputs, appended.as_ref());
            let all = all.map_err(|why| Ended::Unserved(call.runner, why))?;
            match call.chooses {
                true => made.choice = all.into_iter().next(),
                false if call.appends.is_some() => {}
                false => made.values.extend(call.outputs.iter().copied().zip(all)),
            }
        }
        Ok(made)
    }
}

fn guard(planned: &Planned, reason: &str) -> GraphError {
    GraphError::Guard {
        name: planned.name.clone(),
        reason: reason.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use candle_core::{Device, Tensor};

    use super::*;
    use crate::captured::{Capture, StaticPlan};
    use crate::crew::Alone;
    use crate::graph::Origin;
    use crate::session::tests::{decoder, inputs, Random};
    use crate::session::{first_largest, Frozen, SpanOutcome, SpanRunner};

    struct At(Place);

    impl SpanRunner for At {
        fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            Ok(SpanOutcome::Host)
        }

        fn place(&self) -> Option<&Place> {
            Some(&self.0)
        }
    }

    /// Operations by what they make, each at a place; names of the steps before, there and after, or the code and name.
    fn split_of(at: &[(&str, &str)], stays: bool) -> Result<[Vec<String>; 3], String> {
        let session = Session::new(decoder(), &Random).unwrap();
        let graph = session.graph().clone();
        let install = |(made, place): &(&str, &str)| {
            let op = graph.producer(graph.value_named(made).unwrap()).unwrap().0;
            let values = graph.op(op).inputs.iter();
            let values = values.filter(|v| v.is_none_or(|v| graph.param(v).is_none()));
            Install {
                name: (*made).into(),
                ops: vec![op],
                inputs: values.copied().collect(),
                outputs: graph.op(op).outputs.clone(),
                runner: Arc::new(At(Place::new(place))),
            }
        };
        let plan = session.plan(at.iter().map(install).collect()).unwrap();
        let found = split(&graph, &plan, &vec![stays; at.len()]);
        let found = found.map_err(|(code, reason)| format!("{code}: {reason}"))?;
        let names = |steps: &[usize]| {
            let name = |i: &usize| {
                let op = match &plan.steps[*i].what {
                    What::Op(op) => *op,
                    What::Span { ops, .. } => ops[0],
                };
                graph.value(graph.op(op).outputs[0]).name.clone()
            };
            steps.iter().map(name).collect::<Vec<_>>()
        };
        let Some(found) = found else {
            return Err("nothing".into());
        };
        Ok([&found.before, &found.there, &found.after].map(|steps| names(steps)))
    }

    #[test]
    fn a_part_is_what_the_host_does_not_come_between() {
        let [before, there, after] = split_of(&[("norm.n", "a"), ("qkv.q", "a")], true).unwrap();
        assert_eq!(there, ["norm.n", "qkv.q"]);
        assert!(before.contains(&"embed.x".to_string()) && !after.contains(&"embed.x".to_string()));
        assert!(after.contains(&"o.o".to_string()) && after.contains(&"y".to_string()));
        // The reshape of what lies there is the host's too, who reads it.
        assert_eq!(after.iter().filter(|n| n.starts_with("qkv.q")).count(), 1);
        let all = split_of(&[("embed.x", "a"), ("norm.n", "a"), ("y", "a")], true);
        let why = all.unwrap_err();
        assert!(
            why.starts_with("capture_host_between") && why.contains("qkv."),
            "{why}"
        );
        let why = split_of(&[("norm.n", "a"), ("o.o", "b")], true).unwrap_err();
        assert!(why.starts_with("capture_two_places"), "{why}");
        // Who does not serve these sizes there is the host's; without anybody there is no part.
        assert_eq!(split_of(&[("norm.n", "a")], false).unwrap_err(), "nothing");
        assert_eq!(split_of(&[], true).unwrap_err(), "nothing");
    }

    /// Memory of a place.
    #[derive(Clone, Debug)]
    struct Cell(Place, Vec<usize>, Arc<Mutex<Vec<f32>>>);

    impl Away for Cell {
        fn place(&self) -> &Place {
            &self.0
        }

        fn dims(&self) -> &[usize] {
            &self.1
        }

        fn view(&self, dims: Vec<usize>) -> Arc<dyn Away> {
            Arc::new(Cell(self.0.clone(), dims, self.2.clone()))
        }

        fn fetch(&self) -> Result<Tensor, GraphError> {
            let data = self.2.lock().unwrap().clone();
            Ok(Tensor::from_vec(data, self.1.as_slice(), &Device::Cpu).unwrap())
        }

        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    fn data_of(away: &Arc<dyn Away>) -> &Arc<Mutex<Vec<f32>>> {
        &away.as_any().downcast_ref::<Cell>().unwrap().2
    }

    /// What was asked of a place.
    #[derive(Default)]
    struct Seen {
        launches: u32,
        /// Elements that came home.
        floats: usize,
        /// Whole numbers that did.
        numbers: usize,
    }

    /// Records, and fails to launch what it recorded.
    struct Faulty(Place, Arc<Mutex<Seen>>);

    impl Recorder for Faulty {
        fn fixed(&mut self, dims: &[usize], _: bool) -> Result<Arc<dyn Away>, GraphError> {
            let data = vec![f32::NAN; dims.iter().product()];
            Ok(Arc::new(Cell(
                self.0.clone(),
                dims.to_vec(),
                Arc::new(Mutex::new(data)),
            )))
        }

        fn write(&self, to: &Arc<dyn Away>, data: &[f32]) -> Result<(), GraphError> {
            data_of(to).lock().unwrap().copy_from_slice(data);
            Ok(())
        }

        fn write_whole(&self, _: &Arc<dyn Away>, _: &[i64]) -> Result<(), GraphError> {
            panic!("no whole numbers here")
        }

        fn read(&self, from: &Arc<dyn Away>, to: &mut [f32]) -> Result<(), GraphError> {
            to.copy_from_slice(&data_of(from).lock().unwrap());
            self.1.lock().unwrap().floats += to.len();
            Ok(())
        }

        fn read_whole(&self, from: &Arc<dyn Away>, to: &mut [i64]) -> Result<(), GraphError> {
            let data = data_of(from).lock().unwrap();
            to.iter_mut()
                .zip(&*data)
                .for_each(|(to, v)| *to = *v as i64);
            self.1.lock().unwrap().numbers += to.len();
            Ok(())
        }

        fn record(
            &self,
            calls: &mut dyn FnMut() -> Result<(), Unserved>,
        ) -> Result<Box<dyn Recorded>, Unserved> {
            calls()?;
            Ok(Box::new(Faulty(self.0.clone(), self.1.clone())))
        }
    }

    impl Recorded for Faulty {
        fn launch(&self) -> Result<(), Unserved> {
            self.1.lock().unwrap().launches += 1;
            Err(Unserved {
                code: "launch_refused".into(),
                message: "planted".into(),
                declined: false,
            })
        }
    }

    /// The host's own kernel, at a place; what it was told it did not serve.
    struct Seated {
        place: Place,
        kernel: Option<Kernel>,
        weight: Option<Tensor>,
        strict: bool,
        records: bool,
        /// It chooses, and this many further than it should.
        chooses: Option<i64>,
        seen: Arc<Mutex<Seen>>,
        unserved: Arc<Mutex<Vec<Unserved>>>,
    }

    impl SpanRunner for Seated {
        fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            let mut inputs = inputs.to_vec();
            inputs.extend(self.weight.clone().map(Some));
            let kernel = self.kernel.as_ref().unwrap();
            Ok(SpanOutcome::Done(kernel.run(&inputs, None).unwrap()))
        }

        fn place(&self) -> Option<&Place> {
            Some(&self.place)
        }

        fn reads_housed(&self) -> bool {
            true
        }

        fn freeze(&self, _: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
            Ok(match self.kernel {
                Some(_) => Frozen::Tensors,
                None => Frozen::Host,
            })
        }

        fn stays(&self, _: &[Option<&[usize]>]) -> Result<bool, GraphError> {
            Ok(true)
        }

        fn records(&self) -> bool {
            self.records
        }

        fn recorder(&self) -> Option<Box<dyn Recorder>> {
            Some(Box::new(Faulty(self.place.clone(), self.seen.clone())))
        }

        fn replay_at(
            &self,
            inputs: &[Option<Held>],
            _: Option<&Arc<dyn Away>>,
        ) -> Result<Vec<Held>, Unserved> {
            let there = |held: &Held| held.at(&self.place).unwrap().fetch().unwrap();
            let inputs: Vec<_> = inputs.iter().map(|h| h.as_ref().map(there)).collect();
            if let (Some(off), Some(Some(scores))) = (self.chooses, inputs.first()) {
                let scores = scores.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let chosen = first_largest(&scores).map_or(-1, |at| at as i64) + off;
                let data = Arc::new(Mutex::new(vec![chosen as f32]));
                let cell = Cell(self.place.clone(), vec![1, 1], data);
                return Ok(vec![Held::Away(Arc::new(cell))]);
            }
            let Ok(SpanOutcome::Done(made)) = self.run(&inputs) else {
                panic!("it runs")
            };
            let there = made.iter().map(|t| {
                let data = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let data = Arc::new(Mutex::new(data));
                Held::Away(Arc::new(Cell(self.place.clone(), t.dims().to_vec(), data)))
            });
            Ok(there.collect())
        }

        fn unserved(&self, why: Unserved) -> Result<(), GraphError> {
            self.unserved.lock().unwrap().push(why);
            match self.strict {
                true => Err(GraphError::Span {
                    name: "strict".into(),
                    reason: "launch".into(),
                }),
                false => Ok(()),
            }
        }
    }

    /// Who sits at the place of a test.
    #[derive(Clone, Copy)]
    struct Sits {
        strict: bool,
        records: bool,
        chooses: Option<i64>,
    }

    const LENIENT: Sits = Sits {
        strict: false,
        records: true,
        chooses: None,
    };

    /// These operations, at a place, and the choice where there is one; what was asked there, and what was not served.
    #[allow(clippy::type_complexity)] // three things of one test
    fn seated(
        session: &Session,
        ops: &[OpId],
        sits: Sits,
    ) -> (Plan, Arc<Mutex<Seen>>, Arc<Mutex<Vec<Unserved>>>) {
        let graph = session.graph();
        let (seen, unserved) = (Arc::default(), Arc::default());
        let runner = |kernel, weight, chooses| {
            Arc::new(Seated {
                place: Place::new("a"),
                kernel,
                weight,
                strict: sits.strict,
                records: sits.records,
                chooses,
                seen: Arc::clone(&seen),
                unserved: Arc::clone(&unserved),
            })
        };
        let install = |op: &OpId| {
            let (given, weights): (Vec<Option<ValueId>>, Vec<Option<ValueId>>) =
                graph.op(*op).inputs.iter().partition(|v| {
                    let v = v.unwrap();
                    graph.param(v).is_none() && !matches!(graph.value(v).origin, Origin::State(_))
                });
            let weight = weights
                .first()
                .and_then(|v| session.value_tensor(v.unwrap()).unwrap());
            let kernel = match session.exec(*op) {
                Exec::Kernel(kernel) => Some(kernel.clone()),
                _ => None,
            };
            Install {
                name: graph.value(graph.op(*op).outputs[0]).name.clone(),
                ops: vec![*op],
                inputs: given,
                outputs: graph.op(*op).outputs.clone(),
                runner: runner(kernel, weight, None),
            }
        };
        let mut installs: Vec<Install> = ops.iter().map(install).collect();
        installs.extend(sits.chooses.map(|off| {
            let runner = runner(None, None, Some(off));
            Install::choice("choice".into(), graph.outputs[0].1, runner)
        }));
        (session.plan(installs).unwrap(), seen, unserved)
    }

    /// Steps of a captured plan, each with the host's own bits.
    fn steps_as_the_host(
        session: &Session,
        plan: &Plan,
        n: usize,
    ) -> Result<StaticPlan, GraphError> {
        let host = session.host_plan();
        let prefilled = || {
            let mut state = session.new_state(1, 24);
            state.reserve().unwrap();
            session.run(&host, &inputs(0, 3), &mut state, None).unwrap();
            state
        };
        let captured = |plan: &Plan, state: &State| {
            let capture = Capture {
                inputs: &inputs(3, 1),
                state,
                windows: &[],
                greedy: None,
                last_row: None,
            };
            session.capture(plan, &capture)
        };
        let (mut own, mut state) = (prefilled(), prefilled());
        let (mut want, mut step) = (captured(&host, &own)?, captured(plan, &state)?);
        for at in 3..3 + n as i64 {
            for (name, t) in ["ids", "positions"].into_iter().zip(inputs(at, 1)) {
                want.write(name, &t).unwrap();
                step.write(name, &t).unwrap();
            }
            want.replay(&mut own, &Alone)?;
            step.replay(&mut state, &Alone)?;
            let bits = |plan: &StaticPlan| {
                let y = plan.read("y").unwrap().flatten_all().unwrap();
                y.to_vec1::<f32>().unwrap()
            };
            for (a, b) in bits(&want).into_iter().zip(bits(&step)) {
                assert!((a - b).abs() < 1e-5, "{a} is not {b}");
            }
        }
        Ok(step)
    }

    fn made_by(session: &Session, kinds: &[OpKind]) -> Vec<OpId> {
        let graph = session.graph();
        let all = graph.op_ids();
        all.filter(|op| kinds.contains(&graph.op(*op).kind))
            .collect()
    }

    #[test]
    fn a_launch_that_fails_is_counted_once_by_everybody_in_it_and_the_calls_are_made_one_by_one() {
        let session = Session::new(decoder(), &Random).unwrap();
        let mut ops = made_by(&session, &[OpKind::RmsNorm]);
        let q = session.graph().value_named("qkv.q").unwrap();
        ops.push(session.graph().producer(q).unwrap().0);
        let (plan, seen, unserved) = seated(&session, &ops, LENIENT);
        let step = steps_as_the_host(&session, &plan, 5).unwrap();
        assert_eq!(seen.lock().unwrap().launches, 1);
        let told = unserved.lock().unwrap();
        assert_eq!(told.len(), ops.len(), "{told:?}");
        for told in &*told {
            assert!(told.declined && told.code == "launch_refused");
        }
        let note = step.manifest().there.unwrap();
        assert_eq!(
            (note.form.as_str(), note.code.as_deref()),
            ("called", Some("launch_refused"))
        );
        // Who is to stop there does.
        let strict = Sits {
            strict: true,
            ..LENIENT
        };
        let (plan, seen, unserved) = seated(&session, &ops, strict);
        let error = steps_as_the_host(&session, &plan, 5).unwrap_err();
        assert!(matches!(error, GraphError::Span { .. }), "{error}");
        assert_eq!(seen.lock().unwrap().launches, 1);
        assert_eq!(unserved.lock().unwrap().len(), ops.len());
    }

    #[test]
    fn one_who_does_not_declare_it_keeps_the_part_from_being_recorded() {
        let session = Session::new(decoder(), &Random).unwrap();
        let norm = made_by(&session, &[OpKind::RmsNorm]);
        let sits = Sits {
            records: false,
            ..LENIENT
        };
        let (plan, seen, unserved) = seated(&session, &norm, sits);
        let step = steps_as_the_host(&session, &plan, 3).unwrap();
        let note = step.manifest().there.unwrap();
        assert_eq!(
            (note.form.as_str(), note.code.as_deref()),
            ("called", Some("capture_undeclared"))
        );
        assert!(note.reason.unwrap().contains("`norm.n`"));
        assert_eq!(seen.lock().unwrap().launches, 0);
        assert!(unserved.lock().unwrap().is_empty());
    }

    /// A captured step that chooses, after a prompt of three, and the host's own; both at their fourth token.
    fn choosing(session: &Session, plan: &Plan) -> (StaticPlan, State) {
        let mut state = session.new_state(1, 24);
        state.reserve().unwrap();
        let host = session.host_plan();
        session.run(&host, &inputs(0, 3), &mut state, None).unwrap();
        let capture = Capture {
            inputs: &inputs(3, 1),
            state: &state,
            windows: &[],
            greedy: Some(crate::Greedy {
                scores: 0,
                token: 0,
                position: 1,
            }),
            last_row: None,
        };
        (session.capture(plan, &capture).unwrap(), state)
    }

    #[test]
    fn a_token_is_chosen_where_its_scores_are_made_and_they_come_when_they_are_asked_for() {
        let session = Session::new(decoder(), &Random).unwrap();
        let (mut want, mut own) = choosing(&session, &session.host_plan());
        let last = vec![
            session
                .graph()
                .producer(session.graph().outputs[0].1)
                .unwrap()
                .0,
        ];
        let sits = Sits {
            records: false,
            chooses: Some(0),
            ..LENIENT
        };
        let (plan, seen, _) = seated(&session, &last, sits);
        let (mut step, mut state) = choosing(&session, &plan);
        let note = step.manifest().there.unwrap();
        assert!(
            note.choice && note.calls == 2 && note.crossing.1 == 1,
            "{note:?}"
        );
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for at in 0..9 {
            step.bring_scores(at % 3 == 2);
            want.replay(&mut own, &Alone).unwrap();
            step.replay(&mut state, &Alone).unwrap();
            assert_eq!(step.choice(), want.choice());
            let made = std::mem::take(&mut *seen.lock().unwrap());
            assert_eq!(
                (made.floats, made.numbers),
                if at % 3 == 2 { (8, 0) } else { (0, 1) }
            );
            let scores = bits(want.scores().unwrap());
            if at % 3 != 1 {
                let y = step.read("y").unwrap().flatten_all().unwrap();
                assert_eq!(bits(&y.to_vec1::<f32>().unwrap()), scores, "{at}");
            }
            assert_eq!(bits(step.scores().unwrap()), scores, "{at}");
            // They are here now.
            step.scores().unwrap();
            let made = std::mem::take(&mut *seen.lock().unwrap());
            assert_eq!(made.floats, [16, 8, 0][at % 3], "{at}");
        }
        // Without a token to choose the scores are what is taken.
        let captured = steps_as_the_host(&session, &plan, 2).unwrap();
        assert!(!captured.manifest().there.unwrap().choice);
        // The scores of the host are chosen among by the host.
        let norm = made_by(&session, &[OpKind::RmsNorm]);
        let (plan, _, _) = seated(&session, &norm, sits);
        let (step, _) = choosing(&session, &plan);
        assert!(!step.manifest().there.unwrap().choice);
    }

    #[test]
    fn a_choice_that_is_none_of_the_scores_ends_the_step() {
        let session = Session::new(decoder(), &Random).unwrap();
        let last = vec![
            session
                .graph()
                .producer(session.graph().outputs[0].1)
                .unwrap()
                .0,
        ];
        let sits = Sits {
            records: false,
            chooses: Some(8),
            ..LENIENT
        };
        let (plan, _, unserved) = seated(&session, &last, sits);
        let (mut step, mut state) = choosing(&session, &plan);
        match step.replay(&mut state, &Alone).unwrap_err() {
            GraphError::Guard { name, reason } => {
                assert!(
                    name == "choice" && reason.contains("of 8 scores"),
                    "{reason}"
                );
            }
            e => panic!("{e}"),
        }
        assert_eq!(unserved.lock().unwrap()[0].code, "rt_choice");
        assert_eq!(state.len(), 3);
    }

    #[test]
    fn a_choice_is_among_outputs_at_a_place_and_the_only_one() {
        let session = Session::new(decoder(), &Random).unwrap();
        let graph = session.graph();
        let (y, x) = (graph.outputs[0].1, graph.value_named("embed.x").unwrap());
        let choice =
            |v, place: &str| Install::choice("choice".into(), v, Arc::new(At(Place::new(place))));
        let refused = |installs| match session.plan(installs) {
            Err(GraphError::Span { reason, .. }) => reason,
            other => panic!("{other:?}"),
        };
        assert!(refused(vec![choice(x, "a")]).contains("no output of the graph"));
        assert!(refused(vec![choice(y, "a"), choice(y, "a")]).contains("already chooses"));
        let plan = session.plan(vec![choice(y, "a"), choice(y, "b")]).unwrap();
        assert_eq!(plan.installs().len(), 2);
        assert_eq!(plan.steps.len(), session.host_plan().steps.len());
    }

    #[test]
    fn a_region_of_the_host_keeps_its_readers_and_the_other_region_at_home() {
        let session = Session::new(decoder(), &Random).unwrap();
        let attention = made_by(&session, &[OpKind::Attention]);
        let appends = made_by(&session, &[OpKind::KvAppend]);
        for with in [&appends[..0], &appends[..1], &appends[1..]] {
            let ops = [with, &attention].concat();
            let (plan, _, _) = seated(&session, &ops, LENIENT);
            // One region of the two that the attention reads has no home there without the other.
            assert_eq!(plan.installs().len(), attention.len(), "{}", with.len());
            let step = steps_as_the_host(&session, &plan, 3).unwrap();
            let place = step.manifest().there.map(|note| note.place);
            assert_eq!(place.unwrap_or_default(), "", "{}", with.len());
        }
    }
}
