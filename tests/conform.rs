//! `conform` through the program: good plugins pass untouched, each bad fixture fails exactly its own checks.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use structures_fixture_plugin::{c_compiler, c_fixture, c_fixture_with, fixture_copy, Fault};
use structures_tests::{build_dir, json, structures};

fn conform(plugin: &Path, more: &[&str]) -> (i32, Json) {
    let empty = tempfile::tempdir().unwrap();
    let mut command = structures(empty.path());
    command.arg("conform").arg(plugin).args(more);
    let (exit, document, log) = json(&mut command);
    assert!(document["checks"].is_array(), "{document:#}\n{log}");
    (exit, document)
}

/// Names of the checks that failed, each with its code.
fn failed(document: &Json) -> BTreeSet<(String, String)> {
    let rows = document["checks"].as_array().unwrap().iter();
    rows.filter(|r| r["outcome"] == "fail")
        .map(|r| {
            let text = |key: &str| r[key].as_str().unwrap_or("-").to_string();
            (text("name"), text("code"))
        })
        .collect()
}

fn fails_exactly(plugin: &Path, expected: &[(&str, &str)], more: &[&str]) -> Json {
    let (exit, document) = conform(plugin, more);
    let expected: BTreeSet<(String, String)> = expected
        .iter()
        .map(|(name, code)| ((*name).to_string(), (*code).to_string()))
        .collect();
    let file = plugin.display();
    assert_eq!(failed(&document), expected, "{file}: {document:#}");
    assert_eq!(exit, if expected.is_empty() { 0 } else { 3 }, "{file}");
    document
}

fn built(id: &str) -> PathBuf {
    build_dir().join(format!("libstructures_plugin_{id}.so"))
}

#[test]
fn the_c_sample_and_the_fixtures_without_a_fault_conform() {
    fails_exactly(&built("c_sample"), &[], &[]);
    let dir = tempfile::tempdir().unwrap();
    fails_exactly(&c_fixture(dir.path(), "good", &[]), &[], &[]);
    let longer = c_fixture(dir.path(), "longer", &["LONGER"]);
    fails_exactly(&longer, &[], &["--cases", "8"]);
}

#[test]
fn the_x86_plugin_conforms_where_it_loads() {
    let (_, document) = conform(&built("x86"), &["--replay", "load:0"]);
    if failed(&document).contains(&("load".into(), "arch_not_declared".into())) {
        eprintln!("skipped: this machine is not one that x86 declares");
        return;
    }
    fails_exactly(&built("x86"), &[], &[]);
}

#[test]
fn the_portable_plugin_conforms() {
    let document = fails_exactly(&built("portable"), &[], &["--cases", "12"]);
    let rows = document["checks"].as_array().unwrap();
    let forms: BTreeSet<&str> = rows.iter().filter_map(|r| r["form"].as_str()).collect();
    assert!(forms.len() >= 22, "{forms:?}");
    let passed = document["summary"]["passed"].as_u64().unwrap();
    assert!(passed as usize >= 10 * forms.len(), "{passed}");
}

/// Name, flags of the C fixture, and the checks that must fail with their codes. Nothing else may.
type Bad = (
    &'static str,
    &'static [&'static str],
    &'static [(&'static str, &'static str)],
);

