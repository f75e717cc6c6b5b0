//! `discover`: seams and refusals, from headers only.

use std::io::Read;
use std::path::Path;

use serde_json::{json, Value as Json};
use structures::receipt::RefusalNote;
use structures::sites;
use structures_bindings::Bindings;
use structures_catalog::{Catalog, Kind};
use structures_graph::{regular, ModuleTree};
use structures_models::{Checkpoint, Description, ModelError};
use structures_seams::Seam;

use super::{model_path, Context};
use crate::args::DiscoverArgs;
use crate::failure::Failure;

/// See the module.
pub fn run(args: &DiscoverArgs, cx: &Context<'_>) -> Result<u8, Failure> {
    let catalog = structures::host::open_catalog(&cx.global.catalog)?;
    for name in &args.structures {
        catalog.get(name)?;
    }
    // Why a model that could be looked at cannot be run.
    let mut not_run: Option<String> = None;
    let mut unsought = Vec::new();
    let mut notes = Vec::new();
    let (seams, refused) = match (&args.model, &args.tree) {
        (_, Some(tree)) => {
            unsought = in_graphs_only(&catalog, &args.structures);
            readable(tree)?;
            let tree = ModuleTree::from_dump_file(tree)?;
            sites::discover_tree(&catalog, &tree, &args.structures)
        }
        (Some(model), None) => {
            let path = model_path(model)?;
            let description = match Description::open(&path) {
                Ok(description) => description,
                Err(e) => {
                    // Of a model that no family here runs, the headers still show the modules.
                    let tree = outline(&path, e, &mut not_run)?;
                    let (seams, refused) = sites::discover_tree(&catalog, &tree, &args.structures);
                    let unsought = in_graphs_only(&catalog, &args.structures);
                    report(&seams, &refused, &unsought, &notes, not_run.as_deref(), cx);
                    return Ok(0);
                }
            };
            notes.clone_from(&description.config.notes);
            let bindings = Bindings::open(&cx.binding_dirs()?, &catalog)?;
            let survey = structures::host::survey_phases(
                &catalog,
                &bindings,
                &description,
                &args.structures,
            )?;
            let seams = survey.sites.into_iter().map(|s| s.seam).collect();
            (seams, survey.refused)
        }
        (None, None) => return Err(Failure::usage("no model", "give MODEL or --tree FILE")),
    };
    report(&seams, &refused, &unsought, &notes, None, cx);
    Ok(0)
}

/// Structures that no tree shows: they are found by their operation in a graph.
fn in_graphs_only(catalog: &Catalog, only: &[String]) -> Vec<String> {
    let regions = catalog.newest().into_iter();
    regions
        .filter(|s| s.kind == Kind::Region && (only.is_empty() || only.contains(&s.name)))
        .filter(|s| s.slots.as_ref().is_none_or(|slots| !slots.at_module))
        .map(|s| s.name.clone())
        .collect()
}

/// The module tree of a checkpoint that is sound and that nothing here runs; any other fault stays one.
fn outline(
    path: &Path,
    fault: ModelError,
    not_run: &mut Option<String>,
) -> Result<ModuleTree, Failure> {
    let opened = Checkpoint::open(path).or_else(|_| Checkpoint::open_headers(path));
    let Ok(checkpoint) = opened else {
        return Err(fault.into());
    };
    let cannot = matches!(fault, ModelError::Unsupported(_) | ModelError::Codec(_));
    let unknown = cannot || checkpoint.kind().is_none();
    if !unknown {
        return Err(fault.into());
    }
    checkpoint.agrees_with_config()?;
    *not_run = Some(fault.to_string());
    Ok(checkpoint.outline())
}

const NEEDS_GRAPH: &str =
    "it is found by its operation in a graph of the model, and there is only a tree";

fn report(
    seams: &[Seam],
    refused: &[RefusalNote],
    unsought: &[String],
    notes: &[String],
    not_run: Option<&str>,
    cx: &Context<'_>,
) {
    if cx.out.json() {
        let mut document = json!({ "seams": seams, "refused": refused });
        if !unsought.is_empty() {
            let rows = unsought.iter();
            let rows =
                rows.map(|s| json!({"structure": s, "code": "needs_graph", "reason": NEEDS_GRAPH}));
            document["not_looked_for"] = rows.collect();
        }
        if !notes.is_empty() {
            document["notes"] = json!(notes);
        }
        if let Some(why) = not_run {
            document["executable"] = json!(false);
            document["not_executable"] = json!({ "code": "unsupported", "reason": why });
        }
        cx.out.document(document);
        return;
    }
    print(seams, refused, cx);
    if !unsought.is_empty() {
        let names = unsought.join(", ");
        cx.out
            .line(&format!("not looked for: {names}: {NEEDS_GRAPH}"));
    }
    for note in notes {
        cx.out.line(&format!("note: {note}"));
    }
    if let Some(why) = not_run {
        cx.out.line(&format!("cannot be executed: {why}"));
    }
}

