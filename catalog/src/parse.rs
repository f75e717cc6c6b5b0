//! From a document to a [`Spec`]: the header here, `slots` and `dataflow` in modules of their own.
//!
//! Parsing is strict (unknown keys fail) and purely local; what needs more than one part of the document is
//! checked in `validate`.

use std::collections::BTreeMap;
use std::sync::Arc;

use indexmap::IndexMap;
use sha2::{Digest, Sha256};

use crate::document::{Document, Fields, Node};
use crate::error::CatalogError;
use crate::expr::Expr;
use crate::names;
use crate::spec::{Axis, Constraint, Dataflow, Gates, Kind, Qualification, SchemeUse, Spec};

mod boundary;
mod dataflow;
mod pipeline;
mod slots;

// Words that would make an entry choose hardware or kernels, with their plurals.
const FORBIDDEN: &[&str] = &[
    "arch",
    "archs",
    "architecture",
    "architectures",
    "backend",
    "backends",
    "device",
    "devices",
    "hardware",
    "kernel",
    "kernels",
    "benchmark",
    "benchmarks",
    "benchmark_at_runtime",
    "runtime_benchmark",
];

// Keys of every entry.
const KEYS: &[&str] = &[
    "name",
    "version",
    "kind",
    "summary",
    "tags",
    "gates",
    "qualification",
    "evidence",
];

// Keys of a region that a pipeline does not have.
const REGION_KEYS: &[&str] = &[
    "precedence",
    "scheme",
    "boundary",
    "weights",
    "symbols",
    "constraints",
    "variants",
    "points",
    "content",
    "slots",
    "dataflow",
];

/// The entry that a document is.
pub(crate) fn spec(doc: &Document) -> Result<Spec, CatalogError> {
    let root = doc.root();
    forbidden(&root)?;
    let f = root.fields(&[KEYS, REGION_KEYS, pipeline::KEYS].concat())?;
    let kind = match f.word("kind")? {
        None | Some((_, "region")) => Kind::Region,
        Some((_, "stage_pipeline")) => Kind::StagePipeline,
        Some((n, other)) => {
            return Err(n.invalid(format!(
                "expected region or stage_pipeline, found `{other}`"
            )))
        }
    };
    let (foreign, what) = match kind {
        Kind::Region => (pipeline::KEYS, "a region"),
        Kind::StagePipeline => (REGION_KEYS, "a stage pipeline"),
    };
    if let Some(key) = foreign.iter().find(|k| f.get(k).is_some()) {
        return Err(root.invalid_key(key, format!("{what} has no `{key}`")));
    }
    let mut spec = header(&f, doc, kind)?;
    match kind {
        Kind::Region => {
            region(&root, &f, &mut spec)?;
            crate::validate::check(&spec, &f)?;
        }
        Kind::StagePipeline => {
            if !spec.qualification.min_elements.is_empty() {
                let at = root.find(&["qualification", "min_elements"]);
                return Err(at.invalid("a stage pipeline has no slots"));
            }
            spec.pipeline = Some(pipeline::pipeline(&f)?);
        }
    }
    Ok(spec)
}

