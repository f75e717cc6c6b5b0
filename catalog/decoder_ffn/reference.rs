//! Gated feed-forward with its norm and residual sum.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::formula::{gelu_tanh, product, rms, silu};
use crate::reference::Call;

/// `x + gate * (act(h Wg) * (h Wu)) Wd` with `h` the normed, modulated row; every step rounded.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let x = call.input("x")?;
    let weight = call.weight("w_norm")?;
    let factor = match call.axis("norm_weight_mode") {
        "offset" => (weight + 1.0)?,
        _ => weight,
    };
    let mut h = rms(&x, call.number("eps")?)?.broadcast_mul(&factor)?;
    if call.axis("conditioning") == "ada_ln" {
        if let Some(scale) = call.optional_input("cond_scale")? {
            h = h.broadcast_mul(&(scale + 1.0)?)?;
        }
        if let Some(shift) = call.optional_input("cond_shift")? {
            h = h.broadcast_add(&shift)?;
        }
    }
    let h = call.round(&h)?;
    let gate = call.round(&product(&h, &call.weight("w_gate")?)?)?;
    let up = call.round(&product(&h, &call.weight("w_up")?)?)?;
    let act = match call.axis("activation") {
        "gelu" => gelu_tanh(&gate)?,
        _ => silu(&gate)?,
    };
    let hidden = call.round(&(call.round(&act)? * up)?)?;
    let mut y = call.round(&product(&hidden, &call.weight("w_down")?)?)?;
    if let Some(gate) = call.optional_input("cond_gate")? {
        y = call.round(&y.broadcast_mul(&gate)?)?;
    }
    Ok(vec![call.output("x", &(x + y)?)?])
}
