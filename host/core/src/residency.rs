//! Which operations of the host are worth running where seats are: those without which fewer bytes would have to cross
//! between a place and host memory.
//!
//! Every operation is on one of two sides, so the least traffic is a smallest cut: a value that somebody on the other
//! side reads is an edge of its bytes, once a direction. Among all smallest cuts the one with the fewest operations at
//! the place is taken, so each of them saves something, alone or with those it stands beside.
//!
//! An append to a region of the state is an operation like any other, and the region, as long as the state is, what it
//! makes; but it is at the place only together with everybody who reads the region, who must be able to read it there, and
//! with the appends to whatever other region one of them reads.
//!
//! Owns that choice, from the graph alone. Not here: which operations a backend declares, how one is bound
//! (`operations`), and whether it stays (the union's judgement).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use structures_graph::place::Place;
use structures_graph::session::Install;
use structures_graph::{Graph, OpId, OpKind, Origin, ValueId};

/// Operations that nobody has installed and that pay at this place, in the graph's order.
pub fn pays(
    graph: &Graph,
    installs: &[Install],
    place: &Place,
    executes: impl Fn(OpId) -> bool,
    reads_housed: impl Fn(OpId) -> bool,
    bytes: impl Fn(ValueId) -> u64,
) -> Vec<OpId> {
    let all_readers = graph.readers();
    let mut owner: BTreeMap<OpId, usize> = BTreeMap::new();
    for (i, install) in installs.iter().enumerate() {
        owner.extend(install.ops.iter().map(|op| (*op, i)));
    }
    // A reshape that nobody installed is the value it is made of, wherever that lies.
    let free = |op: OpId| graph.op(op).kind == OpKind::Reshape && !owner.contains_key(&op);
    let source = |mut v: ValueId| {
        while let Some((op, _)) = graph.producer(v).filter(|(op, _)| free(*op)) {
            match graph.op(op).inputs.first() {
                Some(Some(x)) => v = *x,
                _ => break,
            }
        }
        v
    };
    let mut cut = Cut::new();
    let mut node_of = BTreeMap::new();
    let there = |i: &usize| installs[*i].runner.place() == Some(place);
    for op in graph.op_ids().filter(|op| !free(*op)) {
        let node = match owner.get(&op) {
            Some(i) if there(i) => AWAY,
            Some(_) => HOME,
            None if executes(op) => cut.node(),
            None => HOME,
        };
        node_of.insert(op, node);
    }
    let node = |op: &OpId| node_of.get(op).copied().unwrap_or(HOME);
    // Who reads a value: an install only what it lists, an operation all its operands that are no parameters.
    let mut readers: BTreeMap<ValueId, BTreeSet<usize>> = BTreeMap::new();
    let mut reads = |v: ValueId, by: usize| {
        readers.entry(source(v)).or_default().insert(by);
    };
    for install in installs {
        // One without operations chooses among outputs, which are read here anyhow.
        let Some(first) = install.ops.first() else {
            continue;
        };
        let by = node(first);
        install.inputs.iter().flatten().for_each(|v| reads(*v, by));
    }
    for op in graph.op_ids() {
        if free(op) || owner.contains_key(&op) {
            continue;
        }
        let operands = graph.op(op).inputs.iter().flatten();
        let lies = |v: &ValueId| !matches!(graph.value(*v).origin, Origin::State(_));
        let values = operands.filter(|v| graph.param(**v).is_none() && lies(v));
        values.for_each(|v| reads(*v, node(&op)));
    }
    graph.outputs.iter().for_each(|(_, v)| reads(*v, HOME));
    // By who reads a region, an install or an operation: who appended to the last one it was found to read.
    let mut appended: BTreeMap<Result<usize, OpId>, usize> = BTreeMap::new();
    for op in graph
        .op_ids()
        .filter(|op| graph.op(*op).kind == OpKind::KvAppend)
    {
        let readers = graph.op(op).outputs.iter().flat_map(|v| &all_readers[v.0]);
        for (reader, _) in readers {
            let can = match owner.get(reader) {
                Some(i) => there(i) && installs[*i].runner.reads_housed(),
                None => executes(*reader) && reads_housed(*reader),
            };
            let by = owner.get(reader).copied().ok_or(*reader);
            if let Some(beside) = appended.insert(by, node(&op)) {
                cut.edge(node(&op), beside, NEVER);
                cut.edge(beside, node(&op), NEVER);
            }
            let reader = if can { node(reader) } else { HOME };
            cut.edge(node(&op), reader, NEVER);
        }
    }
    for (v, readers) in readers {
        let maker = graph.producer(v).map_or(HOME, |(op, _)| node(&op));
        if readers.iter().all(|r| *r == maker) {
            continue;
        }
        let (size, out, into) = (bytes(v), cut.node(), cut.node());
        cut.edge(maker, out, size);
        cut.edge(into, maker, size);
        for reader in readers {
            cut.edge(out, reader, NEVER);
            cut.edge(reader, into, NEVER);
        }
    }
    let away = cut.least();
    node_of
        .into_iter()
        .filter(|(_, node)| *node > HOME && away[*node])
        .map(|(op, _)| op)
        .collect()
}

