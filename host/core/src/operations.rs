//! An operation of the host's graph that a backend executes on its device, in a seat of its own.
//!
//! It is bound through the same entry as a form, as one of no structure: kind, attributes with their defaults, operands
//! that are parameters as weights. Before it is used it runs once beside the host's kernel on the same values. In a
//! plan it is an install of one operation: what it does not serve the host's operation does, exactly and counted.
//!
//! An append to a region of the state is bound as inputs `x` and the length that is valid once it is done, and the region
//! as a state: it moves the region's home to the device ([`crate::station::Rooms`]).
//!
//! The choice of a greedy step ([`CHOICE`]) is bound in the same way, though it is no operation of the graph: nobody there
//! reads what it makes, and in an eager run nobody asks for it. It is what a captured step ends with, so that one whole
//! number comes home for all the scores of a vocabulary.
//!
//! Not here: which operations are worth it (`residency`), and the values' copies (`station`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde_json::Value as Json;
use structures_graph::ops::{AttrDefault, AttrSpec, AttrValue};
use structures_graph::place::{Away, Held, Place, Quarters, Recorder};
use structures_graph::session::{first_largest, Install, Session};
use structures_graph::{Dim, Graph, GraphError, Layout, Op, OpId, OpKind, Origin, ValueId};
use structures_loader::{BoundForm, Copies, Plugin, StatusKind};
use structures_plugin_api::abi::DType;
use structures_plugin_api::describe::{operation_form, BindParams};

use crate::adopt::Blocks;
use crate::bind::bind_form;
use crate::receipt::SeatDevice;
use crate::record::Tape;
use crate::seat::{
    Admission, AwayCall, CallFailure, Elsewhere, Executable, OnGuardFail, Rows, Seat, View,
};
use crate::station::{length_name, length_port, Rooms, Station, DEVICE_LOST};
use crate::trial::NamedWeight;

/// Largest relative L2 distance from the host's kernel: f32 in another order of sums.
const AGREES: f64 = 1e-5;
/// Code of an operation that makes other numbers than the host.
pub const DIFFERS: &str = "operation_differs";
/// Kind of the choice among scores: of every row of `x` the index of the first of the largest, as a whole number; what is
/// no number is never the largest, and -1 where no score is finite.
pub const CHOICE: &str = "argmax";

/// What stands for symbols of a graph's dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// New positions of a run.
    pub tokens: usize,
    /// All of them, with those of the state.
    pub positions: usize,
}

impl Sizes {
    fn of(self, dim: &Dim) -> usize {
        match dim {
            Dim::Size(n) => *n,
            Dim::Symbol(s) => match s.as_str() {
                "B" => 1,
                "S" => self.positions,
                _ => self.tokens,
            },
        }
    }

    /// Dims of a value.
    pub fn dims(self, graph: &Graph, v: ValueId) -> Vec<usize> {
        let dims = graph.value(v).dims.iter();
        dims.map(|d| self.of(d)).collect()
    }

    /// Bytes of a value on a device.
    pub fn bytes(self, graph: &Graph, readers: &[Vec<(OpId, usize)>], v: ValueId) -> u64 {
        let counts = readers[v.0].iter().any(|(op, at)| counts(graph, *op, *at));
        let element = if counts { size_of::<i64>() } else { 4 };
        element as u64 * self.dims(graph, v).iter().product::<usize>() as u64
    }

    /// Bytes of a choice among the rows of a value.
    pub fn chosen_bytes(&self, graph: &Graph, v: ValueId) -> u64 {
        let dims = self.dims(graph, v);
        let rows = dims
            .split_last()
            .map_or(1, |(_, lead)| lead.iter().product());
        size_of::<i64>() as u64 * rows as u64
    }
}

/// Whether an operand holds whole numbers: rows of a table, positions.
fn counts(graph: &Graph, op: OpId, at: usize) -> bool {
    at == 0 && matches!(graph.op(op).kind, OpKind::Embedding | OpKind::RopeTable)
}

