//! Names: asked for, taken twice, replaced.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::path::Path;

use structures_bindings::{BindingError, Bindings, Origin, Rule};
use structures_catalog::Catalog;
use tempfile::TempDir;

fn directory(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn open(dirs: &[&Path]) -> Result<Bindings, BindingError> {
    let dirs: Vec<_> = dirs.iter().map(|d| d.to_path_buf()).collect();
    Bindings::open(&dirs, &Catalog::builtin().unwrap())
}

const MINE: &str = "binding: mine\nstructure: decoder_ffn\ndims: {D: 8, F: 16, layers: 2}\n";
const FAMILY: &str = "binding: mine\nmodel_types: [m]\nregions:\n  - binding: mine_head\n    structure: linear_proj\n    \
    dims: {layers: 1, K: 4}\n    weights_map: {transformers: {layout: out_in, w: a.w}}\n    \
    hosts: {transformers: {module_path: a}}\n";

#[test]
fn a_users_directory_stands_beside_the_built_in_one() {
    let dir = directory(&[("mine.yaml", MINE), ("README.md", "not read")]);
    let bindings = open(&[dir.path()]).unwrap();
    let built_in = open(&[]).unwrap();
    assert_eq!(bindings.files().len(), built_in.files().len() + 1);
    assert!(bindings.files().is_sorted_by_key(|f| f.name.clone()));
    let mine = bindings.files().iter().find(|f| f.name == "mine").unwrap();
    assert_eq!(mine.origin, Origin::User);
    assert_eq!(&*mine.document, MINE);
    assert!(
        bindings.load_binding("mine", true).is_ok(),
        "a region has no coverage to ask for"
    );
}

#[test]
fn two_files_of_one_name_are_refused_naming_both() {
    let (a, b) = (
        directory(&[("mine.yaml", MINE)]),
        directory(&[("mine.yaml", MINE)]),
    );
    let e = open(&[a.path(), b.path()]).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::NameTwice));
    for dir in [&a, &b] {
        let file = dir.path().join("mine.yaml").display().to_string();
        assert!(e.to_string().contains(&file), "{e}");
    }
    // A region of a family takes a name too.
    let head = MINE.replace("binding: mine\n", "binding: mine_head\n");
    let c = directory(&[("mine.yaml", FAMILY), ("mine_head.yaml", &head)]);
    let e = open(&[c.path()]).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::NameTwice), "{e}");
}

#[test]
fn a_built_in_name_is_replaced_on_purpose_or_not_at_all() {
    let llama = FAMILY.replace("binding: mine", "binding: llama");
    let dir = directory(&[("llama.yaml", &llama)]);
    let e = open(&[dir.path()]).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::Replaces));
    for fact in ["bindings/llama.yaml", "replaces: built-in"] {
        assert!(e.to_string().contains(fact), "{e}");
    }
    let on_purpose = format!("replaces: built-in\n{llama}");
    let dir = directory(&[("llama.yaml", &on_purpose)]);
    let bindings = open(&[dir.path()]).unwrap();
    assert_eq!(bindings.files().len(), open(&[]).unwrap().files().len());
    assert!(
        bindings.for_model_type("llama").is_empty(),
        "the built-in one is gone"
    );
    assert_eq!(bindings.for_model_type("m").len(), 1);
    // Twice is a collision again.
    let again = directory(&[("llama.yaml", &on_purpose)]);
    let e = open(&[dir.path(), again.path()]).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::Replaces), "{e}");
    let nothing = directory(&[("mine.yaml", &format!("replaces: built-in\n{MINE}"))]);
    let e = open(&[nothing.path()]).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::Replaces), "{e}");
    // A built-in region's name inside another family.
    let head = FAMILY.replace("mine_head", "llama_head");
    let e = open(&[directory(&[("mine.yaml", &head)]).path()]).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::NameTwice), "{e}");
}

#[test]
fn a_name_that_is_not_there_names_those_near_it() {
    let bindings = open(&[]).unwrap();
    let e = bindings.load_binding("qwen3_8c", false).unwrap_err();
    assert_eq!(e.code(), "binding_unknown");
    assert!(e.to_string().contains("qwen3_8b"), "{e}");
    // A bad name is not there either (V-02); it never becomes a path.
    for bad in [
        "../qwen3_8b",
        "Qwen3_8b",
        "",
        "a/b",
        "bindings/qwen3_8b.yaml",
    ] {
        let e = bindings.load_binding(bad, false).unwrap_err();
        assert_eq!(e.code(), "binding_unknown", "{bad}");
    }
}

#[test]
fn directories_and_files_that_cannot_be_read() {
    let e = open(&[Path::new("/nowhere/at/all")]).unwrap_err();
    assert_eq!(e.code(), "binding_unreadable");
    let e = open(&[directory(&[("mine.yml", MINE)]).path()]).unwrap_err();
    assert_eq!(e.code(), "binding_unreadable");
    assert!(e.to_string().contains("rename it"), "{e}");
    let dir = directory(&[]);
    std::fs::create_dir(dir.path().join("mine.yaml")).unwrap();
    let e = open(&[dir.path()]).unwrap_err();
    assert_eq!(e.code(), "binding_unreadable", "{e}");
}

#[test]
fn a_file_is_stored_under_its_own_name() {
    let e = open(&[directory(&[("other.yaml", MINE)]).path()]).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::NameMismatch));
    assert!(
        e.to_string().contains("`other`") && e.to_string().contains("`mine`"),
        "{e}"
    );
    let at = e.place().unwrap();
    assert_eq!((at.line, at.column), (1, 10));
}
