//! Compiles CUDA C at run time with NVRTC, which needs no toolkit.

#![allow(unsafe_code, reason = "calls of a C library; this module owns the program")]

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts, sys};

/// Compiles a program for the GPU of a context. Products and sums are not contracted (`--fmad`), so
/// that results do not depend on the compiler. `name`: the program's, in messages.
///
/// # Errors
/// A message that explains what is missing, or the compiler's.
pub fn compile(context: &Arc<CudaContext>, source: &str, name: &str) -> Result<Ptx, String> {
    find_compiler()?;
    // A driver loads machine code of any compiler of its CUDA's major version. It translates only
    // intermediate code (PTX) of compilers that are not newer than itself.
    let for_this_gpu = context
        .compute_capability()
        .map_err(|error| error.to_string())
        .and_then(|capability| machine_code(source, name, capability));
    match for_this_gpu {
        Ok(code) => return Ok(Ptx::from_binary(code)),
        // For example, the GPU is newer than the compiler.
        Err(reason) => tracing::debug!(reason, name, "no machine code; PTX is compiled"),
    }
    let options =
        CompileOptions { fmad: Some(false), name: Some(name.to_owned()), ..Default::default() };
    compile_ptx_with_opts(source, options).map_err(|error| match error {
        CompileError::CompileError { log, .. } => {
            format!("NVRTC could not compile {name}: {}", log.to_string_lossy())
        }
        other => format!("NVRTC failed: {other}"),
    })
}

fn machine_code(source: &str, name: &str, (major, minor): (i32, i32)) -> Result<Vec<u8>, String> {
    let options = [format!("--gpu-architecture=sm_{major}{minor}"), "--fmad=false".to_owned()];
    let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
    let (source, name) = (text(source)?, text(name)?);
    let failed = |error: NvrtcError| error.to_string();
    let program = Program(result::create_program(&source, Some(&name)).map_err(failed)?);
    let mut size = 0;
    // SAFETY: the program exists; the buffer has the size that the library states.
    unsafe {
        result::compile_program(program.0, &options).map_err(failed)?;
        sys::nvrtcGetCUBINSize(program.0, &raw mut size).result().map_err(failed)?;
        let mut code = vec![0_u8; size];
        sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result().map_err(failed)?;
        Ok(code)
    }
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program exists, and is used no more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Checks that NVRTC is installed: cudarc panics if the library is missing.
fn find_compiler() -> Result<(), String> {
    let mut reason = String::new();
    for name in NAMES {
        // SAFETY: a library with this name is NVIDIA's compiler, whose initialization is safe.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => {
                // Not unloaded: cudarc loads it too, and keeps pointers into it.
                std::mem::forget(library);
                return Ok(());
            }
            Err(error) => reason = error.to_string(),
        }
    }
    let names = NAMES.join(", ");
    Err(format!(
        "NVRTC, which compiles programs for the GPU, is not installed ({names}: {reason}); it is \
         part of the CUDA toolkit, and of the PyPI package nvidia-cuda-nvrtc"
    ))
}

/// Names of the library, in the order in which cudarc tries them.
const NAMES: [&str; 4] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"];
