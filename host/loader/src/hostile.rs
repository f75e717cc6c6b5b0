//! A plugin called as no host would call it: null, short and absurd arguments, views that are none.
//!
//! For the validator alone. Every entry asks for a [`Throwaway`]: what a plugin does with such arguments may end the
//! process, and the process exists to find that out. What is checked here is nothing; what came back is told.
//! [`crate::plugin`] stays the only way a host calls a plugin.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use structures_plugin_api::abi::{
    BindArgs, Bytes, CallCtx, Contract, Error, Status, Str, TensorView, STATUS_OK,
};
use structures_plugin_api::owned;

use crate::child::Throwaway;
use crate::code::Refusal;
use crate::plugin::{BoundForm, Plugin, PluginError, Workspace};

/// What to bind, every part of it free.
#[derive(Clone, Debug)]
pub struct RawBind {
    /// Name of the form; any bytes.
    pub form: Vec<u8>,
    /// Name of the span; any bytes.
    pub span: Vec<u8>,
    /// Device.
    pub device: u32,
    /// Names and views. The maker keeps what they point at alive, if anything.
    pub weights: Vec<(Vec<u8>, TensorView)>,
    /// Names and views.
    pub statistics: Vec<(Vec<u8>, TensorView)>,
    /// The params document; any bytes.
    pub params: Vec<u8>,
    /// The contract; null when absent.
    pub contract: Option<Contract>,
    /// What the args say their size is.
    pub struct_size: u32,
    /// Counts as given, arrays null.
    pub null_arrays: bool,
}

impl RawBind {
    /// The size of the args.
    pub const SIZE: u32 = size_of::<BindArgs>() as u32;
}

/// Null arguments of plugin entries: a name, and whether a success is a fault too (a null out-parameter has nowhere
/// to put one). Handles that are null are handles like any other: they must not crash, that is all.
pub const NULL_ENTRIES: &[(&str, bool)] = &[
    ("describe: out null", true),
    ("describe: error null", false),
    ("open: host null", false),
    ("open: plugin null", true),
    ("open: error null", false),
    ("probe: instance null", false),
    ("probe: out null", true),
    ("probe: texts empty and null, error null", false),
    ("bind: instance null", false),
    ("bind: args null", true),
    ("bind: form null", true),
    ("bind: args null, error null", true),
    ("facts: instance null", false),
    ("facts: out null", false),
    ("release: instance null", false),
];

/// Null arguments of a call, as [`NULL_ENTRIES`].
pub const NULL_CALLS: &[(&str, bool)] = &[
    ("call: instance null", false),
    ("call: context null", false),
    ("call: arrays null, counts as they are", true),
    ("call: arrays null, counts 0", true),
    ("call: error null, arrays null", true),
];

fn text(bytes: &[u8]) -> Str {
    Str {
        ptr: bytes.as_ptr(),
        len: bytes.len(),
    }
}

const NULL_TEXT: Str = Str {
    ptr: std::ptr::null(),
    len: 0,
};

impl Plugin {
    /// The describe entry once more: the text as it is.
    ///
    /// # Errors
    /// As while loading.
    pub fn describe_again(&self, _: &Throwaway) -> Result<String, Refusal> {
        self.inner.tables.describe()
    }

    /// Minor versions that the plugin's tables state, and whether there are device entries: plugin, form, and device
    /// table where there is one.
    pub fn table_minors(&self) -> (u32, u32, Option<u32>) {
        let tables = &self.inner.tables;
        let device = tables.device.map(|d| d.api_minor);
        (tables.plugin.api_minor, tables.form.api_minor, device)
    }

    /// The probe entry with any bytes as form and shapes.
    ///
    /// # Errors
    /// The plugin's own.
    pub fn probe_raw(
        &self,
        _: &Throwaway,
        form: &[u8],
        device: u32,
        shapes: &[u8],
    ) -> Result<Vec<u8>, PluginError> {
        let (mut out, mut error) = (Bytes::EMPTY, Error::EMPTY);
        let instance = self.inner.lock();
        // SAFETY: the instance is open and locked; texts and out-parameters live for the call.
        let status = unsafe {
            (self.inner.tables.plugin.probe)(
                instance.0,
                text(form),
                device,
                text(shapes),
                &mut out,
                &mut error,
            )
        };
        drop(instance);
        self.inner
            .check(&String::from_utf8_lossy(form), status, &mut error)?;
        // SAFETY: the plugin answered success, so `out` is as it made it.
        Ok(unsafe { owned::read_bytes(&mut out) })
    }

