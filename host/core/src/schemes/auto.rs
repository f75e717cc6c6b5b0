//! `auto`: the fastest profile this device can execute, from what loaded plugins declare and probe.
//!
//! One table, one function. A failed probe counts as absent; a plugin that is a yardstick counts for nothing,
//! since it executes every format slowly.

use serde::Serialize;

/// The name that asks for this choice.
pub const AUTO: &str = "auto";

/// Fastest first: profile, the format it needs natively, what that means.
const TABLE: [(&str, &str, &str); 2] = [
    ("fp8_static", "fp8_static", "native FP8"),
    ("w8a16_decode", "w8a16_static", "vector int8 products"),
];

/// Where nothing qualifies.
const OTHERWISE: &str = "none";

/// What one plugin can do with one format on this device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Plugin id; opaque here, for the why.
    pub plugin: String,
    /// A yardstick: does not count.
    pub reference: bool,
    /// Format.
    pub format: String,
    /// Whether a probe here succeeded.
    pub probed: bool,
    /// Code and reason of the last probe, where none did.
    pub refused: Option<String>,
    /// Whether the device executes it natively ([`native`]).
    pub native: bool,
}

/// The choice and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Auto {
    /// Profile.
    pub profile: String,
    /// For the receipt.
    pub why: String,
}

/// Chooses a profile.
pub fn auto(capabilities: &[Capability]) -> Auto {
    let (mut missed, mut refused) = (Vec::new(), Vec::new());
    for (profile, format, means) in TABLE {
        let able = capabilities
            .iter()
            .find(|c| c.format == format && c.probed && c.native && !c.reference);
        match able {
            Some(able) => {
                let why = format!("{} executes {format} with {means}", able.plugin);
                return Auto {
                    profile: profile.to_string(),
                    why,
                };
            }
            None => missed.push(format!("{format} with {means}")),
        }
        for c in capabilities
            .iter()
            .filter(|c| c.format == format && !c.probed && !c.reference)
        {
            let why = c
                .refused
                .as_ref()
                .map(|why| format!("; {}: {why}", c.plugin));
            refused.extend(why.filter(|why| !refused.contains(why)));
        }
    }
    let missed = missed.join(" or ");
    Auto {
        profile: OTHERWISE.to_string(),
        why: format!("no loaded plugin executes {missed}{}", refused.concat()),
    }
}

/// Whether a format is native, from the architectures that matched this device and the entries a probe found.
/// An accelerator has FP8 from compute capability 8.9 on; a CPU shows by its feature names.
pub fn native(format: &str, archs: &[String], entries_present: &[String]) -> bool {
    let capability = archs
        .iter()
        .filter_map(|arch| compute_capability(arch))
        .max();
    let words: Vec<String> = archs
        .iter()
        .flat_map(|a| a.split('+'))
        .chain(entries_present.iter().map(String::as_str))
        .map(|word| word.to_ascii_lowercase().replace(['-', '_', '.'], ""))
        .collect();
    let any = |known: &[&str]| words.iter().any(|w| known.contains(&w.as_str()));
    match format {
        "fp8_static" => capability >= Some(89) || any(&["nativefp8", "fp8native"]),
        "w8a16_static" => any(&[
            "vectorint8",
            "avx2",
            "avx512",
            "avx512f",
            "avx512bw",
            "avx512vnni",
            "avxvnni",
            "neon",
            "dotprod",
        ]),
        _ => false,
    }
}

/// `sm_90a`, `sm_120+PTX` -> 90, 120.
fn compute_capability(arch: &str) -> Option<u32> {
    let digits = arch.strip_prefix("sm_")?;
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    digits[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn can(format: &str) -> Capability {
        Capability {
            plugin: "vendor".into(),
            reference: false,
            format: format.into(),
            probed: true,
            refused: None,
            native: true,
        }
    }

    fn profile(list: &[Capability]) -> String {
        auto(list).profile
    }

    #[test]
    fn b_102_the_fastest_executable_profile_is_taken() {
        assert_eq!(
            profile(&[can("w8a16_static"), can("fp8_static")]),
            "fp8_static"
        );
        let cpu = auto(&[can("w8a16_static"), can("none")]);
        assert_eq!(cpu.profile, "w8a16_decode");
        assert!(
            cpu.why.contains("vendor") && cpu.why.contains("vector int8"),
            "{}",
            cpu.why
        );
        let nothing = auto(&[can("none")]);
        assert_eq!(nothing.profile, "none");
        assert!(nothing.why.contains("fp8_static"), "{}", nothing.why);
    }

    #[test]
    fn failed_probes_yardsticks_and_emulation_do_not_count() {
        let failed = Capability {
            probed: false,
            refused: Some("driver_absent: no driver".into()),
            ..can("fp8_static")
        };
        let twice = [
            failed.clone(),
            Capability {
                format: "w8a16_static".into(),
                ..failed.clone()
            },
        ];
        let why = auto(&twice).why;
        assert!(
            why.ends_with("products; vendor: driver_absent: no driver"),
            "{why}"
        );
        let yardstick = Capability {
            reference: true,
            ..can("fp8_static")
        };
        let emulated = Capability {
            native: false,
            ..can("fp8_static")
        };
        assert_eq!(profile(&[failed, yardstick, emulated]), "none");
        assert_eq!(profile(&[]), "none");
    }

    #[test]
    fn native_is_read_from_architectures_and_entries() {
        let is = |format: &str, archs: &[&str], entries: &[&str]| {
            let own = |list: &[&str]| list.iter().map(|s| (*s).to_string()).collect::<Vec<_>>();
            native(format, &own(archs), &own(entries))
        };
        for arch in ["sm_89", "sm_90a", "sm_120+PTX", "sm_100f"] {
            assert!(is("fp8_static", &[arch], &[]), "{arch}");
        }
        for arch in ["sm_80", "sm_86+PTX", "x86_64+avx512vnni", "sm_"] {
            assert!(!is("fp8_static", &[arch], &[]), "{arch}");
        }
        assert!(is("w8a16_static", &["x86_64"], &["avx512_vnni"]));
        assert!(is("w8a16_static", &["x86_64+avx2"], &[]));
        assert!(!is("w8a16_static", &["x86_64"], &["fma"]));
        assert!(is("fp8_static", &[], &["native_fp8"]));
        assert!(!is("nvfp4", &["sm_120"], &[]));
    }
}
