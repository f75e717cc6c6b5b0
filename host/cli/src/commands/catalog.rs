//! `catalog list`, `catalog show`, `catalog verify`.

use serde_json::{json, Value as Json};
use structures::host::open_catalog;
use structures_catalog::{verify, Catalog, Spec};

use super::Context;
use crate::args::CatalogAction;
use crate::failure::Failure;

/// See the module.
pub fn run(action: Option<CatalogAction>, cx: &Context<'_>) -> Result<u8, Failure> {
    match action {
        None | Some(CatalogAction::List) => list(&open_catalog(&cx.global.catalog)?, cx),
        Some(CatalogAction::Show { name }) => show(&open_catalog(&cx.global.catalog)?, &name, cx),
        Some(CatalogAction::Verify { dir }) => {
            let mut dirs = cx.global.catalog.clone();
            dirs.extend(dir);
            check(&open_catalog(&dirs)?, cx)
        }
    }
}

fn kind(spec: &Spec) -> Json {
    json!(spec.kind)
}

fn reference(spec: &Spec) -> &'static str {
    if spec.reference.is_some() {
        "native"
    } else {
        "dataflow"
    }
}

fn list(catalog: &Catalog, cx: &Context<'_>) -> Result<u8, Failure> {
    let specs = catalog.list();
    if cx.out.json() {
        let rows: Vec<Json> = specs
            .iter()
            .map(|s| {
                json!({"name": s.name, "version": s.version, "kind": kind(s),
                       "digest": s.digest, "reference": reference(s), "tags": s.tags})
            })
            .collect();
        cx.out.document(json!({ "structures": rows }));
        return Ok(0);
    }
    cx.out.table(
        [
            "structure",
            "version",
            "tags",
            "reference",
            "digest",
            "summary",
        ],
        specs
            .iter()
            .map(|s| {
                [
                    s.name.clone(),
                    s.version.to_string(),
                    s.tags.join(" "),
                    reference(s).into(),
                    s.digest.chars().take(12).collect(),
                    s.summary.clone(),
                ]
            })
            .collect(),
    );
    Ok(0)
}

fn show(catalog: &Catalog, name: &str, cx: &Context<'_>) -> Result<u8, Failure> {
    let spec = match name.split_once('@') {
        None => catalog.get(name)?,
        Some((name, version)) => {
            let version = version.trim_start_matches('v').parse().map_err(|_| {
                Failure::usage(
                    format!("`{name}@{version}`: the version is not a whole number"),
                    "write NAME or NAME@VERSION",
                )
            })?;
            catalog.get_version(name, version)?
        }
    };
    let ports = |list: &[structures_catalog::spec::Port]| -> Vec<Json> {
        list.iter()
            .map(|p| {
                json!({"name": p.name, "dims": shape(&p.dims), "dtype": p.dtype,
                       "optional": p.optional, "repeat": p.repeat})
            })
            .collect()
    };
    let document = json!({
        "name": spec.name, "version": spec.version, "kind": kind(spec), "digest": spec.digest,
        "summary": spec.summary, "tags": spec.tags, "precedence": spec.precedence,
        "scheme": spec.scheme, "reference": reference(spec),
        "inputs": ports(&spec.inputs), "outputs": ports(&spec.outputs),
        "weights": spec.weights.iter().map(|w| json!({"slot": w.name, "dims": shape(&w.dims),
            "optional": w.optional, "repeat": w.repeat})).collect::<Vec<_>>(),
        "variants": spec.variants.iter().map(|(name, a)| (name.clone(), json!({
            "host": a.host, "values": a.values.keys().collect::<Vec<_>>(), "default": a.default,
        }))).collect::<serde_json::Map<_, _>>(),
        "points": spec.points,
        "spans": spec.dataflow.spans.iter().map(|s| json!({"name": s.name, "in": s.inputs,
            "out": s.outputs, "state": s.states})).collect::<Vec<_>>(),
        "gates": {"parity": spec.gates.parity, "baselines": spec.gates.baselines},
        "evidence": spec.evidence,
    });
    if cx.out.json() {
        cx.out.document(json!({ "structure": document }));
        return Ok(0);
    }
    cx.out.line(&format!(
        "{} version {} ({})",
        spec.name, spec.version, spec.digest
    ));
    cx.out.line(&spec.summary);
    for key in [
        "tags", "inputs", "outputs", "weights", "variants", "points", "spans", "gates",
    ] {
        cx.out.line(&format!("\n{key}"));
        match &document[key] {
            Json::Array(items) => items.iter().for_each(|i| cx.out.line(&format!("  {i}"))),
            Json::Object(map) => {
                map.iter()
                    .for_each(|(k, v)| cx.out.line(&format!("  {k}: {v}")));
            }
            other => cx.out.line(&format!("  {other}")),
        }
    }
    for line in &spec.evidence {
        cx.out.line(&format!("\n{line}"));
    }
    Ok(0)
}

fn shape(dims: &[structures_catalog::spec::DimExpr]) -> Vec<String> {
    dims.iter().map(ToString::to_string).collect()
}

fn check(catalog: &Catalog, cx: &Context<'_>) -> Result<u8, Failure> {
    let rows = verify(catalog);
    let failed = rows.iter().filter(|r| r.failure.is_some()).count();
    if cx.out.json() {
        let checks: Vec<Json> = rows
            .iter()
            .map(|r| {
                json!({"structure": r.name, "version": r.version, "combination": r.combination,
                       "native": r.native, "error": r.error, "ok": r.failure.is_none(),
                       "reason": r.failure})
            })
            .collect();
        cx.out
            .document(json!({ "checks": checks, "failed": failed }));
    } else {
        cx.out.table(
            [
                "structure",
                "version",
                "combination",
                "reference",
                "error",
                "result",
            ],
            rows.iter()
                .map(|r| {
                    [
                        r.name.clone(),
                        r.version.to_string(),
                        r.combination.clone(),
                        if r.native {
                            "native".into()
                        } else {
                            "dataflow only".into()
                        },
                        format!("{:.1e}", r.error),
                        r.failure.clone().unwrap_or_else(|| "ok".into()),
                    ]
                })
                .collect(),
        );
        cx.out
            .line(&format!("{} checks, {failed} failed", rows.len()));
    }
    Ok(if failed == 0 { 0 } else { 3 })
}
