//! From a plan to steps: shapes are settled, views become strides, buffers get lives.
//!
//! An operation a decode step needs is laid out to run in place; any other one goes through candle at every replay and
//! the manifest says so. Nothing is guessed: a value whose size still depends on the state's length, other than a
//! region itself, is a refusal.

use std::collections::HashMap;

use candle_core::{DType, Tensor};

use super::arena::{Buf, Layout as Lives, OUTS};
use super::manifest::StageNote;
use super::step::{row_major, Place, Planned, Read, Slice, Source, Step, Zip};
use super::there::{split, Draft, From, PlaceNote, Split, There};
use super::window::{whole, Content, Declared, Staged, Window, WindowKind};
use super::{Capture, MOST_INPUTS};
use crate::graph::{Dim, Graph, OpId, RegionKind, ValueId};
use crate::kernels::row::{Attend, Norm};
use crate::kernels::{repeats, rope_serves, ActKind, Kernel};
use crate::plan::{Plan, What};
use crate::session::{Exec, Frozen, Install, Session};
use crate::tail;
use crate::GraphError;

pub(super) fn refused<T>(at: &str, code: &'static str, reason: String) -> Result<T, GraphError> {
    Err(GraphError::Capture {
        at: at.into(),
        code,
        reason,
    })
}

/// What becomes of a plan.
pub(super) struct Compiler<'a> {
    session: &'a Session,
    graph: &'a Graph,
    symbols: HashMap<&'a str, usize>,
    capacity: usize,
    places: Vec<Option<Place>>,
    pub(super) lives: Lives,
    pub(super) steps: Vec<Step>,
    pub(super) stages: Vec<StageNote>,
    pub(super) numbers: Vec<Vec<i64>>,
    pub(super) windows: Vec<Window>,
    pub(super) runners: Vec<Planned>,
    pub(super) outputs: Vec<(Buf, Vec<usize>)>,
    pub(super) there: Option<There>,
    pub(super) not_there: Option<PlaceNote>,
}

impl<'a> Compiler<'a> {
    pub(super) fn run(
        session: &'a Session,
        plan: &'a Plan,
        capture: &Capture<'_>,
        symbols: HashMap<&'a str, usize>,
    ) -> Result<Self, GraphError> {
        let graph: &Graph = session.graph();
        let mut c = Compiler {
            session,
            graph,
            symbols,
            capacity: capture.state.room(),
            places: vec![None; graph.values.len()],
            lives: Lives::default(),
            steps: Vec::new(),
            stages: Vec::new(),
            numbers: Vec::new(),
            windows: Vec::new(),
            runners: Vec::new(),
            outputs: Vec::new(),
            there: None,
            not_there: None,
        };
        c.inputs(capture)?;
        c.fixed_regions()?;
        let output = capture.last_row.and_then(|o| graph.outputs.get(o));
        let mut cut = output.and_then(|(_, v)| tail::cut(plan, *v));
        let stays = c.stays(plan)?;
        let split = split(graph, plan, &stays);
        match &split {
            Ok(Some(found)) => {
                c.plan_steps(plan, found.before.iter().copied(), &mut cut)?;
                c.there(plan, found)?;
                c.keep_last_row(&mut cut);
                c.plan_steps(plan, found.after.iter().copied(), &mut cut)?;
            }
            none => {
                c.not_there = none.as_ref().err().map(|(code, reason)| PlaceNote {
                    form: "host".into(),
                    code: Some((*code).into()),
                    reason: Some(reason.clone()),
                    ..PlaceNote::default()
                });
                c.plan_steps(plan, 0..plan.steps.len(), &mut cut)?;
            }
        }
        c.results(capture.windows)?;
        if let (Ok(Some(split)), Some(greedy)) = (&split, capture.greedy) {
            c.choose(plan, split, greedy.scores)?;
        }
        Ok(c)
    }

