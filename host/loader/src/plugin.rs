//! Loaded plugins and bound forms, as safe values.
//!
//! This is the safe layer over [`crate::open`]: it owns the instance handles, turns statuses into [`PluginError`],
//! releases what the other side allocated through the other side's own functions, and enforces the thread contract
//! (plugin entries one at a time; a second call of a form while one runs is refused unless its declaration says
//! `concurrent`). A form that answered an error is poisoned: it is never entered again, only released.
//!
//! Not here: whether a form should be bound, and what happens to a seat when a call fails (core).

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use structures_plugin_api::abi::{
    BindArgs, Bytes, CallCtx, Contract, DType, Error, FormFacts, HostVTable, Status, Str,
    TensorView, STATUS_FAILED, STATUS_INVALID, STATUS_OK, STATUS_PANICKED, STATUS_POISONED,
    STATUS_REFUSED,
};
use structures_plugin_api::describe::{
    operation_of, BindParams, Description, DeviceInfo, FormDecl, ProbeReport, ProbeShapes,
};
use structures_plugin_api::owned;

use crate::code::{Code, Refusal};
use crate::device::gate::Gate;
use crate::document;
use crate::open::{Doorway, Tables};
use crate::services::HostTable;
use crate::store::Object;
use crate::tensor::{HostTensor, HostTensorMut};

/// Kind of a [`PluginError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StatusKind {
    /// An argument was malformed.
    Invalid,
    /// Well formed, but not something this form executes here.
    Refused,
    /// It should have worked and did not.
    Failed,
    /// The plugin panicked.
    Panicked,
    /// The instance answered an error before.
    Poisoned,
    /// A status this host does not know.
    Unknown(i32),
}

impl StatusKind {
    fn of(status: Status) -> Self {
        match status {
            STATUS_INVALID => StatusKind::Invalid,
            STATUS_REFUSED => StatusKind::Refused,
            STATUS_FAILED => StatusKind::Failed,
            STATUS_PANICKED => StatusKind::Panicked,
            STATUS_POISONED => StatusKind::Poisoned,
            other => StatusKind::Unknown(other),
        }
    }

    /// The code of an error that came without one.
    fn name(self) -> &'static str {
        match self {
            StatusKind::Invalid => "invalid",
            StatusKind::Refused => "refused",
            StatusKind::Failed => "failed",
            StatusKind::Panicked => "panicked",
            StatusKind::Poisoned => "poisoned",
            StatusKind::Unknown(_) => "unknown_status",
        }
    }
}

impl fmt::Display for StatusKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatusKind::Unknown(status) => write!(f, "unknown status {status}"),
            known => f.write_str(known.name()),
        }
    }
}

/// What a plugin, or the wrapper in front of it, answered instead of doing the work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("plugin {plugin}{}: {kind} ({code}): {message}", of_form(form))]
pub struct PluginError {
    /// Kind of status.
    pub kind: StatusKind,
    /// Stable code: the plugin's own, or `form_unknown`, `device_unknown`, `arguments_count`, `bad_answer`,
    /// `workspace`, `poisoned`, `rt_second_thread`, `arch_not_declared`, `arch_malformed`, `device_mismatch` from
    /// this side.
    pub code: String,
    /// Expected and found, for people.
    pub message: String,
    /// Id of the plugin.
    pub plugin: String,
    /// Name of the form; empty where it is none's.
    pub form: String,
}

/// The form in a message; what a plugin answers of itself or of a device is of none.
fn of_form(form: &str) -> String {
    match form {
        "" => String::new(),
        form => format!(", form {form}"),
    }
}

/// A loaded plugin. Cloning shares it; the instance is closed with the last clone and the last bound form, the
/// library stays.
#[derive(Clone)]
pub struct Plugin {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    description: Description,
    path: PathBuf,
    object: Object,
    pub(crate) tables: Tables,
    host: HostTable,
    /// The instance. Locked for every plugin entry.
    instance: Mutex<Handle>,
    /// What it answered to the question for its devices, once somebody asked.
    pub(crate) devices: OnceLock<Result<Vec<DeviceInfo>, PluginError>>,
    /// Devices that are open and shared, by number.
    pub(crate) open_devices: Mutex<BTreeMap<u32, Weak<crate::device::Open>>>,
    /// By number of a device; see [`Inner::gate`].
    gates: Mutex<BTreeMap<u32, Arc<Gate>>>,
}

