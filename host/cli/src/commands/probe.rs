//! `probe`: declared, probed and launched.

use std::collections::BTreeMap;

use serde_json::json;
use structures::probe::{probe, ProbeOptions};

use super::Context;
use crate::args::ProbeArgs;
use crate::failure::Failure;

/// Exit 3 when nothing that was asked for could be launched.
pub fn run(args: &ProbeArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let host = cx.host()?;
    let options = ProbeOptions {
        plugin: args.plugin.clone(),
        structure: args.structure.clone(),
        form: args.form.clone(),
        device: args.device,
        rows: args.rows.clone(),
        dims: sizes(&args.dims)?,
    };
    if args.rows.contains(&0) {
        return Err(Failure::usage("--rows 0", "give row counts of at least 1"));
    }
    let rows = probe(&host, &options)?;
    let code = if rows.iter().any(|r| r.outcome == "ok") {
        0
    } else {
        3
    };
    if cx.out.json() {
        cx.out.document(json!({ "probes": rows }));
        return Ok(code);
    }
    if rows.is_empty() {
        cx.out
            .line("no loaded plugin declares such a form; `structures plugins list` shows them");
        return Ok(code);
    }
    let yes = |b: bool| {
        if b {
            "yes".to_string()
        } else {
            "no".to_string()
        }
    };
    cx.out.table(
        [
            "plugin",
            "structure",
            "form",
            "rows",
            "declared",
            "probed",
            "launched",
            "entries",
            "why",
        ],
        rows.iter()
            .map(|r| {
                let absent = r.entries.absent.iter().map(|e| format!("-{e}"));
                let entries: Vec<String> =
                    r.entries.present.iter().cloned().chain(absent).collect();
                [
                    r.plugin.clone(),
                    r.structure.clone(),
                    r.form.clone(),
                    r.rows.to_string(),
                    yes(r.declared),
                    yes(r.probed),
                    yes(r.launched),
                    entries.join(" "),
                    match (&r.code, &r.reason) {
                        (Some(c), Some(reason)) => format!("{c}: {reason}"),
                        _ => String::new(),
                    },
                ]
            })
            .collect(),
    );
    Ok(code)
}

fn sizes(list: &[String]) -> Result<BTreeMap<String, u64>, Failure> {
    let mut dims = BTreeMap::new();
    for text in list {
        let parsed = text
            .split_once('=')
            .and_then(|(symbol, n)| Some((symbol.to_string(), n.parse::<u64>().ok()?)))
            .filter(|(symbol, n)| !symbol.is_empty() && *n > 0);
        let Some((symbol, n)) = parsed else {
            return Err(Failure::usage(
                format!("--dims `{text}`: expected SYMBOL=SIZE with a size of at least 1"),
                "for example --dims D=576,F=1536",
            ));
        };
        dims.insert(symbol, n);
    }
    Ok(dims)
}
