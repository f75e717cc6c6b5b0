//! `devices`: what there is to run on, and which plugins serve it.

use serde_json::json;
use structures_loader::arch::Device;
use structures_loader::{devices, without_devices, DeviceRow, Registry};

use super::Context;
use crate::failure::Failure;

/// Always 0: a device that nobody serves is a row.
pub fn run(simulate: &[String], cx: &Context<'_>) -> Result<u8, Failure> {
    let named: Vec<Device> = simulate
        .iter()
        .map(|text| {
            Device::parse(text).map_err(|e| {
                Failure::usage(
                    format!("--simulate {e}"),
                    "for example --simulate sm_120 or --simulate x86_64+avx2+fma",
                )
            })
        })
        .collect::<Result<_, _>>()?;
    let registry = Registry::scan(&cx.scan_options()?)?;
    let rows = devices(&registry, &named);
    let missing = without_devices(&registry);
    if cx.out.json() {
        cx.out
            .document(json!({ "devices": rows, "without_devices": missing }));
        return Ok(0);
    }
    for row in &rows {
        print(row, cx);
    }
    for no in &missing {
        cx.out.line(&format!(
            "no devices of plugin {}: {}: {}",
            no.plugin, no.code, no.reason
        ));
    }
    Ok(0)
}

fn print(row: &DeviceRow, cx: &Context<'_>) {
    let memory = row.memory_bytes.map_or(String::new(), |bytes| {
        format!(", {:.1} GiB", bytes as f64 / f64::from(1 << 30))
    });
    let id = row.id.map_or("-".into(), |id| id.to_string());
    cx.out
        .line(&format!("device {id}: {} ({}{memory})", row.name, row.kind));
    cx.out.line(&format!("  {}", row.archs.join(" ")));
    if row.plugins.is_empty() {
        cx.out
            .line("no plugin is loaded; `structures plugins list` says why");
        return;
    }
    cx.out.table(
        ["plugin", "declares", "serves it", "forms", "why not"],
        row.plugins
            .iter()
            .map(|p| {
                [
                    p.plugin.clone(),
                    if p.declares.is_empty() {
                        "nothing: not checked".into()
                    } else {
                        p.declares.join(" ")
                    },
                    if p.admitted { "yes" } else { "no" }.into(),
                    format!("{} of {}", p.forms_served, p.forms),
                    match (&p.code, &p.reason) {
                        (Some(code), Some(reason)) => format!("{code}: {reason}"),
                        _ => String::new(),
                    },
                ]
            })
            .collect(),
    );
}
