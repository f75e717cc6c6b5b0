//! `vision_ffn`: layer norm, a product with bias, the activation, a product with bias, residual.
//!
//! Values are rounded to the boundary dtype where the structure rounds them: the normed row, every
//! product, bias add and activation, the sum. Version 1 has its norm weights always; since version
//! 2 a norm may be without them.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::activation::Activation;
use crate::biased::Biased;
use crate::format::Format;
use crate::norm;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    versions: &[1, 2],
    formats: &[
        Format::F32,
        Format::Bf16,
        Format::W8a16Static,
        Format::W4a16Static,
        Format::W8a8Static,
        Format::W8a8Dynamic,
        Format::Fp8Static,
        Format::Nvfp4Balance,
    ],
    points: &["x_after_norm", "hidden_after_act"],
    variants: &[
        ("activation", &["gelu"]),
        ("norm_affine", &["learned", "identity"]),
    ],
    ..Leaf::plain("vision_ffn", &["block", "ffn"], bind)
};

/// What the span `block` has around the span `ffn`.
struct Block {
    /// Weight and bias of the norm, where it has them.
    affine: [Option<Vec<f32>>; 2],
    eps: f32,
}

struct Ffn {
    shared: Shared,
    rows: Rows,
    activation: Activation,
    block: Option<Block>,
    fc1: Biased,
    fc2: Biased,
    input: usize,
    output: usize,
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let fc1 = request.required_weight("w_fc1")?;
    let [f, d] = ports::dims("slot `w_fc1`", &fc1)?;
    let fc2 = request.weight_of_dims("w_fc2", &[d, f])?;
    let linear = |weight: Tensor<'_>, bias: &str, point: &str| {
        // Slots are [N, K].
        let weight = weight.transpose(0, 1)?;
        Biased::bind(&shared.host, format, weight, bias, request, point)?.with_bias(bias)
    };
    let (block, input, output) = match request.span {
        "block" => (Some(Block::bind(request, d)?), "x", "out"),
        _ => (None, "x_after_norm", "y"),
    };
    let mut ffn = Ffn {
        shared: shared.clone(),
        rows: Rows::of(request)?,
        activation: Activation::from_axis(request.axis("activation")?)?,
        block,
        fc1: linear(fc1, "b_fc1", "x_after_norm")?,
        fc2: linear(fc2, "b_fc2", "hidden_after_act")?,
        input: ports::position(&request.params.inputs, input)?,
        output: ports::position(&request.params.outputs, output)?,
        room: Reservation::default(),
    };
    let floats = ffn.buffers(ffn.rows.reserved()).iter().sum();
    ffn.room = shared.pool.reserve(floats);
    Ok(Box::new(ffn))
}

impl Block {
    fn bind(request: &BindRequest<'_>, d: usize) -> Result<Self, Failure> {
        let identity = request
            .params
            .variant
            .get("norm_affine")
            .map(String::as_str);
        let affine = |slot| match request.weight(slot) {
            _ if identity == Some("identity") => Ok(None),
            None if request.params.version > 1 => Ok(None),
            _ => request.weight_of_dims(slot, &[d])?.to_f32_vec().map(Some),
        };
        Ok(Block {
            affine: [affine("w_norm")?, affine("b_norm")?],
            eps: request.number("eps")? as f32,
        })
    }
}

impl Ffn {
    /// Sizes of: x, the normed rows, both products, the hidden rows, the output.
    fn buffers(&self, rows: usize) -> [usize; 5] {
        let (wide, deep) = (rows * self.fc1.k(), rows * self.fc1.n());
        [wide, wide, wide.max(deep), deep, wide]
    }
}

impl BoundForm for Ffn {
    fn facts(&self) -> FormFacts {
        let affine = self
            .block
            .iter()
            .flat_map(|block| block.affine.iter().flatten());
        let norm: usize = affine.map(Vec::len).sum();
        FormFacts {
            packed_bytes: self.fc1.bytes() + self.fc2.bytes() + 4 * norm as u64,
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
        let d = self.fc1.k();
        let given = ports::required(inputs, self.input)?;
        let rows = self.rows.admit(Some(given), d)?;
        let out = self.rows.output(outputs, self.output, rows, d)?;
        let sizes = self.buffers(rows);
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x, normed, product, hidden, y] = lease.split(sizes);
        given.read_f32(x)?;
        let x = &*x;
        let (host, boundary) = (&self.shared.host, self.rows.boundary());

        host.parallel_chunks(normed, d, |row, normed| {
            let x = &x[row * d..][..d];
            let Some(block) = &self.block else {
                normed.copy_from_slice(x);
                return;
            };
            let (mean, inverse) = norm::layer(x, block.eps);
            for (i, to) in normed.iter_mut().enumerate() {
                let [w, b] = [&block.affine[0], &block.affine[1]].map(Option::as_ref);
                let value = (x[i] - mean) * inverse * w.map_or(1.0, |w| w[i]);
                *to = boundary.round(value + b.map_or(0.0, |b| b[i]));
            }
        });
        let wide = &mut product[..rows * self.fc1.n()];
        self.fc1.apply(host, normed, wide, hidden, |_, y, b| {
            let sum = boundary.round(boundary.round(y) + b);
            boundary.round(self.activation.apply(sum))
        });
        let narrow = &mut product[..rows * d];
        self.fc2.apply(host, hidden, narrow, y, |i, y, b| {
            let sum = boundary.round(boundary.round(y) + b);
            match self.block {
                Some(_) => x[i] + sum,
                None => sum,
            }
        });
        out.write_f32(y)
    }
}
