//! The oracle's reference tensors through the unquantised forms.
//!
//! Read from `$STRUCTURES_ORACLE/reference`; without that variable from the repository's fixtures,
//! and where those have no reference tensors the test says so and checks nothing.

mod common;

use std::collections::BTreeSet;
use std::path::PathBuf;

use common::{declaration, relative_l2, run, Case, Values};
use serde_json::Value;
use structures_plugin_api::formats::{bf16_to_f32, f32_to_bf16};
use structures_plugin_api::{Backend, DType};
use structures_plugin_portable::Portable;

fn root() -> Option<PathBuf> {
    let root = match std::env::var_os("STRUCTURES_ORACLE") {
        Some(root) => PathBuf::from(root),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/oracle"),
    }
    .join("reference");
    let there = root.join("index.json").exists();
    if !there {
        eprintln!("skipped: {} has no index.json", root.display());
    }
    there.then_some(root)
}

fn index() -> Option<(PathBuf, Value)> {
    let root = root()?;
    let text = std::fs::read_to_string(root.join("index.json")).expect("readable");
    Some((root, serde_json::from_str(&text).expect("an index")))
}

/// A safetensors file: u64 length of the header, the header, the data.
struct File {
    header: Value,
    data: Vec<u8>,
}

impl File {
    fn read(path: &std::path::Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        File {
            header: serde_json::from_slice(header).expect("a header"),
            data: data.to_vec(),
        }
    }

    fn tensor(&self, name: &str) -> Values {
        let entry = &self.header[name];
        let number = |v: &Value| v.as_u64().expect("a number") as usize;
        let list = |v: &Value| {
            v.as_array()
                .expect("a list")
                .iter()
                .map(number)
                .collect::<Vec<_>>()
        };
        let (dims, offsets) = (list(&entry["shape"]), list(&entry["data_offsets"]));
        let bytes = &self.data[offsets[0]..offsets[1]];
        let data = match entry["dtype"].as_str().expect("a dtype") {
            "F32" => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            "BF16" => bytes
                .chunks_exact(2)
                .map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]])))
                .collect(),
            other => panic!("dtype {other}"),
        };
        Values::new(&dims, data)
    }
}

fn tensors(file: &File, group: &Value) -> Vec<(String, Option<Values>)> {
    let entries = group.as_object().expect("a map").iter();
    entries
        .map(|(name, entry)| {
            let tensor = entry["tensor"].as_str().expect("a tensor's name");
            (name.clone(), Some(file.tensor(tensor)))
        })
        .collect()
}

/// What the oracle does not say about a structure: the span that covers the boundary, what it lists,
/// and the oracle's outputs that are made under another name or not by it.
struct Covered {
    structure: &'static str,
    span: &'static str,
    inputs: &'static [&'static str],
    renamed: &'static [(&'static str, &'static str)],
    passed: &'static [&'static str],
}

const fn covered(
    structure: &'static str,
    span: &'static str,
    inputs: &'static [&'static str],
) -> Covered {
    Covered {
        structure,
        span,
        inputs,
        renamed: &[],
        passed: &[],
    }
}

const COVERED: [Covered; 13] = [
    covered("adaln_producer", "fused", &["x", "cond"]),
    covered("attention_core", "core", &["q", "k", "v", "mask", "kv_len"]),
    Covered {
        // What the host would have given at each turn of the loop.
        passed: &["capture_0", "capture_1", "capture_2", "capture_3"],
        ..covered("cadence_static", "content", &["x"])
    },
    Covered {
        renamed: &[("x", "out")],
        ..covered(
            "decoder_ffn",
            "block",
            &["x", "cond_scale", "cond_shift", "cond_gate"],
        )
    },
    covered(
        "gated_delta_core",
        "core",
        &["q", "k", "v", "log_decay", "beta", "state"],
    ),
    covered("linear_proj", "proj", &["x", "residual"]),
    covered("modnorm_qkv_chain", "chain", &["x", "cond", "temb"]),
    covered("norm_fused", "norm", &["x"]),
    covered("patch_projection", "proj", &["x"]),
    Covered {
        passed: &["v"],
        ..covered("qk_norm_rope", "rope", &["q", "k", "cos", "sin"])
    },
    covered("qkv_pack", "pack", &["x"]),
    covered("qkv_rope", "rope", &["packed_qkv", "cos", "sin"]),
    Covered {
        renamed: &[("x", "out")],
        ..covered("vision_ffn", "block", &["x"])
    },
];

