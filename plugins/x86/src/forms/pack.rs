//! `qkv_pack`: sibling products of one input in one parallel region.

use std::collections::BTreeMap;

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::describe::FormDecl;
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Host, Tensor, TensorMut};

use super::{rows_of, w8a16};
use crate::isa::Isa;
use crate::packed::Packed;
use crate::product;
use crate::region::Tiles;
use crate::rows::Rows;

pub fn declare() -> FormDecl {
    FormDecl {
        variants: BTreeMap::from([("bind".to_string(), vec!["leaf".to_string()])]),
        ..w8a16("qkv_pack", &["pack"])
    }
}

struct Sibling {
    packed: Packed,
    bias: Option<Vec<f32>>,
    first_block: usize,
}

struct Pack {
    host: Host,
    isa: Isa,
    siblings: Vec<Sibling>,
    k: usize,
    blocks: usize,
    bytes: u64,
    rows: Rows,
    tiles: Tiles,
}

pub fn bind(
    host: &Host,
    isa: Isa,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let mut siblings: Vec<Sibling> = Vec::new();
    let mut blocks = 0;
    for i in 0.. {
        let Some(weight) = request.weight(&format!("w_{i}")) else {
            break;
        };
        let packed = Packed::pack(isa, &weight)?;
        let slot = format!("b_{i}");
        let bias = match request.weight(&slot) {
            Some(_) => Some(request.weight_of_dims(&slot, &[packed.n])?.to_f32_vec()?),
            None => None,
        };
        let first_block = blocks;
        blocks += packed.blocks();
        siblings.push(Sibling {
            packed,
            bias,
            first_block,
        });
    }
    if siblings.len() != request.params.outputs.len() {
        let text = format!(
            "{} weights for the outputs {:?}",
            siblings.len(),
            request.params.outputs
        );
        return Err(Failure::refused("weight_missing", text));
    }
    let Some(k) = siblings.first().map(|s| s.packed.k) else {
        return Err(Failure::refused(
            "weight_missing",
            "slot `w_0` has no weight",
        ));
    };
    if let Some(other) = siblings.iter().find(|s| s.packed.k != k) {
        let text = format!("siblings read {k} and {} inputs", other.packed.k);
        return Err(Failure::refused("dims_inconsistent", text));
    }
    let bytes = siblings.iter().map(|s| s.packed.bytes()).sum();
    let (rows, tiles) = (Rows::new(k), Tiles::new(blocks));
    Ok(Box::new(Pack {
        host: *host,
        isa,
        siblings,
        k,
        blocks,
        bytes,
        rows,
        tiles,
    }))
}

impl BoundForm for Pack {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: self.bytes,
            scratch_bytes: self.rows.bytes() + self.tiles.bytes(),
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
        let x = inputs
            .first()
            .ok_or_else(|| Failure::invalid("argument", "no input"))?;
        let n_rows = rows_of(x, self.k)?;
        if outputs.len() != self.siblings.len() {
            let text = format!(
                "{} outputs for {} siblings",
                outputs.len(),
                self.siblings.len()
            );
            return Err(Failure::invalid("argument", text));
        }
        for (row, values) in x.as_f32()?.chunks_exact(self.k).enumerate() {
            self.rows.row_mut(row).copy_from_slice(values);
        }
        self.rows.prepare(self.isa, n_rows);
        let (isa, siblings, rows) = (self.isa, &self.siblings, &self.rows);
        self.tiles
            .fill(&self.host, self.blocks, n_rows, self.bytes, |b, tile| {
                let sibling = siblings.iter().rev().find(|s| s.first_block <= b);
                if let Some(s) = sibling {
                    product::block(isa, &s.packed, b - s.first_block, rows, tile);
                }
            });
        for (sibling, out) in self.siblings.iter().zip(outputs) {
            let n = sibling.packed.n;
            let out = out.as_f32_mut()?;
            if out.len() != n_rows * n {
                let text = format!("output of {} elements for {n_rows} rows of {n}", out.len());
                return Err(Failure::invalid("argument", text));
            }
            for (row, out) in out.chunks_exact_mut(n).enumerate() {
                self.tiles.copy_row(sibling.first_block, row, out);
                if let Some(bias) = &sibling.bias {
                    out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
                }
            }
        }
        Ok(())
    }
}
