//! The dtype of a form's inputs and outputs, and where values are rounded to it.
//!
//! Everything is computed in f32. On a bf16 boundary a value is rounded where the structure says
//! so, and only there.

use structures_plugin_api::formats::round_bf16;
use structures_plugin_api::sdk::{BindRequest, Failure};
use structures_plugin_api::DType;

/// Boundary dtypes this backend accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// Nothing is rounded.
    F32,
    /// Rounded to nearest even.
    Bf16,
}

impl Boundary {
    /// Names for the declarations.
    pub const NAMES: [&'static str; 2] = ["f32", "bf16"];

    /// That of the contract.
    pub fn of(request: &BindRequest<'_>) -> Result<Self, Failure> {
        match request.boundary()? {
            DType::F32 => Ok(Boundary::F32),
            DType::Bf16 => Ok(Boundary::Bf16),
            other => Err(Failure::refused("boundary_dtype", other.name())),
        }
    }

    /// The type of its views.
    pub fn dtype(self) -> DType {
        match self {
            Boundary::F32 => DType::F32,
            Boundary::Bf16 => DType::Bf16,
        }
    }

    /// Rounds one value.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Boundary::F32 => value,
            Boundary::Bf16 => round_bf16(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_plugin_api::abi::Contract;
    use structures_plugin_api::describe::BindParams;

    #[test]
    fn only_declared_dtypes_are_accepted() {
        let of = |dtype: DType| {
            let contract = Contract::capacity(dtype, 1);
            Boundary::of(&BindRequest::new(
                "f32",
                "s",
                BindParams::default(),
                &contract,
            ))
        };
        for name in Boundary::NAMES {
            let dtype = [DType::F32, DType::Bf16]
                .into_iter()
                .find(|d| d.name() == name);
            let dtype = dtype.expect("a known name");
            assert_eq!(of(dtype).expect("accepted").dtype(), dtype);
        }
        assert_eq!(
            of(DType::F16).expect_err("not declared").code,
            "boundary_dtype"
        );
    }

    #[test]
    fn bf16_rounds_and_f32_does_not() {
        let value = 1.0 + 1.0 / 1024.0;
        assert_eq!(
            (Boundary::F32.round(value), Boundary::Bf16.round(value)),
            (value, 1.0)
        );
    }
}
