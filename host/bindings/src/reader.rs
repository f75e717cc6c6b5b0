//! Reading a document under the name of its binding: every fault becomes a rule at a place.
//!
//! Text is trimmed and never blank here; what a field means is the business of the modules that ask for it.

use structures_catalog::document::{Fields, Node};
use structures_catalog::{selects_hardware, CatalogError};

use crate::error::BindingError;
use crate::facts::{Facts, Structures};
use crate::rule::Rule;

type Result<T> = std::result::Result<T, BindingError>;

/// What every part of a document is read with.
pub(crate) struct Reader<'a> {
    /// Who knows structures.
    pub structures: &'a dyn Structures,
    /// Name of the binding; empty before it is known.
    pub binding: String,
}

impl Reader<'_> {
    /// A fault of a value.
    pub fn fail(&self, at: &Node<'_>, rule: Rule, what: impl Into<String>) -> BindingError {
        BindingError::Invalid {
            at: at.place(),
            path: at.path(),
            rule,
            binding: self.binding.clone(),
            what: what.into(),
        }
    }

    /// A fault of a key.
    pub fn fail_key(&self, of: &Node<'_>, key: &str, rule: Rule, what: String) -> BindingError {
        let path = match of.path().as_str() {
            "document" => key.to_string(),
            path => format!("{path}.{key}"),
        };
        BindingError::Invalid {
            at: of.key_place(key),
            path,
            rule,
            binding: self.binding.clone(),
            what,
        }
    }

    /// The document layer's fault, under a rule.
    pub fn under<T>(&self, rule: Rule, r: std::result::Result<T, CatalogError>) -> Result<T> {
        r.map_err(|e| BindingError::under(rule, &self.binding, e))
    }

    /// Text, trimmed and not blank.
    pub fn text(&self, node: &Node<'_>, rule: Rule) -> Result<String> {
        let text = self.under(rule, node.text())?.trim();
        if text.is_empty() {
            return Err(self.fail(node, rule, "expected a text, found a blank one"));
        }
        Ok(text.into())
    }

    /// Text under a key that must be there.
    pub fn need(&self, f: &Fields<'_>, key: &str, rule: Rule) -> Result<String> {
        self.text(self.under(rule, f.need(key))?, rule)
    }

    /// A mapping with only these keys.
    pub fn fields<'n>(&self, node: &Node<'n>, keys: &[&str], rule: Rule) -> Result<Fields<'n>> {
        self.under(rule, node.fields(keys))
    }

    /// Keys, trimmed and not blank, each once, with their values.
    pub fn entries<'n>(&self, node: &Node<'n>, rule: Rule) -> Result<Vec<(String, Node<'n>)>> {
        let mut all: Vec<(String, Node<'n>)> = Vec::new();
        for (key, value) in self.under(rule, node.entries())? {
            let name = key.trim();
            if name.is_empty() {
                return Err(self.fail_key(
                    node,
                    &key,
                    rule,
                    "expected a name, found blanks".into(),
                ));
            }
            if all.iter().any(|(k, _)| k == name) {
                let what = format!("`{name}` stands here twice");
                return Err(self.fail_key(node, &key, rule, what));
            }
            all.push((name.into(), value));
        }
        Ok(all)
    }

    /// Elements of a list that is not empty.
    pub fn items<'n>(&self, node: &Node<'n>, rule: Rule) -> Result<Vec<Node<'n>>> {
        let items = self.under(rule, node.items())?;
        if items.is_empty() {
            return Err(self.fail(node, rule, "expected a list, found an empty one"));
        }
        Ok(items)
    }

    /// One of some words.
    pub fn one_of(&self, node: &Node<'_>, words: &[&str], rule: Rule) -> Result<String> {
        let found = self.text(node, rule)?;
        if words.contains(&found.as_str()) {
            return Ok(found);
        }
        let what = format!("expected one of {}, found `{found}`", words.join(", "));
        Err(self.fail(node, rule, what))
    }

    /// A structure by `NAME` or `NAME@VERSION`, and whether it is pinned.
    pub fn structure(&self, node: &Node<'_>, word: &str) -> Result<(Facts, bool)> {
        let (name, version) = match word.split_once('@') {
            None => (word, None),
            Some((name, v)) => match v.parse::<u32>() {
                Ok(v) if v > 0 => (name, Some(v)),
                _ => {
                    let what = format!("expected NAME or NAME@VERSION, found `{word}`");
                    return Err(self.fail(node, Rule::InvalidPin, what));
                }
            },
        };
        let facts = self.find(node, name, version, Rule::UnknownStructure)?;
        Ok((facts, version.is_some()))
    }

    /// A structure by name and version; `missing` is the rule for one that is not there.
    pub fn find(
        &self,
        node: &Node<'_>,
        name: &str,
        version: Option<u32>,
        missing: Rule,
    ) -> Result<Facts> {
        self.structures.facts(name, version).map_err(|e| {
            let rule = match e {
                CatalogError::Retired { .. } => Rule::RetiredStructure,
                _ => missing,
            };
            self.fail(node, rule, e.to_string())
        })
    }

    /// Refuses keys that would choose hardware or kernels, anywhere below (B-013).
    pub fn forbidden(&self, node: &Node<'_>) -> Result<()> {
        if node.value().is_mapping() {
            for (key, value) in self.under(Rule::Field, node.entries())? {
                if selects_hardware(&key) {
                    let what = format!("`{key}`: a binding never chooses hardware or kernels");
                    return Err(self.fail_key(node, &key, Rule::ForbiddenKey, what));
                }
                self.forbidden(&value)?;
            }
        } else if node.value().is_sequence() {
            for item in self.under(Rule::Field, node.items())? {
                self.forbidden(&item)?;
            }
        }
        Ok(())
    }
}

/// `^[a-z0-9][a-z0-9_.-]*$`
pub(crate) fn is_name(name: &str) -> bool {
    let start = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let rest = |c: char| start(c) || matches!(c, '_' | '.' | '-');
    name.starts_with(start) && name.chars().all(rest)
}
