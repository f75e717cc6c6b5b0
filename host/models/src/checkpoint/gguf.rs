//! Headers of GGUF files, versions 2 and 3, little endian. No tensor is read here; candle dequantises the blocks.
//!
//! Own parser instead of candle's `Content`, because that one divides by an alignment of zero, keeps the last of
//! two equal names, forgets the order and does not say which tensor is wrong.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use indexmap::IndexMap;
use structures_graph::regular;

use super::stored::StoredType;
use super::Entry;
use crate::ModelError;

const AGAIN: &str = "the file is damaged or its download was cut short: get it again";
/// ggml's own limit.
const MAX_DIMS: u32 = 4;
/// Twice what the largest published files have (experts are packed), so that a count cannot ask for more memory than
/// the file and 64 MB.
const MAX_TENSORS: u64 = 100_000;
/// Published files have fewer than 100.
const MAX_PAIRS: u64 = 65_536;
/// Values of all lists together: a vocabulary of 262,144 tokens with scores, types and merges has 1.3 million.
const MAX_VALUES: u64 = 1_900_000;
/// Arrays of arrays are allowed; a chain of them must not exhaust the stack.
const MAX_DEPTH: usize = 8;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Either float.
    Float(f64),
    /// A flag.
    Flag(bool),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<GgufValue>),
}

impl GgufValue {
    /// As a whole number that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            GgufValue::Unsigned(n) => Some(*n),
            GgufValue::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// As a number.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            GgufValue::Float(x) => Some(*x),
            GgufValue::Unsigned(n) => Some(*n as f64),
            GgufValue::Signed(n) => Some(*n as f64),
            _ => None,
        }
    }

    /// What it is, in a few characters, for messages.
    pub fn brief(&self) -> String {
        match self {
            GgufValue::Unsigned(n) => n.to_string(),
            GgufValue::Signed(n) => n.to_string(),
            GgufValue::Float(x) => x.to_string(),
            GgufValue::Flag(b) => b.to_string(),
            GgufValue::Text(s) => format!("`{}`", s.chars().take(40).collect::<String>()),
            GgufValue::List(l) => format!("a list of {}", l.len()),
        }
    }
}

/// Metadata by key, file order.
#[derive(Clone, Debug, Default)]
pub struct GgufMetadata {
    /// Format version.
    pub version: u32,
    /// Values.
    pub values: IndexMap<String, GgufValue>,
}

impl GgufMetadata {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// A text.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key) {
            Some(GgufValue::Text(s)) => Some(s),
            _ => None,
        }
    }

    /// A flag.
    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.get(key) {
            Some(GgufValue::Flag(b)) => Some(*b),
            _ => None,
        }
    }

    /// A token id.
    pub fn id(&self, key: &str) -> Option<u32> {
        self.get(key)?.as_u64().and_then(|n| u32::try_from(n).ok())
    }

    /// A list.
    pub fn list(&self, key: &str) -> Option<&[GgufValue]> {
        match self.get(key) {
            Some(GgufValue::List(l)) => Some(l),
            _ => None,
        }
    }
}

/// Whether a file starts like a GGUF file.
pub(super) fn has_magic(path: &Path) -> Result<bool, ModelError> {
    let mut word = [0u8; 4];
    let (mut f, _) =
        regular::open(path).map_err(|e| ModelError::io(path, "open it", e, "check the path"))?;
    match f.read_exact(&mut word) {
        Ok(()) => Ok(&word == b"GGUF"),
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(ModelError::io(path, "read it", e, AGAIN)),
    }
}

