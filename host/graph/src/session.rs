//! The host path: a graph executed with candle, unmodified, with state regions; and plans that replace spans of
//! it by somebody else's code.
//!
//! A [`Plan`] is a schedule of the same graph: the host plan runs every operation; another plan hands the spans of
//! its [`Install`]s to their runners, which may decline a call so that the session runs the original operations.
//! Parameters and state are shared, so switching arms is choosing a plan, and detaching is using the host plan.
//!
//! Beside its products a decode step of SmolLM2-135M's sizes (30 layers, 128 positions) costs about 1 ms of 33:
//! `examples/decode_overhead`, two threads, 0.93 ms at best and 1.3 ms median on a busy machine.
//!
//! Owns execution: the order of steps, when a value is dropped. Does not own parameters (`params`), arithmetic
//! (`kernels`), schedules (`plan`), regions (`state`), threads (candle's pool is the process's rayon pool), nor what
//! stands behind a runner.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::graph::{Dim, Graph, Layout, OpId, Origin, ParamRef, ValueId};
use crate::kernels::{look_up, reshaped, row, Kernel, ReshapeDim};
use crate::ops::{AttrValue, OpKind};
use crate::params::{stored, Params};
use crate::place::{Away, AwayOutcome, Held, Place, Quarters, Recorder, Unserved};
use crate::plan::What;
use crate::tail;
use crate::GraphError;

pub use crate::params::{Originals, Stored};
pub use crate::plan::Plan;
pub use crate::state::State;

/// Gives parameters as stored orientation, f32, on the CPU.
pub trait ParamSource {
    /// The tensor of a parameter (all rows when `rows` is `None`). The session asks for whole parameters only and
    /// cuts row ranges itself, so that ranges of one parameter share its memory.
    fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError>;

    /// The parameter as a table to look rows up in, where it is kept in a form that is smaller than f32; `None` where
    /// it is not, and then the tensor is read.
    ///
    /// # Errors
    /// As [`ParamSource::tensor`].
    fn rows(&self, param: &ParamRef) -> Result<Option<Arc<dyn Rows>>, GraphError> {
        let _ = param;
        Ok(None)
    }
}

/// A matrix of which single rows are read.
pub trait Rows: Send + Sync {
    /// Its rows and their width.
    fn dims(&self) -> (usize, usize);

    /// Fills `out`, of the width, with a row that exists, to the bit as [`ParamSource::tensor`] has it. Allocates nothing.
    ///
    /// # Errors
    /// A value that is not finite.
    fn row(&self, at: usize, out: &mut [f32]) -> Result<(), GraphError>;
}

/// Sees values while a plan runs: the run's inputs and every result that is made. Values inside an installed span
/// that ran elsewhere are not made, so not seen. A view of a state region shares memory with it: copy what is kept.
pub trait Observer {
    /// Whether the value is of interest (asked once a run and value).
    fn wants(&self, value: ValueId) -> bool;
    /// Its content at one call.
    fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError>;
}

/// What a runner did with a call.
#[derive(Debug)]
pub enum SpanOutcome {
    /// The outputs, in the order of [`Install::outputs`], with the host's shapes and dtype.
    Done(Vec<Tensor>),
    /// Nothing: the session runs the original operations.
    Host,
}

/// Dense f32 elements with their dims.
pub type View<'a> = (&'a [f32], &'a [usize]);
/// The same, to be filled.
pub type ViewMut<'a> = (&'a mut [f32], &'a [usize]);

/// What is settled about a span when a step is captured: its shapes will not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frozen {
    /// The runner serves every replay, in the plan's memory.
    Served {
        /// It allocates while it does.
        allocates: bool,
    },
    /// The host's operations run here: the runner's declaration leaves these shapes to it, or it gave itself up.
    Host,
    /// The runner is asked at every replay and takes tensors.
    Tensors,
    /// The runner serves every replay at its place, on values that lie there.
    There,
}

/// Executes a span in place of the host's operations.
pub trait SpanRunner: Send + Sync {
    /// One call. `inputs` in the order of [`Install::inputs`].
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError>;

    /// Where it runs, when that is not host memory: it is then asked with [`SpanRunner::run_at`].
    fn place(&self) -> Option<&Place> {
        None
    }

    /// One call at its place. Every input lies there or in host memory; what does not lie there yet it brings there.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`] when the place is gone.
    fn run_at(&self, inputs: &[Option<Held>]) -> Result<AwayOutcome, GraphError> {
        let _ = inputs;
        Ok(AwayOutcome::Host)
    }

    /// Whether it appends to regions that have their home at its place. It is then asked with [`SpanRunner::append_at`].
    fn houses_regions(&self) -> bool {
        false
    }

    /// Memory at its place for the regions of a state that has none there yet.
    fn quarters(&self) -> Option<Box<dyn Quarters>> {
        None
    }

    /// Whether it reads a region that has its home at its place, and finds its valid length there.
    fn reads_housed(&self) -> bool {
        false
    }

    /// Appends `x [B, heads, T, D]` to a region that has its home at its place: to the last `T` of its valid positions.
    /// `Done` has no outputs: the region is what is made.
    ///
    /// # Errors
    /// [`GraphError::PlaceLost`] when the place is gone.
    fn append_at(&self, x: &Held, region: &Arc<dyn Away>) -> Result<AwayOutcome, GraphError> {
        let _ = (x, region);
        Ok(AwayOutcome::Host)
    }

    /// The region it would have appended to could not be moved to its place: counts the call as not served.
    ///
    /// # Errors
    /// When the caller chose to stop rather than to go on with the host.
    fn not_housed(&self, why: &GraphError) -> Result<(), GraphError> {
        let _ = why;
        Ok(())
    }

    /// The place is gone, and the run begins anew: it declines every call from now on.
    ///
    /// # Errors
    /// When the caller chose to stop rather than to go on with the host.
    fn place_lost(&self, reason: &str) -> Result<(), GraphError> {
        let _ = reason;
        Ok(())
    }

    /// Whether calls of these sizes are served, asked once when a step is captured. What grows with the state comes at
    /// its largest. An error is a contract that these sizes miss.
    fn freeze(&self, _inputs: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        Ok(Frozen::Tensors)
    }

    /// Whether it serves these sizes at its place in a captured step, asked as [`SpanRunner::freeze`] is.
    ///
    /// # Errors
    /// As there.
    fn stays(&self, inputs: &[Option<&[usize]>]) -> Result<bool, GraphError> {
        let _ = inputs;
        Ok(false)
    }

    /// Whether its calls may be recorded at its place and done again.
    fn records(&self) -> bool {
        false
    }

    /// Memory and recording of its place, for a captured step.
    fn recorder(&self) -> Option<Box<dyn Recorder>> {
        None
    }

    /// One call of a captured step at its place, on values that all lie there: its outputs there. Or, with a region, an
    /// append to it, without any output. Nothing is counted here.
    ///
    /// # Errors
    /// Why it was not served.
    fn replay_at(
        &self,
        inputs: &[Option<Held>],
        region: Option<&Arc<dyn Away>>,
    ) -> Result<Vec<Held>, Unserved> {
        let _ = (inputs, region);
        Err(Unserved {
            code: "rt_device".into(),
            message: "its runner sits at no place".into(),
            declined: true,
        })
    }

    /// A call of a captured step at its place was not served: counts it.
    ///
    /// # Errors
    /// When the caller chose to stop rather than to go on with the host.
    fn unserved(&self, why: Unserved) -> Result<(), GraphError> {
        let _ = why;
        Ok(())
    }

    /// Whether a region may come to [`SpanRunner::replay`] as it lies: its data are then longer than its dims
    /// `[B, heads, T, D]`, and every head's positions begin at that multiple of `len / (B * heads)`.
    fn reads_regions(&self) -> bool {
        false
    }