/// A pointer of the plugin's that only travels back to it.
pub(crate) struct Handle(pub(crate) *mut c_void);

// SAFETY: plugin entries may be called from any thread, says the ABI; the lock keeps them one at a time.
unsafe impl Send for Handle {}

/// What to bind.
#[derive(Clone, Copy, Debug)]
pub struct BindSpec<'a> {
    /// Name of a form declared for `params.structure`.
    pub form: &'a str,
    /// 0 is the CPU.
    pub device: u32,
    /// Span of the structure's dataflow.
    pub span: &'a str,
    /// Slots in spec order; absent optional ones as [`HostTensor::ABSENT`].
    pub weights: &'a [(&'a str, HostTensor<'a>)],
    /// `point|statistic|granularity` with f32 values.
    pub statistics: &'a [(&'a str, HostTensor<'a>)],
    /// Structure, axes, dims and the order of inputs, outputs and states.
    pub params: &'a BindParams,
    /// What every call keeps to. `struct_size` and `device` are filled in here.
    pub contract: Contract,
}

/// A contract for calls on the host's memory with at most `row_capacity` rows.
pub fn row_capacity(dtype: DType, row_capacity: u64) -> Contract {
    Contract {
        struct_size: size_of::<Contract>() as u32,
        dtype: dtype as u32,
        row_capacity,
        rows_exact: 0,
        device: 0,
        flags: 0,
    }
}

impl Plugin {
    /// Opens the private copy of a plugin that was described and admitted, and makes its instance.
    ///
    /// # Errors
    /// `describe_changed`, `plugin_open_failed`, and every refusal of the door.
    pub(crate) fn load(
        path: &Path,
        object: &Object,
        scanned: &Description,
    ) -> Result<Self, Refusal> {
        let doorway = Doorway::open(&object.path)?;
        let host = HostTable::leak(&scanned.id);
        // SAFETY: the table is leaked.
        let tables = unsafe { doorway.exchange(host.as_ptr()) }?;
        let description = document::parse(&tables.describe()?)?;
        let described = (description.id.as_str(), description.version.as_str());
        if let Some((id, version)) = doorway.identity().filter(|door| *door != described) {
            return Err(Code::DescribeChanged.because(format!(
                "the door says {id} {version}, `describe` says {} {}",
                description.id, description.version
            )));
        }
        if &description != scanned {
            return Err(Code::DescribeChanged.because(format!(
                "the scan found {} {} with {} forms, the loaded library says {} {} with {} forms{}",
                scanned.id,
                scanned.version,
                scanned.forms.len(),
                description.id,
                description.version,
                description.forms.len(),
                if scanned.forms.len() == description.forms.len() {
                    ", declared differently"
                } else {
                    ""
                }
            )));
        }
        let mut instance = std::ptr::null_mut();
        let mut error = Error::EMPTY;
        // SAFETY: the host's table is leaked; the out-parameters are live and empty.
        let status = unsafe { (tables.plugin.open)(host.as_ptr(), &mut instance, &mut error) };
        if status != STATUS_OK {
            // SAFETY: the plugin filled the error, or left it empty.
            let failure = unsafe { owned::take_error(status, &mut error) };
            return Err(Code::PluginOpenFailed.because(failure.to_string()));
        }
        Ok(Plugin {
            inner: Arc::new(Inner {
                description,
                path: path.to_path_buf(),
                object: object.clone(),
                tables,
                host,
                instance: Mutex::new(Handle(instance)),
                devices: OnceLock::new(),
                open_devices: Mutex::default(),
                gates: Mutex::default(),
            }),
        })
    }

    /// What it declares.
    pub fn description(&self) -> &Description {
        &self.inner.description
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.inner.description.id
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Digest of the loaded bytes, lower-case hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.inner.object.sha256
    }

    /// Bytes of scratch it holds or has pooled.
    pub fn scratch_bytes(&self) -> u64 {
        self.inner.host.scratch_bytes()
    }

