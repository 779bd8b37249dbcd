//! A stand-in for `libcuda.so`: the calls of the CUDA driver that are made here, on the host's memory.
//!
//! Devices are numbers, memory is the host's, and what is enqueued on a stream is done by the call that enqueues it, after it has waited
//! for what is before it. What takes time is only what another stand-in puts on a stream: it takes a ticket there and hands it in when it
//! is done, and events and copies behind it wait.
//!
//! A module's image is the path of a shared library whose functions `void NAME(void **arguments, u64 threads)` do what all threads of
//! the kernel NAME do; `nvrtc.rs` makes them.

#![allow(non_snake_case, reason = "the driver's names")]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// What is on a stream: tickets that were taken and handed in, in order, and what it waits for besides.
struct Stream {
    state: Mutex<Lane>,
    stirred: Condvar,
}

#[derive(Default)]
struct Lane {
    taken: u64,
    done: u64,
    waits_for: Vec<Mark>,
}

/// The place on a stream that is reached when so many tickets are handed in.
#[derive(Clone, Copy)]
struct Mark {
    stream: &'static Stream,
    ticket: u64,
}

/// What had to be done when it was recorded, and when that was.
struct Event {
    marks: Mutex<Vec<Mark>>,
    recorded: Mutex<Option<Instant>>,
}

impl Stream {
    const fn new() -> Self {
        let lane = Lane { taken: 0, done: 0, waits_for: Vec::new() };
        Self { state: Mutex::new(lane), stirred: Condvar::new() }
    }

    fn of(handle: *mut c_void) -> &'static Self {
        static DEFAULT: Stream = Stream::new();
        match handle.addr() {
            0..=2 => &DEFAULT,
            // Made by `cuStreamCreate`, and never freed.
            _ => unsafe { &*handle.cast::<Self>() },
        }
    }

    /// All that has to be done before what is enqueued now.
    fn marks(&'static self) -> Vec<Mark> {
        let mut state = self.state.lock().unwrap();
        state.waits_for.retain(|mark| !mark.is_reached());
        let own = Mark { stream: self, ticket: state.taken };
        state.waits_for.iter().copied().chain([own]).collect()
    }

    fn synchronize(&'static self) {
        self.marks().iter().for_each(Mark::wait);
    }
}

impl Mark {
    fn is_reached(&self) -> bool {
        // A stream that waits for itself waits for what was before, which is in its order anyway.
        self.stream.state.try_lock().is_ok_and(|state| state.done >= self.ticket)
    }

    fn wait(&self) {
        let mut state = self.stream.state.lock().unwrap();
        while state.done < self.ticket {
            state = self.stream.stirred.wait(state).unwrap();
        }
    }
}

/// For other stand-ins: what is enqueued after this waits until [`standInDone`]. Returns the ticket.
#[unsafe(no_mangle)]
pub extern "C" fn standInTake(stream: *mut c_void) -> u64 {
    let mut state = Stream::of(stream).state.lock().unwrap();
    state.taken += 1;
    state.taken
}

/// Waits until it is a ticket's turn on its stream.
#[unsafe(no_mangle)]
pub extern "C" fn standInTurn(stream: *mut c_void, ticket: u64) {
    let stream = Stream::of(stream);
    let waits_for: Vec<Mark> = stream.state.lock().unwrap().waits_for.clone();
    waits_for.iter().for_each(Mark::wait);
    Mark { stream, ticket: ticket - 1 }.wait();
}

