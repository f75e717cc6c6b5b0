//! The simulated device as a host sees it: placement, refusals by architecture, loss.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{mpsc, Mutex, MutexGuard};
use std::time::Duration;

use structures_loader::{
    row_capacity, BindSpec, BoundForm, DeviceMemory, DeviceTensor, Environment, HostTensor,
    HostTensorMut, Plugin, PluginDevice, PluginError, Registry, ScanMode, ScanOptions, StatusKind,
};
use structures_plugin_api::abi::DType;
use structures_plugin_api::describe::{BindParams, ProbeShapes};

const K: usize = 24;
const N: usize = 10;
const ROWS: usize = 3;
const SIM: u32 = 1;

/// The built library, beside the `deps` this test runs from.
fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("a path");
    let file = "libstructures_plugin_portable.so";
    let found = exe
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(file))
        .find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{file} is not beside {}", exe.display()))
}

/// A plugin opened with these variables, and the lock that keeps other tests from changing them.
struct Opened {
    plugin: Plugin,
    _dir: tempfile::TempDir,
    _variables: MutexGuard<'static, ()>,
}

fn open(variables: &[(&str, &str)]) -> Opened {
    static VARIABLES: Mutex<()> = Mutex::new(());
    let guard = VARIABLES.lock().unwrap_or_else(|e| e.into_inner());
    for name in ["ARCH", "BUILT_FOR", "LOSE_AFTER", "CAPTURE"] {
        std::env::remove_var(format!("STRUCTURES_SIM_{name}"));
    }
    for (name, value) in variables {
        std::env::set_var(format!("STRUCTURES_SIM_{name}"), value);
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let root = dir.path().canonicalize().expect("canonical");
    let plugins = root.join("plugins");
    std::fs::create_dir(&plugins).expect("create");
    std::fs::copy(library(), plugins.join("portable.so")).expect("copies");
    let mut options = ScanOptions::new(vec![plugins]);
    options.environment = Environment {
        cache_dir: Some(root.join("cache")),
        ..Environment::default()
    };
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).expect("scan");
    let plugin = registry.plugin("portable").cloned();
    Opened {
        plugin: plugin.unwrap_or_else(|| panic!("{:?}", registry.plugins)),
        _dir: dir,
        _variables: guard,
    }
}

fn ramp(n: usize, step: usize) -> Vec<f32> {
    (0..n)
        .map(|i| (i * step % 101) as f32 / 50.0 - 1.0)
        .collect()
}

fn bind(plugin: &Plugin, device: u32) -> Result<BoundForm, PluginError> {
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_string()).collect();
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
        inputs: text(&["x", "residual"]),
        outputs: text(&["y"]),
        ..BindParams::default()
    };
    let w = ramp(K * N, 7);
    plugin.bind(&BindSpec {
        form: "f32",
        device,
        span: "proj",
        weights: &[
            ("w", HostTensor::new(&w, &[K, N]).expect("fits")),
            ("b", HostTensor::ABSENT),
        ],
        statistics: &[],
        params: &params,
        contract: row_capacity(DType::F32, ROWS as u64),
    })
}

