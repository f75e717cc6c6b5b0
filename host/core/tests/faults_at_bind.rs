//! Gate honesty at bind: forms that are wrong in one way each, tried as `bind` tries them. Every fault is refused with
//! its code; the healthy controls beside them pass, or the faults would prove nothing.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::{Device, Tensor};
use structures::seat::{CallFailure, Executable};
use structures::trial::{NamedWeight, Trial};
use structures_catalog::Catalog;
use structures_graph::{AttrValue, Attrs, Layout};
use structures_plugin_api::describe::{FormDecl, StatisticDecl, WeightFormat};
use structures_plugin_api::formats::{
    fake_quant_e4m3, fp8_scale, round_bf16, round_weight, Balance, WeightMatrix,
};

const D: usize = 24;
const F: usize = 40;
const ROWS: usize = 12;
const EPS: f32 = 1e-6;

type Outputs = [(Vec<f32>, Vec<usize>)];
type Wrong = Box<dyn Fn(&Form, &[f32], usize, &mut [f32]) + Send + Sync>;

/// Smooth numbers that repeat nowhere.
fn wave(n: usize, seed: f32, amplitude: f32) -> Vec<f32> {
    (0..n)
        .map(|i| amplitude * ((i as f32 * 0.737 + seed).sin() + 0.3 * (i as f32 * 0.113).cos()))
        .collect()
}

/// A gated feed-forward as a form might hold it: weights rounded as it declares, `[in, out]`.
#[derive(Clone)]
struct Weights {
    norm: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
}

impl Weights {
    fn layer(seed: f32) -> Self {
        Weights {
            norm: wave(D, seed, 0.1).iter().map(|v| 1.0 + v).collect(),
            gate: wave(D * F, seed + 1.0, 0.3),
            up: wave(D * F, seed + 2.0, 0.3),
            down: wave(F * D, seed + 3.0, 0.3),
        }
    }

    fn rounded(mut self, format: WeightFormat) -> Self {
        for (data, n, k) in [
            (&mut self.gate, F, D),
            (&mut self.up, F, D),
            (&mut self.down, D, F),
        ] {
            round_weight(format, WeightMatrix::in_out(data, n, k));
        }
        self
    }

    fn named(&self) -> Vec<NamedWeight> {
        let tensor = |data: &[f32], dims: &[usize]| {
            Tensor::from_vec(data.to_vec(), dims, &Device::Cpu).unwrap()
        };
        [
            ("w_norm", &self.norm, vec![D]),
            ("w_gate", &self.gate, vec![D, F]),
            ("w_up", &self.up, vec![D, F]),
            ("w_down", &self.down, vec![F, D]),
        ]
        .map(|(name, data, dims)| NamedWeight {
            name: name.into(),
            layout: Layout::InOut,
            tensor: tensor(data, &dims),
        })
        .into()
    }
}

fn product(x: &[f32], w: &[f32], k: usize, n: usize) -> Vec<f32> {
    let mut y = vec![0f64; n];
    for (i, x) in x.iter().enumerate().take(k) {
        for (y, w) in y.iter_mut().zip(&w[i * n..][..n]) {
            *y += f64::from(*x) * f64::from(*w);
        }
    }
    y.into_iter().map(|v| v as f32).collect()
}

fn silu(v: f32) -> f32 {
    v / (1.0 + (-v).exp())
}

fn gelu_tanh(v: f32) -> f32 {
    let inner = 0.797_884_6 * (v + 0.044_715 * v * v * v);
    0.5 * v * (1.0 + inner.tanh())
}

/// The double of a plugin's form.
struct Form {
    weights: Weights,
    activation: fn(f32) -> f32,
    /// Scales of the two points, where it rounds activations.
    scales: Option<[f32; 2]>,
    residual: f32,
    wrong: Wrong,
    calls: AtomicU32,
    overrun: bool,
}

impl Form {
    fn right(weights: Weights) -> Self {
        Form {
            weights,
            activation: silu,
            scales: None,
            residual: 1.0,
            wrong: Box::new(|_, _, _, _| {}),
            calls: AtomicU32::new(0),
            overrun: false,
        }
    }

    fn wrong(
        mut self,
        wrong: impl Fn(&Form, &[f32], usize, &mut [f32]) + Send + Sync + 'static,
    ) -> Self {
        self.wrong = Box::new(wrong);
        self
    }

