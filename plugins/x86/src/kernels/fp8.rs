//! E4M3 weights, activations that are E4M3 values kept as bf16: products are exact, sums are f32.
//!
//! A step is 4 inputs. A byte becomes a bf16 by two tables of 128 bytes, one for each half of it (`VPERMI2B`), so
//! weights stay one byte in memory. Within four channels the first two inputs of each stand before the other two,
//! which is the order in which the halves are joined. On AVX2 a code is an f16 of 1/256 of its value.

use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::LazyLock;

use structures_plugin_api::formats::{f32_to_bf16, E4M3_VALUES};

use super::bf16::as_bf16;
use super::{by_rows, by_size, Cover, Panels, Tile, LANES, PANEL, RUN};
use crate::activations::Halves;
use crate::isa::Isa;

/// Inputs of a step.
pub const STEP: usize = 4;

/// A packed matrix.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// Where lines lie; a unit is 64 bytes.
    pub panels: Panels,
    /// The bytes.
    pub bytes: &'a [u8],
    /// What sums are multiplied with: the two tensors' scales.
    pub scale: f32,
}

/// Position of a code in its unit.
pub fn position(lane: usize, input: usize) -> usize {
    lane / 4 * 16 + input / 2 * 8 + lane % 4 * 2 + input % 2
}

/// Rows of a tile.
pub fn tile_rows(isa: Isa) -> usize {
    match isa {
        Isa::Avx512Bf16 => 4,
        _ => 2,
    }
}

/// Lower and upper bytes of the bf16 of codes 0 to 127.
struct Halved {
    low: [u8; 128],
    high: [u8; 128],
}

static TABLE: LazyLock<Halved> = LazyLock::new(|| {
    let bits = |code: usize| f32_to_bf16(E4M3_VALUES[code]).to_le_bytes();
    Halved {
        low: std::array::from_fn(|code| bits(code)[0]),
        high: std::array::from_fn(|code| bits(code)[1]),
    }
});

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
                by_size!(cover.rows, cover.lines, avx512, 0, [1 2 3 4], (weights, x, cover, steps, tile));
            } else {
                for line in 0..cover.lines {
                    let part = Cover {
                        line: cover.line + line,
                        lines: 1,
                        ..cover
                    };
                    by_rows!(cover.rows, avx2, 0, [1 2], (weights, x, part, steps.clone(), tile, line * LANES));
                }
            }
        }
    }
}

/// # Safety
/// AVX-512 F, BW, VBMI and BF16 are present; the cover is within the weights and the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512bf16")]
unsafe fn avx512<const TAG: usize, const R: usize, const W: usize>(
    weights: &Weights<'_>,
    x: &Halves<'_>,
    cover: Cover,
    steps: Range<usize>,
    tile: &mut Tile,
) {
    let place = weights.panels.place(cover.line);
    let stride = place.width * 64;
    let table = &*TABLE;
    // SAFETY: both tables have 128 bytes.
    let (low, high) = unsafe {
        let two = |bytes: &[u8; 128]| {
            let at = bytes.as_ptr();
            [
                _mm512_loadu_si512(at.cast()),
                _mm512_loadu_si512(at.add(64).cast()),
            ]
        };
        (two(&table.low), two(&table.high))
    };
    let sign = _mm512_set1_epi8(-128);
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
        let mut pairs = [[as_bf16(_mm512_setzero_si512()); 2]; R];
        for (r, pairs) in pairs.iter_mut().enumerate() {
            // SAFETY: four values of a row that is there.
            let two = unsafe {
                let at = rows.add(r * x.stride + STEP * step).cast::<i32>();
                [at.read_unaligned(), at.add(1).read_unaligned()]
            };
            *pairs = two.map(|two| as_bf16(_mm512_set1_epi32(two)));
        }
        for l in 0..W {
            // SAFETY: `l` is below the panel's width, the step below its steps.
            let codes = unsafe { _mm512_loadu_si512(at.add(l * 64).cast()) };
            let lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
            let upper = _mm512_permutex2var_epi8(high[0], codes, high[1]);
            // upper | (codes & sign)
            let upper = _mm512_ternarylogic_epi32::<0xf8>(upper, codes, sign);
            let first = as_bf16(_mm512_unpacklo_epi8(lower, upper));
            let second = as_bf16(_mm512_unpackhi_epi8(lower, upper));
            for (row, pairs) in sums.iter_mut().zip(&pairs) {
                row[l] = _mm512_dpbf16_ps(row[l], first, pairs[0]);
                row[l] = _mm512_dpbf16_ps(row[l], second, pairs[1]);
            }
        }
        at = at.wrapping_add(stride);
    }
    let scale = _mm512_set1_ps(weights.scale);
    for (row, out) in sums.iter().zip(&mut tile.0) {
        for (l, sum) in row.iter().enumerate() {
            // SAFETY: 16 floats of the tile.
            unsafe {
                let out = out.as_mut_ptr().add(l * LANES);
                let sum = match steps.start {
                    0 => _mm512_mul_ps(*sum, scale),
                    _ => _mm512_fmadd_ps(*sum, scale, _mm512_loadu_ps(out)),
                };
                _mm512_storeu_ps(out, sum);
            }
        }
    }
}

