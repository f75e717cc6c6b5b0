//! Headers of safetensors files and of the index that names shards. No tensor is read here.
//!
//! Own parser instead of the `safetensors` crate's, because that one keeps the last of two equal names, wants the
//! whole file in memory and does not say which tensor is wrong.

use std::fmt;
use std::io::Read;
use std::path::Path;

use indexmap::IndexMap;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use structures_graph::regular;

use super::stored::StoredType;
use super::Entry;
use crate::ModelError;

/// The format's own limit on a header.
const MAX_HEADER: u64 = 100_000_000;
const AGAIN: &str = "the file is damaged or its download was cut short: get it again";

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Tensors of one file: the largest published shards have a few thousand. Together with the limit on a header it keeps
/// memory within the file's size and 64 MB.
const MAX_TENSORS: usize = 80_000;
/// Tensors of an index: the largest published ones have 140,000.
const MAX_INDEXED: usize = 300_000;

/// A header in file order, equal names kept.
struct RawHeader(Vec<(String, Option<RawTensor>)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Rows;
        impl<'de> Visitor<'de> for Rows {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut rows = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<Option<IndexMap<String, String>>>()
                            .map_err(|e| A::Error::custom(format!("`{name}`: {e}")))?;
                        rows.push((name, None));
                    } else {
                        // The format's reader does not say whose value it is.
                        let value = map
                            .next_value()
                            .map_err(|e| A::Error::custom(format!("tensor `{name}`: {e}")))?;
                        rows.push((name, Some(value)));
                    }
                    if rows.len() > MAX_TENSORS {
                        let most = format!("more than {MAX_TENSORS} tensors in one file");
                        return Err(A::Error::custom(most));
                    }
                }
                Ok(RawHeader(rows))
            }
        }
        d.deserialize_map(Rows)
    }
}

/// Reads the header of one file; entries point into it as file number `file`.
pub(super) fn header(path: &Path, file: usize) -> Result<Vec<(String, Entry)>, ModelError> {
    let io = |doing: &str, e| ModelError::io(path, doing, e, AGAIN);
    let (mut f, size) = regular::open(path).map_err(|e| io("open it", e))?;
    let mut word = [0u8; 8];
    if size < 8 {
        return Err(ModelError::malformed(
            path,
            "header length",
            "8 bytes at the start of the file",
            format!("a file of {size} bytes"),
            AGAIN,
        ));
    }
    f.read_exact(&mut word).map_err(|e| io("read it", e))?;
    let length = u64::from_le_bytes(word);
    if length > MAX_HEADER || length > size - 8 {
        return Err(ModelError::malformed(
            path,
            "header length",
            format!("at most {} bytes", MAX_HEADER.min(size - 8)),
            format!("{length}"),
            AGAIN,
        ));
    }
    let mut text = vec![0u8; length as usize];
    f.read_exact(&mut text)
        .map_err(|e| io("read its header", e))?;
    let rows: RawHeader = serde_json::from_slice(&text).map_err(|e| {
        ModelError::malformed(
            path,
            "header",
            "a JSON object of tensors",
            e.to_string(),
            AGAIN,
        )
    })?;

    let start = 8 + length;
    let data = size - start;
    let mut entries: Vec<(String, Entry)> = Vec::with_capacity(rows.0.len());
    let mut spans: Vec<(u64, u64, String)> = Vec::with_capacity(rows.0.len());
    for (name, raw) in rows.0 {
        let Some(raw) = raw else { continue };
        let entry = entry(path, file, &name, &raw, start, data)?;
        spans.push((raw.data_offsets.0, raw.data_offsets.1, name.clone()));
        entries.push((name, entry));
    }
    spans.sort();
    for pair in spans.windows(2) {
        if pair[1].0 < pair[0].1 {
            return Err(ModelError::tensor(
                path,
                &pair[1].2,
                format!("data of its own, from byte {} on", pair[0].1),
                format!(
                    "data from byte {} on, inside that of `{}`",
                    pair[1].0, pair[0].2
                ),
                AGAIN,
            ));
        }
    }
    let mut end = 0;
    for (from, to, name) in &spans {
        if *from > end {
            let expected = format!("data from byte {end} on, where the one before it ends");
            let found = format!("a hole up to byte {from}");
            return Err(ModelError::tensor(path, name, expected, found, AGAIN));
        }
        end = end.max(*to);
    }
    if data > end {
        return Err(ModelError::malformed(
            path,
            "data",
            format!("{end} bytes, where the last tensor ends"),
            format!("{data} bytes"),
            AGAIN,
        ));
    }
    Ok(entries)
}

