//! Packed weights' memory: large chunks on huge pages, cut into blocks.
//!
//! A decode step reads every weight once, in order. On 4 KiB pages the translation of addresses costs 12 to 28 % of
//! that, so chunks are aligned to 2 MiB and marked for huge pages. A chunk is mapped, not allocated: what nobody wrote
//! costs nothing. Blocks keep their chunk alive; nothing is given back before the last block of a chunk is dropped.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use structures_plugin_api::sdk::Failure;

/// Size of a huge page.
const PAGE: usize = 2 << 20;
/// Address space of a chunk; a larger block has a chunk of its own.
const CHUNK: usize = 64 << 20;
/// Alignment of a block.
const ALIGN: usize = 64;

/// A mapping of whole huge pages.
struct Chunk {
    base: NonNull<u8>,
    len: usize,
    map: NonNull<libc::c_void>,
    map_len: usize,
}

// SAFETY: plain memory; who may read or write which part is said by the blocks, which never overlap.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(len: usize) -> Result<Self, Failure> {
        let short = || Failure::refused("memory", format!("no {len} bytes for packed weights"));
        let len = len.checked_next_multiple_of(PAGE).ok_or_else(short)?;
        let map_len = len.checked_add(PAGE).ok_or_else(short)?;
        // SAFETY: an anonymous mapping at an address of the system's choice touches nothing that exists.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(short());
        }
        let map = NonNull::new(map).ok_or_else(short)?;
        let skip = map.as_ptr().cast::<u8>().align_offset(PAGE);
        // SAFETY: `skip < PAGE` and `skip + len <= map_len`.
        let base = unsafe { map.cast::<u8>().add(skip) };
        // SAFETY: inside the mapping. A refusal leaves small pages: slower, nothing else.
        unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Ok(Chunk {
            base,
            len,
            map,
            map_len,
        })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once, when no block refers to it any more.
        unsafe { libc::munmap(self.map.as_ptr(), self.map_len) };
    }
}

/// Bytes that belong to one packed weight: aligned to a cache line, zero at first.
pub struct Block {
    chunk: Arc<Chunk>,
    offset: usize,
    len: usize,
}

impl Block {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: inside the chunk, which lives as long as this does; written through `&mut self` alone.
        unsafe { std::slice::from_raw_parts(self.chunk.base.as_ptr().add(self.offset), self.len) }
    }

    /// The bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; blocks of a chunk do not overlap.
        unsafe {
            std::slice::from_raw_parts_mut(self.chunk.base.as_ptr().add(self.offset), self.len)
        }
    }
}

/// Where blocks come from.
#[derive(Default)]
pub struct Arena {
    current: Mutex<Option<(Arc<Chunk>, usize)>>,
}

impl Arena {
    /// A block of zeros.
    pub fn block(&self, len: usize) -> Result<Block, Failure> {
        let mut current = self
            .current
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        let size = len.next_multiple_of(ALIGN);
        if let Some((chunk, used)) = current.as_mut() {
            if chunk.len - *used >= size {
                let offset = *used;
                *used += size;
                let chunk = chunk.clone();
                return Ok(Block { chunk, offset, len });
            }
        }
        let chunk = Arc::new(Chunk::new(size.max(CHUNK))?);
        // The chunk with more room left is the one that is cut next.
        let left = chunk.len - size;
        if current
            .as_ref()
            .is_none_or(|(c, used)| c.len - used <= left)
        {
            *current = Some((chunk.clone(), size));
        }
        let offset = 0;
        Ok(Block { chunk, offset, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zero_aligned_and_apart_and_outlive_the_arena() {
        let arena = Arena::default();
        let mut blocks: Vec<Block> = [1, 64, 100, 70 << 20, 3]
            .iter()
            .map(|len| arena.block(*len).expect("memory"))
            .collect();
        drop(arena);
        for (i, block) in blocks.iter_mut().enumerate() {
            assert_eq!(block.bytes().as_ptr() as usize % ALIGN, 0);
            let bytes = block.bytes_mut();
            assert!(bytes.iter().take(100).all(|b| *b == 0));
            let end = bytes.len() - 1;
            bytes[0] = i as u8 + 1;
            bytes[end] = i as u8 + 1;
        }
        for (i, block) in blocks.iter().enumerate() {
            assert_eq!(block.bytes()[0], i as u8 + 1);
        }
        let shared = blocks
            .iter()
            .filter(|b| Arc::ptr_eq(&b.chunk, &blocks[0].chunk));
        assert_eq!(shared.count(), 4, "a large block has a chunk of its own");
    }

    #[test]
    fn more_than_there_can_be_is_refused() {
        let refused = Arena::default()
            .block(usize::MAX / 2)
            .err()
            .expect("refused");
        assert_eq!(refused.code, "memory");
    }
}