/// The case and, for each of its outputs, the oracle's name of it.
fn case(file: &File, row: &Value, covered: &Covered) -> (Case, Vec<String>) {
    let structure = covered.structure.to_string();
    let mut given = tensors(file, &row["inputs"]);
    let mut inputs = Vec::new();
    for name in covered.inputs {
        let at = given.iter().position(|(own, _)| own == name);
        let values = at.and_then(|at| given.remove(at).1);
        inputs.push(((*name).to_string(), values));
    }
    for (name, values) in &given {
        // A value that passes the structure as it is.
        let same = row["outputs"][name]["tensor"].as_str();
        let same = same.map(|tensor| file.tensor(tensor).data);
        assert_eq!(same, values.as_ref().map(|v| v.data.clone()), "{name}");
        assert!(covered.passed.contains(&name.as_str()), "{name}");
    }
    let listed = row["outputs"].as_object().expect("a map").keys();
    let keys: Vec<String> = listed
        .filter(|key| !covered.passed.contains(&key.as_str()))
        .filter(|key| !(key.ends_with("_conv") && row["outputs"].get(&key[..1]).is_some()))
        .cloned()
        .collect();
    let outputs = keys.iter().map(|key| {
        let tensor = row["outputs"][key]["tensor"]
            .as_str()
            .expect("a tensor's name");
        let renamed = covered.renamed.iter().find(|(own, _)| own == key);
        let name = renamed.map_or(key.as_str(), |(_, value)| value);
        (name.to_string(), file.tensor(tensor).dims)
    });
    let outputs: Vec<(String, Vec<usize>)> = outputs.collect();
    let variant = row["variant"].as_object().expect("a map").iter();
    let text = |v: &Value| v.as_str().expect("text").to_string();
    let params = row["params"].as_object().expect("a map").iter();
    let dims = row["dims"].as_object().expect("a map").iter();
    let declared = declaration(&structure, "f32").expect("a form");
    let content = |point: &str| {
        let name = row["outputs"][point]["tensor"].as_str().expect("a name");
        (point.to_string(), file.tensor(name))
    };
    let mut weights = tensors(file, &row["weights"]);
    for (name, values) in &mut weights {
        // A slot stored as a convolution's kernel: the same memory, flattened.
        if let (Some(slot), Some(values)) = (name.strip_suffix("_conv"), values.as_mut()) {
            let (n, k) = (values.dims[0], values.dims[1..].iter().product());
            values.dims = vec![n, k];
            *name = slot.to_string();
        }
    }
    let wide =
        |(_, entry): &(&String, &Value)| entry["dtype"] == "float32" && row["dtype"] != "float32";
    let given = row["inputs"].as_object().expect("a map").iter();
    let case = Case {
        span: covered.span.into(),
        dtype: if row["dtype"] == "bfloat16" {
            DType::Bf16
        } else {
            DType::F32
        },
        variant: variant
            .map(|(axis, value)| (axis.clone(), text(value)))
            .collect(),
        params: params
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        inputs,
        weights,
        outputs,
        amax: Default::default(),
        content: declared
            .statistics
            .iter()
            .map(|statistic| content(&statistic.point))
            .collect(),
        dims: dims
            .filter_map(|(symbol, size)| Some((symbol.clone(), size.as_u64()?)))
            .collect(),
        wide: given.filter(wide).map(|(name, _)| name.clone()).collect(),
        stretched: Default::default(),
        structure,
    };
    (case, keys)
}

