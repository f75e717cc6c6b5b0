//! Taking packed weights of a checkpoint over as they are stored: what may be asked for, and what is reported.
//!
//! Adoption changes the host before anything is attached to it: the products it takes are served from the checkpoint's
//! own rows in every plan made afterwards, on both sides of every comparison. So it is not judged for speed and has no
//! detach; what holds it honest is bind parity at every seat, parity of the whole model against the plain host, and
//! the conversion error of every layer in the report. The step itself is `attach::adopt`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use structures_models::PackedWeight;
use structures_plugin_api::describe::WeightFormat;
use structures_plugin_api::formats::BlockFormat;

use crate::error::Error;
use crate::gates::Metrics;
use crate::receipt::SeatNote;

/// Packed weights by slot, as a bind hands them over.
pub type Blocks = BTreeMap<String, PackedWeight>;

/// Every format there is.
pub const ALL: &str = "all";
/// Dense expert banks converted on the way in.
pub const BANKS: &str = "moe_experts_nvfp4";

/// What a caller wants taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Formats of stored rows.
    pub formats: Vec<BlockFormat>,
    /// Expert banks too.
    pub banks: bool,
}

impl Wish {
    /// Whatever is packed.
    pub fn everything() -> Self {
        Wish {
            formats: BlockFormat::ALL.to_vec(),
            banks: false,
        }
    }

    /// From the names of formats.
    ///
    /// # Errors
    /// `format_unknown`, with every name there is.
    pub fn parse(names: &[String]) -> Result<Self, Error> {
        let mut wish = Wish {
            formats: Vec::new(),
            banks: false,
        };
        for name in names {
            match (name.as_str(), BlockFormat::from_name(name)) {
                (ALL, _) => wish.formats.extend(BlockFormat::ALL),
                (BANKS, _) => wish.banks = true,
                (_, Some(format)) => wish.formats.push(format),
                _ => {
                    let known: Vec<&str> = BlockFormat::ALL.iter().map(|f| f.name()).collect();
                    return Err(Error::invalid(
                        "format_unknown",
                        format!(
                            "nothing is adopted in format `{name}`; expected {ALL}, {}, or {BANKS}",
                            known.join(", ")
                        ),
                    ));
                }
            }
        }
        Ok(wish)
    }
}

/// The format of ours that keeps the same codes, for a form that packs for itself.
pub fn counterpart(format: BlockFormat) -> Option<WeightFormat> {
    match format {
        BlockFormat::Nvfp4 => Some(WeightFormat::Nvfp4),
        BlockFormat::Fp8 => Some(WeightFormat::Fp8PerTensor),
        _ => None,
    }
}

/// What was adopted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Adopted {
    /// Format -> weights taken over from it.
    pub formats: BTreeMap<String, usize>,
    /// Number of weights.
    pub count: usize,
    /// Of those, how many a form packed again or unpacked.
    pub converted: usize,
    /// Median of the weights' relative L2 against the checkpoint's own values.
    pub median_relative_l2: f64,
    /// The largest.
    pub max_relative_l2: f64,
    /// One row a weight.
    pub layers: Vec<Layer>,
    /// Parity of the whole model against the plain host, before anything was attached; empty where nobody judged.
    pub metrics: Metrics,
    /// Band of that parity.
    pub band: String,
    /// Bytes of rows the forms hold.
    pub packed_bytes: u64,
    /// Why none of it is used; `seats` is empty then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<NotAdopted>,
    /// Always false: what a load did is undone by loading again.
    pub detachable: bool,
    /// Everything needed to bind the same seats again.
    pub seats: Vec<SeatNote>,
}

/// Why what could be bound is not used all the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotAdopted {
    /// Code of the gate.
    pub code: String,
    /// For people.
    pub reason: String,
}

/// One weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Receipt key of the seam.
    pub key: String,
    /// Structure.
    pub structure: String,
    /// Slot.
    pub slot: String,
    /// The parameter.
    pub param: String,
    /// Format it is stored in.
    pub format: String,
    /// `PLUGIN:FORM`.
    pub form: String,
    /// Whether the form packed it again, or holds more bytes than the rows have.
    pub converted: bool,
    /// Relative L2 of what the conversion makes of it, against the checkpoint's own values: 0 where the rows are taken
    /// as they are. How the form computes with it is bind parity's business.
    pub relative_l2: f64,
}

