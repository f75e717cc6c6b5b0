//! Architecture declarations against a device, as a pure function.
//!
//! The plugin's own declaration is the only table; nothing here knows a device by name. A CPU declaration is an
//! instruction set with the features that must all be there (`x86_64+avx512vnni+avx512bf16`). A GPU declaration is
//! `sm_<major><minor>`, the minor being the last digit: plain serves the same major at its minor or above (machine
//! code does not cross a major); `+PTX` adds everything equal or higher (the driver compiles); `a` serves exactly
//! that capability, `f` the same major at its minor or above, each with or without `+PTX`. An empty list keeps the
//! legacy load path; one malformed entry and the plugin is not admitted.

use std::collections::BTreeSet;
use std::fmt;

use crate::code::{Code, Refusal};

/// Instruction sets that may be declared, as `std::env::consts::ARCH` spells them.
const CPU_SETS: &[&str] = &["x86_64", "aarch64", "riscv64"];

/// One declared architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Declared {
    /// Instruction set and the features it needs.
    Cpu {
        /// `x86_64`, `aarch64`, ...
        set: String,
        /// All must be present.
        features: Vec<String>,
    },
    /// Compute capability.
    Sm {
        /// Family.
        major: u32,
        /// Within the family.
        minor: u32,
        /// What the suffix says.
        reach: Reach,
        /// Carries code the driver can compile for later capabilities.
        ptx: bool,
    },
}

/// How far a compute-capability declaration reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// No suffix: same major, this minor or above.
    Plain,
    /// `a`: exactly this capability.
    Exact,
    /// `f`: same family.
    Family,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// A CPU with its features.
    Cpu {
        /// As `std::env::consts::ARCH`.
        set: String,
        /// Names as `std::arch` feature detection spells them.
        features: BTreeSet<String>,
    },
    /// A GPU, real or simulated, by compute capability.
    Sm {
        /// Family.
        major: u32,
        /// Within the family.
        minor: u32,
    },
}

impl Declared {
    /// Reads one declaration.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("sm_") {
            return parse_sm(rest).ok_or_else(|| {
                format!("`{text}`: expected sm_<major><minor>[a|f][+PTX], two or three digits")
            });
        }
        let mut parts = text.split('+');
        let set = parts.next().unwrap_or_default();
        if !CPU_SETS.contains(&set) {
            return Err(format!("`{text}`: expected sm_<N> or one of {CPU_SETS:?}"));
        }
        let features: Vec<String> = parts.map(str::to_string).collect();
        let named = |f: &String| {
            !f.is_empty()
                && f.bytes().all(|b| {
                    b.is_ascii_lowercase()
                        || b.is_ascii_digit()
                        || b == b'.'
                        || b == b'_'
                        || b == b'-'
                })
        };
        if !features.iter().all(named) {
            return Err(format!("`{text}`: expected feature names after `+`"));
        }
        Ok(Declared::Cpu {
            set: set.to_string(),
            features,
        })
    }

    /// Whether it is about CPUs.
    pub fn is_cpu(&self) -> bool {
        matches!(self, Declared::Cpu { .. })
    }

    /// Whether it serves `device`.
    pub fn serves(&self, device: &Device) -> bool {
        match (self, device) {
            (
                Declared::Cpu { set, features },
                Device::Cpu {
                    set: own,
                    features: have,
                },
            ) => set == own && features.iter().all(|f| have.contains(f)),
            (
                &Declared::Sm {
                    major,
                    minor,
                    reach,
                    ptx,
                },
                &Device::Sm {
                    major: device_major,
                    minor: device_minor,
                },
            ) => {
                let same_family = major == device_major && minor <= device_minor;
                match reach {
                    Reach::Plain if ptx => (major, minor) <= (device_major, device_minor),
                    Reach::Plain | Reach::Family => same_family,
                    Reach::Exact => (major, minor) == (device_major, device_minor),
                }
            }
            _ => false,
        }
    }
}

