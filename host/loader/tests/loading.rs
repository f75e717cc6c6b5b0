//! What becomes of candidate files: one code each, and the good ones are loaded whatever lies beside them.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use structures_fixture_plugin::{fixture_copy, fixture_copy_as, library, Fault};
use structures_loader::{LoaderError, Outcome, Registry, ScanMode};
use structures_plugin_api::abi::API_VERSION;

use common::{code, foreign_library, row, scan_children, Place};

/// Faults that show before a plugin is loaded, and the code each has.
const AT_LOAD: &[(Fault, &str)] = &[
    (Fault::WrongArch, "arch_not_declared"),
    (Fault::MalformedArch, "arch_malformed"),
    (Fault::ApiMajor2, "api_major"),
    (Fault::Requires, "api_requires"),
    (Fault::DescribePanics, "describe_failed"),
    (Fault::DescribeAborts, "scan_crashed"),
    (Fault::BadDescribe, "bad_describe"),
    (Fault::DescribeChanges, "describe_changed"),
    (Fault::OpenFails, "plugin_open_failed"),
    (Fault::LoadAborts, "scan_crashed"),
    (Fault::LoadExits, "scan_failed"),
    (Fault::ApiMinorNewer, "loaded"),
    (Fault::Chatty, "loaded"),
    (Fault::None, "loaded"),
];

#[test]
fn each_fault_has_its_code_and_the_good_ones_survive() {
    let place = Place::new();
    for (fault, _) in AT_LOAD {
        fixture_copy(&place.plugins, *fault, fault.name());
    }
    let registry = place.scan();
    assert_eq!(registry.plugins.len(), AT_LOAD.len());
    for (fault, expected) in AT_LOAD {
        let file = format!("{}.so", fault.name());
        let row = row(&registry, &file);
        assert_eq!(
            code(&registry, &file),
            *expected,
            "{}: {:?}",
            fault.name(),
            row.reason
        );
        assert_eq!(row.outcome == Outcome::Loaded, *expected == "loaded");
        assert_eq!(row.reason.is_none(), *expected == "loaded");
        assert_eq!(row.sha256.as_ref().map(String::len), Some(64));
    }
    let ids: Vec<&str> = registry.loaded().iter().map(|p| p.id()).collect();
    assert_eq!(ids, ["api_minor_newer", "chatty", "none"]);
}

#[test]
fn reasons_carry_the_facts() {
    let place = Place::new();
    for fault in [
        Fault::WrongArch,
        Fault::ApiMajor2,
        Fault::Requires,
        Fault::DescribeAborts,
        Fault::DescribePanics,
    ] {
        fixture_copy(&place.plugins, fault, fault.name());
    }
    let registry = place.scan();
    for (file, facts) in [
        ("wrong_arch.so", &["wrong_arch", "aarch64", "x86_64"][..]),
        ("api_major_2.so", &["2.0.0", API_VERSION]),
        ("requires.so", &["time_travel", API_VERSION]),
        ("describe_aborts.so", &["SIGABRT"]),
        ("describe_panics.so", &["planted in describe"]),
    ] {
        let reason = row(&registry, file).reason.clone().unwrap_or_default();
        for fact in facts {
            assert!(reason.contains(fact), "{file}: {reason}");
        }
        assert!(!reason.contains('\n'), "{file}: one line");
    }
}

#[test]
fn a_chatty_library_cannot_reach_the_scan_s_stdout() {
    let place = Place::new();
    let chatty = fixture_copy(&place.plugins, Fault::Chatty, "chatty");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_structures-scan"))
        .args([std::ffi::OsStr::new("scan-plugin"), chatty.as_os_str()])
        .output()
        .expect("runs");
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    // The document, and that it was opened.
    assert_eq!(stdout.lines().count(), 2, "{stdout}");
    for line in stdout.lines() {
        let answer: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(answer["structures_scan"], 1);
    }
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(
        stderr.contains("while loading") && stderr.contains("while describing"),
        "{stderr}"
    );
}

