//! `w8a16_decode`: int8 weights, one scale an output channel, for the few rows of a decode step. No
//! calibration. Reads half the bytes of bf16 weights and a quarter of f32, which is what a decode step waits
//! for.

use super::{Decision, Scheme, Seam, Want, KEEP_NOT_IN_PROFILE, TAG_GEMM};

/// Format it routes to.
const FORMAT: &str = "w8a16_static";

/// The profile.
#[derive(Clone, Copy, Debug, Default)]
pub struct W8a16Decode;

impl Scheme for W8a16Decode {
    fn name(&self) -> &str {
        "w8a16_decode"
    }

    fn summary(&self) -> &str {
        "int8 weights with one scale an output channel for products in the decode band"
    }

    fn statistics(&self, _: &Seam) -> Vec<Want> {
        Vec::new()
    }

    fn decide(&self, report: &[Seam]) -> Vec<Decision> {
        report.iter().map(one).collect()
    }
}

fn one(seam: &Seam) -> Decision {
    if !seam.consulted {
        return Decision::Default;
    }
    if !seam.has_tag(TAG_GEMM) {
        return Decision::keep(
            KEEP_NOT_IN_PROFILE,
            "the profile binds decode-band products only",
        );
    }
    // Where no form is offered the route stands: the binder refuses it by name.
    let bands: Vec<Option<[u64; 2]>> = seam.forms_of(FORMAT).map(|f| f.rows).collect();
    let serves = |band: &Option<[u64; 2]>| match band {
        None => true,
        Some([lo, hi]) => seam.rows.iter().any(|rows| (lo..=hi).contains(&rows)),
    };
    if bands.is_empty() || seam.rows.is_empty() || bands.iter().any(serves) {
        return Decision::route(FORMAT);
    }
    let bands: Vec<String> = bands
        .iter()
        .flatten()
        .map(|[lo, hi]| format!("{lo} to {hi}"))
        .collect();
    let (least, most) = (seam.rows.iter().min(), seam.rows.iter().max());
    Decision::keep(
        KEEP_NOT_IN_PROFILE,
        format!(
            "no observed call is in the decode band: rows {} to {} seen, {} served",
            least.copied().unwrap_or(0),
            most.copied().unwrap_or(0),
            bands.join(" or ")
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ignoring, seam};
    use super::*;

    fn decode(mut seam: Seam, rows: &[u64], band: Option<[u64; 2]>) -> Decision {
        seam.rows = rows.to_vec();
        seam.forms.iter_mut().for_each(|f| f.rows = band);
        W8a16Decode.decide(&[seam]).remove(0)
    }

    #[test]
    fn every_gemm_seam_is_routed_the_rest_is_kept() {
        for tags in [["gemm", "ffn"], ["gemm", "pack"], ["gemm", "head"]] {
            let s = seam("a", &tags, &["w8a16_static"]);
            assert_eq!(decode(s, &[], None), Decision::route("w8a16_static"));
        }
        let other = decode(seam("a", &["attention"], &[]), &[], None);
        assert!(matches!(other, Decision::Keep { code, .. } if code == "keep_not_in_profile"));
        assert_eq!(
            decode(ignoring("n", &["none"]), &[], None),
            Decision::Default
        );
        assert!(W8a16Decode
            .statistics(&seam("a", &["gemm"], &[]))
            .is_empty());
    }

    #[test]
    fn a_seam_that_never_decodes_is_kept_with_its_rows() {
        let s = || seam("a", &["gemm"], &["w8a16_static"]);
        let band = Some([1, 8]);
        assert_eq!(
            decode(s(), &[1, 128], band),
            Decision::route("w8a16_static")
        );
        assert_eq!(decode(s(), &[128], None), Decision::route("w8a16_static"));
        let Decision::Keep { code, reason } = decode(s(), &[64, 128], band) else {
            panic!("expected to keep the host");
        };
        assert_eq!(code, "keep_not_in_profile");
        assert!(
            reason.contains("64 to 128") && reason.contains("1 to 8"),
            "{reason}"
        );
    }

    #[test]
    fn a_missing_form_is_the_binders_refusal() {
        let s = seam("a", &["gemm"], &["fp8_static"]);
        assert_eq!(
            decode(s, &[128], Some([1, 8])),
            Decision::route("w8a16_static")
        );
    }
}
