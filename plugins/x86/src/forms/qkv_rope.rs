//! `qkv_rope`: the bias of a packed projection, the split, rotary embedding of q and k.
//!
//! A table as wide as a head gives the two channels of a pair their own entries.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::rope::{Layout, Tables};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::{each_row, Leaf};
use crate::elementwise::add;
use crate::format::Format;
use crate::ports;
use crate::rope::turn;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[("rope_layout", &["half"])],
    ..Leaf::plain("qkv_rope", &["rope"], bind)
};

struct Rope {
    shared: Shared,
    bias: Vec<f32>,
    /// Of q, of k and of v.
    heads: [usize; 3],
    d: usize,
    packed: usize,
    tables: [usize; 2],
    /// Of q, of k and of v.
    outputs: [usize; 3],
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
    Ok(Box::new(Rope {
        shared: shared.clone(),
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
    }))
}

impl BoundForm for Rope {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: 4 * self.bias.len() as u64,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let (d, width, isa) = (self.d, self.bias.len(), self.shared.isa);
        let packed = ports::required(inputs, self.packed)?;
        ports::rows(&packed, width)?;
        let [batch, tokens, _] = ports::dims("packed_qkv", &packed)?;
        let [cos, sin] = self.tables.map(|at| ports::required(inputs, at));
        let (mut cos_copy, mut sin_copy) = (Vec::new(), Vec::new());
        let copies = [&mut cos_copy, &mut sin_copy];
        let tables = Tables::of([cos?, sin?], batch, tokens, &[d / 2, d], copies)?;
        let mut copy = Vec::new();
        let x = ports::floats(&packed, &mut copy)?;
        let mut first = 0;
        for (part, (heads, position)) in self.heads.iter().zip(self.outputs).enumerate() {
            let row = heads * d;
            let out = ports::output_of(outputs, position, &[batch, tokens, *heads, d])?;
            let bias = &self.bias[first..first + row];
            each_row(&self.shared.host, out, row, |at, y| {
                y.copy_from_slice(&x[at * width + first..][..row]);
                add(isa, y, bias);
                if part < 2 {
                    let (cos, sin) = tables.at(at / tokens, at % tokens);
                    turn(isa, Layout::Half, y, d, d, cos, sin);
                }
            });
            first += row;
        }
        Ok(())
    }
}
