//! Calibrating whatever can be called: the arguments every door shares, and the three kinds of input.
//!
//! A door that has a model and texts makes callables of them; somebody with a control loop of their own hands theirs
//! in. Either way one sample is one call of one callable, which may itself run many steps: inside it maxima are kept,
//! across samples they are reduced once. A callable reports tensors to the collector it is given and keeps nothing: when
//! it fails, the collector ends with it, and with it everything that sample measured.
//!
//! How many samples, and which percentile, is in `docs/calibration.md`.

use super::{check_percentile, Calibration, Collector, StatsError, Wants, DEFAULT_PERCENTILE};

/// What a caller may choose, by the same names and defaults at every door.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalibrationArgs {
    /// Percentile across samples.
    pub percentile: f64,
    /// Keep only the first so many samples.
    pub max_samples: Option<usize>,
    /// Say what each sample measured.
    pub verbose: bool,
}

impl Default for CalibrationArgs {
    fn default() -> Self {
        CalibrationArgs {
            percentile: DEFAULT_PERCENTILE,
            max_samples: None,
            verbose: false,
        }
    }
}

/// What a callable may fail with.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// One sample: runs the model and shows the collector what it sees.
pub type Thunk<'a> = Box<dyn FnMut(&mut Collector) -> Result<(), Failure> + 'a>;

/// Runs the model on one observation.
pub type Call<'a, O> = Box<dyn FnMut(&O, &mut Collector) -> Result<(), Failure> + 'a>;

/// Where samples come from.
pub enum Inputs<'a, O = ()> {
    /// One callable: one sample.
    Forward(Thunk<'a>),
    /// One sample each.
    Thunks(Vec<Thunk<'a>>),
    /// One callable, one sample an observation.
    Samples {
        /// The callable.
        call: Call<'a, O>,
        /// What it is called with.
        observations: Vec<O>,
    },
}

impl<O> Inputs<'_, O> {
    /// The word for it in a receipt.
    pub fn source(&self) -> &'static str {
        match self {
            Inputs::Forward(_) => "forward",
            Inputs::Thunks(_) => "thunks",
            Inputs::Samples { .. } => "samples",
        }
    }

    fn len(&self) -> usize {
        match self {
            Inputs::Forward(_) => 1,
            Inputs::Thunks(thunks) => thunks.len(),
            Inputs::Samples { observations, .. } => observations.len(),
        }
    }

    fn sample(&mut self, i: usize, collector: &mut Collector) -> Result<(), Failure> {
        match self {
            Inputs::Forward(thunk) => thunk(collector),
            Inputs::Thunks(thunks) => thunks[i](collector),
            Inputs::Samples { call, observations } => call(&observations[i], collector),
        }
    }
}

/// Measures what is wanted over the samples of `inputs`.
///
/// # Errors
/// No sample, a percentile outside `[0, 100]` (both before anything runs), a callable that fails, samples that do not
/// reach the same points.
pub fn run<O>(
    collector: Collector,
    mut inputs: Inputs<'_, O>,
    args: &CalibrationArgs,
) -> Result<Calibration, StatsError> {
    check_percentile(args.percentile)?;
    let samples = inputs.len().min(args.max_samples.unwrap_or(usize::MAX));
    if samples == 0 {
        return Err(StatsError::NoSamples);
    }
    let source = inputs.source();
    let mut collector = collector;
    for sample in 0..samples {
        if let Err(cause) = inputs.sample(sample, &mut collector) {
            return Err(StatsError::Pass {
                sample,
                cause: cause.to_string(),
            });
        }
        collector.end_sample()?;
        if args.verbose {
            tracing::info!("sample {} of {samples} measured", sample + 1);
        }
    }
    collector.finish(args.percentile, source)
}

