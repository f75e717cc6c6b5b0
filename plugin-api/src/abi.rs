//! The shared part of both doors: plain `#[repr(C)]` data and vtables, nothing else.
//!
//! A host and a plugin exchange exactly two pointers: the host gives a [`HostVTable`], the plugin
//! gives a [`PluginVTable`]. Everything else is reached through them. Only views and vtables are
//! layout; what can be said in words is JSON (`describe`, params, probe reports), so it can grow
//! without touching this file.
//!
//! Growth: every vtable starts with `struct_size` and `api_minor`. New entries are appended,
//! optional (null or past the end is "not there"), and read only when `struct_size` covers them. So
//! a reader takes no more than the smaller of the two sizes, and at least `SIZE_1_0`. No function
//! ever gains a parameter.
//!
//! The C header is generated from this file (`cargo xtask header`), so its comments are written
//! for readers of both.
//!
//! Ownership: [`Str`] and slices are borrowed for the length of the call. [`Bytes`] and [`Error`]
//! are owned by whoever made them and released through their own `release` function by whoever
//! received them.

use std::ffi::c_void;

/// ABI major version: a host serves exactly its own.
pub const API_MAJOR: u32 = 1;
/// ABI minor version: entries appended since 1.0.
pub const API_MINOR: u32 = 2;
/// ABI version as text, for `describe` documents and messages.
pub const API_VERSION: &str = "1.2.0";
/// Name of the C door's only exported symbol: `const PluginVTable *structures_plugin_v1(const
/// HostVTable *)`.
pub const C_SYMBOL: &str = "structures_plugin_v1";
/// Largest rank of a view.
pub const MAX_RANK: usize = 8;

/// `0` is success, everything else came with an [`Error`].
pub type Status = i32;

/// The call did what it says.
pub const STATUS_OK: Status = 0;
/// An argument is malformed: a bug on the caller's side.
pub const STATUS_INVALID: Status = 1;
/// Well formed, but not something this form executes here (band, dims, architecture, missing
/// entry).
pub const STATUS_REFUSED: Status = 2;
/// It should have worked and did not.
pub const STATUS_FAILED: Status = 3;
/// The plugin panicked; the instance is poisoned.
pub const STATUS_PANICKED: Status = 4;
/// The instance failed or panicked before and is not entered again.
pub const STATUS_POISONED: Status = 5;

/// Element types, by fixed numeric id.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE-754 binary32.
    F32 = 1,
    /// IEEE-754 binary16.
    F16 = 2,
    /// bfloat16.
    Bf16 = 3,
    /// FP8 E4M3 (finite, max 448).
    E4m3 = 4,
    /// FP8 E5M2.
    E5m2 = 5,
    /// Signed 8-bit integer.
    I8 = 6,
    /// Unsigned 8-bit integer.
    U8 = 7,
    /// Signed 32-bit integer.
    I32 = 8,
    /// Signed 64-bit integer.
    I64 = 9,
    /// FP4 E2M1, two per byte along the last dim, low nibble first.
    E2m1x2 = 10,
    /// One byte, 0 or 1.
    Bool = 11,
    /// IEEE-754 binary64.
    F64 = 12,
}

impl DType {
    /// The type with this id; `None` for 0 (absent) and for ids of a later minor.
    pub fn from_id(id: u32) -> Option<Self> {
        use DType::*;
        const ALL: [DType; 12] = [
            F32, F16, Bf16, E4m3, E5m2, I8, U8, I32, I64, E2m1x2, Bool, F64,
        ];
        // By position: ids count from 1, as a test checks.
        let index = (id as usize).checked_sub(1)?;
        ALL.get(index).copied()
    }

    /// The name used in every JSON document.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::E4m3 => "e4m3",
            DType::E5m2 => "e5m2",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::E2m1x2 => "e2m1x2",
            DType::Bool => "bool",
            DType::F64 => "f64",
        }
    }

    /// Bytes of one element; for `e2m1x2` of one pair.
    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            _ => 1,
        }
    }
}

