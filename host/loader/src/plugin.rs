//! Loaded plugins and bound forms, as safe values.
//!
//! This is the safe layer over [`crate::open`]: it owns the instance handles, turns statuses into [`PluginError`],
//! releases what the other side allocated through the other side's own functions, and enforces the thread contract
//! (plugin entries one at a time; calls on one form one at a time unless its declaration says `concurrent`). A form
//! that answered an error is poisoned: it is never entered again, only released.
//!
//! Not here: whether a form should be bound, and what happens to a seat when a call fails (core).

use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use structures_plugin_api::abi::{
    BindArgs, Bytes, CallCtx, Contract, DType, Error, FormFacts, Status, Str, TensorView,
    STATUS_FAILED, STATUS_INVALID, STATUS_OK, STATUS_PANICKED, STATUS_POISONED, STATUS_REFUSED,
};
use structures_plugin_api::describe::{
    BindParams, Description, FormDecl, ProbeReport, ProbeShapes,
};
use structures_plugin_api::owned;

use crate::code::{Code, Refusal};
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
}

impl fmt::Display for StatusKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatusKind::Invalid => f.write_str("invalid"),
            StatusKind::Refused => f.write_str("refused"),
            StatusKind::Failed => f.write_str("failed"),
            StatusKind::Panicked => f.write_str("panicked"),
            StatusKind::Poisoned => f.write_str("poisoned"),
            StatusKind::Unknown(status) => write!(f, "unknown status {status}"),
        }
    }
}

/// What a plugin, or the wrapper in front of it, answered instead of doing the work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("plugin {plugin}, form {form}: {kind} ({code}): {message}")]
pub struct PluginError {
    /// Kind of status.
    pub kind: StatusKind,
    /// Stable code: the plugin's own, or `form_unknown`, `device_unknown`, `arguments_count`, `bad_answer`,
    /// `workspace`, `poisoned` from this side.
    pub code: String,
    /// Expected and found, for people.
    pub message: String,
    /// Id of the plugin.
    pub plugin: String,
    /// Name of the form.
    pub form: String,
}

/// A loaded plugin. Cloning shares it; the instance is closed with the last clone and the last bound form, the
/// library stays.
#[derive(Clone)]
pub struct Plugin {
    inner: Arc<Inner>,
}

struct Inner {
    description: Description,
    path: PathBuf,
    object: Object,
    tables: Tables,
    host: HostTable,
    /// The instance. Locked for every plugin entry.
    instance: Mutex<Handle>,
}

