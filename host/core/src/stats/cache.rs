//! Calibrations that were measured before, so that the same question is answered without running the model.
//!
//! A file is found by the checkpoint's short hash and the length of a sample. It is used only when everything that a
//! measurement depends on is what it was: format version, hash, length, and a digest over scheme, percentile, samples
//! and specs that the caller computes; and when its own digest says that it is what was stored. Anything else is
//! measured again; that is never an error, but always said.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Calibration;
use crate::fsio::{write_atomic, WriteError};
use crate::precision::{Descriptor, Numbers};

/// Of the file; a reader of another version measures again.
pub const CACHE_VERSION: u32 = 2;

/// What a file is found by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheKey {
    /// Short hash of the checkpoint: sha256 of its first 64 KiB and its size, 16 hex digits.
    pub checkpoint: String,
    /// Tokens of the longest sample.
    pub sequence: usize,
    /// Digest of everything else the measurement depends on.
    pub question: String,
}

/// A stored calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cached {
    /// [`CACHE_VERSION`].
    pub version: u32,
    /// As in [`CacheKey`].
    pub checkpoint: String,
    /// As in [`CacheKey`].
    pub sequence: usize,
    /// As in [`CacheKey`].
    pub question: String,
    /// Fitted samples.
    pub samples: usize,
    /// Reduced points.
    pub points: usize,
    /// Scale of every point that has a static one.
    pub activation_scales: BTreeMap<String, f32>,
    /// The dtype it is for.
    pub activation_dtypes: BTreeMap<String, String>,
    /// Exponent of the channel balance at each point that has channels.
    pub alphas: BTreeMap<String, f32>,
    /// Scales of weights; empty here, since a form takes them from the weight at bind.
    pub weight_scales: BTreeMap<String, Vec<f32>>,
    /// What the scales were made of.
    pub calibration: Calibration,
}

/// Why a calibration is measured again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stale {
    /// The caller wants it so.
    Forced,
    /// There is no file.
    Missing,
    /// It does not parse.
    Unreadable(String),
    /// It is not what was stored: its digest is another one, or gone.
    Changed,
    /// It is about something else.
    Differs {
        /// `version`, `checkpoint`, `sequence` or `question`.
        what: &'static str,
        /// Stored.
        stored: String,
        /// Wanted.
        wanted: String,
    },
}

impl std::fmt::Display for Stale {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stale::Forced => write!(f, "measured again as asked"),
            Stale::Missing => write!(f, "no stored calibration"),
            Stale::Unreadable(why) => write!(f, "the stored calibration cannot be read: {why}"),
            Stale::Changed => write!(f, "the stored calibration is not what was stored"),
            Stale::Differs {
                what,
                stored,
                wanted,
            } => write!(
                f,
                "the stored calibration's {what} is {stored}, wanted {wanted}"
            ),
        }
    }
}

/// A directory of stored calibrations.
#[derive(Clone, Debug)]
pub struct CalibrationCache {
    dir: PathBuf,
}

