//! Integer codes of 4, 6 or 8 bits under a scale for every 16 or 32 inputs, 16-bit activations.
//!
//! A block's codes are multiplied with the activations' integers exactly; the block's sum is scaled in f32 and added
//! up. What a format's codes are relative to (an offset, a table) is resolved in bytes while they are unpacked, so that
//! codes are unsigned, and the offset comes back through the sum of the block's activations, which the call prepares
//! once. Activations have a scale of their own for every 32 inputs. A minimum a block has (Q4_1, Q4_K) is multiplied with that same sum.
//! Where a block of activations has tails ([`crate::activations`]), its codes meet them too.
//!
//! # Layout
//! Step by step, for the `w` lines of a panel: heads (`w` times [`Kind::head`] bytes), then for each block of the step
//! the codes (`w` times [`Kind::codes`] bytes), then the scales (`w` times [`Kind::scales`] bytes).
//! - codes of 8 bits: 4 inputs of a channel side by side, 16 channels, 64 bytes; then the next 4 inputs.
//! - codes of 4 bits: the same bytes, low nibbles hold 4 inputs and high nibbles the next 4.
//! - codes of 6 bits: the low 4 bits like that; then 64 bytes in which bit pairs `2g` hold the high bits of the `g`-th
//!   4 inputs.
//! - scales and heads: 16 values, one a channel; a minimum's 16 after the scale's.

// Lanes and rows are numbers here: the same one indexes several arrays.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use structures_plugin_api::formats::BlockFormat;

use super::{by_rows, by_size, Cover, Panels, Tile, LANES, PANEL};
use crate::activations::{Integers, SHARED};
use crate::isa::Isa;

/// A family of codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// E2M1 under E4M3 scales of 16.
    Nvfp4,
    /// 8 bits, f16 scales of 32.
    Q8_0,
    /// 4 bits minus 8, f16 scales of 32.
    Q4_0,
    /// 4 bits, f16 scales and minima of 32.
    Q4_1,
    /// 4 bits, 6-bit scales and minima of 32 under f16 ones of 256.
    Q4K,
    /// 6 bits minus 32, int8 scales of 16 under an f16 one of 256.
    Q6K,
}

const NVFP4: u8 = 0;
const Q8_0: u8 = 1;
const Q4_0: u8 = 2;
const Q4_1: u8 = 3;
const Q4K: u8 = 4;
const Q6K: u8 = 5;

/// What a kind's code says beside the code itself.
const fn inputs_of(kind: u8) -> usize {
    match kind {
        NVFP4 | Q6K => 16,
        _ => 32,
    }
}

const fn codes_of(kind: u8) -> usize {
    match kind {
        NVFP4 => 128,
        Q6K => 192,
        Q8_0 => 512,
        _ => 256,
    }
}

const fn scales_of(kind: u8) -> usize {
    match kind {
        NVFP4 | Q6K => 16,
        Q8_0 | Q4_0 => 32,
        Q4_1 => 64,
        _ => 32,
    }
}

const fn head_of(kind: u8) -> usize {
    match kind {
        Q4K => 64,
        Q6K => 32,
        _ => 0,
    }
}

const fn blocks_of(kind: u8) -> usize {
    match kind {
        Q4K => 8,
        Q6K => 16,
        _ => 1,
    }
}

const fn has_minimum(kind: u8) -> bool {
    matches!(kind, Q4_1 | Q4K)
}

/// Bytes from what is read to what is fetched: a few blocks.
const AHEAD: usize = 2560;

