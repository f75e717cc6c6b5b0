//! `config.json`, as several years of the library have written it: sizes that may be absent or null, rotary
//! settings at the top, in `rope_scaling` or in `rope_parameters`, tie flags that contradict the tensors.

use serde_json::{Map, Value};

use super::{
    activation, rope, windows, DecoderConfig, Dialect, Facts, Fields, QkNorm, Rule, Within,
};
use crate::checkpoint::Checkpoint;
use crate::ModelError;

const CANNOT: &str = "this version cannot run the model";
const POSITIONS: usize = 2048;
const FIX: &str = "correct the file or get it again";

/// Flags that change the numbers and must be off (absent, null, false, or 1 for multipliers) where a family does not
/// read them itself.
const MUST_BE_OFF: &[&str] = &[
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "partial_rotary_factor",
    "use_bidirectional_attention",
    "clip_qkv",
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
    refuse_foreign_facts(&fields, dialect)?;

    let size = |name: &str| fields.size(name);
    let must = |name: &str| fields.required(name, "a whole number of at least 1", size(name)?);
    let hidden_size = must("hidden_size")?;
    let heads = must("num_attention_heads")?;
    let layers = super::check_layers(&path, must("num_hidden_layers")?)?;
    let head_dim = match size("head_dim")? {
        Some(d) => d,
        None => match (
            stored_width(checkpoint, dialect, heads),
            hidden_size % heads,
        ) {
            (Some((width, tensor)), share) => {
                if share != 0 || width != hidden_size / heads {
                    notes.push(format!("head_dim is absent: {width}, from {tensor}"));
                }
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
    let kv_heads = match size("num_key_value_heads")? {
        Some(n) => n,
        None => {
            let n = stored_kv_heads(checkpoint, dialect, heads, head_dim).unwrap_or(heads);
            if n != heads {
                notes.push(format!(
                    "num_key_value_heads is absent: {n}, from the tensors"
                ));
            }
            n
        }
    };
    let max_positions = size("max_position_embeddings")?.unwrap_or_else(|| {
        notes.push(format!(
            "max_position_embeddings is absent: {POSITIONS} assumed"
        ));
        POSITIONS
    });
    let rms_norm_eps = fields.positive("rms_norm_eps")?.unwrap_or_else(|| {
        notes.push(format!("rms_norm_eps is absent: {:e} assumed", dialect.eps));
        dialect.eps
    });
    let (act_field, act) = dialect.act;
    let act = match fields.text(act_field)? {
        Some(name) => activation(&path, act_field, name)?,
        None => {
            notes.push(format!("{act_field} is absent: {act} assumed"));
            act
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

    let (rope, local_rope) = rope::from_json(&fields, dialect, max_positions, &mut notes)?;
    let windows = windows::from_json(&fields, dialect.windows, layers)?;
    // Where none has a window it turns nothing; two of the same are one.
    let local_rope = local_rope.filter(|own| *own != rope && windows.iter().any(Option::is_some));
    let limits = local_rope.iter().chain(std::iter::once(&rope));
    let limit = limits.filter_map(|r| r.limit).min();
    let mut config = DecoderConfig {
        model_type: dialect.model_type.into(),
        root: dialect.root,
        vocab_size: must("vocab_size")?,
        hidden_size,
        intermediate_size: must("intermediate_size")?,
        layers,
        heads,
        kv_heads,
        head_dim,
        rotary: match dialect.partial_rotary {
            // Rounded down, as the library does it.
            Some(absent) => (head_dim as f64 * rope::partial(&fields)?.unwrap_or(absent)) as usize,
            None => head_dim,
        },
        rms_norm_eps,
        norms: dialect.norms,
        norm_offset: dialect.norm_offset,
        act,
        qkv_bias: rule(dialect.qkv_bias)?,
        o_bias: rule(dialect.o_bias)?,
        mlp_bias: rule(dialect.mlp_bias)?,
        qk_norm: dialect.qk_norm,
        fused: dialect.fused,
        tied_head,
        rope,
        local_rope,
        windows,
        attention_scale: None,
        attention_softcap: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logits_divisor: 1.0,
        logits_softcap: None,
        max_positions: limit.map_or(max_positions, |n| n.min(max_positions)),
        bos: fields.ids("bos_token_id")?.first().copied(),
        eos,
        notes,
    };
    (dialect.facts)(&Facts::Json(fields), &mut config)?;
    Ok(config)
}

/// As above, for a decoder inside a larger model.
pub(super) fn read_within(
    checkpoint: &Checkpoint,
    whole: &Map<String, Value>,
    dialect: &Dialect,
    within: Within,
) -> Result<DecoderConfig, ModelError> {
    let path = checkpoint.metadata_path();
    let fields = Fields {
        path: &path,
        prefix: String::new(),
        map: whole,
    };
    let inner = fields.object(within.object)?;
    let mut map = fields
        .required(within.object, "an object", inner)?
        .map
        .clone();
    map.retain(|_, v| !v.is_null());
    for shared in [
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "quantization_config",
    ] {
        if let Some(value) = fields.get(shared) {
            map.entry(shared).or_insert(value.clone());
        }
    }
    let mut assumed = Vec::new();
    for (name, size) in within.absent {
        map.entry(*name).or_insert_with(|| {
            assumed.push(format!(
                "{}.{name} is absent: {size} assumed",
                within.object
            ));
            (*size).into()
        });
    }
    let mut config = read(checkpoint, &map, dialect)?;
    config.notes.extend(assumed);
    let object = within.object;
    config.notes.push(format!(
        "the decoder of {object} runs alone: text, no pictures"
    ));
    Ok(config)
}

/// The width of a head as the tensors have it. Families default to a width of their own where `head_dim` is absent,
/// not to a share of the stream.
fn stored_width(
    checkpoint: &Checkpoint,
    dialect: &Dialect,
    heads: usize,
) -> Option<(usize, String)> {
    let rows = |name: &str| {
        let tensor = format!("{}.layers.0.self_attn.{name}.weight", dialect.root);
        let rows = *checkpoint.tensor_info(&tensor)?.dims.first()?;
        Some((rows, tensor))
    };
    if dialect.qk_norm == QkNorm::Head {
        if let Some(found) = rows("q_norm").filter(|(n, _)| *n > 0) {
            return Some(found);
        }
    }
    let (n, tensor) = rows("q_proj")?;
    (n > 0 && n % heads == 0).then_some((n / heads, tensor))
}

fn stored_kv_heads(
    checkpoint: &Checkpoint,
    dialect: &Dialect,
    heads: usize,
    head_dim: usize,
) -> Option<usize> {
    let rows = |name: &str| {
        let tensor = format!("{}.layers.0.self_attn.{name}.weight", dialect.root);
        checkpoint.tensor_info(&tensor)?.dims.first().copied()
    };
    let kv = match dialect.fused {
        true => rows("qkv_proj")?.checked_sub(heads * head_dim)? / 2,
        false => rows("k_proj")?,
    };
    (kv > 0 && kv.is_multiple_of(head_dim)).then_some(kv / head_dim)
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

fn refuse_foreign_facts(fields: &Fields<'_>, dialect: &Dialect) -> Result<(), ModelError> {
    // Without causality every token sees the whole text: an encoder, whatever its family.
    if fields.flag("is_causal")? == Some(false) {
        return Err(ModelError::unsupported(
            fields.path,
            "is_causal",
            "it absent, null or true",
            "false",
            CANNOT,
        ));
    }
    for name in MUST_BE_OFF.iter().filter(|n| !dialect.reads.contains(n)) {
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{RopeScaling, Windows};
    use super::*;
    use serde_json::json;

    const Q_NORM: &str = "model.layers.0.self_attn.q_norm.weight";
    const QWEN2: Dialect = Dialect {
        qkv_bias: Rule::Yes,
        windows: Windows::Flagged,
        ..Dialect::plain("qwen2", "Qwen2")
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
        let with = |changes: Value| config(changes, &QWEN2).map(|c| c.windows);
        let flag = json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1});
        assert_eq!(with(flag).unwrap(), [None, Some(8)]);
        let mixed = json!(["full_attention", "sliding_attention"]);
        let kinds = json!({"layer_types": mixed, "sliding_window": 8, "use_sliding_window": true});
        assert_eq!(with(kinds).unwrap(), [None, Some(8)]);
        for (wrong, item) in [
            (
                json!({"layer_types": mixed, "sliding_window": 8}),
                "use_sliding_window",
            ),
            (json!({"layer_types": ["full_attention"]}), "layer_types"),
            (json!({"layer_types": "full_attention"}), "layer_types"),
            (
                json!({"layer_types": ["full_attention", "chunked_attention"]}),
                "chunked_attention",
            ),
        ] {
            let message = with(wrong.clone()).unwrap_err().to_string();
            assert!(message.contains(item), "{wrong}: {message}");
        }
        let every = Dialect {
            windows: Windows::Always { absent: None },
            ..QWEN2
        };
        for kinds in [&mixed, &full] {
            let fields = json!({"layer_types": kinds, "sliding_window": 8});
            assert!(config(fields, &every).is_err(), "{kinds}");
        }
        assert!(config(json!({"layer_types": full}), &every).is_ok());
        let never = Dialect::plain("x", "X");
        for (windowed, item) in [
            (json!({"use_sliding_window": true}), "use_sliding_window"),
            (json!({"layer_types": mixed}), "layer_types"),
        ] {
            let message = config(windowed.clone(), &never).unwrap_err().to_string();
            assert!(message.contains(item), "{windowed}: {message}");
        }
    }

    #[test]
    fn absent_and_null_windows_differ() {
        let all = |absent| Dialect {
            windows: Windows::Always { absent },
            ..QWEN2
        };
        for (changes, absent, want) in [
            (json!({}), Some(16), Some(16)),
            (json!({}), None, None),
            (json!({"sliding_window": 4}), None, Some(4)),
        ] {
            let c = config(changes, &all(absent)).unwrap();
            assert_eq!(c.windows, [want; 2]);
        }
        let fields = json!({"sliding_window": null});
        let fields = Fields {
            path: std::path::Path::new("config.json"),
            prefix: String::new(),
            map: fields.as_object().unwrap(),
        };
        let rule = Windows::Always { absent: Some(16) };
        assert_eq!(windows::from_json(&fields, rule, 1).unwrap(), [None]);
    }

    #[test]
    fn an_absent_head_width_is_that_of_the_head_norms() {
        let normed = Dialect {
            qk_norm: QkNorm::Head,
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
