//! `qkv_rope`: the bias of a packed projection, the split, rotary embedding of q and k.
//!
//! The biased projection is rounded to the boundary dtype, q and k turn in f32 and are rounded
//! again, v is the rounded projection. A table as wide as a head gives the two channels of a pair
//! their own entries.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::rope::{Layout, Tables};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::ports::{self, Rows};
use crate::rope::turn;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[("rope_layout", &["half"])],
    ..Leaf::plain("qkv_rope", &["rope"], bind)
};

struct Rope {
    shared: Shared,
    rows: Rows,
    bias: Vec<f32>,
    /// Of q, of k and of v.
    heads: [usize; 3],
    d: usize,
    packed: usize,
    tables: [usize; 2],
    /// Of q, of k and of v.
    outputs: [usize; 3],
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let q_heads = ports::size(request, "Hq", "q_heads")?;
    let kv_heads = ports::size(request, "Hkv", "kv_heads")?;
    let d = ports::size(request, "D", "head_dim")?;
    if d == 0 || !d.is_multiple_of(2) {
        let text = format!("a head of {d} channels has no pairs");
        return Err(Failure::refused("bad_rotary_dim", text));
    }
    if q_heads == 0 || kv_heads == 0 {
        let text = format!("{q_heads} and {kv_heads} heads");
        return Err(Failure::refused("dims_inconsistent", text));
    }
    let heads = [q_heads, kv_heads, kv_heads];
    let width = heads.iter().sum::<usize>() * d;
    let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
    let mut rope = Rope {
        shared: shared.clone(),
        rows: Rows::of(request)?,
        bias: request.weight_of_dims("qkv_bias", &[width])?.to_f32_vec()?,
        heads,
        d,
        packed: ports::position(inputs, "packed_qkv")?,
        tables: [
            ports::position(inputs, "cos")?,
            ports::position(inputs, "sin")?,
        ],
        outputs: [
            ports::position(outputs, "q_after_rope")?,
            ports::position(outputs, "k_after_rope")?,
            ports::position(outputs, "v")?,
        ],
        room: Reservation::default(),
    };
    let floats = rope.buffers(rope.rows.reserved(), 0).iter().sum();
    rope.room = shared.pool.reserve(floats);
    Ok(Box::new(rope))
}

impl Rope {
    /// Sizes of: the packed rows, what they become, the two tables.
    fn buffers(&self, rows: usize, table: usize) -> [usize; 4] {
        let width = self.bias.len();
        [rows * width, rows * width, table, table]
    }
}

impl BoundForm for Rope {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: 4 * self.bias.len() as u64,
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
        let (d, width) = (self.d, self.bias.len());
        let packed = ports::required(inputs, self.packed)?;
        let rows = self.rows.admit(Some(packed), width)?;
        let [batch, tokens, _] = ports::dims("packed_qkv", &packed)?;
        let [cos, sin] = self.tables.map(|at| ports::required(inputs, at));
        let (cos, sin) = (cos?, sin?);
        let sizes = self.buffers(rows, cos.len().max(sin.len()));
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x, y, cos_buffer, sin_buffer] = lease.split(sizes);
        let buffers = [&mut cos_buffer[..cos.len()], &mut sin_buffer[..sin.len()]];
        let tables = Tables::of([cos, sin], batch, tokens, &[d / 2, d], buffers)?;
        let x = ports::floats(&packed, x)?;
        let boundary = self.rows.boundary();
        let turned = (self.heads[0] + self.heads[1]) * d;
        self.shared.host.parallel_chunks(y, width, |row, y| {
            for (i, y) in y.iter_mut().enumerate() {
                *y = boundary.round(x[row * width + i] + self.bias[i]);
            }
            let (cos, sin) = tables.at(row / tokens, row % tokens);
            for head in y[..turned].chunks_exact_mut(d) {
                turn(Layout::Half, head, cos, sin);
            }
        });
        let mut first = 0;
        for (heads, position) in self.heads.iter().zip(self.outputs) {
            let dims = [batch, tokens, *heads, d];
            let out = self.rows.output_of(outputs, position, &dims)?;
            for row in 0..rows {
                let from = &y[row * width + first * d..][..heads * d];
                for (h, head) in from.chunks_exact(d).enumerate() {
                    out.write_row(row * heads + h, head)?;
                }
            }
            first += heads;
        }
        Ok(())
    }
}