/// Whether an operation may be given to a device at all: it writes no state that has its home with the host, and is not
/// free already.
pub fn movable(kind: OpKind) -> bool {
    let stays = [OpKind::StateWrite, OpKind::Reshape];
    !stays.contains(&kind)
}

/// Whether an operation on a device reads a region that has its home there: it has an operand for the valid length, and
/// the graph gives it none.
pub fn reads_housed(graph: &Graph, op: OpId) -> bool {
    let op = graph.op(op);
    length_port(operands(op)).is_some()
}

/// Operands by name, and whether the graph gives them; those at the end that an operation leaves out too.
fn operands(op: &Op) -> impl Iterator<Item = (&'static str, bool)> + '_ {
    let spec = op.kind.spec();
    let count = op.inputs.len().max(spec.operands.len());
    (0..count).map(|at| {
        let given = op.inputs.get(at).copied().flatten();
        (spec.operand_name(at), given.is_some())
    })
}

/// An operation bound on a device, ready to be put in a plan.
#[derive(Clone)]
pub struct Operation {
    /// Its seat.
    pub seat: Arc<Seat>,
    /// How a plan hands the operation to it.
    pub install: Install,
    /// Kind: of the graph, or [`CHOICE`].
    pub kind: &'static str,
    /// Name of its first result; of the scores that are chosen among.
    pub value: String,
    /// Id of the plugin.
    pub plugin: String,
    /// The device.
    pub device: SeatDevice,
    /// Bytes of parameters on the device.
    pub packed_bytes: u64,
}

/// Binds operations on one device.
pub struct Workshop<'a> {
    session: &'a Session,
    plugin: &'a Plugin,
    station: Arc<Station>,
    /// Shapes of the trial.
    sizes: Sizes,
    /// Most positions of any call.
    most: usize,
    mode: OnGuardFail,
    /// What was compared with the host already; operations of the same shape and without weights are one.
    proven: BTreeSet<String>,
}

/// Why an operation was not bound.
#[derive(Clone, Debug)]
pub struct NotMade {
    /// Stable code.
    pub code: String,
    /// For people.
    pub reason: String,
    /// The plugin said no to what it declares, or its device went: what stands against it is the machine.
    pub machine: bool,
}

impl From<(String, String)> for NotMade {
    fn from((code, reason): (String, String)) -> Self {
        NotMade {
            machine: code == DEVICE_LOST,
            code,
            reason,
        }
    }
}

impl<'a> Workshop<'a> {
    /// On a device of a plugin. `sizes` are those of the workload, `most` the longest run there can be.
    pub fn new(
        session: &'a Session,
        plugin: &'a Plugin,
        station: Arc<Station>,
        sizes: Sizes,
        most: usize,
        mode: OnGuardFail,
    ) -> Self {
        Workshop {
            session,
            plugin,
            station,
            sizes,
            most,
            mode,
            proven: BTreeSet::new(),
        }
    }

    /// The device.
    pub fn station(&self) -> &Arc<Station> {
        &self.station
    }

    /// Id of the plugin.
    pub fn plugin(&self) -> &str {
        self.plugin.id()
    }

    /// Kinds of operations that are declared for it and that a device may have.
    pub fn kinds(&self) -> BTreeSet<OpKind> {
        let declared = self.plugin.description().operations.iter();
        declared
            .filter_map(|name| OpKind::from_name(name))
            .filter(|kind| movable(*kind))
            .collect()
    }

    /// Whether the choice among scores is declared for it.
    pub fn chooses(&self) -> bool {
        let declared = &self.plugin.description().operations;
        declared.iter().any(|kind| kind == CHOICE)
    }

    /// Asks the plugin for an operation.
    fn form(
        &self,
        kind: &str,
        weights: &[NamedWeight],
        params: &BindParams,
        rows: usize,
    ) -> Result<BoundForm, NotMade> {
        let bound = bind_form(
            self.plugin,
            &operation_form(kind),
            kind,
            weights,
            &BTreeMap::new(),
            params,
            rows as u64,
            &Blocks::new(),
            self.station.note().index,
        );
        let bound = bound.map_err(|e| (e.code().to_string(), e.to_string()))?;
        bound.map_err(|e| NotMade {
            machine: e.kind != StatusKind::Invalid,
            ..(e.code.clone(), e.message).into()
        })
    }

