//! The coverage contract of a pipeline binding: who owns each part of the hot path (V-08 to V-17).
//!
//! An honest list, not a claim: what stays with the host is a segment of its own.

use structures_catalog::document::Node;
use structures_catalog::Kind;

use crate::error::BindingError;
use crate::facts::Facts;
use crate::reader::Reader;
use crate::rule::Rule;

type Result<T> = std::result::Result<T, BindingError>;

/// The only contract there is.
pub const COMPLETE_HOT_PATH: &str = "complete_hot_path";

/// Who owns a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Classification {
    /// Structures of the catalog own the composition.
    Structure,
    /// State and its cadence live in a named buffer, cache or window.
    StateRegion,
    /// The host keeps it: a gap, said openly.
    HostStage,
    /// A loop, a branch, a schedule.
    Control,
}

impl Classification {
    /// All of them.
    pub const ALL: [Classification; 4] = [
        Classification::Structure,
        Classification::StateRegion,
        Classification::HostStage,
        Classification::Control,
    ];

    /// The word in documents.
    pub fn word(self) -> &'static str {
        match self {
            Classification::Structure => "structure",
            Classification::StateRegion => "state_region",
            Classification::HostStage => "host_stage",
            Classification::Control => "control",
        }
    }
}

/// One part of the pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its name.
    pub name: String,
    /// The stage it belongs to, one that the file binds.
    pub stage: String,
    /// Who owns it.
    pub classification: Classification,
    /// Where it is on the host.
    pub seam: String,
    /// Structures it is composed of.
    pub structures: Vec<String>,
    /// Whether it is on the hot path.
    pub hot: bool,
}

/// A declared coverage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Names of segments in order.
    pub hot_path: Vec<String>,
    /// All segments, also those off the hot path.
    pub segments: Vec<Segment>,
}

/// Reads and checks; `bound` says whether a stage is bound by the file.
pub(crate) fn read(
    r: &Reader<'_>,
    node: &Node<'_>,
    facts: &Facts,
    bound: &dyn Fn(&str) -> bool,
) -> Result<Coverage> {
    if !node.value().is_mapping() {
        return Err(r.fail(node, Rule::CoverageNotAMapping, "expected a mapping"));
    }
    known_keys(
        r,
        node,
        &["contract", "hot_path", "segments"],
        Rule::CoverageKey,
    )?;
    let entries = r.entries(node, Rule::CoverageKey)?;
    let under = |key: &str| entries.iter().find(|(k, _)| k == key).map(|(_, n)| n);
    let contract = under("contract");
    let word = contract.and_then(|n| n.value().as_str()).map(str::trim);
    if word != Some(COMPLETE_HOT_PATH) {
        let found = word.map_or("nothing of the kind".into(), |w| format!("`{w}`"));
        let what = format!("expected `{COMPLETE_HOT_PATH}`, the only contract, found {found}");
        return Err(r.fail(contract.unwrap_or(node), Rule::Contract, what));
    }
    let hot_path = hot_path(r, node, under("hot_path"))?;
    let segments = segments(r, node, under("segments"), facts, bound, &hot_path)?;
    let without: Vec<&str> = hot_path
        .iter()
        .map(String::as_str)
        .filter(|name| segments.iter().all(|s| s.name != *name))
        .collect();
    if !without.is_empty() {
        let at = under("hot_path").unwrap_or(node);
        let what = format!("no segment classifies {}", without.join(", "));
        return Err(r.fail(at, Rule::Unclassified, what));
    }
    Ok(Coverage { hot_path, segments })
}

/// A list that is there and not empty, else a fault of `rule`.
fn list<'n>(
    r: &Reader<'_>,
    of: &Node<'n>,
    node: Option<&Node<'n>>,
    what: &str,
    rule: Rule,
) -> Result<Vec<Node<'n>>> {
    match node {
        Some(n) if n.value().as_sequence().is_some_and(|l| !l.is_empty()) => {
            r.under(rule, n.items())
        }
        Some(n) => Err(r.fail(n, rule, format!("expected {what}"))),
        None => Err(r.fail(of, rule, format!("expected {what}, found none"))),
    }
}

fn known_keys(r: &Reader<'_>, node: &Node<'_>, known: &[&str], rule: Rule) -> Result<()> {
    let mut unknown: Vec<String> = r
        .under(rule, node.entries())?
        .into_iter()
        .map(|(k, _)| k)
        .filter(|k| !known.contains(&k.as_str()))
        .collect();
    unknown.sort_unstable();
    let Some(first) = unknown.first() else {
        return Ok(());
    };
    let what = format!(
        "unknown key {}, expected {}",
        unknown.join(", "),
        known.join(", ")
    );
    Err(r.fail_key(node, first, rule, what))
}

