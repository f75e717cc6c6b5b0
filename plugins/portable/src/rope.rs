//! Rotary embedding of one head, and the tables of a call.

use structures_plugin_api::sdk::{Failure, Tensor};

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
            other => Err(Failure::refused(
                "format_no_variant",
                format!("rope_layout `{other}`, expected half or interleaved"),
            )),
        }
    }

    /// Turns all channels of `head`: `a cos - b sin`, `b cos + a sin`. Tables have one entry a pair,
    /// or, in layout half, one a channel.
    pub fn turn(self, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let pairs = head.len() / 2;
        for i in 0..pairs {
            let (a, b) = match self {
                Layout::Half => (i, i + pairs),
                Layout::Interleaved => (2 * i, 2 * i + 1),
            };
            let second = if cos.len() == pairs { i } else { i + pairs };
            let (x, y) = (head[a], head[b]);
            head[a] = x * cos[i] - y * sin[i];
            head[b] = y * cos[second] + x * sin[second];
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
    /// Checks and reads them; the last dim must be one of `widths`. The buffers have room for one
    /// table each. Tables may be f32 whatever the boundary is.
    pub fn of<'a: 't>(
        tables: [Tensor<'a>; 2],
        batch: usize,
        tokens: usize,
        widths: &[usize],
        buffers: [&'t mut [f32]; 2],
    ) -> Result<Self, Failure> {
        let bad = |text: String| Failure::invalid("bad_table", text);
        for table in &tables {
            let width = table.cols();
            if !widths.contains(&width) {
                return Err(bad(format!(
                    "a rotary table of width {width}, expected one of {widths:?}"
                )));
            }
            let lead: Vec<i64> = table.dims()[..table.rank().saturating_sub(1)].to_vec();
            let (batch, tokens) = (batch as i64, tokens as i64);
            if lead != [tokens] && lead != [batch, tokens] && lead != [1, tokens] {
                let dims = table.dims();
                let text = format!(
                    "a rotary table of dims {dims:?} for {batch} batch rows of {tokens} tokens"
                );
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_turn_by_their_layout_and_table_width() {
        let (cos, sin) = ([0.0, 0.0], [1.0, 1.0]);
        let turned = |layout: Layout, cos: &[f32], sin: &[f32]| {
            let mut head = [1.0, 2.0, 3.0, 4.0];
            layout.turn(&mut head, cos, sin);
            head
        };
        assert_eq!(turned(Layout::Half, &cos, &sin), [-3.0, -4.0, 1.0, 2.0]);
        assert_eq!(
            turned(Layout::Interleaved, &cos, &sin),
            [-2.0, 1.0, -4.0, 3.0]
        );
        let (cos, sin) = ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]);
        assert_eq!(turned(Layout::Half, &cos, &sin), [1.0, 2.0, 1.0, 2.0]);
        assert_eq!(
            Layout::from_axis("zigzag").expect_err("foreign").code,
            "format_no_variant"
        );
    }

    #[test]
    fn tables_are_shared_or_one_a_batch_row() {
        let data: Vec<f32> = (0..12).map(|v| v as f32).collect();
        let read = |dims: &[usize], batch, tokens, widths: &[usize]| {
            let len = dims.iter().product::<usize>();
            let table = Tensor::from_f32(&data[..len], dims).expect("fits");
            let tables = Tables::of([table; 2], batch, tokens, widths, [&mut [], &mut []]);
            tables.map(|t| t.at(batch - 1, tokens - 1).0[0])
        };
        assert_eq!(read(&[3, 2], 2, 3, &[2]), Ok(4.0));
        assert_eq!(read(&[1, 3, 2], 2, 3, &[2, 4]), Ok(4.0));
        assert_eq!(read(&[2, 3, 2], 2, 3, &[2]), Ok(10.0));
        for (dims, widths) in [(&[3, 2][..], &[4][..]), (&[2, 2], &[2]), (&[3, 3, 1], &[1])] {
            let code = read(dims, 2, 3, widths).map_err(|failure| failure.code);
            assert_eq!(code, Err("bad_table".into()));
        }
    }
}
