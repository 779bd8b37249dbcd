//! Fake `libcuda.so`: the CUDA driver calls that this workspace makes, on host memory.
//!
//! Devices are numbers, and device memory is host memory. Work on a stream is executed as late as
//! possible: when the caller queries or waits for it. So accesses that are too early are detected.
//! As in the driver, a copy between the device and pageable host memory is synchronous. Another
//! fake library can put asynchronous work on a stream: it reserves a ticket, and completes it
//! later.
//!
//! The image of a module is the path of a shared library. Its functions `void NAME(void
//! **arguments, u64 threads)` do the work of all threads of the kernel NAME; `nvrtc.rs` creates
//! such libraries.

#![allow(non_snake_case, reason = "the driver's names")]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

mod capture;
mod streams;

use streams::{CHANGED, Mark, Work, number, queues, synchronize, wait_for};

/// Point on a stream when the event was recorded, and the time of the recording.
#[derive(Default)]
struct Event {
    mark: Option<Mark>,
    recorded: Option<Instant>,
}

/// For other fake libraries: reserves a ticket on a stream. Work that is enqueued later waits until
/// [`fakeStreamComplete`].
#[unsafe(no_mangle)]
pub extern "C" fn fakeStreamReserve(stream: *mut c_void) -> u64 {
    queues().push(stream, Work::Ticket(false)).done
}

/// Most tickets that were open on one stream at once.
#[unsafe(no_mangle)]
pub extern "C" fn fakeMostTickets() -> u64 {
    queues().most_tickets as u64
}

/// Waits until all work before a ticket is done.
#[unsafe(no_mangle)]
pub extern "C" fn fakeStreamAwaitTurn(stream: *mut c_void, ticket: u64) {
    wait_for(Mark { stream: number(stream), done: ticket - 1 });
}

