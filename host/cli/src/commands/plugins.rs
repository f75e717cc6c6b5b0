//! `plugins list`, `show`, `lock` and `rescan`.
//!
//! They need no catalog and, where the cache of scans knows the files, open no plugin.

use serde_json::{json, Map, Value};
use structures_loader::{
    forget, LockPolicy, LockReport, Outcome, PluginRow, Registry, TracedPlace,
};

use super::{show_path, Context};
use crate::args::PluginsAction;
use crate::failure::Failure;

/// See the module. Listing is always 0: a refused file is a row, not a failure.
pub fn run(action: Option<PluginsAction>, cx: &Context<'_>) -> Result<u8, Failure> {
    match action {
        None | Some(PluginsAction::List) => {
            let registry = Registry::list(&cx.scan_options()?)?;
            list(&registry, Map::new(), cx)
        }
        Some(PluginsAction::Show { id }) => {
            let registry = Registry::list(&cx.scan_options()?)?;
            show(&registry, &id, cx)
        }
        Some(PluginsAction::Lock) => lock(cx),
        Some(PluginsAction::Rescan) => rescan(cx),
    }
}

fn list(
    registry: &Registry,
    mut first: Map<String, Value>,
    cx: &Context<'_>,
) -> Result<u8, Failure> {
    let rows = &registry.plugins;
    if cx.out.json() {
        first.insert("plugins".into(), value(rows)?);
        first.insert("trace".into(), value(&registry.trace)?);
        if let Some(lock) = &registry.lock {
            first.insert("lock".into(), value(lock)?);
        }
        cx.out.document(Value::Object(first));
        return Ok(0);
    }
    if cx.global.verbose > 0 {
        registry.trace.iter().for_each(|place| trace(place, cx));
    }
    if rows.is_empty() {
        cx.out.line("no plugin candidates in:");
        for dir in &registry.searched {
            cx.out.line(&format!("  {}", show_path(&dir.path)));
        }
        cx.out
            .line("give a directory with --plugins DIR, or put *.so files into one of these");
        return Ok(0);
    }
    cx.out.table(
        ["id", "version", "outcome", "forms", "archs", "file", "why"],
        rows.iter()
            .map(|r| {
                [
                    r.id.clone().unwrap_or_else(|| "-".into()),
                    r.version.clone().unwrap_or_else(|| "-".into()),
                    word(&r.outcome),
                    r.forms.to_string(),
                    r.archs.join(" "),
                    show_path(&r.path),
                    why(r),
                ]
            })
            .collect(),
    );
    cx.out.line(&totals(rows));
    if let Some(lock) = &registry.lock {
        cx.out.line(&locked(lock));
    }
    Ok(0)
}

/// How many of each outcome, and where to read on.
fn totals(rows: &[PluginRow]) -> String {
    let counts: Vec<String> = [
        Outcome::Loaded,
        Outcome::Refused,
        Outcome::Quarantined,
        Outcome::Shadowed,
    ]
    .iter()
    .map(|outcome| {
        (
            rows.iter().filter(|r| r.outcome == *outcome).count(),
            outcome,
        )
    })
    .filter(|(n, outcome)| *n > 0 || **outcome == Outcome::Loaded)
    .map(|(n, outcome)| format!("{n} {}", word(outcome)))
    .collect();
    let mut text = counts.join(", ");
    if rows.iter().any(|r| r.outcome != Outcome::Loaded) {
        text.push_str("; docs/codes.md says what to do about each code, `-v` shows every step");
    }
    text
}

fn locked(lock: &LockReport) -> String {
    let path = show_path(&lock.path);
    match (lock.found, lock.drift.len()) {
        (false, _) => format!("locked: no lock file at {path}"),
        (true, 0) => format!("locked: as {path} says"),
        (true, n) => format!("locked: {n} differences to {path}, said above"),
    }
}

/// One place of the search, and what happened to each of its files.
fn trace(place: &TracedPlace, cx: &Context<'_>) {
    let path = place
        .path
        .as_deref()
        .map_or(String::new(), |path| format!(" {}", show_path(path)));
    let end = match &place.reason {
        Some(why) => format!("skipped: {why}"),
        None => format!("{} candidates", place.candidates.len()),
    };
    cx.out.line(&format!("{}{path}: {end}", place.source));
    for candidate in &place.candidates {
        let code = candidate.code.map_or(String::new(), |c| format!(" {c}"));
        let end = format!("{}{code}", word(&candidate.outcome));
        let steps = candidate.steps.iter().map(String::as_str);
        let steps: Vec<&str> = steps.chain([end.as_str()]).collect();
        cx.out.line(&format!(
            "  {}: {}",
            candidate
                .path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy(),
            steps.join(" -> ")
        ));
    }
}

fn lock(cx: &Context<'_>) -> Result<u8, Failure> {
    let mut options = cx.scan_options()?;
    options.lock = LockPolicy::default();
    let registry = Registry::scan(&options)?;
    let (path, lock) = (cx.lock_file(), registry.to_lock());
    lock.write(&path)?;
    if cx.out.json() {
        cx.out
            .document(json!({ "lock": { "path": show_path(&path), "plugins": lock.plugins } }));
        return Ok(0);
    }
    cx.out.table(
        ["id", "version", "sha256", "file"],
        lock.plugins
            .iter()
            .map(|p| {
                [
                    p.id.clone(),
                    p.version.clone(),
                    p.sha256.clone(),
                    p.file.clone(),
                ]
            })
            .collect(),
    );
    cx.out.line(&format!(
        "{} plugins locked in {}; `--locked` uses these files and no others",
        lock.plugins.len(),
        show_path(&path)
    ));
    Ok(0)
}

