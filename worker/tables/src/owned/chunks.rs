//! The state of an optimizer, divided over the workers of a job: the flat vector of parameters is
//! cut into chunks, and the slots of each chunk are a shard.
//!
//! ```text
//!   gradients ── sum over all ranks ──▶ stage: the sums of the chunks that a rank holds, or will
//!             ── headers ──▶ commit: slots and parameters of these chunks
//!             ── parameters of the chunks, from their owners ──▶ all ranks
//! ```
//!
//! A rank gives its header of a step only after it has staged the sums of the step, so every holder
//! of a chunk can commit a step that any rank has committed. All holders of a chunk have the same
//! bits: they get the same sums, and the update is a pure function of them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use super::round::StepCommit;
use super::saved::{ComparedShards, SavedShard};
use super::{Committed, Content, Ownership, Settings};
use crate::placement::Member;
use crate::wire::{InvalidRows, Message, put, put_u32};

/// A worker's chunks of the optimizer's state.
pub type Chunks = Ownership<ChunkLayout>;

/// A chunk as of a step.
pub type SavedChunk = SavedShard<Vec<f32>>;

/// How a flat vector of parameters is cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLayout {
    /// Number of parameters.
    pub parameters: usize,
    /// The first parameter with state: those before it, which no optimizer changes, have none.
    pub first: usize,
    /// Number of floats of the optimizer's state per parameter, from the first on.
    pub slots: usize,
    /// Number of parameters of a chunk; the last one may have fewer.
    pub chunk_len: usize,
}

/// Sums of the gradients of a step over all ranks, by chunk.
#[derive(Clone, Debug, Default)]
pub struct ChunkSums {
    /// `[parameters of the chunk]`, by number.
    pub sums: BTreeMap<u32, Vec<f32>>,
    /// Euclidean norm of the sum over all chunks, if the update needs it.
    pub norm: Option<f64>,
}

/// What the owner of a chunk, and its other holders, change with a step.
#[derive(Debug)]
pub struct ChunkUpdate<'a> {
    /// Number of the step, from 0.
    pub step: u64,
    /// The chunk's parameters, in the flat vector.
    pub range: Range<usize>,
    /// `[slots, parameters of the chunk]`, without the parameters before the layout's first one.
    pub slots: &'a mut [f32],
    /// `[parameters of the chunk]`. It has any values afterwards.
    pub sum: &'a mut [f32],
    /// As [`ChunkSums::norm`].
    pub norm: Option<f64>,
}

impl Content for ChunkLayout {
    /// `[slots, parameters of the chunk]`, without the parameters before the first one.
    type Shard = Vec<f32>;
    type Gradients = ChunkSums;
}

impl ChunkLayout {
    /// The chunks of so many parameters, with so many slots each.
    pub fn new(parameters: usize, slots: usize) -> Self {
        let chunk_len = parameters.div_ceil(CHUNKS_MAX).max(CHUNK_LEN_MIN);
        let chunk_len = chunk_len.next_multiple_of(CHUNK_LEN_UNIT);
        Self { parameters, first: 0, slots, chunk_len }
    }

