//! `attention`: grouped-query, causal, windowed, soft-capped, masked; no repeated heads and no materialised mask.
//!
//! The query heads that share a kv head become rows of one matrix (`[B,Hkv,G*Sq,D]`), so keys and values are read
//! once a group and straight from a view of the KV region. Causality and the window are ranges of keys per row,
//! applied in the softmax pass.

use candle_core::{DType, Tensor};

use super::read::{rows, tensor, wide, Read};
use super::{unfit, Outcome};

/// Scores held at once (128 MB); longer query blocks are cut.
const MAX_SCORES: usize = 1 << 25;

/// Attributes of the operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Attention {
    /// `D^-0.5` when none.
    pub(crate) scale: Option<f32>,
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f32>,
}

struct Sizes {
    batch: usize,
    heads: usize,
    group: usize,
    queries: usize,
    keys: usize,
    width: usize,
}

impl Attention {
    /// `q [B,H,Sq,D]`, `k [B,Hkv,Skv,D]`, `v [B,Hkv,Skv,Dv]`, additive `mask` broadcast to `[B,H,Sq,Skv]`, `kv_len` a
    /// scalar, `[1]` or `[B]`; gives `[B,Sq,H,Dv]`.
    pub(crate) fn run(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
        kv_len: Option<&Tensor>,
    ) -> Outcome<Tensor> {
        let sizes = sizes(q, k, v)?;
        let (q, k, v) = (wide(q)?, rows_apart(k)?, rows_apart(v)?);
        let lens = valid_keys(kv_len, &sizes)?;
        let keys = lens.iter().copied().max().unwrap_or(0);
        let dv = v.dims()[3];
        let Sizes {
            batch,
            heads,
            queries,
            ..
        } = sizes;
        if keys == 0 || queries == 0 || batch * heads == 0 {
            return Ok(Tensor::zeros(
                (batch, queries, heads, dv),
                DType::F32,
                q.device(),
            )?);
        }
        let mask = match mask {
            Some(m) => Some(
                wide(m)?
                    .broadcast_as((batch, heads, queries, sizes.keys))
                    .map_err(|_| {
                        super::Fault::Operands(format!(
                            "mask {:?} does not broadcast to [{batch},{heads},{queries},{}]",
                            m.dims(),
                            sizes.keys
                        ))
                    })?,
            ),
            None => None,
        };
        let (k, v) = (k.narrow(2, 0, keys)?, v.narrow(2, 0, keys)?);
        let block = (MAX_SCORES / (batch * heads * keys)).clamp(1, queries);
        let mut parts = Vec::with_capacity(queries.div_ceil(block));
        for from in (0..queries).step_by(block) {
            let n = block.min(queries - from);
            let q = q.narrow(2, from, n)?;
            parts.push(self.block(&sizes, &q, &k, &v, mask.as_ref(), &lens, from)?);
        }
        match parts.as_slice() {
            [one] => Ok(one.clone()),
            many => Ok(Tensor::cat(many, 1)?),
        }
    }

    #[allow(clippy::too_many_arguments)] // the operands of one block
    fn block(
        &self,
        sizes: &Sizes,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
        lens: &[usize],
        from: usize,
    ) -> Outcome<Tensor> {
        let n = q.dims()[2];
        let (keys, dv) = (k.dims()[2], v.dims()[3]);
        let Sizes {
            batch,
            heads,
            group,
            queries,
            width,
            ..
        } = *sizes;
        let shared = (batch, heads / group, group * n, width);
        let scores = q.reshape(shared)?.matmul(&k.transpose(2, 3)?)?;
        let scale = self.scale.unwrap_or(1.0 / (width as f32).sqrt());
        let read = Read::of(&scores);
        let scores = read.all()?;
        let mask = mask.map(Read::of);
        let mask = match &mask {
            Some(m) => Some((m.strided()?, m.strides())),
            None => None,
        };
        let mut probs = vec![0f32; scores.len()];
        rows(&mut probs, keys, |at, row| {
            // Rows lie as [B, H, n].
            let (b, h, i) = (at / (heads * n), at / n % heads, from + at % n);
            let position = (lens[b] + i) as isize - queries as isize;
            let mut hi = lens[b];
            let mut lo = 0;
            if self.causal {
                hi = hi.min((position + 1).max(0) as usize);
            }
            if let Some(w) = self.window {
                lo = (position + 1 - w as isize).max(0) as usize;
            }
            if lo >= hi {
                return;
            }
            let row = &mut row[lo..hi];
            let scores = &scores[at * keys + lo..at * keys + hi];
            for (p, s) in row.iter_mut().zip(scores) {
                *p = s * scale;
            }
            if let Some(c) = self.softcap {
                row.iter_mut().for_each(|p| *p = c * (*p / c).tanh());
            }
            if let Some((m, st)) = mask {
                let base = b * st[0] + h * st[1] + i * st[2];
                for (j, p) in row.iter_mut().enumerate() {
                    *p += m[base + (lo + j) * st[3]];
                }
            }
            softmax(row);
        });
        let probs = tensor(probs, &[batch, heads / group, group * n, keys])?;
        let out = probs.matmul(v)?;
        if n == 1 {
            return Ok(out.reshape((batch, 1, heads, dv))?);
        }
        let out = out.reshape((batch, heads, n, dv))?;
        Ok(out.transpose(1, 2)?.contiguous()?)
    }
}

