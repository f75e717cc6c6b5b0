//! The number formats a product may be executed in, and what they mean for a declaration.

use structures_plugin_api::describe::{DimBand, FormDecl, WeightFormat, WIRE_FP8_E4M3};

use structures_plugin_api::formats::BlockFormat;
use structures_plugin_api::sdk::forms::{names, statistics, variants};

use crate::boundary::Boundary;
use crate::forms::Leaf;

/// A number format of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As given: weights and activations widened to f32, packed rows of a checkpoint where they are
    /// used.
    F32,
    /// bf16 weights, activations rounded to bf16 where a product reads them; sums in f32.
    Bf16,
    /// The same for packs alone, under the name a structural profile asks for.
    Bf16Pack,
    /// int8 weights, one scale per output channel; activations as they come.
    W8a16Static,
    /// NVFP4 weights; activations as they come.
    W4a16Static,
    /// int8 weights, one scale per output channel; int8 activations under a calibrated scale a
    /// point.
    W8a8Static,
    /// int8 weights; int8 activations under a scale a row, found in the call.
    W8a8Dynamic,
    /// E4M3 weights under one scale a packed tensor, E4M3 activations under a calibrated scale a
    /// point; the codes' values are multiplied and summed in f32, the two scales applied once.
    Fp8Static,
    /// NVFP4 weights; NVFP4 activations, their scales found in the call.
    Nvfp4Dynamic,
    /// The same on balanced channels: weights are packed times the factors, activations divided by
    /// them.
    Nvfp4Balance,
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
}

impl Format {
    /// Every format that a structure of products offers.
    pub const ALL: [Format; 7] = [
        Format::F32,
        Format::Bf16,
        Format::W8a16Static,
        Format::W4a16Static,
        Format::W8a8Static,
        Format::W8a8Dynamic,
        Format::Fp8Static,
    ];

    /// Tolerances are what bind parity may show against the reference on equally rounded operands
    /// at an f32 boundary. Measured in `tests/parity.rs`, and once at D 2048, F 8192, 64 rows:
    /// under 1e-6 in every format whose activations come as they are. The others declare more: an
    /// intermediate that differs in its last bit may fall on the other side of a code's edge, and
    /// then differs by a whole step, up to 1/8 of it in E4M3 and 1/2 in E2M1. One such value among
    /// the 768 of a small FFN's single row moves the output by 2e-3 in E4M3, a large one by 5e-3.
    fn row(self) -> Row {
        let row = |name, format, weights, activations, statistic, tolerance, rank| Row {
            name,
            format,
            weights,
            activations,
            statistic,
            tolerance,
            rank,
        };
        use WeightFormat::{Bf16, Fp8PerTensor, Int8PerChannel, None as Given, Nvfp4};
        let point = Some(("none", "tensor"));
        let tensor = Some(("amax", "tensor"));
        let channel = Some(("amax", "channel"));
        match self {
            Format::F32 => row("f32", "none", Given, "none", None, 1e-4, 0),
            Format::Bf16 => row("bf16", "bf16", Bf16, "bf16", point, 1e-3, 5),
            Format::Bf16Pack => row("bf16_pack", "bf16_pack", Bf16, "bf16", point, 1e-3, 5),
            Format::W8a16Static => {
                let name = "w8a16_static";
                row(name, name, Int8PerChannel, "none", None, 1e-4, 10)
            }
            Format::W8a8Static => {
                let name = "w8a8_static";
                row(name, name, Int8PerChannel, "int8", tensor, 1e-2, 16)
            }
            Format::W8a8Dynamic => {
                let (name, format) = ("w8a8_dynamic", "w8a8_static");
                row(name, format, Int8PerChannel, "int8", point, 1e-2, 15)
            }
            Format::Fp8Static => {
                let name = "fp8_static";
                row(name, name, Fp8PerTensor, "e4m3", tensor, 1e-2, 20)
            }
            Format::W4a16Static => {
                let name = "w4a16_static";
                row(name, name, Nvfp4, "none", None, 1e-4, 30)
            }
            Format::Nvfp4Dynamic => {
                let name = "nvfp4_dynamic";
                row(name, name, Nvfp4, "nvfp4", point, 5e-2, 41)
            }
            Format::Nvfp4Balance => {
                let name = "nvfp4_balance";
                row(name, name, Nvfp4, "nvfp4", channel, 5e-2, 40)
            }
        }
    }

    /// How weights are kept.
    pub fn weights(self) -> WeightFormat {
        self.row().weights
    }

    /// Name of the format activations are rounded through.
    pub fn activations(self) -> &'static str {
        self.row().activations
    }

    /// Whether activations are rounded under one calibrated scale a point.
    pub fn calibrated(self) -> bool {
        self.row().statistic == Some(("amax", "tensor"))
    }

    /// Whether channels are balanced before packing.
    pub fn balances(self) -> bool {
        self == Format::Nvfp4Balance
    }

    /// The declaration of a structure's form in this format.
    pub fn declare(self, leaf: &Leaf) -> FormDecl {
        let row = self.row();
        let mut decl = FormDecl::new(leaf.structure, row.name, row.format);
        decl.spec_versions = leaf.versions.to_vec();
        decl.spans = names(leaf.spans);
        decl.dtypes = names(&Boundary::NAMES);
        decl.variants = variants(leaf.variants);
        decl.weight_format = row.weights;
        if leaf.packed && self == Format::F32 {
            decl.packed = BlockFormat::ALL.to_vec();
        }
        // Whole blocks along it: 16 values share a scale.
        for symbol in leaf.blocked {
            if matches!(self, Format::Nvfp4Dynamic | Format::Nvfp4Balance) {
                let whole = DimBand {
                    min: 16,
                    max: u64::MAX,
                    multiple_of: 16,
                };
                decl.band.dims.insert((*symbol).into(), whole);
            }
        }
        // Placed on the simulated device, which notes a call and makes it when it is launched.
        decl.capture = true;
        (decl.precision_rank, decl.tolerance) = (row.rank, row.tolerance);
        decl.quantises = !matches!(row.weights, WeightFormat::None | WeightFormat::Bf16);
        decl.rounds = (row.weights == WeightFormat::Bf16).then(|| "bf16".into());
        decl.balances = self.balances();
        let ends = |end: &str, ports: &[&str]| -> Vec<String> {
            let one = |port: &&str| format!("{end}:{port}:{WIRE_FP8_E4M3}");
            ports.iter().map(one).collect()
        };
        match self {
            Format::F32 => decl.wires = ends("emits", leaf.emits),
            Format::Fp8Static => decl.wires = ends("accepts", leaf.accepts),
            _ => {}
        }
        decl.statistics = statistics(leaf.content, "content", "tensor");
        if let Some((statistic, granularity)) = row.statistic {
            decl.activation_format = row.activations.into();
            decl.statistics
                .extend(statistics(leaf.points, statistic, granularity));
            // Elsewhere there is nothing to quantise under; rounding to 16 bits is left out there.
            for (axis, value) in leaf
                .points_under
                .iter()
                .filter(|_| row.activations != "bf16")
            {
                decl.variants.insert((*axis).into(), vec![(*value).into()]);
            }
        }
        if matches!(
            row.weights,
            WeightFormat::Fp8PerTensor | WeightFormat::Nvfp4
        ) {
            decl.scale_groups = leaf.scale_groups.iter().map(|group| names(group)).collect();
        }
        decl
    }
}
