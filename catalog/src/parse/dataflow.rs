//! The `dataflow` part.

use std::collections::BTreeMap;

use structures_graph::ops::{AttrDefault, OTHER_HOST_OPS};
use structures_graph::{AttrValue, OpKind};

use crate::document::Node;
use crate::error::CatalogError;
use crate::expr::Expr;
use crate::names;
use crate::spec::{AttrDecl, Dataflow, DimAttr, DimExpr, OpDecl, SpanDecl};

use super::boundary::dims;

pub(super) fn dataflow(node: &Node) -> Result<Dataflow, CatalogError> {
    let f = node.fields(&["spans", "ops"])?;
    let spans_node = f.need("spans")?;
    let mut spans = Vec::new();
    for (name, n) in spans_node.entries()? {
        let s = n.fields(&["in", "out", "state"])?;
        let span = SpanDecl {
            name,
            inputs: s.need("in")?.names()?,
            outputs: s.need("out")?.names()?,
            states: s.get("state").map_or(Ok(Vec::new()), Node::names)?,
        };
        if span.inputs.is_empty() || span.outputs.is_empty() {
            return Err(n.invalid("a span needs an input and an output"));
        }
        spans.push(span);
    }
    if spans.is_empty() {
        return Err(spans_node.invalid("expected at least one span"));
    }
    let ops_node = f.need("ops")?;
    let ops: Vec<OpDecl> = ops_node.items()?.iter().map(op).collect::<Result<_, _>>()?;
    if ops.is_empty() {
        return Err(ops_node.invalid("expected at least one op"));
    }
    Ok(Dataflow { spans, ops })
}

fn op(node: &Node) -> Result<OpDecl, CatalogError> {
    let f = node.fields(&[
        "let", "op", "in", "attrs", "dims", "as", "when", "needs", "for", "anchor", "shared",
        "refuse",
    ])?;
    let kind = kind(f.need("op")?)?;
    let lets = f.need("let")?.texts()?;
    let inputs: Vec<String> = f
        .need("in")?
        .items()?
        .iter()
        .map(|n| n.text().map(str::to_string))
        .collect::<Result<_, _>>()?;
    operand_count(kind, inputs.len(), f.need("in")?)?;
    let repeat = f.get("for").map(index).transpose()?;
    let index = repeat
        .as_ref()
        .map(|(i, _): &(String, Vec<String>)| i.as_str());
    let attrs = attrs(kind, f.get("attrs"), index, node)?;
    result_count(kind, &lets, &attrs, f.need("let")?)?;
    let as_f32 = match f.word("as")? {
        None => false,
        Some((_, "f32")) => true,
        Some((n, other)) => return Err(n.invalid(format!("expected f32, found `{other}`"))),
    };
    let when = f.get("when").map_or(Ok(BTreeMap::new()), super::when)?;
    let refuse = f.get("refuse").map(|n| n.text().map(str::to_string));
    let views = match f.get("dims") {
        None => Vec::new(),
        Some(n) => views(n, lets.len())?,
    };
    Ok(OpDecl {
        lets,
        views,
        op: kind,
        inputs,
        attrs,
        as_f32,
        when,
        needs: f.get("needs").map_or(Ok(Vec::new()), Node::names)?,
        repeat,
        anchor: f.flag("anchor")?,
        shared: f.flag("shared")?,
        refuse: refuse.transpose()?,
    })
}

fn kind(n: &Node) -> Result<OpKind, CatalogError> {
    let name = n.text()?;
    match OpKind::from_name(name) {
        Some(kind) if !kind.spec().host_only => Ok(kind),
        Some(_) => Err(n.invalid(format!(
            "`{name}` is an operation of hosts only, never of an entry"
        ))),
        None if OTHER_HOST_OPS.contains(&name) => Err(n.invalid(format!(
            "`{name}` is an operation of hosts only, never of an entry"
        ))),
        None => {
            let known = structures_graph::ops::OPS.iter();
            let known = known.filter(|s| !s.host_only).map(|s| s.name);
            let near = names::nearest(name, known);
            Err(n.invalid(format!(
                "unknown operation `{name}`; nearest: {}",
                near.join(", ")
            )))
        }
    }
}

fn operand_count(kind: OpKind, found: usize, at: &Node) -> Result<(), CatalogError> {
    if kind == OpKind::Call {
        return Ok(());
    }
    let operands = kind.spec().operands;
    let least = operands.iter().filter(|o| !o.ends_with('?')).count();
    if found < least || found > operands.len() {
        let expected = operands.join(", ");
        return Err(at.invalid(format!("{kind} takes ({expected}), found {found} operands")));
    }
    Ok(())
}

fn result_count(
    kind: OpKind,
    lets: &[String],
    attrs: &BTreeMap<String, AttrDecl>,
    at: &Node,
) -> Result<(), CatalogError> {
    let expected = match (kind, attrs.get("n"), attrs.get("sizes")) {
        (OpKind::Chunk, Some(AttrDecl::Literal(AttrValue::Int(n))), _) => *n,
        (OpKind::Split, _, Some(AttrDecl::Literal(AttrValue::List(l)))) => l.len() as i64,
        (OpKind::Split, _, Some(AttrDecl::Dims(d))) => d.exprs().len() as i64,
        // As many as what the host runs there makes.
        (OpKind::Call, _, _) if !lets.is_empty() => return Ok(()),
        (OpKind::Chunk | OpKind::Split, _, _) => return Ok(()),
        (OpKind::GatedDelta, _, _) => 2,
        _ => 1,
    };
    if lets.len() as i64 != expected {
        let found = lets.len();
        return Err(at.invalid(format!(
            "{kind} makes {expected} values here, found {found} names"
        )));
    }
    Ok(())
}

