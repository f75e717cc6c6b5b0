//! A refusal: why a candidate, a seam or a span is not one. A value, never an error.

use serde::Serialize;

/// Codes this crate gives. Codes of `slots` checks and of ops come from the structures' own documents.
pub mod code {
    /// An op of the dataflow has no counterpart.
    pub const DATAFLOW_EDGE: &str = "dataflow_edge";
    /// One value would have to be two host values.
    pub const EDGE_CONFLICT: &str = "edge_conflict";
    /// An attribute differs from what the entry says, or from its default where the entry is silent.
    pub const ATTR_UNMATCHED: &str = "attr_unmatched";
    /// A host size contradicts a dim.
    pub const DIMS_INCONSISTENT: &str = "dims_inconsistent";
    /// A value made inside a span has a reader outside.
    pub const INTERIOR_READ_OUTSIDE: &str = "interior_read_outside";
    /// A path leaves the span and comes back.
    pub const SPAN_NOT_CONVEX: &str = "span_not_convex";
    /// Several values of a host axis hold and nothing decides.
    pub const AXIS_AMBIGUOUS: &str = "axis_ambiguous";
    /// A parameter is read by several host ops, and the structure has several ops with weights.
    pub const SLOT_READ_TWICE: &str = "slot_read_twice";
    /// A required slot has no source.
    pub const SLOT_MISSING: &str = "slot_missing";
    /// An attribute of the host is outside the structure's values, and its document gives no code of its own.
    pub const AXIS_FOREIGN: &str = "axis_foreign";
    /// Which rows of a parameter that holds several weights are this one's is not known.
    pub const FUSED_ROWS: &str = "fused_rows_unknown";
    /// Only facts that headers do not have keep a candidate from being one.
    pub const NOT_IN_HEADERS: &str = "not_in_headers";
    /// An expression of the structure's document cannot be evaluated on this candidate.
    pub const SLOTS_EXPRESSION: &str = "slots_expression";
    /// The structure's document cannot be expanded.
    pub const ENTRY_INVALID: &str = "entry_invalid";
}

/// Why something shaped like a structure is not used as one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Module path of the candidate.
    pub path: String,
    /// Structure.
    pub structure: String,
    /// Stable code.
    pub code: String,
    /// One sentence for people.
    pub reason: String,
    /// What should have been there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// The span it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub span: Option<String>,
    /// The structure's operation it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub op: Option<String>,
    /// The operand, result or attribute of that operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operand: Option<String>,
    /// Where in the host it was looked for or found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
}

impl Refusal {
    /// A refusal with code and reason.
    pub fn new(path: &str, structure: &str, code: &str, reason: impl Into<String>) -> Self {
        Refusal {
            path: path.into(),
            structure: structure.into(),
            code: code.into(),
            reason: reason.into(),
            ..Self::default()
        }
    }

    /// With what was expected and what was found.
    #[must_use]
    pub fn expected_found(mut self, expected: impl Into<String>, found: impl Into<String>) -> Self {
        self.expected = Some(expected.into());
        self.found = Some(found.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_fixed_names_and_leaves_out_what_is_not_there() {
        let r = Refusal::new("a.b", "s", "c", "why").expected_found("1", "2");
        let json = serde_json::to_value(&r).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"path": "a.b", "structure": "s", "code": "c", "reason": "why", "expected": "1", "found": "2"})
        );
    }
}
