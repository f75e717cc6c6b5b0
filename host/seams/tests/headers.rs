//! What headers alone show: the same models as module trees and as checkpoints of a family that nobody knows. Nothing
//! that a tree shows is passed over in silence.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{json, Map, Value};
use structures_catalog::Catalog;
use structures_graph::ModuleTree;
use structures_models::{Checkpoint, Description};
use structures_seams::{discover, Discovery, Seam};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn find(tree: &ModuleTree) -> Discovery {
    discover(tree, &Catalog::builtin().unwrap().newest())
}

/// A directory with this configuration and tensors of these shapes; the weights are holes.
fn headers(config: &Value, tensors: &[(String, Vec<u64>)]) -> ModuleTree {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut at = 0;
    let mut header = Map::new();
    for (name, shape) in tensors {
        let end = at + shape.iter().product::<u64>() * 2;
        header.insert(
            name.clone(),
            json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}),
        );
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut file = std::fs::File::create(dir.path().join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + at).unwrap();
    Checkpoint::open(dir.path()).unwrap().outline()
}

fn named(config: Value, tensors: &[(&str, &[u64])]) -> Discovery {
    let tensors: Vec<(String, Vec<u64>)> = tensors
        .iter()
        .map(|(n, d)| ((*n).to_string(), d.to_vec()))
        .collect();
    find(&headers(&config, &tensors))
}

fn of<'d>(found: &'d Discovery, structure: &str) -> Vec<&'d Seam> {
    let seams = found.seams.iter();
    seams.filter(|s| s.structure == structure).collect()
}

fn refused(found: &Discovery, structure: &str) -> Vec<(String, String)> {
    let mine = found.refused.iter().filter(|r| r.structure == structure);
    mine.map(|r| (r.path.clone(), r.code.clone())).collect()
}

fn assumed(seam: &Seam) -> String {
    let texts: Vec<&str> = seam.assumptions.iter().map(|a| a.text.as_str()).collect();
    texts.join("; ")
}

/// Every recorded tree as the checkpoint it would be saved as, under a name no builder has.
#[test]
fn what_a_tree_shows_headers_find_or_refuse() {
    let own = workspace().join("tests/fixtures/oracle/trees");
    let dir = match std::env::var_os("STRUCTURES_ORACLE") {
        Some(dir) if Path::new(&dir).join("trees").is_dir() => Path::new(&dir).join("trees"),
        _ => own,
    };
    let mut totals: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        if !name.ends_with(".json.gz") || name.starts_with("expected") {
            continue;
        }
        let mut text = String::new();
        flate2::read::GzDecoder::new(std::fs::File::open(&path).unwrap())
            .read_to_string(&mut text)
            .unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        let tree = ModuleTree::from_dump(&text).unwrap();
        let mut config = document["config"].clone();
        if !config.is_object() {
            config = json!({});
        }
        config["model_type"] = "never-heard-of".into();
        let mut tensors: Vec<(String, Vec<u64>)> = Vec::new();
        for module in tree.modules() {
            for (param, info) in &module.params {
                let dims = info.dims.iter().map(|d| *d as u64).collect();
                let full = match module.path.as_str() {
                    "" => param.clone(),
                    path => format!("{path}.{param}"),
                };
                tensors.push((full, dims));
            }
        }
        let shown = find(&headers(&config, &tensors));
        let refusals: BTreeSet<(&str, &str)> = shown
            .refused
            .iter()
            .map(|r| (r.structure.as_str(), r.path.as_str()))
            .collect();
        for seam in &find(&tree).seams {
            let same = |s: &&Seam| s.structure == seam.structure && s.path == seam.path;
            let row = totals.entry(seam.structure.clone()).or_default();
            match shown.seams.iter().find(same) {
                Some(ours) => {
                    row.0 += 1;
                    assert_eq!(
                        ours.dims, seam.dims,
                        "{name} {} {}",
                        seam.structure, seam.path
                    );
                }
                None => {
                    row.1 += 1;
                    let key = (seam.structure.as_str(), seam.path.as_str());
                    assert!(
                        refusals.contains(&key),
                        "{name}: {} at {} is passed over in silence",
                        seam.structure,
                        seam.path
                    );
                }
            }
        }
    }
    for (structure, (found, refused)) in &totals {
        println!("{structure}: {found} found, {refused} refused");
    }
    assert!(
        totals.values().map(|t| t.0).sum::<usize>() > 300,
        "{totals:?}"
    );
    assert!(totals.len() >= 9, "{totals:?}");
}

