//! Tensors with watched room around them.
//!
//! A [`Room`] holds a tensor somewhere inside a larger piece of memory: aligned as asked, its rows with gaps between
//! them where asked. Everything that is not an element is a known pattern, so what a call writes beside its outputs is
//! seen, and what it reads beside its inputs is not a number. Elements of an output are poisoned with one NaN of
//! their own.

use half::bf16;
use structures_loader::{HostTensor, HostTensorMut, LoaderError};
use structures_plugin_api::abi::{TensorView, MAX_RANK};
use structures_plugin_api::DType;
use structures_suite::operand::{Data, Operand};

/// Bytes before and behind a tensor.
const MARGIN: usize = 16 * 1024;
/// Boundary that an alignment is counted from.
const LINE: usize = 64;
/// Around tensors: a NaN in every float format, so that whoever reads too far is seen, too.
const AROUND: u8 = 0xff;

/// Poison of f32: a NaN that no arithmetic makes of other values.
const POISON_F32: u32 = 0x7fc0_dead;
const POISON_BF16: u16 = 0x7fdb;
const POISON_I64: i64 = i64::MIN + 0xdead;

/// How a tensor lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lay {
    /// Bytes behind a 64-byte boundary.
    pub offset: usize,
    /// Elements between two rows.
    pub gap: usize,
    /// A matrix stored the other way round.
    pub turned: bool,
}

/// A tensor and the memory around it.
#[derive(Clone, Debug)]
pub struct Room {
    bytes: Vec<u8>,
    start: usize,
    dtype: DType,
    dims: Vec<usize>,
    strides: Vec<usize>,
}

impl Room {
    /// A tensor with these values (its own layout does not matter).
    pub fn of(operand: &Operand, lay: Lay) -> Self {
        let mut room = Self::empty(&operand.dims, dtype_of(operand), lay);
        let values = row_major(operand);
        for (index, bytes) in values.iter().enumerate() {
            let at = room.at(index);
            room.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        }
        room
    }

    /// Poisoned room for an output like this one.
    pub fn poisoned(operand: &Operand, lay: Lay) -> Self {
        let mut room = Self::empty(&operand.dims, dtype_of(operand), lay);
        room.poison();
        room
    }

    fn empty(dims: &[usize], dtype: DType, lay: Lay) -> Self {
        let size = dtype.size();
        let mut strides = vec![1; dims.len()];
        let mut next = 1;
        for axis in (0..dims.len()).rev() {
            strides[axis] = next;
            next *= dims[axis].max(1);
            if axis + 1 == dims.len() {
                next += lay.gap;
            }
        }
        if lay.turned && dims.len() == 2 {
            strides = vec![1, dims[0].max(1)];
            next = dims.iter().map(|d| (*d).max(1)).product();
        }
        let bytes = vec![AROUND; 2 * MARGIN + 2 * LINE + next * size];
        let base = bytes.as_ptr().addr();
        let start = (base + MARGIN).next_multiple_of(LINE) - base + lay.offset;
        Room {
            bytes,
            start,
            dtype,
            dims: dims.to_vec(),
            strides,
        }
    }

    /// Poisons every element.
    pub fn poison(&mut self) {
        for index in 0..self.len() {
            let at = self.at(index);
            match self.dtype {
                DType::Bf16 => self.put(at, &POISON_BF16.to_ne_bytes()),
                DType::I64 => self.put(at, &POISON_I64.to_ne_bytes()),
                _ => self.put(at, &POISON_F32.to_ne_bytes()),
            }
        }
    }

    /// Sets every element to a number.
    pub fn fill(&mut self, value: f32) {
        for index in 0..self.len() {
            let at = self.at(index);
            match self.dtype {
                DType::Bf16 => self.put(at, &bf16::from_f32(value).to_ne_bytes()),
                DType::I64 => self.put(at, &(value as i64).to_ne_bytes()),
                _ => self.put(at, &value.to_ne_bytes()),
            }
        }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// First byte of an element, counted row-major.
    fn at(&self, index: usize) -> usize {
        let (mut rest, mut offset) = (index, 0);
        for (dim, stride) in self.dims.iter().zip(&self.strides).rev() {
            offset += rest % dim * stride;
            rest /= dim;
        }
        self.start + offset * self.dtype.size()
    }

    /// Bytes from the first to behind the last element, gaps included.
    fn reach(&self) -> usize {
        if self.len() == 0 {
            return 0;
        }
        let far = self.dims.iter().zip(&self.strides);
        let last: usize = far.map(|(d, s)| (d - 1) * s).sum();
        (last + 1) * self.dtype.size()
    }

    /// What a plugin reads.
    ///
    /// # Errors
    /// When it is not aligned to its element; [`Room::raw`] has no such objection.
    pub fn view(&self) -> Result<HostTensor<'_>, LoaderError> {
        let part = &self.bytes[self.start..self.start + self.reach()];
        HostTensor::bytes(part, self.dtype, &self.dims, &self.strides)
    }

