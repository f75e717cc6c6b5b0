//! `decoder_ffn`: RMS norm with optional modulation, gate and up as one product whose epilogue makes the operand of
//! down, down, optional gating, residual.

use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::forms::{names, variants};
use structures_plugin_api::sdk::Failure;

use super::{is_operand, operand, Block, Body, Leaf, Port, Site};
use crate::context::{Argument, Arguments, Buffer, Grid, Kernel};
use crate::format::Format;
use crate::product::{Parts, Product, Rung, Whole};
use crate::weights::Order;

const FORMATS: [Format; 3] = [Format::Bf16, Format::Fp8Static, Format::W8a16Static];

/// See the module.
pub const LEAF: Leaf = Leaf {
    structure: "decoder_ffn",
    declare,
    bind,
};

fn declare() -> Vec<FormDecl> {
    let one = |format: &Format| {
        let points = ["x_after_norm", "act_after_mul"];
        let mut decl = format.declare(
            "decoder_ffn",
            &["block", "ffn"],
            &points,
            &["D", "F"],
            &["x_after_norm"],
        );
        decl.variants = variants(&[
            ("activation", &["silu", "gelu"]),
            ("norm_weight_mode", &["direct", "offset"]),
            ("conditioning", &["none", "ada_ln"]),
        ]);
        if *format == Format::Fp8Static {
            decl.scale_groups = vec![names(&["w_gate", "w_up"])];
        }
        decl
    };
    FORMATS.iter().map(one).collect()
}

/// `HiddenEnd` of `decoder_ffn.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct HiddenEnd {
    hidden: u64,
    scales: u64,
    scale: f32,
    hidden_scale: f32,
    f: u32,
    kind: u32,
    dtype: u32,
    activation: u32,
}

/// `DownEnd` of `decoder_ffn.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DownEnd {
    y: u64,
    gate: u64,
    residual: u64,
    scales: u64,
    scale: f32,
    n: u32,
    dtype: u32,
}

// SAFETY: the layout of the kernels' struct.
unsafe impl Argument for HiddenEnd {}
// SAFETY: as above.
unsafe impl Argument for DownEnd {}

/// What the span `block` has around the span `ffn`.
struct Norm {
    kernel: Kernel,
    w: Buffer,
    eps: f32,
}

struct Ffn {
    format: Format,
    gate_up: Product,
    down: Product,
    prologue: Kernel,
    norm: Option<Norm>,
    activation: u32,
    inputs: Vec<Port>,
    outputs: [Port; 1],
}

fn bind(site: &Site<'_>) -> Result<Box<dyn Body>, Failure> {
    let request = site.request;
    let format = site.format(&FORMATS)?;
    let (d, f) = (request.dim("D")?, request.dim("F")?);
    let gate = request.weight_of_dims("w_gate", &[d, f])?;
    let pair = [gate, request.weight_of_dims("w_up", &[d, f])?];
    let down = [request.weight_of_dims("w_down", &[f, d])?];
    let activation = match request.axis("activation")? {
        "silu" => 0,
        "gelu" => 1,
        other => {
            let text = format!("activation `{other}`, expected silu or gelu");
            return Err(Failure::refused("format_no_variant", text));
        }
    };
    let gate_up = Parts {
        name: "decoder_ffn_hidden",
        weights: &pair,
        order: Order::ByEights,
        point: "x_after_norm",
        rounds: true,
    };
    let down = Parts {
        name: "decoder_ffn_down",
        weights: &down,
        order: Order::Behind,
        point: "act_after_mul",
        rounds: true,
    };
    let (names, width) = (&request.params.inputs, d as u32);
    let (norm, inputs, output) = match request.span {
        "block" => {
            let offset = match request.axis("norm_weight_mode")? {
                "offset" => 1.0,
                "direct" => 0.0,
                other => {
                    let text = format!("norm_weight_mode `{other}`, expected direct or offset");
                    return Err(Failure::refused("format_no_variant", text));
                }
            };
            let mut inputs = vec![site.port(names, "x", width)?];
            for name in ["cond_scale", "cond_shift", "cond_gate"] {
                // A position past the list is never there.
                let listed = site.port(names, name, width).map(Port::optional);
                inputs.push(listed.unwrap_or(Port {
                    position: usize::MAX,
                    width,
                    optional: true,
                    wired: false,
                }));
            }
            let norm = Norm {
                kernel: site.module.kernel("decoder_ffn_norm", 0)?,
                w: site.floats("w_norm", &[d], offset)?,
                eps: request.number("eps")? as f32,
            };
            (Some(norm), inputs, "out")
        }
        _ => (None, vec![site.port(names, "x_after_norm", width)?], "y"),
    };
    Ok(Box::new(Ffn {
        gate_up: Product::bind(site, format, &gate_up)?,
        down: Product::bind(site, format, &down)?,
        prologue: site.module.kernel("decoder_ffn_operand", 0)?,
        outputs: [site.port(&request.params.outputs, output, width)?],
        format,
        norm,
        activation,
        inputs,
    }))
}

