//! A captured step: a plan with frozen shapes, every buffer planned ahead, nothing allocated while it replays.
//!
//! The graph's values lie in one arena cut by lifetime; state regions lie outside it and are the session's own, so the
//! eager and the captured form go on from each other's state. Operations a decode step needs run in place by code of
//! this crate. What has no such code goes through candle at every replay, allocates, and is listed in the manifest;
//! so is a span whose runner only takes tensors.
//!
//! Seats that all sit at one place, and between which the host does nothing, are a part of the step that stays there: its
//! calls run on values and regions that lie there, recorded and launched as one where they can be (`there`).
//!
//! A captured step has no way round a guard: one that would have fired is an error that names it, and the step was not
//! made (the state's length advances at the end, if it gets there). Seats count what was planned, once a replay.
//!
//! Owns: layout, replay, windows, the greedy choice inside the step. Does not own what is captured and why (core), nor
//! threads ([`Crew`]).

mod arena;
mod compile;
mod manifest;
mod step;
mod there;
mod window;

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use candle_core::{CpuStorage, Device, Storage, StorageRef, Tensor};

use crate::crew::Crew;
use crate::graph::{Graph, OpId, ValueId};
use crate::kernels::{self, row};
use crate::ops::OpKind;
use crate::plan::Plan;
use crate::session::{Frozen, Rows, Session, SpanOutcome, View, ViewMut};
use crate::state::State;
use crate::GraphError;

use arena::{Arena, Rest, OUTS};
use compile::{copy_dense, gather, names, refused, row_major_of, Compiler};
use step::{Place, Planned, Read, Slice, Source, Step, Zip};
use there::{There, Turn};
use window::{Content, Window};

pub use manifest::{Manifest, PlaceNote, RegionNote, StageNote, WindowNote};
pub use window::{Declared, WindowKind};

/// Kind of the stage that runs at a place.
const THERE: &str = "there";

/// Most operands a span may have to be called in the arena.
const MOST_INPUTS: usize = 16;

/// What is frozen.
#[derive(Clone, Copy, Debug)]
pub struct Capture<'a> {
    /// Inputs as every replay will have them: shapes and types count, and the content is the first one's.
    pub inputs: &'a [Tensor],
    /// The state it will run on, or one of the same batch and room.
    pub state: &'a State,
    /// Windows whose kind is not the usual one.
    pub windows: &'a [Declared],
    /// The next token is chosen inside the step.
    pub greedy: Option<Greedy>,
    /// The output, by index, of which no row but the last is read: it may then have no other.
    pub last_row: Option<usize>,
}

/// Which windows the greedy choice reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greedy {
    /// Output with the scores, by index.
    pub scores: usize,
    /// Input with the token.
    pub token: usize,
    /// Input with its position, advanced by one.
    pub position: usize,
}

/// See the module.
pub struct StaticPlan {
    graph: Arc<Graph>,
    /// By value: the parameters the steps read.
    params: Vec<Option<Tensor>>,
    /// By value: those they look rows up in.
    tables: HashMap<ValueId, Arc<dyn Rows>>,
    arena: Arena,
    numbers: Vec<Vec<i64>>,
    windows: Vec<Window>,
    steps: Vec<Step>,
    there: Option<There>,
    /// Why nothing stays at a place though seats sit there.
    not_there: Option<PlaceNote>,
    runners: Vec<Planned>,
    stages: Vec<StageNote>,
    outputs: Vec<(arena::Buf, Vec<usize>)>,
    greedy: Option<(Greedy, usize, usize)>,
    choice: Option<u32>,
    /// The scores come home in every replay, whoever chooses.
    bring_scores: bool,
    tokens: usize,
    batch: usize,
    room: usize,
}

