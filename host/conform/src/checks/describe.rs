//! `describe`: the document is pure, agrees with the tables, and every name in it is one of the catalog.
//!
//! What the loader demands of a document it has already; here is what an author wants to know beyond that.

use std::collections::BTreeSet;

use structures_catalog::Spec;
use structures_plugin_api::describe::{Description, FormDecl};
use structures_plugin_api::formats::BlockFormat;
use structures_plugin_api::DType;
use structures_suite::cases::width_symbols;

use super::{Context, Verdict};
use crate::code::Code;

const STATISTICS: [&str; 4] = ["none", "amax", "second_moment", "content"];
const GRANULARITIES: [&str; 2] = ["tensor", "channel"];
/// Names of dtypes and formats that `activation_format` may be.
const ACTIVATIONS: [&str; 7] = ["none", "bf16", "f16", "e4m3", "e5m2", "int8", "nvfp4"];

pub(super) fn run(cx: &Context<'_>) -> Verdict {
    let plugin = cx.loaded.plugin();
    let mut texts: Vec<String> = cx.task.described.iter().cloned().collect();
    for _ in 0..2 {
        match plugin.describe_again(cx.throwaway) {
            Ok(text) => texts.push(text),
            Err(refusal) => return Code::DescribeImpure.because(format!("once more: {refusal}")),
        }
    }
    if let Some(pair) = texts.windows(2).find(|pair| pair[0] != pair[1]) {
        let at = pair[0]
            .bytes()
            .zip(pair[1].bytes())
            .position(|(a, b)| a != b)
            .unwrap_or(pair[0].len().min(pair[1].len()));
        return Code::DescribeImpure.because(format!(
            "two answers differ from byte {at} on: `{}` and `{}`",
            part(&pair[0], at),
            part(&pair[1], at)
        ));
    }
    let description = plugin.description();
    if let Some(text) = disagreement(cx, description) {
        return Code::TableDisagrees.because(text);
    }
    if let Some(text) = malformed(description) {
        return Code::DescribeMalformed.because(text);
    }
    let (mut first, mut texts_of, mut forms) = (None, Vec::new(), Vec::new());
    for form in &description.forms {
        if let Some((code, text)) = of_form(cx, form) {
            first.get_or_insert(code);
            texts_of.push(format!(
                "form `{}` of `{}`: {text}",
                form.name, form.structure
            ));
            forms.push((form.structure.clone(), form.name.clone()));
        }
    }
    if let Some(code) = first {
        return Verdict::Failed {
            code,
            reason: texts_of.join("; "),
            seed: None,
            forms,
        };
    }
    let unread = unread(texts.last().map_or("", String::as_str), description);
    Verdict::passed(match unread.is_empty() {
        true => format!(
            "{} forms, {} bytes",
            description.forms.len(),
            texts[0].len()
        ),
        false => format!("not read by this host: {}", unread.join(", ")),
    })
}

fn part(text: &str, at: usize) -> String {
    text.bytes()
        .skip(at.saturating_sub(8))
        .take(40)
        .map(|b| if b.is_ascii_graphic() { b as char } else { ' ' })
        .collect()
}

fn disagreement(cx: &Context<'_>, description: &Description) -> Option<String> {
    let (plugin, form, device) = cx.loaded.plugin().table_minors();
    let stated: Option<u32> = description
        .api
        .split('.')
        .nth(1)
        .and_then(|m| m.parse().ok());
    for (table, minor) in [
        ("plugin", Some(plugin)),
        ("form", Some(form)),
        ("device", device),
    ] {
        if let (Some(minor), Some(stated)) = (minor, stated) {
            if minor != stated {
                return Some(format!(
                    "the {table} table is of API minor {minor}, the document of API {}",
                    description.api
                ));
            }
        }
    }
    None
}

