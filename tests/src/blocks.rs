//! A small native block host for tests: blocks of layer norm, attention, layer norm, gated feed-forward, each of a kind
//! that a wire may or may not cross. It is no family and reads no checkpoint; its weights are made from a seed. What it
//! borrows from the demo model is only what a description needs beside tree and graph.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use indexmap::IndexMap;
use structures::host::Loaded;
use structures_graph::session::{ParamSource, Session};
use structures_graph::tree::{ParamInfo, Scalar};
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, GraphError, Layout, Module, ModuleKind, ModuleTree,
    OpKind, ParamRef, StateRegion, ValueId,
};

/// Width of the stream.
pub const D: usize = 512;
const F: usize = 512;
const HEADS: usize = 8;
const KV: usize = 2;
const HD: usize = 64;
const VOCAB: usize = 256;
/// From this token on every token's row holds one large value and little else.
pub const SPIKE: u32 = 252;

/// What lies between a block's first norm and its projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Nothing.
    Plain,
    /// The residual adds the norm's output as well.
    SecondReader,
    /// The norm's output is turned by position first.
    Rotated,
    /// A view that groups rows.
    Regrouped,
    /// Keys and values come from the stream, not from the norm.
    QueryOnly,
    /// As `Plain`, but a fifth part makes it nobody's block.
    Unowned,
}

pub(crate) struct Weave {
    pub(crate) b: GraphBuilder,
    pub(crate) modules: Vec<Module>,
}

pub(crate) fn dims(tail: &[usize]) -> Vec<Dim> {
    let sizes = tail.iter().map(|n| Dim::Size(*n));
    ["B", "T"]
        .into_iter()
        .map(|s| Dim::Symbol(s.into()))
        .chain(sizes)
        .collect()
}

impl Weave {
    pub(crate) fn module(
        &mut self,
        path: &str,
        kind: ModuleKind,
        params: &[(&str, &[usize])],
    ) -> &mut Module {
        let info = |dims: &[usize]| ParamInfo {
            dims: dims.to_vec(),
            dtype: "f32".into(),
        };
        self.modules.push(Module {
            path: path.into(),
            kind: Some(kind),
            params: params
                .iter()
                .map(|(n, d)| ((*n).to_string(), info(d)))
                .collect::<IndexMap<_, _>>(),
            ..Module::default()
        });
        self.modules.last_mut().expect("just pushed")
    }

    pub(crate) fn param(&mut self, path: &str, name: &str, dims: &[usize]) -> ValueId {
        let layout = if dims.len() == 2 {
            Layout::OutIn
        } else {
            Layout::InOut
        };
        let param = ParamRef {
            path: path.into(),
            name: name.into(),
            rows: None,
        };
        self.b.param(param, dims, layout)
    }

    pub(crate) fn op(
        &mut self,
        kind: OpKind,
        at: &str,
        label: &str,
        of: &[ValueId],
        attrs: &[(&str, AttrValue)],
        to: Vec<Dim>,
    ) -> ValueId {
        let of: Vec<_> = of.iter().copied().map(Some).collect();
        self.b.op(kind, at, label, &of, attrs, to)
    }

    fn norm(&mut self, at: &str, x: ValueId) -> ValueId {
        let m = self.module(
            at,
            ModuleKind::LayerNorm,
            &[("weight", &[D]), ("bias", &[D])],
        );
        m.attrs.insert(
            "normalized_shape".into(),
            Scalar::List(vec![Scalar::Int(D as i64)]),
        );
        m.attrs.insert("eps".into(), Scalar::Float(1e-5));
        let (w, b) = (self.param(at, "weight", &[D]), self.param(at, "bias", &[D]));
        let eps = [("eps", AttrValue::Float(1e-5))];
        self.op(OpKind::LayerNorm, at, "out", &[x, w, b], &eps, dims(&[D]))
    }

    pub(crate) fn linear(&mut self, at: &str, x: ValueId, k: usize, n: usize) -> ValueId {
        let m = self.module(at, ModuleKind::Linear, &[("weight", &[n, k])]);
        m.absent_params.push("bias".into());
        m.attrs.insert("in_features".into(), Scalar::Int(k as i64));
        m.attrs.insert("out_features".into(), Scalar::Int(n as i64));
        let w = self.param(at, "weight", &[n, k]);
        self.op(OpKind::Linear, at, "out", &[x, w], &[], dims(&[n]))
    }

    pub(crate) fn reshape(&mut self, at: &str, label: &str, x: ValueId, to: Vec<Dim>) -> ValueId {
        let list = to.iter().map(|d| match d {
            Dim::Size(n) => AttrValue::Int(*n as i64),
            Dim::Symbol(s) => AttrValue::Word(s.clone()),
        });
        let attrs = [("dims", AttrValue::List(list.collect()))];
        self.op(OpKind::Reshape, at, label, &[x], &attrs, to)
    }

