//! Collects every wanted statistic while samples run, and reduces them once at the end.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{
    accumulate, amax, channel_amax, check_percentile, fp8_scale, scale_ceiling, AmaxTable,
    CallContent, Content, Dispersion, Moment, Observation, Offender, SampleTable, Statistic,
    StatsError, CEILING_RATIO,
};
use crate::precision::PrecisionError;

/// `path|point` -> what is wanted there.
pub type Wants = BTreeMap<String, BTreeSet<Statistic>>;

/// How a scale came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// One sample: its own maximum.
    SingleFrame,
    /// The percentile over several samples.
    Percentile,
    /// Nothing was fitted: the scheme asked for no statistic.
    None,
}

/// What a receipt says about a calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CalibrationNote {
    /// How.
    pub method: Method,
    /// Where the samples came from.
    pub source: String,
    /// Reduced points.
    pub points: usize,
    /// Fitted samples.
    pub samples: usize,
    /// Judged samples; set by whoever judges.
    pub held_out: usize,
    /// Percentile asked for.
    pub percentile: f64,
    /// How far the samples disagree, with more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dispersion: Option<Dispersion>,
    /// Scales above the ceiling.
    #[serde(default)]
    pub ceiling: Vec<Offender>,
    /// Median of the scales, with something above the ceiling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_median: Option<f64>,
    /// Points that only later samples reached: not calibrated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late_points: Vec<String>,
    /// Wanted points that no sample reached: what needs them binds nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub never_called: Vec<String>,
    /// Contents that were not the same in every sample: nothing is stored of them (`cadence_varies`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub varying: Vec<String>,
    /// Points whose reduced value is NaN or infinite: no scale can come from them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub non_finite: Vec<String>,
}

impl CalibrationNote {
    /// The note of a run that fitted nothing.
    pub fn nothing_fitted(source: &str, held_out: usize, percentile: f64) -> Self {
        Self {
            method: Method::None,
            source: source.to_string(),
            points: 0,
            samples: 0,
            held_out,
            percentile,
            dispersion: None,
            ceiling: Vec::new(),
            scale_median: None,
            late_points: Vec::new(),
            never_called: Vec::new(),
            varying: Vec::new(),
            non_finite: Vec::new(),
        }
    }
}

/// Reduced statistics. A point that was never called, or only by later samples, has no entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Largest absolute value.
    pub amax: BTreeMap<String, f32>,
    /// Largest absolute value of each channel.
    pub channel_amax: BTreeMap<String, Vec<f32>>,
    /// Mean square of each channel, pooled over all samples.
    pub second_moment: BTreeMap<String, Vec<f64>>,
    /// Rows, width, dtypes of every observed point, wanted or not.
    pub observations: BTreeMap<String, Observation>,
    /// Stored outputs, where somebody asked for them.
    pub contents: BTreeMap<String, Content>,
    /// For the receipt.
    pub note: CalibrationNote,
}

impl Calibration {
    /// Of a run that fitted nothing.
    pub fn nothing(note: CalibrationNote) -> Self {
        Self {
            amax: BTreeMap::new(),
            channel_amax: BTreeMap::new(),
            second_moment: BTreeMap::new(),
            observations: BTreeMap::new(),
            contents: BTreeMap::new(),
            note,
        }
    }

    /// What was measured, as a file holds it.
    ///
    /// # Errors
    /// A value that is NaN or infinite: nothing can be made of it, and JSON cannot hold it.
    pub fn statistics(&self) -> Result<Statistics, PrecisionError> {
        if let Some(name) = self.note.non_finite.first() {
            return Err(PrecisionError::Invalid {
                name: name.clone(),
                problem: "a statistic measured there is not finite".into(),
            });
        }
        Ok(Statistics {
            amax: self.amax.clone(),
            channel_amax: self.channel_amax.clone(),
            second_moment: self.second_moment.clone(),
        })
    }

    /// The FP8 scale of a point, rounded to what a kernel takes; `None` where there is no usable value.
    pub fn fp8_scale(&self, key: &str) -> Option<f32> {
        let amax = self.amax.get(key).filter(|a| a.is_finite())?;
        Some(fp8_scale(f64::from(*amax)) as f32)
    }
}

