//! Intermediate buffers, shared by all forms of the plugin.
//!
//! Every seat of a model needs room for its rows, but calls follow one another: a buffer a form
//! would multiply by the number of layers. A call takes an arena and puts it back, so there are as
//! many arenas as calls that really overlap, each as large as the largest call. `bind` reserves, so
//! a call allocates nothing.

use std::sync::{Mutex, MutexGuard};

/// Arenas that no call is using.
#[derive(Debug, Default)]
pub struct Pool {
    free: Mutex<Vec<Vec<f32>>>,
}

impl Pool {
    /// Makes sure that one arena has room for `len` elements.
    pub fn reserve(&self, len: usize) {
        drop(self.take(len));
    }

    /// An arena of at least `len` elements; their content is whatever the last call left.
    pub fn take(&self, len: usize) -> Lease<'_> {
        let mut arena = self.free().pop().unwrap_or_default();
        if arena.len() < len {
            arena.resize(len, 0.0);
        }
        Lease { pool: self, arena }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<f32>>> {
        self.free
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

/// An arena in use; goes back when dropped, also by a panic.
#[derive(Debug)]
pub struct Lease<'p> {
    pool: &'p Pool,
    arena: Vec<f32>,
}

impl Lease<'_> {
    /// Cuts the arena into buffers of these sizes.
    ///
    /// # Panics
    /// When they are more than was asked for.
    pub fn split<const N: usize>(&mut self, sizes: [usize; N]) -> [&mut [f32]; N] {
        let mut rest = self.arena.as_mut_slice();
        sizes.map(|size| {
            let (buffer, tail) = std::mem::take(&mut rest).split_at_mut(size);
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
    fn b_370_b_462_an_arena_comes_back_and_grows_once() {
        let pool = Pool::default();
        pool.reserve(10);
        {
            let mut lease = pool.take(6);
            let [a, b] = lease.split([2, 4]);
            a.fill(1.0);
            b.fill(2.0);
            let second = pool.take(3);
            assert_eq!((second.arena.len(), pool.free().len()), (3, 0));
        }
        assert_eq!(pool.free().len(), 2);
        let lengths: Vec<usize> = pool.free().iter().map(Vec::len).collect();
        assert_eq!(lengths, [3, 10]);
    }

    #[test]
    fn a_panic_gives_the_arena_back() {
        let pool = Pool::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut lease = pool.take(4);
            lease.split([5]);
        }));
        assert!(caught.is_err());
        assert_eq!(pool.free().len(), 1);
    }
}
