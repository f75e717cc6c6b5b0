//! What a machine may lack, and what may go wrong on one: each has its code, and whatever can go on goes on.

#![allow(clippy::expect_used, clippy::unwrap_used)] // a test that panics has failed

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use structures_loader::{
    row_capacity, BindSpec, Environment, HostTensor, HostTensorMut, Plugin, PluginError, Registry,
    ScanMode, ScanOptions, Staged, StatusKind,
};
use structures_plugin_api::describe::{BindParams, ProbeShapes};
use structures_plugin_api::DType;

const K: usize = 64;
const N: usize = 40;
const ROWS: usize = 36;
const GPU: u32 = 1;

fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("a path");
    let file = "libstructures_plugin_cuda.so";
    let found = exe
        .ancestors()
        .map(|dir| dir.join(file))
        .find(|p| p.is_file());
    found.unwrap_or_else(|| panic!("{file} is not built; run `cargo build --release --workspace`"))
}

/// A plugin opened on the fake driver, with these settings of it.
struct Opened {
    plugin: Plugin,
    cache: PathBuf,
    _dir: tempfile::TempDir,
    _settings: MutexGuard<'static, ()>,
}

/// What the fakes read.
const SETTINGS: [&str; 10] = [
    "FAKE_LT_NONE",
    "FAKE_LT_WRONG",
    "FAKE_GPU_COUNT",
    "FAKE_GPU_ARCH",
    "FAKE_GPU_DRIVER",
    "FAKE_GPU_FREE",
    "FAKE_GPU_LOSE_AFTER",
    "FAKE_GPU_BREAK",
    "FAKE_GPU_WRONG",
    "FAKE_NVRTC_VERSION",
];

/// `None` where the fakes cannot be built.
fn open(settings: &[(&str, &str)]) -> Option<Opened> {
    static SERIAL: Mutex<()> = Mutex::new(());
    let guard = SERIAL.lock().unwrap_or_else(|e| e.into_inner());
    let fakes = common::Fakes::built()?;
    fakes.open();
    std::env::set_var("STRUCTURES_NVRTC", fakes.nvrtc());
    for name in SETTINGS {
        std::env::remove_var(name);
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = dir.path().canonicalize().expect("canonical");
    let cache = root.join("cache");
    std::env::set_var("STRUCTURES_CACHE_DIR", &cache);
    for (name, value) in settings {
        std::env::set_var(name, value);
    }
    let plugins = root.join("plugins");
    std::fs::create_dir(&plugins).expect("create");
    std::fs::copy(library(), plugins.join("gpu.so")).expect("copies");
    let mut options = ScanOptions::new(vec![plugins]);
    options.environment = Environment {
        cache_dir: Some(root.join("loader")),
        ..Environment::default()
    };
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).expect("scan");
    let plugin = registry.plugin("cuda").cloned();
    Some(Opened {
        plugin: plugin.unwrap_or_else(|| panic!("{:?}", registry.plugins)),
        cache,
        _dir: dir,
        _settings: guard,
    })
}

fn ramp(n: usize, step: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (i * step % 101) as f32 / 50.0 - 1.0)
        .collect()
}

fn bind(plugin: &Plugin, form: &str, device: u32) -> Result<Staged, PluginError> {
    let axis = |a: &str, v: &str| (a.to_string(), v.to_string());
    let params = BindParams {
        structure: "linear_proj".into(),
        version: 1,
        variant: [
            axis("bias", "none"),
            axis("epilogue", "none"),
            axis("in_dtype", "bf16"),
        ]
        .into(),
        dims: BTreeMap::from([("K".into(), K as u64), ("N".into(), N as u64)]),
        inputs: vec!["x".into(), "residual".into()],
        outputs: vec!["y".into()],
        ..BindParams::default()
    };
    let w = ramp(K * N, 7);
    plugin.bind_staged(&BindSpec {
        form,
        device,
        span: "proj",
        weights: &[
            ("w", HostTensor::new(&w, &[K, N]).expect("fits")),
            ("b", HostTensor::ABSENT),
        ],
        statistics: &[(
            "x|amax|tensor",
            HostTensor::new(&[1.0_f32], &[]).expect("fits"),
        )],
        params: &params,
        contract: row_capacity(DType::F32, ROWS as u64),
    })
}

