//! Exchange among ranks that share memory.
//!
//! ```text
//!   mailbox of s and r:   written │ read │ slot 0 │ slot 1 │ slot 2 │ slot 3
//!                           by s    by r   header and part of a payload, in turn
//! ```
//!
//! Each ordered pair of ranks has a mailbox with a few slots. A rank writes to any mailbox that has
//! a free slot, and reads from any that has a full one, so payloads of any lengths make progress.
//! The first slot of a payload says how long it is.
//!
//! **Invariant:** a slot is written by its sender while `written - read < SLOTS`, and read by its
//! receiver while `read < written`. Both counters are monotonic.
//!
//! **Invariant:** a rank finishes only when all ranks of the host have written all their payloads.
//! So a rank that ends earlier has failed, and of one that ends later no other rank needs anything.

use rustix::event::PollFd;

use super::op_headers::{self, OpHeaders};
use super::region::CounterSlot::{Begun, Delivered};
use super::region::{LINE_BYTES, SharedRegion, WaitContext};
use crate::net::spin_wait::SpinWait;
use crate::transfer::{Incoming, LocalFault, Pair};

/// Layout of the mailboxes. All offsets are in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mailboxes {
    /// Offset in the region, a multiple of a cache line.
    start: usize,
    world: usize,
}

impl Mailboxes {
    /// `end`: of what is before the mailboxes in the region.
    pub(super) fn new(end: usize, world: usize) -> Self {
        Self { start: end.next_multiple_of(LINE_BYTES), world }
    }

    pub(super) fn end(self) -> usize {
        self.written(self.world, 0)
    }

    /// Offset of the number of slots that `from` has written.
    fn written(self, from: usize, to: usize) -> usize {
        let mailbox_bytes = 2 * LINE_BYTES + SLOTS as usize * (LINE_BYTES + self.slot_bytes());
        self.start + (from * self.world + to) * mailbox_bytes
    }

    /// Offset of the number of slots that `to` has read.
    fn read(self, from: usize, to: usize) -> usize {
        self.written(from, to) + LINE_BYTES
    }

    /// Offset of the header of a slot; its part of the payload follows.
    fn slot(self, from: usize, to: usize, number: u64) -> usize {
        let slot = (number % SLOTS) as usize * (LINE_BYTES + self.slot_bytes());
        self.written(from, to) + 2 * LINE_BYTES + slot
    }

    /// Largest part of a payload in a slot. Mailboxes of one rank fit into a core's cache together.
    fn slot_bytes(self) -> usize {
        (SLOTS_BYTES_OF_RANK / self.world).clamp(SLOT_BYTES_MIN, SLOT_BYTES_MAX) / LINE_BYTES
            * LINE_BYTES
    }
}

/// Place of an operation in its region.
#[derive(Clone, Copy, Debug)]
pub(super) struct MailPlace {
    pub(super) op_headers: OpHeaders,
    pub(super) mailboxes: Mailboxes,
    /// Number of the operation in the region.
    pub(super) operation: u64,
}

/// One exchange in progress among the ranks of a host.
#[derive(Debug)]
pub(crate) struct Mail<'a> {
    region: &'a SharedRegion,
    mailboxes: Mailboxes,
    context: WaitContext<'a>,
    /// Number of exchanges in the region, including this one.
    exchanges: u64,
    letters: Vec<Letters<'a>>,
}

/// The payloads that this rank and another one give to each other.
#[derive(Debug)]
struct Letters<'a> {
    /// Local rank of the other one.
    peer: usize,
    outgoing: Option<&'a [u8]>,
    is_begun: bool,
    incoming: Option<Letter<'a>>,
}

#[derive(Debug)]
struct Letter<'a> {
    payload: Incoming<'a>,
    /// Number of bytes that are read.
    read: usize,
    /// Length of the payload, once the first slot is read.
    bytes: Option<usize>,
}

impl<'a> Mail<'a> {
    /// Begins an exchange. `pairs`: those with ranks of this host.
    pub(super) fn begin(
        region: &'a SharedRegion,
        place: MailPlace,
        context: WaitContext<'a>,
        pairs: Vec<Pair<'a>>,
    ) -> Self {
        let MailPlace { op_headers, mailboxes, operation } = place;
        op_headers.post_exchange(region, operation, context.sequence);
        region.publish(Begun, operation + 1);
        let letters = pairs.into_iter().map(|Pair { rank, send, receive }| {
            let peer = region.ranks.iter().position(|other| *other == rank);
            Letters {
                peer: peer.expect("the caller has selected the ranks of this host"),
                outgoing: Some(send),
                is_begun: false,
                incoming: Some(Letter { payload: receive, read: 0, bytes: None }),
            }
        });
        let exchanges = region.delivered() + 1;
        Self { region, mailboxes, context, exchanges, letters: letters.collect() }
    }

