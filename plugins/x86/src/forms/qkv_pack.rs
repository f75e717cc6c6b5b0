//! `qkv_pack`: sibling products of one input as one product; a tile is cut where siblings meet.
//!
//! A per-tensor scale is taken over the concatenation, as the structure says.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::projection::Projection;
use super::Leaf;
use crate::elementwise::add;
use crate::format::Format;
use crate::kernels::LANES;
use crate::linear::Out;
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
    product: Projection,
    siblings: Vec<Sibling>,
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
    let mut product = Projection::bind(shared, format, &source, request)?;
    if biased {
        product.bias = bias;
    }
    Ok(Box::new(Pack { product, siblings }))
}

impl BoundForm for Pack {
    fn facts(&self) -> FormFacts {
        self.product.facts()
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let mut own = Vec::new();
        let x = self.product.given(inputs, &mut own)?;
        let mut parts = Vec::with_capacity(self.siblings.len());
        for (position, output) in outputs.iter_mut().enumerate() {
            let own = self.siblings.iter().find(|s| s.output == position);
            let sibling = own.ok_or_else(|| {
                let text = format!("no sibling for the output at position {position}");
                Failure::invalid("argument", text)
            })?;
            let data = ports::output(std::slice::from_mut(output), 0, x.rows, sibling.channels)?;
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
        let (isa, bias) = (self.product.shared.isa, &self.product.bias);
        let n = self.product.linear.n();
        self.product.run(&x, |cover, tile| {
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
