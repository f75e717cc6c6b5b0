//! Binding files: where seams sit on a host family that discovery cannot see, such as the output head.
//!
//! A file is stored under its own name and holds the region bindings of one family. Structure names, axes and dims
//! are words here; whether they exist is asked where the catalog is known ([`Bindings::check_structures`]). Pipeline
//! bindings (stages, cadences, coverage) are not read yet and are refused by name.

use std::path::Path;

use indexmap::IndexMap;
use serde::Deserialize;
use serde_yaml::Value;
use structures_graph::ParamRef;

use crate::config::DecoderConfig;
use crate::params::ParamMap;
use crate::ModelError;

/// File stem and text of every binding file of the repository.
const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/embedded_bindings.rs"));

/// How a weight lies in the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredLayout {
    /// `[out, in]`, seen through swapped strides where the slot is `in, out`.
    OutIn,
    /// `[out, in]`, and the slot is too.
    OutInNative,
}

/// Where a slot's content comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightSource {
    /// A parameter, `{i}` still in its path.
    Param {
        /// Module path.
        path: String,
        /// Parameter name.
        name: String,
        /// How it is stored.
        layout: StoredLayout,
    },
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
}

/// A size: a number, or one of the host's configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum DimSource {
    /// Written out.
    Number(usize),
    /// `@hidden_size`.
    Config(String),
}

/// Explicit place of a calibration point.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PointPlace {
    /// Module path, `{i}` still in it.
    pub module: String,
    /// Which side of it.
    pub side: Side,
}

/// Side of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // the words say it
pub enum Side {
    Input,
    Output,
}

/// One region binding.
#[derive(Clone, Debug, PartialEq)]
pub struct SeamBinding {
    /// Its name.
    pub binding: String,
    /// The structure it places.
    pub structure: String,
    /// Pinned version.
    pub version: Option<u32>,
    /// How many there are; `{i}` runs below it.
    pub instances: DimSource,
    /// Module path of a seam, `{i}` still in it.
    pub path: String,
    /// Slot -> source.
    pub weights: IndexMap<String, WeightSource>,
    /// Symbol -> size.
    pub dims: IndexMap<String, DimSource>,
    /// Axis -> value.
    pub variant: IndexMap<String, String>,
    /// Declared boundary dtype, normalised (`bf16`, `f16`, `f32`).
    pub boundary_dtype: Option<String>,
    /// Points placed explicitly.
    pub points: IndexMap<String, PointPlace>,
}

/// A slot of an [`ExtraSeam`], ties followed.
#[derive(Clone, Debug, PartialEq)]
pub enum ExtraWeight {
    /// The parameter the graph reads.
    Param {
        /// Which.
        param: ParamRef,
        /// How it is stored.
        layout: StoredLayout,
    },
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
}

/// A seam a binding places on one model.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtraSeam {
    /// Name of the binding.
    pub binding: String,
    /// Structure.
    pub structure: String,
    /// Pinned version.
    pub version: Option<u32>,
    /// Module path.
    pub path: String,
    /// Slot -> content.
    pub weights: IndexMap<String, ExtraWeight>,
    /// Symbol -> size.
    pub dims: IndexMap<String, usize>,
    /// Axis -> value.
    pub variant: IndexMap<String, String>,
    /// Point -> place.
    pub points: IndexMap<String, PointPlace>,
}

/// One file.
#[derive(Clone, Debug, PartialEq)]
pub struct BindingFile {
    /// Its name.
    pub name: String,
    /// Models it is for.
    pub model_types: Vec<String>,
    /// Its regions.
    pub regions: Vec<SeamBinding>,
}

/// All known files, sorted by name.
#[derive(Clone, Debug, Default)]
pub struct Bindings {
    files: Vec<BindingFile>,
}

impl Bindings {
    /// The ones of the repository.
    pub fn built_in() -> Result<Self, ModelError> {
        let files = EMBEDDED.iter().map(|(stem, text)| parse(stem, text));
        let mut bindings = Bindings {
            files: files.collect::<Result<_, _>>()?,
        };
        bindings.files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(bindings)
    }

