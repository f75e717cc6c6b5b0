//! Probing, binding and calling loaded plugins through the safe wrappers.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use structures_fixture_plugin::{fixture_copy, Fault};
use structures_loader::{
    row_capacity, BindSpec, BoundForm, HostTensor, HostTensorMut, Plugin, PluginError, Registry,
    ScanMode, StatusKind,
};
use structures_plugin_api::abi::DType;
use structures_plugin_api::describe::{BindParams, ProbeShapes};

use common::Place;

const K: usize = 48;
const N: usize = 40;

/// Loads fixtures without a child: these faults show only in calls.
fn load(place: &Place, faults: &[Fault]) -> Registry {
    for fault in faults {
        fixture_copy(&place.plugins, *fault, fault.name());
    }
    let mut options = place.options();
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).expect("scan");
    assert_eq!(
        registry.loaded().len(),
        faults.len(),
        "{:?}",
        registry.plugins
    );
    registry
}

fn loaded(place: &Place, fault: Fault) -> Plugin {
    load(place, &[fault])
        .plugin(fault.name())
        .expect("loaded")
        .clone()
}

fn params(structure: &str, inputs: &[&str], outputs: &[&str]) -> BindParams {
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_string()).collect();
    BindParams {
        structure: structure.into(),
        version: 1,
        variant: [("epilogue", "none"), ("activation", "silu")]
            .map(|(a, v)| (a.to_string(), v.to_string()))
            .into(),
        dims: BTreeMap::from([("K".into(), K as u64), ("N".into(), N as u64)]),
        inputs: text(inputs),
        outputs: text(outputs),
        ..BindParams::default()
    }
}

fn ramp(n: usize, step: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * step % 101) as f32 - 50.0) / 50.0)
        .collect()
}

/// Binds `linear_proj` with the weight `w`, stored `[N, K]` as a checkpoint does.
fn bind_linear(plugin: &Plugin, form: &str, w: &[f32]) -> Result<BoundForm, PluginError> {
    let weight = HostTensor::strided(w, &[K, N], &[1, K]).expect("fits");
    plugin.bind(&BindSpec {
        form,
        device: 0,
        span: "proj",
        weights: &[("w", weight), ("b", HostTensor::ABSENT)],
        statistics: &[],
        params: &params("linear_proj", &["x", "residual"], &["y"]),
        contract: row_capacity(DType::F32, 8),
    })
}

