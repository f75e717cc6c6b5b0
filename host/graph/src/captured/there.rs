//! The part of a captured step that runs at a place: between what the host does before it and after it, one run of calls
//! on values that lie there, with the regions that have their home there.
//!
//! What the host tells it and takes from it goes through fixed memory of the place, as do the regions and their valid
//! length: so nothing a call is given changes from one step to the next but what lies in that memory, and the calls can be
//! recorded by the place and launched as one. The first step runs them one by one, which settles every buffer they need;
//! then they are recorded. A place that records nothing, and a call that cannot be recorded, leave the part as it is, one
//! call after the other, with the code and reason why.
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
use crate::place::{Away, Held, Place, Recorded, Recorder, Unserved};
use crate::plan::{appends, Plan, What};
use crate::session::{Exec, Session};
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
    ready: Option<Ready>,
    refusal: Option<Unserved>,
}

/// A recording, what it was made with, and the values it makes.
struct Ready {
    stamp: u64,
    recorded: Box<dyn Recorded>,
    values: HashMap<ValueId, Held>,
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
    /// Why it is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// The same, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What a part is made from while a plan is compiled.
pub(super) struct Draft<'p> {
    pub(super) session: &'p Session,
    pub(super) plan: &'p Plan,
    pub(super) split: &'p Split,
}

