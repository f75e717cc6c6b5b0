//! From a binding's seam to a seam of the catalog: both sides know only slots, paths and layouts.

use structures_bindings::{HostFacts, Placed, PlacedWeight};
use structures_catalog::Spec;
use structures_graph::{ModuleTree, ParamRef};
use structures_models::Description;
use structures_seams::{seam_from_binding, BoundSeam, Refusal, Seam, SlotWeight, WeightAddress};

/// What a described model tells a binding.
pub struct ModelFacts<'a>(pub &'a Description);

impl HostFacts for ModelFacts<'_> {
    fn naming(&self) -> &str {
        structures_models::NAMING
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.0.config.number(name).map(|n| n as u64)
    }

    fn module(&self, path: &str) -> bool {
        is_module(&self.0.tree, path)
    }

    fn param(&self, path: &str, name: &str) -> Option<(ParamRef, Vec<usize>)> {
        let param = self.0.params.resolve(path, name)?;
        let (spec, _) = self.0.params.get(path, name)?;
        Some((param, spec.dims.clone()))
    }
}

/// A dump may leave out modules that only hold others.
fn is_module(tree: &ModuleTree, path: &str) -> bool {
    let below = format!("{path}.");
    tree.get(path).is_some() || tree.modules().iter().any(|m| m.path.starts_with(&below))
}