/// The families that are built, under a name that is not: what their trees show, headers find or refuse.
#[test]
fn what_a_builder_shows_headers_find_or_refuse() {
    let mut compared = 0;
    for group in ["families", "oracle/e2e"] {
        for entry in std::fs::read_dir(workspace().join("tests/fixtures").join(group)).unwrap() {
            let dir = entry.unwrap().path();
            let Ok(description) = Description::open(&dir) else {
                continue;
            };
            let shown = find(&Checkpoint::open(&dir).unwrap().outline());
            // Where a model is a part of a larger one, names in the file and paths of modules differ in front.
            let tail = |path: &str| match path.rsplit_once("layers.") {
                Some((_, tail)) => tail.to_string(),
                None => path.to_string(),
            };
            for seam in &find(&description.tree).seams {
                let place = tail(&seam.path);
                let found = shown.seams.iter().any(|s| {
                    s.structure == seam.structure && tail(&s.path) == place && s.dims == seam.dims
                });
                let refused = shown
                    .refused
                    .iter()
                    .any(|r| r.structure == seam.structure && tail(&r.path) == place);
                assert!(
                    found || refused,
                    "{}: {} at {}",
                    dir.display(),
                    seam.structure,
                    seam.path
                );
                compared += 1;
            }
        }
    }
    assert!(compared > 50, "{compared}");
}

/// A volume's patches: found where the configuration gives their size, else refused with what is not said.
#[test]
fn patches_are_found_under_an_assumption_or_refused() {
    let tensors: &[(&str, &[u64])] = &[
        ("vision.patch_embed.proj.weight", &[700, 3, 2, 16, 16]),
        ("vision.patch_embed.proj.bias", &[700]),
    ];
    let vision = json!({"temporal_patch_size": 2, "patch_size": 16, "in_channels": 3});
    let found = named(
        json!({"model_type": "odd", "vision_config": vision}),
        tensors,
    );
    let seams = of(&found, "patch_projection");
    assert_eq!(seams.len(), 1, "{:?}", found.refused);
    assert_eq!((seams[0].dims["K"], seams[0].dims["N"]), (1536, 700));
    assert_eq!(seams[0].variant["bias"], "add");
    assert!(assumed(seams[0]).contains("step from patch to patch"));

    let found = named(json!({"model_type": "odd"}), tensors);
    assert!(of(&found, "patch_projection").is_empty());
    let codes = refused(&found, "patch_projection");
    assert_eq!(
        codes,
        [("vision.patch_embed".into(), "not_in_headers".into())]
    );
    let reason = &found.refused[0].reason;
    assert!(reason.contains("self.attr.temporal_patch_size"), "{reason}");

    // Filters of another size than the patches are no projection of them.
    let other = json!({"temporal_patch_size": 2, "patch_size": 14});
    let found = named(
        json!({"model_type": "odd", "vision_config": other}),
        tensors,
    );
    assert!(of(&found, "patch_projection").is_empty() && found.refused.is_empty());
}

/// A norm with a projection inside is called with a conditioning; another module with one may be.
#[test]
fn conditioned_norms_are_found_under_an_assumption_or_refused() {
    let found = named(
        json!({"model_type": "odd"}),
        &[
            ("b.0.norm1.linear.weight", &[1536, 512]),
            ("b.0.norm1.linear.bias", &[1536]),
            ("b.0.mix.dense.weight", &[1536, 512]),
            ("b.0.mix.dense.bias", &[1536]),
            ("b.0.out.dense.weight", &[512, 1536]),
            ("b.0.out.dense.bias", &[512]),
        ],
    );
    let seams = of(&found, "adaln_producer");
    assert_eq!(seams.len(), 1);
    assert_eq!(seams[0].path, "b.0.norm1");
    assert!(assumed(seams[0]).contains("called with a conditioning"));
    let mut codes = refused(&found, "adaln_producer");
    codes.sort();
    let want = [
        ("b.0.mix", "not_in_headers"),
        ("b.0.out", "not_a_conditioned_norm"),
    ];
    assert_eq!(codes, want.map(|(p, c)| (p.to_string(), c.to_string())));
}

