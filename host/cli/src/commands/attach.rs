//! `attach`: the gated door. Prints the table, writes the receipt.

use std::path::PathBuf;

use structures::adopt::Wish;
use structures::attach::{attach, Options};
use structures::gates::{Floors, Schedule, DEFAULT_ROUNDS};
use structures::receipt::{Receipt, UnitNote};
use structures::seat::OnGuardFail;
use structures::workload::Workload;

use super::{load_samples, open_model, pins, Context};
use crate::args::{AttachArgs, GuardArg, WorkloadArg};
use crate::failure::Failure;
use crate::progress::Bars;
use crate::writable;

/// Exit 0 with an active unit, with something adopted or with scheme `none`, else 3; the receipt is printed and written in both cases.
pub fn run(args: &AttachArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let options = options(args)?;
    let dir = receipt_dir(args.receipt_dir.clone())?;
    writable::directory("--receipt-dir", &dir)?;
    let rounds = options.schedule.rounds();
    if rounds < DEFAULT_ROUNDS {
        tracing::warn!(
            "--rounds {rounds}: every verdict on speed rests on fewer than {DEFAULT_ROUNDS} rounds"
        );
    }
    let mut host = cx.host()?;
    host.eager = args.eager;
    let model = open_model(&args.model)?;
    let samples = load_samples(&model, &args.samples)?;
    let progress = Bars::new(cx.global.quiet);
    let done = attach(&host, &model, &samples, &options, &progress)?;
    progress.finish();
    let receipt = &done.receipt;
    let prefix: String = receipt.digest.chars().take(16).collect();
    let path = dir.join(format!("{}-{prefix}.json", receipt.model));
    let json = serde_json::to_value(receipt).map_err(|e| {
        let help = "this is a fault of the program: report it with the message";
        Failure::failed("record_invalid", e.to_string(), help)
    })?;
    let text = format!("{json:#}\n");
    // What was judged is worth more than the file: it is told before anything can go wrong with that.
    if !cx.out.json() {
        table(receipt, cx);
    }
    if let Err(e) = structures::fsio::write_atomic_in_new_dirs(&path, text.as_bytes()) {
        let mut failure = Failure::from(e);
        failure.more.insert("receipt".into(), json);
        return Err(failure);
    }
    if cx.out.json() {
        cx.out.document(json);
    } else {
        if host.registry.loaded().is_empty() {
            let dirs: Vec<String> = host
                .registry
                .searched
                .iter()
                .map(|d| super::show_path(&d.path))
                .collect();
            cx.out.line(&format!(
                "no plugin is loaded, so nothing can be attached; searched {}; `structures plugins list` shows \
                 every candidate, --plugins DIR adds a directory",
                dirs.join(", ")
            ));
        }
        cx.out.line(&format!("receipt: {}", path.display()));
    }
    // Under `none` nothing was asked for but what `--adopt` asks for.
    let adopted = receipt.adopted.as_ref().map(|a| a.refused.is_none());
    let active = !receipt.seams_active.is_empty() || adopted == Some(true);
    let asked = receipt.scheme.name != "none" || adopted.is_some();
    Ok(if active || !asked { 0 } else { 3 })
}

/// Options nobody changed.
pub fn default_options() -> Options {
    Options::default()
}

fn options(args: &AttachArgs) -> Result<Options, Failure> {
    if !args.min_speedup.is_finite() || args.min_speedup < 0.0 {
        return Err(Failure::usage(
            format!("--min-speedup {}", args.min_speedup),
            "give a ratio such as 1.02; 0 accepts any speed",
        ));
    }
    if args.strict && args.on_guard_fail == Some(GuardArg::Fallback) {
        return Err(Failure::usage(
            "--strict with --on-guard-fail fallback: one makes the first fallback an error, the other lets it be",
            "give one of them",
        ));
    }
    Ok(Options {
        scheme: args.scheme.clone(),
        workload: args.workload.map(workload),
        percentile: args.samples.percentile,
        structures: args.structures.clone(),
        floors: Floors::parse(args.floor.iter().map(String::as_str))?,
        min_speedup: args.min_speedup,
        schedule: Schedule::new(args.rounds, args.iters)?,
        on_guard_fail: match (args.strict, args.on_guard_fail) {
            (true, _) | (_, Some(GuardArg::Raise)) => OnGuardFail::Raise,
            (false, Some(GuardArg::Fallback) | None) => OnGuardFail::Fallback,
        },
        pins: pins(&args.pin)?,
        all_positions: args.all_positions,
        adopt: adopt(args.adopt.as_deref())?,
        release_host: args.release_host,
    })
}

