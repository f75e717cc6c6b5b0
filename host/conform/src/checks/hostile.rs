//! `null_arguments` and `absurd_arguments`: what no host passes is answered with a status, not with a crash.
//!
//! Where a success would be a lie (nowhere to put an answer, views that are none), it is a fault, too. Memory around
//! the outputs is watched all along.

use structures_loader::{RawBind, NULL_CALLS, NULL_ENTRIES};
use structures_plugin_api::abi::{TensorView, STATUS_OK};
use structures_suite::SuiteError;

use super::layout::raw_of;
use super::{matters, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::{Lay, Room};

pub(super) fn nulls(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let plugin = bench.cx.loaded.plugin();
    let (bind, _kept) = raw_of(bench);
    let mut seed = bench.cx.task.seed;
    let mut own = || {
        seed += 1;
        let this = seed - 1;
        (this, bench.cx.task.only.is_none_or(|only| only == this))
    };
    let mut asked = 0;
    for (which, (what, due)) in NULL_ENTRIES.iter().enumerate() {
        let (seed, wanted) = own();
        if !wanted {
            continue;
        }
        bench.at(what, Some(seed));
        let status = plugin.null_entry(bench.cx.throwaway, which, &bind);
        if *due && status == STATUS_OK {
            return Ok(Code::ArgumentAccepted.at(seed, format!("{what}: answered success")));
        }
        asked += 1;
    }
    for (which, (what, due)) in NULL_CALLS.iter().enumerate() {
        let (seed, wanted) = own();
        if !wanted {
            continue;
        }
        bench.at(what, Some(seed));
        let Ok(bound) = bench.bind_direct() else {
            continue;
        };
        let (mut inputs, mut outputs) = operands(bench);
        let (from, to) = (views(&mut inputs), raw(&mut outputs));
        let answer = bound.null_call(bench.cx.throwaway, which, &from, &to);
        if *due && answer.is_ok_and(|status| status == STATUS_OK) {
            return Ok(Code::ArgumentAccepted.at(seed, format!("{what}: answered success")));
        }
        asked += 1;
    }
    Ok(Verdict::passed(format!("{asked} calls came back")))
}

fn operands(bench: &Bench<'_>) -> (Vec<Option<Room>>, Vec<Room>) {
    let inputs = rooms(&bench.case.inputs(), Lay::default());
    (inputs, poisoned(bench.case, Lay::default()))
}

pub(super) fn views(inputs: &mut [Option<Room>]) -> Vec<TensorView> {
    let each = inputs.iter_mut();
    each.map(|room| room.as_mut().map_or(TensorView::ABSENT, Room::raw))
        .collect()
}

pub(super) fn raw(outputs: &mut [Room]) -> Vec<TensorView> {
    outputs.iter_mut().map(Room::raw).collect()
}

/// A change of a view, and whether it must be refused.
type Absurd = (&'static str, bool, fn(&mut TensorView));

const ABSURD: &[Absurd] = &[
    ("null data", true, |v| v.data = std::ptr::null_mut()),
    ("rank 9", true, |v| v.rank = 9),
    ("rank 4294967295", true, |v| v.rank = u32::MAX),
    ("rank 0", false, |v| v.rank = 0),
    ("a negative dim", true, |v| v.dims[0] = -1),
    ("the smallest dim there is", true, |v| v.dims[0] = i64::MIN),
    ("the largest dim there is", true, |v| v.dims[0] = i64::MAX),
    ("all dims 2^40", true, |v| v.dims = [1 << 40; 8]),
    ("strides of 2^62", true, |v| v.strides = [1 << 62; 8]),
    ("the largest strides there are", true, |v| {
        v.strides = [i64::MAX; 8]
    }),
    ("the smallest strides there are", true, |v| {
        v.strides = [i64::MIN; 8]
    }),
    ("an absent dtype", true, |v| v.dtype = 0),
    ("type id 99", true, |v| v.dtype = 99),
    ("type id 4294967295", true, |v| v.dtype = u32::MAX),
    ("device 7", true, |v| v.device = 7),
    ("a dim of 0", false, |v| v.dims[0] = 0),
    ("one element less", false, |v| {
        let last = (v.rank.clamp(1, 8) - 1) as usize;
        v.dims[last] = (v.dims[last] - 1).max(0);
    }),
    ("one row less", false, |v| {
        v.dims[0] = (v.dims[0] - 1).max(0)
    }),
    ("type i8", false, |v| v.dtype = 6),
];

/// Changes of strides mean nothing where nothing is reached by them; nor do dims of a number.
fn means(what: &str, view: &TensorView) -> bool {
    let dims = &view.dims[..(view.rank as usize).min(8)];
    if what.contains("strides") {
        return dims.iter().any(|d| *d > 1);
    }
    !what.contains("dim") || !dims.is_empty()
}

pub(super) fn absurd(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let mut seed = bench.cx.task.seed;
    let mut asked = 0;
    for (what, due, bind) in binds(bench) {
        let own = seed;
        seed += 1;
        if bench.cx.task.only.is_some_and(|only| only != own) {
            continue;
        }
        bench.at(&what, Some(own));
        let answer = bench
            .cx
            .loaded
            .plugin()
            .bind_raw(bench.cx.throwaway, &bind.0);
        if due && answer.is_ok() {
            return Ok(Code::ArgumentAccepted.at(own, format!("{what}: bound")));
        }
        asked += 1;
    }
    let count = bench.case.inputs().len();
    let made = bench.case.want().len();
    let names: Vec<String> = bench.case.input_names().map(str::to_string).collect();
    let watched = bench.keeps_to_its_outputs();
    let read: Vec<bool> = (0..count).map(|index| matters(bench, index)).collect();
    for side in 0..2 {
        for index in 0..[count, made][side] {
            // One that is not read need not be looked at.
            let idle = side == 0 && !read[index];
            for (absurd, due, change) in ABSURD {
                let own = seed;
                seed += 1;
                if bench.cx.task.only.is_some_and(|only| only != own) {
                    continue;
                }
                let (mut inputs, mut outputs) = operands(bench);
                let (mut from, mut to) = (views(&mut inputs), raw(&mut outputs));
                let view = [&mut from, &mut to][side].get_mut(index);
                let Some(view) = view.filter(|v| v.dtype != 0 && means(absurd, v)) else {
                    continue;
                };
                change(view);
                let name = match side {
                    0 => format!("input `{}`", names[index]),
                    _ => format!("output `{}`", bench.case.want()[index].0),
                };
                let what = format!("call: {name}: {absurd}");
                bench.at(&what, Some(own));
                // Absent, it may be one that need not be there.
                let optional =
                    *absurd == "an absent dtype" && side == 0 && optional(bench, &names[index]);
                if let Some(verdict) =
                    poke(bench, &from, &to, *due && !optional && !idle, &what, own)
                {
                    return Ok(verdict);
                }
                if let Some(at) = outputs.iter().find_map(Room::touched).filter(|_| watched) {
                    let text = format!("{what}: wrote {at} bytes from its first element");
                    return Ok(Code::WrittenBeyond.at(own, text));
                }
                asked += 1;
            }
        }
    }
    // Wrong numbers of arguments. More than it reads is not the form's concern.
    for (what, due, n, m) in [
        ("call: no inputs", read.contains(&true), 0, made),
        ("call: no outputs", true, count, 0),
        ("call: one input less", false, count.saturating_sub(1), made),
        (
            "call: one output less",
            false,
            count,
            made.saturating_sub(1),
        ),
    ] {
        let own = seed;
        seed += 1;
        if bench.cx.task.only.is_some_and(|only| only != own) {
            continue;
        }
        bench.at(what, Some(own));
        let (mut inputs, mut outputs) = operands(bench);
        let (from, to) = (views(&mut inputs), raw(&mut outputs));
        if let Some(verdict) = poke(bench, &from[..n], &to[..m], due, what, own) {
            return Ok(verdict);
        }
        asked += 1;
    }
    Ok(Verdict::passed(format!("{asked} calls came back")))
}

fn optional(bench: &Bench<'_>, name: &str) -> bool {
    let port = bench.spec.inputs.iter().find(|p| p.name == name);
    port.is_none_or(|p| p.optional)
}

fn optional_slot(bench: &Bench<'_>, name: &str) -> bool {
    let own = |slot: &structures_catalog::spec::Slot| {
        let stem = slot.name.split('<').next().unwrap_or(&slot.name);
        slot.name == name || (slot.repeat.is_some() && name.starts_with(stem))
    };
    bench
        .spec
        .weights
        .iter()
        .any(|slot| slot.optional && own(slot))
}

fn poke(
    bench: &Bench<'_>,
    from: &[TensorView],
    to: &[TensorView],
    due: bool,
    what: &str,
    seed: u64,
) -> Option<Verdict> {
    let bound = bench.bind_direct().ok()?;
    let answer = bound.call_raw(bench.cx.throwaway, from, to, &[]);
    (due && answer.is_ok())
        .then(|| Code::ArgumentAccepted.at(seed, format!("{what}: answered success")))
}

/// Absurd bind arguments, whether each must be refused, and what their views point into.
fn binds(bench: &Bench<'_>) -> Vec<(String, bool, (RawBind, Vec<Room>))> {
    let mut all: Vec<(String, bool, (RawBind, Vec<Room>))> = Vec::new();
    let mut push = |what: &str, due: bool, edit: &dyn Fn(&mut RawBind)| {
        let mut made = raw_of(bench);
        edit(&mut made.0);
        all.push((format!("bind: {what}"), due, made));
    };
    let request = bench.case.request();
    let weighs = !request.weights.is_empty();
    push("args that say they are of 0 bytes", true, &|b| {
        b.struct_size = 0
    });
    push("no contract", false, &|b| b.contract = None);
    push("a contract that says it is of 0 bytes", false, &|b| {
        b.contract = b.contract.map(|c| structures_plugin_api::abi::Contract {
            struct_size: 0,
            ..c
        });
    });
    push("arrays null, counts as they are", weighs, &|b| {
        b.null_arrays = true
    });
    push("no weights", weighs, &|b| b.weights.clear());
    if !request.statistics.is_empty() {
        push("no statistics", true, &|b| b.statistics.clear());
    }
    for (what, text) in [
        ("empty params", &b""[..]),
        ("params that are no JSON", b"{nonsense"),
        ("params that are a list", b"[]"),
        ("params that are not UTF-8", b"\xff\xfe\x00"),
    ] {
        push(what, true, &|b| b.params = text.to_vec());
    }
    push("params nested 100000 deep", true, &|b| {
        b.params = vec![b'['; 100_000]
    });
    push("params cut in the middle", true, &|b| {
        b.params.truncate(b.params.len() / 2)
    });
    for index in 0..request.weights.len() {
        let name = request.weights[index].0.clone();
        for (absurd, due, change) in ABSURD {
            let like = raw_of(bench).0.weights[index].1;
            if !means(absurd, &like) {
                continue;
            }
            let due = *due && !(*absurd == "an absent dtype" && optional_slot(bench, &name));
            push(&format!("weight `{name}`: {absurd}"), due, &|b| {
                change(&mut b.weights[index].1)
            });
        }
    }
    all
}
