//! Rotary frequencies: the base ladder and the scalings that fold into it.
//!
//! Yarn, dynamic and longrope change with the length or scale the logits too; they are refused by name.

use std::f64::consts::TAU;

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
    /// Divisors given one by one (a GGUF's `rope_freqs.weight`).
    Table(Vec<f64>),
}

/// Words for `rope_type` that [`RopeScaling`] covers.
pub(crate) const ROPE_TYPES: &str = "default, linear or llama3";

/// Rotary position encoding of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base.
    pub theta: f64,
    /// Scaling.
    pub scaling: RopeScaling,
}

impl Rope {
    /// The `width / 2` frequencies, each rounded to f32 as the published models compute them.
    pub fn inv_freq(&self, width: usize) -> Vec<f64> {
        let base = |i: usize| f64::from(self.theta.powf(-(2.0 * i as f64) / width as f64) as f32);
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
                    RopeScaling::Table(divisors) => f / divisors.get(i).copied().unwrap_or(1.0),
                };
                f64::from(f as f32)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plain_ladder_starts_at_one() {
        let rope = Rope {
            theta: 10000.0,
            scaling: RopeScaling::None,
        };
        let f = rope.inv_freq(8);
        assert_eq!(f.len(), 4);
        assert_eq!(f[0], 1.0);
        assert!((f[2] - 0.01).abs() < 1e-8);
    }

    #[test]
    fn linear_divides_and_llama3_keeps_the_short_wavelengths() {
        let theta = 50000.0;
        let plain = Rope {
            theta,
            scaling: RopeScaling::None,
        }
        .inv_freq(16);
        let linear = Rope {
            theta,
            scaling: RopeScaling::Linear { factor: 2.0 },
        }
        .inv_freq(16);
        let llama = Rope {
            theta,
            scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low: 1.0,
                high: 4.0,
                original: 64.0,
            },
        }
        .inv_freq(16);
        assert!((linear[3] * 2.0 - plain[3]).abs() < 1e-9);
        assert_eq!(llama[0], plain[0]);
        assert!((llama[7] * 8.0 - plain[7]).abs() < 1e-9);
        // Wavelength 24.3 of the second lies on the ramp between 16 and 64.
        assert!(llama[1] < plain[1] && llama[1] > plain[1] / 8.0);
    }
}
