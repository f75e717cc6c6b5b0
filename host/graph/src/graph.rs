//! The dataflow graph of one model phase: values, composite operations, state regions.
//!
//! Builders make it through [`GraphBuilder`]; `check` enforces the normal form; `Session` executes it; the host
//! matches structures in it. It knows no structure, no family and no plugin.

use std::collections::HashMap;
use std::fmt;

use crate::ops::{AttrValue, Attrs, OpKind};

/// Index of a value in [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub usize);

/// Index of an operation in [`Graph::ops`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub usize);

/// A size: known, or a symbol solved at run time (`B`, `T`, `S`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known when the graph is built.
    Size(usize),
    /// Known when it runs.
    Symbol(String),
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Size(n) => write!(f, "{n}"),
            Dim::Symbol(s) => f.write_str(s),
        }
    }
}

/// How a matrix parameter is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[in, out]`: `x @ w`. Also everything that is not a matrix.
    InOut,
    /// `[out, in]`: `x @ w^T`.
    OutIn,
}

/// A parameter of a module, whole or a range of its rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamRef {
    /// Module path (`model.layers.0.mlp.gate_proj`).
    pub path: String,
    /// Parameter name (`weight`).
    pub name: String,
    /// Row range `[from, to)` of the stored tensor; `None` is all of it.
    pub rows: Option<(usize, usize)>,
}

impl fmt::Display for ParamRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.path, self.name)?;
        if let Some((a, b)) = self.rows {
            write!(f, "[{a}..{b}]")?;
        }
        Ok(())
    }
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// Given at every run.
    Input,
    /// A weight.
    Param {
        /// Which.
        param: ParamRef,
        /// How it is stored.
        layout: Layout,
    },
    /// A state region, by index in [`Graph::states`].
    State(usize),
    /// Result `index` of an operation.
    Op {
        /// The producer.
        op: OpId,
        /// Which of its results.
        index: usize,
    },
}

/// One tensor of the graph.
#[derive(Clone, Debug)]
pub struct Value {
    /// For messages (`model.layers.0.mlp.act`); unique.
    pub name: String,
    /// Symbolic shape, outermost first.
    pub dims: Vec<Dim>,
    /// Where it comes from.
    pub origin: Origin,
}

/// One composite operation.
#[derive(Clone, Debug)]
pub struct Op {
    /// Which.
    pub kind: OpKind,
    /// Operands in the vocabulary's order; `None` for a missing optional.
    pub inputs: Vec<Option<ValueId>>,
    /// Results.
    pub outputs: Vec<ValueId>,
    /// Written attributes.
    pub attrs: Attrs,
    /// Path of the module it belongs to.
    pub module: String,
}

/// What a state region holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// A KV cache of one layer and side, `[B, heads, capacity, width]`, valid up to a length; `kv_append` adds to it.
    Growing {
        /// Heads.
        heads: usize,
        /// Width of a head.
        width: usize,
    },
    /// A recurrent state `[B, dims]`, zeros at first; ops read it as an operand, `state_write` replaces it.
    Fixed {
        /// Sizes of one batch row.
        dims: Vec<usize>,
    },
}

/// What a model keeps between two runs.
#[derive(Clone, Debug, PartialEq)]
pub struct StateRegion {
    /// Unique name (`model.layers.0.self_attn.k`).
    pub name: String,
    /// Its content.
    pub kind: RegionKind,
}

impl StateRegion {
    /// A KV cache of one side.
    pub fn growing(name: impl Into<String>, heads: usize, width: usize) -> Self {
        StateRegion {
            name: name.into(),
            kind: RegionKind::Growing { heads, width },
        }
    }

    /// A recurrent state of these sizes for each batch row.
    pub fn fixed(name: impl Into<String>, dims: &[usize]) -> Self {
        StateRegion {
            name: name.into(),
            kind: RegionKind::Fixed {
                dims: dims.to_vec(),
            },
        }
    }

    /// Whether it is a recurrent state.
    pub fn is_fixed(&self) -> bool {
        matches!(self.kind, RegionKind::Fixed { .. })
    }
}

/// A whole phase. Operations are stored in an executable order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Phase name (`decode`, `vision_encode`).
    pub phase: String,
    /// All values.
    pub values: Vec<Value>,
    /// All operations.
    pub ops: Vec<Op>,
    /// Values given at every run, in order, by name.
    pub inputs: Vec<ValueId>,
    /// Values a run returns: name -> value.
    pub outputs: Vec<(String, ValueId)>,
    /// State regions.
    pub states: Vec<StateRegion>,
}

impl Graph {
    /// The value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// The operation.
    pub fn op(&self, id: OpId) -> &Op {
        &self.ops[id.0]
    }

    /// All operation ids, in order.
    pub fn op_ids(&self) -> impl Iterator<Item = OpId> {
        (0..self.ops.len()).map(OpId)
    }

    /// The operation that makes a value, if one does.
    pub fn producer(&self, id: ValueId) -> Option<(OpId, usize)> {
        match self.values[id.0].origin {
            Origin::Op { op, index } => Some((op, index)),
            _ => None,
        }
    }