/// Reduced statistics as a file holds them: what a scheme asked for, key by key. `f32` and `f64` survive JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Statistics {
    /// Largest absolute value of a point.
    pub amax: BTreeMap<String, f32>,
    /// Largest absolute value of each of its channels.
    pub channel_amax: BTreeMap<String, Vec<f32>>,
    /// Mean square of each of its channels.
    pub second_moment: BTreeMap<String, Vec<f64>>,
}

/// Measures while samples run. No tensor is kept.
#[derive(Clone, Debug)]
pub struct Collector {
    wants: Wants,
    amax: AmaxTable,
    channels: SampleTable<Vec<f32>>,
    moments: SampleTable<Moment>,
    observations: BTreeMap<String, Observation>,
    pending: BTreeMap<String, Observation>,
    stored: Stored,
    samples: usize,
}

/// Contents: of the first sample, of the current one, and which of them moved.
#[derive(Clone, Debug, Default)]
struct Stored {
    wanted: BTreeSet<String>,
    held: BTreeMap<String, Content>,
    open: BTreeMap<String, Content>,
    varying: BTreeSet<String>,
}

impl Collector {
    /// Measures what is wanted; observes whatever it is shown.
    pub fn new(wants: Wants) -> Self {
        Self {
            wants,
            amax: AmaxTable::new(),
            channels: SampleTable::new(),
            moments: SampleTable::new(),
            observations: BTreeMap::new(),
            pending: BTreeMap::new(),
            stored: Stored::default(),
            samples: 0,
        }
    }

    /// Stores the outputs of every call at these keys too; for forms that declare content, not for schemes.
    #[must_use]
    pub fn with_contents(mut self, keys: impl IntoIterator<Item = String>) -> Self {
        self.stored.wanted.extend(keys);
        self
    }

    /// One call's tensor at a point, row-major.
    ///
    /// # Errors
    /// Data that contradicts its shape, or a channel count that moved.
    pub fn observe(
        &mut self,
        key: &str,
        data: &[f32],
        shape: &[usize],
        dtype: &str,
    ) -> Result<(), StatsError> {
        if shape.iter().product::<usize>() != data.len() {
            return Err(StatsError::Shape {
                what: format!("tensor at {key}"),
                expected: format!("{shape:?}"),
                found: format!("{} values", data.len()),
            });
        }
        self.pending
            .entry(key.to_string())
            .or_default()
            .record(shape, dtype);
        if self.stored.wanted.contains(key) {
            let calls = &mut self.stored.open.entry(key.to_string()).or_default().calls;
            calls.push(CallContent {
                dims: shape.to_vec(),
                values: data.to_vec(),
            });
        }
        let width = shape.last().copied().unwrap_or(1);
        let none = BTreeSet::new();
        for statistic in self.wants.get(key).unwrap_or(&none) {
            match statistic {
                Statistic::None => {}
                Statistic::AmaxTensor => self.amax.observe(key, amax(data))?,
                Statistic::AmaxChannel => {
                    let channels = channel_amax(data, width)?;
                    // The scalar comes with it: whoever has channels has the tensor's amax too.
                    self.amax.observe(key, amax(data))?;
                    self.channels.observe(key, channels)?;
                }
                Statistic::SecondMomentChannel => {
                    self.moments.observe(key, Moment::of(data, width)?)?;
                }
            }
        }
        Ok(())
    }

    /// Closes a sample. On an error nothing of it is kept, by any statistic.
    ///
    /// # Errors
    /// A sample that missed points of the first one, or whose channels moved.
    pub fn end_sample(&mut self) -> Result<(), StatsError> {
        let checked = self.amax.check_sample();
        let checked = checked.and_then(|()| self.channels.check_sample());
        if let Err(error) = checked.and_then(|()| self.moments.check_sample()) {
            self.abort_sample();
            return Err(error);
        }
        self.amax.end_sample()?;
        self.channels.end_sample()?;
        self.moments.end_sample()?;
        for (key, seen) in std::mem::take(&mut self.pending) {
            let held = self.observations.entry(key).or_default();
            held.rows.extend(seen.rows);
            held.rows.sort_unstable();
            held.width = held.width.or(seen.width);
            held.dtypes.extend(seen.dtypes);
        }
        self.stored.end_sample(self.samples == 0);
        self.samples += 1;
        Ok(())
    }

