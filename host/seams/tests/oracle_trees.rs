//! Discovery against recorded module trees.
//!
//! Reads `$STRUCTURES_ORACLE/trees` when it is set, else the copies in this repository. Seams that the recording
//! itself doubts are left out of the comparison; each kind of doubt about the structures at hand has a test of its
//! own below, with our answer.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;
use structures_catalog::{Catalog, Spec};
use structures_graph::tree::Scalar;
use structures_graph::ModuleTree;
use structures_seams::{discover, Discovery, Seam};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn oracle() -> PathBuf {
    let own = workspace().join("tests/fixtures/oracle/trees");
    match std::env::var_os("STRUCTURES_ORACLE") {
        Some(dir) if Path::new(&dir).join("trees").is_dir() => Path::new(&dir).join("trees"),
        _ => own,
    }
}

fn text(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if path.extension().is_some_and(|e| e == "gz") {
        let mut out = String::new();
        flate2::read::GzDecoder::new(bytes.as_slice())
            .read_to_string(&mut out)
            .unwrap();
        out
    } else {
        String::from_utf8(bytes).unwrap()
    }
}

fn expected() -> Value {
    let plain = oracle().join("expected.json");
    let file = if plain.is_file() {
        plain
    } else {
        oracle().join("expected.json.gz")
    };
    serde_json::from_str(&text(&file)).unwrap()
}

fn tree(model: &str) -> ModuleTree {
    let file = oracle().join(format!("{model}.json.gz"));
    ModuleTree::from_dump(text(&file)).unwrap()
}

fn pending() -> BTreeSet<String> {
    let list =
        std::fs::read_to_string(workspace().join("tests/oracle-pending.txt")).unwrap_or_default();
    list.lines()
        .filter_map(|l| l.trim().strip_prefix("trees "))
        .map(|s| s.trim().to_string())
        .collect()
}

fn find(tree: &ModuleTree) -> Discovery {
    let catalog = Catalog::builtin().unwrap();
    discover(tree, &catalog.newest())
}

fn str_of<'v>(v: &'v Value, key: &str) -> &'v str {
    v[key].as_str().unwrap_or_default()
}

/// What tells seams of one structure apart: the path, and the first sibling where several groups share it.
fn identity(seam: &Seam) -> String {
    let first = seam.weights.values().find_map(|w| w.stored());
    let first = first.map(|a| a.path.clone()).unwrap_or_default();
    let below = first.strip_prefix(&format!("{}.", seam.path)).unwrap_or("");
    format!("{} {below}", seam.path)
}

fn expected_identity(seam: &Value) -> String {
    let first = match (&seam["pack_attrs"], str_of(seam, "structure")) {
        (Value::Array(attrs), _) => attrs[0].as_str().unwrap().to_string(),
        // Not recorded, and never ambiguous: whatever ours has.
        _ => "*".into(),
    };
    format!("{} {first}", str_of(seam, "path"))
}

fn same(expected: &str, ours: &str) -> bool {
    match expected.strip_suffix(" *") {
        Some(path) => ours.split(' ').next() == Some(path),
        None => expected == ours,
    }
}

/// Our family and layer against the recording's, whose family replaces one numeric component.
fn check_family(seam: &Seam, want: &Value, at: &str) {
    let ours: Vec<&str> = seam.family.split('.').collect();
    // Some recorded families end in the structure's name.
    let recorded = str_of(want, "family");
    let ending = format!(".{}", str_of(want, "structure"));
    let recorded = match recorded.split('.').count() == ours.len() {
        true => recorded,
        false => recorded.strip_suffix(&ending).unwrap_or(recorded),
    };
    let theirs: Vec<&str> = recorded.split('.').collect();
    let path: Vec<&str> = seam.path.split('.').collect();
    assert_eq!(ours.len(), theirs.len(), "{at}: family {}", seam.family);
    for (i, part) in path.iter().enumerate() {
        if part.parse::<u64>().is_ok() {
            assert!(
                ours[i].starts_with('{'),
                "{at}: family {} keeps {part}",
                seam.family
            );
        } else {
            assert_eq!(ours[i], *part, "{at}: family {}", seam.family);
        }
        if theirs[i].starts_with('{') {
            assert_eq!(part.parse().ok(), want["layer"].as_i64(), "{at}: recorded");
        } else {
            assert_eq!(theirs[i], *part, "{at}: recorded family");
        }
    }
    assert_eq!(Some(seam.layer), want["layer"].as_i64(), "{at}: layer");
}

