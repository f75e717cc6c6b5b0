//! What the suite does not show of the unquantised forms: inputs repeated by strides of 0, and the code of every
//! refusal.

mod common;

use common::{run, Case, Values};
use structures_plugin_api::DType;

/// A right call of one span: name and dims of inputs, weights and outputs.
fn case(
    structure: &str,
    span: &str,
    variant: &[(&str, &str)],
    inputs: &[(&str, &[usize])],
    weights: &[(&str, &[usize])],
    outputs: &[(&str, &[usize])],
) -> Case {
    let named = |list: &[(&str, &[usize])], seed: u64| -> Vec<(String, Option<Values>)> {
        let made = list.iter().enumerate();
        made.map(|(i, (name, dims))| {
            let values = Values::noise(dims, seed + i as u64, 1.0);
            ((*name).to_string(), Some(values))
        })
        .collect()
    };
    let mut case = Case {
        structure: structure.into(),
        span: span.into(),
        dtype: DType::F32,
        variant: Default::default(),
        params: [("eps".to_string(), serde_json::json!(1e-6))].into(),
        inputs: named(inputs, 1),
        weights: named(weights, 100),
        outputs: outputs
            .iter()
            .map(|(n, d)| ((*n).to_string(), d.to_vec()))
            .collect(),
        amax: Default::default(),
        content: Default::default(),
        dims: [
            ("D".to_string(), 4),
            ("Hq".to_string(), 2),
            ("Hkv".to_string(), 1),
        ]
        .into(),
        wide: Default::default(),
        stretched: Default::default(),
    };
    for (axis, value) in variant {
        case.set(axis, value);
    }
    case
}

fn adaln() -> Case {
    case(
        "adaln_producer",
        "fused",
        &[("norm", "rms"), ("parts", "scale_shift_gate")],
        &[("x", &[3, 4]), ("cond", &[1, 5])],
        &[("style_w", &[5, 12])],
        &[("y", &[3, 4]), ("gate", &[1, 4])],
    )
}

fn attention() -> Case {
    let mut case = case(
        "attention_core",
        "core",
        &[],
        &[
            ("q", &[2, 2, 3, 4]),
            ("k", &[2, 1, 5, 4]),
            ("v", &[2, 1, 5, 4]),
            ("mask", &[1, 1, 3, 5]),
            ("kv_len", &[]),
        ],
        &[],
        &[("out", &[2, 3, 2, 4])],
    );
    set(&mut case, "kv_len", 4.0);
    case
}

fn residual() -> Case {
    case(
        "decoder_block",
        "attn_residual",
        &[("residual", "gated")],
        &[
            ("x", &[2, 3, 4]),
            ("attn_out", &[2, 3, 4]),
            ("gate_in", &[1, 4]),
        ],
        &[],
        &[("r", &[2, 3, 4])],
    )
}

fn gated_delta() -> Case {
    let tokens: &[usize] = &[1, 2, 1, 4];
    case(
        "gated_delta_core",
        "core",
        &[("qk_norm", "host")],
        &[
            ("q", tokens),
            ("k", tokens),
            ("v", tokens),
            ("log_decay", &[1, 2, 1]),
            ("beta", &[1, 2, 1]),
            ("state", &[1, 1, 4, 4]),
        ],
        &[],
        &[("out", tokens), ("final_state", &[1, 1, 4, 4])],
    )
}

fn table() -> Case {
    case(
        "modnorm_qkv_chain",
        "ffn",
        &[("modulation", "per_token_table"), ("fanout", "qkv")],
        &[("x_cross", &[1, 3, 4]), ("temb", &[1, 1, 6, 4])],
        &[
            ("table", &[1, 6, 4]),
            ("w_fc1", &[7, 4]),
            ("w_fc2", &[4, 7]),
        ],
        &[("out", &[1, 3, 4])],
    )
}

fn norm_rope() -> Case {
    case(
        "qk_norm_rope",
        "rope",
        &[
            ("normalization_scope", "per_head"),
            ("rope_layout", "half"),
            ("rotary_extent", "full"),
            ("norm_weight_mode", "direct"),
        ],
        &[
            ("q", &[1, 3, 2, 4]),
            ("k", &[1, 3, 1, 4]),
            ("cos", &[3, 2]),
            ("sin", &[3, 2]),
        ],
        &[("q_norm_weight", &[4]), ("k_norm_weight", &[4])],
        &[
            ("q_after_rope", &[1, 3, 2, 4]),
            ("k_after_rope", &[1, 3, 1, 4]),
        ],
    )
}

fn content() -> Case {
    let mut case = case(
        "cadence_static",
        "content",
        &[],
        &[("x", &[3, 9])],
        &[],
        &[("y", &[3, 4])],
    );
    case.content
        .insert("y".into(), Values::noise(&[3, 4], 7, 1.0));
    case.dims.insert("N".into(), 4);
    case
}

/// An input repeated by a stride of 0 is what it repeats, written out or of size 1.
#[test]
fn repeated_inputs_are_what_they_repeat() {
    for (case, name, dims) in [
        (adaln(), "cond", &[3, 5][..]),
        (residual(), "gate_in", &[2, 4]),
        (table(), "temb", &[1, 3, 6, 4]),
        (attention(), "mask", &[2, 2, 3, 5]),
    ] {
        let plain = run("f32", &case, false).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut stretched = case.clone();
        let sizes = dims.iter().map(|d| *d as i64).collect();
        stretched.stretched.insert(name.into(), sizes);
        // One gate a row of conditioning.
        if name == "cond" {
            stretched.outputs[1].1 = vec![3, 4];
        }
        let got = run("f32", &stretched, false).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(got[0], plain[0], "{name}");
    }
}

