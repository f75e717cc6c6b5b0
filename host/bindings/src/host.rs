//! One host of a binding: the path of the seam (or of the pipeline's object) and the versions it was seen on.

use structures_catalog::document::Node;

use crate::error::BindingError;
use crate::reader::{is_name, Reader};
use crate::region::template;
use crate::rule::Rule;
use crate::template::Template;

/// Where a region sits on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEntry {
    /// Path on the host's object.
    pub module_path: Template,
    /// A range (`>=4.51,<6`) or a label (`n1.6`).
    pub versions: Option<String>,
}

/// A host of a pipeline. Its stages carry their own seams, so it may be known by name alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PipelineHost {
    /// Path of the pipeline's object.
    pub module_path: Option<Template>,
    /// A range (`>=4.51,<6`) or a label (`n1.6`).
    pub versions: Option<String>,
}

/// One entry of a region's `hosts`.
pub(crate) fn of_region(
    r: &Reader<'_>,
    name: &str,
    n: &Node<'_>,
) -> Result<HostEntry, BindingError> {
    let host = of_pipeline(r, name, n)?;
    match host.module_path {
        Some(module_path) => Ok(HostEntry {
            module_path,
            versions: host.versions,
        }),
        None => Err(r.fail(n, Rule::HostEntry, "expected `module_path`, found none")),
    }
}

/// One entry of a pipeline's `hosts`.
pub(crate) fn of_pipeline(
    r: &Reader<'_>,
    name: &str,
    n: &Node<'_>,
) -> Result<PipelineHost, BindingError> {
    let rule = Rule::HostEntry;
    if !is_name(name) {
        let what = format!("expected a host's name of a-z, 0-9, `_`, `.`, `-`, found `{name}`");
        return Err(r.fail(n, rule, what));
    }
    let f = r.fields(n, &["module_path", "versions"], rule)?;
    let versions = match f.get("versions") {
        None => None,
        Some(n) => {
            let text = r.text(n, rule)?;
            if !is_range(&text) && !is_label(&text) {
                let what =
                    format!("expected a range such as `>=4.51,<6` or a label, found `{text}`");
                return Err(r.fail(n, rule, what));
            }
            Some(text)
        }
    };
    let path = f.get("module_path");
    Ok(PipelineHost {
        module_path: path.map(|n| template(r, n, rule)).transpose()?,
        versions,
    })
}

fn is_range(text: &str) -> bool {
    text.split(',').all(|part| {
        let part = part.trim();
        let signs = ["==", "!=", ">=", "<=", "~=", ">", "<"];
        let Some(version) = signs.iter().find_map(|s| part.strip_prefix(s)) else {
            return false;
        };
        let version = version.trim();
        let digits = |p: &str| !p.is_empty() && p.chars().all(|c| c.is_ascii_digit());
        version.split('.').all(digits)
    })
}

fn is_label(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._+-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_labels() {
        for good in [">=4.51,<6", ">= 0.5, <0.6", "==1.0", "n1.6", "0.5", "main"] {
            assert!(is_range(good) || is_label(good), "{good}");
        }
        for bad in [">=", ">=x", ">=1,", "<1..2", "any version", "", "~1"] {
            assert!(!is_range(bad) && !is_label(bad), "{bad}");
        }
    }
}
