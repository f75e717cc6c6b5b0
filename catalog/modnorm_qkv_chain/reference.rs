//! A conditional layer norm and the projections that read it; with a table a token, the whole block around them.

use candle_core::{Tensor, D};

use crate::error::CatalogError;
use crate::reference::formula::{gelu_tanh, layer, product, silu};
use crate::reference::Call;

/// Query, key and value of the modulated row, and the block's output where a table modulates it.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    match call.axis("modulation") {
        "per_token_table" => block(call),
        _ => chain(call),
    }
}

// The conditioning and the modulation round at every step.
fn chain(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let x = call.input("x")?;
    let cond = call.round(&silu(&call.input("cond")?)?)?;
    let style = product(&cond, &call.weight("w_cond")?.t()?)?;
    let style = call.round(&style.broadcast_add(&call.weight("b_cond")?)?)?;
    let width = x.dim(D::Minus1)?;
    // One style for all tokens of a batch.
    let half = |at: usize| style.narrow(1, at * width, width)?.unsqueeze(1);
    let n = call.round(&layer(&x, call.number("eps")?)?)?;
    let factor = call.round(&(half(0)? + 1.0)?)?;
    let m = call.round(&n.broadcast_mul(&factor)?)?;
    let m = call.round(&m.broadcast_add(&half(1)?)?)?;
    let siblings: &[&str] = match call.axis("fanout") {
        "q_only" => &["q"],
        _ => &["q", "k", "v"],
    };
    let mut outputs = Vec::new();
    for name in siblings {
        let y = projected(call, &m, &format!("w_{name}"), &format!("b_{name}"))?;
        outputs.push(call.output(name, &y)?);
    }
    Ok(outputs)
}

// Six rows a token: shift, scale and gate of the attention, then of the feed-forward.
fn block(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let x = call.input("x")?;
    let eps = call.number("eps")?;
    let rows = call.input("temb")?.broadcast_add(&call.weight("table")?)?;
    let row = |at: usize| rows.narrow(2, at, 1)?.squeeze(2);
    let modulated = |x: &Tensor, at: usize| -> Result<Tensor, CatalogError> {
        let scaled = layer(x, eps)?.mul(&(row(at + 1)? + 1.0)?)?;
        call.round(&scaled.add(&row(at)?)?)
    };
    let attn_in = modulated(&x, 0)?;
    let mut siblings = Vec::new();
    for name in ["q", "k", "v"] {
        let y = projected(call, &attn_in, &format!("w_{name}"), &format!("b_{name}"))?;
        siblings.push(y.to_dtype(call.dtype)?);
    }
    let attended = host(call, "attn", &siblings)?;
    let o = call.round(&host(call, "o", &[attended])?)?;
    let r = call.round(&(&x + o.mul(&row(2)?)?)?)?;
    let crossed = host(call, "cross_norm", &[r.to_dtype(call.dtype)?])?;
    let crossed = call.round(&host(call, "cross", &[crossed])?)?;
    let x_cross = call.round(&(r + crossed)?)?;
    let ffn_in = modulated(&x_cross, 3)?;
    let h = call.round(&projected(call, &ffn_in, "w_fc1", "b_fc1")?)?;
    let hidden = call.round(&gelu_tanh(&h)?)?;
    let f = call.round(&projected(call, &hidden, "w_fc2", "b_fc2")?)?;
    let out = (x_cross + f.mul(&row(5)?)?)?;
    let mut outputs = Vec::new();
    for (name, t) in ["q", "k", "v"].into_iter().zip(&siblings) {
        outputs.push(call.output(name, t)?);
    }
    outputs.push(call.output("out", &out)?);
    Ok(outputs)
}

// `x W^T + b` in f32; the bias may be missing.
fn projected(call: &Call<'_>, x: &Tensor, w: &str, b: &str) -> Result<Tensor, CatalogError> {
    let w = call.weight(w)?;
    let (batch, rows, width) = x.dims3()?;
    let y = product(&x.reshape((batch * rows, width))?, &w.t()?)?;
    let y = y.reshape((batch, rows, w.dim(0)?))?;
    let y = match call.optional_weight(b)? {
        Some(b) => y.broadcast_add(&b)?,
        None => y,
    };
    call.round(&y)
}

// What the host runs inside a role, in the boundary dtype.
fn host(call: &Call<'_>, role: &str, args: &[Tensor]) -> Result<Tensor, CatalogError> {
    let failed = |reason: String| CatalogError::Evaluation {
        structure: "modnorm_qkv_chain".into(),
        at: role.into(),
        reason,
    };
    let run = call.calls.get(role);
    let run = run.ok_or_else(|| failed(format!("no closure for role `{role}`")))?;
    match <[Tensor; 1]>::try_from(run(args)?) {
        Ok([one]) => Ok(one.to_dtype(call.dtype)?),
        Err(made) => Err(failed(format!("expected 1 result, found {}", made.len()))),
    }
}
