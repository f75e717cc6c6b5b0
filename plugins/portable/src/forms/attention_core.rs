//! `attention_core`: scaled scores, additive mask, softmax, weighted values; grouped heads.
//!
//! One pass over the keys of a query keeps the largest score so far and rescales what it has summed
//! when a larger one comes, so there is no matrix of scores. Everything is f32, the output is
//! rounded once.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Host, Tensor, TensorMut};

use super::Leaf;
use crate::format::Format;
use crate::linear::dot;
use crate::ports::{self, Rows};
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    // The keys of a call are what the call brings.
    variants: &[
        ("kv_cadence", &["per_call"]),
        ("segment_layout", &["single_dense"]),
    ],
    ..Leaf::plain("attention_core", &["core"], bind)
};

struct Attention {
    shared: Shared,
    rows: Rows,
    rule: Rule,
    qkv: [usize; 3],
    mask: Option<usize>,
    kv_len: Option<usize>,
    out: usize,
}

/// Which keys a query sees, and how scores are scaled.
#[derive(Clone, Copy, Debug)]
struct Rule {
    /// `D^-0.5` when none.
    scale: Option<f32>,
    causal: bool,
    window: Option<usize>,
}

fn bind(
    shared: &Shared,
    _format: Format,
    request: &BindRequest<'_>,
) -> Result<Box<dyn BoundForm>, Failure> {
    let inputs = &request.params.inputs;
    Ok(Box::new(Attention {
        shared: shared.clone(),
        rows: Rows::of(request)?,
        rule: Rule::of(request)?,
        qkv: [
            ports::position(inputs, "q")?,
            ports::position(inputs, "k")?,
            ports::position(inputs, "v")?,
        ],
        mask: ports::optional(inputs, "mask"),
        kv_len: ports::optional(inputs, "kv_len"),
        out: ports::position(&request.params.outputs, "out")?,
    }))
}

impl Rule {
    fn of(request: &BindRequest<'_>) -> Result<Self, Failure> {
        let given = |name: &str| {
            let value = request.params.params.get(name);
            value.filter(|value| !value.is_null())
        };
        let bad = |name: &str| {
            let text = format!("`{name}` is {:?}", given(name));
            Failure::refused("param_missing", text)
        };
        Ok(Rule {
            scale: match given("scale") {
                None => None,
                Some(value) => Some(value.as_f64().ok_or_else(|| bad("scale"))? as f32),
            },
            causal: match given("causal") {
                None => false,
                Some(value) => value.as_bool().ok_or_else(|| bad("causal"))?,
            },
            window: match given("window") {
                None => None,
                Some(value) => {
                    let size = value.as_u64().or_else(|| whole(value.as_f64()?));
                    Some(size.ok_or_else(|| bad("window"))? as usize)
                }
            },
        })
    }

    /// The keys that query `i` of `queries` sees among `keys` valid ones, before the mask.
    fn range(self, i: usize, queries: usize, keys: usize) -> std::ops::Range<usize> {
        let position = (keys + i) as i64 - queries as i64;
        let end = match self.causal {
            true => (position + 1).clamp(0, keys as i64) as usize,
            false => keys,
        };
        let start = match self.window {
            Some(window) => (position + 1 - window as i64).clamp(0, end as i64) as usize,
            None => 0,
        };
        start..end
    }
}

fn whole(value: f64) -> Option<u64> {
    (value >= 0.0 && value.fract() == 0.0).then_some(value as u64)
}

/// Sizes of a call.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    /// Channels of a head.
    d: usize,
}

impl Sizes {
    fn of(q: &Tensor<'_>, k: &Tensor<'_>, v: &Tensor<'_>) -> Result<Self, Failure> {
        let [batch, heads, queries, d] = ports::dims("q", q)?;
        let [_, kv_heads, keys, _] = ports::dims("k", k)?;
        ports::expect_dims("k", k, &[batch, kv_heads, keys, d])?;
        ports::expect_dims("v", v, &[batch, kv_heads, keys, d])?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let text = format!("{heads} heads of q for {kv_heads} of k");
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        Ok(Sizes {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            d,
        })
    }
}

/// An additive mask as it lies, with the strides that repeat it over `[B, H, Sq, Skv]`.
struct Mask<'m> {
    values: &'m [f32],
    strides: [usize; 4],
}

