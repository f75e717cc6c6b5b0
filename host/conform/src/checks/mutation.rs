//! `mutation`: good arguments, changed at random by a seed. Whatever is answered, it is answered, and nothing is
//! written beside the outputs.
//!
//! Changes leave memory as it is or make views that promise what cannot be: a plugin cannot know that memory behind a
//! plausible view is not there, and none is made. A failure names its seed, and `--replay` does that one alone.

use structures_plugin_api::abi::TensorView;
use structures_suite::random::Random;
use structures_suite::SuiteError;

use super::hostile::{raw, views};
use super::layout::raw_of;
use super::{poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::{Lay, Room};

/// Mutations a form, unless more are asked for.
const CASES: u64 = 256;
/// Numbers that sizes and ids become.
const ODD: [i64; 9] = [-1, 0, 1, 2, 7, 1 << 31, 1 << 40, i64::MAX, i64::MIN];

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let task = bench.cx.task;
    let count = task.cases.map_or(CASES, |n| n as u64);
    let seeds = match task.only {
        Some(only) => only..only.saturating_add(1),
        None => task.seed..task.seed.saturating_add(count),
    };
    let watched = bench.keeps_to_its_outputs();
    let (mut bound_ones, mut ran) = (0, 0);
    for seed in seeds.clone() {
        let mut random = Random::new(seed ^ 0x6d75_7461);
        let (mut bind, _kept) = raw_of(bench);
        let mut what = Vec::new();
        // Half of them bind as they should, so that calls are reached.
        if random.below(2) == 0 {
            for _ in 0..1 + random.below(2) {
                what.push(mutate_bind(&mut bind, &mut random));
            }
        }
        let mut inputs = rooms(&bench.case.inputs(), Lay::default());
        let mut outputs = poisoned(bench.case, Lay::default());
        let (mut from, mut to) = (views(&mut inputs), raw(&mut outputs));
        if what.is_empty() {
            for _ in 0..1 + random.below(3) {
                what.push(mutate_call(&mut from, &mut to, &mut random));
            }
        }
        let what = what.join(", then ");
        bench.at(&what, Some(seed));
        let Ok(bound) = bench.cx.loaded.plugin().bind_raw(bench.cx.throwaway, &bind) else {
            continue;
        };
        bound_ones += 1;
        ran += u64::from(bound.call_raw(bench.cx.throwaway, &from, &to, &[]).is_ok());
        if let Some(at) = outputs.iter().find_map(Room::touched).filter(|_| watched) {
            let text = format!("{what}: wrote {at} bytes from an output's first element");
            return Ok(Code::WrittenBeyond.at(seed, text));
        }
    }
    // Views of host memory are all there is to change, and a device's form has to say no to them.
    let away = bench.cx.loaded.home(bench.case.request());
    let why = match away {
        Ok(device) if device != 0 => ": calls give host memory to a form of a device",
        _ => "",
    };
    Ok(Verdict::passed(format!(
        "seeds {} to {}: {bound_ones} bound, {ran} ran{why}",
        seeds.start,
        seeds.end - 1
    )))
}

fn mutate_bind(bind: &mut structures_loader::RawBind, random: &mut Random) -> String {
    match random.below(8) {
        0 | 1 if !bind.params.is_empty() => {
            let at = random.below(bind.params.len());
            bind.params[at] = random.below(256) as u8;
            format!("params: byte {at} is {:#04x}", bind.params[at])
        }
        2 => mutate_params(bind, random),
        3 if !bind.weights.is_empty() => {
            let at = random.below(bind.weights.len());
            let (name, _) = bind.weights.remove(at);
            format!("weight `{}` left out", String::from_utf8_lossy(&name))
        }
        4 if bind.weights.len() > 1 => {
            let (a, b) = (
                random.below(bind.weights.len()),
                random.below(bind.weights.len()),
            );
            let view = bind.weights[a].1;
            bind.weights[a].1 = bind.weights[b].1;
            bind.weights[b].1 = view;
            format!("weights {a} and {b} swapped")
        }
        5 if !bind.statistics.is_empty() => {
            let at = random.below(bind.statistics.len());
            format!(
                "statistic {at}: {}",
                mutate_view(&mut bind.statistics[at].1, random)
            )
        }
        6 => {
            if let Some(contract) = &mut bind.contract {
                contract.row_capacity = ODD[random.below(ODD.len())] as u64;
                contract.dtype = random.below(20) as u32;
                return format!(
                    "contract: {} rows, type id {}",
                    contract.row_capacity, contract.dtype
                );
            }
            "no contract".into()
        }
        _ if !bind.weights.is_empty() => {
            let at = random.below(bind.weights.len());
            format!(
                "weight {at}: {}",
                mutate_view(&mut bind.weights[at].1, random)
            )
        }
        _ => {
            bind.params.truncate(random.below(bind.params.len()));
            "params cut".into()
        }
    }
}

