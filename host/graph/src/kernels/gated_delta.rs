//! `gated_delta`: the gated delta rule, one step after another, exactly.

use candle_core::Tensor;
use rayon::prelude::*;

use super::norm::l2_row;
use super::read::{dense, tensor, Read};
use super::{unfit, Outcome};

/// Attributes of the operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GatedDelta {
    pub(crate) l2: bool,
    pub(crate) l2_eps: f32,
    /// `D^-0.5` of q when none.
    pub(crate) scale: Option<f32>,
}

impl GatedDelta {
    /// `q, k [B,S,H,Dk]`, `v [B,S,H,Dv]`, `log_decay, beta [B,S,H]`, `state [B,H,Dk,Dv]`; gives out `[B,S,H,Dv]` and the
    /// final state.
    pub(super) fn run(
        &self,
        operands: [&Tensor; 5],
        state: Option<&Tensor>,
    ) -> Outcome<Vec<Tensor>> {
        let [q, k, v, g, beta] = operands;
        let fits = match (q.dims(), v.dims()) {
            (&[b, s, h, dk], &[bv, sv, hv, dv]) => {
                k.dims() == q.dims()
                    && (bv, sv, hv) == (b, s, h)
                    && g.dims() == [b, s, h]
                    && beta.dims() == [b, s, h]
                    && state.is_none_or(|t| t.dims() == [b, h, dk, dv])
            }
            _ => false,
        };
        if !fits {
            return unfit(format!(
                "q {:?}, k {:?}, v {:?}, log_decay {:?}, beta {:?}, state {:?} are not [B,S,H,Dk] twice, [B,S,H,Dv], \
                 [B,S,H] twice, [B,H,Dk,Dv]",
                q.dims(),
                k.dims(),
                v.dims(),
                g.dims(),
                beta.dims(),
                state.map(Tensor::dims)
            ));
        }
        let (b, s, h, dk) = q.dims4()?;
        let dv = v.dims()[3];
        let scale = self.scale.unwrap_or(1.0 / (dk as f32).sqrt());
        let (q, k, v, g, beta) = (dense(q)?, dense(k)?, dense(v)?, dense(g)?, dense(beta)?);
        let reads = [&q, &k, &v, &g, &beta].map(Read::of);
        let [q, k, v, g, beta] = &reads;
        let (q, k, v, g, beta) = (q.all()?, k.all()?, v.all()?, g.all()?, beta.all()?);
        let mut last = match state {
            Some(t) => dense(t)?.flatten_all()?.to_vec1::<f32>()?,
            None => vec![0f32; b * h * dk * dv],
        };
        // Every (batch, head) is independent: outputs are collected head-major and laid out at the end.
        let mut by_head = vec![0f32; b * h * s * dv];
        if dk * dv * s > 0 {
            by_head
                .par_chunks_mut(s * dv)
                .zip(last.par_chunks_mut(dk * dv))
                .enumerate()
                .for_each(|(at, (out, state))| {
                    let (bi, hi) = (at / h, at % h);
                    let mut qn = vec![0f32; dk];
                    let mut kn = vec![0f32; dk];
                    let mut delta = vec![0f32; dv];
                    for (step, o) in out.chunks_mut(dv).enumerate() {
                        let token = (bi * s + step) * h + hi;
                        let (q, k) = (&q[token * dk..][..dk], &k[token * dk..][..dk]);
                        if self.l2 {
                            l2_row(q, &mut qn, self.l2_eps, scale);
                            l2_row(k, &mut kn, self.l2_eps, 1.0);
                        } else {
                            qn.iter_mut().zip(q).for_each(|(o, q)| *o = q * scale);
                            kn.copy_from_slice(k);
                        }
                        let decay = g[token].exp();
                        delta.fill(0.0);
                        for (row, k) in state.chunks_mut(dv).zip(&kn) {
                            for (x, m) in row.iter_mut().zip(&mut delta) {
                                *x *= decay;
                                *m += *x * k;
                            }
                        }
                        for (m, v) in delta.iter_mut().zip(&v[token * dv..][..dv]) {
                            *m = beta[token] * (v - *m);
                        }
                        for ((row, k), q) in state.chunks_mut(dv).zip(&kn).zip(&qn) {
                            for ((x, m), o) in row.iter_mut().zip(&delta).zip(o.iter_mut()) {
                                *x += k * m;
                                *o += *x * q;
                            }
                        }
                    }
                });
        }
        let out = tensor(by_head, &[b, h, s, dv])?
            .transpose(1, 2)?
            .contiguous()?;
        Ok(vec![out, tensor(last, &[b, h, dk, dv])?])
    }
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
    fn two_steps_by_hand() {
        // Dk = Dv = 1, no norm, scale 1. Step 1: S = 0.5*4 = 2; m = 2*2 = 4; d = 1*(7-4) = 3; S = 2+2*3 = 8; o = 8*3 = 24.
        // Step 2: S = 8 (decay 1); m = 8; d = 0.5*(10-8) = 1; S = 9; o = 9.
        let a = GatedDelta {
            l2: false,
            l2_eps: 1e-6,
            scale: Some(1.0),
        };
        let (q, k, v) = ([3.0, 1.0], [2.0, 1.0], [7.0, 10.0]);
        let g = t(&[0.5f32.ln(), 0.0], &[1, 2, 1]);
        let beta = t(&[1.0, 0.5], &[1, 2, 1]);
        let dims = [1, 2, 1, 1];
        let state = t(&[4.0], &[1, 1, 1, 1]);
        let (q, k, v) = (t(&q, &dims), t(&k, &dims), t(&v, &dims));
        let y = a.run([&q, &k, &v, &g, &beta], Some(&state)).unwrap();
        assert_eq!(flat(&y[0]), [24.0, 9.0]);
        assert_eq!(flat(&y[1]), [9.0]);
        // Without a state it starts from zeros: S = 2*7 = 14, o = 42.
        let y = a.run([&q, &k, &v, &g, &beta], None).unwrap();
        assert_eq!(flat(&y[0])[0], 42.0);
        assert!(a.run([&q, &k, &v, &g, &q], None).is_err());
    }
}
