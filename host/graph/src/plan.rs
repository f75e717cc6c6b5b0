//! Schedules of a graph: which operations the host runs and which spans a runner takes.
//!
//! A span is one step, placed where all it reads exists and before everything that reads what it makes; the other
//! operations keep the host's order as far as that allows. The original operations of a span stay in the step, in
//! their order, as its fallback. Everything a plan relies on is checked here, so that a run only follows it.
//!
//! The home of a growing region is decided here too: it is the place of an install that does nothing but append to it,
//! when everybody who reads the region sits at that place and says that it reads one there, and so for every other region
//! that one of them reads: who reads one region there and one at home would have the first brought home for every call.
//! Otherwise that install is left out, and the region is the host's.
//!
//! An install without operations is no step: it chooses among scores, which is the captured step's business.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use crate::graph::{Graph, OpId, Origin, ValueId};
use crate::ops::OpKind;
use crate::place::Place;
use crate::session::Install;
use crate::GraphError;

/// A schedule for the session that made it.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) graph: Arc<Graph>,
    pub(crate) steps: Vec<Step>,
    pub(crate) installs: Vec<Install>,
}

/// One step: what to run and which values nobody reads afterwards.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) what: What,
    pub(crate) drop: Vec<ValueId>,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    /// A host operation.
    Op(OpId),
    /// An install, by index; its operations in host order.
    Span { install: usize, ops: Vec<OpId> },
}

impl Plan {
    /// Spans handed to runners.
    pub fn installs(&self) -> &[Install] {
        &self.installs
    }

    /// Tells everybody who sits at a place that it is gone.
    ///
    /// # Errors
    /// Where one of them says that the run ends.
    pub(crate) fn place_lost(&self, place: &str, reason: &str) -> Result<(), GraphError> {
        for install in &self.installs {
            let there = install.runner.place();
            if there.is_some_and(|p| p.name() == place) {
                install.runner.place_lost(reason)?;
            }
        }
        Ok(())
    }

    /// Growing regions whose home is a place under this plan, by index, with the place.
    pub fn housed(&self) -> impl Iterator<Item = (usize, &Place)> {
        let installs = self.installs.iter();
        installs.filter_map(|i| Some((appends(&self.graph, i)?, i.runner.place()?)))
    }

    /// Whether the host runs everything.
    pub fn is_host(&self) -> bool {
        self.installs.is_empty()
    }

    pub(crate) fn new(graph: Arc<Graph>, installs: Vec<Install>) -> Result<Plan, GraphError> {
        let readers = graph.readers();
        let owned = owners(&graph, &installs)?;
        let mut stays = housed(&graph, &installs, &owned, &readers).into_iter();
        let mut installs = installs;
        installs.retain(|_| stays.next().unwrap_or(true));
        let owners = owners(&graph, &installs)?;
        for (i, install) in installs.iter().enumerate() {
            match install.chooses() {
                Some(scores) => check_choice(&graph, &installs[..i], install, scores)?,
                None => check(&graph, install, i, &owners, &readers)?,
            }
        }
        let order = order(&graph, &installs, &owners)?;
        let steps = with_drops(&graph, &installs, order);
        Ok(Plan {
            graph,
            steps,
            installs,
        })
    }
}

/// The region an install appends to at its place, when that is all it does.
pub(crate) fn appends(graph: &Graph, install: &Install) -> Option<usize> {
    let [op] = install.ops.as_slice() else {
        return None;
    };
    let op = graph
        .ops
        .get(op.0)
        .filter(|op| op.kind == OpKind::KvAppend)?;
    install.runner.place()?;
    let region = op.inputs.get(1).copied().flatten()?;
    match graph.value(region).origin {
        Origin::State(i) => Some(i),
        _ => None,
    }
}

