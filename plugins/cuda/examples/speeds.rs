//! How fast the forms of a built backend are on the GPU that is here: `speeds LIBRARY [--quick]`.
//!
//! Ceilings first: what a copy on the device moves, read and written, and what the largest products of each operand
//! reach. Then each form at decode, small and large rows, on each rung of its ladder, on random data: a round is one
//! recording of several calls, timed by the device's own events, that rotates through inputs and through as many bound
//! copies of the weights as no cache holds; medians of rounds, with the spread. Beside each: weights read a second and
//! the share of the copy, operations a second and the share of the products, and the ratio to bf16 through cublasLt at
//! the same rows. Where cublasLt does not run there is no ratio. Exits with 3 where there is no GPU to measure on.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use structures_loader::{
    row_capacity, BindSpec, BoundForm, DeviceMemory, DeviceTensor, Environment, HostTensor, Plugin,
    PluginDevice, PluginError, Queue, Registry, ScanMode, ScanOptions,
};
use structures_plugin_api::describe::BindParams;
use structures_plugin_api::DType;
use structures_plugin_cuda::context::Context;
use structures_plugin_cuda::presence;

/// Inputs that rounds rotate through, so that none stays in a cache because it is the only one.
const INPUTS: usize = 4;
const ROUNDS: usize = 9;
/// Bytes of weights that calls rotate through: several times a GPU's second-level cache.
const ROTATED: usize = 192 << 20;
/// Copies of weights at most.
const COPIES: usize = 12;
/// Bytes of weights from which a decode form has to reach its share of the copy.
const LARGE: usize = 256 << 20;

/// Sizes of one run.
#[derive(Clone, Copy)]
struct Sizes {
    rows: &'static [usize],
    /// `[D, F]` of the layer, and of one whose int8 weights are above [`LARGE`].
    layers: [[usize; 2]; 2],
    /// Rows, inputs and channels of a product that reaches what products reach.
    product: [usize; 3],
    copied: u64,
    calls: usize,
    rotated: usize,
}

const FULL: Sizes = Sizes {
    rows: &[1, 8, 64, 512, 1024, 2048, 4096],
    layers: [[4096, 14336], [8192, 28672]],
    product: [4096, 8192, 8192],
    copied: 2 << 30,
    calls: 20,
    rotated: ROTATED,
};

const QUICK: Sizes = Sizes {
    rows: &[1, 40],
    layers: [[64, 96], [64, 128]],
    product: [64, 64, 64],
    copied: 1 << 20,
    calls: 2,
    rotated: 1 << 14,
};

/// Forms with the rungs of their ladders.
const FORMS: [(&str, &[&str]); 3] = [
    ("bf16", &["cublaslt", "wgmma", "mma_sync"]),
    (
        "fp8_static",
        &["cublaslt_fast", "cublaslt", "wgmma", "mma_sync"],
    ),
    ("w8a16_static", &["row_stream"]),
];
const DECODE: &str = "w8a16_static";
/// Most rows of it.
const DECODE_ROWS: usize = 8;

struct Shape {
    structure: &'static str,
    span: &'static str,
    /// Slots with their dims.
    slots: Vec<(String, [usize; 2])>,
    variant: &'static [(&'static str, &'static str)],
    points: &'static [&'static str],
    inputs: Vec<String>,
    outputs: Vec<(String, usize)>,
    width: usize,
    dims: Vec<(String, u64)>,
    /// For decode forms alone.
    decode: bool,
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|n| (*n).to_string()).collect()
}

fn sized(list: &[(&str, usize)]) -> Vec<(String, u64)> {
    let one = |(s, n): &(&str, usize)| ((*s).to_string(), *n as u64);
    list.iter().map(one).collect()
}

fn ffn([d, f]: [usize; 2]) -> Shape {
    Shape {
        structure: "decoder_ffn",
        span: "ffn",
        slots: vec![
            ("w_gate".into(), [d, f]),
            ("w_up".into(), [d, f]),
            ("w_down".into(), [f, d]),
        ],
        variant: &[
            ("activation", "silu"),
            ("norm_weight_mode", "direct"),
            ("conditioning", "none"),
        ],
        points: &["x_after_norm", "act_after_mul"],
        inputs: names(&["x_after_norm"]),
        outputs: vec![("y".into(), d)],
        width: d,
        dims: sized(&[("D", d), ("F", f)]),
        decode: false,
    }
}

