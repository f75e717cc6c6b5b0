//! Weights packed for the kernels: which family, where the lines lie, the scales.
//!
//! The layout is that of [`crate::kernels`]; here is who writes it. A matrix is packed once, panel by panel on the
//! host's threads, into the arena's huge pages.

use std::sync::atomic::{AtomicU32, Ordering};

use structures_plugin_api::formats::{
    e4m3_to_f32, f32_to_bf16, f32_to_e2m1, f32_to_e4m3_saturating, fp8_scale, int8_scale,
    nvfp4_block_scale, nvfp4_global_scale,
};
use structures_plugin_api::sdk::Failure;

use crate::activations::{largest, to_words, Prepared, Want};
use crate::adopt;
use crate::arena::Block;
use crate::format::Format;
use crate::isa::Isa;
use crate::kept::Facts;
use crate::kernels::blocks::{self, Kind};
use crate::kernels::{bf16, f32 as plain, fp8, int8, Cover, Panels, Tile, LANES, PANEL, WIDTH};
use crate::source::{finite, Source};
use crate::Shared;

/// A packed matrix.
pub struct Packed {
    n: usize,
    k: usize,
    panels: Panels,
    block: Block,
    body: Body,
}

/// What the bytes are.
enum Body {
    F32,
    Bf16,
    /// With the product of both tensors' scales.
    Fp8 {
        scale: f32,
    },
    /// With one scale a channel.
    Int8 {
        scales: Vec<f32>,
    },
    Blocks {
        kind: Kind,
        scale: f32,
    },
}

/// The family of rows that are stored packed, and what their sums are multiplied with; `None` where they are not, or not
/// alike: then they are read as numbers.
fn stored(source: &Source<'_>) -> Option<(Kind, f32)> {
    let kind = Kind::of(source.stored()?)?;
    if kind != Kind::Nvfp4 {
        return Some((kind, 1.0));
    }
    // A global scale stands at the end of every row; one matrix has one here.
    let tail = |place: usize| source.row(place)?.last_chunk::<4>().copied();
    let mut tails = (0..source.n()).filter_map(tail);
    let first = tails.next()?;
    let one = tails.all(|other| other == first);
    one.then(|| (kind, 128.0 / f32::from_le_bytes(first)))
}

/// One panel's bytes and how to find a place in them.
struct Sheet<'b> {
    bytes: &'b mut [u8],
    width: usize,
    unit: usize,
}

impl Sheet<'_> {
    /// The unit of a line in a step of a family whose lines follow one another.
    fn unit(&mut self, step: usize, line: usize) -> &mut [u8] {
        let at = (step * self.width + line) * self.unit;
        &mut self.bytes[at..at + self.unit]
    }
}

impl Packed {
    /// Packs channels in a format, or finds them packed. `want` is how the product's activations will come.
    pub fn new(
        shared: &Shared,
        format: Format,
        source: &Source<'_>,
        want: Want,
    ) -> Result<Self, Failure> {
        let pack = || Self::pack(shared, format, source, want);
        // Plain f32 is no smaller packed: keeping it would be a copy of the checkpoint.
        let worth = format != Format::F32 || source.stored().is_some();
        match &shared.keeper {
            Some(keeper) if worth => keeper.packed(shared, [source.n(), source.k()], pack),
            Some(keeper) => keeper.not_kept().map_or_else(pack, Err),
            None => pack(),
        }
    }

