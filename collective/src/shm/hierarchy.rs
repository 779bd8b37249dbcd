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

use super::all_reduce::{BLOCK_BYTES, BLOCK_LEN_MAX, SLOTS, add};
use super::link_monitor::LinkMonitor;
use super::op_headers::{NOTE_BYTES, Notes, OpHeaders};
use super::region::CounterSlot::{
    Begun, InputWritten, NotesPublished, Reduced, Sent, TotalPublished, TotalTaken,
};
use super::region::{CounterSlot, Scope, SharedFault, SharedRegion, WaitCondition, WaitContext};
use crate::algorithm::chunk::{chunk, segment, segment_count};
use crate::algorithm::hosts::Hosts;
use crate::algorithm::payload::{Body, Halves, Payload};
use crate::algorithm::schedule::{RankInfo, Schedule, Span};
use crate::algorithm::wire_dtype::Half;
use crate::group::host_group::Links;
use crate::transfer::{Fault, LinkFault, OpTag, Transfer, to_wire};

/// Hierarchical all-reduce, from the view of one rank.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    hosts: Hosts,
    /// Index of this rank's host, and the number of hosts.
    host: RankInfo,
    /// Region shared by the ranks of this host; `None` if there is only one.
    host_region: Option<HostRegion>,
}

/// Region of a host, from the view of one rank.
#[derive(Debug)]
struct HostRegion {
    region: SharedRegion,
    layout: Layout,
    /// Number of operations begun.
    operations: u64,
    /// Number of blocks of all previous operations.
    blocks: u64,
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
        let host_region = region.map(|region| {
            let layout = Layout { world: region.local.world };
            HostRegion { region, layout, operations: 0, blocks: 0 }
        });
        Self { hosts, host, host_region }
    }

    /// Length of a host's memory in bytes.
    pub(crate) fn bytes(world: usize) -> usize {
        Layout { world }.end()
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

    fn run_leader(
        &mut self,
        context: WaitContext<'_>,
        leader_ring: &LeaderRing<'_>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, Fault> {
        let host = self.host;
        let (own, leader_side) =
            self.begin_leader(context, note, src.len()).map_err(Fault::Local)?;
        let mut notes = vec![Vec::new(); host.world];
        notes[host.rank] = encode(&own);
        let region = leader_side.as_ref().map(|leader_side| &leader_side.host_region.region);
        let span = span(src.len());
        let body = match leader_ring.half {
            None => Body::Sum { src, dst },
            Some(half) => Body::Rounded { src, dst, halves: Halves::new(half) },
        };
        let payload = Payload::new(body, notes).with_leader_side(leader_side);
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
        let all = transfer.alongside(LinkMonitor::new(context), region).run()?;
        self.finish_leader(&all, span.len).map_err(|reason| Fault::Prev(LinkFault::Broken(reason)))
    }

    /// Begins an operation at the leader: collects the notes of its host, and sets up its side of
    /// the memory.
    fn begin_leader<'a>(
        &'a mut self,
        context: WaitContext<'a>,
        note: &[u8],
        len: usize,
    ) -> Result<(Notes, Option<LeaderSide<'a>>), SharedFault> {
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
        let notes = decode(by_host, &self.hosts)?;
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
    ) -> Result<Notes, SharedFault> {
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

impl HostRegion {
    /// Posts the operation header of this rank, and collects those of the other ranks.
    fn begin(
        &mut self,
        context: WaitContext<'_>,
        note: &[u8],
        len: usize,
    ) -> Result<Notes, SharedFault> {
        let operation = self.operations;
        self.operations += 1;
        self.layout.op_headers().post(&self.region, operation, context.sequence, note, len);
        self.region.publish(Begun, operation + 1);
        self.wait(context, Scope::All, Begun, operation + 1)?;
        self.layout.op_headers().collect(&self.region, context, operation, len)
    }

    fn write_input(
        &self,
        context: WaitContext<'_>,
        index: usize,
        src: &[f32],
    ) -> Result<(), SharedFault> {
        let block = self.blocks + index as u64;
        self.wait(context, Scope::Followers, Reduced, (block + 1).saturating_sub(SLOTS))?;
        let (own, slot) = (self.own(src.len()), self.layout.input(self.region.local.rank, block));
        self.region.memory.write(slot, bytemuck::cast_slice(&src[..own.start]));
        self.region
            .memory
            .write(slot + own.end * size_of::<f32>(), bytemuck::cast_slice(&src[own.end..]));
        self.region.publish(InputWritten, block + 1);
        Ok(())
    }

    /// `scratch`: the block of the output buffer, which the total overwrites later.
    fn reduce(
        &self,
        context: WaitContext<'_>,
        index: usize,
        src: &[f32],
        scratch: &mut [f32],
    ) -> Result<(), SharedFault> {
        let block = self.blocks + index as u64;
        self.wait(context, Scope::Followers, InputWritten, block + 1)?;
        self.wait(context, Scope::Leader, Sent, (block + 1).saturating_sub(SLOTS))?;
        let own = self.own(src.len());
        let sum = &mut scratch[own.clone()];
        sum.copy_from_slice(&src[own.clone()]);
        let start = own.start * size_of::<f32>();
        for other in (1..self.layout.world).filter(|other| *other != self.region.local.rank) {
            add(sum, self.region.memory.floats(self.layout.input(other, block) + start, own.len()));
        }
        self.region.memory.write(self.layout.sum(block) + start, bytemuck::cast_slice(sum));
        self.region.publish(Reduced, block + 1);
        Ok(())
    }

    fn take_total(
        &self,
        context: WaitContext<'_>,
        index: usize,
        dst: &mut [f32],
    ) -> Result<(), SharedFault> {
        let block = self.blocks + index as u64;
        self.wait(context, Scope::Leader, TotalPublished, block + 1)?;
        self.region.memory.read(self.layout.total(block), bytemuck::cast_slice_mut(dst));
        self.region.publish(TotalTaken, block + 1);
        Ok(())
    }

    /// Publishes the notes of all ranks, at the leader. The followers have read the notes of the
    /// previous operation: they have begun this one.
    fn publish_notes(&self, notes: &Notes) {
        let bytes = encode(notes);
        self.region.memory.write(self.layout.notes(), &(bytes.len() as u64).to_le_bytes());
        self.region.memory.write(self.layout.notes() + size_of::<u64>(), &bytes);
        self.region.publish(NotesPublished, self.operations);
    }

    fn collect_notes(&self, context: WaitContext<'_>, count: usize) -> Result<Notes, SharedFault> {
        self.wait(context, Scope::Leader, NotesPublished, self.operations)?;
        let mut bytes = [0; size_of::<u64>()];
        self.region.memory.read(self.layout.notes(), &mut bytes);
        let len = usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(ALL_NOTES_BYTES)];
        self.region.memory.read(self.layout.notes() + size_of::<u64>(), &mut bytes);
        decode_notes(&bytes, count).map_err(|reason| self.region.broken(0, reason))
    }

    /// Range of a block that this rank, a follower, reduces.
    fn own(&self, len: usize) -> Range<usize> {
        chunk(len, self.layout.world - 1, self.region.local.rank - 1)
    }

    /// Waits until the counters of these ranks have reached `count`.
    fn wait(
        &self,
        context: WaitContext<'_>,
        scope: Scope,
        counter: CounterSlot,
        count: u64,
    ) -> Result<(), SharedFault> {
        self.region.wait(context, WaitCondition { scope, counter, count })
    }
}

