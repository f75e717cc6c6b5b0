//! `config.json`, as several years of the library have written it: sizes that may be absent or null, rotary
//! settings at the top, in `rope_scaling` or in `rope_parameters`, tie flags that contradict the tensors.

use std::path::Path;

use serde_json::{Map, Value};

use super::rope::ROPE_TYPES;
use super::{activation, DecoderConfig, Dialect, Fields, Rope, RopeScaling, Rule};
use crate::checkpoint::Checkpoint;
use crate::ModelError;

const CANNOT: &str = "this version cannot run the model";
const POSITIONS: usize = 2048;
const Q_NORM: &str = "model.layers.0.self_attn.q_norm.weight";
const FIX: &str = "correct the file or get it again";

/// Flags that change the numbers and must be off (absent, null, false, or 1 for multipliers).
const MUST_BE_OFF: &[&str] = &[
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "partial_rotary_factor",
];

pub(super) fn read(
    checkpoint: &Checkpoint,
    map: &Map<String, Value>,
    dialect: &Dialect,
) -> Result<DecoderConfig, ModelError> {
    let path = checkpoint.metadata_path();
    let fields = Fields {
        path: &path,
        prefix: String::new(),
        map,
    };
    let mut notes = Vec::new();
    refuse_foreign_facts(&fields)?;

    let size = |name: &str| fields.size(name);
    let must = |name: &str| fields.required(name, "a whole number of at least 1", size(name)?);
    let hidden_size = must("hidden_size")?;
    let heads = must("num_attention_heads")?;
    let head_dim = match size("head_dim")? {
        Some(d) => d,
        None => match (normed_width(checkpoint, dialect), hidden_size % heads) {
            (Some(width), _) => {
                notes.push(format!(
                    "head_dim is absent: {width}, the width of {Q_NORM}"
                ));
                width
            }
            (None, 0) => hidden_size / heads,
            (None, _) => {
                return Err(ModelError::malformed(
                    &path,
                    "num_attention_heads",
                    format!("a divisor of hidden_size {hidden_size}, or `head_dim`"),
                    heads.to_string(),
                    FIX,
                ))
            }
        },
    };
    let max_positions = size("max_position_embeddings")?.unwrap_or_else(|| {
        notes.push(format!(
            "max_position_embeddings is absent: {POSITIONS} assumed"
        ));
        POSITIONS
    });
    let rms_norm_eps = fields.positive("rms_norm_eps")?.unwrap_or_else(|| {
        notes.push("rms_norm_eps is absent: 1e-6 assumed".into());
        1e-6
    });
    let act = match fields.text("hidden_act")? {
        Some(name) => activation(&path, "hidden_act", name)?,
        None => {
            notes.push("hidden_act is absent: silu assumed".into());
            "silu"
        }
    };
    let rule = |rule: Rule| match rule {
        Rule::Yes => Ok::<_, ModelError>(true),
        Rule::No => Ok(false),
        Rule::Field(name) => Ok(fields.flag(name)?.unwrap_or(false)),
    };
    let tied_head = tied(checkpoint, fields.flag("tie_word_embeddings")?, &mut notes);

    let mut eos = fields.ids("eos_token_id")?;
    let generation = checkpoint.path().join("generation_config.json");
    if generation.is_file() {
        let map = crate::checkpoint::read_json_object(&generation)?;
        let fields = Fields {
            path: &generation,
            prefix: String::new(),
            map: &map,
        };
        eos.extend(fields.ids("eos_token_id")?);
    }
    eos.sort_unstable();
    eos.dedup();

    Ok(DecoderConfig {
        model_type: dialect.model_type.into(),
        vocab_size: must("vocab_size")?,
        hidden_size,
        intermediate_size: must("intermediate_size")?,
        layers: must("num_hidden_layers")?,
        heads,
        kv_heads: size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        rms_norm_eps,
        act,
        qkv_bias: rule(dialect.qkv_bias)?,
        o_bias: rule(dialect.o_bias)?,
        mlp_bias: rule(dialect.mlp_bias)?,
        qk_norm: dialect.qk_norm,
        tied_head,
        rope: rope(&fields, max_positions, &mut notes)?,
        max_positions,
        bos: fields.ids("bos_token_id")?.first().copied(),
        eos,
        notes,
    })
}

/// Where q and k are normed per head, the width of a head is that of the norm: those families default to a fixed
/// `head_dim`, not to a share of the stream.
fn normed_width(checkpoint: &Checkpoint, dialect: &Dialect) -> Option<usize> {
    if !dialect.qk_norm {
        return None;
    }
    match checkpoint.tensor_info(Q_NORM)?.dims[..] {
        [width] if width > 0 => Some(width),
        _ => None,
    }
}

/// A present `lm_head.weight` decides, whatever the flag says; absent ones are tied.
fn tied(checkpoint: &Checkpoint, flag: Option<bool>, notes: &mut Vec<String>) -> bool {
    let present = checkpoint.tensor_info("lm_head.weight").is_some();
    match (present, flag) {
        (true, Some(true)) => notes.push(
            "tie_word_embeddings is true, but there is a lm_head.weight: the tensor is used".into(),
        ),
        (false, Some(false)) => notes.push(
            "tie_word_embeddings is false, but there is no lm_head.weight: the embedding is used"
                .into(),
        ),
        (false, None) => {
            notes.push("tie_word_embeddings and lm_head.weight are absent: tied".into())
        }
        _ => {}
    }
    !present
}