    fn heads_first(&mut self, at: &str, label: &str, x: ValueId, heads: usize) -> ValueId {
        let x = self.reshape(at, &format!("{label}_heads"), x, dims(&[heads, HD]));
        let perm = AttrValue::List([0, 2, 1, 3].map(AttrValue::Int).to_vec());
        let to = vec![
            Dim::Symbol("B".into()),
            Dim::Size(heads),
            Dim::Symbol("T".into()),
            Dim::Size(HD),
        ];
        self.op(OpKind::Transpose, at, label, &[x], &[("perm", perm)], to)
    }

    fn append(&mut self, at: &str, side: &str, x: ValueId) -> ValueId {
        let region = StateRegion::growing(format!("{at}.{side}"), KV, HD);
        let region = self.b.state(region);
        let to = vec![
            Dim::Symbol("B".into()),
            Dim::Size(KV),
            Dim::Symbol("S".into()),
            Dim::Size(HD),
        ];
        self.op(
            OpKind::KvAppend,
            at,
            &format!("{side}_all"),
            &[x, region],
            &[],
            to,
        )
    }

    pub(crate) fn add(&mut self, at: &str, label: &str, a: ValueId, b: ValueId) -> ValueId {
        self.op(OpKind::Add, at, label, &[a, b], &[], dims(&[D]))
    }

    /// Attention over what was read so far; queries from one tensor, keys and values from another or the same.
    pub(crate) fn attention(&mut self, attn: &str, read: ValueId, far: ValueId) -> ValueId {
        let q = self.linear(&format!("{attn}.q_proj"), read, D, HEADS * HD);
        let k = self.linear(&format!("{attn}.k_proj"), far, D, KV * HD);
        let v = self.linear(&format!("{attn}.v_proj"), far, D, KV * HD);
        let q = self.heads_first(attn, "q", q, HEADS);
        let k = self.heads_first(attn, "k", k, KV);
        let v = self.heads_first(attn, "v", v, KV);
        let (k, v) = (self.append(attn, "k", k), self.append(attn, "v", v));
        let causal = [("causal", AttrValue::Flag(true))];
        let out = self.op(
            OpKind::Attention,
            attn,
            "attention",
            &[q, k, v],
            &causal,
            dims(&[HEADS, HD]),
        );
        let out = self.reshape(attn, "merged", out, dims(&[HEADS * HD]));
        self.linear(&format!("{attn}.o_proj"), out, HEADS * HD, D)
    }

    /// A gated feed-forward.
    pub(crate) fn ffn(&mut self, mlp: &str, normed: ValueId) -> ValueId {
        let m = self.module(mlp, ModuleKind::Other, &[]);
        m.attrs.insert("act_fn".into(), Scalar::Word("silu".into()));
        let g = self.linear(&format!("{mlp}.gate_proj"), normed, D, F);
        let u = self.linear(&format!("{mlp}.up_proj"), normed, D, F);
        let silu = [("kind", AttrValue::Word("silu".into()))];
        let a = self.op(
            OpKind::Act,
            &format!("{mlp}.act_fn"),
            "out",
            &[g],
            &silu,
            dims(&[F]),
        );
        let a = self.op(OpKind::Mul, mlp, "gated", &[a, u], &[], dims(&[F]));
        self.linear(&format!("{mlp}.down_proj"), a, F, D)
    }

    fn block(&mut self, at: &str, kind: Block, x: ValueId, tables: [ValueId; 2]) -> ValueId {
        self.module(at, ModuleKind::Other, &[]);
        let attn = format!("{at}.self_attn");
        let normed = self.norm(&format!("{at}.input_layernorm"), x);
        let read = match kind {
            Block::Rotated => {
                let heads = self.reshape(&attn, "turned_heads", normed, dims(&[HEADS, HD]));
                let turned = [heads, tables[0], tables[1]];
                let turned = self.op(
                    OpKind::Rope,
                    &attn,
                    "turned",
                    &turned,
                    &[],
                    dims(&[HEADS, HD]),
                );
                self.reshape(&attn, "turned_flat", turned, dims(&[D]))
            }
            Block::Regrouped => {
                let to = dims(&[1, D]);
                let grouped = self.reshape(&attn, "grouped", normed, to);
                self.reshape(&attn, "flat", grouped, dims(&[D]))
            }
            _ => normed,
        };
        self.module(&attn, ModuleKind::Other, &[]);
        let far = if kind == Block::QueryOnly { x } else { read };
        let out = self.attention(&attn, read, far);
        let residual = match kind {
            Block::SecondReader => self.add(at, "twice", x, normed),
            _ => x,
        };
        let x = self.add(at, "attended", residual, out);
        let normed = self.norm(&format!("{at}.post_attention_layernorm"), x);
        let y = self.ffn(&format!("{at}.mlp"), normed);
        if kind == Block::Unowned {
            let fifth = format!("{at}.post_feedforward_layernorm");
            let y = self.norm(&fifth, y);
            return self.add(at, "out", x, y);
        }
        self.add(at, "out", x, y)
    }
}