    /// Has the next token chosen at the place of the part, where somebody does that there, the scores are made there and
    /// the host only gives them away.
    fn choose(&mut self, plan: &Plan, split: &Split, output: usize) -> Result<(), GraphError> {
        let draft = Draft {
            session: self.session,
            plan,
            split,
        };
        let (Some((_, v)), Some(there)) = (self.graph.outputs.get(output), &mut self.there) else {
            return Ok(());
        };
        let scores = draft.root(*v);
        let as_they_lie = there.taken(scores) == self.outputs.get(output).map(|(buf, _)| *buf);
        let chooses =
            |i: &&Install| i.chooses() == Some(*v) && i.runner.place() == Some(&split.place);
        let Some(install) = plan.installs.iter().find(chooses) else {
            return Ok(());
        };
        let dims = self.outputs[output].1.clone();
        if !as_they_lie || draft.read_after(scores) || !install.runner.stays(&[Some(&dims)])? {
            return Ok(());
        }
        there.choose(install, self.runners.len(), scores, dims);
        self.runners.push(Planned {
            name: install.name.clone(),
            runner: install.runner.clone(),
            frozen: Frozen::There,
        });
        Ok(())
    }

    /// Once the value is made: from here on there is one row, its last one, where it lies.
    fn keep_last_row(&mut self, cut: &mut Option<(ValueId, usize)>) {
        let Some((value, axis)) = *cut else { return };
        if let Some(place) = &mut self.places[value.0] {
            let rows = place.dims[axis];
            place.offset += rows.saturating_sub(1) * place.strides[axis];
            place.dims[axis] = rows.min(1);
            self.symbols.insert(tail::ROWS, rows.min(1));
            *cut = None;
        }
    }

    fn plan_steps(
        &mut self,
        plan: &Plan,
        steps: impl IntoIterator<Item = usize>,
        cut: &mut Option<(ValueId, usize)>,
    ) -> Result<(), GraphError> {
        for step in steps {
            match &plan.steps[step].what {
                What::Op(op) => self.op(*op)?,
                What::Span { install, ops } => self.span(plan, *install, ops)?,
            }
            self.keep_last_row(cut);
        }
        Ok(())
    }

    /// Installs that serve this step at their place. A region is there together with everybody who appends to it and reads
    /// it, or the host appends to it and none of them is.
    fn stays(&self, plan: &Plan) -> Result<Vec<bool>, GraphError> {
        let serves = plan.installs.iter().map(|i| match i.runner.place() {
            Some(_) if i.chooses().is_none() => self.serves(i),
            _ => Ok(false),
        });
        let mut stays = serves.collect::<Result<Vec<_>, _>>()?;
        let owner = |op: OpId| plan.installs.iter().position(|i| i.ops.contains(&op));
        let readers = self.graph.readers();
        let appends = |op: &OpId| matches!(self.session.exec(*op), Exec::Append(_));
        // For every region: who appends to it, then who reads it.
        let users = self.graph.op_ids().filter(appends).map(|op| {
            let read = self.graph.op(op).outputs.iter().flat_map(|v| &readers[v.0]);
            let all = std::iter::once(op).chain(read.map(|(op, _)| *op));
            all.map(owner).collect::<Vec<_>>()
        });
        let users: Vec<_> = users.collect();
        // One that leaves may take another region's users with it.
        for _ in 0..=users.len() {
            for users in &users {
                if !users.iter().all(|i| i.is_some_and(|i| stays[i])) {
                    users.iter().flatten().for_each(|i| stays[*i] = false);
                }
            }
        }
        Ok(stays)
    }

    /// Whether an install's runner serves this step at its place.
    fn serves(&self, install: &Install) -> Result<bool, GraphError> {
        let sizes = |v: &ValueId| match self.graph.producer(*v) {
            // A region grows with the state: it comes at its largest.
            Some((op, _)) if matches!(self.session.exec(op), Exec::Append(_)) => {
                let value = &self.graph.value(*v).dims;
                let size = |d: &Dim| match d {
                    Dim::Size(n) => *n,
                    Dim::Symbol(s) => self
                        .symbols
                        .get(s.as_str())
                        .copied()
                        .unwrap_or(self.capacity),
                };
                Ok(value.iter().map(size).collect())
            }
            _ => match self.graph.param(*v) {
                Some(_) => Ok(self.place(*v)?.dims),
                None => self.dims(*v),
            },
        };
        let dims: Vec<Option<Vec<usize>>> = install
            .inputs
            .iter()
            .map(|v| v.as_ref().map(sizes).transpose())
            .collect::<Result<_, _>>()?;
        let dims: Vec<Option<&[usize]>> = dims.iter().map(Option::as_deref).collect();
        install.runner.stays(&dims)
    }

