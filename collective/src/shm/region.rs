//! Synchronization of ranks that share memory: monotonic counters, and waits for the counters of
//! other ranks.
//!
//! Each counter has a single writer. There is no lock: a rank that is killed, at any instruction,
//! just stops counting. Its end shows as a closed link; waiting ranks monitor the links, and the
//! first one that detects it marks the region as broken and notifies the other ranks.
//!
//! A waiter publishes its wait condition before it sleeps. Only the rank whose increment satisfies
//! the condition wakes it: with 4 ranks on 2 cores, a wake-up by every increment took a quarter
//! longer for 1 MiB.
//!
//! **Invariant:** a waiter publishes its condition *before* its last check of the counters; a rank
//! that increments a counter checks for waiters *after* its increment (Dekker's pattern, with
//! sequentially consistent fences). So either the waiter sees the count, or the counting rank sees
//! the waiter; and of two ranks that increment concurrently, one sees both counts. A rank that is
//! killed before it notifies leaves waiters asleep, so waiters check again periodically.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::link_monitor::LinkMonitor;
use super::memory::Memory;
use super::pipe_notifier::PipeNotifier;
use crate::algorithm::schedule::RankInfo;
use crate::net::fence::GroupRegistration;
use crate::net::neighbours::Links;
use crate::net::progress::{Progress, WaitPoint};
use crate::net::socket::poll_until;
use crate::net::spin_wait::SpinWait;
use crate::transfer::LocalFault;

/// Shared memory region of several ranks, from the view of one of them.
#[derive(Debug)]
pub(crate) struct SharedRegion {
    pub(super) memory: Memory,
    /// This rank, and the number of ranks that share the region.
    pub(super) local: RankInfo,
    /// Ranks in the group, by local rank.
    pub(super) ranks: Vec<usize>,
    /// Notifiers by local rank.
    notifiers: Vec<PipeNotifier>,
    pub(super) spin_wait: Cell<SpinWait>,
}

/// Context of a wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitContext<'a> {
    /// Links of the ring of this host's ranks, if there are several.
    pub(crate) host: Option<&'a Links>,
    /// Links of the ring of all ranks, to be monitored too as far as they are to ranks of this
    /// host.
    pub(crate) ring: Option<&'a Links>,
    pub(crate) registration: &'a GroupRegistration,
    pub(crate) progress: &'a Progress,
    /// Sequence number of the operation in the group.
    pub(crate) sequence: u64,
}

impl SharedRegion {
    /// `notifiers`, `ranks`: by local rank.
    pub(crate) fn new(
        memory: Memory,
        local: RankInfo,
        ranks: Vec<usize>,
        notifiers: Vec<PipeNotifier>,
    ) -> Self {
        Self {
            memory,
            local,
            ranks,
            notifiers,
            spin_wait: Cell::new(SpinWait::for_shared_memory()),
        }
    }

    /// Makes waits spin without a limit.
    #[cfg(test)]
    pub(crate) fn spinning(mut self) -> Self {
        self.spin_wait = Cell::new(SpinWait::unlimited());
        self
    }

    /// Length of the counters of a group, which are at the start of the memory.
    pub(super) const fn bytes(world: usize) -> usize {
        LINE_BYTES * (1 + world)
    }

    /// Returns a protocol fault of the given local rank.
    pub(super) fn broken(&self, local_rank: usize, reason: String) -> LocalFault {
        LocalFault::Broken(self.ranks[local_rank], reason)
    }

    /// Notifier of this rank: set when its wait condition becomes true, or when a rank has failed.
    pub(crate) fn notifier(&self) -> &PipeNotifier {
        &self.notifiers[self.local.rank]
    }

