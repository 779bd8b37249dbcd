//! Memory that Python and the trainer share.
//!
//! `unsafe`: Python's buffer protocol works with addresses, and tensors keep them for as long as
//! they live. The memory is never moved, and freed when neither a tensor nor the trainer refers to
//! it.
#![allow(unsafe_code, reason = "the buffer protocol")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use elasticdl::external::{ProgramMemory, zeros};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Zero-initialized `f32`s at a fixed address.
#[derive(Debug)]
struct Block {
    start: *mut f32,
    len: usize,
    /// Frees the memory. All access is by `start`.
    _memory: Vec<f32>,
}

// SAFETY: the memory is plain numbers. `TrainerMemory::floats_mut` says who accesses it when.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    fn new(len: usize) -> Self {
        let mut memory = zeros(len);
        Self { start: memory.as_mut_ptr(), len, _memory: memory }
    }
}

/// An array of `f32`s with the buffer protocol.
#[pyclass(frozen, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct Floats {
    block: Arc<Block>,
}

impl Floats {
    pub(crate) fn new(len: usize) -> Self {
        Self { block: Arc::new(Block::new(len)) }
    }
}

#[pymethods]
impl Floats {
    fn __len__(&self) -> usize {
        self.block.len
    }

    /// Exports the memory as writable bytes.
    ///
    /// # Safety
    /// `view` is null or points to a buffer that the caller owns, as Python guarantees.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill"));
        }
        let block = &slf.get().block;
        let start = block.start.cast::<c_void>();
        let bytes = (block.len * size_of::<f32>()).cast_signed();
        // SAFETY: the view keeps a reference to this object, which keeps the memory.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl Floats {
    /// The memory for the trainer, which may use it only while the program's thread waits in a call
    /// of this module.
    pub(crate) fn for_trainer(&self) -> Box<dyn ProgramMemory> {
        Box::new(TrainerMemory { block: Arc::clone(&self.block) })
    }
}

/// The memory of a program, as the trainer uses it.
#[derive(Debug)]
struct TrainerMemory {
    block: Arc<Block>,
}

impl ProgramMemory for TrainerMemory {
    fn floats(&self) -> &[f32] {
        // SAFETY: the block lives, and is written as `floats_mut` says.
        unsafe { std::slice::from_raw_parts(self.block.start, self.block.len) }
    }

    fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: a block has one `TrainerMemory` at a time, which is borrowed mutably here. While
        // the trainer uses it, the program's thread waits in a call of this module; no tensor is
        // then written, unless the program does so in another thread, as with any tensor that two
        // threads use.
        unsafe { std::slice::from_raw_parts_mut(self.block.start, self.block.len) }
    }
}