/// Norms without parameters are in no header: a block that may have them is found under that assumption, and one that
/// needs to say more of them is refused.
#[test]
fn modules_without_parameters_are_assumed_or_refused() {
    let block: &[(&str, &[u64])] = &[
        ("b.0.scale_shift_table", &[1, 6, 512]),
        ("b.0.attn1.to_q.weight", &[512, 512]),
        ("b.0.attn1.to_k.weight", &[512, 512]),
        ("b.0.attn1.to_v.weight", &[512, 512]),
        ("b.0.attn1.to_out.0.weight", &[512, 512]),
        ("b.0.attn2.to_q.weight", &[512, 512]),
        ("b.0.ffn.net.0.proj.weight", &[2048, 512]),
        ("b.0.ffn.net.0.proj.bias", &[2048]),
        ("b.0.ffn.net.2.weight", &[512, 2048]),
        ("b.0.ffn.net.2.bias", &[512]),
    ];
    let found = named(json!({"model_type": "odd"}), block);
    let seams = of(&found, "modnorm_qkv_chain");
    assert_eq!(seams.len(), 1, "{:?}", found.refused);
    assert_eq!(seams[0].variant["modulation"], "per_token_table");
    assert!(assumed(seams[0]).contains("`ffn_norm` is taken to be there"));
    assert_eq!(
        refused(&found, "vision_ffn"),
        [("b.0.ffn".to_string(), "norm_missing".to_string())]
    );

    let layer: &[(&str, &[u64])] = &[
        ("l.0.self_attn.q_proj.weight", &[512, 512]),
        ("l.0.mlp.up.weight", &[512, 512]),
    ];
    let found = named(json!({"model_type": "odd"}), layer);
    assert!(of(&found, "decoder_block").is_empty());
    let codes = refused(&found, "decoder_block");
    assert_eq!(codes, [("l.0".into(), "not_in_headers".into())]);

    // What a forward takes decides an axis: its value is taken in words.
    let norms: &[(&str, &[u64])] = &[
        ("l.0.input_layernorm.weight", &[512]),
        ("l.0.post_attention_layernorm.weight", &[512]),
    ];
    let found = named(json!({"model_type": "odd"}), &[layer, norms].concat());
    let seams = of(&found, "decoder_block");
    assert_eq!(seams.len(), 1, "{:?}", found.refused);
    assert!(!seams[0].knows_axis("residual"));
    let text = assumed(seams[0]);
    assert!(text.contains("residual is taken as plain"), "{text}");
}

/// A block calls its norms and is one whatever they are. A layer norm has a summand; without one, and without a word of the
/// configuration, an RMS norm is taken in words.
#[test]
fn a_block_calls_its_norms_whatever_they_are() {
    let with = |config: Value, bias: bool| {
        let mut tensors: Vec<(&str, &[u64])> = vec![
            ("l.0.self_attn.q_proj.weight", &[512, 512]),
            ("l.0.mlp.up.weight", &[512, 512]),
            ("l.0.input_layernorm.weight", &[512]),
            ("l.0.post_attention_layernorm.weight", &[512]),
        ];
        if bias {
            tensors.push(("l.0.input_layernorm.bias", &[512]));
            tensors.push(("l.0.post_attention_layernorm.bias", &[512]));
        }
        named(config, &tensors)
    };
    let said = json!({"model_type": "odd", "rms_norm_eps": 1e-6});
    let silent = json!({"model_type": "odd", "layer_norm_eps": 1e-6});
    for (config, bias, in_words) in [
        (silent.clone(), true, false),
        (said, false, false),
        (silent, false, true),
    ] {
        let found = with(config, bias);
        let [seam] = of(&found, "decoder_block")[..] else {
            panic!("{:?}", found.refused);
        };
        assert_eq!(seam.variant["norm"], "rms");
        let text = assumed(seam);
        assert_eq!(text.contains("taken as an RMS norm"), in_words, "{text}");
    }
}

/// Models of many namings: what is shaped like a structure is a seam or has a reason.
#[test]
fn other_namings_are_found_or_refused_by_reason() {
    // Weights stored in by out: q, k and v are columns.
    let found = named(
        json!({"model_type": "odd", "n_head": 12}),
        &[
            ("h.0.attn.c_attn.weight", &[768, 2304]),
            ("h.0.attn.c_attn.bias", &[2304]),
        ],
    );
    assert!(found.seams.is_empty());
    assert_eq!(
        refused(&found, "qkv_pack"),
        [("h.0.attn".to_string(), "fused_rows_unknown".to_string())]
    );
    let why = &found
        .refused
        .iter()
        .find(|r| r.structure == "qkv_pack")
        .unwrap()
        .reason;
    assert!(why.contains("stored in by out"), "{why}");

    // Rows of equal width one after another, by the name.
    let found = named(
        json!({"model_type": "odd"}),
        &[
            ("blocks.0.attn.qkv.weight", &[2304, 768]),
            ("blocks.0.attn.qkv.bias", &[2304]),
        ],
    );
    let seams = of(&found, "qkv_pack");
    assert_eq!(seams.len(), 1, "{:?}", found.refused);
    assert_eq!(
        seams[0].weights["w_1"].stored().unwrap().rows,
        Some((768, 1536))
    );
    assert!(assumed(seams[0]).contains("by its name"));

    // A parameter of a whole attention.
    let found = named(
        json!({"model_type": "odd"}),
        &[
            ("enc.0.self_attn.in_proj_weight", &[1536, 512]),
            ("enc.0.self_attn.in_proj_bias", &[1536]),
            ("enc.0.self_attn.out_proj.weight", &[512, 512]),
        ],
    );
    assert_eq!(
        refused(&found, "qkv_pack"),
        [(
            "enc.0.self_attn".to_string(),
            "fused_rows_unknown".to_string()
        )]
    );

    // Experts, one by one and stacked.
    let found = named(
        json!({"model_type": "odd", "hidden_act": "silu"}),
        &[
            ("l.0.mlp.experts.3.gate_proj.weight", &[64, 32]),
            ("l.0.mlp.experts.3.up_proj.weight", &[64, 32]),
            ("l.0.mlp.experts.3.down_proj.weight", &[32, 64]),
            ("l.1.mlp.experts.gate_proj.weight", &[8, 64, 32]),
            ("l.1.mlp.experts.up_proj.weight", &[8, 64, 32]),
            ("l.1.mlp.experts.down_proj.weight", &[8, 32, 64]),
        ],
    );
    let seams = of(&found, "decoder_ffn");
    assert_eq!(seams.len(), 1);
    assert_eq!(seams[0].path, "l.0.mlp.experts.3");
    assert_eq!(
        refused(&found, "decoder_ffn"),
        [(
            "l.1.mlp.experts".to_string(),
            "projection_not_linear".to_string()
        )]
    );

    // Weights packed into words are no linear weights.
    let found = named(
        json!({"model_type": "odd"}),
        &[
            ("l.0.mlp.gate_proj.qweight", &[64, 32]),
            ("l.0.mlp.up_proj.qweight", &[64, 32]),
            ("l.0.mlp.down_proj.qweight", &[32, 64]),
        ],
    );
    assert_eq!(
        refused(&found, "decoder_ffn"),
        [("l.0.mlp".to_string(), "projection_not_linear".to_string())]
    );
}

