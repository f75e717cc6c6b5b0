//! Rotary frequencies: the base ladder, the scalings that fold into it, and the factor some put on both tables.
//!
//! `dynamic` and `longrope` change the frequencies once a text is longer than what the model was first trained at. A
//! cache filled under one set does not go on under another, so they hold up to that length here, and it is the limit of
//! the context.

use std::f64::consts::TAU;
use std::path::Path;

use super::{Dialect, Fields};
use crate::ModelError;

const CANNOT: &str = "this version cannot run the model";
const FIX: &str = "correct the file or get it again";

/// How the ladder `theta^(-2i/R)` is stretched.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the long ones.
        factor: f64,
        /// Wavelengths above `original / low` are long.
        low: f64,
        /// Wavelengths below `original / high` are short.
        high: f64,
        /// Context length the model was first trained at.
        original: f64,
    },
    /// Channels that turn seldom divided by `factor`, often ones kept, a ramp over the channels between.
    Yarn {
        /// Divisor of the seldom ones.
        factor: f64,
        /// Turns within `original` positions above which a channel is kept.
        fast: f64,
        /// Turns below which it is divided.
        slow: f64,
        /// Context length the model was first trained at.
        original: f64,
        /// Whether the ramp begins and ends at whole channels.
        whole: bool,
    },
    /// Divisors given one by one (a GGUF's `rope_freqs.weight`, the short ones of `longrope`).
    Table(Vec<f64>),
}

/// Words for `rope_type` that can be read.
pub(crate) const ROPE_TYPES: &str = "default, linear, llama3, yarn, dynamic or longrope";

/// Rotary position encoding of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base.
    pub theta: f64,
    /// Scaling.
    pub scaling: RopeScaling,
    /// Factor of both tables.
    pub amplitude: f64,
    /// Positions up to which this holds, where that is fewer than the model has.
    pub limit: Option<usize>,
}

impl Rope {
    /// The ladder as it is.
    pub fn plain(theta: f64) -> Self {
        Self::scaled(theta, RopeScaling::None)
    }

    /// A scaling of the frequencies and nothing else.
    pub fn scaled(theta: f64, scaling: RopeScaling) -> Self {
        Rope {
            theta,
            scaling,
            amplitude: 1.0,
            limit: None,
        }
    }

    /// The `width / 2` frequencies, each rounded to f32 as the published models compute them.
    pub fn inv_freq(&self, width: usize) -> Vec<f64> {
        let base = |i: usize| f64::from(self.theta.powf(-(2.0 * i as f64) / width as f64) as f32);
        let ramp = match &self.scaling {
            RopeScaling::Yarn { .. } => self.ramp(width),
            _ => (0.0, 1.0),
        };
        (0..width / 2)
            .map(|i| {
                let f = base(i);
                let f = match &self.scaling {
                    RopeScaling::None => f,
                    RopeScaling::Linear { factor } => f / factor,
                    RopeScaling::Llama3 {
                        factor,
                        low,
                        high,
                        original,
                    } => {
                        let wave = TAU / f;
                        if wave > original / low {
                            f / factor
                        } else if wave < original / high {
                            f
                        } else {
                            let kept = (original / wave - low) / (high - low);
                            (1.0 - kept) * f / factor + kept * f
                        }
                    }
                    RopeScaling::Yarn { factor, .. } => {
                        let divided = ((i as f64 - ramp.0) / (ramp.1 - ramp.0)).clamp(0.0, 1.0);
                        f / factor * divided + f * (1.0 - divided)
                    }
                    RopeScaling::Table(divisors) => f / divisors.get(i).copied().unwrap_or(1.0),
                };
                f64::from(f as f32)
            })
            .collect()
    }

    /// The channels between which Yarn goes from kept to divided.
    fn ramp(&self, width: usize) -> (f64, f64) {
        let RopeScaling::Yarn {
            fast,
            slow,
            original,
            whole,
            ..
        } = self.scaling
        else {
            return (0.0, 1.0);
        };
        // The channel that turns so often within the original length.
        let at =
            |turns: f64| width as f64 * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (at(fast), at(slow));
        if whole {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(width as f64 - 1.0));
        // As published: a ramp of no length is a step.
        (low, if low == high { high + 0.001 } else { high })
    }
}

