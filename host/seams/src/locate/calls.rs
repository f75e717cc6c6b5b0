//! What `call` is on a host: everything that runs inside a role's module, as one opaque operation.
//!
//! Its operations are those under the module's path, without what another operation of the structure is paired with
//! and without the module of a deeper role. Its data inputs are the tensors it reads from outside, parameters and
//! state regions left out (a table or a mask is among them: which of them the structure means, the pairing finds
//! out); its results are the tensors somebody outside reads. Owned here: which tensors come in question for a name.
//! Not owned: the pairing itself.

use std::collections::BTreeSet;

use structures_graph::{OpId, Origin, ValueId};

use crate::facts::HostFacts;

/// A role's module in a host graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallSite {
    /// Module path.
    pub path: String,
    /// Its operations, views among them.
    pub ops: BTreeSet<OpId>,
    /// Tensors it reads from outside, in order.
    pub inputs: Vec<ValueId>,
    /// Tensors made inside and read outside, in order.
    pub results: Vec<ValueId>,
}

impl CallSite {
    /// The site of a module; `deeper` are the paths of other roles.
    pub fn new(
        facts: &HostFacts<'_>,
        path: &str,
        deeper: &[&str],
        taken: &dyn Fn(OpId) -> bool,
    ) -> CallSite {
        let graph = facts.graph();
        let own = |op: OpId| {
            let module = &graph.op(op).module;
            let other = |d: &&&str| under(d, path) && **d != path && under(module, d);
            under(module, path) && !deeper.iter().any(|d| other(&d)) && !taken(op)
        };
        let ops: BTreeSet<OpId> = graph.op_ids().filter(|op| own(*op)).collect();
        let made = |v: ValueId| graph.producer(v).is_some_and(|(op, _)| ops.contains(&op));
        let (mut inputs, mut results) = (Vec::new(), Vec::new());
        for op in &ops {
            let op = graph.op(*op);
            if op.kind.is_view() {
                continue;
            }
            for seen in op.inputs.iter().flatten() {
                let tensor = facts.tensor(*seen);
                let own = matches!(
                    graph.value(tensor).origin,
                    Origin::Param { .. } | Origin::State(_)
                );
                if !own && !made(tensor) && !inputs.contains(&tensor) {
                    inputs.push(tensor);
                }
            }
            for made in &op.outputs {
                let read = facts.readers(*made).iter().any(|r| !ops.contains(&r.op));
                if read || !facts.output_names(*made).is_empty() {
                    results.push(*made);
                }
            }
        }
        CallSite {
            path: path.into(),
            ops,
            inputs,
            results,
        }
    }
}

/// Whether a module is another one or lies below it.
fn under(module: &str, path: &str) -> bool {
    match module.strip_prefix(path) {
        Some(rest) => rest.is_empty() || rest.starts_with('.') || path.is_empty(),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_holds_what_lies_below_it() {
        assert!(under("l.1.attn", "l.1.attn") && under("l.1.attn.q", "l.1.attn"));
        assert!(!under("l.1.attn2", "l.1.attn") && !under("l.1", "l.1.attn"));
    }
}
