//! The normal form of host graphs (`dataflow` section 4): what a builder must produce so that the matching of
//! structures can be exact.
//!
//! Every violation names the operation and says what to do. The checker computes nothing and looks at no weight; the
//! shapes it infers are as symbolic as the declared ones, and where it cannot know a size it believes the builder.

use std::collections::{HashMap, HashSet};

use crate::graph::{Dim, Graph, Layout, Op, OpId, Origin, ValueId};
use crate::infer::infer;
use crate::kernels::Kernel;
use crate::ops::{AttrDefault, AttrValue, OpKind};
use crate::GraphError;

/// Whether a graph is in normal form.
pub fn check(graph: &Graph) -> Result<(), GraphError> {
    let c = Checker { graph };
    c.values()?;
    for id in graph.op_ids() {
        c.operands(id)?;
        c.attributes(id)?;
        c.shapes(id)?;
    }
    c.transposes()?;
    c.duplicates()?;
    c.ranges()?;
    c.regions()?;
    c.dead()
}

struct Checker<'a> {
    graph: &'a Graph,
}

type Verdict = Result<(), GraphError>;

impl Checker<'_> {
    fn bad(&self, at: &str, what: impl Into<String>) -> Verdict {
        Err(GraphError::Malformed {
            phase: self.graph.phase.clone(),
            at: at.into(),
            what: what.into(),
        })
    }

    fn bad_op(&self, id: OpId, what: impl Into<String>) -> Verdict {
        self.bad(&self.title(id), what)
    }

    fn title(&self, id: OpId) -> String {
        let op = self.graph.op(id);
        match op.outputs.first().and_then(|v| self.graph.values.get(v.0)) {
            Some(v) => format!("{} `{}`", op.kind, v.name),
            None => format!("{} in `{}`", op.kind, op.module),
        }
    }

    fn name(&self, id: ValueId) -> &str {
        &self.graph.value(id).name
    }

    /// Ids exist, names are unique, origins and results point at each other, parameters have known dims.
    fn values(&self) -> Verdict {
        let g = self.graph;
        let count = g.values.len();
        let mut names = HashSet::new();
        for (i, v) in g.values.iter().enumerate() {
            if !names.insert(v.name.as_str()) {
                return self.bad(&v.name, "two values have this name; give each its own");
            }
            match &v.origin {
                Origin::Op { op, index } => {
                    let made = g.ops.get(op.0).and_then(|o| o.outputs.get(*index));
                    if made != Some(&ValueId(i)) {
                        let what =
                            "its producer does not list it; a value has exactly one producer";
                        return self.bad(&v.name, what);
                    }
                }
                Origin::Param { param, .. } => {
                    if v.dims.iter().any(|d| matches!(d, Dim::Symbol(_))) {
                        return self.bad(&v.name, "a parameter needs known sizes, not symbols");
                    }
                    if let Some((from, to)) = param.rows {
                        if v.dims.first() != Some(&Dim::Size(to.saturating_sub(from))) || from >= to
                        {
                            let what = "its first dim is not the length of its row range";
                            return self.bad(&v.name, what);
                        }
                    }
                }
                Origin::State(s) if *s >= g.states.len() => {
                    return self.bad(&v.name, format!("state region {s} does not exist"))
                }
                Origin::Input if !g.inputs.contains(&ValueId(i)) => {
                    return self.bad(&v.name, "is not listed among the graph's inputs")
                }
                _ => {}
            }
        }
        for id in g.op_ids() {
            let op = g.op(id);
            let ids = op.inputs.iter().flatten().chain(&op.outputs);
            if let Some(v) = ids.into_iter().find(|v| v.0 >= count) {
                return self.bad_op(id, format!("value {} does not exist", v.0));
            }
            for (index, v) in op.outputs.iter().enumerate() {
                if g.value(*v).origin != (Origin::Op { op: id, index }) {
                    let what = format!("result `{}` has another origin", self.name(*v));
                    return self.bad_op(id, what);
                }
            }
            for v in op.inputs.iter().flatten() {
                if g.producer(*v).is_some_and(|(p, _)| p >= id) {
                    let what = format!(
                        "reads `{}`, which is made later; store operations in an executable order, without cycles",
                        self.name(*v)
                    );
                    return self.bad_op(id, what);
                }
            }
        }
        for v in &g.inputs {
            if v.0 >= count || g.value(*v).origin != Origin::Input {
                return self.bad("inputs", format!("value {} is not a graph input", v.0));
            }
        }
        if g.outputs.is_empty() {
            return self.bad("outputs", "the graph returns nothing");
        }
        let mut outputs = HashSet::new();
        for (name, v) in &g.outputs {
            if v.0 >= count {
                return self.bad(
                    "outputs",
                    format!("value {} of `{name}` does not exist", v.0),
                );
            }
            if !outputs.insert(name.as_str()) {
                return self.bad("outputs", format!("`{name}` is declared twice"));
            }
        }
        Ok(())
    }

    fn operands(&self, id: OpId) -> Verdict {
        let g = self.graph;
        let op = g.op(id);
        let spec = op.kind.spec();
        if op.kind == OpKind::Call {
            let what =
                "`call` is a word of catalog entries; write the operations of the module instead";
            return self.bad_op(id, what);
        }
        let (n, mut max, mut least) = (
            op.inputs.len(),
            spec.operands.len(),
            spec.required_operands(),
        );
        if op.kind == OpKind::Concat {
            (max, least) = (n.max(2), n.max(2));
        }
        if n > max || n < least {
            let range = if least == max {
                format!("{max}")
            } else {
                format!("{least} to {max}")
            };
            let hint = match op.kind {
                OpKind::Linear if n > max => "; `linear` has no bias, add a `bias` after it",
                _ => "",
            };
            let what = format!(
                "has {n} operands, takes {range} ({}){hint}",
                spec.operands.join(", ")
            );
            return self.bad_op(id, what);
        }
        for (k, v) in op.inputs.iter().enumerate() {
            let Some(v) = v else {
                if k < least {
                    let what = format!("operand `{}` is missing", spec.operand_name(k));
                    return self.bad_op(id, what);
                }
                continue;
            };
            let region = matches!(g.value(*v).origin, Origin::State(_));
            let fixed = g.fixed_region(*v).is_some();
            let wanted = k == 1 && writes(op.kind);
            if region && !fixed && (!wanted || op.kind != OpKind::KvAppend) {
                let what = format!(
                    "reads region `{}` itself; read the result of its `kv_append`",
                    self.name(*v)
                );
                return self.bad_op(id, what);
            }
            if wanted && (!region || fixed != (op.kind == OpKind::StateWrite)) {
                let what = match op.kind {
                    _ if !region => "its second operand is not a state region",
                    OpKind::StateWrite => "its second operand is a cache; use `kv_append`",
                    _ => "its second operand is a recurrent state; use `state_write`",
                };
                return self.bad_op(id, what);
            }
        }
        if op.outputs.is_empty() {
            return self.bad_op(id, "has no result");
        }
        Ok(())
    }

    fn attributes(&self, id: OpId) -> Verdict {
        let op = self.graph.op(id);
        let spec = op.kind.spec();
        for key in op.attrs.keys() {
            if spec.attr(key).is_none() {
                let known: Vec<&str> = spec.attrs.iter().map(|a| a.name).collect();
                let what = match known.as_slice() {
                    [] => format!("has no attribute `{key}`; it takes none"),
                    _ => format!("has no attribute `{key}`; it takes {}", known.join(", ")),
                };
                return self.bad_op(id, what);
            }
        }
        for a in spec.attrs {
            if a.default == AttrDefault::Required && !op.attrs.contains_key(a.name) {
                return self.bad_op(id, format!("attribute `{}` must be written", a.name));
            }
        }
        if writes(op.kind) {
            return Ok(());
        }
        match Kernel::prepare(op.kind, &op.attrs, Layout::InOut) {
            Ok(_) => Ok(()),
            Err(f) => Err(f.at(op.kind, self.name(op.outputs[0]))),
        }
    }

    /// The declared dims of every result against the inferred ones.
    fn shapes(&self, id: OpId) -> Verdict {
        let g = self.graph;
        let op = g.op(id);
        let found = match infer(g, op) {
            Ok(found) => found,
            Err(what) => return self.bad_op(id, what),
        };
        if found.len() != op.outputs.len() {
            let what = format!("has {} results, makes {}", op.outputs.len(), found.len());
            return self.bad_op(id, what);
        }
        for (v, dims) in op.outputs.iter().zip(found) {
            let declared = &g.value(*v).dims;
            let fits = declared.len() == dims.len()
                && declared
                    .iter()
                    .zip(&dims)
                    .all(|(d, f)| f.as_ref().is_none_or(|f| f == d));
            if !fits {
                let show = |d: &Option<Dim>| d.as_ref().map_or("?".into(), Dim::to_string);
                let found: Vec<String> = dims.iter().map(show).collect();
                let declared: Vec<String> = declared.iter().map(Dim::to_string).collect();
                let what = format!(
                    "`{}` is declared [{}], its operands make [{}]",
                    self.name(*v),
                    declared.join(","),
                    found.join(",")
                );
                return self.bad_op(id, what);
            }
        }
        Ok(())
    }

    /// Transposes stand only directly before attention and kv_append, views between them aside.
    fn transposes(&self) -> Verdict {
        let g = self.graph;
        let readers = g.readers();
        for id in g.op_ids().filter(|o| g.op(*o).kind == OpKind::Transpose) {
            let mut open = g.op(id).outputs.clone();
            while let Some(v) = open.pop() {
                if g.outputs.iter().any(|(_, o)| *o == v) {
                    return self.bad_op(id, "is a graph output; return the value before it");
                }
                for (reader, at) in &readers[v.0] {
                    let kind = g.op(*reader).kind;
                    match kind {
                        k if k.is_view() => open.extend(&g.op(*reader).outputs),
                        OpKind::Attention if *at < 3 => {}
                        OpKind::KvAppend if *at == 0 => {}
                        _ => {
                            let what = format!(
                                "feeds {}; transposes stand only directly before attention and kv_append",
                                self.title(*reader)
                            );
                            return self.bad_op(id, what);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// No two equal operations on equal operands.
    fn duplicates(&self) -> Verdict {
        let g = self.graph;
        let mut seen: HashMap<(OpKind, Vec<Option<ValueId>>, String), OpId> = HashMap::new();
        for id in g.op_ids() {
            let op = g.op(id);
            let mut inputs = op.inputs.clone();
            while inputs.last() == Some(&None) {
                inputs.pop();
            }
            if op.kind.spec().commutative {
                inputs.sort_unstable();
            }
            let key = (op.kind, inputs, written(op));
            if let Some(first) = seen.insert(key, id) {
                let what = format!("repeats {}; read that result instead", self.title(first));
                return self.bad_op(id, what);
            }
        }
        Ok(())
    }

    /// Linears read a parameter whole or in disjoint row ranges.
    fn ranges(&self) -> Verdict {
        let g = self.graph;
        type Rows = Option<(usize, usize)>;
        let mut read: HashMap<(&str, &str), Vec<(Rows, OpId)>> = HashMap::new();
        for id in g.op_ids().filter(|o| g.op(*o).kind == OpKind::Linear) {
            let weight = g.op(id).inputs.get(1).copied().flatten();
            let Some((p, _)) = weight.and_then(|w| g.param(w)) else {
                continue;
            };
            let others = read.entry((&p.path, &p.name)).or_default();
            for (rows, other) in others.iter() {
                let apart = match (p.rows, rows) {
                    (Some((a, b)), Some((c, d))) => b <= *c || *d <= a,
                    _ => false,
                };
                if p.rows != *rows && !apart {
                    let what = format!(
                        "reads {p}, which overlaps what {} reads; use one linear per row range, or the whole once",
                        self.title(*other)
                    );
                    return self.bad_op(id, what);
                }
            }
            others.push((p.rows, id));
        }
        Ok(())
    }

    /// Every region is appended exactly once.
    fn regions(&self) -> Verdict {
        let g = self.graph;
        let mut writers = vec![Vec::new(); g.states.len()];
        for id in g.op_ids().filter(|o| writes(g.op(*o).kind)) {
            if let Some(Some(v)) = g.op(id).inputs.get(1) {
                if let Origin::State(s) = g.value(*v).origin {
                    writers[s].push(id);
                }
            }
        }
        let mut names = HashSet::new();
        for (region, writers) in g.states.iter().zip(&writers) {
            if !names.insert(&region.name) {
                return self.bad(&region.name, "two state regions have this name");
            }
            match writers.as_slice() {
                [_] => {}
                [] => {
                    let what = match region.is_fixed() {
                        true => "no state_write writes this state region",
                        false => "no kv_append writes this state region",
                    };
                    return self.bad(&region.name, what);
                }
                [_, second, ..] => {
                    let what = format!("writes region `{}` a second time in a run", region.name);
                    return self.bad_op(*second, what);
                }
            }
        }
        Ok(())
    }

    /// Every operation reaches an output or a state write.
    fn dead(&self) -> Verdict {
        let g = self.graph;
        let mut live: HashSet<ValueId> = g.outputs.iter().map(|(_, v)| *v).collect();
        let mut dead = None;
        for i in (0..g.ops.len()).rev() {
            let op = &g.ops[i];
            if writes(op.kind) || op.outputs.iter().any(|v| live.contains(v)) {
                live.extend(op.inputs.iter().flatten());
            } else {
                dead = Some(OpId(i));
            }
        }
        match dead {
            Some(id) => self.bad_op(id, "reaches no output and no state; leave it out"),
            None => Ok(()),
        }
    }
}

fn writes(kind: OpKind) -> bool {
    matches!(kind, OpKind::KvAppend | OpKind::StateWrite)
}

/// The written attributes that differ from their defaults, as text.
fn written(op: &Op) -> String {
    let mut out = String::new();
    for (k, v) in &op.attrs {
        let default = op.kind.spec().attr(k).map(|a| a.default);
        let plain = match (default, v) {
            (Some(AttrDefault::Number(n)), v) => v.as_f64() == Some(n),
            (Some(AttrDefault::Flag(b)), AttrValue::Flag(v)) => *v == b,
            (Some(AttrDefault::Word(w)), AttrValue::Word(v)) => v == w,
            (Some(AttrDefault::Absent), AttrValue::Absent) => true,
            _ => false,
        };
        if !plain {
            out.push_str(&format!("{k}={v};"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphBuilder, ParamRef, StateRegion};

    fn s(n: &str) -> Dim {
        Dim::Symbol(n.into())
    }

    fn btd(tail: &[usize]) -> Vec<Dim> {
        let mut d = vec![s("B"), s("T")];
        d.extend(tail.iter().map(|n| Dim::Size(*n)));
        d
    }

    fn weight(path: &str, rows: Option<(usize, usize)>) -> ParamRef {
        ParamRef {
            path: path.into(),
            name: "weight".into(),
            rows,
        }
    }

    /// A builder with `x [B,T,8]` and `h = linear(x, w)`, whose result is the output unless `f` declares others.
    fn with(f: impl FnOnce(&mut GraphBuilder, ValueId, ValueId)) -> Result<(), GraphError> {
        let mut b = GraphBuilder::new("test");
        let x = b.input("x", btd(&[8]));
        let w = b.param(weight("fc", None), &[6, 8], Layout::OutIn);
        let h = b.op(
            OpKind::Linear,
            "fc",
            "h",
            &[Some(x), Some(w)],
            &[],
            btd(&[6]),
        );
        b.output("h", h);
        f(&mut b, x, h);
        check(&b.finish())
    }

    fn refused(want: &str, f: impl FnOnce(&mut GraphBuilder, ValueId, ValueId)) {
        let e = with(f)
            .err()
            .unwrap_or_else(|| panic!("accepted, wanted `{want}`"));
        assert!(e.to_string().contains(want), "`{e}` lacks `{want}`");
    }

    #[test]
    fn a_plain_graph_passes() {
        with(|_, _, _| {}).unwrap();
    }

    #[test]
    fn operands_and_attributes() {
        refused("`linear` has no bias", |b, x, _| {
            let w = b.param(weight("a", None), &[6, 8], Layout::OutIn);
            let c = b.param(weight("c", None), &[6], Layout::InOut);
            let y = b.op(
                OpKind::Linear,
                "a",
                "y",
                &[Some(x), Some(w), Some(c)],
                &[],
                btd(&[6]),
            );
            b.output("y", y);
        });
        refused("operand `b` is missing", |b, x, _| {
            let y = b.op(OpKind::Add, "a", "y", &[Some(x), None], &[], btd(&[8]));
            b.output("y", y);
        });
        refused("`eps` must be written", |b, x, _| {
            let y = b.op(OpKind::RmsNorm, "a", "y", &[Some(x)], &[], btd(&[8]));
            b.output("y", y);
        });
        refused("no attribute `cap`", |b, x, _| {
            let cap = [("cap", AttrValue::Int(1))];
            let y = b.op(OpKind::Scale, "a", "y", &[Some(x)], &cap, btd(&[8]));
            b.output("y", y);
        });
        refused("`mish` is not one of", |b, x, _| {
            let kind = [("kind", AttrValue::Word("mish".into()))];
            let y = b.op(OpKind::Act, "a", "y", &[Some(x)], &kind, btd(&[8]));
            b.output("y", y);
        });
        refused("word of catalog entries", |b, x, _| {
            let role = [("role", AttrValue::Word("a".into()))];
            let y = b.op(OpKind::Call, "a", "y", &[Some(x)], &role, btd(&[8]));
            b.output("y", y);
        });
    }

    #[test]
    fn shapes() {
        refused("takes 7 input features", |b, x, _| {
            let w = b.param(weight("a", None), &[6, 7], Layout::OutIn);
            let y = b.op(
                OpKind::Linear,
                "a",
                "y",
                &[Some(x), Some(w)],
                &[],
                btd(&[6]),
            );
            b.output("y", y);
        });
        refused("is declared [B,T,5]", |b, x, _| {
            let w = b.param(weight("a", None), &[6, 8], Layout::OutIn);
            let y = b.op(
                OpKind::Linear,
                "a",
                "y",
                &[Some(x), Some(w)],
                &[],
                btd(&[5]),
            );
            b.output("y", y);
        });
        refused("do not broadcast", |b, x, h| {
            let y = b.op(OpKind::Add, "a", "y", &[Some(x), Some(h)], &[], btd(&[8]));
            b.output("y", y);
        });
        refused("[B,T,H,D]", |b, x, _| {
            let c = b.input("cos", vec![s("T"), Dim::Size(4)]);
            let y = b.op(
                OpKind::Rope,
                "a",
                "y",
                &[Some(x), Some(c), Some(c)],
                &[],
                btd(&[8]),
            );
            b.output("y", y);
        });
        refused("12 elements", |b, _, h| {
            let dims = AttrValue::List(vec![
                AttrValue::Word("B".into()),
                AttrValue::Word("T".into()),
                AttrValue::Int(3),
                AttrValue::Int(4),
            ]);
            let y = b.op(
                OpKind::Reshape,
                "a",
                "y",
                &[Some(h)],
                &[("dims", dims)],
                btd(&[3, 4]),
            );
            b.output("y", y);
        });
    }

    #[test]
    fn places_of_transposes() {
        let perm = || {
            [(
                "perm",
                AttrValue::List([0, 2, 1].map(AttrValue::Int).to_vec()),
            )]
        };
        let turned = || vec![s("B"), Dim::Size(8), s("T")];
        refused("only directly before attention", |b, x, _| {
            let t = b.op(OpKind::Transpose, "a", "t", &[Some(x)], &perm(), turned());
            let c = b.op(OpKind::Contiguous, "a", "c", &[Some(t)], &[], turned());
            let y = b.op(
                OpKind::Scale,
                "a",
                "y",
                &[Some(c)],
                &[("by", AttrValue::Int(2))],
                turned(),
            );
            b.output("y", y);
        });
        refused("is a graph output", |b, x, _| {
            let t = b.op(OpKind::Transpose, "a", "t", &[Some(x)], &perm(), turned());
            b.output("t", t);
        });
    }

    #[test]
    fn duplicates_and_dead_operations() {
        refused("repeats linear `fc.h`", |b, x, _| {
            let w = b.param(weight("fc", None), &[6, 8], Layout::OutIn);
            let y = b.op(
                OpKind::Linear,
                "other",
                "y",
                &[Some(x), Some(w)],
                &[],
                btd(&[6]),
            );
            b.output("y", y);
        });
        refused("repeats add", |b, x, _| {
            let z = b.input("z", btd(&[8]));
            for (i, pair) in [[x, z], [z, x]].into_iter().enumerate() {
                let y = b.op(OpKind::Add, "a", "y", &pair.map(Some), &[], btd(&[8]));
                b.output(&format!("y{i}"), y);
            }
        });
        // An attribute written with its default is no difference.
        refused("repeats scale", |b, x, _| {
            for (i, by) in [vec![], vec![("by", AttrValue::Int(1))]]
                .into_iter()
                .enumerate()
            {
                let y = b.op(OpKind::Scale, "a", "y", &[Some(x)], &by, btd(&[8]));
                b.output(&format!("y{i}"), y);
            }
        });
        refused("reaches no output", |b, x, _| {
            b.op(
                OpKind::Scale,
                "a",
                "unused",
                &[Some(x)],
                &[("by", AttrValue::Int(2))],
                btd(&[8]),
            );
        });
    }

    #[test]
    fn row_ranges() {
        let read = |b: &mut GraphBuilder, x, i: usize, rows: Option<(usize, usize)>, n: usize| {
            let w = b.param(weight("qkv", rows), &[n, 8], Layout::OutIn);
            let y = b.op(
                OpKind::Linear,
                "qkv",
                "y",
                &[Some(x), Some(w)],
                &[],
                btd(&[n]),
            );
            b.output(&format!("y{i}"), y);
        };
        with(|b, x, _| {
            read(b, x, 0, Some((0, 4)), 4);
            read(b, x, 1, Some((4, 6)), 2);
        })
        .unwrap();
        refused("overlaps what linear `qkv.y` reads", |b, x, _| {
            read(b, x, 0, Some((0, 4)), 4);
            read(b, x, 1, Some((3, 6)), 3);
        });
        refused("overlaps", |b, x, _| {
            read(b, x, 0, None, 6);
            read(b, x, 1, Some((3, 6)), 3);
        });
        refused("length of its row range", |b, x, _| {
            read(b, x, 0, Some((3, 6)), 2)
        });
    }

    #[test]
    fn regions_and_their_writers() {
        let region = || StateRegion::growing("k", 2, 4);
        let kv = || vec![s("B"), Dim::Size(2), s("S"), Dim::Size(4)];
        let x4 = |b: &mut GraphBuilder| {
            b.input("k_new", vec![s("B"), Dim::Size(2), s("T"), Dim::Size(4)])
        };
        with(|b, _, _| {
            let (x, r) = (x4(b), b.state(region()));
            b.op(
                OpKind::KvAppend,
                "a",
                "k_all",
                &[Some(x), Some(r)],
                &[],
                kv(),
            );
        })
        .unwrap();
        refused("no kv_append writes", |b, _, _| {
            b.state(region());
        });
        refused("a second time", |b, _, _| {
            let (x, r) = (x4(b), b.state(region()));
            let y = b.input("other", vec![s("B"), Dim::Size(2), s("T"), Dim::Size(4)]);
            b.op(
                OpKind::KvAppend,
                "a",
                "k_all",
                &[Some(x), Some(r)],
                &[],
                kv(),
            );
            b.op(
                OpKind::KvAppend,
                "a",
                "k_all",
                &[Some(y), Some(r)],
                &[],
                kv(),
            );
        });
        refused("reads region `k` itself", |b, _, _| {
            let (x, r) = (x4(b), b.state(region()));
            b.op(
                OpKind::KvAppend,
                "a",
                "k_all",
                &[Some(x), Some(r)],
                &[],
                kv(),
            );
            let y = b.op(OpKind::Scale, "a", "y", &[Some(r)], &[], kv());
            b.output("y", y);
        });
        refused("not a state region", |b, x, h| {
            b.op(
                OpKind::KvAppend,
                "a",
                "k_all",
                &[Some(x), Some(h)],
                &[],
                kv(),
            );
        });
    }

    #[test]
    fn order_and_origins() {
        let plain = || {
            let mut b = GraphBuilder::new("test");
            let x = b.input("x", btd(&[8]));
            let a = b.op(
                OpKind::Scale,
                "",
                "a",
                &[Some(x)],
                &[("by", AttrValue::Int(2))],
                btd(&[8]),
            );
            let c = b.op(
                OpKind::Scale,
                "",
                "c",
                &[Some(a)],
                &[("by", AttrValue::Int(3))],
                btd(&[8]),
            );
            b.output("c", c);
            b.finish()
        };
        check(&plain()).unwrap();
        let refused = |f: fn(&mut Graph), want: &str| {
            let mut g = plain();
            f(&mut g);
            let e = check(&g).unwrap_err().to_string();
            assert!(e.contains(want), "`{e}` lacks `{want}`");
        };
        refused(|g| g.ops[0].inputs[0] = Some(ValueId(2)), "made later");
        refused(
            |g| g.ops[1].outputs = vec![ValueId(1)],
            "exactly one producer",
        );
        refused(|g| g.values[2].name = "a".into(), "two values");
        refused(|g| g.inputs.clear(), "among the graph's inputs");
        refused(|g| g.outputs.clear(), "returns nothing");
        refused(|g| g.ops[0].inputs[0] = Some(ValueId(9)), "does not exist");
        refused(|g| g.ops[0].outputs.clear(), "exactly one producer");
    }
}
