//! A pipeline binding: the host's stages, their cadences, and who owns each part of the hot path.

use indexmap::IndexMap;
use structures_catalog::document::Node;
use structures_catalog::Place;

use crate::coverage::{self, Coverage};
use crate::error::BindingError;
use crate::facts::Facts;
use crate::host::{self, PipelineHost};
use crate::reader::Reader;
use crate::region::StructureRef;
use crate::rule::Rule;
use crate::stage::{self, Stage};
use crate::template::Template;

/// One pipeline binding.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineBinding {
    /// Its name.
    pub binding: String,
    /// The pipeline it binds.
    pub structure: StructureRef,
    /// Stage -> body, in the order of the file.
    pub stages: IndexMap<String, Stage>,
    /// Cadence -> stages.
    pub cadences: IndexMap<String, Vec<String>>,
    /// Who owns the hot path, when the file says it.
    pub coverage: Option<Coverage>,
    /// Host -> where the pipeline's object is.
    pub hosts: IndexMap<String, PipelineHost>,
    /// Where it stands.
    pub at: Place,
}

impl PipelineBinding {
    /// Whether the file says who owns the hot path.
    pub fn coverage_declared(&self) -> bool {
        self.coverage.is_some()
    }

    /// V-07.
    pub fn require_coverage(&self) -> Result<(), BindingError> {
        if self.coverage_declared() {
            return Ok(());
        }
        Err(BindingError::Invalid {
            at: self.at.clone(),
            path: "coverage".into(),
            rule: Rule::CoverageMissing,
            binding: self.binding.clone(),
            what: "complete coverage is asked for, and this binding declares none".into(),
        })
    }
}

const KEYS: &[&str] = &[
    "binding",
    "structure",
    "stages",
    "cadences",
    "coverage",
    "hosts",
    "replaces",
];

pub(crate) fn read(
    r: &Reader<'_>,
    root: &Node<'_>,
    at: Place,
    facts: &Facts,
    pinned: bool,
) -> Result<PipelineBinding, BindingError> {
    let under = |key: &str| root.value().get(key).map(|_| root.find(&[key]));
    let named = stage::names(r, root, under("stages").as_ref(), facts)?;
    let bound = |stage: &str| named.contains_key(stage);
    let coverage = under("coverage")
        .map(|n| coverage::read(r, &n, facts, &bound))
        .transpose()?;
    // Everything the specification numbers is behind us.
    let f = r.fields(root, KEYS, Rule::UnknownKey)?;
    let stages = stage::bodies(r, &named, facts)?;
    let cadences = f
        .get("cadences")
        .map_or(Ok(IndexMap::new()), |n| stage::cadences(r, n, &stages))?;
    let mut hosts = IndexMap::new();
    if let Some(n) = f.get("hosts") {
        for (name, n) in r.entries(n, Rule::HostEntry)? {
            let entry = host::of_pipeline(r, &name, &n)?;
            if entry
                .module_path
                .as_ref()
                .is_some_and(Template::has_instance)
            {
                let what = "a pipeline has one object, no instances";
                return Err(r.fail(&n, Rule::HostEntry, what));
            }
            hosts.insert(name, entry);
        }
    }
    Ok(PipelineBinding {
        binding: r.binding.clone(),
        structure: StructureRef::of(facts, pinned),
        stages,
        cadences,
        coverage,
        hosts,
        at,
    })
}
