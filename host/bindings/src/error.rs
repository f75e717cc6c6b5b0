//! What can be wrong with a binding: it is not there, it breaks a rule, its file cannot be read.

use structures_catalog::{CatalogError, Place};

use crate::rule::Rule;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindingError {
    /// No binding of this name.
    #[error("binding `{name}` is not there{}", near(nearest))]
    Unknown {
        /// What was asked for.
        name: String,
        /// What exists and looks like it.
        nearest: Vec<String>,
    },
    /// A document, or what it says about a model, breaks a rule.
    #[error("{at}: {path}: {rule}: {}{what}", subject(binding))]
    Invalid {
        /// Where.
        at: Place,
        /// Path of the item in the document.
        path: String,
        /// Which rule.
        rule: Rule,
        /// Name of the binding, once it is known.
        binding: String,
        /// Expected and found.
        what: String,
    },
    /// A file or a directory cannot be read.
    #[error("{path}: {reason}")]
    Unreadable {
        /// Which.
        path: String,
        /// Why, and what to do.
        reason: String,
    },
}

fn near(nearest: &[String]) -> String {
    match nearest {
        [] => String::new(),
        names => format!("; nearest: {}", names.join(", ")),
    }
}

fn subject(binding: &str) -> String {
    match binding {
        "" => String::new(),
        name => format!("binding `{name}`: "),
    }
}

impl BindingError {
    /// Stable identifier of the reason.
    pub fn code(&self) -> &'static str {
        match self {
            BindingError::Unknown { .. } => "binding_unknown",
            BindingError::Invalid { .. } => "binding_invalid",
            BindingError::Unreadable { .. } => "binding_unreadable",
        }
    }

    /// The rule, when one is broken.
    pub fn rule(&self) -> Option<Rule> {
        match self {
            BindingError::Invalid { rule, .. } => Some(*rule),
            _ => None,
        }
    }

    /// The place, when there is a document.
    pub fn place(&self) -> Option<&Place> {
        match self {
            BindingError::Invalid { at, .. } => Some(at),
            _ => None,
        }
    }

    /// A name that another file has.
    pub fn name_taken(name: &str, at: &Place, other: &str) -> Self {
        BindingError::Invalid {
            at: at.clone(),
            path: "binding".into(),
            rule: Rule::NameTwice,
            binding: name.into(),
            what: format!("`{name}` is taken already, at {other}; rename one"),
        }
    }

    /// A fault the catalog's document layer found, under a rule of ours.
    pub(crate) fn under(rule: Rule, binding: &str, e: CatalogError) -> Self {
        match e {
            CatalogError::Invalid { at, path, what } => BindingError::Invalid {
                at,
                path,
                rule,
                binding: binding.into(),
                what,
            },
            CatalogError::Io { path, reason } => BindingError::Unreadable { path, reason },
            // Nothing else comes from reading a document.
            other => BindingError::Unreadable {
                path: binding.into(),
                reason: other.to_string(),
            },
        }
    }
}