    /// The part that runs at a place.
    fn there(&mut self, plan: &Plan, split: &Split) -> Result<(), GraphError> {
        let draft = Draft {
            session: self.session,
            plan,
            split,
        };
        let mut runners = HashMap::new();
        let mut recorder = None;
        for step in &split.there {
            let What::Span { install: at, .. } = &plan.steps[*step].what else {
                continue;
            };
            let install = &plan.installs[*at];
            recorder = recorder.or_else(|| install.runner.recorder());
            runners.insert(*at, self.runners.len());
            self.runners.push(Planned {
                name: install.name.clone(),
                runner: install.runner.clone(),
                frozen: Frozen::There,
            });
        }
        let name = split.place.name();
        let Some(recorder) = recorder else {
            return refused(name, "capture_unplaced", "nobody there keeps memory".into());
        };
        let (given, taken) = draft.crossing();
        let mut from = Vec::with_capacity(given.len());
        for v in given {
            let place = self.place(v)?;
            let dims = place.dims.clone();
            from.push(match place.source {
                Source::Numbers(at) => (v, dims, From::Numbers(at)),
                _ => (v, dims, From::Arena(self.slice(&place, name)?)),
            });
        }
        for (_, _, from) in &from {
            if let From::Arena(slice) = from {
                self.touch(slice.source);
            }
        }
        let mut made = Vec::with_capacity(taken.len());
        for v in taken {
            made.push((v, self.make(v)?));
        }
        let dims = |v: ValueId| self.dims(v);
        let there = draft.finish(recorder, from, made, dims, |i| runners[&i])?;
        self.there = Some(there);
        self.push(Step::There, super::THERE, name, false);
        Ok(())
    }

    fn inputs(&mut self, capture: &Capture<'_>) -> Result<(), GraphError> {
        for (v, t) in self.graph.inputs.iter().zip(capture.inputs) {
            let name = self.graph.value(*v).name.clone();
            let failed = |e| window_failed(&name, e);
            let kind = declared(
                capture.windows,
                &name,
                *v,
                &[WindowKind::Swap, WindowKind::Staged],
            )?;
            let dims = t.dims().to_vec();
            let numbers = !t.dtype().is_float();
            let (content, source) = match numbers {
                true => {
                    self.numbers.push(whole(t).map_err(failed)?);
                    let at = self.numbers.len() - 1;
                    (Content::Numbers(at), Source::Numbers(at))
                }
                false if t.dtype() == DType::F32 => {
                    let buf = self.lives.buffer(t.elem_count(), 0);
                    self.lives.keep(buf);
                    (Content::Values(buf), Source::Buf(buf))
                }
                false => {
                    let reason = format!("expected f32 or whole numbers, given {:?}", t.dtype());
                    return refused(&name, "window_form", reason);
                }
            };
            self.places[v.0] = Some(Place::dense(source, dims.clone()));
            let staged = (kind == WindowKind::Staged).then(|| Staged {
                values: vec![0.0; if numbers { 0 } else { t.elem_count() }],
                numbers: vec![0; if numbers { t.elem_count() } else { 0 }],
                fresh: false,
            });
            self.windows.push(Window {
                name,
                value: *v,
                kind,
                dtype: t.dtype(),
                dims,
                content,
                staged,
            });
        }
        Ok(())
    }

    fn fixed_regions(&mut self) -> Result<(), GraphError> {
        for v in (0..self.graph.values.len()).map(ValueId) {
            let Some(region) = self.graph.fixed_region(v) else {
                continue;
            };
            let dims = self.dims(v)?;
            let to = self.lives.buffer(dims.iter().product(), self.steps.len());
            self.places[v.0] = Some(Place::dense(Source::Buf(to), dims));
            self.push(
                Step::Load { region, to },
                "load",
                &self.graph.value(v).name,
                false,
            );
        }
        Ok(())
    }

    /// The graph's outputs, kept until the next replay, as windows.
    fn results(&mut self, declared_windows: &[Declared]) -> Result<(), GraphError> {
        for (name, v) in &self.graph.outputs {
            let kind = declared(declared_windows, name, *v, &[WindowKind::Readback])?;
            let place = self.place(*v)?;
            let slice = self.slice(&place, name)?;
            let whole = matches!(slice.source, Source::Buf(_)) && slice.offset == 0;
            let buf = match (slice.source, whole) {
                (Source::Buf(buf), true) => buf,
                _ => self.copy(&place, name),
            };
            self.lives.touch(buf, usize::MAX);
            self.windows.push(Window {
                name: name.clone(),
                value: *v,
                kind,
                dtype: DType::F32,
                dims: place.dims.clone(),
                content: Content::Values(buf),
                staged: None,
            });
            self.outputs.push((buf, place.dims));
        }
        let unknown = declared_windows
            .iter()
            .find(|d| !self.windows.iter().any(|w| w.name == d.name));
        match unknown {
            Some(d) => Err(GraphError::NoWindow {
                name: d.name.clone(),
                known: names(&self.windows),
            }),
            None => Ok(()),
        }
    }

