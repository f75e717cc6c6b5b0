//! A region binding: where one structure's slots and points sit on one host, `layers` times.

use indexmap::IndexMap;
use structures_catalog::document::{Fields, Node};
use structures_catalog::{Kind, Place};

use crate::error::BindingError;
use crate::facts::Facts;
use crate::host::{self, HostEntry};
use crate::reader::{is_name, Reader};
use crate::rule::Rule;
use crate::size::{self, Size, Sizes};
use crate::template::{Template, INSTANCE};
use crate::weights::{self, SourceMap};

type Result<T> = std::result::Result<T, BindingError>;

/// Key of `dims` that counts instances; no symbol of a structure.
pub const LAYERS: &str = "layers";

/// The structure a binding is about, as the catalog knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StructureRef {
    /// Name.
    pub name: String,
    /// Version: the pinned one, else the newest that lived when the file was read.
    pub version: u32,
    /// Kind.
    pub kind: Kind,
    /// Family of a pipeline, else empty.
    pub family: String,
    /// Whether the file pins the version.
    pub pinned: bool,
}

impl StructureRef {
    pub(crate) fn of(facts: &Facts, pinned: bool) -> Self {
        StructureRef {
            name: facts.name.clone(),
            version: facts.version,
            kind: facts.kind,
            family: facts.family.clone(),
            pinned,
        }
    }
}

/// Class of the number of rows of a phase. Labels for people; nothing here has bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the words say it
pub enum MClass {
    Micro,
    Small,
    Medium,
    Large,
}

/// Rows of one phase of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MProfile {
    /// How many, as a class.
    pub m_class: MClass,
    /// The phase of the host.
    pub phase: String,
}

/// Dtype at the boundary, normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the words say it
pub enum BoundaryDtype {
    Bf16,
    F16,
    F32,
}

impl BoundaryDtype {
    /// The word in documents.
    pub fn word(self) -> &'static str {
        match self {
            BoundaryDtype::Bf16 => "bf16",
            BoundaryDtype::F16 => "f16",
            BoundaryDtype::F32 => "f32",
        }
    }
}

/// Spellings accepted on reading.
const DTYPES: &[(&str, BoundaryDtype)] = &[
    ("bf16", BoundaryDtype::Bf16),
    ("bfloat16", BoundaryDtype::Bf16),
    ("f16", BoundaryDtype::F16),
    ("float16", BoundaryDtype::F16),
    ("f32", BoundaryDtype::F32),
    ("float32", BoundaryDtype::F32),
];

/// Side of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the words say it
pub enum Side {
    Input,
    Output,
}

/// Explicit place of a calibration point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointPlace {
    /// Module path.
    pub module: Template,
    /// Which side of it.
    pub side: Side,
}

/// Where the style of a modulated norm comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditioning {
    /// What is projected, in the host's words.
    pub source: String,
    /// Weight of the projection.
    pub weight: Template,
    /// Its bias.
    pub bias: Option<Template>,
    /// Chunks of its result in order.
    pub chunk_order: Vec<String>,
    /// Whether the gate multiplies the residual branch.
    pub residual_gate: bool,
}

/// One region binding.
#[derive(Clone, Debug, PartialEq)]
pub struct RegionBinding {
    /// Its name.
    pub binding: String,
    /// The structure it places.
    pub structure: StructureRef,
    /// How many instances there are; `{i}` runs below it.
    pub layers: Option<Size>,
    /// Symbol -> size.
    pub dims: IndexMap<String, Size>,
    /// Axis -> value.
    pub variant: IndexMap<String, String>,
    /// Declared boundary dtype.
    pub boundary_dtype: Option<BoundaryDtype>,
    /// Phase -> rows.
    pub m_profile: IndexMap<String, MProfile>,
    /// Source of parameter names -> where each slot is stored.
    pub weights_map: IndexMap<String, SourceMap>,
    /// Points placed explicitly.
    pub points: IndexMap<String, PointPlace>,
    /// Conditioning of a modulated variant.
    pub conditioning: Option<Conditioning>,
    /// Host -> where the seam is.
    pub hosts: IndexMap<String, HostEntry>,
    /// Where it stands.
    pub at: Place,
}

impl RegionBinding {
    /// The sizes that are written out.
    pub fn sizes(&self) -> Sizes {
        let number = |(symbol, size): (&String, &Size)| match size {
            Size::Number(n) => Some((symbol.clone(), *n)),
            Size::Config(_) => None,
        };
        self.dims.iter().filter_map(number).collect()
    }
}

/// Keys of a region binding, beside those of the file it is in.
pub(crate) const KEYS: &[&str] = &[
    "binding",
    "structure",
    "dims",
    "variant",
    "boundary_dtype",
    "m_profile",
    "weights_map",
    "points",
    "conditioning",
    "hosts",
];

