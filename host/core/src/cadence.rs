//! The explicit door to what does not change inside a hot loop: parts whose output is computed once per outer step and
//! given again until the caller says that it is another one.
//!
//! Nothing takes these by itself: a caller names the sites and runs one whole loop, in which every output must be seen
//! several times and agree with its first. One call on an input somebody chose would prove nothing. The replacement
//! ignores its input; keeping it true is the caller's, who gets the update ([`Cadence::refresh`], [`Cadence::write`])
//! and may wire it ([`Cadence::wire`]) so that another input refreshes by itself. Reads and refreshes are counted, so
//! that a part that is read and never refreshed can be seen.
//!
//! Which structures these are is a tag of theirs; how close outputs must be and how often seen are gates of theirs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Tensor;
use serde::Serialize;
use structures_catalog::{Kind, Spec};
use structures_graph::session::{Install, Observer, Piece, Plan, SpanOutcome, SpanRunner};
use structures_graph::{Graph, GraphError, OpId, Origin, ValueId};
use structures_seams::HostFacts;

use crate::error::Error;
use crate::host::{Host, Loaded};

/// Structures with this tag stand for a part on a slower cadence.
const TAG: &str = "cadence";

/// A loop's output moved while it ran.
pub const VARIES: &str = "cadence_varies";
/// An output was not seen often enough, or not as often as the others.
pub const UNCAPTURED: &str = "cadence_uncaptured";
/// There is nothing to take, or no such place.
pub const NOTHING: &str = "cadence_nothing";
/// The content cannot be recomputed from what the graph is given.
pub const NO_RECOMPUTE: &str = "cadence_no_recompute";
/// Content of another form than the one it replaces.
pub const FORM: &str = "cadence_form";
/// The parts do not read one tensor.
pub const NO_PRODUCER: &str = "cadence_no_producer";

/// One part on a slower cadence, and what it gave.
struct Static {
    key: String,
    path: String,
    structure: String,
    graph: Arc<Graph>,
    ops: Vec<OpId>,
    input: ValueId,
    output: ValueId,
    /// The part alone, from its own input.
    piece: Piece,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    content: Tensor,
    /// What the content was made of, once it is wired.
    source: Option<Tensor>,
    wired: bool,
    reads: u64,
    refreshes: u64,
    /// Reads of another number of rows: nothing is stored for them, and the host ran.
    apart: u64,
}

/// What a part did so far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CadenceNote {
    /// Key of the site.
    pub site: String,
    /// Module path.
    pub path: String,
    /// Structure.
    pub structure: String,
    /// Captures in the loop that proved it.
    pub captures: usize,
    /// Times the content was given.
    pub reads: u64,
    /// Times the content was replaced. Reads without any are content of the first loop.
    pub refreshes: u64,
    /// Times the host ran because the number of rows was another one.
    pub apart: u64,
    /// Whether another input refreshes it.
    pub wired: bool,
}

/// What a caller takes home: the installs for a plan, and the updates.
pub struct Cadence {
    statics: Vec<Arc<Static>>,
    captures: usize,
    /// From the graph's inputs to every output, where that needs no state.
    recompute: Result<Piece, String>,
    graph: Arc<Graph>,
}

impl Static {
    fn lock(&self) -> MutexGuard<'_, Held> {
        // Content is replaced as a whole: what a panic left behind is the old one.
        self.held.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn replace(&self, content: Tensor, source: Option<Tensor>) {
        let mut held = self.lock();
        held.content = content;
        held.source = source;
        held.refreshes += 1;
    }
}

impl SpanRunner for Static {
    fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
        let mut held = self.lock();
        let x = inputs.first().and_then(Option::as_ref);
        if let (true, Some(x)) = (held.wired, x) {
            let known = match &held.source {
                Some(source) => identical(source, x).map_err(|e| self.failed(e))?,
                None => false,
            };
            if !known {
                let made = self.piece.run(&[(self.input, x.clone())], &[self.output])?;
                held.content = made[0].clone();
                held.source = Some(x.copy().map_err(|e| self.failed(e))?);
                held.refreshes += 1;
            }
        }
        let rows = |t: &Tensor| t.dims().split_last().map(|(_, lead)| lead.to_vec());
        if x.is_some_and(|x| rows(x) != rows(&held.content)) {
            held.apart += 1;
            return Ok(SpanOutcome::Host);
        }
        held.reads += 1;
        Ok(SpanOutcome::Done(vec![held.content.clone()]))
    }
}

