//! `non_finite`: NaN and infinities in one row of one input, and in the weights.
//!
//! They may be refused. Where numbers come out, they are not finite only where the reference's are not, and a row that
//! the reference loses to a NaN is not all finite. Weights that are not finite must not crash, that is all.

use structures_suite::operand::{Data, Operand};
use structures_suite::SuiteError;

use super::{call, matters, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::Lay;

const VALUES: [(&str, f32); 3] = [
    ("NaN", f32::NAN),
    ("infinity", f32::INFINITY),
    ("-infinity", f32::NEG_INFINITY),
];

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let case = bench.case;
    let clean = case.inputs();
    let names: Vec<String> = case.input_names().map(str::to_string).collect();
    let (mut done, mut refused, mut seed) = (0, 0, bench.cx.task.seed);
    for (index, name) in names.iter().enumerate() {
        let matters = matters(bench, index);
        for (word, value) in VALUES {
            let Some(input) = clean[index].as_ref().and_then(|i| spoiled(i, value)) else {
                continue;
            };
            let own = seed;
            seed += 1;
            if bench.cx.task.only.is_some_and(|only| only != own) {
                continue;
            }
            let what = format!("{word} in the last row of `{name}`");
            bench.at(&what, Some(own));
            let mut inputs = clean.clone();
            inputs[index] = Some(input);
            let Ok(bound) = bench.bind() else { continue };
            let mut outputs = poisoned(case, Lay::default());
            if call(&bound, &rooms(&inputs, Lay::default()), &mut outputs).is_err() {
                refused += 1;
                continue;
            }
            let want = case.reference_of(&inputs)?;
            for (room, (output, want)) in outputs.iter().zip(&want) {
                let want: Vec<f32> = want
                    .to_dtype(candle_core::DType::F32)?
                    .flatten_all()?
                    .to_vec1()?;
                let (got, left) = (room.values(), room.intact());
                let spread = (0..want.len())
                    .find(|i| want[*i].is_finite() && !got[*i].is_finite() && !left.contains(i));
                if let Some(at) = spread {
                    let text = format!(
                        "{what}: `{output}` at {at} is {}, the reference has {}",
                        got[at], want[at]
                    );
                    return Ok(Code::NonFiniteSpread.at(own, text));
                }
                let width = room.dims().last().copied().unwrap_or(1).max(1);
                let lost = want.chunks(width).zip(got.chunks(width));
                let swallowed = lost.enumerate().find(|(_, (want, got))| {
                    value.is_nan()
                        && matters
                        && bench.form.activation_format == "none"
                        && want.iter().all(|v| v.is_nan())
                        && got.iter().all(|v| v.is_finite())
                });
                if let Some((row, _)) = swallowed {
                    let text = format!(
                        "{what}: row {row} of `{output}` is finite, the reference's is all NaN"
                    );
                    return Ok(Code::NonFiniteSwallowed.at(own, text));
                }
            }
            done += 1;
        }
    }
    let weights = case.request().weights.len();
    for index in 0..weights {
        for (word, value) in VALUES {
            let own = seed;
            seed += 1;
            if bench.cx.task.only.is_some_and(|only| only != own) {
                continue;
            }
            let mut request = case.request().clone();
            bench.at(
                &format!("{word} in `{}`", request.weights[index].0),
                Some(own),
            );
            let Some(weight) = spoiled(&request.weights[index].1, value) else {
                continue;
            };
            request.weights[index].1 = weight;
            // What comes of it is the form's own; that something comes is the check.
            if let Ok(bound) = bench.bind_as(&request) {
                let mut outputs = poisoned(case, Lay::default());
                let _ = call(&bound, &rooms(&clean, Lay::default()), &mut outputs);
            }
            done += 1;
        }
    }
    Ok(Verdict::passed(format!("{done} calls, {refused} refused")))
}

/// The operand with a value in the middle of its last row; `None` for one without floats.
fn spoiled(operand: &Operand, value: f32) -> Option<Operand> {
    let mut operand = operand.clone();
    let width = operand.dims.last().copied().unwrap_or(1).max(1);
    let len: usize = operand.dims.iter().product();
    let at = len.checked_sub(width)? + width / 2;
    match &mut operand.data {
        Data::F32(v) => *v.get_mut(at)? = value,
        Data::Bf16(v) => *v.get_mut(at)? = half::bf16::from_f32(value),
        Data::I64(_) => return None,
    }
    Some(operand)
}

#[cfg(test)]
mod tests {
    use structures_plugin_api::DType;

    use super::*;

    #[test]
    fn one_value_of_the_last_row_is_spoiled() {
        let clean = Operand::new(&[1.0; 6], &[2, 3], DType::F32);
        let values = spoiled(&clean, f32::NAN).unwrap().values();
        let nans: Vec<usize> = (0..6).filter(|i| values[*i].is_nan()).collect();
        assert_eq!(nans, [4]);
        assert!(spoiled(&Operand::new(&[1.0], &[1], DType::I64), 0.0).is_none());
    }
}