/// Steps between two bf16 values, signs aside.
fn ulps(a: f32, b: f32) -> u32 {
    let order = |v: f32| {
        let bits = i32::from(f32_to_bf16(v) as i16);
        if bits < 0 {
            i32::from(i16::MIN) - bits
        } else {
            bits
        }
    };
    order(a).abs_diff(order(b))
}

#[test]
fn oracle_reference_forms() {
    let Some((root, index)) = index() else { return };
    let mut checked = BTreeSet::new();
    for row in index["cases"].as_array().expect("a list") {
        let structure = row["structure"].as_str().expect("a structure");
        let Some(covered) = COVERED.iter().find(|c| c.structure == structure) else {
            continue;
        };
        let id = row["id"].as_str().expect("an id");
        let file = File::read(&root.join(row["file"].as_str().expect("a file")));
        let (mut case, keys) = case(&file, row, covered);
        if structure == "linear_proj" && case.axis("epilogue").is_empty() {
            case.set("epilogue", "none");
        }
        let got = run("f32", &case, false).unwrap_or_else(|e| panic!("{id}: {e}"));
        for (key, got) in keys.iter().zip(&got) {
            let tensor = row["outputs"][key]["tensor"]
                .as_str()
                .expect("a tensor's name");
            let want = file.tensor(tensor).data;
            if case.dtype == DType::F32 {
                let largest = want.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
                for (a, b) in got.iter().zip(&want) {
                    assert!(
                        (a - b).abs() <= 1e-5 * largest,
                        "{id} {key}: {a} is not {b}"
                    );
                }
            } else {
                let name = row["outputs_f32_from_same_inputs"][key]
                    .as_str()
                    .expect("a name");
                let exact = file.tensor(name).data;
                let (ours, theirs) = (relative_l2(got, &exact), relative_l2(&want, &exact));
                let near = got.iter().zip(&want).all(|(a, b)| ulps(*a, *b) <= 1);
                assert!(
                    near || ours <= 1.25 * theirs,
                    "{id} {key}: {ours:.2e}, oracle {theirs:.2e}"
                );
            }
        }
        checked.insert((structure, case.dtype));
    }
    // The repository's fixtures are a part of the oracle, but a part of every structure here.
    let structures: BTreeSet<&str> = checked.iter().map(|(structure, _)| *structure).collect();
    let expected: BTreeSet<&str> = match std::env::var_os("STRUCTURES_ORACLE") {
        Some(_) => COVERED.iter().map(|c| c.structure).collect(),
        None => structures.clone(),
    };
    assert_eq!(structures, expected);
    assert!(structures.len() >= 3, "{structures:?}");
    assert_eq!(checked.len(), 2 * structures.len(), "{checked:?}");
}

/// Every structure has a form, and every form but that of a block around host modules covers a
/// whole boundary.
#[test]
fn every_form_is_covered() {
    let forms = Portable::description().forms;
    let structures: BTreeSet<&str> = forms.iter().map(|f| f.structure.as_str()).collect();
    let mut known: BTreeSet<&str> = COVERED.iter().map(|c| c.structure).collect();
    known.insert("decoder_block");
    assert_eq!(structures, known);
    for covered in &COVERED {
        let form = declaration(covered.structure, "f32").expect("a form");
        assert!(form.spans.iter().any(|span| span == covered.span));
    }
}

/// A small call of a structure that would be right: the oracle's refusals change one thing of it.
struct Call {
    structure: &'static str,
    variant: &'static [(&'static str, &'static str)],
    inputs: &'static [(&'static str, &'static [usize])],
    weights: &'static [(&'static str, &'static [usize])],
    outputs: &'static [(&'static str, &'static [usize])],
    /// Symbol, the tensor that tells its size, and the axis.
    dims: &'static [(&'static str, &'static str, usize)],
}

