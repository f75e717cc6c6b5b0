//! A module tree from a JSON dump of another framework's model: modules in definition order with class, parameters
//! and scalars, and what each class takes and derives from. Plain or gzip.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::Path;

use indexmap::IndexMap;
use serde::de::{Error as _, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::kinds::{epsilon, word, Facts};
use crate::tree::{parent_path, ArgKind, Module, ModuleKind, ModuleTree, ParamInfo, Scalar};
use crate::{regular, GraphError};

/// Bytes of JSON a dump may have: a module takes about 190.
const MAX_BYTES: u64 = 64 << 20;
/// Values in it: a module has about twelve. A value takes up to 150 bytes in memory.
const MAX_VALUES: usize = 3_000_000;
/// Modules: a mixture of 512 experts in 48 layers has 125,000.
const MAX_MODULES: usize = 250_000;

#[derive(Deserialize)]
struct Dump {
    model: String,
    #[serde(default)]
    classes: HashMap<String, Class>,
    #[serde(deserialize_with = "each_once")]
    modules: Vec<Entry>,
    #[serde(default)]
    module_aliases: IndexMap<String, String>,
    #[serde(default)]
    tied_parameters: Vec<Vec<String>>,
    #[serde(default)]
    parameter_count: Option<u64>,
}

#[derive(Deserialize)]
struct Class {
    #[serde(default)]
    forward: Option<Vec<(String, ArgKind)>>,
    #[serde(default)]
    bases: Vec<String>,
}

#[derive(Deserialize)]
struct Entry {
    path: String,
    #[serde(default)]
    class: String,
    #[serde(default)]
    params: IndexMap<String, (Vec<usize>, String)>,
    #[serde(default)]
    absent_params: Vec<String>,
    #[serde(default)]
    buffers: IndexMap<String, IgnoredAny>,
    #[serde(default)]
    attrs: IndexMap<String, Scalar>,
    #[serde(default)]
    activation: Option<Activation>,
}

/// The content of an attribute that holds an activation: a module's class, a function's name, or a text.
#[derive(Deserialize)]
struct Activation {
    attr: String,
    class: String,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    value: Option<String>,
    #[serde(default)]
    keywords: IndexMap<String, Scalar>,
}

impl ModuleTree {
    /// A tree from the JSON of a dump.
    pub fn from_dump(json: impl AsRef<[u8]>) -> Result<ModuleTree, GraphError> {
        parse(json.as_ref()).map_err(|reason| GraphError::Tree {
            path: "module tree".into(),
            reason,
        })
    }

    /// A tree from a dump's file, gzip when its content is.
    pub fn from_dump_file(path: impl AsRef<Path>) -> Result<ModuleTree, GraphError> {
        let path = path.as_ref();
        read(path).map_err(|reason| GraphError::Tree {
            path: path.display().to_string(),
            reason,
        })
    }
}

/// Reads a file piece by piece: what is packed is never in memory as a whole.
fn read(path: &Path) -> Result<ModuleTree, String> {
    let failed = |e: io::Error| format!("cannot be read: {e}");
    let (file, size) = regular::open(path).map_err(failed)?;
    if size > MAX_BYTES {
        return Err(format!("has {size} bytes, expected at most {MAX_BYTES}"));
    }
    let mut start = [0; 2];
    let mut file = BufReader::new(file);
    let mut begun = 0;
    while begun < start.len() {
        match file.read(&mut start[begun..]).map_err(failed)? {
            0 => break,
            n => begun += n,
        }
    }
    let whole = start[..begun].chain(file);
    match start == [0x1f, 0x8b] {
        true => parse_from(flate2::read::GzDecoder::new(whole)),
        false => parse_from(whole),
    }
}

fn parse_from(source: impl Read) -> Result<ModuleTree, String> {
    let bounded = Bounded {
        source,
        bytes: MAX_BYTES,
        values: MAX_VALUES,
    };
    let mut reader = serde_json::Deserializer::from_reader(BufReader::new(bounded));
    let dump = Dump::deserialize(&mut reader).and_then(|dump| reader.end().map(|()| dump));
    tree_of(dump.map_err(|e| format!("{NO_DUMP}: {e}"))?)
}

const NO_DUMP: &str = "is not a dump of a module tree (see the format's README)";

/// A source that fails when it has given more than a dump may have.
struct Bounded<R> {
    source: R,
    bytes: u64,
    values: usize,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.source.read(into)?;
        let too_long = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        self.bytes = self
            .bytes
            .checked_sub(n as u64)
            .ok_or_else(|| too_long(format!("it holds more than {MAX_BYTES} bytes of JSON")))?;
        let begin = into[..n].iter();
        let values = begin.filter(|b| matches!(b, b',' | b'[' | b'{')).count();
        self.values = self
            .values
            .checked_sub(values)
            .ok_or_else(|| too_long(format!("it holds more than {MAX_VALUES} values")))?;
        Ok(n)
    }
}