/// Reads the body; name and structure are known. `family` allows numbers of a host's configuration.
pub(crate) fn read(
    r: &Reader<'_>,
    f: &Fields<'_>,
    at: Place,
    facts: &Facts,
    pinned: bool,
    family: bool,
) -> Result<RegionBinding> {
    let (layers, dims) = match f.get("dims") {
        Some(n) => dims(r, n, facts, family)?,
        None => (None, IndexMap::new()),
    };
    let mut region = RegionBinding {
        binding: r.binding.clone(),
        structure: StructureRef::of(facts, pinned),
        layers,
        dims,
        variant: map(r, f.get("variant"), Rule::Variant, |axis, n| {
            variant(r, facts, axis, n)
        })?,
        boundary_dtype: f.get("boundary_dtype").map(|n| dtype(r, n)).transpose()?,
        m_profile: map(r, f.get("m_profile"), Rule::MProfile, |phase, n| {
            m_profile(r, phase, n)
        })?,
        weights_map: IndexMap::new(),
        points: map(r, f.get("points"), Rule::Point, |point, n| {
            place_of_point(r, facts, point, n)
        })?,
        conditioning: f
            .get("conditioning")
            .map(|n| conditioning(r, n))
            .transpose()?,
        hosts: map(r, f.get("hosts"), Rule::HostEntry, |name, n| {
            host::of_region(r, name, n)
        })?,
        at,
    };
    region.weights_map = map(r, f.get("weights_map"), Rule::Weights, |source, n| {
        weights::read(r, facts, &region, source, n)
    })?;
    instances(r, f, &region)?;
    Ok(region)
}

/// A mapping of names, not empty where it is written.
fn map<'n, T>(
    r: &Reader<'_>,
    node: Option<&Node<'n>>,
    rule: Rule,
    one: impl Fn(&str, &Node<'n>) -> Result<T>,
) -> Result<IndexMap<String, T>> {
    let Some(node) = node else {
        return Ok(IndexMap::new());
    };
    let entries = r.entries(node, rule)?;
    if entries.is_empty() {
        return Err(r.fail(node, rule, "expected at least one entry, found none"));
    }
    let read = entries
        .into_iter()
        .map(|(name, n)| Ok((name.clone(), one(&name, &n)?)));
    read.collect()
}

fn dims(
    r: &Reader<'_>,
    node: &Node<'_>,
    facts: &Facts,
    family: bool,
) -> Result<(Option<Size>, IndexMap<String, Size>)> {
    let mut sizes = map(r, Some(node), Rule::Dims, |symbol, n| {
        if symbol != LAYERS && !facts.symbols.iter().any(|s| s == symbol) {
            let what = format!(
                "`{symbol}`: expected {LAYERS} or a symbol of {}, one of {}",
                facts.name,
                facts.symbols.join(", ")
            );
            return Err(r.fail(n, Rule::Dims, what));
        }
        size::read(r, n, family)
    })?;
    Ok((sizes.shift_remove(LAYERS), sizes))
}

fn variant(r: &Reader<'_>, facts: &Facts, axis: &str, n: &Node<'_>) -> Result<String> {
    let Some(values) = facts.axes.get(axis) else {
        let axes: Vec<&str> = facts.axes.keys().map(String::as_str).collect();
        let what = format!(
            "`{axis}`: expected an axis of {}, one of {}",
            facts.name,
            axes.join(", ")
        );
        return Err(r.fail(n, Rule::Variant, what));
    };
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    r.one_of(n, &values, Rule::Variant)
}

fn dtype(r: &Reader<'_>, n: &Node<'_>) -> Result<BoundaryDtype> {
    let found = r.text(n, Rule::Dtype)?;
    match DTYPES.iter().find(|(word, _)| *word == found) {
        Some((_, dtype)) => Ok(*dtype),
        None => {
            let what = format!("expected bf16, f16 or f32, found `{found}`");
            Err(r.fail(n, Rule::Dtype, what))
        }
    }
}

fn m_profile(r: &Reader<'_>, phase: &str, n: &Node<'_>) -> Result<MProfile> {
    if !is_name(phase) {
        let what = format!("expected a name of a phase, found `{phase}`");
        return Err(r.fail(n, Rule::MProfile, what));
    }
    let f = r.fields(n, &["m_class", "phase"], Rule::MProfile)?;
    let class = r.under(Rule::MProfile, f.need("m_class"))?;
    let words = ["micro", "small", "medium", "large"];
    let m_class = match r.one_of(class, &words, Rule::MProfile)?.as_str() {
        "micro" => MClass::Micro,
        "small" => MClass::Small,
        "medium" => MClass::Medium,
        _ => MClass::Large,
    };
    Ok(MProfile {
        m_class,
        phase: r.need(&f, "phase", Rule::MProfile)?,
    })
}

