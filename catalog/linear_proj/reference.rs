//! One projection with its epilogue, computed in f32 and rounded once.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::formula::{gelu_tanh, product};
use crate::reference::Call;

/// `epilogue(x W + b)`
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let mut y = product(&call.input("x")?, &call.weight("w")?)?;
    if call.axis("bias") == "add" {
        if let Some(b) = call.optional_weight("b")? {
            y = y.broadcast_add(&b)?;
        }
    }
    y = match call.axis("epilogue") {
        "gelu_quant_fp8" => gelu_tanh(&y)?,
        "residual_add" => y.broadcast_add(&call.input("residual")?)?,
        _ => y,
    };
    Ok(vec![call.output("y", &y)?])
}
