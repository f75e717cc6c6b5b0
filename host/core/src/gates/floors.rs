//! Floors: bounds that a caller imposes. There is none by default.
//!
//! Whether a bound is a floor or a ceiling is a fact of the metric, looked up in one table; a name outside it
//! is invalid, evidence-only metrics included.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::{GateError, GateRefusal, Metrics, OutputKind};
use crate::stats::number;

/// Which side of a bound is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sense {
    /// At least.
    Floor,
    /// At most.
    Ceiling,
}

/// Every metric that can be bounded.
const TABLE: [(&str, Sense); 7] = [
    ("cosine", Sense::Floor),
    ("top1_agreement", Sense::Floor),
    ("last_position_cosine", Sense::Floor),
    ("max_abs", Sense::Ceiling),
    ("p99_abs", Sense::Ceiling),
    ("relative_l2", Sense::Ceiling),
    ("kl_per_token", Sense::Ceiling),
];

/// Bounds in the caller's order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Floors(IndexMap<String, f64>);

/// The first bound that was not met.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shortfall {
    /// Metric.
    pub metric: String,
    /// Measured.
    #[serde(with = "number")]
    pub value: f64,
    /// Bound.
    #[serde(with = "number")]
    pub bound: f64,
}

impl Shortfall {
    /// As a refusal.
    pub fn refusal(&self) -> GateRefusal {
        let side = match sense(&self.metric) {
            Ok(Sense::Ceiling) => "at most",
            _ => "at least",
        };
        GateRefusal::new(
            "floor_not_met",
            format!(
                "{} is {}, the caller asks for {side} {}",
                self.metric, self.value, self.bound
            ),
        )
    }
}

impl Floors {
    /// From names and bounds.
    ///
    /// # Errors
    /// A name without a bound, a name twice, or a bound that is NaN.
    pub fn new<'a>(bounds: impl IntoIterator<Item = (&'a str, f64)>) -> Result<Self, GateError> {
        let mut floors = IndexMap::new();
        for (name, bound) in bounds {
            sense(name)?;
            if bound.is_nan() {
                return Err(GateError::BadFloor {
                    text: format!("{name}={bound}"),
                });
            }
            if floors.insert(name.to_string(), bound).is_some() {
                return Err(GateError::RepeatedFloor {
                    name: name.to_string(),
                });
            }
        }
        Ok(Self(floors))
    }

    /// From `metric=value` arguments.
    ///
    /// # Errors
    /// Text of another form, and what [`Floors::new`] refuses.
    pub fn parse<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Result<Self, GateError> {
        let mut bounds = Vec::new();
        for text in arguments {
            let parsed = text
                .split_once('=')
                .and_then(|(name, bound)| Some((name.trim(), bound.trim().parse::<f64>().ok()?)))
                .filter(|(_, bound)| bound.is_finite());
            bounds.push(parsed.ok_or_else(|| GateError::BadFloor {
                text: text.to_string(),
            })?);
        }
        Self::new(bounds)
    }

    /// Bounds in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, bound)| (name.as_str(), *bound))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks, before anything runs, that every bound is on a metric of this kind of output.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check_kind(&self, kind: OutputKind) -> Result<(), GateError> {
        self.check_measured(kind.metrics().iter().copied())
    }

    /// The first bound, in the caller's order, that is not met. NaN meets none.
    ///
    /// # Errors
    /// A bound on a metric that was not measured, or that has no sense (from a record).
    pub fn first_shortfall(&self, metrics: &Metrics) -> Result<Option<Shortfall>, GateError> {
        self.check_measured(metrics.0.keys().map(String::as_str))?;
        for (name, bound) in self.iter() {
            let value = metrics.get(name).unwrap_or(f64::NAN);
            let met = match sense(name)? {
                Sense::Floor => value >= bound,
                Sense::Ceiling => value <= bound,
            };
            if !met {
                return Ok(Some(Shortfall {
                    metric: name.to_string(),
                    value,
                    bound,
                }));
            }
        }
        Ok(None)
    }

    fn check_measured<'a>(
        &self,
        measured: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), GateError> {
        match self
            .0
            .keys()
            .find(|name| !measured.clone().any(|m| m == name.as_str()))
        {
            None => Ok(()),
            Some(name) => Err(GateError::Unmeasured {
                name: name.clone(),
                measured: measured.map(String::from).collect(),
            }),
        }
    }
}

