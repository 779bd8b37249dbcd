//! The streams of the fake driver.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::{LEGACY_STREAM, PER_THREAD_STREAM, at, free};

/// Queues of all streams, under one lock since streams wait for each other.
pub(crate) struct Queues {
    pub(crate) streams: BTreeMap<usize, Stream>,
    /// Lengths of page-locked memory, by start address.
    pub(crate) locked: BTreeMap<usize, usize>,
    pub(crate) streams_ever: usize,
    /// Most tickets that were open on one stream at once.
    pub(crate) most_tickets: usize,
}

#[derive(Default)]
pub(crate) struct Stream {
    pub(crate) queue: VecDeque<Work>,
    /// Numbers of work items that were enqueued and done.
    pub(crate) enqueued: u64,
    pub(crate) done: u64,
}

pub(crate) enum Work {
    Copy {
        src: usize,
        dst: usize,
        bytes: usize,
    },
    Fill {
        dst: usize,
        value: u8,
        bytes: usize,
    },
    Free(usize),
    /// Work of another fake library; whether it is complete.
    Ticket(bool),
    WaitFor(Vec<Mark>),
}

/// Point on a stream at which `done` work items are done.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    pub(crate) stream: usize,
    pub(crate) done: u64,
}

pub(crate) static QUEUES: Mutex<Queues> = Mutex::new(Queues {
    streams: BTreeMap::new(),
    locked: BTreeMap::new(),
    streams_ever: 8,
    most_tickets: 0,
});
pub(crate) static CHANGED: Condvar = Condvar::new();

pub(crate) fn queues() -> MutexGuard<'static, Queues> {
    QUEUES.lock().unwrap()
}

impl Queues {
    /// Appends work to a stream, and returns the point after it.
    pub(crate) fn push(&mut self, stream: *mut c_void, work: Work) -> Mark {
        let stream = number(stream);
        let queue = self.streams.entry(stream).or_default();
        queue.queue.push_back(work);
        queue.enqueued += 1;
        let open = queue.queue.iter().filter(|work| matches!(work, Work::Ticket(false))).count();
        self.most_tickets = self.most_tickets.max(open);
        Mark { stream, done: queue.enqueued }
    }

    /// Returns the point after all work on a stream.
    pub(crate) fn end(&mut self, stream: *mut c_void) -> Mark {
        let stream = number(stream);
        Mark { stream, done: self.streams.entry(stream).or_default().enqueued }
    }

    /// Executes the work before the mark as far as possible. Returns whether all of it is done.
    pub(crate) fn reach(&mut self, mark: Mark) -> bool {
        loop {
            let Some(stream) = self.streams.get_mut(&mark.stream) else { return true };
            if stream.done >= mark.done {
                return true;
            }
            match stream.queue.front().expect("pending work is in the queue") {
                Work::Ticket(false) => return false,
                Work::WaitFor(marks) => {
                    let marks = marks.clone();
                    if !marks.into_iter().all(|mark| self.reach(mark)) {
                        return false;
                    }
                }
                _ => {}
            }
            let stream = self.streams.get_mut(&mark.stream).expect("the stream was just found");
            stream.done += 1;
            match stream.queue.pop_front().expect("the stream was just found") {
                Work::Copy { src, dst, bytes } => unsafe {
                    ptr::copy(at(src as u64).cast::<u8>(), at(dst as u64).cast::<u8>(), bytes);
                },
                Work::Fill { dst, value, bytes } => unsafe {
                    ptr::write_bytes(at(dst as u64).cast::<u8>(), value, bytes);
                },
                Work::Free(memory) => unsafe { free(at(memory as u64)) },
                Work::Ticket(_) | Work::WaitFor(_) => {}
            }
        }
    }

    /// Whether a copy that is not done reads or writes this memory.
    pub(crate) fn is_copied(&self, memory: Range<usize>) -> bool {
        let overlaps = |at: usize, bytes| at < memory.end && memory.start < at + bytes;
        self.streams.values().flat_map(|stream| &stream.queue).any(|work| match *work {
            Work::Copy { src, dst, bytes } => overlaps(src, bytes) || overlaps(dst, bytes),
            _ => false,
        })
    }

    pub(crate) fn is_locked(&self, memory: usize) -> bool {
        let before = self.locked.range(..=memory).next_back();
        before.is_some_and(|(start, bytes)| memory < start + bytes)
    }
}

/// Waits until the mark is reached.
pub(crate) fn wait_for(mark: Mark) {
    let mut queues = queues();
    while !queues.reach(mark) {
        queues = CHANGED.wait_timeout(queues, Duration::from_millis(1)).unwrap().0;
    }
}

pub(crate) fn synchronize(stream: *mut c_void) {
    let mark = queues().end(stream);
    wait_for(mark);
}

/// Number of a stream: its handle, 0 for the two names of the default stream, or that of the
/// calling thread's own default stream.
pub(crate) fn number(stream: *mut c_void) -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = 1 << 60 | THREADS.fetch_add(1, Ordering::Relaxed);
    }
    match stream.addr() {
        0 | LEGACY_STREAM => 0,
        PER_THREAD_STREAM => OWN.with(|own| *own),
        handle => handle,
    }
}
