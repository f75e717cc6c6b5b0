//! Scaled scores, additive mask, softmax and weighted values for the heads that share one head of keys.
//!
//! One pass over the keys in blocks of 64: a row keeps the largest score so far, the sum of its weights and its
//! weighted values, and rescales both when a larger score comes, so there is no matrix of scores. With many rows a
//! block of keys is turned once and multiplied with tiles of rows; with few (a decode step) turning costs more than it
//! saves, and scores are dot products. Everything is f32.

use std::ops::Range;

use crate::elementwise::exp;
use crate::isa::{vectorised, Isa};
use crate::kernels::f32::product;

/// Keys of a block.
pub const BLOCK: usize = 64;
/// Rows of a tile.
const TILE: usize = 6;
/// Rows from which a block of keys is turned.
const TURNED: usize = 8;

/// One head of keys and values and the rows that read it.
pub struct Head<'a> {
    /// Channels of a head.
    pub d: usize,
    /// What scores are multiplied with.
    pub scale: f32,
    /// Keys, `[keys, d]`.
    pub k: &'a [f32],
    /// Values, `[keys, d]`.
    pub v: &'a [f32],
}

/// One query.
pub struct Row<'a> {
    /// Its values.
    pub q: &'a [f32],
    /// The keys it sees.
    pub keys: Range<usize>,
    /// Added to the scores, one for each key of the head; none where there is no mask.
    pub mask: Option<&'a [f32]>,
}

/// Floats of scratch for so many rows.
pub fn scratch(rows: usize, d: usize) -> usize {
    // Queries, sums and weights of a tile, a turned block, and two numbers a row.
    rows * d + TILE * BLOCK + BLOCK * d + 2 * rows
}

/// Writes the weighted values of every row to `out`, `[rows, d]`. A row without a key gives 0.
pub fn attend(isa: Isa, head: &Head<'_>, rows: &[Row<'_>], scratch: &mut [f32], out: &mut [f32]) {
    let d = head.d;
    out.fill(0.0);
    let (queries, rest) = scratch.split_at_mut(rows.len() * d);
    let (scores, rest) = rest.split_at_mut(TILE * BLOCK);
    let (turned, rest) = rest.split_at_mut(BLOCK * d);
    let (largest, sums) = rest.split_at_mut(rows.len());
    let sums = &mut sums[..rows.len()];
    largest.fill(f32::NEG_INFINITY);
    sums.fill(0.0);
    for (to, row) in queries.chunks_exact_mut(d).zip(rows) {
        scaled(isa, row.q, head.scale, to);
    }
    let start = rows.iter().map(|row| row.keys.start).min().unwrap_or(0);
    let end = rows.iter().map(|row| row.keys.end).max().unwrap_or(0);
    let many = rows.len() >= TURNED;
    let mut first = start;
    while first < end {
        let keys = BLOCK.min(end - first);
        let k = &head.k[first * d..(first + keys) * d];
        if many {
            turn(isa, k, d, turned);
        }
        for tile in (0..rows.len()).step_by(TILE) {
            let tiled = &rows[tile..(tile + TILE).min(rows.len())];
            let meets = |row: &Row<'_>| row.keys.start < first + keys && row.keys.end > first;
            if !tiled.iter().any(meets) {
                continue;
            }
            let q = &queries[tile * d..][..tiled.len() * d];
            if many {
                product(
                    isa,
                    (q, d),
                    (turned, BLOCK),
                    d,
                    (scores, BLOCK),
                    BLOCK,
                    false,
                );
            } else {
                for (q, to) in q.chunks_exact(d).zip(scores.chunks_exact_mut(BLOCK)) {
                    dots(isa, q, k, &mut to[..keys]);
                }
            }
            for (r, row) in tiled.iter().enumerate() {
                let Some(scores) = scores[r * BLOCK..].first_chunk_mut() else {
                    continue;
                };
                hide(scores, row, first);
                if let Some(mask) = row.mask {
                    let mask = &mask[first..first + keys];
                    scores.iter_mut().zip(mask).for_each(|(s, m)| *s += m);
                }
                let (most, sum) = (&mut largest[tile + r], &mut sums[tile + r]);
                let by = weigh(isa, scores, most, sum);
                if by != 1.0 {
                    let out = &mut out[(tile + r) * d..][..d];
                    out.iter_mut().for_each(|v| *v *= by);
                }
            }
            let v = &head.v[first * d..(first + keys) * d];
            let out = &mut out[tile * d..][..tiled.len() * d];
            product(isa, (scores, BLOCK), (v, d), keys, (out, d), d, true);
        }
        first += keys;
    }
    for (out, sum) in out.chunks_exact_mut(d).zip(sums) {
        if *sum != 0.0 {
            let inverse = 1.0 / *sum;
            out.iter_mut().for_each(|v| *v *= inverse);
        }
    }
}

