//! Every profile on the demo model through the portable backend: what is routed binds, what has no form is refused by
//! name, and what a receipt says can be bound again.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use structures::attach::{attach, Attachment};
use structures::error::Error;
use structures::host::{Host, Loaded};
use structures::progress::Silent;
use structures::replay::replay;
use structures::samples::Samples;
use structures::schemes::{Decision, Scheme, Seam, Want};
use structures::seat::OnGuardFail;
use structures_tests::in_process::{self, any_speed, made_samples, model};
use structures_tests::plugins;

fn host() -> Host {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    in_process::host(DIR.get_or_init(|| plugins(&["portable"])).path())
}

fn samples() -> Samples {
    made_samples(4, 16)
}

fn attached(host: &Host, model: &Loaded, scheme: &str) -> Result<Attachment, Error> {
    attach(host, model, &samples(), &any_speed(scheme), &Silent)
}

/// Structure and format of every active seat.
fn active(attachment: &Attachment) -> BTreeSet<(String, String)> {
    let seats = attachment.receipt.seats.iter();
    seats
        .map(|s| (s.structure.clone(), s.format.clone()))
        .collect()
}

#[test]
fn every_routed_form_binds_where_it_is_routed() {
    let (host, model) = (host(), model());
    for (scheme, expected) in [
        (
            "bf16_dense",
            vec![
                ("decoder_ffn", "bf16"),
                ("linear_proj", "bf16"),
                ("qkv_pack", "bf16"),
            ],
        ),
        (
            "w4a16_full",
            vec![
                ("decoder_ffn", "w4a16_static"),
                ("linear_proj", "w4a16_static"),
                ("qkv_pack", "w4a16_static"),
            ],
        ),
        ("w4a16_decode", vec![("decoder_ffn", "w4a16_static")]),
        (
            "w8a8_static",
            vec![
                ("decoder_ffn", "w8a8_static"),
                ("linear_proj", "w8a8_static"),
                ("qkv_pack", "w8a8_static"),
            ],
        ),
        (
            "nvfp4_balance",
            vec![
                ("linear_proj", "nvfp4_balance"),
                ("qkv_pack", "nvfp4_balance"),
            ],
        ),
        ("w4a4_decode", vec![("linear_proj", "w8a16_static")]),
    ] {
        let found = attached(&host, &model, scheme).unwrap();
        let active = active(&found);
        for (structure, format) in expected {
            let seat = (structure.to_string(), format.to_string());
            let refused: Vec<_> = found
                .receipt
                .refused
                .iter()
                .filter(|r| r.structure == structure)
                .map(|r| (&r.code, &r.reason))
                .collect();
            assert!(
                active.contains(&seat),
                "{scheme}: {structure} is not active: {refused:?}"
            );
        }
        let quantised: Vec<_> = active
            .iter()
            .filter(|(_, format)| format == "none")
            .collect();
        assert!(found.receipt.control.detach_identical, "{scheme}");
        assert!(found.receipt.ledger.clean, "{scheme}: {quantised:?}");
    }
}

#[test]
fn b_105_a_format_without_a_form_is_refused_by_name() {
    let (host, model) = (host(), model());
    let found = attached(&host, &model, "nvfp4_awq").unwrap();
    let refused = found
        .receipt
        .refused
        .iter()
        .find(|r| r.structure == "decoder_ffn")
        .unwrap();
    assert_eq!(refused.code, "format_no_variant");
    assert!(
        refused.reason.contains("decoder_ffn") && refused.reason.contains("nvfp4_awq"),
        "{}",
        refused.reason
    );
    let routed = &found.receipt.scheme;
    assert!(routed
        .formats
        .values()
        .any(|f| f.get("decoder_ffn").is_some_and(|v| v == "nvfp4_awq")));
    let params = routed
        .params
        .values()
        .find_map(|p| p.get("decoder_ffn"))
        .unwrap();
    assert_eq!(params["recipe"], "balance");
    let none: Vec<_> = active(&found)
        .into_iter()
        .filter(|(s, _)| s == "decoder_ffn")
        .collect();
    assert!(none.is_empty(), "{none:?}");

    let error = attached(&host, &model, "w4a4_decode_release")
        .err()
        .unwrap();
    assert_eq!(error.code(), "scheme_unsupported");
}

