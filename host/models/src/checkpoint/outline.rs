//! A module tree from headers alone, for a model that no builder knows.
//!
//! A module is what the tensors' names say, its kind what their shapes and names say; epsilon, activation and numbers of
//! heads come from the configuration under the names in use. What none of them says is left out, so that whoever walks
//! the tree assumes it in words or refuses. Parameters that hold several modules' rows (gate and up, q and k and v) are
//! taken apart, their modules marked as rows of the stored one. Names of a GGUF become the published ones.

use indexmap::IndexMap;
use serde_json::{Map, Value as Json};
use structures_graph::tree::{parent_path, ArgKind, ParamInfo, RowsOf, Scalar};
use structures_graph::{activation_word, Module, ModuleKind, ModuleTree};

use super::{Checkpoint, GgufMetadata, GgufValue, Metadata};

/// Published paths below a layer of what a GGUF calls so.
const LAYER: &[(&str, &str)] = &[
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ln1", "layer_norm1"),
    ("ln2", "layer_norm2"),
    ("attn_out", "self_attn.out_proj"),
];
/// Stacks of layers in a GGUF, by what stands before them.
const STACKS: &[(&str, &str)] = &[
    ("blk.", "model.layers"),
    ("enc.blk.", "encoder.layers"),
    ("dec.blk.", "decoder.layers"),
    ("v.blk.", "vision.layers"),
    ("a.blk.", "audio.layers"),
];
const TOP: &[(&str, &str)] = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];
/// Modules whose rows are gate, then up.
const GATE_UP: [&str; 2] = ["gate_up_proj", "gate_up"];
/// Modules whose rows are q, k and v: one after another; so in every model known under that name; or, depending on who
/// saved them, head by head.
const QKV: [&str; 1] = ["qkv_proj"];
const QKV_BY_NAME: [&str; 4] = ["qkv", "Wqkv", "wqkv_fused", "c_attn"];
const QKV_DOUBTFUL: [&str; 3] = ["query_key_value", "in_proj", "wqkv"];
/// What stands beside a projection into a state-space mixer: its parameters, and its modules.
const STATE_SPACE: [&str; 3] = ["A_log", "D", "dt_bias"];
const STATE_SPACE_MODULES: [&str; 3] = ["conv1d", "dt_proj", "x_proj"];
/// The key of a GGUF whose norms divide by the mean of squares.
const SQUARE: &str = "attention.layer_norm_rms_epsilon";
/// What a module of another framework calls a parameter that holds them.
const QKV_PARAMS: [(&str, &str); 2] = [("in_proj_weight", "weight"), ("in_proj_bias", "bias")];

impl Checkpoint {
    /// What the model is called in its configuration, where it says so.
    pub fn kind(&self) -> Option<&str> {
        match &self.metadata {
            Metadata::Config(map) => {
                let named = |field: &str| map.get(field).and_then(Json::as_str);
                named("model_type").or_else(|| named("_class_name"))
            }
            Metadata::Gguf(meta) => meta.text("general.architecture"),
        }
    }

    /// The modules that the headers show, whatever the family.
    pub fn outline(&self) -> ModuleTree {
        let mut modules: IndexMap<String, Module> = IndexMap::new();
        for tensor in self.tensor_infos() {
            let (path, param) = self.place(&tensor.name);
            let module = modules.entry(path.clone()).or_insert_with(|| other(&path));
            let info = ParamInfo {
                dims: tensor.dims,
                dtype: tensor.dtype.into(),
            };
            module.params.insert(param, info);
        }
        let said = Said::new(&self.metadata);
        for module in modules.values_mut() {
            shape(module, &said);
        }
        let mut assumed = IndexMap::new();
        for module in modules.values() {
            let text = match module.kind {
                Some(ModuleKind::LayerNorm) => {
                    "is taken to norm rows, by its name: a norm of groups has the same header"
                }
                Some(ModuleKind::RmsNorm) if !said.norms_by_square(&module.path) => {
                    "is taken as an RMS norm: a layer norm without a summand has the same header"
                }
                _ => continue,
            };
            assumed.insert(module.path.clone(), format!("`{}` {text}", module.path));
        }
        let slices = take_apart(&mut modules, &said, &mut assumed);
        name_activations(&mut modules, &said);
        name_conditions(&mut modules, &mut assumed);
        name_patches(&mut modules, &said, &mut assumed);
        let mut modules: Vec<Module> = modules.into_values().collect();
        modules.sort_by_cached_key(|m| order(&m.path));
        let mut tree = ModuleTree::new(self.kind().unwrap_or_default(), modules);
        tree.slices = slices;
        tree.headers_only = true;
        tree.assumed = assumed;
        tree
    }

