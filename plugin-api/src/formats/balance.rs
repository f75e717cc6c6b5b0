//! Input-channel balance: moves range from activations into weights before quantising.
//!
//! `s[k] = clamp((a[k] / mean(a))^alpha, lo, hi)`, `W' = W * s` by input channels and `x' = x / s`, so that
//! `x' W'^T = x W^T`. All in f32, every step rounded once. The mean is summed in thirty-two
//! interleaved parts (four accumulators of eight lanes, added first accumulators, then tail, then
//! lanes): the order is part of the formula, otherwise the last bit depends on who computes it.
//!
//! Here and not with the calibration, because two sides must agree to the last bit: the form that
//! packs `W'`, and the host's bind-parity reference. Which amax is used is the calibration's.

use serde_json::Value;

/// Parameters of the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// Exponent: 0 leaves all as it is, 1 flattens the activations.
    pub alpha: f32,
    /// Smallest and largest factor.
    pub clamp: [f32; 2],
    /// Floor of an activation amax, so that a dead channel has a ratio.
    pub eps: f32,
}

impl Default for Balance {
    fn default() -> Self {
        Self {
            alpha: 0.5,
            clamp: [0.25, 4.0],
            eps: 1e-6,
        }
    }
}

impl Balance {
    /// From a route's parameters `alpha` and `clamp`; what is not given is as by default.
    ///
    /// # Errors
    /// What was expected, of a parameter that is not of its kind or not a range.
    pub fn from_params<'v>(get: impl Fn(&str) -> Option<&'v Value>) -> Result<Self, String> {
        let mut balance = Balance::default();
        if let Some(alpha) = get("alpha") {
            let number = alpha.as_f64();
            balance.alpha = number.ok_or_else(|| wrong("alpha", "a number", alpha))? as f32;
        }
        if let Some(clamp) = get("clamp") {
            let pair = clamp.as_array().filter(|list| list.len() == 2);
            let pair = pair.ok_or_else(|| wrong("clamp", "[lo, hi]", clamp))?;
            for (to, value) in balance.clamp.iter_mut().zip(pair) {
                let number = value.as_f64();
                *to = number.ok_or_else(|| wrong("clamp", "two numbers", clamp))? as f32;
            }
        }
        match balance.valid() {
            true => Ok(balance),
            false => Err(format!(
                "0 < lo <= hi, eps above 0 and a finite alpha, found {balance:?}"
            )),
        }
    }

    /// Whether the clamp is a range of positive factors and the rest makes sense.
    pub fn valid(&self) -> bool {
        let [lo, hi] = self.clamp;
        lo > 0.0 && lo <= hi && hi.is_finite() && self.alpha.is_finite() && self.eps > 0.0
    }

    /// The factor `s` of every input channel, from the channels' amax.
    pub fn factors(&self, amax: &[f32]) -> Vec<f32> {
        let floored: Vec<f32> = amax.iter().map(|a| a.max(self.eps)).collect();
        let mean = sum(&floored) / amax.len() as f32;
        let [lo, hi] = self.clamp;
        floored
            .iter()
            .map(|a| f64::from(a / mean).powf(f64::from(self.alpha)) as f32)
            .map(|s| s.clamp(lo, hi))
            .collect()
    }
}

fn wrong(name: &str, expected: &str, found: &Value) -> String {
    format!("parameter `{name}`: expected {expected}, found {found}")
}

fn sum(values: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut parts = [[0f32; LANES]; 4];
    let whole = values.len() / LANES;
    for (i, group) in values.chunks_exact(LANES).enumerate() {
        // The last, incomplete set of four groups goes to the first accumulator.
        let part = if i < whole / 4 * 4 { i % 4 } else { 0 };
        for (acc, value) in parts[part].iter_mut().zip(group) {
            *acc += value;
        }
    }
    let mut lanes = parts[0];
    for part in &parts[1..] {
        for (lane, value) in lanes.iter_mut().zip(part) {
            *lane += value;
        }
    }
    let tail = values[whole * LANES..].iter().fold(0f32, |a, b| a + b);
    lanes.iter().fold(tail, |a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_sum_is_exact_where_f32_is_and_covers_every_value() {
        for n in [0, 1, 7, 8, 9, 31, 32, 33, 100] {
            let values: Vec<f32> = (1..=n).map(|i| i as f32).collect();
            assert_eq!(sum(&values), (n * (n + 1) / 2) as f32, "{n}");
        }
    }

    #[test]
    fn the_order_of_the_sum_is_the_documented_one() {
        const BIG: f32 = 16_777_216.0; // one more is a tie, and rounds back
        let of = |n: usize, ones: [usize; 2]| {
            let mut values = vec![0f32; n];
            values[0] = BIG;
            ones.iter().for_each(|i| values[*i] = 1.0);
            sum(&values)
        };
        // Different accumulators: each one is lost on its own.
        assert_eq!(of(64, [8, 24]), BIG);
        // The same accumulator: they are added first.
        assert_eq!(of(64, [8, 40]), BIG + 2.0);
        // An incomplete set of four groups goes to the first accumulator.
        assert_eq!(of(48, [8, 40]), BIG);
        // The tail is added before the lanes are.
        assert_eq!(of(10, [8, 9]), BIG + 2.0);
    }

    #[test]
    fn parameters_of_a_route_are_read_and_bad_ones_told() {
        let of = |params: Value| Balance::from_params(|name| params.get(name));
        assert_eq!(of(json!({})), Ok(Balance::default()));
        let given = of(json!({"alpha": 0.8, "clamp": [0.5, 2], "recipe": "x"})).expect("fine");
        assert_eq!((given.alpha, given.clamp), (0.8, [0.5, 2.0]));
        for (params, fact) in [
            (json!({"alpha": "half"}), "alpha"),
            (json!({"clamp": 4}), "[lo, hi]"),
            (json!({"clamp": [1, 2, 3]}), "[lo, hi]"),
            (json!({"clamp": [1, "x"]}), "two numbers"),
            (json!({"clamp": [4, 0.25]}), "lo <= hi"),
            (json!({"clamp": [0, 1]}), "lo <= hi"),
        ] {
            let text = of(params).expect_err("bad");
            assert!(text.contains(fact), "{text}");
        }
    }
}
