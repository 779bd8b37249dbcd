//! What ranks that share memory do to meet: they count, and wait for each other's numbers.
//!
//! Each rank counts in numbers that only it writes. There is no lock: a rank that is killed, at
//! whatever instruction, just counts no further. That it is gone shows at links, which are watched
//! while one waits, and who sees it says so in the memory and rings.
//!
//! Who sleeps has said what for, and only the rank with whose count that has come to pass rings: 4
//! ranks on 2 cores that were woken by every count took a quarter longer for 1 MiB.
//!
//! **Invariant:** who sleeps has said so before it looked for the last time, and who has counted
//! looks for sleepers after that: so either the count is seen, or the sleeper; and of two that
//! count at once, one sees both counts. A rank that is killed before it rings leaves the others
//! asleep; they look again now and then.

use std::cell::Cell;
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
    patience: Cell<Patience>,
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
    pub(crate) fn new(
        memory: Memory,
        seat: Seat,
        ranks: Vec<usize>,
        doorbells: Vec<Doorbell>,
    ) -> Self {
        Self { memory, seat, ranks, doorbells, patience: Cell::new(Patience::in_memory()) }
    }

    /// Never sleeps.
    #[cfg(test)]
    pub(crate) fn sleepless(mut self) -> Self {
        self.patience = Cell::new(Patience::endless());
        self
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

    /// Counts, and wakes whoever waited for that and for nothing else.
    pub(super) fn publish(&self, number: Number, count: u64) {
        self.number(self.seat.rank, number).store(count, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.sleepers().load(Ordering::SeqCst) == 0 {
            return;
        }
        for seat in (0..self.seat.world).filter(|seat| *seat != self.seat.rank) {
            let said = self.wish(seat).load(Ordering::SeqCst);
            let has_come =
                Wish::decode(said).is_some_and(|wish| wish.number == number && self.has_come(wish));
            let is_first = || {
                self.wish(seat).compare_exchange(said, AWAKE, Ordering::SeqCst, Ordering::SeqCst)
            };
            if has_come && is_first().is_ok() {
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

    /// Waits until these ranks have counted so far.
    pub(super) fn wait(&self, watch: Watch<'_>, wish: Wish) -> Result<(), SharedFault> {
        if watch.pass.check().is_err() {
            return Err(SharedFault::Aborted);
        }
        let mut patience = self.patience.get();
        while !self.has_come(wish) {
            if !patience.lasts() {
                self.remember(patience, wish);
                return self.sleep(watch, wish);
            }
        }
        self.remember(patience, wish);
        Ok(())
    }

    /// Who has not begun may compute, on this very core: it is not in the way.
    fn remember(&self, mut patience: Patience, wish: Wish) {
        if wish.number != Number::Begun {
            patience.restore();
            self.patience.set(patience);
        }
    }

    fn sleep(&self, watch: Watch<'_>, wish: Wish) -> Result<(), SharedFault> {
        let Watch { pass, progress, sequence, .. } = watch;
        let generation = pass.generation();
        let (received, sent, waits_for_next) = (0, 0, false);
        progress.wait_at(Place {
            generation,
            operation: sequence + 1,
            received,
            sent,
            waits_for_next,
        });
        let mut lookout = Lookout::new(watch);
        let own = self.wish(self.seat.rank);
        self.sleepers().fetch_add(1, Ordering::SeqCst);
        let result = loop {
            own.store(wish.encode(), Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if !self.has_come(wish) && self.failed().is_none() {
                self.doze(pass, &lookout);
            }
            own.store(AWAKE, Ordering::SeqCst);
            if self.has_come(wish) {
                break Ok(());
            }
            if pass.check().is_err() {
                break Err(SharedFault::Aborted);
            }
            let fault = self.failed().or_else(|| lookout.look());
            // Who has left after the operation's end has counted all before.
            match (fault, self.has_come(wish)) {
                (_, true) => break Ok(()),
                (Some(fault), false) => break Err(fault),
                (None, false) => {}
            }
        };
        self.sleepers().fetch_sub(1, Ordering::SeqCst);
        progress.go_on();
        result
    }

    /// Until something stirs.
    fn doze(&self, pass: &Pass, lookout: &Lookout<'_>) {
        let mut fds = vec![
            PollFd::new(pass.bell(), PollFlags::IN),
            PollFd::new(self.doorbell(), PollFlags::IN),
        ];
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

    fn has_come(&self, wish: Wish) -> bool {
        let Wish { of, number, count } = wish;
        let mut seats = match of {
            Of::All => 0..self.seat.world,
            Of::Followers => 1..self.seat.world,
            Of::Leader => 0..1,
        };
        seats.all(|seat| self.number(seat, number).load(Ordering::Acquire) >= count)
    }

    /// What a rank sleeps for.
    fn wish(&self, seat: usize) -> &AtomicU64 {
        self.memory.word64(LINE_BYTES * (1 + seat) + WISH)
    }

    /// How many sleep. One that was killed stays among them, which costs the others a look.
    fn sleepers(&self) -> &AtomicU32 {
        self.memory.word32(SLEEPERS)
    }
}

/// What a rank waits for: that these ranks have counted so far.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Wish {
    pub(super) of: Of,
    pub(super) number: Number,
    /// Below 2^48.
    pub(super) count: u64,
}

/// Whose numbers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Of {
    All,
    /// All but the first one.
    Followers,
    /// The first one.
    Leader,
}

impl Wish {
    fn encode(self) -> u64 {
        self.count << 16 | (self.number as u64) << 8 | (self.of as u64 + 1)
    }

    /// None of who is awake.
    fn decode(said: u64) -> Option<Self> {
        let [of, number, ..] = said.to_le_bytes();
        let of = [Of::All, Of::Followers, Of::Leader].into_iter().find(|o| *o as u8 + 1 == of)?;
        let number = Number::ALL.into_iter().find(|n| *n as u8 == number)?;
        Some(Self { of, number, count: said >> 16 })
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

impl Number {
    const ALL: [Self; 7] =
        [Self::Begun, Self::PutIn, Self::Reduced, Self::Sent, Self::Told, Self::Taken, Self::Noted];
}

/// A [`Wish`] that is none.
const AWAKE: u64 = 0;

/// Behind the numbers of a rank, apart from those of others so that they don't share a cache line.
const WISH: usize = 64;

/// At the start of the memory: who has failed, and how many sleep.
const BROKEN: usize = 0;
const SLEEPERS: usize = 64;

/// Two lines of cache, which are fetched together.
const LINE_BYTES: usize = 128;

/// How soon a ring that a killed rank owed is made up for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_survives_the_memory() {
        for of in [Of::All, Of::Followers, Of::Leader] {
            for number in Number::ALL {
                for count in [0, 1, (1 << 48) - 1] {
                    let wish = Wish { of, number, count };
                    assert_eq!(Wish::decode(wish.encode()), Some(wish));
                }
            }
        }
        assert_eq!(Wish::decode(AWAKE), None);
    }
}