    /// Adds every `*.yaml` of a directory; a file of a known name replaces it.
    pub fn add_directory(&mut self, dir: &Path) -> Result<(), ModelError> {
        let io = |e| ModelError::io(dir, "list it", e, "give a directory of binding files");
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|e| e == "yaml") {
                paths.push(path);
            }
        }
        paths.sort();
        for path in paths {
            let text = std::fs::read_to_string(&path)
                .map_err(|e| ModelError::io(&path, "read it", e, "check the file"))?;
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            let file = parse(&stem, &text)?;
            self.files.retain(|f| f.name != file.name);
            self.files.push(file);
        }
        self.files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(())
    }

    /// All files.
    pub fn files(&self) -> &[BindingFile] {
        &self.files
    }

    /// The region bindings for a model type.
    pub fn for_model_type(&self, model_type: &str) -> Vec<&SeamBinding> {
        self.files
            .iter()
            .filter(|f| f.model_types.iter().any(|t| t == model_type))
            .flat_map(|f| &f.regions)
            .collect()
    }

    /// Asks the catalog about every structure named (V-04).
    pub fn check_structures(
        &self,
        known: impl Fn(&str, Option<u32>) -> bool,
    ) -> Result<(), ModelError> {
        for (file, region) in self
            .files
            .iter()
            .flat_map(|f| f.regions.iter().map(move |r| (f, r)))
        {
            if !known(&region.structure, region.version) {
                let pin = region.version.map(|v| format!("@{v}")).unwrap_or_default();
                let reason = format!(
                    "{}: expected a structure of the catalog, found `{}{pin}`",
                    region.binding, region.structure
                );
                return Err(invalid(&file.name, "V-04", reason));
            }
        }
        Ok(())
    }
}

/// The built-in region bindings for a model type.
pub fn bindings_for(model_type: &str) -> Result<Vec<SeamBinding>, ModelError> {
    let bindings = Bindings::built_in()?;
    Ok(bindings
        .for_model_type(model_type)
        .into_iter()
        .cloned()
        .collect())
}