    /// Sets a counter of this rank, and wakes the ranks whose wait condition it satisfies.
    pub(super) fn publish(&self, counter: CounterSlot, count: u64) {
        self.counter(self.local.rank, counter).store(count, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.waiters().load(Ordering::SeqCst) == 0 {
            return;
        }
        for local_rank in (0..self.local.world).filter(|local_rank| *local_rank != self.local.rank)
        {
            self.wake_if(local_rank, |condition| {
                condition.counter == counter && self.is_satisfied(condition)
            });
        }
    }

    /// Sets a counter of a mailbox, and wakes the rank at the other end of it if that waits for its
    /// mailboxes.
    pub(super) fn publish_mail(&self, counter: &AtomicU64, count: u64, local_rank: usize) {
        counter.store(count, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.waiters().load(Ordering::SeqCst) > 0 {
            self.wake_if(local_rank, |condition| condition.counter == CounterSlot::Delivered);
        }
    }

    /// Wakes a rank that waits for such a condition.
    fn wake_if(&self, local_rank: usize, is_met: impl Fn(WaitCondition) -> bool) {
        let condition = self.condition(local_rank);
        let published = condition.load(Ordering::SeqCst);
        let is_met = WaitCondition::decode(published).is_some_and(is_met);
        let (before, after) = (Ordering::SeqCst, Ordering::SeqCst);
        if is_met && condition.compare_exchange(published, NOT_WAITING, before, after).is_ok() {
            self.notifiers[local_rank].notify();
        }
    }

    /// Writes a rank's block to `slot`, except for the chunk that the rank reduces itself.
    pub(super) fn write_input(&self, slot: usize, src: &[f32], own: &Range<usize>) {
        self.memory.write(slot, bytemuck::cast_slice(&src[..own.start]));
        let rest = slot + own.end * size_of::<f32>();
        self.memory.write(rest, bytemuck::cast_slice(&src[own.end..]));
    }

    /// Marks the region as broken, and wakes all other ranks.
    pub(super) fn fail(&self) {
        self.memory.word32(BROKEN).store(self.local.rank as u32 + 1, Ordering::SeqCst);
        for local_rank in (0..self.local.world).filter(|local_rank| *local_rank != self.local.rank)
        {
            self.notifiers[local_rank].notify();
        }
    }

    /// Returns the fault of a rank that has marked the region as broken.
    pub(crate) fn failed(&self) -> Option<LocalFault> {
        let local_rank = self.memory.word32(BROKEN).load(Ordering::SeqCst).checked_sub(1)? as usize;
        Some(LocalFault::Lost(self.ranks[local_rank.min(self.local.world - 1)]))
    }

    /// Waits until `condition` is satisfied.
    pub(super) fn wait(
        &self,
        context: WaitContext<'_>,
        condition: WaitCondition,
    ) -> Result<(), LocalFault> {
        if context.registration.check().is_err() {
            return Err(LocalFault::Aborted);
        }
        let mut spin_wait = self.spin_wait.get();
        while !self.is_satisfied(condition) {
            if !spin_wait.should_spin() {
                self.save_spin_wait(spin_wait, condition);
                return self.sleep(context, condition, &|| self.is_satisfied(condition), &[]);
            }
        }
        self.save_spin_wait(spin_wait, condition);
        Ok(())
    }

    /// Sleeps until `is_ready`, all ranks have delivered `count` exchanges, or one of `fds` has an
    /// event.
    pub(super) fn sleep_for_mail(
        &self,
        context: WaitContext<'_>,
        count: u64,
        is_ready: &dyn Fn() -> bool,
        fds: &[PollFd<'_>],
    ) -> Result<(), LocalFault> {
        let counter = CounterSlot::Delivered;
        self.sleep(context, WaitCondition { scope: Scope::All, counter, count }, is_ready, fds)
    }

    /// Whether all ranks have delivered `count` exchanges.
    pub(super) fn all_delivered(&self, count: u64) -> bool {
        let counter = CounterSlot::Delivered;
        self.is_satisfied(WaitCondition { scope: Scope::All, counter, count })
    }

    /// Saves the spin state across waits. A wait for `Begun` is excluded: a rank that has not begun
    /// may be computing on this core, and that is not contention.
    fn save_spin_wait(&self, mut spin_wait: SpinWait, condition: WaitCondition) {
        if condition.counter != CounterSlot::Begun {
            spin_wait.reset();
            self.spin_wait.set(spin_wait);
        }
    }

    /// Publishes `condition`, and sleeps until `is_satisfied` or one of `fds` has an event.
    fn sleep(
        &self,
        context: WaitContext<'_>,
        condition: WaitCondition,
        is_satisfied: &dyn Fn() -> bool,
        fds: &[PollFd<'_>],
    ) -> Result<(), LocalFault> {
        let WaitContext { registration, progress, sequence, .. } = context;
        let generation = registration.generation();
        let (received, sent, waits_for_next) = (0, 0, false);
        progress.begin_wait(WaitPoint {
            generation,
            operation: sequence + 1,
            received,
            sent,
            waits_for_next,
            far: Default::default(),
        });
        let of_host = |rank: usize| self.ranks.contains(&rank);
        let mut link_monitor = LinkMonitor::new([context.host, context.ring], of_host, sequence);
        let own = self.condition(self.local.rank);
        self.waiters().fetch_add(1, Ordering::SeqCst);
        let result = loop {
            own.store(condition.encode(), Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let mut has_event = false;
            if !is_satisfied() && self.failed().is_none() {
                has_event = self.wait_for_event(registration, &link_monitor, fds);
            }
            own.store(NOT_WAITING, Ordering::SeqCst);
            if has_event || is_satisfied() {
                break Ok(());
            }
            if registration.check().is_err() {
                break Err(LocalFault::Aborted);
            }
            let fault = self.failed().or_else(|| link_monitor.check());
            // A rank that left after the end of the operation has incremented all its counters
            // before.
            match (fault, is_satisfied()) {
                (_, true) => break Ok(()),
                (Some(fault), false) => break Err(fault),
                (None, false) => {}
            }
        };
        self.waiters().fetch_sub(1, Ordering::SeqCst);
        progress.end_wait();
        result
    }

    /// Blocks until a notifier, the fence or a link has an event. Returns whether one of `further`
    /// has.
    fn wait_for_event(
        &self,
        registration: &GroupRegistration,
        link_monitor: &LinkMonitor<'_>,
        further: &[PollFd<'_>],
    ) -> bool {
        let mut fds = vec![
            PollFd::new(registration.notifier(), PollFlags::IN),
            PollFd::new(self.notifier(), PollFlags::IN),
        ];
        fds.extend_from_slice(further);
        fds.extend(link_monitor.fds());
        // A failed poll is treated like an event: the caller checks all conditions again.
        let _ = poll_until(&mut fds, Instant::now().checked_add(RECHECK_INTERVAL));
        if !fds[0].revents().is_empty() {
            registration.notifier().clear();
        }
        if !fds[1].revents().is_empty() {
            self.notifier().clear();
        }
        fds[2..2 + further.len()].iter().any(|fd| !fd.revents().is_empty())
    }

    /// Number of exchanges that this rank has delivered.
    pub(super) fn delivered(&self) -> u64 {
        self.counter(self.local.rank, CounterSlot::Delivered).load(Ordering::Relaxed)
    }

    fn counter(&self, local_rank: usize, counter: CounterSlot) -> &AtomicU64 {
        self.memory.word64(LINE_BYTES * (1 + local_rank) + size_of::<u64>() * counter as usize)
    }

    fn is_satisfied(&self, condition: WaitCondition) -> bool {
        let WaitCondition { scope, counter, count } = condition;
        let mut local_ranks = match scope {
            Scope::All => 0..self.local.world,
            Scope::Followers => 1..self.local.world,
            Scope::Leader => 0..1,
        };
        local_ranks
            .all(|local_rank| self.counter(local_rank, counter).load(Ordering::Acquire) >= count)
    }

    /// Published wait condition of a rank.
    fn condition(&self, local_rank: usize) -> &AtomicU64 {
        self.memory.word64(LINE_BYTES * (1 + local_rank) + CONDITION)
    }

    /// Number of waiting ranks. A killed rank stays counted, which costs the other ranks a check of
    /// its condition.
    fn waiters(&self) -> &AtomicU32 {
        self.memory.word32(WAITERS)
    }
}

/// Wait condition: the counters of these ranks have reached `count`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct WaitCondition {
    pub(super) scope: Scope,
    pub(super) counter: CounterSlot,
    /// Count to reach, below 2^48.
    pub(super) count: u64,
}

/// Ranks whose counters are compared.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Scope {
    All,
    /// All ranks but the leader.
    Followers,
    /// The first rank of the host.
    Leader,
}

impl WaitCondition {
    fn encode(self) -> u64 {
        self.count << 16 | (self.counter as u64) << 8 | (self.scope as u64 + 1)
    }

    /// Decodes a published condition; `None` if the rank does not wait.
    fn decode(published: u64) -> Option<Self> {
        let [scope, counter, ..] = published.to_le_bytes();
        let scope = [Scope::All, Scope::Followers, Scope::Leader]
            .into_iter()
            .find(|o| *o as u8 + 1 == scope)?;
        let counter = CounterSlot::ALL.into_iter().find(|n| *n as u8 == counter)?;
        Some(Self { scope, counter, count: published >> 16 })
    }
}

/// Counters of a rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum CounterSlot {
    /// Operations begun.
    Begun = 0,
    /// Blocks written for the ranks that reduce them.
    InputWritten = 1,
    /// Blocks whose chunk this rank has reduced.
    Reduced = 2,
    /// Blocks that the leader has taken over for the ring of leaders.
    Sent = 3,
    /// Blocks whose totals are published.
    TotalPublished = 4,
    /// Blocks whose totals this rank has read.
    TotalTaken = 5,
    /// Operations whose notes are published.
    NotesPublished = 6,
    /// Exchanges whose payloads this rank has written to all mailboxes of the host.
    Delivered = 7,
}

impl CounterSlot {
    const ALL: [Self; 8] = [
        Self::Begun,
        Self::InputWritten,
        Self::Reduced,
        Self::Sent,
        Self::TotalPublished,
        Self::TotalTaken,
        Self::NotesPublished,
        Self::Delivered,
    ];
}

/// Encoding of the absence of a [`WaitCondition`].
const NOT_WAITING: u64 = 0;

/// Offset of the wait condition after a rank's counters, on a separate cache line.
const CONDITION: usize = 64;

/// Offsets at the start of the memory: the failed rank, and the number of waiters.
const BROKEN: usize = 0;
const WAITERS: usize = 64;

/// Two cache lines, which are prefetched together.
pub(super) const LINE_BYTES: usize = 128;

/// Period of a waiter's checks, in case a killed rank did not notify it.
const RECHECK_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_condition_survives_the_encoding() {
        for scope in [Scope::All, Scope::Followers, Scope::Leader] {
            for counter in CounterSlot::ALL {
                for count in [0, 1, (1 << 48) - 1] {
                    let condition = WaitCondition { scope, counter, count };
                    assert_eq!(WaitCondition::decode(condition.encode()), Some(condition));
                }
            }
        }
        assert_eq!(WaitCondition::decode(NOT_WAITING), None);
    }
}
