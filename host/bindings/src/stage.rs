//! Stages of a pipeline binding: which host function each is, and at which cadence it runs.

use indexmap::IndexMap;
use structures_catalog::document::Node;

use crate::error::BindingError;
use crate::facts::{Facts, StageFacts};
use crate::reader::Reader;
use crate::rule::Rule;

type Result<T> = std::result::Result<T, BindingError>;

/// How often a loop runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoopSteps {
    /// Always this often.
    Count(u64),
    /// A number the host is asked for, `@pipeline.num_steps` without the sign.
    Path(String),
}

/// How a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the words say it
pub enum Policy {
    Greedy,
    GreedyOrVerifiedDraft,
}

/// The body of a stage. Everything is optional: an empty body says that the stage is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stage {
    /// The host function or loop it is.
    pub seam: Option<String>,
    /// How the host runs it, in the host's words.
    pub capture: Option<String>,
    /// The alternative without capture.
    pub eager_seam: Option<String>,
    /// How often its loop runs.
    pub loop_steps: Option<LoopSteps>,
    /// The tensor or parameter that is the explicit swap window.
    pub noise_window: Option<String>,
    /// Output -> host buffer.
    pub outputs: IndexMap<String, String>,
    /// How a token is chosen.
    pub policy: Option<Policy>,
    /// How a host object that the loop reassigns is protected.
    pub mutation_guard: Option<String>,
}

const KEYS: &[&str] = &[
    "seam",
    "capture",
    "eager_seam",
    "loop_steps",
    "noise_window",
    "outputs",
    "policy",
    "mutation_guard",
];

/// V-06: names and shapes. The bodies are read by [`bodies`], after everything the specification numbers.
pub(crate) fn names<'n>(
    r: &Reader<'_>,
    root: &Node<'n>,
    node: Option<&Node<'n>>,
    facts: &Facts,
) -> Result<IndexMap<String, Node<'n>>> {
    let Some(node) = node else {
        let what = format!("expected the stages of {}, found none", facts.name);
        return Err(r.fail(root, Rule::StagesNotAMapping, what));
    };
    if !node.value().is_mapping() {
        let what = format!("expected a mapping of the stages of {}", facts.name);
        return Err(r.fail(node, Rule::StagesNotAMapping, what));
    }
    let stages: IndexMap<String, Node<'n>> =
        r.entries(node, Rule::BlankStage)?.into_iter().collect();
    let declared: Vec<&str> = facts.stages.iter().map(|s| s.name.as_str()).collect();
    let mut unknown: Vec<&str> = stages
        .keys()
        .map(String::as_str)
        .filter(|s| !declared.contains(s))
        .collect();
    unknown.sort_unstable();
    if let Some(first) = unknown.first() {
        let what = format!(
            "{} has no stage {}; it has {}",
            facts.name,
            unknown.join(", "),
            declared.join(", ")
        );
        let key = stages
            .get(*first)
            .map_or_else(String::new, |_| key_of(node, first));
        return Err(r.fail_key(node, &key, Rule::UnknownStage, what));
    }
    let mut missing: Vec<&str> = facts
        .stages
        .iter()
        .filter(|s| !s.optional && !stages.contains_key(&s.name))
        .map(|s| s.name.as_str())
        .collect();
    missing.sort_unstable();
    if !missing.is_empty() {
        let what = format!("{} needs the stages {}", facts.name, missing.join(", "));
        return Err(r.fail(node, Rule::MissingStage, what));
    }
    for (name, body) in &stages {
        if !body.value().is_mapping() {
            let what = format!("`{name}`: expected a mapping, {{}} where nothing is to be said");
            return Err(r.fail(body, Rule::StageNotAMapping, what));
        }
    }
    Ok(stages)
}

/// A key as it is written, which may have blanks around it.
fn key_of(node: &Node<'_>, name: &str) -> String {
    let entries = node.entries().unwrap_or_default();
    let written = entries.into_iter().find(|(k, _)| k.trim() == name);
    written.map_or_else(|| name.into(), |(k, _)| k)
}

