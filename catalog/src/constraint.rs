//! Constraints of an entry against known sizes and params.
//!
//! One rule for two askers. A call knows every size, so what a constraint asks for must be there; a seam in a host
//! graph may leave symbols open (a length is one), and a constraint over them is not judged.

use std::collections::BTreeMap;

use structures_graph::{AttrValue, Attrs};

use crate::expr::{eval_bool, Datum, EvalError, Expr, Fact, Facts};
use crate::spec::Constraint;

/// What is known where constraints are judged.
pub struct Known<'a> {
    /// Size of a dim symbol.
    pub size: &'a dyn Fn(&str) -> Option<u64>,
    /// Params by name.
    pub params: &'a Attrs,
    /// Whether an input or a slot is there.
    pub present: &'a dyn Fn(&str) -> bool,
}

/// A constraint that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmet {
    /// Its code.
    pub code: String,
    /// What had to be true.
    pub that: String,
    /// The values it read, or why it has none.
    pub found: String,
}

/// The first constraint that does not hold; one that reads what is not there fails too.
pub fn first_unmet(constraints: &[Constraint], known: &Known) -> Option<Unmet> {
    constraints.iter().find_map(|c| unmet(c, known, false))
}

/// The same, leaving out those that read what is not known.
pub fn first_broken(constraints: &[Constraint], known: &Known) -> Option<Unmet> {
    constraints.iter().find_map(|c| unmet(c, known, true))
}

fn unmet(c: &Constraint, known: &Known, open: bool) -> Option<Unmet> {
    let found = match eval_bool(&c.that, known) {
        Ok(true) => return None,
        Ok(false) => known.read_by(&c.that),
        Err(EvalError::Absent { .. }) if open => return None,
        Err(e) => format!("{e} ({})", known.read_by(&c.that)),
    };
    Some(Unmet {
        code: c.code.clone(),
        that: c.that.to_string(),
        found,
    })
}

impl Constraint {
    /// Whether it applies under these axes.
    pub fn applies(&self, axes: &BTreeMap<String, String>) -> bool {
        let holds = |(axis, values): (&String, &Vec<String>)| {
            axes.get(axis).is_some_and(|v| values.contains(v))
        };
        self.when.iter().all(holds)
    }
}

impl Known<'_> {
    fn read_by(&self, e: &Expr) -> String {
        let one = |s: &String| match self.symbol(s) {
            Some(v) => format!("{s} = {v}"),
            None => format!("no {s}"),
        };
        let all: Vec<String> = e.symbols().iter().map(one).collect();
        match all.is_empty() {
            true => "false".into(),
            false => all.join(", "),
        }
    }
}

/// A whole number, also where a document of numbers wrote it as `4.0`.
pub(crate) fn whole(v: &AttrValue) -> Option<i64> {
    match v {
        AttrValue::Int(i) => Some(*i),
        AttrValue::Float(f) if f.fract() == 0.0 && f.abs() < 9e15 => Some(*f as i64),
        _ => None,
    }
}

fn datum(v: &AttrValue) -> Option<Datum> {
    match (whole(v), v) {
        (Some(i), _) => Some(Datum::Int(i)),
        (_, AttrValue::Flag(b)) => Some(Datum::Bool(*b)),
        (_, AttrValue::Absent) => None,
        (_, AttrValue::List(l)) => l.iter().map(datum).collect::<Option<_>>().map(Datum::List),
        (_, v) => Some(Datum::Text(v.to_string())),
    }
}

impl Facts for Known<'_> {
    fn symbol(&self, name: &str) -> Option<Datum> {
        match (self.size)(name).and_then(|n| i64::try_from(n).ok()) {
            Some(n) => Some(Datum::Int(n)),
            None => self.params.get(name).and_then(datum),
        }
    }
    // `has(name)`: a param, a size, an input or a slot.
    fn has_role(&self, name: &str) -> bool {
        self.symbol(name).is_some() || (self.present)(name)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(that: &str, open: bool) -> Option<Unmet> {
        let c = Constraint {
            that: Expr::parse(that).expect(that),
            when: BTreeMap::new(),
            code: "bad".into(),
        };
        let params: Attrs = [
            ("R".to_string(), AttrValue::Float(6.0)),
            ("scale".to_string(), AttrValue::Float(0.5)),
            ("window".to_string(), AttrValue::Absent),
        ]
        .into();
        let known = Known {
            size: &|s| (s == "D").then_some(8),
            params: &params,
            present: &|n| n == "mask",
        };
        match open {
            true => first_broken(&[c], &known),
            false => first_unmet(&[c], &known),
        }
    }

    #[test]
    fn sizes_params_and_presence() {
        for that in [
            "R <= D and R % 2 == 0",
            "has(mask) and has(R) and has(D) and has(scale)",
            "not has(window) and not has(k)",
            "not has(window) or window > 0",
            "scale == '0.5'",
        ] {
            assert_eq!(check(that, false), None, "{that}");
        }
        let e = check("R > D", false).expect("false");
        assert_eq!((e.code.as_str(), e.found.as_str()), ("bad", "R = 6, D = 8"));
    }

    #[test]
    fn what_is_not_there_fails_a_call_and_is_left_open_in_a_graph() {
        let e = check("window > D", false).expect("open");
        assert!(e.found.contains("`window` is not there"), "{}", e.found);
        assert_eq!(check("window > D", true), None);
        // A remainder or a zero divisor is no open question.
        for open in [true, false] {
            assert!(check("D / R == 1", open)
                .expect("8/6")
                .found
                .contains("remainder"));
            assert!(check("D / (R - 6) == 1", open)
                .expect("8/0")
                .found
                .contains("zero"));
        }
    }
}
