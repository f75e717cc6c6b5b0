//! The C sample through the loader: what it computes, at any strides, and what it refuses.

use std::collections::BTreeMap;

use structures_loader::{
    row_capacity, BindSpec, BoundForm, Environment, HostTensor, HostTensorMut, Plugin, PluginError,
    Registry, ScanMode, ScanOptions,
};
use structures_plugin_api::abi::DType;
use structures_plugin_api::describe::{BindParams, ProbeShapes};
use structures_plugin_api::formats::{amax, f32_to_bf16, int8_scale, quantise_int8};

/// Not multiples of anything, more than one piece of channels.
const K: usize = 37;
const N: usize = 70;
const ROWS: usize = 5;

fn load() -> (Plugin, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = dir.path().canonicalize().expect("canonical");
    let plugins = root.join("plugins");
    std::fs::create_dir(&plugins).expect("create");
    std::fs::copy(structures_plugin_c_sample::library(), plugins.join("c.so")).expect("copies");
    let mut options = ScanOptions::new(vec![plugins]);
    options.environment = Environment {
        cache_dir: Some(root.join("cache")),
        ..Environment::default()
    };
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).expect("scan");
    let plugin = registry.plugin("c_sample").cloned();
    (
        plugin.unwrap_or_else(|| panic!("{:?}", registry.plugins)),
        dir,
    )
}

fn ramp(n: usize, step: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (i * step % 101) as f32 / 50.0 - 1.0)
        .collect()
}

fn params(axes: &[(&str, &str)]) -> BindParams {
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_string()).collect();
    BindParams {
        structure: "linear_proj".into(),
        version: 1,
        variant: axes
            .iter()
            .map(|(a, v)| ((*a).into(), (*v).into()))
            .collect(),
        dims: BTreeMap::from([("K".into(), K as u64), ("N".into(), N as u64)]),
        inputs: text(&["x", "residual"]),
        outputs: text(&["y"]),
        ..BindParams::default()
    }
}

fn bind(
    plugin: &Plugin,
    form: &str,
    axes: &[(&str, &str)],
    w: HostTensor<'_>,
    b: HostTensor<'_>,
) -> Result<BoundForm, PluginError> {
    plugin.bind(&BindSpec {
        form,
        device: 0,
        span: "proj",
        weights: &[("w", w), ("b", b)],
        statistics: &[],
        params: &params(axes),
        contract: row_capacity(DType::F32, ROWS as u64),
    })
}

/// Weights as a form rounds them, `[N][K]`.
fn rounded(form: &str, w: &[f32]) -> Vec<f32> {
    let mut w = w.to_vec();
    if form == "w8a16_static" {
        for channel in w.chunks_exact_mut(K) {
            let scale = int8_scale(amax(channel));
            for value in channel {
                *value = f32::from(quantise_int8(*value, scale)) * scale;
            }
        }
    }
    w
}

#[test]
fn both_forms_compute_their_own_definition() {
    let (plugin, _dir) = load();
    let (w, b, x) = (ramp(K * N, 7), ramp(N, 3), ramp(ROWS * K, 13));
    let residual = ramp(ROWS * N, 5);
    let dims = [ROWS, N];
    for form in ["f32", "w8a16_static"] {
        for (bias, epilogue) in [("none", "none"), ("add", "none"), ("add", "residual_add")] {
            let axes = [("bias", bias), ("epilogue", epilogue), ("in_dtype", "bf16")];
            // Stored [N, K], as a checkpoint does.
            let stored = HostTensor::strided(&w, &[K, N], &[1, K]).expect("fits");
            let bias_view = HostTensor::new(&b, &[N]).expect("fits");
            let bound = bind(&plugin, form, &axes, stored, bias_view).expect("binds");
            let mut y = vec![f32::NAN; ROWS * N];
            let inputs = [
                HostTensor::new(&x, &[ROWS, K]).expect("fits"),
                HostTensor::new(&residual, &dims).expect("fits"),
            ];
            let mut outputs = [HostTensorMut::new(&mut y, &dims).expect("fits")];
            bound.call(&inputs, &mut outputs, &mut []).expect("runs");
            let weights = rounded(form, &w);
            for (i, got) in y.iter().enumerate() {
                let (row, n) = (i / N, i % N);
                let products = x[row * K..][..K].iter().zip(&weights[n * K..][..K]);
                let mut exact: f64 = products.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                if bias == "add" {
                    exact += f64::from(b[n]);
                }
                if epilogue == "residual_add" {
                    exact += f64::from(residual[i]);
                }
                assert!(
                    (f64::from(*got) - exact).abs() < 1e-4,
                    "{form} {i}: {got} {exact}"
                );
            }
            let per_channel = if form == "f32" { 4 * K } else { K + 4 };
            let packed = N * (per_channel + if bias == "add" { 4 } else { 0 });
            assert_eq!(bound.facts().packed_bytes, packed as u64);
        }
    }
}

