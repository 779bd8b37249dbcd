//! The end of a process that must not wait for its libraries.
#![allow(unsafe_code, reason = "calls a function of the C library")]

use std::ffi::c_int;

/// Ends the process at once, without the destructors of libraries: those of CUDA and NCCL wait for
/// a communicator that NCCL does not release.
pub fn exit_at_once(code: i32) -> ! {
    unsafe extern "C" {
        fn _exit(code: c_int) -> !;
    }
    // SAFETY: the function has no preconditions.
    unsafe { _exit(code) }
}
