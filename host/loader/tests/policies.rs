//! What an operator demands of a file before any of its code runs: lock, sidecar, signature.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::EncodePublicKey;
use ed25519_dalek::{Signer, SigningKey};
use structures_fixture_plugin::{fixture_copy, Fault};
use structures_loader::{LoaderError, LockPolicy, Outcome, Registry, ScanOptions, SignatureState};

use common::{code, constructor, row, Place};

fn locked(place: &Place, enforced: bool) -> ScanOptions {
    let mut options = place.options();
    options.lock = LockPolicy {
        file: Some(place.root.join("plugins.lock")),
        enforced,
    };
    options
}

fn scan(options: &ScanOptions) -> Registry {
    Registry::scan(options).expect("scan")
}

#[test]
fn a_lock_admits_what_it_lists_and_nothing_else() {
    let place = Place::new();
    let enforced = locked(&place, true);
    let mark = place.root.join("mark");
    fixture_copy(&place.plugins, Fault::None, "good");
    fixture_copy(&place.plugins, Fault::None, "other");
    assert_eq!(code(&scan(&enforced), "good.so"), "lock_missing");

    let lock = place.scan().to_lock();
    lock.write(&place.root.join("plugins.lock")).expect("write");
    let ids: Vec<&str> = lock.plugins.iter().map(|p| p.id.as_str()).collect();
    assert_eq!(ids, ["good", "other"]);
    let registry = scan(&enforced);
    assert_eq!(registry.loaded().len(), 2);
    let report = registry.lock.clone().expect("a lock was looked for");
    assert!(report.found && report.enforced && report.drift.is_empty());

    // Refused before any of its code runs.
    let define = format!("MARK=\"{}\"", mark.display());
    constructor(&place.plugins, "new.so", &[&define]);
    fixture_copy(&place.plugins, Fault::Scaled, "good");
    fs::remove_file(place.plugins.join("other.so")).expect("remove");
    let registry = scan(&enforced);
    assert_eq!(code(&registry, "new.so"), "lock_unlisted");
    assert_eq!(code(&registry, "good.so"), "lock_changed");
    assert!(!mark.exists(), "it was opened");
    for registry in [registry, Registry::list(&enforced).expect("list")] {
        let drift = registry.lock.expect("report").drift;
        let absent: Vec<&str> = drift.iter().map(|d| d.code.as_str()).collect();
        assert_eq!(absent, ["lock_absent"]);
    }
}

#[test]
fn without_enforcement_a_lock_only_reports() {
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    let lax = locked(&place, false);
    assert_eq!(scan(&lax).lock, None, "there is none");
    let lock = place.scan().to_lock();
    lock.write(&place.root.join("plugins.lock")).expect("write");
    fixture_copy(&place.plugins, Fault::Scaled, "good");
    fixture_copy(&place.plugins, Fault::None, "new");
    let registry = scan(&lax);
    assert_eq!(registry.loaded().len(), 2);
    let report = registry.lock.expect("report");
    let drift: Vec<(&str, &str)> = report
        .drift
        .iter()
        .map(|d| (d.file.as_str(), d.code.as_str()))
        .collect();
    assert_eq!(
        drift,
        [("good.so", "lock_changed"), ("new.so", "lock_unlisted")]
    );
    fs::write(place.root.join("plugins.lock"), "nonsense").expect("write");
    assert!(matches!(
        Registry::scan(&lax),
        Err(LoaderError::Lock { .. })
    ));
}

/// The document of a good fixture and the digest of `library`.
fn sidecar(place: &Place, library: &Path, edit: impl Fn(&mut serde_json::Value)) {
    let registry = place.scan();
    let row = registry
        .plugins
        .iter()
        .find(|r| r.path == library)
        .expect("row");
    let mut document = serde_json::to_value(row.description.clone()).expect("document");
    document["sha256"] = row.sha256.clone().expect("digest").into();
    edit(&mut document);
    fs::write(library.with_extension("plugin.json"), document.to_string()).expect("write");
}

#[test]
fn a_sidecar_must_agree_with_its_library() {
    let place = Place::new();
    let good = fixture_copy(&place.plugins, Fault::None, "good");
    sidecar(&place, &good, |_| ());
    for registry in [place.scan(), place.list()] {
        assert_eq!(code(&registry, "good.so"), "loaded");
        assert!(row(&registry, "good.so").sidecar);
    }
    type Edit = fn(&mut serde_json::Value);
    let edits: [(Edit, &str, &str); 5] = [
        (
            |d| d["vendor"] = "somebody else".into(),
            "sidecar_mismatch",
            "`vendor`",
        ),
        (
            |d| d["forms"] = serde_json::json!([]),
            "sidecar_mismatch",
            "`forms`",
        ),
        (
            |d| d["sha256"] = "0".repeat(64).into(),
            "sidecar_mismatch",
            "0000",
        ),
        (|d| d["sha256"] = "short".into(), "sidecar_invalid", "64"),
        (|d| d["api"] = "2.0.0".into(), "api_major", "2.0.0"),
    ];
    for (edit, expected, fact) in edits {
        fs::remove_file(good.with_extension("plugin.json")).expect("remove");
        sidecar(&place, &good, edit);
        let registry = place.scan();
        assert_eq!(code(&registry, "good.so"), expected);
        let reason = row(&registry, "good.so").reason.clone().expect("reason");
        assert!(reason.contains(fact), "{reason}");
    }
}

