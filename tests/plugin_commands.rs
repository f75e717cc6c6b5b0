//! `plugins`, `devices`, `--locked`, `--help`: what an operator sees of plugin files, through the program.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value as Json;
use structures_fixture_plugin::{c_compiler, c_fixture, fixture_copy, Fault};
use structures_tests::{json, structures};

struct Place {
    keep: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let keep = tempfile::tempdir().unwrap();
        std::fs::create_dir(keep.path().join("plugins")).unwrap();
        Place { keep }
    }

    fn plugins(&self) -> std::path::PathBuf {
        self.keep.path().join("plugins")
    }

    /// The program with a cache of its own, working in the place.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = structures(&self.plugins());
        command
            .env("STRUCTURES_CACHE_DIR", self.keep.path().join("cache"))
            .current_dir(self.keep.path())
            .args(args);
        command
    }

    fn json(&self, args: &[&str]) -> (i32, Json, String) {
        json(&mut self.command(args))
    }

    /// `outcome code` of the file.
    fn fate(&self, file: &str) -> String {
        let (exit, document, log) = self.json(&["plugins", "list"]);
        assert_eq!(exit, 0, "{log}");
        fate(&document, file)
    }
}

fn fate(document: &Json, file: &str) -> String {
    let rows = document["plugins"].as_array().unwrap();
    let named = |r: &&Json| Path::new(r["path"].as_str().unwrap()).ends_with(file);
    let row = rows.iter().find(named).unwrap_or_else(|| panic!("{file}"));
    let code = row["code"].as_str().unwrap_or("-");
    format!("{} {code}", row["outcome"].as_str().unwrap())
}

/// A library whose initialiser writes `mark` and aborts.
fn aborting(dir: &Path, mark: &Path) {
    let source = dir.with_file_name("aborting.c");
    let text = format!(
        "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) static void f(void)\n\
         {{ FILE *m = fopen(\"{}\", \"w\"); if (m) fclose(m); abort(); }}\n",
        mark.display()
    );
    std::fs::write(&source, text).unwrap();
    let built = Command::new(c_compiler())
        .args(["-shared", "-fPIC", "-o"])
        .arg(dir.join("aborting.so"))
        .arg(&source)
        .status()
        .unwrap();
    assert!(built.success());
}

#[test]
fn help_and_version_touch_no_plugin_and_no_scanner() {
    let place = Place::new();
    let (opened, scanned) = (
        place.keep.path().join("opened"),
        place.keep.path().join("scanned"),
    );
    aborting(&place.plugins(), &opened);
    let scanner = place.keep.path().join("scanner");
    std::fs::write(
        &scanner,
        format!("#!/bin/sh\n: > {}\nexit 1\n", scanned.display()),
    )
    .unwrap();
    std::fs::set_permissions(&scanner, std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = |args: &[&str]| {
        let done = place
            .command(args)
            .env("STRUCTURES_SCANNER", &scanner)
            .output()
            .unwrap();
        done.status.code()
    };
    for args in [
        &["--help"][..],
        &["--version"],
        &["help"],
        &["plugins", "--help"],
        &["plugins", "list", "--help"],
        &["plugins", "list", "--version"],
        &["devices", "--help"],
        &["completions", "bash"],
    ] {
        assert_eq!(run(args), Some(0), "{args:?}");
        assert!(!opened.exists() && !scanned.exists(), "{args:?}");
    }
    assert!(!place.keep.path().join("cache").exists());
    // The marks work.
    assert_eq!(run(&["plugins", "list"]), Some(0));
    assert!(scanned.exists() && !opened.exists());
    assert_eq!(place.fate("aborting.so"), "refused scan_crashed");
    assert!(opened.exists());
}

/// Processes that have this text on their command line.
fn processes_with(text: &str) -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|e| std::fs::read(e.path().join("cmdline")).ok())
        .filter(|line| String::from_utf8_lossy(line).contains(text))
        .count()
}

