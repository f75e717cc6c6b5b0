//! Who works on a captured step beside the thread that replays it.
//!
//! The graph knows no pool: whoever replays lends one. A region is cut into a few pieces of an output; each piece is
//! computed by one thread in one order, so results do not depend on how many there are.

use std::sync::Mutex;

/// Threads lent for the length of a replay.
pub trait Crew: Sync {
    /// How many take part, the caller included.
    fn threads(&self) -> usize;

    /// Runs `body(i)` for every `i < n`, on any of the threads, and returns when all are done.
    fn run(&self, n: usize, body: &(dyn Fn(usize) + Sync));

    /// Runs something whose own computing threads need the cores.
    fn aside(&self, body: &mut dyn FnMut()) {
        body();
    }
}

/// Nobody but the caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Crew for Alone {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, n: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..n).for_each(body);
    }
}

/// Most pieces of a region: enough for the threads of a small server to even out.
pub(crate) const PIECES: usize = 16;

/// Multiplications from which a second thread is worth its wake: a parked worker costs 20 us, a spinning one 1 us, and
/// a core does some 4,000 of them in a microsecond out of its caches.
const WORTH_IT: usize = 1 << 16;

/// Cuts two outputs of `units` parts each into the same pieces and runs `f(first unit, piece, piece)` on each. `work` is
/// the number of multiplications in all.
pub(crate) fn pieces(
    crew: &dyn Crew,
    units: usize,
    work: usize,
    (a, b): (&mut [f32], &mut [f32]),
    f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) {
    let n = match work < WORTH_IT || crew.threads() < 2 {
        true => 1,
        false => PIECES.min(units),
    };
    if n < 2 {
        f(0, a, b);
        return;
    }
    let each = units.div_ceil(n);
    let of = |len: usize| (len / units.max(1) * each).max(1);
    let (in_a, in_b) = (of(a.len()), of(b.len()));
    let mut pairs = (a.chunks_mut(in_a), b.chunks_mut(in_b));
    // Each index runs once, so nobody waits for a lock.
    let cells: [Mutex<(&mut [f32], &mut [f32])>; PIECES] = std::array::from_fn(|_| {
        let a = pairs.0.next().unwrap_or_default();
        Mutex::new((a, pairs.1.next().unwrap_or_default()))
    });
    crew.run(units.div_ceil(each), &|i| {
        let mut cell = cells[i].lock().unwrap_or_else(|e| e.into_inner());
        let (a, b) = &mut *cell;
        f(i * each, a, b);
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// As many threads as pieces, started for each region.
    pub(crate) struct Scoped;

    impl Crew for Scoped {
        fn threads(&self) -> usize {
            PIECES
        }

        fn run(&self, n: usize, body: &(dyn Fn(usize) + Sync)) {
            std::thread::scope(|s| (0..n).for_each(|i| drop(s.spawn(move || body(i)))));
        }
    }

    #[test]
    fn every_unit_is_in_one_piece() {
        for units in [1, 3, 15, 16, 17, 31, 100] {
            let (mut a, mut b) = (vec![0f32; units * 3], vec![0f32; units]);
            pieces(&Scoped, units, WORTH_IT, (&mut a, &mut b), |from, a, b| {
                assert_eq!(a.len(), 3 * b.len());
                a.iter_mut().for_each(|v| *v += from as f32);
                for (i, v) in b.iter_mut().enumerate() {
                    *v += (from + i + 1) as f32;
                }
            });
            let want: Vec<f32> = (1..=units).map(|i| i as f32).collect();
            assert_eq!(b, want);
            assert!(a.iter().all(|v| *v < units as f32));
        }
    }
}