fn projection(k: usize, n: usize) -> Shape {
    Shape {
        structure: "linear_proj",
        span: "proj",
        slots: vec![("w".into(), [k, n])],
        variant: &[("bias", "none"), ("epilogue", "none"), ("in_dtype", "bf16")],
        points: &["x"],
        inputs: names(&["x", "residual"]),
        outputs: vec![("y".into(), n)],
        width: k,
        dims: sized(&[("K", k), ("N", n)]),
        decode: false,
    }
}

fn pack(d: usize) -> Shape {
    let kv = d / 4;
    Shape {
        structure: "qkv_pack",
        span: "pack",
        slots: vec![
            ("w_0".into(), [d, d]),
            ("w_1".into(), [d, kv]),
            ("w_2".into(), [d, kv]),
        ],
        variant: &[("bind", "leaf"), ("in_dtype", "bf16_fused_quant")],
        points: &["x"],
        inputs: names(&["x"]),
        outputs: vec![("y_0".into(), d), ("y_1".into(), kv), ("y_2".into(), kv)],
        width: d,
        dims: sized(&[("K", d)]),
        decode: false,
    }
}

fn shapes(sizes: &Sizes) -> Vec<Shape> {
    let [layer, large] = sizes.layers;
    let decode = |shape| Shape {
        decode: true,
        ..shape
    };
    vec![
        // What has a figure to reach comes first.
        ffn(layer),
        decode(ffn(large)),
        decode(projection(large[0], 2 * large[1])),
        projection(layer[0], layer[0]),
        pack(layer[0]),
    ]
}

impl Shape {
    fn title(&self) -> String {
        let dims: Vec<String> = self.dims.iter().map(|(s, n)| format!("{s}={n}")).collect();
        format!("{} {}", self.structure, dims.join(" "))
    }

