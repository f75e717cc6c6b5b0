//! Rotary embedding, axes in another order, and copies.

use std::sync::Arc;

use structures_plugin_api::sdk::{ports, rope::Layout, BindRequest, Failure};

use super::super::work::{Body, Inputs, Value};
use super::{fill, filled, given, Bound};
use crate::rope::turn;

pub fn rope(request: &BindRequest<'_>) -> Bound {
    let inputs = &request.params.inputs;
    let layout = request.params.params.get("layout").and_then(|v| v.as_str());
    let body = Rope {
        operands: [
            ports::position(inputs, "x")?,
            ports::position(inputs, "cos")?,
            ports::position(inputs, "sin")?,
        ],
        layout: match layout {
            Some("half") | None => Layout::Half,
            Some("interleaved") => Layout::Interleaved,
            Some(other) => {
                return Err(Failure::refused("envelope", format!("layout `{other}`")));
            }
        },
        rotary: request.number("rotary")? as usize,
    };
    Ok((Arc::new(body), 0))
}

/// The first channels of every head, turned by its token's angles.
struct Rope {
    operands: [usize; 3],
    layout: Layout,
    rotary: usize,
}

impl Body for Rope {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let [x, cos, sin] = self.operands.map(|at| given(inputs, at));
        let (x, cos, sin) = (x?, cos?, sin?);
        let bad = || {
            let what = format!("x {:?} with tables {:?}", x.dims, cos.dims);
            Failure::invalid("dims_inconsistent", what)
        };
        let (&[b, t, h, d], Some(w)) = (x.dims.as_slice(), cos.dims.last().copied()) else {
            return Err(bad());
        };
        let (r, half) = (self.rotary, self.layout == Layout::Half);
        let serves = w == r / 2 || (w == r && half);
        let tokens = cos.floats()?.len() / w.max(1);
        let each = tokens == b * t;
        if r == 0 || r > d || !serves || !(each || tokens == t) || cos.dims != sin.dims {
            return Err(bad());
        }
        let (cos, sin) = (cos.floats()?, sin.floats()?);
        let mut values = x.floats()?.to_vec();
        for (i, head) in values.chunks_exact_mut(d).enumerate() {
            let token = if each { i / h } else { i / h % t };
            let at = token * w..(token + 1) * w;
            turn(self.layout, &mut head[..r], &cos[at.clone()], &sin[at]);
        }
        fill(filled(outputs, 0)?, values)
    }
}

pub fn transpose(request: &BindRequest<'_>) -> Bound {
    let perm = request.params.params.get("perm").and_then(|v| v.as_array());
    let perm = perm.map(|list| {
        list.iter()
            .map(|a| a.as_u64().map(|a| a as usize))
            .collect()
    });
    let perm: Option<Vec<usize>> = perm.flatten();
    let body = Transpose {
        x: ports::position(&request.params.inputs, "x")?,
        perm: perm.ok_or_else(|| Failure::refused("param_missing", "list `perm`"))?,
    };
    Ok((Arc::new(body), 0))
}

/// Axes in another order.
struct Transpose {
    x: usize,
    perm: Vec<usize>,
}

impl Body for Transpose {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let x = given(inputs, self.x)?;
        let rank = x.dims.len();
        let mut seen = self.perm.clone();
        seen.sort_unstable();
        if seen.len() != rank || seen.iter().enumerate().any(|(i, axis)| i != *axis) {
            let what = format!("axes {:?} of dims {:?}", self.perm, x.dims);
            return Err(Failure::invalid("dims_inconsistent", what));
        }
        let mut strides = vec![1; rank];
        for axis in (1..rank).rev() {
            strides[axis - 1] = strides[axis] * x.dims[axis];
        }
        let values = x.floats()?;
        let made = (0..values.len()).map(|i| {
            let (mut left, mut at) = (i, 0);
            for axis in self.perm.iter().rev() {
                at += left % x.dims[*axis] * strides[*axis];
                left /= x.dims[*axis];
            }
            values[at]
        });
        let made = made.collect();
        fill(filled(outputs, 0)?, made)
    }
}

pub fn contiguous(request: &BindRequest<'_>) -> Bound {
    let x = ports::position(&request.params.inputs, "x")?;
    Ok((Arc::new(Copy { x }), 0))
}

/// The same elements in memory of their own.
struct Copy {
    x: usize,
}

impl Body for Copy {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let made = given(inputs, self.x)?.floats()?.to_vec();
        fill(filled(outputs, 0)?, made)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::work::Data;
    use super::*;

    #[test]
    fn axes_change_places() {
        let value = |values: Vec<f32>, dims: &[usize]| Value {
            data: Data::F32(values),
            dims: dims.to_vec(),
        };
        let x = value((0..6).map(|v| v as f32).collect(), &[1, 2, 3]);
        let body = Transpose {
            x: 0,
            perm: vec![2, 0, 1],
        };
        let mut out = [value(vec![0.0; 6], &[3, 1, 2])];
        body.run(&[Some(x.clone())], &mut out, &mut [])
            .expect("runs");
        assert_eq!(out[0].data, Data::F32(vec![0.0, 3.0, 1.0, 4.0, 2.0, 5.0]));
        let body = Transpose {
            x: 0,
            perm: vec![0, 0, 1],
        };
        assert!(body.run(&[Some(x)], &mut out, &mut []).is_err());
    }
}
