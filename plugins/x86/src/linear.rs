//! A bound product: packed weights, how its rows are prepared, and who computes which tile.
//!
//! Tiles are shared out by ranges of lines, so that a thread streams its own part of the weights, and by ranges of rows
//! too where there are many rows and few lines. What becomes of a tile is the caller's: it is finished where it was
//! computed, before it leaves the first cache.

use std::ops::Range;

use structures_plugin_api::sdk::{BindRequest, Failure, Host};

use crate::activations::{Layout, Want};
use crate::elementwise::add;
use crate::format::Format;
use crate::isa::Isa;
use crate::kernels::{Cover, Tile, LANES, PANEL};
use crate::packed::Packed;
use crate::pool::Line;
use crate::source::Source;
use crate::Shared;

/// Bytes below which a region stays on its caller: handing less (8 us of one core's bandwidth) to a second thread costs
/// as much as it saves, or more (`cargo xtask roofline --threads`). A row counts as a quarter of what it reads, since weights come from a cache after the first.
const SERIAL: u64 = 256 * 1024;
/// The same for a matrix of few panels, which two threads cannot share evenly.
const NARROW: u64 = 4 * SERIAL;
/// Tasks a thread gets where there are many rows: enough to even out, few enough not to matter.
const TASKS: usize = 4;
/// Bytes that a task of few rows reads at least.
const LEAST: usize = 32 * 1024;
/// Tiles of rows up to which time goes by what is read.
const FEW: usize = 4;
/// Lines that stay together: gate and up of a feed-forward are neighbours.
const TOGETHER: usize = 2;

/// A product `x W`.
pub struct Linear {
    packed: Packed,
    layout: Layout,
    tile_rows: usize,
}

impl Linear {
    /// Packs channels in a format; `point` is where the activation's statistic was taken.
    pub fn bind(
        shared: &Shared,
        format: Format,
        source: &Source<'_>,
        request: &BindRequest<'_>,
        point: &str,
    ) -> Result<Self, Failure> {
        let amax = || request.scalar_statistic(point, "amax");
        let want = match format {
            Format::F32 => Want::Given,
            Format::Bf16 | Format::Bf16Pack => Want::Bf16,
            Format::W8a16 | Format::W4a16 => Want::Int16Rows,
            Format::W8a8Dynamic => Want::Int8Rows,
            Format::W8a8Static => Want::int8(amax()?),
            Format::Fp8 => Want::e4m3(amax()?),
        };
        let packed = Packed::new(shared, format, source, want)?;
        let want = packed.want(want);
        Ok(Linear {
            layout: want.layout(shared.isa, packed.k()),
            tile_rows: packed.tile_rows(shared.isa, want),
            packed,
        })
    }

    /// Places of output channels.
    pub fn n(&self) -> usize {
        self.packed.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.packed.k()
    }

    /// Bytes of packed weights.
    pub fn bytes(&self) -> u64 {
        self.packed.bytes()
    }

    /// Lines of buffer that a call of so many rows needs.
    pub fn buffer(&self, rows: usize) -> usize {
        self.layout.lines(rows)
    }

    /// Computes all channels of all rows; `finish` gets each tile once, on whatever thread computed it.
    pub fn run<F>(&self, shared: &Shared, x: &[f32], rows: usize, buffer: &mut [Line], finish: F)
    where
        F: Fn(Cover, &mut Tile) + Sync,
    {
        if rows == 0 {
            return;
        }
        let (host, isa) = (&shared.host, shared.isa);
        let x = self.layout.prepare(host, x, rows, buffer);
        let share = Share::of(
            host,
            self.packed.lines(),
            rows,
            self.tile_rows,
            self.bytes(),
        );
        host.parallel_for(share.tasks(), |task| {
            let mut tile = Tile::ZERO;
            share.covers(task, |cover| {
                self.packed.tile(isa, &x, cover, &mut tile);
                finish(cover, &mut tile);
            });
        });
    }
}

/// Who does what: a grid of ranges of lines and ranges of rows.
#[derive(Clone, Copy, Debug)]
struct Share {
    lines: usize,
    rows: usize,
    /// Lines of a task.
    lines_each: usize,
    /// Rows of a task.
    rows_each: usize,
    tile_rows: usize,
    cut: Cut,
}

