//! What a scan remembers, what it must notice nevertheless, and what stays out until the file changes.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use structures_fixture_plugin::{c_fixture, fixture_copy, fixture_copy_as, Fault};
use structures_loader::{forget, Outcome, Registry, ScanMode};

use common::{code, constructor, row, scan_children, settle, Place};

#[test]
fn a_second_listing_opens_nothing() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    fixture_copy(&place.plugins, Fault::WrongArch, "wrong_arch");
    constructor(&place.plugins, "library.so", &[]);
    settle();
    let mut options = place.options();
    let (mode, count) = place.counting();
    options.mode = mode;
    let first = Registry::list(&options).expect("list");
    assert_eq!((count(), first.loaded().len()), (3, 0));
    assert_eq!(code(&first, "good.so"), "loaded");
    let second = Registry::list(&options).expect("list");
    assert_eq!(
        (count(), second.loaded().len()),
        (3, 0),
        "nothing was opened"
    );
    for (a, b) in first.plugins.iter().zip(&second.plugins) {
        let facts = |r: &structures_loader::PluginRow| {
            (
                (
                    r.id.clone(),
                    r.version.clone(),
                    r.vendor.clone(),
                    r.api.clone(),
                ),
                (r.sha256.clone(), r.outcome, r.code, r.reason.clone()),
                (r.archs.clone(), r.forms),
            )
        };
        assert_eq!(facts(a), facts(b));
    }
    // Whoever wants to call something gets it loaded, from the remembered document.
    let third = Registry::scan(&options).expect("scan");
    assert_eq!((count(), third.loaded().len()), (3, 1));
    // Another scanner may answer otherwise.
    assert_eq!(code(&place.list(), "good.so"), "loaded");
}

#[test]
fn a_damaged_or_foreign_cache_costs_a_scan_and_nothing_else() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    settle();
    place.list();
    let file = place.root.join("cache/scans/scans.json");
    let whole = fs::read_to_string(&file).expect("written");
    for bad in [
        "",
        "{",
        "{\"version\":99}",
        &whole.replace("api 1.", "api 9."),
    ] {
        fs::write(&file, bad).expect("spoil");
        assert_eq!(code(&place.list(), "good.so"), "loaded", "{bad}");
        assert_eq!(
            fs::read_to_string(&file).expect("rewritten").len(),
            whole.len()
        );
    }
    let mode = |path: &Path| path.metadata().expect("metadata").mode() & 0o777;
    assert_eq!(mode(&file), 0o600);
    assert_eq!(mode(&place.root.join("cache/scans")), 0o700);
    assert_eq!(mode(&place.root.join("cache/objects")), 0o700);
    for copy in fs::read_dir(place.root.join("cache/objects")).expect("objects") {
        assert_eq!(mode(&copy.expect("entry").path()), 0o400);
    }
}

#[test]
fn one_flipped_byte_of_the_same_size_and_time_is_noticed() {
    let place = Place::new();
    let file = fixture_copy(&place.plugins, Fault::None, "good");
    settle();
    let before = place.list();
    let metadata = file.metadata().expect("metadata");
    let mut bytes = fs::read(&file).expect("read");
    // The last letter of the id, at the end of the trailer.
    let last = bytes.len() - 2;
    bytes[last] = b'f';
    fs::write(&file, bytes).expect("flip");
    let times = fs::FileTimes::new().set_modified(metadata.modified().expect("mtime"));
    let open = fs::File::options().write(true).open(&file).expect("open");
    open.set_times(times).expect("times");
    let now = file.metadata().expect("metadata");
    assert_eq!(
        (now.ino(), now.len(), now.mtime(), now.mtime_nsec()),
        (
            metadata.ino(),
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec()
        )
    );
    let after = place.list();
    assert_eq!(row(&before, "good.so").id.as_deref(), Some("good"));
    assert_eq!(row(&after, "good.so").id.as_deref(), Some("goof"));
    assert_ne!(
        row(&before, "good.so").sha256,
        row(&after, "good.so").sha256
    );
}

