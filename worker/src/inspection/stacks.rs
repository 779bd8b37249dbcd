//! The native stacks of all threads of this process.
//!
//! Each thread in turn gets a signal, whose handler notes the addresses of its frames; their names
//! are looked up outside of it. Of a thread that does not run the handler in time, because it
//! sleeps in the kernel or blocks the signal, the kernel says where it is.
//!
//! **Invariant:** the handler neither allocates nor takes a lock, so that it can interrupt any
//! code. The process may go on afterwards as if nothing had been.

#![allow(unsafe_code, reason = "installs a signal handler, and signals single threads")]

use std::ffi::{c_int, c_void};
use std::fs;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use elasticdl_proto::KernelThread;

/// A thread at one moment.
#[derive(Clone, Debug)]
pub(super) struct Captured {
    pub(super) kernel: KernelThread,
    /// Its id as pthreads have it, which Python uses; `None` if it has not answered.
    pub(super) pthread: Option<u64>,
    frames: Vec<usize>,
}

impl Captured {
    /// Addresses within the calls of the frames, the innermost first.
    pub(super) fn addresses(&self) -> impl Iterator<Item = usize> {
        // What is noted of an outer frame is where it goes on.
        let call = |(i, address): (usize, &usize)| address.saturating_sub(usize::from(i > 0));
        self.frames.iter().enumerate().map(call)
    }
}

/// The other threads of this process, the main one first. One thread at a time may call this.
pub(super) fn capture_all() -> Vec<Captured> {
    let deadline = Instant::now() + LIMIT;
    let has_handler = install_handler();
    let (this, main) = (thread_id(), std::process::id().cast_signed());
    let entries = fs::read_dir("/proc/self/task").into_iter().flatten();
    let id = |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let mut threads: Vec<i32> = entries.filter_map(id).filter(|&thread| thread != this).collect();
    threads.sort_unstable_by_key(|&thread| (thread != main, thread));
    threads.into_iter().map(|id| capture(id, has_handler && Instant::now() < deadline)).collect()
}

/// Lets this thread run the handler of a signal, which it has when this returns.
pub(super) fn signal_this_thread(signal: c_int) {
    send(thread_id(), signal);
}

/// Whether this process has a handler for a signal.
pub(super) fn is_caught(signal: c_int) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    mask(&status, "SigCgt:") & bit(signal) != 0
}

fn capture(thread: i32, may_signal: bool) -> Captured {
    let read = |file: &str| {
        let text = fs::read_to_string(format!("/proc/self/task/{thread}/{file}"));
        text.unwrap_or_default().trim().replace(char::is_control, " ")
    };
    let status = fs::read_to_string(format!("/proc/self/task/{thread}/status"));
    let status = status.unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:\t")).unwrap_or_default();
    let tid = thread.unsigned_abs();
    let kernel =
        KernelThread { name: read("comm"), tid, state: state.into(), waits_in: read("wchan") };
    let answers = may_signal && mask(&status, "SigBlk:") & bit(SIGNAL) == 0;
    let stack = if answers { frames_of(thread) } else { None };
    let (pthread, frames) = stack.map_or((None, Vec::new()), |(id, frames)| (Some(id), frames));
    Captured { kernel, pthread, frames }
}

/// The id and the frames of a thread; `None` if it does not run the handler in time.
fn frames_of(thread: i32) -> Option<(u64, Vec<usize>)> {
    if WANTED.compare_exchange(NONE, thread, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        // A handler has begun, and was not seen to end.
        return None;
    }
    send(thread, SIGNAL);
    let until = Instant::now() + THREAD_LIMIT;
    while WANTED.load(Ordering::Acquire) != NONE {
        if Instant::now() >= until {
            // It may run later, and finds that it is not wanted; or it runs now, and is not waited
            // for any longer.
            let _ = WANTED.compare_exchange(thread, NONE, Ordering::AcqRel, Ordering::Relaxed);
            return None;
        }
        std::thread::sleep(POLL);
    }
    let len = LEN.load(Ordering::Relaxed).min(FRAMES_MAX);
    // The first two are the handler, and the kernel's return from it.
    let frames = FRAMES[..len].iter().skip(2).map(|frame| frame.load(Ordering::Relaxed)).collect();
    Some((PTHREAD.load(Ordering::Relaxed), frames))
}

fn send(thread: i32, signal: c_int) {
    let process = std::process::id();
    // SAFETY: the call takes numbers alone, and the kernel checks them.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
}

fn thread_id() -> i32 {
    // SAFETY: it takes nothing and always succeeds.
    unsafe { libc::gettid() }
}

