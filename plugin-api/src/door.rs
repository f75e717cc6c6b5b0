//! The Rust door, and what fills the vtables behind it.
//!
//! [`PluginRoot`] is the whole abi_stable surface, frozen as 1.0 in a crate of its own: identity,
//! versions, and one function that exchanges the two tables as opaque pointers. Everything that may
//! grow lives in the tables.
//!
//! [`export_backend!`](crate::export_backend) exports the root module of a [`Backend`]. The entries
//! below wrap every call into the backend in `catch_unwind`, so nothing ever unwinds across `extern
//! "C"`: a panic becomes [`STATUS_PANICKED`] with its text as message.
//! A bound instance that failed or panicked is poisoned: it answers
//! [`STATUS_POISONED`](crate::abi::STATUS_POISONED) from then on and is never entered again, only
//! dropped.
//!
//! Not here: opening libraries, and the checks a host makes before it trusts one (host).

mod device;

use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::OnceLock;

use abi_stable::library::{CheckTypeLayout, LibHeader, RootModuleResult};
use abi_stable::std_types::{RBoxError, RStr};
pub use structures_plugin_door::{PluginRoot, PluginRootRef, DOOR_VERSION};

use crate::abi::{
    BindArgs, Bytes, CallCtx, DeviceVTable, Error, FormFacts, FormVTable, HostVTable, PluginVTable,
    Status, Str, TensorView, API_MINOR, API_VERSION, STATUS_FAILED, STATUS_OK, STATUS_PANICKED,
};
use crate::describe::{Devices, ProbeShapes};
use crate::owned::{put_error, read_str};
use crate::sdk::{
    disjoint, plain_call, Backend, BindRequest, BoundForm, ConcurrentForm, Failure, Host, Tensor,
    TensorMut, PLAIN,
};

/// Exports a [`Backend`] as this library's only plugin. Once a crate, in a `cdylib`.
///
/// Build it with `panic = "unwind"`, Cargo's default: with `abort` a panic ends the host's process
/// instead of becoming a status. The library's description says which it is, and the validator
/// names one that aborts.
#[macro_export]
macro_rules! export_backend {
    ($backend:ty) => {
        const _: () = {
            // The name abi_stable looks up; a test of this crate compares it with abi_stable's own.
            #[export_name = "_1as_0lib_1header_0root_bmodule_bloader"]
            pub static ROOT: $crate::door::LibraryHeader =
                $crate::door::library_header::<$backend, { cfg!(panic = "abort") }>();
        };
    };
}

/// What the exported static is; only [`export_backend!`](crate::export_backend) names it.
#[doc(hidden)]
pub type LibraryHeader = LibHeader;

/// The exported static of a backend; only [`export_backend!`](crate::export_backend) calls it.
#[doc(hidden)]
pub const fn library_header<T: Backend, const ABORTS: bool>() -> LibraryHeader {
    // SAFETY: `construct` answers a `PluginRootRef`, by way of abi_stable's own erasing helper.
    unsafe {
        LibHeader::from_constructor::<PluginRootRef>(construct::<T, ABORTS>, CheckTypeLayout::Yes)
    }
}

extern "C" fn construct<T: Backend, const ABORTS: bool>() -> RootModuleResult {
    abi_stable::library::__call_root_module_loader(root::<T, ABORTS>)
}

/// The root module of a backend. A description that panics is an error, not the end of the process.
fn root<T: Backend, const ABORTS: bool>() -> Result<PluginRootRef, RBoxError> {
    use abi_stable::prefix_type::PrefixTypeTrait;
    let description = guard(|| Ok(T::description())).map_err(RBoxError::new)?;
    let root = PluginRoot {
        // Leaked like the root module itself: once a process.
        id: RStr::from_str(description.id.leak()),
        version: RStr::from_str(description.version.leak()),
        api: RStr::from_str(API_VERSION),
        exchange: exchange::<T, ABORTS>,
    };
    Ok(root.leak_into_prefix())
}

unsafe extern "C" fn exchange<T: Backend, const ABORTS: bool>(
    host: *const c_void,
) -> *const c_void {
    // SAFETY: null or a host's table, which starts with its size, says the door.
    if let Some(size) = unsafe { host.cast::<u32>().as_ref() } {
        if (*size as usize) < HostVTable::SIZE_1_0 {
            return std::ptr::null();
        }
    }
    std::ptr::from_ref(&Tables::<T, ABORTS>::PLUGIN).cast()
}

/// The table of a backend. Also what a host's tests use to run a backend that is linked in.
pub fn plugin_vtable<T: Backend>() -> &'static PluginVTable {
    &Tables::<T, false>::PLUGIN
}

struct Tables<T, const ABORTS: bool>(PhantomData<T>);

impl<T: Backend, const ABORTS: bool> Tables<T, ABORTS> {
    const DEVICE: DeviceVTable = device::table::<T>();

    const PLUGIN: PluginVTable = PluginVTable {
        struct_size: size_of::<PluginVTable>() as u32,
        api_minor: API_MINOR,
        describe: describe::<T, ABORTS>,
        open: open::<T>,
        close: close::<T>,
        probe: probe::<T>,
        bind: bind::<T>,
        form: &FORM,
        device: if T::DEVICES {
            &Self::DEVICE
        } else {
            std::ptr::null()
        },
        devices: if T::DEVICES { Some(devices::<T>) } else { None },
    };
}

