//! From a family's region to seams of a model: instances, roots, constants, row slices.

#![allow(clippy::unwrap_used)] // a test that panics has failed

use structures_bindings::{
    parse, BindingError, Bindings, HostFacts, Origin, Placed, PlacedWeight, Rule, Side,
    StoredLayout,
};
use structures_catalog::spec::ConstFill;
use structures_catalog::Catalog;
use structures_graph::ParamRef;

/// A decoder that stores gate and up in one tensor, and ties its head.
struct Fused;

impl HostFacts for Fused {
    fn naming(&self) -> &str {
        "transformers"
    }
    fn number(&self, name: &str) -> Option<u64> {
        Some(match name {
            "num_hidden_layers" => 2,
            "hidden_size" => 4,
            "intermediate_size" => 6,
            _ => return None,
        })
    }
    fn module(&self, path: &str) -> bool {
        path.starts_with("model.layers.") && !path.ends_with(".nothing")
    }
    fn param(&self, path: &str, name: &str) -> Option<(ParamRef, Vec<usize>)> {
        let dims = match path.rsplit('.').next()? {
            "gate_up" => vec![12, 4],
            "down" => vec![4, 6],
            "norm" => vec![4],
            _ => return None,
        };
        let param = ParamRef {
            path: path.into(),
            name: name.into(),
            rows: None,
        };
        (path.starts_with("model.layers.") && name == "weight").then_some((param, dims))
    }
}

const GOOD: &str = r#"
binding: fused
model_types: [fused]
regions:
  - binding: fused_ffn
    structure: decoder_ffn
    dims: {layers: "@num_hidden_layers", D: "@hidden_size", F: "@intermediate_size"}
    variant: {activation: silu}
    weights_map:
      transformers:
        layout: out_in
        host_root: model
        w_norm: {const: ones}
        w_gate: {from: "layers.{i}.gate_up.weight", rows: [0, F]}
        w_up: {from: "layers.{i}.gate_up.weight", rows: [F, 2*F]}
        w_down: layers.{i}.down.weight
    points:
      act_after_mul: {module: "model.layers.{i}.down", side: input}
    hosts:
      transformers: {module_path: "model.layers.{i}"}
"#;

fn place(text: &str) -> Result<Vec<Placed>, BindingError> {
    let file = parse(
        "fused.yaml",
        Some("fused"),
        text,
        Origin::User,
        &Catalog::builtin().unwrap(),
    )?;
    let mut bindings = Bindings::default();
    bindings.add(file)?;
    bindings.place("fused", &Fused)
}

#[test]
fn slices_of_one_tensor_reach_the_seam() {
    let seams = place(GOOD).unwrap();
    assert_eq!(seams.len(), 2);
    let seam = &seams[1];
    assert_eq!(
        (seam.path.as_str(), seam.structure.as_str(), seam.version),
        ("model.layers.1", "decoder_ffn", 1)
    );
    assert_eq!((seam.dims["D"], seam.dims["F"]), (4, 6));
    let stored = |slot: &str| match &seam.weights[slot] {
        PlacedWeight::Stored { param, layout } => (param.to_string(), param.rows, *layout),
        PlacedWeight::Const(fill) => panic!("{fill:?}"),
    };
    let (gate, rows, layout) = stored("w_gate");
    assert!(gate.starts_with("model.layers.1.gate_up.weight"), "{gate}");
    assert_eq!((rows, layout), (Some((0, 6)), StoredLayout::OutIn));
    assert_eq!(stored("w_up").1, Some((6, 12)));
    assert_eq!(stored("w_down").1, None);
    assert_eq!(seam.weights["w_norm"], PlacedWeight::Const(ConstFill::Ones));
    assert_eq!(
        seam.points["act_after_mul"],
        ("model.layers.1.down".into(), Side::Input)
    );
}

#[test]
fn what_the_model_lacks_is_said_at_its_place() {
    for (from, to, says) in [
        (
            "@hidden_size",
            "@width",
            "expected a number of the host's configuration, found `@width`",
        ),
        (
            "layers.{i}.down.weight",
            "layers.{i}.dwn.weight",
            "found `model.layers.0.dwn.weight`",
        ),
        ("[F, 2*F]", "[F, 3*F]", "expected rows below 12"),
        ("[F, 2*F]", "[2*F, F]", "FROM below TO"),
        ("[F, 2*F]", "[F/(D-4), 2*F]", "F / (D - 4)"),
        (
            "model.layers.{i}.down\", side",
            "model.layers.{i}.nothing\", side",
            "expected a module of the model, found `model.layers.0.nothing`",
        ),
        (
            "\"model.layers.{i}\"}",
            "\"decoder.{i}\"}",
            "expected a module of the model, found `decoder.0`",
        ),
        (
            "host_root: model",
            "host_root: other",
            "found `other.layers.0",
        ),
        (
            "transformers: {module_path",
            "diffusers: {module_path",
            "expected `transformers` in both",
        ),
        ("\"model.layers.{i}\"", "model.layers", "{i} in the path"),
    ] {
        assert!(GOOD.contains(from), "{from}");
        let e = place(&GOOD.replace(from, to)).unwrap_err();
        assert_eq!(e.rule(), Some(Rule::Placement), "{to}: {e}");
        assert!(e.to_string().contains(says), "{to}: {e}");
        assert!(e.place().unwrap().line > 1, "{e}");
    }
}

#[test]
fn a_place_is_bound_once() {
    let file = |name: &str| {
        let text = GOOD.replace("binding: fused", &format!("binding: {name}"));
        parse(
            "f.yaml",
            None,
            &text,
            Origin::User,
            &Catalog::builtin().unwrap(),
        )
        .unwrap()
    };
    let mut bindings = Bindings::default();
    bindings.add(file("one")).unwrap();
    bindings.add(file("two")).unwrap();
    let e = bindings.place("fused", &Fused).unwrap_err();
    assert_eq!(e.rule(), Some(Rule::Placement));
    assert!(
        e.to_string().contains("one_ffn") && e.to_string().contains("two_ffn"),
        "{e}"
    );
    assert!(bindings.place("another", &Fused).unwrap().is_empty());
}