/// The leader's side of its host's memory in one operation. Sums and totals pass through it in the
/// order that all ranks of the host expect.
#[derive(Debug)]
pub(crate) struct LeaderSide<'a> {
    host_region: &'a HostRegion,
    context: WaitContext<'a>,
    /// Chunk of this host, whose sums are sent before anything is received.
    own: Range<usize>,
    segment_len: usize,
    /// Number of its segments that are reduced.
    own_summed: usize,
    hosts: usize,
    /// Number of blocks of all operations whose sums are taken.
    sent: u64,
    /// Number of blocks of all operations whose totals are published.
    published: u64,
}

impl<'a> LeaderSide<'a> {
    fn new(
        host_region: &'a HostRegion,
        context: WaitContext<'a>,
        host: RankInfo,
        span: Span,
    ) -> Self {
        let own = chunk(span.len, host.world, host.rank);
        let (sent, published) = (host_region.blocks, host_region.blocks);
        let Span { segment_len, .. } = span;
        Self {
            host_region,
            context,
            own,
            segment_len,
            own_summed: 0,
            hosts: host.world,
            sent,
            published,
        }
    }

    /// Returns the next segment of this host's chunk that is not reduced yet, if it is among the
    /// first `count`.
    pub(crate) fn next_own(&self, count: usize) -> Option<Range<usize>> {
        let all = segment_count(&self.own, self.segment_len);
        let is_left = self.own_summed < count.min(all);
        is_left.then(|| segment(&self.own, self.segment_len, self.own_summed))
    }

