//! The library's doors called by a test itself: a host with chosen plugins, samples and options that judge nothing hard.

use std::path::Path;
use std::sync::OnceLock;

use candle_core::{Device, Tensor};
use structures::attach::Options;
use structures::gates::Schedule;
use structures::host::{Host, HostOptions, Loaded};
use structures::samples::{Sample, Samples};
use structures::seat::{CallFailure, Executable};
use structures::workload::{Runner, Workload};
use structures_graph::session::{Frozen, Plan, SpanOutcome, View, ViewMut};
use structures_graph::{Dim, GraphError, ValueId};

use crate::{build_dir, demo};

/// Nothing of the machine's own is searched or cached in; every test of a process shares this.
pub fn isolate() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        std::env::set_var("STRUCTURES_SCANNER", build_dir().join("structures"));
        std::env::set_var("STRUCTURES_CACHE_DIR", build_dir().join("test-cache"));
        std::env::set_var("STRUCTURES_PLUGIN_PATH", "");
    });
}

/// A host with the plugins of one directory.
pub fn host(dir: &Path) -> Host {
    isolate();
    Host::open(&HostOptions {
        plugins: vec![dir.to_path_buf()],
        ..HostOptions::default()
    })
    .unwrap()
}

/// The demo model.
pub fn model() -> Loaded {
    Loaded::open(&demo()).unwrap()
}

/// `n` samples of `len` tokens, each another one.
pub fn made_samples(n: u32, len: u32) -> Samples {
    let sample = |i: u32| Sample {
        tokens: (0..len).map(|t| (t * 37 + i * 11) % 250 + 1).collect(),
        origin: format!("made#{i}"),
    };
    Samples::new("made", (0..n).map(sample).collect()).unwrap()
}

/// Whole prompts, timed once, any speed accepted.
pub fn any_speed(scheme: &str) -> Options {
    Options {
        scheme: scheme.into(),
        workload: Some(Workload::Prefill),
        min_speedup: 0.0,
        schedule: Schedule::new(1, 1).unwrap(),
        ..Options::default()
    }
}

/// Scores of one short prompt.
pub fn try_logits(model: &Loaded, plan: &Plan) -> Result<Vec<f32>, GraphError> {
    let runner = Runner::new(model.session(), 8);
    let out = runner.step(plan, &[5, 9, 2, 7], 0, &mut runner.state(), None)?;
    Ok(out.flatten_all().unwrap().to_vec1::<f32>().unwrap())
}

/// Their bits.
pub fn logits(model: &Loaded, plan: &Plan) -> Vec<u32> {
    let values = try_logits(model, plan).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Calls every install of a plan at so many rows, eagerly and as a captured step would, on the same made values: the same
/// bits. `measured` is handed the replay itself; how many installs there were.
pub fn replay_installs(
    model: &Loaded,
    plan: &Plan,
    rows: usize,
    measured: &dyn Fn(&mut dyn FnMut()),
) -> usize {
    let graph = model.session().graph();
    let dims = |v: &ValueId| -> Vec<usize> {
        let size = |d: &Dim| match d {
            Dim::Size(n) => *n,
            Dim::Symbol(s) if s == "B" => 1,
            Dim::Symbol(_) => rows,
        };
        graph.value(*v).dims.iter().map(size).collect()
    };
    for install in plan.installs() {
        let name = &install.name;
        let inputs: Vec<Option<Tensor>> = install
            .inputs
            .iter()
            .map(|v| {
                let v = v.as_ref()?;
                let dims = dims(v);
                let n: usize = dims.iter().product();
                let made = (0..n).map(|i| ((i * 37 + v.0) % 101) as f32 / 50.0 - 1.0);
                Some(Tensor::from_vec(made.collect(), dims, &Device::Cpu).unwrap())
            })
            .collect();
        let SpanOutcome::Done(want) = install.runner.run(&inputs).unwrap() else {
            panic!("{name}: the host ran");
        };
        let sizes: Vec<Option<&[usize]>> = inputs
            .iter()
            .map(|t| t.as_ref().map(Tensor::dims))
            .collect();
        let frozen = install.runner.freeze(&sizes).unwrap();
        assert_eq!(frozen, Frozen::Served { allocates: false }, "{name}");
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let data: Vec<Option<Vec<f32>>> = inputs.iter().map(|t| t.as_ref().map(flat)).collect();
        let views: Vec<Option<View<'_>>> = data
            .iter()
            .zip(&sizes)
            .map(|(data, dims)| data.as_deref().zip(*dims))
            .collect();
        let made: Vec<Vec<usize>> = install.outputs.iter().map(dims).collect();
        let mut out: Vec<Vec<f32>> = made
            .iter()
            .map(|d| vec![f32::NAN; d.iter().product()])
            .collect();
        let mut outputs: Vec<ViewMut<'_>> = out
            .iter_mut()
            .zip(&made)
            .map(|(data, dims)| (data.as_mut_slice(), dims.as_slice()))
            .collect();
        measured(&mut || install.runner.replay(&views, &mut outputs).unwrap());
        for (got, want) in out.iter().zip(&want) {
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(got), bits(&flat(want)), "{name}");
        }
    }
    plan.installs().len()
}

/// Resident memory of this process in bytes.
pub fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// A form that does nothing.
pub struct Idle;

impl Executable for Idle {
    fn call(
        &self,
        _: &[Option<(&[f32], &[usize])>],
        _: &mut [(Vec<f32>, Vec<usize>)],
    ) -> Result<(), CallFailure> {
        Ok(())
    }

    fn call_into(
        &self,
        _: &[Option<(&[f32], &[usize])>],
        _: &mut [(&mut [f32], &[usize])],
    ) -> Result<(), CallFailure> {
        Ok(())
    }
}