/// How lines are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// Into ranges of one size.
    Even,
    /// Into ranges that become smaller, down to `lines_each`: each one is that part of what is left. Whoever reads faster
    /// then takes more, and nobody waits long for the last range.
    Falling(usize),
}

impl Share {
    fn of(host: &Host, lines: usize, rows: usize, tile_rows: usize, bytes: u64) -> Self {
        let threads = host.num_threads();
        let work = bytes * rows.div_ceil(4) as u64;
        let whole = Share {
            lines,
            rows,
            lines_each: lines,
            rows_each: rows,
            tile_rows,
            cut: Cut::Even,
        };
        // A panel of which two threads read a part each is no stream to either: few panels stay whole, or with one thread.
        let narrow = lines < 2 * threads * PANEL;
        let least = if narrow { NARROW } else { SERIAL };
        if threads <= 1 || work < least {
            return whole;
        }
        let tiles = rows.div_ceil(tile_rows);
        if tiles <= FEW {
            let line = (bytes as usize / lines).max(1);
            return Share {
                lines_each: match narrow {
                    true => PANEL,
                    false => (LEAST / line).next_multiple_of(TOGETHER).max(TOGETHER),
                },
                cut: Cut::Falling(2 * threads),
                ..whole
            };
        }
        let wanted = threads * TASKS;
        // Whole panels where there are enough of them and rows to use them, else pairs of lines.
        let least = match lines >= wanted * PANEL || tiles >= wanted {
            true => PANEL,
            false => TOGETHER,
        };
        let lines_each = lines.div_ceil(wanted).next_multiple_of(least);
        let columns = lines.div_ceil(lines_each);
        let parts = wanted.div_ceil(columns).min(tiles.div_ceil(4));
        Share {
            lines_each,
            rows_each: tiles.div_ceil(parts) * tile_rows,
            ..whole
        }
    }

    fn columns(&self) -> usize {
        match self.cut {
            Cut::Even => self.lines.div_ceil(self.lines_each),
            Cut::Falling(_) => self.ranges().count(),
        }
    }

    /// Ranges of lines, one after another.
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut first = 0;
        std::iter::from_fn(move || {
            let left = self.lines - first;
            let size = match self.cut {
                Cut::Even => self.lines_each,
                Cut::Falling(part) => match (left / part).max(self.lines_each) {
                    // Whole panels as long as that is no large part.
                    size if size >= PANEL => size.next_multiple_of(PANEL),
                    size => size.next_multiple_of(TOGETHER),
                },
            };
            let range = first..first + size.min(left);
            first = range.end;
            (!range.is_empty()).then_some(range)
        })
    }

    /// The lines of a column.
    fn range(&self, column: usize) -> Range<usize> {
        match self.cut {
            Cut::Even => {
                let first = column * self.lines_each;
                first..(first + self.lines_each).min(self.lines)
            }
            Cut::Falling(_) => self.ranges().nth(column).unwrap_or(0..0),
        }
    }

    fn tasks(&self) -> usize {
        match self.cut {
            Cut::Even => self.columns() * self.rows.div_ceil(self.rows_each),
            Cut::Falling(_) => self.columns(),
        }
    }

    /// The tiles of a task: panel by panel, so that a panel is read from memory once.
    fn covers(&self, task: usize, mut each: impl FnMut(Cover)) {
        let (column, row) = match self.cut {
            Cut::Even => (
                task % self.columns(),
                task / self.columns() * self.rows_each,
            ),
            Cut::Falling(_) => (task, 0),
        };
        let Range { start, end } = self.range(column);
        let rows = self.rows_each.min(self.rows - row);
        let tiles = rows.div_ceil(self.tile_rows);
        let mut line = start;
        while line < end {
            let lines = (PANEL - line % PANEL).min(end - line);
            for tile in 0..tiles {
                // Sizes differ by one at most.
                let (from, to) = (rows * tile / tiles, rows * (tile + 1) / tiles);
                each(Cover {
                    row: row + from,
                    rows: to - from,
                    line,
                    lines,
                });
            }
            line += lines;
        }
    }
}

