//! What a binding must know about a structure: names, sizes and stages, asked through a trait.
//!
//! The trait has two implementations: the catalog, and the catalog list that comes with the oracle, so that the
//! loader is judged against facts it did not read itself.

use indexmap::IndexMap;
use structures_catalog::spec::{DimExpr, Spec, Stage};
use structures_catalog::{Catalog, CatalogError, Kind};
use structures_graph::Layout;

/// Whoever knows structures.
pub trait Structures {
    /// One structure, the newest live version when none is pinned. The error is [`CatalogError::Unknown`] or
    /// [`CatalogError::Retired`].
    fn facts(&self, name: &str, version: Option<u32>) -> Result<Facts, CatalogError>;
}

/// Facts about one version of a structure.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u32,
    /// Region or pipeline.
    pub kind: Kind,
    /// Family of a pipeline, else empty.
    pub family: String,
    /// Stages of a pipeline.
    pub stages: Vec<StageFacts>,
    /// Regions a pipeline embeds.
    pub embedded: Vec<String>,
    /// Weight slots, repeats written out.
    pub slots: IndexMap<String, SlotFacts>,
    /// Symbols of inputs and slots.
    pub symbols: Vec<String>,
    /// Axis -> values.
    pub axes: IndexMap<String, Vec<String>>,
    /// Calibration points.
    pub points: Vec<String>,
}

/// Facts about a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageFacts {
    /// Its name.
    pub name: String,
    /// A host may be without it.
    pub optional: bool,
    /// What it gives; empty where that is not known.
    pub outputs: Vec<String>,
}

/// Facts about a weight slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotFacts {
    /// Dims in the slot's order.
    pub dims: Vec<DimExpr>,
    /// `in_out` or `out_in`.
    pub layout: Layout,
    /// Whether it must be given.
    pub needed: bool,
}

impl SlotFacts {
    /// The dim that counts output rows: what a row range of a stored `[out, in]` tensor cuts.
    pub fn rows(&self) -> Option<&DimExpr> {
        match (self.dims.as_slice(), self.layout) {
            ([one], _) => Some(one),
            ([_, out], Layout::InOut) => Some(out),
            ([out, _], Layout::OutIn) => Some(out),
            _ => None,
        }
    }
}

impl Structures for Catalog {
    fn facts(&self, name: &str, version: Option<u32>) -> Result<Facts, CatalogError> {
        Ok(Facts::of(match version {
            Some(v) => self.get_version(name, v)?,
            None => self.get(name)?,
        }))
    }
}

fn stage(s: &Stage) -> StageFacts {
    StageFacts {
        name: s.name.clone(),
        optional: s.optional,
        outputs: s.outputs.iter().map(|o| o.name.clone()).collect(),
    }
}

impl Facts {
    /// Those of a loaded entry.
    pub fn of(spec: &Spec) -> Facts {
        let mut facts = Facts {
            name: spec.name.clone(),
            version: spec.version,
            kind: spec.kind,
            family: spec.family().unwrap_or_default().to_string(),
            stages: spec.stages().iter().map(stage).collect(),
            embedded: spec.embedded().to_vec(),
            slots: IndexMap::new(),
            symbols: Vec::new(),
            axes: spec
                .variants
                .iter()
                .map(|(axis, a)| (axis.clone(), a.values.keys().cloned().collect()))
                .collect(),
            points: spec.points.clone(),
        };
        for (source, needed) in spec.declared_sources() {
            facts.learn(&source.dims);
            source.more.iter().for_each(|dims| facts.learn(dims));
            if source.slot {
                let slot = SlotFacts {
                    dims: source.dims,
                    layout: source.layout,
                    needed,
                };
                facts.slots.insert(source.name, slot);
            }
        }
        for symbol in spec.symbols.keys() {
            facts.learn(&[DimExpr::Symbol(symbol.clone())]);
        }
        facts
    }

    /// Adds the symbols of some dims.
    pub fn learn(&mut self, dims: &[DimExpr]) {
        for dim in dims {
            let symbols = match dim {
                DimExpr::Literal(_) => Vec::new(),
                DimExpr::Symbol(s) => vec![s.clone()],
                DimExpr::Derived(e) => e.symbols(),
            };
            for s in symbols {
                if !self.symbols.contains(&s) {
                    self.symbols.push(s);
                }
            }
        }
    }
}