static FORM: FormVTable = FormVTable {
    struct_size: size_of::<FormVTable>() as u32,
    api_minor: API_MINOR,
    call,
    facts,
    release,
};

unsafe extern "C" fn describe<T: Backend, const ABORTS: bool>(
    out: *mut Bytes,
    error: *mut Error,
) -> Status {
    let made = guard(|| {
        let mut description = T::description();
        description.panic = Some(if ABORTS { "abort" } else { "unwind" }.into());
        serde_json::to_vec(&description)
            .map_err(|e| Failure::failed("description", format!("does not serialise: {e}")))
    });
    // SAFETY: `out` and `error` are the caller's, null or writable.
    unsafe { answer(made.map(Bytes::from_vec), out, error) }
}

unsafe extern "C" fn open<T: Backend>(
    host: *const HostVTable,
    plugin: *mut *mut c_void,
    error: *mut Error,
) -> Status {
    let made = guard(|| {
        // SAFETY: the ABI promises that the host's table outlives the plugin instance.
        let host = unsafe { Host::from_raw(host) }?;
        T::open(host)
    });
    let made = made.map(|backend| Box::into_raw(Box::new(backend)).cast::<c_void>());
    // SAFETY: as in `describe`.
    unsafe { answer(made, plugin, error) }
}

unsafe extern "C" fn close<T: Backend>(plugin: *mut c_void) {
    if !plugin.is_null() {
        // SAFETY: made by `open::<T>`, closed once.
        let backend = unsafe { Box::from_raw(plugin.cast::<T>()) };
        let _ = guard(|| {
            drop(backend);
            Ok(())
        });
    }
}

unsafe extern "C" fn probe<T: Backend>(
    plugin: *mut c_void,
    form: Str,
    device: u32,
    shapes: Str,
    out: *mut Bytes,
    error: *mut Error,
) -> Status {
    let made = guard(|| {
        // SAFETY: made by `open::<T>`; the texts live for the call.
        let (backend, form, shapes) = unsafe {
            (
                backend::<T>(plugin)?,
                read_str(form, "form")?,
                read_str(shapes, "shapes")?,
            )
        };
        let shapes: ProbeShapes = serde_json::from_str(shapes)
            .map_err(|e| Failure::invalid("params", format!("shapes: {e}")))?;
        on_the_cpu::<T>(device)?;
        let report = backend.probe(form, device, &shapes)?;
        serde_json::to_vec(&report)
            .map_err(|e| Failure::failed("probe", format!("does not serialise: {e}")))
    });
    // SAFETY: as in `describe`.
    unsafe { answer(made.map(Bytes::from_vec), out, error) }
}

unsafe extern "C" fn devices<T: Backend>(
    plugin: *mut c_void,
    out: *mut Bytes,
    error: *mut Error,
) -> Status {
    let made = guard(|| {
        // SAFETY: made by `open::<T>`.
        let devices = unsafe { backend::<T>(plugin) }?.devices()?;
        serde_json::to_vec(&Devices { devices })
            .map_err(|e| Failure::failed("devices", format!("does not serialise: {e}")))
    });
    // SAFETY: as in `describe`.
    unsafe { answer(made.map(Bytes::from_vec), out, error) }
}

unsafe extern "C" fn bind<T: Backend>(
    plugin: *mut c_void,
    args: *const BindArgs,
    form: *mut *mut c_void,
    error: *mut Error,
) -> Status {
    let made = guard(|| {
        // SAFETY: made by `open::<T>`; the arguments are as the ABI says for the length of the
        // call.
        let (backend, args) = unsafe { (backend::<T>(plugin)?, args.as_ref()) };
        let args = args.ok_or_else(|| Failure::invalid("argument", "the bind args are null"))?;
        // SAFETY: as above.
        let request = unsafe { BindRequest::from_raw(args) }?;
        on_the_cpu::<T>(request.device)?;
        instance::<T>(&request, backend.bind(&request)?)
    });
    let made = made.map(|form| Box::into_raw(Box::new(form)).cast::<c_void>());
    // SAFETY: as in `describe`.
    unsafe { answer(made, form, error) }
}

/// A form and what it declared belong together: calls that may overlap need a form that takes them.
fn instance<T: Backend>(
    request: &BindRequest<'_>,
    form: Box<dyn BoundForm>,
) -> Result<Instance, Failure> {
    let description = T::description();
    let declared = description
        .form(&request.params.structure, request.form)
        .is_some_and(|form| form.concurrent);
    let instance = Instance::new(form);
    if declared && instance.shared.is_none() {
        let text = format!(
            "form `{}` declares `concurrent`, what `bind` made is no `Concurrent`",
            request.form
        );
        return Err(Failure::failed("description", text));
    }
    Ok(instance)
}

/// A backend without devices is asked for the CPU and nothing else.
fn on_the_cpu<T: Backend>(device: u32) -> Result<(), Failure> {
    if T::DEVICES || device == 0 {
        return Ok(());
    }
    let text = format!("device {device}, this backend is of the CPU (0)");
    Err(Failure::refused("device_unknown", text))
}

