//! Weights as the host gave them, seen as one list of output channels in the order in which they are packed.

use structures_plugin_api::sdk::{Failure, Host, Tensor};

use crate::isa::Isa;
use crate::kernels::LANES;

/// Channels that one piece of a parallel pass does.
const PIECE: usize = 16;

/// Channels of one product. A place without a channel is padding: zeros.
pub struct Source<'a> {
    parts: Vec<Tensor<'a>>,
    /// Part and channel of each place.
    order: Vec<Option<(usize, usize)>>,
    k: usize,
}

impl<'a> Source<'a> {
    /// Weights of dims `[K, N_i]` side by side.
    pub fn concatenated(parts: &[Tensor<'a>]) -> Result<Self, Failure> {
        let (k, sizes) = sizes(parts)?;
        let each = sizes.iter().enumerate();
        let order = each.flat_map(|(part, n)| (0..*n).map(move |i| Some((part, i))));
        Ok(Source {
            order: order.collect(),
            parts: parts.to_vec(),
            k,
        })
    }

    /// Two weights of the same dims line by line in turn: 16 channels of one, then the same 16 of the other.
    pub fn interleaved(parts: [Tensor<'a>; 2]) -> Result<Self, Failure> {
        let (k, sizes) = sizes(&parts)?;
        if sizes[0] != sizes[1] {
            let text = format!("{} and {} channels in turn", sizes[0], sizes[1]);
            return Err(Failure::refused("dims_inconsistent", text));
        }
        let n = sizes[0];
        let line = |line: usize| {
            let (part, first) = (line % 2, line / 2 * LANES);
            (first..first + LANES).map(move |i| (i < n).then_some((part, i)))
        };
        Ok(Source {
            order: (0..2 * n.div_ceil(LANES)).flat_map(line).collect(),
            parts: parts.to_vec(),
            k,
        })
    }

    /// Places.
    pub fn n(&self) -> usize {
        self.order.len()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Reads the channel of a place; `false` where there is none.
    pub fn read(&self, place: usize, out: &mut [f32]) -> Result<bool, Failure> {
        let Some(Some((part, channel))) = self.order.get(place) else {
            return Ok(false);
        };
        self.parts[*part].select(1, *channel)?.read_f32(out)?;
        Ok(true)
    }

    /// Largest magnitude of all, every one of them finite.
    pub fn amax(&self, host: &Host, isa: Isa) -> Result<f32, Failure> {
        let mut largest = vec![0.0_f32; self.n().div_ceil(PIECE)];
        host.try_parallel_chunks(&mut largest, 1, |piece, largest| {
            let mut values = vec![0.0; self.k];
            for place in piece * PIECE..(piece + 1) * PIECE {
                if self.read(place, &mut values)? {
                    largest[0] = largest[0].max(finite(isa, place, &values)?);
                }
            }
            Ok(())
        })?;
        Ok(largest.into_iter().fold(0.0, f32::max))
    }
}

/// Largest magnitude of a channel that has to be finite.
pub fn finite(isa: Isa, place: usize, values: &[f32]) -> Result<f32, Failure> {
    let amax = crate::activations::largest(isa, values);
    if amax.is_finite() {
        return Ok(amax);
    }
    let text = format!("output channel {place} has a weight that is not finite");
    Err(Failure::refused("non_finite", text))
}

/// The common K and each N.
fn sizes(parts: &[Tensor<'_>]) -> Result<(usize, Vec<usize>), Failure> {
    let mut all: Option<usize> = None;
    let mut sizes = Vec::new();
    for part in parts {
        match *part.dims() {
            [k, n] if k > 0 && n > 0 && all.is_none_or(|all| all == k as usize) => {
                all = Some(k as usize);
                sizes.push(n as usize);
            }
            _ => {
                let found: Vec<&[i64]> = parts.iter().map(|part| part.dims()).collect();
                let text = format!("weights of dims {found:?}, expected [K, N] with one K");
                return Err(Failure::refused("dims_inconsistent", text));
            }
        }
    }
    match all {
        Some(k) => Ok((k, sizes)),
        None => Err(Failure::refused("weight_missing", "no weight at all")),
    }
}
