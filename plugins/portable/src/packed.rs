//! Packed weights: output channels in rows, in one of the number formats.
//!
//! Slots may be laid out in any order and several may be packed as one (gate with up, the siblings
//! of a QKV pack); here they are one `[n, k]` matrix, one run of memory a channel. Codes are kept
//! as they are stored on a device, one or two bytes each, and widened to f32 block by block when
//! they are used.

use structures_plugin_api::describe::WeightFormat;
use structures_plugin_api::formats::{
    amax, bf16_to_f32, e2m1_to_f32, f32_to_bf16, f32_to_e4m3_saturating, fp8_scale, int8_scale,
    nvfp4_global_scale, pack_nvfp4, quantise_int8, BlockFormat, E4M3_VALUES, NVFP4_BLOCK,
};
use structures_plugin_api::sdk::{Failure, Host, Weight};
use structures_plugin_api::DType;

/// Channels that one piece of parallel packing does.
const CHANNELS: usize = 16;

/// An `[n, k]` matrix of codes with its scales.
#[derive(Debug)]
pub struct Packed {
    n: usize,
    k: usize,
    codes: Codes,
    scale: Scale,
}

#[derive(Debug)]
enum Codes {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    E4m3(Vec<u8>),
    Int8(Vec<i8>),
    /// Rows of [`nvfp4_row`] bytes: codes two a byte, then the scales of their blocks.
    Nvfp4(Vec<u8>),
    /// Rows of a checkpoint, as they are stored there; parts in the order of their channels.
    Stored(Vec<Stored>),
}

/// Channels of one slot.
#[derive(Debug)]
enum Stored {
    /// Rows as the checkpoint stores them.
    Rows {
        format: BlockFormat,
        n: usize,
        width: usize,
        rows: Vec<u8>,
    },
    /// A slot that is not packed, beside others that are.
    Plain { n: usize, values: Vec<f32> },
}

impl Stored {
    fn n(&self) -> usize {
        match self {
            Stored::Rows { n, .. } | Stored::Plain { n, .. } => *n,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Stored::Rows { rows, .. } => rows.len(),
            Stored::Plain { values, .. } => size_of_val(values.as_slice()),
        }
    }
}

/// Copies of the parts, where some are packed and nothing is to be done to their values.
fn stored(
    parts: &[Weight<'_>],
    factors: Option<&[f32]>,
    k: usize,
) -> Result<Option<Vec<Stored>>, Failure> {
    let packed = |part: &Weight<'_>| matches!(part, Weight::Packed(_));
    if factors.is_some() || !parts.iter().any(packed) {
        return Ok(None);
    }
    let one = |part: &Weight<'_>| match part {
        Weight::Packed(rows) => Ok(Stored::Rows {
            format: rows.format(),
            n: rows.n(),
            width: rows.width(),
            rows: rows.data().to_vec(),
        }),
        Weight::Plain(_) => {
            let n = part.dims()?[1];
            let mut values = vec![0.0; n * k];
            for (channel, row) in values.chunks_exact_mut(k.max(1)).enumerate() {
                part.read_channel(channel, row)?;
            }
            Ok(Stored::Plain { n, values })
        }
    };
    parts.iter().map(one).collect::<Result<_, _>>().map(Some)
}

#[derive(Debug)]
enum Scale {
    One,
    Tensor(f32),
    Channel(Vec<f32>),
    /// NVFP4's: what block scales are divided by.
    Global(f32),
}

/// Bytes of codes and bytes of block scales of one NVFP4 channel.
fn nvfp4_row(k: usize) -> (usize, usize) {
    (k.div_ceil(2), k.div_ceil(NVFP4_BLOCK))
}

