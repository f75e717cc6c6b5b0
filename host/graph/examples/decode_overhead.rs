//! What a decode step costs beside its products: a decoder of SmolLM2-135M's sizes (30 layers, width 576, FFN 1536,
//! 9/3 heads of 64; random weights, no output head), run as it is, and with every `linear` answered by a runner
//! that hands back a ready tensor. The second is what remains of the host when forms take the products. Then both again
//! as captured steps on one thread.
//! `RAYON_NUM_THREADS=2 cargo run --release -p structures-graph --example decode_overhead [context]`

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use structures_graph::session::{View, ViewMut};
use structures_graph::{
    check, Alone, AttrValue, Capture, Dim, Frozen, Graph, GraphBuilder, GraphError, Install,
    Layout, OpKind, ParamRef, ParamSource, Plan, Session, SpanOutcome, SpanRunner, StateRegion,
    ValueId,
};

const LAYERS: usize = 30;
const WIDTH: usize = 576;
const FFN: usize = 1536;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD: usize = 64;
const VOCABULARY: usize = 1024;

fn symbol(name: &str) -> Dim {
    Dim::Symbol(name.into())
}

fn tokens(tail: &[usize]) -> Vec<Dim> {
    let mut dims = vec![symbol("B"), symbol("T")];
    dims.extend(tail.iter().map(|n| Dim::Size(*n)));
    dims
}

struct Builder(GraphBuilder);

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
        let w = self.weight(path, &[WIDTH]);
        let eps = [("eps", AttrValue::Float(1e-5))];
        let operands = [Some(x), Some(w)];
        self.0.op(
            OpKind::RmsNorm,
            path,
            "y",
            &operands,
            &eps,
            tokens(&[WIDTH]),
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
        let k = self.linear(path, x, WIDTH, heads * HEAD);
        let mut y = self.reshape(path, k, &[heads, HEAD]);
        if let Some(t) = tables {
            let operands = [Some(y), Some(t[0]), Some(t[1])];
            y = self.0.op(
                OpKind::Rope,
                path,
                "rope",
                &operands,
                &[],
                tokens(&[heads, HEAD]),
            );
        }
        let perm = [(
            "perm",
            AttrValue::List([0, 2, 1, 3].map(AttrValue::Int).to_vec()),
        )];
        let dims = vec![symbol("B"), Dim::Size(heads), symbol("T"), Dim::Size(HEAD)];
        self.0
            .op(OpKind::Transpose, path, "turned", &[Some(y)], &perm, dims)
    }

    fn cached(&mut self, path: &str, x: ValueId) -> ValueId {
        let region = self.0.state(StateRegion::growing(
            format!("{path}.cache"),
            KV_HEADS,
            HEAD,
        ));
        let dims = vec![
            symbol("B"),
            Dim::Size(KV_HEADS),
            symbol("S"),
            Dim::Size(HEAD),
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

fn graph() -> Graph {
    let mut b = Builder(GraphBuilder::new("decode"));
    let ids = b.0.input("ids", tokens(&[]));
    let positions = b.0.input("positions", vec![symbol("T")]);
    let w = b.weight("embed", &[VOCABULARY, WIDTH]);
    let operands = [Some(ids), Some(w)];
    let mut x = b.0.op(
        OpKind::Embedding,
        "embed",
        "y",
        &operands,
        &[],
        tokens(&[WIDTH]),
    );
    let freqs = (0..HEAD / 2).map(|i| 1e4f64.powf(-2.0 * i as f64 / HEAD as f64));
    let freqs = AttrValue::List(freqs.map(AttrValue::Float).collect());
    let table = vec![symbol("T"), Dim::Size(HEAD / 2)];
    let tables = b.0.ops(
        OpKind::RopeTable,
        "rotary",
        &[Some(positions)],
        &[("inv_freq", freqs)],
        vec![("cos", table.clone()), ("sin", table)],
    );
    for i in 0..LAYERS {
        let p = |s: &str| format!("layers.{i}.{s}");
        let n = b.norm(&p("norm1"), x);
        let q = b.heads(&p("q"), n, HEADS, Some(&tables));
        let k = b.heads(&p("k"), n, KV_HEADS, Some(&tables));
        let v = b.heads(&p("v"), n, KV_HEADS, None);
        let (k, v) = (b.cached(&p("k"), k), b.cached(&p("v"), v));
        let causal = [("causal", AttrValue::Flag(true))];
        let operands = [Some(q), Some(k), Some(v)];
        let dims = tokens(&[HEADS, HEAD]);
        let a =
            b.0.op(OpKind::Attention, &p("attn"), "y", &operands, &causal, dims);
        let a = b.reshape(&p("attn"), a, &[WIDTH]);
        let o = b.linear(&p("o"), a, WIDTH, WIDTH);
        x = b.0.op(
            OpKind::Add,
            &p("add1"),
            "y",
            &[Some(x), Some(o)],
            &[],
            tokens(&[WIDTH]),
        );
        let n = b.norm(&p("norm2"), x);
        let (g, u) = (
            b.linear(&p("gate"), n, WIDTH, FFN),
            b.linear(&p("up"), n, WIDTH, FFN),
        );
        let silu = [("kind", AttrValue::Word("silu".into()))];
        let g = b.0.op(
            OpKind::Act,
            &p("act"),
            "y",
            &[Some(g)],
            &silu,
            tokens(&[FFN]),
        );
        let m = b.0.op(
            OpKind::Mul,
            &p("mul"),
            "y",
            &[Some(g), Some(u)],
            &[],
            tokens(&[FFN]),
        );
        let d = b.linear(&p("down"), m, FFN, WIDTH);
        x = b.0.op(
            OpKind::Add,
            &p("add2"),
            "y",
            &[Some(x), Some(d)],
            &[],
            tokens(&[WIDTH]),
        );
    }
    let y = b.norm("norm", x);
    b.0.output("y", y);
    b.0.finish()
}

struct Random(Arc<Graph>);

impl ParamSource for Random {
    fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
        let missing = || GraphError::MissingParam {
            param: param.to_string(),
            reason: "not in the graph".into(),
        };
        let value = self.0.value_named(&param.to_string()).ok_or_else(missing)?;
        let dims: Vec<usize> = self.0.value(value).dims.iter().filter_map(size).collect();
        Tensor::randn(0f32, 0.05, dims, &Device::Cpu).map_err(|_| missing())
    }
}

fn size(d: &Dim) -> Option<usize> {
    match d {
        Dim::Size(n) => Some(*n),
        Dim::Symbol(_) => None,
    }
}

/// Answers a linear of one row with a ready tensor.
struct Ready(Tensor);

impl SpanRunner for Ready {
    fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        Ok(SpanOutcome::Done(vec![self.0.clone()]))
    }

    fn freeze(&self, _: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
        Ok(Frozen::Served { allocates: false })
    }

    fn replay(&self, _: &[Option<View<'_>>], out: &mut [ViewMut<'_>]) -> Result<(), GraphError> {
        out.iter_mut().for_each(|(data, _)| data.fill(0.0));
        Ok(())
    }
}

