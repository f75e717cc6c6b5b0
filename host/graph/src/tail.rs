//! Where the last row is enough: after a prompt, only its last token's scores are read.
//!
//! From an output back, operations that make each row from the same row of one operand alone are the output's *tail*.
//! A run that is asked for the last row cuts the value the tail begins with, so that what follows (a final norm and the
//! product with every word of a vocabulary) is done for one row. What is cut is a value that the plan makes and that
//! nothing outside of the tail reads; without one the run is as any other.

use crate::graph::{Dim, Graph, OpId, ValueId};
use crate::ops::OpKind;
use crate::plan::{Plan, What};

/// Symbol of the rows.
pub(crate) const ROWS: &str = "T";

/// The value to cut, and along which dim.
pub(crate) fn cut(plan: &Plan, output: ValueId) -> Option<(ValueId, usize)> {
    let graph = &*plan.graph;
    let readers = graph.readers();
    let is_output = |v: ValueId| graph.outputs.iter().any(|(_, o)| *o == v);
    let mut tail: Vec<OpId> = Vec::new();
    let mut best = None;
    let mut value = output;
    while let Some((op, _)) = graph.producer(value) {
        let Some(from) = row_by_row(graph, op) else {
            break;
        };
        tail.push(op);
        let alone = readers[from.0].iter().all(|(reader, _)| *reader == op) && !is_output(from);
        let axis = graph.value(from).dims.iter().position(is_rows);
        let (true, Some(axis)) = (alone, axis) else {
            break;
        };
        if last_made(plan, from, &tail) {
            best = Some((from, axis));
        }
        value = from;
    }
    best
}

fn is_rows(dim: &Dim) -> bool {
    matches!(dim, Dim::Symbol(s) if s == ROWS)
}

/// The operand whose rows an operation maps one by one; its other operands are parameters.
fn row_by_row(graph: &Graph, op: OpId) -> Option<ValueId> {
    let op = graph.op(op);
    let kind = matches!(
        op.kind,
        OpKind::Linear
            | OpKind::Bias
            | OpKind::Scale
            | OpKind::Act
            | OpKind::RmsNorm
            | OpKind::LayerNorm
    );
    let mut rest = op.inputs.iter().skip(1).flatten();
    let params = rest.all(|v| graph.param(*v).is_some());
    let rows = op
        .outputs
        .first()
        .is_some_and(|v| graph.value(*v).dims.iter().any(is_rows));
    (kind && params && rows && op.outputs.len() == 1)
        .then(|| op.inputs.first().copied().flatten())
        .flatten()
}

/// Whether the plan makes the value and does nothing afterwards but the tail.
fn last_made(plan: &Plan, value: ValueId, tail: &[OpId]) -> bool {
    let makes = |what: &What| match what {
        What::Op(op) => plan.graph.op(*op).outputs.contains(&value),
        What::Span { install, .. } => plan.installs[*install].outputs.contains(&value),
    };
    let Some(at) = plan.steps.iter().position(|s| makes(&s.what)) else {
        return false;
    };
    plan.steps[at + 1..].iter().all(|s| match &s.what {
        What::Op(op) => tail.contains(op),
        What::Span { ops, .. } => ops.iter().all(|op| tail.contains(op)),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use candle_core::{Device, Tensor};

    use crate::captured::Capture;
    use crate::crew::Alone;
    use crate::graph::{Dim, Graph, GraphBuilder, Layout, ParamRef};
    use crate::ops::{AttrValue, OpKind};
    use crate::session::tests::Random;
    use crate::session::{Install, Session, SpanOutcome, SpanRunner};
    use crate::GraphError;

    /// `logits = head(norm(h))`, `h = 2 embed(ids)`; `h` is an output as well where it is asked for.
    fn graph(hidden: bool) -> Arc<Graph> {
        let mut b = GraphBuilder::new("tail");
        let dims = |last: &[usize]| -> Vec<Dim> {
            let lead = ["B", "T"].map(|n| Dim::Symbol(n.into()));
            lead.into_iter()
                .chain(last.iter().map(|n| Dim::Size(*n)))
                .collect()
        };
        let p = |path: &str| ParamRef {
            path: path.into(),
            name: "weight".into(),
            rows: None,
        };
        let ids = b.input("ids", dims(&[]));
        let table = b.param(p("embed"), &[11, 8], Layout::OutIn);
        let norm = b.param(p("norm"), &[8], Layout::InOut);
        let head = b.param(p("head"), &[8, 8], Layout::OutIn);
        let x = [Some(ids), Some(table)];
        let x = b.op(OpKind::Embedding, "embed", "x", &x, &[], dims(&[8]));
        let x = [Some(x), Some(x)];
        let h = b.op(OpKind::Add, "sum", "h", &x, &[], dims(&[8]));
        let eps = [("eps", AttrValue::Float(1e-5))];
        let n = [Some(h), Some(norm)];
        let n = b.op(OpKind::RmsNorm, "norm", "n", &n, &eps, dims(&[8]));
        let y = [Some(n), Some(head)];
        let y = b.op(OpKind::Linear, "head", "y", &y, &[], dims(&[8]));
        b.output("logits", y);
        if hidden {
            b.output("hidden", h);
        }
        Arc::new(b.finish())
    }

    /// Gives its input back, and keeps how many rows it saw.
    struct Seen(Mutex<Vec<usize>>);
    impl SpanRunner for Seen {
        fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            let x = inputs[0].clone().unwrap();
            self.0.lock().unwrap().push(x.dims()[1]);
            Ok(SpanOutcome::Done(vec![x]))
        }
    }

    #[test]
    fn only_the_last_row_goes_through_what_maps_rows_one_by_one() {
        for hidden in [false, true] {
            let s = Session::new(graph(hidden), &Random).unwrap();
            let seen = Arc::new(Seen(Mutex::default()));
            let value = |name: &str| s.graph().value_named(name).unwrap();
            let (n, y) = (value("norm.n"), value("head.y"));
            let install = Install {
                name: "head".into(),
                ops: vec![s.graph().producer(y).unwrap().0],
                inputs: vec![Some(n)],
                outputs: vec![y],
                runner: seen.clone(),
            };
            let plan = s.plan(vec![install]).unwrap();
            let ids = Tensor::new(&[[1_u32, 2, 3, 4, 5]], &Device::Cpu).unwrap();
            let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let mut state = s.new_state(1, 8);
            let all = s
                .run(&plan, std::slice::from_ref(&ids), &mut state, None)
                .unwrap();
            let mut state = s.new_state(1, 8);
            let last = s
                .run_for_last_row(&plan, std::slice::from_ref(&ids), &mut state, 0)
                .unwrap();
            let capture = Capture {
                inputs: &[ids],
                state: &state,
                windows: &[],
                greedy: None,
                last_row: Some(0),
            };
            let mut step = s.capture(&plan, &capture).unwrap();
            step.replay(&mut state, &Alone).unwrap();
            assert_eq!(*seen.0.lock().unwrap(), [5, 1, 1]);
            for (name, want) in ["logits", "hidden"].iter().zip(&last) {
                let got = step.read(name).unwrap();
                assert_eq!(got.dims(), want.dims());
                assert_eq!(flat(&got), flat(want), "captured");
            }
            assert_eq!(last[0].dims(), [1, 1, 8]);
            assert_eq!(flat(&all[0])[4 * 8..], flat(&last[0]));
            if hidden {
                assert_eq!(flat(&all[1]), flat(&last[1]), "read by somebody else");
            }
        }
    }
}
