//! `bindings list`, `bindings show`, `bindings validate`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{json, Map, Value as Json};
use structures::host::open_catalog;
use structures_bindings::{
    files_of, manifest::forbidden_key, read, Binding, BindingError, BindingFile, Bindings, Listed,
    Origin,
};
use structures_catalog::Catalog;

use super::Context;
use crate::args::BindingsAction;
use crate::failure::{rule, Failure};

/// See the module.
pub fn run(action: Option<BindingsAction>, cx: &Context<'_>) -> Result<u8, Failure> {
    let catalog = open_catalog(&cx.global.catalog)?;
    if let Some(BindingsAction::Validate {
        paths,
        require_coverage,
    }) = action
    {
        return validate(&paths, require_coverage, &catalog, cx);
    }
    let bindings = Bindings::open(&cx.binding_dirs()?, &catalog)?;
    match action {
        Some(BindingsAction::Show {
            name,
            require_coverage,
        }) => show(&bindings, &name, require_coverage, cx),
        Some(BindingsAction::List {
            structure: Some(name),
        }) => {
            catalog.get(&name)?;
            list(&bindings.list(Some(&name)), cx)
        }
        _ => list(&bindings.list(None), cx),
    }
}

fn list(all: &[Listed<'_>], cx: &Context<'_>) -> Result<u8, Failure> {
    if cx.out.json() {
        let rows: Vec<Json> = all.iter().map(row).collect();
        cx.out.document(json!({ "bindings": rows }));
        return Ok(0);
    }
    cx.out.table(
        ["binding", "kind", "structure", "coverage", "file"],
        all.iter()
            .map(|l| {
                [
                    l.name.into(),
                    l.binding.kind().into(),
                    match l.binding {
                        Binding::Family(f) => format!("for {}", f.model_types.join(", ")),
                        Binding::Region(_) | Binding::Pipeline(_) => about(&l.binding),
                    },
                    match l.binding {
                        Binding::Pipeline(p) if p.coverage_declared() => "complete".into(),
                        Binding::Pipeline(_) => "none".into(),
                        Binding::Region(_) | Binding::Family(_) => String::new(),
                    },
                    l.file.file.clone(),
                ]
            })
            .collect(),
    );
    Ok(0)
}

fn about(binding: &Binding<'_>) -> String {
    let structure = binding.structure();
    structure.map_or_else(String::new, |s| format!("{}@{}", s.name, s.version))
}

fn row(l: &Listed<'_>) -> Json {
    let mut row = Map::new();
    row.insert("name".into(), json!(l.name));
    row.insert("kind".into(), json!(l.binding.kind()));
    if let Some(s) = l.binding.structure() {
        row.insert("structure".into(), json!(s.name));
        row.insert("version".into(), json!(s.version));
        row.insert("pinned".into(), json!(s.pinned));
    }
    match l.binding {
        Binding::Pipeline(p) => {
            row.insert("coverage_declared".into(), json!(p.coverage_declared()));
        }
        Binding::Family(f) => {
            row.insert("model_types".into(), json!(f.model_types));
        }
        Binding::Region(_) => {}
    }
    row.insert("file".into(), json!(l.file.file));
    row.insert("built_in".into(), json!(l.file.origin == Origin::BuiltIn));
    Json::Object(row)
}

fn show(
    bindings: &Bindings,
    name: &str,
    require_coverage: bool,
    cx: &Context<'_>,
) -> Result<u8, Failure> {
    let manifest = bindings.load_binding(name, require_coverage)?.manifest();
    if let Some(path) = forbidden_key(&manifest) {
        let message = format!("binding `{name}`: {path} must not be in a manifest");
        return Err(Failure::failed(
            "key_forbidden",
            message,
            "this is a fault of the program: report it with the message",
        ));
    }
    if cx.out.json() {
        cx.out.document(json!({ "manifest": manifest }));
    } else {
        // A manifest is short and for machines and people alike.
        cx.out.lines(&format!("{manifest:#}"));
    }
    Ok(0)
}

/// What became of one file.
struct Checked {
    path: PathBuf,
    found: Result<BindingFile, BindingError>,
    note: Option<String>,
}

fn validate(
    paths: &[PathBuf],
    require_coverage: bool,
    catalog: &Catalog,
    cx: &Context<'_>,
) -> Result<u8, Failure> {
    let mut files: Vec<PathBuf> = Vec::new();
    for path in paths {
        let found = match path.is_dir() {
            true => files_of(path)?,
            false => vec![path.clone()],
        };
        if found.is_empty() {
            return Err(Failure::failed(
                "binding_unreadable",
                format!(
                    "{}: expected binding files, found no *.yaml",
                    path.display()
                ),
                "give the directory that holds them, or a file",
            ));
        }
        files.extend(
            found
                .into_iter()
                .filter(|f| !files.contains(f))
                .collect::<Vec<_>>(),
        );
    }
    let mut checked = check(files, require_coverage, catalog);
    let built_in = Bindings::built_in(catalog)?;
    for c in &mut checked {
        c.note = c
            .found
            .as_ref()
            .ok()
            .and_then(|file| note(file, &c.path, &built_in));
    }
    let failed = checked.iter().filter(|c| c.found.is_err()).count();
    if cx.out.json() {
        let rows: Vec<Json> = checked.iter().map(report).collect();
        cx.out
            .document(json!({ "bindings": rows, "failed": failed }));
    } else {
        for c in &checked {
            match &c.found {
                Ok(file) => cx
                    .out
                    .line(&format!("ok      {} ({})", c.path.display(), file.name)),
                // The message begins with the file.
                Err(e) => cx.out.lines(&format!("refused {e}")),
            }
            if let Some(note) = &c.note {
                cx.out.line(&format!("        {note}"));
            }
        }
        cx.out
            .line(&format!("{} files, {failed} refused", checked.len()));
    }
    Ok(u8::from(failed > 0))
}

/// Each file by itself, then their names against each other.
fn check(files: Vec<PathBuf>, require_coverage: bool, catalog: &Catalog) -> Vec<Checked> {
    let mut taken: BTreeMap<String, PathBuf> = BTreeMap::new();
    let mut all = Vec::new();
    for path in files {
        let found = read(&path, catalog).and_then(|file| {
            if require_coverage {
                file.require_coverage()?;
            }
            Ok(file)
        });
        let found = found.and_then(|file| {
            for (name, at) in file.names() {
                if let Some(other) = taken.insert(name.into(), path.clone()) {
                    return Err(BindingError::name_taken(
                        name,
                        at,
                        &other.display().to_string(),
                    ));
                }
            }
            Ok(file)
        });
        all.push(Checked {
            path,
            found,
            note: None,
        });
    }
    all
}

/// Whether the file could stand beside the built-in ones.
fn note(file: &BindingFile, path: &Path, built_in: &Bindings) -> Option<String> {
    let other = built_in.files().iter().find(|f| f.name == file.name)?;
    if file.replaces || other.document == file.document {
        return None;
    }
    Some(format!(
        "{} is built in under this name: with --bindings {} has to say `replaces: built-in` or be renamed",
        other.file,
        path.display()
    ))
}

fn report(c: &Checked) -> Json {
    let mut row = Map::new();
    row.insert("path".into(), json!(c.path.display().to_string()));
    row.insert("ok".into(), json!(c.found.is_ok()));
    match &c.found {
        Ok(file) => {
            row.insert("binding".into(), json!(file.name));
            row.insert("manifest".into(), file.body.manifest());
        }
        Err(e) => {
            row.insert("code".into(), json!(e.code()));
            row.extend(rule(e));
            row.insert("message".into(), json!(e.to_string()));
        }
    }
    if let Some(note) = &c.note {
        row.insert("note".into(), json!(note));
    }
    Json::Object(row)
}
