//! The capture door: any plan of any session as a replayable stage, gated against its eager form.
//!
//! A capture must say what the eager form says and be faster than it, or it is refused and the host keeps its eager
//! form. Both are measured here, on a state that is as it was afterwards. Nothing is pinned for it and nothing lowered:
//! the graph has no shape-derived constants, so there is nothing to undo either.
//!
//! Owns the gates of a capture, its certificate and its export. Does not own the captured form itself
//! (`structures-graph`), nor the loop around a decode step ([`crate::decode`]).

use std::time::Instant;

use candle_core::Tensor;
use serde::Serialize;
use serde_json::{json, Value as Json};
use structures_graph::captured::{Declared, WindowKind};
use structures_graph::{Capture, GraphError, Plan, Session, State, StaticPlan};

use crate::crew::Shift;
use crate::error::Error;
use crate::gates::{cosine, worse, GateError};

/// Smallest cosine of every output with the eager one.
pub const DEFAULT_FLOOR: f64 = 0.999;
/// Eager time by replay time that a capture must reach.
pub const DEFAULT_MIN_SPEEDUP: f64 = 1.02;
/// Untimed and timed calls of each form.
const CALLS: (usize, usize) = (5, 20);

/// What is asked of a capture.
#[derive(Clone, Debug)]
pub struct CaptureOptions {
    /// Runs before anything counts; at least one.
    pub warm_up: usize,
    /// Kinds of windows by the name of an input or output, where it is not the usual one.
    pub windows: Vec<(String, WindowKind)>,
    /// Smallest cosine; 0 skips the comparison, and the certificate says so.
    pub floor: f64,
    /// Smallest speed-up; 0 skips the timing, and the certificate says so.
    pub min_speedup: f64,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        CaptureOptions {
            warm_up: 1,
            windows: Vec::new(),
            floor: DEFAULT_FLOOR,
            min_speedup: DEFAULT_MIN_SPEEDUP,
        }
    }
}

/// What a capture was worth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Certificate {
    /// Names of the windows.
    pub windows: Vec<String>,
    /// What it had to reach.
    pub floor: f64,
    /// Worst cosine of an output with the eager one; absent when it was skipped.
    pub parity: Option<f64>,
    /// Eager, milliseconds, median; absent when it was skipped.
    pub eager_ms: Option<f64>,
    /// Replayed, milliseconds, median.
    pub replay_ms: Option<f64>,
    /// Eager by replayed.
    pub speedup: Option<f64>,
    /// What it had to reach.
    pub min_speedup: f64,
    /// What was changed in the host for it: nothing, ever.
    pub lowerings: Vec<String>,
    /// How many replays make one pass; a step is one.
    pub schedule: usize,
    /// Stages that allocate at every replay.
    pub allocating: Vec<String>,
}

/// A replayable stage and the state it runs on.
pub struct Stage {
    step: StaticPlan,
    state: State,
    /// What it was worth.
    pub certificate: Certificate,
}

/// Captures a plan at these inputs on this state, which it keeps.
///
/// # Errors
/// `capture_*` and `window_*` codes where the plan has no captured form; `capture_parity`, `capture_no_win`.
pub fn capture(
    session: &Session,
    plan: &Plan,
    inputs: &[Tensor],
    mut state: State,
    options: &CaptureOptions,
) -> Result<Stage, Error> {
    if !options.floor.is_finite() || !options.min_speedup.is_finite() {
        let text = format!("floor {}, speed-up {}", options.floor, options.min_speedup);
        return Err(GateError::BadFloor { text }.into());
    }
    state.reserve()?;
    let graph = session.graph();
    let declared = options
        .windows
        .iter()
        .map(|(name, kind)| {
            let output = graph
                .outputs
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, v)| *v);
            let input = graph.inputs.iter().find(|v| graph.value(**v).name == *name);
            match input.copied().or(output) {
                Some(value) => Ok(Declared {
                    name: name.clone(),
                    value,
                    kind: *kind,
                }),
                None => Err(Error::invalid(
                    "window_unknown",
                    format!("window `{name}`: the graph has no input or output of this name"),
                )),
            }
        })
        .collect::<Result<Vec<_>, _>>()?;
    let request = Capture {
        inputs,
        state: &state,
        windows: &declared,
        greedy: None,
        last_row: None,
    };
    let mut step = session.capture(plan, &request)?;
    let shift = Shift::begin();
    step.warm_up(&mut state, &shift, options.warm_up.max(1))?;
    drop(shift);
    let manifest = step.manifest();
    let mut certificate = Certificate {
        windows: manifest.windows.iter().map(|w| w.name.clone()).collect(),
        floor: options.floor,
        parity: None,
        eager_ms: None,
        replay_ms: None,
        speedup: None,
        min_speedup: options.min_speedup,
        lowerings: Vec::new(),
        schedule: 1,
        allocating: manifest.allocating,
    };
    let names: Vec<&str> = graph.outputs.iter().map(|(n, _)| n.as_str()).collect();
    if options.floor > 0.0 {
        let worst = parity(session, plan, inputs, &mut step, &mut state, &names)?;
        certificate.parity = Some(worst);
        if worst.is_nan() || worst < options.floor {
            return Err(Error::refused(
                "capture_parity",
                format!(
                    "the captured form has cosine {worst:.6} with the eager one, {} is the floor; something the stage \
                     reads is no declared input and changed",
                    options.floor
                ),
            ));
        }
    }
    if options.min_speedup > 0.0 {
        let (eager, replay) = times(session, plan, inputs, &mut step, &mut state)?;
        let speedup = eager / replay;
        certificate.eager_ms = Some(eager);
        certificate.replay_ms = Some(replay);
        certificate.speedup = Some(speedup);
        if speedup.is_nan() || speedup < options.min_speedup {
            return Err(Error::refused(
                "capture_no_win",
                format!(
                    "replayed {replay:.3} ms, eager {eager:.3} ms: {speedup:.3} times as fast, {} is needed; the host \
                     keeps its eager form",
                    options.min_speedup
                ),
            ));
        }
    }
    Ok(Stage {
        step,
        state,
        certificate,
    })
}

