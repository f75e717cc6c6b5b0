//! Every form on generated shapes against the catalog's references, the kernels running on the CPU.

#![allow(clippy::expect_used, clippy::unwrap_used)] // a test that panics has failed

mod common;

use std::collections::BTreeMap;

use structures_catalog::Catalog;
use structures_suite::{judge_all, Executor, Loaded};

/// The library that the build left in the target directory.
fn library() -> std::path::PathBuf {
    let exe = std::env::current_exe().expect("a path");
    let file = "libstructures_plugin_cuda.so";
    let found = exe
        .ancestors()
        .map(|dir| dir.join(file))
        .find(|p| p.is_file());
    found.unwrap_or_else(|| panic!("{file} is not built; run `cargo build --release --workspace`"))
}

#[test]
fn our_own_kernels_compute_what_their_structures_say() {
    // Without the library the tiles are the best rung.
    std::env::set_var("FAKE_LT_NONE", "1");
    judge();
}

#[test]
fn the_library_and_our_epilogues_compute_what_the_structures_say() {
    std::env::remove_var("FAKE_LT_NONE");
    judge();
}

fn judge() {
    let Some(fakes) = common::Fakes::built() else {
        return;
    };
    fakes.open();
    let plugin = Loaded::open(&library()).unwrap_or_else(|e| panic!("{e}"));
    let catalog = Catalog::builtin().expect("the built-in catalog loads");
    let rows = judge_all(&plugin, &catalog).unwrap_or_else(|e| panic!("{e}"));
    let mut forms: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    for row in &rows {
        let (cases, worst) = forms
            .entry(format!("{} {} {}", row.structure, row.form, row.span))
            .or_default();
        *cases += 1;
        *worst = worst.max(row.error.unwrap_or(0.0));
    }
    for (form, (cases, worst)) in &forms {
        println!("{form}: {cases} cases, worst {worst:.1e}");
    }
    let failed: Vec<String> = rows
        .iter()
        .filter(|r| !r.passed())
        .map(ToString::to_string)
        .collect();
    assert!(
        failed.is_empty(),
        "{} of {} cases fail:\n{}",
        failed.len(),
        rows.len(),
        failed[..failed.len().min(40)].join("\n")
    );
    assert!(
        rows.len() > 10 * plugin.description().forms.len(),
        "{} cases",
        rows.len()
    );
}
