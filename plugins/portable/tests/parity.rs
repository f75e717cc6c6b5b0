//! Forms of products in every format against the structure's definition on equally rounded operands: what a host
//! checks at bind, and where the declared tolerances come from.

mod common;

use common::{reference, relative_l2, run, slope, Case, Values};
use structures_plugin_api::describe::{FormDecl, ProbeShapes};
use structures_plugin_api::formats::round_bf16;
use structures_plugin_api::{Backend, DType};
use structures_plugin_portable::Portable;

/// Inputs that a structure has beside its first.
type Inputs = Vec<(String, Option<Values>)>;

fn case(
    structure: &str,
    span: &str,
    inputs: Inputs,
    weights: Inputs,
    outputs: &[(&str, &[usize])],
) -> Case {
    Case {
        structure: structure.into(),
        span: span.into(),
        dtype: DType::F32,
        variant: Default::default(),
        params: Default::default(),
        inputs,
        weights,
        outputs: outputs
            .iter()
            .map(|(n, d)| ((*n).to_string(), d.to_vec()))
            .collect(),
        amax: Default::default(),
        content: Default::default(),
        dims: Default::default(),
        wide: Default::default(),
        stretched: Default::default(),
    }
}

fn some(name: &str, values: Values) -> (String, Option<Values>) {
    (name.into(), Some(values))
}

fn decoder_ffn(lead: &[usize], d: usize, f: usize, seed: u64) -> Vec<Case> {
    let x_dims = [lead, &[d]].concat();
    let x = Values::noise(&x_dims, seed, 2.0);
    let weights = vec![
        some("w_norm", Values::noise(&[d], seed + 1, 1.0)),
        some(
            "w_gate",
            Values::noise(&[d, f], seed + 2, 2.0 / (d as f32).sqrt()),
        ),
        some(
            "w_up",
            Values::noise(&[d, f], seed + 3, 3.0 / (d as f32).sqrt()),
        ),
        some(
            "w_down",
            Values::noise(&[f, d], seed + 4, 2.0 / (f as f32).sqrt()),
        ),
    ];
    let mut cases = Vec::new();
    for (activation, mode) in [("silu", "direct"), ("gelu", "offset")] {
        let mut ffn = case(
            "decoder_ffn",
            "ffn",
            vec![some("x_after_norm", x.clone())],
            weights.clone(),
            &[("y", &x_dims)],
        );
        ffn.set("activation", activation);
        cases.push(ffn);
        for (scale, shift, gate) in [
            (false, false, false),
            (true, true, true),
            (false, false, true),
            (true, false, false),
        ] {
            let one = [vec![1; lead.len()], vec![d]].concat();
            let cond = |name: &str, there: bool, dims: &[usize], seed: u64| {
                (
                    name.to_string(),
                    there.then(|| Values::noise(dims, seed, 0.5)),
                )
            };
            let inputs = vec![
                some("x", x.clone()),
                cond("cond_scale", scale, &x_dims, seed + 5),
                cond("cond_shift", shift, &one, seed + 6),
                cond("cond_gate", gate, &x_dims, seed + 7),
            ];
            let mut block = case(
                "decoder_ffn",
                "block",
                inputs,
                weights.clone(),
                &[("out", &x_dims)],
            );
            block.set("activation", activation);
            block.set("norm_weight_mode", mode);
            block.set(
                "conditioning",
                if scale || shift || gate {
                    "ada_ln"
                } else {
                    "none"
                },
            );
            block.params.insert("eps".into(), serde_json::json!(1e-5));
            cases.push(block);
        }
    }
    cases
}

