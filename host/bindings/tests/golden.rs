//! The bindings of the repository: manifests as golden files, and what the specification counts.
//!
//! `STRUCTURES_UPDATE_GOLDEN=1` writes the golden files anew.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use std::collections::BTreeSet;
use std::path::PathBuf;

use structures_bindings::manifest::forbidden_key;
use structures_bindings::{Binding, Bindings, Classification, LoopSteps, RegionBinding};
use structures_catalog::Catalog;

fn bindings() -> Bindings {
    Bindings::built_in(&Catalog::builtin().unwrap()).unwrap()
}

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

#[test]
fn manifests_are_the_golden_ones() {
    let update = std::env::var_os("STRUCTURES_UPDATE_GOLDEN").is_some();
    let bindings = bindings();
    let mut names = BTreeSet::new();
    for listed in bindings.list(None) {
        let file = golden().join(format!("{}.json", listed.name));
        let manifest = format!("{:#}\n", listed.binding.manifest());
        names.insert(file.clone());
        if update {
            std::fs::write(&file, &manifest).unwrap();
        }
        let kept = std::fs::read_to_string(&file).unwrap_or_default();
        let how = "STRUCTURES_UPDATE_GOLDEN=1 writes the golden files anew";
        assert!(manifest == kept, "{}: {how}\n{manifest}", file.display());
    }
    let kept: BTreeSet<PathBuf> = std::fs::read_dir(golden())
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert_eq!(kept, names, "a golden file of no binding");
}

#[test]
fn manifests_choose_no_hardware() {
    for listed in bindings().list(None) {
        assert_eq!(
            forbidden_key(&listed.binding.manifest()),
            None,
            "{}",
            listed.name
        );
    }
}

/// Control, host_stage, state_region, structure segments of each pipeline; `None` without coverage.
#[allow(clippy::type_complexity)] // a table
const COUNTS: &[(&str, Option<[usize; 4]>)] = &[
    ("cosmos3_video_pipeline", Some([1, 4, 3, 4])),
    ("groot_n16_pipeline", Some([1, 2, 3, 7])),
    ("groot_n16_tick", None),
    ("groot_n17_pipeline", Some([1, 1, 4, 8])),
    ("lingbot_vla_pipeline", Some([1, 2, 3, 7])),
    ("motus_tick", Some([1, 4, 4, 7])),
    ("nexn2_pipeline", Some([3, 6, 2, 5])),
    ("pi05_tick", Some([1, 1, 2, 7])),
    ("qwen36_27b_pipeline", Some([4, 4, 2, 8])),
    ("qwen3_8b_pipeline", Some([2, 5, 2, 4])),
    ("qwen3_vl_8b_pipeline", Some([2, 4, 2, 10])),
    ("smolvla_pipeline", Some([1, 2, 3, 5])),
    ("smolvla_tick", None),
    ("wan22_video_pipeline", Some([2, 6, 2, 6])),
];

#[test]
fn segments_are_as_many_as_the_specification_counts() {
    let bindings = bindings();
    let mut found = Vec::new();
    for listed in bindings.list(None) {
        let Binding::Pipeline(p) = listed.binding else {
            continue;
        };
        let counts = p.coverage.as_ref().map(|c| {
            assert!(
                c.segments.iter().all(|s| s.hot),
                "{}: every segment is hot",
                listed.name
            );
            let of = |class| {
                c.segments
                    .iter()
                    .filter(|s| s.classification == class)
                    .count()
            };
            [
                of(Classification::Control),
                of(Classification::HostStage),
                of(Classification::StateRegion),
                of(Classification::Structure),
            ]
        });
        found.push((listed.name, counts));
    }
    assert_eq!(found, COUNTS);
}

