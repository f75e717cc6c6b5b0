//! `adaln_producer`: the projected conditioning, a norm, the modulation.
//!
//! The style is `scale, shift, gate` in this order, or only the first two, as axis `parts` says. The conditioning is
//! one row for all, or one for each row or batch row of x.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Spread, Tensor, TensorMut};

use super::{each_row, facts, Leaf};
use crate::elementwise::{add, layer_norm, rms_norm, scale_by_one_plus};
use crate::format::Format;
use crate::linear::{Linear, Out};
use crate::pool::{plain, Line, Reservation};
use crate::ports;
use crate::source::Source;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    variants: &[
        ("norm", &["rms", "layer"]),
        ("parts", &["scale_shift_gate", "scale_shift"]),
        // The axis' word for "the boundary dtype"; nothing is quantised or absorbed here.
        ("out_dtype", &["bf16"]),
        ("epilogue", &["none"]),
    ],
    ..Leaf::plain("adaln_producer", &["fused", "style"], bind)
};

/// What the span `fused` has beside the style.
struct Fused {
    d: usize,
    layer: bool,
    eps: f32,
    /// Ones where the norm has no weight.
    norm: Vec<f32>,
    /// A bias of zeros for the layer norm.
    zeros: Vec<f32>,
    x: usize,
    y: usize,
    gate: Option<usize>,
}

struct Producer {
    shared: Shared,
    style: Linear,
    bias: Vec<f32>,
    fused: Option<Fused>,
    cond: usize,
    /// Position of the style, where that is the output.
    output: Option<usize>,
    room: Reservation,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let weight = request.required_weight("style_w")?;
    ports::dims::<2>("slot `style_w`", &weight)?;
    let source = Source::concatenated(&[weight])?;
    let style = Linear::bind(shared, format, &source, request, "cond")?;
    let bias = match request.weight("style_b") {
        Some(_) => request
            .weight_of_dims("style_b", &[style.n()])?
            .to_f32_vec()?,
        None => Vec::new(),
    };
    let (fused, output) = match request.span {
        "fused" => (Some(Fused::bind(request, style.n())?), None),
        _ => {
            let style = ports::position(&request.params.outputs, "style")?;
            (None, Some(style))
        }
    };
    let mut producer = Producer {
        shared: shared.clone(),
        style,
        bias,
        fused,
        cond: ports::position(&request.params.inputs, "cond")?,
        output,
        room: Reservation::default(),
    };
    let lines = producer.buffers(ports::reserved(request)).iter().sum();
    producer.room = shared.pool.reserve(lines);
    Ok(Box::new(producer))
}

impl Fused {
    fn bind(request: &BindRequest<'_>, style: usize) -> Result<Self, Failure> {
        let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
        let d = request.dim("D")?;
        let gate = ports::optional(outputs, "gate");
        let parts = match super::axis(request, "parts") {
            Some("scale_shift") => 2,
            _ => 3,
        };
        if d == 0 || style != parts * d || (parts == 2 && gate.is_some()) {
            let text = format!(
                "slot `style_w` has width {style}, expected {parts} times D {d} for {outputs:?}"
            );
            return Err(Failure::refused("style_width", text));
        }
        let norm = match request.weight("norm_w") {
            Some(_) => request.weight_of_dims("norm_w", &[d])?.to_f32_vec()?,
            None => vec![1.0; d],
        };
        Ok(Fused {
            d,
            layer: request.axis("norm")? == "layer",
            eps: request.number("eps")? as f32,
            norm,
            zeros: vec![0.0; d],
            x: ports::position(inputs, "x")?,
            y: ports::position(outputs, "y")?,
            gate,
        })
    }
}

impl Producer {
    /// Lines of: the style, what its product reads.
    fn buffers(&self, styles: usize) -> [usize; 2] {
        [
            Line::of::<f32>(styles * self.style.n()),
            self.style.buffer(styles),
        ]
    }
}

impl BoundForm for Producer {
    fn facts(&self) -> FormFacts {
        let norm = self.fused.as_ref().map_or(0, |fused| 2 * fused.d);
        facts(
            self.style.bytes() + 4 * (norm + self.bias.len()) as u64,
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
        let (shared, isa) = (&self.shared, self.shared.isa);
        let width = self.style.n();
        let mut copy = Vec::new();
        let given = ports::given(inputs, self.cond, self.style.k(), &mut copy)?;
        let (cond, styles) = (given.values, given.rows);
        let sizes = self.buffers(styles);
        let mut lease = shared.pool.take(sizes.iter().sum());
        let [style, buffer] = lease.split(sizes);
        let Some(fused) = &self.fused else {
            let position = self.output.unwrap_or(0);
            let out = Out::new(ports::output(outputs, position, styles, width)?, width);
            self.style
                .run(shared, cond, styles, buffer, out.writer(isa, &self.bias));
            return Ok(());
        };
        let style = &mut plain::<f32>(style)[..styles * width];
        let to = Out::new(style, width);
        self.style
            .run(shared, cond, styles, buffer, to.writer(isa, &self.bias));
        let style = &*style;
        let d = fused.d;
        let mut copy = Vec::new();
        let wide = ports::given(inputs, fused.x, d, &mut copy)?;
        let spread = Spread::of("the conditioning", &given.tensor, 1, &wide.tensor)?;
        let x = wide.values;
        let y = ports::output(outputs, fused.y, wide.rows, d)?;
        each_row(&shared.host, y, d, |row, y| {
            let x = &x[row * d..][..d];
            let style = &style[spread.row(row) * width..][..width];
            match fused.layer {
                true => layer_norm(isa, x, &fused.norm, &fused.zeros, fused.eps, y),
                false => rms_norm(isa, x, &fused.norm, fused.eps, y),
            }
            scale_by_one_plus(isa, y, &style[..d]);
            add(isa, y, &style[d..2 * d]);
        });
        if let Some(position) = fused.gate {
            let gate = ports::output(outputs, position, styles, d)?;
            for (gate, style) in gate.chunks_exact_mut(d).zip(style.chunks_exact(width)) {
                gate.copy_from_slice(&style[2 * d..]);
            }
        }
        Ok(())
    }
}
