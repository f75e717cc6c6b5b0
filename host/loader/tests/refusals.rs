//! One fixture for each code with which a file can be refused, all in one directory beside good plugins.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use structures_fixture_plugin::{c_fixture, fixture_copy, fixture_copy_as, library, Fault};
use structures_loader::{Code, Outcome, Registry, ScanOptions};

use common::{constructor, row, scan_children, Place};

/// Codes that need a scan of their own, and the tests that reach them.
const ELSEWHERE: &[(&str, &str)] = &[
    (
        "path_group_writable",
        "paths: a_foreign_group_may_not_write",
    ),
    (
        "lock_missing",
        "policies: a_lock_admits_what_it_lists_and_nothing_else",
    ),
    (
        "lock_unlisted",
        "policies: a_lock_admits_what_it_lists_and_nothing_else",
    ),
    (
        "lock_changed",
        "policies: a_lock_admits_what_it_lists_and_nothing_else",
    ),
    (
        "signature_missing",
        "policies: signatures_are_shown_and_refuse_when_they_are_required",
    ),
    (
        "signature_untrusted",
        "policies: signatures_are_shown_and_refuse_when_they_are_required",
    ),
    (
        "scanner_missing",
        "loading: without_a_scanner_nothing_is_opened",
    ),
    (
        "bytes_changed",
        "remembering: a_private_copy_that_was_changed_after_its_scan_is_not_opened",
    ),
    (
        "too_large",
        "elf: a_file_that_is_mostly_hole_is_refused_before_it_is_read",
    ),
    (
        "load_crashed",
        "remembering: what_ends_only_a_host_is_listed_and_quarantined_once_it_ended_one",
    ),
    (
        "scan_left_processes",
        "remembering: a_process_that_left_its_group_ends_with_the_scan_and_costs_the_plugin_its_place",
    ),
];