fn malformed(description: &Description) -> Option<String> {
    if let Some(role) = description.role.as_deref().filter(|r| *r != "reference") {
        return Some(format!("role `{role}`: expected `reference` or none"));
    }
    let panics = [None, Some("unwind"), Some("abort")];
    if !panics.contains(&description.panic.as_deref()) {
        return Some(format!(
            "panic: expected `unwind` or `abort`, found {:?}",
            description.panic
        ));
    }
    if description.vendor.trim().is_empty() {
        return Some("`vendor` is empty".into());
    }
    if description.forms.is_empty() {
        return Some("no form is declared".into());
    }
    let mut seen = BTreeSet::new();
    let twice = description
        .entries
        .iter()
        .find(|e| !seen.insert(e.as_str()));
    twice.map(|e| format!("entry `{e}` is listed twice"))
}

fn of_form(cx: &Context<'_>, form: &FormDecl) -> Option<(Code, String)> {
    let bad = |text: String| Some((Code::DescribeMalformed, text));
    for dtype in &form.dtypes {
        if !(1..64)
            .filter_map(DType::from_id)
            .any(|d| d.name() == dtype)
        {
            return bad(format!("dtype `{dtype}` does not exist"));
        }
    }
    if !ACTIVATIONS.contains(&form.activation_format.as_str()) {
        return bad(format!(
            "activation_format `{}`: expected one of {}",
            form.activation_format,
            ACTIVATIONS.join(", ")
        ));
    }
    if let Some([0, _]) = form.band.rows {
        return bad("the band of rows begins at 0: expected at least 1".into());
    }
    for (symbol, band) in &form.band.dims {
        let step = band.multiple_of.max(1);
        let first = band.min.max(1).checked_next_multiple_of(step);
        if first.is_none_or(|n| n > band.max) {
            return bad(format!(
                "the band of {symbol} is empty: {}..={} in steps of {step}",
                band.min, band.max
            ));
        }
    }
    if let Some(work) = &form.band.work {
        if !(work.min >= 0.0 && work.min <= work.max) {
            return bad(format!(
                "the band of work [{}, {}] is empty",
                work.min, work.max
            ));
        }
    }
    for s in &form.statistics {
        let known = STATISTICS.contains(&s.statistic.as_str())
            && GRANULARITIES.contains(&s.granularity.as_str());
        if !known {
            return bad(format!(
                "statistic `{}|{}|{}`: expected {} per {}",
                s.point,
                s.statistic,
                s.granularity,
                STATISTICS.join(", "),
                GRANULARITIES.join(" or ")
            ));
        }
    }
    let mut specs = Vec::new();
    for version in &form.spec_versions {
        match cx.catalog.get_version(&form.structure, *version) {
            Ok(spec) => specs.push(spec),
            Err(e) => return Some((Code::DescribeUnknown, e.to_string())),
        }
    }
    unknown(&specs, form).map(|text| (Code::DescribeUnknown, text))
}

