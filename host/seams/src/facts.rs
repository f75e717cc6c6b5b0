//! Facts of a host graph as look-ups: same tensor, only reader, direct edge. Views are skipped everywhere.
//!
//! Built once for a graph and shared by all seams that are located in it.

use std::collections::HashMap;

use structures_graph::{Graph, OpId, OpKind, ParamRef, ValueId};

/// One use of a value by an operation that is not a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reader {
    /// The operation.
    pub op: OpId,
    /// Operand position.
    pub operand: usize,
    /// The value it names: the tensor itself or a view of it.
    pub seen: ValueId,
}

/// Index of a host graph.
#[derive(Debug)]
pub struct HostFacts<'g> {
    graph: &'g Graph,
    roots: Vec<ValueId>,
    readers: Vec<Vec<Reader>>,
    direct: Vec<Vec<(OpId, usize)>>,
    outputs: Vec<Vec<String>>,
    params: HashMap<ParamRef, ValueId>,
}

impl<'g> HostFacts<'g> {
    /// Indexes a graph.
    pub fn new(graph: &'g Graph) -> Self {
        let roots: Vec<ValueId> = (0..graph.values.len())
            .map(|i| graph.skip_views(ValueId(i)))
            .collect();
        let direct = graph.readers();
        let mut readers = vec![Vec::new(); graph.values.len()];
        for op in graph.op_ids() {
            if graph.op(op).kind.is_view() {
                continue;
            }
            for (operand, seen) in graph.op(op).inputs.iter().enumerate() {
                if let Some(seen) = seen {
                    readers[roots[seen.0].0].push(Reader {
                        op,
                        operand,
                        seen: *seen,
                    });
                }
            }
        }
        let mut outputs = vec![Vec::new(); graph.values.len()];
        for (name, id) in &graph.outputs {
            outputs[id.0].push(name.clone());
        }
        let mut params = HashMap::new();
        for i in 0..graph.values.len() {
            if let Some((param, _)) = graph.param(ValueId(i)) {
                params.entry(param.clone()).or_insert(ValueId(i));
            }
        }
        HostFacts {
            graph,
            roots,
            readers,
            direct,
            outputs,
            params,
        }
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// The tensor a value is: the start of its chain of views.
    pub fn tensor(&self, id: ValueId) -> ValueId {
        self.roots[id.0]
    }

    /// The tensor that went into a state region last, where a value is what the region then holds; else the tensor
    /// the value is.
    pub fn appended(&self, id: ValueId) -> ValueId {
        let mut at = self.tensor(id);
        while let Some((op, _)) = self.graph.producer(at) {
            match (self.graph.op(op).kind, self.graph.op(op).inputs.first()) {
                (OpKind::KvAppend, Some(Some(source))) => at = self.tensor(*source),
                _ => break,
            }
        }
        at
    }

    /// Whether two values are one tensor.
    pub fn same_tensor(&self, a: ValueId, b: ValueId) -> bool {
        self.tensor(a) == self.tensor(b)
    }

    /// Every use of the tensor a value is.
    pub fn readers(&self, id: ValueId) -> &[Reader] {
        &self.readers[self.tensor(id).0]
    }

    /// The single operation that reads the tensor, when there is one and no graph output names it.
    pub fn only_reader(&self, id: ValueId) -> Option<OpId> {
        let readers = self.readers(id);
        let first = readers.first()?.op;
        (readers.iter().all(|r| r.op == first) && self.output_names(id).is_empty()).then_some(first)
    }

    /// Whether `to` reads a result of `from` with nothing but views between.
    pub fn direct_edge(&self, from: OpId, to: OpId) -> bool {
        self.graph.op(to).inputs.iter().flatten().any(|v| {
            self.graph
                .producer(self.tensor(*v))
                .is_some_and(|(op, _)| op == from)
        })
    }

    /// Names under which a run returns the tensor or a view of it.
    pub fn output_names(&self, id: ValueId) -> Vec<&str> {
        let root = self.tensor(id);
        (0..self.roots.len())
            .filter(|i| self.roots[*i] == root)
            .flat_map(|i| self.outputs[i].iter().map(String::as_str))
            .collect()
    }

    /// Names under which a run returns exactly this value.
    pub(crate) fn own_output_names(&self, id: ValueId) -> &[String] {
        &self.outputs[id.0]
    }

    /// Uses of exactly this value, views included.
    pub(crate) fn direct_readers(&self, id: ValueId) -> &[(OpId, usize)] {
        &self.direct[id.0]
    }

    /// The value of a parameter.
    pub fn param_value(&self, param: &ParamRef) -> Option<ValueId> {
        self.params.get(param).copied()
    }

    /// Other row ranges of the same parameter that the graph reads, for messages.
    pub(crate) fn other_ranges(&self, param: &ParamRef) -> Vec<String> {
        let mut found: Vec<&ParamRef> = self
            .params
            .keys()
            .filter(|p| p.path == param.path && p.name == param.name)
            .collect();
        found.sort();
        found.iter().map(|p| p.to_string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_graph::{AttrValue, Dim, GraphBuilder, OpKind};

    #[test]
    fn views_are_skipped_and_outputs_count() {
        let mut b = GraphBuilder::new("t");
        let d = || vec![Dim::Symbol("T".into()), Dim::Size(4)];
        let x = b.input("x", d());
        let v = b.op(OpKind::Contiguous, "m", "v", &[Some(x)], &[], d());
        let kind = [("kind", AttrValue::Word("silu".into()))];
        let a = b.op(OpKind::Act, "m", "a", &[Some(v)], &kind, d());
        let s = b.op(OpKind::Add, "m", "s", &[Some(a), Some(v)], &[], d());
        b.output("out", s);
        let g = b.finish();
        let f = HostFacts::new(&g);
        assert!(f.same_tensor(x, v));
        assert_eq!(f.readers(x).len(), 2);
        assert_eq!(f.only_reader(x), None);
        assert_eq!(f.only_reader(a), Some(OpId(2)));
        assert_eq!(f.only_reader(s), None);
        assert!(f.direct_edge(OpId(1), OpId(2)));
        assert!(!f.direct_edge(OpId(0), OpId(2)));
    }
}
