//! Sizes and params that one combination is tried with: small, different where they may be, admitted by the entry.

use std::collections::{BTreeMap, BTreeSet};

use structures_graph::ops::AttrDefault;
use structures_graph::{AttrValue, Attrs, OpKind};

use crate::constraint::{first_unmet, Known};
use crate::error::CatalogError;
use crate::expr::{eval_int, BinaryOp, Expr};
use crate::solve::{sizes, Dims};
use crate::spec::{Constraint, DimExpr, Plain, PlainAttr, Source, Spec};

// Pairwise different, so that a swapped dim cannot go unnoticed; all but the first even, because halves are common.
const USUAL: [usize; 16] = [
    3, 10, 14, 6, 22, 26, 34, 38, 46, 58, 62, 74, 82, 86, 94, 106,
];
// What else a size may be, when constraints ask for it.
const OTHERS: [usize; 17] = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 32, 3, 5, 7, 9, 1];
// Largest size an equation may ask for.
const MAX_SIZE: usize = 4096;
// Sizes tried before the search gives up.
const MAX_STEPS: usize = 100_000;

/// Values of the captured params.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// What an op has when nobody writes the attribute.
    Default,
    /// Away from that, so that a reference which ignores a param is found out.
    Altered,
}

/// Captured params of a plain graph; those that are sizes come from the sizes.
pub(super) fn params(plain: &Plain, setting: Setting) -> Attrs {
    let mut params = Attrs::new();
    let altered = setting == Setting::Altered;
    for op in &plain.ops {
        for (name, attr) in &op.attrs {
            let PlainAttr::Capture(param) = attr else {
                continue;
            };
            if plain.symbols.values().any(|p| p == param) {
                continue;
            }
            let counts = name == "axis" || name == "axes";
            let default = op.kind.spec().attr(name).map(|a| a.default);
            let value = match default {
                Some(AttrDefault::Number(n)) if altered && !counts => {
                    AttrValue::Float(0.5 * n + 0.25)
                }
                Some(AttrDefault::Number(n)) => AttrValue::Float(n),
                Some(AttrDefault::Flag(b)) => AttrValue::Flag(b != altered),
                Some(AttrDefault::Word(w)) => AttrValue::Word(w.into()),
                Some(AttrDefault::Required) if altered => AttrValue::Float(0.25),
                Some(AttrDefault::Required) => AttrValue::Float(1e-5),
                Some(AttrDefault::InvSqrtLastDim) if altered => AttrValue::Float(0.375),
                Some(AttrDefault::Absent) if altered => AttrValue::Int(2),
                _ => continue,
            };
            params.insert(param.clone(), value);
        }
    }
    params
}

/// Sizes of all symbols. `None` where a constraint that reads no size already refuses the combination.
pub(super) fn solve(
    spec: &Spec,
    plain: &Plain,
    sources: &[Source],
    params: &Attrs,
    wanted: &BTreeMap<String, usize>,
) -> Result<Option<Dims>, CatalogError> {
    let symbols = symbols(spec, plain, sources);
    let present = |n: &str| sources.iter().any(|s| s.name == n);
    let mut needs: Vec<Need> = Vec::new();
    for c in &plain.constraints {
        let read = reads(&c.that, &symbols, &spec.symbols);
        let nothing = Dims::new();
        if read.is_empty() && !met(c, &nothing, params, spec, &present) {
            return Ok(None);
        }
        needs.push(Need::Holds(c, read));
    }
    for e in derived(plain, sources) {
        // Over a symbol of something absent, no value here has it.
        if e.symbols().iter().all(|s| symbols.contains(s)) {
            let read = reads(&e, &symbols, &spec.symbols);
            needs.push(Need::Positive(e, read));
        }
    }
    let mut preferred = BTreeMap::new();
    heads(plain, &mut preferred, &mut needs);
    splits(plain, &symbols, &mut needs);
    preferred.extend(wanted.iter().map(|(s, n)| (s.clone(), *n)));
    let mut search = Search {
        spec,
        params,
        present: &present,
        symbols: &symbols,
        needs: &needs,
        preferred,
        dims: Dims::new(),
        steps: 0,
    };
    match search.place(0) {
        None => Ok(Some(search.dims)),
        Some(_) => Err(CatalogError::Evaluation {
            structure: spec.name.clone(),
            at: "sizes".into(),
            reason: format!(
                "no small sizes of {} satisfy the constraints and derived dims ({} tried)",
                symbols.join(", "),
                search.steps
            ),
        }),
    }
}