    /// Drops what a failed sample measured.
    pub fn abort_sample(&mut self) {
        self.amax.abort_sample();
        self.channels.abort_sample();
        self.moments.abort_sample();
        self.pending.clear();
        self.stored.open.clear();
    }

    /// Reduces everything once.
    ///
    /// # Errors
    /// No sample, or a percentile outside `[0, 100]`.
    pub fn finish(self, percentile: f64, source: &str) -> Result<Calibration, StatsError> {
        check_percentile(percentile)?;
        if self.samples == 0 {
            return Err(StatsError::NoSamples);
        }
        let rows = self.amax.rows();
        let reduced = accumulate(rows, percentile)?;
        let amax: BTreeMap<String, f32> = self
            .amax
            .points()
            .iter()
            .cloned()
            .zip(reduced.iter().copied())
            .collect();
        let mut channel = BTreeMap::new();
        for (i, point) in self.channels.points().iter().enumerate() {
            let samples: Vec<Vec<f32>> = self
                .channels
                .rows()
                .iter()
                .map(|row| row[i].clone())
                .collect();
            channel.insert(point.clone(), accumulate(&samples, percentile)?);
        }
        let mut second = BTreeMap::new();
        for (i, point) in self.moments.points().iter().enumerate() {
            let mut pooled = self.moments.rows()[0][i].clone();
            for row in &self.moments.rows()[1..] {
                super::Merge::merge(&mut pooled, row[i].clone(), point)?;
            }
            second.insert(point.clone(), pooled.mean());
        }

        let scales: Vec<(&str, f64)> = amax
            .iter()
            .map(|(key, a)| (key.as_str(), fp8_scale(f64::from(*a))))
            .collect();
        let ceiling = scale_ceiling(scales, CEILING_RATIO);
        if let Some(warning) = ceiling.warning("activation scales") {
            tracing::warn!("{warning}");
        }
        let late: BTreeSet<&String> = self
            .amax
            .late()
            .iter()
            .chain(self.channels.late())
            .chain(self.moments.late())
            .collect();
        let has_value = |key: &String| {
            amax.contains_key(key) || channel.contains_key(key) || second.contains_key(key)
        };
        let wanted = |set: &BTreeSet<Statistic>| set.iter().any(|s| *s != Statistic::None);
        let never = self
            .wants
            .iter()
            .filter(|(key, set)| wanted(set) && !has_value(key) && !late.contains(key));
        let bad = |key: &&String| {
            !amax.get(*key).is_none_or(|a| a.is_finite())
                || channel
                    .get(*key)
                    .is_some_and(|c| c.iter().any(|a| !a.is_finite()))
                || second
                    .get(*key)
                    .is_some_and(|c| c.iter().any(|a| !a.is_finite()))
        };
        let many = self.samples > 1;
        let keys: BTreeSet<&String> = amax
            .keys()
            .chain(channel.keys())
            .chain(second.keys())
            .collect();
        let note = CalibrationNote {
            method: if many {
                Method::Percentile
            } else {
                Method::SingleFrame
            },
            source: source.to_string(),
            points: keys.len(),
            samples: self.samples,
            held_out: 0,
            percentile,
            dispersion: if many {
                Some(Dispersion::new(rows, &reduced)?)
            } else {
                None
            },
            scale_median: ceiling.median.filter(|_| !ceiling.offenders.is_empty()),
            ceiling: ceiling.offenders,
            late_points: late.iter().map(|key| (*key).clone()).collect(),
            never_called: never.map(|(key, _)| key.clone()).collect(),
            varying: self.stored.varying.into_iter().collect(),
            non_finite: keys.into_iter().filter(bad).cloned().collect(),
        };
        if let Some(dispersion) = &note.dispersion {
            tracing::info!("{}", dispersion.summary());
        }
        Ok(Calibration {
            amax,
            channel_amax: channel,
            second_moment: second,
            observations: self.observations,
            contents: self.stored.held,
            note,
        })
    }
}

