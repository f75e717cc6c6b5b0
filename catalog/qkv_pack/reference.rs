//! Sibling projections, each computed apart.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::formula::product;
use crate::reference::Call;

/// `y_i = x W_i + b_i`, in sibling order.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let x = call.input("x")?;
    let mut outputs = Vec::new();
    let mut i = 0;
    while call.weights.contains_key(&format!("w_{i}")) {
        let mut y = product(&x, &call.weight(&format!("w_{i}"))?)?;
        if let Some(b) = call.optional_weight(&format!("b_{i}"))? {
            y = y.broadcast_add(&b)?;
        }
        outputs.push(call.output(&format!("y_{i}"), &y)?);
        i += 1;
    }
    Ok(outputs)
}
