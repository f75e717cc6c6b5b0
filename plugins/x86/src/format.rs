//! The number formats a product is executed in, and what they mean for a declaration.

use structures_plugin_api::describe::{Band, FormDecl, WeightFormat};
use structures_plugin_api::formats::BlockFormat;
use structures_plugin_api::sdk::forms::{names, statistics, variants};

use crate::forms::Leaf;
use crate::kernels::blocks::Kind;

/// Most rows of a call: beyond, an address in a call's buffers could not be had anyway.
pub const MOST_ROWS: u64 = 1 << 16;

/// A number format of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As given, in f32. Packed rows of a checkpoint stay packed and meet integers that lose less than an f32 product may.
    F32,
    /// bf16 weights, activations rounded to bf16 where a product reads them; sums in f32.
    Bf16,
    /// The same for packs alone, under the name a structural profile asks for.
    Bf16Pack,
    /// int8 weights, one scale an output channel; 16-bit activations.
    W8a16,
    /// int8 weights; int8 activations under a scale a row, found in the call.
    W8a8Dynamic,
    /// int8 weights; int8 activations under a calibrated scale a point.
    W8a8Static,
    /// E4M3 weights under one scale, E4M3 activations under a calibrated scale a point.
    Fp8,
    /// NVFP4 weights; 16-bit activations.
    W4a16,
}

/// What a format is, one row each.
struct Row {
    name: &'static str,
    /// Name that schemes route to.
    format: &'static str,
    weights: WeightFormat,
    activations: &'static str,
    /// Statistic and granularity needed at each point.
    statistic: Option<(&'static str, &'static str)>,
    tolerance: f64,
    rank: u32,
    priority: i32,
}

impl Format {
    /// Every format that a structure of products offers.
    pub const ALL: &'static [Format] = &[
        Format::F32,
        Format::Bf16,
        Format::W8a16,
        Format::W8a8Dynamic,
        Format::W8a8Static,
        Format::Fp8,
        Format::W4a16,
    ];

    /// The same with the pack's own bf16.
    pub const PACK: &'static [Format] = &[
        Format::F32,
        Format::Bf16,
        Format::Bf16Pack,
        Format::W8a16,
        Format::W8a8Dynamic,
        Format::W8a8Static,
        Format::Fp8,
        Format::W4a16,
    ];

    /// Tolerances are what bind parity may show against the reference on equally rounded operands. 16-bit activations
    /// have one scale a row: rows with an outlier a thousand times the rest lose the rest (measured on SmolLM2: 1e-5
    /// typical, 6e-4 at worst, layer 27, the first token). Where activations are rounded to codes, an intermediate that
    /// differs in its last bit may fall on the other side of a code's edge and then differs by a whole step.
    fn row(self) -> Row {
        let row = |name, format, weights, activations, statistic, tolerance, rank| Row {
            name,
            format,
            weights,
            activations,
            statistic,
            tolerance,
            rank,
            priority: 10,
        };
        use WeightFormat::{Bf16, Fp8PerTensor, Int8PerChannel, None as Given, Nvfp4};
        let point = Some(("none", "tensor"));
        let tensor = Some(("amax", "tensor"));
        match self {
            Format::F32 => row("f32", "none", Given, "none", None, 1e-4, 0),
            Format::Bf16 => row("bf16", "bf16", Bf16, "bf16", point, 5e-3, 5),
            Format::Bf16Pack => row("bf16_pack", "bf16_pack", Bf16, "bf16", point, 5e-3, 5),
            Format::W8a16 => row(
                "w8a16",
                "w8a16_static",
                Int8PerChannel,
                "none",
                None,
                5e-3,
                10,
            ),
            Format::W8a8Dynamic => {
                let (name, format) = ("w8a8_dynamic", "w8a8_static");
                row(name, format, Int8PerChannel, "int8", point, 1e-2, 15)
            }
            // A scale a row is at least as good: this one is tried after it.
            Format::W8a8Static => Row {
                priority: 9,
                ..row(
                    "w8a8",
                    "w8a8_static",
                    Int8PerChannel,
                    "int8",
                    tensor,
                    1e-2,
                    16,
                )
            },
            Format::Fp8 => row("fp8", "fp8_static", Fp8PerTensor, "e4m3", tensor, 1e-2, 20),
            Format::W4a16 => row("w4a16", "w4a16_static", Nvfp4, "none", None, 5e-3, 30),
        }
    }

    /// Name of the form.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The declaration of a structure's form in this format.
    pub fn declare(self, leaf: &Leaf) -> FormDecl {
        let row = self.row();
        let each = |(statistic, granularity)| statistics(leaf.points, statistic, granularity);
        let joint = matches!(
            row.weights,
            WeightFormat::Fp8PerTensor | WeightFormat::Nvfp4
        );
        let groups = leaf.scale_groups.iter().filter(|_| joint);
        let taken = |format: &BlockFormat| leaf.packed && Kind::of(*format).is_some();
        let packed = BlockFormat::ALL.into_iter();
        let packed = packed.filter(|format| self == Format::F32 && taken(format));
        FormDecl {
            spec_versions: leaf.versions.to_vec(),
            spans: names(leaf.spans),
            variants: variants(leaf.variants),
            dtypes: vec!["f32".into()],
            statistics: row.statistic.map(each).unwrap_or_default(),
            band: Band {
                rows: Some([1, MOST_ROWS]),
                ..Band::default()
            },
            weight_format: row.weights,
            packed: packed.collect(),
            scale_groups: groups.map(|group| names(group)).collect(),
            activation_format: row.activations.into(),
            tolerance: row.tolerance,
            rounds: (row.weights == WeightFormat::Bf16).then(|| "bf16".into()),
            precision_rank: row.rank,
            quantises: !matches!(row.weights, WeightFormat::None | WeightFormat::Bf16),
            priority: row.priority,
            strided: leaf.strided,
            keeps_packed: !leaf.points.is_empty(),
            ..FormDecl::new(leaf.structure, row.name, row.format)
        }
    }
}