    /// Writes and reads a slot of each mailbox, as far as possible. Returns whether it has.
    pub(crate) fn step(&mut self) -> Result<bool, LocalFault> {
        let Self { region, mailboxes, context, exchanges, .. } = *self;
        let mailboxes = Slots { region, mailboxes };
        let mut has_moved = false;
        for letters in &mut self.letters {
            has_moved |= letters.write(mailboxes, context.sequence);
            has_moved |= letters.read(mailboxes, context.sequence)?;
        }
        let is_delivered = self.letters.iter().all(|letters| letters.outgoing.is_none());
        if is_delivered && region.delivered() < exchanges {
            region.publish(Delivered, exchanges);
            has_moved = true;
        }
        Ok(has_moved)
    }

    /// Whether all payloads are here, and those of all ranks of the host are written.
    pub(crate) fn is_done(&self) -> bool {
        self.letters.iter().all(|letters| letters.incoming.is_none())
            && self.region.all_delivered(self.exchanges)
    }

    /// Sleeps until a step is possible or useful, or one of `fds` has an event.
    ///
    /// # Errors
    /// A rank of the host is gone or has failed, or the fence is raised.
    pub(crate) fn sleep(&self, fds: &[PollFd<'_>]) -> Result<(), LocalFault> {
        let slots = Slots { region: self.region, mailboxes: self.mailboxes };
        let is_ready =
            || self.is_done() || self.letters.iter().any(|letters| letters.is_ready(slots));
        self.region.sleep_for_mail(self.context, self.exchanges, &is_ready, fds)
    }

    /// Policy of the waits, which remembers whether other threads need the core.
    pub(crate) fn spin_wait(&self) -> SpinWait {
        self.region.spin_wait.get()
    }

    /// Ends the operation. `is_failed`: the other ranks of the host are to fail too.
    pub(crate) fn finish(self, mut spin_wait: SpinWait, is_failed: bool) {
        spin_wait.reset();
        self.region.spin_wait.set(spin_wait);
        if is_failed {
            self.region.fail();
        }
    }
}

/// The slots of a region's mailboxes.
#[derive(Clone, Copy)]
struct Slots<'a> {
    region: &'a SharedRegion,
    mailboxes: Mailboxes,
}

impl Slots<'_> {
    fn own(self) -> usize {
        self.region.local.rank
    }

    /// Number of the next slot to write for `peer`; `None` if all are full.
    fn to_write(self, peer: usize) -> Option<u64> {
        let (written, read) = self.counts(self.own(), peer);
        (written.wrapping_sub(read) < SLOTS).then_some(written)
    }

    /// Number of the next slot of `peer` to read; `None` if all are empty.
    fn to_read(self, peer: usize) -> Option<u64> {
        let (written, read) = self.counts(peer, self.own());
        (read < written).then_some(read)
    }

    fn counts(self, from: usize, to: usize) -> (u64, u64) {
        let Self { region, mailboxes } = self;
        let of = |offset| region.memory.word64(offset).load(std::sync::atomic::Ordering::Acquire);
        (of(mailboxes.written(from, to)), of(mailboxes.read(from, to)))
    }
}

