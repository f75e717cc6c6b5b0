//! `patch_projection`: flattened patches times the flattened kernel, and the bias.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::{axis, Leaf};
use crate::format::Format;
use crate::linear::{Linear, Out};
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

struct Projection {
    shared: Shared,
    linear: Linear,
    bias: Vec<f32>,
    x: usize,
    y: usize,
    reserved: usize,
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
    let linear = Linear::bind(shared, format, &source, request, "x")?;
    let bias = match (axis(request, "bias"), request.weight("b")) {
        (Some("none"), _) | (_, None) => Vec::new(),
        _ => request.weight_of_dims("b", &[linear.n()])?.to_f32_vec()?,
    };
    let reserved = linear.buffer(ports::reserved(request));
    shared.pool.reserve(reserved);
    Ok(Box::new(Projection {
        shared: shared.clone(),
        linear,
        bias,
        x: ports::position(&request.params.inputs, "x")?,
        y: ports::position(&request.params.outputs, "y")?,
        reserved,
    }))
}

impl BoundForm for Projection {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.linear.bytes() + 4 * self.bias.len() as u64,
            scratch_bytes: 64 * self.reserved as u64,
            workspace_bytes: 0,
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let n = self.linear.n();
        let given = ports::required(inputs, self.x)?;
        let rows = ports::rows(&given, self.linear.k())?;
        let mut copy = Vec::new();
        let x = ports::floats(&given, &mut copy)?;
        let out = Out::new(ports::output(outputs, self.y, rows, n)?, n);
        let mut lease = self.shared.pool.take(self.linear.buffer(rows));
        let [buffer] = lease.split([self.linear.buffer(rows)]);
        let isa = self.shared.isa;
        self.linear
            .run(&self.shared, x, rows, buffer, out.writer(isa, &self.bias));
        Ok(())
    }
}
