//! `qk_norm_rope`: RMS norm of q and k over a head or over the whole projection, then rotary embedding of the first
//! channels of each head.
//!
//! v passes the structure unchanged, so no span lists it.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::rope::{channels, Layout, Tables};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::{each_row, Leaf};
use crate::elementwise::rms_norm;
use crate::format::Format;
use crate::ports;
use crate::rope::turn;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[
        ("normalization_scope", &["per_head", "projection"]),
        ("rope_layout", &["half", "interleaved"]),
        ("rotary_extent", &["full", "partial"]),
        ("norm_weight_mode", &["direct", "offset"]),
        // The axis' word for "the boundary dtype"; nothing is quantised here.
        ("out_dtype", &["bf16"]),
    ],
    ..Leaf::plain("qk_norm_rope", &["rope"], bind)
};

/// One of q and k.
struct Side {
    heads: usize,
    /// `w` or `1 + w`, for one head or for all of them.
    norm: Vec<f32>,
    input: usize,
    output: usize,
}

struct NormRope {
    shared: Shared,
    sides: [Side; 2],
    eps: f32,
    layout: Layout,
    d: usize,
    /// Channels that turn.
    rotary: usize,
    tables: [usize; 2],
}

fn bind(
    shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let d = request.dim("D")?;
    let whole = request.axis("normalization_scope")? == "projection";
    let full = request.axis("rotary_extent")? == "full";
    let plus = match request.axis("norm_weight_mode")? {
        "offset" => 1.0,
        _ => 0.0,
    };
    let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
    let side = |symbol: &str, slot: &str, input: &str, output: &str| {
        let heads = request.dim(symbol)?;
        let expected = if whole { heads * d } else { d };
        let weight = request.required_weight(slot)?;
        if weight.rank() != 1 || weight.len() != expected || expected == 0 {
            let found = weight.dims();
            let text = format!("slot `{slot}` has dims {found:?}, expected [{expected}]");
            return Err(Failure::refused("bad_norm_weight", text));
        }
        let norm = weight.to_f32_vec()?;
        Ok(Side {
            heads,
            norm: norm.into_iter().map(|w| w + plus).collect(),
            input: ports::position(inputs, input)?,
            output: ports::position(outputs, output)?,
        })
    };
    Ok(Box::new(NormRope {
        shared: shared.clone(),
        sides: [
            side("Hq", "q_norm_weight", "q", "q_after_rope")?,
            side("Hkv", "k_norm_weight", "k", "k_after_rope")?,
        ],
        eps: request.number("eps")? as f32,
        layout: Layout::from_axis(request.axis("rope_layout")?)?,
        d,
        rotary: channels(d, full, request.optional_number("rotary_dim")?)?,
        tables: [
            ports::position(inputs, "cos")?,
            ports::position(inputs, "sin")?,
        ],
    }))
}

impl BoundForm for NormRope {
    fn facts(&self) -> FormFacts {
        let norms: usize = self.sides.iter().map(|side| side.norm.len()).sum();
        FormFacts {
            packed_bytes: 4 * norms as u64,
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
        let (d, isa) = (self.d, self.shared.isa);
        let q = ports::required(inputs, self.sides[0].input)?;
        ports::rows(&q, d)?;
        let [batch, tokens, ..] = ports::dims::<4>("q", &q)?;
        let [cos, sin] = self.tables.map(|at| ports::required(inputs, at));
        let (mut cos_copy, mut sin_copy) = (Vec::new(), Vec::new());
        let copies = [&mut cos_copy, &mut sin_copy];
        let tables = Tables::of([cos?, sin?], batch, tokens, &[self.rotary / 2], copies)?;
        for side in &self.sides {
            let x = ports::required(inputs, side.input)?;
            let dims = [batch, tokens, side.heads, d];
            ports::expect_dims("q or k", &x, &dims)?;
            let mut copy = Vec::new();
            let x = ports::floats(&x, &mut copy)?;
            let y = ports::output_of(outputs, side.output, &dims)?;
            let row = side.heads * d;
            each_row(&self.shared.host, y, row, |at, y| {
                let width = side.norm.len();
                let parts = x[at * row..][..row].chunks_exact(width);
                for (to, from) in y.chunks_exact_mut(width).zip(parts) {
                    rms_norm(isa, from, &side.norm, self.eps, to);
                }
                let (cos, sin) = tables.at(at / tokens, at % tokens);
                turn(isa, self.layout, y, d, self.rotary, cos, sin);
            });
        }
        Ok(())
    }
}
