//! The one thread pool: the host's own loops and every plugin's `parallel_for`.
//!
//! A decode step runs 100 to 200 short regions with host work of some microseconds between them, so what matters is
//! the cost of getting a second thread into a region and out again. Workers spin for [`SPIN`] after a region and
//! then park. A caller that finds them parked pays a futex wake and goes on alone until they arrive: it never waits
//! for a worker that has not started.
//!
//! Measured by `examples/pool_latency.rs` (2 vCPUs of an EPYC, Zen 4, under a hypervisor, 2 threads, lower quartile):
//!
//! | | workers spinning | workers parked |
//! |---|---|---|
//! | both threads meet in a region | 0.8 us | 20 us |
//! | 16 indices of 2 us (32 us of work) | 18 us | 33 us |
//! | nobody comes (region closed at once) | 0.03 us | 2 us |
//!
//! While a captured step runs, its caller holds [`Pool::stay_awake`]: workers spin until it is dropped and park at once
//! then, so nothing spins between steps. Other calls leave workers [`SPIN`] to meet the next region.
//!
//! Rules:
//! - the caller takes part; indices are handed out in chunks by one atomic counter, so an uneven load evens out;
//! - one region at a time: a second caller runs its own region serially instead of waiting. The cores are busy
//!   anyway, and nothing can deadlock;
//! - a call from inside a body runs serially; so do regions of one index and pools of one thread;
//! - a body given by a plugin must not unwind (it cannot: it is `extern "C"`); a body of the host may: the first
//!   payload is raised again in the caller after the region, and no worker is lost.
//!
//! Not here: pinning, priorities, work stealing between regions.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::hint::spin_loop;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::error::LoaderError;

/// How long a worker looks for the next region before it parks. Between two regions of a decode step lie the host's
/// norms, rope and attention, tens of microseconds on SmolLM2; a worker that parks meanwhile costs the next region its
/// wake (20 us here). Whole steps with every seat attached, host time by treated time, two alternating runs each:
/// 50 us 3.75 and 2.95, 200 us 3.77 and 3.88.
pub const SPIN: Duration = Duration::from_micros(200);

/// Name of the variable that sizes the pool when nobody called [`configure_threads`].
pub const THREADS: &str = "STRUCTURES_THREADS";

/// Chunks a thread gets on average: enough to even out, few enough not to fight over the counter.
const CHUNKS_PER_THREAD: usize = 8;
/// Turns of waiting for a started worker before the core is offered to somebody else.
const TURNS_BEFORE_YIELD: u32 = 10_000;
/// Turns between two looks at the clock while spinning.
const TURNS_PER_CLOCK: u32 = 32;

/// What a region runs: `body(user, i)`.
pub type Body = unsafe extern "C" fn(user: *mut c_void, i: usize);