/// Completes a ticket.
#[unsafe(no_mangle)]
pub extern "C" fn fakeStreamComplete(stream: *mut c_void, ticket: u64) {
    let mut queues = queues();
    if let Some(stream) = queues.streams.get_mut(&number(stream)) {
        let index = (ticket - stream.done - 1) as usize;
        stream.queue[index] = Work::Ticket(true);
    }
    CHANGED.notify_all();
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    if devices() == 0 { NO_DEVICE } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = 13_000 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    unsafe { *count = devices() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    unsafe { *device = ordinal };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> c_int {
    let text = c"fake";
    assert!(text.to_bytes_with_nul().len() <= len as usize, "the buffer holds the name");
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), name, text.to_bytes_with_nul().len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    unsafe { *uuid = [device as u8; 16] };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> c_int {
    unsafe { *bytes = 1 << 33 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    unsafe { (*free, *total) = (1 << 33, 1 << 33) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    let of = match attribute {
        PCI_BUS_ID => device,
        MULTIPROCESSORS => 4,
        CAPABILITY_MAJOR => 9,
        THREADS_PER_BLOCK_MAX => 1024,
        MEMORY_POOLS => 1,
        _ => 0,
    };
    unsafe { *value = of };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut *mut c_void,
    device: c_int,
) -> c_int {
    unsafe { *context = ptr::without_provenance_mut(0x1000 + device as usize) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    SUCCESS
}

thread_local! {
    static CURRENT: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    unsafe { *context = CURRENT.get() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    CURRENT.set(context);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetFlags(_flags: c_uint) -> c_int {
    SUCCESS
}

/// The default pool keeps no memory at first, as the driver's.
static RELEASE_THRESHOLD: AtomicU64 = AtomicU64::new(0);

/// The number of bytes that the default pool keeps.
#[unsafe(no_mangle)]
pub extern "C" fn fakeReleaseThreshold() -> u64 {
    RELEASE_THRESHOLD.load(Ordering::Relaxed)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut *mut c_void, device: c_int) -> c_int {
    unsafe { *pool = ptr::without_provenance_mut(0x2000 + device as usize) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolSetAttribute(
    _pool: *mut c_void,
    attribute: c_int,
    value: *const c_void,
) -> c_int {
    if attribute == MEMPOOL_RELEASE_THRESHOLD {
        RELEASE_THRESHOLD.store(unsafe { value.cast::<u64>().read() }, Ordering::Relaxed);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
    if CURRENT.get().is_null() {
        return INVALID_CONTEXT;
    }
    let mut queues = queues();
    queues.streams_ever += 8;
    unsafe { *stream = ptr::without_provenance_mut(queues.streams_ever) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int {
    let mut queues = queues();
    let end = queues.end(stream);
    if queues.reach(end) {
        queues.streams.remove(&number(stream));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    WAITS.set(WAITS.get() + 1);
    synchronize(stream);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(
    stream: *mut c_void,
    event: *mut c_void,
    _flags: c_uint,
) -> c_int {
    let Some(mark) = event_of(event).mark else { return SUCCESS };
    // Work on the same stream is ordered anyway.
    if mark.stream != number(stream) {
        queues().push(stream, Work::WaitFor(vec![mark]));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> c_int {
    if CURRENT.get().is_null() {
        return INVALID_CONTEXT;
    }
    unsafe { *event = Box::into_raw(Box::new(Mutex::new(Event::default()))).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    drop(unsafe { Box::from_raw(event.cast::<Mutex<Event>>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    let mark = queues().end(stream);
    *event_of(event) = Event { mark: Some(mark), recorded: Some(Instant::now()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    capture::note();
    let mark = event_of(event).mark;
    let is_done = mark.is_none_or(|mark| queues().reach(mark));
    if is_done { SUCCESS } else { NOT_READY }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: *mut c_void) -> c_int {
    WAITS.set(WAITS.get() + 1);
    let mark = event_of(event).mark;
    mark.into_iter().for_each(wait_for);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(
    ms: *mut f32,
    start: *mut c_void,
    end: *mut c_void,
) -> c_int {
    let (Some(start), Some(end)) = (event_of(start).recorded, event_of(end).recorded) else {
        return INVALID_VALUE;
    };
    let elapsed: Duration = end.saturating_duration_since(start);
    unsafe { *ms = elapsed.as_secs_f32() * 1e3 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(
    memory: *mut u64,
    bytes: usize,
    _stream: *mut c_void,
) -> c_int {
    unsafe { cuMemAlloc_v2(memory, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(memory: *mut u64, bytes: usize) -> c_int {
    // As in the driver.
    if bytes == 0 {
        return INVALID_VALUE;
    }
    ALLOCATED.set(ALLOCATED.get() + bytes as u64);
    let made = unsafe { aligned_alloc(256, bytes.next_multiple_of(256)) };
    // Makes reads of uninitialized memory visible.
    unsafe { ptr::write_bytes(made.cast::<u8>(), 0xa5, bytes) };
    unsafe { *memory = made.expose_provenance() as u64 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(memory: u64, stream: *mut c_void) -> c_int {
    queues().push(stream, Work::Free(memory as usize));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(memory: u64) -> c_int {
    unsafe { free(at(memory)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(
    memory: *mut *mut c_void,
    bytes: usize,
    _flags: c_uint,
) -> c_int {
    let made = unsafe { aligned_alloc(4096, bytes.next_multiple_of(4096)) };
    queues().locked.insert(made.expose_provenance(), bytes);
    unsafe { *memory = made };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> c_int {
    queues().locked.remove(&memory.addr());
    unsafe { free(memory) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(
    memory: *mut c_void,
    bytes: usize,
    _flags: c_uint,
) -> c_int {
    capture::note();
    let is_new = queues().locked.insert(memory.expose_provenance(), bytes).is_none();
    assert!(is_new, "the memory is locked already");
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(memory: *mut c_void) -> c_int {
    let mut queues = queues();
    let removed = queues.locked.remove(&memory.addr());
    let bytes = removed.unwrap_or(0);
    assert!(!queues.is_copied(memory.addr()..memory.addr() + bytes), "a copy is in progress");
    if removed.is_some() { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    dst: u64,
    src: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    copy(dst as usize, src.expose_provenance(), src.expose_provenance(), bytes, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    dst: *mut c_void,
    src: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    copy(dst.expose_provenance(), src as usize, dst.expose_provenance(), bytes, stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    dst: u64,
    src: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    push(stream, Work::Copy { src: src as usize, dst: dst as usize, bytes })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    dst: u64,
    value: u8,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    push(stream, Work::Fill { dst: dst as usize, value, bytes })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(_code: c_int, name: *mut *const c_char) -> c_int {
    unsafe { *name = c"CUDA_ERROR".as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int {
    let of = match code {
        INVALID_CONTEXT => c"invalid context",
        INVALID_VALUE => c"invalid value",
        NOT_FOUND => c"not found",
        _ => c"an error of the fake driver",
    };
    unsafe { *text = of.as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> c_int {
    let library = unsafe { dlopen(image.cast(), RTLD_NOW) };
    // The file is loaded, or useless.
    let path = unsafe { std::ffi::CStr::from_ptr(image.cast()) };
    let _ = std::fs::remove_file(path.to_string_lossy().as_ref());
    unsafe { *module = library };
    if library.is_null() { NOT_FOUND } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(_module: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    let code = unsafe { dlsym(module, name) };
    unsafe { *function = code };
    if code.is_null() { NOT_FOUND } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared_bytes: c_uint,
    stream: *mut c_void,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    synchronize(stream);
    let threads =
        [grid_x, grid_y, grid_z, block_x, block_y, block_z].into_iter().map(u64::from).product();
    // SAFETY: the modules of this fake library contain functions of this type.
    unsafe {
        let kernel: extern "C" fn(*mut *mut c_void, u64) = std::mem::transmute(function);
        kernel(arguments, threads);
    }
    SUCCESS
}

/// Number of bytes that this thread has copied between host and device.
#[unsafe(no_mangle)]
pub extern "C" fn fakeBytesCopied() -> u64 {
    COPIED.get()
}

/// Number of bytes that this thread has allocated on devices.
#[unsafe(no_mangle)]
pub extern "C" fn fakeBytesAllocated() -> u64 {
    ALLOCATED.get()
}

/// Number of times that this thread has waited for a stream or an event.
#[unsafe(no_mangle)]
pub extern "C" fn fakeWaits() -> u64 {
    WAITS.get()
}

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
    static COPIED: Cell<u64> = const { Cell::new(0) };
    static WAITS: Cell<u64> = const { Cell::new(0) };
}

/// Enqueues a copy between host and device; `host` is the address on the host.
fn copy(dst: usize, src: usize, host: usize, bytes: usize, stream: *mut c_void) -> c_int {
    COPIED.set(COPIED.get() + bytes as u64);
    let code = push(stream, Work::Copy { src, dst, bytes });
    if code == SUCCESS && !queues().is_locked(host) {
        synchronize(stream);
    }
    code
}

fn push(stream: *mut c_void, work: Work) -> c_int {
    if CURRENT.get().is_null() {
        return INVALID_CONTEXT;
    }
    queues().push(stream, work);
    SUCCESS
}

fn event_of<'a>(event: *mut c_void) -> MutexGuard<'a, Event> {
    unsafe { &*event.cast::<Mutex<Event>>() }.lock().unwrap()
}

fn at(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Number of devices: `STAND_IN_DEVICES`, or enough for all tests.
fn devices() -> c_int {
    static COUNT: OnceLock<c_int> = OnceLock::new();
    *COUNT.get_or_init(|| {
        std::env::var("STAND_IN_DEVICES").map_or(16, |count| count.parse().unwrap())
    })
}

unsafe extern "C" {
    fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void;
    fn free(memory: *mut c_void);
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

const RTLD_NOW: c_int = 2;
const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const MEMPOOL_RELEASE_THRESHOLD: c_int = 4;
const LEGACY_STREAM: usize = 1;
const PER_THREAD_STREAM: usize = 2;
const NO_DEVICE: c_int = 100;
const INVALID_CONTEXT: c_int = 201;
const NOT_FOUND: c_int = 500;
const NOT_READY: c_int = 600;
const MULTIPROCESSORS: c_int = 16;
const PCI_BUS_ID: c_int = 33;
const CAPABILITY_MAJOR: c_int = 75;
const THREADS_PER_BLOCK_MAX: c_int = 1;
const MEMORY_POOLS: c_int = 115;
