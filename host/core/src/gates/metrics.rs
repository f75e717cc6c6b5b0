//! Metrics of a treated output against the host's, in f64 on the stored values.
//!
//! `values`: cosine, max_abs, p99_abs, relative_l2. `distribution` (logits): top1_agreement,
//! last_position_cosine, kl_per_token, max_abs, positions, cosine_all_positions.
//!
//! NaN is never hidden: it propagates into every metric that touches it. Outputs that are equal bit for bit
//! score perfectly whatever they hold, all zeros included, because nothing was changed.

use indexmap::IndexMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{band, Band, GateError, GateRefusal};
use crate::stats::number;

/// What an output is, hence how it is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputKind {
    /// Numbers that are used as numbers.
    Values,
    /// Logits over a vocabulary, one row a position.
    Distribution,
}

impl OutputKind {
    /// By the names of a model's outputs: `logits` present means a distribution.
    pub fn of_outputs<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        if names.into_iter().any(|n| n == "logits") {
            Self::Distribution
        } else {
            Self::Values
        }
    }

    /// By name, for a caller's override.
    ///
    /// # Errors
    /// Another name.
    pub fn parse(name: &str) -> Result<Self, GateError> {
        match name {
            "values" => Ok(Self::Values),
            "distribution" => Ok(Self::Distribution),
            _ => Err(GateError::UnknownKind {
                found: name.to_string(),
            }),
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Values => "values",
            Self::Distribution => "distribution",
        }
    }

    /// Metrics measured for it.
    pub fn metrics(self) -> &'static [&'static str] {
        match self {
            Self::Values => &["cosine", "max_abs", "p99_abs", "relative_l2"],
            Self::Distribution => &[
                "top1_agreement",
                "last_position_cosine",
                "kl_per_token",
                "max_abs",
                "positions",
                "cosine_all_positions",
            ],
        }
    }
}

/// Metric name -> value, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics(pub IndexMap<String, f64>);

impl Metrics {
    /// One metric.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    fn put(&mut self, name: &str, value: f64) {
        self.0.insert(name.to_string(), value);
    }
}

impl Serialize for Metrics {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(
            self.0
                .iter()
                .map(|(name, value)| (name, number::to_json(*value))),
        )
    }
}

impl<'de> Deserialize<'de> for Metrics {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let raw = IndexMap::<String, serde_json::Value>::deserialize(from)?;
        let mut metrics = Self::default();
        for (name, value) in raw {
            let number = number::from_json(&value)
                .ok_or_else(|| serde::de::Error::custom(format!("metric {name} is {value}")))?;
            metrics.put(&name, number);
        }
        Ok(metrics)
    }
}

/// Values of the treated output that are not finite although the host's are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NonFinite {
    /// How many.
    pub count: u64,
    /// Flat index of the first, over everything pushed.
    pub first: u64,
    /// Its value.
    pub value: f32,
}

/// What an output is worth.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// How it was judged.
    pub kind: OutputKind,
    /// All metrics.
    pub metrics: Metrics,
    /// How it looks.
    pub band: Band,
    /// New NaN or infinity.
    pub non_finite: Option<NonFinite>,
}

impl Judgement {
    /// The refusal that comes before any band or floor.
    pub fn refusal(&self) -> Option<GateRefusal> {
        let bad = self.non_finite?;
        Some(GateRefusal::new(
            "non_finite",
            format!(
                "{} value(s) of the treated output are not finite where the host's are; the first is {} at index {}",
                bad.count, bad.value, bad.first
            ),
        ))
    }
}

/// One output against the host's.
///
/// # Errors
/// Shapes that differ, or nothing to compare.
pub fn measure(
    kind: OutputKind,
    got: (&[f32], &[usize]),
    want: (&[f32], &[usize]),
) -> Result<Judgement, GateError> {
    let mut meter = Meter::new(kind);
    meter.push(got, want)?;
    meter.finish()
}

/// Measures several outputs (samples, steps) as one: rows are appended, the last row pushed is the last
/// position.
#[derive(Clone, Debug)]
pub struct Meter {
    kind: OutputKind,
    all: Products,
    max_abs: f64,
    diffs: Vec<f64>,
    rows: u64,
    agreed: u64,
    kl: f64,
    last_cosine: f64,
    seen: u64,
    non_finite: Option<NonFinite>,
}

impl Meter {
    /// Nothing measured yet.
    pub fn new(kind: OutputKind) -> Self {
        Self {
            kind,
            all: Products::new(),
            max_abs: 0.0,
            diffs: Vec::new(),
            rows: 0,
            agreed: 0,
            kl: 0.0,
            last_cosine: 0.0,
            seen: 0,
            non_finite: None,
        }
    }

