//! Aborts of a master: Rust ends a process so that gets no memory, and says nothing else.

#![allow(unsafe_code, reason = "installs a signal handler")]

use std::ptr;

/// From now on, this process says what becomes of its job when it aborts.
pub(crate) fn report_aborts() {
    // SAFETY: a zeroed action has no flags and no mask. The handler only calls what a signal
    // handler may call. Its second signal, when it has returned, ends the process.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_flags = libc::SA_RESETHAND;
        action.sa_sigaction = on_abort as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(libc::SIGABRT, &raw const action, ptr::null_mut());
    }
}

extern "C" fn on_abort(_: libc::c_int) {
    let mut stderr = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one descriptor, and a constant text. A standard error that is full is not waited for.
    unsafe {
        if libc::poll(&raw mut stderr, 1, 0) == 1 {
            libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
        }
        libc::raise(libc::SIGABRT);
    }
}

const MESSAGE: &str = "\
error: this process was aborted, most likely for lack of memory; the workers of a job that it led \
continue for a while and wait for the next master: `elasticdl train --resume JOB` starts it on one \
machine, and a cluster by itself
";

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::{env, process, thread};

    use super::*;

    #[test]
    fn an_aborted_process_says_what_becomes_of_its_job_and_ends() {
        const VARIABLE: &str = "ELASTICDL_TEST_ABORTS";
        if let Some(by) = env::var_os(VARIABLE) {
            report_aborts();
            if by == "memory" {
                std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; 64]>());
            }
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::ABORT).unwrap();
            thread::sleep(std::time::Duration::from_secs(10));
            process::exit(0);
        }
        for (by, reason) in [("memory", "memory allocation of 64 bytes failed"), ("a signal", "")] {
            let ended = process::Command::new(env::current_exe().unwrap())
                .args(["--exact", "--nocapture", thread::current().name().unwrap()])
                .env(VARIABLE, by)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{by}: {said}");
            assert!(said.contains(reason), "{said}");
            assert_eq!(said.matches("`elasticdl train --resume JOB`").count(), 1, "{said}");
        }
    }
}
