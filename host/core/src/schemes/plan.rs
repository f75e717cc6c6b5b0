//! From a scheme to what calibration must measure, checked before any work is done.

use std::collections::BTreeSet;

use super::{Decision, Form, Scheme, SchemeError, Seam, Want};
use crate::stats::{Capture, Statistic, Wants};

/// What to measure, `path|point` -> statistics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// For the collector.
    pub wants: Wants,
    /// Keys whose outputs are stored, for forms that declare content. No scheme can ask for them.
    pub contents: BTreeSet<String>,
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
    if let Some(needs) = scheme.unsupported() {
        return Err(SchemeError::Unsupported {
            scheme: scheme.name().to_string(),
            needs: needs.to_string(),
        });
    }
    let mut plan = Plan {
        wants: Wants::new(),
        contents: BTreeSet::new(),
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

/// A form that is routed to and needs what the scheme does not measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undelivered {
    /// Position of the seam.
    pub seam: usize,
    /// Plugin of the form.
    pub plugin: String,
    /// The form.
    pub form: String,
    /// For people: form, scheme and what is missing.
    pub reason: String,
}

/// What a route asks of a form and this one does not offer: a parameter `fuse_<kind>` wants a wire of that kind.
pub fn unserved(
    params: &serde_json::Map<String, serde_json::Value>,
    form: &Form,
) -> Option<String> {
    // An end of a wire between forms is no wire inside one.
    let fused = |form: &Form| form.wires.iter().all(|wire| wire.contains(':'));
    let asked = params.iter().find(|(name, value)| {
        name.starts_with("fuse_") && value.as_bool() == Some(true) && fused(form)
    });
    asked.map(|(name, _)| {
        format!(
            "the scheme asks for `{name}`, form {} of {} declares no wire",
            form.form, form.plugin
        )
    })
}

impl Plan {
    /// Forms that the scheme would route to, as far as it can say before anything is measured, and that need more
    /// than it measures. Known before any sample is run.
    pub fn undelivered_forms(&self, scheme: &dyn Scheme, seams: &[Seam]) -> Vec<Undelivered> {
        let mut found = Vec::new();
        for (i, (seam, decision)) in seams.iter().zip(scheme.decide(seams)).enumerate() {
            let Decision::Route { format, .. } = decision else {
                continue;
            };
            for form in seam.forms_of(&format) {
                if let Some(reason) = self.undelivered(seam, form) {
                    found.push(Undelivered {
                        seam: i,
                        plugin: form.plugin.clone(),
                        form: form.form.clone(),
                        reason,
                    });
                }
            }
        }
        found
    }

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
        let pair = match Capture::parse(&want.statistic, &want.granularity) {
            None => return false,
            Some(Capture::Observation) => return true,
            Some(Capture::Content) => return self.contents.contains(&key(seam, &want.point)),
            Some(Capture::Statistic(pair)) => pair,
        };
        match pair {
            Statistic::None => true,
            // The tensor's amax is collected along with the channels'.
            Statistic::AmaxTensor => {
                measured.contains(&Statistic::AmaxTensor)
                    || measured.contains(&Statistic::AmaxChannel)
            }
            pair => measured.contains(&pair),
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
    use super::super::{profile, Fp8Static};
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
    fn b_106_only_consulted_seams_are_measured_where_the_scheme_says() {
        let seams = [seam("a", &["gemm"], &[]), ignoring("n", &[])];
        let fp8 = plan(&Fp8Static, &seams).unwrap();
        assert_eq!(fp8.wants.len(), 1);
        assert!(fp8.wants["a|x"].contains(&Statistic::AmaxTensor));
        assert!(!fp8.is_empty());
        assert!(plan(&profile("w8a16_decode").unwrap(), &seams)
            .unwrap()
            .is_empty());
        assert!(plan(&Asks("x", "none", "tensor"), &seams)
            .unwrap()
            .is_empty());
    }

    #[test]
    fn b_101_an_unmeasurable_pair_is_refused_before_any_work() {
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
    fn b_101_a_form_that_needs_more_than_is_measured_is_refused_with_both_names() {
        let s = seam("a", &["gemm"], &[]);
        let needy = form("vendor", "fp8_static");
        let fp8 = plan(&Fp8Static, std::slice::from_ref(&s)).unwrap();
        assert_eq!(fp8.undelivered(&s, &needy), None);
        let w8 = plan(&profile("w8a16_decode").unwrap(), std::slice::from_ref(&s)).unwrap();
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
    fn b_101_a_needy_form_is_told_before_anything_is_measured() {
        struct Blind;
        impl Scheme for Blind {
            fn name(&self) -> &str {
                "blind"
            }
            fn summary(&self) -> &str {
                "routes and measures nothing"
            }
            fn statistics(&self, _: &Seam) -> Vec<Want> {
                vec![]
            }
            fn decide(&self, report: &[Seam]) -> Vec<Decision> {
                vec![Decision::route("fp8_static"); report.len()]
            }
        }
        let seams = [
            seam("a", &["gemm"], &["fp8_static", "w8a16_static"]),
            seam("b", &["gemm"], &["w8a16_static"]),
        ];
        let blind = plan(&Blind, &seams)
            .unwrap()
            .undelivered_forms(&Blind, &seams);
        assert_eq!(blind.len(), 1);
        assert_eq!(
            (blind[0].seam, blind[0].form.as_str()),
            (0, "fp8_static_form")
        );
        assert!(blind[0].reason.contains("blind"), "{}", blind[0].reason);
        let seeing = plan(&Fp8Static, &seams).unwrap();
        assert!(seeing.undelivered_forms(&Fp8Static, &seams).is_empty());
    }

    #[test]
    fn b_065_content_is_delivered_to_forms_and_closed_to_schemes() {
        let s = seam("a", &["gemm"], &[]);
        let error = plan(&Asks("x", "content", "tensor"), std::slice::from_ref(&s)).unwrap_err();
        assert_eq!(error.code(), "statistic_unmeasurable");
        let mut holder = form("vendor", "none");
        holder.statistics = vec![Want::new("x", "content", "tensor")];
        let mut plan = plan(&Fp8Static, std::slice::from_ref(&s)).unwrap();
        assert!(plan.undelivered(&s, &holder).is_some());
        plan.contents.insert("a|x".into());
        assert_eq!(plan.undelivered(&s, &holder), None);
    }

    #[test]
    fn a_fused_wire_is_served_by_a_form_that_declares_one() {
        let params = |v: bool| serde_json::Map::from_iter([("fuse_wire".to_string(), v.into())]);
        let mut vendor = form("vendor", "nvfp4_balance");
        let reason = unserved(&params(true), &vendor).unwrap();
        assert!(
            reason.contains("fuse_wire") && reason.contains("vendor"),
            "{reason}"
        );
        assert_eq!(unserved(&params(false), &vendor), None);
        vendor.wires = vec!["nvfp4".into()];
        assert_eq!(unserved(&params(true), &vendor), None);
    }

    #[test]
    fn a_scheme_must_answer_for_every_seam() {
        let seams = [seam("a", &[], &[]), seam("b", &[], &[])];
        let error = decide(&Asks("x", "amax", "tensor"), &seams).unwrap_err();
        assert_eq!(error.code(), "scheme_invalid");
        assert_eq!(decide(&Fp8Static, &seams).unwrap().len(), 2);
    }
}
