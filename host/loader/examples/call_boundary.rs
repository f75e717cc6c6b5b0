//! Prints what one call across the boundary costs beyond a direct call of the same function.
//!
//! Two levels: the bare table entry, which is what the ABI itself costs, and the loader's safe call, which checks
//! counts, overlap and poison on the way in. Through the Rust door the SDK adds its own: views become checked tensors,
//! outputs must share memory with nothing, a panic becomes a status. Every form does nothing; one input, an absent one
//! and one output, as `linear_proj` has. The lower quartile of many short rounds: on a shared machine the median tells
//! of the neighbours.
//!
//! `cargo build --release -p structures-plugin-api --examples && cargo run --release -p structures-loader --example
//! call_boundary`

use std::ffi::c_void;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use structures_fixture_plugin::c_fixture;
use structures_loader::{
    row_capacity, BindSpec, BoundForm, Environment, HostTensor, HostTensorMut, Registry, ScanMode,
    ScanOptions,
};
use structures_plugin_api::abi::{CallCtx, DType, Error, Status, TensorView, STATUS_OK};
use structures_plugin_api::describe::BindParams;
use structures_plugin_api::sdk::{self, Tensor, TensorMut};

const ROUNDS: usize = 400;
const CALLS: u32 = 10_000;

/// Nanoseconds a call: the lower quartile of many rounds.
fn time(mut call: impl FnMut()) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| call());
            start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 4]
}

/// The entry of a form, as in the table.
type Entry = unsafe extern "C" fn(
    *mut c_void,
    *const CallCtx,
    *const TensorView,
    usize,
    *const TensorView,
    usize,
    *const TensorView,
    usize,
    *mut Error,
) -> Status;

/// The same function without a boundary.
#[inline(never)]
unsafe extern "C" fn direct(
    _: *mut c_void,
    _: *const CallCtx,
    _: *const TensorView,
    _: usize,
    _: *const TensorView,
    _: usize,
    _: *const TensorView,
    _: usize,
    _: *mut Error,
) -> Status {
    STATUS_OK
}

struct Direct;

impl sdk::BoundForm for Direct {
    #[inline(never)]
    fn call(
        &mut self,
        _: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _: &mut [TensorMut<'_>],
    ) -> Result<(), sdk::Failure> {
        black_box((inputs.len(), outputs.len()));
        Ok(())
    }
}

fn entry(entry: Entry, form: *mut c_void, inputs: &[TensorView], outputs: &[TensorView]) -> f64 {
    let entry = black_box(entry);
    let null = std::ptr::null();
    let mut error = Error::EMPTY;
    time(|| {
        // SAFETY: the form is bound or not looked at, the views are the caller's.
        let status = unsafe {
            entry(
                form,
                &CallCtx::NONE,
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_ptr(),
                outputs.len(),
                null,
                0,
                &mut error,
            )
        };
        assert_eq!(status, STATUS_OK);
    })
}

fn bound(plugins: &Path, id: &str, form: &str) -> BoundForm {
    let mut options = ScanOptions::new(vec![plugins.to_path_buf()]);
    options.environment = Environment {
        cache_dir: Some(plugins.join("cache")),
        ..Environment::default()
    };
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).expect("scan");
    let plugin = registry.plugin(id);
    let plugin = plugin.unwrap_or_else(|| panic!("{id}: {:?}", registry.plugins));
    let params = BindParams {
        structure: "linear_proj".into(),
        version: 1,
        inputs: vec!["x".into(), "residual".into()],
        outputs: vec!["y".into()],
        ..BindParams::default()
    };
    let w = [1.0_f32; 16];
    let spec = BindSpec {
        form,
        device: 0,
        span: "proj",
        weights: &[("w", HostTensor::new(&w, &[4, 4]).expect("fits"))],
        statistics: &[],
        params: &params,
        contract: row_capacity(DType::F32, 1),
    };
    plugin.bind(&spec).expect("binds")
}

fn safe(form: &BoundForm) -> f64 {
    let (x, mut y) = ([1.0_f32; 4], [0.0_f32; 4]);
    let inputs = [
        HostTensor::new(&x, &[1, 4]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs = [HostTensorMut::new(&mut y, &[1, 4]).expect("fits")];
    time(|| form.call(&inputs, &mut outputs, &mut []).expect("runs"))
}

fn main() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let plugins = dir.path().canonicalize().expect("canonical");
    c_fixture(&plugins, "c_noop", &["NOOP"]);
    let exe = std::env::current_exe().expect("a path");
    let built = exe.with_file_name("libnoop_backend.so");
    std::fs::copy(&built, plugins.join("noop.so")).unwrap_or_else(|e| {
        panic!(
            "{}: {e}; build the examples of structures-plugin-api",
            built.display()
        )
    });
    let (c, rust) = (
        bound(&plugins, "c_noop", "f32"),
        bound(&plugins, "noop", "noop"),
    );

    let (x, mut y) = ([1.0_f32; 4], [0.0_f32; 4]);
    let tensor = Tensor::from_f32(&x, &[1, 4]).expect("fits");
    let inputs = [*tensor.view(), TensorView::ABSENT];
    let outputs = {
        let y = TensorMut::from_f32(&mut y, &[1, 4]).expect("fits");
        [*y.as_tensor().view()]
    };
    let function = entry(direct, std::ptr::null_mut(), &inputs, &outputs);
    let mut form: Box<dyn sdk::BoundForm> = black_box(Box::new(Direct));
    let tensors = [tensor, Tensor::ABSENT];
    let mut made = [TensorMut::from_f32(&mut y, &[1, 4]).expect("fits")];
    let method = time(|| {
        form.call(&CallCtx::NONE, &tensors, &mut made, &mut [])
            .expect("runs")
    });
    let row = |name: &str, ns: f64, direct: f64| {
        println!("{name:<34} {ns:6.2} ns  {:+6.2} ns", ns - direct)
    };
    row("direct: C function", function, function);
    row(
        "C door: table entry",
        entry(c.raw_entry(), c.raw_form(), &inputs, &outputs),
        function,
    );
    row("C door: loader's call", safe(&c), function);
    row("direct: Rust method", method, method);
    row(
        "Rust door: table entry, no tensors",
        entry(rust.raw_entry(), rust.raw_form(), &[], &[]),
        method,
    );
    row(
        "Rust door: table entry",
        entry(rust.raw_entry(), rust.raw_form(), &inputs, &outputs),
        method,
    );
    row("Rust door: loader's call", safe(&rust), method);
}
