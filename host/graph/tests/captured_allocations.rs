//! A captured step allocates nothing while it replays, whatever its state holds.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use candle_core::{Device, Tensor};
use structures_graph::{
    check, Alone, AttrValue, Capture, Dim, Graph, GraphBuilder, GraphError, Greedy, Layout, OpKind,
    ParamRef, ParamSource, Session, StateRegion, ValueId,
};

const WIDTH: usize = 32;
const VOCABULARY: usize = 40;

fn dims(tail: &[usize]) -> Vec<Dim> {
    let symbols = ["B", "T"].map(|s| Dim::Symbol(s.into())).into_iter();
    symbols.chain(tail.iter().map(|n| Dim::Size(*n))).collect()
}

struct Builder(GraphBuilder);

impl Builder {
    fn weight(&mut self, path: &str, dims: &[usize]) -> Option<ValueId> {
        let param = ParamRef {
            path: path.into(),
            name: "weight".into(),
            rows: None,
        };
        Some(self.0.param(param, dims, Layout::OutIn))
    }

    fn linear(&mut self, path: &str, x: ValueId, k: usize, n: usize) -> ValueId {
        let w = self.weight(path, &[n, k]);
        self.0
            .op(OpKind::Linear, path, "y", &[Some(x), w], &[], dims(&[n]))
    }

    fn norm(&mut self, path: &str, x: ValueId) -> ValueId {
        let w = self.weight(path, &[WIDTH]);
        let eps = [("eps", AttrValue::Float(1e-5))];
        self.0.op(
            OpKind::RmsNorm,
            path,
            "y",
            &[Some(x), w],
            &eps,
            dims(&[WIDTH]),
        )
    }

    fn list(n: &[i64]) -> AttrValue {
        AttrValue::List(n.iter().map(|n| AttrValue::Int(*n)).collect())
    }

    /// `[B,heads,T,8]` of a projection.
    fn heads(
        &mut self,
        path: &str,
        x: ValueId,
        heads: usize,
        tables: Option<&[ValueId]>,
    ) -> ValueId {
        let y = self.linear(path, x, WIDTH, heads * 8);
        let shape = AttrValue::List(vec![
            AttrValue::Word("B".into()),
            AttrValue::Word("T".into()),
            AttrValue::Int(heads as i64),
            AttrValue::Int(8),
        ]);
        let shape = [("dims", shape)];
        let mut y = self.0.op(
            OpKind::Reshape,
            path,
            "cut",
            &[Some(y)],
            &shape,
            dims(&[heads, 8]),
        );
        if let Some(t) = tables {
            let operands = [Some(y), Some(t[0]), Some(t[1])];
            y = self.0.op(
                OpKind::Rope,
                path,
                "rope",
                &operands,
                &[],
                dims(&[heads, 8]),
            );
        }
        let mut turned = dims(&[heads, 8]);
        turned.swap(1, 2);
        let perm = [("perm", Self::list(&[0, 2, 1, 3]))];
        self.0
            .op(OpKind::Transpose, path, "turned", &[Some(y)], &perm, turned)
    }

    fn cached(&mut self, path: &str, x: ValueId) -> ValueId {
        let region = self
            .0
            .state(StateRegion::growing(format!("{path}.cache"), 2, 8));
        let symbol = |s: &str| Dim::Symbol(s.into());
        let all = vec![symbol("B"), Dim::Size(2), symbol("S"), Dim::Size(8)];
        self.0.op(
            OpKind::KvAppend,
            path,
            "all",
            &[Some(x), Some(region)],
            &[],
            all,
        )
    }
}

