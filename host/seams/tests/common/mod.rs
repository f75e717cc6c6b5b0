//! A hand-made decoder layer, as a tree and as a graph, with one knob for each thing that may differ on a host.

use indexmap::IndexMap;
use structures_catalog::{Catalog, Spec};
use structures_graph::tree::{ParamInfo, Scalar};
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, Layout, Module, ModuleKind, ModuleTree, OpKind, ParamRef,
    ValueId,
};
use structures_seams::{discover, Located, Seam};

pub const D: usize = 512;
pub const F: usize = 768;
pub const KV: usize = 512;

/// What differs from a plain llama-like layer.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// A norm after the FFN, before the residual add; and another one before the FFN (`pre_feedforward_layernorm`).
    pub post_norm: bool,
    /// Norm weights are stored as offsets from one.
    pub offset: bool,
    /// Activation kind.
    pub act: Option<&'static str>,
    /// A multiplier on the residual branch.
    pub residual_multiplier: Option<f64>,
    /// A soft cap in attention.
    pub softcap: Option<f64>,
    /// The activated product is also a graph output.
    pub tap: bool,
    /// The activated product is also read by another operation.
    pub second_reader: bool,
    /// `v_proj` reads the unnormed stream.
    pub v_other: bool,
    /// Operands of the adds and of the product are swapped.
    pub swapped: bool,
    /// Biases on q, k, v.
    pub biased: bool,
    /// The layer runs twice with the same weights.
    pub twice: bool,
    /// The FFN input goes through a reshape and back.
    pub views: bool,
    /// The norm before the FFN has no weight.
    pub bare_norm: bool,
    /// FFN input is scaled and shifted, its output gated, by these inputs.
    pub conditioned: bool,
}

fn sizes(dims: &[usize]) -> Vec<Dim> {
    let lead = ["B", "T"].map(|s| Dim::Symbol(s.into()));
    lead.into_iter()
        .chain(dims.iter().map(|d| Dim::Size(*d)))
        .collect()
}

fn word(w: &str) -> AttrValue {
    AttrValue::Word(w.into())
}

struct Layer<'a> {
    b: &'a mut GraphBuilder,
    host: &'a Host,
}