impl std::fmt::Debug for StaticPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StaticPlan")
            .field("phase", &self.graph.phase)
            .field("steps", &self.steps.len())
            .field("bytes", &self.arena.bytes())
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Captures a plan. Seats are asked once whether they serve these shapes.
    ///
    /// # Errors
    /// [`GraphError::Capture`] with a code where the plan has no captured form; what a runner refuses.
    pub fn capture(&self, plan: &Plan, capture: &Capture<'_>) -> Result<StaticPlan, GraphError> {
        let graph = self.graph();
        if !Arc::ptr_eq(&plan.graph, graph) {
            let reason = "was made by another session, of another load".into();
            return refused("plan", "capture_unplaced", reason);
        }
        let symbols = self.bind_inputs(capture.inputs, capture.state)?;
        let tokens = symbols.get("T").copied().unwrap_or(0);
        let batch = symbols.get("B").copied().unwrap_or(1);
        let c = Compiler::run(self, plan, capture, symbols)?;
        let numbers_of = |input: usize| match c.windows.get(input).map(|w| &w.content) {
            Some(Content::Numbers(at)) if c.numbers[*at].len() == 1 => Some(*at),
            _ => None,
        };
        let greedy = match capture.greedy {
            None => None,
            Some(g) => match (
                numbers_of(g.token),
                numbers_of(g.position),
                c.outputs.get(g.scores),
            ) {
                (Some(token), Some(position), Some(_)) => Some((g, token, position)),
                _ => {
                    let reason = "expected one token, one position and scores".to_string();
                    return refused("greedy", "window_form", reason);
                }
            },
        };
        let mut plan = StaticPlan {
            params: vec![None; graph.values.len()],
            tables: HashMap::new(),
            graph: graph.clone(),
            arena: c.lives.place(),
            numbers: c.numbers,
            windows: c.windows,
            steps: c.steps,
            there: c.there,
            not_there: c.not_there,
            runners: c.runners,
            stages: c.stages,
            outputs: c.outputs,
            greedy,
            choice: None,
            bring_scores: false,
            tokens,
            batch,
            room: capture.state.room(),
        };
        plan.take_what_is_read(self)?;
        for (i, t) in capture.inputs.iter().enumerate() {
            if let Content::Values(buf) = plan.windows[i].content {
                let data = t.flatten_all().and_then(|t| t.to_vec1::<f32>());
                let data = data.map_err(|e| plan.failed("window", e))?;
                plan.arena.get_mut(buf).copy_from_slice(&data);
            }
        }
        Ok(plan)
    }
}

/// What the windows and the state were.
pub struct Mark {
    numbers: Vec<Vec<i64>>,
    choice: Option<u32>,
    state: crate::state::Mark,
}

impl StaticPlan {
    /// Takes the parameters that steps read: those of spans are their forms' business.
    fn take_what_is_read(&mut self, session: &Session) -> Result<(), GraphError> {
        let mut read = vec![false; self.params.len()];
        {
            let mut slice = |s: &Slice| {
                if let Source::Param(v) = s.source {
                    read[v.0] = true;
                }
            };
            for step in &self.steps {
                match step {
                    Step::Linear { x, w, .. } => [x, w].into_iter().for_each(&mut slice),
                    Step::Zip { a, b, .. } => [a, b].into_iter().for_each(&mut slice),
                    Step::Scale { x, .. } | Step::Act { x, .. } | Step::Append { x, .. } => {
                        slice(x)
                    }
                    Step::Norm { x, w, b, .. } => {
                        [Some(x), w.as_ref(), b.as_ref()]
                            .into_iter()
                            .flatten()
                            .for_each(&mut slice);
                    }
                    Step::Rope { x, cos, sin, .. } => {
                        [x, cos, sin].into_iter().for_each(&mut slice)
                    }
                    Step::There => {
                        let given = self.there.iter().flat_map(There::reads);
                        given.for_each(&mut slice);
                    }
                    Step::Attend { q, .. } => slice(q),
                    Step::Span { inputs, .. } => {
                        for input in inputs {
                            if let Read::Slice(s, _) = input {
                                slice(s);
                            }
                        }
                    }
                    _ => {}
                }
            }
        }
        let mut place = |p: &Place| {
            if let Source::Param(v) = p.source {
                read[v.0] = true;
            }
        };
        for step in &self.steps {
            match step {
                Step::Copy { from, .. } => place(from),
                Step::Store { x, .. } => place(x),
                Step::Foreign { inputs, .. } | Step::Tensors { inputs, .. } => {
                    inputs.iter().flatten().for_each(&mut place);
                }
                _ => {}
            }
        }
        for step in &self.steps {
            if let Step::Embedding { table, .. } = step {
                if let Source::Param(v) = table.source {
                    // All of it, and nobody else reads the tensor.
                    let all = |rows: &Arc<dyn Rows>| {
                        let (count, width) = rows.dims();
                        !read[v.0] && (table.offset, table.len) == (0, count * width)
                    };
                    match session.table(v)?.filter(all) {
                        Some(rows) => drop(self.tables.insert(v, rows)),
                        None => read[v.0] = true,
                    }
                }
            }
        }
        for (v, t) in self.params.iter_mut().enumerate().filter(|(v, _)| read[*v]) {
            *t = match session.value_tensor(ValueId(v))? {
                Some(p) if !row_major_of(&p) => {
                    let dense = p.contiguous();
                    Some(dense.map_err(|e| kernel_failed("parameter", "", e))?)
                }
                found => found,
            };
        }
        Ok(())
    }

