//! `explain`: the coverage table of a receipt.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::json;
use structures::receipt::{Receipt, RefusalNote};

use super::{attach::table, Context};
use crate::failure::Failure;

/// Entries shown of a long list.
const SHOWN: usize = 8;

/// See the module.
pub fn run(path: &Path, cx: &Context<'_>) -> Result<u8, Failure> {
    let receipt = structures::replay::read(path)?;
    let mut active: BTreeMap<String, usize> = BTreeMap::new();
    for seat in receipt.bound() {
        let packed: BTreeSet<&str> = seat.packed.values().map(String::as_str).collect();
        let format = match packed.is_empty() {
            true => seat.format.clone(),
            false => {
                let formats: Vec<&str> = packed.into_iter().collect();
                format!("adopted {}", formats.join("+"))
            }
        };
        let device = seat
            .device
            .as_ref()
            .map_or(String::new(), |d| format!("@{}", d.index));
        let key = format!(
            "{} {format} ({}:{}{device})",
            seat.structure, seat.plugin, seat.form
        );
        *active.entry(key).or_default() += 1;
    }
    for row in &receipt.device_operations {
        let (kind, plugin, index) = (&row.kind, &row.plugin, row.device.index);
        active.insert(
            format!("host operation {kind} ({plugin}@{index})"),
            row.count,
        );
    }
    let kept = grouped(&receipt.kept_host);
    let refused = grouped(&receipt.refused);
    if cx.out.json() {
        let list = |groups: &[(String, usize, String)]| {
            groups
                .iter()
                .map(|(reason, n, first)| json!({"reason": reason, "count": n, "first": first}))
                .collect::<Vec<_>>()
        };
        cx.out.document(json!({
            "scheme": receipt.scheme.name, "auto": receipt.scheme.why, "active": active,
            "kept_host": list(&kept), "refused": list(&refused),
            "units": receipt.units, "union": receipt.union,
        }));
        return Ok(0);
    }
    table(&receipt, cx);
    cx.out.line("");
    if active.is_empty() {
        cx.out.line("nothing is active");
    }
    for (what, n) in &active {
        cx.out.line(&format!("active: {n} x {what}"));
    }
    for unit in receipt.units.iter().filter(|u| u.outcome == "refused") {
        cx.out.line(&format!(
            "refused: unit {} of {} seams [{}:{}] {}: {}",
            unit.name,
            unit.seams,
            unit.plugin,
            unit.form,
            unit.code.as_deref().unwrap_or("?"),
            unit.reason.as_deref().unwrap_or("no reason recorded")
        ));
    }
    section("kept on the host", &kept, cx);
    section("refused", &refused, cx);
    for a in receipt.assumed.iter().take(SHOWN) {
        cx.out.line(&format!("assumed at {}: {}", a.path, a.text));
    }
    if kept.is_empty() && refused.is_empty() && refused_units(&receipt) == 0 {
        cx.out.line("nothing was kept on the host or refused");
    }
    Ok(0)
}

fn refused_units(receipt: &Receipt) -> usize {
    receipt
        .units
        .iter()
        .filter(|u| u.outcome == "refused")
        .count()
}

/// Reasons with how often and where first. Numbers (a layer in a path) do not make a reason of their own.
fn grouped(list: &[RefusalNote]) -> Vec<(String, usize, String)> {
    let mut groups: Vec<(String, String, usize, String)> = Vec::new();
    for r in list {
        let who = match (&r.plugin, &r.form) {
            (Some(p), Some(f)) => format!(" [{p}:{f}]"),
            _ => String::new(),
        };
        let reason = format!(
            "{} {} ({}){who}: {}",
            r.structure, r.code, r.stage, r.reason
        );
        let key: String = reason.chars().filter(|c| !c.is_ascii_digit()).collect();
        match groups.iter_mut().find(|(k, _, _, _)| *k == key) {
            Some((_, _, n, _)) => *n += 1,
            None => groups.push((key, reason, 1, r.path.clone())),
        }
    }
    groups.sort_by_key(|g| std::cmp::Reverse(g.2));
    groups
        .into_iter()
        .map(|(_, reason, n, path)| (reason, n, path))
        .collect()
}

fn section(title: &str, groups: &[(String, usize, String)], cx: &Context<'_>) {
    for (reason, n, first) in groups.iter().take(SHOWN) {
        cx.out
            .line(&format!("{title}: {n} x {reason} (first: {first})"));
    }
    if groups.len() > SHOWN {
        cx.out.line(&format!(
            "{title}: {} more reasons in the receipt",
            groups.len() - SHOWN
        ));
    }
}
