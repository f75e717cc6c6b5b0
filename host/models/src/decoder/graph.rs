//! The dataflow of a decoder, one graph for prefill and decode: the number of new tokens `T` is a symbol.
//!
//! Logits are made for all positions: the vocabulary has no slice in a graph, and teacher-forced workloads read all
//! of them. A prefill pays for it (a fifth of SmolLM2's products), a decode step of one token does not.

use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, Layout, OpKind, ParamRef, StateRegion, ValueId,
};

use super::{layer, EMBED, FINAL_NORM, HEAD};
use crate::config::DecoderConfig;

/// Inputs and outputs of the graph.
pub const TOKENS: &str = "tokens";
/// Positions of the new tokens.
pub const POSITIONS: &str = "positions";
/// Scores over the vocabulary.
pub const LOGITS: &str = "logits";

pub(super) fn graph(c: &DecoderConfig) -> Graph {
    let mut m = Maker {
        b: GraphBuilder::new("decoder"),
        c,
        cos: ValueId(0),
        sin: ValueId(0),
    };
    let tokens = m.b.input(TOKENS, dims(&["B", "T"], &[]));
    let positions = m.b.input(POSITIONS, dims(&["T"], &[]));

    let table = m.param(EMBED, "weight", &[c.vocab_size, c.hidden_size]);
    let stream = m.stream();
    let inputs = [Some(tokens), Some(table)];
    let mut x =
        m.b.op(OpKind::Embedding, EMBED, "out", &inputs, &[], stream);

    let frequencies = c.rope.inv_freq(c.head_dim);
    let frequencies = AttrValue::List(frequencies.into_iter().map(AttrValue::Float).collect());
    let half = dims(&["T"], &[c.head_dim / 2]);
    let tables = m.b.ops(
        OpKind::RopeTable,
        "model.rotary_emb",
        &[Some(positions)],
        &[("inv_freq", frequencies)],
        vec![("cos", half.clone()), ("sin", half)],
    );
    (m.cos, m.sin) = (tables[0], tables[1]);

    for i in 0..c.layers {
        x = m.layer(&layer(i), x);
    }
    let normed = m.norm(FINAL_NORM, x, c.hidden_size);
    let head = match c.tied_head {
        true => table,
        false => m.param(HEAD, "weight", &[c.vocab_size, c.hidden_size]),
    };
    let scores = dims(&["B", "T"], &[c.vocab_size]);
    let logits = m.b.op(
        OpKind::Linear,
        HEAD,
        "out",
        &[Some(normed), Some(head)],
        &[],
        scores,
    );
    m.b.output(LOGITS, logits);
    m.b.finish()
}

struct Maker<'a> {
    b: GraphBuilder,
    c: &'a DecoderConfig,
    cos: ValueId,
    sin: ValueId,
}

