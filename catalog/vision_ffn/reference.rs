//! Plain feed-forward with its layer norm and residual sum.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::formula::{gelu_tanh, layer, product};
use crate::reference::Call;

/// `x + (gelu(n W1^T + b1) W2^T + b2)` with `n` the normed row; every step rounded.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let x = call.input("x")?;
    let mut n = layer(&x, call.number("eps")?)?;
    if call.axis("norm_affine") != "identity" {
        if let Some(w) = call.optional_weight("w_norm")? {
            n = n.broadcast_mul(&w)?;
        }
        if let Some(b) = call.optional_weight("b_norm")? {
            n = n.broadcast_add(&b)?;
        }
    }
    let biased = |rows: &Tensor, w: &str, b: &str| -> Result<Tensor, CatalogError> {
        let p = call.round(&product(rows, &call.weight(w)?.t()?)?)?;
        call.round(&p.broadcast_add(&call.weight(b)?)?)
    };
    let h = biased(&call.round(&n)?, "w_fc1", "b_fc1")?;
    let a = call.round(&gelu_tanh(&h)?)?;
    let y = biased(&a, "w_fc2", "b_fc2")?;
    Ok(vec![call.output("x", &(x + y)?)?])
}