impl Stage {
    /// Rewrites a window.
    ///
    /// # Errors
    /// `window_unknown`; `window_form` with what is expected and what was given.
    pub fn write(&mut self, name: &str, tensor: &Tensor) -> Result<(), Error> {
        Ok(self.step.write(name, tensor)?)
    }

    /// A copy of what a window holds.
    ///
    /// # Errors
    /// `window_unknown`.
    pub fn read(&self, name: &str) -> Result<Tensor, Error> {
        Ok(self.step.read(name)?)
    }

    /// Runs once.
    ///
    /// # Errors
    /// `capture_guard` names the seat whose guard fired; the state is as it was then.
    pub fn replay(&mut self) -> Result<(), Error> {
        let shift = Shift::begin();
        Ok(self.step.replay(&mut self.state, &shift)?)
    }

    /// The state it runs on.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Back to an earlier length of the state.
    ///
    /// # Errors
    /// As [`State::truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<(), Error> {
        Ok(self.state.truncate(len)?)
    }
}

fn parity(
    session: &Session,
    plan: &Plan,
    inputs: &[Tensor],
    step: &mut StaticPlan,
    state: &mut State,
    outputs: &[&str],
) -> Result<f64, Error> {
    let mut other = state.clone_deep()?;
    let want = session.run(plan, inputs, &mut other, None)?;
    let mark = step.mark(state);
    let shift = Shift::begin();
    step.replay(state, &shift)?;
    drop(shift);
    let mut worst = 1f64;
    for (name, want) in outputs.iter().zip(&want) {
        let got = flat(&step.read(name)?)?;
        worst = worse(worst, cosine(&got, &flat(want)?));
    }
    step.restore(state, mark)?;
    Ok(worst)
}

fn flat(t: &Tensor) -> Result<Vec<f32>, GraphError> {
    t.flatten_all()
        .and_then(|t| t.to_vec1::<f32>())
        .map_err(|source| GraphError::Kernel {
            op: "capture".into(),
            at: "output".into(),
            source: Box::new(source),
        })
}

/// Medians in milliseconds, alternating, each call from the same state.
fn times(
    session: &Session,
    plan: &Plan,
    inputs: &[Tensor],
    step: &mut StaticPlan,
    state: &mut State,
) -> Result<(f64, f64), Error> {
    let len = state.len();
    let mut times = (Vec::new(), Vec::new());
    for i in 0..CALLS.0 + CALLS.1 {
        let start = Instant::now();
        session.run(plan, inputs, state, None)?;
        let eager = start.elapsed();
        state.truncate(len)?;
        let start = Instant::now();
        let shift = Shift::begin();
        step.replay(state, &shift)?;
        drop(shift);
        let replay = start.elapsed();
        state.truncate(len)?;
        if i >= CALLS.0 {
            times.0.push(eager.as_secs_f64() * 1e3);
            times.1.push(replay.as_secs_f64() * 1e3);
        }
    }
    state.zero_rest()?;
    let middle = |v: &[f64]| crate::stats::median(v).unwrap_or(f64::NAN);
    Ok((middle(&times.0), middle(&times.1)))
}

