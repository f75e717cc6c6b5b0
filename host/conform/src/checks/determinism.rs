//! `determinism`: the same call gives the same bits: again, after another call, on another instance.

use structures_suite::operand::{Data, Operand};
use structures_suite::SuiteError;

use super::{call, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::{Lay, Room};

/// Calls of one instance.
const CALLS: usize = 4;

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let case = bench.case;
    let other: Vec<Option<Operand>> = case.inputs().into_iter().map(|i| i.map(halved)).collect();
    let mut first: Option<Vec<Room>> = None;
    for instance in 0..2 {
        bench.at(&format!("instance {}", instance + 1), None);
        let bound = match bench.bind() {
            Ok(bound) => bound,
            Err(e) => return Ok(Code::Differs.because(format!("the next bind: {e}"))),
        };
        for n in 0..CALLS {
            let which = format!("call {} of instance {}", n + 1, instance + 1);
            bench.at(&which, None);
            let mut outputs = poisoned(case, Lay::default());
            let inputs = rooms(&case.inputs(), Lay::default());
            if let Err(e) = call(&bound, &inputs, &mut outputs) {
                return Ok(Code::Differs.because(format!("{which}: {e}")));
            }
            match &first {
                None => first = Some(outputs),
                Some(first) => {
                    if let Some(text) = differ(first, &outputs) {
                        return Ok(Code::Differs.because(format!("{which}: {text}")));
                    }
                }
            }
            // Another call in between, of which nothing may stay.
            let mut away = poisoned(case, Lay::default());
            let other = rooms(&other, Lay::default());
            if let Err(e) = call(&bound, &other, &mut away) {
                return Ok(Code::Differs.because(format!("after {which}, with other numbers: {e}")));
            }
        }
    }
    Ok(Verdict::passed(format!("2 instances, {CALLS} calls each")))
}

fn halved(mut operand: Operand) -> Operand {
    if let Data::F32(values) = &mut operand.data {
        values.iter_mut().for_each(|v| *v *= 0.5);
    }
    operand
}

fn differ(a: &[Room], b: &[Room]) -> Option<String> {
    let pairs = a.iter().zip(b).enumerate();
    pairs.into_iter().find_map(|(index, (a, b))| {
        let (bits, other) = (a.bits(), b.bits());
        let off = bits.iter().zip(&other).filter(|(x, y)| x != y).count();
        let at = bits.iter().zip(&other).position(|(x, y)| x != y)?;
        Some(format!(
            "{off} of {} elements of output {index} differ, the first at {at}: {} and {}",
            bits.len(),
            a.values()[at],
            b.values()[at]
        ))
    })
}