    /// The module and the parameter that a tensor is.
    pub(super) fn place(&self, tensor: &str) -> (String, String) {
        match &self.metadata {
            Metadata::Config(_) => of_other_framework(split(tensor)),
            Metadata::Gguf(_) => self.published(tensor),
        }
    }

    /// Published path and parameter of a tensor of a GGUF; what has no other name keeps its own.
    fn published(&self, tensor: &str) -> (String, String) {
        let (path, param) = split(tensor);
        if let Some((_, long)) = TOP.iter().find(|(short, _)| *short == path) {
            return ((*long).into(), param);
        }
        let in_layer = STACKS.iter().find_map(|(stack, long)| {
            let (i, short) = path.strip_prefix(stack)?.split_once('.')?;
            let number = i.bytes().all(|b| b.is_ascii_digit());
            number.then_some((*stack, *long, i, short))
        });
        let Some((stack, layers, i, short)) = in_layer else {
            return (path, param);
        };
        let dims = |name: &str| {
            let entry = self.tensors.get(&format!("{stack}{i}.{name}.weight"));
            entry.map(|e| e.dims.as_slice())
        };
        let long = match short {
            "ffn_norm" if dims("post_attention_norm").is_some() => "pre_feedforward_layernorm",
            "ffn_norm" => "post_attention_layernorm",
            "ffn_up" | "ffn_down" if dims("ffn_gate").is_none() => {
                let both = match (dims("ffn_up"), dims("ffn_down")) {
                    (Some([rows, _]), Some([_, inner])) => *rows == inner.saturating_mul(2),
                    _ => false,
                };
                match (short, both) {
                    ("ffn_up", true) => "mlp.gate_up_proj",
                    ("ffn_up", false) => "mlp.fc1",
                    (_, true) => "mlp.down_proj",
                    (_, false) => "mlp.fc2",
                }
            }
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            other => LAYER
                .iter()
                .find(|(name, _)| *name == other)
                .map_or(other, |(_, long)| long),
        };
        (format!("{layers}.{i}.{long}"), param)
    }
}

/// `attn.in_proj_weight` is the weight of what other frameworks have as a module.
fn of_other_framework((path, param): (String, String)) -> (String, String) {
    match QKV_PARAMS.iter().find(|(name, _)| *name == param) {
        Some((_, own)) if path.is_empty() => ("in_proj".into(), (*own).into()),
        Some((_, own)) => (format!("{path}.in_proj"), (*own).into()),
        None => (path, param),
    }
}

fn split(tensor: &str) -> (String, String) {
    let path = parent_path(tensor);
    let param = tensor.get(path.len()..).unwrap_or(tensor);
    (path.into(), param.trim_start_matches('.').into())
}

