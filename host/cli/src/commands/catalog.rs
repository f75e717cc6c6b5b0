//! `catalog list`, `catalog show`, `catalog verify`.

use serde_json::{json, Value as Json};
use structures::host::open_catalog;
use structures_catalog::{verify, Catalog, CatalogError, Check, Kind, Spec};

use super::Context;
use crate::args::CatalogAction;
use crate::failure::{help_of, Failure};

/// See the module.
pub fn run(action: Option<CatalogAction>, cx: &Context<'_>) -> Result<u8, Failure> {
    match action {
        None | Some(CatalogAction::List) => list(&open_catalog(&cx.global.catalog)?, cx),
        Some(CatalogAction::Show { name }) => show(&open_catalog(&cx.global.catalog)?, &name, cx),
        Some(CatalogAction::Verify { dir }) => {
            let catalog = open_catalog(&cx.global.catalog)?;
            match dir {
                None => check(&catalog, &[], cx),
                Some(dir) => {
                    let (catalog, bad) = catalog.with_good_of(&dir)?;
                    check(&catalog, &bad, cx)
                }
            }
        }
    }
}

fn kind(spec: &Spec) -> Json {
    json!(spec.kind)
}

fn reference(spec: &Spec) -> &'static str {
    if spec.kind == Kind::StagePipeline {
        "host"
    } else if spec.reference.is_some() {
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
        let retired: Vec<Json> = catalog
            .retired()
            .map(|(name, version, note)| json!({"name": name, "version": version, "note": note}))
            .collect();
        cx.out
            .document(json!({ "structures": rows, "retired": retired }));
        return Ok(0);
    }
    cx.out.table(
        [
            "structure",
            "version",
            "kind",
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
                    kind(s).as_str().unwrap_or_default().into(),
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
    let spec = catalog.find(name)?;
    let ports = |list: &[structures_catalog::spec::Port]| -> Vec<Json> {
        list.iter()
            .map(|p| {
                let more: Vec<Vec<String>> = p.more.iter().map(|d| shape(d)).collect();
                json!({"name": p.name, "dims": shape(&p.dims), "alternatives": more,
                       "dtype": p.dtype, "optional": p.optional, "repeat": p.repeat})
            })
            .collect()
    };
    let mut document = json!({
        "name": spec.name, "version": spec.version, "kind": kind(spec), "digest": spec.digest,
        "summary": spec.summary, "tags": spec.tags, "precedence": spec.precedence,
        "scheme": spec.scheme, "reference": reference(spec),
        "inputs": ports(&spec.inputs), "outputs": ports(&spec.outputs),
        "weights": spec.weights.iter().map(|w| json!({"slot": w.name, "dims": shape(&w.dims),
            "optional": w.optional, "repeat": w.repeat})).collect::<Vec<_>>(),
        "variants": spec.variants.iter().map(|(name, a)| (name.clone(), json!({
            "host": a.host, "values": a.values.keys().collect::<Vec<_>>(), "default": a.default,
        }))).collect::<serde_json::Map<_, _>>(),
        "points": spec.points, "content": spec.content,
        "symbols": spec.symbols,
        "constraints": spec.constraints.iter().map(|c| json!({"that": c.that.to_string(),
            "when": c.when, "else": c.code})).collect::<Vec<_>>(),
        "spans": spec.dataflow.spans.iter().map(|s| json!({"name": s.name, "in": s.inputs,
            "out": s.outputs, "state": s.states})).collect::<Vec<_>>(),
        "gates": {"parity": spec.gates.parity, "baselines": spec.gates.baselines},
        "evidence": spec.evidence,
    });
    if let Some(pipeline) = &spec.pipeline {
        document = json!({
            "name": spec.name, "version": spec.version, "kind": kind(spec), "digest": spec.digest,
            "summary": spec.summary, "tags": spec.tags, "reference": reference(spec),
            "family": pipeline.family, "stages": pipeline.stages,
            "embedded_regions": pipeline.embedded, "state_regions": pipeline.state_regions,
            "cadence_substructures": pipeline.cadence_substructures,
            "conformance": pipeline.conformance,
            "gates": {"parity": spec.gates.parity, "baselines": spec.gates.baselines},
            "evidence": spec.evidence,
        });
    }
    if cx.out.json() {
        cx.out.document(json!({ "structure": document }));
        return Ok(0);
    }
    cx.out.line(&format!(
        "{} version {} ({})",
        spec.name, spec.version, spec.digest
    ));
    cx.out.lines(&spec.summary);
    for key in [
        "tags",
        "inputs",
        "outputs",
        "weights",
        "symbols",
        "constraints",
        "variants",
        "points",
        "content",
        "spans",
        "family",
        "stages",
        "embedded_regions",
        "state_regions",
        "cadence_substructures",
        "conformance",
        "gates",
    ] {
        // Of the keys above, an entry has those of its kind.
        let Some(value) = document.get(key) else {
            continue;
        };
        cx.out.line("");
        cx.out.line(key);
        match value {
            Json::Array(items) => items.iter().for_each(|i| cx.out.line(&format!("  {i}"))),
            Json::Object(map) => {
                map.iter()
                    .for_each(|(k, v)| cx.out.line(&format!("  {k}: {v}")));
            }
            other => cx.out.line(&format!("  {other}")),
        }
    }
    for line in &spec.evidence {
        cx.out.line("");
        cx.out.line(line);
    }
    Ok(0)
}

fn shape(dims: &[structures_catalog::spec::DimExpr]) -> Vec<String> {
    dims.iter().map(ToString::to_string).collect()
}

fn check(catalog: &Catalog, bad: &[CatalogError], cx: &Context<'_>) -> Result<u8, Failure> {
    let rows = verify(catalog);
    let failed = rows.iter().filter(|r| r.failure.is_some()).count() + bad.len();
    if cx.out.json() {
        let checks: Vec<Json> = rows
            .iter()
            .map(|r| {
                json!({"structure": r.name, "version": r.version, "check": r.check,
                       "combination": r.combination, "native": r.native, "error": r.error,
                       "ok": r.failure.is_none(), "reason": r.failure})
            })
            .collect();
        let mut document = json!({"checks": checks, "failed": failed,
            "errors": bad.iter().map(fault).collect::<Vec<_>>()});
        // The form every failure has, for those that read nothing else.
        if let Some(first) = bad.first() {
            document["error"] = fault(first);
        }
        cx.out.document(document);
    } else {
        cx.out.table(
            [
                "structure",
                "version",
                "check",
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
                        json!(r.check).as_str().unwrap_or_default().into(),
                        r.combination.clone(),
                        match (r.check, r.native) {
                            (Check::Dataflow, true) => "native".into(),
                            (Check::Dataflow, false) => "dataflow only".into(),
                            _ => String::new(),
                        },
                        match r.check {
                            Check::Dataflow => format!("{:.1e}", r.error),
                            _ => String::new(),
                        },
                        r.failure.clone().unwrap_or_else(|| "ok".into()),
                    ]
                })
                .collect(),
        );
        for e in bad {
            cx.out.lines(&format!("{}: {e}", e.code()));
        }
        let all = rows.len() + bad.len();
        cx.out.line(&format!("{all} checks, {failed} failed"));
    }
    Ok(u8::from(failed > 0))
}

// A bad entry, in the words of every other failure, with its place.
fn fault(e: &CatalogError) -> Json {
    let place = e.place();
    json!({"code": e.code(), "message": e.to_string(), "help": help_of(e.code()),
           "file": place.map(|p| &p.file), "line": place.map(|p| p.line),
           "column": place.map(|p| p.column)})
}
