//! Which row of a smaller tensor belongs to each row of a larger one.
//!
//! Leading dims align from the first (`[B, D]` meets `[B, M, D]` as `[B, 1, D]`), a missing dim or
//! one of size 1 repeats, and a single row serves all.

use crate::abi::MAX_RANK;
use crate::sdk::{Failure, Tensor};

/// A map from rows to rows.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    axes: usize,
    dims: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
}

impl Spread {
    /// `tail` dims at the end of `narrow` and one at the end of `wide` are within a row. Dims that do
    /// not meet are `dims_inconsistent`.
    pub fn of(
        what: &str,
        narrow: &Tensor<'_>,
        tail: usize,
        wide: &Tensor<'_>,
    ) -> Result<Self, Failure> {
        let own = &narrow.dims()[..narrow.rank().saturating_sub(tail)];
        let lead = &wide.dims()[..wide.rank().saturating_sub(1)];
        let mut spread = Spread {
            axes: lead.len(),
            dims: [1; MAX_RANK],
            strides: [0; MAX_RANK],
        };
        for (to, dim) in spread.dims.iter_mut().zip(lead) {
            *to = *dim as usize;
        }
        if own.iter().all(|dim| *dim == 1) {
            return Ok(spread);
        }
        let fits = |(own, dim): (&i64, &i64)| *own == *dim || *own == 1;
        if own.len() > lead.len() || !own.iter().zip(lead).all(fits) {
            let text = format!(
                "{what} of dims {:?} for rows of {:?}",
                narrow.dims(),
                wide.dims()
            );
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        let mut step = 1;
        for (axis, dim) in own.iter().enumerate().rev() {
            if *dim > 1 {
                spread.strides[axis] = step;
            }
            step *= *dim as usize;
        }
        Ok(spread)
    }

    /// The row of the smaller tensor.
    pub fn row(&self, row: usize) -> usize {
        let (mut rest, mut found) = (row, 0);
        for axis in (0..self.axes).rev() {
            found += rest % self.dims[axis] * self.strides[axis];
            rest /= self.dims[axis];
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(narrow: &[usize], tail: usize, wide: &[usize]) -> Result<Vec<usize>, String> {
        let data = [0.0; 256];
        let tensor = |dims: &[usize]| {
            let len = dims.iter().product::<usize>();
            Tensor::from_f32(&data[..len], dims).expect("fits")
        };
        let wide = tensor(wide);
        let spread = Spread::of("it", &tensor(narrow), tail, &wide).map_err(|f| f.code)?;
        Ok((0..wide.rows()).map(|row| spread.row(row)).collect())
    }

    #[test]
    fn rows_align_from_the_first_dim() {
        assert_eq!(rows(&[2, 5], 1, &[2, 3, 5]), Ok(vec![0, 0, 0, 1, 1, 1]));
        assert_eq!(rows(&[2, 1, 5], 1, &[2, 3, 5]), Ok(vec![0, 0, 0, 1, 1, 1]));
        assert_eq!(rows(&[1, 3, 5], 1, &[2, 3, 5]), Ok(vec![0, 1, 2, 0, 1, 2]));
        assert_eq!(rows(&[1, 5], 1, &[2, 2, 5]), Ok(vec![0; 4]));
        assert_eq!(rows(&[5], 1, &[2, 2, 5]), Ok(vec![0; 4]));
        assert_eq!(rows(&[2, 2, 6, 5], 2, &[2, 2, 5]), Ok(vec![0, 1, 2, 3]));
        assert_eq!(rows(&[1, 1, 1, 5], 1, &[3, 5]), Ok(vec![0; 3]));
        for narrow in [&[3, 5][..], &[2, 2, 5], &[2, 3, 2, 5]] {
            let code = rows(narrow, 1, &[2, 3, 5]);
            assert_eq!(code, Err("dims_inconsistent".into()), "{narrow:?}");
        }
    }
}