/// Modules whose paths stand in the list once.
fn each_once<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Entry>, D::Error> {
    struct Rows;
    impl<'de> Visitor<'de> for Rows {
        type Value = Vec<Entry>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of modules")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let (mut rows, mut paths) = (Vec::new(), HashSet::new());
            while let Some(entry) = seq.next_element::<Entry>()? {
                if !paths.insert(entry.path.clone()) {
                    let text = format!("the module `{}` is there twice", entry.path);
                    return Err(A::Error::custom(text));
                }
                if rows.len() == MAX_MODULES {
                    let text = format!("it holds more than {MAX_MODULES} modules");
                    return Err(A::Error::custom(text));
                }
                rows.push(entry);
            }
            Ok(rows)
        }
    }
    d.deserialize_seq(Rows)
}

fn parse(json: &[u8]) -> Result<ModuleTree, String> {
    let dump: Dump = serde_json::from_slice(json).map_err(|e| format!("{NO_DUMP}: {e}"))?;
    tree_of(dump)
}

fn tree_of(dump: Dump) -> Result<ModuleTree, String> {
    let mut attrs_of: HashMap<&str, (&str, &IndexMap<String, Scalar>)> = HashMap::new();
    let mut parents: HashMap<&str, usize> = HashMap::new();
    for m in &dump.modules {
        attrs_of.insert(&m.path, (&m.class, &m.attrs));
        for (name, (dims, _)) in &m.params {
            let count = dims
                .iter()
                .try_fold(1i64, |n, d| n.checked_mul(i64::try_from(*d).ok()?));
            if count.is_none() {
                let path = &m.path;
                return Err(format!(
                    "gives `{path}.{name}` the shape {dims:?}, which no tensor has"
                ));
            }
        }
        if !m.path.is_empty() {
            *parents.entry(parent_path(&m.path)).or_insert(0) += 1;
        }
    }
    let modules: Vec<Module> = dump
        .modules
        .iter()
        .map(|m| {
            module(
                m,
                &dump.classes,
                &attrs_of,
                !parents.contains_key(m.path.as_str()),
            )
        })
        .collect();
    for (alias, target) in &dump.module_aliases {
        if attrs_of.contains_key(alias.as_str()) || !attrs_of.contains_key(target.as_str()) {
            return Err(format!(
                "`{alias}` is no second name of a module `{target}`"
            ));
        }
    }
    let mut tree = ModuleTree::new(&dump.model, modules);
    tree.aliases = dump.module_aliases;
    tree.tied = dump.tied_parameters;
    if let Some(said) = dump.parameter_count {
        let found = tree.parameter_count();
        if said != found {
            return Err(format!("says {said} parameters, its modules have {found}"));
        }
    }
    Ok(tree)
}

fn module(
    m: &Entry,
    classes: &HashMap<String, Class>,
    attrs_of: &HashMap<&str, (&str, &IndexMap<String, Scalar>)>,
    leaf: bool,
) -> Module {
    let params: IndexMap<String, ParamInfo> = m
        .params
        .iter()
        .map(|(name, (dims, dtype))| {
            let info = ParamInfo {
                dims: dims.clone(),
                dtype: dtype_word(dtype).into(),
            };
            (name.clone(), info)
        })
        .collect();
    let class = classes.get(&m.class);
    let facts = Facts {
        class: &m.class,
        bases: class.map_or(&[], |c| &c.bases),
        params: &params,
        buffers: m.buffers.len(),
        attrs: &m.attrs,
        forward: class.and_then(|c| c.forward.as_deref()),
        leaf,
    };
    let kind = facts.kind();
    let mut attrs = m.attrs.clone();
    if let Some(word) = facts.activation() {
        attrs.insert("kind".into(), Scalar::Word(word));
    }
    if matches!(kind, ModuleKind::RmsNorm | ModuleKind::LayerNorm) {
        if let Some(eps) = epsilon(&m.attrs) {
            attrs.insert("eps".into(), Scalar::Float(eps));
        }
    }
    if let Some(a) = &m.activation {
        let child = if m.path.is_empty() {
            a.attr.clone()
        } else {
            format!("{}.{}", m.path, a.attr)
        };
        let word = a.word(attrs_of.get(child.as_str()).copied());
        attrs.insert(a.attr.clone(), Scalar::Word(word));
    }
    Module {
        path: m.path.clone(),
        class: m.class.clone(),
        kind: Some(kind),
        params,
        absent_params: m.absent_params.clone(),
        attrs,
        forward: class.and_then(|c| c.forward.clone()),
    }
}