impl Static {
    fn failed(&self, source: candle_core::Error) -> GraphError {
        GraphError::Kernel {
            op: "cadence".into(),
            at: self.graph.value(self.output).name.clone(),
            source: Box::new(source),
        }
    }
}

/// Takes the parts at these sites (module paths or receipt keys; all there are when none is named) out of a loop.
/// `hot_loop` runs one whole loop with the plan and the observer it is given.
///
/// # Errors
/// `cadence_nothing`: no such part. `cadence_uncaptured`: an output was seen less often than its structure asks for, or
/// less often than another. `cadence_varies`: an output was not the same all along. Nothing was changed then.
pub fn cadence(
    host: &Host,
    model: &Loaded,
    sites: &[&str],
    hot_loop: &mut dyn FnMut(&Plan, &mut dyn Observer) -> Result<(), Error>,
) -> Result<Cadence, Error> {
    let all = host.catalog.newest();
    let tagged = |s: &&&Spec| s.kind == Kind::Region && s.tags.iter().any(|t| t == TAG);
    let names: Vec<String> = all.iter().filter(tagged).map(|s| s.name.clone()).collect();
    if names.is_empty() {
        return Err(Error::invalid(
            NOTHING,
            format!("no entry is tagged `{TAG}`"),
        ));
    }
    let survey = host.survey(model, &names)?;
    let wanted =
        |key: &str, path: &str| sites.is_empty() || sites.contains(&key) || sites.contains(&path);
    let graph = model.session().graph().clone();
    let mut parts = Vec::new();
    let mut taken = BTreeSet::new();
    for site in &survey.sites {
        let span = &site.spans[0];
        let ends = (span.inputs.first(), span.outputs.first());
        let (Some((_, Some(input))), Some((_, Some(output)))) = ends else {
            continue;
        };
        if span.inputs.len() == 1
            && wanted(&site.seam.key, &site.seam.path)
            && span.ops.iter().all(|op| taken.insert(*op))
        {
            parts.push((site, *input, *output));
        }
    }
    let missing = sites.iter().find(|s| {
        let mut found = parts.iter();
        !found.any(|(site, ..)| site.seam.key == **s || site.seam.path == **s)
    });
    if parts.is_empty() || missing.is_some() {
        let known: Vec<&str> = survey
            .sites
            .iter()
            .map(|s| s.seam.key.as_str())
            .take(8)
            .collect();
        return Err(Error::invalid(
            NOTHING,
            format!(
                "`{}` of `{}` is no part on a slower cadence; there are {}: {}",
                missing.unwrap_or(&"any"),
                model.name(),
                survey.sites.len(),
                known.join(", ")
            ),
        ));
    }
    let rules: Vec<Rule> = parts
        .iter()
        .map(|(site, _, output)| Rule::of(site.spec, &site.seam.key, *output))
        .collect();
    let mut seen = Seen::new(rules);
    hot_loop(&model.session().host_plan(), &mut seen)?;
    let captures = seen.captures()?;
    let mut statics = Vec::new();
    for ((site, input, output), content) in parts.iter().zip(seen.contents()) {
        let span = &site.spans[0];
        statics.push(Arc::new(Static {
            key: site.seam.key.clone(),
            path: site.seam.path.clone(),
            structure: site.spec.name.clone(),
            graph: graph.clone(),
            ops: span.ops.clone(),
            input: *input,
            output: *output,
            piece: model.session().piece(&span.ops)?,
            held: Mutex::new(Held {
                content,
                source: None,
                wired: false,
                reads: 0,
                refreshes: 0,
                apart: 0,
            }),
        }));
    }
    let outputs: Vec<ValueId> = statics.iter().map(|s| s.output).collect();
    let needed = ancestors(&graph, &outputs);
    let mut read = needed
        .iter()
        .flat_map(|op| graph.op(*op).inputs.iter().flatten());
    let state = read.find(|v| matches!(graph.value(**v).origin, Origin::State(_)));
    let recompute = match state {
        Some(v) => Err(format!(
            "a content depends on state region `{}`",
            graph.value(*v).name
        )),
        None => model.session().piece(&needed).map_err(|e| e.to_string()),
    };
    Ok(Cadence {
        statics,
        captures,
        recompute,
        graph,
    })
}

impl Cadence {
    /// How a plan hands the parts to their contents, beside whatever else is in it.
    pub fn installs(&self) -> Vec<Install> {
        let install = |s: &Arc<Static>| Install {
            name: format!("{}:{}", s.structure, s.key),
            ops: s.ops.clone(),
            inputs: vec![Some(s.input)],
            outputs: vec![s.output],
            runner: s.clone(),
        };
        self.statics.iter().map(install).collect()
    }