/// A named way into or out of exported stages.
#[derive(Clone, Debug)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// The graph whose window it is.
    pub graph: String,
    /// The window; several ports may share one.
    pub window: String,
}

/// Stages as data, for whoever replays them elsewhere: windows as addresses and bytes, the order of the graphs, what
/// each is made of.
///
/// # Errors
/// `export_invalid` without any graph, for a port of an unknown graph or window, for an order that names an unknown graph.
pub fn export(graphs: &[(&str, &Stage)], order: &[&str], ports: &[Port]) -> Result<Json, Error> {
    let bad = |what: String| Err(Error::invalid("export_invalid", what));
    let known = || {
        graphs
            .iter()
            .map(|(n, _)| *n)
            .collect::<Vec<_>>()
            .join(", ")
    };
    if graphs.is_empty() {
        return bad("expected at least one graph, found none".into());
    }
    let find = |name: &str| graphs.iter().find(|(n, _)| *n == name).map(|(_, s)| *s);
    if let Some(unknown) = order.iter().find(|name| find(name).is_none()) {
        return bad(format!(
            "stage `{unknown}` is no exported graph; there are: {}",
            known()
        ));
    }
    for port in ports {
        let Some(stage) = find(&port.graph) else {
            return bad(format!(
                "port `{}` names graph `{}`; there are: {}",
                port.name,
                port.graph,
                known()
            ));
        };
        if !stage.certificate.windows.contains(&port.window) {
            return bad(format!(
                "port `{}` names window `{}` of `{}`; there are: {}",
                port.name,
                port.window,
                port.graph,
                stage.certificate.windows.join(", ")
            ));
        }
    }
    let graphs: Vec<Json> = graphs
        .iter()
        .map(|(name, stage)| {
            json!({"name": name, "certificate": stage.certificate, "manifest": stage.step.manifest()})
        })
        .collect();
    let ports: Vec<Json> = ports
        .iter()
        .map(|p| json!({"name": p.name, "graph": p.graph, "window": p.window}))
        .collect();
    Ok(json!({"schema": 1, "graphs": graphs, "stages": order, "ports": ports}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Loaded;
    use candle_core::Device;
    use std::path::Path;
    use std::sync::Arc;
    use structures_graph::session::{Frozen, Install, SpanOutcome, SpanRunner, View, ViewMut};

    fn demo() -> Loaded {
        Loaded::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model")).unwrap()
    }

    fn inputs(at: u32) -> [Tensor; 2] {
        let token = Tensor::new(&[[70 + at]], &Device::Cpu).unwrap();
        [token, Tensor::new(&[at], &Device::Cpu).unwrap()]
    }

    fn prefilled(model: &Loaded) -> State {
        let s = model.session();
        let mut state = s.new_state(1, 32);
        for at in 0..3 {
            s.run(&s.host_plan(), &inputs(at), &mut state, None)
                .unwrap();
        }
        state
    }

    fn lenient() -> CaptureOptions {
        CaptureOptions {
            min_speedup: 0.0,
            ..CaptureOptions::default()
        }
    }

    #[test]
    fn b_205_b_210_a_stage_replays_and_is_certified() {
        let model = demo();
        let s = model.session();
        let state = prefilled(&model);
        let want = {
            let mut state = state.clone_deep().unwrap();
            s.run(&s.host_plan(), &inputs(3), &mut state, None).unwrap()
        };
        let options = CaptureOptions {
            min_speedup: 1e-6,
            ..CaptureOptions::default()
        };
        let mut stage = capture(s, &s.host_plan(), &inputs(3), state, &options).unwrap();
        let c = stage.certificate.clone();
        assert_eq!(c.windows, ["tokens", "positions", "logits"]);
        assert!(c.parity.unwrap() > 0.999_999 && c.speedup.unwrap() > 0.0);
        assert!(c.eager_ms.is_some() && c.replay_ms.is_some() && c.lowerings.is_empty());
        assert_eq!(stage.state().len(), 3, "the gates left the state as it was");
        stage.replay().unwrap();
        let got = stage.read("logits").unwrap();
        assert!(cosine(&flat(&got).unwrap(), &flat(&want[0]).unwrap()) > 0.999_999);
        assert_eq!(stage.state().len(), 4);
        stage
            .write("tokens", &Tensor::new(&[[9u32]], &Device::Cpu).unwrap())
            .unwrap();
        let wrong = stage.write("tokens", &Tensor::new(&[9u32], &Device::Cpu).unwrap());
        assert_eq!(wrong.unwrap_err().code(), "window_form");
        assert_eq!(stage.read("nothing").unwrap_err().code(), "window_unknown");
    }

    /// Twice its input when it is replayed, once when it is not: it reads what is no input.
    struct Unsteady;

    impl SpanRunner for Unsteady {
        fn run(&self, inputs: &[Option<Tensor>]) -> Result<SpanOutcome, GraphError> {
            Ok(SpanOutcome::Done(vec![inputs[0].clone().unwrap()]))
        }
        fn freeze(&self, _: &[Option<&[usize]>]) -> Result<Frozen, GraphError> {
            Ok(Frozen::Served { allocates: false })
        }
        fn replay(
            &self,
            inputs: &[Option<View<'_>>],
            out: &mut [ViewMut<'_>],
        ) -> Result<(), GraphError> {
            let (x, _) = inputs[0].unwrap();
            for (i, (o, x)) in out[0].0.iter_mut().zip(x).enumerate() {
                *o = if i % 2 == 0 { *x } else { -x };
            }
            Ok(())
        }
    }

    #[test]
    fn a_bound_that_is_no_number_is_refused_before_anything_runs() {
        let model = demo();
        let s = model.session();
        for (floor, min_speedup) in [(f64::NAN, 0.0), (0.0, f64::NAN), (f64::INFINITY, 0.0)] {
            let options = CaptureOptions {
                floor,
                min_speedup,
                ..lenient()
            };
            let no = capture(s, &s.host_plan(), &inputs(3), prefilled(&model), &options);
            assert_eq!(no.map(|_| ()).unwrap_err().code(), "floor_invalid");
        }
    }

    #[test]
    fn b_208_what_differs_from_the_eager_form_is_refused() {
        let model = demo();
        let s = model.session();
        let g = s.graph();
        let norm = g
            .op_ids()
            .filter(|o| g.op(*o).kind == structures_graph::OpKind::RmsNorm)
            .last();
        let op = norm.unwrap();
        let install = Install {
            name: "norm".into(),
            ops: vec![op],
            inputs: vec![g.op(op).inputs[0]],
            outputs: g.op(op).outputs.clone(),
            runner: Arc::new(Unsteady),
        };
        let plan = s.plan(vec![install]).unwrap();
        let refused = capture(s, &plan, &inputs(3), prefilled(&model), &lenient()).map(|_| ());
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), "capture_parity");
        assert!(refused.to_string().contains("0.999"), "{refused}");
        assert!(
            refused.to_string().contains("no declared input"),
            "{refused}"
        );
        let blind = CaptureOptions {
            floor: 0.0,
            ..lenient()
        };
        let stage = capture(s, &plan, &inputs(3), prefilled(&model), &blind).unwrap();
        assert_eq!(
            (stage.certificate.parity, stage.certificate.floor),
            (None, 0.0)
        );
    }

    #[test]
    fn b_209_a_capture_that_wins_nothing_is_refused() {
        let model = demo();
        let s = model.session();
        let greedy = CaptureOptions {
            min_speedup: 1e6,
            ..CaptureOptions::default()
        };
        let refused =
            capture(s, &s.host_plan(), &inputs(3), prefilled(&model), &greedy).map(|_| ());
        assert_eq!(refused.unwrap_err().code(), "capture_no_win");
        let stage = capture(s, &s.host_plan(), &inputs(3), prefilled(&model), &lenient()).unwrap();
        assert_eq!(
            (stage.certificate.speedup, stage.certificate.min_speedup),
            (None, 0.0)
        );
    }

    #[test]
    fn b_212_an_export_names_only_what_there_is() {
        let model = demo();
        let s = model.session();
        let stage = capture(s, &s.host_plan(), &inputs(3), prefilled(&model), &lenient()).unwrap();
        let port = |graph: &str, window: &str| Port {
            name: format!("{graph}.{window}"),
            graph: graph.into(),
            window: window.into(),
        };
        let graphs = [("step", &stage)];
        let code = |e: Result<Json, Error>| e.unwrap_err().code();
        assert_eq!(code(export(&[], &[], &[])), "export_invalid");
        assert_eq!(code(export(&graphs, &["other"], &[])), "export_invalid");
        assert_eq!(
            code(export(&graphs, &["step"], &[port("step", "x")])),
            "export_invalid"
        );
        assert_eq!(
            code(export(&graphs, &["step"], &[port("other", "tokens")])),
            "export_invalid"
        );
        let shared = [port("step", "tokens"), port("step", "tokens")];
        let data = export(&graphs, &["step", "step"], &shared).unwrap();
        let window = &data["graphs"][0]["manifest"]["windows"][2];
        assert_eq!(window["name"], "logits");
        assert!(window["address"].is_u64() && window["bytes"].is_u64());
        assert_eq!(data["ports"].as_array().unwrap().len(), 2);
    }
}
