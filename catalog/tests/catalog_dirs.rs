//! Directories of entries: names, versions, retirement.

use std::fs;
use std::path::Path;

use structures_catalog::{Catalog, CatalogError};

fn document(name: &str, version: u32) -> String {
    format!(
        "name: {name}\nversion: {version}\nboundary:\n  inputs: [{{name: x, dims: [M, K]}}]\n  outputs: [{{name: y, dims: [M, N]}}]\n\
         weights: {{w: [K, N]}}\ngates: {{parity: [cosine]}}\n\
         slots:\n  at: module\n  roles: {{q: q}}\n  weights: {{w: {{from: q.weight, layout: out_in}}}}\n\
         dataflow:\n  spans: {{s: {{in: [x], out: [y]}}}}\n  ops: [{{let: y, op: linear, in: [x, w]}}]\n"
    )
}

fn write(dir: &Path, file: &str, text: &str) {
    let path = dir.join(file);
    fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
    fs::write(path, text).expect("write");
}

fn with(files: &[(&str, &str)]) -> Result<Catalog, CatalogError> {
    let dir = tempfile::tempdir().expect("tempdir");
    for (file, text) in files {
        write(dir.path(), file, text);
    }
    Catalog::builtin().expect("built-in").with_dir(dir.path())
}

fn refused(files: &[(&str, &str)], code: &str, says: &str) {
    match with(files) {
        Ok(_) => panic!("{files:?} was accepted"),
        Err(e) => assert!(
            e.code() == code && e.to_string().contains(says),
            "{}: {e}",
            e.code()
        ),
    }
}

#[test]
fn a_structure_as_data() {
    let catalog = with(&[("mine/structure.yaml", &document("mine", 3))]).expect("loads");
    let spec = catalog.get("mine").expect("mine");
    assert!(spec.version == 3 && spec.reference.is_none() && spec.digest.len() == 64);
    assert!(catalog.names().contains(&"mine") && catalog.names().is_sorted());
    assert!(structures_catalog::verify::verify_spec(spec)
        .iter()
        .all(|r| r.failure.is_none()));
}

#[test]
fn versions_live_side_by_side() {
    let retired = "- {version: 1, note: use version 2 with the bias folded in}\n";
    let catalog = with(&[
        ("mine/structure.yaml", &document("mine", 3)),
        ("mine/v2/structure.yaml", &document("mine", 2)),
        ("mine/retired.yaml", retired),
    ])
    .expect("loads");
    assert_eq!(catalog.get("mine").map(|s| s.version).ok(), Some(3));
    assert_eq!(
        catalog.get_version("mine", 2).map(|s| s.version).ok(),
        Some(2)
    );
    let e = catalog.get_version("mine", 1).expect_err("retired");
    assert_eq!(e.code(), "entry_retired");
    assert!(e.to_string().contains("use version 2"), "{e}");
    let e = catalog.get_version("mine", 9).expect_err("unknown");
    assert!(
        e.code() == "entry_unknown" && e.to_string().contains("mine@2, mine@3"),
        "{e}"
    );
    let e = catalog.get("mien").expect_err("unknown");
    assert!(
        e.code() == "entry_unknown" && e.to_string().contains("nearest: mine"),
        "{e}"
    );
}

#[test]
fn a_structure_with_only_retired_versions() {
    let catalog =
        with(&[("gone/retired.yaml", "- {version: 1, note: see mine}\n")]).expect("loads");
    let e = catalog.get("gone").expect_err("retired");
    assert!(
        e.code() == "entry_retired" && e.to_string().contains("see mine"),
        "{e}"
    );
}

#[test]
fn a_directory_that_lies() {
    refused(
        &[("other/structure.yaml", &document("mine", 1))],
        "entry_name_mismatch",
        "1:7: the entry is stored as `other` and calls itself `mine`",
    );
    refused(
        &[("mine/v2/structure.yaml", &document("mine", 3))],
        "entry_invalid",
        "stored under v2, found version 3",
    );
    refused(
        &[
            ("mine/structure.yaml", &document("mine", 2)),
            ("mine/v2/structure.yaml", &document("mine", 2)),
        ],
        "entry_invalid",
        "version 2 of `mine` is there twice",
    );
    refused(
        &[("mine/structure.yaml", "name: [\n")],
        "entry_invalid",
        "structure.yaml:2:",
    );
    refused(
        &[("mine/retired.yaml", "- {version: 1}\n")],
        "entry_invalid",
        "`note` is missing",
    );
    let e = Catalog::default()
        .with_dir(Path::new("/nowhere/at/all"))
        .expect_err("no directory");
    assert!(
        e.code() == "entry_unreadable" && e.to_string().contains("/nowhere/at/all"),
        "{e}"
    );
    let big = format!("# {}\n", "x".repeat(1 << 20));
    refused(
        &[("mine/structure.yaml", &big)],
        "entry_invalid",
        "at most 1048576",
    );
}

#[test]
fn a_built_in_name_needs_a_higher_version() {
    let built_in = Catalog::builtin().expect("built-in");
    let first = built_in.list()[0];
    let (name, version) = (first.name.clone(), first.version);
    let file = format!("{name}/structure.yaml");
    refused(
        &[(&file, &document(&name, version))],
        "entry_invalid",
        "a version above it is needed",
    );
    let catalog = with(&[(&file, &document(&name, version + 1))]).expect("higher");
    assert_eq!(
        catalog.get(&name).map(|s| s.version).ok(),
        Some(version + 1)
    );
    assert!(catalog.get_version(&name, version).is_ok());
}

#[test]
fn a_digest_is_of_the_bytes() {
    let digest = |text: &str| {
        let catalog = Catalog::default()
            .with_document("mine", "mine", text)
            .expect("loads");
        catalog.get("mine").expect("mine").digest.clone()
    };
    let text = document("mine", 1);
    assert_eq!(digest(&text), digest(&text));
    assert_ne!(digest(&text), digest(&format!("{text}# a comment\n")));
}

/// The example of docs/structure-grammar.md is a real entry.
#[test]
fn the_documented_example_works() {
    let text = include_str!("../../docs/structure-grammar.md");
    let start = text.find("```yaml\nname: ").expect("an example") + "```yaml\n".len();
    let end = start + text[start..].find("```").expect("its end");
    let catalog = with(&[("scaled_proj/structure.yaml", &text[start..end])]).expect("loads");
    let spec = catalog.get("scaled_proj").expect("scaled_proj");
    let rows = structures_catalog::verify::verify_spec(spec);
    assert!(rows.iter().all(|r| r.failure.is_none()), "{rows:?}");
}