impl Device {
    /// Reads a device as it would be declared: `sm_120`, or a CPU with everything it has (`x86_64+avx2+fma`).
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn parse(text: &str) -> Result<Self, String> {
        match Declared::parse(text)? {
            Declared::Cpu { set, features } => Ok(Device::Cpu {
                set,
                features: features.into_iter().collect(),
            }),
            Declared::Sm {
                major,
                minor,
                reach: Reach::Plain,
                ptx: false,
            } => Ok(Device::Sm { major, minor }),
            Declared::Sm { major, minor, .. } => Err(format!(
                "`{text}`: expected a device, found a declaration; write sm_{major}{minor}"
            )),
        }
    }

    /// The device in the words of a declaration.
    pub fn arch(&self) -> String {
        match self {
            Device::Cpu { set, features } => {
                features.iter().fold(set.clone(), |text, f| text + "+" + f)
            }
            Device::Sm { major, minor } => format!("sm_{major}{minor}"),
        }
    }

    /// The CPU this process runs on.
    pub fn host_cpu() -> Self {
        Device::Cpu {
            set: std::env::consts::ARCH.to_string(),
            features: host_features().iter().map(|f| (*f).to_string()).collect(),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu { set, features } if features.is_empty() => write!(f, "{set}"),
            Device::Cpu { set, features } => {
                let features: Vec<&str> = features.iter().map(String::as_str).collect();
                write!(f, "{set} with {}", features.join(", "))
            }
            Device::Sm { major, minor } => write!(f, "sm_{major}{minor}"),
        }
    }
}

/// Admits `plugin` on `device` by its declarations. No device: the check is skipped, and binding fails later with
/// its own reason.
///
/// # Errors
/// `arch_malformed` for a declaration that cannot be read (on any device), `arch_not_declared` when none serves
/// `device`; both name the plugin, everything it declares, and the device.
pub fn admit(plugin: &str, archs: &[String], device: Option<&Device>) -> Result<(), Refusal> {
    let declared = parse_all(plugin, archs)?;
    match device {
        Some(device) if !archs.is_empty() && !declared.iter().any(|d| d.serves(device)) => {
            Err(not_declared(plugin, archs, device))
        }
        _ => Ok(()),
    }
}

/// The same at load time, when the only device known is the CPU: a plugin that declares other devices too is
/// judged on those when it is bound.
///
/// # Errors
/// As [`admit`].
pub fn admit_at_load(plugin: &str, archs: &[String], cpu: &Device) -> Result<(), Refusal> {
    let declared = parse_all(plugin, archs)?;
    let only_cpu = !declared.is_empty() && declared.iter().all(Declared::is_cpu);
    if only_cpu && !declared.iter().any(|d| d.serves(cpu)) {
        return Err(not_declared(plugin, archs, cpu));
    }
    Ok(())
}

fn parse_all(plugin: &str, archs: &[String]) -> Result<Vec<Declared>, Refusal> {
    archs
        .iter()
        .map(|a| Declared::parse(a))
        .collect::<Result<_, _>>()
        .map_err(|why| {
            Code::ArchMalformed.because(format!(
                "plugin {plugin} declares [{}]: {why}",
                archs.join(", ")
            ))
        })
}

fn not_declared(plugin: &str, archs: &[String], device: &Device) -> Refusal {
    let lacking = lacking(archs, device);
    Code::ArchNotDeclared.because(format!(
        "plugin {plugin} declares [{}], the device is {device}{}",
        archs.join(", "),
        if lacking.is_empty() {
            String::new()
        } else {
            format!("; it lacks {}", lacking.join(", "))
        }
    ))
}

/// What a CPU of the right instruction set lacks, by the declaration it is closest to.
fn lacking(archs: &[String], device: &Device) -> Vec<String> {
    let Device::Cpu {
        set: own,
        features: have,
    } = device
    else {
        return Vec::new();
    };
    archs
        .iter()
        .filter_map(|a| match Declared::parse(a) {
            Ok(Declared::Cpu { set, features }) if set == *own => Some(features),
            _ => None,
        })
        .map(|features| features.into_iter().filter(|f| !have.contains(f)).collect())
        .min_by_key(Vec::len)
        .unwrap_or_default()
}