    /// Sizes of a value.
    fn dims(&self, v: ValueId) -> Result<Vec<usize>, GraphError> {
        let value = self.graph.value(v);
        let size = |d: &Dim| match d {
            Dim::Size(n) => Some(*n),
            Dim::Symbol(s) => self.symbols.get(s.as_str()).copied(),
        };
        match value.dims.iter().map(size).collect::<Option<Vec<_>>>() {
            Some(dims) => Ok(dims),
            None => {
                let listed: Vec<String> = value.dims.iter().map(ToString::to_string).collect();
                let reason = format!(
                    "its sizes [{}] move with the length of the state; only a region itself may",
                    listed.join(",")
                );
                refused(&value.name, "capture_shape_moved", reason)
            }
        }
    }

    fn place(&self, v: ValueId) -> Result<Place, GraphError> {
        if let Some(place) = &self.places[v.0] {
            return Ok(place.clone());
        }
        match self.session.value_tensor(v)? {
            Some(t) => Ok(Place {
                source: Source::Param(v),
                offset: 0,
                dims: t.dims().to_vec(),
                strides: t.stride().to_vec(),
            }),
            None => refused(
                &self.graph.value(v).name,
                "capture_unplaced",
                "is read before it is made; run `check`".into(),
            ),
        }
    }

    fn operands(&self, op: OpId) -> Result<Vec<Option<Place>>, GraphError> {
        let inputs = &self.graph.op(op).inputs;
        // The region an operation writes to is no operand here.
        let n = match self.session.exec(op) {
            Exec::Kernel(_) => inputs.len(),
            _ => inputs.len().min(1),
        };
        let table = self.session.looked_up(op);
        let place = |v: ValueId| match table == Some(v) && self.places[v.0].is_none() {
            true => self.table(v),
            false => self.place(v),
        };
        inputs[..n]
            .iter()
            .map(|v| v.map(place).transpose())
            .collect()
    }

    /// What rows are looked up in, without reading it as a tensor where it is kept otherwise.
    fn table(&self, v: ValueId) -> Result<Place, GraphError> {
        let Some(table) = self.session.table(v)? else {
            return self.place(v);
        };
        let (rows, width) = table.dims();
        Ok(Place {
            source: Source::Param(v),
            offset: 0,
            dims: vec![rows, width],
            strides: vec![width, 1],
        })
    }

    fn touch(&mut self, source: Source) {
        if let Source::Buf(buf) = source {
            self.lives.touch(buf, self.steps.len());
        }
    }

    fn push(&mut self, step: Step, kind: &str, at: &str, in_place: bool) {
        self.steps.push(step);
        self.stages.push(StageNote {
            kind: kind.into(),
            at: at.into(),
            in_place,
        });
    }

    /// The place's elements one after another, copied there first if they lie apart.
    fn slice(&mut self, place: &Place, at: &str) -> Result<Slice, GraphError> {
        let of = |source, offset| Slice {
            source,
            offset,
            len: place.len(),
        };
        match place.source {
            Source::Numbers(_) | Source::Region(_) => {
                let reason = "is not a value in memory of its own".to_string();
                refused(at, "capture_shape_moved", reason)
            }
            source if place.is_dense() => {
                self.touch(source);
                Ok(of(source, place.offset))
            }
            _ => Ok(of(Source::Buf(self.copy(place, at)), 0)),
        }
    }

    fn copy(&mut self, place: &Place, at: &str) -> Buf {
        self.touch(place.source);
        let to = self.lives.buffer(place.len(), self.steps.len());
        let from = place.clone();
        self.push(Step::Copy { from, to }, "copy", at, true);
        // It is read by whatever comes next.
        self.lives.touch(to, self.steps.len());
        to
    }

    /// A buffer for a value made by the step that comes next.
    fn make(&mut self, v: ValueId) -> Result<Buf, GraphError> {
        let dims = self.dims(v)?;
        let buf = self.lives.buffer(dims.iter().product(), self.steps.len());
        self.places[v.0] = Some(Place::dense(Source::Buf(buf), dims));
        Ok(buf)
    }

