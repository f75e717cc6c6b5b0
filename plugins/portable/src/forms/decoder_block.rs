//! `decoder_block`: the residual steps around a decoder layer's sublayers.
//!
//! A sublayer is the host's, so the whole block is not executed here; the span of one residual is:
//! `r = x + attn_out * gate_in`, `y = r + ffn_out * gate_out`, without the gate where there is
//! none. The product and the sum are rounded to the boundary dtype.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Spread, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[("residual", &["gated", "plain"])],
    ..Leaf::plain("decoder_block", &["attn_residual", "ffn_residual"], bind)
};

struct Residual {
    shared: Shared,
    rows: Rows,
    /// Whether a call must bring the gate.
    gated: bool,
    x: usize,
    branch: usize,
    gate: Option<usize>,
    output: usize,
}

fn bind(
    shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let (x, branch, gate, output) = match request.span {
        "attn_residual" => ("x", "attn_out", "gate_in", "r"),
        _ => ("r", "ffn_out", "gate_out", "y"),
    };
    let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
    let gated = request.axis("residual")? == "gated";
    Ok(Box::new(Residual {
        shared: shared.clone(),
        rows: Rows::of(request)?,
        gated,
        x: ports::position(inputs, x)?,
        branch: ports::position(inputs, branch)?,
        gate: ports::optional(inputs, gate).filter(|_| gated),
        output: ports::position(outputs, output)?,
    }))
}

impl BoundForm for Residual {
    /// The width is a call's, and so is the size of the buffers.
    fn facts(&self) -> FormFacts {
        FormFacts::default()
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let x = ports::required(inputs, self.x)?;
        let d = x.cols();
        let rows = self.rows.admit(Some(x), d)?;
        let branch = ports::required(inputs, self.branch)?;
        self.rows.check_dtype("the branch", &branch)?;
        let gate = ports::input(inputs, self.gate);
        if self.gated && gate.is_none() {
            let text = "the residual is gated, and the gate is absent";
            return Err(Failure::invalid("view_absent", text));
        }
        let out = self.rows.output(outputs, self.output, rows, d)?;
        let sizes = [
            rows * d,
            rows * d,
            gate.map_or(0, |gate| gate.len()),
            rows * d,
        ];
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x_buffer, branch_buffer, gate_buffer, y] = lease.split(sizes);
        let gate = match &gate {
            Some(gate) if gate.cols() != d => {
                let text = format!("the gate of dims {:?} for width {d}", gate.dims());
                return Err(Failure::invalid("dims_inconsistent", text));
            }
            Some(gate) => Some((
                Spread::of("the gate", gate, 1, &x)?,
                ports::floats(gate, gate_buffer)?,
            )),
            None => None,
        };
        if branch.rows() != rows || branch.cols() != d {
            let text = format!("a branch of dims {:?} for {:?}", branch.dims(), x.dims());
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        let x = ports::floats(&x, x_buffer)?;
        let branch = ports::floats(&branch, branch_buffer)?;
        let boundary = self.rows.boundary();
        self.shared.host.parallel_chunks(y, d.max(1), |row, y| {
            let at = row * d..row * d + d;
            let (x, branch) = (&x[at.clone()], &branch[at]);
            let gate = gate.as_ref().map(|(spread, gate)| {
                let from = spread.row(row) * d;
                &gate[from..from + d]
            });
            for (i, y) in y.iter_mut().enumerate() {
                *y = match gate {
                    Some(gate) => x[i] + boundary.round(branch[i] * gate[i]),
                    None => x[i] + branch[i],
                };
            }
        });
        out.write_f32(y)
    }
}
