//! One YAML document with positions: values from `serde_yaml`, places from an event parser.
//!
//! A document is at most 1 MB of UTF-8 without a byte-order mark, has no anchors, aliases or tags, no duplicate keys
//! and no second document. A [`Node`] knows its path and its place, so every message can say file, line and column.

use std::collections::HashSet;
use std::io::Read;
use std::path::Path;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_yaml::Value;

use crate::error::{CatalogError, Place};

/// Largest document, bytes.
pub const MAX_BYTES: u64 = 1 << 20;
const MAX_DEPTH: usize = 64;

/// A parsed document.
#[derive(Debug)]
pub struct Document {
    file: String,
    text: String,
    root: Value,
    spots: Spot,
}

/// Where a value stands. The tree has the shape of the values: `below` is in the order of a list or a mapping.
#[derive(Debug, Default)]
struct Spot {
    at: (usize, usize),
    // The key it stands under, and where that is.
    key: Option<(String, (usize, usize))>,
    // An unquoted word that other readers of YAML take for true or false.
    switch: bool,
    below: Vec<Spot>,
}

/// Words that are true or false to readers of YAML 1.1 and text to those of 1.2.
const SWITCHES: [&str; 4] = ["yes", "no", "on", "off"];

fn is_switch(word: &str) -> bool {
    SWITCHES.iter().any(|w| word.eq_ignore_ascii_case(w))
}

/// The text of a file, if it is small enough and UTF-8.
pub fn read(path: &Path) -> Result<String, CatalogError> {
    let io = |reason: String| CatalogError::Io {
        path: path.display().to_string(),
        reason,
    };
    let invalid = |line: usize, column: usize, what: String| CatalogError::Invalid {
        at: Place {
            file: path.display().to_string(),
            line,
            column,
        },
        path: "document".into(),
        what,
    };
    // Before it is opened: opening a pipe waits for somebody to write to it.
    let before = std::fs::metadata(path).map_err(|e| io(e.to_string()))?;
    if !before.is_file() {
        return Err(io("expected a regular file".into()));
    }
    let file = std::fs::File::open(path).map_err(|e| io(e.to_string()))?;
    let about = file.metadata().map_err(|e| io(e.to_string()))?;
    if !about.is_file() {
        return Err(io("expected a regular file".into()));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| io(e.to_string()))?;
    let size = about.len().max(bytes.len() as u64);
    if size > MAX_BYTES {
        let what = format!("{size} bytes, expected at most {MAX_BYTES}");
        return Err(invalid(1, 1, what));
    }
    String::from_utf8(bytes).map_err(|e| {
        let good = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = good.iter().filter(|b| **b == b'\n').count() + 1;
        let last = good.rsplit(|b| *b == b'\n').next().unwrap_or_default();
        let column = String::from_utf8_lossy(last).chars().count() + 1;
        let found = e.as_bytes().get(good.len()).copied().unwrap_or_default();
        let what = format!("expected UTF-8, found the byte 0x{found:02x}");
        invalid(line, column, what)
    })
}

impl Document {
    /// Parses one document.
    pub fn parse(file: &str, text: &str) -> Result<Document, CatalogError> {
        let mut doc = Document {
            file: file.into(),
            text: text.into(),
            root: Value::Null,
            spots: Spot {
                at: (1, 1),
                ..Spot::default()
            },
        };
        if text.len() as u64 > MAX_BYTES {
            let what = format!("{} bytes, expected at most {MAX_BYTES}", text.len());
            return Err(doc.fail((1, 1), "document", what));
        }
        if text.starts_with('\u{feff}') {
            let what = "expected text, found a byte-order mark; save the file without it";
            return Err(doc.fail((1, 1), "document", what.into()));
        }
        if let Some(tab) = text.find('\t') {
            let line = text[..tab].rfind('\n').map_or(0, |n| n + 1);
            let row = text[..tab].matches('\n').count() + 1;
            let column = text[line..tab].chars().count() + 1;
            let what = "expected spaces, found a tab; readers of YAML disagree about its width";
            return Err(doc.fail((row, column), "document", what.into()));
        }
        if let Some(spots) = doc.index(text)? {
            doc.spots = spots;
        }
        doc.root = serde_yaml::from_str(text).map_err(|e| {
            let at = e.location().map_or((1, 1), |l| (l.line(), l.column()));
            doc.fail(at, "document", e.to_string())
        })?;
        Ok(doc)
    }

