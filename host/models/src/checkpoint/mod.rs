//! Checkpoints on disk: a Hugging Face directory (safetensors, sharded or not) or one GGUF file.
//!
//! Opening reads headers only, so an 8B model is described in milliseconds; tensors are read one by one, by
//! position, when somebody asks. It knows names, shapes and stored types, not what they mean: that is the family's.

use std::fmt;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{Device, Storage, Tensor};
use indexmap::IndexMap;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use structures_graph::regular;

mod agree;
mod compressed;
mod gguf;
mod outline;
mod packed;
mod rows;
mod safetensors;
mod stored;

pub use gguf::{GgufMetadata, GgufValue};
pub use packed::PackedWeight;
use stored::{first_non_finite, StoredType};

use crate::ModelError;

const APART: &str = "index and shards do not belong together: get both again";
/// How files that hold weights end, and those that say which of them holds which.
const WEIGHTS: &str = ".safetensors";
const INDEX: &str = ".safetensors.index.json";
/// What they are called where a directory holds several models.
const MAIN: &str = "model";
/// What a directory holds beside weights that decides what the model says.
const BESIDE_WEIGHTS: [&str; 3] = ["config.json", "generation_config.json", "tokenizer.json"];

/// Where one tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    dims: Vec<usize>,
    stored: StoredType,
    file: usize,
    offset: u64,
    bytes: usize,
}

/// A tensor as the header says it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the checkpoint.
    pub name: String,
    /// Stored dims, outermost first.
    pub dims: Vec<usize>,
    /// Stored dtype as text (`bf16`, `q4_1`, ...).
    pub dtype: &'static str,
    /// Bytes in the file.
    pub bytes: usize,
}

/// What describes the model beside its tensors.
#[derive(Clone, Debug)]
pub enum Metadata {
    /// `config.json` of a Hugging Face directory.
    Config(serde_json::Map<String, Json>),
    /// Key-value pairs of a GGUF file.
    Gguf(GgufMetadata),
}

/// An opened checkpoint: headers in memory, tensors on disk.
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<PathBuf>,
    metadata: Metadata,
    tensors: IndexMap<String, Entry>,
    /// Weights that are several of the tensors.
    compressed: compressed::Compressed,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Checkpoint({}, {} tensors)",
            self.path.display(),
            self.tensors.len()
        )
    }
}

