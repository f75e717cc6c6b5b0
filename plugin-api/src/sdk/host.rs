//! The services the host lends, as safe methods.
//!
//! Owns the trampoline of `parallel_for`: a panic in a body is caught on the thread it happened on,
//! the remaining indices are skipped, and the first payload is raised again in the caller once the
//! loop is over. So no unwinding ever crosses the host's frames.

use std::alloc::Layout;
use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::size_of;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::abi::{HostVTable, LogLevel, Str, API_MINOR};
use crate::sdk::Failure;

/// Handle on the host's services: one pointer, copied freely, usable from any thread. Valid for as
/// long as the plugin instance and its bound forms; do not keep it in a global.
#[derive(Clone, Copy)]
pub struct Host {
    table: &'static HostVTable,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("api_minor", &self.table.api_minor)
            .finish_non_exhaustive()
    }
}

impl Host {
    /// Takes the table the host gave to `open`.
    ///
    /// # Safety `table` is null, or a host's table that lives and keeps its promises for as long as
    /// the handle is used.
    pub unsafe fn from_raw(table: *const HostVTable) -> Result<Self, Failure> {
        // SAFETY: promised by the caller.
        let table: &'static HostVTable = unsafe { table.as_ref() }
            .ok_or_else(|| Failure::invalid("argument", "the host's table is null"))?;
        let (found, expected) = (table.struct_size as usize, size_of::<HostVTable>());
        if found < expected {
            return Err(Failure::invalid(
                "argument",
                format!("the host's table has {found} bytes, 1.0 has {expected}"),
            ));
        }
        Ok(Host { table })
    }

    /// A host that is not there, for unit tests of plugins: `parallel_for` runs serially, logs
    /// vanish, scratch comes from the heap.
    pub fn detached() -> Self {
        Host { table: &DETACHED }
    }

    /// The table itself, as a host passes it to `open`.
    pub fn raw(&self) -> *const HostVTable {
        self.table
    }

    /// Writes to the host's log, under the plugin's id.
    pub fn log(&self, level: LogLevel, target: &str, message: &str) {
        // SAFETY: a live table; both texts are borrowed for the call only.
        unsafe {
            (self.table.log)(
                self.table.ctx,
                level as u32,
                Str::new(target),
                Str::new(message),
            )
        }
    }

    /// Threads that [`Host::parallel_for`] uses, the caller included.
    pub fn num_threads(&self) -> usize {
        // SAFETY: a live table.
        unsafe { (self.table.num_threads)(self.table.ctx) }.max(1)
    }

    /// Runs `body(i)` for every `i < n` on the host's pool, the caller included; returns when all
    /// are done.
    ///
    /// # Panics
    /// When a body panics: the first payload is raised again here, after the loop.
    pub fn parallel_for<F: Fn(usize) + Sync>(&self, n: usize, body: F) {
        if n <= 1 {
            (0..n).for_each(body);
            return;
        }
        let job = Job {
            body,
            stop: AtomicBool::new(false),
            payload: Mutex::new(None),
        };
        let user = (&raw const job).cast_mut().cast::<c_void>();
        // SAFETY: the host calls `run` only until this returns, so `job` outlives every use; `F:
        // Sync` makes the shared use from several threads sound, and `run` does not unwind.
        unsafe { (self.table.parallel_for)(self.table.ctx, n, run::<F>, user) };
        let payload = job
            .payload
            .into_inner()
            .unwrap_or_else(|poison| poison.into_inner());
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }

    /// Cuts `data` into pieces of `chunk` elements (the last may be shorter) and runs `body(index,
    /// piece)` for each on the host's pool: how threads write disjoint parts of one buffer without
    /// `unsafe`.
    ///
    /// # Panics
    /// As [`Host::parallel_for`], and when `chunk` is 0.
    pub fn parallel_chunks<T, F>(&self, data: &mut [T], chunk: usize, body: F)
    where
        T: Send,
        F: Fn(usize, &mut [T]) + Sync,
    {
        assert!(chunk > 0, "a chunk has at least one element");
        let count = data.len().div_ceil(chunk);
        if count <= 1 {
            if count == 1 {
                body(0, data);
            }
            return;
        }
        let pieces = Pieces {
            base: data.as_mut_ptr(),
            len: data.len(),
            chunk,
            _data: PhantomData,
        };
        // Pieces are handed out by a counter of our own, not by the host's index: each exactly
        // once, whatever the host does, and what it left out is done below.
        let next = AtomicUsize::new(0);
        let take = || {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index < count {
                // SAFETY: the counter gives every index once, so no two pieces that exist overlap.
                body(index, unsafe { pieces.piece(index) });
            }
            index < count
        };
        self.parallel_for(count, |_| {
            take();
        });
        while take() {}
    }

