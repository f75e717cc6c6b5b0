//! Rules that the built-in structures do not reach, on structures written for the purpose.

#![allow(clippy::unwrap_used)]

use structures_catalog::{Catalog, Spec};
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, Layout, Module, ModuleKind, ModuleTree, OpKind, ParamRef,
    ValueId,
};
use structures_seams::{
    discover, locate, locate_anchored, seam_from_binding, BoundSeam, Seam, SlotWeight, Source,
    WeightAddress,
};

const HEAD: &str = "
version: 1
gates: {parity: [cosine]}
";

fn spec(body: &str) -> Spec {
    let text = format!("{HEAD}{body}");
    let name = body.lines().find_map(|l| l.strip_prefix("name: ")).unwrap();
    let catalog = Catalog::builtin()
        .unwrap()
        .with_document(name, "own.yaml", &text)
        .unwrap();
    catalog.get(name).unwrap().clone()
}

fn sizes(last: usize) -> Vec<Dim> {
    vec![Dim::Symbol("T".into()), Dim::Size(last)]
}

fn linear(b: &mut GraphBuilder, path: &str, x: ValueId, out: usize, inside: usize) -> ValueId {
    let param = ParamRef {
        path: path.into(),
        name: "weight".into(),
        rows: None,
    };
    let w = b.param(param, &[out, inside], Layout::OutIn);
    b.op(
        OpKind::Linear,
        path,
        "y",
        &[Some(x), Some(w)],
        &[],
        sizes(out),
    )
}

fn tree(linears: &[(&str, usize, usize)]) -> ModuleTree {
    let modules = linears.iter().map(|(path, out, inside)| {
        let mut m = Module {
            path: (*path).into(),
            kind: Some(ModuleKind::Linear),
            ..Module::default()
        };
        let info = structures_graph::tree::ParamInfo {
            dims: vec![*out, *inside],
            dtype: "f32".into(),
        };
        m.params.insert("weight".into(), info);
        m
    });
    ModuleTree::new("own", modules.collect())
}

fn only(tree: &ModuleTree, spec: &Spec) -> Seam {
    let mut found = discover(tree, &[spec]);
    assert_eq!(found.seams.len(), 1, "{:?}", found.refused);
    found.seams.remove(0)
}

const TWO_STEP: &str = "
name: two_step
boundary:
  inputs: [{name: x, dims: [M, D]}, {name: r, dims: [M, D]}]
  outputs: [{name: y, dims: [M, D]}, {name: z, dims: [M, D]}]
weights: {w_0: [D, D], w_1: [D, D]}
points: []
slots:
  at: module
  roles: {one: one, two: two}
  dims: {D: one.in}
  weights: {w_0: {from: one.weight, layout: out_in}, w_1: {from: two.weight, layout: out_in}}
dataflow:
  spans: {both: {in: [x, r], out: [y, z]}}
  ops:
    - {let: y, op: linear, in: [x, w_0]}
    - {let: s, op: add, in: [y, r]}
    - {let: z, op: linear, in: [s, w_1]}
";

/// `y` is an output, so it may be read outside; what comes back from there may not.
#[test]
fn a_path_that_leaves_and_comes_back_is_refused() {
    let spec = spec(TWO_STEP);
    let seam = only(&tree(&[("m.one", 8, 8), ("m.two", 8, 8)]), &spec);
    let graph = |back: bool| {
        let mut b = GraphBuilder::new("t");
        let x = b.input("x", sizes(8));
        let y = linear(&mut b, "m.one", x, 8, 8);
        let kind = [("kind", AttrValue::Word("silu".into()))];
        let from = if back { y } else { x };
        let r = b.op(OpKind::Act, "outside", "r", &[Some(from)], &kind, sizes(8));
        let s = b.op(OpKind::Add, "m", "s", &[Some(y), Some(r)], &[], sizes(8));
        let z = linear(&mut b, "m.two", s, 8, 8);
        b.output("y", y);
        b.output("z", z);
        b.finish()
    };
    let good = graph(false);
    let l = locate(&good, &spec, &seam).remove(0);
    assert_eq!(l.spans.len(), 1, "{:?}", l.fallen);
    let bad = graph(true);
    let r = locate(&bad, &spec, &seam).remove(0).refusal.unwrap();
    assert_eq!(r.code, "span_not_convex");
    assert_eq!(r.host_path.as_deref(), Some("outside"));
}

