//! Hierarchical all-reduce for groups on several hosts: shared memory inside each host, and a ring
//! of leaders between hosts.
//!
//! ```text
//!   rank ─┐   write, reduce: the sum of all but the leader           ┌─ rank
//!   rank ─┼─▶ sums ─▶ leader ◀══ ring of leaders ══▶ leader ◀─ sums ◀┼─ rank
//!   rank ─┘ ◀─ totals ◀──┘      over TCP, f32 or 16-bit              └─ rank
//! ```
//!
//! Traffic between hosts equals that of a ring with one rank per host, `2·(h−1)/h` times the buffer
//! for `h` hosts, whatever the number and order of ranks. There is one leader per host, not one
//! ring for every rank of a host: hosts may have different numbers of ranks, and up to tens of
//! Gbit/s one link is sufficient.
//!
//! The buffer is processed in blocks, which are the segments of the leaders'
//! [schedule](crate::algorithm::schedule), in the order of that schedule. The leader takes a
//! block's sum when the ring's partial sum of the block has arrived, and publishes totals as they
//! arrive. So memory and network work concurrently. The leader, which serves the network, adds but
//! reduces no chunk itself.
//!
//! ```text
//! host 0 of 3, sums:    c0 (own chunk, sent first)   c2   c1 (the last one to be reduced here)
//!              totals:  c1 (complete here)           c0   c2
//! ```
//!
//! **Invariant:** a rank that waits for a rank of its own host waits for no network: the next steps
//! of followers depend on what the leader has completed, never on what it is doing. So the leader
//! may wait for followers in the middle of a transfer.
//!
//! **Invariant:** a total is computed once among all hosts and copied from there.
//!
//! **Invariant:** a rank leaves an operation only when all totals and notes are in this host's
//! memory.

use std::ops::Range;

use super::all_reduce::{BLOCK_LEN_MAX, SLOTS};
use super::host_region::HostRegion;
use super::leader_side::LeaderSide;
use super::mailboxes::Mail;
use super::notes::Notes;
use super::op_headers::NOTE_BYTES;
use super::region::{SharedRegion, WaitContext};
use crate::algorithm::chunk::{chunk, segment, segment_count};
use crate::algorithm::hosts::Hosts;
use crate::algorithm::payload::{Body, Halves, Payload};
use crate::algorithm::schedule::{RankInfo, Schedule, Span};
use crate::algorithm::wire_dtype::Half;
use crate::net::frame::OpTag;
use crate::net::neighbours::{LinkFault, Links};
use crate::transfer::{Fault, HostStage, LocalFault, Pair, Transfer};

/// Hierarchical all-reduce, from the view of one rank.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    hosts: Hosts,
    /// Index of this rank's host, and the number of hosts.
    host: RankInfo,
    /// Region shared by the ranks of this host; `None` if there is only one.
    host_region: Option<HostRegion>,
}

/// Ring of leaders, as a leader uses it.
pub(crate) struct LeaderRing<'a> {
    /// Links of the ring of all leaders.
    pub(crate) links: &'a Links,
    pub(crate) op_tag: OpTag,
    pub(crate) half: Option<Half>,
}

impl Hierarchy {
    /// `region`: shared by the ranks of this host, if there are several.
    pub(crate) fn new(hosts: Hosts, host: usize, region: Option<SharedRegion>) -> Self {
        let host = RankInfo { rank: host, world: hosts.count() };
        Self { hosts, host, host_region: region.map(HostRegion::new) }
    }

    /// Length of a host's memory in bytes.
    pub(crate) fn bytes(world: usize) -> usize {
        HostRegion::bytes(world)
    }

    /// Writes the sum of all ranks' `src` to `dst`. `leader_ring`: present if this rank is its
    /// host's leader.
    pub(crate) fn all_reduce(
        &mut self,
        context: WaitContext<'_>,
        leader_ring: Option<LeaderRing<'_>>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, Fault> {
        let result = match leader_ring {
            Some(leader_ring) => self.run_leader(context, &leader_ring, note, src, dst),
            None => self.run_follower(context, note, src, dst).map_err(Fault::Local),
        };
        if let (Err(_), Some(host_region)) = (&result, &self.host_region) {
            host_region.region.fail();
        }
        result
    }

