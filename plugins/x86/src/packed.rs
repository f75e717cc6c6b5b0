//! int8 weights packed for one isa: blocks of 16 output channels, groups of 4 inputs, 64 bytes a line.
//!
//! One scale per output channel, `amax / 127`. A product streams the lines of a block once and keeps 16 outputs a
//! row in registers, so there is no horizontal sum. Inputs are padded to a multiple of 4 and outputs to 16 with
//! zero weights.

use structures_plugin_api::formats::{int8_scale, quantise_int8};
use structures_plugin_api::sdk::{Failure, Tensor};

use crate::isa::Isa;

/// Outputs of one block.
pub const BLOCK: usize = 16;
/// Inputs of one line.
pub const GROUP: usize = 4;

/// 16 outputs x 4 inputs.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct Line(pub [u8; 64]);

/// A packed matrix of `n` outputs and `k` inputs.
pub struct Packed {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Lines of one block.
    pub groups: usize,
    /// One scale an output, padded with 0.
    pub scales: Vec<f32>,
    lines: Vec<Line>,
}

impl Packed {
    /// Quantises and packs a weight with slot dims `[k, n]`, any strides.
    pub fn pack(isa: Isa, weight: &Tensor<'_>) -> Result<Self, Failure> {
        let (k, n) = match weight.dims() {
            [k, n] if *k > 0 && *n > 0 => (*k as usize, *n as usize),
            dims => {
                return Err(Failure::refused(
                    "dims_inconsistent",
                    format!("a weight needs dims [K, N], found {dims:?}"),
                ))
            }
        };
        let blocks = n.div_ceil(BLOCK);
        let groups = k.div_ceil(GROUP);
        let zero = Line([zero_byte(isa); 64]);
        let mut packed = Packed {
            n,
            k,
            groups,
            scales: vec![0.0; blocks * BLOCK],
            lines: vec![zero; blocks * groups],
        };
        let mut column = vec![0f32; k];
        for out in 0..n {
            weight.select(1, out)?.read_f32(&mut column)?;
            let amax = column.iter().fold(0f32, |m, v| m.max(v.abs()));
            if !amax.is_finite() {
                return Err(Failure::refused(
                    "non_finite",
                    format!("output channel {out} has a weight that is not finite"),
                ));
            }
            let scale = int8_scale(amax);
            packed.scales[out] = scale;
            let (block, lane) = (out / BLOCK, out % BLOCK);
            let lines = &mut packed.lines[block * groups..(block + 1) * groups];
            for (i, value) in column.iter().enumerate() {
                let code = quantise_int8(*value, scale);
                lines[i / GROUP].0[position(isa, lane, i % GROUP)] = byte(isa, code);
            }
        }
        Ok(packed)
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.scales.len() / BLOCK
    }

    /// Lines of a block.
    pub fn block(&self, block: usize) -> &[Line] {
        &self.lines[block * self.groups..(block + 1) * self.groups]
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        (self.lines.len() * size_of::<Line>() + self.scales.len() * size_of::<f32>()) as u64
    }
}

/// VNNI multiplies unsigned by signed bytes: weights are the unsigned side, shifted by 128.
fn byte(isa: Isa, code: i8) -> u8 {
    match isa {
        Isa::Avx512Vnni => (i16::from(code) + 128) as u8,
        Isa::Avx2 => code as u8,
    }
}

fn zero_byte(isa: Isa) -> u8 {
    byte(isa, 0)
}

/// VNNI sums four neighbouring bytes into a lane; AVX2 widens eight outputs of one input.
fn position(isa: Isa, lane: usize, input: usize) -> usize {
    match isa {
        Isa::Avx512Vnni => lane * GROUP + input,
        Isa::Avx2 => input * BLOCK + lane,
    }
}