/// # Safety
/// `plugin` is null or what `open::<T>` made and `close` has not taken.
unsafe fn backend<'a, T: Backend>(plugin: *mut c_void) -> Result<&'a T, Failure> {
    // SAFETY: promised by the caller.
    unsafe { plugin.cast_const().cast::<T>().as_ref() }
        .ok_or_else(|| Failure::invalid("argument", "the plugin instance is null"))
}

/// A bound form behind its handle.
struct Instance {
    state: AtomicU8,
    /// Why it is poisoned.
    reason: OnceLock<String>,
    /// A box, as its pointer: the one below points into it.
    form: NonNull<dyn BoundForm>,
    /// The form again, where its calls may overlap; it is not borrowed mutably then.
    shared: Option<NonNull<dyn ConcurrentForm>>,
}

const IDLE: u8 = 0;
const BUSY: u8 = 1;
const POISONED: u8 = 2;

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: a box that was leaked in `new`; both pointers end with this.
        drop(unsafe { Box::from_raw(self.form.as_ptr()) });
    }
}

impl Instance {
    fn new(form: Box<dyn BoundForm>) -> Self {
        let form = NonNull::from(Box::leak(form));
        // SAFETY: leaked just now, and nobody else has it.
        let shared = unsafe { form.as_ref() }.concurrent().map(NonNull::from);
        Instance {
            state: AtomicU8::new(IDLE),
            reason: OnceLock::new(),
            form,
            shared,
        }
    }