    /// Takes one output in: data and shape of the treated arm, then the host's. Logits have the vocabulary as
    /// their last dim; all other dims are positions.
    ///
    /// # Errors
    /// Shapes that differ, data that contradicts them, or nothing to compare.
    pub fn push(
        &mut self,
        got: (&[f32], &[usize]),
        want: (&[f32], &[usize]),
    ) -> Result<(), GateError> {
        if got.1 != want.1 {
            return Err(GateError::ShapeMismatch {
                expected: want.1.to_vec(),
                found: got.1.to_vec(),
            });
        }
        for (data, shape) in [got, want] {
            if data.is_empty() || shape.iter().product::<usize>() != data.len() {
                return Err(GateError::Empty {
                    shape: shape.to_vec(),
                    values: data.len(),
                });
            }
        }
        let width = got.1.last().copied().unwrap_or(1);
        self.elements(got.0, want.0);
        if self.kind == OutputKind::Distribution {
            for (got, want) in got.0.chunks(width).zip(want.0.chunks(width)) {
                self.position(got, want);
            }
            let last = got.0.len() - width;
            self.last_cosine = Products::of(&got.0[last..], &want.0[last..]).cosine();
        }
        Ok(())
    }

    /// The metrics and the band.
    ///
    /// # Errors
    /// Nothing was pushed.
    pub fn finish(self) -> Result<Judgement, GateError> {
        if self.seen == 0 {
            return Err(GateError::Empty {
                shape: vec![0],
                values: 0,
            });
        }
        let mut metrics = Metrics::default();
        let exact = self.all.equal;
        let max_abs = if exact { 0.0 } else { self.max_abs };
        match self.kind {
            OutputKind::Values => {
                let relative_l2 = relative_l2(&self.diffs, &self.all);
                metrics.put("cosine", self.all.cosine());
                metrics.put("max_abs", max_abs);
                metrics.put("p99_abs", if exact { 0.0 } else { p99(self.diffs) });
                metrics.put("relative_l2", relative_l2);
            }
            OutputKind::Distribution => {
                let rows = self.rows as f64;
                metrics.put("top1_agreement", self.agreed as f64 / rows);
                metrics.put("last_position_cosine", self.last_cosine);
                metrics.put("kl_per_token", if exact { 0.0 } else { self.kl / rows });
                metrics.put("max_abs", max_abs);
                metrics.put("positions", rows);
                metrics.put("cosine_all_positions", self.all.cosine());
            }
        }
        Ok(Judgement {
            kind: self.kind,
            band: band(self.kind, &metrics),
            metrics,
            non_finite: self.non_finite,
        })
    }

    fn elements(&mut self, got: &[f32], want: &[f32]) {
        for (g, w) in got.iter().zip(want) {
            if !g.is_finite() && w.is_finite() {
                let first = NonFinite {
                    count: 0,
                    first: self.seen,
                    value: *g,
                };
                self.non_finite.get_or_insert(first).count += 1;
            }
            self.all.add(*g, *w);
            let diff = (f64::from(*g) - f64::from(*w)).abs();
            if diff.is_nan() || diff > self.max_abs {
                self.max_abs = diff;
            }
            if self.kind == OutputKind::Values {
                self.diffs.push(diff);
            }
            self.seen += 1;
        }
    }

    fn position(&mut self, got: &[f32], want: &[f32]) {
        self.rows += 1;
        self.agreed += u64::from(argmax(got) == argmax(want));
        let (norm_got, norm_want) = (log_sum_exp(got), log_sum_exp(want));
        let mut kl = 0.0;
        for (g, w) in got.iter().zip(want) {
            let log_got = f64::from(*g) - norm_got;
            let log_want = f64::from(*w) - norm_want;
            kl += log_want.exp() * (log_want - log_got);
        }
        self.kl += kl;
    }
}

/// Sums a cosine is made of, and whether both sides were equal all along.
#[derive(Clone, Copy, Debug)]
struct Products {
    dot: f64,
    got: f64,
    want: f64,
    equal: bool,
}

impl Products {
    fn new() -> Self {
        Self {
            dot: 0.0,
            got: 0.0,
            want: 0.0,
            equal: true,
        }
    }

    fn of(got: &[f32], want: &[f32]) -> Self {
        let mut products = Self::new();
        for (g, w) in got.iter().zip(want) {
            products.add(*g, *w);
        }
        products
    }