/// Which installs stay: those that append to a region where everybody who reads it reads it where it lies, and all others.
fn housed(
    graph: &Graph,
    installs: &[Install],
    owners: &[Option<usize>],
    readers: &[Vec<(OpId, usize)>],
) -> Vec<bool> {
    let readers_of = |op: OpId| {
        let values = graph.op(op).outputs.iter();
        values.flat_map(|v| readers[v.0].iter().map(|(reader, _)| *reader))
    };
    let there = |install: &Install| {
        let all = install.ops.iter().flat_map(|op| readers_of(*op));
        let mut all = all.map(|op| owners[op.0].map(|i| &installs[i].runner));
        all.all(|reader| {
            reader.is_some_and(|r| r.place() == install.runner.place() && r.reads_housed())
        })
    };
    let append = |i: &Install| appends(graph, i).is_some();
    let mut stays: Vec<bool> = installs.iter().map(|i| !append(i) || there(i)).collect();
    // By who reads it, an install or an operation: who makes the regions it reads.
    let mut reads: HashMap<Result<usize, OpId>, Vec<Option<usize>>> = HashMap::new();
    for op in graph
        .op_ids()
        .filter(|op| graph.op(*op).kind == OpKind::KvAppend)
    {
        for reader in readers_of(op) {
            let reader = owners[reader.0].ok_or(reader);
            reads.entry(reader).or_default().push(owners[op.0]);
        }
    }
    // One that leaves may take those with it that are read beside another one.
    loop {
        let before = stays.clone();
        for makers in reads.values() {
            let housed = |i: &usize| append(&installs[*i]) && stays[*i];
            if !makers.iter().all(|i| i.as_ref().is_some_and(housed)) {
                let mine = makers.iter().flatten().filter(|i| append(&installs[**i]));
                mine.for_each(|i| stays[*i] = false);
            }
        }
        if stays == before {
            return stays;
        }
    }
}

/// A choice is among scores that the graph gives, at a place, and the only one there.
fn check_choice(
    graph: &Graph,
    before: &[Install],
    install: &Install,
    scores: ValueId,
) -> Result<(), GraphError> {
    if !graph.outputs.iter().any(|(_, v)| *v == scores) {
        let value = graph.values.get(scores.0).map_or("", |v| v.name.as_str());
        let reason = format!("chooses among `{value}`, which is no output of the graph");
        return refused(&install.name, reason);
    }
    if install.runner.place().is_none() {
        return refused(&install.name, "chooses at no place".into());
    }
    let same =
        |i: &&Install| i.chooses() == Some(scores) && i.runner.place() == install.runner.place();
    match before.iter().find(same) {
        None => Ok(()),
        Some(other) => {
            let value = &graph.value(scores).name;
            let reason = format!("`{}` already chooses among `{value}` there", other.name);
            refused(&install.name, reason)
        }
    }
}

fn refused<T>(name: &str, reason: String) -> Result<T, GraphError> {
    Err(GraphError::Span {
        name: name.into(),
        reason,
    })
}

fn title(graph: &Graph, op: OpId) -> String {
    let op = graph.op(op);
    let name = op.outputs.first().map(|v| graph.value(*v).name.as_str());
    format!("{} `{}`", op.kind, name.unwrap_or(&op.module))
}

/// The install that owns each operation.
fn owners(graph: &Graph, installs: &[Install]) -> Result<Vec<Option<usize>>, GraphError> {
    let mut owners = vec![None; graph.ops.len()];
    for (i, install) in installs.iter().enumerate() {
        if install.ops.is_empty() && install.chooses().is_none() {
            return refused(&install.name, "has no operation".into());
        }
        for op in &install.ops {
            let Some(owner) = owners.get_mut(op.0) else {
                return refused(&install.name, format!("operation {} does not exist", op.0));
            };
            match owner.replace(i) {
                None => {}
                Some(j) if j == i => {
                    return refused(
                        &install.name,
                        format!("{} is listed twice", title(graph, *op)),
                    )
                }
                Some(j) => {
                    return refused(
                        &install.name,
                        format!(
                            "{} already belongs to `{}`",
                            title(graph, *op),
                            installs[j].name
                        ),
                    )
                }
            }
        }
    }
    Ok(owners)
}

