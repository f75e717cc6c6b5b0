//! `plugins list` and `plugins show`.

use serde_json::json;

use super::{show_path, Context};
use crate::args::PluginsAction;
use crate::failure::Failure;

/// See the module. Listing is always 0: a refused file is a row, not a failure.
pub fn run(action: Option<PluginsAction>, cx: &Context<'_>) -> Result<u8, Failure> {
    let host = cx.host()?;
    match action {
        None | Some(PluginsAction::List) => list(&host, cx),
        Some(PluginsAction::Show { id }) => show(&host, &id, cx),
    }
}

fn list(host: &structures::host::Host, cx: &Context<'_>) -> Result<u8, Failure> {
    let rows = &host.registry.plugins;
    if cx.out.json() {
        cx.out.document(json!({ "plugins": rows }));
        return Ok(0);
    }
    if rows.is_empty() {
        cx.out.line("no plugin candidates in:");
        for dir in &host.registry.searched {
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
                    match (&r.code, &r.reason) {
                        (Some(c), Some(reason)) => format!("{}: {reason}", word(c)),
                        _ => String::new(),
                    },
                ]
            })
            .collect(),
    );
    Ok(0)
}

fn show(host: &structures::host::Host, id: &str, cx: &Context<'_>) -> Result<u8, Failure> {
    let Some(row) = host.registry.row(id) else {
        let known: Vec<&str> = host
            .registry
            .plugins
            .iter()
            .filter_map(|r| r.id.as_deref())
            .collect();
        return Err(Failure::usage(
            format!("no plugin `{id}`; found: {}", known.join(", ")),
            "`structures plugins list` shows every candidate",
        ));
    };
    let mut plugin = serde_json::to_value(row).unwrap_or_default();
    let description = row.description.as_ref();
    if let (Some(map), Some(d)) = (plugin.as_object_mut(), description) {
        map.insert("forms".into(), json!(d.forms));
        map.insert("entries".into(), json!(d.entries));
        map.insert("role".into(), json!(d.role));
    }
    if cx.out.json() {
        cx.out.document(json!({ "plugin": plugin }));
        return Ok(0);
    }
    let text = |key: &str| match plugin.get(key) {
        Some(serde_json::Value::String(s)) => s.clone(),
        Some(serde_json::Value::Null) | None => "-".into(),
        Some(other) => other.to_string(),
    };
    for key in [
        "id", "version", "vendor", "api", "path", "sha256", "outcome", "code", "reason",
    ] {
        cx.out.line(&format!("{key:<10} {}", text(key)));
    }
    cx.out
        .line(&format!("{:<10} {}", "archs", row.archs.join(" ")));
    let Some(d) = description else { return Ok(0) };
    cx.out.line(&format!(
        "{:<10} {}",
        "role",
        d.role.as_deref().unwrap_or("-")
    ));
    cx.out
        .line(&format!("{:<10} {}", "entries", d.entries.join(" ")));
    cx.out.table(
        [
            "structure",
            "form",
            "format",
            "spans",
            "rows",
            "statistics",
            "dtypes",
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
                    f.band
                        .rows
                        .map_or("any".into(), |[lo, hi]| format!("{lo}..{hi}")),
                    f.statistics
                        .iter()
                        .map(|s| format!("{}:{}/{}", s.point, s.statistic, s.granularity))
                        .collect::<Vec<_>>()
                        .join(" "),
                    f.dtypes.join(" "),
                    f.precision_rank.to_string(),
                    format!("{:.0e}", f.tolerance),
                ]
            })
            .collect(),
    );
    Ok(0)
}

/// The JSON word of a value.
fn word<T: serde::Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(s)) => s,
        _ => String::new(),
    }
}