/// What sits at the place.
const AWAY: usize = 0;
/// What sits in host memory, or at another place.
const HOME: usize = 1;
/// More than any cut costs.
const NEVER: u64 = u64::MAX >> 8;

/// A network between [`AWAY`] and [`HOME`]; an edge costs when its start is away and its end is not.
struct Cut {
    /// End and what may still flow; every edge is followed by its reverse.
    edges: Vec<(usize, u64)>,
    from: Vec<Vec<usize>>,
}

impl Cut {
    fn new() -> Self {
        Cut {
            edges: Vec::new(),
            from: vec![Vec::new(); 2],
        }
    }

    fn node(&mut self) -> usize {
        self.from.push(Vec::new());
        self.from.len() - 1
    }

    fn edge(&mut self, from: usize, to: usize, cost: u64) {
        if from != to {
            self.from[from].push(self.edges.len());
            self.edges.push((to, cost));
            self.from[to].push(self.edges.len());
            self.edges.push((from, 0));
        }
    }

    /// The edges by which nodes were first reached from [`AWAY`] where something may still flow.
    fn reach(&self) -> Vec<Option<usize>> {
        let mut by = vec![None; self.from.len()];
        let mut next = VecDeque::from([AWAY]);
        while let Some(node) = next.pop_front() {
            for edge in &self.from[node] {
                let (to, left) = self.edges[*edge];
                if left > 0 && to != AWAY && by[to].is_none() {
                    by[to] = Some(*edge);
                    next.push_back(to);
                }
            }
        }
        by
    }