/// Scores of keys that the row does not see, or that are not there.
fn hide(scores: &mut [f32; BLOCK], row: &Row<'_>, first: usize) {
    let at = |key: usize| key.saturating_sub(first).min(BLOCK);
    let (from, to) = (at(row.keys.start), at(row.keys.end));
    let to = to.max(from);
    scores[..from].fill(f32::NEG_INFINITY);
    scores[to..].fill(f32::NEG_INFINITY);
}

vectorised! {
    fn scaled(x: &[f32], by: f32, out: &mut [f32]) {
        for (o, v) in out.iter_mut().zip(x) {
            *o = v * by;
        }
    }
}

vectorised! {
    /// `[keys, d]` becomes `[d, 64]`; keys that are not there are zeros.
    fn turn(k: &[f32], d: usize, out: &mut [f32]) {
        let keys = k.len() / d;
        // Eight channels of all keys at a time: what is written stays in the first cache.
        for (part, out) in out.chunks_mut(8 * BLOCK).enumerate() {
            let from = 8 * part;
            let channels = out.len() / BLOCK;
            for key in 0..BLOCK {
                for c in 0..channels {
                    out[c * BLOCK + key] = match key < keys {
                        true => k[key * d + from + c],
                        false => 0.0,
                    };
                }
            }
        }
    }
}

vectorised! {
    /// Dot products of one query with each key.
    fn dots(q: &[f32], k: &[f32], out: &mut [f32]) {
        for (o, k) in out.iter_mut().zip(k.chunks_exact(q.len())) {
            let mut lanes = [0f32; 16];
            let (mut a, mut b) = (q.chunks_exact(16), k.chunks_exact(16));
            for (a, b) in a.by_ref().zip(b.by_ref()) {
                for i in 0..16 {
                    lanes[i] = a[i].mul_add(b[i], lanes[i]);
                }
            }
            let rest = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b);
            let mut eight = [0f32; 8];
            for i in 0..8 {
                eight[i] = lanes[i] + lanes[i + 8];
            }
            let mut four = [0f32; 4];
            for i in 0..4 {
                four[i] = eight[i] + eight[i + 4];
            }
            *o = (four[0] + four[2]) + (four[1] + four[3]) + rest.sum::<f32>();
        }
    }
}

