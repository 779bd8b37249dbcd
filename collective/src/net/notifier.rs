//! Wakes a thread that polls, from another thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io;

/// Wakes a polling thread (an eventfd). Any thread may notify at any time. The descriptor stays
/// readable until it is cleared, so a notification before the poll is not lost.
#[derive(Debug)]
pub(crate) struct Notifier(OwnedFd);

impl Notifier {
    pub(crate) fn new() -> io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    pub(crate) fn notify(&self) {
        // The write fails only if the counter is full, and then the descriptor is readable already.
        let _ = io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Resets the notification. The caller checks its wake-up conditions after this call, not
    /// before.
    pub(crate) fn clear(&self) {
        // The read fails only if no notification is pending.
        let _ = io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
