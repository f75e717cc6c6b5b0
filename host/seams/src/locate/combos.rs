//! Every combination of host axes and present optionals under which a structure is tried on a host.

use std::collections::{BTreeMap, BTreeSet};

use structures_catalog::Spec;

use crate::seam::{Seam, Source};

/// One combination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Combo {
    /// Host axis -> value.
    pub axes: BTreeMap<String, String>,
    /// Names of slots and optional inputs that are there.
    pub present: BTreeSet<String>,
    /// Agrees with everything the seam knows about its host axes.
    pub agrees: bool,
}

/// All combinations; those that agree with the seam first, then in declared order.
pub fn combos(spec: &Spec, seam: &Seam) -> Vec<Combo> {
    let mut axes = spec.host_axis_combinations();
    axes.sort_by_key(|a| {
        let differs = |known: bool| {
            a.iter()
                .filter(|(k, _)| seam.knows_axis(k) == known)
                .filter(|(k, v)| seam.variant.get(*k).is_some_and(|s| s != *v))
                .count()
        };
        (differs(true), differs(false))
    });
    let presence = presence(spec, seam);
    axes.into_iter()
        .flat_map(|axes| {
            let agrees = axes
                .iter()
                .all(|(k, v)| !seam.knows_axis(k) || seam.variant.get(k) == Some(v));
            presence.iter().map(move |present| Combo {
                axes: axes.clone(),
                present: present.clone(),
                agrees,
            })
        })
        .collect()
}

/// Sets of present names. Slots are as the seam says. Optional inputs (and, without a tree, optional slots) that an
/// op needs are tried both ways, together where one op needs several; the others are operands that the host may
/// lack, so they are always tried as present.
fn presence(spec: &Spec, seam: &Seam) -> Vec<BTreeSet<String>> {
    let from_tree = seam.source != Source::Graph;
    let mut fixed: BTreeSet<String> = seam.weights.keys().cloned().collect();
    for slot in &spec.weights {
        if slot.repeat.is_none() && (!slot.optional || !from_tree) {
            fixed.insert(slot.name.clone());
        }
    }
    let optional = |name: &str| {
        spec.inputs
            .iter()
            .any(|p| p.optional && (p.name == name || p.value == name))
            || (!from_tree && spec.weights.iter().any(|s| s.optional && s.name == name))
    };
    let mut groups: Vec<BTreeSet<String>> = Vec::new();
    for op in &spec.dataflow.ops {
        let mut group: BTreeSet<String> =
            op.needs.iter().filter(|n| optional(n)).cloned().collect();
        if group.is_empty() {
            continue;
        }
        groups.retain(|other| {
            let meets = !other.is_disjoint(&group);
            if meets {
                group.extend(other.iter().cloned());
            }
            !meets
        });
        groups.push(group);
    }
    for port in spec.inputs.iter().filter(|p| p.repeat.is_none()) {
        if groups.iter().all(|g| !g.contains(&port.name)) {
            fixed.insert(port.name.clone());
        }
    }
    for group in &groups {
        fixed.retain(|n| !group.contains(n));
    }
    let mut sets = vec![fixed];
    for group in groups {
        let with: Vec<_> = sets
            .iter()
            .map(|s| s.union(&group).cloned().collect::<BTreeSet<_>>())
            .collect();
        sets.extend(with);
    }
    sets
}
