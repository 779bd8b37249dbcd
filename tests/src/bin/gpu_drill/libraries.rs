//! The libraries that a rank has loaded, and their versions.
#![allow(unsafe_code, reason = "asks C libraries for their versions")]

use std::ffi::c_int;
use std::fs;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys as driver};
use cudarc::nvrtc::sys as nvrtc;

/// One line for each library: the driver with its CUDA version, NVRTC with its version or why it
/// can't be used, and NCCL if it is loaded. The file of a driver's library has the driver's version
/// in its name.
pub(crate) fn describe(context: &Arc<CudaContext>) -> Vec<String> {
    let mut cuda = 0;
    // SAFETY: the library is loaded, as there is a context; the version goes to a live variable.
    let _ = unsafe { driver::cuDriverGetVersion(&raw mut cuda) };
    let compiled = elasticdl::device::compile(context, EMPTY, "empty.cu");
    let mut lines = vec![format!("driver of CUDA {}.{}", cuda / 1000, cuda / 10 % 100)];
    lines.push(match compiled {
        Ok(_) => {
            let (mut major, mut minor): (c_int, c_int) = (0, 0);
            // SAFETY: the library is loaded, as it has compiled a program; the numbers go to live
            // variables.
            let _ = unsafe { nvrtc::nvrtcVersion(&raw mut major, &raw mut minor) };
            format!("NVRTC {major}.{minor}")
        }
        Err(error) => format!("NVRTC is unusable: {error}"),
    });
    if let Ok(release) = fs::read_to_string("/proc/driver/nvidia/version") {
        lines.extend(release.lines().next().map(|line| line.trim().to_owned()));
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for name in ["libcuda.", "libnccl.", "libnvrtc."] {
        let path = maps.lines().find_map(|line| {
            let path = &line[line.find('/')?..];
            path.rsplit('/').next()?.starts_with(name).then_some(path)
        });
        lines.push(path.map_or_else(|| format!("{name}so is not loaded"), str::to_owned));
    }
    lines
}

const EMPTY: &str = "typedef int empty;";
