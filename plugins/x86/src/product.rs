//! `rows x packed block`: the kernels. One block of 16 outputs for 1 to 8 rows, weights read once.

use std::arch::x86_64::*;

use crate::isa::Isa;
use crate::packed::{Line, Packed, BLOCK};
use crate::rows::{Rows, MAX_ROWS};

/// 16 outputs for each row.
pub type Tile = [[f32; BLOCK]; MAX_ROWS];

/// Computes one block of outputs for all rows.
pub fn block(isa: Isa, packed: &Packed, index: usize, rows: &Rows, tile: &mut Tile) {
    let lines = packed.block(index);
    let scales = &packed.scales[index * BLOCK..(index + 1) * BLOCK];
    debug_assert_eq!(rows.stride, packed.groups * 4);
    macro_rules! by_rows {
        ($kernel:ident) => {
            match rows.rows {
                1 => $kernel::<1>(lines, scales, rows, tile),
                2 => $kernel::<2>(lines, scales, rows, tile),
                3 => $kernel::<3>(lines, scales, rows, tile),
                4 => $kernel::<4>(lines, scales, rows, tile),
                5 => $kernel::<5>(lines, scales, rows, tile),
                6 => $kernel::<6>(lines, scales, rows, tile),
                7 => $kernel::<7>(lines, scales, rows, tile),
                _ => $kernel::<8>(lines, scales, rows, tile),
            }
        };
    }
    // SAFETY: the isa was found present at bind, and `Rows` holds `stride` = 4 bytes a line for each of 8 rows.
    unsafe {
        match isa {
            Isa::Avx512Vnni => by_rows!(vnni),
            Isa::Avx2 => by_rows!(avx2),
        }
    }
}

/// int8 x 16-bit through VNNI: two `vpdpbusd` a line and row. Weights are shifted by 128, which the sums of the
/// activation bytes take back exactly in integers.
///
/// # Safety
/// AVX-512 F, BW and VNNI are present; `rows.hi` and `rows.lo` hold `4 * lines.len()` bytes for each of `M` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn vnni<const M: usize>(lines: &[Line], scales: &[f32], rows: &Rows, tile: &mut Tile) {
    let mut hi = [[_mm512_setzero_si512(); 2]; M];
    let mut lo = [[_mm512_setzero_si512(); 2]; M];
    let at = |bytes: &[i8], row: usize, group: usize| {
        // SAFETY: `row * stride + 4 * group + 4 <= bytes.len()`, says the caller.
        unsafe {
            bytes
                .as_ptr()
                .add(row * rows.stride + 4 * group)
                .cast::<i32>()
                .read_unaligned()
        }
    };
    let mut step = |group: usize, line: &Line, chain: usize| {
        // SAFETY: a line is 64 aligned bytes.
        let w = unsafe { _mm512_load_si512(line.0.as_ptr().cast()) };
        for m in 0..M {
            let h = _mm512_set1_epi32(at(&rows.hi, m, group));
            let l = _mm512_set1_epi32(at(&rows.lo, m, group));
            hi[m][chain] = _mm512_dpbusd_epi32(hi[m][chain], w, h);
            lo[m][chain] = _mm512_dpbusd_epi32(lo[m][chain], w, l);
        }
    };
    let mut pairs = lines.chunks_exact(2);
    let mut group = 0;
    for pair in &mut pairs {
        step(group, &pair[0], 0);
        step(group + 1, &pair[1], 1);
        group += 2;
    }
    for line in pairs.remainder() {
        step(group, line, 0);
    }
    // SAFETY: 16 scales.
    let scales = unsafe { _mm512_loadu_ps(scales.as_ptr()) };
    for m in 0..M {
        let h = _mm512_sub_epi32(
            _mm512_add_epi32(hi[m][0], hi[m][1]),
            _mm512_set1_epi32(128 * rows.sum_hi[m]),
        );
        let l = _mm512_sub_epi32(
            _mm512_add_epi32(lo[m][0], lo[m][1]),
            _mm512_set1_epi32(128 * rows.sum_lo[m]),
        );
        let sum = _mm512_fmadd_ps(
            _mm512_cvtepi32_ps(h),
            _mm512_set1_ps(256.0),
            _mm512_cvtepi32_ps(l),
        );
        let scaled = _mm512_mul_ps(sum, _mm512_mul_ps(scales, _mm512_set1_ps(rows.scale[m])));
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(tile[m].as_mut_ptr(), scaled) };
    }
}

