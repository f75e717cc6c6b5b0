//! `generate`: greedy text through the host, a receipt's seats, or ungated swaps.

use std::collections::BTreeMap;

use serde_json::json;
use structures::attach::{auto_swaps, Options, Swaps};
use structures::judge::summary;
use structures::ledger::LedgerSummary;
use structures::receipt::RefusalNote;
use structures::seat::OnGuardFail;
use structures_models::generate;

use super::{attach::adopt, load_samples, open_model, pins, Context};
use crate::args::{GenerateArgs, SampleArgs};
use crate::failure::Failure;
use crate::progress::Bars;
use crate::say::say;

/// See the module.
pub fn run(args: &GenerateArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    if args.prompt.is_empty() {
        return Err(Failure::usage(
            "the prompt is empty: expected at least one character",
            "give --prompt TEXT",
        ));
    }
    if args.scheme.is_none() && args.adopt.is_none() && args.samples != SampleArgs::default() {
        return Err(Failure::usage(
            "samples without --scheme: nothing is measured",
            "give --scheme as well, or leave --samples, --percentile and --max-samples out",
        ));
    }
    let receipt = args
        .receipt
        .as_deref()
        .map(structures::replay::read)
        .transpose()?;
    let model = open_model(&args.model)?;
    let tokenizer = model.model.tokenizer()?;
    let prompt = tokenizer.encode(&args.prompt, true)?;
    let guard = if args.strict {
        OnGuardFail::Raise
    } else {
        OnGuardFail::Fallback
    };
    let progress = Bars::new(cx.global.quiet);
    let wish = adopt(args.adopt.as_deref())?;
    // What is adopted needs no scheme, and nothing else is bound without one.
    let scheme = args.scheme.clone().or(wish.as_ref().map(|_| "none".into()));
    let (plan, seats) = match (&receipt, &scheme) {
        (Some(receipt), _) => {
            let host = cx.host()?;
            structures::replay::replay(&host, &model, receipt, &prompt, guard)?
        }
        (None, Some(scheme)) => {
            let host = cx.host()?;
            let options = Options {
                scheme: scheme.clone(),
                percentile: args.samples.percentile,
                on_guard_fail: guard,
                pins: pins(&args.pin)?,
                adopt: wish,
                ..Options::default()
            };
            let samples = load_samples(&model, &args.samples)?;
            say("warning: nothing is gated; `attach` judges, and `--receipt` replays its result");
            let swaps = auto_swaps(&host, &model, &samples, &options, &progress)?;
            unbound(&swaps);
            if let Some(adopted) = &swaps.adopted {
                say(&adopted.summary());
            }
            (swaps.plan, swaps.seats)
        }
        (None, None) => (model.session().host_plan(), Vec::new()),
    };
    progress.finish();
    let mut stream = tokenizer.stream();
    let mut text = String::new();
    let mut broken = None;
    let mut begun = false;
    let done = generate(
        &model.model,
        &plan,
        &prompt,
        args.max_new_tokens,
        &mut |token| match stream.push(token) {
            Ok(piece) => {
                if !cx.out.json() {
                    // Not before the model has answered: a refusal stands alone.
                    if !std::mem::replace(&mut begun, true) {
                        cx.out.raw(&args.prompt);
                    }
                    cx.out.raw(&piece);
                }
                text.push_str(&piece);
            }
            Err(e) => broken = Some(e),
        },
    )?;
    if let Some(e) = broken {
        return Err(e.into());
    }
    let rest = stream.finish()?;
    text.push_str(&rest);
    let ledger = summary(&seats);
    if cx.out.json() {
        cx.out.document(json!({
            "text": text, "tokens": done.tokens, "prompt_tokens": done.prompt,
            "prefill_tps": done.prefill_tps(), "decode_tps": done.decode_tps(), "ledger": ledger,
        }));
        return Ok(0);
    }
    cx.out.line(&rest);
    say(&format!(
        "prefill {:.1} tokens/s ({} tokens), decode {:.1} tokens/s ({} tokens)",
        done.prefill_tps(),
        done.prompt,
        done.decode_tps(),
        done.tokens.len()
    ));
    say(&ledger_line(seats.len(), &ledger));
    Ok(0)
}

/// What was not bound, by code: how often, and one reason of each.
fn unbound(swaps: &Swaps) {
    let mut codes: BTreeMap<&str, (usize, &RefusalNote)> = BTreeMap::new();
    for r in swaps.refused.iter().chain(&swaps.kept) {
        tracing::info!(path = %r.path, code = %r.code, "{}", r.reason);
        codes.entry(&r.code).or_insert((0, r)).0 += 1;
    }
    if swaps.seats.is_empty() {
        say("warning: nothing is bound; the host runs everything");
    }
    for (code, (n, r)) in codes {
        say(&format!(
            "not bound: {n} x {code}, such as {} `{}`: {}",
            r.structure, r.path, r.reason
        ));
    }
}

fn ledger_line(seats: usize, l: &LedgerSummary) -> String {
    if seats == 0 {
        return "ledger: no seats, the host ran everything".into();
    }
    let mut text = format!(
        "ledger: {seats} seats, {} calls served, {} dispatched by band, {} fell back",
        l.form_calls, l.band_dispatches, l.fallbacks
    );
    if let Some(reason) = &l.last_reason {
        text.push_str(&format!("; last reason: {reason}"));
    }
    text
}
