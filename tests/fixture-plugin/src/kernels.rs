//! The structures the fixture executes, in the simplest form that is right.

use structures_plugin_api::sdk::{BindRequest, Failure, Host, Tensor};

use crate::matrix::Matrix;

/// What a bound form computes: one row-major buffer an output of the span.
#[derive(Debug, PartialEq)]
pub enum Kernel {
    Ffn {
        norm: Option<Norm>,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        act: Act,
    },
    Linears(Vec<(Matrix, Option<Vec<f32>>)>),
    Norm(Norm),
}

#[derive(Debug, PartialEq)]
pub struct Norm {
    weight: Vec<f32>,
    offset: bool,
    eps: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    Silu,
    GeluTanh,
}

impl Kernel {
    /// Reads the weights of `request`, whose declaration was compared already.
    pub fn bind(request: &BindRequest<'_>, int8: bool) -> Result<Self, Failure> {
        match request.params.structure.as_str() {
            "decoder_ffn" => ffn(request, int8),
            "linear_proj" => linears(request, int8, &[("w".into(), "b".into())]),
            "qkv_pack" => {
                let names = |i| (format!("w_{i}"), format!("b_{i}"));
                let slots: Vec<_> = (0..request.params.outputs.len()).map(names).collect();
                linears(request, int8, &slots)
            }
            "plain_norm" => norm(request, "w").map(Kernel::Norm),
            other => Err(Failure::refused(
                "form_unknown",
                format!("structure `{other}`"),
            )),
        }
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Kernel::Ffn { gate, up, down, .. } => gate.bytes() + up.bytes() + down.bytes(),
            Kernel::Linears(linears) => linears.iter().map(|(w, _)| w.bytes()).sum(),
            Kernel::Norm(norm) => 4 * norm.weight.len() as u64,
        }
    }

    /// Fills one buffer an output.
    pub fn run(&self, host: &Host, inputs: &[Tensor<'_>]) -> Result<Vec<Vec<f32>>, Failure> {
        let (x, rest) = match inputs.split_first() {
            Some((x, rest)) if !x.is_absent() => (x.to_f32_vec()?, rest),
            _ => return Err(Failure::invalid("argument", "expected a first input")),
        };
        match self {
            Kernel::Ffn {
                norm,
                gate,
                up,
                down,
                act,
            } => {
                if rest.iter().any(|cond| !cond.is_absent()) {
                    return Err(Failure::invalid(
                        "argument",
                        "conditioning is not implemented",
                    ));
                }
                let width = gate.k;
                check_width(&x, width)?;
                let h = norm
                    .as_ref()
                    .map_or_else(|| x.clone(), |norm| norm.apply(&x, width));
                let (mut g, u) = (gate.apply(host, &h), up.apply(host, &h));
                g.iter_mut()
                    .zip(&u)
                    .for_each(|(g, u)| *g = act.apply(*g) * u);
                let mut y = down.apply(host, &g);
                if norm.is_some() {
                    y.iter_mut().zip(&x).for_each(|(y, x)| *y += x);
                }
                Ok(vec![y])
            }
            Kernel::Linears(linears) => {
                let residual = rest.first().and_then(|r| r.present());
                let mut outputs = Vec::new();
                for (w, b) in linears {
                    check_width(&x, w.k)?;
                    let mut y = w.apply(host, &x);
                    if let Some(b) = b {
                        y.chunks_exact_mut(w.n).for_each(|y| add(y, b));
                    }
                    if let Some(residual) = residual {
                        add(&mut y, &residual.to_f32_vec()?);
                    }
                    outputs.push(y);
                }
                Ok(outputs)
            }
            Kernel::Norm(norm) => {
                let width = norm.weight.len();
                check_width(&x, width)?;
                Ok(vec![norm.apply(&x, width)])
            }
        }
    }
}

impl Norm {
    fn apply(&self, x: &[f32], width: usize) -> Vec<f32> {
        let mut out = x.to_vec();
        for row in out.chunks_exact_mut(width) {
            let mean = row.iter().map(|v| v * v).sum::<f32>() / width as f32;
            let scale = (mean + self.eps).sqrt().recip();
            for (v, w) in row.iter_mut().zip(&self.weight) {
                *v *= scale * if self.offset { 1.0 + w } else { *w };
            }
        }
        out
    }
}

impl Act {
    fn apply(self, x: f32) -> f32 {
        match self {
            Act::Silu => x / (1.0 + (-x).exp()),
            Act::GeluTanh => {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
        }
    }
}

fn ffn(request: &BindRequest<'_>, int8: bool) -> Result<Kernel, Failure> {
    let axis = |name: &str| request.params.variant.get(name).map(String::as_str);
    let norm = match request.span {
        "block" => {
            if axis("conditioning").is_some_and(|c| c != "none") {
                let text = "span `block` is implemented without conditioning";
                return Err(Failure::refused("format_no_variant", text));
            }
            Some(norm(request, "w_norm")?)
        }
        _ => None,
    };
    let pack = |slot| Matrix::pack(&request.required_weight(slot)?, int8);
    let act = if axis("activation") == Some("gelu") {
        Act::GeluTanh
    } else {
        Act::Silu
    };
    Ok(Kernel::Ffn {
        norm,
        gate: pack("w_gate")?,
        up: pack("w_up")?,
        down: pack("w_down")?,
        act,
    })
}

fn norm(request: &BindRequest<'_>, slot: &str) -> Result<Norm, Failure> {
    let mode = request.params.variant.get("norm_weight_mode");
    Ok(Norm {
        weight: request.required_weight(slot)?.to_f32_vec()?,
        offset: mode.is_some_and(|mode| mode == "offset"),
        eps: request.number("eps")? as f32,
    })
}

fn linears(
    request: &BindRequest<'_>,
    int8: bool,
    slots: &[(String, String)],
) -> Result<Kernel, Failure> {
    let biased = request.params.variant.get("bias").map(String::as_str) != Some("none");
    let mut linears = Vec::new();
    for (w, b) in slots {
        let bias = request.weight(b).filter(|_| biased);
        let weight = Matrix::pack(&request.required_weight(w)?, int8)?;
        linears.push((weight, bias.map(|b| b.to_f32_vec()).transpose()?));
    }
    Ok(Kernel::Linears(linears))
}

fn check_width(x: &[f32], width: usize) -> Result<(), Failure> {
    if width > 0 && x.len().is_multiple_of(width) {
        return Ok(());
    }
    let text = format!("expected rows of {width}, found {} elements", x.len());
    Err(Failure::invalid("dims_inconsistent", text))
}

fn add(y: &mut [f32], other: &[f32]) {
    y.iter_mut().zip(other).for_each(|(y, o)| *y += o);
}
