//! A hand-made denoiser block, modulated by a table a token, and who keeps its operations.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use serde_json::{json, Value};
use structures_catalog::Catalog;
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, Layout, ModuleTree, OpKind, ParamRef, ValueId,
};
use structures_seams::{discover, locate, resolve_ownership, Claim, Located};

const D: usize = 512;
const F: usize = 768;

fn symbols(lead: &[&str], dims: &[usize]) -> Vec<Dim> {
    let lead = lead.iter().map(|s| Dim::Symbol((*s).into()));
    lead.chain(dims.iter().map(|d| Dim::Size(*d))).collect()
}

fn rows(dims: &[usize]) -> Vec<Dim> {
    symbols(&["B", "T"], dims)
}

struct Block {
    b: GraphBuilder,
    chunks: usize,
}

impl Block {
    fn param(&mut self, path: &str, name: &str, dims: &[usize]) -> ValueId {
        let param = ParamRef {
            path: path.into(),
            name: name.into(),
            rows: None,
        };
        let layout = match dims.len() {
            2 => Layout::OutIn,
            _ => Layout::InOut,
        };
        self.b.param(param, dims, layout)
    }

    fn one(
        &mut self,
        kind: OpKind,
        path: &str,
        operands: &[ValueId],
        attrs: &[(&str, AttrValue)],
        dims: Vec<Dim>,
    ) -> ValueId {
        let operands: Vec<Option<ValueId>> = operands.iter().copied().map(Some).collect();
        self.b.op(kind, path, kind.name(), &operands, attrs, dims)
    }

    fn biased(&mut self, path: &str, x: ValueId, out: usize, inside: usize) -> ValueId {
        let w = self.param(path, "weight", &[out, inside]);
        let b = self.param(path, "bias", &[out]);
        let y = self.one(OpKind::Linear, path, &[x, w], &[], rows(&[out]));
        self.one(OpKind::Bias, path, &[y, b], &[], rows(&[out]))
    }

    fn norm(&mut self, path: &str, x: ValueId, affine: bool) -> ValueId {
        let mut operands = vec![x];
        if affine {
            operands.push(self.param(path, "weight", &[D]));
            operands.push(self.param(path, "bias", &[D]));
        }
        let eps = [("eps", AttrValue::Float(1e-6))];
        self.one(OpKind::LayerNorm, path, &operands, &eps, rows(&[D]))
    }

    fn sum(&mut self, kind: OpKind, a: ValueId, b: ValueId) -> ValueId {
        self.one(kind, "blocks.0", &[a, b], &[], rows(&[D]))
    }

    fn attention(&mut self, path: &str, siblings: [ValueId; 3]) -> ValueId {
        let heads: Vec<ValueId> = siblings
            .into_iter()
            .map(|v| {
                let dims = [("dims", AttrValue::List(vec![]))];
                let split = self.one(OpKind::Reshape, path, &[v], &dims, rows(&[8, 64]));
                let perm = [("perm", AttrValue::List(vec![]))];
                let turned = [symbols(&["B"], &[8]), symbols(&["T"], &[64])].concat();
                self.one(OpKind::Transpose, path, &[split], &perm, turned)
            })
            .collect();
        let o = self.one(OpKind::Attention, path, &heads, &[], rows(&[8, 64]));
        let dims = [("dims", AttrValue::List(vec![]))];
        let flat = self.one(OpKind::Reshape, path, &[o], &dims, rows(&[D]));
        self.biased(&format!("{path}.to_out.0"), flat, D, D)
    }

