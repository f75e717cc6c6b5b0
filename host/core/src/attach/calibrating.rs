//! What is measured before anything is bound: statistics of the fitted samples, contents, steps, rows.
//!
//! Owns which runs of the host are watched and what for, and the door that ends there. The statistics themselves are
//! [`crate::stats`], watching is [`crate::observe`], what a scheme asks for is [`crate::schemes`].

use std::collections::{BTreeMap, HashMap};

use candle_core::Tensor;
use structures_graph::session::Plan;
use structures_graph::ValueId;

use super::{Options, Prepared};
use crate::error::Error;
use crate::host::{Host, Loaded};
use crate::observe::{Conditionings, Watch};
use crate::precision::{self, PrecisionSpec};
use crate::progress::Progress;
use crate::samples::Samples;
use crate::schemes::{self, Decision, Selected};
use crate::sites::Survey;
use crate::stats::{self, Calibration, CallContent, Collector, Content};
use crate::steps;
use crate::workload::{Runner, Workload};

/// What `calibrate` found.
pub struct Measured {
    /// Reduced statistics.
    pub calibration: Calibration,
    /// The scheme that asked for them.
    pub selected: Selected,
    /// Points under a static scale -> the dtype that the forms the scheme routes to round to there.
    pub dtypes: BTreeMap<String, String>,
}

/// Measures what a scheme asks for and nothing more.
pub fn calibrate(
    host: &Host,
    model: &Loaded,
    samples: &Samples,
    options: &Options,
    progress: &dyn Progress,
) -> Result<Measured, Error> {
    let prepared = Prepared::new(host, model, samples, options, progress)?;
    Ok(Measured {
        dtypes: prepared.scale_dtypes(),
        calibration: prepared.calibration,
        selected: prepared.selected,
    })
}

/// The measured scales as a precision spec, in the dtype that is executed at each point.
pub fn precision_spec(
    calibration: &Calibration,
    dtypes: &BTreeMap<String, String>,
) -> Result<PrecisionSpec, Error> {
    let note = &calibration.note;
    Ok(PrecisionSpec::calibrated(
        &note.source,
        calibration
            .amax
            .iter()
            .filter_map(|(key, amax)| Some((key, dtypes.get(key)?, *amax))),
        note.samples,
        note.percentile,
    )?)
}

impl Prepared<'_> {
    /// FP8 where no loaded plugin has a form to ask.
    fn scale_dtypes(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        for (site, decision) in self.survey.sites.iter().zip(&self.decisions) {
            let Decision::Route { format, .. } = decision else {
                continue;
            };
            let forms = self.host.forms();
            let mut routed = forms
                .iter()
                .map(|c| c.form)
                .filter(|f| f.structure == site.spec.name && f.format == *format)
                .peekable();
            if routed.peek().is_none() {
                let keys = site.spec.points.iter().map(|point| site.point_key(point));
                found.extend(keys.map(|key| (key, precision::FP8.to_string())));
                continue;
            }
            for form in routed {
                let Some(dtype) = precision::activation_dtype(&form.activation_format) else {
                    continue;
                };
                let fixed = form.statistics.iter().filter(|s| s.granularity == "tensor");
                for s in fixed.filter(|s| s.statistic == "amax") {
                    let key = site.point_key(&s.point);
                    found.entry(key).or_insert_with(|| dtype.to_string());
                }
            }
        }
        found
    }
}

/// The runs of the host that are watched before anything is bound.
pub(super) struct Runs<'r> {
    pub(super) model: &'r Loaded,
    pub(super) survey: &'r Survey<'r>,
    pub(super) scheme_plan: &'r schemes::Plan,
    /// Points whose content is a step of a loop, with their values.
    pub(super) conditionings: &'r [(String, ValueId)],
    pub(super) samples: &'r Samples,
    pub(super) judged: &'r [Vec<u32>],
    pub(super) fitted: &'r [&'r [u32]],
    pub(super) workload: Workload,
    pub(super) options: &'r Options,
}

/// What they showed.
pub(super) struct Seen {
    pub(super) calibration: Calibration,
    /// What the host feeds the inputs of spans.
    pub(super) contents: HashMap<ValueId, Tensor>,
    /// Rows under the workload per site, ascending.
    pub(super) rows: HashMap<usize, Vec<u64>>,
}

