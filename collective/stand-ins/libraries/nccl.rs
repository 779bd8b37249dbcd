//! Fake `libnccl.so`: the NCCL calls that this workspace makes, between threads and processes of
//! one host.
//!
//! The process that creates the unique id runs a hub: a thread that the ranks connect to, and that
//! computes each operation once all ranks have sent their contributions. A rank has a thread that
//! executes the enqueued operations in order, while the stream (of the fake `cuda.rs`) waits. The
//! loss of a rank is not detected: as with NCCL, the other ranks wait until they are aborted.
//!
//! As in NCCL since 2.23, an operation is in progress until that thread has launched it. As in NCCL
//! before 2.27.3, an abort uses memory of the thread that called the communicator last, which must
//! not have ended. An abort on a thread without a context would create one on GPU 0; here it ends
//! the process. With STAND_IN_CHECKS_EXIT=1, so does an exit with a communicator that is not
//! released, which takes STAND_IN_RELEASE_MS milliseconds, or 5.
//!
//! The library's file name, `libnccl.FAULT.so`, selects a fault: see `faults.rs`.

#![allow(non_snake_case, reason = "the library's names")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{process, ptr, slice};

mod faults;
mod hub;
mod numbers;

use faults::fault;
use hub::{ALL_GATHER, ALL_REDUCE, BROADCAST, Head, REDUCE_SCATTER, UINT8, serve};
use numbers::{BFLOAT16, FLOAT16, FLOAT32};

struct Communicator {
    /// NCCL's asynchronous error state.
    state: Arc<AtomicI32>,
    abort: Arc<AtomicBool>,
    link: Arc<OnceLock<TcpStream>>,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    operations: u64,
    world: usize,
    /// Memory of the thread that called last.
    group_job: GroupJob,
    /// Whether a thread is in a call.
    is_in_use: Arc<AtomicBool>,
}

/// A call with a communicator, which no abort may free meanwhile.
struct InUse(Arc<AtomicBool>);

impl InUse {
    fn begin(communicator: &Communicator) -> Self {
        communicator.is_in_use.store(true, Ordering::SeqCst);
        Self(communicator.is_in_use.clone())
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Memory of a thread.
#[derive(Clone)]
struct GroupJob(Arc<AtomicBool>);

/// Notes the end of its thread.
struct ThreadMemory(GroupJob);

impl Drop for ThreadMemory {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::SeqCst);
    }
}

thread_local! {
    static MEMORY: ThreadMemory = ThreadMemory(GroupJob(Arc::new(AtomicBool::new(true))));
}

impl GroupJob {
    fn of_this_thread() -> Self {
        MEMORY.with(|memory| memory.0.clone())
    }
}

/// Communicators that have not been released.
static UNRELEASED: AtomicI32 = AtomicI32::new(0);

/// NCCL's destructors would run beside its threads.
extern "C" fn check_at_exit() {
    if UNRELEASED.load(Ordering::SeqCst) > 0 {
        process::abort();
    }
}

fn note_communicator() {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    if std::env::var_os("STAND_IN_CHECKS_EXIT").is_some() {
        REGISTERED.get_or_init(|| unsafe {
            atexit(check_at_exit);
        });
    }
    UNRELEASED.fetch_add(1, Ordering::SeqCst);
}

fn release_time() -> Duration {
    let ms = std::env::var("STAND_IN_RELEASE_MS").ok();
    Duration::from_millis(ms.map_or(5, |ms| ms.parse().expect("STAND_IN_RELEASE_MS is a number")))
}

/// Communicators that were returned with an error and have not been aborted.
static REFUSED: AtomicI32 = AtomicI32::new(0);

#[unsafe(no_mangle)]
pub extern "C" fn fakeRefusedCommunicators() -> c_int {
    REFUSED.load(Ordering::SeqCst)
}

/// Polls that were prolonged.
static LONG_POLLS: AtomicI32 = AtomicI32::new(0);

#[unsafe(no_mangle)]
pub extern "C" fn fakeLongPolls() -> c_int {
    LONG_POLLS.load(Ordering::SeqCst)
}

