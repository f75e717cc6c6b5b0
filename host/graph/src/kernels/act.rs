//! Activations.

use candle_core::Tensor;

use super::read::{dense, map, tensor, Read};
use super::Outcome;

/// The activations of the vocabulary. The three GELUs are three activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are the grammar's
pub enum ActKind {
    Silu,
    GeluTanh,
    GeluExact,
    GeluSigmoid,
    Sigmoid,
    Relu,
    Tanh,
    Softplus,
    Exp,
}

const KINDS: &[(&str, ActKind)] = &[
    ("silu", ActKind::Silu),
    ("gelu_tanh", ActKind::GeluTanh),
    ("gelu_exact", ActKind::GeluExact),
    ("gelu_sigmoid", ActKind::GeluSigmoid),
    ("sigmoid", ActKind::Sigmoid),
    ("relu", ActKind::Relu),
    ("tanh", ActKind::Tanh),
    ("softplus", ActKind::Softplus),
    ("exp", ActKind::Exp),
];

impl ActKind {
    /// The activation of this name.
    pub fn from_name(name: &str) -> Option<ActKind> {
        KINDS.iter().find(|(n, _)| *n == name).map(|(_, k)| *k)
    }

    /// All names, for messages.
    pub fn names() -> Vec<&'static str> {
        KINDS.iter().map(|(n, _)| *n).collect()
    }
}

pub(super) fn act(x: &Tensor, kind: ActKind) -> Outcome<Tensor> {
    let x = dense(x)?;
    let out = match scalar(kind) {
        Some(f) => map(Read::of(&x).all()?, f),
        None => return Ok(x.gelu_erf()?),
    };
    tensor(out, x.dims())
}

/// The activation of one number; candle computes the exact GELU.
pub(super) fn scalar(kind: ActKind) -> Option<fn(f32) -> f32> {
    Some(match kind {
        ActKind::Silu => |v| v / (1.0 + (-v).exp()),
        ActKind::GeluTanh => gelu_tanh,
        ActKind::GeluExact => return None,
        ActKind::GeluSigmoid => |v| v / (1.0 + (-1.702 * v).exp()),
        ActKind::Sigmoid => |v| 1.0 / (1.0 + (-v).exp()),
        ActKind::Relu => |v| if v < 0.0 { 0.0 } else { v },
        ActKind::Tanh => f32::tanh,
        ActKind::Exp => f32::exp,
        ActKind::Softplus => |v| v.max(0.0) + (-v.abs()).exp().ln_1p(),
    })
}

fn gelu_tanh(v: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * v * (1.0 + (SQRT_2_OVER_PI * (v + 0.044_715 * v * v * v)).tanh())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    // Values of the formulas of the table at -1.5, 0 and 2, by a calculator with 12 digits.
    #[test]
    fn known_values() {
        let cases: &[(&str, [f32; 3])] = &[
            ("silu", [-0.273_638_53, 0.0, 1.761_594_2]),
            ("gelu_tanh", [-0.100_428_1, 0.0, 1.954_597_7]),
            ("gelu_exact", [-0.100_210_8, 0.0, 1.954_499_7]),
            ("gelu_sigmoid", [-0.108_337_8, 0.0, 1.935_658_6]),
            ("sigmoid", [0.182_425_52, 0.5, 0.880_797_1]),
            ("relu", [0.0, 0.0, 2.0]),
            ("exp", [0.223_130_16, 1.0, 7.389_056]),
            ("tanh", [-0.905_148_27, 0.0, 0.964_027_6]),
            (
                "softplus",
                [0.201_413_28, std::f32::consts::LN_2, 2.126_928],
            ),
        ];
        let x = Tensor::new(&[-1.5f32, 0.0, 2.0], &Device::Cpu).unwrap();
        assert_eq!(cases.len(), KINDS.len());
        for (name, want) in cases {
            let y = act(&x, ActKind::from_name(name).unwrap()).unwrap();
            for (got, want) in y.to_vec1::<f32>().unwrap().iter().zip(want) {
                assert!((got - want).abs() < 2e-6, "{name}: {got} is not {want}");
            }
        }
    }

    #[test]
    fn extremes_stay_finite_and_nan_stays_nan() {
        let x = Tensor::new(&[-1e4f32, 1e4, f32::NAN], &Device::Cpu).unwrap();
        for (name, kind) in KINDS {
            let y = act(&x, *kind).unwrap().to_vec1::<f32>().unwrap();
            let grows = *kind == ActKind::Exp;
            assert!(
                y[0].is_finite() && (grows || y[1].is_finite()),
                "{name}: {y:?}"
            );
            assert!(y[2].is_nan(), "{name} swallowed a NaN");
        }
    }
}
