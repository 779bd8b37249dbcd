//! Binding of the functions of `libnccl` that this crate uses.
#![allow(unsafe_code, reason = "calls into a C library that is loaded at run time")]

use std::env;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::RangeInclusive;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use super::call::CallKind;
use crate::device::{DeviceError, Dtype};

/// A loaded NCCL library. It is never unloaded: its own threads may run in it.
pub struct Library {
    name: String,
    version: i32,
    calls: Calls,
    _library: ManuallyDrop<libloading::Library>,
}

/// Unique id by which the ranks of a new communicator find each other. Created on one rank, and
/// valid for one communicator.
#[derive(Clone, Copy, Eq, PartialEq)]
#[repr(C)]
pub struct UniqueId([u8; UNIQUE_ID_BYTES]);

/// `ncclComm_t`: valid from its initialization to its abort, and used by one thread at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Handle(*mut c_void);

/// Buffers of a call.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Address in device memory of what is read.
    pub src: u64,
    /// Address in device memory of what is written; it may be that of `src`, or have another place.
    pub dst: u64,
    /// Length in elements: see [`CallKind`].
    pub len: usize,
    /// Type of the elements.
    pub dtype: Dtype,
}

/// Status of the last request to the library.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum CallStatus {
    Done,
    InProgress,
}

// SAFETY: NCCL's functions may be called from any thread. The handle is an opaque address here, and
// its owner serializes the calls.
unsafe impl Send for Handle {}

impl Library {
    /// Loads the system's NCCL.
    ///
    /// # Errors
    /// [`DeviceError::NoLibrary`], [`DeviceError::NoSymbol`], [`DeviceError::NcclVersion`].
    pub fn find() -> Result<Arc<Self>, DeviceError> {
        let mut reason = String::new();
        for name in NAMES {
            match Self::load(OsStr::new(name)) {
                Ok(library) => return Self::link(name.to_owned(), library),
                Err(error) => reason = error,
            }
        }
        Err(DeviceError::NoLibrary { library: NAMES.join(", "), reason })
    }

    /// Loads NCCL from this file.
    ///
    /// # Errors
    /// As for [`find`](Self::find).
    pub fn open(path: &Path) -> Result<Arc<Self>, DeviceError> {
        let name = path.display().to_string();
        match Self::load(path.as_os_str()) {
            Ok(library) => Self::link(name, library),
            Err(reason) => Err(DeviceError::NoLibrary { library: name, reason }),
        }
    }

    /// Version in NCCL's encoding: 22 809 is 2.28.9.
    #[must_use]
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Creates the unique id of a new communicator. This process has to live until all ranks have
    /// connected.
    ///
    /// # Errors
    /// [`DeviceError::Nccl`].
    pub fn unique_id(&self) -> Result<UniqueId, DeviceError> {
        let mut id = [0; UNIQUE_ID_BYTES];
        // SAFETY: the function writes `UNIQUE_ID_BYTES` bytes there.
        let code = unsafe { (self.calls.get_unique_id)(id.as_mut_ptr().cast()) };
        self.done("create a unique id", code)?;
        Ok(UniqueId(id))
    }

    /// Begins to create a communicator on the thread's current device, and returns its handle at
    /// once.
    pub(crate) fn begin(
        &self,
        id: &UniqueId,
        rank: usize,
        world: usize,
    ) -> Result<(Handle, CallStatus), DeviceError> {
        let mut config = Config {
            size: size_of::<Config>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            ctas_min: UNDEFINED,
            ctas_max: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        };
        let mut handle = ptr::null_mut();
        let (world, rank) = (to_c_int(world), to_c_int(rank));
        // SAFETY: the id is passed by value, as C passes a structure of this size. The
        // configuration states its own size and version, and the library reads no field beyond
        // those.
        let code = unsafe {
            (self.calls.comm_init_rank_config)(&mut handle, world, *id, rank, &mut config)
        };
        let begun = self.status("create a communicator", code);
        if begun.is_err() && !handle.is_null() {
            // SAFETY: the handle is used nowhere else.
            if let Err(error) = unsafe { self.abort(Handle(handle)) } {
                tracing::debug!(%error, "an abort of NCCL failed");
            }
        }
        Ok((Handle(handle), begun?))
    }

