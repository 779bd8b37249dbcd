//! All-reduce of ranks that share memory.
//!
//! ```text
//! block k    write   each rank copies its contribution to the other ranks' chunks into its slot
//!            reduce  each rank reduces its own chunk from all slots into its result slot
//!            read    each rank copies the other ranks' chunks from their result slots
//! ```
//!
//! A buffer is processed in blocks that stay in the cache, with the three stages of successive
//! blocks pipelined. Memory bandwidth is the limit: 2·(n−1)/n copies and one sum, about three
//! passes over the buffer, where sockets take four copies through the kernel. Sums of up to 16 KiB
//! take one stage: each rank writes its contribution to its slot and reduces all slots itself.
//!
//! Each rank counts the blocks that it has written and reduced, and waits for the
//! [counters](super::region) of the other ranks.
//!
//! **Invariant:** a slot is rewritten only when all ranks have finished with its content; see
//! [`SLOTS`].
//!
//! **Invariant:** every element is summed in the same order for all ranks: by its chunk's owner
//! alone, or by every rank from rank 0 on.
//!
//! **Invariant:** a rank that has finished an operation does not wait until other ranks have read
//! its results: it may leave.

use std::ops::Range;

use super::mailboxes::{Mail, MailPlace, Mailboxes};
use super::notes::Notes;
use super::op_headers::OpHeaders;
use super::region::CounterSlot::{Begun, InputWritten, Reduced};
use super::region::{CounterSlot, LINE_BYTES, Scope, SharedRegion, WaitCondition, WaitContext};
use crate::algorithm::chunk::chunk;
use crate::algorithm::schedule::RankInfo;
use crate::transfer::{LocalFault, Pair};

/// Shared memory of a group, from the view of one rank.
#[derive(Debug)]
pub(crate) struct ShmGroup {
    region: SharedRegion,
    local: RankInfo,
    layout: Layout,
    /// Number of operations begun.
    operations: u64,
    /// Number of blocks of all previous operations.
    blocks: u64,
}

impl ShmGroup {
    pub(crate) fn new(region: SharedRegion) -> Self {
        let local = region.local;
        Self { region, local, layout: Layout { world: local.world }, operations: 0, blocks: 0 }
    }

    /// Length of a group's memory in bytes.
    pub(crate) fn bytes(world: usize) -> usize {
        Layout { world }.end()
    }

    /// Writes the sum of all ranks' `src` to `dst`.
    pub(crate) fn all_reduce(
        &mut self,
        context: WaitContext<'_>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, LocalFault> {
        let result = self.sum(context, note, src, dst);
        if result.is_err() {
            self.region.fail();
        }
        result
    }