    /// The fixed region a value is, if it is one: its content when the run begins.
    pub fn fixed_region(&self, id: ValueId) -> Option<usize> {
        match self.values[id.0].origin {
            Origin::State(i) if self.states.get(i).is_some_and(StateRegion::is_fixed) => Some(i),
            _ => None,
        }
    }

    /// The parameter a value is, if it is one.
    pub fn param(&self, id: ValueId) -> Option<(&ParamRef, Layout)> {
        match &self.values[id.0].origin {
            Origin::Param { param, layout } => Some((param, *layout)),
            _ => None,
        }
    }

    /// Readers of every value, views not skipped: `(op, operand position)`. Graph outputs are not readers here.
    pub fn readers(&self) -> Vec<Vec<(OpId, usize)>> {
        let mut readers = vec![Vec::new(); self.values.len()];
        for (i, op) in self.ops.iter().enumerate() {
            for (k, v) in op.inputs.iter().enumerate() {
                if let Some(v) = v {
                    readers[v.0].push((OpId(i), k));
                }
            }
        }
        readers
    }

    /// The value a chain of views starts from.
    pub fn skip_views(&self, mut id: ValueId) -> ValueId {
        while let Some((op, _)) = self.producer(id) {
            match (self.op(op).kind.is_view(), self.op(op).inputs.first()) {
                (true, Some(Some(source))) => id = *source,
                _ => break,
            }
        }
        id
    }

    /// The value with this name.
    pub fn value_named(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|v| v.name == name).map(ValueId)
    }
}

/// Appends operations in order and names values after their module.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    graph: Graph,
    params: HashMap<ParamRef, ValueId>,
    names: HashMap<String, usize>,
}

impl GraphBuilder {
    /// An empty graph of a phase.
    pub fn new(phase: &str) -> Self {
        GraphBuilder {
            graph: Graph {
                phase: phase.into(),
                ..Graph::default()
            },
            ..Self::default()
        }
    }

    fn value(&mut self, name: String, dims: Vec<Dim>, origin: Origin) -> ValueId {
        let n = self.names.entry(name.clone()).or_insert(0);
        *n += 1;
        let name = if *n == 1 { name } else { format!("{name}#{n}") };
        self.graph.values.push(Value { name, dims, origin });
        ValueId(self.graph.values.len() - 1)
    }

    /// A value given at every run.
    pub fn input(&mut self, name: &str, dims: Vec<Dim>) -> ValueId {
        let id = self.value(name.into(), dims, Origin::Input);
        self.graph.inputs.push(id);
        id
    }

    /// A parameter; the same reference gives the same value.
    pub fn param(&mut self, param: ParamRef, dims: &[usize], layout: Layout) -> ValueId {
        if let Some(id) = self.params.get(&param) {
            return *id;
        }
        let dims = dims.iter().map(|d| Dim::Size(*d)).collect();
        let id = self.value(
            param.to_string(),
            dims,
            Origin::Param {
                param: param.clone(),
                layout,
            },
        );
        self.params.insert(param, id);
        id
    }

    /// A state region, as an operand for `kv_append`, or for whoever reads and writes a fixed one.
    pub fn state(&mut self, region: StateRegion) -> ValueId {
        let batch = Dim::Symbol("B".into());
        let dims = match &region.kind {
            RegionKind::Growing { heads, width } => vec![
                batch,
                Dim::Size(*heads),
                Dim::Symbol("S".into()),
                Dim::Size(*width),
            ],
            RegionKind::Fixed { dims } => {
                let sizes = dims.iter().map(|n| Dim::Size(*n));
                std::iter::once(batch).chain(sizes).collect()
            }
        };
        let name = region.name.clone();
        self.graph.states.push(region);
        let origin = Origin::State(self.graph.states.len() - 1);
        self.value(name, dims, origin)
    }

    /// An operation with one result named `<module>.<label>`.
    pub fn op(
        &mut self,
        kind: OpKind,
        module: &str,
        label: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, AttrValue)],
        dims: Vec<Dim>,
    ) -> ValueId {
        self.ops(kind, module, inputs, attrs, vec![(label, dims)])[0]
    }

    /// An operation with several results.
    pub fn ops(
        &mut self,
        kind: OpKind,
        module: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, AttrValue)],
        results: Vec<(&str, Vec<Dim>)>,
    ) -> Vec<ValueId> {
        let op = OpId(self.graph.ops.len());
        let outputs: Vec<ValueId> = results
            .into_iter()
            .enumerate()
            .map(|(index, (label, dims))| {
                let name = if module.is_empty() {
                    label.into()
                } else {
                    format!("{module}.{label}")
                };
                self.value(name, dims, Origin::Op { op, index })
            })
            .collect();
        self.graph.ops.push(Op {
            kind,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            attrs: attrs
                .iter()
                .map(|(k, v)| ((*k).to_string(), v.clone()))
                .collect(),
            module: module.into(),
        });
        outputs
    }

    /// Declares a result of the phase.
    pub fn output(&mut self, name: &str, id: ValueId) {
        self.graph.outputs.push((name.into(), id));
    }

    /// The shape of a value so far.
    pub fn dims(&self, id: ValueId) -> &[Dim] {
        &self.graph.values[id.0].dims
    }

    /// The graph. Run `check` on it.
    pub fn finish(self) -> Graph {
        self.graph
    }
}