impl Checkpoint {
    /// Reads the headers of a directory or of a `.gguf` file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self::open_headers(path)?;
        checkpoint.find_compressed()?;
        Ok(checkpoint)
    }

    /// As [`Self::open`], whether or not there is a codec for weights that are packed: for who only looks at shapes.
    pub fn open_headers(path: &Path) -> Result<Self, ModelError> {
        let kind = std::fs::metadata(path).map_err(|e| {
            let help = "give a directory with config.json and safetensors, or a .gguf file";
            ModelError::io(path, "find it", e, help)
        })?;
        if kind.is_dir() {
            return Self::open_directory(path);
        }
        if gguf::has_magic(path)? {
            return Self::open_gguf(path);
        }
        let help = match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") => "give the directory that holds it and its config.json",
            Some("gguf") => "the file is damaged or no GGUF: get it again",
            _ => "give a directory with config.json and safetensors, or a .gguf file",
        };
        let mut start = [0u8; 4];
        let n = regular::open(path)
            .and_then(|(mut f, _)| f.read(&mut start))
            .map_err(|e| ModelError::io(path, "read it", e, help))?;
        Err(ModelError::malformed(
            path,
            "first four bytes",
            "`GGUF`",
            format!("{:02x?}", &start[..n]),
            help,
        ))
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let (metadata, entries) = gguf::header(path)?;
        let mut checkpoint = Checkpoint {
            path: path.into(),
            files: vec![path.into()],
            metadata: Metadata::Gguf(metadata),
            tensors: IndexMap::new(),
            compressed: Default::default(),
        };
        checkpoint.add(entries)?;
        Ok(checkpoint)
    }

    fn open_directory(path: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Checkpoint {
            path: path.into(),
            files: Vec::new(),
            metadata: Metadata::Config(read_json_object(&path.join("config.json"))?),
            tensors: IndexMap::new(),
            compressed: Default::default(),
        };
        match weights_of(path)? {
            Weights::Single(file) => checkpoint.add_safetensors(file)?,
            Weights::Indexed(index) => checkpoint.add_indexed(path, &index)?,
            Weights::Shards(files) => {
                for file in files {
                    checkpoint.add_safetensors(file)?;
                }
            }
        }
        Ok(checkpoint)
    }

    fn add_indexed(&mut self, path: &Path, index_path: &Path) -> Result<(), ModelError> {
        let index = safetensors::index(index_path)?;
        for shard in &index.shards {
            let file = path.join(shard);
            if !file.is_file() {
                let tensors = index.map.values().filter(|s| *s == shard).count();
                return Err(ModelError::malformed(
                    index_path,
                    format!("shard `{shard}`"),
                    format!("that file, with {tensors} tensors"),
                    "no such file",
                    "get the missing shard",
                ));
            }
            self.add_safetensors(file)?;
        }
        for (tensor, shard) in &index.map {
            let found = self.tensors.get(tensor);
            let at = found.map(|e| self.files[e.file].clone());
            if at.as_deref() != Some(path.join(shard).as_path()) {
                return Err(ModelError::tensor(
                    index_path,
                    tensor,
                    format!("it in `{shard}`, as the index says"),
                    match &at {
                        Some(file) => format!("it in `{}`", file.display()),
                        None => "it in no shard".into(),
                    },
                    APART,
                ));
            }
        }
        if let Some((tensor, e)) = self
            .tensors
            .iter()
            .find(|(t, _)| !index.map.contains_key(*t))
        {
            let found = format!("it in `{}`", self.files[e.file].display());
            return Err(ModelError::tensor(
                index_path,
                tensor,
                "no tensor in the shards that the index does not name",
                found,
                APART,
            ));
        }
        Ok(())
    }

    /// Nothing is left to say about a configuration whose codec is here.
    fn find_compressed(&mut self) -> Result<(), ModelError> {
        let path = self.metadata_path();
        if let Metadata::Config(config) = &mut self.metadata {
            if let Some(found) = compressed::find(&path, config, &self.tensors)? {
                config.remove(compressed::KEY);
                self.compressed = found;
            }
        }
        Ok(())
    }

    fn add_safetensors(&mut self, file: PathBuf) -> Result<(), ModelError> {
        let entries = safetensors::header(&file, self.files.len())?;
        self.files.push(file);
        self.add(entries)
    }

    fn add(&mut self, entries: Vec<(String, Entry)>) -> Result<(), ModelError> {
        for (name, entry) in entries {
            let file = self.files[entry.file].clone();
            if let Some(other) = self.tensors.insert(name.clone(), entry) {
                let other = &self.files[other.file];
                return Err(ModelError::tensor(
                    &file,
                    &name,
                    "it once in the checkpoint",
                    format!("it twice (also in `{}`)", other.display()),
                    "the checkpoint was put together wrongly: get it again",
                ));
            }
        }
        Ok(())
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Files that hold tensors.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// `config.json` or the GGUF metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The file [`Self::metadata`] was read from.
    pub fn metadata_path(&self) -> PathBuf {
        match self.metadata {
            Metadata::Config(_) => self.path.join("config.json"),
            Metadata::Gguf(_) => self.path.clone(),
        }
    }

    /// `safetensors` or `gguf`.
    pub fn format(&self) -> &'static str {
        match self.metadata {
            Metadata::Config(_) => "safetensors",
            Metadata::Gguf(_) => "gguf",
        }
    }

    /// Bytes of all files that hold tensors.
    pub fn size(&self) -> u64 {
        let sizes = self.files.iter().filter_map(|f| std::fs::metadata(f).ok());
        sizes.map(|m| m.len()).sum()
    }

    /// All tensors, file order.
    pub fn tensor_infos(&self) -> impl Iterator<Item = TensorInfo> + '_ {
        let hidden = |name: &String| self.compressed.parts.contains(name);
        let plain = self.tensors.iter().filter(move |(name, _)| !hidden(name));
        let weights = self.compressed.weights.iter();
        plain
            .map(|(name, e)| info(name, e))
            .chain(weights.map(|(name, w)| w.info(name)))
    }

    /// One tensor's header.
    pub fn tensor_info(&self, name: &str) -> Option<TensorInfo> {
        if let Some(weight) = self.compressed.weights.get(name) {
            return Some(weight.info(name));
        }
        self.tensors.get(name).map(|e| info(name, e))
    }

    /// Reads one tensor and widens it to f32. NaN and infinity are refused.
    pub fn load(&self, name: &str) -> Result<Tensor, ModelError> {
        let failed = |e| ModelError::compute(format!("widening `{name}` to f32"), e);
        let (tensor, file) = match self.compressed.weights.get(name) {
            Some(weight) => {
                let packed = weight.read(self)?;
                let dims = (packed.n, packed.k);
                let tensor = Tensor::from_vec(packed.decode(), dims, &Device::Cpu);
                (tensor.map_err(failed)?, &self.path)
            }
            None => {
                let entry = self.entry(name)?;
                let file = &self.files[entry.file];
                if !entry.stored.is_weight() || entry.bytes == 0 {
                    return Err(ModelError::unsupported(
                        file,
                        format!("stored type of tensor `{name}`"),
                        "f32, f16, bf16, f64 or a GGUF block type, with at least one element",
                        format!("{} {:?}", entry.stored.name(), entry.dims),
                        "its codec is not known here: save the model in bf16",
                    ));
                }
                let tensor = entry.stored.widen(self.bytes(name)?, &entry.dims);
                (tensor.map_err(failed)?, file)
            }
        };
        let storage = tensor.storage_and_layout().0;
        let values = match &*storage {
            Storage::Cpu(values) => values.as_slice::<f32>().map_err(failed)?,
            _ => return Err(failed(candle_core::Error::Msg("not on the CPU".into()))),
        };
        let odd = first_non_finite(values);
        drop(storage);
        match odd {
            None => Ok(tensor),
            Some((count, first, value)) => Err(ModelError::NonFinite {
                path: file.clone(),
                tensor: name.into(),
                count,
                first,
                value,
            }),
        }
    }

    fn entry(&self, name: &str) -> Result<&Entry, ModelError> {
        self.tensors.get(name).ok_or_else(|| {
            ModelError::tensor(
                &self.path,
                name,
                "it in the checkpoint",
                format!("{} tensors without it", self.tensors.len()),
                "the checkpoint is not complete: get it again",
            )
        })
    }

    /// Where a tensor is stored, for messages.
    pub(crate) fn file_of(&self, name: &str) -> &Path {
        let entry = self.tensors.get(name);
        entry.map_or(&self.path, |e| &self.files[e.file])
    }

    /// One tensor's bytes as they are stored.
    fn bytes(&self, name: &str) -> Result<Vec<u8>, ModelError> {
        let entry = self.entry(name)?;
        let file = &self.files[entry.file];
        let mut bytes = vec![0u8; entry.bytes];
        let read = regular::open(file).and_then(|(mut f, _)| {
            f.seek(SeekFrom::Start(entry.offset))?;
            f.read_exact(&mut bytes)
        });
        read.map_err(|e| {
            let doing = format!("read tensor `{name}`");
            let help = "the file changed since it was opened: try again";
            ModelError::io(file, &doing, e, help)
        })?;
        Ok(bytes)
    }

    /// Identity of the weights, 16 hex digits: sha256 over the first 64 KiB and the size of every file that holds
    /// tensors, in order (B-073). It tells checkpoints apart quickly; it is no protection against tampering.
    pub fn hash(&self) -> Result<String, ModelError> {
        let mut sha = Sha256::new();
        for file in &self.files {
            let io = |e| ModelError::io(file, "hash it", e, "check the file's permissions");
            let (f, size) = regular::open(file).map_err(io)?;
            let mut head = Vec::new();
            f.take(64 * 1024).read_to_end(&mut head).map_err(io)?;
            sha.update(&head);
            sha.update(size.to_string());
        }
        let digest = sha.finalize();
        Ok(digest[..8].iter().map(|b| format!("{b:02x}")).collect())
    }

    /// Identity of the whole model, 64 hex digits: sha256 over name, length and bytes of every file that makes it, so
    /// that no byte of weights, configuration or tokenizer can change unseen. Where the model lies does not count,
    /// nor what a GGUF file is called. Reads everything: seconds where [`Self::hash`] takes milliseconds.
    pub fn digest(&self) -> Result<String, ModelError> {
        let mut sha = Sha256::new();
        for (name, file) in self.parts() {
            let io = |e| ModelError::io(&file, "digest it", e, "check the file's permissions");
            let (f, size) = regular::open(&file).map_err(io)?;
            // Lengths in front of name and bytes: no two lists of files give the same stream.
            sha.update((name.len() as u64).to_le_bytes());
            sha.update(&name);
            sha.update(size.to_le_bytes());
            let read = std::io::copy(&mut f.take(size.saturating_add(1)), &mut sha).map_err(io)?;
            if read != size {
                let help = "the file changed while it was read: try again";
                return Err(ModelError::malformed(
                    &file,
                    "length",
                    format!("{size} bytes, as when it was opened"),
                    format!("{read}"),
                    help,
                ));
            }
        }
        Ok(sha.finalize().iter().map(|b| format!("{b:02x}")).collect())
    }

    /// Name and path of every file that makes the model, by name.
    fn parts(&self) -> Vec<(String, PathBuf)> {
        if matches!(self.metadata, Metadata::Gguf(_)) {
            return vec![("model.gguf".into(), self.path.clone())];
        }
        let beside = BESIDE_WEIGHTS.iter().map(|name| self.path.join(name));
        // A whole file wins over an index, which then says nothing about this model.
        let index = match weights_of(&self.path) {
            Ok(Weights::Indexed(index)) => Some(index),
            _ => None,
        };
        let mut parts: Vec<(String, PathBuf)> = beside
            .chain(index)
            .filter(|file| file.exists())
            .chain(self.files.iter().cloned())
            .filter_map(|file| Some((file.file_name()?.to_string_lossy().into_owned(), file)))
            .collect();
        parts.sort();
        parts
    }
}

