//! Scales that stand far above the rest of the same calibration.
//!
//! One point whose scale is twenty times the median leaves its typical values a handful of FP8 codes. That is
//! often a true outlier channel and sometimes a broken sample; either way somebody should look, so it is
//! reported, once, and decides nothing here.

use serde::{Deserialize, Serialize};

use super::{median, number};

/// Times the median above which a scale is reported. A healthy model spreads by 30x from smallest to largest
/// without one entry leaving its own median that far.
pub const CEILING_RATIO: f64 = 20.0;

/// One entry above the ceiling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offender {
    /// Point, or `[i]` of an unnamed list.
    pub name: String,
    /// Its scale.
    #[serde(with = "number")]
    pub value: f64,
}

/// What was compared and what stood out.
#[derive(Clone, Debug, PartialEq)]
pub struct Ceiling {
    /// Median of all entries, `None` when there is none.
    pub median: Option<f64>,
    /// Factor used.
    pub ratio: f64,
    /// Entries strictly above `ratio * median`, in input order.
    pub offenders: Vec<Offender>,
}

/// Finds the entries strictly above `ratio` times the median. None when the median is not positive.
pub fn scale_ceiling<'a>(scales: impl IntoIterator<Item = (&'a str, f64)>, ratio: f64) -> Ceiling {
    let entries: Vec<(&str, f64)> = scales.into_iter().collect();
    let values: Vec<f64> = entries.iter().map(|(_, value)| *value).collect();
    let median = median(&values);
    let offenders = match median {
        Some(m) if m > 0.0 => entries
            .iter()
            .filter(|(_, value)| *value > ratio * m)
            .map(|(name, value)| Offender {
                name: (*name).to_string(),
                value: *value,
            })
            .collect(),
        _ => Vec::new(),
    };
    Ceiling {
        median,
        ratio,
        offenders,
    }
}

impl Ceiling {
    /// The one warning: label, count, median, the five largest. `None` when nothing stood out.
    pub fn warning(&self, label: &str) -> Option<String> {
        if self.offenders.is_empty() {
            return None;
        }
        let mut top: Vec<&Offender> = self.offenders.iter().collect();
        top.sort_by(|a, b| b.value.total_cmp(&a.value));
        let list: Vec<String> = top
            .iter()
            .take(5)
            .map(|o| format!("{} = {:.6}", o.name, o.value))
            .collect();
        Some(format!(
            "{label}: {} scale(s) above {} times the median {:.6}: {}{}",
            self.offenders.len(),
            self.ratio,
            self.median.unwrap_or(0.0),
            list.join(", "),
            if top.len() > 5 { ", ..." } else { "" }
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(entries: &[(&str, f64)], ratio: f64) -> Vec<String> {
        let found = scale_ceiling(entries.iter().copied(), ratio);
        found.offenders.into_iter().map(|o| o.name).collect()
    }

    #[test]
    fn b_060_strictly_above_and_in_input_order() {
        let base = [
            ("z", 100.0),
            ("a", 1.0),
            ("b", 1.0),
            ("m", 20.000000000000004),
            ("c", 1.0),
        ];
        assert_eq!(names(&base, CEILING_RATIO), ["z", "m"]);
        assert!(names(&[("a", 1.0), ("b", 1.0), ("c", 20.0)], CEILING_RATIO).is_empty());
    }

    #[test]
    fn b_060_a_healthy_spread_stays_quiet() {
        let entries: Vec<(String, f64)> = (0..31)
            .map(|i| (format!("p{i}"), 0.01 * f64::from(i + 1)))
            .collect();
        let found = scale_ceiling(entries.iter().map(|(n, v)| (n.as_str(), *v)), CEILING_RATIO);
        assert!(found.offenders.is_empty() && found.warning("demo").is_none());
    }

    #[test]
    fn b_060_no_median_no_offender() {
        assert!(names(&[("a", 0.0), ("b", 0.0), ("c", 5.0)], 20.0).is_empty());
        assert!(names(&[], 20.0).is_empty());
        assert!(names(&[("a", f64::NAN), ("b", 5.0)], 20.0).is_empty());
    }

    #[test]
    fn b_060_the_warning_names_the_five_largest() {
        let mut entries = vec![("low", 1.0); 13];
        entries.extend([
            ("a", 30.0),
            ("b", 31.0),
            ("c", 32.0),
            ("d", 33.0),
            ("e", 34.0),
            ("f", 35.0),
        ]);
        let text = scale_ceiling(entries, 20.0).warning("activations").unwrap();
        for fact in [
            "activations",
            "6 scale(s)",
            "median 1.0",
            "f = 35",
            "b = 31",
            ", ...",
        ] {
            assert!(text.contains(fact), "{text}");
        }
        assert!(!text.contains("a = 30"), "{text}");
    }
}