    /// Begins an exchange.
    pub(crate) fn begin_exchange<'a>(
        &'a mut self,
        context: WaitContext<'a>,
        pairs: Vec<Pair<'a>>,
    ) -> Mail<'a> {
        let (op_headers, mailboxes) = (self.layout.op_headers(), self.layout.mailboxes());
        let place = MailPlace { op_headers, mailboxes, operation: self.operations };
        self.operations += 1;
        Mail::begin(&self.region, place, context, pairs)
    }

    fn sum(
        &mut self,
        context: WaitContext<'_>,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Notes, LocalFault> {
        let operation = self.operations;
        self.operations += 1;
        let is_small = size_of_val(src) <= SMALL_BYTES;
        self.layout.op_headers().post(&self.region, operation, context.sequence, note, src.len());
        if is_small {
            let slot = self.layout.small(self.local.rank, operation);
            self.region.memory.write(slot, bytemuck::cast_slice(src));
        }
        self.region.publish(Begun, operation + 1);
        let first_in = !is_small && !src.is_empty();
        if first_in {
            // The first block depends on no other rank, some of which may not have begun.
            self.write_input(0, src);
        }
        self.wait(context, Begun, operation + 1)?;
        let notes =
            self.layout.op_headers().collect(&self.region, context, operation, src.len())?;
        if is_small {
            self.sum_small(operation, dst);
            return Ok(notes);
        }
        let blocks = src.len().div_ceil(block_len(src.len()));
        for index in 1..blocks + 2 {
            if index < blocks {
                self.write_input(index, src);
            }
            if (1..=blocks).contains(&index) {
                self.reduce(context, index - 1, src, dst)?;
            }
            if index >= 2 {
                self.read_results(context, index - 2, dst)?;
            }
        }
        self.blocks += blocks as u64;
        Ok(notes)
    }

    fn sum_small(&self, operation: u64, dst: &mut [f32]) {
        for rank in 0..self.local.world {
            let part = self.region.memory.floats(self.layout.small(rank, operation), dst.len());
            match rank {
                0 => dst.copy_from_slice(part),
                _ => add(dst, part),
            }
        }
    }

    fn write_input(&self, index: usize, src: &[f32]) {
        let block = self.blocks + index as u64;
        let part = block_of(index, src.len());
        let own = chunk(part.len(), self.local.world, self.local.rank);
        self.region.write_input(self.layout.input(self.local.rank, block), &src[part], &own);
        self.region.publish(InputWritten, block + 1);
    }

    fn reduce(
        &self,
        context: WaitContext<'_>,
        index: usize,
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<(), LocalFault> {
        let RankInfo { rank, world } = self.local;
        let block = self.blocks + index as u64;
        self.wait(context, InputWritten, block + 1)?;
        let part = block_of(index, dst.len());
        let own = chunk(part.len(), world, rank);
        let (src, sum) = (&src[part.clone()][own.clone()], &mut dst[part][own.clone()]);
        let others = (0..world).filter(|other| *other != rank);
        for (turn, other) in others.enumerate() {
            let offset = self.layout.input(other, block) + own.start * size_of::<f32>();
            let part = self.region.memory.floats(offset, own.len());
            match turn {
                0 => sum
                    .iter_mut()
                    .zip(src)
                    .zip(part)
                    .for_each(|((sum, own), part)| *sum = own + part),
                _ => add(sum, part),
            }
        }
        self.region.memory.write(self.layout.output(rank, block), bytemuck::cast_slice(sum));
        self.region.publish(Reduced, block + 1);
        Ok(())
    }

    fn read_results(
        &self,
        context: WaitContext<'_>,
        index: usize,
        dst: &mut [f32],
    ) -> Result<(), LocalFault> {
        let RankInfo { rank, world } = self.local;
        let block = self.blocks + index as u64;
        self.wait(context, Reduced, block + 1)?;
        let part = block_of(index, dst.len());
        for other in (1..world).map(|step| (rank + step) % world) {
            let its = chunk(part.len(), world, other);
            let target = bytemuck::cast_slice_mut(&mut dst[part.clone()][its]);
            self.region.memory.read(self.layout.output(other, block), target);
        }
        Ok(())
    }

    /// Waits until the counters of all ranks have reached `count`.
    fn wait(
        &self,
        context: WaitContext<'_>,
        counter: CounterSlot,
        count: u64,
    ) -> Result<(), LocalFault> {
        self.region.wait(context, WaitCondition { scope: Scope::All, counter, count })
    }
}

pub(super) fn add(sum: &mut [f32], part: &[f32]) {
    for (sum, part) in sum.iter_mut().zip(part) {
        *sum += part;
    }
}

/// Elements of block `index` of a buffer.
fn block_of(index: usize, len: usize) -> Range<usize> {
    let block_len = block_len(len);
    index * block_len..len.min((index + 1) * block_len)
}

/// Number of elements in a block: small enough to pipeline the stages, large enough to limit the
/// synchronization.
fn block_len(len: usize) -> usize {
    (len / 16).clamp(BLOCK_LEN_MIN, BLOCK_LEN_MAX)
}

/// Layout of a group's memory. All offsets are in bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    world: usize,
}

impl Layout {
    fn op_headers(self) -> OpHeaders {
        OpHeaders { start: SharedRegion::bytes(self.world), world: self.world }
    }