impl Activation {
    /// The vocabulary's word, else the activation's own name. `child` is the module behind the attribute.
    fn word(&self, child: Option<(&str, &IndexMap<String, Scalar>)>) -> String {
        let named = self.value.as_deref().or(self.name.as_deref());
        let Some(name) = named else {
            // A module: its class, and its scalars where it is part of the tree.
            let (class, attrs) = match child {
                Some((class, attrs)) => (class, attrs.clone()),
                None => (self.class.as_str(), self.keywords.clone()),
            };
            let facts = Facts {
                class,
                bases: &[],
                params: &IndexMap::new(),
                buffers: 0,
                attrs: &attrs,
                forward: None,
                leaf: true,
            };
            return facts.activation().unwrap_or_else(|| class.into());
        };
        let tanh = Scalar::Word("tanh".into());
        match word(name) {
            Some("gelu_exact") if self.keywords.get("approximate") == Some(&tanh) => {
                "gelu_tanh".into()
            }
            Some(w) => w.into(),
            None => name.into(),
        }
    }
}

fn dtype_word(dtype: &str) -> &str {
    match dtype {
        "float32" => "f32",
        "float16" => "f16",
        "bfloat16" => "bf16",
        "float64" => "f64",
        "float8_e4m3fn" => "e4m3",
        "float8_e5m2" => "e5m2",
        "int8" => "i8",
        "uint8" => "u8",
        "int32" => "i32",
        "int64" => "i64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn trees() -> Vec<PathBuf> {
        // A group that the given directory leaves out is served by the repository's own copies.
        let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle/trees");
        let given = std::env::var_os("STRUCTURES_ORACLE").map(|d| PathBuf::from(d).join("trees"));
        let dir = given.filter(|d| d.is_dir()).unwrap_or(own);
        let dir = std::fs::read_dir(dir).unwrap();
        let mut files: Vec<PathBuf> = dir
            .map(|e| e.unwrap().path())
            .filter(|p| !p.to_string_lossy().contains("expected.json"))
            .collect();
        files.sort();
        files
    }

    #[test]
    fn every_dump_of_the_oracle_loads() {
        let files = trees();
        assert!(!files.is_empty());
        for f in files {
            // `parse` compares the parameter count.
            let tree = ModuleTree::from_dump_file(&f).unwrap();
            let mut plain = Vec::new();
            let packed = std::fs::read(&f).unwrap();
            let mut reader = flate2::read::GzDecoder::new(packed.as_slice());
            reader.read_to_end(&mut plain).unwrap();
            let again = ModuleTree::from_dump(&plain).unwrap();
            assert_eq!(again.modules().len(), tree.modules().len());
            let shapes: serde_json::Value = serde_json::from_slice(&plain).unwrap();
            let listed = shapes["modules"].as_array().unwrap().len();
            assert_eq!(
                tree.modules().len(),
                listed,
                "{}: nothing added or lost",
                f.display()
            );
            for m in tree.modules() {
                assert_eq!(tree.get(&m.path).unwrap().path, m.path);
                if let Some(p) = tree.parent(&m.path) {
                    assert!(tree.children(&p.path).any(|c| c.path == m.path));
                }
                let words = ["act_fn", "activation_fn", "act", "activation", "kind"];
                for w in words.iter().filter_map(|w| m.attrs.get(*w)) {
                    assert!(
                        matches!(w, Scalar::Word(_) | Scalar::Null),
                        "{}: {w:?}",
                        m.path
                    );
                }
            }
        }
    }

    #[test]
    fn kinds_and_activations_of_the_hand_made_tree() {
        let file = trees()
            .into_iter()
            .find(|p| p.to_string_lossy().contains("synthetic"));
        let tree = ModuleTree::from_dump_file(file.unwrap()).unwrap();
        let kind = |p: &str| tree.get(p).unwrap().kind.unwrap();
        assert_eq!(kind("glu.9.mlp.gate_proj"), ModuleKind::Linear);
        assert_eq!(kind("glu.10.mlp.down_proj"), ModuleKind::Other);
        assert_eq!(kind("glu.0.post_attention_layernorm"), ModuleKind::RmsNorm);
        assert_eq!(
            kind("vis.14.layer_norm2"),
            ModuleKind::LayerNorm,
            "a twin by its facts"
        );
        assert_eq!(kind("vis.15.layer_norm2"), ModuleKind::Other, "no epsilon");
        assert_eq!(kind("vis.19.norm2"), ModuleKind::LayerNorm, "a subclass");
        assert_eq!(kind("patch.1.proj"), ModuleKind::Conv3d);
        let act = |p: &str, a: &str| match tree.get(p).unwrap().attrs.get(a) {
            Some(Scalar::Word(w)) => w.clone(),
            other => panic!("{p}.{a}: {other:?}"),
        };
        assert_eq!(act("glu.0.mlp", "act_fn"), "silu");
        assert_eq!(act("glu.1.mlp", "act_fn"), "gelu_tanh");
        assert_eq!(act("glu.2.mlp", "act"), "gelu_exact");
        assert_eq!(act("glu.3.mlp", "activation"), "silu");
        assert_eq!(act("glu.8.mlp", "activation_fn"), "Mish");
        assert_eq!(act("vis.19.ffn.1", "kind"), "gelu_exact");
        // A second name leads to the module; the walk meets it once.
        assert_eq!(tree.get("tied_copy.mlp").unwrap().path, "glu.0.mlp");
        assert_eq!(tree.children("tied_copy.mlp").count(), 4);
        assert!(!tree
            .modules()
            .iter()
            .any(|m| m.path.starts_with("tied_copy")));
    }

    fn tiny(count: u64, extra: &str) -> String {
        format!(
            r#"{{"model": "t", "modules": [
                {{"path": "", "class": "M"}},
                {{"path": "a", "class": "Embedding", "params": {{"weight": [[3, 2], "bfloat16"]}}}},
                {{"path": "b", "class": "Linear", "params": {{"weight": [[3, 2], "bfloat16"]}},
                 "absent_params": ["bias"]}}{extra}],
                "tied_parameters": [["a.weight", "b.weight"]], "parameter_count": {count}}}"#
        )
    }

    #[test]
    fn ties_count_once() {
        let tree = ModuleTree::from_dump(tiny(6, "")).unwrap();
        assert_eq!(tree.parameter_count(), 6);
        let b = tree.get("b").unwrap();
        assert_eq!(b.params["weight"].dtype, "bf16");
        assert_eq!(b.absent_params, ["bias"]);
        assert!(ModuleTree::from_dump(tiny(12, "")).is_err());
    }

    #[test]
    fn broken_dumps_say_what_is_wrong() {
        let twice = tiny(6, r#", {"path": "a", "class": "X"}"#);
        let shape = tiny(6, r#", {"path": "c", "params": {"w": [[-1], "f32"]}}"#);
        let huge = tiny(
            6,
            r#", {"path": "c", "params": {"w": [[1099511627776, 1099511627776], "f32"]}}"#,
        );
        for (json, want) in [
            (huge.as_str(), "`c.w` the shape"),
            (twice.as_str(), "`a` is there twice"),
            (shape.as_str(), "module tree"),
            ("{}", "missing field"),
            ("", "EOF"),
            (
                r#"{"model": "t", "modules": [], "module_aliases": {"x": "y"}}"#,
                "`x` is no second",
            ),
        ] {
            let e = ModuleTree::from_dump(json).unwrap_err().to_string();
            assert!(e.contains(want), "`{e}` lacks `{want}`");
        }
        let e = ModuleTree::from_dump_file("no/such/file").unwrap_err();
        assert!(e.to_string().contains("no/such/file"), "{e}");
        let e = ModuleTree::from_dump_file("/dev/zero").unwrap_err();
        assert!(e.to_string().contains("regular file"), "{e}");
    }

    #[test]
    fn a_small_file_that_unpacks_into_a_large_one_is_refused_on_the_way() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("t.json.gz");
        let refused = || ModuleTree::from_dump_file(&file).unwrap_err().to_string();
        let out = std::fs::File::create(&file).unwrap();
        let mut gz = flate2::write::GzEncoder::new(out, flate2::Compression::fast());
        let blanks = vec![b' '; 1 << 20];
        (0..=MAX_BYTES >> 20).for_each(|_| gz.write_all(&blanks).unwrap());
        gz.finish().unwrap();
        let why = refused();
        assert!(why.contains("bytes of JSON"), "{why}");
        let rows = r#"{"modules":[{"path":"a"},{"path":"a"},"#;
        std::fs::write(&file, rows).unwrap();
        let why = refused();
        assert!(why.contains("`a` is there twice"), "{why}");
        let many: String = (0..=MAX_MODULES)
            .map(|i| format!("{{\"path\":\"{i}\"}},"))
            .collect();
        std::fs::write(&file, format!("{{\"modules\":[{many}")).unwrap();
        let why = refused();
        assert!(why.contains("more than 250000 modules"), "{why}");
        let lists = "[],".repeat(MAX_VALUES / 2 + 1);
        std::fs::write(&file, format!("{{\"x\":[{lists}")).unwrap();
        let why = refused();
        assert!(why.contains("values"), "{why}");
    }
}
