//! The number formats a product is executed in here, and what they mean for a declaration.

use structures_plugin_api::describe::{Band, DimBand, FormDecl, WeightFormat, WIRE_FP8_E4M3};
use structures_plugin_api::sdk::forms::{names, statistics};
use structures_plugin_api::DType;

use crate::kernels;

/// Most rows of the decode band.
pub const DECODE_ROWS: u64 = 8;

/// A number format of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// bf16 weights and activations, sums in f32.
    Bf16,
    /// The same for packs, under the name a structural profile asks for.
    Bf16Pack,
    /// E4M3 weights under one scale a packed tensor, E4M3 activations under a calibrated scale a point.
    Fp8Static,
    /// int8 weights, one scale per output channel; activations as they come.
    W8a16Static,
}

impl Format {
    /// Name of the form and of its format.
    pub fn name(self) -> &'static str {
        match self {
            Format::Bf16 => "bf16",
            Format::Bf16Pack => "bf16_pack",
            Format::Fp8Static => "fp8_static",
            Format::W8a16Static => "w8a16_static",
        }
    }

    /// How weights are kept.
    pub fn weights(self) -> WeightFormat {
        match self {
            Format::Bf16 | Format::Bf16Pack => WeightFormat::Bf16,
            Format::Fp8Static => WeightFormat::Fp8PerTensor,
            Format::W8a16Static => WeightFormat::Int8PerChannel,
        }
    }

    /// The operand in the names of kernels.
    pub fn operand(self) -> &'static str {
        match self {
            Format::Bf16 | Format::Bf16Pack => "bf16",
            Format::Fp8Static => "e4m3",
            Format::W8a16Static => "int8",
        }
    }

    /// How a prologue hands rows to a product: the type id of the operand, 0 for f32 as planes of bf16, which a product
    /// that takes activations as they come needs where the boundary is f32.
    pub fn kind(self, planes: bool) -> u32 {
        match self {
            Format::W8a16Static if planes => 0,
            Format::Bf16 | Format::Bf16Pack | Format::W8a16Static => DType::Bf16 as u32,
            Format::Fp8Static => DType::E4m3 as u32,
        }
    }

    /// Bytes of one weight.
    pub fn weight_bytes(self) -> usize {
        match self {
            Format::Bf16 | Format::Bf16Pack => 2,
            Format::Fp8Static | Format::W8a16Static => 1,
        }
    }

    /// Whether it serves the decode band alone.
    pub fn decode_only(self) -> bool {
        self == Format::W8a16Static
    }

    /// The declaration of a structure's form in this format. `points` are where activations are rounded, `summed`
    /// the symbols that products sum over, `wires` the inputs
    /// that may come as codes.
    ///
    /// Tolerances: an intermediate that differs in its last bit may fall on the other side of a code's edge and then
    /// differs by a whole step; those of bf16 and FP8 are the portable backend's doubled, for another order of summing.
    pub fn declare(
        self,
        structure: &str,
        spans: &[&str],
        points: &[&str],
        summed: &[&str],
        wires: &[&str],
    ) -> FormDecl {
        let mut decl = FormDecl::new(structure, self.name(), self.name());
        decl.spans = names(spans);
        decl.dtypes = names(&["f32", "bf16"]);
        decl.weight_format = self.weights();
        // Operand rows are copied 16 bytes at a time.
        let multiple = |symbol: &&str| {
            let band = DimBand {
                min: 16,
                max: 1 << 20,
                multiple_of: 16,
            };
            ((*symbol).to_string(), band)
        };
        decl.band = Band {
            rows: self.decode_only().then_some([1, DECODE_ROWS]),
            dims: summed.iter().map(multiple).collect(),
            ..Band::default()
        };
        (decl.precision_rank, decl.tolerance) = match self {
            Format::Bf16 | Format::Bf16Pack => {
                decl.activation_format = "bf16".into();
                decl.statistics = statistics(points, "none", "tensor");
                decl.rounds = Some("bf16".into());
                (5, 2e-3)
            }
            Format::Fp8Static => {
                decl.activation_format = "e4m3".into();
                decl.statistics = statistics(points, "amax", "tensor");
                decl.quantises = true;
                let accepts = |port: &&str| format!("accepts:{port}:{WIRE_FP8_E4M3}");
                decl.wires = wires.iter().map(accepts).collect();
                (20, 2e-2)
            }
            Format::W8a16Static => {
                decl.quantises = true;
                (10, 1e-3)
            }
        };
        decl.archs = names(match self {
            Format::Fp8Static => kernels::FP8,
            _ => kernels::GENERIC,
        });
        decl.priority = 20;
        // Scratch is made at bind, and a call only launches.
        decl.capture = true;
        decl
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_says_what_it_rounds_and_where_it_runs() {
        let of = |format: Format| format.declare("s", &["a"], &["x"], &["K"], &["x"]);
        let (bf16, fp8, int8) = (
            of(Format::Bf16),
            of(Format::Fp8Static),
            of(Format::W8a16Static),
        );
        assert_eq!(
            (bf16.rounds.as_deref(), bf16.quantises),
            (Some("bf16"), false)
        );
        assert_eq!((fp8.rounds.as_deref(), fp8.quantises), (None, true));
        assert_eq!(int8.band.rows, Some([1, 8]));
        assert!(int8.statistics.is_empty());
        assert_eq!(fp8.archs, kernels::FP8);
        assert!(bf16.archs.iter().any(|a| a == "sm_80+PTX"));
        let caps = [
            (bf16.tolerance, 1e-2),
            (fp8.tolerance, 6e-2),
            (int8.tolerance, 6e-2),
        ];
        assert!(caps.iter().all(|(declared, most)| declared <= most));
    }
}