/// Tree and graph of these blocks.
pub fn blocks(kinds: &[Block]) -> (ModuleTree, Graph) {
    let mut w = Weave {
        b: GraphBuilder::new("decoder"),
        modules: Vec::new(),
    };
    let tokens = w.b.input("tokens", dims(&[]));
    // Given at every run, whether a block turns anything or not.
    let positions = w.b.input("positions", vec![Dim::Symbol("T".into())]);
    w.module("embed", ModuleKind::Embedding, &[("weight", &[VOCAB, D])]);
    let table = w.param("embed", "weight", &[VOCAB, D]);
    let mut x = w.op(
        OpKind::Embedding,
        "embed",
        "out",
        &[tokens, table],
        &[],
        dims(&[D]),
    );
    let mut tables = vec![x; 2];
    if kinds.contains(&Block::Rotated) {
        let freq =
            (0..HD / 2).map(|i| AttrValue::Float(10_000f64.powf(-2.0 * i as f64 / HD as f64)));
        let half = vec![Dim::Symbol("T".into()), Dim::Size(HD / 2)];
        tables = w.b.ops(
            OpKind::RopeTable,
            "rotary",
            &[Some(positions)],
            &[("inv_freq", AttrValue::List(freq.collect()))],
            vec![("cos", half.clone()), ("sin", half)],
        );
    }
    for (i, kind) in kinds.iter().enumerate() {
        x = w.block(&format!("blocks.{i}"), *kind, x, [tables[0], tables[1]]);
    }
    w.b.output("out", x);
    (ModuleTree::new("blocks", w.modules), w.b.finish())
}

/// Weights by name, the same in every run.
pub(crate) struct Seeded(pub(crate) Graph);

impl ParamSource for Seeded {
    fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
        let value = self
            .0
            .values
            .iter()
            .enumerate()
            .find(|(i, _)| self.0.param(ValueId(*i)).is_some_and(|(p, _)| p == param));
        let shape: Vec<usize> = value
            .map(|(_, v)| v.dims.as_slice())
            .unwrap_or_default()
            .iter()
            .map(|d| match d {
                Dim::Size(n) => *n,
                Dim::Symbol(_) => 1,
            })
            .collect();
        let mut s: u32 = param
            .to_string()
            .bytes()
            .fold(17, |s, b| s.wrapping_mul(31).wrapping_add(u32::from(b)));
        // A conditioned norm holds a projection, which is none.
        let norm = param.path.contains("norm") && !param.path.ends_with("dense");
        let (mean, spread) = match (norm, param.name.as_str()) {
            (true, "weight") => (1.0, 0.2),
            (true, _) => (0.0, 0.1),
            _ if param.path == "embed" => (0.0, 1.0),
            // A counter, and what turns its steps into conditionings that differ.
            _ if param.path == "clock" => (1.0, 0.0),
            _ if param.path.starts_with("timestep") => match param.name.as_str() {
                "weight" => (0.0, 0.06),
                _ => (0.0, 1.0),
            },
            _ => (0.0, 0.08),
        };
        let data: Vec<f32> = (0..shape.iter().product())
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                mean + spread * ((s >> 8) as f32 / (1u32 << 23) as f32 - 1.0)
            })
            .collect();
        let mut data: Vec<f32> = data;
        if param.path == "embed" {
            for token in SPIKE as usize..VOCAB {
                let row = &mut data[token * D..][..D];
                row.iter_mut().for_each(|v| *v *= 1e-2);
                row[token - SPIKE as usize] = 30.0;
            }
        }
        Tensor::from_vec(data, shape, &Device::Cpu).map_err(|source| GraphError::Kernel {
            op: "seed".into(),
            at: param.to_string(),
            source: Box::new(source),
        })
    }
}

/// A loaded model of these blocks.
pub fn model(kinds: &[Block]) -> Loaded {
    let (tree, graph) = blocks(kinds);
    loaded(tree, graph)
}

/// A tree and a graph with weights from the seed, as a loaded model.
pub(crate) fn loaded(tree: ModuleTree, graph: Graph) -> Loaded {
    structures_graph::check(&graph).unwrap();
    let mut loaded = Loaded::open(&crate::demo()).unwrap();
    let graph = Arc::new(graph);
    let d = &mut loaded.model.description;
    d.name = "blocks".into();
    d.config.model_type = "test_blocks".into();
    d.tree = tree;
    d.graph = graph.clone();
    loaded.model.session = Session::new(graph.clone(), &Seeded((*graph).clone())).unwrap();
    loaded
}