    fn pack(
        shared: &Shared,
        format: Format,
        source: &Source<'_>,
        want: Want,
    ) -> Result<Self, Failure> {
        let (host, isa) = (&shared.host, shared.isa);
        let (n, k) = (source.n(), source.k());
        if k > int8::MOST_INPUTS {
            let text = format!("{k} inputs, served are up to {}", int8::MOST_INPUTS);
            return Err(Failure::refused("envelope", text));
        }
        let line_units = |step: usize| Panels::new(n, k.div_ceil(step), 64);
        let make = |panels: Panels, body: Body| -> Result<Self, Failure> {
            Ok(Packed {
                n,
                k,
                block: shared.arena.block(panels.bytes())?,
                panels,
                body,
            })
        };
        match format {
            Format::F32 if stored(source).is_some() => Self::adopted(shared, source),
            Format::F32 => {
                let mut packed = make(line_units(1), Body::F32)?;
                packed.fill(shared, source, |sheet, line, lane, values| {
                    for (i, value) in values.iter().enumerate() {
                        let at = 4 * lane;
                        sheet.unit(i, line)[at..at + 4].copy_from_slice(&value.to_ne_bytes());
                    }
                    Ok(())
                })?;
                Ok(packed)
            }
            Format::Bf16 | Format::Bf16Pack => {
                let mut packed = make(line_units(bf16::STEP), Body::Bf16)?;
                packed.fill(shared, source, |sheet, line, lane, values| {
                    for (i, value) in values.iter().enumerate() {
                        let at = 2 * bf16::position(lane, i % bf16::STEP);
                        let bits = f32_to_bf16(*value).to_ne_bytes();
                        sheet.unit(i / bf16::STEP, line)[at..at + 2].copy_from_slice(&bits);
                    }
                    Ok(())
                })?;
                Ok(packed)
            }
            Format::W8a16 | Format::W8a8Dynamic | Format::W8a8Static => {
                let panels = line_units(int8::STEP);
                let bits: Vec<AtomicU32> = (0..panels.lines * LANES).map(|_| 0.into()).collect();
                let mut packed = make(panels, Body::Int8 { scales: Vec::new() })?;
                packed.fill_at(shared, source, |sheet, place, line, lane, values| {
                    let scale = int8_scale(finite(isa, place, values)?);
                    bits[place].store(scale.to_bits(), Ordering::Relaxed);
                    let mut codes = vec![0; values.len()];
                    to_words(isa, values, scale, 127.0, &mut codes);
                    for (i, code) in codes.iter().enumerate() {
                        let at = int8::position(lane, i % int8::STEP);
                        sheet.unit(i / int8::STEP, line)[at] = (code + int8::OFFSET) as u8;
                    }
                    Ok(())
                })?;
                let scales = bits.into_iter().map(|b| f32::from_bits(b.into_inner()));
                packed.body = Body::Int8 {
                    scales: scales.collect(),
                };
                Ok(packed)
            }
            Format::Fp8 => {
                let scale = fp8_scale(source.amax(host, isa)?);
                let given = match want {
                    Want::E4m3 { scale } => scale,
                    _ => 1.0,
                };
                let body = Body::Fp8 {
                    scale: scale * given,
                };
                let mut packed = make(line_units(fp8::STEP), body)?;
                packed.fill(shared, source, |sheet, line, lane, values| {
                    for (i, value) in values.iter().enumerate() {
                        let at = fp8::position(lane, i % fp8::STEP);
                        let code = f32_to_e4m3_saturating(value / scale);
                        sheet.unit(i / fp8::STEP, line)[at] = code;
                    }
                    Ok(())
                })?;
                Ok(packed)
            }
            Format::W4a16 => {
                let global = nvfp4_global_scale(source.amax(host, isa)?);
                let kind = Kind::Nvfp4;
                let panels = Panels::new(n, k.div_ceil(kind.step()), kind.unit());
                // Codes are twice their value, and scales 1/256 of theirs.
                let body = Body::Blocks {
                    kind,
                    scale: 128.0 / global,
                };
                let mut packed = make(panels, body)?;
                packed.fill(shared, source, |sheet, line, lane, values| {
                    for (b, block) in values.chunks(kind.inputs()).enumerate() {
                        let code = nvfp4_block_scale(largest(isa, block), global);
                        let step = e4m3_to_f32(code) / global;
                        let first = b * sheet.width * kind.unit();
                        let codes = first + line * kind.codes();
                        for (i, value) in block.iter().enumerate() {
                            let at = codes + i / 8 * 64 + lane * 4 + i % 4;
                            sheet.bytes[at] |= f32_to_e2m1(value / step) << (i / 4 % 2 * 4);
                        }
                        let scales = first + sheet.width * kind.codes() + line * kind.scales();
                        sheet.bytes[scales + lane] = code;
                    }
                    Ok(())
                })?;
                Ok(packed)
            }
        }
    }