/// # Safety
/// AVX2, FMA and F16C are present; the cover is one line within the weights and the rows.
#[target_feature(enable = "avx2,fma,f16c")]
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
    let (magnitude, sign) = (_mm_set1_epi16(0x7f), _mm_set1_epi16(0x80));
    // Two partial sums of four channels each.
    let mut sums = [[_mm256_setzero_ps(); 4]; R];
    for step in steps.clone() {
        for part in 0..2 {
            let mut pairs = [_mm256_setzero_ps(); R];
            for (r, pair) in pairs.iter_mut().enumerate() {
                // SAFETY: two values of a row that is there.
                let two = unsafe {
                    let at = rows.add(r * x.stride + STEP * step + 2 * part);
                    at.cast::<u32>().read_unaligned()
                };
                let wide = u64::from(two << 16) | u64::from(two & 0xffff_0000) << 32;
                *pair = _mm256_castsi256_ps(_mm256_set1_epi64x(wide as i64));
            }
            for q in 0..4 {
                // SAFETY: 8 bytes of a unit that is there.
                let codes = unsafe { _mm_loadl_epi64(at.add(16 * q + 8 * part).cast()) };
                let codes = _mm_cvtepu8_epi16(codes);
                let half = _mm_or_si128(
                    _mm_slli_epi16(_mm_and_si128(codes, magnitude), 7),
                    _mm_slli_epi16(_mm_and_si128(codes, sign), 8),
                );
                let w = _mm256_cvtph_ps(half);
                for (row, pair) in sums.iter_mut().zip(&pairs) {
                    row[q] = _mm256_fmadd_ps(w, *pair, row[q]);
                }
            }
        }
        at = at.wrapping_add(stride);
    }
    let scale = _mm256_set1_ps(256.0 * weights.scale);
    for (row, out) in sums.iter().zip(&mut tile.0) {
        for half in 0..2 {
            let pairs = _mm256_hadd_ps(row[2 * half], row[2 * half + 1]);
            let sum = _mm256_permute4x64_epi64(_mm256_castps_si256(pairs), 0b11_01_10_00);
            let sum = _mm256_castsi256_ps(sum);
            // SAFETY: 8 floats of the tile.
            unsafe {
                let out = out.as_mut_ptr().add(column + 8 * half);
                let sum = match steps.start {
                    0 => _mm256_mul_ps(sum, scale),
                    _ => _mm256_fmadd_ps(sum, scale, _mm256_loadu_ps(out)),
                };
                _mm256_storeu_ps(out, sum);
            }
        }
    }
}