impl Letters<'_> {
    fn is_ready(&self, slots: Slots<'_>) -> bool {
        (self.outgoing.is_some() && slots.to_write(self.peer).is_some())
            || (self.incoming.is_some() && slots.to_read(self.peer).is_some())
    }

    /// Writes one slot, if one is free and something is left to write.
    fn write(&mut self, slots: Slots<'_>, sequence: u64) -> bool {
        let Slots { region, mailboxes } = slots;
        let (Some(payload), Some(number)) = (self.outgoing, slots.to_write(self.peer)) else {
            return false;
        };
        let slot = mailboxes.slot(slots.own(), self.peer, number);
        if !self.is_begun {
            let header = op_headers::seal([sequence, payload.len() as u64, 0]);
            region.memory.write(slot, bytemuck::cast_slice(&header));
            self.is_begun = true;
        }
        let (part, rest) = payload.split_at(payload.len().min(mailboxes.slot_bytes()));
        region.memory.write(slot + LINE_BYTES, part);
        let written = region.memory.word64(mailboxes.written(slots.own(), self.peer));
        region.publish_mail(written, number + 1, self.peer);
        self.outgoing = (!rest.is_empty()).then_some(rest);
        true
    }

    /// Reads one slot, if one is full and something is left to read.
    fn read(&mut self, slots: Slots<'_>, sequence: u64) -> Result<bool, LocalFault> {
        let Slots { region, mailboxes } = slots;
        let Some(incoming) = &mut self.incoming else { return Ok(false) };
        let Some(number) = slots.to_read(self.peer) else { return Ok(false) };
        let slot = mailboxes.slot(self.peer, slots.own(), number);
        let bytes = match incoming.bytes {
            Some(bytes) => bytes,
            None => {
                let mut header = [0_u64; 4];
                region.memory.read(slot, bytemuck::cast_slice_mut(&mut header));
                let bytes = op_headers::open(header)
                    .and_then(|[its, bytes, _]| {
                        check_header([its, bytes], sequence, &incoming.payload)
                    })
                    .map_err(|reason| region.broken(self.peer, reason))?;
                if let Incoming::Any(payload) = &mut incoming.payload {
                    payload.clear();
                    payload.reserve(bytes);
                }
                incoming.bytes = Some(bytes);
                bytes
            }
        };
        let missing = bytes - incoming.read;
        let part = missing.min(mailboxes.slot_bytes());
        let start = slot + LINE_BYTES;
        match &mut incoming.payload {
            Incoming::Any(payload) => region.memory.append(start, part, payload),
            Incoming::Exact(payload) => {
                region.memory.read(start, &mut payload[incoming.read..][..part]);
            }
        }
        incoming.read += part;
        let read = region.memory.word64(mailboxes.read(self.peer, slots.own()));
        region.publish_mail(read, number + 1, self.peer);
        if part == missing {
            self.incoming = None;
        }
        Ok(true)
    }
}

/// Returns the length of the payload.
fn check_header(
    [sequence, bytes]: [u64; 2],
    expected: u64,
    payload: &Incoming<'_>,
) -> Result<usize, String> {
    if sequence != expected {
        return Err(format!("expected sequence number {expected}, got {sequence}"));
    }
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    payload.check(bytes).map(|()| bytes)
}

/// Slots of a mailbox: some are written while others are read.
const SLOTS: u64 = 4;

/// Bytes of one slot of each mailbox to which a rank writes.
const SLOTS_BYTES_OF_RANK: usize = if cfg!(miri) { 1 << 10 } else { 256 << 10 };

/// Smaller parts cost more synchronization than copying.
const SLOT_BYTES_MIN: usize = if cfg!(miri) { LINE_BYTES } else { 4 << 10 };

