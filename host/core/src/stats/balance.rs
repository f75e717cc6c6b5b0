//! Input-channel balance of a whole weight: the formula is the format's ([`Balance`], in the plugin interface), the
//! choice of amax and the rounding of the result are the calibration's.

pub use structures_plugin_api::formats::Balance;

use super::StatsError;

/// What the scaled weight is rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RoundTo {
    /// Kept.
    #[default]
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

/// A balanced weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Balanced {
    /// `W * s`, `[n, k]` row-major, rounded.
    pub weight: Vec<f32>,
    /// `s`, one a channel.
    pub scale: Vec<f32>,
    /// `1 / s`: what activations are multiplied with.
    pub inverse: Vec<f32>,
}

/// Balances `weight` (`[n, k]` row-major, `k` input channels) by the channels' activation amax, or by the
/// weight's own column maxima where there is none.
///
/// # Errors
/// Lengths that contradict `n` and `k`, no channel, or a clamp that is not a range.
pub fn balance(
    weight: &[f32],
    n: usize,
    k: usize,
    activation: Option<&[f32]>,
    params: &Balance,
    round: RoundTo,
) -> Result<Balanced, StatsError> {
    if k == 0 || Some(weight.len()) != n.checked_mul(k) {
        return Err(wrong(
            "weight",
            format!("[{n}, {k}] values, k above 0"),
            weight.len(),
        ));
    }
    if !params.valid() {
        return Err(wrong(
            "balance",
            "0 < lo <= hi, eps above 0, finite alpha".into(),
            params,
        ));
    }
    let columns;
    let amax = match activation {
        Some(given) if given.len() != k => {
            return Err(wrong(
                "activation amax",
                format!("{k} channels"),
                given.len(),
            ));
        }
        Some(given) => given,
        None => {
            columns = super::channel_amax(weight, k)?;
            columns.as_slice()
        }
    };
    let scale = params.factors(amax);
    let scaled = weight
        .iter()
        .zip(scale.iter().cycle())
        .map(|(w, s)| rounded(w * s, round));
    Ok(Balanced {
        weight: scaled.collect(),
        inverse: scale.iter().map(|s| 1.0 / s).collect(),
        scale,
    })
}

fn rounded(value: f32, round: RoundTo) -> f32 {
    match round {
        RoundTo::F32 => value,
        RoundTo::F16 => half::f16::from_f32(value).to_f32(),
        RoundTo::Bf16 => half::bf16::from_f32(value).to_f32(),
    }
}

fn wrong(what: &str, expected: String, found: impl std::fmt::Debug) -> StatsError {
    StatsError::Shape {
        what: what.into(),
        expected,
        found: format!("{found:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
        let row = |r: &[f32]| {
            r.iter()
                .zip(x)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum()
        };
        w.chunks(k).map(row).collect()
    }

    #[test]
    fn b_111_the_product_is_unchanged() {
        let (n, k) = (5, 33);
        let wave = |i: usize, f: f32| (i as f32 * f).sin() * 2.0;
        let w: Vec<f32> = (0..n * k).map(|i| wave(i, 0.37)).collect();
        let x: Vec<f32> = (0..k).map(|i| wave(i, 0.91)).collect();
        let amax: Vec<f32> = (0..k).map(|i| wave(i, 0.53).abs() * 3.0).collect();
        let b = balance(&w, n, k, Some(&amax), &Balance::default(), RoundTo::F32).unwrap();
        let moved: Vec<f32> = x.iter().zip(&b.inverse).map(|(x, i)| x * i).collect();
        for (a, b) in product(&x, &w, k).iter().zip(product(&moved, &b.weight, k)) {
            assert!((a - b).abs() < 1e-4, "{a} {b}");
        }
    }

    #[test]
    fn b_111_a_zero_channel_and_a_dominant_one_are_clamped() {
        let mut amax = vec![1.0f32; 64];
        (amax[0], amax[1]) = (0.0, 1e6);
        let w = vec![1.0f32; 64];
        let b = balance(&w, 1, 64, Some(&amax), &Balance::default(), RoundTo::F32).unwrap();
        assert_eq!((b.scale[0], b.scale[1]), (0.25, 4.0));
    }

    #[test]
    fn b_111_without_activations_the_weights_columns_decide() {
        let w = [1.0, -4.0, 0.5, 2.0];
        let own = balance(&w, 2, 2, None, &Balance::default(), RoundTo::F32).unwrap();
        let given = balance(
            &w,
            2,
            2,
            Some(&[1.0, 4.0]),
            &Balance::default(),
            RoundTo::F32,
        );
        assert_eq!(own, given.unwrap());
    }

    #[test]
    fn b_111_the_weight_is_rounded_last() {
        let w = [1.001f32, 3.003];
        let b = balance(&w, 1, 2, None, &Balance::default(), RoundTo::Bf16).unwrap();
        assert_eq!(
            b.weight[0],
            half::bf16::from_f32(w[0] * b.scale[0]).to_f32()
        );
        assert_ne!(b.weight[0], w[0] * b.scale[0]);
        let h = balance(&w, 1, 2, None, &Balance::default(), RoundTo::F16).unwrap();
        assert_eq!(h.weight[1], half::f16::from_f32(w[1] * b.scale[1]).to_f32());
    }

    #[test]
    fn b_111_wrong_lengths_and_ranges_are_refused() {
        let p = Balance::default();
        assert!(balance(&[1.0; 6], 2, 4, None, &p, RoundTo::F32).is_err());
        assert!(balance(&[], 2, 0, None, &p, RoundTo::F32).is_err());
        let short = balance(&[1.0; 6], 2, 3, Some(&[1.0; 2]), &p, RoundTo::F32).unwrap_err();
        assert!(short.to_string().contains("3 channels"), "{short}");
        let clamp = Balance {
            clamp: [4.0, 0.25],
            ..p
        };
        assert!(balance(&[1.0; 6], 2, 3, None, &clamp, RoundTo::F32).is_err());
    }
}
