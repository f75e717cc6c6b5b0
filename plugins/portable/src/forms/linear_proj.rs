//! `linear_proj`: one product with an optional bias and an epilogue, computed in f32, rounded once.
//!
//! The quantise of `gelu_quant_fp8` is an implementation detail of fused forms; the value at the
//! boundary is the GELU's, in the boundary dtype.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::activation::Activation;
use crate::format::Format;
use crate::linear::Linear;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    formats: &[
        Format::F32,
        Format::Bf16,
        Format::W8a16Static,
        Format::W4a16Static,
        Format::W8a8Static,
        Format::W8a8Dynamic,
        Format::Fp8Static,
        Format::Nvfp4Dynamic,
        Format::Nvfp4Balance,
    ],
    blocked: &["K"],
    packed: true,
    points: &["x"],
    accepts: &["x"],
    // `bf16` is the axis' word for "the boundary dtype"; a wire is declared as one, not by the axis.
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
    rows: Rows,
    linear: Linear,
    bias: Option<Vec<f32>>,
    epilogue: Epilogue,
    x: usize,
    y: usize,
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let weight = request.required_product_weight("w")?;
    let linear = Linear::bind(&shared.host, format, &[weight], request, "x")?;
    // Without the axis a bias is added where there is one.
    let bias = match request.params.variant.get("bias").map(String::as_str) {
        Some("none") => None,
        _ => request
            .weight("b")
            .map(|_| request.weight_of_dims("b", &[linear.n()]))
            .transpose()?,
    };
    let inputs = &request.params.inputs;
    let epilogue = match request.axis("epilogue")? {
        "gelu_quant_fp8" => Epilogue::Gelu,
        "residual_add" => Epilogue::Residual(ports::position(inputs, "residual")?),
        _ => Epilogue::None,
    };
    let mut projection = Projection {
        shared: shared.clone(),
        rows: Rows::of(request)?.coded(linear.coded()),
        bias: bias.map(|bias| bias.to_f32_vec()).transpose()?,
        epilogue,
        x: ports::position(inputs, "x")?,
        y: ports::position(&request.params.outputs, "y")?,
        linear,
        room: Reservation::default(),
    };
    let floats = projection.buffers(projection.rows.reserved()).iter().sum();
    projection.room = shared.pool.reserve(floats);
    Ok(Box::new(projection))
}

impl Projection {
    /// Sizes of: x, the product, y, the residual.
    fn buffers(&self, rows: usize) -> [usize; 4] {
        let (n, k) = (self.linear.n(), self.linear.k());
        let residual = matches!(self.epilogue, Epilogue::Residual(_));
        [
            rows * k,
            rows * n,
            rows * n,
            if residual { rows * n } else { 0 },
        ]
    }
}

impl BoundForm for Projection {
    fn facts(&self) -> FormFacts {
        let bias = self.bias.as_ref().map_or(0, Vec::len);
        FormFacts {
            packed_bytes: self.linear.bytes() + 4 * bias as u64,
            scratch_bytes: self.room.bytes(),
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
        let given = ports::input(inputs, Some(self.x));
        let rows = self.rows.admit(given, self.linear.k())?;
        let out = self.rows.output(outputs, self.y, rows, n)?;
        let sizes = self.buffers(rows);
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x, product, y, residual] = lease.split(sizes);
        if let Some(given) = given {
            given.read_f32(x)?;
        }
        if let Epilogue::Residual(position) = self.epilogue {
            let given = ports::input(inputs, Some(position)).ok_or_else(|| {
                Failure::invalid(
                    "view_absent",
                    "the epilogue adds a residual, which is absent",
                )
            })?;
            given.broadcast_to(out.dims())?.read_f32(residual)?;
        }
        let host = &self.shared.host;
        self.linear.apply(host, x, rows, product);
        let (product, residual) = (&*product, &*residual);
        host.parallel_chunks(y, n, |row, y| {
            for (channel, y) in y.iter_mut().enumerate() {
                let bias = self.bias.as_ref().map_or(0.0, |bias| bias[channel]);
                let sum = product[channel * rows + row] + bias;
                *y = match self.epilogue {
                    Epilogue::None => sum,
                    Epilogue::Gelu => Activation::GeluTanh.apply(sum),
                    Epilogue::Residual(_) => sum + residual[row * n + channel],
                };
            }
        });
        out.write_f32(y)
    }
}