    fn row(&self, x: &[f32]) -> Vec<f32> {
        let w = &self.weights;
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / D as f64;
        let inverse = 1.0 / (mean as f32 + EPS).sqrt();
        let mut n: Vec<f32> = x
            .iter()
            .zip(&w.norm)
            .map(|(x, w)| x * inverse * w)
            .collect();
        if let Some([scale, _]) = self.scales {
            fake_quant_e4m3(&mut n, scale);
        }
        let gate = product(&n, &w.gate, D, F);
        let up = product(&n, &w.up, D, F);
        let mut a: Vec<f32> = gate
            .iter()
            .zip(&up)
            .map(|(g, u)| (self.activation)(*g) * u)
            .collect();
        if let Some([_, scale]) = self.scales {
            fake_quant_e4m3(&mut a, scale);
        }
        let y = product(&a, &w.down, F, D);
        x.iter()
            .zip(y)
            .map(|(x, y)| self.residual * x + y)
            .collect()
    }
}

impl Executable for Form {
    fn call(
        &self,
        inputs: &[Option<(&[f32], &[usize])>],
        outputs: &mut Outputs,
    ) -> Result<(), CallFailure> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let (x, _) = inputs[0].unwrap();
        let made: Vec<f32> = x.chunks(D).flat_map(|row| self.row(row)).collect();
        let out = &mut outputs[0].0;
        if self.overrun {
            out[made.len()] = 0.0;
        }
        out[..made.len()].copy_from_slice(&made);
        (self.wrong)(self, x, made.len() / D, out);
        Ok(())
    }
}

/// A case: the layer, the input, what the form declares.
struct Case {
    weights: Weights,
    x: Vec<f32>,
    form: FormDecl,
    statistics: BTreeMap<String, Vec<f32>>,
}

fn case() -> Case {
    let mut form = FormDecl::new("decoder_ffn", "double", "none");
    form.spans = vec!["block".into()];
    form.tolerance = 1e-4;
    Case {
        weights: Weights::layer(0.0),
        x: wave(ROWS * D, 9.0, 1.5),
        form,
        statistics: BTreeMap::new(),
    }
}

impl Case {
    fn int8(mut self) -> Self {
        self.form.weight_format = WeightFormat::Int8PerChannel;
        self.form.quantises = true;
        self.form.tolerance = 6e-2;
        self
    }

    fn fp8(mut self, amax: [f32; 2]) -> Self {
        self.form.weight_format = WeightFormat::Fp8PerTensor;
        self.form.activation_format = "e4m3".into();
        self.form.quantises = true;
        self.form.tolerance = 6e-2;
        for (point, amax) in ["x_after_norm", "act_after_mul"].into_iter().zip(amax) {
            let key = format!("{point}|amax|tensor");
            self.statistics.insert(key, vec![amax]);
            self.form.statistics.push(StatisticDecl {
                point: point.into(),
                statistic: "amax".into(),
                granularity: "tensor".into(),
            });
        }
        self
    }

    /// The form that is right for this case.
    fn right(&self) -> Form {
        let format = self.form.weight_format;
        let mut form = Form::right(self.weights.clone().rounded(format));
        let amax = |point: &str| self.statistics.get(&format!("{point}|amax|tensor"));
        form.scales = amax("x_after_norm")
            .zip(amax("act_after_mul"))
            .map(|(a, b)| [fp8_scale(a[0]), fp8_scale(b[0])]);
        form
    }

    fn verdict(&self, executable: &dyn Executable) -> Result<(), (&'static str, String)> {
        let catalog = Catalog::builtin().unwrap();
        let spec = catalog.get("decoder_ffn").unwrap();
        let variant: BTreeMap<String, String> = [
            ("activation", "silu"),
            ("norm_weight_mode", "direct"),
            ("conditioning", "none"),
        ]
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .into();
        let params: Attrs = [("eps".to_string(), AttrValue::Float(f64::from(EPS)))].into();
        let rows = self.x.len() / D;
        let x = Tensor::from_vec(self.x.clone(), (1, rows, D), &Device::Cpu).unwrap();
        let trial = Trial {
            spec,
            span: "block",
            variant: &variant,
            params: &params,
            inputs: vec![("x".into(), Some(x))],
            row_axes: vec![Some(1)],
            outputs: vec!["out".into()],
            balance: Balance::default(),
        };
        trial
            .run(
                &self.form,
                executable,
                &self.weights.named(),
                &self.statistics,
                rows as u64,
            )
            .unwrap()
            .map(|_| ())
    }

