//! Profiles by name. The last registration of a name wins.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{
    auto, profiles, Capability, Fp8Static, KeepOutliers, NoQuantisation, Scheme, SchemeError, AUTO,
};

/// Registered profiles.
#[derive(Clone)]
pub struct Registry {
    schemes: BTreeMap<String, Arc<dyn Scheme>>,
}

/// A chosen profile.
#[derive(Clone)]
pub struct Selected {
    /// The profile.
    pub scheme: Arc<dyn Scheme>,
    /// Why it was chosen, when `auto` chose it.
    pub auto: Option<String>,
}

impl std::fmt::Debug for Selected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Selected")
            .field("scheme", &self.scheme.name())
            .field("auto", &self.auto)
            .finish()
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::builtin()
    }
}

impl Registry {
    /// The profiles that come with the host.
    pub fn builtin() -> Self {
        let mut registry = Self {
            schemes: BTreeMap::new(),
        };
        registry.register(Arc::new(NoQuantisation));
        registry.register(Arc::new(Fp8Static));
        registry.register(Arc::new(KeepOutliers::default()));
        for profile in profiles() {
            registry.register(Arc::new(profile));
        }
        registry
    }

    /// Adds a profile; one of the same name is replaced.
    pub fn register(&mut self, scheme: Arc<dyn Scheme>) {
        self.schemes.insert(scheme.name().to_string(), scheme);
    }

    /// Registered names, sorted, `auto` included.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.schemes.keys().cloned().collect();
        if !self.schemes.contains_key(AUTO) {
            names.push(AUTO.to_string());
            names.sort();
        }
        names
    }

    /// The profiles, in order of name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Scheme>> {
        self.schemes.values()
    }

    /// A profile by its own name.
    ///
    /// # Errors
    /// `NotFound`, listing what is registered.
    pub fn get(&self, name: &str) -> Result<Arc<dyn Scheme>, SchemeError> {
        let found = self.schemes.get(name).cloned();
        found.ok_or_else(|| SchemeError::NotFound {
            name: name.to_string(),
            registered: self.names(),
        })
    }

    /// A profile by name, `auto` resolved by what this device can execute.
    ///
    /// # Errors
    /// `NotFound`, listing what is registered.
    pub fn select(&self, name: &str, capabilities: &[Capability]) -> Result<Selected, SchemeError> {
        if name != AUTO || self.schemes.contains_key(AUTO) {
            return Ok(Selected {
                scheme: self.get(name)?,
                auto: None,
            });
        }
        let choice = auto(capabilities);
        Ok(Selected {
            scheme: self.get(&choice.profile)?,
            auto: Some(choice.why),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Decision, Seam, Want};
    use super::*;

    struct Mine;

    impl Scheme for Mine {
        fn name(&self) -> &str {
            "fp8_static"
        }
        fn summary(&self) -> &str {
            "mine"
        }
        fn statistics(&self, _: &Seam) -> Vec<Want> {
            vec![]
        }
        fn decide(&self, report: &[Seam]) -> Vec<Decision> {
            vec![Decision::Default; report.len()]
        }
    }

    #[test]
    fn b_100_an_unknown_name_lists_what_there_is() {
        let registry = Registry::builtin();
        let error = registry.get("fp9").err().unwrap();
        assert_eq!(error.code(), "scheme_unknown");
        let text = error.to_string();
        for name in ["fp9", "auto", "fp8_static", "none", "w8a16_decode"] {
            assert!(text.contains(name), "{text}");
        }
    }

    #[test]
    fn b_100_the_last_registration_wins() {
        let mut registry = Registry::builtin();
        registry.register(Arc::new(Mine));
        assert_eq!(registry.get("fp8_static").unwrap().summary(), "mine");
        assert_eq!(registry.names(), Registry::builtin().names());
        assert_eq!(registry.iter().count() + 1, registry.names().len());
    }

    #[test]
    fn every_profile_of_the_table_is_there() {
        let names = Registry::builtin().names();
        for name in [
            "auto",
            "bf16_dense",
            "bf16_structural",
            "fp8_static",
            "fp8_static_keep_outliers",
            "none",
            "nvfp4_awq",
            "nvfp4_balance",
            "nvfp4_balance_wire",
            "w4a16_decode",
            "w4a16_full",
            "w4a4_decode",
            "w4a4_decode_release",
            "w8a16_decode",
            "w8a8_static",
        ] {
            assert!(names.iter().any(|n| n == name), "{name}");
        }
        assert_eq!(names.len(), 15);
    }

    #[test]
    fn b_109_a_draft_head_is_bf16_unless_a_profile_says_otherwise() {
        struct Drafts;
        impl Scheme for Drafts {
            fn name(&self) -> &str {
                "drafts"
            }
            fn summary(&self) -> &str {
                "int8 draft heads"
            }
            fn statistics(&self, _: &Seam) -> Vec<Want> {
                vec![]
            }
            fn decide(&self, report: &[Seam]) -> Vec<Decision> {
                vec![Decision::Default; report.len()]
            }
            fn draft_head_format(&self) -> &str {
                "w8a16_static"
            }
        }
        let mut registry = Registry::builtin();
        assert!(registry.iter().all(|s| s.draft_head_format() == "bf16"));
        registry.register(Arc::new(Drafts));
        let mine = registry.get("drafts").unwrap();
        assert_eq!(mine.draft_head_format(), "w8a16_static");
    }

    #[test]
    fn b_102_auto_is_the_explicit_profile_and_says_so() {
        let registry = Registry::builtin();
        let able = Capability {
            refused: None,
            plugin: "p".into(),
            reference: false,
            format: "w8a16_static".into(),
            probed: true,
            native: true,
        };
        let auto = registry.select("auto", &[able]).unwrap();
        assert_eq!(auto.scheme.name(), "w8a16_decode");
        assert!(auto.auto.is_some());
        assert_eq!(registry.select("auto", &[]).unwrap().scheme.name(), "none");
        let explicit = registry.select("w8a16_decode", &[]).unwrap();
        assert!(explicit.auto.is_none());
        assert!(format!("{explicit:?}").contains("w8a16_decode"));
    }
}
