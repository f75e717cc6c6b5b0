//! Parameters in the packed form of their checkpoint, in published row order.
//!
//! Beside [`CheckpointParams::load`]: the same names, ties, parts and ranges, and nothing is decoded.

use structures_graph::ParamRef;
use structures_plugin_api::formats::BlockFormat;

use crate::checkpoint::PackedWeight;
use crate::params::{CheckpointParams, RowOrder};
use crate::ModelError;

impl CheckpointParams {
    /// The packed format a matrix is stored in, when all its parts are in one. Reads nothing.
    pub fn packed_format(&self, param: &ParamRef) -> Option<BlockFormat> {
        let (spec, _) = self.map.get(&param.path, &param.name)?;
        let mut formats = spec
            .tensors
            .iter()
            .map(|t| self.checkpoint.packed_format(t));
        let first = formats.next()??;
        (spec.dims.len() == 2 && formats.all(|f| f == Some(first))).then_some(first)
    }

    /// A matrix as it is stored; `None` when that is not packed.
    pub fn packed(&self, param: &ParamRef) -> Result<Option<PackedWeight>, ModelError> {
        let found = self.map.get(&param.path, &param.name);
        let (Some(_), Some((spec, _))) = (self.packed_format(param), found) else {
            return Ok(None);
        };
        let mut whole: Option<PackedWeight> = None;
        for tensor in &spec.tensors {
            let Some(part) = self.checkpoint.packed(tensor)? else {
                return Ok(None);
            };
            whole = match whole {
                None => Some(part),
                Some(above) => above.above(&part),
            };
            if whole.is_none() {
                return Ok(None);
            }
        }
        let whole = whole.map(|weight| match spec.rows {
            RowOrder::Published => weight,
            RowOrder::AdjacentPairs { heads } => {
                let head = (weight.n / heads.max(1)).max(1);
                weight.reordered(|row| {
                    let (at, half) = (row % head, (head / 2).max(1));
                    row - at + 2 * (at % half) + at / half
                })
            }
        });
        Ok(match param.rows {
            None => whole,
            Some((from, to)) => whole.and_then(|weight| weight.range(from, to)),
        })
    }
}