    fn add(&mut self, got: f32, want: f32) {
        self.equal &= got == want || got.to_bits() == want.to_bits();
        let (got, want) = (f64::from(got), f64::from(want));
        self.dot += got * want;
        self.got += got * got;
        self.want += want * want;
    }

    /// `dot / (max(|a|, 1e-8) max(|b|, 1e-8))`; 1 for equal sides.
    fn cosine(&self) -> f64 {
        const FLOOR: f64 = 1e-8;
        let norm = |squares: f64| {
            let norm = squares.sqrt();
            if norm < FLOOR {
                FLOOR
            } else {
                norm
            }
        };
        if self.equal {
            1.0
        } else {
            self.dot / (norm(self.got) * norm(self.want))
        }
    }
}

/// Cosine of two vectors in f64, as the metric of values has it: 1 for equal ones, NaN where one is in them.
pub fn cosine(got: &[f32], want: &[f32]) -> f64 {
    Products::of(got, want).cosine()
}

/// The worse of two cosines; a NaN is the worst.
pub fn worse(a: f64, b: f64) -> f64 {
    match b.is_nan() || b < a {
        true => b,
        false => a,
    }
}

/// `|got - want| / |want|`; infinite when only `want` is zero.
fn relative_l2(diffs: &[f64], all: &Products) -> f64 {
    if all.equal {
        return 0.0;
    }
    diffs.iter().map(|d| d * d).sum::<f64>().sqrt() / all.want.sqrt()
}

/// k-th smallest with `k = max(1, floor(0.99 n))`; NaN orders above everything.
fn p99(mut diffs: Vec<f64>) -> f64 {
    let k = ((0.99 * diffs.len() as f64).floor() as usize).max(1);
    let (_, value, _) = diffs.select_nth_unstable_by(k - 1, f64::total_cmp);
    *value
}