/// The seam, or why the model contradicts the binding.
pub fn seam(spec: &Spec, tree: &ModuleTree, placed: &Placed) -> Result<Seam, Refusal> {
    let weights = placed.weights.iter().map(|(slot, weight)| {
        let source = match weight {
            PlacedWeight::Const(fill) => SlotWeight::Const { fill: *fill },
            PlacedWeight::Stored { param, layout } => SlotWeight::Stored(WeightAddress {
                path: param.path.clone(),
                name: param.name.clone(),
                layout: layout.layout(),
                rows: param.rows,
                reshape: None,
                hint: false,
            }),
        };
        (slot.clone(), source)
    });
    let bound = BoundSeam {
        path: placed.path.clone(),
        weights: weights.collect(),
        dims: placed.dims.clone(),
        variant: placed.variant.clone(),
    };
    seam_from_binding(tree, spec, &bound)
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use indexmap::IndexMap;
    use structures_bindings::{parse, Bindings, Origin};
    use structures_catalog::Catalog;
    use structures_graph::tree::ParamInfo;
    use structures_graph::{
        AttrValue, Dim, Graph, GraphBuilder, Layout, Module, ModuleKind, OpKind, ValueId,
    };
    use structures_seams::locate;

    use super::*;

    fn case(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/fixtures/oracle/e2e")
            .join(name)
    }

    /// The head is the binding's seam; on a tied model its weight is the embedding.
    #[test]
    fn the_head_is_a_seam_of_the_binding() {
        let catalog = Catalog::builtin().unwrap();
        let bindings = Bindings::built_in(&catalog).unwrap();
        for (name, param) in [
            ("llama", "model.embed_tokens.weight"),
            ("qwen3", "lm_head.weight"),
        ] {
            let model = Description::open(&case(name)).unwrap();
            let placed = bindings
                .place(&model.config.model_type, &ModelFacts(&model))
                .unwrap();
            assert_eq!(placed.len(), 1);
            assert_eq!(placed[0].path, "lm_head");
            assert_eq!(placed[0].dims["K"], model.config.hidden_size as u64);
            assert_eq!(placed[0].dims["N"], model.config.vocab_size as u64);
            let spec = catalog.get(&placed[0].structure).unwrap();
            let seam = seam(spec, &model.tree, &placed[0]).unwrap();
            let stored = seam.weights["w"].stored().unwrap();
            assert_eq!(stored.param().to_string(), param);
            // It is the very parameter the graph's last product reads.
            let (_, logits) = &model.graph.outputs[0];
            let (op, _) = model.graph.producer(*logits).unwrap();
            let weight = model.graph.op(op).inputs[1].unwrap();
            assert_eq!(model.graph.param(weight).unwrap().0, &stored.param());
            assert_eq!(model.graph.op(op).module, "lm_head");
        }
    }

    /// A binding of every family a builder has, each placing what discovery cannot see.
    #[test]
    fn every_builder_has_its_binding() {
        let bindings = Bindings::built_in(&Catalog::builtin().unwrap()).unwrap();
        for family in structures_models::FAMILIES {
            for model_type in family.model_types() {
                assert_eq!(bindings.for_model_type(model_type).len(), 1, "{model_type}");
            }
        }
    }

    const D: usize = 4;
    const F: usize = 6;

    /// Two layers that keep gate and up in one tensor.
    struct Fused;

    impl HostFacts for Fused {
        fn naming(&self) -> &str {
            structures_models::NAMING
        }
        fn number(&self, _: &str) -> Option<u64> {
            None
        }
        fn module(&self, path: &str) -> bool {
            is_module(&fused_tree(), path)
        }
        fn param(&self, path: &str, name: &str) -> Option<(ParamRef, Vec<usize>)> {
            let info = fused_tree().get(path)?.params.get(name)?.dims.clone();
            let param = ParamRef {
                path: path.into(),
                name: name.into(),
                rows: None,
            };
            Some((param, info))
        }
    }

    fn fused_tree() -> ModuleTree {
        let module = |path: &str, kind, dims: &[usize]| Module {
            path: path.into(),
            kind: Some(kind),
            params: IndexMap::from([(
                "weight".to_string(),
                ParamInfo {
                    dims: dims.to_vec(),
                    dtype: "f32".into(),
                },
            )]),
            ..Module::default()
        };
        let layer = |i: usize| {
            [
                module(&format!("l.{i}.norm"), ModuleKind::RmsNorm, &[D]),
                module(&format!("l.{i}.gate_up"), ModuleKind::Linear, &[2 * F, D]),
                module(&format!("l.{i}.down"), ModuleKind::Linear, &[D, F]),
            ]
        };
        ModuleTree::new("fused", [layer(0), layer(1)].concat())
    }

    fn fused_graph() -> Graph {
        let dims = |n: usize| {
            vec![
                Dim::Symbol("B".into()),
                Dim::Symbol("T".into()),
                Dim::Size(n),
            ]
        };
        let mut b = GraphBuilder::new("decode");
        let mut h = b.input("h", dims(D));
        for i in 0..2 {
            let at = |part: &str| format!("l.{i}.{part}");
            let param = |b: &mut GraphBuilder, path: &str, rows, dims: &[usize]| {
                let param = ParamRef {
                    path: path.into(),
                    name: "weight".into(),
                    rows,
                };
                b.param(param, dims, Layout::OutIn)
            };
            let op = |b: &mut GraphBuilder, kind, path: &str, of: &[ValueId], attrs: &[_], n| {
                let of: Vec<_> = of.iter().copied().map(Some).collect();
                b.op(kind, path, "y", &of, attrs, dims(n))
            };
            let w = param(&mut b, &at("norm"), None, &[D]);
            let eps = [("eps", AttrValue::Float(1e-5))];
            let n = op(&mut b, OpKind::RmsNorm, &at("norm"), &[h, w], &eps, D);
            let w = param(&mut b, &at("gate_up"), Some((0, F)), &[F, D]);
            let g = op(&mut b, OpKind::Linear, &at("gate_up"), &[n, w], &[], F);
            let silu = [("kind", AttrValue::Word("silu".into()))];
            let a = op(&mut b, OpKind::Act, &at("act"), &[g], &silu, F);
            let w = param(&mut b, &at("gate_up"), Some((F, 2 * F)), &[F, D]);
            let u = op(&mut b, OpKind::Linear, &at("gate_up"), &[n, w], &[], F);
            let m = op(&mut b, OpKind::Mul, &at("mul"), &[a, u], &[], F);
            let w = param(&mut b, &at("down"), None, &[D, F]);
            let y = op(&mut b, OpKind::Linear, &at("down"), &[m, w], &[], D);
            h = op(&mut b, OpKind::Add, &at("add"), &[h, y], &[], D);
        }
        b.output("out", h);
        b.finish()
    }

    const FUSED: &str = r#"
binding: fused
model_types: [fused]
regions:
  - binding: fused_ffn
    structure: decoder_ffn
    dims: {layers: 2, D: 4, F: 6}
    weights_map:
      transformers:
        layout: out_in
        w_norm: l.{i}.norm.weight
        w_gate: {from: "l.{i}.gate_up.weight", rows: [0, F]}
        w_up: {from: "l.{i}.gate_up.weight", rows: [F, 2*F]}
        w_down: l.{i}.down.weight
    hosts: {transformers: {module_path: "l.{i}"}}
"#;

    /// Rows of one stored tensor become slots of a seam, and the graph that reads those rows confirms it.
    #[test]
    fn a_fused_tensor_is_two_slots() {
        let catalog = Catalog::builtin().unwrap();
        let place = |text: &str| {
            let file = parse("fused.yaml", Some("fused"), text, Origin::User, &catalog).unwrap();
            let mut bindings = Bindings::default();
            bindings.add(file).unwrap();
            bindings.place("fused", &Fused).unwrap()
        };
        let placed = place(FUSED);
        assert_eq!(placed.len(), 2);
        let spec = catalog.get(&placed[0].structure).unwrap();
        let graph = fused_graph();
        for one in &placed {
            let seam = seam(spec, &fused_tree(), one).unwrap();
            assert_eq!((seam.dims["D"], seam.dims["F"]), (D as u64, F as u64));
            let located = locate(&graph, spec, &seam);
            assert_eq!(located.len(), 1);
            let l = &located[0];
            assert!(l.refusal.is_none(), "{:?}", l.refusal);
            let spans: Vec<&str> = l.spans.iter().map(|s| s.name.as_str()).collect();
            assert_eq!(spans, ["block", "ffn"], "{:?}", l.fallen);
            let rows = |slot: &str| l.seam.weights[slot].stored().unwrap().rows;
            assert_eq!(
                (rows("w_gate"), rows("w_up")),
                (Some((0, F)), Some((F, 2 * F)))
            );
            assert!(l.corrections.is_empty(), "{:?}", l.corrections);
        }
        // The wrong half is contradicted by the graph, not believed.
        let swapped = FUSED.replace("[0, F]", "[1, F+1]");
        let wrong = seam(spec, &fused_tree(), &place(&swapped)[0]).unwrap();
        let l = &locate(&graph, spec, &wrong)[0];
        assert!(
            l.refusal.is_some() || !l.corrections.is_empty(),
            "{:?}",
            l.spans
        );
    }
}
