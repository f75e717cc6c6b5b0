//! The choice of a greedy step.

use std::sync::Arc;

use structures_plugin_api::sdk::{ports, BindRequest, Failure};

use super::super::work::{Body, Data, Inputs, Value};
use super::{filled, given, Bound};

pub fn argmax(request: &BindRequest<'_>) -> Bound {
    let x = ports::position(&request.params.inputs, "x")?;
    Ok((Arc::new(Choice { x }), 0))
}

/// Of every row the first of the largest.
struct Choice {
    x: usize,
}

/// What is no number is never the largest, and -1 is a row without a finite one.
fn first_largest(row: &[f32]) -> i64 {
    let mut best = (f32::NEG_INFINITY, -1);
    for (at, v) in (0..).zip(row) {
        if *v > best.0 {
            best = (*v, at);
        }
    }
    match row.iter().any(|v| v.is_finite()) {
        true => best.1,
        false => -1,
    }
}

impl Body for Choice {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let x = given(inputs, self.x)?;
        let width = x.dims.last().copied().unwrap_or(1).max(1);
        let made: Vec<i64> = x.floats()?.chunks(width).map(first_largest).collect();
        let y = filled(outputs, 0)?;
        match &mut y.data {
            Data::I64(values) if values.len() == made.len() => *values = made,
            _ => {
                let what = format!("{:?} for the rows of {:?}", y.dims, x.dims);
                return Err(Failure::invalid("dims_inconsistent", what));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_largest_is_chosen_and_nothing_where_no_score_is_finite() {
        let (nan, low, high) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
        let rows = [
            0.0, 2.0, 2.0, nan, -1.0, nan, low, nan, low, high, 1.0, high,
        ];
        let x = Value {
            data: Data::F32(rows.to_vec()),
            dims: vec![4, 3],
        };
        let mut y = [Value {
            data: Data::I64(vec![7; 4]),
            dims: vec![4],
        }];
        let body = Choice { x: 0 };
        body.run(&[Some(x.clone())], &mut y, &mut []).expect("runs");
        assert_eq!(y[0].data, Data::I64(vec![1, 1, -1, 0]));
        y[0].data = Data::I64(vec![0; 3]);
        assert!(body.run(&[Some(x)], &mut y, &mut []).is_err());
        assert_eq!(first_largest(&[high, nan]), -1);
    }
}
