//! Judges any plugin against any structure: cases made from the entry alone, run through the loader, compared with
//! the entry's own reference.
//!
//! # Why it exists
//! The specification of a structure is data, so what a form of it must do can be generated: every span a form
//! declares, under every host axis and form axis it accepts, with every pattern of optional and repeated parts, at
//! sizes and row counts in and at the edges of its band. A backend adds nothing but a runner of a few lines and an
//! ignore list with reasons.
//!
//! # What it owns
//! - [`cases`]: what is tried with a form.
//! - [`judge`]: one case run, compared, and told as a [`Row`].
//! - [`executor`]: the plugin behind a small trait, so that a test can stand between and break something.
//! - [`ignore`]: the list of what a plugin is known not to do. A line that is no longer needed is a failure.
//!
//! # What it does not own
//! Sizes that satisfy an entry's constraints and patterns of optionals are the catalog's
//! ([`structures_catalog::verify`]); rounding through a format and bind parity are the host's
//! ([`structures::trial`]). It knows no structure and no plugin by name.

#![forbid(unsafe_code)]

pub mod cases;
mod error;
pub mod executor;
pub mod ignore;
pub mod judge;
pub mod operand;
pub mod random;

use structures_catalog::spec::Kind;
use structures_catalog::Catalog;
use structures_graph::OpKind;
use structures_plugin_api::describe::Description;

pub use error::SuiteError;
pub use executor::{Executor, Loaded};
pub use ignore::Ignores;
pub use judge::{Outcome, Row};

/// Judges every form of a plugin.
///
/// # Errors
/// Only when the suite itself cannot go on; whatever a plugin does is a row.
pub fn judge_all(executor: &dyn Executor, catalog: &Catalog) -> Result<Vec<Row>, SuiteError> {
    let mut rows = Vec::new();
    for form in &executor.description().forms {
        rows.extend(judge::form(executor, catalog, form)?);
    }
    Ok(rows)
}

/// A span that no form in a format declares.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gap {
    /// Structure.
    pub structure: String,
    /// Version.
    pub version: u32,
    /// Span.
    pub span: String,
}

/// Every span of every region, in every version, that no form of this format declares. Spans around modules of the
/// host are left out: a plugin cannot run the host.
///
/// # Errors
/// When an entry does not expand.
pub fn gaps(
    description: &Description,
    catalog: &Catalog,
    format: &str,
) -> Result<Vec<Gap>, SuiteError> {
    let mut gaps = Vec::new();
    for spec in catalog.list() {
        if spec.kind != Kind::Region {
            continue;
        }
        for span in &spec.dataflow.spans {
            let declared = description.forms.iter().any(|form| {
                let here =
                    form.structure == spec.name && form.spec_versions.contains(&spec.version);
                here && form.format == format && form.spans.contains(&span.name)
            });
            if !declared && !around_the_host(spec, &span.name)? {
                gaps.push(Gap {
                    structure: spec.name.clone(),
                    version: spec.version,
                    span: span.name.clone(),
                });
            }
        }
    }
    Ok(gaps)
}

/// Whether a span runs a module of the host, under whatever axes it exists.
fn around_the_host(spec: &structures_catalog::Spec, span: &str) -> Result<bool, SuiteError> {
    for axes in spec.host_axis_combinations() {
        let Ok(plain) = spec.expand(&axes, &|_| true) else {
            continue; // a combination that the entry does not have
        };
        let Some(span) = plain.span(span) else {
            continue;
        };
        let calls = |i: &usize| plain.ops[*i].kind == OpKind::Call;
        if plain.span_ops(span).iter().any(calls) {
            return Ok(true);
        }
    }
    Ok(false)
}