    /// Returns the status of the communicator's last request.
    ///
    /// # Safety
    /// `handle` has not been aborted, and no other thread uses it.
    pub(crate) unsafe fn poll(
        &self,
        action: &'static str,
        handle: Handle,
    ) -> Result<CallStatus, DeviceError> {
        let mut state = SUCCESS;
        // SAFETY: guaranteed by the caller; the state is written to a live variable.
        let code = unsafe { (self.calls.comm_get_async_error)(handle.0, &mut state) };
        self.done(action, code)?;
        self.status(action, state)
    }

    /// Enqueues an operation on `stream`.
    ///
    /// # Safety
    /// As for [`poll`](Self::poll). The buffers stay valid until the stream has completed the
    /// operation, and have the stated lengths.
    pub(crate) unsafe fn enqueue(
        &self,
        kind: CallKind,
        handle: Handle,
        buffers: Buffers,
        stream: *mut c_void,
    ) -> Result<CallStatus, DeviceError> {
        let Buffers { src, dst, len, dtype } = buffers;
        let (src, dst, dtype) = (address(src), address(dst), code_of(dtype));
        let calls = &self.calls;
        // SAFETY: guaranteed by the caller.
        let code = unsafe {
            match kind {
                CallKind::AllGather => (calls.all_gather)(src, dst, len, dtype, handle.0, stream),
                CallKind::AllReduce => {
                    (calls.all_reduce)(src, dst, len, dtype, SUM, handle.0, stream)
                }
                CallKind::Broadcast { root } => {
                    (calls.broadcast)(src, dst, len, dtype, to_c_int(root), handle.0, stream)
                }
                CallKind::ReduceScatter => {
                    (calls.reduce_scatter)(src, dst, len, dtype, SUM, handle.0, stream)
                }
            }
        };
        self.status(kind.action(), code)
    }

    /// Begins to finalize a communicator: outstanding operations complete, also for its peers.
    ///
    /// # Safety
    /// As for [`poll`](Self::poll).
    pub(crate) unsafe fn finalize(&self, handle: Handle) -> Result<CallStatus, DeviceError> {
        // SAFETY: guaranteed by the caller.
        let code = unsafe { (self.calls.comm_finalize)(handle.0) };
        self.status("finalize the communicator", code)
    }

    /// Aborts the communicator's operations and frees it. May block.
    ///
    /// # Safety
    /// `handle` has not been aborted before. Another thread may be in a call with it, but does not
    /// begin one.
    pub(crate) unsafe fn abort(&self, handle: Handle) -> Result<(), DeviceError> {
        // SAFETY: guaranteed by the caller.
        let code = unsafe { (self.calls.comm_abort)(handle.0) };
        self.status("abort the communicator", code).map(drop)
    }

    fn load(name: &OsStr) -> Result<libloading::Library, String> {
        // SAFETY: the system's library of this name, or the file that the user has chosen, is an
        // NCCL, which is made to be loaded.
        unsafe { libloading::Library::new(name) }
            .map_err(|error| DeviceError::loader_message(&error))
    }

    fn link(name: String, library: libloading::Library) -> Result<Arc<Self>, DeviceError> {
        let library = ManuallyDrop::new(library);
        let calls = Calls::of(&name, &library)?;
        let mut version = 0;
        // SAFETY: the version is written to a live variable.
        let code = unsafe { (calls.get_version)(&mut version) };
        let library = Self { name, version, calls, _library: library };
        library.done("report its version", code)?;
        if version < VERSION_MIN {
            return Err(DeviceError::NcclVersion { found: version });
        }
        Ok(Arc::new(library))
    }

    fn done(&self, action: &'static str, code: c_int) -> Result<(), DeviceError> {
        match code {
            SUCCESS => Ok(()),
            code => Err(DeviceError::Nccl { action, code, reason: self.reason(code) }),
        }
    }

    fn status(&self, action: &'static str, code: c_int) -> Result<CallStatus, DeviceError> {
        match code {
            SUCCESS => Ok(CallStatus::Done),
            IN_PROGRESS => Ok(CallStatus::InProgress),
            code => Err(DeviceError::Nccl { action, code, reason: self.reason(code) }),
        }
    }