    fn run(mut self) -> Graph {
        let at = "blocks.0";
        let x = self.b.input("x", rows(&[D]));
        let context = self.b.input("context", rows(&[D]));
        let temb = self.b.input("temb", rows(&[self.chunks, D]));
        let table = self.param(at, "scale_shift_table", &[1, self.chunks, D]);
        let t = self.one(
            OpKind::Add,
            at,
            &[temb, table],
            &[],
            rows(&[self.chunks, D]),
        );
        let cut = [
            ("n", AttrValue::Int(self.chunks as i64)),
            ("axis", AttrValue::Int(2)),
        ];
        let labels: Vec<String> = (0..self.chunks).map(|i| format!("chunk{i}")).collect();
        let results = labels.iter().map(|l| (l.as_str(), rows(&[1, D]))).collect();
        let parts = self.b.ops(OpKind::Chunk, at, &[Some(t)], &cut, results);
        let parts: Vec<ValueId> = parts
            .into_iter()
            .map(|p| {
                let dims = [("dims", AttrValue::List(vec![]))];
                self.one(OpKind::Reshape, at, &[p], &dims, rows(&[D]))
            })
            .collect();

        let n = self.norm("blocks.0.norm1", x, false);
        let m = self.one(
            OpKind::Modulate,
            at,
            &[n, parts[1], parts[0]],
            &[],
            rows(&[D]),
        );
        let own = ["to_q", "to_k", "to_v"]
            .map(|name| self.biased(&format!("blocks.0.attn1.{name}"), m, D, D));
        let o = self.attention("blocks.0.attn1", own);
        let gated = self.sum(OpKind::Mul, o, parts[2]);
        let r = self.sum(OpKind::Add, x, gated);

        let n = self.norm("blocks.0.norm2", r, true);
        let q = self.biased("blocks.0.attn2.to_q", n, D, D);
        let k = self.biased("blocks.0.attn2.to_k", context, D, D);
        let v = self.biased("blocks.0.attn2.to_v", context, D, D);
        let o = self.attention("blocks.0.attn2", [q, k, v]);
        let r = self.sum(OpKind::Add, r, o);

        let n = self.norm("blocks.0.norm3", r, false);
        let m = self.one(
            OpKind::Modulate,
            at,
            &[n, parts[4], parts[3]],
            &[],
            rows(&[D]),
        );
        let h = self.biased("blocks.0.ffn.net.0.proj", m, F, D);
        let kind = [("kind", AttrValue::Word("gelu_tanh".into()))];
        let a = self.one(OpKind::Act, "blocks.0.ffn.net.0", &[h], &kind, rows(&[F]));
        let f = self.biased("blocks.0.ffn.net.2", a, D, F);
        let gated = self.sum(OpKind::Mul, f, parts[5]);
        let out = self.sum(OpKind::Add, r, gated);
        self.b.output("out", out);
        self.b.finish()
    }
}

fn graph(chunks: usize) -> Graph {
    let b = GraphBuilder::new("denoise");
    Block { b, chunks }.run()
}

fn tree(chunks: usize) -> ModuleTree {
    let holder = |path: &str| json!({"path": path, "class": "Holder"});
    let linear = |path: &str, out: usize, inside: usize| json!({"path": path, "class": "Linear", "params": {"weight": [[out, inside], "float32"], "bias": [[out], "float32"]}, "attrs": {"in_features": inside, "out_features": out}});
    let norm = |path: &str, affine: bool| {
        let params = match affine {
            true => json!({"weight": [[D], "float32"], "bias": [[D], "float32"]}),
            false => json!({}),
        };
        json!({"path": path, "class": "LayerNorm", "params": params, "attrs": {"normalized_shape": [D], "eps": 1e-6}})
    };
    let mut modules = vec![
        holder(""),
        holder("blocks"),
        json!({"path": "blocks.0", "class": "Holder", "params": {"scale_shift_table": [[1, chunks, D], "float32"]}}),
        norm("blocks.0.norm1", false),
        norm("blocks.0.norm2", true),
        norm("blocks.0.norm3", false),
    ];
    for attn in ["blocks.0.attn1", "blocks.0.attn2"] {
        modules.push(holder(attn));
        for name in ["to_q", "to_k", "to_v", "to_out.0"] {
            modules.push(linear(&format!("{attn}.{name}"), D, D));
        }
    }
    modules.push(holder("blocks.0.ffn"));
    modules.push(linear("blocks.0.ffn.net.0.proj", F, D));
    modules.push(linear("blocks.0.ffn.net.2", D, F));
    let classes = json!({
        "Holder": {"forward": [["x", "arg"]], "bases": []},
        "Linear": {"forward": [["input", "arg"]], "bases": []},
        "LayerNorm": {"forward": [["input", "arg"]], "bases": []},
    });
    let doc = json!({"model": "hand-made", "modules": Value::Array(modules), "classes": classes});
    ModuleTree::from_dump(doc.to_string()).unwrap()
}

fn located(chunks: usize) -> (Graph, Vec<Located>) {
    let catalog = Catalog::builtin().unwrap();
    let graph = graph(chunks);
    let found = discover(&tree(chunks), &catalog.newest());
    let of = |s: &structures_seams::Seam| catalog.get(&s.structure).unwrap();
    let all = found.seams.iter().flat_map(|s| locate(&graph, of(s), s));
    let all = all.collect();
    (graph, all)
}

fn seam<'l>(all: &'l [Located], structure: &str, path: &str) -> &'l Located {
    let found = all
        .iter()
        .find(|l| l.seam.structure == structure && l.seam.path == path);
    found.unwrap_or_else(|| panic!("no {structure} at {path}"))
}