    /// The bind entry with any arguments.
    ///
    /// # Errors
    /// The plugin's own; `bad_answer` for a success without an instance that can be told from null.
    pub fn bind_raw(&self, _: &Throwaway, bind: &RawBind) -> Result<BoundForm, PluginError> {
        let (mut handle, mut error) = (std::ptr::null_mut(), Error::EMPTY);
        let status = with_args(bind, |args| {
            let instance = self.inner.lock();
            // SAFETY: the instance is open and locked; what the args point at is absurd on purpose, in a process
            // that exists to see what comes of it.
            unsafe { (self.inner.tables.plugin.bind)(instance.0, args, &mut handle, &mut error) }
        });
        let form = String::from_utf8_lossy(&bind.form).into_owned();
        self.inner.check(&form, status, &mut error)?;
        Ok(BoundForm::of_raw(&self.inner, form, handle, bind.device))
    }

    /// One of [`NULL_ENTRIES`]; `bind` is a good one. Answers the status, 0 where the entry has none.
    pub fn null_entry(&self, _: &Throwaway, which: usize, bind: &RawBind) -> Status {
        let table = &self.inner.tables.plugin;
        let forms = &self.inner.tables.form;
        let null = std::ptr::null_mut::<c_void>();
        let (mut out, mut error) = (Bytes::EMPTY, Error::EMPTY);
        let mut handle = null;
        let instance = self.inner.lock();
        let form = text(&bind.form);
        // SAFETY: what is not null is alive and open; what is null is so on purpose, in a process that exists to see
        // what comes of it.
        let status = unsafe {
            match which {
                0 => (table.describe)(std::ptr::null_mut(), &mut error),
                1 => (table.describe)(&mut out, std::ptr::null_mut()),
                2 => (table.open)(std::ptr::null(), &mut handle, &mut error),
                3 => (table.open)(self.inner.host(), std::ptr::null_mut(), &mut error),
                4 => (table.open)(std::ptr::null(), &mut handle, std::ptr::null_mut()),
                5 => (table.probe)(null, form, 0, text(b"{}"), &mut out, &mut error),
                6 => (table.probe)(
                    instance.0,
                    form,
                    0,
                    text(b"{}"),
                    std::ptr::null_mut(),
                    &mut error,
                ),
                7 => (table.probe)(
                    instance.0,
                    NULL_TEXT,
                    0,
                    NULL_TEXT,
                    &mut out,
                    std::ptr::null_mut(),
                ),
                8 => with_args(bind, |args| {
                    (table.bind)(null, args, &mut handle, &mut error)
                }),
                9 => (table.bind)(instance.0, std::ptr::null(), &mut handle, &mut error),
                10 => with_args(bind, |args| {
                    (table.bind)(instance.0, args, std::ptr::null_mut(), &mut error)
                }),
                11 => (table.bind)(
                    instance.0,
                    std::ptr::null(),
                    &mut handle,
                    std::ptr::null_mut(),
                ),
                12 => {
                    (forms.facts)(null, &mut Default::default());
                    STATUS_OK
                }
                13 => {
                    let status = with_args(bind, |args| {
                        (table.bind)(instance.0, args, &mut handle, &mut error)
                    });
                    if status == STATUS_OK {
                        (forms.facts)(handle, std::ptr::null_mut());
                        (forms.release)(handle);
                    }
                    STATUS_OK
                }
                _ => {
                    (forms.release)(null);
                    STATUS_OK
                }
            }
        };
        // SAFETY: filled by the plugin, or as they were. What was opened or bound by the way is left: the process
        // ends.
        unsafe {
            owned::take_error(status, &mut error);
            owned::read_bytes(&mut out);
        }
        status
    }
}

