//! The oracle's reference tensors through the unquantised forms.
//!
//! Read from `$STRUCTURES_ORACLE/reference`; without that variable from the repository's fixtures,
//! and where those have no reference tensors the test says so and checks nothing.

mod common;

use std::collections::BTreeSet;
use std::path::PathBuf;

use common::{relative_l2, run, Case, Values};
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

/// Span and outputs are ours; what a span lists beyond the oracle's inputs is absent.
fn case(file: &File, row: &Value) -> (Case, Vec<String>) {
    let structure = row["structure"].as_str().expect("a structure").to_string();
    let mut inputs = tensors(file, &row["inputs"]);
    let (span, listed): (&str, &[&str]) = match structure.as_str() {
        "decoder_ffn" => ("block", &["x", "cond_scale", "cond_shift", "cond_gate"]),
        "linear_proj" => ("proj", &["x", "residual"]),
        _ => ("pack", &["x"]),
    };
    for name in listed
        .iter()
        .filter(|name| row["inputs"].get(**name).is_none())
    {
        inputs.push(((*name).to_string(), None));
    }
    let keys: Vec<String> = row["outputs"]
        .as_object()
        .expect("a map")
        .keys()
        .cloned()
        .collect();
    let outputs = keys.iter().map(|key| {
        let tensor = row["outputs"][key]["tensor"]
            .as_str()
            .expect("a tensor's name");
        let name = if structure == "decoder_ffn" {
            "out"
        } else {
            key
        };
        (name.to_string(), file.tensor(tensor).dims)
    });
    let variant = row["variant"].as_object().expect("a map").iter();
    let text = |v: &Value| v.as_str().expect("text").to_string();
    let params = row["params"].as_object().expect("a map").iter();
    let case = Case {
        span: span.into(),
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
        weights: tensors(file, &row["weights"]),
        outputs: outputs.collect(),
        amax: Default::default(),
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
    let declared = Portable::description().forms;
    let mut checked = BTreeSet::new();
    for row in index["cases"].as_array().expect("a list") {
        let structure = row["structure"].as_str().expect("a structure");
        if !declared.iter().any(|form| form.structure == structure) {
            continue;
        }
        let id = row["id"].as_str().expect("an id");
        let file = File::read(&root.join(row["file"].as_str().expect("a file")));
        let (mut case, keys) = case(&file, row);
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
    // The repository's fixtures are a part of the oracle, but a part of every structure.
    assert_eq!(checked.len(), 3 * 2, "{checked:?}");
}

#[test]
fn oracle_refusals_are_refused() {
    let Some((_, index)) = index() else { return };
    let mut checked = 0;
    for row in index["refusals"].as_array().expect("a list") {
        let shape = |name: &str, default: &[usize]| -> Values {
            let dims: Vec<usize> = match row["shapes"][name].as_array() {
                Some(dims) => dims
                    .iter()
                    .map(|d| d.as_u64().expect("a size") as usize)
                    .collect(),
                None => default.to_vec(),
            };
            Values::noise(&dims, 1, 1.0)
        };
        let given = |list: &[(&str, &[usize])]| -> Vec<(String, Option<Values>)> {
            list.iter()
                .map(|(n, d)| ((*n).to_string(), Some(shape(n, d))))
                .collect()
        };
        let (span, inputs, weights, out) = match row["structure"].as_str() {
            Some("decoder_ffn") => (
                "block",
                given(&[("x", &[2, 4])]),
                given(&[
                    ("w_norm", &[4]),
                    ("w_gate", &[4, 6]),
                    ("w_up", &[4, 6]),
                    ("w_down", &[6, 4]),
                ]),
                ("out", [2, 4]),
            ),
            Some("linear_proj") => {
                let mut inputs = given(&[("x", &[2, 4])]);
                inputs.push(("residual".into(), None));
                ("proj", inputs, given(&[("w", &[4, 3])]), ("y", [2, 3]))
            }
            _ => continue,
        };
        let id = row["id"].as_str().expect("an id");
        let mut case = Case {
            structure: row["structure"].as_str().expect("a structure").into(),
            span: span.into(),
            dtype: DType::F32,
            variant: Default::default(),
            params: [("eps".to_string(), serde_json::json!(1e-6))].into(),
            inputs,
            weights,
            outputs: vec![(out.0.to_string(), out.1.to_vec())],
            amax: Default::default(),
        };
        case.set("activation", "silu");
        case.set("norm_weight_mode", "direct");
        case.set(
            "epilogue",
            if id.contains("residual") {
                "residual_add"
            } else {
                "none"
            },
        );
        for (axis, value) in row["variant"].as_object().expect("a map") {
            case.set(axis, value.as_str().expect("text"));
        }
        let failure = run("f32", &case, false).expect_err(id);
        let expected = match row["expect"].as_str().expect("a kind") {
            "unknown_variant" => "format_no_variant",
            "shape_mismatch" => "dims_inconsistent",
            "missing_input" => "view_absent",
            other => panic!("{id}: {other}"),
        };
        assert_eq!(failure.code, expected, "{id}: {failure}");
        checked += 1;
    }
    assert!(
        checked > 0,
        "the index lists no refusal of these structures"
    );
}