/// A borrowed strided tensor (DLPack semantics), 152 bytes. `dtype == 0` is an absent optional.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TensorView {
    /// First element. Host memory when `device == 0`, else a handle the device understands.
    pub data: *mut c_void,
    /// [`DType`] id, or 0 for "absent".
    pub dtype: u32,
    /// Number of dims in use.
    pub rank: u32,
    /// Sizes, outermost first.
    pub dims: [i64; MAX_RANK],
    /// Strides in elements; 0 broadcasts.
    pub strides: [i64; MAX_RANK],
    /// 0 is host memory; other numbers are devices the plugin declared, counted from 1.
    pub device: u32,
    /// Reserved, 0.
    pub flags: u32,
}

impl TensorView {
    /// An absent optional.
    pub const ABSENT: TensorView = TensorView {
        data: std::ptr::null_mut(),
        dtype: 0,
        rank: 0,
        dims: [0; MAX_RANK],
        strides: [0; MAX_RANK],
        device: 0,
        flags: 0,
    };
}

/// Borrowed UTF-8, not NUL-terminated.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Str {
    /// First byte; may be null when `len == 0`.
    pub ptr: *const u8,
    /// Length in bytes.
    pub len: usize,
}

impl Str {
    /// Borrows `s`; the caller keeps it alive for the call.
    pub fn new(s: &str) -> Self {
        Str {
            ptr: s.as_ptr(),
            len: s.len(),
        }
    }
}

/// Owned bytes, released by the receiver through `release`.
#[repr(C)]
#[derive(Debug)]
pub struct Bytes {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
    /// Allocated size; private to the maker.
    pub capacity: usize,
    /// Frees the bytes; null when there is nothing to free.
    pub release: Option<unsafe extern "C" fn(*mut Bytes)>,
}

impl Bytes {
    /// Nothing; what a caller passes in as an out-parameter.
    pub const EMPTY: Bytes = Bytes {
        ptr: std::ptr::null_mut(),
        len: 0,
        capacity: 0,
        release: None,
    };
}

/// What came with a status other than 0. The caller passes [`Error::EMPTY`]; the callee fills it;
/// the receiver releases both members.
#[repr(C)]
#[derive(Debug)]
pub struct Error {
    /// Stable refusal or failure code (`envelope`, `dims_inconsistent`, ...).
    pub code: Bytes,
    /// For people: what was wrong, expected and found.
    pub message: Bytes,
}

impl Error {
    /// No error.
    pub const EMPTY: Error = Error {
        code: Bytes::EMPTY,
        message: Bytes::EMPTY,
    };
}

/// What a bound form may rely on for every call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Contract {
    /// `size_of::<Contract>()` of the maker.
    pub struct_size: u32,
    /// [`DType`] id of the boundary: inputs and outputs.
    pub dtype: u32,
    /// Largest number of rows (product of leading dims) of a call; 0 when `rows_exact` says it.
    pub row_capacity: u64,
    /// Exact number of rows of every call; 0 when a capacity holds.
    pub rows_exact: u64,
    /// Device of inputs and outputs.
    pub device: u32,
    /// Reserved, 0.
    pub flags: u32,
}

impl Contract {
    /// A contract on host memory for calls of at most `rows` rows.
    pub fn capacity(dtype: DType, rows: u64) -> Self {
        Contract {
            struct_size: size_of::<Contract>() as u32,
            dtype: dtype as u32,
            row_capacity: rows,
            rows_exact: 0,
            device: 0,
            flags: 0,
        }
    }

    /// Largest number of rows of a call, whether stated as a capacity or exactly.
    pub fn max_rows(&self) -> u64 {
        self.rows_exact.max(self.row_capacity)
    }
}

/// Everything `bind` gets. Arrays are parallel; names are the spec's own.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BindArgs {
    /// `size_of::<BindArgs>()` of the host.
    pub struct_size: u32,
    /// Device to bind on; 0 is the CPU.
    pub device: u32,
    /// Name of the form, from `describe`.
    pub form: Str,
    /// Name of the span of the structure's dataflow.
    pub span: Str,
    /// Slot names, spec order, repeated slots expanded (`w_0`, `w_1`, ...).
    pub weight_names: *const Str,
    /// One view a slot, slot dims, any strides; absent optional slots have dtype 0. Valid during
    /// `bind` only.
    pub weights: *const TensorView,
    /// Number of slots.
    pub n_weights: usize,
    /// Statistic names, `point|statistic|granularity` (`x|amax|tensor`).
    pub statistic_names: *const Str,
    /// One f32 view a statistic: rank 0 or `[channels]`. Valid during `bind` only.
    pub statistics: *const TensorView,
    /// Number of statistics.
    pub n_statistics: usize,
    /// JSON object `{structure, version, variant: {axis: value}, params: {name: value}, dims:
    /// {symbol: size}, inputs: [names], outputs: [names], states: [names]}`.
    pub params: Str,
    /// Never null.
    pub contract: *const Contract,
}