fn check_seam(spec: &Spec, seam: &Seam, want: &Value, at: &str) {
    assert_eq!(seam.parent, str_of(want, "parent"), "{at}: parent");
    for (symbol, size) in want["dims"].as_object().unwrap() {
        assert_eq!(
            seam.dims.get(symbol),
            size.as_u64().as_ref(),
            "{at}: {symbol}"
        );
    }
    for (axis, value) in want["variant"].as_object().unwrap() {
        match seam.variant.get(axis) {
            Some(ours) => assert_eq!(Some(ours.as_str()), value.as_str(), "{at}: {axis}"),
            // A fact of the host that no rule reads from a tree is left to the graph, never assumed.
            None => {
                let read = spec
                    .slots
                    .as_ref()
                    .is_some_and(|s| s.axis.contains_key(axis));
                let declared = spec.variants.get(axis);
                assert!(
                    declared.is_some_and(|a| a.host) && !read,
                    "{at}: {axis} is missing"
                );
            }
        }
    }
    check_family(seam, want, at);
    let empty = Vec::new();
    let recorded: Vec<(&str, &str)> = want["assumptions"]
        .as_array()
        .unwrap_or(&empty)
        .iter()
        .map(|a| {
            (
                str_of(a, "code").trim_end_matches("_default"),
                str_of(a, "value"),
            )
        })
        .collect();
    for (axis, value) in &recorded {
        let ours = seam.assumptions.iter().find(|a| a.about == *axis);
        assert!(
            ours.is_some_and(|a| a.text.contains(value)),
            "{at}: assumption on {axis}"
        );
    }
    // Ours may assume more (a norm's weight mode), never an axis the recording read.
    let read = |axis: &str| recorded.iter().all(|(a, _)| *a != axis) && axis == "activation";
    for ours in &seam.assumptions {
        assert!(!read(&ours.about), "{at}: {}", ours.text);
    }
}

/// Kinds of GELU are three activations; the recording knows one.
fn another_gelu(tree: &ModuleTree, want: &Value) -> bool {
    if str_of(&want["variant"], "activation") != "gelu" {
        return false;
    }
    let Some(module) = tree.get(str_of(want, "path")) else {
        return false;
    };
    ["act_fn", "activation_fn", "act", "activation"]
        .iter()
        .find_map(|n| module.attrs.get(*n))
        .is_some_and(|a| matches!(a, Scalar::Word(w) if w.starts_with("gelu") && w != "gelu_tanh"))
}

/// A norm over several last dims is not a norm of rows; the recording takes its last dim for the row.
fn several_axes(tree: &ModuleTree, want: &Value) -> bool {
    let rows = |path: &str| {
        let shape = tree.get(path).and_then(|m| m.attrs.get("normalized_shape"));
        matches!(shape, Some(Scalar::List(dims)) if dims.len() > 1)
    };
    str_of(want, "structure") == "norm_fused" && rows(str_of(want, "path"))
}

fn our_code(recorded: &str) -> &str {
    match recorded {
        "fc_bias_missing" => "bias_slot_missing",
        "norm_shape_or_eps" | "norm_without_shape" => "norm_contract",
        "activation_unknown" => "activation_foreign",
        other => other,
    }
}

