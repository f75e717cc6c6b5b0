//! The number formats a product may be executed in, and what they mean for a declaration.

use structures_plugin_api::describe::{FormDecl, StatisticDecl, WeightFormat};

use crate::boundary::Boundary;
use crate::forms::Leaf;

/// A number format of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As given: weights and activations widened to f32.
    F32,
    /// E4M3 weights under one scale a packed tensor, E4M3 activations under a calibrated scale a
    /// point; the codes' values are multiplied and summed in f32, the two scales applied once.
    Fp8Static,
    /// int8 weights, one scale per output channel; activations as they come.
    W8a16Static,
}

impl Format {
    /// Every format; what a structure of products offers.
    pub const ALL: [Format; 3] = [Format::F32, Format::W8a16Static, Format::Fp8Static];

    /// Name of the form.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Fp8Static => "fp8_static",
            Format::W8a16Static => "w8a16_static",
        }
    }

    /// Whether activations are quantised, so that a scale a point is needed.
    pub fn quantises_activations(self) -> bool {
        self == Format::Fp8Static
    }

    /// The declaration of a structure's form in this format.
    ///
    /// Tolerances are what bind parity may show against the reference on equally rounded operands
    /// at an f32 boundary. Measured in `tests/parity.rs`, and once at D 2048, F 8192, 64 rows:
    /// under 1e-6 in every format. FP8 declares 1e-2 nevertheless: an intermediate that differs in
    /// its last bit may fall on the other side of an E4M3 code's edge, and then differs by a whole
    /// step of up to 1/8. One such value among the 768 of a small FFN's single row moves the output
    /// by 2e-3, a large one by 5e-3.
    pub fn declare(self, leaf: &Leaf) -> FormDecl {
        let owned = |list: &[&str]| list.iter().map(|s| (*s).to_string()).collect::<Vec<_>>();
        let mut decl = FormDecl::new(
            leaf.structure,
            self.name(),
            if self == Format::F32 {
                "none"
            } else {
                self.name()
            },
        );
        decl.spec_versions = leaf.versions.to_vec();
        decl.spans = owned(leaf.spans);
        decl.dtypes = owned(&Boundary::NAMES);
        decl.variants = leaf
            .variants
            .iter()
            .map(|(axis, values)| ((*axis).to_string(), owned(values)))
            .collect();
        decl.quantises = self != Format::F32;
        (decl.weight_format, decl.precision_rank, decl.tolerance) = match self {
            Format::F32 => (WeightFormat::None, 0, 1e-4),
            Format::W8a16Static => (WeightFormat::Int8PerChannel, 10, 1e-4),
            Format::Fp8Static => (WeightFormat::Fp8PerTensor, 20, 1e-2),
        };
        let statistics = |points: &[&str], statistic: &str| {
            let one = |point: &&str| StatisticDecl {
                point: (*point).into(),
                statistic: statistic.into(),
                granularity: "tensor".into(),
            };
            points.iter().map(one).collect::<Vec<_>>()
        };
        decl.statistics = statistics(leaf.content, "content");
        if self.quantises_activations() {
            decl.activation_format = "e4m3".into();
            decl.statistics.extend(statistics(leaf.points, "amax"));
            decl.scale_groups = leaf.scale_groups.iter().map(|group| owned(group)).collect();
        }
        decl
    }
}
