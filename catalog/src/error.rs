//! Errors of this crate: everything wrong with a document, a look-up, a call of a reference.

use std::fmt;

use structures_graph::GraphError;

/// A position in a document, both from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// File, as the user named it; for built-in entries below `catalog/`.
    pub file: String,
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// No entry of this name or version.
    #[error("structure `{name}` is not in the catalog{}", near(nearest))]
    Unknown {
        /// What was asked for, `name` or `name@version`.
        name: String,
        /// What exists and looks like it.
        nearest: Vec<String>,
    },
    /// A pin that is none.
    #[error("`{pin}`: expected NAME or NAME@VERSION with a whole number, found version `{found}`")]
    Pin {
        /// What was asked for.
        pin: String,
        /// What stands for the version.
        found: String,
    },
    /// The version existed once.
    #[error("structure `{name}` version {version} is retired: {note}")]
    Retired {
        /// Name.
        name: String,
        /// Version.
        version: u32,
        /// How to move on.
        note: String,
    },
    /// The directory is called otherwise than the entry.
    #[error("{at}: the entry is stored as `{stored}` and calls itself `{declared}`; rename one")]
    NameMismatch {
        /// Where the name stands.
        at: Place,
        /// Directory (and version directory).
        stored: String,
        /// In the document.
        declared: String,
    },
    /// A key that would make an entry choose kernels or hardware.
    #[error("{at}: `{key}` is forbidden anywhere in an entry: an entry never selects hardware or kernels")]
    KeyForbidden {
        /// Where.
        at: Place,
        /// Which.
        key: String,
    },
    /// A pipeline was asked for what only a region has.
    #[error(
        "`{name}` version {version} is a stage pipeline and has no reference of its own: the ground truth is the \
         unmodified eager host under the same windows"
    )]
    NoStandaloneReference {
        /// Name.
        name: String,
        /// Version.
        version: u32,
    },
    /// The document breaks the grammar.
    #[error("{at}: {path}: {what}")]
    Invalid {
        /// Where.
        at: Place,
        /// Path of the item in the document.
        path: String,
        /// Expected and found.
        what: String,
    },
    /// The dataflow of an entry does not hold together under some axes.
    #[error("{structure}: dataflow value `{value}`: {reason}")]
    Dataflow {
        /// Entry.
        structure: String,
        /// Value.
        value: String,
        /// Why.
        reason: String,
    },
    /// A file cannot be read.
    #[error("{path}: {reason}")]
    Io {
        /// File or directory.
        path: String,
        /// Why.
        reason: String,
    },
    /// An axis or a value of one that the entry does not declare, or an axis left open.
    #[error("{structure}: variant axis `{axis}` is `{found}`, expected one of {expected:?}")]
    Variant {
        /// Entry.
        structure: String,
        /// Axis.
        axis: String,
        /// Declared values (axes, when the axis itself is unknown).
        expected: Vec<String>,
        /// Given.
        found: String,
    },
    /// No span of this name under these axes.
    #[error("{structure}: no span `{span}` here, expected one of {expected:?}")]
    Span {
        /// Entry.
        structure: String,
        /// Asked for.
        span: String,
        /// Those that exist.
        expected: Vec<String>,
    },
    /// A boundary input that is needed and not there.
    #[error("{structure}: input `{input}` is missing{}", because(why))]
    MissingInput {
        /// Entry.
        structure: String,
        /// Input.
        input: String,
        /// What needs it.
        why: String,
    },
    /// A slot that is needed and not there.
    #[error("{structure}: weight `{slot}` is missing{}", because(why))]
    MissingWeight {
        /// Entry.
        structure: String,
        /// Slot.
        slot: String,
        /// What needs it.
        why: String,
    },
    /// A captured attribute that nobody gave.
    #[error("{structure}: param `{param}` is missing (attribute of {op})")]
    MissingParam {
        /// Entry.
        structure: String,
        /// Param.
        param: String,
        /// Operation.
        op: String,
    },
    /// A tensor the entry does not declare.
    #[error("{structure}: `{tensor}` is neither an input nor a slot, expected {expected:?}")]
    UnexpectedTensor {
        /// Entry.
        structure: String,
        /// Given.
        tensor: String,
        /// Declared.
        expected: Vec<String>,
    },
    /// A tensor of another rank than declared.
    #[error("{structure}: `{tensor}` has shape {found:?}, expected rank {expected} {dims}")]
    RankMismatch {
        /// Entry.
        structure: String,
        /// Input or slot.
        tensor: String,
        /// Declared dims.
        dims: String,
        /// Declared rank.
        expected: usize,
        /// Given shape.
        found: Vec<usize>,
    },
    /// A size that contradicts another one.
    #[error("{structure}: dim {index} of `{tensor}` is {found}, expected {dim} = {expected}")]
    DimConflict {
        /// Entry.
        structure: String,
        /// Input or slot.
        tensor: String,
        /// Which dim, from 0.
        index: usize,
        /// Symbol, literal or derived dim.
        dim: String,
        /// Its value by then.
        expected: String,
        /// Given.
        found: usize,
    },
    /// Sizes or params that the entry does not admit together.
    #[error("{structure}: expected `{that}`, found {found} ({code})")]
    Constraint {
        /// Entry.
        structure: String,
        /// The constraint's own code.
        code: String,
        /// What must hold.
        that: String,
        /// What was given.
        found: String,
    },
    /// A param that cannot be what the entry takes it for.
    #[error("{structure}: param `{param}` is {found}, expected {expected}")]
    Param {
        /// Entry.
        structure: String,
        /// Param.
        param: String,
        /// What it must be.
        expected: String,
        /// Given.
        found: String,
    },
    /// A step of a reference or of a dataflow failed.
    #[error("{structure}: {at}: {reason}")]
    Evaluation {
        /// Entry.
        structure: String,
        /// Operation or value.
        at: String,
        /// Why.
        reason: String,
    },
}

