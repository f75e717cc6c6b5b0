//! One binding file: a region, a pipeline, or a host family.
//!
//! Checks run in the order of the specification's numbers, and only then the stricter rules of this project, so that
//! a document with a numbered fault is always told that one.

use std::sync::Arc;

use structures_catalog::document::{self, Document, Fields, Node};
use structures_catalog::{Kind, Place};

use crate::error::BindingError;
use crate::facts::Structures;
use crate::pipeline::{self, PipelineBinding};
use crate::reader::{is_name, Reader};
use crate::region::{self, RegionBinding};
use crate::rule::Rule;

type Result<T> = std::result::Result<T, BindingError>;

/// Where a file came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It ships with the program.
    BuiltIn,
    /// It is in a directory of the user's.
    User,
}

/// A host family: what discovery cannot see on every model of some `model_type`s.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyBinding {
    /// Its name.
    pub binding: String,
    /// Models it is for.
    pub model_types: Vec<String>,
    /// Its regions.
    pub regions: Vec<RegionBinding>,
    /// Where it stands.
    pub at: Place,
}

/// What a file binds.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // a few dozen of them in a process
pub enum Body {
    /// One region.
    Region(RegionBinding),
    /// One pipeline.
    Pipeline(PipelineBinding),
    /// A host family.
    Family(FamilyBinding),
}

/// One file.
#[derive(Clone, Debug, PartialEq)]
pub struct BindingFile {
    /// Its name, which is the file's.
    pub name: String,
    /// The file, for messages.
    pub file: String,
    /// Where it came from.
    pub origin: Origin,
    /// Whether it says that it replaces the built-in file of its name.
    pub replaces: bool,
    /// What it binds.
    pub body: Body,
    /// The document, byte for byte.
    pub document: Arc<str>,
}

impl BindingFile {
    /// Where the binding stands.
    pub fn at(&self) -> &Place {
        match &self.body {
            Body::Region(b) => &b.at,
            Body::Pipeline(b) => &b.at,
            Body::Family(b) => &b.at,
        }
    }

    /// Names it takes: its own, and those of a family's regions, with their places.
    pub fn names(&self) -> Vec<(&str, &Place)> {
        let mut names = vec![(self.name.as_str(), self.at())];
        if let Body::Family(f) = &self.body {
            names.extend(f.regions.iter().map(|r| (r.binding.as_str(), &r.at)));
        }
        names
    }

    /// Refuses a pipeline binding without coverage (V-07). Regions and families have no coverage to ask for.
    pub fn require_coverage(&self) -> Result<()> {
        match &self.body {
            Body::Pipeline(p) => p.require_coverage(),
            Body::Region(_) | Body::Family(_) => Ok(()),
        }
    }
}

/// Reads and checks a file.
pub fn read(path: &std::path::Path, structures: &dyn Structures) -> Result<BindingFile> {
    let file = path.display().to_string();
    let text = document::read(path).map_err(|e| BindingError::under(Rule::Document, "", e))?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    parse(&file, Some(&stem), &text, Origin::User, structures)
}

/// Parses and checks a document. `stem` is the name it is stored under; `None` for one that is stored nowhere.
pub fn parse(
    file: &str,
    stem: Option<&str>,
    text: &str,
    origin: Origin,
    structures: &dyn Structures,
) -> Result<BindingFile> {
    let mut r = Reader {
        structures,
        binding: String::new(),
    };
    let doc = r.under(Rule::Document, Document::parse(file, text))?;
    let root = doc.root();
    if !root.value().is_mapping() {
        let what = "expected a mapping with `binding` and `structure`";
        return Err(r.fail(&root, Rule::NotAMapping, what));
    }
    let name = identity(&mut r, &root)?;
    if let Some(stem) = stem.filter(|s| *s != name) {
        let what = format!("stored as `{stem}`, calls itself `{name}`; rename one");
        return Err(r.fail(&root.find(&["binding"]), Rule::NameMismatch, what));
    }
    let is_family = ["regions", "model_types"]
        .iter()
        .any(|k| root.value().get(k).is_some());
    let body = if is_family {
        Body::Family(family(&mut r, &root)?)
    } else {
        single(&r, &root)?
    };
    r.binding.clone_from(&name);
    let replaces = match root.value().get("replaces") {
        None => false,
        Some(_) => {
            r.one_of(&root.find(&["replaces"]), &["built-in"], Rule::Replaces)?;
            true
        }
    };
    r.forbidden(&root)?;
    Ok(BindingFile {
        name,
        file: file.into(),
        origin,
        replaces,
        body,
        document: text.into(),
    })
}

