//! Packed rows of a checkpoint in the kernels' order: codes and scales are moved, none is changed.

use crate::kernels::blocks::Kind;

/// Writes one row of `k` inputs into a panel of `width` lines, as the lane of a line.
///
/// # Panics
/// When the row or the panel is too short.
pub fn row(
    kind: Kind,
    k: usize,
    row: &[u8],
    panel: &mut [u8],
    width: usize,
    line: usize,
    lane: usize,
) {
    for step in 0..k / kind.step() {
        let sheet = &mut panel[step * width * kind.unit()..][..width * kind.unit()];
        let mut place = Place {
            kind,
            sheet,
            width,
            line,
            lane,
        };
        match kind {
            Kind::Nvfp4 => {
                let (codes, scales) = row.split_at(k / 2);
                let codes = &codes[step * 8..][..8];
                for i in 0..16 {
                    place.nibble(0, i, codes[i / 2] >> (4 * (i % 2)) & 15);
                }
                place.scale(0, 0, &scales[step..=step]);
            }
            Kind::Q8_0 => {
                let block = &row[step * 34..][..34];
                for (i, code) in block[2..].iter().enumerate() {
                    place.byte(i, code.wrapping_add(128));
                }
                place.scale(0, 0, &block[..2]);
            }
            Kind::Q4_0 | Kind::Q4_1 => {
                let scales = if kind == Kind::Q4_0 { 2 } else { 4 };
                let block = &row[step * (scales + 16)..][..scales + 16];
                for (i, code) in block[scales..].iter().enumerate() {
                    place.nibble(0, i, code & 15);
                    place.nibble(0, i + 16, code >> 4);
                }
                for (part, scale) in block[..scales].chunks(2).enumerate() {
                    place.scale(0, part, scale);
                }
            }
            Kind::Q4K => {
                let block = &row[step * 144..][..144];
                place.head(0, &block[..2]);
                place.head(1, &block[2..4]);
                let (packed, codes) = block[4..].split_at(12);
                for b in 0..8 {
                    let (scale, least) = six_bits(packed, b);
                    place.scale(b, 0, &[scale]);
                    place.scale(b, 1, &[least]);
                    for (i, code) in codes[b / 2 * 32..][..32].iter().enumerate() {
                        place.nibble(b, i, code >> (4 * (b % 2)) & 15);
                    }
                }
            }
            Kind::Q6K => {
                let block = &row[step * 210..][..210];
                let (low, rest) = block.split_at(128);
                let (high, rest) = rest.split_at(64);
                let (scales, head) = rest.split_at(16);
                place.head(0, head);
                for (b, scale) in scales.iter().enumerate() {
                    place.scale(b, 0, &[*scale]);
                    for i in 0..16 {
                        // Halves of 128; in each, quarters of 32 share bytes.
                        let at = 16 * b + i;
                        let (half, quarter, l) = (at / 128, at % 128 / 32, at % 32);
                        let code = low[half * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
                        place.nibble(b, i, code);
                        place.pair(b, i, high[half * 32 + l] >> (2 * quarter) & 3);
                    }
                }
            }
        }
    }
}

/// Pair `j` of eight six-bit scales and minima in twelve bytes.
fn six_bits(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        return (packed[j] & 63, packed[j + 4] & 63);
    }
    (
        (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4,
        (packed[j + 4] >> 4) | (packed[j] >> 6) << 4,
    )
}

/// A lane of a line in one step of a panel.
struct Place<'s> {
    kind: Kind,
    sheet: &'s mut [u8],
    width: usize,
    line: usize,
    lane: usize,
}

impl Place<'_> {
    fn block(&self, block: usize) -> usize {
        let each = self.kind.codes() + self.kind.scales();
        self.width * (self.kind.head() + block * each)
    }

    fn codes(&self, block: usize) -> usize {
        self.block(block) + self.line * self.kind.codes()
    }

    /// A code of 8 bits of the step's only block.
    fn byte(&mut self, i: usize, code: u8) {
        let at = self.codes(0) + i / 4 * 64 + self.lane * 4 + i % 4;
        self.sheet[at] = code;
    }

    /// The low 4 bits of a code.
    fn nibble(&mut self, block: usize, i: usize, code: u8) {
        let at = self.codes(block) + i / 8 * 64 + self.lane * 4 + i % 4;
        self.sheet[at] |= code << (i / 4 % 2 * 4);
    }

    /// The high 2 bits of a code of 6.
    fn pair(&mut self, block: usize, i: usize, bits: u8) {
        let at = self.codes(block) + 128 + self.lane * 4 + i % 4;
        self.sheet[at] |= bits << (i / 4 * 2);
    }

    /// A scale (part 0) or a minimum (part 1).
    fn scale(&mut self, block: usize, part: usize, bytes: &[u8]) {
        let first = self.block(block) + self.width * self.kind.codes();
        let at = first + self.line * self.kind.scales() + (part * 16 + self.lane) * bytes.len();
        self.sheet[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// A scale (part 0) or a minimum (part 1) of the whole step.
    fn head(&mut self, part: usize, bytes: &[u8]) {
        let at = self.line * self.kind.head() + (part * 16 + self.lane) * bytes.len();
        self.sheet[at..at + bytes.len()].copy_from_slice(bytes);
    }
}
