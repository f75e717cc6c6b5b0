//! Symbolic dims from shapes (B-015).
//!
//! Two rules: [`Shape::Declared`] takes every rank and size as declared (what an ABI call and the oracle see);
//! [`Shape::Host`] also takes what hosts have: any leading dims for `[M, ..]`, and inputs broadcast from size 1.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use structures_graph::{AttrValue, Attrs};

use crate::constraint::whole;
use crate::error::CatalogError;
use crate::expr::{eval_int, OfSymbols};
use crate::spec::{DimExpr, Source, Spec};

/// Shapes by name.
pub type Shapes = BTreeMap<String, Vec<usize>>;

/// Sizes by symbol.
pub type Dims = BTreeMap<String, usize>;

/// The symbol that stands for the product of all leading dims.
pub const ROWS: &str = "M";

/// How strictly shapes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Rank and sizes exactly as declared.
    Declared,
    /// `[M, ..]` takes any leading dims; an input dim of 1 is broadcast.
    Host,
}

impl Spec {
    /// Solves every symbol from required inputs, present optional inputs and weights, in declared order. Literal
    /// and derived dims are checked, never bound. An absent optional is absent, not an error.
    pub fn solve_dims(
        &self,
        inputs: &Shapes,
        weights: &Shapes,
        rule: Shape,
    ) -> Result<Dims, CatalogError> {
        self.solve_dims_with(inputs, weights, &Attrs::new(), rule)
    }

    /// The same with the params that give symbols their sizes.
    pub fn solve_dims_with(
        &self,
        inputs: &Shapes,
        weights: &Shapes,
        params: &Attrs,
        rule: Shape,
    ) -> Result<Dims, CatalogError> {
        let sources = self.declared_sources();
        for (name, slot) in inputs
            .keys()
            .map(|n| (n, false))
            .chain(weights.keys().map(|n| (n, true)))
        {
            if !sources
                .iter()
                .any(|(s, _)| s.name == *name && s.slot == slot)
            {
                return Err(CatalogError::UnexpectedTensor {
                    structure: self.name.clone(),
                    tensor: name.clone(),
                    expected: sources
                        .iter()
                        .filter(|(s, _)| s.slot == slot)
                        .map(|(s, _)| s.name.clone())
                        .collect(),
                });
            }
        }
        let given = |name: &str, slot: bool| {
            if slot {
                weights.get(name)
            } else {
                inputs.get(name)
            }
        };
        for (s, must) in &sources {
            if *must && given(&s.name, s.slot).is_none() {
                return Err(self.missing(&s.name, s.slot, ""));
            }
        }
        let mut solver = Solver::new(&self.name, rule);
        solver.seed(&self.symbols, params)?;
        for (s, _) in &sources {
            if let Some(shape) = given(&s.name, s.slot) {
                solver.bind_source(s, shape)?;
            }
        }
        solver.finish()
    }

    /// Params with those that are sizes filled in.
    pub(crate) fn filled(&self, params: &Attrs, dims: &Dims) -> Attrs {
        let mut filled = params.clone();
        for (symbol, param) in &self.symbols {
            let open = matches!(filled.get(param), None | Some(AttrValue::Absent));
            if let (true, Some(n)) = (open, dims.get(symbol)) {
                let n = i64::try_from(*n).unwrap_or(i64::MAX);
                filled.insert(param.clone(), AttrValue::Int(n));
            }
        }
        filled
    }

    pub(crate) fn missing(&self, name: &str, slot: bool, why: &str) -> CatalogError {
        if slot {
            CatalogError::MissingWeight {
                structure: self.name.clone(),
                slot: name.into(),
                why: why.into(),
            }
        } else {
            CatalogError::MissingInput {
                structure: self.name.clone(),
                input: name.into(),
                why: why.into(),
            }
        }
    }
}

/// Binds symbols tensor by tensor.
pub(crate) struct Solver<'a> {
    structure: &'a str,
    rule: Shape,
    dims: Dims,
    lead: Option<Vec<usize>>,
    derived: Vec<(String, usize, DimExpr, usize, bool)>,
    // Symbols a param may leave open.
    open: Vec<String>,
}

impl<'a> Solver<'a> {
    pub(crate) fn new(structure: &'a str, rule: Shape) -> Self {
        Solver {
            structure,
            rule,
            dims: Dims::new(),
            lead: None,
            derived: Vec::new(),
            open: Vec::new(),
        }
    }

    /// Sizes that params give. An absent param leaves its symbol open.
    pub(crate) fn seed(
        &mut self,
        symbols: &IndexMap<String, String>,
        params: &Attrs,
    ) -> Result<(), CatalogError> {
        for (symbol, param) in symbols {
            match params.get(param) {
                None | Some(AttrValue::Absent) => self.open.push(symbol.clone()),
                Some(v) => match whole(v).and_then(|n| usize::try_from(n).ok()) {
                    Some(n) => {
                        self.dims.insert(symbol.clone(), n);
                    }
                    None => {
                        return Err(CatalogError::Param {
                            structure: self.structure.into(),
                            param: param.clone(),
                            expected: format!("the size of dim {symbol}"),
                            found: v.to_string(),
                        })
                    }
                },
            }
        }
        Ok(())
    }