    /// What is said of it where it is kept.
    pub fn facts(&self) -> Facts {
        let Panels { lines, steps, unit } = self.panels;
        let (body, scale, scales) = match &self.body {
            Body::F32 => (0, 0.0, 0),
            Body::Bf16 => (1, 0.0, 0),
            Body::Fp8 { scale } => (2, *scale, 0),
            Body::Int8 { scales } => (3, 0.0, scales.len()),
            Body::Blocks { kind, scale } => (16 + u32::from(kind.id()), *scale, 0),
        };
        Facts {
            sizes: [self.n, self.k, lines, steps, unit].map(|n| n as u32),
            body,
            scale: scale.to_bits(),
            scales: scales as u32,
        }
    }

    /// Zeros of which this is true; `None` where it cannot be.
    pub fn empty(shared: &Shared, facts: &Facts) -> Option<Self> {
        let [n, k, lines, steps, unit] = facts.sizes.map(|n| n as usize);
        let scale = f32::from_bits(facts.scale);
        let scales = facts.scales as usize;
        let (body, step, own_unit) = match facts.body {
            0 => (Body::F32, 1, 64),
            1 => (Body::Bf16, bf16::STEP, 64),
            2 => (Body::Fp8 { scale }, fp8::STEP, 64),
            3 => {
                let scales = vec![0.0; scales.min(lines * LANES)];
                (Body::Int8 { scales }, int8::STEP, 64)
            }
            id => {
                let kind = Kind::from_id(u8::try_from(id.checked_sub(16)?).ok()?)?;
                (Body::Blocks { kind, scale }, kind.step(), kind.unit())
            }
        };
        let panels = Panels::new(n, k.div_ceil(step), own_unit);
        let channels = if facts.body == 3 { lines * LANES } else { 0 };
        let fits = [panels.lines, panels.steps, panels.unit] == [lines, steps, unit];
        (fits && scales == channels).then_some(())?;
        Some(Packed {
            n,
            k,
            block: shared.arena.block(panels.bytes()).ok()?,
            panels,
            body,
        })
    }

    /// Scales of channels and bytes.
    pub fn parts(&self) -> (&[f32], &[u8]) {
        match &self.body {
            Body::Int8 { scales } => (scales, self.block.bytes()),
            _ => (&[], self.block.bytes()),
        }
    }

    /// The same, to be written.
    pub fn parts_mut(&mut self) -> (&mut [f32], &mut [u8]) {
        match &mut self.body {
            Body::Int8 { scales } => (scales, self.block.bytes_mut()),
            _ => (&mut [], self.block.bytes_mut()),
        }
    }

    /// Takes packed rows as they are: the same codes and scales in the kernels' order.
    fn adopted(shared: &Shared, source: &Source<'_>) -> Result<Self, Failure> {
        let (n, k) = (source.n(), source.k());
        let Some((kind, scale)) = stored(source) else {
            return Err(Failure::refused("packed_format", "rows of several formats"));
        };
        let panels = Panels::new(n, k / kind.step(), kind.unit());
        let mut packed = Packed {
            n,
            k,
            block: shared.arena.block(panels.bytes())?,
            panels,
            body: Body::Blocks { kind, scale },
        };
        let bytes = packed.block.bytes_mut();
        let panel_bytes = PANEL * panels.steps * panels.unit;
        shared
            .host
            .parallel_chunks(bytes, panel_bytes, |panel, bytes| {
                let width = (panels.lines - panel * PANEL).min(PANEL);
                for place in 0..width * LANES {
                    if let Some(row) = source.row(panel * WIDTH + place) {
                        adopt::row(kind, k, row, bytes, width, place / LANES, place % LANES);
                    }
                }
            });
        Ok(packed)
    }