#[test]
fn content_is_given_again_whatever_comes_in() {
    let mut case = content();
    let want = case.content["y"].data.clone();
    assert_eq!(run("f32", &case, false), Ok(vec![want.clone()]));
    case.inputs[0].1 = Some(Values::noise(&[3, 9], 99, 100.0));
    assert_eq!(run("f32", &case, false), Ok(vec![want]));
}

#[test]
fn a_state_that_is_absent_is_zeros() {
    let mut zeros = gated_delta();
    zeros.inputs[5].1 = Some(Values::new(&[1, 1, 4, 4], vec![0.0; 16]));
    let mut absent = gated_delta();
    absent.inputs[5].1 = None;
    assert_eq!(run("f32", &zeros, false), run("f32", &absent, false));
}

type Edit = fn(&mut Case);
/// A case, what is wrong with it, and the code that says so.
type Planted = (fn() -> Case, Edit, &'static str);

#[test]
fn every_refusal_has_its_code() {
    let cases: &[Planted] = &[
        (adaln, |c| c.params.clear(), "param_missing"),
        (adaln, |c| c.dims.clear(), "param_missing"),
        (adaln, |c| c.set("parts", "scale_shift"), "style_width"),
        (adaln, |c| c.set("norm", "batch"), "format_no_variant"),
        (
            adaln,
            |c| c.set("out_dtype", "fp8_static"),
            "format_no_variant",
        ),
        (adaln, |c| c.weights.clear(), "weight_missing"),
        (adaln, |c| c.inputs[1].1 = None, "view_absent"),
        (adaln, |c| resize(c, "cond", &[2, 5]), "dims_inconsistent"),
        (
            attention,
            |c| resize(c, "k", &[2, 1, 5, 3]),
            "dims_inconsistent",
        ),
        (attention, |c| resize(c, "mask", &[1, 1, 3, 4]), "view_dims"),
        (
            attention,
            |c| resize(c, "kv_len", &[3]),
            "dims_inconsistent",
        ),
        (attention, |c| set(c, "kv_len", 9.0), "dims_inconsistent"),
        (attention, |c| set(c, "kv_len", 1.5), "dims_inconsistent"),
        (
            attention,
            |c| drop(c.params.insert("window".into(), "wide".into())),
            "param_missing",
        ),
        (
            attention,
            |c| c.set("kv_cadence", "static_prefix"),
            "format_no_variant",
        ),
        (residual, |c| c.inputs[2].1 = None, "view_absent"),
        (
            residual,
            |c| resize(c, "gate_in", &[3, 4]),
            "dims_inconsistent",
        ),
        (
            residual,
            |c| resize(c, "attn_out", &[2, 2, 4]),
            "dims_inconsistent",
        ),
        (residual, |c| c.variant.clear(), "param_missing"),
        (residual, |c| c.span = "block".into(), "span_unknown"),
        (
            gated_delta,
            |c| resize(c, "beta", &[1, 1, 1]),
            "dims_inconsistent",
        ),
        (
            gated_delta,
            |c| resize(c, "state", &[1, 1, 4, 3]),
            "dims_inconsistent",
        ),
        (
            gated_delta,
            |c| c.set("state_update", "in_place"),
            "format_no_variant",
        ),
        (
            table,
            |c| c.set("modulation", "scale_shift"),
            "format_no_variant",
        ),
        (table, |c| drop(c.weights.remove(0)), "weight_missing"),
        (
            table,
            |c| resize(c, "temb", &[1, 2, 6, 4]),
            "dims_inconsistent",
        ),
        (norm_rope, |c| rotary(c, 3), "bad_rotary_dim"),
        (norm_rope, |c| rotary(c, 2), "bad_rotary_dim"),
        (norm_rope, |c| resize(c, "cos", &[2, 2]), "bad_table"),
        (
            norm_rope,
            |c| c.weights[0].1 = Some(Values::noise(&[8], 1, 1.0)),
            "bad_norm_weight",
        ),
        (content, |c| c.content.clear(), "statistic_missing"),
        (
            content,
            |c| c.dims.extend([("N".to_string(), 5)]),
            "dims_inconsistent",
        ),
        (
            content,
            |c| c.outputs[0].1 = vec![2, 4],
            "dims_inconsistent",
        ),
    ];
    for (i, (make, edit, code)) in cases.iter().enumerate() {
        let mut case = make();
        edit(&mut case);
        let failure = run("f32", &case, false).expect_err(&format!("case {i}"));
        assert_eq!(failure.code, *code, "case {i}: {failure}");
    }
    for make in [
        adaln,
        attention,
        residual,
        gated_delta,
        table,
        norm_rope,
        content,
    ] {
        run("f32", &make(), false).expect("right as it is");
    }
}

fn resize(case: &mut Case, name: &str, dims: &[usize]) {
    let found = case.inputs.iter_mut().find(|(own, _)| own == name);
    found.expect("an input").1 = Some(Values::noise(dims, 3, 1.0));
}

fn set(case: &mut Case, name: &str, value: f32) {
    let found = case.inputs.iter_mut().find(|(own, _)| own == name);
    found.expect("an input").1 = Some(Values::new(&[], vec![value]));
}

fn rotary(case: &mut Case, size: u64) {
    case.params.insert("rotary_dim".into(), size.into());
}
