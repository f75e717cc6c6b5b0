//! A whole backend in one file: id `example`, one structure, one form. It is what `docs` show, what
//! the door's test loads, and where a new plugin starts:
//!
//! ```toml
//! [lib]
//! crate-type = ["cdylib"]
//!
//! [dependencies]
//! structures-plugin-api = "0.1"
//! ```

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::describe::{Description, FormDecl};
use structures_plugin_api::export_backend;
use structures_plugin_api::sdk::{
    Backend, BindRequest, BoundForm, Failure, Host, Tensor, TensorMut,
};

/// The backend: what it keeps is shared by all its forms.
pub struct Example {
    host: Host,
}

impl Backend for Example {
    fn description() -> Description {
        let mut form = FormDecl::new("linear_proj", "plain", "none");
        form.spans = vec!["proj".into()];
        form.dtypes = vec!["f32".into()];
        form.variants = [("epilogue".to_string(), vec!["none".to_string()])].into();
        let mut description = Description::new("example", "Example Kernels", "0.1.0");
        description.archs = vec!["x86_64".into(), "aarch64".into()];
        description.forms = vec![form];
        description
    }

    fn open(host: Host) -> Result<Self, Failure> {
        Ok(Example { host })
    }

    fn bind(&self, request: &BindRequest<'_>) -> Result<Box<dyn BoundForm>, Failure> {
        let description = Self::description();
        let form = description
            .form(&request.params.structure, request.form)
            .ok_or_else(|| {
                Failure::refused("form_unknown", format!("no form `{}`", request.form))
            })?;
        request.admitted_by(form)?;

        let (k, n) = (request.dim("K")?, request.dim("N")?);
        // Slot dims are [K, N] whatever the strides; packed, every output channel is one run of K.
        let weight = request.weight_of_dims("w", &[k, n])?;
        let mut packed = vec![0.0; n * k];
        for (channel, out) in packed.chunks_exact_mut(k).enumerate() {
            weight.select(1, channel)?.read_f32(out)?;
        }
        // The bias is there or not, and used or not: the axis says so, a missing axis says "if it
        // is there".
        let bias = match request.params.variant.get("bias").map(String::as_str) {
            Some("none") => None,
            _ => request.weight("b").map(|b| b.to_f32_vec()).transpose()?,
        };
        Ok(Box::new(Plain {
            host: self.host,
            k,
            n,
            packed,
            bias,
        }))
    }
}

struct Plain {
    host: Host,
    k: usize,
    n: usize,
    packed: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl BoundForm for Plain {
    fn facts(&self) -> FormFacts {
        FormFacts {
            packed_bytes: 4 * self.packed.len() as u64,
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
        // The order is the span's: in [x, residual], out [y].
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
        let x = x.as_f32()?;
        let this = &*self;
        this.host
            .parallel_chunks(y.as_f32_mut()?, this.n, |row, y| {
                let x = &x[row * this.k..][..this.k];
                for (channel, (y, w)) in y
                    .iter_mut()
                    .zip(this.packed.chunks_exact(this.k))
                    .enumerate()
                {
                    let sum: f32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
                    *y = sum + this.bias.as_ref().map_or(0.0, |bias| bias[channel]);
                }
            });
        Ok(())
    }
}

export_backend!(Example);
