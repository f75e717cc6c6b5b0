//! One product of flattened patches, computed in f32 and rounded once.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::formula::product;
use crate::reference::Call;

/// `x W^T + b`
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let mut y = product(&call.input("x")?, &call.weight("w")?.t()?)?;
    if call.axis("bias") == "add" {
        if let Some(b) = call.optional_weight("b")? {
            y = y.broadcast_add(&b)?;
        }
    }
    Ok(vec![call.output("y", &y)?])
}
