//! Rotary embedding of one head, and the tables of a call.

use structures_plugin_api::sdk::{Failure, Tensor};

use crate::isa::vectorised;
use crate::ports;

/// Which channels make a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `i` and `i + R/2`.
    Half,
    /// `2i` and `2i + 1`.
    Interleaved,
}

impl Layout {
    /// By the value of a structure's `rope_layout` axis.
    pub fn from_axis(value: &str) -> Result<Self, Failure> {
        match value {
            "half" => Ok(Layout::Half),
            "interleaved" => Ok(Layout::Interleaved),
            other => {
                let text = format!("rope_layout `{other}`, expected half or interleaved");
                Err(Failure::refused("format_no_variant", text))
            }
        }
    }
}

vectorised! {
    /// Turns all channels of each head of `heads`: `a cos - b sin`, `b cos + a sin`. The heads are `stride` apart and
    /// `width` of their channels turn. Tables have one entry a pair, or, in layout half, one a channel.
    pub fn turn(layout: Layout, heads: &mut [f32], stride: usize, width: usize, cos: &[f32], sin: &[f32]) {
        let pairs = width / 2;
        for head in heads.chunks_exact_mut(stride) {
            let head = &mut head[..width];
            match layout {
                Layout::Half => {
                    let second = if cos.len() == pairs { 0 } else { pairs };
                    let (a, b) = head.split_at_mut(pairs);
                    let (cos_a, sin_a) = (&cos[..pairs], &sin[..pairs]);
                    let (cos_b, sin_b) = (&cos[second..][..pairs], &sin[second..][..pairs]);
                    for i in 0..pairs {
                        let (x, y) = (a[i], b[i]);
                        a[i] = x * cos_a[i] - y * sin_a[i];
                        b[i] = y * cos_b[i] + x * sin_b[i];
                    }
                }
                Layout::Interleaved => {
                    for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                        let (x, y) = (pair[0], pair[1]);
                        pair[0] = x * cos - y * sin;
                        pair[1] = y * cos + x * sin;
                    }
                }
            }
        }
    }
}

/// The tables of a call, `[T, W]` or `[B, T, W]`, read.
pub struct Tables<'t> {
    cos: &'t [f32],
    sin: &'t [f32],
    width: usize,
    /// Tokens of one batch row, or 0 when all batch rows share the tables.
    per_batch: usize,
}

impl<'t> Tables<'t> {
    /// Checks and reads them; the last dim must be one of `widths`.
    pub fn of<'a: 't>(
        tables: [Tensor<'a>; 2],
        batch: usize,
        tokens: usize,
        widths: &[usize],
        buffers: &'t mut [Vec<f32>; 2],
    ) -> Result<Self, Failure> {
        let bad = |text: String| Failure::invalid("bad_table", text);
        for table in &tables {
            let width = table.cols();
            if !widths.contains(&width) {
                let text = format!("a rotary table of width {width}, expected one of {widths:?}");
                return Err(bad(text));
            }
            let lead = &table.dims()[..table.rank().saturating_sub(1)];
            let (batch, tokens) = (batch as i64, tokens as i64);
            if lead != [tokens] && lead != [batch, tokens] && lead != [1, tokens] {
                let dims = table.dims();
                let text = format!("a rotary table of dims {dims:?} for {batch} x {tokens} tokens");
                return Err(bad(text));
            }
        }
        let [cos, sin] = tables;
        if cos.dims() != sin.dims() {
            let text = format!("cos of dims {:?}, sin of {:?}", cos.dims(), sin.dims());
            return Err(bad(text));
        }
        let shared = cos.rank() == 2 || (cos.dims()[0] == 1 && batch != 1);
        let [cos_buffer, sin_buffer] = buffers;
        Ok(Tables {
            cos: ports::floats(&cos, cos_buffer)?,
            sin: ports::floats(&sin, sin_buffer)?,
            width: cos.cols(),
            per_batch: if shared { 0 } else { tokens },
        })
    }

    /// Cosines and sines of one token.
    pub fn at(&self, batch: usize, token: usize) -> (&'t [f32], &'t [f32]) {
        let from = (batch * self.per_batch + token) * self.width;
        let range = from..from + self.width;
        (&self.cos[range.clone()], &self.sin[range])
    }
}