fn linear_proj(lead: &[usize], k: usize, n: usize, seed: u64) -> Vec<Case> {
    let (x_dims, y_dims) = ([lead, &[k]].concat(), [lead, &[n]].concat());
    let mut cases = Vec::new();
    for (bias, epilogue) in [
        ("none", "none"),
        ("add", "none"),
        ("add", "gelu_quant_fp8"),
        ("none", "residual_add"),
        ("add", "residual_add"),
    ] {
        let residual = (epilogue == "residual_add").then(|| Values::noise(&y_dims, seed, 1.0));
        let mut proj = case(
            "linear_proj",
            "proj",
            vec![
                some("x", Values::noise(&x_dims, seed + 1, 2.0)),
                ("residual".into(), residual),
            ],
            vec![
                some(
                    "w",
                    Values::noise(&[k, n], seed + 2, 1.0 / (k as f32).sqrt()),
                ),
                some("b", Values::noise(&[n], seed + 3, 0.5)),
            ],
            &[("y", &y_dims)],
        );
        proj.set("bias", bias);
        proj.set("epilogue", epilogue);
        proj.set("in_dtype", "bf16");
        proj.dims = [("K".to_string(), k as u64), ("N".to_string(), n as u64)].into();
        cases.push(proj);
    }
    cases
}

fn qkv_pack(lead: &[usize], k: usize, widths: &[usize], seed: u64) -> Vec<Case> {
    let mut weights = Vec::new();
    let mut outputs = Vec::new();
    for (i, n) in widths.iter().enumerate() {
        let seed = seed + 2 * i as u64;
        let size = (1 + i) as f32 / (k as f32).sqrt();
        weights.push(some(&format!("w_{i}"), Values::noise(&[k, *n], seed, size)));
        let bias = (i % 2 == 0).then(|| Values::noise(&[*n], seed + 1, 0.5));
        weights.push((format!("b_{i}"), bias));
        outputs.push((format!("y_{i}"), [lead, &[*n]].concat()));
    }
    let x = Values::noise(&[lead, &[k]].concat(), seed + 100, 2.0);
    let mut pack = case("qkv_pack", "pack", vec![some("x", x)], weights, &[]);
    pack.outputs = outputs;
    pack.set("bind", "leaf");
    vec![pack]
}

fn cases() -> Vec<Case> {
    [
        decoder_ffn(&[1], 24, 37, 1),
        decoder_ffn(&[7], 192, 256, 2),
        decoder_ffn(&[2, 3], 65, 530, 3),
        linear_proj(&[1], 23, 40, 4),
        linear_proj(&[2, 5], 640, 129, 5),
        qkv_pack(&[1], 64, &[64, 16, 16], 6),
        qkv_pack(&[3, 4], 577, &[31, 54], 7),
    ]
    .concat()
}

/// The same seat with everything rounded to bf16.
fn as_bf16(case: &Case) -> Case {
    let mut case = Case {
        dtype: DType::Bf16,
        ..case.clone()
    };
    let tensors = case.inputs.iter_mut().chain(&mut case.weights);
    for values in tensors.filter_map(|(_, values)| values.as_mut()) {
        values.data.iter_mut().for_each(|v| *v = round_bf16(*v));
    }
    case
}

/// Worst relative L2 of a form over all its cases.
fn worst(form: &FormDecl, dtype: DType) -> f64 {
    let mut worst = 0.0_f64;
    let sizes = |case: &Case| {
        let band = form.band.dims.iter();
        let mut known = band.filter_map(|(symbol, band)| Some((band, *case.dims.get(symbol)?)));
        known.all(|(band, size)| band.contains(size))
    };
    for case in cases()
        .iter()
        .filter(|case| case.structure == form.structure && sizes(case))
    {
        let mut case = if dtype == DType::Bf16 {
            as_bf16(case)
        } else {
            case.clone()
        };
        let want = reference(form, &mut case);
        for swapped in [false, true] {
            let got = run(&form.name, &case, swapped).unwrap_or_else(|e| panic!("{case:?}: {e}"));
            for (got, want) in got.iter().zip(&want) {
                let error = relative_l2(got, want);
                let slope = slope(got, want);
                assert!(
                    (slope - 1.0).abs() <= 0.005,
                    "{} {} {}: slope {slope}",
                    case.structure,
                    case.span,
                    form.name
                );
                worst = worst.max(error);
            }
        }
    }
    worst
}

