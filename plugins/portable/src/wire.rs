//! Wires: an output that leaves as E4M3 codes, an input that comes as them.
//!
//! Both ends are bound with the same `PORT|amax|tensor` and so have the same scale; codes carry none.
//! Rounding is [`f32_to_e4m3_saturating`] of `value / scale`, what a product does to its input when it
//! is bound by itself, so a wired pair computes bit for bit what quantising at the reader would.

use structures_plugin_api::describe::WIRE_FP8_E4M3;
use structures_plugin_api::formats::{f32_to_e4m3_saturating, fp8_scale};
use structures_plugin_api::sdk::{BindRequest, Failure, TensorMut};

/// Whether an input or output of this bind is a wire.
pub fn wired(request: &BindRequest<'_>, port: &str) -> Result<bool, Failure> {
    match request.params.wires.get(port).map(String::as_str) {
        None => Ok(false),
        Some(WIRE_FP8_E4M3) => Ok(true),
        Some(other) => {
            let text = format!("a wire at `{port}` in {other}, expected {WIRE_FP8_E4M3}");
            Err(Failure::refused("wire_format", text))
        }
    }
}

/// How an output leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exit {
    /// In the boundary dtype.
    Boundary,
    /// As E4M3 codes under this scale.
    Codes(f32),
}

impl Exit {
    /// As the request says.
    pub fn of(request: &BindRequest<'_>, port: &str) -> Result<Self, Failure> {
        match wired(request, port)? {
            false => Ok(Exit::Boundary),
            true => Ok(Exit::Codes(fp8_scale(
                request.scalar_statistic(port, "amax")?,
            ))),
        }
    }

    /// Writes all values.
    pub fn write(self, out: &mut TensorMut<'_>, values: &[f32]) -> Result<(), Failure> {
        let Exit::Codes(scale) = self else {
            return out.write_f32(values);
        };
        let codes = out.as_codes_mut()?;
        if codes.len() != values.len() {
            let text = format!("{} codes for {} values", codes.len(), values.len());
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        for (code, value) in codes.iter_mut().zip(values) {
            *code = f32_to_e4m3_saturating(value / scale);
        }
        Ok(())
    }
}
