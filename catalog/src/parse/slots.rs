//! The `slots` part.

use indexmap::IndexMap;
use structures_graph::Layout;

use super::boundary::layout;
use super::expr;
use crate::document::Node;
use crate::error::CatalogError;
use crate::names;
use crate::spec::{AxisRule, Check, ConstFill, Emit, Role, Slot, Slots, WeightSource};

/// `None` for `at: graph`.
pub(super) fn slots(node: &Node, declared: &[Slot]) -> Result<Option<Slots>, CatalogError> {
    let f = node.fields(&[
        "at", "roles", "any", "every", "closed", "checks", "dims", "axis", "weights", "emit",
    ])?;
    let at = f.need("at")?;
    match at.text()? {
        "module" => {}
        "graph" => {
            node.fields(&["at"])?;
            return Ok(None);
        }
        other => return Err(at.invalid(format!("expected module or graph, found `{other}`"))),
    }
    let any = match (f.get("roles"), f.get("any")) {
        (Some(one), None) => vec![roles(one)?],
        (None, Some(list)) => {
            let any: Vec<_> = list.items()?.iter().map(roles).collect::<Result<_, _>>()?;
            if any.is_empty() {
                return Err(list.invalid("expected at least one map of roles"));
            }
            any
        }
        _ => return Err(node.invalid("expected exactly one of `roles` and `any`")),
    };
    if let (Some(every), None) = (f.get("every"), f.get("any")) {
        return Err(every.invalid("`every` belongs to `any`"));
    }
    let mut dims = IndexMap::new();
    if let Some(n) = f.get("dims") {
        for (symbol, n) in n.entries()? {
            if !names::is_symbol(&symbol) {
                return Err(n.invalid(format!("`{symbol}` is no symbol")));
            }
            dims.insert(symbol, expr(&n)?);
        }
    }
    let mut axis = IndexMap::new();
    if let Some(n) = f.get("axis") {
        for (name, n) in n.entries()? {
            axis.insert(name, axis_rule(&n)?);
        }
    }
    let mut weights = IndexMap::new();
    if let Some(n) = f.get("weights") {
        for (slot, n) in n.entries()? {
            let own = declared
                .iter()
                .find(|s| names::expanded(&s.name, s.repeat).contains(&slot));
            let Some(own) = own else {
                return Err(n.invalid(format!("`{slot}` is no slot of this entry")));
            };
            weights.insert(slot, source(&n, own.layout)?);
        }
    }
    let checks = match f.get("checks") {
        None => Vec::new(),
        Some(n) => n.items()?.iter().map(check).collect::<Result<_, _>>()?,
    };
    // A structure may be one module (`roles: {}`), but something must tell which.
    let open = any.iter().any(|roles| roles.values().all(|r| r.optional));
    if open && checks.is_empty() {
        return Err(node.invalid("every module fits: give a required role or a check"));
    }
    Ok(Some(Slots {
        at_module: true,
        any,
        every: f.flag("every")?,
        closed: f.word("closed")?.map(|(_, code)| code.to_string()),
        checks,
        dims,
        axis,
        weights,
        emit: f.get("emit").map_or(Ok(Emit::default()), emit)?,
    }))
}

fn path(n: &Node) -> Result<String, CatalogError> {
    let p = n.text()?;
    if p.is_empty() || p.split('.').any(str::is_empty) {
        return Err(n.invalid(format!("`{p}` is no module path")));
    }
    Ok(p.into())
}

fn roles(node: &Node) -> Result<IndexMap<String, Role>, CatalogError> {
    let mut roles = IndexMap::new();
    for (name, n) in node.entries()? {
        if !names::is_name(&name) || ["self", "parent", "role"].contains(&name.as_str()) {
            return Err(n.invalid(format!("`{name}` cannot be a role's name")));
        }
        let role = if n.value().is_string() {
            Role {
                in_parent: false,
                first: vec![path(&n)?],
                optional: false,
            }
        } else {
            let f = n.fields(&["in", "first", "optional"])?;
            let first = f.need("first")?;
            let first: Vec<String> = first.items()?.iter().map(path).collect::<Result<_, _>>()?;
            if first.is_empty() {
                return Err(n.invalid("`first` needs a path"));
            }
            let in_parent = match f.word("in")? {
                None | Some((_, "self")) => false,
                Some((_, "parent")) => true,
                Some((n, other)) => {
                    return Err(n.invalid(format!("expected self or parent, found `{other}`")))
                }
            };
            Role {
                in_parent,
                first,
                optional: f.flag("optional")?,
            }
        };
        roles.insert(name, role);
    }
    Ok(roles)
}

