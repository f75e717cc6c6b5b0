//! reshape, transpose, contiguous, chunk, split: nothing is computed.

use candle_core::Tensor;

use super::{unfit, Outcome};

/// One dim of a `reshape`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReshapeDim {
    /// This many.
    Size(usize),
    /// As many as this axis of the operand has.
    Axis(usize),
    /// What is left.
    Rest,
}

pub(super) fn reshape(x: &Tensor, dims: &[ReshapeDim]) -> Outcome<Tensor> {
    Ok(x.reshape(reshaped(x.dims(), dims)?)?)
}

/// The dims that a value of dims `x` gets.
pub(crate) fn reshaped(x: &[usize], dims: &[ReshapeDim]) -> Outcome<Vec<usize>> {
    let elements: usize = x.iter().product();
    let mut out = Vec::with_capacity(dims.len());
    let mut rest = None;
    for (i, d) in dims.iter().enumerate() {
        out.push(match *d {
            ReshapeDim::Size(n) => n,
            ReshapeDim::Axis(a) if a < x.len() => x[a],
            ReshapeDim::Axis(a) => return unfit(format!("x {x:?} has no axis {a} for dim {i}")),
            ReshapeDim::Rest => {
                if rest.replace(i).is_some() {
                    return unfit(format!("dims {dims:?} leave two sizes open"));
                }
                1
            }
        });
    }
    let known: usize = out.iter().product();
    if let Some(i) = rest {
        if known == 0 || !elements.is_multiple_of(known) {
            return unfit(format!("x {x:?} does not divide into {out:?}"));
        }
        out[i] = elements / known;
    } else if known != elements {
        return unfit(format!(
            "x {x:?} has {elements} elements, dims {out:?} hold {known}"
        ));
    }
    Ok(out)
}

pub(super) fn transpose(x: &Tensor, perm: &[usize]) -> Outcome<Tensor> {
    let mut seen = perm.to_vec();
    seen.sort_unstable();
    if !seen.iter().copied().eq(0..x.rank()) {
        return unfit(format!("perm {perm:?} does not permute x {:?}", x.dims()));
    }
    Ok(x.permute(perm)?)
}

pub(super) fn chunk(x: &Tensor, n: usize, axis: i64) -> Outcome<Vec<Tensor>> {
    let at = axis_of(x, axis)?;
    let size = x.dims()[at];
    if n == 0 || !size.is_multiple_of(n) {
        return unfit(format!(
            "axis {axis} of x {:?} does not cut into {n} equal parts",
            x.dims()
        ));
    }
    split(x, &vec![size / n; n], axis)
}

pub(super) fn split(x: &Tensor, sizes: &[usize], axis: i64) -> Outcome<Vec<Tensor>> {
    let at = axis_of(x, axis)?;
    if sizes.iter().sum::<usize>() != x.dims()[at] {
        return unfit(format!(
            "sizes {sizes:?} do not add up to axis {axis} of x {:?}",
            x.dims()
        ));
    }
    let mut from = 0;
    sizes
        .iter()
        .map(|n| {
            let part = x.narrow(at, from, *n)?;
            from += n;
            Ok(part)
        })
        .collect()
}

pub(super) fn concat(parts: &[&Tensor], axis: i64) -> Outcome<Tensor> {
    let Some(first) = parts.first() else {
        return unfit("an operand is missing");
    };
    Ok(Tensor::cat(parts, axis_of(first, axis)?)?)
}

fn axis_of(x: &Tensor, axis: i64) -> Outcome<usize> {
    let rank = x.rank() as i64;
    let at = if axis < 0 { axis + rank } else { axis };
    if (0..rank).contains(&at) {
        Ok(at as usize)
    } else {
        unfit(format!("x {:?} has no axis {axis}", x.dims()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn zeros(dims: &[usize]) -> Tensor {
        Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap()
    }

    #[test]
    fn reshape_sizes_axes_and_rest() {
        use ReshapeDim::*;
        let x = zeros(&[2, 3, 8]);
        let y = reshape(&x, &[Axis(0), Axis(1), Size(2), Rest]).unwrap();
        assert_eq!(y.dims(), [2, 3, 2, 4]);
        assert!(reshape(&x, &[Axis(0), Rest, Rest]).is_err());
        assert!(reshape(&x, &[Size(5), Rest]).is_err());
        assert!(reshape(&x, &[Size(5), Size(9)]).is_err());
        assert!(reshape(&x, &[Axis(3)]).is_err());
    }

    #[test]
    fn parts_cover_the_axis() {
        let x = zeros(&[2, 6]);
        let y = chunk(&x, 3, -1).unwrap();
        assert!(y.len() == 3 && y.iter().all(|t| t.dims() == [2, 2]));
        assert_eq!(split(&x, &[1, 1], 0).unwrap()[1].dims(), [1, 6]);
        assert!(chunk(&x, 4, -1).is_err());
        assert!(split(&x, &[1, 4], -1).is_err());
        assert!(split(&x, &[6], 2).is_err());
    }

    #[test]
    fn transposes() {
        assert_eq!(
            transpose(&zeros(&[2, 3, 4]), &[0, 2, 1]).unwrap().dims(),
            [2, 4, 3]
        );
        assert!(transpose(&zeros(&[2, 3]), &[0, 0]).is_err());
        assert!(transpose(&zeros(&[2, 3]), &[0]).is_err());
    }
}