/// The forms of the structures that have cases here; the suite judges all of them.
fn forms() -> Vec<FormDecl> {
    let known: Vec<String> = cases().into_iter().map(|case| case.structure).collect();
    let mut forms = Portable::description().forms;
    // Balanced channels need a statistic a channel; `Linear` and the suite judge them.
    forms.retain(|form| known.contains(&form.structure) && !form.balances);
    assert_eq!(forms.len(), 23, "three structures");
    forms
}

#[test]
fn f32_boundary_within_a_tenth_of_the_declared_tolerance() {
    for form in forms() {
        let error = worst(&form, DType::F32);
        println!(
            "{} {}: {error:.2e} of {:.0e}",
            form.structure, form.name, form.tolerance
        );
        assert!(
            error <= form.tolerance / 10.0,
            "{} {}: {error}",
            form.structure,
            form.name
        );
    }
}

/// On a bf16 boundary one value in some may round the other way: a bf16 step is 2^-8, and bind
/// parity allows 1e-2 there.
#[test]
fn bf16_boundary_within_what_bind_parity_allows() {
    for form in forms() {
        let error = worst(&form, DType::Bf16);
        println!("{} {}: {error:.2e}", form.structure, form.name);
        assert!(error <= 2e-3, "{} {}: {error}", form.structure, form.name);
    }
}

/// A scale that is a tenth too small must show: the comparison can fail.
#[test]
fn a_wrong_scale_is_seen() {
    let calibrated = |f: &&FormDecl| f.statistics.iter().any(|s| s.statistic == "amax");
    for form in forms().iter().filter(calibrated) {
        let mut case = cases()
            .into_iter()
            .find(|c| c.structure == form.structure)
            .expect("one");
        let want = reference(form, &mut case);
        case.amax.values_mut().for_each(|amax| *amax *= 0.5);
        let got = run(&form.name, &case, false).expect("runs");
        assert!(
            relative_l2(&got[0], &want[0]) > form.tolerance,
            "{}",
            form.structure
        );
    }
}

#[test]
fn what_is_missing_is_named() {
    let code = |case: &Case, form: &str| run(form, case, false).err().map(|f| f.code);
    let ffn = decoder_ffn(&[2], 8, 12, 1).remove(1);
    let without = |slot: &str| {
        let mut case = ffn.clone();
        case.weights
            .iter_mut()
            .filter(|(name, _)| name == slot)
            .for_each(|(_, v)| *v = None);
        code(&case, "f32")
    };
    for slot in ["w_norm", "w_gate", "w_up", "w_down"] {
        assert_eq!(without(slot).as_deref(), Some("weight_missing"), "{slot}");
    }
    assert_eq!(
        code(&ffn, "fp8_static").as_deref(),
        Some("statistic_missing")
    );
    let mut case = ffn.clone();
    case.params.clear();
    assert_eq!(code(&case, "f32").as_deref(), Some("param_missing"));
    let mut case = ffn.clone();
    case.inputs[0].1 = None;
    assert_eq!(code(&case, "f32").as_deref(), Some("view_absent"));
    let mut case = ffn.clone();
    case.outputs[0].0 = "elsewhere".into();
    assert_eq!(code(&case, "f32").as_deref(), Some("param_missing"));

    let mut proj = linear_proj(&[2], 8, 12, 1).remove(4);
    proj.set("in_dtype", "fp8_static");
    assert_eq!(code(&proj, "f32").as_deref(), Some("format_no_variant"));
    proj.set("in_dtype", "bf16");
    assert_eq!(code(&proj, "f32"), None);

    let mut pack = qkv_pack(&[2], 8, &[4, 4], 1).remove(0);
    pack.set("bind", "module");
    assert_eq!(code(&pack, "f32").as_deref(), Some("format_no_variant"));
    pack.set("bind", "leaf");
    pack.set("in_dtype", "fp8_static");
    assert_eq!(code(&pack, "f32").as_deref(), Some("format_no_variant"));
    pack.set("in_dtype", "bf16_fused_quant");
    pack.outputs.pop();
    assert_eq!(code(&pack, "f32").as_deref(), Some("param_missing"));
}

