//! Structures that no tree shows: found in host graphs by what an operation is and by what stands around it.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use structures_catalog::Catalog;
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, Layout, OpKind, ParamRef, StateRegion, ValueId,
};
use structures_models::Description;
use structures_seams::{Located, LocatedSpan, Locator, Refusal};

const D: usize = 96;
const HEAD: usize = 16;

/// Attention layers of a host, with one knob for each thing that may differ.
#[derive(Clone)]
struct Host {
    layers: usize,
    heads: usize,
    kv_heads: usize,
    /// Keys and values go through state regions.
    cached: bool,
    /// Norms of queries and of keys: dims they run over.
    norms: Option<(usize, usize)>,
    offset: bool,
    key_eps: f64,
    /// Layout of the rotation of queries and of keys.
    layouts: (&'static str, &'static str),
    rotary: Option<usize>,
    /// Query, key and value come from one biased projection.
    packed: bool,
    softcap: Option<f64>,
    /// What the rotation of the queries reads is also read elsewhere.
    spied: bool,
}

fn plain() -> Host {
    Host {
        layers: 2,
        heads: 6,
        kv_heads: 2,
        cached: true,
        norms: None,
        offset: false,
        key_eps: 1e-6,
        layouts: ("half", "half"),
        rotary: None,
        packed: false,
        softcap: None,
        spied: false,
    }
}

fn normed() -> Host {
    Host {
        norms: Some((1, 1)),
        ..plain()
    }
}

fn packed() -> Host {
    Host {
        packed: true,
        cached: false,
        ..plain()
    }
}

fn symbols(lead: &[&str], sizes: &[usize]) -> Vec<Dim> {
    let lead = lead.iter().map(|s| Dim::Symbol((*s).into()));
    lead.chain(sizes.iter().map(|n| Dim::Size(*n))).collect()
}

fn ints(of: &[i64]) -> AttrValue {
    AttrValue::List(of.iter().copied().map(AttrValue::Int).collect())
}

struct Layer<'a> {
    b: &'a mut GraphBuilder,
    host: &'a Host,
    at: String,
    tables: (ValueId, ValueId),
}