#[test]
fn a_size_that_contradicts_a_symbol_is_refused() {
    let spec = spec(TWO_STEP);
    let tree = tree(&[("m.one", 8, 8), ("m.two", 8, 8)]);
    let seam = only(&tree, &spec);
    let mut b = GraphBuilder::new("t");
    let x = b.input("x", sizes(8));
    let r = b.input("r", sizes(4));
    let y = linear(&mut b, "m.one", x, 8, 8);
    let s = b.op(OpKind::Add, "m", "s", &[Some(y), Some(r)], &[], sizes(8));
    let z = linear(&mut b, "m.two", s, 8, 8);
    b.output("y", y);
    b.output("z", z);
    let refusal = locate(&b.finish(), &spec, &seam).remove(0).refusal.unwrap();
    assert_eq!(refusal.code, "dims_inconsistent");
    assert_eq!(
        (refusal.expected.as_deref(), refusal.found.as_deref()),
        (Some("D = 8"), Some("4"))
    );
    // And in a tree, where the second weight has another width.
    let found = discover(&self::tree(&[("m.one", 8, 8), ("m.two", 8, 9)]), &[&spec]);
    assert!(found.seams.is_empty());
    assert_eq!(found.refused[0].code, "dims_inconsistent");
}

#[test]
fn operations_can_be_read_in_one_place_only() {
    // A weight that is a computed tensor is no slot.
    let spec = spec(TWO_STEP);
    let seam = only(&tree(&[("m.one", 8, 8), ("m.two", 8, 8)]), &spec);
    let mut b = GraphBuilder::new("t");
    let x = b.input("x", sizes(8));
    let r = b.input("r", sizes(8));
    let y = linear(&mut b, "m.one", x, 8, 8);
    let s = b.op(OpKind::Add, "m", "s", &[Some(y), Some(r)], &[], sizes(8));
    let z = b.op(
        OpKind::Linear,
        "m.two",
        "y",
        &[Some(s), Some(x)],
        &[],
        sizes(8),
    );
    b.output("y", y);
    b.output("z", z);
    let refusal = locate(&b.finish(), &spec, &seam).remove(0).refusal.unwrap();
    assert_eq!(
        (refusal.code.as_str(), refusal.operand.as_deref()),
        ("dataflow_edge", Some("w_1"))
    );
}

const SIDES: &str = "
name: sides
boundary:
  inputs: [{name: x, dims: [M, D]}]
  outputs: [{name: out, dims: [M, D]}]
variants: {side: {host: true, values: [left, right]}}
weights: {w: [D, D]}
points: []
slots:
  at: module
  roles: {one: one}
  dims: {D: one.in}
  weights: {w: {from: one.weight, layout: out_in}}
dataflow:
  spans: {all: {in: [x], out: [out]}}
  ops:
    - {let: y, op: linear, in: [x, w]}
    - {let: out, op: act, in: [y], attrs: {kind: silu}, when: {side: left}}
    - {let: out, op: scale, in: [y], when: {side: right}}
";

/// Two values hold, neither contains the other, and nobody knows which.
#[test]
fn an_axis_nothing_decides_is_ambiguous() {
    let spec = spec(SIDES);
    let mut seam = only(&tree(&[("m.one", 8, 8)]), &spec);
    let mut b = GraphBuilder::new("t");
    let x = b.input("x", sizes(8));
    let y = linear(&mut b, "m.one", x, 8, 8);
    let kind = [("kind", AttrValue::Word("silu".into()))];
    let a = b.op(OpKind::Act, "m", "a", &[Some(y)], &kind, sizes(8));
    let s = b.op(OpKind::Scale, "m", "s", &[Some(y)], &[], sizes(8));
    b.output("a", a);
    b.output("s", s);
    // The linear's result is read on both sides: interior to both.
    let graph = b.finish();
    assert_eq!(
        locate(&graph, &spec, &seam)[0]
            .refusal
            .as_ref()
            .unwrap()
            .code,
        "interior_read_outside"
    );
    // As an output it may be.
    let text = SIDES.replace("{in: [x], out: [out]}", "{in: [x], out: [y, out]}");
    let text = text.replace("outputs: [", "outputs: [{name: y, dims: [M, D]}, ");
    let spec = self::spec(&text);
    let l = locate(&graph, &spec, &seam).remove(0);
    let r = l.refusal.unwrap();
    assert_eq!(r.code, "axis_ambiguous");
    assert_eq!(r.found.as_deref(), Some("side = left; side = right"));
    // What the seam knows decides.
    seam.variant.insert("side".into(), "right".into());
    let l = locate(&graph, &spec, &seam).remove(0);
    assert_eq!(l.spans[0].axes["side"], "right");
}

