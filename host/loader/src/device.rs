//! Devices that plugins offer, with memory of their own, as safe values.
//!
//! A device's addresses are numbers that travel back to its plugin: nothing here dereferences one, it only adds
//! offsets. Data goes in and out through explicit copies of checked lengths. Memory, queue and tensors remember the
//! open device they belong to, so that no address reaches another plugin or another device; they are given back in the
//! order the ABI asks for, whatever order they are dropped in. Entries of one open device are called one at a time, and
//! while a thread records a queue of it everything that other threads want of the device waits ([`gate`]).
//!
//! A device that is gone answers `device_lost`; the host's side stays usable and everything can be dropped.
//!
//! Not here: which model runs where (core), and whether an architecture is served ([`crate::arch`]).

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use structures_plugin_api::abi::{
    Bytes, DType, DeviceVTable, Error, TensorView, MAX_RANK, STATUS_OK,
};
use structures_plugin_api::describe::{DeviceInfo, Devices};
use structures_plugin_api::owned;

use crate::arch::{self, Declared};
use crate::code::Code;
use crate::error::LoaderError;
use crate::plugin::{BoundForm, Handle, Inner, Plugin, PluginError, StatusKind};
use crate::tensor::Element;

pub(crate) mod gate;

use gate::{Closed, Gate, Pass};

impl Plugin {
    /// The devices that are there, beside the CPU (0). Asked of the plugin the first time.
    ///
    /// # Errors
    /// The plugin's own failure; `bad_answer`.
    pub fn devices(&self) -> Result<&[DeviceInfo], PluginError> {
        let asked = self.inner.devices.get_or_init(|| self.inner.ask_devices());
        asked.as_deref().map_err(Clone::clone)
    }

    /// The open device that everybody here shares; opened when nobody holds it.
    ///
    /// # Errors
    /// As [`Plugin::open_device`].
    pub fn device(&self, index: u32) -> Result<PluginDevice, PluginError> {
        let gate = self.inner.gate(index);
        let _pass = gate.pass();
        let shared = self.inner.open_devices.lock();
        let mut shared = shared.unwrap_or_else(|e| e.into_inner());
        if let Some(open) = shared.get(&index).and_then(Weak::upgrade) {
            return Ok(PluginDevice { open });
        }
        let device = self.open_inside(index, &gate)?;
        shared.insert(index, Arc::downgrade(&device.open));
        Ok(device)
    }

    /// Opens a device.
    ///
    /// # Errors
    /// `device_unknown`; `arch_not_declared` and `arch_malformed` when the plugin holds no code for it; the plugin's
    /// own failure.
    pub fn open_device(&self, index: u32) -> Result<PluginDevice, PluginError> {
        let gate = self.inner.gate(index);
        let _pass = gate.pass();
        self.open_inside(index, &gate)
    }

    fn open_inside(&self, index: u32, gate: &Arc<Gate>) -> Result<PluginDevice, PluginError> {
        self.placeable("", "", index)?;
        let Some(table) = self.inner.tables.device else {
            return Err(self.unknown("", index));
        };
        let (mut handle, mut error) = (std::ptr::null_mut(), Error::EMPTY);
        let instance = self.inner.lock();
        // SAFETY: the instance is open and locked; the out-parameters are live and empty.
        let status = unsafe { (table.open)(instance.0, index, &mut handle, &mut error) };
        drop(instance);
        self.inner.check("", status, &mut error)?;
        Ok(PluginDevice {
            open: Arc::new(Open {
                plugin: Arc::clone(&self.inner),
                index,
                table,
                handle: Mutex::new(Handle(handle)),
                copies: Counters::default(),
                gate: Arc::clone(gate),
                idle: Mutex::default(),
            }),
        })
    }

    /// Whether its code was built for this CPU, or declares nothing.
    pub fn serves_cpu(&self) -> bool {
        let d = self.description();
        arch::admit(&d.id, &d.archs, Some(&arch::Device::host_cpu())).is_ok()
    }

