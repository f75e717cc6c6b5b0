//! Workspaces in host memory: what runners borrow for the length of a call, and what belongs to one owner.
//!
//! A form's interior values need memory in every layer and in none of them for longer than a call, so scratch is pooled: who
//! asks for the same sizes, type and tag gets the same buffer, and a lock keeps two callers out of one. State is the
//! opposite: a cache belongs to one loop, is nobody else's, and is counted until its owner dies. A device's memory is leased
//! by the plugin that serves it, for its own queues; none of it is here.
//!
//! Owns the pool and its figures. Does not own a plugin's scratch (the loader) nor a step's arena (`structures-graph`),
//! which are told here as exclusive by who holds them.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use serde::Serialize;

/// A pooled buffer. Its content is whatever the last caller left.
pub type Scratch<T> = Arc<Mutex<Vec<T>>>;

/// Locks a buffer. A caller that panicked left it as it is: content does not matter.
pub fn locked<T>(scratch: &Scratch<T>) -> MutexGuard<'_, Vec<T>> {
    scratch.lock().unwrap_or_else(|e| e.into_inner())
}

/// See the module.
#[derive(Default)]
pub struct Workspace {
    pool: Mutex<Pool>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    dims: Vec<usize>,
    tag: String,
}

#[derive(Default)]
struct Pool {
    values: HashMap<Key, Scratch<f32>>,
    codes: HashMap<Key, Scratch<u8>>,
    ones: HashMap<Key, Arc<[f32]>>,
    /// How often each tag was leased.
    leases: BTreeMap<String, u64>,
    /// Bytes by tag that have an owner.
    exclusive: BTreeMap<String, u64>,
}

/// What is held, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Pooled and exclusive.
    pub held_bytes: u64,
    /// Pooled, by tag.
    pub by_tag: BTreeMap<String, u64>,
    /// Exclusive and alive, by tag.
    pub exclusive_by_tag: BTreeMap<String, u64>,
    /// Leases so far, by tag.
    pub leases: BTreeMap<String, u64>,
}

/// Memory of one owner: counted for as long as this lives.
pub struct Exclusive<'w> {
    workspace: &'w Workspace,
    tag: String,
    bytes: u64,
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        let mut pool = self.workspace.lock();
        if let Some(held) = pool.exclusive.get_mut(&self.tag) {
            *held = held.saturating_sub(self.bytes);
            if *held == 0 {
                pool.exclusive.remove(&self.tag);
            }
        }
    }
}

impl Workspace {
    /// That of this process.
    pub fn global() -> &'static Workspace {
        static GLOBAL: OnceLock<Workspace> = OnceLock::new();
        GLOBAL.get_or_init(Workspace::default)
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Values of these sizes: the same buffer for the same sizes and tag.
    pub fn values(&self, dims: &[usize], tag: &str) -> Scratch<f32> {
        let mut pool = self.lock();
        *pool.leases.entry(tag.into()).or_default() += 1;
        buffer(&mut pool.values, dims, tag)
    }

    /// Codes of one byte, likewise; never the memory of values.
    pub fn codes(&self, dims: &[usize], tag: &str) -> Scratch<u8> {
        let mut pool = self.lock();
        *pool.leases.entry(tag.into()).or_default() += 1;
        buffer(&mut pool.codes, dims, tag)
    }

    /// Ones, for whoever multiplies by nothing: nobody can write them.
    pub fn ones(&self, dims: &[usize], tag: &str) -> Arc<[f32]> {
        let mut pool = self.lock();
        *pool.leases.entry(tag.into()).or_default() += 1;
        let ones = pool.ones.entry(key(dims, tag));
        ones.or_insert_with(|| vec![1.0; dims.iter().product()].into())
            .clone()
    }

