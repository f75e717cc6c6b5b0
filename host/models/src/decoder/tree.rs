//! The module tree of a decoder, as the published implementation defines it.

use indexmap::IndexMap;
use structures_graph::tree::{ArgKind, ParamInfo, Scalar};
use structures_graph::{Module, ModuleKind, ModuleTree};

use super::graph::act_module;
use super::{attention_linears, ffn_linears, layer_norms, qk_norms, Linear, HEAD};
use crate::config::{DecoderConfig, Dialect};
use crate::params::ParamMap;

pub(super) fn tree(c: &DecoderConfig, dialect: &Dialect, params: &ParamMap) -> ModuleTree {
    let t = Maker {
        c,
        class: dialect.class,
        eps_name: dialect.eps_name,
        params,
    };
    let ids = ["input_ids", "position_ids"];
    let mut modules = match c.root.rsplit_once('.') {
        None => vec![t.other("", "ForCausalLM", &ids)],
        Some((outer, _)) => vec![
            t.other("", "ForConditionalGeneration", &ids),
            t.other(outer, "Model", &ids),
        ],
    };
    modules.push(t.other(c.root, dialect.model_class, &ids));
    modules.extend(t.decoder());
    modules.push(t.head());
    ModuleTree::new(&c.model_type, modules)
}

pub(crate) struct Maker<'a> {
    pub(crate) c: &'a DecoderConfig,
    /// Class name prefix.
    pub(crate) class: &'a str,
    pub(crate) eps_name: &'a str,
    pub(crate) params: &'a ParamMap,
}