impl Stored {
    fn end_sample(&mut self, first: bool) {
        let open = std::mem::take(&mut self.open);
        if first {
            self.held = open;
            return;
        }
        let same = |key: &String| match (self.held.get(key), open.get(key)) {
            (Some(held), Some(now)) => held.identical(now),
            (held, now) => held.is_none() && now.is_none(),
        };
        let moved: Vec<String> = self
            .wanted
            .iter()
            .filter(|key| !same(key))
            .cloned()
            .collect();
        for key in moved {
            self.held.remove(&key);
            self.varying.insert(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever statistic a sample fails in, none of it is left behind, and the next sample is as if it had not been.
    #[test]
    fn b_067_a_sample_that_fails_at_its_end_leaves_no_row_in_any_table() {
        let wants = |statistic| {
            let scalar = ("a|x".to_string(), [Statistic::AmaxTensor].into());
            Wants::from([scalar, ("b|y".to_string(), [statistic].into())])
        };
        for statistic in [Statistic::AmaxChannel, Statistic::SecondMomentChannel] {
            let mut c = Collector::new(wants(statistic));
            let mut sample = |x: f32, width: usize| {
                c.observe("a|x", &[x], &[1, 1], "f32").unwrap();
                c.observe("b|y", &vec![x; width], &[1, width], "f32")
                    .unwrap();
                c.end_sample()
            };
            sample(1.0, 2).unwrap();
            // Its channels moved: amax alone would have been content with it.
            assert_eq!(sample(9.0, 3).unwrap_err().code(), "samples_misaligned");
            sample(2.0, 2).unwrap();
            let done = c.finish(100.0, "text").unwrap();
            assert_eq!(
                (done.note.samples, done.amax["a|x"]),
                (2, 2.0),
                "{statistic:?}"
            );
            assert_eq!(done.observations["a|x"].rows.len(), 2);
        }
    }

    #[test]
    fn what_was_measured_survives_json() {
        let mut c = Collector::new(Wants::from([(
            "a|x".to_string(),
            [Statistic::AmaxChannel, Statistic::SecondMomentChannel].into(),
        )]));
        let odd = [0.1_f32, 1.0 / 3.0, 16_777_217.0, f32::MIN_POSITIVE];
        c.observe("a|x", &odd, &[1, 4], "f32").unwrap();
        c.end_sample().unwrap();
        let found = c.finish(99.9, "text").unwrap().statistics().unwrap();
        assert_eq!(found.channel_amax["a|x"], odd);
        let text = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<Statistics>(&text).unwrap(), found);
        let mut c = Collector::new(Wants::from([(
            "a|x".to_string(),
            [Statistic::AmaxChannel].into(),
        )]));
        c.observe("a|x", &[f32::NAN], &[1, 1], "f32").unwrap();
        c.end_sample().unwrap();
        let broken = c.finish(99.9, "text").unwrap().statistics().unwrap_err();
        assert!(broken.to_string().contains("a|x"), "{broken}");
    }

    fn wants(list: &[(&str, Statistic)]) -> Wants {
        let mut wants = Wants::new();
        for (key, statistic) in list {
            wants
                .entry((*key).to_string())
                .or_default()
                .insert(*statistic);
        }
        wants
    }

    #[test]
    fn b_053_two_levels_maximum_inside_a_sample_percentile_across() {
        let mut c = Collector::new(wants(&[("a|x", Statistic::AmaxTensor)]));
        for sample in [[1.0, 4.0], [2.0, 2.0], [3.0, 1.0]] {
            for call in sample {
                c.observe("a|x", &[call, -call / 2.0], &[1, 2], "f32")
                    .unwrap();
            }
            c.end_sample().unwrap();
        }
        let done = c.finish(50.0, "text").unwrap();
        assert_eq!(done.amax["a|x"], 3.0);
        assert_eq!(done.note.method, Method::Percentile);
        assert_eq!((done.note.samples, done.note.points), (3, 1));
        assert_eq!(done.observations["a|x"].rows, [1; 6]);
        assert_eq!(done.fp8_scale("a|x"), Some((3.0f64 / 448.0) as f32));
        assert_eq!(done.fp8_scale("b|x"), None);
        assert!(done.note.dispersion.is_some());
    }

    #[test]
    fn b_062_b_063_channels_bring_the_scalar_and_moments_pool() {
        let mut c = Collector::new(wants(&[
            ("a|x", Statistic::AmaxChannel),
            ("a|y", Statistic::SecondMomentChannel),
        ]));
        c.observe("a|x", &[1.0, -3.0], &[2], "f32").unwrap();
        c.observe("a|y", &[1.0, 3.0], &[2, 1], "f32").unwrap();
        c.observe("a|y", &[5.0], &[1, 1], "f32").unwrap();
        c.end_sample().unwrap();
        c.observe("a|x", &[2.0, 1.0], &[2], "f32").unwrap();
        c.observe("a|y", &[1.0], &[1, 1], "f32").unwrap();
        c.end_sample().unwrap();
        let done = c.finish(100.0, "text").unwrap();
        assert_eq!(done.amax["a|x"], 3.0);
        assert_eq!(done.channel_amax["a|x"], [2.0, 3.0]);
        assert_eq!(done.second_moment["a|y"], [9.0]);
    }

    #[test]
    fn b_058_what_was_never_called_is_absent_and_said() {
        let mut c = Collector::new(wants(&[
            ("a|x", Statistic::AmaxTensor),
            ("b|x", Statistic::AmaxTensor),
            ("c|x", Statistic::None),
            ("late|x", Statistic::AmaxTensor),
        ]));
        c.observe("a|x", &[1.0], &[1], "f32").unwrap();
        c.end_sample().unwrap();
        c.observe("a|x", &[f32::NAN], &[1], "f32").unwrap();
        c.observe("late|x", &[1.0], &[1], "f32").unwrap();
        c.observe("unwanted", &[1.0, 2.0], &[1, 2], "f32").unwrap();
        c.end_sample().unwrap();
        let done = c.finish(99.9, "text").unwrap();
        assert_eq!(done.note.never_called, ["b|x"]);
        assert_eq!(done.note.late_points, ["late|x"]);
        assert_eq!(done.note.non_finite, ["a|x"]);
        assert_eq!(done.fp8_scale("a|x"), None);
        assert!(!done.amax.contains_key("late|x"));
        assert_eq!(done.observations["unwanted"].width, Some(2));
    }

    #[test]
    fn b_066_one_sample_is_a_single_frame_and_none_is_refused() {
        let empty = Collector::new(Wants::new());
        assert_eq!(empty.finish(99.9, "x").unwrap_err().code(), "no_samples");
        let mut c = Collector::new(wants(&[("a", Statistic::AmaxTensor)]));
        c.observe("a", &[2.0], &[1], "f32").unwrap();
        c.end_sample().unwrap();
        assert_eq!(
            c.clone().finish(101.0, "x").unwrap_err().code(),
            "percentile_range"
        );
        let done = c.finish(99.9, "x").unwrap();
        assert_eq!(done.note.method, Method::SingleFrame);
        assert!(done.note.dispersion.is_none());
    }

    #[test]
    fn b_067_a_failed_sample_leaves_no_trace() {
        let mut c = Collector::new(wants(&[("a", Statistic::AmaxTensor)]));
        c.observe("a", &[9.0], &[1], "f32").unwrap();
        c.abort_sample();
        c.observe("a", &[1.0], &[1], "f32").unwrap();
        c.end_sample().unwrap();
        let done = c.finish(99.9, "x").unwrap();
        assert_eq!(done.amax["a"], 1.0);
        assert_eq!(done.observations["a"].rows.len(), 1);
        let mut c = Collector::new(Wants::new());
        assert!(c.observe("a", &[1.0, 2.0], &[3], "f32").is_err());
    }
}