/// The door of callers that know one sample only: `n` is what they were asked for.
///
/// # Errors
/// `n` of 0; `n` above 1, which this door does not do, pointing at the one that does; what [`run`] refuses.
pub fn single(wants: Wants, n: usize, thunk: Thunk<'_>) -> Result<Calibration, StatsError> {
    match n {
        0 => Err(StatsError::NoSamples),
        1 => run::<()>(
            Collector::new(wants),
            Inputs::Forward(thunk),
            &CalibrationArgs::default(),
        ),
        found => Err(StatsError::SingleSample { found }),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::{Method, Statistic};
    use super::*;

    fn wants() -> Wants {
        Wants::from([("a|x".to_string(), [Statistic::AmaxTensor].into())])
    }

    fn shows(value: f32) -> Thunk<'static> {
        Box::new(move |c| Ok(c.observe("a|x", &[value], &[1], "f32")?))
    }

    fn done<O>(inputs: Inputs<'_, O>, args: &CalibrationArgs) -> Result<Calibration, StatsError> {
        run(Collector::new(wants()), inputs, args)
    }

    #[test]
    fn b_050_arguments_have_their_defaults() {
        let args = CalibrationArgs::default();
        assert_eq!(
            (args.percentile, args.max_samples, args.verbose),
            (99.9, None, false)
        );
        // No other entry: this names them all.
        let CalibrationArgs {
            percentile: _,
            max_samples: _,
            verbose: _,
        } = args;
    }

    #[test]
    fn b_051_three_inputs_and_their_samples() {
        let args = CalibrationArgs::default();
        let one = done::<()>(Inputs::Forward(shows(2.0)), &args).unwrap();
        assert_eq!((one.note.source.as_str(), one.note.samples), ("forward", 1));
        assert_eq!(one.note.method, Method::SingleFrame);

        let many = done::<()>(Inputs::Thunks(vec![shows(1.0), shows(3.0)]), &args).unwrap();
        assert_eq!(
            (many.note.source.as_str(), many.note.samples),
            ("thunks", 2)
        );

        let called = Cell::new(0);
        let call: Call<'_, f32> = Box::new(|value, c| {
            called.set(called.get() + 1);
            Ok(c.observe("a|x", &[*value], &[1], "f32")?)
        });
        let observations = vec![1.0, 5.0, 2.0];
        let each = done(Inputs::Samples { call, observations }, &args).unwrap();
        assert_eq!(
            (each.note.source.as_str(), each.note.samples),
            ("samples", 3)
        );
        assert_eq!(called.get(), 3, "one call an observation");
        assert!(each.amax["a|x"] > 4.9);
    }

    #[test]
    fn b_051_nothing_to_call_is_refused() {
        let args = CalibrationArgs::default();
        let none = done::<()>(Inputs::Thunks(vec![]), &args);
        assert_eq!(none.unwrap_err().code(), "no_samples");
        let call: Call<'_, u8> = Box::new(|_, _| panic!("never called"));
        let observations = vec![];
        let none = done(Inputs::Samples { call, observations }, &args);
        assert_eq!(none.unwrap_err().code(), "no_samples");
        let wrong = CalibrationArgs {
            percentile: 101.0,
            ..args
        };
        let never: Thunk<'_> = Box::new(|_| panic!("never called"));
        let refused = done::<()>(Inputs::Forward(never), &wrong).unwrap_err();
        assert_eq!(refused.code(), "percentile_range");
    }

    #[test]
    fn b_052_max_samples_keeps_the_front() {
        let args = |max| CalibrationArgs {
            percentile: 100.0,
            max_samples: Some(max),
            verbose: true,
        };
        let thunks = || Inputs::Thunks(vec![shows(1.0), shows(3.0), shows(9.0)]);
        assert_eq!(done::<()>(thunks(), &args(2)).unwrap().amax["a|x"], 3.0);
        assert_eq!(done::<()>(thunks(), &args(7)).unwrap().amax["a|x"], 9.0);
        assert_eq!(
            done::<()>(thunks(), &args(0)).unwrap_err().code(),
            "no_samples"
        );
    }

    #[test]
    fn b_067_a_sample_that_fails_ends_everything() {
        let after = Cell::new(false);
        let thunks: Vec<Thunk<'_>> = vec![
            shows(1.0),
            Box::new(|c| {
                c.observe("a|x", &[100.0], &[1], "f32")?;
                Err("the simulator is gone".into())
            }),
            Box::new(|_| {
                after.set(true);
                Ok(())
            }),
        ];
        let error = done::<()>(Inputs::Thunks(thunks), &CalibrationArgs::default()).unwrap_err();
        assert_eq!(error.code(), "hook_pass_failed");
        let text = error.to_string();
        assert!(
            text.contains("sample 1") && text.contains("simulator is gone"),
            "{text}"
        );
        assert!(!after.get());
    }

    #[test]
    fn b_068_only_scalars_outlive_a_call() {
        // The tensor dies inside the call; what is left is as many numbers as points, whatever its size.
        let thunk: Thunk<'_> = Box::new(|c| {
            let activation: Vec<f32> = (0..4096).map(|i| i as f32).collect();
            Ok(c.observe("a|x", &activation, &[64, 64], "f32")?)
        });
        let found = done::<()>(Inputs::Forward(thunk), &CalibrationArgs::default()).unwrap();
        assert_eq!(found.amax["a|x"], 4095.0);
        assert!(found.contents.is_empty());
        let text = serde_json::to_string(&found.observations).unwrap();
        assert!(text.len() < 100, "{text}");
    }

    #[test]
    fn b_072_one_sample_runs_once_and_more_are_sent_elsewhere() {
        let runs = Cell::new(0);
        let thunk = || -> Thunk<'_> {
            Box::new(|c| {
                runs.set(runs.get() + 1);
                Ok(c.observe("a|x", &[2.0], &[1], "f32")?)
            })
        };
        let one = single(wants(), 1, thunk()).unwrap();
        assert_eq!((one.amax["a|x"], runs.get()), (2.0, 1));
        let many = single(wants(), 2, thunk()).unwrap_err();
        assert_eq!(many.code(), "samples_unsupported");
        assert!(many.to_string().contains("run"), "{many}");
        assert_eq!(
            single(wants(), 0, thunk()).unwrap_err().code(),
            "no_samples"
        );
        assert_eq!(runs.get(), 1, "nothing ran for a refusal");
    }
}