impl Runs<'_> {
    pub(super) fn watch(&self, progress: &dyn Progress) -> Result<Seen, Error> {
        let first = self
            .judged
            .first()
            .ok_or_else(|| Error::invalid("no_samples", "there is no sample to judge on"))?;
        // Rows follow the length of a sample: the longest one shows the largest.
        let longest = self.judged.iter().max_by_key(|s| s.len()).unwrap_or(first);

        let runner = Runner::new(self.model.session(), longest.len());
        let plan = self.model.session().host_plan();
        progress.stage("calibrate", self.fitted.len() + 1);
        let (mut calibration, contents) = self.statistics(longest, progress)?;
        let rows = self.rows(&runner, &plan, longest)?;
        calibration.contents.extend(self.steps(&runner, &plan)?);
        // A judged sample that was fitted too says nothing about others, however it got there.
        let seen = self
            .judged
            .iter()
            .filter(|j| self.fitted.contains(&j.as_slice()))
            .count();
        calibration.note.held_out = self.judged.len() - seen;
        Ok(Seen {
            calibration,
            contents,
            rows,
        })
    }

    /// Runs the fitted samples with the collector watching, and keeps what the first judged sample feeds the spans.
    fn statistics(
        &self,
        first: &[u32],
        progress: &dyn Progress,
    ) -> Result<(Calibration, HashMap<ValueId, Tensor>), Error> {
        let session = self.model.session();
        let plan = session.host_plan();
        let runner = Runner::new(session, first.len());
        let contents = span_contents(self.model, self.survey, first)?;
        progress.tick();
        if self.fitted.is_empty() {
            let note = stats::CalibrationNote::nothing_fitted(
                self.samples.source(),
                self.samples.samples().len(),
                self.options.percentile,
            );
            return Ok((nothing(note), contents));
        }
        let mut keys = Vec::new();
        for site in &self.survey.sites {
            for span in &site.spans {
                for (point, value) in &span.points {
                    let key = site.point_key(point);
                    if self.scheme_plan.wants.contains_key(&key)
                        && !keys.iter().any(|(_, k): &(ValueId, String)| *k == key)
                    {
                        keys.push((*value, key));
                    }
                }
            }
        }
        let mut watch = Watch::new(Collector::new(self.scheme_plan.wants.clone()), keys);
        for sample in self.fitted {
            let mut state = runner.state();
            runner.step(&plan, sample, 0, &mut state, Some(&mut watch))?;
            watch.collector.end_sample()?;
            progress.tick();
        }
        Ok((
            watch
                .collector
                .finish(self.options.percentile, self.samples.source())?,
            contents,
        ))
    }

    /// What the loop feeds there, over the workload of every sample: a step is no statistic, so none is held out.
    fn steps(&self, runner: &Runner<'_>, plan: &Plan) -> Result<BTreeMap<String, Content>, Error> {
        let mut watch = Conditionings::new(self.conditionings.iter().map(|(_, v)| *v));
        if !watch.is_empty() {
            let all: Vec<Vec<u32>> = self
                .samples
                .samples()
                .iter()
                .map(|s| s.tokens.clone())
                .collect();
            runner.score(
                plan,
                &all,
                self.workload,
                self.options.all_positions,
                Some(&mut watch),
                || {},
            )?;
        }
        let content = |(key, v): &(String, ValueId)| {
            let (width, rows) = watch.rows(*v)?;
            let call = |row: &[f32]| CallContent {
                dims: vec![1, width],
                values: row.to_vec(),
            };
            let calls = rows.chunks_exact(width.max(1)).map(call).collect();
            Some((key.clone(), Content { calls }))
        };
        Ok(self.conditionings.iter().filter_map(content).collect())
    }

    /// Rows every site sees under the workload, ascending.
    fn rows(
        &self,
        runner: &Runner<'_>,
        plan: &Plan,
        sample: &[u32],
    ) -> Result<HashMap<usize, Vec<u64>>, Error> {
        let keys = self.survey.sites.iter().enumerate().filter_map(|(i, s)| {
            let value = s.spans[0].inputs.iter().find_map(|(_, v)| *v)?;
            Some((value, i.to_string()))
        });
        let mut watch = Watch::new(Collector::new(stats::Wants::new()), keys);
        runner.score(
            plan,
            &[sample.to_vec()],
            self.workload,
            self.options.all_positions,
            Some(&mut watch),
            || {},
        )?;
        watch.collector.end_sample()?;
        let observed = watch.collector.finish(100.0, "rows")?.observations;
        Ok(observed
            .into_iter()
            .filter_map(|(key, o)| Some((key.parse().ok()?, o.rows)))
            .collect())
    }
}

/// A calibration in which nothing was measured.
pub(crate) fn nothing(note: stats::CalibrationNote) -> Calibration {
    Calibration::nothing(note)
}

/// What the host feeds every span when it runs these tokens in one call.
pub(crate) fn span_contents(
    model: &Loaded,
    survey: &Survey<'_>,
    tokens: &[u32],
) -> Result<HashMap<ValueId, Tensor>, Error> {
    let inputs = survey.sites.iter().flat_map(|s| {
        s.spans
            .iter()
            .flat_map(|span| span.inputs.iter().filter_map(|(_, v)| *v))
    });
    let mut watch = Watch::new(Collector::new(stats::Wants::new()), []).content(inputs);
    let runner = Runner::new(model.session(), tokens.len());
    let mut state = runner.state();
    runner.step(
        &model.session().host_plan(),
        tokens,
        0,
        &mut state,
        Some(&mut watch),
    )?;
    Ok(watch.into_contents())
}

/// Points whose content is a step of a loop, with their values.
pub(super) fn conditionings(survey: &Survey<'_>) -> Vec<(String, ValueId)> {
    let mut found = Vec::new();
    for site in &survey.sites {
        let Some(declared) = steps::declared(site.spec) else {
            continue;
        };
        let span = site.spans.iter().find(|s| s.name == declared.span);
        let value = span.and_then(|s| s.inputs.first()?.1);
        found.extend(value.map(|v| (site.point_key(&declared.point), v)));
    }
    found
}