    /// One call of a captured step whose runner answered [`Frozen::Served`]: fills the outputs.
    /// An error ends the step. It is counted here, a served call is not.
    fn replay(
        &self,
        _inputs: &[Option<View<'_>>],
        _outputs: &mut [ViewMut<'_>],
    ) -> Result<(), GraphError> {
        Err(GraphError::Span {
            name: "span".into(),
            reason: "its runner only takes tensors".into(),
        })
    }

    /// A captured step was replayed to its end, with what was settled for this span: counts it.
    fn replayed(&self, _planned: Frozen) {}

    /// Whether some calls of at most so many rows are the host's as planned, so that its parameters are needed here.
    fn host_serves(&self, _rows: usize) -> bool {
        true
    }

    /// The host's parameters of this span are gone for good: what is not served is refused from now on.
    fn host_gone(&self) {}
}

/// A span to be handed to a runner; or, without operations and outputs, the choice of the next token ([`Install::choice`]).
#[derive(Clone)]
pub struct Install {
    /// For messages.
    pub name: String,
    /// Host operations replaced, convex.
    pub ops: Vec<OpId>,
    /// Host values the span reads, in span order; `None` for an absent optional.
    pub inputs: Vec<Option<ValueId>>,
    /// Host values it makes.
    pub outputs: Vec<ValueId>,
    /// Who runs it.
    pub runner: Arc<dyn SpanRunner>,
}

impl Install {
    /// The greedy choice among scores, an output of the graph, at the place where they are made: a captured step that
    /// chooses asks the runner for it, who makes one whole number of every row, and nobody else does. The number is that
    /// of [`first_largest`], or -1.
    pub fn choice(name: String, scores: ValueId, runner: Arc<dyn SpanRunner>) -> Self {
        Install {
            name,
            ops: Vec::new(),
            inputs: vec![Some(scores)],
            outputs: Vec::new(),
            runner,
        }
    }

    /// The scores, where it is a choice.
    pub fn chooses(&self) -> Option<ValueId> {
        match self.inputs.as_slice() {
            [Some(scores)] if self.ops.is_empty() && self.outputs.is_empty() => Some(*scores),
            _ => None,
        }
    }
}

/// What a greedy step chooses: the first of the largest scores; none where no score is finite.
pub fn first_largest(scores: &[f32]) -> Option<usize> {
    row::argmax(scores)
}

impl std::fmt::Debug for Install {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Install")
            .field("name", &self.name)
            .field("ops", &self.ops)
            .field("inputs", &self.inputs)
            .field("outputs", &self.outputs)
            .finish_non_exhaustive()
    }
}

/// How the session runs one operation.
#[derive(Debug)]
pub(crate) enum Exec {
    Kernel(Kernel),
    /// Appends to a region, by index.
    Append(usize),
    /// Replaces the content of a fixed region, by index.
    Write(usize),
}

/// A graph with its parameters in memory.
pub struct Session {
    graph: Arc<Graph>,
    exec: Vec<Exec>,
    params: Params,
    host: Plan,
}

/// Some operations of a graph with their parameters, in the host's order.
#[derive(Debug)]
pub struct Piece {
    graph: Arc<Graph>,
    kernels: Vec<(OpId, Kernel)>,
    params: HashMap<ValueId, Tensor>,
}

impl Piece {
    /// Exactly what the host makes of these values. Whatever else the operations read must be a parameter, and a value
    /// that is wanted must be made by one of them: else [`GraphError::Span`].
    pub fn run(
        &self,
        given: &[(ValueId, Tensor)],
        wanted: &[ValueId],
    ) -> Result<Vec<Tensor>, GraphError> {
        let mut env: HashMap<ValueId, Tensor> = given.iter().cloned().collect();
        let missing = |v: ValueId, what: &str| GraphError::Span {
            name: self.graph.value(v).name.clone(),
            reason: what.into(),
        };
        for (id, kernel) in &self.kernels {
            let op = self.graph.op(*id);
            let inputs = op
                .inputs
                .iter()
                .map(|v| match v {
                    None => Ok(None),
                    Some(v) => match env.get(v).or_else(|| self.params.get(v)) {
                        Some(t) => Ok(Some(t)),
                        None => Err(missing(*v, "is read by a piece and was not given to it")),
                    },
                })
                .collect::<Result<Vec<_>, _>>()?;
            let inputs: Vec<Option<Tensor>> = inputs.into_iter().map(|t| t.cloned()).collect();
            let at = op
                .outputs
                .first()
                .map(|v| self.graph.value(*v).name.as_str());
            let made = kernel
                .run(&inputs, None)
                .map_err(|f| f.at(op.kind, at.unwrap_or(&op.module)))?;
            env.extend(op.outputs.iter().copied().zip(made));
        }
        let take = |v: &ValueId| {
            let made = env.get(v).cloned();
            made.ok_or_else(|| missing(*v, "is made by no operation of the piece"))
        };
        wanted.iter().map(take).collect()
    }
}

/// Values alive during a run, by value id.
type Env = Vec<Option<Held>>;

impl Session {
    /// Reads every parameter the graph uses. The graph must have passed `check`. A parameter whose shape contradicts the graph is a
    /// [`GraphError::Mismatch`] that names it.
    pub fn new(graph: Arc<Graph>, params: &dyn ParamSource) -> Result<Session, GraphError> {
        let loaded = Params::load(graph.clone(), |param| params.tensor(param))?;
        Self::with(graph, loaded)
    }

    /// As [`Session::new`], and a parameter is read when it is first asked for: what only forms multiply with is then
    /// never in memory. A failure to read shows at that run.
    pub fn reading_later(
        graph: Arc<Graph>,
        source: Arc<dyn ParamSource + Send + Sync>,
    ) -> Result<Session, GraphError> {
        let params = Params::later(graph.clone(), source);
        Self::with(graph, params)
    }

    fn with(graph: Arc<Graph>, params: Params) -> Result<Session, GraphError> {
        let host = Plan::new(graph.clone(), Vec::new())?;
        let exec = graph
            .op_ids()
            .map(|op| prepare(&graph, op))
            .collect::<Result<_, _>>()?;
        Ok(Session {
            graph,
            exec,
            params,
            host,
        })
    }

    /// The graph.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    pub(crate) fn exec(&self, op: OpId) -> &Exec {
        &self.exec[op.0]
    }

    /// A parameter of the graph, f32, as stored. One that was released comes back for it.
    ///
    /// # Errors
    /// [`GraphError::Released`] for one that was let go for good; what its source says.
    pub fn param(&self, param: &ParamRef) -> Result<Option<Tensor>, GraphError> {
        let value = self.params.value_of(param);
        value.map_or(Ok(None), |v| self.value_tensor(v))
    }

    /// Dims of a parameter of the graph; reads nothing.
    pub fn param_dims(&self, param: &ParamRef) -> Option<&[Dim]> {
        let value = self.params.value_of(param)?;
        Some(&self.graph.value(value).dims)
    }

    /// The tensor of a value that is a parameter, as [`Session::param`].
    ///
    /// # Errors
    /// As there.
    pub fn value_tensor(&self, value: ValueId) -> Result<Option<Tensor>, GraphError> {
        self.params.get(value)
    }

    /// Its parameters, each with the values that are all of it or rows of it.
    pub fn stored(&self) -> Vec<Stored> {
        stored(&self.graph).collect()
    }

    /// Whether every value of a parameter is in memory.
    pub fn holds(&self, stored: &Stored) -> bool {
        let mut values = stored.values.iter();
        values.all(|v| self.params.held(*v).is_some())
    }

    /// Whether a parameter was not read yet: neither in memory nor let go.
    pub fn unread(&self, stored: &Stored) -> bool {
        stored.values.iter().any(|v| self.params.unread(*v))
    }

    /// Whether a tensor is, bit for bit, what the session holds of a parameter.
    ///
    /// # Errors
    /// [`GraphError::Mismatch`] when it has another shape than the graph declares.
    pub fn holds_this(&self, stored: &Stored, whole: &Tensor) -> Result<bool, GraphError> {
        self.params.is(stored, whole)
    }

    /// Lets go of a parameter. Whoever reads it gets it again from `from`, whole, and counted; without a source it is let
    /// go for good. Plans captured before keep what they read.
    pub fn release(&self, param: &ParamRef, from: Option<&Arc<dyn Originals>>) {
        self.params.release(param, from);
    }

    /// How often each parameter came back after it was released.
    pub fn restored(&self) -> BTreeMap<String, u64> {
        self.params.restored()
    }

    /// The parameter as a table to look rows up in, when it was not read as a tensor and its source keeps one.
    pub(crate) fn table(&self, value: ValueId) -> Result<Option<Arc<dyn Rows>>, GraphError> {
        self.params.table(value)
    }

    /// Reads the parameters of these operations now, where they are read later: beside other work.
    ///
    /// # Errors
    /// The source's.
    pub fn read_params(&self, ops: impl IntoIterator<Item = OpId>) -> Result<(), GraphError> {
        for op in ops {
            let table = self.looked_up(op);
            for value in self.graph.op(op).inputs.iter().flatten() {
                if table != Some(*value) || self.params.table(*value)?.is_none() {
                    self.params.get(*value)?;
                }
            }
        }
        Ok(())
    }

    /// The value an operation looks rows up in.
    pub(crate) fn looked_up(&self, op: OpId) -> Option<ValueId> {
        match (&self.exec[op.0], self.graph.op(op).inputs.as_slice()) {
            (Exec::Kernel(Kernel::Embedding), [_, table]) => *table,
            _ => None,
        }
    }

    /// Empty regions for `batch` rows; `capacity_hint` positions are allocated at the first append.
    pub fn new_state(&self, batch: usize, capacity_hint: usize) -> State {
        State::new(&self.graph.states, batch, capacity_hint)
    }

    /// The plan in which the host runs everything.
    pub fn host_plan(&self) -> Plan {
        self.host.clone()
    }

    /// A plan that hands spans to runners. Refused with [`GraphError::Span`] when spans overlap, are not convex,
    /// depend on each other, write a state region, or when inputs and outputs do not cover their edges.
    pub fn plan(&self, installs: Vec<Install>) -> Result<Plan, GraphError> {
        Plan::new(self.graph.clone(), installs)
    }

    /// One run: graph outputs in order. `inputs` in the order of [`Graph::inputs`]. The state advances only when the
    /// run succeeds. When a place is lost on the way the run begins anew without the runners that sat there, unless one
    /// of them says otherwise or somebody observes, who would see values twice.
    pub fn run(
        &self,
        plan: &Plan,
        inputs: &[Tensor],
        state: &mut State,
        observer: Option<&mut dyn Observer>,
    ) -> Result<Vec<Tensor>, GraphError> {
        if observer.is_some() {
            return self.run_once(plan, inputs, state, observer, None);
        }
        self.run_again(plan, inputs, state, None)
    }