/// Twice the values of the 16 E2M1 codes, plus 12.
const E2M1: [i8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

impl Kind {
    /// Its number, which files of packed weights hold.
    pub const fn id(self) -> u8 {
        match self {
            Kind::Nvfp4 => NVFP4,
            Kind::Q8_0 => Q8_0,
            Kind::Q4_0 => Q4_0,
            Kind::Q4_1 => Q4_1,
            Kind::Q4K => Q4K,
            Kind::Q6K => Q6K,
        }
    }

    /// The family of a number.
    pub const fn from_id(id: u8) -> Option<Self> {
        match id {
            NVFP4 => Some(Kind::Nvfp4),
            Q8_0 => Some(Kind::Q8_0),
            Q4_0 => Some(Kind::Q4_0),
            Q4_1 => Some(Kind::Q4_1),
            Q4K => Some(Kind::Q4K),
            Q6K => Some(Kind::Q6K),
            _ => None,
        }
    }

    /// The family of a checkpoint's packed rows, where they are taken as they are.
    pub const fn of(format: BlockFormat) -> Option<Self> {
        match format {
            BlockFormat::Nvfp4 => Some(Kind::Nvfp4),
            BlockFormat::Q8_0 => Some(Kind::Q8_0),
            BlockFormat::Q4_0 => Some(Kind::Q4_0),
            BlockFormat::Q4_1 => Some(Kind::Q4_1),
            BlockFormat::Q4K => Some(Kind::Q4K),
            BlockFormat::Q6K => Some(Kind::Q6K),
            BlockFormat::Fp8 => None,
        }
    }

    /// Inputs of a block.
    pub const fn inputs(self) -> usize {
        inputs_of(self.id())
    }

    /// Bytes of a line's codes in a block.
    pub const fn codes(self) -> usize {
        codes_of(self.id())
    }

    /// Bytes of a line's scales in a block.
    pub const fn scales(self) -> usize {
        scales_of(self.id())
    }

    /// Bytes of a line's head in a step.
    pub const fn head(self) -> usize {
        head_of(self.id())
    }

    /// Blocks of a step.
    pub const fn blocks(self) -> usize {
        blocks_of(self.id())
    }

    /// Inputs of a step.
    pub const fn step(self) -> usize {
        self.inputs() * self.blocks()
    }

    /// Bytes of a line in a step.
    pub const fn unit(self) -> usize {
        self.head() + self.blocks() * (self.codes() + self.scales())
    }

    /// What unpacked codes have too much.
    pub const fn offset(self) -> i32 {
        match self {
            Kind::Nvfp4 => 12,
            Kind::Q8_0 => 128,
            Kind::Q4_0 => 8,
            Kind::Q6K => 32,
            Kind::Q4_1 | Kind::Q4K => 0,
        }
    }

    /// What the sum of a block's activations is multiplied with before it is used.
    pub const fn factor(self) -> i32 {
        match self.offset() {
            0 => 1,
            offset => -offset,
        }
    }
}

/// A packed matrix.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    /// The family.
    pub kind: Kind,
    /// Where lines lie; a unit is [`Kind::unit`] bytes.
    pub panels: Panels,
    /// The bytes.
    pub bytes: &'a [u8],
    /// What sums are multiplied with besides a row's scale.
    pub scale: f32,
}

/// Rows of a tile.
pub fn tile_rows(isa: Isa) -> usize {
    if isa.wide() {
        4
    } else {
        2
    }
}

/// Computes a tile. Sums of `x` are of blocks of 16 inputs, times [`Kind::factor`].
pub fn tile(isa: Isa, weights: &Weights<'_>, x: &Integers<'_>, cover: Cover, tile: &mut Tile) {
    let panels = &weights.panels;
    assert!(panels.unit == weights.kind.unit() && weights.bytes.len() >= panels.bytes());
    assert!(cover.lines >= 1 && cover.line % PANEL + cover.lines <= PANEL);
    assert!(cover.line + cover.lines <= panels.lines);
    assert!(x.stride() >= panels.steps * weights.kind.step());
    assert!(cover.row + cover.rows <= x.rows() && (x.planes() == 2 || !isa.wide()));
    assert!(x.has_block_sums());
    macro_rules! each {
        ($($kind:ident)*) => {
            match weights.kind.id() {
                $($kind if isa.wide() => {
                    by_size!(cover.rows, cover.lines, vnni, $kind, [1 2 3 4], (weights, x, cover, tile))
                })*
                $($kind => {
                    for line in 0..cover.lines {
                        let part = Cover { line: cover.line + line, lines: 1, ..cover };
                        by_rows!(cover.rows, avx2, $kind, [1 2], (weights, x, part, tile, line * LANES));
                    }
                })*
                kind => unreachable!("kind {kind}"),
            }
        };
    }
    // SAFETY: the isa was found present, and every row and line is there.
    unsafe { each!(NVFP4 Q8_0 Q4_0 Q4_1 Q4K Q6K) }
}

