//! `concurrency`: calls at the same time give what they give one after the other.
//!
//! A form that declares `concurrent` is hammered by several threads on one instance, each with inputs of its own. Any
//! other form by two threads on two instances, which the ABI allows of every form.

use std::sync::atomic::{AtomicBool, Ordering};

use structures_loader::Staged;
use structures_suite::operand::{Data, Operand};
use structures_suite::SuiteError;

use super::{alike, call, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::{Lay, Room};

/// Threads on one instance.
const THREADS: usize = 4;
/// Calls a thread.
const CALLS: usize = 200;

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let shared = bench.form.concurrent;
    let (threads, instances) = match shared {
        true => (THREADS, 1),
        false => (2, 2),
    };
    bench.at("one after the other", None);
    let mut bound: Vec<Staged> = Vec::new();
    for _ in 0..instances {
        match bench.bind() {
            Ok(b) => bound.push(b),
            Err(e) => return Ok(Code::Raced.because(format!("a second instance: {e}"))),
        }
    }
    // What each thread reads, and what it gets when it is alone.
    let mut alone: Vec<(Vec<Option<Room>>, Vec<Room>)> = Vec::new();
    for thread in 0..threads {
        let own = bench
            .case
            .inputs()
            .into_iter()
            .map(|i| i.map(|i| scaled(i, thread)));
        let inputs = rooms(&own.collect::<Vec<_>>(), Lay::default());
        let mut outputs = poisoned(bench.case, Lay::default());
        if let Err(e) = call(&bound[thread % instances], &inputs.clone(), &mut outputs) {
            return Ok(Code::Raced.because(format!("one after the other: {e}")));
        }
        alone.push((inputs, outputs));
    }
    bench.at("at the same time", None);
    let stop = AtomicBool::new(false);
    let slack = bench.slack();
    let hammer = |thread: usize| -> Result<(), String> {
        let (inputs, want) = &alone[thread];
        for n in 0..CALLS {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let mut outputs: Vec<Room> = want.clone();
            outputs.iter_mut().for_each(Room::poison);
            let outcome = call(&bound[thread % instances], &inputs.clone(), &mut outputs)
                .map_err(|e| e.to_string())
                .and_then(|()| alike(want, &outputs, slack));
            if let Err(reason) = outcome {
                stop.store(true, Ordering::Relaxed);
                return Err(format!("thread {} at call {}: {reason}", thread + 1, n + 1));
            }
        }
        Ok(())
    };
    let ends: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|t| scope.spawn(move || hammer_of(&hammer, t)))
            .collect();
        let ended = running.into_iter().map(|t| t.join());
        ended
            .map(|r| r.unwrap_or_else(|_| Err("the thread panicked".into())))
            .collect()
    });
    if let Some(Err(reason)) = ends.into_iter().find(Result::is_err) {
        let where_ = match shared {
            true => "one instance, declared `concurrent`",
            false => "an instance a thread",
        };
        return Ok(Code::Raced.because(format!("{where_}: {reason}")));
    }
    Ok(Verdict::passed(match shared {
        true => format!("{threads} threads on one instance, {CALLS} calls each"),
        false => format!("an instance each on {threads} threads, {CALLS} calls each"),
    }))
}

fn hammer_of(
    hammer: &(dyn Fn(usize) -> Result<(), String> + Sync),
    thread: usize,
) -> Result<(), String> {
    hammer(thread)
}

/// Inputs of a thread: the usual ones, smaller.
fn scaled(mut operand: Operand, thread: usize) -> Operand {
    let by = 1.0 / (1 + thread) as f32;
    if let Data::F32(values) = &mut operand.data {
        values.iter_mut().for_each(|v| *v *= by);
    }
    operand
}