const CALLS: [Call; 7] = [
    Call {
        structure: "decoder_ffn",
        variant: &[("activation", "silu"), ("norm_weight_mode", "direct")],
        inputs: &[("x", &[2, 4])],
        weights: &[
            ("w_norm", &[4]),
            ("w_gate", &[4, 6]),
            ("w_up", &[4, 6]),
            ("w_down", &[6, 4]),
        ],
        outputs: &[("out", &[2, 4])],
        dims: &[],
    },
    Call {
        structure: "vision_ffn",
        variant: &[("activation", "gelu"), ("norm_affine", "identity")],
        inputs: &[("x", &[2, 4])],
        weights: &[
            ("w_fc1", &[6, 4]),
            ("b_fc1", &[6]),
            ("w_fc2", &[4, 6]),
            ("b_fc2", &[4]),
        ],
        outputs: &[("out", &[2, 4])],
        dims: &[],
    },
    Call {
        structure: "linear_proj",
        variant: &[("epilogue", "none")],
        inputs: &[("x", &[2, 4])],
        weights: &[("w", &[4, 3])],
        outputs: &[("y", &[2, 3])],
        dims: &[],
    },
    Call {
        structure: "qkv_rope",
        variant: &[],
        inputs: &[
            ("packed_qkv", &[1, 2, 64]),
            ("cos", &[1, 2, 4]),
            ("sin", &[1, 2, 4]),
        ],
        weights: &[("qkv_bias", &[64])],
        outputs: &[
            ("q_after_rope", &[1, 2, 4, 8]),
            ("k_after_rope", &[1, 2, 2, 8]),
            ("v", &[1, 2, 2, 8]),
        ],
        dims: &[],
    },
    Call {
        structure: "qk_norm_rope",
        variant: &[
            ("normalization_scope", "per_head"),
            ("rope_layout", "half"),
            ("rotary_extent", "full"),
            ("norm_weight_mode", "direct"),
        ],
        inputs: &[
            ("q", &[1, 2, 2, 6]),
            ("k", &[1, 2, 1, 6]),
            ("cos", &[2, 3]),
            ("sin", &[2, 3]),
        ],
        weights: &[("q_norm_weight", &[6]), ("k_norm_weight", &[6])],
        outputs: &[
            ("q_after_rope", &[1, 2, 2, 6]),
            ("k_after_rope", &[1, 2, 1, 6]),
        ],
        dims: &[("D", "q", 3), ("Hq", "q", 2), ("Hkv", "k", 2)],
    },
    Call {
        structure: "modnorm_qkv_chain",
        variant: &[("modulation", "scale_shift")],
        inputs: &[("x", &[1, 2, 4]), ("cond", &[1, 3])],
        weights: &[("w_cond", &[8, 3]), ("b_cond", &[8]), ("w_q", &[4, 4])],
        outputs: &[("q", &[1, 2, 4]), ("k", &[1, 2, 4]), ("v", &[1, 2, 4])],
        dims: &[],
    },
    Call {
        structure: "gated_delta_core",
        variant: &[("qk_norm", "l2_in_kernel")],
        inputs: &[
            ("q", &[1, 2, 1, 4]),
            ("k", &[1, 2, 1, 4]),
            ("v", &[1, 2, 1, 4]),
            ("log_decay", &[1, 2, 1]),
            ("beta", &[1, 2, 1]),
            ("state", &[1, 1, 4, 4]),
        ],
        weights: &[],
        outputs: &[("out", &[1, 2, 1, 4]), ("final_state", &[1, 1, 4, 4])],
        dims: &[],
    },
];