    /// One step: the outputs are in their windows afterwards, and the state has advanced.
    ///
    /// # Errors
    /// [`GraphError::Guard`] when a guard fired, [`GraphError::Mismatch`] when the state has no room or another form;
    /// the state is as it was.
    pub fn replay(&mut self, state: &mut State, crew: &dyn Crew) -> Result<(), GraphError> {
        self.attempt(state, crew)?;
        for planned in &self.runners {
            planned.runner.replayed(planned.frozen);
        }
        Ok(())
    }

    /// One run; a place that is lost on the way is told to everybody who sits there, and to the state.
    fn attempt(&mut self, state: &mut State, crew: &dyn Crew) -> Result<(), GraphError> {
        let done = self.run(state, crew);
        if let Err(GraphError::PlaceLost { place, reason }) = &done {
            if let Some(there) = &mut self.there {
                there.forget();
            }
            for planned in &self.runners {
                if planned.runner.place().is_some_and(|p| p.name() == place) {
                    planned.runner.place_lost(reason)?;
                }
            }
            state.place_lost(place, reason)?;
        }
        done
    }

    fn run(&mut self, state: &mut State, crew: &dyn Crew) -> Result<(), GraphError> {
        let there = self.there.as_ref();
        let stays = |region: usize| {
            there.is_some_and(|there| there.housed.iter().any(|(r, _)| *r == region))
        };
        state.home_but(stays)?;
        let len = state.len();
        if state.batch() != self.batch || !state.holds(self.room, stays) {
            return Err(GraphError::Mismatch {
                what: "state of a captured step".into(),
                expected: format!("{} rows with room for {} positions", self.batch, self.room),
                found: format!("{} rows with room for {}", state.batch(), state.room()),
            });
        }
        if len + self.tokens > self.room {
            return Err(GraphError::Mismatch {
                what: "positions of a captured step".into(),
                expected: format!("at most {}", self.room),
                found: format!("{len} held and {} new", self.tokens),
            });
        }
        for w in &mut self.windows {
            w.take(&mut self.arena, &mut self.numbers);
        }
        state.begin();
        let mut chosen = None;
        for step in &self.steps {
            if let (Step::There, Some(there)) = (step, &mut self.there) {
                let params = &self.params;
                let slice =
                    |arena: &Arena,
                     s: &Slice,
                     f: &mut dyn FnMut(&[f32]) -> Result<(), GraphError>| {
                        match s.source {
                            Source::Buf(buf) => f(&arena.get(buf)[s.offset..s.offset + s.len]),
                            Source::Param(v) => match params[v.0].as_ref().map(held) {
                                Some(data) => f(&data[s.offset..s.offset + s.len]),
                                None => f(&[]),
                            },
                            _ => f(&[]),
                        }
                    };
                let turn = Turn {
                    state: &mut *state,
                    tokens: self.tokens,
                    scores: self.bring_scores,
                };
                chosen =
                    there.replay(&self.runners, &mut self.arena, slice, &self.numbers, turn)?;
                continue;
            }
            let mut run = Run {
                graph: &self.graph,
                params: &self.params,
                tables: &self.tables,
                arena: &mut self.arena,
                numbers: &self.numbers,
                runners: &self.runners,
                state: &mut *state,
                crew,
                valid: len + self.tokens,
                tokens: self.tokens,
            };
            run.step(step)?;
        }
        if let Some((g, token, position)) = self.greedy {
            // A token is only chosen together with its state.
            self.choice = match chosen {
                Some(chosen) => u32::try_from(chosen).ok(),
                None => {
                    let scores = self.arena.get(self.outputs[g.scores].0);
                    let vocabulary = self.outputs[g.scores].1.last().copied().unwrap_or(0);
                    let last = &scores[scores.len() - vocabulary.min(scores.len())..];
                    row::argmax(last).map(|i| i as u32)
                }
            };
            if let Some(next) = self.choice {
                self.numbers[token][0] = i64::from(next);
            }
            self.numbers[position][0] += self.tokens as i64;
        }
        state.commit(Some(self.tokens))
    }

