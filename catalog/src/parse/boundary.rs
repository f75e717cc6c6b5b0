//! Boundary tensors and weight slots: names, symbolic dims, repeats.

use structures_graph::Layout;

use crate::document::Node;
use crate::error::CatalogError;
use crate::expr::{BinaryOp, Expr};
use crate::names;
use crate::spec::{DimExpr, Port, Slot};

pub(super) fn ports(node: &Node) -> Result<Vec<Port>, CatalogError> {
    let mut ports: Vec<Port> = Vec::new();
    for n in node.items()? {
        let f = n.fields(&["name", "value", "dims", "dtype", "optional", "for"])?;
        let name = f.need("name")?;
        let repeat = repeat(f.get("for"), name)?;
        let mut alternatives = alternatives(f.need("dims")?)?.into_iter();
        let port = Port {
            name: name.text()?.into(),
            value: f.get("value").unwrap_or(name).text()?.into(),
            dims: alternatives.next().unwrap_or_default(),
            more: alternatives.collect(),
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

pub(super) fn weights(node: &Node) -> Result<Vec<Slot>, CatalogError> {
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

pub(super) fn layout(n: &Node) -> Result<Layout, CatalogError> {
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

// One list of dims, or a list of lists: alternatives that a tensor's rank tells apart.
fn alternatives(n: &Node) -> Result<Vec<Vec<DimExpr>>, CatalogError> {
    let items = n.items()?;
    if !items.first().is_some_and(|i| i.value().is_sequence()) {
        return Ok(vec![dims(n)?]);
    }
    let mut all: Vec<Vec<DimExpr>> = Vec::new();
    for item in items {
        let one = dims(&item)?;
        if all.iter().any(|d| d.len() == one.len()) {
            return Err(item.invalid(format!(
                "an alternative of {} dims stands before it: the rank chooses",
                one.len()
            )));
        }
        all.push(one);
    }
    Ok(all)
}

pub(super) fn dims(n: &Node) -> Result<Vec<DimExpr>, CatalogError> {
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
    let e = super::expr(n)?;
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
