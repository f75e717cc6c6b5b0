//! Packed weights: output channels in rows, in one of the number formats.
//!
//! Slots may be laid out in any order and several may be packed as one (gate with up, the siblings
//! of a QKV pack); here they are one `[n, k]` matrix, one run of memory a channel. Codes are kept
//! as they are stored on a device, one or two bytes each, and widened to f32 block by block when
//! they are used.

use structures_plugin_api::formats::{
    amax, bf16_to_f32, f32_to_bf16, f32_to_e4m3_saturating, fp8_scale, int8_scale, quantise_int8,
    E4M3_VALUES,
};
use structures_plugin_api::sdk::{Failure, Host, Tensor};
use structures_plugin_api::DType;

use crate::format::Format;

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
}

#[derive(Debug)]
enum Scale {
    One,
    Tensor(f32),
    Channel(Vec<f32>),
}

impl Packed {
    /// Packs weights of dims `[K, N_i]`, side by side. bf16 weights that are not quantised stay
    /// bf16: nothing is lost and half the memory is read.
    pub fn pack(host: &Host, format: Format, parts: &[Tensor<'_>]) -> Result<Self, Failure> {
        let source = Source::new(parts)?;
        let (n, k) = (source.n, source.k);
        let (codes, scale) = match format {
            Format::F32 if parts.iter().all(|part| part.dtype() == Some(DType::Bf16)) => {
                let encode = |_, value: f32| f32_to_bf16(value);
                (Codes::Bf16(source.encode(host, encode)?), Scale::One)
            }
            Format::F32 => (
                Codes::F32(source.encode(host, |_, value| value)?),
                Scale::One,
            ),
            Format::Fp8Static => {
                let scale = fp8_scale(amax(&source.amax(host)?));
                let encode = |_, value: f32| f32_to_e4m3_saturating(value / scale);
                (
                    Codes::E4m3(source.encode(host, encode)?),
                    Scale::Tensor(scale),
                )
            }
            Format::W8a16Static => {
                let scales: Vec<f32> = source.amax(host)?.into_iter().map(int8_scale).collect();
                let encode = |channel: usize, value: f32| quantise_int8(value, scales[channel]);
                (
                    Codes::Int8(source.encode(host, encode)?),
                    Scale::Channel(scales),
                )
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
        let codes = match self.codes {
            Codes::F32(_) => 4 * elements,
            Codes::Bf16(_) => 2 * elements,
            Codes::E4m3(_) | Codes::Int8(_) => elements,
        };
        codes
            + match &self.scale {
                Scale::One => 0,
                Scale::Tensor(_) => 4,
                Scale::Channel(scales) => 4 * scales.len() as u64,
            }
    }

    /// What the values of a channel are multiplied with.
    pub fn scale(&self, channel: usize) -> f32 {
        match &self.scale {
            Scale::One => 1.0,
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
    parts: &'t [Tensor<'a>],
    n: usize,
    k: usize,
}

impl<'t, 'a> Source<'t, 'a> {
    fn new(parts: &'t [Tensor<'a>]) -> Result<Self, Failure> {
        let mut n = 0;
        let mut k = None;
        for part in parts {
            let [rows, columns] = *part.dims() else {
                let text = format!("a weight of dims {:?}, expected [K, N]", part.dims());
                return Err(Failure::refused("dims_inconsistent", text));
            };
            if *k.get_or_insert(rows) != rows || rows == 0 || columns == 0 {
                let all: Vec<&[i64]> = parts.iter().map(|part| part.dims()).collect();
                let text = format!("weights of dims {all:?} do not lie side by side");
                return Err(Failure::refused("dims_inconsistent", text));
            }
            n += columns as usize;
        }
        Ok(Source {
            parts,
            n,
            k: k.unwrap_or(0) as usize,
        })
    }

    fn read(&self, mut channel: usize, out: &mut [f32]) -> Result<(), Failure> {
        for part in self.parts {
            match channel.checked_sub(part.cols()) {
                None => return part.select(1, channel)?.read_f32(out),
                Some(rest) => channel = rest,
            }
        }
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

    /// Every channel, encoded.
    fn encode<T: Copy + Default + Send>(
        &self,
        host: &Host,
        encode: impl Fn(usize, f32) -> T + Sync,
    ) -> Result<Vec<T>, Failure> {
        let mut codes = vec![T::default(); self.n * self.k];
        host.try_parallel_chunks(&mut codes, CHANNELS * self.k.max(1), |piece, codes| {
            let mut values = vec![0.0; self.k];
            for (i, codes) in codes.chunks_exact_mut(self.k).enumerate() {
                let channel = piece * CHANNELS + i;
                self.read(channel, &mut values)?;
                for (code, value) in codes.iter_mut().zip(&values) {
                    *code = encode(channel, *value);
                }
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
    use structures_plugin_api::describe::WeightFormat;
    use structures_plugin_api::formats::{round_weights_jointly, WeightMatrix};

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
        for format in Format::ALL {
            // One slot stored [K, N], the other [N, K] behind swapped strides.
            let first = Tensor::from_f32(&a_in_out, &[k, n[0]]).expect("fits");
            let second = crate::testing::swapped(&b, n[1], k);
            let packed = Packed::pack(&Host::detached(), format, &[first, second]).expect("packs");
            assert_eq!((packed.n(), packed.k()), (26, k));
            let (mut x, mut y) = (a.clone(), b.clone());
            let weight_format = match format {
                Format::F32 => WeightFormat::None,
                Format::Fp8Static => WeightFormat::Fp8PerTensor,
                Format::W8a16Static => WeightFormat::Int8PerChannel,
            };
            round_weights_jointly(
                weight_format,
                &mut [
                    WeightMatrix::out_in(&mut x, n[0], k),
                    WeightMatrix::out_in(&mut y, n[1], k),
                ],
            );
            assert_eq!(dequantised(&packed), [x, y].concat(), "{format:?}");
        }
    }

    #[test]
    fn bf16_weights_stay_two_bytes_and_exact() {
        let bits: Vec<u16> = noise(3, 12).iter().map(|v| f32_to_bf16(*v)).collect();
        let weight = Tensor::from_bf16(&bits, &[4, 3]).expect("fits");
        let packed = Packed::pack(&Host::detached(), Format::F32, &[weight]).expect("packs");
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
            let failure = Packed::pack(&Host::detached(), Format::F32, &parts).expect_err("misfit");
            assert_eq!(failure.code, "dims_inconsistent");
        }
    }
}
