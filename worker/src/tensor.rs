//! Identifiers of the large buffers of a worker, and the windows in which they are compared.

use std::ops::Range;

/// Identifies a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tensor {
    Parameters,
    Reduced,
    Retained,
    Slots,
}

/// The step's window of a tensor of `len` elements.
pub(crate) fn window(step: u64, len: usize) -> Range<usize> {
    let (turn, n) = ((step % WINDOWS) as usize, WINDOWS as usize);
    len * turn / n..len * (turn + 1) / n
}

/// Number of windows of the state; each step compares one.
pub(crate) const WINDOWS: u64 = 64;
