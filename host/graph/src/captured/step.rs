//! The steps of a captured plan: what is computed, from which places into which buffers.

use std::sync::Arc;

use super::arena::Buf;
use crate::graph::{Layout, OpId, ValueId};
use crate::kernels::row::{Attend, Norm};
use crate::kernels::{ActKind, Kernel, Pairing};
use crate::session::SpanRunner;

/// Where elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// In the arena.
    Buf(Buf),
    /// A parameter.
    Param(ValueId),
    /// Whole numbers of an input.
    Numbers(usize),
    /// The valid part of a growing region.
    Region(usize),
}

/// A tensor that lies somewhere.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) source: Source,
    /// Elements before the first one.
    pub(super) offset: usize,
    /// The third one of a growing region's is what it has room for.
    pub(super) dims: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

impl Place {
    pub(super) fn dense(source: Source, dims: Vec<usize>) -> Self {
        Place {
            source,
            offset: 0,
            strides: row_major(&dims),
            dims,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Whether the elements follow each other; dims of one do not matter.
    pub(super) fn is_dense(&self) -> bool {
        let mut want = 1;
        for (d, s) in self.dims.iter().zip(&self.strides).rev() {
            if *d != 1 && *s != want {
                return false;
            }
            want *= d;
        }
        true
    }
}

pub(super) fn row_major(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i].max(1);
    }
    strides
}

/// Dense elements of a buffer or a parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slice {
    pub(super) source: Source,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// Element-wise passes over two operands.
#[derive(Clone, Copy, Debug)]
pub(super) enum Zip {
    Add,
    Mul,
}

/// What a span reads.
#[derive(Debug)]
pub(super) enum Read {
    /// An absent optional.
    Absent,
    /// Elements with these dims.
    Slice(Slice, Vec<usize>),
    /// The valid part of a region, copied into a buffer before the call; without one the runner reads it as it lies.
    Region(usize, Option<Buf>),
}

/// One step.
pub(super) enum Step {
    /// Copies a view so that its elements follow each other.
    Copy {
        from: Place,
        to: Buf,
    },
    Linear {
        x: Slice,
        w: Slice,
        layout: Layout,
        out: Buf,
    },
    Zip {
        kind: Zip,
        a: Slice,
        b: Slice,
        out: Buf,
    },
    Scale {
        x: Slice,
        by: f32,
        out: Buf,
    },
    Act {
        kind: ActKind,
        x: Slice,
        out: Buf,
    },
    Norm {
        kind: Norm,
        x: Slice,
        w: Option<Slice>,
        b: Option<Slice>,
        width: usize,
        out: Buf,
    },
    Rope {
        x: Slice,
        cos: Slice,
        sin: Slice,
        tokens: usize,
        widths: (usize, usize),
        pairing: Pairing,
        out: Buf,
    },
    RopeTable {
        positions: usize,
        rule: Box<Frequencies>,
        at: Buf,
        cos: Buf,
        sin: Buf,
    },
    Embedding {
        ids: usize,
        table: Slice,
        width: usize,
        out: Buf,
    },
    Append {
        region: usize,
        x: Slice,
    },
    Attend {
        sizes: Attend,
        q: Slice,
        k: usize,
        v: usize,
        scores: Buf,
        out: Buf,
    },
    /// A fixed region as it is when the replay begins.
    Load {
        region: usize,
        to: Buf,
    },
    /// What a fixed region holds afterwards.
    Store {
        region: usize,
        x: Place,
    },
    /// An operation through candle.
    Foreign {
        op: OpId,
        kernel: Box<Kernel>,
        inputs: Vec<Option<Place>>,
        outputs: Vec<(Buf, Vec<usize>)>,
    },
    /// A span whose runner works in the arena.
    Span {
        runner: usize,
        inputs: Vec<Read>,
        outputs: Vec<Buf>,
        dims: Vec<Vec<usize>>,
    },
    /// The part that runs at a place.
    There,
    /// A span whose runner takes tensors.
    Tensors {
        runner: usize,
        inputs: Vec<Option<Place>>,
        outputs: Vec<(Buf, Vec<usize>)>,
    },
}

/// The rule of a rope table.
pub(super) type Frequencies = (Vec<f32>, f32, Option<Vec<usize>>);

/// A span of the plan and what was settled about it when the step was captured.
#[derive(Clone)]
pub(super) struct Planned {
    pub(super) name: String,
    pub(super) runner: Arc<dyn SpanRunner>,
    pub(super) frozen: crate::session::Frozen,
}
