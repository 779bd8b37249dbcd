//! The order in which the records of an epoch are trained.
//!
//! Gradients and the ledger name **positions** in this order, from 0. Only reading and the
//! reports about records need the records themselves, which are numbered through the files of the
//! data set. The order depends on the data set's files, the seed and the epoch alone: not on the
//! workers, nor on time.
//!
//! | `--shuffle` | position `p` holds |
//! |---|---|
//! | `none` | record `p` |
//! | `record` | the record that a permutation of all records maps `p` to |
//! | `block` | see [`Layout`]: blocks are permuted, then the records within a few blocks |
//!
//! The inverse, from a record to its position, lists no epoch either: a permutation is a Feistel
//! network, which runs backwards, and the blocks before a block are counted, not permuted.
//!
//! **Invariant:** no IO. In each epoch every record has one position. A released version of the
//! order never changes: checkpoints hold positions.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::job::{Shuffle, ShuffleMode};
use crate::ranges::RecordRange;

/// The order of a data set's records in each epoch.
#[derive(Debug)]
pub struct Order {
    seed: u64,
    /// Number of records of the data set.
    records: u64,
    kind: Kind,
}

/// An order, as checkpoints name it. Its field names are a public format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderName {
    /// What is shuffled; not [`ShuffleMode::Auto`].
    pub mode: ShuffleMode,
    /// The seed; 0 where nothing is shuffled.
    pub seed: u64,
    /// Records of a block; 0 where no blocks are shuffled.
    pub block: u64,
    /// Least number of records that are mixed at a time; 0 where no blocks are shuffled.
    pub buffer: u64,
}

/// How the records of a data set are read well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// The program orders its records itself: nothing is shuffled by default.
    #[doc(hidden)]
    Ordered,
    /// Single records, in any order: all records of an epoch are shuffled.
    Record,
    /// This many consecutive records at a time: blocks are shuffled, and the records of a few
    /// blocks among each other.
    Block {
        /// Records of a block; at least 1.
        records: u64,
    },
}

#[derive(Debug)]
enum Kind {
    Blocks(Blocks),
    InOrder,
    Records,
}

impl fmt::Display for OrderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, seed, block, buffer } = self;
        match mode {
            ShuffleMode::Block => {
                write!(f, "--shuffle block:{buffer} --seed {seed}, in blocks of {block} records")
            }
            ShuffleMode::None => write!(f, "--shuffle none"),
            ShuffleMode::Auto | ShuffleMode::Record => write!(f, "--shuffle record --seed {seed}"),
        }
    }
}

/// Blocks of consecutive records of one file.
#[derive(Debug)]
struct Blocks {
    /// Records of a block, but for the last of each file, which may have fewer.
    records: u64,
    buffer: u64,
    /// First record of each block, and the number of all records.
    firsts: Vec<u64>,
    /// Layouts of the epochs that were used last.
    layouts: Mutex<BTreeMap<u32, Arc<Layout>>>,
}

/// The order of the blocks in one epoch. Consecutive blocks of this order form a buffer as soon as
/// they hold enough records; the records of a buffer are permuted.
#[derive(Debug)]
struct Layout {
    blocks: Vec<u32>,
    /// First position of each block if nothing were permuted within buffers, and the number of all
    /// records.
    starts: Vec<u64>,
    /// For each buffer, its first block in `blocks`, and the number of all blocks.
    buffers: Vec<usize>,
    epoch: u32,
}

impl Order {
    /// The order that `shuffle` and `seed` choose for files of these numbers of records, and for a
    /// reader with this access.
    #[must_use]
    pub fn new(shuffle: Shuffle, seed: u64, files: &[u64], access: Access) -> Self {
        let cut = |records| Kind::Blocks(Blocks::cut(files, records, shuffle.buffer));
        let kind = match (shuffle.mode, access) {
            (ShuffleMode::None, _) | (ShuffleMode::Auto, Access::Ordered) => Kind::InOrder,
            (ShuffleMode::Auto | ShuffleMode::Block, Access::Block { records }) => cut(records),
            (ShuffleMode::Block, _) => cut(BLOCK_RECORDS),
            (ShuffleMode::Auto | ShuffleMode::Record, _) => Kind::Records,
        };
        Self { seed, records: files.iter().sum(), kind }
    }