/// Reads the header.
pub(super) fn header(path: &Path) -> Result<(GgufMetadata, Vec<(String, Entry)>), ModelError> {
    let (f, size) =
        regular::open(path).map_err(|e| ModelError::io(path, "open it", e, "check the path"))?;
    let mut r = Reader {
        path,
        inner: BufReader::with_capacity(1 << 20, f),
        at: 0,
        size,
        values: MAX_VALUES,
    };
    let magic = r.bytes::<4>("magic")?;
    if &magic != b"GGUF" {
        return Err(r.bad("magic", "`GGUF`", format!("{magic:02x?}")));
    }
    let version = r.u32("version")?;
    if !(2..=3).contains(&version) {
        return Err(ModelError::unsupported(
            path,
            "GGUF version",
            "2 or 3 (little endian)",
            version.to_string(),
            "convert the file with a current tool",
        ));
    }
    let tensors = r.u64("tensor count")?;
    let pairs = r.u64("metadata count")?;
    for (item, found, most) in [
        ("tensor count", tensors, MAX_TENSORS),
        ("metadata count", pairs, MAX_PAIRS),
    ] {
        if found > most {
            return Err(r.bad(item, &format!("at most {most}"), found.to_string()));
        }
    }

    let mut meta = GgufMetadata {
        version,
        values: IndexMap::new(),
    };
    for i in 0..pairs {
        let key = r.text(&format!("key of metadata entry {i}"))?;
        let kind = r.u32(&key)?;
        let value = r.value(&key, kind, 0)?;
        if meta.values.insert(key.clone(), value).is_some() {
            return Err(r.bad(&format!("metadata key `{key}`"), "one entry", "two".into()));
        }
    }

    whole(path, &meta, tensors)?;
    let mut infos = Vec::new();
    for i in 0..tensors {
        let name = r.text(&format!("name of tensor {i}"))?;
        let rank = r.u32(&name)?;
        if rank > MAX_DIMS {
            let item = format!("rank of tensor `{name}`");
            return Err(r.bad(&item, "at most 4", rank.to_string()));
        }
        let mut dims = Vec::with_capacity(rank as usize);
        for _ in 0..rank {
            let d = r.u64(&name)?;
            dims.push(usize::try_from(d).unwrap_or(usize::MAX));
        }
        dims.reverse(); // the file has the fastest dim first
        let number = r.u32(&name)?;
        let offset = r.u64(&name)?;
        infos.push((name, dims, number, offset));
    }

    let alignment = match meta.get("general.alignment") {
        None => 32,
        Some(v) => match v.as_u64() {
            Some(a) if a.is_power_of_two() && a <= 1 << 20 => a,
            _ => {
                let found = v.brief();
                return Err(r.bad("general.alignment", "a power of two up to 1048576", found));
            }
        },
    };
    let data = r.at.div_ceil(alignment) * alignment;
    let mut entries = Vec::with_capacity(infos.len());
    for (name, dims, number, offset) in infos {
        let Some(stored) = StoredType::from_ggml(number) else {
            return Err(ModelError::unsupported(
                path,
                format!("type of tensor `{name}`"),
                format!("one of {}", StoredType::ggml_names()),
                number.to_string(),
                "quantise the model to one of these",
            ));
        };
        let Some(bytes) = stored.bytes(&dims) else {
            return Err(ModelError::tensor(
                path,
                &name,
                format!("rows of whole {} blocks", stored.name()),
                format!("shape {dims:?}"),
                AGAIN,
            ));
        };
        if offset % alignment != 0 {
            let expected = format!("an offset that {alignment} divides");
            let found = offset.to_string();
            return Err(ModelError::tensor(path, &name, expected, found, AGAIN));
        }
        let from = data.saturating_add(offset);
        let to = from.saturating_add(bytes as u64);
        if to > size {
            return Err(ModelError::tensor(
                path,
                &name,
                format!("a file of at least {to} bytes"),
                format!("{size} bytes"),
                AGAIN,
            ));
        }
        entries.push((
            name,
            Entry {
                dims,
                stored,
                file: 0,
                offset: from,
                bytes,
            },
        ));
    }
    apart(path, &entries)?;
    Ok((meta, entries))
}

/// A part of a model that is in several files is no model.
fn whole(path: &Path, meta: &GgufMetadata, tensors: u64) -> Result<(), ModelError> {
    let number = |key: &str| meta.get(key).and_then(GgufValue::as_u64);
    let parts = number("split.count").unwrap_or(1);
    if parts > 1 {
        let part = number("split.no").unwrap_or(0).saturating_add(1);
        return Err(ModelError::unsupported(
            path,
            "split.count",
            "a model in one file",
            format!("part {part} of {parts}"),
            "merge the parts with `llama-gguf-split --merge FIRST_PART OUT.gguf` and give OUT.gguf",
        ));
    }
    match number("split.tensors.count") {
        Some(n) if n != tensors => Err(ModelError::malformed(
            path,
            "split.tensors.count",
            format!("{tensors}, the tensors of the file"),
            n.to_string(),
            "the file is a part of a model: merge all parts with `llama-gguf-split --merge`",
        )),
        _ => Ok(()),
    }
}

/// No two tensors share bytes.
fn apart(path: &Path, entries: &[(String, Entry)]) -> Result<(), ModelError> {
    let mut spans: Vec<(u64, u64, &str)> = entries
        .iter()
        .filter(|(_, e)| e.bytes > 0)
        .map(|(name, e)| (e.offset, e.offset + e.bytes as u64, name.as_str()))
        .collect();
    spans.sort_unstable();
    for pair in spans.windows(2) {
        let ((_, end, first), (start, _, second)) = (pair[0], pair[1]);
        if start < end {
            let expected = format!("data of its own, from byte {end} on");
            let found = format!("data from byte {start} on, inside that of `{first}`");
            return Err(ModelError::tensor(path, second, expected, found, AGAIN));
        }
    }
    Ok(())
}

struct Reader<'a> {
    path: &'a Path,
    inner: BufReader<File>,
    at: u64,
    size: u64,
    /// Values that lists may still have.
    values: u64,
}