#[test]
fn files_that_are_no_plugins_have_their_codes() {
    let place = Place::new();
    let dir = &place.plugins;
    std::fs::write(
        dir.join("text.so"),
        "this is only a text, whatever its name says\n",
    )
    .expect("write");
    std::fs::write(dir.join("empty.so"), "").expect("write");
    std::fs::create_dir(dir.join("directory.so")).expect("create");
    std::os::unix::fs::symlink(dir.join("nowhere"), dir.join("dangling.so")).expect("link");
    let pipe = std::process::Command::new("mkfifo")
        .arg(dir.join("pipe.so"))
        .status();
    fixture_copy(dir, Fault::None, "good");
    let mut expected = vec![
        ("text.so", "not_elf"),
        ("empty.so", "not_elf"),
        ("directory.so", "not_a_file"),
        ("dangling.so", "unreadable"),
        ("good.so", "loaded"),
    ];
    if pipe.is_ok_and(|s| s.success()) {
        expected.push(("pipe.so", "not_a_file"));
    }
    if let Some(foreign) = foreign_library() {
        std::fs::copy(foreign, dir.join("foreign.so")).expect("copy");
        expected.push(("foreign.so", "not_a_plugin"));
    }
    let registry = place.scan();
    for (file, code) in expected {
        assert_eq!(
            common::code(&registry, file),
            code,
            "{file}: {:?}",
            row(&registry, file).reason
        );
    }
}

#[test]
fn a_truncated_library_is_refused_at_every_length() {
    let place = Place::new();
    let whole = std::fs::read(library()).expect("read");
    let lengths: Vec<usize> = [64, 100, 4096, 100_000]
        .into_iter()
        .chain((1..10).map(|i| whole.len() * i / 10))
        .chain([whole.len() - 1])
        .collect();
    for length in &lengths {
        std::fs::write(
            place.plugins.join(format!("cut{length}.so")),
            &whole[..*length],
        )
        .expect("write");
    }
    fixture_copy(&place.plugins, Fault::None, "good");
    let registry = place.scan();
    for length in lengths {
        assert_eq!(
            code(&registry, &format!("cut{length}.so")),
            "elf_truncated",
            "{length}"
        );
    }
    assert_eq!(code(&registry, "good.so"), "loaded");
}

#[test]
fn permissions_are_part_of_the_rules() {
    let place = Place::new();
    let chmod = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
    };
    chmod(&fixture_copy(&place.plugins, Fault::None, "open"), 0o666);
    let secret = fixture_copy(&place.plugins, Fault::None, "secret");
    chmod(&secret, 0o000);
    let registry = place.scan();
    assert_eq!(code(&registry, "open.so"), "path_world_writable");
    // Root reads everything.
    let expected = if std::fs::File::open(&secret).is_ok() {
        "loaded"
    } else {
        "unreadable"
    };
    assert_eq!(code(&registry, "secret.so"), expected);
    chmod(&place.plugins, 0o777);
    assert_eq!(
        code(&place.scan(), "secret.so").replace("unreadable", "path_world_writable"),
        { "path_world_writable" }
    );
}