    /// Replays `times` times and leaves no trace: state, windows and ledgers are as they were.
    ///
    /// # Errors
    /// As [`StaticPlan::replay`]; also then the state is as it was.
    pub fn warm_up(
        &mut self,
        state: &mut State,
        crew: &dyn Crew,
        times: usize,
    ) -> Result<(), GraphError> {
        let mark = self.mark(state);
        let done = (0..times).try_for_each(|_| self.attempt(state, crew));
        self.restore(state, mark)?;
        done
    }

    /// What windows of whole numbers and the state are now.
    pub fn mark(&self, state: &State) -> Mark {
        Mark {
            numbers: self.numbers.clone(),
            choice: self.choice,
            state: state.mark(),
        }
    }

    /// Goes back to a mark; what was appended since is zeroed.
    pub fn restore(&mut self, state: &mut State, mark: Mark) -> Result<(), GraphError> {
        self.numbers = mark.numbers;
        self.choice = mark.choice;
        state.restore(mark.state)
    }

    /// The token the last replay chose; none where no score was finite, or nothing is chosen here.
    pub fn choice(&self) -> Option<u32> {
        self.choice
    }

    /// What the next replay of a greedy step begins with.
    pub fn begin_with(&mut self, token: u32, position: usize) {
        if let Some((_, t, p)) = self.greedy {
            self.numbers[t][0] = i64::from(token);
            self.numbers[p][0] = position as i64;
        }
    }

    /// Whether every replay brings the scores of a greedy step home from the place where they are made. Otherwise one that
    /// chooses there leaves them there until somebody asks.
    pub fn bring_scores(&mut self, always: bool) {
        self.bring_scores = always;
    }

    /// The scores of a greedy step, as they lie; brought home now where the last replay left them.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`]; the next replay finds it as well, and tells who sits there.
    pub fn scores(&mut self) -> Result<&[f32], GraphError> {
        let Some((g, _, _)) = self.greedy else {
            return Ok(&[]);
        };
        let buf = self.outputs[g.scores].0;
        if let Some(there) = self.there.as_mut().filter(|there| there.left()) {
            there.fetch(self.arena.get_mut(buf))?;
            there.fetched();
        }
        Ok(self.arena.get(buf))
    }

    /// Where a window's elements are that were left at a place.
    fn left(&self, buf: arena::Buf) -> Option<&There> {
        let (g, _, _) = self.greedy?;
        let there = self.there.as_ref().filter(|there| there.left())?;
        (self.outputs[g.scores].0 == buf).then_some(there)
    }

    /// Rewrites a window between two replays.
    ///
    /// # Errors
    /// [`GraphError::NoWindow`]; [`GraphError::WindowForm`] with expected and given.
    pub fn write(&mut self, name: &str, tensor: &Tensor) -> Result<(), GraphError> {
        let Some(w) = self.windows.iter_mut().find(|w| w.name == name) else {
            return Err(self.no_window(name));
        };
        w.check(tensor)?;
        let written = w.write(tensor, &mut self.arena, &mut self.numbers);
        written.map_err(|e| kernel_failed("window", name, e))
    }

    /// A copy of what a window holds.
    ///
    /// # Errors
    /// [`GraphError::NoWindow`]; [`GraphError::PlaceLost`] for scores that were left at a place, as [`StaticPlan::scores`].
    pub fn read(&self, name: &str) -> Result<Tensor, GraphError> {
        let Some(w) = self.windows.iter().find(|w| w.name == name) else {
            return Err(self.no_window(name));
        };
        if let Content::Values(buf) = w.content {
            if let Some(there) = self.left(buf) {
                let mut data = vec![0.0; self.arena.get(buf).len()];
                there.fetch(&mut data)?;
                let made = Tensor::from_vec(data, w.dims.as_slice(), &Device::Cpu);
                return made.map_err(|e| kernel_failed("window", name, e));
            }
        }
        let read = w.read(&self.arena, &self.numbers);
        read.map_err(|e| kernel_failed("window", name, e))
    }