/// Per-call context.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CallCtx {
    /// `size_of::<CallCtx>()` of the host.
    pub struct_size: u32,
    /// Reserved, 0.
    pub flags: u32,
    /// Queue of the device, null on the CPU.
    pub queue: *mut c_void,
    /// Scratch of the size the form asked for, or null.
    pub workspace: *mut c_void,
}

impl CallCtx {
    /// A call on the CPU without workspace.
    pub const NONE: CallCtx = CallCtx {
        struct_size: size_of::<CallCtx>() as u32,
        flags: 0,
        queue: std::ptr::null_mut(),
        workspace: std::ptr::null_mut(),
    };
}

/// Facts about a bound form, asked once after `bind`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FormFacts {
    /// Bytes of packed weights this instance added.
    pub packed_bytes: u64,
    /// Bytes of scratch it added to what its plugin keeps or leases. Buffers that forms share count
    /// once, in the form whose `bind` made them.
    pub scratch_bytes: u64,
    /// Bytes of workspace it wants in [`CallCtx::workspace`].
    pub workspace_bytes: u64,
}

/// Per-instance entries. Calls on one instance never overlap unless the form declared `concurrent`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FormVTable {
    /// Size of this table in bytes.
    pub struct_size: u32,
    /// ABI minor of the plugin.
    pub api_minor: u32,
    /// Fills the outputs. Order of inputs, outputs and states is the bound span's.
    pub call: unsafe extern "C" fn(
        form: *mut c_void,
        ctx: *const CallCtx,
        inputs: *const TensorView,
        n_inputs: usize,
        outputs: *const TensorView,
        n_outputs: usize,
        states: *const TensorView,
        n_states: usize,
        error: *mut Error,
    ) -> Status,
    /// Reports [`FormFacts`].
    pub facts: unsafe extern "C" fn(form: *mut c_void, out: *mut FormFacts),
    /// Drops the instance. Called exactly once, also on a poisoned one.
    pub release: unsafe extern "C" fn(form: *mut c_void),
}

