//! Libraries that stand in for a GPU's, on the host's memory, for tests where there is none.
//!
//! What they do stands in `libraries/`; `build.rs` compiles them.

#![allow(unsafe_code, reason = "loads the libraries that were made with it")]

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where the stand-ins are, as `libcuda.so`, `libnccl.so.2` and `libnvrtc.so`: a folder for
/// `LD_LIBRARY_PATH`.
#[must_use]
pub fn folder() -> &'static Path {
    Path::new(env!("OUT_DIR"))
}

/// Has this process take the stand-ins of the driver and of NVRTC for the real ones, unless it has
/// loaded others already.
///
/// # Panics
/// If they can't be loaded.
pub fn load() {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        for name in ["libcuda.so", "libnvrtc.so"] {
            // SAFETY: it was made here. Who asks for the name later is given the library that says
            // that name of itself.
            let library = unsafe { libloading::Library::new(folder().join(name)) };
            mem::forget(library.unwrap_or_else(|error| panic!("{name} can't be loaded: {error}")));
        }
    });
}

/// How many bytes this thread has had copied between the host and a stand-in's device.
///
/// # Panics
/// As for [`load`].
#[must_use]
pub fn bytes_copied() -> u64 {
    load();
    // SAFETY: it was made here, and has this function.
    unsafe {
        let library = libloading::Library::new("libcuda.so").expect("it was just loaded");
        let copied: extern "C" fn() -> u64 =
            *library.get(b"fakeBytesCopied").expect("the stand-in has it");
        copied()
    }
}

/// The stand-in of NCCL with a planned fault; see `libraries/nccl.rs` for what there is, and
/// `no_abort`, which lacks a function.
#[must_use]
pub fn nccl_with(fault: &str) -> PathBuf {
    folder().join(format!("libnccl.{fault}.so"))
}
