//! The program with this backend, on a machine without a driver and on one whose driver is the fake.

#![allow(clippy::expect_used, clippy::unwrap_used)] // a test that panics has failed

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value as Json;

fn release() -> PathBuf {
    let exe = std::env::current_exe().expect("a path");
    let found = exe.ancestors().find(|dir| dir.join("structures").is_file());
    let found = found.expect("`structures` is not built; run `cargo build --release --workspace`");
    found.to_path_buf()
}

fn plugins(ids: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("temporary directory");
    for id in ids {
        let file = format!("libstructures_plugin_{id}.so");
        std::fs::copy(release().join(&file), dir.path().join(&file)).expect(&file);
    }
    dir
}

fn structures(plugins: &Path) -> Command {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model");
    let mut command = Command::new(release().join("structures"));
    command
        .env("STRUCTURES_PLUGIN_PATH", plugins)
        .env("STRUCTURES_CACHE_DIR", plugins.join("cache"))
        .env("STRUCTURES_DEMO_MODEL", demo)
        .env("STRUCTURES_DECISIONS", plugins.join("no-decisions.json"))
        .env_remove("STRUCTURES_ADD_PLUGIN_PATH")
        .args(["--threads", "2", "--json"]);
    command
}

/// Exit code, document, stderr; nothing panics.
fn run(command: &mut Command) -> (i32, Json, String) {
    let out = command.output().expect("starts");
    let log = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!log.contains("panicked"), "{log}");
    let document = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {log}"));
    (out.status.code().unwrap_or(-1), document, log)
}

/// Only the real absence of a driver shows what a machine without one says.
fn driver_is_there() -> bool {
    let there = ["libcuda.so", "libcuda.so.1"].iter().any(|name| {
        // SAFETY: a driver's library, whose initialisers a plugin would run too.
        unsafe { libloading::Library::new(*name) }.is_ok()
    });
    if there {
        eprintln!("skipped: this machine has a driver");
    }
    there
}

fn list<'d>(document: &'d Json, key: &str) -> Vec<&'d Json> {
    document[key].as_array().expect(key).iter().collect()
}

#[test]
fn without_a_driver_everything_says_so_and_nothing_breaks() {
    if driver_is_there() {
        return;
    }
    let dir = plugins(&["cuda", "x86"]);
    let (code, document, _) = run(structures(dir.path()).args(["plugins", "list"]));
    let row = list(&document, "plugins")
        .into_iter()
        .find(|p| p["id"] == "cuda");
    let row = row.expect("listed");
    assert_eq!(
        (code, row["outcome"].as_str()),
        (0, Some("loaded")),
        "{row}"
    );
    assert_eq!(row["forms"], 11);
    let archs: Vec<&str> = list(row, "archs")
        .iter()
        .filter_map(|a| a.as_str())
        .collect();
    assert!(
        archs.contains(&"sm_90a") && archs.contains(&"sm_80+PTX"),
        "{archs:?}"
    );

    let (code, document, _) = run(structures(dir.path()).args(["probe", "--plugin", "cuda"]));
    assert_eq!(code, 3);
    let probes = list(&document, "probes");
    assert_eq!(probes.len(), 11);
    for probe in probes {
        assert_eq!(probe["code"], "driver_absent", "{probe}");
        assert_eq!(
            (&probe["probed"], &probe["launched"]),
            (&false.into(), &false.into())
        );
        assert!(
            probe["reason"]
                .as_str()
                .expect("a reason")
                .contains("libcuda.so"),
            "{probe}"
        );
    }

    let (code, document, _) = run(structures(dir.path()).args(["devices"]));
    assert_eq!(
        (code, list(&document, "devices").len()),
        (0, 1),
        "the CPU alone"
    );

    let attach = [
        "attach",
        "demo",
        "--scheme",
        "w8a16_decode",
        "--structures",
        "decoder_ffn",
    ];
    let quick = ["--rounds", "1", "--iters", "1"];
    let (_, receipt, _) = run(structures(dir.path()).args(attach).args(quick));
    let refused = list(&receipt, "refused");
    let own: Vec<&&Json> = refused.iter().filter(|r| r["plugin"] == "cuda").collect();
    assert!(!own.is_empty(), "{receipt}");
    assert!(own.iter().all(|r| r["code"] == "driver_absent"), "{own:?}");
    let units = list(&receipt, "units");
    assert!(
        units.iter().any(|u| u["plugin"] == "x86"),
        "the CPU's form is judged: {units:?}"
    );

    // Nobody else is there: the choice of a scheme says why this backend was not.
    let alone = plugins(&["cuda"]);
    let (_, receipt, _) = run(structures(alone.path())
        .args(["attach", "demo"])
        .args(quick));
    let why = receipt["scheme"].to_string();
    assert!(
        why.contains("cuda: driver_absent: no NVIDIA driver"),
        "{why}"
    );
}