/// A call's output, written by the threads that compute its tiles.
#[derive(Clone, Copy)]
pub struct Out<'o> {
    base: *mut f32,
    rows: usize,
    width: usize,
    _data: std::marker::PhantomData<&'o mut [f32]>,
}

// SAFETY: `row` is called for places that belong to one thread, says its caller.
unsafe impl Send for Out<'_> {}
// SAFETY: as above.
unsafe impl Sync for Out<'_> {}

impl<'o> Out<'o> {
    /// Rows of `width` values.
    pub fn new(data: &'o mut [f32], width: usize) -> Self {
        Out {
            base: data.as_mut_ptr(),
            rows: data.len() / width.max(1),
            width,
            _data: std::marker::PhantomData,
        }
    }

    /// Values of a row from `first` on, at most `len` and no more than the row has.
    ///
    /// # Safety
    /// No two threads ask for the same place during one run.
    #[allow(clippy::mut_from_ref)] // disjointness is the caller's promise
    pub unsafe fn row(&self, row: usize, first: usize, len: usize) -> &'o mut [f32] {
        assert!(row < self.rows && first <= self.width);
        let len = len.min(self.width - first);
        // SAFETY: inside the borrowed data; the caller makes it the only borrow of that part.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.width + first), len) }
    }

    /// What finishes a tile that only gets a bias, an empty one being none.
    pub fn writer<'f>(self, isa: Isa, bias: &'f [f32]) -> impl Fn(Cover, &mut Tile) + Sync + 'f
    where
        'o: 'f,
    {
        move |cover, tile| {
            let first = cover.line * LANES;
            for (r, values) in tile.0.iter_mut().enumerate().take(cover.rows) {
                // SAFETY: every place of the output is in one cover.
                let out = unsafe { self.row(cover.row + r, first, cover.lines * LANES) };
                let values = &mut values[..out.len()];
                add(isa, values, bias.get(first..).unwrap_or(&[]));
                out.copy_from_slice(values);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_fall_to_the_smallest_and_their_ends_are_near() {
        for (lines, least) in [
            (36, 2),
            (54, 2),
            (60, 2),
            (192, 2),
            (3072, 2),
            (9500, 2),
            (36, 6),
        ] {
            let share = Share {
                lines,
                rows: 1,
                lines_each: least,
                rows_each: 1,
                tile_rows: 6,
                cut: Cut::Falling(4),
            };
            let pairs = |r: Range<usize>| r.start.is_multiple_of(TOGETHER);
            assert!(share.ranges().all(pairs), "{lines}: what stays together");
            let sizes: Vec<usize> = share.ranges().map(|r| r.len()).collect();
            // The host's pool hands out single tasks up to 16 for each of two threads.
            assert!(sizes.len() < 32, "{lines}: {sizes:?}");
            assert!(sizes.windows(2).all(|s| s[0] >= s[1]), "{sizes:?}");
            assert!(
                sizes[0] <= lines.div_ceil(2)
                    && sizes.last() <= Some(&least.next_multiple_of(PANEL))
            );
        }
    }

    #[test]
    fn every_place_is_covered_once_whatever_the_sizes() {
        for (lines, rows, tile_rows) in
            [(1, 1, 6), (9, 7, 3), (36, 8, 6), (96, 128, 6), (12, 257, 4)]
        {
            for (lines_each, rows_each) in
                [(lines, rows), (2, rows), (4, 2 * tile_rows), (6, tile_rows)]
            {
                for cut in [Cut::Even, Cut::Falling(4)] {
                    let rows_each = if cut == Cut::Even { rows_each } else { rows };
                    let share = Share {
                        lines,
                        rows,
                        lines_each,
                        rows_each,
                        tile_rows,
                        cut,
                    };
                    let mut seen = vec![0; lines * rows];
                    for task in 0..share.tasks() {
                        share.covers(task, |c| {
                            assert!(c.rows >= 1 && c.rows <= tile_rows, "{share:?} {c:?}");
                            assert!(c.lines >= 1 && c.line % PANEL + c.lines <= PANEL);
                            for row in c.row..c.row + c.rows {
                                for line in c.line..c.line + c.lines {
                                    seen[row * lines + line] += 1;
                                }
                            }
                        });
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{share:?}");
                }
            }
        }
    }
}
