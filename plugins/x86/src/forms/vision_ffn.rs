//! `vision_ffn`: layer norm; a product finished by bias and activation; a product finished by bias and residual.
//!
//! Version 1 has its norm weights always; since version 2 a norm may be without them.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::{axis, each_row, facts, Leaf};
use crate::elementwise::{activated, add, layer_norm, Activation};
use crate::format::Format;
use crate::kernels::LANES;
use crate::linear::{Linear, Out};
use crate::pool::{plain, Line, Reservation};
use crate::ports;
use crate::source::Source;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    versions: &[1, 2],
    formats: Format::ALL,
    points: &["x_after_norm", "hidden_after_act"],
    variants: &[
        ("activation", &["gelu"]),
        ("norm_affine", &["learned", "identity"]),
    ],
    ..Leaf::plain("vision_ffn", &["block", "ffn"], bind)
};

/// What the span `block` has around the span `ffn`.
struct Block {
    /// Weight and bias of the norm, empty where it has none.
    affine: [Vec<f32>; 2],
    eps: f32,
}

struct Ffn {
    shared: Shared,
    activation: Activation,
    block: Option<Block>,
    fc1: Linear,
    fc2: Linear,
    bias: [Vec<f32>; 2],
    input: usize,
    output: usize,
    room: Reservation,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let fc1 = request.required_weight("w_fc1")?;
    let [f, d] = ports::dims("slot `w_fc1`", &fc1)?;
    let fc2 = request.weight_of_dims("w_fc2", &[d, f])?;
    let linear = |weight: Tensor<'_>, point: &str| {
        // Slots are [N, K].
        let source = Source::concatenated(&[weight.transpose(0, 1)?])?;
        Linear::bind(shared, format, &source, request, point)
    };
    let (block, input, output) = match request.span {
        "block" => (Some(Block::bind(request, d)?), "x", "out"),
        _ => (None, "x_after_norm", "y"),
    };
    let mut ffn = Ffn {
        shared: shared.clone(),
        activation: Activation::from_axis(request.axis("activation")?)?,
        block,
        fc1: linear(fc1, "x_after_norm")?,
        fc2: linear(fc2, "hidden_after_act")?,
        bias: [
            request.weight_of_dims("b_fc1", &[f])?.to_f32_vec()?,
            request.weight_of_dims("b_fc2", &[d])?.to_f32_vec()?,
        ],
        input: ports::position(&request.params.inputs, input)?,
        output: ports::position(&request.params.outputs, output)?,
        room: Reservation::default(),
    };
    let lines = ffn.buffers(ports::reserved(request)).iter().sum();
    ffn.room = shared.pool.reserve(lines);
    Ok(Box::new(ffn))
}

impl Block {
    fn bind(request: &BindRequest<'_>, d: usize) -> Result<Self, Failure> {
        let identity = axis(request, "norm_affine") == Some("identity");
        let affine = |slot| match request.weight(slot) {
            _ if identity => Ok(Vec::new()),
            None if request.params.version > 1 => Ok(Vec::new()),
            _ => request.weight_of_dims(slot, &[d])?.to_f32_vec(),
        };
        let [mut w, mut b] = [affine("w_norm")?, affine("b_norm")?];
        // Both are applied together: one that is alone gets its neutral companion.
        if w.len() != b.len() {
            w.resize(d, 1.0);
            b.resize(d, 0.0);
        }
        Ok(Block {
            affine: [w, b],
            eps: request.number("eps")? as f32,
        })
    }
}

impl Ffn {
    /// Lines of: the normed rows, the hidden rows, prepared activations of either product.
    fn buffers(&self, rows: usize) -> [usize; 3] {
        let normed = match self.block {
            Some(_) => rows * self.fc1.k(),
            None => 0,
        };
        [
            Line::of::<f32>(normed),
            Line::of::<f32>(rows * self.fc1.n()),
            self.fc1.buffer(rows).max(self.fc2.buffer(rows)),
        ]
    }
}

impl BoundForm for Ffn {
    fn facts(&self) -> FormFacts {
        let norm = self.block.iter().flat_map(|block| &block.affine);
        let floats: usize = norm.chain(&self.bias).map(Vec::len).sum();
        facts(
            self.fc1.bytes() + self.fc2.bytes() + 4 * floats as u64,
            self.room.bytes(),
        )
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let (d, f, isa) = (self.fc1.k(), self.fc1.n(), self.shared.isa);
        let mut copy = Vec::new();
        let given = ports::given(inputs, self.input, d, &mut copy)?;
        let (x, rows) = (given.values, given.rows);
        let out = Out::new(ports::output(outputs, self.output, rows, d)?, d);
        let sizes = self.buffers(rows);
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [normed, hidden, buffer] = lease.split(sizes);
        let shared = &self.shared;
        let normed = match &self.block {
            None => x,
            Some(block) => {
                let normed = &mut plain::<f32>(normed)[..rows * d];
                let [w, b] = &block.affine;
                each_row(&shared.host, normed, d, |row, to| {
                    layer_norm(isa, &x[row * d..][..d], w, b, block.eps, to);
                });
                normed
            }
        };
        let hidden = &mut plain::<f32>(hidden)[..rows * f];
        let to = Out::new(hidden, f);
        let [b1, b2] = &self.bias;
        let activation = self.activation;
        self.fc1.run(shared, normed, rows, buffer, |cover, tile| {
            let first = cover.line * LANES;
            for (r, values) in tile.0.iter_mut().enumerate().take(cover.rows) {
                // SAFETY: every place is in one cover.
                let to = unsafe { to.row(cover.row + r, first, cover.lines * LANES) };
                add(isa, &mut values[..to.len()], &b1[first..]);
                activated(isa, activation, values, to);
            }
        });
        let residual = self.block.is_some().then_some(x);
        self.fc2.run(shared, hidden, rows, buffer, |cover, tile| {
            let first = cover.line * LANES;
            for (r, values) in tile.0.iter_mut().enumerate().take(cover.rows) {
                let row = cover.row + r;
                // SAFETY: every place of the output is in one cover.
                let out = unsafe { out.row(row, first, cover.lines * LANES) };
                let values = &mut values[..out.len()];
                add(isa, values, &b2[first..]);
                if let Some(residual) = residual {
                    add(isa, values, &residual[row * d + first..]);
                }
                out.copy_from_slice(values);
            }
        });
        Ok(())
    }
}