fn call(form: &Staged) -> Result<Vec<f32>, PluginError> {
    let x = ramp(ROWS * K, 13);
    let mut y = vec![f32::NAN; ROWS * N];
    let inputs = [
        HostTensor::new(&x, &[ROWS, K]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs = [HostTensorMut::new(&mut y, &[ROWS, N]).expect("fits")];
    form.call(&inputs, &mut outputs, &mut [])?;
    Ok(y)
}

fn expected() -> Vec<f32> {
    let (x, w) = (ramp(ROWS * K, 13), ramp(K * N, 7));
    let one = |row: usize, n: usize| (0..K).map(|k| x[row * K + k] * w[k * N + n]).sum::<f32>();
    (0..ROWS * N).map(|i| one(i / N, i % N)).collect()
}

/// Within what E4M3 operands may cost.
fn close(got: &[f32], want: &[f32]) -> bool {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    let apart = squares(&mut got.iter().zip(want).map(|(g, w)| g - w));
    apart <= 0.05_f32.powi(2) * squares(&mut want.iter().copied())
}

fn probe(plugin: &Plugin, form: &str) -> Option<String> {
    let shapes = ProbeShapes {
        structure: "linear_proj".into(),
        span: "proj".into(),
        dims: BTreeMap::from([("K".into(), K as u64), ("N".into(), N as u64)]),
        ..ProbeShapes::default()
    };
    let device = match plugin.home("linear_proj", form) {
        Ok(device) => device,
        Err(e) => return Some(e.code),
    };
    match plugin.probe(form, device, &shapes) {
        Ok(report) => report.code,
        Err(e) => Some(e.code),
    }
}

#[test]
fn what_is_not_there_has_a_code() {
    for (settings, code) in [
        (&[][..], None),
        (&[("FAKE_GPU_COUNT", "0")], Some("no_device")),
        (&[("FAKE_GPU_DRIVER", "12020")], Some("driver_too_old")),
        (&[("FAKE_NVRTC_VERSION", "12.3")], Some("nvrtc_too_old")),
        // It compiles for 10.0 at most.
        (&[("FAKE_GPU_ARCH", "120")], Some("nvrtc_too_old")),
        (
            &[("STRUCTURES_NVRTC", "/nowhere/libnvrtc.so")],
            Some("nvrtc_absent"),
        ),
        (&[("FAKE_GPU_ARCH", "75")], Some("arch_not_declared")),
    ] {
        let Some(opened) = open(settings) else {
            return;
        };
        let found = probe(&opened.plugin, "bf16");
        assert_eq!(found.as_deref(), code, "{settings:?}");
        // Binding says the same, and nothing was lost.
        if let Some(code) = code {
            let error = bind(&opened.plugin, "bf16", GPU).err().expect("refused");
            let expected = if code == "no_device" || code == "driver_too_old" {
                code
            } else {
                &error.code
            };
            assert_eq!(error.code, *expected, "{error}");
            assert_eq!(error.kind, StatusKind::Refused, "{error}");
        }
    }
}

#[test]
fn e4m3_products_are_not_offered_before_their_tensor_cores() {
    let Some(opened) = open(&[("FAKE_GPU_ARCH", "80")]) else {
        return;
    };
    assert_eq!(probe(&opened.plugin, "bf16"), None);
    assert_eq!(probe(&opened.plugin, "w8a16_static"), None);
    assert_eq!(
        probe(&opened.plugin, "fp8_static").as_deref(),
        Some("arch_not_declared")
    );
    let error = bind(&opened.plugin, "fp8_static", GPU)
        .err()
        .expect("refused");
    assert_eq!(error.code, "arch_not_declared", "{error}");
}

#[test]
fn a_rung_that_fails_or_lies_is_passed_over() {
    let no_library = ("FAKE_LT_NONE", "1");
    for settings in [
        &[][..],
        &[no_library],
        &[("FAKE_LT_WRONG", "1")],
        &[no_library, ("FAKE_GPU_BREAK", "_tile")],
        &[no_library, ("FAKE_GPU_WRONG", "_tile")],
    ] {
        let Some(opened) = open(settings) else {
            return;
        };
        for form in ["bf16", "fp8_static"] {
            let bound =
                bind(&opened.plugin, form, GPU).unwrap_or_else(|e| panic!("{settings:?}: {e}"));
            let device = opened.plugin.device(GPU).expect("open");
            let before = device.copies();
            let got = call(&bound).expect("runs");
            assert!(close(&got, &expected()), "{form} {settings:?}");
            assert_eq!(bound.device(), GPU);
            // The output goes in as well, and comes back with its guard.
            let made = device.copies().since(&before);
            assert_eq!((made.copies_in, made.copies_out), (2, 1));
            let (x, y) = (4 * (ROWS * K) as u64, 4 * (ROWS * N) as u64 + 64);
            assert_eq!((made.bytes_in, made.bytes_out), (x + y, y));
        }
    }
    let Some(opened) = open(&[("FAKE_GPU_BREAK", "linear_proj")]) else {
        return;
    };
    let error = bind(&opened.plugin, "bf16", GPU)
        .err()
        .expect("nothing runs");
    assert_eq!(error.code, "no_rung", "{error}");
    for rung in ["cublaslt", "mma_sync", "plain"] {
        assert!(error.to_string().contains(rung), "{error}");
    }
}

#[test]
fn memory_that_is_short_is_refused_with_free_and_needed() {
    // Headroom and a little: the weights do not fit beside it.
    let free = (512 << 20) + 1000;
    let Some(opened) = open(&[("FAKE_GPU_FREE", &free.to_string())]) else {
        return;
    };
    let error = bind(&opened.plugin, "bf16", GPU).err().expect("refused");
    assert_eq!(
        (error.kind, error.code.as_str()),
        (StatusKind::Refused, "no_device_memory")
    );
    for fact in [
        "bytes free".to_string(),
        (2 * K * N).to_string(),
        (512 << 20).to_string(),
    ] {
        assert!(error.to_string().contains(&fact), "{error}");
    }
    std::env::remove_var("FAKE_GPU_FREE");
    let device = opened.plugin.open_device(GPU).expect("opens");
    let error = device.alloc(1 << 40, 64).err().expect("refused");
    assert_eq!(error.code, "no_device_memory");
    assert!(device.alloc(500, 64).is_ok());
    assert_eq!(device.alloc(500, 3).err().expect("align").code, "argument");
}

#[test]
fn a_lost_device_poisons_its_forms_and_says_so_ever_after() {
    let Some(opened) = open(&[]) else {
        return;
    };
    let bound = bind(&opened.plugin, "bf16", GPU).expect("binds");
    assert!(close(&call(&bound).expect("runs"), &expected()));
    std::env::set_var("FAKE_GPU_LOSE_AFTER", "0");
    let error = call(&bound).expect_err("lost");
    assert_eq!(
        (error.kind, error.code.as_str()),
        (StatusKind::Failed, "device_lost"),
        "{error}"
    );
    assert!(bound.poisoned());
    assert_eq!(call(&bound).expect_err("poisoned").code, "poisoned");
    // The context is gone for good, whatever the driver would say now.
    std::env::remove_var("FAKE_GPU_LOSE_AFTER");
    let error = bind(&opened.plugin, "bf16", GPU)
        .err()
        .expect("lost before");
    assert_eq!(error.code, "device_lost", "{error}");
}

#[test]
fn machine_code_is_kept_and_a_corrupt_file_is_made_again() {
    let Some(opened) = open(&[]) else {
        return;
    };
    bind(&opened.plugin, "bf16", GPU).expect("binds");
    let kernels = opened.cache.join("kernels");
    let files = |dir: &Path| -> Vec<PathBuf> {
        let list = std::fs::read_dir(dir).expect("lists");
        list.map(|entry| entry.expect("an entry").path()).collect()
    };
    let [file] = &files(&kernels)[..] else {
        panic!("{:?}", files(&kernels));
    };
    let name = file
        .file_name()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    assert!(
        name.starts_with("linear_proj-sm_90a-nvrtc13.0-") && name.ends_with(".cubin"),
        "{name}"
    );
    let whole = std::fs::read(file).expect("reads");
    std::fs::write(file, &whole[..whole.len() - 3]).expect("writes");
    bind(&opened.plugin, "bf16", GPU).expect("binds again");
    assert_eq!(std::fs::read(file).expect("reads"), whole, "made again");
    std::fs::remove_dir_all(&kernels).expect("removes");
    std::fs::write(&kernels, "in the way").expect("writes");
    bind(&opened.plugin, "bf16", GPU).expect("a cache that cannot be written costs time alone");
}
