//! A seat in miniature: binds and calls a form on plain vectors, and computes what the structure's
//! definition says, in f64, on weights and activations rounded as the form declares.

#![allow(dead_code)] // each test binary uses its own part

use std::collections::{BTreeMap, BTreeSet};

use structures_plugin_api::abi::{CallCtx, Contract};
use structures_plugin_api::describe::{BindParams, FormDecl, WeightFormat};
use structures_plugin_api::formats::{
    amax, bf16_to_f32, f32_to_bf16, round_bf16, round_weights_jointly, ActivationRounding,
    WeightMatrix,
};
use structures_plugin_api::{Backend, BindRequest, DType, Failure, Host, Tensor, TensorMut};
use structures_plugin_portable::Portable;

/// A row-major tensor.
#[derive(Clone, Debug)]
pub struct Values {
    pub dims: Vec<usize>,
    pub data: Vec<f32>,
}

impl Values {
    pub fn new(dims: &[usize], data: Vec<f32>) -> Self {
        assert_eq!(dims.iter().product::<usize>(), data.len());
        Values {
            dims: dims.to_vec(),
            data,
        }
    }

    pub fn noise(dims: &[usize], seed: u64, size: f32) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let data = (0..dims.iter().product::<usize>()).map(|_| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
            (bits as f32 / (1_u32 << 23) as f32 - 1.0) * size
        });
        Values::new(dims, data.collect())
    }

    pub fn cols(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }
}

/// One seat: what a host would hand to `bind` and `call`.
#[derive(Clone, Debug)]
pub struct Case {
    pub structure: String,
    pub span: String,
    pub dtype: DType,
    pub variant: BTreeMap<String, String>,
    pub params: BTreeMap<String, serde_json::Value>,
    pub inputs: Vec<(String, Option<Values>)>,
    pub weights: Vec<(String, Option<Values>)>,
    /// Name -> dims.
    pub outputs: Vec<(String, Vec<usize>)>,
    /// Point -> amax.
    pub amax: BTreeMap<String, f32>,
    /// Point -> content.
    pub content: BTreeMap<String, Values>,
    /// Symbol -> size.
    pub dims: BTreeMap<String, u64>,
    /// Inputs that are f32 whatever the boundary is.
    pub wide: BTreeSet<String>,
    /// Inputs that are shown at these dims, repeated by strides of 0.
    pub stretched: BTreeMap<String, Vec<i64>>,
}

impl Case {
    pub fn axis(&self, axis: &str) -> &str {
        self.variant.get(axis).map_or("", String::as_str)
    }

    pub fn input(&self, name: &str) -> Option<&Values> {
        self.inputs
            .iter()
            .find(|(own, _)| own == name)
            .and_then(|(_, v)| v.as_ref())
    }

    pub fn weight(&self, name: &str) -> Option<&Values> {
        self.weights
            .iter()
            .find(|(own, _)| own == name)
            .and_then(|(_, v)| v.as_ref())
    }

    pub fn set(&mut self, axis: &str, value: &str) {
        self.variant.insert(axis.into(), value.into());
    }
}

/// The declaration of a form.
pub fn declaration(structure: &str, form: &str) -> Option<FormDecl> {
    let description = Portable::description();
    description.form(structure, form).cloned()
}