/// A pointer of the plugin's that only travels back to it.
struct Handle(*mut c_void);

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
    /// What every call keeps to. `struct_size` is filled in here.
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
        if (doorway.id(), doorway.version())
            != (description.id.as_str(), description.version.as_str())
        {
            return Err(Code::DescribeChanged.because(format!(
                "the door says {} {}, `describe` says {} {}",
                doorway.id(),
                doorway.version(),
                description.id,
                description.version
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
    /// The plugin's own failure; `form_unknown` for a form it does not declare; `device_unknown`; `bad_answer`.
    pub fn probe(
        &self,
        form: &str,
        device: u32,
        shapes: &ProbeShapes,
    ) -> Result<ProbeReport, PluginError> {
        self.declared(&shapes.structure, form)?;
        self.known_device(form, device)?;
        let shapes = serde_json::to_string(shapes)
            .map_err(|e| self.error(form, StatusKind::Invalid, "params", e.to_string()))?;
        let mut out = Bytes::EMPTY;
        let mut error = Error::EMPTY;
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
    /// The plugin's own failure; `form_unknown`; `device_unknown`.
    pub fn bind(&self, spec: &BindSpec<'_>) -> Result<BoundForm, PluginError> {
        let decl = self.declared(&spec.params.structure, spec.form)?;
        let concurrent = decl.concurrent;
        self.known_device(spec.form, spec.device)?;
        let params = serde_json::to_string(spec.params)
            .map_err(|e| self.error(spec.form, StatusKind::Invalid, "params", e.to_string()))?;
        let (weight_names, weights) = parallel(spec.weights);
        let (statistic_names, statistics) = parallel(spec.statistics);
        let contract = Contract {
            struct_size: size_of::<Contract>() as u32,
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
        let instance = self.inner.lock();
        // SAFETY: the instance is open and locked; everything `args` points at lives until the end of this
        // function, and the views are checked borrows.
        let status =
            unsafe { (self.inner.tables.plugin.bind)(instance.0, &args, &mut handle, &mut error) };
        drop(instance);
        self.inner.check(spec.form, status, &mut error)?;
        let mut facts = FormFacts::default();
        // SAFETY: `handle` was just made by `bind`; `facts` is live.
        unsafe { (self.inner.tables.form.facts)(handle, &mut facts) };
        Ok(BoundForm {
            plugin: Arc::clone(&self.inner),
            form: spec.form.to_string(),
            handle: Handle(handle),
            facts,
            arity: [
                spec.params.inputs.len(),
                spec.params.outputs.len(),
                spec.params.states.len(),
            ],
            turn: (!concurrent).then(Mutex::default),
            poisoned: AtomicBool::new(false),
        })
    }

    fn declared(&self, structure: &str, form: &str) -> Result<&FormDecl, PluginError> {
        self.inner.description.form(structure, form).ok_or_else(|| {
            let what = format!("no form `{form}` of `{structure}` is declared");
            self.error(form, StatusKind::Invalid, "form_unknown", what)
        })
    }

    fn known_device(&self, form: &str, device: u32) -> Result<(), PluginError> {
        if device == 0 || !self.inner.tables.plugin.device.is_null() {
            return Ok(());
        }
        let what = format!("device {device}: the plugin offers none beside the CPU (0)");
        Err(self.error(form, StatusKind::Refused, "device_unknown", what))
    }

    fn error(&self, form: &str, kind: StatusKind, code: &str, message: String) -> PluginError {
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
    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.instance
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    /// Takes the error that came with a status.
    fn check(&self, form: &str, status: Status, error: &mut Error) -> Result<(), PluginError> {
        if status == STATUS_OK {
            return Ok(());
        }
        // SAFETY: the plugin filled the error, or left it empty.
        let failure = unsafe { owned::take_error(status, error) };
        Err(self.error(form, StatusKind::of(status), &failure.code, failure.message))
    }

    fn error(&self, form: &str, kind: StatusKind, code: &str, message: String) -> PluginError {
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
    }
}

/// Names and views as the parallel arrays of the ABI.
fn parallel(named: &[(&str, HostTensor<'_>)]) -> (Vec<Str>, Vec<TensorView>) {
    named
        .iter()
        .map(|(name, tensor)| (Str::new(name), *tensor.view()))
        .unzip()
}

/// A form bound to weights. Calls may come from any thread.
pub struct BoundForm {
    plugin: Arc<Inner>,
    form: String,
    handle: Handle,
    facts: FormFacts,
    /// Inputs, outputs, states.
    arity: [usize; 3],
    /// Held for every call; absent when the form declared `concurrent`.
    turn: Option<Mutex<()>>,
    poisoned: AtomicBool,
}

// SAFETY: calls may come from any thread, says the ABI; `turn` keeps them one at a time unless the form declared
// that they may overlap.
unsafe impl Sync for BoundForm {}

/// Tag of the scratch that calls use as their workspace; shared by all forms of a plugin.
const WORKSPACE_TAG: &str = "host.workspace";
const WORKSPACE_ALIGN: u64 = 64;

impl BoundForm {
    /// Fills `outputs` and updates `states`, in the order of the bound span. An absent optional input is
    /// [`HostTensor::ABSENT`].
    ///
    /// # Errors
    /// `arguments_count` without entering the plugin; `poisoned` after an earlier error; else the plugin's own
    /// failure, after which the form is poisoned.
    pub fn call(
        &self,
        inputs: &[HostTensor<'_>],
        outputs: &mut [HostTensorMut<'_>],
        states: &mut [HostTensorMut<'_>],
    ) -> Result<(), PluginError> {
        let found = [inputs.len(), outputs.len(), states.len()];
        if found != self.arity {
            let what = format!(
                "expected {:?} inputs, outputs and states, found {found:?}",
                self.arity
            );
            return Err(self.plugin.error(
                &self.form,
                StatusKind::Invalid,
                "arguments_count",
                what,
            ));
        }
        let _turn = self
            .turn
            .as_ref()
            .map(|m| m.lock().unwrap_or_else(|poison| poison.into_inner()));
        if self.poisoned() {
            let what = "an earlier call failed; the instance is not entered again".into();
            return Err(self
                .plugin
                .error(&self.form, StatusKind::Poisoned, "poisoned", what));
        }
        let workspace = Workspace::lease(self)?;
        let ctx = CallCtx {
            struct_size: size_of::<CallCtx>() as u32,
            flags: 0,
            queue: std::ptr::null_mut(),
            workspace: workspace.memory,
        };
        let mut error = Error::EMPTY;
        // SAFETY: the handle is bound and not released; the turn is ours or the form declared overlapping calls;
        // views are checked borrows of the stated counts, outputs and states exclusive ones.
        let status = unsafe {
            (self.plugin.tables.form.call)(
                self.handle.0,
                &ctx,
                HostTensor::as_views(inputs),
                inputs.len(),
                HostTensorMut::as_views(outputs),
                outputs.len(),
                HostTensorMut::as_views(states),
                states.len(),
                &mut error,
            )
        };
        if status != STATUS_OK {
            self.poisoned.store(true, Ordering::Release);
        }
        self.plugin.check(&self.form, status, &mut error)
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
        // SAFETY: bound once, released once, also when poisoned; `&mut self` says that no call runs.
        unsafe { (self.plugin.tables.form.release)(self.handle.0) };
    }
}

/// Memory for the length of one call, where the form asked for some.
struct Workspace<'a> {
    host: &'a HostTable,
    memory: *mut c_void,
}

impl<'a> Workspace<'a> {
    fn lease(form: &'a BoundForm) -> Result<Self, PluginError> {
        let host = &form.plugin.host;
        let bytes = form.facts.workspace_bytes;
        if bytes == 0 {
            return Ok(Workspace {
                host,
                memory: std::ptr::null_mut(),
            });
        }
        let memory = host.lease(WORKSPACE_TAG, bytes, WORKSPACE_ALIGN);
        if memory.is_null() {
            let what = format!("no memory for a workspace of {bytes} bytes");
            return Err(form
                .plugin
                .error(&form.form, StatusKind::Failed, "workspace", what));
        }
        Ok(Workspace { host, memory })
    }
}

impl Drop for Workspace<'_> {
    fn drop(&mut self) {
        self.host.release(self.memory);
    }
}
