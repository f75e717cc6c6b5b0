//! `@ID@`: a backend for the `structures` plugin host.
//!
//! One form so far, `int8` of `linear_proj`: int8 weights with one scale an output channel,
//! activations as they come, 1 to 8 rows. Plain loops on the host's threads: a place to start from.
//!
//! To make it yours: add a [`FormDecl`] and what binds it, measure, declare no more than you serve.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::describe::{Band, Description, FormDecl, WeightFormat};
use structures_plugin_api::export_backend;
use structures_plugin_api::formats::{amax, int8_scale, quantise_int8};
use structures_plugin_api::sdk::{
    Backend, BindRequest, BoundForm, Failure, Host, Tensor, TensorMut,
};

/// What `--pin` and receipts call this plugin.
const ID: &str = "@ID@";
/// Who ships it.
const VENDOR: &str = "@ID@ authors";
/// Most rows of one call: the decode band.
const ROWS: u64 = 8;
/// Outputs that one thread takes at a time.
const PIECE: usize = 64;

/// What the host is told about the form, and holds it to.
fn int8() -> FormDecl {
    let values = |axis: &str, accepted: &[&str]| {
        let accepted = accepted.iter().map(|v| (*v).to_string()).collect();
        (axis.to_string(), accepted)
    };
    FormDecl {
        spans: vec!["proj".into()],
        dtypes: vec!["f32".into()],
        variants: [
            values("bias", &["none", "add"]),
            values("epilogue", &["none"]),
            values("in_dtype", &["bf16"]),
        ]
        .into(),
        band: Band {
            rows: Some([1, ROWS]),
            ..Band::default()
        },
        weight_format: WeightFormat::Int8PerChannel,
        quantises: true,
        precision_rank: 10,
        ..FormDecl::new("linear_proj", "int8", "w8a16_static")
    }
}

/// The backend; what it keeps is shared by all its forms.
struct Plugin {
    host: Host,
}

impl Backend for Plugin {
    fn description() -> Description {
        Description {
            archs: vec![std::env::consts::ARCH.into()],
            forms: vec![int8()],
            ..Description::new(ID, VENDOR, env!("CARGO_PKG_VERSION"))
        }
    }

    fn open(host: Host) -> Result<Self, Failure> {
        Ok(Plugin { host })
    }

    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        let form = int8();
        if request.form != form.name {
            let text = format!("no form `{}`, expected `{}`", request.form, form.name);
            return Err(Failure::refused("form_unknown", text));
        }
        request.admitted_by(&form)?;
        // Slot dims are [K, N] whatever the strides: column `n` is one output channel.
        let (k, n) = (request.dim("K")?, request.dim("N")?);
        let weight = request.weight_of_dims("w", &[k, n])?;
        // The axis may leave the bias out, and a place may have none.
        let bias = match request.params.variant.get("bias").map(String::as_str) {
            Some("none") => None,
            _ => request.weight("b"),
        };
        let bias = bias
            .map(|_| request.weight_of_dims("b", &[n])?.to_f32_vec())
            .transpose()?;
        let (mut codes, mut scales) = (vec![0_i8; n * k], vec![0.0; n]);
        let mut channel = vec![0.0; k];
        for (i, (codes, scale)) in codes.chunks_exact_mut(k).zip(&mut scales).enumerate() {
            weight.select(1, i)?.read_f32(&mut channel)?;
            *scale = int8_scale(amax(&channel));
            for (code, value) in codes.iter_mut().zip(&channel) {
                *code = quantise_int8(*value, *scale);
            }
        }
        Ok(Box::new(Int8 {
            host: self.host,
            k,
            n,
            codes,
            scales,
            bias,
        }))
    }
}