// What every entry has; the rest is empty.
fn header(f: &Fields, doc: &Document, kind: Kind) -> Result<Spec, CatalogError> {
    let name = f.need("name")?;
    if !names::is_name(name.text()?) {
        return Err(name.invalid("a name is small letters, digits and `_`, a letter first"));
    }
    let version = f.need("version")?;
    let number = u32::try_from(version.count()?).unwrap_or(0);
    if number == 0 {
        return Err(version.invalid("a version is a whole number from 1"));
    }
    Ok(Spec {
        name: name.text()?.to_string(),
        version: number,
        kind,
        digest: digest(doc.text()),
        document: Arc::from(doc.text()),
        file: doc.file().into(),
        builtin: false,
        tags: f.get("tags").map_or(Ok(Vec::new()), Node::names)?,
        precedence: 0,
        scheme: SchemeUse::Consulted,
        summary: f.get("summary").map_or(Ok(""), Node::text)?.trim().into(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        symbols: IndexMap::new(),
        constraints: Vec::new(),
        variants: IndexMap::new(),
        points: Vec::new(),
        content: Vec::new(),
        gates: gates(f.need("gates")?)?,
        qualification: f
            .get("qualification")
            .map_or(Ok(Qualification::default()), qualification)?,
        slots: None,
        weights: Vec::new(),
        dataflow: Dataflow {
            spans: Vec::new(),
            ops: Vec::new(),
        },
        pipeline: None,
        evidence: f.get("evidence").map_or(Ok(Vec::new()), Node::texts)?,
        reference: None,
    })
}

fn region(root: &Node, f: &Fields, spec: &mut Spec) -> Result<(), CatalogError> {
    let boundary = f.need("boundary")?.fields(&["inputs", "outputs"])?;
    spec.inputs = boundary::ports(boundary.need("inputs")?)?;
    spec.outputs = boundary::ports(boundary.need("outputs")?)?;
    if spec.inputs.is_empty() || spec.outputs.is_empty() {
        return Err(f
            .need("boundary")?
            .invalid("a region needs an input and an output"));
    }
    spec.weights = boundary::weights(f.need("weights")?)?;
    if let Some(n) = f.get("precedence") {
        spec.precedence = i32::try_from(n.int()?).map_err(|_| n.invalid("out of range"))?;
    }
    if let Some(n) = f.get("scheme") {
        spec.scheme = match n.text()? {
            "consulted" => SchemeUse::Consulted,
            "ignored" => SchemeUse::Ignored,
            other => {
                return Err(n.invalid(format!("expected consulted or ignored, found `{other}`")))
            }
        };
    }
    spec.symbols = f.get("symbols").map_or(Ok(IndexMap::new()), symbols)?;
    if let Some(n) = f.get("constraints") {
        spec.constraints = n
            .items()?
            .iter()
            .map(constraint)
            .collect::<Result<_, _>>()?;
    }
    spec.variants = f.get("variants").map_or(Ok(IndexMap::new()), variants)?;
    spec.points = f.get("points").map_or(Ok(Vec::new()), Node::names)?;
    spec.content = f.get("content").map_or(Ok(Vec::new()), Node::names)?;
    spec.slots = slots::slots(f.need("slots")?, &spec.weights)?;
    spec.dataflow = match f.get("dataflow") {
        Some(n) => dataflow::dataflow(n)?,
        None => {
            return Err(root.invalid("`dataflow` is missing: an entry without it has no reference"))
        }
    };
    Ok(())
}

/// Hex sha256 of the bytes of a document.
pub(crate) fn digest(text: &str) -> String {
    let hash = Sha256::digest(text.as_bytes());
    hash.iter().map(|b| format!("{b:02x}")).collect()
}

/// Whether a key would make a document choose hardware or kernels (B-013).
pub fn selects_hardware(key: &str) -> bool {
    let word = key.to_ascii_lowercase().replace(['-', ' '], "_");
    FORBIDDEN.contains(&word.as_str())
}

fn forbidden(node: &Node) -> Result<(), CatalogError> {
    if node.value().is_mapping() {
        for (key, value) in node.entries()? {
            if selects_hardware(&key) {
                return Err(CatalogError::KeyForbidden {
                    at: node.key_place(&key),
                    key,
                });
            }
            forbidden(&value)?;
        }
    } else if node.value().is_sequence() {
        for item in node.items()? {
            forbidden(&item)?;
        }
    }
    Ok(())
}

fn variants(node: &Node) -> Result<IndexMap<String, Axis>, CatalogError> {
    let mut axes = IndexMap::new();
    for (name, n) in node.entries()? {
        if !names::is_name(&name) {
            return Err(n.invalid(format!("`{name}` is no axis name")));
        }
        let f = n.fields(&["host", "values", "default"])?;
        let list = f.need("values")?;
        let values: IndexMap<String, String> = if list.value().is_sequence() {
            list.names()?.into_iter().map(|v| (v.clone(), v)).collect()
        } else {
            list.entries()?
                .into_iter()
                .map(|(k, v)| Ok((k, v.text()?.to_string())))
                .collect::<Result<_, CatalogError>>()?
        };
        if values.is_empty() {
            return Err(list.invalid("an axis needs a value"));
        }
        let default = match f.get("default") {
            None => None,
            Some(d) if values.contains_key(d.text()?) => Some(d.text()?.to_string()),
            Some(d) => return Err(d.invalid("the default is not among the values")),
        };
        let host = f.need("host")?.flag()?;
        if !host && default.is_none() {
            return Err(n.invalid("a form axis needs a `default`: discovery reports it"));
        }
        axes.insert(
            name,
            Axis {
                host,
                values,
                default,
            },
        );
    }
    Ok(axes)
}

fn gates(node: &Node) -> Result<Gates, CatalogError> {
    let mut gates = Gates::default();
    for (key, n) in node.entries()? {
        match key.as_str() {
            "parity" => gates.parity = n.names()?,
            "baselines" => gates.baselines = n.names()?,
            _ => {
                let value = serde_json::to_value(n.value())
                    .map_err(|e| n.invalid(format!("not plain data: {e}")))?;
                gates.other.insert(key, value);
            }
        }
    }
    if gates.parity.is_empty() {
        return Err(node.invalid("`parity` needs a metric: no gate, no structure"));
    }
    Ok(gates)
}

fn qualification(node: &Node) -> Result<Qualification, CatalogError> {
    let f = node.fields(&["min_elements", "notes"])?;
    let min_elements = match f.get("min_elements") {
        None => Vec::new(),
        Some(n) => n
            .entries()?
            .into_iter()
            .map(|(slot, n)| Ok((slot, n.count()?)))
            .collect::<Result<_, CatalogError>>()?,
    };
    Ok(Qualification {
        min_elements,
        notes: f.get("notes").map_or(Ok(Vec::new()), Node::texts)?,
    })
}

// Symbol -> param.
fn symbols(node: &Node) -> Result<IndexMap<String, String>, CatalogError> {
    let mut symbols: IndexMap<String, String> = IndexMap::new();
    for (symbol, n) in node.entries()? {
        let param = n.text()?;
        for word in [symbol.as_str(), param] {
            if !names::is_symbol(word) || word.contains('<') {
                return Err(n.invalid(format!("`{word}` is no name of a symbol or a param")));
            }
        }
        if symbols.values().any(|p| p == param) {
            return Err(n.invalid(format!("param `{param}` is already a symbol's size")));
        }
        symbols.insert(symbol, param.into());
    }
    Ok(symbols)
}

fn constraint(node: &Node) -> Result<Constraint, CatalogError> {
    let f = node.fields(&["that", "when", "else"])?;
    let code = f.need("else")?;
    if !names::is_name(code.text()?) {
        return Err(code.invalid("a code is small letters, digits and `_`"));
    }
    Ok(Constraint {
        that: expr(f.need("that")?)?,
        when: f.get("when").map_or(Ok(BTreeMap::new()), when)?,
        code: code.text()?.into(),
    })
}

// Axis -> its values.
fn when(node: &Node) -> Result<BTreeMap<String, Vec<String>>, CatalogError> {
    let mut when = BTreeMap::new();
    for (axis, n) in node.entries()? {
        let values = n.texts()?;
        if values.is_empty() {
            return Err(n.invalid("expected a value"));
        }
        when.insert(axis, values);
    }
    Ok(when)
}

fn expr(n: &Node) -> Result<Expr, CatalogError> {
    if let Some(i) = n.value().as_i64() {
        return Ok(Expr::Int(i));
    }
    parsed(n, n.text()?)
}

// An expression that stands in a node's text, or in a part of it.
fn parsed(n: &Node, text: &str) -> Result<Expr, CatalogError> {
    let e = Expr::parse(text).map_err(|e| n.invalid(e.to_string()))?;
    match e.zero_divisor() {
        Some(part) => Err(n.invalid(format!("`{part}` divides by zero"))),
        None => Ok(e),
    }
}
