//! Structures of one or a few operations, each placed in a graph that has it, and refused in one that differs, with the
//! edge.

#![allow(clippy::unwrap_used)]

use serde_json::{json, Value};
use structures_catalog::Catalog;
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, Layout, ModuleTree, OpKind, ParamRef, ValueId,
};
use structures_seams::{discover, locate, Located, Refusal};

const D: usize = 512;

fn rows(n: usize) -> Vec<Dim> {
    vec![Dim::Symbol("T".into()), Dim::Size(n)]
}

/// A graph with what it takes to say one thing in a line.
struct Host(GraphBuilder);

impl Host {
    fn new() -> Host {
        Host(GraphBuilder::new("t"))
    }

    fn param(&mut self, path: &str, name: &str, dims: &[usize]) -> ValueId {
        let param = ParamRef {
            path: path.into(),
            name: name.into(),
            rows: None,
        };
        let layout = match dims.len() {
            2 => Layout::OutIn,
            _ => Layout::InOut,
        };
        self.0.param(param, dims, layout)
    }

    fn op(
        &mut self,
        kind: OpKind,
        path: &str,
        of: &[ValueId],
        attrs: &[(&str, AttrValue)],
        n: usize,
    ) -> ValueId {
        let of: Vec<Option<ValueId>> = of.iter().copied().map(Some).collect();
        self.0.op(kind, path, kind.name(), &of, attrs, rows(n))
    }

    fn linear(&mut self, path: &str, x: ValueId, out: usize, inside: usize) -> ValueId {
        let w = self.param(path, "weight", &[out, inside]);
        self.op(OpKind::Linear, path, &[x, w], &[], out)
    }

    fn biased(&mut self, path: &str, x: ValueId, out: usize, inside: usize) -> ValueId {
        let y = self.linear(path, x, out, inside);
        let b = self.param(path, "bias", &[out]);
        self.op(OpKind::Bias, path, &[y, b], &[], out)
    }

    fn end(mut self, out: ValueId) -> Graph {
        self.0.output("out", out);
        self.0.finish()
    }
}