fn check(
    graph: &Graph,
    install: &Install,
    index: usize,
    owners: &[Option<usize>],
    readers: &[Vec<(OpId, usize)>],
) -> Result<(), GraphError> {
    let name = &install.name;
    let inside = |op: OpId| owners[op.0] == Some(index);
    let made_inside = |v: ValueId| graph.producer(v).is_some_and(|(op, _)| inside(op));
    for v in install.inputs.iter().flatten().chain(&install.outputs) {
        if v.0 >= graph.values.len() {
            return refused(name, format!("value {} does not exist", v.0));
        }
    }
    if install.outputs.is_empty() {
        return refused(name, "has no output".into());
    }
    for v in install.inputs.iter().flatten() {
        if made_inside(*v) {
            return refused(
                name,
                format!("input `{}` is made inside the span", graph.value(*v).name),
            );
        }
        if matches!(graph.value(*v).origin, Origin::State(_)) && graph.fixed_region(*v).is_none() {
            return refused(
                name,
                format!(
                    "input `{}` is a state region, not a value",
                    graph.value(*v).name
                ),
            );
        }
    }
    let mut outputs = HashSet::new();
    for v in &install.outputs {
        if !made_inside(*v) {
            return refused(
                name,
                format!(
                    "output `{}` is not made inside the span",
                    graph.value(*v).name
                ),
            );
        }
        if !outputs.insert(*v) {
            return refused(
                name,
                format!("output `{}` is listed twice", graph.value(*v).name),
            );
        }
    }
    // What the runner is not given it cannot have read: every edge into the span is an input, views aside.
    let given: HashSet<ValueId> = install
        .inputs
        .iter()
        .flatten()
        .map(|v| graph.skip_views(*v))
        .collect();
    for op in &install.ops {
        let o = graph.op(*op);
        let writes = matches!(o.kind, OpKind::KvAppend | OpKind::StateWrite);
        if writes && appends(graph, install).is_none() {
            return refused(
                name,
                format!(
                    "{} writes a state region; a span may only read one",
                    title(graph, *op)
                ),
            );
        }
        for v in o.inputs.iter().flatten() {
            // A region that is appended to is the state's, not a value that is given.
            let region = writes && matches!(graph.value(*v).origin, Origin::State(_));
            let weight = region || matches!(graph.value(*v).origin, Origin::Param { .. });
            if !weight && !made_inside(*v) && !given.contains(&graph.skip_views(*v)) {
                return refused(
                    name,
                    format!(
                        "{} reads `{}`, which is not an input of the span",
                        title(graph, *op),
                        graph.value(*v).name
                    ),
                );
            }
        }
        for v in o.outputs.iter().filter(|v| !outputs.contains(v)) {
            let value = &graph.value(*v).name;
            if let Some((reader, _)) = readers[v.0].iter().find(|(r, _)| !inside(*r)) {
                return refused(
                    name,
                    format!(
                        "interior value `{value}` is read by {} outside",
                        title(graph, *reader)
                    ),
                );
            }
            if graph.outputs.iter().any(|(_, g)| g == v) {
                return refused(name, format!("interior value `{value}` is a graph output"));
            }
        }
    }
    convex(graph, name, inside)
}

/// No path leaves the span and comes back.
fn convex(graph: &Graph, name: &str, inside: impl Fn(OpId) -> bool) -> Result<(), GraphError> {
    // Outside operations that depend on the span.
    let mut after = vec![false; graph.ops.len()];
    for op in graph.op_ids() {
        let through = graph.op(op).inputs.iter().flatten().find_map(|v| {
            let (p, _) = graph.producer(*v)?;
            (after[p.0] || (inside(p) && !inside(op))).then_some(p)
        });
        match through {
            Some(p) if inside(op) => {
                return refused(
                    name,
                    format!(
                        "not convex: {} comes back into the span at {}",
                        title(graph, p),
                        title(graph, op)
                    ),
                )
            }
            Some(_) => after[op.0] = true,
            None => {}
        }
    }
    Ok(())
}

