//! What the operations of the vocabulary compute: candle on the CPU, f32 in and out.
//!
//! One kernel serves three callers: the `Session` (the host path and the baseline of every measurement), the
//! catalog's evaluator of `dataflow`, and the references. Whatever dtype comes in is widened to f32 first; rounding
//! a result is the caller's business. Products are candle's; everything else is one pass over slices, because at
//! one row of a small model a chain of candle operations costs more than the arithmetic in it.
//!
//! Owns arithmetic and the operands' shape rules. Does not own state regions (`state`), which value feeds which
//! operation (`session`), or alignment by symbol (the catalog's evaluator aligns before it calls).

mod act;
mod attention;
mod conv;
mod elementwise;
mod experts;
mod gated_delta;
mod linear;
mod norm;
mod prepare;
mod read;
mod rope;
pub(crate) mod row;
mod table;

pub(crate) use table::{look_up, not_in_vocabulary};
mod view;

use candle_core::{DType, Tensor};

use crate::graph::Layout;
use crate::ops::{Attrs, OpKind};
use crate::GraphError;

pub use act::ActKind;
pub(crate) use elementwise::repeats;
pub(crate) use prepare::{Kernel, ReshapeDim};
pub(crate) use rope::{serves as rope_serves, Pairing};
pub(crate) use view::reshaped;

/// Why a kernel did not compute; becomes a [`GraphError`] that names the operation.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The operands or attributes do not fit the operation.
    Operands(String),
    /// Candle refused.
    Candle(candle_core::Error),
    /// What the source of a parameter says.
    Source(GraphError),
}

impl From<candle_core::Error> for Fault {
    fn from(e: candle_core::Error) -> Self {
        Fault::Candle(e)
    }
}

impl Fault {
    /// The error of operation `op` at value or module `at`.
    pub(crate) fn at(self, op: OpKind, at: &str) -> GraphError {
        match self {
            Fault::Operands(what) => GraphError::Operands {
                op: op.name().into(),
                at: at.into(),
                what,
            },
            Fault::Candle(source) => GraphError::Kernel {
                op: op.name().into(),
                at: at.into(),
                source: Box::new(source),
            },
            Fault::Source(e) => e,
        }
    }
}

pub(crate) type Outcome<T> = Result<T, Fault>;

/// A fault of the operands.
pub(crate) fn unfit<T>(what: impl Into<String>) -> Outcome<T> {
    Err(Fault::Operands(what.into()))
}

/// Computes one operation on f32 (operands of another float dtype are widened). `inputs` follow the vocabulary's
/// operand order, `None` for a missing optional; a shorter list leaves the tail out. `layouts` says how each operand
/// is stored, `InOut` where it is shorter; only `linear`'s second operand asks. `kv_append` and `call` have no
/// kernel: the session and the evaluator own them.
pub fn eval(
    kind: OpKind,
    attrs: &Attrs,
    inputs: &[Option<Tensor>],
    layouts: &[Layout],
) -> Result<Vec<Tensor>, GraphError> {
    eval_rounded(kind, attrs, inputs, layouts, None)
}

/// [`eval`] for a reference that computes at a boundary dtype: `step` is the dtype to which `modulate` with
/// `round: each` rounds 1+scale, the product and the sum. Nothing else rounds.
pub fn eval_rounded(
    kind: OpKind,
    attrs: &Attrs,
    inputs: &[Option<Tensor>],
    layouts: &[Layout],
    step: Option<DType>,
) -> Result<Vec<Tensor>, GraphError> {
    let weight = layouts.get(1).copied().unwrap_or(Layout::InOut);
    Kernel::prepare(kind, attrs, weight)
        .and_then(|k| k.run(inputs, step))
        .map_err(|f| f.at(kind, ""))
}