/// A file that cannot be read is no damaged tree.
fn readable(tree: &Path) -> Result<(), Failure> {
    let read = regular::open(tree).and_then(|(mut f, _)| f.read(&mut [0]));
    read.map(|_| ()).map_err(|e| {
        Failure::failed(
            "io",
            format!("--tree {}: cannot read it: {e}", tree.display()),
            "give the file that a tree dump wrote, plain JSON or .gz",
        )
    })
}

fn print(seams: &[Seam], refused: &[RefusalNote], cx: &Context<'_>) {
    // One line a family: thirty equal layers are one fact.
    let mut families: Vec<(String, Vec<&Seam>)> = Vec::new();
    for seam in seams {
        let key = format!(
            "{} {} {:?} {:?}",
            seam.structure, seam.family, seam.dims, seam.variant
        );
        match families.iter_mut().find(|(k, _)| *k == key) {
            Some((_, list)) => list.push(seam),
            None => families.push((key, vec![seam])),
        }
    }
    let pairs = |v: Json| match v {
        Json::Object(map) => map
            .iter()
            .map(|(k, v)| format!("{k}={}", v.to_string().trim_matches('"')))
            .collect::<Vec<_>>()
            .join(" "),
        _ => String::new(),
    };
    cx.out.table(
        [
            "structure",
            "where",
            "seams",
            "dims",
            "variant",
            "source",
            "spans",
        ],
        families
            .iter()
            .map(|(_, list)| {
                let s = list[0];
                [
                    s.structure.clone(),
                    s.family.clone(),
                    list.len().to_string(),
                    pairs(json!(s.dims)),
                    pairs(json!(s.variant)),
                    json!(s.source).as_str().unwrap_or("").to_string(),
                    if s.located {
                        s.spans.join(" ")
                    } else {
                        "not located".into()
                    },
                ]
            })
            .collect(),
    );
    let mut assumed: Vec<String> = seams
        .iter()
        .flat_map(|s| {
            let texts = s.assumptions.iter();
            texts.map(|a| without_numbers(&s.path, &a.text))
        })
        .collect();
    assumed.sort_unstable();
    assumed.dedup();
    for text in assumed {
        cx.out.line(&format!("assumed: {text}"));
    }
    if refused.is_empty() {
        cx.out.line("nothing was passed over");
        return;
    }
    cx.out.line(&format!("passed over: {}", refused.len()));
    let mut reasons: Vec<(String, usize, &str)> = Vec::new();
    for r in refused {
        // The same in every layer is one fact.
        let key = format!(
            "{} {}: {}",
            r.structure,
            r.code,
            without_numbers(&r.path, &r.reason)
        );
        match reasons.iter_mut().find(|(k, _, _)| *k == key) {
            Some((_, n, _)) => *n += 1,
            None => reasons.push((key, 1, &r.path)),
        }
    }
    for (reason, n, first) in reasons {
        cx.out.line(&format!("  {n} x {reason} (first: {first})"));
    }
}

/// A reason with the candidate's own path, and the paths around it, as their family.
fn without_numbers(path: &str, reason: &str) -> String {
    let mut parts: Vec<&str> = path.split('.').collect();
    let mut text = reason.to_string();
    while parts.iter().any(|p| p.parse::<u64>().is_ok()) {
        let here = parts.join(".");
        let (family, _) = structures_graph::tree::family_template(&here);
        text = text.replace(&here, &family);
        parts.pop();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_fold_into_one_reason() {
        let of = |i: u32| {
            let reason = format!("`m.layers.{i}.mlp` is 3 wide, `m.layers.{i}.norm` is 4");
            without_numbers(&format!("m.layers.{i}.mlp"), &reason)
        };
        assert_eq!(
            of(1),
            "`m.layers.{i}.mlp` is 3 wide, `m.layers.{i}.norm` is 4"
        );
        assert_eq!(of(1), of(27));
    }
}