    /// Counts memory that has one owner, such as a cache.
    pub fn exclusive(&self, tag: &str, bytes: usize) -> Exclusive<'_> {
        *self.lock().exclusive.entry(tag.into()).or_default() += bytes as u64;
        Exclusive {
            workspace: self,
            tag: tag.into(),
            bytes: bytes as u64,
        }
    }

    /// What is held.
    pub fn report(&self) -> Report {
        let pool = self.lock();
        let mut by_tag: BTreeMap<String, u64> = BTreeMap::new();
        let values = pool.values.iter().map(|(k, b)| (k, 4 * locked(b).len()));
        let codes = pool.codes.iter().map(|(k, b)| (k, locked(b).len()));
        let ones = pool.ones.iter().map(|(k, b)| (k, 4 * b.len()));
        for (key, bytes) in values.chain(codes).chain(ones) {
            *by_tag.entry(key.tag.clone()).or_default() += bytes as u64;
        }
        let pooled: u64 = by_tag.values().sum();
        let exclusive: u64 = pool.exclusive.values().sum();
        Report {
            held_bytes: pooled + exclusive,
            by_tag,
            exclusive_by_tag: pool.exclusive.clone(),
            leases: pool.leases.clone(),
        }
    }

    /// Empties the pool: who still has a buffer keeps it, the next one gets another. What is exclusive is its owner's.
    pub fn clear(&self) {
        let mut pool = self.lock();
        pool.values.clear();
        pool.codes.clear();
        pool.ones.clear();
        pool.leases.clear();
    }
}

fn key(dims: &[usize], tag: &str) -> Key {
    Key {
        dims: dims.to_vec(),
        tag: tag.into(),
    }
}

fn buffer<T: Clone + Default>(
    pool: &mut HashMap<Key, Scratch<T>>,
    dims: &[usize],
    tag: &str,
) -> Scratch<T> {
    let made = || Arc::new(Mutex::new(vec![T::default(); dims.iter().product()]));
    pool.entry(key(dims, tag)).or_insert_with(made).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b_370_the_same_sizes_type_and_tag_are_the_same_buffer() {
        let w = Workspace::default();
        let first = w.values(&[2, 3], "a");
        assert!(Arc::ptr_eq(&first, &w.values(&[2, 3], "a")));
        assert!(!Arc::ptr_eq(&first, &w.values(&[3, 2], "a")));
        assert!(!Arc::ptr_eq(&first, &w.values(&[2, 3], "b")));
        let codes = w.codes(&[2, 3], "a");
        assert!(Arc::ptr_eq(&codes, &w.codes(&[2, 3], "a")));
        assert_eq!((locked(&first).len(), locked(&codes).len()), (6, 6));
    }

    #[test]
    fn b_371_ones_are_ones_and_nobody_writes_them() {
        let w = Workspace::default();
        locked(&w.values(&[4], "scale")).fill(7.0);
        let mut ones = w.ones(&[4], "scale");
        assert_eq!(ones[..], [1.0; 4]);
        assert!(Arc::get_mut(&mut ones).is_none(), "the pool holds it too");
    }

    #[test]
    fn b_372_what_is_exclusive_is_counted_until_its_owner_dies() {
        let w = Workspace::default();
        let one = w.exclusive("state", 1000);
        let two = w.exclusive("state", 24);
        assert_eq!(w.report().exclusive_by_tag["state"], 1024);
        drop(one);
        assert_eq!(w.report().held_bytes, 24);
        w.clear();
        assert_eq!(w.report().held_bytes, 24, "it is its owner's");
        drop(two);
        assert_eq!(w.report(), Report::default());
    }

    #[test]
    fn b_374_the_report_is_by_tag_and_clearing_empties() {
        let w = Workspace::default();
        for _ in 0..3 {
            w.values(&[8], "block");
            w.codes(&[8], "wire");
        }
        let state = w.exclusive("state", 5);
        let report = w.report();
        assert_eq!((report.by_tag["block"], report.by_tag["wire"]), (32, 8));
        assert_eq!((report.leases["block"], report.leases["wire"]), (3, 3));
        assert_eq!(report.held_bytes, 45);
        drop(state);
        w.clear();
        assert_eq!(w.report(), Report::default());
    }
}
