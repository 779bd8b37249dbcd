//! Not for users: libraries that stand in for a GPU's, on the host's memory, for tests where there is none.
//!
//! They are compiled when they are first asked for, by the compiler that compiles the tests, and kept beside the tests' binaries.
#![allow(unsafe_code, reason = "loads the libraries that it has just made")]

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs, io, mem, process};

/// Where the stand-ins are, as `libcuda.so`, `libnccl.so.2` and `libnvrtc.so`: a folder for `LD_LIBRARY_PATH`.
///
/// # Panics
/// If they can't be compiled.
#[must_use]
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| build().unwrap_or_else(|error| panic!("the stand-ins can't be made: {error}")))
}

/// Has this process take the stand-ins of the driver and of NVRTC for the real ones, unless it has loaded others already.
///
/// # Panics
/// As for [`folder`]; if they can't be loaded.
pub fn load() {
    static LOADED: OnceLock<()> = OnceLock::new();
    LOADED.get_or_init(|| {
        for name in ["libcuda.so", "libnvrtc.so"] {
            // SAFETY: it was made here. Who asks for the name later is given the library that says that name of itself.
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
        let copied: extern "C" fn() -> u64 = *library.get(b"standInCopied").expect("the stand-in has it");
        copied()
    }
}

/// The stand-in of NCCL with a planned fault; see `stand-ins/nccl.rs` for what there is, and `no_abort`, which lacks a function.
///
/// # Panics
/// As for [`folder`].
#[must_use]
pub fn nccl_with(fault: &str) -> PathBuf {
    folder().join(format!("libnccl.{fault}.so"))
}

/// Makes all of them in a folder named after what they are made of, which then appears as a whole.
fn build() -> io::Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    SOURCES.hash(&mut hasher);
    let beside = env::current_exe()?.parent().map_or_else(env::temp_dir, Path::to_path_buf);
    let folder = beside.join(format!("stand-ins-{:016x}", hasher.finish()));
    if folder.exists() {
        return Ok(folder);
    }
    let making = beside.join(format!("stand-ins-{}", process::id()));
    fs::create_dir_all(&making)?;
    for (name, source) in SOURCES {
        compile(&making, &format!("lib{name}.so"), name, source, &[])?;
    }
    let nccl = SOURCES[1].1;
    compile(&making, "libnccl.no_abort.so", "nccl", nccl, &["--cfg", "lacks_abort"])?;
    fs::copy(making.join("libnccl.so"), making.join("libnccl.so.2"))?;
    for fault in FAULTS {
        fs::copy(making.join("libnccl.so"), making.join(format!("libnccl.{fault}.so")))?;
    }
    // Another process may have been faster; its folder is as good.
    if fs::rename(&making, &folder).is_err() {
        fs::remove_dir_all(&making)?;
    }
    Ok(folder)
}

fn compile(folder: &Path, file: &str, name: &str, source: &str, options: &[&str]) -> io::Result<()> {
    let path = folder.join(format!("{name}.rs"));
    fs::write(&path, source)?;
    let compiler = env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let done = Command::new(compiler)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-O", "-C", "strip=symbols"])
        .args(["-C", &format!("link-arg=-Wl,-soname,lib{name}.so")])
        .args(options)
        .arg("-o")
        .args([&folder.join(file), &path])
        .output()?;
    match done.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&done.stderr).into_owned())),
    }
}

const SOURCES: [(&str, &str); 3] = [
    ("cuda", include_str!("../stand-ins/cuda.rs")),
    ("nccl", include_str!("../stand-ins/nccl.rs")),
    ("nvrtc", include_str!("../stand-ins/nvrtc.rs")),
];

const FAULTS: [&str; 7] =
    ["abort_blocks", "async_error", "init_blocks", "init_fails", "init_hangs", "old", "op_fails"];