/// The first name that the structure has in none of the accepted versions.
fn unknown(specs: &[&Spec], form: &FormDecl) -> Option<String> {
    let missing = |what: &str, name: &str, known: BTreeSet<String>| {
        let list: Vec<&str> = known.iter().map(String::as_str).collect();
        let absent = !known.contains(name);
        absent.then(|| format!("no {what} `{name}`; there are {}", list.join(", ")))
    };
    let each = |names: &dyn Fn(&Spec) -> Vec<String>| -> BTreeSet<String> {
        specs.iter().flat_map(|spec| names(spec)).collect()
    };
    for span in &form.spans {
        let spans = each(&|s| s.dataflow.spans.iter().map(|s| s.name.clone()).collect());
        if let Some(text) = missing("span", span, spans) {
            return Some(text);
        }
    }
    for (axis, values) in &form.variants {
        let axes = each(&|s| s.variants.keys().cloned().collect());
        if let Some(text) = missing("axis", axis, axes) {
            return Some(text);
        }
        if values.is_empty() {
            return Some(format!("axis `{axis}` accepts no value"));
        }
        for value in values {
            let known = each(&|s| {
                let axis = s.variants.get(axis);
                axis.map(|a| a.values.keys().cloned().collect())
                    .unwrap_or_default()
            });
            if let Some(text) = missing(&format!("value of axis `{axis}`"), value, known) {
                return Some(text);
            }
        }
    }
    for s in &form.statistics {
        let points = each(&|s| s.points.iter().chain(&s.content).cloned().collect());
        if let Some(text) = missing("point", &s.point, points) {
            return Some(text);
        }
    }
    let work = form.band.work.iter().flat_map(|w| &w.symbols);
    for symbol in form.band.dims.keys().chain(work) {
        let symbols = each(&|s| {
            let mut all = width_symbols(s);
            all.extend(s.symbols.keys().cloned());
            all.extend(structures_suite::cases::sizes_of_rows(s, 1).into_keys());
            all
        });
        if let Some(text) = missing("symbol", symbol, symbols) {
            return Some(text);
        }
    }
    for slot in form.scale_groups.iter().flatten() {
        let slots = each(&|s| s.weights.iter().map(|w| w.name.clone()).collect());
        // `w_*` stands for every index of `w_<i>`.
        let stem = slot.trim_end_matches('*');
        let has = |s: &String| {
            let own = s.split('<').next().unwrap_or(s);
            s.starts_with(stem) || (s.contains('<') && stem.starts_with(own))
        };
        if !slots.iter().any(has) {
            return missing("slot", slot, slots);
        }
    }
    None
}

/// Members of the document that this host does not know: of a later minor, or misspelt.
fn unread(text: &str, description: &Description) -> Vec<String> {
    let whole: serde_json::Value = match serde_json::from_str(text) {
        Ok(whole) => whole,
        Err(_) => return Vec::new(),
    };
    // What comes back from a filled description is what is read.
    let mut filled = description.clone();
    filled.role = Some(String::new());
    filled.panic = Some(String::new());
    filled.requires = vec![String::new()];
    filled.operations = vec![String::new()];
    filled.recorded_operations = vec![String::new()];
    let mut form = FormDecl::new("", "", "");
    form.packed = BlockFormat::ALL.to_vec();
    form.scale_groups = vec![Vec::new()];
    form.balances = true;
    form.rounds = Some(String::new());
    form.archs = vec![String::new()];
    form.strided = true;
    form.keeps_packed = true;
    let known = |value: serde_json::Result<serde_json::Value>| -> BTreeSet<String> {
        let map = value.ok().and_then(|v| v.as_object().cloned());
        map.map(|m| m.keys().cloned().collect()).unwrap_or_default()
    };
    let (top, of_form) = (
        known(serde_json::to_value(&filled)),
        known(serde_json::to_value(&form)),
    );
    let mut found = BTreeSet::new();
    for key in whole.as_object().into_iter().flat_map(|m| m.keys()) {
        if !top.contains(key) {
            found.insert(format!("`{key}`"));
        }
    }
    let forms = whole["forms"].as_array().into_iter().flatten();
    for key in forms.flat_map(|f| f.as_object().into_iter().flat_map(|m| m.keys())) {
        if !of_form.contains(key) {
            found.insert(format!("`{key}` of a form"));
        }
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_no_host_of_this_version_reads_is_named() {
        let mut form = FormDecl::new("s", "f", "none");
        form.archs = vec!["sm_90a".into()];
        form.packed = vec![BlockFormat::ALL[0]];
        form.balances = true;
        form.strided = true;
        form.keeps_packed = true;
        form.rounds = Some("bf16".into());
        let description = Description {
            role: Some("reference".into()),
            operations: vec!["add".into()],
            recorded_operations: vec!["add".into()],
            forms: vec![form],
            ..Description::new("p", "v", "0.1.0")
        };
        let mut whole = serde_json::to_value(&description).unwrap();
        let told = |whole: &serde_json::Value| unread(&whole.to_string(), &description);
        assert_eq!(told(&whole), Vec::<String>::new());
        whole["forms"][0]["tomorrow"] = true.into();
        assert_eq!(told(&whole), ["`tomorrow` of a form"]);
    }
}