fn refuse_foreign_facts(fields: &Fields<'_>) -> Result<(), ModelError> {
    for name in MUST_BE_OFF {
        let off = match fields.get(name) {
            None | Some(Value::Bool(false)) => true,
            Some(v) => v.as_f64() == Some(1.0),
        };
        if !off {
            let found = fields.get(name).map(Value::to_string).unwrap_or_default();
            let expected = "it absent, null or without effect";
            return Err(ModelError::unsupported(
                fields.path,
                *name,
                expected,
                found,
                CANNOT,
            ));
        }
    }
    refuse_windows(fields)
}

/// Kinds of layers given one by one decide. Without them a window that is on reaches the layers from
/// `max_window_layers` upwards.
fn refuse_windows(fields: &Fields<'_>) -> Result<(), ModelError> {
    let layers = fields.size("num_hidden_layers")?.unwrap_or(0);
    let windows = fields.flag("use_sliding_window")?.unwrap_or(false);
    if let Some(kinds) = fields.get("layer_types") {
        let each = kinds.as_array().map(Vec::as_slice).unwrap_or(&[]);
        if let Some(kind) = each.iter().find(|k| k.as_str() != Some("full_attention")) {
            return Err(ModelError::unsupported(
                fields.path,
                "layer_types",
                "full_attention in every layer",
                kind.to_string().trim_matches('"'),
                CANNOT,
            ));
        }
        if each.len() < layers {
            return Err(ModelError::malformed(
                fields.path,
                "layer_types",
                format!("a list with a kind for each of the {layers} layers"),
                kinds.to_string(),
                FIX,
            ));
        }
    } else if windows {
        let below = fields.get("max_window_layers").and_then(Value::as_u64);
        if below.is_none_or(|n| n < layers as u64) {
            return Err(ModelError::unsupported(
                fields.path,
                "use_sliding_window",
                format!("it absent, null or false, or max_window_layers of at least {layers}"),
                "true",
                CANNOT,
            ));
        }
    }
    Ok(())
}

fn rope(
    fields: &Fields<'_>,
    max_positions: usize,
    notes: &mut Vec<String>,
) -> Result<Rope, ModelError> {
    let mut settings = fields.object("rope_parameters")?;
    if let Some(outer) = &settings {
        // One block for each kind of layer; only full attention gets this far.
        if let Some(inner) = outer.object("full_attention")? {
            settings = Some(inner);
        }
    }
    let older = fields.object("rope_scaling")?.filter(|s| !s.map.is_empty());
    let (Some(newer), Some(older)) = (&settings, &older) else {
        let settings = settings.or(older);
        return rope_of(fields, settings.as_ref(), max_positions, notes);
    };
    // The library reads the older block where there are both, and forgets what only the newer one says, the base
    // too. Whoever added one by hand may have wanted either.
    let rope = rope_of(fields, Some(newer), max_positions, notes)?;
    let other = rope_of(fields, Some(older), max_positions, &mut Vec::new())?;
    if rope != other {
        return Err(ModelError::malformed(
            fields.path,
            "rope_scaling",
            "it absent, or the same as rope_parameters",
            serde_json::to_string(older.map).unwrap_or_default(),
            "keep one of the two blocks",
        ));
    }
    Ok(rope)
}

fn rope_of(
    fields: &Fields<'_>,
    settings: Option<&Fields<'_>>,
    max_positions: usize,
    notes: &mut Vec<String>,
) -> Result<Rope, ModelError> {
    let inner = |name: &str| match &settings {
        Some(s) => s.positive(name),
        None => Ok(None),
    };
    let theta = match inner("rope_theta")? {
        Some(t) => t,
        None => fields.positive("rope_theta")?.unwrap_or_else(|| {
            notes.push("rope_theta is absent: 10000 assumed".into());
            10000.0
        }),
    };
    let Some(settings) = settings else {
        return Ok(Rope {
            theta,
            scaling: RopeScaling::None,
        });
    };
    if let Some(part) = settings
        .positive("partial_rotary_factor")?
        .filter(|p| *p != 1.0)
    {
        let item = format!("{}partial_rotary_factor", settings.prefix);
        let found = part.to_string();
        return Err(ModelError::unsupported(
            fields.path,
            item,
            "1",
            found,
            CANNOT,
        ));
    }
    let kind = match settings.text("rope_type")? {
        Some(kind) => kind,
        None => settings.text("type")?.unwrap_or("default"),
    };
    let must = |name: &str| {
        let value = settings.positive(name)?;
        settings.required(name, "a positive number", value)
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear {
            factor: must("factor")?,
        },
        "llama3" => {
            let original = match settings.positive("original_max_position_embeddings")? {
                Some(n) => Some(n),
                None => fields.positive("original_max_position_embeddings")?,
            };
            let original = original.unwrap_or_else(|| {
                notes.push(format!(
                    "original_max_position_embeddings is absent: {max_positions} assumed"
                ));
                max_positions as f64
            });
            let (low, high) = (must("low_freq_factor")?, must("high_freq_factor")?);
            if low >= high {
                return Err(ModelError::malformed(
                    fields.path,
                    format!("{}low_freq_factor", settings.prefix),
                    format!("a number below high_freq_factor {high}"),
                    low.to_string(),
                    FIX,
                ));
            }
            RopeScaling::Llama3 {
                factor: must("factor")?,
                low,
                high,
                original,
            }
        }
        other => return Err(refused_rope(fields.path, &settings.prefix, other)),
    };
    Ok(Rope { theta, scaling })
}

