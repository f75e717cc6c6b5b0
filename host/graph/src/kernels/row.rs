//! Kernels of a captured step: slices in and out, nothing allocated.
//!
//! Norms, rope, activations and element-wise passes are the very functions the session runs, so they agree to the bit.
//! A product and an attention of one row are this file's own, because candle's allocate; they differ from candle's in
//! the order of their sums (relative error of some 1e-7 a product). Sums run in 32 lanes, so the compiler uses whatever
//! vectors there are and the result is the same on every machine.

use super::act::{scalar, ActKind};
use super::attention::{softmax, Attention};
use super::norm::{l2_row, layer_row, rms_row};
use super::rope::{turn, Pairing};
use super::table::angles;
use crate::crew::{pieces, Crew};
use crate::graph::Layout;

const LANES: usize = 32;

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (ca, cb) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = ca
        .remainder()
        .iter()
        .zip(cb.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in ca.zip(cb) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0] + tail
}

/// Runs with the widest vectors that need no build option; `Op::call` must be inlined.
trait Wide {
    fn call(self);
}

fn wide(op: impl Wide) {
    #[cfg(target_arch = "x86_64")]
    {
        struct As<W>(W);
        impl<W: Wide> pulp::NullaryFnOnce for As<W> {
            type Output = ();
            #[inline(always)]
            fn call(self) {
                self.0.call();
            }
        }
        if let Some(v3) = pulp::x86::V3::try_new() {
            return pulp::Simd::vectorize(v3, As(op));
        }
    }
    op.call();
}

/// `out[i] = w[i] . x`, rows of `w` as long as `x`.
struct Dots<'a>(&'a [f32], &'a [f32], &'a mut [f32]);

impl Wide for Dots<'_> {
    #[inline(always)]
    fn call(self) {
        let Dots(x, w, out) = self;
        for (o, w) in out.iter_mut().zip(w.chunks_exact(x.len().max(1))) {
            *o = dot(x, w);
        }
    }
}

/// `out += x[k] * w[k]` for every `k`; `w` has rows of `stride`, of which `out` is a part.
struct Sums<'a>(&'a [f32], &'a [f32], usize, &'a mut [f32]);

impl Wide for Sums<'_> {
    #[inline(always)]
    fn call(self) {
        let Sums(x, w, stride, out) = self;
        out.fill(0.0);
        for (k, x) in x.iter().enumerate() {
            let row = &w[k * stride..k * stride + out.len()];
            for (o, w) in out.iter_mut().zip(row) {
                *o += x * w;
            }
        }
    }
}

/// One row times a dense matrix, `[N,K]` (`OutIn`) or `[K,N]`.
pub(crate) fn linear(crew: &dyn Crew, x: &[f32], w: &[f32], layout: Layout, out: &mut [f32]) {
    let n = out.len();
    pieces(crew, n, w.len(), (out, &mut []), |from, out, _| {
        let len = out.len();
        match layout {
            Layout::OutIn => wide(Dots(x, &w[from * x.len()..(from + len) * x.len()], out)),
            Layout::InOut => wide(Sums(x, &w[from..], n, out)),
        }
    });
}

/// Sizes of an attention of one query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attend {
    pub(crate) rule: Attention,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Channels of keys and of values.
    pub(crate) widths: (usize, usize),
    /// Positions a head of the region has room for.
    pub(crate) capacity: usize,
}

struct Group<'a> {
    a: &'a Attend,
    keys: std::ops::Range<usize>,
    /// The group's queries.
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    /// Rows of `capacity`.
    scores: &'a mut [f32],
    out: &'a mut [f32],
}

impl Wide for Group<'_> {
    #[inline(always)]
    fn call(self) {
        let Attend {
            rule,
            widths: (d, dv),
            capacity,
            ..
        } = *self.a;
        let scale = rule.scale.unwrap_or(1.0 / (d as f32).sqrt());
        let keys = self.keys;
        for j in keys.clone() {
            let k = &self.k[j * d..(j + 1) * d];
            let rows = self.scores.chunks_exact_mut(capacity);
            for (row, q) in rows.zip(self.q.chunks_exact(d)) {
                row[j] = dot(q, k) * scale;
            }
        }
        for row in self.scores.chunks_exact_mut(capacity) {
            let row = &mut row[keys.clone()];
            if let Some(c) = rule.softcap {
                row.iter_mut().for_each(|p| *p = c * (*p / c).tanh());
            }
            softmax(row);
        }
        self.out.fill(0.0);
        for j in keys {
            let v = &self.v[j * dv..(j + 1) * dv];
            let rows = self.scores.chunks_exact(capacity);
            for (row, out) in rows.zip(self.out.chunks_exact_mut(dv)) {
                let p = row[j];
                for (o, v) in out.iter_mut().zip(v) {
                    *o += p * v;
                }
            }
        }
    }
}

