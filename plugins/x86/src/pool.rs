//! Call buffers, shared by all forms of the backend.
//!
//! Every seat of a model needs room for its rows, but calls follow one another: a buffer a form would multiply by the
//! number of layers. A call takes an arena and puts it back, so there are as many as calls that really overlap, each as
//! large as the largest call. `bind` reserves, so a call within its contract allocates nothing.

use std::sync::{Mutex, MutexGuard};

/// 64 bytes, aligned to a cache line: what buffers are counted in.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Line(pub [u8; 64]);

impl Line {
    /// Lines that hold `count` values of a type.
    pub fn of<T>(count: usize) -> usize {
        (count * size_of::<T>()).div_ceil(64)
    }
}

/// Types of which any bytes are a value, with an alignment that a line satisfies.
///
/// # Safety
/// As said.
pub unsafe trait Plain: Copy {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl Plain for i32 {}
// SAFETY: numbers.
unsafe impl Plain for i16 {}
// SAFETY: numbers.
unsafe impl Plain for u16 {}
// SAFETY: numbers.
unsafe impl Plain for i8 {}

/// Lines seen as numbers.
pub fn plain<T: Plain>(lines: &mut [Line]) -> &mut [T] {
    let len = size_of_val(lines) / size_of::<T>();
    // SAFETY: `T` is plain and its alignment divides 64; the length is rounded down.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) }
}

/// Arenas that no call is using.
#[derive(Debug, Default)]
pub struct Pool {
    free: Mutex<Vec<Vec<Line>>>,
}

impl Pool {
    /// Makes sure that one arena has room for so many lines.
    pub fn reserve(&self, lines: usize) {
        drop(self.take(lines));
    }

    /// An arena of at least `lines` lines; their content is whatever the last call left.
    pub fn take(&self, lines: usize) -> Lease<'_> {
        let mut arena = self.free().pop().unwrap_or_default();
        if arena.len() < lines {
            arena.resize(lines, Line([0; 64]));
        }
        Lease { pool: self, arena }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<Line>>> {
        self.free
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

/// An arena in use; goes back when dropped, also by a panic.
#[derive(Debug)]
pub struct Lease<'p> {
    pool: &'p Pool,
    arena: Vec<Line>,
}

impl Lease<'_> {
    /// Cuts the arena into buffers of so many lines.
    ///
    /// # Panics
    /// When they are more than was asked for.
    pub fn split<const N: usize>(&mut self, lines: [usize; N]) -> [&mut [Line]; N] {
        let mut rest = self.arena.as_mut_slice();
        lines.map(|count| {
            let (buffer, tail) = std::mem::take(&mut rest).split_at_mut(count);
            rest = tail;
            buffer
        })
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.pool.free().push(std::mem::take(&mut self.arena));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_comes_back_and_grows_once() {
        let pool = Pool::default();
        pool.reserve(10);
        {
            let mut lease = pool.take(6);
            let [a, b] = lease.split([2, 4]);
            plain::<f32>(a).fill(1.0);
            plain::<i8>(b).fill(2);
            assert_eq!((plain::<f32>(a).len(), plain::<i8>(b).len()), (32, 256));
            assert_eq!(pool.take(3).arena.len(), 3);
        }
        let lengths: Vec<usize> = pool.free().iter().map(Vec::len).collect();
        assert_eq!(lengths, [3, 10]);
        assert_eq!((Line::of::<f32>(17), Line::of::<i8>(64)), (2, 1));
    }

    #[test]
    fn a_panic_gives_the_arena_back() {
        let pool = Pool::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.take(4).split([5]);
        }));
        assert!(caught.is_err());
        assert_eq!(pool.free().len(), 1);
    }
}