    /// Whether a form may run on a device: the plugin offers it, and plugin and form were built for it. An empty form
    /// stands for the plugin alone.
    ///
    /// # Errors
    /// `device_unknown`, `arch_not_declared`, `arch_malformed`; the plugin's own failure.
    pub(crate) fn placeable(
        &self,
        structure: &str,
        form: &str,
        index: u32,
    ) -> Result<(), PluginError> {
        let description = self.description();
        let own = description.form(structure, form);
        let own = own.map_or(&[][..], |decl| &decl.archs);
        let admit = |archs: &[String], device: &arch::Device, name: &str| {
            arch::admit(&description.id, archs, Some(device)).map_err(|refusal| {
                let what = format!("device {index} ({name}): {}", refusal.reason);
                self.error(form, StatusKind::Refused, refusal.code.name(), what)
            })
        };
        if index == 0 {
            let cpu = arch::Device::host_cpu();
            admit(&description.archs, &cpu, "the CPU")?;
            return admit(own, &cpu, "the CPU");
        }
        let found = self.devices()?.iter().find(|d| d.index == index);
        let Some(info) = found else {
            return Err(self.unknown(form, index));
        };
        let device = parse(&info.arch).map_err(|what| {
            let what = format!("device {index} ({}): {what}", info.name);
            self.error(form, StatusKind::Refused, Code::ArchMalformed.name(), what)
        })?;
        let built_for = match info.built_for.is_empty() {
            true => &description.archs,
            false => &info.built_for,
        };
        admit(built_for, &device, &info.name)?;
        admit(own, &device, &info.name)
    }

    fn unknown(&self, form: &str, index: u32) -> PluginError {
        let known: Vec<String> = self.inner.devices.get().map_or_else(Vec::new, |asked| {
            let list = asked.as_deref().unwrap_or_default().iter();
            list.map(|d| format!("{} ({})", d.index, d.name)).collect()
        });
        let what = match known.is_empty() {
            true => format!("device {index}: the plugin offers none beside the CPU (0)"),
            false => format!(
                "device {index}: the plugin offers 0 and {}",
                known.join(", ")
            ),
        };
        self.error(form, StatusKind::Refused, "device_unknown", what)
    }
}

impl Inner {
    fn ask_devices(&self) -> Result<Vec<DeviceInfo>, PluginError> {
        let (Some(ask), Some(_)) = (self.tables.plugin.devices, self.tables.device) else {
            return Ok(Vec::new());
        };
        let (mut out, mut error) = (Bytes::EMPTY, Error::EMPTY);
        let instance = self.lock();
        // SAFETY: the instance is open and locked; the out-parameters are live and empty.
        let status = unsafe { ask(instance.0, &mut out, &mut error) };
        drop(instance);
        self.check("", status, &mut error)?;
        // SAFETY: the plugin answered success, so `out` is as it made it.
        let answer = unsafe { owned::read_bytes(&mut out) };
        let bad = |what: String| self.error("", StatusKind::Failed, "bad_answer", what);
        let list: Devices = serde_json::from_slice(&answer)
            .map_err(|e| bad(format!("expected a list of devices: {e}")))?;
        for (i, device) in list.devices.iter().enumerate() {
            let twice = list.devices[..i].iter().any(|d| d.index == device.index);
            if device.index == 0 || twice {
                let text = "expected devices with different numbers from 1 on";
                return Err(bad(format!("{text}, found {}", device.index)));
            }
        }
        Ok(list.devices)
    }
}

/// A device's arch name, with or without the suffix its own toolchain writes (`sm_90a`): what it is, not what it
/// would serve.
pub(crate) fn parse(arch: &str) -> Result<arch::Device, String> {
    Ok(match Declared::parse(arch)? {
        Declared::Sm { major, minor, .. } => arch::Device::Sm { major, minor },
        Declared::Cpu { set, features } => arch::Device::Cpu {
            set,
            features: features.into_iter().collect(),
        },
    })
}

/// An open device. Cloning shares it; it is closed with the last clone, memory, queue and tensor of it.
#[derive(Clone)]
pub struct PluginDevice {
    open: Arc<Open>,
}

