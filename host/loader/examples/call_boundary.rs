//! Prints what one call across the boundary costs beyond a direct call of the same function.
//!
//! Two levels: the bare table entry, which is what the ABI itself costs, and the loader's safe call, which checks
//! counts, overlap and poison on the way in. Through the Rust door the SDK adds its own: views become checked tensors,
//! outputs must share memory with nothing, a panic becomes a status. Every form does nothing; one input, an absent one
//! and one output, as `linear_proj` has.
//!
//! Each round times the direct call and then the other one, so that both see the same neighbours on a shared machine;
//! the rows are medians over the rounds, with the quartiles of the difference.
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

/// Nanoseconds a call in one round.
fn round(call: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    call();
    start.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

/// One round of calls as one thing to time; the loop is inside, so that it costs both sides the same.
fn many(mut call: impl FnMut()) -> impl FnMut() {
    move || (0..CALLS).for_each(|_| call())
}

/// Times two kinds of call in turn and prints the second.
fn compare(name: &str, mut direct: impl FnMut(), mut call: impl FnMut()) {
    let (mut alone, mut beyond) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (a, b) = (round(&mut direct), round(&mut call));
        alone.push(b);
        beyond.push(b - a);
    }
    alone.sort_by(f64::total_cmp);
    beyond.sort_by(f64::total_cmp);
    let at = |v: &[f64], part: usize| v[ROUNDS * part / 4];
    println!(
        "{name:<36} {:6.2} ns  {:+6.2} ns  ({:+.2} .. {:+.2})",
        at(&alone, 2),
        at(&beyond, 2),
        at(&beyond, 1),
        at(&beyond, 3)
    );
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

/// Calls of a table entry.
fn entry<'a>(
    entry: Entry,
    form: *mut c_void,
    inputs: &'a [TensorView],
    outputs: &'a [TensorView],
) -> impl FnMut() + 'a {
    let entry = black_box(entry);
    let mut error = Error::EMPTY;
    many(move || {
        // SAFETY: the form is bound or not looked at, the views are the caller's.
        let status = unsafe {
            entry(
                form,
                &CallCtx::NONE,
                inputs.as_ptr(),
                inputs.len(),
                outputs.as_ptr(),
                outputs.len(),
                std::ptr::null(),
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

/// Calls through the loader.
fn safe<'a>(form: &'a BoundForm, x: &'a [f32; 4], y: &'a mut [f32; 4]) -> impl FnMut() + 'a {
    let inputs = [
        HostTensor::new(x, &[1, 4]).expect("fits"),
        HostTensor::ABSENT,
    ];
    let mut outputs = [HostTensorMut::new(y, &[1, 4]).expect("fits")];
    many(move || form.call(&inputs, &mut outputs, &mut []).expect("runs"))
}

/// Calls of the same Rust method without a boundary.
fn method<'a>(x: &'a [f32; 4], y: &'a mut [f32; 4]) -> impl FnMut() + 'a {
    let mut form: Box<dyn sdk::BoundForm> = black_box(Box::new(Direct));
    let inputs = [Tensor::from_f32(x, &[1, 4]).expect("fits"), Tensor::ABSENT];
    let mut outputs = [TensorMut::from_f32(y, &[1, 4]).expect("fits")];
    many(move || {
        form.call(&CallCtx::NONE, &inputs, &mut outputs, &mut [])
            .expect("runs");
    })
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

    let (x, mut y, mut z) = ([1.0_f32; 4], [0.0_f32; 4], [0.0_f32; 4]);
    let tensor = Tensor::from_f32(&x, &[1, 4]).expect("fits");
    let inputs = [*tensor.view(), TensorView::ABSENT];
    let outputs = {
        let y = TensorMut::from_f32(&mut y, &[1, 4]).expect("fits");
        [*y.as_tensor().view()]
    };
    let (inputs, outputs) = (&inputs[..], &outputs[..]);
    let function = || entry(direct, std::ptr::null_mut(), inputs, outputs);
    compare("C function, twice", function(), function());
    compare(
        "C door: table entry",
        function(),
        entry(c.raw_entry(), c.raw_form(), inputs, outputs),
    );
    compare("C door: loader's call", function(), safe(&c, &x, &mut z));
    let entry = |inputs, outputs| entry(rust.raw_entry(), rust.raw_form(), inputs, outputs);
    compare(
        "Rust door: table entry, no tensors",
        method(&x, &mut z),
        entry(&[], &[]),
    );
    compare(
        "Rust door: table entry",
        method(&x, &mut z),
        entry(inputs, outputs),
    );
    let mut other = [0.0_f32; 4];
    compare(
        "Rust door: loader's call",
        method(&x, &mut z),
        safe(&rust, &x, &mut other),
    );
}