/// Where a directory's weights are.
enum Weights {
    /// All in one file.
    Single(PathBuf),
    /// In several, and this file says which.
    Indexed(PathBuf),
    /// In several that are numbered.
    Shards(Vec<PathBuf>),
}

/// The weights of a directory, by the names in use: `model.safetensors`, else its index, else the only file or index of
/// another name, else all parts of a numbered set.
fn weights_of(dir: &Path) -> Result<Weights, ModelError> {
    let help = "save the model as safetensors";
    let wanted =
        "model.safetensors or model.safetensors.index.json, or one file or index of another name";
    let bad = |found: String| Err(ModelError::malformed(dir, "weights", wanted, found, help));
    for (ending, kind) in [
        (WEIGHTS, Weights::Single as fn(PathBuf) -> Weights),
        (INDEX, Weights::Indexed),
    ] {
        let file = dir.join(format!("{MAIN}{ending}"));
        if file.is_file() {
            return Ok(kind(file));
        }
    }
    let mut names: Vec<String> = match std::fs::read_dir(dir) {
        Ok(entries) => entries
            .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
            .collect(),
        Err(e) => return bad(e.to_string()),
    };
    names.sort();
    let ending = |end: &str| {
        names
            .iter()
            .filter(|n| n.ends_with(end))
            .collect::<Vec<_>>()
    };
    let (files, indices) = (ending(WEIGHTS), ending(INDEX));
    let numbered = files.iter().find_map(|name| part_of(name));
    match (indices.as_slice(), files.as_slice(), numbered) {
        ([index], ..) => Ok(Weights::Indexed(dir.join(index))),
        ([], [file], None) => Ok(Weights::Single(dir.join(file))),
        ([], [_, ..], Some((stem, count))) => {
            let parts = (1..=count).map(|n| format!("{stem}-{n:05}-of-{count:05}{WEIGHTS}"));
            let parts: Vec<String> = parts.collect();
            let missing = parts.iter().find(|p| !names.contains(p));
            let other = files.iter().find(|f| !parts.contains(f));
            match (missing, other) {
                (None, None) => Ok(Weights::Shards(parts.iter().map(|p| dir.join(p)).collect())),
                (Some(part), _) => Err(ModelError::malformed(
                    dir,
                    format!("shard `{part}`"),
                    format!("that file, one of {count}"),
                    "no such file",
                    "get the missing shard",
                )),
                (None, Some(other)) => bad(format!("`{other}` beside {count} numbered files")),
            }
        }
        _ => {
            names.truncate(12);
            bad(format!("only {}", names.join(", ")))
        }
    }
}