/// Installs the handler, unless the program has one of its own. Returns whether it is installed.
fn install_handler() -> bool {
    let handler = on_signal as extern "C" fn(c_int) as usize;
    // SAFETY: zeroes are a valid `sigaction`; the handler has the signature of one without
    // `SA_SIGINFO`.
    unsafe {
        let mut known: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(SIGNAL, std::ptr::null(), &raw mut known) != 0 {
            return false;
        }
        if ![libc::SIG_DFL, libc::SIG_IGN, handler].contains(&known.sa_sigaction) {
            return false;
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(SIGNAL, &raw const action, null_mut()) == 0
    }
}

extern "C" fn on_signal(_: c_int) {
    // SAFETY: the address is this thread's own, and always valid.
    let errno = unsafe { *libc::__errno_location() };
    let this = thread_id();
    if WANTED.compare_exchange(this, RUNNING, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        LEN.store(0, Ordering::Relaxed);
        // SAFETY: it takes nothing and always succeeds.
        PTHREAD.store(unsafe { libc::pthread_self() } as u64, Ordering::Relaxed);
        // SAFETY: `note_frame` has the signature that it takes. The unwinder reads this thread's
        // stack, and finds the tables of the loaded files without a lock.
        unsafe { _Unwind_Backtrace(note_frame, null_mut()) };
        WANTED.store(NONE, Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Notes the address of a frame. Returns whether the unwinder is to end.
extern "C" fn note_frame(context: *mut c_void, _: *mut c_void) -> c_int {
    let len = LEN.load(Ordering::Relaxed);
    let Some(frame) = FRAMES.get(len) else { return END_OF_STACK };
    // SAFETY: the unwinder passes a valid context.
    frame.store(unsafe { _Unwind_GetIP(context) }, Ordering::Relaxed);
    LEN.store(len + 1, Ordering::Relaxed);
    0
}

// Of the unwinder that panics use, so that every program is linked with it.
unsafe extern "C" {
    fn _Unwind_Backtrace(
        note: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// A mask of signals that the kernel states.
fn mask(status: &str, name: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// The thread that is to run the handler, [`RUNNING`] while it does, and [`NONE`] afterwards.
static WANTED: AtomicI32 = AtomicI32::new(NONE);
static PTHREAD: AtomicU64 = AtomicU64::new(0);
static LEN: AtomicUsize = AtomicUsize::new(0);
static FRAMES: [AtomicUsize; FRAMES_MAX] = [const { AtomicUsize::new(0) }; FRAMES_MAX];
const NONE: i32 = 0;
const RUNNING: i32 = -1;
const END_OF_STACK: c_int = 5;
const FRAMES_MAX: usize = 64;
/// A signal that processes ignore unless they handle it.
const SIGNAL: c_int = libc::SIGURG;
const LIMIT: Duration = Duration::from_secs(1);
const THREAD_LIMIT: Duration = Duration::from_millis(100);
const POLL: Duration = Duration::from_micros(200);

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::super::symbols::Names;
    use super::*;

    #[inline(never)]
    fn waits_for_a_sender(receiver: &Receiver<()>) {
        let _ = std::hint::black_box(receiver.recv());
    }

    /// Allocates and frees all the time, so that a handler interrupts the allocator.
    #[inline(never)]
    fn allocates(until: &Receiver<()>) {
        while until.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            std::hint::black_box(vec![0_u8; 1 << 10]);
        }
    }

    #[test]
    fn stacks_of_waiting_and_allocating_threads_have_names_and_the_threads_go_on() {
        let (tell, told) = channel();
        let start = |work: fn(&Receiver<()>)| {
            let ((sender, receiver), tell) = (channel(), tell.clone());
            let thread = std::thread::spawn(move || {
                tell.send(thread_id()).unwrap();
                work(&receiver);
            });
            (sender, thread)
        };
        let threads = [waits_for_a_sender as fn(&Receiver<()>), allocates].map(start);
        let mut left: Vec<u32> = told.iter().take(2).map(i32::cast_unsigned).collect();
        let mut shown = String::new();
        // A thread may not be there yet.
        for _ in 0..300 {
            let captured = capture_all();
            let ours = captured.iter().filter(|thread| left.contains(&thread.kernel.tid));
            let ours: Vec<&Captured> = ours.collect();
            let names = Names::of(ours.iter().flat_map(|thread| thread.addresses()));
            let name = |address| names.name(address);
            let named: Vec<(u32, Vec<String>)> = ours
                .iter()
                .map(|thread| (thread.kernel.tid, thread.addresses().map(name).collect()))
                .collect();
            shown = format!("{named:#?}");
            for (tid, frames) in named {
                let is_named = |frame: &String| {
                    frame.contains("waits_for_a_sender") || frame.contains("tests::allocates")
                };
                if frames.iter().any(is_named) {
                    assert!(!frames[0].contains("on_signal"), "{frames:?}");
                    left.retain(|known| *known != tid);
                }
            }
            if left.is_empty() {
                break;
            }
        }
        assert!(left.is_empty(), "{left:?}: {shown}");
        for (sender, thread) in threads {
            sender.send(()).unwrap();
            thread.join().unwrap();
        }
    }
}