    fn records(&self, kind: &str) -> bool {
        let recorded = &self.plugin.description().recorded_operations;
        recorded.iter().any(|declared| declared == kind)
    }

    /// Width of a value's rows, and how many there are at most.
    fn rows(&self, v: ValueId) -> (usize, usize) {
        let graph = self.session.graph();
        let width = match graph.value(v).dims.last() {
            Some(Dim::Size(n)) => (*n).max(1),
            _ => 1,
        };
        let longest = Sizes {
            tokens: self.most,
            positions: self.most,
        };
        let elements = longest.dims(graph, v).iter().product::<usize>();
        (width, elements / width)
    }

    /// Binds the choice among scores, and has it choose among rows that are told apart by what the host makes of them.
    ///
    /// # Errors
    /// Why not.
    pub fn bind_choice(&self, scores: ValueId) -> Result<Operation, NotMade> {
        let dims = self.session.graph().value(scores).dims.clone();
        let (width, rows) = self.rows(scores);
        let params = BindParams {
            inputs: vec!["x".into()],
            outputs: vec!["y".into()],
            ..BindParams::default()
        };
        let bound = self.form(CHOICE, &[], &params, rows)?;
        let away = Arc::new(Working {
            form: bound,
            station: Arc::clone(&self.station),
            length: None,
            made: DType::I64,
            appends: false,
            records: self.records(CHOICE),
        });
        trial_choice(&away, dims.len(), width)?;
        let value = self.session.graph().value(scores).name.clone();
        let key = format!("{}:{value}", operation_form(CHOICE));
        let one = dims.len().saturating_sub(1);
        let seat = self.seat(
            away,
            key.clone(),
            (width, rows),
            vec![Some(dims.clone())],
            vec![dims[..one].to_vec()],
        );
        Ok(Operation {
            install: Install::choice(key, scores, seat.clone()),
            seat,
            kind: CHOICE,
            value,
            plugin: self.plugin.id().into(),
            device: self.station.note().clone(),
            packed_bytes: 0,
        })
    }

    fn seat(
        &self,
        away: Arc<Working>,
        key: String,
        (width, rows): (usize, usize),
        inputs: Vec<Option<Vec<Dim>>>,
        outputs: Vec<Vec<Dim>>,
    ) -> Arc<Seat> {
        let admission = Admission {
            width,
            rows: Rows::Capacity(rows),
            band: None,
            concurrent: false,
            strided: false,
        };
        let there = Box::new(OnlyThere);
        Seat::at(
            Some(away),
            key,
            there,
            admission,
            self.mode,
            inputs,
            outputs,
        )
    }

