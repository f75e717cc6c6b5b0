//! A bias of zeros is none: it adds nothing, and a form for products without one serves the place as well.
//!
//! Read from the entry: an operation that adds a slot and may be left out with it. Where the host's parameter there is
//! all zeros, the slot is absent, and an axis whose value only said that the slot is there takes the value under which
//! no operation reads it. The host keeps its own operations; what changes is what a form is handed.

use structures_catalog::spec::{OpDecl, Spec};
use structures_graph::session::Session;
use structures_graph::OpKind;
use structures_seams::{LocatedSpan, SlotWeight};

use crate::sites::Survey;

/// Leaves out every bias of zeros, with a note at its site.
pub fn leave_out(survey: &mut Survey<'_>, session: &Session) {
    for site in &mut survey.sites {
        for span in &mut site.spans {
            for slot in zero_slots(site.spec, span, session) {
                span.weights.shift_remove(&slot);
                for (axis, value) in without(site.spec, span, &slot) {
                    span.axes.insert(axis, value);
                }
                let note = format!("slot `{slot}` is all zeros and counts as none");
                if !site.notes.contains(&note) {
                    site.notes.push(note);
                }
            }
        }
    }
}

/// Slots of the span that are added by an operation that may be left out, and are all zeros.
fn zero_slots(spec: &Spec, span: &LocatedSpan, session: &Session) -> Vec<String> {
    let zero = |slot: &String| {
        let Some(SlotWeight::Stored(address)) = span.weights.get(slot) else {
            return false;
        };
        let stored = session.param(&address.param()).ok().flatten();
        let values = stored.and_then(|t| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).ok());
        values.is_some_and(|v| v.iter().all(|x| *x == 0.0))
    };
    let added = |slot: &String| spec.dataflow.ops.iter().any(|op| adds(op, slot));
    span.weights
        .keys()
        .filter(|slot| added(slot) && zero(slot))
        .cloned()
        .collect()
}

/// Whether an operation adds the slot and is dropped without it.
fn adds(op: &OpDecl, slot: &str) -> bool {
    op.op == OpKind::Bias
        && op.inputs.get(1).is_some_and(|name| is(name, slot))
        && op.needs.len() == 1
        && is(&op.needs[0], slot)
}

/// The axes that said the slot is there, with the value under which nothing reads it.
fn without(spec: &Spec, span: &LocatedSpan, slot: &str) -> Vec<(String, String)> {
    let reads = |op: &&OpDecl| op.inputs.iter().any(|name| is(name, slot));
    let mut found = Vec::new();
    for (axis, declared) in spec.variants.iter().filter(|(_, a)| a.host) {
        let readers: Vec<&OpDecl> = spec.dataflow.ops.iter().filter(reads).collect();
        let under = |value: &String| {
            readers.iter().any(|op| {
                op.when
                    .get(axis)
                    .is_none_or(|values| values.contains(value))
            })
        };
        let now = span.axes.get(axis);
        if now.is_some_and(under) {
            let other = declared.values.keys().find(|value| !under(value));
            found.extend(other.map(|value| (axis.clone(), value.clone())));
        }
    }
    found
}

