//! From a scheme to what calibration must measure, checked before any work is done.

use std::collections::BTreeSet;

use super::{Decision, Form, Scheme, SchemeError, Seam, Want};
use crate::stats::{Statistic, Wants};

/// What to measure, `path|point` -> statistics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// For the collector.
    pub wants: Wants,
    scheme: String,
}

/// Key of a point in calibration and receipts.
fn key(seam: &Seam, point: &str) -> String {
    format!("{}|{point}", seam.key)
}

/// Asks the scheme about every consulted seam.
///
/// # Errors
/// A pair that nothing can measure, or a point the seam does not have: never measured as something else.
pub fn plan(scheme: &dyn Scheme, seams: &[Seam]) -> Result<Plan, SchemeError> {
    let mut plan = Plan {
        wants: Wants::new(),
        scheme: scheme.name().to_string(),
    };
    for seam in seams.iter().filter(|s| s.consulted) {
        for want in scheme.statistics(seam) {
            let pair = Statistic::parse(&want.statistic, &want.granularity);
            let Some(pair) = pair.filter(|_| seam.points.contains(&want.point)) else {
                return Err(unmeasurable(scheme, seam, want));
            };
            plan.wants
                .entry(key(seam, &want.point))
                .or_default()
                .insert(pair);
        }
    }
    Ok(plan)
}

/// Asks the scheme for its decisions.
///
/// # Errors
/// Another number of decisions than seams.
pub fn decide(scheme: &dyn Scheme, report: &[Seam]) -> Result<Vec<Decision>, SchemeError> {
    let decisions = scheme.decide(report);
    if decisions.len() == report.len() {
        return Ok(decisions);
    }
    Err(SchemeError::Decisions {
        scheme: scheme.name().to_string(),
        expected: report.len(),
        found: decisions.len(),
    })
}

impl Plan {
    /// Whether nothing is measured: then no sample is spent on fitting.
    pub fn is_empty(&self) -> bool {
        self.wants.values().flatten().all(|s| *s == Statistic::None)
    }

    /// Statistics that a form needs and this plan does not deliver: the reason to refuse it
    /// (`statistic_unmeasurable`), naming form and scheme.
    pub fn undelivered(&self, seam: &Seam, form: &Form) -> Option<String> {
        let missing: Vec<String> = form
            .statistics
            .iter()
            .filter(|want| !self.delivers(seam, want))
            .map(|want| {
                format!(
                    "({}, {}) at {}",
                    want.statistic, want.granularity, want.point
                )
            })
            .collect();
        (!missing.is_empty()).then(|| {
            format!(
                "form {} of {} needs {}, which scheme {} does not measure",
                form.form,
                form.plugin,
                missing.join(", "),
                self.scheme
            )
        })
    }

    fn delivers(&self, seam: &Seam, want: &Want) -> bool {
        let none = BTreeSet::new();
        let measured = self.wants.get(&key(seam, &want.point)).unwrap_or(&none);
        match Statistic::parse(&want.statistic, &want.granularity) {
            None => false,
            Some(Statistic::None) => true,
            // The tensor's amax is collected along with the channels'.
            Some(Statistic::AmaxTensor) => {
                measured.contains(&Statistic::AmaxTensor)
                    || measured.contains(&Statistic::AmaxChannel)
            }
            Some(pair) => measured.contains(&pair),
        }
    }
}

fn unmeasurable(scheme: &dyn Scheme, seam: &Seam, want: Want) -> SchemeError {
    let pairs: Vec<String> = Statistic::TABLE
        .iter()
        .map(|(s, g, _)| format!("({s}, {g})"))
        .collect();
    SchemeError::Unmeasurable {
        scheme: scheme.name().to_string(),
        seam: seam.key.clone(),
        want: Box::new(want),
        measurable: format!("{} at {}", pairs.join(", "), seam.points.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{form, ignoring, seam};
    use super::super::{Fp8Static, W8a16Decode};
    use super::*;

    struct Asks(&'static str, &'static str, &'static str);

    impl Scheme for Asks {
        fn name(&self) -> &str {
            "asks"
        }
        fn summary(&self) -> &str {
            "asks for one pair"
        }
        fn statistics(&self, _: &Seam) -> Vec<Want> {
            vec![Want::new(self.0, self.1, self.2)]
        }
        fn decide(&self, _: &[Seam]) -> Vec<Decision> {
            vec![Decision::Default]
        }
    }

    #[test]
    fn consulted_seams_are_measured_where_the_scheme_says() {
        let seams = [seam("a", &["gemm"], &[]), ignoring("n", &[])];
        let fp8 = plan(&Fp8Static, &seams).unwrap();
        assert_eq!(fp8.wants.len(), 1);
        assert!(fp8.wants["a|x"].contains(&Statistic::AmaxTensor));
        assert!(!fp8.is_empty());
        assert!(plan(&W8a16Decode, &seams).unwrap().is_empty());
        assert!(plan(&Asks("x", "none", "tensor"), &seams)
            .unwrap()
            .is_empty());
    }

    #[test]
    fn an_unmeasurable_pair_is_refused_before_any_work() {
        let seams = [seam("a", &[], &[])];
        for (point, statistic, granularity) in [
            ("x", "amax", "block16"),
            ("x", "histogram", "tensor"),
            ("y", "amax", "tensor"),
        ] {
            let error = plan(&Asks(point, statistic, granularity), &seams).unwrap_err();
            assert_eq!(error.code(), "statistic_unmeasurable");
            let text = error.to_string();
            for fact in [point, statistic, granularity, "asks", "(amax, channel)"] {
                assert!(text.contains(fact), "{text}");
            }
        }
    }

    #[test]
    fn a_form_that_needs_more_than_is_measured_is_refused_with_both_names() {
        let s = seam("a", &["gemm"], &[]);
        let needy = form("vendor", "fp8_static");
        let fp8 = plan(&Fp8Static, std::slice::from_ref(&s)).unwrap();
        assert_eq!(fp8.undelivered(&s, &needy), None);
        let w8 = plan(&W8a16Decode, std::slice::from_ref(&s)).unwrap();
        let reason = w8.undelivered(&s, &needy).unwrap();
        for fact in [
            "fp8_static_form",
            "vendor",
            "w8a16_decode",
            "(amax, tensor) at x",
        ] {
            assert!(reason.contains(fact), "{reason}");
        }
        let channels = plan(&Asks("x", "amax", "channel"), std::slice::from_ref(&s)).unwrap();
        assert_eq!(channels.undelivered(&s, &needy), None);
        let mut odd = needy;
        odd.statistics = vec![Want::new("x", "amax", "block16")];
        assert!(fp8.undelivered(&s, &odd).is_some());
        odd.statistics = vec![Want::new("x", "none", "tensor")];
        assert!(w8.undelivered(&s, &odd).is_none());
    }

    #[test]
    fn a_scheme_must_answer_for_every_seam() {
        let seams = [seam("a", &[], &[]), seam("b", &[], &[])];
        let error = decide(&Asks("x", "amax", "tensor"), &seams).unwrap_err();
        assert_eq!(error.code(), "scheme_invalid");
        assert_eq!(decide(&Fp8Static, &seams).unwrap().len(), 2);
    }
}
