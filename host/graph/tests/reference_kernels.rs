//! Kernels against the reference cases that are one or two operations: attention_core, gated_delta_core, norm_fused,
//! qk_norm_rope. `STRUCTURES_ORACLE` names the whole oracle; without it the cases beside this file serve.
//! A bfloat16 case is compared in f32: its inputs widened, against the oracle's f32 result on the same inputs.

#![allow(clippy::unwrap_used)] // a failed unwrap is a failed test

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use structures_graph::{eval, AttrValue, Attrs, OpKind};

struct Case {
    id: String,
    params: Value,
    variant: Value,
    tensors: HashMap<String, Tensor>,
}

impl Case {
    fn tensor(&self, name: &str) -> Option<Tensor> {
        self.tensors.get(name).cloned()
    }

    fn run(
        &self,
        kind: OpKind,
        inputs: &[Option<Tensor>],
        attrs: &[(&str, AttrValue)],
    ) -> Vec<Tensor> {
        let attrs: Attrs = attrs
            .iter()
            .map(|(k, v)| ((*k).into(), v.clone()))
            .collect();
        eval(kind, &attrs, inputs, &[]).unwrap_or_else(|e| panic!("{}: {e}", self.id))
    }

    /// `max|a-b| <= 1e-5 max|b|`.
    fn compare(&self, name: &str, got: &Tensor) {
        let want = self
            .tensor(&format!("out_f32.{name}"))
            .or_else(|| self.tensor(&format!("out.{name}")))
            .unwrap_or_else(|| panic!("{} has no output {name}", self.id));
        assert_eq!(got.dims(), want.dims(), "{} {name}", self.id);
        let flat = |t: &Tensor| -> Vec<f32> {
            let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
            t.to_vec1().unwrap()
        };
        let (got, want) = (flat(got), flat(&want));
        let peak = want.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (g, w) in got.iter().zip(&want) {
            assert!(
                (g - w).abs() <= 1e-5 * peak,
                "{} {name}: {g} is not {w}",
                self.id
            );
        }
    }

    fn number(&self, name: &str) -> AttrValue {
        self.params[name]
            .as_f64()
            .map_or(AttrValue::Absent, AttrValue::Float)
    }
}

/// Cases of the given oracle, else of the copies beside this file: a structure may be left out of either.
fn cases(structure: &str) -> Vec<Case> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/reference");
    let given = std::env::var_os("STRUCTURES_ORACLE").map(|d| PathBuf::from(d).join("reference"));
    let cases = given
        .into_iter()
        .filter(|d| d.is_dir())
        .chain([own])
        .map(|dir| cases_in(&dir, structure))
        .find(|cases| !cases.is_empty());
    cases.unwrap_or_else(|| panic!("no case of {structure}"))
}

fn cases_in(dir: &Path, structure: &str) -> Vec<Case> {
    let index = std::fs::read(dir.join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    index["cases"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|c| c["structure"] == structure)
        .map(|c| {
            let file = dir.join(c["file"].as_str().unwrap());
            Case {
                id: c["id"].as_str().unwrap().into(),
                params: c["params"].clone(),
                variant: c["variant"].clone(),
                tensors: candle_core::safetensors::load(file, &Device::Cpu).unwrap(),
            }
        })
        .collect()
}

#[test]
fn attention() {
    for c in cases("attention_core") {
        let inputs = ["in.q", "in.k", "in.v", "in.mask"].map(|n| c.tensor(n));
        let y = c.run(OpKind::Attention, &inputs, &[("scale", c.number("scale"))]);
        c.compare("out", &y[0]);
        if c.params["mask"] == "causal" {
            let causal = [
                ("causal", AttrValue::Flag(true)),
                ("scale", c.number("scale")),
            ];
            let y = c.run(OpKind::Attention, &inputs[..3], &causal);
            c.compare("out", &y[0]);
        }
    }
}

#[test]
fn gated_delta() {
    for c in cases("gated_delta_core") {
        let inputs = ["q", "k", "v", "log_decay", "beta", "state"];
        let inputs = inputs.map(|n| c.tensor(&format!("in.{n}")));
        let l2 = AttrValue::Flag(c.params["qk_l2norm"].as_bool().unwrap_or(true));
        let y = c.run(
            OpKind::GatedDelta,
            &inputs,
            &[("l2", l2), ("l2_eps", c.number("l2_eps"))],
        );
        c.compare("out", &y[0]);
        c.compare("final_state", &y[1]);
    }
}

#[test]
fn layer_norm() {
    for c in cases("norm_fused") {
        let inputs = ["in.x", "w.w", "w.b"].map(|n| c.tensor(n));
        let y = c.run(OpKind::LayerNorm, &inputs, &[("eps", c.number("eps"))]);
        c.compare("y", &y[0]);
    }
}

#[test]
fn norm_and_rope() {
    for c in cases("qk_norm_rope") {
        let axes = if c.variant["normalization_scope"] == "projection" {
            2
        } else {
            1
        };
        let word = |name: &str| AttrValue::Word(c.variant[name].as_str().unwrap_or("").into());
        for side in ["q", "k"] {
            let inputs = [
                c.tensor(&format!("in.{side}")),
                c.tensor(&format!("w.{side}_norm_weight")),
            ];
            let norm = [
                ("eps", c.number("eps")),
                ("weight", word("norm_weight_mode")),
                ("axes", AttrValue::Int(axes)),
            ];
            let n = c.run(OpKind::RmsNorm, &inputs, &norm).remove(0);
            let inputs = [Some(n), c.tensor("in.cos"), c.tensor("in.sin")];
            let rope = [
                ("layout", word("rope_layout")),
                ("rotary", c.number("rotary_dim")),
            ];
            let y = c.run(OpKind::Rope, &inputs, &rope).remove(0);
            let name = c
                .tensors
                .keys()
                .find(|k| k.starts_with("out.") && k[4..].starts_with(side) && k.len() > 4);
            c.compare(
                &name.unwrap_or_else(|| panic!("{}: no output of {side}", c.id))[4..],
                &y,
            );
        }
    }
}
