//! How fast the forms of a built backend are on the GPU that is here: `speeds LIBRARY [--quick]`.
//!
//! Each form at decode, small and large rows, on random data, its calls timed by the device's own events, medians of
//! rounds that rotate through several inputs. Beside each: bytes of weights a second, operations a second, and the bf16
//! form at the same shape, which runs cublasLt where that loads. What a pass over rows moves, each value read and written
//! once, is measured first; a row says the share of it that reading the weights once takes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use structures_loader::{
    row_capacity, BindSpec, DeviceMemory, DeviceTensor, Environment, HostTensor, Plugin,
    PluginError, Registry, ScanMode, ScanOptions,
};
use structures_plugin_api::describe::BindParams;
use structures_plugin_api::DType;

/// Inputs that rounds rotate through, so that none stays in a cache because it is the only one.
const INPUTS: usize = 4;
const ROUNDS: usize = 9;

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
}

fn shapes(d: usize, f: usize) -> Vec<Shape> {
    let text = |names: &[&str]| names.iter().map(|n| (*n).to_string()).collect::<Vec<_>>();
    let dims = |list: &[(&str, usize)]| {
        list.iter()
            .map(|(s, n)| ((*s).to_string(), *n as u64))
            .collect()
    };
    let kv = d / 4;
    vec![
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
            inputs: text(&["x_after_norm"]),
            outputs: vec![("y".into(), d)],
            width: d,
            dims: dims(&[("D", d), ("F", f)]),
        },
        Shape {
            structure: "linear_proj",
            span: "proj",
            slots: vec![("w".into(), [d, d])],
            variant: &[("bias", "none"), ("epilogue", "none"), ("in_dtype", "bf16")],
            points: &["x"],
            inputs: text(&["x", "residual"]),
            outputs: vec![("y".into(), d)],
            width: d,
            dims: dims(&[("K", d), ("N", d)]),
        },
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
            inputs: text(&["x"]),
            outputs: vec![("y_0".into(), d), ("y_1".into(), kv), ("y_2".into(), kv)],
            width: d,
            dims: dims(&[("K", d)]),
        },
    ]
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(library) = args.first() else {
        eprintln!("usage: speeds LIBRARY [--quick]");
        return ExitCode::from(2);
    };
    let quick = args.iter().any(|a| a == "--quick");
    match measured(Path::new(library), quick) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn measured(library: &Path, quick: bool) -> Result<(), String> {
    let plugin = loaded(library)?;
    let said = |e: PluginError| e.to_string();
    let info = plugin
        .devices()
        .map_err(said)?
        .first()
        .cloned()
        .ok_or("no device")?;
    let bandwidth = pass_bandwidth(&plugin, info.index, quick).map_err(said)?;
    println!(
        "{} ({}): a pass over rows moves {:.0} GB/s",
        info.name,
        info.arch,
        bandwidth / 1e9
    );
    let header = [
        "structure",
        "form",
        "rows",
        "us",
        "GB/s of weights",
        "share of pass",
        "TFLOP/s",
        "x bf16",
    ];
    println!(
        "{:<13}{:<15}{:>6}{:>10}{:>17}{:>15}{:>9}{:>8}",
        header[0], header[1], header[2], header[3], header[4], header[5], header[6], header[7]
    );
    let (d, f) = if quick { (64, 96) } else { (4096, 14336) };
    let rows: &[usize] = if quick {
        &[1, 40]
    } else {
        &[1, 8, 64, 512, 4096]
    };
    for shape in shapes(d, f) {
        for rows in rows.iter().copied() {
            let mut bf16 = None;
            for form in ["bf16", "fp8_static", "w8a16_static"] {
                if form == "w8a16_static" && rows > 8 {
                    continue;
                }
                let us = match timed(&plugin, info.index, &shape, form, rows, quick) {
                    Ok(us) => us,
                    Err(e) => {
                        println!("{:<13}{form:<15}{rows:>6}  {e}", shape.structure);
                        continue;
                    }
                };
                let base = *bf16.get_or_insert(us);
                let elements: f64 = shape.slots.iter().map(|(_, [k, n])| (k * n) as f64).sum();
                let size = if form == "bf16" { 2.0 } else { 1.0 };
                let bytes = elements * size / (us * 1e-6);
                println!(
                    "{:<13}{form:<15}{rows:>6}{us:>10.1}{:>17.0}{:>15.2}{:>9.1}{:>8.2}",
                    shape.structure,
                    bytes / 1e9,
                    bytes / bandwidth,
                    2.0 * elements * rows as f64 / (us * 1e6),
                    base / us
                );
            }
        }
    }
    Ok(())
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

/// Bytes read and written a second by a norm over many rows: the ceiling of whatever streams memory.
fn pass_bandwidth(plugin: &Plugin, index: u32, quick: bool) -> Result<f64, PluginError> {
    let (rows, width) = if quick { (8, 64) } else { (65536, 4096) };
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
    let view = || HostTensor::new(&w, &[width]);
    let (Ok(one), Ok(two)) = (view(), view()) else {
        return Ok(1.0);
    };
    let form = plugin.bind(&BindSpec {
        form: "layer",
        device: index,
        span: "norm",
        weights: &[("w", one), ("b", two)],
        statistics: &[],
        params: &params,
        contract: row_capacity(DType::F32, rows as u64),
    })?;
    let device = plugin.open_device(index)?;
    let queue = device.queue()?;
    let bytes = (4 * rows * width) as u64;
    let (x, mut y) = (device.alloc(bytes, 256)?, device.alloc(bytes, 256)?);
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let Ok(input) = x.tensor(DType::F32, &[rows, width]) else {
            return Ok(1.0);
        };
        let Ok(output) = y.tensor_mut(DType::F32, &[rows, width]) else {
            return Ok(1.0);
        };
        queue.mark()?;
        form.call_on(&device, Some(&queue), &[input], &mut [output], &mut [])?;
        times.push(f64::from(queue.elapsed()?) * 1e-3);
    }
    Ok(2.0 * bytes as f64 / median(&mut times))
}