    /// Writes this host's sum of that segment to `sum`; `src` is the leader's contribution.
    pub(crate) fn sum_own(&mut self, src: &[f32], sum: &mut [f32]) -> Result<(), SharedFault> {
        sum.copy_from_slice(src);
        self.own_summed += 1;
        self.add(sum)
    }

    /// Adds the followers' sum of the next block.
    pub(crate) fn add(&mut self, sum: &mut [f32]) -> Result<(), SharedFault> {
        let (HostRegion { region, layout, .. }, block) = (self.host_region, self.sent);
        self.host_region.wait(self.context, Scope::Followers, Reduced, block + 1)?;
        add(sum, region.memory.floats(layout.sum(block), sum.len()));
        self.sent += 1;
        region.publish(Sent, self.sent);
        Ok(())
    }

    /// Whether the sum received in this ring step is the total once this host's contributions are
    /// added.
    pub(crate) fn completes(&self, step: usize) -> bool {
        step + 2 == self.hosts
    }

    /// Publishes the next block's total to the followers.
    pub(crate) fn publish_total(&mut self, total: &[f32]) -> Result<(), SharedFault> {
        let (HostRegion { region, layout, .. }, block) = (self.host_region, self.published);
        self.host_region.wait(
            self.context,
            Scope::Followers,
            TotalTaken,
            (block + 1).saturating_sub(SLOTS),
        )?;
        region.memory.write(layout.total(block), bytemuck::cast_slice(total));
        self.published += 1;
        region.publish(TotalPublished, self.published);
        Ok(())
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

/// Encodes notes, each after its length (u32); the encoding is empty if a note is too long.
fn encode(notes: &Notes) -> Vec<u8> {
    let Notes::All(notes) = notes else { return Vec::new() };
    let mut bytes = Vec::new();
    for note in notes {
        bytes.extend_from_slice(&to_wire(note.len()).to_le_bytes());
        bytes.extend_from_slice(note);
    }
    bytes
}

/// Decodes the notes of all ranks from the encodings of all hosts.
fn decode(by_host: &[Vec<u8>], hosts: &Hosts) -> Result<Notes, String> {
    let bytes: usize = by_host.iter().map(Vec::len).sum();
    let mut all = vec![Vec::new(); hosts.rank_count()];
    let mut is_too_long = bytes > ALL_NOTES_BYTES;
    for (host, bytes) in by_host.iter().enumerate() {
        match decode_notes(bytes, hosts.ranks(host).len())? {
            Notes::All(notes) => {
                hosts.ranks(host).iter().zip(notes).for_each(|(rank, note)| all[*rank] = note);
            }
            Notes::TooLong => is_too_long = true,
        }
    }
    Ok(if is_too_long { Notes::TooLong } else { Notes::All(all) })
}

fn decode_notes(mut bytes: &[u8], count: usize) -> Result<Notes, String> {
    if bytes.is_empty() {
        return Ok(Notes::TooLong);
    }
    let mut notes = Vec::with_capacity(count);
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((note, rest)) = rest.split_at_checked(length) else { break };
        notes.push(note.to_vec());
        bytes = rest;
    }
    match (bytes.len(), notes.len()) {
        (0, found) if found == count => Ok(Notes::All(notes)),
        (left, found) => Err(format!("expected {count} notes, got {found} and {left} bytes")),
    }
}

/// Layout of a host's memory. All offsets are in bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    world: usize,
}

impl Layout {
    fn op_headers(self) -> OpHeaders {
        OpHeaders { start: SharedRegion::bytes(self.world), world: self.world }
    }

    /// Offset of all ranks' notes: their length and their encoding, written by the leader.
    fn notes(self) -> usize {
        self.op_headers().end()
    }

    /// Offset of a follower's input block, which the other followers reduce.
    fn input(self, rank: usize, block: u64) -> usize {
        self.notes() + size_of::<u64>() + ALL_NOTES_BYTES + self.slot((rank - 1) as u64, block)
    }

    /// Offset of the sum of all followers.
    fn sum(self, block: u64) -> usize {
        self.input(self.world, 0) + self.slot(0, block)
    }

    fn total(self, block: u64) -> usize {
        self.sum(0) + self.slot(1, block)
    }

    fn end(self) -> usize {
        self.sum(0) + self.slot(2, 0)
    }

    fn slot(self, column: u64, block: u64) -> usize {
        (column * SLOTS + block % SLOTS) as usize * BLOCK_BYTES
    }
}

/// Maximum length of all notes together; longer ones are exchanged over TCP.
const ALL_NOTES_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests;
