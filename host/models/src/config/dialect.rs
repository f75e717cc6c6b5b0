//! What tells one decoder family from another, as data.

use super::{DecoderConfig, Facts};
use crate::ModelError;

/// Where a yes-or-no fact of a family comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Always.
    Yes,
    /// Never.
    No,
    /// This flag of `config.json`, false when absent; in a GGUF, whether the tensors are there.
    Field(&'static str),
}

/// Where the norms of a layer stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the FFN.
    Before,
    /// After them, before the sum with the stream.
    After,
    /// On both sides.
    Around,
}

/// How q and k are normed before rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Not.
    None,
    /// Each head for itself.
    Head,
    /// All heads of a side together.
    Whole,
}

/// Which layers see a window only, when `layer_types` does not say it layer by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// None.
    Never,
    /// All, when `sliding_window` is a number; `absent` is what an absent field means.
    Always {
        /// Published default.
        absent: Option<usize>,
    },
    /// Those from `max_window_layers` upwards, when `use_sliding_window` is true.
    Flagged,
    /// All but every n-th.
    AllBut {
        /// The n, where no field gives it.
        every: usize,
        /// Published default of the width.
        absent: usize,
    },
}

/// A decoder inside a larger model, which is run without the rest.
#[derive(Clone, Copy, Debug)]
pub struct Within {
    /// The object of `config.json` that describes it.
    pub object: &'static str,
    /// What tensor names start with where it is not the path of the module.
    pub stored: &'static str,
    /// Published defaults of sizes, which the object may leave out.
    pub absent: &'static [(&'static str, u64)],
}

/// A family of decoders with rotary attention and a gated FFN.
#[derive(Clone, Copy, Debug)]
pub struct Dialect {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// `general.architecture` in a GGUF; its keys and nothing else start with it.
    pub gguf_architecture: Option<&'static str>,
    /// Class name prefix of the published modules (`Llama`); never evidence, for people only.
    pub class: &'static str,
    /// What follows the prefix in the class of the module that holds them.
    pub model_class: &'static str,
    /// Path of the module that holds embedding, layers and last norm.
    pub root: &'static str,
    /// Where it is a part of a larger model.
    pub within: Option<Within>,
    /// Bias of the q, k and v projections.
    pub qkv_bias: Rule,
    /// Bias of the output projection.
    pub o_bias: Rule,
    /// Bias of the three FFN projections.
    pub mlp_bias: Rule,
    /// Where the norms of a layer stand.
    pub norms: Norms,
    /// Norm weights are stored around zero and multiplied as `1 + w`. A GGUF holds the sum.
    pub norm_offset: bool,
    /// Name of the epsilon among the attributes of the published norms; never evidence.
    pub eps_name: &'static str,
    /// How q and k are normed.
    pub qk_norm: QkNorm,
    /// q, k, v are rows of `qkv_proj`, gate and up rows of `gate_up_proj`.
    pub fused: bool,
    /// Whether a GGUF stores q and k rows permuted for rotation of adjacent pairs.
    pub gguf_permuted_qk: bool,
    /// The field that names the activation, and what it is without one.
    pub act: (&'static str, &'static str),
    /// Epsilon when the config has none.
    pub eps: f64,
    /// Rotary base when the config has none.
    pub theta: f64,
    /// Rotary base of the layers with a window, where the family has two.
    pub local_theta: Option<f64>,
    /// Where only a part of the channels may turn, which part when the config does not say.
    pub partial_rotary: Option<f64>,
    /// Which layers see a window.
    pub windows: Windows,
    /// Fields that change the numbers, refused in other families, and read by `facts` here.
    pub reads: &'static [&'static str],
    /// Reads what is the family's own.
    pub facts: fn(&Facts<'_>, &mut DecoderConfig) -> Result<(), ModelError>,
}

impl Dialect {
    /// What most families are: norms before, no biases, silu, no windows.
    pub const fn plain(model_type: &'static str, class: &'static str) -> Self {
        Dialect {
            model_type,
            gguf_architecture: None,
            class,
            model_class: "Model",
            root: "model",
            within: None,
            qkv_bias: Rule::No,
            o_bias: Rule::No,
            mlp_bias: Rule::No,
            norms: Norms::Before,
            norm_offset: false,
            eps_name: "variance_epsilon",
            qk_norm: QkNorm::None,
            fused: false,
            gguf_permuted_qk: false,
            act: ("hidden_act", "silu"),
            eps: 1e-6,
            theta: 10000.0,
            local_theta: None,
            partial_rotary: None,
            windows: Windows::Never,
            reads: &[],
            facts: |_, _| Ok(()),
        }
    }
}