#[test]
fn a_hanging_scan_is_killed_and_the_next_one_goes_on() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::DescribeHangs, "a_hang");
    fixture_copy(&place.plugins, Fault::LoadHangs, "b_hang");
    fixture_copy(&place.plugins, Fault::None, "good");
    let mut options = place.options();
    options.deadline = Duration::from_millis(500);
    let start = Instant::now();
    let registry = Registry::scan(&options).expect("scan");
    assert!(
        start.elapsed() < Duration::from_secs(8),
        "{:?}",
        start.elapsed()
    );
    for (file, expected) in [
        ("a_hang.so", "scan_timeout"),
        ("b_hang.so", "scan_timeout"),
        ("good.so", "loaded"),
    ] {
        assert_eq!(code(&registry, file), expected);
    }
    // Other tests of this process may be scanning too; what they start is soon gone, a leak is not.
    let patience = Instant::now() + Duration::from_secs(10);
    while scan_children() > 0 {
        assert!(
            Instant::now() < patience,
            "a child is left, perhaps dead and not reaped"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ids_are_unique_in_a_directory_and_shadowed_across() {
    let place = Place::new();
    fixture_copy_as(&place.plugins, "one.so", Fault::None, "twin");
    fixture_copy_as(&place.plugins, "two.so", Fault::Scaled, "twin");
    fixture_copy(&place.plugins, Fault::None, "single");
    let later = place.dir("later");
    fixture_copy_as(&later, "single_again.so", Fault::Scaled, "single");
    fixture_copy_as(&later, "twin_again.so", Fault::None, "twin");
    let mut options = place.options();
    options.dirs.push(later);
    let registry = Registry::scan(&options).expect("scan");
    for (file, other) in [("one.so", "two.so"), ("two.so", "one.so")] {
        assert_eq!(code(&registry, file), "id_duplicate");
        assert!(row(&registry, file)
            .reason
            .as_ref()
            .is_some_and(|r| r.contains(other)));
    }
    assert_eq!(code(&registry, "single.so"), "loaded");
    let shadowed = row(&registry, "single_again.so");
    assert_eq!(
        (shadowed.outcome, shadowed.code.map(|c| c.name())),
        (Outcome::Shadowed, Some("shadowed"))
    );
    assert!(shadowed
        .reason
        .as_ref()
        .is_some_and(|r| r.contains("single.so")));
    assert_eq!(
        code(&registry, "twin_again.so"),
        "loaded",
        "a refused file shadows nothing"
    );
}

#[test]
fn one_file_is_loaded_once() {
    let place = Place::new();
    let file = fixture_copy(&place.plugins, Fault::None, "a");
    std::os::unix::fs::symlink(&file, place.plugins.join("b.so")).expect("link");
    let registry = place.scan();
    assert_eq!(registry.loaded().len(), 1);
    assert_eq!(code(&registry, "a.so"), "loaded");
    assert_eq!(
        (code(&registry, "b.so"), row(&registry, "b.so").outcome),
        ("same_file", Outcome::Shadowed)
    );
}

#[test]
fn what_is_opened_is_a_private_copy_and_reports_show_the_original() {
    let place = Place::new();
    let file = fixture_copy(&place.plugins, Fault::None, "good");
    let registry = place.scan();
    let plugin = registry.plugin("good").expect("loaded");
    assert_eq!(plugin.path(), file);
    let copy = place
        .root
        .join(format!("cache/objects/{}.so", plugin.sha256()));
    assert_eq!(
        std::fs::read(&copy).expect("copy"),
        std::fs::read(&file).expect("original")
    );
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    assert!(maps.contains(copy.to_str().expect("UTF-8")));
    assert!(!maps.contains(file.to_str().expect("UTF-8")));
}

#[test]
fn without_a_scanner_nothing_is_opened() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    let mut options = place.options();
    options.mode = ScanMode::Child(Some(place.root.join("no-such-program")));
    let registry = Registry::scan(&options).expect("scan");
    assert_eq!(code(&registry, "good.so"), "scanner_missing");
    options.mode = ScanMode::Child(Some("/bin/true".into()));
    assert_eq!(
        code(&Registry::scan(&options).expect("scan"), "good.so"),
        "scan_failed"
    );
    options.mode = ScanMode::InProcess;
    assert_eq!(
        code(&Registry::scan(&options).expect("scan"), "good.so"),
        "loaded"
    );
}

#[test]
fn errors_of_the_surroundings_stop_the_scan() {
    let place = Place::new();
    let registry = place.scan();
    assert!(registry.plugins.is_empty(), "an empty directory is fine");
    assert!(!place.root.join("cache").exists(), "and needs no cache");
    let mut options = place.options();
    options.dirs = vec![place.root.join("nowhere")];
    assert!(matches!(
        Registry::scan(&options),
        Err(LoaderError::SearchDir { .. })
    ));
    fixture_copy(&place.plugins, Fault::None, "good");
    let mut options = place.options();
    options.environment.cache_dir = Some("/proc/nothing/can/be/written".into());
    assert!(matches!(
        Registry::scan(&options),
        Err(LoaderError::Cache { .. })
    ));
    options.environment.cache_dir = None;
    assert!(matches!(
        Registry::scan(&options),
        Err(LoaderError::NoCacheDir)
    ));
}

#[test]
fn rows_have_the_names_that_scripts_rely_on() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    std::fs::write(place.plugins.join("text.so"), "text").expect("write");
    let rows = serde_json::to_value(place.scan().plugins).expect("serialises");
    let good = &rows[0];
    assert_eq!(good["id"], "good");
    assert_eq!(good["outcome"], "loaded");
    assert_eq!(good["forms"], 7);
    assert_eq!(good["archs"][0], std::env::consts::ARCH);
    let text = &rows[1];
    assert_eq!(
        (&text["outcome"], &text["code"]),
        (&"refused".into(), &"not_elf".into())
    );
    for name in [
        "id", "version", "vendor", "api", "path", "sha256", "outcome", "code", "reason", "archs",
        "forms",
    ] {
        assert!(
            good.get(name).is_some() && text.get(name).is_some(),
            "{name}"
        );
    }
}

#[test]
fn ten_plugins_are_scanned_quickly() {
    let place = Place::new();
    for i in 0..10 {
        fixture_copy(&place.plugins, Fault::None, &format!("p{i}"));
    }
    let first = time(&place);
    let second = time(&place);
    println!("10 plugins of 5 MB: {first:?} with copying, {second:?} without");
    assert!(second < Duration::from_secs(5));
}

fn time(place: &Place) -> Duration {
    let start = Instant::now();
    assert_eq!(place.scan().loaded().len(), 10);
    start.elapsed()
}