    /// Asks whether a form can run on a device at these shapes.
    ///
    /// # Errors
    /// The plugin's own failure; `form_unknown` for a form it does not declare; `device_unknown`, `arch_not_declared`
    /// and `arch_malformed`; `bad_answer`.
    pub fn probe(
        &self,
        form: &str,
        device: u32,
        shapes: &ProbeShapes,
    ) -> Result<ProbeReport, PluginError> {
        self.declared(&shapes.structure, form)?;
        self.placeable(&shapes.structure, form, device)?;
        let shapes = serde_json::to_string(shapes)
            .map_err(|e| self.error(form, StatusKind::Invalid, "params", e.to_string()))?;
        let mut out = Bytes::EMPTY;
        let mut error = Error::EMPTY;
        let gate = self.inner.gate(device);
        let pass = gate.pass();
        let instance = self.inner.lock();
        // SAFETY: the instance is open and locked; the texts and out-parameters live for the call.
        let status = unsafe {
            (self.inner.tables.plugin.probe)(
                instance.0,
                Str::new(form),
                device,
                Str::new(&shapes),
                &mut out,
                &mut error,
            )
        };
        drop(instance);
        drop(pass);
        self.inner.check(form, status, &mut error)?;
        // SAFETY: the plugin answered success, so `out` is as it made it.
        let answer = unsafe { owned::read_bytes(&mut out) };
        serde_json::from_slice(&answer).map_err(|e| {
            let what = format!("expected a probe report: {e}");
            self.error(form, StatusKind::Failed, "bad_answer", what)
        })
    }

    /// Binds a form: the plugin reads and packs the weights. Nothing of `spec` is kept.
    ///
    /// # Errors
    /// The plugin's own failure; `form_unknown`; `device_unknown`, `arch_not_declared` and `arch_malformed`.
    pub fn bind(&self, spec: &BindSpec<'_>) -> Result<BoundForm, PluginError> {
        let concurrent = match operation_of(&spec.params.structure, spec.form) {
            Some(kind) => self.executes(kind, spec)?,
            None => {
                let decl = self.declared(&spec.params.structure, spec.form)?;
                decl.concurrent
            }
        };
        self.placeable(&spec.params.structure, spec.form, spec.device)?;
        let params = serde_json::to_string(spec.params)
            .map_err(|e| self.error(spec.form, StatusKind::Invalid, "params", e.to_string()))?;
        let (weight_names, weights) = parallel(spec.weights);
        let (statistic_names, statistics) = parallel(spec.statistics);
        let contract = Contract {
            struct_size: size_of::<Contract>() as u32,
            device: spec.device,
            flags: 0,
            ..spec.contract
        };
        let args = BindArgs {
            struct_size: size_of::<BindArgs>() as u32,
            device: spec.device,
            form: Str::new(spec.form),
            span: Str::new(spec.span),
            weight_names: weight_names.as_ptr(),
            weights: weights.as_ptr(),
            n_weights: weights.len(),
            statistic_names: statistic_names.as_ptr(),
            statistics: statistics.as_ptr(),
            n_statistics: statistics.len(),
            params: Str::new(&params),
            contract: &contract,
        };
        let mut handle = std::ptr::null_mut();
        let mut error = Error::EMPTY;
        let gate = self.inner.gate(spec.device);
        let pass = gate.pass();
        let instance = self.inner.lock();
        // SAFETY: the instance is open and locked; everything `args` points at lives until the end of this
        // function, and the views are checked borrows.
        let status =
            unsafe { (self.inner.tables.plugin.bind)(instance.0, &args, &mut handle, &mut error) };
        drop(instance);
        drop(pass);
        self.inner.check(spec.form, status, &mut error)?;
        let mut bound = BoundForm::of_raw(&self.inner, spec.form.to_string(), handle, spec.device);
        bound.busy = (!concurrent).then(AtomicBool::default);
        bound.arity = [
            spec.params.inputs.len(),
            spec.params.outputs.len(),
            spec.params.states.len(),
        ];
        Ok(bound)
    }

    /// Whether calls of a host operation may overlap: never. Refuses what is not declared, and the CPU.
    fn executes(&self, kind: &str, spec: &BindSpec<'_>) -> Result<bool, PluginError> {
        let declared = self.inner.description.operations.iter().any(|o| o == kind);
        if declared && spec.device != 0 {
            return Ok(false);
        }
        let what = match declared {
            true => format!("host operation `{kind}` is for a device of the plugin, not the CPU"),
            false => format!("host operation `{kind}` is not declared"),
        };
        Err(self.error(spec.form, StatusKind::Invalid, "form_unknown", what))
    }

