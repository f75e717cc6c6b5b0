//! Exact evaluation over facts somebody else looks up.

use std::fmt;

use super::{BinaryOp, Expr, Fact, UnaryOp};

/// What an expression is about: roles of one candidate and the sizes solved so far.
///
/// Role names are those of `roles`, and `self`, `parent`, `role` (the current one under `emit.per`).
pub trait Facts {
    /// A bare symbol.
    fn symbol(&self, name: &str) -> Option<Datum>;
    /// Whether the role exists here. A role of another alternative does not.
    fn has_role(&self, role: &str) -> bool;
    /// `kind`, `in`, `out`, `name` of a role.
    fn fact(&self, role: &str, fact: Fact) -> Option<Datum>;
    /// Stored dims of a role's parameter; `None` when it has none of that name.
    fn param_dims(&self, role: &str, param: &str) -> Option<Vec<usize>>;
    /// A scalar attribute; `None` when unset or null. A real number comes as its shortest text.
    fn attr(&self, role: &str, name: &str) -> Option<Datum>;
    /// Forward takes `cond`, `temb`, `emb` or `c`, or two or more positional arguments.
    fn conditioned(&self, role: &str) -> bool;
    /// Forward takes a parameter of this name. Where nobody has a forward, none does.
    fn takes(&self, _role: &str, _name: &str) -> bool {
        false
    }
}

/// Facts of sizes alone: symbols have a value, nothing else has.
pub struct OfSymbols<F>(pub F);

impl<F: Fn(&str) -> Option<u64>> Facts for OfSymbols<F> {
    fn symbol(&self, name: &str) -> Option<Datum> {
        i64::try_from((self.0)(name)?).ok().map(Datum::Int)
    }
    fn has_role(&self, _: &str) -> bool {
        false
    }
    fn fact(&self, _: &str, _: Fact) -> Option<Datum> {
        None
    }
    fn param_dims(&self, _: &str, _: &str) -> Option<Vec<usize>> {
        None
    }
    fn attr(&self, _: &str, _: &str) -> Option<Datum> {
        None
    }
    fn conditioned(&self, _: &str) -> bool {
        false
    }
}

/// A value of an expression.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Datum {
    /// A whole number.
    Int(i64),
    /// A word.
    Text(String),
    /// A truth value.
    Bool(bool),
    /// A list.
    List(Vec<Datum>),
}

impl Datum {
    fn kind(&self) -> &'static str {
        match self {
            Datum::Int(_) => "a number",
            Datum::Text(_) => "a word",
            Datum::Bool(_) => "a truth value",
            Datum::List(_) => "a list",
        }
    }
}

impl fmt::Display for Datum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Datum::Int(i) => write!(f, "{i}"),
            Datum::Text(s) => f.write_str(s),
            Datum::Bool(b) => write!(f, "{b}"),
            Datum::List(l) => {
                let parts: Vec<String> = l.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", parts.join(", "))
            }
        }
    }
}

/// Why an expression has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// A symbol, role, parameter or attribute is not there.
    #[error("`{what}` is not there")]
    Absent {
        /// Which.
        what: String,
    },
    /// An operator got something else than it takes.
    #[error("`{at}` takes {expected}, found {found}")]
    Type {
        /// Operator or part.
        at: String,
        /// Expected.
        expected: &'static str,
        /// Found.
        found: String,
    },
    /// `a / b` has a remainder.
    #[error("{a} / {b} leaves a remainder")]
    Remainder {
        /// Dividend.
        a: i64,
        /// Divisor.
        b: i64,
    },
    /// Division by zero.
    #[error("{a} is divided by zero")]
    ZeroDivisor {
        /// Dividend.
        a: i64,
    },
    /// The result does not fit.
    #[error("`{at}` leaves the 64-bit range")]
    Overflow {
        /// Where.
        at: String,
    },
}

