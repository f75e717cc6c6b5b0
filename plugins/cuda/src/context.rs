//! A GPU's primary context, its memory and its launches, as safe values.
//!
//! The primary context is shared with whatever else runs in the process, so nothing here relies on what is current:
//! every entry makes it current and restores what was. Work goes to explicit streams; queue 0 of the host is the
//! context's own default stream, never the legacy one. After an error that no context survives every call answers
//! `device_lost` without asking the driver again.
//!
//! A queue is recorded as a CUDA graph: calls enqueue as ever, the driver notes them. What a recording cannot hold
//! (memory, a copy that is waited for, waiting) is refused here by name before the driver is asked, and spoils it.
//!
//! Owns no kernel and no format. `unsafe` here is the driver's interface; addresses stay numbers.

use std::collections::hash_map::{Entry, HashMap};
use std::ffi::{c_void, CString};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUcontext, CUevent, CUfunction, CUmodule, CUresult, CUstream};
use structures_plugin_api::sdk::{Device, Failure};

use crate::presence::{self, caught, Gpu};

/// Bytes of device memory that stay free whatever is bound: cuBLAS, other processes and the driver want some.
pub const HEADROOM: u64 = 512 << 20;
/// What `cuMemAlloc` aligns to at least.
const ALIGN: u64 = 256;

/// A retained primary context.
pub struct Context {
    gpu: Gpu,
    device: sys::CUdevice,
    raw: CUcontext,
    stream: CUstream,
    lost: AtomicBool,
    /// Start events by queue.
    marks: Mutex<HashMap<u64, Mark>>,
    scratch: Mutex<Scratch>,
    /// The queue that is being recorded.
    recording: Mutex<Option<Take>>,
}

/// A recording that is going on.
#[derive(Clone, Copy, Debug)]
struct Take {
    queue: u64,
    spoilt: bool,
}

/// Memory between the kernels of one call, shared by every form of the context: calls follow each other on a queue.
///
/// A recording holds the address its calls were given, so what was outgrown stays while any recording lives.
#[derive(Debug, Default)]
struct Scratch {
    address: u64,
    bytes: u64,
    /// Who used it last.
    queue: u64,
    /// Recordings there are, one that is going on among them.
    recordings: usize,
    /// Outgrown, and perhaps in a recording.
    outgrown: Vec<u64>,
    /// Given back while one was going on.
    freed: Vec<u64>,
}

struct Mark {
    start: CUevent,
    end: CUevent,
}

// SAFETY: handles of the driver, whose entries take any thread; what changes is behind a lock or an atomic.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("gpu", &self.gpu)
            .finish_non_exhaustive()
    }
}

/// While it lives this context is current on this thread; then what was before is again.
struct Current<'a> {
    before: CUcontext,
    _context: PhantomData<&'a Context>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        // SAFETY: null, or what was current when this value was made.
        let _ = unsafe { result::ctx::set_current(self.before) };
    }
}

/// A loaded image.
pub struct Module {
    context: Arc<Context>,
    raw: CUmodule,
}

// SAFETY: as for `Context`.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a module.
#[derive(Clone)]
pub struct Kernel {
    raw: CUfunction,
    name: String,
    module: Arc<Module>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Kernel").field(&self.name).finish()
    }
}

/// Where a launch goes.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks along x and y.
    pub blocks: (u32, u32),
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// An argument of a kernel: passed by value, so the struct is what the kernel declares.
///
/// # Safety
/// The type has the layout of the kernel's parameter and no padding that matters.
pub unsafe trait Argument: Copy {}

// SAFETY: plain numbers.
unsafe impl Argument for u64 {}
// SAFETY: as above.
unsafe impl Argument for u32 {}
// SAFETY: as above.
unsafe impl Argument for f32 {}

/// Arguments of a launch, in order.
#[derive(Default)]
pub struct Arguments<'a> {
    pointers: Vec<*mut c_void>,
    _values: PhantomData<&'a ()>,
}

impl<'a> Arguments<'a> {
    /// Adds one.
    #[must_use]
    pub fn with<T: Argument>(mut self, value: &'a T) -> Self {
        self.pointers
            .push(std::ptr::from_ref(value).cast_mut().cast());
        self
    }
}

