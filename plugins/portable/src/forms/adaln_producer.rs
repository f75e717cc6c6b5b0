//! `adaln_producer`: the projected conditioning, a norm, the modulation; everything in f32, each
//! output rounded once.
//!
//! The style is `scale, shift, gate` in this order, or only the first two, as axis `parts` says. The conditioning is one row for all, or one for each row or batch row
//! of x.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::pool::Reservation;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Spread, Tensor, TensorMut};

use super::Leaf;
use crate::biased::Biased;
use crate::format::Format;
use crate::norm;
use crate::ports::{self, Rows};
use crate::wire::Exit;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    emits: &["y"],
    variants: &[
        ("norm", &["rms", "layer"]),
        ("parts", &["scale_shift_gate", "scale_shift"]),
        // The axis' word for "the boundary dtype"; nothing is absorbed here, and a wire is declared as
        // one, not by the axis.
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
    norm: Option<Vec<f32>>,
    x: usize,
    y: usize,
    gate: Option<usize>,
    exit: Exit,
}

struct Producer {
    shared: Shared,
    rows: Rows,
    style: Biased,
    fused: Option<Fused>,
    cond: usize,
    /// Position of the style, where that is the output.
    output: Option<usize>,
    room: Reservation<f32>,
}

fn bind(
    shared: &Shared,
    format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let weight = request.required_weight("style_w")?;
    ports::dims::<2>("slot `style_w`", &weight)?;
    let style = Biased::bind(&shared.host, format, weight, "style_b", request, "cond")?;
    let outputs = &request.params.outputs;
    let (fused, output) = match request.span {
        "fused" => (Some(Fused::bind(request, style.n())?), None),
        _ => (None, Some(ports::position(outputs, "style")?)),
    };
    let sent = fused.as_ref().filter(|f| f.exit != Exit::Boundary);
    let mut producer = Producer {
        shared: shared.clone(),
        rows: Rows::of(request)?.sending(sent.map(|f| f.y)),
        style,
        fused,
        cond: ports::position(&request.params.inputs, "cond")?,
        output,
        room: Reservation::default(),
    };
    let rows = producer.rows.reserved();
    let floats = producer.buffers(rows, rows).iter().sum();
    producer.room = shared.pool.reserve(floats);
    Ok(Box::new(producer))
}

impl Fused {
    fn bind(request: &BindRequest<'_>, style: usize) -> Result<Self, Failure> {
        let (inputs, outputs) = (&request.params.inputs, &request.params.outputs);
        let d = request.dim("D")?;
        let gate = ports::optional(outputs, "gate");
        let parts = match request.params.variant.get("parts").map(String::as_str) {
            Some("scale_shift") => 2,
            _ => 3,
        };
        if style != parts * d || (parts == 2 && gate.is_some()) {
            let text = format!(
                "slot `style_w` has width {style}, expected {parts} times D {d} for {outputs:?}"
            );
            return Err(Failure::refused("style_width", text));
        }
        Ok(Fused {
            d,
            layer: match request.axis("norm")? {
                "layer" => true,
                "rms" => false,
                other => {
                    let text = format!("norm `{other}`, expected rms or layer");
                    return Err(Failure::refused("format_no_variant", text));
                }
            },
            eps: request.number("eps")? as f32,
            norm: match request.weight("norm_w") {
                Some(_) => Some(request.weight_of_dims("norm_w", &[d])?.to_f32_vec()?),
                None => None,
            },
            x: ports::position(inputs, "x")?,
            y: ports::position(outputs, "y")?,
            exit: Exit::of(request, "y")?,
            gate,
        })
    }
}

impl Producer {
    /// Sizes of: the conditioning, its product, the style, x, y.
    fn buffers(&self, rows: usize, styles: usize) -> [usize; 5] {
        let wide = self.fused.as_ref().map_or(0, |fused| rows * fused.d);
        let style = styles * self.style.n();
        [styles * self.style.k(), style, style, wide, wide]
    }
}

impl BoundForm for Producer {
    fn facts(&self) -> FormFacts {
        let norm = self.fused.as_ref().and_then(|fused| fused.norm.as_ref());
        FormFacts {
            packed_bytes: self.style.bytes() + 4 * norm.map_or(0, Vec::len) as u64,
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
        let host = &self.shared.host;
        let width = self.style.n();
        let given = ports::required(inputs, self.cond)?;
        let styles = self.rows.admit(Some(given), self.style.k())?;
        let Some(fused) = &self.fused else {
            let output = self.output.unwrap_or(0);
            let out = self.rows.output(outputs, output, styles, width)?;
            let sizes = self.buffers(0, styles);
            let mut lease = self.shared.pool.take(sizes.iter().sum());
            let [cond, product, style, _, _] = lease.split(sizes);
            given.read_f32(cond)?;
            self.style
                .apply(host, cond, product, style, |_, y, b| y + b);
            return out.write_f32(style);
        };
        let d = fused.d;
        let x = ports::required(inputs, fused.x)?;
        let rows = self.rows.admit(Some(x), d)?;
        let spread = Spread::of("the conditioning", &given, 1, &x)?;
        let sizes = self.buffers(rows, styles);
        let mut lease = self.shared.pool.take(sizes.iter().sum());
        let [cond, product, style, buffer, y] = lease.split(sizes);
        given.read_f32(cond)?;
        self.style
            .apply(host, cond, product, style, |_, y, b| y + b);
        let style = &*style;
        let x = ports::floats(&x, buffer)?;
        host.parallel_chunks(y, d, |row, y| {
            let x = &x[row * d..][..d];
            let style = &style[spread.row(row) * width..][..width];
            let (mean, inverse) = match fused.layer {
                true => norm::layer(x, fused.eps),
                false => (0.0, norm::rms(x, fused.eps)),
            };
            for (i, y) in y.iter_mut().enumerate() {
                let mut value = (x[i] - mean) * inverse;
                if let Some(w) = &fused.norm {
                    value *= w[i];
                }
                *y = value * (1.0 + style[i]) + style[d + i];
            }
        });
        let out = self.rows.output(outputs, fused.y, rows, d)?;
        fused.exit.write(out, y)?;
        if let Some(position) = fused.gate {
            let gate = self.rows.output(outputs, position, styles, d)?;
            for row in 0..styles {
                gate.write_row(row, &style[row * width + 2 * d..][..d])?;
            }
        }
        Ok(())
    }
}