/// Another value somewhere in the params document.
fn mutate_params(bind: &mut structures_loader::RawBind, random: &mut Random) -> String {
    let Ok(mut document) = serde_json::from_slice::<serde_json::Value>(&bind.params) else {
        return "params as they are".into();
    };
    let mut places = Vec::new();
    leaves(&document, String::new(), &mut places);
    if places.is_empty() {
        return "params as they are".into();
    }
    let place = places[random.below(places.len())].clone();
    let values = [
        serde_json::Value::Null,
        serde_json::json!(true),
        serde_json::json!(-1),
        serde_json::json!(0),
        serde_json::json!(u64::MAX),
        serde_json::json!(1e300),
        serde_json::json!(0.5),
        serde_json::json!("x"),
        serde_json::json!([]),
        serde_json::json!({}),
    ];
    let value = values[random.below(values.len())].clone();
    let what = format!("params{place} is {value}");
    if let Some(leaf) = document.pointer_mut(&place) {
        *leaf = value;
    }
    bind.params = document.to_string().into_bytes();
    what
}

fn leaves(value: &serde_json::Value, at: String, places: &mut Vec<String>) {
    if !at.is_empty() {
        places.push(at.clone());
    }
    match value {
        serde_json::Value::Object(map) => {
            for (key, value) in map {
                leaves(value, format!("{at}/{key}"), places);
            }
        }
        serde_json::Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                leaves(value, format!("{at}/{index}"), places);
            }
        }
        _ => {}
    }
}

fn mutate_call(from: &mut Vec<TensorView>, to: &mut [TensorView], random: &mut Random) -> String {
    match random.below(6) {
        0 if from.len() > 1 => {
            let (a, b) = (random.below(from.len()), random.below(from.len()));
            from.swap(a, b);
            format!("inputs {a} and {b} swapped")
        }
        1 if !from.is_empty() => {
            let at = random.below(from.len());
            from.remove(at);
            format!("input {at} left out")
        }
        2 if !to.is_empty() => {
            let at = random.below(to.len());
            format!("output {at}: {}", mutate_view(&mut to[at], random))
        }
        3 if to.len() > 1 => {
            to.swap(0, 1);
            "outputs 0 and 1 swapped".into()
        }
        _ if !from.is_empty() => {
            let at = random.below(from.len());
            format!("input {at}: {}", mutate_view(&mut from[at], random))
        }
        _ => "as it is".into(),
    }
}

/// A smaller view of the same memory, or one that cannot be.
fn mutate_view(view: &mut TensorView, random: &mut Random) -> String {
    let rank = (view.rank as usize).clamp(1, 8);
    let axis = random.below(rank);
    match random.below(9) {
        0 => {
            view.dims[axis] = random.below(view.dims[axis].max(1) as usize) as i64;
            format!("dim {axis} is {}", view.dims[axis])
        }
        1 => {
            view.dims[axis] = [-1, i64::MIN, i64::MAX, 1 << 62][random.below(4)];
            format!("dim {axis} is {}", view.dims[axis])
        }
        2 => {
            view.strides[axis] = [0, 1 << 62, i64::MAX, i64::MIN][random.below(4)];
            format!("stride {axis} is {}", view.strides[axis])
        }
        3 => {
            // A lower rank reaches less; a higher one does not exist.
            view.rank = [0, 1, rank as u32 - 1, 9, 64, u32::MAX][random.below(6)];
            if (view.rank as usize) <= 8 {
                view.rank = view.rank.min(rank as u32);
            }
            format!("rank {}", view.rank)
        }
        4 => {
            view.data = std::ptr::null_mut();
            "null data".into()
        }
        5 => {
            view.device = 1 + random.below(1000) as u32;
            format!("device {}", view.device)
        }
        6 => {
            // One byte an element at most, or none at all.
            view.dtype = [0, 4, 5, 6, 7, 11, 13, 99, u32::MAX][random.below(9)];
            format!("type id {}", view.dtype)
        }
        7 if rank > 1 => {
            let other = random.below(rank);
            view.dims.swap(axis, other);
            view.strides.swap(axis, other);
            format!("axes {axis} and {other} swapped")
        }
        _ => {
            view.flags = random.word() as u32;
            format!("flags {:#x}", view.flags)
        }
    }
}
