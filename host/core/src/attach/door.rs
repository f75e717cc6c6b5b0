//! The explicit door: one structure, at one place of a model, bound and gated by itself.
//!
//! The gate is the worst cosine over the samples between what the form answers and what the host makes there, on the
//! inputs the host really feeds that place. Nothing is timed: whether it is a net win is the caller's business, and
//! [`super::attach`]'s.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use structures_catalog::{Kind, Spec};
use structures_graph::session::{Install, Plan, SpanOutcome, SpanRunner};
use structures_graph::ValueId;

use super::{Options, Prepared};
use crate::bind::Bound;
use crate::choose::{median_rows, Choice, Wanted};
use crate::error::Error;
use crate::gates::{measure, GateError, OutputKind};
use crate::host::{Host, Loaded};
use crate::observe::Watch;
use crate::progress::Progress;
use crate::receipt::SeatNote;
use crate::samples::Samples;
use crate::schemes::{Decision, KEEP_QUANTISATION_OFF};
use crate::seat::Seat;
use crate::stats::{Collector, Wants};
use crate::workload::{Runner, Workload};

/// Worst cosine a bind must reach when the caller names no other floor.
pub const DEFAULT_FLOOR: f64 = 0.999;

/// One structure of the catalog, ready to be bound.
pub struct Handle<'h> {
    host: &'h Host,
    /// Its specification.
    pub spec: &'h Spec,
}

/// What a bind through [`Handle::bind`] was worth.
pub struct Certified {
    /// Structure.
    pub structure: String,
    /// Version of its specification.
    pub version: u32,
    /// `PLUGIN:FORM`.
    pub form: String,
    /// Span of the dataflow that was bound: what lies inside the boundary.
    pub boundary: String,
    /// Symbol -> size.
    pub dims: BTreeMap<String, u64>,
    /// Host and form axes.
    pub variant: BTreeMap<String, String>,
    /// Smallest cosine over samples and outputs.
    pub worst_cosine: f64,
    /// What it had to reach.
    pub floor: f64,
    /// Samples it was measured on: those whose call the form served. Rows outside its band are the host's.
    pub samples: usize,
    /// Distinct numbers of rows the place saw, ascending.
    pub rows: Vec<u64>,
    /// The seat, for its ledger.
    pub seat: Arc<Seat>,
    /// How a plan hands the span to the seat: [`structures_graph::session::Session::plan`].
    pub install: Install,
    /// How to bind it again.
    pub note: SeatNote,
}

impl Certified {
    /// The host's plan with this one seat. Dropping the plan is detaching: the model was never changed.
    pub fn plan(&self, model: &Loaded) -> Result<Plan, Error> {
        Ok(model.session().plan(vec![self.install.clone()])?)
    }
}

impl Host {
    /// A region of the catalog by name.
    ///
    /// # Errors
    /// An unknown or retired name; a pipeline, which is no region: it is a way to capture a whole model.
    pub fn get(&self, name: &str) -> Result<Handle<'_>, Error> {
        let spec = self.catalog.get(name)?;
        if spec.kind == Kind::StagePipeline {
            return Err(Error::invalid(
                "pipeline_not_bindable",
                format!(
                    "`{name}` is a pipeline: it has no boundary to bind at; capture the whole model under its windows"
                ),
            ));
        }
        Ok(Handle { host: self, spec })
    }
}

impl Handle<'_> {
    /// Binds at the module `path` (or the receipt key) of a model. The first form in the order of choice that can be
    /// bound under `options.scheme` is taken; scales are fitted on three quarters of the samples where the scheme wants
    /// any. `floor` 0 skips the gate.
    ///
    /// # Errors
    /// A floor that is no number. No seam of this structure there; no form that can be bound, with every reason; `explicit_parity` when the worst
    /// cosine is below the floor.
    pub fn bind(
        &self,
        model: &Loaded,
        path: &str,
        samples: &Samples,
        options: &Options,
        floor: f64,
        progress: &dyn Progress,
    ) -> Result<Certified, Error> {
        if !floor.is_finite() {
            let text = format!("cosine={floor}");
            return Err(GateError::BadFloor { text }.into());
        }
        let options = Options {
            structures: vec![self.spec.name.clone()],
            // One structure at one place leaves the rest of the model as it is.
            adopt: None,
            ..options.clone()
        };
        let prepared = Prepared::new(self.host, model, samples, &options, progress)?;
        let site = self.site(&prepared, path)?;
        let (bound, choice) = bind_first(&prepared, site)?;
        let name = format!("{}:{}", choice.plugin, choice.form.name);
        let (worst, measured) = worst_cosine(&prepared, &bound.install, &bound.seat)?;
        if floor != 0.0 && worst.is_none_or(|w| w < floor || w.is_nan()) {
            let worst = worst.map_or("not measurable: the form served no sample".into(), |w| {
                format!("{w:.6}")
            });
            return Err(Error::refused(
                "explicit_parity",
                format!(
                    "`{name}` at `{path}`: the worst cosine over {measured} samples is {worst}, {floor} is needed; boundary: \
                     span `{}` of `{}`",
                    bound.note.span,
                    self.spec.name
                ),
            ));
        }
        let mut rows = prepared.seams[site].rows.clone();
        rows.dedup();
        Ok(Certified {
            structure: self.spec.name.clone(),
            version: bound.note.version,
            form: name,
            boundary: bound.note.span.clone(),
            dims: bound.note.dims.clone(),
            variant: bound.note.variant.clone(),
            worst_cosine: worst.unwrap_or(f64::NAN),
            floor,
            samples: measured,
            rows,
            seat: bound.seat,
            install: bound.install,
            note: bound.note,
        })
    }

    fn site(&self, prepared: &Prepared<'_>, path: &str) -> Result<usize, Error> {
        let sites = &prepared.survey.sites;
        let found = sites
            .iter()
            .position(|s| s.seam.key == path || s.seam.path == path);
        if let Some(site) = found {
            return Ok(site);
        }
        let refused = prepared.survey.refused.iter().find(|r| r.path == path);
        Err(match refused {
            Some(r) => Error::refused(r.code.clone(), format!("`{path}`: {}", r.reason)),
            None => {
                let known: Vec<&str> = sites.iter().map(|s| s.seam.key.as_str()).take(8).collect();
                Error::invalid(
                    "seam_unknown",
                    format!(
                        "`{path}` holds no `{}` of this model; the first of {}: {}",
                        self.spec.name,
                        sites.len(),
                        known.join(", ")
                    ),
                )
            }
        })
    }
}

