//! Binding again exactly what a receipt adopted and activated, or refusing with what is different.
//!
//! A receipt holds the seats, the statistics they were bound with, and the digests of plugins, specs and checkpoint.
//! Nothing is judged again; anything that differs is a refusal, never a guess.

use std::collections::HashMap;
use std::sync::Arc;

use structures_graph::session::Plan;

use crate::attach::{nothing, read_packed, span_contents};
use crate::bind::Bench;
use crate::choose::qualify;
use crate::error::Error;
use crate::host::{Host, Loaded};
use crate::receipt::{Receipt, SeatNote};
use crate::seat::{OnGuardFail, Seat};
use crate::stats::{Calibration, CalibrationNote};

/// Reads and verifies a receipt.
pub fn read(path: &std::path::Path) -> Result<Receipt, Error> {
    crate::verify::read(path).map_err(|unfit| match unfit.code {
        "io" => Error::Io {
            path: path.display().to_string(),
            reason: format!("{}; give the file that attach wrote", unfit.reason),
        },
        code => Error::refused(
            code,
            format!(
                "{}: {}; give the file as attach wrote it",
                path.display(),
                unfit.reason
            ),
        ),
    })
}

/// Binds the receipt's seats on a model.
pub fn replay(
    host: &Host,
    model: &Loaded,
    receipt: &Receipt,
    prompt: &[u32],
    on_guard_fail: OnGuardFail,
) -> Result<(Plan, Vec<Arc<Seat>>), Error> {
    check(host, model, receipt)?;
    let survey = host.survey(model, &[])?;
    // Bind parity needs what the host feeds the spans; a prompt beyond the context is refused by whoever runs it.
    let held = prompt.len().min(model.model.config().max_positions);
    let contents = span_contents(model, &survey, &prompt[..held])?;
    let forms = host.forms();
    let mut installs = Vec::new();
    let mut seats = Vec::new();
    for note in receipt.bound() {
        let different = |what: &str| {
            Error::refused(
                "receipt_mismatch",
                format!("seat `{}` ({}): {what}", note.key, note.structure),
            )
        };
        let site = survey
            .sites
            .iter()
            .find(|s| {
                s.seam.key == note.key
                    && s.spec.name == note.structure
                    && s.spec.version == note.version
            })
            .ok_or_else(|| different("the model has no such seam now"))?;
        let choice = forms
            .iter()
            .find(|c| {
                c.plugin == note.plugin
                    && c.form.name == note.form
                    && c.form.structure == note.structure
            })
            .ok_or_else(|| different("the plugin declares no such form now"))?;
        let rows = [note.median_rows];
        let span = qualify(site, choice, "f32", &rows)
            .map_err(|n| different(&format!("{}: {}", n.code, n.reason)))?;
        if site.spans[span].name != note.span {
            return Err(different(&format!(
                "bound at span `{}` then, `{}` now",
                note.span, site.spans[span].name
            )));
        }
        // Capacity is what was bound, the choice of form rests on the median.
        let bound_rows = [note.median_rows, note.row_capacity as u64];
        let plugin = host
            .registry
            .plugin(choice.plugin)
            .ok_or_else(|| different("the plugin is not loaded"))?;
        let calibration = statistics_of(note);
        let blocks = read_packed(model, &site.spans[span], &note.packed)?;
        if blocks.len() != note.packed.len() {
            return Err(different(
                "the checkpoint does not store its slots packed as then",
            ));
        }
        let bench = Bench {
            session: model.session(),
            calibration: &calibration,
            contents: &contents,
            on_guard_fail,
            scheme: &note.scheme,
            blocks: &blocks,
        };
        let bound = bench
            .bind(site, span, choice, plugin, &bound_rows)
            .map_err(|refused| {
                different(&format!("{}: {}", refused.note.code, refused.note.reason))
            })?;
        for (what, then, now) in [
            ("variant", json(&note.variant), json(&bound.note.variant)),
            ("params", json(&note.params), json(&bound.note.params)),
            ("dims", json(&note.dims), json(&bound.note.dims)),
            ("format", json(&note.format), json(&bound.note.format)),
        ] {
            if then != now {
                return Err(different(&format!("{what} was {then}, is {now}")));
            }
        }
        installs.push(bound.install);
        seats.push(bound.seat);
    }
    Ok((model.session().plan(installs)?, seats))
}

/// Checkpoint, plugins and specs are what they were.
fn check(host: &Host, model: &Loaded, receipt: &Receipt) -> Result<(), Error> {
    let differs = |what: String| Err(Error::refused("receipt_mismatch", what));
    let sha256 = model.sha256()?;
    if sha256 != receipt.checkpoint.sha256 {
        return differs(format!(
            "the receipt is for checkpoint `{}` with sha256 {}, this is `{}` with {sha256}",
            receipt.checkpoint.file,
            receipt.checkpoint.sha256,
            model.file()
        ));
    }
    for note in receipt
        .plugins
        .iter()
        .filter(|p| receipt.bound().any(|s| s.plugin == p.id))
    {
        match host.registry.plugin(&note.id) {
            None => {
                let row = host.registry.row(&note.id);
                let why = row.and_then(|r| r.reason.clone()).unwrap_or_else(|| {
                    "no loaded plugin has this id; `structures plugins list` shows every candidate and why one was \
                     refused, --plugins DIR adds a directory"
                        .into()
                });
                return differs(format!("plugin `{}` is not loaded: {why}", note.id));
            }
            Some(p) if p.sha256() != note.sha256 => {
                return differs(format!(
                    "plugin `{}` {}: the receipt was written with sha256 {}, this is {}; attach again",
                    note.id, note.version, note.sha256, p.sha256()
                ));
            }
            Some(_) => {}
        }
    }
    for seat in receipt.bound() {
        let key = format!("{}@{}", seat.structure, seat.version);
        let Ok(spec) = host.catalog.get_version(&seat.structure, seat.version) else {
            return differs(format!(
                "the catalog has no {key}; give its directory with --catalog"
            ));
        };
        if receipt.spec_digests.get(&key) != Some(&spec.digest) {
            return differs(format!(
                "the spec {key} is not the one the receipt was written with"
            ));
        }
    }
    Ok(())
}

/// The statistics a seat was bound with, under the keys binding looks up.
fn statistics_of(note: &SeatNote) -> Calibration {
    let mut calibration = nothing(CalibrationNote::nothing_fitted("receipt", 0, 100.0));
    let mut by_kind: HashMap<&str, Vec<(String, &Vec<f32>)>> = HashMap::new();
    for (name, values) in &note.statistics {
        let mut parts = name.splitn(2, '|');
        let (point, kind) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        by_kind
            .entry(kind)
            .or_default()
            .push((format!("{}|{point}", note.key), values));
    }
    for (key, values) in by_kind.remove("amax|tensor").unwrap_or_default() {
        if let Some(v) = values.first() {
            calibration.amax.insert(key, *v);
        }
    }
    for (key, values) in by_kind.remove("amax|channel").unwrap_or_default() {
        calibration.channel_amax.insert(key, values.clone());
    }
    for (key, values) in by_kind.remove("second_moment|channel").unwrap_or_default() {
        calibration
            .second_moment
            .insert(key, values.iter().map(|v| f64::from(*v)).collect());
    }
    calibration
}

fn json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}
