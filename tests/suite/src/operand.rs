//! A tensor on its way to a plugin: values in a dtype, dims, strides.

use candle_core::{DType as HostType, Device, Tensor};
use half::bf16;
use structures_loader::{HostTensor, HostTensorMut, LoaderError};
use structures_plugin_api::DType;

use crate::error::SuiteError;

/// Values as they lie.
#[derive(Clone, Debug)]
pub enum Data {
    /// f32.
    F32(Vec<f32>),
    /// bf16.
    Bf16(Vec<bf16>),
    /// i64.
    I64(Vec<i64>),
}

/// A tensor.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Values in memory order.
    pub data: Data,
    /// Sizes.
    pub dims: Vec<usize>,
    /// In elements.
    pub strides: Vec<usize>,
}

impl Operand {
    /// Row-major values in a dtype (f32, bf16 or i64); bf16 rounds to nearest even.
    pub fn new(values: &[f32], dims: &[usize], dtype: DType) -> Self {
        let data = match dtype {
            DType::Bf16 => Data::Bf16(values.iter().map(|v| bf16::from_f32(*v)).collect()),
            DType::I64 => Data::I64(values.iter().map(|v| *v as i64).collect()),
            _ => Data::F32(values.to_vec()),
        };
        Operand {
            data,
            dims: dims.to_vec(),
            strides: row_major(dims),
        }
    }

    /// Room for an output, every element a NaN.
    pub fn poisoned(dims: &[usize], dtype: DType) -> Self {
        let len = dims.iter().product();
        Operand::new(&vec![f32::NAN; len], dims, dtype)
    }

    /// The same matrix stored the other way round, behind swapped strides; anything else as it is.
    #[must_use]
    pub fn swapped(self) -> Self {
        let [rows, cols] = self.dims[..] else {
            return self;
        };
        fn turned<T: Copy>(values: &[T], rows: usize, cols: usize) -> Vec<T> {
            (0..rows * cols)
                .map(|i| values[i % rows * cols + i / rows])
                .collect()
        }
        Operand {
            data: match &self.data {
                Data::F32(v) => Data::F32(turned(v, rows, cols)),
                Data::Bf16(v) => Data::Bf16(turned(v, rows, cols)),
                Data::I64(v) => Data::I64(turned(v, rows, cols)),
            },
            strides: vec![1, rows],
            dims: self.dims,
        }
    }

    /// What a plugin reads.
    pub fn view(&self) -> Result<HostTensor<'_>, LoaderError> {
        match &self.data {
            Data::F32(v) => HostTensor::strided(v, &self.dims, &self.strides),
            Data::Bf16(v) => HostTensor::strided(v, &self.dims, &self.strides),
            Data::I64(v) => HostTensor::strided(v, &self.dims, &self.strides),
        }
    }

    /// What a plugin fills.
    pub fn view_mut(&mut self) -> Result<HostTensorMut<'_>, LoaderError> {
        match &mut self.data {
            Data::F32(v) => HostTensorMut::strided(v, &self.dims, &self.strides),
            Data::Bf16(v) => HostTensorMut::strided(v, &self.dims, &self.strides),
            Data::I64(v) => HostTensorMut::strided(v, &self.dims, &self.strides),
        }
    }

    /// Values in memory order, widened.
    pub fn values(&self) -> Vec<f32> {
        match &self.data {
            Data::F32(v) => v.clone(),
            Data::Bf16(v) => v.iter().map(|v| v.to_f32()).collect(),
            Data::I64(v) => v.iter().map(|v| *v as f32).collect(),
        }
    }

    /// The tensor the reference reads; of a row-major operand.
    pub fn tensor(&self) -> Result<Tensor, SuiteError> {
        let dims = self.dims.as_slice();
        let tensor = Tensor::from_vec(self.values(), dims, &Device::Cpu)?;
        Ok(match self.data {
            Data::Bf16(_) => tensor.to_dtype(HostType::BF16)?,
            Data::F32(_) | Data::I64(_) => tensor,
        })
    }
}

fn row_major(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_stored_the_other_way_round_is_the_same_matrix() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let plain = Operand::new(&values, &[2, 3], DType::F32);
        assert_eq!(plain.strides, [3, 1]);
        let turned = plain.clone().swapped();
        assert_eq!(
            (turned.strides.as_slice(), &turned.dims),
            (&[1, 2][..], &plain.dims)
        );
        assert_eq!(turned.values(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!(
            Operand::new(&values, &[6], DType::Bf16).swapped().strides,
            [1]
        );
        let poison = Operand::poisoned(&[2], DType::Bf16);
        assert!(poison.values().iter().all(|v| v.is_nan()) && poison.view().is_ok());
    }
}