impl CalibrationCache {
    /// In this directory, which need not exist yet.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        CalibrationCache { dir: dir.into() }
    }

    /// Where a key's calibration is.
    pub fn path(&self, key: &CacheKey) -> PathBuf {
        self.dir
            .join(format!("{}-{}.json", key.checkpoint, key.sequence))
    }

    /// The stored calibration, or why it is measured again.
    pub fn load(&self, key: &CacheKey, recompute: bool) -> Result<Cached, Stale> {
        if recompute {
            return Err(Stale::Forced);
        }
        let text = match std::fs::read_to_string(self.path(key)) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(Stale::Missing),
            Err(e) => return Err(Stale::Unreadable(e.to_string())),
        };
        let unreadable = |e: serde_json::Error| Stale::Unreadable(e.to_string());
        let json: serde_json::Value = serde_json::from_str(&text).map_err(unreadable)?;
        // Before the rest: another version may not parse at all.
        let version = json.get("version").and_then(serde_json::Value::as_u64);
        differs(
            "version",
            version.map_or("absent".into(), |v| v.to_string()),
            CACHE_VERSION.to_string(),
        )?;
        if !crate::digest::verify(&json) {
            return Err(Stale::Changed);
        }
        let cached: Cached = serde_json::from_value(json).map_err(unreadable)?;
        differs(
            "checkpoint",
            cached.checkpoint.clone(),
            key.checkpoint.clone(),
        )?;
        differs(
            "sequence",
            cached.sequence.to_string(),
            key.sequence.to_string(),
        )?;
        differs("question", cached.question.clone(), key.question.clone())?;
        Ok(cached)
    }

    /// Stores a calibration, replacing what is there. One with values that are not finite is not stored: such a
    /// measurement should be looked at, not kept.
    ///
    /// # Errors
    /// The directory or the file cannot be written.
    pub fn store(
        &self,
        key: &CacheKey,
        calibration: &Calibration,
        dtypes: &BTreeMap<String, String>,
        alpha: f32,
    ) -> Result<Option<PathBuf>, WriteError> {
        if !calibration.note.non_finite.is_empty() {
            return Ok(None);
        }
        let scale = |(key, dtype): (&String, &String)| {
            let amax = *calibration.amax.get(key)?;
            let one = Descriptor::calibrated(dtype, amax, 1, 100.0).ok()?;
            match one.scale {
                Some(Numbers::One(scale)) => Some((key.clone(), scale)),
                _ => None,
            }
        };
        let cached = Cached {
            version: CACHE_VERSION,
            checkpoint: key.checkpoint.clone(),
            sequence: key.sequence,
            question: key.question.clone(),
            samples: calibration.note.samples,
            points: calibration.note.points,
            activation_scales: dtypes.iter().filter_map(scale).collect(),
            activation_dtypes: dtypes.clone(),
            alphas: calibration
                .channel_amax
                .keys()
                .map(|key| (key.clone(), alpha))
                .collect(),
            weight_scales: BTreeMap::new(),
            calibration: calibration.clone(),
        };
        let path = self.path(key);
        let failed = |source: std::io::Error| WriteError {
            action: "write",
            path: path.clone(),
            source,
        };
        std::fs::create_dir_all(&self.dir).map_err(failed)?;
        let mut record = serde_json::to_value(&cached).map_err(|e| failed(e.into()))?;
        crate::digest::seal(&mut record).map_err(|e| failed(std::io::Error::other(e)))?;
        write_atomic(&path, format!("{record:#}\n").as_bytes())?;
        Ok(Some(path))
    }
}

fn differs(what: &'static str, stored: String, wanted: String) -> Result<(), Stale> {
    if stored == wanted {
        return Ok(());
    }
    Err(Stale::Differs {
        what,
        stored,
        wanted,
    })
}

/// The digest of a question: sha256 over its canonical JSON.
///
/// # Errors
/// It has no JSON form.
pub fn question(parts: &impl Serialize) -> Result<String, crate::error::Error> {
    let parts = serde_json::to_value(parts).map_err(|e| {
        crate::error::Error::invalid("record_invalid", format!("not a question: {e}"))
    })?;
    Ok(crate::digest::digest(
        &serde_json::json!({ "question": parts }),
    )?)
}

/// Where calibrations are kept under a directory of caches.
pub fn directory(caches: &Path) -> PathBuf {
    caches.join("calibration")
}

#[cfg(test)]
mod tests {
    use super::super::{Collector, Statistic, Wants};
    use super::*;

    fn measured(value: f32) -> Calibration {
        let wants = Wants::from([(
            "a|x".to_string(),
            [Statistic::AmaxTensor, Statistic::AmaxChannel].into(),
        )]);
        let mut c = Collector::new(wants);
        for scale in [1.0, 0.3] {
            c.observe("a|x", &[value * scale, 0.1], &[1, 2], "f32")
                .unwrap();
            c.end_sample().unwrap();
        }
        c.finish(99.9, "built-in").unwrap()
    }