/// The args of the ABI for as long as `f` runs.
fn with_args(bind: &RawBind, f: impl FnOnce(*const BindArgs) -> Status) -> Status {
    let split = |list: &[(Vec<u8>, TensorView)]| -> (Vec<Str>, Vec<TensorView>) {
        list.iter().map(|(name, view)| (text(name), *view)).unzip()
    };
    let (weight_names, weights) = split(&bind.weights);
    let (statistic_names, statistics) = split(&bind.statistics);
    let contract = bind.contract.as_ref();
    let array = |names: &[Str], views: &[TensorView]| match bind.null_arrays {
        true => (std::ptr::null(), std::ptr::null()),
        false => (names.as_ptr(), views.as_ptr()),
    };
    let (weight_names_at, weights_at) = array(&weight_names, &weights);
    let (statistic_names_at, statistics_at) = array(&statistic_names, &statistics);
    f(&BindArgs {
        struct_size: bind.struct_size,
        device: bind.device,
        form: text(&bind.form),
        span: text(&bind.span),
        weight_names: weight_names_at,
        weights: weights_at,
        n_weights: weights.len(),
        statistic_names: statistic_names_at,
        statistics: statistics_at,
        n_statistics: statistics.len(),
        params: text(&bind.params),
        contract: contract.map_or(std::ptr::null(), std::ptr::from_ref),
    })
}

impl BoundForm {
    /// The call entry with any views, as many as there are.
    ///
    /// # Errors
    /// The plugin's own; `workspace` when there is no memory for one.
    pub fn call_raw(
        &self,
        _: &Throwaway,
        inputs: &[TensorView],
        outputs: &[TensorView],
        states: &[TensorView],
    ) -> Result<(), PluginError> {
        let workspace = Workspace::lease(self)?;
        let ctx = context(&workspace);
        let mut error = Error::EMPTY;
        // SAFETY: the handle is bound and not released, nobody else is inside; the arrays are as long as they say.
        // What the views point at is absurd on purpose, in a process that exists to see what comes of it.
        let status = unsafe {
            (self.raw_entry())(
                self.raw_form(),
                &ctx,
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_ptr(),
                outputs.len(),
                states.as_ptr(),
                states.len(),
                &mut error,
            )
        };
        if status != STATUS_OK {
            self.poisoned.store(true, Ordering::Release);
        }
        self.plugin().check(self.form(), status, &mut error)
    }

    /// One of [`NULL_CALLS`]; the views are good ones.
    pub fn null_call(
        &self,
        _: &Throwaway,
        which: usize,
        inputs: &[TensorView],
        outputs: &[TensorView],
    ) -> Result<Status, PluginError> {
        let workspace = Workspace::lease(self)?;
        let ctx = context(&workspace);
        let mut error = Error::EMPTY;
        let (handle, at) = (self.raw_form(), &raw const ctx);
        let (i, n, o, m) = (
            inputs.as_ptr(),
            inputs.len(),
            outputs.as_ptr(),
            outputs.len(),
        );
        let (no_handle, no_ctx, none) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
        let (told, untold) = (&raw mut error, std::ptr::null_mut());
        let entry = self.raw_entry();
        // SAFETY: as `call_raw`; what is null is so on purpose.
        let status = unsafe {
            match which {
                0 => entry(no_handle, at, i, n, o, m, none, 0, told),
                1 => entry(handle, no_ctx, i, n, o, m, none, 0, told),
                2 => entry(handle, at, none, n, none, m, none, 0, told),
                3 => entry(handle, at, none, 0, none, 0, none, 0, told),
                _ => entry(handle, at, none, n, none, m, none, 0, untold),
            }
        };
        // SAFETY: filled by the plugin, or as it was.
        unsafe { owned::take_error(status, &mut error) };
        Ok(status)
    }
}

fn context(workspace: &Workspace<'_>) -> CallCtx {
    CallCtx {
        struct_size: size_of::<CallCtx>() as u32,
        flags: 0,
        queue: std::ptr::null_mut(),
        workspace: workspace.memory(),
    }
}