    /// As these, but without state of the parameters before `first`.
    pub fn from(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// Number of chunks, at least 1.
    pub fn chunks(&self) -> u32 {
        self.parameters.div_ceil(self.chunk_len).max(1) as u32
    }

    /// The parameters of a chunk.
    pub fn range(&self, chunk: u32) -> Range<usize> {
        let start = chunk as usize * self.chunk_len;
        start..(start + self.chunk_len).min(self.parameters)
    }

    /// The chunks that begin within these parameters.
    pub fn chunks_in(&self, range: Range<usize>) -> Range<u32> {
        let at = |float: usize| float.div_ceil(self.chunk_len) as u32;
        at(range.start)..at(range.end).min(self.chunks())
    }

    /// Those of a chunk's parameters that have state, counted from the first one that has.
    fn with_state(&self, chunk: u32) -> Range<usize> {
        let Range { start, end } = self.range(chunk);
        start.saturating_sub(self.first)..end.saturating_sub(self.first)
    }

    /// Number of parameters with state, at least 1.
    fn slot_len(&self) -> usize {
        self.parameters.saturating_sub(self.first).max(1)
    }

    /// Number of floats of a chunk's slots.
    fn floats(&self, chunk: u32) -> usize {
        self.slots * self.with_state(chunk).len()
    }

    /// Takes the slots of a chunk out of those of all parameters with state: `[slots, parameters]`.
    pub fn cut(&self, chunk: u32, slots: &[f32]) -> SavedChunk {
        let of_slot = |slot: &[f32]| slot[self.with_state(chunk)].to_vec();
        let cut = slots.chunks_exact(self.slot_len()).flat_map(of_slot);
        SavedShard::new(chunk, cut.collect())
    }

    /// Digest of all slots: the sum, modulo 2^64, of those of the chunks, as [`Chunks::digest`] is
    /// over all ranks.
    pub fn digest(&self, slots: &[f32]) -> u64 {
        let of_chunk = |chunk: u32| {
            let mut digest = Xxh3::with_seed(u64::from(chunk) | CHUNK);
            for slot in slots.chunks_exact(self.slot_len()) {
                digest.update(bytemuck::cast_slice(&slot[self.with_state(chunk)]));
            }
            digest.digest()
        };
        (0..self.chunks()).map(of_chunk).fold(0, u64::wrapping_add)
    }

    /// Puts the slots of a chunk where they belong in those of all parameters.
    pub fn paste(&self, chunk: u32, cut: &[f32], slots: &mut [f32]) {
        let range = self.with_state(chunk);
        let parts = cut.chunks_exact(range.len().max(1));
        for (slot, part) in slots.chunks_exact_mut(self.slot_len()).zip(parts) {
            slot[range.clone()].copy_from_slice(part);
        }
    }

    /// Reads what [`SavedChunk::encode`](SavedShard::encode) has written of a chunk.
    ///
    /// # Errors
    /// It is no chunk of this number.
    pub fn decode(&self, chunk: u32, bytes: &[u8]) -> Result<SavedChunk, InvalidRows> {
        let mut message = Message(bytes);
        let slots =
            if chunk < self.chunks() { message.column(self.floats(chunk))? } else { vec![] };
        if !message.is_empty() {
            return Err(InvalidRows(format!("{} bytes after chunk {chunk}", message.0.len())));
        }
        Ok(SavedShard::new(chunk, slots))
    }
}

impl Chunks {
    /// Worker `me`, without any state.
    pub fn of_optimizer(me: u64, layout: ChunkLayout) -> Self {
        let bytes = layout.parameters as u64 * size_of::<f32>() as u64;
        let copy_bytes = COPY_BYTES_MIN.max(bytes / COPY_STEPS);
        let (shards, copies) = (layout.chunks(), COPIES);
        let settings = Settings { seed: 0, shards, copies, lag: 0, copy_bytes, copy_rate: 0 };
        Self::of(me, settings, layout)
    }

    /// Sets how many bytes a worker sends and receives between two steps, to copy chunks; at least
    /// one chunk.
    pub fn copying(mut self, bytes: u64) -> Self {
        self.settings.copy_bytes = bytes;
        self
    }

    /// How the parameters are cut.
    pub fn layout(&self) -> ChunkLayout {
        self.content
    }

    /// The group of these members, in the order of their ranks, starts anew, at step 0: all slots
    /// are zero.
    pub fn create(&mut self, generation: u64, members: Vec<Member>) {
        self.create_with(generation, members, &[]);
    }

    /// As [`create`](Self::create), but for the first slot of each parameter: `[parameters]`.
    pub fn create_with(&mut self, generation: u64, members: Vec<Member>, first: &[f32]) {
        let state = |chunk| {
            let mut slots = vec![0.0; self.content.floats(chunk)];
            if let Some(first) = first.get(self.content.range(chunk)) {
                slots[..first.len()].copy_from_slice(first);
            }
            SavedShard::new(chunk, slots)
        };
        let shards = self.shards_at_start(&members).into_iter().map(state).collect();
        self.restore(0, (generation, members), shards);
    }