const BAD: &[Bad] = &[
    ("beyond", &["BEYOND"], &[("outputs", "written_beyond")]),
    ("half", &["HALF"], &[("outputs", "output_unwritten")]),
    ("adds", &["ADDS"], &[("outputs", "output_unwritten")]),
    (
        "writes_input",
        &["WRITES_INPUT"],
        &[("outputs", "input_changed")],
    ),
    ("scaled", &["SCALE=1.01f"], &[("parity", "parity")]),
    ("noise", &["NOISE"], &[("determinism", "not_deterministic")]),
    ("shared", &["SHARED"], &[("concurrency", "raced")]),
    (
        "edge_crash",
        &["EDGE_CRASH"],
        &[("band", "conform_crashed")],
    ),
    ("edge_wrong", &["EDGE_WRONG"], &[("band", "band_wrong")]),
    ("no_band", &["NO_BAND"], &[("band", "band_exceeded")]),
    ("exits", &["EXITS"], &[("launch", "conform_ended")]),
    ("forks", &["FORKS"], &[("launch", "left_processes")]),
    ("forges", &["FORGES"], &[("launch", "conform_ended")]),
    (
        "null_crash",
        &["NULL_CRASH"],
        &[("null_arguments", "conform_crashed")],
    ),
    (
        "null_yes",
        &["NULL_YES"],
        &[("null_arguments", "argument_accepted")],
    ),
    (
        "trusts",
        &["TRUSTS"],
        &[
            ("absurd_arguments", "conform_crashed"),
            ("mutation", "conform_crashed"),
        ],
    ),
    (
        "flag_crash",
        &["FLAG_CRASH"],
        &[("mutation", "conform_crashed")],
    ),
    ("refuses", &["REFUSES"], &[("launch", "bind_refused")]),
    (
        "fails",
        &["FAIL_STATUS=STRUCTURES_STATUS_FAILED"],
        &[("launch", "call_failed")],
    ),
    (
        "panics",
        &["FAIL_STATUS=STRUCTURES_STATUS_PANICKED"],
        &[("launch", "call_failed")],
    ),
    (
        "says_yes",
        &["SAYS_YES"],
        &[("bogus_ids", "id_accepted"), ("band", "band_exceeded")],
    ),
    ("lies", &["LIES"], &[("footprint", "footprint_wrong")]),
    ("boasts", &["BOASTS"], &[("footprint", "footprint_wrong")]),
    ("leaks", &["LEAKS"], &[("footprint", "leaked")]),
    (
        "spreads",
        &["SPREADS"],
        &[("non_finite", "non_finite_spread")],
    ),
    (
        "swallows",
        &["SWALLOWS"],
        &[("non_finite", "non_finite_swallowed")],
    ),
    (
        "ignores_strides",
        &["IGNORES_STRIDES"],
        &[("layout", "layout_wrong")],
    ),
    ("slow", &["SLOW_DESCRIBE"], &[("scan_time", "scan_slow")]),
    (
        "counts",
        &["COUNTS_DESCRIBE"],
        &[("describe", "describe_impure")],
    ),
    (
        "environment",
        &["ENV_DESCRIBE"],
        &[("describe", "describe_impure")],
    ),
    (
        "no_span",
        &["SPAN=\",\\\"nowhere\\\"\""],
        &[("describe", "describe_unknown")],
    ),
    (
        "no_dtype",
        &["TYPO=\",\\\"float\\\"\""],
        &[("describe", "describe_malformed")],
    ),
    (
        "older_tables",
        &["DESCRIBED_API=\"1.0.0\""],
        &[("describe", "table_disagrees")],
    ),
    ("aborts", &["PANIC=\"abort\""], &[("panic", "panic_aborts")]),
    ("clashes", &["CLASHES"], &[("symbols", "export_clash")]),
    ("unique", &["UNIQUE"], &[("symbols", "unique_symbol")]),
    (
        "other_major",
        &["OTHER_MAJOR"],
        &[("load", "api_major"), ("symbols", "entry_symbol")],
    ),
    ("no_table", &["NO_TABLE"], &[("load", "door_failed")]),
    ("null_entry", &["NULL_ENTRY"], &[("load", "door_failed")]),
];

#[test]
fn each_bad_fixture_fails_exactly_its_own_checks() {
    let dir = tempfile::tempdir().unwrap();
    for (id, flags, expected) in BAD {
        let plugin = c_fixture(dir.path(), id, flags);
        let document = fails_exactly(&plugin, expected, &["--timeout", "20"]);
        for row in document["checks"].as_array().unwrap() {
            if row["outcome"] == "fail" {
                let text = |key: &str| row[key].as_str().unwrap_or_default().to_string();
                assert!(!text("reason").is_empty(), "{row:#}");
                assert!(
                    text("replay").contains("--replay") || text("name") == "scan_time",
                    "{row:#}"
                );
            }
        }
    }
}