impl Layer<'_> {
    fn param(&mut self, path: &str, name: &str, dims: &[usize]) -> ValueId {
        let param = ParamRef {
            path: path.into(),
            name: name.into(),
            rows: None,
        };
        let layout = if dims.len() == 2 {
            Layout::OutIn
        } else {
            Layout::InOut
        };
        self.b.param(param, dims, layout)
    }

    fn linear(&mut self, path: &str, x: ValueId, out: usize, inside: usize) -> ValueId {
        let w = self.param(path, "weight", &[out, inside]);
        self.b.op(
            OpKind::Linear,
            path,
            "y",
            &[Some(x), Some(w)],
            &[],
            sizes(&[out]),
        )
    }

    fn norm(&mut self, path: &str, x: ValueId, bare: bool) -> ValueId {
        let w = if bare {
            None
        } else {
            Some(self.param(path, "weight", &[D]))
        };
        let mut attrs = vec![("eps", AttrValue::Float(1e-5))];
        if self.host.offset {
            attrs.push(("weight", word("offset")));
        }
        self.b.op(
            OpKind::RmsNorm,
            path,
            "y",
            &[Some(x), w],
            &attrs,
            sizes(&[D]),
        )
    }

    fn two(&mut self, kind: OpKind, path: &str, a: ValueId, b: ValueId, width: usize) -> ValueId {
        let (a, b) = if self.host.swapped { (b, a) } else { (a, b) };
        self.b.op(
            kind,
            path,
            kind.name(),
            &[Some(a), Some(b)],
            &[],
            sizes(&[width]),
        )
    }

    fn view(&mut self, kind: OpKind, path: &str, x: ValueId, dims: Vec<Dim>) -> ValueId {
        let list = AttrValue::List(vec![]);
        let attrs = match kind {
            OpKind::Reshape => vec![("dims", list)],
            OpKind::Transpose => vec![("perm", list)],
            _ => vec![],
        };
        self.b.op(kind, path, kind.name(), &[Some(x)], &attrs, dims)
    }

    fn attention(&mut self, n: ValueId, h: ValueId) -> ValueId {
        let at = "l.0.self_attn";
        let mut heads = Vec::new();
        for (name, width) in [("q_proj", D), ("k_proj", KV), ("v_proj", KV)] {
            let path = format!("{at}.{name}");
            let x = if self.host.v_other && name == "v_proj" {
                h
            } else {
                n
            };
            let mut y = self.linear(&path, x, width, D);
            if self.host.biased {
                let b = self.param(&path, "bias", &[width]);
                y = self.b.op(
                    OpKind::Bias,
                    &path,
                    "z",
                    &[Some(y), Some(b)],
                    &[],
                    sizes(&[width]),
                );
            }
            let split = self.view(OpKind::Reshape, at, y, sizes(&[width / 64, 64]));
            let turned = ["B", "H", "T"].map(|s| Dim::Symbol(s.into()));
            let turned = turned.into_iter().chain([Dim::Size(64)]).collect();
            heads.push(Some(self.view(OpKind::Transpose, at, split, turned)));
        }
        let mut attrs = vec![("causal", AttrValue::Flag(true))];
        if let Some(c) = self.host.softcap {
            attrs.push(("softcap", AttrValue::Float(c)));
        }
        let o = self.b.op(
            OpKind::Attention,
            at,
            "o",
            &heads,
            &attrs,
            sizes(&[D / 64, 64]),
        );
        let flat = self.view(OpKind::Reshape, at, o, sizes(&[D]));
        self.linear(&format!("{at}.o_proj"), flat, D, D)
    }

    fn ffn(&mut self, h: ValueId) -> ValueId {
        let host = self.host.clone();
        let before = if host.post_norm {
            "l.0.pre_feedforward_layernorm"
        } else {
            "l.0.post_attention_layernorm"
        };
        let mut n = self.norm(before, h, host.bare_norm);
        if host.conditioned {
            let scale = self.b.input("scale", sizes(&[D]));
            let shift = self.b.input("shift", sizes(&[D]));
            let operands = [Some(n), Some(scale), Some(shift)];
            n = self
                .b
                .op(OpKind::Modulate, "l.0", "m", &operands, &[], sizes(&[D]));
        }
        let at = "l.0.mlp";
        let g = self.linear(&format!("{at}.gate_proj"), n, F, D);
        let kind = [("kind", word(host.act.unwrap_or("silu")))];
        let a = self
            .b
            .op(OpKind::Act, at, "a", &[Some(g)], &kind, sizes(&[F]));
        let seen = if host.views {
            let flat = vec![Dim::Symbol("M".into()), Dim::Size(D)];
            self.view(OpKind::Reshape, at, n, flat)
        } else {
            n
        };
        let u = self.linear(&format!("{at}.up_proj"), seen, F, D);
        let mut m = self.two(OpKind::Mul, at, a, u, F);
        if host.tap {
            self.b.output("tap", m);
        }
        if host.second_reader {
            let spy = self
                .b
                .op(OpKind::Scale, "spy", "s", &[Some(m)], &[], sizes(&[F]));
            self.b.output("spy", spy);
        }
        if host.views {
            m = self.view(OpKind::Contiguous, at, m, sizes(&[F]));
        }
        let mut y = self.linear(&format!("{at}.down_proj"), m, D, F);
        if host.conditioned {
            let gate = self.b.input("gate", sizes(&[D]));
            y = self.two(OpKind::Mul, "l.0", y, gate, D);
        }
        if host.post_norm {
            y = self.norm("l.0.post_feedforward_layernorm", y, false);
        }
        if let Some(by) = host.residual_multiplier {
            let by = [("by", AttrValue::Float(by))];
            y = self
                .b
                .op(OpKind::Scale, "l.0", "r", &[Some(y)], &by, sizes(&[D]));
        }
        self.two(OpKind::Add, "l.0", h, y, D)
    }

    fn run(&mut self, h: ValueId) -> ValueId {
        let n = self.norm("l.0.input_layernorm", h, false);
        let mut o = self.attention(n, h);
        if self.host.post_norm {
            o = self.norm("l.0.post_attention_layernorm", o, false);
        }
        let h = self.two(OpKind::Add, "l.0", h, o, D);
        self.ffn(h)
    }
}