    /// Its file, for messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The bytes it was parsed from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The outermost value.
    pub fn root(&self) -> Node<'_> {
        Node {
            doc: self,
            value: &self.root,
            spot: &self.spots,
        }
    }

    fn place(&self, (line, column): (usize, usize)) -> Place {
        Place {
            file: self.file.clone(),
            line,
            column,
        }
    }

    fn fail(&self, at: (usize, usize), path: &str, what: String) -> CatalogError {
        CatalogError::Invalid {
            at: self.place(at),
            path: path.into(),
            what,
        }
    }

    // Where every value stands; `None` for an empty document.
    fn index(&self, text: &str) -> Result<Option<Spot>, CatalogError> {
        let mut stack: Vec<Frame> = Vec::new();
        let mut root = None;
        let mut documents = 0;
        for event in Parser::new_from_str(text) {
            let (event, span) = event.map_err(|e| {
                let at = (e.marker().line(), e.marker().col() + 1);
                self.fail(at, "document", e.info().to_string())
            })?;
            let at = (span.start.line(), span.start.col() + 1);
            let refuse = |what: &str| Err(self.fail(at, &shown(&stack), what.into()));
            let done = match event {
                Event::DocumentStart(_) => {
                    documents += 1;
                    if documents > 1 {
                        return Err(self.fail(at, "document", "a second document begins".into()));
                    }
                    continue;
                }
                Event::Alias(_) => return refuse("aliases are not allowed"),
                Event::Scalar(_, _, anchor, ref tag)
                | Event::SequenceStart(anchor, ref tag)
                | Event::MappingStart(anchor, ref tag)
                    if anchor != 0 || tag.is_some() =>
                {
                    return refuse("anchors and tags are not allowed");
                }
                Event::Scalar(text, style, ..) => {
                    let switch = style == ScalarStyle::Plain && is_switch(&text);
                    match stack.last_mut().filter(|f| f.wants_key()) {
                        Some(frame) => {
                            frame.key = Some((text.to_string(), at));
                            if !frame.seen.insert(text.to_string()) {
                                let what = "this key stands here twice".to_string();
                                return Err(self.fail(at, &shown(&stack), what));
                            }
                            if switch {
                                let what = format!(
                                    "`{text}` as a key is true or false to other readers; quote it"
                                );
                                return Err(self.fail(at, &shown(&stack), what));
                            }
                            continue;
                        }
                        None => {
                            // An empty value has no extent; its key is a better place.
                            let empty =
                                text == "~" && style == ScalarStyle::Plain && span.is_empty();
                            let key = stack.last().and_then(|f| f.key.as_ref());
                            Spot {
                                at: key.filter(|_| empty).map_or(at, |(_, at)| *at),
                                switch,
                                ..Spot::default()
                            }
                        }
                    }
                }
                Event::SequenceStart(..) | Event::MappingStart(..) => {
                    if stack.last().is_some_and(Frame::wants_key) {
                        return refuse("a key must be a plain word");
                    }
                    if stack.len() >= MAX_DEPTH {
                        return refuse(&format!("nested deeper than {MAX_DEPTH} levels"));
                    }
                    stack.push(Frame {
                        map: matches!(event, Event::MappingStart(..)),
                        at,
                        key: None,
                        seen: HashSet::new(),
                        below: Vec::new(),
                    });
                    continue;
                }
                Event::SequenceEnd | Event::MappingEnd => match stack.pop() {
                    Some(frame) => Spot {
                        at: frame.at,
                        below: frame.below,
                        ..Spot::default()
                    },
                    None => continue,
                },
                _ => continue,
            };
            match stack.last_mut() {
                Some(frame) => {
                    let key = frame.key.take();
                    frame.below.push(Spot { key, ..done });
                }
                None => root = Some(done),
            }
        }
        Ok(root)
    }
}

// A list or mapping that is not at its end yet.
#[derive(Debug)]
struct Frame {
    map: bool,
    at: (usize, usize),
    key: Option<(String, (usize, usize))>,
    seen: HashSet<String>,
    below: Vec<Spot>,
}

impl Frame {
    fn wants_key(&self) -> bool {
        self.map && self.key.is_none()
    }
}

// `a.b[2].c`, of what is being read.
fn shown(stack: &[Frame]) -> String {
    let mut path = String::new();
    for frame in stack {
        match (&frame.key, frame.map) {
            (Some((key, _)), _) => step(&mut path, key),
            (None, true) => {}
            (None, false) => step_index(&mut path, frame.below.len()),
        }
    }
    or_document(path)
}

