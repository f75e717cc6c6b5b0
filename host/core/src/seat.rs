//! A seat: the place in the host graph where a bound form sits, with its guard and its ledger.
//!
//! Every call is admitted by the contract or handed back to the host's own operations, which the session keeps.
//! Admission order: dtype, width, rows (exact or capacity), thread. A call outside the form's declared band is a
//! planned dispatch, not a fallback. An error or a panic of the form gives the seat up at once; so do 32 contract
//! misses in a row.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use structures_graph::place::{Away, AwayOutcome, Held, Place, Quarters, Recorder, Unserved};
use structures_graph::session::{Frozen, SpanOutcome, SpanRunner, ViewMut};
use structures_graph::{Dim, GraphError};
use structures_loader::Copies;

use crate::ledger::{Counts, Ledger};
use crate::station::DEVICE_LOST;

/// Contract misses in a row after which a seat gives itself up.
pub const CONSECUTIVE_FALLBACKS: u64 = 32;

/// What a bound form is to a seat.
pub trait Executable: Send + Sync {
    /// Fills the outputs; inputs are contiguous f32 with their dims, absent ones `None`. An output may be longer than
    /// its dims say: what lies behind is a guard, and no part of it.
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure>;

    /// The same into the caller's memory, for captured steps. What is bound through a plugin allocates nothing here.
    fn call_into(
        &self,
        inputs: &[View<'_>],
        outputs: &mut [ViewMut<'_>],
    ) -> Result<(), CallFailure> {
        let blank = |(data, dims): &ViewMut<'_>| (vec![0.0; data.len()], dims.to_vec());
        let mut made: Vec<_> = outputs.iter().map(blank).collect();
        self.call(inputs, &mut made)?;
        for ((out, _), (data, _)) in outputs.iter_mut().zip(&made) {
            out.copy_from_slice(data);
        }
        Ok(())
    }

    /// Whether the host's own operations answer what the form answers. A form that speaks a dtype of its own to a
    /// partner has no such equivalent: what it does not serve is refused, whatever the mode.
    fn has_host_path(&self) -> bool {
        true
    }
}

/// Outputs of a call at a place, and inputs that had to be brought there, by position; or why there are none.
pub type AwayCall = Result<(Vec<Held>, Vec<(usize, Arc<dyn Away>)>), CallFailure>;

/// A bound form that runs at a place of its own, as a seat sees it there.
pub trait Elsewhere: Send + Sync {
    /// Where.
    fn place(&self) -> &Place;

    /// Copies between host memory and the place so far, whoever made them.
    fn copies(&self) -> Copies;

    /// Fills outputs of these dims there; with the inputs that had to be brought there, by position.
    fn call(&self, inputs: &[Option<Held>], outputs: &[Vec<usize>]) -> AwayCall;

    /// Whether this is what appends to regions there.
    fn houses_regions(&self) -> bool {
        false
    }

    /// Memory there for the regions of a state, where this is what appends to them.
    fn quarters(&self) -> Option<Box<dyn Quarters>> {
        None
    }

    /// Whether it reads a region that has its home there.
    fn reads_housed(&self) -> bool {
        false
    }

    /// Appends to a region that has its home there; with what of the input had to be brought.
    ///
    /// # Errors
    /// As [`Elsewhere::call`].
    fn append(
        &self,
        x: &Held,
        region: &Arc<dyn Away>,
    ) -> Result<Option<Arc<dyn Away>>, CallFailure> {
        let _ = (x, region);
        Err(CallFailure {
            code: "rt_device".into(),
            message: "it appends to no region".into(),
            declined: true,
        })
    }

    /// Whether its calls may be recorded there.
    fn records(&self) -> bool {
        false
    }

    /// What a captured step keeps there.
    fn recorder(&self) -> Box<dyn Recorder>;

    /// Whether it is one of the host's own operations: its first operand has whatever width and type the graph says,
    /// and in a captured step whose values are in host memory the host runs it.
    fn is_operation(&self) -> bool {
        false
    }
}

/// Why a form did not serve an admitted call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFailure {
    /// Code.
    pub code: String,
    /// For people.
    pub message: String,
    /// The form declined this call and is still sound (a contract miss it found itself); else it is poisoned.
    pub declined: bool,
}

/// What happens when a call misses the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnGuardFail {
    /// The host serves it, counted.
    Fallback,
    /// The run ends with an error.
    Raise,
}

/// How many rows a bound form serves: one of the two, never both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// Any number up to this one.
    Capacity(usize),
    /// This number and no other: a form that serves one shape.
    Exact(usize),
}

/// What a seat admits.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Last dim of the first input.
    pub width: usize,
    /// Rows.
    pub rows: Rows,
    /// The form's declared rows `[lo, hi]`; calls outside go to the host as planned.
    pub band: Option<(usize, usize)>,
    /// Calls may come from several threads.
    pub concurrent: bool,
    /// Inputs may have any strides.
    pub strided: bool,
}

/// One seat in a report.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SeatReport {
    /// Receipt key.
    pub site: String,
    /// Calls, fallbacks, the last reason, whether it gave itself up.
    #[serde(flatten)]
    pub counts: Counts,
    /// What it admits.
    pub form: FormContract,
}

