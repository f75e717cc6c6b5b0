//! Sizes of symbols: numbers, numbers of a host's configuration, and expressions over them.

use std::collections::BTreeMap;

use structures_catalog::document::Node;
use structures_catalog::expr::{eval_int, Expr, OfSymbols};

use crate::error::BindingError;
use crate::reader::Reader;
use crate::rule::Rule;

/// A size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Size {
    /// Written out.
    Number(u64),
    /// `@hidden_size`, a number of the host's configuration.
    Config(String),
}

/// Sizes that are known.
pub type Sizes = BTreeMap<String, u64>;

/// Larger than any dimension of a tensor, small enough that products of two stay in range.
const LARGEST: u64 = 1 << 40;

/// A number from 1, or `@name` where a host's configuration may be asked.
pub(crate) fn read(r: &Reader<'_>, node: &Node<'_>, config: bool) -> Result<Size, BindingError> {
    let expected = match config {
        true => "a whole number from 1, or @NAME of the host's configuration",
        false => "a whole number from 1",
    };
    let bad = |found: String| {
        let what = format!("expected {expected}, found {found}");
        r.fail(node, Rule::Dims, what)
    };
    if let Some(text) = node.value().as_str() {
        let text = text.trim();
        return match text.strip_prefix('@') {
            Some(name) if config && is_word(name) => Ok(Size::Config(name.into())),
            _ => Err(bad(format!("`{text}`"))),
        };
    }
    match r.under(Rule::Dims, node.count())? {
        n if (1..=LARGEST).contains(&n) => Ok(Size::Number(n)),
        n => Err(bad(n.to_string())),
    }
}

fn is_word(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The rows `[from, to)` of a stored tensor, as expressions over the binding's dims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// First row.
    pub from: Expr,
    /// The row after the last.
    pub to: Expr,
}

impl Rows {
    /// `[EXPR, EXPR]`, whose symbols are `dims` of the binding.
    pub(crate) fn read(
        r: &Reader<'_>,
        node: &Node<'_>,
        known: &dyn Fn(&str) -> bool,
    ) -> Result<Rows, BindingError> {
        let items = r.items(node, Rule::Weights)?;
        let [from, to] = items.as_slice() else {
            let what = format!("expected [FROM, TO], found {} elements", items.len());
            return Err(r.fail(node, Rule::Weights, what));
        };
        let expr = |n: &Node<'_>| {
            let text = match n.value().as_u64() {
                Some(number) => number.to_string(),
                None => r.text(n, Rule::Weights)?,
            };
            let expr = Expr::parse(&text).map_err(|e| r.fail(n, Rule::Weights, e.to_string()))?;
            if let Some(role) = expr.roles().first() {
                let what = format!("expected numbers and dims of this binding, found `{role}.`");
                return Err(r.fail(n, Rule::Weights, what));
            }
            match expr.symbols().iter().find(|s| !known(s)) {
                None => Ok(expr),
                Some(s) => {
                    let what = format!("expected dims of this binding, found `{s}`");
                    Err(r.fail(n, Rule::Weights, what))
                }
            }
        };
        Ok(Rows {
            from: expr(from)?,
            to: expr(to)?,
        })
    }

    /// The range under known sizes, or what is wrong with it.
    pub fn range(&self, sizes: &Sizes) -> Result<(usize, usize), String> {
        let one = |e: &Expr| match eval_int(e, &OfSymbols(|name: &str| sizes.get(name).copied())) {
            Ok(n) => usize::try_from(n).map_err(|_| format!("expected a row, {e} is {n}")),
            Err(why) => Err(format!("expected a row, {e}: {why}")),
        };
        let (from, to) = (one(&self.from)?, one(&self.to)?);
        if from < to {
            return Ok((from, to));
        }
        Err(format!(
            "expected FROM below TO, found {from} ({}) and {to} ({})",
            self.from, self.to
        ))
    }

    /// Symbols it reads.
    pub fn symbols(&self) -> Vec<String> {
        [self.from.symbols(), self.to.symbols()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_what_is_none() {
        let sizes = Sizes::from([("F".into(), 8), ("Z".into(), 1)]);
        let rows = |from: &str, to: &str| {
            Rows {
                from: Expr::parse(from).expect("from"),
                to: Expr::parse(to).expect("to"),
            }
            .range(&sizes)
        };
        assert_eq!(rows("0", "F"), Ok((0, 8)));
        assert_eq!(rows("F", "2*F"), Ok((8, 16)));
        for (from, to, says) in [
            ("F", "F", "FROM below TO"),
            ("F", "0", "FROM below TO"),
            ("0-1", "F", "expected a row, 0 - 1 is -1"),
            ("0", "F/(Z-1)", "divi"),
            ("0", "F/3", "remainder"),
        ] {
            let found = rows(from, to).expect_err("no range");
            assert!(found.contains(says), "{from} {to}: {found}");
        }
    }
}
