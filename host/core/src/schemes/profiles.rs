//! The profiles that are routes and nothing else, one entry each, their rules tested beneath.
//!
//! Where an entry's format has no form in any loaded plugin its seams end as recorded refusals of the binder
//! (`format_no_variant`), with the format's name.

use serde_json::Map;

use super::profile::{Otherwise, Param, Profile, Route, Select};
use super::{KEEP_NOT_IN_PROFILE, KEEP_QUANTISATION_OFF, TAG_GEMM, TAG_PACK};

/// Tag of a feed-forward.
const TAG_FFN: &str = "ffn";
/// Tag of a single projection.
const TAG_PROJECTION: &str = "projection";
/// Tag of a recurrence: projections inside its module feed it.
const TAG_RECURRENCE: &str = "recurrence";
/// Point of a gated feed-forward, which one without a gate does not have.
const GATED: &str = "act_after_mul";

const GEMM: Select = Select::tags(&[TAG_GEMM]);
const PROJECTION: Select = Select::tags(&[TAG_GEMM, TAG_PROJECTION]);
const PACK: Select = Select::tags(&[TAG_GEMM, TAG_PACK]);
const GATED_FFN: Select = Select {
    point: Some(GATED),
    ..Select::tags(&[TAG_GEMM, TAG_FFN])
};
const PLAIN_FFN: Select = Select {
    no_point: Some(GATED),
    ..Select::tags(&[TAG_GEMM, TAG_FFN])
};
const RECURRENT_PROJECTION: Select = Select {
    inside: Some(TAG_RECURRENCE),
    ..PROJECTION
};

const fn to(select: Select, format: &'static str) -> Route {
    Route {
        select,
        format,
        flag: None,
    }
}

const fn keep(reason: &'static str) -> Otherwise {
    Otherwise::Keep {
        code: KEEP_NOT_IN_PROFILE,
        reason,
    }
}

const DECODE_ONLY: Otherwise = keep("the profile binds decode-band products only");
const BALANCE: &[(&str, Param)] = &[("alpha", Param::Alpha), ("clamp", Param::Clamp)];
const BALANCED_ONLY: Otherwise =
    keep("the profile binds projection and feed-forward products only");
const CHANNELS: Option<(&str, &str)> = Some(("amax", "channel"));

/// Everything neutral.
fn plain(
    name: &'static str,
    summary: &'static str,
    routes: &'static [Route],
    otherwise: Otherwise,
) -> Profile {
    Profile {
        name,
        summary,
        statistic: None,
        routes,
        otherwise,
        bands: false,
        rounds: &[],
        params: &[],
        unsupported: None,
        given: Map::new(),
    }
}

