//! Windows: the tensors of a captured step that its owner may write or read between two replays.
//!
//! Every input is one, rewritten in place, and every output is one, to be read. A written tensor must have the captured
//! form to the letter: a captured step has no way to notice another one later.

use candle_core::{DType, Device, Tensor};
use serde::Serialize;

use super::arena::{Arena, Buf};
use crate::graph::ValueId;
use crate::GraphError;

/// How a window is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowKind {
    /// Written in place: it holds the new content at once.
    Swap,
    /// Written beside: it takes effect when the next replay begins.
    Staged,
    /// Read after a replay.
    Readback,
}

/// A window somebody declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Name of the input or output.
    pub name: String,
    /// The value it stands for.
    pub value: ValueId,
    /// How it is used.
    pub kind: WindowKind,
}

/// Where a window's content is.
#[derive(Debug)]
pub(super) enum Content {
    /// In the arena.
    Values(Buf),
    /// Whole numbers beside it.
    Numbers(usize),
}

#[derive(Debug)]
pub(super) struct Window {
    pub(super) name: String,
    pub(super) value: ValueId,
    pub(super) kind: WindowKind,
    pub(super) dtype: DType,
    pub(super) dims: Vec<usize>,
    pub(super) content: Content,
    /// What the next replay begins with.
    pub(super) staged: Option<Staged>,
}

/// Content beside the window, allocated once.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) values: Vec<f32>,
    pub(super) numbers: Vec<i64>,
    pub(super) fresh: bool,
}

impl Window {
    fn form(dtype: DType, dims: &[usize], cpu: bool) -> String {
        let place = if cpu { "cpu" } else { "another device" };
        format!("{dtype:?} {dims:?} on {place}").to_lowercase()
    }

    /// Refuses another form than the captured one.
    pub(super) fn check(&self, t: &Tensor) -> Result<(), GraphError> {
        let fits = t.dtype() == self.dtype && t.dims() == self.dims && t.device().is_cpu();
        if fits && self.kind != WindowKind::Readback {
            return Ok(());
        }
        Err(GraphError::WindowForm {
            name: self.name.clone(),
            expected: match self.kind {
                WindowKind::Readback => "nothing: it is only read".into(),
                _ => Window::form(self.dtype, &self.dims, true),
            },
            given: Window::form(t.dtype(), t.dims(), t.device().is_cpu()),
        })
    }

    /// Writes checked content, where the kind says.
    pub(super) fn write(
        &mut self,
        t: &Tensor,
        arena: &mut Arena,
        numbers: &mut [Vec<i64>],
    ) -> candle_core::Result<()> {
        let flat = t.flatten_all()?;
        match (&self.content, &mut self.staged) {
            (Content::Values(buf), None) => {
                arena.get_mut(*buf).copy_from_slice(&flat.to_vec1::<f32>()?);
            }
            (Content::Values(_), Some(s)) => s.values.copy_from_slice(&flat.to_vec1::<f32>()?),
            (Content::Numbers(at), None) => numbers[*at].copy_from_slice(&whole(&flat)?),
            (Content::Numbers(_), Some(s)) => s.numbers.copy_from_slice(&whole(&flat)?),
        }
        if let Some(s) = &mut self.staged {
            s.fresh = true;
        }
        Ok(())
    }

    /// Takes what was staged.
    pub(super) fn take(&mut self, arena: &mut Arena, numbers: &mut [Vec<i64>]) {
        let Some(s) = self.staged.as_mut().filter(|s| s.fresh) else {
            return;
        };
        match &self.content {
            Content::Values(buf) => arena.get_mut(*buf).copy_from_slice(&s.values),
            Content::Numbers(at) => numbers[*at].copy_from_slice(&s.numbers),
        }
        s.fresh = false;
    }

    /// A copy of what it holds.
    pub(super) fn read(&self, arena: &Arena, numbers: &[Vec<i64>]) -> candle_core::Result<Tensor> {
        match &self.content {
            Content::Values(buf) => {
                Tensor::from_slice(arena.get(*buf), self.dims.as_slice(), &Device::Cpu)
            }
            Content::Numbers(at) => {
                Tensor::from_slice(&numbers[*at], self.dims.as_slice(), &Device::Cpu)?
                    .to_dtype(self.dtype)
            }
        }
    }
}

/// Whole numbers of any type.
pub(super) fn whole(t: &Tensor) -> candle_core::Result<Vec<i64>> {
    t.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()
}
