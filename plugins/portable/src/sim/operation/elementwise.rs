//! Sums and products with broadcasting, activations, norms of rows.

use std::sync::Arc;

use structures_plugin_api::sdk::{ports, BindRequest, Failure};

use super::super::work::{Body, Inputs, Value};
use super::{fill, filled, given, Bound};
use crate::norm;

pub fn add(request: &BindRequest<'_>) -> Bound {
    two(request, |a, b| a + b)
}

pub fn mul(request: &BindRequest<'_>) -> Bound {
    two(request, |a, b| a * b)
}

fn two(request: &BindRequest<'_>, f: fn(f32, f32) -> f32) -> Bound {
    let (a, b) = (Operand::of(request, "a")?, Operand::of(request, "b")?);
    let bytes = a.bytes() + b.bytes();
    Ok((Arc::new(Pair { a, b, f }), bytes))
}

/// An operand: given in a call, or a parameter.
enum Operand {
    Given(usize),
    Stored(Vec<f32>, Vec<usize>),
}

impl Operand {
    fn of(request: &BindRequest<'_>, name: &str) -> Result<Self, Failure> {
        match request.weight(name) {
            Some(stored) => Ok(Operand::Stored(
                stored.to_f32_vec()?,
                stored.dims().iter().map(|n| *n as usize).collect(),
            )),
            None => ports::position(&request.params.inputs, name).map(Operand::Given),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Operand::Given(_) => 0,
            Operand::Stored(values, _) => 4 * values.len() as u64,
        }
    }

    fn read<'v>(
        &'v self,
        inputs: &'v [Option<Value>],
    ) -> Result<(&'v [f32], &'v [usize]), Failure> {
        match self {
            Operand::Stored(values, dims) => Ok((values, dims)),
            Operand::Given(at) => {
                let value = given(inputs, *at)?;
                Ok((value.floats()?, &value.dims))
            }
        }
    }
}

/// One function of two operands.
struct Pair {
    a: Operand,
    b: Operand,
    f: fn(f32, f32) -> f32,
}

impl Body for Pair {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let y = filled(outputs, 0)?;
        let made = pair(self.a.read(inputs)?, self.b.read(inputs)?, &y.dims, &self.f)?;
        fill(y, made)
    }
}

/// `f` of every pair, aligned from the last dim as numpy does.
fn pair(
    (a, a_dims): (&[f32], &[usize]),
    (b, b_dims): (&[f32], &[usize]),
    dims: &[usize],
    f: &fn(f32, f32) -> f32,
) -> Result<Vec<f32>, Failure> {
    let steps = |of: &[usize]| -> Result<Vec<usize>, Failure> {
        let mut steps = vec![0; dims.len()];
        let mut step = 1;
        for (back, n) in of.iter().rev().enumerate() {
            let at = dims.len().checked_sub(back + 1);
            let fits = at.is_some_and(|at| *n == 1 || *n == dims[at]);
            let Some(at) = at.filter(|_| fits) else {
                let what = format!("dims {of:?} do not broadcast to {dims:?}");
                return Err(Failure::invalid("dims_inconsistent", what));
            };
            if *n != 1 {
                steps[at] = step;
            }
            step *= n;
        }
        Ok(steps)
    };
    let (sa, sb) = (steps(a_dims)?, steps(b_dims)?);
    let count = dims.iter().product::<usize>();
    let mut out = Vec::with_capacity(count);
    for i in 0..count {
        let (mut left, mut at_a, mut at_b) = (i, 0, 0);
        for axis in (0..dims.len()).rev() {
            let n = dims[axis];
            at_a += left % n * sa[axis];
            at_b += left % n * sb[axis];
            left /= n;
        }
        out.push(f(a[at_a], b[at_b]));
    }
    Ok(out)
}

pub fn act(request: &BindRequest<'_>) -> Bound {
    let kind = request.params.params.get("kind").and_then(|k| k.as_str());
    let f: fn(f32) -> f32 = match kind {
        Some("silu") => |v| v / (1.0 + (-v).exp()),
        Some("sigmoid") => |v| 1.0 / (1.0 + (-v).exp()),
        Some("gelu_tanh") => |v| crate::activation::Activation::GeluTanh.apply(v),
        other => {
            let what = format!("activation {other:?}, expected silu, sigmoid or gelu_tanh");
            return Err(Failure::refused("envelope", what));
        }
    };
    let x = ports::position(&request.params.inputs, "x")?;
    Ok((Arc::new(Each { x, f }), 0))
}

/// One function of every element.
struct Each {
    x: usize,
    f: fn(f32) -> f32,
}

impl Body for Each {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let made = given(inputs, self.x)?.floats()?.iter();
        fill(filled(outputs, 0)?, made.map(|v| (self.f)(*v)).collect())
    }
}

pub fn rms_norm(request: &BindRequest<'_>) -> Bound {
    let weight = request.params.params.get("weight");
    let offset = weight.and_then(|w| w.as_str()) == Some("offset");
    if request.number("axes")? != 1.0 {
        return Err(Failure::refused("envelope", "norms over several axes"));
    }
    let add = if offset { 1.0 } else { 0.0 };
    let scale: Option<Vec<f32>> = match request.weight("w") {
        Some(w) => Some(w.to_f32_vec()?.iter().map(|w| w + add).collect()),
        None => None,
    };
    let bytes = 4 * scale.as_ref().map_or(0, Vec::len) as u64;
    let body = Norm {
        x: ports::position(&request.params.inputs, "x")?,
        eps: request.number("eps")? as f32,
        scale,
    };
    Ok((Arc::new(body), bytes))
}

/// Every row by its root mean square.
struct Norm {
    x: usize,
    eps: f32,
    scale: Option<Vec<f32>>,
}

impl Body for Norm {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let x = given(inputs, self.x)?;
        let mut values = x.floats()?.to_vec();
        let width = x.dims.last().copied().unwrap_or(1).max(1);
        if self
            .scale
            .as_ref()
            .is_some_and(|scale| scale.len() != width)
        {
            return Err(Failure::invalid(
                "dims_inconsistent",
                format!("rows of {width}"),
            ));
        }
        for row in values.chunks_exact_mut(width) {
            let by = norm::rms(row, self.eps);
            row.iter_mut().for_each(|v| *v *= by);
            if let Some(scale) = &self.scale {
                row.iter_mut().zip(scale).for_each(|(v, w)| *v *= w);
            }
        }
        fill(filled(outputs, 0)?, values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_broadcast_from_the_last_dim() {
        let a: Vec<f32> = (0..6).map(|v| v as f32).collect();
        let sub: fn(f32, f32) -> f32 = |a, b| a - b;
        let row = pair((&a, &[2, 3]), (&[1.0, 2.0, 3.0], &[3]), &[2, 3], &sub);
        assert_eq!(row, Ok(vec![-1.0, -1.0, -1.0, 2.0, 2.0, 2.0]));
        let column = pair((&a, &[2, 3]), (&[1.0, 2.0], &[2, 1]), &[2, 3], &sub);
        assert_eq!(column, Ok(vec![-1.0, 0.0, 1.0, 1.0, 2.0, 3.0]));
        let wide = pair((&[1.0], &[1]), (&a, &[2, 3]), &[2, 3], &sub);
        assert_eq!(wide, Ok(vec![1.0, 0.0, -1.0, -2.0, -3.0, -4.0]));
        let no = pair((&a, &[2, 3]), (&[1.0, 2.0], &[2]), &[2, 3], &sub);
        assert_eq!(no.expect_err("2 under 3").code, "dims_inconsistent");
    }
}
