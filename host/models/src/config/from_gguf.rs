//! GGUF metadata: keys start with the architecture's name; what has no key is read off the tensors.

use super::{windows, DecoderConfig, Dialect, Facts, Rope, RopeScaling, Rule, Windows};
use crate::checkpoint::{Checkpoint, GgufMetadata, GgufValue};
use crate::ModelError;

const FIX: &str = "the file is no complete model: convert it again";
const CANNOT: &str = "this version cannot run the model";
/// Frequency divisors some converters store instead of scaling keys.
const ROPE_TABLE: &str = "rope_freqs.weight";
/// Divisors for short and for long texts, which change with the length of the run.
const LONG_ROPE: [&str; 2] = ["rope_factors_long.weight", "rope_factors_short.weight"];

pub(super) fn read(
    checkpoint: &Checkpoint,
    meta: &GgufMetadata,
    dialect: &Dialect,
) -> Result<DecoderConfig, ModelError> {
    let keys = Keys {
        checkpoint,
        meta,
        architecture: dialect.gguf_architecture.unwrap_or(dialect.model_type),
    };
    let mut notes = Vec::new();
    let hidden_size = keys.must("embedding_length")?;
    let heads = keys.must("attention.head_count")?;
    let head_dim = match keys.size("attention.key_length")? {
        Some(d) => d,
        None if hidden_size % heads == 0 => hidden_size / heads,
        None => {
            return Err(keys.bad(
                "attention.head_count",
                "a divisor of embedding_length",
                heads,
            ))
        }
    };
    let refused = |item: String, expected: String, found: String| {
        ModelError::unsupported(checkpoint.path(), item, expected, found, CANNOT)
    };
    let rotary = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    for (key, n, free) in [
        (
            "attention.value_length",
            keys.size("attention.value_length")?,
            false,
        ),
        (
            "rope.dimension_count",
            Some(rotary),
            dialect.partial_rotary.is_some(),
        ),
    ] {
        if let Some(n) = n.filter(|n| *n != head_dim && !free) {
            let expected = format!("the head width {head_dim}");
            return Err(refused(keys.name(key), expected, n.to_string()));
        }
    }
    if let Some(tensor) = LONG_ROPE
        .iter()
        .find(|t| checkpoint.tensor_info(t).is_some())
    {
        let expected = "no divisors that change with the length".to_string();
        return Err(refused("tensors".into(), expected, (*tensor).into()));
    }
    let causal = keys.name("attention.causal");
    if meta.flag(&causal) == Some(false) {
        return Err(refused(causal, "it absent or true".into(), "false".into()));
    }
    let layers = super::check_layers(checkpoint.path(), keys.must("block_count")?)?;
    let windows = windows_of(&keys, dialect.windows, layers)?;

    let there = |tensor: &str| checkpoint.tensor_info(tensor).is_some();
    let rule = |rule: Rule, tensor: &str| match rule {
        Rule::Yes => true,
        Rule::No => false,
        Rule::Field(_) => there(tensor),
    };
    let vocab_size = match checkpoint.tensor_info("token_embd.weight") {
        Some(info) if info.dims.len() == 2 => info.dims[0],
        _ => {
            return Err(ModelError::tensor(
                checkpoint.path(),
                "token_embd.weight",
                "a matrix",
                "none",
                FIX,
            ))
        }
    };
    if let Some(n) = keys.size("vocab_size")?.filter(|n| *n != vocab_size) {
        let expected = format!("the {vocab_size} rows of token_embd.weight");
        return Err(keys.bad("vocab_size", &expected, n));
    }
    let mut eos: Vec<u32> = ["eos", "eot", "eom"]
        .iter()
        .filter_map(|k| meta.id(&format!("tokenizer.ggml.{k}_token_id")))
        .collect();
    eos.sort_unstable();
    eos.dedup();
    let tied_head = !there("output.weight");
    if tied_head {
        notes.push("output.weight is absent: the head reads the embedding".into());
    }

    let rope = rope(&keys, dialect.theta, rotary)?;
    let local_rope = match dialect.local_theta {
        Some(theta) if windows.iter().any(Option::is_some) => Some(Rope::plain(
            keys.number("rope.freq_base_swa")?.unwrap_or(theta),
        )),
        _ => None,
    };
    let local_rope = local_rope.filter(|own| *own != rope);
    let mut config = DecoderConfig {
        model_type: dialect.model_type.into(),
        root: dialect.root,
        vocab_size,
        hidden_size,
        intermediate_size: keys.must("feed_forward_length")?,
        layers,
        heads,
        kv_heads: keys.size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        rotary,
        norms: dialect.norms,
        // Converters store the sum.
        norm_offset: false,
        rms_norm_eps: match keys.number("attention.layer_norm_rms_epsilon")? {
            Some(eps) => shortest(eps),
            None => {
                return Err(keys.bad("attention.layer_norm_rms_epsilon", "a number", "nothing"))
            }
        },
        act: dialect.act.1,
        fused: dialect.fused,
        qkv_bias: rule(dialect.qkv_bias, "blk.0.attn_q.bias"),
        o_bias: rule(dialect.o_bias, "blk.0.attn_output.bias"),
        mlp_bias: rule(dialect.mlp_bias, "blk.0.ffn_gate.bias"),
        qk_norm: dialect.qk_norm,
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
        max_positions: keys.must("context_length")?,
        bos: meta.id("tokenizer.ggml.bos_token_id"),
        eos,
        notes,
    };
    (dialect.facts)(&Facts::Gguf(keys), &mut config)?;
    Ok(config)
}