#[test]
fn whatever_lies_in_a_directory_the_program_lists_it_and_uses_the_good_ones() {
    let place = Place::new();
    let dir = place.plugins();
    aborting(&dir, &place.keep.path().join("mark"));
    let faults = [
        (Fault::LoadAborts, "refused scan_crashed"),
        (Fault::LoadExits, "refused scan_failed"),
        (Fault::DescribeAborts, "refused scan_crashed"),
        (Fault::OpenAborts, "refused scan_crashed"),
        (Fault::OpenExits, "refused scan_failed"),
        (Fault::CloseAborts, "refused scan_crashed"),
        (Fault::OpenFails, "refused plugin_open_failed"),
        (Fault::BadDescribe, "refused bad_describe"),
        (Fault::Chatty, "loaded -"),
        (Fault::None, "loaded -"),
    ];
    for (fault, _) in faults {
        fixture_copy(&dir, fault, fault.name());
    }
    std::fs::write(dir.join("text.so"), "text").unwrap();
    let (exit, document, log) = place.json(&["plugins", "list"]);
    assert_eq!(exit, 0, "{log}");
    let rows = document["plugins"].as_array().unwrap();
    let ours = |r: &&Json| Path::new(r["path"].as_str().unwrap()).starts_with(&dir);
    assert_eq!(rows.iter().filter(ours).count(), faults.len() + 2);
    for (fault, expected) in faults {
        let file = format!("{}.so", fault.name());
        assert_eq!(fate(&document, &file), expected, "{file}");
    }
    assert_eq!(fate(&document, "aborting.so"), "refused scan_crashed");
    assert_eq!(fate(&document, "text.so"), "refused not_elf");
    // Nothing of it is left running, and the good ones work.
    let cache = place.keep.path().join("cache");
    assert_eq!(processes_with(cache.to_str().unwrap()), 0);
    for id in ["none", "chatty"] {
        let (exit, probes, log) = place.json(&["probe", "--plugin", id, "--form", "int8"]);
        assert_eq!(exit, 0, "{log}");
        let rows = probes["probes"].as_array().unwrap();
        assert!(rows.iter().any(|r| r["launched"] == true), "{rows:?}");
    }
    let (exit, document, _) = place.json(&["plugins", "list"]);
    assert_eq!(exit, 0);
    assert_eq!(
        fate(&document, "open_aborts.so"),
        "quarantined scan_crashed"
    );
}

#[test]
fn a_crash_is_listed_quarantined_and_forgotten_by_rescan() {
    let place = Place::new();
    aborting(&place.plugins(), &place.keep.path().join("mark"));
    fixture_copy(&place.plugins(), Fault::None, "good");
    assert_eq!(place.fate("aborting.so"), "refused scan_crashed");
    assert_eq!(place.fate("aborting.so"), "quarantined scan_crashed");
    let (exit, document, log) = place.json(&["plugins", "rescan"]);
    assert_eq!(exit, 0, "{log}");
    assert_eq!(document["forgotten"]["quarantined"], 1, "{document}");
    assert_eq!(document["forgotten"]["scans"], 1, "{document}");
    assert_eq!(fate(&document, "aborting.so"), "refused scan_crashed");
    assert_eq!(fate(&document, "good.so"), "loaded -");
    let (exit, document, _) = place.json(&["plugins", "show", "aborting.so"]);
    assert_eq!(exit, 0);
    let plugin = &document["plugin"];
    assert_eq!(plugin["quarantine"]["signal"], 6, "{plugin}");
    assert!(plugin["help"].as_str().unwrap().contains("rescan"));
}

#[test]
fn a_lock_pins_what_the_program_uses() {
    let place = Place::new();
    fixture_copy(&place.plugins(), Fault::None, "good");
    let (exit, document, _) = place.json(&["--locked", "plugins", "list"]);
    assert_eq!(exit, 0, "a listing is always 0");
    assert_eq!(fate(&document, "good.so"), "refused lock_missing");
    let (exit, _, log) = place.json(&["--locked", "probe"]);
    assert_eq!(exit, 3, "{log}");

    let (exit, document, log) = place.json(&["plugins", "lock"]);
    assert_eq!(exit, 0, "{log}");
    assert_eq!(document["lock"]["plugins"][0]["id"], "good");
    let lock = place.keep.path().join("plugins.lock");
    assert!(lock.is_file(), "in the working directory");
    let (_, document, _) = place.json(&["--locked", "plugins", "list"]);
    assert_eq!(fate(&document, "good.so"), "loaded -");

    c_fixture(&place.plugins(), "new", &[]);
    let (_, document, log) = place.json(&["plugins", "list"]);
    assert_eq!(fate(&document, "new.so"), "loaded -");
    assert_eq!(document["lock"]["drift"][0]["code"], "lock_unlisted");
    assert!(log.contains("lock_unlisted"), "{log}");
    let (_, document, _) = place.json(&["--locked", "plugins", "list"]);
    assert_eq!(fate(&document, "new.so"), "refused lock_unlisted");
    let moved = place.keep.path().join("other.lock");
    std::fs::rename(&lock, &moved).unwrap();
    let named = ["--lock-file", moved.to_str().unwrap(), "--locked"];
    let (_, document, _) = place.json(&[&named[..], &["plugins", "list"]].concat());
    assert_eq!(fate(&document, "good.so"), "loaded -");
    std::fs::write(&moved, "nonsense").unwrap();
    let (exit, document, _) = place.json(&[&named[..], &["plugins", "list"]].concat());
    assert_eq!(
        (exit, &document["error"]["code"]),
        (1, &"lock_invalid".into())
    );
}

