//! Capture modes of threads. While a thread captures a graph in mode `global`, which is the
//! default, certain calls fail in all threads but those of mode `relaxed`, and end the capture.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_ulong};
use std::sync::Mutex;

use super::SUCCESS;

thread_local! {
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

/// Numbers of calls that would fail during a capture, by the name of the thread and its mode.
static CALLS: Mutex<BTreeMap<(String, c_int), u64>> = Mutex::new(BTreeMap::new());

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    unsafe { *mode = MODE.replace(*mode) };
    SUCCESS
}

/// Notes a call that is not allowed during a capture.
pub(crate) fn note() {
    let mut name: [c_char; 16] = [0; 16];
    unsafe { pthread_getname_np(pthread_self(), name.as_mut_ptr(), name.len()) };
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    *CALLS.lock().unwrap().entry((name, MODE.get())).or_default() += 1;
}

/// Number of such calls by threads of that name in that mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fakeUncapturedCalls(name: *const c_char, mode: c_int) -> u64 {
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    CALLS.lock().unwrap().get(&(name, mode)).copied().unwrap_or(0)
}

unsafe extern "C" {
    fn pthread_self() -> c_ulong;
    fn pthread_getname_np(thread: c_ulong, name: *mut c_char, len: usize) -> c_int;
}

const GLOBAL: c_int = 0;
