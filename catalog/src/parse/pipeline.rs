//! `kind: stage_pipeline`: stages with their cadences and windows, the regions they embed, what must be shown.

use indexmap::IndexMap;

use crate::document::{Fields, Node};
use crate::error::CatalogError;
use crate::names;
use crate::spec::{
    Buffer, CadenceSubstructure, Capture, Pipeline, Stage, StageLoop, StagePort, StateRegion,
    Window,
};

/// Keys of a pipeline that a region does not have.
pub(super) const KEYS: &[&str] = &[
    "family",
    "stages",
    "embedded_regions",
    "state_regions",
    "cadence_substructures",
    "conformance",
];

pub(super) fn pipeline(f: &Fields) -> Result<Pipeline, CatalogError> {
    let family = f.need("family")?;
    let stages_node = f.need("stages")?;
    let mut stages: Vec<Stage> = Vec::new();
    for n in stages_node.items()? {
        let stage = stage(&n)?;
        if stages.iter().any(|s| s.name == stage.name) {
            let at = n.find(&["name"]);
            return Err(at.invalid(format!("stage `{}` stands here twice", stage.name)));
        }
        stages.push(stage);
    }
    if stages.iter().all(|s| s.optional) {
        return Err(stages_node.invalid("expected at least one stage that is not optional"));
    }
    let embedded = f.need("embedded_regions")?;
    let pipeline = Pipeline {
        family: name(family)?,
        stages,
        embedded: words(embedded)?,
        state_regions: f
            .need("state_regions")?
            .entries()?
            .into_iter()
            .map(state)
            .collect::<Result<_, _>>()?,
        cadence_substructures: match f.get("cadence_substructures") {
            None => Vec::new(),
            Some(n) => n
                .entries()?
                .into_iter()
                .map(substructure)
                .collect::<Result<_, _>>()?,
        },
        conformance: words(f.need("conformance")?)?,
    };
    if pipeline.embedded.is_empty() {
        return Err(embedded.invalid("expected at least one region"));
    }
    if pipeline.conformance.is_empty() {
        return Err(f
            .need("conformance")?
            .invalid("expected at least one statement to be shown"));
    }
    for (i, region) in pipeline.state_regions.iter().enumerate() {
        for (key, named) in [("writers", &region.writers), ("readers", &region.readers)] {
            let unknown = named
                .iter()
                .find(|s| pipeline.stages.iter().all(|t| t.name != **s));
            if let Some(stage) = unknown {
                let region = &pipeline.state_regions[i].name;
                let at = f.find(&["state_regions", region, key]);
                return Err(at.invalid(format!("`{stage}` is no stage of this entry")));
            }
        }
    }
    Ok(pipeline)
}

fn name(n: &Node) -> Result<String, CatalogError> {
    let text = n.text()?;
    match names::is_name(text) {
        true => Ok(text.into()),
        false => Err(n.invalid(format!(
            "`{text}`: a name is small letters, digits and `_`, a letter first"
        ))),
    }
}

// Names, each once.
fn words(n: &Node) -> Result<Vec<String>, CatalogError> {
    n.names()?;
    n.items()?.iter().map(name).collect()
}

fn stage(node: &Node) -> Result<Stage, CatalogError> {
    let f = node.fields(&[
        "name", "optional", "cadence", "inputs", "outputs", "capture", "loop",
    ])?;
    let (inputs, outputs) = (ports(f.need("inputs")?)?, ports(f.need("outputs")?)?);
    Ok(Stage {
        name: name(f.need("name")?)?,
        optional: f.flag("optional")?,
        cadence: name(f.need("cadence")?)?,
        inputs,
        outputs,
        capture: choice(f.need("capture")?, Capture::WORDS)?,
        repeats: f.get("loop").map(repeats).transpose()?,
    })
}

fn ports(node: &Node) -> Result<Vec<StagePort>, CatalogError> {
    let mut ports: Vec<StagePort> = Vec::new();
    for (key, n) in node.entries()? {
        if !names::is_name(&key) {
            return Err(n.invalid(format!("`{key}` is no name of a tensor")));
        }
        let f = n.fields(&["window", "buffer", "read_only", "optional", "cadence"])?;
        let window = match f.get("window") {
            None => Vec::new(),
            Some(w) if w.value().is_sequence() => {
                let mut all = Vec::new();
                for item in w.items()? {
                    let one = choice(&item, Window::WORDS)?;
                    if all.contains(&one) {
                        return Err(item.invalid("this window stands here twice"));
                    }
                    all.push(one);
                }
                all
            }
            Some(w) => vec![choice(w, Window::WORDS)?],
        };
        let buffer = f
            .get("buffer")
            .map(|b| choice(b, Buffer::WORDS))
            .transpose()?;
        let cadence = f.get("cadence").map(name).transpose()?;
        if window.is_empty() && buffer.is_none() && cadence.is_none() {
            return Err(n.invalid(
                "expected a `window`, a `buffer` or a `cadence`: who rewrites it, and when",
            ));
        }
        let read_only = f.flag("read_only")?;
        if read_only && buffer == Some(Buffer::Mutable) {
            return Err(n.invalid("a mutable buffer cannot be read-only"));
        }
        ports.push(StagePort {
            name: key,
            window,
            buffer,
            read_only,
            optional: f.flag("optional")?,
            cadence,
        });
    }
    if ports.is_empty() {
        return Err(node.invalid("expected at least one tensor"));
    }
    Ok(ports)
}

fn repeats(node: &Node) -> Result<StageLoop, CatalogError> {
    let f = node.fields(&["steps", "shape"])?;
    let steps = f.need("steps")?;
    let steps = match steps.value().as_u64() {
        Some(0) => return Err(steps.invalid("expected at least one step")),
        Some(n) => Some(n),
        None if steps.text()? == "@binding" => None,
        None => return Err(steps.invalid("expected a number of steps or @binding")),
    };
    let shape = f.need("shape")?;
    Ok(StageLoop {
        steps,
        fixed_shape: choice(shape, &[("fixed", true), ("host_dependent", false)])?,
    })
}

fn state((key, n): (String, Node)) -> Result<StateRegion, CatalogError> {
    if !names::is_name(&key) {
        return Err(n.invalid(format!("`{key}` is no name of a state region")));
    }
    let f = n.fields(&["cadence", "writers", "readers"])?;
    let stages = |key: &str| f.get(key).map_or(Ok(Vec::new()), words);
    let (writers, readers) = (stages("writers")?, stages("readers")?);
    let cadence = f.get("cadence").map(name).transpose()?;
    if writers.is_empty() && cadence.is_none() {
        return Err(n.invalid("expected `writers` or a `cadence`: who changes it, or when"));
    }
    Ok(StateRegion {
        name: key,
        cadence,
        writers,
        readers,
    })
}

fn substructure((key, n): (String, Node)) -> Result<CadenceSubstructure, CatalogError> {
    if !names::is_name(&key) {
        return Err(n.invalid(format!("`{key}` is no name of a substructure")));
    }
    Ok(CadenceSubstructure {
        cadence: name(&n)?,
        name: key,
    })
}

fn choice<T: Copy>(n: &Node, of: &[(&str, T)]) -> Result<T, CatalogError> {
    let found = n.text()?;
    let all: IndexMap<&str, T> = of.iter().copied().collect();
    all.get(found).copied().ok_or_else(|| {
        let words: Vec<&str> = all.keys().copied().collect();
        n.invalid(format!(
            "expected one of {}, found `{found}`",
            words.join(", ")
        ))
    })
}
