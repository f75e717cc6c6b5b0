//! What makes a second start fast: packed weights that outlive the process, and what stands for their parity.
//!
//! Below the cache directory every checkpoint, by its sha256, has a shelf. A form that keeps its packed weights is given
//! a name there when a receipt is replayed ([`structures_plugin_api::describe::Kept`]); the files are the plugin's own. A
//! name is a digest of everything that decides what is packed: weights, plugin, spec, span, parameters, statistics.
//!
//! Bind parity needs the weights in f32, and reading those is what takes time. So when a seat held against its reference,
//! what it answered to one small call is put beside its name: the *witness*. The next replay binds without matrices,
//! repeats the call, and takes the seat when the answer is the same, bit by bit. Another answer, or none, is no error: the
//! seat is bound and compared as at first. A shelf may be deleted at any time; what no start has used for [`UNUSED`] goes
//! when something else is put beside it, of every checkpoint and of plugins that are replaced.
//!
//! Owns names and witnesses. Does not own what a plugin writes, nor what is compared (`trial`).

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, SystemTime};

use candle_core::{Device, Tensor};
use serde::Serialize;
use structures_loader::{private_directory, Environment};
use structures_plugin_api::describe::Kept;

use crate::digest::sha256_hex;

/// Directory of all shelves in the cache directory.
const DIR: &str = "packed";
/// Digits of a sha256 that make a name: no two in a cache are alike by chance.
const DIGITS: usize = 32;

/// How long what nobody uses stays.
pub const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);

/// Where the packed weights of one checkpoint are kept.
#[derive(Debug)]
pub struct Shelf {
    dir: PathBuf,
    swept: Once,
}

/// What a form answered to one call when it held against its reference.
#[derive(Debug)]
pub struct Witness {
    /// By name, in order; `None` for an absent optional.
    pub inputs: Vec<(String, Option<Tensor>)>,
    /// By name, in order.
    pub outputs: Vec<(String, Tensor)>,
}

impl Shelf {
    /// The shelf of a checkpoint in the user's cache; none where it cannot be had, which is said once.
    pub fn open(checkpoint_sha256: &str) -> Option<Self> {
        let name = checkpoint_sha256.get(..DIGITS)?;
        let cache = Environment::capture().cache_dir?;
        Self::in_dir(&cache.join(DIR).join(name))
    }

    /// As `open`, at a place of the caller's choice.
    pub fn in_dir(dir: &Path) -> Option<Self> {
        match private_directory(dir) {
            Ok(()) => Some(Shelf {
                dir: dir.into(),
                swept: Once::new(),
            }),
            Err(e) => {
                let dir = dir.display();
                tracing::warn!("{dir}: {e}; packed weights are not kept for the next start");
                None
            }
        }
    }

    /// The name of what is decided by these parts.
    pub fn name(parts: &impl Serialize) -> Option<String> {
        let text = serde_json::to_vec(parts).ok()?;
        let mut name = sha256_hex(&text);
        name.truncate(DIGITS);
        Some(name)
    }