fn eps() -> [(&'static str, AttrValue); 1] {
    [("eps", AttrValue::Float(1e-6))]
}

fn tree(mut modules: Vec<Value>) -> ModuleTree {
    modules.insert(0, json!({"path": "", "class": "Holder"}));
    let classes = json!({
        "Holder": {"forward": [["x", "arg"]], "bases": []},
        "Two": {"forward": [["x", "arg"], ["temb", "arg"]], "bases": []},
        "Linear": {"forward": [["input", "arg"]], "bases": []},
        "LayerNorm": {"forward": [["input", "arg"]], "bases": []},
        "GELU": {"forward": [["input", "arg"]], "bases": []},
        "Conv3d": {"forward": [["input", "arg"]], "bases": []},
    });
    let doc = json!({"model": "hand-made", "modules": modules, "classes": classes});
    ModuleTree::from_dump(doc.to_string()).unwrap()
}

fn linear(path: &str, out: usize, inside: usize, bias: bool) -> Value {
    let mut params = json!({"weight": [[out, inside], "float32"]});
    if bias {
        params["bias"] = json!([[out], "float32"]);
    }
    json!({"path": path, "class": "Linear", "params": params, "attrs": {"in_features": inside, "out_features": out}})
}

fn norm(path: &str) -> Value {
    let params = json!({"weight": [[D], "float32"], "bias": [[D], "float32"]});
    json!({"path": path, "class": "LayerNorm", "params": params, "attrs": {"normalized_shape": [D], "eps": 1e-6}})
}

fn place(tree: &ModuleTree, graph: &Graph, structure: &str) -> Located {
    let catalog = Catalog::builtin().unwrap();
    let spec = catalog.get(structure).unwrap();
    let found = discover(tree, &[spec]);
    assert!(!found.seams.is_empty(), "{:?}", found.refused);
    locate(graph, spec, &found.seams[0]).remove(0)
}

fn spans(l: &Located) -> Vec<&str> {
    assert!(l.refusal.is_none(), "{:?}", l.refusal);
    l.spans.iter().map(|s| s.name.as_str()).collect()
}

fn edge(l: Located) -> Refusal {
    l.refusal
        .unwrap_or_else(|| panic!("holds: {:?}", l.spans.len()))
}

#[test]
fn a_norm() {
    let graph = |kind: OpKind| {
        let mut h = Host::new();
        let x = h.0.input("x", rows(D));
        let (w, b) = (h.param("n", "weight", &[D]), h.param("n", "bias", &[D]));
        let y = match kind {
            OpKind::LayerNorm => h.op(kind, "n", &[x, w, b], &eps(), D),
            kind => {
                let y = h.op(kind, "n", &[x, w], &eps(), D);
                h.op(OpKind::Bias, "n", &[y, b], &[], D)
            }
        };
        h.end(y)
    };
    let tree = tree(vec![norm("n")]);
    let l = place(&tree, &graph(OpKind::LayerNorm), "norm_fused");
    assert_eq!(spans(&l), ["norm"]);
    let r = edge(place(&tree, &graph(OpKind::RmsNorm), "norm_fused"));
    assert_eq!(
        (r.code.as_str(), r.op.as_deref()),
        ("dataflow_edge", Some("layer_norm"))
    );
    assert_eq!(r.operand.as_deref(), Some("w"), "{r:?}");
}

#[test]
fn patches_as_rows() {
    let conv = json!({"path": "v.proj", "class": "Conv3d", "params": {"weight": [[700, 3, 2, 16, 16], "float32"], "bias": [[700], "float32"]},
        "attrs": {"in_channels": 3, "out_channels": 700, "kernel_size": [2, 16, 16], "stride": [2, 16, 16], "padding": [0, 0, 0], "dilation": [1, 1, 1], "groups": 1}});
    let attrs =
        json!({"temporal_patch_size": 2, "patch_size": 16, "in_channels": 3, "embed_dim": 700});
    let tree = tree(vec![
        json!({"path": "v", "class": "Holder", "attrs": attrs}),
        conv,
    ]);
    let graph = |path: &str| {
        let mut h = Host::new();
        let x = h.0.input("x", rows(1536));
        let y = h.biased(path, x, 700, 1536);
        h.end(y)
    };
    let l = place(&tree, &graph("v.proj"), "patch_projection");
    assert_eq!(spans(&l), ["proj"]);
    assert_eq!(l.spans[0].axes["bias"], "add");
    let r = edge(place(&tree, &graph("v.other"), "patch_projection"));
    assert_eq!(
        (r.code.as_str(), r.operand.as_deref()),
        ("dataflow_edge", Some("w"))
    );
}

#[test]
fn a_conditioned_norm() {
    let graph = |parts: usize, order: [usize; 2]| {
        let mut h = Host::new();
        let (x, cond) = (h.0.input("x", rows(D)), h.0.input("cond", rows(64)));
        let style = h.biased("a.dense", cond, parts * D, 64);
        let labels: Vec<String> = (0..parts).map(|i| format!("p{i}")).collect();
        let results = labels.iter().map(|l| (l.as_str(), rows(D))).collect();
        let cut = [("n", AttrValue::Int(parts as i64))];
        let p = h.0.ops(OpKind::Chunk, "a", &[Some(style)], &cut, results);
        let w = h.param("a.norm", "weight", &[D]);
        let n = h.op(OpKind::RmsNorm, "a.norm", &[x, w], &eps(), D);
        let y = h.op(
            OpKind::Modulate,
            "a",
            &[n, p[order[0]], p[order[1]]],
            &[],
            D,
        );
        if parts == 3 {
            h.0.output("gate", p[2]);
        }
        h.end(y)
    };
    let modules = vec![
        json!({"path": "a", "class": "Two"}),
        linear("a.dense", 3 * D, 64, true),
        json!({"path": "a.norm", "class": "Holder", "params": {"weight": [[D], "float32"]}, "attrs": {"eps": 1e-6}}),
    ];
    let tree = tree(modules);
    let l = place(&tree, &graph(3, [0, 1]), "adaln_producer");
    assert_eq!(spans(&l)[0], "fused", "{:?}", l.fallen);
    assert_eq!(l.spans[0].axes["norm"], "rms");
    // Scale and shift the other way round: only the style is left, and the edge that differs is named.
    let l = place(&tree, &graph(3, [1, 0]), "adaln_producer");
    assert_eq!(spans(&l), ["style"]);
    let fell = l
        .fallen
        .iter()
        .find(|r| r.span.as_deref() == Some("fused"))
        .unwrap();
    assert!(
        ["edge_conflict", "dataflow_edge"].contains(&fell.code.as_str()),
        "{fell:?}"
    );
    assert!(fell.op.is_some() && fell.operand.is_some(), "{fell:?}");
}

#[test]
fn what_never_changes_in_a_loop() {
    let modules = vec![
        json!({"path": "x", "class": "Holder"}),
        linear("x.to_q", D, D, false),
        linear("x.to_k", D, 768, false),
        linear("x.to_v", D, 768, false),
    ];
    let tree = tree(modules);
    let graph = |path: &str| {
        let mut h = Host::new();
        let c = h.0.input("c", rows(768));
        let y = h.linear(path, c, D, 768);
        h.end(y)
    };
    let l = place(&tree, &graph("x.to_k"), "cadence_static");
    assert_eq!(spans(&l), ["content"]);
    let r = edge(place(&tree, &graph("x.other"), "cadence_static"));
    assert_eq!(r.code, "dataflow_edge");
    assert!(
        r.op.as_deref() == Some("call") && r.reason.contains("x.to_k"),
        "{r:?}"
    );
}

#[test]
fn a_feed_forward_of_an_encoder() {
    let graph = |kind: &str, bias: bool| {
        let mut h = Host::new();
        let x = h.0.input("x", rows(D));
        let (w, b) = (
            h.param("l.norm2", "weight", &[D]),
            h.param("l.norm2", "bias", &[D]),
        );
        let n = h.op(OpKind::LayerNorm, "l.norm2", &[x, w, b], &eps(), D);
        let y = match bias {
            true => h.biased("l.mlp.fc1", n, 768, D),
            false => h.linear("l.mlp.fc1", n, 768, D),
        };
        let kind = [("kind", AttrValue::Word(kind.into()))];
        let a = h.op(OpKind::Act, "l.mlp", &[y], &kind, 768);
        let y = h.biased("l.mlp.fc2", a, D, 768);
        let out = h.op(OpKind::Add, "l", &[x, y], &[], D);
        h.end(out)
    };
    let modules = vec![
        json!({"path": "l", "class": "Holder"}),
        norm("l.norm2"),
        json!({"path": "l.mlp", "class": "Holder", "activation": {"attr": "act", "class": "GELU", "name": null}}),
        linear("l.mlp.fc1", 768, D, true),
        linear("l.mlp.fc2", D, 768, true),
        json!({"path": "l.mlp.act", "class": "GELU", "attrs": {"approximate": "tanh"}}),
    ];
    let tree = tree(modules);
    let l = place(&tree, &graph("gelu_tanh", true), "vision_ffn");
    assert_eq!(spans(&l), ["block", "ffn"]);
    let r = edge(place(&tree, &graph("gelu_exact", true), "vision_ffn"));
    assert_eq!(
        (r.code.as_str(), r.operand.as_deref()),
        ("attr_unmatched", Some("kind"))
    );
    let r = edge(place(&tree, &graph("gelu_tanh", false), "vision_ffn"));
    assert_eq!(
        (r.code.as_str(), r.op.as_deref()),
        ("dataflow_edge", Some("bias"))
    );
    assert!(r.reason.contains("l.mlp.fc1"), "{r:?}");
}

/// A block whose second sum takes the first norm's result instead of the first sum.
#[test]
fn a_block_with_another_stream() {
    let graph = |parallel: bool| {
        let mut h = Host::new();
        let x = h.0.input("x", rows(D));
        let w = h.param("l.0.input_layernorm", "weight", &[D]);
        let n = h.op(OpKind::RmsNorm, "l.0.input_layernorm", &[x, w], &eps(), D);
        let a = h.linear("l.0.self_attn.o", n, D, D);
        let r = h.op(OpKind::Add, "l.0", &[x, a], &[], D);
        let from = if parallel { x } else { r };
        let w = h.param("l.0.post_attention_layernorm", "weight", &[D]);
        let m = h.op(
            OpKind::RmsNorm,
            "l.0.post_attention_layernorm",
            &[from, w],
            &eps(),
            D,
        );
        let f = h.linear("l.0.mlp.o", m, D, D);
        let y = h.op(OpKind::Add, "l.0", &[r, f], &[], D);
        h.end(y)
    };
    let rms = |path: &str| json!({"path": path, "class": "Holder", "params": {"weight": [[D], "float32"]}, "attrs": {"eps": 1e-6}});
    let modules = vec![
        json!({"path": "l.0", "class": "Holder"}),
        json!({"path": "l.0.self_attn", "class": "Holder"}),
        linear("l.0.self_attn.o", D, D, false),
        json!({"path": "l.0.mlp", "class": "Holder"}),
        linear("l.0.mlp.o", D, D, false),
        rms("l.0.input_layernorm"),
        rms("l.0.post_attention_layernorm"),
    ];
    let tree = tree(modules);
    let l = place(&tree, &graph(false), "decoder_block");
    assert_eq!(spans(&l)[0], "block", "{:?}", l.fallen);
    let l = place(&tree, &graph(true), "decoder_block");
    let fell = match &l.refusal {
        Some(r) => r,
        None => l
            .fallen
            .iter()
            .find(|r| r.span.as_deref() == Some("block"))
            .unwrap(),
    };
    assert!(fell.op.is_some() && !fell.reason.is_empty(), "{fell:?}");
}