fn sense(name: &str) -> Result<Sense, GateError> {
    let row = TABLE.iter().find(|(known, _)| *known == name);
    row.map(|(_, sense)| *sense)
        .ok_or_else(|| GateError::UnknownMetric {
            name: name.to_string(),
            known: TABLE.iter().map(|(known, _)| *known).collect(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(list: &[(&str, f64)]) -> Metrics {
        Metrics(list.iter().map(|(n, v)| ((*n).to_string(), *v)).collect())
    }

    #[test]
    fn b_304_the_first_shortfall_is_named_with_value_and_bound() {
        let m = metrics(&[("cosine", 0.99), ("max_abs", 0.5), ("p99_abs", 0.4)]);
        let met = Floors::new([("cosine", 0.99), ("max_abs", 0.5)]).unwrap();
        assert_eq!(met.first_shortfall(&m), Ok(None));
        let floors = Floors::parse(["cosine=0.9", " p99_abs = 0.1", "max_abs=0.1"]).unwrap();
        let short = floors.first_shortfall(&m).unwrap().unwrap();
        assert_eq!(
            (short.metric.as_str(), short.value, short.bound),
            ("p99_abs", 0.4, 0.1)
        );
        let refusal = short.refusal();
        assert_eq!(refusal.code, "floor_not_met");
        assert_eq!(
            refusal.reason,
            "p99_abs is 0.4, the caller asks for at most 0.1"
        );
        assert!(Floors::default().first_shortfall(&m).unwrap().is_none());
    }

    #[test]
    fn b_304_nan_meets_neither_floor_nor_ceiling() {
        for (name, bound) in [("cosine", -2.0), ("max_abs", f64::INFINITY)] {
            let floors = Floors::new([(name, bound)]).unwrap();
            let short = floors
                .first_shortfall(&metrics(&[(name, f64::NAN)]))
                .unwrap();
            assert!(short.is_some(), "{name}");
        }
    }

    #[test]
    fn b_304_names_outside_the_table_are_invalid() {
        for name in [
            "rel_err",
            "positions",
            "cosine_all_positions",
            "speedup",
            "",
        ] {
            let error = Floors::new([(name, 0.1)]).unwrap_err();
            assert!(matches!(error, GateError::UnknownMetric { .. }), "{name}");
        }
        for text in ["cosine", "cosine=", "cosine=high", "=0.9", "cosine=nan"] {
            assert!(Floors::parse([text]).is_err(), "{text}");
        }
    }

    #[test]
    fn b_304_a_metric_has_one_bound() {
        for twice in [["cosine=0.9", "cosine=0.99"], ["max_abs=1", " max_abs =1"]] {
            let error = Floors::parse(twice).unwrap_err();
            assert_eq!(error.code(), "floor_invalid");
            assert!(error.to_string().contains("twice"), "{error}");
        }
    }

    #[test]
    fn b_304_an_unmeasured_metric_is_invalid_before_anything_runs() {
        let floors = Floors::new([("kl_per_token", 0.1)]).unwrap();
        assert!(floors.check_kind(OutputKind::Distribution).is_ok());
        let error = floors.check_kind(OutputKind::Values).unwrap_err();
        assert!(error.to_string().contains("kl_per_token"), "{error}");
        assert!(floors
            .first_shortfall(&metrics(&[("cosine", 1.0)]))
            .is_err());
    }
}
