//! A runner is one call: the built library, the ignore list beside it, everything judged.

#![allow(dead_code, clippy::expect_used)] // each test binary uses its part; a test that panics has failed

use std::path::{Path, PathBuf};

use structures_catalog::Catalog;
use structures_suite::{judge_all, Executor, Ignores, Loaded, Row};

/// The library that the build left in the target directory.
pub fn built(id: &str) -> Loaded {
    let file = format!("libstructures_plugin_{id}.so");
    let exe = std::env::current_exe().expect("the running program has a path");
    let path = exe
        .ancestors()
        .map(|dir| dir.join(&file))
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("{file} is not built; run `cargo build --release --workspace`"));
    Loaded::open(&path).unwrap_or_else(|e| panic!("{e}"))
}

/// Failing cases that are told one by one.
const SHOWN: usize = 60;

/// Judges the plugin and holds it to its ignore list.
pub fn run(id: &str) {
    let catalog = Catalog::builtin().expect("the built-in catalog loads");
    let plugin = built(id);
    let rows = judge_all(&plugin, &catalog).unwrap_or_else(|e| panic!("{e}"));
    summary(&rows);
    if let Some(wanted) = std::env::var_os("STRUCTURES_SUITE_ROWS") {
        // Every row of one structure, or of all.
        let wanted = wanted.to_string_lossy();
        for row in rows
            .iter()
            .filter(|row| wanted == "all" || wanted == row.structure)
        {
            println!("{row}");
        }
    }
    let list: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("ignore/{id}.txt"));
    let ignores = Ignores::read(&list).unwrap_or_else(|e| panic!("{e}"));
    let (unexpected, idle) = ignores.split(&rows);
    let told: Vec<String> = unexpected.iter().map(ToString::to_string).collect();
    let idle: Vec<String> = idle
        .iter()
        .map(|i| {
            format!(
                "{}:{}: no failing case needs this line",
                list.display(),
                i.line
            )
        })
        .collect();
    assert!(
        told.is_empty() && idle.is_empty(),
        "{} of {} cases fail and are not listed:\n{}\n{}",
        told.len(),
        rows.len(),
        told[..told.len().min(SHOWN)].join("\n"),
        idle.join("\n")
    );
    assert!(
        rows.len() >= plugin.description().forms.len(),
        "every form has a case"
    );
}

/// One line a form and span: cases, failures, the worst error of those that passed.
pub fn summary(rows: &[Row]) {
    let mut keys: Vec<(&str, u32, &str, &str)> = rows
        .iter()
        .map(|r| {
            (
                r.structure.as_str(),
                r.version,
                r.form.as_str(),
                r.span.as_str(),
            )
        })
        .collect();
    keys.sort_unstable();
    keys.dedup();
    for key in keys {
        let own = |r: &&Row| {
            (
                r.structure.as_str(),
                r.version,
                r.form.as_str(),
                r.span.as_str(),
            ) == key
        };
        let cases = rows.iter().filter(own).count();
        let passed: Vec<&Row> = rows.iter().filter(own).filter(|r| r.passed()).collect();
        let worst = passed.iter().filter_map(|r| r.error).fold(0.0, f64::max);
        println!(
            "{} v{} {} {}: {} of {cases} pass, worst {worst:.1e}",
            key.0,
            key.1,
            key.2,
            key.3,
            passed.len()
        );
    }
}
