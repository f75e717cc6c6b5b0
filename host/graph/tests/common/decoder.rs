//! A decoder of chosen sizes with seeded weights, for what is measured and for what must not allocate.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, GraphError, Layout, OpKind, ParamRef, ParamSource,
    StateRegion, ValueId,
};

/// Sizes of a decoder.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Layers.
    pub layers: usize,
    /// Width of the stream.
    pub width: usize,
    /// Width of the feed-forward.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head: usize,
    /// Tokens.
    pub vocabulary: usize,
}

fn symbol(name: &str) -> Dim {
    Dim::Symbol(name.into())
}

fn tokens(tail: &[usize]) -> Vec<Dim> {
    let mut dims = vec![symbol("B"), symbol("T")];
    dims.extend(tail.iter().map(|n| Dim::Size(*n)));
    dims
}

struct Builder(GraphBuilder, Sizes);

impl Builder {
    fn weight(&mut self, path: &str, dims: &[usize]) -> ValueId {
        let param = ParamRef {
            path: path.into(),
            name: "weight".into(),
            rows: None,
        };
        self.0.param(param, dims, Layout::OutIn)
    }

    fn norm(&mut self, path: &str, x: ValueId) -> ValueId {
        let w = self.weight(path, &[self.1.width]);
        let eps = [("eps", AttrValue::Float(1e-5))];
        let operands = [Some(x), Some(w)];
        self.0.op(
            OpKind::RmsNorm,
            path,
            "y",
            &operands,
            &eps,
            tokens(&[self.1.width]),
        )
    }

    fn linear(&mut self, path: &str, x: ValueId, k: usize, n: usize) -> ValueId {
        let w = self.weight(path, &[n, k]);
        let operands = [Some(x), Some(w)];
        self.0
            .op(OpKind::Linear, path, "y", &operands, &[], tokens(&[n]))
    }

    fn reshape(&mut self, path: &str, x: ValueId, tail: &[usize]) -> ValueId {
        let words = ["B", "T"].map(|s| AttrValue::Word(s.into())).into_iter();
        let sizes = tail.iter().map(|n| AttrValue::Int(*n as i64));
        let dims = [("dims", AttrValue::List(words.chain(sizes).collect()))];
        self.0.op(
            OpKind::Reshape,
            path,
            "shaped",
            &[Some(x)],
            &dims,
            tokens(tail),
        )
    }

    fn heads(
        &mut self,
        path: &str,
        x: ValueId,
        heads: usize,
        tables: Option<&[ValueId]>,
    ) -> ValueId {
        let k = self.linear(path, x, self.1.width, heads * self.1.head);
        let mut y = self.reshape(path, k, &[heads, self.1.head]);
        if let Some(t) = tables {
            let operands = [Some(y), Some(t[0]), Some(t[1])];
            y = self.0.op(
                OpKind::Rope,
                path,
                "rope",
                &operands,
                &[],
                tokens(&[heads, self.1.head]),
            );
        }
        let perm = [(
            "perm",
            AttrValue::List([0, 2, 1, 3].map(AttrValue::Int).to_vec()),
        )];
        let dims = vec![
            symbol("B"),
            Dim::Size(heads),
            symbol("T"),
            Dim::Size(self.1.head),
        ];
        self.0
            .op(OpKind::Transpose, path, "turned", &[Some(y)], &perm, dims)
    }

    fn cached(&mut self, path: &str, x: ValueId) -> ValueId {
        let region = self.0.state(StateRegion::growing(
            format!("{path}.cache"),
            self.1.kv_heads,
            self.1.head,
        ));
        let dims = vec![
            symbol("B"),
            Dim::Size(self.1.kv_heads),
            symbol("S"),
            Dim::Size(self.1.head),
        ];
        self.0.op(
            OpKind::KvAppend,
            path,
            "all",
            &[Some(x), Some(region)],
            &[],
            dims,
        )
    }
}

