//! embedding and rope_table: host-only look-ups.

use candle_core::{DType, Tensor};

use super::read::{tensor, wide, Read};
use super::{unfit, Fault, Outcome};
use crate::session::Rows;

/// As [`embedding`], of a table that is kept in another form.
pub(crate) fn look_up(table: &dyn Rows, ids: Option<&Tensor>) -> Outcome<Vec<Tensor>> {
    let Some(ids) = ids else {
        return unfit("ids are absent");
    };
    let (vocabulary, width) = table.dims();
    let list = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let mut out = vec![0.0; list.len() * width];
    for (id, row) in list.iter().zip(out.chunks_exact_mut(width.max(1))) {
        match usize::try_from(*id) {
            Ok(id) if id < vocabulary => table.row(id, row).map_err(Fault::Source)?,
            _ => return Err(not_in_vocabulary(*id, vocabulary)),
        }
    }
    let mut dims = ids.dims().to_vec();
    dims.push(width);
    Ok(vec![tensor(out, &dims)?])
}

/// Whose token that is, nobody knows.
pub(crate) fn not_in_vocabulary(id: i64, vocabulary: usize) -> Fault {
    Fault::Operands(format!("id {id} is not in a vocabulary of {vocabulary}"))
}

/// Rows of `w [V,D]` at integer `ids` of any shape.
pub(super) fn embedding(ids: &Tensor, w: &Tensor) -> Outcome<Tensor> {
    let w = wide(w)?;
    if w.rank() != 2 {
        return unfit(format!("w {:?} is not [V,D]", w.dims()));
    }
    let (vocabulary, width) = w.dims2()?;
    let list = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let read = Read::of(&w);
    let (data, st) = (read.strided()?, read.strides());
    let mut out = Vec::with_capacity(list.len() * width);
    for id in list {
        if id < 0 || id as usize >= vocabulary {
            return Err(not_in_vocabulary(id, vocabulary));
        }
        let at = id as usize * st[0];
        if st[1] == 1 {
            out.extend_from_slice(&data[at..at + width]);
        } else {
            out.extend((0..width).map(|i| data[at + i * st[1]]));
        }
    }
    let mut dims = ids.dims().to_vec();
    dims.push(width);
    tensor(out, &dims)
}

/// cos and sin `[.., R/2]` of `positions [..]` times `scaling`; with `axes`, of `positions [A, ..]`, each frequency at
/// the row it names. Angles are f32 products, as the reference models form
/// them: at a large position their rounding is visible in the logits.
pub(super) fn rope_table(
    positions: &Tensor,
    inv_freq: &[f32],
    scaling: f32,
    axes: Option<&[usize]>,
) -> Outcome<Vec<Tensor>> {
    let mut dims = positions.dims().to_vec();
    if let Some(axes) = axes {
        let rows = if dims.is_empty() { 0 } else { dims.remove(0) };
        if axes.len() != inv_freq.len() || axes.iter().any(|a| *a >= rows) {
            return unfit(format!(
                "axes {axes:?} do not name a row of positions {:?} for each of {} frequencies",
                positions.dims(),
                inv_freq.len()
            ));
        }
    }
    let at = positions
        .flatten_all()?
        .to_dtype(DType::F32)?
        .to_vec1::<f32>()?;
    let count: usize = dims.iter().product();
    let mut cos = vec![0f32; count * inv_freq.len()];
    let mut sin = vec![0f32; count * inv_freq.len()];
    angles(&at, (inv_freq, scaling, axes), &mut cos, &mut sin);
    dims.push(inv_freq.len());
    Ok(vec![tensor(cos, &dims)?, tensor(sin, &dims)?])
}

/// Both tables of [`rope_table`], one row of frequencies a position.
pub(super) fn angles(
    at: &[f32],
    (inv_freq, scaling, axes): (&[f32], f32, Option<&[usize]>),
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let width = inv_freq.len().max(1);
    let count = cos.len() / width;
    let tables = cos.chunks_mut(width).zip(sin.chunks_mut(width));
    for (i, (cos, sin)) in tables.enumerate() {
        for (j, f) in inv_freq.iter().enumerate() {
            let row = axes.map_or(0, |a| a[j]);
            let (s, c) = (at[row * count + i] * f).sin_cos();
            cos[j] = c * scaling;
            sin[j] = s * scaling;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn rows_by_id() {
        let d = &Device::Cpu;
        let w = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], d).unwrap();
        for ids in [
            Tensor::new(&[[2i64, 0]], d).unwrap(),
            Tensor::new(&[[2u32, 0]], d).unwrap(),
        ] {
            let y = embedding(&ids, &w).unwrap();
            assert_eq!(y.to_vec3::<f32>().unwrap(), [[[5.0, 6.0], [1.0, 2.0]]]);
            let turned = w.t().unwrap().contiguous().unwrap().t().unwrap();
            let y = embedding(&ids, &turned).unwrap();
            assert_eq!(y.to_vec3::<f32>().unwrap(), [[[5.0, 6.0], [1.0, 2.0]]]);
        }
        for bad in [3i64, -1] {
            let ids = Tensor::new(&[bad], d).unwrap();
            assert!(embedding(&ids, &w).is_err());
        }
    }

    #[test]
    fn angles() {
        let p = Tensor::new(&[0i64, 2], &Device::Cpu).unwrap();
        let t = rope_table(&p, &[1.0, 0.25], 2.0, None).unwrap();
        let (c, s) = (
            t[0].to_vec2::<f32>().unwrap(),
            t[1].to_vec2::<f32>().unwrap(),
        );
        assert_eq!(c[0], [2.0, 2.0]);
        assert_eq!(s[0], [0.0, 0.0]);
        assert_eq!(c[1], [2.0 * 2f32.cos(), 2.0 * 0.5f32.cos()]);
        assert_eq!(s[1], [2.0 * 2f32.sin(), 2.0 * 0.5f32.sin()]);
        let two = Tensor::new(&[[0i64, 2], [3, 5]], &Device::Cpu).unwrap();
        let t = rope_table(&two, &[1.0, 0.25], 1.0, Some(&[1, 0])).unwrap();
        let c = t[0].to_vec2::<f32>().unwrap();
        assert_eq!(c, [[3f32.cos(), 1.0], [5f32.cos(), 0.5f32.cos()]]);
        assert!(rope_table(&two, &[1.0, 0.25], 1.0, Some(&[2, 0])).is_err());
        assert!(rope_table(&two, &[1.0, 0.25], 1.0, Some(&[0])).is_err());
    }
}
