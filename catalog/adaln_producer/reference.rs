//! A norm modulated by a projection of its conditioning, computed in f32; row and gate are rounded once.

use candle_core::{Tensor, D};

use crate::error::CatalogError;
use crate::reference::formula::{layer, product, rms};
use crate::reference::Call;

/// `norm(x) w (1 + scale) + shift`, and the gate where the style has one.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let x = call.input("x")?;
    let mut style = product(&call.input("cond")?, &call.weight("style_w")?)?;
    if let Some(b) = call.optional_weight("style_b")? {
        style = style.broadcast_add(&b)?;
    }
    let eps = call.number("eps")?;
    let mut n = match call.axis("norm") {
        "layer" => layer(&x, eps)?,
        _ => rms(&x, eps)?,
    };
    if let Some(w) = call.optional_weight("norm_w")? {
        n = n.broadcast_mul(&w)?;
    }
    let width = x.dim(D::Minus1)?;
    let part = |at: usize| style.narrow(D::Minus1, at * width, width);
    let y = n
        .broadcast_mul(&(part(0)? + 1.0)?)?
        .broadcast_add(&part(1)?)?;
    let mut outputs = vec![call.output("y", &y)?];
    if call.axis("parts") == "scale_shift_gate" {
        outputs.push(call.output("gate", &part(2)?)?);
    }
    Ok(outputs)
}
