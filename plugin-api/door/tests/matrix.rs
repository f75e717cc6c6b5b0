//! The version matrix: plugins of other minors, majors, layouts and compilers, each with its outcome.
//!
//! Mostly one C file through the C door; Rust where the layout of the Rust door is what differs. Libraries are
//! described in this process: none of these faults ends one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use structures_fixture_plugin::{c_compiler, c_fixture, c_fixture_by, fixture_copy, Fault};
use structures_loader::{
    row_capacity, BindSpec, Environment, HostTensor, HostTensorMut, Plugin, PluginError, PluginRow,
    Registry, ScanMode, ScanOptions,
};
use structures_plugin_api::abi::{DType, FormVTable, PluginVTable, API_VERSION};
use structures_plugin_api::describe::BindParams;
use structures_plugin_door::DOOR_VERSION;

struct Place {
    _keep: tempfile::TempDir,
    plugins: PathBuf,
    cache: PathBuf,
}

impl Place {
    fn new() -> Self {
        let keep = tempfile::tempdir().expect("temporary directory");
        let root = keep.path().canonicalize().expect("canonical");
        let (plugins, cache) = (root.join("plugins"), root.join("cache"));
        std::fs::create_dir(&plugins).expect("create");
        Place {
            _keep: keep,
            plugins,
            cache,
        }
    }

    fn scan(&self) -> Registry {
        let mut options = ScanOptions::new(vec![self.plugins.clone()]);
        options.environment = Environment {
            cache_dir: Some(self.cache.clone()),
            ..Environment::default()
        };
        options.mode = ScanMode::InProcess;
        Registry::scan(&options).expect("the scan itself succeeds")
    }

    /// An example of this crate, beside the `deps` this test runs from.
    fn example(&self, name: &str) {
        let exe = std::env::current_exe().expect("a path");
        let profile = exe.ancestors().nth(2).expect("target/<profile>/deps");
        let built = profile.join("examples").join(format!("lib{name}.so"));
        std::fs::copy(&built, self.plugins.join(format!("{name}.so")))
            .unwrap_or_else(|e| panic!("{}: {e}; examples are built with tests", built.display()));
    }
}

fn row<'a>(registry: &'a Registry, id: &str) -> &'a PluginRow {
    let file = format!("{id}.so");
    let named = |r: &&PluginRow| r.path.file_name().is_some_and(|n| *n == *file);
    let found = registry.plugins.iter().find(named);
    found.unwrap_or_else(|| panic!("no row for {file}"))
}

fn outcome(registry: &Registry, id: &str) -> &'static str {
    row(registry, id).code.map_or("loaded", |code| code.name())
}

const K: usize = 48;
const N: usize = 40;

