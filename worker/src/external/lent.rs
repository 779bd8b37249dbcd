//! Memory that the trainer's thread lends to the program's thread.
//!
//! `unsafe`: a slice is borrowed by the thread that waits for the reply, which no lifetime can say.
//!
//! **Invariant:** a call of the model lends slices, and waits until the program's thread has
//! replied, or has dropped its [`Driver`](super::Driver); a reply ends all loans of its call. In
//! between, the trainer's side reads what the loan lets both read, and takes the elements of the
//! gradient that the program has declared complete, which shortens the loan.
#![allow(unsafe_code, reason = "a loan between two threads")]

/// A slice that the program may read.
#[derive(Debug)]
pub(super) struct Lent {
    start: *const f32,
    len: usize,
}

/// A slice that the program may write.
#[derive(Debug)]
pub(super) struct LentMut {
    start: *mut f32,
    len: usize,
}

// SAFETY: the slices that the addresses come from can be used by other threads.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Send for LentMut {}

impl Lent {
    pub(super) fn new(slice: &[f32]) -> Self {
        Self { start: slice.as_ptr(), len: slice.len() }
    }

    pub(super) fn slice(&self) -> &[f32] {
        // SAFETY: the invariant above: the lender's slice lives, and is not written.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl LentMut {
    pub(super) fn new(slice: &mut [f32]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len() }
    }

    pub(super) fn slice(&mut self) -> &mut [f32] {
        // SAFETY: the invariant above: the lender's slice lives, and the lender does not use these
        // elements of it.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// Ends the loan of the elements from `len` on.
    pub(super) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}