impl Call {
    fn case(&self, row: &Value) -> Case {
        let covered = COVERED.iter().find(|c| c.structure == self.structure);
        let covered = covered.expect("a covered structure");
        let sizes = |name: &str, default: &[usize]| -> Vec<usize> {
            // A sine is as wide as the cosine, and so are they both as the oracle says of one.
            let name = if name == "sin" { "cos" } else { name };
            match row["shapes"][name].as_array() {
                Some(dims) => dims
                    .iter()
                    .map(|d| d.as_u64().expect("a size") as usize)
                    .collect(),
                None => default.to_vec(),
            }
        };
        let tensors = |list: &[(&str, &[usize])]| -> Vec<(String, Option<Values>)> {
            list.iter()
                .map(|(n, d)| ((*n).to_string(), Some(Values::noise(&sizes(n, d), 1, 1.0))))
                .collect()
        };
        let mut inputs = tensors(self.inputs);
        for name in covered.inputs {
            if !inputs.iter().any(|(own, _)| own == name) {
                inputs.push(((*name).to_string(), None));
            }
        }
        let size = |(symbol, tensor, axis): &(&str, &str, usize)| {
            let (_, values) = inputs.iter().find(|(n, _)| n == tensor)?;
            Some(((*symbol).to_string(), values.as_ref()?.dims[*axis] as u64))
        };
        let dims = self.dims.iter().filter_map(size).collect();
        let params = row["params"].as_object().expect("a map").iter();
        let mut case = Case {
            structure: self.structure.into(),
            span: covered.span.into(),
            dtype: DType::F32,
            variant: Default::default(),
            params: params.map(|(n, v)| (n.clone(), v.clone())).collect(),
            inputs,
            weights: tensors(self.weights),
            outputs: self
                .outputs
                .iter()
                .map(|(n, d)| ((*n).to_string(), d.to_vec()))
                .collect(),
            amax: Default::default(),
            content: Default::default(),
            dims,
            wide: Default::default(),
            stretched: Default::default(),
        };
        case.params
            .entry("eps".to_string())
            .or_insert(serde_json::json!(1e-6));
        let given = row["variant"].as_object().expect("a map").iter();
        let given = given.map(|(axis, value)| (axis.as_str(), value.as_str().expect("text")));
        for (axis, value) in self.variant.iter().copied().chain(given) {
            case.set(axis, value);
        }
        case
    }
}

#[test]
fn oracle_refusals_are_refused() {
    let Some((_, index)) = index() else { return };
    let mut checked = 0;
    for row in index["refusals"].as_array().expect("a list") {
        let id = row["id"].as_str().expect("an id");
        let Some(call) = CALLS.iter().find(|call| row["structure"] == call.structure) else {
            panic!("{id}: no call of this structure is known here");
        };
        let failure = run("f32", &call.case(row), false).expect_err(id);
        let expected = match row["expect"].as_str().expect("a kind") {
            "unknown_variant" => "format_no_variant",
            "shape_mismatch" => "dims_inconsistent",
            "missing_input" => "view_absent",
            "missing_weight" => "weight_missing",
            kind @ ("bad_rotary_dim" | "bad_table" | "bad_norm_weight") => kind,
            other => panic!("{id}: {other}"),
        };
        assert_eq!(failure.code, expected, "{id}: {failure}");
        checked += 1;
    }
    assert!(checked > 0, "the index lists no refusal");
}

/// What the refusals change is the only thing that is wrong with those calls.
#[test]
fn the_calls_themselves_are_right() {
    let none = serde_json::json!({
        "shapes": {},
        "variant": {},
        "params": {"q_heads": 4, "kv_heads": 2, "head_dim": 8},
    });
    for call in &CALLS {
        let mut case = call.case(&none);
        if call.structure == "modnorm_qkv_chain" {
            for slot in ["w_k", "w_v"] {
                case.weights
                    .push((slot.into(), Some(Values::noise(&[4, 4], 2, 1.0))));
            }
        }
        run("f32", &case, false).unwrap_or_else(|e| panic!("{}: {e}", call.structure));
    }
}
