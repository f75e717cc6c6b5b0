//! A decoder's cache and who reads it: an append to a region of the state, and attention over regions.
//!
//! A region is whole, `[B, heads, room, D]`; how many of its positions are valid once the step has appended comes as a
//! number. What lies behind is not read.

use std::sync::Arc;

use structures_plugin_api::sdk::{ports, BindRequest, Failure};

use super::super::work::{Body, Inputs, Value};
use super::{fill, filled, given, Bound};
use crate::linear::dot;

pub fn kv_append(request: &BindRequest<'_>) -> Bound {
    let inputs = &request.params.inputs;
    let body = Append {
        x: ports::position(inputs, "x")?,
        valid: ports::position(inputs, "kv_len")?,
        region: ports::position(&request.params.states, "region")?,
    };
    Ok((Arc::new(body), 0))
}

/// Writes the last valid positions of a region.
struct Append {
    x: usize,
    valid: usize,
    region: usize,
}

impl Body for Append {
    fn run(
        &self,
        inputs: Inputs<'_>,
        _: &mut [Value],
        states: &mut [Value],
    ) -> Result<(), Failure> {
        let (x, valid) = (given(inputs, self.x)?, given(inputs, self.valid)?.whole()?);
        let region = filled(states, self.region)?;
        let bad = || {
            let what = format!(
                "x {:?} as the last of {valid:?} valid positions of a region {:?}",
                x.dims, region.dims
            );
            Failure::invalid("dims_inconsistent", what)
        };
        let (&[b, h, n, d], &[rb, rh, room, rd]) = (x.dims.as_slice(), region.dims.as_slice())
        else {
            return Err(bad());
        };
        let valid = valid.first().and_then(|v| usize::try_from(*v).ok());
        let valid = valid.filter(|v| (n..=room).contains(v) && (b, h, d) == (rb, rh, rd));
        let from = valid.ok_or_else(bad)? - n;
        let (row, whole) = (n * d, room * d);
        let heads = region.floats_mut()?.chunks_exact_mut(whole.max(1));
        for (head, x) in heads.zip(x.floats()?.chunks_exact(row.max(1))) {
            head[from * d..][..row].copy_from_slice(x);
        }
        Ok(())
    }
}

pub fn attention(request: &BindRequest<'_>) -> Bound {
    let inputs = &request.params.inputs;
    let attribute = |name: &str| {
        let value = request.params.params.get(name);
        value.filter(|value| !value.is_null())
    };
    if attribute("softcap").is_some() {
        return Err(Failure::refused("envelope", "scores with a soft cap"));
    }
    let body = Attention {
        qkv: [
            ports::position(inputs, "q")?,
            ports::position(inputs, "k")?,
            ports::position(inputs, "v")?,
        ],
        mask: ports::optional(inputs, "mask"),
        valid: ports::optional(inputs, "kv_len"),
        scale: request.optional_number("scale")?.map(|s| s as f32),
        causal: attribute("causal").and_then(|v| v.as_bool()) == Some(true),
        window: request.optional_number("window")?.map(|w| w as usize),
    };
    Ok((Arc::new(body), 0))
}

/// Scaled scores, softmax, weighted values; heads of q share those of k and v.
struct Attention {
    qkv: [usize; 3],
    mask: Option<usize>,
    valid: Option<usize>,
    scale: Option<f32>,
    causal: bool,
    window: Option<usize>,
}

