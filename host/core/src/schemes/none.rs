//! `none`: quantisation off and nothing more.
//!
//! What quantises keeps the host. Fusion structures, which never consult a scheme, attach as usual in their
//! unquantised forms, and so does a pack: merging sibling products is a fusion whatever the format. Other
//! products stay on the host even if some form computes them unquantised: that would change who computes, not
//! how much is computed.

use super::{Decision, Scheme, Seam, Want, KEEP_QUANTISATION_OFF, TAG_PACK, UNQUANTISED};

/// The profile.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoQuantisation;

impl Scheme for NoQuantisation {
    fn name(&self) -> &str {
        "none"
    }

    fn summary(&self) -> &str {
        "no quantisation: fusions and packs in unquantised forms, everything else on the host"
    }

    fn statistics(&self, _: &Seam) -> Vec<Want> {
        Vec::new()
    }

    fn decide(&self, report: &[Seam]) -> Vec<Decision> {
        report.iter().map(one).collect()
    }
}

fn one(seam: &Seam) -> Decision {
    let fusion = !seam.consulted || seam.has_tag(TAG_PACK);
    // A form that rounds is never taken here, so it cannot be what a seam attaches with.
    let unquantised = seam
        .forms_of(UNQUANTISED)
        .any(|form| !form.quantises && form.rounds.is_none());
    match (fusion, unquantised) {
        (true, true) => Decision::route(UNQUANTISED),
        (true, false) if seam.forms.is_empty() => Decision::Default,
        (true, false) => Decision::keep(
            KEEP_QUANTISATION_OFF,
            "quantisation is off and every offered form quantises or rounds",
        ),
        (false, _) => Decision::keep(KEEP_QUANTISATION_OFF, "quantisation is off"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ignoring, seam};
    use super::*;

    fn code(seam: Seam) -> String {
        match NoQuantisation.decide(&[seam]).remove(0) {
            Decision::Keep { code, .. } => code,
            Decision::Route { format, .. } => format!("route {format}"),
            Decision::Default => "default".into(),
        }
    }

    #[test]
    fn products_keep_the_host_packs_and_fusions_attach_unquantised() {
        let all = ["fp8_static", "none"];
        assert_eq!(
            code(seam("ffn", &["gemm", "ffn"], &all)),
            "keep_quantisation_off"
        );
        assert_eq!(code(seam("pack", &["gemm", "pack"], &all)), "route none");
        assert_eq!(code(ignoring("norm", &all)), "route none");
    }

    #[test]
    fn what_only_quantises_keeps_the_host() {
        assert_eq!(
            code(seam("pack", &["pack"], &["fp8_static"])),
            "keep_quantisation_off"
        );
        assert_eq!(
            code(ignoring("norm", &["fp8_static"])),
            "keep_quantisation_off"
        );
        assert_eq!(code(ignoring("norm", &[])), "default");
    }

    #[test]
    fn a_form_that_rounds_is_not_unquantised_enough() {
        let mut rounding = seam("pack", &["pack"], &["none"]);
        rounding.forms[0].rounds = Some("bf16".into());
        assert_eq!(code(rounding), "keep_quantisation_off");
        assert!(!NoQuantisation.allows_rounding("bf16"));
    }

    #[test]
    fn it_measures_nothing() {
        assert!(NoQuantisation
            .statistics(&seam("pack", &["pack"], &["none"]))
            .is_empty());
    }
}