    /// What to give each rank, so that it holds the chunks that it should; `None` if all do. All
    /// ranks come to the same.
    ///
    /// # Panics
    /// The worker is in no group, as below.
    pub fn copies(&self) -> Option<Vec<Vec<u8>>> {
        let group = self.group();
        if group.copies.is_empty() {
            return None;
        }
        let mut messages = vec![Vec::new(); group.members.len()];
        for copy in group.copies.iter().filter(|copy| copy.from == self.me) {
            let message = &mut messages[group.rank(copy.to)];
            put_u32(message, copy.shard as usize);
            put(message, &self.committed().shards[&copy.shard]);
        }
        Some(messages)
    }

    /// Takes in the [copies](Self::copies) that all ranks have given to this one.
    ///
    /// # Errors
    /// A message is invalid.
    pub fn receive_copies(&mut self, messages: &[Vec<u8>]) -> Result<(), InvalidRows> {
        let mut messages: Vec<Message<'_>> = messages.iter().map(|m| Message(m)).collect();
        let group = self.group();
        let mut copied = BTreeMap::new();
        for copy in group.copies.iter().filter(|copy| copy.to == self.me) {
            let message = &mut messages[group.rank(copy.from)];
            let chunk = message.u32()?;
            if chunk != copy.shard {
                return Err(InvalidRows(format!("chunk {chunk} in place of {}", copy.shard)));
            }
            copied.insert(chunk, Arc::new(message.column(self.content.floats(chunk))?));
        }
        if let Some(rest) = messages.iter().find(|message| !message.is_empty()) {
            return Err(InvalidRows(format!("{} bytes more than asked for", rest.0.len())));
        }
        self.group_mut().copied = copied;
        Ok(())
    }

    /// As [`copies`](Self::copies), when some ranks are about to leave.
    pub fn handed_over(&mut self) -> Option<Vec<Vec<u8>>> {
        if self.plan_hand_over() { self.copies() } else { None }
    }

    /// Takes in what all ranks have [handed over](Self::handed_over).
    ///
    /// # Errors
    /// As for [`receive_copies`](Self::receive_copies).
    pub fn take_over(&mut self, messages: &[Vec<u8>]) -> Result<(), InvalidRows> {
        self.receive_copies(messages)?;
        self.hold_copies();
        Ok(())
    }

    /// Whether this worker needs the sum of a chunk: it holds the chunk, or is about to.
    pub fn needs_sum(&self, chunk: u32) -> bool {
        let is_copied = || {
            let mut copies = self.group().copies.iter();
            copies.any(|copy| copy.shard == chunk && copy.to == self.me)
        };
        self.committed().shards.contains_key(&chunk) || is_copied()
    }

    /// Keeps the sums of all chunks that this worker [needs](Self::needs_sum) until the step is
    /// committed.
    pub fn stage(&mut self, sums: ChunkSums) {
        let is_whole = |chunk| self.needs_sum(chunk) == sums.sums.contains_key(&chunk);
        assert!((0..self.content.chunks()).all(is_whole), "sums of all chunks, and no others");
        let per_chunk = (self.content.slots * self.content.chunk_len * size_of::<f32>()) as u64;
        self.keep(sums, self.settings.copy_bytes / per_chunk.max(1));
    }

