//! The precision spec: which activation is executed in which format under which scale, as a file that can be
//! stored, checked and replayed.
//!
//! Only scales that a bound form executes are recorded. Weight scales are not: a form takes them from the
//! weight at bind.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use structures_plugin_api::formats::{fp8_scale, int8_scale};
use thiserror::Error;

/// How many values share a scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// One for the tensor.
    #[default]
    PerTensor,
    /// One a channel.
    PerChannel,
    /// One a group of `group_size`.
    PerGroup,
}

/// Whether zero is in the middle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Symmetry {
    /// No zero point.
    #[default]
    Symmetric,
    /// A zero point.
    Asymmetric,
}

/// Where a scale comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleSource {
    /// Measured on samples.
    #[default]
    Calibration,
    /// Stored with a checkpoint that was trained for it.
    QatCheckpoint,
    /// Computed in each call.
    RuntimeDynamic,
    /// Given by a person.
    Manual,
}

/// How a calibrated scale was reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleMethod {
    /// One sample.
    #[default]
    SingleFrame,
    /// Percentile over several.
    Percentile,
}

/// One number or one an element of the granularity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Numbers {
    /// One.
    One(f32),
    /// Several.
    Many(Vec<f32>),
}

/// Format and scale of one tensor. Every field has a default, so that older files load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Descriptor {
    /// Format name.
    pub dtype: String,
    /// How many values share a scale.
    pub granularity: Granularity,
    /// Symmetric or not.
    pub scheme: Symmetry,
    /// Values a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<u32>,
    /// Where the scale comes from.
    pub scale_source: ScaleSource,
    /// The scale.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<Numbers>,
    /// The zero point.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_point: Option<Numbers>,
    /// How it was reduced.
    pub method: ScaleMethod,
    /// From how many samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<usize>,
    /// At which percentile; only with that method.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percentile: Option<f64>,
}

impl Default for Descriptor {
    fn default() -> Self {
        Self {
            dtype: FP8.to_string(),
            granularity: Granularity::default(),
            scheme: Symmetry::default(),
            group_size: None,
            scale_source: ScaleSource::default(),
            scale: None,
            zero_point: None,
            method: ScaleMethod::default(),
            samples: None,
            percentile: None,
        }
    }
}

/// Name of FP8 E4M3.
pub const FP8: &str = "fp8_e4m3";
/// Name of int8.
pub const INT8: &str = "int8";

/// The dtype of a static activation scale, by the name of the format a form rounds through; `None` for a format that
/// has no static scale.
pub fn activation_dtype(format: &str) -> Option<&'static str> {
    match format {
        "e4m3" => Some(FP8),
        "int8" => Some(INT8),
        _ => None,
    }
}

/// All descriptors of an attachment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionSpec {
    /// Encoder tensors.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub encoder: BTreeMap<String, Descriptor>,
    /// Decoder tensors.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub decoder: BTreeMap<String, Descriptor>,
    /// Weights.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<String, Descriptor>,
    /// Activations, keyed `path|point`.
    pub activations: BTreeMap<String, Descriptor>,
    /// Where the samples came from.
    pub source: String,
}

/// Why a precision spec cannot be used.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PrecisionError {
    /// It contradicts itself.
    #[error("precision of {name}: {problem}")]
    Invalid {
        /// Bucket and key.
        name: String,
        /// What.
        problem: String,
    },
    /// It is consistent, but nothing executes it.
    #[error("precision of {name}: {found} is not executable; {executable}")]
    Unsupported {
        /// Bucket and key.
        name: String,
        /// What was found.
        found: String,
        /// What is.
        executable: &'static str,
    },
    /// A dtype that has no scale rule.
    #[error("no calibrated scale for dtype {dtype:?}; expected fp8_e4m3 or int8")]
    NoScaleRule {
        /// Dtype.
        dtype: String,
    },
}

impl PrecisionError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "precision_invalid",
            Self::Unsupported { .. } | Self::NoScaleRule { .. } => "format_no_variant",
        }
    }
}