/// What a form says of other sizes, before anything is bound.
fn envelope(form: &str, sizes: &[(&str, u64)]) -> Option<String> {
    let decl = Portable::description()
        .form("linear_proj", form)
        .cloned()
        .expect("declared");
    let shapes = ProbeShapes {
        rows: vec![1],
        dims: sizes.iter().map(|(s, n)| ((*s).to_string(), *n)).collect(),
        ..ProbeShapes::default()
    };
    decl.admits(&shapes).err().map(|refused| refused.code)
}

#[test]
fn b_465_four_bit_products_take_whole_blocks_and_their_own_bias() {
    let at = |k| envelope("nvfp4_dynamic", &[("N", 1024), ("K", k)]);
    assert_eq!((at(4096), at(17408)), (None, None));
    assert_eq!(at(4104).as_deref(), Some("envelope"));
    for k in [64, 80] {
        let mut proj = linear_proj(&[2], k, 24, 9).remove(1);
        let form = Portable::description()
            .form("linear_proj", "nvfp4_dynamic")
            .cloned()
            .expect("declared");
        let want = reference(&form, &mut proj);
        let got = run("nvfp4_dynamic", &proj, false).expect("runs");
        let error = relative_l2(&got[0], &want[0]);
        assert!(error <= form.tolerance / 10.0, "K {k}: {error}");
        let bias = proj.weights.iter_mut().find(|(name, _)| name == "b");
        bias.expect("has one").1 = Some(Values::noise(&[23], 1, 1.0));
        let failure = run("nvfp4_dynamic", &proj, false).expect_err("another length");
        assert_eq!(failure.code, "dims_inconsistent");
    }
    for k in [72, 19, 8] {
        let proj = linear_proj(&[2], k, 24, 9).remove(1);
        let failure = run("nvfp4_dynamic", &proj, false).expect_err("no whole blocks");
        assert_eq!(failure.code, "envelope", "K {k}");
        assert!(failure.message.contains("K"), "{}", failure.message);
    }
}

#[test]
fn b_463_b_464_what_contradicts_itself_is_refused_at_bind() {
    // A bias of another length, in every format that weighs in 8 or 4 bits.
    for form in ["w8a16_static", "w4a16_static"] {
        let mut proj = linear_proj(&[1], 96, 24, 3).remove(1);
        assert!(run(form, &proj, false).is_ok(), "{form}");
        let bias = proj.weights.iter_mut().find(|(name, _)| name == "b");
        bias.expect("has one").1 = Some(Values::noise(&[25], 1, 1.0));
        let failure = run(form, &proj, false).expect_err("another length");
        assert_eq!(failure.code, "dims_inconsistent", "{form}");
        assert!(failure.message.contains("24"), "{}", failure.message);
    }
    let ffn = decoder_ffn(&[1], 96, 64, 3).remove(0);
    assert!(run("w4a16_static", &ffn, false).is_ok());
    let mut narrow = ffn.clone();
    let down = narrow.weights.iter_mut().find(|(name, _)| name == "w_down");
    down.expect("has one").1 = Some(Values::noise(&[63, 96], 1, 1.0));
    let failure = run("w4a16_static", &narrow, false).expect_err("another F");
    assert_eq!(failure.code, "dims_inconsistent");
    let mut foreign = ffn;
    foreign.set("activation", "mish");
    let failure = run("w4a16_static", &foreign, false).expect_err("nobody knows it");
    assert_eq!(failure.code, "format_no_variant");
    assert!(failure.message.contains("mish"), "{}", failure.message);
}