const CORE: &str = "
name: core
boundary:
  inputs: [{name: q, dims: [B, H, Sq, D]}, {name: k, dims: [B, Hkv, Skv, D]}, {name: v, dims: [B, Hkv, Skv, D]}, {name: mask, dims: [B, 1, Sq, Skv], optional: true}, {name: kv_len, dims: [], optional: true}]
  outputs: [{name: out, dims: [B, Sq, H, D]}]
variants: {kv_cadence: {host: false, values: [per_call, static_prefix], default: per_call}}
weights: {}
points: [q, k, v, mask]
slots: {at: graph}
dataflow:
  spans: {core: {in: [q, k, v, mask, kv_len], out: [out]}}
  ops: [{let: out, op: attention, in: [q, k, v, mask, kv_len], attrs: {scale: $scale, causal: $causal, window: $window}, anchor: true}]
";

#[test]
fn a_structure_without_slots_is_found_by_its_anchor() {
    let spec = spec(CORE);
    let graph = |cap: Option<f64>| -> Graph {
        let mut b = GraphBuilder::new("t");
        let lead = |d: usize| {
            let mut v: Vec<Dim> = ["B", "H", "S"].map(|s| Dim::Symbol(s.into())).to_vec();
            v.push(Dim::Size(d));
            v
        };
        let q = b.input("q", lead(64));
        let k = b.input("k", lead(64));
        let mut attrs = vec![("causal", AttrValue::Flag(true))];
        if let Some(cap) = cap {
            attrs.push(("softcap", AttrValue::Float(cap)));
        }
        for layer in 0..2 {
            let at = format!("l.{layer}.attn");
            let o = b.op(
                OpKind::Attention,
                &at,
                "o",
                &[Some(q), Some(k), Some(k)],
                &attrs,
                lead(64),
            );
            b.output(&at, o);
        }
        b.finish()
    };
    let g = graph(None);
    let all = locate_anchored(&g, &spec);
    assert_eq!(all.len(), 2);
    for (layer, l) in all.iter().enumerate() {
        assert_eq!(l.seam.path, format!("l.{layer}.attn"));
        assert_eq!((l.seam.layer, l.seam.source), (layer as i64, Source::Graph));
        assert_eq!(l.seam.variant["kv_cadence"], "per_call");
        let span = &l.spans[0];
        assert_eq!(span.inputs.iter().filter(|(_, v)| v.is_none()).count(), 2);
        assert_eq!(span.params["scale"], AttrValue::Float(0.125));
        assert_eq!(span.params["causal"], AttrValue::Flag(true));
        assert_eq!(span.params["window"], AttrValue::Absent);
        assert_eq!(span.points.len(), 3);
        assert_eq!(span.dims["D"], 64);
    }
    let g = graph(Some(50.0));
    let r = locate_anchored(&g, &spec)[0].refusal.clone().unwrap();
    assert_eq!(
        (r.code.as_str(), r.operand.as_deref()),
        ("attr_unmatched", Some("softcap"))
    );
}

const HEADS: &str = "
name: head
boundary:
  inputs: [{name: x, dims: [M, K]}]
  outputs: [{name: y, dims: [M, N]}]
