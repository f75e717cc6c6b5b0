//! End-to-end cases of the oracle and of the repository: logits, hidden states, inputs of every linear module, greedy
//! continuations.
//!
//! Every case directory of the oracle is either of a family this version builds, or listed in
//! `tests/oracle-pending.txt` as `e2e <model_type or _class_name>`; anything else fails. The repository's own
//! (`tests/fixtures/families`, made by the published implementations like those of the oracle) are all of families it
//! builds.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use common::*;
use serde_json::Value;
use structures_graph::{Graph, GraphError, ModuleKind, Observer, OpKind, ValueId};
use structures_models::generate::{advance, advance_at, greedy};
use structures_models::multimodal::{see, Picture};
use structures_models::{Model, FAMILIES};

/// Logits may differ by this much of the largest logit of the sample.
const LOGITS: f32 = 2e-4;
/// Largest inputs may differ by this much of themselves.
const AMAX: f32 = 1e-4;

#[test]
fn cases_of_the_families() {
    let cases = cases(&families());
    assert!(cases.len() >= 5, "{cases:?}");
    for dir in cases {
        check(&dir);
    }
}

fn cases(root: &Path) -> Vec<std::path::PathBuf> {
    let mut cases: Vec<_> = std::fs::read_dir(root)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.join("case.json").is_file())
        .collect();
    cases.sort();
    cases
}

#[test]
fn oracle_e2e() {
    let pending =
        std::fs::read_to_string(repository().join("tests/oracle-pending.txt")).unwrap_or_default();
    let supported: Vec<&str> = FAMILIES.iter().flat_map(|f| f.model_types()).collect();
    let cases = cases(&oracle("e2e"));
    let mut run = 0;
    let mut unknown = Vec::new();
    for dir in cases {
        let config: Value = read_json(&dir.join("config.json"));
        let kind = ["model_type", "_class_name"]
            .iter()
            .find_map(|k| config[*k].as_str());
        let kind = kind.unwrap_or("nothing");
        if supported.contains(&kind) {
            check(&dir);
            run += 1;
        } else if pending.lines().any(|l| l.trim() == format!("e2e {kind}")) {
            println!("skipped {}: e2e {kind} is pending", dir.display());
        } else {
            unknown.push(format!("{} ({kind})", dir.display()));
        }
    }
    assert!(unknown.is_empty(), "neither built nor pending: {unknown:?}");
    assert!(run > 0, "no case of a supported family");
}

fn check(dir: &Path) {
    let name = dir.display();
    let model = Model::open(dir).unwrap();
    let case = read_json(&dir.join("case.json"));
    let io = candle_core::safetensors::load(dir.join("io.safetensors"), &Device::Cpu).unwrap();
    let plan = model.session.host_plan();
    let mut worst = [0f32; 3];
    for (i, sample) in case["samples"].as_array().unwrap().iter().enumerate() {
        let ids = io[&format!("s{i}.in.input_ids")].flatten_all().unwrap();
        let ids: Vec<u32> = ids
            .to_vec1::<i64>()
            .unwrap()
            .iter()
            .map(|t| *t as u32)
            .collect();

        let mut watch = Watch::new(&model, model.graph());
        let mut state = model.session.new_state(1, ids.len());
        let pictures = pictures(&model, &io, i, &ids);
        let (logits, mut position) = if pictures.is_empty() {
            let logits = advance(&model, &plan, &mut state, &ids, Some(&mut watch)).unwrap();
            (logits, ids.len())
        } else {
            let phase = |i: usize| Watch::new(&model, &model.description.phases[i]);
            let (mut encoder, mut decoder) = (phase(0), phase(1));
            let observers: [Option<&mut dyn Observer>; 2] =
                [Some(&mut encoder), Some(&mut decoder)];
            let seen = see(&model, &mut state, &ids, &pictures, observers).unwrap();
            watch.amax = decoder.amax;
            watch.amax.extend(encoder.amax);
            watch.hidden = decoder.hidden;
            (seen.scores, seen.position)
        };

        let want = io[&format!("s{i}.out.logits")].squeeze(0).unwrap();
        let error = difference(&logits, &want) / amax(&want);
        assert!(
            error < LOGITS,
            "{name} sample {i}: logits differ by {error}"
        );
        worst[0] = worst[0].max(error);

        for j in 0.. {
            let Some(want) = io.get(&format!("s{i}.hidden.{j}")) else {
                break;
            };
            let last = j == model.config().layers;
            let root = model.config().root;
            let value = match j {
                0 if pictures.is_empty() => format!("{root}.embed_tokens.out"),
                0 => format!("{root}.inputs_embeds"),
                _ if last => format!("{root}.norm.out"),
                _ => format!("{root}.layers.{}.out", j - 1),
            };
            let error = difference(&watch.hidden[&value], want) / amax(want);
            assert!(
                error < LOGITS,
                "{name} sample {i}: hidden {j} differs by {error}"
            );
            worst[1] = worst[1].max(error);
        }

        let points = case["input_amax"]["points"].as_array().unwrap();
        let rows = case["input_amax"]["per_sample"][i].as_array().unwrap();
        let reached = rows.iter().filter(|r| !r.is_null()).count();
        assert_eq!(reached, watch.amax.len(), "{name}: linear modules");
        for (point, want) in points.iter().zip(rows) {
            let point = point.as_str().unwrap();
            if want.is_null() {
                assert!(!watch.amax.contains_key(point), "{name}: {point}");
                continue;
            }
            let want = want.as_f64().unwrap() as f32;
            let got = watch.amax[point];
            let error = (got - want).abs() / want.abs().max(f32::MIN_POSITIVE);
            assert!(
                error < AMAX,
                "{name} sample {i}: input of {point}: {got}, expected {want}"
            );
            worst[2] = worst[2].max(error);
        }

        let want: Vec<u32> = serde_json::from_value(sample["greedy"].clone()).unwrap();
        let mut got = vec![greedy(&logits).unwrap()];
        while got.len() < want.len() {
            let token = *got.last().unwrap();
            let next = advance_at(&model, &plan, &mut state, &[token], position, None).unwrap();
            got.push(greedy(&next).unwrap());
            position += 1;
        }
        assert_eq!(got, want, "{name} sample {i}: greedy tokens");
    }
    println!(
        "{name}: logits {:.1e}, hidden {:.1e}, input amax {:.1e}",
        worst[0], worst[1], worst[2]
    );
}