#[test]
fn what_the_linker_put_into_the_file_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let linked = |id: &str, more: &[&str]| c_fixture_with(&c_compiler(), dir.path(), id, &[], more);
    let plugin = linked("relative", &["-Wl,-rpath,lib"]);
    fails_exactly(
        &plugin,
        &[("libraries", "library_path")],
        &["--replay", "libraries:0"],
    );
    let plugin = linked("origin", &["-Wl,-rpath,$ORIGIN/lib"]);
    fails_exactly(&plugin, &[], &["--replay", "libraries:0"]);
    let plugin = linked("stack", &["-Wl,-z,execstack"]);
    let (exit, document) = conform(&plugin, &["--replay", "libraries:0"]);
    assert_eq!(exit, 3, "{document:#}");
    let expected = ("libraries".to_string(), "executable_stack".to_string());
    assert!(failed(&document).contains(&expected), "{document:#}");
}

#[test]
fn a_hang_is_a_row_and_no_child_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = c_fixture(dir.path(), "hangs", &["HANGS"]);
    let began = Instant::now();
    fails_exactly(
        &plugin,
        &[("launch", "conform_timed_out")],
        &["--timeout", "2"],
    );
    assert!(
        began.elapsed() < Duration::from_secs(40),
        "{:?}",
        began.elapsed()
    );
    let me = format!("{}", std::process::id());
    let left: Vec<_> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("stat")).ok())
        .filter(|stat| {
            stat.rsplit(") ").next().and_then(|s| s.split(' ').nth(1)) == Some(me.as_str())
        })
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_library_that_ends_the_process_while_it_loads_is_a_row() {
    let dir = tempfile::tempdir().unwrap();
    for (fault, code) in [
        (Fault::LoadAborts, "conform_crashed"),
        (Fault::LoadExits, "conform_ended"),
        (Fault::LoadHangs, "conform_timed_out"),
        (Fault::DescribePanics, "describe_failed"),
        (Fault::BadDescribe, "bad_describe"),
        (Fault::OpenFails, "plugin_open_failed"),
    ] {
        let plugin = fixture_copy(dir.path(), fault, "bad");
        let document = fails_exactly(&plugin, &[("load", code)], &["--timeout", "3"]);
        let skipped = document["summary"]["skipped"].as_u64().unwrap();
        assert!(skipped >= 2, "{document:#}");
    }
}

#[test]
fn a_panic_in_a_call_is_a_status_and_one_that_aborts_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = fixture_copy(dir.path(), Fault::PanicInCall, "panics");
    let only = ["--forms", "linear_proj/plain"];
    // It also declares a structure that only other tests have.
    let own = [("launch", "call_failed"), ("describe", "describe_unknown")];
    fails_exactly(&plugin, &own, &only);
    let Some(plugin) = aborting_build(dir.path()) else {
        eprintln!("skipped: no rustc, or no built plugin API beside this program");
        return;
    };
    fails_exactly(&plugin, &[("panic", "panic_aborts")], &[]);
}

/// The example backend, built with `panic=abort` against the library that the workspace left.
fn aborting_build(dir: &Path) -> Option<PathBuf> {
    let built = build_dir();
    // Of the several that a target directory collects, the one that was built last.
    let api = std::fs::read_dir(built.join("deps"))
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("libstructures_plugin_api-") && name.ends_with(".rlib")
        })
        .max_by_key(|path| path.metadata().and_then(|m| m.modified()).ok())?;
    let source = structures_tests::root().join("plugin-api/examples/example_backend.rs");
    let library = dir.join("aborting.so");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let made = Command::new(rustc)
        .args([
            "--edition",
            "2021",
            "--crate-type",
            "cdylib",
            "--crate-name",
            "aborting",
        ])
        .args(["-C", "panic=abort", "-O", "-L"])
        .arg(format!("dependency={}", built.join("deps").display()))
        .arg("--extern")
        .arg(format!("structures_plugin_api={}", api.display()))
        .arg("-o")
        .arg(&library)
        .arg(source)
        .output()
        .ok()?;
    if !made.status.success() {
        eprintln!("{}", String::from_utf8_lossy(&made.stderr));
        return None;
    }
    Some(library)
}