fn parse_sm(rest: &str) -> Option<Declared> {
    let (rest, ptx) = match rest.strip_suffix("+PTX") {
        Some(rest) => (rest, true),
        None => (rest, false),
    };
    let (digits, reach) = match rest.as_bytes().last()? {
        b'a' => (&rest[..rest.len() - 1], Reach::Exact),
        b'f' => (&rest[..rest.len() - 1], Reach::Family),
        _ => (rest, Reach::Plain),
    };
    let ok = (2..=3).contains(&digits.len())
        && digits.bytes().all(|b| b.is_ascii_digit())
        && !digits.starts_with('0');
    let number: u32 = ok.then(|| digits.parse().ok())??;
    Some(Declared::Sm {
        major: number / 10,
        minor: number % 10,
        reach,
        ptx,
    })
}

#[cfg(target_arch = "x86_64")]
fn host_features() -> Vec<&'static str> {
    macro_rules! present {
        ($($name:tt),* $(,)?) => {
            [$(($name, std::arch::is_x86_feature_detected!($name)),)*]
                .into_iter().filter_map(|(name, on)| on.then_some(name)).collect()
        };
    }
    present![
        "sse",
        "sse2",
        "sse3",
        "ssse3",
        "sse4.1",
        "sse4.2",
        "popcnt",
        "lzcnt",
        "movbe",
        "aes",
        "pclmulqdq",
        "sha",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "bmi1",
        "bmi2",
        "gfni",
        "vaes",
        "vpclmulqdq",
        "avx512f",
        "avx512cd",
        "avx512dq",
        "avx512bw",
        "avx512vl",
        "avx512ifma",
        "avx512vbmi",
        "avx512vbmi2",
        "avx512vnni",
        "avx512bf16",
        "avx512bitalg",
        "avx512vpopcntdq",
        "avx512fp16",
        "avxvnni",
        "avxifma",
        "avxneconvert",
        "avxvnniint8",
        "avxvnniint16",
    ]
}