/// # Safety
/// AVX-512 F, BW and VNNI are present; the cover is within the weights and the rows; `x` has two planes.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
unsafe fn vnni<const KIND: u8, const R: usize, const W: usize>(
    weights: &Weights<'_>,
    x: &Integers<'_>,
    cover: Cover,
    tile: &mut Tile,
) {
    let place = weights.panels.place(cover.line);
    let (width, index) = (place.width, place.index);
    let groups = const { inputs_of(KIND) / 4 };
    let has_tails = x.has_tails();
    let mut values = [[_mm512_setzero_ps(); W]; R];
    // SAFETY: all that follows reads the panel's own bytes, in the order of the layout above, and rows that are there:
    // planes of `stride` bytes, one more where a tail has a scale, and a sum for every 16 of them.
    unsafe {
        let mut at = weights.bytes.as_ptr().add(place.offset);
        let rows = x.bytes(cover.row);
        let mut block = 0;
        for _ in 0..weights.panels.steps {
            let heads = at.add(index * head_of(KIND));
            at = at.add(width * head_of(KIND));
            for _ in 0..blocks_of(KIND) {
                let input = block * inputs_of(KIND);
                // What reads scales between codes is no stream to the CPU: a few rows' arithmetic on a block would each
                // time wait for memory (4 rows of NVFP4: 110 ns a block, 30 with this).
                let bytes = width * (codes_of(KIND) + scales_of(KIND));
                for line in 0..bytes.div_ceil(64) {
                    let ahead = at.wrapping_add(AHEAD + 64 * line);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                }
                for l in 0..W {
                    let codes = unpack::<KIND>(at.add((index + l) * codes_of(KIND)));
                    let scales = at.add(width * codes_of(KIND) + (index + l) * scales_of(KIND));
                    let (scale, least) = scale_of::<KIND>(scales, heads.add(l * head_of(KIND)));
                    for r in 0..R {
                        let high = rows.add(r * x.record() + input);
                        let low = high.add(x.stride());
                        let sum = sum_of::<KIND>(x.block_sums(cover.row + r), input);
                        let own = *x.block_scales(cover.row + r).add(input / SHARED);
                        let mut a = _mm512_setzero_si512();
                        let mut b = match has_minimum(KIND) {
                            true => _mm512_setzero_si512(),
                            false => _mm512_set1_epi32(sum),
                        };
                        for (g, codes) in codes.iter().enumerate().take(groups) {
                            let four = |plane: *const i8| {
                                _mm512_set1_epi32(plane.add(4 * g).cast::<i32>().read_unaligned())
                            };
                            a = _mm512_dpbusd_epi32(a, *codes, four(high));
                            b = _mm512_dpbusd_epi32(b, *codes, four(low));
                        }
                        let dot = _mm512_add_epi32(_mm512_slli_epi32::<8>(a), b);
                        let value = &mut values[r][l];
                        let scale = _mm512_mul_ps(scale, _mm512_set1_ps(own));
                        *value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *value);
                        if has_minimum(KIND) {
                            let sum = _mm512_set1_ps(own * sum as f32);
                            *value = _mm512_fmadd_ps(sum, least, *value);
                        }
                    }
                }
                let mut tails = 0.0;
                for r in 0..if has_tails { R } else { 0 } {
                    tails += *x.tail_scales(cover.row + r).add(input / SHARED);
                }
                if tails != 0.0 {
                    // A copy: values whose address is taken would be in memory at every block.
                    let mut copy = values;
                    let line = Line {
                        codes: at.add(index * codes_of(KIND)),
                        scales: at.add(width * codes_of(KIND) + index * scales_of(KIND)),
                        heads,
                    };
                    add_tails::<KIND, W>(line, x, cover.row, input, &mut copy);
                    values = copy;
                }
                at = at.add(width * (codes_of(KIND) + scales_of(KIND)));
                block += 1;
            }
        }
    }
    for (r, row) in values.iter().enumerate() {
        let scale = _mm512_set1_ps(x.scale(cover.row + r) * weights.scale);
        for (l, value) in row.iter().enumerate() {
            // SAFETY: 16 floats of the tile.
            unsafe {
                let out = tile.0[r].as_mut_ptr().add(l * LANES);
                _mm512_storeu_ps(out, _mm512_mul_ps(*value, scale));
            }
        }
    }
}

