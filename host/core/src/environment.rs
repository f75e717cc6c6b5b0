//! The environment lock of a record: the machine, and what the host was built with.
//!
//! Held by every receipt and covered by its digest. What differs later is *drift*: named difference by difference,
//! never guessed at. Packages that alone may change a number are named with their versions; the whole set has a
//! digest, so that a change anywhere else is seen too.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value as Json;
use structures_loader::pool::Pool;

use crate::digest::sha256_hex;

/// One difference between a record and here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// What differs, `environment.cpu` or `plugins.acme`.
    pub what: String,
    /// What the record says; absent when it says nothing.
    pub recorded: Option<String>,
    /// What is here; absent when nothing is.
    pub found: Option<String>,
}

impl Drift {
    /// `None` when there is no difference.
    pub fn between(what: String, recorded: Option<String>, found: Option<String>) -> Option<Self> {
        (recorded != found).then_some(Drift {
            what,
            recorded,
            found,
        })
    }
}

impl std::fmt::Display for Drift {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |v: &Option<String>| v.clone().unwrap_or_else(|| "nothing".into());
        write!(
            f,
            "{}: recorded {}, here {}",
            self.what,
            text(&self.recorded),
            text(&self.found)
        )
    }
}

/// The lock of this process.
pub fn lock() -> BTreeMap<String, Json> {
    let all = env!("STRUCTURES_PACKAGES");
    let key: BTreeSet<&str> = env!("STRUCTURES_KEY_PACKAGES").split(' ').collect();
    let packages: BTreeMap<&str, &str> = all
        .split(' ')
        .filter_map(|p| p.split_once('='))
        .filter(|(name, _)| key.contains(name))
        .collect();
    let digest = match all {
        "" => "unknown: built without its lock file".to_string(),
        all => sha256_hex(all.as_bytes()),
    };
    BTreeMap::from([
        ("os".to_string(), Json::from(std::env::consts::OS)),
        ("arch".to_string(), Json::from(std::env::consts::ARCH)),
        ("cpu".to_string(), Json::from(cpu_name())),
        ("cpu_features".to_string(), Json::from(cpu_features())),
        ("threads".to_string(), Json::from(Pool::global().threads())),
        (
            "structures".to_string(),
            Json::from(env!("CARGO_PKG_VERSION")),
        ),
        (
            "plugin_api".to_string(),
            Json::from(structures_plugin_api::abi::API_VERSION),
        ),
        ("rustc".to_string(), Json::from(env!("STRUCTURES_RUSTC"))),
        ("packages".to_string(), serde_json::json!(packages)),
        ("packages_sha256".to_string(), Json::from(digest)),
    ])
}

/// Every difference, in the order of names. A record without a lock says so in one entry.
pub fn drift(recorded: &BTreeMap<String, Json>, here: &BTreeMap<String, Json>) -> Vec<Drift> {
    if recorded.is_empty() {
        return vec![Drift {
            what: "environment".into(),
            recorded: None,
            found: Some("a lock: this record has none, so nothing can be compared".into()),
        }];
    }
    let (then, now) = (flat(recorded), flat(here));
    let names: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    names
        .into_iter()
        .filter_map(|name| {
            let what = format!("environment.{name}");
            Drift::between(what, then.get(name).cloned(), now.get(name).cloned())
        })
        .collect()
}

/// Nested objects as `a.b`; lists and scalars as text.
fn flat(map: &BTreeMap<String, Json>) -> BTreeMap<String, String> {
    fn add(prefix: &str, value: &Json, out: &mut BTreeMap<String, String>) {
        match value {
            Json::Object(fields) => {
                for (name, value) in fields {
                    add(&format!("{prefix}.{name}"), value, out);
                }
            }
            Json::String(text) => {
                out.insert(prefix.to_string(), text.clone());
            }
            other => {
                out.insert(prefix.to_string(), other.to_string());
            }
        }
    }
    let mut out = BTreeMap::new();
    for (name, value) in map {
        add(name, value, &mut out);
    }
    out
}

fn cpu_features() -> Vec<String> {
    match structures_loader::arch::Device::host_cpu() {
        structures_loader::arch::Device::Cpu { features, .. } => features.into_iter().collect(),
        _ => Vec::new(),
    }
}

/// The processor's own name, which is also the name of the CPU as a device in recorded decisions.
pub fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    text.lines()
        .find_map(|l| l.strip_prefix("model name"))
        .map(|l| l.trim_start_matches([' ', '\t', ':']).to_string())
        .unwrap_or_else(|| "unknown".into())
}

/// Bytes of memory that can still be had without swapping; `None` where the system does not say.
pub fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_309_drift_lists_each_difference() {
        let here = lock();
        assert!(drift(&here, &here).is_empty());
        let mut other = here.clone();
        other.insert("cpu".into(), Json::from("another"));
        other.insert("packages".into(), serde_json::json!({"rayon": "0.0.1"}));
        other.remove("rustc");
        let found = drift(&other, &here);
        let names: Vec<&str> = found.iter().map(|d| d.what.as_str()).collect();
        assert!(names.contains(&"environment.cpu"), "{names:?}");
        assert!(names.contains(&"environment.packages.rayon"), "{names:?}");
        let rustc = found.iter().find(|d| d.what == "environment.rustc");
        assert_eq!(rustc.map(|d| d.recorded.clone()), Some(None));
    }

    #[test]
    fn b_309_a_change_of_any_package_is_seen_when_the_named_ones_match() {
        let here = lock();
        let mut other = here.clone();
        other.insert("packages_sha256".into(), Json::from("0".repeat(64)));
        let found = drift(&other, &here);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].what, "environment.packages_sha256");
        assert_eq!(
            here["packages"]["candle-core"].as_str().map(str::is_empty),
            Some(false),
            "a package that decides numbers is named"
        );
    }

    #[test]
    fn b_309_a_record_without_a_lock_is_said_to_have_none() {
        let found = drift(&BTreeMap::new(), &lock());
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().contains("has none"), "{}", found[0]);
    }
}