enum Need<'a> {
    Holds(&'a Constraint, Vec<String>),
    Positive(Expr, Vec<String>),
    // The first is a multiple of the second.
    Multiple([String; 2]),
    // The parts make up the whole.
    Sum(Vec<Expr>, Expr, Vec<String>),
}

impl Need<'_> {
    fn read(&self) -> &[String] {
        match self {
            Need::Holds(_, read) | Need::Positive(_, read) | Need::Sum(_, _, read) => read,
            Need::Multiple(pair) => pair,
        }
    }
}

// Symbols that get a size: those of what is there, and those that params give.
fn symbols(spec: &Spec, plain: &Plain, sources: &[Source]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let of_sources = sources
        .iter()
        .flat_map(|s| &s.dims)
        .filter_map(|d| match d {
            DimExpr::Symbol(s) => Some(s.clone()),
            _ => None,
        });
    let views = plain
        .ops
        .iter()
        .flat_map(|o| o.views.iter().flatten().flatten());
    let listed = views
        .flat_map(DimExpr::symbols)
        .filter(|s| spec.symbols.contains_key(s));
    for s in of_sources.chain(listed).chain(spec.symbols.keys().cloned()) {
        if !all.contains(&s) {
            all.push(s);
        }
    }
    all
}

// Searched symbols an expression depends on, also by the name of the param one of them is.
fn reads(e: &Expr, symbols: &[String], params: &indexmap::IndexMap<String, String>) -> Vec<String> {
    let mut named = e.symbols();
    e.walk(&mut |part| {
        if let Expr::Has(name) = part {
            named.push(name.clone());
        }
    });
    let all = symbols.iter().filter(|s| {
        let param = params.get(*s);
        named.contains(s) || param.is_some_and(|p| named.contains(p))
    });
    all.cloned().collect()
}

fn derived(plain: &Plain, sources: &[Source]) -> Vec<Expr> {
    let ranks: BTreeMap<&str, usize> = sources
        .iter()
        .map(|s| (s.name.as_str(), s.dims.len()))
        .collect();
    let values = plain.value_dims_of(&|n| ranks.get(n).copied());
    let attrs = plain.ops.iter().flat_map(|o| o.attrs.values());
    let computed = attrs.filter_map(|a| match a {
        PlainAttr::Dims(d) => Some(d.exprs().to_vec()),
        _ => None,
    });
    let mut all: Vec<Expr> = Vec::new();
    let of_values = values.into_values().flatten().map(|d| d.expr());
    for e in of_values.chain(computed.flatten()) {
        if !matches!(e, Expr::Int(_) | Expr::Symbol(_)) && !all.contains(&e) {
            all.push(e);
        }
    }
    all
}

// Heads of an attention are a multiple of its key heads.
fn heads(plain: &Plain, preferred: &mut BTreeMap<String, usize>, needs: &mut Vec<Need>) {
    let values = plain.value_dims();
    for op in plain.ops.iter().filter(|o| o.kind == OpKind::Attention) {
        let heads = |k: usize| match values.get(op.inputs.get(k)?.as_ref()?)?.get(1)? {
            DimExpr::Symbol(s) => Some(s.clone()),
            _ => None,
        };
        if let (Some(q), Some(k)) = (heads(0), heads(1)) {
            preferred.insert(q.clone(), if q == k { 2 } else { 6 });
            preferred.insert(k.clone(), 2);
            needs.push(Need::Multiple([q, k]));
        }
    }
}

fn splits<'a>(plain: &'a Plain, symbols: &[String], needs: &mut Vec<Need<'a>>) {
    let values = plain.value_dims();
    for op in plain.ops.iter().filter(|o| o.kind == OpKind::Split) {
        let Some(PlainAttr::Dims(sizes)) = op.attrs.get("sizes") else {
            continue;
        };
        let of = op.inputs.first().and_then(Option::as_ref);
        let dims = of.and_then(|n| values.get(n));
        let at = match op.attrs.get("axis") {
            Some(PlainAttr::Equal(AttrValue::Int(a))) => *a,
            _ => -1,
        };
        let whole = dims.and_then(|d| {
            let at = if at < 0 { at + d.len() as i64 } else { at };
            d.get(usize::try_from(at).ok()?)
        });
        let Some(whole) = whole else { continue };
        let mut named = whole.symbols();
        named.extend(sizes.exprs().iter().flat_map(Expr::symbols));
        let read = symbols
            .iter()
            .filter(|s| named.contains(s))
            .cloned()
            .collect();
        needs.push(Need::Sum(sizes.exprs().to_vec(), whole.expr(), read));
    }
}

