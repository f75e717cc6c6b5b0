//! Placing seams in hand-made host graphs: what holds, what falls, and with which code.

#![allow(clippy::unwrap_used)]

mod common;

use common::{names, ops, place, place_one, Host};
use structures_graph::AttrValue;
use structures_seams::{Located, Refusal};

fn spans(located: &Located) -> Vec<&str> {
    located.spans.iter().map(|s| s.name.as_str()).collect()
}

fn fallen<'l>(located: &'l Located, span: &str) -> &'l Refusal {
    let found = located
        .fallen
        .iter()
        .find(|r| r.span.as_deref() == Some(span));
    found.unwrap_or_else(|| panic!("{span} did not fall: {:?}", located.fallen))
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter()
        .map(|(a, b)| (a.to_string(), b.to_string()))
        .collect()
}

#[test]
fn a_plain_layer_holds_both_spans() {
    let (graph, l) = place_one(&Host::default(), "decoder_ffn", "l.0.mlp");
    assert_eq!(spans(&l), ["block", "ffn"], "{:?}", l.fallen);
    assert!(l.refusal.is_none() && l.corrections.is_empty() && l.seam.located);
    let block = &l.spans[0];
    assert_eq!(
        ops(&graph, block),
        [
            "rms_norm l.0.post_attention_layernorm",
            "linear l.0.mlp.gate_proj",
            "act l.0.mlp",
            "linear l.0.mlp.up_proj",
            "mul l.0.mlp",
            "linear l.0.mlp.down_proj",
            "add l.0"
        ]
    );
    assert_eq!(
        names(&graph, &block.inputs),
        pairs(&[
            ("x", "l.0.add"),
            ("cond_scale", "-"),
            ("cond_shift", "-"),
            ("cond_gate", "-")
        ])
    );
    assert_eq!(
        names(&graph, &block.outputs),
        pairs(&[("out", "l.0.add#2")])
    );
    assert_eq!(block.params["eps"], AttrValue::Float(1e-5));
    let points: Vec<&str> = block
        .points
        .values()
        .map(|v| graph.value(*v).name.as_str())
        .collect();
    assert_eq!(points, ["l.0.post_attention_layernorm.y", "l.0.mlp.mul"]);
    assert_eq!(block.axes["norm_weight_mode"], "direct");
    assert_eq!(block.axes["conditioning"], "none");
    assert_eq!((block.dims["D"], block.dims["F"]), (512, 768));
    let ffn = &l.spans[1];
    assert_eq!(ffn.ops.len(), 5);
    assert_eq!(
        names(&graph, &ffn.inputs),
        pairs(&[("x_after_norm", "l.0.post_attention_layernorm.y")])
    );
    // Axes the span does not mention come from the wider one.
    assert_eq!(ffn.axes["norm_weight_mode"], "direct");
    assert!(ffn.params.is_empty());
    assert_eq!(ffn.weights.len(), 3);
    // The graph said which norm it is: no assumption is left.
    assert!(l.seam.assumptions.is_empty());
    assert_eq!(l.seam.variant["norm_weight_mode"], "direct");
}

