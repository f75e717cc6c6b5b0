//! Qwen3-Next: most layers are a gated delta rule behind a short causal convolution, every fourth is attention whose
//! output is gated by half of the query projection; FFNs are routed experts beside a shared one. Norm weights are
//! stored around zero, except those of the delta rule's own norm.

use std::sync::Arc;

use serde_json::Map;
use structures_graph::tree::{Module, ModuleKind, Scalar};
use structures_graph::{AttrValue, Dim, Graph, ModuleTree, OpKind, ValueId};

use super::{Blueprint, Family};
use crate::checkpoint::{Checkpoint, Metadata};
use crate::config::{DecoderConfig, Dialect, Fields, QkNorm, Rule};
use crate::decoder::graph::{Maker, POSITIONS, TOKENS};
use crate::decoder::weave::{dims, symbol, Score};
use crate::decoder::{self, tree, HEAD};
use crate::params::{ParamMap, ParamSpec, RowOrder};
use crate::ModelError;

const DIALECT: Dialect = Dialect {
    qkv_bias: Rule::Field("attention_bias"),
    o_bias: Rule::Field("attention_bias"),
    norm_offset: true,
    eps_name: "eps",
    qk_norm: QkNorm::Head,
    partial_rotary: Some(0.25),
    reads: &["partial_rotary_factor"],
    ..Dialect::plain("qwen3_next", "Qwen3Next")
};

/// The family.
pub(super) const FAMILY: &dyn Family = &Next;

struct Next;

impl Family for Next {
    fn name(&self) -> &'static str {
        DIALECT.model_type
    }

    fn model_types(&self) -> Vec<&'static str> {
        vec![DIALECT.model_type]
    }

    fn gguf_architectures(&self) -> Vec<&'static str> {
        Vec::new()
    }

    fn build(&self, checkpoint: &Checkpoint, _kind: &str) -> Result<Blueprint, ModelError> {
        let mut map = match checkpoint.metadata() {
            Metadata::Config(map) => map.clone(),
            Metadata::Gguf(_) => Map::new(),
        };
        map.entry("head_dim").or_insert(256.into());
        let kinds = map.remove("layer_types");
        let mut config = DecoderConfig::read_object(checkpoint, &map, &DIALECT)?;
        map.extend(kinds.map(|k| ("layer_types".to_string(), k)));
        let hybrid = Hybrid::read(checkpoint, &map, config.layers)?;
        let specs = hybrid.specs(checkpoint, &config);
        let params = decoder::params(checkpoint, &mut config, specs)?;
        let tree = hybrid.tree(&config, &params);
        let graph = hybrid.graph(&config);
        structures_graph::check(&graph)?;
        Ok(Blueprint {
            config,
            tree,
            graph: Arc::new(graph),
            params: Arc::new(params),
            pictures: None,
        })
    }
}

/// What a decoder's configuration does not know.
struct Hybrid {
    layers: Vec<Layer>,
    key_heads: usize,
    value_heads: usize,
    key_width: usize,
    value_width: usize,
    conv: usize,
    experts: Experts,
}

#[derive(Clone, Copy)]
struct Layer {
    /// A delta rule, not attention.
    linear: bool,
    /// Experts, not one FFN.
    sparse: bool,
}

struct Experts {
    count: usize,
    chosen: usize,
    inner: usize,
    shared: usize,
    normalise: bool,
}