#[test]
fn pipelines_without_coverage_are_refused_where_it_is_asked_for() {
    let bindings = bindings();
    for (name, counts) in COUNTS {
        let with = bindings.load_binding(name, true).map(|_| ());
        match counts {
            Some(_) => with.unwrap(),
            None => {
                assert!(bindings.load_binding(name, false).is_ok());
                assert_eq!(with.unwrap_err().rule().unwrap().sub_code(), "V-07");
            }
        }
    }
}

fn region<'a>(bindings: &'a Bindings, name: &str) -> &'a RegionBinding {
    match bindings.load_binding(name, false).unwrap() {
        Binding::Region(r) => r,
        other => panic!("{name} is a {}", other.kind()),
    }
}

/// The points that the specification left open, as they were decided.
#[test]
fn open_points_are_decided() {
    let bindings = bindings();
    // The modulated norm has no weight of its own; names and modules have different roots.
    let pi05 = region(&bindings, "pi05");
    let map = &pi05.weights_map["transformers"];
    assert_eq!(map.host_root.as_ref().unwrap().as_str(), "model");
    assert_eq!(map.slots["w_norm"].source.template(), None);
    let gate = map.slots["w_gate"].source.template().unwrap();
    let path = &pi05.hosts["lerobot"].module_path;
    assert_eq!(
        format!("model.{}", gate.at(3)),
        format!("{}.mlp.gate_proj.weight", path.at(3))
    );
    assert!(pi05.conditioning.as_ref().unwrap().residual_gate);
    // An identity norm is said by the variant; there are no constant slots.
    let dit = region(&bindings, "groot_n16_dit");
    assert_eq!(dit.variant["norm_affine"], "identity");
    let slots: Vec<&String> = dit.weights_map["isaac_gr00t"].slots.keys().collect();
    assert_eq!(slots, ["w_fc1", "b_fc1", "w_fc2", "b_fc2"]);
    // Loops.
    let steps = |name: &str, stage: &str| match bindings.load_binding(name, false).unwrap() {
        Binding::Pipeline(p) => p.stages[stage].loop_steps.clone(),
        _ => None,
    };
    assert_eq!(
        steps("groot_n16_tick", "action_denoise"),
        Some(LoopSteps::Count(4))
    );
    let asked = LoopSteps::Path("pipeline.dims.num_inference_steps".into());
    assert_eq!(steps("motus_tick", "action_denoise"), Some(asked));
}

/// 13 regions, 14 pipelines, and the families of the native builders with their heads.
#[test]
fn the_list_is_sorted_and_filtered_by_structure() {
    let bindings = bindings();
    let all = bindings.list(None);
    assert!(all.is_sorted_by_key(|l| l.name));
    let kinds = |kind: &str| all.iter().filter(|l| l.binding.kind() == kind).count();
    let families: Vec<_> = all
        .iter()
        .filter(|l| l.binding.kind() == "family")
        .collect();
    let in_family = |file: &str| families.iter().any(|f| f.file.name == file);
    let own = all
        .iter()
        .filter(|l| l.binding.kind() == "region" && !in_family(&l.file.name))
        .count();
    assert_eq!((own, kinds("pipeline")), (13, 14));
    assert!(families.len() >= 2);
    let names: Vec<&str> = bindings
        .list(Some("vision_ffn"))
        .iter()
        .map(|l| l.name)
        .collect();
    let expected = [
        "groot_n16_dit",
        "groot_n16_vision",
        "pi05_vision",
        "qwen3_vl_8b_vision",
        "smolvla_vision",
    ];
    assert_eq!(names, expected);
    assert!(bindings.list(Some("nothing")).is_empty());
}

/// Loading all of them is a small part of starting the program.
#[test]
fn loading_is_quick() {
    let structures = Catalog::builtin().unwrap();
    let started = std::time::Instant::now();
    let bindings = Bindings::built_in(&structures).unwrap();
    let took = started.elapsed();
    println!("{} files in {took:?}", bindings.files().len());
    assert!(took < std::time::Duration::from_millis(500), "{took:?}");
}