/// In place. A row whose every score is -inf has no key: zeros.
pub(super) fn softmax(row: &mut [f32]) {
    // A NaN score must reach the result: `max` alone would skip it, the sum does not.
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY && !row.iter().any(|s| s.is_nan()) {
        row.fill(0.0);
        return;
    }
    let mut sum = 0f32;
    for s in row.iter_mut() {
        *s = (*s - max).exp();
        sum += *s;
    }
    let by = 1.0 / sum;
    row.iter_mut().for_each(|s| *s *= by);
}

fn sizes(q: &Tensor, k: &Tensor, v: &Tensor) -> Outcome<Sizes> {
    let (&[b, h, sq, d], &[bk, hk, sk, dk], &[bv, hv, sv, _]) = (q.dims(), k.dims(), v.dims())
    else {
        return unfit(format!(
            "q {:?}, k {:?}, v {:?} must have 4 dims",
            q.dims(),
            k.dims(),
            v.dims()
        ));
    };
    if d != dk || bk != b || (bv, hv, sv) != (bk, hk, sk) || hk == 0 || h % hk != 0 {
        return unfit(format!(
            "q {:?}, k {:?}, v {:?} are not [B,H,Sq,D], [B,Hkv,Skv,D], [B,Hkv,Skv,Dv] with H a multiple of Hkv",
            q.dims(),
            k.dims(),
            v.dims()
        ));
    }
    Ok(Sizes {
        batch: b,
        heads: h,
        group: h / hk,
        queries: sq,
        keys: sk,
        width: d,
    })
}

/// f32 with the last dim dense and batch and head strides candle's batched product can follow; else a copy.
fn rows_apart(t: &Tensor) -> Outcome<Tensor> {
    let t = wide(t)?;
    let dims = t.dims().to_vec();
    let st = t.stride();
    let follows = st[3] == 1 && (dims[0] == 1 || dims[1] == 1 || st[0] == st[1] * dims[1]);
    if follows {
        Ok(t)
    } else {
        Ok(t.contiguous()?)
    }
}