/// Codes of a block as unsigned bytes, 4 inputs a register.
///
/// # Safety
/// AVX-512 F and BW; `at` has [`codes_of`] bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn unpack<const KIND: u8>(at: *const u8) -> [__m512i; 8] {
    let mut out = [_mm512_setzero_si512(); 8];
    // SAFETY: within the block's bytes.
    let load = |line: usize| unsafe { _mm512_loadu_si512(at.add(64 * line).cast()) };
    if KIND == Q8_0 {
        for (line, out) in out.iter_mut().enumerate() {
            *out = load(line);
        }
        return out;
    }
    let nibble = _mm512_set1_epi8(15);
    for line in 0..inputs_of(KIND) / 8 {
        let bytes = load(line);
        out[2 * line] = _mm512_and_si512(bytes, nibble);
        out[2 * line + 1] = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble);
    }
    if KIND == NVFP4 {
        // SAFETY: 16 bytes.
        let table = unsafe { _mm_loadu_si128(E2M1.as_ptr().cast()) };
        let table = _mm512_broadcast_i32x4(table);
        for out in &mut out[..4] {
            *out = _mm512_shuffle_epi8(table, *out);
        }
    }
    if KIND == Q6K {
        let high = load(2);
        let bits = _mm512_set1_epi8(0x30);
        let pairs = [
            _mm512_slli_epi16::<4>(high),
            _mm512_slli_epi16::<2>(high),
            high,
            _mm512_srli_epi16::<2>(high),
        ];
        for (out, pair) in out.iter_mut().zip(pairs) {
            // out | (pair & bits)
            *out = _mm512_ternarylogic_epi32::<0xf8>(*out, pair, bits);
        }
    }
    out
}

/// Scale and minimum of a block.
///
/// # Safety
/// AVX-512 F and BW; `at` has [`scales_of`] bytes, `head` has [`head_of`] bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,f16c")]
unsafe fn scale_of<const KIND: u8>(at: *const u8, head: *const u8) -> (__m512, __m512) {
    let none = _mm512_setzero_ps();
    // SAFETY: within the bytes that the caller promises.
    unsafe {
        let half = |at: *const u8| _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
        let bytes = |at: *const u8| _mm_loadu_si128(at.cast());
        match KIND {
            NVFP4 => {
                // An E4M3 without its sign, moved up by 7, is the f16 of 1/256 of it.
                let words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes(at)), 7);
                (_mm512_cvtph_ps(words), none)
            }
            Q4_1 => (half(at), half(at.add(32))),
            Q4K => {
                let small = |at| _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(at)));
                let scale = _mm512_mul_ps(half(head), small(at));
                let least = _mm512_mul_ps(half(head.add(32)), small(at.add(16)));
                (scale, _mm512_sub_ps(none, least))
            }
            Q6K => {
                let small = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(at)));
                (_mm512_mul_ps(half(head), small), none)
            }
            _ => (half(at), none),
        }
    }
}

/// # Safety
/// AVX2, FMA and F16C are present; the cover is one line within the weights and the rows; `x` is kept in 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<const KIND: u8, const R: usize>(
    weights: &Weights<'_>,
    x: &Integers<'_>,
    cover: Cover,
    tile: &mut Tile,
    column: usize,
) {
    let place = weights.panels.place(cover.line);
    let (width, index) = (place.width, place.index);
    let mut values = [[_mm256_setzero_ps(); 2]; R];
    let mut codes = [0u8; 512];
    // SAFETY: as for the wide kernel; rows are `stride` words.
    unsafe {
        let mut at = weights.bytes.as_ptr().add(place.offset);

        let mut block = 0;
        for _ in 0..weights.panels.steps {
            let heads = at.add(index * head_of(KIND));
            at = at.add(width * head_of(KIND));
            for _ in 0..blocks_of(KIND) {
                let input = block * inputs_of(KIND);
                unpack_narrow::<KIND>(at.add(index * codes_of(KIND)), &mut codes);
                let scales = at.add(width * codes_of(KIND) + index * scales_of(KIND));
                let (scale, least) = scale_of_narrow::<KIND>(scales, heads);
                for r in 0..R {
                    let row = cover.row + r;
                    let own = Words {
                        at: x.words(row).add(input),
                        step: *x.block_scales(row).add(input / SHARED),
                        sum: sum_of::<KIND>(x.block_sums(row), input),
                    };
                    block_narrow::<KIND>(&codes, own, &scale, &least, &mut values[r]);
                    let step = *x.tail_scales(row).add(input / SHARED);
                    if step != 0.0 {
                        let tails = Words {
                            at: x.tail_words(row).add(input),
                            step,
                            sum: sum_of::<KIND>(x.tail_sums(row), input),
                        };
                        block_narrow::<KIND>(&codes, tails, &scale, &least, &mut values[r]);
                    }
                }
                at = at.add(width * (codes_of(KIND) + scales_of(KIND)));
                block += 1;
            }
        }
    }
    for (r, row) in values.iter().enumerate() {
        let scale = _mm256_set1_ps(x.scale(cover.row + r) * weights.scale);
        for (half, value) in row.iter().enumerate() {
            // SAFETY: 8 floats of the tile.
            unsafe {
                let out = tile.0[r].as_mut_ptr().add(column + 8 * half);
                _mm256_storeu_ps(out, _mm256_mul_ps(*value, scale));
            }
        }
    }
}

