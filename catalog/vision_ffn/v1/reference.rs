//! Plain feed-forward whose layer norm has a factor and a summand.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::formula::{gelu_tanh, layer, product};
use crate::reference::Call;

/// `x + (gelu(n W1^T + b1) W2^T + b2)` with `n = norm(x) w + b`; every step rounded.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let x = call.input("x")?;
    let n = layer(&x, call.number("eps")?)?
        .broadcast_mul(&call.weight("w_norm")?)?
        .broadcast_add(&call.weight("b_norm")?)?;
    let biased = |rows: &Tensor, w: &str, b: &str| -> Result<Tensor, CatalogError> {
        let p = call.round(&product(rows, &call.weight(w)?.t()?)?)?;
        call.round(&p.broadcast_add(&call.weight(b)?)?)
    };
    let h = biased(&call.round(&n)?, "w_fc1", "b_fc1")?;
    let a = call.round(&gelu_tanh(&h)?)?;
    let y = biased(&a, "w_fc2", "b_fc2")?;
    Ok(vec![call.output("x", &(x + y)?)?])
}