impl Packed {
    /// Packs weights of dims `[K, N_i]`, side by side, each input channel times its factor where
    /// there are `factors`. bf16 weights that are not quantised stay bf16: nothing is lost and half
    /// the memory is read. Packed rows of a checkpoint that are not quantised again stay as they
    /// are.
    pub fn pack<'a, W: Copy + Into<Weight<'a>>>(
        host: &Host,
        format: WeightFormat,
        parts: &[W],
        factors: Option<&[f32]>,
    ) -> Result<Self, Failure> {
        let parts: Vec<Weight<'a>> = parts.iter().map(|part| (*part).into()).collect();
        let source = Source::new(&parts, factors)?;
        let (n, k) = (source.n, source.k);
        let bf16 = |part: &Weight<'_>| match part {
            Weight::Plain(tensor) => tensor.dtype() == Some(DType::Bf16),
            Weight::Packed(_) => false,
        };
        let given = parts.iter().all(bf16);
        if format == WeightFormat::None {
            if let Some(parts) = stored(&parts, factors, k)? {
                let (codes, scale) = (Codes::Stored(parts), Scale::One);
                return Ok(Packed { n, k, codes, scale });
            }
        }
        let (codes, scale) = match format {
            WeightFormat::None if !given => (
                Codes::F32(source.encode(host, |_, value| value)?),
                Scale::One,
            ),
            WeightFormat::None | WeightFormat::Bf16 => {
                let encode = |_, value: f32| f32_to_bf16(value);
                (Codes::Bf16(source.encode(host, encode)?), Scale::One)
            }
            WeightFormat::Fp8PerTensor => {
                let scale = fp8_scale(amax(&source.amax(host)?));
                let encode = |_, value: f32| f32_to_e4m3_saturating(value / scale);
                (
                    Codes::E4m3(source.encode(host, encode)?),
                    Scale::Tensor(scale),
                )
            }
            WeightFormat::Int8PerChannel => {
                let scales: Vec<f32> = source.amax(host)?.into_iter().map(int8_scale).collect();
                let encode = |channel: usize, value: f32| quantise_int8(value, scales[channel]);
                (
                    Codes::Int8(source.encode(host, encode)?),
                    Scale::Channel(scales),
                )
            }
            WeightFormat::Nvfp4 => {
                let global = nvfp4_global_scale(amax(&source.amax(host)?));
                let (codes, scales) = nvfp4_row(k);
                let rows = source.rows(host, codes + scales, |_, values, row| {
                    let packed = pack_nvfp4(values, k, global);
                    row[..codes].copy_from_slice(&packed.packed);
                    row[codes..].copy_from_slice(&packed.block_scales);
                })?;
                (Codes::Nvfp4(rows), Scale::Global(global))
            }
        };
        Ok(Packed { n, k, codes, scale })
    }

    /// Output channels.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs of a channel.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> u64 {
        let elements = (self.n * self.k) as u64;
        let codes = match &self.codes {
            Codes::F32(_) => 4 * elements,
            Codes::Bf16(_) => 2 * elements,
            Codes::E4m3(_) | Codes::Int8(_) => elements,
            Codes::Nvfp4(rows) => rows.len() as u64,
            Codes::Stored(parts) => parts.iter().map(|part| part.bytes() as u64).sum(),
        };
        codes
            + match &self.scale {
                Scale::One => 0,
                Scale::Tensor(_) | Scale::Global(_) => 4,
                Scale::Channel(scales) => 4 * scales.len() as u64,
            }
    }

    /// What the values of a channel are multiplied with.
    pub fn scale(&self, channel: usize) -> f32 {
        match &self.scale {
            // Block scales are in the values already.
            Scale::One | Scale::Global(_) => 1.0,
            Scale::Tensor(scale) => *scale,
            Scale::Channel(scales) => scales[channel],
        }
    }

    /// Values of the codes of one channel from input `from` on, as many as `buffer` holds, without
    /// the scale. f32 is borrowed as it is, anything else is widened into `buffer`.
    pub fn values<'a>(&'a self, channel: usize, from: usize, buffer: &'a mut [f32]) -> &'a [f32] {
        let start = channel * self.k + from;
        let range = start..start + buffer.len();
        match &self.codes {
            Codes::F32(values) => return &values[range],
            Codes::Bf16(codes) => widen(&codes[range], buffer, bf16_to_f32),
            Codes::E4m3(codes) => widen(&codes[range], buffer, |code| E4M3_VALUES[code as usize]),
            Codes::Int8(codes) => widen(&codes[range], buffer, f32::from),
            Codes::Nvfp4(rows) => {
                let (codes, scales) = nvfp4_row(self.k);
                let row = &rows[channel * (codes + scales)..][..codes + scales];
                let (codes, scales) = row.split_at(codes);
                let global = match self.scale {
                    Scale::Global(global) => global,
                    _ => 1.0,
                };
                for (i, value) in (from..).zip(buffer.iter_mut()) {
                    let step = E4M3_VALUES[usize::from(scales[i / NVFP4_BLOCK])] / global;
                    *value = e2m1_to_f32(codes[i / 2] >> (4 * (i % 2))) * step;
                }
            }
            Codes::Stored(parts) => {
                let mut channel = channel;
                for part in parts {
                    if channel >= part.n() {
                        channel -= part.n();
                        continue;
                    }
                    match part {
                        Stored::Plain { values, .. } => {
                            let start = channel * self.k + from;
                            return &values[start..start + buffer.len()];
                        }
                        Stored::Rows {
                            format,
                            width,
                            rows,
                            ..
                        } => {
                            let row = &rows[channel * width..][..*width];
                            format.decode(row, self.k, from, buffer);
                        }
                    }
                    break;
                }
            }
        }
        buffer
    }
}