/// One row's part of a block.
#[derive(Clone, Copy)]
struct Words {
    at: *const i16,
    /// What one is worth.
    step: f32,
    /// Their sum, times [`Kind::factor`].
    sum: i32,
}

/// Adds a block's codes times one row's words.
///
/// # Safety
/// AVX2 and FMA; there are [`inputs_of`] words.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn block_narrow<const KIND: u8>(
    codes: &[u8; 512],
    x: Words,
    scale: &[__m256; 2],
    least: &[__m256; 2],
    values: &mut [__m256; 2],
) {
    let mut parts = [_mm256_setzero_si256(); 4];
    for g in 0..inputs_of(KIND) / 4 {
        // SAFETY: within the words, and within `codes`: 64 bytes for each 4 inputs.
        unsafe {
            let four = x.at.add(4 * g).cast::<i64>().read_unaligned();
            let four = _mm256_set1_epi64x(four);
            for (q, part) in parts.iter_mut().enumerate() {
                let bytes = codes.as_ptr().add(64 * g + 16 * q);
                let w = _mm256_cvtepu8_epi16(_mm_loadu_si128(bytes.cast()));
                *part = _mm256_add_epi32(*part, _mm256_madd_epi16(w, four));
            }
        }
    }
    for half in 0..2 {
        let dot = super::int8::channels_of(parts[2 * half], parts[2 * half + 1]);
        let dot = match has_minimum(KIND) {
            true => dot,
            false => _mm256_add_epi32(dot, _mm256_set1_epi32(x.sum)),
        };
        let value = &mut values[half];
        let scale = _mm256_mul_ps(scale[half], _mm256_set1_ps(x.step));
        *value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *value);
        if has_minimum(KIND) {
            let sum = _mm256_set1_ps(x.step * x.sum as f32);
            *value = _mm256_fmadd_ps(sum, least[half], *value);
        }
    }
}

/// The sum of a block's inputs.
///
/// # Safety
/// There is a sum for every 16 inputs, [`inputs_of`] from `input` on.
#[inline(always)]
unsafe fn sum_of<const KIND: u8>(sums: *const i32, input: usize) -> i32 {
    // SAFETY: as the caller says.
    unsafe {
        let sums = sums.add(input / 16);
        match inputs_of(KIND) {
            32 => *sums + *sums.add(1),
            _ => *sums,
        }
    }
}

/// Where a block's first line lies.
#[derive(Clone, Copy)]
struct Line {
    codes: *const u8,
    scales: *const u8,
    heads: *const u8,
}