/// On the CPU.
fn on_host(form: &BoundForm, x: &[f32]) -> Result<Vec<f32>, PluginError> {
    let mut y = vec![f32::NAN; ROWS * N];
    let inputs = [
        HostTensor::new(x, &[ROWS, K]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs = [HostTensorMut::new(&mut y, &[ROWS, N]).expect("fits")];
    form.call(&inputs, &mut outputs, &mut [])?;
    Ok(y)
}

/// Copies in, calls, copies out.
fn on_device(plugin: &Plugin, form: &BoundForm, x: &[f32]) -> Result<Vec<f32>, PluginError> {
    let device = plugin.open_device(SIM)?;
    let queue = device.queue()?;
    let mut given = device.alloc(size_of_val(x) as u64, 64)?;
    let mut made = device.alloc((4 * ROWS * N) as u64, 64)?;
    given.copy_in(Some(&queue), 0, x)?;
    queue.mark()?;
    let inputs = [
        given.tensor(DType::F32, &[ROWS, K]).expect("fits"),
        DeviceTensor::ABSENT,
    ];
    let mut outputs = [made.tensor_mut(DType::F32, &[ROWS, N]).expect("fits")];
    form.call_on(&device, Some(&queue), &inputs, &mut outputs, &mut [])?;
    assert!(queue.elapsed()? >= 0.0);
    queue.synchronize()?;
    let mut y = vec![0.0_f32; ROWS * N];
    made.copy_out(Some(&queue), 0, &mut y)?;
    Ok(y)
}

fn probe(plugin: &Plugin, device: u32) -> Result<bool, PluginError> {
    let shapes = ProbeShapes {
        structure: "linear_proj".into(),
        span: "proj".into(),
        ..ProbeShapes::default()
    };
    plugin
        .probe("f32", device, &shapes)
        .map(|report| report.probed)
}

#[test]
fn without_a_variable_there_is_no_device() {
    let opened = open(&[]);
    assert_eq!(opened.plugin.devices().expect("answers"), []);
    let error = bind(&opened.plugin, SIM).expect_err("no device");
    assert_eq!(
        (error.kind, error.code.as_str()),
        (StatusKind::Refused, "device_unknown")
    );
    assert_eq!(
        opened.plugin.open_device(SIM).expect_err("none").code,
        "device_unknown"
    );
}

#[test]
fn a_form_on_the_device_computes_what_it_computes_on_the_cpu() {
    let opened = open(&[("ARCH", "sm_90a")]);
    let plugin = &opened.plugin;
    let devices = plugin.devices().expect("answers");
    assert_eq!(devices.len(), 1);
    assert_eq!(
        (devices[0].index, devices[0].arch.as_str()),
        (SIM, "sm_90a")
    );
    assert_eq!(devices[0].kind, "simulated");
    assert!(probe(plugin, SIM).expect("answers"));
    let x = ramp(ROWS * K, 13);
    let (cpu, form) = (
        bind(plugin, 0).expect("binds"),
        bind(plugin, SIM).expect("binds"),
    );
    let expected = on_host(&cpu, &x).expect("runs");
    assert_eq!(on_device(plugin, &form, &x).expect("runs"), expected);
}

#[test]
fn no_address_goes_where_it_does_not_belong() {
    let opened = open(&[("ARCH", "sm_90a")]);
    let plugin = &opened.plugin;
    let x = ramp(ROWS * K, 13);
    let (cpu, form) = (
        bind(plugin, 0).expect("binds"),
        bind(plugin, SIM).expect("binds"),
    );
    // Host memory never reaches a form on the device, nor device memory one of the CPU.
    let error = on_host(&form, &x).expect_err("host memory");
    assert_eq!(
        (error.code.as_str(), form.poisoned()),
        ("device_mismatch", false)
    );
    let error = on_device(plugin, &cpu, &x).expect_err("device memory");
    assert_eq!(
        (error.code.as_str(), cpu.poisoned()),
        ("device_mismatch", false)
    );

    let (device, other) = (
        plugin.open_device(SIM).expect("opens"),
        plugin.open_device(SIM).expect("opens twice"),
    );
    let (given, mut made) = (
        device.alloc((4 * ROWS * K) as u64, 64).expect("memory"),
        other.alloc((4 * ROWS * N) as u64, 64).expect("memory"),
    );
    let foreign_queue = other.queue().expect("a queue");
    let mut out = [0_f32];
    let error = given
        .copy_out(Some(&foreign_queue), 0, &mut out)
        .expect_err("foreign queue");
    assert_eq!(error.code, "device_mismatch");
    let inputs = [
        given.tensor(DType::F32, &[ROWS, K]).expect("fits"),
        DeviceTensor::ABSENT,
    ];
    let mut outputs = [made.tensor_mut(DType::F32, &[ROWS, N]).expect("fits")];
    let error = form
        .call_on(&device, None, &inputs, &mut outputs, &mut [])
        .expect_err("memory of another open device");
    assert_eq!(
        (error.code.as_str(), form.poisoned()),
        ("device_mismatch", false)
    );
    // Lengths are checked on this side, alignments on the other.
    assert_eq!(
        given
            .copy_out(None, given.bytes(), &mut out)
            .expect_err("past the end")
            .code,
        "argument"
    );
    assert!(given.tensor(DType::F32, &[ROWS, K + 1]).is_err());
    assert_eq!(device.alloc(8, 3).err().expect("align").code, "argument");
}

#[test]
fn a_device_the_code_was_not_built_for_is_refused_with_all_facts() {
    for (arch, built_for, expected) in [
        ("sm_90a", "sm_90a", None),
        ("sm_90", "sm_80+PTX", None),
        ("sm_120", "sm_90,sm_120f", None),
        ("sm_90a", "sm_120", Some("arch_not_declared")),
        ("sm_120", "sm_90a+PTX", Some("arch_not_declared")),
        ("sm_90", "fast ones", Some("arch_malformed")),
        ("a toaster", "sm_90", Some("arch_malformed")),
    ] {
        let opened = open(&[("ARCH", arch), ("BUILT_FOR", built_for)]);
        let refusals = [
            bind(&opened.plugin, SIM).err(),
            probe(&opened.plugin, SIM).err(),
            opened.plugin.open_device(SIM).err(),
        ];
        for refusal in refusals {
            let code = refusal.as_ref().map(|e| e.code.as_str());
            assert_eq!(code, expected, "{arch} on {built_for}: {refusal:?}");
            if expected == Some("arch_not_declared") {
                let text = refusal.map(|e| e.to_string()).unwrap_or_default();
                for fact in [
                    "portable",
                    &built_for.replace(',', ", "),
                    arch.trim_end_matches('a'),
                ] {
                    assert!(text.contains(fact), "{text}");
                }
            }
        }
        assert!(bind(&opened.plugin, 0).is_ok(), "the CPU is not concerned");
    }
}

#[test]
fn a_lost_device_poisons_its_forms_and_nothing_else() {
    // Binding takes one operation; device, queue, two allocations and the mark are four, the copy one.
    let opened = open(&[("ARCH", "sm_90a"), ("LOSE_AFTER", "8")]);
    let plugin = &opened.plugin;
    let x = ramp(ROWS * K, 13);
    let (cpu, form) = (
        bind(plugin, 0).expect("binds"),
        bind(plugin, SIM).expect("binds"),
    );
    let error = on_device(plugin, &form, &x).expect_err("lost in the middle");
    assert_eq!(
        (error.kind, error.code.as_str()),
        (StatusKind::Failed, "device_lost"),
        "{error}"
    );
    assert!(form.poisoned(), "it was lost inside the call: {error}");
    assert_eq!(
        on_device(plugin, &form, &x).expect_err("gone").code,
        "device_lost"
    );
    assert_eq!(bind(plugin, SIM).expect_err("gone").code, "device_lost");
    assert_eq!(probe(plugin, SIM).expect_err("gone").code, "device_lost");
    let device = plugin.open_device(SIM).expect("a handle");
    assert_eq!(device.alloc(4, 4).err().expect("gone").code, "device_lost");
    assert!(on_host(&cpu, &x).is_ok(), "the CPU goes on");
    let healthy = plugin.devices().expect("still known");
    assert_eq!(healthy.len(), 1);
}

/// What one caller has on the shared device: a form, its input and its output.
struct Caller {
    form: BoundForm,
    given: DeviceMemory,
    made: DeviceMemory,
}

impl Caller {
    fn new(plugin: &Plugin, device: &PluginDevice) -> Self {
        let (given, made) = ((4 * ROWS * K) as u64, (4 * ROWS * N) as u64);
        Caller {
            form: bind(plugin, SIM).expect("binds"),
            given: device.alloc(given, 64).expect("memory"),
            made: device.alloc(made, 64).expect("memory"),
        }
    }

    fn call(&self, device: &PluginDevice) -> Result<(), PluginError> {
        let inputs = [
            self.given.tensor(DType::F32, &[ROWS, K]).expect("fits"),
            DeviceTensor::ABSENT,
        ];
        let mut outputs = [self.made.state(DType::F32, &[ROWS, N]).expect("fits")];
        self.form
            .call_on(device, None, &inputs, &mut outputs, &mut [])
    }

    fn take(&self, x: &[f32]) -> Result<(), PluginError> {
        self.given.replace(None, 0, x)
    }

    fn made(&self) -> Result<Vec<f32>, PluginError> {
        let mut y = vec![0.0_f32; ROWS * N];
        self.made.copy_out(None, 0, &mut y)?;
        Ok(y)
    }
}

#[test]
fn what_other_threads_want_of_a_device_waits_until_a_recording_is_over() {
    let opened = open(&[("ARCH", "sm_90a")]);
    let plugin = &opened.plugin;
    let device = &plugin.device(SIM).expect("opens");
    let cpu = bind(plugin, 0).expect("binds");
    let (x, other) = (ramp(ROWS * K, 13), ramp(ROWS * K, 17));
    let expected = on_host(&cpu, &x).expect("runs");
    let others = on_host(&cpu, &other).expect("runs");
    let mine = Caller::new(plugin, device);
    mine.take(&x).expect("copies");
    let (_, before) = device.record(None, || mine.call(device)).expect("records");
    let before = before.expect("a recording");

    // One thread for each thing, so that none hides behind another that waits.
    type Want<'a> = (
        &'a str,
        Box<dyn Fn() -> Result<(), PluginError> + Send + Sync + 'a>,
    );
    let [calls, copies, reads] = std::array::from_fn(|_| Caller::new(plugin, device));
    calls.take(&other).expect("copies");
    reads.take(&other).expect("copies");
    reads.call(device).expect("runs");
    let queue = device.queue().expect("a queue");
    let wants: [Want<'_>; 11] = [
        ("call", Box::new(|| calls.call(device))),
        ("copy in", Box::new(|| copies.take(&other))),
        (
            "copy out",
            Box::new(|| reads.made().map(|y| assert_eq!(y, others))),
        ),
        ("alloc", Box::new(|| device.alloc(64, 64).map(drop))),
        ("lease", Box::new(|| device.lease(1 << 20).map(drop))),
        ("launch", Box::new(|| before.launch(None))),
        ("wait", Box::new(|| queue.synchronize())),
        ("bind", Box::new(|| bind(plugin, SIM).map(drop))),
        ("probe", Box::new(|| probe(plugin, SIM).map(drop))),
        (
            "open",
            Box::new(|| plugin.open_device(SIM)?.alloc(4, 4).map(drop)),
        ),
        (
            "record",
            Box::new(|| {
                let (called, recording) = device.record(None, || copies.call(device))?;
                called.and(recording.map(drop))
            }),
        ),
    ];
    let recorded = std::thread::scope(|scope| {
        let (wanted, all) = mpsc::channel();
        let (answered, answers) = mpsc::channel();
        let recorded = device.record(None, || {
            mine.call(device)?;
            for (what, want) in &wants {
                let (wanted, answered) = (wanted.clone(), answered.clone());
                scope.spawn(move || {
                    wanted.send(()).expect("is awaited");
                    answered.send((*what, want())).expect("is awaited");
                });
            }
            for _ in &wants {
                all.recv().expect("every thread runs");
            }
            let early = answers.recv_timeout(Duration::from_millis(100));
            assert!(early.is_err(), "did not wait: {early:?}");
            mine.call(device)
        });
        for _ in &wants {
            let (what, answer) = answers.recv().expect("all are answered");
            answer.unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        recorded
    });
    let (called, recording) = recorded.expect("records");
    called.expect("is noted");
    let recording = recording.expect("nothing spoilt it");
    assert_eq!(calls.made().expect("copies"), others);
    copies.call(device).expect("runs");
    assert_eq!(copies.made().expect("copies"), others);
    // The other recording was launched and left what it makes; this one makes its own and nobody else's.
    assert_eq!(mine.made().expect("copies"), expected);
    let none = vec![0.0_f32; ROWS * N];
    for caller in [&mine, &calls, &copies, &reads] {
        caller.made.replace(None, 0, &none).expect("copies");
    }
    recording.launch(None).expect("launches");
    assert_eq!(mine.made().expect("copies"), expected);
    for caller in [&calls, &copies, &reads] {
        assert_eq!(caller.made().expect("copies"), none, "of another thread");
    }
}

#[test]
fn a_recording_that_unwinds_or_never_began_keeps_nobody_out() {
    for capture in ["wait:none", "none"] {
        let opened = open(&[("ARCH", "sm_90a"), ("CAPTURE", capture)]);
        let device = &opened.plugin.device(SIM).expect("opens");
        let caller = &Caller::new(&opened.plugin, device);
        caller.take(&ramp(ROWS * K, 13)).expect("copies");
        let recorded = std::thread::scope(|scope| {
            let records = || device.record(None, || panic!("inside a recording")).err();
            scope.spawn(records).join()
        });
        match recorded {
            Ok(Some(refused)) => assert_eq!(refused.code, "capture_unsupported"),
            other => assert!(other.is_err() && capture != "none", "{other:?}"),
        }
        std::thread::scope(|scope| {
            scope.spawn(|| caller.call(device).expect("runs"));
        });
        assert!(caller.made().expect("copies").iter().all(|v| v.is_finite()));
        let again = device.record(None, || caller.call(device));
        let code = again.err().map(|e| e.code);
        let expected = (capture == "none").then_some("capture_unsupported");
        assert_eq!(code.as_deref(), expected);
    }
}