fn place_of_point(r: &Reader<'_>, facts: &Facts, point: &str, n: &Node<'_>) -> Result<PointPlace> {
    if !facts.points.iter().any(|p| p == point) {
        let what = match facts.points.as_slice() {
            [] => format!("`{point}`: {} has no points", facts.name),
            points => format!(
                "`{point}`: expected a point of {}, one of {}",
                facts.name,
                points.join(", ")
            ),
        };
        return Err(r.fail(n, Rule::Point, what));
    }
    let f = r.fields(n, &["module", "side"], Rule::Point)?;
    let side = r.under(Rule::Point, f.need("side"))?;
    Ok(PointPlace {
        module: template(r, r.under(Rule::Point, f.need("module"))?, Rule::Point)?,
        side: match r.one_of(side, &["input", "output"], Rule::Point)?.as_str() {
            "input" => Side::Input,
            _ => Side::Output,
        },
    })
}

fn conditioning(r: &Reader<'_>, n: &Node<'_>) -> Result<Conditioning> {
    let rule = Rule::Conditioning;
    let f = r.fields(
        n,
        &["source", "projection", "chunk_order", "residual_gate"],
        rule,
    )?;
    let p = r.fields(
        r.under(rule, f.need("projection"))?,
        &["weight", "bias"],
        rule,
    )?;
    let order = r.under(rule, f.need("chunk_order"))?;
    let mut chunk_order = Vec::new();
    for item in r.items(order, rule)? {
        let chunk = r.one_of(&item, &["scale", "shift", "gate"], rule)?;
        if chunk_order.contains(&chunk) {
            return Err(r.fail(&item, rule, format!("`{chunk}` stands here twice")));
        }
        chunk_order.push(chunk);
    }
    let has = |chunk: &str| chunk_order.iter().any(|c| c == chunk);
    if !has("scale") || !has("shift") {
        return Err(r.fail(order, rule, "expected scale and shift among the chunks"));
    }
    let residual_gate = r.under(rule, f.flag("residual_gate"))?;
    if residual_gate && !has("gate") {
        return Err(r.fail(order, rule, "expected a gate, which residual_gate asks for"));
    }
    Ok(Conditioning {
        source: r.need(&f, "source", rule)?,
        weight: template(r, r.under(rule, p.need("weight"))?, rule)?,
        bias: p.get("bias").map(|n| template(r, n, rule)).transpose()?,
        chunk_order,
        residual_gate,
    })
}

pub(crate) fn template(r: &Reader<'_>, n: &Node<'_>, rule: Rule) -> Result<Template> {
    let text = r.text(n, rule)?;
    Template::parse(&text).map_err(|what| r.fail(n, rule, what))
}

/// `{i}` needs a number of instances; several instances need a module each.
fn instances(r: &Reader<'_>, f: &Fields<'_>, region: &RegionBinding) -> Result<()> {
    for (host, entry) in &region.hosts {
        let at = f.find(&["hosts", host, "module_path"]);
        if region.layers.is_none() && entry.module_path.has_instance() {
            let what = format!("{INSTANCE} needs the number of instances, dims.{LAYERS}");
            return Err(r.fail(&at, Rule::HostEntry, what));
        }
        let several = matches!(region.layers, Some(Size::Number(n)) if n > 1);
        if several && !entry.module_path.has_instance() {
            let what = format!("several instances need {INSTANCE} in the path");
            return Err(r.fail(&at, Rule::HostEntry, what));
        }
    }
    if region.layers.is_some() {
        return Ok(());
    }
    let needs =
        |what: &str| format!("{what}: {INSTANCE} needs the number of instances, dims.{LAYERS}");
    for (source, map) in &region.weights_map {
        for (slot, s) in &map.slots {
            if s.source.template().is_some_and(Template::has_instance) {
                let at = f.find(&["weights_map", source, slot]);
                return Err(r.fail(&at, Rule::Weights, needs(slot)));
            }
        }
    }
    for (point, place) in &region.points {
        if place.module.has_instance() {
            let at = f.find(&["points", point, "module"]);
            return Err(r.fail(&at, Rule::Point, needs(point)));
        }
    }
    if let Some(c) = &region.conditioning {
        if c.weight.has_instance() || c.bias.as_ref().is_some_and(Template::has_instance) {
            let at = f.find(&["conditioning", "projection"]);
            return Err(r.fail(&at, Rule::Conditioning, needs("projection")));
        }
    }
    Ok(())
}