fn widen<T: Copy>(codes: &[T], values: &mut [f32], widen: impl Fn(T) -> f32) {
    for (value, code) in values.iter_mut().zip(codes) {
        *value = widen(*code);
    }
}

/// Weights as the host gave them, seen as one list of channels.
struct Source<'t, 'a> {
    parts: &'t [Weight<'a>],
    factors: Option<&'t [f32]>,
    n: usize,
    k: usize,
}

impl<'t, 'a> Source<'t, 'a> {
    fn new(parts: &'t [Weight<'a>], factors: Option<&'t [f32]>) -> Result<Self, Failure> {
        let mut n = 0;
        let mut k = None;
        for part in parts {
            let [rows, columns] = part.dims()?;
            if *k.get_or_insert(rows) != rows || rows == 0 || columns == 0 {
                let all: Vec<_> = parts.iter().filter_map(|part| part.dims().ok()).collect();
                let text = format!("weights of dims {all:?} do not lie side by side");
                return Err(Failure::refused("dims_inconsistent", text));
            }
            n += columns;
        }
        let k = k.unwrap_or(0);
        if let Some(factors) = factors.filter(|factors| factors.len() != k) {
            let text = format!("{} channel factors for {k} inputs", factors.len());
            return Err(Failure::refused("dims_inconsistent", text));
        }
        Ok(Source {
            parts,
            factors,
            n,
            k,
        })
    }

    fn read(&self, mut channel: usize, out: &mut [f32]) -> Result<(), Failure> {
        for part in self.parts {
            match channel.checked_sub(part.dims()?[1]) {
                None => {
                    part.read_channel(channel, out)?;
                    break;
                }
                Some(rest) => channel = rest,
            }
        }
        let factors = self.factors.unwrap_or_default();
        out.iter_mut().zip(factors).for_each(|(v, s)| *v *= s);
        Ok(())
    }

    /// Largest absolute value of each channel.
    fn amax(&self, host: &Host) -> Result<Vec<f32>, Failure> {
        let mut largest = vec![0.0; self.n];
        host.try_parallel_chunks(&mut largest, CHANNELS, |piece, largest| {
            let mut values = vec![0.0; self.k];
            for (i, largest) in largest.iter_mut().enumerate() {
                self.read(piece * CHANNELS + i, &mut values)?;
                *largest = amax(&values);
            }
            Ok(())
        })?;
        Ok(largest)
    }

    /// Every value of every channel, encoded by itself.
    fn encode<T: Copy + Default + Send>(
        &self,
        host: &Host,
        encode: impl Fn(usize, f32) -> T + Sync,
    ) -> Result<Vec<T>, Failure> {
        self.rows(host, self.k, |channel, values, codes| {
            for (code, value) in codes.iter_mut().zip(values) {
                *code = encode(channel, *value);
            }
        })
    }

    /// Every channel, encoded into a row of `width`.
    fn rows<T: Copy + Default + Send>(
        &self,
        host: &Host,
        width: usize,
        encode: impl Fn(usize, &[f32], &mut [T]) + Sync,
    ) -> Result<Vec<T>, Failure> {
        let width = width.max(1);
        let mut codes = vec![T::default(); self.n * width];
        host.try_parallel_chunks(&mut codes, CHANNELS * width, |piece, codes| {
            let mut values = vec![0.0; self.k];
            for (i, codes) in codes.chunks_exact_mut(width).enumerate() {
                let channel = piece * CHANNELS + i;
                self.read(channel, &mut values)?;
                encode(channel, &values, codes);
            }
            Ok(())
        })?;
        Ok(codes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{noise, transposed};
    use structures_plugin_api::formats::{round_weights_jointly, WeightMatrix};
    use structures_plugin_api::sdk::{PackedRows, Tensor};

    const FORMATS: [WeightFormat; 5] = [
        WeightFormat::None,
        WeightFormat::Bf16,
        WeightFormat::Fp8PerTensor,
        WeightFormat::Int8PerChannel,
        WeightFormat::Nvfp4,
    ];

    fn dequantised(packed: &Packed) -> Vec<f32> {
        let mut out = Vec::new();
        let mut buffer = vec![0.0; packed.k()];
        for channel in 0..packed.n() {
            let scale = packed.scale(channel);
            let values = packed.values(channel, 0, &mut buffer);
            out.extend(values.iter().map(|value| value * scale));
        }
        out
    }

    #[test]
    fn two_slots_of_any_layout_pack_as_one_and_equal_the_declared_rounding() {
        let (k, n) = (37, [21, 5]);
        let (a, mut b) = (noise(1, n[0] * k), noise(2, n[1] * k));
        b.iter_mut().for_each(|v| *v *= 3.0);
        let a_in_out = transposed(&a, n[0], k);
        for format in FORMATS {
            // One slot stored [K, N], the other [N, K] behind swapped strides.
            let first = Tensor::from_f32(&a_in_out, &[k, n[0]]).expect("fits");
            let second = crate::testing::swapped(&b, n[1], k);
            let parts = [first, second];
            let packed = Packed::pack(&Host::detached(), format, &parts, None).expect("packs");
            assert_eq!((packed.n(), packed.k()), (26, k));
            let (mut x, mut y) = (a.clone(), b.clone());
            round_weights_jointly(
                format,
                &mut [
                    WeightMatrix::out_in(&mut x, n[0], k),
                    WeightMatrix::out_in(&mut y, n[1], k),
                ],
            );
            assert_eq!(dequantised(&packed), [x, y].concat(), "{format:?}");
        }
    }

    #[test]
    fn a_plain_slot_beside_packed_ones_leaves_them_packed() {
        let (k, format) = (64, BlockFormat::Q8_0);
        let bytes = 3 * format.row_bytes(k).expect("whole blocks");
        let rows: Vec<u8> = (0..bytes).map(|i| (i * 29 % 53) as u8).collect();
        let plain = noise(5, 2 * k);
        let parts = [
            Weight::Plain(crate::testing::swapped(&plain, 2, k)),
            Weight::Packed(PackedRows::new(format, 3, k, &rows).expect("fits")),
        ];
        let packed = Packed::pack(&Host::detached(), WeightFormat::None, &parts, None);
        let packed = packed.expect("packs");
        assert_eq!(packed.bytes(), (bytes + 4 * 2 * k) as u64);
        let mut want = plain;
        for row in rows.chunks_exact(bytes / 3) {
            let mut values = vec![0.0; k];
            format.decode(row, k, 0, &mut values);
            want.extend(values);
        }
        assert_eq!(dequantised(&packed), want);
    }

    #[test]
    fn b_246_packed_rows_stay_as_they_are_stored_and_may_differ_in_format() {
        let k = 64;
        let of = |format: BlockFormat, n: usize| -> Vec<u8> {
            let bytes = n * format.row_bytes(k).expect("whole blocks");
            (0..bytes).map(|i| (i * 29 % 53) as u8).collect()
        };
        let (a, b) = (of(BlockFormat::Q8_0, 3), of(BlockFormat::Q4_1, 2));
        let first = PackedRows::new(BlockFormat::Q8_0, 3, k, &a).expect("fits");
        let second = PackedRows::new(BlockFormat::Q4_1, 2, k, &b).expect("fits");
        let parts = [Weight::Packed(first), Weight::Packed(second)];
        let mut want = vec![0.0; 5 * k];
        for (channel, row) in want.chunks_mut(k).enumerate() {
            match channel.checked_sub(3) {
                None => first.decode(channel, 0, row),
                Some(rest) => second.decode(rest, 0, row),
            }
        }
        let host = Host::detached();
        let packed = Packed::pack(&host, WeightFormat::None, &parts, None).expect("packs");
        assert_eq!(packed.bytes(), (a.len() + b.len()) as u64);
        assert_eq!(dequantised(&packed), want);
        // Beside a plain slot, and in a format of ours, their values are taken instead.
        let plain = Tensor::from_f32(&want[..k], &[k, 1]).expect("fits");
        let mixed = [parts[1], plain.into()];
        let packed = Packed::pack(&host, WeightFormat::None, &mixed, None).expect("packs");
        assert_eq!(dequantised(&packed), [&want[3 * k..], &want[..k]].concat());
        let mut rounded = want.clone();
        let matrix = WeightMatrix::out_in(&mut rounded, 5, k);
        round_weights_jointly(WeightFormat::Int8PerChannel, &mut [matrix]);
        let packed = Packed::pack(&host, WeightFormat::Int8PerChannel, &parts, None);
        assert_eq!(dequantised(&packed.expect("packs")), rounded);
    }

    #[test]
    fn four_bits_are_half_a_byte_and_a_scale_for_sixteen() {
        let w = noise(4, 64 * 3);
        let weight = Tensor::from_f32(&w, &[64, 3]).expect("fits");
        let packed = Packed::pack(&Host::detached(), WeightFormat::Nvfp4, &[weight], None);
        assert_eq!(packed.expect("packs").bytes(), 3 * (32 + 4) + 4);
    }

    #[test]
    fn factors_scale_input_channels_before_packing() {
        let (k, n) = (5, 2);
        let w = noise(5, k * n);
        let factors = [0.25, 0.5, 1.0, 2.0, 4.0];
        let weight = crate::testing::swapped(&w, n, k);
        let host = Host::detached();
        let packed = Packed::pack(&host, WeightFormat::None, &[weight], Some(&factors));
        let scaled: Vec<f32> = w
            .iter()
            .zip(factors.iter().cycle())
            .map(|(w, s)| w * s)
            .collect();
        assert_eq!(dequantised(&packed.expect("packs")), scaled);
    }

    #[test]
    fn bf16_weights_stay_two_bytes_and_exact() {
        let bits: Vec<u16> = noise(3, 12).iter().map(|v| f32_to_bf16(*v)).collect();
        let weight = Tensor::from_bf16(&bits, &[4, 3]).expect("fits");
        let packed =
            Packed::pack(&Host::detached(), WeightFormat::None, &[weight], None).expect("packs");
        assert_eq!(packed.bytes(), 24);
        let expected = transposed(&weight.to_f32_vec().expect("reads"), 4, 3);
        assert_eq!(dequantised(&packed), expected);
    }

    #[test]
    fn slots_that_do_not_fit_are_refused() {
        let data = [0.0; 12];
        let t = |dims: &[usize]| Tensor::from_f32(&data, dims).expect("fits");
        let empty = Tensor::from_f32(&[], &[4, 0]).expect("fits");
        for parts in [
            vec![t(&[4, 3]), t(&[3, 4])],
            vec![t(&[12])],
            vec![t(&[2, 2, 3])],
            vec![empty],
        ] {
            let failure = Packed::pack(&Host::detached(), WeightFormat::None, &parts, None);
            assert_eq!(failure.expect_err("misfit").code, "dims_inconsistent");
        }
        let factors = Some(&[1.0; 5][..]);
        let failure = Packed::pack(
            &Host::detached(),
            WeightFormat::None,
            &[t(&[4, 3])],
            factors,
        );
        assert_eq!(failure.expect_err("misfit").code, "dims_inconsistent");
    }
}