/// Device entries, for backends with memory of their own. Device addresses are numbers the host
/// never dereferences; it only adds offsets to them. A device that is gone answers
/// [`STATUS_FAILED`] with the code `device_lost` from then on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceVTable {
    /// Size of this table in bytes.
    pub struct_size: u32,
    /// ABI minor of the plugin.
    pub api_minor: u32,
    /// Opens device `index` (counted from 1).
    pub open: unsafe extern "C" fn(
        plugin: *mut c_void,
        index: u32,
        device: *mut *mut c_void,
        error: *mut Error,
    ) -> Status,
    /// Allocates bytes of device memory.
    pub alloc: unsafe extern "C" fn(
        device: *mut c_void,
        bytes: u64,
        align: u64,
        memory: *mut *mut c_void,
        error: *mut Error,
    ) -> Status,
    /// Frees what `alloc` returned.
    pub free: unsafe extern "C" fn(device: *mut c_void, memory: *mut c_void),
    /// Copies host bytes in, ordered on the queue.
    pub copy_in: unsafe extern "C" fn(
        device: *mut c_void,
        queue: *mut c_void,
        to: *mut c_void,
        from: *const c_void,
        bytes: u64,
        error: *mut Error,
    ) -> Status,
    /// Copies device bytes out, ordered on the queue.
    pub copy_out: unsafe extern "C" fn(
        device: *mut c_void,
        queue: *mut c_void,
        to: *mut c_void,
        from: *const c_void,
        bytes: u64,
        error: *mut Error,
    ) -> Status,
    /// Makes a queue.
    pub queue_new: unsafe extern "C" fn(
        device: *mut c_void,
        queue: *mut *mut c_void,
        error: *mut Error,
    ) -> Status,
    /// Waits for everything on the queue.
    pub synchronize:
        unsafe extern "C" fn(device: *mut c_void, queue: *mut c_void, error: *mut Error) -> Status,
    /// A null `milliseconds` sets the queue's mark; otherwise the time from the mark to everything
    /// enqueued so far, for which it waits.
    pub elapsed: unsafe extern "C" fn(
        device: *mut c_void,
        queue: *mut c_void,
        milliseconds: *mut f32,
        error: *mut Error,
    ) -> Status,
    /// Starts recording the queue: until `capture_end`, calls of forms on it are noted and not done. Who allocates, copies
    /// or waits meanwhile is refused, and `capture_end` with it.
    pub capture_begin:
        unsafe extern "C" fn(device: *mut c_void, queue: *mut c_void, error: *mut Error) -> Status,
    /// Ends recording, also after an error. The handle is for `graph_launch`; a device that fills it has that entry.
    pub capture_end: unsafe extern "C" fn(
        device: *mut c_void,
        queue: *mut c_void,
        graph: *mut *mut c_void,
        error: *mut Error,
    ) -> Status,
    /// Since 1.1, optional: frees what `queue_new` made. Without it a queue lives as long as its
    /// device.
    pub queue_free: Option<unsafe extern "C" fn(device: *mut c_void, queue: *mut c_void)>,
    /// Since 1.1, optional: closes what `open` opened, after its queues and memory. Without it a
    /// device lives as long as the plugin instance.
    pub close: Option<unsafe extern "C" fn(device: *mut c_void)>,
    /// Since 1.2, optional: enqueues everything a recording holds, at the addresses it was recorded with. Forms and memory
    /// of it are the caller's to keep. Without it a host records nothing.
    pub graph_launch: Option<
        unsafe extern "C" fn(
            device: *mut c_void,
            queue: *mut c_void,
            graph: *mut c_void,
            error: *mut Error,
        ) -> Status,
    >,
    /// Since 1.2, optional: frees what `capture_end` gave, once its work is done. Without it a recording lives as long as
    /// its device.
    pub graph_free: Option<unsafe extern "C" fn(device: *mut c_void, graph: *mut c_void)>,
}

impl DeviceVTable {
    /// Size of the table in API 1.0.
    pub const SIZE_1_0: usize = std::mem::offset_of!(DeviceVTable, queue_free);
}

/// Plugin entries. All may be called from any thread, one at a time a plugin; `describe` touches no
/// device and may be called before anything else, in a throw-away process.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PluginVTable {
    /// Size of this table in bytes.
    pub struct_size: u32,
    /// ABI minor of the plugin.
    pub api_minor: u32,
    /// The `describe` document, UTF-8 JSON.
    pub describe: unsafe extern "C" fn(out: *mut Bytes, error: *mut Error) -> Status,
    /// Makes the plugin instance. The host's table outlives it.
    pub open: unsafe extern "C" fn(
        host: *const HostVTable,
        plugin: *mut *mut c_void,
        error: *mut Error,
    ) -> Status,
    /// Drops the instance.
    pub close: unsafe extern "C" fn(plugin: *mut c_void),
    /// Capability probe of a form at shapes (JSON `{structure, span, rows: [..], dims: {..},
    /// variant: {..}}`); answers JSON `{probed: bool, entries: {present: [..], absent: [..]},
    /// code?, reason?}`.
    pub probe: unsafe extern "C" fn(
        plugin: *mut c_void,
        form: Str,
        device: u32,
        shapes: Str,
        out: *mut Bytes,
        error: *mut Error,
    ) -> Status,
    /// Binds a form. After it nothing is looked up again.
    pub bind: unsafe extern "C" fn(
        plugin: *mut c_void,
        args: *const BindArgs,
        form: *mut *mut c_void,
        error: *mut Error,
    ) -> Status,
    /// Entries of what `bind` makes.
    pub form: *const FormVTable,
    /// Null for backends without memory of their own.
    pub device: *const DeviceVTable,
    /// Since 1.1, optional: the devices that are there now, beside the CPU, as JSON `{devices:
    /// [{index, kind, name, arch, built_for: [..], memory_bytes}]}`. Asked once, after `open`.
    pub devices: Option<
        unsafe extern "C" fn(plugin: *mut c_void, out: *mut Bytes, error: *mut Error) -> Status,
    >,
}

