//! Every family on every rung against its definition in f64, over generated shapes and values.

use structures_plugin_api::abi::{Contract, DType};
use structures_plugin_api::describe::{BindParams, WeightFormat};
use structures_plugin_api::formats::{
    f32_to_f16, round_weight, ActivationRounding, BlockFormat, WeightMatrix,
};
use structures_plugin_api::sdk::{BindRequest, Failure, Host, PackedRows, Tensor, Weight};

use crate::format::Format;
use crate::isa::Isa;
use crate::kernels::blocks::Kind;
use crate::kernels::{LANES, WIDTH};
use crate::linear::{Linear, Out};
use crate::pool::Line;
use crate::source::Source;
use crate::Shared;

/// A calibrated largest value for the formats that want one.
const AMAX: f32 = 0.9;

/// Deterministic values in -1..1.
pub fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut s = seed.wrapping_mul(2_654_435_761) | 1;
    let next = |_| {
        s ^= s << 13;
        s ^= s >> 17;
        s ^= s << 5;
        (s as f32 / u32::MAX as f32) * 2.0 - 1.0
    };
    (0..n).map(next).collect()
}

pub fn shared(isa: Isa) -> Shared {
    Shared {
        host: Host::detached(),
        isa,
        arena: Default::default(),
        pool: Default::default(),
        keeper: None,
    }
}

/// Every output through the bound product; `w` is `[n, k]` behind swapped strides, as a checkpoint has it.
fn run(
    isa: Isa,
    format: Format,
    w: &[f32],
    x: &[f32],
    n: usize,
    k: usize,
) -> Result<Vec<f32>, Failure> {
    let shared = shared(isa);
    let rows = x.len() / k;
    let contract = Contract::capacity(DType::F32, rows as u64);
    let amax = [AMAX];
    let request = BindRequest::new("any", "any", BindParams::default(), &contract)
        .with_statistic("x|amax|tensor", Tensor::from_f32(&amax, &[1])?);
    let weight = Tensor::from_f32(w, &[n, k])?.transpose(0, 1)?;
    let source = Source::concatenated(&[weight])?;
    let linear = Linear::bind(&shared, format, &source, &request, "x")?;
    let mut out = vec![f32::NAN; rows * n];
    let to = Out::new(&mut out, n);
    let mut buffer = vec![Line([0xff; 64]); linear.buffer(rows)];
    linear.run(&shared, x, rows, &mut buffer, |cover, tile| {
        for (r, values) in tile.0.iter().enumerate().take(cover.rows) {
            // SAFETY: one thread.
            let to = unsafe { to.row(cover.row + r, cover.line * LANES, cover.lines * LANES) };
            to.copy_from_slice(&values[..to.len()]);
        }
    });
    Ok(out)
}

/// Weights, activations, and what is left to the kernel, as a share of the sum of magnitudes. 16-bit activations lose
/// half a step of a row's scale besides.
fn rules(format: Format) -> (WeightFormat, ActivationRounding, f64) {
    use ActivationRounding as A;
    let int8 = WeightFormat::Int8PerChannel;
    let calibrated = |name| A::of(name, Some(AMAX)).expect("known");
    match format {
        Format::F32 => (WeightFormat::None, A::None, 1e-5),
        Format::Bf16 | Format::Bf16Pack => (WeightFormat::Bf16, A::Bf16, 1e-5),
        Format::W8a16 => (int8, A::None, 2e-6),
        Format::W8a8Dynamic => (int8, A::Int8Rows, 1e-6),
        Format::W8a8Static => (int8, calibrated("int8"), 1e-6),
        Format::Fp8 => (WeightFormat::Fp8PerTensor, calibrated("e4m3"), 1e-5),
        Format::W4a16 => (WeightFormat::Nvfp4, A::None, 2e-6),
    }
}