thread_local! {
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

static GLOBAL: OnceLock<Pool> = OnceLock::new();

/// Sizes the shared pool: `threads` in all, the caller of a region included. Once, before its first use.
///
/// # Errors
/// [`LoaderError::PoolRunning`] when it already runs with another size.
pub fn configure_threads(threads: usize) -> Result<(), LoaderError> {
    let requested = threads.max(1);
    let current = GLOBAL.get_or_init(|| Pool::new(requested)).threads();
    if current == requested {
        Ok(())
    } else {
        Err(LoaderError::PoolRunning { current, requested })
    }
}

/// Runs `body(i)` for every `i < n` on the shared pool; see [`Pool::parallel_for`].
pub fn parallel_for<F: Fn(usize) + Sync>(n: usize, body: F) {
    Pool::global().parallel_for(n, body);
}

/// A set of worker threads. Programs use the shared one; tests make their own.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// The shared pool. Its size: [`configure_threads`], else [`THREADS`], else the cores this process may use.
    pub fn global() -> &'static Pool {
        GLOBAL.get_or_init(|| {
            let from_variable = (!crate::sys::secure_execution())
                .then(|| {
                    std::env::var(THREADS)
                        .ok()
                        .and_then(|v| v.parse::<usize>().ok())
                })
                .flatten();
            let cores = || std::thread::available_parallelism().map_or(1, usize::from);
            Pool::new(from_variable.filter(|n| *n > 0).unwrap_or_else(cores))
        })
    }

    /// A pool of `threads` threads, the caller of a region being one of them. Threads that the system refuses are
    /// left out.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: Padded(AtomicU64::new(0)),
            next: Padded(AtomicUsize::new(0)),
            sleepers: Padded(AtomicUsize::new(0)),
            awake: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            shutdown: AtomicBool::new(false),
            job: UnsafeCell::new(Job::NOTHING),
            seats: (1..threads).map(|_| Seat::default()).collect(),
        });
        let mut workers = Vec::new();
        for index in 0..threads.saturating_sub(1) {
            let shared = Arc::clone(&shared);
            let worker = std::thread::Builder::new()
                .name(format!("structures-{}", index + 1))
                .spawn(move || shared.work(index));
            match worker {
                Ok(handle) => workers.push(handle),
                Err(e) => tracing::warn!("thread pool: a worker could not be started: {e}"),
            }
        }
        Pool { shared, workers }
    }

    /// Threads of a region, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Wakes the workers and keeps them spinning for regions until the guard is dropped.
    pub fn stay_awake(&self) -> Awake<'_> {
        self.shared.awake.fetch_add(1, Ordering::SeqCst);
        self.shared.wake(usize::MAX);
        Awake(&self.shared)
    }

    /// Workers that are parked now.
    pub fn parked(&self) -> usize {
        self.shared.sleepers.0.load(Ordering::SeqCst)
    }

    /// Runs `body(i)` for every `i < n`, on this thread and the workers, and returns when all are done.
    ///
    /// # Panics
    /// When a body panics: the first payload is raised again here, after the region; indices not begun are left out.
    pub fn parallel_for<F: Fn(usize) + Sync>(&self, n: usize, body: F) {
        if n <= 1 || self.workers.is_empty() || IN_REGION.get() {
            (0..n).for_each(body);
            return;
        }
        let job = Guarded {
            body,
            stop: AtomicBool::new(false),
            payload: Mutex::new(None),
        };
        // SAFETY: `run` returns only when no worker is inside a body any more, so `job` outlives every use;
        // `F: Sync` allows the shared use, and the trampoline does not unwind.
        unsafe { self.run(n, guarded::<F>, (&raw const job).cast_mut().cast()) };
        let payload = job
            .payload
            .into_inner()
            .unwrap_or_else(|poison| poison.into_inner());
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }

    /// Cuts `data` into pieces of `chunk` elements (the last may be shorter) and runs `body(index, piece)` for each.
    ///
    /// # Panics
    /// As [`Pool::parallel_for`], and when `chunk` is 0.
    pub fn parallel_chunks<T, F>(&self, data: &mut [T], chunk: usize, body: F)
    where
        T: Send,
        F: Fn(usize, &mut [T]) + Sync,
    {
        let pieces: Vec<Mutex<&mut [T]>> = data.chunks_mut(chunk).map(Mutex::new).collect();
        self.parallel_for(pieces.len(), |i| {
            // Each index runs once, so nobody waits here and a poisoned lock is never met again.
            let mut piece = pieces[i]
                .lock()
                .unwrap_or_else(|poison| poison.into_inner());
            body(i, &mut piece);
        });
    }

    /// The raw form of [`Pool::parallel_for`], which plugins reach through the host's table.
    ///
    /// # Safety
    /// `body(user, i)` may be called for every `i < n` from any thread, several at a time, until this returns, and
    /// does not unwind.
    pub(crate) unsafe fn run(&self, n: usize, body: Body, user: *mut c_void) {
        let threads = self.threads();
        let alone = n <= 1 || threads == 1 || n > usize::MAX / 2 || IN_REGION.get();
        if alone || self.shared.busy.swap(true, Ordering::Acquire) {
            for i in 0..n {
                // SAFETY: promised by the caller.
                unsafe { body(user, i) };
            }
            return;
        }
        let chunk = (n / (threads * CHUNKS_PER_THREAD)).max(1);
        let job = Job {
            body,
            user,
            n,
            chunk,
        };
        // SAFETY: `busy` is ours and the last region ended with nobody inside, so nobody reads the job.
        unsafe { *self.shared.job.get() = job };
        self.shared.open_region(n.div_ceil(chunk) - 1);
        IN_REGION.set(true);
        self.shared.take_chunks(job);
        IN_REGION.set(false);
        self.shared.close_region();
        self.shared.busy.store(false, Ordering::Release);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        self.shared.wake(usize::MAX);
        for worker in self.workers.drain(..) {
            // A worker does not panic: bodies cannot unwind into it.
            let _ = worker.join();
        }
    }
}

