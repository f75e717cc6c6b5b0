//! A matrix kept as it is stored and widened a row at a time: a table of embeddings in 16 bits or in blocks is a half to
//! an eighth of its f32, and a token reads one row of it.
//!
//! Owns reading such a row, to the bit as the whole tensor has it. Does not own who looks up what.

use half::{bf16, f16};
use structures_graph::{GraphError, Rows};
use structures_plugin_api::formats::BlockFormat;

use candle_core::quantized::GgmlDType;

use super::stored::{first_non_finite, StoredType};
use super::Checkpoint;
use crate::ModelError;

/// How a row is widened.
#[derive(Clone, Copy, Debug)]
enum Kept {
    F16,
    Bf16,
    Blocks(BlockFormat),
}

/// Rows as they are stored.
#[derive(Debug)]
pub(crate) struct StoredRows {
    what: String,
    kept: Kept,
    rows: usize,
    width: usize,
    bytes: Vec<u8>,
}

impl Checkpoint {
    /// Reads a matrix to look rows up in; `None` when it is no matrix, or in a form that is not smaller than f32.
    pub(crate) fn rows(&self, name: &str) -> Result<Option<StoredRows>, ModelError> {
        let Some(entry) = self.tensors.get(name) else {
            return Ok(None);
        };
        let kept = match entry.stored {
            StoredType::F16 | StoredType::Ggml(GgmlDType::F16) => Kept::F16,
            StoredType::Bf16 | StoredType::Ggml(GgmlDType::BF16) => Kept::Bf16,
            _ => match self.packed_format(name) {
                Some(format) => Kept::Blocks(format),
                None => return Ok(None),
            },
        };
        let &[rows, width] = entry.dims.as_slice() else {
            return Ok(None);
        };
        if self.compressed.weights.contains_key(name) || rows == 0 || width == 0 {
            return Ok(None);
        }
        Ok(Some(StoredRows {
            what: format!("`{name}` of {}", self.file_of(name).display()),
            kept,
            rows,
            width,
            bytes: self.bytes(name)?,
        }))
    }
}

impl Rows for StoredRows {
    fn dims(&self) -> (usize, usize) {
        (self.rows, self.width)
    }

    fn row(&self, at: usize, out: &mut [f32]) -> Result<(), GraphError> {
        let bytes = self.bytes.len() / self.rows;
        let row = &self.bytes[at * bytes..(at + 1) * bytes];
        let halves = || row.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self.kept {
            Kept::F16 => out
                .iter_mut()
                .zip(halves())
                .for_each(|(o, b)| *o = f16::from_le_bytes(b).to_f32()),
            Kept::Bf16 => out
                .iter_mut()
                .zip(halves())
                .for_each(|(o, b)| *o = bf16::from_le_bytes(b).to_f32()),
            Kept::Blocks(format) => format.decode(row, self.width, 0, out),
        }
        match first_non_finite(out) {
            None => Ok(()),
            Some((count, first, value)) => Err(GraphError::MissingParam {
                param: self.what.clone(),
                reason: format!(
                    "row {at} holds {count} values that are not finite, the first is {value} at column {first}: get \
                     the checkpoint again"
                ),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: usize = 5;
    const WIDTH: usize = 512;

    fn stored(stored: StoredType, bytes: Vec<u8>) -> StoredRows {
        let kept = match stored {
            StoredType::F16 => Kept::F16,
            StoredType::Bf16 => Kept::Bf16,
            _ => Kept::Blocks(BlockFormat::Q8_0),
        };
        StoredRows {
            what: "`embed`".into(),
            kept,
            rows: ROWS,
            width: WIDTH,
            bytes,
        }
    }

    #[test]
    fn a_row_is_to_the_bit_what_the_whole_tensor_has() {
        let noise: Vec<u8> = (0..ROWS * WIDTH * 2)
            .map(|i| (i * i * 7 + i * 13) as u8 & 0x7b)
            .collect();
        let blocks = GgmlDType::Q8_0.type_size() * ROWS * WIDTH / GgmlDType::Q8_0.block_size();
        for (kind, bytes) in [
            (StoredType::F16, noise.clone()),
            (StoredType::Bf16, noise.clone()),
            (StoredType::Ggml(GgmlDType::Q8_0), noise[..blocks].to_vec()),
        ] {
            let whole = kind.widen(bytes.clone(), &[ROWS, WIDTH]).unwrap();
            let whole = whole.to_vec2::<f32>().unwrap();
            let table = stored(kind, bytes);
            for (at, want) in whole.iter().enumerate() {
                let mut got = vec![f32::NAN; WIDTH];
                table.row(at, &mut got).unwrap();
                let differ = (0..WIDTH).find(|i| got[*i].to_bits() != want[*i].to_bits());
                assert_eq!(differ, None, "{kind:?} row {at}");
            }
        }
        // Every other block format is held to the same by B-246.
    }

    #[test]
    fn a_row_with_a_value_that_is_not_finite_names_it() {
        let mut bytes = vec![0u8; ROWS * WIDTH * 2];
        let nan = bf16::NAN.to_le_bytes();
        let at = (3 * WIDTH + 7) * 2;
        bytes[at..at + 2].copy_from_slice(&nan);
        let table = stored(StoredType::Bf16, bytes);
        let mut out = vec![0.0; WIDTH];
        table.row(2, &mut out).unwrap();
        match table.row(3, &mut out).unwrap_err() {
            GraphError::MissingParam { param, reason } => {
                assert!(
                    param.contains("embed")
                        && reason.contains("row 3")
                        && reason.contains("column 7"),
                    "{reason}"
                );
            }
            e => panic!("{e}"),
        }
    }
}