impl Maker<'_> {
    /// Everything below the module of the stream.
    pub(crate) fn decoder(&self) -> Vec<Module> {
        let c = self.c;
        let mut modules = self.embedding();
        for i in 0..c.layers {
            let at = c.layer(i);
            let arguments = ["hidden_states", "position_embeddings"];
            modules.push(self.other(&at, "DecoderLayer", &arguments));
            modules.extend(self.attention(&format!("{at}.self_attn"), i));
            modules.extend(self.mlp(&format!("{at}.mlp"), c.intermediate_size));
            for name in layer_norms(c) {
                modules.push(self.norm(&format!("{at}.{name}")));
            }
            if c.fused {
                for name in ["resid_attn_dropout", "resid_mlp_dropout"] {
                    modules.push(self.plain(&format!("{at}.{name}"), "Dropout"));
                }
            }
        }
        modules.extend(self.tail());
        modules
    }

    /// The embedding and the list of layers.
    pub(crate) fn embedding(&self) -> Vec<Module> {
        let class = match self.c.embedding_scale != 1.0 && self.c.norm_offset {
            true => format!("{}TextScaledWordEmbedding", self.class),
            false => "Embedding".into(),
        };
        let embed = self.embedding_of(&self.c.embed(), &class, self.c.vocab_size);
        let layers = format!("{}.layers", self.c.root);
        vec![embed, self.plain(&layers, "ModuleList")]
    }

    /// The last norm and the rotary tables.
    pub(crate) fn tail(&self) -> Vec<Module> {
        let rotary = format!("{}.rotary_emb", self.c.root);
        vec![
            self.norm(&self.c.final_norm()),
            self.other(&rotary, "RotaryEmbedding", &["x", "position_ids"]),
        ]
    }

    pub(crate) fn head(&self) -> Module {
        self.linear("", &(HEAD, self.c.vocab_size, self.c.hidden_size, false))
    }

    pub(crate) fn attention(&self, at: &str, index: usize) -> Vec<Module> {
        let mut modules = vec![self.attention_itself(at, index)];
        for linear in attention_linears(self.c) {
            modules.push(self.linear(at, &linear));
        }
        for (name, _) in qk_norms(self.c) {
            modules.push(self.norm(&format!("{at}.{name}")));
        }
        modules
    }

    pub(crate) fn mlp(&self, at: &str, inner: usize) -> Vec<Module> {
        let mut m = self.other(at, "MLP", &["x"]);
        let act = act_module(self.c.fused);
        if !self.c.fused {
            m.attrs
                .insert("hidden_size".into(), int(self.c.hidden_size));
            m.attrs.insert("intermediate_size".into(), int(inner));
        }
        m.attrs.insert(act.into(), Scalar::Word(self.c.act.into()));
        let mut modules = vec![m];
        for linear in ffn_linears(self.c, inner) {
            modules.push(self.linear(at, &linear));
        }
        modules.push(self.activation(&format!("{at}.{act}")));
        modules
    }

    pub(crate) fn activation(&self, path: &str) -> Module {
        let mut act = self.plain(path, "");
        act.kind = Some(ModuleKind::Activation);
        act.forward = Some(vec![("input".into(), ArgKind::Arg)]);
        act
    }

    pub(crate) fn plain(&self, path: &str, class: &str) -> Module {
        Module {
            path: path.into(),
            class: class.into(),
            kind: Some(ModuleKind::Other),
            ..Module::default()
        }
    }

    pub(crate) fn other(&self, path: &str, suffix: &str, arguments: &[&str]) -> Module {
        let mut m = self.plain(path, &format!("{}{suffix}", self.class));
        m.forward = Some(
            arguments
                .iter()
                .map(|a| ((*a).into(), ArgKind::Arg))
                .collect(),
        );
        m
    }

    pub(crate) fn with_params(
        &self,
        mut m: Module,
        kind: ModuleKind,
        names: &[(&str, bool)],
    ) -> Module {
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

    /// An embedding of so many rows.
    pub(crate) fn embedding_of(&self, path: &str, class: &str, rows: usize) -> Module {
        let mut m = self.plain(path, class);
        m.attrs.insert("num_embeddings".into(), int(rows));
        m.forward = Some(vec![("input".into(), ArgKind::Arg)]);
        let mut m = self.with_params(m, ModuleKind::Embedding, &[("weight", true)]);
        let width = m.params.get("weight").and_then(|p| p.dims.last().copied());
        m.attrs
            .insert("embedding_dim".into(), int(width.unwrap_or(0)));
        m
    }

    /// A linear module below `at`.
    pub(crate) fn linear(&self, at: &str, (name, out, input, bias): &Linear) -> Module {
        let path = match at {
            "" => (*name).to_string(),
            _ => format!("{at}.{name}"),
        };
        let mut m = self.plain(&path, "Linear");
        m.attrs.insert("in_features".into(), int(*input));
        m.attrs.insert("out_features".into(), int(*out));
        m.forward = Some(vec![("input".into(), ArgKind::Arg)]);
        self.with_params(m, ModuleKind::Linear, &[("weight", true), ("bias", *bias)])
    }

    pub(crate) fn norm(&self, path: &str) -> Module {
        let mut m = self.other(path, "RMSNorm", &["hidden_states"]);
        m.attrs
            .insert(self.eps_name.into(), Scalar::Float(self.c.rms_norm_eps));
        self.with_params(m, ModuleKind::RmsNorm, &[("weight", true)])
    }

    fn attention_itself(&self, path: &str, index: usize) -> Module {
        let c = self.c;
        let mut m = self.other(path, "Attention", &["hidden_states", "position_embeddings"]);
        m.attrs.insert("layer_idx".into(), int(index));
        m.attrs.insert("head_dim".into(), int(c.head_dim));
        m.attrs
            .insert("num_key_value_groups".into(), int(c.heads / c.kv_heads));
        let scale = c.attention_scale;
        let scale = scale.unwrap_or_else(|| (c.head_dim as f64).powf(-0.5));
        m.attrs.insert("scaling".into(), Scalar::Float(scale));
        m.attrs.insert("is_causal".into(), Scalar::Flag(true));
        // Published modules say it where layers differ; else it stands in the config only.
        let differ = c.windows.iter().any(Option::is_none);
        let window = c.windows.get(index).copied().flatten();
        if let Some(window) = window.filter(|_| differ) {
            m.attrs.insert("sliding_window".into(), int(window));
        }
        m
    }
}

pub(crate) fn int(n: usize) -> Scalar {
    Scalar::Int(n as i64)
}
