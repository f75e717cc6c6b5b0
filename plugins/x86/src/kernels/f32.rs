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

/// `c = a b`, or added to it: `a` has rows of `steps` values, `b` is `[steps, n]`, both row-major with strides of their
/// own, as `c` has. For small products of which nothing is packed.
///
/// # Panics
/// When a slice is too short.
#[allow(clippy::many_single_char_names)]
pub fn product(
    isa: Isa,
    (a, a_stride): (&[f32], usize),
    (b, b_stride): (&[f32], usize),
    steps: usize,
    (c, c_stride): (&mut [f32], usize),
    n: usize,
    add: bool,
) {
    let rows = match c.len() / c_stride {
        most if a.len() / a_stride < most => a.len() / a_stride,
        most => most,
    };
    if rows == 0 || n == 0 {
        return;
    }
    assert!(a.len() >= (rows - 1) * a_stride + steps && steps <= a_stride);
    assert!(steps == 0 || b.len() >= (steps - 1) * b_stride + n);
    assert!(c.len() >= (rows - 1) * c_stride + n && n <= c_stride);
    let most = tile_rows(isa);
    let mut row = 0;
    while row < rows {
        let count = most.min(rows - row);
        let mut column = 0;
        while column < n {
            let left = n - column;
            // SAFETY: the isa was found present; the slices were measured above, and `left` masks the last columns.
            unsafe {
                let part = Part {
                    a: a.as_ptr().add(row * a_stride),
                    a_stride,
                    b: b.as_ptr().add(column),
                    b_stride,
                    c: c.as_mut_ptr().add(row * c_stride + column),
                    c_stride,
                    steps,
                    left,
                    add,
                };
                if isa.wide() {
                    let lines = left.div_ceil(LANES).min(PANEL);
                    by_size!(count, lines, part512, 0, [1 2 3 4 5 6], (&part));
                    column += lines * LANES;
                } else {
                    by_rows!(count, part256, 0, [1 2 3 4], (&part));
                    column += LANES;
                }
            }
        }
        row += count;
    }
}

/// A few rows and lines of a small product.
struct Part {
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
    steps: usize,
    /// Columns from here on.
    left: usize,
    add: bool,
}

/// # Safety
/// AVX-512 F is present; the part is of memory that is there.
#[target_feature(enable = "avx512f")]
unsafe fn part512<const TAG: usize, const R: usize, const W: usize>(part: &Part) {
    let mut masks = [0u16; W];
    for (l, mask) in masks.iter_mut().enumerate() {
        let left = part.left.saturating_sub(l * LANES).min(LANES);
        *mask = ((1u32 << left) - 1) as u16;
    }
    let mut sums = [[_mm512_setzero_ps(); W]; R];
    // SAFETY: rows and columns that are there, the last ones masked.
    unsafe {
        for step in 0..part.steps {
            let mut w = [_mm512_setzero_ps(); W];
            for (l, w) in w.iter_mut().enumerate() {
                let at = part.b.add(step * part.b_stride).wrapping_add(l * LANES);
                *w = _mm512_maskz_loadu_ps(masks[l], at);
            }
            for (r, row) in sums.iter_mut().enumerate() {
                let value = _mm512_set1_ps(*part.a.add(r * part.a_stride + step));
                for (sum, w) in row.iter_mut().zip(&w) {
                    *sum = _mm512_fmadd_ps(value, *w, *sum);
                }
            }
        }
        for (r, row) in sums.iter().enumerate() {
            for (l, sum) in row.iter().enumerate() {
                let at = part.c.add(r * part.c_stride).wrapping_add(l * LANES);
                let sum = match part.add {
                    true => _mm512_add_ps(*sum, _mm512_maskz_loadu_ps(masks[l], at)),
                    false => *sum,
                };
                _mm512_mask_storeu_ps(at, masks[l], sum);
            }
        }
    }
}

/// # Safety
/// AVX2 and FMA are present; the part is of memory that is there.
#[target_feature(enable = "avx2,fma")]
unsafe fn part256<const TAG: usize, const R: usize>(part: &Part) {
    let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let mut masks = [_mm256_setzero_si256(); 2];
    for (half, mask) in masks.iter_mut().enumerate() {
        let left = part.left.saturating_sub(8 * half).min(8) as i32;
        *mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), lane);
    }
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: rows and columns that are there, the last ones masked.
    unsafe {
        for step in 0..part.steps {
            let at = part.b.add(step * part.b_stride);
            let w = [
                _mm256_maskload_ps(at, masks[0]),
                _mm256_maskload_ps(at.wrapping_add(8), masks[1]),
            ];
            for (r, row) in sums.iter_mut().enumerate() {
                let value = _mm256_set1_ps(*part.a.add(r * part.a_stride + step));
                for (sum, w) in row.iter_mut().zip(&w) {
                    *sum = _mm256_fmadd_ps(value, *w, *sum);
                }
            }
        }
        for (r, row) in sums.iter().enumerate() {
            for (half, sum) in row.iter().enumerate() {
                let at = part.c.add(r * part.c_stride).wrapping_add(8 * half);
                let sum = match part.add {
                    true => _mm256_add_ps(*sum, _mm256_maskload_ps(at, masks[half])),
                    false => *sum,
                };
                _mm256_maskstore_ps(at, masks[half], sum);
            }
        }
    }
}