    fn dtypes() -> BTreeMap<String, String> {
        BTreeMap::from([("a|x".to_string(), crate::precision::FP8.to_string())])
    }

    fn key() -> CacheKey {
        CacheKey {
            checkpoint: "0123456789abcdef".into(),
            sequence: 128,
            question: question(&("fp8_static", 99.9)).unwrap(),
        }
    }

    #[test]
    fn b_073_what_was_measured_is_given_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CalibrationCache::new(dir.path().join("made/when/needed"));
        assert_eq!(cache.load(&key(), false), Err(Stale::Missing));
        let calibration = measured(448.0);
        let path = cache
            .store(&key(), &calibration, &dtypes(), 0.5)
            .unwrap()
            .unwrap();
        assert!(path.ends_with("0123456789abcdef-128.json"));
        let found = cache.load(&key(), false).unwrap();
        assert_eq!(found.calibration, calibration);
        assert_eq!((found.samples, found.points), (2, 1));
        assert_eq!(
            found.activation_scales["a|x"],
            calibration.fp8_scale("a|x").unwrap()
        );
        assert_eq!(found.alphas["a|x"], 0.5);
        assert!(found.weight_scales.is_empty());
        assert_eq!(cache.load(&key(), true), Err(Stale::Forced));
    }

    #[test]
    fn b_073_anything_else_is_measured_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CalibrationCache::new(dir.path());
        cache.store(&key(), &measured(2.0), &dtypes(), 0.5).unwrap();
        let path = cache.path(&key());
        let stored: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        for (field, value) in [
            ("version", serde_json::json!(CACHE_VERSION + 1)),
            ("checkpoint", serde_json::json!("fedcba9876543210")),
            ("sequence", serde_json::json!(64)),
            ("question", serde_json::json!("another")),
        ] {
            let mut other = stored.clone();
            other[field] = value;
            crate::digest::seal(&mut other).unwrap();
            std::fs::write(&path, other.to_string()).unwrap();
            let stale = cache.load(&key(), false).unwrap_err();
            assert!(stale.to_string().contains(field), "{stale}");
        }
        let mut empty = serde_json::json!({ "version": CACHE_VERSION });
        crate::digest::seal(&mut empty).unwrap();
        std::fs::write(&path, empty.to_string()).unwrap();
        assert!(matches!(
            cache.load(&key(), false),
            Err(Stale::Unreadable(_))
        ));
        let elsewhere = CacheKey {
            sequence: 64,
            ..key()
        };
        assert_eq!(cache.load(&elsewhere, false), Err(Stale::Missing));
    }

    #[test]
    fn b_073_a_file_changed_by_hand_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CalibrationCache::new(dir.path());
        cache.store(&key(), &measured(2.0), &dtypes(), 0.5).unwrap();
        let path = cache.path(&key());
        let stored: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let load = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut other = stored.clone();
            change(&mut other);
            std::fs::write(&path, other.to_string()).unwrap();
            cache.load(&key(), false)
        };
        load(&|_| {}).unwrap();
        for pointer in [
            "/calibration/amax/a|x",
            "/activation_scales/a|x",
            "/samples",
        ] {
            let changed = load(&|r| *r.pointer_mut(pointer).unwrap() = serde_json::json!(3));
            assert_eq!(changed, Err(Stale::Changed), "{pointer}");
        }
        let without = load(&|r| drop(r.as_object_mut().unwrap().remove("digest")));
        assert_eq!(without, Err(Stale::Changed));
    }

    #[test]
    fn a_broken_measurement_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = CalibrationCache::new(dir.path());
        assert_eq!(
            cache
                .store(&key(), &measured(f32::NAN), &dtypes(), 0.5)
                .unwrap(),
            None
        );
        assert_eq!(cache.load(&key(), false), Err(Stale::Missing));
    }

    #[test]
    fn a_question_is_all_of_its_parts() {
        let of = |p: f64| question(&("fp8_static", p, vec![1u32, 2])).unwrap();
        assert_eq!(of(99.9), of(99.9));
        assert_ne!(of(99.9), of(99.0));
    }
}
