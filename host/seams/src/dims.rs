//! Sizes: the symbols of slots and boundary inputs against what the host really has.

use std::collections::{BTreeMap, BTreeSet};

use structures_catalog::expr::{eval_int, EvalError, OfSymbols};
use structures_catalog::spec::{DimAttr, DimExpr, Source};
use structures_graph::{AttrValue, Dim, Layout};

/// A size that contradicts a symbol, a literal or a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inconsistent {
    /// Slot or input.
    pub name: String,
    /// Expected.
    pub expected: String,
    /// Found.
    pub found: String,
}

/// Solved symbols.
#[derive(Clone, Debug, Default)]
pub struct Solver {
    /// Symbol -> size.
    pub known: BTreeMap<String, u64>,
    later: Vec<(String, DimExpr, u64)>,
    /// Symbols that met a size of 1, which may be broadcast: what they are if nothing else says.
    ones: BTreeSet<String>,
}

impl Solver {
    /// Starts from sizes that are known already.
    pub fn new<'a>(known: impl IntoIterator<Item = (&'a String, &'a u64)>) -> Self {
        Solver {
            known: known.into_iter().map(|(k, v)| (k.clone(), *v)).collect(),
            ..Solver::default()
        }
    }

    /// A weight: all its dims, turned into the slot's own order.
    pub fn slot(
        &mut self,
        source: &Source,
        stored: &[usize],
        layout: Layout,
    ) -> Result<(), Inconsistent> {
        let mut dims = stored.to_vec();
        if dims.len() == 2 && layout != source.layout {
            dims.reverse();
        }
        if dims.len() != source.dims.len() {
            return Err(Inconsistent {
                name: source.name.clone(),
                expected: format!("{} dims", source.dims.len()),
                found: format!("{dims:?}"),
            });
        }
        for (want, size) in source.dims.iter().zip(dims) {
            self.unify(&source.name, want, size as u64)?;
        }
        Ok(())
    }

    /// A symbol's size from elsewhere: a param, or an attribute of the host.
    pub fn learn(&mut self, symbol: &str, size: u64) -> Result<(), Inconsistent> {
        self.unify(symbol, &DimExpr::Symbol(symbol.into()), size)
    }

    /// The literal a computed attribute stands for.
    pub fn value(&self, attr: &DimAttr) -> Result<AttrValue, EvalError> {
        attr.value(&symbols(&self.known))
    }

    /// A value under the dims the structure gives it, where the host's rank is theirs.
    pub fn viewed(
        &mut self,
        name: &str,
        declared: &[DimExpr],
        host: &[Dim],
    ) -> Result<(), Inconsistent> {
        if declared.len() != host.len() {
            return Ok(());
        }
        for (want, have) in declared.iter().zip(host) {
            if let Dim::Size(n) = have {
                self.unify(name, want, *n as u64)?;
            }
        }
        Ok(())
    }

    /// A boundary input: dim by dim at equal rank, else the last one (leading dims fold into rows). A size of 1
    /// may be broadcast.
    pub fn input(&mut self, source: &Source, host: &[Dim]) -> Result<(), Inconsistent> {
        let declared = source.dims_for(host.len());
        let pairs: Vec<(&DimExpr, &Dim)> = if declared.len() == host.len() {
            declared.iter().zip(host).collect()
        } else {
            declared.last().into_iter().zip(host.last()).collect()
        };
        for (want, have) in pairs {
            match have {
                Dim::Size(1) => {
                    if let DimExpr::Symbol(s) = want {
                        self.ones.insert(s.clone());
                    }
                }
                Dim::Symbol(_) => {}
                Dim::Size(n) => self.unify(&source.name, want, *n as u64)?,
            }
        }
        Ok(())
    }

    fn unify(&mut self, name: &str, want: &DimExpr, size: u64) -> Result<(), Inconsistent> {
        let miss = |expected: String| Inconsistent {
            name: name.into(),
            expected,
            found: size.to_string(),
        };
        match want {
            DimExpr::Literal(n) if *n as u64 == size => Ok(()),
            DimExpr::Literal(n) => Err(miss(n.to_string())),
            DimExpr::Symbol(s) => match self.known.get(s) {
                None => {
                    self.known.insert(s.clone(), size);
                    Ok(())
                }
                Some(n) if *n == size => Ok(()),
                Some(n) => Err(miss(format!("{s} = {n}"))),
            },
            DimExpr::Derived(_) => {
                self.later.push((name.into(), want.clone(), size));
                Ok(())
            }
        }
    }

    /// Nothing more will be learnt: a symbol that met nothing but a size of 1 is 1.
    pub fn settle(&mut self) {
        for symbol in std::mem::take(&mut self.ones) {
            self.known.entry(symbol).or_insert(1);
        }
    }

    /// Checks the products whose symbols are all known.
    pub fn finish(&mut self) -> Result<(), Inconsistent> {
        for (name, want, size) in std::mem::take(&mut self.later) {
            let DimExpr::Derived(expr) = &want else {
                continue;
            };
            if expr.symbols().iter().any(|s| !self.known.contains_key(s)) {
                continue;
            }
            let found = size.to_string();
            match eval_int(expr, &symbols(&self.known)) {
                Ok(n) if u64::try_from(n) == Ok(size) => {}
                Ok(n) => {
                    let expected = format!("{expr} = {n}");
                    return Err(Inconsistent {
                        name,
                        expected,
                        found,
                    });
                }
                Err(e) => {
                    let expected = format!("{expr}: {e}");
                    return Err(Inconsistent {
                        name,
                        expected,
                        found,
                    });
                }
            }
        }
        Ok(())
    }
}

