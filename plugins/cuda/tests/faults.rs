//! What a machine may lack, and what may go wrong on one: each has its code, and whatever can go on goes on.

#![allow(clippy::expect_used, clippy::unwrap_used)] // a test that panics has failed

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use structures_loader::{
    row_capacity, BindSpec, DeviceTensor, Environment, HostTensor, HostTensorMut, Plugin,
    PluginError, Registry, ScanMode, ScanOptions, Staged, StatusKind,
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
const SETTINGS: [&str; 12] = [
    "FAKE_FP8_BITS",
    "FAKE_LT_EXACT",
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
    bind_wide(plugin, form, device, K)
}

/// Of inputs so wide.
fn bind_wide(plugin: &Plugin, form: &str, device: u32, k: usize) -> Result<Staged, PluginError> {
    bind_of(plugin, (form, None), device, DType::F32, [ROWS, k, N])
}

/// Of these rows, inputs and channels, on one rung where it is named.
fn bind_of(
    plugin: &Plugin,
    (form, rung): (&str, Option<&str>),
    device: u32,
    dtype: DType,
    [rows, k, n]: [usize; 3],
) -> Result<Staged, PluginError> {
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
        params: rung
            .map(|r| ("rung".to_string(), r.into()))
            .into_iter()
            .collect(),
        dims: BTreeMap::from([("K".into(), k as u64), ("N".into(), n as u64)]),
        inputs: vec!["x".into(), "residual".into()],
        outputs: vec!["y".into()],
        ..BindParams::default()
    };
    let w = ramp(k * n, 7);
    plugin.bind_staged(&BindSpec {
        form,
        device,
        span: "proj",
        weights: &[
            ("w", HostTensor::new(&w, &[k, n]).expect("fits")),
            ("b", HostTensor::ABSENT),
        ],
        statistics: &[(
            "x|amax|tensor",
            HostTensor::new(&[1.0_f32], &[]).expect("fits"),
        )],
        params: &params,
        contract: row_capacity(dtype, rows as u64),
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
        (&[("FAKE_GPU_DRIVER", "12030")], Some("driver_too_old")),
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
        &[no_library, ("FAKE_GPU_BREAK", "_wgmma")],
        &[no_library, ("FAKE_GPU_WRONG", "_wgmma")],
        &[
            no_library,
            ("FAKE_GPU_BREAK", "_tile"),
            ("FAKE_GPU_WRONG", "_wgmma"),
        ],
        &[
            no_library,
            ("FAKE_GPU_WRONG", "_tile"),
            ("FAKE_GPU_BREAK", "_wgmma"),
        ],
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
    for rung in ["cublaslt", "wgmma", "mma_sync", "plain"] {
        assert!(error.to_string().contains(rung), "{error}");
    }
}

#[test]
fn the_library_is_asked_for_the_very_rows_it_declined() {
    // Neither our own products nor an end kernel run then, so whoever answers is the library.
    let Some(opened) = open(&[("FAKE_LT_EXACT", "1"), ("FAKE_GPU_BREAK", "_end")]) else {
        return;
    };
    let bound = bind(&opened.plugin, "bf16", GPU).expect("binds");
    std::env::set_var("FAKE_GPU_BREAK", "_bf16_");
    for _ in 0..2 {
        assert!(close(&call(&bound).expect("runs"), &expected()));
    }
}

#[test]
fn sums_of_few_bits_are_taken_within_the_tolerance_and_passed_over_beyond() {
    // A multiple of what the library asks of E4M3 channels.
    let dims @ [rows, k, n] = [ROWS, 320, 48];
    let x = ramp(rows * k, 13);
    let mut found = Vec::new();
    // Of 13 bits the fast sums are within the tolerance, of 6 they are not and the library's others serve.
    for (bits, agree) in [("0", true), ("13", true), ("6", false)] {
        let Some(opened) = open(&[("FAKE_FP8_BITS", bits)]) else {
            return;
        };
        let bind = |rung| bind_of(&opened.plugin, ("fp8_static", rung), GPU, DType::F32, dims);
        for rung in ["cublaslt_fast", "wgmma"] {
            assert_eq!(bind(Some(rung)).is_ok(), agree, "{rung} of {bits} bits");
        }
        bind(Some("cublaslt")).expect("its sums are of f32");
        let bound = bind(None).expect("binds");
        let mut got = vec![f32::NAN; rows * n];
        let inputs = [
            HostTensor::new(&x, &[rows, k]).expect("fits"),
            HostTensor::ABSENT,
        ];
        let mut outputs = [HostTensorMut::new(&mut got, &[rows, n]).expect("fits")];
        bound.call(&inputs, &mut outputs, &mut []).expect("runs");
        found.push(got);
    }
    assert!(found[1] != found[0] && close(&found[1], &found[0]));
    assert!(found[2] == found[0]);
}

#[test]
fn a_library_is_looked_for_where_it_is_named_and_nowhere_else() {
    // One that is not there, and a library that is another one.
    let Some(fakes) = common::Fakes::built() else {
        return;
    };
    for named in [Path::new("/nowhere/libcublasLt.so"), &fakes.nvrtc()] {
        let Some(opened) = open(&[("STRUCTURES_CUBLASLT", &named.to_string_lossy())]) else {
            return;
        };
        let library = bind_of(
            &opened.plugin,
            ("bf16", Some("cublaslt")),
            GPU,
            DType::F32,
            [ROWS, K, N],
        );
        let bound = bind(&opened.plugin, "bf16", GPU);
        std::env::remove_var("STRUCTURES_CUBLASLT");
        let error = library.err().expect("refused");
        assert_eq!(error.code, "no_rung", "{error}");
        assert!(error.to_string().contains("cublaslt_absent"), "{error}");
        // The next rung serves; were it the library this would go unnoticed.
        let bound = bound.expect("binds");
        std::env::set_var("FAKE_GPU_BREAK", "_wgmma");
        call(&bound).expect_err("our own product runs");
    }
}

#[test]
fn a_named_rung_is_the_only_one_and_tiles_go_round_their_stages() {
    let Some(opened) = open(&[("FAKE_LT_NONE", "1")]) else {
        return;
    };
    // More steps than there are stages, a last one that is not whole, more than one tile along both.
    let (rows, k, n) = (140, 1040, 264);
    let x = ramp(rows * k, 13);
    for form in ["bf16", "fp8_static"] {
        let mut want = Vec::new();
        for rung in ["plain", "mma_sync", "wgmma"] {
            let bound = bind_of(
                &opened.plugin,
                (form, Some(rung)),
                GPU,
                DType::F32,
                [rows, k, n],
            );
            let bound = bound.unwrap_or_else(|e| panic!("{form} {rung}: {e}"));
            let mut got = vec![f32::NAN; rows * n];
            let inputs = [
                HostTensor::new(&x, &[rows, k]).expect("fits"),
                HostTensor::ABSENT,
            ];
            let mut outputs = [HostTensorMut::new(&mut got, &[rows, n]).expect("fits")];
            bound.call(&inputs, &mut outputs, &mut []).expect("runs");
            if want.is_empty() {
                want.clone_from(&got);
            }
            let apart = got.iter().zip(&want).map(|(g, w)| (g - w).abs());
            let apart = apart.fold(0.0, f32::max);
            assert!(apart < 2e-3, "{form} {rung}: {apart}");
        }
        let none = bind_of(
            &opened.plugin,
            (form, Some("cublaslt")),
            GPU,
            DType::F32,
            [8, 64, 64],
        );
        assert_eq!(none.err().expect("refused").code, "no_rung");
    }
}

#[test]
fn few_rows_are_streamed_past_by_wide_and_narrow_weights_of_either_boundary() {
    let Some(opened) = open(&[]) else {
        return;
    };
    let device = opened.plugin.open_device(GPU).expect("opens");
    // A last piece that is not whole, along both; 32 channels a block from 8192 on, 64 from 16384.
    let k = 80;
    for n in [24, 8200, 16408] {
        let w = ramp(k * n, 7);
        let column = |c: usize| (0..k).map(move |i| i * n + c);
        let scales: Vec<f32> = (0..n)
            .map(|c| column(c).map(|i| w[i].abs()).fold(0.0, f32::max) / 127.0)
            .collect();
        for dtype in [DType::F32, DType::Bf16] {
            let bound = bind_of(
                &opened.plugin,
                ("w8a16_static", None),
                GPU,
                dtype,
                [8, k, n],
            );
            let bound = bound.expect("binds");
            for rows in [1, 5, 8] {
                // f32 that no bf16 is, and bf16.
                let x: Vec<f32> = ramp(rows * k, 13)
                    .into_iter()
                    .map(|v| match dtype {
                        DType::F32 => v * 1.000_123,
                        _ => f32::from_bits(v.to_bits() & 0xffff_0000),
                    })
                    .collect();
                let bytes: Vec<u8> = match dtype {
                    DType::F32 => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
                    _ => x
                        .iter()
                        .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
                        .collect(),
                };
                let mut given = device.alloc(bytes.len() as u64, 256).expect("memory");
                given.copy_in(None, 0, &bytes).expect("copies");
                let size = dtype.size() * rows * n;
                let mut made = device.alloc(size as u64, 256).expect("memory");
                {
                    let inputs = [
                        given.tensor(dtype, &[rows, k]).expect("fits"),
                        DeviceTensor::ABSENT,
                    ];
                    let mut outputs = [made.tensor_mut(dtype, &[rows, n]).expect("fits")];
                    let form = bound.form();
                    form.call_on(&device, None, &inputs, &mut outputs, &mut [])
                        .expect("runs");
                }
                let mut got = vec![0_u8; size];
                made.copy_out(None, 0, &mut got).expect("copies");
                let value = |i: usize| match dtype {
                    DType::F32 => f32::from_le_bytes(got[4 * i..4 * i + 4].try_into().unwrap()),
                    _ => {
                        let bits = u16::from_le_bytes(got[2 * i..2 * i + 2].try_into().unwrap());
                        f32::from_bits(u32::from(bits) << 16)
                    }
                };
                let most = if dtype == DType::F32 { 2e-6 } else { 4e-3 };
                for i in 0..rows * n {
                    let (row, c) = (i / n, i % n);
                    let code = |i: usize| f64::from((w[i] / scales[c]).round_ties_even());
                    let terms = || {
                        let x = &x[row * k..][..k];
                        x.iter()
                            .zip(column(c))
                            .map(|(x, i)| f64::from(*x) * code(i))
                    };
                    let scale = f64::from(scales[c]);
                    let (want, whole) = (
                        terms().sum::<f64>() * scale,
                        terms().map(f64::abs).sum::<f64>() * scale,
                    );
                    let apart = (f64::from(value(i)) - want).abs();
                    assert!(
                        apart <= most * whole,
                        "{n} {dtype:?} {rows}: {i} {want} {}",
                        value(i)
                    );
                }
            }
        }
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

/// Bytes of the fake device that are allocated.
fn used() -> usize {
    type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> i32;
    type Current = unsafe extern "C" fn(*mut std::ffi::c_void) -> i32;
    let (mut free, mut total) = (0, 0);
    // SAFETY: the fake driver, which is open under its name; its entries take what is declared above.
    unsafe {
        let driver = libloading::Library::new("libcuda.so").expect("is open");
        let current: libloading::Symbol<'_, Current> =
            driver.get(b"cuCtxSetCurrent").expect("is there");
        let info: libloading::Symbol<'_, Info> = driver.get(b"cuMemGetInfo_v2").expect("is there");
        current(std::ptr::without_provenance_mut(0x10));
        assert_eq!(info(&mut free, &mut total), 0);
    }
    (8 << 30) - free
}

#[test]
fn a_recording_keeps_the_scratch_it_was_made_with_when_a_later_bind_needs_more() {
    // The fake library of products records nothing.
    let Some(opened) = open(&[("FAKE_LT_NONE", "1")]) else {
        return;
    };
    let device = opened.plugin.device(GPU).expect("opens");
    let bound = bind(&opened.plugin, "bf16", GPU).expect("binds");
    let small = bound.facts().scratch_bytes;
    let x = ramp(ROWS * K, 13);
    let mut given = device.lease(4 * x.len() as u64).expect("memory");
    given.copy_in(None, 0, &x).expect("copies");
    let mut made = device.lease((4 * ROWS * N) as u64).expect("memory");
    let (noted, recording) = {
        let inputs = [
            given.tensor(DType::F32, &[ROWS, K]).expect("fits"),
            DeviceTensor::ABSENT,
        ];
        let mut outputs = [made.tensor_mut(DType::F32, &[ROWS, N]).expect("fits")];
        device
            .record(None, || {
                let form = bound.form();
                form.call_on(&device, None, &inputs, &mut outputs, &mut [])
            })
            .expect("records")
    };
    noted.expect("is noted");
    let recording = recording.expect("a recording");
    let outgrown = used();
    // Twice, so that the scratch in between is outgrown as well.
    let mut large = Vec::new();
    for width in [4 * K, 16 * K] {
        large.push(bind_wide(&opened.plugin, "bf16", GPU, width).expect("binds"));
    }
    let last = large[1].facts().scratch_bytes;
    assert!(small < large[0].facts().scratch_bytes && large[0].facts().scratch_bytes < last);
    let weights = large.iter().map(|f| f.facts().packed_bytes).sum::<u64>();
    let grown = large.iter().map(|f| f.facts().scratch_bytes).sum::<u64>();
    assert_eq!(
        (used() - outgrown) as u64,
        weights + grown,
        "nothing was freed"
    );
    // Whoever is given freed memory writes to it.
    let mut over = device.alloc(small, 256).expect("memory");
    over.copy_in(None, 0, &vec![0xff_u8; small as usize])
        .expect("copies");
    let mut got = vec![0.0_f32; ROWS * N];
    for _ in 0..2 {
        made.copy_in(None, 0, &vec![f32::NAN; ROWS * N])
            .expect("copies");
        recording.launch(None).expect("launches");
        made.copy_out(None, 0, &mut got).expect("copies");
        assert!(close(&got, &expected()));
    }
    let mut kept = vec![0_u8; small as usize];
    over.copy_out(None, 0, &mut kept).expect("copies");
    assert!(kept.iter().all(|b| *b == 0xff), "it wrote elsewhere");
    // With the last recording goes what was outgrown.
    let held = used();
    drop(recording);
    assert_eq!((held - used()) as u64, grown - last + small);
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