fn near(nearest: &[String]) -> String {
    if nearest.is_empty() {
        String::new()
    } else {
        format!("; nearest: {}", nearest.join(", "))
    }
}

fn because(why: &str) -> String {
    if why.is_empty() {
        String::new()
    } else {
        format!(": {why}")
    }
}

impl CatalogError {
    /// Stable identifier of the reason.
    pub fn code(&self) -> &str {
        match self {
            CatalogError::Constraint { code, .. } => code,
            CatalogError::Param { .. } => "bad_param",
            CatalogError::Unknown { .. } => "entry_unknown",
            CatalogError::Retired { .. } => "entry_retired",
            CatalogError::Pin { .. } => "pin_invalid",
            CatalogError::NameMismatch { .. } => "entry_name_mismatch",
            CatalogError::KeyForbidden { .. } => "key_forbidden",
            CatalogError::NoStandaloneReference { .. } => "no_standalone_reference",
            CatalogError::Invalid { .. } | CatalogError::Dataflow { .. } => "entry_invalid",
            CatalogError::Io { .. } => "entry_unreadable",
            CatalogError::Variant { .. } => "unknown_variant",
            CatalogError::Span { .. } => "unknown_span",
            CatalogError::MissingInput { .. } => "missing_input",
            CatalogError::MissingWeight { .. } => "missing_weight",
            CatalogError::MissingParam { .. } => "missing_param",
            CatalogError::UnexpectedTensor { .. } => "unexpected_tensor",
            CatalogError::RankMismatch { .. } => "rank_mismatch",
            CatalogError::DimConflict { .. } => "dim_conflict",
            CatalogError::Evaluation { .. } => "evaluation_failed",
        }
    }
}

impl CatalogError {
    /// Where in a document, when the fault is in one.
    pub fn place(&self) -> Option<&Place> {
        match self {
            CatalogError::NameMismatch { at, .. }
            | CatalogError::KeyForbidden { at, .. }
            | CatalogError::Invalid { at, .. } => Some(at),
            _ => None,
        }
    }
}

impl From<candle_core::Error> for CatalogError {
    fn from(e: candle_core::Error) -> Self {
        CatalogError::Evaluation {
            structure: "reference".into(),
            at: "tensor operation".into(),
            reason: e.to_string(),
        }
    }
}

impl From<GraphError> for CatalogError {
    fn from(e: GraphError) -> Self {
        CatalogError::Evaluation {
            structure: "dataflow".into(),
            at: "operation".into(),
            reason: e.to_string(),
        }
    }
}
