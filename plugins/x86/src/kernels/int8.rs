//! int8 weights with one scale a channel, integer activations of 8 or 16 bits with one scale a row.
//!
//! A step is 4 inputs. Codes are stored plus 128, since VNNI multiplies unsigned by signed bytes; what that adds is
//! taken back exactly, in integers, by the sums of the activations' bytes. 16-bit activations are two planes of signed
//! bytes, `256 hi + lo`. On AVX2 both are multiplied as 16-bit numbers.

// Lanes and rows are numbers here: the same one indexes several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::{by_rows, by_size, Cover, Panels, Tile, LANES, PANEL};
use crate::activations::Integers;
use crate::isa::Isa;

/// Inputs of a step.
pub const STEP: usize = 4;
/// Added to a code.
pub const OFFSET: i16 = 128;
/// Most inputs: sums of `255 * 127` stay within 32 bits.
pub const MOST_INPUTS: usize = 65536;

/// A packed matrix.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// Where lines lie; a unit is 64 bytes.
    pub panels: Panels,
    /// The bytes.
    pub bytes: &'a [u8],
    /// One scale a channel, padded to lines.
    pub scales: &'a [f32],
}

/// Rows of a tile for planes of activations: as many sums as registers hold.
pub fn tile_rows(isa: Isa, planes: usize) -> usize {
    match (isa.wide(), planes) {
        (true, 1) => 6,
        _ => 3,
    }
}

/// Position of a code in its unit: a lane's four inputs side by side.
pub fn position(lane: usize, input: usize) -> usize {
    lane * STEP + input
}

/// Computes a tile.
pub fn tile(isa: Isa, weights: &Weights<'_>, x: &Integers<'_>, cover: Cover, tile: &mut Tile) {
    check(weights, x, cover);
    // SAFETY: the isa was found present, and `check` saw that every row and line is there.
    unsafe {
        match (isa.wide(), x.planes()) {
            (true, 1) => {
                by_size!(cover.rows, cover.lines, vnni, 1, [1 2 3 4 5 6], (weights, x, cover, tile))
            }
            (true, _) => {
                by_size!(cover.rows, cover.lines, vnni, 2, [1 2 3], (weights, x, cover, tile))
            }
            (false, _) => {
                // 16 registers hold the sums of one line for three rows.
                for line in 0..cover.lines {
                    let part = Cover {
                        line: cover.line + line,
                        lines: 1,
                        ..cover
                    };
                    by_rows!(cover.rows, avx2, 0, [1 2 3], (weights, x, part, tile, line * LANES));
                }
            }
        }
    }
}

fn check(weights: &Weights<'_>, x: &Integers<'_>, cover: Cover) {
    let panels = &weights.panels;
    let last = cover.line + cover.lines;
    assert!(panels.unit == 64 && weights.bytes.len() >= panels.bytes());
    assert!(cover.lines >= 1 && cover.line % PANEL + cover.lines <= PANEL);
    assert!(last <= panels.lines && weights.scales.len() >= last * LANES);
    assert!(cover.row + cover.rows <= x.rows() && x.stride() >= panels.steps * STEP);
}

/// # Safety
/// AVX-512 F, BW and VNNI are present; the cover is within the weights and the rows; `x` has `PLANES` planes.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn vnni<const PLANES: usize, const R: usize, const W: usize>(
    weights: &Weights<'_>,
    x: &Integers<'_>,
    cover: Cover,
    tile: &mut Tile,
) {
    let place = weights.panels.place(cover.line);
    let stride = place.width * 64;
    // SAFETY: offsets of a line and of rows that are there.
    let (mut at, rows) = unsafe {
        let first = place.offset + place.index * 64;
        (weights.bytes.as_ptr().add(first), x.bytes(cover.row))
    };
    let mut sums = [[[_mm512_setzero_si512(); W]; PLANES]; R];
    for (r, row) in sums.iter_mut().enumerate() {
        for (p, plane) in row.iter_mut().enumerate() {
            let sum = x.sum(cover.row + r, p);
            *plane = [_mm512_set1_epi32(-i32::from(OFFSET) * sum); W];
        }
    }
    for step in 0..weights.panels.steps {
        let mut w = [_mm512_setzero_si512(); W];
        for (l, w) in w.iter_mut().enumerate() {
            // SAFETY: `l` is below the panel's width, the step below its steps.
            *w = unsafe { _mm512_loadu_si512(at.add(l * 64).cast()) };
        }
        for (r, row) in sums.iter_mut().enumerate() {
            for (p, plane) in row.iter_mut().enumerate() {
                // SAFETY: `4 * step + 4 <= stride` of a row that is there.
                let four = unsafe {
                    let at = rows.add(r * x.record() + p * x.stride() + STEP * step);
                    at.cast::<i32>().read_unaligned()
                };
                let four = _mm512_set1_epi32(four);
                for (sum, w) in plane.iter_mut().zip(&w) {
                    *sum = _mm512_dpbusd_epi32(*sum, *w, four);
                }
            }
        }
        at = at.wrapping_add(stride);
    }
    for (r, row) in sums.iter().enumerate() {
        let scale = _mm512_set1_ps(x.scale(cover.row + r));
        for l in 0..W {
            let mut sum = _mm512_cvtepi32_ps(row[0][l]);
            if PLANES == 2 {
                let low = _mm512_cvtepi32_ps(row[PLANES - 1][l]);
                sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0), low);
            }
            // SAFETY: 16 scales of a line that is there; 16 floats of the tile.
            unsafe {
                let channel =
                    _mm512_loadu_ps(weights.scales.as_ptr().add((cover.line + l) * LANES));
                let value = _mm512_mul_ps(sum, _mm512_mul_ps(channel, scale));
                _mm512_storeu_ps(tile.0[r].as_mut_ptr().add(l * LANES), value);
            }
        }
    }
}

