//! Products of a few rows with a few packed output channels, one file a family of number formats.
//!
//! # Layout of packed weights
//! 16 output channels are a *line*; up to four lines are a *panel*, which is stored whole, one step along the inputs
//! after the other, so that one panel, and the whole matrix, is a single stream. In a step every line has
//! [`Panels::unit`] bytes, and what they hold is the family's business: 4 inputs of a channel side by side in int8, 2
//! in bf16, 1 in f32, a block or a super-block with its scales in block formats. Sums stay in the 16 lanes of their
//! channels: there is no horizontal sum. The last panel has as many lines as are left; channels are padded to a line
//! and inputs to a step with weights that count for nothing.
//!
//! # A tile
//! A kernel call computes up to [`TILE_ROWS`] rows with up to 4 lines, over all inputs, into a [`Tile`]. Weights come
//! from memory at the first tile of a panel and from a cache at the others, so a few rows cost one reading.

pub mod bf16;
pub mod blocks;
pub mod f32;
pub mod fp8;
pub mod int8;
#[cfg(test)]
pub mod tests;

/// Channels of a line.
pub const LANES: usize = 16;
/// Lines of a panel.
pub const PANEL: usize = 4;
/// Channels of a panel.
pub const WIDTH: usize = LANES * PANEL;
/// Most rows of a tile.
pub const TILE_ROWS: usize = 6;

/// Steps that are summed up in f32 before the sum joins the others: a long row then loses less to rounding.
pub const RUN: usize = 512;

/// Results of a call: channels of up to four lines for each row.
#[repr(C, align(64))]
pub struct Tile(pub [[f32; WIDTH]; TILE_ROWS]);

impl Tile {
    /// Zeros.
    pub const ZERO: Tile = Tile([[0.0; WIDTH]; TILE_ROWS]);
}

/// What a tile covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cover {
    /// First row.
    pub row: usize,
    /// Rows, at most [`TILE_ROWS`].
    pub rows: usize,
    /// First line.
    pub line: usize,
    /// Lines, which lie in one panel.
    pub lines: usize,
}

/// How a packed matrix lies in its block.
#[derive(Clone, Copy, Debug)]
pub struct Panels {
    /// Lines in all.
    pub lines: usize,
    /// Steps along the inputs.
    pub steps: usize,
    /// Bytes of a line in a step.
    pub unit: usize,
}

/// A panel, from one of its lines on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte of the panel.
    pub offset: usize,
    /// Lines of the panel.
    pub width: usize,
    /// The line within the panel.
    pub index: usize,
}

impl Panels {
    /// For so many channels.
    pub fn new(channels: usize, steps: usize, unit: usize) -> Self {
        Panels {
            lines: channels.div_ceil(LANES),
            steps,
            unit,
        }
    }

    /// Bytes of the matrix.
    pub fn bytes(&self) -> usize {
        self.lines * self.steps * self.unit
    }

    /// Where a line lies.
    pub fn place(&self, line: usize) -> Place {
        let first = line / PANEL * PANEL;
        Place {
            offset: first * self.steps * self.unit,
            width: (self.lines - first).min(PANEL),
            index: line - first,
        }
    }
}

/// Calls `$kernel::<$tag, R, W>` for the sizes of a cover, `R` being one of those listed.
macro_rules! by_size {
    ($rows:expr, $lines:expr, $kernel:ident, $tag:tt, [$($r:literal)*], $args:tt) => {
        match ($rows, $lines) {
            $(
                ($r, 1) => by_size!(@ $kernel, $tag, $r, 1, $args),
                ($r, 2) => by_size!(@ $kernel, $tag, $r, 2, $args),
                ($r, 3) => by_size!(@ $kernel, $tag, $r, 3, $args),
                ($r, 4) => by_size!(@ $kernel, $tag, $r, 4, $args),
            )*
            (rows, lines) => unreachable!("a tile of {rows} rows and {lines} lines"),
        }
    };
    (@ $kernel:ident, $tag:tt, $r:tt, $w:tt, ($($arg:expr),*)) => {
        $kernel::<$tag, $r, $w>($($arg),*)
    };
}
pub(crate) use by_size;

/// Calls `$kernel::<$tag, R>`, `R` being one of those listed.
macro_rules! by_rows {
    ($rows:expr, $kernel:ident, $tag:tt, [$($r:literal)*], $args:tt) => {
        match $rows {
            $($r => by_rows!(@ $kernel, $tag, $r, $args),)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
    (@ $kernel:ident, $tag:tt, $r:tt, ($($arg:expr),*)) => {
        $kernel::<$tag, $r>($($arg),*)
    };
}
pub(crate) use by_rows;
