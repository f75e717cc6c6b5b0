//! One parallel region over blocks of outputs: who computes which block, and where the tiles go.

use structures_plugin_api::sdk::Host;

use crate::packed::BLOCK;
use crate::product::Tile;
use crate::rows::MAX_ROWS;

/// Packed bytes below which a region stays on its caller: handing 64 KiB (2 us of one core's bandwidth) to a second
/// thread costs more than it saves.
const SERIAL_BYTES: u64 = 64 * 1024;

/// Tasks a thread gets: enough to even out, few enough not to matter.
const TASKS_PER_THREAD: usize = 4;

/// Tiles of a call, `[blocks][rows][16]`; kept between calls.
pub struct Tiles {
    data: Vec<f32>,
    rows: usize,
}

impl Tiles {
    /// For up to `blocks` blocks.
    pub fn new(blocks: usize) -> Self {
        Tiles {
            data: vec![0.0; blocks * MAX_ROWS * BLOCK],
            rows: 0,
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        (self.data.len() * size_of::<f32>()) as u64
    }

    /// Runs `compute(block, tile)` for every block, in parallel when there is enough to read.
    pub fn fill<F>(&mut self, host: &Host, blocks: usize, rows: usize, bytes: u64, compute: F)
    where
        F: Fn(usize, &mut Tile) + Sync,
    {
        self.rows = rows;
        let piece = rows * BLOCK;
        let data = &mut self.data[..blocks * piece];
        let run = |first: usize, out: &mut [f32]| {
            for (i, out) in out.chunks_exact_mut(piece).enumerate() {
                let mut tile: Tile = [[0.0; BLOCK]; MAX_ROWS];
                compute(first + i, &mut tile);
                for (to, from) in out.chunks_exact_mut(BLOCK).zip(&tile) {
                    to.copy_from_slice(from);
                }
            }
        };
        let threads = host.num_threads();
        if threads <= 1 || bytes < SERIAL_BYTES {
            run(0, data);
            return;
        }
        let per_task = blocks.div_ceil(threads * TASKS_PER_THREAD).max(1);
        host.parallel_chunks(data, per_task * piece, |task, out| {
            run(task * per_task, out)
        });
    }

    /// The 16 outputs of a block and row.
    pub fn tile(&self, block: usize, row: usize) -> &[f32] {
        let at = (block * self.rows + row) * BLOCK;
        &self.data[at..at + BLOCK]
    }

    /// Copies `n` outputs of a row that starts at block `first`.
    pub fn copy_row(&self, first: usize, row: usize, out: &mut [f32]) {
        for (b, part) in out.chunks_mut(BLOCK).enumerate() {
            part.copy_from_slice(&self.tile(first + b, row)[..part.len()]);
        }
    }
}
