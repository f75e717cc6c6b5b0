//! The module tree of a decoder, as the published implementation defines it.

use indexmap::IndexMap;
use structures_graph::tree::{ArgKind, ParamInfo, Scalar};
use structures_graph::{Module, ModuleKind, ModuleTree};

use super::{layer, norms, projections, EMBED, FINAL_NORM, HEAD};
use crate::config::{DecoderConfig, Dialect};
use crate::params::ParamMap;

pub(super) fn tree(c: &DecoderConfig, dialect: &Dialect, params: &ParamMap) -> ModuleTree {
    let t = Maker { c, dialect, params };
    let mut modules = vec![
        t.other("", "ForCausalLM", &["input_ids", "position_ids"]),
        t.other("model", "Model", &["input_ids", "position_ids"]),
        t.embedding(),
        t.plain("model.layers", "ModuleList"),
    ];
    for i in 0..c.layers {
        let at = layer(i);
        let linears = projections(c);
        modules.push(t.other(
            &at,
            "DecoderLayer",
            &["hidden_states", "position_embeddings"],
        ));
        let attention = format!("{at}.self_attn");
        let arguments = ["hidden_states", "position_embeddings"];
        modules.push(t.attention(&attention, i, &arguments));
        for (name, out, input, bias) in &linears[..4] {
            modules.push(t.linear(&format!("{at}.{name}"), *out, *input, *bias));
        }
        for (name, _) in norms(c).iter().skip(2) {
            modules.push(t.norm(&format!("{at}.{name}")));
        }
        modules.push(t.mlp(&format!("{at}.mlp")));
        for (name, out, input, bias) in &linears[4..] {
            modules.push(t.linear(&format!("{at}.{name}"), *out, *input, *bias));
        }
        let mut act = t.plain(&format!("{at}.mlp.act_fn"), "");
        act.kind = Some(ModuleKind::Activation);
        act.forward = Some(vec![("input".into(), ArgKind::Arg)]);
        modules.push(act);
        for (name, _) in norms(c).iter().take(2) {
            modules.push(t.norm(&format!("{at}.{name}")));
        }
    }
    modules.push(t.norm(FINAL_NORM));
    modules.push(t.other(
        "model.rotary_emb",
        "RotaryEmbedding",
        &["x", "position_ids"],
    ));
    modules.push(t.linear(HEAD, c.vocab_size, c.hidden_size, false));
    ModuleTree::new(&c.model_type, modules)
}

struct Maker<'a> {
    c: &'a DecoderConfig,
    dialect: &'a Dialect,
    params: &'a ParamMap,
}

impl Maker<'_> {
    fn plain(&self, path: &str, class: &str) -> Module {
        Module {
            path: path.into(),
            class: class.into(),
            kind: Some(ModuleKind::Other),
            ..Module::default()
        }
    }

    fn other(&self, path: &str, suffix: &str, arguments: &[&str]) -> Module {
        let mut m = self.plain(path, &format!("{}{suffix}", self.dialect.class));
        m.forward = Some(
            arguments
                .iter()
                .map(|a| ((*a).into(), ArgKind::Arg))
                .collect(),
        );
        m
    }

    fn with_params(&self, mut m: Module, kind: ModuleKind, names: &[(&str, bool)]) -> Module {
        m.kind = Some(kind);
        let mut params = IndexMap::new();
        for (name, there) in names {
            match self.params.get(&m.path, name) {
                Some((spec, info)) if *there => {
                    let dtype = info.dtype.to_string();
                    let dims = spec.dims.clone();
                    params.insert((*name).to_string(), ParamInfo { dims, dtype });
                }
                _ => m.absent_params.push((*name).to_string()),
            }
        }
        m.params = params;
        m
    }

    fn embedding(&self) -> Module {
        let mut m = self.plain(EMBED, "Embedding");
        m.attrs
            .insert("num_embeddings".into(), int(self.c.vocab_size));
        m.attrs
            .insert("embedding_dim".into(), int(self.c.hidden_size));
        m.forward = Some(vec![("input".into(), ArgKind::Arg)]);
        self.with_params(m, ModuleKind::Embedding, &[("weight", true)])
    }

    fn linear(&self, path: &str, out: usize, input: usize, bias: bool) -> Module {
        let mut m = self.plain(path, "Linear");
        m.attrs.insert("in_features".into(), int(input));
        m.attrs.insert("out_features".into(), int(out));
        m.forward = Some(vec![("input".into(), ArgKind::Arg)]);
        self.with_params(m, ModuleKind::Linear, &[("weight", true), ("bias", bias)])
    }

    fn norm(&self, path: &str) -> Module {
        let mut m = self.other(path, "RMSNorm", &["hidden_states"]);
        m.attrs.insert(
            "variance_epsilon".into(),
            Scalar::Float(self.c.rms_norm_eps),
        );
        self.with_params(m, ModuleKind::RmsNorm, &[("weight", true)])
    }

    fn attention(&self, path: &str, index: usize, arguments: &[&str]) -> Module {
        let c = self.c;
        let mut m = self.other(path, "Attention", arguments);
        m.attrs.insert("layer_idx".into(), int(index));
        m.attrs.insert("head_dim".into(), int(c.head_dim));
        m.attrs
            .insert("num_key_value_groups".into(), int(c.heads / c.kv_heads));
        m.attrs.insert(
            "scaling".into(),
            Scalar::Float((c.head_dim as f64).powf(-0.5)),
        );
        m.attrs.insert("is_causal".into(), Scalar::Flag(true));
        m
    }

    fn mlp(&self, path: &str) -> Module {
        let mut m = self.other(path, "MLP", &["x"]);
        m.attrs
            .insert("hidden_size".into(), int(self.c.hidden_size));
        m.attrs
            .insert("intermediate_size".into(), int(self.c.intermediate_size));
        m.attrs
            .insert("act_fn".into(), Scalar::Word(self.c.act.into()));
        m
    }
}

fn int(n: usize) -> Scalar {
    Scalar::Int(n as i64)
}