    /// Binds one operation and compares it with the host's.
    ///
    /// # Errors
    /// Why not.
    pub fn bind(&mut self, id: OpId) -> Result<Operation, NotMade> {
        let graph = self.session.graph();
        let op = graph.op(id);
        let region = op.inputs.iter().flatten().copied().find(|v| {
            let region = matches!(graph.value(*v).origin, Origin::State(_));
            region && op.kind == OpKind::KvAppend
        });
        let (mut inputs, mut weights) = (Vec::new(), Vec::new());
        for (at, operand) in op.inputs.iter().enumerate() {
            if region.is_some() && *operand == region {
                continue;
            }
            let name = operand_name(op.kind, at);
            let stored = operand.and_then(|v| Some((graph.param(v)?.1, v)));
            let Some((layout, value)) = stored else {
                inputs.push((name, *operand));
                continue;
            };
            let tensor = self.session.value_tensor(value);
            match tensor.map_err(|e| ("operation_operands".to_string(), e.to_string()))? {
                Some(tensor) => {
                    // `[K, N]` in any strides: nobody there knows how it is stored.
                    let turned = op.kind == OpKind::Linear && layout == Layout::OutIn;
                    let turned = turned.then(|| tensor.t()).transpose();
                    let turned =
                        turned.map_err(|e| ("operation_operands".into(), e.to_string()))?;
                    weights.push(NamedWeight {
                        name,
                        layout,
                        tensor: turned.unwrap_or(tensor),
                    });
                }
                None => inputs.push((name, *operand)),
            }
        }
        let output = |i: usize| match op.outputs.len() {
            1 => "y".to_string(),
            _ => format!("y_{i}"),
        };
        let first = inputs.iter().find_map(|(_, v)| *v);
        let first = first.ok_or_else(|| {
            let reason = "it reads nothing but parameters";
            ("operation_operands".to_string(), reason.to_string())
        })?;
        let (width, rows) = self.rows(first);
        if reads_housed(graph, id) {
            let rest = operands(op).skip(op.inputs.len());
            inputs.extend(rest.map(|(name, _)| (name.to_string(), None)));
        }
        let mut params = BindParams {
            params: attributes(graph, id),
            inputs: inputs.iter().map(|(name, _)| name.clone()).collect(),
            outputs: (0..op.outputs.len()).map(output).collect(),
            ..BindParams::default()
        };
        if region.is_some() {
            params.inputs.push(length_name().into());
            params.outputs.clear();
            params.states = vec![operand_name(op.kind, 1)];
        }
        let kind = op.kind.name();
        let bound = self.form(kind, &weights, &params, rows)?;
        let packed_bytes = bound.facts().packed_bytes;
        let given = inputs.iter().map(|(name, v)| (name.as_str(), v.is_some()));
        let away = Arc::new(Working {
            form: bound,
            station: Arc::clone(&self.station),
            length: length_port(given),
            made: DType::F32,
            appends: region.is_some(),
            records: self.records(kind),
        });
        let shapes: Vec<_> = op
            .inputs
            .iter()
            .flatten()
            .map(|v| graph.value(*v))
            .collect();
        let shapes: Vec<_> = shapes.iter().map(|v| &v.dims).collect();
        let class = format!("{kind} {:?} {shapes:?}", params.params);
        if !weights.is_empty() || !self.proven.contains(&class) {
            match region {
                Some(_) => self.trial_append(first, &away)?,
                None => self.trial(id, &away, &inputs, &weights)?,
            }
            self.proven.insert(class);
        }
        let value = op.outputs.first().map(|v| graph.value(*v).name.clone());
        let value = value.unwrap_or_default();
        let key = format!("{}:{value}", operation_form(kind));
        let dims = |v: ValueId| graph.value(v).dims.clone();
        let seat = self.seat(
            away,
            key.clone(),
            (width, rows),
            inputs.iter().map(|(_, v)| v.map(dims)).collect(),
            op.outputs.iter().map(|v| dims(*v)).collect(),
        );
        Ok(Operation {
            install: Install {
                name: key,
                ops: vec![id],
                inputs: inputs.into_iter().map(|(_, v)| v).collect(),
                outputs: op.outputs.clone(),
                runner: seat.clone(),
            },
            seat,
            kind,
            value,
            plugin: self.plugin.id().into(),
            device: self.station.note().clone(),
            packed_bytes,
        })
    }