#[test]
fn a_load_believes_no_stamp() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "a");
    fixture_copy(&place.plugins, Fault::None, "b");
    settle();
    let first = place.list();
    // As if `a.so` had been replaced by other bytes that keep every stamp.
    let sha256 = |file| row(&first, file).sha256.clone().expect("digest");
    let file = place.root.join("cache/scans/scans.json");
    let text = fs::read_to_string(&file).expect("read");
    let (files, objects) = text.split_once("\"objects\"").expect("two tables");
    let lie = files.replacen(&sha256("a.so"), &sha256("b.so"), 1);
    let unopened = objects.replace("\"loaded\":true", "\"loaded\":false");
    fs::write(&file, format!("{lie}\"objects\"{objects}")).expect("lie");
    let loaded = place.scan();
    for (file, id) in [("a.so", "a"), ("b.so", "b")] {
        assert_eq!(code(&loaded, file), "loaded");
        assert_eq!(row(&loaded, file).id.as_deref(), Some(id));
    }
    fs::remove_file(place.plugins.join("b.so")).expect("remove");
    fs::write(&file, format!("{lie}\"objects\"{unopened}")).expect("lie");
    let listed = place.list();
    assert_eq!(code(&listed, "a.so"), "bytes_changed");
    assert_eq!(
        code(&place.list(), "a.so"),
        "loaded",
        "the lie is forgotten"
    );
}

#[test]
fn what_is_loaded_is_what_was_scanned_though_the_file_was_swapped_meanwhile() {
    let place = Place::new();
    let file = fixture_copy(&place.plugins, Fault::None, "first");
    let other = fixture_copy(&place.root, Fault::None, "other");
    let mut options = place.options();
    let swap = format!("cp {} {}", other.display(), file.display());
    options.mode = place.scanner("swapping", ":", &swap);
    let registry = Registry::scan(&options).expect("scan");
    let plugin = registry
        .plugin("first")
        .expect("the scanned bytes are loaded");
    let copy = place
        .root
        .join(format!("cache/objects/{}.so", plugin.sha256()));
    assert_ne!(
        fs::read(copy).expect("copy"),
        fs::read(&file).expect("swapped")
    );
    // The next one sees the other file, also in a listing right after it.
    assert_eq!(row(&place.list(), "first.so").id.as_deref(), Some("other"));
}

#[test]
fn a_private_copy_that_was_changed_after_its_scan_is_not_opened() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    let mut options = place.options();
    let spoil = "chmod u+w \"$2\"; printf x >> \"$2\"";
    options.mode = place.scanner("spoiling", ":", spoil);
    let registry = Registry::scan(&options).expect("scan");
    assert_eq!(code(&registry, "good.so"), "bytes_changed");
    assert!(registry.loaded().is_empty());
    assert_eq!(
        code(&place.scan(), "good.so"),
        "loaded",
        "and it is replaced"
    );
}

#[test]
fn a_crash_is_quarantined_until_the_file_changes_or_all_is_forgotten() {
    let place = Place::new();
    let file = constructor(&place.plugins, "bad.so", &["SEGFAULTS"]);
    let mut options = place.options();
    let (mode, count) = place.counting();
    options.mode = mode;
    let scan = |expected: Outcome, scans: usize| {
        let registry = Registry::list(&options).expect("list");
        let row = row(&registry, "bad.so");
        assert_eq!(code(&registry, "bad.so"), "scan_crashed");
        assert_eq!(
            (row.outcome, count()),
            (expected, scans),
            "{:?}",
            row.reason
        );
        row.clone()
    };
    scan(Outcome::Refused, 1);
    let row = scan(Outcome::Quarantined, 1);
    let entry = row.quarantine.expect("entry");
    assert_eq!((entry.signal, entry.until), (Some(11), None));
    let reason = row.reason.expect("reason");
    for fact in ["SIGSEGV", "until the file changes", "plugins rescan"] {
        assert!(reason.contains(fact), "{reason}");
    }
    // A copy of the same bytes is in quarantine too; other bytes are not.
    fs::copy(&file, place.plugins.join("copy.so")).expect("copy");
    scan(Outcome::Quarantined, 1);
    fs::remove_file(place.plugins.join("copy.so")).expect("remove");
    let mut bytes = fs::read(&file).expect("read");
    bytes.push(0);
    fs::write(&file, bytes).expect("change");
    scan(Outcome::Refused, 2);
    scan(Outcome::Quarantined, 2);
    assert_eq!(forget(&options.environment).expect("forget").1, 2);
    scan(Outcome::Refused, 3);
}

