//! The kernel files, which kernels each has, and for which architectures they are compiled.
//!
//! One list for the backend, for `cargo xtask check-cuda` and for the tests on the CPU.

use crate::compiler::Source;

/// What the files include.
pub const HEADERS: &[(&str, &str)] = &[
    ("common.cuh", include_str!("../cu/common.cuh")),
    ("product.cuh", include_str!("../cu/product.cuh")),
];

/// One file of kernels.
#[derive(Debug)]
pub struct File {
    /// Without the ending; the structure it serves, or `operations`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Kernels by name.
    pub singles: &'static [&'static str],
    /// Products, each in every shape.
    pub products: &'static [&'static str],
}

/// Every file.
pub const FILES: &[File] = &[
    File {
        name: "linear_proj",
        text: include_str!("../cu/linear_proj.cu"),
        singles: &["linear_proj_operand"],
        products: &["linear_proj"],
    },
    File {
        name: "qkv_pack",
        text: include_str!("../cu/qkv_pack.cu"),
        singles: &["qkv_pack_operand"],
        products: &["qkv_pack"],
    },
    File {
        name: "decoder_ffn",
        text: include_str!("../cu/decoder_ffn.cu"),
        singles: &["decoder_ffn_operand", "decoder_ffn_norm"],
        products: &["decoder_ffn_hidden", "decoder_ffn_down"],
    },
    File {
        name: "norm_fused",
        text: include_str!("../cu/norm_fused.cu"),
        singles: &["norm_fused_layer"],
        products: &[],
    },
    File {
        name: "operations",
        text: include_str!("../cu/operations.cu"),
        singles: &[
            "operation_pair",
            "operation_rows",
            "operation_rms_norm",
            "operation_append",
            "operation_copy",
            "operation_argmax",
        ],
        products: &[],
    },
];

/// Architectures of kernels that use nothing of one generation alone. The driver could compile them for later ones;
/// so can NVRTC, which is what `+PTX` promises here.
pub const GENERIC: &[&str] = &[
    "sm_80+PTX",
    "sm_86",
    "sm_89",
    "sm_90a",
    "sm_100a",
    "sm_120a",
];
/// Architectures of kernels that multiply E4M3: tensor cores do from 8.9 on.
pub const FP8: &[&str] = &["sm_89", "sm_90a", "sm_100a", "sm_120a"];
/// Architectures whose warpgroups multiply what lies in shared memory: `wgmma` is of this one alone.
pub const WARPGROUPS: &[&str] = &["sm_90a"];

/// What the kernels of a file depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Products of E4M3.
    pub e4m3: bool,
    /// Products of warpgroups.
    pub warpgroups: bool,
}

impl Abilities {
    /// All there are: those of the tests on the CPU.
    pub const ALL: Self = Abilities {
        e4m3: true,
        warpgroups: true,
    };

    /// Those of a target such as `sm_90a`.
    pub fn of(target: &str) -> Self {
        Abilities {
            e4m3: FP8.contains(&target),
            warpgroups: WARPGROUPS.contains(&target),
        }
    }
}

const SHAPES: &[&str] = &["tile128", "tile32", "plain"];
const ROWS: &[&str] = &[
    "rows16", "rows32", "rows64", "rows16x3", "rows32x3", "rows64x3",
];

impl File {
    /// What NVRTC gets.
    pub fn source(&self) -> Source<'static> {
        Source {
            name: self.name,
            text: self.text,
            headers: HEADERS,
        }
    }

    /// Every kernel of the file on an architecture of these abilities.
    pub fn kernels(&self, abilities: Abilities) -> Vec<String> {
        let mut all: Vec<String> = self.singles.iter().map(|s| (*s).to_string()).collect();
        for product in self.products {
            let operands: &[&str] = match abilities.e4m3 {
                true => &["bf16", "e4m3"],
                false => &["bf16"],
            };
            for operand in operands {
                all.extend(
                    SHAPES
                        .iter()
                        .chain(abilities.warpgroups.then_some(&"wgmma"))
                        .map(|shape| format!("{product}_{operand}_{shape}")),
                );
            }
            all.extend(ROWS.iter().map(|rows| format!("{product}_int8_{rows}")));
            all.push(format!("{product}_end"));
        }
        all
    }

    /// Kernels whose header allows registers to spill: `// spills: NAME, NAME` lines of the text.
    pub fn spills(&self) -> Vec<&'static str> {
        let lines = self.text.lines();
        lines
            .filter_map(|line| line.trim().strip_prefix("// spills:"))
            .flat_map(|names| names.split(','))
            .map(str::trim)
            .collect()
    }
}

/// What NVRTC is asked to compile for on a device: the name with `a` where declared so, plain elsewhere.
pub fn target(capability: (u32, u32)) -> String {
    let plain = format!("sm_{}{}", capability.0, capability.1);
    let exact = format!("{plain}a");
    match GENERIC.contains(&exact.as_str()) {
        true => exact,
        false => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_compiled_for_as_declared() {
        assert_eq!(target((9, 0)), "sm_90a");
        assert_eq!(target((12, 0)), "sm_120a");
        assert_eq!(target((8, 7)), "sm_87");
        assert_eq!(target((12, 1)), "sm_121");
    }

    #[test]
    fn what_is_listed_is_what_is_written() {
        for file in FILES {
            for single in file.singles {
                let defined = format!("__global__ void {single}(");
                assert!(file.text.contains(&defined), "{single}");
            }
            for product in file.products {
                assert!(
                    file.text.contains(&format!("PRODUCTS({product}, ")),
                    "{product}"
                );
            }
            let kernels =
                file.text.matches("__global__").count() + file.text.matches("\nPRODUCTS(").count();
            assert_eq!(
                kernels,
                file.singles.len() + file.products.len(),
                "{}",
                file.name
            );
            let unknown: Vec<_> = file
                .spills()
                .into_iter()
                .filter(|name| !file.kernels(Abilities::ALL).iter().any(|k| k == name))
                .collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
    }

    #[test]
    fn architectures_without_e4m3_have_no_kernel_of_it() {
        for arch in FP8 {
            assert!(GENERIC.contains(arch));
        }
        assert!(!FP8
            .iter()
            .any(|arch| arch.starts_with("sm_80") || *arch == "sm_86"));
        let of = |arch: &str| FILES[0].kernels(Abilities::of(arch));
        let kernels = of("sm_86");
        assert!(!kernels.iter().any(|k| k.contains("e4m3")));
        assert_eq!(of("sm_89").len(), kernels.len() + 3);
        let wgmma: Vec<_> = of("sm_90a")
            .into_iter()
            .filter(|k| k.ends_with("_wgmma"))
            .collect();
        assert_eq!(wgmma, ["linear_proj_bf16_wgmma", "linear_proj_e4m3_wgmma"]);
        assert!(!of("sm_100a").iter().any(|k| k.ends_with("_wgmma")));
    }
}