    /// An append behind a region of made values, at the workload's shapes: it must be there bit for bit, and nothing
    /// before it changed.
    fn trial_append(&self, x: ValueId, away: &Working) -> Result<(), (String, String)> {
        let host = |e: GraphError| ("operation_host".to_string(), e.to_string());
        let candle = |e: candle_core::Error| host(e.into_graph(OpKind::KvAppend));
        let dims = self.sizes.dims(self.session.graph(), x);
        let &[b, h, n, d] = dims.as_slice() else {
            let reason = format!("it appends values of dims {dims:?}");
            return Err(("operation_operands".into(), reason));
        };
        let (before, behind) = (3, 2);
        let room = [b, h, before + n + behind, d];
        let held = made(&room, 1, None).map_err(candle)?;
        let new = made(&dims, 2, None).map_err(candle)?;
        let mut rooms = Rooms::at(&self.station);
        rooms.admit(0, room, Some(&held)).map_err(host)?;
        rooms.announce(before + n).map_err(host)?;
        let region = rooms.region(0, before + n);
        let region = region.ok_or_else(|| {
            let reason = "the region is not there".to_string();
            (DIFFERS.to_string(), reason)
        })?;
        let appended = away.append(&Held::Host(new.clone()), &region);
        appended.map_err(|failure| (failure.code, failure.message))?;
        let got = region.fetch().map_err(host)?;
        let kept = held.narrow(2, 0, before).map_err(candle)?;
        let want = Tensor::cat(&[&kept, &new], 2).map_err(candle)?;
        let flat = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f32>());
        let (got, want) = (flat(&got).map_err(candle)?, flat(&want).map_err(candle)?);
        let same = got
            .iter()
            .zip(&want)
            .all(|(a, b)| a.to_bits() == b.to_bits());
        if !same || got.len() != want.len() {
            let reason = format!(
                "`{}` {dims:?} behind {before} positions: the region holds other values than were appended",
                OpKind::KvAppend
            );
            return Err((DIFFERS.into(), reason));
        }
        Ok(())
    }

    /// The operation once beside the host's kernel, at the workload's shapes.
    fn trial(
        &self,
        id: OpId,
        away: &Working,
        inputs: &[(String, Option<ValueId>)],
        weights: &[NamedWeight],
    ) -> Result<(), (String, String)> {
        let graph = self.session.graph();
        let op = graph.op(id);
        let host = |e: GraphError| ("operation_host".to_string(), e.to_string());
        let table = weights.first().and_then(|w| w.tensor.dims().first());
        let rows = table.copied().unwrap_or(self.most).max(1);
        let mut given: Vec<(ValueId, Tensor)> = Vec::new();
        for v in inputs.iter().filter_map(|(_, v)| *v) {
            let dims = self.sizes.dims(graph, v);
            let at = op.inputs.iter().position(|o| *o == Some(v));
            let whole = counts(graph, id, at.unwrap_or(0));
            let made = made(&dims, v.0, whole.then_some(rows));
            given.push((v, made.map_err(|e| host(e.into_graph(op.kind)))?));
        }
        let piece = self.session.piece(&[id]).map_err(host)?;
        let want = piece.run(&given, &op.outputs).map_err(host)?;
        let held: Vec<Option<Held>> = inputs
            .iter()
            .map(|(_, v)| v.and_then(|v| given.iter().find(|(of, _)| *of == v)))
            .map(|found| found.map(|(_, t)| Held::Host(t.clone())))
            .collect();
        let dims: Vec<Vec<usize>> = want.iter().map(|t| t.dims().to_vec()).collect();
        let (made, _) = away
            .call(&held, &dims)
            .map_err(|failure| (failure.code, failure.message))?;
        for ((mut made, want), dims) in made.into_iter().zip(&want).zip(&dims) {
            let got = made.bring_home().map_err(host)?;
            let error = distance(got, want).map_err(|e| host(e.into_graph(op.kind)))?;
            if error.is_nan() || error > AGREES {
                let reason = format!(
                    "`{}` {dims:?}: relative L2 {error:.3e} from the host's kernel, at most {AGREES:e} is expected",
                    op.kind
                );
                return Err((DIFFERS.into(), reason));
            }
        }
        Ok(())
    }
}

/// Rows of scores that a choice may get wrong: ties, what is no number, what is not finite, at their ends and elsewhere.
fn rows_of_scores(width: usize) -> candle_core::Result<Vec<Vec<f32>>> {
    let (nan, low, high) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    let plain = made(&[width], 1, None)?.to_vec1::<f32>()?;
    let with = |row: &[f32], at: &[(usize, f32)]| {
        let mut row = row.to_vec();
        at.iter().for_each(|(at, v)| row[at % width] = *v);
        row
    };
    let (end, middle, third) = (width - 1, width / 2, width / 3);
    let (no, none) = (vec![nan; width], vec![low; width]);
    Ok(vec![
        plain.clone(),
        with(&plain, &[(0, 9.0)]),
        with(&plain, &[(end, 9.0)]),
        with(&plain, &[(third, 9.0), (middle, 9.0), (end, 9.0)]),
        with(&plain, &[(0, nan), (middle, nan), (end, nan)]),
        with(&plain, &[(third, low), (middle, high), (end, high)]),
        vec![0.5; width],
        with(&vec![0.0; width], &[(0, -0.0), (middle, -0.0)]),
        vec![f32::MIN; width],
        with(&none, &[(middle, f32::MIN), (0, nan)]),
        with(&no, &[(end, -3.0)]),
        with(&no, &[(third, high)]),
        with(&none, &[(middle, high)]),
        none,
        no,
    ])
}