/// The windows of the layers. Where the file has no pattern, that of the family holds: readers of the format know it
/// by the architecture's name.
fn windows_of(
    keys: &Keys<'_>,
    rule: Windows,
    layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    const KEY: &str = "attention.sliding_window";
    const PATTERN: &str = "attention.sliding_window_pattern";
    // Zero is how some converters write that there is none.
    let zero = keys.meta.get(&keys.name(KEY)).and_then(GgufValue::as_u64) == Some(0);
    let width = if zero { None } else { keys.size(KEY)? };
    if let Some(list) = keys.meta.list(&keys.name(PATTERN)) {
        let flags: Option<Vec<bool>> = list
            .iter()
            .map(|v| match v {
                GgufValue::Flag(b) => Some(*b),
                v => v.as_u64().map(|n| n != 0),
            })
            .collect();
        return match flags {
            Some(flags) if flags.len() == layers => Ok(flags
                .into_iter()
                .map(|sliding| width.filter(|_| sliding))
                .collect()),
            _ => Err(keys.bad(
                PATTERN,
                &format!("{layers} flags"),
                format!("a list of {}", list.len()),
            )),
        };
    }
    match rule {
        Windows::Always { absent } => Ok(vec![width.or(absent.filter(|_| !zero)); layers]),
        Windows::AllBut { every, absent } => {
            let every = keys.size(PATTERN)?.unwrap_or(every);
            Ok(windows::all_but(
                every,
                width.or((!zero).then_some(absent)),
                layers,
            ))
        }
        Windows::Never | Windows::Flagged => match width {
            None => Ok(vec![None; layers]),
            Some(width) => Err(ModelError::unsupported(
                keys.checkpoint.path(),
                keys.name(KEY),
                "no window",
                width.to_string(),
                CANNOT,
            )),
        },
    }
}

/// A key holds an f32; the number that was written in the original config is its shortest decimal.
pub(super) fn shortest(eps: f64) -> f64 {
    (eps as f32).to_string().parse().unwrap_or(eps)
}