#[test]
fn with_a_driver_forms_are_probed_and_judged_on_the_device() {
    let Some(fakes) = common::Fakes::built() else {
        return;
    };
    if driver_is_there() {
        return;
    }
    let dir = plugins(&["cuda"]);
    let gpu = || {
        let mut command = structures(dir.path());
        command
            .env("LD_LIBRARY_PATH", fakes.search_path())
            .env("STRUCTURES_NVRTC", fakes.nvrtc());
        command
    };
    let (_, document, _) = run(gpu().args(["devices"]));
    let devices = list(&document, "devices");
    assert_eq!(devices.len(), 2, "{document}");
    assert_eq!(
        (&devices[1]["id"], devices[1]["plugin"].as_str()),
        (&1.into(), Some("cuda"))
    );
    let small = ["--dims", "D=32,F=48", "--structure", "decoder_ffn"];
    let (code, document, _) = run(gpu().args(["probe", "--rows", "2"]).args(small));
    assert_eq!(code, 0, "{document}");
    let probes = list(&document, "probes");
    assert_eq!(probes.len(), 3);
    for probe in probes {
        assert_eq!(
            (probe["outcome"].as_str(), &probe["device"]),
            (Some("ok"), &1.into()),
            "{probe}"
        );
    }
    // A device that somebody names is that device.
    let (code, document, _) = run(gpu().args(["probe", "--device", "0"]).args(small));
    assert_eq!(
        (code, document["probes"][0]["code"].as_str()),
        (3, Some("arch_not_declared"))
    );
    let (_, document, _) = run(gpu().args(["probe", "--device", "7"]).args(small));
    assert_eq!(document["probes"][0]["code"], "device_unknown");
}

#[test]
fn the_older_compiler_is_taken_where_the_newer_is_not_there_and_refused_where_it_is_too_old() {
    let Some(fakes) = common::Fakes::built() else {
        return;
    };
    if driver_is_there() {
        return;
    }
    let dir = plugins(&["cuda"]);
    // A driver, and the one compiler under the name that NVRTC 12 has.
    let found = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcublasLt.so"] {
        std::fs::copy(fakes.search_path().join(name), found.path().join(name)).unwrap();
    }
    std::fs::copy(fakes.nvrtc(), found.path().join("libnvrtc.so.12")).unwrap();
    let probe = |version: &str| {
        let mut command = structures(dir.path());
        command
            .env("LD_LIBRARY_PATH", found.path())
            .env("FAKE_NVRTC_VERSION", version);
        for name in ["STRUCTURES_NVRTC", "CUDA_HOME", "CUDA_PATH"] {
            command.env_remove(name);
        }
        let cache = found.path().join(version);
        command.env("STRUCTURES_CACHE_DIR", cache);
        let arguments = ["probe", "--rows", "2", "--structure", "norm_fused"];
        let (_, document, _) = run(command.args(arguments).args(["--dims", "D=32"]));
        list(&document, "probes")[0].clone()
    };
    let served = probe("12.8");
    assert_eq!(served["outcome"], "ok", "{served}");
    let refused = probe("12.3");
    assert_eq!(refused["code"], "nvrtc_too_old", "{refused}");
    let reason = refused["reason"].as_str().unwrap_or_default();
    for part in ["12.3", "12.4", "libnvrtc.so.12"] {
        assert!(reason.contains(part), "{reason}");
    }
}