impl Hybrid {
    fn read(
        checkpoint: &Checkpoint,
        map: &Map<String, serde_json::Value>,
        layers: usize,
    ) -> Result<Self, ModelError> {
        let path = checkpoint.metadata_path();
        let fields = Fields {
            path: &path,
            prefix: String::new(),
            map,
        };
        let size =
            |name: &str, absent: usize| Ok::<_, ModelError>(fields.size(name)?.unwrap_or(absent));
        let linear = kinds(&fields, layers)?;
        let step = size("decoder_sparse_step", 1)?;
        let count = fields.count("num_experts")?.unwrap_or(512);
        let dense = fields.ids("mlp_only_layers")?;
        let hybrid = Hybrid {
            layers: linear
                .into_iter()
                .enumerate()
                .map(|(i, linear)| Layer {
                    linear,
                    sparse: count > 0 && (i + 1) % step == 0 && !dense.contains(&(i as u32)),
                })
                .collect(),
            key_heads: size("linear_num_key_heads", 16)?,
            value_heads: size("linear_num_value_heads", 32)?,
            key_width: size("linear_key_head_dim", 128)?,
            value_width: size("linear_value_head_dim", 128)?,
            conv: size("linear_conv_kernel_dim", 4)?,
            experts: Experts {
                count,
                chosen: size("num_experts_per_tok", 10)?,
                inner: size("moe_intermediate_size", 512)?,
                shared: size("shared_expert_intermediate_size", 512)?,
                normalise: fields.flag("norm_topk_prob")?.unwrap_or(true),
            },
        };
        let bad = |item: &str, expected: String, found: usize| {
            let help = "correct the file or get it again";
            Err(ModelError::malformed(
                &path,
                item,
                expected,
                found.to_string(),
                help,
            ))
        };
        if !hybrid.value_heads.is_multiple_of(hybrid.key_heads) {
            let expected = format!("a multiple of the {} key heads", hybrid.key_heads);
            return bad("linear_num_value_heads", expected, hybrid.value_heads);
        }
        if count > 0 && hybrid.experts.chosen > count {
            let expected = format!("at most the {count} experts there are");
            return bad("num_experts_per_tok", expected, hybrid.experts.chosen);
        }
        Ok(hybrid)
    }

    fn keys(&self) -> usize {
        self.key_heads * self.key_width
    }

    fn values(&self) -> usize {
        self.value_heads * self.value_width
    }