/// Hands a ticket in, and all before it.
#[unsafe(no_mangle)]
pub extern "C" fn standInDone(stream: *mut c_void, ticket: u64) {
    let stream = Stream::of(stream);
    let mut state = stream.state.lock().unwrap();
    state.done = state.done.max(ticket);
    stream.stirred.notify_all();
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
    let text = c"stand-in";
    assert!(text.to_bytes_with_nul().len() <= len as usize, "room for the name");
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
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_int {
    let of = match attribute {
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
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
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

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
    if CURRENT.get().is_null() {
        return INVALID_CONTEXT;
    }
    let made: &'static Stream = Box::leak(Box::new(Stream::new()));
    unsafe { *stream = ptr::from_ref(made).cast_mut().cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(_stream: *mut c_void) -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    Stream::of(stream).synchronize();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _flags: c_uint) -> c_int {
    let stream = Stream::of(stream);
    let marks = unsafe { &*event.cast::<Event>() }.marks.lock().unwrap().clone();
    let others = marks.into_iter().filter(|mark| !ptr::eq(mark.stream, stream));
    stream.state.lock().unwrap().waits_for.extend(others);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> c_int {
    if CURRENT.get().is_null() {
        return INVALID_CONTEXT;
    }
    let made = Box::new(Event { marks: Mutex::new(Vec::new()), recorded: Mutex::new(None) });
    unsafe { *event = Box::into_raw(made).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> c_int {
    drop(unsafe { Box::from_raw(event.cast::<Event>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> c_int {
    let event = unsafe { &*event.cast::<Event>() };
    *event.marks.lock().unwrap() = Stream::of(stream).marks();
    *event.recorded.lock().unwrap() = Some(Instant::now());
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: *mut c_void) -> c_int {
    let event = unsafe { &*event.cast::<Event>() };
    if event.marks.lock().unwrap().iter().all(Mark::is_reached) { SUCCESS } else { NOT_READY }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: *mut c_void) -> c_int {
    let marks = unsafe { &*event.cast::<Event>() }.marks.lock().unwrap().clone();
    marks.iter().for_each(Mark::wait);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(ms: *mut f32, start: *mut c_void, end: *mut c_void) -> c_int {
    let at = |event: *mut c_void| *unsafe { &*event.cast::<Event>() }.recorded.lock().unwrap();
    let (Some(start), Some(end)) = (at(start), at(end)) else { return INVALID_VALUE };
    let elapsed: Duration = end.saturating_duration_since(start);
    unsafe { *ms = elapsed.as_secs_f32() * 1e3 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(memory: *mut u64, bytes: usize, _stream: *mut c_void) -> c_int {
    unsafe { cuMemAlloc_v2(memory, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(memory: *mut u64, bytes: usize) -> c_int {
    // As the driver does.
    if bytes == 0 {
        return INVALID_VALUE;
    }
    let made = unsafe { aligned_alloc(256, bytes.next_multiple_of(256)) };
    // What was not written shows.
    unsafe { ptr::write_bytes(made.cast::<u8>(), 0xa5, bytes) };
    unsafe { *memory = made.expose_provenance() as u64 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(memory: u64, _stream: *mut c_void) -> c_int {
    unsafe { free(at(memory)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(memory: u64) -> c_int {
    unsafe { free(at(memory)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
    unsafe { *memory = aligned_alloc(4096, bytes.next_multiple_of(4096)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> c_int {
    unsafe { free(memory) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    dst: u64,
    src: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    unsafe { copy(at(dst), src, bytes, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    dst: *mut c_void,
    src: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    unsafe { copy(dst, at(src), bytes, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    dst: u64,
    src: u64,
    bytes: usize,
    stream: *mut c_void,
) -> c_int {
    unsafe { copy(at(dst), at(src), bytes, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(dst: u64, value: u8, bytes: usize, stream: *mut c_void) -> c_int {
    Stream::of(stream).synchronize();
    unsafe { ptr::write_bytes(at(dst).cast::<u8>(), value, bytes) };
    SUCCESS
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
        _ => c"an error of the stand-in",
    };
    unsafe { *text = of.as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> c_int {
    let library = unsafe { dlopen(image.cast(), RTLD_NOW) };
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
    Stream::of(stream).synchronize();
    let threads = [grid_x, grid_y, grid_z, block_x, block_y, block_z].into_iter().map(u64::from).product();
    // SAFETY: what a module of this stand-in has is such functions.
    unsafe {
        let kernel: extern "C" fn(*mut *mut c_void, u64) = std::mem::transmute(function);
        kernel(arguments, threads);
    }
    SUCCESS
}

unsafe fn copy(dst: *mut c_void, src: *const c_void, bytes: usize, stream: *mut c_void) -> c_int {
    if CURRENT.get().is_null() {
        return INVALID_CONTEXT;
    }
    Stream::of(stream).synchronize();
    unsafe { ptr::copy(src.cast::<u8>(), dst.cast::<u8>(), bytes) };
    SUCCESS
}

fn at(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// `STAND_IN_DEVICES`, or enough for all tests.
fn devices() -> c_int {
    static COUNT: OnceLock<c_int> = OnceLock::new();
    *COUNT.get_or_init(|| std::env::var("STAND_IN_DEVICES").map_or(16, |count| count.parse().unwrap()))
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
const NO_DEVICE: c_int = 100;
const INVALID_CONTEXT: c_int = 201;
const NOT_FOUND: c_int = 500;
const NOT_READY: c_int = 600;
const MULTIPROCESSORS: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const THREADS_PER_BLOCK_MAX: c_int = 1;
const MEMORY_POOLS: c_int = 115;
