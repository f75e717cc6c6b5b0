//! Bands: how good a result looks. A band warns; it never refuses.

use serde::{Deserialize, Serialize};

use super::{Metrics, OutputKind};
use crate::stats::number;

/// How good a result looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Band {
    /// As good as the host for the purpose.
    Pass,
    /// Worth a look.
    Warn,
    /// Far off.
    Low,
    /// The headline metric was not measured.
    Unknown,
}

impl Band {
    /// Its name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Warn => "warn",
            Self::Low => "low",
            Self::Unknown => "unknown",
        }
    }
}

/// Headline metric, lower edge of `pass`, lower edge of `warn`.
fn edges(kind: OutputKind) -> (&'static str, f64, f64) {
    match kind {
        OutputKind::Values => ("cosine", 0.999, 0.995),
        OutputKind::Distribution => ("top1_agreement", 0.95, 0.85),
    }
}

/// The band of a set of metrics. NaN is `low`.
pub fn band(kind: OutputKind, metrics: &Metrics) -> Band {
    let (headline, pass, warn) = edges(kind);
    match metrics.get(headline) {
        None => Band::Unknown,
        Some(value) if value >= pass => Band::Pass,
        Some(value) if value >= warn => Band::Warn,
        Some(_) => Band::Low,
    }
}

/// What a receipt says beside a band.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BandNote {
    /// The band.
    pub band: Band,
    /// The headline metric.
    pub metric: String,
    /// Its value.
    #[serde(with = "number")]
    pub value: f64,
    /// Lower edge of the next better band, absent at the top.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<f64>,
}

impl BandNote {
    /// Of a set of metrics.
    pub fn new(kind: OutputKind, metrics: &Metrics) -> Self {
        let (headline, pass, warn) = edges(kind);
        let band = band(kind, metrics);
        Self {
            band,
            metric: headline.to_string(),
            value: metrics.get(headline).unwrap_or(f64::NAN),
            next: match band {
                Band::Pass => None,
                Band::Warn => Some(pass),
                Band::Low | Band::Unknown => Some(warn),
            },
        }
    }

    /// The warning of a `low` band: number, metric and how the scales were fitted.
    pub fn warning(&self, unit: &str, calibration: &str) -> Option<String> {
        (self.band == Band::Low).then(|| {
            format!(
                "{unit}: {} is {:.6}, below {} (band low; calibration: {calibration})",
                self.metric,
                self.value,
                self.next.unwrap_or(f64::NAN),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: OutputKind, name: &str, value: f64) -> Band {
        let mut metrics = Metrics::default();
        metrics.0.insert(name.to_string(), value);
        band(kind, &metrics)
    }

    #[test]
    fn b_303_edges_belong_to_the_better_band() {
        let below = |x: f64| f64::from_bits(x.to_bits() - 1);
        for (kind, name, pass, warn) in [
            (OutputKind::Values, "cosine", 0.999, 0.995),
            (OutputKind::Distribution, "top1_agreement", 0.95, 0.85),
        ] {
            assert_eq!(of(kind, name, pass), Band::Pass);
            assert_eq!(of(kind, name, below(pass)), Band::Warn);
            assert_eq!(of(kind, name, warn), Band::Warn);
            assert_eq!(of(kind, name, below(warn)), Band::Low);
            assert_eq!(of(kind, name, f64::NAN), Band::Low);
            assert_eq!(of(kind, "max_abs", 1.0), Band::Unknown);
        }
    }

    #[test]
    fn b_195_a_low_band_warns_with_its_numbers() {
        let mut metrics = Metrics::default();
        metrics.0.insert("cosine".into(), 0.5);
        let note = BandNote::new(OutputKind::Values, &metrics);
        let text = note.warning("ffn", "percentile 99.9 of 6").unwrap();
        for fact in ["ffn", "cosine", "0.5", "0.995", "percentile 99.9 of 6"] {
            assert!(text.contains(fact), "{text}");
        }
        metrics.0.insert("cosine".into(), 0.9999);
        assert!(BandNote::new(OutputKind::Values, &metrics)
            .warning("ffn", "x")
            .is_none());
    }
}