    /// Runs `f` on the form unless it is poisoned; poisons it when `f` fails or panics. What went
    /// wrong goes where the caller says: handing it back as a result moves it through memory, which
    /// cost more than the rest of a call.
    ///
    /// That calls do not overlap is the caller's promise, as it is that the memory of a view is there;
    /// the host keeps it with a lock of its own. What is seen here is a call inside a call, and most
    /// calls of a host that breaks the promise. (An exchange would see them all and cost as much as
    /// everything else here.)
    ///
    /// # Safety
    /// No other call of this function runs on another thread, unless the form is shared.
    #[inline]
    unsafe fn enter(
        &self,
        failure: &mut Option<Failure>,
        f: impl FnOnce(Entered<'_>) -> Result<(), Failure>,
    ) {
        let state = self.state.load(Ordering::Acquire);
        if state != IDLE {
            *failure = Some(self.closed(state));
            return;
        }
        let entered = match self.shared {
            // SAFETY: it lives as long as the instance and is never borrowed mutably.
            Some(form) => Entered::Shared(unsafe { form.as_ref() }),
            None => {
                self.state.store(BUSY, Ordering::Relaxed);
                // SAFETY: promised by the caller; a call inside a call was turned away above.
                Entered::Alone(unsafe { &mut *self.form.as_ptr() })
            }
        };
        guard_into(failure, || f(entered));
        match failure {
            None if self.shared.is_none() => self.state.store(IDLE, Ordering::Release),
            None => {}
            Some(failure) => self.after(failure),
        }
    }

    /// After a call that did not succeed.
    #[cold]
    fn after(&self, failure: &Failure) {
        if matches!(failure.status, STATUS_FAILED | STATUS_PANICKED) {
            let _ = self.reason.set(failure.to_string());
            self.state.store(POISONED, Ordering::Release);
        } else if self.shared.is_none() {
            self.state.store(IDLE, Ordering::Release);
        }
    }

    #[cold]
    fn closed(&self, state: u8) -> Failure {
        if state == BUSY {
            return Failure::invalid(
                "overlapping_call",
                "another call on this instance is running",
            );
        }
        let reason = self.reason.get().map_or("", String::as_str);
        Failure::poisoned(format!("the instance is not entered again after: {reason}"))
    }
}

/// A form that may be called now.
enum Entered<'a> {
    Alone(&'a mut dyn BoundForm),
    Shared(&'a dyn ConcurrentForm),
}

impl Entered<'_> {
    #[inline]
    fn call(
        self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        match self {
            Entered::Alone(form) => form.call(ctx, inputs, outputs, states),
            Entered::Shared(form) => form.call(ctx, inputs, outputs, states),
        }
    }

    fn facts(self) -> FormFacts {
        match self {
            Entered::Alone(form) => form.facts(),
            Entered::Shared(form) => form.facts(),
        }
    }
}

unsafe extern "C" fn call(
    form: *mut c_void,
    ctx: *const CallCtx,
    inputs: *const TensorView,
    n_inputs: usize,
    outputs: *const TensorView,
    n_outputs: usize,
    states: *const TensorView,
    n_states: usize,
    error: *mut Error,
) -> Status {
    let mut failure = None;
    // SAFETY: `form` is null or an instance of `bind`; the rest is as the ABI says for the length of
    // the call.
    unsafe {
        match (form.cast_const().cast::<Instance>().as_ref(), ctx.as_ref()) {
            (Some(instance), Some(ctx)) if ctx.struct_size as usize >= size_of::<CallCtx>() => {
                let lists = (
                    views(inputs, n_inputs),
                    views(outputs, n_outputs),
                    views(states, n_states),
                );
                match lists {
                    (Some(inputs), Some(outputs), Some(states)) => {
                        run(instance, ctx, inputs, outputs, states, &mut failure);
                    }
                    _ => failure = Some(Failure::invalid("argument", "tensors without an array")),
                }
            }
            (form, ctx) => failure = Some(unusable(form.is_some(), ctx)),
        }
        match failure {
            None => STATUS_OK,
            Some(failure) => put_error(error, failure),
        }
    }
}

#[cold]
fn unusable(form: bool, ctx: Option<&CallCtx>) -> Failure {
    let text = match ctx {
        _ if !form => "the form instance is null".into(),
        None => "the call context is null".into(),
        Some(ctx) => format!("a call context of {} bytes", ctx.struct_size),
    };
    Failure::invalid("argument", text)
}

/// Runs the form on checked tensors.
///
/// # Safety
/// The views are lent to this call alone, and calls of a form that is not shared do not overlap.
#[inline]
unsafe fn run(
    instance: &Instance,
    ctx: &CallCtx,
    inputs: &[TensorView],
    outputs: &[TensorView],
    states: &[TensorView],
    failure: &mut Option<Failure>,
) {
    let mut made = [const { MaybeUninit::uninit() }; PLAIN];
    // SAFETY: promised by the caller.
    unsafe {
        match plain_call(inputs, outputs, states, &mut made) {
            Some((inputs, outputs, states)) => {
                instance.enter(failure, |form| form.call(ctx, inputs, outputs, states))
            }
            None => instance.enter(failure, |form| {
                with_copies(form, ctx, inputs, outputs, states)
            }),
        }
    }
}

/// Views of one argument list that live on the stack; longer lists go to the heap. 8 covers every
/// span of the catalog.
const INLINE: usize = 8;

/// The long way: views that need a closer look, or that are wrong.
///
/// # Safety
/// The views are lent to this call alone.
#[cold]
unsafe fn with_copies(
    form: Entered<'_>,
    ctx: &CallCtx,
    inputs: &[TensorView],
    outputs: &[TensorView],
    states: &[TensorView],
) -> Result<(), Failure> {
    let (mut a, mut b, mut c) = (List::new(), List::new(), List::new());
    for (i, view) in inputs.iter().enumerate() {
        // SAFETY: promised by the caller.
        let tensor = unsafe { Tensor::from_view(view) };
        a.push(tensor.map_err(|failure| at("input", i, failure))?);
    }
    for (list, views, what) in [(&mut b, outputs, "output"), (&mut c, states, "state")] {
        for (i, view) in views.iter().enumerate() {
            // SAFETY: promised by the caller; sharing is checked right below.
            let tensor = unsafe { TensorMut::from_view(view) };
            list.push(tensor.map_err(|failure| at(what, i, failure))?);
        }
    }
    exclusive(a.as_mut(), outputs, states)?;
    form.call(ctx, a.as_mut(), b.as_mut(), c.as_mut())
}

#[cold]
fn at(what: &str, index: usize, failure: Failure) -> Failure {
    Failure {
        message: format!("{what} {index}: {}", failure.message),
        ..failure
    }
}

/// Outputs and states share memory with nothing; an input that is a view of a state is marked.
fn exclusive(
    inputs: &mut [Tensor<'_>],
    outputs: &[TensorView],
    states: &[TensorView],
) -> Result<(), Failure> {
    let shared = |what: &str, i: usize, with: &str, j: usize| {
        let text = format!("{what} {i} shares memory with {with} {j}");
        Err(Failure::invalid("view_aliased", text))
    };
    for (i, output) in outputs.iter().enumerate() {
        for (j, input) in inputs.iter().enumerate() {
            if !disjoint(output, input.view()) {
                return shared("output", i, "input", j);
            }
        }
        for (j, other) in outputs[..i].iter().enumerate() {
            if !disjoint(output, other) {
                return shared("output", i, "output", j);
            }
        }
        for (j, state) in states.iter().enumerate() {
            if !disjoint(output, state) {
                return shared("output", i, "state", j);
            }
        }
    }
    for (i, state) in states.iter().enumerate() {
        for (j, other) in states[..i].iter().enumerate() {
            if !disjoint(state, other) {
                return shared("state", i, "state", j);
            }
        }
        for input in inputs
            .iter_mut()
            .filter(|input| !disjoint(state, input.view()))
        {
            input.mark_aliased();
        }
    }
    Ok(())
}

/// A short list without an allocation, and without touching the places it does not use: a call is
/// a few nanoseconds, and filling them took two hundred.
struct List<T> {
    inline: [MaybeUninit<T>; INLINE],
    /// All items, once there are more than fit inline.
    spilled: Vec<T>,
    len: usize,
}

impl<T> List<T> {
    fn new() -> Self {
        // Items are left behind when they spill, and when the list is dropped.
        const { assert!(!std::mem::needs_drop::<T>()) };
        List {
            inline: [const { MaybeUninit::uninit() }; INLINE],
            spilled: Vec::new(),
            len: 0,
        }
    }

    fn push(&mut self, item: T) {
        match self.inline.get_mut(self.len) {
            Some(place) => {
                place.write(item);
            }
            None => {
                if self.spilled.is_empty() {
                    for place in &self.inline {
                        // SAFETY: all inline places were written, and are not read again.
                        self.spilled.push(unsafe { place.assume_init_read() });
                    }
                }
                self.spilled.push(item);
            }
        }
        self.len += 1;
    }

    fn as_mut(&mut self) -> &mut [T] {
        if self.len > INLINE {
            return &mut self.spilled;
        }
        // SAFETY: the first `len` places were written.
        unsafe { std::slice::from_raw_parts_mut(self.inline.as_mut_ptr().cast(), self.len) }
    }
}

unsafe extern "C" fn facts(form: *mut c_void, out: *mut FormFacts) {
    let mut facts = FormFacts::default();
    // SAFETY: null or an instance of `bind`; asked once before any call, says the ABI. `out` is null or
    // writable.
    unsafe {
        if let Some(instance) = form.cast_const().cast::<Instance>().as_ref() {
            instance.enter(&mut None, |form| {
                facts = form.facts();
                Ok(())
            });
        }
        if !out.is_null() {
            out.write(facts);
        }
    }
}

unsafe extern "C" fn release(form: *mut c_void) {
    if !form.is_null() {
        // SAFETY: made by `bind`, released once.
        let instance = unsafe { Box::from_raw(form.cast::<Instance>()) };
        let _ = guard(|| {
            drop(instance);
            Ok(())
        });
    }
}

/// `None`: there are some and no array.
///
/// # Safety
/// `views` has `n` valid elements during `'a`, or `n` is 0.
#[inline]
unsafe fn views<'a>(views: *const TensorView, n: usize) -> Option<&'a [TensorView]> {
    match (n, views.is_null()) {
        (0, _) => Some(&[]),
        (_, true) => None,
        // SAFETY: promised by the caller.
        (n, false) => Some(unsafe { std::slice::from_raw_parts(views, n) }),
    }
}

/// Writes the result to the caller's out-parameters.
///
/// # Safety
/// `out` and `error` are null or writable.
unsafe fn answer<R>(made: Result<R, Failure>, out: *mut R, error: *mut Error) -> Status {
    match made {
        // SAFETY: promised by the caller.
        Ok(value) if !out.is_null() => unsafe { out.write(value) },
        Ok(_) => {
            let failure = Failure::invalid("argument", "the out-parameter is null");
            // SAFETY: promised by the caller.
            return unsafe { put_error(error, failure) };
        }
        // SAFETY: promised by the caller.
        Err(failure) => return unsafe { put_error(error, failure) },
    }
    STATUS_OK
}

/// Runs the backend's code; a panic becomes a [`Failure`] with its text.
fn guard<R>(f: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    catch_unwind(AssertUnwindSafe(f))
        .unwrap_or_else(|payload| Err(Failure::panicked(text(payload))))
}

/// As [`guard`], with the failure in a place of the caller's.
#[inline]
fn guard_into(failure: &mut Option<Failure>, f: impl FnOnce() -> Result<(), Failure>) {
    let caught = catch_unwind(AssertUnwindSafe(|| {
        if let Err(e) = f() {
            *failure = Some(e);
        }
    }));
    if let Err(payload) = caught {
        *failure = Some(Failure::panicked(text(payload)));
    }
}

fn text(payload: Box<dyn Any + Send>) -> String {
    if let Some(text) = payload.downcast_ref::<&'static str>() {
        return (*text).to_string();
    }
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => {
            // Dropping a foreign payload runs its author's code, which may panic again.
            std::mem::forget(other);
            "a panic without a text".into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Contract, DType, STATUS_INVALID, STATUS_POISONED, STATUS_REFUSED};
    use crate::describe::{Description, FormDecl};
    use crate::owned::{read_bytes, take_error};
    use crate::sdk::Concurrent;
    use std::sync::atomic::{AtomicPtr, AtomicUsize};

    #[test]
    fn the_exported_name_is_the_one_abi_stable_looks_up() {
        let name = abi_stable::library::ROOT_MODULE_LOADER_NAME;
        let line = format!("#[export_name = \"{name}\"]");
        assert_eq!(include_str!("door.rs").matches(&line).count(), 1);
    }

    /// Copies its input to its output, negated; the form's name plants a fault.
    struct Planted;

    struct Negate(String);

    static DROPPED: AtomicUsize = AtomicUsize::new(0);

    impl Backend for Planted {
        fn description() -> Description {
            let mut description = Description::new("planted", "tests", "0.0.1");
            description.forms = vec![FormDecl::new("negate", "good", "none")];
            description
        }

        fn open(_: Host) -> Result<Self, Failure> {
            Ok(Planted)
        }

        fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
            match request.form {
                "refuses_to_bind" => Err(Failure::refused("envelope", "planted")),
                "panics_at_bind" => panic!("planted at bind"),
                other => Ok(Box::new(Negate(other.to_string()))),
            }
        }
    }

