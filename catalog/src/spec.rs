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

use crate::expr::{eval_int, EvalError, Expr, Facts};
use crate::reference::ReferenceFn;
use crate::solve::ROWS;

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
    /// Dim symbols that are also params: symbol -> param. The param gives the symbol its size; where the size comes
    /// from elsewhere, the param is filled from it.
    pub symbols: IndexMap<String, String>,
    /// What a call, or a seam once its dims are solved, must satisfy.
    pub constraints: Vec<Constraint>,
    /// Variant axes in order.
    pub variants: IndexMap<String, Axis>,
    /// Calibration points, names of dataflow values.
    pub points: Vec<String>,
    /// Those of the points whose content is stored, never reduced to a statistic.
    pub content: Vec<String>,
    /// Gate declarations.
    pub gates: Gates,
    /// Machine-read qualification facts.
    pub qualification: Qualification,
    /// How it shows in a module tree; `None` when it is found by its anchor op only.
    pub slots: Option<Slots>,
    /// The positions as operations.
    pub dataflow: Dataflow,
    /// The stage graph; of pipelines only.
    pub pipeline: Option<Pipeline>,
    /// Prose.
    pub evidence: Vec<String>,
    /// The document, byte for byte.
    pub document: Arc<str>,
    /// Its file, for messages.
    pub file: String,
    /// It ships with this crate.
    pub builtin: bool,
    /// Native reference; `None` for a structure that exists only as data, whose reference is its dataflow.
    pub reference: Option<ReferenceFn>,
}

impl Spec {
    /// The family of a pipeline.
    pub fn family(&self) -> Option<&str> {
        self.pipeline.as_ref().map(|p| p.family.as_str())
    }

    /// The stages of a pipeline; a region has none.
    pub fn stages(&self) -> &[Stage] {
        self.pipeline.as_ref().map_or(&[], |p| &p.stages)
    }

    /// The regions a pipeline embeds.
    pub fn embedded(&self) -> &[String] {
        self.pipeline.as_ref().map_or(&[], |p| &p.embedded)
    }
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
    /// Further alternatives of an input, each of a rank of its own.
    pub more: Vec<Vec<DimExpr>>,
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

/// Something that must hold between sizes and params.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constraint {
    /// Must be true.
    pub that: Expr,
    /// Only under these axis values.
    pub when: BTreeMap<String, Vec<String>>,
    /// Code of the refusal.
    pub code: String,
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

// ---- pipelines ------------------------------------------------------------------------------------------------

/// A versioned stage graph with cadences. It has no reference of its own: the ground truth is the unmodified eager
/// host under the same windows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pipeline {
    /// Groups pipelines of one shape.
    pub family: String,
    /// In the order they run.
    pub stages: Vec<Stage>,
    /// Regions that occur inside its stages.
    pub embedded: Vec<String>,
    /// Named buffers, caches and windows that outlive a stage.
    pub state_regions: Vec<StateRegion>,
    /// Work that changes more slowly than the stage it is in.
    pub cadence_substructures: Vec<CadenceSubstructure>,
    /// Statements a qualification has to show.
    pub conformance: Vec<String>,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    /// Name.
    pub name: String,
    /// A host may be without it.
    pub optional: bool,
    /// How often it runs.
    pub cadence: String,
    /// What it reads.
    pub inputs: Vec<StagePort>,
    /// What it makes.
    pub outputs: Vec<StagePort>,
    /// Whether it can be captured.
    pub capture: Capture,
    /// The loop it is, if it is one.
    #[serde(rename = "loop")]
    pub repeats: Option<StageLoop>,
}

/// A tensor at the edge of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StagePort {
    /// Name.
    pub name: String,
    /// How it is rewritten between replays.
    pub window: Vec<Window>,
    /// What its storage is.
    pub buffer: Option<Buffer>,
    /// The stage never writes it.
    pub read_only: bool,
    /// May be missing.
    pub optional: bool,
    /// When it changes, where that is not the stage's cadence.
    pub cadence: Option<String>,
}

/// How a tensor is rewritten between replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Window {
    /// In place.
    Swap,
    /// Copied in.
    Staged,
    /// Read out.
    Readback,
    /// An object of the host, no tensor.
    Host,
}

impl Window {
    /// The words of the grammar.
    pub const WORDS: &'static [(&'static str, Window)] = &[
        ("swap", Window::Swap),
        ("staged", Window::Staged),
        ("readback", Window::Readback),
        ("host", Window::Host),
    ];
}

/// What a tensor's storage is to the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Buffer {
    /// Not written inside the loop.
    Static,
    /// Written by the stages that own it.
    Mutable,
}

impl Buffer {
    /// The words of the grammar.
    pub const WORDS: &'static [(&'static str, Buffer)] =
        &[("static", Buffer::Static), ("mutable", Buffer::Mutable)];
}