#[test]
fn signatures_can_be_required() {
    let place = Place::new();
    fixture_copy(&place.plugins(), Fault::None, "good");
    let (_, document, _) = place.json(&["plugins", "list"]);
    assert_eq!(document["plugins"][0]["signature"]["state"], "unsigned");
    let (exit, document, _) = place.json(&["--require-signed", "plugins", "list"]);
    assert_eq!(
        (exit, fate(&document, "good.so")),
        (0, "refused signature_missing".into())
    );
    let mut command = place.command(&["plugins", "list"]);
    command.env("STRUCTURES_TRUSTED_KEYS", place.keep.path().join("nowhere"));
    let (exit, document, _) = json(&mut command);
    assert_eq!(
        (exit, &document["error"]["code"]),
        (1, &"trusted_keys".into())
    );
}

#[test]
fn devices_name_what_serves_them() {
    let place = Place::new();
    fixture_copy(&place.plugins(), Fault::None, "good");
    fixture_copy(&place.plugins(), Fault::WrongArch, "elsewhere");
    let (exit, document, log) = place.json(&["devices", "--simulate", "sm_120"]);
    assert_eq!(exit, 0, "{log}");
    let devices = document["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2, "{document}");
    for field in ["id", "kind", "name", "archs", "memory_bytes", "plugin"] {
        assert!(devices[0].get(field).is_some(), "{field}");
    }
    assert_eq!(
        (&devices[0]["id"], &devices[0]["kind"]),
        (&0.into(), &"cpu".into())
    );
    assert_eq!(devices[1]["simulated"], true);
    for (device, admitted) in [(0, [false, true]), (1, [false, false])] {
        for (plugin, expected) in devices[device]["plugins"]
            .as_array()
            .unwrap()
            .iter()
            .zip(admitted)
        {
            assert_eq!(plugin["admitted"], expected, "{plugin}");
            if !expected {
                let reason = plugin["reason"].as_str().unwrap();
                for fact in [plugin["plugin"].as_str().unwrap(), "declares ["] {
                    assert!(reason.contains(fact), "{reason}");
                }
                assert_eq!(plugin["code"], "arch_not_declared");
            }
        }
    }
    let (exit, document, _) = place.json(&["devices", "--simulate", "cuda"]);
    assert_eq!((exit, &document["error"]["code"]), (2, &"usage".into()));
}

#[test]
fn the_trace_is_printed_on_demand() {
    let place = Place::new();
    fixture_copy(&place.plugins(), Fault::None, "good");
    std::fs::write(place.plugins().join("text.so"), "text").unwrap();
    let (_, document, _) = place.json(&["plugins", "list"]);
    let trace = document["trace"].as_array().unwrap();
    let sources: Vec<&str> = trace
        .iter()
        .map(|p| p["source"].as_str().unwrap())
        .collect();
    assert_eq!(sources.len(), 5, "{sources:?}");
    assert!(trace[1..]
        .iter()
        .all(|p| p["searched"] == false && p["reason"].is_string()));
    let steps = trace[0]["candidates"][0]["steps"].to_string();
    for step in ["path rules", "hashed", "described in", "opened"] {
        assert!(steps.contains(step), "{steps}");
    }
    let text = |args: &[&str]| {
        let done = place.command(args).output().unwrap();
        assert_eq!(done.status.code(), Some(0));
        String::from_utf8(done.stdout).unwrap()
    };
    let plain = text(&["plugins", "list"]);
    assert!(
        !plain.contains("path rules") && plain.contains("1 loaded, 1 refused"),
        "{plain}"
    );
    let traced = text(&["plugins", "list", "-v"]);
    for fact in [
        "STRUCTURES_PLUGIN_PATH",
        "skipped:",
        "path rules",
        "refused not_elf",
    ] {
        assert!(traced.contains(fact), "{traced}");
    }
}

#[test]
fn a_name_that_is_no_text_is_a_row_and_not_the_end() {
    use std::os::unix::ffi::OsStrExt;
    let p = Place::new();
    let name = std::ffi::OsStr::from_bytes(b"bad\xff\x1b[2J.so");
    let good = fixture_copy(p.keep.path(), Fault::None, "good");
    std::fs::copy(good, p.plugins().join(name)).unwrap();
    let (exit, document, log) = p.json(&["plugins", "list"]);
    assert_eq!(exit, 0, "{log}");
    let rows = document["plugins"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "{document:#}");
    assert!(rows[0]["path"].as_str().unwrap().contains("bad\u{fffd}"));
    // For people, the rest of the name steers nothing.
    let out = p.command(&["-v", "plugins", "list"]).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && !text.contains('\u{1b}'), "{text}");

    let mut command = p.command(&["conform", "--replay", "load:0"]);
    let (exit, document, log) = json(command.arg(p.plugins().join(name)));
    assert_eq!(exit, 0, "{document:#} {log}");
}