    /// What a plugin fills.
    ///
    /// # Errors
    /// As [`Room::view`].
    pub fn view_mut(&mut self) -> Result<HostTensorMut<'_>, LoaderError> {
        let end = self.start + self.reach();
        let part = &mut self.bytes[self.start..end];
        HostTensorMut::bytes(part, self.dtype, &self.dims, &self.strides)
    }

    /// The view as plain numbers, whatever its alignment.
    pub fn raw(&mut self) -> TensorView {
        let mut view = TensorView {
            data: self.bytes[self.start..].as_mut_ptr().cast(),
            dtype: self.dtype as u32,
            rank: self.dims.len().min(MAX_RANK) as u32,
            ..TensorView::ABSENT
        };
        for (i, (dim, stride)) in self.dims.iter().zip(&self.strides).enumerate() {
            view.dims[i] = *dim as i64;
            view.strides[i] = *stride as i64;
        }
        view
    }

    /// Bits of an element.
    pub fn bits(&self) -> Vec<u64> {
        (0..self.len()).map(|index| self.bits_at(index)).collect()
    }

    fn bits_at(&self, index: usize) -> u64 {
        let at = self.at(index);
        let mut word = [0; 8];
        let size = self.dtype.size();
        word[..size].copy_from_slice(&self.bytes[at..at + size]);
        u64::from_le_bytes(word)
    }

    /// Which elements still hold the poison.
    pub fn intact(&self) -> Vec<usize> {
        let poison = match self.dtype {
            DType::Bf16 => u64::from(POISON_BF16),
            DType::I64 => POISON_I64 as u64,
            _ => u64::from(POISON_F32),
        };
        (0..self.len())
            .filter(|i| self.bits_at(*i) == poison)
            .collect()
    }

    /// Values, row-major, widened.
    pub fn values(&self) -> Vec<f32> {
        (0..self.len())
            .map(|index| {
                let bits = self.bits_at(index);
                match self.dtype {
                    DType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
                    DType::I64 => bits as i64 as f32,
                    _ => f32::from_bits(bits as u32),
                }
            })
            .collect()
    }

    /// The tensor alone, row-major.
    pub fn operand(&self) -> Operand {
        Operand::new(&self.values(), &self.dims, self.dtype)
    }

    /// Where the memory around the elements is no longer what it was, in bytes from the first element; `None` when it
    /// is.
    pub fn touched(&self) -> Option<i64> {
        let size = self.dtype.size();
        let mut own = vec![false; self.bytes.len()];
        for index in 0..self.len() {
            let at = self.at(index);
            own[at..at + size].fill(true);
        }
        let changed = (self.bytes.iter().zip(&own)).position(|(b, own)| !own && *b != AROUND);
        changed.map(|at| at as i64 - self.start as i64)
    }

    /// Its sizes.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }
}

fn dtype_of(operand: &Operand) -> DType {
    match operand.data {
        Data::F32(_) => DType::F32,
        Data::Bf16(_) => DType::Bf16,
        Data::I64(_) => DType::I64,
    }
}

/// Bytes of every element, row-major whatever the layout.
fn row_major(operand: &Operand) -> Vec<Vec<u8>> {
    let len: usize = operand.dims.iter().product();
    (0..len)
        .map(|index| {
            let (mut rest, mut at) = (index, 0);
            for (dim, stride) in operand.dims.iter().zip(&operand.strides).rev() {
                at += rest % dim * stride;
                rest /= dim;
            }
            match &operand.data {
                Data::F32(v) => v[at].to_ne_bytes().to_vec(),
                Data::Bf16(v) => v[at].to_ne_bytes().to_vec(),
                Data::I64(v) => v[at].to_ne_bytes().to_vec(),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_comes_back_from_any_layout() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let operand = Operand::new(&values, &[2, 3], DType::F32);
        for lay in [
            Lay::default(),
            Lay {
                gap: 5,
                ..Lay::default()
            },
            Lay {
                offset: 4,
                ..Lay::default()
            },
            Lay {
                turned: true,
                ..Lay::default()
            },
            Lay {
                offset: 1,
                gap: 2,
                turned: false,
            },
        ] {
            let mut room = Room::of(&operand, lay);
            assert_eq!(room.values(), values, "{lay:?}");
            assert_eq!(room.touched(), None);
            assert_eq!(room.raw().data.addr() % LINE, lay.offset);
            assert_eq!(room.view().is_ok(), lay.offset % 4 == 0);
        }
        let turned = Room::of(&operand.clone().swapped(), Lay::default());
        assert_eq!(turned.values(), values);
    }

    #[test]
    fn what_is_written_is_seen_and_what_is_not_too() {
        let like = Operand::new(&[0.0; 6], &[2, 3], DType::F32);
        let mut room = Room::poisoned(
            &like,
            Lay {
                gap: 2,
                ..Lay::default()
            },
        );
        assert_eq!(room.intact().len(), 6);
        let at = room.at(4);
        room.put(at, &1.0_f32.to_ne_bytes());
        assert_eq!(room.intact(), [0, 1, 2, 3, 5]);
        assert_eq!(room.touched(), None);
        let end = room.start + 3 * 4;
        room.put(end, &1.0_f32.to_ne_bytes());
        assert_eq!(room.touched(), Some(12), "the gap behind the first row");
        for (dtype, values) in [(DType::Bf16, 2), (DType::I64, 1)] {
            let room = Room::poisoned(
                &Operand::new(&[0.0; 2], &[values, 2 / values], dtype),
                Lay::default(),
            );
            assert_eq!(room.intact().len(), 2);
        }
    }
}