impl Layer<'_> {
    fn param(&mut self, module: &str, name: &str, dims: &[usize]) -> ValueId {
        let param = ParamRef {
            path: format!("{}.{module}", self.at),
            name: name.into(),
            rows: None,
        };
        let layout = match dims.len() {
            2 => Layout::OutIn,
            _ => Layout::InOut,
        };
        self.b.param(param, dims, layout)
    }

    fn op(
        &mut self,
        kind: OpKind,
        label: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, AttrValue)],
        dims: Vec<Dim>,
    ) -> ValueId {
        let at = self.at.clone();
        self.b.op(kind, &at, label, inputs, attrs, dims)
    }

    fn linear(&mut self, module: &str, x: ValueId, out: usize) -> ValueId {
        let w = self.param(module, "weight", &[out, D]);
        let dims = symbols(&["B", "T"], &[out]);
        self.op(OpKind::Linear, module, &[Some(x), Some(w)], &[], dims)
    }

    fn split_heads(&mut self, side: &str, x: ValueId, heads: usize) -> ValueId {
        let label = format!("{side}_heads");
        let attrs = [("dims", ints(&[0, 0, heads as i64, HEAD as i64]))];
        let dims = symbols(&["B", "T"], &[heads, HEAD]);
        self.op(OpKind::Reshape, &label, &[Some(x)], &attrs, dims)
    }

    fn turned(&mut self, side: &str, x: ValueId, heads: usize) -> ValueId {
        let host = self.host.clone();
        let query = side == "q";
        let dims = symbols(&["B", "T"], &[heads, HEAD]);
        let mut x = x;
        if let Some((q, k)) = host.norms {
            let axes = if query { q } else { k };
            let width = if axes == 2 { heads * HEAD } else { HEAD };
            let w = self.param(&format!("{side}_norm"), "weight", &[width]);
            let eps = if query { 1e-6 } else { host.key_eps };
            let mut attrs = vec![("eps", AttrValue::Float(eps))];
            if axes == 2 {
                attrs.push(("axes", AttrValue::Int(2)));
            }
            if host.offset {
                attrs.push(("weight", AttrValue::Word("offset".into())));
            }
            let label = format!("{side}_normed");
            let inputs = [Some(x), Some(w)];
            x = self.op(OpKind::RmsNorm, &label, &inputs, &attrs, dims.clone());
        }
        if host.spied && query {
            let spy = self.op(OpKind::Scale, "spy", &[Some(x)], &[], dims.clone());
            self.b.output(&format!("{}.spy", self.at), spy);
        }
        let layout = if query {
            host.layouts.0
        } else {
            host.layouts.1
        };
        let mut attrs = vec![("layout", AttrValue::Word(layout.into()))];
        if let Some(r) = host.rotary {
            attrs.push(("rotary", AttrValue::Int(r as i64)));
        }
        let (cos, sin) = self.tables;
        let inputs = [Some(x), Some(cos), Some(sin)];
        self.op(OpKind::Rope, &format!("{side}_rope"), &inputs, &attrs, dims)
    }

    fn first(&mut self, side: &str, x: ValueId, heads: usize) -> ValueId {
        let attrs = [("perm", ints(&[0, 2, 1, 3]))];
        let mut dims = symbols(&["B"], &[heads]);
        dims.extend(symbols(&["T"], &[HEAD]));
        let label = format!("{side}_first");
        self.op(OpKind::Transpose, &label, &[Some(x)], &attrs, dims)
    }

    fn kept(&mut self, side: &str, x: ValueId) -> ValueId {
        if !self.host.cached {
            return x;
        }
        let heads = self.host.kv_heads;
        let name = format!("{}.{side}", self.at);
        let region = self.b.state(StateRegion::growing(name, heads, HEAD));
        let mut dims = symbols(&["B"], &[heads]);
        dims.extend(symbols(&["S"], &[HEAD]));
        let label = format!("{side}_all");
        let inputs = [Some(x), Some(region)];
        self.op(OpKind::KvAppend, &label, &inputs, &[], dims)
    }

    fn run(&mut self, x: ValueId) -> ValueId {
        let Host {
            heads, kv_heads, ..
        } = *self.host;
        let sides = [("q", heads), ("k", kv_heads), ("v", kv_heads)];
        let parts: Vec<ValueId> = if self.host.packed {
            let width = (heads + 2 * kv_heads) * HEAD;
            let p = self.linear("qkv", x, width);
            let bias = self.param("qkv", "bias", &[width]);
            let dims = symbols(&["B", "T"], &[width]);
            let z = self.op(OpKind::Bias, "biased", &[Some(p), Some(bias)], &[], dims);
            let sizes: Vec<i64> = sides.iter().map(|(_, n)| (n * HEAD) as i64).collect();
            let results = sides.map(|(s, n)| (s, symbols(&["B", "T"], &[n * HEAD])));
            let at = self.at.clone();
            let attrs = [("sizes", ints(&sizes))];
            self.b
                .ops(OpKind::Split, &at, &[Some(z)], &attrs, results.to_vec())
        } else {
            sides
                .iter()
                .map(|(s, n)| self.linear(&format!("{s}_proj"), x, n * HEAD))
                .collect()
        };
        let mut operands = Vec::new();
        for ((side, n), part) in sides.into_iter().zip(parts) {
            let mut y = self.split_heads(side, part, n);
            if side != "v" {
                y = self.turned(side, y, n);
            }
            y = self.first(side, y, n);
            if side != "q" {
                y = self.kept(side, y);
            }
            operands.push(Some(y));
        }
        let mut attrs = vec![("causal", AttrValue::Flag(true))];
        if let Some(c) = self.host.softcap {
            attrs.push(("softcap", AttrValue::Float(c)));
        }
        let dims = symbols(&["B", "T"], &[heads, HEAD]);
        let o = self.op(OpKind::Attention, "o", &operands, &attrs, dims);
        let attrs = [("dims", ints(&[0, 0, D as i64]))];
        let dims = symbols(&["B", "T"], &[D]);
        let flat = self.op(OpKind::Reshape, "flat", &[Some(o)], &attrs, dims.clone());
        self.op(OpKind::Add, "sum", &[Some(x), Some(flat)], &[], dims)
    }
}

