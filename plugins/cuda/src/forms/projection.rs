//! What the structures of one product have in common: its operand rows and sums in the scratch, its bias.

use structures_plugin_api::sdk::Failure;

use super::{is_operand, operand, Block, Port, Site};
use crate::context::{Argument, Buffer, Kernel};
use crate::format::Format;
use crate::product::{Parts, Product, Rung, Whole};

/// A product of boundary rows, bound.
pub struct Projection {
    format: Format,
    product: Product,
    prologue: Kernel,
    bias: Option<Buffer>,
}

impl Projection {
    /// Packs the weights; a bias is added afterwards. The prologue is the kernel `{name}_operand`.
    pub fn bind(site: &Site<'_>, format: Format, parts: &Parts<'_, '_>) -> Result<Self, Failure> {
        Ok(Projection {
            prologue: site.module.kernel(&format!("{}_operand", parts.name), 0)?,
            product: Product::bind(site, format, parts)?,
            bias: None,
            format,
        })
    }

    /// The same with a bias, where there is one.
    pub fn biased(self, bias: Option<Buffer>) -> Self {
        Projection { bias, ..self }
    }

    /// The product.
    pub fn product(&self) -> &Product {
        &self.product
    }

    /// Address of the bias; 0 without one.
    pub fn bias(&self) -> u64 {
        self.bias.as_ref().map_or(0, Buffer::address)
    }

    /// As [`super::Body::ladder`].
    pub fn ladder(&self) -> &'static [Rung] {
        Rung::ladder(self.format)
    }

    /// As [`super::Body::weight_bytes`].
    pub fn weight_bytes(&self) -> u64 {
        self.product.weights.bytes() + self.bias.as_ref().map_or(0, Buffer::bytes)
    }

    /// As [`super::Body::scratch_bytes`].
    pub fn scratch_bytes(&self, rows: u64) -> u64 {
        self.product.operands_bytes(rows) + self.product.sums_bytes(rows)
    }

    /// Launches it on the block's first input, which comes through `port`.
    ///
    /// # Safety
    /// As [`super::Body::run`]; every address in `end` covers what the epilogue reaches for the block's rows.
    pub unsafe fn run<E: Argument>(
        &self,
        rung: Rung,
        block: &Block,
        port: &Port,
        scratch: u64,
        end: (&E, Option<Whole>),
    ) -> Result<(), Failure> {
        let p = &self.product;
        let mut x = block.inputs[0];
        let sums = scratch + p.operands_bytes(block.rows.into());
        // SAFETY: the caller's rows; the scratch has as many operand rows.
        unsafe {
            if !is_operand(p, port, block.dtype, x) {
                let how = (p.kind(), p.weights.k, p.x_scale);
                operand(&self.prologue, block, x, scratch, how)?;
                x = scratch;
            }
            p.launch(rung, block.queue, (x, sums), block.rows, end)
        }
    }
}
