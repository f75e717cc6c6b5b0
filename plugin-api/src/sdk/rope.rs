//! What is read for a rotary embedding: the layout of pairs, how many channels turn, the tables of a
//! call.
//!
//! It does not turn anything: that is a kernel.

use crate::sdk::ports::{floats, Room};
use crate::sdk::{Failure, Tensor};

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
}

/// Channels of a head of `d` that turn: all of them, or as many as are given, which are whole pairs:
/// else `bad_rotary_dim`.
pub fn channels(d: usize, full: bool, given: Option<f64>) -> Result<usize, Failure> {
    let rotary = match given {
        Some(given) => given,
        None if full => d as f64,
        None => {
            let text = "how many channels of a head turn is not given";
            return Err(Failure::refused("param_missing", text));
        }
    };
    let pairs = rotary / 2.0;
    let fits = pairs.fract() == 0.0 && pairs > 0.0 && rotary <= d as f64;
    if !fits || (full && rotary != d as f64) {
        let text = format!("{rotary} rotary channels of a head of {d}, full: {full}");
        return Err(Failure::refused("bad_rotary_dim", text));
    }
    Ok(rotary as usize)
}

/// The tables of a call, `[T, W]` or `[B, T, W]`, read.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'t> {
    cos: &'t [f32],
    sin: &'t [f32],
    width: usize,
    /// Tokens of one batch row, or 0 when all batch rows share the tables.
    per_batch: usize,
}

impl<'t> Tables<'t> {
    /// Checks and reads them; the last dim must be one of `widths`: else `bad_table`. The buffers are
    /// room for one table each. Tables may be f32 whatever the boundary is.
    pub fn of<'a: 't>(
        tables: [Tensor<'a>; 2],
        batch: usize,
        tokens: usize,
        widths: &[usize],
        buffers: [impl Room<'t>; 2],
    ) -> Result<Self, Failure> {
        let bad = |text: String| Failure::invalid("bad_table", text);
        for table in &tables {
            let width = table.cols();
            if !widths.contains(&width) {
                return Err(bad(format!(
                    "a rotary table of width {width}, expected one of {widths:?}"
                )));
            }
            let lead = &table.dims()[..table.rank().saturating_sub(1)];
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
            cos: floats(&cos, cos_buffer)?,
            sin: floats(&sin, sin_buffer)?,
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
    fn layouts_and_channels_are_read_or_refused() {
        assert_eq!(Layout::from_axis("half"), Ok(Layout::Half));
        assert_eq!(Layout::from_axis("interleaved"), Ok(Layout::Interleaved));
        let code = |failure: Failure| failure.code;
        let foreign = Layout::from_axis("zigzag").map_err(code);
        assert_eq!(foreign, Err("format_no_variant".into()));
        let of = |full, given| channels(8, full, given).map_err(code);
        assert_eq!(of(true, None), Ok(8));
        assert_eq!(of(true, Some(8.0)), Ok(8));
        assert_eq!(of(false, Some(4.0)), Ok(4));
        assert_eq!(of(false, None), Err("param_missing".into()));
        for (full, given) in [(true, 4.0), (false, 0.0), (false, 3.0), (false, 10.0)] {
            assert_eq!(of(full, Some(given)), Err("bad_rotary_dim".into()));
        }
    }

    #[test]
    fn tables_are_shared_or_one_a_batch_row() {
        let data: Vec<f32> = (0..12).map(|v| v as f32).collect();
        let read = |dims: &[usize], batch, tokens, widths: &[usize]| {
            let len = dims.iter().product::<usize>();
            let table = Tensor::from_f32(&data[..len], dims).expect("fits");
            let tables = Tables::of(
                [table; 2],
                batch,
                tokens,
                widths,
                [&mut [][..], &mut [][..]],
            );
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