/// The word under a key that must be there (V-01), read from any mapping.
fn required(r: &Reader<'_>, node: &Node<'_>, key: &str) -> Result<String> {
    if node.value().get(key).is_none() {
        return Err(r.fail(node, Rule::MissingField, format!("`{key}` is missing")));
    }
    r.text(&node.find(&[key]), Rule::BlankField)
}

/// V-01 and V-02 for `binding`. From here on every message names it.
fn identity(r: &mut Reader<'_>, node: &Node<'_>) -> Result<String> {
    r.binding.clear();
    let name = required(r, node, "binding")?;
    if !is_name(&name) {
        let what = format!("expected a name of a-z, 0-9, `_`, `.`, `-`, found `{name}`");
        return Err(r.fail(&node.find(&["binding"]), Rule::InvalidName, what));
    }
    r.binding.clone_from(&name);
    Ok(name)
}

fn single(r: &Reader<'_>, root: &Node<'_>) -> Result<Body> {
    let word = required(r, root, "structure")?;
    let (facts, pinned) = r.structure(&root.find(&["structure"]), &word)?;
    let at = root.find(&["binding"]).place();
    match facts.kind {
        Kind::Region => {
            no_coverage(r, root)?;
            let keys = [region::KEYS, &["replaces"]].concat();
            let f = r.fields(root, &keys, Rule::UnknownKey)?;
            Ok(Body::Region(region::read(
                r, &f, at, &facts, pinned, false,
            )?))
        }
        Kind::StagePipeline => {
            let pipeline = pipeline::read(r, root, at, &facts, pinned)?;
            Ok(Body::Pipeline(pipeline))
        }
    }
}

/// V-05.
fn no_coverage(r: &Reader<'_>, node: &Node<'_>) -> Result<()> {
    if node.value().get("coverage").is_none() {
        return Ok(());
    }
    let what = "a region has no hot path to cover; `coverage` belongs to pipelines".to_string();
    Err(r.fail_key(node, "coverage", Rule::CoverageOnRegion, what))
}

fn family(r: &mut Reader<'_>, root: &Node<'_>) -> Result<FamilyBinding> {
    let keys = ["binding", "model_types", "regions", "replaces"];
    let rule = Rule::Family;
    let f = r.fields(root, &keys, Rule::UnknownKey)?;
    let model_types = model_types(r, &f)?;
    let name = r.binding.clone();
    let mut regions: Vec<RegionBinding> = Vec::new();
    for node in r.items(r.under(rule, f.need("regions"))?, rule)? {
        if !node.value().is_mapping() {
            return Err(r.fail(&node, Rule::NotAMapping, "expected a region binding"));
        }
        let own = identity(r, &node)?;
        let at = node.find(&["binding"]);
        if own == name || regions.iter().any(|r| r.binding == own) {
            let what = format!("`{own}` is taken already in this file");
            return Err(r.fail(&at, Rule::NameTwice, what));
        }
        let word = required(r, &node, "structure")?;
        let (facts, pinned) = r.structure(&node.find(&["structure"]), &word)?;
        if facts.kind != Kind::Region {
            let what = format!("`{}` is a pipeline; it needs a file of its own", facts.name);
            return Err(r.fail(&node.find(&["structure"]), rule, what));
        }
        no_coverage(r, &node)?;
        let f = r.fields(&node, region::KEYS, Rule::UnknownKey)?;
        let region = region::read(r, &f, at.place(), &facts, pinned, true)?;
        whole(r, &node, &region)?;
        regions.push(region);
    }
    r.binding.clone_from(&name);
    Ok(FamilyBinding {
        binding: name,
        model_types,
        regions,
        at: root.find(&["binding"]).place(),
    })
}

fn model_types(r: &Reader<'_>, f: &Fields<'_>) -> Result<Vec<String>> {
    let node = r.under(Rule::Family, f.need("model_types"))?;
    let mut types: Vec<String> = Vec::new();
    for item in r.items(node, Rule::Family)? {
        let word = r.text(&item, Rule::Family)?;
        if types.contains(&word) {
            return Err(r.fail(&item, Rule::Family, format!("`{word}` stands here twice")));
        }
        types.push(word);
    }
    Ok(types)
}

/// A family's regions are placed on models by the host itself, so they must say everything.
fn whole(r: &Reader<'_>, node: &Node<'_>, region: &RegionBinding) -> Result<()> {
    let lacks = [
        (
            region.layers.is_none(),
            "dims.layers, the number of instances",
        ),
        (region.weights_map.is_empty(), "weights_map"),
        (region.hosts.is_empty(), "hosts"),
    ];
    match lacks.iter().find(|(lacks, _)| *lacks) {
        None => Ok(()),
        Some((_, what)) => {
            let what = format!("expected {what}, which a region of a family cannot do without");
            Err(r.fail(node, Rule::Family, what))
        }
    }
}