impl Context {
    /// Retains the primary context of a GPU.
    ///
    /// # Errors
    /// `device_lost`, `no_device_memory`, `driver_failed`.
    pub fn open(gpu: &Gpu) -> Result<Arc<Self>, Failure> {
        caught(|| {
            let fail = |e: DriverError| failure("the primary context", e.0);
            let device = result::device::get(gpu.ordinal).map_err(fail)?;
            // SAFETY: a device the driver gave; released when the value is dropped.
            let raw = unsafe { result::primary_ctx::retain(device) }.map_err(fail)?;
            let mut context = Context {
                gpu: gpu.clone(),
                device,
                raw,
                stream: std::ptr::null_mut(),
                lost: AtomicBool::new(false),
                marks: Mutex::default(),
                scratch: Mutex::default(),
                recording: Mutex::default(),
            };
            context.stream = context.run("a stream", || {
                result::stream::create(result::stream::StreamKind::NonBlocking)
            })?;
            Ok(Arc::new(context))
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Runs a call of another library with the context current, on the stream that a queue stands for.
    ///
    /// # Errors
    /// The call's own.
    pub fn with_stream<R>(
        &self,
        queue: u64,
        call: impl FnOnce(CUstream) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let stream = self.stream(queue);
        let mut answer = None;
        self.run("another library", || {
            answer = Some(call(stream));
            Ok(())
        })?;
        answer.unwrap_or_else(|| Err(Failure::failed("driver_failed", "the call did not run")))
    }

    /// The stream a host's queue number stands for.
    fn stream(&self, queue: u64) -> CUstream {
        match queue {
            0 => self.stream,
            other => std::ptr::with_exposed_provenance_mut(other as usize),
        }
    }

    fn current(&self) -> Result<Current<'_>, Failure> {
        let before = result::ctx::get_current().map_err(|e| failure("the current context", e.0))?;
        // SAFETY: retained, and not released while `self` lives.
        unsafe { result::ctx::set_current(self.raw) }.map_err(|e| failure("the context", e.0))?;
        Ok(Current {
            before: before.unwrap_or(std::ptr::null_mut()),
            _context: PhantomData,
        })
    }

    /// Runs one thing with the context current. An error that no context survives is remembered.
    fn run<R>(&self, what: &str, f: impl FnOnce() -> Result<R, DriverError>) -> Result<R, Failure> {
        if self.lost.load(Ordering::Relaxed) {
            let text = format!("{} was lost before", self.gpu.name);
            return Err(Failure::failed("device_lost", text));
        }
        let done = caught(|| {
            let _current = self.current()?;
            f().map_err(|e| failure(what, e.0))
        });
        if done.as_ref().is_err_and(|f| f.code == "device_lost") {
            self.lost.store(true, Ordering::Relaxed);
        }
        done
    }

    /// Nothing may happen that a recording cannot hold; if one is going on it is spoilt.
    fn unrecorded(&self, code: &str, what: &str) -> Result<(), Failure> {
        let mut recording = self.recording.lock().unwrap_or_else(|e| e.into_inner());
        let Some(take) = recording.as_mut() else {
            return Ok(());
        };
        take.spoilt = true;
        let text = format!("{what} while a queue is recorded");
        Err(Failure::refused(code, text))
    }

    /// Free bytes of its memory.
    ///
    /// # Errors
    /// `device_lost`, `driver_failed`.
    pub fn free_bytes(&self) -> Result<u64, Failure> {
        let (free, _) = self.run("free memory", result::mem_get_info)?;
        Ok(free as u64)
    }

    /// Refuses what would leave less than [`HEADROOM`] free.
    ///
    /// # Errors
    /// `no_device_memory`, with free and needed bytes; as [`Context::free_bytes`].
    pub fn reserve(&self, needed: u64) -> Result<(), Failure> {
        let free = self.free_bytes()?;
        if needed.saturating_add(HEADROOM) <= free {
            return Ok(());
        }
        Err(Failure::refused(
            "no_device_memory",
            format!(
                "{} has {free} bytes free, needed are {needed} and {HEADROOM} of headroom",
                self.gpu.name
            ),
        ))
    }

    /// Memory, freed when the value is dropped.
    ///
    /// # Errors
    /// `no_device_memory`, `device_lost`, `driver_failed`.
    pub fn buffer(self: &Arc<Self>, bytes: u64) -> Result<Buffer, Failure> {
        let address = self.alloc(bytes, 1)?;
        Ok(Buffer {
            context: Arc::clone(self),
            address,
            bytes,
        })
    }

    /// Memory with a content.
    ///
    /// # Errors
    /// As [`Context::buffer`].
    pub fn upload(self: &Arc<Self>, data: &[u8]) -> Result<Buffer, Failure> {
        let buffer = self.buffer(data.len() as u64)?;
        self.copy_in(0, buffer.address, data)?;
        Ok(buffer)
    }

    /// Enqueues a copy of one buffer into another of at least its size.
    ///
    /// # Errors
    /// `argument` where it does not fit; `device_lost`, `driver_failed`.
    pub fn copy_within(&self, queue: u64, to: &Buffer, from: &Buffer) -> Result<(), Failure> {
        if to.bytes < from.bytes {
            let text = format!("{} bytes into {}", from.bytes, to.bytes);
            return Err(Failure::invalid("argument", text));
        }
        let stream = self.stream(queue);
        // SAFETY: both buffers are allocated; whoever drops one waits for the queue, as freeing does.
        self.run("a copy on the device", || unsafe {
            result::memcpy_dtod_async(to.address, from.address, from.bytes as usize, stream)
        })
    }

    /// Makes the shared scratch at least as large: at bind, so that no call allocates.
    ///
    /// # Errors
    /// As [`Context::buffer`].
    pub fn scratch_at_least(&self, bytes: u64) -> Result<(), Failure> {
        let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
        if scratch.bytes >= bytes {
            return Ok(());
        }
        let address = self.alloc(bytes, ALIGN)?;
        if scratch.bytes > 0 {
            let outgrown = scratch.address;
            scratch.outgrown.push(outgrown);
            self.free_outgrown(&mut scratch);
        }
        (scratch.address, scratch.bytes) = (address, bytes);
        Ok(())
    }

    fn free_now(&self, address: u64) {
        // SAFETY: an address `alloc` gave; the driver refuses another.
        let _ = self.run("free", || unsafe { result::free_sync(address) });
    }

    /// Frees what no recording can use any more. Freeing waits for calls that still do.
    fn free_outgrown(&self, scratch: &mut Scratch) {
        if scratch.recordings == 0 {
            let outgrown = scratch.outgrown.drain(..);
            outgrown.for_each(|old| self.free_now(old));
        }
    }

    /// Starts recording.
    fn begin(&self, queue: u64) -> Result<(), Failure> {
        let stream = self.stream(queue);
        let mut recording = self.recording.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(take) = &*recording {
            let text = format!("queue {} is being recorded", take.queue);
            return Err(Failure::invalid("argument", text));
        }
        // The mode is about what other threads ask of the driver that no stream is told. On this stream everything is
        // recorded, whoever sends it; the host keeps other threads off meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of this context.
        self.run("a recording", || unsafe {
            result::stream::begin_capture(stream, mode)
        })?;
        *recording = Some(Take {
            queue,
            spoilt: false,
        });
        Ok(())
    }

    /// A recording more.
    fn recording_begun(&self) {
        let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
        scratch.recordings += 1;
    }

    /// A recording less: freed, or never made.
    fn recording_gone(&self) {
        let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
        scratch.recordings = scratch.recordings.saturating_sub(1);
        self.free_outgrown(&mut scratch);
    }

    /// Enqueues work that uses the shared scratch, whose address it is given. What another queue does with it is waited
    /// for first.
    ///
    /// # Errors
    /// The work's own; `device_lost`.
    pub fn with_scratch(
        &self,
        queue: u64,
        work: impl FnOnce(u64) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
        if scratch.queue != queue {
            self.synchronize(scratch.queue)?;
            scratch.queue = queue;
        }
        work(scratch.address)
    }

    /// Whether the driver knows of an error on a queue; does not wait for it.
    ///
    /// # Errors
    /// `device_lost`, `driver_failed`.
    pub fn query(&self, queue: u64) -> Result<(), Failure> {
        let stream = self.stream(queue);
        // SAFETY: a stream of this context.
        let answer = self.run("the queue", || Ok(unsafe { sys::cuStreamQuery(stream) }))?;
        match answer {
            CUresult::CUDA_SUCCESS
            | CUresult::CUDA_ERROR_NOT_READY
            // It is being recorded, and has nothing to say.
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => Ok(()),
            other => self.run("the queue", || Err(DriverError(other))),
        }
    }

    /// Loads an image that was compiled for this GPU.
    ///
    /// # Errors
    /// `image_refused`, `device_lost`.
    pub fn load(self: &Arc<Self>, image: &[u8]) -> Result<Module, Failure> {
        let loaded = self.run("an image", || {
            // SAFETY: an ELF image in memory for the call; its length is in its headers.
            unsafe { result::module::load_data(image.as_ptr().cast()) }
        });
        let raw = loaded.map_err(|f| match f.code.as_str() {
            "driver_failed" => Failure::refused("image_refused", f.message),
            _ => f,
        })?;
        Ok(Module {
            context: Arc::clone(self),
            raw,
        })
    }

    /// Launches on a queue of this context.
    ///
    /// # Safety
    /// The arguments are those the kernel declares, in number, order and type, and every address among them covers
    /// what the kernel reaches until the launch is done.
    pub unsafe fn launch(
        &self,
        queue: u64,
        kernel: &Kernel,
        grid: Grid,
        mut arguments: Arguments<'_>,
    ) -> Result<(), Failure> {
        let stream = self.stream(queue);
        self.run(&kernel.name, || {
            // SAFETY: promised by the caller; the kernel's module is loaded while the kernel lives.
            unsafe {
                result::launch_kernel(
                    kernel.raw,
                    (grid.blocks.0, grid.blocks.1, 1),
                    (grid.threads, 1, 1),
                    grid.shared,
                    stream,
                    &mut arguments.pointers,
                )
            }
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _ = caught(|| {
            let _current = self.current()?;
            let marks = self.marks.lock().unwrap_or_else(|e| e.into_inner());
            // SAFETY: made here, destroyed once; the context is released last.
            unsafe {
                for mark in marks.values() {
                    let _ = result::event::destroy(mark.start);
                    let _ = result::event::destroy(mark.end);
                }
                if !self.stream.is_null() {
                    let _ = result::stream::destroy(self.stream);
                }
                let scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
                let last = (scratch.bytes > 0).then_some(scratch.address);
                let old = scratch.outgrown.iter().chain(&scratch.freed);
                for address in old.copied().chain(last) {
                    let _ = result::free_sync(address);
                }
            }
            Ok(())
        });
        let _ = caught(|| {
            // SAFETY: retained once, released once.
            let _ = unsafe { result::primary_ctx::release(self.device) };
            Ok(())
        });
    }
}

impl Device for Context {
    fn alloc(&self, bytes: u64, align: u64) -> Result<u64, Failure> {
        if !align.is_power_of_two() || align > ALIGN {
            let what = format!("an alignment of {align}; a power of two up to {ALIGN}");
            return Err(Failure::invalid("argument", what));
        }
        self.unrecorded("capture_alloc", "an allocation")?;
        self.reserve(bytes)?;
        // SAFETY: the memory is handed out undefined, which the interface says it is.
        self.run("memory", || unsafe {
            result::malloc_sync(bytes.max(1) as usize)
        })
    }

    fn free(&self, address: u64) {
        let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
        let recording = self.recording.lock().unwrap_or_else(|e| e.into_inner());
        if recording.is_some() {
            // The driver would refuse, and spoil the recording; it goes when that has ended.
            scratch.freed.push(address);
            return;
        }
        drop(recording);
        drop(scratch);
        self.free_now(address);
    }

    fn copy_in(&self, queue: u64, to: u64, from: &[u8]) -> Result<(), Failure> {
        if from.is_empty() {
            return Ok(());
        }
        self.unrecorded("capture_wait", "a copy that is waited for")?;
        let stream = self.stream(queue);
        self.run("a copy to the device", || {
            // SAFETY: the driver checks the device's range; `from` lives until the synchronisation.
            unsafe {
                result::memcpy_htod_async(to, from, stream)?;
                result::stream::synchronize(stream)
            }
        })
    }

    fn copy_out(&self, queue: u64, to: &mut [u8], from: u64) -> Result<(), Failure> {
        if to.is_empty() {
            return Ok(());
        }
        self.unrecorded("capture_wait", "a copy that is waited for")?;
        let stream = self.stream(queue);
        self.run("a copy from the device", || {
            // SAFETY: as in `copy_in`.
            unsafe {
                result::memcpy_dtoh_async(to, from, stream)?;
                result::stream::synchronize(stream)
            }
        })
    }

    fn queue_new(&self) -> Result<u64, Failure> {
        let made = self.run("a stream", || {
            result::stream::create(result::stream::StreamKind::NonBlocking)
        })?;
        Ok(made.expose_provenance() as u64)
    }

    fn queue_free(&self, queue: u64) {
        if queue == 0 {
            return;
        }
        let mut marks = self.marks.lock().unwrap_or_else(|e| e.into_inner());
        let mark = marks.remove(&queue);
        drop(marks);
        let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
        if scratch.queue == queue {
            let _ = self.synchronize(queue);
            scratch.queue = 0;
        }
        drop(scratch);
        let stream = self.stream(queue);
        // SAFETY: a stream `queue_new` gave, freed once, says the interface.
        let _ = self.run("free", || unsafe {
            if let Some(mark) = mark {
                let _ = result::event::destroy(mark.start);
                let _ = result::event::destroy(mark.end);
            }
            result::stream::destroy(stream)
        });
    }

    fn synchronize(&self, queue: u64) -> Result<(), Failure> {
        self.unrecorded("capture_wait", "waiting for a queue")?;
        let stream = self.stream(queue);
        // SAFETY: a stream of this context.
        self.run("the queue", || unsafe {
            result::stream::synchronize(stream)
        })
    }

    fn mark(&self, queue: u64) -> Result<(), Failure> {
        let stream = self.stream(queue);
        let mut marks = self.marks.lock().unwrap_or_else(|e| e.into_inner());
        let mark = match marks.entry(queue) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
                let start = self.run("an event", event)?;
                let end = self.run("an event", event)?;
                new.insert(Mark { start, end })
            }
        };
        // SAFETY: an event and a stream of this context.
        self.run("a mark", || unsafe {
            result::event::record(mark.start, stream)
        })
    }

    fn elapsed(&self, queue: u64) -> Result<f32, Failure> {
        let stream = self.stream(queue);
        let marks = self.marks.lock().unwrap_or_else(|e| e.into_inner());
        let Some(mark) = marks.get(&queue) else {
            let what = format!("queue {queue} has no mark");
            return Err(Failure::invalid("argument", what));
        };
        // SAFETY: events and a stream of this context.
        self.run("the time", || unsafe {
            result::event::record(mark.end, stream)?;
            result::event::synchronize(mark.end)?;
            presence::elapsed(mark.start, mark.end)
        })
    }

    fn capture_begin(&self, queue: u64) -> Result<(), Failure> {
        // Before the first call of it can be given the scratch.
        self.recording_begun();
        let begun = self.begin(queue);
        begun.inspect_err(|_| self.recording_gone())
    }

    fn capture_end(&self, queue: u64) -> Result<u64, Failure> {
        let stream = self.stream(queue);
        let mut recording = self.recording.lock().unwrap_or_else(|e| e.into_inner());
        let take = recording.take_if(|take| take.queue == queue);
        drop(recording);
        let Some(take) = take else {
            let text = format!("queue {queue} is not being recorded");
            return Err(Failure::invalid("argument", text));
        };
        let freed = || {
            let mut scratch = self.scratch.lock().unwrap_or_else(|e| e.into_inner());
            std::mem::take(&mut scratch.freed)
        };
        // SAFETY: a stream of this context whose recording was begun; the graph is destroyed once, and what was made of
        // it is another value.
        let made = self.run("the end of a recording", || unsafe {
            let graph = result::stream::end_capture(stream)?;
            let made = match graph.is_null() || take.spoilt {
                true => Ok(std::ptr::null_mut()),
                false => result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)),
            };
            if !graph.is_null() {
                let _ = result::graph::destroy(graph);
            }
            made
        });
        let spoilt = || {
            let text = "something happened meanwhile that a recording cannot hold";
            Failure::refused("capture_spoilt", text)
        };
        let ended = match made {
            Ok(exec) if !exec.is_null() => Ok(exec.expose_provenance() as u64),
            Err(lost) if lost.code == "device_lost" => Err(lost),
            Ok(_) => Err(spoilt()),
            Err(_) if take.spoilt => Err(spoilt()),
            Err(other) => Err(Failure::refused("capture_spoilt", other.message)),
        };
        freed()
            .into_iter()
            .for_each(|address| self.free_now(address));
        ended.inspect_err(|_| self.recording_gone())
    }

