//! The communicators of this process that NCCL has not released, at the end of the process.
#![allow(unsafe_code, reason = "calls a function of the C library")]

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// A communicator that NCCL has not released. Counts itself.
#[derive(Debug)]
pub(super) struct Unreleased(());

impl Unreleased {
    pub(super) fn new() -> Self {
        *count() += 1;
        Self(())
    }
}

impl Drop for Unreleased {
    fn drop(&mut self) {
        *count() -= 1;
        RELEASED.notify_all();
    }
}

/// Waits until NCCL has released all communicators of this process. Returns whether it has, within
/// `limit`. A process that ends before runs the destructors of CUDA and NCCL beside their work.
#[must_use]
pub fn wait_for_release(limit: Duration) -> bool {
    let (count, _) = RELEASED
        .wait_timeout_while(count(), limit, |count| *count > 0)
        .expect("nothing under this lock panics");
    *count == 0
}

/// Ends the process at once, without the destructors of libraries: those of CUDA and NCCL wait for
/// a communicator that NCCL does not release.
pub fn exit_at_once(code: i32) -> ! {
    unsafe extern "C" {
        fn _exit(code: c_int) -> !;
    }
    // SAFETY: the function has no preconditions.
    unsafe { _exit(code) }
}

fn count() -> MutexGuard<'static, usize> {
    COUNT.lock().expect("nothing under this lock panics")
}

static COUNT: Mutex<usize> = Mutex::new(0);
static RELEASED: Condvar = Condvar::new();
