//! The activations, as `dataflow` defines them.

use structures_plugin_api::sdk::Failure;

/// A pointwise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

impl Activation {
    /// By the value of a structure's `activation` axis.
    pub fn from_axis(value: &str) -> Result<Self, Failure> {
        match value {
            "silu" => Ok(Activation::Silu),
            "gelu" => Ok(Activation::GeluTanh),
            other => Err(Failure::refused(
                "format_no_variant",
                format!("activation `{other}`, expected silu or gelu"),
            )),
        }
    }

    /// Its value.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_limits() {
        for (kind, at_one) in [
            (Activation::Silu, 0.731_058_6),
            (Activation::GeluTanh, 0.841_192),
        ] {
            assert!(
                (kind.apply(1.0) - at_one).abs() < 1e-6,
                "{kind:?} {}",
                kind.apply(1.0)
            );
            assert_eq!((kind.apply(0.0), kind.apply(100.0)), (0.0, 100.0));
            assert!(kind.apply(-100.0).abs() < 1e-6 && kind.apply(f32::NAN).is_nan());
        }
        assert_eq!(Activation::from_axis("gelu"), Ok(Activation::GeluTanh));
        assert_eq!(
            Activation::from_axis("relu").expect_err("foreign").code,
            "format_no_variant"
        );
    }
}
