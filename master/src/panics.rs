//! Panics of a master's threads and tasks.
//!
//! Without the thread of its server, for example, a master would live on and lead nothing, and no
//! other master would take over. So a panic of any thread or task ends the process as a kill does:
//! workers train on, and search for another master.
//!
//! The dashboard and the exporters are dispensable: a job goes on without them.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io::{Write as _, stderr};
use std::time::Duration;
use std::{panic, pin, process, thread};

use tracing::error;

use crate::aborts::report_aborts;

thread_local! {
    static IS_DISPENSABLE: Cell<bool> = const { Cell::new(false) };
}

/// From now on, a panic of any thread or task of this process ends the process, unless it is
/// dispensable. An abort says what follows, too. `print`: prints what is otherwise reported as text
/// on standard error.
pub fn end_process_on_panic(print: Option<fn(&str)>) {
    report_aborts();
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |panicked| {
        let report = || match print {
            Some(print) => print(&panicked.to_string()),
            None => report(panicked),
        };
        if IS_DISPENSABLE.get() {
            return report();
        }
        // Standard error may block, and this thread may hold the lock of the log.
        let limit = || {
            thread::sleep(REPORT_LIMIT);
            process::exit(EXIT_PANICKED)
        };
        drop(thread::Builder::new().spawn(limit));
        report();
        match print {
            Some(print) => print(FOLLOWS),
            // Standard error may be closed.
            None => drop(writeln!(stderr(), "error: {FOLLOWS}")),
        }
        error!(thread = thread::current().name(), "{panicked}");
        process::exit(EXIT_PANICKED)
    }));
}

/// While it is there, a panic of this thread does not end the process.
pub(crate) struct Dispensable {
    before: bool,
}

impl Dispensable {
    pub(crate) fn begin() -> Self {
        Self { before: IS_DISPENSABLE.replace(true) }
    }
}

impl Drop for Dispensable {
    fn drop(&mut self) {
        IS_DISPENSABLE.set(self.before);
    }
}

/// Performs a task whose panic does not end the process.
pub(crate) async fn dispensable<T>(task: impl Future<Output = T>) -> T {
    let mut task = pin::pin!(task);
    poll_fn(|context| {
        let _dispensable = Dispensable::begin();
        task.as_mut().poll(context)
    })
    .await
}

const FOLLOWS: &str = "a thread of this process has failed, and the process ends; a job that it \
                       led can go on: `elasticdl train --resume JOB` on one machine, by itself in \
                       a cluster";
/// Rust's exit code after a panic of the main thread.
const EXIT_PANICKED: i32 = 101;
/// How long the report of a panic may take.
const REPORT_LIMIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    async fn fail() {
        panic!("no memory");
    }

    /// Panics in a thread or in a task. Exits with 0 if that does not end the process.
    fn panic_in(what: &str) -> ! {
        end_process_on_panic(None);
        let what = what.to_owned();
        let thread = thread::Builder::new().name("grpc".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let ended = match &*what {
                    "task" => tokio::spawn(fail()).await,
                    "dispensable task" => tokio::spawn(dispensable(fail())).await,
                    "dispensable thread" => {
                        let _dispensable = Dispensable::begin();
                        tokio::spawn(fail()).await
                    }
                    _ => {
                        fail().await;
                        Ok(())
                    }
                };
                assert!(ended.is_err() && !IS_DISPENSABLE.get());
            });
        });
        assert!(thread.unwrap().join().is_ok());
        process::exit(0)
    }

    #[test]
    fn a_panic_of_a_thread_or_a_task_ends_the_process_unless_it_is_dispensable() {
        const VARIABLE: &str = "ELASTICDL_TEST_PANIC_IN";
        if let Ok(what) = std::env::var(VARIABLE) {
            panic_in(&what);
        }
        let cases =
            [("thread", 101), ("task", 101), ("dispensable task", 0), ("dispensable thread", 0)];
        for (what, code) in cases {
            let ended = process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture", thread::current().name().unwrap()])
                .env(VARIABLE, what)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(ended.status.code(), Some(code), "{what}: {said}");
            assert!(said.contains("thread 'grpc'") && said.contains("no memory"), "{said}");
            assert_eq!(said.contains("train --resume"), code != 0, "{what}: {said}");
        }
    }
}
