//! `norm_fused`: layer norm with its affine part.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::{each_row, Leaf};
use crate::elementwise::layer_norm;
use crate::format::Format;
use crate::ports;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[("norm", &["layer"])],
    ..Leaf::plain("norm_fused", &["norm"], bind)
};

struct Norm {
    shared: Shared,
    w: Vec<f32>,
    b: Vec<f32>,
    eps: f32,
    x: usize,
    y: usize,
}

fn bind(
    shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let d = request.dim("D")?;
    if d == 0 {
        return Err(Failure::refused("dims_inconsistent", "rows of width 0"));
    }
    Ok(Box::new(Norm {
        shared: shared.clone(),
        w: request.weight_of_dims("w", &[d])?.to_f32_vec()?,
        b: request.weight_of_dims("b", &[d])?.to_f32_vec()?,
        eps: request.number("eps")? as f32,
        x: ports::position(&request.params.inputs, "x")?,
        y: ports::position(&request.params.outputs, "y")?,
    }))
}

impl BoundForm for Norm {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: 8 * self.w.len() as u64,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let d = self.w.len();
        let mut copy = Vec::new();
        let given = ports::given(inputs, self.x, d, &mut copy)?;
        let x = given.values;
        let y = ports::output(outputs, self.y, given.rows, d)?;
        let (isa, eps) = (self.shared.isa, self.eps);
        each_row(&self.shared.host, y, d, |row, y| {
            layer_norm(isa, &x[row * d..][..d], &self.w, &self.b, eps, y);
        });
        Ok(())
    }
}