fn check(isa: Isa, format: Format, w: &[f32], x: &[f32], n: usize, k: usize) {
    let (weights, rounding, tolerance) = rules(format);
    let got = run(isa, format, w, x, n, k).expect("runs");
    let (mut w, mut a) = (w.to_vec(), x.to_vec());
    round_weight(weights, WeightMatrix::out_in(&mut w, n, k));
    rounding.round(&mut a, k);
    let half_step = match format {
        Format::W8a16 | Format::W4a16 => 1.01 / 65024.0,
        _ => 0.0,
    };
    for (row, (a, got)) in a.chunks_exact(k).zip(got.chunks_exact(n)).enumerate() {
        let amax = f64::from(a.iter().fold(0.0_f32, |m, v| m.max(v.abs())));
        for (channel, got) in got.iter().enumerate() {
            let w = &w[channel * k..][..k];
            let products = || a.iter().zip(w).map(|(a, w)| f64::from(*a) * f64::from(*w));
            let (want, size) = (
                products().sum::<f64>(),
                products().map(f64::abs).sum::<f64>(),
            );
            let lost = half_step * amax * w.iter().map(|w| f64::from(w.abs())).sum::<f64>();
            let off = (f64::from(*got) - want).abs();
            assert!(
                off <= tolerance * size + lost + 1e-38,
                "{isa:?} {format:?} {n} x {k}, row {row} channel {channel}: {got} for {want} ({size})"
            );
        }
    }
}

fn each(test: impl Fn(Isa, Format)) {
    for isa in Isa::here() {
        for format in Format::ALL {
            test(isa, *format);
        }
    }
}

#[test]
fn every_row_count_is_the_plain_product() {
    let (n, k) = (37, 70);
    let w = noise(n * k, 1);
    each(|isa, format| {
        for rows in (1..=20).chain([31, 64, 65, 257]) {
            check(isa, format, &w, &noise(rows * k, 7), n, k);
        }
    });
}

#[test]
fn every_width_is_the_plain_product() {
    each(|isa, format| {
        for (i, n) in [1, 15, 16, 17, 48, 63, 64, 65, 130].into_iter().enumerate() {
            for k in [1, 2, 3, 5, 16, 17, 31, 63, 64, 100, 257, 600] {
                let seed = (i * 1000 + k) as u32;
                check(
                    isa,
                    format,
                    &noise(n * k, seed),
                    &noise(3 * k, seed + 1),
                    n,
                    k,
                );
            }
        }
    });
}

#[test]
fn a_large_mean_denormals_and_saturating_values_do_not_disturb_their_row() {
    let (n, k, rows) = (19, 530, 7);
    let mut w = noise(n * k, 3);
    w[..k].iter_mut().for_each(|v| *v *= 1e30);
    w[k..2 * k].iter_mut().for_each(|v| *v *= 1e-30);
    w[2 * k..3 * k].fill(0.0);
    let mut x = noise(rows * k, 4);
    let row = |x: &mut Vec<f32>, r: usize, f: &dyn Fn(f32) -> f32| {
        x[r * k..(r + 1) * k].iter_mut().for_each(|v| *v = f(*v));
    };
    row(&mut x, 0, &|v| v + 3.0);
    row(&mut x, 1, &|_| 0.0);
    row(&mut x, 2, &|v| if v > 0.5 { 1.0 } else { -1.0 });
    row(&mut x, 3, &|v| v * 1e6);
    // One scale a tensor makes nothing of 1e-30 beside 1e30: every format has its own row of it.
    for isa in Isa::here() {
        for format in [
            Format::F32,
            Format::W8a16,
            Format::W8a8Dynamic,
            Format::W8a8Static,
        ] {
            check(isa, format, &w, &x, n, k);
        }
        for format in [Format::Bf16, Format::Fp8, Format::W4a16] {
            check(isa, format, &noise(n * k, 5), &x, n, k);
        }
    }
    // Denormal activations: nothing of them is left in integers, and nothing else is disturbed.
    row(&mut x, 4, &|v| v * 1e-40);
    each(|isa, format| {
        let w = noise(n * k, 6);
        let got = run(isa, format, &w, &x, n, k).expect("runs");
        assert!(got.iter().all(|v| v.is_finite()), "{isa:?} {format:?}");
        assert!(
            got[4 * n..5 * n].iter().all(|v| v.abs() < 1e-30),
            "{isa:?} {format:?}"
        );
    });
}

