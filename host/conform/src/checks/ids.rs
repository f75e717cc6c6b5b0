//! `bogus_ids`: forms, devices, spans and structures that do not exist are refused, by name and by number.

use structures_loader::PluginError;
use structures_suite::SuiteError;

use super::layout::raw_of;
use super::{Bench, Verdict};
use crate::code::Code;

/// A word that is no name of anything.
const NOBODY: &str = "no_such_thing";

pub(super) fn run(bench: &Bench<'_>) -> Result<Verdict, SuiteError> {
    let (plugin, throwaway) = (bench.cx.loaded.plugin(), bench.cx.throwaway);
    let shapes = bench.case.shapes();
    let form = bench.form.name.as_bytes();
    let mut asked = 0;
    // Probes: an error, or an answer that says no.
    let mut foreign = shapes.clone();
    foreign.structure = NOBODY.into();
    let mut aside = shapes.clone();
    aside.span = NOBODY.into();
    let probes: [(&str, &[u8], u32, _); 7] = [
        ("probe: an unknown form", NOBODY.as_bytes(), 0, shapes),
        ("probe: an empty form", b"", 0, shapes),
        ("probe: a form that is not UTF-8", b"\xff\xfe", 0, shapes),
        ("probe: device 4000000000", form, 4_000_000_000, shapes),
        ("probe: device 7", form, 7, shapes),
        ("probe: an unknown structure", form, 0, &foreign),
        ("probe: an unknown span", form, 0, &aside),
    ];
    for (what, form, device, shapes) in probes {
        bench.at(what, None);
        asked += 1;
        let text = serde_json::to_vec(shapes)?;
        let answer = plugin.probe_raw(throwaway, form, device, &text);
        let yes = answer.is_ok_and(|report| {
            serde_json::from_slice::<serde_json::Value>(&report)
                .is_ok_and(|report| report["probed"] == true)
        });
        if yes {
            return Ok(Code::IdAccepted.because(format!("{what}: answered yes")));
        }
    }
    let (good, _kept) = raw_of(bench);
    let params = |edit: &dyn Fn(&mut serde_json::Value)| -> Result<Vec<u8>, SuiteError> {
        let mut value = serde_json::to_value(&bench.case.request().params)?;
        edit(&mut value);
        Ok(serde_json::to_vec(&value)?)
    };
    let mut binds = Vec::new();
    for (what, form) in [
        ("bind: an unknown form", NOBODY.as_bytes()),
        ("bind: an empty form", b""),
        ("bind: a form that is not UTF-8", b"\xff\xfe"),
    ] {
        let mut raw = good.clone();
        raw.form = form.to_vec();
        binds.push((what, raw));
    }
    let mut raw = good.clone();
    raw.device = 4_000_000_000;
    binds.push(("bind: device 4000000000", raw));
    let mut raw = good.clone();
    raw.span = NOBODY.into();
    binds.push(("bind: an unknown span", raw));
    let mut raw = good.clone();
    raw.params = params(&|v| v["structure"] = NOBODY.into())?;
    binds.push(("bind: an unknown structure", raw));
    for axis in bench.form.variants.keys() {
        let mut raw = good.clone();
        raw.params = params(&|v| v["variant"][axis] = NOBODY.into())?;
        binds.push(("bind: an unknown value on an axis it declares", raw));
    }
    for (what, raw) in binds {
        bench.at(what, None);
        asked += 1;
        let answer: Result<_, PluginError> = plugin.bind_raw(throwaway, &raw);
        if answer.is_ok() {
            return Ok(Code::IdAccepted.because(format!("{what}: bound")));
        }
    }
    Ok(Verdict::passed(format!("{asked} refused")))
}
