//! Faults of the fake NCCL, by the name of its file.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

/// Fault of a library with this file name:
///
/// `abort_blocks`: an abort does nothing and never returns. `abort_lasts`: an abort ends the
/// operations, and never returns. `async_error`: the second operation reports a remote error and
/// never completes. `init_blocks`: the call that begins the initialization never returns.
/// `init_fails`: the initialization ends with an error. `init_refused`: the call that begins the
/// initialization returns an error, and a communicator that has to be aborted; the library counts
/// these. `init_hangs`: the initialization never ends. `no_host_memory`: the version is 2.26.2, and
/// the initialization ends with an error of CUDA. `old`: the version is 2.17.8. `op_fails`: the
/// second operation is refused. `poll_lasts`: a poll after an operation takes seconds, as if its
/// thread got no processor.
pub fn fault() -> &'static str {
    static FAULT: OnceLock<String> = OnceLock::new();
    FAULT.get_or_init(|| {
        let mut info =
            Info { file: ptr::null(), base: ptr::null(), name: ptr::null(), at: ptr::null() };
        let found = unsafe { dladdr(fault as *const c_void, &mut info) };
        assert!(found != 0 && !info.file.is_null(), "a library knows its file");
        let path = unsafe { CStr::from_ptr(info.file) }.to_str().unwrap().to_owned();
        let name = path.rsplit('/').next().unwrap().to_owned();
        name.strip_prefix("libnccl.")
            .and_then(|rest| rest.strip_suffix(".so"))
            .unwrap_or("")
            .to_owned()
    })
}

#[repr(C)]
struct Info {
    file: *const c_char,
    base: *const c_void,
    name: *const c_char,
    at: *const c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, info: *mut Info) -> c_int;
}