    fn graph_launch(&self, queue: u64, graph: u64) -> Result<(), Failure> {
        self.unrecorded("capture_wait", "a launch of a recording")?;
        let stream = self.stream(queue);
        let exec = std::ptr::with_exposed_provenance_mut(graph as usize);
        // What was recorded uses the scratch it was given then.
        self.with_scratch(queue, |_| {
            // SAFETY: what `capture_end` gave and the host has not freed, says the interface, and a stream of this
            // context.
            self.run("a recording", || unsafe {
                result::graph::launch(exec, stream)
            })
        })
    }

    fn graph_free(&self, graph: u64) {
        let exec = std::ptr::with_exposed_provenance_mut(graph as usize);
        // SAFETY: as above; freed once.
        let _ = self.run("free", || unsafe { result::graph::exec_destroy(exec) });
        self.recording_gone();
    }
}

impl Module {
    /// Where it is loaded.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A kernel by name, allowed as much dynamic shared memory as it will be launched with.
    ///
    /// # Errors
    /// `kernel_missing`, `image_refused`, `device_lost`.
    pub fn kernel(self: &Arc<Self>, name: &str, shared: u32) -> Result<Kernel, Failure> {
        let text = CString::new(name)
            .map_err(|_| Failure::invalid("argument", format!("kernel `{name}`")))?;
        let missing = |f: Failure| match f.code.as_str() {
            "driver_failed" => Failure::refused("kernel_missing", f.message),
            _ => f,
        };
        let context = &self.context;
        // SAFETY: the module is loaded.
        let found = context.run(name, || unsafe {
            result::module::get_function(self.raw, text)
        });
        let raw = found.map_err(missing)?;
        if shared > 48 << 10 {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module.
            let set = context.run(name, || unsafe {
                result::function::set_function_attribute(raw, attribute, shared as i32)
            });
            set.map_err(missing)?;
        }
        Ok(Kernel {
            raw,
            name: name.into(),
            module: Arc::clone(self),
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once; every kernel of it holds it.
        let _ = self
            .context
            .run("unload", || unsafe { result::module::unload(self.raw) });
    }
}

impl Kernel {
    /// Where it runs.
    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }
}

/// Device memory.
pub struct Buffer {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes on the device", self.bytes)
    }
}

impl Buffer {
    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.context.free(self.address);
    }
}

/// What an error of the driver means.
fn failure(what: &str, answer: CUresult) -> Failure {
    use CUresult as R;
    let text = format!("{what}: {answer:?}");
    match answer {
        R::CUDA_ERROR_OUT_OF_MEMORY => Failure::refused("no_device_memory", text),
        R::CUDA_ERROR_LAUNCH_FAILED
        | R::CUDA_ERROR_ILLEGAL_ADDRESS
        | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | R::CUDA_ERROR_MISALIGNED_ADDRESS
        | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | R::CUDA_ERROR_INVALID_PC
        | R::CUDA_ERROR_HARDWARE_STACK_ERROR
        | R::CUDA_ERROR_ECC_UNCORRECTABLE
        | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | R::CUDA_ERROR_ASSERT
        | R::CUDA_ERROR_LAUNCH_TIMEOUT
        | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | R::CUDA_ERROR_DEVICE_UNAVAILABLE
        | R::CUDA_ERROR_NO_DEVICE
        | R::CUDA_ERROR_DEINITIALIZED
        | R::CUDA_ERROR_UNKNOWN => Failure::failed("device_lost", text),
        _ => Failure::failed("driver_failed", text),
    }
}
