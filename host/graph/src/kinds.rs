//! What a module of another framework is, from facts: its framework base classes, the shapes of its parameters, its
//! scalars. A model's own class names are never evidence; the framework's (`Linear`, `LayerNorm`, `GELU` ...) are.

use indexmap::IndexMap;

use crate::tree::{ArgKind, ModuleKind, ParamInfo, Scalar};

/// What can be known about a module without running it.
pub(crate) struct Facts<'a> {
    pub(crate) class: &'a str,
    pub(crate) bases: &'a [String],
    pub(crate) params: &'a IndexMap<String, ParamInfo>,
    pub(crate) buffers: usize,
    pub(crate) attrs: &'a IndexMap<String, Scalar>,
    pub(crate) forward: Option<&'a [(String, ArgKind)]>,
    pub(crate) leaf: bool,
}

impl Facts<'_> {
    pub(crate) fn kind(&self) -> ModuleKind {
        let rank = |name: &str| self.params.get(name).map(|p| p.dims.len());
        if self.is("Linear") && rank("weight") == Some(2) {
            return ModuleKind::Linear;
        }
        if self.is("LayerNorm") {
            return ModuleKind::LayerNorm;
        }
        if self.is("RMSNorm") {
            return ModuleKind::RmsNorm;
        }
        if self.is("Conv3d") && rank("weight") == Some(5) {
            return ModuleKind::Conv3d;
        }
        if self.is("Embedding") && rank("weight") == Some(2) {
            return ModuleKind::Embedding;
        }
        if self.leaf && self.params.is_empty() && self.activation().is_some() {
            return ModuleKind::Activation;
        }
        self.norm_by_its_parameters().unwrap_or(ModuleKind::Other)
    }

    fn is(&self, base: &str) -> bool {
        bare(self.class) == base || self.bases.iter().any(|b| b == base)
    }

    /// A leaf that maps one tensor, has an epsilon, and a vector to scale by (and one to add): a norm somebody wrote
    /// again. Group and batch norms are told by their groups, features and buffers.
    fn norm_by_its_parameters(&self) -> Option<ModuleKind> {
        let unary = self.forward.is_none_or(|f| {
            let tensors = f
                .iter()
                .filter(|(_, k)| *k == ArgKind::Arg || *k == ArgKind::Pos);
            f.len() == 1 && tensors.count() == 1
        });
        let other = ["num_groups", "num_features", "num_channels"];
        if !self.leaf
            || !unary
            || self.buffers > 0
            || epsilon(self.attrs).is_none()
            || other.iter().any(|a| self.attrs.contains_key(*a))
        {
            return None;
        }
        let weight = self.params.get("weight").filter(|w| w.dims.len() == 1)?;
        match (self.params.len(), self.params.get("bias")) {
            (1, None) => Some(ModuleKind::RmsNorm),
            (2, Some(bias)) if bias.dims == weight.dims => Some(ModuleKind::LayerNorm),
            _ => None,
        }
    }

    /// The activation this class applies, in the operations' vocabulary where it is one of those.
    pub(crate) fn activation(&self) -> Option<String> {
        let class = bare(self.class);
        let one = |name: &str| self.attrs.get(name).is_none_or(|v| number(v) == Some(1.0));
        match class {
            "GELU" => match self.attrs.get("approximate") {
                Some(Scalar::Word(w)) if w == "tanh" => Some("gelu_tanh".into()),
                Some(Scalar::Word(w)) if w == "none" => Some("gelu_exact".into()),
                _ => Some(class.into()),
            },
            "Softplus" if !one("beta") => Some(class.into()),
            _ if OWN_ACTIVATIONS.contains(&class) => Some(class.into()),
            _ => word(class).map(Into::into),
        }
    }
}

/// The norm's epsilon under either of the names frameworks use.
pub(crate) fn epsilon(attrs: &IndexMap<String, Scalar>) -> Option<f64> {
    ["eps", "variance_epsilon"]
        .iter()
        .find_map(|k| attrs.get(*k).and_then(number))
}

fn number(v: &Scalar) -> Option<f64> {
    match v {
        Scalar::Int(n) => Some(*n as f64),
        Scalar::Float(x) => Some(*x),
        _ => None,
    }
}

/// `activations.GELU` -> `GELU`.
fn bare(class: &str) -> &str {
    class.rsplit('.').next().unwrap_or(class)
}

/// Activation classes outside the vocabulary, so that they are known to be activations.
const OWN_ACTIVATIONS: &[&str] = &[
    "ELU",
    "Hardswish",
    "Hardsigmoid",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "MishActivation",
    "PReLU",
    "ReLU6",
    "SELU",
    "ReLUSquaredActivation",
    "LaplaceActivation",
    "ClippedGELUActivation",
];

