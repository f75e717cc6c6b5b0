//! `linear`: candle's product, in the orientation the weight is stored in.
//!
//! Measured with `examples/matmul_shapes` on two cores of a server CPU, one row, weights larger than the caches
//! together (as a decode step meets them): `[1,576] x [576,1536]` 155 us stored `[out,in]`, 158 us `[in,out]`;
//! `[1,576] x [576,49152]` 4.3 ms against 8.3 ms. So a weight stays as checkpoints store it, `[out,in]`, and is never
//! copied. candle's one-row product runs on one thread, and the host path leaves it so: it is candle's own baseline.
//! On a quiet machine one thread got 26 GB/s of the 28 GB/s that two get out of the same product cut in halves; in
//! another, noisy run cutting the output head had a better best (4.0 against 7.0 ms) and a worse median. Whether it
//! would help is open.
//!
//! candle counts the machine's CPUs at *every* product when `RAYON_NUM_THREADS` is unset: 28 us a call, so that a
//! decode step of SmolLM2-135M's sizes takes 52 ms in place of 36 (`examples/decode_overhead`). The host sets the
//! variable when it sizes the pool.

use candle_core::Tensor;

use super::read::{dense, wide};
use super::{unfit, Outcome};
use crate::graph::Layout;

/// Leading dims of `x` are rows. `w` is `[K,N]` (`InOut`) or `[N,K]` (`OutIn`); any strides.
pub(super) fn linear(x: &Tensor, w: &Tensor, layout: Layout) -> Outcome<Tensor> {
    let (x, w) = (dense(x)?, wide(w)?);
    let w = match (w.rank(), layout) {
        (2, Layout::InOut) => w,
        (2, Layout::OutIn) => w.t()?,
        _ => return unfit(format!("w {:?} is not a matrix", w.dims())),
    };
    let (k, n) = w.dims2()?;
    let found = x.dims().last().copied().unwrap_or(0);
    if x.rank() == 0 || found != k {
        return unfit(format!(
            "x {:?} has {found} input features, w {:?} ({layout:?}) takes {k}",
            x.dims(),
            if layout == Layout::OutIn {
                [n, k]
            } else {
                [k, n]
            },
        ));
    }
    let lead = &x.dims()[..x.rank() - 1];
    let m: usize = lead.iter().product();
    let mut dims = lead.to_vec();
    dims.push(n);
    if m == 0 || k == 0 {
        return Ok(Tensor::zeros(dims, candle_core::DType::F32, x.device())?);
    }
    Ok(x.reshape((m, k))?.matmul(&w)?.reshape(dims)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn both_orientations_and_leading_dims() {
        let d = &Device::Cpu;
        let x = Tensor::new(&[[[1f32, 2.0]], [[3.0, -1.0]]], d).unwrap();
        let w = Tensor::new(&[[1f32, 0.0, 2.0], [0.0, 1.0, -1.0]], d).unwrap();
        let want = [[[1f32, 2.0, 0.0]], [[3.0, -1.0, 7.0]]];
        let y = linear(&x, &w, Layout::InOut).unwrap();
        assert_eq!(y.to_vec3::<f32>().unwrap(), want);
        let stored = w.t().unwrap().contiguous().unwrap();
        let y = linear(&x, &stored, Layout::OutIn).unwrap();
        assert_eq!(y.to_vec3::<f32>().unwrap(), want);
        // A view with swapped strides is as good as a copy.
        let y = linear(&x, &w.t().unwrap(), Layout::OutIn).unwrap();
        assert_eq!(y.to_vec3::<f32>().unwrap(), want);
    }

    #[test]
    fn a_wrong_k_names_both_shapes() {
        let d = &Device::Cpu;
        let x = Tensor::zeros((2, 4), candle_core::DType::F32, d).unwrap();
        let w = Tensor::zeros((5, 6), candle_core::DType::F32, d).unwrap();
        match linear(&x, &w, Layout::InOut).unwrap_err() {
            crate::kernels::Fault::Operands(m) => {
                assert!(
                    m.contains("[2, 4]") && m.contains("[5, 6]") && m.contains("takes 5"),
                    "{m}"
                )
            }
            e => panic!("{e:?}"),
        }
        assert!(linear(
            &x,
            &Tensor::zeros(4, candle_core::DType::F32, d).unwrap(),
            Layout::InOut
        )
        .is_err());
    }
}