/// The first form that can be bound, or every reason why none can.
fn bind_first<'p>(prepared: &Prepared<'p>, site: usize) -> Result<(Bound, Choice<'p>), Error> {
    let at = &prepared.survey.sites[site];
    let choices = match &prepared.decisions[site] {
        // Without quantisation an explicit bind still has the forms that do not quantise.
        Decision::Keep { code, .. } if code == KEEP_QUANTISATION_OFF => {
            let rows = median_rows(&prepared.seams[site].rows);
            prepared.ordered(&at.spec.name, Wanted::Unquantised, rows)
        }
        Decision::Keep { code, reason } => {
            let message = format!("`{}`: {reason}", at.seam.key);
            return Err(Error::refused(code.clone(), message));
        }
        _ => prepared.choices(site),
    };
    let mut why: Vec<(String, String)> = Vec::new();
    for choice in choices {
        match prepared.bind(site, &choice, &Default::default()) {
            Ok(bound) => return Ok((bound, choice)),
            Err(no) => {
                let text = format!("{}:{}: {}", choice.plugin, choice.form.name, no.note.reason);
                why.push((no.note.code, text));
            }
        }
    }
    let (code, message) = match why.first() {
        None => (
            "format_no_variant".to_string(),
            format!(
                "no loaded plugin has a form of `{}` for scheme {}",
                at.spec.name,
                prepared.selected.scheme.name()
            ),
        ),
        Some((code, _)) => {
            let all: Vec<&str> = why.iter().map(|(_, text)| text.as_str()).collect();
            (
                code.clone(),
                format!("`{}`: {}", at.seam.key, all.join("; ")),
            )
        }
    };
    Err(Error::refused(code, message))
}

/// Runs the host on every judged sample and the form on what the host feeds the span: the worst cosine, and how many
/// samples it is over. `None` when the form served no call, because all of them lay outside its band.
fn worst_cosine(
    prepared: &Prepared<'_>,
    install: &Install,
    seat: &Seat,
) -> Result<(Option<f64>, usize), Error> {
    let session = prepared.model.session();
    let plan = session.host_plan();
    let mut worst: Option<f64> = None;
    let mut measured = 0;
    for tokens in &prepared.judged {
        let watched = install.inputs.iter().flatten().chain(&install.outputs);
        let mut watch = Watch::new(Collector::new(Wants::new()), []).content(watched.copied());
        let runner = Runner::new(session, tokens.len());
        let mut state = runner.state();
        // In decode a place sees one row after a prompt, in prefill all of them.
        let split = match prepared.workload {
            Workload::Decode => tokens.len() - 1,
            Workload::Prefill => 0,
        };
        if split > 0 {
            runner.step(&plan, &tokens[..split], 0, &mut state, None)?;
        }
        runner.step(&plan, &tokens[split..], split, &mut state, Some(&mut watch))?;
        let seen = watch.into_contents();
        let value = |v: &ValueId| -> Result<Tensor, Error> {
            seen.get(v).cloned().ok_or_else(|| {
                Error::invalid(
                    "producer_input_unobserved",
                    format!("`{}`: the host did not make value {}", seat.key, v.0),
                )
            })
        };
        let inputs: Vec<Option<Tensor>> = install
            .inputs
            .iter()
            .map(|v| v.as_ref().map(value).transpose())
            .collect::<Result<_, _>>()?;
        let SpanOutcome::Done(made) = seat.run(&inputs)? else {
            continue;
        };
        measured += 1;
        for (got, want) in made.iter().zip(&install.outputs) {
            let (got, want) = (flat(got)?, flat(&value(want)?)?);
            let shape = [got.len()];
            let measured = measure(OutputKind::Values, (&got, &shape), (&want, &shape))?;
            let cosine = measured.metrics.get("cosine").unwrap_or(f64::NAN);
            worst = Some(match worst {
                Some(w) if w <= cosine || w.is_nan() => w,
                _ => cosine,
            });
        }
    }
    Ok((worst, measured))
}

fn flat(t: &Tensor) -> Result<Vec<f32>, Error> {
    t.to_dtype(DType::F32)
        .and_then(|t| t.flatten_all())
        .and_then(|t| t.to_vec1::<f32>())
        .map_err(|source| {
            Error::Graph(structures_graph::GraphError::Kernel {
                op: "compare".into(),
                at: "span".into(),
                source: Box::new(source),
            })
        })
}