/// What goes into a state-space mixer is not q, k and v, however it is called.
#[test]
fn a_state_space_mixer_is_no_attention() {
    let mixer: &[(&str, &[u64])] = &[
        ("l.0.mamba.in_proj.weight", &[3216, 1024]),
        ("l.0.mamba.out_proj.weight", &[1024, 1536]),
        ("l.0.mamba.conv1d.weight", &[1664, 1, 4]),
        ("l.0.mamba.conv1d.bias", &[1664]),
        ("l.0.mamba.A_log", &[24]),
        ("l.0.mamba.D", &[24]),
        ("l.0.mamba.dt_bias", &[24]),
    ];
    let small = [&mixer[..2], &mixer[4..5]].concat();
    for tensors in [mixer, &mixer[..4], small.as_slice()] {
        let found = named(json!({"model_type": "odd"}), tensors);
        let seams: Vec<&str> = found.seams.iter().map(|s| s.structure.as_str()).collect();
        assert!(seams.is_empty(), "{seams:?}");
        assert!(found.refused.is_empty(), "{:?}", found.refused);
    }
}

/// Two products without a gate are another feed-forward.
#[test]
fn a_feed_forward_without_gate_is_no_gated_one() {
    let tensors: &[(&str, &[u64])] = &[
        ("l.0.ffn.up_proj.weight", &[1024, 256]),
        ("l.0.ffn.down_proj.weight", &[256, 1024]),
    ];
    let found = named(json!({"model_type": "odd"}), tensors);
    assert!(found.seams.is_empty());
    assert!(refused(&found, "decoder_ffn").is_empty());
}

/// An epsilon that no configuration gives is not said; a norm of another kind is another norm.
#[test]
fn an_epsilon_that_nobody_says_is_not_in_headers() {
    let of_norm = |bias: bool, config: Value| {
        let mut tensors: Vec<(&str, &[u64])> = vec![
            ("b.0.mlp.fc1.weight", &[512, 128]),
            ("b.0.mlp.fc1.bias", &[512]),
            ("b.0.mlp.fc2.weight", &[128, 512]),
            ("b.0.mlp.fc2.bias", &[128]),
            ("b.0.norm2.weight", &[128]),
        ];
        if bias {
            tensors.push(("b.0.norm2.bias", &[128]));
        }
        named(config, &tensors)
    };
    let found = of_norm(true, json!({"model_type": "odd"}));
    let at = |code: &str| vec![("b.0.mlp".to_string(), code.to_string())];
    assert_eq!(refused(&found, "vision_ffn"), at("not_in_headers"));
    let reason = &found.refused.iter().find(|r| r.structure == "vision_ffn");
    assert!(reason.unwrap().reason.contains("norm.attr.eps"));
    let said = json!({"model_type": "odd", "layer_norm_eps": 1e-6});
    assert_eq!(of(&of_norm(true, said.clone()), "vision_ffn").len(), 1);
    let codes = refused(&of_norm(false, said), "vision_ffn");
    assert!(codes.contains(&at("norm_contract")[0]), "{codes:?}");
}
