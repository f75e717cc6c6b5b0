//! Points that a binding addresses by module: where discovery cannot say which value a point is, the binding names a
//! module and a side of it, and that value of the graph is what is calibrated.

use structures_bindings::Side;
use structures_graph::{Graph, Origin, ValueId};
use structures_seams::{Refusal, Source};

use crate::sites::Site;

/// What flows into or out of a module.
fn value_at(graph: &Graph, module: &str, side: Side) -> Result<ValueId, String> {
    let inside = |path: &str| {
        let rest = path.strip_prefix(module);
        rest.is_some_and(|r| r.is_empty() || r.starts_with('.'))
    };
    let made_inside = |v: ValueId| {
        let made = graph.producer(v);
        made.is_some_and(|(op, _)| inside(&graph.op(op).module))
    };
    let weight = |v: ValueId| {
        matches!(
            graph.value(v).origin,
            Origin::Param { .. } | Origin::State(_)
        )
    };
    let ops: Vec<_> = graph
        .op_ids()
        .filter(|op| inside(&graph.op(*op).module))
        .collect();
    let mut found: Vec<ValueId> = Vec::new();
    match side {
        Side::Input => {
            for op in &ops {
                let first = graph.op(*op).inputs.first().copied().flatten();
                found.extend(first.filter(|v| !made_inside(*v) && !weight(*v)));
            }
        }
        Side::Output => {
            let readers = graph.readers();
            for v in ops.iter().flat_map(|op| &graph.op(*op).outputs) {
                let outside = readers[v.0]
                    .iter()
                    .any(|(op, _)| !inside(&graph.op(*op).module));
                let returned = graph.outputs.iter().any(|(_, o)| o == v);
                if outside || returned {
                    found.push(*v);
                }
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    match found.as_slice() {
        [one] => Ok(*one),
        [] if ops.is_empty() => Err(format!("no operation of the graph is under `{module}`")),
        [] => Err(format!("nothing enters or leaves `{module}` there")),
        many => {
            let names: Vec<&str> = many.iter().map(|v| graph.value(*v).name.as_str()).collect();
            Err(format!(
                "`{module}` has {} values there: {}",
                many.len(),
                names.join(", ")
            ))
        }
    }
}

/// Puts the points of a binding where it says, in every span of the seams it placed; what has no such value is refused
/// and keeps the place the structure gives it.
pub fn place(
    graph: &Graph,
    sites: &mut [Site<'_>],
    structure: &str,
    path: &str,
    points: &[(String, (String, Side))],
) -> Vec<Refusal> {
    let mut refused = Vec::new();
    for (point, (module, side)) in points {
        match value_at(graph, module, *side) {
            Err(why) => {
                let reason = format!("point `{point}`: {why}");
                refused.push(Refusal::new(path, structure, "point_unplaced", reason));
            }
            Ok(value) => {
                let named = |s: &&mut Site<'_>| {
                    s.spec.name == structure
                        && s.seam.path == path
                        && s.seam.source == Source::Binding
                };
                for span in sites.iter_mut().filter(named).flat_map(|s| &mut s.spans) {
                    span.points.insert(point.clone(), value);
                }
            }
        }
    }
    refused
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use structures_bindings::Bindings;
    use structures_catalog::Catalog;
    use structures_models::Description;

    use super::*;
    use crate::bound_seam::ModelFacts;
    use crate::host::survey_headers;

    fn model() -> Description {
        let case = "../../tests/fixtures/oracle/e2e/llama";
        Description::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(case)).unwrap()
    }

    #[test]
    fn a_side_of_a_module_is_one_value_or_none() {
        let model = model();
        let graph = &model.graph;
        let at = |module: &str, side| value_at(graph, module, side);
        let mlp = "model.layers.0.mlp";
        // What enters the feed-forward leaves the norm before it; inside and outside meet at the edge.
        let norm = "model.layers.0.post_attention_layernorm";
        assert_eq!(at(mlp, Side::Input), at(norm, Side::Output));
        let down = format!("{mlp}.down_proj");
        assert_eq!(at(mlp, Side::Output), at(&down, Side::Output));
        for (module, fact) in [
            ("model.layers.7", "no operation"),
            ("model.layers.0.mlp.gate", "no operation"),
        ] {
            let why = at(module, Side::Input).unwrap_err();
            assert!(why.contains(fact), "{why}");
        }
        // Tokens and positions.
        let many = at("model", Side::Input).unwrap_err();
        assert!(many.contains("values there"), "{many}");
    }

    #[test]
    fn a_binding_says_which_value_is_calibrated() {
        let catalog = Catalog::builtin().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let model = model();
        // The head's structure, as the built-in binding has it.
        let built_in = Bindings::built_in(&catalog).unwrap();
        let placed = built_in.place("llama", &ModelFacts(&model)).unwrap();
        let structure = placed[0].structure.clone();
        let file = |module: &str, side: &str| {
            format!(
                "binding: own\nmodel_types: [llama]\nregions:\n  - binding: own_head\n    structure: {structure}\n    \
                 dims: {{layers: 1, K: \"@hidden_size\", N: \"@vocab_size\"}}\n    variant: {{bias: none, epilogue: \
                 none}}\n    weights_map:\n      transformers: {{layout: out_in, w: lm_head.weight}}\n    points: {{x: \
                 {{module: {module}, side: {side}}}}}\n    hosts:\n      transformers: {{module_path: lm_head}}\n"
            )
        };
        let head = |module: &str, side: &str| {
            std::fs::write(dir.path().join("own.yaml"), file(module, side)).unwrap();
            let bindings = Bindings::open(&[dir.path().to_path_buf()], &catalog).unwrap();
            let survey = survey_headers(&catalog, &bindings, &model, &[]).unwrap();
            let site = survey
                .sites
                .iter()
                .find(|s| s.seam.path == "lm_head")
                .unwrap();
            let refused = survey.refused.iter().find(|r| r.path == "lm_head");
            (
                site.spans[0].points["x"],
                refused.map(|r| (r.code.clone(), r.reason.clone())),
            )
        };
        let (usual, refused) = head("model.norm", "output");
        assert_eq!(
            Ok(usual),
            value_at(&model.graph, "model.norm", Side::Output)
        );
        assert_eq!(refused, None);
        let (moved, refused) = head("model.layers.0.mlp", "output");
        assert_eq!(
            Ok(moved),
            value_at(&model.graph, "model.layers.0.mlp", Side::Output)
        );
        assert_ne!(moved, usual);
        assert_eq!(refused, None);
        // A place that is no value is said, and the point stays where the structure has it.
        let (kept, refused) = head("model", "input");
        let (code, reason) = refused.unwrap_or_default();
        assert_eq!((kept, code.as_str()), (usual, "point_unplaced"));
        assert!(
            reason.contains("point `x`") && reason.contains("2 values"),
            "{reason}"
        );
    }
}
