//! Memory that the trainer's thread lends to the program's thread.
//!
//! `unsafe`: a slice is borrowed by the thread that waits for the reply, which no lifetime can say.
//!
//! **Invariant:** a call of the model lends slices, and waits until the program's thread has
//! replied, or has dropped its [`Driver`](super::Driver); a reply ends all loans of its call. In
//! between, the trainer's side reads what the loan lets both read, and takes the elements of the
//! gradient that the program has declared complete, which shortens the loan.
#![allow(unsafe_code, reason = "a loan between two threads")]

use elasticdl_tables::ChunkUpdate;

/// Memory that the program may read.
#[derive(Debug)]
pub(super) struct Lent {
    place: Place,
    len: usize,
}

/// Memory that the program may write.
#[derive(Debug)]
pub(super) struct LentMut {
    place: Place,
    len: usize,
}

/// A chunk of an optimizer's state that is divided over the workers.
#[derive(Debug)]
pub(super) struct LentChunk {
    /// First of its parameters, and their number.
    pub(super) start: usize,
    pub(super) len: usize,
    /// `[slots, parameters with state]`.
    pub(super) slots: LentMut,
    /// `[parameters of the chunk]`.
    pub(super) sum: LentMut,
}

/// Where the memory is.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// On a GPU: the program enqueues its work on the stream of the trainer's device.
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "there are no GPUs"))]
    Device(u64),
    Host(*mut f32),
}

// SAFETY: the slices that the addresses come from can be used by other threads.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Send for LentMut {}

impl Lent {
    pub(super) fn new(slice: &[f32]) -> Self {
        Self { place: Place::Host(slice.as_ptr().cast_mut()), len: slice.len() }
    }

    #[cfg(feature = "gpu")]
    pub(super) fn on_device(address: u64, len: usize) -> Self {
        Self { place: Place::Device(address), len }
    }

    /// The elements; `None` if they are on a GPU.
    pub(super) fn slice(&self) -> Option<&[f32]> {
        match self.place {
            Place::Device(_) => None,
            // SAFETY: the invariant above: the lender's slice lives, and is not written.
            Place::Host(start) => Some(unsafe { std::slice::from_raw_parts(start, self.len) }),
        }
    }

    pub(super) fn address(&self) -> usize {
        self.place.address()
    }
}

impl LentMut {
    pub(super) fn new(slice: &mut [f32]) -> Self {
        Self { place: Place::Host(slice.as_mut_ptr()), len: slice.len() }
    }

    #[cfg(feature = "gpu")]
    pub(super) fn on_device(address: u64, len: usize) -> Self {
        Self { place: Place::Device(address), len }
    }

    /// The elements; `None` if they are on a GPU.
    pub(super) fn slice(&mut self) -> Option<&mut [f32]> {
        match self.place {
            Place::Device(_) => None,
            Place::Host(start) => {
                // SAFETY: the invariant above: the lender's slice lives, and the lender does not
                // use these elements of it.
                Some(unsafe { std::slice::from_raw_parts_mut(start, self.len) })
            }
        }
    }

    pub(super) fn address(&self) -> usize {
        self.place.address()
    }

    /// Ends the loan of the elements from `len` on.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl LentChunk {
    pub(super) fn new(chunk: ChunkUpdate<'_>) -> Self {
        let ChunkUpdate { range, slots, sum, .. } = chunk;
        let (slots, sum) = (LentMut::new(slots), LentMut::new(sum));
        Self { start: range.start, len: range.len(), slots, sum }
    }
}

impl Place {
    fn address(self) -> usize {
        match self {
            Self::Device(address) => address as usize,
            Self::Host(start) => start.expose_provenance(),
        }
    }
}