#[cfg(target_arch = "aarch64")]
fn host_features() -> Vec<&'static str> {
    macro_rules! present {
        ($($name:tt),* $(,)?) => {
            [$(($name, std::arch::is_aarch64_feature_detected!($name)),)*]
                .into_iter().filter_map(|(name, on)| on.then_some(name)).collect()
        };
    }
    present!["neon", "fp16", "dotprod", "bf16", "i8mm", "sve", "sve2"]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn host_features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sm(text: &str) -> Device {
        match Declared::parse(text) {
            Ok(Declared::Sm { major, minor, .. }) => Device::Sm { major, minor },
            other => panic!("{other:?}"),
        }
    }

    fn outcome(archs: &str, device: &str) -> Option<Code> {
        let archs: Vec<String> = archs.split_whitespace().map(str::to_string).collect();
        admit("p", &archs, Some(&sm(device))).err().map(|r| r.code)
    }

    /// The table of the specification, line by line: declared, device, result.
    #[test]
    fn b_350_b_351_b_352_b_353_b_354_b_355_b_356_b_357_the_table_of_capabilities() {
        let refused = Some(Code::ArchNotDeclared);
        for (id, archs, device, expected) in [
            ("B-350", "sm_120", "sm_120", None),
            ("B-350", "sm_120", "sm_121", None),
            ("B-351", "sm_120", "sm_110", refused),
            ("B-352", "sm_90", "sm_120", refused),
            ("B-353", "sm_121", "sm_120", refused),
            ("B-354", "sm_90+PTX", "sm_120", None),
            ("B-354", "sm_120+PTX", "sm_120", None),
            ("B-354", "sm_120+PTX", "sm_121", None),
            ("B-354", "sm_120+PTX", "sm_110", refused),
            ("B-355", "sm_120a", "sm_120", None),
            ("B-355", "sm_120a+PTX", "sm_120", None),
            ("B-355", "sm_120a", "sm_121", refused),
            ("B-355", "sm_120a+PTX", "sm_121", refused),
            ("B-355", "sm_90a+PTX", "sm_120", refused),
            ("B-356", "sm_12x", "sm_120", Some(Code::ArchMalformed)),
            (
                "B-356",
                "sm_120 sm_12x",
                "sm_120",
                Some(Code::ArchMalformed),
            ),
            ("B-357", "", "sm_75", None),
            ("family", "sm_100f", "sm_100", None),
            ("family", "sm_100f", "sm_103", None),
            ("family", "sm_103f", "sm_100", refused),
            ("family", "sm_120f", "sm_121", None),
            ("family", "sm_100f", "sm_110", refused),
            ("family", "sm_100f+PTX", "sm_103", None),
            ("family", "sm_100f+PTX", "sm_120", refused),
            ("any of a list", "sm_90 sm_120", "sm_121", None),
            ("any of a list", "sm_90a sm_80+PTX", "sm_120", None),
            ("another kind", "x86_64", "sm_90", refused),
        ] {
            assert_eq!(
                outcome(archs, device),
                expected,
                "{id}: [{archs}] on {device}"
            );
        }
    }

    #[test]
    fn b_356_malformed_is_not_admitted_on_any_device() {
        for bad in [
            "sm_",
            "sm_9",
            "sm_1200",
            "sm_12x",
            "sm_090",
            "sm_90A",
            "sm_90+ptx",
            "sm_90+PTX+PTX",
            "12.0",
            "sm90",
            "",
            "x86",
            "x86_64+",
            "x86_64++avx2",
            "x86_64+AVX2",
            "gfx942",
            "sm_90aa",
            " sm_90",
        ] {
            let archs = vec!["sm_90".to_string(), bad.to_string()];
            for device in [None, Some(sm("sm_90"))] {
                let refusal = admit("p", &archs, device.as_ref()).expect_err(bad);
                assert_eq!(refusal.code, Code::ArchMalformed, "{bad}");
            }
        }
    }

    #[test]
    fn b_358_no_device_skips_the_check() {
        assert_eq!(admit("p", &["sm_90".to_string()], None), Ok(()));
    }

    #[test]
    fn cpu_features_must_all_be_there() {
        let cpu = Device::Cpu {
            set: "x86_64".into(),
            features: ["avx2", "fma"].map(str::to_string).into(),
        };
        let load = |archs: &str| {
            let archs: Vec<String> = archs.split_whitespace().map(str::to_string).collect();
            admit_at_load("p", &archs, &cpu).err().map(|r| r.code)
        };
        let refused = Some(Code::ArchNotDeclared);
        assert_eq!(load(""), None);
        assert_eq!(load("x86_64"), None);
        assert_eq!(load("x86_64+avx2+fma"), None);
        assert_eq!(load("x86_64+avx512f x86_64+fma"), None, "any of a list");
        assert_eq!(load("x86_64+avx2+avx512vnni"), refused);
        assert_eq!(load("x86_64+not_a_feature"), refused);
        assert_eq!(load("aarch64"), refused);
        assert_eq!(load("aarch64 x86_64+avx2"), None);
        assert_eq!(load("sm_90"), None, "judged when it is bound");
        assert_eq!(load("aarch64 sm_90"), None, "judged when it is bound");
        assert_eq!(load("avx2"), Some(Code::ArchMalformed));
    }

    #[test]
    fn devices_are_written_like_declarations() {
        for text in ["sm_120", "x86_64", "x86_64+avx2+fma", "aarch64+neon"] {
            assert_eq!(Device::parse(text).map(|d| d.arch()).as_deref(), Ok(text));
        }
        for bad in ["sm_120a", "sm_90+PTX", "cuda", ""] {
            assert!(Device::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_a_cpu_lacks_is_said() {
        let cpu = Device::parse("x86_64+avx2+fma").expect("device");
        let archs = [
            "x86_64+avx512f+avx512vnni".to_string(),
            "x86_64+avx2+avx512bf16".to_string(),
        ];
        let text = admit("p", &archs, Some(&cpu)).expect_err("refused").reason;
        assert!(text.ends_with("it lacks avx512bf16"), "{text}");
    }

    #[test]
    fn b_359_a_refusal_names_plugin_list_and_device() {
        let archs = ["sm_90".to_string(), "sm_100a".to_string()];
        let text = admit("vendor_x", &archs, Some(&sm("sm_120")))
            .expect_err("refused")
            .reason;
        for part in ["vendor_x", "sm_90, sm_100a", "sm_120"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn this_cpu_serves_its_own_instruction_set() {
        let own = vec![std::env::consts::ARCH.to_string()];
        assert_eq!(admit_at_load("p", &own, &Device::host_cpu()), Ok(()));
    }
}