    /// Offset of a rank's contribution to a small sum; two slots, as for operation headers.
    fn small(self, rank: usize, operation: u64) -> usize {
        self.op_headers().end() + (rank * 2 + (operation % 2) as usize) * SMALL_BYTES
    }

    fn input(self, rank: usize, block: u64) -> usize {
        self.small(self.world, 0) + (rank * SLOTS as usize + (block % SLOTS) as usize) * BLOCK_BYTES
    }

    fn output(self, rank: usize, block: u64) -> usize {
        let bytes = chunk(BLOCK_LEN_MAX, self.world, 0).len() * size_of::<f32>();
        let bytes = bytes.next_multiple_of(LINE_BYTES);
        self.input(self.world, 0) + (rank * SLOTS as usize + (block % SLOTS) as usize) * bytes
    }

    fn mailboxes(self) -> Mailboxes {
        Mailboxes::new(self.output(self.world, 0), self.world)
    }

    fn end(self) -> usize {
        self.mailboxes().end()
    }
}

/// Largest sum in which every rank reduces the whole buffer.
const SMALL_BYTES: usize = 16 << 10;

pub(super) const BLOCK_BYTES: usize = BLOCK_LEN_MAX * size_of::<f32>();

/// Smallest block. 1 MiB at two ranks took 189 µs in blocks of 64 KiB and 264 µs in blocks of 256
/// KiB; for 16 MiB the larger blocks were faster.
const BLOCK_LEN_MIN: usize = if cfg!(miri) { 256 } else { 16 << 10 };

/// Largest block; small under Miri, which is thousands of times slower per element.
pub(super) const BLOCK_LEN_MAX: usize = if cfg!(miri) { 1 << 10 } else { 64 << 10 };

/// Number of blocks in progress. A rank writes block `k` before it reduces `k−1`, and reduces `k−1`
/// before it reads the results of `k−2`. So when a rank writes `k`, it has read the results of
/// `k−3`, and all ranks have reduced `k−3`: its input slots are free. When a rank reduces `k`, all
/// ranks have written `k`, and so have read the results of `k−3`: its result slot is free.
pub(super) const SLOTS: u64 = 3;

/// Maximum number of ranks that share memory.
pub(crate) const HOST_RANKS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::Fence;
    use crate::net::progress::Progress;
    use crate::shm::Memory;

    /// Miri runs this test and checks that ranks never access memory that another rank uses.
    #[test]
    fn threads_that_share_memory_get_the_same_sums_and_all_notes() {
        let world = 3;
        thread::scope(|scope| {
            for (rank, memory) in
                Memory::of_threads(ShmGroup::bytes(world), world).into_iter().enumerate()
            {
                let region = SharedRegion::new(
                    memory,
                    RankInfo { rank, world },
                    (0..world).collect(),
                    Vec::new(),
                )
                .spinning();
                scope.spawn(move || {
                    let mut shared = ShmGroup::new(region);
                    let (registration, progress) =
                        (Fence::new().register(1).unwrap(), Progress::new());
                    // Empty sums, small ones, and sums of more blocks than there are slots.
                    let small = SMALL_BYTES / size_of::<f32>();
                    let long = small.max(6 * BLOCK_LEN_MIN) + 1;
                    for (sequence, len) in [0, 5, small, long, 5, 5, long].into_iter().enumerate() {
                        let (registration, progress) = (&registration, &progress);
                        let context = WaitContext {
                            host: None,
                            ring: None,
                            registration,
                            progress,
                            sequence: sequence as u64,
                        };
                        let src: Vec<f32> = (0..len).map(|at| (rank + at % 7) as f32).collect();
                        let mut dst = vec![f32::NAN; len];
                        let notes =
                            shared.all_reduce(context, &[rank as u8], &src, &mut dst).unwrap();
                        assert!(matches!(notes, Notes::All(notes) if notes == [[0], [1], [2]]));
                        let right = |at: usize| (3 * (at % 7) + 3) as f32;
                        assert!(
                            dst.iter().enumerate().all(|(at, sum)| *sum == right(at)),
                            "len {len}"
                        );
                    }
                });
            }
        });
    }
}