/// Binds `linear_proj` on known weights, calls it, and compares.
fn computes(plugin: &Plugin, form: &str) -> Result<(), PluginError> {
    let w: Vec<f32> = (0..K * N)
        .map(|i| (i * 7 % 101) as f32 / 50.0 - 1.0)
        .collect();
    let x: Vec<f32> = (0..K).map(|i| (i * 13 % 101) as f32 / 50.0 - 1.0).collect();
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_string()).collect();
    let params = BindParams {
        structure: "linear_proj".into(),
        version: 1,
        variant: BTreeMap::from([("epilogue".into(), "none".into())]),
        dims: BTreeMap::from([("K".into(), K as u64), ("N".into(), N as u64)]),
        inputs: text(&["x", "residual"]),
        outputs: text(&["y"]),
        ..BindParams::default()
    };
    let weight = HostTensor::strided(&w, &[K, N], &[1, K]).expect("fits");
    let bound = plugin.bind(&BindSpec {
        form,
        device: 0,
        span: "proj",
        weights: &[("w", weight), ("b", HostTensor::ABSENT)],
        statistics: &[],
        params: &params,
        contract: row_capacity(DType::F32, 1),
    })?;
    let mut y = vec![f32::NAN; N];
    let inputs = [
        HostTensor::new(&x, &[1, K]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs = [HostTensorMut::new(&mut y, &[1, N]).expect("fits")];
    bound.call(&inputs, &mut outputs, &mut [])?;
    for (n, y) in y.iter().enumerate() {
        let exact: f32 = (0..K).map(|k| x[k] * w[n * K + k]).sum();
        assert!((y - exact).abs() < 0.2, "{form} {n}: {y} {exact}");
    }
    Ok(())
}

/// Id, flags of the C fixture, outcome, and what a refusal's reason says beside both versions.
const MATRIX: &[(&str, &[&str], &str, &str)] = &[
    ("this_minor", &[], "loaded", ""),
    ("this_minor_devices", &["DEVICES"], "loaded", ""),
    (
        "older_minor_devices",
        &["API=\"1.0.0\"", "API_MINOR=0", "PLUGIN_SIZE=64", "DEVICES"],
        "loaded",
        "",
    ),
    (
        "older_minor",
        &[
            "API=\"1.0.0\"",
            "API_MINOR=0",
            "PLUGIN_SIZE=64",
            "FORM_SIZE=32",
        ],
        "loaded",
        "",
    ),
    (
        "newer_minor",
        &["API=\"1.99.0\"", "API_MINOR=99", "LONGER"],
        "loaded",
        "",
    ),
    (
        "newer_minor_in_need",
        &[
            "API=\"1.99.0\"",
            "API_MINOR=99",
            "LONGER",
            "REQUIRES=\"\\\"time_travel\\\"\"",
        ],
        "api_requires",
        "1.99.0",
    ),
    (
        "newer_minor_served",
        &[
            "API=\"1.99.0\"",
            "API_MINOR=99",
            "REQUIRES=\"\\\"scratch\\\"\"",
        ],
        "loaded",
        "",
    ),
    ("other_major", &["API=\"2.0.0\""], "api_major", "2.0.0"),
    (
        "other_major_door",
        &["OTHER_MAJOR"],
        "api_major",
        "structures_plugin_v2",
    ),
    (
        "short_table",
        &["PLUGIN_SIZE=56", "API_MINOR=7"],
        "door_failed",
        "1.7",
    ),
    ("no_size", &["PLUGIN_SIZE=0"], "door_failed", "found 0"),
    (
        "short_form_table",
        &["FORM_SIZE=24"],
        "door_failed",
        "form table",
    ),
    ("no_table", &["NO_TABLE"], "door_failed", "plugin table"),
    ("no_form_table", &["NO_FORM_TABLE"], "door_failed", "`form`"),
    ("null_entry", &["NULL_ENTRY"], "door_failed", "`bind`"),
    (
        "needs_longer_host",
        &["NEEDS_LONGER_HOST"],
        "door_failed",
        "plugin table",
    ),
    ("panics_by_abort", &["PANIC=\"abort\""], "loaded", ""),
];

#[test]
fn each_version_has_its_outcome_through_the_c_door() {
    let place = Place::new();
    for (id, flags, _, _) in MATRIX {
        c_fixture(&place.plugins, id, flags);
    }
    let registry = place.scan();
    for (id, _, expected, says) in MATRIX {
        let row = row(&registry, id);
        assert_eq!(outcome(&registry, id), *expected, "{id}: {:?}", row.reason);
        if *expected != "loaded" {
            let reason = row.reason.as_deref().unwrap_or_default();
            assert!(reason.contains(says), "{id}: {reason}");
            assert!(
                reason.contains(API_VERSION),
                "{id} names the host's version: {reason}"
            );
            continue;
        }
        let plugin = registry.plugin(id).expect("loaded");
        assert_eq!(plugin.description().id, *id);
        for form in ["f32", "w8a16_static"] {
            computes(plugin, form).unwrap_or_else(|e| panic!("{id}: {e}"));
        }
        // The entry that 1.1 appended is used where the table has it, and not read where it ends before.
        let asked = plugin.devices().map_err(|e| e.code);
        match *id {
            "this_minor_devices" => assert_eq!(asked, Err("read_past_the_end".into())),
            _ => assert_eq!(asked, Ok(&[][..]), "{id}"),
        }
    }
    let panic = |id| {
        registry
            .plugin(id)
            .expect("loaded")
            .description()
            .panic
            .clone()
    };
    assert_eq!(panic("panics_by_abort").as_deref(), Some("abort"));
    assert_eq!(panic("this_minor"), None, "C has no panics");
    // The sizes above are those of 1.0, whatever this version's are.
    assert_eq!((PluginVTable::SIZE_1_0, FormVTable::SIZE_1_0), (64, 32));
    assert!(size_of::<PluginVTable>() > 64);
}

#[test]
fn each_root_module_has_its_outcome_through_the_rust_door() {
    let place = Place::new();
    let cases = [
        ("missing_layout", "layout_missing"),
        ("changed_field", "layout_mismatch"),
        ("other_door", "api_major"),
        // The frozen door grows at its end only, and a longer one is no worse.
        ("appended_field", "loaded"),
    ];
    for (name, _) in cases {
        place.example(name);
    }
    let registry = place.scan();
    for (name, expected) in cases {
        let row = row(&registry, name);
        let reason = row.reason.as_deref().unwrap_or_default();
        assert_eq!(outcome(&registry, name), expected, "{name}: {reason}");
        if expected != "loaded" {
            assert!(
                !reason.contains('\n') && reason.len() < 600,
                "one line: {reason}"
            );
            assert!(
                reason.contains(DOOR_VERSION),
                "{name} names the host's version: {reason}"
            );
        }
    }
    let reason = row(&registry, "other_door")
        .reason
        .clone()
        .unwrap_or_default();
    assert!(reason.contains("2.0.0"), "{reason}");
}

#[test]
fn nobody_sees_which_door_a_plugin_came_through() {
    let place = Place::new();
    c_fixture(&place.plugins, "by_c", &[]);
    fixture_copy(&place.plugins, Fault::None, "by_rust");
    let registry = place.scan();
    let rows = serde_json::to_value(&registry.plugins).expect("serialises");
    let keys = |row: &serde_json::Value| -> Vec<String> {
        row.as_object()
            .expect("an object")
            .keys()
            .cloned()
            .collect()
    };
    assert_eq!(keys(&rows[0]), keys(&rows[1]));
    for (id, form) in [("by_c", "f32"), ("by_rust", "plain")] {
        assert_eq!(outcome(&registry, id), "loaded");
        computes(registry.plugin(id).expect("loaded"), form).expect("computes");
    }
}

/// C compilers of this machine that are not the one every other fixture is built with.
fn other_c_compilers() -> Vec<std::ffi::OsString> {
    let found = |name: &std::ffi::OsStr| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).find_map(|dir| dir.join(name).canonicalize().ok())
    };
    let own = found(&c_compiler());
    let mut seen = Vec::from([own]);
    ["clang", "gcc", "tcc", "icx"]
        .into_iter()
        .map(std::ffi::OsString::from)
        .filter(|name| {
            let file = found(name);
            let new = file.is_some() && !seen.contains(&file);
            seen.push(file);
            new
        })
        .collect()
}