/// Activation names of configurations, functions and classes, letters and digits only, in lower case, without a final
/// `activation`. Names of gated units (`geglu`, `swiglu`) are units, not activations, and stay themselves.
const WORDS: &[(&str, &str)] = &[
    ("silu", "silu"),
    ("swish", "silu"),
    ("gelutanh", "gelu_tanh"),
    ("gelunew", "gelu_tanh"),
    ("newgelu", "gelu_tanh"),
    ("gelufast", "gelu_tanh"),
    ("fastgelu", "gelu_tanh"),
    ("geluaccurate", "gelu_tanh"),
    ("accurategelu", "gelu_tanh"),
    ("gelupytorchtanh", "gelu_tanh"),
    ("pytorchgelutanh", "gelu_tanh"),
    ("gelupythontanh", "gelu_tanh"),
    ("geluapproximate", "gelu_tanh"),
    ("gelu", "gelu_exact"),
    ("geluexact", "gelu_exact"),
    ("gelupython", "gelu_exact"),
    ("geluerf", "gelu_exact"),
    ("quickgelu", "gelu_sigmoid"),
    ("geluquick", "gelu_sigmoid"),
    ("gelusigmoid", "gelu_sigmoid"),
    ("approximategelu", "gelu_sigmoid"),
    ("sigmoid", "sigmoid"),
    ("relu", "relu"),
    ("tanh", "tanh"),
    ("softplus", "softplus"),
];

/// The vocabulary's word for an activation's name.
pub fn word(name: &str) -> Option<&'static str> {
    let mut key: String = name
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect();
    if let Some(short) = key.strip_suffix("activation") {
        key.truncate(short.len());
    }
    WORDS.iter().find(|(n, _)| *n == key).map(|(_, w)| *w)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(list: &[(&str, &[usize])]) -> IndexMap<String, ParamInfo> {
        list.iter()
            .map(|(n, d)| {
                let info = ParamInfo {
                    dims: d.to_vec(),
                    dtype: "f32".into(),
                };
                ((*n).to_string(), info)
            })
            .collect()
    }

    fn kind(
        class: &str,
        bases: &[&str],
        p: &[(&str, &[usize])],
        attrs: &[(&str, Scalar)],
        args: usize,
    ) -> ModuleKind {
        let attrs = attrs
            .iter()
            .map(|(k, v)| ((*k).into(), v.clone()))
            .collect();
        let bases: Vec<String> = bases.iter().map(|b| (*b).into()).collect();
        let forward: Vec<_> = (0..args).map(|i| (format!("a{i}"), ArgKind::Arg)).collect();
        Facts {
            class,
            bases: &bases,
            params: &params(p),
            buffers: 0,
            attrs: &attrs,
            forward: Some(&forward),
            leaf: true,
        }
        .kind()
    }

    #[test]
    fn kinds_follow_facts_not_names() {
        use ModuleKind::*;
        let eps = || [("eps", Scalar::Float(1e-6))];
        let m: &[(&str, &[usize])] = &[("weight", &[4, 8])];
        let v: &[(&str, &[usize])] = &[("weight", &[8])];
        let vb: &[(&str, &[usize])] = &[("weight", &[8]), ("bias", &[8])];
        assert_eq!(kind("Linear", &[], m, &[], 1), Linear);
        assert_eq!(kind("Anything", &["Linear"], m, &[], 1), Linear);
        assert_eq!(kind("MyLinear", &[], m, &[], 1), Other);
        assert_eq!(
            kind("Linear", &[], &[("weight", &[4, 8, 1])], &[], 1),
            Other
        );
        assert_eq!(kind("Anything", &[], v, &eps(), 1), RmsNorm);
        assert_eq!(
            kind("SomeRMSNorm", &[], v, &[], 1),
            Other,
            "a name and no epsilon"
        );
        assert_eq!(
            kind("Anything", &[], v, &eps(), 2),
            Other,
            "gated or conditioned"
        );
        assert_eq!(kind("Twin", &[], vb, &eps(), 1), LayerNorm);
        assert_eq!(kind("Anything", &["LayerNorm"], v, &[], 1), LayerNorm);
        let groups = [eps()[0].clone(), ("num_groups", Scalar::Int(4))];
        assert_eq!(kind("GroupNorm", &[], vb, &groups, 1), Other);
        assert_eq!(kind("Mish", &[], &[], &[], 1), Activation);
        assert_eq!(kind("ReLU", &[], &[], &[], 1), Activation);
        assert_eq!(kind("Dropout", &[], &[], &[], 1), Other);
    }

    #[test]
    fn the_three_gelus_stay_apart() {
        for (name, want) in [
            ("gelu", Some("gelu_exact")),
            ("gelu_new", Some("gelu_tanh")),
            ("gelu_pytorch_tanh", Some("gelu_tanh")),
            ("gelu-approximate", Some("gelu_tanh")),
            ("NewGELUActivation", Some("gelu_tanh")),
            ("FastGELUActivation", Some("gelu_tanh")),
            ("GELUTanh", Some("gelu_tanh")),
            ("GELUActivation", Some("gelu_exact")),
            ("quick_gelu", Some("gelu_sigmoid")),
            ("QuickGELUActivation", Some("gelu_sigmoid")),
            ("ApproximateGELU", Some("gelu_sigmoid")),
            ("SiLUActivation", Some("silu")),
            ("swish", Some("silu")),
            ("geglu", None),
            ("mish", None),
        ] {
            assert_eq!(word(name), want, "{name}");
        }
    }
}