/// Adds what the tails of a block's rows come to. A function of its own and not inlined: few blocks have tails, and the
/// loop around the others needs every register.
///
/// # Safety
/// As for the kernel whose block it is; a row whose tail has a scale has a third plane.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,f16c")]
unsafe fn add_tails<const KIND: u8, const W: usize>(
    line: Line,
    x: &Integers<'_>,
    row: usize,
    input: usize,
    values: &mut [[__m512; W]],
) {
    for l in 0..W {
        // SAFETY: as the caller says.
        unsafe {
            let codes = unpack::<KIND>(line.codes.add(l * codes_of(KIND)));
            let heads = line.heads.add(l * head_of(KIND));
            let scales = line.scales.add(l * scales_of(KIND));
            let (scale, least) = scale_of::<KIND>(scales, heads);
            for (r, values) in values.iter_mut().enumerate() {
                let step = *x.tail_scales(row + r).add(input / SHARED);
                if step == 0.0 {
                    continue;
                }
                let tail = x.tail_bytes(row + r).add(input);
                let sum = sum_of::<KIND>(x.tail_sums(row + r), input);
                let mut dot = match has_minimum(KIND) {
                    true => _mm512_setzero_si512(),
                    false => _mm512_set1_epi32(sum),
                };
                for (g, codes) in codes.iter().enumerate().take(inputs_of(KIND) / 4) {
                    let four = tail.add(4 * g).cast::<i32>().read_unaligned();
                    dot = _mm512_dpbusd_epi32(dot, *codes, _mm512_set1_epi32(four));
                }
                let value = &mut values[l];
                let scale = _mm512_mul_ps(scale, _mm512_set1_ps(step));
                *value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *value);
                if has_minimum(KIND) {
                    let sum = _mm512_set1_ps(step * sum as f32);
                    *value = _mm512_fmadd_ps(sum, least, *value);
                }
            }
        }
    }
}

/// # Safety
/// AVX2; `at` has [`codes_of`] bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack_narrow<const KIND: u8>(at: *const u8, out: &mut [u8; 512]) {
    let nibble = _mm256_set1_epi8(15);
    // SAFETY: within the block's bytes, and within `out`: 32 at a time.
    unsafe {
        let load = |from: usize| _mm256_loadu_si256(at.add(from).cast());
        let mut store =
            |to: usize, bytes| _mm256_storeu_si256(out.as_mut_ptr().add(to).cast(), bytes);
        if KIND == Q8_0 {
            (0..16).for_each(|i| store(32 * i, load(32 * i)));
            return;
        }
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1.as_ptr().cast()));
        for line in 0..inputs_of(KIND) / 8 {
            for half in 0..2 {
                let bytes = load(64 * line + 32 * half);
                let mut low = _mm256_and_si256(bytes, nibble);
                let mut high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
                if KIND == NVFP4 {
                    low = _mm256_shuffle_epi8(table, low);
                    high = _mm256_shuffle_epi8(table, high);
                }
                if KIND == Q6K {
                    let pairs = load(128 + 32 * half);
                    let bits = _mm256_set1_epi8(0x30);
                    let (first, second) = match line {
                        0 => (_mm256_slli_epi16(pairs, 4), _mm256_slli_epi16(pairs, 2)),
                        _ => (pairs, _mm256_srli_epi16(pairs, 2)),
                    };
                    low = _mm256_or_si256(low, _mm256_and_si256(first, bits));
                    high = _mm256_or_si256(high, _mm256_and_si256(second, bits));
                }
                store(128 * line + 32 * half, low);
                store(128 * line + 64 + 32 * half, high);
            }
        }
    }
}

/// # Safety
/// AVX2 and F16C; `at` has [`scales_of`] bytes, `head` has [`head_of`] bytes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn scale_of_narrow<const KIND: u8>(
    at: *const u8,
    head: *const u8,
) -> ([__m256; 2], [__m256; 2]) {
    let none = _mm256_setzero_ps();
    let mut out = ([none; 2], [none; 2]);
    for i in 0..2 {
        // SAFETY: within the bytes that the caller promises.
        let (scale, least) = unsafe {
            let half = |at: *const u8| _mm256_cvtph_ps(_mm_loadu_si128(at.add(16 * i).cast()));
            let bytes = |at: *const u8| _mm_loadl_epi64(at.add(8 * i).cast());
            match KIND {
                NVFP4 => {
                    let words = _mm_slli_epi16(_mm_cvtepu8_epi16(bytes(at)), 7);
                    (_mm256_cvtph_ps(words), none)
                }
                Q4_1 => (half(at), half(at.add(32))),
                Q4K => {
                    let small = |at| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes(at)));
                    let least = _mm256_mul_ps(half(head.add(32)), small(at.add(16)));
                    let scale = _mm256_mul_ps(half(head), small(at));
                    (scale, _mm256_sub_ps(none, least))
                }
                Q6K => {
                    let small = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(at)));
                    (_mm256_mul_ps(half(head), small), none)
                }
                _ => (half(at), none),
            }
        };
        out.0[i] = scale;
        out.1[i] = least;
    }
    out
}
