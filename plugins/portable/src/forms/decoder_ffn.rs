//! `decoder_ffn`: RMS norm with optional modulation, gate and up as one product, activation times
//! up, down, optional gating, residual.
//!
//! Values are rounded to the boundary dtype where the structure rounds them: the normed row, every
//! product, the activation, the multiplies, the sum.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::activation::Activation;
use crate::boundary::Boundary;
use crate::format::Format;
use crate::linear::{dot, Linear};
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    formats: &Format::ALL,
    packed: true,
    points: &["x_after_norm", "act_after_mul"],
    accepts: &["x_after_norm"],
    scale_groups: &[&["w_gate", "w_up"]],
    variants: &[
        ("activation", &["silu", "gelu"]),
        ("norm_weight_mode", &["direct", "offset"]),
        ("conditioning", &["none", "ada_ln"]),
    ],
    ..Leaf::plain("decoder_ffn", &["block", "ffn"], bind)
};

/// What the span `block` has around the span `ffn`.
struct Block {
    /// `w` or `1 + w`.
    norm: Vec<f32>,
    eps: f32,
    /// Positions of scale, shift and gate.
    conditioning: [Option<usize>; 3],
}

struct Ffn {
    shared: Shared,
    rows: Rows,
    boundary: Boundary,
    activation: Activation,
    block: Option<Block>,
    gate_up: Linear,
    down: Linear,
    input: usize,
    output: usize,
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let gate = request.required_product_weight("w_gate")?;
    let [d, f] = gate.dims()?;
    let of_dims = |slot: &str, dims: [usize; 2]| {
        let weight = request.required_product_weight(slot)?;
        match weight.dims()? {
            found if found == dims => Ok(weight),
            found => {
                let text = format!("slot `{slot}` has dims {found:?}, expected {dims:?}");
                Err(Failure::refused("dims_inconsistent", text))
            }
        }
    };
    let (up, down) = (of_dims("w_up", [d, f])?, of_dims("w_down", [f, d])?);
    let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
    let (block, input, output) = match request.span {
        "block" => (Some(Block::bind(request, d)?), "x", "out"),
        _ => (None, "x_after_norm", "y"),
    };
    let host = &shared.host;
    let gate_up = Linear::bind(host, format, &[gate, up], request, "x_after_norm")?;
    if gate_up.coded() && block.is_some() {
        let text = "span `block` makes x_after_norm itself";
        return Err(Failure::refused("wire_format", text));
    }
    let mut ffn = Ffn {
        shared: shared.clone(),
        rows: Rows::of(request)?.coded(gate_up.coded()),
        boundary: Boundary::of(request)?,
        activation: Activation::from_axis(request.axis("activation")?)?,
        block,
        gate_up,
        down: Linear::bind(host, format, &[down], request, "act_after_mul")?,
        input: ports::position(inputs, input)?,
        output: ports::position(outputs, output)?,
        room: Reservation::default(),
    };
    let floats = ffn.buffers(ffn.rows.reserved(), [true; 3]).iter().sum();
    ffn.room = shared.pool.reserve(floats);
    Ok(Box::new(ffn))
}

impl Block {
    fn bind(request: &BindRequest<'_>, d: usize) -> Result<Self, Failure> {
        let mut norm = request.weight_of_dims("w_norm", &[d])?.to_f32_vec()?;
        match request.axis("norm_weight_mode")? {
            "offset" => norm.iter_mut().for_each(|w| *w += 1.0),
            "direct" => {}
            other => {
                let text = format!("norm_weight_mode `{other}`, expected direct or offset");
                return Err(Failure::refused("format_no_variant", text));
            }
        }
        let inputs = &request.params.inputs;
        Ok(Block {
            norm,
            eps: request.number("eps")? as f32,
            conditioning: ["cond_scale", "cond_shift", "cond_gate"]
                .map(|name| ports::optional(inputs, name)),
        })
    }
}

impl Ffn {
    fn d(&self) -> usize {
        self.down.n()
    }

    fn f(&self) -> usize {
        self.down.k()
    }

    /// Sizes of: x, the normed rows, gate and up, their product, down, and the conditioning that is
    /// there.
    fn buffers(&self, rows: usize, conditioning: [bool; 3]) -> [usize; 8] {
        let (wide, deep) = (rows * self.d(), rows * self.f());
        let there = self.block.is_some();
        let [scale, shift, gate] = conditioning.map(|c| if there && c { wide } else { 0 });
        [
            if there { wide } else { 0 },
            wide,
            2 * deep,
            deep,
            wide,
            scale,
            shift,
            gate,
        ]
    }
}

impl BoundForm for Ffn {
    fn facts(&self) -> FormFacts {
        let norm = self.block.as_ref().map_or(0, |block| block.norm.len());
        FormFacts {
            packed_bytes: self.gate_up.bytes() + self.down.bytes() + 4 * norm as u64,
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
        let (d, f) = (self.d(), self.f());
        let given = ports::input(inputs, Some(self.input));
        let rows = self.rows.admit(given, d)?;
        let out = self.rows.output(outputs, self.output, rows, d)?;
        let conditioning = match &self.block {
            Some(block) => block
                .conditioning
                .map(|position| ports::input(inputs, position)),
            None => [None; 3],
        };
        let sizes = self.buffers(rows, conditioning.map(|c| c.is_some()));
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x, normed, gate_up, product, down, scale, shift, gate] = lease.split(sizes);
        if let Some(given) = given {
            given.read_f32(if self.block.is_some() {
                &mut *x
            } else {
                &mut *normed
            })?;
            for (from, to) in conditioning
                .iter()
                .zip([&mut *scale, &mut *shift, &mut *gate])
            {
                if let Some(from) = from {
                    from.broadcast_to(given.dims())?.read_f32(to)?;
                }
            }
        }
        let (x, scale, shift, gate) = (&*x, &*scale, &*shift, &*gate);
        let (host, boundary) = (&self.shared.host, self.boundary);

        if let Some(block) = &self.block {
            host.parallel_chunks(normed, d, |row, normed| {
                let x = &x[row * d..][..d];
                let inverse = 1.0 / (dot(x, x) / d as f32 + block.eps).sqrt();
                for (i, ((to, x), w)) in normed.iter_mut().zip(x).zip(&block.norm).enumerate() {
                    let mut value = x * inverse * w;
                    value *= 1.0 + scale.get(row * d + i).unwrap_or(&0.0);
                    value += shift.get(row * d + i).unwrap_or(&0.0);
                    *to = boundary.round(value);
                }
            });
        }

        self.gate_up.apply(host, normed, rows, gate_up);
        let gate_up = &*gate_up;
        host.parallel_chunks(product, f, |row, product| {
            for (channel, to) in product.iter_mut().enumerate() {
                let g = boundary.round(gate_up[channel * rows + row]);
                let u = boundary.round(gate_up[(f + channel) * rows + row]);
                *to = boundary.round(boundary.round(self.activation.apply(g)) * u);
            }
        });

        self.down.apply(host, product, rows, down);
        let down = &*down;
        // The normed rows are spent: their buffer takes the output.
        host.parallel_chunks(normed, d, |row, to| {
            for (i, to) in to.iter_mut().enumerate() {
                let y = boundary.round(down[i * rows + row]);
                *to = match (x.get(row * d + i), gate.get(row * d + i)) {
                    (None, _) => y,
                    (Some(x), None) => x + y,
                    (Some(x), Some(gate)) => x + boundary.round(y * gate),
                };
            }
        });
        out.write_f32(normed)
    }
}