/// `a-00002-of-00007.safetensors` -> `a` and 7; at most 9,999 parts.
fn part_of(name: &str) -> Option<(String, usize)> {
    let (rest, count) = name.strip_suffix(WEIGHTS)?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(count) || !digits(number) {
        return None;
    }
    let count = count.parse().ok().filter(|n| (1..10_000).contains(n))?;
    Some((stem.into(), count))
}

fn info(name: &str, entry: &Entry) -> TensorInfo {
    TensorInfo {
        name: name.into(),
        dims: entry.dims.clone(),
        dtype: entry.stored.name(),
        bytes: entry.bytes,
    }
}

/// Values a configuration may have: one with 21,000 labels has 90,000. A value takes up to 160 bytes while it is read.
const MAX_VALUES: usize = 400_000;
/// Bytes of a JSON document beside the weights.
const MAX_JSON: u64 = 32 << 20;

/// Reads a JSON document with at most so many values, counted before anything is made of it.
fn read_small(path: &Path, values: usize, help: &str) -> Result<String, ModelError> {
    let io = |e| ModelError::io(path, "read it", e, help);
    let bytes = regular::read(path, MAX_JSON).map_err(io)?.map_err(|n| {
        let expected = format!("at most {MAX_JSON} bytes");
        ModelError::malformed(path, "size", expected, n.to_string(), help)
    })?;
    let text = String::from_utf8(bytes)
        .map_err(|e| io(std::io::Error::new(std::io::ErrorKind::InvalidData, e)))?;
    let text = match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_string(),
        None => text,
    };
    let found = text
        .bytes()
        .filter(|b| matches!(b, b',' | b'[' | b'{'))
        .count();
    if found > values {
        let expected = format!("at most {values} values");
        return Err(ModelError::malformed(
            path,
            "content",
            expected,
            found.to_string(),
            help,
        ));
    }
    Ok(text)
}