    /// Writes every channel: line within the panel, lane within the line, values.
    fn fill(
        &mut self,
        shared: &Shared,
        source: &Source<'_>,
        write: impl Fn(&mut Sheet<'_>, usize, usize, &[f32]) -> Result<(), Failure> + Sync,
    ) -> Result<(), Failure> {
        self.fill_at(shared, source, |sheet, _, line, lane, values| {
            write(sheet, line, lane, values)
        })
    }

    fn fill_at(
        &mut self,
        shared: &Shared,
        source: &Source<'_>,
        write: impl Fn(&mut Sheet<'_>, usize, usize, usize, &[f32]) -> Result<(), Failure> + Sync,
    ) -> Result<(), Failure> {
        let Panels { lines, steps, unit } = self.panels;
        let bytes = self.block.bytes_mut();
        shared
            .host
            .try_parallel_chunks(bytes, PANEL * steps * unit, |panel, bytes| {
                let mut values = vec![0.0; source.k()];
                let width = (lines - panel * PANEL).min(PANEL);
                let mut sheet = Sheet { bytes, width, unit };
                for place in 0..width * LANES {
                    let whole = panel * WIDTH + place;
                    if source.read(whole, &mut values)? {
                        write(&mut sheet, whole, place / LANES, place % LANES, &values)?;
                    }
                }
                Ok(())
            })
    }

    /// Channels, padding between them included.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Lines of 16 channels.
    pub fn lines(&self) -> usize {
        self.panels.lines
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        let scales = match &self.body {
            Body::Int8 { scales } => 4 * scales.len(),
            _ => 4,
        };
        (self.panels.bytes() + scales) as u64
    }

    /// What the family wants to read under a request for activations.
    pub fn want(&self, want: Want) -> Want {
        match &self.body {
            Body::Blocks { kind, .. } => Want::Int16Blocks {
                factor: kind.factor(),
                // Rows of a checkpoint, which this form did not round: so little is lost that it is an f32 product.
                tails: want == Want::Given,
            },
            _ => want,
        }
    }

    /// Rows of a tile.
    pub fn tile_rows(&self, isa: Isa, want: Want) -> usize {
        match &self.body {
            Body::F32 => plain::tile_rows(isa),
            Body::Bf16 => bf16::tile_rows(isa),
            Body::Fp8 { .. } => fp8::tile_rows(isa),
            Body::Int8 { .. } => match want {
                Want::Int16Rows => int8::tile_rows(isa, 2),
                _ => int8::tile_rows(isa, 1),
            },
            Body::Blocks { .. } => blocks::tile_rows(isa),
        }
    }

    /// Computes a tile of prepared rows.
    ///
    /// # Panics
    /// When the rows were prepared for another family.
    pub fn tile(&self, isa: Isa, x: &Prepared<'_>, cover: Cover, tile: &mut Tile) {
        let (panels, bytes) = (self.panels, self.block.bytes());
        match (&self.body, x) {
            (Body::F32, Prepared::Given(x)) => {
                plain::tile(
                    isa,
                    &plain::Weights { panels, bytes },
                    x,
                    self.k,
                    cover,
                    tile,
                );
            }
            (Body::Bf16, Prepared::Halves(x)) => {
                bf16::tile(isa, &bf16::Weights { panels, bytes }, x, cover, tile);
            }
            (Body::Fp8 { scale }, Prepared::Halves(x)) => {
                let scale = *scale;
                let weights = fp8::Weights {
                    panels,
                    bytes,
                    scale,
                };
                fp8::tile(isa, &weights, x, cover, tile);
            }
            (Body::Int8 { scales }, Prepared::Integers(x)) => {
                let weights = int8::Weights {
                    panels,
                    bytes,
                    scales,
                };
                int8::tile(isa, &weights, x, cover, tile);
            }
            (Body::Blocks { kind, scale }, Prepared::Integers(x)) => {
                let (kind, scale) = (*kind, *scale);
                let weights = blocks::Weights {
                    kind,
                    panels,
                    bytes,
                    scale,
                };
                blocks::tile(isa, &weights, x, cover, tile);
            }
            _ => unreachable!("rows prepared for another family"),
        }
    }
}
