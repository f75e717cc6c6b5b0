//! `[M, ..]` takes any leading shape: flattened on the way in, restored on the way out.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::solve::ROWS;
use crate::spec::DimExpr;

/// The leading shape that `M` stands for in one call.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    lead: Option<Vec<usize>>,
}

impl Rows {
    /// Reads the leading shape off the input that has most of it.
    pub(crate) fn of<'a>(inputs: impl Iterator<Item = (&'a [DimExpr], &'a Tensor)>) -> Rows {
        let mut lead: Option<Vec<usize>> = None;
        for (dims, t) in inputs {
            if starts_with_rows(dims) && t.rank() > dims.len() {
                let own = &t.dims()[..=t.rank() - dims.len()];
                let more = |l: &Vec<usize>| {
                    (own.len(), own.iter().product::<usize>()) > (l.len(), l.iter().product())
                };
                if lead.as_ref().is_none_or(more) {
                    lead = Some(own.to_vec());
                }
            }
        }
        Rows { lead }
    }

    /// A tensor of the declared rank.
    pub(crate) fn flatten(&self, dims: &[DimExpr], t: &Tensor) -> Result<Tensor, CatalogError> {
        let Some(lead) = &self.lead else {
            return Ok(t.clone());
        };
        if !starts_with_rows(dims) || t.rank() <= dims.len() {
            return Ok(t.clone());
        }
        let split = t.rank() + 1 - dims.len();
        let (own, rest) = t.dims().split_at(split);
        let mut shape = lead.clone();
        shape.extend_from_slice(rest);
        let t = if own == lead.as_slice() {
            t.clone()
        } else {
            t.broadcast_as(shape)?
        };
        let mut flat = vec![lead.iter().product::<usize>()];
        flat.extend_from_slice(&t.dims()[lead.len()..]);
        Ok(t.contiguous()?.reshape(flat)?)
    }

    /// The caller's leading shape.
    pub(crate) fn restore(
        &self,
        dims: Option<&[DimExpr]>,
        t: Tensor,
    ) -> Result<Tensor, CatalogError> {
        let (Some(lead), Some(dims)) = (&self.lead, dims) else {
            return Ok(t);
        };
        let rows: usize = lead.iter().product();
        if !starts_with_rows(dims) || t.rank() != dims.len() || t.dims()[0] != rows {
            return Ok(t);
        }
        let mut shape = lead.clone();
        shape.extend_from_slice(&t.dims()[1..]);
        Ok(t.reshape(shape)?)
    }
}

fn starts_with_rows(dims: &[DimExpr]) -> bool {
    matches!(dims.first(), Some(DimExpr::Symbol(s)) if s == ROWS)
}
