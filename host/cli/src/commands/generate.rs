//! `generate`: text through the host, a receipt's seats, or ungated swaps; in the captured form unless asked otherwise.

use std::ops::ControlFlow;

use serde_json::json;
use structures::attach::{auto_swaps, Options};
use structures::decode::DecodeLoop;
use structures::error::Error;
use structures::host::Loaded;
use structures::judge::summary;
use structures::release;
use structures::sampling::Choose;
use structures::seat::OnGuardFail;
use structures::stops::Stops;
use structures::workspace::Workspace;
use structures_graph::{GraphError, Plan};
use structures_models::generate::generate_until;
use structures_models::{ModelError, Stop};

use super::{attach::adopt, load_samples, open_model, open_model_later, pins, served, Context};
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
    if args.release_host && args.receipt.is_none() && args.scheme.is_none() && args.adopt.is_none()
    {
        return Err(Failure::usage(
            "--release-host without seats: the host needs all of its weights",
            "give --receipt, --scheme or --adopt as well",
        ));
    }
    let receipt = args
        .receipt
        .as_deref()
        .map(structures::replay::read)
        .transpose()?;
    let model = match receipt {
        Some(_) => open_model_later(&args.model)?,
        None => open_model(&args.model)?,
    };
    let wish = adopt(args.adopt.as_deref())?;
    // What is adopted needs no scheme, and nothing else is bound without one.
    let scheme = args.scheme.clone().or(wish.as_ref().map(|_| "none".into()));
    // What takes a while beside the model's tokenizer and digest; a failure is of no interest before theirs.
    let host = scheme.is_some() || receipt.is_some();
    let host = host.then(|| cx.host());
    let tokenizer = model.model.tokenizer()?;
    let prompt = tokenizer.encode(&args.prompt, true)?;
    let guard = if args.strict {
        OnGuardFail::Raise
    } else {
        OnGuardFail::Fallback
    };
    let progress = Bars::new(cx.global.quiet);
    let host = host.transpose()?;
    let (plan, seats) = match (host, &receipt, &scheme) {
        (Some(host), Some(receipt), _) => {
            structures::replay::replay(&host, &model, receipt, &prompt, guard)?
        }
        (Some(host), None, Some(scheme)) => {
            let options = Options {
                scheme: scheme.clone(),
                percentile: args.samples.percentile,
                on_guard_fail: guard,
                pins: pins(&args.pin)?,
                adopt: wish,
                release_host: args.release_host,
                ..Options::default()
            };
            let samples = load_samples(&model, &args.samples)?;
            say("warning: nothing is gated; `attach` judges, and `--receipt` replays its result");
            let swaps = auto_swaps(&host, &model, &samples, &options, &progress)?;
            served::say_unbound(&swaps);
            if let Some(adopted) = &swaps.adopted {
                say(&adopted.summary());
            }
            (swaps.plan, swaps.seats)
        }
        (None, ..) | (Some(_), None, None) => (model.session().host_plan(), Vec::new()),
    };
    progress.finish();
    if args.release_host {
        say(&release::consume(&model, &plan)?.summary());
    }
    let form = form(args, &model, &plan, prompt.len())?;
    let mut stream = tokenizer.stream();
    let mut stops = Stops::new(&args.stop);
    let mut text = String::new();
    let mut broken = None;
    let mut begun = false;
    let mut show = |piece: &str| {
        if !cx.out.json() {
            // Not before the model has answered: a refusal stands alone.
            if !std::mem::replace(&mut begun, true) {
                cx.out.raw(&args.prompt);
            }
            cx.out.raw(piece);
        }
        text.push_str(piece);
    };
    let mut on_token = |token| match stream.push(token) {
        Ok(piece) => {
            let (shown, done) = stops.push(&piece);
            show(&shown);
            match done {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        }
        Err(e) => {
            broken = Some(e);
            ControlFlow::Break(())
        }
    };
    let max_new = args.max_new_tokens;
    let mut workspace = Workspace::global().report();
    let (done, form) = match form {
        Form::Captured(mut decode) => {
            let done = decode.generate(&prompt, max_new, choose(args), &mut on_token)?;
            workspace = Workspace::global().report();
            (done, "captured")
        }
        Form::Eager => (
            generate_until(&model.model, &plan, &prompt, max_new, &mut on_token)?,
            "eager",
        ),
    };
    if let Some(e) = broken {
        return Err(e.into());
    }
    if done.stop != Stop::Asked {
        let (shown, _) = stops.push(&stream.finish()?);
        show(&shown);
        show(&stops.finish());
    }
    let ledger = summary(&seats);
    // As it is now: what fell back is there again.
    let released = match args.release_host {
        true => Some(release::note(&model, &plan)),
        false => None,
    };
    if cx.out.json() {
        let mut document = json!({
            "text": text, "tokens": done.tokens, "prompt_tokens": done.prompt,
            "prefill_tps": done.prefill_tps(), "decode_tps": done.decode_tps(), "ledger": ledger,
            "form": form, "stop": stop_name(done.stop), "workspace": workspace,
        });
        if let Some(released) = released {
            document["released"] = json!(released);
        }
        cx.out.document(document);
        return Ok(0);
    }
    if let Some(note) = released.filter(|n| !n.restored.is_empty()) {
        say(&note.summary());
    }
    cx.out.line("");
    say(&format!(
        "prefill {:.1} tokens/s ({} tokens), decode {:.1} tokens/s ({} tokens, {form})",
        done.prefill_tps(),
        done.prompt,
        done.decode_tps(),
        done.tokens.len()
    ));
    say(&served::ledger_line(seats.len(), &ledger));
    Ok(0)
}