/// The form, bound to one place: packed weights, one channel of `k` codes after the other.
struct Int8 {
    host: Host,
    k: usize,
    n: usize,
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl BoundForm for Int8 {
    fn facts(&self) -> FormFacts {
        let floats = self.scales.len() + self.bias.as_ref().map_or(0, Vec::len);
        FormFacts {
            packed_bytes: (self.codes.len() + 4 * floats) as u64,
            ..FormFacts::default()
        }
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        // The span's order: in [x, residual], out [y].
        let ([x, ..], [y]) = (inputs, outputs) else {
            return Err(Failure::invalid("argument", "span `proj` has x and y"));
        };
        if x.cols() != self.k || y.cols() != self.n || x.rows() != y.rows() {
            let text = format!(
                "x {:?}, y {:?}, K {}, N {}",
                x.dims(),
                y.dims(),
                self.k,
                self.n
            );
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        let (x, this) = (x.as_f32()?, &*self);
        // The index of a piece says which rows and channels it holds.
        this.host
            .parallel_chunks(y.as_f32_mut()?, PIECE, |piece, out| {
                for (i, out) in out.iter_mut().enumerate() {
                    let (row, channel) =
                        ((piece * PIECE + i) / this.n, (piece * PIECE + i) % this.n);
                    let x = &x[row * this.k..][..this.k];
                    let codes = &this.codes[channel * this.k..][..this.k];
                    let sum: f32 = x.iter().zip(codes).map(|(x, c)| x * f32::from(*c)).sum();
                    let bias = this.bias.as_ref().map_or(0.0, |bias| bias[channel]);
                    *out = sum * this.scales[channel] + bias;
                }
            });
        Ok(())
    }
}

export_backend!(Plugin);

#[cfg(test)]
mod tests {
    use structures_plugin_api::abi::{Contract, DType};
    use structures_plugin_api::describe::{BindParams, ProbeShapes};

    use super::*;

    const K: usize = 5;
    const N: usize = 3;

    fn params(axes: &[(&str, &str)]) -> BindParams {
        let text = |(axis, value): &(&str, &str)| (axis.to_string(), value.to_string());
        BindParams {
            structure: "linear_proj".into(),
            version: 1,
            variant: axes.iter().map(text).collect(),
            dims: [("K".to_string(), K as u64), ("N".to_string(), N as u64)].into(),
            ..BindParams::default()
        }
    }

    /// Binds with this bias axis; `w` is [K, N].
    fn bind(w: &[f32], b: &[f32], axes: &[(&str, &str)]) -> Result<Box<dyn BoundForm>, Failure> {
        let contract = Contract::capacity(DType::F32, ROWS);
        let request = BindRequest::new("int8", "proj", params(axes), &contract)
            .with_weight("w", Tensor::from_f32(w, &[K, N])?)
            .with_weight("b", Tensor::from_f32(b, &[N])?);
        Plugin::open(Host::detached())?.bind(&request)
    }

    fn run(form: &mut dyn BoundForm, x: &[f32], rows: usize) -> Result<Vec<f32>, Failure> {
        let mut y = vec![f32::NAN; rows * N];
        let x = Tensor::from_f32(x, &[rows, K])?;
        let out = TensorMut::from_f32(&mut y, &[rows, N])?;
        form.call(&CallCtx::NONE, &[x, Tensor::ABSENT], &mut [out], &mut [])?;
        Ok(y)
    }

    #[test]
    fn it_computes_x_times_the_rounded_weights() -> Result<(), Failure> {
        let w: Vec<f32> = (0..K * N).map(|i| (i as f32 * 0.7).sin()).collect();
        let (b, rows) = ([0.5, -1.0, 2.0], 2);
        let x: Vec<f32> = (0..rows * K).map(|i| (i as f32 * 1.3).cos()).collect();
        for (bias, used) in [("none", 0.0), ("add", 1.0)] {
            let mut form = bind(&w, &b, &[("bias", bias), ("epilogue", "none")])?;
            let y = run(form.as_mut(), &x, rows)?;
            for (i, y) in y.iter().enumerate() {
                let (row, n) = (i / N, i % N);
                let channel: Vec<f32> = (0..K).map(|k| w[k * N + n]).collect();
                let scale = int8_scale(amax(&channel));
                let exact: f32 = (0..K)
                    .map(|k| x[row * K + k] * f32::from(quantise_int8(channel[k], scale)) * scale)
                    .sum();
                let exact = exact + used * b[n];
                assert!((y - exact).abs() < 1e-5, "{bias} {row} {n}: {y} {exact}");
            }
        }
        Ok(())
    }

    #[test]
    fn it_reports_what_it_packed() -> Result<(), Failure> {
        let w = [1.0; K * N];
        let with = bind(&w, &[0.0; N], &[("bias", "add")])?.facts();
        let without = bind(&w, &[0.0; N], &[("bias", "none")])?.facts();
        assert_eq!(without.packed_bytes, (K * N + 4 * N) as u64);
        assert_eq!(with.packed_bytes - without.packed_bytes, 4 * N as u64);
        Ok(())
    }

    #[test]
    fn it_refuses_what_it_does_not_declare() {
        let refused = bind(&[1.0; K * N], &[0.0; N], &[("epilogue", "residual_add")]);
        assert_eq!(
            refused.err().map(|e| e.code).as_deref(),
            Some("format_no_variant")
        );
        let shapes = |rows: u64| ProbeShapes {
            structure: "linear_proj".into(),
            span: "proj".into(),
            rows: vec![rows],
            ..ProbeShapes::default()
        };
        let probe = |rows| Plugin::description().probe("int8", &shapes(rows)).code;
        assert_eq!(probe(ROWS), None);
        assert_eq!(probe(ROWS + 1).as_deref(), Some("form_band"));
    }
}
