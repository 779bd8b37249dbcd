use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io;

/// Wakes a thread that polls. Rung from any thread, at any time, it stays readable until it is
/// cleared: a ring before the poll is not lost.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    pub(crate) fn ring(&self) {
        // The one way to fail is a counter that is full, and that is readable already.
        let _ = io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Look at what the bell may have been rung for after this, not before.
    pub(crate) fn clear(&self) {
        // The one way to fail is a bell that was not rung.
        let _ = io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