fn graph(host: &Host) -> Graph {
    let mut b = GraphBuilder::new("prefill");
    let mut x = b.input("x", symbols(&["B", "T"], &[D]));
    let table = symbols(&["T"], &[host.rotary.unwrap_or(HEAD) / 2]);
    let tables = (b.input("cos", table.clone()), b.input("sin", table));
    for i in 0..host.layers {
        x = Layer {
            b: &mut b,
            host,
            at: format!("l.{i}.attn"),
            tables,
        }
        .run(x);
    }
    b.output("out", x);
    b.finish()
}

fn place(graph: &Graph, structure: &str) -> Vec<Located> {
    let catalog = Catalog::builtin().unwrap();
    Locator::new(graph).locate_anchored(catalog.get(structure).unwrap())
}

/// The only span of every layer.
fn spans(host: &Host, structure: &str) -> (Graph, Vec<LocatedSpan>) {
    let graph = graph(host);
    let all = place(&graph, structure);
    assert_eq!(all.len(), host.layers);
    let spans = all.into_iter().enumerate().map(|(i, mut l)| {
        assert!(l.refusal.is_none(), "{:?}", l.refusal);
        assert_eq!(l.seam.path, format!("l.{i}.attn"));
        assert_eq!(l.seam.layer, i as i64);
        assert_eq!(l.spans.len(), 1);
        l.spans.remove(0)
    });
    let spans = spans.collect();
    (graph, spans)
}

fn refusals(host: &Host, structure: &str) -> Vec<Refusal> {
    let all = place(&graph(host), structure).into_iter();
    all.map(|l| l.refusal.unwrap_or_else(|| panic!("{} holds", l.seam.path)))
        .collect()
}

/// Both layers are refused with this code about this operand.
fn refused(host: &Host, structure: &str, code: &str, operand: &str) {
    let all = refusals(host, structure);
    assert_eq!(all.len(), host.layers);
    for r in all {
        let found = (r.code.as_str(), r.operand.as_deref());
        assert_eq!(found, (code, Some(operand)), "{r:?}");
    }
}

fn names(graph: &Graph, of: &[(String, Option<ValueId>)]) -> Vec<String> {
    let name = |v: &Option<ValueId>| v.map_or("-".into(), |v| graph.value(v).name.clone());
    of.iter().map(|(n, v)| format!("{n}={}", name(v))).collect()
}

fn kinds(graph: &Graph, span: &LocatedSpan) -> Vec<&'static str> {
    let real = span.ops.iter().map(|op| graph.op(*op).kind);
    real.filter(|k| !k.is_view()).map(|k| k.name()).collect()
}

fn number(span: &LocatedSpan, param: &str) -> f64 {
    let value = span.params.get(param);
    value
        .and_then(AttrValue::as_f64)
        .unwrap_or_else(|| panic!("{param}: {value:?}"))
}

#[test]
fn attention_reads_its_cache_as_the_region_holds_it() {
    let (graph, spans) = spans(&plain(), "attention_core");
    let core = &spans[1];
    assert_eq!(
        names(&graph, &core.inputs),
        [
            "q=l.1.attn.q_first",
            "k=l.1.attn.k_all",
            "v=l.1.attn.v_all",
            "mask=-",
            "kv_len=-"
        ]
    );
    assert_eq!(names(&graph, &core.outputs), ["out=l.1.attn.o"]);
    assert_eq!(kinds(&graph, core), ["attention"]);
    assert_eq!((core.dims["H"], core.dims["Hkv"]), (6, 2));
    assert_eq!(core.dims["D"], HEAD as u64);
    assert_eq!(number(core, "scale"), 0.25);
    assert_eq!(core.params["causal"], AttrValue::Flag(true));
    assert_eq!(core.params["window"], AttrValue::Absent);
    assert_eq!(core.points.len(), 3);
}