#[test]
fn seams_and_refusals_of_every_tree() {
    let expected = expected();
    let catalog = Catalog::builtin().unwrap();
    let specs: BTreeMap<String, &Spec> = catalog
        .newest()
        .into_iter()
        .map(|s| (s.name.clone(), s))
        .collect();
    let pending = pending();
    let mut ported: Vec<&str> = Vec::new();
    for name in expected["structures_enabled"].as_array().unwrap() {
        let name = name.as_str().unwrap();
        if specs.contains_key(name) {
            ported.push(name);
        } else if pending.contains(name) {
            println!("skipped: trees {name} (tests/oracle-pending.txt)");
        } else {
            panic!("structure {name} is neither in the catalog nor in tests/oracle-pending.txt");
        }
    }
    let (mut compared, mut doubted) = (0, 0);
    for (model, want) in expected["models"].as_object().unwrap() {
        let tree = tree(model);
        let found = find(&tree);
        for structure in &ported {
            let of = |list: &str| -> Vec<&Value> {
                let all = want[list].as_array().unwrap().iter();
                all.filter(|s| str_of(s, "structure") == *structure)
                    .collect()
            };
            let (doubts, clear): (Vec<&Value>, Vec<&Value>) =
                of("seams").into_iter().partition(|s| {
                    s["doubt"].is_array() || another_gelu(&tree, s) || several_axes(&tree, s)
                });
            let doubts: Vec<String> = doubts.into_iter().map(expected_identity).collect();
            doubted += doubts.len();
            let ours: Vec<&Seam> = found
                .seams
                .iter()
                .filter(|s| s.structure == *structure)
                .filter(|s| !doubts.iter().any(|d| same(d, &identity(s))))
                .collect();
            let names: Vec<String> = ours.iter().map(|s| s.path.clone()).collect();
            let wanted: Vec<&str> = clear.iter().map(|s| str_of(s, "path")).collect();
            assert_eq!(names, wanted, "{model} {structure}: seams in module order");
            for (seam, want) in ours.iter().zip(&clear) {
                let at = format!("{model} {structure} {}", seam.key);
                assert!(
                    same(&expected_identity(want), &identity(seam)),
                    "{at}: {}",
                    identity(seam)
                );
                check_seam(specs[*structure], seam, want, &at);
                compared += 1;
            }

            let mut wanted: BTreeSet<(String, String)> = of("refusals")
                .into_iter()
                .map(|r| {
                    (
                        str_of(r, "path").to_string(),
                        our_code(str_of(r, "code")).to_string(),
                    )
                })
                .collect();
            for skip in want["silent_skips"].as_array().unwrap() {
                if skip[1] == *structure {
                    let code = our_code(skip[2].as_str().unwrap());
                    wanted.insert((skip[0].as_str().unwrap().into(), code.into()));
                }
            }
            let ours: BTreeSet<(String, String)> = found
                .refused
                .iter()
                .filter(|r| r.structure == *structure)
                .map(|r| (r.path.clone(), r.code.clone()))
                .collect();
            let missing: Vec<_> = wanted.difference(&ours).collect();
            assert!(
                missing.is_empty(),
                "{model} {structure}: no refusal {missing:?}"
            );
            for (path, code) in ours.difference(&wanted) {
                // What the recording passed over in silence, what it doubts, and what else is wrong with a candidate
                // that it refuses too (it stops at the first).
                let at = |p: &str| p.split(' ').next() == Some(path.as_str());
                let refused = wanted.iter().any(|(p, _)| p == path);
                let seam = clear.iter().any(|s| str_of(s, "path") == path);
                let known = [
                    "siblings_not_shared",
                    "projection_not_linear",
                    "dims_inconsistent",
                ];
                assert!(
                    doubts.iter().any(|d| at(d))
                        || (!seam && (refused || known.contains(&code.as_str()))),
                    "{model} {structure}: unexpected refusal {code} at {path}"
                );
            }
        }
    }
    println!("{compared} seams compared, {doubted} doubted");
    assert!(compared > 0);
}

#[test]
fn keys_are_unique_per_structure() {
    for model in expected()["models"].as_object().unwrap().keys() {
        let mut seen = BTreeSet::new();
        for seam in find(&tree(model)).seams {
            assert!(
                seen.insert((seam.structure, seam.key.clone())),
                "{model}: {}",
                seam.key
            );
        }
    }
}

