//! Operations of a host's graph on the simulated device: sums and products with broadcasting, rows of
//! a table, norms of rows.
//!
//! They read and write the device's memory alone. What else a host has between two seats it does itself, with copies.

use std::sync::Arc;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{ports, BindRequest, BoundForm, Failure, Tensor, TensorMut};
use structures_plugin_api::DType;

use super::{form, Sim};
use crate::norm;

/// What is declared.
pub const KINDS: &[&str] = &["add", "mul", "embedding", "rms_norm"];

/// Binds one of [`KINDS`].
pub fn bind(
    sim: &Arc<Sim>,
    kind: &str,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let body = match kind {
        "add" | "mul" => {
            let (a, b) = (Operand::of(request, "a")?, Operand::of(request, "b")?);
            let f: fn(f32, f32) -> f32 = match kind {
                "add" => |a, b| a + b,
                _ => |a, b| a * b,
            };
            Body::Pair { a, b, f }
        }
        "embedding" => {
            let table = request.required_weight("w")?;
            let [rows, width] = *table.dims() else {
                let what = format!("a table of dims {:?}", table.dims());
                return Err(Failure::invalid("dims_inconsistent", what));
            };
            Body::Rows {
                ids: ports::position(&request.params.inputs, "ids")?,
                rows: rows as usize,
                width: width as usize,
                table: table.to_f32_vec()?,
            }
        }
        "rms_norm" => {
            let attribute = |name: &str| request.params.params.get(name);
            let offset = attribute("weight").and_then(|w| w.as_str()) == Some("offset");
            if request.number("axes")? != 1.0 {
                let what = "norms over several axes";
                return Err(Failure::refused("envelope", what));
            }
            let scale = match request.weight("w") {
                Some(w) => {
                    let add = if offset { 1.0 } else { 0.0 };
                    Some(w.to_f32_vec()?.iter().map(|w| w + add).collect())
                }
                None => None,
            };
            Body::Norm {
                x: ports::position(&request.params.inputs, "x")?,
                eps: request.number("eps")? as f32,
                scale,
            }
        }
        _ => {
            let what = format!("the simulated device does not execute `{kind}`");
            return Err(Failure::refused("form_unknown", what));
        }
    };
    let known = KINDS.iter().find(|known| **known == kind);
    Ok(Box::new(Operation {
        sim: Arc::clone(sim),
        kind: known.copied().unwrap_or(""),
        body,
    }))
}

/// An operand: given in a call, or a parameter.
enum Operand {
    Given(usize),
    Stored(Vec<f32>, Vec<i64>),
}

impl Operand {
    fn of(request: &BindRequest<'_>, name: &str) -> Result<Self, Failure> {
        match request.weight(name) {
            Some(stored) => Ok(Operand::Stored(
                stored.to_f32_vec()?,
                stored.dims().to_vec(),
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
}

struct Operation {
    sim: Arc<Sim>,
    kind: &'static str,
    body: Body,
}

enum Body {
    /// One function of two operands.
    Pair {
        a: Operand,
        b: Operand,
        f: fn(f32, f32) -> f32,
    },
    /// Every row by its root mean square.
    Norm {
        x: usize,
        eps: f32,
        scale: Option<Vec<f32>>,
    },
    /// Rows of a table.
    Rows {
        ids: usize,
        rows: usize,
        width: usize,
        table: Vec<f32>,
    },
}

impl Operation {
    fn floats(&self, queue: u64, tensor: &Tensor<'_>) -> Result<Vec<f32>, Failure> {
        let bytes = form::read(&self.sim, queue, tensor, DType::F32)?;
        let each = bytes.chunks_exact(4);
        Ok(each
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect())
    }
}

impl BoundForm for Operation {
    fn facts(&self) -> FormFacts {
        let bytes = match &self.body {
            Body::Pair { a, b, .. } => a.bytes() + b.bytes(),
            Body::Norm { scale, .. } => 4 * scale.as_ref().map_or(0, Vec::len) as u64,
            Body::Rows { table, .. } => 4 * table.len() as u64,
        };
        FormFacts {
            packed_bytes: bytes,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let queue = ctx.queue.addr() as u64;
        let output = ports::output(outputs, 0)?;
        let dims: Vec<i64> = output.dims().to_vec();
        let made = match &self.body {
            Body::Pair { a, b, f } => {
                let read = |operand: &Operand| -> Result<(Vec<f32>, Vec<i64>), Failure> {
                    let at = match operand {
                        Operand::Stored(values, dims) => return Ok((values.clone(), dims.clone())),
                        Operand::Given(at) => *at,
                    };
                    let tensor = ports::required(inputs, at)?;
                    Ok((self.floats(queue, &tensor)?, tensor.dims().to_vec()))
                };
                let (a, b) = (read(a)?, read(b)?);
                pair((&a.0, &a.1), (&b.0, &b.1), &dims, f)?
            }
            Body::Norm { x, eps, scale } => {
                let tensor = ports::required(inputs, *x)?;
                let mut values = self.floats(queue, &tensor)?;
                let width = tensor.cols().max(1);
                if scale.as_ref().is_some_and(|scale| scale.len() != width) {
                    let what = format!("rows of {width}");
                    return Err(Failure::invalid("dims_inconsistent", what));
                }
                for row in values.chunks_exact_mut(width) {
                    let by = norm::rms(row, *eps);
                    row.iter_mut().for_each(|v| *v *= by);
                    if let Some(scale) = scale {
                        row.iter_mut().zip(scale).for_each(|(v, w)| *v *= w);
                    }
                }
                values
            }
            Body::Rows {
                ids,
                rows,
                width,
                table,
            } => {
                let tensor = ports::required(inputs, *ids)?;
                let bytes = form::read(&self.sim, queue, &tensor, DType::I64)?;
                let mut out = Vec::with_capacity(tensor.len() * width);
                for id in bytes.chunks_exact(8) {
                    let mut whole = [0; 8];
                    whole.copy_from_slice(id);
                    let id = i64::from_le_bytes(whole);
                    let row = usize::try_from(id).ok().filter(|row| row < rows);
                    let Some(row) = row else {
                        let what = format!("id {id} is not in a table of {rows} rows");
                        return Err(Failure::refused("operand", what));
                    };
                    out.extend_from_slice(&table[row * width..][..*width]);
                }
                out
            }
        };
        if made.len() != output.len() {
            let what = format!("an output of dims {dims:?} for {} values", made.len());
            return Err(Failure::invalid("dims_inconsistent", what));
        }
        self.sim.inside(self.kind);
        form::write(&self.sim, queue, &output.as_tensor(), &made)
    }
}

/// `f` of every pair, aligned from the last dim as numpy does.
fn pair(
    (a, a_dims): (&[f32], &[i64]),
    (b, b_dims): (&[f32], &[i64]),
    dims: &[i64],
    f: &fn(f32, f32) -> f32,
) -> Result<Vec<f32>, Failure> {
    let steps = |of: &[i64]| -> Result<Vec<usize>, Failure> {
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
            step *= *n as usize;
        }
        Ok(steps)
    };
    let (sa, sb) = (steps(a_dims)?, steps(b_dims)?);
    let count = dims.iter().product::<i64>() as usize;
    let mut out = Vec::with_capacity(count);
    for i in 0..count {
        let (mut left, mut at_a, mut at_b) = (i, 0, 0);
        for axis in (0..dims.len()).rev() {
            let n = dims[axis] as usize;
            at_a += left % n * sa[axis];
            at_b += left % n * sb[axis];
            left /= n;
        }
        out.push(f(a[at_a], b[at_b]));
    }
    Ok(out)
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