fn step(path: &mut String, key: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(key);
}

fn step_index(path: &mut String, index: usize) {
    path.push_str(&format!("[{index}]"));
}

fn or_document(path: String) -> String {
    match path.is_empty() {
        true => "document".into(),
        false => path,
    }
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub struct Node<'a> {
    doc: &'a Document,
    value: &'a Value,
    spot: &'a Spot,
}

impl<'a> Node<'a> {
    /// The raw value.
    pub fn value(&self) -> &'a Value {
        self.value
    }

    /// Its path, for messages.
    pub fn path(&self) -> String {
        // Looked up when a message needs it, so that reading a document builds none.
        fn find(at: &Spot, wanted: &Spot, path: &mut String) -> bool {
            if std::ptr::eq(at, wanted) {
                return true;
            }
            for (i, below) in at.below.iter().enumerate() {
                let before = path.len();
                match &below.key {
                    Some((key, _)) => step(path, key),
                    None => step_index(path, i),
                }
                if find(below, wanted, path) {
                    return true;
                }
                path.truncate(before);
            }
            false
        }
        let mut path = String::new();
        find(&self.doc.spots, self.spot, &mut path);
        or_document(path)
    }

    /// Its place.
    pub fn place(&self) -> Place {
        self.doc.place(self.spot.at)
    }

    /// An error about this value.
    pub fn invalid(&self, what: impl Into<String>) -> CatalogError {
        CatalogError::Invalid {
            at: self.place(),
            path: self.path(),
            what: what.into(),
        }
    }

    /// An error about a key of this mapping.
    pub fn invalid_key(&self, key: &str, what: impl Into<String>) -> CatalogError {
        let mut path = self.path();
        if path == "document" {
            path.clear();
        }
        step(&mut path, key);
        CatalogError::Invalid {
            at: self.key_place(key),
            path,
            what: what.into(),
        }
    }

    fn wrong(&self, expected: &str) -> CatalogError {
        self.invalid(format!("expected {expected}, found {}", kind(self.value)))
    }

    // A value below, by its position. The two trees have one shape.
    fn child(&self, at: usize, value: &'a Value) -> Node<'a> {
        Node {
            doc: self.doc,
            value,
            spot: self.spot.below.get(at).unwrap_or(self.spot),
        }
    }

    /// The place of a key of this mapping.
    pub fn key_place(&self, key: &str) -> Place {
        let keys = self.spot.below.iter().filter_map(|s| s.key.as_ref());
        let at = keys.into_iter().find(|(k, _)| k == key).map(|(_, at)| *at);
        self.doc.place(at.unwrap_or(self.spot.at))
    }

    /// Keys and values in order.
    pub fn entries(&self) -> Result<Vec<(String, Node<'a>)>, CatalogError> {
        let map = self
            .value
            .as_mapping()
            .ok_or_else(|| self.wrong("a mapping"))?;
        map.iter()
            .enumerate()
            .map(|(i, (k, v))| match k {
                Value::String(k) => Ok((k.clone(), self.child(i, v))),
                other => Err(self.invalid(format!(
                    "a key must be a word, found {}; quote it",
                    kind(other)
                ))),
            })
            .collect()
    }

    /// The mapping with only these keys.
    pub fn fields(&self, allowed: &[&str]) -> Result<Fields<'a>, CatalogError> {
        let entries = self.entries()?;
        for (k, _) in &entries {
            if !allowed.contains(&k.as_str()) {
                let what = format!("unknown key `{k}`, expected one of {}", allowed.join(", "));
                return Err(self.invalid_key(k, what));
            }
        }
        Ok(Fields {
            node: self.clone(),
            entries,
        })
    }

    /// The value below a path, or the innermost one that exists.
    pub fn find(&self, path: &[&str]) -> Node<'a> {
        let mut at = self.clone();
        for part in path {
            let index = part.strip_prefix('[').and_then(|p| p.strip_suffix(']'));
            let found = match index.and_then(|i| i.parse::<usize>().ok()) {
                Some(i) => at.value.get(i).map(|v| (i, v)),
                None => at.value.as_mapping().and_then(|map| {
                    let mut all = map.iter().enumerate();
                    all.find(|(_, (k, _))| k.as_str() == Some(part))
                        .map(|(i, (_, v))| (i, v))
                }),
            };
            match found {
                Some((i, v)) => at = at.child(i, v),
                None => break,
            }
        }
        at
    }

    /// Elements of a list.
    pub fn items(&self) -> Result<Vec<Node<'a>>, CatalogError> {
        let list = self
            .value
            .as_sequence()
            .ok_or_else(|| self.wrong("a list"))?;
        let items = list.iter().enumerate();
        Ok(items.map(|(i, v)| self.child(i, v)).collect())
    }

    /// A word. `no` and its like need quotes: other readers of YAML take them for a truth value.
    pub fn text(&self) -> Result<&'a str, CatalogError> {
        let word = self.value.as_str().ok_or_else(|| self.wrong("a word"))?;
        if self.spot.switch {
            let what = format!("expected a word, found `{word}`, which is true or false to other readers; quote it");
            return Err(self.invalid(what));
        }
        Ok(word)
    }

    /// A list of words; a single word is a list of one.
    pub fn texts(&self) -> Result<Vec<String>, CatalogError> {
        match self.value {
            Value::String(_) => Ok(vec![self.text()?.to_string()]),
            _ => self
                .items()?
                .iter()
                .map(|n| n.text().map(str::to_string))
                .collect(),
        }
    }

    /// A list of words, each once.
    pub fn names(&self) -> Result<Vec<String>, CatalogError> {
        let mut seen = Vec::new();
        for n in self.items()? {
            let name = n.text()?.to_string();
            if seen.contains(&name) {
                return Err(n.invalid(format!("`{name}` stands here twice")));
            }
            seen.push(name);
        }
        Ok(seen)
    }

    /// A whole number that is not negative.
    pub fn count(&self) -> Result<u64, CatalogError> {
        self.value
            .as_u64()
            .ok_or_else(|| self.wrong("a whole number"))
    }

    /// A whole number.
    pub fn int(&self) -> Result<i64, CatalogError> {
        self.value
            .as_i64()
            .ok_or_else(|| self.wrong("a whole number"))
    }

    /// true or false.
    pub fn flag(&self) -> Result<bool, CatalogError> {
        self.value
            .as_bool()
            .ok_or_else(|| self.wrong("true or false"))
    }
}

