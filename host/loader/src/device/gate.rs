//! Who may be at a device while a queue of it is recorded: the thread that records, and nobody else.
//!
//! What arrives on a queue that is recorded becomes part of the recording, whoever sent it, and what a recording cannot
//! hold spoils it. Everybody who shares a device shares its default queue, so other threads wait at the gate until the
//! recording has ended, and a recording begins when nobody is inside. There is one gate for a device of a plugin, whatever
//! number of times it was opened: a plugin may serve all of them with the same default queue.
//!
//! Order: a gate is passed first, before the plugin's instance, the device's handle or a form's `busy` is taken, and nothing
//! is passed by who is inside already: [`Pass`] lives for one entry of the plugin, and entries call nobody back who passes.
//! So whoever waits at a gate holds nothing the recording thread could want, and whoever is inside waits for no gate. A
//! thread that records two devices at a time would have to take them in the same order as every other.
//!
//! Not here: what may be recorded, which the plugin decides.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

/// See the module.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Entries that are under way.
    inside: usize,
    /// Who wants to close it; nobody else is let in meanwhile, or it would never be empty.
    closing: usize,
    /// The thread that closed it, and the queues it records.
    owner: Option<(ThreadId, Vec<usize>)>,
}

impl State {
    fn is_mine(&self) -> bool {
        let me = || thread::current().id();
        self.owner.as_ref().is_some_and(|(owner, _)| *owner == me())
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// For one entry; waits while another thread records.
    pub(crate) fn pass(&self) -> Pass<'_> {
        let state = self.lock();
        if state.is_mine() {
            return Pass { counted: None };
        }
        let shut = |state: &mut State| state.owner.is_some() || state.closing > 0;
        let waited = self.changed.wait_while(state, shut);
        waited.unwrap_or_else(|e| e.into_inner()).inside += 1;
        Pass {
            counted: Some(self),
        }
    }

    /// Until it is dropped only this thread passes; waits for who is inside.
    pub(crate) fn close(&self, queue: usize) -> Closed<'_> {
        let mut state = self.lock();
        if !state.is_mine() {
            state.closing += 1;
            let taken = |state: &mut State| state.owner.is_some() || state.inside > 0;
            let waited = self.changed.wait_while(state, taken);
            state = waited.unwrap_or_else(|e| e.into_inner());
            state.closing -= 1;
        }
        let me = || (thread::current().id(), Vec::new());
        state.owner.get_or_insert_with(me).1.push(queue);
        Closed { gate: self, queue }
    }

    /// Whether this thread records that queue.
    pub(crate) fn records(&self, queue: usize) -> bool {
        let state = self.lock();
        let queues = state.owner.as_ref().filter(|_| state.is_mine());
        queues.is_some_and(|(_, queues)| queues.contains(&queue))
    }
}

/// Somebody is inside.
pub(crate) struct Pass<'a> {
    /// `None` for the thread that records.
    counted: Option<&'a Gate>,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let Some(gate) = self.counted else {
            return;
        };
        let mut state = gate.lock();
        state.inside -= 1;
        if state.inside == 0 && state.closing > 0 {
            gate.changed.notify_all();
        }
    }
}

/// A thread records. Dropped by that thread, also when it unwinds.
pub(crate) struct Closed<'a> {
    gate: &'a Gate,
    queue: usize,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        if let Some((_, queues)) = &mut state.owner {
            if let Some(at) = queues.iter().position(|q| *q == self.queue) {
                queues.swap_remove(at);
            }
            if queues.is_empty() {
                state.owner = None;
                self.gate.changed.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// How long something that must not happen is given.
    const WHILE: Duration = Duration::from_millis(30);

    #[test]
    fn others_wait_until_the_recording_is_over_and_its_own_thread_does_not() {
        let gate = &Gate::default();
        let (sent, passed) = mpsc::channel();
        thread::scope(|scope| {
            let closed = gate.close(0);
            drop((gate.pass(), gate.pass()));
            assert!(gate.records(0) && !gate.records(1));
            scope.spawn(move || {
                assert!(!gate.records(0), "another thread's");
                let _pass = gate.pass();
                sent.send(()).expect("is awaited");
            });
            assert!(passed.recv_timeout(WHILE).is_err(), "it waits");
            // A queue within.
            drop(gate.close(1));
            assert!(gate.records(0) && !gate.records(1));
            assert!(passed.recv_timeout(WHILE).is_err(), "it still waits");
            drop(closed);
            passed.recv().expect("then it passes");
        });
        assert!(!gate.records(0));
    }

    #[test]
    fn a_recording_waits_for_who_is_inside_and_is_not_overtaken() {
        let gate = &Gate::default();
        let (sent, order) = mpsc::channel();
        thread::scope(|scope| {
            let inside = gate.pass();
            let closer = sent.clone();
            scope.spawn(move || {
                let _closed = gate.close(0);
                closer.send("records").expect("is awaited");
            });
            assert!(order.recv_timeout(WHILE).is_err(), "it waits");
            scope.spawn(move || {
                let _pass = gate.pass();
                sent.send("passes").expect("is awaited");
            });
            assert!(order.recv_timeout(WHILE).is_err(), "nobody else comes in");
            drop(inside);
            assert_eq!(order.iter().collect::<Vec<_>>(), ["records", "passes"]);
        });
    }

    #[test]
    fn a_thread_that_unwinds_lets_the_others_in() {
        let gate = &Gate::default();
        let recorded = thread::scope(|scope| {
            let records = scope.spawn(|| {
                let _closed = gate.close(0);
                panic!("inside a recording");
            });
            records.join()
        });
        assert!(recorded.is_err());
        drop(gate.pass());
        drop(gate.close(0));
    }
}
