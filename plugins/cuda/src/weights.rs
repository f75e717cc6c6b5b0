//! Packed weights on the device: output channels in rows, in the format of a product.
//!
//! Slots come in any memory order and several may be packed as one, one after the other or interleaved by eights. They
//! are rounded on the CPU with the SDK's own definitions, over the host's threads, and copied once.

use std::sync::Arc;

use structures_plugin_api::formats::{
    amax, f32_to_bf16, f32_to_e4m3_saturating, fp8_scale, int8_scale, quantise_int8,
};
use structures_plugin_api::sdk::{Failure, Host, Tensor};

use crate::context::{Buffer, Context};
use crate::format::Format;

/// How several slots share one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One after the other.
    Behind,
    /// Eight channels of the first, eight of the second, and so on: both of two equally wide slots.
    ByEights,
}

/// A packed matrix on the device.
#[derive(Debug)]
pub struct Weights {
    /// Output channels.
    pub n: u32,
    /// Inputs of a channel.
    pub k: u32,
    /// Scale of the whole tensor; 1 where channels have their own or there is none.
    pub scale: f32,
    codes: Buffer,
    scales: Option<Buffer>,
}

impl Weights {
    /// Address of the first channel.
    pub fn codes(&self) -> u64 {
        self.codes.address()
    }

    /// Address of the channels' scales, 0 for none.
    pub fn scales(&self) -> u64 {
        self.scales.as_ref().map_or(0, Buffer::address)
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.codes.bytes() + self.scales.as_ref().map_or(0, Buffer::bytes)
    }

