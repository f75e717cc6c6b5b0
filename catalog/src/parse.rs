//! From a document to a [`Spec`]: the header here, `slots` and `dataflow` in modules of their own.
//!
//! Parsing is strict (unknown keys fail) and purely local; what needs more than one part of the document is
//! checked in `validate`.

use std::sync::Arc;

use indexmap::IndexMap;
use sha2::{Digest, Sha256};
use structures_graph::Layout;

use crate::document::{Document, Node};
use crate::error::CatalogError;
use crate::expr::{BinaryOp, Expr};
use crate::names;
use crate::spec::{Axis, DimExpr, Gates, Kind, Port, Qualification, SchemeUse, Slot, Spec};

mod dataflow;
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

const KEYS: &[&str] = &[
    "name",
    "version",
    "kind",
    "summary",
    "tags",
    "precedence",
    "scheme",
    "boundary",
    "weights",
    "variants",
    "points",
    "gates",
    "qualification",
    "slots",
    "dataflow",
    "evidence",
];

/// Parses one entry document.
pub(crate) fn spec(file: &str, text: &str) -> Result<Spec, CatalogError> {
    let doc = Document::parse(file, text)?;
    let root = doc.root();
    forbidden(&root)?;
    let f = root.fields(KEYS)?;
    let kind = match f.word("kind")? {
        None | Some((_, "region")) => Kind::Region,
        Some((n, "stage_pipeline")) => {
            return Err(n.invalid("stage pipelines are not loaded by this version"))
        }
        Some((n, other)) => return Err(n.invalid(format!("unknown kind `{other}`"))),
    };
    let name = f.need("name")?;
    if !names::is_name(name.text()?) {
        return Err(name.invalid("a name is small letters, digits and `_`, a letter first"));
    }
    let version = f.need("version")?;
    let number = u32::try_from(version.count()?).unwrap_or(0);
    if number == 0 {
        return Err(version.invalid("a version is a whole number from 1"));
    }
    let boundary = f.need("boundary")?.fields(&["inputs", "outputs"])?;
    let inputs = ports(boundary.need("inputs")?)?;
    let outputs = ports(boundary.need("outputs")?)?;
    if inputs.is_empty() || outputs.is_empty() {
        return Err(f
            .need("boundary")?
            .invalid("a region needs an input and an output"));
    }
    let gates = gates(f.need("gates")?)?;
    let weights = weights(f.need("weights")?)?;
    let precedence = match f.get("precedence") {
        Some(n) => i32::try_from(n.int()?).map_err(|_| n.invalid("out of range"))?,
        None => 0,
    };
    let scheme = match f.get("scheme") {
        Some(n) => match n.text()? {
            "consulted" => SchemeUse::Consulted,
            "ignored" => SchemeUse::Ignored,
            other => {
                return Err(n.invalid(format!("expected consulted or ignored, found `{other}`")))
            }
        },
        None => SchemeUse::Consulted,
    };
    let spec = Spec {
        name: name.text()?.to_string(),
        version: number,
        kind,
        digest: digest(text),
        document: Arc::from(text),
        tags: f.get("tags").map_or(Ok(Vec::new()), Node::names)?,
        precedence,
        scheme,
        summary: f.get("summary").map_or(Ok(""), Node::text)?.trim().into(),
        inputs,
        outputs,
        variants: f.get("variants").map_or(Ok(IndexMap::new()), variants)?,
        points: f.get("points").map_or(Ok(Vec::new()), Node::names)?,
        gates,
        qualification: f
            .get("qualification")
            .map_or(Ok(Qualification::default()), qualification)?,
        slots: slots::slots(f.need("slots")?, &weights)?,
        weights,
        dataflow: match f.get("dataflow") {
            Some(n) => dataflow::dataflow(n)?,
            None => {
                return Err(
                    root.invalid("`dataflow` is missing: an entry without it has no reference")
                )
            }
        },
        evidence: f.get("evidence").map_or(Ok(Vec::new()), Node::texts)?,
        reference: None,
    };
    crate::validate::check(&spec, &f)?;
    Ok(spec)
}

/// Hex sha256 of the bytes of a document.
pub(crate) fn digest(text: &str) -> String {
    let hash = Sha256::digest(text.as_bytes());
    hash.iter().map(|b| format!("{b:02x}")).collect()
}