impl<'m> Mask<'m> {
    fn of<'a: 'm>(
        mask: &Tensor<'a>,
        sizes: &Sizes,
        buffer: &'m mut [f32],
    ) -> Result<Self, Failure> {
        let whole = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
        mask.broadcast_to(&whole.map(|dim| dim as i64))?;
        let missing = 4 - mask.rank();
        let (mut strides, mut step) = ([0; 4], 1);
        for (axis, dim) in mask.dims().iter().enumerate().rev() {
            if *dim > 1 {
                strides[missing + axis] = step;
            }
            step *= *dim as usize;
        }
        Ok(Mask {
            values: ports::floats(mask, buffer)?,
            strides,
        })
    }

    fn at(&self, index: [usize; 4]) -> f32 {
        let products = index.iter().zip(&self.strides).map(|(i, s)| i * s);
        self.values[products.sum::<usize>()]
    }
}

impl BoundForm for Attention {
    /// Buffers depend on the number of keys, which only a call knows: the first one makes them.
    fn facts(&self) -> FormFacts {
        FormFacts::default()
    }

    fn call(
        &mut self,
        _ctx: &CallCtx,
        inputs: &[Tensor<'_>],
        outputs: &mut [TensorMut<'_>],
        _states: &mut [TensorMut<'_>],
    ) -> Result<(), Failure> {
        let [q, k, v] = self.qkv.map(|at| ports::required(inputs, at));
        let (q, k, v) = (q?, k?, v?);
        let sizes = Sizes::of(&q, &k, &v)?;
        self.rows.admit(Some(q), sizes.d)?;
        self.rows.check_dtype("k", &k)?;
        self.rows.check_dtype("v", &v)?;
        let Sizes {
            batch,
            heads,
            queries,
            d,
            ..
        } = sizes;
        let out = self
            .rows
            .output_of(outputs, self.out, &[batch, queries, heads, d])?;
        let lens = valid_keys(ports::input(inputs, self.kv_len), &sizes)?;
        let mask = ports::input(inputs, self.mask);
        let parts = [
            q.len(),
            k.len(),
            v.len(),
            mask.map_or(0, |mask| mask.len()),
            out.len(),
        ];
        let mut lease = self.shared.pool.take(parts.iter().sum());
        let [q_buffer, k_buffer, v_buffer, mask_buffer, y] = lease.split(parts);
        let mask = match mask {
            Some(mask) => Some(Mask::of(&mask, &sizes, mask_buffer)?),
            None => None,
        };
        let values = Values {
            q: ports::floats(&q, q_buffer)?,
            k: ports::floats(&k, k_buffer)?,
            v: ports::floats(&v, v_buffer)?,
            mask,
            lens,
        };
        attend(&self.shared.host, self.rule, sizes, &values, y);
        out.write_f32(y)
    }
}

struct Values<'v> {
    q: &'v [f32],
    k: &'v [f32],
    v: &'v [f32],
    mask: Option<Mask<'v>>,
    /// Valid keys of each batch row.
    lens: Vec<usize>,
}

/// `y[b, i, h] = sum over j of softmax_j(scale q.k + mask) v`.
fn attend(host: &Host, rule: Rule, sizes: Sizes, values: &Values<'_>, y: &mut [f32]) {
    let Sizes {
        heads,
        kv_heads,
        queries,
        keys,
        d,
        ..
    } = sizes;
    if d == 0 {
        return;
    }
    let scale = rule.scale.unwrap_or(1.0 / (d as f32).sqrt());
    host.parallel_chunks(y, d, |row, y| {
        let (b, i, h) = (row / (queries * heads), row / heads % queries, row % heads);
        let kv = b * kv_heads + h / (heads / kv_heads);
        let q = &values.q[((b * heads + h) * queries + i) * d..][..d];
        let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0_f32);
        y.fill(0.0);
        for j in rule.range(i, queries, values.lens[b]) {
            let at = kv * keys + j;
            let mut score = scale * dot(q, &values.k[at * d..][..d]);
            if let Some(mask) = &values.mask {
                score += mask.at([b, h, i, j]);
            }
            if score == f32::NEG_INFINITY {
                continue;
            }
            if score > largest {
                let by = (largest - score).exp();
                sum *= by;
                y.iter_mut().for_each(|y| *y *= by);
                largest = score;
            }
            let weight = (score - largest).exp();
            sum += weight;
            for (y, v) in y.iter_mut().zip(&values.v[at * d..][..d]) {
                *y += weight * v;
            }
        }
        // A query without a key gives 0.
        if sum != 0.0 {
            y.iter_mut().for_each(|y| *y /= sum);
        }
    });
}

/// One number for all, or one for each batch row; every key without it.
fn valid_keys(kv_len: Option<Tensor<'_>>, sizes: &Sizes) -> Result<Vec<usize>, Failure> {
    let Some(kv_len) = kv_len else {
        return Ok(vec![sizes.keys; sizes.batch]);
    };
    // An integer, or one that the host keeps as a float.
    let given: Vec<f64> = match kv_len.to_i64_vec() {
        Ok(lens) => lens.into_iter().map(|len| len as f64).collect(),
        Err(_) => kv_len.to_f32_vec()?.into_iter().map(f64::from).collect(),
    };
    let count = |len: &f64| {
        let fits = (0.0..=sizes.keys as f64).contains(len) && len.fract() == 0.0;
        fits.then_some(*len as usize)
    };
    let lens: Option<Vec<usize>> = given.iter().map(count).collect();
    match lens {
        Some(lens) if lens.len() == sizes.batch => Ok(lens),
        Some(lens) if lens.len() == 1 => Ok(vec![lens[0]; sizes.batch]),
        _ => {
            let text = format!(
                "kv_len {given:?} for {} batch rows of {} keys",
                sizes.batch, sizes.keys
            );
            Err(Failure::invalid("dims_inconsistent", text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::noise;

    const SIZES: Sizes = Sizes {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        queries: 3,
        keys: 5,
        d: 4,
    };

    /// The definition in f64, one query at a time.
    fn slow(rule: Rule, values: &Values<'_>) -> Vec<f32> {
        let s = SIZES;
        let mut out = Vec::new();
        for row in 0..s.batch * s.queries * s.heads {
            let (b, i, h) = (
                row / (s.queries * s.heads),
                row / s.heads % s.queries,
                row % s.heads,
            );
            let kv = b * s.kv_heads + h * s.kv_heads / s.heads;
            let position = values.lens[b] as i64 - s.queries as i64 + i as i64;
            let seen = (0..values.lens[b]).filter(|j| {
                let j = *j as i64;
                let recent = rule.window.is_none_or(|w| j > position - w as i64);
                (!rule.causal || j <= position) && recent
            });
            let score = |j: usize| -> f64 {
                let q = &values.q[((b * s.heads + h) * s.queries + i) * s.d..][..s.d];
                let k = &values.k[(kv * s.keys + j) * s.d..][..s.d];
                let sum: f64 = q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum();
                let scale = rule.scale.map_or((s.d as f64).powf(-0.5), f64::from);
                let mask = values.mask.as_ref().map_or(0.0, |m| m.at([b, h, i, j]));
                scale * sum + f64::from(mask)
            };
            let exp: Vec<(usize, f64)> = seen.map(|j| (j, score(j).exp())).collect();
            let sum: f64 = exp.iter().map(|(_, e)| e).sum();
            for c in 0..s.d {
                let v = |j: usize| f64::from(values.v[(kv * s.keys + j) * s.d + c]);
                let y: f64 = exp.iter().map(|(j, e)| e * v(*j)).sum();
                out.push(if sum == 0.0 { 0.0 } else { (y / sum) as f32 });
            }
        }
        out
    }

    #[test]
    fn every_rule_is_its_definition_and_a_row_without_a_key_gives_zero() {
        let s = SIZES;
        let q = noise(1, s.batch * s.heads * s.queries * s.d);
        let k = noise(2, s.batch * s.kv_heads * s.keys * s.d);
        let v = noise(3, s.batch * s.kv_heads * s.keys * s.d);
        let mut shared = noise(4, s.queries * s.keys);
        shared[s.keys..2 * s.keys].fill(f32::NEG_INFINITY);
        let none = [0.0; 0];
        for (scale, causal, window) in [
            (None, false, None),
            (Some(0.7), true, None),
            (None, true, Some(2)),
            (None, false, Some(1)),
        ] {
            let rule = Rule {
                scale,
                causal,
                window,
            };
            for (lens, masked) in [(vec![5, 5], false), (vec![2, 4], true)] {
                let mask = Mask {
                    values: if masked { &shared } else { &none },
                    strides: [0, 0, s.keys, 1],
                };
                let values = Values {
                    q: &q,
                    k: &k,
                    v: &v,
                    mask: masked.then_some(mask),
                    lens,
                };
                let mut got = vec![f32::NAN; s.batch * s.queries * s.heads * s.d];
                attend(&Host::detached(), rule, s, &values, &mut got);
                for (got, want) in got.iter().zip(slow(rule, &values)) {
                    assert!((got - want).abs() < 1e-6, "{rule:?}: {got} is not {want}");
                }
                // The masked query, and the first one of two keys under causality, see nothing.
                let row = s.heads * s.d;
                assert_eq!(got[row..2 * row].iter().any(|y| *y != 0.0), !masked);
            }
        }
    }
}
