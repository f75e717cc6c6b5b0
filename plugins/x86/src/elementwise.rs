//! Norm and activations of a call's few rows, in plain f32.

/// `x / sqrt(mean(x^2) + eps)`, times `w` or `1 + w`.
pub fn rms_norm(x: &[f32], weight: &[f32], offset: f32, eps: f32, out: &mut [f32]) {
    let mut lanes = [0f32; 16];
    for chunk in x.chunks(16) {
        for (s, v) in lanes.iter_mut().zip(chunk) {
            *s += v * v;
        }
    }
    let mean = lanes.iter().sum::<f32>() / x.len() as f32;
    let r = 1.0 / (mean + eps).sqrt();
    for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
        *o = v * r * (w + offset);
    }
}

/// The activations this backend has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    Silu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`
    GeluTanh,
}

impl Activation {
    /// By the axis value of a variant.
    pub fn from_axis(value: &str) -> Option<Self> {
        match value {
            "silu" => Some(Activation::Silu),
            "gelu" => Some(Activation::GeluTanh),
            _ => None,
        }
    }

    /// Applied to one value.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                let inner = 0.797_884_6 * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert!((Activation::Silu.apply(1.0) - 0.731_058_6).abs() < 1e-6);
        assert!((Activation::GeluTanh.apply(1.0) - 0.841_192).abs() < 1e-6);
        let mut out = [0.0; 2];
        rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0, 0.0, &mut out);
        assert!((out[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6);
        rms_norm(&[3.0, 4.0], &[0.0, 1.0], 1.0, 0.0, &mut out);
        assert!((out[1] - 8.0 / 12.5f32.sqrt()).abs() < 1e-6);
    }
}