/// Pictures of a sample, where it has some, in the order of the text: all patches of a kind together, a grid for each.
fn pictures(
    model: &Model,
    io: &HashMap<String, Tensor>,
    sample: usize,
    ids: &[u32],
) -> Vec<Picture> {
    let Some(sight) = &model.description.sight else {
        return Vec::new();
    };
    let kinds = [
        ("pixel_values", "image_grid_thw"),
        ("pixel_values_videos", "video_grid_thw"),
    ];
    let mut waiting = kinds.map(|(values, grids)| {
        let get = |name: &str| io.get(&format!("s{sample}.in.{name}"));
        let (Some(values), Some(grids)) = (get(values), get(grids)) else {
            return Vec::new().into_iter();
        };
        let mut from = 0;
        let mut pictures = Vec::new();
        for grid in grids.to_vec2::<i64>().unwrap() {
            let grid = [grid[0] as usize, grid[1] as usize, grid[2] as usize];
            let n = grid.iter().product::<usize>();
            let patches = values.narrow(0, from, n).unwrap();
            pictures.push(Picture { patches, grid });
            from += n;
        }
        pictures.into_iter()
    });
    let mut ordered = Vec::new();
    let mut at = 0;
    while at < ids.len() {
        let Some(kind) = sight.placeholders.iter().position(|p| *p == ids[at]) else {
            at += 1;
            continue;
        };
        let picture = waiting[kind].next().unwrap();
        let [t, h, w] = picture.grid;
        let mut left = t * h * w / (sight.merge * sight.merge);
        while left > 0 {
            left -= usize::from(ids[at] == sight.placeholders[kind]);
            at += 1;
        }
        ordered.push(picture);
    }
    ordered
}

/// Inputs of linear modules and the residual stream.
struct Watch {
    /// Value -> modules whose linear reads it.
    readers: HashMap<ValueId, Vec<String>>,
    names: HashMap<ValueId, String>,
    amax: HashMap<String, f32>,
    hidden: HashMap<String, Tensor>,
}

impl Watch {
    fn new(model: &Model, graph: &Graph) -> Self {
        let root = model.config().root;
        let mut readers: HashMap<ValueId, Vec<String>> = HashMap::new();
        // A router is a product too, but no linear module.
        let linear = |path: &str| {
            let module = model.tree().get(path);
            module.is_some_and(|m| m.kind == Some(ModuleKind::Linear))
        };
        let products = graph.ops.iter().filter(|o| o.kind == OpKind::Linear);
        for op in products.filter(|o| linear(&o.module)) {
            readers
                .entry(op.inputs[0].unwrap())
                .or_default()
                .push(op.module.clone());
        }
        let stream = |n: &str| {
            let parent = n.strip_suffix(".out").unwrap_or("");
            n == format!("{root}.inputs_embeds")
                || parent == format!("{root}.embed_tokens")
                || parent == format!("{root}.norm")
                || parent
                    .rsplit_once('.')
                    .is_some_and(|(p, _)| p == format!("{root}.layers"))
        };
        let names = graph
            .values
            .iter()
            .enumerate()
            .filter(|(_, v)| stream(&v.name));
        Watch {
            readers,
            names: names.map(|(i, v)| (ValueId(i), v.name.clone())).collect(),
            amax: HashMap::new(),
            hidden: HashMap::new(),
        }
    }
}

impl Observer for Watch {
    fn wants(&self, value: ValueId) -> bool {
        self.readers.contains_key(&value) || self.names.contains_key(&value)
    }

    fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError> {
        for module in self.readers.get(&value).into_iter().flatten() {
            let most = self.amax.entry(module.clone()).or_default();
            *most = most.max(amax(tensor));
        }
        if let Some(name) = self.names.get(&value) {
            self.hidden.insert(name.clone(), tensor.copy().unwrap());
        }
        Ok(())
    }
}

fn amax(t: &Tensor) -> f32 {
    let values = t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    values.iter().fold(0f32, |m, v| m.max(v.abs()))
}

/// Largest difference; NaN counts as infinite.
fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let values = (a - b)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    values.iter().fold(0f32, |m, v| {
        if v.is_nan() {
            f32::INFINITY
        } else {
            m.max(v.abs())
        }
    })
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
