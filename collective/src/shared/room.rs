//! What ranks that share memory do to meet: they count, and wait for each other's numbers.
//!
//! Each rank counts in numbers that only it writes. There is no lock: a rank that is killed, at whatever instruction, just counts no
//! further. That it is gone shows at links, which are watched while one waits, and who sees it says so in the memory and rings.
//!
//! **Invariant:** who sleeps has said so before it looked for the last time, and who has counted looks for sleepers after that: so
//! either the count is seen, or the sleeper. A rank that is killed between the two rings nobody; whoever then sleeps looks
//! again now and then.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::doorbell::Doorbell;
use super::lookout::Lookout;
use super::memory::Memory;
use crate::fence::Pass;
use crate::link::poll_until;
use crate::patience::Patience;
use crate::progress::{Place, Progress};
use crate::schedule::Seat;
use crate::tcp::Links;

/// Memory that ranks share, as one of them uses it.
#[derive(Debug)]
pub(crate) struct Room {
    pub(super) memory: Memory,
    /// Among those that share it.
    pub(super) seat: Seat,
    /// Of all of them, in the group.
    ranks: Vec<usize>,
    /// By seat.
    doorbells: Vec<Doorbell>,
}

/// What a rank waits with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch<'a> {
    /// The ring of the ranks of this host, if there are several.
    pub(crate) host: Option<&'a Links>,
    pub(crate) pass: &'a Pass,
    pub(crate) progress: &'a Progress,
    /// Of the operation, among all of the group.
    pub(crate) sequence: u64,
    pub(crate) patience: Patience,
}

/// Why a sum over shared memory stopped. Ranks are those of the group.
#[derive(Debug)]
pub(crate) enum SharedFault {
    /// By the fence.
    Aborted,
    /// This rank is in another operation.
    Broken(usize, String),
    /// This rank is gone, or has failed.
    Lost(usize),
}

impl Room {
    /// `doorbells`, `ranks`: by seat.
    pub(crate) fn new(memory: Memory, seat: Seat, ranks: Vec<usize>, doorbells: Vec<Doorbell>) -> Self {
        Self { memory, seat, ranks, doorbells }
    }

    /// Of the numbers of a group, which are at the memory's start.
    pub(super) const fn bytes(world: usize) -> usize {
        LINE_BYTES * (1 + world)
    }

    /// A fault of the rank at this seat.
    pub(super) fn broken(&self, seat: usize, reason: String) -> SharedFault {
        SharedFault::Broken(self.ranks[seat], reason)
    }

    /// Rings when somebody counts while this rank sleeps, or has failed.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.doorbells[self.seat.rank]
    }

    /// The first of these whose number of this kind is below `count`.
    pub(super) fn first_behind(
        &self,
        mut seats: impl Iterator<Item = usize>,
        number: Number,
        count: u64,
    ) -> Option<usize> {
        seats.find(|seat| self.number(*seat, number).load(Ordering::Acquire) < count)
    }

    /// Counts, and wakes who sleeps.
    pub(super) fn publish(&self, number: Number, count: u64) {
        self.number(self.seat.rank, number).store(count, Ordering::Release);
        fence(Ordering::SeqCst);
        for seat in (0..self.seat.world).filter(|seat| *seat != self.seat.rank) {
            let asleep = self.asleep(seat);
            if asleep.load(Ordering::SeqCst) > 0 && asleep.swap(0, Ordering::SeqCst) > 0 {
                self.doorbells[seat].ring();
            }
        }
    }

    /// Whoever waits for this rank hears of it at once. What it says is not looked at.
    pub(super) fn fail(&self) {
        self.memory.word32(BROKEN).store(self.seat.rank as u32 + 1, Ordering::SeqCst);
        for seat in (0..self.seat.world).filter(|seat| *seat != self.seat.rank) {
            self.doorbells[seat].ring();
        }
    }

    /// What a rank that has failed has said.
    pub(crate) fn failed(&self) -> Option<SharedFault> {
        let seat = self.memory.word32(BROKEN).load(Ordering::SeqCst).checked_sub(1)? as usize;
        Some(SharedFault::Lost(self.ranks[seat.min(self.seat.world - 1)]))
    }

    /// Waits until `behind` names no rank any more.
    pub(super) fn wait(
        &self,
        watch: Watch<'_>,
        behind: impl Fn(&Self) -> Option<usize>,
    ) -> Result<(), SharedFault> {
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
        let Watch { pass, progress, sequence, .. } = watch;
        let generation = pass.generation();
        let (received, sent, waits_for_next) = (0, 0, false);
        progress.wait_at(Place { generation, operation: sequence + 1, received, sent, waits_for_next });
        let mut lookout = Lookout::new(watch);
        let asleep = self.asleep(self.seat.rank);
        let result = loop {
            asleep.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if behind(self).is_some() && self.failed().is_none() {
                self.doze(pass, &lookout);
            }
            asleep.store(0, Ordering::SeqCst);
            if behind(self).is_none() {
                break Ok(());
            }
            if pass.check().is_err() {
                break Err(SharedFault::Aborted);
            }
            let fault = self.failed().or_else(|| lookout.look());
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

    /// Until something stirs.
    fn doze(&self, pass: &Pass, lookout: &Lookout<'_>) {
        let mut fds =
            vec![PollFd::new(pass.bell(), PollFlags::IN), PollFd::new(self.doorbell(), PollFlags::IN)];
        fds.extend(lookout.fds());
        // A poll that fails is as good as one that has ended: all is looked at again.
        let _ = poll_until(&mut fds, Instant::now().checked_add(LOOK_EVERY));
        if !fds[0].revents().is_empty() {
            pass.bell().clear();
        }
        if !fds[1].revents().is_empty() {
            self.doorbell().clear();
        }
    }

    fn number(&self, seat: usize, number: Number) -> &AtomicU64 {
        self.memory.word64(LINE_BYTES * (1 + seat) + size_of::<u64>() * number as usize)
    }

    /// Not 0 while this rank sleeps, and nobody has rung.
    fn asleep(&self, seat: usize) -> &AtomicU32 {
        self.memory.word32(LINE_BYTES * (1 + seat) + ASLEEP)
    }
}

/// What a rank counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Number {
    /// Operations.
    Begun = 0,
    /// Blocks that others need for their parts of a sum.
    PutIn = 1,
    /// Blocks of which the own part is summed.
    Reduced = 2,
    /// Blocks that have gone on to other hosts.
    Sent = 3,
    /// Blocks whose totals are there.
    Told = 4,
    /// Blocks whose totals are taken.
    Taken = 5,
    /// Operations whose notes are there.
    Noted = 6,
}

/// Behind the numbers of a rank, apart from those of others so that they don't share a cache line.
const ASLEEP: usize = 64;

/// At the start of the memory: who has failed.
const BROKEN: usize = 0;

/// Two lines of cache, which are fetched together.
const LINE_BYTES: usize = 128;

/// How soon a ring that a killed rank owed is made up for.
const LOOK_EVERY: Duration = Duration::from_millis(100);
