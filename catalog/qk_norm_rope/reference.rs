//! Norm and rotation of queries and keys.

use candle_core::{Tensor, D};

use crate::error::CatalogError;
use crate::reference::formula::rms;
use crate::reference::Call;

/// Everything in f32, rounded once; the value is handed through.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    Ok(vec![
        call.output("q_after_rope", &one(call, "q", "q_norm_weight")?)?,
        call.output("k_after_rope", &one(call, "k", "k_norm_weight")?)?,
        call.output("v", &call.input("v")?)?,
    ])
}

fn one(call: &Call<'_>, name: &str, slot: &str) -> Result<Tensor, CatalogError> {
    let x = call.input(name)?;
    let (batch, tokens, heads, width) = x.dims4()?;
    let weight = call.weight(slot)?;
    let factor = match call.axis("norm_weight_mode") {
        "offset" => (weight + 1.0)?,
        _ => weight,
    };
    let eps = call.number("eps")?;
    let n = match call.axis("normalization_scope") {
        "projection" => {
            let flat = x.contiguous()?.reshape((batch, tokens, heads * width))?;
            rms(&flat, eps)?.broadcast_mul(&factor)?.reshape(x.dims())?
        }
        _ => rms(&x, eps)?.broadcast_mul(&factor)?,
    };
    let rotary = match call.optional_number("rotary_dim") {
        Some(r) => r as usize,
        None => width,
    };
    let table = |name: &str| -> Result<Tensor, CatalogError> {
        let t = call.input(name)?;
        let wide = match call.axis("rope_layout") {
            // Every entry twice in a row.
            "interleaved" => {
                let (pairs, mut dims) = (t.unsqueeze(D::Minus1)?, t.dims().to_vec());
                if let Some(last) = dims.last_mut() {
                    *last = rotary;
                }
                Tensor::cat(&[&pairs, &pairs], D::Minus1)?.reshape(dims)?
            }
            _ => Tensor::cat(&[&t, &t], D::Minus1)?,
        };
        Ok(wide.unsqueeze(wide.rank() - 1)?)
    };
    let head = n.narrow(3, 0, rotary)?;
    let across = match call.axis("rope_layout") {
        "interleaved" => {
            let pairs = head.contiguous()?.reshape((batch, tokens, heads, rotary / 2, 2))?;
            let (even, odd) = (pairs.narrow(4, 0, 1)?, pairs.narrow(4, 1, 1)?);
            Tensor::cat(&[&odd.neg()?, &even], 4)?.reshape(head.dims())?
        }
        _ => {
            let half = rotary / 2;
            let (low, high) = (head.narrow(3, 0, half)?, head.narrow(3, half, half)?);
            Tensor::cat(&[&high.neg()?, &low], 3)?
        }
    };
    let (cos, sin) = (table("cos")?, table("sin")?);
    let turned = (head.broadcast_mul(&cos)? + across.broadcast_mul(&sin)?)?;
    if rotary == width {
        return Ok(turned);
    }
    Ok(Tensor::cat(&[&turned, &n.narrow(3, rotary, width - rotary)?], 3)?)
}
