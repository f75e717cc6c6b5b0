//! Does a receipt still hold? Its digest, its fields, and what is different here: `structures receipts verify`.
//!
//! A record that was changed does not hold. One made elsewhere does, and everything that is not as it was then is
//! named: the environment, plugins, devices, structures. Nothing is bound or measured.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
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
}

/// Why a file is no receipt that holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unfit {
    /// `io`, `record_invalid` or `record_tampered`.
    pub code: &'static str,
    /// Expected and found.
    pub reason: String,
    /// The digest fits all the same.
    pub digest_ok: bool,
}

/// Reads a receipt as it was sealed: the one way in for every command that takes one.
pub(crate) fn read(path: &Path) -> Result<Receipt, Unfit> {
    let unfit = |code, digest_ok| {
        move |reason| Unfit {
            code,
            reason,
            digest_ok,
        }
    };
    let text = crate::fsio::read_text(path)
        .map_err(|e| format!("cannot be read: {e}"))
        .map_err(unfit("io", false))?;
    let record = strict_json(&text)
        .map_err(|e| format!("not JSON: {e}"))
        .map_err(unfit("record_invalid", false))?;
    let tampered = unfit("record_tampered", false);
    match inspect(&record) {
        Verdict::Intact => {}
        Verdict::Missing => {
            return Err(tampered(
                "it has no digest, so nothing says what it was".into(),
            ));
        }
        Verdict::Tampered { recorded, computed } => {
            return Err(tampered(format!(
                "it was changed after it was written: its digest is {recorded}, its content has {computed}"
            )));
        }
    }
    let invalid = unfit("record_invalid", true);
    let schema = record.get("schema").and_then(Json::as_u64);
    if schema != Some(u64::from(SCHEMA)) {
        let found = schema.map_or("none".to_string(), |s| s.to_string());
        return Err(invalid(format!(
            "expected a receipt of schema {SCHEMA}, found {found}"
        )));
    }
    serde_json::from_value(record)
        .map_err(|e| invalid(format!("a field is missing or of another kind: {e}")))
}

/// JSON in which no object has a key twice: of two values only one would be digested.
fn strict_json(text: &str) -> serde_json::Result<Json> {
    serde_json::from_str::<Strict>(text).map(|strict| strict.0)
}

struct Strict(Json);

impl<'de> serde::Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON without a key twice")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut all = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            all.push(item);
        }
        Ok(Json::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut all = serde_json::Map::new();
        while let Some((key, Strict(value))) = entries.next_entry::<String, Strict>()? {
            if all.contains_key(&key) {
                return Err(serde::de::Error::custom(format!(
                    "the key `{key}` stands twice in one object"
                )));
            }
            all.insert(key, value);
        }
        Ok(Json::Object(all))
    }
}

/// See the module.
pub fn verify(host: &Host, path: &Path) -> Verified {
    match read(path) {
        Ok(receipt) => Verified {
            path: path.display().to_string(),
            digest_ok: true,
            code: None,
            reason: None,
            drift: differences(host, &receipt),
        },
        Err(unfit) => Verified {
            path: path.display().to_string(),
            digest_ok: unfit.digest_ok,
            code: Some(unfit.code.into()),
            reason: Some(unfit.reason),
            drift: Vec::new(),
        },
    }
}

/// Environment, then plugins, the devices of seats and host operations, and structures.
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
    for (place, then) in devices(receipt) {
        let (plugin, device) = place;
        let here = host.registry.plugin(plugin).and_then(|p| {
            let listed = p.devices().ok()?.iter().find(|d| d.index == device)?;
            Some(format!("{} {}", listed.name, listed.arch))
        });
        found.extend(Drift::between(
            format!("devices.{plugin}:{device}"),
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

/// Name and architecture of every device something of the receipt runs on, by plugin and number.
fn devices(receipt: &Receipt) -> BTreeMap<(&str, u32), String> {
    let seats = receipt
        .bound()
        .filter_map(|s| Some((s.plugin.as_str(), s.device.as_ref()?)));
    let operations = receipt.device_operations.iter();
    seats
        .chain(operations.map(|o| (o.plugin.as_str(), &o.device)))
        .map(|(plugin, d)| ((plugin, d.index), format!("{} {}", d.name, d.arch)))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(text: &str) -> Unfit {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        std::fs::write(&path, text).unwrap();
        read(&path).unwrap_err()
    }

    #[test]
    fn what_is_no_receipt_has_one_code_for_everybody() {
        let mut sealed = json!({"schema": 1, "a": {"b": 1.5e-3, "c": [-1, null, true, "x"]}});
        crate::digest::seal(&mut sealed).unwrap();
        let text = sealed.to_string();
        let unfit = of(&text);
        assert_eq!((unfit.code, unfit.digest_ok), ("record_invalid", true));
        let changed = of(&text.replace("-1", "-2"));
        assert_eq!(
            (changed.code, changed.digest_ok),
            ("record_tampered", false)
        );
        // The second value would win over the first, and the digest would fit.
        let twice = of(&text.replace("\"b\":", "\"b\":7,\"b\":"));
        assert_eq!((twice.code, twice.digest_ok), ("record_invalid", false));
        assert!(twice.reason.contains("`b`"), "{}", twice.reason);
        assert_eq!(of("{").code, "record_invalid");
        assert_eq!(read(Path::new("/dev/zero")).unwrap_err().code, "io");
    }
}
