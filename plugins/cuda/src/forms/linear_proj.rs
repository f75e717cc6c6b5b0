//! `linear_proj`: one product, an optional bias, an optional epilogue.

use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::forms::variants;
use structures_plugin_api::sdk::Failure;

use super::projection::Projection;
use super::{Block, Body, Leaf, Port, Site};
use crate::context::Argument;
use crate::format::Format;
use crate::product::{Parts, Rung, Whole};
use crate::weights::Order;

const FORMATS: [Format; 3] = [Format::Bf16, Format::Fp8Static, Format::W8a16Static];

/// See the module.
pub const LEAF: Leaf = Leaf {
    structure: "linear_proj",
    declare,
    bind,
};

fn declare() -> Vec<FormDecl> {
    let one = |format: &Format| {
        let mut decl = format.declare("linear_proj", &["proj"], &["x"], &["K"], &["x"]);
        // `bf16` is the axis' word for "the boundary dtype".
        decl.variants = variants(&[
            ("in_dtype", &["bf16"]),
            ("bias", &["none", "add"]),
            ("epilogue", &["none", "gelu_quant_fp8", "residual_add"]),
        ]);
        decl
    };
    FORMATS.iter().map(one).collect()
}

/// `ProjectionEnd` of `linear_proj.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct End {
    y: u64,
    bias: u64,
    residual: u64,
    scales: u64,
    scale: f32,
    n: u32,
    dtype: u32,
    gelu: u32,
}

// SAFETY: the layout of the kernels' struct.
unsafe impl Argument for End {}

struct LinearProj {
    projection: Projection,
    gelu: bool,
    inputs: Vec<Port>,
    outputs: [Port; 1],
}

fn bind(site: &Site<'_>) -> Result<Box<dyn Body>, Failure> {
    let request = site.request;
    let format = site.format(&FORMATS)?;
    let dims = [request.dim("K")?, request.dim("N")?];
    let weight = request.weight_of_dims("w", &dims)?;
    // Without the axis a bias is added where there is one.
    let without = request.params.variant.get("bias").map(String::as_str) == Some("none");
    let biased = request.weight("b").is_some() && !without;
    let epilogue = request.axis("epilogue")?;
    let parts = Parts {
        name: "linear_proj",
        weights: &[weight],
        order: Order::Behind,
        point: "x",
        rounds: !biased && epilogue == "none",
    };
    let projection = Projection::bind(site, format, &parts)?;
    let weights = &projection.product().weights;
    let (n, k) = (weights.n, weights.k);
    let bias = match biased {
        true => Some(site.floats("b", &[n as usize], 0.0)?),
        false => None,
    };
    let names = &request.params.inputs;
    let mut inputs = vec![site.port(names, "x", k)?];
    if epilogue == "residual_add" {
        inputs.push(site.port(names, "residual", n)?);
    }
    Ok(Box::new(LinearProj {
        gelu: epilogue == "gelu_quant_fp8",
        outputs: [site.port(&request.params.outputs, "y", n)?],
        projection: projection.biased(bias),
        inputs,
    }))
}

impl Body for LinearProj {
    fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    fn ladder(&self) -> &'static [Rung] {
        self.projection.ladder()
    }

    fn weight_bytes(&self) -> u64 {
        self.projection.weight_bytes()
    }

    fn scratch_bytes(&self, rows: u64) -> u64 {
        self.projection.scratch_bytes(rows)
    }

    unsafe fn run(&self, rung: Rung, block: &Block, scratch: u64) -> Result<(), Failure> {
        let p = self.projection.product();
        let end = End {
            y: block.outputs[0],
            bias: self.projection.bias(),
            residual: block.inputs.get(1).copied().unwrap_or(0),
            scales: p.weights.scales(),
            scale: p.end_scale(rung),
            n: p.weights.n,
            dtype: block.dtype,
            gelu: self.gelu.into(),
        };
        let plain = end.bias == 0 && end.residual == 0 && !self.gelu;
        let whole = Whole {
            address: end.y,
            dtype: end.dtype,
        };
        let port = &self.inputs[0];
        // SAFETY: the caller's rows and scratch; the outputs of as many.
        unsafe {
            self.projection
                .run(rung, block, port, scratch, (&end, plain.then_some(whole)))
        }
    }
}