pub(crate) struct Open {
    plugin: Arc<Inner>,
    index: u32,
    table: DeviceVTable,
    /// Locked for every device entry.
    handle: Mutex<Handle>,
    copies: Counters,
    /// Passed for every device entry, before the handle is locked.
    gate: Arc<Gate>,
    /// Memory that was leased and given back, by size.
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    bytes: u64,
    by_size: BTreeMap<u64, Vec<Handle>>,
}

/// Most bytes that are kept for the next lease.
const IDLE_BYTES: u64 = 256 << 20;
/// Leases are of a multiple of this, and aligned to it.
const LEASE_STEP: u64 = 256;

#[derive(Default)]
struct Counters {
    copies_in: AtomicU64,
    copies_out: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

/// Copies between host memory and a device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// Copies to the device.
    pub copies_in: u64,
    /// Copies from it.
    pub copies_out: u64,
    /// Bytes to the device.
    pub bytes_in: u64,
    /// Bytes from it.
    pub bytes_out: u64,
}

impl Copies {
    /// What was copied since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Copies) -> Copies {
        Copies {
            copies_in: self.copies_in.saturating_sub(earlier.copies_in),
            copies_out: self.copies_out.saturating_sub(earlier.copies_out),
            bytes_in: self.bytes_in.saturating_sub(earlier.bytes_in),
            bytes_out: self.bytes_out.saturating_sub(earlier.bytes_out),
        }
    }
}

/// The handle, for one entry.
struct Locked<'a> {
    handle: MutexGuard<'a, Handle>,
    _pass: Pass<'a>,
}

impl Deref for Locked<'_> {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Open {
    /// Waits while another thread records.
    fn lock(&self) -> Locked<'_> {
        let pass = self.gate.pass();
        Locked {
            handle: self.handle.lock().unwrap_or_else(|e| e.into_inner()),
            _pass: pass,
        }
    }

    /// Runs one entry with the handle locked.
    fn enter(&self, entry: impl FnOnce(*mut c_void, &mut Error) -> i32) -> Result<(), PluginError> {
        let mut error = Error::EMPTY;
        let status = entry(self.lock().0, &mut error);
        if status == STATUS_OK {
            return Ok(());
        }
        self.plugin.check("", status, &mut error)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let idle = std::mem::take(self.idle.get_mut().unwrap_or_else(|e| e.into_inner()));
        for address in idle.by_size.into_values().flatten() {
            // SAFETY: allocated once, freed once, on a device that is still open; nobody leases it.
            unsafe { (self.table.free)(self.lock().0, address.0) };
        }
        if let Some(close) = self.table.close {
            // SAFETY: opened once, closed once; memory, queues and tensors hold this value, so none is left.
            unsafe { close(self.lock().0) };
        }
    }
}

impl PluginDevice {
    /// Its number in `bind`.
    pub fn index(&self) -> u32 {
        self.open.index
    }

    /// Allocates memory there, aligned to `align` bytes. Its content is undefined.
    ///
    /// # Errors
    /// The plugin's own failure.
    pub fn alloc(&self, bytes: u64, align: u64) -> Result<DeviceMemory, PluginError> {
        let mut address = std::ptr::null_mut();
        self.open.enter(|device, error| {
            // SAFETY: the device is open; the out-parameters are live and empty.
            unsafe { (self.open.table.alloc)(device, bytes, align, &mut address, error) }
        })?;
        Ok(DeviceMemory {
            open: Arc::clone(&self.open),
            address: Handle(address),
            bytes,
            leased: false,
        })
    }

    /// Memory of at least this many bytes that goes back to the device's pool when it is dropped: for values that
    /// come and go at every step. What follows on the same queue may be given the same memory. Content is undefined.
    ///
    /// # Errors
    /// The plugin's own failure.
    pub fn lease(&self, bytes: u64) -> Result<DeviceMemory, PluginError> {
        let bytes = bytes.max(1).next_multiple_of(LEASE_STEP);
        let found = {
            let mut idle = self.open.idle.lock().unwrap_or_else(|e| e.into_inner());
            let found = idle.by_size.get_mut(&bytes).and_then(Vec::pop);
            if found.is_some() {
                idle.bytes -= bytes;
            }
            found
        };
        let mut memory = match found {
            Some(address) => DeviceMemory {
                open: Arc::clone(&self.open),
                address,
                bytes,
                leased: false,
            },
            None => self.alloc(bytes, LEASE_STEP)?,
        };
        memory.leased = true;
        Ok(memory)
    }