/// A choice beside the host's among rows of scores: the same, to the number.
fn trial_choice(away: &Working, rank: usize, width: usize) -> Result<(), (String, String)> {
    let candle = |e: candle_core::Error| ("operation_host".to_string(), e.to_string());
    let mut dims = vec![1; rank.max(1)];
    dims[rank.max(1) - 1] = width;
    let made = dims[..dims.len() - 1].to_vec();
    for (i, scores) in rows_of_scores(width)
        .map_err(candle)?
        .into_iter()
        .enumerate()
    {
        let want = first_largest(&scores).map_or(-1, |at| at as i64);
        let x = Tensor::from_vec(scores, dims.as_slice(), &Device::Cpu).map_err(candle)?;
        let chosen = away.call(&[Some(Held::Host(x))], std::slice::from_ref(&made));
        let (mut chosen, _) = chosen.map_err(|failure| (failure.code, failure.message))?;
        let got = match chosen.first_mut().map(Held::bring_home) {
            Some(Ok(got)) => got.flatten_all().and_then(|t| t.to_vec1::<i64>()),
            Some(Err(e)) => return Err(("operation_host".into(), e.to_string())),
            None => Ok(Vec::new()),
        };
        let got = got.map_err(candle)?;
        if got != [want] {
            let reason = format!(
                "`{CHOICE}` of {width} scores, row {i} of the trial: chose {got:?}, the host {want}"
            );
            return Err((DIFFERS.into(), reason));
        }
    }
    Ok(())
}

/// An error of candle as the graph's.
trait IntoGraph {
    fn into_graph(self, kind: OpKind) -> GraphError;
}

impl IntoGraph for candle_core::Error {
    fn into_graph(self, kind: OpKind) -> GraphError {
        GraphError::Kernel {
            op: kind.name().into(),
            at: "trial".into(),
            source: Box::new(self),
        }
    }
}

/// Values that differ everywhere; whole numbers below a bound where one is given.
fn made(dims: &[usize], seed: usize, below: Option<usize>) -> candle_core::Result<Tensor> {
    let n: usize = dims.iter().product();
    let mut state = (seed as u32).wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    match below {
        Some(below) => {
            let values: Vec<u32> = (0..n).map(|_| next() % below as u32).collect();
            Tensor::from_vec(values, dims, &Device::Cpu)
        }
        None => {
            let unit = |bits: u32| (bits >> 8) as f32 / (1 << 23) as f32 - 1.0;
            let values: Vec<f32> = (0..n).map(|_| 3.0 * unit(next())).collect();
            Tensor::from_vec(values, dims, &Device::Cpu)
        }
    }
}

/// Relative L2 distance; NaN where either has one.
fn distance(got: &Tensor, want: &Tensor) -> candle_core::Result<f64> {
    let flat = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
    let (got, want) = (flat(got)?, flat(want)?);
    let sum = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let off = sum(&mut got.iter().zip(&want).map(|(g, w)| f64::from(g - w)));
    let all = sum(&mut want.iter().map(|w| f64::from(*w)));
    Ok((off / all.max(f64::MIN_POSITIVE)).sqrt())
}

/// Name of an operand; those beyond the table's, of an operation that takes any number, are counted.
fn operand_name(kind: OpKind, at: usize) -> String {
    let spec = kind.spec();
    match spec.operands.get(at) {
        Some(_) => spec.operand_name(at).into(),
        None => format!("x_{at}"),
    }
}

