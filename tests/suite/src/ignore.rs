//! The honest list of what a plugin is known not to do.
//!
//! One line each: `<structure> <form> [<span> [<case>]] # reason`. `<case>` is text that the case contains. A line
//! without a reason does not parse, and a line that no failing row needs is reported, so the list only shrinks.

use std::path::Path;

use crate::error::SuiteError;
use crate::judge::Row;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignore {
    /// Line in the file, from 1.
    pub line: usize,
    /// Structure.
    pub structure: String,
    /// Form.
    pub form: String,
    /// Span; any when absent.
    pub span: Option<String>,
    /// Part of the case; any when absent.
    pub case: Option<String>,
    /// Why.
    pub reason: String,
}

/// A list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ignores(pub Vec<Ignore>);

impl Ignores {
    /// Reads a file.
    ///
    /// # Errors
    /// [`SuiteError::File`], [`SuiteError::Ignore`].
    pub fn read(path: &Path) -> Result<Self, SuiteError> {
        let text = std::fs::read_to_string(path).map_err(|source| SuiteError::File {
            path: path.display().to_string(),
            source,
        })?;
        Self::parse(&path.display().to_string(), &text)
    }

    /// Reads a text; `path` is for messages.
    ///
    /// # Errors
    /// [`SuiteError::Ignore`].
    pub fn parse(path: &str, text: &str) -> Result<Self, SuiteError> {
        let mut all = Vec::new();
        for (i, whole) in text.lines().enumerate() {
            let (entry, reason) = whole.split_once('#').unwrap_or((whole, ""));
            let (entry, reason) = (entry.trim(), reason.trim());
            if entry.is_empty() {
                continue;
            }
            let bad = || SuiteError::Ignore {
                path: path.into(),
                line: i + 1,
                found: whole.into(),
            };
            let mut words = entry.splitn(4, char::is_whitespace);
            let mut next = || words.next().map(str::trim).map(String::from);
            let (structure, form) = (next(), next());
            let (Some(structure), Some(form), false) = (structure, form, reason.is_empty()) else {
                return Err(bad());
            };
            all.push(Ignore {
                line: i + 1,
                structure,
                form,
                span: next(),
                case: next(),
                reason: reason.into(),
            });
        }
        Ok(Ignores(all))
    }

    /// Failing rows that no line names, and lines that no failing row needs.
    pub fn split<'a>(&self, rows: &'a [Row]) -> (Vec<&'a Row>, Vec<&Ignore>) {
        let failing = || rows.iter().filter(|row| !row.passed());
        let unexpected = failing().filter(|row| !self.0.iter().any(|line| line.names(row)));
        let idle = self.0.iter();
        let idle = idle.filter(|line| !failing().any(|row| line.names(row)));
        (unexpected.collect(), idle.collect())
    }
}

impl Ignore {
    /// Whether it is about this row.
    pub fn names(&self, row: &Row) -> bool {
        let span = self.span.as_ref().is_none_or(|span| *span == row.span);
        let case = self
            .case
            .as_ref()
            .is_none_or(|case| row.case.contains(case));
        self.structure == row.structure && self.form == row.form && span && case
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Outcome;

    fn row(structure: &str, span: &str, case: &str, outcome: Outcome) -> Row {
        Row {
            plugin: "p".into(),
            form: "f".into(),
            structure: structure.into(),
            version: 1,
            span: span.into(),
            case: case.into(),
            outcome,
            error: None,
            code: None,
            reason: None,
        }
    }

    #[test]
    fn a_line_needs_a_reason_and_two_names() {
        let parse = |text: &str| Ignores::parse("list.txt", text);
        assert_eq!(
            parse("\n# only a remark\n").map(|i| i.0.len()).ok(),
            Some(0)
        );
        let list = parse("a f whole rows 9, f32 # for now").expect("a line").0;
        assert_eq!(list[0].case.as_deref(), Some("rows 9, f32"));
        for bad in ["a f", "a # no form", "a f #  "] {
            let e = parse(bad).expect_err(bad).to_string();
            assert!(e.starts_with("list.txt:1:"), "{e}");
        }
    }

    #[test]
    fn what_is_not_listed_and_what_need_not_be_are_told() {
        let rows = [
            row("a", "s", "one", Outcome::Passed),
            row("a", "t", "two", Outcome::Failed),
            row("b", "s", "three", Outcome::Refused),
        ];
        let list = Ignores::parse("l", "a f t # known\na f s # was wrong once").expect("parses");
        let (unexpected, idle) = list.split(&rows);
        assert_eq!(unexpected.len(), 1);
        assert_eq!(unexpected[0].structure, "b");
        assert_eq!(idle.iter().map(|i| i.line).collect::<Vec<_>>(), [2]);
    }
}
