//! Compiles the fake libraries with the compiler of the tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=libraries");
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    compile("cuda", &folder.join("libcuda.so"), &[])?;
    compile("nvrtc", &folder.join("libnvrtc.so"), &[])?;
    compile("nccl", &folder.join("libnccl.so.2"), &[])?;
    compile("nccl", &folder.join("libnccl.no_abort.so"), &["--cfg", "lacks_abort"])?;
    for fault in FAULTS {
        fs::copy(folder.join("libnccl.so.2"), folder.join(format!("libnccl.{fault}.so")))?;
    }
    Ok(())
}

fn compile(name: &str, library: &Path, options: &[&str]) -> io::Result<()> {
    let done = Command::new(env::var_os("RUSTC").expect("cargo sets RUSTC"))
        .args(["--edition", "2024", "--crate-type", "cdylib", "-O", "-C", "strip=symbols"])
        .args(["-C", &format!("link-arg=-Wl,-soname,lib{name}.so")])
        .args(options)
        .arg("-o")
        .arg(library)
        .arg(format!("libraries/{name}.rs"))
        .status()?;
    if done.success() { Ok(()) } else { Err(io::Error::other(format!("{name} can't be compiled"))) }
}

/// Faults of the fake NCCL, each selected by the library's file name.
const FAULTS: [&str; 11] = [
    "abort_blocks",
    "abort_lasts",
    "async_error",
    "init_blocks",
    "init_fails",
    "init_hangs",
    "init_refused",
    "no_host_memory",
    "old",
    "op_fails",
    "poll_lasts",
];