/// V-20.
pub(crate) fn bodies(
    r: &Reader<'_>,
    stages: &IndexMap<String, Node<'_>>,
    facts: &Facts,
) -> Result<IndexMap<String, Stage>> {
    let read = stages.iter().map(|(name, n)| {
        Ok((
            name.clone(),
            body(r, n, facts.stages.iter().find(|s| s.name == *name))?,
        ))
    });
    read.collect()
}

fn body(r: &Reader<'_>, node: &Node<'_>, facts: Option<&StageFacts>) -> Result<Stage> {
    let rule = Rule::StageField;
    let f = r.fields(node, KEYS, rule)?;
    let text = |key: &str| f.get(key).map(|n| r.text(n, rule)).transpose();
    let mut outputs = IndexMap::new();
    if let Some(n) = f.get("outputs") {
        let known = facts.map_or(&[][..], |s| &s.outputs);
        for (name, buffer) in r.entries(n, rule)? {
            if !known.is_empty() && !known.contains(&name) {
                let what = format!(
                    "expected an output of the stage, one of {}, found `{name}`",
                    known.join(", ")
                );
                return Err(r.fail(&buffer, rule, what));
            }
            outputs.insert(name, r.text(&buffer, rule)?);
        }
    }
    Ok(Stage {
        seam: text("seam")?,
        capture: text("capture")?,
        eager_seam: text("eager_seam")?,
        loop_steps: f.get("loop_steps").map(|n| loop_steps(r, n)).transpose()?,
        noise_window: text("noise_window")?,
        outputs,
        policy: match f.get("policy") {
            None => None,
            Some(n) => Some(
                match r
                    .one_of(n, &["greedy", "greedy_or_verified_draft"], rule)?
                    .as_str()
                {
                    "greedy" => Policy::Greedy,
                    _ => Policy::GreedyOrVerifiedDraft,
                },
            ),
        },
        mutation_guard: text("mutation_guard")?,
    })
}

fn loop_steps(r: &Reader<'_>, n: &Node<'_>) -> Result<LoopSteps> {
    let bad = |found: String| {
        let what = format!("expected a whole number from 1 or @PATH of the host, found {found}");
        Err(r.fail(n, Rule::StageField, what))
    };
    if let Some(count) = n.value().as_u64() {
        return match count {
            0 => bad("0".into()),
            n => Ok(LoopSteps::Count(n)),
        };
    }
    let text = r.text(n, Rule::StageField)?;
    let word = |w: &str| {
        w.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && w.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    match text.strip_prefix('@') {
        Some(path) if path.split('.').all(word) => Ok(LoopSteps::Path(path.into())),
        _ => bad(format!("`{text}`")),
    }
}

/// Cadence -> stages, each of them bound.
pub(crate) fn cadences(
    r: &Reader<'_>,
    node: &Node<'_>,
    stages: &IndexMap<String, Stage>,
) -> Result<IndexMap<String, Vec<String>>> {
    let rule = Rule::Cadence;
    let f = r.fields(node, &["request", "observation", "tick", "replan"], rule)?;
    let mut all = IndexMap::new();
    for (cadence, n) in r.under(rule, node.entries())? {
        let items = match n.value().is_sequence() {
            true => r.items(&n, rule)?,
            false => vec![n],
        };
        let mut list: Vec<String> = Vec::new();
        for item in items {
            let stage = r.text(&item, rule)?;
            if !stages.contains_key(&stage) {
                let bound: Vec<&str> = stages.keys().map(String::as_str).collect();
                let what = format!(
                    "expected a stage that this file binds, one of {}, found `{stage}`",
                    bound.join(", ")
                );
                return Err(r.fail(&item, rule, what));
            }
            if list.contains(&stage) {
                return Err(r.fail(&item, rule, format!("`{stage}` stands here twice")));
            }
            list.push(stage);
        }
        all.insert(cadence, list);
    }
    if all.is_empty() {
        return Err(r.fail(
            &f.find(&[]),
            rule,
            "expected at least one cadence, found none",
        ));
    }
    Ok(all)
}