#[test]
fn sums_of_many_saturated_codes_do_not_overflow() {
    // Every product is the largest there is: all codes 127, all activations at the end of their range.
    let (n, k) = (3, 20_000);
    let (w, x) = (vec![1.0; n * k], vec![AMAX; 2 * k]);
    each(|isa, format| check(isa, format, &w, &x, n, k));
    let x: Vec<f32> = x.iter().map(|v| -v).collect();
    each(|isa, format| check(isa, format, &w, &x, n, k));
}

#[test]
fn rows_may_lie_anywhere() {
    let (n, k, rows) = (33, 67, 5);
    let w = noise(n * k, 8);
    let x = noise(rows * k + 4, 9);
    each(|isa, format| {
        for offset in 0..4 {
            check(isa, format, &w, &x[offset..offset + rows * k], n, k);
        }
    });
}

#[test]
fn what_is_not_finite_is_seen_in_its_row_alone_and_refused_in_weights() {
    let (n, k) = (WIDTH + 1, 40);
    let w = noise(n * k, 10);
    let mut x = noise(3 * k, 11);
    x[k + 7] = f32::NAN;
    each(|isa, format| {
        let got = run(isa, format, &w, &x, n, k).expect("runs");
        for (row, got) in got.chunks_exact(n).enumerate() {
            assert!(
                got.iter().all(|v| v.is_nan() == (row == 1)),
                "{isa:?} {format:?} {row}"
            );
        }
        let mut bad = w.clone();
        bad[k + 1] = f32::INFINITY;
        let refused = run(isa, format, &bad, &x, n, k);
        match format {
            Format::F32 | Format::Bf16 => assert!(refused.is_ok(), "as the definition has it"),
            _ => assert_eq!(refused.expect_err("not finite").code, "non_finite"),
        }
    });
}

#[test]
fn more_inputs_than_sums_can_hold_are_refused() {
    let k = super::int8::MOST_INPUTS + 1;
    let (w, x) = (vec![0.0; k], vec![0.0; k]);
    let refused = run(Isa::here()[0], Format::W8a16, &w, &x, 1, k).expect_err("too many");
    assert_eq!(refused.code, "envelope");
}

/// Rows of a packed format with sane scales: bytes at random, the f16 scales among them small.
fn packed_rows(format: BlockFormat, n: usize, k: usize) -> Vec<u8> {
    let width = format.row_bytes(k).expect("whole blocks");
    let mut bytes: Vec<u8> = noise(n * width, 21)
        .iter()
        .map(|v| ((v + 1.0) * 127.9) as u8)
        .collect();
    let half = |at: &mut [u8], i: usize| {
        let value = f32_to_f16(0.01 + (i % 7) as f32 * 0.003);
        at[..2].copy_from_slice(&value.to_le_bytes());
    };
    for (r, row) in bytes.chunks_exact_mut(width).enumerate() {
        let (size, halves): (usize, &[usize]) = match format {
            BlockFormat::Q8_0 => (34, &[0]),
            BlockFormat::Q4_0 => (18, &[0]),
            BlockFormat::Q4_1 => (20, &[0, 2]),
            BlockFormat::Q4K => (144, &[0, 2]),
            BlockFormat::Q6K => (210, &[208]),
            _ => {
                let scales = k / 2..k / 2 + k / 16;
                row[scales].iter_mut().for_each(|s| *s = 40 + *s % 40);
                let end = row.len() - 4;
                row[end..].copy_from_slice(&3.5_f32.to_le_bytes());
                continue;
            }
        };
        for (b, block) in row.chunks_exact_mut(size).enumerate() {
            halves
                .iter()
                .for_each(|at| half(&mut block[*at..], r + b + at));
        }
    }
    bytes
}

/// Rows of a checkpoint times `x`: what comes out, the same in f64, the sums of magnitudes; and the bytes they take.
struct Stored {
    got: Vec<f64>,
    want: Vec<f64>,
    size: Vec<f64>,
    bytes: u64,
}