/// Binds and calls once. Weights are shown once as they lie and once through swapped strides.
pub fn run(form: &str, case: &Case, swapped: bool) -> Result<Vec<Vec<f32>>, Failure> {
    let lead = |dims: &Vec<usize>| dims.iter().rev().skip(1).product::<usize>();
    let given = case.inputs.iter().filter_map(|(_, v)| v.as_ref());
    let dims = given
        .map(|v| &v.dims)
        .chain(case.outputs.iter().map(|o| &o.1));
    let rows = dims.map(lead).max().unwrap_or(1);
    let contract = Contract::capacity(case.dtype, rows as u64);
    let newest = declaration(&case.structure, form).and_then(|d| d.spec_versions.last().copied());
    let params = BindParams {
        structure: case.structure.clone(),
        version: newest.unwrap_or(1),
        variant: case.variant.clone(),
        params: case.params.clone(),
        dims: case.dims.clone(),
        inputs: case.inputs.iter().map(|(name, _)| name.clone()).collect(),
        outputs: case.outputs.iter().map(|(name, _)| name.clone()).collect(),
        states: Vec::new(),
        packed: BTreeMap::new(),
        scheme: BTreeMap::new(),
        wires: BTreeMap::new(),
        kept: None,
    };
    let stored: Vec<Stored> = case
        .weights
        .iter()
        .map(|(_, v)| Stored::new(v.as_ref(), case.dtype, swapped))
        .collect();
    let names: Vec<String> = case
        .amax
        .keys()
        .map(|p| format!("{p}|amax|tensor"))
        .collect();
    let values: Vec<[f32; 1]> = case.amax.values().map(|v| [*v]).collect();
    let named = |p: &String| format!("{p}|content|tensor");
    let contents: Vec<String> = case.content.keys().map(named).collect();
    let mut request = BindRequest::new(form, &case.span, params, &contract);
    for ((name, _), stored) in case.weights.iter().zip(&stored) {
        request = request.with_weight(name, stored.tensor());
    }
    for (name, value) in names.iter().zip(&values) {
        request = request.with_statistic(name, Tensor::from_f32(value, &[])?);
    }
    for (name, content) in contents.iter().zip(case.content.values()) {
        request = request.with_statistic(name, Tensor::from_f32(&content.data, &content.dims)?);
    }
    let backend = Portable::open(Host::detached())?;
    let mut bound = backend.bind(&request)?;
    drop(request);
    drop(stored);
    let packs = case.weights.iter().any(|(_, v)| v.is_some());
    assert!(bound.facts().packed_bytes > 0 || !packs);

    let inputs: Vec<Stored> = case
        .inputs
        .iter()
        .map(|(name, v)| {
            let dtype = match case.wide.contains(name) {
                true => DType::F32,
                false => case.dtype,
            };
            Stored::new(v.as_ref(), dtype, false)
        })
        .collect();
    let mut inputs: Vec<Tensor<'_>> = inputs.iter().map(Stored::tensor).collect();
    for (tensor, (name, _)) in inputs.iter_mut().zip(&case.inputs) {
        if let Some(dims) = case.stretched.get(name) {
            *tensor = tensor.broadcast_to(dims)?;
        }
    }
    // Poisoned, so that what the form does not write is seen; twice, so that a call leaves nothing.
    let mut out = Vec::new();
    for _ in 0..2 {
        let mut floats: Vec<Vec<f32>> = case
            .outputs
            .iter()
            .map(|(_, d)| vec![f32::NAN; d.iter().product()])
            .collect();
        let mut bits: Vec<Vec<u16>> = floats
            .iter()
            .map(|data| vec![f32_to_bf16(f32::NAN); data.len()])
            .collect();
        let mut outputs = Vec::new();
        for (((_, dims), floats), bits) in case.outputs.iter().zip(&mut floats).zip(&mut bits) {
            outputs.push(match case.dtype {
                DType::Bf16 => TensorMut::from_bf16(bits, dims)?,
                _ => TensorMut::from_f32(floats, dims)?,
            });
        }
        bound.call(&CallCtx::NONE, &inputs, &mut outputs, &mut [])?;
        drop(outputs);
        if case.dtype == DType::Bf16 {
            let widen = |bits: &Vec<u16>| bits.iter().map(|b| bf16_to_f32(*b)).collect();
            floats = bits.iter().map(widen).collect();
        }
        assert!(out.is_empty() || out == floats, "two calls differ");
        out = floats;
    }
    Ok(out)
}

/// Memory of one tensor in the boundary dtype.
struct Stored {
    dims: Vec<usize>,
    floats: Vec<f32>,
    bits: Vec<u16>,
    swapped: bool,
    absent: bool,
}

impl Stored {
    fn new(values: Option<&Values>, dtype: DType, swapped: bool) -> Self {
        let Some(values) = values else {
            let (dims, floats, bits) = (Vec::new(), Vec::new(), Vec::new());
            return Stored {
                dims,
                floats,
                bits,
                swapped: false,
                absent: true,
            };
        };
        let swapped = swapped && values.dims.len() == 2;
        let mut dims = values.dims.clone();
        let mut floats = values.data.clone();
        if swapped {
            let (rows, cols) = (dims[0], dims[1]);
            floats = (0..floats.len())
                .map(|i| values.data[i % rows * cols + i / rows])
                .collect();
            dims.reverse();
        }
        let bits = match dtype {
            DType::Bf16 => floats.iter().map(|v| f32_to_bf16(*v)).collect(),
            _ => Vec::new(),
        };
        Stored {
            dims,
            floats,
            bits,
            swapped,
            absent: false,
        }
    }

