//! rms_norm, layer_norm, l2_norm.

use candle_core::Tensor;

use super::read::{dense, rows, sum_by, tensor, Read};
use super::{unfit, Outcome};

/// `x / sqrt(mean(x^2) + eps)` over the last `axes` dims together, times `w` or `1 + w`.
pub(super) fn rms_norm(
    x: &Tensor,
    w: Option<&Tensor>,
    eps: f32,
    offset: bool,
    axes: usize,
) -> Outcome<Tensor> {
    let x = dense(x)?;
    let width = normed_width(&x, axes)?;
    let w = weight(w, width, "w")?;
    let w = w.as_ref().map(Read::of);
    let w = w.as_ref().map(Read::all).transpose()?;
    let read = Read::of(&x);
    let data = read.all()?;
    let mut out = vec![0f32; data.len()];
    rows(&mut out, width, |i, row| {
        rms_row(&data[i * width..(i + 1) * width], w, eps, offset, row);
    });
    tensor(out, x.dims())
}

/// One row of [`rms_norm`].
pub(super) fn rms_row(x: &[f32], w: Option<&[f32]>, eps: f32, offset: bool, row: &mut [f32]) {
    let r = 1.0 / (sum_by(x, |v| v * v) / x.len() as f32 + eps).sqrt();
    match (w, offset) {
        (None, _) => fill(row, x, |v, _| v * r, x),
        (Some(w), false) => fill(row, x, |v, w| v * r * w, w),
        (Some(w), true) => fill(row, x, |v, w| v * r * (1.0 + w), w),
    }
}

/// `(x - mean) / sqrt(var + eps)` over the last dim, biased variance, times `w`, plus `b`.
pub(super) fn layer_norm(
    x: &Tensor,
    w: Option<&Tensor>,
    b: Option<&Tensor>,
    eps: f32,
) -> Outcome<Tensor> {
    let x = dense(x)?;
    let width = normed_width(&x, 1)?;
    let (w, b) = (weight(w, width, "w")?, weight(b, width, "b")?);
    let (w, b) = (w.as_ref().map(Read::of), b.as_ref().map(Read::of));
    let w = w.as_ref().map(Read::all).transpose()?;
    let b = b.as_ref().map(Read::all).transpose()?;
    let read = Read::of(&x);
    let data = read.all()?;
    let mut out = vec![0f32; data.len()];
    rows(&mut out, width, |i, row| {
        layer_row(&data[i * width..(i + 1) * width], w, b, eps, row);
    });
    tensor(out, x.dims())
}

/// One row of [`layer_norm`].
pub(super) fn layer_row(
    x: &[f32],
    w: Option<&[f32]>,
    b: Option<&[f32]>,
    eps: f32,
    row: &mut [f32],
) {
    let width = x.len() as f32;
    let mean = sum_by(x, |v| v) / width;
    let var = sum_by(x, |v| (v - mean) * (v - mean)) / width;
    let r = 1.0 / (var + eps).sqrt();
    for (o, v) in row.iter_mut().zip(x) {
        *o = (v - mean) * r;
    }
    if let Some(w) = w {
        row.iter_mut().zip(w).for_each(|(o, w)| *o *= w);
    }
    if let Some(b) = b {
        row.iter_mut().zip(b).for_each(|(o, b)| *o += b);
    }
}

/// `x / sqrt(sum(x^2) + eps)` over the last dim.
pub(super) fn l2_norm(x: &Tensor, eps: f32) -> Outcome<Tensor> {
    let x = dense(x)?;
    let width = normed_width(&x, 1)?;
    let read = Read::of(&x);
    let data = read.all()?;
    let mut out = vec![0f32; data.len()];
    rows(&mut out, width, |i, row| {
        l2_row(&data[i * width..(i + 1) * width], row, eps, 1.0);
    });
    tensor(out, x.dims())
}

/// One row of [`l2_norm`], times `by`.
pub(super) fn l2_row(x: &[f32], out: &mut [f32], eps: f32, by: f32) {
    let r = by / (sum_by(x, |v| v * v) + eps).sqrt();
    fill(out, x, |v, _| v * r, x);
}

fn fill(row: &mut [f32], x: &[f32], f: impl Fn(f32, f32) -> f32, w: &[f32]) {
    for ((o, v), w) in row.iter_mut().zip(x).zip(w) {
        *o = f(*v, *w);
    }
}

fn normed_width(x: &Tensor, axes: usize) -> Outcome<usize> {
    if axes == 0 || axes > x.rank() {
        return unfit(format!("x {:?} has no {axes} last dims to norm", x.dims()));
    }
    Ok(x.dims()[x.rank() - axes..].iter().product())
}

fn weight(w: Option<&Tensor>, width: usize, name: &str) -> Outcome<Option<Tensor>> {
    match w {
        Some(w) if w.elem_count() != width => unfit(format!(
            "{name} {:?} does not cover the {width} normed elements",
            w.dims()
        )),
        Some(w) => dense(w).map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn t(v: &[f32]) -> Tensor {
        Tensor::new(v, &Device::Cpu).unwrap()
    }

    fn close(got: &Tensor, want: &[f32]) {
        let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 1e-6, "{got:?} is not {want:?}");
        }
    }

    #[test]
    fn rms_direct_offset_and_without_weight() {
        let x = t(&[3.0, 4.0]); // mean square 12.5
        let r = 1.0 / 12.5f32.sqrt();
        let w = t(&[2.0, -1.0]);
        close(
            &rms_norm(&x, None, 0.0, false, 1).unwrap(),
            &[3.0 * r, 4.0 * r],
        );
        close(
            &rms_norm(&x, Some(&w), 0.0, false, 1).unwrap(),
            &[6.0 * r, -4.0 * r],
        );
        close(
            &rms_norm(&x, Some(&w), 0.0, true, 1).unwrap(),
            &[9.0 * r, 0.0],
        );
        let far = 1.0 / 25.0f32.sqrt();
        close(
            &rms_norm(&x, None, 12.5, false, 1).unwrap(),
            &[3.0 * far, 4.0 * far],
        );
    }

    #[test]
    fn rms_over_two_axes_takes_one_mean() {
        let x = t(&[1.0, 2.0, 3.0, 4.0]).reshape((1, 2, 2)).unwrap();
        let w = t(&[1.0, 1.0, 2.0, 2.0]);
        let r = 1.0 / 7.5f32.sqrt();
        let y = rms_norm(&x, Some(&w), 0.0, false, 2).unwrap();
        close(&y, &[r, 2.0 * r, 6.0 * r, 8.0 * r]);
        assert_eq!(y.dims(), [1, 2, 2]);
        assert!(rms_norm(&x, Some(&w), 0.0, false, 1).is_err());
        assert!(rms_norm(&x, None, 0.0, false, 4).is_err());
    }

    #[test]
    fn layer_norm_has_biased_variance() {
        let x = t(&[1.0, 3.0]); // mean 2, biased variance 1
        close(&layer_norm(&x, None, None, 0.0).unwrap(), &[-1.0, 1.0]);
        let y = layer_norm(&x, Some(&t(&[2.0, 2.0])), Some(&t(&[0.5, 0.5])), 0.0).unwrap();
        close(&y, &[-1.5, 2.5]);
    }

    #[test]
    fn l2() {
        close(&l2_norm(&t(&[3.0, 4.0]), 0.0).unwrap(), &[0.6, 0.8]);
    }
}
