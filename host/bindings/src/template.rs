//! Dotted paths with `{i}`, the number of the instance.

/// A checked dotted path, `a.b.{i}.c`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Template(String);

/// What stands for the number of the instance.
pub const INSTANCE: &str = "{i}";

impl Template {
    /// Reads a path; the error says what was expected and found.
    pub(crate) fn parse(text: &str) -> Result<Template, String> {
        let good = |part: &str| {
            let plain = part.replace(INSTANCE, "0");
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            !plain.is_empty() && plain.chars().all(word)
        };
        match text.split('.').find(|part| !good(part)) {
            None => Ok(Template(text.into())),
            Some(part) if part.contains(['{', '}']) => Err(format!(
                "expected {INSTANCE} as the only placeholder, found `{part}`"
            )),
            Some(part) => Err(format!(
                "expected words joined by dots, found `{part}` in `{text}`"
            )),
        }
    }

    /// The path as written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it names another place for every instance.
    pub fn has_instance(&self) -> bool {
        self.0.contains(INSTANCE)
    }

    /// The path of one instance.
    pub fn at(&self, instance: u64) -> String {
        self.0.replace(INSTANCE, &instance.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_what_is_none() {
        let t = Template::parse("model.layers.{i}.mlp.fc_1.0").expect("path");
        assert!(t.has_instance());
        assert_eq!(t.at(12), "model.layers.12.mlp.fc_1.0");
        assert_eq!(Template::parse("h{i}.x").expect("path").at(3), "h3.x");
        for bad in [
            "", "a..b", ".a", "a.", "a b", "a.{j}.b", "a.{i", "a.{}.b", "a/b", "a.{{i}}",
        ] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
        let says = Template::parse("a.{layer}.b").expect_err("placeholder");
        assert!(says.contains("{i}") && says.contains("{layer}"), "{says}");
    }
}
