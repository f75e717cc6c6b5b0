//! `rope`: rotary position embedding of the first `rotary` channels of every head.

use candle_core::Tensor;

use super::read::{dense, rows, tensor, Read};
use super::{unfit, Outcome};

/// Which channels form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairing {
    /// `(i, i + R/2)`.
    Half,
    /// `(2i, 2i + 1)`.
    Interleaved,
}

/// `x [B,T,H,D]`; tables `[T,W]` or `[B,T,W]` with W `R/2`, or `R` for `Half` (either of a pair has its own entry).
pub(super) fn rope(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    pairing: Pairing,
    rotary: Option<usize>,
) -> Outcome<Tensor> {
    let x = dense(x)?;
    let &[b, t, h, d] = x.dims() else {
        return unfit(format!("x {:?} is not [B,T,H,D]", x.dims()));
    };
    let r = rotary.unwrap_or(d);
    if r == 0 || r > d || !r.is_multiple_of(2) {
        return unfit(format!("rotary {r} must be even and in 2..={d}"));
    }
    if cos.dims() != sin.dims() {
        return unfit(format!(
            "tables differ: cos {:?}, sin {:?}",
            cos.dims(),
            sin.dims()
        ));
    }
    let (per_batch, w) = match *cos.dims() {
        [n, w] if n == t => (false, w),
        [1, n, w] if n == t => (false, w),
        [m, n, w] if m == b && n == t => (true, w),
        _ => {
            return unfit(format!(
                "table {:?} is neither [{t},W] nor [{b},{t},W]",
                cos.dims()
            ))
        }
    };
    if !serves(w, r, pairing) {
        return unfit(format!(
            "table width {w} does not serve {r} rotary channels ({pairing:?}: {})",
            if pairing == Pairing::Half {
                "R/2 or R"
            } else {
                "R/2"
            },
        ));
    }
    let (cos, sin) = (dense(cos)?, dense(sin)?);
    let (rc, rs, rx) = (Read::of(&cos), Read::of(&sin), Read::of(&x));
    let (cos, sin, data) = (rc.all()?, rs.all()?, rx.all()?);
    let mut out = vec![0f32; data.len()];
    rows(&mut out, h * d, |token, heads| {
        let at = if per_batch { token } else { token % t };
        let tables = (&cos[at * w..(at + 1) * w], &sin[at * w..(at + 1) * w]);
        let source = &data[token * h * d..(token + 1) * h * d];
        turn(source, tables, (d, r), pairing, heads);
    });
    tensor(out, x.dims())
}

/// Whether tables of `w` entries a token turn `r` channels.
pub(crate) fn serves(w: usize, r: usize, pairing: Pairing) -> bool {
    w == r / 2 || (w == r && pairing == Pairing::Half)
}

/// All heads of one token, `d` channels each of which the first `r` turn.
pub(super) fn turn(
    source: &[f32],
    (c, s): (&[f32], &[f32]),
    (d, r): (usize, usize),
    pairing: Pairing,
    out: &mut [f32],
) {
    let half = r / 2;
    let (c2, s2) = match c.len() == r && pairing == Pairing::Half {
        true => (&c[half..], &s[half..]),
        false => (c, s),
    };
    for (o, x) in out.chunks_mut(d).zip(source.chunks(d)) {
        match pairing {
            Pairing::Half => {
                let (lo, hi) = o.split_at_mut(half);
                for i in 0..half {
                    let (a, b) = (x[i], x[i + half]);
                    lo[i] = a * c[i] - b * s[i];
                    hi[i] = b * c2[i] + a * s2[i];
                }
            }
            Pairing::Interleaved => {
                for i in 0..half {
                    let (a, b) = (x[2 * i], x[2 * i + 1]);
                    o[2 * i] = a * c[i] - b * s[i];
                    o[2 * i + 1] = b * c[i] + a * s[i];
                }
            }
        }
        o[r..].copy_from_slice(&x[r..]);
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
    fn half_interleaved_and_partial() {
        // A quarter turn: (a, b) -> (-b, a).
        let x = t(&[1.0, 2.0, 3.0, 4.0], &[1, 1, 1, 4]);
        let (c, s) = (t(&[0.0, 0.0], &[1, 2]), t(&[1.0, 1.0], &[1, 2]));
        let y = rope(&x, &c, &s, Pairing::Half, None).unwrap();
        assert_eq!(flat(&y), [-3.0, -4.0, 1.0, 2.0]);
        let y = rope(&x, &c, &s, Pairing::Interleaved, None).unwrap();
        assert_eq!(flat(&y), [-2.0, 1.0, -4.0, 3.0]);
        let (c, s) = (t(&[0.0], &[1, 1]), t(&[1.0], &[1, 1]));
        let y = rope(&x, &c, &s, Pairing::Half, Some(2)).unwrap();
        assert_eq!(flat(&y), [-2.0, 1.0, 3.0, 4.0]);
    }

    #[test]
    fn full_width_tables_have_independent_halves() {
        let x = t(&[1.0, 2.0], &[1, 1, 1, 2]);
        let (c, s) = (t(&[2.0, 3.0], &[1, 2]), t(&[5.0, 7.0], &[1, 2]));
        let y = rope(&x, &c, &s, Pairing::Half, None).unwrap();
        assert_eq!(flat(&y), [2.0 - 10.0, 6.0 + 7.0]);
        assert!(rope(&x, &c, &s, Pairing::Interleaved, None).is_err());
    }

    #[test]
    fn tables_per_token_and_per_batch() {
        let x = t(&[1.0, 0.0, 1.0, 0.0], &[2, 1, 1, 2]);
        let one = rope(
            &x,
            &t(&[2.0], &[1, 1]),
            &t(&[0.0], &[1, 1]),
            Pairing::Half,
            None,
        )
        .unwrap();
        assert_eq!(flat(&one), [2.0, 0.0, 2.0, 0.0]);
        let (c, s) = (t(&[2.0, 3.0], &[2, 1, 1]), t(&[0.0, 1.0], &[2, 1, 1]));
        let each = rope(&x, &c, &s, Pairing::Half, None).unwrap();
        assert_eq!(flat(&each), [2.0, 0.0, 3.0, 1.0]);
    }

    #[test]
    fn bad_operands() {
        let x = t(&[0.0; 4], &[1, 1, 1, 4]);
        let c = t(&[0.0; 2], &[1, 2]);
        for (rotary, cos) in [
            (Some(3), &c),
            (Some(6), &c),
            (Some(0), &c),
            (None, &t(&[0.0; 3], &[1, 3])),
            (None, &t(&[0.0; 4], &[2, 2])),
        ] {
            assert!(rope(&x, cos, cos, Pairing::Half, rotary).is_err());
        }
        assert!(rope(&t(&[0.0; 4], &[1, 1, 4]), &c, &c, Pairing::Half, None).is_err());
    }
}