/// Steps in an order in which everything read exists: always the ready step whose operation comes first.
fn order(
    graph: &Graph,
    installs: &[Install],
    owners: &[Option<usize>],
) -> Result<Vec<What>, GraphError> {
    // A step is named by its key: the index of its operation, of its first one for a span.
    let mut span_ops: Vec<Vec<OpId>> = installs.iter().map(|i| i.ops.clone()).collect();
    span_ops.iter_mut().for_each(|ops| ops.sort_unstable());
    let key = |op: OpId| owners[op.0].map_or(op.0, |i| span_ops[i][0].0);
    let mut after: HashMap<usize, HashSet<usize>> = HashMap::new();
    let mut waits: HashMap<usize, usize> = HashMap::new();
    let mut edge = |from: ValueId, to: usize| {
        if let Some((p, _)) = graph.producer(from) {
            let from = key(p);
            if from != to && after.entry(from).or_default().insert(to) {
                *waits.entry(to).or_insert(0) += 1;
            }
        }
    };
    for op in graph.op_ids() {
        for v in graph.op(op).inputs.iter().flatten() {
            edge(*v, key(op));
        }
    }
    for (install, ops) in installs.iter().zip(&span_ops) {
        let Some(first) = ops.first() else { continue };
        for v in install.inputs.iter().flatten() {
            edge(*v, first.0);
        }
    }
    let keys: HashSet<usize> = graph.op_ids().map(key).collect();
    let mut ready: BinaryHeap<Reverse<usize>> = keys
        .iter()
        .filter(|k| !waits.contains_key(k))
        .map(|k| Reverse(*k))
        .collect();
    let mut steps = Vec::with_capacity(keys.len());
    while let Some(Reverse(k)) = ready.pop() {
        steps.push(match owners[k] {
            Some(install) => What::Span {
                install,
                ops: span_ops[install].clone(),
            },
            None => What::Op(OpId(k)),
        });
        for next in after.get(&k).into_iter().flatten() {
            if let Some(n) = waits.get_mut(next) {
                *n -= 1;
                if *n == 0 {
                    ready.push(Reverse(*next));
                }
            }
        }
    }
    if steps.len() == keys.len() {
        return Ok(steps);
    }
    let stuck = |i: &usize| {
        let first = span_ops[*i].first();
        first.is_some_and(|op| waits.get(&op.0).is_some_and(|n| *n > 0))
    };
    match (0..installs.len()).find(stuck) {
        Some(i) => refused(
            &installs[i].name,
            "needs a value that needs the span: two spans or an input depend on each other".into(),
        ),
        None => Err(GraphError::Malformed {
            phase: graph.phase.clone(),
            at: "operations".into(),
            what: "have a cycle; run `check`".into(),
        }),
    }
}

fn with_drops(graph: &Graph, installs: &[Install], order: Vec<What>) -> Vec<Step> {
    let keep: HashSet<ValueId> = graph.outputs.iter().map(|(_, v)| *v).collect();
    let mut seen: HashSet<ValueId> = HashSet::new();
    let mut steps: Vec<Step> = order
        .into_iter()
        .rev()
        .map(|what| {
            let touched: Vec<ValueId> = match &what {
                What::Op(op) => touched(graph, *op).collect(),
                What::Span { install, ops } => ops
                    .iter()
                    .flat_map(|op| touched(graph, *op))
                    .chain(installs[*install].inputs.iter().flatten().copied())
                    .collect(),
            };
            let mut drop = Vec::new();
            for v in touched {
                let transient = matches!(graph.value(v).origin, Origin::Op { .. } | Origin::Input);
                if transient && !keep.contains(&v) && seen.insert(v) {
                    drop.push(v);
                }
            }
            Step { what, drop }
        })
        .collect();
    steps.reverse();
    steps
}

