//! The attribute rule: what is written must be equal, what is captured is handed on, what is not written must have
//! its default on the host. So a soft cap or a residual multiplier is never ignored.

use std::collections::BTreeMap;

use structures_catalog::expr::Expr;
use structures_catalog::spec::{DimAttr, PlainAttr, PlainOp};
use structures_graph::ops::AttrDefault;
use structures_graph::{AttrValue, Attrs, Dim, Graph, Op};

use crate::dims::Solver;

/// An attribute that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmatched {
    /// Which.
    pub name: String,
    /// Expected.
    pub expected: String,
    /// Found.
    pub found: String,
}

/// Checks one pair and adds its captures; sizes of dims may stand for words.
pub fn check(
    graph: &Graph,
    plain: &PlainOp,
    host: &Op,
    dims: &BTreeMap<String, u64>,
    params: &mut Attrs,
) -> Result<(), Unmatched> {
    let table = plain.kind.spec().attrs;
    let miss = |name: &str, expected: String, found: String| Unmatched {
        name: name.into(),
        expected,
        found,
    };
    let outside = |name: &&String| table.iter().all(|a| a.name != name.as_str());
    if let Some(name) = host.attrs.keys().find(outside) {
        let found = host.attrs[name].to_string();
        return Err(miss(name, "no such attribute".into(), found));
    }
    if let Some(name) = plain.attrs.keys().find(outside) {
        let found = "written in the structure".into();
        return Err(miss(name, "no such attribute".into(), found));
    }
    for row in table {
        let default = default_of(graph, host, row.default);
        let found = host.attrs.get(row.name).or(default.as_ref());
        let shown = found.map_or("nothing".to_string(), ToString::to_string);
        match plain.attrs.get(row.name) {
            Some(PlainAttr::Equal(want)) => {
                if !found.is_some_and(|f| equal(want, f, dims)) {
                    return Err(miss(row.name, want.to_string(), shown));
                }
            }
            // Judged by `check_dims`, once the captures of all operations have given their sizes.
            Some(PlainAttr::Dims(_)) => {}
            Some(PlainAttr::Capture(param)) => {
                let Some(found) = found else {
                    return Err(miss(row.name, "a value".into(), shown));
                };
                match params.get(param) {
                    Some(before) if !equal(before, found, dims) => {
                        return Err(miss(row.name, before.to_string(), shown));
                    }
                    Some(_) => {}
                    None => {
                        params.insert(param.clone(), found.clone());
                    }
                }
            }
            None => {
                let Some(written) = host.attrs.get(row.name) else {
                    continue;
                };
                if !default.as_ref().is_some_and(|d| equal(d, written, dims)) {
                    let want = default.map_or("not named by the structure".into(), |d| {
                        format!("the default {d}")
                    });
                    return Err(miss(row.name, want, shown));
                }
            }
        }
    }
    Ok(())
}

/// Checks the attributes of one pair that are computed from dims. A symbol that nothing else gave a size takes the
/// host's.
pub fn check_dims(
    graph: &Graph,
    plain: &PlainOp,
    host: &Op,
    solver: &mut Solver,
) -> Result<(), Unmatched> {
    for row in plain.kind.spec().attrs {
        let Some(PlainAttr::Dims(want)) = plain.attrs.get(row.name) else {
            continue;
        };
        let default = default_of(graph, host, row.default);
        let found = host.attrs.get(row.name).or(default.as_ref());
        let miss = |expected: String| Unmatched {
            name: row.name.into(),
            expected,
            found: found.map_or("nothing".to_string(), ToString::to_string),
        };
        if let (DimAttr::One(Expr::Symbol(s)), Some(AttrValue::Int(n))) = (want, found) {
            let size = u64::try_from(*n).map_err(|_| miss(want.to_string()))?;
            solver.learn(s, size).map_err(|e| miss(e.expected))?;
            continue;
        }
        let value = solver
            .value(want)
            .map_err(|e| miss(format!("{want}: {e}")))?;
        if !found.is_some_and(|f| equal(&value, f, &solver.known)) {
            return Err(miss(format!("{want} = {value}")));
        }
    }
    Ok(())
}

/// The default of an attribute for this operation; `None` when it has to be written or cannot be known.
fn default_of(graph: &Graph, host: &Op, default: AttrDefault) -> Option<AttrValue> {
    let last = || {
        let first = host.inputs.first().copied().flatten()?;
        match graph.value(first).dims.last()? {
            Dim::Size(n) => Some(*n),
            Dim::Symbol(_) => None,
        }
    };
    match default {
        AttrDefault::Required => None,
        AttrDefault::Number(x) => Some(AttrValue::Float(x)),
        AttrDefault::Flag(b) => Some(AttrValue::Flag(b)),
        AttrDefault::Word(w) => Some(AttrValue::Word(w.into())),
        AttrDefault::Absent => Some(AttrValue::Absent),
        AttrDefault::InvSqrtLastDim => Some(AttrValue::Float((last()? as f64).powf(-0.5))),
        AttrDefault::LastDim => Some(AttrValue::Int(i64::try_from(last()?).ok()?)),
    }
}

