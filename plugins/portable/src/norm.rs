//! The normalisations, on one row: statistics in f32, sums in f64 so that their order does not
//! matter.

/// `1 / sqrt(mean(x^2) + eps)`.
pub fn rms(x: &[f32], eps: f32) -> f32 {
    let mean = squares(x) / x.len() as f64;
    1.0 / (mean as f32 + eps).sqrt()
}

/// `1 / sqrt(sum(x^2) + eps)`.
pub fn l2(x: &[f32], eps: f32) -> f32 {
    1.0 / (squares(x) as f32 + eps).sqrt()
}

/// The mean and `1 / sqrt(var + eps)`, biased variance.
pub fn layer(x: &[f32], eps: f32) -> (f32, f32) {
    let n = x.len() as f64;
    let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let var = x
        .iter()
        .map(|v| (f64::from(*v) - mean).powi(2))
        .sum::<f64>()
        / n;
    (mean as f32, 1.0 / (var as f32 + eps).sqrt())
}

fn squares(x: &[f32]) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_its_formula_and_a_zero_row_is_finite() {
        let x = [3.0, -1.0, 2.0, 4.0];
        assert!((rms(&x, 0.0) - (4.0_f32 / 30.0).sqrt()).abs() < 1e-7);
        assert!((l2(&x, 0.0) - 30.0_f32.sqrt().recip()).abs() < 1e-7);
        let (mean, inverse) = layer(&x, 0.5);
        assert_eq!(mean, 2.0);
        assert!((inverse - 4.0_f32.sqrt().recip()).abs() < 1e-7);
        let zero = [0.0; 4];
        assert_eq!((rms(&zero, 0.25), l2(&zero, 0.25)), (2.0, 2.0));
        assert_eq!(layer(&zero, 0.25), (0.0, 2.0));
    }
}