/// The value of an expression.
pub fn eval(e: &Expr, facts: &dyn Facts) -> Result<Datum, EvalError> {
    let absent = || EvalError::Absent {
        what: e.to_string(),
    };
    match e {
        Expr::Int(i) => Ok(Datum::Int(*i)),
        Expr::Text(s) => Ok(Datum::Text(s.clone())),
        Expr::Bool(b) => Ok(Datum::Bool(*b)),
        Expr::List(items) => items
            .iter()
            .map(|i| eval(i, facts))
            .collect::<Result<_, _>>()
            .map(Datum::List),
        Expr::Symbol(s) => facts.symbol(s).ok_or_else(absent),
        Expr::Unary(UnaryOp::Not, a) => Ok(Datum::Bool(!eval_bool(a, facts)?)),
        Expr::Unary(UnaryOp::Neg, a) => eval_int(a, facts)?
            .checked_neg()
            .map(Datum::Int)
            .ok_or_else(|| EvalError::Overflow { at: e.to_string() }),
        Expr::Binary(op, a, b) => binary(*op, a, b, e, facts),
        Expr::If(a, b, c) => eval(if eval_bool(a, facts)? { b } else { c }, facts),
        Expr::Has(path) => Ok(Datum::Bool(has(path, facts))),
        Expr::Conditioned(r) => Ok(Datum::Bool(facts.has_role(r) && facts.conditioned(r))),
        Expr::Takes(r, names) => {
            let one = |n: &String| facts.takes(r, n);
            Ok(Datum::Bool(facts.has_role(r) && names.iter().any(one)))
        }
        Expr::Fact(r, fact) => facts.fact(r, *fact).ok_or_else(absent),
        Expr::ParamDim(r, p, i) => facts
            .param_dims(r, p)
            .and_then(|d| d.get(*i).copied())
            .map(|n| Datum::Int(n as i64))
            .ok_or_else(absent),
        Expr::ParamCount(r, p) => facts
            .param_dims(r, p)
            .ok_or_else(absent)?
            .iter()
            .try_fold(1i64, |n, d| {
                i64::try_from(*d).ok().and_then(|d| n.checked_mul(d))
            })
            .map(Datum::Int)
            .ok_or_else(|| EvalError::Overflow { at: e.to_string() }),
        Expr::Attr(r, a) => facts.attr(r, a).ok_or_else(absent),
    }
}

/// A value that must be a truth value.
pub fn eval_bool(e: &Expr, facts: &dyn Facts) -> Result<bool, EvalError> {
    match eval(e, facts)? {
        Datum::Bool(b) => Ok(b),
        other => Err(wrong(e, "a truth value", &other)),
    }
}

/// A value that must be a number.
pub fn eval_int(e: &Expr, facts: &dyn Facts) -> Result<i64, EvalError> {
    match eval(e, facts)? {
        Datum::Int(i) => Ok(i),
        other => Err(wrong(e, "a number", &other)),
    }
}

/// A value that must be a word.
pub fn eval_text(e: &Expr, facts: &dyn Facts) -> Result<String, EvalError> {
    match eval(e, facts)? {
        Datum::Text(s) => Ok(s),
        other => Err(wrong(e, "a word", &other)),
    }
}

fn wrong(e: &Expr, expected: &'static str, found: &Datum) -> EvalError {
    EvalError::Type {
        at: e.to_string(),
        expected,
        found: format!("{} ({found})", found.kind()),
    }
}

fn has(path: &str, facts: &dyn Facts) -> bool {
    let mut parts = path.splitn(3, '.');
    let role = parts.next().unwrap_or(path);
    facts.has_role(role)
        && match (parts.next(), parts.next()) {
            (None, _) => true,
            (Some("attr"), Some(name)) => facts.attr(role, name).is_some(),
            (Some(param), _) => facts.param_dims(role, param).is_some(),
        }
}