impl Reader<'_> {
    fn bad(&self, item: &str, expected: &str, found: String) -> ModelError {
        ModelError::malformed(self.path, item, expected, found, AGAIN)
    }

    fn fill(&mut self, buffer: &mut [u8], item: &str) -> Result<(), ModelError> {
        let n = buffer.len() as u64;
        if n > self.size - self.at {
            let found = format!("the end of the file at byte {}", self.size);
            return Err(self.bad(item, &format!("{n} bytes at byte {}", self.at), found));
        }
        self.inner
            .read_exact(buffer)
            .map_err(|e| ModelError::io(self.path, "read its header", e, AGAIN))?;
        self.at += n;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, item: &str) -> Result<[u8; N], ModelError> {
        let mut word = [0u8; N];
        self.fill(&mut word, item)?;
        Ok(word)
    }

    fn u32(&mut self, item: &str) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.bytes(item)?))
    }

    fn u64(&mut self, item: &str) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.bytes(item)?))
    }

    fn text(&mut self, item: &str) -> Result<String, ModelError> {
        let n = self.u64(item)?;
        if n > self.size - self.at {
            let expected = format!("a text of at most {} bytes", self.size - self.at);
            return Err(self.bad(item, &expected, format!("a length of {n}")));
        }
        let mut bytes = vec![0u8; n as usize];
        self.fill(&mut bytes, item)?;
        String::from_utf8(bytes).map_err(|e| self.bad(item, "UTF-8", e.to_string()))
    }

    fn value(&mut self, key: &str, kind: u32, depth: usize) -> Result<GgufValue, ModelError> {
        use GgufValue::*;
        Ok(match kind {
            0 => Unsigned(self.bytes::<1>(key)?[0].into()),
            1 => Signed(i8::from_le_bytes(self.bytes(key)?).into()),
            2 => Unsigned(u16::from_le_bytes(self.bytes(key)?).into()),
            3 => Signed(i16::from_le_bytes(self.bytes(key)?).into()),
            4 => Unsigned(self.u32(key)?.into()),
            5 => Signed(i32::from_le_bytes(self.bytes(key)?).into()),
            6 => Float(f32::from_le_bytes(self.bytes(key)?).into()),
            7 => match self.bytes::<1>(key)?[0] {
                0 => Flag(false),
                1 => Flag(true),
                b => return Err(self.bad(key, "a flag, 0 or 1", b.to_string())),
            },
            8 => Text(self.text(key)?),
            9 => {
                if depth == MAX_DEPTH {
                    return Err(self.bad(key, "lists at most 8 deep", "more".into()));
                }
                let kind = self.u32(key)?;
                let n = self.u64(key)?;
                // Every value takes a byte at least, so a longer list cannot be in the file.
                if n > self.size - self.at {
                    let expected = format!("a list of at most {}", self.size - self.at);
                    return Err(self.bad(key, &expected, n.to_string()));
                }
                if n > self.values {
                    let expected = format!("lists of at most {MAX_VALUES} values in all");
                    return Err(self.bad(key, &expected, n.to_string()));
                }
                self.values -= n;
                let mut list = Vec::with_capacity(n as usize);
                for _ in 0..n {
                    list.push(self.value(key, kind, depth + 1)?);
                }
                List(list)
            }
            10 => Unsigned(self.u64(key)?),
            11 => Signed(i64::from_le_bytes(self.bytes(key)?)),
            12 => Float(f64::from_le_bytes(self.bytes(key)?)),
            other => return Err(self.bad(key, "a value type of 0 to 12", other.to_string())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file without tensors that has these numbers.
    fn read(pairs: &[(&str, u32)]) -> Result<(), String> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend((pairs.len() as u64).to_le_bytes());
        for (key, value) in pairs {
            bytes.extend((key.len() as u64).to_le_bytes());
            bytes.extend(key.as_bytes());
            bytes.extend(4u32.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m-00001-of-00002.gguf");
        std::fs::write(&file, bytes).unwrap();
        header(&file).map(|_| ()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_part_of_a_model_is_refused() {
        read(&[]).unwrap();
        read(&[("split.count", 1), ("split.no", 0)]).unwrap();
        let why = read(&[("split.no", 1), ("split.count", 2)]).unwrap_err();
        for word in ["m-00001-of-00002.gguf", "part 2 of 2", "--merge"] {
            assert!(why.contains(word), "{why}");
        }
        let why = read(&[("split.tensors.count", 3)]).unwrap_err();
        assert!(why.contains("split.tensors.count"), "{why}");
    }

    #[test]
    fn an_alignment_is_a_power_of_two() {
        for (alignment, good) in [(0, false), (3, false), (33, false), (1, true), (64, true)] {
            let found = read(&[("general.alignment", alignment)]);
            assert_eq!(found.is_ok(), good, "{alignment}: {found:?}");
        }
    }
}