    #[track_caller]
    fn refused(&self, executable: &dyn Executable, code: &str) {
        let verdict = self.verdict(executable);
        let (found, reason) = verdict.expect_err("the fault passed");
        assert_eq!(found, code, "{reason}");
    }
}

#[test]
fn healthy_unquantised() {
    let case = case();
    case.verdict(&case.right()).unwrap();
}

#[test]
fn healthy_int8_weights() {
    let case = case().int8();
    case.verdict(&case.right()).unwrap();
}

#[test]
fn healthy_fp8_with_calibrated_scales() {
    let case = case().fp8([3.0, 2.0]);
    case.verdict(&case.right()).unwrap();
}

#[test]
fn healthy_rounding_within_the_promise() {
    let mut case = case();
    case.form.tolerance = 1e-2;
    case.form.rounds = Some("bf16".into());
    case.form.band.rows = Some([8, 64]);
    case.x.iter_mut().for_each(|v| *v *= 0.2);
    let form = case.right().wrong(|_, _, rows, out| {
        out[..rows * D].iter_mut().for_each(|v| *v = round_bf16(*v));
    });
    case.verdict(&form).unwrap();
}

#[test]
fn healthy_beside_a_large_residual() {
    let mut case = case();
    case.x.iter_mut().for_each(|v| *v *= 1e3);
    case.verdict(&case.right()).unwrap();
}

#[test]
fn healthy_on_zeros_and_on_one_row() {
    let mut case = case();
    case.x = vec![0.0; D];
    case.verdict(&case.right()).unwrap();
}

