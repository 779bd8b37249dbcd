//! The stacks of all threads of this process, for the log of a worker that hangs.
//!
//! Each thread in turn gets a signal, whose handler captures its frames. For a thread that does not
//! run the handler in time, because it sleeps in the kernel, the kernel says where. Python's
//! `faulthandler`, which the package registers for another signal, writes the frames of Python.
//!
//! **Invariant:** this runs only in a process that is about to be killed. A handler that waits for
//! a lock of the thread that it interrupts, such as the allocator's, costs nothing more.

#![allow(unsafe_code, reason = "installs a signal handler, and signals single threads")]

use std::backtrace::Backtrace;
use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::Signal;

/// Writes the stacks of all threads to the log, within a time limit.
pub(crate) fn log_all() {
    if is_caught(PYTHON_SIGNAL) {
        // Fails for no process of this user.
        let _ = rustix::process::kill_process(rustix::process::getpid(), PYTHON_SIGNAL);
    }
    let deadline = Instant::now() + LIMIT;
    let has_handler = install_handler();
    let mut threads: Vec<i32> = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    threads.sort_unstable();
    let this = thread_id();
    for thread in threads.into_iter().filter(|&thread| thread != this) {
        let stack = if has_handler && Instant::now() < deadline { capture(thread) } else { None };
        let stack = stack.map_or_else(String::new, |stack| format!("\n{stack}"));
        tracing::error!("this worker hangs; thread {}{stack}", describe(thread));
    }
}

/// The name of a thread, and what the kernel says about it.
fn describe(thread: i32) -> String {
    let read = |file: &str| {
        let text = fs::read_to_string(format!("/proc/self/task/{thread}/{file}"));
        text.unwrap_or_default().trim().to_owned()
    };
    let (status, call) = (read("status"), read("syscall"));
    let state = status.lines().find_map(|line| line.strip_prefix("State:\t")).unwrap_or("unknown");
    let call = call.split(' ').next().unwrap_or_default().to_owned();
    format!("{} ({thread}): {state}, in {}, system call {call}", read("comm"), read("wchan"))
}

/// The frames of a thread; `None` if it does not run the handler in time.
fn capture(thread: i32) -> Option<Backtrace> {
    if let Ok(mut captured) = CAPTURED.lock() {
        *captured = None;
    }
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: the call takes numbers alone, and the kernel checks them.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, SIGNAL) };
    let until = Instant::now() + THREAD_LIMIT;
    while Instant::now() < until {
        std::thread::sleep(POLL);
        if let Some(stack) = CAPTURED.try_lock().ok().and_then(|mut captured| captured.take()) {
            return Some(stack);
        }
    }
    None
}

fn thread_id() -> i32 {
    // SAFETY: it takes nothing and always succeeds.
    unsafe { libc::gettid() }
}

fn install_handler() -> bool {
    // SAFETY: zeroes are a valid `sigaction`; the handler has the signature of one without
    // `SA_SIGINFO`. What it does is not safe in a signal handler in general: see the invariant.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) == 0
    }
}

extern "C" fn on_signal(_: libc::c_int) {
    let stack = Backtrace::force_capture();
    if let Ok(mut captured) = CAPTURED.try_lock() {
        *captured = Some(stack);
    }
}

/// Whether this process has a handler for a signal.
fn is_caught(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal.as_raw() - 1)) != 0
}

/// The frames of the thread that ran the handler last.
static CAPTURED: Mutex<Option<Backtrace>> = Mutex::new(None);
/// A signal that processes ignore unless they handle it.
const SIGNAL: libc::c_int = libc::SIGURG;
/// The signal for which the Python package registers `faulthandler`.
const PYTHON_SIGNAL: Signal = Signal::USR2;
/// The master evicts this worker soon after.
const LIMIT: Duration = Duration::from_millis(1500);
const THREAD_LIMIT: Duration = Duration::from_millis(100);
const POLL: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[inline(never)]
    fn waits_for_a_sender(receiver: &std::sync::mpsc::Receiver<()>) {
        let _ = std::hint::black_box(receiver.recv());
    }

    #[test]
    fn the_frames_of_a_thread_that_waits_are_captured() {
        let (sender, receiver) = channel();
        let (tell, told) = channel();
        let thread = std::thread::spawn(move || {
            tell.send(thread_id()).unwrap();
            waits_for_a_sender(&receiver);
        });
        let id = told.recv().unwrap();
        assert!(install_handler());
        // The thread may not wait yet.
        let holds_it = |_| {
            let stack = capture(id).map(|stack| stack.to_string()).unwrap_or_default();
            stack.contains("waits_for_a_sender")
        };
        assert!((0..100).any(holds_it));
        assert!(describe(id).contains(&format!("({id})")), "{}", describe(id));
        drop(sender);
        thread.join().unwrap();
    }
}