/// Numbers in a path count as numbers.
fn order(path: &str) -> Vec<(u64, String)> {
    path.split('.')
        .map(|part| match part.parse() {
            Ok(n) => (n, String::new()),
            Err(_) => (u64::MAX, part.to_string()),
        })
        .collect()
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Kind and attributes of a module by its parameters.
fn shape(module: &mut Module, said: &Said<'_>) {
    let Some(weight) = module.params.get("weight").cloned() else {
        return;
    };
    let name = last(&module.path).to_ascii_lowercase();
    let norm = name.contains("norm") || name.starts_with("ln");
    let bias = module.params.contains_key("bias");
    let turned = columns(module).is_some();
    let mut attr = |key: &str, value: Scalar| drop(module.attrs.insert(key.into(), value));
    let kind = match weight.dims.as_slice() {
        _ if !values(&weight.dtype) => ModuleKind::Other,
        _ if turned => ModuleKind::Other,
        [rows, width] => {
            let table = name.contains("embed") || matches!(name.as_str(), "wte" | "wpe" | "shared");
            let (inner, outer, kind) = match table {
                true => ("embedding_dim", "num_embeddings", ModuleKind::Embedding),
                false => ("in_features", "out_features", ModuleKind::Linear),
            };
            attr(inner, int(*width));
            attr(outer, int(*rows));
            kind
        }
        [_] if module.params.contains_key("running_mean") => ModuleKind::Other,
        [n] if norm => {
            let rows = bias || said.norms_by_mean();
            let kind = match rows {
                true => ModuleKind::LayerNorm,
                false => ModuleKind::RmsNorm,
            };
            if rows {
                attr("normalized_shape", Scalar::List(vec![int(*n)]));
            }
            if let Some(eps) = said.epsilon(&module.path) {
                module.attrs.insert("eps".into(), Scalar::Float(eps));
            }
            kind
        }
        [out, inside, kernel @ ..] if kernel.len() == 3 => {
            attr("in_channels", int(*inside));
            attr("out_channels", int(*out));
            let kernel = kernel.iter().map(|n| int(*n)).collect();
            attr("kernel_size", Scalar::List(kernel));
            ModuleKind::Conv3d
        }
        _ => ModuleKind::Other,
    };
    if kind == ModuleKind::Linear && !bias {
        module.absent_params.push("bias".into());
    }
    // A factor and a summand under another name may be a norm too.
    let vectors = weight.dims.len() == 1 && module.params.len() == 2;
    let unsaid = kind == ModuleKind::Other && vectors && bias && values(&weight.dtype);
    module.kind = (!unsaid).then_some(kind);
}

/// Whether the stored elements are the weight's own, not codes packed into words.
pub(super) fn values(dtype: &str) -> bool {
    !matches!(
        dtype,
        "bool" | "u8" | "i8" | "u16" | "i16" | "u32" | "i32" | "u64" | "i64" | "c64"
    )
}

fn int(n: usize) -> Scalar {
    Scalar::Int(i64::try_from(n).unwrap_or(i64::MAX))
}

/// Outputs of a weight that is stored in by out: its bias is as long as a row.
fn columns(module: &Module) -> Option<usize> {
    let dims = |name: &str| module.params.get(name).map(|p| p.dims.as_slice());
    match (dims("weight"), dims("bias")) {
        (Some([rows, columns]), Some([bias])) if bias == columns && bias != rows => Some(*columns),
        _ => None,
    }
}

/// Whether a module mixes by a state space: what it projects is no q, k and v.
fn state_space(modules: &IndexMap<String, Module>, base: &str) -> bool {
    let own = modules
        .get(base)
        .is_some_and(|m| STATE_SPACE.iter().any(|p| m.params.contains_key(*p)));
    let child = |name: &str| modules.contains_key(format!("{base}.{name}").as_str());
    own || STATE_SPACE_MODULES.iter().any(|name| child(name))
}

/// Adds the modules whose rows stand in another one's parameter.
fn take_apart(
    modules: &mut IndexMap<String, Module>,
    said: &Said<'_>,
    assumed: &mut IndexMap<String, String>,
) -> IndexMap<String, RowsOf> {
    let mut slices = IndexMap::new();
    let mut more: Vec<Module> = Vec::new();
    let fused = modules
        .values()
        .filter(|m| m.kind == Some(ModuleKind::Linear) || columns(m).is_some());
    for whole in fused {
        let Some([rows, width]) = whole.params.get("weight").map(|p| p.dims.as_slice()) else {
            continue;
        };
        let (rows, width, turned) = match columns(whole) {
            Some(columns) => (columns, *rows, true),
            None => (*rows, *width, false),
        };
        let name = last(&whole.path);
        if name == "in_proj" && state_space(modules, parent_path(&whole.path)) {
            continue;
        }
        let of_name = |names: &[&str]| names.contains(&name);
        let (parts, doubt): (Vec<(&str, usize)>, Option<String>) = match name {
            _ if of_name(&GATE_UP) && rows % 2 == 0 => {
                (vec![("gate_proj", rows / 2), ("up_proj", rows / 2)], None)
            }
            _ if of_name(&QKV) || of_name(&QKV_BY_NAME) || of_name(&QKV_DOUBTFUL) => {
                let names = ["q_proj", "k_proj", "v_proj"];
                let heads = said.head_rows(&whole.path, width);
                let fits = heads.filter(|(q, kv)| q.checked_add(2 * kv) == Some(rows));
                // Three of one width are no question of heads.
                let fits = fits.or_else(|| {
                    let thirds = of_name(&QKV_BY_NAME) && width.checked_mul(3) == Some(rows);
                    thirds.then_some((width, width))
                });
                let doubt = match fits {
                    Some(_) if !of_name(&QKV_DOUBTFUL) => None,
                    Some(_) => Some(format!(
                        "whether the rows of `{}` stand head by head is not said",
                        whole.path
                    )),
                    None => Some(format!(
                        "which of the {rows} rows of `{}` are q, k and v is not said",
                        whole.path
                    )),
                };
                let (q, kv) = fits.unwrap_or((rows / 3, rows / 3));
                (names.into_iter().zip([q, kv, kv]).collect(), doubt)
            }
            _ => continue,
        };
        let doubt = match turned {
            true => Some(format!(
                "`{}` is stored in by out, its parts are columns and no rows",
                whole.path
            )),
            false => doubt,
        };
        let base = parent_path(&whole.path);
        let mut from = 0;
        for (part_name, rows) in parts {
            let path = match base {
                "" => part_name.to_string(),
                _ => format!("{base}.{part_name}"),
            };
            let to = from + rows;
            let at = std::mem::replace(&mut from, to);
            if rows == 0 || modules.contains_key(&path) {
                continue;
            }
            let mut part = whole.clone();
            part.path.clone_from(&path);
            part.kind = Some(ModuleKind::Linear);
            for info in part.params.values_mut() {
                if let Some(first) = info.dims.first_mut() {
                    *first = rows;
                }
                if let (true, Some(second)) = (turned, info.dims.get_mut(1)) {
                    *second = width;
                }
            }
            part.attrs.insert("out_features".into(), int(rows));
            if doubt.is_none() && of_name(&QKV_BY_NAME) {
                let text = format!(
                    "the rows of `{}` are taken as q, then k, then v, by its name",
                    whole.path
                );
                assumed.insert(path.clone(), text);
            }
            let place = RowsOf {
                path: whole.path.clone(),
                rows: (at, to),
                doubt: doubt.clone(),
            };
            slices.insert(path, place);
            more.push(part);
        }
    }
    modules.extend(more.into_iter().map(|m| (m.path.clone(), m)));
    slices
}

/// A norm with a projection inside takes what the projection reads.
fn name_conditions(modules: &mut IndexMap<String, Module>, assumed: &mut IndexMap<String, String>) {
    let mut found: Vec<String> = Vec::new();
    for m in modules.values() {
        let above = parent_path(&m.path);
        let norm = last(above).to_ascii_lowercase().contains("norm");
        if norm && m.kind == Some(ModuleKind::Linear) && found.last().is_none_or(|f| f != above) {
            found.push(above.into());
        }
    }
    for path in found {
        let text = format!(
            "`{path}` is taken to be called with a conditioning: it is named a norm and has a projection inside"
        );
        let module = modules.entry(path.clone()).or_insert_with(|| other(&path));
        let taken = |name: &str| (name.to_string(), ArgKind::Arg);
        module.forward = Some(vec![taken("x"), taken("cond")]);
        assumed.insert(path, text);
    }
}

/// A volume's filter of exactly the size that the configuration gives a patch steps from patch to patch.
fn name_patches(
    modules: &mut IndexMap<String, Module>,
    said: &Said<'_>,
    assumed: &mut IndexMap<String, String>,
) {
    let filters: Vec<(String, [usize; 5])> = modules
        .values()
        .filter(|m| m.kind == Some(ModuleKind::Conv3d))
        .filter_map(|m| {
            let dims = m.params.get("weight")?.dims.as_slice().try_into().ok()?;
            Some((m.path.clone(), dims))
        })
        .collect();
    for (path, [out, inside, frames, height, width]) in filters {
        let said = |names: &[&str]| said.size(&path, names, "");
        let (Some(t), Some(p)) = (
            said(&["temporal_patch_size", "tubelet_size"]),
            said(&["patch_size", "spatial_patch_size"]),
        ) else {
            continue;
        };
        let above = parent_path(&path).to_string();
        let module = modules
            .entry(above.clone())
            .or_insert_with(|| other(&above));
        let channels = said(&["in_channels", "in_chans", "num_channels"]).unwrap_or(inside);
        for (name, n) in [
            ("temporal_patch_size", t),
            ("patch_size", p),
            ("in_channels", channels),
            ("embed_dim", out),
        ] {
            module.attrs.insert(name.into(), int(n));
        }
        let Some(filter) = modules
            .get_mut(&path)
            .filter(|_| [t, p, p] == [frames, height, width])
        else {
            continue;
        };
        let list = |n: [usize; 3]| Scalar::List(n.into_iter().map(int).collect());
        for (name, value) in [
            ("stride", list([t, p, p])),
            ("padding", list([0; 3])),
            ("dilation", list([1; 3])),
            ("groups", int(1)),
        ] {
            filter.attrs.insert(name.into(), value);
        }
        let text = format!(
            "`{path}` is taken to step from patch to patch without padding: its filters are of a patch's size"
        );
        assumed.insert(path, text);
    }
}

fn other(path: &str) -> Module {
    Module {
        path: path.into(),
        kind: Some(ModuleKind::Other),
        ..Module::default()
    }
}

/// What holds several projections may have an activation between them; a layer may scale its residual.
fn name_activations(modules: &mut IndexMap<String, Module>, said: &Said<'_>) {
    let mut linears: IndexMap<String, usize> = IndexMap::new();
    let mut layers: Vec<String> = Vec::new();
    for m in modules.values() {
        let above = parent_path(&m.path);
        if m.kind == Some(ModuleKind::Linear) {
            *linears.entry(above.into()).or_insert(0) += 1;
        }
        let numbered = last(above).bytes().all(|b| b.is_ascii_digit()) && !above.is_empty();
        if numbered && !layers.iter().rev().any(|l| l == above) {
            layers.push(above.into());
        }
    }
    let mut set = |path: &str, key: &str, value: Scalar| {
        let module = modules.entry(path.into()).or_insert_with(|| other(path));
        module.attrs.insert(key.into(), value);
    };
    for path in linears.iter().filter(|(_, n)| **n > 1).map(|(p, _)| p) {
        if let Some(word) = said.activation(path) {
            set(path, "act_fn", Scalar::Word(word));
        }
    }
    for path in layers {
        if let Some(by) = said.number(&path, &["residual_multiplier"], "residual_scale") {
            if by != 1.0 {
                set(&path, "residual_multiplier", Scalar::Float(by));
            }
        }
    }
}

/// What the configuration says, by the names in use.
struct Said<'a> {
    metadata: &'a Metadata,
}