impl PluginVTable {
    /// Size of the table in API 1.0.
    pub const SIZE_1_0: usize = std::mem::offset_of!(PluginVTable, devices);
}

impl FormVTable {
    /// Size of the table in API 1.0.
    pub const SIZE_1_0: usize = size_of::<FormVTable>();
}

impl HostVTable {
    /// Size of the table in API 1.0.
    pub const SIZE_1_0: usize = size_of::<HostVTable>();
}

// SAFETY: the tables are immutable function pointers and pointers to other immutable tables.
unsafe impl Sync for PluginVTable {}
// SAFETY: as above.
unsafe impl Send for PluginVTable {}

/// Log levels of [`HostVTable::log`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Lost work.
    Error = 1,
    /// Worth a look.
    Warn = 2,
    /// Milestones.
    Info = 3,
    /// For authors.
    Debug = 4,
    /// Everything.
    Trace = 5,
}

/// Services the host lends. Valid as long as the plugin instance; callable from any thread.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostVTable {
    /// Size of this table in bytes.
    pub struct_size: u32,
    /// ABI minor of the host.
    pub api_minor: u32,
    /// First argument of every entry.
    pub ctx: *mut c_void,
    /// Log bridge: level, target, message.
    pub log: unsafe extern "C" fn(ctx: *mut c_void, level: u32, target: Str, message: Str),
    /// Threads `parallel_for` uses, the caller included. At least 1.
    pub num_threads: unsafe extern "C" fn(ctx: *mut c_void) -> usize,
    /// Runs `body(user, i)` for every `i < n` on the host's pool, the caller included, and returns
    /// when all are done. `body` must not unwind. A call from inside a body runs serially.
    pub parallel_for: unsafe extern "C" fn(
        ctx: *mut c_void,
        n: usize,
        body: unsafe extern "C" fn(user: *mut c_void, i: usize),
        user: *mut c_void,
    ),
    /// Leases scratch shared with other forms of this plugin that lease the same tag: content does
    /// not survive a call. Null when memory is short.
    pub scratch_lease:
        unsafe extern "C" fn(ctx: *mut c_void, tag: Str, bytes: u64, align: u64) -> *mut c_void,
    /// Gives a lease back.
    pub scratch_release: unsafe extern "C" fn(ctx: *mut c_void, memory: *mut c_void),
}

// SAFETY: `ctx` belongs to the host, whose entries are callable from any thread.
unsafe impl Sync for HostVTable {}
// SAFETY: as above.
unsafe impl Send for HostVTable {}

// The layout both compilers assert; the header restates it with every offset.
const _: () = assert!(size_of::<TensorView>() == 152 && align_of::<TensorView>() == 8);
const _: () = assert!(size_of::<Bytes>() == 32 && size_of::<Error>() == 64);
const _: () = assert!(size_of::<BindArgs>() == 112 && size_of::<Contract>() == 32);
const _: () = assert!(size_of::<CallCtx>() == 24 && size_of::<FormFacts>() == 24);
const _: () = assert!(PluginVTable::SIZE_1_0 == 64 && DeviceVTable::SIZE_1_0 == 88);
const _: () = assert!(FormVTable::SIZE_1_0 == 32 && HostVTable::SIZE_1_0 == 56);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    #[test]
    fn view_is_152_bytes_in_the_documented_order() {
        assert_eq!(size_of::<TensorView>(), 152);
        assert_eq!(align_of::<TensorView>(), 8);
        assert_eq!(offset_of!(TensorView, dtype), 8);
        assert_eq!(offset_of!(TensorView, rank), 12);
        assert_eq!(offset_of!(TensorView, dims), 16);
        assert_eq!(offset_of!(TensorView, strides), 80);
        assert_eq!(offset_of!(TensorView, device), 144);
        assert_eq!(offset_of!(TensorView, flags), 148);
    }

    #[test]
    fn type_ids_are_fixed() {
        let names = [
            "f32", "f16", "bf16", "e4m3", "e5m2", "i8", "u8", "i32", "i64", "e2m1x2", "bool", "f64",
        ];
        for (i, name) in names.iter().enumerate() {
            let d = DType::from_id(i as u32 + 1).expect("known id");
            assert_eq!((d.name(), d as u32), (*name, i as u32 + 1));
        }
        assert!(DType::from_id(0).is_none() && DType::from_id(13).is_none());
    }
}