#[test]
fn views_of_any_strides_and_bf16_weights_are_read() {
    let (plugin, _dir) = load();
    let (w, x) = (ramp(K * N, 7), ramp(ROWS * K, 13));
    let halves: Vec<half::bf16> = w
        .iter()
        .map(|v| half::bf16::from_bits(f32_to_bf16(*v)))
        .collect();
    let weight = HostTensor::new(&halves, &[K, N]).expect("fits");
    let bound = bind(
        &plugin,
        "f32",
        &[("epilogue", "none")],
        weight,
        HostTensor::ABSENT,
    )
    .expect("binds");
    // Columns of a wider buffer in, every second column of a wider one out, [1, ROWS] leading dims.
    let mut turned = vec![0.0; ROWS * K];
    for (i, v) in x.iter().enumerate() {
        turned[i % K * ROWS + i / K] = *v;
    }
    let mut y = vec![f32::NAN; ROWS * N * 2];
    let inputs = [
        HostTensor::strided(&turned, &[1, ROWS, K], &[ROWS * K, 1, ROWS]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs =
        [HostTensorMut::strided(&mut y, &[1, ROWS, N], &[ROWS * N * 2, N * 2, 2]).expect("fits")];
    bound.call(&inputs, &mut outputs, &mut []).expect("runs");
    for row in 0..ROWS {
        for n in 0..N {
            let exact: f32 = (0..K)
                .map(|k| x[row * K + k] * halves[k * N + n].to_f32())
                .sum();
            let got = y[(row * N + n) * 2];
            assert!((got - exact).abs() < 1e-4, "{row} {n}: {got} {exact}");
            assert!(
                y[(row * N + n) * 2 + 1].is_nan(),
                "between the columns nothing is written"
            );
        }
    }
}

#[test]
fn refusals_have_the_codes_of_the_safe_layer() {
    let (plugin, _dir) = load();
    let w = ramp(K * N, 7);
    let weight = HostTensor::new(&w, &[K, N]).expect("fits");
    let code = |r: Result<BoundForm, PluginError>| r.map(drop).expect_err("refused").code;
    let absent = HostTensor::ABSENT;
    let none = [("epilogue", "none")];
    assert_eq!(
        code(bind(&plugin, "f32", &none, absent, absent)),
        "weight_missing"
    );
    let gelu = [("epilogue", "gelu_quant_fp8")];
    assert_eq!(
        code(bind(&plugin, "f32", &gelu, weight, absent)),
        "format_no_variant"
    );
    let short = HostTensor::new(&w[..N - 1], &[N - 1]).expect("fits");
    assert_eq!(
        code(bind(&plugin, "f32", &none, weight, short)),
        "dims_inconsistent"
    );
    let flat = HostTensor::new(&w, &[K * N]).expect("fits");
    assert_eq!(
        code(bind(&plugin, "f32", &none, flat, absent)),
        "view_dtype"
    );
    assert_eq!(
        code(bind(&plugin, "f64", &none, weight, absent)),
        "form_unknown"
    );

    let shapes = |structure: &str, span: &str, rows: &[u64]| ProbeShapes {
        structure: structure.into(),
        span: span.into(),
        rows: rows.to_vec(),
        ..ProbeShapes::default()
    };
    let probe = |form: &str, shapes: ProbeShapes| {
        let report = plugin.probe(form, 0, &shapes).expect("answers");
        report.code.unwrap_or_else(|| report.probed.to_string())
    };
    assert_eq!(
        probe("f32", shapes("linear_proj", "proj", &[1, 4096])),
        "true"
    );
    assert_eq!(
        probe("w8a16_static", shapes("linear_proj", "proj", &[64, 8])),
        "true"
    );
    assert_eq!(
        probe("w8a16_static", shapes("linear_proj", "proj", &[64])),
        "form_band"
    );
    assert_eq!(
        probe("f32", shapes("linear_proj", "elsewhere", &[])),
        "span_unknown"
    );
}