const SLOT_BYTES_MAX: usize = if cfg!(miri) { 256 } else { 64 << 10 };

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::algorithm::schedule::RankInfo;
    use crate::net::progress::Progress;
    use crate::shm::{Memory, ShmGroup};
    use crate::{Fence, PAYLOAD_BYTES_MAX};

    /// Miri runs this test and checks that ranks never access memory that another rank uses.
    #[test]
    fn threads_that_share_memory_exchange_payloads_of_any_length_between_sums() {
        let world = 3;
        let slot = Mailboxes::new(0, world).slot_bytes();
        let lens = [0, 1, slot - 1, slot, slot + 1, 6 * slot + 5];
        let len = |from: usize, to: usize, round: usize| lens[(from + 3 * to + round) % lens.len()];
        let payload = |from, to, round| {
            (0..len(from, to, round))
                .map(|at| (at % 251 + from * 16 + to) as u8)
                .collect::<Vec<_>>()
        };
        thread::scope(|scope| {
            let memories = Memory::of_threads(ShmGroup::bytes(world), world);
            for (rank, memory) in memories.into_iter().enumerate() {
                let (local, ranks) = (RankInfo { rank, world }, (0..world).collect());
                let region = SharedRegion::new(memory, local, ranks, Vec::new()).spinning();
                scope.spawn(move || {
                    let mut shared = ShmGroup::new(region);
                    let (registration, progress) =
                        (Fence::new().register(1).unwrap(), Progress::new());
                    for round in 0..2 * lens.len() {
                        let (registration, progress) = (&registration, &progress);
                        let sequence = round as u64;
                        let context = WaitContext {
                            host: None,
                            ring: None,
                            registration,
                            progress,
                            sequence,
                        };
                        if round % 4 == 3 {
                            let mut sum = [0.0];
                            shared.all_reduce(context, &[], &[1.0], &mut sum).unwrap();
                            assert_eq!(sum, [3.0]);
                            continue;
                        }
                        let others = || (0..world).filter(|other| *other != rank);
                        let sent: Vec<_> = others().map(|to| payload(rank, to, round)).collect();
                        let mut got: Vec<_> = others().map(|_| vec![1; 3]).collect();
                        let pairs = others().zip(&sent).zip(&mut got);
                        let pairs = pairs.map(|((rank, send), receive)| Pair {
                            rank,
                            send,
                            receive: Incoming::Any(receive),
                        });
                        let mut mail = shared.begin_exchange(context, pairs.collect());
                        while !mail.is_done() {
                            mail.step().unwrap();
                            thread::yield_now();
                        }
                        let right: Vec<_> = others().map(|of| payload(of, rank, round)).collect();
                        assert!(got == right, "rank {rank}, round {round}");
                    }
                });
            }
        });
    }

    /// Lets ranks of one thread exchange payloads of these lengths, by sender and receiver. Runs
    /// `act`, then all ranks to the end, and checks the payloads.
    fn exchange(lens: &[&[usize]], act: impl FnOnce(&mut [Mail<'_>])) {
        let world = lens.len();
        let (registration, progress) = (Fence::new().register(1).unwrap(), Progress::new());
        let (registration, progress) = (&registration, &progress);
        let memories = Memory::of_threads(ShmGroup::bytes(world), world);
        let mut groups: Vec<_> = memories
            .into_iter()
            .enumerate()
            .map(|(rank, memory)| {
                let (local, ranks) = (RankInfo { rank, world }, (0..world).collect());
                ShmGroup::new(SharedRegion::new(memory, local, ranks, Vec::new()))
            })
            .collect();
        let payload = |from: usize, to: usize| {
            (0..lens[from][to]).map(|at| (at / 100 + from + 3 * to) as u8).collect::<Vec<_>>()
        };
        let sent: Vec<Vec<_>> =
            (0..world).map(|from| (0..world).map(|to| payload(from, to)).collect()).collect();
        let mut got = vec![vec![Vec::new(); world]; world];
        let ranks = groups.iter_mut().zip(&sent).zip(&mut got).enumerate();
        let mut mails: Vec<_> = ranks
            .map(|(own, ((group, sent), got))| {
                let context =
                    WaitContext { host: None, ring: None, registration, progress, sequence: 7 };
                let pairs = sent.iter().zip(got).enumerate().filter(|(rank, _)| *rank != own);
                let pairs = pairs.map(|(rank, (send, receive))| Pair {
                    rank,
                    send,
                    receive: Incoming::Any(receive),
                });
                group.begin_exchange(context, pairs.collect())
            })
            .collect();
        act(&mut mails);
        while !mails.iter().all(Mail::is_done) {
            for mail in &mut mails {
                mail.step().unwrap();
            }
        }
        for (from, to) in (0..world).flat_map(|from| (0..world).map(move |to| (from, to))) {
            assert!(from == to || got[to][from] == sent[from][to], "from {from} to {to}");
        }
    }

    #[test]
    fn a_sender_that_is_ahead_overwrites_nothing() {
        let slot = Mailboxes::new(0, 2).slot_bytes();
        exchange(&[&[0, 9 * slot + 1], &[0, 0]], |mails| {
            let steps = std::iter::repeat_with(|| mails[0].step().unwrap());
            assert_eq!(steps.take_while(|has_moved| *has_moved).take(100).count(), SLOTS as usize);
        });
    }

    #[test]
    fn no_rank_has_finished_before_all_have_written_their_payloads() {
        let slot = Mailboxes::new(0, 3).slot_bytes();
        exchange(&[&[0; 3], &[0, 0, 9 * slot], &[0; 3]], |mails| {
            // Rank 0 has all its payloads, and no one has read its own.
            for _ in 0..10 {
                mails[1].step().unwrap();
                mails[0].step().unwrap();
            }
            mails[2].step().unwrap();
            mails[0].step().unwrap();
            assert!(mails[0].letters.iter().all(|letters| letters.incoming.is_none()));
            assert!(!mails[0].is_done());
        });
    }

    #[test]
    fn a_header_of_another_operation_or_of_an_impossible_length_is_refused() {
        let (most, mut payload, mut exact) = (PAYLOAD_BYTES_MAX as u64, Vec::new(), [0; 3]);
        let any = Incoming::Any(&mut payload);
        assert_eq!(check_header([5, most], 5, &any), Ok(PAYLOAD_BYTES_MAX));
        assert!(check_header([4, 0], 5, &any).unwrap_err().contains("sequence number 5, got 4"));
        for bytes in [most + 1, u64::MAX] {
            assert!(check_header([5, bytes], 5, &any).unwrap_err().contains("at most 1073741824"));
        }
        let exact = Incoming::Exact(&mut exact);
        assert_eq!(check_header([5, 3], 5, &exact), Ok(3));
        assert!(check_header([5, 4], 5, &exact).unwrap_err().contains("of 3 bytes, got 4"));
    }
}
