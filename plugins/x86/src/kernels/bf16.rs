//! bf16 weights and activations, sums in f32. A step is 2 inputs of a channel side by side.
//!
//! `VDPBF16PS` where it is; elsewhere both are widened, which is exact, and multiplied in f32.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{by_rows, by_size, Cover, Panels, Tile, LANES, PANEL, RUN};
use crate::activations::Halves;
use crate::isa::Isa;

/// Inputs of a step.
pub const STEP: usize = 2;

/// A packed matrix.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// Where lines lie; a unit is 64 bytes.
    pub panels: Panels,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// Position of a value in its unit, in values.
pub fn position(lane: usize, input: usize) -> usize {
    lane * STEP + input
}

/// Rows of a tile.
pub fn tile_rows(isa: Isa) -> usize {
    match isa {
        Isa::Avx512Bf16 => 6,
        _ => 4,
    }
}

/// Computes a tile.
pub fn tile(isa: Isa, weights: &Weights<'_>, x: &Halves<'_>, cover: Cover, tile: &mut Tile) {
    let panels = &weights.panels;
    assert!(panels.unit == 64 && weights.bytes.len() >= panels.bytes());
    assert!(cover.lines >= 1 && cover.line % PANEL + cover.lines <= PANEL);
    assert!(cover.line + cover.lines <= panels.lines && x.stride >= panels.steps * STEP);
    assert!(x.values.len() >= (cover.row + cover.rows) * x.stride);
    for first in (0..panels.steps).step_by(RUN) {
        let steps = first..(first + RUN).min(panels.steps);
        // SAFETY: the isa was found present, and every row and line is there.
        unsafe {
            if isa == Isa::Avx512Bf16 {
                by_size!(cover.rows, cover.lines, avx512, 0, [1 2 3 4 5 6], (weights, x, cover, steps, tile));
            } else {
                for line in 0..cover.lines {
                    let part = Cover {
                        line: cover.line + line,
                        lines: 1,
                        ..cover
                    };
                    by_rows!(cover.rows, avx2, 0, [1 2 3 4], (weights, x, part, steps.clone(), tile, line * LANES));
                }
            }
        }
    }
}

/// # Safety
/// AVX-512 F and BF16 are present; the cover is within the weights and the rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn avx512<const TAG: usize, const R: usize, const W: usize>(
    weights: &Weights<'_>,
    x: &Halves<'_>,
    cover: Cover,
    steps: Range<usize>,
    tile: &mut Tile,
) {
    let place = weights.panels.place(cover.line);
    let stride = place.width * 64;
    // SAFETY: offsets of a line and of rows that are there.
    let (mut at, rows) = unsafe {
        let first = weights
            .bytes
            .as_ptr()
            .add(place.offset + steps.start * stride + place.index * 64);
        (first, x.values.as_ptr().add(cover.row * x.stride))
    };
    let mut sums = [[_mm512_setzero_ps(); W]; R];
    for step in steps.clone() {
        let mut w = [_mm512_setzero_si512(); W];
        for (l, w) in w.iter_mut().enumerate() {
            // SAFETY: `l` is below the panel's width, the step below its steps.
            *w = unsafe { _mm512_loadu_si512(at.add(l * 64).cast()) };
        }
        for (r, row) in sums.iter_mut().enumerate() {
            // SAFETY: two values of a row that is there.
            let two = unsafe {
                let at = rows.add(r * x.stride + STEP * step);
                at.cast::<i32>().read_unaligned()
            };
            let two = as_bf16(_mm512_set1_epi32(two));
            for (sum, w) in row.iter_mut().zip(&w) {
                *sum = _mm512_dpbf16_ps(*sum, as_bf16(*w), two);
            }
        }
        at = at.wrapping_add(stride);
    }
    for (row, out) in sums.iter().zip(&mut tile.0) {
        for (l, sum) in row.iter().enumerate() {
            // SAFETY: 16 floats of the tile.
            unsafe {
                let out = out.as_mut_ptr().add(l * LANES);
                let sum = match steps.start {
                    0 => *sum,
                    _ => _mm512_add_ps(*sum, _mm512_loadu_ps(out)),
                };
                _mm512_storeu_ps(out, sum);
            }
        }
    }
}

/// The same bits as pairs of bf16.
#[inline]
pub fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of which any are a value.
    unsafe { std::mem::transmute(bits) }
}

/// # Safety
/// AVX2 and FMA are present; the cover is one line within the weights and the rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const TAG: usize, const R: usize>(
    weights: &Weights<'_>,
    x: &Halves<'_>,
    cover: Cover,
    steps: Range<usize>,
    tile: &mut Tile,
    column: usize,
) {
    let place = weights.panels.place(cover.line);
    let stride = place.width * 64;
    // SAFETY: offsets of a line and of rows that are there.
    let (mut at, rows) = unsafe {
        let first = weights
            .bytes
            .as_ptr()
            .add(place.offset + steps.start * stride + place.index * 64);
        (first, x.values.as_ptr().add(cover.row * x.stride))
    };
    let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for step in steps.clone() {
        for half in 0..2 {
            // SAFETY: half a unit that is there.
            let pairs = unsafe { _mm256_loadu_si256(at.add(32 * half).cast()) };
            let even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
            let odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
            for (r, row) in sums.iter_mut().enumerate() {
                // SAFETY: two values of a row that is there.
                let two = unsafe {
                    let at = rows.add(r * x.stride + STEP * step);
                    at.cast::<u32>().read_unaligned()
                };
                let (a, b) = (f32::from_bits(two << 16), f32::from_bits(two & 0xffff_0000));
                row[half] = _mm256_fmadd_ps(_mm256_set1_ps(a), even, row[half]);
                row[half] = _mm256_fmadd_ps(_mm256_set1_ps(b), odd, row[half]);
            }
        }
        at = at.wrapping_add(stride);
    }
    for (row, out) in sums.iter().zip(&mut tile.0) {
        for (half, sum) in row.iter().enumerate() {
            // SAFETY: 8 floats of the tile.
            unsafe {
                let out = out.as_mut_ptr().add(column + 8 * half);
                let sum = match steps.start {
                    0 => *sum,
                    _ => _mm256_add_ps(*sum, _mm256_loadu_ps(out)),
                };
                _mm256_storeu_ps(out, sum);
            }
        }
    }
}
