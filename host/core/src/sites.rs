//! From a model to sites: seams found in its tree or given by its binding, placed in its graph.

use structures_catalog::{Catalog, Kind, Spec};
use structures_graph::{Graph, ModuleTree};
use structures_seams::{Located, LocatedSpan, Locator, Refusal, Seam};

use crate::receipt::RefusalNote;

/// A seam with its spec and the spans that hold there.
pub struct Site<'c> {
    /// The structure.
    pub spec: &'c Spec,
    /// The seam, corrected by the graph.
    pub seam: Seam,
    /// Spans that hold, widest first. Never empty.
    pub spans: Vec<LocatedSpan>,
    /// Why wider spans fell, and what the graph corrected.
    pub notes: Vec<String>,
}

impl Site<'_> {
    /// `key|point`, what statistics are filed under.
    pub fn point_key(&self, point: &str) -> String {
        format!("{}|{point}", self.seam.key)
    }

    /// Unique among all sites: structures may share a path.
    pub fn id(&self) -> String {
        format!("{}:{}", self.spec.name, self.seam.key)
    }
}

/// What a model offers.
#[derive(Default)]
pub struct Survey<'c> {
    /// Placed seams, module order.
    pub sites: Vec<Site<'c>>,
    /// Everything passed over, with its stage.
    pub refused: Vec<RefusalNote>,
}

/// A structure with this tag is a step that a caller takes by name, never one that a survey of everything takes.
const EXPLICIT: &str = "explicit";

/// Discovers and locates. `only` keeps the named structures; an empty list keeps all but those that want a name.
pub fn survey<'c>(
    catalog: &'c Catalog,
    tree: &ModuleTree,
    graph: &Graph,
    bound: Vec<Seam>,
    only: &[String],
) -> Survey<'c> {
    let specs: Vec<&Spec> = catalog
        .newest()
        .into_iter()
        .filter(|s| s.kind == Kind::Region)
        .filter(|s| match only {
            [] => s.tags.iter().all(|t| t != EXPLICIT),
            named => named.contains(&s.name),
        })
        .collect();
    let discovery = structures_seams::discover(tree, &specs);
    let mut survey = Survey::default();
    survey
        .refused
        .extend(discovery.refused.iter().map(|r| note("discover", r)));
    let locator = Locator::new(graph);
    let seams = discovery.seams.into_iter().chain(bound);
    for seam in seams {
        // A binding may pin an older version than discovery walks.
        let wanted = only.is_empty() || only.contains(&seam.structure);
        let Ok(spec) = catalog.get_version(&seam.structure, seam.version) else {
            continue;
        };
        if !wanted {
            continue;
        }
        for located in locator.locate(spec, &seam) {
            survey.push(spec, located);
        }
    }
    for spec in specs
        .iter()
        .filter(|s| s.slots.as_ref().is_none_or(|s| !s.at_module))
    {
        for located in locator.locate_anchored(spec) {
            survey.push(spec, located);
        }
    }
    survey
}

/// Discovers in a tree that has no graph: nothing is located, and nothing can be bound.
pub fn discover_tree(
    catalog: &Catalog,
    tree: &ModuleTree,
    only: &[String],
) -> (Vec<Seam>, Vec<RefusalNote>) {
    let specs: Vec<&Spec> = catalog
        .newest()
        .into_iter()
        .filter(|s| s.kind == Kind::Region && (only.is_empty() || only.contains(&s.name)))
        .collect();
    let discovery = structures_seams::discover(tree, &specs);
    let refused = discovery
        .refused
        .iter()
        .map(|r| note("discover", r))
        .collect();
    (discovery.seams, refused)
}

impl<'c> Survey<'c> {
    fn push(&mut self, spec: &'c Spec, located: Located) {
        let mut notes: Vec<String> = located.corrections;
        for fallen in &located.fallen {
            let span = fallen.span.as_deref().unwrap_or("?");
            notes.push(format!(
                "span `{span}` does not hold: {} ({})",
                fallen.reason, fallen.code
            ));
        }
        match located.refusal {
            Some(refusal) => self.refused.push(note("locate", &refusal)),
            None => {
                self.sites.push(Site {
                    spec,
                    seam: located.seam,
                    spans: located.spans,
                    notes,
                });
            }
        }
    }
}

/// A refusal in the receipt's words.
pub fn note(stage: &str, refusal: &Refusal) -> RefusalNote {
    let mut reason = refusal.reason.clone();
    if let (Some(expected), Some(found)) = (&refusal.expected, &refusal.found) {
        // Most reasons say it in a sentence already.
        let told = reason.contains(expected.as_str()) && reason.contains(found.as_str());
        if !told {
            reason.push_str(&format!(" (expected {expected}, found {found})"));
        }
    }
    RefusalNote {
        path: refusal.path.clone(),
        structure: refusal.structure.clone(),
        stage: stage.into(),
        code: refusal.code.clone(),
        reason,
        plugin: None,
        form: None,
    }
}
