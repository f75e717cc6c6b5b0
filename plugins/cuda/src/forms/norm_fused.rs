//! `norm_fused`: layer norm with its affine part, in f32, rounded once: to the boundary, or to the codes of a wire.

use structures_plugin_api::describe::{FormDecl, WIRE_FP8_E4M3};
use structures_plugin_api::formats::fp8_scale;
use structures_plugin_api::sdk::Failure;
use structures_plugin_api::DType;

use super::{Block, Body, Leaf, Port, Site};
use crate::context::{Arguments, Buffer, Grid, Kernel};
use crate::kernels;
use crate::product::Rung;

/// See the module.
pub const LEAF: Leaf = Leaf {
    structure: "norm_fused",
    declare,
    bind,
};

fn declare() -> Vec<FormDecl> {
    let mut decl = FormDecl::new("norm_fused", "layer", "none");
    decl.spans = vec!["norm".into()];
    decl.dtypes = vec!["f32".into(), "bf16".into()];
    decl.variants.insert("norm".into(), vec!["layer".into()]);
    decl.wires = vec![format!("emits:y:{WIRE_FP8_E4M3}")];
    decl.archs = kernels::GENERIC.iter().map(|a| (*a).to_string()).collect();
    decl.priority = 20;
    // A call is one launch.
    decl.capture = true;
    vec![decl]
}

struct Norm {
    kernel: Kernel,
    w: Buffer,
    b: Buffer,
    eps: f32,
    /// Of the codes; 1 without a wire.
    scale: f32,
    width: u32,
    inputs: [Port; 1],
    outputs: [Port; 1],
}

fn bind(site: &Site<'_>) -> Result<Box<dyn Body>, Failure> {
    let request = site.request;
    let d = request.dim("D")?;
    if d == 0 || u32::try_from(d).is_err() {
        return Err(Failure::refused(
            "dims_inconsistent",
            format!("rows of width {d}"),
        ));
    }
    let width = d as u32;
    let y = site.port(&request.params.outputs, "y", width)?;
    Ok(Box::new(Norm {
        kernel: site.module.kernel("norm_fused_layer", 0)?,
        w: site.floats("w", &[d], 0.0)?,
        b: site.floats("b", &[d], 0.0)?,
        eps: request.number("eps")? as f32,
        inputs: [site.port(&request.params.inputs, "x", width)?],
        scale: match y.wired {
            true => fp8_scale(request.scalar_statistic("y", "amax")?),
            false => 1.0,
        },
        outputs: [y],
        width,
    }))
}

impl Body for Norm {
    fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    fn ladder(&self) -> &'static [Rung] {
        &[Rung::Plain]
    }

    fn weight_bytes(&self) -> u64 {
        self.w.bytes() + self.b.bytes()
    }

    fn scratch_bytes(&self, _rows: u64) -> u64 {
        0
    }

    unsafe fn run(&self, _rung: Rung, block: &Block, _scratch: u64) -> Result<(), Failure> {
        let (x, y) = (block.inputs[0], block.outputs[0]);
        let y_dtype = match self.outputs[0].wired {
            true => DType::E4m3 as u32,
            false => block.dtype,
        };
        let (w, b) = (self.w.address(), self.b.address());
        let arguments = Arguments::default();
        let arguments = arguments
            .with(&x)
            .with(&block.dtype)
            .with(&w)
            .with(&b)
            .with(&self.eps);
        let arguments = arguments
            .with(&y)
            .with(&y_dtype)
            .with(&self.width)
            .with(&self.scale);
        let grid = Grid {
            blocks: (block.rows, 1),
            threads: 256,
            shared: 0,
        };
        // SAFETY: the kernel's arguments; the caller's rows.
        unsafe {
            self.kernel
                .context()
                .launch(block.queue, &self.kernel, grid, arguments)
        }
    }
}