/// First index of the largest value; NaN counts as the largest.
fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if row[best].is_nan() {
            break;
        }
        if value.is_nan() || *value > row[best] {
            best = i;
        }
    }
    best
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let max = f64::from(max);
    max + row
        .iter()
        .map(|x| (f64::from(*x) - max).exp())
        .sum::<f64>()
        .ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(got: &[f32], want: &[f32]) -> Judgement {
        let shape = [want.len()];
        measure(OutputKind::Values, (got, &shape), (want, &shape)).unwrap()
    }

    fn logits(got: &[f32], want: &[f32], width: usize) -> Judgement {
        let shape = [want.len() / width, width];
        measure(OutputKind::Distribution, (got, &shape), (want, &shape)).unwrap()
    }

    #[test]
    fn b_301_identical_outputs_are_perfect_whatever_they_hold() {
        for held in [
            [0.0, 0.0, 0.0],
            [1e-12, 0.0, 1.0],
            [f32::NAN, f32::INFINITY, -1.0],
        ] {
            let j = values(&held, &held);
            assert_eq!(j.metrics.get("cosine"), Some(1.0));
            for name in ["max_abs", "p99_abs", "relative_l2"] {
                assert_eq!(j.metrics.get(name), Some(0.0), "{name} of {held:?}");
            }
            assert_eq!(j.band, Band::Pass);
            assert!(j.refusal().is_none());
            let d = logits(&held, &held, 3);
            assert_eq!(d.metrics.get("last_position_cosine"), Some(1.0));
            assert_eq!(d.metrics.get("kl_per_token"), Some(0.0));
        }
    }

    #[test]
    fn b_301_one_zero_side_scores_zero() {
        let j = values(&[0.0, 0.0], &[1.0, 2.0]);
        assert_eq!(j.metrics.get("cosine"), Some(0.0));
        assert_eq!(j.metrics.get("relative_l2"), Some(1.0));
        let j = values(&[1.0, 2.0], &[0.0, 0.0]);
        assert_eq!(j.metrics.get("cosine"), Some(0.0));
        assert_eq!(j.metrics.get("relative_l2"), Some(f64::INFINITY));
        assert_eq!(j.band, Band::Low);
    }

    #[test]
    fn new_nan_or_infinity_is_refused_by_code() {
        let j = values(&[1.0, f32::NAN, f32::INFINITY], &[1.0, 2.0, 3.0]);
        let refusal = j.refusal().unwrap();
        assert_eq!(refusal.code, "non_finite");
        assert!(refusal.reason.contains("2 value(s)"), "{}", refusal.reason);
        assert!(
            refusal.reason.contains("NaN at index 1"),
            "{}",
            refusal.reason
        );
        assert!(j.metrics.get("cosine").unwrap().is_nan());
        // The host had it itself: not new, but the metrics show it.
        let j = values(&[1.0, f32::NAN], &[1.5, f32::NAN]);
        assert!(j.refusal().is_none() && j.metrics.get("max_abs").unwrap().is_nan());
    }

    #[test]
    fn b_301_p99_is_a_rank_not_an_interpolation() {
        let want = vec![0f32; 200];
        let got: Vec<f32> = (1..=200).map(|i| i as f32).collect();
        assert_eq!(values(&got, &want).metrics.get("p99_abs"), Some(198.0));
        assert_eq!(values(&[3.0], &[1.0]).metrics.get("p99_abs"), Some(2.0));
    }

    #[test]
    fn b_302_distributions_are_judged_by_position() {
        let want = [1.0, 0.0, 0.0, 1.0, 2.0, 2.0];
        let got = [1.0, 0.0, 1.0, 0.0, 3.0, 3.0];
        let j = logits(&got, &want, 2);
        assert_eq!(j.metrics.get("top1_agreement"), Some(2.0 / 3.0));
        assert_eq!(j.metrics.get("positions"), Some(3.0));
        // The last row only moved along itself.
        let cosine = j.metrics.get("last_position_cosine").unwrap();
        assert!((cosine - 1.0).abs() < 1e-12);
        let p = 1f64.exp() / (1.0 + 1f64.exp());
        let kl = (2.0 * p - 1.0) / 3.0;
        assert!((j.metrics.get("kl_per_token").unwrap() - kl).abs() < 1e-12);
    }

    #[test]
    fn b_302_ties_take_the_first_index_and_nan_is_the_largest() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(argmax(&[1.0, f32::NAN, 9.0, f32::NAN]), 1);
        assert_eq!(argmax(&[f32::NEG_INFINITY; 2]), 0);
    }

    #[test]
    fn several_pushes_are_one_output() {
        let want = [1.0, 0.5, 0.0, 1.0, 2.0, 1.0];
        let got = [0.9, 0.5, 0.4, 0.3, 2.5, 1.0];
        for kind in [OutputKind::Values, OutputKind::Distribution] {
            let whole = measure(kind, (&got, &[3, 2]), (&want, &[3, 2])).unwrap();
            let mut meter = Meter::new(kind);
            meter
                .push((&got[..2], &[1, 2]), (&want[..2], &[1, 2]))
                .unwrap();
            meter
                .push((&got[2..], &[1, 2, 2]), (&want[2..], &[1, 2, 2]))
                .unwrap();
            assert_eq!(meter.finish().unwrap(), whole);
        }
    }

    #[test]
    fn b_301_shapes_must_be_equal_and_hold_something() {
        let kind = OutputKind::Values;
        let wrong = measure(kind, (&[0.0; 4], &[1, 4]), (&[0.0; 12], &[3, 4])).unwrap_err();
        assert!(wrong.to_string().contains("[3, 4]") && wrong.to_string().contains("[1, 4]"));
        assert!(measure(kind, (&[], &[0]), (&[], &[0])).is_err());
        assert!(measure(kind, (&[1.0], &[2]), (&[1.0, 2.0], &[2])).is_err());
        assert!(Meter::new(kind).finish().is_err());
    }

    #[test]
    fn b_300_the_kind_comes_from_the_outputs_or_by_name() {
        assert_eq!(
            OutputKind::of_outputs(["hidden", "logits"]),
            OutputKind::Distribution
        );
        assert_eq!(OutputKind::of_outputs(["hidden"]), OutputKind::Values);
        assert_eq!(OutputKind::parse("values"), Ok(OutputKind::Values));
        assert!(OutputKind::parse("logits").is_err());
        let j = values(&[1.0, 2.0], &[1.0, 2.5]);
        assert!(j.metrics.0.keys().eq(OutputKind::Values.metrics().iter()));
        let d = logits(&[1.0, 2.0], &[1.0, 2.5], 2);
        assert!(d
            .metrics
            .0
            .keys()
            .eq(OutputKind::Distribution.metrics().iter()));
    }

    #[test]
    fn nan_survives_a_receipt() {
        let j = values(&[1.0, f32::INFINITY], &[1.0, 2.0]);
        let text = serde_json::to_string(&j.metrics).unwrap();
        assert!(text.contains("\"max_abs\":\"inf\""), "{text}");
        let back: Metrics = serde_json::from_str(&text).unwrap();
        assert!(back.get("cosine").unwrap().is_nan());
        assert_eq!(back.get("max_abs"), Some(f64::INFINITY));
    }
}