/// The rotary encoding, and that of the layers with a window where the config or the family has another one. The
/// settings stand at the top, in `rope_scaling` or in `rope_parameters`, there with one block for each kind of layer
/// or a single one.
pub(super) fn from_json(
    fields: &Fields<'_>,
    dialect: &Dialect,
    max_positions: usize,
    notes: &mut Vec<String>,
) -> Result<(Rope, Option<Rope>), ModelError> {
    let newer = fields.object("rope_parameters")?;
    let inner = |kind: &str| match &newer {
        Some(outer) => outer.object(kind),
        None => Ok(None),
    };
    let (full, sliding) = (inner("full_attention")?, inner("sliding_attention")?);
    let nested = full.is_some() || sliding.is_some();
    let local = match (&sliding, dialect.local_theta) {
        (Some(s), theta) => {
            let reader = Reader {
                fields,
                theta: theta.unwrap_or(dialect.theta),
                theta_name: "rope_local_base_freq",
                partial: dialect.partial_rotary.is_some(),
                max_positions,
            };
            Some(reader.read(Some(s), notes)?)
        }
        (None, Some(absent)) => {
            let theta = fields.positive("rope_local_base_freq")?;
            Some(Rope::plain(theta.unwrap_or(absent)))
        }
        (None, None) => None,
    };
    let reader = Reader {
        fields,
        theta: dialect.theta,
        theta_name: "rope_theta",
        partial: dialect.partial_rotary.is_some(),
        max_positions,
    };
    let settings = match (nested, dialect.local_theta) {
        (true, Some(_)) => full,
        (true, None) => full.or(sliding),
        (false, _) => newer,
    };
    let older = fields.object("rope_scaling")?.filter(|s| !s.map.is_empty());
    let rope = match (&settings, &older) {
        (Some(newer), Some(older)) => {
            // The library reads the older block where there are both, and forgets what only the newer one says, the
            // base too. Whoever added one by hand may have wanted either.
            let rope = reader.read(Some(newer), notes)?;
            if rope != reader.read(Some(older), &mut Vec::new())? {
                return Err(ModelError::malformed(
                    fields.path,
                    "rope_scaling",
                    "it absent, or the same as rope_parameters",
                    serde_json::to_string(older.map).unwrap_or_default(),
                    "keep one of the two blocks",
                ));
            }
            rope
        }
        (newer, older) => reader.read(newer.as_ref().or(older.as_ref()), notes)?,
    };
    Ok((rope, local))
}

/// Which part of a head's channels turns, where the config says it.
pub(super) fn partial(fields: &Fields<'_>) -> Result<Option<f64>, ModelError> {
    for block in ["rope_parameters", "rope_scaling"] {
        if let Some(block) = fields.object(block)? {
            if let Some(part) = block.positive("partial_rotary_factor")? {
                return Ok(Some(part));
            }
        }
    }
    fields.positive("partial_rotary_factor")
}

struct Reader<'a> {
    fields: &'a Fields<'a>,
    /// Base when neither the block nor the top has one.
    theta: f64,
    theta_name: &'static str,
    partial: bool,
    max_positions: usize,
}