    /// An input or a slot, in the alternative of its rank.
    pub(crate) fn bind_source(
        &mut self,
        source: &Source,
        shape: &[usize],
    ) -> Result<(), CatalogError> {
        let fitting = source.dims_for(shape.len());
        self.bind(&source.name, fitting, shape, !source.slot)
            .map_err(|e| match e {
                CatalogError::RankMismatch {
                    structure,
                    tensor,
                    dims,
                    expected,
                    found,
                } => CatalogError::RankMismatch {
                    structure,
                    tensor,
                    dims: source
                        .more
                        .iter()
                        .fold(dims, |all, more| format!("{all} or {}", shown(more))),
                    expected,
                    found,
                },
                e => e,
            })
    }

    pub(crate) fn bind(
        &mut self,
        tensor: &str,
        declared: &[DimExpr],
        shape: &[usize],
        input: bool,
    ) -> Result<(), CatalogError> {
        let rows =
            self.rule == Shape::Host && declared.first() == Some(&DimExpr::Symbol(ROWS.into()));
        let extra = match shape.len().checked_sub(declared.len()) {
            Some(0) => 0,
            Some(n) if rows => n,
            _ => return Err(self.rank(tensor, declared, shape)),
        };
        for (i, dim) in declared.iter().enumerate() {
            if i == 0 && rows {
                self.rows(tensor, &shape[..=extra])?;
                continue;
            }
            let size = shape[i + extra];
            let broadcast = input && self.rule == Shape::Host && size == 1;
            match dim {
                DimExpr::Literal(n) if *n == size => {}
                DimExpr::Literal(n) => {
                    return Err(self.conflict(tensor, i, &n.to_string(), &n.to_string(), size))
                }
                DimExpr::Symbol(s) => match self.dims.get(s) {
                    None => {
                        self.dims.insert(s.clone(), size);
                    }
                    Some(n) if *n == size || broadcast => {}
                    Some(n) => return Err(self.conflict(tensor, i, s, &n.to_string(), size)),
                },
                DimExpr::Derived(_) => {
                    self.derived
                        .push((tensor.into(), i, dim.clone(), size, broadcast));
                }
            }
        }
        Ok(())
    }

    // `M` is the product of all leading dims; a later input may broadcast over the first one's.
    fn rows(&mut self, tensor: &str, lead: &[usize]) -> Result<(), CatalogError> {
        let size: usize = lead.iter().product();
        let Some(first) = self.lead.clone() else {
            self.lead = Some(lead.to_vec());
            match self.dims.insert(ROWS.into(), size) {
                Some(n) if n != size => {
                    return Err(self.conflict(tensor, 0, ROWS, &n.to_string(), size))
                }
                _ => return Ok(()),
            }
        };
        let m: usize = first.iter().product();
        let fits = lead.len() <= first.len()
            && lead
                .iter()
                .rev()
                .zip(first.iter().rev())
                .all(|(a, b)| a == b || *a == 1);
        if size == m || size == 1 || fits {
            Ok(())
        } else {
            Err(self.conflict(tensor, 0, ROWS, &m.to_string(), size))
        }
    }

    /// Checks derived dims once all symbols are bound.
    pub(crate) fn finish(self) -> Result<Dims, CatalogError> {
        for (tensor, index, dim, size, broadcast) in &self.derived {
            let DimExpr::Derived(e) = dim else { continue };
            let open = |s: &String| self.open.contains(s) && !self.dims.contains_key(s);
            if e.symbols().iter().any(open) {
                continue;
            }
            let expected = match eval_int(e, &sizes(&self.dims)) {
                Ok(n) if n == *size as i64 || *broadcast => continue,
                Ok(n) => n.to_string(),
                Err(e) => e.to_string(),
            };
            return Err(self.conflict(tensor, *index, &e.to_string(), &expected, *size));
        }
        Ok(self.dims)
    }

    fn rank(&self, tensor: &str, declared: &[DimExpr], shape: &[usize]) -> CatalogError {
        CatalogError::RankMismatch {
            structure: self.structure.into(),
            tensor: tensor.into(),
            dims: shown(declared),
            expected: declared.len(),
            found: shape.to_vec(),
        }
    }

    fn conflict(
        &self,
        tensor: &str,
        index: usize,
        dim: &str,
        expected: &str,
        found: usize,
    ) -> CatalogError {
        CatalogError::DimConflict {
            structure: self.structure.into(),
            tensor: tensor.into(),
            index,
            dim: dim.into(),
            expected: expected.into(),
            found,
        }
    }
}

