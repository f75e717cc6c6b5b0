//! EXPR of `slots`: integers, strings, lists, symbols, exact arithmetic, comparisons, role facts.
//!
//! Small on purpose: an entry states facts about a module tree and computes sizes from them; it never loops, calls
//! or names a device. Parsing is here once ([`Expr::parse`]); the tree side of evaluation is the [`Facts`] trait.

use std::fmt;

mod eval;
mod parse;

pub use eval::{eval, eval_bool, eval_int, eval_text, Datum, EvalError, Facts, OfSymbols};
pub use parse::ParseError;

/// A parsed expression.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Expr {
    /// A whole number.
    Int(i64),
    /// A quoted string.
    Text(String),
    /// `true` or `false`.
    Bool(bool),
    /// `[a, b]`
    List(Vec<Expr>),
    /// A bare name.
    Symbol(String),
    /// A unary operator.
    Unary(UnaryOp, Box<Expr>),
    /// A binary operator.
    Binary(BinaryOp, Box<Expr>, Box<Expr>),
    /// `if a then b else c`
    If(Box<Expr>, Box<Expr>, Box<Expr>),
    /// `has(role)` or `has(role.param)`
    Has(String),
    /// `conditioned(role)`
    Conditioned(String),
    /// `takes(role, 'a', 'b')`
    Takes(String, Vec<String>),
    /// `role.kind`, `.in`, `.out`, `.name`
    Fact(String, Fact),
    /// `role.PARAM.dims[i]`
    ParamDim(String, String, usize),
    /// `role.PARAM.count`
    ParamCount(String, String),
    /// `role.attr.NAME`
    Attr(String, String),
}

/// Facts of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Fact {
    Kind,
    In,
    Out,
    Name,
}

/// Unary operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum UnaryOp {
    Not,
    Neg,
}

/// Binary operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum BinaryOp {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    And,
    Or,
}

impl Expr {
    /// Parses one expression; the whole text must be used.
    pub fn parse(text: &str) -> Result<Expr, ParseError> {
        parse::parse(text)
    }

    /// Calls `see` on this expression and every part of it.
    pub fn walk(&self, see: &mut dyn FnMut(&Expr)) {
        see(self);
        match self {
            Expr::List(items) => items.iter().for_each(|e| e.walk(see)),
            Expr::Unary(_, a) => a.walk(see),
            Expr::Binary(_, a, b) => {
                a.walk(see);
                b.walk(see);
            }
            Expr::If(a, b, c) => {
                a.walk(see);
                b.walk(see);
                c.walk(see);
            }
            _ => {}
        }
    }

    /// Roles this expression asks about (`has(gate.bias)` asks about `gate`).
    pub fn roles(&self) -> Vec<String> {
        let mut roles = Vec::new();
        self.walk(&mut |e| {
            let role = match e {
                Expr::Has(path) => path.split('.').next().unwrap_or(path),
                Expr::Conditioned(r)
                | Expr::Takes(r, _)
                | Expr::Fact(r, _)
                | Expr::ParamDim(r, _, _)
                | Expr::ParamCount(r, _)
                | Expr::Attr(r, _) => r,
                _ => return,
            };
            if !roles.iter().any(|r| r == role) {
                roles.push(role.to_string());
            }
        });
        roles
    }

    /// A divisor in it that is zero whatever the symbols are.
    pub fn zero_divisor(&self) -> Option<String> {
        let mut found = None;
        self.walk(&mut |e| {
            if let Expr::Binary(BinaryOp::Div | BinaryOp::Rem, _, divisor) = e {
                if eval_int(divisor, &OfSymbols(|_: &str| None)) == Ok(0) {
                    found.get_or_insert_with(|| e.to_string());
                }
            }
        });
        found
    }

    /// Bare symbols it reads.
    pub fn symbols(&self) -> Vec<String> {
        let mut symbols = Vec::new();
        self.walk(&mut |e| {
            if let Expr::Symbol(s) = e {
                if !symbols.contains(s) {
                    symbols.push(s.clone());
                }
            }
        });
        symbols
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fact::Kind => "kind",
            Fact::In => "in",
            Fact::Out => "out",
            Fact::Name => "name",
        })
    }
}

impl fmt::Display for BinaryOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BinaryOp::Add => "+",
            BinaryOp::Sub => "-",
            BinaryOp::Mul => "*",
            BinaryOp::Div => "/",
            BinaryOp::Rem => "%",
            BinaryOp::Eq => "==",
            BinaryOp::Ne => "!=",
            BinaryOp::Lt => "<",
            BinaryOp::Le => "<=",
            BinaryOp::Gt => ">",
            BinaryOp::Ge => ">=",
            BinaryOp::In => "in",
            BinaryOp::And => "and",
            BinaryOp::Or => "or",
        })
    }
}

/// Written back so that parsing gives the same expression: operands are parenthesised unless they are atoms.
impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expr::Int(i) => write!(f, "{i}"),
            Expr::Text(s) => write!(f, "'{s}'"),
            Expr::Bool(b) => write!(f, "{b}"),
            Expr::List(items) => {
                f.write_str("[")?;
                for (i, e) in items.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    write!(f, "{e}")?;
                }
                f.write_str("]")
            }
            Expr::Symbol(s) => f.write_str(s),
            Expr::Unary(UnaryOp::Not, a) => write!(f, "not {}", Atom(a)),
            Expr::Unary(UnaryOp::Neg, a) => write!(f, "-{}", Atom(a)),
            Expr::Binary(op, a, b) => write!(f, "{} {op} {}", Atom(a), Atom(b)),
            Expr::If(a, b, c) => write!(f, "if {} then {} else {}", Atom(a), Atom(b), Atom(c)),
            Expr::Has(p) => write!(f, "has({p})"),
            Expr::Conditioned(r) => write!(f, "conditioned({r})"),
            Expr::Takes(r, names) => write!(f, "takes({r}, '{}')", names.join("', '")),
            Expr::Fact(r, fact) => write!(f, "{r}.{fact}"),
            Expr::ParamDim(r, p, i) => write!(f, "{r}.{p}.dims[{i}]"),
            Expr::ParamCount(r, p) => write!(f, "{r}.{p}.count"),
            Expr::Attr(r, a) => write!(f, "{r}.attr.{a}"),
        }
    }
}

struct Atom<'a>(&'a Expr);

impl fmt::Display for Atom<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Expr::Unary(..) | Expr::Binary(..) | Expr::If(..) => write!(f, "({})", self.0),
            e => write!(f, "{e}"),
        }
    }
}
