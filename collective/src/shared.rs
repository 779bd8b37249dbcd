//! Sums of ranks that share memory.
//!
//! ```text
//! block k    in      each rank copies its part of the others' chunks into its slot
//!            reduce  each rank sums its own chunk out of all slots, into its result slot
//!            out     each rank copies the others' chunks out of their result slots
//! ```
//!
//! A buffer goes through in blocks that stay in the cache, the three stages of successive blocks side by side. What binds are
//! passes over memory: 2·(n−1)/n copies and one sum, about three passes over the buffer, where sockets take four copies through
//! the kernel. Sums of up to 16 KiB take one stage: each rank puts its part into its slot and sums all of them itself.
//!
//! Each rank counts, in numbers that only it writes, the blocks that it has put in and reduced, and waits for the others'
//! numbers. There is no lock: a rank that is killed, at whatever instruction, just counts no further. That it is gone shows
//! at the ring's links, which are watched while one waits, and who sees it says so in the memory.
//!
//! **Invariant:** a slot is written again only when all are done with what was in it; see [`SLOTS`].
//!
//! **Invariant:** every element is summed in the same order on all ranks: by its chunk's rank alone, or by all from rank 0 on.
//!
//! **Invariant:** a rank that has finished an operation waits for nobody to have read what it has written: it may leave.

use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::thread::futex;
use rustix::time::Timespec;

use crate::chunk::chunk;
use crate::fence::Pass;
use crate::frame::{FRAME_BYTES, Frame};
use crate::link::poll_until;
use crate::patience::Patience;
use crate::progress::{Place, Progress};
use crate::schedule::Seat;
use crate::tcp::Links;

mod memory;

pub(crate) use memory::{Address, Memory};

/// A group's memory, as one rank uses it.
#[derive(Debug)]
pub(crate) struct Shared {
    memory: Memory,
    seat: Seat,
    layout: Layout,
    /// Operations begun here.
    operations: u64,
    /// Blocks of all operations before.
    blocks: u64,
}

/// What a rank waits with.
#[derive(Clone, Copy)]
pub(crate) struct Watch<'a> {
    pub(crate) links: &'a Links,
    pub(crate) pass: &'a Pass,
    pub(crate) progress: &'a Progress,
    /// Of the operation, among all of the group.
    pub(crate) sequence: u64,
    pub(crate) patience: Patience,
}

/// Why a sum over shared memory stopped.
#[derive(Debug)]
pub(crate) enum SharedFault {
    /// By the fence.
    Aborted,
    /// This rank is in another operation.
    Broken(usize, String),
    /// This rank is gone, or has failed.
    Lost(usize),
}

/// The notes that have been told.
#[derive(Debug)]
pub(crate) enum Notes {
    /// One per rank.
    All(Vec<Vec<u8>>),
    /// One is too long for the memory, so that they have to be told otherwise.
    TooLong,
}

impl Shared {
    pub(crate) fn new(memory: Memory, seat: Seat) -> Self {
        Self { memory, seat, layout: Layout { world: seat.world }, operations: 0, blocks: 0 }
    }

    /// The length of a group's memory.
    pub(crate) fn bytes(world: usize) -> usize {
        Layout { world }.end()
    }

    /// Puts the sum of all ranks' `src` into `dst`.
    pub(crate) fn all_reduce(
        &mut self,
        watch: Watch<'_>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, SharedFault> {
        let result = self.sum(watch, note, src, dst);
        if result.is_err() {
            // Whoever still waits for this rank hears of it at once. What it says is not looked at.
            self.memory.word32(BROKEN).store(self.seat.rank as u32 + 1, Ordering::SeqCst);
            self.wake();
        }
        result
    }

    fn sum(
        &mut self,
        watch: Watch<'_>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, SharedFault> {
        let operation = self.operations;
        self.operations += 1;
        let is_small = size_of_val(src) <= SMALL_BYTES;
        self.begin(operation, watch.sequence, note, src, is_small);
        let first_in = !is_small && !src.is_empty();
        if first_in {
            // It needs none of the others, who may not have begun.
            self.put_in(0, src);
        }
        self.wait(watch, |shared| shared.first_behind(BEGUN, operation + 1))?;
        let notes = self.heads(watch, operation, src.len())?;
        if is_small {
            self.sum_small(operation, dst);
            return Ok(notes);
        }
        let blocks = src.len().div_ceil(block_len(src.len()));
        for index in 1..blocks + 2 {
            if index < blocks {
                self.put_in(index, src);
            }
            if (1..=blocks).contains(&index) {
                self.reduce(watch, index - 1, src, dst)?;
            }
            if index >= 2 {
                self.take_out(watch, index - 2, dst)?;
            }
        }
        self.blocks += blocks as u64;
        Ok(notes)
    }