/// The graph of the layer.
pub fn graph(host: &Host) -> Graph {
    let mut b = GraphBuilder::new("decode");
    let mut h = b.input("h", sizes(&[D]));
    for _ in 0..if host.twice { 2 } else { 1 } {
        h = Layer { b: &mut b, host }.run(h);
    }
    b.output("out", h);
    b.finish()
}

/// The tree of the layer.
pub fn tree(host: &Host) -> ModuleTree {
    let module = |path: &str, kind: ModuleKind, dims: &[usize]| {
        let mut params = IndexMap::new();
        if !dims.is_empty() {
            let info = |dims: &[usize]| ParamInfo {
                dims: dims.to_vec(),
                dtype: "f32".into(),
            };
            params.insert("weight".to_string(), info(dims));
            let attention = ["q_proj", "k_proj", "v_proj"]
                .iter()
                .any(|p| path.ends_with(p));
            if host.biased && attention {
                params.insert("bias".to_string(), info(&dims[..1]));
            }
        }
        Module {
            path: path.into(),
            kind: Some(kind),
            params,
            ..Module::default()
        }
    };
    let mut mlp = module("l.0.mlp", ModuleKind::Other, &[]);
    mlp.attrs
        .insert("act_fn".into(), Scalar::Word("silu".into()));
    let mut modules = vec![
        module("l.0.self_attn.q_proj", ModuleKind::Linear, &[D, D]),
        module("l.0.self_attn.k_proj", ModuleKind::Linear, &[KV, D]),
        module("l.0.self_attn.v_proj", ModuleKind::Linear, &[KV, D]),
        module("l.0.self_attn.o_proj", ModuleKind::Linear, &[D, D]),
        mlp,
        module("l.0.mlp.gate_proj", ModuleKind::Linear, &[F, D]),
        module("l.0.mlp.up_proj", ModuleKind::Linear, &[F, D]),
        module("l.0.mlp.down_proj", ModuleKind::Linear, &[D, F]),
        module("l.0.input_layernorm", ModuleKind::RmsNorm, &[D]),
    ];
    if !host.bare_norm {
        modules.push(module(
            "l.0.post_attention_layernorm",
            ModuleKind::RmsNorm,
            &[D],
        ));
    }
    ModuleTree::new("hand-made", modules)
}

pub fn catalog() -> Catalog {
    Catalog::builtin().unwrap()
}

pub fn spec<'c>(catalog: &'c Catalog, name: &str) -> &'c Spec {
    catalog.get(name).unwrap()
}

/// The seam of a structure at a path.
pub fn seam(catalog: &Catalog, host: &Host, structure: &str, path: &str) -> Seam {
    let tree = tree(host);
    let found = discover(&tree, &[spec(catalog, structure)]);
    let all: Vec<String> = found.seams.iter().map(|s| s.path.clone()).collect();
    let one = found.seams.into_iter().find(|s| s.path == path);
    one.unwrap_or_else(|| panic!("no {structure} at {path}: {all:?} {:?}", found.refused))
}

/// Discovers and locates one seam.
pub fn place(host: &Host, structure: &str, path: &str) -> (Graph, Vec<Located>) {
    let catalog = catalog();
    let seam = seam(&catalog, host, structure, path);
    let graph = graph(host);
    let located = structures_seams::locate(&graph, spec(&catalog, structure), &seam);
    (graph, located)
}

/// The same where one place is expected.
pub fn place_one(host: &Host, structure: &str, path: &str) -> (Graph, Located) {
    let (graph, mut located) = place(host, structure, path);
    assert_eq!(located.len(), 1);
    (graph, located.remove(0))
}

/// Kinds and modules of a span's operations.
pub fn ops(graph: &Graph, span: &structures_seams::LocatedSpan) -> Vec<String> {
    let name = |op: &structures_graph::OpId| {
        let op = graph.op(*op);
        format!("{} {}", op.kind, op.module)
    };
    span.ops.iter().map(name).collect()
}

/// Names of host values.
pub fn names(graph: &Graph, values: &[(String, Option<ValueId>)]) -> Vec<(String, String)> {
    let name = |v: &Option<ValueId>| v.map_or("-".into(), |v| graph.value(v).name.clone());
    values.iter().map(|(n, v)| (n.clone(), name(v))).collect()
}
