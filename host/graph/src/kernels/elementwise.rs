//! bias, add, mul, scale, modulate: element-wise with numpy broadcasting (aligned from the last dim).

use candle_core::{DType, Tensor};

use super::read::{dense, map, rows, tensor, wide, zip, Read};
use super::{unfit, Outcome};

pub(super) fn add(a: &Tensor, b: &Tensor) -> Outcome<Tensor> {
    binary(a, b, |a, b| a + b)
}

pub(super) fn mul(a: &Tensor, b: &Tensor) -> Outcome<Tensor> {
    binary(a, b, |a, b| a * b)
}

pub(super) fn bias(x: &Tensor, b: &Tensor) -> Outcome<Tensor> {
    let out = add(x, b)?;
    if out.dims() != x.dims() {
        return unfit(format!(
            "bias {:?} does not fit into x {:?}",
            b.dims(),
            x.dims()
        ));
    }
    Ok(out)
}

pub(super) fn scale(x: &Tensor, by: f32) -> Outcome<Tensor> {
    let x = dense(x)?;
    let out = map(Read::of(&x).all()?, |v| v * by);
    tensor(out, x.dims())
}

/// `x (1 + scale) + shift`; with a `step` dtype each of the three results is rounded to it.
pub(super) fn modulate(
    x: &Tensor,
    scale: Option<&Tensor>,
    shift: Option<&Tensor>,
    step: Option<DType>,
) -> Outcome<Tensor> {
    let mut y = wide(x)?;
    if let Some(s) = scale {
        let s = dense(s)?;
        let factor = map(Read::of(&s).all()?, |v| 1.0 + v);
        let factor = rounded(tensor(factor, s.dims())?, step)?;
        y = rounded(mul(&y, &factor)?, step)?;
    }
    if let Some(s) = shift {
        y = rounded(add(&y, s)?, step)?;
    }
    if y.dims() != x.dims() {
        return unfit(format!(
            "scale and shift make {:?} of x {:?}",
            y.dims(),
            x.dims()
        ));
    }
    Ok(y)
}

fn rounded(t: Tensor, step: Option<DType>) -> Outcome<Tensor> {
    match step {
        Some(d) if d != DType::F32 => Ok(t.to_dtype(d)?.to_dtype(DType::F32)?),
        _ => Ok(t),
    }
}

fn binary(a: &Tensor, b: &Tensor, f: impl Fn(f32, f32) -> f32 + Sync) -> Outcome<Tensor> {
    let (a, b) = (dense(a)?, dense(b)?);
    if a.dims() == b.dims() {
        let out = zip(Read::of(&a).all()?, Read::of(&b).all()?, f);
        return tensor(out, a.dims());
    }
    if let Some(width) = repeats(a.dims(), b.dims()) {
        return repeated(&a, &b, width, f);
    }
    if let Some(width) = repeats(b.dims(), a.dims()) {
        return repeated(&b, &a, width, |b, a| f(a, b));
    }
    let dims = broadcast(a.dims(), b.dims())?;
    let a = a.broadcast_as(dims.as_slice())?.contiguous()?;
    let b = b.broadcast_as(dims.as_slice())?.contiguous()?;
    let out = zip(Read::of(&a).all()?, Read::of(&b).all()?, f);
    tensor(out, &dims)
}

/// The element count of `b` when it repeats over the leading dims of `a` (`[D]` under `[B,T,D]`).
pub(crate) fn repeats(a: &[usize], b: &[usize]) -> Option<usize> {
    let lead = b.iter().take_while(|d| **d == 1).count();
    let tail = &b[lead..];
    (b.len() <= a.len() && a.ends_with(tail)).then(|| tail.iter().product())
}

fn repeated(
    a: &Tensor,
    b: &Tensor,
    width: usize,
    f: impl Fn(f32, f32) -> f32 + Sync,
) -> Outcome<Tensor> {
    let (ra, rb) = (Read::of(a), Read::of(b));
    let (x, y) = (ra.all()?, rb.all()?);
    if width == 1 {
        let y = y[0];
        return tensor(map(x, |v| f(v, y)), a.dims());
    }
    let mut out = vec![0f32; x.len()];
    rows(&mut out, width, |i, row| {
        let x = &x[i * width..(i + 1) * width];
        for ((o, a), b) in row.iter_mut().zip(x).zip(y) {
            *o = f(*a, *b);
        }
    });
    tensor(out, a.dims())
}

/// The numpy shape of two shapes.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Outcome<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |d: &[usize], i: usize| (i + d.len()).checked_sub(rank).map_or(1, |i| d[i]);
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => unfit(format!("shapes {a:?} and {b:?} do not broadcast")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn ramp(dims: &[usize]) -> Tensor {
        let n: usize = dims.iter().product();
        Tensor::from_vec((0..n).map(|v| v as f32 + 1.0).collect(), dims, &Device::Cpu).unwrap()
    }

    #[test]
    fn broadcasts_like_numpy() {
        let shapes: &[(&[usize], &[usize])] = &[
            (&[2, 3], &[2, 3]),
            (&[2, 3], &[3]),
            (&[3], &[2, 3]),
            (&[2, 3], &[1, 3]),
            (&[2, 3], &[1]),
            (&[2, 1, 3], &[4, 1]),
            (&[2, 4, 3], &[2, 1, 3]),
            (&[2, 4, 3], &[]),
        ];
        for (a, b) in shapes {
            let (a, b) = (ramp(a), ramp(b));
            let got = add(&a, &b).unwrap();
            let want = a.broadcast_add(&b).unwrap();
            assert_eq!(got.dims(), want.dims());
            let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(flat(&got), flat(&want), "{:?} + {:?}", a.dims(), b.dims());
        }
        let e = add(&ramp(&[2, 3]), &ramp(&[2])).unwrap_err();
        assert!(matches!(e, crate::kernels::Fault::Operands(m) if m.contains("[2, 3] and [2]")));
    }

    #[test]
    fn a_bias_may_not_widen_its_operand() {
        assert!(bias(&ramp(&[3]), &ramp(&[2, 3])).is_err());
        assert!(bias(&ramp(&[2, 3]), &ramp(&[3])).is_ok());
    }

    #[test]
    fn modulate_once_and_each() {
        let d = &Device::Cpu;
        let x = Tensor::new(&[[1.0f32, 2.0]], d).unwrap();
        let s = Tensor::new(&[0.5f32, -1.0], d).unwrap();
        let h = Tensor::new(&[10.0f32, 0.125], d).unwrap();
        let y = modulate(&x, Some(&s), Some(&h), None).unwrap();
        assert_eq!(y.to_vec2::<f32>().unwrap(), [[11.5, 0.125]]);
        // 1 + 0.001 is 1 in bf16: a factor that vanishes shows that each step is rounded.
        let s = Tensor::new(&[0.001f32, 0.001], d).unwrap();
        let each = modulate(&x, Some(&s), None, Some(DType::BF16)).unwrap();
        assert_eq!(each.to_vec2::<f32>().unwrap(), [[1.0, 2.0]]);
    }
}