#[test]
fn a_block_with_a_table_holds_its_chain_and_its_feed_forward() {
    let (graph, all) = located(6);
    let chain = seam(&all, "modnorm_qkv_chain", "blocks.0");
    let spans: Vec<&str> = chain.spans.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(spans, ["block", "chain", "ffn"], "{:?}", chain.fallen);
    let name = |v: &Option<ValueId>| v.map(|v| graph.value(v).name.clone());
    let inputs: Vec<_> = chain.spans[1].inputs.iter().map(|(_, v)| name(v)).collect();
    assert_eq!(inputs, [Some("x".into()), None, Some("temb".into())]);
    let points = |span: usize| -> Vec<&String> { chain.spans[span].points.keys().collect() };
    assert_eq!(points(0), ["attn_in", "o_in", "ffn_in", "ffn_hid"]);
    assert_eq!(points(1), ["attn_in"]);
    assert_eq!(points(2), ["ffn_in", "ffn_hid"]);
    // The sum with the table and its cut are read by both halves, so each computes them and the host keeps its own.
    let kinds = |span: usize| -> Vec<OpKind> {
        let ops = chain.spans[span].ops.iter();
        ops.map(|op| graph.op(*op).kind).collect()
    };
    assert!(kinds(0).contains(&OpKind::Chunk));
    assert!(!kinds(1).contains(&OpKind::Chunk) && !kinds(2).contains(&OpKind::Chunk));
    let both = |op| chain.spans[2].ops.contains(op);
    assert!(!chain.spans[1].ops.iter().any(both));
    assert_eq!(chain.seam.variant["modulation"], "per_token_table");
}

/// The name rule takes the norm before the cross attention for the feed-forward's; the graph has a modulation there.
#[test]
fn a_modulated_feed_forward_holds_without_its_norm() {
    let (_, all) = located(6);
    let ffn = seam(&all, "vision_ffn", "blocks.0.ffn");
    let spans: Vec<&str> = ffn.spans.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(spans, ["ffn"]);
}

#[test]
fn a_table_of_other_chunks_is_found_and_refused_in_the_graph() {
    let (_, all) = located(9);
    let refusal = seam(&all, "modnorm_qkv_chain", "blocks.0").refusal.as_ref();
    let refusal = refusal.unwrap();
    assert_eq!(refusal.op.as_deref(), Some("chunk"), "{refusal:?}");
    assert!(refusal.found.as_deref().unwrap().contains("9 results"));
}

/// Precedences: the chain keeps its block's pack, projections and feed-forward; what is not its own stays free.
#[test]
fn the_chain_owns_what_it_reads() {
    let (_, all) = located(6);
    let catalog = Catalog::builtin().unwrap();
    let claims: Vec<Claim> = all
        .iter()
        .enumerate()
        .filter(|(_, l)| !l.spans.is_empty())
        .map(|(seam, l)| {
            // The whole block is for a form that runs its attention too.
            let spans = l
                .spans
                .iter()
                .filter(|s| s.name != "block" || l.spans.len() == 1);
            let mut ops: Vec<_> = spans.flat_map(|s| s.ops.clone()).collect();
            ops.sort();
            ops.dedup();
            Claim {
                seam,
                precedence: catalog.get(&l.seam.structure).unwrap().precedence,
                ops,
            }
        })
        .collect();
    let key = |i: usize| format!("{} {}", all[i].seam.structure, all[i].seam.path);
    let outcome = resolve_ownership(&claims);
    let lost: BTreeMap<String, String> = outcome
        .losers
        .iter()
        .map(|o| (key(o.seam), key(o.by)))
        .collect();
    let chain = "modnorm_qkv_chain blocks.0".to_string();
    for loser in [
        "qkv_pack blocks.0.attn1",
        "vision_ffn blocks.0.ffn",
        "linear_proj blocks.0.attn1.to_q",
        "linear_proj blocks.0.attn1.to_k",
        "linear_proj blocks.0.attn1.to_v",
    ] {
        assert_eq!(lost.get(loser), Some(&chain), "{loser}: {lost:?}");
    }
    let kept: Vec<String> = outcome.winners.iter().map(|i| key(*i)).collect();
    for winner in [
        "norm_fused blocks.0.norm2",
        "linear_proj blocks.0.attn1.to_out.0",
        "linear_proj blocks.0.attn2.to_q",
        "linear_proj blocks.0.attn2.to_k",
        "linear_proj blocks.0.attn2.to_v",
        "linear_proj blocks.0.attn2.to_out.0",
    ] {
        assert!(kept.contains(&winner.to_string()), "{winner}: {kept:?}");
    }
    // Without the chain they come back.
    let rest: Vec<Claim> = claims
        .iter()
        .filter(|c| key(c.seam) != chain)
        .cloned()
        .collect();
    let outcome = resolve_ownership(&rest);
    let kept: Vec<String> = outcome.winners.iter().map(|i| key(*i)).collect();
    assert!(kept.contains(&"qkv_pack blocks.0.attn1".into()), "{kept:?}");
    assert!(kept.contains(&"vision_ffn blocks.0.ffn".into()), "{kept:?}");
    // A pack keeps its projections.
    assert!(!kept.contains(&"linear_proj blocks.0.attn1.to_q".into()));
}
