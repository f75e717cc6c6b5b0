//! The demo model's own tree and graph: every seam is found, placed, and claims its operations.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use structures_catalog::Catalog;
use structures_graph::Layout;
use structures_models::Description;
use structures_seams::{
    discover, resolve_ownership, seam_from_binding, BoundSeam, Claim, Located, Locator, SlotWeight,
    WeightAddress,
};

fn demo() -> Description {
    Description::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model")).unwrap()
}

/// What the family's binding says about the output head.
fn head(model: &Description) -> BoundSeam {
    let param = model.params.resolve("lm_head", "weight").unwrap();
    let weight = SlotWeight::Stored(WeightAddress {
        path: param.path,
        name: param.name,
        layout: Layout::OutIn,
        rows: None,
        reshape: None,
        hint: false,
    });
    let sizes = [
        ("K", model.config.hidden_size),
        ("N", model.config.vocab_size),
    ];
    let words = [("bias", "none"), ("epilogue", "none")];
    BoundSeam {
        path: "lm_head".into(),
        weights: [("w".to_string(), weight)].into_iter().collect(),
        dims: sizes
            .map(|(k, n)| (k.into(), n as u64))
            .into_iter()
            .collect(),
        variant: words
            .map(|(k, v)| (k.into(), v.into()))
            .into_iter()
            .collect(),
    }
}

#[test]
fn every_seam_of_the_demo_model_has_its_place() {
    let catalog = Catalog::builtin().unwrap();
    let model = demo();
    let mut found = discover(&model.tree, &catalog.newest());
    let spec = catalog.get("linear_proj").unwrap();
    found
        .seams
        .push(seam_from_binding(&model.tree, spec, &head(&model)).unwrap());
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
    let lost = |structure: &str| {
        let of = owned.losers.iter();
        of.filter(|o| all[o.seam].seam.structure == structure)
            .count()
    };
    // A block is what is around its sublayers' own structures: it comes back only where they end without a form.
    assert_eq!(lost("decoder_block"), 2);
    for o in &owned.losers {
        match all[o.seam].seam.structure.as_str() {
            "decoder_block" => {}
            "linear_proj" => assert_eq!(all[o.by].seam.structure, "qkv_pack"),
            other => panic!("{other} lost"),
        }
    }
    let losers = at("linear_proj")
        .filter(|l| !l.seam.path.ends_with("o_proj"))
        .count()
        - 1;
    assert_eq!(lost("linear_proj"), losers);
}

/// A family with a norm in front of its feed-forward and one behind it: the graph says which one feeds it.
#[test]
fn the_norm_in_front_of_a_feed_forward_is_the_graphs() {
    let catalog = Catalog::builtin().unwrap();
    let spec = catalog.get("decoder_ffn").unwrap();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families/gemma3");
    let model = Description::open(&dir).unwrap();
    let locator = Locator::new(&model.graph);
    let found = discover(&model.tree, &[spec]);
    assert!(!found.seams.is_empty());
    for seam in &found.seams {
        let l = locator.locate(spec, seam).remove(0);
        let norm = l.seam.weights["w_norm"].stored().unwrap();
        let want = format!("{}.pre_feedforward_layernorm", seam.parent);
        assert_eq!(norm.path, want);
        assert!(l.seam.assumptions.iter().all(|a| a.about != "w_norm"));
    }
}
