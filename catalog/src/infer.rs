//! Symbolic dims of every value of a plain graph, forward from the boundary and the slots.

use std::collections::BTreeMap;

use structures_graph::{AttrValue, Layout, OpKind};

use crate::expr::{BinaryOp, Expr};
use crate::spec::{DimExpr, Plain, PlainAttr, PlainOp, Source};

impl Plain {
    /// Dims by value name. A value whose dims do not follow (the result of `call`) is left out.
    /// Of an input with alternatives, the first.
    pub fn value_dims(&self) -> BTreeMap<String, Vec<DimExpr>> {
        self.value_dims_of(&|_| None)
    }

    /// The same with the alternatives that tensors of these ranks fit.
    pub fn value_dims_of(
        &self,
        rank: &dyn Fn(&str) -> Option<usize>,
    ) -> BTreeMap<String, Vec<DimExpr>> {
        let of = |s: &Source| match rank(&s.name) {
            Some(rank) => s.dims_for(rank).to_vec(),
            None => s.dims.clone(),
        };
        let mut dims: BTreeMap<String, Vec<DimExpr>> = self
            .sources
            .iter()
            .map(|s| (s.name.clone(), of(s)))
            .collect();
        for op in &self.ops {
            let made = results(self, op, &dims);
            for (k, name) in op.outputs.iter().enumerate() {
                let own = made.get(k).cloned().flatten();
                if let Some(d) = op.view(k).map(<[_]>::to_vec).or(own) {
                    dims.insert(name.clone(), d);
                }
            }
        }
        dims
    }
}

fn results(
    plain: &Plain,
    op: &PlainOp,
    dims: &BTreeMap<String, Vec<DimExpr>>,
) -> Vec<Option<Vec<DimExpr>>> {
    let operand =
        |k: usize| -> Option<Vec<DimExpr>> { dims.get(op.inputs.get(k)?.as_ref()?).cloned() };
    let x = operand(0);
    match op.kind {
        OpKind::Linear => {
            let w = operand(1).filter(|w| w.len() == 2);
            let name = op.inputs.get(1).and_then(Option::as_ref);
            let layout = name.and_then(|n| plain.source(n)).map(|s| s.layout);
            let made = x.zip(w).and_then(|(mut x, w)| {
                x.pop()?;
                x.push(w[usize::from(layout != Some(Layout::OutIn))].clone());
                Some(x)
            });
            vec![made]
        }
        OpKind::Add | OpKind::Mul => {
            let b = operand(1);
            vec![match (x, b) {
                (Some(a), Some(b)) => Some(if b.len() > a.len() { b } else { a }),
                _ => None,
            }]
        }
        OpKind::Chunk | OpKind::Split => {
            let parts = parts(op);
            let axis = match op.attrs.get("axis") {
                Some(PlainAttr::Equal(AttrValue::Int(a))) => *a,
                _ => -1,
            };
            let mut out = Vec::new();
            for k in 0..op.outputs.len() {
                out.push(x.clone().and_then(|mut d| {
                    let at = if axis < 0 {
                        axis + d.len() as i64
                    } else {
                        axis
                    };
                    let at = usize::try_from(at).ok().filter(|a| *a < d.len())?;
                    d[at] = match &parts {
                        Parts::Equal(n) => divided(&d[at], *n),
                        Parts::Sizes(s) => s.get(k)?.clone(),
                        Parts::Unknown => return None,
                    };
                    Some(d)
                }));
            }
            out
        }
        OpKind::Attention => vec![x.and_then(|q| match q.as_slice() {
            [b, h, s, d] => Some(vec![b.clone(), s.clone(), h.clone(), d.clone()]),
            _ => None,
        })],
        OpKind::GatedDelta => vec![operand(2), operand(5)],
        OpKind::Call => Vec::new(),
        _ => vec![x],
    }
}

enum Parts {
    Equal(i64),
    Sizes(Vec<DimExpr>),
    Unknown,
}

fn parts(op: &PlainOp) -> Parts {
    match (op.attrs.get("n"), op.attrs.get("sizes")) {
        (Some(PlainAttr::Equal(AttrValue::Int(n))), _) => Parts::Equal(*n),
        (_, Some(PlainAttr::Equal(AttrValue::List(l)))) => {
            let sizes = l.iter().map(|v| match v {
                AttrValue::Int(i) => usize::try_from(*i).ok().map(DimExpr::Literal),
                _ => None,
            });
            sizes
                .collect::<Option<Vec<_>>>()
                .map_or(Parts::Unknown, Parts::Sizes)
        }
        (_, Some(PlainAttr::Dims(sizes))) => {
            Parts::Sizes(sizes.exprs().iter().map(dim_of).collect())
        }
        _ => Parts::Unknown,
    }
}

fn dim_of(e: &Expr) -> DimExpr {
    match e {
        Expr::Symbol(s) => DimExpr::Symbol(s.clone()),
        Expr::Int(i) => usize::try_from(*i).map_or(DimExpr::Derived(e.clone()), DimExpr::Literal),
        e => DimExpr::Derived(e.clone()),
    }
}

// `2*D` in two parts is `D`.
fn divided(dim: &DimExpr, n: i64) -> DimExpr {
    let whole = dim.expr();
    if let Expr::Int(i) = whole {
        if n > 0 && i % n == 0 {
            return DimExpr::Literal((i / n) as usize);
        }
    }
    if let Expr::Binary(BinaryOp::Mul, a, b) = &whole {
        for (count, rest) in [(a, b), (b, a)] {
            if let Expr::Int(i) = **count {
                if n > 0 && i % n == 0 {
                    return match (i / n, &**rest) {
                        (1, Expr::Symbol(s)) => DimExpr::Symbol(s.clone()),
                        (1, e) => DimExpr::Derived(e.clone()),
                        (k, e) => DimExpr::Derived(Expr::Binary(
                            BinaryOp::Mul,
                            Box::new(Expr::Int(k)),
                            Box::new(e.clone()),
                        )),
                    };
                }
            }
        }
    }
    DimExpr::Derived(Expr::Binary(
        BinaryOp::Div,
        Box::new(whole),
        Box::new(Expr::Int(n)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_dim() {
        let shown = |text: &str, n| {
            let e = Expr::parse(text).expect(text);
            divided(&DimExpr::Derived(e), n).to_string()
        };
        assert_eq!(shown("2*D", 2), "D");
        assert_eq!(shown("D*6", 3), "2 * D");
        assert_eq!(shown("D", 2), "D / 2");
        assert_eq!(divided(&DimExpr::Literal(12), 4), DimExpr::Literal(3));
    }
}