/// Every other one: file, code.
fn plant(place: &Place, later: &Path) -> Vec<(String, &'static str)> {
    let dir = place.plugins.as_path();
    let mut planted: Vec<(String, &'static str)> = Vec::new();
    let mut plant = |file: &str, code| planted.push((file.to_string(), code));

    // The file itself.
    std::os::unix::fs::symlink(dir.join("good_rust.so"), dir.join("link.so")).expect("link");
    plant("link.so", "same_file");
    fs::create_dir(dir.join("directory.so")).expect("create");
    plant("directory.so", "not_a_file");
    std::os::unix::fs::symlink(dir.join("nowhere"), dir.join("dangling.so")).expect("link");
    plant("dangling.so", "unreadable");
    let open = fixture_copy(dir, Fault::None, "open");
    fs::set_permissions(open, fs::Permissions::from_mode(0o666)).expect("chmod");
    plant("open.so", "path_world_writable");

    // Its headers.
    let whole = fs::read(library()).expect("read");
    let header = |file: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        edit(&mut bytes);
        fs::write(dir.join(file), bytes).expect("write");
    };
    header("not_elf.so", &|b| b[1] = b'X');
    header("truncated.so", &|b| b.truncate(b.len() / 2));
    header("class.so", &|b| b[4] = 1);
    header("endian.so", &|b| b[5] = 2);
    header("machine.so", &|b| b[18] = 40);
    header("type.so", &|b| b[16] = 1);
    header("malformed.so", &|b| b[54] = 1);
    for (file, code) in [
        ("not_elf.so", "not_elf"),
        ("truncated.so", "elf_truncated"),
        ("class.so", "elf_class"),
        ("endian.so", "elf_endian"),
        ("machine.so", "elf_machine"),
        ("type.so", "elf_type"),
        ("malformed.so", "elf_malformed"),
    ] {
        plant(file, code);
    }

    // What stands beside it.
    let signed = fixture_copy(dir, Fault::None, "signed");
    fs::write(signed.with_extension("so.sig"), "ed25519 00 00\n").expect("write");
    plant("signed.so", "signature_bad");
    for (id, text, code) in [
        ("sidecar_words", "no document", "sidecar_invalid"),
        ("sidecar_digest", "", "sidecar_mismatch"),
    ] {
        let library = fixture_copy(dir, Fault::None, id);
        let mut document = serde_json::to_value(structures_plugin_api::describe::Description::new(
            id, "v", "1.0.0",
        ))
        .expect("document");
        document["sha256"] = "0".repeat(64).into();
        let text = if text.is_empty() {
            document.to_string()
        } else {
            text.to_string()
        };
        fs::write(library.with_extension("plugin.json"), text).expect("write");
        plant(&format!("{id}.so"), code);
    }

    // Its initialisers and its door.
    for (file, define, code) in [
        ("aborts.so", "ABORTS", "scan_crashed"),
        ("segfaults.so", "SEGFAULTS", "scan_crashed"),
        ("hangs.so", "HANGS", "scan_timeout"),
        ("exits.so", "EXITS", "scan_failed"),
        ("undefined.so", "UNDEFINED", "open_failed"),
        ("no_door.so", "NO_DOOR", "not_a_plugin"),
    ] {
        constructor(dir, file, &[define]);
        plant(file, code);
    }
    header("abi_header.so", &|bytes| {
        let magic = abi_stable::library::AbiHeader::VALUE.magic_string;
        let at = bytes
            .windows(magic.len())
            .position(|w| w == magic)
            .expect("the header of abi_stable");
        bytes[at + magic.len()] = 99;
    });
    plant("abi_header.so", "abi_header");
    for (example, code) in [
        ("missing_layout", "layout_missing"),
        ("changed_field", "layout_mismatch"),
    ] {
        copy_example(dir, example);
        plant(&format!("{example}.so"), code);
    }
    c_fixture(dir, "no_table", &["NO_TABLE"]);
    plant("no_table.so", "door_failed");

    // What it says of itself.
    for (fault, code) in [
        (Fault::DescribePanics, "describe_failed"),
        (Fault::BadDescribe, "bad_describe"),
        (Fault::ApiMajor2, "api_major"),
        (Fault::Requires, "api_requires"),
        (Fault::MalformedArch, "arch_malformed"),
        (Fault::WrongArch, "arch_not_declared"),
        (Fault::DescribeChanges, "describe_changed"),
        (Fault::OpenFails, "plugin_open_failed"),
        // What it does when it is opened, which a child finds out.
        (Fault::OpenAborts, "scan_crashed"),
        (Fault::CloseAborts, "scan_crashed"),
        (Fault::OpenExits, "scan_failed"),
        (Fault::OpenHangs, "scan_timeout"),
        // Noise is no fault.
        (Fault::Chatty, "loaded"),
    ] {
        fixture_copy(dir, fault, fault.name());
        plant(&format!("{}.so", fault.name()), code);
    }
    for (file, fault) in [("twin_a.so", Fault::None), ("twin_b.so", Fault::Scaled)] {
        fixture_copy_as(dir, file, fault, "twin");
        plant(file, "id_duplicate");
    }
    fixture_copy_as(later, "good_again.so", Fault::Scaled, "good_rust");
    plant("good_again.so", "shadowed");

    fixture_copy(dir, Fault::None, "good_rust");
    plant("good_rust.so", "loaded");
    c_fixture(dir, "good_c", &[]);
    plant("good_c.so", "loaded");
    planted
}

/// An example of the door's crate.
fn copy_example(dir: &Path, name: &str) {
    let exe = std::env::current_exe().expect("a path");
    let profile = exe.ancestors().nth(2).expect("target/<profile>/deps");
    let built = profile.join("examples").join(format!("lib{name}.so"));
    fs::copy(&built, dir.join(format!("{name}.so"))).unwrap_or_else(|e| {
        panic!(
            "{}: {e}; `cargo build --release -p structures-plugin-door --examples`",
            built.display()
        )
    });
}