    fn no_window(&self, name: &str) -> GraphError {
        GraphError::NoWindow {
            name: name.into(),
            known: names(&self.windows),
        }
    }

    /// Spans the host computes in this step because their seat dispatches these shapes or gave itself up.
    pub fn left_to_host(&self) -> impl Iterator<Item = &str> {
        let host = self.runners.iter().filter(|p| p.frozen == Frozen::Host);
        host.map(|p| p.name.as_str())
    }

    /// Whether anything of it goes through candle, or allocates otherwise.
    pub fn allocates(&self) -> bool {
        self.stages.iter().any(|s| !s.in_place && s.kind != THERE)
            || self.there.as_ref().is_some_and(There::allocates)
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// The step as data.
    pub fn manifest(&self) -> Manifest {
        let windows = self.windows.iter().map(|w| {
            let (bytes, address) = match &w.content {
                Content::Values(buf) => {
                    let at = self.arena.offset(*buf);
                    (size_of_val(self.arena.get(*buf)), Some(at))
                }
                Content::Numbers(at) => (self.numbers[*at].len() * size_of::<i64>(), None),
            };
            WindowNote {
                name: w.name.clone(),
                kind: w.kind,
                dtype: format!("{:?}", w.dtype).to_lowercase(),
                dims: w.dims.clone(),
                bytes,
                address,
            }
        });
        let regions = self.graph.states.iter().map(|r| {
            let dims = match &r.kind {
                crate::RegionKind::Growing { heads, width } => {
                    vec![self.batch, *heads, self.room, *width]
                }
                crate::RegionKind::Fixed { dims } => {
                    std::iter::once(self.batch).chain(dims.clone()).collect()
                }
            };
            RegionNote {
                name: r.name.clone(),
                bytes: dims.iter().product::<usize>() * size_of::<f32>(),
                dims,
            }
        });
        let alone = self.there.as_ref().is_none_or(|there| !there.allocates());
        let there = |s: &StageNote| s.kind == THERE && alone;
        let allocating = self.stages.iter().filter(|s| !s.in_place && !there(s));
        Manifest {
            phase: self.graph.phase.clone(),
            batch: self.batch,
            tokens: self.tokens,
            capacity: self.room,
            windows: windows.collect(),
            regions: regions.collect(),
            arena_bytes: self.arena.bytes(),
            planned_bytes: self.arena.planned * size_of::<f32>(),
            greedy: self.greedy.is_some(),
            allocating: allocating
                .map(|s| format!("{} at {}", s.kind, s.at))
                .collect(),
            there: match &self.there {
                Some(there) => Some(there.note()),
                None => self.not_there.clone(),
            },
            stages: self.stages.clone(),
        }
    }

    /// The value a window stands for.
    pub fn window_value(&self, name: &str) -> Option<ValueId> {
        let w = self.windows.iter().find(|w| w.name == name)?;
        Some(w.value)
    }

    fn failed(&self, at: &str, e: candle_core::Error) -> GraphError {
        kernel_failed("capture", at, e)
    }
}

fn kernel_failed(op: &str, at: &str, e: candle_core::Error) -> GraphError {
    GraphError::Kernel {
        op: op.into(),
        at: at.into(),
        source: Box::new(e),
    }
}

/// Dense elements held for reading.
enum Held<'a> {
    Arena(&'a [f32]),
    Tensor(StorageRef<'a>, usize, usize),
}

impl Deref for Held<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Held::Arena(data) => data,
            Held::Tensor(storage, from, len) => match &**storage {
                Storage::Cpu(CpuStorage::F32(v)) => &v[*from..from + len],
                // The session holds parameters and regions as f32 on the CPU.
                _ => &[],
            },
        }
    }
}

fn held(t: &Tensor) -> Held<'_> {
    let (storage, layout) = t.storage_and_layout();
    let (from, len) = (layout.start_offset(), layout.shape().elem_count());
    Held::Tensor(storage, from, len)
}

/// One replay.
struct Run<'a> {
    graph: &'a Graph,
    params: &'a [Option<Tensor>],
    tables: &'a HashMap<ValueId, Arc<dyn Rows>>,
    arena: &'a mut Arena,
    numbers: &'a [Vec<i64>],
    runners: &'a [Planned],
    state: &'a mut State,
    crew: &'a dyn Crew,
    /// Positions of a region that are valid once this step has appended.
    valid: usize,
    tokens: usize,
}