fn forbidden(node: &Node) -> Result<(), CatalogError> {
    if node.value().is_mapping() {
        for (key, value) in node.entries()? {
            let word = key.to_ascii_lowercase().replace(['-', ' '], "_");
            if FORBIDDEN.contains(&word.as_str()) {
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

fn ports(node: &Node) -> Result<Vec<Port>, CatalogError> {
    let mut ports: Vec<Port> = Vec::new();
    for n in node.items()? {
        let f = n.fields(&["name", "value", "dims", "dtype", "optional", "for"])?;
        let name = f.need("name")?;
        let repeat = repeat(f.get("for"), name)?;
        let port = Port {
            name: name.text()?.into(),
            value: f.get("value").unwrap_or(name).text()?.into(),
            dims: dims(f.need("dims")?)?,
            dtype: f.get("dtype").map_or(Ok("@binding"), Node::text)?.into(),
            optional: f.flag("optional")?,
            repeat,
        };
        if ports.iter().any(|p| p.name == port.name) {
            return Err(name.invalid(format!("`{}` stands here twice", port.name)));
        }
        ports.push(port);
    }
    Ok(ports)
}

fn weights(node: &Node) -> Result<Vec<Slot>, CatalogError> {
    let mut slots = Vec::new();
    for (name, n) in node.entries()? {
        if n.value().is_sequence() {
            if name.contains('<') {
                return Err(n.invalid("a repeated slot needs `for: {i: 0..N}`"));
            }
            slots.push(Slot {
                name,
                dims: dims(&n)?,
                layout: Layout::InOut,
                optional: false,
                repeat: None,
                least: 0,
            });
            continue;
        }
        let f = n.fields(&["dims", "layout", "optional", "for", "least"])?;
        let repeat = repeat_named(f.get("for"), &name, &n)?;
        let least = match f.get("least") {
            None => usize::from(repeat.is_some()),
            Some(l) => match (repeat, l.count()? as usize) {
                (Some((a, b)), k) if k <= b - a => k,
                _ => return Err(l.invalid("expected at most the number of repeats of `for`")),
            },
        };
        slots.push(Slot {
            name,
            dims: dims(f.need("dims")?)?,
            layout: f.get("layout").map_or(Ok(Layout::InOut), layout)?,
            optional: f.flag("optional")?,
            repeat,
            least,
        });
    }
    Ok(slots)
}

fn layout(n: &Node) -> Result<Layout, CatalogError> {
    match n.text()? {
        "in_out" => Ok(Layout::InOut),
        "out_in" => Ok(Layout::OutIn),
        other => Err(n.invalid(format!("expected in_out or out_in, found `{other}`"))),
    }
}

fn repeat(of: Option<&Node>, name: &Node) -> Result<Option<(usize, usize)>, CatalogError> {
    repeat_named(of, name.text()?, name)
}

// `for: {i: 0..8}` of a slot or port whose name contains `<i>`.
fn repeat_named(
    of: Option<&Node>,
    name: &str,
    at: &Node,
) -> Result<Option<(usize, usize)>, CatalogError> {
    let indices = names::indices(name);
    let Some(of) = of else {
        return match indices.is_empty() {
            true => Ok(None),
            false => Err(at.invalid(format!("`{name}` is repeated and needs `for: {{i: 0..N}}`"))),
        };
    };
    let entries = of.entries()?;
    let [(index, range)] = entries.as_slice() else {
        return Err(of.invalid("expected one index, `{i: 0..N}`"));
    };
    if indices != [index.as_str()] {
        return Err(of.invalid(format!(
            "`{name}` must contain `<{index}>`, and no other index"
        )));
    }
    match names::range(range.text()?) {
        Some(r) => Ok(Some(r)),
        None => Err(range.invalid("expected a range such as 0..8, at most 64 long")),
    }
}

fn dims(n: &Node) -> Result<Vec<DimExpr>, CatalogError> {
    let items = n.items()?;
    if items.len() > 8 {
        return Err(n.invalid(format!("{} dims, expected at most 8", items.len())));
    }
    items.iter().map(dim).collect()
}

fn dim(n: &Node) -> Result<DimExpr, CatalogError> {
    if let Some(size) = n.value().as_u64() {
        return Ok(DimExpr::Literal(size as usize));
    }
    let text = n.text()?;
    if names::is_symbol(text) {
        return Ok(DimExpr::Symbol(text.into()));
    }
    let e = Expr::parse(text).map_err(|e| n.invalid(e.to_string()))?;
    let mut plain = true;
    e.walk(&mut |part| {
        plain &= match part {
            Expr::Int(_) | Expr::Symbol(_) => true,
            Expr::Binary(op, ..) => matches!(
                op,
                BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div
            ),
            _ => false,
        }
    });
    if plain {
        Ok(DimExpr::Derived(e))
    } else {
        Err(n.invalid("a dim is a number, a symbol, or + - * / of them"))
    }
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

fn expr(n: &Node) -> Result<Expr, CatalogError> {
    if let Some(i) = n.value().as_i64() {
        return Ok(Expr::Int(i));
    }
    Expr::parse(n.text()?).map_err(|e| n.invalid(e.to_string()))
}