/// The trees below are hand-made, so that each kind of doubt has its own case wherever the recordings come from.
fn dump(modules: Value) -> ModuleTree {
    let classes = serde_json::json!({
        "Holder": {"forward": [["x", "arg"]], "bases": []},
        "Linear": {"forward": [["input", "arg"]], "bases": []},
        "GELU": {"forward": [["input", "arg"]], "bases": []},
        "SiLU": {"forward": [["input", "arg"]], "bases": []},
        "LayerNorm": {"forward": [["input", "arg"]], "bases": []},
        "Conv3d": {"forward": [["input", "arg"]], "bases": []},
        "Named": {"forward": [["x", "arg"], ["temb", "kw"]], "bases": []},
        "Two": {"forward": [["x", "arg"], ["y", "arg"]], "bases": []},
    });
    let doc = serde_json::json!({"model": "hand-made", "modules": modules, "classes": classes, "module_aliases": {}, "tied_parameters": []});
    ModuleTree::from_dump(doc.to_string()).unwrap()
}

fn linear(path: &str, out: u64, inside: u64) -> Value {
    serde_json::json!({"path": path, "class": "Linear", "params": {"weight": [[out, inside], "float32"]}, "absent_params": ["bias"], "attrs": {"in_features": inside, "out_features": out}})
}

fn ffn(kind: &str) -> ModuleTree {
    dump(serde_json::json!([
        {"path": "", "class": "Holder"},
        {"path": "l", "class": "Holder"},
        {"path": "l.mlp", "class": "Holder", "activation": {"attr": "act_fn", "class": "GELU", "name": null}},
        linear("l.mlp.gate_proj", 52, 36),
        linear("l.mlp.up_proj", 52, 36),
        linear("l.mlp.down_proj", 36, 52),
        {"path": "l.mlp.act_fn", "class": "GELU", "attrs": {"approximate": kind}},
        {"path": "l.post_attention_layernorm", "class": "Holder", "params": {"weight": [[36], "float32"]}, "attrs": {"eps": 1e-6}},
    ]))
}

#[test]
fn doubt_activation_is_not_tanh_gelu() {
    let found = find(&ffn("tanh"));
    assert_eq!(found.seams.len(), 1);
    assert_eq!(found.seams[0].variant["activation"], "gelu");
    let found = find(&ffn("none"));
    assert!(found.seams.is_empty());
    let r = &found.refused[0];
    assert_eq!(
        (r.path.as_str(), r.code.as_str()),
        ("l.mlp", "activation_foreign")
    );
    assert_eq!(r.found.as_deref(), Some("gelu_exact"));
    assert_eq!(r.expected.as_deref(), Some("silu, gelu"));
}

/// A name is not evidence: the norm beside an FFN is an assumption, and its weight mode is not claimed at all.
#[test]
fn doubt_norm_is_not_the_ffn_norm_and_norm_weight_is_offset() {
    let seam = find(&ffn("tanh")).seams.remove(0);
    assert!(!seam.knows_axis("norm_weight_mode"));
    let about: Vec<&str> = seam.assumptions.iter().map(|a| a.about.as_str()).collect();
    assert_eq!(about, ["norm_weight_mode", "w_norm"]);
    assert!(seam.assumptions[1]
        .text
        .contains("l.post_attention_layernorm"));
    assert!(seam.weights["w_norm"].stored().unwrap().hint);
}

/// Where a tree can tell (other in-features), cross-attention siblings are refused; where it cannot, the candidate
/// stays and the graph decides (`tests/locate.rs`).
#[test]
fn doubt_siblings_do_not_share_input() {
    let attention = |kv: u64| {
        dump(serde_json::json!([
            {"path": "", "class": "Holder"},
            {"path": "x", "class": "Holder"},
            linear("x.q_proj", 512, 512),
            linear("x.k_proj", 512, kv),
            linear("x.v_proj", 512, kv),
            linear("x.o_proj", 512, 512),
        ]))
    };
    let of = |found: &Discovery, n: usize| {
        let packs: Vec<&Seam> = found.seams.iter().filter(|s| s.weights.len() > 2).collect();
        assert_eq!(packs.len(), n);
        found.refused.clone()
    };
    let found = find(&attention(512));
    assert!(of(&found, 1).is_empty());
    let pack = found.seams.iter().find(|s| s.weights.len() > 2).unwrap();
    let about: Vec<&str> = pack.assumptions.iter().map(|a| a.about.as_str()).collect();
    assert_eq!(about, ["x"]);
    assert!(pack.assumptions[0].text.contains("`x.k_proj`, `x.v_proj`"));
    let refused = of(&find(&attention(1024)), 0);
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(
        (refused[0].path.as_str(), refused[0].code.as_str()),
        ("x", "siblings_not_shared")
    );
}

