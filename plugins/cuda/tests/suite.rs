//! Every form on generated shapes against the catalog's references, the kernels running on the CPU.

#![allow(clippy::expect_used, clippy::unwrap_used)] // a test that panics has failed

mod common;

use std::collections::BTreeMap;
use std::sync::Mutex;

use structures_catalog::Catalog;
use structures_plugin_api::describe::FormDecl;
use structures_suite::{Executor, Loaded};

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

/// The fakes' settings are the process's.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn our_own_kernels_compute_what_their_structures_say() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    // Without the library the warpgroups are the best rung.
    std::env::set_var("FAKE_LT_NONE", "1");
    std::env::remove_var("FAKE_GPU_ARCH");
    judge(|_| true);
}

#[test]
fn tiles_of_warps_compute_it_where_there_are_no_warpgroups() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    std::env::set_var("FAKE_LT_NONE", "1");
    std::env::set_var("FAKE_GPU_ARCH", "89");
    judge(|form| form.structure == "linear_proj" && form.name != "w8a16_static");
}

#[test]
fn the_library_and_our_epilogues_compute_what_the_structures_say() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    std::env::remove_var("FAKE_LT_NONE");
    std::env::remove_var("FAKE_GPU_ARCH");
    // One form of each kind of operand and of epilogue: the rest is the library's.
    judge(|form| match form.structure.as_str() {
        "decoder_ffn" => form.name == "fp8_static",
        "linear_proj" => form.name == "bf16",
        structure => structure == "qkv_pack" && form.name == "fp8_static",
    });
}

fn judge(wanted: impl Fn(&FormDecl) -> bool) {
    let Some(fakes) = common::Fakes::built() else {
        return;
    };
    fakes.open();
    let plugin = Loaded::open(&library()).unwrap_or_else(|e| panic!("{e}"));
    let catalog = Catalog::builtin().expect("the built-in catalog loads");
    let forms: Vec<&FormDecl> = plugin
        .description()
        .forms
        .iter()
        .filter(|f| wanted(f))
        .collect();
    let mut rows = Vec::new();
    for form in &forms {
        let judged = structures_suite::judge::form(&plugin, &catalog, form);
        rows.extend(judged.unwrap_or_else(|e| panic!("{e}")));
    }
    let asked = forms.len();
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
    assert!(rows.len() > 10 * asked, "{} cases", rows.len());
}