fn run_stored(isa: Isa, rows: &PackedRows<'_>, x: &[f32]) -> Stored {
    let (n, k) = (rows.n(), rows.k());
    let count = x.len() / k;
    let shared = shared(isa);
    let contract = Contract::capacity(DType::F32, count as u64);
    let request = BindRequest::new("any", "any", BindParams::default(), &contract);
    let source = Source::concatenated(&[Weight::Packed(*rows)]).expect("fits");
    let linear = Linear::bind(&shared, Format::F32, &source, &request, "x").expect("binds");
    let mut out = vec![f32::NAN; count * n];
    let mut buffer = vec![Line([0xff; 64]); linear.buffer(count)];
    let to = Out::new(&mut out, n);
    linear.run(&shared, x, count, &mut buffer, to.writer(isa, &[]));
    let mut w = vec![0.0; k];
    let (mut want, mut size) = (vec![0.0; count * n], vec![0.0; count * n]);
    for channel in 0..n {
        rows.decode(channel, 0, &mut w);
        for (row, x) in x.chunks_exact(k).enumerate() {
            let each = || x.iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w));
            want[row * n + channel] = each().sum();
            size[row * n + channel] = each().map(f64::abs).sum();
        }
    }
    Stored {
        got: out.into_iter().map(f64::from).collect(),
        want,
        size,
        bytes: linear.bytes(),
    }
}

fn stored_formats() -> impl Iterator<Item = BlockFormat> {
    let taken = |format: &BlockFormat| Kind::of(*format).is_some();
    BlockFormat::ALL.into_iter().filter(taken)
}

#[test]
fn packed_rows_of_every_format_are_multiplied_as_they_are() {
    for isa in Isa::here() {
        for format in stored_formats() {
            for (n, k) in [(1, 256), (17, 512), (70, 768)] {
                let bytes = packed_rows(format, n, k);
                let rows = PackedRows::new(format, n, k, &bytes).expect("fits");
                let x: Vec<f32> = noise(7 * k, 22).iter().map(|v| v + 0.4).collect();
                let run = run_stored(isa, &rows, &x);
                let stored = bytes.len() as f64 * (n.div_ceil(16) * 16) as f64 / n as f64;
                assert!((run.bytes as f64) < stored * 1.05 + 64.0, "{format}");
                for (i, got) in run.got.iter().enumerate() {
                    let (want, size) = (run.want[i], run.size[i]);
                    assert!(
                        (got - want).abs() < 3e-5 * size,
                        "{isa:?} {format} {n} x {k} output {i}: {got} for {want} ({size})"
                    );
                }
            }
        }
    }
}

/// An outlier that the weights do nearly nothing with is what a norm's output is full of. Sixty times the rest, it made the
/// step of its block so coarse that the block's other values cost more than an f32 product may lose.
#[test]
fn an_outlier_does_not_cost_its_block_what_an_f32_product_promises() {
    let (n, k, at) = (70, 768, 40);
    let forms = crate::forms::declarations();
    let plain = forms
        .iter()
        .find(|f| f.name == "f32" && !f.packed.is_empty());
    let promised = plain.expect("a form that takes stored rows").tolerance;
    for isa in Isa::here() {
        for format in stored_formats() {
            let bytes = packed_rows(format, n, k);
            let rows = PackedRows::new(format, n, k, &bytes).expect("fits");
            let mut alone = vec![0.0; k];
            alone[at] = 60.0;
            let alone = run_stored(isa, &rows, &alone).want;
            for count in [1, 3, 9] {
                let mut x = noise(count * k, 31);
                x.chunks_exact_mut(k).for_each(|x| x[at] = 60.0);
                let run = run_stored(isa, &rows, &x);
                let square = |of: &dyn Fn(usize) -> f64| -> f64 {
                    (0..count * n).map(|i| of(i).powi(2)).sum::<f64>().sqrt()
                };
                let off = square(&|i| run.got[i] - run.want[i]);
                let off = off / square(&|i| run.want[i] - alone[i % n]);
                assert!(off < promised, "{isa:?} {format} {count} rows: {off:.2e}");
            }
        }
    }
}