/// While it is held, workers of its pool spin. See [`Pool::stay_awake`].
#[derive(Debug)]
pub struct Awake<'a>(&'a Shared);

impl Awake<'_> {
    /// Lets the workers park while `body` computes with threads of its own.
    pub fn aside<R>(&self, body: impl FnOnce() -> R) -> R {
        /// Also when `body` unwinds.
        struct Back<'a>(&'a Shared);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                self.0.awake.fetch_add(1, Ordering::SeqCst);
            }
        }
        self.0.awake.fetch_sub(1, Ordering::SeqCst);
        let _back = Back(self.0);
        body()
    }
}

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        self.0.awake.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One region's work.
#[derive(Clone, Copy, Debug)]
struct Job {
    body: Body,
    user: *mut c_void,
    n: usize,
    chunk: usize,
}

impl Job {
    const NOTHING: Job = Job {
        body: nothing,
        user: std::ptr::null_mut(),
        n: 0,
        chunk: 1,
    };
}

unsafe extern "C" fn nothing(_: *mut c_void, _: usize) {}

/// Keeps hot words on cache lines of their own (two: the adjacent line is fetched along).
#[repr(align(128))]
#[derive(Debug)]
struct Padded<T>(T);

#[derive(Debug, Default)]
struct Seat {
    thread: OnceLock<Thread>,
    parked: AtomicBool,
}

#[derive(Debug)]
struct Shared {
    /// `epoch << 32 | workers inside << 1 | open`. A worker enters by incrementing while open, so the caller that
    /// closed the region knows exactly whom to wait for, and a late worker touches nothing.
    state: Padded<AtomicU64>,
    /// Next index to hand out.
    next: Padded<AtomicUsize>,
    sleepers: Padded<AtomicUsize>,
    /// Callers that keep the workers spinning.
    awake: AtomicUsize,
    /// Held by the caller of the running region.
    busy: AtomicBool,
    shutdown: AtomicBool,
    /// Written by the holder of `busy` while the region is closed and empty; read by those who entered.
    job: UnsafeCell<Job>,
    seats: Vec<Seat>,
}

// SAFETY: `job` is written and read as its field says; everything else is atomic. `Job` holds a pointer that only
// the body interprets, whose caller promised any thread.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

const OPEN: u64 = 1;
const INSIDE_ONE: u64 = 2;
const EPOCH_SHIFT: u32 = 32;

fn inside(state: u64) -> u64 {
    (state & 0xffff_ffff) >> 1
}

impl Shared {
    /// Publishes the job and wakes at most `helpers` parked workers.
    fn open_region(&self, helpers: usize) {
        self.next.0.store(0, Ordering::Relaxed);
        let epoch =
            (self.state.0.load(Ordering::Relaxed) >> EPOCH_SHIFT).wrapping_add(1) << EPOCH_SHIFT;
        // SeqCst with the load in `wake`: either we see the sleeper, or it sees the open region.
        self.state.0.store(epoch | OPEN, Ordering::SeqCst);
        self.wake(helpers);
    }

    /// Lets nobody else in and waits for those inside.
    fn close_region(&self) {
        let mut state = self.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        let mut turns = 0;
        while inside(state) != 0 {
            turns += 1;
            if turns < TURNS_BEFORE_YIELD {
                spin_loop();
            } else {
                std::thread::yield_now();
            }
            state = self.state.0.load(Ordering::Acquire);
        }
    }

