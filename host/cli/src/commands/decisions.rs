//! `decisions`: what is recorded, what another machine recorded, and a race to record.

use std::path::Path;

use serde_json::json;
use structures::attach::{adjudicate, Adjudication, Options};
use structures::decisions::{Decision, Store};
use structures::environment::cpu_name;

use super::attach::{default_options, workload};
use super::{load_samples, open_model, pins, Context};
use crate::args::{DecisionsAction, RecordArgs};
use crate::failure::Failure;
use crate::progress::Bars;

/// 0, or 3 when a race has no winner anywhere.
pub fn run(action: Option<DecisionsAction>, cx: &Context<'_>) -> Result<u8, Failure> {
    match action.unwrap_or(DecisionsAction::List) {
        DecisionsAction::List => list(cx),
        DecisionsAction::Import { file } => import(&file, cx),
        DecisionsAction::Record(args) => match (&args.winner, &args.model) {
            (Some(winner), _) => by_hand(winner, &args, cx),
            (None, Some(model)) => race(model, &args, cx),
            (None, None) => Err(Failure::usage(
                "neither a model nor a winner",
                "give a MODEL to race on, or --winner with --structures",
            )),
        },
    }
}

fn store(cx: &Context<'_>) -> Store {
    match cx.decisions_file() {
        Some(path) => Store::open(&path),
        None => Store::none(),
    }
}

fn list(cx: &Context<'_>) -> Result<u8, Failure> {
    let store = store(cx);
    if let Some(warning) = store.warning() {
        tracing::warn!("{warning}");
    }
    let here = cpu_name();
    let file = cx.decisions_file().map(|p| p.display().to_string());
    if cx.out.json() {
        let rows: Vec<_> = store
            .entries()
            .iter()
            .map(|d| {
                json!({
                    "device": d.device, "structure": d.structure, "rows": d.rows, "winner": d.winner,
                    "times_ms": d.times_ms, "here": d.device == here,
                })
            })
            .collect();
        cx.out.document(
            json!({"file": file, "device": here, "decisions": rows, "warning": store.warning()}),
        );
        return Ok(0);
    }
    if store.entries().is_empty() {
        let file = file.unwrap_or_else(|| "no file".into());
        cx.out.line(&format!("nothing is recorded ({file})"));
        return Ok(0);
    }
    let row = |d: &Decision| {
        let times: Vec<String> = d
            .times_ms
            .iter()
            .map(|(name, ms)| format!("{name} {ms:.3}"))
            .collect();
        let here = if d.device == here { "yes" } else { "no" };
        [
            d.device.clone(),
            here.into(),
            d.structure.clone(),
            d.band(),
            d.winner.clone(),
            times.join(", "),
        ]
    };
    cx.out.table(
        ["device", "here", "structure", "rows", "winner", "ms"],
        store.entries().iter().map(row).collect(),
    );
    Ok(0)
}

fn import(file: &Path, cx: &Context<'_>) -> Result<u8, Failure> {
    let done = store(cx).import(file)?;
    if cx.out.json() {
        cx.out.document(json!({
            "imported": done.imported, "kept_local": done.kept_local,
            "repeated": done.repeated, "names": done.names,
        }));
    } else {
        cx.out.line(&format!(
            "{} imported, {} kept as they are here",
            done.imported, done.kept_local
        ));
        if done.repeated > 0 {
            cx.out.line(&format!(
                "{} stood in the file again; the last of each counts",
                done.repeated
            ));
        }
        done.names
            .iter()
            .for_each(|name| cx.out.line(&format!("  {name}")));
    }
    Ok(0)
}

fn by_hand(winner: &str, args: &RecordArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let [structure] = args.structures.as_slice() else {
        return Err(Failure::usage(
            format!("{} structures for one winner", args.structures.len()),
            "give --structures NAME once with --winner",
        ));
    };
    let host = cx.host()?;
    host.check_winner(structure, winner)?;
    let decision = Decision {
        device: cpu_name(),
        structure: structure.clone(),
        rows: args.rows,
        winner: winner.into(),
        times_ms: Default::default(),
    };
    store(cx).record(decision.clone())?;
    if cx.out.json() {
        cx.out.document(json!({ "recorded": [decision] }));
    } else {
        cx.out.line(&format!(
            "{structure} at {} rows: {winner}",
            decision.band()
        ));
    }
    Ok(0)
}

fn race(model: &str, args: &RecordArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let mut store = store(cx);
    if let Some(why) = store.warning() {
        return Err(Failure::failed(
            "decisions_invalid",
            why,
            "move the file away to start anew, or give another --decisions FILE",
        ));
    }
    let host = cx.host()?;
    let loaded = open_model(model)?;
    let samples = load_samples(&loaded, &args.samples)?;
    let options = Options {
        scheme: args.scheme.clone(),
        workload: args.workload.map(workload),
        percentile: args.samples.percentile,
        structures: args.structures.clone(),
        pins: pins(&args.pin)?,
        ..default_options()
    };
    let progress = Bars::new(cx.global.quiet);
    let races = adjudicate(&host, &loaded, &samples, &options, &progress)?;
    progress.finish();
    let mut recorded = Vec::new();
    for race in &races {
        // One candidate and nobody to beat decides nothing.
        let forms = race.standings.len() > 1;
        if let Some(decision) = race.decision().filter(|_| forms) {
            store.record(decision.clone())?;
            recorded.push(decision);
        }
    }
    if cx.out.json() {
        cx.out
            .document(json!({ "races": races, "recorded": recorded }));
    } else {
        races.iter().for_each(|race| print(race, cx));
    }
    Ok(if recorded.is_empty() { 3 } else { 0 })
}

fn print(race: &Adjudication, cx: &Context<'_>) {
    let winner = race.winner.as_deref().unwrap_or("nobody");
    cx.out.line(&format!(
        "{} at {} rows: {winner}",
        race.structure, race.rows
    ));
    let number = |v: Option<f64>, digits: usize| v.map_or("-".into(), |v| format!("{v:.digits$}"));
    cx.out.table(
        ["candidate", "precision rank", "cosine", "ms", "lost"],
        race.standings
            .iter()
            .map(|s| {
                [
                    s.candidate.clone(),
                    s.precision_rank.to_string(),
                    number(s.parity, 6),
                    number(s.time_ms, 3),
                    s.lost.clone().unwrap_or_default(),
                ]
            })
            .collect(),
    );
}