    /// Which nodes are away in the smallest cut with the fewest of them: shortest paths are filled up until none is left.
    fn least(mut self) -> Vec<bool> {
        loop {
            let by = self.reach();
            let mut path = Vec::new();
            let mut at = HOME;
            while let Some(edge) = by[at] {
                path.push(edge);
                at = self.edges[edge ^ 1].0;
            }
            let Some(most) = path.iter().map(|e| self.edges[*e].1).min() else {
                let mut away: Vec<bool> = by.iter().map(Option::is_some).collect();
                away[AWAY] = true;
                return away;
            };
            for edge in path {
                self.edges[edge].1 -= most;
                self.edges[edge ^ 1].1 += most;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::Tensor;
    use structures_graph::graph::GraphBuilder;
    use structures_graph::session::{SpanOutcome, SpanRunner};
    use structures_graph::{Dim, GraphError, StateRegion};

    use super::*;

    struct At(Place, bool);

    impl SpanRunner for At {
        fn run(&self, _: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            Ok(SpanOutcome::Host)
        }

        fn place(&self) -> Option<&Place> {
            Some(&self.0)
        }

        fn reads_housed(&self) -> bool {
            self.1
        }
    }

    /// A graph of one-operand and two-operand operations over values of given sizes.
    struct Made {
        b: GraphBuilder,
        sizes: Vec<(ValueId, u64)>,
        seats: Vec<ValueId>,
        /// Whether seats read regions where they lie.
        housed: bool,
        /// What cannot be bound there.
        declined: Vec<ValueId>,
    }

    impl Made {
        fn new() -> Self {
            Made {
                b: GraphBuilder::new("test"),
                sizes: Vec::new(),
                seats: Vec::new(),
                housed: false,
                declined: Vec::new(),
            }
        }

        fn input(&mut self, name: &str, size: u64) -> ValueId {
            let v = self.b.input(name, vec![Dim::Size(1)]);
            self.sizes.push((v, size));
            v
        }

        fn op(&mut self, kind: OpKind, name: &str, of: &[ValueId], size: u64) -> ValueId {
            let of: Vec<_> = of.iter().map(|v| Some(*v)).collect();
            let v = self.b.op(kind, "", name, &of, &[], vec![Dim::Size(1)]);
            self.sizes.push((v, size));
            v
        }

        fn seat(&mut self, name: &str, of: &[ValueId], size: u64) -> ValueId {
            let v = self.op(OpKind::Call, name, of, size);
            self.seats.push(v);
            v
        }

        /// Names of what pays, where these kinds are declared.
        fn pays(self, kinds: &[OpKind]) -> Vec<String> {
            let (graph, place) = (self.b.finish(), Place::new("gpu:1"));
            let install = |v: &ValueId| {
                let op = graph.producer(*v).unwrap().0;
                Install {
                    name: graph.value(*v).name.clone(),
                    ops: vec![op],
                    inputs: graph.op(op).inputs.clone(),
                    outputs: vec![*v],
                    runner: Arc::new(At(place.clone(), self.housed)),
                }
            };
            let installs: Vec<Install> = self.seats.iter().map(install).collect();
            let size = |v: ValueId| self.sizes.iter().find(|(of, _)| *of == v).unwrap().1;
            let executes = |op: OpId| {
                let op = graph.op(op);
                kinds.contains(&op.kind) && !self.declined.contains(&op.outputs[0])
            };
            let attends = |op: OpId| graph.op(op).kind == OpKind::Attention;
            let found = pays(&graph, &installs, &place, executes, attends, size);
            let name = |op: OpId| graph.value(graph.op(op).outputs[0]).name.clone();
            found.into_iter().map(name).collect()
        }
    }

    use OpKind::{Add, Embedding, Mul, Reshape, Scale};

    #[test]
    fn what_stands_between_two_seats_is_taken_and_what_stands_at_an_edge_is_not() {
        let mut g = Made::new();
        let x = g.input("x", 8);
        let edge = g.op(Scale, "edge", &[x], 8);
        let a = g.seat("a", &[edge], 8);
        let between = g.op(Scale, "between", &[a], 8);
        let b = g.seat("b", &[between], 8);
        let last = g.op(Scale, "last", &[b], 8);
        g.b.output("y", last);
        // Before and after the seats as many bytes cross wherever the operation runs.
        assert_eq!(g.pays(&[Scale]), ["between"]);
    }

    #[test]
    fn operations_that_only_pay_together_are_taken_together() {
        let made = |kinds: &[OpKind]| {
            let mut g = Made::new();
            let x = g.input("x", 8);
            let a = g.seat("a", &[x], 8);
            let one = g.op(Scale, "one", &[a], 8);
            let two = g.op(Mul, "two", &[one, one], 8);
            let b = g.seat("b", &[two], 8);
            g.b.output("y", b);
            g.pays(kinds)
        };
        assert_eq!(made(&[Scale, Mul]), ["one", "two"]);
        // One of the two alone moves the edge and saves nothing.
        assert!(made(&[Scale]).is_empty());
        assert!(made(&[Mul]).is_empty());
    }

    #[test]
    fn an_operation_that_reads_little_and_makes_much_pays_before_a_seat_and_one_that_reads_much_does_not(
    ) {
        let mut g = Made::new();
        let ids = g.input("ids", 1);
        let x = g.op(Embedding, "x", &[ids], 8);
        let wide = g.input("wide", 64);
        let narrow = g.op(Scale, "narrow", &[wide], 8);
        let sum = g.op(Add, "sum", &[x, narrow], 8);
        let a = g.seat("a", &[sum], 8);
        g.b.output("y", a);
        // The sum on the device would bring two values for one.
        assert!(g.pays(&[Embedding, Add, Scale]).is_empty());
        let mut g = Made::new();
        let ids = g.input("ids", 1);
        let x = g.op(Embedding, "x", &[ids], 8);
        let a = g.seat("a", &[x], 8);
        g.b.output("y", a);
        assert_eq!(g.pays(&[Embedding]), ["x"]);
    }

    #[test]
    fn a_reshape_is_its_value_and_a_value_that_both_sides_read_crosses_once() {
        let mut g = Made::new();
        let x = g.input("x", 8);
        let a = g.seat("a", &[x], 8);
        let other = g.op(Reshape, "other", &[a], 8);
        let sum = g.op(Add, "sum", &[x, other], 8);
        let b = g.seat("b", &[sum], 8);
        g.b.output("y", b);
        // `x` is there for `a` already.
        assert_eq!(g.pays(&[Add]), ["sum"]);
        let mut g = Made::new();
        let x = g.input("x", 8);
        let a = g.seat("a", &[x], 8);
        let sum = g.op(Scale, "sum", &[a], 8);
        let b = g.seat("b", &[sum], 8);
        let host = g.op(Mul, "host", &[sum, a], 8);
        g.b.output("y", b);
        g.b.output("z", host);
        // The host reads `a` and the sum anyhow: what is saved is bringing the sum back.
        let found = g.pays(&[Scale]);
        assert!(found.is_empty(), "{found:?}");
    }

    /// A seat makes what is appended, a seat and the host read the region; who of them is there.
    fn appended(housed: bool, host_reads: bool, kinds: &[OpKind]) -> Vec<String> {
        let mut g = Made::new();
        g.housed = housed;
        let x = g.input("x", 8);
        let region = g.b.state(StateRegion::growing("k", 1, 4));
        let made = g.seat("made", &[x], 8);
        let all = g.op(OpKind::KvAppend, "all", &[made, region], 80);
        let read = g.seat("read", &[all], 8);
        g.b.output("y", read);
        if host_reads {
            let host = g.op(Scale, "host", &[all], 8);
            g.b.output("z", host);
        }
        g.pays(kinds)
    }

    #[test]
    fn a_region_is_where_all_its_readers_are_and_can_read_it_or_at_home() {
        assert_eq!(appended(true, false, &[OpKind::KvAppend]), ["all"]);
        // The seat could have the region given to it, but not where it lies.
        assert!(appended(false, false, &[OpKind::KvAppend]).is_empty());
        assert!(appended(true, true, &[OpKind::KvAppend]).is_empty());
        assert!(appended(true, true, &[OpKind::KvAppend, Scale]).is_empty());
        // An operation there that reads one is as good as a seat.
        let mut g = Made::new();
        let x = g.input("x", 8);
        let region = g.b.state(StateRegion::growing("k", 1, 4));
        let made = g.seat("made", &[x], 8);
        let all = g.op(OpKind::KvAppend, "all", &[made, region], 80);
        let read = g.op(OpKind::Attention, "read", &[all], 8);
        let last = g.seat("last", &[read], 8);
        g.b.output("y", last);
        assert_eq!(
            g.pays(&[OpKind::KvAppend, OpKind::Attention]),
            ["all", "read"]
        );
    }

    #[test]
    fn regions_that_are_read_together_are_at_one_place() {
        let made = |declined: bool| {
            let mut g = Made::new();
            g.housed = true;
            let x = g.input("x", 8);
            let k = g.b.state(StateRegion::growing("k", 1, 4));
            let v = g.b.state(StateRegion::growing("v", 1, 4));
            let a = g.seat("a", &[x], 8);
            let all_k = g.op(OpKind::KvAppend, "all_k", &[a, k], 80);
            let all_v = g.op(OpKind::KvAppend, "all_v", &[a, v], 80);
            let read = g.seat("read", &[all_k, all_v], 8);
            g.b.output("y", read);
            g.declined.extend(declined.then_some(all_v));
            g.pays(&[OpKind::KvAppend])
        };
        assert_eq!(made(false), ["all_k", "all_v"]);
        // One alone would come home for every call of who reads both.
        assert!(made(true).is_empty());
    }

    #[test]
    fn nobody_is_there_so_nothing_is_taken() {
        let mut g = Made::new();
        let x = g.input("x", 8);
        let y = g.op(Scale, "y", &[x], 8);
        g.b.output("y", y);
        assert!(g.pays(&[Scale]).is_empty());
    }
}
