//! Rounding of activations through a format, as a form does it inside a call.
//!
//! The host's bind-parity reference rounds a declared point with these; a form that rounds alike
//! differs from it by summation order only. Which rule holds follows from the declaration: a point
//! with `(amax, tensor)` has one static scale, a point with another statistic is rounded under a
//! scale that each row has of its own, so that a row's result does not depend on its neighbours.

use super::fp8::{fake_quant_e4m3, fp8_scale};
use super::half::{round_bf16, round_f16};
use super::int8::{int8_scale, quantise_int8};
use super::nvfp4::{nvfp4_global_scale, pack_nvfp4, unpack_nvfp4};
use super::weights::amax;

/// How the values at a point are rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ActivationRounding {
    /// Not at all.
    None,
    /// To bf16.
    Bf16,
    /// To f16.
    F16,
    /// Through E4M3 under one scale.
    E4m3 {
        /// The scale.
        scale: f32,
    },
    /// Through E4M3, a scale a row.
    E4m3Rows,
    /// Through int8 under one scale.
    Int8 {
        /// The scale.
        scale: f32,
    },
    /// Through int8, a scale a row.
    Int8Rows,
    /// Through E2M1 with E4M3 scales of 16 along a row and a global scale a row.
    Nvfp4Rows,
}

impl ActivationRounding {
    /// Names of the formats that [`Self::of`] knows.
    pub const NAMES: [&'static str; 6] = ["none", "bf16", "f16", "e4m3", "int8", "nvfp4"];

    /// The rule of a format at a point: static under the point's calibrated `amax`, else dynamic.
    /// `None` for a format nobody here rounds to; block formats are dynamic always.
    pub fn of(format: &str, amax: Option<f32>) -> Option<Self> {
        Some(match (format, amax) {
            ("none", _) => Self::None,
            ("bf16", _) => Self::Bf16,
            ("f16", _) => Self::F16,
            ("e4m3", Some(amax)) => Self::E4m3 {
                scale: fp8_scale(amax),
            },
            ("e4m3", None) => Self::E4m3Rows,
            ("int8", Some(amax)) => Self::Int8 {
                scale: int8_scale(amax),
            },
            ("int8", None) => Self::Int8Rows,
            ("nvfp4", _) => Self::Nvfp4Rows,
            _ => return None,
        })
    }

    /// Rounds rows of `width` values in place: code times scale.
    pub fn round(self, data: &mut [f32], width: usize) {
        let width = width.max(1);
        match self {
            Self::None => {}
            Self::Bf16 => data.iter_mut().for_each(|v| *v = round_bf16(*v)),
            Self::F16 => data.iter_mut().for_each(|v| *v = round_f16(*v)),
            Self::E4m3 { scale } => fake_quant_e4m3(data, scale),
            Self::E4m3Rows => {
                for row in data.chunks_mut(width) {
                    let scale = fp8_scale(amax(row));
                    fake_quant_e4m3(row, scale);
                }
            }
            Self::Int8 { scale } => fake_quant_int8(data, scale),
            Self::Int8Rows => {
                for row in data.chunks_mut(width) {
                    let scale = int8_scale(amax(row));
                    fake_quant_int8(row, scale);
                }
            }
            Self::Nvfp4Rows => {
                for row in data.chunks_mut(width) {
                    let packed = pack_nvfp4(row, row.len(), nvfp4_global_scale(amax(row)));
                    let values = unpack_nvfp4(&packed, row.len());
                    let there = row.iter_mut().zip(values).filter(|(v, _)| !v.is_nan());
                    there.for_each(|(v, rounded)| *v = rounded);
                }
            }
        }
    }
}

/// Rounds values through int8 under a scale. A NaN stays one: it must not come out as a zero.
pub fn fake_quant_int8(data: &mut [f32], scale: f32) {
    for value in data {
        if !value.is_nan() {
            *value = f32::from(quantise_int8(*value, scale)) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 11.0)
            .collect()
    }

    #[test]
    fn a_calibrated_point_is_static_and_any_other_dynamic() {
        let of = ActivationRounding::of;
        assert_eq!(
            of("e4m3", Some(448.0)),
            Some(ActivationRounding::E4m3 { scale: 1.0 })
        );
        assert_eq!(
            of("int8", Some(127.0)),
            Some(ActivationRounding::Int8 { scale: 1.0 })
        );
        assert_eq!(of("int8", None), Some(ActivationRounding::Int8Rows));
        assert_eq!(of("nvfp4", Some(1.0)), Some(ActivationRounding::Nvfp4Rows));
        assert_eq!(of("kurtosis", None), None);
        for name in ActivationRounding::NAMES {
            assert!(of(name, None).is_some() && of(name, Some(1.0)).is_some());
        }
    }

    #[test]
    fn a_row_never_depends_on_its_neighbours() {
        let width = 37;
        for rounding in ActivationRounding::NAMES.map(|name| {
            ActivationRounding::of(name, None).expect("known") // dynamic where it can be
        }) {
            let mut both = wave(2 * width);
            both[width..].iter_mut().for_each(|v| *v *= 100.0);
            let mut alone = both[..width].to_vec();
            rounding.round(&mut both, width);
            rounding.round(&mut alone, width);
            assert_eq!(both[..width], alone[..], "{rounding:?}");
        }
        let mut together = wave(2 * width);
        together[width..].iter_mut().for_each(|v| *v *= 100.0);
        let fixed = ActivationRounding::of("int8", Some(1000.0)).expect("known");
        let before = together.clone();
        fixed.round(&mut together, width);
        let steps = before.iter().zip(&together).map(|(a, b)| (a - b).abs());
        assert!(steps.fold(0.0, f32::max) <= int8_scale(1000.0) / 2.0 * 1.0001);
    }

    #[test]
    fn errors_shrink_with_the_width_of_the_format() {
        let error = |name: &str| {
            let before = wave(256);
            let mut after = before.clone();
            ActivationRounding::of(name, None)
                .expect("known")
                .round(&mut after, 64);
            let square = |values: &[f32]| values.iter().map(|v| v * v).sum::<f32>().sqrt();
            let off: Vec<f32> = before.iter().zip(&after).map(|(a, b)| a - b).collect();
            square(&off) / square(&before)
        };
        let found = ["none", "f16", "bf16", "int8", "e4m3", "nvfp4"].map(error);
        assert_eq!(found[0], 0.0);
        assert!(found.windows(2).all(|pair| pair[0] < pair[1]), "{found:?}");
        assert!(found[5] < 0.15, "{found:?}");
    }

    #[test]
    fn a_value_that_is_not_a_number_stays_visible() {
        for name in ["bf16", "f16", "e4m3", "int8", "nvfp4"] {
            let mut row = [1.0, f32::NAN, 2.0];
            ActivationRounding::of(name, Some(2.0))
                .expect("known")
                .round(&mut row, 3);
            assert!(row[1].is_nan() && !row[0].is_nan(), "{name}");
        }
    }
}
