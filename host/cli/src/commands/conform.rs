//! `conform`: the validator for plugin authors.

use std::time::{Duration, Instant};

use serde_json::json;
use structures_conform::{conform, ConformError, Options, Outcome, Report, Row};

use super::Context;
use crate::args::ConformArgs;
use crate::failure::Failure;
use crate::progress::Bars;
use structures::progress::Progress;

/// Exit 3 when a check failed.
pub fn run(args: &ConformArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let options = options(args, cx)?;
    let began = Instant::now();
    let bars = Bars::new(cx.global.quiet);
    let mut last: Option<Option<String>> = None;
    let report = conform(&options, &mut |row| {
        if last.as_ref() != Some(&row.form) {
            bars.stage(row.form.as_deref().unwrap_or("the library"), 0);
            last = Some(row.form.clone());
        }
        bars.tick();
    });
    drop(bars);
    let report = report?;
    let failed = report.count(Outcome::Fail);
    if cx.out.json() {
        let mut document = serde_json::to_value(&report).map_err(ConformError::from)?;
        document["summary"] = json!({
            "passed": report.count(Outcome::Pass),
            "failed": failed,
            "skipped": report.count(Outcome::Skip),
        });
        cx.out.document(document);
    } else {
        show(&report, began.elapsed(), cx);
    }
    Ok(if failed > 0 { 3 } else { 0 })
}

fn options(args: &ConformArgs, cx: &Context<'_>) -> Result<Options, Failure> {
    let mut forms = Vec::new();
    for text in &args.forms {
        let (structure, form) = match text.split_once('/') {
            Some((structure, form)) => (structure, Some(form)),
            None => (text.as_str(), None),
        };
        if structure.is_empty() || form.is_some_and(str::is_empty) {
            return Err(Failure::usage(
                format!("--forms `{text}`: expected STRUCTURE or STRUCTURE/FORM"),
                "`structures plugins show` lists the forms of a plugin",
            ));
        }
        forms.push((structure.to_string(), form.map(str::to_string)));
    }
    let replay = match &args.replay {
        None => None,
        Some(text) => {
            let parsed = text
                .split_once(':')
                .and_then(|(check, seed)| Some((check.to_string(), seed.parse().ok()?)));
            Some(parsed.ok_or_else(|| {
                Failure::usage(
                    format!("--replay `{text}`: expected CHECK:SEED"),
                    "take the replay line of a failed check as it is",
                )
            })?)
        }
    };
    let absolute = |path: &std::path::PathBuf| std::path::absolute(path).unwrap_or(path.clone());
    let program = std::env::current_exe().map_err(|e| {
        Failure::failed(
            "conform_child",
            format!("the path of this program is not known: {e}"),
            "every check runs in a child of this program: start it by its path",
        )
    })?;
    Ok(Options {
        plugin: args.plugin.clone(),
        forms,
        seed: args.seed,
        cases: args.cases,
        timeout: Duration::from_secs(args.timeout),
        replay,
        program,
        catalog: cx.global.catalog.iter().map(absolute).collect(),
        threads: cx.global.threads,
    })
}

fn show(report: &Report, took: Duration, cx: &Context<'_>) {
    let id = report.plugin.as_deref().unwrap_or("(unknown)");
    let version = report.version.as_deref().unwrap_or("");
    cx.out
        .line(&format!("plugin {id} {version}  {}", report.path.display()));
    let widest = report.checks.iter().map(|r| r.name.len()).max();
    let widest = widest.unwrap_or(0);
    let mut form: Option<&str> = None;
    for row in &report.checks {
        if row.form.as_deref() != form {
            form = row.form.as_deref();
            cx.out.line("");
            cx.out.line(&format!("form {}", form.unwrap_or_default()));
        }
        line(row, widest, cx);
    }
    let forms: std::collections::BTreeSet<_> = report
        .checks
        .iter()
        .filter_map(|r| r.form.as_ref())
        .collect();
    cx.out.line("");
    cx.out.line(&format!(
        "{} forms, {} checks: {} passed, {} failed, {} skipped; {:.1} s, seed {}",
        forms.len(),
        report.checks.len(),
        report.count(Outcome::Pass),
        report.count(Outcome::Fail),
        report.count(Outcome::Skip),
        took.as_secs_f64(),
        report.seed
    ));
}

fn line(row: &Row, widest: usize, cx: &Context<'_>) {
    let outcome = match row.outcome {
        Outcome::Pass => "pass",
        Outcome::Fail => "FAIL",
        Outcome::Skip => "skip",
    };
    let code = row
        .code
        .as_ref()
        .map_or(String::new(), |c| format!("{c}: "));
    let reason = row.reason.as_deref().unwrap_or_default();
    let name = &row.name;
    let text = format!("  {outcome}  {name:widest$}  {code}{reason}");
    cx.out.line(text.trim_end());
    if let Some(replay) = &row.replay {
        cx.out.line(&format!("        {:widest$}  {replay}", ""));
    }
}

impl From<ConformError> for Failure {
    fn from(e: ConformError) -> Self {
        let help = match &e {
            ConformError::File { .. } => "give the path of a built plugin library",
            ConformError::Place { .. } => {
                "set STRUCTURES_CACHE_DIR to a directory of yours with free space, where programs may run"
            }
            ConformError::FormUnknown { .. } => "leave --forms out for all of them",
            ConformError::CheckUnknown { .. } | ConformError::SeedUnknown { .. } => "take the replay line of a failed check as it is",
            _ => "the program starts itself once for every check; see the message",
        };
        match e.code() {
            "usage" => Failure::usage(e.to_string(), help),
            code => Failure::failed(code, e.to_string(), help),
        }
    }
}
