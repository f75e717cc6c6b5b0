//! `causal_conv`: every channel with its own few weights over itself and the steps before it.

use candle_core::Tensor;

use super::read::{dense, rows, tensor, Read};
use super::{unfit, Outcome};

/// `x [B,T,C]`, `w [C,1,K]`, `state [B,K-1,C]` the steps before (zeros when missing); gives `y [B,T,C]` and the last
/// `K-1` steps.
pub(super) fn causal_conv(x: &Tensor, w: &Tensor, state: Option<&Tensor>) -> Outcome<Vec<Tensor>> {
    let (&[b, t, c], &[wc, 1, k]) = (x.dims(), w.dims()) else {
        return unfit(format!(
            "x {:?}, w {:?} are not [B,T,C], [C,1,K]",
            x.dims(),
            w.dims()
        ));
    };
    if wc != c || k == 0 || state.is_some_and(|s| s.dims() != [b, k - 1, c]) {
        return unfit(format!(
            "x {:?}, w {:?}, state {:?} are not [B,T,C], [C,1,K], [B,K-1,C]",
            x.dims(),
            w.dims(),
            state.map(Tensor::dims)
        ));
    }
    let before = match state {
        Some(s) => dense(s)?,
        None => Tensor::zeros((b, k - 1, c), candle_core::DType::F32, x.device())?,
    };
    let all = Tensor::cat(&[&before, &dense(x)?], 1)?;
    let w = dense(w)?;
    let (read, weights) = (Read::of(&all), Read::of(&w));
    let (all_steps, weights) = (read.all()?, weights.all()?);
    let mut out = vec![0f32; b * t * c];
    rows(&mut out, c, |at, row| {
        let first = at / t * (t + k - 1) + at % t;
        for j in 0..k {
            let step = &all_steps[(first + j) * c..][..c];
            for (i, (o, x)) in row.iter_mut().zip(step).enumerate() {
                *o += x * weights[i * k + j];
            }
        }
    });
    let last = all.narrow(1, t, k - 1)?.contiguous()?;
    Ok(vec![tensor(out, &[b, t, c])?, last])
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn t(v: &[f32], dims: &[usize]) -> Tensor {
        Tensor::from_vec(v.to_vec(), dims, &Device::Cpu).unwrap()
    }

    fn flat(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    }

    #[test]
    fn in_one_run_and_step_by_step() {
        let w = t(&[1.0, 10.0, 100.0, -1.0, 0.0, 2.0], &[2, 1, 3]);
        let x = t(&[1.0, 5.0, 2.0, 6.0, 3.0, 7.0], &[1, 3, 2]);
        let whole = causal_conv(&x, &w, None).unwrap();
        // Channel 0: 100; 10 + 200; 1 + 20 + 300. Channel 1: 10; 12; -5 + 14.
        assert_eq!(flat(&whole[0]), [100.0, 10.0, 210.0, 12.0, 321.0, 9.0]);
        assert_eq!(flat(&whole[1]), [2.0, 6.0, 3.0, 7.0]);
        let mut state = None;
        let mut got = Vec::new();
        for i in 0..3 {
            let mut step = causal_conv(&x.narrow(1, i, 1).unwrap(), &w, state.as_ref()).unwrap();
            state = step.pop();
            got.extend(flat(&step[0]));
        }
        assert_eq!(got, flat(&whole[0]));
        assert_eq!(flat(&state.unwrap()), flat(&whole[1]));
        assert!(causal_conv(&x, &w, Some(&t(&[0.0; 2], &[1, 1, 2]))).is_err());
        assert!(causal_conv(&x, &t(&[0.0; 3], &[1, 1, 3]), None).is_err());
    }
}