#[test]
fn a_failure_is_replayed_by_its_line_and_by_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = c_fixture(dir.path(), "flag_crash", &["FLAG_CRASH"]);
    let (_, document) = conform(&plugin, &["--forms", "linear_proj/f32"]);
    let mut row = document["checks"].as_array().unwrap().iter();
    let row = row.rfind(|r| r["outcome"] == "fail").unwrap();
    let line = row["replay"].as_str().unwrap();
    let seed = line.rsplit(':').next().unwrap();
    let replay = format!("mutation:{seed}");
    let more = ["--forms", "linear_proj/f32", "--replay", replay.as_str()];
    fails_exactly(&plugin, &[("mutation", "conform_crashed")], &more);
    let (_, again) = conform(&plugin, &more);
    let rows = again["checks"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{again:#}");
    assert_eq!(rows[0]["reason"], row["reason"]);
    // A repaired plugin passes the same line.
    fails_exactly(&c_fixture(dir.path(), "good", &[]), &[], &more);
}

#[test]
fn usage_is_told_before_anything_runs() {
    let ask = |args: &[&str]| {
        let empty = tempfile::tempdir().unwrap();
        let mut command = structures(empty.path());
        let (exit, document, _) = json(command.arg("conform").args(args));
        (
            exit,
            document["error"]["code"]
                .as_str()
                .unwrap_or("-")
                .to_string(),
        )
    };
    let good = built("c_sample");
    let good = good.to_str().unwrap();
    assert_eq!(ask(&["/nowhere/x.so"]), (1, "io".into()));
    assert_eq!(ask(&[good, "--replay", "nonsense"]), (2, "usage".into()));
    assert_eq!(ask(&[good, "--replay", "nonsense:1"]), (2, "usage".into()));
    for check in ["parity", "band", "outputs", "layout", "null_arguments"] {
        let replay = format!("{check}:99999999");
        assert_eq!(ask(&[good, "--replay", &replay]), (2, "usage".into()));
    }
    assert_eq!(
        ask(&[good, "--forms", "nobody/nothing"]),
        (2, "usage".into())
    );
    assert_eq!(ask(&[good, "--forms", "/"]), (2, "usage".into()));
    assert_eq!(ask(&[good, "--timeout", "0"]), (2, "usage".into()));
    assert_eq!(ask(&[good, "--cases", "0"]), (2, "usage".into()));
}

#[test]
fn a_fault_of_a_declaration_is_one_row_and_its_form_is_not_tried() {
    let dir = tempfile::tempdir().unwrap();
    let plugin = c_fixture(dir.path(), "no_span", &["SPAN=\",\\\"nowhere\\\"\""]);
    let expected = [("describe", "describe_unknown")];
    let document = fails_exactly(&plugin, &expected, &[]);
    let mut rows = document["checks"].as_array().unwrap().iter();
    assert!(
        rows.any(|r| {
            let reason = r["reason"].as_str().unwrap_or_default();
            r["outcome"] == "skip" && reason.contains("declaration")
        }),
        "{document:#}"
    );
}

#[test]
fn the_private_copy_is_below_the_cache_and_its_place_is_judged_first() {
    let place = tempfile::tempdir().unwrap();
    let (cache, plugin) = (place.path().join("cache"), built("c_sample"));
    let ask = |plugin: &Path, cache: &Path| {
        let mut command = structures(place.path());
        command.env("STRUCTURES_CACHE_DIR", cache).arg("conform");
        json(command.args(["--replay", "libraries:0"]).arg(plugin))
    };
    // What an interrupted run left; the number is above every process id.
    let left = cache.join("conform/run-4194999-x/plugins");
    std::fs::create_dir_all(&left).unwrap();
    let (exit, document, _) = ask(&plugin, &cache);
    assert_eq!(exit, 0, "{document:#}");
    assert_eq!(
        std::fs::read_dir(cache.join("conform")).unwrap().count(),
        0,
        "neither that one nor its own"
    );
    // A place that cannot be: the directory is named, not the plugin.
    std::fs::write(place.path().join("file"), "").unwrap();
    let (exit, document, _) = ask(&plugin, &place.path().join("file"));
    let text = document["error"]["message"].as_str().unwrap();
    assert_eq!(
        (exit, &document["error"]["code"]),
        (1, &Json::from("io")),
        "{text}"
    );
    assert!(
        text.contains("file/conform") && !text.contains("c_sample"),
        "{text}"
    );
    // What is no library is not copied, however long it says it is.
    let huge = place.path().join("huge.so");
    let file = std::fs::File::create(&huge).unwrap();
    file.set_len(100 << 30).unwrap();
    let (exit, document, _) = ask(&huge, &cache);
    assert_eq!(exit, 3, "{document:#}");
    assert!(failed(&document).contains(&("load".into(), "too_large".into())));
}
