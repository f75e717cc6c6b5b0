//! The simulated device's address space.

use std::collections::BTreeMap;

use structures_plugin_api::sdk::Failure;

/// Where addresses start: no address of a 64-bit machine's user space, so whoever takes one for a
/// pointer faults at once.
const BASE: u64 = 0x00DE_0000_0000_0000;
/// Between two allocations nothing is mapped: running over one is seen.
const GAP: u64 = 4096;
/// What fresh memory holds: NaN, in every float type.
const POISON: u8 = 0xff;

/// Allocations by address.
#[derive(Debug)]
pub struct Memory {
    capacity: u64,
    used: u64,
    next: u64,
    blocks: BTreeMap<u64, Vec<u8>>,
}

impl Memory {
    /// An empty one.
    pub fn new(capacity: u64) -> Self {
        Memory {
            capacity,
            used: 0,
            next: BASE,
            blocks: BTreeMap::new(),
        }
    }

    /// A new allocation. Addresses are never given twice.
    pub fn alloc(&mut self, bytes: u64, align: u64) -> Result<u64, Failure> {
        if !align.is_power_of_two() || align > GAP {
            let what = format!("an alignment of {align}; a power of two up to {GAP}");
            return Err(Failure::invalid("argument", what));
        }
        let left = self.capacity - self.used;
        if bytes > left {
            let what = format!("{bytes} bytes, {left} of {} are free", self.capacity);
            return Err(Failure::failed("device_memory", what));
        }
        let address = self.next;
        self.next += bytes.next_multiple_of(GAP) + GAP;
        self.used += bytes;
        self.blocks.insert(address, vec![POISON; bytes as usize]);
        Ok(address)
    }

    /// Forgets an allocation.
    pub fn free(&mut self, address: u64) {
        if let Some(block) = self.blocks.remove(&address) {
            self.used -= block.len() as u64;
        }
    }

    /// The bytes at an address, inside one allocation.
    pub fn at(&self, address: u64, bytes: usize) -> Result<&[u8], Failure> {
        let found = self.blocks.range(..=address).next_back();
        found
            .and_then(|(base, block)| {
                let from = usize::try_from(address - base).ok()?;
                block.get(from..from.checked_add(bytes)?)
            })
            .ok_or_else(|| unmapped(address, bytes))
    }

    /// As [`Memory::at`].
    pub fn at_mut(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], Failure> {
        let found = self.blocks.range_mut(..=address).next_back();
        found
            .and_then(|(base, block)| {
                let from = usize::try_from(address - base).ok()?;
                block.get_mut(from..from.checked_add(bytes)?)
            })
            .ok_or_else(|| unmapped(address, bytes))
    }
}

fn unmapped(address: u64, bytes: usize) -> Failure {
    let what = format!("no {bytes} bytes are allocated at {address:#x}");
    Failure::invalid("argument", what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_an_allocation_is_reached() {
        let mut memory = Memory::new(10_000);
        let a = memory.alloc(100, 64).expect("memory");
        let b = memory.alloc(5000, 1).expect("memory");
        assert!(a != b && a.is_multiple_of(64) && a >= BASE);
        assert_eq!(memory.at(a, 100).expect("inside"), [POISON; 100]);
        assert!(memory.at(a + 1, 100).is_err() && memory.at(a + 100, 1).is_err());
        assert!(memory.at(0, 1).is_err() && memory.at(u64::MAX, 1).is_err());
        memory.at_mut(b + 4999, 1).expect("inside")[0] = 1;
        assert_eq!(memory.at(b + 4999, 1).expect("inside"), [1]);
        memory.free(a);
        memory.free(a + 1);
        assert!(memory.at(a, 1).is_err());
        assert_eq!(memory.alloc(1, 3).expect_err("align").code, "argument");
        let full = memory.alloc(5001, 1).expect_err("full").code;
        assert_eq!(full, "device_memory");
        assert_ne!(
            memory.alloc(5000, 1).expect("memory"),
            a,
            "no address twice"
        );
    }
}