/// Whether a stage can be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Capture {
    /// Whatever the host does conforms.
    HostDependent,
    /// Per bucket of shapes, or not at all.
    BucketedOrEager,
    /// The gain is in the capture.
    RequiredForYield,
}

impl Capture {
    /// The words of the grammar.
    pub const WORDS: &'static [(&'static str, Capture)] = &[
        ("host_dependent", Capture::HostDependent),
        ("bucketed_or_eager", Capture::BucketedOrEager),
        ("required_for_yield", Capture::RequiredForYield),
    ];
}

/// A stage that repeats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageLoop {
    /// How often; `None` when the binding says.
    pub steps: Option<u64>,
    /// Every step has the same shapes.
    pub fixed_shape: bool,
}

/// A named buffer, cache or window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StateRegion {
    /// Name.
    pub name: String,
    /// When it changes, where that is said.
    pub cadence: Option<String>,
    /// Stages that write it.
    pub writers: Vec<String>,
    /// Stages that read it.
    pub readers: Vec<String>,
}

/// Work with a cadence of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CadenceSubstructure {
    /// Name.
    pub name: String,
    /// When it changes.
    pub cadence: String,
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
    /// Only roles may carry parameters: the code for another module or parameter below `self`.
    pub closed: Option<String>,
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
    /// Dims that a result is reshaped to, one entry a result; empty when no result is.
    pub views: Vec<Option<Vec<DimExpr>>>,
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
    /// Cheap, and read by others on hosts: the span computes it again, and where others read it the host keeps its own.
    pub shared: bool,
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
    /// Computed from dims, then like a literal.
    Dims(DimAttr),
}

/// An attribute written as `=EXPR` over dim symbols, or as a list of such.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DimAttr {
    /// One number.
    One(Expr),
    /// A list of numbers.
    List(Vec<Expr>),
}

impl DimAttr {
    /// Its expressions in order.
    pub fn exprs(&self) -> &[Expr] {
        match self {
            DimAttr::One(e) => std::slice::from_ref(e),
            DimAttr::List(l) => l,
        }
    }

    /// The literal it stands for under solved symbols.
    pub fn value(&self, facts: &dyn Facts) -> Result<AttrValue, EvalError> {
        let one = |e: &Expr| eval_int(e, facts).map(AttrValue::Int);
        match self {
            DimAttr::One(e) => one(e),
            DimAttr::List(l) => l
                .iter()
                .map(one)
                .collect::<Result<_, _>>()
                .map(AttrValue::List),
        }
    }
}

impl fmt::Display for DimAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DimAttr::One(e) => write!(f, "{e}"),
            DimAttr::List(l) => {
                let parts: Vec<String> = l.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", parts.join(", "))
            }
        }
    }
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
    /// Symbol -> param, as in the entry.
    pub symbols: IndexMap<String, String>,
    /// Constraints that apply under these axes.
    pub constraints: Vec<Constraint>,
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
    /// Further alternatives, for a tensor of another rank.
    pub more: Vec<Vec<DimExpr>>,
}

impl Source {
    /// The first alternative that a tensor of this rank fits; the first of all when none does. Dims that begin with
    /// the rows symbol take any leading dims.
    pub fn dims_for(&self, rank: usize) -> &[DimExpr] {
        let rows = |d: &[DimExpr]| matches!(d.first(), Some(DimExpr::Symbol(s)) if s == ROWS);
        let fits = |d: &&Vec<DimExpr>| d.len() == rank || rows(d) && rank > d.len();
        let mut all = std::iter::once(&self.dims).chain(&self.more);
        all.find(fits).unwrap_or(&self.dims)
    }
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
    /// Dims that a result is reshaped to, one entry a result; empty when no result is. Never matched on a host.
    pub views: Vec<Option<Vec<DimExpr>>>,
    /// Axes this op mentions in attrs or `when`.
    pub mentions: Vec<String>,
    /// Keep f32.
    pub as_f32: bool,
    /// Pairs with each host op of its kind.
    pub anchor: bool,
    /// Cheap, and read by others on hosts: the span computes it again, and where others read it the host keeps its own.
    pub shared: bool,
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
    /// Computed from dims, then must be equal.
    Dims(DimAttr),
}

impl PlainOp {
    /// What the result of this index is reshaped to.
    pub fn view(&self, result: usize) -> Option<&[DimExpr]> {
        self.views.get(result)?.as_deref()
    }
}

impl DimExpr {
    /// Symbols in it.
    pub fn symbols(&self) -> Vec<String> {
        match self {
            DimExpr::Literal(_) => Vec::new(),
            DimExpr::Symbol(s) => vec![s.clone()],
            DimExpr::Derived(e) => e.symbols(),
        }
    }

    /// As an expression.
    pub fn expr(&self) -> Expr {
        match self {
            DimExpr::Literal(n) => Expr::Int(i64::try_from(*n).unwrap_or(i64::MAX)),
            DimExpr::Symbol(s) => Expr::Symbol(s.clone()),
            DimExpr::Derived(e) => e.clone(),
        }
    }
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
