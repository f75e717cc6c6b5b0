//! A small native host that runs in steps: blocks whose norms are conditioned by where a loop stands, as a denoiser's
//! are. The loop counts for itself: a state region holds the step, every call adds one to it, and a projection of the
//! count is the conditioning of that call. So any sample shows the same few conditionings, one a call. Beside them the
//! blocks may hold cross-attention to an encoder's output, which does not change within a loop.

use structures::host::Loaded;
use structures_graph::tree::{ArgKind, Scalar};
use structures_graph::{
    AttrValue, Dim, Graph, GraphBuilder, ModuleKind, ModuleTree, OpKind, StateRegion, ValueId,
};

use crate::blocks::{dims, loaded, Weave, D};

/// Width of a conditioning.
pub const C: usize = 32;
/// Width of the encoder's output.
pub const E: usize = 256;
const VOCAB: usize = 256;
const HEADS: usize = 4;
const HD: usize = 64;

/// How a block is conditioned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Both norms by the common conditioning, gates before both residual sums.
    Gated,
    /// The second norm by a conditioning of its own.
    Apart,
    /// As `Gated`, and the gated sum is returned by the model as well: nobody may absorb it.
    Watched,
}

fn batch(sizes: &[usize]) -> Vec<Dim> {
    let sizes = sizes.iter().map(|n| Dim::Size(*n));
    std::iter::once(Dim::Symbol("B".into()))
        .chain(sizes)
        .collect()
}

impl Weave {
    /// The count of calls, and what it is projected to under this name.
    fn conditioning(&mut self, name: &str, count: ValueId) -> ValueId {
        self.module(
            name,
            ModuleKind::Other,
            &[("weight", &[C, 1]), ("bias", &[C])],
        );
        let (w, b) = (
            self.param(name, "weight", &[C, 1]),
            self.param(name, "bias", &[C]),
        );
        let s = self.op(
            OpKind::Linear,
            name,
            "product",
            &[count, w],
            &[],
            batch(&[C]),
        );
        let s = self.op(OpKind::Bias, name, "sum", &[s, b], &[], batch(&[C]));
        let tanh = [("kind", AttrValue::Word("tanh".into()))];
        self.op(OpKind::Act, name, "out", &[s], &tanh, batch(&[C]))
    }

    /// A norm modulated by its conditioning: its output, and the gate.
    fn conditioned(&mut self, at: &str, x: ValueId, cond: ValueId) -> (ValueId, ValueId) {
        let m = self.module(at, ModuleKind::RmsNorm, &[]);
        m.attrs.insert("dim".into(), Scalar::Int(D as i64));
        m.attrs.insert("eps".into(), Scalar::Float(1e-6));
        let args = ["x", "cond"].map(|n| (n.to_string(), ArgKind::Arg));
        m.forward = Some(args.into());
        let dense = format!("{at}.dense");
        let m = self.module(
            &dense,
            ModuleKind::Linear,
            &[("weight", &[3 * D, C]), ("bias", &[3 * D])],
        );
        m.attrs.insert("in_features".into(), Scalar::Int(C as i64));
        m.attrs
            .insert("out_features".into(), Scalar::Int(3 * D as i64));
        let (w, b) = (
            self.param(&dense, "weight", &[3 * D, C]),
            self.param(&dense, "bias", &[3 * D]),
        );
        let s = self.op(
            OpKind::Linear,
            &dense,
            "product",
            &[cond, w],
            &[],
            batch(&[3 * D]),
        );
        let s = self.op(OpKind::Bias, &dense, "out", &[s, b], &[], batch(&[3 * D]));
        let s = self.reshape(at, "style", s, batch(&[1, 3 * D]));
        let parts = self.b.ops(
            OpKind::Chunk,
            at,
            &[Some(s)],
            &[("n", AttrValue::Int(3))],
            vec![
                ("scale", batch(&[1, D])),
                ("shift", batch(&[1, D])),
                ("gate", batch(&[1, D])),
            ],
        );
        let eps = [("eps", AttrValue::Float(1e-6))];
        let n = self.op(OpKind::RmsNorm, at, "normed", &[x], &eps, dims(&[D]));
        let of = [n, parts[0], parts[1]];
        let y = self.op(OpKind::Modulate, at, "out", &of, &[], dims(&[D]));
        (y, parts[2])
    }

    fn gated(&mut self, at: &str, label: &str, x: ValueId, y: ValueId, gate: ValueId) -> ValueId {
        let y = self.op(
            OpKind::Mul,
            at,
            &format!("{label}_gated"),
            &[y, gate],
            &[],
            dims(&[D]),
        );
        self.add(at, label, x, y)
    }

    /// What leaves the block, and the sum inside it where somebody watches that.
    fn step(
        &mut self,
        at: &str,
        kind: Step,
        x: ValueId,
        conds: [ValueId; 2],
    ) -> (ValueId, Option<ValueId>) {
        self.module(at, ModuleKind::Other, &[]);
        let attn = format!("{at}.self_attn");
        let (h, gate) = self.conditioned(&format!("{at}.input_layernorm"), x, conds[0]);
        self.module(&attn, ModuleKind::Other, &[]);
        let out = self.attention(&attn, h, h);
        let r = self.gated(at, "attended", x, out, gate);
        let own = conds[usize::from(kind == Step::Apart)];
        let (h, gate) = self.conditioned(&format!("{at}.post_attention_layernorm"), r, own);
        let y = self.ffn(&format!("{at}.mlp"), h);
        let out = self.gated(at, "out", r, y, gate);
        (out, (kind == Step::Watched).then_some(r))
    }
}

