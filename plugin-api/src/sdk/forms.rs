//! The list a backend is made of: structures, each executed in several formats.
//!
//! A structure in each of the formats that its [`Leaf`] offers is a form; the list drives `describe`,
//! `probe` and `bind`. What a format is, and what else a leaf says, is the backend's.

use std::collections::BTreeMap;

use crate::describe::{FormDecl, StatisticDecl};
use crate::sdk::{BindRequest, Failure};

/// What a backend says about one structure.
pub trait Leaf {
    /// A number format, or whatever else makes several forms of one structure.
    type Format: Copy + 'static;

    /// Name in the catalog.
    fn structure(&self) -> &str;

    /// Formats it is executed in.
    fn formats(&self) -> &[Self::Format];

    /// The declaration of the form in a format.
    fn declare(&self, format: Self::Format) -> FormDecl;
}

/// Declarations of all forms of a list.
pub fn declarations<L: Leaf>(leaves: &[&L]) -> Vec<FormDecl> {
    let every = leaves
        .iter()
        .flat_map(|leaf| leaf.formats().iter().map(|format| leaf.declare(*format)));
    every.collect()
}

/// The form that a request names, compared with its declaration: else `form_unknown`, or what
/// [`BindRequest::admitted_by`] answers.
pub fn admitted<'l, L: Leaf>(
    leaves: &[&'l L],
    request: &BindRequest<'_>,
) -> Result<(&'l L, L::Format), Failure> {
    let structure = &request.params.structure;
    let own = leaves.iter().filter(|leaf| leaf.structure() == structure);
    let mut forms = own.flat_map(|leaf| {
        let forms = leaf.formats().iter();
        forms.map(|format| (*leaf, *format, leaf.declare(*format)))
    });
    let found = forms.find(|(_, _, decl)| decl.name == request.form);
    let (leaf, format, decl) = found.ok_or_else(|| {
        let text = format!("no form `{}` of `{structure}`", request.form);
        Failure::refused("form_unknown", text)
    })?;
    request.admitted_by(&decl)?;
    Ok((leaf, format))
}

/// Names as a declaration has them.
pub fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_string()).collect()
}

/// [`FormDecl::variants`] of axes with their accepted values.
pub fn variants(axes: &[(&str, &[&str])]) -> BTreeMap<String, Vec<String>> {
    let one = |(axis, values): &(&str, &[&str])| ((*axis).to_string(), names(values));
    axes.iter().map(one).collect()
}

/// The same statistic at each of these points.
pub fn statistics(points: &[&str], statistic: &str, granularity: &str) -> Vec<StatisticDecl> {
    let one = |point: &&str| StatisticDecl {
        point: (*point).into(),
        statistic: statistic.into(),
        granularity: granularity.into(),
    };
    points.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Contract, DType};
    use crate::describe::BindParams;

    struct Two(&'static str);

    impl Leaf for Two {
        type Format = u32;

        fn structure(&self) -> &str {
            self.0
        }

        fn formats(&self) -> &[u32] {
            &[16, 8]
        }

        fn declare(&self, format: u32) -> FormDecl {
            FormDecl {
                spans: names(&["all"]),
                dtypes: names(&["f32"]),
                variants: variants(&[("bias", &["none", "add"])]),
                statistics: statistics(&["x", "y"], "amax", "tensor"),
                ..FormDecl::new(self.0, &format!("w{format}"), "none")
            }
        }
    }

    #[test]
    fn a_list_declares_every_form_and_finds_the_one_that_is_named() {
        let leaves = [&Two("a"), &Two("b")];
        let declared = declarations(&leaves);
        let keys: Vec<_> = declared.iter().map(|d| (&*d.structure, &*d.name)).collect();
        assert_eq!(keys, [("a", "w16"), ("a", "w8"), ("b", "w16"), ("b", "w8")]);
        assert_eq!(declared[0].variants["bias"], ["none", "add"]);
        let points = declared[0].statistics.iter().map(|s| &*s.point);
        assert_eq!(points.collect::<Vec<_>>(), ["x", "y"]);

        let contract = Contract::capacity(DType::F32, 1);
        let find = |form: &str, span: &str, structure: &str| {
            let mut params = BindParams {
                structure: structure.into(),
                version: 1,
                ..BindParams::default()
            };
            params.variant.insert("bias".into(), "none".into());
            let request = BindRequest::new(form, span, params, &contract);
            let found = admitted(&leaves, &request).map_err(|failure| failure.code);
            found.map(|(leaf, format)| (leaf.0, format))
        };
        assert_eq!(find("w8", "all", "b"), Ok(("b", 8)));
        assert_eq!(find("w16", "all", "a"), Ok(("a", 16)));
        assert_eq!(find("w4", "all", "a"), Err("form_unknown".into()));
        assert_eq!(find("w8", "all", "c"), Err("form_unknown".into()));
        assert_eq!(find("w8", "part", "b"), Err("span_unknown".into()));
    }
}