#[test]
fn a_name_that_its_sidecar_refuses_hides_no_other_name_of_the_file() {
    let place = Place::new();
    let good = fixture_copy(&place.plugins, Fault::None, "good");
    for link in ["a.so", "z.so"] {
        std::os::unix::fs::symlink(&good, place.plugins.join(link)).expect("link");
    }
    fs::write(place.plugins.join("a.plugin.json"), "nonsense").expect("write");
    for registry in [place.scan(), place.list(), place.list()] {
        for (file, expected) in [
            ("a.so", "sidecar_invalid"),
            ("good.so", "loaded"),
            ("z.so", "same_file"),
        ] {
            assert_eq!(code(&registry, file), expected, "{file}");
        }
        let reason = row(&registry, "z.so").reason.clone().expect("reason");
        assert!(reason.contains("good.so"), "{reason}");
    }
}

#[test]
fn a_cache_that_others_may_write_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    fixture_copy(&place.plugins, Fault::None, "good");
    place.scan();
    for name in ["objects", "scans"] {
        let dir = place.root.join("cache").join(name);
        for (mode, used) in [(0o777, false), (0o700, true)] {
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).expect("chmod");
            let scanned = Registry::scan(&place.options());
            assert_eq!(scanned.is_ok(), used, "{name} {mode:o}");
        }
    }
}

#[test]
fn a_sidecar_speaks_for_a_library_that_cannot_be_opened() {
    let place = Place::new();
    let good = fixture_copy(&place.plugins, Fault::None, "good");
    sidecar(&place, &good, |_| ());
    // The machine field of the header.
    let mut bytes = fs::read(&good).expect("read");
    bytes[18] = 40;
    fs::write(&good, bytes).expect("write");
    let registry = place.scan();
    assert_eq!(code(&registry, "good.so"), "elf_machine");
    assert_eq!(row(&registry, "good.so").id.as_deref(), Some("good"));
}

struct Keys {
    place: Place,
    dir: PathBuf,
}

impl Keys {
    fn new() -> Self {
        let place = Place::new();
        let dir = place.dir("keys");
        Keys { place, dir }
    }

    fn trust(&self, seed: u8) {
        let key = SigningKey::from_bytes(&[seed; 32]).verifying_key();
        let pem = key.to_public_key_pem(LineEnding::LF).expect("PEM");
        fs::write(self.dir.join(format!("{seed}.pub")), pem).expect("write");
    }

    fn sign(&self, library: &Path, seed: u8) {
        let key = SigningKey::from_bytes(&[seed; 32]);
        let signature = key.sign(&fs::read(library).expect("read"));
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let line = format!(
            "ed25519 {} {}\n",
            hex(key.verifying_key().as_bytes()),
            hex(&signature.to_bytes())
        );
        let mut path = library.as_os_str().to_owned();
        path.push(".sig");
        fs::write(path, line).expect("write");
    }

    fn scan(&self, require_signed: bool) -> Registry {
        let mut options = self.place.options();
        options.environment.trusted_keys = Some(self.dir.clone());
        options.require_signed = require_signed;
        let listed = Registry::list(&options).expect("list");
        let scanned = Registry::scan(&options).expect("scan");
        for (a, b) in listed.plugins.iter().zip(&scanned.plugins) {
            assert_eq!((a.code, &a.signature), (b.code, &b.signature));
        }
        scanned
    }
}

#[test]
fn signatures_are_shown_and_refuse_when_they_are_required() {
    let keys = Keys::new();
    let plugins = &keys.place.plugins;
    for (id, signer) in [("mine", Some(1)), ("theirs", Some(2)), ("bare", None)] {
        let library = fixture_copy(plugins, Fault::None, id);
        if let Some(seed) = signer {
            keys.sign(&library, seed);
        }
    }
    let state = |registry: &Registry, file: &str| row(registry, file).signature.clone();
    let registry = keys.scan(false);
    assert_eq!(registry.loaded().len(), 3, "no keys: nothing is judged");
    assert_eq!(
        state(&registry, "mine.so"),
        Some(SignatureState::Unverified)
    );
    assert_eq!(state(&registry, "bare.so"), Some(SignatureState::Unsigned));

    keys.trust(1);
    let registry = keys.scan(false);
    assert_eq!(registry.loaded().len(), 3, "shown only");
    let key = "1.pub".to_string();
    assert_eq!(
        state(&registry, "mine.so"),
        Some(SignatureState::Trusted { key })
    );
    assert!(matches!(
        state(&registry, "theirs.so"),
        Some(SignatureState::Untrusted { .. })
    ));

    let registry = keys.scan(true);
    assert_eq!(code(&registry, "mine.so"), "loaded");
    assert_eq!(code(&registry, "theirs.so"), "signature_untrusted");
    assert_eq!(code(&registry, "bare.so"), "signature_missing");

    // One more byte at the end, which an ELF file does not mind.
    let library = plugins.join("mine.so");
    let mut bytes = fs::read(&library).expect("read");
    bytes.insert(bytes.len() - 1, b'x');
    fs::write(&library, bytes).expect("write");
    for required in [false, true] {
        let registry = keys.scan(required);
        assert_eq!(code(&registry, "mine.so"), "signature_bad");
        assert_eq!(row(&registry, "mine.so").outcome, Outcome::Refused);
    }
    assert!(!code(&keys.place.scan(), "mine.so").starts_with("signature"));
}

#[test]
fn a_named_key_directory_must_exist() {
    let place = Place::new();
    let mut options = place.options();
    options.environment.trusted_keys = Some(place.root.join("nowhere"));
    assert!(matches!(
        Registry::scan(&options),
        Err(LoaderError::TrustedKeys { .. })
    ));
    options.environment.trusted_keys = None;
    options.environment.config_dir = Some(place.root.join("nowhere"));
    assert!(Registry::scan(&options).is_ok());
}
