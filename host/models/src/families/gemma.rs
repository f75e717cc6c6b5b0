//! Gemma 2 and 3, text; the decoder of a Gemma 3 that sees runs on text alone. Norm weights are stored around zero, norms stand on both sides of attention and FFN, the
//! embedding is scaled by the root of its width, most layers see a window. Gemma 2 caps its scores; Gemma 3 norms q and
//! k and turns them with another base where there is a window.

use super::{Decoders, Family};
use crate::config::{DecoderConfig, Dialect, Facts, Norms, QkNorm, Rule, Windows, Within};
use crate::ModelError;

const SOFTCAP: &str = "attn_logit_softcapping";

const GEMMA2: Dialect = Dialect {
    gguf_architecture: Some("gemma2"),
    qkv_bias: Rule::Field("attention_bias"),
    o_bias: Rule::Field("attention_bias"),
    norms: Norms::Around,
    norm_offset: true,
    eps_name: "eps",
    act: ("hidden_activation", "gelu_tanh"),
    windows: Windows::AllBut {
        every: 2,
        absent: 4096,
    },
    reads: &[SOFTCAP, "final_logit_softcapping"],
    facts: |facts, c| {
        c.attention_softcap = facts.number(SOFTCAP, SOFTCAP, Some(50.0))?;
        read(facts, c, Some(30.0), 46)
    },
    ..Dialect::plain("gemma2", "Gemma2")
};

const GEMMA3: Dialect = Dialect {
    model_type: "gemma3_text",
    class: "Gemma3",
    model_class: "TextModel",
    gguf_architecture: Some("gemma3"),
    qk_norm: QkNorm::Head,
    theta: 1_000_000.0,
    local_theta: Some(10000.0),
    windows: Windows::AllBut {
        every: 6,
        absent: 4096,
    },
    facts: |facts, c| {
        if facts.number(SOFTCAP, SOFTCAP, None)?.is_some() {
            let note = "attn_logit_softcapping is given: the published model has no soft cap there";
            c.notes.push(note.into());
        }
        read(facts, c, None, 62)
    },
    ..GEMMA2
};

/// The family.
pub(super) const FAMILY: &dyn Family = &Decoders {
    name: "gemma",
    dialects: &[
        GEMMA2,
        GEMMA3,
        Dialect {
            model_type: "gemma3",
            gguf_architecture: None,
            root: "model.language_model",
            within: Some(Within {
                object: "text_config",
                stored: "language_model.model",
                absent: &[
                    ("vocab_size", 262_208),
                    ("hidden_size", 2304),
                    ("intermediate_size", 9216),
                    ("num_hidden_layers", 26),
                    ("num_attention_heads", 8),
                    ("num_key_value_heads", 4),
                    ("head_dim", 256),
                    ("max_position_embeddings", 131_072),
                ],
            }),
            ..GEMMA3
        },
    ],
};

/// `softcap` and a scale of 256^-0.5 are what absent fields mean. The GGUF has no key for the scale: it is that of the
/// head, except in the models of 27B, which have `big` layers and scale by the share of a head in the stream.
fn read(
    facts: &Facts<'_>,
    c: &mut DecoderConfig,
    softcap: Option<f64>,
    big: usize,
) -> Result<(), ModelError> {
    facts.must_be_off("use_bidirectional_attention")?;
    c.embedding_scale = (c.hidden_size as f64).sqrt();
    const LAST: &str = "final_logit_softcapping";
    c.logits_softcap = facts.number(LAST, LAST, softcap)?;
    let scalar = match facts.is_gguf() {
        true if c.layers == big => Some((c.hidden_size / c.heads) as f64),
        true => None,
        false => facts.number("query_pre_attn_scalar", "", Some(256.0))?,
    };
    c.attention_scale = scalar.map(|n| n.powf(-0.5));
    Ok(())
}