/// One query of each head, the last of `len` positions. `q [H,D]`, `k [Hkv,capacity,D]`, `v [Hkv,capacity,Dv]`, scores
/// `[H,capacity]`, out `[H,Dv]`.
pub(crate) fn attend(
    crew: &dyn Crew,
    a: &Attend,
    len: usize,
    (q, k, v): (&[f32], &[f32], &[f32]),
    scores: &mut [f32],
    out: &mut [f32],
) {
    let (d, dv) = a.widths;
    let group = a.heads / a.kv_heads;
    let keys = match a.rule.window {
        Some(w) => len.saturating_sub(w)..len,
        None => 0..len,
    };
    let work = a.heads * keys.len() * (d + dv);
    pieces(
        crew,
        a.kv_heads,
        work,
        (out, scores),
        |from, out, scores| {
            let outs = out.chunks_exact_mut(group * dv);
            let scores = scores.chunks_exact_mut(group * a.capacity);
            for (i, (out, scores)) in outs.zip(scores).enumerate() {
                let head = from + i;
                wide(Group {
                    a,
                    keys: keys.clone(),
                    q: &q[head * group * d..(head + 1) * group * d],
                    k: &k[head * a.capacity * d..(head + 1) * a.capacity * d],
                    v: &v[head * a.capacity * dv..(head + 1) * a.capacity * dv],
                    scores,
                    out,
                });
            }
        },
    );
}

/// Norms of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Norm {
    Rms { eps: f32, offset: bool },
    Layer { eps: f32 },
    L2 { eps: f32 },
}

/// Rows of `width`.
pub(crate) fn norm(
    kind: Norm,
    x: &[f32],
    w: Option<&[f32]>,
    b: Option<&[f32]>,
    width: usize,
    out: &mut [f32],
) {
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        match kind {
            Norm::Rms { eps, offset } => rms_row(x, w, eps, offset, out),
            Norm::Layer { eps } => layer_row(x, w, b, eps, out),
            Norm::L2 { eps } => l2_row(x, out, eps, 1.0),
        }
    }
}

/// Both operands as long as the result, or the second repeated.
pub(crate) fn zip(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32, out: &mut [f32]) {
    if let [b] = b {
        out.iter_mut().zip(a).for_each(|(o, a)| *o = f(*a, *b));
        return;
    }
    let width = b.len().max(1);
    for (out, a) in out.chunks_mut(width).zip(a.chunks(width)) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = f(*a, *b);
        }
    }
}

pub(crate) fn act(kind: ActKind, x: &[f32], out: &mut [f32]) {
    if let Some(f) = scalar(kind) {
        out.iter_mut().zip(x).for_each(|(o, v)| *o = f(*v));
    }
}

/// `x` of `tokens` rows of heads, tables of one row a token.
pub(crate) fn rope(
    x: &[f32],
    (cos, sin): (&[f32], &[f32]),
    tokens: usize,
    (d, r): (usize, usize),
    pairing: Pairing,
    out: &mut [f32],
) {
    let (row, w) = (x.len() / tokens.max(1), cos.len() / tokens.max(1));
    for t in 0..tokens {
        let tables = (&cos[t * w..(t + 1) * w], &sin[t * w..(t + 1) * w]);
        let (from, to) = (t * row, (t + 1) * row);
        turn(&x[from..to], tables, (d, r), pairing, &mut out[from..to]);
    }
}

/// Fills both tables. `at` has room for the positions as numbers.
pub(crate) fn rope_table(
    positions: &[i64],
    rule: (&[f32], f32, Option<&[usize]>),
    at: &mut [f32],
    cos: &mut [f32],
    sin: &mut [f32],
) {
    at.iter_mut()
        .zip(positions)
        .for_each(|(a, p)| *a = *p as f32);
    angles(at, rule, cos, sin);
}

