//! f32 weights and activations. A step is one input.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{by_rows, by_size, Cover, Panels, Tile, LANES, PANEL, RUN};
use crate::isa::Isa;

/// A packed matrix.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// Where lines lie; a unit is 64 bytes.
    pub panels: Panels,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// Rows of a tile.
pub fn tile_rows(isa: Isa) -> usize {
    if isa.wide() {
        6
    } else {
        4
    }
}

/// Computes a tile. `x` has rows of `stride` values.
pub fn tile(
    isa: Isa,
    weights: &Weights<'_>,
    x: &[f32],
    stride: usize,
    cover: Cover,
    tile: &mut Tile,
) {
    let panels = &weights.panels;
    assert!(panels.unit == 64 && weights.bytes.len() >= panels.bytes());
    assert!(cover.lines >= 1 && cover.line % PANEL + cover.lines <= PANEL);
    assert!(cover.line + cover.lines <= panels.lines && stride >= panels.steps);
    assert!(x.len() >= (cover.row + cover.rows) * stride);
    for first in (0..panels.steps).step_by(RUN) {
        let steps = first..(first + RUN).min(panels.steps);
        // SAFETY: the isa was found present, and every row and line is there.
        unsafe {
            if isa.wide() {
                by_size!(cover.rows, cover.lines, avx512, 0, [1 2 3 4 5 6], (weights, x, stride, cover, steps, tile));
            } else {
                for line in 0..cover.lines {
                    let part = Cover {
                        line: cover.line + line,
                        lines: 1,
                        ..cover
                    };
                    by_rows!(cover.rows, avx2, 0, [1 2 3 4], (weights, x, stride, part, steps.clone(), tile, line * LANES));
                }
            }
        }
    }
}

/// # Safety
/// AVX-512 F is present; the cover is within the weights and the rows.
#[target_feature(enable = "avx512f")]
unsafe fn avx512<const TAG: usize, const R: usize, const W: usize>(
    weights: &Weights<'_>,
    x: &[f32],
    x_stride: usize,
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
        (first, x.as_ptr().add(cover.row * x_stride))
    };
    let mut sums = [[_mm512_setzero_ps(); W]; R];
    for step in steps.clone() {
        let mut w = [_mm512_setzero_ps(); W];
        for (l, w) in w.iter_mut().enumerate() {
            // SAFETY: `l` is below the panel's width, the step below its steps.
            *w = unsafe { _mm512_loadu_ps(at.add(l * 64).cast()) };
        }
        for (r, row) in sums.iter_mut().enumerate() {
            // SAFETY: a value of a row that is there.
            let value = _mm512_set1_ps(unsafe { *rows.add(r * x_stride + step) });
            for (sum, w) in row.iter_mut().zip(&w) {
                *sum = _mm512_fmadd_ps(value, *w, *sum);
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

/// # Safety
/// AVX2 and FMA are present; the cover is one line within the weights and the rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const TAG: usize, const R: usize>(
    weights: &Weights<'_>,
    x: &[f32],
    x_stride: usize,
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
        (first, x.as_ptr().add(cover.row * x_stride))
    };
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for step in steps.clone() {
        // SAFETY: a unit that is there.
        let w = unsafe {
            [
                _mm256_loadu_ps(at.cast()),
                _mm256_loadu_ps(at.add(32).cast()),
            ]
        };
        for (r, row) in sums.iter_mut().enumerate() {
            // SAFETY: a value of a row that is there.
            let value = _mm256_set1_ps(unsafe { *rows.add(r * x_stride + step) });
            for (sum, w) in row.iter_mut().zip(&w) {
                *sum = _mm256_fmadd_ps(value, *w, *sum);
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