fn check(node: &Node) -> Result<Check, CatalogError> {
    let f = node.fields(&["that", "else"])?;
    let that = expr(f.need("that")?)?;
    let otherwise = f.need("else")?;
    let refuse = match otherwise.value().as_str() {
        Some("pass") => None,
        Some(other) => {
            return Err(otherwise.invalid(format!(
                "expected pass or {{refuse: CODE}}, found `{other}`"
            )))
        }
        None => {
            let code = otherwise.fields(&["refuse"])?;
            let code = code.need("refuse")?;
            if !names::is_name(code.text()?) {
                return Err(code.invalid("a code is small letters, digits and `_`"));
            }
            Some(code.text()?.to_string())
        }
    };
    Ok(Check { that, refuse })
}

fn axis_rule(node: &Node) -> Result<AxisRule, CatalogError> {
    if !node.value().is_mapping() {
        return Ok(AxisRule::Expr(expr(node)?));
    }
    let f = node.fields(&["attr", "of", "map", "default", "foreign"])?;
    let map = match f.get("map") {
        None => IndexMap::new(),
        Some(n) => n
            .entries()?
            .into_iter()
            .map(|(k, v)| Ok((k, v.text()?.to_string())))
            .collect::<Result<_, CatalogError>>()?,
    };
    let word = |key: &str| -> Result<Option<String>, CatalogError> {
        f.get(key).map(|n| n.text().map(str::to_string)).transpose()
    };
    Ok(AxisRule::Attr {
        attr: f.need("attr")?.names()?,
        of: f.need("of")?.text()?.into(),
        map,
        default: word("default")?,
        foreign: word("foreign")?,
    })
}

fn role_param(n: &Node) -> Result<(String, String), CatalogError> {
    let text = n.text()?;
    match text.split_once('.') {
        Some((r, p)) if !r.is_empty() && !p.is_empty() && !p.contains('.') => {
            Ok((r.into(), p.into()))
        }
        _ => Err(n.invalid(format!("expected role.param, found `{text}`"))),
    }
}

fn source(node: &Node, own: Layout) -> Result<WeightSource, CatalogError> {
    if node.value().is_string() {
        let (role, param) = role_param(node)?;
        return Ok(WeightSource::From {
            role,
            param,
            layout: own,
            rows: None,
            reshape: None,
        });
    }
    let f = node.fields(&["from", "layout", "rows", "reshape", "const"])?;
    if let Some(n) = f.get("const") {
        node.fields(&["const"])?;
        return match n.text()? {
            "zeros" => Ok(WeightSource::Const(ConstFill::Zeros)),
            "ones" => Ok(WeightSource::Const(ConstFill::Ones)),
            other => Err(n.invalid(format!("expected zeros or ones, found `{other}`"))),
        };
    }
    let (role, param) = role_param(f.need("from")?)?;
    let rows = match f.get("rows") {
        None => None,
        Some(n) => match n.items()?.as_slice() {
            [a, b] => Some((expr(a)?, expr(b)?)),
            _ => return Err(n.invalid("expected [from, to)")),
        },
    };
    let reshape = match f.get("reshape") {
        None => None,
        Some(n) => Some(n.items()?.iter().map(expr).collect::<Result<_, _>>()?),
    };
    Ok(WeightSource::From {
        role,
        param,
        layout: f.get("layout").map_or(Ok(own), layout)?,
        rows,
        reshape,
    })
}

fn emit(node: &Node) -> Result<Emit, CatalogError> {
    let f = node.fields(&["path", "parent", "per"])?;
    let per = f.get("per").map_or(Ok(Vec::new()), Node::names)?;
    let usual = Emit::default();
    let path = match f.get("path") {
        Some(n) => n.text()?.to_string(),
        None if per.is_empty() => usual.path,
        None => "role".into(),
    };
    let parent = match f.get("parent") {
        Some(n) => n.text()?.to_string(),
        None => usual.parent,
    };
    Ok(Emit { path, parent, per })
}

impl Default for Emit {
    fn default() -> Self {
        Emit {
            path: "self".into(),
            parent: "parent".into(),
            per: Vec::new(),
        }
    }
}