/// A mapping whose keys are known.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    node: Node<'a>,
    entries: Vec<(String, Node<'a>)>,
}

impl<'a> Fields<'a> {
    /// The value below a path, or the innermost one that exists.
    pub fn find(&self, path: &[&str]) -> Node<'a> {
        self.node.find(path)
    }

    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Node<'a>> {
        self.entries.iter().find(|(k, _)| k == key).map(|(_, n)| n)
    }

    /// The value under a key that must be there.
    pub fn need(&self, key: &str) -> Result<&Node<'a>, CatalogError> {
        self.get(key)
            .ok_or_else(|| self.node.invalid(format!("`{key}` is missing")))
    }

    /// The word under a key, with its node.
    pub fn word(&self, key: &str) -> Result<Option<(&Node<'a>, &'a str)>, CatalogError> {
        self.get(key).map(|n| Ok((n, n.text()?))).transpose()
    }

    /// A flag, false when not there.
    pub fn flag(&self, key: &str) -> Result<bool, CatalogError> {
        self.get(key).map_or(Ok(false), Node::flag)
    }
}

fn kind(v: &Value) -> String {
    match v {
        Value::Null => "nothing".into(),
        Value::Bool(b) => format!("`{b}`"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) => format!("`{s}`"),
        Value::Sequence(_) => "a list".into(),
        Value::Mapping(_) => "a mapping".into(),
        Value::Tagged(_) => "a tag".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> String {
        match Document::parse("f.yaml", text) {
            Ok(_) => "ok".into(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn places_are_those_of_an_editor() {
        let d =
            Document::parse("f.yaml", "a: 1\nb:\n  - {c: x, d: [1, q]}\n  -\ne:\n").expect("ok");
        let f = d.root().fields(&["a", "b", "e"]).expect("map");
        let at = |n: &Node| (n.place().line, n.place().column);
        assert_eq!(at(f.need("a").expect("a")), (1, 4));
        let b = f.need("b").expect("b").items().expect("list");
        let item = b[0].fields(&["c", "d"]).expect("map");
        assert_eq!(at(item.need("c").expect("c")), (3, 9));
        let d = item.need("d").expect("d").items().expect("list");
        assert_eq!((at(&d[1]), d[1].path()), ((3, 19), "b[0].d[1]".into()));
        assert_eq!(at(f.need("e").expect("e")), (5, 1));
    }

    #[test]
    fn what_is_not_one_plain_document_is_refused() {
        for (bad, says) in [
            (
                "a: 1\nb: 2\na: 3\n",
                "f.yaml:3:1: a: this key stands here twice",
            ),
            ("a: &x 1\n", "anchors and tags"),
            ("a: &x [1]\n", "anchors and tags"),
            ("a: *x\n", "f.yaml:1:4"),
            ("a: !!int 1\n", "anchors and tags"),
            ("a: 1\n---\nb: 2\n", "a second document"),
            ("a: [1, 2\nb: 3\n", "f.yaml:2:"),
            ("? [a]\n: 1\n", "a key must be a plain word"),
        ] {
            assert!(message(bad).contains(says), "{bad}: {}", message(bad));
        }
        let deep = format!("a: {}{}\n", "[".repeat(100), "]".repeat(100));
        assert!(
            message(&deep).contains("nested deeper"),
            "{}",
            message(&deep)
        );
        let long = format!("a: {}\n", "x".repeat(MAX_BYTES as usize));
        assert!(message(&long).contains("at most"));
    }

    #[test]
    fn words_that_other_readers_take_for_truth_values_need_quotes() {
        let d =
            Document::parse("f.yaml", "a: no\nb: 'no'\nc: [Off, \"on\"]\nd: none\n").expect("ok");
        let f = d.root().fields(&["a", "b", "c", "d"]).expect("map");
        let say = |n: &Node| match n.text() {
            Ok(t) => t.to_string(),
            Err(e) => e.to_string(),
        };
        let says = say(f.need("a").expect("a"));
        assert!(
            says.starts_with("f.yaml:1:4: a: expected a word, found `no`"),
            "{says}"
        );
        assert_eq!(say(f.need("b").expect("b")), "no");
        let c = f.need("c").expect("c").items().expect("list");
        assert!(say(&c[0]).starts_with("f.yaml:3:5: c[0]"), "{}", say(&c[0]));
        assert_eq!(
            (say(&c[1]), say(f.need("d").expect("d"))),
            ("on".into(), "none".into())
        );
    }

    #[test]
    fn files_that_are_no_text_are_refused_at_a_place() {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("f.yaml");
        let says = |bytes: &[u8]| {
            std::fs::write(&file, bytes).expect("written");
            let parsed = read(&file).and_then(|t| Document::parse("f.yaml", &t));
            parsed.expect_err("refused").to_string()
        };
        let latin = says(b"a: 1\nb: \xc3\xa4\xe4\n");
        assert!(
            latin.contains("f.yaml:2:5: document: expected UTF-8, found the byte 0xe4"),
            "{latin}"
        );
        let large = says(&vec![b'x'; MAX_BYTES as usize + 1]);
        assert!(
            large.contains("f.yaml:1:1: document: 1048577 bytes"),
            "{large}"
        );
        let marked = says("\u{feff}a: 1\n".as_bytes());
        assert!(
            marked.contains("f.yaml:1:1: document: expected text, found a byte-order mark"),
            "{marked}"
        );
        let tab = says(b"a:\n\tb: 1\n");
        assert!(tab.contains("f.yaml:2:"), "{tab}");
        assert!(read(dir.path()).is_err());
    }

    #[test]
    fn messages_name_expected_and_found() {
        let d = Document::parse("f.yaml", "a: 1\nbb: x\n3: y\n").expect("ok");
        let e = d.root().fields(&["a", "b"]).expect_err("key");
        assert!(
            e.to_string()
                .contains("a key must be a word, found the number 3"),
            "{e}"
        );
        let d = Document::parse("f.yaml", "a: 1\nbb: x\n").expect("ok");
        let e = d.root().fields(&["a", "b"]).expect_err("key");
        assert_eq!(
            e.to_string(),
            "f.yaml:2:1: bb: unknown key `bb`, expected one of a, b"
        );
        let f = d.root().fields(&["a", "bb"]).expect("map");
        let e = f.need("a").expect("a").text().expect_err("word");
        assert_eq!(
            e.to_string(),
            "f.yaml:1:4: a: expected a word, found the number 1"
        );
        let e = f.need("c").expect_err("c");
        assert_eq!(e.to_string(), "f.yaml:1:1: document: `c` is missing");
    }
}