fn biased(path: &str, out: u64, inside: u64) -> Value {
    serde_json::json!({"path": path, "class": "Linear", "params": {"weight": [[out, inside], "float32"], "bias": [[out], "float32"]}, "attrs": {"in_features": inside, "out_features": out}})
}

fn layer_norm(path: &str, shape: &[u64], affine: bool) -> Value {
    let params = match affine {
        true => serde_json::json!({"weight": [shape, "float32"], "bias": [shape, "float32"]}),
        false => serde_json::json!({}),
    };
    serde_json::json!({"path": path, "class": "LayerNorm", "params": params, "attrs": {"normalized_shape": shape, "eps": 1e-6}})
}

fn of<'d>(found: &'d Discovery, structure: &str) -> (Vec<&'d Seam>, Vec<(&'d str, &'d str)>) {
    let seams = found.seams.iter().filter(|s| s.structure == structure);
    let refused = found.refused.iter().filter(|r| r.structure == structure);
    (
        seams.collect(),
        refused
            .map(|r| (r.path.as_str(), r.code.as_str()))
            .collect(),
    )
}

fn encoder(class: &str, approximate: &str, norm: Value) -> ModuleTree {
    dump(serde_json::json!([
        {"path": "", "class": "Holder"},
        {"path": "l", "class": "Holder"},
        norm,
        {"path": "l.mlp", "class": "Holder", "activation": {"attr": "act", "class": class, "name": null}},
        biased("l.mlp.fc1", 52, 36),
        biased("l.mlp.fc2", 36, 52),
        {"path": "l.mlp.act", "class": class, "attrs": {"approximate": approximate}},
    ]))
}

/// Exact GELU and SiLU are refused by name; the tanh form is the structure's.
#[test]
fn doubt_activation_outside_declared_variants() {
    let norm = || layer_norm("l.norm2", &[36], true);
    let tree = encoder("GELU", "tanh", norm());
    let found = find(&tree);
    let (seams, refused) = of(&found, "vision_ffn");
    assert_eq!((seams.len(), refused.len()), (1, 0));
    assert_eq!(seams[0].variant["activation"], "gelu");
    assert!(seams[0].knows_axis("activation"));
    for (class, approximate) in [("GELU", "none"), ("SiLU", "none")] {
        let found = find(&encoder(class, approximate, norm()));
        let (seams, refused) = of(&found, "vision_ffn");
        assert!(seams.is_empty());
        assert_eq!(refused, [("l.mlp", "activation_foreign")], "{class}");
    }
}

/// The norm a name suggests is an assumption on the slots it would fill; a norm without them fills none.
#[test]
fn doubt_norm_is_not_the_ffn_norm() {
    let found = find(&encoder("GELU", "tanh", layer_norm("l.norm2", &[36], true)));
    let (seams, _) = of(&found, "vision_ffn");
    let about: Vec<&str> = seams[0]
        .assumptions
        .iter()
        .map(|a| a.about.as_str())
        .collect();
    assert_eq!(about, ["w_norm", "b_norm"]);
    let found = find(&encoder(
        "GELU",
        "tanh",
        layer_norm("l.norm3", &[36], false),
    ));
    let (seams, _) = of(&found, "vision_ffn");
    assert_eq!(seams[0].variant["norm_affine"], "identity");
    assert!(seams[0].assumptions.is_empty());
    assert!(["w_norm", "b_norm"]
        .iter()
        .all(|s| !seams[0].weights.contains_key(*s)));
}

/// A candidate is told everything that is wrong with it.
#[test]
fn refusals_do_not_hide_each_other() {
    let found = find(&encoder("GELU", "none", layer_norm("l.norm1", &[36], true)));
    let (_, refused) = of(&found, "vision_ffn");
    assert_eq!(
        refused,
        [("l.mlp", "norm_missing"), ("l.mlp", "activation_foreign")]
    );
}

