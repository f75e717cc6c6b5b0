//! A product in f32: one that no form took, such as a small head.

use std::sync::Arc;

use structures_plugin_api::sdk::{ports, BindRequest, Failure};

use super::super::work::{Body, Inputs, Value};
use super::{fill, filled, given, Bound};
use crate::linear::dot;

pub fn linear(request: &BindRequest<'_>) -> Bound {
    let w = request.required_weight("w")?;
    let [k, n] = *w.dims() else {
        let what = format!("a weight of dims {:?}", w.dims());
        return Err(Failure::invalid("dims_inconsistent", what));
    };
    let (k, n) = (k as usize, n as usize);
    let mut columns = vec![0.0; n * k];
    for (at, column) in columns.chunks_exact_mut(k.max(1)).enumerate() {
        w.select(1, at)?.read_f32(column)?;
    }
    let bytes = 4 * columns.len() as u64;
    let x = ports::position(&request.params.inputs, "x")?;
    Ok((Arc::new(Product { x, k, columns }), bytes))
}

/// Rows of `k` times columns of as many.
struct Product {
    x: usize,
    k: usize,
    columns: Vec<f32>,
}

impl Body for Product {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let x = given(inputs, self.x)?;
        if self.k == 0 || x.dims.last() != Some(&self.k) {
            let what = format!("x {:?} for rows of {}", x.dims, self.k);
            return Err(Failure::invalid("dims_inconsistent", what));
        }
        let made = x.floats()?.chunks_exact(self.k).flat_map(|row| {
            let columns = self.columns.chunks_exact(self.k);
            columns.map(move |column| dot(row, column))
        });
        let made = made.collect();
        fill(filled(outputs, 0)?, made)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::work::Data;
    use super::*;

    #[test]
    fn every_row_is_multiplied_with_every_column() {
        let body = Product {
            x: 0,
            k: 2,
            columns: vec![1.0, 0.0, 2.0, 3.0, -1.0, 1.0],
        };
        let value = |values: &[f32], dims: &[usize]| Value {
            data: Data::F32(values.to_vec()),
            dims: dims.to_vec(),
        };
        let mut y = [value(&[0.0; 6], &[1, 2, 3])];
        let x = value(&[1.0, 2.0, 3.0, 4.0], &[1, 2, 2]);
        body.run(&[Some(x)], &mut y, &mut []).expect("runs");
        assert_eq!(y[0].data, Data::F32(vec![1.0, 8.0, 1.0, 3.0, 18.0, 1.0]));
        let narrow = value(&[1.0; 4], &[1, 1, 4]);
        assert!(body.run(&[Some(narrow)], &mut y, &mut []).is_err());
    }
}