    /// As [`Session::run`] without an observer, for who reads no row but the last of an output: that output may have no
    /// other.
    pub fn run_for_last_row(
        &self,
        plan: &Plan,
        inputs: &[Tensor],
        state: &mut State,
        output: usize,
    ) -> Result<Vec<Tensor>, GraphError> {
        let output = self.graph.outputs.get(output).map(|(_, v)| *v);
        let cut = output.and_then(|v| tail::cut(plan, v));
        self.run_again(plan, inputs, state, cut)
    }

    fn run_again(
        &self,
        plan: &Plan,
        inputs: &[Tensor],
        state: &mut State,
        cut: Option<(ValueId, usize)>,
    ) -> Result<Vec<Tensor>, GraphError> {
        let mut gone: Vec<String> = Vec::new();
        loop {
            match self.run_once(plan, inputs, state, None, cut) {
                Err(GraphError::PlaceLost { place, reason }) if !gone.contains(&place) => {
                    plan.place_lost(&place, &reason)?;
                    state.place_lost(&place, &reason)?;
                    gone.push(place);
                }
                done => return done,
            }
        }
    }

    fn run_once(
        &self,
        plan: &Plan,
        inputs: &[Tensor],
        state: &mut State,
        mut observer: Option<&mut dyn Observer>,
        cut: Option<(ValueId, usize)>,
    ) -> Result<Vec<Tensor>, GraphError> {
        if !Arc::ptr_eq(&plan.graph, &self.graph) {
            return Err(GraphError::Malformed {
                phase: self.graph.phase.clone(),
                at: "plan".into(),
                what: "was made by another session, of another load; detach it there and attach to this one"
                    .into(),
            });
        }
        state.sound()?;
        let mut symbols = self.bind_inputs(inputs, state)?;
        let tokens = symbols.get(tail::ROWS).copied();
        let mut env: Env = vec![None; self.graph.values.len()];
        for (v, t) in self.graph.inputs.iter().zip(inputs) {
            self.put(&mut env, *v, Held::Host(t.clone()), &mut observer)?;
        }
        for (i, value) in self.graph.values.iter().enumerate() {
            if let Some(region) = self.graph.fixed_region(ValueId(i)) {
                let content = state.content(region);
                let content = content.map_err(|f| f.at(OpKind::StateWrite, &value.name))?;
                self.put(&mut env, ValueId(i), Held::Host(content), &mut observer)?;
            }
        }
        state.begin();
        for step in &plan.steps {
            match &step.what {
                What::Op(op) => self.run_op(*op, &mut env, state, &mut observer)?,
                What::Span { install, ops } => {
                    let install = &plan.installs[*install];
                    let made = match (&self.exec[ops[0].0], ops.len()) {
                        (Exec::Append(region), 1) => {
                            self.append_span(install, *region, &mut env, state)?
                        }
                        _ => self.run_span(install, &mut env, &symbols, state)?,
                    };
                    match made {
                        Some(outputs) => {
                            for (v, held) in install.outputs.iter().zip(outputs) {
                                self.put(&mut env, *v, held, &mut observer)?;
                            }
                        }
                        None => {
                            for op in ops {
                                self.run_op(*op, &mut env, state, &mut observer)?;
                            }
                        }
                    }
                }
            }
            // Once: from then on there is one row. What lies elsewhere stays there.
            let rows = symbols.get(tail::ROWS).copied().unwrap_or(1);
            if let (Some((value, axis)), true) = (cut, rows > 1) {
                if let Some(Held::Host(all)) = &env[value.0] {
                    env[value.0] = Some(Held::Host(last_row(all, axis)?));
                    symbols.insert(tail::ROWS, 1);
                }
            }
            for v in &step.drop {
                env[v.0] = None;
            }
        }
        let mut outputs = Vec::with_capacity(self.graph.outputs.len());
        for (name, v) in &self.graph.outputs {
            outputs.push(match &mut env[v.0] {
                Some(held) => held.bring_home()?.clone(),
                None => match self.params.get(*v)? {
                    Some(t) => t,
                    None => return Err(self.malformed(name, "is an output that no operation made")),
                },
            });
        }
        state.commit(tokens)?;
        Ok(outputs)
    }

    /// These operations by themselves, with the parameters they read: what runs them without the session. An operation
    /// that touches a state region is refused with [`GraphError::Span`].
    pub fn piece(&self, ops: &[OpId]) -> Result<Piece, GraphError> {
        let mut ops = ops.to_vec();
        ops.sort_unstable();
        ops.dedup();
        let mut kernels = Vec::with_capacity(ops.len());
        let mut params = HashMap::new();
        for op in ops {
            let Exec::Kernel(kernel) = prepare(&self.graph, op)? else {
                return Err(GraphError::Span {
                    name: self.graph.op(op).module.clone(),
                    reason: format!(
                        "{} writes a state region and cannot run by itself",
                        self.graph.op(op).kind
                    ),
                });
            };
            for v in self.graph.op(op).inputs.iter().flatten() {
                params.extend(self.value_tensor(*v)?.map(|t| (*v, t)));
            }
            kernels.push((op, kernel));
        }
        Ok(Piece {
            graph: self.graph.clone(),
            kernels,
            params,
        })
    }

    fn run_op(
        &self,
        id: OpId,
        env: &mut Env,
        state: &mut State,
        observer: &mut Option<&mut dyn Observer>,
    ) -> Result<(), GraphError> {
        let op = self.graph.op(id);
        let at = || match op.outputs.first() {
            Some(v) => self.graph.value(*v).name.as_str(),
            None => op.module.as_str(),
        };
        if let (Exec::Kernel(Kernel::Reshape(dims)), [Some(v), ..], [out]) = (
            &self.exec[id.0],
            op.inputs.as_slice(),
            op.outputs.as_slice(),
        ) {
            // Wherever it lies, it stays there.
            if let Some(Held::Away(away)) = &env[v.0] {
                let dims = reshaped(away.dims(), dims).map_err(|f| f.at(op.kind, at()))?;
                let view = Held::Away(away.view(dims));
                return self.put(env, *out, view, observer);
            }
        }
        let results = match &self.exec[id.0] {
            Exec::Kernel(k) => {
                let table = match self.looked_up(id) {
                    Some(v) if env[v.0].is_none() => self.params.table(v)?,
                    _ => None,
                };
                match table {
                    Some(table) => {
                        let ids = self.gather(&op.inputs[..1], env)?;
                        look_up(&*table, ids.first().and_then(Option::as_ref))
                    }
                    None => k.run(&self.gather(&op.inputs, env)?, None),
                }
                .map_err(|f| f.at(op.kind, at()))?
            }
            Exec::Append(region) | Exec::Write(region) => {
                let inputs = self.gather(&op.inputs[..1], env)?;
                let Some(Some(x)) = inputs.first() else {
                    return Err(self.malformed(at(), "writes nothing"));
                };
                let result = match &self.exec[id.0] {
                    Exec::Write(_) => state.write(*region, x),
                    _ => {
                        state.come_home(*region)?;
                        state.append(*region, x)
                    }
                };
                vec![result.map_err(|f| f.at(op.kind, at()))?]
            }
        };
        if results.len() != op.outputs.len() {
            let what = format!(
                "has {} results in the graph, its kernel makes {}",
                op.outputs.len(),
                results.len()
            );
            return Err(self.malformed(at(), &what));
        }
        // Another shape of a value that lies in two memories lies in both.
        let beside = match (&self.exec[id.0], op.inputs.first()) {
            (Exec::Kernel(Kernel::Reshape(_)), Some(Some(v))) => match &env[v.0] {
                Some(Held::Both(_, away)) => Some(away.clone()),
                _ => None,
            },
            _ => None,
        };
        for (v, t) in op.outputs.iter().zip(results) {
            let held = match &beside {
                Some(away) => Held::Both(t.clone(), away.view(t.dims().to_vec())),
                None => Held::Host(t),
            };
            self.put(env, *v, held, observer)?;
        }
        Ok(())
    }

    /// What the runner made, or `None` when it declined.
    fn run_span(
        &self,
        install: &Install,
        env: &mut Env,
        symbols: &HashMap<&str, usize>,
        state: &State,
    ) -> Result<Option<Vec<Held>>, GraphError> {
        let outputs: Vec<Held> = match install.runner.place() {
            None => {
                let inputs = self.gather(&install.inputs, env)?;
                match install.runner.run(&inputs)? {
                    SpanOutcome::Done(outputs) => outputs.into_iter().map(Held::Host).collect(),
                    SpanOutcome::Host => return Ok(None),
                }
            }
            Some(place) => {
                let mut inputs = self.held(&install.inputs, env, place)?;
                self.all_or_none_housed(&install.inputs, &mut inputs, env, state)?;
                let AwayOutcome::Done { outputs, brought } = install.runner.run_at(&inputs)? else {
                    return Ok(None);
                };
                for (i, away) in brought {
                    let value = install.inputs.get(i).copied().flatten();
                    if let Some(held) = value.and_then(|v| env[v.0].as_mut()) {
                        held.also(away);
                    }
                }
                outputs
            }
        };
        let wrong = |reason: String| GraphError::Span {
            name: install.name.clone(),
            reason,
        };
        if outputs.len() != install.outputs.len() {
            return Err(wrong(format!(
                "its runner made {} outputs, {} are declared",
                outputs.len(),
                install.outputs.len()
            )));
        }
        for (v, held) in install.outputs.iter().zip(&outputs) {
            let value = self.graph.value(*v);
            let dtype = held.host().map_or(DType::F32, Tensor::dtype);
            let found = held.dims();
            let fits = dtype == DType::F32
                && found.len() == value.dims.len()
                && value.dims.iter().zip(found).all(|(d, n)| match d {
                    Dim::Size(s) => s == n,
                    Dim::Symbol(s) => symbols.get(s.as_str()).is_none_or(|s| s == n),
                });
            if !fits {
                return Err(wrong(format!(
                    "output `{}` must be f32 [{}], its runner made {dtype:?} {found:?}",
                    value.name,
                    listed(&value.dims),
                )));
            }
        }
        Ok(Some(outputs))
    }

