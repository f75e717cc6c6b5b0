//! `gates.json` of the oracle: metrics, bands and floors.
//!
//! Where `decisions.md` wins over an observation the expectation is stated here by rule, not by case: equal
//! outputs score perfectly, NaN meets no bound, and a bound on a name outside the table is invalid.

#![allow(clippy::unwrap_used)] // a test: a malformed fixture should end it

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;
use structures::gates::{band, measure, Floors, GateError, Metrics, OutputKind};
use structures::stats::number::from_json;

const BOUNDED: [&str; 7] = [
    "cosine",
    "top1_agreement",
    "last_position_cosine",
    "max_abs",
    "p99_abs",
    "relative_l2",
    "kl_per_token",
];

fn oracle() -> Value {
    let dir = match std::env::var_os("STRUCTURES_ORACLE") {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle"),
    };
    // A group that the given directory leaves out is served by the repository's own copy.
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle");
    let path = [dir, own]
        .map(|d| d.join("gates.json"))
        .into_iter()
        .find(|p| p.exists())
        .unwrap();
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn rows<'a>(document: &'a Value, group: &str) -> Vec<&'a Value> {
    document
        .get(group)
        .and_then(Value::as_array)
        .map(|a| a.iter().collect())
        .unwrap_or_default()
}

fn numbers(value: &Value) -> Vec<f32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| from_json(v).unwrap() as f32)
        .collect()
}

fn shape(value: &Value) -> Vec<usize> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap() as usize)
        .collect()
}

fn metrics(value: &Value) -> Metrics {
    let entries = value.as_object().unwrap().iter();
    Metrics(
        entries
            .map(|(k, v)| (k.clone(), from_json(v).unwrap()))
            .collect(),
    )
}

/// To 1e-6 of the value; what is nothing but rounding around zero (a KL of equal rows) to 1e-12.
fn close(got: f64, want: f64) -> bool {
    got == want
        || (got.is_nan() && want.is_nan())
        || (got - want).abs() <= (1e-6 * want.abs()).max(1e-12)
}

/// What is expected of outputs that are equal element by element.
fn perfect(name: &str) -> Option<f64> {
    match name {
        "cosine" | "last_position_cosine" | "cosine_all_positions" | "top1_agreement" => Some(1.0),
        "max_abs" | "p99_abs" | "relative_l2" | "kl_per_token" => Some(0.0),
        _ => None,
    }
}

/// Mismatches of one `values` or `distribution` row.
fn judge(case: &Value) -> Vec<String> {
    let name = case["name"].as_str().unwrap();
    let kind = OutputKind::parse(case["kind"].as_str().unwrap()).unwrap();
    let (got, want) = (numbers(&case["got"]), numbers(&case["want"]));
    let (got_shape, want_shape) = (shape(&case["got_shape"]), shape(&case["shape"]));
    let result = measure(kind, (&got, &got_shape), (&want, &want_shape));
    if let Some(refused) = case.get("refused") {
        return match (refused.as_str(), result) {
            (Some("shape_mismatch"), Err(GateError::ShapeMismatch { .. })) => vec![],
            (_, other) => vec![format!(
                "{name}: expected refusal {refused}, found {other:?}"
            )],
        };
    }
    let judged = match result {
        Ok(judged) => judged,
        Err(error) => return vec![format!("{name}: {error}")],
    };
    let equal = got
        .iter()
        .zip(&want)
        .all(|(g, w)| g == w || g.to_bits() == w.to_bits());
    let mut wrong = Vec::new();
    let mut expected: BTreeMap<String, f64> = metrics(&case["metrics"]).0.into_iter().collect();
    if let Some(extra) = case.get("extra") {
        expected.extend(metrics(extra).0);
    }
    for (metric, want) in expected {
        let want = if equal {
            perfect(&metric).unwrap_or(want)
        } else {
            want
        };
        match judged.metrics.get(&metric) {
            Some(got) if close(got, want) => {}
            got => wrong.push(format!("{name}: {metric} is {got:?}, expected {want}")),
        }
    }
    let expected_band = if equal {
        "pass"
    } else {
        case["band"].as_str().unwrap()
    };
    if judged.band.name() != expected_band {
        wrong.push(format!(
            "{name}: band {}, expected {expected_band}",
            judged.band.name()
        ));
    }
    let new = got
        .iter()
        .zip(&want)
        .filter(|(g, w)| !g.is_finite() && w.is_finite())
        .count();
    let refused = judged.non_finite.map_or(0, |n| n.count) as usize;
    if refused != new || judged.refusal().is_some() != (new > 0) {
        wrong.push(format!(
            "{name}: {refused} non-finite values seen, {new} are there"
        ));
    }
    wrong
}

