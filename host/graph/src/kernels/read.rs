//! Reading tensors as slices, and cutting work over the pool.

use std::ops::Deref;

use candle_core::{CpuStorage, DType, Device, Layout, Storage, Tensor};
use rayon::prelude::*;

use super::{unfit, Fault, Outcome};

/// Elements from which an element-wise pass is worth a second thread: waking a worker costs 10 to 20 us here, and
/// 64K elements of `silu` cost about 300.
const PARALLEL_ELEMENTS: usize = 1 << 16;

/// An operand by position.
pub(super) fn operand<'a>(
    inputs: &'a [Option<Tensor>],
    at: usize,
    name: &str,
) -> Outcome<&'a Tensor> {
    match inputs.get(at) {
        Some(Some(t)) => Ok(t),
        _ => unfit(format!("operand {at} `{name}` is missing")),
    }
}

/// An operand that may be missing.
pub(super) fn optional(inputs: &[Option<Tensor>], at: usize) -> Option<&Tensor> {
    inputs.get(at).and_then(Option::as_ref)
}

/// The tensor in f32, as it lies.
pub(super) fn wide(t: &Tensor) -> Outcome<Tensor> {
    if t.dtype() == DType::F32 {
        Ok(t.clone())
    } else {
        Ok(t.to_dtype(DType::F32)?)
    }
}

/// The tensor in f32, contiguous.
pub(super) fn dense(t: &Tensor) -> Outcome<Tensor> {
    Ok(wide(t)?.contiguous()?)
}

/// A CPU tensor's storage held for reading.
pub(super) struct Read<'a> {
    // The lock's guard type is not part of candle's interface.
    storage: Box<dyn Deref<Target = Storage> + 'a>,
    layout: &'a Layout,
}

impl<'a> Read<'a> {
    pub(super) fn of(t: &'a Tensor) -> Self {
        let (storage, layout) = t.storage_and_layout();
        Read {
            storage: Box::new(storage),
            layout,
        }
    }

    /// Everything from the first element on; index it by [`Read::strides`].
    pub(super) fn strided(&self) -> Outcome<&[f32]> {
        match &**self.storage {
            Storage::Cpu(CpuStorage::F32(v)) => Ok(&v[self.layout.start_offset()..]),
            _ => unfit("an f32 tensor on the CPU is needed"),
        }
    }

    /// Element strides, outermost first.
    pub(super) fn strides(&self) -> &[usize] {
        self.layout.stride()
    }

    /// All elements of a contiguous tensor.
    pub(super) fn all(&self) -> Outcome<&[f32]> {
        if !self.layout.is_contiguous() {
            return unfit("a contiguous tensor is needed");
        }
        Ok(&self.strided()?[..self.layout.shape().elem_count()])
    }
}

/// A tensor of these elements.
pub(super) fn tensor(data: Vec<f32>, dims: &[usize]) -> Outcome<Tensor> {
    Tensor::from_vec(data, dims, &Device::Cpu).map_err(Fault::from)
}

/// Element-wise over one slice.
pub(super) fn map(x: &[f32], f: impl Fn(f32) -> f32 + Sync) -> Vec<f32> {
    if x.len() < PARALLEL_ELEMENTS {
        x.iter().map(|v| f(*v)).collect()
    } else {
        x.par_iter().map(|v| f(*v)).collect()
    }
}

/// Element-wise over two slices of one length.
pub(super) fn zip(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32 + Sync) -> Vec<f32> {
    if a.len() < PARALLEL_ELEMENTS {
        a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()
    } else {
        a.par_iter().zip(b).map(|(a, b)| f(*a, *b)).collect()
    }
}

/// Fills rows of `width` elements: `f(row index, row)`; in parallel when there is enough of it.
pub(super) fn rows(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if width == 0 {
        return;
    }
    if out.len() < PARALLEL_ELEMENTS || out.len() == width {
        for (i, row) in out.chunks_mut(width).enumerate() {
            f(i, row);
        }
    } else {
        out.par_chunks_mut(width)
            .enumerate()
            .for_each(|(i, row)| f(i, row));
    }
}

/// Sum of `f(x)` with eight running sums, so that it vectorises and errs like a pairwise sum.
pub(super) fn sum_by(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; 8];
    let chunks = x.chunks_exact(8);
    let rest = chunks.remainder();
    for c in chunks {
        for (lane, v) in lanes.iter_mut().zip(c) {
            *lane += f(*v);
        }
    }
    let tail: f32 = rest.iter().map(|v| f(*v)).sum();
    let [a, b, c, d, e, g, h, i] = lanes;
    ((a + e) + (b + g)) + ((c + h) + (d + i)) + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_every_element_once() {
        for n in [0, 1, 7, 8, 9, 31] {
            let x: Vec<f32> = (0..n).map(|v| v as f32).collect();
            assert_eq!(sum_by(&x, |v| v), (n * (n - 1).max(0) / 2) as f32);
        }
    }

    #[test]
    fn parallel_passes_agree_with_serial_ones() {
        let n = PARALLEL_ELEMENTS + 3;
        let x: Vec<f32> = (0..n).map(|v| v as f32).collect();
        assert_eq!(map(&x, |v| v + 1.0)[n - 1], n as f32);
        assert_eq!(zip(&x, &x, |a, b| a - b), vec![0.0; n]);
        let mut out = vec![0f32; 2 * n];
        rows(&mut out, n, |i, r| r.fill(i as f32));
        assert_eq!(
            (out[0], out[n - 1], out[n], out[2 * n - 1]),
            (0.0, 0.0, 1.0, 1.0)
        );
    }
}