    /// Says what this rank is about to do, and all that a small sum needs.
    fn begin(&self, operation: u64, sequence: u64, note: &[u8], src: &[f32], is_small: bool) {
        let slot = self.layout.note(self.seat.rank, operation);
        let head = [sequence, src.len() as u64, note.len() as u64];
        self.memory.write(slot, bytemuck::cast_slice(&head));
        if note.len() <= NOTE_BYTES {
            self.memory.write(slot + HEAD_BYTES, note);
        }
        if is_small {
            let slot = self.layout.small(self.seat.rank, operation);
            self.memory.write(slot, bytemuck::cast_slice(src));
        }
        self.publish(BEGUN, operation + 1);
    }

    /// Checks that all are in the same operation, and reads their notes.
    fn heads(&self, watch: Watch<'_>, operation: u64, len: usize) -> Result<Notes, SharedFault> {
        let mut notes = Vec::with_capacity(self.seat.world);
        let mut is_too_long = false;
        for rank in 0..self.seat.world {
            let slot = self.layout.note(rank, operation);
            let mut head = [0_u64; 3];
            self.memory.read(slot, bytemuck::cast_slice_mut(&mut head));
            let [sequence, its_len, note_bytes] = head;
            if sequence != watch.sequence {
                let reason = format!("expected sequence number {}, got {sequence}", watch.sequence);
                return Err(SharedFault::Broken(rank, reason));
            }
            if its_len != len as u64 {
                let reason = format!("expected a buffer length of {len} elements, got {its_len}");
                return Err(SharedFault::Broken(rank, reason));
            }
            is_too_long |= note_bytes > NOTE_BYTES as u64;
            if !is_too_long {
                let mut note = vec![0; note_bytes as usize];
                self.memory.read(slot + HEAD_BYTES, &mut note);
                notes.push(note);
            }
        }
        Ok(if is_too_long { Notes::TooLong } else { Notes::All(notes) })
    }

    fn sum_small(&self, operation: u64, dst: &mut [f32]) {
        for rank in 0..self.seat.world {
            let part = self.memory.floats(self.layout.small(rank, operation), dst.len());
            match rank {
                0 => dst.copy_from_slice(part),
                _ => add(dst, part),
            }
        }
    }

    fn put_in(&self, index: usize, src: &[f32]) {
        let block = self.blocks + index as u64;
        let part = block_of(index, src.len());
        let own = chunk(part.len(), self.seat.world, self.seat.rank);
        let (slot, src) = (self.layout.input(self.seat.rank, block), &src[part]);
        self.memory.write(slot, bytemuck::cast_slice(&src[..own.start]));
        self.memory.write(slot + own.end * size_of::<f32>(), bytemuck::cast_slice(&src[own.end..]));
        self.publish(PUT_IN, block + 1);
    }

