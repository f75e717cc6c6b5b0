//! `qkv_pack`: sibling products of one input as one product; each sibling stored to its own output.

use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::forms::variants;
use structures_plugin_api::sdk::Failure;

use super::projection::Projection;
use super::{Block, Body, Leaf, Port, Site};
use crate::context::Argument;
use crate::format::Format;
use crate::product::{Parts, Rung, Whole};
use crate::weights::Order;

const FORMATS: [Format; 4] = [
    Format::Bf16,
    Format::Bf16Pack,
    Format::Fp8Static,
    Format::W8a16Static,
];
/// Siblings of the widest pack.
const MOST: usize = 8;

/// See the module.
pub const LEAF: Leaf = Leaf {
    structure: "qkv_pack",
    declare,
    bind,
};

fn declare() -> Vec<FormDecl> {
    let one = |format: &Format| {
        let mut decl = format.declare("qkv_pack", &["pack"], &["x"], &["K"], &["x"]);
        // `bf16_fused_quant` is the axis' word for "as it comes".
        decl.variants = variants(&[("bind", &["leaf"]), ("in_dtype", &["bf16_fused_quant"])]);
        if *format == Format::Fp8Static {
            decl.scale_groups = vec![vec!["w_*".into()]];
        }
        decl
    };
    FORMATS.iter().map(one).collect()
}

/// `PackEnd` of `qkv_pack.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct End {
    y: [u64; MOST],
    first: [u32; MOST + 1],
    bias: u64,
    scales: u64,
    scale: f32,
    dtype: u32,
}

// SAFETY: the layout of the kernels' struct.
unsafe impl Argument for End {}

struct Pack {
    projection: Projection,
    /// First column of each sibling; those there are not begin at N.
    first: [u32; MOST + 1],
    inputs: [Port; 1],
    outputs: Vec<Port>,
}

fn bind(site: &Site<'_>) -> Result<Box<dyn Body>, Failure> {
    let request = site.request;
    let format = site.format(&FORMATS)?;
    let mut weights = Vec::new();
    let mut biases = Vec::new();
    let mut outputs = Vec::new();
    let mut first = [0; MOST + 1];
    let mut biased = false;
    while let Some(weight) = request.weight(&format!("w_{}", weights.len())) {
        let i = weights.len();
        if i == MOST {
            let text = format!("more than {MOST} siblings");
            return Err(Failure::refused("dims_inconsistent", text));
        }
        let n = weight.cols();
        request.weight_of_dims(&format!("w_{i}"), &[request.dim("K")?, n])?;
        let slot = format!("b_{i}");
        match request.weight(&slot) {
            Some(_) => {
                biased = true;
                biases.extend(request.weight_of_dims(&slot, &[n])?.to_f32_vec()?);
            }
            None => biases.extend(std::iter::repeat_n(0.0, n)),
        }
        let output = format!("y_{i}");
        outputs.push(site.port(&request.params.outputs, &output, n as u32)?);
        first[i + 1] = first[i] + n as u32;
        weights.push(weight);
    }
    let there = weights.len();
    if there != request.params.outputs.len() || there == 0 {
        let text = format!(
            "{there} weights for the outputs {:?}",
            request.params.outputs
        );
        return Err(Failure::refused("weight_missing", text));
    }
    let n = first[there];
    first[there..].fill(n);
    let parts = Parts {
        name: "qkv_pack",
        weights: &weights,
        order: Order::Behind,
        point: "x",
        rounds: !biased,
    };
    let projection = Projection::bind(site, format, &parts)?;
    let k = projection.product().weights.k;
    let bias = match biased {
        true => Some(site.upload(biases.into_iter())?),
        false => None,
    };
    Ok(Box::new(Pack {
        inputs: [site.port(&request.params.inputs, "x", k)?],
        outputs,
        projection: projection.biased(bias),
        first,
    }))
}

impl Body for Pack {
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
        let mut y = [0; MOST];
        y[..block.outputs.len()].copy_from_slice(&block.outputs);
        let end = End {
            y,
            first: self.first,
            bias: self.projection.bias(),
            scales: p.weights.scales(),
            scale: p.end_scale(rung),
            dtype: block.dtype,
        };
        let alone = block.outputs.len() == 1 && end.bias == 0;
        let whole = Whole {
            address: end.y[0],
            dtype: end.dtype,
        };
        let port = &self.inputs[0];
        // SAFETY: the caller's rows and scratch; the outputs of as many.
        unsafe {
            self.projection
                .run(rung, block, port, scratch, (&end, alone.then_some(whole)))
        }
    }
}