    fn specs(&self, checkpoint: &Checkpoint, c: &DecoderConfig) -> Vec<ParamSpec> {
        let mut specs = Vec::new();
        let mut add = |path: &str, name: &'static str, dims: &[usize]| {
            specs.push(ParamSpec {
                path: path.into(),
                name,
                dims: dims.to_vec(),
                tensors: vec![format!("{path}.{name}")],
                rows: RowOrder::Published,
            });
        };
        let d = c.hidden_size;
        add(&c.embed(), "weight", &[c.vocab_size, d]);
        for (i, layer) in self.layers.iter().enumerate() {
            let at = c.layer(i);
            let below = |name: &str| format!("{at}.{name}");
            if layer.linear {
                let (keys, values) = (self.keys(), self.values());
                let mut part = |name: &str, dims: &[usize]| {
                    add(&below(&format!("linear_attn.{name}")), "weight", dims)
                };
                part("conv1d", &[2 * keys + values, 1, self.conv]);
                part("in_proj_qkvz", &[2 * keys + 2 * values, d]);
                part("in_proj_ba", &[2 * self.value_heads, d]);
                part("norm", &[self.value_width]);
                part("out_proj", &[d, values]);
                add(&below("linear_attn"), "dt_bias", &[self.value_heads]);
                add(&below("linear_attn"), "A_log", &[self.value_heads]);
            } else {
                for (name, out, input, bias) in attention_linears(c) {
                    let path = below(&format!("self_attn.{name}"));
                    add(&path, "weight", &[out, input]);
                    if bias {
                        add(&path, "bias", &[out]);
                    }
                }
                add(&below("self_attn.q_norm"), "weight", &[c.head_dim]);
                add(&below("self_attn.k_norm"), "weight", &[c.head_dim]);
            }
            let (mlp, inner) = match layer.sparse {
                true => (below("mlp.shared_expert"), self.experts.shared),
                false => (below("mlp"), c.intermediate_size),
            };
            for (name, out, input, _) in decoder::ffn_linears(c, inner) {
                add(&format!("{mlp}.{name}"), "weight", &[out, input]);
            }
            if layer.sparse {
                add(&below("mlp.gate"), "weight", &[self.experts.count, d]);
                add(&below("mlp.shared_expert_gate"), "weight", &[1, d]);
            }
            add(&below("input_layernorm"), "weight", &[d]);
            add(&below("post_attention_layernorm"), "weight", &[d]);
        }
        add(&c.final_norm(), "weight", &[d]);
        if !c.tied_head {
            add(HEAD, "weight", &[c.vocab_size, d]);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            if layer.sparse {
                let at = format!("{}.mlp.experts", c.layer(i));
                specs.extend(self.banks(checkpoint, &at, d));
            }
        }
        specs
    }

    /// The stacked parameters of all experts; a checkpoint holds them stacked or expert by expert.
    fn banks(&self, checkpoint: &Checkpoint, at: &str, d: usize) -> [ParamSpec; 2] {
        let Experts { count, inner, .. } = self.experts;
        let bank = |name: &'static str, dims: [usize; 3], parts: &[&str]| {
            let whole = format!("{at}.{name}");
            let each = (0..count)
                .flat_map(|e| parts.iter().map(move |p| format!("{at}.{e}.{p}.weight")))
                .collect();
            ParamSpec {
                path: at.into(),
                name,
                dims: dims.to_vec(),
                tensors: match checkpoint.tensor_info(&whole) {
                    Some(_) => vec![whole],
                    None => each,
                },
                rows: RowOrder::Published,
            }
        };
        [
            bank(
                "gate_up_proj",
                [count, 2 * inner, d],
                &["gate_proj", "up_proj"],
            ),
            bank("down_proj", [count, d, inner], &["down_proj"]),
        ]
    }

    fn tree(&self, c: &DecoderConfig, params: &ParamMap) -> ModuleTree {
        let t = tree::Maker {
            c,
            class: DIALECT.class,
            eps_name: DIALECT.eps_name,
            params,
        };
        let ids = ["input_ids", "position_ids"];
        let mut modules = vec![
            t.other("", "ForCausalLM", &ids),
            t.other(c.root, "Model", &ids),
        ];
        modules.extend(t.embedding());
        for (i, layer) in self.layers.iter().enumerate() {
            let at = c.layer(i);
            let arguments = ["hidden_states", "position_embeddings"];
            modules.push(t.other(&at, "DecoderLayer", &arguments));
            match layer.linear {
                true => modules.extend(self.delta_modules(&t, &format!("{at}.linear_attn"))),
                false => modules.extend(self.attention_modules(&t, &format!("{at}.self_attn"), i)),
            }
            match layer.sparse {
                true => modules.extend(self.expert_modules(&t, &format!("{at}.mlp"))),
                false => modules.extend(t.mlp(&format!("{at}.mlp"), c.intermediate_size)),
            }
            modules.push(t.norm(&format!("{at}.input_layernorm")));
            modules.push(t.norm(&format!("{at}.post_attention_layernorm")));
        }
        modules.extend(t.tail());
        modules.push(t.head());
        ModuleTree::new(&c.model_type, modules)
    }

    fn delta_modules(&self, t: &tree::Maker<'_>, at: &str) -> Vec<Module> {
        let (keys, values, d) = (self.keys(), self.values(), t.c.hidden_size);
        let own = t.other(at, "GatedDeltaNet", &["hidden_states"]);
        let mut own = t.with_params(
            own,
            ModuleKind::Other,
            &[("dt_bias", true), ("A_log", true)],
        );
        for (name, n) in [
            ("num_v_heads", self.value_heads),
            ("num_k_heads", self.key_heads),
            ("head_k_dim", self.key_width),
            ("head_v_dim", self.value_width),
        ] {
            own.attrs.insert(name.into(), tree::int(n));
        }
        let conv = t.plain(&format!("{at}.conv1d"), "Conv1d");
        let conv = t.with_params(
            conv,
            ModuleKind::Other,
            &[("weight", true), ("bias", false)],
        );
        let norm = t.other(
            &format!("{at}.norm"),
            "RMSNormGated",
            &["hidden_states", "gate"],
        );
        let mut norm = t.with_params(norm, ModuleKind::RmsNorm, &[("weight", true)]);
        norm.attrs
            .insert("variance_epsilon".into(), Scalar::Float(t.c.rms_norm_eps));
        vec![
            own,
            conv,
            t.linear(at, &("in_proj_qkvz", 2 * (keys + values), d, false)),
            t.linear(at, &("in_proj_ba", 2 * self.value_heads, d, false)),
            norm,
            t.linear(at, &("out_proj", d, values, false)),
        ]
    }

    fn attention_modules(&self, t: &tree::Maker<'_>, at: &str, i: usize) -> Vec<Module> {
        let mut modules = t.attention(at, i);
        for linear in attention_linears(t.c) {
            let made = t.linear(at, &linear);
            if let Some(m) = modules.iter_mut().find(|m| m.path == made.path) {
                *m = made;
            }
        }
        modules
    }

    fn expert_modules(&self, t: &tree::Maker<'_>, at: &str) -> Vec<Module> {
        let below = |name: &str| format!("{at}.{name}");
        let e = &self.experts;
        let router = t.other(&below("gate"), "TopKRouter", &["hidden_states"]);
        let mut router = t.with_params(router, ModuleKind::Other, &[("weight", true)]);
        router.attrs.insert("top_k".into(), tree::int(e.chosen));
        router
            .attrs
            .insert("num_experts".into(), tree::int(e.count));
        let arguments = ["hidden_states", "top_k_index", "top_k_weights"];
        let bank = t.other(&below("experts"), "Experts", &arguments);
        let mut bank = t.with_params(
            bank,
            ModuleKind::Other,
            &[("gate_up_proj", true), ("down_proj", true)],
        );
        bank.attrs.insert("num_experts".into(), tree::int(e.count));
        bank.attrs
            .insert("act_fn".into(), Scalar::Word(t.c.act.into()));
        let mut modules = vec![
            t.other(at, "SparseMoeBlock", &["hidden_states"]),
            router,
            bank,
            t.activation(&below("experts.act_fn")),
        ];
        modules.extend(t.mlp(&below("shared_expert"), e.shared));
        modules.push(t.linear(at, &("shared_expert_gate", 1, t.c.hidden_size, false)));
        modules
    }

    fn graph(&self, c: &DecoderConfig) -> Graph {
        let mut m = Maker::new("decoder", c);
        let tokens = m.w.b.input(TOKENS, dims(&["B", "T"], &[]));
        let positions = m.w.b.input(POSITIONS, dims(&["T"], &[]));
        let mut x = m.embedding(tokens);
        // A model of delta rules only turns nothing.
        let attends = self.layers.iter().any(|l| !l.linear);
        let tables = attends.then(|| {
            let at = format!("{}.rotary_emb", c.root);
            m.w.rope_tables(&at, positions, &c.rope, c.rotary, None)
        });
        for (i, layer) in self.layers.iter().enumerate() {
            let at = c.layer(i);
            let normed = m.w.norm(&format!("{at}.input_layernorm"), x, c.hidden_size);
            let y = match (layer.linear, tables) {
                (false, Some(tables)) => self.attention(&mut m, &at, normed, tables),
                _ => self.delta(&mut m, &format!("{at}.linear_attn"), normed),
            };
            let y0 = m.w.add(&at, "attended", x, y);
            let norm = format!("{at}.post_attention_layernorm");
            let normed = m.w.norm(&norm, y0, c.hidden_size);
            let mlp = format!("{at}.mlp");
            let y = match layer.sparse {
                true => self.routed(&mut m, &mlp, normed),
                false => m.ffn(&mlp, normed, c.intermediate_size),
            };
            x = m.w.add(&at, "out", y0, y);
        }
        m.head(x);
        m.w.b.finish()
    }

    fn attention(
        &self,
        m: &mut Maker<'_>,
        layer: &str,
        x: ValueId,
        tables: [ValueId; 2],
    ) -> ValueId {
        let c = m.c;
        let w = &mut m.w;
        let at = &format!("{layer}.self_attn");
        let (h, kv, d) = (c.heads, c.kv_heads, c.head_dim);
        let mut side = |name: &str, out: usize, heads: usize, width: usize| {
            let module = format!("{at}.{name}_proj");
            let sizes = [c.hidden_size, out];
            let y = w.linear(&module, "out", x, None, sizes, c.qkv_bias);
            let split = dims(&["B", "T"], &[heads, width]);
            w.reshape(at, &format!("{name}_heads"), y, split)
        };
        let both = side("q", 2 * h * d, h, 2 * d);
        let k = side("k", kv * d, kv, d);
        let v = side("v", kv * d, kv, d);
        let half = dims(&["B", "T"], &[h, d]);
        let halves = w.b.ops(
            OpKind::Chunk,
            at,
            &[Some(both)],
            &[("n", AttrValue::Int(2))],
            vec![("query", half.clone()), ("gate", half)],
        );
        let q = w.norm(&format!("{at}.q_norm"), halves[0], d);
        let q = w.rope(at, "q_rope", q, tables, c.rotary);
        let k = w.norm(&format!("{at}.k_norm"), k, d);
        let k = w.rope(at, "k_rope", k, tables, c.rotary);
        let out = w.attention(at, [q, k, v], [h, kv, d], Score::default());
        let flat = || dims(&["B", "T"], &[h * d]);
        let out = w.reshape(at, "merged", out, flat());
        let gate = w.reshape(at, "gate_merged", halves[1], flat());
        let gate = w.act(at, "gate_open", gate, "sigmoid");
        let out = w.mul(at, "gated", out, gate);
        let module = format!("{at}.o_proj");
        let sizes = [h * d, c.hidden_size];
        w.linear(&module, "out", out, None, sizes, c.o_bias)
    }

    fn delta(&self, m: &mut Maker<'_>, at: &str, x: ValueId) -> ValueId {
        let c = m.c;
        let w = &mut m.w;
        let d = c.hidden_size;
        let (groups, heads) = (self.key_heads, self.value_heads);
        let each = heads / groups;
        let (dk, dv) = (self.key_width, self.value_width);
        let (keys, values) = (self.keys(), self.values());
        let bt = |sizes: &[usize]| dims(&["B", "T"], sizes);

        // Rows of the two input projections go by key head: what belongs to one stands together.
        let module = format!("{at}.in_proj_qkvz");
        let mixed = w.linear(&module, "out", x, None, [d, 2 * (keys + values)], false);
        let mixed = w.reshape(
            at,
            "mixed_groups",
            mixed,
            bt(&[groups, 2 * dk + 2 * each * dv]),
        );
        let parts = [
            ("q_group", dk),
            ("k_group", dk),
            ("v_group", each * dv),
            ("z_group", each * dv),
        ];
        let parts = w.split(at, mixed, &parts);
        let flat = [("q_in", keys), ("k_in", keys), ("v_in", values)];
        let flat: Vec<ValueId> = flat
            .into_iter()
            .zip(&parts)
            .map(|((label, width), x)| w.reshape(at, label, *x, bt(&[width])))
            .collect();
        let channels = 2 * keys + values;
        let joined = w.op(OpKind::Concat, at, "joined", &flat, &[], bt(&[channels]));

        let conv = format!("{at}.conv1d");
        let kernel = w.param(&conv, "weight", None, &[channels, 1, self.conv]);
        let before = w.fixed(at, "conv", &[self.conv - 1, channels]);
        let kept = vec![symbol("B"), Dim::Size(self.conv - 1), Dim::Size(channels)];
        let conv = w.b.ops(
            OpKind::CausalConv,
            &conv,
            &[Some(joined), Some(kernel), Some(before)],
            &[],
            vec![("out", bt(&[channels])), ("last", kept)],
        );
        w.keep(at, "conv_kept", conv[1], before);
        let bent = w.act(at, "conv_act", conv[0], c.act);
        let parts_out = w.split(at, bent, &[("q", keys), ("k", keys), ("v", values)]);
        let mut spread = |label: &str, x: ValueId| {
            let heads_of = format!("{label}_heads");
            if each == 1 {
                return w.reshape(at, &heads_of, x, bt(&[groups, dk]));
            }
            // Every value head of a group reads the group's key head.
            let single = format!("{label}_single");
            let x = w.reshape(at, &single, x, bt(&[groups, 1, dk]));
            let copies = vec![x; each];
            let axis = [("axis", AttrValue::Int(3))];
            let many = format!("{label}_many");
            let x = w.op(
                OpKind::Concat,
                at,
                &many,
                &copies,
                &axis,
                bt(&[groups, each, dk]),
            );
            w.reshape(at, &heads_of, x, bt(&[heads, dk]))
        };
        let q = spread("q", parts_out[0]);
        let k = spread("k", parts_out[1]);
        let v = w.reshape(at, "v_heads", parts_out[2], bt(&[heads, dv]));

        let module = format!("{at}.in_proj_ba");
        let ba = w.linear(&module, "out", x, None, [d, 2 * heads], false);
        let ba = w.reshape(at, "ba_groups", ba, bt(&[groups, 2 * each]));
        let ba = w.split(at, ba, &[("b_group", each), ("a_group", each)]);
        let b = w.reshape(at, "b", ba[0], bt(&[heads]));
        let beta = w.act(at, "beta", b, "sigmoid");
        let a = w.reshape(at, "a", ba[1], bt(&[heads]));
        let bias = w.param(at, "dt_bias", None, &[heads]);
        let a = w.op(OpKind::Bias, at, "a_biased", &[a, bias], &[], bt(&[heads]));
        let a = w.act(at, "a_soft", a, "softplus");
        let log = w.param(at, "A_log", None, &[heads]);
        let rate = w.act(at, "rate", log, "exp");
        let rate = w.scale(at, "rate_down", rate, -1.0);
        let decay = w.mul(at, "log_decay", a, rate);

        let state = w.fixed(at, "delta", &[heads, dk, dv]);
        let kept = vec![symbol("B"), Dim::Size(heads), Dim::Size(dk), Dim::Size(dv)];
        let inputs = [q, k, v, decay, beta, state].map(Some);
        let made = w.b.ops(
            OpKind::GatedDelta,
            at,
            &inputs,
            &[],
            vec![("delta_out", bt(&[heads, dv])), ("delta_last", kept)],
        );
        w.keep(at, "delta_kept", made[1], state);

        let normed = w.rms_norm(&format!("{at}.norm"), made[0], dv, 1, false);
        let z = w.reshape(at, "z_heads", parts[3], bt(&[heads, dv]));
        let z = w.act(at, "z_act", z, "silu");
        let gated = w.mul(at, "gated", normed, z);
        let gated = w.reshape(at, "merged", gated, bt(&[values]));
        let module = format!("{at}.out_proj");
        w.linear(&module, "out", gated, None, [values, d], false)
    }

    fn routed(&self, m: &mut Maker<'_>, at: &str, x: ValueId) -> ValueId {
        let d = m.c.hidden_size;
        let e = &self.experts;
        let below = |name: &str| format!("{at}.{name}");
        let scores = [d, e.count];
        let scores = m.w.linear(&below("gate"), "scores", x, None, scores, false);
        let shape = m.w.b.dims(scores).to_vec();
        let mut attrs = vec![("k", AttrValue::Int(e.chosen as i64))];
        if !e.normalise {
            attrs.push(("normalise", AttrValue::Flag(false)));
        }
        let route = m.w.op(
            OpKind::TopkRoute,
            &below("gate"),
            "out",
            &[scores],
            &attrs,
            shape,
        );
        let bank = below("experts");
        let up = [e.count, 2 * e.inner, d];
        let up = m.w.param(&bank, "gate_up_proj", None, &up);
        let down = m.w.param(&bank, "down_proj", None, &[e.count, d, e.inner]);
        let shape = m.w.b.dims(x).to_vec();
        let kind = [("kind", AttrValue::Word(m.c.act.into()))];
        let inputs = [x, route, up, down];
        let routed = m.w.op(OpKind::Experts, &bank, "out", &inputs, &kind, shape);
        let shared = m.ffn(&below("shared_expert"), x, e.shared);
        let gate = below("shared_expert_gate");
        let gate = m.w.linear(&gate, "out", x, None, [d, 1], false);
        let gate = m.w.act(at, "shared_open", gate, "sigmoid");
        let shared = m.w.mul(at, "shared", shared, gate);
        m.w.add(at, "out", routed, shared)
    }
}