variants: {bias: {host: true, values: [none, add]}}
weights: {w: [K, N], b: {dims: [N], optional: true}}
points: [x]
slots:
  at: module
  roles: {p: p}
  axis: {bias: \"if has(p.bias) then 'add' else 'none'\"}
  weights: {w: {from: p.weight, layout: out_in}, b: p.bias}
  emit: {path: p, parent: self}
dataflow:
  spans: {all: {in: [x], out: [y]}}
  ops:
    - {let: p, op: linear, in: [x, w]}
    - {let: y, op: bias, in: [p, b], needs: [b], when: {bias: add}}
    - {let: y, op: scale, in: [p], when: {bias: none}, needs: [b]}
";

#[test]
fn a_binding_names_a_seam_no_tree_walk_finds() {
    let spec = spec(HEADS);
    let tree = tree(&[("model.lm_head", 32, 8)]);
    let address = |path: &str| WeightAddress {
        path: path.into(),
        name: "weight".into(),
        layout: Layout::OutIn,
        rows: None,
        reshape: None,
        hint: false,
    };
    let bound = |path: &str| BoundSeam {
        path: "model.lm_head".into(),
        weights: [("w".to_string(), SlotWeight::Stored(address(path)))]
            .into_iter()
            .collect(),
        dims: Default::default(),
        variant: Default::default(),
    };
    let seam = seam_from_binding(&tree, &spec, &bound("model.lm_head")).unwrap();
    assert_eq!((seam.dims["K"], seam.dims["N"]), (8, 32));
    assert_eq!(
        (seam.source, seam.layer, seam.parent.as_str()),
        (Source::Binding, -1, "model")
    );
    let missing = seam_from_binding(&tree, &spec, &bound("model.nothing")).unwrap_err();
    assert_eq!(missing.code, "slot_missing");
    let mut wide = bound("model.lm_head");
    wide.dims.insert("N".into(), 33);
    assert_eq!(
        seam_from_binding(&tree, &spec, &wide).unwrap_err().code,
        "dims_inconsistent"
    );
    let mut b = GraphBuilder::new("t");
    let x = b.input("x", sizes(8));
    let y = linear(&mut b, "model.lm_head", x, 32, 8);
    b.output("logits", y);
    let graph = b.finish();
    let l = locate(&graph, &spec, &seam).remove(0);
    assert_eq!(l.spans.len(), 1, "{:?}", l.fallen);
    assert!(matches!(l.seam.weights["w"], SlotWeight::Stored(_)));
}

const ADD_NORM: &str = "
name: add_norm
boundary:
  inputs: [{name: x, dims: [M, D]}, {name: branch, dims: [M, D]}]
  outputs: [{name: sum, dims: [M, D]}, {name: normed, dims: [M, D]}]
weights: {w: [D]}
points: []
slots:
  at: module
  roles: {}
  checks: [{that: \"self.kind == 'rms_norm'\", else: pass}]
  dims: {D: 'self.weight.dims[0]'}
  weights: {w: self.weight}
  emit: {path: self, parent: parent}
dataflow:
  spans: {fused: {in: [x, branch], out: [sum, normed]}}
  ops:
    - {let: sum, op: add, in: [x, branch]}
    - {let: normed, op: rms_norm, in: [sum, w], attrs: {eps: $eps, weight: direct}}
";

#[test]
fn a_sum_of_two_inputs_that_nothing_tells_apart_takes_the_written_order() {
    let text = ADD_NORM;
    let spec_once = spec(text);
    let mut norm = Module {
        path: "norm".into(),
        kind: Some(ModuleKind::RmsNorm),
        ..Module::default()
    };
    let info = structures_graph::tree::ParamInfo {
        dims: vec![8],
        dtype: "f32".into(),
    };
    norm.params.insert("weight".into(), info);
    let tree = ModuleTree::new("own", vec![norm]);
    let mut b = GraphBuilder::new("t");
    let (x, branch) = (b.input("x", sizes(8)), b.input("branch", sizes(8)));
    let add = |b: &mut GraphBuilder, inputs: &[Option<ValueId>]| {
        b.op(OpKind::Add, "", "sum", inputs, &[], sizes(8))
    };
    let sum = add(&mut b, &[Some(x), Some(branch)]);
    let param = ParamRef {
        path: "norm".into(),
        name: "weight".into(),
        rows: None,
    };
    let w = b.param(param, &[8], Layout::InOut);
    let attrs = [
        ("eps", AttrValue::Float(1e-5)),
        ("weight", AttrValue::Word("direct".into())),
    ];
    let inputs = [Some(sum), Some(w)];
    let n = b.op(OpKind::RmsNorm, "norm", "n", &inputs, &attrs, sizes(8));
    let y = add(&mut b, &[Some(sum), Some(n)]);
    b.output("y", y);
    let graph = b.finish();
    let l = locate(&graph, &spec_once, &only(&tree, &spec_once)).remove(0);
    assert!(l.refusal.is_none(), "{:?}", l.refusal);
    let roots: Vec<_> = l.spans[0].inputs.iter().map(|(_, v)| v.unwrap()).collect();
    assert_eq!(roots, [x, branch]);

    // Read twice by the structure, the two are no longer alike: nothing is guessed.
    let twice = text.replace(
        "  ops:\n",
        "  ops:\n    - {let: extra, op: scale, in: [x], attrs: {by: 2.0}}\n",
    );
    let twice = twice.replace("out: [sum, normed]", "out: [sum, normed, extra]");
    let twice = twice.replace("outputs: [", "outputs: [{name: extra, dims: [M, D]}, ");
    let spec_twice = spec(&twice);
    let l = locate(&graph, &spec_twice, &only(&tree, &spec_twice)).remove(0);
    let refusal = l.refusal.unwrap();
    assert_eq!(refusal.code, "dataflow_edge", "{refusal:?}");
}