    /// The host's plan with nothing but these. Dropping it is detaching.
    pub fn plan(&self, model: &Loaded) -> Result<Plan, Error> {
        Ok(model.session().plan(self.installs())?)
    }

    /// Recomputes every content by the host's own operations from inputs of the graph, all of them or none. Inputs that
    /// no content depends on need not be given.
    ///
    /// # Errors
    /// `cadence_no_recompute`: a content depends on a state region, so only [`Cadence::write`] can replace it. An input
    /// that is missing or does not exist.
    pub fn refresh(&self, inputs: &[(&str, Tensor)]) -> Result<(), Error> {
        let piece = self.recompute.as_ref().map_err(|why| {
            Error::refused(
                NO_RECOMPUTE,
                format!("{why}; write the contents from where they are made"),
            )
        })?;
        let mut given = Vec::with_capacity(inputs.len());
        for (name, tensor) in inputs {
            let value = self
                .graph
                .inputs
                .iter()
                .find(|v| self.graph.value(**v).name == **name);
            let value = value
                .ok_or_else(|| Error::invalid(FORM, format!("the graph has no input `{name}`")))?;
            given.push((*value, tensor.clone()));
        }
        let outputs: Vec<ValueId> = self.statics.iter().map(|s| s.output).collect();
        let made = piece.run(&given, &outputs)?;
        for (s, content) in self.statics.iter().zip(made) {
            s.replace(content, None);
        }
        Ok(())
    }

    /// Replaces one content by what the caller made elsewhere.
    ///
    /// # Errors
    /// Another rank or width than the content it replaces, or no such part.
    pub fn write(&self, site: &str, content: &Tensor) -> Result<(), Error> {
        let found = self
            .statics
            .iter()
            .find(|s| s.key == site || s.path == site);
        let found = found.ok_or_else(|| {
            Error::invalid(
                NOTHING,
                format!("`{site}` is none of the parts that were taken"),
            )
        })?;
        let held = found.lock().content.clone();
        let fits = content.dtype() == held.dtype()
            && content.rank() == held.rank()
            && content.dims().last() == held.dims().last();
        if !fits {
            return Err(Error::invalid(
                FORM,
                format!(
                    "`{site}`: expected {:?} like {:?}, found {:?} {:?}",
                    held.dtype(),
                    held.dims(),
                    content.dtype(),
                    content.dims()
                ),
            ));
        }
        let copy = content.copy().map_err(|e| Error::Graph(found.failed(e)))?;
        found.replace(copy, None);
        Ok(())
    }

    /// From now on a part that is shown another input than its content was made of refreshes first. All parts must
    /// read one tensor.
    ///
    /// # Errors
    /// `cadence_no_producer`: they read several, each named.
    pub fn wire(&self) -> Result<(), Error> {
        let facts = HostFacts::new(&self.graph);
        let sources: BTreeSet<ValueId> =
            self.statics.iter().map(|s| facts.tensor(s.input)).collect();
        if sources.len() != 1 {
            let names: Vec<&str> = sources
                .iter()
                .map(|v| self.graph.value(*v).name.as_str())
                .collect();
            return Err(Error::refused(
                NO_PRODUCER,
                format!(
                    "the parts read {} tensors ({}), so nobody's forward refreshes all of them; refresh by hand",
                    names.len(),
                    names.join(", ")
                ),
            ));
        }
        self.statics.iter().for_each(|s| s.lock().wired = true);
        Ok(())
    }

    /// The manual contract again: content stays until the caller replaces it.
    pub fn unwire(&self) {
        for s in &self.statics {
            let mut held = s.lock();
            held.wired = false;
            held.source = None;
        }
    }

    /// What every part did so far.
    pub fn notes(&self) -> Vec<CadenceNote> {
        let note = |s: &Arc<Static>| {
            let held = s.lock();
            CadenceNote {
                site: s.key.clone(),
                path: s.path.clone(),
                structure: s.structure.clone(),
                captures: self.captures,
                reads: held.reads,
                refreshes: held.refreshes,
                apart: held.apart,
                wired: held.wired,
            }
        };
        self.statics.iter().map(note).collect()
    }
}

/// What a structure asks of a part.
struct Rule {
    key: String,
    output: ValueId,
    rtol: f64,
    atol: f64,
    least: usize,
}

