//! `parity`: the form against the catalog's reference, over every case made from entry and declaration.
//!
//! Judged as at bind: within what the form declares. Cases at the edges of the declared band are [`super::band`]'s;
//! elements that were not written are [`super::outputs`]'.

use structures_suite::cases::{draft_of, drafts, Draft};
use structures_suite::judge::{Judge, Made, Outcome};
use structures_suite::random::Random;
use structures_suite::SuiteError;

use super::{admitted, band, filled, once, Bench, Verdict};
use crate::code::Code;

/// Cases a form, unless more are asked for.
const CASES: usize = 72;

/// Every case of a form in every version that the catalog has, with its seed.
pub(super) fn cases(bench: &Bench<'_>) -> Result<Vec<(u64, u32, Draft)>, SuiteError> {
    let mut all = Vec::new();
    for version in &bench.form.spec_versions {
        let known = bench
            .cx
            .catalog
            .get_version(&bench.form.structure, *version);
        let Ok(spec) = known else { continue };
        for steps in 0..4 {
            let sizes = admitted(spec, bench.form, steps);
            all.extend(draft_of(spec, bench.form, &sizes)?.map(|d| (*version, d)));
        }
        all.extend(drafts(spec, bench.form)?.into_iter().map(|d| (*version, d)));
    }
    let seed = bench.cx.task.seed;
    let numbered = all.into_iter().zip(seed..);
    Ok(numbered
        .map(|((version, draft), seed)| {
            // Other layouts are a check of their own.
            let swapped = false;
            (seed, version, Draft { swapped, ..draft })
        })
        .collect())
}

/// At most so many of them: the same ones for a seed, over the whole range; or the one to be replayed.
pub(super) fn chosen<T>(
    bench: &Bench<'_>,
    all: Vec<(u64, u32, T)>,
    most: usize,
) -> Vec<(u64, u32, T)> {
    if let Some(only) = bench.cx.task.only {
        return all.into_iter().filter(|(seed, ..)| *seed == only).collect();
    }
    let most = bench.cx.task.cases.unwrap_or(most).max(1);
    if all.len() <= most {
        return all;
    }
    // One of each stretch of equal length.
    let (len, mut random) = (all.len(), Random::new(bench.cx.task.seed));
    let picks: Vec<usize> = (0..most)
        .map(|i| {
            let (from, to) = (i * len / most, (i + 1) * len / most);
            from + random.below(to - from)
        })
        .collect();
    let kept = all.into_iter().enumerate();
    kept.filter(|(i, _)| picks.contains(i))
        .map(|(_, c)| c)
        .collect()
}

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let (mut done, mut worst, mut unjudged) = (0, 0.0_f64, 0);
    for (seed, version, draft) in chosen(bench, cases(bench)?, CASES) {
        let name = &draft.name;
        bench.at(name, Some(seed));
        let Ok(spec) = bench.cx.catalog.get_version(&bench.form.structure, version) else {
            continue;
        };
        let case = match Judge::new(spec, bench.form, &draft).prepare(seed, false)? {
            Made::Ready(case) => case,
            Made::Outside => continue,
            Made::Broken(_) => {
                unjudged += 1;
                continue;
            }
        };
        if band::is_edge(bench.form, case.shapes()) {
            continue;
        }
        if let Some(no) = case.probe(bench.cx.loaded) {
            let text = format!("{name}: {}", no.reason.or(no.code).unwrap_or_default());
            return Ok(Code::NotProbed.at(seed, text));
        }
        let outputs = match once(bench, &case) {
            Ok(outputs) => outputs,
            Err(e) => return Ok(Code::NotRun.at(seed, format!("{name}: {e}"))),
        };
        let verdict = case.compare(&filled(&case, &outputs)?, false)?;
        if verdict.outcome != Outcome::Passed {
            let reason = verdict.reason.unwrap_or_default();
            return Ok(Code::Parity.at(seed, format!("{name}: {reason}")));
        }
        worst = worst.max(verdict.error.unwrap_or(0.0));
        done += 1;
    }
    if done == 0 {
        return Ok(Verdict::Skipped(
            "no case lies inside of the band, only at its edges".into(),
        ));
    }
    let mut note = format!("{done} cases, worst {worst:.1e}");
    if unjudged > 0 {
        note.push_str(&format!(", {unjudged} without a reference"));
    }
    Ok(Verdict::passed(note))
}
