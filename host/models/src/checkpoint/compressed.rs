//! Directories written by compressed-tensors: a weight in several tensors, its codes and their scales.
//!
//! Which tensors make which weight is said by their names and checked against their shapes; `quantization_config`
//! names the codec. Two are read: `nvfp4-pack-quantized` and `float-quantized` with one scale a tensor or a channel.
//! Any other is refused by name, because a weight without its codec is no weight.

use std::collections::HashSet;
use std::path::Path;

use indexmap::IndexMap;
use serde_json::{Map, Value as Json};
use structures_plugin_api::formats::BlockFormat;

use super::packed::PackedWeight;
use super::stored::StoredType;
use super::{Checkpoint, Entry, TensorInfo};
use crate::ModelError;

/// The key of `config.json`.
pub(super) const KEY: &str = "quantization_config";
const METHOD: &str = "compressed-tensors";
/// Formats there is a codec for; `mixed-precision` names one a group, `dense` none.
const FORMATS: [&str; 4] = [
    "nvfp4-pack-quantized",
    "float-quantized",
    "mixed-precision",
    "dense",
];
const AGAIN: &str = "the checkpoint is not complete or was converted wrongly: get it again";
const OTHER: &str = "get the model in one of these formats, or in bf16";

/// One weight in several tensors.
#[derive(Clone, Debug)]
pub(super) struct Weight {
    pub(super) format: BlockFormat,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Codes, then scales, then NVFP4's global scale.
    parts: Vec<String>,
}

/// The weights of a directory that are stored like this.
#[derive(Debug, Default)]
pub(super) struct Compressed {
    pub(super) weights: IndexMap<String, Weight>,
    /// Tensors that are a part of one, or say something about how to run it.
    pub(super) parts: HashSet<String>,
}

/// What the configuration says is there; `None` without such a configuration.
pub(super) fn find(
    path: &Path,
    config: &Map<String, Json>,
    tensors: &IndexMap<String, Entry>,
) -> Result<Option<Compressed>, ModelError> {
    let Some(given) = config.get(KEY).and_then(Json::as_object) else {
        return Ok(None);
    };
    let Some(method) = given.get("quant_method").and_then(Json::as_str) else {
        return Ok(None);
    };
    if method != METHOD {
        return Err(missing(path, "quant_method", METHOD, method));
    }
    let groups = given.get("config_groups").and_then(Json::as_object);
    let of_groups = groups
        .iter()
        .flat_map(|g| g.values())
        .map(|g| g.get("format"));
    for format in of_groups.chain([given.get("format")]).flatten() {
        let Some(format) = format.as_str() else {
            continue;
        };
        if !FORMATS.contains(&format) {
            return Err(missing(path, "format", &FORMATS[..2].join(" or "), format));
        }
    }
    let mut found = Compressed::default();
    for name in tensors.keys() {
        if name.ends_with(".weight_zero_point") {
            let text = format!("zero points, `{name}`");
            return Err(missing(path, "weights.symmetric", "true", &text));
        }
        let packed = name
            .strip_suffix(".weight")
            .map(|base| format!("{base}.weight_packed"));
        if let Some(packed) = packed.filter(|packed| tensors.contains_key(packed)) {
            let found = format!("it beside `{packed}`, which is the same weight");
            return Err(ModelError::tensor(
                path,
                name,
                "a weight once",
                found,
                AGAIN,
            ));
        }
    }
    for (name, entry) in tensors {
        let base = |suffix: &str| name.strip_suffix(suffix);
        if let Some(base) = base(".weight_packed") {
            found.nvfp4(path, base, name, entry, tensors)?;
        } else if let Some(base) = base(".weight").filter(|_| entry.stored.name() == "e4m3") {
            found.fp8(path, base, name, entry, tensors)?;
        }
    }
    Ok(Some(found))
}

fn missing(path: &Path, field: &str, expected: &str, found: &str) -> ModelError {
    ModelError::codec(path, format!("{KEY}.{field}"), expected, found, OTHER)
}

impl Compressed {
    fn nvfp4(
        &mut self,
        path: &Path,
        base: &str,
        name: &str,
        entry: &Entry,
        tensors: &IndexMap<String, Entry>,
    ) -> Result<(), ModelError> {
        let half = match entry.dims.as_slice() {
            [n, half] if entry.stored.name() == "u8" && half % 8 == 0 && *half > 0 => (*n, *half),
            _ => return Err(misfit(path, name, "u8 [N, K/2], K a multiple of 16", entry)),
        };
        let (n, k) = (half.0, 2 * half.1);
        let scale = format!("{base}.weight_scale");
        let expected = format!("e4m3 [{n}, {}]", k / 16);
        let entry = part(path, &scale, &expected, tensors)?;
        if entry.stored.name() != "e4m3" || entry.dims != [n, k / 16] {
            return Err(misfit(path, &scale, &expected, entry));
        }
        let global = format!("{base}.weight_global_scale");
        let entry = part(path, &global, "one f32", tensors)?;
        if entry.stored != StoredType::F32 || entry.bytes != 4 {
            return Err(misfit(path, &global, "one f32", entry));
        }
        self.add(
            base,
            BlockFormat::Nvfp4,
            n,
            k,
            vec![name.into(), scale, global],
        );
        Ok(())
    }

