//! The end of a process that must not wait for its libraries.
#![allow(unsafe_code, reason = "calls a function of the C library")]

use std::ffi::{c_int, c_void};
use std::ptr;

/// Ends the process at once, without the destructors of libraries: those of CUDA and NCCL wait for
/// a communicator that NCCL does not release.
pub fn exit_at_once(code: i32) -> ! {
    unsafe extern "C" {
        fn _exit(code: c_int) -> !;
    }
    // SAFETY: the function has no preconditions.
    unsafe { _exit(code) }
}

/// Lets the process end as by [`exit_at_once`] when it ends, with the exit code that it has then.
/// For a library, whose program goes on.
pub fn exit_at_once_at_end() {
    extern "C" fn end(code: c_int, _: *mut c_void) {
        exit_at_once(code);
    }
    unsafe extern "C" {
        fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    }
    // SAFETY: `end` takes any argument. What was registered last is called first: before the
    // destructors of libraries that are loaded. Without memory for it, the process ends as usual.
    unsafe { on_exit(end, ptr::null_mut()) };
}
