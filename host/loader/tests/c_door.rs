//! Plugins of the C door at run time: statuses, threads, and who frees what.

mod common;

use std::collections::BTreeMap;
use std::sync::Barrier;

use structures_fixture_plugin::c_fixture;
use structures_loader::{
    row_capacity, BindSpec, BoundForm, HostTensor, HostTensorMut, Plugin, PluginError, Registry,
    ScanMode, StatusKind,
};
use structures_plugin_api::abi::DType;
use structures_plugin_api::describe::{BindParams, ProbeShapes};

use common::Place;

const K: usize = 20;
const N: usize = 33;

fn load(place: &Place, id: &str, flags: &[&str]) -> Plugin {
    c_fixture(&place.plugins, id, flags);
    let mut options = place.options();
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).expect("scan");
    let found = registry.plugin(id).cloned();
    found.unwrap_or_else(|| panic!("{:?}", registry.plugins))
}

fn bind(plugin: &Plugin, span: &str) -> Result<BoundForm, PluginError> {
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_string()).collect();
    let params = BindParams {
        structure: "linear_proj".into(),
        version: 1,
        variant: BTreeMap::from([("epilogue".into(), "none".into())]),
        inputs: text(&["x", "residual"]),
        outputs: text(&["y"]),
        ..BindParams::default()
    };
    let w = vec![1.0_f32; K * N];
    plugin.bind(&BindSpec {
        form: "f32",
        device: 0,
        span,
        weights: &[("w", HostTensor::new(&w, &[K, N]).expect("fits"))],
        statistics: &[],
        params: &params,
        contract: row_capacity(DType::F32, 4),
    })
}

fn call(form: &BoundForm) -> Result<Vec<f32>, PluginError> {
    let (x, mut y) = (vec![1.0_f32; K], vec![f32::NAN; N]);
    let inputs = [
        HostTensor::new(&x, &[1, K]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs = [HostTensorMut::new(&mut y, &[1, N]).expect("fits")];
    form.call(&inputs, &mut outputs, &mut [])?;
    Ok(y)
}

#[test]
fn every_status_poisons_and_has_a_code() {
    let place = Place::new();
    for (id, flag, kind, code) in [
        (
            "invalid",
            "FAIL_STATUS=1",
            StatusKind::Invalid,
            "planted_error",
        ),
        (
            "refused",
            "FAIL_STATUS=2",
            StatusKind::Refused,
            "planted_error",
        ),
        (
            "failed",
            "FAIL_STATUS=3",
            StatusKind::Failed,
            "planted_error",
        ),
        (
            "panicked",
            "FAIL_STATUS=4",
            StatusKind::Panicked,
            "planted_error",
        ),
        (
            "unheard",
            "FAIL_STATUS=-77",
            StatusKind::Unknown(-77),
            "planted_error",
        ),
        ("wordless", "NO_ERROR_TEXT", StatusKind::Failed, "failed"),
    ] {
        let plugin = load(&place, id, &[flag]);
        let form = bind(&plugin, "proj").expect("binds");
        let error = call(&form).expect_err("planted");
        assert_eq!((error.kind, error.code.as_str()), (kind, code), "{error}");
        assert!(form.poisoned());
        let error = call(&form).expect_err("poisoned");
        assert_eq!(error.kind, StatusKind::Poisoned);
        drop(form);
        assert!(bind(&plugin, "proj").is_ok(), "the plugin goes on");
    }
}

#[test]
fn a_form_that_declares_concurrent_is_called_from_two_threads_at_once() {
    let place = Place::new();
    let form = bind(&load(&place, "meet", &["MEET"]), "proj").expect("binds");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            // A lone call fails: both must be inside.
            scope.spawn(|| assert_eq!(call(&form).expect("meets another"), [K as f32; N]));
        }
    });
}

#[test]
fn a_second_call_of_a_form_that_does_not_is_refused_and_not_raced() {
    let place = Place::new();
    let form = bind(&load(&place, "alone", &["ALONE"]), "proj").expect("binds");
    let together = Barrier::new(4);
    let results: Vec<_> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    together.wait();
                    call(&form)
                })
            })
            .collect();
        calls
            .into_iter()
            .map(|c| c.join().expect("joins"))
            .collect()
    });
    let served = results.iter().filter(|r| r.is_ok()).count();
    assert!(served >= 1, "{results:?}");
    for error in results.iter().filter_map(|r| r.as_ref().err()) {
        assert_eq!(error.kind, StatusKind::Refused);
        assert_eq!(error.code, "rt_second_thread", "{error}");
    }
    assert!(served < 4, "calls of 20 ms that start together do meet");
    assert!(!form.poisoned());
    call(&form).expect("alone again");
}

#[test]
fn what_a_plugin_allocates_it_frees_itself() {
    let place = Place::new();
    let counts = place.root.join("counts");
    std::env::set_var("STRUCTURES_FIXTURE_COUNTS", &counts);
    let plugin = load(&place, "counted", &["COUNTED", "FAIL_STATUS=3"]);
    let shapes = |span: &str| ProbeShapes {
        structure: "linear_proj".into(),
        span: span.into(),
        ..ProbeShapes::default()
    };
    for _ in 0..3 {
        assert!(
            plugin
                .probe("f32", 0, &shapes("proj"))
                .expect("answers")
                .probed
        );
        assert!(
            !plugin
                .probe("f32", 0, &shapes("elsewhere"))
                .expect("answers")
                .probed
        );
        assert_eq!(
            bind(&plugin, "elsewhere").expect_err("refused").code,
            "span_unknown"
        );
        let form = bind(&plugin, "proj").expect("binds");
        assert_eq!(call(&form).expect_err("planted").code, "planted_error");
    }
    drop(plugin);
    let text = std::fs::read_to_string(&counts).expect("written when the plugin is closed");
    let numbers: Vec<u64> = text
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [made, freed, foreign] = numbers[..] else {
        panic!("{text}");
    };
    // Two descriptions, the instance, and in each round two answers, two errors of two texts, a form
    // of two parts and a row.
    assert!(made > 20, "{text}");
    assert_eq!((made, foreign), (freed, 0), "{text}");
}