impl Descriptor {
    /// A static per-tensor scale from a reduced amax of `samples` samples.
    ///
    /// # Errors
    /// A dtype without a scale rule, or an amax that is not finite.
    pub fn calibrated(
        dtype: &str,
        amax: f32,
        samples: usize,
        percentile: f64,
    ) -> Result<Self, PrecisionError> {
        let rule = match dtype {
            FP8 => fp8_scale,
            INT8 => int8_scale,
            _ => {
                return Err(PrecisionError::NoScaleRule {
                    dtype: dtype.to_string(),
                })
            }
        };
        if !amax.is_finite() {
            return Err(PrecisionError::Invalid {
                name: dtype.to_string(),
                problem: format!("no scale comes from an amax of {amax}"),
            });
        }
        let many = samples > 1;
        Ok(Self {
            dtype: dtype.to_string(),
            scale: Some(Numbers::One(rule(amax))),
            method: if many {
                ScaleMethod::Percentile
            } else {
                ScaleMethod::SingleFrame
            },
            samples: Some(samples),
            percentile: many.then_some(percentile),
            ..Self::default()
        })
    }

    /// Contradictions, before any question of capability.
    fn structural(&self) -> Option<String> {
        let grouped = self.granularity == Granularity::PerGroup;
        match (grouped, self.group_size) {
            (false, Some(size)) => return Some(format!("group_size {size} without per_group")),
            (true, None) => return Some("per_group without group_size".into()),
            (true, Some(0)) => return Some("group_size 0".into()),
            _ => {}
        }
        match (self.scheme, &self.zero_point) {
            (Symmetry::Asymmetric, None) => return Some("asymmetric without zero_point".into()),
            (Symmetry::Symmetric, Some(_)) => return Some("symmetric with a zero_point".into()),
            _ => {}
        }
        let scales = match &self.scale {
            None => &[][..],
            Some(Numbers::One(scale)) => std::slice::from_ref(scale),
            Some(Numbers::Many(_)) if self.granularity == Granularity::PerTensor => {
                return Some("several scales with per_tensor".into());
            }
            Some(Numbers::Many(scales)) => scales,
        };
        if let Some(bad) = scales.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
            return Some(format!("scale {bad}; expected a positive number"));
        }
        match (self.percentile, self.method) {
            (Some(_), ScaleMethod::SingleFrame) => Some("percentile with single_frame".into()),
            (Some(p), _) if !(0.0..=100.0).contains(&p) => {
                Some(format!("percentile {p} outside [0, 100]"))
            }
            _ => None,
        }
    }

    fn unsupported(&self) -> Option<(String, &'static str)> {
        if self.dtype != FP8 && self.dtype != INT8 {
            return Some((format!("dtype {:?}", self.dtype), "fp8_e4m3 and int8 are"));
        }
        if self.granularity != Granularity::PerTensor {
            return Some((
                format!("{:?} granularity", self.granularity),
                "per_tensor is",
            ));
        }
        if self.scheme != Symmetry::Symmetric {
            return Some(("an asymmetric scheme".into(), "symmetric is"));
        }
        None
    }
}

impl PrecisionSpec {
    /// Contradictions of any descriptor first, then what nothing executes.
    ///
    /// # Errors
    /// The first of either, named by bucket and key.
    pub fn validate(&self) -> Result<(), PrecisionError> {
        for (name, descriptor) in self.all() {
            if let Some(problem) = descriptor.structural() {
                return Err(PrecisionError::Invalid { name, problem });
            }
        }
        for (name, descriptor) in self.all() {
            if let Some((found, executable)) = descriptor.unsupported() {
                return Err(PrecisionError::Unsupported {
                    name,
                    found,
                    executable,
                });
            }
        }
        Ok(())
    }