    impl BoundForm for Negate {
        fn facts(&self) -> FormFacts {
            assert!(self.0 != "panics_in_facts", "planted in facts");
            FormFacts {
                packed_bytes: 7,
                ..FormFacts::default()
            }
        }

        fn call(
            &mut self,
            _: &CallCtx,
            inputs: &[Tensor<'_>],
            outputs: &mut [TensorMut<'_>],
            states: &mut [TensorMut<'_>],
        ) -> Result<(), Failure> {
            match self.0.as_str() {
                "fails" => return Err(Failure::failed("kernel", "planted")),
                "refuses" => return Err(Failure::refused("form_band", "planted")),
                "panics" => panic!("planted {}", 17),
                "panics_oddly" => std::panic::panic_any(Odd),
                _ => {}
            }
            assert!(inputs.iter().skip(1).all(|input| input.as_f32().is_err()));
            let _ = states;
            let values: Vec<f32> = inputs[0].to_f32_vec()?.iter().map(|v| -v).collect();
            outputs[0].write_f32(&values)
        }
    }

    impl Drop for Negate {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            assert!(self.0 != "panics_in_drop", "planted in drop");
        }
    }

    struct Odd;

    impl Drop for Odd {
        fn drop(&mut self) {
            panic!("a payload that panics when it is dropped");
        }
    }

    /// A view that may be written through.
    fn view(data: &mut [f32]) -> TensorView {
        let dims = [data.len()];
        let tensor = TensorMut::from_f32(data, &dims).expect("fits");
        *tensor.as_tensor().view()
    }

    /// Calls the tables as a host does.
    struct Bound {
        table: &'static PluginVTable,
        plugin: *mut c_void,
        form: *mut c_void,
    }

    const TABLE: fn() -> &'static PluginVTable = plugin_vtable::<Planted>;

    impl Bound {
        fn new(form: &str) -> Result<Bound, Failure> {
            Bound::of(TABLE, form)
        }

        fn of(table: fn() -> &'static PluginVTable, form: &str) -> Result<Bound, Failure> {
            let table = table();
            let (mut plugin, mut handle) = (std::ptr::null_mut(), std::ptr::null_mut());
            let mut error = Error::EMPTY;
            let contract = Contract::capacity(DType::F32, 1);
            let params = serde_json::to_string(&crate::describe::BindParams::default());
            let params = params.expect("serialises");
            let args = BindArgs {
                struct_size: size_of::<BindArgs>() as u32,
                device: 0,
                form: Str::new(form),
                span: Str::new("all"),
                weight_names: std::ptr::null(),
                weights: std::ptr::null(),
                n_weights: 0,
                statistic_names: std::ptr::null(),
                statistics: std::ptr::null(),
                n_statistics: 0,
                params: Str::new(&params),
                contract: &contract,
            };
            // SAFETY: all arguments are as the ABI says and outlive the calls.
            unsafe {
                let status = (table.open)(Host::detached().raw(), &mut plugin, &mut error);
                assert_eq!(status, STATUS_OK);
                match (table.bind)(plugin, &args, &mut handle, &mut error) {
                    STATUS_OK => Ok(Bound {
                        table,
                        plugin,
                        form: handle,
                    }),
                    status => {
                        (table.close)(plugin);
                        Err(take_error(status, &mut error))
                    }
                }
            }
        }

        fn call(
            &self,
            inputs: &[TensorView],
            outputs: &[TensorView],
            states: &[TensorView],
        ) -> Result<(), Failure> {
            let mut error = Error::EMPTY;
            // SAFETY: the handle is bound, the views live on the caller's stack.
            unsafe {
                match (FORM.call)(
                    self.form,
                    &CallCtx::NONE,
                    inputs.as_ptr(),
                    inputs.len(),
                    outputs.as_ptr(),
                    outputs.len(),
                    states.as_ptr(),
                    states.len(),
                    &mut error,
                ) {
                    STATUS_OK => Ok(()),
                    status => Err(take_error(status, &mut error)),
                }
            }
        }

        fn once(&self) -> Result<(), Failure> {
            let (mut x, mut y) = ([1.0, 2.0], [0.0; 2]);
            self.call(&[view(&mut x)], &[view(&mut y)], &[])
                .map(|()| assert_eq!(y, [-1.0, -2.0]))
        }
    }

    impl Drop for Bound {
        fn drop(&mut self) {
            // SAFETY: made by the same table, dropped once.
            unsafe {
                (FORM.release)(self.form);
                (self.table.close)(self.plugin);
            }
        }
    }

    #[test]
    fn a_good_form_runs_again_and_again() {
        let bound = Bound::new("good").expect("binds");
        let mut facts = FormFacts::default();
        // SAFETY: a bound handle and a writable out-parameter.
        unsafe { (FORM.facts)(bound.form, &mut facts) };
        assert_eq!(facts.packed_bytes, 7);
        for _ in 0..3 {
            bound.once().expect("runs");
        }
    }

    #[test]
    fn describe_and_probe_answer_documents() {
        let (mut out, mut error) = (Bytes::EMPTY, Error::EMPTY);
        // SAFETY: writable out-parameters; texts outlive the calls; `describe` needs no instance.
        unsafe {
            assert_eq!((TABLE().describe)(&mut out, &mut error), STATUS_OK);
            let read = |out: &mut Bytes| -> Description {
                serde_json::from_slice(&read_bytes(out)).expect("a document")
            };
            let mut described = read(&mut out);
            assert_eq!(described.panic.take().as_deref(), Some("unwind"));
            assert_eq!(described, Planted::description());
            let aborting = Tables::<Planted, true>::PLUGIN.describe;
            assert_eq!(aborting(&mut out, &mut error), STATUS_OK);
            assert_eq!(read(&mut out).panic.as_deref(), Some("abort"));
            let bound = Bound::new("good").expect("binds");
            let mut probe = |form: &str, shapes: &str| {
                let (form, shapes) = (Str::new(form), Str::new(shapes));
                match (TABLE().probe)(bound.plugin, form, 0, shapes, &mut out, &mut error) {
                    STATUS_OK => Ok(String::from_utf8(read_bytes(&mut out)).expect("text")),
                    status => Err(take_error(status, &mut error)),
                }
            };
            let shapes = r#"{"structure":"negate","span":"","rows":[],"dims":{},"variant":{}}"#;
            assert!(probe("good", shapes)
                .expect("answers")
                .contains(r#""probed":true"#));
            assert!(probe("bad", shapes)
                .expect("answers")
                .contains("form_unknown"));
            assert_eq!(probe("good", "[").expect_err("no document").code, "params");
        }
    }

    #[test]
    fn a_failure_or_a_panic_poisons_and_a_refusal_does_not() {
        for (form, code, text, poisons) in [
            ("refuses", "form_band", "planted", false),
            ("fails", "kernel", "planted", true),
            ("panics", "panicked", "planted 17", true),
            ("panics_oddly", "panicked", "a panic without a text", true),
        ] {
            let bound = Bound::new(form).expect("binds");
            let first = bound.once().expect_err("planted");
            assert_eq!(
                (first.code.as_str(), first.message.as_str()),
                (code, text),
                "{form}"
            );
            let second = bound.once().expect_err("planted");
            let expected = if poisons {
                STATUS_POISONED
            } else {
                STATUS_REFUSED
            };
            assert_eq!(second.status, expected, "{form}: {second}");
            assert!(
                !poisons || second.message.contains(text),
                "{form}: {second}"
            );
        }
    }

    #[test]
    fn panics_elsewhere_stay_inside_too() {
        let failure = Bound::new("panics_at_bind").err().expect("planted");
        assert_eq!(
            (failure.status, failure.message.as_str()),
            (STATUS_PANICKED, "planted at bind")
        );
        assert_eq!(
            Bound::new("refuses_to_bind").err().expect("planted").code,
            "envelope"
        );

        let bound = Bound::new("panics_in_facts").expect("binds");
        let mut facts = FormFacts {
            packed_bytes: 1,
            ..FormFacts::default()
        };
        // SAFETY: as above.
        unsafe { (FORM.facts)(bound.form, &mut facts) };
        assert_eq!(facts.packed_bytes, 0);
        assert_eq!(bound.once().expect_err("poisoned").status, STATUS_POISONED);

        let before = DROPPED.load(Ordering::Relaxed);
        drop(Bound::new("panics_in_drop").expect("binds"));
        assert!(DROPPED.load(Ordering::Relaxed) > before);
    }

    #[test]
    fn a_call_inside_a_call_is_turned_away() {
        let instance = Instance::new(Box::new(Negate("good".into())));
        let (mut outer, mut inner, mut later) = (None, None, None);
        // SAFETY: one thread.
        unsafe {
            instance.enter(&mut outer, |_| {
                instance.enter(&mut inner, |_| Ok(()));
                Ok(())
            });
            instance.enter(&mut later, |_| Ok(()));
        }
        assert_eq!(outer, None);
        let failure = inner.expect("the inner call is turned away");
        assert_eq!(
            (failure.status, failure.code.as_str()),
            (STATUS_INVALID, "overlapping_call")
        );
        assert_eq!(later, None, "the refused call left the instance alive");
    }

    /// Waits until as many calls are inside as it says, or gives up.
    struct Meet {
        inside: AtomicUsize,
        wanted: usize,
    }

    impl ConcurrentForm for Meet {
        fn facts(&self) -> FormFacts {
            FormFacts {
                packed_bytes: 9,
                ..FormFacts::default()
            }
        }

        fn call(
            &self,
            _: &CallCtx,
            _: &[Tensor<'_>],
            _: &mut [TensorMut<'_>],
            _: &mut [TensorMut<'_>],
        ) -> Result<(), Failure> {
            self.inside.fetch_add(1, Ordering::SeqCst);
            let since = std::time::Instant::now();
            while self.inside.load(Ordering::SeqCst) < self.wanted {
                if since.elapsed().as_secs() > 20 {
                    return Err(Failure::failed("alone", "nobody else came in"));
                }
                std::thread::yield_now();
            }
            Ok(())
        }
    }

    struct Shares;

    impl Backend for Shares {
        fn description() -> Description {
            let form = |name: &str| FormDecl {
                concurrent: true,
                ..FormDecl::new("", name, "none")
            };
            let mut description = Description::new("shares", "tests", "0.0.1");
            description.forms = vec![form("meets"), form("alone"), form("negates")];
            description
        }

        fn open(_: Host) -> Result<Self, Failure> {
            Ok(Shares)
        }

        fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
            let meet = |wanted| {
                Box::new(Concurrent(Meet {
                    inside: AtomicUsize::new(0),
                    wanted,
                }))
            };
            match request.form {
                "meets" => Ok(meet(3)),
                // Waits for nobody, fails at once where it is not the first.
                "alone" => Ok(meet(0)),
                other => Ok(Box::new(Negate(other.into()))),
            }
        }
    }

    #[test]
    fn calls_of_a_concurrent_form_overlap() {
        let bound = Bound::of(plugin_vtable::<Shares>, "meets").expect("binds");
        let mut facts = FormFacts::default();
        // SAFETY: a bound handle and a writable out-parameter.
        unsafe { (FORM.facts)(bound.form, &mut facts) };
        assert_eq!(facts.packed_bytes, 9);
        let form = AtomicPtr::new(bound.form);
        std::thread::scope(|scope| {
            let call = || {
                let mut error = Error::EMPTY;
                let null = std::ptr::null();
                let form = form.load(Ordering::SeqCst);
                // SAFETY: bound, and declared to take calls that overlap; no tensors.
                unsafe { (FORM.call)(form, &CallCtx::NONE, null, 0, null, 0, null, 0, &mut error) }
            };
            let calls = [0, 1, 2].map(|_| scope.spawn(call));
            for call in calls {
                assert_eq!(call.join().expect("returns"), STATUS_OK);
            }
        });
    }

    #[test]
    fn a_concurrent_form_is_poisoned_like_any_other() {
        struct Fails;
        impl ConcurrentForm for Fails {
            fn call(
                &self,
                _: &CallCtx,
                inputs: &[Tensor<'_>],
                _: &mut [TensorMut<'_>],
                _: &mut [TensorMut<'_>],
            ) -> Result<(), Failure> {
                match inputs.len() {
                    1 => Err(Failure::refused("form_band", "planted")),
                    _ => panic!("planted"),
                }
            }
        }
        let instance = Instance::new(Box::new(Concurrent(Fails)));
        let call = |inputs: &[Tensor<'_>]| {
            let mut failure = None;
            // SAFETY: the form is shared.
            unsafe {
                instance.enter(&mut failure, |form| {
                    form.call(&CallCtx::NONE, inputs, &mut [], &mut [])
                });
            }
            failure.expect("planted").status
        };
        assert_eq!(call(&[Tensor::ABSENT]), STATUS_REFUSED);
        assert_eq!(call(&[Tensor::ABSENT]), STATUS_REFUSED, "alive");
        assert_eq!(call(&[]), STATUS_PANICKED);
        assert_eq!(call(&[Tensor::ABSENT]), STATUS_POISONED);
    }

    #[test]
    fn who_declares_concurrent_has_to_be_it() {
        let failure = Bound::of(plugin_vtable::<Shares>, "negates")
            .err()
            .expect("refused");
        assert_eq!(
            (failure.status, failure.code.as_str()),
            (STATUS_FAILED, "description")
        );
        assert!(failure.message.contains("`negates`"), "{failure}");
        assert!(Bound::of(plugin_vtable::<Shares>, "alone").is_ok());
    }

    #[test]
    fn outputs_share_memory_with_nothing_and_inputs_of_a_state_are_closed() {
        let bound = Bound::new("good").expect("binds");
        let (mut x, mut y, mut s) = ([1.0, 2.0], [0.0, 0.0], [3.0, 4.0]);
        let (x, y, s) = (view(&mut x), view(&mut y), view(&mut s));
        let code = |inputs: &[TensorView], outputs: &[TensorView], states: &[TensorView]| {
            bound
                .call(inputs, outputs, states)
                .err()
                .map(|failure| failure.code)
        };
        let aliased = Some("view_aliased".to_string());
        assert_eq!(code(&[x], &[x], &[]), aliased);
        assert_eq!(code(&[x], &[y, y], &[]), aliased);
        assert_eq!(code(&[x], &[y], &[y]), aliased);
        assert_eq!(code(&[x], &[y], &[s, s]), aliased);
        // The second input is a view of the state: the form sees that it cannot read it.
        assert_eq!(code(&[x, s], &[y], &[s]), None);
        // A malformed view is named, and none of this poisoned the instance.
        let bad = TensorView { rank: 9, ..x };
        assert_eq!(code(&[bad], &[y], &[]), Some("view_rank".to_string()));
        bound.once().expect("alive");
    }

    #[test]
    fn long_lists_keep_their_order() {
        let mut list = List::new();
        for i in 0..20 {
            list.push(i);
            assert_eq!(list.as_mut(), (0..=i).collect::<Vec<_>>());
        }
    }

    #[test]
    fn null_arguments_are_refused() {
        let mut error = Error::EMPTY;
        // SAFETY: null is what this test is about.
        unsafe {
            let null = std::ptr::null_mut();
            let status = (FORM.call)(
                null,
                &CallCtx::NONE,
                std::ptr::null(),
                0,
                std::ptr::null(),
                0,
                std::ptr::null(),
                0,
                &mut error,
            );
            assert_eq!(take_error(status, &mut error).code, "argument");
            let mut form = std::ptr::null_mut();
            let status = (TABLE().bind)(null, std::ptr::null(), &mut form, &mut error);
            assert_eq!(take_error(status, &mut error).code, "argument");
            let mut plugin = std::ptr::null_mut();
            let status = (TABLE().open)(std::ptr::null(), &mut plugin, &mut error);
            assert_eq!(take_error(status, &mut error).status, STATUS_INVALID);
            (FORM.release)(null);
            (TABLE().close)(null);
        }
    }
}