fn binary(
    op: BinaryOp,
    a: &Expr,
    b: &Expr,
    whole: &Expr,
    facts: &dyn Facts,
) -> Result<Datum, EvalError> {
    let overflow = || EvalError::Overflow {
        at: whole.to_string(),
    };
    match op {
        BinaryOp::And => Ok(Datum::Bool(eval_bool(a, facts)? && eval_bool(b, facts)?)),
        BinaryOp::Or => Ok(Datum::Bool(eval_bool(a, facts)? || eval_bool(b, facts)?)),
        BinaryOp::Eq | BinaryOp::Ne => {
            let (x, y) = (eval(a, facts)?, eval(b, facts)?);
            if x.kind() != y.kind() {
                return Err(wrong(b, x.kind(), &y));
            }
            Ok(Datum::Bool((x == y) == (op == BinaryOp::Eq)))
        }
        BinaryOp::In => match eval(b, facts)? {
            Datum::List(items) => Ok(Datum::Bool(items.contains(&eval(a, facts)?))),
            other => Err(wrong(b, "a list", &other)),
        },
        _ => {
            let (x, y) = (eval_int(a, facts)?, eval_int(b, facts)?);
            let number = |n: Option<i64>| n.map(Datum::Int).ok_or_else(overflow);
            match op {
                BinaryOp::Add => number(x.checked_add(y)),
                BinaryOp::Sub => number(x.checked_sub(y)),
                BinaryOp::Mul => number(x.checked_mul(y)),
                BinaryOp::Div | BinaryOp::Rem if y == 0 => Err(EvalError::ZeroDivisor { a: x }),
                BinaryOp::Rem => number(x.checked_rem(y)),
                BinaryOp::Div => {
                    if x.checked_rem(y).ok_or_else(overflow)? != 0 {
                        return Err(EvalError::Remainder { a: x, b: y });
                    }
                    number(x.checked_div(y))
                }
                BinaryOp::Lt => Ok(Datum::Bool(x < y)),
                BinaryOp::Le => Ok(Datum::Bool(x <= y)),
                BinaryOp::Gt => Ok(Datum::Bool(x > y)),
                _ => Ok(Datum::Bool(x >= y)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Two;

    impl Facts for Two {
        fn symbol(&self, name: &str) -> Option<Datum> {
            match name {
                "D" => Some(Datum::Int(12)),
                "big" => Some(Datum::Int(i64::MAX)),
                _ => None,
            }
        }
        fn has_role(&self, role: &str) -> bool {
            role == "q"
        }
        fn fact(&self, role: &str, fact: Fact) -> Option<Datum> {
            self.has_role(role).then(|| match fact {
                Fact::Kind => Datum::Text("linear".into()),
                Fact::In => Datum::Int(12),
                Fact::Out => Datum::Int(5),
                Fact::Name => Datum::Text("q_proj".into()),
            })
        }
        fn param_dims(&self, role: &str, param: &str) -> Option<Vec<usize>> {
            (self.has_role(role) && param == "weight").then(|| vec![5, 12])
        }
        fn attr(&self, role: &str, name: &str) -> Option<Datum> {
            (self.has_role(role) && name == "heads").then_some(Datum::Int(3))
        }
        fn conditioned(&self, _: &str) -> bool {
            true
        }
        fn takes(&self, _: &str, name: &str) -> bool {
            name == "temb"
        }
    }

    fn run(text: &str) -> Result<Datum, EvalError> {
        eval(&Expr::parse(text).expect(text), &Two)
    }

    #[test]
    fn facts_and_arithmetic() {
        let yes = |t: &str| assert_eq!(run(t), Ok(Datum::Bool(true)), "{t}");
        yes("q.kind == 'linear' and q.in == D");
        yes("q.weight.dims[0] == q.out and q.weight.count == 60");
        yes("D / q.attr.heads == 4 and D % 5 == 2");
        yes("has(q) and has(q.weight) and not has(q.bias) and not has(k) and not has(k.weight)");
        yes("has(q.attr.heads) and not has(q.attr.scale) and not has(k.attr.heads)");
        yes("conditioned(q) and not conditioned(k)");
        yes("takes(q, 'x', 'temb') and not takes(q, 'x') and not takes(k, 'temb')");
        yes("q.name in ['q_proj', 'q'] and not (q.out in [4, 6])");
        yes("if has(k) then k.in == 1 else 2 * q.in == 24");
        yes("has(k) and k.in == 1 or D >= 12 and D <= 12 and D > 11 and D < 13 and D != 5");
    }

    #[test]
    fn failures_are_exact() {
        assert_eq!(run("D / 5"), Err(EvalError::Remainder { a: 12, b: 5 }));
        assert_eq!(run("D / (D - 12)"), Err(EvalError::ZeroDivisor { a: 12 }));
        assert_eq!(run("D % 0"), Err(EvalError::ZeroDivisor { a: 12 }));
        for over in [
            "big + 1",
            "big * 2",
            "-big - 2",
            "(-big - 1) / -1",
            "-(-big - 1)",
        ] {
            assert!(
                matches!(run(over), Err(EvalError::Overflow { .. })),
                "{over}"
            );
        }
        for absent in [
            "k.in",
            "F",
            "q.bias.count",
            "q.weight.dims[2]",
            "q.attr.scale",
        ] {
            assert!(
                matches!(run(absent), Err(EvalError::Absent { .. })),
                "{absent}"
            );
        }
        for wrong in [
            "q.kind == 3",
            "q.kind + 1",
            "not D",
            "D and true",
            "1 in 2",
            "'a' < 'b'",
        ] {
            assert!(matches!(run(wrong), Err(EvalError::Type { .. })), "{wrong}");
        }
    }
}
