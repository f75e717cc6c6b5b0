//! Closures of roles: what a recording's host modules compute, told by the names of their parameters.
//!
//! `role.w` with or without `role.b` is a linear; `role.style_w`, `role.style_b` a conditioned norm that gives the
//! normed row and a gate; `role.norm_w` a plain norm; bare `w_gate, w_up, w_down` the gated feed-forward of role
//! `ffn`. Rounding is where the recording rounds: after each product, activation and multiply, a norm once.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, D};
use structures_catalog::evaluate::CallFn;
use structures_catalog::{CatalogError, Spec};

type Weights = BTreeMap<String, Tensor>;
type Results = Result<Vec<Tensor>, CatalogError>;

/// One closure for every role that has weights here.
pub fn closures(
    weights: Weights,
    out_in: &dyn Fn(&str) -> bool,
    eps: f64,
    dtype: DType,
) -> BTreeMap<String, CallFn<'static>> {
    let mut roles: BTreeMap<String, Weights> = BTreeMap::new();
    for (name, t) in weights {
        let (role, param) = name.split_once('.').unwrap_or(("ffn", &name));
        // As the vocabulary has it: `x @ w`, in f32.
        let t = t.to_dtype(DType::F32).expect("f32");
        let t = if out_in(&name) {
            t.t().expect(param)
        } else {
            t
        };
        let role = roles.entry(role.into()).or_default();
        role.insert(param.into(), t.contiguous().expect(param));
    }
    let one = |(role, w): (String, Weights)| {
        let module = Module { w, eps, dtype };
        let params: Vec<&str> = module.w.keys().map(String::as_str).collect();
        let run: fn(&Module, &[Tensor]) -> Results = match params.as_slice() {
            ["w"] | ["b", "w"] => Module::linear,
            ["style_b", "style_w"] => Module::conditioned_norm,
            ["norm_w"] => Module::norm,
            ["w_down", "w_gate", "w_up"] => Module::gated,
            other => panic!("role `{role}`: no module has the parameters {other:?}"),
        };
        let call: CallFn<'static> = Box::new(move |args| run(&module, args));
        (role, call)
    };
    roles.into_iter().map(one).collect()
}

/// For every role that the dataflow calls, as many copies of the first argument as it makes values. For calls that
/// must be refused before they run.
pub fn identities(spec: &Spec) -> BTreeMap<String, CallFn<'static>> {
    let calls = spec.dataflow.ops.iter();
    let named = calls.filter_map(|op| {
        let structures_catalog::spec::AttrDecl::Literal(role) = op.attrs.get("role")? else {
            return None;
        };
        let n = op.lets.len();
        let run: CallFn<'static> = Box::new(move |args| Ok(vec![args[0].clone(); n]));
        Some((role.as_word()?.to_string(), run))
    });
    named.collect()
}

struct Module {
    w: Weights,
    eps: f64,
    dtype: DType,
}

impl Module {
    fn round(&self, t: &Tensor) -> Result<Tensor, CatalogError> {
        Ok(t.to_dtype(self.dtype)?.to_dtype(DType::F32)?)
    }

    fn product(&self, x: &Tensor, w: &str) -> Result<Tensor, CatalogError> {
        Ok(x.contiguous()?.broadcast_matmul(&self.w[w])?)
    }

    fn linear(&self, args: &[Tensor]) -> Results {
        let mut y = self.product(&wide(&args[0])?, "w")?;
        if let Some(b) = self.w.get("b") {
            y = y.broadcast_add(b)?;
        }
        Ok(vec![self.round(&y)?])
    }

    fn gated(&self, args: &[Tensor]) -> Results {
        let h = wide(&args[0])?;
        let gate = self.round(&self.product(&h, "w_gate")?)?;
        let up = self.round(&self.product(&h, "w_up")?)?;
        let act = self.round(&candle_core::Tensor::silu(&gate)?)?;
        let hidden = self.round(&(act * up)?)?;
        Ok(vec![self.round(&self.product(&hidden, "w_down")?)?])
    }

    fn norm(&self, args: &[Tensor]) -> Results {
        let n = self.unit(&wide(&args[0])?)?;
        Ok(vec![self.round(&n.broadcast_mul(&self.w["norm_w"])?)?])
    }

    /// `n (1 + scale) + shift`, and the gate: thirds of the projected conditioning, one row of it a batch.
    fn conditioned_norm(&self, args: &[Tensor]) -> Results {
        let x = wide(&args[0])?;
        let style = self.product(&wide(&args[1])?, "style_w")?;
        let style = style.broadcast_add(&self.w["style_b"])?;
        let (batch, width) = (x.dim(0)?, x.dim(D::Minus1)?);
        let style = style.broadcast_as((batch, 3 * width))?;
        let third = |i: usize| style.narrow(1, i * width, width);
        let row = |t: Tensor| t.contiguous()?.reshape((batch, 1, width));
        let n = self.unit(&x)?.broadcast_mul(&(row(third(0)?)? + 1.0)?)?;
        let y = n.broadcast_add(&row(third(1)?)?)?;
        Ok(vec![self.round(&y)?, self.round(&third(2)?)?])
    }

    fn unit(&self, x: &Tensor) -> Result<Tensor, CatalogError> {
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        Ok(x.broadcast_div(&(mean + self.eps)?.sqrt()?)?)
    }
}

fn wide(t: &Tensor) -> Result<Tensor, CatalogError> {
    Ok(t.to_dtype(DType::F32)?)
}
