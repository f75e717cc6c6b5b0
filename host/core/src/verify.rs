//! Does a receipt still hold? Its digest, its fields, and what is different here: `structures receipts verify`.
//!
//! A record that was changed does not hold. One made elsewhere does, and everything that is not as it was then is
//! named: the environment, plugins, structures. Nothing is bound or measured.

use std::path::Path;

use serde::Serialize;
use serde_json::Value as Json;

use crate::digest::{inspect, Verdict};
use crate::environment::{drift, lock, Drift};
use crate::host::Host;
use crate::receipt::{Receipt, SCHEMA};

/// What became of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// The file as it was given.
    pub path: String,
    /// The digest is there and fits the record.
    pub digest_ok: bool,
    /// Code when the record does not hold: `io`, `record_invalid`, `record_tampered`.
    pub code: Option<String>,
    /// Why, for people.
    pub reason: Option<String>,
    /// What is different here.
    pub drift: Vec<Drift>,
}

impl Verified {
    /// Whether the record is what `attach` wrote.
    pub fn holds(&self) -> bool {
        self.code.is_none()
    }

    fn broken(path: &Path, code: &str, reason: String) -> Self {
        Verified {
            path: path.display().to_string(),
            digest_ok: false,
            code: Some(code.into()),
            reason: Some(reason),
            drift: Vec::new(),
        }
    }
}

/// See the module.
pub fn verify(host: &Host, path: &Path) -> Verified {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) => return Verified::broken(path, "io", format!("cannot be read: {e}")),
    };
    let record: Json = match serde_json::from_str(&text) {
        Ok(record) => record,
        Err(e) => return Verified::broken(path, "record_invalid", format!("not JSON: {e}")),
    };
    let tampered = |reason| Verified::broken(path, "record_tampered", reason);
    match inspect(&record) {
        Verdict::Intact => {}
        Verdict::Missing => {
            return tampered("it has no digest, so nothing says what it was".into());
        }
        Verdict::Tampered { recorded, computed } => {
            return tampered(format!(
                "it was changed after it was written: its digest is {recorded}, its content has {computed}"
            ));
        }
    }
    let invalid = |reason| Verified {
        digest_ok: true,
        ..Verified::broken(path, "record_invalid", reason)
    };
    let schema = record.get("schema").and_then(Json::as_u64);
    if schema != Some(u64::from(SCHEMA)) {
        let found = schema.map_or("none".to_string(), |s| s.to_string());
        return invalid(format!(
            "expected a receipt of schema {SCHEMA}, found {found}"
        ));
    }
    let receipt: Receipt = match serde_json::from_value(record) {
        Ok(receipt) => receipt,
        Err(e) => return invalid(format!("a field is missing or of another kind: {e}")),
    };
    Verified {
        path: path.display().to_string(),
        digest_ok: true,
        code: None,
        reason: None,
        drift: differences(host, &receipt),
    }
}

/// Environment, then plugins, then structures.
fn differences(host: &Host, receipt: &Receipt) -> Vec<Drift> {
    let mut found = drift(&receipt.environment, &lock());
    for note in &receipt.plugins {
        let here = host
            .registry
            .plugin(&note.id)
            .map(|p| format!("{} {}", p.description().version, p.sha256()));
        let then = format!("{} {}", note.version, note.sha256);
        found.extend(Drift::between(
            format!("plugins.{}", note.id),
            Some(then),
            here,
        ));
    }
    for (key, then) in &receipt.spec_digests {
        let here = key.rsplit_once('@').and_then(|(name, version)| {
            let spec = host.catalog.get_version(name, version.parse().ok()?).ok()?;
            Some(spec.digest.clone())
        });
        found.extend(Drift::between(
            format!("structures.{key}"),
            Some(then.clone()),
            here,
        ));
    }
    found
}