impl Rule {
    fn of(spec: &Spec, key: &str, output: ValueId) -> Self {
        let number = |name: &str, default: f64| {
            let declared = spec.gates.other.get(name).and_then(|v| v.as_f64());
            declared.unwrap_or(default)
        };
        Rule {
            key: key.into(),
            output,
            rtol: number("invariance_rtol", 0.0),
            atol: number("invariance_atol", 0.0),
            least: number("min_hot_loop_captures", 2.0).max(2.0) as usize,
        }
    }
}

/// The outputs of a loop.
struct Seen {
    rules: Vec<Rule>,
    found: Vec<Option<(Tensor, usize)>>,
    /// The first thing that moved.
    moved: Option<String>,
}

impl Seen {
    fn new(rules: Vec<Rule>) -> Self {
        Seen {
            found: rules.iter().map(|_| None).collect(),
            rules,
            moved: None,
        }
    }

    fn captures(&self) -> Result<usize, Error> {
        let counts: Vec<usize> = self
            .found
            .iter()
            .map(|f| f.as_ref().map_or(0, |(_, n)| *n))
            .collect();
        for (rule, count) in self.rules.iter().zip(&counts) {
            if *count < rule.least {
                return Err(Error::invalid(
                    UNCAPTURED,
                    format!(
                        "`{}` was seen {count} times in the loop, at least {} are needed: run the whole loop",
                        rule.key, rule.least
                    ),
                ));
            }
            if *count != counts[0] {
                return Err(Error::invalid(
                    UNCAPTURED,
                    format!(
                        "`{}` was seen {count} times in the loop, `{}` {} times: they are not on one cadence",
                        rule.key, self.rules[0].key, counts[0]
                    ),
                ));
            }
        }
        match &self.moved {
            Some(moved) => Err(Error::invalid(VARIES, moved.clone())),
            None => Ok(counts.first().copied().unwrap_or(0)),
        }
    }

    fn contents(&self) -> impl Iterator<Item = Tensor> + '_ {
        self.found.iter().flatten().map(|(t, _)| t.clone())
    }
}

impl Observer for Seen {
    fn wants(&self, value: ValueId) -> bool {
        self.rules.iter().any(|r| r.output == value)
    }

    fn see(&mut self, value: ValueId, tensor: &Tensor) -> Result<(), GraphError> {
        for (rule, found) in self.rules.iter().zip(&mut self.found) {
            if rule.output != value {
                continue;
            }
            let failed = |source: candle_core::Error| GraphError::Kernel {
                op: "observe".into(),
                at: rule.key.clone(),
                source: Box::new(source),
            };
            let Some((first, count)) = found else {
                *found = Some((tensor.copy().map_err(failed)?, 1));
                continue;
            };
            *count += 1;
            let worst = apart(first, tensor, rule.rtol, rule.atol).map_err(failed)?;
            if let Some(how) = worst {
                self.moved.get_or_insert_with(|| {
                    format!(
                        "`{}` varies within the hot loop: its output number {count} {how}; it is no part on a slower \
                         cadence",
                        rule.key
                    )
                });
            }
        }
        Ok(())
    }
}

/// How a tensor is not the first one, up to both tolerances.
fn apart(
    first: &Tensor,
    now: &Tensor,
    rtol: f64,
    atol: f64,
) -> candle_core::Result<Option<String>> {
    if first.dims() != now.dims() {
        return Ok(Some(format!(
            "has dims {:?}, the first {:?}",
            now.dims(),
            first.dims()
        )));
    }
    let flat = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
    let (a, b) = (flat(first)?, flat(now)?);
    let off = |(a, b): &(&f32, &f32)| {
        let (a, b) = (f64::from(**a), f64::from(**b));
        let same = (a - b).abs() <= atol + rtol * a.abs() || a.to_bits() == b.to_bits();
        !same
    };
    let worst = a.iter().zip(&b).filter(off).count();
    Ok((worst > 0).then(|| {
        format!(
            "differs from the first in {worst} of {} values (rtol {rtol}, atol {atol})",
            a.len()
        )
    }))
}

fn identical(a: &Tensor, b: &Tensor) -> candle_core::Result<bool> {
    if a.dims() != b.dims() {
        return Ok(false);
    }
    let flat = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
    let (a, b) = (flat(a)?, flat(b)?);
    Ok(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()))
}

/// Every operation that a value needs.
fn ancestors(graph: &Graph, values: &[ValueId]) -> Vec<OpId> {
    let mut found = BTreeSet::new();
    let mut open = values.to_vec();
    while let Some(v) = open.pop() {
        let Some((op, _)) = graph.producer(v) else {
            continue;
        };
        if found.insert(op) {
            open.extend(graph.op(op).inputs.iter().flatten());
        }
    }
    found.into_iter().collect()
}