    /// Begins the part of an exchange among the ranks of this host; `None` if there is only one.
    pub(crate) fn begin_exchange<'a>(
        &'a mut self,
        context: WaitContext<'a>,
        pairs: Vec<Pair<'a>>,
    ) -> Option<Mail<'a>> {
        Some(self.host_region.as_mut()?.begin_exchange(context, pairs))
    }

    fn run_leader(
        &mut self,
        context: WaitContext<'_>,
        leader_ring: &LeaderRing<'_>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, Fault> {
        let host = self.host;
        let (own, mut leader_side) =
            self.begin_leader(context, note, src.len()).map_err(Fault::Local)?;
        let mut notes = vec![Vec::new(); host.world];
        notes[host.rank] = own.encode();
        let span = span(src.len());
        let body = match leader_ring.half {
            None => Body::Sum { src, dst },
            Some(half) => Body::Rounded { src, dst, halves: Halves::new(half) },
        };
        let payload = Payload::new(body, notes).of_leader(leader_side.is_some());
        let schedule = Schedule::all_reduce(host, span);
        let WaitContext { registration, progress, .. } = context;
        let transfer = Transfer::new(
            leader_ring.links,
            registration,
            progress,
            leader_ring.op_tag,
            schedule,
            payload,
        );
        let host_stage = leader_side.as_mut().map(|side| -> &mut dyn HostStage { side });
        let all = transfer.between_hosts(host_stage).run()?;
        self.finish_leader(&all, span.len).map_err(|reason| Fault::Prev(LinkFault::Broken(reason)))
    }

    /// Begins an operation at the leader: collects the notes of its host, and sets up its side of
    /// the memory.
    fn begin_leader<'a>(
        &'a mut self,
        context: WaitContext<'a>,
        note: &[u8],
        len: usize,
    ) -> Result<(Notes, Option<LeaderSide<'a>>), LocalFault> {
        let own = match &mut self.host_region {
            Some(host_region) => host_region.begin(context, note, len)?,
            None if note.len() > NOTE_BYTES => Notes::TooLong,
            None => Notes::All(vec![note.to_vec()]),
        };
        Ok((
            own,
            self.host_region
                .as_ref()
                .map(|host_region| LeaderSide::new(host_region, context, self.host, span(len))),
        ))
    }

    /// Finishes an operation at the leader, with the notes of all hosts.
    fn finish_leader(&mut self, by_host: &[Vec<u8>], len: usize) -> Result<Notes, String> {
        let notes = Notes::merge(by_host, &self.hosts)?;
        if let Some(host_region) = &mut self.host_region {
            host_region.publish_notes(&notes);
            host_region.blocks += order(self.host, self.host.rank, span(len)).len() as u64;
        }
        Ok(notes)
    }

    fn run_follower(
        &mut self,
        context: WaitContext<'_>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, LocalFault> {
        let span = span(src.len());
        let RankInfo { rank: host, world: hosts } = self.host;
        let host_region =
            self.host_region.as_mut().expect("a follower shares memory with its leader");
        host_region.begin(context, note, src.len())?;
        let sums = order(self.host, host, span);
        let totals = order(self.host, host + 1, span);
        // The first total belongs to the first block of the last chunk. A follower continues to
        // write inputs concurrently, as far as its slots allow: the leader may wait for a total to
        // be read before it takes another sum.
        let last = chunk(span.len, hosts, (host + 1) % hosts);
        let lag = sums.len() - segment_count(&last, span.segment_len) + SLOTS as usize;
        for index in 0..sums.len() + lag {
            if let Some(range) = sums.get(index) {
                host_region.write_input(context, index, &src[range.clone()])?;
            }
            if let Some(index) = index.checked_sub(1)
                && let Some(range) = sums.get(index)
            {
                host_region.reduce(context, index, &src[range.clone()], &mut dst[range.clone()])?;
            }
            if let Some(index) = index.checked_sub(lag) {
                host_region.take_total(context, index, &mut dst[totals[index].clone()])?;
            }
        }
        host_region.blocks += sums.len() as u64;
        host_region.collect_notes(context, self.hosts.rank_count())
    }
}

/// Span of a buffer of `len` elements, in memory and between hosts.
fn span(len: usize) -> Span {
    Span { len, segment_len: BLOCK_LEN_MAX }
}

/// Blocks of a buffer in the order of one host: chunk by chunk, from the chunk of host `first`
/// downwards.
fn order(host: RankInfo, first: usize, span: Span) -> Vec<Range<usize>> {
    let hosts = host.world;
    let chunks = (0..hosts).map(|step| chunk(span.len, hosts, (first + hosts - step) % hosts));
    let segments = chunks.flat_map(|chunk| {
        let count = segment_count(&chunk, span.segment_len);
        (0..count).map(move |index| segment(&chunk, span.segment_len, index))
    });
    segments.collect()
}

#[cfg(test)]
mod tests;