    fn elements(&self) -> usize {
        self.slots.iter().map(|(_, [k, n])| k * n).sum()
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(library) = args.first() else {
        eprintln!("usage: speeds LIBRARY [--quick]");
        return ExitCode::from(2);
    };
    let quick = args.iter().any(|a| a == "--quick");
    match presence::gpus() {
        Ok(_) => {}
        Err(failure) => {
            eprintln!("{failure}");
            return ExitCode::from(3);
        }
    }
    match measured(Path::new(library), quick) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn measured(library: &Path, quick: bool) -> Result<(), String> {
    let sizes = if quick { &QUICK } else { &FULL };
    let plugin = loaded(library)?;
    let said = |e: PluginError| e.to_string();
    let devices = plugin.devices().map_err(said)?;
    let info = devices.first().ok_or("no device")?;
    let index = info.index;
    let device = plugin.device(index).map_err(said)?;
    let queue = device.queue().map_err(said)?;
    let bench = Bench {
        plugin: plugin.clone(),
        device,
        queue,
        index,
        sizes,
    };
    let copy = copied(sizes.copied, index).map_err(|e| e.to_string())?;
    println!(
        "{} ({}): a copy moves {:.0} GB/s, read and written",
        info.name,
        info.arch,
        copy / 1e9
    );
    let [rows, k, n] = sizes.product;
    let mut products = BTreeMap::new();
    for form in ["bf16", "fp8_static"] {
        let shape = projection(k, n);
        let rung = if form == "bf16" {
            "cublaslt"
        } else {
            "cublaslt_fast"
        };
        let timed = bench
            .bound(&shape, form, rung, rows)
            .and_then(|forms| bench.timed(&shape, &forms, rows));
        match timed {
            Ok(time) => {
                let flops = 2.0 * (rows * k * n) as f64 / (time.us * 1e-6);
                println!(
                    "{form} through {rung}, {rows}x{k}x{n}: {:.0} TFLOP/s",
                    flops / 1e12
                );
                products.insert(form, flops);
            }
            Err(e) => println!("{form} through {rung}, {rows}x{k}x{n}: {e}"),
        }
    }
    println!(
        "{:<12} {:<13} {:<14}{:>5}{:>10}{:>8}{:>10}{:>9}{:>10}{:>12}{:>7}",
        "structure",
        "form",
        "rung",
        "rows",
        "us",
        "spread",
        "GB/s of w",
        "of copy",
        "TFLOP/s",
        "of products",
        "x bf16"
    );
    let mut musts = Musts::of(sizes);
    for shape in shapes(sizes) {
        println!("{}", shape.title());
        // By rows: what bf16 takes through cublasLt.
        let mut base: BTreeMap<usize, f64> = BTreeMap::new();
        for (form, rungs) in FORMS {
            for rung in rungs {
                let decode = form == DECODE;
                if shape.decode && !decode && *rung != "cublaslt" {
                    continue;
                }
                let served = |rows: &&usize| **rows <= DECODE_ROWS || !(decode || shape.decode);
                let all: Vec<usize> = sizes.rows.iter().filter(served).copied().collect();
                let most = all.iter().copied().max().unwrap_or(1);
                let forms = match bench.bound(&shape, form, rung, most) {
                    Ok(forms) => forms,
                    Err(e) => {
                        println!("{:<12} {form:<13} {rung:<14} {e}", shape.structure);
                        continue;
                    }
                };
                for rows in all {
                    let time = match bench.timed(&shape, &forms, rows) {
                        Ok(time) => time,
                        Err(e) => {
                            println!("{:<12} {form:<13} {rung:<14}{rows:>5} {e}", shape.structure);
                            continue;
                        }
                    };
                    if (form, *rung) == ("bf16", "cublaslt") {
                        base.insert(rows, time.us);
                    }
                    let ratio = base.get(&rows).map(|base| base / time.us);
                    let row = Row {
                        bytes: shape.elements() * if form == "bf16" { 2 } else { 1 },
                        flops: 2.0 * (shape.elements() * rows) as f64 / (time.us * 1e-6),
                        time,
                        ratio,
                    };
                    let share = row.bytes as f64 / (row.time.us * 1e-6) / copy;
                    musts.take(&shape, form, rows, &row, share);
                    row.print(
                        (shape.structure, form, rung, rows),
                        share,
                        products.get(form),
                    );
                }
            }
        }
    }
    for rows in sizes.rows {
        let (form, structure) = ("layer", "norm_fused");
        match bench.norm(sizes.layers[0][0], *rows) {
            Ok((time, bytes)) => {
                let moved = bytes as f64 / (time.us * 1e-6);
                println!(
                    "{structure:<12} {form:<13} {:<14}{rows:>5}{:>10.1}{:>8.2}{:>10.0}{:>9.2}",
                    "plain",
                    time.us,
                    time.spread,
                    moved / 1e9,
                    moved / copy
                );
            }
            Err(e) => println!("{structure:<12} {form:<13} {rows:>5} {e}"),
        }
    }
    musts.print();
    Ok(())
}

/// Median of rounds, and how far apart the quartiles are, as a share of it.
#[derive(Clone, Copy)]
struct Time {
    us: f64,
    spread: f64,
}

struct Row {
    bytes: usize,
    flops: f64,
    time: Time,
    ratio: Option<f64>,
}

impl Row {
    fn print(
        &self,
        (structure, form, rung, rows): (&str, &str, &str, usize),
        share: f64,
        product: Option<&f64>,
    ) {
        let or = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.2}"));
        println!(
            "{structure:<12} {form:<13} {rung:<14}{rows:>5}{:>10.1}{:>8.2}{:>10.0}{share:>9.2}{:>10.1}{:>12}{:>7}",
            self.time.us,
            self.time.spread,
            self.bytes as f64 / (self.time.us * 1e3),
            self.flops / 1e12,
            or(product.map(|p| self.flops / p)),
            or(self.ratio)
        );
    }
}

/// What has a figure to reach; nothing is said of it before all of it was measured.
#[derive(Default)]
struct Musts {
    /// By rows: the best rung's ratio of the FP8 FFN to bf16.
    fp8: BTreeMap<usize, Option<f64>>,
    /// By shape and rows: the share of the copy of a decode form.
    decode: BTreeMap<(String, usize), Option<f64>>,
}

impl Musts {
    fn of(sizes: &Sizes) -> Self {
        let mut all = Self::default();
        for shape in shapes(sizes) {
            for rows in sizes.rows {
                if shape.elements() > LARGE && *rows <= DECODE_ROWS {
                    all.decode.insert((shape.title(), *rows), None);
                }
                if shape.structure == "decoder_ffn" && !shape.decode && *rows >= 512 {
                    all.fp8.insert(*rows, None);
                }
            }
        }
        all
    }