    /// The region after a runner appended to it where it lies, or `None` when the host is to append.
    fn append_span(
        &self,
        install: &Install,
        region: usize,
        env: &mut Env,
        state: &mut State,
    ) -> Result<Option<Vec<Held>>, GraphError> {
        let Some(place) = install.runner.place() else {
            return Ok(None);
        };
        let inputs = self.held(&install.inputs, env, place)?;
        if !install.runner.houses_regions() {
            // It gave itself up, and says whether that ends the run.
            install.runner.run_at(&inputs)?;
            return Ok(None);
        }
        let (Some(Some(x)), Some(Some(value))) = (inputs.first(), install.inputs.first()) else {
            return Ok(None);
        };
        let Some(n) = x.dims().get(2).copied() else {
            return Ok(None);
        };
        let there = match state.settle(region, n, place, || install.runner.quarters()) {
            Ok(Some(there)) => there,
            Ok(None) => return Ok(None),
            Err(lost @ GraphError::PlaceLost { .. }) => return Err(lost),
            Err(why) => {
                install.runner.not_housed(&why)?;
                return Ok(None);
            }
        };
        let AwayOutcome::Done { brought, .. } = install.runner.append_at(x, &there)? else {
            return Ok(None);
        };
        for (_, away) in brought {
            if let Some(held) = env[value.0].as_mut() {
                held.also(away);
            }
        }
        state.appended(region, n);
        Ok(Some(vec![Held::Away(there)]))
    }

    /// Values at this place or in host memory.
    fn held(
        &self,
        from: &[Option<ValueId>],
        env: &mut Env,
        place: &Place,
    ) -> Result<Vec<Option<Held>>, GraphError> {
        let mut held = |v: &ValueId| match &mut env[v.0] {
            Some(held) => {
                if held.at(place).is_none() {
                    held.bring_home()?;
                }
                Ok(held.clone())
            }
            None => match self.params.get(*v)? {
                Some(t) => Ok(Held::Host(t)),
                None => Err(self.unmade(*v)),
            },
        };
        let each = from.iter().map(|v| v.as_ref().map(&mut held).transpose());
        each.collect()
    }

    /// Who reads a region in host memory is given those that have their home elsewhere from there too: a runner reads
    /// them all whole, with their valid length beside them, or all as values.
    fn all_or_none_housed(
        &self,
        from: &[Option<ValueId>],
        inputs: &mut [Option<Held>],
        env: &mut Env,
        state: &State,
    ) -> Result<(), GraphError> {
        let housed = |v: &Option<ValueId>| {
            let (op, _) = self.graph.producer((*v)?)?;
            match &self.exec[op.0] {
                Exec::Append(region) => Some(state.home(*region).is_some()),
                _ => None,
            }
        };
        if !from.iter().any(|v| housed(v) == Some(false)) {
            return Ok(());
        }
        for (v, input) in from.iter().zip(inputs) {
            let Some(held) = v.and_then(|v| env[v.0].as_mut()) else {
                continue;
            };
            if housed(v) == Some(true) {
                *input = Some(Held::Host(held.bring_home()?.clone()));
            }
        }
        Ok(())
    }

    /// Values in host memory, brought there where they were not.
    fn gather(
        &self,
        from: &[Option<ValueId>],
        env: &mut Env,
    ) -> Result<Vec<Option<Tensor>>, GraphError> {
        from.iter()
            .map(|v| match v {
                None => Ok(None),
                Some(v) => match &mut env[v.0] {
                    Some(held) => Ok(Some(held.bring_home()?.clone())),
                    None => match self.params.get(*v)? {
                        Some(t) => Ok(Some(t)),
                        None => Err(self.unmade(*v)),
                    },
                },
            })
            .collect()
    }

    fn unmade(&self, v: ValueId) -> GraphError {
        let name = &self.graph.value(v).name;
        self.malformed(name, "is read before it is made; run `check`")
    }

    fn put(
        &self,
        env: &mut Env,
        v: ValueId,
        mut held: Held,
        observer: &mut Option<&mut dyn Observer>,
    ) -> Result<(), GraphError> {
        if let Some(o) = observer {
            if o.wants(v) {
                o.see(v, held.bring_home()?)?;
            }
        }
        env[v.0] = Some(held);
        Ok(())
    }

    /// Checks the inputs against the declared dims; gives what the symbols are.
    pub(crate) fn bind_inputs(
        &self,
        inputs: &[Tensor],
        state: &State,
    ) -> Result<HashMap<&str, usize>, GraphError> {
        let declared = &self.graph.inputs;
        if inputs.len() != declared.len() {
            return Err(GraphError::Mismatch {
                what: format!("inputs of `{}`", self.graph.phase),
                expected: format!("{} tensors", declared.len()),
                found: inputs.len().to_string(),
            });
        }
        let mut symbols = HashMap::new();
        if !self.graph.states.is_empty() {
            symbols.insert("B", state.batch());
        }
        for (v, t) in declared.iter().zip(inputs) {
            let value = self.graph.value(*v);
            let fits = t.rank() == value.dims.len()
                && value.dims.iter().zip(t.dims()).all(|(d, n)| match d {
                    Dim::Size(s) => s == n,
                    Dim::Symbol(s) => *symbols.entry(s.as_str()).or_insert(*n) == *n,
                });
            if !fits {
                let mut solved: Vec<String> =
                    symbols.iter().map(|(k, v)| format!("{k} = {v}")).collect();
                solved.sort();
                return Err(GraphError::Mismatch {
                    what: format!("input `{}`", value.name),
                    expected: format!("[{}] with {}", listed(&value.dims), solved.join(", ")),
                    found: format!("{:?}", t.dims()),
                });
            }
        }
        Ok(symbols)
    }

    fn malformed(&self, at: &str, what: &str) -> GraphError {
        GraphError::Malformed {
            phase: self.graph.phase.clone(),
            at: at.into(),
            what: what.into(),
        }
    }
}

pub(crate) fn listed(dims: &[Dim]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    dims.join(",")
}

/// The last row of a value, in memory of its own.
fn last_row(all: &Tensor, axis: usize) -> Result<Tensor, GraphError> {
    let last = all.dim(axis).and_then(|rows| {
        let row = all.narrow(axis, rows.saturating_sub(1), 1)?;
        row.force_contiguous()
    });
    last.map_err(|e| GraphError::Kernel {
        op: "last row".into(),
        at: "output".into(),
        source: Box::new(e),
    })
}

fn prepare(graph: &Graph, id: OpId) -> Result<Exec, GraphError> {
    let op = graph.op(id);
    let at = || match op.outputs.first() {
        Some(v) => graph.value(*v).name.clone(),
        None => op.module.clone(),
    };
    if matches!(op.kind, OpKind::KvAppend | OpKind::StateWrite) {
        let region = match op.inputs.get(1) {
            Some(Some(v)) => &graph.value(*v).origin,
            _ => &Origin::Input,
        };
        return match region {
            Origin::State(i) if op.kind == OpKind::StateWrite => Ok(Exec::Write(*i)),
            Origin::State(i) => Ok(Exec::Append(*i)),
            _ => Err(GraphError::Malformed {
                phase: graph.phase.clone(),
                at: at(),
                what: format!("{} needs a state region as its second operand", op.kind),
            }),
        };
    }
    let layout = match op.inputs.get(1) {
        Some(Some(v)) => graph.param(*v).map_or(Layout::InOut, |(_, l)| l),
        _ => Layout::InOut,
    };
    let mut kernel =
        Kernel::prepare(op.kind, &op.attrs, layout).map_err(|f| f.at(op.kind, &at()))?;
    if let (Kernel::Reshape(dims), Some(AttrValue::List(words)), Some(Some(x))) =
        (&mut kernel, op.attrs.get("dims"), op.inputs.first())
    {
        resolve_symbols(dims, words, &graph.value(*x).dims);
    }
    Ok(Exec::Kernel(kernel))
}