    /// The step after this worker's is committed: gives the chunks that it holds to `apply`, in
    /// their order, if the step is applied. Returns the sums, whose memory can be used again, or
    /// `None` if nothing is staged of the step, so that this worker holds no chunks of it.
    pub fn commit(
        &mut self,
        StepCommit { generation, is_applied, .. }: StepCommit,
        apply: impl FnOnce(Vec<ChunkUpdate<'_>>),
    ) -> Option<ChunkSums> {
        let (mut gradients, placement) = self.take_staged(generation)?;
        let Committed { step, shards, .. } = self.committed.as_mut().expect("sums are staged");
        if is_applied {
            let mut sums: BTreeMap<_, _> = gradients.sums.iter_mut().collect();
            let updates = shards.iter_mut().map(|(chunk, slots)| {
                let sum = sums.remove(chunk).expect("the sums of all held chunks are staged");
                let (step, range, norm) = (*step, self.content.range(*chunk), gradients.norm);
                let slots = Arc::make_mut(slots).as_mut_slice();
                ChunkUpdate { step, range, slots, sum, norm }
            });
            apply(updates.collect());
        }
        self.advance(generation, placement);
        Some(gradients)
    }

    /// The slots of the chunks that this worker holds.
    pub fn slots(&self) -> impl Iterator<Item = (u32, &[f32])> {
        self.held().map(|(chunk, slots)| (chunk, slots.as_slice()))
    }

    /// The slots of a chunk, if this worker holds it.
    pub fn slots_of(&self, chunk: u32) -> Option<&[f32]> {
        self.committed.as_ref()?.shards.get(&chunk).map(|slots| slots.as_slice())
    }

    /// The ranks that hold a chunk as of the last commit, first the one that answers for it.
    pub fn holders(&self, chunk: u32) -> Vec<usize> {
        self.group().holders(chunk).collect()
    }

    /// The ranks that [need the sum](Self::needs_sum) of a chunk, first its owner.
    pub fn receivers(&self, chunk: u32) -> Vec<usize> {
        self.group().receivers(chunk)
    }

    /// Digest of the chunks that this worker owns. The sum over all ranks, modulo 2^64, does not
    /// depend on who owns what.
    pub fn digest(&self) -> u64 {
        let digests = self.owned_shards().map(|(chunk, slots)| digest(chunk, slots));
        digests.fold(0, u64::wrapping_add)
    }

    /// Digest of the chunk that is compared after the last commit, if this worker holds it: another
    /// one after each step.
    pub fn window_digest(&self) -> Option<u64> {
        let committed = self.committed.as_ref()?;
        let chunk = (committed.step % u64::from(self.content.chunks())) as u32;
        committed.shards.get(&chunk).map(|slots| digest(chunk, slots))
    }

    /// The numbers of the chunks that each rank owns, by rank, and the chunks of this one, as of
    /// the last commit. Later commits do not change them.
    pub fn save(&self) -> (Vec<Vec<u32>>, Vec<SavedChunk>) {
        (self.of_ranks(), self.saved())
    }

    /// Memory of what this worker holds, with the sums of the next step, in bytes.
    pub fn bytes(&self) -> usize {
        let staged = self.staged.iter().flat_map(|staged| staged.gradients.sums.values());
        let floats = self.held().map(|(_, slots)| slots.len()).chain(staged.map(Vec::len));
        floats.sum::<usize>() * size_of::<f32>()
    }
}

impl ComparedShards<Vec<f32>> {
    /// The sum, modulo 2^64, of the digests of the chunks that a worker owns, once for each copy of
    /// another worker, less those of its own copies: 0 over all workers, if all are equal.
    pub fn balance(self) -> u64 {
        self.balance_of(|chunk, slots| digest(chunk, slots))
    }
}

impl SavedChunk {
    /// Its slots.
    pub fn slots(&self) -> &[f32] {
        &self.shard
    }

    /// Number of the chunk.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Whether all of them are finite.
    pub fn is_finite(&self) -> bool {
        self.shard.iter().all(|slot| slot.is_finite())
    }

    /// Its bytes, for [`ChunkLayout::decode`].
    pub fn encode(self) -> Vec<u8> {
        bytemuck::cast_slice(&self.shard[..]).to_vec()
    }
}

fn digest(chunk: u32, slots: &[f32]) -> u64 {
    xxh3_64_with_seed(bytemuck::cast_slice(slots), u64::from(chunk) | CHUNK)
}

/// What the seeds of the digests of chunks differ in from others.
const CHUNK: u64 = 1 << 34;

/// Number of workers that hold each chunk.
const COPIES: u32 = 2;

/// Most chunks: with eight workers and their copies, each holds 256.
const CHUNKS_MAX: usize = 1024;

/// A chunk of fewer parameters costs more for its place than for its content.
const CHUNK_LEN_MIN: usize = 4096;

/// A cache line of parameters.
const CHUNK_LEN_UNIT: usize = 16;

/// Bytes that a worker sends and receives between two steps, at least, to copy chunks, and the
/// number of steps in which it could send as much as there are parameters.
const COPY_BYTES_MIN: u64 = 4 << 20;
const COPY_STEPS: u64 = 32;

#[cfg(test)]
#[path = "chunks/tests.rs"]
mod tests;
