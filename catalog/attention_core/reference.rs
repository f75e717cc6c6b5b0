//! Attention over explicit keys and values.

use candle_core::{Tensor, D};

use crate::error::CatalogError;
use crate::reference::Call;

/// `softmax(scale q k^T + mask) v` with every key head repeated for its group of query heads, in f32.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let q = call.input("q")?;
    let (batch, heads, queries, width) = q.dims4()?;
    let (_, kv_heads, keys, _) = call.input("k")?.dims4()?;
    let spread = |t: Tensor| -> Result<Tensor, CatalogError> {
        let group = heads / kv_heads;
        let wide = t.unsqueeze(2)?;
        let wide = wide.broadcast_as((batch, kv_heads, group, keys, width))?;
        Ok(wide.contiguous()?.reshape((batch, heads, keys, width))?)
    };
    let (k, v) = (spread(call.input("k")?)?, spread(call.input("v")?)?);
    let scale = call.optional_number("scale");
    let scale = scale.unwrap_or((width as f64).powf(-0.5));
    let mut scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? * scale)?;
    if let Some(mask) = call.optional_input("mask")? {
        scores = scores.broadcast_add(&mask)?;
    }
    let hidden = hidden(call, batch, queries, keys)?;
    let scores = scores.broadcast_add(&hidden)?;
    // A row that sees no key has no maximum to subtract, and weighs nothing.
    let highest = scores.max_keepdim(D::Minus1)?.maximum(f64::from(f32::MIN))?;
    let weights = scores.broadcast_sub(&highest)?.exp()?;
    let total = weights.sum_keepdim(D::Minus1)?;
    let total = (&total + total.eq(0f64)?.to_dtype(total.dtype())?)?;
    let out = weights.broadcast_div(&total)?.matmul(&v)?;
    Ok(vec![call.output("out", &out.transpose(1, 2)?.contiguous()?)?])
}

/// What length, causality and window hide: `[B, 1, Sq, Skv]` of 0 and minus infinity.
fn hidden(
    call: &Call<'_>,
    batch: usize,
    queries: usize,
    keys: usize,
) -> Result<Tensor, CatalogError> {
    let lengths: Vec<usize> = match call.optional_input("kv_len")? {
        None => vec![keys],
        Some(n) => {
            let n = n.flatten_all()?.to_vec1::<f32>()?;
            n.into_iter().map(|n| n as usize).collect()
        }
    };
    let (causal, window) = (call.flag("causal"), call.optional_number("window"));
    let mut cells = Vec::with_capacity(batch * queries * keys);
    for b in 0..batch {
        let length = lengths[b % lengths.len()];
        for i in 0..queries {
            // The queries are the last of the valid keys.
            let here = length as f64 - queries as f64 + i as f64;
            for j in 0..keys {
                let at = j as f64;
                let seen = j < length
                    && (!causal || at <= here)
                    && window.is_none_or(|w| at > here - w);
                cells.push(if seen { 0f32 } else { f32::NEG_INFINITY });
            }
        }
    }
    let device = call.input("q")?.device().clone();
    Ok(Tensor::from_vec(cells, (batch, 1, queries, keys), &device)?)
}