enum Job {
    Finalize,
    Operation(Operation),
}

struct Operation {
    head: Head,
    src: u64,
    dst: u64,
    stream: u64,
    ticket: u64,
    world: usize,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let found = match fault() {
        "old" => 21_708,
        "no_host_memory" => 22_602,
        _ => 22_809,
    };
    unsafe { *version = found };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    match code {
        SYSTEM_ERROR => c"system error of the fake".as_ptr(),
        REMOTE_ERROR => c"remote error of the fake".as_ptr(),
        _ => c"error of the fake".as_ptr(),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    if fault() == "init_fails" { c"no interface for the bootstrap".as_ptr() } else { c"".as_ptr() }
}

/// The id holds the port, and a token unique to this hub.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut [u8; 128]) -> c_int {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let token = u64::from(process::id()) << 32 | u64::from(port);
    thread::spawn(move || serve(&listener, token));
    let mut bytes = [0; 128];
    bytes[..2].copy_from_slice(&port.to_le_bytes());
    bytes[2..10].copy_from_slice(&token.to_le_bytes());
    unsafe { *id = bytes };
    SUCCESS
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    communicator: *mut *mut c_void,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> c_int {
    let config = unsafe { &*config };
    let is_known = config.magic == 0xcafe_beef && config.version >= 21_800 && config.size >= 48;
    if !is_known || config.blocking != 0 || rank < 0 || rank >= world {
        return INVALID_ARGUMENT;
    }
    if fault() == "init_blocks" {
        loop {
            thread::park();
        }
    }
    let is_refused = fault() == "init_refused";
    let (jobs, to_do) = mpsc::channel();
    let (rank, world) = (rank as usize, world as usize);
    let state = Arc::new(AtomicI32::new(IN_PROGRESS));
    let (abort, link) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
    let (seen, stop, own) = (state.clone(), abort.clone(), link.clone());
    let thread = thread::spawn(move || {
        if fault() == "init_hangs" || is_refused {
            return wait_for(&stop);
        }
        if fault() == "no_host_memory" {
            return seen.store(UNHANDLED_CUDA_ERROR, Ordering::SeqCst);
        }
        if fault() == "init_fails" || join(&id.0, rank, world, &stop, &own).is_err() {
            return seen.store(SYSTEM_ERROR, Ordering::SeqCst);
        }
        seen.store(SUCCESS, Ordering::SeqCst);
        // The device. An operation is on the stream before the one in front of it is complete.
        let (launched, on_stream) = mpsc::channel();
        let ended = seen.clone();
        let device = thread::spawn(move || {
            for job in on_stream {
                match job {
                    Job::Finalize => ended.store(SUCCESS, Ordering::SeqCst),
                    Job::Operation(operation) => perform(&operation, own.get().unwrap(), &stop),
                }
            }
        });
        for job in to_do {
            if matches!(job, Job::Operation(_)) {
                seen.store(SUCCESS, Ordering::SeqCst);
            }
            launched.send(job).unwrap();
        }
        drop(launched);
        device.join().unwrap();
    });
    let thread = Some(thread);
    let made = Communicator {
        state,
        abort,
        link,
        jobs: Some(jobs),
        thread,
        operations: 0,
        world,
        group_job: GroupJob::of_this_thread(),
        is_in_use: Arc::default(),
    };
    unsafe { *communicator = Box::into_raw(Box::new(made)).cast() };
    note_communicator();
    if is_refused {
        REFUSED.fetch_add(1, Ordering::SeqCst);
        return SYSTEM_ERROR;
    }
    IN_PROGRESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(
    communicator: *mut c_void,
    state: *mut c_int,
) -> c_int {
    let communicator = unsafe { &*communicator.cast::<Communicator>() };
    let _in_use = InUse::begin(communicator);
    if fault() == "poll_lasts" && communicator.operations > 0 {
        LONG_POLLS.fetch_add(1, Ordering::SeqCst);
        thread::sleep(LONG_POLL);
    }
    unsafe { *state = communicator.state.load(Ordering::SeqCst) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(communicator: *mut c_void) -> c_int {
    let communicator = unsafe { &*communicator.cast::<Communicator>() };
    let _in_use = InUse::begin(communicator);
    communicator.state.store(IN_PROGRESS, Ordering::SeqCst);
    communicator.jobs.as_ref().unwrap().send(Job::Finalize).unwrap();
    IN_PROGRESS
}

#[cfg(not(lacks_abort))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(communicator: *mut c_void) -> c_int {
    if fault() == "abort_blocks" {
        loop {
            thread::park();
        }
    }
    let is_in_use = unsafe { &(*communicator.cast::<Communicator>()).is_in_use };
    // A panic here ends the process.
    assert!(!is_in_use.load(Ordering::SeqCst), "an abort frees what another thread uses");
    let mut communicator = unsafe { Box::from_raw(communicator.cast::<Communicator>()) };
    assert!(communicator.group_job.0.load(Ordering::SeqCst), "the memory of an ended thread");
    let mut context = ptr::null_mut();
    unsafe { (streams().context)(&mut context) };
    assert!(!context.is_null(), "an abort on a thread without a context");
    if fault() == "init_refused" {
        REFUSED.fetch_sub(1, Ordering::SeqCst);
    }
    communicator.abort.store(true, Ordering::SeqCst);
    communicator.jobs = None;
    if let Some(link) = communicator.link.get() {
        let _ = link.shutdown(Shutdown::Both);
    }
    communicator.thread.take().unwrap().join().unwrap();
    while fault() == "abort_lasts" {
        thread::park();
    }
    // Longer than a process takes to end.
    thread::sleep(release_time());
    UNRELEASED.fetch_sub(1, Ordering::SeqCst);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    src: u64,
    dst: u64,
    len: usize,
    dtype: c_int,
    operator: c_int,
    communicator: *mut c_void,
    stream: u64,
) -> c_int {
    if operator != 0 {
        return INVALID_ARGUMENT;
    }
    let head = Head { kind: ALL_REDUCE, dtype: dtype as u8, root: 0, len: len as u64 };
    unsafe { enqueue(communicator, head, src, dst, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    src: u64,
    dst: u64,
    len: usize,
    dtype: c_int,
    operator: c_int,
    communicator: *mut c_void,
    stream: u64,
) -> c_int {
    if operator != 0 {
        return INVALID_ARGUMENT;
    }
    let head = Head { kind: REDUCE_SCATTER, dtype: dtype as u8, root: 0, len: len as u64 };
    unsafe { enqueue(communicator, head, src, dst, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    src: u64,
    dst: u64,
    len: usize,
    dtype: c_int,
    communicator: *mut c_void,
    stream: u64,
) -> c_int {
    let head = Head { kind: ALL_GATHER, dtype: dtype as u8, root: 0, len: len as u64 };
    unsafe { enqueue(communicator, head, src, dst, stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    src: u64,
    dst: u64,
    len: usize,
    dtype: c_int,
    root: c_int,
    communicator: *mut c_void,
    stream: u64,
) -> c_int {
    let head = Head { kind: BROADCAST, dtype: dtype as u8, root: root as u32, len: len as u64 };
    unsafe { enqueue(communicator, head, src, dst, stream) }
}

unsafe fn enqueue(communicator: *mut c_void, head: Head, src: u64, dst: u64, stream: u64) -> c_int {
    let communicator = unsafe { &mut *communicator.cast::<Communicator>() };
    let _in_use = InUse::begin(communicator);
    let is_bytes = head.dtype == UINT8 && matches!(head.kind, ALL_GATHER | BROADCAST);
    if !is_bytes && !matches!(head.dtype, FLOAT16 | FLOAT32 | BFLOAT16) {
        return INVALID_ARGUMENT;
    }
    communicator.operations += 1;
    communicator.group_job = GroupJob::of_this_thread();
    if fault() == "op_fails" && communicator.operations == 2 {
        return SYSTEM_ERROR;
    }
    let ticket = unsafe { (streams().take)(stream) };
    if fault() == "async_error" && communicator.operations == 2 {
        // The ticket is completed when the communicator is aborted.
        let (abort, state) = (communicator.abort.clone(), communicator.state.clone());
        state.store(REMOTE_ERROR, Ordering::SeqCst);
        thread::spawn(move || {
            wait_for(&abort);
            unsafe { (streams().done)(stream, ticket) };
        });
        return SUCCESS;
    }
    let operation = Operation { head, src, dst, stream, ticket, world: communicator.world };
    communicator.state.store(IN_PROGRESS, Ordering::SeqCst);
    communicator.jobs.as_ref().unwrap().send(Job::Operation(operation)).unwrap();
    IN_PROGRESS
}

/// Connects to the hub, and waits until all ranks have connected.
fn join(
    id: &[u8; 128],
    rank: usize,
    world: usize,
    abort: &AtomicBool,
    own: &OnceLock<TcpStream>,
) -> io::Result<()> {
    let port = u16::from_le_bytes([id[0], id[1]]);
    let link = TcpStream::connect(("127.0.0.1", port))?;
    link.set_nodelay(true)?;
    let mut hello = id[2..10].to_vec();
    hello.extend_from_slice(&(rank as u32).to_le_bytes());
    hello.extend_from_slice(&(world as u32).to_le_bytes());
    (&link).write_all(&hello)?;
    own.set(link.try_clone()?).unwrap();
    // An abort before this found no link to shut down.
    if abort.load(Ordering::SeqCst) {
        return Ok(());
    }
    // As with NCCL, a peer that dies during the initialization is waited for.
    if (&link).read_exact(&mut [0]).is_err() {
        wait_for(abort);
    }
    Ok(())
}

fn perform(operation: &Operation, mut link: &TcpStream, abort: &AtomicBool) {
    let &Operation { head, src, dst, stream, ticket, world } = operation;
    unsafe { (streams().turn)(stream, ticket) };
    let part = unsafe { bytes_at(src, head.given(world)) };
    let mut result = vec![0; head.taken(world)];
    let done = link
        .write_all(&head.encode())
        .and_then(|()| link.write_all(part))
        .and_then(|()| link.read_exact(&mut result));
    if done.is_ok() {
        unsafe { bytes_at(dst, result.len()) }.copy_from_slice(&result);
    } else {
        wait_for(abort);
    }
    unsafe { (streams().done)(stream, ticket) };
}

/// Functions that the fake driver exports to other fake libraries.
struct Streams {
    take: unsafe extern "C" fn(u64) -> u64,
    turn: unsafe extern "C" fn(u64, u64),
    done: unsafe extern "C" fn(u64, u64),
    context: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
}

fn streams() -> &'static Streams {
    static STREAMS: OnceLock<Streams> = OnceLock::new();
    STREAMS.get_or_init(|| unsafe {
        let driver = dlopen(c"libcuda.so".as_ptr(), RTLD_NOW);
        let find = |name: &CStr| {
            let found = dlsym(driver, name.as_ptr());
            assert!(!found.is_null(), "the driver is the fake one");
            found
        };
        Streams {
            take: std::mem::transmute(find(c"fakeStreamReserve")),
            turn: std::mem::transmute(find(c"fakeStreamAwaitTurn")),
            done: std::mem::transmute(find(c"fakeStreamComplete")),
            context: std::mem::transmute(find(c"cuCtxGetCurrent")),
        }
    })
}

/// Waits until the communicator is aborted.
fn wait_for(abort: &AtomicBool) {
    while !abort.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(1));
    }
}

unsafe fn bytes_at<'a>(address: u64, bytes: usize) -> &'a mut [u8] {
    if bytes == 0 {
        return &mut [];
    }
    unsafe { slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(address as usize), bytes) }
}

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> c_int;
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Longer than a request may take.
const LONG_POLL: Duration = Duration::from_millis(2500);
const RTLD_NOW: c_int = 2;
const SUCCESS: c_int = 0;
const UNHANDLED_CUDA_ERROR: c_int = 1;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;