#[test]
fn a_soft_cap_is_named() {
    let host = Host {
        softcap: Some(30.0),
        ..plain()
    };
    refused(&host, "attention_core", "attr_unmatched", "softcap");
    // It is nobody else's business.
    let capped = Host {
        softcap: Some(30.0),
        ..normed()
    };
    spans(&capped, "qk_norm_rope");
}

#[test]
fn norm_and_rotation_are_found_around_attention() {
    let (graph, spans) = spans(&normed(), "qk_norm_rope");
    for (i, span) in spans.iter().enumerate() {
        let here = |what: &str| format!("l.{i}.attn.{what}");
        assert_eq!(
            kinds(&graph, span),
            ["rms_norm", "rope", "rms_norm", "rope"]
        );
        // Which is the query's, the operands of attention say, through transpose and cache.
        assert_eq!(
            names(&graph, &span.inputs),
            [
                format!("q={}", here("q_heads")),
                format!("k={}", here("k_heads")),
                "cos=cos".into(),
                "sin=sin".into()
            ]
        );
        assert_eq!(
            names(&graph, &span.outputs),
            [
                format!("q_after_rope={}", here("q_rope")),
                format!("k_after_rope={}", here("k_rope"))
            ]
        );
        let slot = |s: &str| span.weights[s].stored().unwrap().path.clone();
        assert_eq!(slot("q_norm_weight"), here("q_norm"));
        assert_eq!(slot("k_norm_weight"), here("k_norm"));
        assert_eq!(
            (span.dims["Hq"], span.dims["Hkv"], span.dims["D"]),
            (6, 2, HEAD as u64)
        );
        assert_eq!(number(span, "rotary_dim"), HEAD as f64);
        assert_eq!(number(span, "eps"), 1e-6);
        let axes: Vec<&str> = span.axes.values().map(String::as_str).collect();
        assert_eq!(axes, ["direct", "per_head", "half", "full"]);
        assert_eq!(span.points.len(), 2);
    }
}