    fn declared(&self, structure: &str, form: &str) -> Result<&FormDecl, PluginError> {
        self.inner.description.form(structure, form).ok_or_else(|| {
            let what = format!("no form `{form}` of `{structure}` is declared");
            self.error(form, StatusKind::Invalid, "form_unknown", what)
        })
    }

    pub(crate) fn error(
        &self,
        form: &str,
        kind: StatusKind,
        code: &str,
        message: String,
    ) -> PluginError {
        self.inner.error(form, kind, code, message)
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin")
            .field("id", &self.id())
            .field("version", &self.inner.description.version)
            .field("path", &self.inner.path)
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn id(&self) -> &str {
        &self.description.id
    }

    pub(crate) fn host(&self) -> *const HostVTable {
        self.host.as_ptr()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Handle> {
        self.instance
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    /// What everybody passes before entering the plugin with anything of that device. Nobody closes the CPU's.
    pub(crate) fn gate(&self, device: u32) -> Arc<Gate> {
        let mut gates = self.gates.lock().unwrap_or_else(|e| e.into_inner());
        Arc::clone(gates.entry(device).or_default())
    }

    /// Takes the error that came with a status.
    pub(crate) fn check(
        &self,
        form: &str,
        status: Status,
        error: &mut Error,
    ) -> Result<(), PluginError> {
        if status == STATUS_OK {
            return Ok(());
        }
        // SAFETY: the plugin filled the error, or left it empty.
        let failure = unsafe { owned::take_error(status, error) };
        let kind = StatusKind::of(status);
        // A plugin that gives no code still gets one that scripts can rely on.
        let code = match failure.code.is_empty() {
            true => kind.name(),
            false => &failure.code,
        };
        Err(self.error(form, kind, code, failure.message))
    }

    pub(crate) fn error(
        &self,
        form: &str,
        kind: StatusKind,
        code: &str,
        message: String,
    ) -> PluginError {
        PluginError {
            kind,
            code: code.to_string(),
            message,
            plugin: self.description.id.clone(),
            form: form.to_string(),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let handle = self.lock().0;
        // SAFETY: opened once, closed once; every bound form holds this value, so none is left.
        unsafe { (self.tables.plugin.close)(handle) };
        self.host.flush_log();
    }
}

/// Names and views as the parallel arrays of the ABI.
fn parallel(named: &[(&str, HostTensor<'_>)]) -> (Vec<Str>, Vec<TensorView>) {
    named
        .iter()
        .map(|(name, tensor)| (Str::new(name), *tensor.view()))
        .unzip()
}

/// Type of a form table's `call`.
#[doc(hidden)]
pub type RawEntry = unsafe extern "C" fn(
    *mut c_void,
    *const CallCtx,
    *const TensorView,
    usize,
    *const TensorView,
    usize,
    *const TensorView,
    usize,
    *mut Error,
) -> Status;

/// A form bound to weights. Calls may come from any thread.
pub struct BoundForm {
    plugin: Arc<Inner>,
    form: String,
    handle: Handle,
    facts: FormFacts,
    /// Inputs, outputs, states.
    arity: [usize; 3],
    device: u32,
    /// Set while a call runs; absent when the form declared `concurrent`.
    busy: Option<AtomicBool>,
    pub(crate) poisoned: AtomicBool,
}

// SAFETY: calls may come from any thread, says the ABI; `busy` keeps them one at a time unless the form declared
// that they may overlap.
unsafe impl Sync for BoundForm {}

/// Tag of the scratch that calls use as their workspace; shared by all forms of a plugin.
const WORKSPACE_TAG: &str = "host.workspace";
const WORKSPACE_ALIGN: u64 = 64;

impl BoundForm {
    /// Around what `bind` made just now: asks for its facts, once. Takes no arguments of a call yet.
    pub(crate) fn of_raw(
        plugin: &Arc<Inner>,
        form: String,
        handle: *mut c_void,
        device: u32,
    ) -> Self {
        let mut facts = FormFacts::default();
        // SAFETY: `handle` was just made by `bind`; `facts` is live.
        unsafe { (plugin.tables.form.facts)(handle, &mut facts) };
        BoundForm {
            plugin: Arc::clone(plugin),
            form,
            handle: Handle(handle),
            facts,
            arity: [0; 3],
            device,
            busy: Some(AtomicBool::default()),
            poisoned: AtomicBool::new(false),
        }
    }

    /// Fills `outputs` and updates `states`, in the order of the bound span. An absent optional input is
    /// [`HostTensor::ABSENT`].
    ///
    /// # Errors
    /// `arguments_count`, `device_mismatch` and, while another call runs on a form that is not `concurrent`,
    /// `rt_second_thread`: without entering the plugin; `poisoned` after an earlier error; else the plugin's own
    /// failure, after which the form is poisoned.
    pub fn call(
        &self,
        inputs: &[HostTensor<'_>],
        outputs: &mut [HostTensorMut<'_>],
        states: &mut [HostTensorMut<'_>],
    ) -> Result<(), PluginError> {
        if self.device != 0 {
            return Err(self.elsewhere(0));
        }
        // SAFETY: views are checked borrows of host memory, outputs and states exclusive ones.
        unsafe {
            self.enter(
                std::ptr::null_mut(),
                (HostTensor::as_views(inputs), inputs.len()),
                (HostTensorMut::as_views(outputs), outputs.len()),
                (HostTensorMut::as_views(states), states.len()),
            )
        }
    }

    /// Refuses arguments that lie on another device than the form was bound on.
    pub(crate) fn on_device(&self, device: u32) -> Result<(), PluginError> {
        match device == self.device {
            true => Ok(()),
            false => Err(self.elsewhere(device)),
        }
    }

    #[cold]
    fn elsewhere(&self, device: u32) -> PluginError {
        let what = format!(
            "the form was bound on device {}, the arguments are on device {device}",
            self.device
        );
        self.refused("device_mismatch", what)
    }

    /// The call itself.
    ///
    /// # Safety
    /// Each pair is an array of that many views, of memory on the form's device that stays for the call; outputs and
    /// states are used by nobody else meanwhile. `queue` is null or a queue of that device.
    pub(crate) unsafe fn enter(
        &self,
        queue: *mut c_void,
        inputs: (*const TensorView, usize),
        outputs: (*const TensorView, usize),
        states: (*const TensorView, usize),
    ) -> Result<(), PluginError> {
        let found = [inputs.1, outputs.1, states.1];
        if found != self.arity {
            return Err(self.miscounted(found));
        }
        let _busy = match &self.busy {
            Some(flag) => match Busy::take(flag) {
                Some(busy) => Some(busy),
                None => return Err(self.overlapping()),
            },
            None => None,
        };
        if self.poisoned() {
            return Err(self.dead());
        }
        let Some(workspace) = Workspace::lease(self) else {
            return Err(self.short_of_memory());
        };
        let ctx = CallCtx {
            struct_size: size_of::<CallCtx>() as u32,
            flags: 0,
            queue,
            workspace: workspace.memory,
        };
        let mut error = Error::EMPTY;
        // SAFETY: the handle is bound and not released; nobody else is inside, or the form declared overlapping calls;
        // the views are as the caller promised.
        let status = unsafe {
            (self.plugin.tables.form.call)(
                self.handle.0,
                &ctx,
                inputs.0,
                inputs.1,
                outputs.0,
                outputs.1,
                states.0,
                states.1,
                &mut error,
            )
        };
        if status == STATUS_OK {
            return Ok(());
        }
        self.failed(status, &mut error)
    }

    #[cold]
    fn failed(&self, status: Status, error: &mut Error) -> Result<(), PluginError> {
        self.poisoned.store(true, Ordering::Release);
        self.plugin.check(&self.form, status, error)
    }

    /// Enters it again after a refusal that was no fault of it.
    pub(crate) fn unpoison(&self) {
        self.poisoned.store(false, Ordering::Release);
    }

    /// Enters it no more.
    pub(crate) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    #[cold]
    pub(crate) fn invalid(&self, code: &str, what: String) -> PluginError {
        self.plugin
            .error(&self.form, StatusKind::Invalid, code, what)
    }

    pub(crate) fn fault(&self, code: &str, what: String) -> PluginError {
        self.plugin
            .error(&self.form, StatusKind::Failed, code, what)
    }

    #[cold]
    fn miscounted(&self, found: [usize; 3]) -> PluginError {
        let what = format!(
            "expected {:?} inputs, outputs and states, found {found:?}",
            self.arity
        );
        self.plugin
            .error(&self.form, StatusKind::Invalid, "arguments_count", what)
    }

    #[cold]
    fn overlapping(&self) -> PluginError {
        let what = "another call runs on this form, which does not declare `concurrent`";
        self.refused("rt_second_thread", what.into())
    }

    #[cold]
    pub(crate) fn dead(&self) -> PluginError {
        let what = "an earlier call failed; the instance is not entered again".into();
        self.plugin
            .error(&self.form, StatusKind::Poisoned, "poisoned", what)
    }

    #[cold]
    pub(crate) fn short_of_memory(&self) -> PluginError {
        let bytes = self.facts.workspace_bytes;
        let what = format!("no memory for a workspace of {bytes} bytes");
        self.plugin
            .error(&self.form, StatusKind::Failed, "workspace", what)
    }

    #[cold]
    fn refused(&self, code: &str, what: String) -> PluginError {
        self.plugin
            .error(&self.form, StatusKind::Refused, code, what)
    }

    /// The plugin's own entry, for the benchmark of the boundary.
    #[doc(hidden)]
    pub fn raw_entry(&self) -> RawEntry {
        self.plugin.tables.form.call
    }

    /// What [`BoundForm::raw_entry`] takes first, as long as this value lives.
    #[doc(hidden)]
    pub fn raw_form(&self) -> *mut c_void {
        self.handle.0
    }

    pub(crate) fn plugin(&self) -> &Arc<Inner> {
        &self.plugin
    }

    /// Name of the form.
    pub fn form(&self) -> &str {
        &self.form
    }

    /// Id of the plugin.
    pub fn plugin_id(&self) -> &str {
        &self.plugin.description.id
    }

    /// Bytes it added, asked once after `bind`.
    pub fn facts(&self) -> FormFacts {
        self.facts
    }

    /// Whether an earlier call failed.
    pub fn poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }
}

impl fmt::Debug for BoundForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundForm")
            .field("plugin", &self.plugin_id())
            .field("form", &self.form)
            .field("facts", &self.facts)
            .field("poisoned", &self.poisoned())
            .finish_non_exhaustive()
    }
}

impl Drop for BoundForm {
    fn drop(&mut self) {
        let gate = self.plugin.gate(self.device);
        let _pass = gate.pass();
        // SAFETY: bound once, released once, also when poisoned; `&mut self` says that no call runs.
        unsafe { (self.plugin.tables.form.release)(self.handle.0) };
    }
}

/// The one call that may run on a form.
struct Busy<'a>(&'a AtomicBool);

impl<'a> Busy<'a> {
    fn take(flag: &'a AtomicBool) -> Option<Self> {
        let taken = flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        taken.ok().map(|_| Busy(flag))
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Memory for the length of one call, where the form asked for some.
pub(crate) struct Workspace<'a> {
    host: &'a HostTable,
    memory: *mut c_void,
}

impl<'a> Workspace<'a> {
    pub(crate) fn memory(&self) -> *mut c_void {
        self.memory
    }

    /// `None` when memory is short.
    pub(crate) fn lease(form: &'a BoundForm) -> Option<Self> {
        let host = &form.plugin.host;
        let bytes = form.facts.workspace_bytes;
        if bytes == 0 {
            return Some(Workspace {
                host,
                memory: std::ptr::null_mut(),
            });
        }
        let memory = host.lease(WORKSPACE_TAG, bytes, WORKSPACE_ALIGN);
        (!memory.is_null()).then_some(Workspace { host, memory })
    }
}

impl Drop for Workspace<'_> {
    fn drop(&mut self) {
        // Most forms ask for none, and the lock is not free.
        if !self.memory.is_null() {
            self.host.release(self.memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_a_form_only_where_there_is_one() {
        let error = |form: &str| PluginError {
            kind: StatusKind::Refused,
            code: "driver_absent".into(),
            message: "no library".into(),
            plugin: "p".into(),
            form: form.into(),
        };
        for (form, text) in [
            ("", "plugin p: refused (driver_absent): no library"),
            ("f", "plugin p, form f: refused (driver_absent): no library"),
        ] {
            assert_eq!(error(form).to_string(), text);
        }
    }
}