/// Whether a declared name, repeated or not, is this slot.
fn is(declared: &str, slot: &str) -> bool {
    match declared.split_once("<i>") {
        None => declared == slot,
        Some((head, tail)) => slot
            .strip_prefix(head)
            .and_then(|rest| rest.strip_suffix(tail))
            .is_some_and(|i| !i.is_empty() && i.bytes().all(|b| b.is_ascii_digit())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{Device, Tensor};
    use indexmap::IndexMap;
    use structures_catalog::Catalog;
    use structures_graph::session::ParamSource;
    use structures_graph::tree::{ParamInfo, Scalar};
    use structures_graph::{
        Dim, GraphBuilder, GraphError, Layout, Module, ModuleKind, ModuleTree, ParamRef,
    };

    use super::*;
    use crate::choose::variant_of;
    use crate::sites::survey;

    const N: usize = 512;

    /// Four biased projections; the query's bias is zeros, the key's is zeros but for one.
    struct Source;

    impl ParamSource for Source {
        fn tensor(&self, param: &ParamRef) -> Result<Tensor, GraphError> {
            let bias = param.name == "bias";
            let mut values = vec![if bias { 0.0_f32 } else { 0.01 }; if bias { N } else { N * N }];
            if param.path.ends_with("k_proj") {
                values[N - 1] = -1e-30;
            } else if bias && !param.path.ends_with("q_proj") {
                values.fill(0.5);
            }
            let dims = if bias { vec![N] } else { vec![N, N] };
            Ok(Tensor::from_vec(values, dims, &Device::Cpu).unwrap())
        }
    }

    #[test]
    fn b_461_a_bias_of_zeros_counts_as_none() {
        let info = |dims: &[usize]| ParamInfo {
            dims: dims.to_vec(),
            dtype: "f32".into(),
        };
        let dims = || {
            let s = ["B", "T"].map(|s| Dim::Symbol(s.into()));
            [s.to_vec(), vec![Dim::Size(N)]].concat()
        };
        let mut b = GraphBuilder::new("t");
        let mut modules = vec![Module {
            path: "attn".into(),
            kind: Some(ModuleKind::Other),
            ..Module::default()
        }];
        let x = b.input("x", dims());
        let mut last = x;
        for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            let path = format!("attn.{name}");
            let mut m = Module {
                path: path.clone(),
                kind: Some(ModuleKind::Linear),
                params: IndexMap::from([
                    ("weight".to_string(), info(&[N, N])),
                    ("bias".to_string(), info(&[N])),
                ]),
                ..Module::default()
            };
            m.attrs.insert("in_features".into(), Scalar::Int(N as i64));
            m.attrs.insert("out_features".into(), Scalar::Int(N as i64));
            modules.push(m);
            let param = |name: &str| ParamRef {
                path: path.clone(),
                name: name.into(),
                rows: None,
            };
            let read = if name == "o_proj" { last } else { x };
            let w = b.param(param("weight"), &[N, N], Layout::OutIn);
            let bias = b.param(param("bias"), &[N], Layout::InOut);
            let p = b.op(
                OpKind::Linear,
                &path,
                "p",
                &[Some(read), Some(w)],
                &[],
                dims(),
            );
            last = b.op(
                OpKind::Bias,
                &path,
                "y",
                &[Some(p), Some(bias)],
                &[],
                dims(),
            );
            b.output(name, last);
        }
        let graph = Arc::new(b.finish());
        let tree = ModuleTree::new("t", modules);
        let session = Session::new(graph.clone(), &Source).unwrap();
        let catalog = Catalog::builtin().unwrap();
        let mut found = survey(&catalog, &tree, &graph, Vec::new(), &[]);
        let before: Vec<usize> = found
            .sites
            .iter()
            .map(|s| s.spans[0].weights.len())
            .collect();
        leave_out(&mut found, &session);
        let one = |end: &str| {
            let mut sites = found.sites.iter();
            let site = sites.find(|s| s.seam.path.ends_with(end) && s.spans[0].name == "proj");
            site.unwrap_or_else(|| panic!("{end}"))
        };
        let q = one("q_proj");
        assert!(!q.spans[0].weights.contains_key("b"));
        assert_eq!(variant_of(q, 0)["bias"], "none");
        assert!(q
            .notes
            .iter()
            .any(|n| n.contains("`b`") && n.contains("zeros")));
        // The host keeps adding it: the span still ends behind the sum.
        assert_eq!(q.spans[0].ops.len(), 2);
        let k = one("k_proj");
        assert!(k.spans[0].weights.contains_key("b") && k.notes.is_empty());
        assert_eq!(variant_of(k, 0)["bias"], "add");
        // A pack leaves out that one and keeps its siblings'.
        let pack = found
            .sites
            .iter()
            .find(|s| s.spans[0].name == "pack")
            .unwrap();
        let slots: Vec<&str> = pack.spans[0].weights.keys().map(String::as_str).collect();
        assert!(!slots.contains(&"b_0") && slots.contains(&"b_1") && slots.contains(&"b_2"));
        let after: usize = found.sites.iter().map(|s| s.spans[0].weights.len()).sum();
        assert_eq!(after + 2, before.iter().sum::<usize>(), "nothing else went");
    }
}