fn options(place: &Place, later: &Path) -> ScanOptions {
    let keys = place.dir("keys");
    fs::write(keys.join("vendor.pub"), include_str!("data/openssl.pub")).expect("write");
    let mut options = place.options();
    options.dirs.push(later.to_path_buf());
    options.environment.trusted_keys = Some(keys);
    options.deadline = Duration::from_secs(2);
    options
}

#[test]
fn a_directory_of_every_refusal_leaves_the_good_ones_usable() {
    let place = Place::new();
    let later = place.dir("later");
    let planted = plant(&place, &later);
    let options = options(&place, &later);

    let registry = Registry::scan(&options).expect("scan");
    let files: BTreeSet<String> = registry
        .plugins
        .iter()
        .map(|r| {
            r.path
                .file_name()
                .expect("name")
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    let expected: BTreeSet<String> = planted.iter().map(|(file, _)| file.clone()).collect();
    assert_eq!(files, expected);
    assert_eq!(registry.plugins.len(), planted.len(), "one row a file");
    for (file, code) in &planted {
        let row = row(&registry, file);
        assert_eq!(
            common::code(&registry, file),
            *code,
            "{file}: {:?}",
            row.reason
        );
        let outcome = match *code {
            "loaded" => Outcome::Loaded,
            "same_file" | "shadowed" => Outcome::Shadowed,
            _ => Outcome::Refused,
        };
        assert_eq!(row.outcome, outcome, "{file}");
        let reason = row.reason.clone().unwrap_or_default();
        assert_eq!(reason.is_empty(), *code == "loaded", "{file}");
        assert!(
            !reason.contains('\n') && reason.len() < 1000,
            "{file}: {reason}"
        );
    }
    for id in ["good_rust", "good_c"] {
        let plugin = registry.plugin(id).expect("usable");
        let form = &plugin.description().forms[0];
        let shapes = structures_plugin_api::describe::ProbeShapes {
            structure: form.structure.clone(),
            span: form.spans[0].clone(),
            rows: vec![1],
            ..Default::default()
        };
        assert!(plugin.probe(&form.name, 0, &shapes).is_ok(), "{id}");
    }
    let patience = Instant::now() + Duration::from_secs(10);
    while scan_children() > 0 {
        assert!(Instant::now() < patience, "a child is left");
        std::thread::sleep(Duration::from_millis(5));
    }

    // The second look says the same, and opens nothing that crashed or hung.
    let again = Registry::list(&options).expect("list");
    for (file, code) in &planted {
        assert_eq!(common::code(&again, file), *code, "{file} again");
        let quarantined = ["scan_crashed", "scan_timeout", "scan_failed"].contains(code);
        assert_eq!(
            row(&again, file).outcome == Outcome::Quarantined,
            quarantined,
            "{file}"
        );
    }

    // And nothing is missing.
    let reached: BTreeSet<&str> = planted
        .iter()
        .map(|(_, code)| *code)
        .chain(ELSEWHERE.iter().map(|(code, _)| *code))
        .filter(|code| *code != "loaded")
        .collect();
    let all: BTreeSet<&str> = Code::ALL.iter().map(|c| c.name()).collect();
    assert_eq!(reached, all, "each code has its fixture");
}

#[test]
fn a_long_layout_error_is_one_line_and_whole_in_the_log() {
    let place = Place::new();
    copy_example(&place.plugins, "changed_field");
    common::settle();
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        // The second one tells from what is remembered.
        for _ in 0..2 {
            log.0.lock().expect("lock").clear();
            let registry = place.list();
            let reason = row(&registry, "changed_field.so")
                .reason
                .clone()
                .expect("reason");
            assert!(!reason.contains('\n') && reason.len() < 1000, "{reason}");
            let text = String::from_utf8_lossy(&log.0.lock().expect("lock")).into_owned();
            assert!(text.len() > 4 * reason.len(), "{text}");
            assert!(text.contains("in full:"), "{text}");
        }
    });
}

#[derive(Clone, Default)]
struct Log(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("lock").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