#[test]
fn a_plugin_of_another_c_compiler_is_used_like_any_other() {
    let compilers = other_c_compilers();
    if compilers.is_empty() {
        println!("skipped: no C compiler here beside {:?}", c_compiler());
    }
    for (i, compiler) in compilers.iter().enumerate() {
        let place = Place::new();
        let id = format!("other_{i}");
        c_fixture_by(compiler, &place.plugins, &id, &[]);
        let registry = place.scan();
        assert_eq!(outcome(&registry, &id), "loaded", "{compiler:?}");
        computes(registry.plugin(&id).expect("loaded"), "f32").expect("computes");
    }
}

/// A toolchain that is not the one these tests were built with.
fn other_toolchain() -> Result<String, String> {
    let output = |command: &mut Command| -> Result<String, String> {
        let out = command
            .env_remove("RUSTUP_TOOLCHAIN")
            .output()
            .map_err(|e| format!("rustup: {e}"))?;
        Ok(String::from_utf8_lossy(&out.stdout).trim().to_string())
    };
    let version = |toolchain: &str| {
        output(Command::new("rustup").args(["run", toolchain, "rustc", "--version"]))
    };
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let own = Command::new(rustc)
        .arg("--version")
        .output()
        .map_err(|e| format!("rustc: {e}"))?;
    let own = String::from_utf8_lossy(&own.stdout).trim().to_string();
    let list = output(Command::new("rustup").args(["toolchain", "list"]))?;
    let names = list.lines().filter_map(|l| l.split_whitespace().next());
    for name in names {
        if version(name)?.starts_with("rustc ") && version(name)? != own {
            return Ok(name.to_string());
        }
    }
    Err(format!("no toolchain beside {own} is installed"))
}

/// Also built with `panic = "abort"`, because a build of its own is what that takes too.
#[test]
fn a_plugin_of_another_rust_compiler_is_used_and_says_that_it_aborts() {
    let toolchain = match other_toolchain() {
        Ok(toolchain) => toolchain,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let exe = std::env::current_exe().expect("a path");
    let target = exe
        .ancestors()
        .nth(3)
        .expect("target")
        .join("lanes")
        .join(&toolchain);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut build = Command::new("rustup");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        let outer = ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"];
        if name != "CARGO_HOME" && outer.iter().any(|o| name.starts_with(o)) {
            build.env_remove(&*name);
        }
    }
    let built = build
        .current_dir(root)
        .args([
            "run",
            &toolchain,
            "cargo",
            "build",
            "--release",
            "--offline",
            "--locked",
        ])
        .args(["--config", "profile.release.panic=\"abort\"", "--config"])
        .args([
            "profile.release.opt-level=1",
            "--example",
            "example_backend",
        ])
        .args(["-p", "structures-plugin-api", "--target-dir"])
        .arg(&target)
        .output()
        .expect("rustup starts");
    let log = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{toolchain}: {log}");
    let library = target.join("release/examples/libexample_backend.so");
    let place = Place::new();
    std::fs::copy(&library, place.plugins.join("example.so")).expect("built");
    let registry = place.scan();
    let reason = &row(&registry, "example").reason;
    assert_eq!(outcome(&registry, "example"), "loaded", "{reason:?}");
    let plugin = registry.plugin("example").expect("loaded");
    computes(plugin, "plain").expect("computes");
    assert_eq!(plugin.description().panic.as_deref(), Some("abort"));
}
