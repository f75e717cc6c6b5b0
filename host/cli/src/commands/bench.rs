//! `bench`: tokens a second of the host and of what is attached, alternating. Nothing is gated.

use serde_json::json;
use structures::attach::auto_swaps;
use structures::bench::{run as measure, Contender, Measures, Row, Stand};
use structures::judge::summary;
use structures::progress::Progress;

use super::{
    attach::{adopt, default_options},
    load_samples, open_model, pins, served, Context,
};
use crate::args::{Arm, BenchArgs, SampleArgs};
use crate::failure::Failure;
use crate::progress::Bars;
use crate::say::say;

/// See the module.
pub fn run(args: &BenchArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let measures = Measures {
        prefill: args.prefill.iter().copied().filter(|n| *n > 0).collect(),
        decode: args.decode,
        rounds: args.rounds,
    };
    if measures.rounds == 0 || (measures.prefill.is_empty() && measures.decode == 0) {
        return Err(Failure::usage(
            "nothing to measure: no round, or neither phase",
            "give --rounds 1 or more, and --prefill or --decode above 0",
        ));
    }
    let model = open_model(&args.model)?;
    let progress = Bars::new(cx.global.quiet);
    let arm = |arm, plan: &_, captured| Contender {
        arm,
        plan: Clone::clone(plan),
        captured,
    };
    let mut contenders = Vec::new();
    if args.arm != Arm::Attached {
        contenders.push(arm("host", &model.session().host_plan(), false));
    }
    let (mut seats, mut not_bound) = (Vec::new(), Vec::new());
    if args.arm != Arm::Host {
        let host = cx.host()?;
        let mut options = default_options();
        options.scheme.clone_from(&args.scheme);
        options.pins = pins(&args.pin)?;
        options.adopt = adopt(args.adopt.as_deref())?;
        let given = SampleArgs {
            samples: None,
            percentile: options.percentile,
            max_samples: None,
        };
        let samples = load_samples(&model, &given)?;
        let swaps = auto_swaps(&host, &model, &samples, &options, &progress)?;
        contenders.push(arm("attached", &swaps.plan, !args.eager));
        if args.arm == Arm::All && !args.eager {
            contenders.push(arm("attached_eager", &swaps.plan, false));
        }
        not_bound = served::say_unbound(&swaps);
        seats = swaps.seats;
    }
    if args.paced {
        let Some(contender) = contenders.pop().filter(|_| contenders.is_empty()) else {
            return Err(Failure::usage(
                "--paced runs one arm",
                "give --arm host or --arm attached as well",
            ));
        };
        progress.finish();
        return paced(Stand::new(&model, contender), cx);
    }
    let phases = measures.prefill.len() + usize::from(measures.decode > 0);
    progress.stage("bench", phases * measures.rounds * contenders.len());
    let rows = measure(&model, &contenders, &measures, || progress.tick())?;
    progress.finish();
    let ledger = summary(&seats);
    let threads = structures_loader::pool::Pool::global().threads();
    if cx.out.json() {
        cx.out.document(json!({
            "model": model.name(), "scheme": args.scheme, "threads": threads, "rounds": measures.rounds,
            "rows": rows, "ledger": ledger, "not_bound": not_bound,
        }));
        return Ok(0);
    }
    for row in &rows {
        cx.out.line(&line(row));
    }
    say(&format!(
        "{threads} threads, {} rounds, {} seats",
        measures.rounds,
        seats.len()
    ));
    if args.arm != Arm::Host {
        say(&served::ledger_line(seats.len(), &ledger));
        // The seats' own words: a host that served in their place makes this another arm.
        if ledger.fallbacks > 0 || !ledger.self_detached.is_empty() {
            cx.out.line(&format!(
                "attached is not what was bound: {} of {} calls fell back to the host, {} of {} seats ended",
                ledger.fallbacks,
                ledger.calls,
                ledger.self_detached.len(),
                seats.len()
            ));
        }
    }
    Ok(0)
}

/// A run for each line of standard input, `prefill N` or `decode N`; its tokens a second on a line of its own.
fn paced(mut stand: Stand<'_>, cx: &Context<'_>) -> Result<u8, Failure> {
    cx.out.line("ready");
    for line in std::io::stdin().lines() {
        let line = line.map_err(|e| {
            Failure::failed("io", format!("standard input: {e}"), "give lines of text")
        })?;
        let asked = line.split_once(' ');
        let asked = asked.and_then(|(phase, n)| Some((phase, n.trim().parse::<usize>().ok()?)));
        let tps = match asked {
            Some(("prefill", n)) if n > 0 => stand.prefill(n)?,
            Some(("decode", n)) if n > 0 => stand.decode(n)?,
            _ => {
                return Err(Failure::usage(
                    format!("standard input: `{line}`, expected `prefill N` or `decode N`"),
                    "give a phase and a number of tokens a line",
                ))
            }
        };
        cx.out.line(&format!("{tps:.2}"));
    }
    Ok(0)
}

fn line(r: &Row) -> String {
    let ratio = r
        .speedup
        .map_or(String::new(), |s| format!(", {s:.2} of the host"));
    format!(
        "{} {}: {} ({}) {:.1} tokens/s, spread {:.0} %{ratio}; memory {:.1} and {:.1} GB/s",
        r.phase,
        r.tokens,
        r.arm,
        r.form,
        r.tps,
        r.spread * 100.0,
        r.memory_gbs[0],
        r.memory_gbs[1]
    )
}