/// The graph: inputs `ids` and `positions`, output `logits`.
pub fn graph(sizes: Sizes) -> Graph {
    let mut b = Builder(GraphBuilder::new("decode"), sizes);
    let ids = b.0.input("ids", tokens(&[]));
    let positions = b.0.input("positions", vec![symbol("T")]);
    let w = b.weight("embed", &[sizes.vocabulary, sizes.width]);
    let operands = [Some(ids), Some(w)];
    let mut x = b.0.op(
        OpKind::Embedding,
        "embed",
        "y",
        &operands,
        &[],
        tokens(&[sizes.width]),
    );
    let freqs = (0..sizes.head / 2).map(|i| 1e4f64.powf(-2.0 * i as f64 / sizes.head as f64));
    let freqs = AttrValue::List(freqs.map(AttrValue::Float).collect());
    let table = vec![symbol("T"), Dim::Size(sizes.head / 2)];
    let tables = b.0.ops(
        OpKind::RopeTable,
        "rotary",
        &[Some(positions)],
        &[("inv_freq", freqs)],
        vec![("cos", table.clone()), ("sin", table)],
    );
    for i in 0..sizes.layers {
        let p = |s: &str| format!("layers.{i}.{s}");
        let n = b.norm(&p("norm1"), x);
        let q = b.heads(&p("q"), n, sizes.heads, Some(&tables));
        let k = b.heads(&p("k"), n, sizes.kv_heads, Some(&tables));
        let v = b.heads(&p("v"), n, sizes.kv_heads, None);
        let (k, v) = (b.cached(&p("k"), k), b.cached(&p("v"), v));
        let causal = [("causal", AttrValue::Flag(true))];
        let operands = [Some(q), Some(k), Some(v)];
        let dims = tokens(&[sizes.heads, sizes.head]);
        let a =
            b.0.op(OpKind::Attention, &p("attn"), "y", &operands, &causal, dims);
        let a = b.reshape(&p("attn"), a, &[sizes.width]);
        let o = b.linear(&p("o"), a, sizes.width, sizes.width);
        x = b.0.op(
            OpKind::Add,
            &p("add1"),
            "y",
            &[Some(x), Some(o)],
            &[],
            tokens(&[sizes.width]),
        );
        let n = b.norm(&p("norm2"), x);
        let (g, u) = (
            b.linear(&p("gate"), n, sizes.width, sizes.ffn),
            b.linear(&p("up"), n, sizes.width, sizes.ffn),
        );
        let silu = [("kind", AttrValue::Word("silu".into()))];
        let g = b.0.op(
            OpKind::Act,
            &p("act"),
            "y",
            &[Some(g)],
            &silu,
            tokens(&[sizes.ffn]),
        );
        let m = b.0.op(
            OpKind::Mul,
            &p("mul"),
            "y",
            &[Some(g), Some(u)],
            &[],
            tokens(&[sizes.ffn]),
        );
        let d = b.linear(&p("down"), m, sizes.ffn, sizes.width);
        x = b.0.op(
            OpKind::Add,
            &p("add2"),
            "y",
            &[Some(x), Some(d)],
            &[],
            tokens(&[sizes.width]),
        );
    }
    let y = b.norm("norm", x);
    let y = b.linear("head", y, sizes.width, sizes.vocabulary);
    b.0.output("logits", y);
    b.0.finish()
}

/// Weights by name, the same in every run.
pub struct Random(pub Arc<Graph>);

impl ParamSource for Random {
    fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
        let missing = || GraphError::MissingParam {
            param: param.to_string(),
            reason: "not in the graph".into(),
        };
        let value = self.0.value_named(&param.to_string()).ok_or_else(missing)?;
        let size = |d: &Dim| match d {
            Dim::Size(n) => *n,
            Dim::Symbol(_) => 1,
        };
        let dims: Vec<usize> = self.0.value(value).dims.iter().map(size).collect();
        let mut s: u32 = param.to_string().bytes().map(u32::from).sum();
        let draw = || {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 8) as f32 / (1u32 << 23) as f32 - 1.0
        };
        let data: Vec<f32> = std::iter::repeat_with(draw)
            .take(dims.iter().product())
            .collect();
        Tensor::from_vec(data, dims, &Device::Cpu).map_err(|_| missing())
    }
}
