//! Fake `libnvrtc.so`: compiles a program with the host's C compiler to a shared library, whose
//! path is the image for `cuda.rs`. In the program `__CUDACC__` is not defined, and the program
//! defines functions for its kernels itself.

#![allow(non_snake_case, reason = "the library's names")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{env, fs, process, ptr};

#[derive(Default)]
struct Program {
    source: Vec<u8>,
    image: CString,
    log: CString,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut c_void,
    source: *const c_char,
    _name: *const c_char,
    _headers: c_int,
    _header_texts: *const *const c_char,
    _header_names: *const *const c_char,
) -> c_int {
    let source = unsafe { CStr::from_ptr(source) }.to_bytes().to_vec();
    unsafe { *program = Box::into_raw(Box::new(Program { source, ..Program::default() })).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut c_void,
    _options: c_int,
    _option_texts: *const *const c_char,
) -> c_int {
    static PROGRAMS: AtomicU64 = AtomicU64::new(0);
    let program = unsafe { &mut *program.cast::<Program>() };
    let name = format!("fake-nvrtc-{}-{}", process::id(), PROGRAMS.fetch_add(1, Ordering::Relaxed));
    let (source, library) =
        (env::temp_dir().join(format!("{name}.c")), env::temp_dir().join(format!("{name}.so")));
    fs::write(&source, &program.source).unwrap();
    let compiled = Command::new("cc")
        .args(["-O2", "-ffp-contract=off", "-fPIC", "-shared", "-o"])
        .args([&library, &source])
        .arg("-lm")
        .output()
        .unwrap();
    let _ = fs::remove_file(&source);
    program.log = CString::new(compiled.stderr).unwrap();
    program.image = CString::new(library.to_str().unwrap()).unwrap();
    if compiled.status.success() { SUCCESS } else { ERROR_COMPILATION }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut c_void) -> c_int {
    drop(unsafe { Box::from_raw((*program).cast::<Program>()) });
    unsafe { *program = ptr::null_mut() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetPTXSize(program: *mut c_void, size: *mut usize) -> c_int {
    unsafe { *size = (*program.cast::<Program>()).image.as_bytes_with_nul().len() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetPTX(program: *mut c_void, image: *mut c_char) -> c_int {
    unsafe { give(&(*program.cast::<Program>()).image, image) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(program: *mut c_void, size: *mut usize) -> c_int {
    unsafe { nvrtcGetPTXSize(program, size) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: *mut c_void, image: *mut c_char) -> c_int {
    unsafe { nvrtcGetPTX(program, image) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(program: *mut c_void, size: *mut usize) -> c_int {
    unsafe { *size = (*program.cast::<Program>()).log.as_bytes_with_nul().len() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(program: *mut c_void, log: *mut c_char) -> c_int {
    unsafe { give(&(*program.cast::<Program>()).log, log) }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(_code: c_int) -> *const c_char {
    c"the host's C compiler failed".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    unsafe { (*major, *minor) = (13, 0) };
    SUCCESS
}

unsafe fn give(text: &CStr, place: *mut c_char) -> c_int {
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), place, text.to_bytes_with_nul().len()) };
    SUCCESS
}

const SUCCESS: c_int = 0;
const ERROR_COMPILATION: c_int = 6;
