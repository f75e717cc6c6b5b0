//! What a decode step costs beside its products: a decoder of SmolLM2-135M's sizes (30 layers, width 576, FFN 1536,
//! 9/3 heads of 64; seeded weights, a small output head), run as it is, and with every `linear` answered by a runner
//! that hands back a ready tensor. The second is what remains of the host when forms take the products. Then both again
//! as captured steps on one thread.
//! `RAYON_NUM_THREADS=2 cargo run --release -p structures-graph --example decode_overhead [context]`

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use structures_graph::session::{View, ViewMut};
use structures_graph::{
    check, Alone, Capture, Dim, Frozen, GraphError, Install, OpKind, Plan, Session, SpanOutcome,
    SpanRunner,
};

#[path = "../tests/common/decoder.rs"]
mod decoder;

use decoder::{graph, Random, Sizes};

const SIZES: Sizes = Sizes {
    layers: 30,
    width: 576,
    ffn: 1536,
    heads: 9,
    kv_heads: 3,
    head: 64,
    vocabulary: 1024,
};

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
        let n = g.value(op.outputs[0]).dims.last().map_or(0, |d| match d {
            Dim::Size(n) => *n,
            Dim::Symbol(_) => 0,
        });
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
    let g = Arc::new(graph(SIZES));
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
            last_row: None,
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