    fn reason(&self, code: c_int) -> String {
        let text = self.text(code);
        let is_affected = HOST_ALLOCATIONS.contains(&self.version);
        if code != UNHANDLED_CUDA_ERROR || !is_affected || env::var_os(HOST_SETTING).is_some() {
            return text;
        }
        format!("{text}; in a container, this version may need {HOST_SETTING}=0 in its environment")
    }

    fn text(&self, code: c_int) -> String {
        // SAFETY: the library returns a static string or null.
        let text = unsafe { (self.calls.get_error_string)(code) };
        if text.is_null() {
            return "unknown error".to_owned();
        }
        // SAFETY: the string is terminated by a zero.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        // SAFETY: the argument is unused; the library returns a string of its own or null.
        let last = unsafe { (self.calls.get_last_error)(ptr::null_mut()) };
        if last.is_null() {
            return text.into_owned();
        }
        // SAFETY: as above.
        match unsafe { CStr::from_ptr(last) }.to_string_lossy().trim() {
            "" => text.into_owned(),
            last => format!("{text}: {last}"),
        }
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("version", &self.version).finish()
    }
}

impl UniqueId {
    /// Creates an id from bytes received over the host group.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Bytes of the id, to be sent over the host group.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}

macro_rules! calls {
    ($($name:ident: $symbol:literal = fn($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of the library, named without the prefix `nccl`.
        struct Calls {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Calls {
            fn of(name: &str, library: &libloading::Library) -> Result<Self, DeviceError> {
                let missing = |symbol| DeviceError::NoSymbol { library: name.to_owned(), symbol };
                Ok(Self {
                    // SAFETY: the function of this name has had this type in all versions since
                    // 2.18.
                    $($name: *unsafe { library.get($symbol.as_bytes()) }
                        .map_err(|_| missing($symbol))?,)*
                })
            }
        }
    };
}

calls! {
    all_gather: "ncclAllGather"
        = fn(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> c_int;
    all_reduce: "ncclAllReduce"
        = fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    broadcast: "ncclBroadcast"
        = fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    comm_abort: "ncclCommAbort" = fn(*mut c_void) -> c_int;
    comm_finalize: "ncclCommFinalize" = fn(*mut c_void) -> c_int;
    comm_get_async_error: "ncclCommGetAsyncError" = fn(*mut c_void, *mut c_int) -> c_int;
    comm_init_rank_config: "ncclCommInitRankConfig"
        = fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int;
    get_error_string: "ncclGetErrorString" = fn(c_int) -> *const c_char;
    get_last_error: "ncclGetLastError" = fn(*mut c_void) -> *const c_char;
    get_unique_id: "ncclGetUniqueId" = fn(*mut c_void) -> c_int;
    get_version: "ncclGetVersion" = fn(*mut c_int) -> c_int;
    reduce_scatter: "ncclReduceScatter"
        = fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
}

/// `ncclConfig_t` as of 2.18. Later versions have more fields after these, and use defaults for
/// them if a configuration states this version.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Since 2.26, which reads it whatever version the structure states; padding before.
    traffic_class: c_int,
}

fn address(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(address as usize)
}

fn code_of(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::Bf16 => 9,
        Dtype::Byte => 1,
        Dtype::F16 => 6,
        Dtype::F32 => 7,
    }
}

fn to_c_int(rank: usize) -> c_int {
    c_int::try_from(rank).expect("group sizes are limited")
}

/// File names of the library. The PyPI package has the first name only.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// First version whose abort on another thread joins the initialization. Versions before 2.27.3
/// keep a communicator's jobs in memory of the thread that called last, so that this thread has to
/// outlive the communicator.
const VERSION_MIN: i32 = 21_900;
/// Versions that allocate host memory in a way that containers without the capability SYS_NICE do
/// not allow, with drivers of CUDA 12.6 and newer. Later ones notice that.
const HOST_ALLOCATIONS: RangeInclusive<i32> = 22_400..=22_604;
const HOST_SETTING: &str = "NCCL_CUMEM_HOST_ENABLE";
const CONFIG_VERSION: c_uint = 21_800;
const CONFIG_MAGIC: c_uint = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;
const UNIQUE_ID_BYTES: usize = 128;
const SUCCESS: c_int = 0;
const UNHANDLED_CUDA_ERROR: c_int = 1;
const IN_PROGRESS: c_int = 7;
const SUM: c_int = 0;