/// Which layers are delta rules: by name, or all but every n-th.
fn kinds(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let Some(list) = fields.get("layer_types") else {
        let every = fields.size("full_attention_interval")?.unwrap_or(4);
        return Ok((0..layers).map(|i| (i + 1) % every != 0).collect());
    };
    let expected = format!("linear_attention or full_attention for each of {layers} layers");
    let each = list.as_array().map(Vec::as_slice).unwrap_or(&[]);
    let known: Option<Vec<bool>> = each
        .iter()
        .take(layers)
        .map(|k| match k.as_str() {
            Some("linear_attention") => Some(true),
            Some("full_attention") => Some(false),
            _ => None,
        })
        .collect();
    match known {
        Some(known) if known.len() == layers => Ok(known),
        _ => Err(ModelError::unsupported(
            fields.path,
            "layer_types",
            expected,
            list.to_string(),
            "this version cannot run the model",
        )),
    }
}

/// As in every decoder, but q has a gate for each of its channels.
fn attention_linears(c: &DecoderConfig) -> [decoder::Linear; 4] {
    let d = c.hidden_size;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    [
        ("q_proj", 2 * q, d, c.qkv_bias),
        ("k_proj", kv, d, c.qkv_bias),
        ("v_proj", kv, d, c.qkv_bias),
        ("o_proj", d, q, c.o_bias),
    ]
}
