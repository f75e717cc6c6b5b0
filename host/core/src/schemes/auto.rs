//! `auto`: the fastest profile this device can execute, from what loaded plugins declare and probe.
//!
//! One table, one function. A failed probe counts as absent; a plugin that is a yardstick counts for nothing,
//! since it executes every format slowly.

use std::collections::BTreeSet;

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
    /// Whether the device executes it natively ([`native`]).
    pub native: bool,
    /// Where no probe succeeded: code and reason of the first.
    pub refused: Option<String>,
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
    let mut missed = Vec::new();
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
    }
    Auto {
        profile: OTHERWISE.to_string(),
        why: format!(
            "no loaded plugin executes {}{}",
            missed.join(" or "),
            refusals(capabilities)
        ),
    }
}

/// What the plugins that would execute a profile's format said instead, each once: a driver that is missing is no lack of
/// a plugin.
fn refusals(capabilities: &[Capability]) -> String {
    let wanted = |c: &&Capability| {
        let listed = TABLE.iter().any(|(_, format, _)| *format == c.format);
        listed && !c.probed && !c.reference
    };
    let said: BTreeSet<String> = capabilities
        .iter()
        .filter(wanted)
        .filter_map(|c| Some(format!("; {}: {}", c.plugin, c.refused.as_deref()?)))
        .collect();
    said.into_iter().collect()
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
            native: true,
            refused: None,
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
            ..can("fp8_static")
        };
        let yardstick = Capability {
            reference: true,
            ..can("fp8_static")
        };
        let emulated = Capability {
            native: false,
            ..can("fp8_static")
        };
        assert_eq!(profile(&[failed, yardstick.clone(), emulated]), "none");
        assert_eq!(profile(&[]), "none");
        // What a plugin said instead is said, once, and a yardstick's is not.
        let absent = |format: &str| Capability {
            probed: false,
            refused: Some("driver_absent: no library".into()),
            ..can(format)
        };
        let silent = Capability {
            refused: Some("yardstick".into()),
            probed: false,
            ..yardstick
        };
        let why = auto(&[
            absent("fp8_static"),
            absent("w8a16_static"),
            absent("q"),
            silent,
        ])
        .why;
        assert!(
            why.ends_with("products; vendor: driver_absent: no library"),
            "{why}"
        );
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
