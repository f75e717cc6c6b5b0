//! The typed form of `structure.yaml`: what the rest of the system reads.
//!
//! Parsed once at the edge (`load`), immutable afterwards. Documents keep their order: slots, dims and points come
//! out as written.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use indexmap::IndexMap;
use serde::Serialize;
use structures_graph::ops::AttrValue;
use structures_graph::{Layout, OpKind};

use crate::expr::Expr;
use crate::reference::ReferenceFn;

/// A region with a boundary of its own, or a stage graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One span of a host.
    Region,
    /// A versioned stage graph with cadences.
    StagePipeline,
}

/// Whether schemes decide about the seams of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SchemeUse {
    /// A scheme routes it or keeps the host.
    Consulted,
    /// It attaches whatever the scheme is (fusion structures).
    Ignored,
}

/// One versioned entry.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Name, the directory it is stored under.
    pub name: String,
    /// Version.
    pub version: u32,
    /// Kind.
    pub kind: Kind,
    /// Hex sha256 of the document's bytes.
    pub digest: String,
    /// Free words schemes and doors select by.
    pub tags: Vec<String>,
    /// Who keeps a host op two seams want: higher first.
    pub precedence: i32,
    /// Whether schemes decide about it.
    pub scheme: SchemeUse,
    /// One line for people.
    pub summary: String,
    /// Inputs in order.
    pub inputs: Vec<Port>,
    /// Outputs in order.
    pub outputs: Vec<Port>,
    /// Weight slots in order, as declared (repeated ones not expanded).
    pub weights: Vec<Slot>,
    /// Variant axes in order.
    pub variants: IndexMap<String, Axis>,
    /// Calibration points, names of dataflow values.
    pub points: Vec<String>,
    /// Gate declarations.
    pub gates: Gates,
    /// Machine-read qualification facts.
    pub qualification: Qualification,
    /// How it shows in a module tree; `None` when it is found by its anchor op only.
    pub slots: Option<Slots>,
    /// The positions as operations.
    pub dataflow: Dataflow,
    /// Prose.
    pub evidence: Vec<String>,
    /// The document, byte for byte.
    pub document: Arc<str>,
    /// Native reference; `None` for a structure that exists only as data, whose reference is its dataflow.
    pub reference: Option<ReferenceFn>,
}

/// A boundary tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Name at the boundary; `<i>` when repeated.
    pub name: String,
    /// The dataflow value it is, `value:` when it differs from the name.
    pub value: String,
    /// Symbolic dims.
    pub dims: Vec<DimExpr>,
    /// `@binding`, or a fixed dtype name.
    pub dtype: String,
    /// May be missing.
    pub optional: bool,
    /// Repeat range `[from, to)` of index `i`.
    pub repeat: Option<(usize, usize)>,
}

/// A weight slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Name; contains `<i>` when repeated.
    pub name: String,
    /// Dims in the slot's own order.
    pub dims: Vec<DimExpr>,
    /// `in_out` means `x @ w`, `out_in` means `x @ w^T`.
    pub layout: Layout,
    /// May be missing.
    pub optional: bool,
    /// Repeat range `[from, to)` of index `i`.
    pub repeat: Option<(usize, usize)>,
    /// How many repeats must be there, from the first on; 0 when not repeated.
    pub least: usize,
}

/// A symbolic dim: a literal, a symbol, or a product such as `3*D`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DimExpr {
    /// Must be this size.
    Literal(usize),
    /// `D`; `N_<i>` when the slot is repeated.
    Symbol(String),
    /// Checked, never bound: `2*D`, `(Hq+2*Hkv)*D`.
    Derived(Expr),
}

/// A variant axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// A fact of the host (matched), or a choice of the form.
    pub host: bool,
    /// Value -> the attribute's value in an op (the same word when the yaml gives a list).
    pub values: IndexMap<String, String>,
    /// Reported when nothing solves it.
    pub default: Option<String>,
}

/// Gates as declared.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gates {
    /// Parity metrics.
    pub parity: Vec<String>,
    /// Latency baselines, for reports.
    pub baselines: Vec<String>,
    /// Other declared facts, kept as data.
    pub other: BTreeMap<String, serde_json::Value>,
}

/// Qualification facts the host reads generically.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Qualification {
    /// Smallest number of elements a slot's weight may have; `(slot, elements)`.
    pub min_elements: Vec<(String, u64)>,
    /// Prose.
    pub notes: Vec<String>,
}

// ---- slots ----------------------------------------------------------------------------------------------------

/// The `slots` part.
#[derive(Clone, Debug)]
pub struct Slots {
    /// `module`: every named module is tried. `graph`: no tree discovery.
    pub at_module: bool,
    /// Alternatives in order; a single `roles` map is one alternative.
    pub any: Vec<IndexMap<String, Role>>,
    /// Take all alternatives that exist, each its own seam.
    pub every: bool,
    /// In order.
    pub checks: Vec<Check>,
    /// Symbol -> size.
    pub dims: IndexMap<String, Expr>,
    /// Axis -> how it is read.
    pub axis: IndexMap<String, AxisRule>,
    /// Slot -> where it is stored.
    pub weights: IndexMap<String, WeightSource>,
    /// What a candidate is called.
    pub emit: Emit,
}

/// Where a role is looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Role {
    /// Below the parent instead of below self.
    pub in_parent: bool,
    /// Paths tried in order.
    pub first: Vec<String>,
    /// May be missing.
    pub optional: bool,
}

/// One check.
#[derive(Clone, Debug)]
pub struct Check {
    /// Must hold.
    pub that: Expr,
    /// `None`: not this structure, nothing recorded. `Some(code)`: recorded refusal.
    pub refuse: Option<String>,
}