impl Maker<'_> {
    fn layer(&mut self, at: &str, x: ValueId) -> ValueId {
        let width = self.c.hidden_size;
        let normed = self.norm(&format!("{at}.input_layernorm"), x, width);
        let attended = self.attention(&format!("{at}.self_attn"), normed);
        let stream = self.stream();
        let inputs = [Some(x), Some(attended)];
        let x = self
            .b
            .op(OpKind::Add, at, "attended", &inputs, &[], stream.clone());
        let normed = self.norm(&format!("{at}.post_attention_layernorm"), x, width);
        let fed = self.ffn(&format!("{at}.mlp"), normed);
        self.b
            .op(OpKind::Add, at, "out", &[Some(x), Some(fed)], &[], stream)
    }

    fn attention(&mut self, at: &str, x: ValueId) -> ValueId {
        let c = self.c;
        let (h, kv, d) = (c.heads, c.kv_heads, c.head_dim);
        let q = self.heads(at, "q", x, h, true);
        let k = self.heads(at, "k", x, kv, true);
        let v = self.heads(at, "v", x, kv, false);
        let k = self.append(at, "k", k);
        let v = self.append(at, "v", v);
        let causal = [("causal", AttrValue::Flag(true))];
        let inputs = [Some(q), Some(k), Some(v)];
        let shape = dims(&["B", "T"], &[h, d]);
        let out = self
            .b
            .op(OpKind::Attention, at, "attention", &inputs, &causal, shape);
        let out = self.reshape(at, "merged", out, dims(&["B", "T"], &[h * d]));
        self.linear(&format!("{at}.o_proj"), out, h * d, c.hidden_size, c.o_bias)
    }

    /// One of q, k, v as `[B, heads, T, D]`, normed and turned where it is.
    fn heads(&mut self, at: &str, side: &str, x: ValueId, heads: usize, turned: bool) -> ValueId {
        let c = self.c;
        let d = c.head_dim;
        let module = format!("{at}.{side}_proj");
        let mut y = self.linear(&module, x, c.hidden_size, heads * d, c.qkv_bias);
        let split = dims(&["B", "T"], &[heads, d]);
        y = self.reshape(at, &format!("{side}_heads"), y, split.clone());
        if turned {
            if c.qk_norm {
                y = self.norm(&format!("{at}.{side}_norm"), y, d);
            }
            let inputs = [Some(y), Some(self.cos), Some(self.sin)];
            y = self.b.op(
                OpKind::Rope,
                at,
                &format!("{side}_rope"),
                &inputs,
                &[],
                split,
            );
        }
        let perm = [0, 2, 1, 3].map(AttrValue::Int).to_vec();
        let attrs = [("perm", AttrValue::List(perm))];
        let label = format!("{side}_first");
        let shape = vec![symbol("B"), Dim::Size(heads), symbol("T"), Dim::Size(d)];
        self.b
            .op(OpKind::Transpose, at, &label, &[Some(y)], &attrs, shape)
    }

    fn append(&mut self, at: &str, side: &str, x: ValueId) -> ValueId {
        let (heads, width) = (self.c.kv_heads, self.c.head_dim);
        let region = self.b.state(StateRegion {
            name: format!("{at}.{side}"),
            heads,
            width,
        });
        let shape = vec![symbol("B"), Dim::Size(heads), symbol("S"), Dim::Size(width)];
        let inputs = [Some(x), Some(region)];
        self.b.op(
            OpKind::KvAppend,
            at,
            &format!("{side}_all"),
            &inputs,
            &[],
            shape,
        )
    }

    fn ffn(&mut self, at: &str, x: ValueId) -> ValueId {
        let c = self.c;
        let (d, f, bias) = (c.hidden_size, c.intermediate_size, c.mlp_bias);
        let gate = self.linear(&format!("{at}.gate_proj"), x, d, f, bias);
        let wide = dims(&["B", "T"], &[f]);
        let module = format!("{at}.act_fn");
        let kind = [("kind", AttrValue::Word(c.act.into()))];
        let act = self.b.op(
            OpKind::Act,
            &module,
            "out",
            &[Some(gate)],
            &kind,
            wide.clone(),
        );
        let up = self.linear(&format!("{at}.up_proj"), x, d, f, bias);
        let gated = self
            .b
            .op(OpKind::Mul, at, "gated", &[Some(act), Some(up)], &[], wide);
        self.linear(&format!("{at}.down_proj"), gated, f, d, bias)
    }

    fn linear(&mut self, at: &str, x: ValueId, input: usize, out: usize, bias: bool) -> ValueId {
        let w = self.param(at, "weight", &[out, input]);
        let shape = dims(&["B", "T"], &[out]);
        let label = if bias { "product" } else { "out" };
        let y = self.b.op(
            OpKind::Linear,
            at,
            label,
            &[Some(x), Some(w)],
            &[],
            shape.clone(),
        );
        if !bias {
            return y;
        }
        let b = self.param(at, "bias", &[out]);
        self.b
            .op(OpKind::Bias, at, "out", &[Some(y), Some(b)], &[], shape)
    }

    fn norm(&mut self, at: &str, x: ValueId, width: usize) -> ValueId {
        let w = self.param(at, "weight", &[width]);
        let attrs = [
            ("eps", AttrValue::Float(self.c.rms_norm_eps)),
            ("weight", AttrValue::Word("direct".into())),
        ];
        let shape = self.b.dims(x).to_vec();
        self.b.op(
            OpKind::RmsNorm,
            at,
            "out",
            &[Some(x), Some(w)],
            &attrs,
            shape,
        )
    }

    fn reshape(&mut self, at: &str, label: &str, x: ValueId, shape: Vec<Dim>) -> ValueId {
        let list = shape
            .iter()
            .map(|d| match d {
                Dim::Size(n) => AttrValue::Int(*n as i64),
                Dim::Symbol(s) => AttrValue::Word(s.clone()),
            })
            .collect();
        let attrs = [("dims", AttrValue::List(list))];
        self.b
            .op(OpKind::Reshape, at, label, &[Some(x)], &attrs, shape)
    }

    fn param(&mut self, path: &str, name: &str, shape: &[usize]) -> ValueId {
        let param = ParamRef {
            path: path.into(),
            name: name.into(),
            rows: None,
        };
        // Matrices are stored `[out, in]`; for the embedding that reads `[vocabulary, width]`, which is also how a
        // tied head reads it.
        let layout = match shape.len() {
            2 => Layout::OutIn,
            _ => Layout::InOut,
        };
        self.b.param(param, shape, layout)
    }

    fn stream(&self) -> Vec<Dim> {
        dims(&["B", "T"], &[self.c.hidden_size])
    }
}

fn symbol(name: &str) -> Dim {
    Dim::Symbol(name.into())
}

fn dims(symbols: &[&str], sizes: &[usize]) -> Vec<Dim> {
    let symbols = symbols.iter().map(|s| symbol(s));
    symbols.chain(sizes.iter().map(|n| Dim::Size(*n))).collect()
}
