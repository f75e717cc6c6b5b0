//! `perplexity`: what a scheme costs in quality on text, beside the host's own.

use serde_json::json;
use structures::attach::auto_swaps;
use structures::judge::summary;
use structures::perplexity::measure;
use structures::progress::Progress;
use structures::workload::{Runner, Workload};

use super::{
    attach::{adopt, default_options, workload},
    load_samples, open_model, pins, Context,
};
use crate::args::PerplexityArgs;
use crate::failure::Failure;
use crate::progress::Bars;
use crate::say::say;

/// See the module.
pub fn run(args: &PerplexityArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let model = open_model(&args.model)?;
    let samples = load_samples(&model, &args.samples)?;
    model.check_room(&samples)?;
    let progress = Bars::new(cx.global.quiet);
    let wish = adopt(args.adopt.as_deref())?;
    // What is adopted needs no scheme, and nothing else is bound without one.
    let scheme = args.scheme.clone().or(wish.as_ref().map(|_| "none".into()));
    let swaps = match &scheme {
        None => None,
        Some(scheme) => {
            let host = cx.host()?;
            let mut options = default_options();
            options.scheme.clone_from(scheme);
            options.percentile = args.samples.percentile;
            options.pins = pins(&args.pin)?;
            options.adopt = wish;
            Some(auto_swaps(&host, &model, &samples, &options, &progress)?)
        }
    };
    let phase = args.workload.map_or(Workload::Prefill, workload);
    // A scheme's scales are fitted on the first samples: only the others are held-out text.
    let fitted = swaps.as_ref().is_some_and(|s| s.fitted);
    let judged: Vec<Vec<u32>> = match fitted {
        true => samples.judged().map(<[u32]>::to_vec).collect(),
        false => samples.all().map(<[u32]>::to_vec).collect(),
    };
    let longest = judged.iter().map(Vec::len).max().unwrap_or(0);
    let runner = Runner::new(model.session(), longest);
    progress.stage("perplexity", judged.len());
    let host_plan = model.session().host_plan();
    let plan = swaps.as_ref().map(|s| &s.plan);
    let found = measure(&runner, &host_plan, plan, &judged, phase, || {
        progress.tick()
    })?;
    progress.finish();
    let ledger = swaps.as_ref().map(|s| summary(&s.seats));
    if cx.out.json() {
        cx.out.document(json!({
            "schema": 1, "model": model.name(), "scheme": scheme, "workload": phase.name(),
            "source": samples.source(), "samples": judged.len(), "held_out": fitted,
            "tokens": found.tokens, "perplexity": found.perplexity,
            "host_perplexity": found.host, "top1_agreement": found.top1_agreement,
            "ledger": ledger,
        }));
        return Ok(0);
    }
    cx.out.line(&format!(
        "perplexity {:.4} over {} tokens of {} samples ({}); the host's own {:.4}, {:+.2} %; top-1 agreement {:.4}",
        found.perplexity,
        found.tokens,
        judged.len(),
        samples.source(),
        found.host,
        100.0 * (found.perplexity / found.host - 1.0),
        found.top1_agreement
    ));
    if let Some(ledger) = ledger.filter(|l| l.form_calls == 0) {
        say(&format!(
            "warning: no form served a call ({} calls of seats), so this is the host measured twice",
            ledger.calls
        ));
    }
    Ok(0)
}
