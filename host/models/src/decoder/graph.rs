//! The dataflow of a decoder, one graph for prefill and decode: the number of new tokens `T` is a symbol.
//!
//! Logits are made for all positions: the vocabulary has no slice in a graph, and teacher-forced workloads read all
//! of them. A prefill pays for it (a fifth of SmolLM2's products), a decode step of one token does not.

use structures_graph::{Graph, GraphBuilder, OpKind, ValueId};

use super::weave::{dims, Score, Weave};
use super::HEAD;
use crate::config::{DecoderConfig, Norms, QkNorm};

/// Inputs and outputs of the graph.
pub const TOKENS: &str = "tokens";
/// Positions of the new tokens.
pub const POSITIONS: &str = "positions";
/// Scores over the vocabulary.
pub const LOGITS: &str = "logits";

pub(crate) fn graph(c: &DecoderConfig) -> Graph {
    let mut m = Maker::new("decoder", c);
    let tokens = m.w.b.input(TOKENS, dims(&["B", "T"], &[]));
    let positions = m.w.b.input(POSITIONS, dims(&["T"], &[]));
    let mut x = m.embedding(tokens);
    let tables = m.tables(positions);
    for (i, tables) in tables.into_iter().enumerate() {
        x = m.layer(i, x, tables);
    }
    m.head(x);
    m.w.b.finish()
}

/// Makes the parts of a decoder from its configuration.
pub(crate) struct Maker<'a> {
    pub(crate) w: Weave,
    pub(crate) c: &'a DecoderConfig,
}

impl<'a> Maker<'a> {
    pub(crate) fn new(phase: &str, c: &'a DecoderConfig) -> Self {
        Maker {
            w: Weave {
                b: GraphBuilder::new(phase),
                eps: c.rms_norm_eps,
                offset: c.norm_offset,
            },
            c,
        }
    }

    fn table(&mut self) -> ValueId {
        let c = self.c;
        let dims = [c.vocab_size, c.hidden_size];
        self.w.param(&c.embed(), "weight", None, &dims)
    }

    pub(crate) fn embedding(&mut self, tokens: ValueId) -> ValueId {
        let table = self.table();
        let at = self.c.embed();
        let by = self.c.embedding_scale;
        let label = if by == 1.0 { "out" } else { "rows" };
        let stream = dims(&["B", "T"], &[self.c.hidden_size]);
        let rows = [tokens, table];
        let x = self.w.op(OpKind::Embedding, &at, label, &rows, &[], stream);
        self.w.scale(&at, "out", x, by)
    }

    /// Rotary tables for each layer; layers of one kind share theirs.
    pub(crate) fn tables(&mut self, positions: ValueId) -> Vec<[ValueId; 2]> {
        let c = self.c;
        let at = format!("{}.rotary_emb", c.root);
        let mut made: [Option<[ValueId; 2]>; 2] = [None, None];
        let each = c.windows.iter().map(|window| {
            let local = c.local_rope.as_ref().filter(|_| window.is_some());
            let kind = usize::from(local.is_some());
            *made[kind].get_or_insert_with(|| {
                let rope = local.unwrap_or(&c.rope);
                self.w.rope_tables(&at, positions, rope, c.rotary, None)
            })
        });
        each.collect()
    }

    pub(crate) fn layer(&mut self, i: usize, x: ValueId, tables: [ValueId; 2]) -> ValueId {
        let c = self.c;
        let at = c.layer(i);
        let score = Score {
            scale: c.attention_scale,
            window: c.windows.get(i).copied().flatten(),
            softcap: c.attention_softcap,
        };
        let [before, after] = attention_norms(c.norms);
        let normed = self.maybe_norm(&at, before, x);
        let y = self.attention(&format!("{at}.self_attn"), normed, tables, score);
        let y = self.maybe_norm(&at, after, y);
        let y = self.w.scale(&at, "attention_scaled", y, c.residual_scale);
        let x = self.w.add(&at, "attended", x, y);
        let [before, after] = ffn_norms(c.norms);
        let normed = self.maybe_norm(&at, before, x);
        let y = self.ffn(&format!("{at}.mlp"), normed, c.intermediate_size);
        let y = self.maybe_norm(&at, after, y);
        let y = self.w.scale(&at, "ffn_scaled", y, c.residual_scale);
        self.w.add(&at, "out", x, y)
    }

    fn maybe_norm(&mut self, at: &str, name: Option<&str>, x: ValueId) -> ValueId {
        match name {
            Some(name) => self.w.norm(&format!("{at}.{name}"), x, self.c.hidden_size),
            None => x,
        }
    }