/// A projection with a second argument is a conditioning only where it widens a norm's features, or somebody calls
/// the argument one.
#[test]
fn doubt_not_a_conditioned_norm() {
    let tree = |class: &str, (out, inside): (u64, u64), norm: Option<Value>| {
        let mut modules = vec![
            serde_json::json!({"path": "", "class": "Holder"}),
            serde_json::json!({"path": "l", "class": "Holder"}),
            serde_json::json!({"path": "l.n", "class": class}),
            biased("l.n.dense", out, inside),
        ];
        modules.extend(norm);
        dump(Value::Array(modules))
    };
    let judge = |tree: &ModuleTree| {
        let found = find(tree);
        let (seams, refused) = of(&found, "adaln_producer");
        let codes: Vec<String> = refused.iter().map(|r| r.1.to_string()).collect();
        (seams.len(), codes)
    };
    let refused = (0, vec!["not_a_conditioned_norm".to_string()]);
    let norm = |d: u64, affine: bool| Some(layer_norm("l.n.norm", &[d], affine));
    // An output layer with its norm, and one without.
    let affine = Some(layer_norm("l.n.LayerNorm", &[36], true));
    assert_eq!(judge(&tree("Two", (36, 52), affine)), refused);
    assert_eq!(judge(&tree("Two", (36, 52), norm(36, false))), refused);
    assert_eq!(judge(&tree("Two", (36, 52), None)), refused);
    // Conditioned norms.
    assert_eq!(judge(&tree("Two", (72, 52), norm(36, false))), (1, vec![]));
    assert_eq!(judge(&tree("Two", (72, 52), None)), (1, vec![]));
    assert_eq!(judge(&tree("Named", (72, 128), None)), (1, vec![]));
    // Not even shaped like one: an odd width, one argument.
    assert_eq!(judge(&tree("Named", (37, 52), None)), (0, vec![]));
    assert_eq!(judge(&tree("Holder", (72, 52), None)), (0, vec![]));
}

/// A norm over several dims is another operation than a norm of rows.
#[test]
fn doubt_norm_over_several_axes() {
    let tree = |shape: &[u64]| {
        let norm = layer_norm("n", shape, true);
        dump(serde_json::json!([{"path": "", "class": "Holder"}, norm]))
    };
    let found = find(&tree(&[36]));
    let (seams, refused) = of(&found, "norm_fused");
    assert_eq!((seams.len(), refused.len()), (1, 0));
    assert_eq!(seams[0].dims["D"], 36);
    let found = find(&tree(&[3, 36]));
    let (seams, refused) = of(&found, "norm_fused");
    assert!(seams.is_empty());
    assert_eq!(refused, [("n", "norm_contract")]);
}

/// A filter of a convolution over whole patches is one row of a product.
#[test]
fn a_patch_convolution_is_read_as_rows() {
    let tree = |padding: Value, stride: u64| {
        dump(serde_json::json!([
            {"path": "", "class": "Holder"},
            {"path": "v", "class": "Holder", "attrs": {"temporal_patch_size": 2, "patch_size": 8, "in_channels": 3, "embed_dim": 700}},
            {"path": "v.proj", "class": "Conv3d", "params": {"weight": [[700, 3, 2, 8, 8], "float32"]},
             "attrs": {"in_channels": 3, "out_channels": 700, "kernel_size": [2, 8, 8], "stride": [2, stride, stride], "padding": padding, "dilation": [1, 1, 1], "groups": 1}},
        ]))
    };
    for padding in [serde_json::json!([0, 0, 0]), serde_json::json!("valid")] {
        let found = find(&tree(padding, 8));
        let (seams, _) = of(&found, "patch_projection");
        let w = seams[0].weights["w"].stored().unwrap();
        assert_eq!(w.reshape.as_deref(), Some(&[700, 384][..]));
        assert_eq!(seams[0].variant["bias"], "none");
        assert!(!seams[0].weights.contains_key("b"));
    }
    for (padding, stride) in [(1, 8), (0, 4)] {
        let found = find(&tree(
            serde_json::json!([padding, padding, padding]),
            stride,
        ));
        assert_eq!(of(&found, "patch_projection"), (vec![], vec![]));
    }
}