impl<'a> Said<'a> {
    fn new(metadata: &'a Metadata) -> Self {
        Said { metadata }
    }

    /// The sections that may speak of a module: its own part's, then the whole model's.
    fn sections(&self, map: &'a Map<String, Json>, path: &str) -> Vec<&'a Map<String, Json>> {
        let path = path.to_ascii_lowercase();
        let own: &[&str] = match path.as_str() {
            p if p.contains("vis") || p.contains("image") => &["vision_config"],
            p if p.contains("audio") || p.contains("speech") => &["audio_config"],
            _ => &["text_config", "llm_config", "language_config"],
        };
        let own = own.iter().filter_map(|name| map.get(*name)?.as_object());
        own.chain([map]).collect()
    }

    fn config(&self, path: &str, names: &[&str]) -> Option<&'a Json> {
        let Metadata::Config(map) = self.metadata else {
            return None;
        };
        let sections = self.sections(map, path);
        sections.iter().find_map(|s| {
            names
                .iter()
                .find_map(|n| s.get(*n).filter(|v| !v.is_null()))
        })
    }

    /// A number under one of its names in a configuration, or its key in a GGUF.
    fn number(&self, path: &str, names: &[&str], key: &str) -> Option<f64> {
        match self.metadata {
            Metadata::Config(_) => self.config(path, names)?.as_f64(),
            Metadata::Gguf(meta) => gguf_number(meta, key),
        }
    }