/// Only symbols have a value.
fn symbols(known: &BTreeMap<String, u64>) -> OfSymbols<impl Fn(&str) -> Option<u64> + '_> {
    OfSymbols(|name: &str| known.get(name).copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_catalog::expr::Expr;

    fn source(dims: Vec<DimExpr>, layout: Layout) -> Source {
        Source {
            name: "w".into(),
            slot: true,
            optional: false,
            layout,
            dims,
            more: vec![],
        }
    }

    fn sym(s: &str) -> DimExpr {
        DimExpr::Symbol(s.into())
    }

    #[test]
    fn stored_layout_is_turned_and_symbols_unify() {
        let mut s = Solver::default();
        let w = source(vec![sym("K"), sym("N")], Layout::InOut);
        s.slot(&w, &[3, 8], Layout::OutIn).unwrap();
        assert_eq!(s.known["K"], 8);
        assert_eq!(s.known["N"], 3);
        let e = s.slot(&w, &[8, 3], Layout::OutIn).unwrap_err();
        assert_eq!((e.expected.as_str(), e.found.as_str()), ("K = 8", "3"));
    }

    #[test]
    fn derived_dims_are_checked_and_leading_dims_fold() {
        let mut s = Solver::default();
        let w = source(
            vec![DimExpr::Derived(Expr::parse("3*D").unwrap())],
            Layout::InOut,
        );
        s.slot(&w, &[12], Layout::InOut).unwrap();
        let x = source(vec![sym("M"), sym("D")], Layout::InOut);
        let host = ["B", "T"].map(|s| Dim::Symbol(s.into()));
        s.input(&x, &[host[0].clone(), host[1].clone(), Dim::Size(4)])
            .unwrap();
        s.finish().unwrap();
        s.slot(&w, &[13], Layout::InOut).unwrap();
        assert_eq!(s.finish().unwrap_err().expected, "3 * D = 12");
    }

    #[test]
    fn a_size_of_one_is_broadcast_where_another_size_is_known_and_one_where_none_is() {
        let x = source(vec![sym("H"), sym("D")], Layout::InOut);
        for (other, want) in [(None, 1), (Some(4), 4)] {
            let mut s = Solver::default();
            s.input(&x, &[Dim::Size(1), Dim::Size(8)]).unwrap();
            if let Some(n) = other {
                s.input(&x, &[Dim::Size(n), Dim::Size(8)]).unwrap();
            }
            assert!(other.is_some() || !s.known.contains_key("H"));
            s.settle();
            assert_eq!((s.known["H"], s.known["D"]), (want, 8));
        }
    }
}