/// Equal as values: numbers to one part in a million (a config's decimal and a computed root), `none` as absent,
/// a word that is a solved dim as its size.
fn equal(a: &AttrValue, b: &AttrValue, dims: &BTreeMap<String, u64>) -> bool {
    let number = |v: &AttrValue| {
        v.as_f64()
            .or_else(|| v.as_word().and_then(|w| dims.get(w)).map(|n| *n as f64))
    };
    let absent = |v: &AttrValue| match v {
        AttrValue::Absent => true,
        AttrValue::Word(w) => w == "none",
        _ => false,
    };
    if absent(a) || absent(b) {
        return absent(a) && absent(b);
    }
    match (a, b) {
        (AttrValue::List(x), AttrValue::List(y)) => {
            x.len() == y.len() && x.iter().zip(y).all(|(x, y)| equal(x, y, dims))
        }
        (AttrValue::Int(x), AttrValue::Int(y)) => x == y,
        _ => match (number(a), number(b)) {
            (Some(x), Some(y)) => x == y || (x - y).abs() <= 1e-6 * x.abs().max(y.abs()),
            _ => a == b,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_graph::{GraphBuilder, OpId, OpKind};

    fn attention(attrs: &[(&str, AttrValue)]) -> Graph {
        let mut b = GraphBuilder::new("t");
        let dims = || ["B", "H", "S"].map(|s| Dim::Symbol(s.into())).to_vec();
        let with = |d: usize| {
            let mut v = dims();
            v.push(Dim::Size(d));
            v
        };
        let q = b.input("q", with(64));
        b.op(
            OpKind::Attention,
            "m",
            "o",
            &[Some(q), Some(q), Some(q)],
            attrs,
            with(64),
        );
        b.finish()
    }

    fn run(host: &[(&str, AttrValue)], plain: &[(&str, PlainAttr)]) -> Result<Attrs, Unmatched> {
        let graph = attention(host);
        let op = PlainOp {
            kind: OpKind::Attention,
            inputs: vec![],
            outputs: vec![],
            attrs: plain
                .iter()
                .map(|(k, v)| (k.to_string(), v.clone()))
                .collect(),
            views: vec![],
            mentions: vec![],
            as_f32: false,
            anchor: false,
            shared: false,
            refuse: None,
        };
        let mut params = Attrs::new();
        check(
            &graph,
            &op,
            graph.op(OpId(0)),
            &BTreeMap::new(),
            &mut params,
        )
        .map(|()| params)
    }

    #[test]
    fn an_attribute_not_written_must_have_its_default() {
        use AttrValue::{Absent, Flag, Float};
        assert!(run(&[], &[]).is_ok());
        assert!(run(&[("scale", Float(0.125)), ("softcap", Absent)], &[]).is_ok());
        let e = run(&[("softcap", Float(50.0))], &[]).unwrap_err();
        assert_eq!((e.name.as_str(), e.found.as_str()), ("softcap", "50"));
        assert_eq!(
            run(&[("scale", Float(0.1))], &[]).unwrap_err().name,
            "scale"
        );
        assert_eq!(
            run(&[("causal", Flag(true))], &[]).unwrap_err().name,
            "causal"
        );
    }

    #[test]
    fn captures_take_the_default_when_the_host_is_silent() {
        let capture = |n: &str| PlainAttr::Capture(n.into());
        let p = run(
            &[("causal", AttrValue::Flag(true))],
            &[
                ("scale", capture("scale")),
                ("causal", capture("causal")),
                ("window", capture("w")),
            ],
        )
        .unwrap();
        assert_eq!(p["scale"], AttrValue::Float(0.125));
        assert_eq!(p["causal"], AttrValue::Flag(true));
        assert_eq!(p["w"], AttrValue::Absent);
    }

    #[test]
    fn attributes_over_dims_are_compared_once_the_dims_are_known() {
        let graph = attention(&[("window", AttrValue::Int(32))]);
        let host = graph.op(OpId(0));
        let check = |text: &str, known: &[(&str, u64)]| {
            let op = PlainOp {
                kind: OpKind::Attention,
                inputs: vec![],
                outputs: vec![],
                attrs: [(
                    "window".to_string(),
                    PlainAttr::Dims(DimAttr::One(Expr::parse(text).unwrap())),
                )]
                .into(),
                views: vec![],
                mentions: vec![],
                as_f32: false,
                anchor: false,
                shared: false,
                refuse: None,
            };
            let mut solver = Solver::default();
            let known = known.iter().map(|(s, n)| (s.to_string(), *n));
            solver.known.extend(known);
            check_dims(&graph, &op, host, &mut solver).map(|()| solver.known)
        };
        assert!(check("D / 2", &[("D", 64)]).is_ok());
        let e = check("D / 2", &[("D", 62)]).unwrap_err();
        assert_eq!(
            (e.expected.as_str(), e.found.as_str()),
            ("D / 2 = 31", "32")
        );
        let e = check("D / 2", &[]).unwrap_err();
        assert!(e.expected.contains("`D` is not there"), "{}", e.expected);
        // A bare symbol that is open takes the size; a known one is compared.
        assert_eq!(check("W", &[]).unwrap()["W"], 32);
        assert_eq!(check("W", &[("W", 8)]).unwrap_err().expected, "W = 8");
    }

    #[test]
    fn literals_must_be_equal() {
        let want = PlainAttr::Equal(AttrValue::Flag(true));
        assert!(run(
            &[("causal", AttrValue::Flag(true))],
            &[("causal", want.clone())]
        )
        .is_ok());
        assert_eq!(run(&[], &[("causal", want)]).unwrap_err().found, "false");
    }
}
