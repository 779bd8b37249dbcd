//! The communicators of this process that NCCL has not released, at the end of the process.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A communicator that NCCL has not released. Counts itself.
#[derive(Debug)]
pub(super) struct Unreleased(());

impl Unreleased {
    pub(super) fn new() -> Self {
        *count() += 1;
        Self(())
    }
}

impl Drop for Unreleased {
    fn drop(&mut self) {
        *count() -= 1;
        RELEASED.notify_all();
    }
}

/// Returns the number of communicators of this process that NCCL did not release in time. If there
/// are any, the process uses NCCL no more, and should end when it can: they occupy threads and
/// device memory, and others would occupy more.
#[must_use]
pub fn abandoned() -> usize {
    let now = Instant::now();
    aborts().iter().filter(|(_, deadline)| *deadline <= now).count()
}

/// Notes an abort, and how long it may take.
pub(super) fn abort_begun(key: usize, limit: Duration) {
    aborts().push((key, Instant::now() + limit));
}

/// Notes that an abort has returned. One that took too long still counts.
pub(super) fn abort_ended(key: usize) {
    let now = Instant::now();
    aborts().retain(|(other, deadline)| *other != key || *deadline <= now);
}

/// Waits until NCCL has released all communicators of this process. Returns whether it has, within
/// `limit`. A process that ends before runs the destructors of CUDA and NCCL beside their work.
#[must_use]
pub fn wait_for_release(limit: Duration) -> bool {
    let (count, _) = RELEASED
        .wait_timeout_while(count(), limit, |count| *count > 0)
        .expect("nothing under this lock panics");
    *count == 0
}

fn count() -> MutexGuard<'static, usize> {
    COUNT.lock().expect("nothing under this lock panics")
}

/// Aborts that have not returned in time, or at all, with their deadlines.
fn aborts() -> MutexGuard<'static, Vec<(usize, Instant)>> {
    static ABORTS: Mutex<Vec<(usize, Instant)>> = Mutex::new(Vec::new());
    ABORTS.lock().expect("nothing under this lock panics")
}

static COUNT: Mutex<usize> = Mutex::new(0);
static RELEASED: Condvar = Condvar::new();