/// Elements of a slice, from the arena's shared part or a parameter.
fn take<'a>(params: &'a [Option<Tensor>], rest: &Rest<'a>, s: &Slice) -> Held<'a> {
    match s.source {
        Source::Buf(buf) => Held::Arena(&rest.get(buf)[s.offset..s.offset + s.len]),
        Source::Param(v) => match params[v.0].as_ref().map(held) {
            Some(Held::Tensor(storage, from, _)) => Held::Tensor(storage, from + s.offset, s.len),
            _ => Held::Arena(&[]),
        },
        _ => Held::Arena(&[]),
    }
}

impl Run<'_> {
    fn step(&mut self, step: &Step) -> Result<(), GraphError> {
        let (crew, params) = (self.crew, self.params);
        match step {
            Step::Linear { x, w, layout, out } => {
                let ([out], rest) = self.arena.lend([*out]);
                let (x, w) = (take(params, &rest, x), take(params, &rest, w));
                row::linear(crew, &x, &w, *layout, out);
            }
            Step::Zip { kind, a, b, out } => {
                let ([out], rest) = self.arena.lend([*out]);
                let (a, b) = (take(params, &rest, a), take(params, &rest, b));
                match kind {
                    Zip::Add => row::zip(&a, &b, |a, b| a + b, out),
                    Zip::Mul => row::zip(&a, &b, |a, b| a * b, out),
                }
            }
            Step::Scale { x, by, out } => {
                let ([out], rest) = self.arena.lend([*out]);
                let x = take(params, &rest, x);
                out.iter_mut().zip(x.iter()).for_each(|(o, v)| *o = v * by);
            }
            Step::Act { kind, x, out } => {
                let ([out], rest) = self.arena.lend([*out]);
                row::act(*kind, &take(params, &rest, x), out);
            }
            Step::Norm {
                kind,
                x,
                w,
                b,
                width,
                out,
            } => {
                let ([out], rest) = self.arena.lend([*out]);
                let w = w.as_ref().map(|w| take(params, &rest, w));
                let b = b.as_ref().map(|b| take(params, &rest, b));
                let x = take(params, &rest, x);
                row::norm(*kind, &x, w.as_deref(), b.as_deref(), *width, out);
            }
            Step::Rope {
                x,
                cos,
                sin,
                tokens,
                widths,
                pairing,
                out,
            } => {
                let ([out], rest) = self.arena.lend([*out]);
                let x = take(params, &rest, x);
                let (cos, sin) = (take(params, &rest, cos), take(params, &rest, sin));
                row::rope(&x, (&cos, &sin), *tokens, *widths, *pairing, out);
            }
            Step::RopeTable {
                positions,
                rule,
                at,
                cos,
                sin,
            } => {
                let ([at, cos, sin], _) = self.arena.lend([*at, *cos, *sin]);
                let (inv_freq, scaling, axes) = &**rule;
                let rule = (inv_freq.as_slice(), *scaling, axes.as_deref());
                row::rope_table(&self.numbers[*positions], rule, at, cos, sin);
            }
            Step::Embedding {
                ids,
                table,
                width,
                out,
            } => {
                let ([out], rest) = self.arena.lend([*out]);
                let kept = match table.source {
                    Source::Param(v) => self.tables.get(&v),
                    _ => None,
                };
                let table = take(params, &rest, table);
                let rows = kept.map_or(table.len() / width.max(&1), |t| t.dims().0);
                for (id, out) in self.numbers[*ids].iter().zip(out.chunks_mut(*width)) {
                    match (usize::try_from(*id), kept) {
                        (Ok(id), Some(kept)) if id < rows => kept.row(id, out)?,
                        (Ok(id), None) if id < rows => {
                            out.copy_from_slice(&table[id * width..(id + 1) * width]);
                        }
                        _ => {
                            let fault = kernels::not_in_vocabulary(*id, rows);
                            return Err(fault.at(OpKind::Embedding, &self.graph.phase));
                        }
                    }
                }
            }
            Step::Append { region, x } => {
                let (_, rest) = self.arena.lend([]);
                let x = take(params, &rest, x);
                let done = self.state.append_slice(*region, &x, self.tokens);
                done.map_err(|f| f.at(OpKind::KvAppend, &region_name(self.graph, *region)))?;
            }
            Step::Attend {
                sizes,
                q,
                k,
                v,
                scores,
                out,
            } => {
                let ([scores, out], rest) = self.arena.lend([*scores, *out]);
                let q = take(params, &rest, q);
                let (Some(k), Some(v)) = (self.state.whole(*k), self.state.whole(*v)) else {
                    return Err(no_region(self.graph, *k));
                };
                let (k, v) = (held(k), held(v));
                row::attend(crew, sizes, self.valid, (&q, &k, &v), scores, out);
            }
            Step::Copy { from, to } => {
                let ([to], rest) = self.arena.lend([*to]);
                let whole = match from.source {
                    Source::Buf(buf) => Held::Arena(rest.get(buf)),
                    Source::Param(v) => params[v.0].as_ref().map_or(Held::Arena(&[]), held),
                    _ => Held::Arena(&[]),
                };
                copy_dense(&whole, from, to);
            }
            Step::Load { region, to } => {
                let content = self.state.content(*region);
                let content = content
                    .and_then(|t| Ok(t.flatten_all()?.to_vec1::<f32>()?))
                    .map_err(|f| {
                        f.at(crate::OpKind::StateWrite, &region_name(self.graph, *region))
                    })?;
                self.arena.get_mut(*to).copy_from_slice(&content);
            }
            Step::Store { region, x } => {
                let x = self.tensor(x).map_err(|e| kernel_failed("state", "", e))?;
                let done = self.state.write(*region, &x);
                done.map_err(|f| {
                    f.at(crate::OpKind::StateWrite, &region_name(self.graph, *region))
                })?;
            }
            Step::Foreign {
                op,
                kernel,
                inputs,
                outputs,
            } => {
                let inputs = self.tensors(inputs)?;
                let mut made = None;
                crew.aside(&mut || made = Some(kernel.run(&inputs, None)));
                let kind = self.graph.op(*op).kind;
                let name = self.name(*op);
                let made = match made {
                    Some(made) => made.map_err(|f| f.at(kind, &name))?,
                    None => Vec::new(),
                };
                self.put(&name, made, outputs)?;
            }
            Step::Span {
                runner,
                inputs,
                outputs,
                dims,
            } => self.span(*runner, inputs, outputs, dims)?,
            // The caller's, who has it.
            Step::There => {}
            Step::Tensors {
                runner,
                inputs,
                outputs,
            } => {
                let planned = &self.runners[*runner];
                let inputs = self.tensors(inputs)?;
                match planned.runner.run(&inputs)? {
                    SpanOutcome::Done(made) => self.put(&planned.name, made, outputs)?,
                    SpanOutcome::Host => {
                        return Err(GraphError::Guard {
                            name: planned.name.clone(),
                            reason: "the runner handed the call back to the host".into(),
                        })
                    }
                }
            }
        }
        Ok(())
    }

    fn span(
        &mut self,
        runner: usize,
        inputs: &[Read],
        outputs: &[arena::Buf],
        dims: &[Vec<usize>],
    ) -> Result<(), GraphError> {
        let planned = &self.runners[runner];
        for read in inputs {
            if let Read::Region(region, Some(buf)) = read {
                let Some(t) = self.state.whole(*region) else {
                    return Err(no_region(self.graph, *region));
                };
                let (data, room, valid) = (held(t), t.dims()[2], self.valid);
                let width = t.dims()[3];
                let to = self.arena.get_mut(*buf);
                let heads = data.chunks_exact(room * width);
                for (to, from) in to.chunks_exact_mut(valid * width).zip(heads) {
                    to.copy_from_slice(&from[..valid * width]);
                }
            }
        }
        let empty = std::array::from_fn(|_| Default::default());
        let (lent, rest) = self.arena.lend_some::<OUTS>(outputs, empty);
        let mut region_dims = [[0usize; 4]; MOST_INPUTS];
        let mut data: [Option<Held<'_>>; MOST_INPUTS] = std::array::from_fn(|_| None);
        for (i, read) in inputs.iter().enumerate() {
            match read {
                Read::Absent => {}
                Read::Slice(s, _) => data[i] = Some(take(self.params, &rest, s)),
                Read::Region(region, buf) => {
                    if let Some(t) = self.state.whole(*region) {
                        let d = t.dims();
                        region_dims[i] = [d[0], d[1], self.valid, d[3]];
                    }
                    let len: usize = region_dims[i].iter().product();
                    data[i] = match buf {
                        Some(buf) => Some(Held::Arena(&rest.get(*buf)[..len])),
                        None => self.state.whole(*region).map(held),
                    };
                }
            }
        }
        let mut views: [Option<View<'_>>; MOST_INPUTS] = [None; MOST_INPUTS];
        for (i, read) in inputs.iter().enumerate() {
            let dims: &[usize] = match read {
                Read::Slice(_, dims) => dims,
                _ => &region_dims[i],
            };
            views[i] = data[i].as_deref().map(|data| (data, dims));
        }
        let mut results: [ViewMut<'_>; OUTS] = std::array::from_fn(|_| Default::default());
        for ((result, lent), dims) in results.iter_mut().zip(lent).zip(dims) {
            *result = (lent, dims.as_slice());
        }
        let results = &mut results[..outputs.len()];
        let done = planned.runner.replay(&views[..inputs.len()], results);
        done.map_err(|e| match e {
            GraphError::Guard { reason, .. } => GraphError::Guard {
                name: planned.name.clone(),
                reason,
            },
            other => other,
        })
    }

    fn put(
        &mut self,
        name: &str,
        made: Vec<Tensor>,
        outputs: &[(arena::Buf, Vec<usize>)],
    ) -> Result<(), GraphError> {
        let wrong = |found: String| GraphError::Mismatch {
            what: format!("results of `{name}` in a captured step"),
            expected: format!("{:?}", outputs.iter().map(|(_, d)| d).collect::<Vec<_>>()),
            found,
        };
        if made.len() != outputs.len() || made.iter().zip(outputs).any(|(t, (_, d))| t.dims() != *d)
        {
            let found: Vec<&[usize]> = made.iter().map(Tensor::dims).collect();
            return Err(wrong(format!("{found:?}")));
        }
        for (t, (buf, _)) in made.iter().zip(outputs) {
            let dense = t
                .contiguous()
                .map_err(|e| kernel_failed("result", name, e))?;
            let data = held(&dense);
            if data.len() != self.arena.get(*buf).len() {
                return Err(wrong(format!("{:?} of {:?}", t.dims(), t.dtype())));
            }
            self.arena.get_mut(*buf).copy_from_slice(&data);
        }
        Ok(())
    }

    fn tensors(&self, places: &[Option<Place>]) -> Result<Vec<Option<Tensor>>, GraphError> {
        places
            .iter()
            .map(|p| p.as_ref().map(|p| self.tensor(p)).transpose())
            .collect::<candle_core::Result<_>>()
            .map_err(|e| kernel_failed("operand", &self.graph.phase, e))
    }

    fn tensor(&self, place: &Place) -> candle_core::Result<Tensor> {
        let dims = place.dims.as_slice();
        let copied = |data: &[f32]| {
            let mut flat = Vec::with_capacity(place.len());
            gather(data, place, |v| flat.push(v));
            Tensor::from_vec(flat, dims, &Device::Cpu)
        };
        match place.source {
            Source::Buf(buf) => copied(self.arena.get(buf)),
            Source::Param(v) => match &self.params[v.0] {
                Some(t) if t.dims() == dims && place.offset == 0 && place.is_dense() => {
                    Ok(t.clone())
                }
                Some(t) => copied(&held(t)),
                None => candle_core::bail!("a parameter that is read was let go"),
            },
            Source::Numbers(at) => Tensor::from_slice(&self.numbers[at], dims, &Device::Cpu),
            Source::Region(region) => match self.state.whole(region) {
                Some(t) => t.narrow(2, 0, self.valid),
                None => candle_core::bail!("region {region} has no memory"),
            },
        }
    }

    fn name(&self, op: OpId) -> String {
        let op = self.graph.op(op);
        match op.outputs.first() {
            Some(v) => self.graph.value(*v).name.clone(),
            None => op.module.clone(),
        }
    }
}

fn region_name(graph: &Graph, region: usize) -> String {
    let spec = graph.states.get(region);
    spec.map_or_else(String::new, |r| r.name.clone())
}

fn no_region(graph: &Graph, region: usize) -> GraphError {
    GraphError::Mismatch {
        what: format!("region `{}`", region_name(graph, region)),
        expected: "memory for all its positions".into(),
        found: "none; call `reserve` on the state".into(),
    }
}

#[cfg(test)]
mod tests;