/// Valid keys of every batch row.
fn valid_keys(kv_len: Option<&Tensor>, sizes: &Sizes) -> Outcome<Vec<usize>> {
    let Some(t) = kv_len else {
        return Ok(vec![sizes.keys; sizes.batch]);
    };
    let lens = t.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    if lens.len() != 1 && lens.len() != sizes.batch {
        return unfit(format!(
            "kv_len {:?} is neither one number nor one for each of {} batch rows",
            t.dims(),
            sizes.batch
        ));
    }
    let one = |len: f64| {
        if len >= 0.0 && len <= sizes.keys as f64 && len.fract() == 0.0 {
            Ok(len as usize)
        } else {
            unfit(format!("kv_len {len} is not in 0..={}", sizes.keys))
        }
    };
    let lens: Vec<usize> = lens.into_iter().map(one).collect::<Outcome<_>>()?;
    Ok(if lens.len() == 1 {
        vec![lens[0]; sizes.batch]
    } else {
        lens
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const PLAIN: Attention = Attention {
        scale: None,
        causal: false,
        window: None,
        softcap: None,
    };

    fn random(dims: &[usize], seed: u32) -> Tensor {
        let n: usize = dims.iter().product();
        let mut s = seed;
        let data: Vec<f32> = (0..n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (s >> 8) as f32 / (1u32 << 23) as f32 - 1.0
            })
            .collect();
        Tensor::from_vec(data, dims, &Device::Cpu).unwrap()
    }

    fn flat(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    }

    /// The table row, one query at a time, in f64.
    fn slow(
        a: &Attention,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
        lens: &[usize],
    ) -> Vec<f32> {
        let (b, h, sq, d) = q.dims4().unwrap();
        let (_, hk, sk, dv) = v.dims4().unwrap();
        let (qf, kf, vf) = (flat(q), flat(k), flat(v));
        let mf = mask.map(|m| {
            flat(
                &m.broadcast_as((b, h, sq, sk))
                    .unwrap()
                    .contiguous()
                    .unwrap(),
            )
        });
        let mut out = vec![0f32; b * sq * h * dv];
        for (bi, hi, i) in
            (0..b).flat_map(|x| (0..h).flat_map(move |y| (0..sq).map(move |z| (x, y, z))))
        {
            let kv = hi / (h / hk);
            let p = lens[bi] as isize - sq as isize + i as isize;
            let scores: Vec<(usize, f64)> = (0..lens[bi])
                .filter(|j| !a.causal || *j as isize <= p)
                .filter(|j| a.window.is_none_or(|w| *j as isize > p - w as isize))
                .map(|j| {
                    let dot: f64 = (0..d)
                        .map(|c| {
                            let q = qf[((bi * h + hi) * sq + i) * d + c];
                            let k = kf[((bi * hk + kv) * sk + j) * d + c];
                            f64::from(q) * f64::from(k)
                        })
                        .sum();
                    let mut s = dot * a.scale.map_or((d as f64).powf(-0.5), f64::from);
                    if let Some(c) = a.softcap {
                        s = f64::from(c) * (s / f64::from(c)).tanh();
                    }
                    if let Some(m) = &mf {
                        s += f64::from(m[((bi * h + hi) * sq + i) * sk + j]);
                    }
                    (j, s)
                })
                .filter(|(_, s)| *s > f64::NEG_INFINITY)
                .collect();
            let max = scores.iter().fold(f64::NEG_INFINITY, |m, (_, s)| m.max(*s));
            let sum: f64 = scores.iter().map(|(_, s)| (s - max).exp()).sum();
            for c in 0..dv {
                let y: f64 = scores
                    .iter()
                    .map(|(j, s)| {
                        (s - max).exp() / sum * f64::from(vf[((bi * hk + kv) * sk + j) * dv + c])
                    })
                    .sum();
                out[((bi * sq + i) * h + hi) * dv + c] = y as f32;
            }
        }
        out
    }

    fn close(got: &Tensor, want: &[f32], what: &str) {
        let got = flat(got);
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 2e-6, "{what}: {g} is not {w}");
        }
    }

    #[test]
    fn every_attribute_agrees_with_the_definition() {
        let cases = [
            ("plain", PLAIN),
            (
                "scale",
                Attention {
                    scale: Some(0.3),
                    ..PLAIN
                },
            ),
            (
                "causal",
                Attention {
                    causal: true,
                    ..PLAIN
                },
            ),
            (
                "window",
                Attention {
                    causal: true,
                    window: Some(2),
                    ..PLAIN
                },
            ),
            (
                "open window",
                Attention {
                    window: Some(3),
                    ..PLAIN
                },
            ),
            (
                "softcap",
                Attention {
                    softcap: Some(0.5),
                    ..PLAIN
                },
            ),
        ];
        for (b, h, hk, sq, sk) in [
            (1, 3, 3, 1, 9),
            (2, 6, 2, 4, 7),
            (1, 4, 1, 5, 5),
            (2, 9, 3, 1, 4),
        ] {
            let q = random(&[b, h, sq, 5], 1);
            let (k, v) = (random(&[b, hk, sk, 5], 2), random(&[b, hk, sk, 3], 3));
            let mask = random(&[b, 1, sq, sk], 4);
            let lens: Vec<usize> = (0..b).map(|i| sk - i).collect();
            let given = Tensor::from_vec(lens.iter().map(|l| *l as u32).collect(), b, &Device::Cpu)
                .unwrap();
            for (name, a) in cases {
                let what = format!("{name} b{b}h{h}/{hk} {sq}x{sk}");
                let full = vec![sk; b];
                close(
                    &a.run(&q, &k, &v, None, None).unwrap(),
                    &slow(&a, &q, &k, &v, None, &full),
                    &what,
                );
                let got = a.run(&q, &k, &v, Some(&mask), Some(&given)).unwrap();
                close(&got, &slow(&a, &q, &k, &v, Some(&mask), &lens), &what);
                assert_eq!(got.dims(), [b, sq, h, 3]);
            }
        }
    }

    #[test]
    fn a_view_of_a_larger_region_needs_no_copy() {
        let (k, v) = (random(&[2, 2, 16, 4], 5), random(&[2, 2, 16, 4], 6));
        let q = random(&[2, 4, 1, 4], 7);
        let (kn, vn) = (k.narrow(2, 0, 5).unwrap(), v.narrow(2, 0, 5).unwrap());
        assert!(rows_apart(&kn).unwrap().same_storage_as(&k));
        let got = PLAIN.run(&q, &kn, &vn, None, None).unwrap();
        close(&got, &slow(&PLAIN, &q, &kn, &vn, None, &[5, 5]), "view");
    }

    trait SameStorage {
        fn same_storage_as(&self, other: &Tensor) -> bool;
    }

    impl SameStorage for Tensor {
        fn same_storage_as(&self, other: &Tensor) -> bool {
            let (a, b) = (Read::of(self), Read::of(other));
            let (a, b) = (a.strided().unwrap(), b.strided().unwrap());
            std::ptr::eq(a.as_ptr(), b.as_ptr())
        }
    }

    #[test]
    fn rows_without_a_key_give_zero() {
        let (q, k) = (random(&[1, 1, 3, 2], 8), random(&[1, 1, 2, 2], 9));
        // Three queries before two keys: the first has position -1.
        let a = Attention {
            causal: true,
            ..PLAIN
        };
        let y = flat(&a.run(&q, &k, &k, None, None).unwrap());
        assert_eq!(&y[..2], [0.0, 0.0]);
        assert!(y[2..].iter().all(|v| *v != 0.0));
        let mask = Tensor::full(f32::NEG_INFINITY, (1, 1, 3, 2), &Device::Cpu).unwrap();
        let y = flat(&PLAIN.run(&q, &k, &k, Some(&mask), None).unwrap());
        assert_eq!(y, [0.0; 6]);
        let none = Tensor::new(0u32, &Device::Cpu).unwrap();
        assert_eq!(
            flat(&PLAIN.run(&q, &k, &k, None, Some(&none)).unwrap()),
            [0.0; 6]
        );
    }

    #[test]
    fn a_nan_is_not_swallowed() {
        let q = random(&[1, 1, 1, 2], 8);
        let k = Tensor::full(f32::NAN, (1, 1, 2, 2), &Device::Cpu).unwrap();
        let v = random(&[1, 1, 2, 2], 9);
        let y = flat(&PLAIN.run(&q, &k, &v, None, None).unwrap());
        assert!(y.iter().all(|v| v.is_nan()));
    }

    #[test]
    fn misfits_are_named() {
        let q = random(&[1, 4, 1, 4], 1);
        for (k, v, len) in [
            (&[1, 3, 5, 4], &[1, 3, 5, 4], None),
            (&[1, 2, 5, 3], &[1, 2, 5, 4], None),
            (&[1, 2, 5, 4], &[1, 2, 6, 4], None),
            (&[1, 2, 5, 4], &[1, 2, 5, 4], Some(6u32)),
        ] {
            let len = len.map(|l| Tensor::new(l, &Device::Cpu).unwrap());
            let (k, v) = (random(k, 2), random(v, 3));
            assert!(PLAIN.run(&q, &k, &v, None, len.as_ref()).is_err());
        }
        let k = random(&[1, 2, 5, 4], 2);
        let mask = random(&[1, 1, 1, 4], 3);
        assert!(PLAIN.run(&q, &k, &k, Some(&mask), None).is_err());
    }
}
