//! `patch_projection`: flattened patches times the flattened kernel, and the bias.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::projection::Projection;
use super::Leaf;
use crate::format::Format;
use crate::linear::Out;
use crate::ports;
use crate::source::Source;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[
        ("layout", &["preflattened_full_patch"]),
        ("bias", &["none", "add"]),
    ],
    ..Leaf::plain("patch_projection", &["proj"], bind)
};

struct PatchProjection {
    product: Projection,
    y: usize,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let weight = request.required_weight("w")?;
    ports::dims::<2>("slot `w`", &weight)?;
    // The slot is [N, K].
    let source = Source::concatenated(&[weight.transpose(0, 1)?])?;
    Ok(Box::new(PatchProjection {
        product: Projection::bind(shared, format, &source, request)?.biased(request)?,
        y: ports::position(&request.params.outputs, "y")?,
    }))
}

impl BoundForm for PatchProjection {
    fn facts(&self) -> FormFacts {
        self.product.facts()
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let product = &self.product;
        let n = product.linear.n();
        let mut copy = Vec::new();
        let x = product.given(inputs, &mut copy)?;
        let out = Out::new(ports::output(outputs, self.y, x.rows, n)?, n);
        product.run(&x, out.writer(product.shared.isa, &product.bias));
        Ok(())
    }
}
