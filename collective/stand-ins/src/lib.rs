//! Fake CUDA driver, NVRTC and NCCL libraries in host memory, for tests without a GPU.
//!
//! Their sources are in `libraries/`; `build.rs` compiles them.

#![allow(unsafe_code, reason = "loads the libraries that this crate compiles")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Folder of the fake libraries `libcuda.so`, `libnccl.so.2` and `libnvrtc.so`, for
/// `LD_LIBRARY_PATH`.
pub fn folder() -> &'static Path {
    Path::new(env!("OUT_DIR"))
}

/// Loads the fake driver and NVRTC into this process, which then uses them instead of the real
/// ones, unless these are loaded already.
pub fn load() {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        for name in ["libcuda.so", "libnvrtc.so"] {
            // SAFETY: this crate compiles the library. Later lookups of the name return this
            // library, since its soname is the name.
            let library = unsafe { libloading::Library::new(folder().join(name)) };
            mem::forget(library.unwrap_or_else(|error| panic!("{name} can't be loaded: {error}")));
        }
    });
}

/// Number of bytes that this thread has copied between the host and a fake device.
pub fn bytes_copied() -> u64 {
    count(b"fakeBytesCopied")
}

/// Number of bytes that this thread has allocated on fake devices.
pub fn bytes_allocated() -> u64 {
    count(b"fakeBytesAllocated")
}

/// Number of times that this thread has waited for an event or a stream of the fake driver.
pub fn waits() -> u64 {
    count(b"fakeWaits")
}

/// Number of bytes that the fake driver's pools keep when memory is freed.
pub fn release_threshold() -> u64 {
    count(b"fakeReleaseThreshold")
}

/// Numbers of calls by threads of this name that end a capture of a CUDA graph in another thread,
/// and of such calls that do not, as the thread's capture mode is relaxed.
pub fn calls_during_captures(thread: &CStr) -> [u64; 2] {
    load();
    // SAFETY: this crate compiles the library, which exports this function.
    unsafe {
        let library = libloading::Library::new("libcuda.so").expect("the library was just loaded");
        let calls: extern "C" fn(*const c_char, c_int) -> u64 =
            *library.get(b"fakeUncapturedCalls").expect("the fake driver exports it");
        [GLOBAL, RELAXED].map(|mode| calls(thread.as_ptr(), mode))
    }
}

/// Capture modes.
const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;

fn count(name: &[u8]) -> u64 {
    load();
    // SAFETY: this crate compiles the library, which exports functions of this type.
    unsafe {
        let library = libloading::Library::new("libcuda.so").expect("the library was just loaded");
        let count: extern "C" fn() -> u64 = *library.get(name).expect("the fake driver exports it");
        count()
    }
}

/// Most operations of the fake NCCL that were on one stream of this process at once.
pub fn most_operations() -> u64 {
    count(b"fakeMostTickets")
}

/// Work on a stream of the fake driver that ends when this is dropped.
#[derive(Debug)]
pub struct Hold {
    stream: *mut c_void,
    ticket: u64,
}

impl Hold {
    /// Enqueues the work.
    pub fn on(stream: *mut c_void) -> Self {
        load();
        // SAFETY: this crate compiles the library, which exports this function.
        let ticket = unsafe {
            let library = libloading::Library::new("libcuda.so").expect("the library was loaded");
            let reserve: extern "C" fn(*mut c_void) -> u64 =
                *library.get(b"fakeStreamReserve").expect("the fake driver exports it");
            reserve(stream)
        };
        Self { stream, ticket }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe {
            let library = libloading::Library::new("libcuda.so").expect("the library was loaded");
            let complete: extern "C" fn(*mut c_void, u64) =
                *library.get(b"fakeStreamComplete").expect("the fake driver exports it");
            complete(self.stream, self.ticket);
        }
    }
}

/// Number of communicators that the fake NCCL `init_refused` has returned with an error, and that
/// have not been aborted.
pub fn refused_communicators() -> i32 {
    nccl_count("init_refused", b"fakeRefusedCommunicators")
}

/// Number of polls that the fake NCCL `poll_lasts` has prolonged or is prolonging.
pub fn long_polls() -> i32 {
    nccl_count("poll_lasts", b"fakeLongPolls")
}

fn nccl_count(fault: &str, name: &[u8]) -> i32 {
    // SAFETY: this crate compiles the library, which exports functions of this type.
    unsafe {
        let library = libloading::Library::new(nccl_with(fault)).expect("it exists");
        let count: extern "C" fn() -> i32 = *library.get(name).expect("the fake NCCL exports it");
        count()
    }
}

/// Path of the fake NCCL with a fault; see `libraries/nccl.rs` for the faults, and `no_abort`,
/// which lacks a function.
pub fn nccl_with(fault: &str) -> PathBuf {
    folder().join(format!("libnccl.{fault}.so"))
}