/// How an axis is read from a tree.
#[derive(Clone, Debug)]
pub enum AxisRule {
    /// Computed.
    Expr(Expr),
    /// Looked up in attributes.
    Attr {
        /// Attribute names tried in order.
        attr: Vec<String>,
        /// Role that carries them.
        of: String,
        /// Host value -> axis value.
        map: IndexMap<String, String>,
        /// Used when no attribute is there: an assumption.
        default: Option<String>,
        /// Refusal code of a value outside the map.
        foreign: Option<String>,
    },
}

/// Where a slot's weight is stored.
#[derive(Clone, Debug)]
pub enum WeightSource {
    /// `role.param`, with layout, row range and reshape.
    From {
        /// Role.
        role: String,
        /// Parameter.
        param: String,
        /// Stored layout; the slot's own when not written. Another one than the slot's: swapped strides.
        layout: Layout,
        /// Row range `[from, to)`.
        rows: Option<(Expr, Expr)>,
        /// Dims after a flatten.
        reshape: Option<Vec<Expr>>,
    },
    /// A constant.
    Const(ConstFill),
}

/// Constant slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConstFill {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
}

/// What a candidate is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emit {
    /// Role whose path the seam carries.
    pub path: String,
    /// Role (or `parent`) that is the seam's parent.
    pub parent: String,
    /// One seam for each of these roles (`role` in expressions is then the current one).
    pub per: Vec<String>,
}

// ---- dataflow -------------------------------------------------------------------------------------------------

/// The `dataflow` part as declared.
#[derive(Clone, Debug)]
pub struct Dataflow {
    /// Widest first.
    pub spans: Vec<SpanDecl>,
    /// In order.
    pub ops: Vec<OpDecl>,
}

/// A span as declared; repeated names (`y_<i>`) not expanded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanDecl {
    /// Name.
    pub name: String,
    /// Values it reads.
    pub inputs: Vec<String>,
    /// Values it makes.
    pub outputs: Vec<String>,
    /// State regions it owns.
    pub states: Vec<String>,
}

/// An op as declared.
#[derive(Clone, Debug)]
pub struct OpDecl {
    /// Results.
    pub lets: Vec<String>,
    /// Operation.
    pub op: OpKind,
    /// Operand names.
    pub inputs: Vec<String>,
    /// Attributes.
    pub attrs: BTreeMap<String, AttrDecl>,
    /// Keep f32.
    pub as_f32: bool,
    /// Only under these axis values.
    pub when: BTreeMap<String, Vec<String>>,
    /// Dropped when all of these optional names are absent.
    pub needs: Vec<String>,
    /// Repeat: index name -> its values.
    pub repeat: Option<(String, Vec<String>)>,
    /// Pairs with each host op of its kind.
    pub anchor: bool,
    /// Code used when it does not pair.
    pub refuse: Option<String>,
}

/// An attribute as declared.
#[derive(Clone, Debug, PartialEq)]
pub enum AttrDecl {
    /// Must be equal on the host.
    Literal(AttrValue),
    /// The solved axis, mapped.
    Axis(String),
    /// Captured as a param.
    Capture(String),
}

// ---- expanded -------------------------------------------------------------------------------------------------

/// The dataflow under one choice of host axes, counts and present optionals: a plain graph.
#[derive(Clone, Debug)]
pub struct Plain {
    /// Host axes.
    pub axes: BTreeMap<String, String>,
    /// Boundary inputs and slots that are present and read here, expanded.
    pub sources: Vec<Source>,
    /// In executable order.
    pub ops: Vec<PlainOp>,
    /// Spans whose outputs exist here, widest first. Inputs are listed whole, absent optional ones too (they keep
    /// their position); outputs only when they are made.
    pub spans: Vec<SpanDecl>,
    /// Points that exist here.
    pub points: Vec<String>,
    /// Boundary outputs that are made here: boundary name -> value.
    pub outputs: Vec<(String, String)>,
    /// Names that became another value, because the op between was dropped.
    pub aliases: BTreeMap<String, String>,
}

/// A name a plain graph reads from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Expanded name.
    pub name: String,
    /// A slot; else a boundary input.
    pub slot: bool,
    /// May be missing on the host.
    pub optional: bool,
    /// Slot layout.
    pub layout: Layout,
    /// Dims with the index substituted.
    pub dims: Vec<DimExpr>,
}

/// An op of a plain graph. Names are unique values.
#[derive(Clone, Debug)]
pub struct PlainOp {
    /// Operation.
    pub kind: OpKind,
    /// Operand names; `None` for an absent optional operand.
    pub inputs: Vec<Option<String>>,
    /// Result names.
    pub outputs: Vec<String>,
    /// Literals and axes resolved, captures by name.
    pub attrs: BTreeMap<String, PlainAttr>,
    /// Axes this op mentions in attrs or `when`.
    pub mentions: Vec<String>,
    /// Keep f32.
    pub as_f32: bool,
    /// Pairs with each host op of its kind.
    pub anchor: bool,
    /// Code used when it does not pair.
    pub refuse: Option<String>,
}

/// An attribute of a plain op.
#[derive(Clone, Debug, PartialEq)]
pub enum PlainAttr {
    /// Must be equal.
    Equal(AttrValue),
    /// Captured.
    Capture(String),
}

impl fmt::Display for DimExpr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DimExpr::Literal(n) => write!(f, "{n}"),
            DimExpr::Symbol(s) => f.write_str(s),
            DimExpr::Derived(e) => write!(f, "{e}"),
        }
    }
}
