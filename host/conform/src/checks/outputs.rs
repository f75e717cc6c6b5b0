//! `outputs`: a call writes every element of every output, nothing beside them, and no input.
//!
//! Outputs lie poisoned in the middle of watched memory. What an output held before must not matter, either: elements
//! that still look like the poison are looked at again with a number in their place.

use structures_suite::judge::{Judge, Made};
use structures_suite::SuiteError;

use super::{band, call, parity, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::Lay;

/// Cases a form, unless more are asked for.
const CASES: usize = 24;
/// What an output holds the second time.
const NUMBER: f32 = 1234.5;

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let mut done = 0;
    for (seed, version, draft) in parity::chosen(bench, parity::cases(bench)?, CASES) {
        bench.at(&draft.name, Some(seed));
        let Ok(spec) = bench.cx.catalog.get_version(&bench.form.structure, version) else {
            continue;
        };
        let Made::Ready(case) = Judge::new(spec, bench.form, &draft).prepare(seed, false)? else {
            continue;
        };
        if band::is_edge(bench.form, case.shapes()) {
            continue;
        }
        // What does not bind or run is told elsewhere.
        let Ok(bound) = bench.bind_as(case.request()) else {
            continue;
        };
        let inputs = rooms(&case.inputs(), Lay::default());
        let before: Vec<Option<Vec<u64>>> = bits(&inputs);
        let mut outputs = poisoned(&case, Lay::default());
        if call(&bound, &inputs, &mut outputs).is_err() {
            continue;
        }
        let name = &draft.name;
        for (index, room) in outputs.iter().enumerate() {
            if let Some(at) = room.touched() {
                let text = format!("{name}: output {index}: {at} bytes from its first element");
                return Ok(Code::WrittenBeyond.at(seed, text));
            }
        }
        if bits(&inputs) != before || inputs.iter().flatten().any(|r| r.touched().is_some()) {
            return Ok(Code::InputChanged.at(seed, name.clone()));
        }
        for (index, room) in outputs.iter().enumerate() {
            let left = room.intact();
            if let Some(first) = left.first() {
                let total: usize = room.dims().iter().product();
                let mut again = poisoned(&case, Lay::default());
                again.iter_mut().for_each(|r| r.fill(NUMBER));
                let same = call(&bound, &inputs, &mut again).is_ok()
                    && again[index].values()[*first] == NUMBER;
                let what = match same {
                    true => "not written",
                    false => "made of what the output held before",
                };
                let text = format!(
                    "{name}: output {index}: {} of {total} elements, the first at {first}, are {what}",
                    left.len()
                );
                return Ok(Code::Unwritten.at(seed, text));
            }
        }
        done += 1;
    }
    Ok(match done {
        0 => Verdict::Skipped("no case ran".into()),
        n => Verdict::passed(format!("{n} cases")),
    })
}

fn bits(rooms: &[Option<crate::room::Room>]) -> Vec<Option<Vec<u64>>> {
    let each = rooms.iter();
    each.map(|r| r.as_ref().map(|r| r.bits())).collect()
}