    /// Copies so far, of everybody who shares this open device.
    pub fn copies(&self) -> Copies {
        let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let c = &self.open.copies;
        Copies {
            copies_in: of(&c.copies_in),
            copies_out: of(&c.copies_out),
            bytes_in: of(&c.bytes_in),
            bytes_out: of(&c.bytes_out),
        }
    }

    /// Whether this is the same open device.
    pub fn same(&self, other: &PluginDevice) -> bool {
        Arc::ptr_eq(&self.open, &other.open)
    }

    /// Records what `calls` does on a queue, or on the default one: calls of forms on it are noted and not done, and who
    /// copies, waits or allocates is refused. A call that is refused meanwhile is no fault of its form. Other threads wait
    /// with all they want of this device until `calls` has returned or unwound; it waits for none of them.
    ///
    /// What `calls` answered, and the recording or why there is none: what happened meanwhile that cannot be recorded.
    ///
    /// # Errors
    /// `calls` was not called: `capture_unsupported` where the device cannot launch what it records; the plugin's own
    /// failure; `device_mismatch` for a queue of another open device.
    pub fn record<T>(
        &self,
        queue: Option<&Queue>,
        calls: impl FnOnce() -> T,
    ) -> Result<(T, Result<Recording, PluginError>), PluginError> {
        let queue = self.number(queue)?;
        if self.open.table.graph_launch.is_none() {
            let text = "the device launches no recordings".to_string();
            let plugin = &self.open.plugin;
            return Err(plugin.error("", StatusKind::Refused, "capture_unsupported", text));
        }
        let closed = self.open.gate.close(queue.addr());
        self.open.enter(|device, error| {
            // SAFETY: an open device and a queue of it or none.
            unsafe { (self.open.table.capture_begin)(device, queue, error) }
        })?;
        let mut capture = Capture {
            open: &self.open,
            queue,
            ended: false,
            _closed: closed,
        };
        let answer = calls();
        let recording = capture.end();
        Ok((answer, recording))
    }

    fn number(&self, queue: Option<&Queue>) -> Result<*mut c_void, PluginError> {
        match queue {
            None => Ok(std::ptr::null_mut()),
            Some(queue) if Arc::ptr_eq(&queue.open, &self.open) => Ok(queue.queue.0),
            Some(_) => Err(elsewhere(&self.open.plugin, "", "queue")),
        }
    }

    /// Makes a queue.
    ///
    /// # Errors
    /// The plugin's own failure.
    pub fn queue(&self) -> Result<Queue, PluginError> {
        let mut queue = std::ptr::null_mut();
        self.open.enter(|device, error| {
            // SAFETY: the device is open; the out-parameters are live and empty.
            unsafe { (self.open.table.queue_new)(device, &mut queue, error) }
        })?;
        Ok(Queue {
            open: Arc::clone(&self.open),
            queue: Handle(queue),
        })
    }
}

impl fmt::Debug for PluginDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PluginDevice")
            .field("plugin", &self.open.plugin.id())
            .field("index", &self.open.index)
            .finish_non_exhaustive()
    }
}

/// A recording that goes on; ended before others pass, also when its thread unwinds.
struct Capture<'a> {
    open: &'a Arc<Open>,
    queue: *mut c_void,
    ended: bool,
    _closed: Closed<'a>,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<Recording, PluginError> {
        self.ended = true;
        let mut graph = std::ptr::null_mut();
        self.open.enter(|device, error| {
            // SAFETY: an open device and a queue of it or none; the out-parameters are live and empty.
            unsafe { (self.open.table.capture_end)(device, self.queue, &mut graph, error) }
        })?;
        Ok(Recording {
            open: Arc::clone(self.open),
            graph: Handle(graph),
        })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            drop(self.end());
        }
    }
}

/// An order of work on a device.
pub struct Queue {
    open: Arc<Open>,
    queue: Handle,
}

// SAFETY: a handle that only travels back to the plugin, whose entries take any thread, one at a time by `Open::lock`.
unsafe impl Sync for Queue {}