fn refused_rope(path: &Path, prefix: &str, kind: &str) -> ModelError {
    ModelError::unsupported(path, format!("{prefix}rope_type"), ROPE_TYPES, kind, CANNOT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const QWEN2: Dialect = Dialect {
        model_type: "qwen2",
        gguf_architecture: None,
        class: "Qwen2",
        qkv_bias: Rule::Yes,
        o_bias: Rule::No,
        mlp_bias: Rule::No,
        qk_norm: false,
        gguf_permuted_qk: false,
    };

    /// Reads a small config of 2 layers with these fields set (null: taken out) beside a checkpoint whose query
    /// norm is 16 wide.
    fn config(changes: Value, dialect: &Dialect) -> Result<DecoderConfig, ModelError> {
        let mut config = json!({
            "model_type": dialect.model_type, "vocab_size": 32, "hidden_size": 24,
            "intermediate_size": 40, "num_attention_heads": 3, "num_hidden_layers": 2,
            "rope_theta": 5000.0,
        });
        let map = config.as_object_mut().unwrap();
        map.extend(changes.as_object().unwrap().clone());
        map.retain(|_, v| !v.is_null());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let norm =
            candle_core::Tensor::ones(16, candle_core::DType::F32, &candle_core::Device::Cpu);
        let tensors = std::collections::HashMap::from([(Q_NORM.to_string(), norm.unwrap())]);
        candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
        DecoderConfig::read(&Checkpoint::open(dir.path()).unwrap(), dialect)
    }

    #[test]
    fn a_window_that_reaches_no_layer_is_none() {
        let full = json!(["full_attention", "full_attention"]);
        for fine in [
            json!({"use_sliding_window": false, "sliding_window": 8, "max_window_layers": 0}),
            json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2}),
            json!({"use_sliding_window": true, "sliding_window": 8, "layer_types": full}),
        ] {
            assert!(config(fine.clone(), &QWEN2).is_ok(), "{fine}");
        }
        for (windowed, item) in [
            (json!({"use_sliding_window": true}), "use_sliding_window"),
            (
                json!({"use_sliding_window": true, "max_window_layers": 1}),
                "use_sliding_window",
            ),
            (
                json!({"layer_types": ["full_attention", "sliding_attention"]}),
                "layer_types",
            ),
            (json!({"layer_types": ["full_attention"]}), "layer_types"),
            (json!({"layer_types": "full_attention"}), "layer_types"),
        ] {
            let message = config(windowed.clone(), &QWEN2).unwrap_err().to_string();
            assert!(message.contains(item), "{windowed}: {message}");
        }
    }

    #[test]
    fn an_absent_head_width_is_that_of_the_head_norms() {
        let normed = Dialect {
            qk_norm: true,
            ..QWEN2
        };
        let c = config(json!({}), &normed).unwrap();
        assert_eq!(c.head_dim, 16);
        assert!(c.notes.iter().any(|n| n.contains("head_dim")));
        assert_eq!(config(json!({"head_dim": 4}), &normed).unwrap().head_dim, 4);
        assert_eq!(config(json!({}), &QWEN2).unwrap().head_dim, 8);
        let narrow = config(json!({"hidden_size": 25}), &QWEN2).unwrap_err();
        assert!(narrow.to_string().contains("divisor of hidden_size 25"));
    }

    #[test]
    fn two_rotary_blocks_must_agree() {
        let plain = json!({"rope_type": "default", "rope_theta": 7000.0});
        let both = |older: &Value, theta: Value| {
            let blocks = json!({
                "rope_parameters": plain, "rope_scaling": older, "rope_theta": theta,
            });
            config(blocks, &QWEN2).map(|c| c.rope)
        };
        for (older, theta) in [
            (Value::Null, Value::Null),
            (json!({}), Value::Null),
            (json!({"type": "default"}), json!(7000)),
            (plain.clone(), Value::Null),
        ] {
            let rope = both(&older, theta).unwrap();
            assert_eq!((rope.theta, rope.scaling), (7000.0, RopeScaling::None));
        }
        for (older, words) in [
            (
                json!({"type": "linear", "factor": 2}),
                "the same as rope_parameters",
            ),
            (json!({"type": "default"}), "the same as rope_parameters"),
            (json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        ] {
            let message = both(&older, Value::Null).unwrap_err().to_string();
            let named = message.contains("rope_scaling") && message.contains(words);
            assert!(named, "{message}");
        }
    }
}
