//! Blocks of memory for rows, in huge pages.
//!
//! The kernel closes the links of a killed process after it has freed its memory, page by page.
//! 800 MB take 55 ms with pages of 4 KiB, and 3 ms with pages of 2 MiB. Rows are visited at random,
//! so they gain from fewer misses of the TLB as well.
//!
//! ```text
//!   extent, 2 MiB, aligned ── 128 blocks of 16 KiB
//! ```
//!
//! **Invariant:** a bit in [`FREE`] is set if and only if no [`Block`] has this part of the extent.
#![allow(unsafe_code, reason = "maps memory, of which each block owns a part")]

use std::alloc::{Layout, handle_alloc_error};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::{Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Memory of [`WORDS`] words.
#[derive(Debug)]
pub(crate) struct Block(NonNull<u32>);

/// Extents with free blocks by address, and which of their blocks are free.
static FREE: Mutex<BTreeMap<usize, u128>> = Mutex::new(BTreeMap::new());

impl Block {
    /// A block that begins with a copy of `words`; what the rest contains is not defined.
    ///
    /// # Panics
    /// These are more than [`WORDS`].
    pub(crate) fn new(words: &[u32]) -> Self {
        let mut block = Self::take();
        block[..words.len()].copy_from_slice(words);
        block
    }

    fn take() -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        if free.is_empty() {
            free.insert(map_extent().expose_provenance().get(), u128::MAX);
        }
        let mut extent = free.first_entry().expect("an extent has free blocks");
        let (start, bits) = (*extent.key(), extent.get_mut());
        let block = bits.trailing_zeros() as usize;
        *bits &= *bits - 1;
        if *bits == 0 {
            extent.remove();
        }
        let block: *mut u32 = ptr::with_exposed_provenance_mut(start + block * BYTES);
        Self(NonNull::new(block).expect("a mapping is not at address 0"))
    }
}

/// Maps an extent of zeros.
fn map_extent() -> NonNull<u8> {
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the new mapping replaces no other one, and it belongs to the caller. What
    // lies before and after the extent is unmapped before its address is known elsewhere.
    let extent = unsafe {
        mmap_anonymous(ptr::null_mut(), 2 * EXTENT_BYTES, protection, flags).and_then(|start| {
            let before = start.align_offset(EXTENT_BYTES);
            let extent = start.byte_add(before);
            if before > 0 {
                munmap(start, before)?;
            }
            if before < EXTENT_BYTES {
                munmap(extent.byte_add(EXTENT_BYTES), EXTENT_BYTES - before)?;
            }
            // A system without huge pages continues with small ones.
            let _ = madvise(extent, EXTENT_BYTES, Advice::LinuxHugepage);
            Ok(extent)
        })
    };
    let extent = extent.ok().and_then(|extent| NonNull::new(extent.cast()));
    extent.unwrap_or_else(|| handle_alloc_error(Layout::new::<[u8; EXTENT_BYTES]>()))
}

impl Deref for Block {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        // SAFETY: the words are mapped and belong to this block, by the invariant.
        unsafe { slice::from_raw_parts(self.0.as_ptr(), WORDS) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.0.as_ptr(), WORDS) }
    }
}

impl Clone for Block {
    fn clone(&self) -> Self {
        Self::new(self)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let start = self.0.addr().get();
        let extent = start / EXTENT_BYTES * EXTENT_BYTES;
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let bits = free.entry(extent).or_default();
        *bits |= 1 << ((start - extent) / BYTES);
        let mapping = ptr::with_exposed_provenance_mut(extent);
        // SAFETY: no block has a part of the extent, and none gets one before the lock is free.
        if *bits == u128::MAX && unsafe { munmap(mapping, EXTENT_BYTES) }.is_ok() {
            free.remove(&extent);
        }
    }
}

// SAFETY: a block owns its memory, as a vector does.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

/// Words of a block.
pub(crate) const WORDS: usize = BYTES / size_of::<u32>();

/// Bytes of a block.
pub(crate) const BYTES: usize = EXTENT_BYTES / u128::BITS as usize;

/// Bytes of an extent: a huge page of most systems.
const EXTENT_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_apart_and_keep_their_words() {
        // Of more than one extent.
        let mut blocks: Vec<Block> = (0..200_u32).map(|i| Block::new(&[i; WORDS])).collect();
        for round in 0..3 {
            // Other blocks take the place of every third one.
            let mut index = 0;
            blocks.retain(|_| {
                index += 1;
                index % 3 != round
            });
            blocks.extend((0..50_u32).map(|i| Block::new(&[1000 * round + i; WORDS])));
            let copies = blocks.clone();
            for block in &mut blocks {
                assert!(block.iter().all(|word| *word == block[0]));
                let next = block[0] + 1;
                block.fill(next);
            }
            let both = blocks.iter().zip(&copies);
            assert!(both.clone().all(|(block, copy)| block[WORDS - 1] == copy[0] + 1));
            assert!(both.clone().all(|(_, copy)| copy.iter().all(|word| *word == copy[0])));
        }
    }
}