fn judge_floors(case: &Value) -> Vec<String> {
    let measured = metrics(&case["metrics"]);
    let bounds = metrics(&case["floors"]).0;
    let floors = Floors::new(bounds.iter().map(|(n, b)| (n.as_str(), *b)));
    if let Some(foreign) = bounds.keys().find(|n| !BOUNDED.contains(&n.as_str())) {
        return match floors {
            Err(GateError::UnknownMetric { name, .. }) if name == *foreign => vec![],
            other => vec![format!(
                "{foreign}: expected an invalid metric, found {other:?}"
            )],
        };
    }
    let judged = floors.unwrap().first_shortfall(&measured);
    // A bound on what was not measured is a question that makes no sense, whatever the others say.
    if let Some(absent) = bounds.keys().find(|n| measured.get(n).is_none()) {
        return match judged {
            Err(GateError::Unmeasured { name, .. }) if name == *absent => vec![],
            other => vec![format!(
                "{absent}: expected an unmeasured metric, found {other:?}"
            )],
        };
    }
    let short = judged.unwrap().map(|s| s.metric);
    // The first in the caller's order: as observed, and NaN, which the observation let pass.
    let observed = case["first_shortfall"].as_str();
    let expected = bounds
        .keys()
        .find(|n| observed == Some(n.as_str()) || measured.get(n).unwrap().is_nan())
        .cloned();
    if !bounds.keys().any(|n| measured.get(n).unwrap().is_nan()) {
        assert_eq!(case["ok"].as_bool().unwrap(), expected.is_none(), "{case}");
    }
    match short == expected {
        true => vec![],
        false => vec![format!(
            "{bounds:?}: shortfall {short:?}, expected {expected:?}"
        )],
    }
}

fn report(group: &str, checked: usize, wrong: Vec<String>) {
    assert!(
        wrong.is_empty(),
        "{group}: {} wrong\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    println!("{group}: {checked} rows agree");
}

#[test]
fn oracle_gates_values_and_distribution() {
    let document = oracle();
    for group in ["values", "distribution"] {
        let cases = rows(&document, group);
        report(
            group,
            cases.len(),
            cases.iter().flat_map(|c| judge(c)).collect(),
        );
    }
}

#[test]
fn oracle_gates_bands() {
    let document = oracle();
    let cases = rows(&document, "bands");
    let wrong = cases.iter().filter_map(|case| {
        let kind = OutputKind::parse(case["kind"].as_str().unwrap()).unwrap();
        let found = band(kind, &metrics(&case["metrics"])).name();
        (found != case["band"].as_str().unwrap()).then(|| format!("{case}: found {found}"))
    });
    report("bands", cases.len(), wrong.collect());
}

#[test]
fn oracle_gates_floors() {
    let document = oracle();
    let cases = rows(&document, "floors");
    report(
        "floors",
        cases.len(),
        cases.iter().flat_map(|c| judge_floors(c)).collect(),
    );
}

/// Rows as the oracle might have them, for what its own do not show.
#[test]
fn floors_in_the_callers_order_and_what_was_not_measured() {
    for (case, right) in [
        // An earlier bound fails, a later metric is NaN.
        (
            r#"{"metrics": {"cosine": 0.5, "max_abs": "nan"}, "floors": {"cosine": 0.9, "max_abs": 1},
             "ok": false, "first_shortfall": "cosine"}"#,
            true,
        ),
        // NaN stands first.
        (
            r#"{"metrics": {"cosine": "nan", "max_abs": 2}, "floors": {"cosine": 0.9, "max_abs": 1},
             "ok": false, "first_shortfall": "max_abs"}"#,
            true,
        ),
        (
            r#"{"metrics": {"cosine": 0.5}, "floors": {"cosine": 0.9, "kl_per_token": 1},
             "ok": false, "first_shortfall": "cosine"}"#,
            true,
        ),
        (
            r#"{"metrics": {"cosine": 0.5, "max_abs": 2}, "floors": {"cosine": 0.9, "max_abs": 1},
             "ok": false, "first_shortfall": "max_abs"}"#,
            false,
        ),
    ] {
        let case: Value = serde_json::from_str(case).unwrap();
        assert_eq!(judge_floors(&case).is_empty(), right, "{case}");
    }
    for (got, want, right) in [
        (1.000_000_9, 1.0, true),
        (1.000_002, 1.0, false),
        (3e-14, 0.0, true),
        (1e-9, 0.0, false),
        (f64::NAN, 0.0, false),
    ] {
        assert_eq!(close(got, want), right, "{got} {want}");
    }
}

#[test]
fn oracle_gates_has_no_group_that_nobody_reads() {
    let known = [
        "versions",
        "constants",
        "definitions",
        "values",
        "distribution",
        "bands",
        "floors",
        // Checked where dims are solved, with the catalog.
        "solve_dims",
    ];
    for group in oracle().as_object().unwrap().keys() {
        assert!(known.contains(&group.as_str()), "unknown group {group}");
    }
}