/// int8 widened to f32, two registers of 8 outputs.
///
/// # Safety
/// AVX2 and FMA are present; `rows.values` holds `4 * lines.len()` floats for each of `M` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const M: usize>(lines: &[Line], scales: &[f32], rows: &Rows, tile: &mut Tile) {
    let mut sums = [[_mm256_setzero_ps(); 2]; M];
    for (group, line) in lines.iter().enumerate() {
        for input in 0..4 {
            for half in 0..2 {
                // SAFETY: `16 * input + 8 * half + 8 <= 64`.
                let bytes =
                    unsafe { _mm_loadl_epi64(line.0.as_ptr().add(16 * input + 8 * half).cast()) };
                let w = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
                for (m, sum) in sums.iter_mut().enumerate() {
                    let x = rows.values[m * rows.stride + 4 * group + input];
                    sum[half] = _mm256_fmadd_ps(w, _mm256_set1_ps(x), sum[half]);
                }
            }
        }
    }
    for (sum, out) in sums.iter().zip(tile.iter_mut()) {
        for (half, part) in sum.iter().enumerate() {
            // SAFETY: 8 floats at `8 * half` of 16.
            unsafe {
                let scale = _mm256_loadu_ps(scales.as_ptr().add(8 * half));
                let scaled = _mm256_mul_ps(*part, scale);
                _mm256_storeu_ps(out.as_mut_ptr().add(8 * half), scaled);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use structures_plugin_api::formats::{int8_scale, quantise_int8};
    use structures_plugin_api::sdk::Tensor;

    use super::*;
    use crate::isa::ENTRIES;

    /// Deterministic values in -1..1.
    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut s = seed.wrapping_mul(2_654_435_761).max(1);
        (0..n)
            .map(|_| {
                s ^= s << 13;
                s ^= s >> 17;
                s ^= s << 5;
                (s as f32 / u32::MAX as f32) * 2.0 - 1.0
            })
            .collect()
    }

    #[test]
    fn every_isa_and_row_count_equals_the_plain_product() {
        let (k, n) = (70, 37);
        let w = noise(k * n, 1);
        for (name, isa) in ENTRIES {
            if !isa.present() {
                eprintln!("skipped {name}: not on this CPU");
                continue;
            }
            let packed = Packed::pack(isa, &Tensor::from_f32(&w, &[k, n]).unwrap()).unwrap();
            for m in 1..=MAX_ROWS {
                // A large mean makes the shift by 128 matter.
                let x: Vec<f32> = noise(m * k, 7).iter().map(|v| v + 3.0).collect();
                let mut rows = Rows::new(k);
                for r in 0..m {
                    rows.row_mut(r).copy_from_slice(&x[r * k..(r + 1) * k]);
                }
                rows.prepare(isa, m);
                for b in 0..packed.blocks() {
                    let mut tile = [[0.0; BLOCK]; MAX_ROWS];
                    block(isa, &packed, b, &rows, &mut tile);
                    for (r, outputs) in tile.iter().enumerate().take(m) {
                        for (lane, got) in outputs.iter().enumerate().take(n - b * BLOCK) {
                            let out = b * BLOCK + lane;
                            let column: Vec<f32> = (0..k).map(|i| w[i * n + out]).collect();
                            let amax = column.iter().fold(0f32, |a, v| a.max(v.abs()));
                            let scale = int8_scale(amax);
                            let want: f64 = column
                                .iter()
                                .zip(&x[r * k..])
                                .map(|(w, x)| {
                                    f64::from(quantise_int8(*w, scale))
                                        * f64::from(scale)
                                        * f64::from(*x)
                                })
                                .sum();
                            let got = f64::from(*got);
                            assert!(
                                (got - want).abs() < 5e-3,
                                "{name} rows {m} out {out}: {got} for {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}