fn met(
    c: &Constraint,
    dims: &Dims,
    params: &Attrs,
    spec: &Spec,
    present: &dyn Fn(&str) -> bool,
) -> bool {
    // A param that is a size has the size's name too.
    let size = |name: &str| {
        let symbol = spec.symbols.iter().find(|(_, p)| *p == name);
        let own = dims.get(name).or_else(|| dims.get(symbol?.0));
        own.map(|n| *n as u64)
    };
    let known = Known {
        size: &size,
        params,
        present,
    };
    first_unmet(std::slice::from_ref(c), &known).is_none()
}

// Depth first, each need judged as soon as its symbols have sizes.
struct Search<'a> {
    spec: &'a Spec,
    params: &'a Attrs,
    present: &'a dyn Fn(&str) -> bool,
    symbols: &'a [String],
    needs: &'a [Need<'a>],
    preferred: BTreeMap<String, usize>,
    dims: Dims,
    steps: usize,
}

impl Search<'_> {
    // `None` when all symbols have sizes; else the earlier symbols that stand in the way, so that the search goes back
    // to one of them and not through all between.
    fn place(&mut self, at: usize) -> Option<BTreeSet<String>> {
        let Some(symbol) = self.symbols.get(at).cloned() else {
            let open = self.needs.iter().find(|n| !self.holds(n));
            return open.map(|n| n.read().iter().cloned().collect());
        };
        let mut blame = BTreeSet::new();
        for size in self.candidates(at, &symbol) {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Some(BTreeSet::new());
            }
            self.dims.insert(symbol.clone(), size);
            let ready = |n: &&Need| {
                n.read().contains(&symbol) && n.read().iter().all(|s| self.dims.contains_key(s))
            };
            let broken = self.needs.iter().filter(ready).find(|n| !self.holds(n));
            if let Some(need) = broken {
                blame.extend(need.read().iter().cloned());
                continue;
            }
            let deeper = self.place(at + 1)?;
            if !deeper.contains(&symbol) {
                self.dims.remove(&symbol);
                return Some(deeper);
            }
            blame.extend(deeper);
        }
        self.dims.remove(&symbol);
        blame.remove(&symbol);
        Some(blame)
    }

    // What an equation says first; then the usual size, then others, those no symbol has yet before those one has.
    fn candidates(&self, at: usize, symbol: &str) -> Vec<usize> {
        let first = self.preferred.get(symbol).copied();
        let first = first.unwrap_or(USUAL[at % USUAL.len()]);
        let used: Vec<usize> = self.symbols[..at]
            .iter()
            .filter_map(|s| self.dims.get(s).copied())
            .collect();
        let (again, fresh): (Vec<usize>, Vec<usize>) =
            OTHERS.into_iter().partition(|n| used.contains(n));
        let mut all: Vec<usize> = Vec::new();
        for n in self
            .equal_to(symbol)
            .into_iter()
            .chain([first])
            .chain(fresh)
            .chain(again)
        {
            if !all.contains(&n) {
                all.push(n);
            }
        }
        all
    }

    // Sizes that constraints equate the symbol with, as far as the rest of the equation is known.
    fn equal_to(&self, symbol: &str) -> Vec<usize> {
        let mut found = Vec::new();
        for need in self.needs {
            let Need::Holds(c, _) = need else { continue };
            c.that.walk(&mut |e| {
                let Expr::Binary(BinaryOp::Eq, a, b) = e else {
                    return;
                };
                for (one, other) in [(a, b), (b, a)] {
                    let names = matches!(&**one, Expr::Symbol(s) if s == symbol);
                    let size = eval_int(other, &sizes(&self.dims));
                    let size = size.ok().and_then(|n| usize::try_from(n).ok());
                    if let (true, Some(n @ 1..=MAX_SIZE)) = (names, size) {
                        found.push(n);
                    }
                }
            });
        }
        found
    }

    fn holds(&self, need: &Need) -> bool {
        let sizes = sizes(&self.dims);
        match need {
            Need::Holds(c, _) => met(c, &self.dims, self.params, self.spec, self.present),
            Need::Positive(e, _) => eval_int(e, &sizes).is_ok_and(|n| n > 0),
            Need::Multiple([a, b]) => match (self.dims.get(a), self.dims.get(b)) {
                (Some(a), Some(b)) => *b > 0 && a % b == 0,
                _ => true,
            },
            Need::Sum(parts, whole, _) => {
                let parts: Result<Vec<i64>, _> =
                    parts.iter().map(|e| eval_int(e, &sizes)).collect();
                match (parts, eval_int(whole, &sizes)) {
                    (Ok(parts), Ok(whole)) => parts.iter().sum::<i64>() == whole,
                    _ => false,
                }
            }
        }
    }
}