#[test]
fn a_time_out_is_quarantined_for_an_hour() {
    let place = Place::new();
    constructor(&place.plugins, "bad.so", &["HANGS"]);
    let mut options = place.options();
    options.deadline = Duration::from_millis(300);
    let list = || Registry::list(&options).expect("list");
    assert_eq!(row(&list(), "bad.so").outcome, Outcome::Refused);
    let start = Instant::now();
    let again = list();
    let row = row(&again, "bad.so");
    assert!(
        start.elapsed() < Duration::from_millis(250),
        "not waited for"
    );
    assert_eq!(
        (row.outcome, code(&again, "bad.so")),
        (Outcome::Quarantined, "scan_timeout")
    );
    let entry = row.quarantine.clone().expect("entry");
    assert_eq!(entry.until, Some(entry.since + 3600));
    // As if it had been long ago.
    let file = place
        .root
        .join(format!("cache/quarantine/{}.json", entry.sha256));
    let text = fs::read_to_string(&file).expect("read");
    let past = text
        .replace(&entry.since.to_string(), &(entry.since - 3601).to_string())
        .replace(
            &(entry.since + 3600).to_string(),
            &(entry.since - 1).to_string(),
        );
    fs::write(&file, past).expect("write");
    assert_eq!(
        self::row(&list(), "bad.so").outcome,
        Outcome::Refused,
        "tried again"
    );
}

#[test]
fn constructors_of_every_kind_leave_the_good_ones_alone() {
    let place = Place::new();
    for (file, define) in [
        ("aborts.so", "ABORTS"),
        ("exits.so", "EXITS"),
        ("forges.so", "PRINTS"),
        ("forks.so", "FORKS"),
        ("hangs.so", "HANGS"),
        ("segfaults.so", "SEGFAULTS"),
        ("spins.so", "SPINS"),
        ("undefined.so", "UNDEFINED"),
    ] {
        constructor(&place.plugins, file, &[define]);
    }
    fixture_copy_as(&place.plugins, "a.so", Fault::None, "a");
    fixture_copy_as(&place.plugins, "z.so", Fault::None, "z");
    let mut options = place.options();
    options.deadline = Duration::from_secs(1);
    let registry = Registry::scan(&options).expect("scan");
    for (file, expected) in [
        ("a.so", "loaded"),
        ("aborts.so", "scan_crashed"),
        ("exits.so", "scan_failed"),
        ("forges.so", "not_a_plugin"),
        ("forks.so", "scan_crashed"),
        ("hangs.so", "scan_timeout"),
        ("segfaults.so", "scan_crashed"),
        ("spins.so", "scan_timeout"),
        ("undefined.so", "open_failed"),
        ("z.so", "loaded"),
    ] {
        assert_eq!(code(&registry, file), expected, "{file}");
    }
    assert_eq!(registry.loaded().len(), 2);
    let patience = Instant::now() + Duration::from_secs(10);
    while scan_children() > 0 {
        assert!(Instant::now() < patience, "a child is left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_plugin_that_kills_in_open_kills_a_child_and_not_the_host() {
    let place = Place::new();
    let faults = [
        (Fault::OpenAborts, "scan_crashed"),
        (Fault::CloseAborts, "scan_crashed"),
        (Fault::OpenExits, "scan_failed"),
        (Fault::OpenHangs, "scan_timeout"),
        (Fault::OpenFails, "plugin_open_failed"),
    ];
    for (fault, _) in faults {
        fixture_copy(&place.plugins, fault, fault.name());
    }
    fixture_copy(&place.plugins, Fault::None, "good");
    let mut options = place.options();
    options.deadline = Duration::from_secs(2);
    let (mode, count) = place.counting();
    options.mode = mode;
    for round in 0..2 {
        let registry = Registry::scan(&options).expect("scan");
        for (fault, expected) in faults {
            let file = format!("{}.so", fault.name());
            let found = row(&registry, &file);
            assert_eq!(
                code(&registry, &file),
                expected,
                "{round}: {:?}",
                found.reason
            );
            let stays = fault != Fault::OpenFails;
            assert_eq!(found.quarantine.is_some(), round == 1 && stays);
            let reason = found.reason.clone().unwrap_or_default();
            assert!(
                reason.contains("opened") || fault == Fault::OpenFails,
                "{reason}"
            );
        }
        assert_eq!(code(&registry, "good.so"), "loaded");
    }
    // In quarantine is not even a child's business; what was only refused is asked again.
    assert_eq!(count(), 6 + 1);
}

/// Set for a process that opens the plugins below it.
const OPENS: &str = "STRUCTURES_TEST_OPENS";

#[test]
fn what_ends_only_a_host_is_listed_and_quarantined_once_it_ended_one() {
    let mut place = Place::new();
    if let Some(root) = std::env::var_os(OPENS) {
        place.root = root.into();
        place.plugins = place.root.join("plugins");
        place.scan();
        return;
    }
    c_fixture(&place.plugins, "host", &["HOST_ABORTS"]);
    // This process is still there afterwards.
    for _ in 0..2 {
        assert_eq!(code(&place.list(), "host.so"), "loaded");
    }
    let opened = std::process::Command::new(std::env::current_exe().expect("path"))
        .args([
            "--exact",
            "what_ends_only_a_host_is_listed_and_quarantined_once_it_ended_one",
        ])
        .env(OPENS, &place.root)
        .output()
        .expect("runs");
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&opened.status),
        Some(6)
    );
    for registry in [place.scan(), place.list()] {
        let row = row(&registry, "host.so");
        assert_eq!(
            code(&registry, "host.so"),
            "load_crashed",
            "{:?}",
            row.reason
        );
        assert_eq!(row.outcome, Outcome::Quarantined);
        assert!(row.quarantine.as_ref().is_some_and(|q| q.until.is_some()));
    }
    assert_eq!(forget(&place.options().environment).expect("forget").1, 1);
    assert_eq!(code(&place.list(), "host.so"), "loaded");
}