    /// Packs weights of dims `[K, N_i]`.
    ///
    /// # Errors
    /// `dims_inconsistent`; `no_device_memory`, `device_lost`.
    pub fn pack(
        host: &Host,
        context: &Arc<Context>,
        format: Format,
        parts: &[Tensor<'_>],
        order: Order,
    ) -> Result<Self, Failure> {
        let packed = Packed::new(host, format, parts, order)?;
        context.reserve(packed.codes.len() as u64 + 4 * packed.scales.len() as u64)?;
        let scales: Vec<u8> = packed.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        Ok(Weights {
            n: packed.n,
            k: packed.k,
            scale: packed.scale,
            codes: context.upload(&packed.codes)?,
            scales: match scales.is_empty() {
                true => None,
                false => Some(context.upload(&scales)?),
            },
        })
    }
}

/// The same before it is copied.
#[derive(Debug)]
struct Packed {
    n: u32,
    k: u32,
    codes: Vec<u8>,
    scale: f32,
    scales: Vec<f32>,
}

impl Packed {
    fn new(
        host: &Host,
        format: Format,
        parts: &[Tensor<'_>],
        order: Order,
    ) -> Result<Self, Failure> {
        let (n, k) = dims(parts, order)?;
        let channel = |row: usize| -> Result<(Tensor<'_>, usize), Failure> {
            match order {
                Order::ByEights => Ok((parts[row / 8 % 2], row / 16 * 8 + row % 8)),
                Order::Behind => {
                    let mut row = row;
                    for part in parts {
                        if row < part.cols() {
                            return Ok((*part, row));
                        }
                        row -= part.cols();
                    }
                    Err(Failure::invalid("argument", "a channel past the last"))
                }
            }
        };
        let read = |row: usize, values: &mut Vec<f32>| -> Result<(), Failure> {
            let (part, column) = channel(row)?;
            values.resize(k, 0.0);
            part.select(1, column)?.read_f32(values)
        };
        let mut largest = vec![0.0_f32; n];
        if format.weights() != structures_plugin_api::describe::WeightFormat::Bf16 {
            host.try_parallel_chunks(&mut largest, 64, |chunk, out| {
                let mut values = Vec::new();
                for (i, out) in out.iter_mut().enumerate() {
                    read(chunk * 64 + i, &mut values)?;
                    *out = amax(&values);
                }
                Ok::<(), Failure>(())
            })?;
        }
        let (scale, scales) = match format {
            Format::Bf16 | Format::Bf16Pack => (1.0, Vec::new()),
            Format::Fp8Static => (fp8_scale(amax(&largest)), Vec::new()),
            Format::W8a16Static => (1.0, largest.into_iter().map(int8_scale).collect()),
        };
        if format == Format::W8a16Static {
            return Ok(Packed {
                n: n as u32,
                k: k as u32,
                codes: pieces(host, (n, k), &scales, read)?,
                scale,
                scales,
            });
        }
        let mut codes = vec![0_u8; n * k * format.weight_bytes()];
        let row_bytes = k * format.weight_bytes();
        host.try_parallel_chunks(&mut codes, row_bytes, |row, out| {
            let mut values = Vec::new();
            read(row, &mut values)?;
            match format {
                Format::Bf16 | Format::Bf16Pack => out
                    .chunks_exact_mut(2)
                    .zip(&values)
                    .for_each(|(out, v)| out.copy_from_slice(&f32_to_bf16(*v).to_le_bytes())),
                Format::Fp8Static => out
                    .iter_mut()
                    .zip(&values)
                    .for_each(|(out, v)| *out = f32_to_e4m3_saturating(v / scale)),
                // Packed above.
                Format::W8a16Static => {}
            }
            Ok::<(), Failure>(())
        })?;
        Ok(Packed {
            n: n as u32,
            k: k as u32,
            codes,
            scale,
            scales,
        })
    }
}

/// int8 codes in pieces of 16 channels by 64 inputs, as `product_rows` of `product.cuh` reads them; zeros where there
/// is no channel or no input.
fn pieces(
    host: &Host,
    (n, k): (usize, usize),
    scales: &[f32],
    read: impl Fn(usize, &mut Vec<f32>) -> Result<(), Failure> + Sync,
) -> Result<Vec<u8>, Failure> {
    let along = k.div_ceil(PIECE_INPUTS) * PIECE_BYTES;
    let mut codes = vec![0_u8; n.div_ceil(PIECE_CHANNELS) * along];
    host.try_parallel_chunks(&mut codes, along, |tile, out| {
        let mut values = Vec::new();
        for channel in 0..PIECE_CHANNELS.min(n - tile * PIECE_CHANNELS) {
            let row = tile * PIECE_CHANNELS + channel;
            read(row, &mut values)?;
            for (k, v) in values.iter().enumerate() {
                out[piece_byte(channel, k)] = quantise_int8(*v, scales[row]) as u8;
            }
        }
        Ok::<(), Failure>(())
    })?;
    Ok(codes)
}

const PIECE_CHANNELS: usize = 16;
const PIECE_INPUTS: usize = 64;
const PIECE_BYTES: usize = PIECE_CHANNELS * PIECE_INPUTS;

/// Where the code of a channel of sixteen and an input lies.
fn piece_byte(channel: usize, k: usize) -> usize {
    let lane = channel % 8 * 4 + k % PIECE_INPUTS / 16;
    k / PIECE_INPUTS * PIECE_BYTES + channel / 8 * (PIECE_BYTES / 2) + lane * 16 + k % 16
}

/// Channels of all parts, and the inputs of each.
fn dims(parts: &[Tensor<'_>], order: Order) -> Result<(usize, usize), Failure> {
    let all: Vec<&[i64]> = parts.iter().map(|part| part.dims()).collect();
    let bad = || {
        let text = format!("weights of dims {all:?} are no matrix together ({order:?})");
        Failure::refused("dims_inconsistent", text)
    };
    let k = match parts {
        [first, ..] if first.rank() == 2 => first.rows(),
        _ => return Err(bad()),
    };
    let same = |part: &Tensor<'_>| part.rank() == 2 && part.rows() == k && part.cols() > 0;
    let n: usize = parts.iter().map(|part| part.cols()).sum();
    let paired = order == Order::Behind
        || (parts.len() == 2 && parts[0].cols() == parts[1].cols() && n.is_multiple_of(16));
    let fits = u32::try_from(n).is_ok() && u32::try_from(k).is_ok();
    match parts.iter().all(same) && paired && k > 0 && fits {
        true => Ok((n, k)),
        false => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use structures_plugin_api::formats::bf16_to_f32;

    fn pack(format: Format, parts: &[Tensor<'_>], order: Order) -> Packed {
        Packed::new(&Host::detached(), format, parts, order).expect("packs")
    }

    fn ramp(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i * 37 % 101) as f32 - 50.0).collect()
    }

    #[test]
    fn channels_lie_in_rows_whatever_the_order_of_the_slot() {
        let (k, n) = (3, 5);
        let data = ramp(k * n);
        let plain = Tensor::from_f32(&data, &[k, n]).expect("fits");
        let turned: Vec<f32> = (0..n * k).map(|i| data[(i % k) * n + i / k]).collect();
        let turned = Tensor::from_f32(&turned, &[n, k]).expect("fits");
        let turned = turned.transpose(0, 1).expect("two axes");
        for tensor in [plain, turned] {
            let packed = pack(Format::Bf16, &[tensor], Order::Behind);
            assert_eq!((packed.n, packed.k), (5, 3));
            let value = |row: usize, k: usize| {
                let at = 2 * (row * 3 + k);
                bf16_to_f32(u16::from_le_bytes([packed.codes[at], packed.codes[at + 1]]))
            };
            for row in 0..n {
                for i in 0..k {
                    assert_eq!(value(row, i), data[i * n + row]);
                }
            }
        }
    }

    #[test]
    fn two_slots_interleave_by_eights_under_one_scale() {
        let (k, f) = (2, 16);
        let (gate, up) = (vec![1.0; k * f], vec![-448.0; k * f]);
        let parts = [
            Tensor::from_f32(&gate, &[k, f]).expect("fits"),
            Tensor::from_f32(&up, &[k, f]).expect("fits"),
        ];
        let packed = pack(Format::Fp8Static, &parts, Order::ByEights);
        assert_eq!((packed.n, packed.scale), (32, 1.0));
        for row in 0..32 {
            let expected = if row / 8 % 2 == 0 { 0x38 } else { 0xfe };
            assert_eq!(packed.codes[row * k], expected, "row {row}");
        }
        let packed = pack(Format::W8a16Static, &parts, Order::Behind);
        assert_eq!(
            (packed.scales[0] * 127.0, packed.scales[16] * 127.0),
            (1.0, 448.0)
        );
        assert_eq!(
            (packed.codes[0] as i8, packed.codes[PIECE_BYTES] as i8),
            (127, -127)
        );
    }

    #[test]
    fn what_does_not_lie_side_by_side_is_refused() {
        let data = ramp(48);
        let tensor = |dims: &[usize]| {
            let n = dims.iter().product();
            Tensor::from_f32(&data[..n], dims).expect("fits")
        };
        let code = |parts: &[Tensor<'_>], order| {
            let made = Packed::new(&Host::detached(), Format::Bf16, parts, order);
            made.expect_err("refused").code
        };
        let wide = tensor(&[2, 4]);
        for parts in [&[][..], &[tensor(&[4])], &[wide, tensor(&[3, 4])]] {
            assert_eq!(code(parts, Order::Behind), "dims_inconsistent");
        }
        assert_eq!(
            code(&[wide, wide, wide], Order::ByEights),
            "dims_inconsistent"
        );
        assert_eq!(code(&[wide, wide], Order::ByEights), "dims_inconsistent");
    }
}
