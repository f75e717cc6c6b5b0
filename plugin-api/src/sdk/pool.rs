//! Call buffers, shared by all forms of a plugin.
//!
//! Every seat of a model needs room for its rows, but calls follow one another: a buffer a form
//! would multiply by the number of layers. A call takes an arena and puts it back, so there are as
//! many arenas as calls that really overlap, each as large as the largest call. `bind` reserves room
//! for [`ROWS`] rows, so a step allocates nothing; what no call has needed yet is not written and
//! takes no memory. The first longer call grows an arena, which stays as long as anything is
//! reserved.
//!
//! It does not own what an element is: `f32`, or whatever a plugin aligns its buffers to.

use std::sync::{Arc, Mutex, MutexGuard};

/// Rows that `bind` reserves for at most. A contract without a real limit must not ask for all
/// memory, and a prompt's length is known only when it comes.
pub const ROWS: u64 = 256;

/// Arenas that no call is using, and what is reserved of them.
#[derive(Clone, Debug)]
pub struct Pool<T>(Arc<Mutex<State<T>>>);

#[derive(Debug)]
struct State<T> {
    free: Vec<Vec<T>>,
    /// Lengths that are reserved now.
    reserved: Vec<usize>,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool(Arc::new(Mutex::new(State {
            free: Vec::new(),
            reserved: Vec::new(),
        })))
    }
}

impl<T: Clone + Default> Pool<T> {
    /// Makes sure that one arena has room for `len` elements, until the reservation is dropped.
    pub fn reserve(&self, len: usize) -> Reservation<T> {
        let mut state = self.state();
        let mut arena = state.free.pop().unwrap_or_default();
        arena.reserve_exact(len.saturating_sub(arena.len()));
        state.free.push(arena);
        let most = state.reserved.iter().copied().max().unwrap_or(0);
        state.reserved.push(len);
        Reservation {
            pool: self.clone(),
            len,
            added: len.saturating_sub(most),
        }
    }

    /// An arena of at least `len` elements; their content is whatever the last call left.
    pub fn take(&self, len: usize) -> Lease<'_, T> {
        let mut arena = self.state().free.pop().unwrap_or_default();
        if arena.len() < len {
            arena.resize(len, T::default());
        }
        Lease { pool: self, arena }
    }
}

impl<T> Pool<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

/// Room that a bound form counts on. The last one that is dropped gives the arenas back.
#[derive(Debug)]
pub struct Reservation<T> {
    pool: Pool<T>,
    len: usize,
    added: usize,
}

/// Room for nothing.
impl<T> Default for Reservation<T> {
    fn default() -> Self {
        Reservation {
            pool: Pool::default(),
            len: 0,
            added: 0,
        }
    }
}

impl<T> Reservation<T> {
    /// Bytes that it added to what was reserved before: a form's
    /// [`scratch_bytes`](crate::FormFacts::scratch_bytes), so that shared room counts once.
    pub fn bytes(&self) -> u64 {
        (self.added * size_of::<T>()) as u64
    }
}

impl<T> Drop for Reservation<T> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        if let Some(place) = state.reserved.iter().position(|len| *len == self.len) {
            state.reserved.swap_remove(place);
        }
        if state.reserved.is_empty() {
            state.free.clear();
        }
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
        self.pool.state().free.push(std::mem::take(&mut self.arena));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_370_b_462_an_arena_comes_back_and_grows_once() {
        let pool = Pool::<f32>::default();
        let _room = pool.reserve(10);
        {
            let mut lease = pool.take(6);
            let [a, b] = lease.split([2, 4]);
            a.fill(1.0);
            b.fill(2.0);
            let second = pool.take(3);
            let free = pool.state().free.len();
            assert_eq!((second.arena.len(), free), (3, 0));
        }
        assert_eq!(pool.state().free.len(), 2);
        // As long as a call needed, with the room that was reserved.
        let state = pool.state();
        let lengths: Vec<usize> = state.free.iter().map(Vec::len).collect();
        assert_eq!(lengths, [3, 6]);
        assert!(state.free[1].capacity() >= 10);
    }

    #[test]
    fn b_421_shared_room_counts_once_and_goes_with_the_last() {
        let pool = Pool::<f32>::default();
        drop(pool.reserve(20));
        let rooms = [8, 10, 9].map(|len| pool.reserve(len));
        assert_eq!(rooms.each_ref().map(Reservation::bytes), [32, 8, 0]);
        let [a, b, c] = rooms;
        drop((a, b));
        assert_eq!(pool.state().free.len(), 1);
        drop(c);
        assert_eq!(pool.state().free.len(), 0);
    }

    #[test]
    fn a_panic_gives_the_arena_back() {
        let pool = Pool::<f32>::default();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut lease = pool.take(4);
            lease.split([5]);
        }));
        assert!(caught.is_err());
        assert_eq!(pool.state().free.len(), 1);
    }
}
