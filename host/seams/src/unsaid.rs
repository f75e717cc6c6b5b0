//! What headers alone leave open: an attribute nobody wrote down, what a forward takes, a module without parameters.
//!
//! In a tree made of names and shapes, the absence of such a fact says nothing. A candidate that only such a fact
//! keeps from being a structure is not passed over in silence; who knows the whole tree says what it is.

use structures_catalog::expr::{eval_bool, BinaryOp, Expr, Fact, Facts, UnaryOp};

use crate::roles::Candidate;

/// Kinds that a module without parameters, or with vectors alone, cannot have.
const WITH_WEIGHT: [&str; 3] = ["linear", "conv3d", "embedding"];

/// Truth where not all facts are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Truth {
    Yes,
    No,
    /// These facts would decide.
    Open(Vec<String>),
}

impl Truth {
    fn not(self) -> Truth {
        match self {
            Truth::Yes => Truth::No,
            Truth::No => Truth::Yes,
            open => open,
        }
    }

    fn and(self, other: Truth) -> Truth {
        match (self, other) {
            (Truth::No, _) | (_, Truth::No) => Truth::No,
            (Truth::Yes, x) | (x, Truth::Yes) => x,
            (Truth::Open(mut a), Truth::Open(b)) => {
                a.extend(b.into_iter().filter(|f| !a.contains(f)).collect::<Vec<_>>());
                Truth::Open(a)
            }
        }
    }
}

impl From<bool> for Truth {
    fn from(holds: bool) -> Truth {
        match holds {
            true => Truth::Yes,
            false => Truth::No,
        }
    }
}

/// Whether an expression holds here. What cannot be computed for another reason than an open fact does not hold.
pub(crate) fn truth(e: &Expr, here: &Candidate<'_>) -> Truth {
    match e {
        Expr::Unary(UnaryOp::Not, a) => truth(a, here).not(),
        Expr::Binary(BinaryOp::And, a, b) => truth(a, here).and(truth(b, here)),
        Expr::Binary(BinaryOp::Or, a, b) => truth(a, here).not().and(truth(b, here).not()).not(),
        Expr::If(a, b, c) => match truth(a, here) {
            Truth::Yes => truth(b, here),
            Truth::No => truth(c, here),
            open => match (truth(b, here), truth(c, here)) {
                (x, y) if x == y => x,
                _ => open,
            },
        },
        Expr::Has(path) if here.unseen(path) => Truth::Yes,
        Expr::Binary(BinaryOp::Eq, a, b) if cannot_be(a, b, here) => Truth::No,
        _ => match open_facts(e, here) {
            open if open.is_empty() => eval_bool(e, here).unwrap_or(false).into(),
            open => Truth::Open(open),
        },
    }
}

/// `r.kind == 'linear'` of a module without parameters, or with vectors alone.
fn cannot_be(a: &Expr, b: &Expr, here: &Candidate<'_>) -> bool {
    matches!((a, b), (Expr::Fact(r, Fact::Kind), Expr::Text(kind))
        if (here.unseen(r) || unsaid(r, here)) && WITH_WEIGHT.contains(&kind.as_str()))
}

/// Whether the kind of a module with a weight is not known.
fn unsaid(role: &str, here: &Candidate<'_>) -> bool {
    let module = here.module(role).filter(|_| here.tree.headers_only);
    module.is_some_and(|m| m.kind.is_none() && m.params.contains_key("weight"))
}

/// The facts an expression reads that a tree from headers cannot have.
pub(crate) fn open_facts(e: &Expr, here: &Candidate<'_>) -> Vec<String> {
    let mut open = Vec::new();
    if !here.tree.headers_only {
        return open;
    }
    let silent = |role: &str| {
        let module = here.module(role);
        here.unseen(role) || module.is_some_and(|m| m.forward.is_none())
    };
    let there = |role: &str| here.unseen(role) || here.module(role).is_some();
    e.walk(&mut |part| {
        let is = match part {
            Expr::Conditioned(r) | Expr::Takes(r, _) => silent(r),
            Expr::Attr(r, name) => there(r) && here.attr(r, name).is_none(),
            Expr::Fact(r, Fact::Kind) => here.unseen(r) || unsaid(r, here),
            Expr::Fact(r, _) => here.unseen(r),
            Expr::Has(path) => match path.split_once(".attr.") {
                Some((r, name)) => there(r) && here.attr(r, name).is_none(),
                None => false,
            },
            _ => false,
        };
        let text = match part {
            Expr::Has(path) => path.clone(),
            part => part.to_string(),
        };
        if is && !open.contains(&text) {
            open.push(text);
        }
    });
    open
}

/// Roles whose parameters the expressions ask about: their documents know them without any.
pub(crate) fn asked_for_parameters<'e>(all: impl Iterator<Item = &'e Expr>) -> Vec<String> {
    let mut asked: Vec<String> = Vec::new();
    for e in all {
        e.walk(&mut |part| {
            let Expr::Has(path) = part else { return };
            match path.split_once('.') {
                Some((role, rest)) if !rest.starts_with("attr.") => asked.push(role.into()),
                _ => {}
            }
        });
    }
    asked
}

/// Roles that the expressions hold to a kind with a weight: without parameters they are none.
pub(crate) fn asked_for_weights<'e>(all: impl Iterator<Item = &'e Expr>) -> Vec<String> {
    fn of(e: &Expr, asked: &mut Vec<String>) {
        match e {
            Expr::Binary(BinaryOp::And, a, b) => {
                of(a, asked);
                of(b, asked);
            }
            Expr::Binary(BinaryOp::Eq, a, b) => {
                if let (Expr::Fact(role, Fact::Kind), Expr::Text(kind)) = (&**a, &**b) {
                    if WITH_WEIGHT.contains(&kind.as_str()) {
                        asked.push(role.clone());
                    }
                }
            }
            _ => {}
        }
    }
    let mut asked = Vec::new();
    all.for_each(|e| of(e, &mut asked));
    asked
}
