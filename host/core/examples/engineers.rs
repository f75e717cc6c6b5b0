//! From a path to a receipt, and back from the receipt: what docs/engineers.md shows.

use std::path::{Path, PathBuf};

use structures::attach::{attach, auto_swaps, Options};
use structures::gates::Floors;
use structures::host::{set_threads, Host, HostOptions, Loaded};
use structures::progress::Silent;
use structures::samples::{self, SampleOptions};
use structures::seat::OnGuardFail;
use structures::{fsio, Error};
use structures_models::generate;

fn main() -> Result<(), Error> {
    set_threads(2)?; // once, before anything runs
    let host = Host::open(&HostOptions {
        plugins: vec![PathBuf::from("/opt/structures/plugins")],
        ..HostOptions::default()
    })?;
    let model = Loaded::open(Path::new("demo/model"))?;
    let tokenizer = model.model.tokenizer()?;

    let tokenize = |text: &str| tokenizer.encode(text, true).map_err(|e| e.to_string());
    let samples = samples::load(None, &tokenize, &SampleOptions::default())?; // None: the built-in text

    let options = Options {
        scheme: "w8a16_decode".into(),
        floors: Floors::parse(["top1_agreement=0.9"])?,
        // adopt: Some(structures::adopt::Wish::everything()) takes packed weights over first; no detach then
        ..Options::default()
    };
    let attached = attach(&host, &model, &samples, &options, &Silent)?;
    for unit in &attached.receipt.units {
        println!("{} {}: {}", unit.name, unit.plugin, unit.outcome);
    }

    let prompt = tokenizer.encode("And God said", true)?;
    let done = generate(&model.model, &attached.plan, &prompt, 24, &mut |_| {})?;
    println!("{}", tokenizer.decode(&done.tokens)?);
    for seat in attached.adopted.iter().chain(&attached.seats) {
        println!("{} {:?}", seat.key, seat.ledger.counts());
    }

    // The model was never changed: the host's plan beside the other one, then nothing but it.
    let host_plan = model.session().host_plan();
    let plain = generate(&model.model, &host_plan, &prompt, 24, &mut |_| {})?;
    println!("{}", tokenizer.decode(&plain.tokens)?);
    let receipt = attached.detach().map_err(|kept| kept.error)?;

    let text = serde_json::to_string_pretty(&receipt).expect("a receipt is JSON");
    fsio::write_atomic(Path::new("receipt.json"), text.as_bytes())?;
    let receipt = structures::replay::read(Path::new("receipt.json"))?;
    let (plan, seats) =
        structures::replay::replay(&host, &model, &receipt, &prompt, OnGuardFail::Fallback)?;
    println!(
        "{} seats, host runs everything: {}",
        seats.len(),
        plan.is_host()
    );

    // Without a gate: what is not bound, and what stays with the host, comes with its reason.
    let swaps = auto_swaps(&host, &model, &samples, &options, &Silent)?;
    for note in swaps.refused.iter().chain(&swaps.kept) {
        println!("{} {}: {}", note.path, note.code, note.reason);
    }
    Ok(())
}