#[test]
fn b_471_the_structural_profile_binds_packs_and_quantises_nothing() {
    let (host, model) = (host(), model());
    let found = attached(&host, &model, "bf16_structural").unwrap();
    let receipt = &found.receipt;
    let active = active(&found);
    assert!(
        active.contains(&("qkv_pack".into(), "bf16_pack".into())),
        "{active:?}"
    );
    assert!(active
        .iter()
        .all(|(_, format)| format == "bf16_pack" || format == "none"));
    for structure in ["decoder_ffn", "linear_proj"] {
        let kept = receipt
            .kept_host
            .iter()
            .find(|k| k.structure == structure)
            .unwrap();
        assert_eq!(kept.code, "keep_quantisation_off");
        assert!(
            kept.reason.contains("introduces no quantisation"),
            "{}",
            kept.reason
        );
    }
    assert!(receipt.ledger.clean && receipt.control.detach_identical);
    // A form that rounds is allowed here and nowhere else.
    let none = attached(&host, &model, "none").unwrap();
    assert!(self::active(&none)
        .iter()
        .all(|(_, format)| format == "none"));
}

#[test]
fn what_a_balanced_receipt_says_binds_again() {
    let (host, model) = (host(), model());
    let found = attached(&host, &model, "nvfp4_balance").unwrap();
    let seat = found
        .receipt
        .seats
        .iter()
        .find(|s| s.format == "nvfp4_balance")
        .unwrap();
    assert_eq!(seat.scheme["alpha"], 0.5);
    assert!(
        seat.statistics.keys().any(|k| k.ends_with("|amax|channel")),
        "{:?}",
        seat.statistics.keys()
    );
    assert!(
        found.receipt.precision_spec.activations.is_empty(),
        "no static scale is executed"
    );
    let text = serde_json::to_string(&found.receipt).unwrap();
    let read = serde_json::from_str(&text).unwrap();
    let (_, seats) = replay(&host, &model, &read, &[5, 9, 2, 7], OnGuardFail::Fallback).unwrap();
    assert_eq!(seats.len(), found.receipt.seats.len());
}

#[test]
fn b_180_a_scheme_of_ones_own_is_an_object_with_a_name() {
    struct OnlyFfn;
    impl Scheme for OnlyFfn {
        fn name(&self) -> &str {
            "only_ffn"
        }
        fn summary(&self) -> &str {
            "int8 weights in feed-forwards"
        }
        fn statistics(&self, _: &Seam) -> Vec<Want> {
            Vec::new()
        }
        fn decide(&self, report: &[Seam]) -> Vec<Decision> {
            let one = |seam: &Seam| match (seam.consulted, seam.has_tag("ffn")) {
                (false, _) => Decision::Default,
                (true, true) => Decision::route("w8a16_static"),
                (true, false) => Decision::keep("keep_not_in_profile", "feed-forwards only"),
            };
            report.iter().map(one).collect()
        }
    }
    let (mut host, model) = (host(), model());
    assert_eq!(
        attached(&host, &model, "only_ffn").err().unwrap().code(),
        "scheme_unknown"
    );
    host.schemes.register(Arc::new(OnlyFfn));
    let found = attached(&host, &model, "only_ffn").unwrap();
    assert_eq!(found.receipt.scheme.name, "only_ffn");
    let active = active(&found);
    assert!(
        active.contains(&("decoder_ffn".into(), "w8a16_static".into())),
        "{active:?}"
    );
    assert!(
        !active
            .iter()
            .any(|(s, f)| s == "linear_proj" && f != "none"),
        "{active:?}"
    );
}