/// All of them, by no order that matters.
pub fn profiles() -> Vec<Profile> {
    const W4A4: &[Route] = &[
        to(RECURRENT_PROJECTION, "nvfp4_dynamic"),
        to(PROJECTION, "w8a16_static"),
    ];
    vec![
        Profile {
            // Reads half the bytes of bf16 weights and a quarter of f32, which is what a decode step waits for.
            bands: true,
            ..plain(
                "w8a16_decode",
                "int8 weights with one scale an output channel for products in the decode band",
                const { &[to(GEMM, "w8a16_static")] },
                DECODE_ONLY,
            )
        },
        Profile {
            bands: true,
            ..plain(
                "w4a16_decode",
                "4-bit weights for gated feed-forwards in the decode band",
                const { &[to(GATED_FFN, "w4a16_static")] },
                DECODE_ONLY,
            )
        },
        Profile {
            bands: true,
            ..plain(
                "w4a16_full",
                "4-bit weights for every product in the band of its form",
                const { &[to(GEMM, "w4a16_static")] },
                keep("the profile binds products only"),
            )
        },
        plain(
            "w4a4_decode",
            "int8 weights for projections, 4-bit weights and activations for those of a recurrence",
            W4A4,
            DECODE_ONLY,
        ),
        Profile {
            unsupported: Some("releasing the host's own weights of bound projections"),
            ..plain(
                "w4a4_decode_release",
                "w4a4_decode with the host's projection weights released, one way",
                W4A4,
                DECODE_ONLY,
            )
        },
        Profile {
            rounds: &["bf16"],
            ..plain(
                "bf16_dense",
                "every product in bf16",
                const { &[to(GEMM, "bf16")] },
                keep("the profile binds products only"),
            )
        },
        Profile {
            rounds: &["bf16"],
            ..plain(
                "bf16_structural",
                "packs in bf16, nothing quantised",
                const { &[to(PACK, "bf16_pack")] },
                Otherwise::KeepTagged {
                    tags: &[TAG_FFN, TAG_PROJECTION],
                    code: KEEP_QUANTISATION_OFF,
                    reason: "the profile introduces no quantisation",
                },
            )
        },
        Profile {
            statistic: Some(("amax", "tensor")),
            ..plain(
                "w8a8_static",
                "int8 weights and int8 activations, under a calibrated scale or one a row",
                const { &[to(GEMM, "w8a8_static")] },
                keep("the profile binds products only"),
            )
        },
        Profile {
            statistic: CHANNELS,
            params: &[
                ("alpha", Param::Alpha),
                ("clamp", Param::Clamp),
                ("recipe", Param::OneOf(&["balance", "smoothquant"])),
            ],
            ..plain(
                "nvfp4_awq",
                "4-bit gated feed-forwards, balanced by activation statistics",
                const { &[to(GATED_FFN, "nvfp4_awq")] },
                keep("the profile binds gated feed-forwards only"),
            )
        },
        Profile {
            statistic: CHANNELS,
            params: BALANCE,
            ..plain(
                "nvfp4_balance",
                "4-bit weights and activations with balanced channels",
                const {
                    &[
                        to(PACK, "nvfp4_balance"),
                        to(PLAIN_FFN, "nvfp4_balance"),
                        to(PROJECTION, "nvfp4_balance"),
                    ]
                },
                BALANCED_ONLY,
            )
        },
        Profile {
            statistic: CHANNELS,
            params: BALANCE,
            ..plain(
                "nvfp4_balance_wire",
                "nvfp4_balance with a 4-bit wire inside feed-forwards",
                const {
                    &[
                        to(PACK, "nvfp4_balance"),
                        Route {
                            select: PLAIN_FFN,
                            format: "nvfp4_balance",
                            flag: Some("fuse_wire"),
                        },
                        to(PROJECTION, "nvfp4_balance"),
                    ]
                },
                BALANCED_ONLY,
            )
        },
    ]
}