/// Numbers that JSON has no word for and other writers write all the same.
const BARE_WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Those numbers as texts: who asks for the value of such a key gets no number, and everybody else reads on.
fn quote_bare_words(text: String) -> String {
    if !BARE_WORDS.iter().any(|word| text.contains(word)) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 64);
    let (mut rest, mut inside) = (text.as_str(), false);
    while let Some(c) = rest.chars().next() {
        let word = BARE_WORDS.iter().find(|w| rest.starts_with(**w));
        if let Some(word) = word.filter(|_| !inside) {
            out.extend(["\"", word, "\""]);
            rest = &rest[word.len()..];
            continue;
        }
        let mut n = c.len_utf8();
        match c {
            '"' => inside = !inside,
            '\\' if inside => n += rest[1..].chars().next().map_or(0, char::len_utf8),
            _ => {}
        }
        out.push_str(&rest[..n]);
        rest = &rest[n..];
    }
    out
}

/// Reads a JSON file that holds one object, whether or not it begins with a mark of its encoding, and with numbers that
/// are none as texts.
pub(crate) fn read_json_object(path: &Path) -> Result<serde_json::Map<String, Json>, ModelError> {
    let help = "a model directory needs it: save the model with its configuration";
    let text = quote_bare_words(read_small(path, MAX_VALUES, help)?);
    serde_json::from_str(&text).map_err(|e| {
        let help = "correct the file or get it again";
        ModelError::malformed(path, "content", "a JSON object", e.to_string(), help)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_words_are_texts_and_texts_stay() {
        let text = r#"{"a":NaN,"b":[-Infinity,Infinity],"c":"NaN \" Infinity","NaN\\":1}"#;
        let quoted = r#"{"a":"NaN","b":["-Infinity","Infinity"],"c":"NaN \" Infinity","NaN\\":1}"#;
        assert_eq!(quote_bare_words(text.into()), quoted);
        let dir = directory(&[("config.json", format!("\u{feff}{text}").into_bytes())]);
        let read = read_json_object(&dir.path().join("config.json")).unwrap();
        assert_eq!(read["b"], serde_json::json!(["-Infinity", "Infinity"]));
    }

    #[test]
    fn what_is_no_regular_file_is_refused() {
        let plain = [
            ("config.json", b"{}".to_vec()),
            ("model.safetensors", weights("a", &[1])),
        ];
        for (name, _) in &plain {
            let dir = directory(&plain);
            let file = dir.path().join(name);
            std::fs::remove_file(&file).unwrap();
            std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
            let why = Checkpoint::open(dir.path()).unwrap_err().to_string();
            assert!(why.contains("regular file") && why.contains(name), "{why}");
        }
        let why = Checkpoint::open(Path::new("/dev/zero")).unwrap_err();
        assert!(why.to_string().contains("regular file"), "{why}");
    }

    const MAIN_INDEX: &str = "model.safetensors.index.json";

    #[test]
    fn the_hash_sees_the_head_and_the_size() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let weights = dir.path().join("model.safetensors");
        let write = |tail: u8, n: usize| {
            let header =
                format!(r#"{{"a":{{"dtype":"U8","shape":[{n}],"data_offsets":[0,{n}]}}}}"#);
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            bytes.extend(std::iter::repeat_n(tail, n));
            std::fs::write(&weights, bytes).unwrap();
            Checkpoint::open(dir.path()).unwrap().hash().unwrap()
        };
        let first = write(0, 10);
        assert_eq!(first.len(), 16);
        assert_eq!(first, write(0, 10));
        assert_ne!(first, write(1, 10));
        assert_ne!(first, write(0, 11));
    }

    /// A directory with these files.
    fn directory(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        dir
    }

    /// A weights file with one tensor.
    fn weights(tensor: &str, values: &[u8]) -> Vec<u8> {
        let n = values.len();
        let header =
            format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[{n}],"data_offsets":[0,{n}]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(values);
        bytes
    }

    fn digest(files: &[(&str, Vec<u8>)]) -> String {
        let dir = directory(files);
        Checkpoint::open(dir.path()).unwrap().digest().unwrap()
    }

    #[test]
    fn the_digest_sees_every_byte_of_every_file_and_no_path() {
        // Beyond the first 64 KiB, which is all that `hash` reads.
        let (long, mut changed) = (vec![0u8; 200_000], vec![0u8; 200_000]);
        changed[150_000] = 1;
        let config = b"{}".to_vec();
        let plain = [
            ("config.json", config.clone()),
            ("model.safetensors", weights("a", &long)),
        ];
        let first = digest(&plain);
        assert_eq!(first.len(), 64);
        assert_eq!(first, digest(&plain), "another directory, the same model");
        let with = |name: &'static str, bytes: &[u8]| {
            let mut files = plain.to_vec();
            files.retain(|(n, _)| *n != name);
            files.push((name, bytes.to_vec()));
            digest(&files)
        };
        let mut all = vec![
            first.clone(),
            with("model.safetensors", &weights("a", &changed)),
            with("config.json", b"{ }"),
            with("tokenizer.json", b""),
            with("tokenizer.json", b"{}"),
            with("generation_config.json", b"{}"),
        ];
        assert_eq!(first, with("README.md", b"x"), "no part of the model");
        assert_eq!(
            first,
            with(MAIN_INDEX, b"{}"),
            "not read beside a whole file"
        );
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 6, "each change gives another digest");
    }

    #[test]
    fn the_digest_is_the_published_rule() {
        let files = [
            ("config.json", b"{}".to_vec()),
            ("model.safetensors", weights("a", &[7])),
        ];
        let mut stream = Vec::new();
        for (name, bytes) in &files {
            stream.extend((name.len() as u64).to_le_bytes());
            stream.extend(name.as_bytes());
            stream.extend((bytes.len() as u64).to_le_bytes());
            stream.extend(bytes);
        }
        let want: String = Sha256::digest(&stream)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(digest(&files), want);
    }

    #[test]
    fn the_digest_sees_index_and_every_shard() {
        let index = |a: &str, b: &str| {
            format!(r#"{{"weight_map": {{"a": "{a}", "b": "{b}"}}}}"#).into_bytes()
        };
        let shards = |names: [&'static str; 2], last: u8| {
            digest(&[
                ("config.json", b"{}".to_vec()),
                (MAIN_INDEX, index(names[0], names[1])),
                (names[0], weights("a", &[1])),
                (names[1], weights("b", &[last])),
            ])
        };
        let first = shards(["1.safetensors", "2.safetensors"], 2);
        assert_ne!(first, shards(["1.safetensors", "2.safetensors"], 3));
        assert_ne!(first, shards(["1.safetensors", "3.safetensors"], 2));
    }
}
