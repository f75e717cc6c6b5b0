//! Call buffers, shared by all forms of a plugin.
//!
//! Every seat of a model needs room for its rows, but calls follow one another: a buffer a form
//! would multiply by the number of layers. A call takes an arena and puts it back, so there are as
//! many arenas as calls that really overlap, each as large as the largest call. `bind` reserves, so
//! a call within its contract allocates nothing.
//!
//! It does not own what an element is: `f32`, or whatever a plugin aligns its buffers to.

use std::sync::{Mutex, MutexGuard};

/// Arenas that no call is using.
#[derive(Debug)]
pub struct Pool<T> {
    free: Mutex<Vec<Vec<T>>>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool {
            free: Mutex::default(),
        }
    }
}

impl<T: Clone + Default> Pool<T> {
    /// Makes sure that one arena has room for `len` elements.
    pub fn reserve(&self, len: usize) {
        drop(self.take(len));
    }

    /// An arena of at least `len` elements; their content is whatever the last call left.
    pub fn take(&self, len: usize) -> Lease<'_, T> {
        let mut arena = self.free().pop().unwrap_or_default();
        if arena.len() < len {
            arena.resize(len, T::default());
        }
        Lease { pool: self, arena }
    }
}

impl<T> Pool<T> {
    fn free(&self) -> MutexGuard<'_, Vec<Vec<T>>> {
        self.free
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

/// An arena in use; goes back when dropped, also by a panic.
#[derive(Debug)]
pub struct Lease<'p, T> {
    pool: &'p Pool<T>,
    arena: Vec<T>,
}

impl<T> Lease<'_, T> {
    /// Cuts the arena into buffers of these sizes.
    ///
    /// # Panics
    /// When they are more than was asked for.
    pub fn split<const N: usize>(&mut self, sizes: [usize; N]) -> [&mut [T]; N] {
        let mut rest = self.arena.as_mut_slice();
        sizes.map(|size| {
            let (buffer, tail) = std::mem::take(&mut rest).split_at_mut(size);
            rest = tail;
            buffer
        })
    }
}

impl<T> Drop for Lease<'_, T> {
    fn drop(&mut self) {
        self.pool.free().push(std::mem::take(&mut self.arena));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_370_b_462_an_arena_comes_back_and_grows_once() {
        let pool = Pool::<f32>::default();
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
        let pool = Pool::<f32>::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut lease = pool.take(4);
            lease.split([5]);
        }));
        assert!(caught.is_err());
        assert_eq!(pool.free().len(), 1);
    }
}