/// Steps after which 32-bit sums of `127 * 32512` pairs are moved to f32.
const FLUSH: usize = 128;

/// # Safety
/// AVX2 and FMA are present; the cover is one line within the weights and the rows; `x` is kept in 16 bits.
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const TAG: usize, const R: usize>(
    weights: &Weights<'_>,
    x: &Integers<'_>,
    cover: Cover,
    tile: &mut Tile,
    column: usize,
) {
    let place = weights.panels.place(cover.line);
    let stride = place.width * 64;
    // SAFETY: offsets of a line and of rows that are there.
    let (first, rows) = unsafe {
        let first = weights.bytes.as_ptr().add(place.offset + place.index * 64);
        (first, x.words(cover.row))
    };
    let record = x.record() / 2;
    let offset = _mm_set1_epi8(-128);
    let mut values = [[_mm256_setzero_ps(); 2]; R];
    let mut step = 0;
    while step < weights.panels.steps {
        let end = (step + FLUSH).min(weights.panels.steps);
        // Four channels a register, two partial sums each.
        let mut sums = [[_mm256_setzero_si256(); 4]; R];
        for step in step..end {
            for q in 0..4 {
                // SAFETY: 16 bytes of a unit that is there.
                let codes = unsafe { _mm_loadu_si128(first.add(step * stride + 16 * q).cast()) };
                let w = _mm256_cvtepi8_epi16(_mm_xor_si128(codes, offset));
                for (r, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: four words of a row that is there.
                    let four = unsafe {
                        let at = rows.add(r * record + STEP * step);
                        at.cast::<i64>().read_unaligned()
                    };
                    let product = _mm256_madd_epi16(w, _mm256_set1_epi64x(four));
                    sums[q] = _mm256_add_epi32(sums[q], product);
                }
            }
        }
        step = end;
        for (values, sums) in values.iter_mut().zip(&sums) {
            for (half, value) in values.iter_mut().enumerate() {
                let sum = channels_of(sums[2 * half], sums[2 * half + 1]);
                *value = _mm256_add_ps(*value, _mm256_cvtepi32_ps(sum));
            }
        }
    }
    for (r, values) in values.iter().enumerate() {
        let scale = _mm256_set1_ps(x.scale(cover.row + r));
        for (half, value) in values.iter().enumerate() {
            // SAFETY: 8 scales of a line that is there; 8 floats of the tile.
            unsafe {
                let at = cover.line * LANES + 8 * half;
                let channel = _mm256_loadu_ps(weights.scales.as_ptr().add(at));
                let value = _mm256_mul_ps(*value, _mm256_mul_ps(channel, scale));
                _mm256_storeu_ps(tile.0[r].as_mut_ptr().add(column + 8 * half), value);
            }
        }
    }
}

/// Sums of neighbours: two registers of four channels with two partial sums each become eight channels.
#[inline]
#[target_feature(enable = "avx2")]
pub fn channels_of(low: __m256i, high: __m256i) -> __m256i {
    // [l0 l1 h0 h1 | l2 l3 h2 h3]
    let pairs = _mm256_hadd_epi32(low, high);
    _mm256_permute4x64_epi64(pairs, 0b11_01_10_00)
}