impl SeamBinding {
    /// The seams it places on one model. A slot whose parameter the model lacks is an error: a binding names what
    /// is there.
    pub fn seams(
        &self,
        config: &DecoderConfig,
        params: &ParamMap,
    ) -> Result<Vec<ExtraSeam>, ModelError> {
        let solve = |what: &str, source: &DimSource| match source {
            DimSource::Number(n) => Ok(*n),
            DimSource::Config(name) => config.number(name).ok_or_else(|| {
                let reason =
                    format!("{what}: expected a number of the host's config, found `@{name}`");
                invalid(&self.binding, "dims", reason)
            }),
        };
        let mut dims = IndexMap::new();
        for (symbol, source) in &self.dims {
            dims.insert(symbol.clone(), solve(symbol, source)?);
        }
        let mut seams = Vec::new();
        for i in 0..solve("layers", &self.instances)? {
            let at = |template: &str| template.replace("{i}", &i.to_string());
            let mut weights = IndexMap::new();
            for (slot, source) in &self.weights {
                let weight = match source {
                    WeightSource::Zeros => ExtraWeight::Zeros,
                    WeightSource::Ones => ExtraWeight::Ones,
                    WeightSource::Param { path, name, layout } => {
                        let Some(param) = params.resolve(&at(path), name) else {
                            let reason = format!(
                                "slot `{slot}`: expected a parameter of the model, found `{}.{name}`",
                                at(path)
                            );
                            return Err(invalid(&self.binding, "weights_map", reason));
                        };
                        ExtraWeight::Param {
                            param,
                            layout: *layout,
                        }
                    }
                };
                weights.insert(slot.clone(), weight);
            }
            let points = self.points.iter().map(|(point, place)| {
                let module = at(&place.module);
                (
                    point.clone(),
                    PointPlace {
                        module,
                        ..place.clone()
                    },
                )
            });
            seams.push(ExtraSeam {
                binding: self.binding.clone(),
                structure: self.structure.clone(),
                version: self.version,
                path: at(&self.path),
                weights,
                dims: dims.clone(),
                variant: self.variant.clone(),
                points: points.collect(),
            });
        }
        Ok(seams)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    #[allow(dead_code)] // read and checked before, as text
    binding: String,
    model_types: Vec<String>,
    regions: Vec<RawRegion>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRegion {
    binding: String,
    structure: String,
    dims: IndexMap<String, RawDim>,
    #[serde(default)]
    variant: IndexMap<String, String>,
    #[serde(default)]
    boundary_dtype: Option<String>,
    weights_map: IndexMap<String, RawWeights>,
    #[serde(default)]
    points: IndexMap<String, PointPlace>,
    hosts: IndexMap<String, RawHost>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawDim {
    Number(usize),
    Text(String),
}

#[derive(Deserialize)]
struct RawWeights {
    layout: StoredLayout,
    #[serde(flatten)]
    slots: IndexMap<String, RawSource>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawSource {
    Template(String),
    Const(RawConst),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConst {
    #[serde(rename = "const")]
    value: ConstKind,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ConstKind {
    Zeros,
    Ones,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHost {
    module_path: String,
    #[serde(default)]
    #[allow(dead_code)] // part of the schema; native hosts have no version to compare with
    versions: Option<String>,
}

/// The host whose names native builders use.
const HOST: &str = "transformers";
/// A binding file is a page of text.
const MAX_BYTES: usize = 1 << 20;

fn parse(stem: &str, text: &str) -> Result<BindingFile, ModelError> {
    if text.len() > MAX_BYTES {
        return Err(invalid(
            stem,
            "schema",
            format!("expected at most {MAX_BYTES} bytes, found {}", text.len()),
        ));
    }
    let schema = |e: serde_yaml::Error| invalid(stem, "schema", e.to_string());
    let document: Value = serde_yaml::from_str(text).map_err(schema)?;
    let name = word(stem, &document, "binding")?;
    good_name(stem, &name)?;
    if name != stem {
        let reason = format!("expected the file's name `{stem}`, found binding `{name}`");
        return Err(invalid(stem, "V-03", reason));
    }
    for key in ["stages", "cadences", "coverage"] {
        if document.get(key).is_some() {
            let reason = format!("pipeline bindings are not read yet, found `{key}`");
            return Err(invalid(stem, "schema", reason));
        }
    }
    if let Some(regions) = document.get("regions").and_then(Value::as_sequence) {
        for region in regions {
            let name = word(stem, region, "binding")?;
            word(stem, region, "structure")?;
            if region.get("coverage").is_some() {
                let reason = format!("{name}: a region binding has no coverage");
                return Err(invalid(stem, "V-05", reason));
            }
        }
    }
    let raw: RawFile = serde_yaml::from_value(document).map_err(schema)?;
    let mut regions: Vec<SeamBinding> = Vec::new();
    for region in raw.regions {
        if regions.iter().any(|r| r.binding == region.binding) {
            let reason = format!("expected names once, found `{}` twice", region.binding);
            return Err(invalid(stem, "V-02", reason));
        }
        regions.push(typed(stem, region)?);
    }
    Ok(BindingFile {
        name,
        model_types: raw.model_types,
        regions,
    })
}

fn typed(stem: &str, raw: RawRegion) -> Result<SeamBinding, ModelError> {
    good_name(stem, &raw.binding)?;
    let bad = |what: &str, reason: String| {
        invalid(stem, "schema", format!("{}: {what}: {reason}", raw.binding))
    };
    let (structure, version) = match raw.structure.split_once('@') {
        None => (raw.structure.clone(), None),
        Some((name, v)) => match v.parse() {
            Ok(v) => (name.to_string(), Some(v)),
            Err(_) => {
                return Err(bad(
                    "structure",
                    format!("expected NAME@VERSION, found `{}`", raw.structure),
                ))
            }
        },
    };
    let mut dims = IndexMap::new();
    for (symbol, value) in raw.dims {
        let source = match value {
            RawDim::Number(n) => DimSource::Number(n),
            RawDim::Text(t) => match t.strip_prefix('@') {
                Some(name) if !name.is_empty() => DimSource::Config(name.into()),
                _ => {
                    return Err(bad(
                        "dims",
                        format!("{symbol}: expected a number or @name, found `{t}`"),
                    ))
                }
            },
        };
        dims.insert(symbol, source);
    }
    let Some(instances) = dims.shift_remove("layers") else {
        return Err(bad(
            "dims",
            "expected `layers`, the number of instances, found none".into(),
        ));
    };
    let (Some(host), Some(map)) = (raw.hosts.get(HOST), raw.weights_map.get(HOST)) else {
        return Err(bad(
            "hosts and weights_map",
            format!("expected `{HOST}` in both"),
        ));
    };
    let mut weights = IndexMap::new();
    for (slot, source) in &map.slots {
        let source = match source {
            RawSource::Const(RawConst {
                value: ConstKind::Zeros,
            }) => WeightSource::Zeros,
            RawSource::Const(RawConst {
                value: ConstKind::Ones,
            }) => WeightSource::Ones,
            RawSource::Template(t) => match t.rsplit_once('.') {
                Some((path, name)) if !path.is_empty() && !name.is_empty() => WeightSource::Param {
                    path: path.into(),
                    name: name.into(),
                    layout: map.layout,
                },
                _ => {
                    return Err(bad(
                        "weights_map",
                        format!("{slot}: expected MODULE.PARAM, found `{t}`"),
                    ))
                }
            },
        };
        weights.insert(slot.clone(), source);
    }
    let boundary_dtype = match raw.boundary_dtype.as_deref() {
        None => None,
        Some("f32" | "float32") => Some("f32".to_string()),
        Some(t @ ("bf16" | "f16")) => Some(t.to_string()),
        Some(t) => {
            return Err(bad(
                "boundary_dtype",
                format!("expected bf16, f16 or f32, found `{t}`"),
            ))
        }
    };
    Ok(SeamBinding {
        path: host.module_path.clone(),
        structure,
        version,
        instances,
        weights,
        dims,
        variant: raw.variant,
        boundary_dtype,
        points: raw.points,
        binding: raw.binding,
    })
}

/// A field that must be there and not blank (V-01).
fn word(stem: &str, value: &Value, field: &str) -> Result<String, ModelError> {
    if !value.is_mapping() {
        return Err(invalid(stem, "V-01", "expected a mapping".into()));
    }
    match value.get(field).and_then(Value::as_str) {
        Some(s) if !s.trim().is_empty() => Ok(s.to_string()),
        _ => Err(invalid(
            stem,
            "V-01",
            format!("`{field}`: expected a text, found none"),
        )),
    }
}

/// `^[a-z0-9][a-z0-9_.-]*$` (V-02).
fn good_name(stem: &str, name: &str) -> Result<(), ModelError> {
    let start = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let rest = |c: char| start(c) || matches!(c, '_' | '.' | '-');
    if name.starts_with(start) && name.chars().all(rest) {
        return Ok(());
    }
    let reason = format!("expected a name of a-z, 0-9, `_`, `.`, `-`, found `{name}`");
    Err(invalid(stem, "V-02", reason))
}

fn invalid(file: &str, rule: &'static str, reason: String) -> ModelError {
    ModelError::Binding {
        file: file.into(),
        rule,
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "binding: x\nmodel_types: [m]\nregions:\n  - binding: x_a\n    structure: s@2\n    \
        dims: {layers: \"@num_hidden_layers\", D: 4}\n    boundary_dtype: float32\n    weights_map: {transformers: \
        {layout: out_in, w: \"a.{i}.b.weight\", n: {const: ones}}}\n    hosts: {transformers: {module_path: \"a.{i}\"}}\n";

    #[test]
    fn a_whole_file_is_read() {
        let file = parse("x", GOOD).unwrap();
        let r = &file.regions[0];
        assert_eq!((r.structure.as_str(), r.version), ("s", Some(2)));
        assert_eq!(r.instances, DimSource::Config("num_hidden_layers".into()));
        assert_eq!(r.boundary_dtype.as_deref(), Some("f32"));
        assert_eq!(r.weights["n"], WeightSource::Ones);
        let WeightSource::Param { path, name, .. } = &r.weights["w"] else {
            panic!("{:?}", r.weights)
        };
        assert_eq!((path.as_str(), name.as_str()), ("a.{i}.b", "weight"));
    }

    #[test]
    fn each_rule_names_itself() {
        let cases = [
            ("V-01", GOOD.replace("binding: x\n", "")),
            ("V-01", GOOD.replace("structure: s@2", "structure: \"\"")),
            ("V-01", "- a\n".into()),
            ("V-02", GOOD.replace("binding: x\n", "binding: ../x\n")),
            ("V-02", GOOD.replace("binding: x_a", "binding: X_a")),
            ("V-03", GOOD.replace("binding: x\n", "binding: y\n")),
            (
                "V-05",
                GOOD.replace("structure: s@2", "structure: s@2\n    coverage: {}"),
            ),
            (
                "schema",
                GOOD.replace("structure: s@2", "structure: s@2\n    kernel: fast"),
            ),
            ("schema", GOOD.replace("structure: s@2", "structure: s@new")),
            ("schema", GOOD.replace("float32", "f64")),
            ("schema", GOOD.replace("D: 4", "D: four")),
            (
                "schema",
                GOOD.replace("layers: \"@num_hidden_layers\", ", ""),
            ),
            ("schema", GOOD.replace("const: ones", "const: twos")),
        ];
        for (rule, text) in cases {
            let message = parse("x", &text).unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("binding x: {rule}")),
                "{rule}: {message}"
            );
        }
    }

    #[test]
    fn an_unknown_structure_is_v04() {
        let mut bindings = Bindings::default();
        bindings.files.push(parse("x", GOOD).unwrap());
        assert!(bindings
            .check_structures(|s, v| s == "s" && v == Some(2))
            .is_ok());
        let message = bindings
            .check_structures(|_, _| false)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("V-04") && message.contains("s@2"),
            "{message}"
        );
    }

    #[test]
    fn the_built_in_files_load() {
        let bindings = Bindings::built_in().unwrap();
        assert!(!bindings.files().is_empty());
        for family in crate::families::FAMILIES {
            for model_type in family.model_types() {
                assert_eq!(bindings.for_model_type(model_type).len(), 1, "{model_type}");
            }
        }
    }
}
