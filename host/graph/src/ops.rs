//! The vocabulary of operations: one table for host graphs, for `dataflow` entries and for the evaluator.
//!
//! A row says what an operation is called, which operands it takes, which attributes it has with which default,
//! and how it may be matched. Nothing here computes; `kernels` does.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Every operation a graph may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the table below is their documentation
pub enum OpKind {
    Linear,
    Bias,
    Add,
    Mul,
    Scale,
    Act,
    RmsNorm,
    LayerNorm,
    L2Norm,
    Modulate,
    Chunk,
    Split,
    Rope,
    Attention,
    GatedDelta,
    Call,
    Reshape,
    Transpose,
    Contiguous,
    Embedding,
    RopeTable,
    KvAppend,
    StateWrite,
    Concat,
    CausalConv,
    TopkRoute,
    Experts,
}

/// What an attribute is when an op does not write it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttrDefault {
    /// The op is malformed without it.
    Required,
    /// A number.
    Number(f64),
    /// A flag.
    Flag(bool),
    /// A word.
    Word(&'static str),
    /// Absent: no soft cap, no window.
    Absent,
    /// `D^-0.5` of the last dim of the first operand.
    InvSqrtLastDim,
    /// Size of the last dim of the first operand.
    LastDim,
}

/// One attribute of an operation.
#[derive(Clone, Copy, Debug)]
pub struct AttrSpec {
    /// Name.
    pub name: &'static str,
    /// Value when not written.
    pub default: AttrDefault,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct OpSpec {
    /// The operation.
    pub kind: OpKind,
    /// Its name in yaml and in messages.
    pub name: &'static str,
    /// Operand names in order; a trailing `?` marks one that may be missing.
    pub operands: &'static [&'static str],
    /// Attributes.
    pub attrs: &'static [AttrSpec],
    /// Operands may be swapped.
    pub commutative: bool,
    /// A view: following an edge skips it.
    pub view: bool,
    /// Only in host graphs, never in an entry.
    pub host_only: bool,
}

const fn attr(name: &'static str, default: AttrDefault) -> AttrSpec {
    AttrSpec { name, default }
}

const fn row(
    kind: OpKind,
    name: &'static str,
    operands: &'static [&'static str],
    attrs: &'static [AttrSpec],
) -> OpSpec {
    OpSpec {
        kind,
        name,
        operands,
        attrs,
        commutative: false,
        view: false,
        host_only: false,
    }
}

const fn host(
    kind: OpKind,
    name: &'static str,
    operands: &'static [&'static str],
    attrs: &'static [AttrSpec],
) -> OpSpec {
    OpSpec {
        kind,
        name,
        operands,
        attrs,
        commutative: false,
        view: false,
        host_only: true,
    }
}

const fn view(kind: OpKind, name: &'static str, attrs: &'static [AttrSpec]) -> OpSpec {
    OpSpec {
        kind,
        name,
        operands: &["x"],
        attrs,
        commutative: false,
        view: true,
        host_only: true,
    }
}

const fn commutative(spec: OpSpec) -> OpSpec {
    OpSpec {
        commutative: true,
        ..spec
    }
}

use AttrDefault::*;