/// A loaded model of these blocks, in the conventions of a decoder: inputs `tokens` and `positions`.
pub fn model(kinds: &[Step]) -> Loaded {
    let mut w = Weave {
        b: GraphBuilder::new("decoder"),
        modules: Vec::new(),
    };
    let tokens = w.b.input("tokens", dims(&[]));
    w.b.input("positions", vec![Dim::Symbol("T".into())]);
    w.module("embed", ModuleKind::Embedding, &[("weight", &[VOCAB, D])]);
    let table = w.param("embed", "weight", &[VOCAB, D]);
    let of = [tokens, table];
    let mut x = w.op(OpKind::Embedding, "embed", "out", &of, &[], dims(&[D]));
    w.module("clock", ModuleKind::Other, &[("tick", &[1])]);
    let region = w.b.state(StateRegion::fixed("clock", &[1]));
    let tick = w.param("clock", "tick", &[1]);
    let count = w.op(
        OpKind::Add,
        "clock",
        "next",
        &[region, tick],
        &[],
        batch(&[1]),
    );
    let of = [count, region];
    w.op(OpKind::StateWrite, "clock", "kept", &of, &[], batch(&[1]));
    let cond = w.conditioning("timestep", count);
    let mut conds = [cond; 2];
    if kinds.contains(&Step::Apart) {
        conds[1] = w.conditioning("timestep_apart", count);
    }
    let mut watched = None;
    for (i, kind) in kinds.iter().enumerate() {
        let made = w.step(&format!("blocks.{i}"), *kind, x, conds);
        x = made.0;
        watched = watched.or(made.1);
    }
    // The first output is what is judged.
    w.b.output("out", x);
    if let Some(r) = watched {
        w.b.output("watched", r);
    }
    loaded(ModuleTree::new("steps", w.modules), w.b.finish())
}

/// Two blocks of cross-attention to an encoder: inputs `latent` `[B,T,D]` and `encoder` `[B,S,E]`.
pub fn crossing() -> (ModuleTree, Graph) {
    let mut w = Weave {
        b: GraphBuilder::new("denoise"),
        modules: Vec::new(),
    };
    let far = |n: usize| {
        vec![
            Dim::Symbol("B".into()),
            Dim::Symbol("N".into()),
            Dim::Size(n),
        ]
    };
    let mut x = w.b.input("latent", dims(&[D]));
    let encoder = w.b.input("encoder", far(E));
    for i in 0..2 {
        let at = format!("blocks.{i}.attn2");
        w.module(&at, ModuleKind::Other, &[]);
        let q = w.linear(&format!("{at}.to_q"), x, D, HEADS * HD);
        let side = |w: &mut Weave, name: &str| {
            let path = format!("{at}.{name}");
            let n = HEADS * HD;
            let m = w.module(&path, ModuleKind::Linear, &[("weight", &[n, E])]);
            m.absent_params.push("bias".into());
            m.attrs.insert("in_features".into(), Scalar::Int(E as i64));
            m.attrs.insert("out_features".into(), Scalar::Int(n as i64));
            let weight = w.param(&path, "weight", &[n, E]);
            w.op(
                OpKind::Linear,
                &path,
                "out",
                &[encoder, weight],
                &[],
                far(n),
            )
        };
        let (k, v) = (side(&mut w, "to_k"), side(&mut w, "to_v"));
        let heads = |w: &mut Weave, label: &str, x: ValueId, rows: &str| {
            let sym = |s: &str| Dim::Symbol(s.into());
            let to = vec![sym("B"), sym(rows), Dim::Size(HEADS), Dim::Size(HD)];
            let x = w.reshape(&at, &format!("{label}_heads"), x, to);
            let perm = AttrValue::List([0, 2, 1, 3].map(AttrValue::Int).to_vec());
            let to = vec![sym("B"), Dim::Size(HEADS), sym(rows), Dim::Size(HD)];
            w.op(OpKind::Transpose, &at, label, &[x], &[("perm", perm)], to)
        };
        let q = heads(&mut w, "q", q, "T");
        let (k, v) = (heads(&mut w, "k", k, "N"), heads(&mut w, "v", v, "N"));
        let to = dims(&[HEADS, HD]);
        let out = w.op(OpKind::Attention, &at, "attention", &[q, k, v], &[], to);
        let out = w.reshape(&at, "merged", out, dims(&[HEADS * HD]));
        let out = w.linear(&format!("{at}.to_out.0"), out, HEADS * HD, D);
        x = w.add(&at, "out", x, out);
    }
    w.b.output("out", x);
    (ModuleTree::new("crossing", w.modules), w.b.finish())
}

/// A loaded model of [`crossing`].
pub fn crossing_model() -> Loaded {
    let (tree, graph) = crossing();
    loaded(tree, graph)
}