/// Attributes as they hold: written ones, and the defaults of the others.
fn attributes(graph: &Graph, id: OpId) -> BTreeMap<String, Json> {
    let op = graph.op(id);
    let last = op.inputs.first().copied().flatten();
    let last = last.and_then(|v| match graph.value(v).dims.last() {
        Some(Dim::Size(n)) => Some(*n as f64),
        _ => None,
    });
    let default = |spec: &AttrSpec| match spec.default {
        AttrDefault::Number(n) => Json::from(n),
        AttrDefault::Flag(b) => Json::from(b),
        AttrDefault::Word(w) => Json::from(w),
        AttrDefault::LastDim => last.map_or(Json::Null, Json::from),
        AttrDefault::InvSqrtLastDim => last.map_or(Json::Null, |n| n.powf(-0.5).into()),
        AttrDefault::Required | AttrDefault::Absent => Json::Null,
    };
    let value = |spec: &AttrSpec| match op.attrs.get(spec.name) {
        Some(AttrValue::Absent) => Json::Null,
        Some(written) => serde_json::to_value(written).unwrap_or(Json::Null),
        None => default(spec),
    };
    let specs = op.kind.spec().attrs.iter();
    specs.map(|s| (s.name.to_string(), value(s))).collect()
}

/// A bound operation at its station.
struct Working {
    form: BoundForm,
    station: Arc<Station>,
    /// The operand at which it takes the valid length of regions that lie there.
    length: Option<usize>,
    /// What its outputs are made of.
    made: DType,
    /// It appends to regions.
    appends: bool,
    /// Its calls may be recorded.
    records: bool,
}

impl Elsewhere for Working {
    fn place(&self) -> &Place {
        self.station.place()
    }

    fn copies(&self) -> Copies {
        self.station.device().copies()
    }

    fn call(&self, inputs: &[Option<Held>], outputs: &[Vec<usize>]) -> AwayCall {
        let made = (self.made, outputs);
        self.station.serve(&self.form, self.length, inputs, made)
    }

    fn houses_regions(&self) -> bool {
        self.appends
    }

    fn quarters(&self) -> Option<Box<dyn Quarters>> {
        self.appends
            .then(|| Box::new(Rooms::at(&self.station)) as Box<dyn Quarters>)
    }

    fn reads_housed(&self) -> bool {
        self.length.is_some()
    }

    fn records(&self) -> bool {
        self.records
    }

    fn recorder(&self) -> Box<dyn Recorder> {
        Tape::at(&self.station)
    }

    fn append(
        &self,
        x: &Held,
        region: &Arc<dyn Away>,
    ) -> Result<Option<Arc<dyn Away>>, CallFailure> {
        self.station.append(&self.form, x, region)
    }

    fn is_operation(&self) -> bool {
        true
    }
}

/// What stands for such a seat in host memory: the host's own operation is there.
struct OnlyThere;

