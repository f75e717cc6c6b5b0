//! Bias, heads and rotation of a packed projection.

use candle_core::{Tensor, D};

use crate::error::CatalogError;
use crate::reference::Call;

/// Queries and keys are turned by rotate-half, values only get their bias.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let (q_heads, kv_heads, width) = (call.dim("Hq")?, call.dim("Hkv")?, call.dim("D")?);
    let packed = call.input("packed_qkv")?;
    let biased = call.round(&packed.broadcast_add(&call.weight("qkv_bias")?)?)?;
    let (batch, tokens, _) = biased.dims3()?;
    let heads = |first: usize, n: usize| -> Result<Tensor, CatalogError> {
        let part = biased.narrow(D::Minus1, first * width, n * width)?;
        Ok(part.contiguous()?.reshape((batch, tokens, n, width))?)
    };
    // A table of half the width serves both halves of a head.
    let table = |name: &str| -> Result<Tensor, CatalogError> {
        let t = call.input(name)?;
        let whole = match t.dim(D::Minus1)? == width {
            true => t,
            false => Tensor::cat(&[&t, &t], D::Minus1)?,
        };
        Ok(whole.unsqueeze(whole.rank() - 1)?)
    };
    let (cos, sin) = (table("cos")?, table("sin")?);
    let turned = |x: &Tensor| -> Result<Tensor, CatalogError> {
        let half = width / 2;
        let (low, high) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
        let across = Tensor::cat(&[&high.neg()?, &low], 3)?;
        Ok((x.broadcast_mul(&cos)? + across.broadcast_mul(&sin)?)?)
    };
    let (q, k) = (heads(0, q_heads)?, heads(q_heads, kv_heads)?);
    Ok(vec![
        call.output("q_after_rope", &turned(&q)?)?,
        call.output("k_after_rope", &turned(&k)?)?,
        call.output("v", &heads(q_heads + kv_heads, kv_heads)?)?,
    ])
}