    fn take_chunks(&self, job: Job) {
        loop {
            let start = self.next.0.fetch_add(job.chunk, Ordering::Relaxed);
            if start >= job.n {
                return;
            }
            for i in start..job.n.min(start + job.chunk) {
                // SAFETY: the region is open or has us inside, so its caller has not returned and its promise holds.
                unsafe { (job.body)(job.user, i) };
            }
        }
    }

    fn wake(&self, at_most: usize) {
        if self.sleepers.0.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut left = at_most;
        for seat in &self.seats {
            if left == 0 {
                return;
            }
            if seat.parked.swap(false, Ordering::AcqRel) {
                self.sleepers.0.fetch_sub(1, Ordering::Relaxed);
                if let Some(thread) = seat.thread.get() {
                    thread.unpark();
                }
                left -= 1;
            }
        }
    }

    fn work(&self, index: usize) {
        IN_REGION.set(true);
        let seat = &self.seats[index];
        let _ = seat.thread.set(std::thread::current()); // set once: this is the seat's only thread
        let mut seen = 0;
        while !self.shutdown.load(Ordering::Acquire) {
            match self.spin_for_region(seen) {
                Some(epoch) => {
                    seen = epoch;
                    // SAFETY: we are inside an open region: its caller wrote the job before opening it (acquired by
                    // entering) and writes no other before we have left.
                    let job = unsafe { *self.job.get() };
                    self.take_chunks(job);
                    self.state.0.fetch_sub(INSIDE_ONE, Ordering::Release);
                }
                None => self.park(seat, seen),
            }
        }
    }

    /// Enters the next region after `seen` and returns its epoch; `None` when none came in time.
    fn spin_for_region(&self, seen: u64) -> Option<u64> {
        let start = Instant::now();
        let mut kept_awake = false;
        loop {
            for _ in 0..TURNS_PER_CLOCK {
                let state = self.state.0.load(Ordering::Acquire);
                let epoch = state >> EPOCH_SHIFT;
                if state & OPEN != 0 && epoch != seen {
                    let entered = self.state.0.compare_exchange_weak(
                        state,
                        state + INSIDE_ONE,
                        Ordering::AcqRel,
                        Ordering::Relaxed,
                    );
                    if entered.is_ok() {
                        return Some(epoch);
                    }
                }
                spin_loop();
            }
            if self.shutdown.load(Ordering::Relaxed) {
                return None;
            }
            if self.awake.load(Ordering::Relaxed) > 0 {
                kept_awake = true;
            } else if kept_awake || start.elapsed() > SPIN {
                return None;
            }
        }
    }

    fn park(&self, seat: &Seat, seen: u64) {
        seat.parked.store(true, Ordering::SeqCst);
        self.sleepers.0.fetch_add(1, Ordering::SeqCst);
        let state = self.state.0.load(Ordering::SeqCst);
        let missed = state & OPEN != 0 && state >> EPOCH_SHIFT != seen;
        // SeqCst with `stay_awake`: either it sees the sleeper, or we see it.
        let kept = self.awake.load(Ordering::SeqCst) > 0;
        if missed || kept || self.shutdown.load(Ordering::SeqCst) {
            if seat.parked.swap(false, Ordering::AcqRel) {
                self.sleepers.0.fetch_sub(1, Ordering::Relaxed);
            }
            return;
        }
        while seat.parked.load(Ordering::Acquire) {
            std::thread::park();
        }
    }
}

struct Guarded<F> {
    body: F,
    stop: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Never unwinds.
unsafe extern "C" fn guarded<F: Fn(usize) + Sync>(user: *mut c_void, i: usize) {
    // SAFETY: `user` is the `Guarded<F>` of the `parallel_for` that waits for this region.
    let job = unsafe { &*user.cast_const().cast::<Guarded<F>>() };
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
            // Dropping a payload runs its author's code, which may panic again.
            Some(_) => std::mem::forget(payload),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(n: usize) -> Vec<AtomicUsize> {
        (0..n).map(|_| AtomicUsize::new(0)).collect()
    }

    fn all_once(counts: &[AtomicUsize]) -> bool {
        counts.iter().all(|c| c.load(Ordering::Relaxed) == 1)
    }

    #[test]
    fn every_index_runs_once_for_any_size() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for n in [0, 1, 2, 3, 17, 1000] {
                let hits = counts(n);
                pool.parallel_for(n, |i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(all_once(&hits), "{threads} threads, {n} indices");
            }
        }
    }