vectorised! {
    /// Scores become weights relative to the largest score so far, which they may raise; gives what earlier weights are
    /// multiplied with.
    fn weigh(scores: &mut [f32; BLOCK], largest: &mut f32, sum: &mut f32) -> f32 {
        // Lane by lane over a block of fixed size: no shorter rest keeps a loop from being one vector a turn.
        let mut most = [f32::NEG_INFINITY; 16];
        let mut odd = [0_u32; 16];
        for part in scores.chunks_exact(16) {
            for i in 0..16 {
                most[i] = if part[i] > most[i] { part[i] } else { most[i] };
                odd[i] |= u32::from(part[i].is_nan());
            }
        }
        let most = most.iter().fold(*largest, |a, b| a.max(*b));
        if odd.iter().any(|odd| *odd != 0) {
            // Not a number reaches the row's every output.
            scores.fill(f32::NAN);
            *sum = f32::NAN;
            return 1.0;
        }
        if most == f32::NEG_INFINITY {
            scores.fill(0.0);
            return 1.0;
        }
        let by = match *largest == most {
            true => 1.0,
            false if *largest == f32::NEG_INFINITY => 0.0,
            false => exp(*largest - most),
        };
        let mut sums = [0f32; 16];
        for part in scores.chunks_exact_mut(16) {
            for i in 0..16 {
                // A hidden key weighs exactly nothing.
                let weight = exp(part[i] - most);
                let weight = if part[i] == f32::NEG_INFINITY { 0.0 } else { weight };
                part[i] = weight;
                sums[i] += weight;
            }
        }
        *sum = *sum * by + sums.iter().sum::<f32>();
        *largest = most;
        by
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tests::noise;

    fn plain(head: &Head<'_>, row: &Row<'_>) -> Vec<f64> {
        let d = head.d;
        let score = |key: usize| -> f64 {
            let k = &head.k[key * d..][..d];
            let dot: f64 = row
                .q
                .iter()
                .zip(k)
                .map(|(q, k)| f64::from(*q) * f64::from(*k))
                .sum();
            f64::from(head.scale) * dot + row.mask.map_or(0.0, |m| f64::from(m[key]))
        };
        let weights: Vec<(usize, f64)> = row
            .keys
            .clone()
            .map(|key| (key, score(key).exp()))
            .collect();
        let sum: f64 = weights.iter().map(|(_, w)| w).sum();
        let value = |c: usize| {
            let sum_of = weights
                .iter()
                .map(|(key, w)| w * f64::from(head.v[key * d + c]));
            sum_of.sum::<f64>() / if sum == 0.0 { 1.0 } else { sum }
        };
        (0..d).map(value).collect()
    }

    #[test]
    fn every_row_is_its_definition_whatever_it_sees() {
        for isa in Isa::here() {
            for d in [4, 16, 40, 64, 80, 128, 256] {
                for (count, keys) in [
                    (1, 1),
                    (1, 130),
                    (3, 64),
                    (7, 65),
                    (8, 63),
                    (13, 200),
                    (20, 70),
                ] {
                    let (k, v) = (noise(keys * d, 1), noise(keys * d, 2));
                    let q: Vec<f32> = noise(count * d, 3).iter().map(|v| 3.0 * v).collect();
                    let mut mask = noise(keys, 4);
                    mask[keys / 2] = f32::NEG_INFINITY;
                    let head = Head {
                        d,
                        scale: 0.3,
                        k: &k,
                        v: &v,
                    };
                    let rows: Vec<Row<'_>> = (0..count)
                        .map(|r| Row {
                            q: &q[r * d..][..d],
                            keys: match r % 5 {
                                0 => 0..keys,
                                1 => 0..(r + 1).min(keys),
                                2 => keys / 3..keys,
                                3 => keys / 2..keys / 2,
                                _ => keys - 1..keys,
                            },
                            mask: (r % 2 == 1).then_some(&mask[..]),
                        })
                        .collect();
                    let mut room = vec![f32::NAN; scratch(count, d)];
                    let mut out = vec![f32::NAN; count * d];
                    attend(isa, &head, &rows, &mut room, &mut out);
                    for (r, (got, row)) in out.chunks_exact(d).zip(&rows).enumerate() {
                        for (got, want) in got.iter().zip(plain(&head, row)) {
                            let off = (f64::from(*got) - want).abs();
                            assert!(
                                off < 2e-6,
                                "{isa:?} d {d} keys {keys} row {r}: {got} for {want}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_a_number_stays_in_its_row() {
        for isa in Isa::here() {
            for count in [2, 9] {
                let (d, keys) = (16, 70);
                let (k, v) = (noise(keys * d, 1), noise(keys * d, 2));
                let mut q = noise(count * d, 3);
                q[d + 1] = f32::NAN;
                let head = Head {
                    d,
                    scale: 1.0,
                    k: &k,
                    v: &v,
                };
                let row = |r: usize| Row {
                    q: &q[r * d..][..d],
                    keys: 0..keys,
                    mask: None,
                };
                let rows: Vec<Row<'_>> = (0..count).map(row).collect();
                let mut room = vec![0.0; scratch(count, d)];
                let mut out = vec![0.0; count * d];
                attend(isa, &head, &rows, &mut room, &mut out);
                for (r, row) in out.chunks_exact(d).enumerate() {
                    assert!(row.iter().all(|v| v.is_nan() == (r == 1)), "{isa:?} {r}");
                }
            }
        }
    }
}
