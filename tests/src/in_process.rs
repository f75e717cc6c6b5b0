//! The library's doors called by a test itself: a host with chosen plugins, samples and options that judge nothing hard.

use std::path::Path;
use std::sync::OnceLock;

use structures::attach::Options;
use structures::gates::Schedule;
use structures::host::{Host, HostOptions, Loaded};
use structures::samples::{Sample, Samples};
use structures::workload::{Runner, Workload};
use structures_graph::session::Plan;
use structures_graph::GraphError;

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
