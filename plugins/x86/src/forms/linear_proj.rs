//! `linear_proj`: one product; bias, activation and residual where a tile is finished.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::{axis, Leaf};
use crate::elementwise::{activated, add, Activation};
use crate::format::Format;
use crate::kernels::LANES;
use crate::linear::{Linear, Out};
use crate::ports;
use crate::source::Source;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    formats: Format::ALL,
    points: &["x"],
    packed: true,
    // `bf16` is the axis' word for "the boundary dtype"; wires are not consumed here.
    variants: &[
        ("in_dtype", &["bf16"]),
        ("bias", &["none", "add"]),
        ("epilogue", &["none", "gelu_quant_fp8", "residual_add"]),
    ],
    ..Leaf::plain("linear_proj", &["proj"], bind)
};

enum Epilogue {
    None,
    Gelu,
    /// Adds the input at this position.
    Residual(usize),
}

struct Projection {
    shared: Shared,
    linear: Linear,
    bias: Vec<f32>,
    epilogue: Epilogue,
    x: usize,
    y: usize,
    reserved: usize,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let source = Source::concatenated(&[request.required_product_weight("w")?])?;
    let linear = Linear::bind(shared, format, &source, request, "x")?;
    // Without the axis a bias is added where there is one.
    let bias = match (axis(request, "bias"), request.weight("b")) {
        (Some("none"), _) | (_, None) => Vec::new(),
        _ => request.weight_of_dims("b", &[linear.n()])?.to_f32_vec()?,
    };
    let inputs = &request.params.inputs;
    let epilogue = match axis(request, "epilogue") {
        Some("gelu_quant_fp8") => Epilogue::Gelu,
        Some("residual_add") => Epilogue::Residual(ports::position(inputs, "residual")?),
        _ => Epilogue::None,
    };
    let reserved = linear.buffer(ports::reserved(request));
    shared.pool.reserve(reserved);
    Ok(Box::new(Projection {
        shared: shared.clone(),
        bias,
        epilogue,
        x: ports::position(inputs, "x")?,
        y: ports::position(&request.params.outputs, "y")?,
        linear,
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
        let (n, k) = (self.linear.n(), self.linear.k());
        let x = ports::required(inputs, self.x)?;
        let rows = ports::rows(&x, k)?;
        let (mut own, mut other) = (Vec::new(), Vec::new());
        let residual = match self.epilogue {
            Epilogue::Residual(at) => {
                let dims: Vec<i64> = match x.dims() {
                    [lead @ .., _] => lead.iter().copied().chain([n as i64]).collect(),
                    [] => Vec::new(),
                };
                let residual = ports::required(inputs, at)?;
                Some(ports::floats_of(&residual, &dims, &mut other)?)
            }
            _ => None,
        };
        let x = ports::floats(&x, &mut own)?;
        let out = Out::new(ports::output(outputs, self.y, rows, n)?, n);
        let mut lease = self.shared.pool.take(self.linear.buffer(rows));
        let [buffer] = lease.split([self.linear.buffer(rows)]);
        let (isa, bias) = (self.shared.isa, &self.bias);
        let gelu = matches!(self.epilogue, Epilogue::Gelu);
        self.linear
            .run(&self.shared, x, rows, buffer, |cover, tile| {
                let first = cover.line * LANES;
                for (r, values) in tile.0.iter_mut().enumerate().take(cover.rows) {
                    let row = cover.row + r;
                    // SAFETY: every place of the output is in one cover.
                    let out = unsafe { out.row(row, first, cover.lines * LANES) };
                    let values = &mut values[..out.len()];
                    if let Some(bias) = bias.get(first..first + out.len()) {
                        add(isa, values, bias);
                    }
                    if let Some(residual) = residual {
                        add(isa, values, &residual[row * n + first..][..out.len()]);
                    }
                    match gelu {
                        true => activated(isa, Activation::GeluTanh, values, out),
                        false => out.copy_from_slice(values),
                    }
                }
            });
        Ok(())
    }
}