impl Executable for OnlyThere {
    fn call(&self, _: &[View<'_>], _: &mut [(Vec<f32>, Vec<usize>)]) -> Result<(), CallFailure> {
        Err(CallFailure {
            code: "rt_device".into(),
            message: "a host operation of a device was called with host memory".into(),
            declined: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use structures_graph::graph::GraphBuilder;

    use super::*;

    #[test]
    fn attributes_are_told_with_their_defaults() {
        let mut b = GraphBuilder::new("test");
        let x = b.input("x", vec![Dim::Symbol("T".into()), Dim::Size(16)]);
        let by = [("by", AttrValue::Float(0.5))];
        let dims = || vec![Dim::Symbol("T".into()), Dim::Size(16)];
        let y = b.op(OpKind::Scale, "", "y", &[Some(x)], &by, dims());
        let z = b.op(OpKind::Scale, "", "z", &[Some(y)], &[], dims());
        let a = b.op(OpKind::Attention, "", "a", &[Some(z)], &[], dims());
        let graph = b.finish();
        let of = |v: ValueId| attributes(&graph, graph.producer(v).unwrap().0);
        assert_eq!(of(y), [("by".to_string(), Json::from(0.5))].into());
        assert_eq!(of(z)["by"], Json::from(1.0));
        assert_eq!(of(a)["scale"], Json::from(0.25));
        assert_eq!(
            (&of(a)["window"], &of(a)["causal"]),
            (&Json::Null, &Json::from(false))
        );
        assert_eq!(operand_name(OpKind::Add, 1), "b");
        assert_eq!(operand_name(OpKind::Concat, 2), "x_2");
    }

    #[test]
    fn whole_numbers_are_counted_as_they_cross() {
        let mut b = GraphBuilder::new("test");
        let ids = b.input(
            "ids",
            vec![Dim::Symbol("B".into()), Dim::Symbol("T".into())],
        );
        let row = vec![
            Dim::Symbol("B".into()),
            Dim::Symbol("T".into()),
            Dim::Size(16),
        ];
        let x = b.op(OpKind::Embedding, "", "x", &[Some(ids)], &[], row);
        let graph = b.finish();
        let sizes = Sizes {
            tokens: 3,
            positions: 9,
        };
        let readers = graph.readers();
        assert_eq!(sizes.bytes(&graph, &readers, ids), 24);
        assert_eq!(sizes.bytes(&graph, &readers, x), 3 * 16 * 4);
        assert_eq!(sizes.of(&Dim::Symbol("S".into())), 9);
    }

    #[test]
    fn the_trial_of_a_choice_tells_apart_who_chooses_otherwise() {
        let largest = |row: &[f32], better: &dyn Fn(f32, f32) -> bool, finite: bool| {
            let mut best = None;
            for (at, v) in row.iter().enumerate() {
                if best.is_none_or(|best: usize| better(*v, row[best])) {
                    best = Some(at);
                }
            }
            best.filter(|_| !finite || row.iter().any(|v| v.is_finite()))
        };
        let numbers = |row: &[f32], better: &dyn Fn(f32, f32) -> bool, finite: bool| {
            let without: Vec<f32> = row
                .iter()
                .map(|v| if v.is_nan() { f32::NEG_INFINITY } else { *v })
                .collect();
            largest(&without, better, finite)
        };
        let more = |a: f32, b: f32| a > b;
        type Chooses<'c> = &'c dyn Fn(&[f32]) -> Option<usize>;
        let wrong: [Chooses<'_>; 7] = [
            // The last of equals; a negative zero below the other; what is no number, in front of all or for good.
            &|row| numbers(row, &|a, b| a >= b, true),
            &|row| numbers(row, &|a, b| a.total_cmp(&b).is_gt(), true),
            &|row| largest(row, &|a, b| a.total_cmp(&b).is_gt(), true),
            &|row| largest(row, &more, true),
            // Whatever is finite or not.
            &|row| numbers(row, &more, false),
            // Not the last score, and not the infinite ones.
            &|row| numbers(&row[..row.len() - 1], &more, true),
            &|row| {
                let row: Vec<f32> = row
                    .iter()
                    .map(|v| if *v > 1e38 { 0.0 } else { *v })
                    .collect();
                numbers(&row, &more, true)
            },
        ];
        for width in [3, 4, 31, 264] {
            let rows = rows_of_scores(width).unwrap();
            for row in &rows {
                assert_eq!(numbers(row, &more, true), first_largest(row), "{row:?}");
            }
            for (i, choose) in wrong.iter().enumerate() {
                let same = rows.iter().all(|row| choose(row) == first_largest(row));
                assert!(!same, "{i} of {width}");
            }
        }
        assert!(rows_of_scores(1).unwrap().iter().all(|row| row.len() == 1));
    }

    #[test]
    fn a_distance_sees_what_differs_and_what_is_no_number() {
        let t = |v: &[f32]| Tensor::new(v, &Device::Cpu).unwrap();
        assert_eq!(distance(&t(&[1.0, 2.0]), &t(&[1.0, 2.0])).unwrap(), 0.0);
        assert!(distance(&t(&[1.0, 2.1]), &t(&[1.0, 2.0])).unwrap() > AGREES);
        assert!(distance(&t(&[1.0, f32::NAN]), &t(&[1.0, 2.0]))
            .unwrap()
            .is_nan());
    }
}
