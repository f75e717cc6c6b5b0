//! `attention_core`: the heads that share keys, over blocks of queries, on the host's threads.

use structures_plugin_api::abi::{CallCtx, FormFacts};
use structures_plugin_api::sdk::{BindRequest, BoundForm, Failure, Tensor, TensorMut};

use super::Leaf;
use crate::attention::{attend, scratch, Head, Row};
use crate::format::Format;
use crate::linear::Out;
use crate::pool::{plain, Line};
use crate::ports;
use crate::Shared;

pub const LEAF: Leaf = Leaf {
    strided: true,
    // The keys of a call are what the call brings.
    variants: &[
        ("kv_cadence", &["per_call"]),
        ("segment_layout", &["single_dense"]),
    ],
    ..Leaf::plain("attention_core", &["core"], bind)
};

/// Rows of a task: enough to pay for turning the keys, few enough to stay in the second cache.
const ROWS: usize = 96;

/// Rows of a head of keys from which its queries stay together, since turning the keys then pays.
const APART: usize = 8;

struct Attention {
    shared: Shared,
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
        let given = |name: &str| request.params.params.get(name).filter(|v| !v.is_null());
        let bad = |name: &str| {
            let text = format!("`{name}` is {:?}", given(name));
            Failure::refused("param_missing", text)
        };
        let whole = |v: f64| (v >= 0.0 && v.fract() == 0.0).then_some(v as usize);
        let scale = given("scale").map(|v| v.as_f64().ok_or_else(|| bad("scale")));
        let causal = given("causal").map(|v| v.as_bool().ok_or_else(|| bad("causal")));
        let window = given("window").map(|v| {
            let size = v.as_f64().and_then(whole);
            size.ok_or_else(|| bad("window"))
        });
        Ok(Rule {
            scale: scale.transpose()?.map(|v| v as f32),
            causal: causal.transpose()?.unwrap_or(false),
            window: window.transpose()?,
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

/// `[heads, len, d]` of each batch row, head by head: borrowed where a head lies in one piece.
struct Heads<'a> {
    parts: Vec<&'a [f32]>,
}

impl<'a> Heads<'a> {
    fn of<'t: 'a>(tensor: &Tensor<'t>, buffer: &'a mut Vec<f32>) -> Result<Self, Failure> {
        let [batch, heads, len, d] = ports::dims::<4>("q, k or v", tensor)?;
        let one = |at: usize| {
            tensor
                .select(0, at / heads)?
                .select(0, at % heads)?
                .as_f32()
        };
        let parts: Result<Vec<&[f32]>, Failure> = (0..batch * heads).map(one).collect();
        if let Ok(parts) = parts {
            return Ok(Heads { parts });
        }
        buffer.resize(tensor.len(), 0.0);
        tensor.read_f32(buffer)?;
        let buffer = &*buffer;
        let part = |at: usize| &buffer[at * len * d..(at + 1) * len * d];
        Ok(Heads {
            parts: (0..batch * heads).map(part).collect(),
        })
    }
}

/// An additive mask of any dims that repeat over `[B, H, Sq, Skv]`.
struct Mask<'m> {
    values: &'m [f32],
    /// Of batch row, head and query.
    strides: [usize; 3],
    keys: usize,
}

impl<'m> Mask<'m> {
    /// The last dim is written out where it repeats, so that a query's mask is a run of keys.
    fn of<'a: 'm>(
        mask: &Tensor<'a>,
        whole: [usize; 4],
        buffer: &'m mut Vec<f32>,
    ) -> Result<Self, Failure> {
        mask.broadcast_to(&whole.map(|dim| dim as i64))?;
        let own = mask.dims();
        let mut dims = [1; 4];
        dims[4 - own.len()..].copy_from_slice(own);
        dims[3] = whole[3] as i64;
        let values = ports::floats_of(mask, &dims, buffer)?;
        let (mut strides, mut step) = ([0; 3], whole[3]);
        for axis in (0..3).rev() {
            if dims[axis] > 1 {
                strides[axis] = step;
            }
            step *= dims[axis] as usize;
        }
        let keys = whole[3];
        Ok(Mask {
            values,
            strides,
            keys,
        })
    }