/// Formats to take over, where the switch was given.
pub fn adopt(names: Option<&[String]>) -> Result<Option<Wish>, Failure> {
    Ok(names.map(Wish::parse).transpose()?)
}

/// The switch as the library names it.
pub fn workload(w: WorkloadArg) -> Workload {
    match w {
        WorkloadArg::Decode => Workload::Decode,
        WorkloadArg::Prefill => Workload::Prefill,
    }
}

/// The user's data directory unless another one was given.
fn receipt_dir(given: Option<PathBuf>) -> Result<PathBuf, Failure> {
    if let Some(dir) = given {
        return Ok(dir);
    }
    let data = super::data_dir().ok_or_else(|| {
        Failure::failed(
            "io",
            "no place for the receipt: neither XDG_DATA_HOME nor HOME is set",
            "give --receipt-dir DIR",
        )
    })?;
    Ok(data.join("receipts"))
}

/// The table of units.
pub fn table(receipt: &Receipt, cx: &Context<'_>) {
    let c = &receipt.calibration;
    let auto = receipt
        .scheme
        .why
        .as_ref()
        .map_or(String::new(), |w| format!(" (auto: {w})"));
    cx.out.line(&format!(
        "{}: scheme {}{auto}, workload {}, {} samples fitted, {} judged ({})",
        receipt.model,
        receipt.scheme.name,
        receipt.workload,
        c.note.samples,
        if c.fit_residual {
            c.note.samples
        } else {
            c.note.held_out
        },
        c.note.source
    ));
    if let Some(adopted) = &receipt.adopted {
        cx.out.line(&adopted.summary());
    }
    let rows: Vec<&UnitNote> = receipt.units.iter().chain(&receipt.union).collect();
    if rows.is_empty() {
        cx.out.line("no unit: nothing could be bound");
    } else {
        cx.out.table(
            [
                "unit", "form", "plugin", "seams", "outcome", "band", "parity", "ledger",
                "latency", "why",
            ],
            rows.iter().map(|u| row(u)).collect(),
        );
    }
    let control = &receipt.control;
    cx.out.line(&format!(
        "host control: repeat {}, after detaching {}",
        same(control.repeat_identical),
        same(control.detach_identical)
    ));
    cx.out.line(&format!(
        "active: {} seats, {:.1} MB packed; kept on the host: {}; refused: {} seams, {} units",
        receipt.seams_active.len(),
        receipt.memory.packed_bytes as f64 / 1e6,
        receipt.kept_host.len(),
        receipt.refused.len(),
        receipt
            .units
            .iter()
            .filter(|u| u.outcome == "refused")
            .count()
    ));
    if let Some(released) = &receipt.memory.released {
        cx.out.line(&released.summary());
    }
}

fn row(u: &UnitNote) -> [String; 10] {
    let parity = u
        .band_note
        .as_ref()
        .map(|n| {
            let value = n["value"]
                .as_f64()
                .map_or("nan".into(), |v| format!("{v:.4}"));
            format!("{} {value}", n["metric"].as_str().unwrap_or(""))
        })
        .unwrap_or_default();
    let l = &u.ledger;
    let ledger = if l.calls == 0 {
        String::new()
    } else {
        let clean = if l.clean { "clean" } else { "NOT clean" };
        format!(
            "{clean}: {} ran, {} dispatched, {} fell back",
            l.form_calls, l.band_dispatches, l.fallbacks
        )
    };
    let latency = u.latency.as_ref().map_or(String::new(), |t| {
        format!(
            "{:.2}x ({:.2} -> {:.2} ms, spread {:.2})",
            t.speedup, t.host_ms, t.treated_ms, t.spread
        )
    });
    let why = match (&u.code, &u.reason) {
        (Some(c), Some(r)) => format!("{c}: {r}"),
        _ => String::new(),
    };
    [
        u.name.clone(),
        u.form.clone(),
        match u.device {
            Some(device) => format!("{}@{device}", u.plugin),
            None => u.plugin.clone(),
        },
        u.seams.to_string(),
        u.outcome.clone(),
        u.band.clone(),
        parity,
        ledger,
        latency,
        why,
    ]
}

fn same(identical: bool) -> &'static str {
    if identical {
        "bit-identical"
    } else {
        "DIFFERENT"
    }
}