impl Ffn {
    /// Bytes of the operand rows of both products.
    fn parts(&self, rows: u64) -> [u64; 2] {
        [&self.gate_up, &self.down].map(|product| product.operands_bytes(rows))
    }
}

impl Body for Ffn {
    fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    fn ladder(&self) -> &'static [Rung] {
        Rung::ladder(self.format)
    }

    fn weight_bytes(&self) -> u64 {
        let norm = self.norm.as_ref().map_or(0, |norm| norm.w.bytes());
        self.gate_up.weights.bytes() + self.down.weights.bytes() + norm
    }

    fn scratch_bytes(&self, rows: u64) -> u64 {
        let sums = self
            .gate_up
            .sums_bytes(rows)
            .max(self.down.sums_bytes(rows));
        self.parts(rows).iter().sum::<u64>() + sums
    }

    unsafe fn run(&self, rung: Rung, block: &Block, scratch: u64) -> Result<(), Failure> {
        let (gate_up, down) = (&self.gate_up, &self.down);
        let (d, f) = (down.weights.n, down.weights.k);
        let mut x = block.inputs[0];
        let [operands, hiddens] = self.parts(block.rows.into());
        let (to, hidden) = (scratch, scratch + operands);
        let sums = hidden + hiddens;
        let how = (gate_up.kind(), d, gate_up.x_scale);
        // SAFETY: the caller's rows; the scratch has room for both operands of as many.
        unsafe {
            match &self.norm {
                Some(norm) => {
                    let (kernel, w) = (&norm.kernel, norm.w.address());
                    let arguments = Arguments::default();
                    let arguments = arguments
                        .with(&x)
                        .with(&block.dtype)
                        .with(&w)
                        .with(&norm.eps);
                    let arguments = arguments.with(&block.inputs[1]).with(&block.inputs[2]);
                    let arguments = arguments.with(&to).with(&how.0).with(&how.1).with(&how.2);
                    let grid = Grid {
                        blocks: (block.rows, 1),
                        threads: 256,
                        shared: 0,
                    };
                    kernel
                        .context()
                        .launch(block.queue, kernel, grid, arguments)?;
                    x = to;
                }
                None if is_operand(gate_up, &self.inputs[0], block.dtype, x) => {}
                None => {
                    operand(&self.prologue, block, x, to, how)?;
                    x = to;
                }
            }
            let end = HiddenEnd {
                hidden,
                scales: gate_up.weights.scales(),
                scale: gate_up.end_scale(rung),
                hidden_scale: down.x_scale,
                f,
                kind: down.kind(),
                dtype: block.dtype,
                activation: self.activation,
            };
            gate_up.launch(rung, block.queue, (x, sums), block.rows, (&end, None))?;
            let block_span = self.norm.is_some();
            let end = DownEnd {
                y: block.outputs[0],
                gate: if block_span { block.inputs[3] } else { 0 },
                residual: if block_span { block.inputs[0] } else { 0 },
                scales: down.weights.scales(),
                scale: down.end_scale(rung),
                n: d,
                dtype: block.dtype,
            };
            let whole = Whole {
                address: end.y,
                dtype: end.dtype,
            };
            let whole = (!block_span).then_some(whole);
            down.launch(rung, block.queue, (hidden, sums), block.rows, (&end, whole))
        }
    }
}