impl Reader<'_> {
    fn read(
        &self,
        settings: Option<&Fields<'_>>,
        notes: &mut Vec<String>,
    ) -> Result<Rope, ModelError> {
        let fields = self.fields;
        let inner = |name: &str| match settings {
            Some(s) => s.positive(name),
            None => Ok(None),
        };
        let theta = match inner("rope_theta")? {
            Some(t) => t,
            None => fields.positive(self.theta_name)?.unwrap_or_else(|| {
                notes.push(format!(
                    "{} is absent: {} assumed",
                    self.theta_name, self.theta
                ));
                self.theta
            }),
        };
        let Some(settings) = settings else {
            return Ok(Rope::plain(theta));
        };
        let part = settings.positive("partial_rotary_factor")?;
        if let Some(part) = part.filter(|p| *p != 1.0 && !self.partial) {
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
        // The first publication of longrope called itself by other names.
        let longrope = settings.get("short_factor").is_some();
        let mut rope = Rope::plain(theta);
        rope.scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear {
                factor: must("factor")?,
            },
            "dynamic" => {
                notes.push(format!(
                    "rope scaling `dynamic` begins beyond max_position_embeddings {}: never reached",
                    self.max_positions
                ));
                must("factor")?;
                RopeScaling::None
            }
            "longrope" | "su" | "yarn" if longrope || kind != "yarn" => {
                let original = self.original(settings, notes)?;
                let factor = match settings.positive("factor")? {
                    Some(factor) => factor,
                    None => self.max_positions as f64 / original,
                };
                rope.amplitude = match settings.positive("attention_factor")? {
                    Some(factor) => factor,
                    None if factor <= 1.0 => 1.0,
                    None => (1.0 + factor.ln() / original.ln()).sqrt(),
                };
                if (original as usize) < self.max_positions {
                    notes.push(format!(
                        "rope scaling `longrope` has other frequencies beyond {original} positions: the context ends \
                         there, not at {}",
                        self.max_positions
                    ));
                    rope.limit = Some(original as usize);
                }
                let long = settings.positives("long_factor")?;
                settings.required("long_factor", "a list of positive numbers", long)?;
                let short = settings.positives("short_factor")?;
                let short =
                    settings.required("short_factor", "a list of positive numbers", short)?;
                RopeScaling::Table(short)
            }
            "yarn" => {
                let original = self.original(settings, notes)?;
                let factor = must("factor")?;
                let share = |by: f64| match factor <= 1.0 {
                    true => 1.0,
                    false => 0.1 * by * factor.ln() + 1.0,
                };
                let scales = ["mscale", "mscale_all_dim"].map(|name| settings.not_negative(name));
                rope.amplitude = match (settings.positive("attention_factor")?, scales) {
                    (Some(factor), _) => factor,
                    (None, [a, b]) => match (a?, b?) {
                        (Some(a), Some(b)) if a > 0.0 && b > 0.0 => share(a) / share(b),
                        _ => share(1.0),
                    },
                };
                let turns = |name: &str, absent: f64| {
                    let given = settings.not_negative(name)?.filter(|n| *n > 0.0);
                    Ok::<_, ModelError>(given.unwrap_or(absent))
                };
                RopeScaling::Yarn {
                    factor,
                    fast: turns("beta_fast", 32.0)?,
                    slow: turns("beta_slow", 1.0)?,
                    original,
                    whole: settings.flag("truncate")?.unwrap_or(true),
                }
            }
            "llama3" => {
                let original = self.original(settings, notes)?;
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
            other => return Err(refused(fields.path, &settings.prefix, other)),
        };
        Ok(rope)
    }

    /// The length the model was first trained at. At the top it wins, as in the library.
    fn original(&self, settings: &Fields<'_>, notes: &mut Vec<String>) -> Result<f64, ModelError> {
        const NAME: &str = "original_max_position_embeddings";
        let original = match self.fields.positive(NAME)? {
            Some(n) => Some(n),
            None => settings.positive(NAME)?,
        };
        let original = original.unwrap_or_else(|| {
            notes.push(format!("{NAME} is absent: {} assumed", self.max_positions));
            self.max_positions as f64
        });
        match original >= 2.0 {
            true => Ok(original),
            false => Err(ModelError::malformed(
                self.fields.path,
                NAME,
                "at least 2",
                original.to_string(),
                FIX,
            )),
        }
    }
}

fn refused(path: &Path, prefix: &str, kind: &str) -> ModelError {
    ModelError::unsupported(path, format!("{prefix}rope_type"), ROPE_TYPES, kind, CANNOT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plain_ladder_starts_at_one() {
        let rope = Rope::plain(10000.0);
        let f = rope.inv_freq(8);
        assert_eq!(f.len(), 4);
        assert_eq!(f[0], 1.0);
        assert!((f[2] - 0.01).abs() < 1e-8);
    }

    #[test]
    fn linear_divides_and_llama3_keeps_the_short_wavelengths() {
        let theta = 50000.0;
        let plain = Rope::plain(theta).inv_freq(16);
        let linear = Rope::scaled(theta, RopeScaling::Linear { factor: 2.0 }).inv_freq(16);
        let llama = RopeScaling::Llama3 {
            factor: 8.0,
            low: 1.0,
            high: 4.0,
            original: 64.0,
        };
        let llama = Rope::scaled(theta, llama).inv_freq(16);
        assert!((linear[3] * 2.0 - plain[3]).abs() < 1e-9);
        assert_eq!(llama[0], plain[0]);
        assert!((llama[7] * 8.0 - plain[7]).abs() < 1e-9);
        // Wavelength 24.3 of the second lies on the ramp between 16 and 64.
        assert!(llama[1] < plain[1] && llama[1] > plain[1] / 8.0);
    }
}