/// How the tokens are made.
enum Form<'m> {
    Captured(Box<DecodeLoop<'m>>),
    Eager,
}

/// The captured form, or the eager one where that is asked for or where the model has no other.
fn form<'m>(
    args: &GenerateArgs,
    model: &'m Loaded,
    plan: &Plan,
    prompt: usize,
) -> Result<Form<'m>, Failure> {
    let sampled = args.temperature > 0.0;
    let usable = args.temperature >= 0.0 && args.temperature.is_finite();
    let share = args.top_p > 0.0 && args.top_p <= 1.0;
    if !(usable && share) {
        return Err(Failure::usage(
            format!("--temperature {} --top-p {}", args.temperature, args.top_p),
            "a temperature is 0 or more, top-p is above 0 and at most 1",
        ));
    }
    if args.eager {
        return match sampled {
            false => Ok(Form::Eager),
            true => Err(Failure::usage(
                "--eager with --temperature: the eager form is greedy",
                "leave one of them out",
            )),
        };
    }
    let room = prompt.saturating_add(args.max_new_tokens);
    let max = model.model.config().max_positions;
    if room > max {
        let new = args.max_new_tokens;
        return Err(Error::from(ModelError::ContextFull { prompt, new, max }).into());
    }
    match DecodeLoop::new(model, plan.clone(), room) {
        Ok(decode) => Ok(Form::Captured(Box::new(decode))),
        Err(Error::Graph(GraphError::Capture { at, code, reason })) if !sampled => {
            say(&format!(
                "not captured ({code} at {at}: {reason}); running eagerly"
            ));
            Ok(Form::Eager)
        }
        Err(e) => Err(e.into()),
    }
}

fn choose(args: &GenerateArgs) -> Choose {
    match args.temperature > 0.0 {
        false => Choose::Greedy,
        true => Choose::Sample {
            temperature: args.temperature,
            top_p: args.top_p,
            seed: args.seed,
        },
    }
}

fn stop_name(stop: Stop) -> &'static str {
    match stop {
        Stop::EndOfText(_) => "end_of_text",
        Stop::Length => "length",
        Stop::Asked => "stop",
    }
}