    /// The order of the data itself.
    #[must_use]
    pub fn of_data(files: &[u64]) -> Self {
        Self::new(Shuffle::NONE, 0, files, Access::Record)
    }

    /// The order of this name, of files of these numbers of records.
    #[must_use]
    pub fn named(name: OrderName, files: &[u64]) -> Self {
        let OrderName { mode, seed, block, buffer } = name;
        let shuffle = Shuffle { mode, buffer: NonZeroU64::new(buffer) };
        Self::new(shuffle, seed, files, Access::Block { records: block })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> OrderName {
        let (mode, block, buffer) = match &self.kind {
            Kind::Blocks(blocks) => (ShuffleMode::Block, blocks.records, blocks.buffer),
            Kind::InOrder => (ShuffleMode::None, 0, 0),
            Kind::Records => (ShuffleMode::Record, 0, 0),
        };
        // Without a shuffle every seed gives the same order.
        let seed = if self.is_of_data() { 0 } else { self.seed };
        OrderName { mode, seed, block, buffer }
    }

    /// The position of `record`, which lies in the data set, in `epoch`: the inverse of
    /// [`records`](Self::records). Its time grows with the number of files, and slightly with that
    /// of blocks.
    #[must_use]
    pub fn position(&self, epoch: u32, record: u64) -> u64 {
        match &self.kind {
            Kind::Blocks(blocks) => blocks.position(self.seed, epoch, record),
            Kind::InOrder => record,
            Kind::Records => {
                Permutation::new(self.records, self.seed, epoch, Purpose::Records).index_of(record)
            }
        }
    }

    /// The records at these positions, which lie in the data set.
    #[must_use]
    pub fn records(&self, positions: RecordRange) -> Vec<u64> {
        let RecordRange { epoch, start, end } = positions;
        match &self.kind {
            Kind::Blocks(blocks) => {
                let layout = blocks.layout(self.seed, epoch);
                (start..end).map(|at| blocks.record(&layout, self.seed, at)).collect()
            }
            Kind::InOrder => (start..end).collect(),
            Kind::Records => {
                let all = Permutation::new(self.records, self.seed, epoch, Purpose::Records);
                (start..end).map(|at| all.at(at)).collect()
            }
        }
    }

    /// The records at these positions as few ranges, in ascending order: at most 256.
    #[must_use]
    pub fn ranges(&self, positions: &[RecordRange]) -> Vec<RecordRange> {
        let mut ranges: Vec<RecordRange> = Vec::new();
        let mut records: Vec<(u32, u64)> = positions
            .iter()
            .flat_map(|range| self.records(*range).into_iter().map(|record| (range.epoch, record)))
            .collect();
        records.sort_unstable();
        for (epoch, record) in records {
            match ranges.last_mut() {
                Some(last) if last.epoch == epoch && last.end == record => last.end += 1,
                _ => ranges.push(RecordRange { epoch, start: record, end: record + 1 }),
            }
            if ranges.len() > RANGES_MAX {
                ranges.pop();
                break;
            }
        }
        ranges
    }

    /// Whether positions are records.
    #[must_use]
    pub fn is_of_data(&self) -> bool {
        matches!(self.kind, Kind::InOrder)
    }

    /// The records of the block that holds `record`; `None` where no blocks are shuffled.
    #[must_use]
    pub fn block(&self, record: u64) -> Option<Range<u64>> {
        let Kind::Blocks(blocks) = &self.kind else { return None };
        let block = blocks.firsts.partition_point(|&first| first <= record) - 1;
        Some(blocks.firsts[block]..blocks.firsts[block + 1])
    }

    /// Number of records of the largest buffer, where blocks are shuffled.
    #[must_use]
    pub fn buffer(&self) -> u64 {
        match &self.kind {
            Kind::Blocks(blocks) => blocks.buffer.saturating_add(blocks.records),
            Kind::InOrder | Kind::Records => 0,
        }
    }
}

impl Blocks {
    fn cut(files: &[u64], records: u64, buffer: Option<NonZeroU64>) -> Self {
        let total: u64 = files.iter().sum();
        let records = records.max(1).max(total / BLOCKS_MAX);
        let (mut firsts, mut at) = (Vec::new(), 0);
        for file in files.iter().filter(|file| **file > 0) {
            let blocks = file.div_ceil(records);
            firsts.extend((0..blocks).map(|block| at + block * records));
            at += file;
        }
        firsts.push(at);
        let buffer = buffer.map_or(BUFFER_RECORDS, NonZeroU64::get);
        Self { records, buffer, firsts, layouts: Mutex::default() }
    }

