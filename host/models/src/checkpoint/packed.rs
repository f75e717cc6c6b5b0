//! Weights in the packed form they are stored in: rows of codes with their scales, nothing decoded.
//!
//! Owns reading them, and the row operations a parameter may need (order, range, concatenation): a row is whole in
//! itself, so none of these touches a code. What a row means is `plugin-api::formats`'.

use candle_core::quantized::GgmlDType;
use structures_plugin_api::formats::BlockFormat;

use super::stored::StoredType;
use super::Checkpoint;
use crate::ModelError;

/// `n` rows of `k` elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedWeight {
    /// How a row is stored.
    pub format: BlockFormat,
    /// Output channels.
    pub n: usize,
    /// Inputs of a channel.
    pub k: usize,
    /// The rows, one after another.
    pub rows: Vec<u8>,
}

impl PackedWeight {
    /// Bytes of a row.
    pub fn width(&self) -> usize {
        self.rows.len() / self.n.max(1)
    }

    /// All values, row-major `[n, k]`.
    pub fn decode(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.n * self.k];
        let rows = self.rows.chunks_exact(self.width().max(1));
        for (row, out) in rows.zip(values.chunks_exact_mut(self.k.max(1))) {
            self.format.decode(row, self.k, 0, out);
        }
        values
    }

    /// The rows in another order: row `i` is what row `from(i)` was.
    pub(crate) fn reordered(&self, from: impl Fn(usize) -> usize) -> PackedWeight {
        let width = self.width();
        let rows = (0..self.n).flat_map(|i| &self.rows[from(i) * width..][..width]);
        PackedWeight {
            rows: rows.copied().collect(),
            ..*self
        }
    }

    /// Rows `from..to`; `None` when there are not as many.
    pub(crate) fn range(mut self, from: usize, to: usize) -> Option<PackedWeight> {
        let width = self.width();
        if from > to || to > self.n {
            return None;
        }
        self.rows.truncate(to * width);
        self.rows.drain(..from * width);
        self.n = to - from;
        Some(self)
    }

    /// Both, one below the other; `None` when their rows are not alike.
    pub(crate) fn above(mut self, below: &PackedWeight) -> Option<PackedWeight> {
        if (self.format, self.k) != (below.format, below.k) {
            return None;
        }
        self.rows.extend_from_slice(&below.rows);
        self.n += below.n;
        Some(self)
    }
}

/// The packed format that a stored type is.
fn format_of(stored: StoredType) -> Option<BlockFormat> {
    match stored {
        StoredType::Ggml(GgmlDType::Q8_0) => Some(BlockFormat::Q8_0),
        StoredType::Ggml(GgmlDType::Q4_0) => Some(BlockFormat::Q4_0),
        StoredType::Ggml(GgmlDType::Q4_1) => Some(BlockFormat::Q4_1),
        StoredType::Ggml(GgmlDType::Q4K) => Some(BlockFormat::Q4K),
        StoredType::Ggml(GgmlDType::Q6K) => Some(BlockFormat::Q6K),
        _ => None,
    }
}

impl Checkpoint {
    /// The packed format a matrix is stored in; `None` for anything else. Reads nothing.
    pub fn packed_format(&self, name: &str) -> Option<BlockFormat> {
        if let Some(weight) = self.compressed.weights.get(name) {
            return Some(weight.format);
        }
        let entry = self.tensors.get(name)?;
        format_of(entry.stored).filter(|_| entry.dims.len() == 2)
    }

    /// Reads a matrix as it is stored; `None` when that is not packed.
    pub fn packed(&self, name: &str) -> Result<Option<PackedWeight>, ModelError> {
        if let Some(weight) = self.compressed.weights.get(name) {
            return weight.read(self).map(Some);
        }
        let (Some(format), Some(entry)) = (self.packed_format(name), self.tensors.get(name)) else {
            return Ok(None);
        };
        Ok(Some(PackedWeight {
            format,
            n: entry.dims[0],
            k: entry.dims[1],
            rows: self.bytes(name)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::{QStorage, QTensor};
    use candle_core::{Device, Tensor};

    fn noise(n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 7919 + i * i * 31) % 2003) as f32 / 1001.0 - 1.0)
            .collect()
    }

    /// The same bits as the reader of the host path, from whole blocks it made and from bytes nobody meant.
    #[test]
    fn b_246_every_block_decodes_to_the_bits_the_host_path_reads() {
        for (dtype, format) in [
            (GgmlDType::Q8_0, BlockFormat::Q8_0),
            (GgmlDType::Q4_0, BlockFormat::Q4_0),
            (GgmlDType::Q4_1, BlockFormat::Q4_1),
            (GgmlDType::Q4K, BlockFormat::Q4K),
            (GgmlDType::Q6K, BlockFormat::Q6K),
        ] {
            let (n, k) = (5, 512);
            let made = Tensor::from_vec(noise(n * k), (n, k), &Device::Cpu).unwrap();
            let made = QTensor::quantize(&made, dtype).unwrap();
            let made = made.data().unwrap().into_owned();
            // Half-precision exponents stay below the infinite one.
            let odd: Vec<u8> = (0..made.len())
                .map(|i| (i * i * 7 + i * 13) as u8 & 0x7b)
                .collect();
            for rows in [made, odd] {
                let storage = QStorage::from_data(rows.clone().into(), &Device::Cpu, dtype);
                let want = QTensor::new(storage.unwrap(), (n, k)).unwrap();
                let want = want
                    .dequantize(&Device::Cpu)
                    .unwrap()
                    .flatten_all()
                    .unwrap();
                let want = want.to_vec1::<f32>().unwrap();
                let got = PackedWeight { format, n, k, rows }.decode();
                let differ = want
                    .iter()
                    .zip(&got)
                    .position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(differ, None, "{format}");
            }
        }
    }

    #[test]
    fn rows_move_without_their_codes_changing() {
        let weight = |first: u8, n: usize| PackedWeight {
            format: BlockFormat::Q8_0,
            n,
            k: 32,
            rows: (0..n).flat_map(|i| [first + i as u8; 34]).collect(),
        };
        let both = weight(10, 3).above(&weight(20, 2)).unwrap();
        assert_eq!(
            both,
            PackedWeight {
                rows: both.rows.clone(),
                ..weight(0, 5)
            }
        );
        let first = |w: &PackedWeight| w.rows.iter().step_by(34).copied().collect::<Vec<u8>>();
        assert_eq!(first(&both), [10, 11, 12, 20, 21]);
        assert_eq!(first(&both.reordered(|i| 4 - i)), [21, 20, 12, 11, 10]);
        assert_eq!(first(&both.clone().range(1, 4).unwrap()), [11, 12, 20]);
        assert!(both.clone().range(2, 6).is_none() && both.clone().range(3, 2).is_none());
        let other = PackedWeight {
            k: 64,
            ..weight(0, 1)
        };
        assert!(both.above(&other).is_none());
    }
}
