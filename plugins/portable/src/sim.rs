//! A simulated device: everything a device with memory of its own does to a host, on any machine.
//!
//! It exists so that placement, refusals and the loss of a device are tested without one. Its
//! memory is an address space of its own: addresses no machine can dereference, reached by explicit
//! copies alone, filled with NaN when allocated. Forms on it are the forms of the CPU between two
//! copies, so it says nothing about speed.
//!
//! It is there when `STRUCTURES_SIM_ARCH` names an architecture (`sm_90a`), and only then.
//! `STRUCTURES_SIM_BUILT_FOR` lists what its code was built for, comma-separated (its own
//! architecture otherwise); `STRUCTURES_SIM_LOSE_AFTER` is the number of operations after which the
//! device is gone, `STRUCTURES_SIM_LOSE_IN` the host operation inside whose how many-eth call it
//! goes (`add:3`).
//!
//! It records work as a GPU does: while a queue is recorded its calls do nothing but being noted, and whoever allocates,
//! copies or waits meanwhile is refused and spoils the recording. `STRUCTURES_SIM_CAPTURE` is `none` for a device that
//! records nothing, `alloc:KIND` or `wait:KIND` for one whose host operation of this kind does that while it is recorded.

mod form;
mod memory;
pub mod operation;
mod work;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use structures_plugin_api::describe::DeviceInfo;
use structures_plugin_api::sdk::{BoundForm, Device, Failure};

use memory::Memory;
use work::Work;

/// Its number.
pub const INDEX: u32 = 1;
/// Bytes of its memory.
const CAPACITY: u64 = 4 << 30;

/// What the environment asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    arch: String,
    built_for: Vec<String>,
    lose_after: Option<u64>,
    lose_in: Option<(String, u64)>,
    /// What becomes of recording: nothing else, or the fault of a kind.
    capture: Option<(Fault, String)>,
}

/// What is wrong with recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// There is none.
    None,
    /// An operation allocates in its call.
    Alloc,
    /// An operation waits for the queue in its call.
    Wait,
}

impl Config {
    /// `None` without `STRUCTURES_SIM_ARCH`.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, Failure> {
        let Some(arch) = variable("STRUCTURES_SIM_ARCH").filter(|arch| !arch.is_empty()) else {
            return Ok(None);
        };
        let built_for = variable("STRUCTURES_SIM_BUILT_FOR").unwrap_or_else(|| arch.clone());
        let lose_after = match variable("STRUCTURES_SIM_LOSE_AFTER") {
            None => None,
            Some(text) => Some(text.parse().map_err(|_| {
                let what = format!("STRUCTURES_SIM_LOSE_AFTER: a number, found `{text}`");
                Failure::failed("sim_config", what)
            })?),
        };
        let lose_in = match variable("STRUCTURES_SIM_LOSE_IN") {
            None => None,
            Some(text) => {
                let parts = text.split_once(':');
                let read = parts.and_then(|(kind, n)| Some((kind.to_string(), n.parse().ok()?)));
                Some(read.ok_or_else(|| {
                    let what = format!("STRUCTURES_SIM_LOSE_IN: KIND:NUMBER, found `{text}`");
                    Failure::failed("sim_config", what)
                })?)
            }
        };
        let capture = match variable("STRUCTURES_SIM_CAPTURE") {
            None => None,
            Some(text) => {
                let (word, kind) = text.split_once(':').unwrap_or((&text, ""));
                let fault = match (word, kind.is_empty()) {
                    ("none", true) => Fault::None,
                    ("alloc", false) => Fault::Alloc,
                    ("wait", false) => Fault::Wait,
                    _ => {
                        let what = "STRUCTURES_SIM_CAPTURE: none, alloc:KIND or wait:KIND";
                        let what = format!("{what}, found `{text}`");
                        return Err(Failure::failed("sim_config", what));
                    }
                };
                Some((fault, kind.to_string()))
            }
        };
        Ok(Some(Config {
            arch,
            built_for: built_for.split(',').map(|a| a.trim().into()).collect(),
            lose_after,
            lose_in,
            capture,
        }))
    }
}

/// The device.
pub struct Sim {
    config: Config,
    state: Mutex<State>,
}

struct State {
    operations: u64,
    /// Calls of the host operation that [`Config::lose_in`] names.
    inside: u64,
    lost: bool,
    memory: Memory,
    /// Queue -> mark. The first is the default queue.
    queues: Vec<Option<Mark>>,
    /// Recordings that are going on, by queue; `None` for one that was spoilt.
    recording: BTreeMap<u64, Option<Vec<Arc<Work>>>>,
    /// Recorded work, by number.
    graphs: BTreeMap<u64, Arc<[Arc<Work>]>>,
    next_graph: u64,
}