impl Queue {
    /// Waits for everything on it.
    ///
    /// # Errors
    /// The plugin's own failure.
    pub fn synchronize(&self) -> Result<(), PluginError> {
        self.open.enter(|device, error| {
            // SAFETY: an open device and a queue of it.
            unsafe { (self.open.table.synchronize)(device, self.queue.0, error) }
        })
    }

    /// Sets its mark.
    ///
    /// # Errors
    /// The plugin's own failure.
    pub fn mark(&self) -> Result<(), PluginError> {
        self.open.enter(|device, error| {
            let mark = std::ptr::null_mut();
            // SAFETY: an open device and a queue of it; null sets the mark.
            unsafe { (self.open.table.elapsed)(device, self.queue.0, mark, error) }
        })
    }

    /// Milliseconds since the mark, of everything enqueued so far.
    ///
    /// # Errors
    /// The plugin's own failure.
    pub fn elapsed(&self) -> Result<f32, PluginError> {
        let mut milliseconds = 0.0;
        self.open.enter(|device, error| {
            // SAFETY: an open device and a queue of it; the out-parameter is live.
            unsafe { (self.open.table.elapsed)(device, self.queue.0, &mut milliseconds, error) }
        })?;
        Ok(milliseconds)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Some(free) = self.open.table.queue_free {
            // SAFETY: made once, freed once, on an open device.
            unsafe { free(self.open.lock().0, self.queue.0) };
        }
    }
}

/// Calls that were recorded on a device. Memory and forms of them are to be kept by whoever launches it.
pub struct Recording {
    open: Arc<Open>,
    graph: Handle,
}

// SAFETY: as for `Queue`.
unsafe impl Sync for Recording {}

impl Recording {
    /// Enqueues all of it.
    ///
    /// # Errors
    /// The plugin's own failure; `device_mismatch` for a queue of another open device.
    pub fn launch(&self, queue: Option<&Queue>) -> Result<(), PluginError> {
        let queue = match queue {
            None => std::ptr::null_mut(),
            Some(queue) if Arc::ptr_eq(&queue.open, &self.open) => queue.queue.0,
            Some(_) => return Err(elsewhere(&self.open.plugin, "", "queue")),
        };
        let Some(launch) = self.open.table.graph_launch else {
            let text = "the device launches no recordings".to_string();
            let plugin = &self.open.plugin;
            return Err(plugin.error("", StatusKind::Refused, "capture_unsupported", text));
        };
        self.open.enter(|device, error| {
            // SAFETY: an open device, a queue of it or none, and a recording of it that is not freed.
            unsafe { launch(device, queue, self.graph.0, error) }
        })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(free) = self.open.table.graph_free {
            // SAFETY: made once, freed once, on an open device.
            unsafe { free(self.open.lock().0, self.graph.0) };
        }
    }
}

/// Memory of a device.
pub struct DeviceMemory {
    open: Arc<Open>,
    address: Handle,
    bytes: u64,
    /// Goes back to the pool.
    leased: bool,
}