/// A symbol in a reshape's dims is the axis of the operand that is declared with it; where none is, what is left.
fn resolve_symbols(dims: &mut [ReshapeDim], words: &[AttrValue], operand: &[Dim]) {
    for (dim, word) in dims.iter_mut().zip(words) {
        if let AttrValue::Word(w) = word {
            let axis = operand
                .iter()
                .position(|d| matches!(d, Dim::Symbol(s) if s == w));
            *dim = axis.map_or(ReshapeDim::Rest, ReshapeDim::Axis);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, StateRegion};
    use crate::place::Away;
    use candle_core::Device;
    use std::sync::Mutex;

    /// Random parameters by name, made on demand.
    pub(crate) struct Random;
    impl ParamSource for Random {
        fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
            let dims: &[usize] = match param.path.as_str() {
                "embed" => &[11, 8],
                "norm" => &[8],
                "qkv" => &[16, 8],
                _ => &[8, 8],
            };
            let seed: u32 = param.to_string().bytes().map(u32::from).sum();
            Ok(random(dims, seed))
        }
    }

    pub(crate) fn random(dims: &[usize], seed: u32) -> Tensor {
        let mut s = seed;
        let data: Vec<f32> = (0..dims.iter().product())
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((s >> 8) as f32 / (1u32 << 23) as f32 - 1.0) * 0.5
            })
            .collect();
        Tensor::from_vec(data, dims, &Device::Cpu).unwrap()
    }

    /// embed -> norm -> q (2 heads of 4), k and v (1 head) from one parameter -> rope -> KV -> attention -> o -> add.
    pub(crate) fn decoder() -> Arc<Graph> {
        let mut b = GraphBuilder::new("decode");
        let (bt, s) = (["B", "T"], |n: &str| Dim::Symbol(n.into()));
        let dims = |tail: &[usize]| -> Vec<Dim> {
            bt.iter()
                .map(|n| s(n))
                .chain(tail.iter().map(|n| Dim::Size(*n)))
                .collect()
        };
        let heads = |h: usize, t: &str| vec![s("B"), Dim::Size(h), s(t), Dim::Size(4)];
        let p = |path: &str, rows| ParamRef {
            path: path.into(),
            name: "weight".into(),
            rows,
        };
        let ids = b.input("ids", dims(&[]));
        let pos = b.input("positions", vec![s("T")]);
        let w = b.param(p("embed", None), &[11, 8], Layout::OutIn);
        let x = b.op(
            OpKind::Embedding,
            "embed",
            "x",
            &[Some(ids), Some(w)],
            &[],
            dims(&[8]),
        );
        let freqs = AttrValue::List(vec![AttrValue::Float(1.0), AttrValue::Float(0.1)]);
        let table = vec![s("T"), Dim::Size(2)];
        let t = b.ops(
            OpKind::RopeTable,
            "rotary",
            &[Some(pos)],
            &[("inv_freq", freqs)],
            vec![("cos", table.clone()), ("sin", table)],
        );
        let w = b.param(p("norm", None), &[8], Layout::InOut);
        let eps = [("eps", AttrValue::Float(1e-5))];
        let n = b.op(
            OpKind::RmsNorm,
            "norm",
            "n",
            &[Some(x), Some(w)],
            &eps,
            dims(&[8]),
        );
        let mut parts = Vec::new();
        for (name, rows, h) in [("q", (0, 8), 2), ("k", (8, 12), 1), ("v", (12, 16), 1)] {
            let w = b.param(p("qkv", Some(rows)), &[rows.1 - rows.0, 8], Layout::OutIn);
            let y = b.op(
                OpKind::Linear,
                "qkv",
                name,
                &[Some(n), Some(w)],
                &[],
                dims(&[4 * h]),
            );
            let shape = ["B", "T"].map(|n| AttrValue::Word(n.into())).into_iter();
            let shape = shape
                .chain([AttrValue::Int(h as i64), AttrValue::Int(4)])
                .collect();
            let shape = [("dims", AttrValue::List(shape))];
            let mut y = b.op(
                OpKind::Reshape,
                "qkv",
                name,
                &[Some(y)],
                &shape,
                dims(&[h, 4]),
            );
            if name != "v" {
                let operands = [Some(y), Some(t[0]), Some(t[1])];
                y = b.op(OpKind::Rope, "rotary", name, &operands, &[], dims(&[h, 4]));
            }
            let perm = AttrValue::List([0, 2, 1, 3].map(AttrValue::Int).to_vec());
            y = b.op(
                OpKind::Transpose,
                "attn",
                name,
                &[Some(y)],
                &[("perm", perm)],
                heads(h, "T"),
            );
            if name != "q" {
                let region = b.state(StateRegion::growing(format!("attn.{name}_cache"), 1, 4));
                y = b.op(
                    OpKind::KvAppend,
                    "attn",
                    name,
                    &[Some(y), Some(region)],
                    &[],
                    heads(1, "S"),
                );
            }
            parts.push(Some(y));
        }
        let causal = [("causal", AttrValue::Flag(true))];
        let a = b.op(
            OpKind::Attention,
            "attn",
            "a",
            &parts,
            &causal,
            dims(&[2, 4]),
        );
        let shape = ["B", "T"].map(|n| AttrValue::Word(n.into())).into_iter();
        let shape = AttrValue::List(shape.chain([AttrValue::Int(8)]).collect());
        let a = b.op(
            OpKind::Reshape,
            "attn",
            "flat",
            &[Some(a)],
            &[("dims", shape)],
            dims(&[8]),
        );
        let w = b.param(p("o", None), &[8, 8], Layout::OutIn);
        let o = b.op(
            OpKind::Linear,
            "o",
            "o",
            &[Some(a), Some(w)],
            &[],
            dims(&[8]),
        );
        let y = b.op(OpKind::Add, "", "y", &[Some(x), Some(o)], &[], dims(&[8]));
        b.output("y", y);
        Arc::new(b.finish())
    }

    pub(crate) fn inputs(from: i64, n: i64) -> [Tensor; 2] {
        let ids: Vec<i64> = (from..from + n).map(|i| (i * 7 + 3) % 11).collect();
        let pos: Vec<i64> = (from..from + n).collect();
        let n = n as usize;
        [
            Tensor::from_vec(ids, (1, n), &Device::Cpu).unwrap(),
            Tensor::from_vec(pos, n, &Device::Cpu).unwrap(),
        ]
    }

    fn flat(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    }

    fn session() -> Session {
        Session::new(decoder(), &Random).unwrap()
    }

    #[test]
    fn the_test_graph_is_in_normal_form() {
        crate::check(&decoder()).unwrap();
    }

    #[test]
    fn prefill_equals_single_steps() {
        let s = session();
        let plan = s.host_plan();
        let mut state = s.new_state(1, 0);
        let whole = s.run(&plan, &inputs(0, 5), &mut state, None).unwrap();
        assert_eq!(state.len(), 5);
        let mut steps = s.new_state(1, 2);
        let mut rows = Vec::new();
        for i in 0..5 {
            let y = s.run(&plan, &inputs(i, 1), &mut steps, None).unwrap();
            rows.extend(flat(&y[0]));
        }
        for (a, b) in flat(&whole[0]).iter().zip(&rows) {
            assert!((a - b).abs() < 1e-6, "{a} is not {b}");
        }
        // From a copied and from a truncated state the next step is bit-identical.
        let mut copy = state.clone_deep().unwrap();
        let next = |st: &mut State| flat(&s.run(&plan, &inputs(5, 1), st, None).unwrap()[0]);
        let a = next(&mut state);
        assert_eq!(a, next(&mut copy));
        state.truncate(5).unwrap();
        assert_eq!(a, next(&mut state));
        // What came before matters.
        assert_ne!(a, next(&mut s.new_state(1, 0)));
    }

    struct Runner<F>(F);
    impl<F> SpanRunner for Runner<F>
    where
        F: Fn(&[Option<Tensor>]) -> Result<SpanOutcome, GraphError> + Send + Sync,
    {
        fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            (self.0)(inputs)
        }
    }

    fn out_projection<F>(s: &Session, f: F) -> Install
    where
        F: Fn(&[Option<Tensor>]) -> Result<SpanOutcome, GraphError> + Send + Sync + 'static,
    {
        let g = s.graph();
        let v = |n: &str| g.value_named(n).unwrap();
        Install {
            name: "o".into(),
            ops: ["o.o", "y"].map(|n| g.producer(v(n)).unwrap().0).to_vec(),
            inputs: vec![Some(v("embed.x")), None, Some(v("attn.flat"))],
            outputs: vec![v("y")],
            runner: Arc::new(Runner(f)),
        }
    }

    struct Seen(Vec<(ValueId, Vec<f32>)>, Vec<ValueId>);
    impl Observer for Seen {
        fn wants(&self, value: ValueId) -> bool {
            self.1.contains(&value)
        }
        fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError> {
            self.0.push((value, flat(tensor)));
            Ok(())
        }
    }

    #[test]
    fn a_runner_that_declines_changes_no_bit() {
        let s = session();
        let host = s
            .run(&s.host_plan(), &inputs(0, 5), &mut s.new_state(1, 0), None)
            .unwrap();
        let calls = Arc::new(Mutex::new(0));
        let count = calls.clone();
        let install = out_projection(&s, move |inputs| {
            assert!(inputs.len() == 3 && inputs[1].is_none());
            *count.lock().unwrap() += 1;
            Ok(SpanOutcome::Host)
        });
        let plan = s.plan(vec![install]).unwrap();
        let wanted = ["ids", "o.o", "y"].map(|n| s.graph().value_named(n).unwrap());
        let mut seen = Seen(Vec::new(), wanted.to_vec());
        let mut state = s.new_state(1, 0);
        // ids are integers, so the observer of this test must not ask for them.
        seen.1.remove(0);
        let y = s
            .run(&plan, &inputs(0, 5), &mut state, Some(&mut seen))
            .unwrap();
        assert_eq!(flat(&y[0]), flat(&host[0]));
        assert_eq!(*calls.lock().unwrap(), 1);
        assert_eq!(seen.0.len(), 2);
        assert_eq!(seen.0[1], (wanted[2], flat(&host[0])));
    }

    #[test]
    fn a_runner_that_answers_is_believed_and_its_interior_is_not_seen() {
        let s = session();
        let plan = s
            .plan(vec![out_projection(&s, |inputs| {
                let x = inputs[0].as_ref().unwrap();
                Ok(SpanOutcome::Done(vec![x.ones_like().unwrap()]))
            })])
            .unwrap();
        let mut seen = Seen(Vec::new(), vec![s.graph().value_named("o.o").unwrap()]);
        let mut state = s.new_state(1, 0);
        let y = s
            .run(&plan, &inputs(0, 2), &mut state, Some(&mut seen))
            .unwrap();
        assert_eq!(flat(&y[0]), vec![1.0; 16]);
        assert!(seen.0.is_empty());
    }

    #[test]
    fn outputs_of_another_shape_or_dtype_or_count_are_an_error() {
        let s = session();
        let bad: [fn(&Tensor) -> Vec<Tensor>; 4] = [
            |x| vec![x.narrow(2, 0, 4).unwrap()],
            |x| vec![x.narrow(1, 0, 1).unwrap()],
            |x| vec![x.to_dtype(DType::BF16).unwrap()],
            |_| vec![],
        ];
        for make in bad {
            let install = out_projection(&s, move |inputs| {
                Ok(SpanOutcome::Done(make(inputs[0].as_ref().unwrap())))
            });
            let plan = s.plan(vec![install]).unwrap();
            let mut state = s.new_state(1, 0);
            let e = s.run(&plan, &inputs(0, 2), &mut state, None).unwrap_err();
            assert!(matches!(e, GraphError::Span { .. }), "{e}");
            assert_eq!(state.len(), 0, "a failed run does not advance the state");
        }
    }

    /// Doubles of a place: a value there is a host tensor nobody may read.
    #[derive(Debug)]
    struct There {
        place: Place,
        value: Tensor,
        log: Arc<Mutex<Vec<String>>>,
        lost: bool,
    }

    impl Away for There {
        fn place(&self) -> &Place {
            &self.place
        }
        fn dims(&self) -> &[usize] {
            self.value.dims()
        }
        fn view(&self, dims: Vec<usize>) -> Arc<dyn Away> {
            Arc::new(There {
                place: self.place.clone(),
                value: self.value.reshape(dims).unwrap(),
                log: self.log.clone(),
                lost: self.lost,
            })
        }
        fn fetch(&self) -> Result<Tensor, GraphError> {
            self.log.lock().unwrap().push("out".into());
            match self.lost {
                true => Err(GraphError::PlaceLost {
                    place: self.place.name().into(),
                    reason: "unplugged".into(),
                }),
                false => Ok(self.value.clone()),
            }
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    /// Runs its operations at a place, with the kernels of the host.
    struct Far {
        place: Place,
        kernel: Kernel,
        weight: Tensor,
        log: Arc<Mutex<Vec<String>>>,
        lost: bool,
        gone: Mutex<bool>,
    }

    impl SpanRunner for Far {
        fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            panic!("it has a place");
        }
        fn place(&self) -> Option<&Place> {
            Some(&self.place)
        }
        fn run_at(&self, inputs: &[Option<Held>]) -> Result<AwayOutcome, GraphError> {
            if *self.gone.lock().unwrap() {
                return Ok(AwayOutcome::Host);
            }
            let there = |value: Tensor| {
                Arc::new(There {
                    place: self.place.clone(),
                    value,
                    log: self.log.clone(),
                    lost: self.lost,
                })
            };
            let held = inputs[0].as_ref().unwrap();
            let mut brought = Vec::new();
            let x = match held.at(&self.place) {
                Some(away) => away.as_any().downcast_ref::<There>().unwrap().value.clone(),
                None => {
                    self.log.lock().unwrap().push("in".into());
                    let x = held.host().unwrap().clone();
                    brought.push((0, there(x.clone()) as Arc<dyn Away>));
                    x
                }
            };
            let operands = [Some(x), Some(self.weight.clone())];
            let y = self.kernel.run(&operands, None).unwrap();
            let outputs = vec![Held::Away(there(y[0].clone()))];
            Ok(AwayOutcome::Done { outputs, brought })
        }
        fn place_lost(&self, reason: &str) -> Result<(), GraphError> {
            self.log.lock().unwrap().push(reason.into());
            *self.gone.lock().unwrap() = true;
            Ok(())
        }
    }

    fn far(
        s: &Session,
        made: &str,
        place: &str,
        log: &Arc<Mutex<Vec<String>>>,
        lost: bool,
    ) -> Install {
        let g = s.graph();
        let op = g.producer(g.value_named(made).unwrap()).unwrap().0;
        let Exec::Kernel(_) = &s.exec[op.0] else {
            panic!("{made} has no kernel")
        };
        let Exec::Kernel(kernel) = prepare(g, op).unwrap() else {
            panic!("{made} has no kernel")
        };
        Install {
            name: made.into(),
            ops: vec![op],
            inputs: g.op(op).inputs[..1].to_vec(),
            outputs: g.op(op).outputs.clone(),
            runner: Arc::new(Far {
                place: Place::new(place),
                kernel,
                weight: s
                    .value_tensor(g.op(op).inputs[1].unwrap())
                    .unwrap()
                    .unwrap(),
                log: log.clone(),
                lost,
                gone: Mutex::new(false),
            }),
        }
    }

    #[test]
    fn what_lies_at_a_place_is_copied_once_for_all_who_are_elsewhere() {
        let s = session();
        let host = s.run(&s.host_plan(), &inputs(0, 3), &mut s.new_state(1, 0), None);
        let log = Arc::new(Mutex::new(Vec::new()));
        // Host -> norm -> {q, k}; v, and rope behind a reshape of q and k, are the host's.
        let installs = ["norm.n", "qkv.q", "qkv.k"].map(|n| far(&s, n, "a", &log, false));
        let plan = s.plan(installs.to_vec()).unwrap();
        let got = s.run(&plan, &inputs(0, 3), &mut s.new_state(1, 0), None);
        assert_eq!(flat(&got.unwrap()[0]), flat(&host.as_ref().unwrap()[0]));
        assert_eq!(*log.lock().unwrap(), ["in", "out", "out", "out"]);
        // Two places: what the second reads goes through the host, which then has it for `v`.
        log.lock().unwrap().clear();
        let installs = [("norm.n", "a"), ("qkv.q", "b")].map(|(n, at)| far(&s, n, at, &log, false));
        let plan = s.plan(installs.to_vec()).unwrap();
        let mut state = s.new_state(1, 0);
        let got = s.run(&plan, &inputs(0, 3), &mut state, None);
        assert_eq!(flat(&got.unwrap()[0]), flat(&host.unwrap()[0]));
        assert_eq!(*log.lock().unwrap(), ["in", "out", "in", "out"]);
    }

    #[test]
    fn a_lost_place_begins_the_run_anew_and_observers_see_nothing_twice() {
        let s = session();
        let host = s.run(&s.host_plan(), &inputs(0, 3), &mut s.new_state(1, 0), None);
        let host = flat(&host.unwrap()[0]);
        let log = Arc::new(Mutex::new(Vec::new()));
        let plan = |lost| s.plan(vec![far(&s, "norm.n", "a", &log, lost)]).unwrap();
        let mut state = s.new_state(1, 0);
        let got = s.run(&plan(true), &inputs(0, 3), &mut state, None).unwrap();
        assert_eq!(flat(&got[0]), host);
        assert_eq!(state.len(), 3);
        assert_eq!(*log.lock().unwrap(), ["in", "out", "unplugged"]);
        let mut seen = Seen(Vec::new(), vec![s.graph().value_named("norm.n").unwrap()]);
        let mut state = s.new_state(1, 0);
        let error = s.run(&plan(true), &inputs(0, 3), &mut state, Some(&mut seen));
        assert!(matches!(error, Err(GraphError::PlaceLost { .. })));
        assert!(seen.0.is_empty() && state.is_empty());
    }

    /// Memory at a place for regions: tensors nobody else may read.
    #[derive(Debug)]
    struct Rooms {
        place: Place,
        log: Arc<Mutex<Vec<String>>>,
        rooms: BTreeMap<usize, Arc<Mutex<Tensor>>>,
        valid: usize,
    }

    impl crate::place::Quarters for Rooms {
        fn place(&self) -> &Place {
            &self.place
        }
        fn admit(
            &mut self,
            region: usize,
            dims: [usize; 4],
            content: Option<&Tensor>,
        ) -> Result<(), GraphError> {
            let room = dims[2];
            if room > 64 {
                return Err(GraphError::Span {
                    name: "rooms".into(),
                    reason: "too large".into(),
                });
            }
            let moved = if content.is_some() { "moved" } else { "opened" };
            self.log.lock().unwrap().push(format!("{moved} {region}"));
            let nan = || Tensor::full(f32::NAN, dims.as_slice(), &Device::Cpu).unwrap();
            let made = content.map_or_else(nan, |t| {
                assert_eq!(t.dims(), dims);
                t.copy().unwrap()
            });
            self.rooms.insert(region, Arc::new(Mutex::new(made)));
            Ok(())
        }
        fn room(&self, region: usize) -> Option<usize> {
            let room = self.rooms.get(&region)?;
            Some(room.lock().unwrap().dims()[2])
        }
        fn announce(&mut self, valid: usize) -> Result<(), GraphError> {
            self.valid = valid;
            Ok(())
        }
        fn region(&self, region: usize, valid: usize) -> Option<Arc<dyn Away>> {
            let room = self.rooms.get(&region)?;
            let mut dims = room.lock().unwrap().dims().to_vec();
            dims[2] = valid;
            Some(Arc::new(RegionThere {
                place: self.place.clone(),
                room: room.clone(),
                dims,
                log: self.log.clone(),
            }))
        }
        fn dismiss(&mut self, region: usize) {
            self.rooms.remove(&region);
        }
        fn stamp(&self) -> u64 {
            0
        }
    }

    #[derive(Debug)]
    struct RegionThere {
        place: Place,
        room: Arc<Mutex<Tensor>>,
        dims: Vec<usize>,
        log: Arc<Mutex<Vec<String>>>,
    }

    impl Away for RegionThere {
        fn place(&self) -> &Place {
            &self.place
        }
        fn dims(&self) -> &[usize] {
            &self.dims
        }
        fn view(&self, _: Vec<usize>) -> Arc<dyn Away> {
            panic!("a region is read as it is")
        }
        fn fetch(&self) -> Result<Tensor, GraphError> {
            self.log.lock().unwrap().push("fetched".into());
            let whole = self.room.lock().unwrap();
            Ok(whole.narrow(2, 0, self.dims[2]).unwrap())
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    /// What appends, and what reads, at a place.
    struct Housing {
        place: Place,
        log: Arc<Mutex<Vec<String>>>,
        kernel: Option<Kernel>,
        given_up: Mutex<bool>,
        /// The call at which it gives itself up, or the place is gone.
        fails: Option<(usize, bool)>,
        calls: Mutex<usize>,
    }

    impl Housing {
        fn failing(&self) -> Option<bool> {
            let mut calls = self.calls.lock().unwrap();
            *calls += 1;
            self.fails
                .filter(|(at, _)| at == &*calls)
                .map(|(_, lost)| lost)
        }
        fn lost(&self) -> GraphError {
            GraphError::PlaceLost {
                place: self.place.name().into(),
                reason: "unplugged".into(),
            }
        }
    }

    impl SpanRunner for Housing {
        fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            panic!("it has a place");
        }
        fn place(&self) -> Option<&Place> {
            Some(&self.place)
        }
        fn houses_regions(&self) -> bool {
            self.kernel.is_none() && !*self.given_up.lock().unwrap()
        }
        fn quarters(&self) -> Option<Box<dyn crate::place::Quarters>> {
            Some(Box::new(Rooms {
                place: self.place.clone(),
                log: self.log.clone(),
                rooms: BTreeMap::new(),
                valid: 0,
            }))
        }
        fn reads_housed(&self) -> bool {
            self.kernel.is_some()
        }
        fn append_at(&self, x: &Held, region: &Arc<dyn Away>) -> Result<AwayOutcome, GraphError> {
            if let Some(lost) = self.failing() {
                *self.given_up.lock().unwrap() = true;
                return if lost {
                    Err(self.lost())
                } else {
                    Ok(AwayOutcome::Host)
                };
            }
            let region = region.as_any().downcast_ref::<RegionThere>().unwrap();
            let x = x.host().unwrap().contiguous().unwrap();
            let from = region.dims[2] - x.dims()[2];
            region.room.lock().unwrap().slice_set(&x, 2, from).unwrap();
            Ok(AwayOutcome::Done {
                outputs: Vec::new(),
                brought: Vec::new(),
            })
        }
        fn run_at(&self, inputs: &[Option<Held>]) -> Result<AwayOutcome, GraphError> {
            let Some(kernel) = &self.kernel else {
                return Ok(AwayOutcome::Host);
            };
            if let Some(lost) = self.failing() {
                return if lost {
                    Err(self.lost())
                } else {
                    Ok(AwayOutcome::Host)
                };
            }
            let read = |held: &Held| match held.at(&self.place) {
                Some(away) => {
                    let region = away.as_any().downcast_ref::<RegionThere>().unwrap();
                    let whole = region.room.lock().unwrap();
                    whole.narrow(2, 0, region.dims[2]).unwrap()
                }
                None => held.host().unwrap().clone(),
            };
            let inputs: Vec<_> = inputs.iter().map(|h| h.as_ref().map(read)).collect();
            let made = kernel.run(&inputs, None).unwrap();
            Ok(AwayOutcome::Done {
                outputs: made.into_iter().map(Held::Host).collect(),
                brought: Vec::new(),
            })
        }
        fn place_lost(&self, _: &str) -> Result<(), GraphError> {
            *self.given_up.lock().unwrap() = true;
            Ok(())
        }
    }

    /// Both appends and the attention at a place; what of them fails, and at which call.
    fn housing(
        s: &Session,
        log: &Arc<Mutex<Vec<String>>>,
        append: Option<(usize, bool)>,
        attend: Option<(usize, bool)>,
    ) -> Vec<Install> {
        let g = s.graph();
        let kinds = [OpKind::KvAppend, OpKind::Attention];
        let ops = g.op_ids().filter(|op| kinds.contains(&g.op(*op).kind));
        let install = |op: OpId| {
            let kernel = match prepare(g, op).unwrap() {
                Exec::Kernel(kernel) => Some(kernel),
                _ => None,
            };
            let inputs = g.op(op).inputs.clone();
            Install {
                name: g.value(g.op(op).outputs[0]).name.clone(),
                ops: vec![op],
                inputs: if kernel.is_some() {
                    inputs
                } else {
                    inputs[..1].to_vec()
                },
                outputs: g.op(op).outputs.clone(),
                runner: Arc::new(Housing {
                    place: Place::new("a"),
                    log: log.clone(),
                    fails: if kernel.is_some() { attend } else { append },
                    kernel,
                    given_up: Mutex::new(false),
                    calls: Mutex::new(0),
                }),
            }
        };
        ops.map(install).collect()
    }

    /// Bits of a prompt of three and of steps after it.
    fn steps(s: &Session, plan: &Plan, state: &mut State, n: i64) -> Vec<Vec<f32>> {
        let run = |from: i64, n: i64, state: &mut State| {
            flat(&s.run(plan, &inputs(from, n), state, None).unwrap()[0])
        };
        let mut made = vec![run(0, 3, state)];
        made.extend((3..3 + n).map(|i| run(i, 1, state)));
        made
    }

    #[test]
    fn a_region_lives_where_its_users_are_and_comes_back_exactly() {
        let s = session();
        let log = Arc::new(Mutex::new(Vec::new()));
        let taken = || std::mem::take(&mut *log.lock().unwrap());
        let host = s.host_plan();
        let plan = s.plan(housing(&s, &log, None, None)).unwrap();
        assert_eq!(plan.housed().count(), 2);
        let mut state = s.new_state(1, 0);
        let want = steps(&s, &host, &mut s.new_state(1, 0), 20);
        assert_eq!(steps(&s, &plan, &mut state, 20), want);
        assert!(state.home(0).is_some() && state.home(1).is_some());
        // 23 positions outgrew the 16 there were: once each, through the host.
        assert_eq!(
            taken(),
            ["opened 0", "opened 1", "fetched", "moved 0", "fetched", "moved 1"]
        );
        // To go back moves nothing, and going on is bit for bit.
        let next = |plan: &Plan, state: &mut State, at: i64| {
            flat(&s.run(plan, &inputs(at, 1), state, None).unwrap()[0])
        };
        state.truncate(10).unwrap();
        let again = next(&plan, &mut state, 10);
        assert_eq!(again, want[8]);
        assert!(taken().is_empty());
        // A copy is the host's; the state itself stays, and both go on from there.
        state.truncate(10).unwrap();
        let mut copy = state.clone_deep().unwrap();
        assert_eq!(taken(), ["fetched", "fetched"]);
        assert!(copy.holds(copy.room(), |_| false), "it is reserved too");
        assert!(copy.home(0).is_none() && state.home(0).is_some());
        assert_eq!(next(&host, &mut copy, 10), want[8]);
        // Detached: under the host's plan it is at home again.
        assert_eq!(next(&host, &mut state, 10), want[8]);
        assert!(state.home(0).is_none());
        assert_eq!(taken(), ["fetched", "fetched"]);
        assert_eq!(next(&plan, &mut state, 11), want[9]);
        assert_eq!(taken(), ["moved 0", "moved 1"]);
        state.reset();
        assert_eq!(steps(&s, &plan, &mut state, 4), want[..5]);
        assert!(taken().is_empty(), "memory stays");
        let valid = state.valid(0).unwrap().unwrap();
        let mut other = s.new_state(1, 0);
        steps(&s, &host, &mut other, 4);
        assert_eq!(flat(&valid), flat(&other.valid(0).unwrap().unwrap()));
    }

    #[test]
    fn without_all_its_users_there_a_region_is_the_hosts() {
        let s = session();
        let log = Arc::new(Mutex::new(Vec::new()));
        let all = housing(&s, &log, None, None);
        // Without the attention nobody asks the appends at all.
        let appends: Vec<Install> = all
            .iter()
            .filter(|i| i.inputs.len() == 1)
            .cloned()
            .collect();
        assert_eq!((all.len(), appends.len()), (3, 2));
        let plan = s.plan(appends).unwrap();
        assert!(plan.is_host() && plan.housed().count() == 0);
        let want = steps(&s, &s.host_plan(), &mut s.new_state(1, 0), 3);
        assert_eq!(steps(&s, &plan, &mut s.new_state(1, 0), 3), want);
        // Nor one of them, whose region would come home for every call of who reads both.
        let one = s.plan(vec![all[0].clone(), all[2].clone()]).unwrap();
        assert!(one.housed().count() == 0 && one.installs().len() == 1);
        log.lock().unwrap().clear();
        assert_eq!(steps(&s, &one, &mut s.new_state(1, 0), 3), want);
        assert!(log.lock().unwrap().is_empty());
        // The append to the second one gives itself up: the first stays, and nobody is given one as it lies there and the
        // other as a value.
        let mut half = all.clone();
        half[1] = housing(&s, &log, Some((1, false)), None).swap_remove(1);
        let plan = s.plan(half).unwrap();
        assert_eq!(plan.housed().count(), 2);
        let mut state = s.new_state(1, 0);
        log.lock().unwrap().clear();
        assert_eq!(steps(&s, &plan, &mut state, 3), want);
        assert!(state.home(0).is_some() && state.home(1).is_none());
        let fetched = log
            .lock()
            .unwrap()
            .iter()
            .filter(|l| *l == "fetched")
            .count();
        assert!(fetched >= 4, "once a step");
    }

    #[test]
    fn who_gives_itself_up_or_declines_brings_the_region_home_or_reads_it_there() {
        let s = session();
        let log = Arc::new(Mutex::new(Vec::new()));
        let want = steps(&s, &s.host_plan(), &mut s.new_state(1, 0), 6);
        // The third append of each.
        let plan = s.plan(housing(&s, &log, Some((3, false)), None)).unwrap();
        let mut state = s.new_state(1, 0);
        assert_eq!(steps(&s, &plan, &mut state, 6), want);
        assert!(state.home(0).is_none() && state.home(1).is_none());
        // An attention that declines one call is the host's, which reads a copy; the region stays.
        let plan = s.plan(housing(&s, &log, None, Some((3, false)))).unwrap();
        log.lock().unwrap().clear();
        let mut state = s.new_state(1, 0);
        assert_eq!(steps(&s, &plan, &mut state, 6), want);
        assert!(state.home(0).is_some() && state.home(1).is_some());
        assert_eq!(
            *log.lock().unwrap(),
            ["opened 0", "opened 1", "fetched", "fetched"]
        );
    }

    #[test]
    fn what_has_no_room_there_stays_at_home() {
        let s = session();
        let log = Arc::new(Mutex::new(Vec::new()));
        let plan = s.plan(housing(&s, &log, None, None)).unwrap();
        let want = steps(&s, &s.host_plan(), &mut s.new_state(1, 80), 2);
        let mut state = s.new_state(1, 80);
        assert_eq!(steps(&s, &plan, &mut state, 2), want);
        assert!(state.home(0).is_none() && log.lock().unwrap().is_empty());
    }

    #[test]
    fn a_lost_place_takes_the_state_with_it_and_says_so_until_it_is_reset() {
        let s = session();
        let log = Arc::new(Mutex::new(Vec::new()));
        let want = steps(&s, &s.host_plan(), &mut s.new_state(1, 0), 3);
        // Before anything was valid nothing is lost: the run begins anew.
        let plan = s.plan(housing(&s, &log, None, Some((1, true)))).unwrap();
        assert_eq!(steps(&s, &plan, &mut s.new_state(1, 0), 3), want);
        let plan = s.plan(housing(&s, &log, None, Some((3, true)))).unwrap();
        let mut state = s.new_state(1, 0);
        s.run(&plan, &inputs(0, 3), &mut state, None).unwrap();
        s.run(&plan, &inputs(3, 1), &mut state, None).unwrap();
        for plan in [&plan, &s.host_plan(), &plan] {
            let e = s.run(plan, &inputs(4, 1), &mut state, None).unwrap_err();
            let GraphError::StateLost { region, place, .. } = &e else {
                panic!("{e}")
            };
            assert_eq!((region.as_str(), place.as_str()), ("attn.k_cache", "a"));
        }
        assert!(state.valid(0).is_err() && state.clone_deep().is_err());
        assert!(state.truncate(2).is_err());
        state.reset();
        // The runners gave themselves up: the host goes on.
        assert_eq!(steps(&s, &plan, &mut state, 3), want);
        assert!(state.home(0).is_none());
    }

    #[test]
    fn a_span_that_writes_state_is_refused() {
        let s = session();
        let g = s.graph();
        let v = |n: &str| g.value_named(n).unwrap();
        let append = g
            .op_ids()
            .find(|o| g.op(*o).kind == OpKind::KvAppend)
            .unwrap();
        let install = Install {
            name: "cache".into(),
            ops: vec![append],
            inputs: g.op(append).inputs[..1].to_vec(),
            outputs: g.op(append).outputs.clone(),
            runner: Arc::new(Runner(|_: &[Option<Tensor>]| Ok(SpanOutcome::Host))),
        };
        let e = s.plan(vec![install]).unwrap_err();
        assert!(e.to_string().contains("state region"), "{e}");
        assert_eq!(v("y"), g.outputs[0].1);
    }

    #[test]
    fn a_piece_computes_what_the_host_does_without_the_session() {
        let s = session();
        let g = s.graph().clone();
        let v = |n: &str| g.value_named(n).unwrap();
        let kinds = |kinds: &[OpKind]| -> Vec<OpId> {
            g.op_ids()
                .filter(|o| kinds.contains(&g.op(*o).kind))
                .collect()
        };
        let mut state = s.new_state(1, 8);
        struct Keep(Vec<ValueId>, Vec<(ValueId, Tensor)>);
        impl Observer for Keep {
            fn wants(&self, value: ValueId) -> bool {
                self.0.contains(&value)
            }
            fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError> {
                self.1.push((value, tensor.clone()));
                Ok(())
            }
        }
        let (x, n) = (v("embed.x"), v("norm.n"));
        let mut keep = Keep(vec![x, n], Vec::new());
        let plan = s.host_plan();
        s.run(&plan, &inputs(0, 3), &mut state, Some(&mut keep))
            .unwrap();
        // Given in any order and twice: the host's order is what runs.
        let mut ops = kinds(&[OpKind::RmsNorm, OpKind::Embedding]);
        ops.extend(kinds(&[OpKind::RmsNorm]));
        ops.reverse();
        let piece = s.piece(&ops).unwrap();
        drop(s);
        let made = piece
            .run(&[(g.inputs[0], inputs(0, 3)[0].clone())], &[n, x])
            .unwrap();
        for (i, value) in [n, x].iter().enumerate() {
            let (_, want) = keep.1.iter().find(|(v, _)| v == value).unwrap();
            assert_eq!(flat(&made[i]), flat(want));
        }
        for (given, wanted, fact) in [
            (vec![], x, "was not given"),
            (
                vec![(g.inputs[0], inputs(0, 3)[0].clone())],
                v("y"),
                "made by no",
            ),
        ] {
            let e = piece.run(&given, &[wanted]).unwrap_err().to_string();
            assert!(e.contains(fact), "{e}");
        }
        let e = session().piece(&kinds(&[OpKind::KvAppend])).unwrap_err();
        assert!(e.to_string().contains("state region"), "{e}");
    }

    #[test]
    fn ranges_of_one_parameter_share_its_memory() {
        let s = session();
        let p = |rows| ParamRef {
            path: "qkv".into(),
            name: "weight".into(),
            rows,
        };
        let of = |rows| s.param(&p(rows)).unwrap();
        assert_eq!(of(Some((8, 12))).unwrap().dims(), [4, 8]);
        assert!(of(None).is_none(), "the graph does not use it whole");
        let all = Random.tensor(&p(None)).unwrap();
        let want = flat(&all.narrow(0, 8, 4).unwrap());
        assert_eq!(flat(&of(Some((8, 12))).unwrap()), want);
    }

    #[test]
    fn a_parameter_of_another_shape_is_named() {
        struct Wrong;
        impl ParamSource for Wrong {
            fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
                if param.path == "qkv" {
                    return Ok(random(&[15, 8], 1));
                }
                Random.tensor(param)
            }
        }
        match Session::new(decoder(), &Wrong).err().unwrap() {
            GraphError::Mismatch {
                what,
                expected,
                found,
            } => {
                assert!(what.contains("qkv.weight[12..16]"), "{what}");
                assert!(
                    expected == "[4,8]" && found.contains("[15, 8]"),
                    "{expected} {found}"
                );
            }
            e => panic!("{e}"),
        }
    }

    #[test]
    fn a_whole_parameter_of_another_shape_is_named() {
        struct Wrong;
        impl ParamSource for Wrong {
            fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
                match param.path.as_str() {
                    "o" => Ok(random(&[8, 7], 1)),
                    _ => Random.tensor(param),
                }
            }
        }
        let e = Session::new(decoder(), &Wrong).err().unwrap().to_string();
        assert!(
            e.contains("o.weight") && e.contains("[8,8]") && e.contains("[8, 7]"),
            "{e}"
        );
    }

    #[test]
    fn wrong_inputs_are_named() {
        let s = session();
        let plan = s.host_plan();
        let mut state = s.new_state(1, 0);
        let [ids, pos] = inputs(0, 3);
        let longer = &inputs(0, 4)[1];
        for bad in [
            vec![ids.clone()],
            vec![ids.clone(), longer.clone()],
            vec![pos.clone(), pos],
        ] {
            let e = s.run(&plan, &bad, &mut state, None).unwrap_err();
            assert!(matches!(e, GraphError::Mismatch { .. }), "{e}");
        }
        let e = s
            .run(&plan, &inputs(0, 3), &mut s.new_state(2, 0), None)
            .unwrap_err();
        assert!(e.to_string().contains("B = 2"), "{e}");
        let other = session();
        let e = s
            .run(&other.host_plan(), &inputs(0, 3), &mut state, None)
            .unwrap_err();
        assert!(e.to_string().contains("another session"), "{e}");
    }
}