    fn size(&self, path: &str, names: &[&str], key: &str) -> Option<usize> {
        let n = self.number(path, names, key)?;
        (n.fract() == 0.0 && (1.0..1e9).contains(&n)).then_some(n as usize)
    }

    fn epsilon(&self, path: &str) -> Option<f64> {
        let names = [
            "rms_norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "layernorm_epsilon",
            "norm_eps",
            "norm_epsilon",
            "eps",
        ];
        let keys = [SQUARE, "attention.layer_norm_epsilon"];
        keys.iter().find_map(|key| self.number(path, &names, key))
    }

    /// Whether a GGUF says that its norms take the mean away: it has an epsilon for each kind of norm.
    fn norms_by_mean(&self) -> bool {
        let Metadata::Gguf(meta) = self.metadata else {
            return false;
        };
        let mean = gguf_number(meta, "attention.layer_norm_epsilon");
        mean.is_some() && gguf_number(meta, SQUARE).is_none()
    }

    /// Whether it says that norms divide by the mean of squares.
    fn norms_by_square(&self, path: &str) -> bool {
        self.number(path, &["rms_norm_eps", "rms_norm_epsilon"], SQUARE)
            .is_some()
    }

    fn activation(&self, path: &str) -> Option<String> {
        let names = [
            "hidden_activation",
            "hidden_act",
            "activation_function",
            "activation",
            "activation_fn",
            "act_fn",
        ];
        let word = self.config(path, &names)?.as_str()?;
        Some(activation_word(word).unwrap_or(word).to_string())
    }