    fn layout(&self, seed: u64, epoch: u32) -> Arc<Layout> {
        let mut layouts = self.layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(layout) = layouts.get(&epoch) {
            return Arc::clone(layout);
        }
        if layouts.len() >= EPOCHS_KEPT {
            layouts.pop_first();
        }
        let layout = Arc::new(Layout::new(self, seed, epoch));
        layouts.insert(epoch, Arc::clone(&layout));
        layout
    }

    fn record(&self, layout: &Layout, seed: u64, position: u64) -> u64 {
        let block = layout.starts.partition_point(|&start| start <= position) - 1;
        let buffer = layout.buffers.partition_point(|&first| first <= block) - 1;
        let (first, end) = (layout.buffers[buffer], layout.buffers[buffer + 1]);
        let (start, len) = (layout.starts[first], layout.starts[end] - layout.starts[first]);
        let within = Permutation::new(len, seed, layout.epoch, Purpose::Buffer(buffer as u64));
        let at = start + within.at(position - start);
        let block = layout.starts[first..end].partition_point(|&start| start <= at) - 1 + first;
        self.firsts[layout.blocks[block] as usize] + (at - layout.starts[block])
    }

    /// The position of `record` in `epoch`. Of the layout only the places of blocks that are
    /// shorter than the others are needed, and the numbers of the buffers.
    fn position(&self, seed: u64, epoch: u32, record: u64) -> u64 {
        let count = self.firsts.len() as u64 - 1;
        let all = Permutation::new(count, seed, epoch, Purpose::Blocks);
        let block = self.firsts.partition_point(|&first| first <= record) - 1;
        let (place, offset) = (all.index_of(block as u64), record - self.firsts[block]);
        let lengths = self.firsts.windows(2).map(|pair| pair[1] - pair[0]);
        let short = (0..).zip(lengths).filter(|(_, len)| *len < self.records);
        let mut short: Vec<(u64, u64)> =
            short.map(|(block, len)| (all.index_of(block), len)).collect();
        short.sort_unstable();
        let mut short = short.into_iter().peekable();
        // Blocks of a buffer that has no short one.
        let whole = self.buffer.div_ceil(self.records);
        let (mut end, mut at) = (0_u64, 0);
        for buffer in 0.. {
            let (first, start, mut found) = (end, at, None);
            let next_short = short.peek().map_or(count, |(place, _)| *place);
            if first.saturating_add(whole) <= next_short {
                (end, at) = (first + whole, start + whole * self.records);
                found = (first..end).contains(&place).then(|| (place - first) * self.records);
            }
            // The others are gone through, up to the end of the buffer.
            while end < count && at - start < self.buffer {
                found = found.or_else(|| (end == place).then_some(at - start));
                let is_short = short.next_if(|(place, _)| *place == end);
                at += is_short.map_or(self.records, |(_, len)| len);
                end += 1;
            }
            if let Some(before) = found {
                let buffer = Purpose::Buffer(buffer);
                let within = Permutation::new(at - start, seed, epoch, buffer);
                return start + within.index_of(before + offset);
            }
        }
        unreachable!("each block has a place")
    }
}

impl Layout {
    fn new(cut: &Blocks, seed: u64, epoch: u32) -> Self {
        let count = cut.firsts.len() as u64 - 1;
        let all = Permutation::new(count, seed, epoch, Purpose::Blocks);
        let blocks: Vec<u32> = (0..count).map(|at| all.at(at) as u32).collect();
        let (mut starts, mut buffers, mut at) = (Vec::new(), vec![0], 0);
        for (i, &block) in blocks.iter().enumerate() {
            if at - starts.get(buffers[buffers.len() - 1]).copied().unwrap_or(at) >= cut.buffer {
                buffers.push(i);
            }
            starts.push(at);
            at += cut.firsts[block as usize + 1] - cut.firsts[block as usize];
        }
        starts.push(at);
        buffers.push(blocks.len());
        Self { blocks, starts, buffers, epoch }
    }
}

/// A pseudo-random permutation of `0..len` that takes no memory: a Feistel network over the least
/// even number of bits that hold `len`. Results outside are permuted again (cycle walking).
///
/// Black & Rogaway, Ciphers with arbitrary finite domains (CT-RSA 2002).
#[derive(Debug)]
struct Permutation {
    len: u64,
    /// Bits of each of the two halves.
    bits: u32,
    keys: [u64; ROUNDS],
}

/// What is permuted; each has keys of its own.
#[derive(Clone, Copy)]
enum Purpose {
    Records,
    Blocks,
    Buffer(u64),
    /// A stratum of the records, of which validation data is chosen.
    Stratum(u64),
}

/// A permutation of `0..len` that `seed` and `number` determine.
pub(crate) fn permuted(len: u64, seed: u64, number: u64) -> impl Fn(u64) -> u64 {
    let permutation = Permutation::new(len, seed, 0, Purpose::Stratum(number));
    move |index| permutation.at(index)
}

impl Permutation {
    fn new(len: u64, seed: u64, epoch: u32, purpose: Purpose) -> Self {
        let (kind, number) = match purpose {
            Purpose::Records => (0u64, 0),
            Purpose::Blocks => (1, 0),
            Purpose::Buffer(number) => (2, number),
            Purpose::Stratum(number) => (3, number),
        };
        let bits = (u64::BITS - len.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
        let mut input = [0; 40];
        for (i, word) in [seed, epoch.into(), kind, number].into_iter().enumerate() {
            input[8 * i..8 * i + 8].copy_from_slice(&word.to_le_bytes());
        }
        let keys = std::array::from_fn(|round| {
            input[32..].copy_from_slice(&(round as u64).to_le_bytes());
            xxh3_64(&input)
        });
        Self { len, bits, keys }
    }

    fn at(&self, index: u64) -> u64 {
        let mut at = index;
        loop {
            at = self.mix(at);
            if at < self.len {
                return at;
            }
        }
    }

    /// The index that the permutation maps to `value`: the inverse of [`at`](Self::at).
    fn index_of(&self, value: u64) -> u64 {
        let mut at = value;
        loop {
            at = self.unmix(at);
            if at < self.len {
                return at;
            }
        }
    }

    fn mix(&self, value: u64) -> u64 {
        let mask = (1 << self.bits) - 1;
        let (mut left, mut right) = (value >> self.bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (scramble(right ^ key) & mask));
        }
        (left << self.bits) | right
    }

    /// The inverse of [`mix`](Self::mix).
    fn unmix(&self, value: u64) -> u64 {
        let mask = (1 << self.bits) - 1;
        let (mut left, mut right) = (value >> self.bits, value & mask);
        for key in self.keys.into_iter().rev() {
            (left, right) = (right ^ (scramble(left ^ key) & mask), left);
        }
        (left << self.bits) | right
    }
}

/// The finalizer of SplitMix64.
fn scramble(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Maximum number of ranges in a report about records.
const RANGES_MAX: usize = 256;
const ROUNDS: usize = 6;
/// Records of a block where the reader prefers none.
const BLOCK_RECORDS: u64 = 1024;
/// Default of N in `--shuffle block:N`.
const BUFFER_RECORDS: u64 = 8192;
/// A layout takes 12 bytes for each.
const BLOCKS_MAX: u64 = 1 << 24;
const EPOCHS_KEPT: usize = 2;

#[cfg(test)]
mod tests;
