//! Memory that Python lends: by the buffer protocol, or by DLPack.
//!
//! `unsafe`: both work with addresses. A [`Borrowed`] spans the time from the request of memory to
//! its release. The buffer protocol locks the memory meanwhile. DLPack and PyTorch have no lock: as
//! with each backend of `torch.distributed`, a program must not resize a tensor before the
//! operation on it has ended.
#![allow(unsafe_code, reason = "the buffer protocol and DLPack")]

use std::ffi::{CStr, c_void};
use std::fmt;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

/// Writable, contiguous memory of a Python object.
#[derive(Debug)]
pub(crate) struct Borrowed {
    start: *mut u8,
    bytes: usize,
    is_f32: bool,
    is_i64: bool,
    _owner: Owner,
}

/// What keeps the memory.
#[derive(Debug)]
enum Owner {
    /// A capsule of DLPack, which releases the memory when it is freed.
    Capsule {
        _capsule: Py<PyAny>,
    },
    /// Nothing: this is a copy.
    Copy {
        _memory: Vec<u64>,
    },
    View {
        _view: View,
    },
}

struct View(Box<ffi::Py_buffer>);

// SAFETY: the memory is used by one thread at a time, and is plain numbers.
unsafe impl Send for Borrowed {}

impl Borrowed {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        // SAFETY: a reference to an object.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0 {
            return Self::of_buffer(object);
        }
        if object.hasattr("__dlpack__")? {
            return Self::of_capsule(object.call_method0("__dlpack__")?);
        }
        let kind = object.get_type().name()?;
        let error = format!("a {kind} has neither the buffer protocol nor __dlpack__()");
        Err(PyTypeError::new_err(error))
    }

    fn of_buffer(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        let flags = ffi::PyBUF_WRITABLE | ffi::PyBUF_C_CONTIGUOUS | ffi::PyBUF_FORMAT;
        // SAFETY: the view is new, and released once, when its owner is dropped.
        let filled = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) };
        if filled != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let format = if view.format.is_null() {
            c"B"
        } else {
            // SAFETY: a text that lives as long as the view.
            unsafe { CStr::from_ptr(view.format) }
        };
        Ok(Self {
            start: view.buf.cast(),
            bytes: view.len.cast_unsigned(),
            is_f32: F32_FORMATS.contains(&format),
            is_i64: I64_FORMATS.contains(&format),
            _owner: Owner::View { _view: View(view) },
        })
    }

    fn of_capsule(capsule: Bound<'_, PyAny>) -> PyResult<Self> {
        // SAFETY: `capsule` is an object; the function checks that it is a capsule of this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE.as_ptr()) };
        if managed.is_null() {
            return Err(PyErr::fetch(capsule.py()));
        }
        // SAFETY: a capsule of this name contains a `DLManagedTensor`, which begins with its
        // tensor, and lives as long as the capsule.
        let tensor = unsafe { &*managed.cast::<Tensor>() };
        if tensor.device.kind != CPU {
            return Err(PyBufferError::new_err("the tensor is not in the memory of the CPU"));
        }
        let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
        let numbers = |start: *const i64| {
            if dimensions == 0 || start.is_null() {
                return &[][..];
            }
            // SAFETY: DLPack gives as many numbers as there are dimensions.
            unsafe { std::slice::from_raw_parts(start, dimensions) }
        };
        let (shape, strides) = (numbers(tensor.shape), numbers(tensor.strides));
        if !is_contiguous(shape, strides) {
            return Err(PyBufferError::new_err("the tensor is not contiguous"));
        }
        let DataType { code, bits, lanes } = tensor.data_type;
        let element = usize::from(bits).div_ceil(8) * usize::from(lanes);
        let mut sizes = shape.iter().map(|&size| usize::try_from(size).ok());
        let bytes = sizes.try_fold(element, |bytes, size| bytes.checked_mul(size?));
        let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or_else(|| {
            PyBufferError::new_err(format!("the tensor's shape {shape:?} is no size of memory"))
        })?;
        Ok(Self {
            start: tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize),
            bytes,
            is_f32: (code, bits, lanes) == (FLOAT, 32, 1),
            is_i64: (code, bits, lanes) == (INTEGER, 64, 1),
            _owner: Owner::Capsule { _capsule: capsule.unbind() },
        })
    }

    /// Copies this memory, if it is part of what an operation writes to while it reads this.
    pub(crate) fn keep_from(&mut self, written: &[Self]) {
        let (start, end) = (self.start.addr(), self.start.addr() + self.bytes);
        let overlaps =
            |other: &Self| start < other.start.addr() + other.bytes && other.start.addr() < end;
        if written.iter().any(overlaps) {
            let mut memory = vec![0_u64; self.bytes.div_ceil(size_of::<u64>())];
            let copy = memory.as_mut_ptr().cast();
            // SAFETY: both have as many bytes, and one is new.
            unsafe { std::ptr::copy_nonoverlapping(self.start, copy, self.bytes) };
            (self.start, self._owner) = (copy, Owner::Copy { _memory: memory });
        }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: the memory has as many bytes, is writable, and stays where it is until it is
        // released. Another thread of Python may write to it, as to any memory that two threads
        // use; the bytes are plain numbers.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    pub(crate) fn floats(&mut self) -> PyResult<&mut [f32]> {
        if self.is_f32 {
            // SAFETY: any four bytes are an f32.
            let (before, floats, after) = unsafe { self.bytes().align_to_mut::<f32>() };
            if before.is_empty() && after.is_empty() {
                return Ok(floats);
            }
        }
        Err(PyValueError::new_err("sums are of arrays of f32, and this is none"))
    }

    pub(crate) fn integers(&mut self) -> PyResult<&mut [i64]> {
        if self.is_i64 {
            // SAFETY: any eight bytes are an i64.
            let (before, integers, after) = unsafe { self.bytes().align_to_mut::<i64>() };
            if before.is_empty() && after.is_empty() {
                return Ok(integers);
            }
        }
        Err(PyValueError::new_err("ids are arrays of i64, and this is none"))
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("bytes", &self.0.len).finish_non_exhaustive()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // A thread that panics is not attached to Python. Where Python has ended, the memory stays.
        Python::try_attach(|_| {
            // SAFETY: this thread is attached to Python, and the view was filled.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
        });
    }
}

/// Whether elements lie as in an array of C. Without strides they do.
fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected = size.wrapping_mul(expected);
            fits
        })
}

/// `DLTensor` of DLPack.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dimensions: i32,
    data_type: DataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLDevice`.
#[repr(C)]
struct Device {
    kind: i32,
    _id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

const CAPSULE: &CStr = c"dltensor";
/// `kDLCPU`.
const CPU: i32 = 1;
/// `kDLInt`.
const INTEGER: u8 = 0;
/// `kDLFloat`.
const FLOAT: u8 = 2;
/// Formats of f32 in the module `struct`, on a machine whose numbers are little-endian.
const F32_FORMATS: [&CStr; 4] = [c"f", c"<f", c"=f", c"@f"];
const I64_FORMATS: [&CStr; 4] = [c"q", c"<q", c"=q", c"@q"];