#[test]
fn every_form_conforms_on_the_fake_driver() {
    let Some(fakes) = common::Fakes::built() else {
        return;
    };
    if driver_is_there() {
        return;
    }
    let dir = plugins(&["cuda"]);
    let mut command = structures(dir.path());
    command
        .env("LD_LIBRARY_PATH", fakes.search_path())
        .env("STRUCTURES_NVRTC", fakes.nvrtc());
    let library = dir.path().join("libstructures_plugin_cuda.so");
    let (code, document, log) = run(command.arg("conform").arg(library).args(["--cases", "12"]));
    let failed: Vec<&Json> = list(&document, "checks")
        .into_iter()
        .filter(|check| check["outcome"] == "fail")
        .collect();
    assert!(code == 0 && failed.is_empty(), "{failed:?}\n{log}");
}

#[test]
fn a_driver_that_lacks_something_or_is_broken_says_so_in_a_code() {
    if driver_is_there() {
        return;
    }
    let dir = plugins(&["cuda"]);
    let broken = tempfile::tempdir().unwrap();
    let libcuda = broken.path().join("libcuda.so");
    let probe = || {
        let mut command = structures(dir.path());
        command.env("LD_LIBRARY_PATH", broken.path());
        let arguments = ["probe", "--structure", "norm_fused", "--dims", "D=32"];
        // `run` holds that nothing panics on the standard error.
        let (code, document, _) = run(command.args(arguments));
        let row = list(&document, "probes")[0].clone();
        (code, row["code"].clone(), row["reason"].to_string())
    };
    std::fs::write(&libcuda, "").unwrap();
    let (code, found, reason) = probe();
    assert_eq!((code, &found), (3, &"driver_absent".into()), "{reason}");
    assert!(reason.contains("file too short"), "{reason}");
    let source = broken.path().join("nothing.c");
    std::fs::write(&source, "int nothing(void) { return 1; }").unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&libcuda, &source])
        .status();
    if compiled.is_ok_and(|status| status.success()) {
        let (code, found, reason) = probe();
        assert_eq!((code, &found), (3, &"driver_too_old".into()), "{reason}");
        assert!(reason.contains("cuDriverGetVersion"), "{reason}");
    }
}

#[test]
fn the_check_of_a_device_ends_with_a_table_where_there_is_none() {
    if driver_is_there() {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let release = release();
    let target = release.parent().unwrap();
    let out = tempfile::tempdir().unwrap();
    // What somebody else keeps there stays.
    let kept = out.path().join("plugins/kept");
    std::fs::create_dir(kept.parent().unwrap()).unwrap();
    std::fs::write(&kept, "").unwrap();
    let done = Command::new(root.join("scripts/device-check"))
        .arg(out.path())
        .env("CARGO_TARGET_DIR", target)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(
        done.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let table = std::fs::read_to_string(out.path().join("table.txt")).unwrap();
    for line in [
        &["probe-1x256.json", "refused"][..],
        &["3 refused", "3 driver_absent"],
        &["speeds.txt", "refused"],
        &["no NVIDIA driver"],
        &["conform.json", "skipped", "no form launches"],
        &["attach-bf16_dense.json"],
    ] {
        let there = |row: &str| line.iter().all(|part| row.contains(part));
        assert!(table.lines().any(there), "{line:?} in\n{table}");
    }
    assert!(kept.is_file());
    assert!(out.path().with_extension("tgz").is_file() || table.contains(".tgz"));
    let _ = std::fs::remove_file(format!("{}.tgz", out.path().display()));
}