impl Draft<'_> {
    /// The value a chain of reshapes starts from.
    fn root(&self, mut v: ValueId) -> ValueId {
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
            if refusal.is_none() && !install.runner.records() {
                refusal = Some(Unserved {
                    code: "capture_undeclared".into(),
                    message: format!(
                        "`{}` does not declare that it may be recorded",
                        install.name
                    ),
                    declined: true,
                });
            }
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
            });
        }
        Ok(There {
            place: self.split.place.clone(),
            calls,
            given: fixed,
            made,
            recorder,
            housed,
            ready: None,
            refusal,
        })
    }
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
            code: self.refusal.as_ref().map(|r| r.code.clone()),
            reason: self.refusal.as_ref().map(|r| r.message.clone()),
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
    }

    /// One step. The regions have been appended to afterwards, and the outputs are in the arena.
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
        (state, tokens): (&mut State, usize),
    ) -> Result<(), GraphError> {
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
        match &self.ready {
            Some(ready) => read(&*self.recorder, &self.made, &ready.values, arena)?,
            None => {
                let pass = self.pass(runners, state, tokens);
                let values = pass.map_err(|e| self.ended(runners, e))?;
                read(&*self.recorder, &self.made, &values, arena)?;
                // What they were in is there for the recording, which must not allocate.
                drop(values);
                if self.refusal.is_none() {
                    self.record(runners, state, tokens, stamp)?;
                }
            }
        }
        self.housed
            .iter()
            .for_each(|(region, _)| state.appended(*region, tokens));
        Ok(())
    }

    fn record(
        &mut self,
        runners: &[Planned],
        state: &State,
        tokens: usize,
        stamp: u64,
    ) -> Result<(), GraphError> {
        let mut values = None;
        let mut broke = None;
        let recorded = self
            .recorder
            .record(&mut || match self.pass(runners, state, tokens) {
                Ok(made) => {
                    values = Some(made);
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
        match (recorded, values) {
            (Ok(recorded), Some(values)) => {
                self.ready = Some(Ready {
                    stamp,
                    recorded,
                    values,
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
    /// everything there anew. It is a call the first of them did not serve, and who sits there says whether that ends the
    /// run.
    fn not_launched(&mut self, runners: &[Planned], why: Unserved) -> Result<(), GraphError> {
        if why.is_loss() {
            return Err(self.lost(why));
        }
        self.refusal = Some(why.clone());
        match self.calls.first() {
            Some(call) => runners[call.runner].runner.unserved(Unserved {
                declined: true,
                ..why
            }),
            None => Ok(()),
        }
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

    /// Every call once; all values they make.
    fn pass(
        &self,
        runners: &[Planned],
        state: &State,
        tokens: usize,
    ) -> Result<HashMap<ValueId, Held>, Ended> {
        let mut values: HashMap<ValueId, Held> = HashMap::new();
        for given in &self.given {
            values.insert(given.value, Held::Away(given.to.clone()));
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
                    Some(In::Value(v, dims)) => match values.get(v) {
                        Some(Held::Away(away)) if away.dims() != dims.as_slice() => {
                            Some(Held::Away(away.view(dims.clone())))
                        }
                        held => held.cloned(),
                    },
                });
            }
            let appended = call.appends.map(region).transpose()?;
            let made = runners[call.runner]
                .runner
                .replay_at(&inputs, appended.as_ref());
            let made = made.map_err(|why| Ended::Unserved(call.runner, why))?;
            if call.appends.is_none() {
                values.extend(call.outputs.iter().copied().zip(made));
            }
        }
        Ok(values)
    }
}

/// Brings the outputs into the arena.
fn read(
    recorder: &dyn Recorder,
    made: &[(ValueId, Buf)],
    values: &HashMap<ValueId, Held>,
    arena: &mut Arena,
) -> Result<(), GraphError> {
    for (v, buf) in made {
        match values.get(v) {
            Some(Held::Away(away)) => recorder.read(away, arena.get_mut(*buf))?,
            _ => {
                return Err(GraphError::Mismatch {
                    what: format!("value {} of a captured step", v.0),
                    expected: "made at the place".into(),
                    found: "nothing".into(),
                })
            }
        }
    }
    Ok(())
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
    use crate::session::{Frozen, Install, SpanOutcome, SpanRunner};

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

    /// Records, and fails to launch what it recorded; launches so far.
    struct Faulty(Place, Arc<Mutex<u32>>);

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
            *self.1.lock().unwrap() += 1;
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
        launches: Arc<Mutex<u32>>,
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
            true
        }

        fn recorder(&self) -> Option<Box<dyn Recorder>> {
            Some(Box::new(Faulty(self.place.clone(), self.launches.clone())))
        }

        fn replay_at(
            &self,
            inputs: &[Option<Held>],
            _: Option<&Arc<dyn Away>>,
        ) -> Result<Vec<Held>, Unserved> {
            let there = |held: &Held| held.at(&self.place).unwrap().fetch().unwrap();
            let inputs: Vec<_> = inputs.iter().map(|h| h.as_ref().map(there)).collect();
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

    /// The operations that make these values, at a place; launches, and what was not served.
    #[allow(clippy::type_complexity)] // three things of one test
    fn seated(
        session: &Session,
        ops: &[OpId],
        strict: bool,
    ) -> (Plan, Arc<Mutex<u32>>, Arc<Mutex<Vec<Unserved>>>) {
        let graph = session.graph();
        let (launches, unserved) = (Arc::default(), Arc::default());
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
                runner: Arc::new(Seated {
                    place: Place::new("a"),
                    kernel,
                    weight,
                    strict,
                    launches: Arc::clone(&launches),
                    unserved: Arc::clone(&unserved),
                }),
            }
        };
        let plan = session.plan(ops.iter().map(install).collect()).unwrap();
        (plan, launches, unserved)
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
    fn a_launch_that_fails_is_counted_once_and_the_calls_are_made_one_by_one() {
        let session = Session::new(decoder(), &Random).unwrap();
        let norm = made_by(&session, &[OpKind::RmsNorm]);
        let (plan, launches, unserved) = seated(&session, &norm, false);
        let step = steps_as_the_host(&session, &plan, 5).unwrap();
        assert_eq!(*launches.lock().unwrap(), 1);
        let told = unserved.lock().unwrap();
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].declined && told[0].code == "launch_refused");
        let note = step.manifest().there.unwrap();
        assert_eq!(
            (note.form.as_str(), note.code.as_deref()),
            ("called", Some("launch_refused"))
        );
        // Who is to stop there does.
        let (plan, launches, _) = seated(&session, &norm, true);
        let error = steps_as_the_host(&session, &plan, 5).unwrap_err();
        assert!(matches!(error, GraphError::Span { .. }), "{error}");
        assert_eq!(*launches.lock().unwrap(), 1);
    }

    #[test]
    fn a_region_of_the_host_keeps_its_readers_and_the_other_region_at_home() {
        let session = Session::new(decoder(), &Random).unwrap();
        let attention = made_by(&session, &[OpKind::Attention]);
        let appends = made_by(&session, &[OpKind::KvAppend]);
        for with in [&appends[..0], &appends[..1], &appends[1..]] {
            let ops = [with, &attention].concat();
            let (plan, _, _) = seated(&session, &ops, false);
            assert_eq!(plan.installs().len(), ops.len());
            let step = steps_as_the_host(&session, &plan, 3).unwrap();
            let place = step.manifest().there.map(|note| note.place);
            assert_eq!(place.unwrap_or_default(), "", "{}", with.len());
        }
    }
}