fn touched(graph: &Graph, op: OpId) -> impl Iterator<Item = ValueId> + '_ {
    let op = graph.op(op);
    op.inputs.iter().flatten().chain(&op.outputs).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Dim, GraphBuilder, StateRegion};
    use crate::session::{SpanOutcome, SpanRunner};
    use candle_core::Tensor;

    struct Declines;
    impl SpanRunner for Declines {
        fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            Ok(SpanOutcome::Host)
        }
    }

    /// x -> scale 0 -> scale 1 -> scale 2 -> add(3) with scale 0 as well; scale 4 of x beside them.
    fn graph() -> Arc<Graph> {
        let mut b = GraphBuilder::new("test");
        let d = || vec![Dim::Size(2)];
        let x = b.input("x", d());
        let by = |n: i64| [("by", crate::AttrValue::Int(n))];
        let a = b.op(OpKind::Scale, "", "a", &[Some(x)], &by(2), d());
        let c = b.op(OpKind::Scale, "", "c", &[Some(a)], &by(3), d());
        let e = b.op(OpKind::Scale, "", "e", &[Some(c)], &by(4), d());
        let f = b.op(OpKind::Add, "", "f", &[Some(a), Some(e)], &[], d());
        let g = b.op(OpKind::Scale, "", "g", &[Some(x)], &by(5), d());
        let h = b.op(OpKind::Add, "", "h", &[Some(f), Some(g)], &[], d());
        b.output("h", h);
        Arc::new(b.finish())
    }

    fn install(graph: &Graph, ops: &[&str], inputs: &[&str], outputs: &[&str]) -> Install {
        let v = |n: &&str| graph.value_named(n).unwrap();
        Install {
            name: "span".into(),
            ops: ops
                .iter()
                .map(|o| graph.producer(v(o)).unwrap().0)
                .collect(),
            inputs: inputs.iter().map(|i| Some(v(i))).collect(),
            outputs: outputs.iter().map(v).collect(),
            runner: Arc::new(Declines),
        }
    }

    fn steps(p: &Plan) -> String {
        let name = |op: &OpId| p.graph.value(p.graph.op(*op).outputs[0]).name.clone();
        p.steps
            .iter()
            .map(|s| match &s.what {
                What::Op(op) => name(op),
                What::Span { ops, .. } => format!("({})", ops.iter().map(name).collect::<String>()),
            })
            .collect()
    }

    struct There(Place);
    impl SpanRunner for There {
        fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            Ok(SpanOutcome::Host)
        }

        fn place(&self) -> Option<&Place> {
            Some(&self.0)
        }

        fn reads_housed(&self) -> bool {
            true
        }
    }

    /// Regions that have their home at a place where these appends and all readers of any region are. `reads` are the
    /// regions of each reader, by letter.
    fn homes(reads: &[&str], appends: &str) -> String {
        let mut b = GraphBuilder::new("test");
        let d = || vec![Dim::Size(2)];
        let x = b.input("x", d());
        let mut all = HashMap::new();
        for name in ["k", "v", "w"] {
            let region = b.state(StateRegion::growing(name, 1, 4));
            let grown = [Some(x), Some(region)];
            let grown = b.op(
                OpKind::KvAppend,
                "",
                &format!("all_{name}"),
                &grown,
                &[],
                d(),
            );
            all.insert(name.chars().next().unwrap(), grown);
        }
        let mut spans = Vec::new();
        for (i, reads) in reads.iter().enumerate() {
            let reads: Vec<_> = reads.chars().map(|name| Some(all[&name])).collect();
            let y = b.op(OpKind::Attention, "", &format!("y{i}"), &reads, &[], d());
            b.output(&format!("y{i}"), y);
            spans.push((y, reads));
        }
        spans.extend(appends.chars().map(|name| (all[&name], vec![Some(x)])));
        let g = Arc::new(b.finish());
        let installs = spans.into_iter().map(|(made, inputs)| Install {
            name: g.value(made).name.clone(),
            ops: vec![g.producer(made).unwrap().0],
            inputs,
            outputs: vec![made],
            runner: Arc::new(There(Place::new("a"))),
        });
        let plan = Plan::new(g.clone(), installs.collect()).unwrap();
        let homes = plan
            .housed()
            .map(|(region, _)| "kvw".as_bytes()[region] as char);
        homes.collect()
    }

    #[test]
    fn regions_that_somebody_reads_together_have_their_home_together() {
        assert_eq!(homes(&["kv"], "kv"), "kv");
        assert_eq!(homes(&["kv"], "k"), "");
        assert_eq!(homes(&["kv"], "v"), "");
        // Who reads one region alone says nothing of others.
        assert_eq!(homes(&["k", "v"], "k"), "k");
        assert_eq!(homes(&["k", "kv"], "k"), "");
        assert_eq!(homes(&["k", "kv"], "kv"), "kv");
        // From reader to reader.
        assert_eq!(homes(&["kv", "vw"], "kv"), "");
        assert_eq!(homes(&["kv", "vw"], "kvw"), "kvw");
        assert_eq!(homes(&["kv", "w"], "kv"), "kv");
    }

    #[test]
    fn the_host_plan_keeps_the_order() {
        let p = Plan::new(graph(), vec![]).unwrap();
        assert_eq!(steps(&p), "acefgh");
        let drops = |i: usize| -> Vec<&str> {
            let g = &p.graph;
            p.steps[i]
                .drop
                .iter()
                .map(|v| g.value(*v).name.as_str())
                .collect()
        };
        assert!(drops(0).is_empty() && drops(1).is_empty());
        assert_eq!(drops(2), ["c"]);
        assert_eq!(drops(3), ["a", "e"]);
        assert_eq!(drops(4), ["x"]);
        assert_eq!(drops(5), ["f", "g"]);
    }

    #[test]
    fn a_span_waits_for_all_it_reads() {
        let g = graph();
        let p = |i| Plan::new(g.clone(), i).map(|p| steps(&p));
        let one = install(&g, &["c", "e"], &["a"], &["e"]);
        assert_eq!(p(vec![one]).unwrap(), "a(ce)fgh");
        // Listing g as an input moves the span behind it although no operation of it reads g.
        let late = install(&g, &["c", "e"], &["a", "g"], &["e"]);
        assert_eq!(p(vec![late]).unwrap(), "ag(ce)fh");
        let wide = install(&g, &["f", "h"], &["a", "e", "g"], &["h"]);
        assert_eq!(p(vec![wide]).unwrap(), "aceg(fh)");
    }

    #[test]
    fn bad_installs_are_refused_by_name() {
        let g = graph();
        let cases = [
            (
                install(&g, &["c", "f"], &["a", "e"], &["c", "f"]),
                "not convex",
            ),
            (install(&g, &["c", "e"], &[], &["e"]), "not an input"),
            (
                install(&g, &["a", "c", "e"], &["x"], &["e"]),
                "interior value `a` is read by add",
            ),
            (install(&g, &["c", "e"], &["a"], &["f"]), "not made inside"),
            (install(&g, &["c", "e"], &["c"], &["e"]), "made inside"),
            (install(&g, &["c", "e"], &["a"], &[]), "no output"),
            (
                install(&g, &["c", "e"], &["a"], &["e", "e"]),
                "listed twice",
            ),
            (install(&g, &["c", "c"], &["a"], &["c"]), "listed twice"),
            (
                install(&g, &["f", "h"], &["a", "e", "g"], &["f"]),
                "graph output",
            ),
            (install(&g, &[], &["a"], &["e"]), "no operation"),
        ];
        for (i, want) in cases {
            match Plan::new(g.clone(), vec![i]).map(|p| steps(&p)) {
                Err(GraphError::Span { reason, .. }) => {
                    assert!(reason.contains(want), "`{reason}` lacks `{want}`")
                }
                other => panic!("{want}: {other:?}"),
            }
        }
        let (a, b) = (
            install(&g, &["c", "e"], &["a"], &["e"]),
            install(&g, &["e"], &["c"], &["e"]),
        );
        let e = Plan::new(g.clone(), vec![a, b]).err().unwrap();
        assert!(e.to_string().contains("already belongs"), "{e}");
    }

    #[test]
    fn two_spans_that_need_each_other_are_refused() {
        let mut b = GraphBuilder::new("test");
        let d = || vec![Dim::Size(2)];
        let by = |n: i64| [("by", crate::AttrValue::Int(n))];
        let x = b.input("x", d());
        let p1 = b.op(OpKind::Scale, "", "p", &[Some(x)], &by(2), d());
        let q1 = b.op(OpKind::Scale, "", "q", &[Some(x)], &by(3), d());
        let p2 = b.op(OpKind::Scale, "", "r", &[Some(q1)], &by(4), d());
        let q2 = b.op(OpKind::Scale, "", "s", &[Some(p1)], &by(5), d());
        let y = b.op(OpKind::Add, "", "y", &[Some(p2), Some(q2)], &[], d());
        b.output("y", y);
        let g = Arc::new(b.finish());
        let first = install(&g, &["p", "r"], &["x", "q"], &["p", "r"]);
        let second = install(&g, &["q", "s"], &["x", "p"], &["q", "s"]);
        assert!(Plan::new(g.clone(), vec![first.clone()]).is_ok());
        let e = Plan::new(g.clone(), vec![first, second]).err().unwrap();
        assert!(e.to_string().contains("depend on each other"), "{e}");
    }
}
