//! Feeds a loader mutated documents, the same ones for the same seed, and says what must never happen: a panic, a
//! hang, memory without bound.
//!
//! Owns the mutations, the deadline and the memory limit. A loader is a [`Target`]: good documents and a closure, so
//! that any format can be tried. Memory is the resident peak of the process as the kernel counts it, which needs no
//! allocator of our own; where the kernel does not tell it (outside Linux), the limit is not judged and
//! [`Report::peak_bytes`] is `None`.

#![forbid(unsafe_code)]

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

mod mutate;
mod random;

pub use mutate::Mutator;
pub use random::Random;

/// Hands one document to a loader; what it answers does not matter, that it answers does.
pub type Feed = Box<dyn Fn(&[u8]) + Send + Sync>;

/// What is fed.
pub struct Target {
    /// For the report.
    pub name: String,
    /// Good documents to start from.
    pub seeds: Vec<Vec<u8>>,
    /// Takes one document; whatever it answers is fine.
    pub feed: Feed,
}

/// What a run may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The whole run.
    pub run: Duration,
    /// One case.
    pub case: Duration,
    /// Resident memory above what the process had at the start.
    pub bytes: u64,
}

/// Why a case is a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The loader panicked, with this message.
    Panic(String),
    /// The loader took longer than a case may.
    Slow,
    /// The process grew by this many bytes.
    Memory(u64),
}

/// A document that did it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What happened.
    pub fault: Fault,
    /// Number of the case; with the seed it gives the document again.
    pub case: u64,
    /// The document.
    pub document: Vec<u8>,
}

/// What a run did.
#[derive(Clone, Debug)]
pub struct Report {
    /// Target.
    pub target: String,
    /// Seed of all cases.
    pub seed: u64,
    /// Cases fed.
    pub cases: u64,
    /// The slowest case.
    pub slowest: Duration,
    /// Growth of the resident peak; `None` where it cannot be read.
    pub peak_bytes: Option<u64>,
    /// The first fault; the run ends with it.
    pub failure: Option<Failure>,
}

/// Feeds mutated documents until the time is over or something happens. A case that hangs keeps its thread: the
/// process ends with the test.
pub fn run(target: Target, seed: u64, limits: Limits) -> Report {
    let shared = Arc::new(Shared::default());
    let (name, worker) = (target.name.clone(), Arc::clone(&shared));
    let started = Instant::now();
    let thread = std::thread::spawn(move || worker.work(&target, seed, limits, started));
    while !thread.is_finished() {
        std::thread::sleep(Duration::from_millis(20));
        let since = shared.since.load(Ordering::SeqCst);
        let now = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let limit = u64::try_from(limits.case.as_millis()).unwrap_or(u64::MAX);
        // 0 stands for no case under way.
        if since > 0 && now.saturating_sub(since) > limit {
            shared.stop.store(true, Ordering::SeqCst);
            let mut state = shared.lock();
            let (case, document) = (state.cases, state.document.clone());
            state.failure.get_or_insert(Failure {
                fault: Fault::Slow,
                case,
                document,
            });
            state.slowest = Duration::from_millis(now - since);
            return state.report(name, seed);
        }
    }
    let report = shared.lock().report(name, seed);
    report
}

#[derive(Default)]
struct Shared {
    // Milliseconds from the start at which the case under way began, at least 1; 0 between cases.
    since: AtomicU64,
    stop: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    cases: u64,
    slowest: Duration,
    peak: Option<u64>,
    document: Vec<u8>,
    failure: Option<Failure>,
}

impl State {
    fn report(&self, target: String, seed: u64) -> Report {
        Report {
            target,
            seed,
            cases: self.cases,
            slowest: self.slowest,
            peak_bytes: self.peak,
            failure: self.failure.clone(),
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // A panic of a case is caught before it could poison anything.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn work(&self, target: &Target, seed: u64, limits: Limits, started: Instant) {
        let before = resident_peak();
        let mutator = Mutator::new(&target.seeds);
        let mut case = 0;
        while started.elapsed() < limits.run && !self.stop.load(Ordering::SeqCst) {
            let document = mutator.case(seed, case);
            self.lock().document.clone_from(&document);
            let now = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.since.store(now.max(1), Ordering::SeqCst);
            let began = Instant::now();
            let outcome = catch_unwind(AssertUnwindSafe(|| (target.feed)(&document)));
            let took = began.elapsed();
            self.since.store(0, Ordering::SeqCst);
            let grown = resident_peak()
                .zip(before)
                .map(|(now, then)| now.saturating_sub(then));
            let mut state = self.lock();
            state.cases += 1;
            state.slowest = state.slowest.max(took);
            state.peak = grown;
            let fault = match outcome {
                Err(payload) => Some(Fault::Panic(message(payload.as_ref()))),
                Ok(()) if took > limits.case => Some(Fault::Slow),
                Ok(()) => grown.filter(|g| *g > limits.bytes).map(Fault::Memory),
            };
            if let Some(fault) = fault {
                state.failure.get_or_insert(Failure {
                    fault,
                    case,
                    document,
                });
                return;
            }
            case += 1;
        }
    }
}

fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
    text.unwrap_or_else(|| "a payload that is no text".into())
}

// Highest resident size of this process so far, bytes.
fn resident_peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        run: Duration::from_secs(60),
        case: Duration::from_secs(3),
        bytes: 64 << 20,
    };

    fn planted(feed: impl Fn(&[u8]) + Send + Sync + 'static) -> Report {
        let target = Target {
            name: "planted".into(),
            seeds: vec![b"a: [1, 2]\nb: {c: d}\n".to_vec(), b"e: f\n".to_vec()],
            feed: Box::new(feed),
        };
        run(target, 7, LIMITS)
    }

    #[test]
    fn a_panic_is_found_with_its_document() {
        let report = planted(|doc| assert!(!doc.contains(&b'*'), "a star in it"));
        let failure = report.failure.expect("a star comes soon");
        assert!(matches!(&failure.fault, Fault::Panic(m) if m.contains("a star in it")));
        assert!(failure.document.contains(&b'*'));
        // The number of the case gives the document again.
        let seeds = [b"a: [1, 2]\nb: {c: d}\n".to_vec(), b"e: f\n".to_vec()];
        assert_eq!(Mutator::new(&seeds).case(7, failure.case), failure.document);
    }

    #[test]
    fn a_hang_is_found_while_it_hangs() {
        let report = planted(|doc| {
            if doc.len() > 30 {
                std::thread::sleep(Duration::from_secs(30));
            }
        });
        assert_eq!(report.failure.map(|f| f.fault), Some(Fault::Slow));
    }

    #[test]
    fn memory_without_bound_is_found() {
        if resident_peak().is_none() {
            println!("skipped: the kernel does not tell the resident peak");
            return;
        }
        let report = planted(|doc| {
            if doc.len() > 30 {
                let grown = vec![doc.len() as u8; 96 << 20];
                assert_eq!(grown[grown.len() / 2], doc.len() as u8);
            }
        });
        assert!(
            matches!(report.failure.map(|f| f.fault), Some(Fault::Memory(b)) if b > LIMITS.bytes)
        );
    }

    #[test]
    fn a_loader_that_answers_is_fine() {
        let target = Target {
            name: "fine".into(),
            seeds: vec![b"a: b\n".to_vec()],
            feed: Box::new(|_| {}),
        };
        let limits = Limits {
            run: Duration::from_millis(200),
            ..LIMITS
        };
        let report = run(target, 1, limits);
        assert!(report.failure.is_none() && report.cases > 10, "{report:?}");
    }
}
