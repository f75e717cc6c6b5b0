//! The demo model's own tree and graph: every seam is found, placed, and claims its operations.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use structures_catalog::Catalog;
use structures_graph::Layout;
use structures_models::{Bindings, Description, ExtraWeight, StoredLayout};
use structures_seams::{
    discover, resolve_ownership, seam_from_binding, BoundSeam, Claim, Located, Locator, SlotWeight,
    WeightAddress,
};

fn demo() -> Description {
    Description::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model")).unwrap()
}

fn bound(model: &Description) -> Vec<(String, BoundSeam)> {
    let bindings = Bindings::built_in().unwrap();
    let seams = model.extra_seams(&bindings).unwrap();
    let one = |w: ExtraWeight| match w {
        ExtraWeight::Param { param, layout } => SlotWeight::Stored(WeightAddress {
            path: param.path,
            name: param.name,
            layout: match layout {
                StoredLayout::OutIn | StoredLayout::OutInNative => Layout::OutIn,
            },
            rows: param.rows,
            reshape: None,
            hint: false,
        }),
        other => panic!("{other:?}"),
    };
    seams
        .into_iter()
        .map(|s| {
            let bound = BoundSeam {
                path: s.path,
                weights: s.weights.into_iter().map(|(k, w)| (k, one(w))).collect(),
                dims: s.dims.into_iter().map(|(k, n)| (k, n as u64)).collect(),
                variant: s.variant,
            };
            (s.structure, bound)
        })
        .collect()
}

#[test]
fn every_seam_of_the_demo_model_has_its_place() {
    let catalog = Catalog::builtin().unwrap();
    let model = demo();
    let mut found = discover(&model.tree, &catalog.newest());
    for (structure, one) in bound(&model) {
        let spec = catalog.get(&structure).unwrap();
        found
            .seams
            .push(seam_from_binding(&model.tree, spec, &one).unwrap());
    }
    assert!(found.refused.is_empty(), "{:?}", found.refused);
    let locator = Locator::new(&model.graph);
    let started = std::time::Instant::now();
    let all: Vec<Located> = found
        .seams
        .iter()
        .flat_map(|s| locator.locate(catalog.get(&s.structure).unwrap(), s))
        .collect();
    println!("{} seams placed in {:?}", all.len(), started.elapsed());
    for l in &all {
        assert!(
            l.refusal.is_none(),
            "{} {}: {:?}",
            l.seam.structure,
            l.seam.path,
            l.refusal
        );
        assert!(
            l.seam.assumptions.is_empty(),
            "{}: {:?}",
            l.seam.path,
            l.seam.assumptions
        );
    }
    let at = |structure: &'static str| all.iter().filter(move |l| l.seam.structure == structure);
    assert_eq!(at("decoder_ffn").count(), 2);
    assert!(at("decoder_ffn").all(|l| l.seam.spans == ["block", "ffn"]));
    assert_eq!(at("qkv_pack").count(), 2);
    let epilogue = |l: &Located| l.spans[0].axes["epilogue"].clone();
    assert!(at("linear_proj").all(|l| {
        let residual = l.seam.path.ends_with("o_proj");
        epilogue(l) == if residual { "residual_add" } else { "none" }
    }));
    assert_eq!(
        at("linear_proj")
            .filter(|l| l.seam.path == "lm_head")
            .count(),
        1
    );

    let claims: Vec<Claim> = all
        .iter()
        .enumerate()
        .map(|(seam, l)| Claim {
            seam,
            precedence: catalog.get(&l.seam.structure).unwrap().precedence,
            ops: l.spans[0].ops.clone(),
        })
        .collect();
    let owned = resolve_ownership(&claims);
    for o in &owned.losers {
        assert_eq!(all[o.seam].seam.structure, "linear_proj");
        assert_eq!(all[o.by].seam.structure, "qkv_pack");
    }
    let losers = at("linear_proj")
        .filter(|l| !l.seam.path.ends_with("o_proj"))
        .count()
        - 1;
    assert_eq!(owned.losers.len(), losers);
}