fn without_products(s: &Session) -> Result<Plan, Box<dyn std::error::Error>> {
    let g = s.graph();
    let mut installs = Vec::new();
    for id in g.op_ids().filter(|o| g.op(*o).kind == OpKind::Linear) {
        let op = g.op(id);
        let n = g
            .value(op.outputs[0])
            .dims
            .last()
            .and_then(size)
            .unwrap_or(0);
        installs.push(Install {
            name: g.value(op.outputs[0]).name.clone(),
            ops: vec![id],
            inputs: op.inputs[..1].to_vec(),
            outputs: op.outputs.clone(),
            runner: Arc::new(Ready(Tensor::zeros((1, 1, n), DType::F32, &Device::Cpu)?)),
        });
    }
    Ok(s.plan(installs)?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context: usize = std::env::args().nth(1).map_or(Ok(128), |s| s.parse())?;
    let g = Arc::new(graph());
    check(&g)?;
    let s = Session::new(g.clone(), &Random(g))?;
    let (host, bare) = (s.host_plan(), without_products(&s)?);
    let mut state = s.new_state(1, context + 64);
    let ids = |n: usize| Tensor::from_vec(vec![7i64; n], (1, n), &Device::Cpu);
    let at = |from: usize, n: usize| {
        Tensor::from_vec(
            (from..from + n).map(|i| i as i64).collect(),
            n,
            &Device::Cpu,
        )
    };
    let t = Instant::now();
    s.run(&host, &[ids(context)?, at(0, context)?], &mut state, None)?;
    println!(
        "prefill of {context}: {:.1} ms",
        t.elapsed().as_secs_f64() * 1e3
    );
    for (name, plan) in [("whole step", &host), ("step without its products", &bare)] {
        let mut times = Vec::new();
        for _ in 0..31 {
            state.truncate(context)?;
            let inputs = [ids(1)?, at(context, 1)?];
            let t = Instant::now();
            s.run(plan, &inputs, &mut state, None)?;
            times.push(t.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: median {:.3} ms, best {:.3} ms",
            times[15], times[0]
        );
    }
    let mut state = s.new_state(1, context + 64);
    state.reserve()?;
    s.run(&host, &[ids(context)?, at(0, context)?], &mut state, None)?;
    for (name, plan) in [
        ("captured step", &host),
        ("captured, without its products", &bare),
    ] {
        let inputs = [ids(1)?, at(context, 1)?];
        let capture = Capture {
            inputs: &inputs,
            state: &state,
            windows: &[],
            greedy: None,
        };
        let t = Instant::now();
        let mut step = s.capture(plan, &capture)?;
        let made = t.elapsed().as_secs_f64() * 1e3;
        let mut times = Vec::new();
        for _ in 0..31 {
            state.truncate(context)?;
            let t = Instant::now();
            step.replay(&mut state, &Alone)?;
            times.push(t.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: median {:.3} ms, best {:.3} ms; {} KB, captured in {made:.0} ms",
            times[15],
            times[0],
            step.bytes() >> 10
        );
    }
    Ok(())
}