/// The contract of a bound form.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FormContract {
    /// dtype of inputs and outputs.
    pub dtype: &'static str,
    /// Where inputs and outputs lie.
    pub device: String,
    /// Last dim of the first input.
    pub width: usize,
    /// Rows.
    pub rows: Rows,
    /// Declared rows; calls outside are dispatched to the host as planned.
    pub band: Option<(usize, usize)>,
    /// Calls may come from several threads.
    pub concurrent: bool,
    /// What a miss does.
    pub on_guard_fail: OnGuardFail,
}

/// See the module.
pub struct Seat {
    /// Receipt key (`model.layers.0.mlp`).
    pub key: String,
    /// Counts.
    pub ledger: Ledger,
    form: Box<dyn Executable>,
    admission: Admission,
    mode: OnGuardFail,
    input_dims: Vec<Option<Vec<Dim>>>,
    output_dims: Vec<Vec<Dim>>,
    away: Option<Arc<dyn Elsewhere>>,
    thread: OnceLock<ThreadId>,
    warned: Mutex<HashSet<&'static str>>,
    /// The host's weights of this place were let go for good.
    alone: AtomicBool,
}

impl Seat {
    /// A seat for a bound form. Dims are those of the host values, in span order.
    pub fn new(
        key: String,
        form: Box<dyn Executable>,
        admission: Admission,
        mode: OnGuardFail,
        input_dims: Vec<Option<Vec<Dim>>>,
        output_dims: Vec<Vec<Dim>>,
    ) -> Arc<Self> {
        Self::at(None, key, form, admission, mode, input_dims, output_dims)
    }

    /// The same for a form that runs at a place of its own, where there is one.
    pub fn at(
        away: Option<Arc<dyn Elsewhere>>,
        key: String,
        form: Box<dyn Executable>,
        admission: Admission,
        mode: OnGuardFail,
        input_dims: Vec<Option<Vec<Dim>>>,
        output_dims: Vec<Vec<Dim>>,
    ) -> Arc<Self> {
        Arc::new(Seat {
            key,
            ledger: Ledger::default(),
            form,
            admission,
            mode,
            input_dims,
            output_dims,
            away,
            thread: OnceLock::new(),
            warned: Mutex::default(),
            alone: AtomicBool::new(false),
        })
    }

    /// Its place, when that is not host memory, and the copies made between the two so far.
    pub(crate) fn copies(&self) -> Option<(&Place, Copies)> {
        self.away.as_ref().map(|away| (away.place(), away.copies()))
    }

    /// What the seat did, and under which contract.
    pub fn report(&self) -> SeatReport {
        SeatReport {
            site: self.key.clone(),
            counts: self.ledger.counts(),
            form: FormContract {
                dtype: "f32",
                device: self
                    .away
                    .as_ref()
                    .map_or("cpu", |a| a.place().name())
                    .into(),
                width: self.admission.width,
                rows: self.admission.rows,
                band: self.admission.band,
                concurrent: self.admission.concurrent,
                on_guard_fail: self.mode,
            },
        }
    }

    /// Number of rows of a call, or the code and reason why the form must not see it. The order is part of the
    /// contract: dtype, width, device, exact rows, capacity, thread.
    pub(crate) fn admit(&self, inputs: &[Option<Tensor>]) -> Result<usize, (&'static str, String)> {
        let first = inputs.iter().flatten().next().map(Tensor::dims);
        let width = self.admit_values(first, inputs.iter().flatten())?;
        if let Some(t) = inputs.iter().flatten().find(|t| !t.device().is_cpu()) {
            let reason = format!("expected host memory, found {:?}", t.device().location());
            return Err(("rt_device", reason));
        }
        let rows = self.admit_rows(first, width)?;
        if !self.out_of_band(rows) {
            self.admit_thread()?;
        }
        Ok(rows)
    }

    /// The same for a call at the seat's place: whatever lies in host memory is brought there.
    fn admit_held(&self, inputs: &[Option<Held>]) -> Result<usize, (&'static str, String)> {
        let first = inputs.iter().flatten().next().map(Held::dims);
        let width = match self.is_operation() {
            true => self.admission.width,
            false => self.admit_values(first, inputs.iter().flatten().filter_map(Held::host))?,
        };
        let rows = self.admit_rows(first, width)?;
        if !self.out_of_band(rows) {
            self.admit_thread()?;
        }
        Ok(rows)
    }

    /// Number of rows of a call whose first input has these dims.
    pub(crate) fn admit_sizes(
        &self,
        first: Option<&[usize]>,
    ) -> Result<usize, (&'static str, String)> {
        let width = self.admit_values(first, std::iter::empty())?;
        self.admit_rows(first, width)
    }

