//! `linear_proj`: one product; bias, activation and residual where a tile is finished.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::projection::Projection;
use super::{axis, Leaf};
use crate::elementwise::{activated, add, Activation};
use crate::format::Format;
use crate::kernels::LANES;
use crate::linear::Out;
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

struct LinearProj {
    product: Projection,
    epilogue: Epilogue,
    y: usize,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let source = Source::concatenated(&[request.required_product_weight("w")?])?;
    let epilogue = match axis(request, "epilogue") {
        Some("gelu_quant_fp8") => Epilogue::Gelu,
        Some("residual_add") => {
            Epilogue::Residual(ports::position(&request.params.inputs, "residual")?)
        }
        _ => Epilogue::None,
    };
    Ok(Box::new(LinearProj {
        product: Projection::bind(shared, format, &source, request)?.biased(request)?,
        epilogue,
        y: ports::position(&request.params.outputs, "y")?,
    }))
}

impl BoundForm for LinearProj {
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
        let n = self.product.linear.n();
        let (mut own, mut other) = (Vec::new(), Vec::new());
        let x = self.product.given(inputs, &mut own)?;
        let residual = match self.epilogue {
            Epilogue::Residual(at) => {
                let dims: Vec<i64> = match x.tensor.dims() {
                    [lead @ .., _] => lead.iter().copied().chain([n as i64]).collect(),
                    [] => Vec::new(),
                };
                let residual = ports::required(inputs, at)?;
                Some(ports::floats_of(&residual, &dims, &mut other)?)
            }
            _ => None,
        };
        let out = Out::new(ports::output(outputs, self.y, x.rows, n)?, n);
        let (isa, bias) = (self.product.shared.isa, &self.product.bias);
        let gelu = matches!(self.epilogue, Epilogue::Gelu);
        self.product.run(&x, |cover, tile| {
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