    fn op(&mut self, id: OpId) -> Result<(), GraphError> {
        let session = self.session;
        let op = self.graph.op(id);
        let inputs = self.operands(id)?;
        let name = match op.outputs.first() {
            Some(v) => self.graph.value(*v).name.clone(),
            None => op.module.clone(),
        };
        match (session.exec(id), inputs.first()) {
            (Exec::Append(region), Some(Some(x))) => {
                let x = self.slice(x, &name)?;
                let RegionKind::Growing { heads, width } = self.graph.states[*region].kind else {
                    return refused(&name, "capture_unplaced", "appends to no cache".into());
                };
                let batch = self.symbols.get("B").copied().unwrap_or(1);
                let dims = vec![batch, heads, self.capacity, width];
                self.touch(x.source);
                self.places[op.outputs[0].0] = Some(Place::dense(Source::Region(*region), dims));
                self.push(
                    Step::Append { region: *region, x },
                    op.kind.name(),
                    &name,
                    true,
                );
                Ok(())
            }
            (Exec::Write(region), Some(Some(x))) => {
                self.touch(x.source);
                self.places[op.outputs[0].0] = Some(x.clone());
                let x = x.clone();
                self.push(
                    Step::Store { region: *region, x },
                    op.kind.name(),
                    &name,
                    false,
                );
                Ok(())
            }
            (Exec::Kernel(kernel), _) => {
                if self.view(id, kernel, &inputs, &name)?
                    || self.in_place(id, kernel, &inputs, &name)?
                {
                    return Ok(());
                }
                self.foreign(id, kernel, inputs, &name)
            }
            _ => refused(&name, "capture_unplaced", "writes nothing".into()),
        }
    }

    fn foreign(
        &mut self,
        op: OpId,
        kernel: &Kernel,
        inputs: Vec<Option<Place>>,
        name: &str,
    ) -> Result<(), GraphError> {
        for place in inputs.iter().flatten() {
            self.touch(place.source);
        }
        let o = self.graph.op(op);
        let outputs = o
            .outputs
            .iter()
            .map(|v| Ok((self.make(*v)?, self.dims(*v)?)))
            .collect::<Result<Vec<_>, GraphError>>()?;
        let step = Step::Foreign {
            op,
            kernel: Box::new(kernel.clone()),
            inputs,
            outputs,
        };
        self.push(step, o.kind.name(), name, false);
        Ok(())
    }

