//! `band`: dims and rows at the edges of what the form declares, and one step outside.
//!
//! At an edge the form must run, and be right if it is right elsewhere (if it is not, that is parity's to tell).
//! Outside, the plugin must say no somewhere before numbers come out; whatever it says, it must not crash.

use std::collections::BTreeMap;

use structures_plugin_api::describe::{FormDecl, ProbeShapes};
use structures_suite::cases::{draft_of, sizes_of_rows};
use structures_suite::judge::{Judge, Made, Outcome, Prepared};
use structures_suite::{Executor, SuiteError};

use super::{admitted, filled, once, Bench, Verdict};
use crate::code::Code;

/// Largest edge that is tried: more is a matter of memory and time, not of edges.
const LARGEST: u64 = 4096;
/// Most elements of all weights of a case together.
const MOST: usize = 1 << 23;

/// Whether shapes touch an edge that the band declares.
pub(super) fn is_edge(form: &FormDecl, shapes: &ProbeShapes) -> bool {
    let rows = form.band.rows.is_some_and(|[low, high]| {
        let edge = |n: &u64| (*n == low && low > 1) || *n == high;
        shapes.rows.iter().any(edge)
    });
    rows || form
        .band
        .dims
        .iter()
        .any(|(symbol, band)| shapes.dims.get(symbol).is_some_and(|n| *n == band.max))
}

/// One size to try.
struct Try {
    what: String,
    sizes: BTreeMap<String, usize>,
    inside: bool,
}

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let right = once(bench, bench.case)
        .map_err(|e| e.to_string())
        .and_then(|outputs| judged(bench.case, &outputs))
        .is_ok();
    let (mut done, mut left) = (Vec::new(), Vec::new());
    let (tries, too_large) = tries(bench);
    left.extend(too_large);
    let only = bench.cx.task.only;
    let numbered = tries.into_iter().zip(bench.cx.task.seed..);
    for (t, seed) in numbered.filter(|(_, seed)| only.is_none_or(|only| only == *seed)) {
        bench.at(&t.what, Some(seed));
        let Some(draft) = draft_of(bench.spec, bench.form, &t.sizes)? else {
            left.push(t.what);
            continue;
        };
        let case = match Judge::new(bench.spec, bench.form, &draft).prepare(seed, true)? {
            Made::Ready(case) => case,
            _ => {
                left.push(t.what);
                continue;
            }
        };
        let weights = case.request().weights.iter();
        if weights
            .map(|(_, w)| w.dims.iter().product::<usize>())
            .sum::<usize>()
            > MOST
        {
            left.push(t.what);
            continue;
        }
        let admitted = bench.form.admits(case.shapes()).is_ok();
        if admitted != t.inside {
            // Another symbol of the entry follows this one out of the band, or into it.
            left.push(t.what);
            continue;
        }
        let verdict = match t.inside {
            true => inside(bench, &case, right),
            false => outside(bench, &case),
        };
        if let Some((code, reason)) = verdict {
            return Ok(code.at(seed, format!("{}: {reason}", t.what)));
        }
        done.push(t.what);
    }
    if done.is_empty() && left.is_empty() {
        return Ok(Verdict::Skipped("the form declares no band".into()));
    }
    let mut note = done.join(", ");
    if !left.is_empty() {
        note.push_str(&format!("; not tried: {}", left.join(", ")));
    }
    Ok(match done.is_empty() {
        true => Verdict::Skipped(note.trim_start_matches("; ").into()),
        false => Verdict::passed(note),
    })
}

fn judged(case: &Prepared<'_>, outputs: &[crate::room::Room]) -> Result<(), String> {
    let compared = filled(case, outputs).and_then(|got| case.compare(&got, false));
    match compared {
        Ok(verdict) if verdict.outcome == Outcome::Passed => Ok(()),
        Ok(verdict) => Err(verdict.reason.unwrap_or_default()),
        Err(e) => Err(e.to_string()),
    }
}

fn inside(bench: &Bench<'_>, case: &Prepared<'_>, right: bool) -> Option<(Code, String)> {
    if let Some(no) = case.probe(bench.cx.loaded) {
        let text = no.reason.or(no.code).unwrap_or_default();
        return Some((Code::BandRefused, format!("probe: {text}")));
    }
    match once(bench, case) {
        Err(e) => Some((Code::BandRefused, e.to_string())),
        Ok(outputs) if right => judged(case, &outputs)
            .err()
            .map(|reason| (Code::BandWrong, reason)),
        Ok(_) => None,
    }
}

fn outside(bench: &Bench<'_>, case: &Prepared<'_>) -> Option<(Code, String)> {
    let probed = bench.cx.loaded.probe(&bench.form.name, case.shapes());
    let refused = !probed.is_ok_and(|report| report.probed);
    // Also where the probe said no: a bind and a call answer or refuse, and come back.
    let ran = once(bench, case).is_ok();
    (ran && !refused).then(|| {
        let text = "the probe says yes, and it binds and runs".to_string();
        (Code::BandExceeded, text)
    })
}

/// What to try, and what is too large to.
fn tries(bench: &Bench<'_>) -> (Vec<Try>, Vec<String>) {
    let form = bench.form;
    let base = admitted(bench.spec, form, 0);
    let (mut all, mut left) = (Vec::new(), Vec::new());
    let mut push = |what: String, size: u64, inside: bool, own: BTreeMap<String, usize>| {
        if size > LARGEST {
            left.push(what);
            return;
        }
        let mut sizes = base.clone();
        sizes.extend(own);
        all.push(Try {
            what,
            sizes,
            inside,
        });
    };
    if let Some([low, high]) = form.band.rows {
        let rows = |n: u64| sizes_of_rows(bench.spec, n as usize);
        let mut edges = vec![low.max(1), high];
        edges.dedup();
        for n in edges {
            push(format!("{n} rows"), n, true, rows(n.min(LARGEST)));
        }
        if low > 1 {
            push(
                format!("{} rows outside", low - 1),
                low,
                false,
                rows(low - 1),
            );
        }
        if let Some(n) = high.checked_add(1) {
            push(format!("{n} rows outside"), n, false, rows(n.min(LARGEST)));
        }
    }
    for (symbol, band) in &form.band.dims {
        let step = band.multiple_of.max(1);
        let low = band.min.max(1).next_multiple_of(step);
        let high = band.max / step * step;
        let one = |n: u64| BTreeMap::from([(symbol.clone(), n.min(LARGEST) as usize)]);
        let mut edges = vec![low, high];
        edges.dedup();
        for n in edges.into_iter().filter(|n| band.contains(*n)) {
            push(format!("{symbol} {n}"), n, true, one(n));
        }
        let beyond = high.checked_add(step);
        let between = (step > 1).then(|| low + 1);
        let below = low.checked_sub(step).filter(|n| *n > 0);
        for n in [below, between, beyond].into_iter().flatten() {
            if !band.contains(n) {
                push(format!("{symbol} {n} outside"), n, false, one(n));
            }
        }
    }
    (all, left)
}
