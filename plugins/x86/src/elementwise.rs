//! Norms and activations, one row or one tile's row at a time, in f32.

use structures_plugin_api::sdk::Failure;

use crate::isa::vectorised;

/// `e^x`: the nearest power of two times a polynomial of degree 6, within 2 units in the last place. Arguments beyond
/// what f32 holds are taken as the ends of its range, NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it rounds to a whole number, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.3, 88.3);
    let whole = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = whole - ROUND;
    // ln 2 in two parts, so that the remainder is exact enough.
    let r = n.mul_add(-0.693_145_75, x);
    let r = n.mul_add(-1.428_606_8e-6, r);
    let p = 1.388_888_9e-3_f32;
    let p = p.mul_add(r, 8.333_334e-3);
    let p = p.mul_add(r, 4.166_666_8e-2);
    let p = p.mul_add(r, 0.166_666_67);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r, 1.0);
    let p = p.mul_add(r, 1.0);
    let two = f32::from_bits((whole.to_bits().wrapping_add(127)) << 23);
    p * two
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
    pub fn from_axis(value: &str) -> Result<Self, Failure> {
        match value {
            "silu" => Ok(Activation::Silu),
            "gelu" => Ok(Activation::GeluTanh),
            other => {
                let text = format!("activation `{other}`, expected silu or gelu");
                Err(Failure::refused("format_no_variant", text))
            }
        }
    }

    /// Applied to one value.
    #[inline(always)]
    pub fn apply(self, x: f32) -> f32 {
        let z = match self {
            Activation::Silu => x,
            // (1 + tanh z) / 2 = 1 / (1 + e^-2z)
            Activation::GeluTanh => 1.595_769_2 * (0.044_715 * x * x).mul_add(x, x),
        };
        x / (1.0 + exp(-z))
    }
}

vectorised! {
    /// `out = act(gate) * up`.
    pub fn gated(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = act.apply(*g) * u;
        }
    }
}

vectorised! {
    /// `out = act(x)`.
    pub fn activated(act: Activation, x: &[f32], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = act.apply(*x);
        }
    }
}

vectorised! {
    /// `x += y`.
    pub fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

vectorised! {
    /// `x *= y`.
    pub fn scale(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x *= y;
        }
    }
}

vectorised! {
    /// `out = x / sqrt(mean(x^2) + eps) * weight`.
    pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let r = 1.0 / (sum_of_squares(x, 0.0) / x.len() as f32 + eps).sqrt();
        for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
            *o = v * r * w;
        }
    }
}

vectorised! {
    /// Layer norm with the biased variance, and its affine part where there is one.
    pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
        let mean = sum(x) / x.len() as f32;
        let variance = sum_of_squares(x, mean) / x.len() as f32;
        let r = 1.0 / (variance + eps).sqrt();
        for (o, v) in out.iter_mut().zip(x) {
            *o = (v - mean) * r;
        }
        for ((o, w), b) in out.iter_mut().zip(weight).zip(bias) {
            *o = *o * w + b;
        }
    }
}

vectorised! {
    /// `x *= 1 + scale`.
    pub fn scale_by_one_plus(x: &mut [f32], scale: &[f32]) {
        for (x, s) in x.iter_mut().zip(scale) {
            *x *= 1.0 + s;
        }
    }
}

#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    let mut chunks = x.chunks_exact(16);
    for chunk in &mut chunks {
        for (s, v) in lanes.iter_mut().zip(chunk) {
            *s += v;
        }
    }
    lanes.iter().sum::<f32>() + chunks.remainder().iter().sum::<f32>()
}

#[inline(always)]
fn sum_of_squares(x: &[f32], mean: f32) -> f32 {
    let mut lanes = [0f32; 16];
    let mut chunks = x.chunks_exact(16);
    for chunk in &mut chunks {
        for (s, v) in lanes.iter_mut().zip(chunk) {
            *s += (v - mean) * (v - mean);
        }
    }
    let rest = chunks.remainder().iter().map(|v| (v - mean) * (v - mean));
    lanes.iter().sum::<f32>() + rest.sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn exp_is_within_two_units_and_known_at_the_ends() {
        let mut worst = 0.0_f64;
        for i in -8730..8830 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - want) / want).abs());
        }
        assert!(worst < 2.4e-7, "{worst}");
        assert!(exp(f32::NAN).is_nan() && exp(f32::NEG_INFINITY) < 2e-38);
        assert!(exp(1e9).is_finite() && exp(0.0) == 1.0);
    }

    #[test]
    fn activations_are_their_definitions() {
        for i in -400..400 {
            let x = f64::from(i) / 20.0;
            let silu = x / (1.0 + (-x).exp());
            let gelu = 0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044_715 * x.powi(3))).tanh());
            for (act, want) in [(Activation::Silu, silu), (Activation::GeluTanh, gelu)] {
                let got = f64::from(act.apply(x as f32));
                assert!(
                    (got - want).abs() < 1e-6 * want.abs().max(1.0),
                    "{act:?} {x}: {got}"
                );
            }
        }
    }

    #[test]
    fn norms_have_known_values() {
        for isa in Isa::here() {
            let mut out = [0.0; 2];
            rms_norm(isa, &[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
            assert!((out[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6);
            assert!((out[1] - 8.0 / 12.5f32.sqrt()).abs() < 1e-6);
            let x: Vec<f32> = (0..37).map(|i| i as f32 + 100.0).collect();
            let mut out = vec![0.0; 37];
            layer_norm(isa, &x, &[2.0; 37], &[1.0; 37], 0.0, &mut out);
            let sigma = ((37.0 * 37.0 - 1.0) / 12.0f32).sqrt();
            assert!((out[0] - (1.0 - 36.0 / sigma)).abs() < 1e-5, "{}", out[0]);
            layer_norm(isa, &x, &[], &[], 0.0, &mut out);
            assert!((out[36] - 18.0 / sigma).abs() < 1e-5);
        }
    }
}