impl Adopted {
    /// The summary over its layers.
    pub fn of(layers: Vec<Layer>, seats: Vec<SeatNote>, packed_bytes: u64) -> Self {
        let mut formats: BTreeMap<String, usize> = BTreeMap::new();
        for layer in &layers {
            *formats.entry(layer.format.clone()).or_default() += 1;
        }
        let mut errors: Vec<f64> = layers.iter().map(|l| l.relative_l2).collect();
        errors.sort_by(f64::total_cmp);
        let median = match (errors.len() / 2, errors.len() % 2) {
            (_, _) if errors.is_empty() => 0.0,
            (half, 0) => (errors[half - 1] + errors[half]) / 2.0,
            (half, _) => errors[half],
        };
        Adopted {
            formats,
            count: layers.len(),
            converted: layers.iter().filter(|l| l.converted).count(),
            median_relative_l2: median,
            max_relative_l2: errors.last().copied().unwrap_or(0.0),
            layers,
            metrics: Metrics::default(),
            band: "unknown".into(),
            packed_bytes,
            refused: None,
            detachable: false,
            seats,
        }
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        let formats: Vec<String> = self
            .formats
            .iter()
            .map(|(format, n)| format!("{n} {format}"))
            .collect();
        if let Some(no) = &self.refused {
            return format!(
                "adopted nothing of {} weights ({}): {}: {}",
                self.count,
                formats.join(", "),
                no.code,
                no.reason
            );
        }
        format!(
            "adopted at load time: {} weights ({}) in {} seats ({}), {:.1} MB; {} packed again; relative L2 median {:.2e}, \
             max {:.2e}; no detach",
            self.count,
            formats.join(", "),
            self.seats.len(),
            self.served(),
            self.packed_bytes as f64 / 1e6,
            self.converted,
            self.median_relative_l2,
            self.max_relative_l2
        )
    }
}

impl Adopted {
    /// Who serves how many seats: a backend that lost some to a slower one is seen here.
    fn served(&self) -> String {
        let mut seats: BTreeMap<String, usize> = BTreeMap::new();
        for seat in &self.seats {
            let who = format!("{}:{}", seat.plugin, seat.form);
            *seats.entry(who).or_default() += 1;
        }
        let each: Vec<String> = seats.iter().map(|(who, n)| format!("{n} {who}")).collect();
        each.join(", ")
    }
}

/// `|got - want| / |want|` in f64; 0 for two that are alike, infinite for anything against zeros.
pub fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let pairs = got.iter().zip(want);
    let error = square(&mut pairs.map(|(g, w)| f64::from(*g) - f64::from(*w)));
    let scale = square(&mut want.iter().map(|w| f64::from(*w)));
    match (error, scale) {
        (0.0, _) if got.len() == want.len() => 0.0,
        (_, 0.0) => f64::INFINITY,
        (error, scale) => (error / scale).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_246_an_unknown_format_is_refused_with_those_there_are() {
        let parse = |names: &[&str]| {
            Wish::parse(&names.iter().map(|n| (*n).to_string()).collect::<Vec<_>>())
        };
        assert_eq!(parse(&["all"]).unwrap(), Wish::everything());
        let two = parse(&["q8_0", "nvfp4"]).unwrap();
        assert_eq!(two.formats, [BlockFormat::Q8_0, BlockFormat::Nvfp4]);
        assert!(parse(&[BANKS]).unwrap().banks);
        let error = parse(&["q8_0", "q5_k"]).unwrap_err();
        assert_eq!(error.code(), "format_unknown");
        for word in [
            "`q5_k`", "nvfp4", "fp8", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k", BANKS,
        ] {
            assert!(error.to_string().contains(word), "{error}");
        }
    }

    #[test]
    fn b_248_the_summary_counts_and_takes_median_and_maximum() {
        let layer = |format: &str, relative_l2: f64, converted| Layer {
            key: "k".into(),
            structure: "s".into(),
            slot: "w".into(),
            param: "p".into(),
            format: format.into(),
            form: "p:f".into(),
            converted,
            relative_l2,
        };
        let of = |layers| Adopted::of(layers, Vec::new(), 7);
        let three = of(vec![
            layer("q8_0", 0.5, true),
            layer("q4_k", 0.0, false),
            layer("q8_0", 0.125, true),
        ]);
        assert_eq!((three.count, three.converted), (3, 2));
        assert_eq!(
            (three.median_relative_l2, three.max_relative_l2),
            (0.125, 0.5)
        );
        assert_eq!(
            three.formats,
            [("q4_k".into(), 1), ("q8_0".into(), 2)].into()
        );
        assert!(!three.detachable && three.summary().contains("no detach"));
        let two = of(vec![layer("fp8", 0.5, true), layer("fp8", 0.25, true)]);
        assert_eq!(two.median_relative_l2, 0.375);
        assert_eq!(of(Vec::new()).max_relative_l2, 0.0);
    }

    #[test]
    fn errors_are_relative_to_what_was_stored() {
        assert_eq!(relative_l2(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(relative_l2(&[0.0, 0.0], &[3.0, 4.0]), 1.0);
        assert_eq!(relative_l2(&[0.0], &[0.0]), 0.0);
        assert_eq!(relative_l2(&[1.0], &[0.0]), f64::INFINITY);
    }
}