fn attrs(
    kind: OpKind,
    written: Option<&Node>,
    index: Option<&str>,
    op: &Node,
) -> Result<BTreeMap<String, AttrDecl>, CatalogError> {
    let mut attrs = BTreeMap::new();
    let known = kind.spec().attrs;
    if let Some(n) = written {
        for (name, n) in n.entries()? {
            if !known.iter().any(|a| a.name == name) {
                let all: Vec<_> = known.iter().map(|a| a.name).collect();
                return Err(n.invalid(format!(
                    "{kind} has no attribute `{name}`, expected one of [{}]",
                    all.join(", ")
                )));
            }
            attrs.insert(name, attr(&n, index)?);
        }
    }
    for a in known {
        if a.default == AttrDefault::Required && !attrs.contains_key(a.name) {
            let at = written.unwrap_or(op);
            return Err(at.invalid(format!("{kind} needs the attribute `{}`", a.name)));
        }
    }
    Ok(attrs)
}

// What results are reshaped to: one list of dims, or a list of them with `~` for a result left as it is.
fn views(n: &Node, results: usize) -> Result<Vec<Option<Vec<DimExpr>>>, CatalogError> {
    let items = n.items()?;
    let nested = |i: &Node| i.value().is_sequence() || i.value().is_null();
    if results == 1 && !items.iter().any(nested) {
        return Ok(vec![Some(dims(n)?)]);
    }
    if items.len() != results {
        let found = items.len();
        return Err(n.invalid(format!(
            "expected a list of dims for each of {results} results, found {found}"
        )));
    }
    let one = |i: &Node| match i.value().is_null() {
        true => Ok(None),
        false => dims(i).map(Some),
    };
    items.iter().map(one).collect()
}

fn attr(n: &Node, index: Option<&str>) -> Result<AttrDecl, CatalogError> {
    if let Some(dims) = dim_attr(n)? {
        return Ok(AttrDecl::Dims(dims));
    }
    if let Some(text) = n.value().as_str() {
        if let Some(param) = text.strip_prefix('$') {
            return match names::is_symbol(param) && !param.contains('<') {
                true => Ok(AttrDecl::Capture(param.into())),
                false => Err(n.invalid(format!("`{param}` is no param name"))),
            };
        }
        let axis = text.strip_prefix('<').and_then(|t| t.strip_suffix('>'));
        if let Some(axis) = axis {
            if index != Some(axis) {
                return Ok(AttrDecl::Axis(axis.into()));
            }
        }
    }
    literal(n).map(AttrDecl::Literal)
}

// `=EXPR`, or a list with at least one of them, whole numbers between.
fn dim_attr(n: &Node) -> Result<Option<DimAttr>, CatalogError> {
    let computed = |n: &Node| -> Result<Option<Expr>, CatalogError> {
        let text = n.value().as_str().and_then(|t| t.strip_prefix('='));
        text.map(|t| super::parsed(n, t)).transpose()
    };
    if let Some(e) = computed(n)? {
        return Ok(Some(DimAttr::One(e)));
    }
    if !n.value().is_sequence() {
        return Ok(None);
    }
    let items = n.items()?;
    let marked = |i: &Node| i.value().as_str().is_some_and(|t| t.starts_with('='));
    if !items.iter().any(marked) {
        return Ok(None);
    }
    let one = |i: &Node| match computed(i)? {
        Some(e) => Ok(e),
        None => i.int().map(Expr::Int),
    };
    let list = items.iter().map(one).collect::<Result<_, CatalogError>>()?;
    Ok(Some(DimAttr::List(list)))
}

fn literal(n: &Node) -> Result<AttrValue, CatalogError> {
    use serde_yaml::Value;
    Ok(match n.value() {
        Value::Null => AttrValue::Absent,
        Value::Bool(b) => AttrValue::Flag(*b),
        Value::Number(x) => match (x.as_i64(), x.as_f64()) {
            (Some(i), _) => AttrValue::Int(i),
            (None, Some(f)) if f.is_finite() => AttrValue::Float(f),
            _ => return Err(n.invalid(format!("`{x}` is no finite number"))),
        },
        Value::String(s) if s == "none" => AttrValue::Absent,
        Value::String(s) => AttrValue::Word(s.clone()),
        Value::Sequence(_) => {
            AttrValue::List(n.items()?.iter().map(literal).collect::<Result<_, _>>()?)
        }
        _ => return Err(n.invalid("expected a number, a word, a flag or a list")),
    })
}

// `{i: [q, k]}` or `{i: 0..8}`
fn index(node: &Node) -> Result<(String, Vec<String>), CatalogError> {
    let entries = node.entries()?;
    let [(name, n)] = entries.as_slice() else {
        return Err(node.invalid("expected one index, `{i: [a, b]}` or `{i: 0..N}`"));
    };
    let values = if n.value().is_sequence() {
        n.names()?
    } else {
        match names::range(n.text()?) {
            Some((a, b)) => (a..b).map(|i| i.to_string()).collect(),
            None => return Err(n.invalid("expected a list of words or a range such as 0..8")),
        }
    };
    if values.is_empty() {
        return Err(n.invalid("expected a value"));
    }
    Ok((name.clone(), values))
}