#[test]
fn a_post_norm_leaves_the_inner_span_and_says_why() {
    let host = Host {
        post_norm: true,
        offset: true,
        ..Host::default()
    };
    let (graph, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    assert_eq!(spans(&l), ["ffn"]);
    // The norm that feeds the products stands outside the span: the graph still says which it is.
    let norm = l.seam.weights["w_norm"].stored().unwrap();
    assert_eq!(norm.path, "l.0.pre_feedforward_layernorm");
    assert!(!norm.hint);
    assert!(l.seam.assumptions.is_empty(), "{:?}", l.seam.assumptions);
    assert!(l.corrections.iter().any(|c| c.starts_with("w_norm:")));
    let r = fallen(&l, "block");
    // Of the combinations the one that paired most: the sum is found, what should feed it is not.
    assert_eq!(
        (r.code.as_str(), r.op.as_deref()),
        ("dataflow_edge", Some("mul"))
    );
    assert!(r
        .expected
        .as_deref()
        .unwrap()
        .contains("linear at `l.0.mlp.down_proj`"));
    assert!(r
        .found
        .as_deref()
        .unwrap()
        .contains("rms_norm at `l.0.post_feedforward_layernorm`"));
    assert_eq!(
        r.host_path.as_deref(),
        Some("l.0.post_feedforward_layernorm")
    );
    // doubt norm_weight_is_offset: taken from the norm that feeds the span, although the wider span fell.
    assert_eq!(l.spans[0].axes["norm_weight_mode"], "offset");
    assert_eq!(l.seam.variant["norm_weight_mode"], "offset");
    assert_eq!(
        names(&graph, &l.spans[0].inputs),
        pairs(&[("x_after_norm", "l.0.pre_feedforward_layernorm.y")])
    );
}

/// doubt norm_is_not_the_ffn_norm: the norm's name is a hint, the graph knows.
#[test]
fn the_graph_says_which_norm_feeds_it() {
    let mut host = Host {
        post_norm: true,
        ..Host::default()
    };
    let catalog = common::catalog();
    let seam = common::seam(&catalog, &host, "decoder_ffn", "l.0.mlp");
    let named = seam.weights["w_norm"].stored().unwrap();
    assert_eq!(named.path, "l.0.post_attention_layernorm");
    host.post_norm = false;
    let mut graph = common::graph(&host);
    // The same layer whose norm is stored under another name.
    for value in &mut graph.values {
        if let structures_graph::Origin::Param { param, .. } = &mut value.origin {
            if param.path == "l.0.post_attention_layernorm" {
                param.path = "l.0.another_norm".into();
            }
        }
    }
    let l =
        structures_seams::locate(&graph, common::spec(&catalog, "decoder_ffn"), &seam).remove(0);
    assert_eq!(spans(&l), ["block", "ffn"]);
    let found = l.seam.weights["w_norm"].stored().unwrap();
    assert_eq!(found.path, "l.0.another_norm");
    assert_eq!(l.corrections.len(), 1, "{:?}", l.corrections);
}

#[test]
fn a_norm_without_weight_binds_a_constant() {
    for (offset, want) in [(false, "ones"), (true, "zeros")] {
        let host = Host {
            bare_norm: true,
            offset,
            ..Host::default()
        };
        let (_, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
        assert_eq!(spans(&l), ["block", "ffn"], "{:?}", l.fallen);
        let w = serde_json::to_value(&l.spans[0].weights["w_norm"]).unwrap();
        assert_eq!(w, serde_json::json!({"const": want}));
    }
}

#[test]
fn another_activation_is_attr_unmatched() {
    let host = Host {
        act: Some("relu"),
        ..Host::default()
    };
    let (_, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    let r = l.refusal.as_ref().unwrap();
    assert_eq!(r.code, "attr_unmatched");
    assert_eq!(
        (r.operand.as_deref(), r.expected.as_deref()),
        (Some("kind"), Some("silu"))
    );
    assert_eq!(r.found.as_deref(), Some("relu"));
    assert!(l.spans.is_empty() && !l.seam.located);
    assert_eq!(l.fallen.len(), 2);
}

#[test]
fn the_graph_corrects_an_axis() {
    let host = Host {
        act: Some("gelu_tanh"),
        ..Host::default()
    };
    let (_, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    assert_eq!(spans(&l), ["block", "ffn"]);
    assert_eq!(l.seam.variant["activation"], "gelu");
    assert_eq!(
        l.corrections,
        ["activation: the graph shows gelu, not silu"]
    );
}

#[test]
fn a_residual_multiplier_leaves_the_inner_span() {
    let host = Host {
        residual_multiplier: Some(0.22),
        ..Host::default()
    };
    let (_, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    assert_eq!(spans(&l), ["ffn"]);
    assert!(
        fallen(&l, "block").reason.contains("scale at `l.0`"),
        "{:?}",
        l.fallen
    );
}

#[test]
fn an_interior_value_with_a_second_reader_is_refused() {
    let host = Host {
        second_reader: true,
        ..Host::default()
    };
    let (_, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    for span in ["block", "ffn"] {
        let r = fallen(&l, span);
        assert_eq!(r.code, "interior_read_outside");
        assert_eq!(r.operand.as_deref(), Some("l.0.mlp.mul"));
        assert_eq!(r.host_path.as_deref(), Some("spy"));
    }
    assert_eq!(l.refusal.as_ref().unwrap().code, "interior_read_outside");
}

#[test]
fn a_graph_output_is_a_reader_outside() {
    let host = Host {
        tap: true,
        ..Host::default()
    };
    let (_, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    let r = l.refusal.as_ref().unwrap();
    assert_eq!(r.code, "interior_read_outside");
    assert!(r.reason.contains("output `tap`"), "{}", r.reason);
}

#[test]
fn swapped_operands_and_views_still_match() {
    let host = Host {
        swapped: true,
        views: true,
        ..Host::default()
    };
    let (graph, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    assert_eq!(spans(&l), ["block", "ffn"], "{:?}", l.fallen);
    let block = ops(&graph, &l.spans[0]);
    // The view of the product and the view of the norm belong to the block.
    assert!(
        block.contains(&"contiguous l.0.mlp".to_string()),
        "{block:?}"
    );
    assert!(block.contains(&"reshape l.0.mlp".to_string()), "{block:?}");
    let ffn = ops(&graph, &l.spans[1]);
    assert!(ffn.contains(&"contiguous l.0.mlp".to_string()), "{ffn:?}");
    assert!(!ffn.iter().any(|o| o.starts_with("reshape")), "{ffn:?}");
    assert_eq!(names(&graph, &l.spans[0].inputs)[0].1, "l.0.add");
}

#[test]
fn conditioning_is_an_axis_the_graph_solves() {
    let host = Host {
        conditioned: true,
        ..Host::default()
    };
    let (graph, l) = place_one(&host, "decoder_ffn", "l.0.mlp");
    assert_eq!(spans(&l), ["block", "ffn"], "{:?}", l.fallen);
    assert_eq!(l.spans[0].axes["conditioning"], "ada_ln");
    assert_eq!(
        names(&graph, &l.spans[0].inputs),
        pairs(&[
            ("x", "l.0.add"),
            ("cond_scale", "scale"),
            ("cond_shift", "shift"),
            ("cond_gate", "gate")
        ])
    );
}

#[test]
fn a_pack_shares_one_input() {
    let (graph, l) = place_one(&Host::default(), "qkv_pack", "l.0.self_attn");
    assert_eq!(l.spans.len(), 1, "{:?}", l.fallen);
    let span = &l.spans[0];
    assert_eq!(
        ops(&graph, span),
        [
            "linear l.0.self_attn.q_proj",
            "linear l.0.self_attn.k_proj",
            "linear l.0.self_attn.v_proj"
        ]
    );
    assert_eq!(
        names(&graph, &span.inputs),
        pairs(&[("x", "l.0.input_layernorm.y")])
    );
    let outs: Vec<String> = names(&graph, &span.outputs)
        .into_iter()
        .map(|(_, v)| v)
        .collect();
    assert_eq!(
        outs,
        [
            "l.0.self_attn.q_proj.y",
            "l.0.self_attn.k_proj.y",
            "l.0.self_attn.v_proj.y"
        ]
    );
}

#[test]
fn a_biased_pack_takes_its_biases() {
    let host = Host {
        biased: true,
        ..Host::default()
    };
    let (graph, l) = place_one(&host, "qkv_pack", "l.0.self_attn");
    assert_eq!(l.spans[0].ops.len(), 6, "{:?}", l.fallen);
    assert_eq!(l.spans[0].weights.len(), 6);
    assert_eq!(
        names(&graph, &l.spans[0].outputs)[0].1,
        "l.0.self_attn.q_proj.z"
    );
}

/// doubt siblings_do_not_share_input: a fact of the graph.
#[test]
fn siblings_that_read_another_tensor_are_no_pack() {
    let host = Host {
        v_other: true,
        ..Host::default()
    };
    let (_, l) = place_one(&host, "qkv_pack", "l.0.self_attn");
    let r = l.refusal.as_ref().unwrap();
    assert_eq!(r.code, "siblings_not_shared");
    assert_eq!(r.host_path.as_deref(), Some("l.0.self_attn.v_proj"));
    assert!(r.expected.as_deref().unwrap().contains("input_layernorm"));
    assert!(r.found.as_deref().unwrap().contains("`h`"));
}

#[test]
fn a_projection_reads_its_input_as_the_linear_sees_it() {
    let (graph, l) = place_one(&Host::default(), "linear_proj", "l.0.self_attn.q_proj");
    let narrow = l.spans.last().unwrap();
    assert_eq!(ops(&graph, narrow), ["linear l.0.self_attn.q_proj"]);
    assert_eq!(l.seam.variant["epilogue"], "none");
    assert_eq!(narrow.inputs[0].0, "x");
    assert_eq!(names(&graph, &narrow.inputs)[0].1, "l.0.input_layernorm.y");
    // o_proj reads the heads through a reshape: the boundary input is what the linear reads.
    let (graph, l) = place_one(&Host::default(), "linear_proj", "l.0.self_attn.o_proj");
    assert_eq!(
        names(&graph, &l.spans[0].inputs)[0].1,
        "l.0.self_attn.reshape#4"
    );
}

/// The residual add behind the output projection is an epilogue the graph shows; the plain product is the narrower
/// alternative.
#[test]
fn an_output_projection_shows_its_residual_add() {
    let (graph, l) = place_one(&Host::default(), "linear_proj", "l.0.self_attn.o_proj");
    assert_eq!(l.spans.len(), 2, "{:?}", l.fallen);
    assert_eq!(l.spans[0].axes["epilogue"], "residual_add");
    assert_eq!(
        ops(&graph, &l.spans[0]),
        ["linear l.0.self_attn.o_proj", "add l.0"]
    );
    assert!(names(&graph, &l.spans[0].inputs).contains(&("residual".into(), "h".into())));
    assert_eq!(l.spans[1].axes["epilogue"], "none");
    assert_eq!(ops(&graph, &l.spans[1]), ["linear l.0.self_attn.o_proj"]);
    assert_eq!(l.corrections.len(), 1);
}

#[test]
fn two_readers_of_one_weight() {
    let host = Host {
        twice: true,
        ..Host::default()
    };
    // One weighted operation: a seam per reader.
    let (graph, all) = place(&host, "linear_proj", "l.0.self_attn.q_proj");
    assert_eq!(all.len(), 2);
    assert_eq!(all[0].seam.key, "l.0.self_attn.q_proj#0");
    assert_ne!(all[0].spans[0].ops, all[1].spans[0].ops);
    assert_eq!(
        ops(&graph, &all[1].spans[0]),
        ["linear l.0.self_attn.q_proj"]
    );
    // Several: nothing says which belong together.
    let (_, all) = place(&host, "decoder_ffn", "l.0.mlp");
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].refusal.as_ref().unwrap().code, "slot_read_twice");
}

#[test]
fn a_parameter_the_graph_does_not_read() {
    let catalog = common::catalog();
    let host = Host::default();
    let mut seam = common::seam(&catalog, &host, "linear_proj", "l.0.self_attn.q_proj");
    if let Some(structures_seams::SlotWeight::Stored(a)) = seam.weights.get_mut("w") {
        a.rows = Some((0, 100));
    }
    let graph = common::graph(&host);
    let l =
        structures_seams::locate(&graph, common::spec(&catalog, "linear_proj"), &seam).remove(0);
    let r = l.refusal.unwrap();
    assert_eq!(r.code, "dataflow_edge");
    assert_eq!(r.operand.as_deref(), Some("w"));
    assert!(r
        .found
        .unwrap()
        .contains("the graph reads l.0.self_attn.q_proj.weight"));
}
