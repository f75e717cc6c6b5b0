//! Small checkpoints to break, and where the oracle's cases are.

#![allow(dead_code)] // each test binary uses its part

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use structures_models::{Checkpoint, ModelError};

/// `$STRUCTURES_ORACLE/<group>` where it exists, else the repository's own copies.
pub fn oracle(group: &str) -> PathBuf {
    if let Some(root) = std::env::var_os("STRUCTURES_ORACLE") {
        let dir = PathBuf::from(root).join(group);
        if dir.is_dir() {
            return dir;
        }
    }
    repository().join("tests/fixtures/oracle").join(group)
}

/// Cases of the repository's own, one directory a model.
pub fn families() -> PathBuf {
    repository().join("tests/fixtures/families")
}

/// The workspace's root.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A case the repository always has.
pub fn case(name: &str) -> PathBuf {
    let own = families().join(name);
    match own.is_dir() {
        true => own,
        false => repository().join("tests/fixtures/oracle/e2e").join(name),
    }
}

/// A writable copy of a case's model.
pub fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        let bytes = std::fs::read(case(name).join(file)).unwrap();
        std::fs::write(dir.path().join(file), bytes).unwrap();
    }
    dir
}

/// Applies `edit` to `config.json`.
pub fn edit_config(dir: &Path, edit: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) {
    let path = dir.join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
}

/// All tensors of a directory, as f32.
pub fn tensors(dir: &Path) -> Vec<(String, Tensor)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let names: Vec<String> = checkpoint.tensor_infos().map(|t| t.name).collect();
    let load = |n: String| {
        let t = checkpoint.load(&n).unwrap();
        (n, t)
    };
    names.into_iter().map(load).collect()
}

/// Writes tensors as one safetensors file.
pub fn save(path: &Path, tensors: &[(String, Tensor)]) {
    let map: std::collections::HashMap<String, Tensor> = tensors.iter().cloned().collect();
    candle_core::safetensors::save(&map, path).unwrap();
}

/// A file with this header and this much data.
pub fn save_raw(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(std::iter::repeat_n(0u8, data));
    std::fs::write(path, bytes).unwrap();
}

/// The message of an error, which must name all of these.
pub fn names_all<T>(result: Result<T, ModelError>, words: &[&str]) {
    let error = result.err().map(|e| e.to_string());
    let message = error.unwrap_or_else(|| panic!("expected an error that names {words:?}"));
    for word in words {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
}

/// A tensor of these values.
pub fn tensor(values: &[f32], dims: &[usize]) -> Tensor {
    Tensor::from_slice(values, dims, &Device::Cpu).unwrap()
}
