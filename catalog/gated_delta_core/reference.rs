//! The gated delta rule, one step after another.

use candle_core::{DType, Tensor, D};

use crate::error::CatalogError;
use crate::reference::Call;

/// Per step: the state decays, what it says for the key is compared with the value, the difference times beta is
/// written under the key, and the query reads it.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let (mut q, mut k) = (call.input("q")?, call.input("k")?);
    let (batch, steps, heads, width) = q.dims4()?;
    if call.axis("qk_norm") == "l2_in_kernel" {
        let eps = call.optional_number("l2_eps").unwrap_or(1e-6);
        (q, k) = (unit(&q, eps)?, unit(&k, eps)?);
    }
    let q = (q * (width as f64).powf(-0.5))?;
    let (v, beta) = (call.input("v")?, call.input("beta")?);
    let decay = call.input("log_decay")?.exp()?;
    let mut state = match call.optional_input("state")? {
        Some(given) => given,
        None => Tensor::zeros((batch, heads, width, width), DType::F32, q.device())?,
    };
    let mut outputs = Vec::new();
    for t in 0..steps {
        // [B,H,D] each, the scalars [B,H,1].
        let at = |of: &Tensor| of.narrow(1, t, 1)?.squeeze(1);
        let (q, k, v) = (at(&q)?, at(&k)?, at(&v)?);
        let beta = at(&beta)?.unsqueeze(D::Minus1)?;
        let decay = at(&decay)?.unsqueeze(D::Minus1)?.unsqueeze(D::Minus1)?;
        state = state.broadcast_mul(&decay)?;
        let column = |of: &Tensor| of.unsqueeze(D::Minus1);
        let known = state.broadcast_mul(&column(&k)?)?.sum(2)?;
        let learned = (v - known)?.broadcast_mul(&beta)?;
        state = (state + column(&k)?.broadcast_mul(&learned.unsqueeze(2)?)?)?;
        let read = state.broadcast_mul(&column(&q)?)?.sum(2)?;
        outputs.push(read.unsqueeze(1)?);
    }
    let out = Tensor::cat(&outputs, 1)?;
    Ok(vec![
        call.output("out", &out)?,
        call.output("final_state", &state)?,
    ])
}

fn unit(x: &Tensor, eps: f64) -> Result<Tensor, CatalogError> {
    let square = x.sqr()?.sum_keepdim(D::Minus1)?;
    Ok(x.broadcast_div(&(square + eps)?.sqrt()?)?)
}
