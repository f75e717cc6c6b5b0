//! `new-plugin`: what it writes builds, passes its own tests, loads, and is gated like any other backend; what it
//! refuses leaves nothing behind.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value as Json;
use structures_tests::{build_dir, json, structures, units, QUICK};

/// A place below the build directory, the same at every run, so that what Cargo built of it stays warm and bounded.
fn place(name: &str) -> PathBuf {
    let dir = build_dir().join("scaffold").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

fn new_plugin(dir: &Path, args: &[&str]) -> (i32, Json, String) {
    json(
        structures(dir)
            .current_dir(dir)
            .arg("new-plugin")
            .args(args),
    )
}

/// Runs a line of `next` as a person would, with the program on the path and no registry.
fn run(line: &str, dir: &Path) -> (bool, String) {
    let mut path = OsString::from(build_dir());
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let done = Command::new("sh")
        .args(["-c", line])
        .current_dir(dir)
        .env("PATH", path)
        .env("CARGO_NET_OFFLINE", "true")
        .env("STRUCTURES_PLUGIN_PATH", dir)
        .env("STRUCTURES_CACHE_DIR", build_dir().join("test-cache"))
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTFLAGS")
        .output()
        .unwrap();
    let text = format!(
        "{line}\n{}{}",
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
    (done.status.success(), text)
}

/// Follows what the program says comes next, then uses the plugin.
fn follow(dir: &Path, plugin: &Json) {
    let id = plugin["id"].as_str().unwrap();
    for line in plugin["next"].as_array().unwrap() {
        let line = line.as_str().unwrap();
        if line.contains(" conform ") && !has_conform() {
            println!("skipped: {line}: this program has no such command");
            continue;
        }
        let (ok, text) = run(line, dir);
        assert!(ok, "{text}");
    }
    let library = dir.join(plugin["library"].as_str().unwrap());
    let built = library.parent().unwrap();

    let (exit, shown, log) = json(structures(built).args(["plugins", "show", id]));
    assert_eq!(
        (exit, &shown["plugin"]["outcome"]),
        (0, &"loaded".into()),
        "{log}"
    );
    let probe = ["probe", "--plugin", id, "--rows", "1,8"];
    let (exit, probes, log) = json(structures(built).args(probe));
    assert_eq!(exit, 0, "{log}");
    for row in probes["probes"].as_array().unwrap() {
        assert_eq!(row["launched"], true, "{row}");
    }
    let receipts = tempfile::tempdir().unwrap();
    let (exit, receipt, log) = json(
        structures(built)
            .args(["attach", "demo", "--scheme", "w8a16_decode"])
            .args(["--structures", "linear_proj", "--min-speedup", "0"])
            .args(["--pin", &format!("linear_proj={id}"), "--receipt-dir"])
            .arg(receipts.path())
            .args(QUICK),
    );
    assert_eq!(exit, 0, "{log}");
    let rows = units(&receipt, "linear_proj");
    assert_eq!(rows[0]["outcome"], "activated", "{}", rows[0]);
    assert_eq!(rows[0]["ledger"]["clean"], true, "{}", rows[0]);
}

fn has_conform() -> bool {
    let done = Command::new(build_dir().join("structures"))
        .args(["conform", "--help"])
        .output()
        .unwrap();
    done.status.success()
}

#[test]
fn a_rust_plugin_builds_offline_tests_itself_and_is_gated() {
    // `-` in an id is `_` in a crate.
    let root = place("rust");
    let (exit, written, log) = new_plugin(&root, &["scaffold-rust"]);
    assert_eq!(exit, 0, "{log}");
    let plugin = &written["plugin"];
    let api = plugin["api"]["path"].as_str().unwrap();
    assert!(Path::new(api).join("Cargo.toml").is_file(), "{plugin}");
    let dir = root.join("scaffold-rust");
    let listed: Vec<&str> = plugin["files"].as_array().unwrap()[..]
        .iter()
        .map(|f| f.as_str().unwrap())
        .collect();
    for file in &listed {
        assert!(dir.join(file).is_file(), "{file}");
    }
    let (formatted, text) = run("cargo fmt --check", &dir);
    if text.contains("no such command") || text.contains("not installed") {
        println!("skipped: cargo fmt is not here");
    } else {
        assert!(formatted, "{text}");
    }
    // The interface's dependencies are compiled once and kept.
    let target = build_dir().join("scaffold-target");
    std::fs::create_dir_all(&target).unwrap();
    std::os::unix::fs::symlink(&target, dir.join("target")).unwrap();
    follow(&dir, plugin);
}

#[test]
fn a_c_plugin_builds_tests_itself_and_is_gated() {
    let root = place("c");
    let (exit, written, log) =
        new_plugin(&root, &["scaffold-c", "--lang", "c", "--out", "somewhere"]);
    assert_eq!(exit, 0, "{log}");
    let dir = root.join("somewhere");
    let shipped = std::fs::read(dir.join("structures_plugin.h")).unwrap();
    let own = structures_tests::root().join("plugin-api/include/structures_plugin.h");
    assert!(shipped == std::fs::read(own).unwrap());
    if !run("make --version", &dir).0 {
        println!("skipped: make is not here");
        return;
    }
    follow(&dir, &written["plugin"]);
    // The sanitisers find nothing in what the tests reach.
    let sanitised = "make clean && make test CFLAGS='-g -fsanitize=address,undefined \
                     -fno-sanitize-recover'";
    let (clean, text) = run(sanitised, &dir);
    if text.contains("cannot find") || text.contains("unsupported") {
        println!("skipped: sanitisers, the C compiler has none");
    } else {
        assert!(clean, "{text}");
    }
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_nothing() {
    let keep = tempfile::tempdir().unwrap();
    let dir = keep.path();
    std::fs::create_dir(dir.join("full")).unwrap();
    std::fs::write(dir.join("full/mine"), "x").unwrap();
    let refused: [(&[&str], i32, &str); 11] = [
        (&["Acme"], 2, "plugin_name_invalid"),
        (&["a/b"], 2, "plugin_name_invalid"),
        (&[""], 2, "plugin_name_invalid"),
        (&["api"], 2, "plugin_name_reserved"),
        (&["acme", "--lang", "zig"], 2, "usage"),
        (&["acme", "--api", "nowhere"], 2, "plugin_api_unknown"),
        (&["acme", "--api", "9"], 2, "plugin_api_unknown"),
        (&["acme", "--lang", "c", "--api", "1"], 2, "usage"),
        (&["acme", "--out", "full"], 1, "out_occupied"),
        (&["acme", "--out", "no/parent"], 1, "io"),
        (&["acme", "--out", "full/mine"], 1, "out_occupied"),
    ];
    for (args, code, name) in refused {
        let (exit, document, log) = new_plugin(dir, args);
        assert_eq!(exit, code, "{args:?} {log}");
        assert_eq!(document["error"]["code"], name, "{args:?} {document}");
        let help = document["error"]["help"].as_str().unwrap();
        assert!(!help.is_empty(), "{args:?}");
    }
    // A disk that is full after half a kilobyte of a file.
    let done = Command::new("sh")
        .arg("-c")
        .arg("trap '' XFSZ; ulimit -f 1; exec \"$0\" --json new-plugin acme")
        .arg(build_dir().join("structures"))
        .current_dir(dir)
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert!(String::from_utf8_lossy(&done.stdout).contains("\"io\""));

    let left: Vec<_> = std::fs::read_dir(dir).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(std::fs::read_dir(dir.join("full")).unwrap().count(), 1);
}

#[test]
fn away_from_a_checkout_it_says_where_the_interface_comes_from() {
    let away = tempfile::tempdir().unwrap();
    let program = away.path().join("structures");
    std::fs::copy(build_dir().join("structures"), &program).unwrap();
    let mut command = Command::new(&program);
    command
        .current_dir(away.path())
        .args(["new-plugin", "acme"]);
    let (exit, written, log) = json(&mut command);
    assert_eq!(exit, 0, "{log}");
    let plugin = &written["plugin"];
    assert!(plugin["api"]["version"].is_string(), "{plugin:#}");
    let first = plugin["next"][0].as_str().unwrap();
    assert!(
        first.starts_with('#') && first.contains("--api DIR"),
        "{first}"
    );
}