    fn fp8(
        &mut self,
        path: &Path,
        base: &str,
        name: &str,
        entry: &Entry,
        tensors: &IndexMap<String, Entry>,
    ) -> Result<(), ModelError> {
        let [n, k] = *entry.dims.as_slice() else {
            return Err(misfit(path, name, "e4m3 [N, K]", entry));
        };
        let scale = format!("{base}.weight_scale");
        let expected = format!("floats, one or [{n}, 1]");
        let entry = part(path, &scale, &expected, tensors)?;
        let count: usize = entry.dims.iter().product();
        let along = entry.dims.first().copied().unwrap_or(1);
        if !entry.stored.is_weight() || (count != 1 && (count, along) != (n, n)) {
            let found = format!("{} {:?} beside `{name}`", entry.stored.name(), entry.dims);
            return Err(missing(path, "weights.strategy", &expected, &found));
        }
        self.add(base, BlockFormat::Fp8, n, k, vec![name.into(), scale]);
        Ok(())
    }

    fn add(&mut self, base: &str, format: BlockFormat, n: usize, k: usize, parts: Vec<String>) {
        self.parts.extend(parts.iter().cloned());
        for more in ["weight_shape", "input_scale", "input_global_scale"] {
            self.parts.insert(format!("{base}.{more}"));
        }
        let weight = Weight {
            format,
            n,
            k,
            parts,
        };
        self.weights.insert(format!("{base}.weight"), weight);
    }
}

fn part<'t>(
    path: &Path,
    name: &str,
    expected: &str,
    tensors: &'t IndexMap<String, Entry>,
) -> Result<&'t Entry, ModelError> {
    tensors
        .get(name)
        .ok_or_else(|| ModelError::tensor(path, name, expected, "no such tensor", AGAIN))
}

fn misfit(path: &Path, name: &str, expected: &str, entry: &Entry) -> ModelError {
    let found = format!("{} {:?}", entry.stored.name(), entry.dims);
    ModelError::tensor(path, name, expected, found, AGAIN)
}

impl Weight {
    /// As a header would say it.
    pub(super) fn info(&self, name: &str) -> TensorInfo {
        TensorInfo {
            name: name.into(),
            dims: vec![self.n, self.k],
            dtype: self.format.name(),
            bytes: self.n * self.format.row_bytes(self.k).unwrap_or(0),
        }
    }

    fn unfit(&self, checkpoint: &Checkpoint, part: usize, want: &str, found: String) -> ModelError {
        ModelError::tensor(checkpoint.path(), &self.parts[part], want, found, AGAIN)
    }

    /// Reads its parts and lays them into rows.
    pub(super) fn read(&self, checkpoint: &Checkpoint) -> Result<PackedWeight, ModelError> {
        let bytes = |i: usize| -> Result<Vec<u8>, ModelError> { checkpoint.bytes(&self.parts[i]) };
        let codes = bytes(0)?;
        let code_width = codes.len() / self.n.max(1);
        let mut rows = Vec::new();
        match self.format {
            BlockFormat::Nvfp4 => {
                let (scales, global) = (bytes(1)?, bytes(2)?);
                let value = <[u8; 4]>::try_from(global.as_slice()).map(f32::from_le_bytes);
                if !value.is_ok_and(|v| v.is_finite() && v > 0.0) {
                    let found = value.map_or("none".into(), |v| v.to_string());
                    return Err(self.unfit(checkpoint, 2, "a positive number", found));
                }
                let width = (self.k / self.format.block()).max(1);
                for (codes, scales) in codes.chunks(code_width.max(1)).zip(scales.chunks(width)) {
                    rows.extend_from_slice(codes);
                    rows.extend_from_slice(scales);
                    rows.extend_from_slice(&global);
                }
            }
            _ => {
                let failed = |e| ModelError::compute(format!("reading `{}`", self.parts[1]), e);
                let scales = checkpoint.load(&self.parts[1])?.flatten_all();
                let scales = scales.and_then(|s| s.to_vec1::<f32>()).map_err(failed)?;
                for (i, codes) in codes.chunks(code_width.max(1)).enumerate() {
                    // One for all channels, or one each: `find` has counted them.
                    let scale = if scales.len() == 1 {
                        scales.first()
                    } else {
                        scales.get(i)
                    };
                    let Some(scale) = scale.filter(|s| s.is_finite() && **s >= 0.0) else {
                        let found = scale.map_or("none".into(), |v| format!("{v} for channel {i}"));
                        return Err(self.unfit(checkpoint, 1, "numbers of at least 0", found));
                    };
                    rows.extend_from_slice(codes);
                    rows.extend_from_slice(&scale.to_le_bytes());
                }
            }
        }
        Ok(PackedWeight {
            format: self.format,
            n: self.n,
            k: self.k,
            rows,
        })
    }
}