    /// What a bind is told.
    pub fn kept(&self, name: &str, without_matrices: bool) -> Option<Kept> {
        Some(Kept {
            dir: self.dir.to_str()?.into(),
            key: name.into(),
            without_matrices,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.witness"))
    }

    /// The witness under a name.
    pub fn witness(&self, name: &str) -> Option<Witness> {
        let path = self.path(name);
        if !path.is_file() {
            return None;
        }
        let mut found = candle_core::safetensors::load(&path, &Device::Cpu)
            .inspect_err(|e| tracing::warn!("{}: {e}; compared as at first", path.display()))
            .ok()?;
        let mut side = |mark: &str| {
            let mut list = Vec::new();
            while let Some(key) = {
                let head = format!("{mark}.{}.", list.len());
                found.keys().find(|k| k.starts_with(&head)).cloned()
            } {
                let tensor = found.remove(&key)?;
                let name = key.splitn(4, '.').nth(3)?.to_string();
                // A place without a tensor holds none of any size.
                let there = key.split('.').nth(2) == Some("t");
                list.push((name, there.then_some(tensor)));
            }
            Some(list)
        };
        let inputs = side("in")?;
        let outputs = side("out")?.into_iter();
        // That it was used; where it cannot be said, it is packed again one day.
        let used = File::options().append(true).open(&path);
        let _ = used.and_then(|file| file.set_modified(SystemTime::now()));
        Some(Witness {
            inputs,
            outputs: outputs
                .map(|(name, t)| Some((name, t?)))
                .collect::<Option<_>>()?,
        })
    }

    /// Puts a witness under a name. What cannot be written costs the next start its time.
    pub fn keep(&self, name: &str, witness: &Witness) {
        let path = self.path(name);
        let beside = path.with_extension(format!("{}.tmp", std::process::id()));
        let written = write(&beside, witness)
            .and_then(|()| std::fs::rename(&beside, &path).map_err(candle_core::Error::wrap));
        if let Err(e) = written {
            let _ = std::fs::remove_file(&beside);
            tracing::warn!("{}: {e}; the next start compares again", path.display());
        }
        self.swept.call_once(|| {
            if let Some(all) = self.dir.parent() {
                sweep(all, SystemTime::now());
            }
        });
    }
}

/// Removes from all shelves what was not used for so long, and shelves that are empty then. Another process may do the
/// same, or be killed meanwhile: every name is whole or packed again.
fn sweep(all: &Path, now: SystemTime) {
    let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
    let age = |path: &Path| {
        let changed = std::fs::metadata(path).and_then(|m| m.modified());
        // What another process touches meanwhile is younger than now.
        changed
            .ok()
            .map(|at| now.duration_since(at).unwrap_or_default())
    };
    let named = |name: &str| {
        name.len() >= DIGITS && name.bytes().take(DIGITS).all(|b| b.is_ascii_hexdigit())
    };
    let shelves = entries(all).filter(|e| {
        let name = e.file_name();
        name.len() == DIGITS && name.to_str().is_some_and(named)
    });
    for shelf in shelves.map(|e| e.path()).filter(|p| p.is_dir()) {
        // Of a name's files the witness is touched when they are used, the others when they are written.
        let mut youngest: HashMap<String, (Duration, Vec<PathBuf>)> = HashMap::new();
        for file in entries(&shelf) {
            let name = file.file_name().to_string_lossy().into_owned();
            let Some((key, rest)) = name.split_at_checked(DIGITS).filter(|_| named(&name)) else {
                continue;
            };
            if !rest.starts_with(['-', '.']) {
                continue;
            }
            let path = file.path();
            let Some(age) = age(&path) else { continue };
            let of = youngest.entry(key.into()).or_insert((age, Vec::new()));
            of.0 = of.0.min(age);
            of.1.push(path);
        }
        let (mut files, mut left) = (0, false);
        for (age, paths) in youngest.into_values() {
            for path in paths.iter().filter(|_| age > UNUSED) {
                match std::fs::remove_file(path) {
                    Ok(()) => files += 1,
                    Err(e) => tracing::warn!("{}: {e}; it is not used", path.display()),
                }
            }
            left |= age <= UNUSED;
        }
        if files > 0 {
            tracing::info!("{}: {files} unused files removed", shelf.display());
            if !left {
                // Not where somebody puts something there at this moment.
                let _ = std::fs::remove_dir(&shelf);
            }
        }
    }
}

fn write(path: &Path, witness: &Witness) -> candle_core::Result<()> {
    let mut all: HashMap<String, Tensor> = HashMap::new();
    for (i, (name, tensor)) in witness.inputs.iter().enumerate() {
        match tensor {
            Some(t) => all.insert(format!("in.{i}.t.{name}"), t.force_contiguous()?),
            None => {
                let nothing = Tensor::zeros(1, candle_core::DType::F32, &Device::Cpu)?;
                all.insert(format!("in.{i}.n.{name}"), nothing)
            }
        };
    }
    for (i, (name, tensor)) in witness.outputs.iter().enumerate() {
        all.insert(format!("out.{i}.t.{name}"), tensor.force_contiguous()?);
    }
    candle_core::safetensors::save(&all, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_witness_comes_back_as_it_was_and_a_damaged_one_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Shelf::in_dir(&dir.path().join("a").join("b")).unwrap();
        let t = |v: &[f32]| Tensor::new(v, &Device::Cpu).unwrap();
        let witness = Witness {
            inputs: vec![("x".into(), Some(t(&[1.0, f32::NAN]))), ("r".into(), None)],
            outputs: vec![("y.z".into(), t(&[-0.0]))],
        };
        assert!(shelf.witness("n").is_none());
        shelf.keep("n", &witness);
        let back = shelf.witness("n").unwrap();
        let bits = |t: &Tensor| -> Vec<u32> {
            let values = t.to_vec1::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        };
        assert_eq!(back.inputs[0].0, "x");
        let x = [1.0_f32, f32::NAN].map(f32::to_bits);
        assert_eq!(bits(back.inputs[0].1.as_ref().unwrap()), x);
        assert!(back.inputs[1].0 == "r" && back.inputs[1].1.is_none());
        assert_eq!(back.outputs[0].0, "y.z");
        assert_eq!(bits(&back.outputs[0].1), [0x8000_0000]);
        std::fs::write(shelf.path("n"), b"half a file").unwrap();
        assert!(shelf.witness("n").is_none());
    }

    #[test]
    fn what_nobody_used_for_long_goes_when_something_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let [old, used, here] =
            ['1', '2', '3'].map(|c| dir.path().join(c.to_string().repeat(DIGITS)));
        // Nobody's shelf, whatever lies in it.
        let strange = dir
            .path()
            .join("somebody's")
            .join(format!("{}.txt", "e".repeat(DIGITS)));
        std::fs::create_dir(strange.parent().unwrap()).unwrap();
        let witness = Witness {
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        let name = |c: char| c.to_string().repeat(DIGITS);
        let aged = |path: &PathBuf| {
            let file = File::options().append(true).open(path).unwrap();
            file.set_modified(SystemTime::now() - UNUSED - Duration::from_secs(60))
                .unwrap();
        };
        let all = [(&old, 'a'), (&used, 'b'), (&used, 'c')].map(|(shelf, key)| {
            let shelf = Shelf::in_dir(shelf).unwrap();
            shelf.keep(&name(key), &witness);
            let packed = shelf.dir.join(format!("{}-isa-0.packed", name(key)));
            std::fs::write(&packed, b"weights").unwrap();
            [packed, shelf.path(&name(key))]
        });
        std::fs::write(&strange, b"").unwrap();
        all.iter().flatten().chain([&strange]).for_each(aged);
        std::fs::write(used.join("a stranger's"), b"").unwrap();
        // Read again, it is not old.
        let again = Shelf::in_dir(&used).unwrap();
        assert!(again.witness(&name('b')).is_some());
        Shelf::in_dir(&here).unwrap().keep(&name('d'), &witness);

        let files = |dir: &Path| -> Vec<String> {
            let entries = std::fs::read_dir(dir).into_iter().flatten();
            let names = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        assert!(!old.exists(), "{:?}", files(&old));
        let b = name('b');
        let kept = [
            "a stranger's".to_string(),
            format!("{b}-isa-0.packed"),
            format!("{b}.witness"),
        ];
        assert_eq!(files(&used), kept);
        assert_eq!(files(&here), [format!("{}.witness", name('d'))]);
        assert!(strange.exists());
    }

    #[test]
    fn a_shelf_that_cannot_be_had_is_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Shelf::in_dir(&file.path().join("packed")).is_none());
    }
}
