//! Seams a family's binding names, for places no tree walk can know (an output head).

use indexmap::IndexMap;
use structures_catalog::spec::Spec;
use structures_graph::tree::{family_template, parent_path};
use structures_graph::ModuleTree;

use crate::dims::Solver;
use crate::discover::{self, stored_dims};
use crate::refusal::{code, Refusal};
use crate::roles::Candidate;
use crate::seam::{Seam, SlotWeight, Source};

/// What a binding says about one seam.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundSeam {
    /// Module path of the seam.
    pub path: String,
    /// Slot -> stored parameter or constant.
    pub weights: IndexMap<String, SlotWeight>,
    /// Sizes the binding states; the stored shapes must agree.
    pub dims: IndexMap<String, u64>,
    /// Axis values the binding states.
    pub variant: IndexMap<String, String>,
}

/// The seam a binding names, with dims from the stored shapes; a refusal when the tree contradicts it.
pub fn seam_from_binding(
    tree: &ModuleTree,
    spec: &Spec,
    bound: &BoundSeam,
) -> Result<Seam, Refusal> {
    let refuse = |code: &str, reason: String| Refusal::new(&bound.path, &spec.name, code, reason);
    let mut solver = Solver::new(&bound.dims);
    for (source, needed) in spec.declared_sources() {
        if !source.slot {
            continue;
        }
        let address = match bound.weights.get(&source.name) {
            Some(SlotWeight::Stored(address)) => address,
            Some(SlotWeight::Const { .. }) => continue,
            None if !needed => continue,
            None => {
                let reason = format!("the binding names no source for slot `{}`", source.name);
                return Err(refuse(code::SLOT_MISSING, reason));
            }
        };
        let Some(stored) = stored_dims(tree, address) else {
            let reason = format!(
                "slot `{}`: the model has no {}",
                source.name,
                address.param()
            );
            return Err(refuse(code::SLOT_MISSING, reason)
                .expected_found(address.param().to_string(), "nothing"));
        };
        solver.slot(&source, &stored, address.layout).map_err(|e| {
            let reason = format!(
                "slot `{}`: expected {}, found {}",
                e.name, e.expected, e.found
            );
            refuse(code::DIMS_INCONSISTENT, reason).expected_found(e.expected, e.found)
        })?;
    }
    solver.finish().map_err(|e| {
        let reason = format!(
            "slot `{}`: expected {}, found {}",
            e.name, e.expected, e.found
        );
        refuse(code::DIMS_INCONSISTENT, reason).expected_found(e.expected, e.found)
    })?;
    let unknown = bound.weights.keys().find(|slot| {
        spec.declared_sources()
            .iter()
            .all(|(s, _)| !s.slot || s.name != **slot)
    });
    if let Some(slot) = unknown {
        let reason = format!("the binding names `{slot}`, which is no slot of the structure");
        return Err(refuse(code::SLOT_MISSING, reason));
    }
    let mut variant = discover::defaults(spec);
    let mut open_axes = discover::open_defaults(spec);
    let facts = Candidate {
        tree,
        roles: IndexMap::new(),
        own: parent_path(&bound.path).into(),
        current: Some(bound.path.clone()),
        unseen: Vec::new(),
        dims: solver.known.iter().map(|(k, v)| (k.clone(), *v)).collect(),
    };
    for (axis, rule) in spec.slots.iter().flat_map(|s| &s.axis) {
        if let Some((value, fact)) = discover::axis_by_role(rule, &facts) {
            variant.insert(axis.clone(), value);
            open_axes.retain(|a| a != axis);
            if !fact {
                open_axes.push(axis.clone());
            }
        }
    }
    for (axis, value) in &bound.variant {
        let known = spec
            .variants
            .get(axis)
            .is_some_and(|a| a.values.contains_key(value));
        if !known {
            let reason = format!("the binding says {axis} = {value}, which the structure has not");
            return Err(refuse(code::AXIS_FOREIGN, reason));
        }
        variant.insert(axis.clone(), value.clone());
        open_axes.retain(|a| a != axis);
    }
    let (family, layer) = family_template(&bound.path);
    Ok(Seam {
        structure: spec.name.clone(),
        version: spec.version,
        path: bound.path.clone(),
        parent: parent_path(&bound.path).into(),
        key: bound.path.clone(),
        dims: facts.dims.clone(),
        variant: discover::in_declared_order(spec, variant),
        family,
        layer,
        source: Source::Binding,
        located: false,
        spans: Vec::new(),
        assumptions: Vec::new(),
        roles: IndexMap::new(),
        weights: bound.weights.clone(),
        open_axes,
    })
}