    fn row(&self, batch: usize, head: usize, query: usize) -> &'m [f32] {
        let [b, h, q] = self.strides;
        let at = b * batch + h * head + q * query;
        &self.values[at..at + self.keys]
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
        let [batch, heads, queries, d] = ports::dims("q", &q)?;
        let [_, kv_heads, keys, _] = ports::dims("k", &k)?;
        ports::expect_dims("k", &k, &[batch, kv_heads, keys, d])?;
        ports::expect_dims("v", &v, &[batch, kv_heads, keys, d])?;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let text = format!("{heads} heads of q for {kv_heads} of k");
            return Err(Failure::invalid("dims_inconsistent", text));
        }
        let lens = valid_keys(ports::input(inputs, self.kv_len), batch, keys)?;
        let out = ports::output_of(outputs, self.out, &[batch, queries, heads, d])?;
        if d == 0 || out.is_empty() {
            return Ok(());
        }
        let mut copies = [const { Vec::new() }; 4];
        let [q_copy, k_copy, v_copy, mask_copy] = &mut copies;
        let whole = [batch, heads, queries, keys];
        let mask = ports::input(inputs, self.mask);
        let mask = mask
            .map(|mask| Mask::of(&mask, whole, mask_copy))
            .transpose()?;
        let (q, k, v) = (
            Heads::of(&q, q_copy)?,
            Heads::of(&k, k_copy)?,
            Heads::of(&v, v_copy)?,
        );
        let out = Out::new(out, d);
        let group = heads / kv_heads;
        let each = (ROWS / group).clamp(1, queries);
        let blocks = queries.div_ceil(each);
        // With few rows the heads that share keys are computed apart: three tasks are too few for two threads.
        let parts = if queries * group < APART { group } else { 1 };
        let scale = self.rule.scale.unwrap_or(1.0 / (d as f32).sqrt());
        let (rule, shared) = (self.rule, &self.shared);
        let tasks = batch * kv_heads * blocks * parts;
        shared.host.parallel_for(tasks, |task| {
            let (task, part) = (task / parts, task % parts);
            // The last queries see most keys under causality: they come first.
            let block = blocks - 1 - task / (batch * kv_heads);
            let (b, kv) = (task % (batch * kv_heads) / kv_heads, task % kv_heads);
            let at = b * kv_heads + kv;
            let span = block * each..((block + 1) * each).min(queries);
            let row = |h: usize, i: usize| Row {
                q: &q.parts[b * heads + h][i * d..(i + 1) * d],
                keys: rule.range(i, queries, lens[b]),
                mask: mask.as_ref().map(|mask| mask.row(b, h, i)),
            };
            let heads_each = group / parts;
            let first = kv * group + part * heads_each;
            let places: Vec<(usize, usize)> = (first..first + heads_each)
                .flat_map(|h| span.clone().map(move |i| (h, i)))
                .collect();
            let rows: Vec<Row<'_>> = places.iter().map(|(h, i)| row(*h, *i)).collect();
            let sizes = [
                Line::of::<f32>(scratch(rows.len(), d)),
                Line::of::<f32>(rows.len() * d),
            ];
            let mut lease = shared.pool.take(sizes.iter().sum());
            let [room, result] = lease.split(sizes);
            let result = &mut plain::<f32>(result)[..rows.len() * d];
            let head = Head {
                d,
                scale,
                k: k.parts[at],
                v: v.parts[at],
            };
            attend(shared.isa, &head, &rows, plain(room), result);
            for ((h, i), from) in places.iter().zip(result.chunks_exact(d)) {
                // SAFETY: every query of every head is in one task.
                let to = unsafe { out.row((b * queries + i) * heads + h, 0, d) };
                to.copy_from_slice(from);
            }
        });
        Ok(())
    }
}

/// One number for all, or one for each batch row; every key without it.
fn valid_keys(
    kv_len: Option<Tensor<'_>>,
    batch: usize,
    keys: usize,
) -> Result<Vec<usize>, Failure> {
    let Some(kv_len) = kv_len else {
        return Ok(vec![keys; batch]);
    };
    // An integer, or one that the host keeps as a float.
    let given: Vec<f64> = match kv_len.to_i64_vec() {
        Ok(lens) => lens.into_iter().map(|len| len as f64).collect(),
        Err(_) => kv_len.to_f32_vec()?.into_iter().map(f64::from).collect(),
    };
    let count = |len: &f64| {
        let fits = (0.0..=keys as f64).contains(len) && len.fract() == 0.0;
        fits.then_some(*len as usize)
    };
    let lens: Option<Vec<usize>> = given.iter().map(count).collect();
    match lens {
        Some(lens) if lens.len() == batch => Ok(lens),
        Some(lens) if lens.len() == 1 => Ok(vec![lens[0]; batch]),
        _ => {
            let text = format!("kv_len {given:?} for {batch} batch rows of {keys} keys");
            Err(Failure::invalid("dims_inconsistent", text))
        }
    }
}