    fn admit_values<'t>(
        &self,
        first: Option<&[usize]>,
        mut values: impl Iterator<Item = &'t Tensor>,
    ) -> Result<usize, (&'static str, String)> {
        let Some(first) = first else {
            let reason = "the span was called without any input".to_string();
            return Err(("rt_width", reason));
        };
        if let Some(t) = values.find(|t| t.dtype() != DType::F32) {
            return Err(("rt_dtype", format!("expected f32, found {:?}", t.dtype())));
        }
        let width = first.last().copied().unwrap_or(0);
        if width != self.admission.width {
            let reason = format!("expected {}, found {width}", self.admission.width);
            return Err(("rt_width", reason));
        }
        Ok(width)
    }

    fn admit_rows(
        &self,
        first: Option<&[usize]>,
        width: usize,
    ) -> Result<usize, (&'static str, String)> {
        let elements: usize = first.map_or(0, |dims| dims.iter().product());
        let rows = elements / width.max(1);
        if self.out_of_band(rows) {
            return Ok(rows);
        }
        match self.admission.rows {
            Rows::Exact(exact) if rows != exact => {
                let reason = format!("expected exactly {exact} rows, found {rows}");
                Err(("rt_rows", reason))
            }
            Rows::Capacity(most) if rows > most => {
                let reason = format!("bound for at most {most} rows, found {rows}");
                Err(("rt_row_capacity", reason))
            }
            _ => Ok(rows),
        }
    }

    fn is_operation(&self) -> bool {
        self.away.as_ref().is_some_and(|away| away.is_operation())
    }

    fn guard(&self, reason: String) -> GraphError {
        GraphError::Guard {
            name: self.key.clone(),
            reason,
        }
    }

    /// Whether the calling thread may use the form.
    pub(crate) fn admit_thread(&self) -> Result<(), (&'static str, String)> {
        let me = std::thread::current().id();
        if !self.admission.concurrent && *self.thread.get_or_init(|| me) != me {
            return Err((
                "rt_second_thread",
                "the form keeps buffers of its own and belongs to the first thread".into(),
            ));
        }
        Ok(())
    }

    /// What a contract miss does here: where the host cannot answer any more, nothing falls back.
    pub(crate) fn mode(&self) -> OnGuardFail {
        match self.is_alone() {
            true => OnGuardFail::Raise,
            false => self.mode,
        }
    }

    fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed)
    }

    /// Dims of the span's inputs and outputs in the host's graph.
    pub(crate) fn dims(&self) -> (&[Option<Vec<Dim>>], &[Vec<Dim>]) {
        (&self.input_dims, &self.output_dims)
    }

    pub(crate) fn out_of_band(&self, rows: usize) -> bool {
        self.admission
            .band
            .is_some_and(|(lo, hi)| rows < lo || rows > hi)
    }

    /// The end of a run whose call nobody may serve, if that is so here: strict mode, or no host path.
    fn refusal(&self, text: &str) -> Option<GraphError> {
        let reason = match (self.form.has_host_path(), self.mode) {
            _ if self.is_alone() => {
                format!("rt_no_host_path: {text}; the host's weights here were released for good")
            }
            (true, OnGuardFail::Fallback) => return None,
            (true, OnGuardFail::Raise) => text.to_string(),
            (false, _) => format!("rt_no_host_path: {text}; the host has no equivalent"),
        };
        self.ledger.refused(&reason);
        let name = self.key.clone();
        Some(GraphError::Span { name, reason })
    }

    /// A call outside the declared rows: the host's as planned, if there is one.
    fn dispatch(&self, rows: usize) -> Result<SpanOutcome, GraphError> {
        if self.is_alone() {
            return self.miss(
                "rt_rows",
                &format!("{rows} rows are outside the form's band"),
            );
        }
        self.ledger.dispatched();
        Ok(SpanOutcome::Host)
    }

    /// A call after the seat gave itself up.
    fn handed_over(&self) -> Result<SpanOutcome, GraphError> {
        let refused = self
            .is_alone()
            .then(|| self.refusal("the form gave itself up"));
        refused.flatten().map_or(Ok(SpanOutcome::Host), Err)
    }

    fn miss(&self, code: &'static str, reason: &str) -> Result<SpanOutcome, GraphError> {
        let text = format!("{code}: {reason}");
        if let Some(refused) = self.refusal(&text) {
            return Err(refused);
        }
        let run = self.ledger.fell_back(&text);
        self.warn_once(code, &text);
        if run >= CONSECUTIVE_FALLBACKS {
            self.ledger.detach();
            tracing::warn!(
                seat = %self.key,
                "{CONSECUTIVE_FALLBACKS} calls in a row missed the contract ({text}); the host runs here from now on"
            );
        }
        Ok(SpanOutcome::Host)
    }

    fn warn_once(&self, code: &'static str, text: &str) {
        let mut warned = self.warned.lock().unwrap_or_else(|e| e.into_inner());
        if warned.insert(code) {
            tracing::warn!(seat = %self.key, "fell back to the host ({text}); further ones are only counted");
        }
    }

    fn fail(&self, failure: CallFailure) -> Result<SpanOutcome, GraphError> {
        let text = format!("{}: {}", failure.code, failure.message);
        if failure.declined {
            return self.miss("rt_declined", &text);
        }
        self.ledger.detach();
        if let Some(refused) = self.refusal(&text) {
            return Err(refused);
        }
        self.ledger.fell_back(&text);
        tracing::warn!(seat = %self.key, "the form failed ({text}); the host runs here from now on");
        Ok(SpanOutcome::Host)
    }

    fn output_shapes(&self, inputs: &[Option<Tensor>]) -> Result<Vec<Vec<usize>>, GraphError> {
        let mut symbols = HashMap::new();
        learn(&mut symbols, &self.input_dims, inputs);
        sizes(&self.key, &symbols, &self.output_dims)
    }

    fn serve_at(
        &self,
        away: &dyn Elsewhere,
        inputs: &[Option<Held>],
    ) -> Result<AwayOutcome, GraphError> {
        let mut symbols = HashMap::new();
        for (dims, held) in self.input_dims.iter().zip(inputs) {
            if let (Some(dims), Some(held)) = (dims, held) {
                learn_dims(&mut symbols, dims, held.dims());
            }
        }
        let dims = sizes(&self.key, &symbols, &self.output_dims)?;
        self.served_at(away, away.call(inputs, &dims))
    }

    fn served_at(&self, away: &dyn Elsewhere, called: AwayCall) -> Result<AwayOutcome, GraphError> {
        match called {
            Ok((outputs, brought)) => {
                self.ledger.served();
                Ok(AwayOutcome::Done { outputs, brought })
            }
            // What other seats left there is gone as well: the run begins anew, and asks every seat of the place.
            Err(lost) if lost.code == DEVICE_LOST => Err(GraphError::PlaceLost {
                place: away.place().name().into(),
                reason: lost.message,
            }),
            Err(failure) => {
                self.fail(failure)?;
                Ok(AwayOutcome::Host)
            }
        }
    }

    fn serve(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        let kernel = |source: candle_core::Error| GraphError::Kernel {
            op: "seat".into(),
            at: self.key.clone(),
            source: Box::new(source),
        };
        let mut outputs: Vec<(Vec<f32>, Vec<usize>)> = self
            .output_shapes(inputs)?
            .into_iter()
            .map(|dims| (vec![0.0; dims.iter().product()], dims))
            .collect();
        let called = with_views(inputs, |views| self.form.call(views, &mut outputs));
        match called.map_err(kernel)? {
            Ok(()) => {
                self.ledger.served();
                outputs
                    .into_iter()
                    .map(|(data, dims)| Tensor::from_vec(data, dims, &Device::Cpu))
                    .collect::<Result<Vec<_>, _>>()
                    .map(SpanOutcome::Done)
                    .map_err(kernel)
            }
            Err(failure) => self.fail(failure),
        }
    }
}

