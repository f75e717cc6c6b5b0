//! A layer norm over the last dim, in f32, rounded once.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::formula::layer;
use crate::reference::Call;

/// `(x - mean) / sqrt(var + eps) * w + b`, biased variance.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let y = layer(&call.input("x")?, call.number("eps")?)?
        .broadcast_mul(&call.weight("w")?)?
        .broadcast_add(&call.weight("b")?)?;
    Ok(vec![call.output("y", &y)?])
}