fn call_linear(form: &BoundForm, x: &[f32], y: &mut [f32]) -> Result<(), PluginError> {
    let rows = x.len() / K;
    let inputs = [
        HostTensor::new(x, &[rows, K]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs = [HostTensorMut::new(y, &[rows, N]).expect("fits")];
    form.call(&inputs, &mut outputs, &mut [])
}

fn expected_linear(w: &[f32], x: &[f32]) -> Vec<f32> {
    x.chunks_exact(K)
        .flat_map(|x| {
            w.chunks_exact(K)
                .map(move |w| x.iter().zip(w).map(|(x, w)| x * w).sum())
        })
        .collect()
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn a_bound_form_computes_and_reports_what_it_added() {
    let place = Place::new();
    let plugin = loaded(&place, Fault::None);
    let (w, x) = (ramp(K * N, 7), ramp(3 * K, 13));
    let exact = expected_linear(&w, &x);
    for (form, tolerance, bytes) in [("plain", 1e-4, 4 * K * N), ("int8", 0.2, K * N + 4 * N)] {
        let bound = bind_linear(&plugin, form, &w).expect("binds");
        let mut y = vec![f32::NAN; 3 * N];
        call_linear(&bound, &x, &mut y).expect("runs");
        assert!(
            worst(&y, &exact) < tolerance,
            "{form}: {}",
            worst(&y, &exact)
        );
        assert_eq!(bound.facts().packed_bytes, bytes as u64);
        assert_eq!(
            (bound.form(), bound.plugin_id(), bound.poisoned()),
            (form, "none", false)
        );
    }
}

#[test]
fn all_structures_of_the_fixture_run() {
    let place = Place::new();
    let plugin = loaded(&place, Fault::None);
    let (gate, up, down, norm) = (ramp(K * N, 3), ramp(K * N, 5), ramp(N * K, 11), ramp(K, 17));
    let matrix = |w, dims: &[usize]| HostTensor::new(w, dims).expect("fits");
    let weights = [
        ("w_norm", matrix(&norm, &[K])),
        ("w_gate", matrix(&gate, &[K, N])),
        ("w_up", matrix(&up, &[K, N])),
        ("w_down", matrix(&down, &[N, K])),
    ];
    let x = ramp(2 * K, 13);
    let mut params = params(
        "decoder_ffn",
        &["x", "cond_scale", "cond_shift", "cond_gate"],
        &["out"],
    );
    params.params.insert("eps".into(), 1e-6.into());
    let bound = plugin
        .bind(&BindSpec {
            form: "plain",
            device: 0,
            span: "block",
            weights: &weights,
            statistics: &[],
            params: &params,
            contract: row_capacity(DType::F32, 2),
        })
        .expect("binds");
    let mut out = vec![f32::NAN; 2 * K];
    let absent = HostTensor::ABSENT;
    bound
        .call(
            &[matrix(&x, &[2, K]), absent, absent, absent],
            &mut [HostTensorMut::new(&mut out, &[2, K]).expect("fits")],
            &mut [],
        )
        .expect("runs");
    assert!(worst(&out, &ffn(&x, &norm, &gate, &up, &down)) < 1e-4);

    // The outputs of a pack are views of one buffer, side by side.
    let params = self::params("qkv_pack", &["x"], &["y_0", "y_1"]);
    let weights = [
        ("w_0", matrix(&gate, &[K, N])),
        ("w_1", matrix(&up[..K * 8], &[K, 8])),
    ];
    let bound = plugin
        .bind(&BindSpec {
            form: "plain",
            device: 0,
            span: "pack",
            weights: &weights,
            statistics: &[],
            params: &params,
            contract: row_capacity(DType::F32, 2),
        })
        .expect("binds");
    let (mut y0, mut y1) = (vec![f32::NAN; N], vec![f32::NAN; 8]);
    let mut outputs = [
        HostTensorMut::new(&mut y0, &[1, N]).expect("fits"),
        HostTensorMut::new(&mut y1, &[1, 8]).expect("fits"),
    ];
    bound
        .call(&[matrix(&x[..K], &[1, K])], &mut outputs, &mut [])
        .expect("runs");
    for (y, w, n) in [(&y0, &gate, N), (&y1, &up, 8)] {
        let exact: Vec<f32> = (0..n)
            .map(|c| (0..K).map(|k| x[k] * w[k * n + c]).sum())
            .collect();
        assert!(worst(y, &exact) < 1e-4);
    }
}

#[test]
fn a_structure_that_is_only_data_has_a_form() {
    let place = Place::new();
    let plugin = loaded(&place, Fault::None);
    let (w, x) = (ramp(K, 7), ramp(K, 13));
    let mut params = params("plain_norm", &["x"], &["y"]);
    params.params.insert("eps".into(), 1e-6.into());
    let bound = plugin
        .bind(&BindSpec {
            form: "plain",
            device: 0,
            span: "norm",
            weights: &[("w", HostTensor::new(&w, &[K]).expect("fits"))],
            statistics: &[],
            params: &params,
            contract: row_capacity(DType::F32, 1),
        })
        .expect("binds");
    let mut y = vec![f32::NAN; K];
    let inputs = [HostTensor::new(&x, &[1, K]).expect("fits")];
    let mut outputs = [HostTensorMut::new(&mut y, &[1, K]).expect("fits")];
    bound.call(&inputs, &mut outputs, &mut []).expect("runs");
    let mean = x.iter().map(|v| v * v).sum::<f32>() / K as f32;
    let exact: Vec<f32> = x
        .iter()
        .zip(&w)
        .map(|(x, w)| x / (mean + 1e-6).sqrt() * w)
        .collect();
    assert!(worst(&y, &exact) < 1e-5);
}

fn ffn(x: &[f32], norm: &[f32], gate: &[f32], up: &[f32], down: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks_exact(K) {
        let mean = x.iter().map(|v| v * v).sum::<f32>() / K as f32;
        let h: Vec<f32> = x
            .iter()
            .zip(norm)
            .map(|(x, w)| x / (mean + 1e-6).sqrt() * w)
            .collect();
        let dot = |w: &[f32], c: usize| (0..K).map(|k| h[k] * w[k * N + c]).sum::<f32>();
        let a: Vec<f32> = (0..N)
            .map(|c| dot(gate, c) / (1.0 + (-dot(gate, c)).exp()) * dot(up, c))
            .collect();
        out.extend((0..K).map(|c| x[c] + (0..N).map(|f| a[f] * down[f * K + c]).sum::<f32>()));
    }
    out
}

#[test]
fn wrong_results_stay_wrong_results() {
    let place = Place::new();
    let registry = load(
        &place,
        &[
            Fault::Scaled,
            Fault::Half,
            Fault::NonFinite,
            Fault::Swapped,
            Fault::Slow,
        ],
    );
    let (w, other, x) = (ramp(K * N, 7), ramp(K * N, 19), ramp(2 * K, 13));
    let exact = expected_linear(&w, &x);
    let run = |plugin: &str, w: &[f32]| {
        let bound =
            bind_linear(registry.plugin(plugin).expect("loaded"), "plain", w).expect("binds");
        let mut y = vec![f32::NAN; 2 * N];
        call_linear(&bound, &x, &mut y).expect("runs");
        y
    };
    let scaled: Vec<f32> = exact.iter().map(|v| v * 1.01).collect();
    assert!(worst(&run("scaled", &w), &scaled) < 1e-4);
    let half = run("half", &w);
    assert!(half[..N].iter().all(|v| v.is_finite()) && half[N..].iter().all(|v| v.is_nan()));
    assert!(run("non_finite", &w)[0].is_nan());
    assert!(worst(&run("slow", &w), &exact) < 1e-4);
    assert!(
        worst(&run("swapped", &other), &expected_linear(&other, &x)) < 1e-4,
        "the first is right"
    );
    let swapped = run("swapped", &w);
    assert!(
        worst(&swapped, &expected_linear(&other, &x)) < 1e-4,
        "the second has the first one's"
    );
}

#[test]
fn an_error_or_a_panic_poisons_the_instance_and_nothing_else() {
    let place = Place::new();
    let registry = load(
        &place,
        &[
            Fault::ErrorThirdCall,
            Fault::PanicThirdCall,
            Fault::PanicInCall,
        ],
    );
    let (w, x) = (ramp(K * N, 7), ramp(K, 13));
    for (plugin, good_calls, kind, code) in [
        ("error_third_call", 2, StatusKind::Failed, "planted_error"),
        ("panic_third_call", 2, StatusKind::Panicked, "panicked"),
        ("panic_in_call", 0, StatusKind::Panicked, "panicked"),
    ] {
        let loaded = registry.plugin(plugin).expect("loaded");
        let bound = bind_linear(loaded, "plain", &w).expect("binds");
        let mut y = vec![0.0; N];
        for _ in 0..good_calls {
            call_linear(&bound, &x, &mut y).expect("runs");
        }
        let error = call_linear(&bound, &x, &mut y).expect_err("planted");
        assert_eq!((error.kind, error.code.as_str()), (kind, code), "{error}");
        assert!(error.message.contains("planted"), "{error}");
        assert_eq!(
            (error.plugin.as_str(), error.form.as_str()),
            (plugin, "plain")
        );
        assert!(bound.poisoned());
        let error = call_linear(&bound, &x, &mut y).expect_err("poisoned");
        assert_eq!(
            (error.kind, error.code.as_str()),
            (StatusKind::Poisoned, "poisoned")
        );
        drop(bound);
        assert!(
            bind_linear(loaded, "plain", &w).is_ok(),
            "the plugin goes on"
        );
    }
}

#[test]
fn refusals_of_probe_and_bind_are_values() {
    let place = Place::new();
    let registry = load(&place, &[Fault::None, Fault::ProbeRefuses]);
    let (good, refusing) = (
        registry.plugin("none").expect("loaded"),
        registry.plugin("probe_refuses").expect("loaded"),
    );
    let shapes = ProbeShapes {
        structure: "linear_proj".into(),
        span: "proj".into(),
        rows: vec![1],
        dims: BTreeMap::from([("K".into(), 64), ("N".into(), 64)]),
        variant: BTreeMap::from([("epilogue".into(), "none".into())]),
    };
    assert!(good.probe("plain", 0, &shapes).expect("answers").probed);
    let report = refusing.probe("plain", 0, &shapes).expect("answers");
    assert_eq!(
        (report.probed, report.code.as_deref()),
        (false, Some("entry_missing"))
    );
    let code = |r: Result<_, PluginError>| r.map(|_| ()).expect_err("refused").code;
    assert_eq!(
        code(good.probe("no_such_form", 0, &shapes).map(drop)),
        "form_unknown"
    );
    assert_eq!(
        code(good.probe("plain", 1, &shapes).map(drop)),
        "device_unknown"
    );
    let other_span = ProbeShapes {
        span: "elsewhere".into(),
        ..shapes
    };
    assert_eq!(
        code(good.probe("plain", 0, &other_span).map(drop)),
        "span_unknown"
    );

    let error = bind_linear(good, "no_such_form", &ramp(K * N, 7)).expect_err("refused");
    assert_eq!(error.code, "form_unknown");
    let spec = BindSpec {
        form: "plain",
        device: 0,
        span: "proj",
        weights: &[],
        statistics: &[],
        params: &params("linear_proj", &["x", "residual"], &["y"]),
        contract: row_capacity(DType::F32, 1),
    };
    let error = good.bind(&spec).expect_err("no weights");
    assert_eq!(
        (error.kind, error.code.as_str()),
        (StatusKind::Refused, "weight_missing")
    );
    let error = good.bind(&BindSpec {
        contract: row_capacity(DType::Bf16, 1),
        ..spec
    });
    assert_eq!(error.expect_err("dtype").code, "boundary_dtype");
}

#[test]
fn the_wrong_number_of_arguments_never_reaches_the_plugin() {
    let place = Place::new();
    let plugin = loaded(&place, Fault::None);
    let bound = bind_linear(&plugin, "plain", &ramp(K * N, 7)).expect("binds");
    let x = ramp(K, 13);
    let inputs = [HostTensor::new(&x, &[1, K]).expect("fits")];
    let error = bound.call(&inputs, &mut [], &mut []).expect_err("counts");
    assert_eq!(error.code, "arguments_count");
    assert!(!bound.poisoned());
}

#[test]
fn calls_from_many_threads_are_served_or_refused_and_never_raced() {
    let place = Place::new();
    let plugin = loaded(&place, Fault::None);
    let (w, x) = (ramp(K * N, 7), ramp(K, 13));
    let exact = expected_linear(&w, &x);
    let bound = bind_linear(&plugin, "plain", &w).expect("binds");
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let mut y = vec![f32::NAN; N];
                    // The door itself answers `overlapping_call` when two calls meet.
                    while let Err(error) = call_linear(&bound, &x, &mut y) {
                        assert_eq!(error.code, "rt_second_thread", "{error}");
                        std::thread::yield_now();
                    }
                    assert!(worst(&y, &exact) < 1e-4);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 800);
    assert!(!bound.poisoned());
}

#[test]
fn a_bound_form_keeps_its_plugin() {
    let place = Place::new();
    let registry = load(&place, &[Fault::None]);
    let bound = bind_linear(
        registry.plugin("none").expect("loaded"),
        "plain",
        &ramp(K * N, 7),
    )
    .expect("binds");
    drop(registry);
    let mut y = vec![0.0; N];
    call_linear(&bound, &ramp(K, 13), &mut y).expect("runs");
}

#[test]
fn a_second_scan_loads_the_same_library_again() {
    let place = Place::new();
    let first = load(&place, &[Fault::None]);
    let mut options = place.options();
    options.mode = ScanMode::InProcess;
    let second = Registry::scan(&options).expect("scan");
    let (w, x) = (ramp(K * N, 7), ramp(K, 13));
    for registry in [&first, &second] {
        let bound =
            bind_linear(registry.plugin("none").expect("loaded"), "plain", &w).expect("binds");
        let mut y = vec![0.0; N];
        call_linear(&bound, &x, &mut y).expect("runs");
    }
}
