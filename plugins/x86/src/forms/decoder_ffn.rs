//! `decoder_ffn`: RMS norm with optional modulation; gate and up as one product whose tiles are finished by activation
//! and multiply; down, whose tiles are finished by gate and residual.
//!
//! Gate and up are packed line by line in turn, so that 16 channels of both are in one tile.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::{axis, each_row, facts, Leaf};
use crate::elementwise::{add, gated, rms_norm, scale, scale_by_one_plus, Activation};
use crate::format::Format;
use crate::kernels::LANES;
use crate::linear::{Linear, Out};
use crate::pool::{plain, Line, Reservation};
use crate::ports;
use crate::source::Source;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    formats: Format::ALL,
    points: &["x_after_norm", "act_after_mul"],
    packed: true,
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
    activation: Activation,
    block: Option<Block>,
    gate_up: Linear,
    down: Linear,
    input: usize,
    output: usize,
    room: Reservation,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let [gate, up, down] =
        ["w_gate", "w_up", "w_down"].map(|slot| request.required_product_weight(slot));
    let (gate, up, down) = (gate?, up?, down?);
    let [d, f] = gate.dims()?;
    if up.dims()? != [d, f] || down.dims()? != [f, d] {
        let (up, down) = (up.dims()?, down.dims()?);
        let text = format!("gate {:?}, up {up:?}, down {down:?}", [d, f]);
        return Err(Failure::refused("dims_inconsistent", text));
    }
    let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
    let (block, input, output) = match request.span {
        "block" => (Some(Block::bind(request, d)?), "x", "out"),
        _ => (None, "x_after_norm", "y"),
    };
    let (gate_up, down) = (
        Source::interleaved([gate, up])?,
        Source::concatenated(&[down])?,
    );
    let mut ffn = Ffn {
        activation: Activation::from_axis(request.axis("activation")?)?,
        gate_up: Linear::bind(shared, format, &gate_up, request, "x_after_norm")?,
        down: Linear::bind(shared, format, &down, request, "act_after_mul")?,
        shared: shared.clone(),
        block,
        input: ports::position(inputs, input)?,
        output: ports::position(outputs, output)?,
        room: Reservation::default(),
    };
    let lines = ffn.buffers(ports::reserved(request)).iter().sum();
    ffn.room = shared.pool.reserve(lines);
    Ok(Box::new(ffn))
}

impl Block {
    fn bind(request: &BindRequest<'_>, d: usize) -> Result<Self, Failure> {
        let mut norm = request.weight_of_dims("w_norm", &[d])?.to_f32_vec()?;
        if axis(request, "norm_weight_mode") == Some("offset") {
            norm.iter_mut().for_each(|w| *w += 1.0);
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

    /// Lines of: normed rows, hidden rows, prepared activations of either product.
    fn buffers(&self, rows: usize) -> [usize; 3] {
        let normed = if self.block.is_some() {
            rows * self.d()
        } else {
            0
        };
        [
            Line::of::<f32>(normed),
            Line::of::<f32>(rows * self.f()),
            self.gate_up.buffer(rows).max(self.down.buffer(rows)),
        ]
    }
}

impl BoundForm for Ffn {
    fn facts(&self) -> FormFacts {
        let norm = self.block.as_ref().map_or(0, |block| block.norm.len());
        facts(
            self.gate_up.bytes() + self.down.bytes() + 4 * norm as u64,
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
        let (d, f, isa) = (self.d(), self.f(), self.shared.isa);
        let mut copies = [const { Vec::new() }; 4];
        let [own, copies @ ..] = &mut copies;
        let given = ports::given(inputs, self.input, d, own)?;
        let (x, rows) = (given.values, given.rows);
        let mut conditioning: [Option<&[f32]>; 3] = [None; 3];
        if let Some(block) = &self.block {
            let slots = conditioning.iter_mut().zip(copies);
            for ((to, copy), position) in slots.zip(block.conditioning) {
                if let Some(from) = ports::input(inputs, position) {
                    *to = Some(ports::floats_of(&from, given.tensor.dims(), copy)?);
                }
            }
        }
        let [cond_scale, cond_shift, cond_gate] = conditioning;
        let out = Out::new(ports::output(outputs, self.output, rows, d)?, d);
        let mut lease = self.shared.pool.take(self.buffers(rows).iter().sum());
        let [normed, hidden, buffer] = lease.split(self.buffers(rows));
        let (normed, hidden) = (plain::<f32>(normed), plain::<f32>(hidden));
        let normed = match &self.block {
            None => x,
            Some(block) => {
                let normed = &mut normed[..rows * d];
                let one = |row: usize, to: &mut [f32]| {
                    let own = row * d..(row + 1) * d;
                    rms_norm(isa, &x[own.clone()], &block.norm, block.eps, to);
                    if let Some(scale) = cond_scale {
                        scale_by_one_plus(isa, to, &scale[own.clone()]);
                    }
                    if let Some(shift) = cond_shift {
                        add(isa, to, &shift[own]);
                    }
                };
                each_row(&self.shared.host, normed, d, one);
                normed
            }
        };
        let hidden = &mut hidden[..rows * f];
        let to = Out::new(hidden, f);
        let activation = self.activation;
        let shared = &self.shared;
        self.gate_up
            .run(shared, normed, rows, buffer, |cover, tile| {
                for (r, values) in tile.0.iter().enumerate().take(cover.rows) {
                    for pair in 0..cover.lines / 2 {
                        let first = (cover.line / 2 + pair) * LANES;
                        // SAFETY: every place is in one cover.
                        let to = unsafe { to.row(cover.row + r, first, LANES) };
                        let (gate, up) = values[2 * pair * LANES..].split_at(LANES);
                        gated(isa, activation, gate, up, to);
                    }
                }
            });
        let residual = self.block.is_some().then_some(x);
        self.down.run(shared, hidden, rows, buffer, |cover, tile| {
            let first = cover.line * LANES;
            for (r, values) in tile.0.iter_mut().enumerate().take(cover.rows) {
                let row = cover.row + r;
                // SAFETY: every place of the output is in one cover.
                let out = unsafe { out.row(row, first, cover.lines * LANES) };
                let values = &mut values[..out.len()];
                let own = row * d + first..row * d + first + out.len();
                if let Some(gate) = cond_gate {
                    scale(isa, values, &gate[own.clone()]);
                }
                if let Some(residual) = residual {
                    add(isa, values, &residual[own]);
                }
                out.copy_from_slice(values);
            }
        });
        Ok(())
    }
}