/// Whether the process whose id is in this file runs.
fn runs(file: &Path) -> bool {
    let pid = fs::read_to_string(file).expect("the fixture wrote its id");
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

#[test]
fn a_process_that_left_its_group_ends_with_the_scan_and_costs_the_plugin_its_place() {
    let place = Place::new();
    let pid = place.root.join("pid");
    c_fixture(
        &place.plugins,
        "leaves",
        &[&format!("LEAVES=\"{}\"", pid.display())],
    );
    let registry = place.scan();
    let found = row(&registry, "leaves.so");
    assert_eq!(
        code(&registry, "leaves.so"),
        "scan_left_processes",
        "{:?}",
        found.reason
    );
    assert!(!runs(&pid));
    // Also when the child does not end by itself.
    let late = place.root.join("late");
    fs::remove_file(place.plugins.join("leaves.so")).expect("remove");
    let leaves = format!("LEAVES=\"{}\"", late.display());
    c_fixture(&place.plugins, "late", &[&leaves, "LATE"]);
    let mut options = place.options();
    options.deadline = Duration::from_secs(1);
    let registry = Registry::scan(&options).expect("scan");
    assert_eq!(code(&registry, "late.so"), "scan_timeout");
    assert!(!runs(&late));
}

#[test]
fn a_parent_that_ignores_its_children_s_ends_scans_all_the_same() {
    const NAME: &str = "a_parent_that_ignores_its_children_s_ends_scans_all_the_same";
    let place = Place::new();
    if std::env::var_os(OPENS).is_none() {
        let ignored = format!("trap '' CHLD; exec \"$0\" --exact {NAME}");
        let test = std::env::current_exe().expect("path");
        let output = std::process::Command::new("/bin/bash")
            .args(["-c", &ignored])
            .arg(test)
            .env(OPENS, "")
            .output()
            .expect("runs");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stdout)
        );
        return;
    }
    fixture_copy(&place.plugins, Fault::None, "good");
    let registry = place.scan();
    assert_eq!(
        code(&registry, "good.so"),
        "loaded",
        "{:?}",
        row(&registry, "good.so").reason
    );
}