fn rescan(cx: &Context<'_>) -> Result<u8, Failure> {
    let options = cx.scan_options()?;
    let (scans, quarantined) = forget(&options.environment)?;
    let registry = Registry::list(&options)?;
    let mut first = Map::new();
    first.insert(
        "forgotten".into(),
        json!({ "scans": scans, "quarantined": quarantined }),
    );
    if !cx.out.json() {
        cx.out.line(&format!(
            "forgotten: {scans} scans, {quarantined} in quarantine"
        ));
    }
    list(&registry, first, cx)
}

/// The row of an id or of a file name.
fn find<'r>(registry: &'r Registry, wanted: &str) -> Option<&'r PluginRow> {
    let of_file = |r: &&PluginRow| {
        r.path.as_os_str() == wanted || r.path.file_name().is_some_and(|name| name == wanted)
    };
    registry
        .row(wanted)
        .or_else(|| registry.plugins.iter().find(of_file))
}

fn show(registry: &Registry, id: &str, cx: &Context<'_>) -> Result<u8, Failure> {
    let Some(row) = find(registry, id) else {
        return Err(Failure::usage(
            format!("no plugin or file `{id}`; {}", registry.known()),
            "`structures plugins list` shows every candidate",
        ));
    };
    let mut plugin = value(row)?;
    let description = row.description.as_ref();
    if let Some(map) = plugin.as_object_mut() {
        if let Some(d) = description {
            map.insert("forms".into(), json!(d.forms));
            map.insert("entries".into(), json!(d.entries));
            map.insert("operations".into(), json!(d.operations));
            map.insert("role".into(), json!(d.role));
            map.insert("panic".into(), json!(d.panic));
            map.insert("requires".into(), json!(d.requires));
        }
        map.insert("meaning".into(), json!(row.code.map(|c| c.meaning())));
        map.insert("help".into(), json!(row.code.map(|c| c.help())));
        map.insert("steps".into(), json!(row.steps));
    }
    if cx.out.json() {
        cx.out.document(json!({ "plugin": plugin }));
        return Ok(0);
    }
    let text = |key: &str| match plugin.get(key) {
        Some(Value::String(s)) => s.clone(),
        Some(Value::Null) | None => "-".into(),
        Some(other) => other.to_string(),
    };
    for key in [
        "id", "version", "vendor", "api", "path", "sha256", "outcome", "code", "reason",
    ] {
        cx.out.line(&format!("{key:<10} {}", text(key)));
    }
    let line = |key: &str, value: &str| cx.out.line(&format!("{key:<10} {value}"));
    if let Some(code) = row.code {
        line("meaning", code.meaning());
        line("help", code.help());
    }
    if let Some(signature) = &row.signature {
        line("signature", &signature.to_string());
    }
    line("sidecar", if row.sidecar { "yes" } else { "no" });
    line("steps", &row.steps.join(" -> "));
    line("archs", &row.archs.join(" "));
    let Some(d) = description else { return Ok(0) };
    line("role", d.role.as_deref().unwrap_or("-"));
    line("panic", d.panic.as_deref().unwrap_or("-"));
    line("requires", &d.requires.join(" "));
    line("entries", &d.entries.join(" "));
    line("operations", &d.operations.join(" "));
    cx.out.table(
        [
            "structure",
            "form",
            "format",
            "spans",
            "variants",
            "rows",
            "statistics",
            "dtypes",
            "archs",
            "wires",
            "capture",
            "rank",
            "tolerance",
        ],
        d.forms
            .iter()
            .map(|f| {
                let versions: Vec<String> = f.spec_versions.iter().map(u32::to_string).collect();
                [
                    format!("{}@{}", f.structure, versions.join(",")),
                    f.name.clone(),
                    f.format.clone(),
                    f.spans.join(" "),
                    f.variants
                        .iter()
                        .map(|(axis, values)| format!("{axis}={}", values.join("|")))
                        .collect::<Vec<_>>()
                        .join(" "),
                    f.band
                        .rows
                        .map_or("any".into(), |[lo, hi]| format!("{lo}..{hi}")),
                    f.statistics
                        .iter()
                        .map(|s| format!("{}:{}/{}", s.point, s.statistic, s.granularity))
                        .collect::<Vec<_>>()
                        .join(" "),
                    f.dtypes.join(" "),
                    match f.archs.as_slice() {
                        [] => "all".into(),
                        some => some.join(" "),
                    },
                    f.wires.join(" "),
                    if f.capture { "yes" } else { "no" }.into(),
                    f.precision_rank.to_string(),
                    format!("{:.0e}", f.tolerance),
                ]
            })
            .collect(),
    );
    Ok(0)
}

fn why(row: &PluginRow) -> String {
    match (&row.code, &row.reason) {
        (Some(code), Some(reason)) => format!("{code}: {reason}"),
        _ => String::new(),
    }
}

/// A part of a report as JSON.
fn value<T: serde::Serialize + ?Sized>(part: &T) -> Result<Value, Failure> {
    serde_json::to_value(part).map_err(|e| {
        Failure::failed(
            "io",
            format!("the report is no JSON: {e}"),
            "this is a fault of the program: report it with the message",
        )
    })
}

/// The JSON word of a value.
fn word<T: serde::Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(s)) => s,
        _ => String::new(),
    }
}