/// Microseconds of one call.
fn timed(
    plugin: &Plugin,
    index: u32,
    shape: &Shape,
    form: &str,
    rows: usize,
    quick: bool,
) -> Result<f64, String> {
    let said = |e: PluginError| format!("{}: {}", e.code, e.message);
    let wrong = |e: structures_loader::LoaderError| e.to_string();
    let mut seed = 0x9e37_79b9;
    let stored: Vec<Vec<f32>> = shape
        .slots
        .iter()
        .map(|(_, [k, n])| noise(k * n, &mut seed))
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
    let amax = [64.0_f32];
    let mut statistics = Vec::new();
    for name in &names {
        statistics.push((name.as_str(), HostTensor::new(&amax, &[]).map_err(wrong)?));
    }
    let pair = |(a, v): &(&str, &str)| ((*a).to_string(), (*v).to_string());
    let params = BindParams {
        structure: shape.structure.into(),
        version: 1,
        variant: shape.variant.iter().map(pair).collect(),
        dims: shape.dims.iter().cloned().collect(),
        inputs: shape.inputs.clone(),
        outputs: shape.outputs.iter().map(|(name, _)| name.clone()).collect(),
        ..BindParams::default()
    };
    let bound = plugin
        .bind(&BindSpec {
            form,
            device: index,
            span: shape.span,
            weights: &weights,
            statistics: &statistics,
            params: &params,
            contract: row_capacity(DType::Bf16, rows as u64),
        })
        .map_err(said)?;
    let device = plugin.open_device(index).map_err(said)?;
    let queue = device.queue().map_err(said)?;
    let mut given: Vec<DeviceMemory> = Vec::new();
    for _ in 0..INPUTS {
        let values = noise(rows * shape.width, &mut seed);
        // The upper half of an f32 is a bf16.
        let bits: Vec<u8> = values
            .iter()
            .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
            .collect();
        let mut memory = device.alloc(bits.len() as u64, 256).map_err(said)?;
        memory.copy_in(Some(&queue), 0, &bits).map_err(said)?;
        given.push(memory);
    }
    let mut made = Vec::new();
    for (_, width) in &shape.outputs {
        made.push(device.alloc((2 * rows * width) as u64, 256).map_err(said)?);
    }
    let calls = if quick { 1 } else { 20 };
    let mut times = Vec::new();
    for round in 0..=ROUNDS {
        queue.mark().map_err(said)?;
        for call in 0..calls {
            let x = &given[(round + call) % INPUTS];
            let mut inputs = vec![x.tensor(DType::Bf16, &[rows, shape.width]).map_err(wrong)?];
            inputs.resize_with(shape.inputs.len(), || DeviceTensor::ABSENT);
            let mut outputs = Vec::new();
            for (memory, (_, width)) in made.iter_mut().zip(&shape.outputs) {
                outputs.push(
                    memory
                        .tensor_mut(DType::Bf16, &[rows, *width])
                        .map_err(wrong)?,
                );
            }
            bound
                .call_on(&device, Some(&queue), &inputs, &mut outputs, &mut [])
                .map_err(said)?;
        }
        let us = f64::from(queue.elapsed().map_err(said)?) * 1e3 / calls as f64;
        // The first round warms up.
        if round > 0 {
            times.push(us);
        }
    }
    Ok(median(&mut times))
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