fn rope(keys: &Keys<'_>, theta: f64, rotary: usize) -> Result<Rope, ModelError> {
    let theta = keys.number("rope.freq_base")?.unwrap_or(theta);
    let path = keys.checkpoint.path();
    let kind = keys.meta.text(&keys.name("rope.scaling.type"));
    let factor = match keys.number("rope.scaling.factor")? {
        Some(f) => Some(f),
        None => keys.number("rope.scale_linear")?,
    };
    // A declared `none` switches a factor off; without a declaration the factor alone means linear.
    let scaling = match (kind, factor) {
        (Some("none"), _) | (None, None) | (None | Some("linear"), Some(1.0)) => RopeScaling::None,
        (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
        (Some("linear"), None) => {
            return Err(keys.bad("rope.scaling.factor", "a number", "nothing"))
        }
        (Some(other), _) => {
            let item = keys.name("rope.scaling.type");
            return Err(ModelError::unsupported(
                path,
                item,
                "none or linear",
                other,
                CANNOT,
            ));
        }
    };
    let Some(info) = keys.checkpoint.tensor_info(ROPE_TABLE) else {
        return Ok(Rope::scaled(theta, scaling));
    };
    if info.dims != [rotary / 2] || scaling != RopeScaling::None {
        let expected = format!("[{}] divisors and no other scaling", rotary / 2);
        let found = format!("{:?}, scaling {}", info.dims, kind.unwrap_or("absent"));
        return Err(ModelError::tensor(path, ROPE_TABLE, expected, found, FIX));
    }
    let table = keys.checkpoint.load(ROPE_TABLE)?;
    let table = table
        .to_vec1::<f32>()
        .map_err(|e| ModelError::compute("reading rope_freqs.weight", e))?;
    if let Some(bad) = table.iter().find(|d| **d <= 0.0) {
        let found = format!("a divisor of {bad}");
        return Err(ModelError::tensor(
            path,
            ROPE_TABLE,
            "positive divisors",
            found,
            FIX,
        ));
    }
    let divisors = table.into_iter().map(f64::from).collect();
    Ok(Rope::scaled(theta, RopeScaling::Table(divisors)))
}

/// Metadata under the keys of one architecture.
pub struct Keys<'a> {
    checkpoint: &'a Checkpoint,
    meta: &'a GgufMetadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn bad(&self, key: &str, expected: &str, found: impl ToString) -> ModelError {
        ModelError::malformed(
            self.checkpoint.path(),
            self.name(key),
            expected,
            found.to_string(),
            FIX,
        )
    }

    /// A size of at least 1; some converters write one per layer, all equal.
    fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.meta.get(&self.name(key)) else {
            return Ok(None);
        };
        let one = match self.meta.list(&self.name(key)) {
            Some([first, rest @ ..]) if rest.iter().all(|v| v == first) => first,
            _ => value,
        };
        match one.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if n >= 1 => Ok(Some(n)),
            _ => Err(self.bad(key, "a whole number of at least 1", value.brief())),
        }
    }

    fn must(&self, key: &str) -> Result<usize, ModelError> {
        let nothing = || self.bad(key, "a whole number of at least 1", "nothing");
        self.size(key)?.ok_or_else(nothing)
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.meta.get(&self.name(key)) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.bad(key, "a positive number", value.brief())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::gguf_file::{self, Value};

    fn scaling(rows: &[(&str, Value)]) -> Result<RopeScaling, ModelError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let named: Vec<(String, &Value)> =
            rows.iter().map(|(k, v)| (format!("x.{k}"), v)).collect();
        let rows: Vec<(&str, &Value)> = named.iter().map(|(k, v)| (k.as_str(), *v)).collect();
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &rows, &[]).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let crate::checkpoint::Metadata::Gguf(meta) = checkpoint.metadata() else {
            panic!("not a GGUF");
        };
        let keys = Keys {
            checkpoint: &checkpoint,
            meta,
            architecture: "x",
        };
        rope(&keys, 10000.0, 8).map(|r| r.scaling)
    }

    #[test]
    fn a_factor_counts_unless_its_kind_is_none() {
        let kind = |k: &str| ("rope.scaling.type", Value::String(k.into()));
        let factor = |f| ("rope.scaling.factor", Value::F32(f));
        let linear = RopeScaling::Linear { factor: 4.0 };
        assert_eq!(scaling(&[]).unwrap(), RopeScaling::None);
        assert_eq!(scaling(&[factor(4.0)]).unwrap(), linear);
        assert_eq!(scaling(&[kind("linear"), factor(4.0)]).unwrap(), linear);
        assert_eq!(
            scaling(&[kind("linear"), factor(1.0)]).unwrap(),
            RopeScaling::None
        );
        assert_eq!(
            scaling(&[kind("none"), factor(4.0)]).unwrap(),
            RopeScaling::None
        );
        assert_eq!(scaling(&[kind("none")]).unwrap(), RopeScaling::None);
        for (rows, word) in [
            (vec![kind("linear")], "x.rope.scaling.factor"),
            (vec![kind("yarn"), factor(4.0)], "`yarn`"),
        ] {
            let message = scaling(&rows).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }
}