    fn take(&mut self, shape: &Shape, form: &str, rows: usize, row: &Row, share: f64) {
        if let Some(kept) = self.decode.get_mut(&(shape.title(), rows)) {
            if form == DECODE {
                *kept = Some(share);
            }
        }
        let ffn = (shape.structure, form) == ("decoder_ffn", "fp8_static");
        if let (true, Some(best), Some(ratio)) = (ffn, self.fp8.get_mut(&rows), row.ratio) {
            *best = Some(best.map_or(ratio, |best| best.max(ratio)));
        }
    }

    fn print(&self) {
        fn worst<'a>(mut all: impl Iterator<Item = &'a Option<f64>>) -> Option<f64> {
            let first = (*all.next()?)?;
            all.try_fold(first, |worst, next| Some(worst.min((*next)?)))
        }
        for (what, found, needed) in [
            (
                "FP8 decoder_ffn to bf16 through cublaslt, 512 rows and more",
                worst(self.fp8.values()),
                1.6,
            ),
            (
                "decode forms above 256 MB of weights, share of the copy",
                worst(self.decode.values()),
                0.85,
            ),
        ] {
            match found {
                Some(found) => {
                    let word = if found >= needed { "reached" } else { "missed" };
                    println!("{what}: at least {found:.2}, {needed} {word}");
                }
                None => println!("{what}: not measured"),
            }
        }
    }
}

fn loaded(library: &Path) -> Result<Plugin, String> {
    let dir = std::env::temp_dir().join(format!("speeds-{}", std::process::id()));
    let plugins = dir.join("plugins");
    let io = |e: std::io::Error| format!("{}: {e}", dir.display());
    std::fs::create_dir_all(&plugins).map_err(io)?;
    std::fs::copy(library, plugins.join("gpu.so"))
        .map_err(|e| format!("{}: {e}", library.display()))?;
    let mut options = ScanOptions::new(vec![plugins]);
    options.environment = Environment {
        cache_dir: Some(dir.join("cache")),
        ..Environment::default()
    };
    options.mode = ScanMode::InProcess;
    let registry = Registry::scan(&options).map_err(|e| e.to_string())?;
    let found = registry.loaded().first().cloned();
    let _ = std::fs::remove_dir_all(&dir);
    found.ok_or_else(|| format!("{}: not loaded", library.display()))
}