    /// [`Host::parallel_chunks`] with a body that may fail: the first failure is answered, pieces
    /// that did not start yet are skipped.
    ///
    /// # Panics
    /// As [`Host::parallel_chunks`].
    pub fn try_parallel_chunks<T, F>(
        &self,
        data: &mut [T],
        chunk: usize,
        body: F,
    ) -> Result<(), Failure>
    where
        T: Send,
        F: Fn(usize, &mut [T]) -> Result<(), Failure> + Sync,
    {
        let first = OnceLock::new();
        self.parallel_chunks(data, chunk, |index, piece| {
            if first.get().is_none() {
                if let Err(failure) = body(index, piece) {
                    let _ = first.set(failure);
                }
            }
        });
        first.into_inner().map_or(Ok(()), Err)
    }

    /// Leases scratch that forms of this plugin with the same `tag` share; `None` when memory is
    /// short. Given back when dropped. Content does not survive a call.
    pub fn scratch(&self, tag: &str, bytes: u64, align: u64) -> Option<Scratch> {
        // SAFETY: a live table; the tag is borrowed for the call only.
        let memory = unsafe {
            (self.table.scratch_lease)(self.table.ctx, Str::new(tag), bytes, align.max(1))
        };
        (!memory.is_null()).then_some(Scratch {
            host: *self,
            memory,
            bytes,
        })
    }
}

/// Leased scratch, given back when dropped.
///
/// Other forms that lease the same tag see the same memory, so it is reached through a pointer:
/// nothing here can know that no other form of the plugin is inside a call.
#[derive(Debug)]
pub struct Scratch {
    host: Host,
    memory: *mut c_void,
    bytes: u64,
}

// SAFETY: the lease is plain memory; the host's release may be called from any thread.
unsafe impl Send for Scratch {}

impl Scratch {
    /// First byte, aligned as asked.
    pub fn as_ptr(&self) -> *mut c_void {
        self.memory
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let table = self.host.table;
        // SAFETY: leased from this table, given back once.
        unsafe { (table.scratch_release)(table.ctx, self.memory) }
    }
}

struct Job<F> {
    body: F,
    stop: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
}

/// What the host's pool calls. Never unwinds.
unsafe extern "C" fn run<F: Fn(usize) + Sync>(user: *mut c_void, i: usize) {
    // SAFETY: `user` is the `Job<F>` of the `parallel_for` that is waiting for this call.
    let job = unsafe { &*user.cast_const().cast::<Job<F>>() };
    if job.stop.load(Ordering::Relaxed) {
        return;
    }
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (job.body)(i))) {
        job.stop.store(true, Ordering::Relaxed);
        let mut first = job
            .payload
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        match *first {
            None => *first = Some(payload),
            // Dropping a payload runs its author's code, which may panic too.
            Some(_) => std::mem::forget(payload),
        }
    }
}

/// A slice cut into disjoint pieces, shared between threads.
struct Pieces<'a, T> {
    base: *mut T,
    len: usize,
    chunk: usize,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: threads only ever reach disjoint pieces, and `T: Send` lets another thread have one.
unsafe impl<T: Send> Sync for Pieces<'_, T> {}

impl<T> Pieces<'_, T> {
    /// # Safety
    /// No other piece with the same index is alive.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's promise above
    unsafe fn piece(&self, index: usize) -> &mut [T] {
        let start = index * self.chunk;
        let len = self.chunk.min(self.len - start);
        // SAFETY: inside the borrowed slice, and the caller makes it the only borrow of that part.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), len) }
    }
}

static DETACHED: HostVTable = HostVTable {
    struct_size: size_of::<HostVTable>() as u32,
    api_minor: API_MINOR,
    ctx: std::ptr::null_mut(),
    log: detached_log,
    num_threads: detached_num_threads,
    parallel_for: detached_parallel_for,
    scratch_lease: detached_lease,
    scratch_release: detached_release,
};

unsafe extern "C" fn detached_log(_: *mut c_void, _: u32, _: Str, _: Str) {}

unsafe extern "C" fn detached_num_threads(_: *mut c_void) -> usize {
    1
}

unsafe extern "C" fn detached_parallel_for(
    _: *mut c_void,
    n: usize,
    body: unsafe extern "C" fn(*mut c_void, usize),
    user: *mut c_void,
) {
    for i in 0..n {
        // SAFETY: the caller's body and its own argument, as the ABI says.
        unsafe { body(user, i) };
    }
}

/// The header in front of a detached lease remembers how it was allocated.
const HEADER: usize = 2 * size_of::<usize>();

unsafe extern "C" fn detached_lease(_: *mut c_void, _: Str, bytes: u64, align: u64) -> *mut c_void {
    let (Ok(bytes), Ok(align)) = (usize::try_from(bytes), usize::try_from(align)) else {
        return std::ptr::null_mut();
    };
    let front = align.max(HEADER);
    let Some(layout) = align
        .is_power_of_two()
        .then(|| bytes.checked_add(front))
        .flatten()
        .and_then(|size| Layout::from_size_align(size, front).ok())
    else {
        return std::ptr::null_mut();
    };
    // SAFETY: the size is at least one header, so not zero.
    let base = unsafe { std::alloc::alloc_zeroed(layout) };
    if base.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the front is `layout.align()` bytes, which holds the header just before the returned
    // address.
    unsafe {
        let memory = base.add(layout.align());
        let header = memory.cast::<usize>();
        header.sub(1).write(layout.align());
        header.sub(2).write(layout.size());
        memory.cast()
    }
}

