//! `footprint`: what an instance says it holds is what it holds, and releasing it gives it back.
//!
//! Measured where it can be: bytes of the process's heap before and after a bind at large sizes, and what the plugin
//! leased from the host in a call. Weights may lie in memory that a plugin maps by itself and cuts up: what the heap does
//! not explain is looked for in the process's anonymous memory, over so many instances that whole pages do not matter.

use structures_suite::cases::draft_of;
use structures_suite::judge::{Judge, Made, Prepared};
use structures_suite::SuiteError;

use super::{call, large, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::Lay;

/// Width of the tensors.
const WIDTH: u64 = 256;
/// What an instance may hold beside what it says: its own struct, names, allocator rounding.
const SPARE: u64 = 16 * 1024;
/// A huge page.
const PAGE: u64 = 2 << 20;
/// Claims that huge pages cannot hide, in bytes, and the most instances that are bound for them.
const CLAIMS: (u64, u64) = (16 * PAGE, 256);
/// Binds and releases that must leave nothing.
const ROUNDS: u64 = 8;
/// How often that is seen before it is called a leak.
const PARTS: usize = 4;

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let throwaway = bench.cx.throwaway;
    if throwaway.heap_bytes().is_none() {
        return Ok(Verdict::Skipped(
            "the C library here does not count its heap".into(),
        ));
    }
    let draft = draft_of(
        bench.spec,
        bench.form,
        &large(bench.spec, bench.form, WIDTH),
    )?;
    let made = match &draft {
        Some(draft) => {
            Some(Judge::new(bench.spec, bench.form, draft).prepare(bench.cx.task.seed, false)?)
        }
        None => None,
    };
    match made {
        Some(Made::Ready(case)) if bench.bind_as(case.request()).is_ok() => measured(bench, &case),
        _ => measured(bench, bench.case),
    }
}

fn measured(bench: &Bench<'_>, case: &Prepared<'_>) -> Result<Verdict, SuiteError> {
    if bench.device() != 0 {
        return Ok(Verdict::Skipped(
            "it holds memory of a device, which no heap shows".into(),
        ));
    }
    let heap = || bench.cx.throwaway.heap_bytes().unwrap_or(0);
    let plugin = bench.cx.loaded.plugin();
    let inputs = rooms(&case.inputs(), Lay::default());
    let mut outputs = poisoned(case, Lay::default());
    // The first time of everything makes what stays: threads, tables, pools.
    for _ in 0..2 {
        let Ok(bound) = bench.bind_as(case.request()) else {
            return Ok(Verdict::Skipped("it does not bind".into()));
        };
        if call(&bound, &inputs, &mut outputs).is_err() {
            return Ok(Verdict::Skipped("it does not run".into()));
        }
    }
    bench.at("bind", None);
    let before = heap();
    let bound = match bench.bind_as(case.request()) {
        Ok(bound) => bound,
        Err(e) => return Ok(Code::Footprint.because(e.to_string())),
    };
    let held = heap().saturating_sub(before);
    let facts = bound.facts();
    let said = facts.packed_bytes + facts.scratch_bytes;
    if held > said + said / 8 + SPARE {
        return Ok(Code::Footprint.because(format!(
            "it says {} bytes packed and {} of scratch, the heap grew by {held}",
            facts.packed_bytes, facts.scratch_bytes
        )));
    }
    let mut seen = format!("the heap grew by {held}");
    if facts.packed_bytes > held + held / 8 + SPARE {
        let (instances, mapped) = match mapped(bench, case, facts.packed_bytes) {
            Some(measured) => measured,
            None => {
                return Ok(Verdict::Skipped(
                    "anonymous memory is not counted here".into(),
                ))
            }
        };
        let grown = format!("{instances} instances grew anonymous memory by {mapped}");
        let claimed = instances * facts.packed_bytes;
        if claimed > mapped + mapped / 8 + 2 * PAGE {
            return Ok(Code::Footprint.because(format!(
                "it says {} bytes packed, {seen}, {grown}",
                facts.packed_bytes
            )));
        }
        seen = grown;
    }
    bench.at("call", None);
    let leased = plugin.scratch_bytes();
    let allowed = facts.scratch_bytes + facts.workspace_bytes;
    if leased > allowed + allowed / 8 + SPARE {
        return Ok(Code::Footprint.because(format!(
            "it says {} bytes of scratch and {} of workspace, and has leased {leased} from the host",
            facts.scratch_bytes, facts.workspace_bytes
        )));
    }
    drop(bound);
    bench.at("bind and release", None);
    // A leak of anything that grows with the weights, or of a block in each round.
    let most = (said / 2).clamp(4 * 1024, ROUNDS * SPARE);
    let mut left = Vec::new();
    // What is made once, late (a buffer of a thread that was busy until now), does not come back in every part; a leak does.
    while left.len() < PARTS {
        let before = heap();
        for _ in 0..ROUNDS {
            if let Ok(bound) = bench.bind_as(case.request()) {
                if call(&bound, &inputs, &mut outputs).is_err() {
                    break;
                }
            }
        }
        left.push(heap().saturating_sub(before));
        if left.last().is_some_and(|left| *left <= most) {
            break;
        }
    }
    if left.len() == PARTS && left.iter().all(|left| *left > most) {
        return Ok(Code::Leaked.because(format!(
            "{left:?} bytes are left after {ROUNDS} times bind, call and release, each of {PARTS} times"
        )));
    }
    Ok(Verdict::passed(format!(
        "{} bytes packed, {} of scratch, {} of workspace; {seen}",
        facts.packed_bytes, facts.scratch_bytes, facts.workspace_bytes
    )))
}

/// How many instances were held at once, and by how much anonymous memory grew with them.
fn mapped(bench: &Bench<'_>, case: &Prepared<'_>, packed: u64) -> Option<(u64, u64)> {
    let before = anonymous()?;
    let wanted = CLAIMS.0.div_ceil(packed.max(1)).min(CLAIMS.1);
    let held: Vec<_> = (0..wanted)
        .map_while(|_| bench.bind_as(case.request()).ok())
        .collect();
    let grown = anonymous()?.saturating_sub(before);
    Some((held.len() as u64, grown))
}

/// Anonymous bytes of this process that are in memory.
fn anonymous() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("Anonymous:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(1024 * kilobytes)
}
