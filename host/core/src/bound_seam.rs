//! From a binding's seam to a seam of the catalog: both sides know only slots, paths and layouts.

use structures_catalog::spec::ConstFill;
use structures_catalog::Spec;
use structures_graph::{Layout, ModuleTree};
use structures_models::{ExtraSeam, ExtraWeight, StoredLayout};
use structures_seams::{seam_from_binding, BoundSeam, Refusal, Seam, SlotWeight, WeightAddress};

/// The seam, or why the model contradicts the binding.
pub fn seam(spec: &Spec, tree: &ModuleTree, extra: &ExtraSeam) -> Result<Seam, Refusal> {
    let weights = extra.weights.iter().map(|(slot, weight)| {
        let source = match weight {
            ExtraWeight::Zeros => SlotWeight::Const {
                fill: ConstFill::Zeros,
            },
            ExtraWeight::Ones => SlotWeight::Const {
                fill: ConstFill::Ones,
            },
            ExtraWeight::Param { param, layout } => SlotWeight::Stored(WeightAddress {
                path: param.path.clone(),
                name: param.name.clone(),
                layout: match layout {
                    StoredLayout::OutIn | StoredLayout::OutInNative => Layout::OutIn,
                },
                rows: param.rows,
                reshape: None,
                hint: false,
            }),
        };
        (slot.clone(), source)
    });
    let bound = BoundSeam {
        path: extra.path.clone(),
        weights: weights.collect(),
        dims: extra
            .dims
            .iter()
            .map(|(k, v)| (k.clone(), *v as u64))
            .collect(),
        variant: extra.variant.clone(),
    };
    seam_from_binding(tree, spec, &bound)
}