    #[test]
    fn many_short_regions_lose_nothing() {
        let pool = Pool::new(4);
        let total = AtomicUsize::new(0);
        for round in 0..20_000_usize {
            pool.parallel_for(4, |i| {
                total.fetch_add(i + 1, Ordering::Relaxed);
            });
            assert_eq!(total.load(Ordering::Relaxed), (round + 1) * 10);
            if round % 4_000 == 0 {
                std::thread::sleep(SPIN * 3); // let the workers park in between
            }
        }
    }

    #[test]
    fn writes_of_a_region_are_seen_after_it() {
        let pool = Pool::new(3);
        let mut data = vec![0_u64; 1003];
        for round in 1..200 {
            pool.parallel_chunks(&mut data, 100, |index, piece| {
                piece
                    .iter_mut()
                    .for_each(|v| *v = round * 100 + index as u64);
            });
            assert!(data
                .iter()
                .enumerate()
                .all(|(i, v)| *v == round * 100 + (i / 100) as u64));
        }
    }

    #[test]
    fn a_nested_region_runs_serially_on_its_thread() {
        let pool = Pool::new(2);
        let hits = counts(64);
        pool.parallel_for(8, |i| {
            let own = std::thread::current().id();
            pool.parallel_for(8, |j| {
                assert_eq!(std::thread::current().id(), own);
                hits[i * 8 + j].fetch_add(1, Ordering::Relaxed);
            });
        });
        assert!(all_once(&hits));
    }

    #[test]
    fn callers_at_once_all_finish() {
        let pool = Pool::new(2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let hits = counts(16);
                        pool.parallel_for(16, |i| {
                            hits[i].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(all_once(&hits));
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_no_worker_is_lost() {
        let pool = Pool::new(2);
        for _ in 0..50 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.parallel_for(64, |i| assert!(i != 40, "planted at {i}"));
            }));
            let payload = caught.expect_err("the body panics");
            assert_eq!(
                payload.downcast_ref::<String>().expect("text"),
                "planted at 40"
            );
            let hits = counts(64);
            pool.parallel_for(64, |i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(all_once(&hits));
        }
    }

    #[test]
    fn the_work_is_really_shared() {
        let pool = Pool::new(2);
        let threads = Mutex::new(std::collections::HashSet::new());
        pool.parallel_for(4, |_| {
            threads
                .lock()
                .expect("lock")
                .insert(std::thread::current().id());
            std::thread::sleep(Duration::from_millis(5));
        });
        assert_eq!(threads.into_inner().expect("lock").len(), 2);
    }

    #[test]
    fn workers_spin_while_a_step_runs_and_are_parked_between() {
        let pool = Pool::new(3);
        let until = |what: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !what() {
                assert!(start.elapsed() < Duration::from_secs(10), "never");
                std::thread::yield_now();
            }
        };
        until(&|| pool.parked() == 2);
        for _ in 0..20 {
            let awake = pool.stay_awake();
            until(&|| pool.parked() == 0);
            std::thread::sleep(SPIN * 4);
            assert_eq!(pool.parked(), 0, "they spin as long as the guard lives");
            let hits = counts(64);
            pool.parallel_for(64, |i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(all_once(&hits));
            awake.aside(|| until(&|| pool.parked() == 2));
            drop(awake);
            until(&|| pool.parked() == 2);
        }
    }

    #[test]
    fn the_shared_pool_is_sized_once() {
        let running = Pool::global().threads();
        configure_threads(running).expect("the same size");
        let error = configure_threads(running + 1)
            .expect_err("another size")
            .to_string();
        assert!(
            error.contains(&format!("{running} threads running")),
            "{error}"
        );
        assert!(
            error.contains(&format!("{} requested", running + 1)),
            "{error}"
        );
    }
}