/// Sizes of the symbols that inputs show.
pub(crate) fn learn<'d>(
    symbols: &mut HashMap<&'d str, usize>,
    dims: &'d [Option<Vec<Dim>>],
    inputs: &[Option<Tensor>],
) {
    for (dims, tensor) in dims.iter().zip(inputs) {
        if let (Some(dims), Some(tensor)) = (dims, tensor) {
            learn_dims(symbols, dims, tensor.dims());
        }
    }
}

pub(crate) fn learn_dims<'d>(
    symbols: &mut HashMap<&'d str, usize>,
    dims: &'d [Dim],
    sizes: &[usize],
) {
    for (d, size) in dims.iter().zip(sizes) {
        if let Dim::Symbol(s) = d {
            symbols.insert(s, *size);
        }
    }
}

/// Sizes of values whose symbols are known.
pub(crate) fn sizes(
    key: &str,
    symbols: &HashMap<&str, usize>,
    values: &[Vec<Dim>],
) -> Result<Vec<Vec<usize>>, GraphError> {
    let unknown = |s: &str| GraphError::Span {
        name: key.into(),
        reason: format!("no input tells the size of output dim `{s}`"),
    };
    values
        .iter()
        .map(|dims| {
            dims.iter()
                .map(|d| match d {
                    Dim::Size(n) => Ok(*n),
                    Dim::Symbol(s) => symbols.get(s.as_str()).copied().ok_or_else(|| unknown(s)),
                })
                .collect()
        })
        .collect()
}

/// One input as a form reads it: contiguous values and dims.
pub(crate) type View<'a> = Option<(&'a [f32], &'a [usize])>;