fn noise(n: usize, seed: &mut u32) -> Vec<f32> {
    let mut next = || {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 17;
        *seed ^= *seed << 5;
        *seed as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Bytes read and written a second by a copy from one place on the device to another.
fn copied(bytes: u64, index: u32) -> Result<f64, structures_plugin_api::sdk::Failure> {
    use structures_plugin_api::sdk::Device;
    let gpus = presence::gpus()?;
    let gpu = gpus.into_iter().find(|gpu| gpu.info().index == index);
    let none = || structures_plugin_api::sdk::Failure::refused("no_device", "no device");
    let context = Context::open(&gpu.ok_or_else(none)?)?;
    let (from, to) = (context.buffer(bytes)?, context.buffer(bytes)?);
    let mut times = Vec::new();
    for round in 0..=ROUNDS {
        context.mark(0)?;
        context.copy_within(0, &to, &from)?;
        let seconds = f64::from(context.elapsed(0)?) * 1e-3;
        if round > 0 {
            times.push(seconds);
        }
    }
    Ok(2.0 * bytes as f64 / median(&mut times))
}

struct Bench<'s> {
    plugin: Plugin,
    device: PluginDevice,
    queue: Queue,
    index: u32,
    sizes: &'s Sizes,
}

impl Bench<'_> {
    /// A form on one rung, bound as often as its weights have to be rotated through.
    fn bound(
        &self,
        shape: &Shape,
        form: &str,
        rung: &str,
        rows: usize,
    ) -> Result<Vec<BoundForm>, String> {
        let wrong = |e: structures_loader::LoaderError| e.to_string();
        let mut seed = 0x9e37_79b9;
        let stored: Vec<Vec<f32>> = shape
            .slots
            .iter()
            .map(|(_, [k, n])| {
                // Activations stay of one size from layer to layer, so codes are spread as a model's are.
                let by = 1.0 / (*k as f32).sqrt();
                let values = noise(k * n, &mut seed).into_iter();
                values.map(|v| v * by).collect()
            })
            .collect();
        let mut weights = Vec::new();
        for ((name, dims), values) in shape.slots.iter().zip(&stored) {
            weights.push((name.as_str(), HostTensor::new(values, dims).map_err(wrong)?));
        }
        let names: Vec<String> = shape
            .points
            .iter()
            .map(|p| format!("{p}|amax|tensor"))
            .collect();
        let amax = [1.0_f32];
        let mut statistics = Vec::new();
        for name in &names {
            statistics.push((name.as_str(), HostTensor::new(&amax, &[]).map_err(wrong)?));
        }
        let pair = |(a, v): &(&str, &str)| ((*a).to_string(), (*v).to_string());
        let params = BindParams {
            structure: shape.structure.into(),
            version: 1,
            variant: shape.variant.iter().map(pair).collect(),
            params: BTreeMap::from([("rung".to_string(), rung.into())]),
            dims: shape.dims.iter().cloned().collect(),
            inputs: shape.inputs.clone(),
            outputs: shape.outputs.iter().map(|(name, _)| name.clone()).collect(),
            ..BindParams::default()
        };
        let copies = self
            .sizes
            .rotated
            .div_ceil(shape.elements())
            .clamp(1, COPIES);
        let mut forms = Vec::new();
        for _ in 0..copies {
            let bound = self.plugin.bind(&BindSpec {
                form,
                device: self.index,
                span: shape.span,
                weights: &weights,
                statistics: &statistics,
                params: &params,
                contract: row_capacity(DType::Bf16, rows as u64),
            });
            forms.push(bound.map_err(|e| format!("{}: {}", e.code, e.message))?);
        }
        Ok(forms)
    }

    /// A call of so many rows.
    fn timed(&self, shape: &Shape, forms: &[BoundForm], rows: usize) -> Result<Time, String> {
        let said = |e: PluginError| format!("{}: {}", e.code, e.message);
        let mut seed = 0x51ed_270b;
        let (device, queue) = (&self.device, &self.queue);
        let mut given: Vec<DeviceMemory> = Vec::new();
        for _ in 0..INPUTS {
            let values = noise(rows * shape.width, &mut seed);
            // The upper half of an f32 is a bf16.
            let bits: Vec<u8> = values
                .iter()
                .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
                .collect();
            let mut memory = device.alloc(bits.len() as u64, 256).map_err(said)?;
            memory.copy_in(Some(queue), 0, &bits).map_err(said)?;
            given.push(memory);
        }
        let mut made = Vec::new();
        for (_, width) in &shape.outputs {
            made.push(device.alloc((2 * rows * width) as u64, 256).map_err(said)?);
        }
        let calls = self.sizes.calls.max(forms.len());
        let wrong = |e: structures_loader::LoaderError| e.to_string();
        let call = |at: usize| -> Result<(), String> {
            let x = given[at % INPUTS].tensor(DType::Bf16, &[rows, shape.width]);
            let mut inputs = vec![x.map_err(wrong)?];
            inputs.resize_with(shape.inputs.len(), || DeviceTensor::ABSENT);
            let mut outputs = Vec::new();
            for (memory, (_, width)) in made.iter_mut().zip(&shape.outputs) {
                let y = memory.tensor_mut(DType::Bf16, &[rows, *width]);
                outputs.push(y.map_err(wrong)?);
            }
            let form = &forms[at % forms.len()];
            let called = form.call_on(device, Some(queue), &inputs, &mut outputs, &mut []);
            called.map_err(said)
        };
        self.rounds(calls, call)
    }

    /// A norm of so many rows of a width, and the bytes it reads and writes.
    fn norm(&self, width: usize, rows: usize) -> Result<(Time, usize), String> {
        let said = |e: PluginError| format!("{}: {}", e.code, e.message);
        let wrong = |e: structures_loader::LoaderError| e.to_string();
        let axis = |a: &str, v: &str| (a.to_string(), v.to_string());
        let params = BindParams {
            structure: "norm_fused".into(),
            version: 1,
            variant: [axis("norm", "layer")].into(),
            params: BTreeMap::from([("eps".to_string(), 1e-5.into())]),
            dims: BTreeMap::from([("D".to_string(), width as u64)]),
            inputs: vec!["x".into()],
            outputs: vec!["y".into()],
            ..BindParams::default()
        };
        let w = vec![1.0_f32; width];
        let view = || HostTensor::new(&w, &[width]).map_err(wrong);
        let bound = self.plugin.bind(&BindSpec {
            form: "layer",
            device: self.index,
            span: "norm",
            weights: &[("w", view()?), ("b", view()?)],
            statistics: &[],
            params: &params,
            contract: row_capacity(DType::Bf16, rows as u64),
        });
        let form = bound.map_err(said)?;
        let (device, queue) = (&self.device, &self.queue);
        let bytes = 2 * rows * width;
        // As many pairs as no cache holds.
        let pairs = self.sizes.rotated.div_ceil(2 * bytes).clamp(1, 32);
        let (mut given, mut made) = (Vec::new(), Vec::new());
        for pair in 0..pairs {
            let values = noise(rows * width, &mut (pair as u32 + 1));
            let bits = values.iter().map(|v| (v.to_bits() >> 16) as u16);
            let bits: Vec<u8> = bits.flat_map(u16::to_le_bytes).collect();
            let mut x = device.alloc(bytes as u64, 256).map_err(said)?;
            x.copy_in(Some(queue), 0, &bits).map_err(said)?;
            given.push(x);
            made.push(device.alloc(bytes as u64, 256).map_err(said)?);
        }
        let dims = [rows, width];
        let call = |at: usize| -> Result<(), String> {
            let input = given[at % pairs]
                .tensor(DType::Bf16, &dims)
                .map_err(wrong)?;
            let output = made[at % pairs].tensor_mut(DType::Bf16, &dims);
            let mut outputs = [output.map_err(wrong)?];
            let called = form.call_on(device, Some(queue), &[input], &mut outputs, &mut []);
            called.map_err(said)
        };
        let time = self.rounds(self.sizes.calls.max(pairs), call)?;
        Ok((time, 2 * bytes))
    }

    /// Rounds of one recording of calls.
    fn rounds(
        &self,
        calls: usize,
        mut call: impl FnMut(usize) -> Result<(), String>,
    ) -> Result<Time, String> {
        let said = |e: PluginError| format!("{}: {}", e.code, e.message);
        let (device, queue) = (&self.device, &self.queue);
        // Once outside: what is chosen at a first call is chosen then.
        call(0)?;
        let (noted, recording) = device
            .record(Some(queue), || (0..calls).try_for_each(&mut call))
            .map_err(said)?;
        noted?;
        let recording = recording.map_err(said)?;
        let mut times = Vec::new();
        // The first round warms up.
        for round in 0..=ROUNDS {
            queue.mark().map_err(said)?;
            recording.launch(Some(queue)).map_err(said)?;
            let us = f64::from(queue.elapsed().map_err(said)?) * 1e3 / calls as f64;
            if round > 0 {
                times.push(us);
            }
        }
        let us = median(&mut times);
        let quartile = |part: usize| times[times.len() * part / 4];
        Ok(Time {
            us,
            spread: (quartile(3) - quartile(1)) / us,
        })
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