/// The table. `call` and `concat` take any number of operands.
pub const OPS: &[OpSpec] = &[
    row(OpKind::Linear, "linear", &["x", "w"], &[]),
    row(OpKind::Bias, "bias", &["x", "b"], &[]),
    commutative(row(OpKind::Add, "add", &["a", "b"], &[])),
    commutative(row(OpKind::Mul, "mul", &["a", "b"], &[])),
    row(OpKind::Scale, "scale", &["x"], &[attr("by", Number(1.0))]),
    row(OpKind::Act, "act", &["x"], &[attr("kind", Required)]),
    row(
        OpKind::RmsNorm,
        "rms_norm",
        &["x", "w?"],
        &[
            attr("eps", Required),
            attr("weight", Word("direct")),
            attr("axes", Number(1.0)),
        ],
    ),
    row(
        OpKind::LayerNorm,
        "layer_norm",
        &["x", "w?", "b?"],
        &[attr("eps", Required)],
    ),
    row(OpKind::L2Norm, "l2_norm", &["x"], &[attr("eps", Required)]),
    row(
        OpKind::Modulate,
        "modulate",
        &["x", "scale?", "shift?"],
        &[attr("round", Word("once"))],
    ),
    row(
        OpKind::Chunk,
        "chunk",
        &["x"],
        &[attr("n", Required), attr("axis", Number(-1.0))],
    ),
    row(
        OpKind::Split,
        "split",
        &["x"],
        &[attr("sizes", Required), attr("axis", Number(-1.0))],
    ),
    row(
        OpKind::Rope,
        "rope",
        &["x", "cos", "sin"],
        &[attr("layout", Word("half")), attr("rotary", LastDim)],
    ),
    row(
        OpKind::Attention,
        "attention",
        &["q", "k", "v", "mask?", "kv_len?"],
        &[
            attr("scale", InvSqrtLastDim),
            attr("causal", Flag(false)),
            attr("window", Absent),
            attr("softcap", Absent),
        ],
    ),
    row(
        OpKind::GatedDelta,
        "gated_delta",
        &["q", "k", "v", "log_decay", "beta", "state?"],
        &[
            attr("l2", Flag(true)),
            attr("l2_eps", Number(1e-6)),
            attr("scale", InvSqrtLastDim),
        ],
    ),
    row(OpKind::Call, "call", &[], &[attr("role", Required)]),
    // dims is a list: a size, -1 once for what is left, or a symbol of the operand's dims.
    view(OpKind::Reshape, "reshape", &[attr("dims", Required)]),
    // perm is a list of axes.
    view(OpKind::Transpose, "transpose", &[attr("perm", Required)]),
    view(OpKind::Contiguous, "contiguous", &[]),
    host(OpKind::Embedding, "embedding", &["ids", "w"], &[]),
    // cos and sin tables [.., R/2] f32 for positions [..]; inv_freq is the list of R/2 frequencies; both are
    // multiplied by scaling. With axes, a list of R/2 numbers, positions have several rows [A, ..] and each frequency
    // reads the row it names.
    host(
        OpKind::RopeTable,
        "rope_table",
        &["positions"],
        &[
            attr("inv_freq", Required),
            attr("scaling", Number(1.0)),
            attr("axes", Absent),
        ],
    ),
    // Appends x [B,H,T,D] to a region; gives the whole valid region [B,H,kv_len,D].
    host(OpKind::KvAppend, "kv_append", &["x", "region"], &[]),
    // Replaces the content of a fixed region when the run is over; gives x.
    host(OpKind::StateWrite, "state_write", &["x", "region"], &[]),
    // Operands one after another along an axis.
    host(
        OpKind::Concat,
        "concat",
        &["x"],
        &[attr("axis", Number(-1.0))],
    ),
    // Each channel of x [B,T,C] with its own K weights w [C,1,K] over itself and the K-1 steps before it, which state
    // [B,K-1,C] holds (zeros when missing); gives y [B,T,C] and the last K-1 inputs.
    host(
        OpKind::CausalConv,
        "causal_conv",
        &["x", "w", "state?"],
        &[],
    ),
    // Softmax of the last dim, of which the k largest stay, divided by their sum under normalise, and the others are 0.
    host(
        OpKind::TopkRoute,
        "topk_route",
        &["x"],
        &[attr("k", Required), attr("normalise", Flag(true))],
    ),
    // Sum over the experts e of route[.., e] * down_e(act(gate_e(x)) * up_e(x)); gate_up [E,2I,D] has the rows of gate
    // before those of up, down is [E,D,I]. An expert whose route is 0 is not run.
    host(
        OpKind::Experts,
        "experts",
        &["x", "route", "gate_up", "down"],
        &[attr("kind", Required)],
    ),
];

/// Host operations of the grammar that no builder of this version makes; an entry that names one is refused with
/// a message that knows it.
pub const OTHER_HOST_OPS: &[&str] = &["slice", "cast", "softmax", "argmax", "conv_patch", "sample"];

impl OpSpec {
    /// The attribute of this name.
    pub fn attr(&self, name: &str) -> Option<&'static AttrSpec> {
        self.attrs.iter().find(|a| a.name == name)
    }

    /// How many operands may not be missing: those before the first optional one.
    pub fn required_operands(&self) -> usize {
        self.operands.iter().filter(|o| !o.ends_with('?')).count()
    }

    /// The name of an operand without its mark.
    pub fn operand_name(&self, at: usize) -> &'static str {
        self.operands
            .get(at)
            .map_or("?", |o| o.trim_end_matches('?'))
    }
}

impl OpKind {
    /// Its row.
    pub fn spec(self) -> &'static OpSpec {
        // The table has a row for every kind: `every_kind_has_a_row` checks it.
        OPS.iter().find(|s| s.kind == self).unwrap_or(&OPS[0])
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// The kind of this name.
    pub fn from_name(name: &str) -> Option<OpKind> {
        OPS.iter().find(|s| s.name == name).map(|s| s.kind)
    }

    /// Whether following an edge skips it.
    pub fn is_view(self) -> bool {
        self.spec().view
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A written attribute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AttrValue {
    /// true, false
    Flag(bool),
    /// A whole number.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A word.
    Word(String),
    /// A list.
    List(Vec<AttrValue>),
    /// Written as absent (`none`, `null`).
    Absent,
}

impl AttrValue {
    /// As a number, when it is one.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            AttrValue::Int(i) => Some(*i as f64),
            AttrValue::Float(f) => Some(*f),
            _ => None,
        }
    }

    /// As a word, when it is one.
    pub fn as_word(&self) -> Option<&str> {
        match self {
            AttrValue::Word(w) => Some(w),
            _ => None,
        }
    }
}

impl fmt::Display for AttrValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttrValue::Flag(b) => write!(f, "{b}"),
            AttrValue::Int(i) => write!(f, "{i}"),
            AttrValue::Float(x) => write!(f, "{x}"),
            AttrValue::Word(w) => f.write_str(w),
            AttrValue::List(l) => {
                f.write_str("[")?;
                for (i, v) in l.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    write!(f, "{v}")?;
                }
                f.write_str("]")
            }
            AttrValue::Absent => f.write_str("none"),
        }
    }
}

/// Attributes by name.
pub type Attrs = BTreeMap<String, AttrValue>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_row() {
        for s in OPS {
            assert_eq!(s.kind.spec().name, s.name);
            assert_eq!(OpKind::from_name(s.name), Some(s.kind));
        }
    }
}
