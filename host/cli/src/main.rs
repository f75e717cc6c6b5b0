//! The `structures` command line: thin commands over the library. The contract is `docs/cli.md`.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod args;
mod commands;
mod failure;
mod out;
mod progress;
mod say;
mod scaffold;
mod writable;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Color, Command, Global};
use crate::commands::Context;
use crate::failure::Failure;
use crate::out::Out;

fn main() -> ExitCode {
    structures_loader::process_defaults();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return usage(&e),
    };
    if let Command::ScanPlugin { path } = &cli.command {
        return ExitCode::from(u8::try_from(structures_loader::scan_main(path)).unwrap_or(1));
    }
    if let Command::ConformCheck { task } = &cli.command {
        let code = structures_conform::check_main(task);
        return ExitCode::from(u8::try_from(code).unwrap_or(1));
    }
    logs(&cli.global);
    let out = match Out::new(cli.global.json) {
        Ok(out) => out,
        Err(e) => {
            say::say(&format!("stdout cannot be used: {e}"));
            return ExitCode::FAILURE;
        }
    };
    let set = affinity(cli.global.affinity.as_deref()).and_then(|()| threads(cli.global.threads));
    let done = set.and_then(|()| {
        commands::run(
            cli.command,
            &Context {
                out: &out,
                global: &cli.global,
            },
        )
    });
    let exit = match done {
        Ok(code) => ExitCode::from(code),
        Err(failure) => report(&out, failure),
    };
    if let Some(e) = out.failure() {
        say::say(&format!("stdout: the output could not be written: {e}"));
        return ExitCode::FAILURE;
    }
    exit
}

fn report(out: &Out, failure: Failure) -> ExitCode {
    let exit = failure.exit;
    if out.json() {
        out.document(failure.document());
    } else {
        let failure = failure.printable();
        say::put(&format!("{:?}", miette::Report::new(failure)));
    }
    ExitCode::from(exit)
}

/// clap's own message; with `--json` on the line, the same as a document.
fn usage(e: &clap::Error) -> ExitCode {
    if e.use_stderr() && std::env::args_os().any(|a| a == "--json") {
        // No plugin was opened, so stdout is still nobody else's. A reader that went away is not an error of ours.
        let _ = writeln!(std::io::stdout(), "{:#}", Failure::of_clap(e).document());
    } else {
        let _ = e.print();
    }
    ExitCode::from(if e.use_stderr() { 2 } else { 0 })
}

fn logs(global: &Global) {
    let level = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (_, 0) => "warn",
        (_, 1) => "info",
        (_, 2) => "debug",
        _ => "trace",
    };
    let filter =
        EnvFilter::try_from_env("STRUCTURES_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let ansi = match global.color {
        Color::Always => true,
        Color::Never => false,
        Color::Auto => std::io::stderr().is_terminal(),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || say::Log { colors: ansi })
        .with_ansi(ansi)
        .without_time()
        .init();
    // Set once, before anything is printed; a second hook cannot exist yet.
    let _ = miette::set_hook(Box::new(move |_| {
        let theme = if ansi {
            miette::GraphicalTheme::unicode()
        } else {
            miette::GraphicalTheme::unicode_nocolor()
        };
        Box::new(
            miette::MietteHandlerOpts::new()
                .graphical_theme(theme)
                .build(),
        )
    }));
}

/// CPUs of a list such as `0,2-3`.
fn cpus(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<usize>().ok();
        let (from, to) = (number(from)?, number(to)?);
        if from > to || to >= MOST_THREADS {
            return None;
        }
        cpus.extend(from..=to);
    }
    Some(cpus)
}

/// Keeps the process on the CPUs that were named. Before any thread is started: those inherit it.
fn affinity(list: Option<&str>) -> Result<(), Failure> {
    let Some(list) = list else { return Ok(()) };
    let wrong = |why: String| {
        let help = "give CPUs this process may use, such as 0,2-3, or leave it out";
        Err(Failure::usage(format!("--affinity {list}: {why}"), help))
    };
    match cpus(list).map(|cpus| structures_loader::run_on(&cpus)) {
        None => wrong("expected numbers and ranges of them".into()),
        Some(Err(e)) => wrong(e.to_string()),
        Some(Ok(())) => Ok(()),
    }
}

/// More threads than any machine this runs on has cores.
const MOST_THREADS: usize = 1024;

/// One number of threads for the host's pool and for candle.
fn threads(asked: Option<usize>) -> Result<(), Failure> {
    if let Some(n) = asked.filter(|n| !(1..=MOST_THREADS).contains(n)) {
        return Err(Failure::usage(
            format!("--threads {n}: expected 1 to {MOST_THREADS}"),
            "leave it out for the cores this process may use",
        ));
    }
    let n = asked
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1);
    structures::host::set_threads(n)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::cpus;

    #[test]
    fn lists_of_cpus_are_numbers_and_ranges() {
        assert_eq!(cpus("0,2-4"), Some(vec![0, 2, 3, 4]));
        assert_eq!(cpus("7"), Some(vec![7]));
        for wrong in ["", "a", "3-1", "1,", "0-99999"] {
            assert_eq!(cpus(wrong), None, "{wrong}");
        }
    }
}