    fn tensor(&self) -> Tensor<'_> {
        if self.absent {
            return Tensor::ABSENT;
        }
        let tensor = match self.bits.is_empty() {
            true => Tensor::from_f32(&self.floats, &self.dims),
            false => Tensor::from_bf16(&self.bits, &self.dims),
        };
        let tensor = tensor.expect("fits");
        match self.swapped {
            true => tensor.transpose(0, 1).expect("two axes"),
            false => tensor,
        }
    }
}

/// The structure's definition on operands rounded as `form` declares. Also fills `case.amax` with
/// what it saw at the points, when that is empty.
pub fn reference(form: &FormDecl, case: &mut Case) -> Vec<Vec<f32>> {
    let rounded = rounded_weights(form, case);
    let mut run = Reference {
        format: form.activation_format.clone(),
        calibrated: form.statistics.iter().any(|s| s.statistic == "amax"),
        bf16: case.dtype == DType::Bf16,
        weights: rounded,
        amax: case.amax.clone(),
        measures: case.amax.is_empty(),
    };
    let out = match case.structure.as_str() {
        "decoder_ffn" => vec![run.decoder_ffn(case)],
        "linear_proj" => vec![run.linear_proj(case)],
        "qkv_pack" => run.qkv_pack(case),
        other => panic!("no reference of `{other}`"),
    };
    case.amax = run.amax;
    out
}

fn rounded_weights(form: &FormDecl, case: &Case) -> BTreeMap<String, Values> {
    let mut out: BTreeMap<String, Values> = case
        .weights
        .iter()
        .filter_map(|(name, values)| values.clone().map(|values| (name.clone(), values)))
        .collect();
    if form.weight_format == WeightFormat::None {
        return out;
    }
    let group_of = |name: &str| {
        let named = |pattern: &String| match pattern.strip_suffix('*') {
            Some(head) => name.starts_with(head),
            None => name == pattern,
        };
        form.scale_groups
            .iter()
            .position(|group| group.iter().any(named))
    };
    let mut groups: BTreeMap<(Option<usize>, String), Vec<WeightMatrix<'_>>> = BTreeMap::new();
    for (name, values) in out.iter_mut().filter(|(_, values)| values.dims.len() == 2) {
        let group = group_of(name);
        let key = (
            group,
            if group.is_some() {
                String::new()
            } else {
                name.clone()
            },
        );
        let (k, n) = (values.dims[0], values.dims[1]);
        groups
            .entry(key)
            .or_default()
            .push(WeightMatrix::in_out(&mut values.data, n, k));
    }
    for group in groups.values_mut() {
        round_weights_jointly(form.weight_format, group);
    }
    out
}

struct Reference {
    /// What activations are rounded through.
    format: String,
    /// Under one scale a point.
    calibrated: bool,
    bf16: bool,
    weights: BTreeMap<String, Values>,
    amax: BTreeMap<String, f32>,
    measures: bool,
}

impl Reference {
    fn round(&self, value: f64) -> f64 {
        match self.bf16 {
            true => f64::from(round_bf16(value as f32)),
            false => value,
        }
    }

    /// A point of the structure, `width` channels: measured, and rounded where the form does.
    fn point(&mut self, name: &str, values: Vec<f64>, width: usize) -> Vec<f64> {
        let mut floats: Vec<f32> = values.iter().map(|v| *v as f32).collect();
        if self.measures {
            self.amax.insert(name.into(), amax(&floats));
        }
        let scale = self.calibrated.then(|| self.amax[name]);
        let rounding = ActivationRounding::of(&self.format, scale).expect("known");
        if rounding == ActivationRounding::None {
            return values;
        }
        rounding.round(&mut floats, width);
        floats.into_iter().map(f64::from).collect()
    }

    fn linear(&self, x: &[f64], slot: &str) -> Vec<f64> {
        let w = &self.weights[slot];
        let (k, n) = (w.dims[0], w.dims[1]);
        let row = |x: &[f64]| {
            let mut out = vec![0.0; n];
            for (x, w) in x.iter().zip(w.data.chunks_exact(n)) {
                out.iter_mut()
                    .zip(w)
                    .for_each(|(o, w)| *o += x * f64::from(*w));
            }
            out
        };
        x.chunks_exact(k).flat_map(row).collect()
    }