/// The profile of that name.
pub fn profile(name: &str) -> Option<Profile> {
    profiles().into_iter().find(|p| p.name == name)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{form, ignoring, seam};
    use super::super::{plan, Decision, Scheme, Seam};
    use super::*;
    use serde_json::json;

    const GATED_POINTS: &[&str] = &["x_after_norm", "act_after_mul"];

    fn with_points(mut seam: Seam, points: &[&str]) -> Seam {
        seam.points = points.iter().map(|p| (*p).to_string()).collect();
        seam
    }

    /// One of each kind, in this order.
    fn kinds() -> Vec<Seam> {
        vec![
            with_points(seam("m.gated", &["gemm", "ffn"], &[]), GATED_POINTS),
            with_points(
                seam("m.plain", &["gemm", "ffn"], &[]),
                &["x_after_norm", "hidden_after_act"],
            ),
            seam("m.proj", &["gemm", "projection"], &[]),
            seam("m.pack", &["gemm", "pack"], &[]),
            seam("m.chain", &["chain", "gemm"], &[]),
            ignoring("m.norm", &[]),
        ]
    }

    /// `format`, `keep:<code>` or `-`, in the order of [`kinds`].
    fn decided(name: &str) -> Vec<String> {
        let of = |d: Decision| match d {
            Decision::Route { format, .. } => format,
            Decision::Keep { code, .. } => code,
            Decision::Default => "-".into(),
        };
        let found = profile(name).unwrap().decide(&kinds());
        found.into_iter().map(of).collect()
    }

    const KEPT: &str = "keep_not_in_profile";
    const OFF: &str = "keep_quantisation_off";

    #[test]
    fn b_104_every_profile_routes_what_the_table_says() {
        for (name, expected) in [
            ("w8a16_decode", ["w8a16_static"; 5]),
            ("w4a16_decode", ["w4a16_static", KEPT, KEPT, KEPT, KEPT]),
            ("w4a16_full", ["w4a16_static"; 5]),
            ("w4a4_decode", [KEPT, KEPT, "w8a16_static", KEPT, KEPT]),
            ("bf16_dense", ["bf16"; 5]),
            ("bf16_structural", [OFF, OFF, OFF, "bf16_pack", "-"]),
            ("w8a8_static", ["w8a8_static"; 5]),
            ("nvfp4_awq", ["nvfp4_awq", KEPT, KEPT, KEPT, KEPT]),
            (
                "nvfp4_balance",
                [
                    KEPT,
                    "nvfp4_balance",
                    "nvfp4_balance",
                    "nvfp4_balance",
                    KEPT,
                ],
            ),
            (
                "nvfp4_balance_wire",
                [
                    KEPT,
                    "nvfp4_balance",
                    "nvfp4_balance",
                    "nvfp4_balance",
                    KEPT,
                ],
            ),
        ] {
            let mut expected = expected.to_vec();
            expected.push("-"); // what ignores schemes is never touched
            assert_eq!(decided(name), expected, "{name}");
        }
    }

    #[test]
    fn b_101_each_profile_measures_what_its_forms_need() {
        let measured = |name: &str| {
            let seam = with_points(seam("a", &["gemm"], &[]), GATED_POINTS);
            let wants = profile(name).unwrap().statistics(&seam);
            let text =
                |w: &super::super::Want| format!("{}:{}:{}", w.point, w.statistic, w.granularity);
            wants.iter().map(text).collect::<Vec<_>>()
        };
        let both = |kind: &str| {
            GATED_POINTS
                .iter()
                .map(|p| format!("{p}:{kind}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(measured("w8a8_static"), both("amax:tensor"));
        for name in ["nvfp4_awq", "nvfp4_balance", "nvfp4_balance_wire"] {
            assert_eq!(measured(name), both("amax:channel"), "{name}");
        }
        for name in [
            "w8a16_decode",
            "w4a16_decode",
            "w4a16_full",
            "bf16_dense",
            "bf16_structural",
            "w4a4_decode",
        ] {
            assert!(measured(name).is_empty(), "{name}");
        }
    }

    #[test]
    fn b_104_parameters_travel_with_the_route_and_the_wire_is_asked_for_by_name() {
        let params = |name: &str| {
            let found = profile(name).unwrap().decide(&kinds());
            let of = |d: &Decision| match d {
                Decision::Route { params, .. } => json!(params),
                _ => json!(null),
            };
            found.iter().map(of).collect::<Vec<_>>()
        };
        let balance = json!({"alpha": 0.5, "clamp": [0.25, 4.0]});
        let found = params("nvfp4_balance");
        assert_eq!([&found[1], &found[2], &found[3]], [&balance; 3]);
        let mut wired = balance.clone();
        wired["fuse_wire"] = true.into();
        let found = params("nvfp4_balance_wire");
        assert_eq!([&found[1], &found[2]], [&wired, &balance]);
        let mut awq = balance;
        awq["recipe"] = "balance".into();
        assert_eq!(params("nvfp4_awq")[0], awq);
        assert_eq!(params("w8a16_decode")[0], json!({}));
    }

    #[test]
    fn b_110_a_recipe_nobody_knows_is_refused_and_none_comes_from_the_environment() {
        let with = |name: &str, params: serde_json::Value| {
            let given = params.as_object().cloned().unwrap_or_default();
            profile(name).unwrap().with(given)
        };
        let quant = with("nvfp4_awq", json!({"recipe": "smoothquant", "alpha": 0.8})).unwrap();
        let Decision::Route { params, .. } = quant.decide(&kinds()).remove(0) else {
            panic!("routed");
        };
        assert_eq!(
            (&params["recipe"], &params["alpha"], &params["clamp"]),
            (&json!("smoothquant"), &json!(0.8), &json!([0.25, 4.0]))
        );
        for (name, params, fact) in [
            (
                "nvfp4_awq",
                json!({"recipe": "gptq"}),
                "balance, smoothquant",
            ),
            ("nvfp4_awq", json!({"recipe": 3}), "balance, smoothquant"),
            (
                "nvfp4_balance",
                json!({"recipe": "balance"}),
                "alpha, clamp",
            ),
            ("nvfp4_balance", json!({"clamp": [2, 1]}), "lo <= hi"),
            ("w8a16_decode", json!({"alpha": 0.5}), "no `alpha`"),
        ] {
            let error = with(name, params).unwrap_err();
            assert_eq!(error.code(), "scheme_invalid");
            assert!(error.to_string().contains(fact), "{error}");
        }
        for source in [
            include_str!("profile.rs"),
            include_str!("profiles.rs")
                .split("mod tests")
                .next()
                .unwrap(),
            include_str!("registry.rs"),
            include_str!("mod.rs"),
        ] {
            assert!(!source.contains("env::var"));
        }
    }

    #[test]
    fn projections_inside_a_recurrence_go_to_four_bits() {
        let mut report = kinds();
        report.push(seam(
            "m.layers.0.mixer.in_proj",
            &["gemm", "projection"],
            &[],
        ));
        report.push(seam(
            "m.layers.0.mixer_b.proj",
            &["gemm", "projection"],
            &[],
        ));
        report.push(Seam {
            tags: vec!["recurrence".into()],
            ..ignoring("m.layers.0.mixer", &[])
        });
        let found = profile("w4a4_decode").unwrap().decide(&report);
        assert_eq!(found[6], Decision::route("nvfp4_dynamic"));
        assert_eq!(found[7], Decision::route("w8a16_static"));
    }

    #[test]
    fn what_this_host_cannot_do_is_refused_before_any_work() {
        let error = plan(&profile("w4a4_decode_release").unwrap(), &kinds()).unwrap_err();
        assert_eq!(error.code(), "scheme_unsupported");
        let text = error.to_string();
        assert!(
            text.contains("w4a4_decode_release") && text.contains("releasing"),
            "{text}"
        );
    }

    #[test]
    fn rounding_is_allowed_where_a_profile_is_about_it() {
        for profile in profiles() {
            let expected = profile.name.starts_with("bf16");
            assert_eq!(
                profile.allows_rounding("bf16"),
                expected,
                "{}",
                profile.name
            );
            assert!(!profile.allows_rounding("f16"));
        }
    }

    fn decode(rows: &[u64], band: Option<[u64; 2]>) -> Decision {
        let mut seam = seam("a", &["gemm"], &["w8a16_static"]);
        seam.rows = rows.to_vec();
        seam.forms.iter_mut().for_each(|f| f.rows = band);
        profile("w8a16_decode").unwrap().decide(&[seam]).remove(0)
    }

    #[test]
    fn a_seam_that_never_decodes_is_kept_with_its_rows() {
        let band = Some([1, 8]);
        let routed = Decision::route("w8a16_static");
        assert_eq!(decode(&[1, 128], band), routed);
        assert_eq!(decode(&[128], None), routed);
        assert_eq!(decode(&[], band), routed);
        let Decision::Keep { code, reason } = decode(&[64, 128], band) else {
            panic!("expected to keep the host");
        };
        assert_eq!(code, KEPT);
        assert!(
            reason.contains("64 to 128") && reason.contains("1 to 8"),
            "{reason}"
        );
    }

    #[test]
    fn a_missing_form_is_the_binders_refusal() {
        let mut other = seam("a", &["gemm"], &[]);
        other.forms = vec![form("vendor", "fp8_static")];
        other.rows = vec![128];
        let found = profile("w8a16_decode").unwrap().decide(&[other]).remove(0);
        assert_eq!(found, Decision::route("w8a16_static"));
    }
}