/// The first of the largest; none where no score is finite.
pub(crate) fn argmax(scores: &[f32]) -> Option<usize> {
    if !scores.iter().any(|v| v.is_finite()) {
        return None;
    }
    // Piece by piece, lane by lane; the place is looked for once, where the first largest is.
    let mut best: (&[f32], usize, f32) = (&[], 0, f32::NEG_INFINITY);
    for (i, piece) in scores.chunks(PIECE).enumerate() {
        let most = largest(piece);
        if most > best.2 {
            best = (piece, i * PIECE, most);
        }
    }
    let (piece, from, most) = best;
    piece.iter().position(|v| *v == most).map(|i| from + i)
}

/// Scores among which a largest one is found at a time.
const PIECE: usize = 1024;

/// The largest; what is not a number is none.
fn largest(scores: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = scores.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = if *v > *lane { *v } else { *lane };
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(f32::NEG_INFINITY, |m, v| if *v > m { *v } else { m })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crew::{tests::Scoped, Alone};
    use candle_core::{Device, Tensor};

    fn random(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed;
        (0..n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (s >> 8) as f32 / (1u32 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn t(v: &[f32], dims: &[usize]) -> Tensor {
        Tensor::from_slice(v, dims, &Device::Cpu).unwrap()
    }

    fn close(got: &[f32], want: &Tensor, what: &str) {
        let want = want.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(got.len(), want.len(), "{what}");
        let most = want.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() <= 2e-6 * most, "{what}: {g} is not {w}");
        }
    }

    #[test]
    fn a_row_times_a_matrix_agrees_with_candle_and_with_any_number_of_threads() {
        for (k, n) in [(7, 3), (64, 96), (600, 333), (5, 40_000)] {
            let (x, w) = (random(k, 1), random(k * n, 2));
            for layout in [Layout::OutIn, Layout::InOut] {
                let dims = match layout {
                    Layout::OutIn => [n, k],
                    Layout::InOut => [k, n],
                };
                let want = super::super::linear::linear(&t(&x, &[1, k]), &t(&w, &dims), layout);
                let mut one = vec![0f32; n];
                linear(&Alone, &x, &w, layout, &mut one);
                close(&one, &want.unwrap(), &format!("{k}x{n} {layout:?}"));
                let mut many = vec![9f32; n];
                linear(&Scoped, &x, &w, layout, &mut many);
                assert_eq!(one, many);
            }
        }
    }

    #[test]
    fn one_query_agrees_with_the_session_s_attention() {
        let plain = Attention {
            scale: None,
            causal: true,
            window: None,
            softcap: None,
        };
        let rules = [
            plain,
            Attention {
                window: Some(5),
                ..plain
            },
            Attention {
                softcap: Some(0.7),
                scale: Some(0.4),
                ..plain
            },
        ];
        for (h, hk, d, dv, capacity, len) in [
            (6, 2, 8, 8, 20, 13),
            (32, 32, 64, 64, 24, 24),
            (4, 1, 5, 3, 9, 1),
        ] {
            let (q, k, v) = (
                random(h * d, 1),
                random(hk * capacity * d, 2),
                random(hk * capacity * dv, 3),
            );
            for rule in rules {
                let a = Attend {
                    rule,
                    heads: h,
                    kv_heads: hk,
                    widths: (d, dv),
                    capacity,
                };
                let valid =
                    |x: &[f32], w: usize| t(x, &[1, hk, capacity, w]).narrow(2, 0, len).unwrap();
                let want = rule
                    .run(
                        &t(&q, &[1, h, 1, d]),
                        &valid(&k, d),
                        &valid(&v, dv),
                        None,
                        None,
                    )
                    .unwrap();
                let (mut scores, mut out) = (vec![0f32; h * capacity], vec![0f32; h * dv]);
                attend(&Alone, &a, len, (&q, &k, &v), &mut scores, &mut out);
                close(&out, &want, &format!("{rule:?}"));
                let mut many = vec![5f32; h * dv];
                attend(&Scoped, &a, len, (&q, &k, &v), &mut scores, &mut many);
                assert_eq!(out, many);
            }
        }
    }

    #[test]
    fn the_largest_score_is_the_first_finite_one() {
        let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
        assert_eq!(argmax(&[0.0, 2.0, 2.0]), Some(1));
        assert_eq!(argmax(&[nan, -1.0, nan]), Some(1));
        assert_eq!(argmax(&[low, nan]), None);
        assert_eq!(argmax(&[]), None);
    }
}