    /// One activation descriptor for every reduced point, keyed `path|point`: key, dtype and amax of each.
    ///
    /// # Errors
    /// A dtype without a scale rule, or an amax that is not finite.
    pub fn calibrated<'p>(
        source: &str,
        points: impl IntoIterator<Item = (&'p String, &'p String, f32)>,
        samples: usize,
        percentile: f64,
    ) -> Result<Self, PrecisionError> {
        let one = |(key, dtype, amax): (&String, &String, f32)| {
            let descriptor = Descriptor::calibrated(dtype, amax, samples, percentile)?;
            Ok((key.clone(), descriptor))
        };
        Ok(PrecisionSpec {
            source: source.to_string(),
            activations: points.into_iter().map(one).collect::<Result<_, _>>()?,
            ..PrecisionSpec::default()
        })
    }

    fn all(&self) -> impl Iterator<Item = (String, &Descriptor)> {
        let buckets = [
            ("encoder", &self.encoder),
            ("decoder", &self.decoder),
            ("weights", &self.weights),
            ("activations", &self.activations),
        ];
        buckets.into_iter().flat_map(|(bucket, map)| {
            map.iter()
                .map(move |(key, d)| (format!("{bucket}.{key}"), d))
        })
    }

    /// The static scale of an activation, `None` where there is no single one.
    pub fn scale(&self, key: &str) -> Option<f32> {
        match self.activations.get(key)?.scale {
            Some(Numbers::One(scale)) => Some(scale),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(descriptor: Descriptor) -> PrecisionSpec {
        let mut spec = PrecisionSpec {
            source: "built-in".into(),
            ..PrecisionSpec::default()
        };
        spec.activations.insert("a.b|x".into(), descriptor);
        spec
    }

    #[test]
    fn a_calibrated_scale_validates_and_survives_json() {
        let one = Descriptor::calibrated(FP8, 448.0, 6, 99.9).unwrap();
        assert_eq!(one.scale, Some(Numbers::One(1.0)));
        assert_eq!(one.percentile, Some(99.9));
        let single = Descriptor::calibrated(INT8, 0.1, 1, 99.9).unwrap();
        assert_eq!(
            (single.method, single.percentile),
            (ScaleMethod::SingleFrame, None)
        );
        let mut both = spec(one);
        both.weights.insert("w".into(), single);
        both.validate().unwrap();
        assert_eq!(both.scale("a.b|x"), Some(1.0));
        let text = serde_json::to_string(&both).unwrap();
        assert!(!text.contains("encoder"), "{text}");
        assert_eq!(serde_json::from_str::<PrecisionSpec>(&text).unwrap(), both);
        assert!(Descriptor::calibrated("nvfp4", 1.0, 1, 99.9).is_err());
        assert!(Descriptor::calibrated(FP8, f32::NAN, 1, 99.9).is_err());
    }

    #[test]
    fn b_083_one_descriptor_a_point_and_a_percentile_only_where_there_was_one() {
        let points = [
            ("a|x".to_string(), FP8.to_string(), 448.0),
            ("b|y".to_string(), INT8.to_string(), 12.7),
        ];
        let of = |samples| {
            let points = points.iter().map(|(key, dtype, amax)| (key, dtype, *amax));
            PrecisionSpec::calibrated("built-in", points, samples, 99.0).unwrap()
        };
        let many = of(6);
        many.validate().unwrap();
        assert_eq!(many.activations.keys().collect::<Vec<_>>(), ["a|x", "b|y"]);
        assert_eq!(
            (many.scale("a|x"), many.scale("b|y")),
            (Some(1.0), Some(0.1))
        );
        assert_eq!(many.activations["b|y"].dtype, INT8);
        assert!(many.weights.is_empty(), "weight scales are the form's");
        for descriptor in many.activations.values() {
            assert_eq!(descriptor.percentile, Some(99.0));
            assert_eq!(descriptor.method, ScaleMethod::Percentile);
        }
        for descriptor in of(1).activations.values() {
            let json = serde_json::to_value(descriptor).unwrap();
            assert!(json.get("percentile").is_none());
            assert_eq!(descriptor.method, ScaleMethod::SingleFrame);
        }
        assert_eq!(activation_dtype("nvfp4"), None);
    }

    #[test]
    fn b_082_arrays_and_methods_round_trip() {
        let many = Descriptor {
            granularity: Granularity::PerChannel,
            scale: Some(Numbers::Many(vec![0.1, 0.3, 1e-8])),
            method: ScaleMethod::Percentile,
            ..Descriptor::default()
        };
        let text = serde_json::to_string(&many).unwrap();
        assert_eq!(serde_json::from_str::<Descriptor>(&text).unwrap(), many);
    }

    #[test]
    fn b_080_old_files_load_with_defaults_and_foreign_fields_do_not() {
        let old: Descriptor = serde_json::from_str("{\"scale\": 0.5}").unwrap();
        assert_eq!(old.dtype, FP8);
        assert_eq!(old.scale, Some(Numbers::One(0.5)));
        assert!(serde_json::from_str::<Descriptor>("{\"scales\": 0.5}").is_err());
        assert!(serde_json::from_str::<PrecisionSpec>("{}")
            .unwrap()
            .validate()
            .is_ok());
    }

    #[test]
    fn b_081_contradictions_come_before_capability() {
        let d = Descriptor::default;
        let nvfp4 = "nvfp4".to_string();
        for (bad, fact) in [
            (
                Descriptor {
                    group_size: Some(16),
                    dtype: nvfp4,
                    ..d()
                },
                "without per_group",
            ),
            (
                Descriptor {
                    granularity: Granularity::PerGroup,
                    ..d()
                },
                "without group_size",
            ),
            (
                Descriptor {
                    scheme: Symmetry::Asymmetric,
                    ..d()
                },
                "without zero_point",
            ),
            (
                Descriptor {
                    zero_point: Some(Numbers::One(1.0)),
                    ..d()
                },
                "symmetric with",
            ),
            (
                Descriptor {
                    scale: Some(Numbers::One(0.0)),
                    ..d()
                },
                "positive",
            ),
            (
                Descriptor {
                    scale: Some(Numbers::Many(vec![1.0])),
                    ..d()
                },
                "several",
            ),
            (
                Descriptor {
                    percentile: Some(50.0),
                    ..d()
                },
                "single_frame",
            ),
            (
                Descriptor {
                    percentile: Some(101.0),
                    method: ScaleMethod::Percentile,
                    ..d()
                },
                "outside",
            ),
        ] {
            let error = spec(bad).validate().unwrap_err();
            assert_eq!(error.code(), "precision_invalid");
            let text = error.to_string();
            assert!(
                text.contains(fact) && text.contains("activations.a.b|x"),
                "{text}"
            );
        }
    }

    #[test]
    fn b_082_a_contradiction_anywhere_wins_over_capability_elsewhere() {
        let mut mixed = spec(Descriptor {
            dtype: "nvfp4".into(),
            ..Descriptor::default()
        });
        assert_eq!(mixed.validate().unwrap_err().code(), "format_no_variant");
        let broken = Descriptor {
            group_size: Some(8),
            ..Descriptor::default()
        };
        mixed.weights.insert("z".into(), broken.clone());
        assert_eq!(mixed.validate().unwrap_err().code(), "precision_invalid");
        mixed.weights.clear();
        mixed.activations.insert("z".into(), broken);
        assert_eq!(mixed.validate().unwrap_err().code(), "precision_invalid");
    }

    #[test]
    fn b_081_only_what_executes_is_accepted() {
        let zero = Some(Numbers::One(0.0));
        let asymmetric = Descriptor {
            scheme: Symmetry::Asymmetric,
            zero_point: zero,
            ..Descriptor::default()
        };
        let channel = Descriptor {
            granularity: Granularity::PerChannel,
            ..Descriptor::default()
        };
        let group = Descriptor {
            granularity: Granularity::PerGroup,
            group_size: Some(16),
            ..Descriptor::default()
        };
        for bad in [asymmetric, channel, group] {
            let error = spec(bad).validate().unwrap_err();
            assert!(
                matches!(error, PrecisionError::Unsupported { .. }),
                "{error}"
            );
        }
        for dtype in [FP8, INT8] {
            let fine = Descriptor {
                dtype: dtype.into(),
                ..Descriptor::default()
            };
            spec(fine).validate().unwrap();
        }
    }
}