    fn decoder_ffn(&mut self, case: &Case) -> Vec<f32> {
        let block = case.span == "block";
        let x = case
            .input(if block { "x" } else { "x_after_norm" })
            .expect("x");
        let (d, rows) = (x.cols(), x.data.len() / x.cols());
        let x: Vec<f64> = x.data.iter().map(|v| f64::from(*v)).collect();
        let cond = |name: &str| -> Option<Vec<f64>> {
            let values = case.input(name)?;
            let own = values.data.len() / d;
            let at = |i: usize| f64::from(values.data[if own == 1 { i % d } else { i }]);
            Some((0..rows * d).map(at).collect())
        };
        let mut h = x.clone();
        if block {
            let eps = case.params["eps"].as_f64().expect("eps");
            let plus = if case.axis("norm_weight_mode") == "offset" {
                1.0
            } else {
                0.0
            };
            let w = self.weights["w_norm"].clone();
            let (scale, shift) = (cond("cond_scale"), cond("cond_shift"));
            for (row, h) in h.chunks_exact_mut(d).enumerate() {
                let mean = h.iter().map(|v| v * v).sum::<f64>() / d as f64;
                for (i, v) in h.iter_mut().enumerate() {
                    *v = *v / (mean + eps).sqrt() * (plus + f64::from(w.data[i]));
                    *v *= 1.0 + scale.as_ref().map_or(0.0, |s| s[row * d + i]);
                    *v += shift.as_ref().map_or(0.0, |s| s[row * d + i]);
                    *v = self.round(*v);
                }
            }
        }
        let h = self.point("x_after_norm", h, d);
        let (gate, up) = (self.linear(&h, "w_gate"), self.linear(&h, "w_up"));
        let product = gate.iter().zip(&up).map(|(g, u)| {
            let g = self.round(*g);
            let a = match case.axis("activation") {
                "silu" => g / (1.0 + (-g).exp()),
                _ => {
                    0.5 * g * (1.0 + (0.797_884_560_802_865_4 * (g + 0.044715 * g * g * g)).tanh())
                }
            };
            self.round(self.round(a) * self.round(*u))
        });
        let product = product.collect();
        let f = self.weights["w_down"].dims[0];
        let product = self.point("act_after_mul", product, f);
        let y = self.linear(&product, "w_down");
        let gate = if block { cond("cond_gate") } else { None };
        let finish = |(i, y): (usize, &f64)| {
            let y = self.round(*y);
            let z = gate.as_ref().map_or(y, |gate| self.round(y * gate[i]));
            self.round(if block { x[i] + z } else { z }) as f32
        };
        y.iter().enumerate().map(finish).collect()
    }

    fn linear_proj(&mut self, case: &Case) -> Vec<f32> {
        let x = case
            .input("x")
            .expect("x")
            .data
            .iter()
            .map(|v| f64::from(*v))
            .collect();
        let x = self.point("x", x, case.input("x").expect("x").cols());
        let y = self.linear(&x, "w");
        let bias = self
            .weights
            .get("b")
            .filter(|_| case.axis("bias") != "none");
        let finish = |(i, y): (usize, &f64)| {
            let y = y + bias.map_or(0.0, |b| f64::from(b.data[i % b.data.len()]));
            let y = match case.axis("epilogue") {
                "gelu_quant_fp8" => {
                    0.5 * y * (1.0 + (0.797_884_560_802_865_4 * (y + 0.044715 * y * y * y)).tanh())
                }
                "residual_add" => y + f64::from(case.input("residual").expect("residual").data[i]),
                _ => y,
            };
            self.round(y) as f32
        };
        y.iter().enumerate().map(finish).collect()
    }

    fn qkv_pack(&mut self, case: &Case) -> Vec<Vec<f32>> {
        let x = case
            .input("x")
            .expect("x")
            .data
            .iter()
            .map(|v| f64::from(*v))
            .collect();
        let x = self.point("x", x, case.input("x").expect("x").cols());
        let sibling = |i: usize| {
            let y = self.linear(&x, &format!("w_{i}"));
            let bias = self.weights.get(&format!("b_{i}"));
            let finish = |(j, y): (usize, &f64)| {
                self.round(y + bias.map_or(0.0, |b| f64::from(b.data[j % b.data.len()]))) as f32
            };
            y.iter().enumerate().map(finish).collect()
        };
        (0..case.outputs.len()).map(sibling).collect()
    }
}

/// Relative L2 distance.
pub fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let difference: f64 = got
        .iter()
        .zip(want)
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let size: f64 = want.iter().map(|v| square(f64::from(*v))).sum();
    if size == 0.0 {
        return if difference == 0.0 {
            0.0
        } else {
            f64::INFINITY
        };
    }
    (difference / size).sqrt()
}

/// Least-squares slope of `got` on `want`.
pub fn slope(got: &[f32], want: &[f32]) -> f64 {
    let product = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum()
    };
    product(got, want) / product(want, want)
}