// SAFETY: as for `Queue`; reading and writing go through the device.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies `data` to byte `offset`.
    ///
    /// # Errors
    /// `argument` when it does not fit; the plugin's own failure.
    pub fn copy_in<T: Element>(
        &mut self,
        queue: Option<&Queue>,
        offset: u64,
        data: &[T],
    ) -> Result<(), PluginError> {
        self.replace(queue, offset, data)
    }

    /// As [`DeviceMemory::copy_in`], of memory that several hold: what others read there changes with it, in the order
    /// of the queue.
    ///
    /// # Errors
    /// As [`DeviceMemory::copy_in`].
    pub fn replace<T: Element>(
        &self,
        queue: Option<&Queue>,
        offset: u64,
        data: &[T],
    ) -> Result<(), PluginError> {
        let bytes = size_of_val(data) as u64;
        let to = self.within(offset, bytes)?;
        let queue = self.queue(queue)?;
        self.open.enter(|device, error| {
            let from = data.as_ptr().cast();
            // SAFETY: an open device, a queue of it or none, and as many bytes as both sides have.
            unsafe { (self.open.table.copy_in)(device, queue, to, from, bytes, error) }
        })?;
        let copies = &self.open.copies;
        copies.copies_in.fetch_add(1, Ordering::Relaxed);
        copies.bytes_in.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Copies from byte `offset` to `data`.
    ///
    /// # Errors
    /// As [`DeviceMemory::copy_in`].
    pub fn copy_out<T: Element>(
        &self,
        queue: Option<&Queue>,
        offset: u64,
        data: &mut [T],
    ) -> Result<(), PluginError> {
        let bytes = size_of_val(data) as u64;
        let from = self.within(offset, bytes)?;
        let queue = self.queue(queue)?;
        self.open.enter(|device, error| {
            let to = data.as_mut_ptr().cast();
            // SAFETY: as in `copy_in`; every bit pattern is an `Element`.
            unsafe { (self.open.table.copy_out)(device, queue, to, from, bytes, error) }
        })?;
        let copies = &self.open.copies;
        copies.copies_out.fetch_add(1, Ordering::Relaxed);
        copies.bytes_out.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// A row-major tensor at the start of it.
    ///
    /// # Errors
    /// [`LoaderError::Tensor`] when it does not fit.
    pub fn tensor(&self, dtype: DType, dims: &[usize]) -> Result<DeviceTensor<'_>, LoaderError> {
        Ok(DeviceTensor {
            view: self.view(dtype, dims)?,
            memory: Some(self),
        })
    }

    /// As [`DeviceMemory::tensor`], to be written.
    ///
    /// # Errors
    /// As [`DeviceMemory::tensor`].
    pub fn tensor_mut(
        &mut self,
        dtype: DType,
        dims: &[usize],
    ) -> Result<DeviceTensorMut<'_>, LoaderError> {
        Ok(DeviceTensorMut {
            view: self.view(dtype, dims)?,
            memory: self,
        })
    }

    /// As [`DeviceMemory::tensor_mut`], of memory that several hold: a state that a call updates behind what others read.
    ///
    /// # Errors
    /// As [`DeviceMemory::tensor_mut`].
    pub fn state(&self, dtype: DType, dims: &[usize]) -> Result<DeviceTensorMut<'_>, LoaderError> {
        Ok(DeviceTensorMut {
            view: self.view(dtype, dims)?,
            memory: self,
        })
    }

    fn view(&self, dtype: DType, dims: &[usize]) -> Result<TensorView, LoaderError> {
        let elements = dims.iter().try_fold(1_u64, |n, d| n.checked_mul(*d as u64));
        let bytes = elements.and_then(|n| n.checked_mul(dtype.size() as u64));
        if dims.len() > MAX_RANK || bytes.is_none_or(|bytes| bytes > self.bytes) {
            return Err(LoaderError::Tensor {
                reason: format!(
                    "dims {dims:?} of {} do not fit {} bytes of device memory",
                    dtype.name(),
                    self.bytes
                ),
            });
        }
        let mut view = TensorView {
            data: self.address.0,
            dtype: dtype as u32,
            rank: dims.len() as u32,
            device: self.open.index,
            ..TensorView::ABSENT
        };
        let mut stride = 1;
        for (axis, dim) in dims.iter().enumerate().rev() {
            view.dims[axis] = *dim as i64;
            view.strides[axis] = stride;
            stride *= (*dim).max(1) as i64;
        }
        Ok(view)
    }

    fn within(&self, offset: u64, bytes: u64) -> Result<*mut c_void, PluginError> {
        let fits = offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes);
        if fits {
            return Ok(self.address.0.wrapping_byte_add(offset as usize));
        }
        let what = format!(
            "{bytes} bytes at {offset} do not fit the {} bytes of this device memory",
            self.bytes
        );
        let plugin = &self.open.plugin;
        Err(plugin.error("", StatusKind::Invalid, "argument", what))
    }

    fn queue(&self, queue: Option<&Queue>) -> Result<*mut c_void, PluginError> {
        match queue {
            None => Ok(std::ptr::null_mut()),
            Some(queue) if Arc::ptr_eq(&queue.open, &self.open) => Ok(queue.queue.0),
            Some(_) => Err(elsewhere(&self.open.plugin, "", "queue")),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.leased {
            let mut idle = self.open.idle.lock().unwrap_or_else(|e| e.into_inner());
            if idle.bytes + self.bytes <= IDLE_BYTES {
                idle.bytes += self.bytes;
                let address = Handle(self.address.0);
                idle.by_size.entry(self.bytes).or_default().push(address);
                return;
            }
        }
        // SAFETY: allocated once, freed once, on an open device.
        unsafe { (self.open.table.free)(self.open.lock().0, self.address.0) };
    }
}