/// Shows tensors as contiguous f32. The outer error is the host's.
pub(crate) fn with_views<R>(
    inputs: &[Option<Tensor>],
    call: impl FnOnce(&[View<'_>]) -> Result<R, CallFailure>,
) -> candle_core::Result<Result<R, CallFailure>> {
    let contiguous: Vec<Option<Tensor>> = inputs
        .iter()
        .map(|t| t.as_ref().map(Tensor::contiguous).transpose())
        .collect::<Result<_, _>>()?;
    let guards: Vec<_> = contiguous
        .iter()
        .map(|t| t.as_ref().map(Tensor::storage_and_layout))
        .collect();
    // An input that is there but cannot be read must never reach the form as an absent one.
    let views: Result<Vec<_>, CallFailure> = guards
        .iter()
        .map(|g| {
            let Some((storage, layout)) = g else {
                return Ok(None);
            };
            match (&**storage, layout.contiguous_offsets()) {
                (Storage::Cpu(CpuStorage::F32(data)), Some((from, to))) => {
                    Ok(Some((&data[from..to], layout.dims())))
                }
                _ => Err(CallFailure {
                    code: "rt_device".into(),
                    message: "an input is not contiguous f32 in host memory".into(),
                    declined: true,
                }),
            }
        })
        .collect();
    Ok(views.and_then(|views| call(&views)))
}

impl SpanRunner for Seat {
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        if self.ledger.is_detached() {
            return self.handed_over();
        }
        match self.admit(inputs) {
            Ok(rows) if self.out_of_band(rows) => self.dispatch(rows),
            Ok(_) => self.serve(inputs),
            Err((code, reason)) => self.miss(code, &reason),
        }
    }

    fn place(&self) -> Option<&Place> {
        self.away.as_ref().map(|away| away.place())
    }

    fn run_at(&self, inputs: &[Option<Held>]) -> Result<AwayOutcome, GraphError> {
        let Some(away) = self.away.as_ref().filter(|_| !self.ledger.is_detached()) else {
            self.handed_over()?;
            return Ok(AwayOutcome::Host);
        };
        match self.admit_held(inputs) {
            Ok(rows) if self.out_of_band(rows) => {
                self.dispatch(rows)?;
                Ok(AwayOutcome::Host)
            }
            Ok(_) => self.serve_at(&**away, inputs),
            Err((code, reason)) => {
                self.miss(code, &reason)?;
                Ok(AwayOutcome::Host)
            }
        }
    }

    fn houses_regions(&self) -> bool {
        let away = self.away.as_ref().filter(|_| !self.ledger.is_detached());
        away.is_some_and(|away| away.houses_regions())
    }

    fn quarters(&self) -> Option<Box<dyn Quarters>> {
        let away = self.away.as_ref().filter(|_| !self.ledger.is_detached());
        away.and_then(|away| away.quarters())
    }

    fn reads_housed(&self) -> bool {
        self.away.as_ref().is_some_and(|away| away.reads_housed())
    }

    fn append_at(&self, x: &Held, region: &Arc<dyn Away>) -> Result<AwayOutcome, GraphError> {
        let Some(away) = self.away.as_ref().filter(|_| !self.ledger.is_detached()) else {
            self.handed_over()?;
            return Ok(AwayOutcome::Host);
        };
        if let Err((code, reason)) = self.admit_held(&[Some(x.clone())]) {
            self.miss(code, &reason)?;
            return Ok(AwayOutcome::Host);
        }
        let appended = away.append(x, region);
        let brought =
            |made: Option<Arc<dyn Away>>| made.map(|away| (0, away)).into_iter().collect();
        self.served_at(&**away, appended.map(|made| (Vec::new(), brought(made))))
    }

    fn not_housed(&self, why: &GraphError) -> Result<(), GraphError> {
        self.miss("rt_region", &why.to_string()).map(|_| ())
    }

    fn place_lost(&self, reason: &str) -> Result<(), GraphError> {
        if self.ledger.is_detached() {
            return Ok(());
        }
        let lost = CallFailure {
            code: DEVICE_LOST.into(),
            message: reason.into(),
            declined: false,
        };
        self.fail(lost).map(|_| ())
    }

    /// The contract is checked here, once: in a captured step sizes do not move.
    fn freeze(&self, inputs: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        if self.ledger.is_detached() || self.is_operation() {
            return Ok(Frozen::Host);
        }
        match self.admit_sizes(inputs.iter().flatten().next().copied()) {
            Ok(rows) if self.out_of_band(rows) => Ok(Frozen::Host),
            // On a device it takes tensors and gives tensors, between two copies.
            Ok(_) if self.away.is_some() => Ok(Frozen::Tensors),
            Ok(_) => Ok(Frozen::Served { allocates: false }),
            Err((code, reason)) => Err(self.guard(format!("{code}: {reason}"))),
        }
    }

    fn stays(&self, inputs: &[Option<&[usize]>]) -> Result<bool, GraphError> {
        if self.ledger.is_detached() || self.away.is_none() {
            return Ok(false);
        }
        let first = inputs.iter().flatten().next().copied();
        let rows = match self.is_operation() {
            true => self.admit_rows(first, self.admission.width),
            false => self.admit_sizes(first),
        };
        match rows {
            Ok(rows) => Ok(!self.out_of_band(rows)),
            Err((code, reason)) => Err(self.guard(format!("{code}: {reason}"))),
        }
    }

    fn records(&self) -> bool {
        self.away.as_ref().is_some_and(|away| away.records())
    }

    fn recorder(&self) -> Option<Box<dyn Recorder>> {
        self.away.as_ref().map(|away| away.recorder())
    }

    fn replay_at(
        &self,
        inputs: &[Option<Held>],
        region: Option<&Arc<dyn Away>>,
    ) -> Result<Vec<Held>, Unserved> {
        let unserved = |code: &str, message: String, declined| Unserved {
            code: code.into(),
            message,
            declined,
        };
        let Some(away) = self.away.as_ref().filter(|_| !self.ledger.is_detached()) else {
            let text = "the seat gave itself up after the step was captured";
            return Err(unserved("rt_detached", text.into(), true));
        };
        if let Err((code, reason)) = self.admit_thread() {
            return Err(unserved(code, reason, true));
        }
        let made = match (region, inputs.first()) {
            (Some(region), Some(Some(x))) => away.append(x, region).map(|_| Vec::new()),
            (Some(_), _) => return Err(unserved("rt_width", "nothing is appended".into(), true)),
            (None, _) => {
                let mut symbols = HashMap::new();
                for (dims, held) in self.input_dims.iter().zip(inputs) {
                    if let (Some(dims), Some(held)) = (dims, held) {
                        learn_dims(&mut symbols, dims, held.dims());
                    }
                }
                let dims = sizes(&self.key, &symbols, &self.output_dims);
                let dims = dims.map_err(|e| unserved("argument", e.to_string(), false))?;
                away.call(inputs, &dims).map(|(outputs, _)| outputs)
            }
        };
        made.map_err(|failure| Unserved {
            code: failure.code,
            message: failure.message,
            declined: failure.declined,
        })
    }

    fn unserved(&self, why: Unserved) -> Result<(), GraphError> {
        if self.ledger.is_detached() {
            return Ok(());
        }
        let failure = CallFailure {
            code: why.code,
            message: why.message,
            declined: why.declined,
        };
        self.fail(failure).map(|_| ())
    }

    fn reads_regions(&self) -> bool {
        self.admission.strided
    }

    fn replay(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), GraphError> {
        if self.ledger.is_detached() {
            return Err(self.guard("the seat gave itself up after the step was captured".into()));
        }
        if let Err((code, reason)) = self.admit_thread() {
            self.miss(code, &reason)?;
            return Err(self.guard(format!("{code}: {reason}")));
        }
        self.form.call_into(inputs, outputs).or_else(|failure| {
            let reason = format!("{}: {}", failure.code, failure.message);
            // Counted as an eager call would be; in strict mode the run ends here.
            self.fail(failure)?;
            Err(self.guard(reason))
        })
    }

    fn replayed(&self, planned: Frozen) {
        match planned {
            Frozen::Served { .. } | Frozen::There => self.ledger.served(),
            Frozen::Host if !self.ledger.is_detached() => self.ledger.dispatched(),
            _ => {}
        }
    }

    fn host_serves(&self, rows: usize) -> bool {
        let planned = self
            .admission
            .band
            .is_some_and(|(lo, hi)| lo > 1 || hi < rows);
        planned || self.ledger.is_detached()
    }

    fn host_gone(&self) {
        self.alone.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Double {
        fail_at: Option<u64>,
        calls: Mutex<u64>,
    }

    impl Executable for Double {
        fn call(
            &self,
            inputs: &[Option<(&[f32], &[usize])>],
            outputs: &mut [(Vec<f32>, Vec<usize>)],
        ) -> Result<(), CallFailure> {
            let mut calls = self.calls.lock().unwrap();
            *calls += 1;
            if Some(*calls) == self.fail_at {
                return Err(CallFailure {
                    code: "failed".into(),
                    message: "planted".into(),
                    declined: false,
                });
            }
            let (x, _) = inputs[0].unwrap();
            for (o, i) in outputs[0].0.iter_mut().zip(x) {
                *o = 2.0 * i;
            }
            Ok(())
        }
    }

    fn seat(band: Option<(usize, usize)>, mode: OnGuardFail, fail_at: Option<u64>) -> Arc<Seat> {
        let dims = vec![
            Dim::Symbol("B".into()),
            Dim::Symbol("T".into()),
            Dim::Size(4),
        ];
        Seat::new(
            "a.b".into(),
            Box::new(Double {
                fail_at,
                calls: Mutex::new(0),
            }),
            Admission {
                width: 4,
                rows: Rows::Capacity(8),
                band,
                concurrent: false,
                strided: false,
            },
            mode,
            vec![Some(dims.clone())],
            vec![dims],
        )
    }

    fn x(rows: usize, width: usize) -> Vec<Option<Tensor>> {
        vec![Some(
            Tensor::ones((1, rows, width), DType::F32, &Device::Cpu).unwrap(),
        )]
    }

    /// A place that takes everything and gives nothing.
    struct There(Place, bool);

    impl Elsewhere for There {
        fn place(&self) -> &Place {
            &self.0
        }

        fn copies(&self) -> Copies {
            Copies::default()
        }

        fn call(&self, _: &[Option<Held>], _: &[Vec<usize>]) -> AwayCall {
            Ok((Vec::new(), Vec::new()))
        }

        fn is_operation(&self) -> bool {
            self.1
        }

        fn recorder(&self) -> Box<dyn Recorder> {
            panic!("nothing is captured here")
        }
    }

    #[test]
    fn an_operation_takes_whole_numbers_and_is_the_hosts_in_a_captured_step() {
        let at = |operation: bool| {
            let away = Arc::new(There(Place::new("gpu:1"), operation));
            let form = Double {
                fail_at: None,
                calls: Mutex::new(0),
            };
            let admission = Admission {
                width: 1,
                rows: Rows::Capacity(8),
                band: None,
                concurrent: false,
                strided: false,
            };
            let (form, mode) = (Box::new(form), OnGuardFail::Fallback);
            Seat::at(
                Some(away),
                "a.b".into(),
                form,
                admission,
                mode,
                vec![None],
                vec![],
            )
        };
        let ids = |n: usize| {
            let ids = Tensor::zeros((1, n), DType::U32, &Device::Cpu).unwrap();
            [Some(Held::Host(ids))]
        };
        let (form, operation) = (at(false), at(true));
        let ran = |outcome| matches!(outcome, AwayOutcome::Done { .. });
        assert!(ran(operation.run_at(&ids(8)).unwrap()));
        assert!(!ran(operation.run_at(&ids(9)).unwrap()));
        assert!(!ran(form.run_at(&ids(8)).unwrap()));
        let counts = operation.ledger.counts();
        assert_eq!((counts.form_calls, counts.fallbacks), (1, 1));
        let sizes = [Some(&[1, 1][..])];
        assert_eq!(operation.freeze(&sizes).unwrap(), Frozen::Host);
        assert_eq!(form.freeze(&sizes).unwrap(), Frozen::Tensors);
    }

    #[test]
    fn b_273_an_admitted_call_runs_the_form() {
        let s = seat(None, OnGuardFail::Fallback, None);
        let SpanOutcome::Done(out) = s.run(&x(3, 4)).unwrap() else {
            panic!("host ran")
        };
        assert_eq!(out[0].dims(), [1, 3, 4]);
        assert_eq!(
            out[0].flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            vec![2.0; 12]
        );
        assert_eq!(s.ledger.counts().form_calls, 1);
    }

    #[test]
    fn b_274_misses_fall_back_and_are_counted_with_their_code() {
        let s = seat(None, OnGuardFail::Fallback, None);
        assert!(matches!(s.run(&x(9, 4)).unwrap(), SpanOutcome::Host));
        assert!(s
            .ledger
            .counts()
            .last_reason
            .unwrap()
            .starts_with("rt_row_capacity"));
        assert!(matches!(s.run(&x(1, 5)).unwrap(), SpanOutcome::Host));
        assert!(s
            .ledger
            .counts()
            .last_reason
            .unwrap()
            .starts_with("rt_width"));
        assert_eq!(s.ledger.counts().fallbacks, 2);
    }

    #[test]
    fn b_291_out_of_band_is_a_dispatch_and_no_fallback() {
        let s = seat(Some((1, 2)), OnGuardFail::Fallback, None);
        assert!(matches!(s.run(&x(3, 4)).unwrap(), SpanOutcome::Host));
        let c = s.ledger.counts();
        assert_eq!((c.band_dispatches, c.fallbacks), (1, 0));
    }

    #[test]
    fn b_276_raise_mode_is_an_error_and_not_a_fallback() {
        let s = seat(None, OnGuardFail::Raise, None);
        assert!(s.run(&x(9, 4)).is_err());
        let c = s.ledger.counts();
        assert_eq!((c.calls, c.fallbacks), (1, 0));
        assert!(c.last_reason.is_some());
    }

    #[test]
    fn a_failing_form_is_given_up_at_once() {
        let s = seat(None, OnGuardFail::Fallback, Some(2));
        assert!(matches!(s.run(&x(1, 4)).unwrap(), SpanOutcome::Done(_)));
        assert!(matches!(s.run(&x(1, 4)).unwrap(), SpanOutcome::Host));
        assert!(matches!(s.run(&x(1, 4)).unwrap(), SpanOutcome::Host));
        let c = s.ledger.counts();
        assert!(c.detached);
        assert_eq!(
            (c.calls, c.form_calls, c.fallbacks),
            (2, 1, 1),
            "later calls do not touch it"
        );
    }

    #[test]
    fn b_278_thirty_two_misses_in_a_row_restore_the_host() {
        let s = seat(None, OnGuardFail::Fallback, None);
        for _ in 0..31 {
            s.run(&x(9, 4)).unwrap();
        }
        s.run(&x(1, 4)).unwrap();
        for _ in 0..31 {
            s.run(&x(9, 4)).unwrap();
        }
        assert!(!s.ledger.is_detached(), "an admitted call resets the run");
        s.run(&x(9, 4)).unwrap();
        assert!(s.ledger.is_detached());
    }

    #[test]
    fn b_282_a_second_thread_gets_the_host() {
        let s = seat(None, OnGuardFail::Fallback, None);
        s.run(&x(1, 4)).unwrap();
        let other = s.clone();
        std::thread::spawn(move || {
            assert!(matches!(other.run(&x(1, 4)).unwrap(), SpanOutcome::Host));
        })
        .join()
        .unwrap();
        assert!(matches!(s.run(&x(1, 4)).unwrap(), SpanOutcome::Done(_)));
        assert!(s
            .ledger
            .counts()
            .last_reason
            .unwrap()
            .starts_with("rt_second_thread"));
    }

    fn seat_of(admission: Admission) -> Arc<Seat> {
        let dims = vec![
            Dim::Symbol("B".into()),
            Dim::Symbol("T".into()),
            Dim::Size(4),
        ];
        let form = Double {
            fail_at: None,
            calls: Mutex::new(0),
        };
        let mode = OnGuardFail::Fallback;
        let given = vec![Some(dims.clone())];
        Seat::new(
            "a.b".into(),
            Box::new(form),
            admission,
            mode,
            given,
            vec![dims],
        )
    }

    fn code(s: &Seat, inputs: &[Option<Tensor>]) -> Option<String> {
        let before = s.ledger.counts().fallbacks;
        s.run(inputs).unwrap();
        let now = s.ledger.counts();
        let reason = now.last_reason.filter(|_| now.fallbacks > before)?;
        Some(reason.split(':').next().unwrap_or_default().to_string())
    }

    #[test]
    fn b_271_admission_asks_in_its_order_and_names_found_and_bound() {
        let s = seat_of(Admission {
            width: 4,
            rows: Rows::Exact(2),
            band: None,
            concurrent: false,
            strided: false,
        });
        s.run(&x(2, 4)).unwrap();
        let wrong = |rows, width, dtype| {
            vec![Some(
                Tensor::ones((1, rows, width), dtype, &Device::Cpu).unwrap(),
            )]
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Every later thing is wrong too; the first in the order is named.
                assert_eq!(code(&s, &wrong(3, 5, DType::F64)).unwrap(), "rt_dtype");
                assert_eq!(code(&s, &wrong(3, 5, DType::F32)).unwrap(), "rt_width");
                assert_eq!(code(&s, &wrong(3, 4, DType::F32)).unwrap(), "rt_rows");
                assert_eq!(
                    code(&s, &wrong(2, 4, DType::F32)).unwrap(),
                    "rt_second_thread"
                );
            });
        });
        s.run(&wrong(3, 4, DType::F32)).unwrap();
        let reason = s.ledger.counts().last_reason.unwrap();
        assert!(reason.contains("exactly 2 rows, found 3"), "{reason}");
        assert_eq!(code(&s, &[None]).unwrap(), "rt_width");
    }

    /// Hosts compute in f32, so that is the set of a seat that is not on a wire: codes of 8 bits are refused, and so is
    /// every other width, in either mode.
    #[test]
    fn b_272_an_entry_takes_its_dtypes_and_names_what_it_got() {
        let of = |dtype: DType| {
            let ones = Tensor::ones((1, 2, 4), DType::F32, &Device::Cpu).unwrap();
            vec![Some(ones.to_dtype(dtype).unwrap())]
        };
        let foreign = [
            DType::F8E4M3,
            DType::U8,
            DType::BF16,
            DType::F16,
            DType::F64,
            DType::I64,
        ];
        for dtype in foreign {
            let s = seat(None, OnGuardFail::Fallback, None);
            assert_eq!(code(&s, &of(dtype)).unwrap(), "rt_dtype", "{dtype:?}");
            let reason = s.ledger.counts().last_reason.unwrap();
            assert!(reason.contains("expected f32"), "{reason}");
            assert!(reason.contains(&format!("{dtype:?}")), "{reason}");
            let strict = seat(None, OnGuardFail::Raise, None);
            assert!(strict.run(&of(dtype)).is_err(), "{dtype:?}");
            assert_eq!(strict.ledger.counts().fallbacks, 0);
        }
        let s = seat(None, OnGuardFail::Fallback, None);
        assert_eq!(code(&s, &of(DType::F32)), None);
    }

    #[test]
    fn b_281_any_rows_up_to_the_capacity() {
        let s = seat(None, OnGuardFail::Fallback, None);
        for rows in 1..=8 {
            assert_eq!(code(&s, &x(rows, 4)), None);
        }
        assert_eq!(code(&s, &x(9, 4)).unwrap(), "rt_row_capacity");
        let reason = s.ledger.counts().last_reason.unwrap();
        assert!(reason.contains("at most 8 rows, found 9"), "{reason}");
    }

    #[test]
    fn b_277_one_warning_a_seat_and_code() {
        let s = seat(None, OnGuardFail::Fallback, None);
        for rows in [9, 10, 11] {
            s.run(&x(rows, 4)).unwrap();
        }
        s.run(&x(1, 5)).unwrap();
        let warned = s.warned.lock().unwrap();
        let mut codes: Vec<&str> = warned.iter().copied().collect();
        codes.sort_unstable();
        assert_eq!(codes, ["rt_row_capacity", "rt_width"]);
    }

    #[test]
    fn b_278_later_calls_of_a_restored_seat_do_not_touch_the_ledger() {
        let s = seat(None, OnGuardFail::Fallback, None);
        for _ in 0..CONSECUTIVE_FALLBACKS {
            s.run(&x(9, 4)).unwrap();
        }
        let then = s.ledger.counts();
        assert!(then.detached);
        for rows in [1, 9] {
            assert!(matches!(s.run(&x(rows, 4)).unwrap(), SpanOutcome::Host));
        }
        assert_eq!(s.ledger.counts(), then);
    }

    #[test]
    fn b_270_b_287_the_report_of_a_seat_is_one_document() {
        let s = seat(Some((1, 8)), OnGuardFail::Fallback, None);
        s.run(&x(2, 4)).unwrap();
        s.run(&x(1, 5)).unwrap();
        let report = serde_json::to_value(s.report()).unwrap();
        assert_eq!(report["site"], "a.b");
        assert_eq!(
            (&report["calls"], &report["fallbacks"]),
            (&2.into(), &1.into())
        );
        assert_eq!(report["detached"], false);
        assert!(report["last_reason"]
            .as_str()
            .unwrap()
            .starts_with("rt_width"));
        let form = &report["form"];
        assert_eq!((&form["dtype"], &form["width"]), (&"f32".into(), &4.into()));
        assert_eq!(form["rows"]["capacity"], 8);
        assert_eq!(form["device"], "cpu");
        assert_eq!(form["on_guard_fail"], "fallback");
        // One of the two, never both: exact rows are the other.
        assert!(form["rows"].get("exact").is_none());
        let exact = seat_of(Admission {
            width: 4,
            rows: Rows::Exact(2),
            band: None,
            concurrent: true,
            strided: false,
        });
        let form = serde_json::to_value(exact.report()).unwrap()["form"].clone();
        assert_eq!(form["rows"], serde_json::json!({ "exact": 2 }));
        assert_eq!(form["concurrent"], true);
    }
}
