//! Memory of one host of several, from the view of one of its ranks: the steps of the followers,
//! and where everything lies.

use std::ops::Range;

use super::all_reduce::{BLOCK_BYTES, SLOTS, add};
use super::mailboxes::{Mail, MailPlace, Mailboxes};
use super::notes::{ALL_NOTES_BYTES, Notes};
use super::op_headers::OpHeaders;
use super::region::CounterSlot::{
    Begun, InputWritten, NotesPublished, Reduced, Sent, TotalPublished, TotalTaken,
};
use super::region::{CounterSlot, Scope, SharedRegion, WaitCondition, WaitContext};
use crate::algorithm::chunk::chunk;
use crate::transfer::{LocalFault, Pair};

/// Region of a host, from the view of one rank.
#[derive(Debug)]
pub(super) struct HostRegion {
    pub(super) region: SharedRegion,
    pub(super) layout: Layout,
    /// Number of operations begun.
    operations: u64,
    /// Number of blocks of all previous operations.
    pub(super) blocks: u64,
}

impl HostRegion {
    pub(super) fn new(region: SharedRegion) -> Self {
        let layout = Layout { world: region.local.world };
        Self { region, layout, operations: 0, blocks: 0 }
    }

    /// Length of a host's memory in bytes.
    pub(super) fn bytes(world: usize) -> usize {
        Layout { world }.end()
    }

    /// Posts the operation header of this rank, and collects those of the other ranks.
    pub(super) fn begin(
        &mut self,
        context: WaitContext<'_>,
        note: &[u8],
        len: usize,
    ) -> Result<Notes, LocalFault> {
        let operation = self.operations;
        self.operations += 1;
        self.layout.op_headers().post(&self.region, operation, context.sequence, note, len);
        self.region.publish(Begun, operation + 1);
        self.wait(context, Scope::All, Begun, operation + 1)?;
        self.layout.op_headers().collect(&self.region, context, operation, len)
    }

    /// Begins an exchange.
    pub(super) fn begin_exchange<'a>(
        &'a mut self,
        context: WaitContext<'a>,
        pairs: Vec<Pair<'a>>,
    ) -> Mail<'a> {
        let (op_headers, mailboxes) = (self.layout.op_headers(), self.layout.mailboxes());
        let place = MailPlace { op_headers, mailboxes, operation: self.operations };
        self.operations += 1;
        Mail::begin(&self.region, place, context, pairs)
    }

    pub(super) fn write_input(
        &self,
        context: WaitContext<'_>,
        index: usize,
        src: &[f32],
    ) -> Result<(), LocalFault> {
        let block = self.blocks + index as u64;
        self.wait(context, Scope::Followers, Reduced, (block + 1).saturating_sub(SLOTS))?;
        let (own, slot) = (self.own(src.len()), self.layout.input(self.region.local.rank, block));
        self.region.write_input(slot, src, &own);
        self.region.publish(InputWritten, block + 1);
        Ok(())
    }

    /// `scratch`: the block of the output buffer, which the total overwrites later.
    pub(super) fn reduce(
        &self,
        context: WaitContext<'_>,
        index: usize,
        src: &[f32],
        scratch: &mut [f32],
    ) -> Result<(), LocalFault> {
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

    pub(super) fn take_total(
        &self,
        context: WaitContext<'_>,
        index: usize,
        dst: &mut [f32],
    ) -> Result<(), LocalFault> {
        let block = self.blocks + index as u64;
        self.wait(context, Scope::Leader, TotalPublished, block + 1)?;
        self.region.memory.read(self.layout.total(block), bytemuck::cast_slice_mut(dst));
        self.region.publish(TotalTaken, block + 1);
        Ok(())
    }

    /// Publishes the notes of all ranks, at the leader. The followers have read the notes of the
    /// previous operation: they have begun this one.
    pub(super) fn publish_notes(&self, notes: &Notes) {
        let bytes = notes.encode();
        self.region.memory.write(self.layout.notes(), &(bytes.len() as u64).to_le_bytes());
        self.region.memory.write(self.layout.notes() + size_of::<u64>(), &bytes);
        self.region.publish(NotesPublished, self.operations);
    }

    pub(super) fn collect_notes(
        &self,
        context: WaitContext<'_>,
        count: usize,
    ) -> Result<Notes, LocalFault> {
        self.wait(context, Scope::Leader, NotesPublished, self.operations)?;
        let mut bytes = [0; size_of::<u64>()];
        self.region.memory.read(self.layout.notes(), &mut bytes);
        let len = usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(ALL_NOTES_BYTES)];
        self.region.memory.read(self.layout.notes() + size_of::<u64>(), &mut bytes);
        Notes::decode(&bytes, count).map_err(|reason| self.region.broken(0, reason))
    }

    /// Range of a block that this rank, a follower, reduces.
    fn own(&self, len: usize) -> Range<usize> {
        chunk(len, self.layout.world - 1, self.region.local.rank - 1)
    }

    /// Waits until the counters of these ranks have reached `count`.
    pub(super) fn wait(
        &self,
        context: WaitContext<'_>,
        scope: Scope,
        counter: CounterSlot,
        count: u64,
    ) -> Result<(), LocalFault> {
        self.region.wait(context, WaitCondition { scope, counter, count })
    }
}

/// Layout of a host's memory. All offsets are in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
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
    pub(super) fn sum(self, block: u64) -> usize {
        self.input(self.world, 0) + self.slot(0, block)
    }

    pub(super) fn total(self, block: u64) -> usize {
        self.sum(0) + self.slot(1, block)
    }

    fn mailboxes(self) -> Mailboxes {
        Mailboxes::new(self.sum(0) + self.slot(2, 0), self.world)
    }

    fn end(self) -> usize {
        self.mailboxes().end()
    }

    fn slot(self, column: u64, block: u64) -> usize {
        (column * SLOTS + block % SLOTS) as usize * BLOCK_BYTES
    }
}
