//! `qkv_pack`: sibling products of one input as one product; each sibling rounded once.
//!
//! A quantising format takes one scale over the concatenation, as the structure says.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::linear::Linear;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    formats: &[
        Format::F32,
        Format::Bf16,
        Format::Bf16Pack,
        Format::W8a16Static,
        Format::W4a16Static,
        Format::W8a8Static,
        Format::W8a8Dynamic,
        Format::Fp8Static,
        Format::Nvfp4Balance,
    ],
    packed: true,
    points: &["x"],
    accepts: &["x"],
    scale_groups: &[&["w_*"]],
    // `bf16_fused_quant` is the axis' word for "as it comes"; an input that is already quantised is
    // declared as a wire, not by the axis.
    variants: &[("bind", &["leaf"]), ("in_dtype", &["bf16_fused_quant"])],
    ..Leaf::plain("qkv_pack", &["pack"], bind)
};

struct Sibling {
    /// First channel of the packed product.
    first: usize,
    channels: usize,
    bias: Option<Vec<f32>>,
    /// Position of its output.
    output: usize,
}

struct Pack {
    shared: Shared,
    rows: Rows,
    linear: Linear,
    siblings: Vec<Sibling>,
    x: usize,
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let outputs = &request.params.outputs;
    let mut weights = Vec::new();
    let mut siblings: Vec<Sibling> = Vec::new();
    let mut first = 0;
    while let Some(weight) = request.product_weight(&format!("w_{}", siblings.len()))? {
        let i = siblings.len();
        let ([_, channels], slot) = (weight.dims()?, format!("b_{i}"));
        let bias = match request.weight(&slot) {
            Some(_) => Some(request.weight_of_dims(&slot, &[channels])?.to_f32_vec()?),
            None => None,
        };
        let output = ports::position(outputs, &format!("y_{i}"))?;
        siblings.push(Sibling {
            first,
            channels,
            bias,
            output,
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
    let linear = Linear::bind(&shared.host, format, &weights, request, "x")?;
    let mut pack = Pack {
        shared: shared.clone(),
        rows: Rows::of(request)?.coded(linear.coded()),
        linear,
        siblings,
        x: ports::position(&request.params.inputs, "x")?,
        room: Reservation::default(),
    };
    let floats = pack.buffers(pack.rows.reserved()).iter().sum();
    pack.room = shared.pool.reserve(floats);
    Ok(Box::new(pack))
}

impl Pack {
    /// Sizes of: x, the product, one sibling's y.
    fn buffers(&self, rows: usize) -> [usize; 3] {
        let widest = self.siblings.iter().map(|s| s.channels).max().unwrap_or(0);
        [
            rows * self.linear.k(),
            rows * self.linear.n(),
            rows * widest,
        ]
    }
}

impl BoundForm for Pack {
    fn facts(&self) -> FormFacts {
        let biases: usize = self
            .siblings
            .iter()
            .filter_map(|s| s.bias.as_ref())
            .map(Vec::len)
            .sum();
        FormFacts {
            packed_bytes: self.linear.bytes() + 4 * biases as u64,
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
        let given = ports::input(inputs, Some(self.x));
        let rows = self.rows.admit(given, self.linear.k())?;
        let sizes = self.buffers(rows);
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [x, product, y] = lease.split(sizes);
        if let Some(given) = given {
            given.read_f32(x)?;
        }
        let host = &self.shared.host;
        self.linear.apply(host, x, rows, product);
        for Sibling {
            first,
            channels,
            bias,
            output,
        } in &self.siblings
        {
            let (first, channels) = (*first, *channels);
            let out = self.rows.output(outputs, *output, rows, channels)?;
            let y = &mut y[..rows * channels];
            let product = &product[first * rows..][..rows * channels];
            host.parallel_chunks(y, channels, |row, y| {
                for (channel, y) in y.iter_mut().enumerate() {
                    let bias = bias.as_ref().map_or(0.0, |bias| bias[channel]);
                    *y = product[channel * rows + row] + bias;
                }
            });
            out.write_f32(y)?;
        }
        Ok(())
    }
}