fn decoder() -> Graph {
    let mut b = Builder(GraphBuilder::new("decode"));
    let ids = b.0.input("ids", dims(&[]));
    let positions = b.0.input("positions", vec![Dim::Symbol("T".into())]);
    let w = b.weight("embed", &[VOCABULARY, WIDTH]);
    let mut x = b.0.op(
        OpKind::Embedding,
        "embed",
        "y",
        &[Some(ids), w],
        &[],
        dims(&[WIDTH]),
    );
    let freqs = AttrValue::List((0..4).map(|i| AttrValue::Float(0.1f64.powi(i))).collect());
    let table = vec![Dim::Symbol("T".into()), Dim::Size(4)];
    let results = vec![("cos", table.clone()), ("sin", table)];
    let tables = b.0.ops(
        OpKind::RopeTable,
        "rotary",
        &[Some(positions)],
        &[("inv_freq", freqs)],
        results,
    );
    for i in 0..2 {
        let p = |s: &str| format!("layers.{i}.{s}");
        let n = b.norm(&p("norm1"), x);
        let q = b.heads(&p("q"), n, 4, Some(&tables));
        let k = b.heads(&p("k"), n, 2, Some(&tables));
        let v = b.heads(&p("v"), n, 2, None);
        let (k, v) = (b.cached(&p("k"), k), b.cached(&p("v"), v));
        let causal = [("causal", AttrValue::Flag(true))];
        let operands = [Some(q), Some(k), Some(v)];
        let a = b.0.op(
            OpKind::Attention,
            &p("attn"),
            "y",
            &operands,
            &causal,
            dims(&[4, 8]),
        );
        let flat = AttrValue::List(vec![
            AttrValue::Word("B".into()),
            AttrValue::Word("T".into()),
            AttrValue::Int(WIDTH as i64),
        ]);
        let a = b.0.op(
            OpKind::Reshape,
            &p("attn"),
            "flat",
            &[Some(a)],
            &[("dims", flat)],
            dims(&[WIDTH]),
        );
        let o = b.linear(&p("o"), a, WIDTH, WIDTH);
        x = b.0.op(
            OpKind::Add,
            &p("add1"),
            "y",
            &[Some(x), Some(o)],
            &[],
            dims(&[WIDTH]),
        );
        let n = b.norm(&p("norm2"), x);
        let (g, u) = (
            b.linear(&p("gate"), n, WIDTH, 48),
            b.linear(&p("up"), n, WIDTH, 48),
        );
        let silu = [("kind", AttrValue::Word("silu".into()))];
        let g =
            b.0.op(OpKind::Act, &p("act"), "y", &[Some(g)], &silu, dims(&[48]));
        let m = b.0.op(
            OpKind::Mul,
            &p("mul"),
            "y",
            &[Some(g), Some(u)],
            &[],
            dims(&[48]),
        );
        let d = b.linear(&p("down"), m, 48, WIDTH);
        x = b.0.op(
            OpKind::Add,
            &p("add2"),
            "y",
            &[Some(x), Some(d)],
            &[],
            dims(&[WIDTH]),
        );
    }
    let y = b.norm("norm", x);
    let y = b.linear("head", y, WIDTH, VOCABULARY);
    b.0.output("logits", y);
    b.0.finish()
}

struct Random(Arc<Graph>);

impl ParamSource for Random {
    fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
        let v = self.0.value_named(&param.to_string()).unwrap();
        let dims: Vec<usize> = self
            .0
            .value(v)
            .dims
            .iter()
            .map(|d| match d {
                Dim::Size(n) => *n,
                Dim::Symbol(_) => 1,
            })
            .collect();
        let mut s: u32 = param.to_string().bytes().map(u32::from).sum();
        let draw = || {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 8) as f32 / (1u32 << 23) as f32 - 1.0
        };
        let data: Vec<f32> = std::iter::repeat_with(draw)
            .take(dims.iter().product())
            .collect();
        Ok(Tensor::from_vec(data, dims, &Device::Cpu).unwrap())
    }
}

#[test]
fn replays_allocate_nothing() {
    let graph = Arc::new(decoder());
    check(&graph).unwrap();
    let s = Session::new(graph.clone(), &Random(graph)).unwrap();
    let mut state = s.new_state(1, 64);
    state.reserve().unwrap();
    let token = |t: u32| Tensor::new(&[[t]], &Device::Cpu).unwrap();
    let at = |p: u32| Tensor::new(&[p], &Device::Cpu).unwrap();
    let inputs = [token(7), at(0)];
    let capture = Capture {
        inputs: &inputs,
        state: &state,
        windows: &[],
        greedy: Some(Greedy {
            scores: 0,
            token: 0,
            position: 1,
        }),
    };
    let mut step = s.capture(&s.host_plan(), &capture).unwrap();
    assert!(step.manifest().allocating.is_empty());
    step.warm_up(&mut state, &Alone, 1).unwrap();
    let mut tokens = [0u32; 64];
    let made = allocation_counter::measure(|| {
        for t in &mut tokens {
            step.replay(&mut state, &Alone).unwrap();
            *t = step.choice().unwrap();
        }
    });
    assert_eq!((made.count_total, made.bytes_total), (0, 0));

    // The eager form of the same graph chooses the same tokens, and allocates.
    let mut eager = s.new_state(1, 64);
    let mut next = 7;
    let made = allocation_counter::measure(|| {
        for (i, t) in tokens.iter().enumerate() {
            let inputs = [token(next), at(i as u32)];
            let y = s.run(&s.host_plan(), &inputs, &mut eager, None).unwrap();
            let y = y[0].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            next = y
                .iter()
                .enumerate()
                .max_by(|a, b| a.1.total_cmp(b.1))
                .unwrap()
                .0 as u32;
            assert_eq!(next, *t, "token {i}");
        }
    });
    assert!(made.count_total > 1000);
}