    /// Rows of q, and of k and v each.
    fn head_rows(&self, path: &str, width: usize) -> Option<(usize, usize)> {
        let heads = [
            "num_attention_heads",
            "n_head",
            "num_heads",
            "n_heads",
            "encoder_attention_heads",
        ];
        let few = [
            "num_key_value_heads",
            "n_head_kv",
            "num_kv_heads",
            "num_query_groups",
        ];
        let heads = self.size(path, &heads, "attention.head_count")?;
        let few = self
            .size(path, &few, "attention.head_count_kv")
            .unwrap_or(heads);
        let each = match self.size(path, &["head_dim"], "attention.key_length") {
            Some(n) => n,
            None if width.is_multiple_of(heads) => width / heads,
            None => return None,
        };
        Some((heads.checked_mul(each)?, few.checked_mul(each)?))
    }
}

/// A number under the architecture's key; some write one for each layer, all equal.
fn gguf_number(meta: &GgufMetadata, key: &str) -> Option<f64> {
    let architecture = meta.text("general.architecture")?;
    match meta.get(&format!("{architecture}.{key}"))? {
        GgufValue::List(list) => match list.as_slice() {
            [first, rest @ ..] if rest.iter().all(|v| v == first) => first.as_f64(),
            _ => None,
        },
        one => one.as_f64(),
    }
}