fn entry(
    path: &Path,
    file: usize,
    name: &str,
    raw: &RawTensor,
    start: u64,
    data: u64,
) -> Result<Entry, ModelError> {
    let Some(stored) = StoredType::from_safetensors(&raw.dtype) else {
        return Err(ModelError::unsupported(
            path,
            format!("dtype of tensor `{name}`"),
            format!("one of {}", StoredType::safetensors_names()),
            &raw.dtype,
            "convert the checkpoint to one of these",
        ));
    };
    let dims: Vec<usize> = raw
        .shape
        .iter()
        .map(|d| usize::try_from(*d).unwrap_or(usize::MAX))
        .collect();
    let (from, to) = raw.data_offsets;
    let needed = stored.bytes(&dims).map(|n| n as u64);
    let given = to.checked_sub(from);
    if needed.is_none() || given != needed {
        return Err(ModelError::tensor(
            path,
            name,
            match needed {
                Some(n) => format!("{n} bytes for {dims:?} of {}", raw.dtype),
                None => format!("a shape that fits {}", raw.dtype),
            },
            format!("shape {dims:?}, bytes {from}..{to}"),
            AGAIN,
        ));
    }
    if to > data {
        return Err(ModelError::tensor(
            path,
            name,
            format!("a file of at least {} bytes", start + to),
            format!("{} bytes", start + data),
            AGAIN,
        ));
    }
    Ok(Entry {
        dims,
        stored,
        file,
        offset: start + from,
        bytes: (to - from) as usize,
    })
}

/// `model.safetensors.index.json`: tensor -> shard, and the shards in name order.
pub(super) struct Index {
    pub(super) map: IndexMap<String, String>,
    pub(super) shards: Vec<String>,
}

/// A map whose keys stand in it once.
fn each_once<'de, D: Deserializer<'de>>(d: D) -> Result<IndexMap<String, String>, D::Error> {
    struct Rows;
    impl<'de> Visitor<'de> for Rows {
        type Value = IndexMap<String, String>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of file names")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut rows = IndexMap::new();
            while let Some((name, file)) = map.next_entry::<String, String>()? {
                if rows.contains_key(&name) {
                    return Err(A::Error::custom(format!("tensor `{name}` is there twice")));
                }
                rows.insert(name, file);
            }
            Ok(rows)
        }
    }
    d.deserialize_map(Rows)
}

/// Reads the index.
pub(super) fn index(path: &Path) -> Result<Index, ModelError> {
    #[derive(Deserialize)]
    struct Raw {
        #[serde(deserialize_with = "each_once")]
        weight_map: IndexMap<String, String>,
    }
    let text = super::read_small(path, MAX_INDEXED, AGAIN)?;
    let raw: Raw = serde_json::from_str(&text).map_err(|e| {
        ModelError::malformed(
            path,
            "index",
            "a JSON object with `weight_map`",
            e.to_string(),
            AGAIN,
        )
    })?;
    let mut shards: Vec<String> = raw.weight_map.values().cloned().collect();
    shards.sort();
    shards.dedup();
    for shard in &shards {
        let plain = Path::new(shard)
            .file_name()
            .is_some_and(|n| n == shard.as_str());
        if !plain || shard == ".." {
            return Err(ModelError::malformed(
                path,
                "weight_map",
                "names of files beside the index",
                format!("`{shard}`"),
                "the index must not point elsewhere: get the checkpoint again",
            ));
        }
    }
    Ok(Index {
        map: raw.weight_map,
        shards,
    })
}