fn hot_path(r: &Reader<'_>, of: &Node<'_>, node: Option<&Node<'_>>) -> Result<Vec<String>> {
    let expected = "an ordered list of segment names that is not empty";
    let mut names: Vec<String> = Vec::new();
    for item in list(r, of, node, expected, Rule::HotPath)? {
        let name = r.text(&item, Rule::BlankHotPath)?;
        if names.contains(&name) {
            let what = format!("`{name}` stands in the hot path twice");
            return Err(r.fail(&item, Rule::HotPathTwice, what));
        }
        names.push(name);
    }
    Ok(names)
}

fn segments(
    r: &Reader<'_>,
    of: &Node<'_>,
    node: Option<&Node<'_>>,
    facts: &Facts,
    bound: &dyn Fn(&str) -> bool,
    hot_path: &[String],
) -> Result<Vec<Segment>> {
    let mut all: Vec<Segment> = Vec::new();
    for item in list(
        r,
        of,
        node,
        "a list of segments that is not empty",
        Rule::Segments,
    )? {
        let mut segment = segment(r, &item, facts, bound, &all)?;
        segment.hot = hot_path.contains(&segment.name);
        all.push(segment);
    }
    Ok(all)
}

fn segment(
    r: &Reader<'_>,
    node: &Node<'_>,
    facts: &Facts,
    bound: &dyn Fn(&str) -> bool,
    before: &[Segment],
) -> Result<Segment> {
    if !node.value().is_mapping() {
        return Err(r.fail(node, Rule::SegmentNotAMapping, "expected a mapping"));
    }
    let keys = ["name", "stage", "classification", "seam", "structures"];
    known_keys(r, node, &keys, Rule::SegmentKey)?;
    let f = r.fields(node, &keys, Rule::SegmentKey)?;
    let name = r.need(&f, "name", Rule::BlankSegment)?;
    if before.iter().any(|s| s.name == name) {
        let what = format!("segment `{name}` is there twice");
        return Err(r.fail(&f.find(&["name"]), Rule::SegmentTwice, what));
    }
    let about = |what: String| format!("segment `{name}`: {what}");
    let stage = r.need(&f, "stage", Rule::BlankSegment)?;
    if !bound(&stage) {
        let what = about(format!("stage `{stage}` is not bound by this file"));
        return Err(r.fail(&f.find(&["stage"]), Rule::UnboundStage, what));
    }
    let word = r.need(&f, "classification", Rule::BlankSegment)?;
    let known = Classification::ALL.into_iter().find(|c| c.word() == word);
    let Some(classification) = known else {
        let words = Classification::ALL.map(Classification::word).join(", ");
        let what = about(format!("expected one of {words}, found `{word}`"));
        return Err(r.fail(&f.find(&["classification"]), Rule::Classification, what));
    };
    let seam = r.need(&f, "seam", Rule::BlankSegment)?;
    let structures = match f.get("structures") {
        None => Vec::new(),
        Some(n) => names(r, n, &name)?,
    };
    match classification {
        Classification::Structure if structures.is_empty() => {
            let what = about("a structure segment names the structures it is made of".into());
            return Err(r.fail(node, Rule::StructureSegmentEmpty, what));
        }
        Classification::HostStage | Classification::Control if !structures.is_empty() => {
            let what = about(format!("a {word} segment names no structures"));
            return Err(r.fail(&f.find(&["structures"]), Rule::StructuresNotAllowed, what));
        }
        _ => {}
    }
    for (i, structure) in structures.iter().enumerate() {
        let at = f.find(&["structures", &format!("[{i}]")]);
        let found = r.find(&at, structure, None, Rule::SegmentStructure)?;
        if found.kind != Kind::Region {
            let what = about(format!(
                "`{structure}` is a pipeline, and pipelines do not nest"
            ));
            return Err(r.fail(&at, Rule::PipelineEmbedded, what));
        }
        // State may live in a region that the family does not embed, such as a cadence.
        let embedded = facts.embedded.contains(structure);
        if classification == Classification::Structure && !embedded {
            let what = about(format!(
                "{} does not embed `{structure}`; it embeds {}",
                facts.name,
                facts.embedded.join(", ")
            ));
            return Err(r.fail(&at, Rule::NotEmbedded, what));
        }
    }
    Ok(Segment {
        name,
        stage,
        classification,
        seam,
        structures,
        hot: false,
    })
}

fn names(r: &Reader<'_>, node: &Node<'_>, segment: &str) -> Result<Vec<String>> {
    let expected = format!("segment `{segment}`: a list of structures that is not empty");
    let mut all: Vec<String> = Vec::new();
    for item in list(r, node, Some(node), &expected, Rule::StructuresNotAList)? {
        let name = r.text(&item, Rule::BlankStructure)?;
        if all.contains(&name) {
            let what = format!("segment `{segment}`: `{name}` stands here twice");
            return Err(r.fail(&item, Rule::StructureTwice, what));
        }
        all.push(name);
    }
    Ok(all)
}