#[test]
fn every_variant_of_norm_and_rotation_is_a_fact_of_the_graph() {
    for axes in [1, 2] {
        for layout in ["half", "interleaved"] {
            for rotary in [None, Some(8)] {
                for offset in [false, true] {
                    let host = Host {
                        norms: Some((axes, axes)),
                        layouts: (layout, layout),
                        rotary,
                        offset,
                        // Equal heads: nothing but attention tells the query from the key.
                        heads: 6,
                        kv_heads: 6,
                        ..plain()
                    };
                    let (graph, spans) = spans(&host, "qk_norm_rope");
                    let span = &spans[1];
                    let want = [
                        ("normalization_scope", ["per_head", "projection"][axes - 1]),
                        ("rope_layout", layout),
                        (
                            "rotary_extent",
                            if rotary.is_some() { "partial" } else { "full" },
                        ),
                        ("norm_weight_mode", if offset { "offset" } else { "direct" }),
                    ];
                    for (axis, value) in want {
                        assert_eq!(span.axes[axis], value);
                    }
                    assert_eq!(number(span, "rotary_dim"), rotary.unwrap_or(HEAD) as f64);
                    assert_eq!(
                        names(&graph, &span.outputs)[0],
                        "q_after_rope=l.1.attn.q_rope"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_no_norm_and_rotation_of_one_kind_is_refused_by_name() {
    // Without norms it is another family: nothing is recorded.
    assert!(refusals(&plain(), "qk_norm_rope").is_empty());
    let spied = Host {
        spied: true,
        ..normed()
    };
    for (i, r) in refusals(&spied, "qk_norm_rope").iter().enumerate() {
        assert_eq!(r.code, "interior_read_outside");
        assert_eq!(r.operand, Some(format!("l.{i}.attn.q_normed")));
        assert!(r.reason.contains("scale at"), "{}", r.reason);
    }
    let other_eps = Host {
        key_eps: 1e-5,
        ..normed()
    };
    refused(&other_eps, "qk_norm_rope", "attr_unmatched", "eps");
    let mixed = Host {
        layouts: ("half", "interleaved"),
        ..normed()
    };
    refused(&mixed, "qk_norm_rope", "attr_unmatched", "layout");
    let scopes = Host {
        norms: Some((1, 2)),
        ..normed()
    };
    refused(&scopes, "qk_norm_rope", "attr_unmatched", "axes");
}

#[test]
fn a_packed_projection_is_cut_and_turned() {
    for (kv_heads, layout) in [(2, "gqa"), (1, "gqa"), (6, "equal")] {
        let host = Host {
            kv_heads,
            ..packed()
        };
        let (graph, spans) = spans(&host, "qkv_rope");
        let span = &spans[1];
        assert_eq!(kinds(&graph, span), ["bias", "split", "rope", "rope"]);
        assert_eq!(names(&graph, &span.inputs)[0], "packed_qkv=l.1.attn.qkv");
        assert_eq!(
            names(&graph, &span.outputs),
            [
                "q_after_rope=l.1.attn.q_rope",
                "k_after_rope=l.1.attn.k_rope",
                "v=l.1.attn.v"
            ]
        );
        assert_eq!(span.axes["head_layout"], layout);
        assert_eq!(number(span, "q_heads"), 6.0);
        assert_eq!(number(span, "kv_heads"), kv_heads as f64);
        assert_eq!(number(span, "head_dim"), HEAD as f64);
        let bias = span.weights["qkv_bias"].stored().unwrap();
        assert_eq!(
            (bias.path.as_str(), bias.name.as_str()),
            ("l.1.attn.qkv", "bias")
        );
    }
    // Queries, keys and values that are not packed are another family.
    assert!(refusals(&plain(), "qkv_rope").is_empty());
}

#[test]
fn what_is_no_rotated_pack_is_refused_by_name() {
    let interleaved = Host {
        layouts: ("interleaved", "interleaved"),
        ..packed()
    };
    refused(&interleaved, "qkv_rope", "attr_unmatched", "layout");
    let partial = Host {
        rotary: Some(8),
        ..packed()
    };
    refused(&partial, "qkv_rope", "attr_unmatched", "rotary");
    let spied = Host {
        spied: true,
        ..packed()
    };
    refused_inside(&spied);
    // A norm between the cut and the rotation is another structure.
    let between = Host {
        norms: Some((1, 1)),
        ..packed()
    };
    refused(&between, "qkv_rope", "edge_conflict", "q");
}

/// The third of the queries has a reader outside, through the view that cuts it into heads.
fn refused_inside(host: &Host) {
    let all = refusals(host, "qkv_rope");
    assert_eq!(all.len(), host.layers);
    for (i, r) in all.iter().enumerate() {
        assert_eq!(r.code, "interior_read_outside");
        assert_eq!(r.operand, Some(format!("l.{i}.attn.q")));
    }
}

fn recurrence(l2: bool, stateful: bool, attrs: &[(&str, AttrValue)]) -> Graph {
    let mut b = GraphBuilder::new("prefill");
    let heads = |d: &[usize]| symbols(&["B", "S"], d);
    let q = b.input("q", heads(&[4, 8]));
    let k = b.input("k", heads(&[4, 8]));
    let v = b.input("v", heads(&[4, 8]));
    let g = b.input("g", heads(&[4]));
    let beta = b.input("beta", heads(&[4]));
    let state = stateful.then(|| b.input("state", symbols(&["B"], &[4, 8, 8])));
    let mut all = vec![("l2", AttrValue::Flag(l2))];
    all.extend(attrs.iter().cloned());
    let operands = [Some(q), Some(k), Some(v), Some(g), Some(beta), state];
    let results = vec![
        ("out", heads(&[4, 8])),
        ("last", symbols(&["B"], &[4, 8, 8])),
    ];
    let made = b.ops(OpKind::GatedDelta, "l.0.delta", &operands, &all, results);
    b.output("out", made[0]);
    b.output("last", made[1]);
    b.finish()
}

#[test]
fn a_recurrence_takes_and_gives_its_state() {
    for l2 in [true, false] {
        for stateful in [true, false] {
            let graph = recurrence(l2, stateful, &[]);
            let l = place(&graph, "gated_delta_core").remove(0);
            assert!(l.refusal.is_none(), "{:?}", l.refusal);
            let span = &l.spans[0];
            let kind = if l2 { "l2_in_kernel" } else { "host" };
            assert_eq!(span.axes["qk_norm"], kind);
            let state = if stateful { "state=state" } else { "state=-" };
            assert_eq!(names(&graph, &span.inputs)[5], state);
            assert_eq!(
                names(&graph, &span.outputs),
                ["out=l.0.delta.out", "final_state=l.0.delta.last"]
            );
            assert_eq!((span.dims["H"], span.dims["D"]), (4, 8));
            assert_eq!(number(span, "l2_eps"), 1e-6);
        }
    }
    let scaled = recurrence(true, true, &[("scale", AttrValue::Float(1.0))]);
    let r = place(&scaled, "gated_delta_core")
        .remove(0)
        .refusal
        .unwrap();
    assert_eq!(
        (r.code.as_str(), r.operand.as_deref()),
        ("attr_unmatched", Some("scale"))
    );
}

fn model(path: &str) -> Description {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Description::open(&root.join(path)).unwrap()
}

#[test]
fn real_models_show_what_they_have() {
    let demo = model("demo/model");
    let layers = place(&demo.graph, "attention_core");
    assert!(layers.len() > 1 && layers.iter().all(|l| l.refusal.is_none()));
    assert!(place(&demo.graph, "qk_norm_rope").is_empty());
    assert!(place(&demo.graph, "qkv_rope").is_empty());

    let qwen = model("tests/fixtures/oracle/e2e/qwen3");
    let cores = place(&qwen.graph, "attention_core");
    let norms = place(&qwen.graph, "qk_norm_rope");
    assert!(cores.len() > 1 && cores.len() == norms.len());
    for l in cores.iter().chain(&norms) {
        assert!(l.refusal.is_none(), "{}: {:?}", l.seam.key, l.refusal);
    }
    let span = &norms[1].spans[0];
    let q = span.weights["q_norm_weight"].stored().unwrap();
    assert!(q.path.ends_with("layers.1.self_attn.q_norm"), "{}", q.path);
    assert_eq!(span.axes["normalization_scope"], "per_head");
    assert_eq!(span.axes["rotary_extent"], "full");
    assert_eq!(span.dims["Hq"] % span.dims["Hkv"], 0);
}

/// A decoder layer is its sublayers, whatever runs inside them, and the sums between.
#[test]
fn a_block_runs_its_sublayers() {
    let catalog = Catalog::builtin().unwrap();
    let spec = catalog.get("decoder_block").unwrap();
    for path in ["demo/model", "tests/fixtures/oracle/e2e/qwen3"] {
        let model = model(path);
        let found = structures_seams::discover(&model.tree, &[spec]);
        assert!(found.refused.is_empty(), "{:?}", found.refused);
        assert!(found.seams.len() > 1);
        let locator = Locator::new(&model.graph);
        for seam in &found.seams {
            let l = locator.locate(spec, seam).remove(0);
            let spans: Vec<&str> = l.spans.iter().map(|s| s.name.as_str()).collect();
            assert_eq!(
                spans,
                ["block", "attn_residual", "ffn_residual"],
                "{:?}",
                l.fallen
            );
            let block = &l.spans[0];
            assert_eq!(block.axes["residual"], "plain");
            assert_eq!(kinds(&model.graph, &l.spans[1]), ["add"]);
            let modules: Vec<&str> = block
                .ops
                .iter()
                .map(|op| model.graph.op(*op).module.as_str())
                .collect();
            for part in [
                "input_layernorm",
                "self_attn",
                "mlp",
                "post_attention_layernorm",
            ] {
                let part = format!("{}.{part}", seam.path);
                assert!(modules.iter().any(|m| m.starts_with(&part)), "{part}");
            }
            assert!(modules.iter().all(|m| m.starts_with(&seam.path)));
        }
    }
}
