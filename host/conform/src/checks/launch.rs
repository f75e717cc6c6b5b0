//! `launch`: the form probes, binds and runs once on a usual case. What it makes is not looked at.
//!
//! Every other check of the form stands on this one. A form whose devices are not on this machine is not tried: that is
//! no fault of it, and nothing is known of it either.

use structures_loader::{Code as LoadCode, StatusKind};
use structures_suite::SuiteError;

use super::{call, poisoned, rooms, Bench, Verdict};
use crate::code::Code;
use crate::room::Lay;

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let case = bench.case;
    bench.at("devices", None);
    if let Some(why) = nowhere(bench) {
        return Ok(Verdict::Skipped(why));
    }
    bench.at("probe", None);
    if let Some(no) = case.probe(bench.cx.loaded) {
        let code = no.code.unwrap_or_default();
        let text = format!("{code}: {}", no.reason.unwrap_or_default());
        return Ok(Code::NotProbed.because(text));
    }
    bench.at("bind", None);
    let bound = match bench.bind() {
        Ok(bound) => bound,
        Err(e) => return Ok(Code::NotBound.because(e.to_string())),
    };
    bench.at("call", None);
    let mut outputs = poisoned(case, Lay::default());
    let inputs = rooms(&case.inputs(), Lay::default());
    if let Err(e) = call(&bound, &inputs, &mut outputs) {
        return Ok(Code::NotRun.because(e.to_string()));
    }
    bench.at("release", None);
    drop(bound);
    let dims: Vec<String> = case
        .request()
        .params
        .dims
        .iter()
        .map(|(s, n)| format!("{s}={n}"))
        .collect();
    Ok(Verdict::passed(format!(
        "span {}, {}",
        case.request().span,
        dims.join(" ")
    )))
}

/// Why nothing of this machine runs the form, where the plugin works and its device is what is missing.
fn nowhere(bench: &Bench<'_>) -> Option<String> {
    let home = bench.cx.loaded.home(bench.case.request());
    let no = home.err().filter(|e| e.kind == StatusKind::Refused)?;
    let missing = no.code != LoadCode::ArchMalformed.name();
    missing.then(|| format!("no device here runs it: {}: {}", no.code, no.message))
}