fn shown(dims: &[DimExpr]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// The size of a dim under solved symbols; `None` when a symbol is open or the arithmetic fails.
pub fn dim_size(dim: &DimExpr, dims: &Dims) -> Option<usize> {
    match dim {
        DimExpr::Literal(n) => Some(*n),
        DimExpr::Symbol(s) => dims.get(s).copied(),
        DimExpr::Derived(e) => usize::try_from(eval_int(e, &sizes(dims)).ok()?).ok(),
    }
}

/// Solved symbols as facts of an expression.
pub(crate) fn sizes(dims: &Dims) -> OfSymbols<impl Fn(&str) -> Option<u64> + '_> {
    OfSymbols(|name: &str| dims.get(name).map(|n| *n as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Catalog;

    // M and a literal, a symbol solved twice, a derived weight, an optional.
    const TEXT: &str = "
name: t
version: 1
boundary:
  inputs:
    - {name: x, dims: [M, D]}
    - {name: r, dims: [M, D], optional: true}
    - {name: mask, dims: [M, 1], optional: true}
  outputs: [{name: y, dims: [M, 2*D]}]
weights: {w: [D, 2*D], b: {dims: [2*D], optional: true}}
gates: {parity: [cosine]}
slots: {at: module, roles: {q: q}, weights: {w: q.weight}}
dataflow:
  spans: {s: {in: [x, r, mask], out: [y]}}
  ops:
    - {let: a, op: add, in: [x, r], needs: [r]}
    - {let: c, op: add, in: [a, mask], needs: [mask]}
    - {let: p, op: linear, in: [c, w]}
    - {let: y, op: bias, in: [p, b], needs: [b]}
";

    fn solve(rule: Shape, inputs: &[(&str, &[usize])], weights: &[(&str, &[usize])]) -> String {
        let catalog = Catalog::default()
            .with_document("t", "t", TEXT)
            .expect("loads");
        let shapes = |of: &[(&str, &[usize])]| -> Shapes {
            of.iter()
                .map(|(n, d)| (n.to_string(), d.to_vec()))
                .collect()
        };
        let spec = catalog.get("t").expect("t");
        match spec.solve_dims(&shapes(inputs), &shapes(weights), rule) {
            Ok(dims) => format!("{dims:?}"),
            Err(e) => format!("{} {e}", e.code()),
        }
    }

    const W: (&str, &[usize]) = ("w", &[5, 10]);

    #[test]
    fn symbols_literals_and_derived_dims() {
        let solved = r#"{"D": 5, "M": 3}"#;
        assert_eq!(solve(Shape::Declared, &[("x", &[3, 5])], &[W]), solved);
        let all: [(&str, &[usize]); 3] = [("x", &[3, 5]), ("r", &[3, 5]), ("mask", &[3, 1])];
        assert_eq!(solve(Shape::Declared, &all, &[W, ("b", &[10])]), solved);
        for (inputs, weights, says) in [
            (
                vec![("x", vec![3, 5])],
                vec![],
                "missing_weight t: weight `w`",
            ),
            (
                vec![],
                vec![("w", vec![5, 10])],
                "missing_input t: input `x`",
            ),
            (
                vec![("x", vec![3, 5]), ("z", vec![1])],
                vec![("w", vec![5, 10])],
                "unexpected_tensor",
            ),
            (
                vec![("x", vec![1, 3, 5])],
                vec![("w", vec![5, 10])],
                "rank_mismatch",
            ),
            (
                vec![("x", vec![3, 5])],
                vec![("w", vec![6, 10])],
                "dim_conflict t: dim 0 of `w` is 6, expected D = 5",
            ),
            (
                vec![("x", vec![3, 5])],
                vec![("w", vec![5, 11])],
                "dim_conflict t: dim 1 of `w` is 11, expected 2 * D = 10",
            ),
            (
                vec![("x", vec![3, 5]), ("mask", vec![3, 2])],
                vec![("w", vec![5, 10])],
                "expected 1 = 1",
            ),
            (
                vec![("x", vec![3, 5]), ("r", vec![1, 5])],
                vec![("w", vec![5, 10])],
                "dim 0 of `r` is 1, expected M = 3",
            ),
        ] {
            let slices =
                |v: &[(&'static str, Vec<usize>)]| -> Vec<(&'static str, &'static [usize])> {
                    v.iter().map(|(n, d)| (*n, &*d.clone().leak())).collect()
                };
            let found = solve(Shape::Declared, &slices(&inputs), &slices(&weights));
            assert!(found.contains(says), "{found}");
        }
    }

    #[test]
    fn hosts_have_leading_dims_and_broadcasts() {
        let solved = r#"{"D": 5, "M": 6}"#;
        for r in [&[2usize, 3, 5][..], &[2, 1, 5], &[1, 5], &[6, 5], &[3, 5]] {
            let found = solve(Shape::Host, &[("x", &[2, 3, 5]), ("r", r)], &[W]);
            assert_eq!(found, solved, "{r:?}");
        }
        for r in [&[4usize, 5][..], &[3, 3, 5], &[2, 3, 4]] {
            let found = solve(Shape::Host, &[("x", &[2, 3, 5]), ("r", r)], &[W]);
            assert!(found.starts_with("dim_conflict"), "{r:?}: {found}");
        }
        // Weights are never broadcast.
        let found = solve(Shape::Host, &[("x", &[2, 5])], &[("w", &[1, 10])]);
        assert!(found.starts_with("dim_conflict"), "{found}");
    }
}
