//! The sublayers in their order, joined by residual sums.

use candle_core::Tensor;

use crate::error::CatalogError;
use crate::reference::Call;

/// `r = x + g attn(h)` with `(h, g)` from the first norm, then the same around the feed-forward; without
/// conditioning there is no gate. Every step is rounded.
pub fn reference(call: &Call<'_>) -> Result<Vec<(String, Tensor)>, CatalogError> {
    let r = sublayer(call, &call.input("x")?, "norm_in", "attn")?;
    let y = sublayer(call, &r, "norm_out", "ffn")?;
    Ok(vec![call.output("y", &y)?])
}

fn sublayer(call: &Call<'_>, x: &Tensor, norm: &str, inner: &str) -> Result<Tensor, CatalogError> {
    let gated = call.axis("residual") == "gated";
    let mut args = vec![x.clone()];
    if gated {
        args.push(call.input("cond")?);
    }
    let normed = call.run_role(norm, &args)?;
    let [h, gate @ ..] = normed.as_slice() else {
        return Err(made(norm, 0));
    };
    let out = call.run_role(inner, &[call.round(h)?])?;
    let [out] = out.as_slice() else {
        return Err(made(inner, out.len()));
    };
    let mut out = call.round(out)?;
    match gate {
        [] if !gated => {}
        [gate] if gated => {
            let (batch, _, width) = x.dims3()?;
            let gate = call.round(gate)?.reshape((batch, 1, width))?;
            out = call.round(&out.broadcast_mul(&gate)?)?;
        }
        _ => return Err(made(norm, normed.len())),
    }
    call.round(&(x + out)?)
}

fn made(role: &str, found: usize) -> CatalogError {
    CatalogError::Evaluation {
        structure: "reference".into(),
        at: format!("role `{role}`"),
        reason: format!("it makes {found} results"),
    }
}