    fn reduce(
        &self,
        watch: Watch<'_>,
        index: usize,
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<(), SharedFault> {
        let Seat { rank, world } = self.seat;
        let block = self.blocks + index as u64;
        self.wait(watch, |shared| shared.first_behind(PUT_IN, block + 1))?;
        let part = block_of(index, dst.len());
        let own = chunk(part.len(), world, rank);
        let (src, sum) = (&src[part.clone()][own.clone()], &mut dst[part][own.clone()]);
        let others = (0..world).filter(|other| *other != rank);
        for (turn, other) in others.enumerate() {
            let offset = self.layout.input(other, block) + own.start * size_of::<f32>();
            let part = self.memory.floats(offset, own.len());
            match turn {
                0 => sum.iter_mut().zip(src).zip(part).for_each(|((sum, own), part)| *sum = own + part),
                _ => add(sum, part),
            }
        }
        self.memory.write(self.layout.output(rank, block), bytemuck::cast_slice(sum));
        self.publish(REDUCED, block + 1);
        Ok(())
    }

    fn take_out(&self, watch: Watch<'_>, index: usize, dst: &mut [f32]) -> Result<(), SharedFault> {
        let Seat { rank, world } = self.seat;
        let block = self.blocks + index as u64;
        self.wait(watch, |shared| shared.first_behind(REDUCED, block + 1))?;
        let part = block_of(index, dst.len());
        for other in (1..world).map(|step| (rank + step) % world) {
            let its = chunk(part.len(), world, other);
            let target = bytemuck::cast_slice_mut(&mut dst[part.clone()][its]);
            self.memory.read(self.layout.output(other, block), target);
        }
        Ok(())
    }

    /// The first rank whose number of this kind is below `count`.
    fn first_behind(&self, number: usize, count: u64) -> Option<usize> {
        (0..self.seat.world).find(|rank| self.number(*rank, number).load(Ordering::Acquire) < count)
    }

    fn number(&self, rank: usize, number: usize) -> &AtomicU64 {
        self.memory.word64(self.layout.numbers(rank) + number)
    }

    /// Counts, and wakes who sleeps.
    fn publish(&self, number: usize, count: u64) {
        self.number(self.seat.rank, number).store(count, Ordering::Release);
        // Either the count is seen before the sleep, or the sleeper here.
        fence(Ordering::SeqCst);
        if self.memory.word32(SLEEPERS).load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        let events = self.memory.word32(EVENTS);
        events.fetch_add(1, Ordering::SeqCst);
        // Who is not woken looks again soon.
        let _ = futex::wake(events, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Waits until `behind` names no rank any more.
    fn wait(&self, watch: Watch<'_>, behind: impl Fn(&Self) -> Option<usize>) -> Result<(), SharedFault> {
        if watch.pass.check().is_err() {
            return Err(SharedFault::Aborted);
        }
        let mut patience = watch.patience;
        while behind(self).is_some() {
            if !patience.lasts() {
                return self.sleep(watch, behind);
            }
        }
        Ok(())
    }

    fn sleep(&self, watch: Watch<'_>, behind: impl Fn(&Self) -> Option<usize>) -> Result<(), SharedFault> {
        let Watch { links, pass, progress, sequence, .. } = watch;
        let generation = pass.generation();
        let (received, sent, waits_for_next) = (0, 0, false);
        progress.wait_at(Place { generation, operation: sequence + 1, received, sent, waits_for_next });
        let (events, sleepers) = (self.memory.word32(EVENTS), self.memory.word32(SLEEPERS));
        let result = loop {
            sleepers.fetch_add(1, Ordering::SeqCst);
            let seen = events.load(Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if behind(self).is_some() {
                // An end of another process rings no bell here: look for it now and then.
                let _ = futex::wait(events, futex::Flags::empty(), seen, Some(&LOOK_EVERY));
            }
            sleepers.fetch_sub(1, Ordering::SeqCst);
            if behind(self).is_none() {
                break Ok(());
            }
            if pass.check().is_err() {
                break Err(SharedFault::Aborted);
            }
            let fault = self.failed().or_else(|| look_at(links, sequence));
            // Who has left after the operation's end has counted all before.
            match (fault, behind(self)) {
                (_, None) => break Ok(()),
                (Some(fault), Some(_)) => break Err(fault),
                (None, Some(_)) => {}
            }
        };
        progress.go_on();
        result
    }

    /// What a rank that has failed has said.
    fn failed(&self) -> Option<SharedFault> {
        let rank = self.memory.word32(BROKEN).load(Ordering::SeqCst).checked_sub(1)? as usize;
        Some(SharedFault::Lost(rank.min(self.seat.world - 1)))
    }
}

/// Whether a neighbour is gone, or in another operation of the same number.
fn look_at(links: &Links, sequence: u64) -> Option<SharedFault> {
    let mut fds = [&links.next, &links.prev]
        .map(|neighbour| PollFd::new(&*neighbour.link, PollFlags::IN | PollFlags::RDHUP));
    let now = Some(Instant::now());
    if !poll_until(&mut fds, now).ok()? {
        return None;
    }
    for (neighbour, fd) in [&links.next, &links.prev].into_iter().zip(&fds) {
        let events = fd.revents();
        if events.contains(PollFlags::IN)
            && let Some(reason) = disagreement(&neighbour.link, sequence)
        {
            return Some(SharedFault::Broken(neighbour.rank, reason));
        }
        if events.intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) {
            return Some(SharedFault::Lost(neighbour.rank));
        }
    }
    None
}

/// What has come may be of the next operation; if it is of this one, its sender believes in another.
fn disagreement(link: &TcpStream, sequence: u64) -> Option<String> {
    let mut head = [0; FRAME_BYTES];
    match link.peek(&mut head) {
        Ok(FRAME_BYTES) => {}
        Ok(_) | Err(_) => return None,
    }
    match Frame::decode(&head) {
        Ok(frame) if frame.sequence != sequence => None,
        Ok(frame) => Some(format!("expected a sum over shared memory, got a frame of {:?}", frame.kind)),
        Err(reason) => Some(reason),
    }
}

fn add(sum: &mut [f32], part: &[f32]) {
    for (sum, part) in sum.iter_mut().zip(part) {
        *sum += part;
    }
}

/// Elements of block `index` of a buffer.
fn block_of(index: usize, len: usize) -> Range<usize> {
    let block_len = block_len(len);
    index * block_len..len.min((index + 1) * block_len)
}

/// How many elements of a buffer make a block: enough blocks for the stages to run side by side, and not more counting than
/// needed.
fn block_len(len: usize) -> usize {
    (len / 16).clamp(BLOCK_LEN_MIN, BLOCK_LEN_MAX)
}

/// Where what is. All offsets are in bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    world: usize,
}

impl Layout {
    /// A rank's numbers, apart from those of others so that they don't share a cache line.
    fn numbers(self, rank: usize) -> usize {
        LINE_BYTES * (1 + rank)
    }

    /// A rank's note of an operation; there are two, by turns: who begins the operation after the next has seen all
    /// others begin the next, and so be done with this one.
    fn note(self, rank: usize, operation: u64) -> usize {
        self.numbers(self.world) + (rank * 2 + (operation % 2) as usize) * (HEAD_BYTES + NOTE_BYTES)
    }

    /// A rank's part of a small sum; likewise two.
    fn small(self, rank: usize, operation: u64) -> usize {
        self.note(self.world, 0) + (rank * 2 + (operation % 2) as usize) * SMALL_BYTES
    }

    fn input(self, rank: usize, block: u64) -> usize {
        self.small(self.world, 0) + (rank * SLOTS as usize + (block % SLOTS) as usize) * BLOCK_BYTES
    }

    fn output(self, rank: usize, block: u64) -> usize {
        let bytes = chunk(BLOCK_LEN_MAX, self.world, 0).len() * size_of::<f32>();
        let bytes = bytes.next_multiple_of(LINE_BYTES);
        self.input(self.world, 0) + (rank * SLOTS as usize + (block % SLOTS) as usize) * bytes
    }

    fn end(self) -> usize {
        self.output(self.world, 0)
    }
}

/// The kinds of numbers that a rank counts, as offsets among them.
const BEGUN: usize = 0;
const PUT_IN: usize = 8;
const REDUCED: usize = 16;

/// At the start of the memory: what sleepers wait on, how many they are, and who has failed.
const EVENTS: usize = 0;
const SLEEPERS: usize = 4;
const BROKEN: usize = 8;

/// Two lines of cache, which are fetched together.
const LINE_BYTES: usize = 128;

const HEAD_BYTES: usize = 24;

/// Longer notes take another way.
const NOTE_BYTES: usize = (16 << 10) - HEAD_BYTES;

/// Up to here all ranks sum everything.
const SMALL_BYTES: usize = 16 << 10;

const BLOCK_BYTES: usize = BLOCK_LEN_MAX * size_of::<f32>();

/// 1 MiB at two ranks took 189 µs in blocks of 64 KiB, 264 in blocks of 256 KiB; 16 MiB the other way round.
const BLOCK_LEN_MIN: usize = 16 << 10;

const BLOCK_LEN_MAX: usize = 64 << 10;

/// Blocks under way. A rank puts block `k` in before it reduces `k−1`, and that before it takes out `k−2`. So who puts `k` in has taken
/// `k−3` out, and all had reduced it: its slots are free. And who reduces `k`, when all have put it in, knows that all have taken `k−3`
/// out: its result slot is free.
const SLOTS: u64 = 3;

/// How soon an end that nobody tells is noticed.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// The largest group that shares memory.
pub(crate) const WORLD_MAX: usize = 64;