#[test]
fn fault_wrong_scale_by_two_percent() {
    let case = case().int8();
    let form = case.right().wrong(|_, x, rows, out| {
        for (out, x) in out.iter_mut().zip(x).take(rows * D) {
            *out = x + 1.02 * (*out - x);
        }
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_wrong_scale_of_one_channel() {
    let case = case();
    let form = case.right().wrong(|_, _, rows, out| {
        (0..rows).for_each(|r| out[r * D + 3] *= 1.05);
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_off_by_one_channel() {
    let case = case().int8();
    let form = case
        .right()
        .wrong(|_, _, rows, out| out[..rows * D].chunks_mut(D).for_each(|r| r.rotate_left(1)));
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_transposed_pair_of_layers() {
    let case = case().int8();
    let other = Weights::layer(0.05).rounded(WeightFormat::Int8PerChannel);
    case.refused(&Form::right(other), "bind_parity");
}

#[test]
fn fault_scales_that_are_not_those_of_its_statistics() {
    let case = case().fp8([3.0, 2.0]);
    let mut form = case.right();
    // What it was given, and what it uses: activations saturate.
    form.scales = Some([fp8_scale(0.8), fp8_scale(0.3)]);
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_gate_and_up_exchanged() {
    let case = case().int8();
    let mut form = case.right();
    let w = &mut form.weights;
    std::mem::swap(&mut w.gate, &mut w.up);
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_another_activation() {
    let case = case().int8();
    let mut form = case.right();
    form.activation = gelu_tanh;
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_norm_weight_taken_as_an_offset() {
    let case = case().int8();
    let mut form = case.right();
    form.weights.norm.iter_mut().for_each(|w| *w += 1.0);
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_residual_dropped() {
    let case = case();
    let mut form = case.right();
    form.residual = 0.0;
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_residual_added_twice() {
    let case = case().int8();
    let mut form = case.right();
    form.residual = 2.0;
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_error_hidden_by_a_large_residual() {
    let mut case = case();
    case.x.iter_mut().for_each(|v| *v *= 1e3);
    let form = case.right().wrong(|_, x, rows, out| {
        for (out, x) in out.iter_mut().zip(x).take(rows * D) {
            *out = x + 1.1 * (*out - x);
        }
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_nan_on_one_row() {
    let case = case().int8();
    let form = case
        .right()
        .wrong(|_, _, rows, out| out[(rows - 1) * D + 5] = f32::NAN);
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_half_of_the_output() {
    let case = case().int8();
    let form = case
        .right()
        .wrong(|_, _, rows, out| out[rows * D / 2..rows * D].fill(0.0));
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_one_value_left_unwritten() {
    struct Unwritten(Form);
    impl Executable for Unwritten {
        fn call(
            &self,
            inputs: &[Option<(&[f32], &[usize])>],
            outputs: &mut Outputs,
        ) -> Result<(), CallFailure> {
            let kept = outputs[0].0[7];
            self.0.call(inputs, outputs)?;
            outputs[0].0[7] = kept;
            Ok(())
        }
    }
    let case = case().int8();
    case.refused(&Unwritten(case.right()), "bind_parity");
}

#[test]
fn fault_rows_in_another_order() {
    let case = case().int8();
    let form = case.right().wrong(|_, _, rows, out| {
        let last = out[(rows - 1) * D..rows * D].to_vec();
        out.copy_within(0..(rows - 1) * D, D);
        out[..D].copy_from_slice(&last);
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_right_for_one_row_only() {
    let case = case().int8();
    let form = case.right().wrong(|_, _, rows, out| {
        if rows > 1 {
            out[D..2 * D].iter_mut().for_each(|v| *v *= 1.5);
        }
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_right_for_many_rows_only() {
    let mut case = case().int8();
    case.form.band.rows = Some([1, 64]);
    let form = case.right().wrong(|_, _, rows, out| {
        if rows == 1 {
            out[..D].iter_mut().for_each(|v| *v *= 1.5);
        }
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_four_bits_declared_as_eight() {
    let mut case = case().int8();
    // A promise of 1 % that four bits cannot keep.
    case.form.tolerance = 1e-2;
    let four = case.weights.clone().rounded(WeightFormat::Nvfp4);
    case.refused(&Form::right(four), "bind_parity");
}

#[test]
fn fault_promise_wider_than_its_formats_allow() {
    let mut case = case();
    case.form.tolerance = 0.5;
    let form = case.right().wrong(|_, _, rows, out| {
        let noise = |i: usize| 1.0 + 2e-3 * if i.is_multiple_of(2) { 1.0 } else { -1.0 };
        (0..rows * D).for_each(|i| out[i] *= noise(i));
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_unquantised_form_that_rounds_to_bf16() {
    let case = case();
    let form = case.right().wrong(|_, _, rows, out| {
        out[..rows * D].iter_mut().for_each(|v| *v = round_bf16(*v));
    });
    case.refused(&form, "bind_parity");
}

#[test]
fn fault_non_deterministic() {
    let case = case().int8();
    let form = case.right().wrong(|form, _, _, out| {
        let call = form.calls.load(Ordering::Relaxed);
        out[2] *= 1.0 + 1e-6 * call as f32;
    });
    case.refused(&form, "not_repeatable");
}

#[test]
fn fault_state_shared_with_scratch_b_426() {
    struct Shared {
        form: Form,
        scratch: std::sync::Mutex<Vec<f32>>,
    }
    impl Executable for Shared {
        fn call(
            &self,
            inputs: &[Option<(&[f32], &[usize])>],
            outputs: &mut Outputs,
        ) -> Result<(), CallFailure> {
            self.form.call(inputs, outputs)?;
            // What the call before left in the buffer gets in.
            let mut scratch = self.scratch.lock().unwrap();
            for (o, s) in outputs[0].0.iter_mut().zip(&*scratch) {
                *o += 1e-4 * s;
            }
            *scratch = inputs[0].unwrap().0.to_vec();
            Ok(())
        }
    }
    let case = case().int8();
    let shared = Shared {
        form: case.right(),
        scratch: std::sync::Mutex::default(),
    };
    case.refused(&shared, "not_repeatable");
}

#[test]
fn fault_writes_behind_its_output() {
    let case = case().int8();
    let mut form = case.right();
    form.overrun = true;
    case.refused(&form, "bind_writes");
}

#[test]
fn fault_fails_at_its_first_call() {
    struct Failing;
    impl Executable for Failing {
        fn call(
            &self,
            _: &[Option<(&[f32], &[usize])>],
            _: &mut Outputs,
        ) -> Result<(), CallFailure> {
            Err(CallFailure {
                code: "planted".into(),
                message: "planted in the first call".into(),
                declined: false,
            })
        }
    }
    case().refused(&Failing, "bind_smoke");
}

#[test]
fn fault_fails_at_its_second_call() {
    struct Second(Form);
    impl Executable for Second {
        fn call(
            &self,
            inputs: &[Option<(&[f32], &[usize])>],
            outputs: &mut Outputs,
        ) -> Result<(), CallFailure> {
            self.0.call(inputs, outputs)?;
            match self.0.calls.load(Ordering::Relaxed) {
                1 => Ok(()),
                _ => Err(CallFailure {
                    code: "planted".into(),
                    message: "planted in the second call".into(),
                    declined: false,
                }),
            }
        }
    }
    let case = case().int8();
    case.refused(&Second(case.right()), "bind_smoke");
}
