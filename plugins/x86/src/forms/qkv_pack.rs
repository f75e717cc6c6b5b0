//! `qkv_pack`: sibling products of one input as one product; a tile is cut where siblings meet.
//!
//! A per-tensor scale is taken over the concatenation, as the structure says.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::elementwise::add;
use crate::format::Format;
use crate::kernels::LANES;
use crate::linear::{Linear, Out};
use crate::ports;
use crate::source::Source;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    formats: Format::PACK,
    points: &["x"],
    packed: true,
    scale_groups: &[&["w_*"]],
    // `bf16_fused_quant` is the axis' word for "as it comes".
    variants: &[("bind", &["leaf"]), ("in_dtype", &["bf16_fused_quant"])],
    ..Leaf::plain("qkv_pack", &["pack"], bind)
};

struct Sibling {
    /// First channel of the packed product.
    first: usize,
    channels: usize,
    /// Position of its output.
    output: usize,
}

struct Pack {
    shared: Shared,
    linear: Linear,
    siblings: Vec<Sibling>,
    /// Of all channels, empty when there is none.
    bias: Vec<f32>,
    x: usize,
    reserved: usize,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let outputs = &request.params.outputs;
    let (mut weights, mut siblings, mut bias) = (Vec::new(), Vec::new(), Vec::new());
    let (mut first, mut biased) = (0, false);
    while let Some(weight) = request.product_weight(&format!("w_{}", siblings.len()))? {
        let i = siblings.len();
        let ([_, channels], slot) = (weight.dims()?, format!("b_{i}"));
        bias.extend(match request.weight(&slot) {
            Some(_) => {
                biased = true;
                request.weight_of_dims(&slot, &[channels])?.to_f32_vec()?
            }
            None => vec![0.0; channels],
        });
        siblings.push(Sibling {
            first,
            channels,
            output: ports::position(outputs, &format!("y_{i}"))?,
        });
        first += channels;
        weights.push(weight);
    }
    if siblings.is_empty() || siblings.len() != outputs.len() {
        let text = format!(
            "{} weights w_0, w_1, ... for outputs {outputs:?}",
            siblings.len()
        );
        return Err(Failure::refused("weight_missing", text));
    }
    let source = Source::concatenated(&weights)?;
    let linear = Linear::bind(shared, format, &source, request, "x")?;
    let reserved = linear.buffer(ports::reserved(request));
    shared.pool.reserve(reserved);
    Ok(Box::new(Pack {
        shared: shared.clone(),
        bias: if biased { bias } else { Vec::new() },
        x: ports::position(&request.params.inputs, "x")?,
        linear,
        siblings,
        reserved,
    }))
}

impl BoundForm for Pack {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.linear.bytes() + 4 * self.bias.len() as u64,
            scratch_bytes: 64 * self.reserved as u64,
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
        let x = ports::required(inputs, self.x)?;
        let rows = ports::rows(&x, self.linear.k())?;
        let mut own = Vec::new();
        let x = ports::floats(&x, &mut own)?;
        let mut lease = self.shared.pool.take(self.linear.buffer(rows));
        let [buffer] = lease.split([self.linear.buffer(rows)]);
        let mut parts = Vec::with_capacity(self.siblings.len());
        for (position, output) in outputs.iter_mut().enumerate() {
            let own = self.siblings.iter().find(|s| s.output == position);
            let sibling = own.ok_or_else(|| {
                let text = format!("no sibling for the output at position {position}");
                Failure::invalid("argument", text)
            })?;
            let data = ports::output(std::slice::from_mut(output), 0, rows, sibling.channels)?;
            parts.push((sibling, Out::new(data, sibling.channels)));
        }
        if parts.len() != self.siblings.len() {
            let text = format!(
                "{} outputs for {} siblings",
                parts.len(),
                self.siblings.len()
            );
            return Err(Failure::invalid("argument", text));
        }
        let (isa, bias) = (self.shared.isa, &self.bias);
        let n = self.linear.n();
        self.linear
            .run(&self.shared, x, rows, buffer, |cover, tile| {
                let first = cover.line * LANES;
                let end = (first + cover.lines * LANES).min(n);
                for (r, values) in tile.0.iter_mut().enumerate().take(cover.rows) {
                    if let Some(bias) = bias.get(first..end) {
                        add(isa, values, bias);
                    }
                    for (sibling, out) in &parts {
                        let from = first.max(sibling.first);
                        let to = end.min(sibling.first + sibling.channels);
                        if from < to {
                            // SAFETY: every place of the outputs is in one cover.
                            let out =
                                unsafe { out.row(cover.row + r, from - sibling.first, to - from) };
                            out.copy_from_slice(&values[from - first..to - first]);
                        }
                    }
                }
            });
        Ok(())
    }
}