/// A tensor on a device that a call reads, or an absent optional.
#[derive(Clone, Copy)]
pub struct DeviceTensor<'a> {
    view: TensorView,
    memory: Option<&'a DeviceMemory>,
}

impl DeviceTensor<'_> {
    /// An absent optional.
    pub const ABSENT: DeviceTensor<'static> = DeviceTensor {
        view: TensorView::ABSENT,
        memory: None,
    };
}

/// A tensor on a device that a call fills or updates.
pub struct DeviceTensorMut<'a> {
    view: TensorView,
    memory: &'a DeviceMemory,
}

impl BoundForm {
    /// As [`BoundForm::call`], on the device the form was bound on; what it does is ordered on `queue`, or on the
    /// device's default queue.
    ///
    /// # Errors
    /// As [`BoundForm::call`]; `device_mismatch` also for memory or a queue of another open device.
    pub fn call_on(
        &self,
        device: &PluginDevice,
        queue: Option<&Queue>,
        inputs: &[DeviceTensor<'_>],
        outputs: &mut [DeviceTensorMut<'_>],
        states: &mut [DeviceTensorMut<'_>],
    ) -> Result<(), PluginError> {
        let open = &device.open;
        self.on_device(open.index)?;
        if !Arc::ptr_eq(self.plugin(), &open.plugin) {
            return Err(elsewhere(self.plugin(), self.form(), "device"));
        }
        let owners = inputs
            .iter()
            .filter_map(|t| t.memory)
            .map(|memory| &memory.open)
            .chain(outputs.iter().map(|t| &t.memory.open))
            .chain(states.iter().map(|t| &t.memory.open))
            .chain(queue.map(|queue| &queue.open));
        for owner in owners {
            if !Arc::ptr_eq(owner, open) {
                return Err(elsewhere(self.plugin(), self.form(), "argument"));
            }
        }
        let inputs: Vec<TensorView> = inputs.iter().map(|t| t.view).collect();
        let outputs: Vec<TensorView> = outputs.iter().map(|t| t.view).collect();
        let states: Vec<TensorView> = states.iter().map(|t| t.view).collect();
        let queue = queue.map_or(std::ptr::null_mut(), |queue| queue.queue.0);
        let _pass = open.gate.pass();
        let sound = !self.poisoned();
        // SAFETY: the views are memory of the form's own device, which no host code dereferences; outputs are borrowed
        // for the call alone, states may be read by inputs, which the ABI allows.
        unsafe {
            self.enter(
                queue,
                (inputs.as_ptr(), inputs.len()),
                (outputs.as_ptr(), outputs.len()),
                (states.as_ptr(), states.len()),
            )
        }
        .inspect_err(|e| {
            // Nothing was done while it was recorded.
            let refused = e.kind == StatusKind::Refused;
            if sound && refused && open.gate.records(queue.addr()) {
                self.unpoison();
            }
        })
    }
}

#[cold]
fn elsewhere(plugin: &Inner, form: &str, what: &str) -> PluginError {
    let text = format!("the {what} belongs to another open device");
    plugin.error(form, StatusKind::Invalid, "device_mismatch", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_what_its_arch_says() {
        let sm = |arch: &str| match parse(arch) {
            Ok(arch::Device::Sm { major, minor }) => (major, minor),
            other => panic!("{other:?}"),
        };
        assert_eq!(sm("sm_90a"), (9, 0));
        assert_eq!(sm("sm_121"), (12, 1));
        assert!(matches!(parse("x86_64+avx2"), Ok(arch::Device::Cpu { .. })));
        assert!(parse("a toaster").is_err());
    }
}