    /// Operations that compute nothing.
    fn view(
        &mut self,
        id: OpId,
        kernel: &Kernel,
        inputs: &[Option<Place>],
        name: &str,
    ) -> Result<bool, GraphError> {
        let outputs = self.graph.op(id).outputs.clone();
        let Some(Some(x)) = inputs.first() else {
            return Ok(false);
        };
        if !matches!(x.source, Source::Buf(_) | Source::Param(_)) {
            return Ok(false);
        }
        match kernel {
            Kernel::Reshape(_) | Kernel::Contiguous => {
                let dims = self.dims(outputs[0])?;
                let slice = self.slice(x, name)?;
                let mut place = Place::dense(slice.source, dims);
                place.offset = slice.offset;
                if place.len() != slice.len {
                    let reason = format!("{} elements, {} declared", slice.len, place.len());
                    return refused(name, "capture_unplaced", reason);
                }
                self.places[outputs[0].0] = Some(place);
            }
            Kernel::Transpose(perm) if perm.len() == x.dims.len() => {
                let mut place = x.clone();
                place.dims = perm.iter().map(|p| x.dims[*p]).collect();
                place.strides = perm.iter().map(|p| x.strides[*p]).collect();
                self.places[outputs[0].0] = Some(place);
            }
            Kernel::Chunk { axis, .. } | Kernel::Split { axis, .. } => {
                let rank = x.dims.len() as i64;
                let axis = (if *axis < 0 { axis + rank } else { *axis }) as usize;
                let mut from = 0;
                for v in outputs {
                    let dims = self.dims(v)?;
                    let mut place = x.clone();
                    place.offset += from * x.strides[axis];
                    from += dims[axis];
                    place.dims = dims;
                    self.places[v.0] = Some(place);
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Lays the operation out to run in the arena, if there is code for it at these shapes.
    fn in_place(
        &mut self,
        id: OpId,
        kernel: &Kernel,
        inputs: &[Option<Place>],
        name: &str,
    ) -> Result<bool, GraphError> {
        let op = self.graph.op(id);
        let at = |i: usize| inputs.get(i).and_then(Option::as_ref);
        let in_memory = |p: &Place| matches!(p.source, Source::Buf(_) | Source::Param(_));
        let numbers = |p: Option<&Place>| match p?.source {
            Source::Numbers(n) => Some(n),
            _ => None,
        };
        let kind = op.kind.name();
        let Some(x) = at(0) else { return Ok(false) };
        let (out, dims) = (op.outputs[0], self.dims(op.outputs[0])?);
        // Numbers and regions first: they are no slices.
        match kernel {
            Kernel::Embedding => {
                let (Some(ids), Some(table)) = (numbers(Some(x)), at(1)) else {
                    return Ok(false);
                };
                let &[_, width] = table.dims.as_slice() else {
                    return Ok(false);
                };
                let table = self.slice(table, name)?;
                let out = self.make(out)?;
                let step = Step::Embedding {
                    ids,
                    table,
                    width,
                    out,
                };
                self.push(step, kind, name, true);
                return Ok(true);
            }
            Kernel::RopeTable {
                inv_freq,
                scaling,
                axes,
            } => {
                let Some(positions) = numbers(Some(x)) else {
                    return Ok(false);
                };
                let room = self.lives.buffer(x.len(), self.steps.len());
                let (cos, sin) = (self.make(op.outputs[0])?, self.make(op.outputs[1])?);
                let rule = Box::new((inv_freq.clone(), *scaling, axes.clone()));
                let step = Step::RopeTable {
                    positions,
                    rule,
                    at: room,
                    cos,
                    sin,
                };
                self.push(step, kind, name, true);
                return Ok(true);
            }
            Kernel::Attention(rule) => {
                let (Some(k), Some(v)) = (at(1), at(2)) else {
                    return Ok(false);
                };
                let (Source::Region(key), Source::Region(value)) = (k.source, v.source) else {
                    return Ok(false);
                };
                let one = x.dims.len() == 4 && x.dims[0] == 1 && x.dims[2] == 1;
                let plain = at(3).is_none() && at(4).is_none() && in_memory(x);
                if !one || !plain || !x.dims[1].is_multiple_of(k.dims[1].max(1)) {
                    return Ok(false);
                }
                let sizes = Attend {
                    rule: *rule,
                    heads: x.dims[1],
                    kv_heads: k.dims[1],
                    widths: (x.dims[3], v.dims[3]),
                    capacity: self.capacity,
                };
                let q = self.slice(x, name)?;
                let scores = self
                    .lives
                    .buffer(sizes.heads * self.capacity, self.steps.len());
                let out = self.make(out)?;
                let step = Step::Attend {
                    sizes,
                    q,
                    k: key,
                    v: value,
                    scores,
                    out,
                };
                self.push(step, kind, name, true);
                return Ok(true);
            }
            _ => {}
        }
        if !inputs.iter().flatten().all(in_memory) {
            return Ok(false);
        }
        let zip = match kernel {
            Kernel::Add => Some(Zip::Add),
            Kernel::Bias => Some(Zip::Add),
            Kernel::Mul => Some(Zip::Mul),
            _ => None,
        };
        if let (Some(zip), Some(y)) = (zip, at(1)) {
            let swapped = x.dims != y.dims && repeats(&x.dims, &y.dims).is_none();
            let (a, b) = if swapped { (y, x) } else { (x, y) };
            if a.dims != dims || repeats(&a.dims, &b.dims).is_none() {
                return Ok(false);
            }
            let (a, b) = (self.slice(a, name)?, self.slice(b, name)?);
            self.touch(a.source);
            let out = self.make(out)?;
            self.push(
                Step::Zip {
                    kind: zip,
                    a,
                    b,
                    out,
                },
                kind,
                name,
                true,
            );
            return Ok(true);
        }
        match kernel {
            Kernel::Linear(layout) => {
                let Some(w) = at(1) else { return Ok(false) };
                let k = x.dims.last().copied().unwrap_or(0);
                if k == 0 || x.len() != k || w.dims.len() != 2 || !w.is_dense() {
                    return Ok(false);
                }
                let (x, w) = (self.slice(x, name)?, self.slice(w, name)?);
                let out = self.make(out)?;
                self.push(
                    Step::Linear {
                        x,
                        w,
                        layout: *layout,
                        out,
                    },
                    kind,
                    name,
                    true,
                );
            }
            Kernel::Scale(by) => {
                let x = self.slice(x, name)?;
                let out = self.make(out)?;
                self.push(Step::Scale { x, by: *by, out }, kind, name, true);
            }
            Kernel::Act(act) if *act != ActKind::GeluExact => {
                let x = self.slice(x, name)?;
                let out = self.make(out)?;
                self.push(Step::Act { kind: *act, x, out }, kind, name, true);
            }
            Kernel::RmsNorm { .. } | Kernel::LayerNorm { .. } | Kernel::L2Norm { .. } => {
                let (norm, axes) = match kernel {
                    Kernel::RmsNorm { eps, offset, axes } => (
                        Norm::Rms {
                            eps: *eps,
                            offset: *offset,
                        },
                        *axes,
                    ),
                    Kernel::LayerNorm { eps } => (Norm::Layer { eps: *eps }, 1),
                    Kernel::L2Norm { eps } => (Norm::L2 { eps: *eps }, 1),
                    _ => return Ok(false),
                };
                let Some(lead) = x.dims.len().checked_sub(axes) else {
                    return Ok(false);
                };
                let width = x.dims[lead..].iter().product::<usize>().max(1);
                let covers = |p: Option<&Place>| p.is_none_or(|p| p.len() == width);
                if !covers(at(1)) || !covers(at(2)) {
                    return Ok(false);
                }
                let x = self.slice(x, name)?;
                let w = at(1).map(|w| self.slice(w, name)).transpose()?;
                let b = at(2).map(|b| self.slice(b, name)).transpose()?;
                for s in [Some(x), w, b].into_iter().flatten() {
                    self.touch(s.source);
                }
                let out = self.make(out)?;
                self.push(
                    Step::Norm {
                        kind: norm,
                        x,
                        w,
                        b,
                        width,
                        out,
                    },
                    kind,
                    name,
                    true,
                );
            }
            Kernel::Rope { pairing, rotary } => {
                let (Some(cos), Some(sin)) = (at(1), at(2)) else {
                    return Ok(false);
                };
                let &[1, tokens, _, d] = x.dims.as_slice() else {
                    return Ok(false);
                };
                let r = rotary.unwrap_or(d);
                let w = cos.len() / tokens.max(1);
                let rows = matches!(cos.dims.as_slice(), [n, _] | [1, n, _] if *n == tokens);
                let fits = r > 0 && r <= d && r.is_multiple_of(2) && rope_serves(w, r, *pairing);
                if !rows || !fits || cos.dims != sin.dims {
                    return Ok(false);
                }
                let x = self.slice(x, name)?;
                let (cos, sin) = (self.slice(cos, name)?, self.slice(sin, name)?);
                for s in [x, cos, sin] {
                    self.touch(s.source);
                }
                let out = self.make(out)?;
                let (widths, pairing) = ((d, r), *pairing);
                let step = Step::Rope {
                    x,
                    cos,
                    sin,
                    tokens,
                    widths,
                    pairing,
                    out,
                };
                self.push(step, kind, name, true);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn span(&mut self, plan: &Plan, install: usize, ops: &[OpId]) -> Result<(), GraphError> {
        let install = &plan.installs[install];
        let places = install
            .inputs
            .iter()
            .map(|v| v.map(|v| self.place(v)).transpose())
            .collect::<Result<Vec<_>, _>>()?;
        let dims: Vec<Option<&[usize]>> = places
            .iter()
            .map(|p| p.as_ref().map(|p| p.dims.as_slice()))
            .collect();
        let mut frozen = install.runner.freeze(&dims)?;
        let numbers = |p: &&Place| matches!(p.source, Source::Numbers(_));
        let many = install.inputs.len() > MOST_INPUTS || install.outputs.len() > OUTS;
        let served = matches!(frozen, Frozen::Served { .. });
        if served && (many || places.iter().flatten().any(|p| numbers(&p))) {
            frozen = Frozen::Tensors;
        }
        self.runners.push(Planned {
            name: install.name.clone(),
            runner: install.runner.clone(),
            frozen,
        });
        let runner = self.runners.len() - 1;
        match frozen {
            Frozen::Host | Frozen::There => return ops.iter().try_for_each(|op| self.op(*op)),
            Frozen::Served { allocates } => {
                let mut inputs = Vec::with_capacity(places.len());
                for place in &places {
                    inputs.push(match place {
                        None => Read::Absent,
                        Some(Place {
                            source: Source::Region(r),
                            dims,
                            ..
                        }) => {
                            let len = dims.iter().product();
                            let copied = !install.runner.reads_regions();
                            let at = self.steps.len();
                            Read::Region(*r, copied.then(|| self.lives.buffer(len, at)))
                        }
                        Some(place) => {
                            let slice = self.slice(place, &install.name)?;
                            Read::Slice(slice, place.dims.clone())
                        }
                    });
                }
                // Copies made on the way moved the step on.
                for read in &inputs {
                    match read {
                        Read::Slice(s, _) => self.touch(s.source),
                        Read::Region(_, Some(buf)) => self.touch(Source::Buf(*buf)),
                        Read::Region(_, None) | Read::Absent => {}
                    }
                }
                let mut outputs = Vec::new();
                let mut dims = Vec::new();
                for v in &install.outputs {
                    outputs.push(self.make(*v)?);
                    dims.push(self.dims(*v)?);
                }
                let step = Step::Span {
                    runner,
                    inputs,
                    outputs,
                    dims,
                };
                self.push(step, "span", &install.name, !allocates);
            }
            Frozen::Tensors => {
                for place in places.iter().flatten() {
                    self.touch(place.source);
                }
                let outputs = install
                    .outputs
                    .iter()
                    .map(|v| Ok((self.make(*v)?, self.dims(*v)?)))
                    .collect::<Result<Vec<_>, GraphError>>()?;
                let step = Step::Tensors {
                    runner,
                    inputs: places,
                    outputs,
                };
                self.push(step, "span", &install.name, false);
            }
        }
        Ok(())
    }
}

/// The kind of a window; a declaration that means another tensor is a conflict.
fn declared(
    list: &[Declared],
    name: &str,
    value: ValueId,
    allowed: &[WindowKind],
) -> Result<WindowKind, GraphError> {
    let Some(d) = list.iter().find(|d| d.name == name) else {
        return Ok(allowed[0]);
    };
    if d.value != value {
        let reason = format!(
            "declared for value {}, the step's own of this name is value {}",
            d.value.0, value.0
        );
        return refused(name, "window_conflict", reason);
    }
    if !allowed.contains(&d.kind) {
        let reason = format!("expected one of {allowed:?}, declared {:?}", d.kind);
        return refused(name, "window_form", reason);
    }
    Ok(d.kind)
}

pub(super) fn names(windows: &[Window]) -> String {
    let names: Vec<&str> = windows.iter().map(|w| w.name.as_str()).collect();
    names.join(", ")
}

fn window_failed(name: &str, e: candle_core::Error) -> GraphError {
    GraphError::Kernel {
        op: "window".into(),
        at: name.into(),
        source: Box::new(e),
    }
}

/// Elements of a strided place, in order.
pub(super) fn gather(data: &[f32], place: &Place, mut f: impl FnMut(f32)) {
    fn walk(data: &[f32], dims: &[usize], strides: &[usize], at: usize, f: &mut impl FnMut(f32)) {
        match (dims, strides) {
            ([], _) => f(data[at]),
            ([n, dims @ ..], [s, strides @ ..]) => {
                for i in 0..*n {
                    walk(data, dims, strides, at + i * s, f);
                }
            }
            _ => {}
        }
    }
    walk(data, &place.dims, &place.strides, place.offset, &mut f);
}

/// [`gather`] into a slice, in runs where the last dim's elements follow each other.
pub(super) fn copy_dense(data: &[f32], place: &Place, to: &mut [f32]) {
    fn walk(data: &[f32], dims: &[usize], strides: &[usize], at: usize, to: &mut &mut [f32]) {
        match (dims, strides) {
            (&[n], &[1]) => {
                let (run, rest) = std::mem::take(to).split_at_mut(n);
                run.copy_from_slice(&data[at..at + n]);
                *to = rest;
            }
            ([n, dims @ ..], [s, strides @ ..]) => {
                for i in 0..*n {
                    walk(data, dims, strides, at + i * s, to);
                }
            }
            _ => {
                let (one, rest) = std::mem::take(to).split_at_mut(1);
                one[0] = data[at];
                *to = rest;
            }
        }
    }
    let mut to = &mut to[..place.len()];
    walk(data, &place.dims, &place.strides, place.offset, &mut to);
}

/// The elements of a tensor in memory, from its first one on.
pub(super) fn row_major_of(t: &Tensor) -> bool {
    t.stride() == row_major(t.dims()) || t.is_contiguous()
}