impl State {
    /// The device is gone, and everything on it.
    fn lose(&mut self) {
        if !self.lost {
            self.lost = true;
            self.memory = Memory::new(CAPACITY);
        }
    }
}

/// When a mark was set; `None` before the first.
type Mark = Option<Instant>;

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Sim {
    /// A device as configured.
    pub fn new(config: Config) -> Arc<Self> {
        Arc::new(Sim {
            config,
            state: Mutex::new(State {
                operations: 0,
                inside: 0,
                lost: false,
                memory: Memory::new(CAPACITY),
                queues: vec![Some(None)],
                recording: BTreeMap::new(),
                graphs: BTreeMap::new(),
                next_graph: 1,
            }),
        })
    }

    /// What `devices` says about it.
    pub fn info(&self) -> DeviceInfo {
        DeviceInfo {
            index: INDEX,
            kind: "simulated".into(),
            name: format!("simulated {}", self.config.arch),
            arch: self.config.arch.clone(),
            built_for: self.config.built_for.clone(),
            memory_bytes: CAPACITY,
        }
    }

    /// A form on this device: `inner` between two copies.
    pub fn place(self: &Arc<Self>, inner: Box<dyn BoundForm>) -> Box<dyn BoundForm> {
        form::place(Arc::clone(self), inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }

    /// One operation: counts it, and loses the device when its time has come.
    fn operate<R>(&self, f: impl FnOnce(&mut State) -> Result<R, Failure>) -> Result<R, Failure> {
        let state = &mut *self.lock();
        state.operations += 1;
        if self.config.lose_after.is_some_and(|n| state.operations > n) {
            state.lose();
        }
        if state.lost {
            let what = format!("the simulated {} is gone", self.config.arch);
            return Err(Failure::failed("device_lost", what));
        }
        f(state)
    }

    /// Does work, or notes it where its queue is recorded.
    fn enqueue(&self, queue: u64, work: Work) -> Result<(), Failure> {
        let recorded = self.lock().recording.contains_key(&queue);
        if !recorded {
            return work.run(self, queue);
        }
        match &self.config.capture {
            Some((Fault::Alloc, kind)) if kind == work.kind => {
                self.alloc(256, 256)?;
            }
            Some((Fault::Wait, kind)) if kind == work.kind => self.synchronize(queue)?,
            _ => {}
        }
        self.on_queue(queue, |state, _| {
            if let Some(Some(noted)) = state.recording.get_mut(&queue) {
                noted.push(Arc::new(work));
            }
            Ok(())
        })
    }

    /// Nothing may happen that a recording cannot hold; if one is going on it is spoilt.
    fn unrecorded(&self, code: &str, what: &str) -> Result<(), Failure> {
        let state = &mut *self.lock();
        if state.recording.is_empty() {
            return Ok(());
        }
        state.recording.values_mut().for_each(|noted| *noted = None);
        let text = format!("{what} while a queue is recorded");
        Err(Failure::refused(code, text))
    }

    /// A call of a host operation has read what it reads and written nothing.
    fn inside(&self, kind: &str) {
        if let Some((_, n)) = self.config.lose_in.as_ref().filter(|(k, _)| k == kind) {
            let state = &mut *self.lock();
            state.inside += 1;
            if state.inside == *n {
                state.lose();
            }
        }
    }

    /// As [`Sim::operate`], on a queue that must exist.
    fn on_queue<R>(
        &self,
        queue: u64,
        f: impl FnOnce(&mut State, usize) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.operate(|state| {
            let index = usize::try_from(queue).unwrap_or(usize::MAX);
            match state.queues.get(index) {
                Some(Some(_)) => f(state, index),
                _ => Err(Failure::invalid("argument", format!("no queue {queue}"))),
            }
        })
    }
}

impl Device for Sim {
    fn alloc(&self, bytes: u64, align: u64) -> Result<u64, Failure> {
        self.unrecorded("capture_alloc", "an allocation")?;
        self.operate(|state| state.memory.alloc(bytes, align))
    }

    fn free(&self, address: u64) {
        self.lock().memory.free(address);
    }

    fn copy_in(&self, queue: u64, to: u64, from: &[u8]) -> Result<(), Failure> {
        self.unrecorded("capture_wait", "a copy that is waited for")?;
        self.on_queue(queue, |state, _| {
            state.memory.at_mut(to, from.len())?.copy_from_slice(from);
            Ok(())
        })
    }

    fn copy_out(&self, queue: u64, to: &mut [u8], from: u64) -> Result<(), Failure> {
        self.unrecorded("capture_wait", "a copy that is waited for")?;
        self.on_queue(queue, |state, _| {
            to.copy_from_slice(state.memory.at(from, to.len())?);
            Ok(())
        })
    }

    fn queue_new(&self) -> Result<u64, Failure> {
        self.operate(|state| {
            state.queues.push(Some(None));
            Ok(state.queues.len() as u64 - 1)
        })
    }

    fn queue_free(&self, queue: u64) {
        let slot = usize::try_from(queue).ok().filter(|index| *index > 0);
        let mut state = self.lock();
        if let Some(slot) = slot.and_then(|index| state.queues.get_mut(index)) {
            *slot = None;
        }
    }

    fn synchronize(&self, queue: u64) -> Result<(), Failure> {
        self.unrecorded("capture_wait", "waiting for a queue")?;
        self.on_queue(queue, |_, _| Ok(()))
    }

    fn mark(&self, queue: u64) -> Result<(), Failure> {
        self.on_queue(queue, |state, index| {
            state.queues[index] = Some(Some(Instant::now()));
            Ok(())
        })
    }

    fn elapsed(&self, queue: u64) -> Result<f32, Failure> {
        self.on_queue(queue, |state, index| match state.queues[index] {
            Some(Some(mark)) => Ok(mark.elapsed().as_secs_f32() * 1e3),
            _ => Err(Failure::invalid(
                "argument",
                format!("queue {queue} has no mark"),
            )),
        })
    }

    fn capture_begin(&self, queue: u64) -> Result<(), Failure> {
        if matches!(self.config.capture, Some((Fault::None, _))) {
            let what = "this simulated device was asked to record nothing";
            return Err(Failure::refused("capture_unsupported", what));
        }
        self.on_queue(queue, |state, _| {
            if state.recording.contains_key(&queue) {
                let what = format!("queue {queue} is being recorded");
                return Err(Failure::invalid("argument", what));
            }
            state.recording.insert(queue, Some(Vec::new()));
            Ok(())
        })
    }

    fn capture_end(&self, queue: u64) -> Result<u64, Failure> {
        let noted = self.lock().recording.remove(&queue);
        let Some(noted) = noted else {
            let what = format!("queue {queue} is not being recorded");
            return Err(Failure::invalid("argument", what));
        };
        let noted = noted.ok_or_else(|| {
            let what = "something happened meanwhile that a recording cannot hold";
            Failure::refused("capture_spoilt", what)
        })?;
        self.operate(|state| {
            let graph = state.next_graph;
            state.next_graph += 1;
            state.graphs.insert(graph, noted.into());
            Ok(graph)
        })
    }

    fn graph_launch(&self, queue: u64, graph: u64) -> Result<(), Failure> {
        self.unrecorded("capture_wait", "a launch of a recording")?;
        let noted = self.on_queue(queue, |state, _| {
            let found = state.graphs.get(&graph).cloned();
            found.ok_or_else(|| Failure::invalid("argument", format!("no graph {graph}")))
        })?;
        noted.iter().try_for_each(|work| work.run(self, queue))
    }

    fn graph_free(&self, graph: u64) {
        self.lock().graphs.remove(&graph);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<Option<Config>, Failure> {
        Config::read(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_string())
        })
    }

    fn sim(variables: &[(&str, &str)]) -> Arc<Sim> {
        let mut all = vec![("STRUCTURES_SIM_ARCH", "sm_90a")];
        all.extend(variables);
        Sim::new(config(&all).expect("reads").expect("asked for"))
    }

    #[test]
    fn it_is_there_only_when_asked_for() {
        assert_eq!(config(&[]), Ok(None));
        assert_eq!(config(&[("STRUCTURES_SIM_ARCH", "")]), Ok(None));
        let built_for = ("STRUCTURES_SIM_BUILT_FOR", "sm_80+PTX, sm_90a");
        let info = sim(&[built_for]).info();
        assert_eq!((info.index, info.arch.as_str()), (1, "sm_90a"));
        assert_eq!(info.built_for, ["sm_80+PTX", "sm_90a"]);
        assert_eq!(sim(&[]).info().built_for, ["sm_90a"]);
        let bad = [
            ("STRUCTURES_SIM_ARCH", "sm_90"),
            ("STRUCTURES_SIM_LOSE_AFTER", "soon"),
        ];
        assert_eq!(config(&bad).expect_err("no number").code, "sim_config");
        let bad = [
            ("STRUCTURES_SIM_ARCH", "sm_90"),
            ("STRUCTURES_SIM_CAPTURE", "alloc"),
        ];
        assert_eq!(config(&bad).expect_err("no kind").code, "sim_config");
        let bad = [
            ("STRUCTURES_SIM_ARCH", "sm_90"),
            ("STRUCTURES_SIM_LOSE_IN", "add"),
        ];
        assert_eq!(config(&bad).expect_err("no number").code, "sim_config");
    }

    #[test]
    fn data_goes_in_and_out_by_copies_alone() {
        let sim = sim(&[]);
        let queue = sim.queue_new().expect("a queue");
        let address = sim.alloc(16, 256).expect("memory");
        assert_eq!(address % 256, 0);
        let mut out = [0_u8; 4];
        sim.copy_out(queue, &mut out, address).expect("copies");
        assert!(f32::from_le_bytes(out).is_nan(), "fresh memory is poison");
        sim.copy_in(queue, address + 8, &[1, 2, 3, 4])
            .expect("copies");
        sim.mark(queue).expect("a mark");
        sim.copy_out(queue, &mut out, address + 8).expect("copies");
        assert_eq!(out, [1, 2, 3, 4]);
        assert!(sim.elapsed(queue).expect("a time") >= 0.0);
        assert_eq!(sim.elapsed(0).expect_err("no mark").code, "argument");
        sim.queue_free(queue);
        assert_eq!(sim.synchronize(queue).expect_err("freed").code, "argument");
        sim.queue_free(0);
        sim.synchronize(0).expect("the default queue stays");
    }

    /// Adds one to what lies in a cell.
    struct Count;

    impl work::Body for Count {
        fn run(
            &self,
            _: work::Inputs<'_>,
            _: &mut [work::Value],
            states: &mut [work::Value],
        ) -> Result<(), Failure> {
            states[0].floats_mut()?.iter_mut().for_each(|v| *v += 1.0);
            Ok(())
        }
    }

    #[test]
    fn what_is_recorded_is_done_when_it_is_launched_and_as_often() {
        let sim = sim(&[]);
        let cell = sim.alloc(4, 4).expect("memory");
        sim.copy_in(0, cell, &0_f32.to_le_bytes()).expect("copies");
        let now = || {
            let mut out = [0; 4];
            sim.copy_out(0, &mut out, cell).expect("copies");
            f32::from_le_bytes(out)
        };
        sim.enqueue(0, Work::on_cell(Arc::new(Count), cell))
            .expect("runs");
        sim.capture_begin(0).expect("records");
        sim.enqueue(0, Work::on_cell(Arc::new(Count), cell))
            .expect("is noted");
        sim.enqueue(0, Work::on_cell(Arc::new(Count), cell))
            .expect("is noted");
        let graph = sim.capture_end(0).expect("a graph");
        assert_eq!(now(), 1.0, "a recorded call does nothing");
        for times in 1..=2 {
            sim.graph_launch(0, graph).expect("launches");
            assert_eq!(now(), 1.0 + 2.0 * times as f32);
        }
        sim.graph_free(graph);
        assert_eq!(
            sim.graph_launch(0, graph).expect_err("freed").code,
            "argument"
        );
        assert_eq!(sim.capture_end(0).expect_err("none").code, "argument");
    }

    #[test]
    fn what_a_recording_cannot_hold_is_refused_and_spoils_it() {
        let sim = sim(&[]);
        let cell = sim.alloc(4, 4).expect("memory");
        let spoilt = |what: &dyn Fn() -> Result<(), Failure>, code: &str| {
            sim.capture_begin(0).expect("records");
            assert_eq!(what().expect_err("refused").code, code);
            assert_eq!(
                sim.capture_end(0).expect_err("spoilt").code,
                "capture_spoilt"
            );
        };
        spoilt(&|| sim.alloc(4, 4).map(|_| ()), "capture_alloc");
        spoilt(&|| sim.copy_in(0, cell, &[0; 4]), "capture_wait");
        spoilt(&|| sim.copy_out(0, &mut [0; 4], cell), "capture_wait");
        spoilt(&|| sim.synchronize(0), "capture_wait");
        sim.synchronize(0).expect("afterwards all is as before");
    }

    #[test]
    fn a_lost_device_answers_one_code_and_everything_can_be_given_back() {
        let sim = sim(&[("STRUCTURES_SIM_LOSE_AFTER", "2")]);
        let address = sim.alloc(4, 1).expect("memory");
        sim.copy_in(0, address, &[0; 4]).expect("copies");
        let mut out = [7; 4];
        for _ in 0..2 {
            let failure = sim.copy_out(0, &mut out, address).expect_err("lost");
            assert_eq!(failure.code, "device_lost");
        }
        assert_eq!(out, [7; 4]);
        assert_eq!(sim.alloc(4, 1).expect_err("lost").code, "device_lost");
        sim.free(address);
        sim.queue_free(1);
    }
}
