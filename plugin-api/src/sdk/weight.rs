//! A product's weight as a host gives it: plain numbers, or packed rows of its checkpoint.

use crate::formats::BlockFormat;
use crate::sdk::{Failure, Tensor};

/// A weight of `k` inputs and `n` output channels.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Dims `[K, N]`, any strides.
    Plain(Tensor<'a>),
    /// Only where the form declares the format ([`FormDecl::packed`](crate::describe::FormDecl)).
    Packed(PackedRows<'a>),
}

/// Rows of a packed weight, one an output channel.
#[derive(Clone, Copy, Debug)]
pub struct PackedRows<'a> {
    format: BlockFormat,
    n: usize,
    k: usize,
    width: usize,
    data: &'a [u8],
}

impl<'a> PackedRows<'a> {
    /// `n` rows of `k` inputs in one run of memory; `view_dims` when that is not their size.
    pub fn new(format: BlockFormat, n: usize, k: usize, data: &'a [u8]) -> Result<Self, Failure> {
        let width = format.row_bytes(k);
        match width.filter(|width| width.checked_mul(n) == Some(data.len())) {
            Some(width) => Ok(PackedRows {
                format,
                n,
                k,
                width,
                data,
            }),
            None => {
                let text = format!("{} bytes are not {n} {format} rows of {k}", data.len());
                Err(Failure::invalid("view_dims", text))
            }
        }
    }

    /// How a row is stored.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// Output channels.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs of a channel.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All rows.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Values of one channel from input `from` on, as many as `out` holds.
    ///
    /// # Panics
    /// When the channel or a value lies beyond them.
    pub fn decode(&self, channel: usize, from: usize, out: &mut [f32]) {
        let row = &self.data[channel * self.width..][..self.width];
        self.format.decode(row, self.k, from, out);
    }
}

impl<'a> From<Tensor<'a>> for Weight<'a> {
    fn from(tensor: Tensor<'a>) -> Self {
        Weight::Plain(tensor)
    }
}

impl Weight<'_> {
    /// Inputs and output channels, `[K, N]`: else `dims_inconsistent`.
    pub fn dims(&self) -> Result<[usize; 2], Failure> {
        match self {
            Weight::Packed(rows) => Ok([rows.k, rows.n]),
            Weight::Plain(tensor) => match *tensor.dims() {
                [k, n] => Ok([k as usize, n as usize]),
                ref dims => {
                    let text = format!("a weight of dims {dims:?}, expected [K, N]");
                    Err(Failure::refused("dims_inconsistent", text))
                }
            },
        }
    }

    /// Values of one output channel into a buffer of K elements.
    pub fn read_channel(&self, channel: usize, out: &mut [f32]) -> Result<(), Failure> {
        match self {
            Weight::Plain(tensor) => tensor.select(1, channel)?.read_f32(out),
            Weight::Packed(rows) => {
                rows.decode(channel, 0, out);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_size_their_format_says() {
        let data = [0_u8; 2 * 34];
        let rows = PackedRows::new(BlockFormat::Q8_0, 2, 32, &data).expect("fits");
        assert_eq!((rows.width(), rows.n(), rows.k()), (34, 2, 32));
        assert_eq!(Weight::Packed(rows).dims(), Ok([32, 2]));
        for (n, k) in [(3, 32), (2, 64), (2, 31), (usize::MAX, 32)] {
            let failure = PackedRows::new(BlockFormat::Q8_0, n, k, &data);
            assert_eq!(failure.expect_err("misfit").code, "view_dims");
        }
        let flat = Tensor::from_f32(&[1.0, 2.0], &[2]).expect("fits");
        let failure = Weight::from(flat).dims().expect_err("rank 1");
        assert_eq!(failure.code, "dims_inconsistent");
    }
}