/// A block with a table owns its projections and its feed-forward; where a norm carries the conditioning, only what
/// reads the norm.
#[test]
fn chains_name_the_weights_they_read() {
    for (model, path, slots) in [
        (
            "wan2.1-t2v-1.3b",
            "blocks.0",
            "table w_q b_q w_k b_k w_v b_v w_fc1 b_fc1 w_fc2 b_fc2",
        ),
        (
            "vq-diffusion-ithq",
            "transformer_blocks.0",
            "w_cond b_cond w_q b_q w_k b_k w_v b_v",
        ),
        ("synthetic-a", "chain.2", "w_cond b_cond w_q"),
    ] {
        let found = find(&tree(model));
        let (seams, _) = of(&found, "modnorm_qkv_chain");
        let seam = seams.iter().find(|s| s.path == path).unwrap();
        let named: Vec<&str> = seam.weights.keys().map(String::as_str).collect();
        assert_eq!(named.join(" "), slots, "{model}");
    }
}

/// A decoder layer with four sublayers, and what else the case gives it.
fn block(attrs: Value, more: &[&str]) -> ModuleTree {
    let norm = |path: &str| serde_json::json!({"path": path, "class": "Holder", "params": {"weight": [[36], "float32"]}, "attrs": {"eps": 1e-6}});
    let mut modules = vec![
        serde_json::json!({"path": "", "class": "Holder"}),
        serde_json::json!({"path": "l", "class": "Holder"}),
        serde_json::json!({"path": "l.0", "class": "Holder", "attrs": attrs}),
        serde_json::json!({"path": "l.0.self_attn", "class": "Holder"}),
        serde_json::json!({"path": "l.0.mlp", "class": "Holder"}),
        norm("l.0.input_layernorm"),
        norm("l.0.post_attention_layernorm"),
    ];
    modules.extend(more.iter().map(|name| norm(&format!("l.0.{name}"))));
    dump(Value::Array(modules))
}

fn one_block(tree: &ModuleTree) -> (usize, Vec<String>) {
    let found = find(tree);
    let mine = |s: &str| s == "decoder_block";
    let refused = found.refused.iter().filter(|r| mine(&r.structure));
    let seams = found.seams.iter().filter(|s| mine(&s.structure));
    (seams.count(), refused.map(|r| r.code.clone()).collect())
}

/// A block with norms behind its sublayers is another block.
#[test]
fn doubt_block_has_other_parameterised_children() {
    let none = serde_json::json!({});
    assert_eq!(one_block(&block(none.clone(), &[])), (1, vec![]));
    let more = ["pre_feedforward_layernorm", "post_feedforward_layernorm"];
    let refused = (0, vec!["block_child".to_string()]);
    assert_eq!(one_block(&block(none.clone(), &more)), refused);
    // Whatever it is called, however deep it stands.
    for name in ["post_mlp_layernorm", "mamba.in_proj", "crossattention.q"] {
        let tree = block(none.clone(), &[name]);
        assert_eq!(one_block(&tree), refused, "{name}");
        let found = find(&tree);
        let mine = found.refused.iter().find(|r| r.code == "block_child");
        assert!(mine.unwrap().reason.contains(name));
    }
    // A part of a sublayer is no fifth.
    let inside = block(none, &["self_attn.q_norm"]);
    assert_eq!(one_block(&inside), (1, vec![]));
}

/// A multiplier on the residual branch is never ignored.
#[test]
fn doubt_residual_is_scaled() {
    let scaled = block(serde_json::json!({"residual_multiplier": 0.22}), &[]);
    let refused = (0, vec!["residual_scaled".to_string()]);
    assert_eq!(one_block(&scaled), refused);
    for name in ["residual_multiplier", "residual_scale", "scale_depth"] {
        let with = |x: Value| one_block(&block(serde_json::json!({ name: x }), &[]));
        assert_eq!(with(serde_json::json!(0.5)), refused, "{name}");
        assert_eq!(with(serde_json::json!(1.0)), (1, vec![]), "{name}");
        assert_eq!(with(serde_json::json!(1)), (1, vec![]), "{name}");
    }
}
