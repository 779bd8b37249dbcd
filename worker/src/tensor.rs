//! Identifiers and sizes of the large buffers of a worker, and the windows in which they are
//! compared.

use std::ops::Range;

use crate::update::UpdateRule;

/// Identifies a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tensor {
    Parameters,
    Reduced,
    Retained,
    Slots,
}

/// Numbers of floats of a model's parameters and of its optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelSize {
    pub(crate) parameters: usize,
    pub(crate) slots: usize,
}

impl ModelSize {
    pub(crate) fn new(parameters: usize, rule: &(impl UpdateRule + ?Sized)) -> Self {
        Self { parameters, slots: rule.state_len(parameters) }
    }

    /// Number of floats of the state.
    pub(crate) fn total(self) -> usize {
        self.parameters + self.slots
    }
}

/// The step's window of a tensor of `len` elements.
pub(crate) fn window(step: u64, len: usize) -> Range<usize> {
    let (turn, n) = ((step % WINDOWS) as usize, WINDOWS as usize);
    len * turn / n..len * (turn + 1) / n
}

/// Number of windows of the state; each step compares one.
pub(crate) const WINDOWS: u64 = 64;