unsafe extern "C" fn detached_release(_: *mut c_void, memory: *mut c_void) {
    if memory.is_null() {
        return;
    }
    // SAFETY: `memory` came from `detached_lease`, which wrote align and size right before it.
    unsafe {
        let header = memory.cast::<usize>();
        let (align, size) = (header.sub(1).read(), header.sub(2).read());
        let layout = Layout::from_size_align_unchecked(size, align);
        std::alloc::dealloc(memory.cast::<u8>().sub(align), layout);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with real threads that also repeats an index and leaves one out.
    unsafe extern "C" fn unruly_parallel_for(
        _: *mut c_void,
        n: usize,
        body: unsafe extern "C" fn(*mut c_void, usize),
        user: *mut c_void,
    ) {
        let user = user as usize;
        std::thread::scope(|scope| {
            for i in [0, 0].into_iter().chain(1..n.saturating_sub(2)) {
                // SAFETY: `user` lives until the scope ends; the body says it may run on any
                // thread.
                scope.spawn(move || unsafe { body(user as *mut c_void, i) });
            }
        });
    }

    static UNRULY: HostVTable = HostVTable {
        parallel_for: unruly_parallel_for,
        num_threads: unruly_threads,
        ..DETACHED
    };

    unsafe extern "C" fn unruly_threads(_: *mut c_void) -> usize {
        4
    }

    fn unruly() -> Host {
        // SAFETY: a static table of this test.
        unsafe { Host::from_raw(&UNRULY) }.expect("a whole table")
    }

    #[test]
    fn every_index_runs() {
        let hits = AtomicUsize::new(0);
        Host::detached().parallel_for(10, |i| {
            hits.fetch_add(1 << i, Ordering::Relaxed);
        });
        assert_eq!(hits.into_inner(), 0x3ff);
    }

    #[test]
    fn chunks_cover_a_slice_once_even_on_an_unruly_host() {
        for host in [Host::detached(), unruly()] {
            let mut data = vec![0_u32; 1003];
            host.parallel_chunks(&mut data, 100, |index, piece| {
                assert_eq!(piece.len(), if index == 10 { 3 } else { 100 });
                piece.iter_mut().for_each(|v| *v += index as u32 + 1);
            });
            assert!(data
                .iter()
                .enumerate()
                .all(|(i, v)| *v == (i / 100) as u32 + 1));
        }
    }

    #[test]
    fn the_first_failure_of_a_piece_is_answered() {
        let mut data = vec![0; 40];
        let failed = Host::detached().try_parallel_chunks(&mut data, 10, |index, piece| {
            piece.fill(1);
            match index {
                0 => Ok(()),
                other => Err(Failure::refused("envelope", format!("piece {other}"))),
            }
        });
        assert_eq!(failed, Err(Failure::refused("envelope", "piece 1")));
        assert_eq!(
            data.iter().sum::<i32>(),
            20,
            "what follows a failure is skipped"
        );
        assert_eq!(
            unruly().try_parallel_chunks(&mut data, 7, |_, _| Ok(())),
            Ok(())
        );
    }

    #[test]
    fn a_panic_in_a_body_reaches_the_caller_with_its_payload() {
        for host in [Host::detached(), unruly()] {
            let caught =
                catch_unwind(|| host.parallel_for(8, |i| assert!(i != 3, "planted at {i}")))
                    .expect_err("the body panics");
            let text = caught.downcast_ref::<String>().expect("formatted payload");
            assert_eq!(text, "planted at 3");
        }
    }

    #[test]
    fn scratch_is_aligned_and_given_back() {
        let host = Host::detached();
        for align in [1, 8, 64, 4096] {
            let lease = host.scratch("tag", 1000, align).expect("memory");
            assert_eq!((lease.as_ptr() as u64 % align, lease.bytes()), (0, 1000));
        }
        assert!(host.scratch("tag", u64::MAX, 64).is_none());
        assert!(
            host.scratch("tag", 8, 3).is_none(),
            "an alignment that is no power of two"
        );
    }

    #[test]
    fn a_short_or_missing_table_is_refused() {
        // SAFETY: null is never read, the short table lies about its size only.
        unsafe {
            assert!(Host::from_raw(std::ptr::null()).is_err());
            let short = Box::leak(Box::new(HostVTable {
                struct_size: 16,
                ..DETACHED
            }));
            assert!(Host::from_raw(short)
                .expect_err("short")
                .message
                .contains("16"));
        }
    }
}