#[test]
fn an_exit_is_quarantined_and_another_scanner_s_entry_is_none() {
    let place = Place::new();
    constructor(&place.plugins, "bad.so", &["EXITS"]);
    let mut options = place.options();
    let (mode, count) = place.counting();
    for outcome in [Outcome::Refused, Outcome::Quarantined] {
        options.mode = mode.clone();
        let registry = Registry::list(&options).expect("list");
        assert_eq!(code(&registry, "bad.so"), "scan_failed");
        assert_eq!((row(&registry, "bad.so").outcome, count()), (outcome, 1));
    }
    options.mode = place.options().mode;
    let registry = Registry::list(&options).expect("list");
    assert_eq!(row(&registry, "bad.so").outcome, Outcome::Refused);
}

#[test]
fn a_machine_a_plugin_is_not_for_does_not_open_it() {
    let place = Place::new();
    // As wrong as `wrong_arch`, and fatal besides: nobody gets that far.
    let file = fixture_copy(&place.plugins, Fault::WrongArch, "wrong_arch");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_structures-scan"))
        .args([std::ffi::OsStr::new("scan-plugin"), file.as_os_str()])
        .output()
        .expect("runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(!text.contains("\"opens\""), "{text}");
}

#[test]
fn scans_run_side_by_side() {
    let place = Place::new();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for i in 0..2 {
        constructor(
            &place.plugins,
            &format!("h{i}.so"),
            &["HANGS", &format!("N={i}")],
        );
    }
    let mut options = place.options();
    options.deadline = Duration::from_secs(2);
    let start = Instant::now();
    Registry::list(&options).expect("list");
    if cores >= 2 {
        assert!(
            start.elapsed() < Duration::from_millis(3500),
            "{:?}",
            start.elapsed()
        );
    }
}

#[test]
fn the_cache_directory_moves_everything() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    constructor(&place.plugins, "bad.so", &["ABORTS"]);
    place.list();
    let mut found: Vec<String> = fs::read_dir(place.root.join("cache"))
        .expect("cache")
        .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    found.sort();
    assert_eq!(found, ["objects", "quarantine", "scans"]);
    let mut rest: Vec<String> = fs::read_dir(&place.root)
        .expect("root")
        .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    rest.sort();
    assert_eq!(rest, ["cache", "plugins"]);
}

#[test]
fn without_a_scanner_what_is_known_is_still_listed() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    settle();
    place.list();
    let mut options = place.options();
    options.mode = ScanMode::Child(Some(place.root.join("nowhere")));
    let registry = Registry::list(&options).expect("list");
    // Another host's answers are not believed, and nobody describes it anew.
    assert_eq!(code(&registry, "good.so"), "scanner_missing");
}

#[test]
fn the_trace_names_every_place_and_every_step() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    fs::write(place.plugins.join("text.so"), "text").expect("write");
    settle();
    let mut options = place.options();
    options.dirs.push(place.plugins.clone());
    options.environment.data_dir = Some(place.root.join("nowhere"));
    options.environment.ignored = vec!["STRUCTURES_PLUGIN_PATH"];
    Registry::list(&options).expect("list");
    let registry = Registry::list(&options).expect("list");
    let reasons: Vec<(&str, Option<&str>)> = registry
        .trace
        .iter()
        .map(|p| (p.source, p.reason.as_deref()))
        .collect();
    let same = format!("the same directory as {}", place.plugins.display());
    assert_eq!(
        reasons,
        [
            ("--plugins", None),
            ("--plugins", Some(same.as_str())),
            (
                "STRUCTURES_PLUGIN_PATH",
                Some("ignored: the process runs with raised rights")
            ),
            ("STRUCTURES_ADD_PLUGIN_PATH", Some("not set")),
            ("the user's data directory", Some("it does not exist")),
            ("`plugins` beside the program", Some("not known")),
            ("the program's directory", Some("not known")),
        ]
    );
    let files = &registry.trace[0].candidates;
    assert_eq!(files.len(), 2);
    assert!(files[0]
        .steps
        .iter()
        .any(|s| s.contains("opened before (cache)")));
    assert_eq!(files[1].code.map(|c| c.name()), Some("not_elf"));
    assert!(registry.trace[1..].iter().all(|p| p.candidates.is_empty()));
}
