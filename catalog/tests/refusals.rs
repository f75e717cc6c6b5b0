//! What only some variants of an entry have: outputs that are absent, and calls that are refused with the code and the
//! tensor that is the reason.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use structures_catalog::{Catalog, CatalogError, Feed, Plain};
use structures_graph::AttrValue;

type Shapes<'a> = &'a [(&'a str, &'a [usize])];

fn call(name: &str, axes: &[(&str, &str)], inputs: Shapes, weights: Shapes) -> [CatalogError; 2] {
    let catalog = Catalog::builtin().unwrap();
    let spec = catalog.get(name).unwrap();
    let variant: BTreeMap<String, String> = axes
        .iter()
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .collect();
    let ones = |of: Shapes| -> BTreeMap<String, Tensor> {
        let one = |(n, d): &(&str, &[usize])| {
            let t = Tensor::ones(*d, DType::F32, &Device::Cpu).unwrap();
            (n.to_string(), t)
        };
        of.iter().map(one).collect()
    };
    let feed = Feed {
        inputs: ones(inputs),
        weights: ones(weights),
        params: [("eps".to_string(), AttrValue::Float(1e-6))].into(),
        ..Feed::default()
    };
    [
        spec.call_reference(&variant, &feed).unwrap_err(),
        spec.call_dataflow(&variant, &feed).unwrap_err(),
    ]
}

fn says(errors: &[CatalogError; 2], code: &str, what: &str) {
    for e in errors {
        assert_eq!(e.code(), code, "{e}");
        assert!(e.to_string().contains(what), "{e}");
    }
}

#[test]
fn an_output_that_is_not_made_is_absent() {
    let catalog = Catalog::builtin().unwrap();
    let spec = catalog.get("modnorm_qkv_chain").unwrap();
    let axes = |fanout: &str| -> BTreeMap<String, String> {
        [("modulation", "scale_shift"), ("fanout", fanout)]
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .into()
    };
    let outputs = |plain: &Plain| plain.span("chain").unwrap().outputs.clone();
    let all = spec.expand(&axes("qkv"), &|_| true).unwrap();
    assert_eq!(outputs(&all), ["q", "k", "v"]);
    let one = spec.expand(&axes("q_only"), &|_| true).unwrap();
    assert_eq!(outputs(&one), ["q"]);
    assert!(one.source("w_k").is_none() && one.source("w_q").is_some());
    // Without biases of their own the products carry the outputs' names, and round.
    let present = |n: &str| n.starts_with("w_") || n == "b_cond" || n == "cond";
    let bare = spec.expand(&axes("qkv"), &present).unwrap();
    assert_eq!(outputs(&bare), ["q", "k", "v"]);
    let (op, _) = bare.producer("k").unwrap();
    assert!(!bare.ops[op].as_f32 && bare.ops[op].refuse.as_deref() == Some("siblings_not_shared"));
    // The block and its feed-forward exist under a table only.
    assert!(all.span("block").is_none() && all.span("ffn").is_none());
}

#[test]
fn a_fan_out_needs_all_its_siblings() {
    let scale_shift = [("modulation", "scale_shift"), ("fanout", "qkv")];
    let inputs: Shapes = &[("x", &[1, 2, 4]), ("cond", &[1, 3])];
    let conditioning: Shapes = &[("w_cond", &[8, 3]), ("b_cond", &[8]), ("w_q", &[4, 4])];
    let e = call("modnorm_qkv_chain", &scale_shift, inputs, conditioning);
    says(&e, "missing_weight", "w_k");
    let no_cond = call(
        "modnorm_qkv_chain",
        &scale_shift,
        &inputs[..1],
        conditioning,
    );
    says(&no_cond, "missing_input", "cond");
}

#[test]
fn a_table_has_six_chunks_and_its_block_has_a_host() {
    let axes = [("modulation", "per_token_table"), ("fanout", "qkv")];
    let run = |axes: &[(&str, &str)], chunks: usize| {
        let (temb, table) = ([1, 2, chunks, 4], [1, chunks, 4]);
        let square: &[usize] = &[4, 4];
        call(
            "modnorm_qkv_chain",
            axes,
            &[("x", &[1, 2, 4]), ("temb", &temb)],
            &[
                ("table", &table),
                ("w_q", square),
                ("w_k", square),
                ("w_v", square),
                ("w_fc1", &[6, 4]),
                ("w_fc2", &[4, 6]),
            ],
        )
    };
    says(&run(&axes, 9), "table_chunks", "C = 9");
    says(&run(&axes, 6), "evaluation_failed", "attn");
    let alone = [("modulation", "per_token_table"), ("fanout", "q_only")];
    says(&run(&alone, 6), "unknown_variant", "false");
}

#[test]
fn a_style_is_as_wide_as_its_parts() {
    let run = |norm: &str, parts: &str, width: usize| {
        call(
            "adaln_producer",
            &[("norm", norm), ("parts", parts)],
            &[("x", &[2, 4]), ("cond", &[1, 3])],
            &[("style_w", &[3, width])],
        )
    };
    says(&run("layer", "scale_shift_gate", 8), "style_width", "S = 8");
    says(&run("layer", "scale_shift", 12), "style_width", "S = 12");
    says(&run("rms", "scale_shift", 8), "style_width", "false");
}
