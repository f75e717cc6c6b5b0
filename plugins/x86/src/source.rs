//! Weights as the host gave them, seen as one list of output channels in the order in which they are packed.

use structures_plugin_api::formats::BlockFormat;
use structures_plugin_api::sdk::{Failure, Host, PackedRows, Weight};

use crate::isa::Isa;
use crate::kernels::LANES;

/// Channels that one piece of a parallel pass does.
const PIECE: usize = 16;

/// Channels of one product. A place without a channel is padding: zeros.
pub struct Source<'a> {
    parts: Vec<Weight<'a>>,
    /// Part and channel of each place.
    order: Vec<Option<(usize, usize)>>,
    k: usize,
}

impl<'a> Source<'a> {
    /// Weights of dims `[K, N_i]` side by side.
    pub fn concatenated<W: Copy + Into<Weight<'a>>>(parts: &[W]) -> Result<Self, Failure> {
        let parts: Vec<Weight<'a>> = parts.iter().map(|part| (*part).into()).collect();
        let (k, sizes) = sizes(&parts)?;
        let each = sizes.iter().enumerate();
        let order = each.flat_map(|(part, n)| (0..*n).map(move |i| Some((part, i))));
        Ok(Source {
            order: order.collect(),
            parts,
            k,
        })
    }

    /// Two weights of the same dims line by line in turn: 16 channels of one, then the same 16 of the other.
    pub fn interleaved(parts: [Weight<'a>; 2]) -> Result<Self, Failure> {
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
        self.parts[*part].read_channel(*channel, out)?;
        Ok(true)
    }

    /// The format in which all of them are stored packed.
    pub fn stored(&self) -> Option<BlockFormat> {
        let mut formats = self.parts.iter().map(|part| match part {
            Weight::Packed(rows) => Some(rows.format()),
            Weight::Plain(_) => None,
        });
        let first = formats.next()??;
        formats.all(|other| other == Some(first)).then_some(first)
    }

    /// The packed row of a place, where it has one.
    pub fn row(&self, place: usize) -> Option<&'a [u8]> {
        let (part, channel) = (*self.order.get(place)?)?;
        match &self.parts[part] {
            Weight::Packed(rows) => row_of(rows, channel),
            Weight::Plain(_) => None,
        }
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

fn row_of<'a>(rows: &PackedRows<'a>, channel: usize) -> Option<&'a [u8]> {
    rows.data()
        .get(channel * rows.width()..(channel + 1) * rows.width())
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
fn sizes(parts: &[Weight<'_>]) -> Result<(usize, Vec<usize>), Failure> {
    let dims: Vec<[usize; 2]> = parts.iter().map(Weight::dims).collect::<Result<_, _>>()?;
    let Some([k, _]) = dims.first().copied() else {
        return Err(Failure::refused("weight_missing", "no weight at all"));
    };
    if dims.iter().any(|[own, n]| *own != k || k == 0 || *n == 0) {
        let text = format!("weights of dims {dims:?}, expected [K, N] with one K");
        return Err(Failure::refused("dims_inconsistent", text));
    }
    Ok((k, dims.into_iter().map(|[_, n]| n).collect()))
}