impl Body for Attention {
    fn run(
        &self,
        inputs: Inputs<'_>,
        outputs: &mut [Value],
        _: &mut [Value],
    ) -> Result<(), Failure> {
        let [q, k, v] = self.qkv.map(|at| given(inputs, at));
        let (q, k, v) = (q?, k?, v?);
        let optional = |at: Option<usize>| inputs.get(at?).and_then(Option::as_ref);
        if optional(self.mask).is_some() {
            return Err(Failure::refused("envelope", "a mask"));
        }
        let bad = || {
            let what = format!("q {:?}, k {:?}, v {:?}", q.dims, k.dims, v.dims);
            Failure::invalid("dims_inconsistent", what)
        };
        let (&[b, h, n, d], &[_, hk, room, _], &[.., dv]) =
            (q.dims.as_slice(), k.dims.as_slice(), v.dims.as_slice())
        else {
            return Err(bad());
        };
        let fits = k.dims == [b, hk, room, d] && v.dims == [b, hk, room, dv];
        if !fits || hk == 0 || !h.is_multiple_of(hk) {
            return Err(bad());
        }
        let valid = match optional(self.valid) {
            None => room,
            Some(valid) => {
                let valid = valid
                    .whole()?
                    .first()
                    .and_then(|v| usize::try_from(*v).ok());
                valid.filter(|v| *v <= room).ok_or_else(bad)?
            }
        };
        let scale = self.scale.unwrap_or(1.0 / (d as f32).sqrt());
        let (q, k, v) = (q.floats()?, k.floats()?, v.floats()?);
        let mut out = Vec::with_capacity(b * n * h * dv);
        for row in 0..b * n * h {
            let (at, i, head) = (row / (n * h), row / h % n, row % h);
            let kv = at * hk + head / (h / hk);
            let query = &q[((at * h + head) * n + i) * d..][..d];
            let position = (valid + i) as i64 - n as i64;
            let end = match self.causal {
                true => (position + 1).clamp(0, valid as i64) as usize,
                false => valid,
            };
            let start = self
                .window
                .map_or(0, |w| (position + 1 - w as i64).max(0) as usize);
            let keys = start.min(end)..end;
            let score = |j: usize| scale * dot(query, &k[(kv * room + j) * d..][..d]);
            let scores: Vec<f32> = keys.clone().map(score).collect();
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f32 = weights.iter().sum();
            let mut y = vec![0.0; dv];
            for (j, weight) in keys.zip(weights) {
                let value = &v[(kv * room + j) * dv..][..dv];
                y.iter_mut().zip(value).for_each(|(y, v)| *y += weight * v);
            }
            out.extend(y.iter().map(|y| if sum == 0.0 { 0.0 } else { y / sum }));
        }
        fill(filled(outputs, 0)?, out)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::work::Data;
    use super::*;

    fn value(values: &[f32], dims: &[usize]) -> Value {
        Value {
            data: Data::F32(values.to_vec()),
            dims: dims.to_vec(),
        }
    }

    fn number(n: i64) -> Option<Value> {
        Some(Value {
            data: Data::I64(vec![n]),
            dims: Vec::new(),
        })
    }

    #[test]
    fn the_last_valid_positions_are_written_and_no_other() {
        let body = Append {
            x: 0,
            valid: 1,
            region: 0,
        };
        // Two heads of room for three positions of one channel.
        let mut region = [value(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], &[1, 2, 3, 1])];
        let x = || Some(value(&[8.0, 9.0], &[1, 2, 1, 1]));
        body.run(&[x(), number(2)], &mut [], &mut region)
            .expect("runs");
        assert_eq!(
            region[0].data,
            Data::F32(vec![0.0, 8.0, 2.0, 3.0, 9.0, 5.0])
        );
        for valid in [0, 4, -1] {
            assert!(body
                .run(&[x(), number(valid)], &mut [], &mut region)
                .is_err());
        }
    }

    #[test]
    fn what_lies_behind_the_valid_positions_is_not_read() {
        let body = Attention {
            qkv: [0, 1, 2],
            mask: None,
            valid: Some(3),
            scale: None,
            causal: true,
            window: None,
        };
        let q = || Some(value(&[1.0, 2.0], &[1, 1, 2, 1]));
        let run = |k: &[f32], v: &[f32], valid: Option<Value>| {
            let dims = [1, 1, k.len(), 1];
            let mut out = [value(&[0.0; 2], &[1, 2, 1, 1])];
            let inputs = [q(), Some(value(k, &dims)), Some(value(v, &dims)), valid];
            body.run(&inputs, &mut out, &mut []).expect("runs");
            out[0].data.clone()
        };
        let nan = f32::NAN;
        let want = run(&[0.5, 1.0, -1.0], &[1.0, 2.0, 3.0], None);
        let got = run(&[0.5, 1.0, -1.0, nan], &[1.0, 2.0, 3.0, nan], number(3));
        assert_eq!(got, want);
        assert_ne!(
            run(&[0.5, 1.0, -1.0, 9.0], &[1.0, 2.0, 3.0, 9.0], number(4)),
            want
        );
    }
}