    fn attention(&mut self, at: &str, x: ValueId, tables: [ValueId; 2], score: Score) -> ValueId {
        let c = self.c;
        let (h, kv, d) = (c.heads, c.kv_heads, c.head_dim);
        let q = self.heads(at, "q", x, (0, h), Some(tables));
        let k = self.heads(at, "k", x, (h, kv), Some(tables));
        let v = self.heads(at, "v", x, (h + kv, kv), None);
        let out = self.w.attention(at, [q, k, v], [h, kv, d], score);
        let merged = dims(&["B", "T"], &[h * d]);
        let out = self.w.reshape(at, "merged", out, merged);
        let at = format!("{at}.o_proj");
        self.w
            .linear(&at, "out", out, None, [h * d, c.hidden_size], c.o_bias)
    }

    /// One of q, k, v as `[B, T, heads, D]`, normed and turned where it is. `from` heads are before it where all three
    /// are one parameter.
    fn heads(
        &mut self,
        at: &str,
        side: &str,
        x: ValueId,
        (from, heads): (usize, usize),
        tables: Option<[ValueId; 2]>,
    ) -> ValueId {
        let c = self.c;
        let d = c.head_dim;
        let sizes = [c.hidden_size, heads * d];
        let mut y = match c.fused {
            true => {
                let rows = Some((from * d, (from + heads) * d));
                let at = format!("{at}.qkv_proj");
                self.w.linear(&at, side, x, rows, sizes, c.qkv_bias)
            }
            false => {
                let at = format!("{at}.{side}_proj");
                self.w.linear(&at, "out", x, None, sizes, c.qkv_bias)
            }
        };
        let split = dims(&["B", "T"], &[heads, d]);
        y = self.w.reshape(at, &format!("{side}_heads"), y, split);
        let Some(tables) = tables else { return y };
        let norm = format!("{at}.{side}_norm");
        y = match c.qk_norm {
            QkNorm::None => y,
            QkNorm::Head => self.w.norm(&norm, y, d),
            QkNorm::Whole => self.w.rms_norm(&norm, y, heads * d, 2, c.norm_offset),
        };
        self.w
            .rope(at, &format!("{side}_rope"), y, tables, c.rotary)
    }

    pub(crate) fn ffn(&mut self, at: &str, x: ValueId, inner: usize) -> ValueId {
        let c = self.c;
        let (d, f, bias) = (c.hidden_size, inner, c.mlp_bias);
        let module = |name: &str| format!("{at}.{name}");
        let (gate, up) = match c.fused {
            true => {
                let at = module("gate_up_proj");
                let gate = Some((0, f));
                let gate = self.w.linear(&at, "gate", x, gate, [d, f], bias);
                let up = Some((f, 2 * f));
                (gate, self.w.linear(&at, "up", x, up, [d, f], bias))
            }
            false => {
                let gate = module("gate_proj");
                let gate = self.w.linear(&gate, "out", x, None, [d, f], bias);
                let up = module("up_proj");
                (gate, self.w.linear(&up, "out", x, None, [d, f], bias))
            }
        };
        let act = module(act_module(c.fused));
        let act = self.w.act(&act, "out", gate, c.act);
        let gated = self.w.mul(at, "gated", act, up);
        let down = module("down_proj");
        self.w.linear(&down, "out", gated, None, [f, d], bias)
    }

    /// The last norm and the scores.
    pub(crate) fn head(&mut self, x: ValueId) {
        let c = self.c;
        let normed = self.w.norm(&c.final_norm(), x, c.hidden_size);
        let head = match c.tied_head {
            true => self.table(),
            false => {
                let dims = [c.vocab_size, c.hidden_size];
                self.w.param(HEAD, "weight", None, &dims)
            }
        };
        let scores = dims(&["B", "T"], &[c.vocab_size]);
        let rows = [normed, head];
        let mut y = self.w.op(OpKind::Linear, HEAD, "out", &rows, &[], scores);
        y = self.w.scale("", "logits_scaled", y, 1.0 / c.logits_divisor);
        if let Some(cap) = c.logits_softcap {
            y = self.w.scale("", "logits_over_cap", y, 1.0 / cap);
            y = self.w.act("", "logits_bent", y, "tanh");
            y = self.w.scale("", "logits_capped", y, cap);
        }
        self.w.b.output(LOGITS, y);
    }
}

/// Norms before and after attention.
pub(super) fn attention_norms(norms: Norms) -> [Option<&'static str>; 2] {
    match norms {
        Norms::Before => [Some("input_layernorm"), None],
        Norms::After => [None, Some("post_attention_layernorm")],
        Norms::Around => [Some("input_layernorm"), Some("post_attention_layernorm")],
    }
}

/// Norms before and after the FFN.
pub(super) fn ffn_norms(norms: Norms) -> [Option<&'static str>; 2] {
    match norms {
        Norms::Before => [Some("post_attention_layernorm"), None],
        Norms::After => [None, Some("post_feedforward_layernorm")],
        Norms::Around => [
            Some("pre_feedforward_layernorm"),
            Some("post_feedforward_layernorm"),
        ],
    }
}

/// Where the activation sits below the FFN.
pub(super) fn act_module(fused: bool) -> &'static str {
    match fused {
        true => "activation_fn",
        false => "act_fn",
    }
}
